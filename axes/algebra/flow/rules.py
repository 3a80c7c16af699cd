"""The four rules: what an expression means for tensors that are sharded as they are.

1. What is annotated is explicit, what isn't flows.
2. The left side is an assertion (for a plain tensor: a declaration).
3. Data moves only where the right side differs from the left.
4. Nothing is left pending that the expression doesn't name.

`recipe` below reads top to bottom: sizes, the states of each operand's atoms, what all operands say
of an atom together, what is pending after the local computation, what the right side wants, and the
recipe that does it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from axes.algebra.errors import MeshError, ShardingError, SizeError, shortened, suggestion
from axes.algebra.flow.reading import KINDS, Axes, Mark, Reading, Slot, Term, is_name, read
from axes.algebra.flow.recipe import Input, Op, Output, Recipe, Shape
from axes.algebra.flow.states import (
    Digits,
    Entry,
    close,
    entries_of,
    is_even,
    land,
    pending_of,
    same_split,
    split,
    whole_sizes,
)
from axes.algebra.grammar import place_text
from axes.algebra.layout import Mode, NamedLayout
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import LINEAR, ShardedDim, ShardedFactor, Sharding
from axes.algebra.sizes import given_sizes

Named = tuple[NamedLayout, ...]

REDUCTIONS = ("sum", "mean", "max", "min", "prod", "any", "all")
"""The reductions by name; the first four also across ranks."""

_ACROSS = ("sum", "mean", "max", "min")


def recipe(
    kind: str,
    text: str,
    op: Op,
    shardings: tuple[Sharding | None, ...],
    shapes: tuple[Shape, ...],
    mesh: Mesh,
    sizes: tuple[tuple[str, Any], ...] = (),
) -> Recipe:
    """What the expression does to tensors with these shardings (None: plain tensors) and shapes.

    `shapes` are whole shapes where there is a sharding, else those of the local tensors. `mesh` is
    where names are looked up. Raises `ExpressionError`, `SizeError`, `MeshError` or `ShardingError`
    before anything happens.

    >>> mesh = Mesh("cp=2 tp=2")
    >>> print(recipe("rearrange", "b s@cp (h d) -> b s h@cp d", "", (None,), ((4, 8, 12),), mesh, (("h", 6),)))
    b s@cp (h d) -> b s h@cp d
      operand 1  b s@cp (h d)  ->  b s@cp h d    [4, 16, 12]
      result     b s@cp h d  ->  b s h@cp d    [4, 16, 6, 2]
    """
    assert kind in KINDS
    reading = read(kind, text, tuple(map(len, shapes)), _units(kind, text, shapes))
    carrier = _carrier(reading, mesh, shardings)
    _check_axes(reading, carrier)
    actual = [None if s is None else s.on(carrier).sized(shape) for s, shape in zip(shardings, shapes, strict=True)]
    return _Solver(reading, carrier, op, actual, shapes, sizes).recipe()


def _units(kind: str, text: str, shapes: tuple[Shape, ...]) -> frozenset[tuple[int, int]]:
    """The dims of size one, which `...` in an einsum broadcasts."""
    if kind != "einsum" or "..." not in text:
        return frozenset()
    return frozenset((i, d) for i, shape in enumerate(shapes) for d, extent in enumerate(shape) if extent == 1)


# --- the mesh and its names


def _carrier(reading: Reading, mesh: Mesh, shardings: Sequence[Sharding | None]) -> Mesh:
    """The mesh that the result lives on, knowing the names of the expression."""
    meshes = list(dict.fromkeys(s.mesh for s in shardings if s is not None))
    for name in reading.axes:
        if name not in mesh.namespace and not any(name in m.namespace for m in meshes):
            reading.fail(f"the mesh has no axis {shortened(name)}{_hint(name, mesh, reading)}", reading.span_of(name))
    if not meshes:
        return mesh
    home = meshes[0]
    other = next((m for m in meshes[1:] if m.universe != home.universe or m.layouts != home.layouts), None)
    if other is not None:
        raise MeshError(
            f"the tensors are on two meshes, {home!r} and {other!r}; "
            f"declare one on the other's mesh with axes.lift(x, mesh)\nin  {reading.text}"
        )
    if mesh.universe != home.universe:
        raise MeshError(f"the tensor is on {home!r}, which has other ranks than {mesh!r}\nin  {reading.text}")
    return _knowing(reading, home, mesh)


def _knowing(reading: Reading, home: Mesh, other: Mesh) -> Mesh:
    """`home` with the names that the expression takes from another mesh."""
    if other is home or (all(name in home.namespace for name in reading.axes) and other == home):
        return home
    namespace = dict(home.namespace)
    for name in reading.axes:
        layout = other.namespace.get(name)
        if layout is not None and namespace.setdefault(name, layout) != layout:
            raise MeshError(
                f"'{name}' is {home.described(name)} of {home!r}, on which the tensor is, and other ranks on "
                f"{other!r}; two meshes that meet give a name one meaning, so rename one\nin  {reading.text}"
            )
    return home if len(namespace) == len(home.namespace) else home._with(namespace=namespace)


def _hint(name: str, mesh: Mesh, reading: Reading) -> str:
    if name in reading.names:
        return f", but a dim of this name; axes: {', '.join(mesh.axis_names)}"
    return suggestion(name, mesh.namespace)


def _check_axes(reading: Reading, mesh: Mesh) -> None:
    """Every axis is made of the mesh's axes, and none is used twice, whatever its size."""
    for name in reading.axes:
        layout = mesh.namespace[name]
        if name not in mesh.axis_names and not mesh.layout_of_all.contains(layout):
            raise MeshError(
                f"axis '{name}' ({layout}) isn't made of the axes of {mesh!r}, on which the tensor is; "
                f"axes.lift or axes.reshard with mesh= moves it to one that has it\nin  {reading.text}"
            )
    for term in reading.terms:
        _check_once(reading, mesh, [u for slot in term.slots for u in _uses(slot)] + _pending_uses(term))
    every = [u for term in reading.operands for slot in term.slots for u in _uses(slot)]
    _check_once(reading, mesh, list(dict.fromkeys(every)))


def _uses(slot: Slot) -> list[tuple[str, str]]:
    """`(what, axis)` for every axis that a slot names."""
    if slot.axes is not None:
        return [(" ".join(slot.atoms), axis) for axis in slot.axes if axis != "*"]
    return [(mark.atom, axis) for mark in slot.marks for axis in mark.axes or () if axis != "*"]


def _pending_uses(term: Term) -> list[tuple[str, str]]:
    return [(f"| {p.op}", axis) for p in term.pending or () if p.place is not None for axis in p.place.names]


def _check_once(reading: Reading, mesh: Mesh, uses: Sequence[tuple[str, str]]) -> None:
    for at, (what, axis) in enumerate(uses):
        for before, other in uses[:at]:
            if axis == other or mesh.namespace[axis].overlaps(mesh.namespace[other]):
                both = f"'{axis}' is used twice" if axis == other else f"'{other}' and '{axis}' share ranks"
                places = f"by '{before}' and by '{what}'" if before != what else f"by '{what}'"
                reading.fail(f"{both}: {places}; an axis splits one dim or is pending", _second(reading, axis, other))


def _second(reading: Reading, axis: str, other: str) -> tuple[int, int]:
    """Where an axis is named for the second time."""
    spans = [span for _, axes, span in reading.places() if axes and axis in axes]
    return spans[1] if axis == other and len(spans) > 1 else reading.span_of(axis)


# --- operands


@dataclass(frozen=True)
class _Operand:
    """An operand's states: per dim, and per atom; `opened` where its dims had to be gathered first."""

    term: Term
    shape: Shape
    dims: tuple[ShardedDim, ...]
    opened: tuple[ShardedDim, ...]
    marks: tuple[ShardedDim, ...]
    pending: tuple[Entry, ...]
    same: Named

    def text(self) -> str:
        """The operand as it is, in the expression's names."""
        at, texts = 0, []
        for slot, dim in zip(self.term.slots, self.dims, strict=True):
            states = self.marks[at : at + len(slot.marks)]
            at += len(slot.marks)
            texts.append(_slot_text(slot, dim, states))
        clause = [f"{p}" for p in pending_of(self.pending)]
        return " ".join([*texts, *(["|", *clause] if clause else [])])


def _respec(operand: _Operand, atom: str, axes: Named) -> str:
    """The operand as it is, but for one name, which is split over `axes`."""
    dims, marks = list(operand.dims), list(operand.marks)
    for at, slot in enumerate(operand.term.slots):
        if slot.atoms == (atom,):
            dims[at] = split(atom, *axes)
    for at, (name, _) in enumerate(_marked(operand.term)):
        marks[at] = split(atom, *axes) if name == atom else marks[at]
    return replace(operand, dims=tuple(dims), marks=tuple(marks)).text()


def _slot_text(slot: Slot, dim: ShardedDim, states: Sequence[ShardedDim]) -> str:
    """A dim as it is: by its atoms where they are known, else as a whole."""
    atoms = ["..." if atom.startswith("...") else atom.split("#")[0] for atom in slot.atoms]
    if not atoms:
        return "1" + (f"@{place_text(dim.axes)}" if dim.axes else "")
    if len(atoms) == 1:
        state = states[0] if states else dim
        place = f"@{place_text(state.axes)}" if state.axes else ""
        return atoms[0] + place if len(state.factors) == 1 else str(state)
    if len(states) == len(atoms) and any(state.axes for state in states):
        return f"({' '.join(_slot_text(_single(a), s, (s,)) for a, s in zip(slot.atoms, states, strict=True))})"
    group = f"({' '.join(atoms)})"
    return group if not dim.axes else f"{group}@{place_text(dim.axes)}" if len(dim.factors) == 1 else str(dim)


def _single(atom: str) -> Slot:
    return Slot((Mark(atom),))


class _Solver:
    """One expression meeting its tensors. Steps are methods, in the order in which they happen."""

    def __init__(
        self,
        reading: Reading,
        mesh: Mesh,
        op: Op,
        shardings: Sequence[Sharding | None],
        shapes: Sequence[Shape],
        given: tuple[tuple[str, Any], ...],
    ):
        self.reading, self.mesh, self.op = reading, mesh, op
        self.is_global = shardings[0] is not None
        self.actual = shardings
        named = [*mesh.named(reading.axes)]
        for sharding in shardings:
            if sharding is not None:
                named += [a for dim in sharding.dims for a in dim.axes]
                named += [a for p in sharding.pending for a in p.axes]
        self.digits = Digits(mesh, named)
        self.mentioned = frozenset(self.digits.of(mesh.named(reading.axes)))
        self.sizes = self._sizes(shapes, dict(given))
        self.stars: dict[str, Named] = {}
        self.unclear: list[str] = []
        self.operands = [self._operand(i, shapes[i]) for i in range(len(shapes))]
        self.states = self._common()

    # sizes

    def _sizes(self, shapes: Sequence[Shape], given: dict[str, Any]) -> dict[str, int]:
        reading = self.reading
        inline = [_Item(name, size) for name, size in reading.inline]
        known: dict[str, int] = given_sizes(given, None, inline, reading.names)  # type: ignore[arg-type]
        for atom in {atom for term in reading.terms for atom in term.atoms}:
            if "#" in atom:
                known[atom] = int(atom.split("#")[0])
        sized = {**known, **self._known_wholes(known)}
        self.assumed: set[str] = set()
        equations = []
        for index, (term, shape) in enumerate(zip(reading.operands, shapes, strict=True)):
            for dim, (slot, extent) in enumerate(zip(term.slots, shape, strict=True)):
                count = 1 if self.is_global else math.prod(self.mesh.layout(a).size for _, a in _uses(slot))
                # A plain shard of a known size may be uneven; it is checked against its rank's share.
                if count == 1 or not all(a in sized for a in slot.atoms):
                    if count > 1:
                        self.assumed.update(a for a in slot.atoms if a not in sized)
                    where = f"dim {dim} of {list(shape)}" + (f", operand {index + 1}" if len(shapes) > 1 else "")
                    equations.append((slot.atoms, extent * count, f"{where}, in  {reading.text}"))
        for whole_name, inner in reading.wholes:
            self._check_whole(whole_name, inner, known)
        found = whole_sizes(equations, sized, _all_atoms(reading), reading.text)
        for whole_name, inner in reading.wholes:
            count = math.prod(known.get(name, 1) for name in inner)
            if found[whole_name] % count or (all(n in known for n in inner) and found[whole_name] != count):
                given_text = " * ".join(f"{n}={known[n]}" for n in inner if n in known)
                raise SizeError(
                    f"{found[whole_name]} isn't a multiple of  {given_text}  for {whole_name} in  {reading.text}"
                )
        return found

    def _check_whole(self, name: str, inner: Sequence[str], known: dict[str, int]) -> None:
        if self.reading.kind == "repeat" and name not in {a for t in self.reading.operands for a in t.atoms}:
            missing = [n for n in inner if n not in known]
            if missing:
                raise SizeError(
                    f"repeat needs the size of '{missing[0]}', like {missing[0]}=2\nin  {self.reading.text}"
                )

    def _known_wholes(self, known: dict[str, int]) -> dict[str, int]:
        found = {}
        for name, inner in self.reading.wholes:
            if all(n in known for n in inner):
                found[name] = math.prod(known[n] for n in inner)
        return found

    # rules 1 and 2: what each operand's atoms are

    def _operand(self, index: int, shape: Shape) -> _Operand:
        term = self.reading.operands[index]
        found = self._asserted(index, term) if self.is_global else self._declared(index, term, shape)
        if not self.is_global:
            self._check_local(index, found, shape)
        return found

    def _declared(self, index: int, term: Term, shape: Shape) -> _Operand:
        dims: list[ShardedDim] = []
        opened: list[ShardedDim] = []
        marks: list[ShardedDim] = []
        for slot in term.slots:
            atoms = [(atom, self.sizes[atom]) for atom in slot.atoms]
            extent = math.prod(size for _, size in atoms)
            if slot.axes is not None:
                axes = self._starless(slot.axes)
                dim = split(_group(slot), *axes)
                landed = land(dim, extent, atoms)
            else:
                landed = [split(m.atom, *self._starless(m.axes or ())) for m in slot.marks]
                dim = self._closed([*zip(landed, (n for _, n in atoms), strict=True)])
            dims.append(dim)
            if landed is not None and extent == 0:
                landed = self._as_written(slot, landed)
            opened.append(dim if landed is not None else split(_group(slot)))
            marks.extend(landed or [split(atom) for atom, _ in atoms])
        self._bind_stars(term, marks)
        pending, same = self._declared_pending(term)
        whole = tuple(math.prod(self.sizes[a] for a in slot.atoms) for slot in term.slots)
        return _Operand(term, whole, tuple(dims), tuple(opened), tuple(marks), pending, same)

    def _bind_stars(self, term: Term, marks: Sequence[ShardedDim]) -> None:
        """On a plain tensor a `*` on the left is nothing: what isn't declared isn't known."""
        right = set(self.reading.result.atoms)
        for (atom, axes), _ in zip(_marked(term), marks, strict=True):
            if axes is None or "*" not in axes:
                continue
            if atom not in right:
                self._fail(
                    f"a plain tensor doesn't say what splits '{atom}', over which the sum would be resolved; write "
                    f"its axes in place of '*'",
                    self.reading.span_of_atom(atom),
                )
            self.stars[atom] = ()

    def _starless(self, axes: Axes) -> Named:
        return self.mesh.named(axis for axis in axes if axis != "*")

    def _declared_pending(self, term: Term) -> tuple[tuple[Entry, ...], Named]:
        entries = [(p.op, axis) for p in term.pending or () if p.place for axis in self.mesh.named(p.place.names)]
        same = tuple(axis for op, axis in entries if op == "same")
        return tuple(entry for entry in entries if entry[0] != "same"), same

    def _check_local(self, index: int, operand: _Operand, shape: Shape) -> None:
        """A plain tensor is the shard that the declaration says this rank has."""
        sharding = Sharding(self.mesh, operand.dims)
        if self.mesh.coordinate is None:
            raise MeshError(
                f"rank {self.mesh.rank} isn't in {self.mesh!r}, so it has no shard\nin  {self.reading.text}"
            )
        expected = sharding.local_shape(operand.shape)
        if expected != tuple(shape):
            raise SizeError(
                f"the shard of {list(operand.shape)} on rank {self.mesh.rank} is {list(expected)} by "
                f"'{operand.term}'; found {list(shape)}\nin  {self.reading.text}"
            )

    def _asserted(self, index: int, term: Term) -> _Operand:
        sharding = self.actual[index]
        assert sharding is not None
        dims = [self._unmentioned(*pair) for pair in zip(sharding.dims, term.slots, strict=True)]
        shape = tuple(math.prod(self.sizes[a] for a in slot.atoms) for slot in term.slots)
        entries = tuple(entries_of(sharding.pending))
        operand = self._landed(term, shape, dims, entries)
        self._assert_pending(index, operand)
        marks = list(operand.marks)
        for at, (atom, axes) in enumerate(_marked(term, groups=False)):
            marks[at] = self._assert_mark(index, operand, atom, axes, marks[at])
        return _Operand(term, shape, tuple(dims), operand.opened, tuple(marks), entries, ())

    def _as_written(self, slot: Slot, landed: list[ShardedDim]) -> list[ShardedDim]:
        """The splits of the atoms of a dim without elements: as the text says, if it says them of the same axes."""
        if any("*" in (mark.axes or ()) for mark in slot.marks):
            return landed
        written = {mark.atom: self.mesh.named(mark.axes or ()) for mark in slot.marks}
        said = [axis for axes in written.values() for axis in axes]
        has = [axis for each in landed for axis in each.axes]
        if {*self.digits.of(said)} != {*self.digits.of(has)}:
            return landed
        return [split(atom, *written.get(atom, ())) for atom in slot.atoms]

    def _unmentioned(self, dim: ShardedDim, slot: Slot) -> ShardedDim:
        """A dim without axes of size one that the text names, since of those it decides alone, or of
        which a group couldn't tell on which of its atoms they are."""
        named = set(self.reading.axes)
        single = len(slot.marks) == 1

        def stays(axis: NamedLayout) -> bool:
            return axis.size > 1 or (single and axis.name not in named)

        factors = tuple(ShardedFactor(f.name, f.size, tuple(filter(stays, f.axes))) for f in dim.factors)
        return ShardedDim(factors)

    def _landed(self, term: Term, shape: Shape, dims: Sequence[ShardedDim], pending: tuple[Entry, ...]) -> _Operand:
        """The operand with its splits handed down to its atoms."""
        raw = _Operand(term, shape, tuple(dims), tuple(dims), (), pending, ())
        opened: list[ShardedDim] = []
        marks: list[ShardedDim] = []
        for slot, dim, extent in zip(term.slots, dims, shape, strict=True):
            atoms = [(atom, self.sizes[atom]) for atom in slot.atoms]
            if slot.axes is not None:
                wanted = split(_group(slot), *self._starless(slot.axes))
                if "*" in slot.axes:
                    self._fail(f"write '*' at the name in {slot} that it is about", slot.span)
                if not same_split(dim, wanted, extent):
                    self._mismatch(raw)
            landed = land(dim, extent, atoms)
            if landed is None and slot.axes is None:
                self._no_landing(raw, slot, dim, atoms)
            if landed is not None and extent == 0:
                landed = self._as_written(slot, landed)
            opened.append(dim if landed is not None else split(_group(slot)))
            marks.extend(landed if landed is not None else [split(atom) for atom, _ in atoms])
        return _Operand(term, shape, tuple(dims), tuple(opened), tuple(marks), pending, ())

    def _assert_mark(
        self, index: int, operand: _Operand, atom: str, axes: Axes | None, state: ShardedDim
    ) -> ShardedDim:
        """The state of an atom after the assertion that stands at it."""
        reading = self.reading
        if atom not in reading.explicit or axes == _OUTER:
            return state
        if axes is not None and "*" in axes:
            return self._matched(operand, atom, axes, state)
        if axes is None and atom in reading.starred:
            self._bind(operand, atom, state.axes if len(state.factors) == 1 else None)
            return state
        wanted = split(atom, *self.mesh.named(axes or ()))
        if not same_split(state, wanted, self.sizes[atom]):
            self._mismatch(operand)
        return wanted

    def _matched(self, operand: _Operand, atom: str, axes: Axes, state: ShardedDim) -> ShardedDim:
        """`h@(* cp)` on the left: `*` is what h has beside cp."""
        if axes == ("*",):
            self._bind(operand, atom, state.axes)
            return state
        at = axes.index("*")
        before, behind = self.mesh.named(axes[:at]), self.mesh.named(axes[at + 1 :])
        front, back = self.digits.of(before), self.digits.of(behind)
        have = self.digits.of(state.axes)
        middle = have[len(front) : len(have) - len(back)]
        if len(state.factors) > 1 or have != (*front, *middle, *back):
            self._mismatch(operand)
        rest = self.mesh.calls(middle)
        wanted = split(atom, *before, *rest, *behind)
        if not same_split(state, wanted, self.sizes[atom]):
            self._mismatch(operand)
        self._bind(operand, atom, rest)
        return wanted

    def _bind(self, operand: _Operand, atom: str, axes: Named | None) -> None:
        if axes is None:
            self._fail(
                f"'{atom}' is split by one of its factors ({operand.text()}), so '*' has no place to add to; "
                "write its factors as a group",
                self.reading.span_of_atom(atom),
            )
        if self.digits.of(self.stars.setdefault(atom, axes)) != self.digits.of(axes):
            # Where the operands disagree, that is the error (see `_common`).
            self.unclear.append(
                f"'*' of '{atom}' is {place_text(self.stars[atom])} in one place, {place_text(axes)} in another"
            )

    def _assert_pending(self, index: int, operand: _Operand) -> None:
        """What the text mentions is pending exactly where the left says so."""
        term = operand.term
        for p in term.pending or ():
            if p.op == "same":
                self._fail("'same' is about gradients of plain tensors; a DTensor has none", p.span)
        if term.keeps_any:
            return
        declared, _ = self._declared_pending(term)
        says = {(op, digit) for op, axis in declared for digit in self.digits.of((axis,))}
        every = term.pending is not None and not term.pending
        has = {
            (op, digit)
            for op, axis in operand.pending
            for digit in self.digits.of((axis,))
            if every or digit in self.mentioned
        }
        if says != has:
            self._mismatch(operand)

    def _mismatch(self, operand: _Operand) -> NoReturn:
        """Rule 2 is broken: both, one line each, and what to write."""
        has = operand.text()
        which = ""
        if len(self.reading.operands) > 1:
            which = f"operand {next(i for i, t in enumerate(self.reading.operands) if t is operand.term) + 1} "
        else:
            which = "the tensor "
        raise ShardingError(
            f"{which}isn't sharded as the left side says\n"
            f"  says  {operand.term}\n"
            f"  has   {has}\n"
            f"in  {self.reading.text}\n"
            f"write '{has}' on the left, or axes.reshard it before"
        )

    def _no_landing(self, operand: _Operand, slot: Slot, dim: ShardedDim, atoms: Sequence[tuple[str, int]]) -> NoReturn:
        sizes = " ".join(f"{name}={size}" for name, size in atoms)
        raise ShardingError(
            f"{place_text(dim.axes)} splits {_group(slot)} into {dim.pieces} parts that don't fall "
            f"on its names: ({sizes})\n"
            f"  has   {operand.text()}\n"
            f"in  {self.reading.text}\n"
            f"write '{_group(slot)}@{place_text(dim.axes)}' on the left to have it gathered, "
            "or choose sizes that divide"
        )

    def _fail(self, message: str, span: tuple[int, int] | None = None) -> NoReturn:
        self.reading.fail(message, span)

    # what the operands say together

    def _common(self) -> dict[str, ShardedDim]:
        """The one state of each atom of the operands; rule 3 forbids to make it one."""
        found: dict[str, tuple[ShardedDim, _Operand]] = {}
        self._check_waiting()
        for operand in self.operands:
            for (atom, _), state in zip(_marked(operand.term), operand.marks, strict=True):
                if atom not in found:
                    found[atom] = state, operand
                elif not same_split(found[atom][0], state, self.sizes[atom]):
                    self._disagree(atom, found[atom], (state, operand))
        if self.unclear:
            self._fail(self.unclear[0])
        states = self._once({atom: state for atom, (state, _) in found.items()})
        self._check_shared(states)
        return states

    def _once(self, states: dict[str, ShardedDim]) -> dict[str, ShardedDim]:
        """The states with each axis of size one on the first atom that has it: it splits nothing."""
        seen: set[NamedLayout] = set()
        found = {}
        for atom, state in states.items():
            factors = []
            for f in state.factors:
                kept = tuple(a for a in f.axes if a not in seen or a.size > 1)
                seen.update(kept)
                factors.append(ShardedFactor(f.name, f.size, kept))
            found[atom] = ShardedDim(tuple(factors))
        return found

    def _disagree(self, atom: str, one: tuple[ShardedDim, _Operand], other: tuple[ShardedDim, _Operand]) -> NoReturn:
        if one[1] is other[1]:
            raise ShardingError(
                f"a diagonal needs '{atom}' unsplit in both places\n  has   {one[1].text()}\nin  {self.reading.text}\n"
                "axes.reshard the tensor before"
            )
        states = f"{_at(atom, one[0])} and {_at(atom, other[0])}"
        raise ShardingError(
            f"the operands disagree on '{atom}': {states}\n{self._lines()}\n"
            f"in  {self.reading.text}\n{self._resolve(atom, one, other)}"
        )

    def _resolve(self, atom: str, one: tuple[ShardedDim, _Operand], other: tuple[ShardedDim, _Operand]) -> str:
        """The reshard that would make two operands agree."""
        split_one, bare = (one, other) if one[0].axes else (other, one)
        number = next(i for i, operand in enumerate(self.operands) if operand is bare[1]) + 1
        spec = _respec(bare[1], atom, split_one[0].axes)
        return f"axes.reshard operand {number} to '{spec}' before"

    def _lines(self) -> str:
        if len(self.operands) == 1:
            return f"  has   {self.operands[0].text()}"
        return "\n".join(f"  operand {i + 1}  {operand.text()}" for i, operand in enumerate(self.operands))

    def _check_shared(self, states: dict[str, ShardedDim]) -> None:
        """A digit splits one name of all that the operands have."""
        owner: dict[Any, str] = {}
        for atom, state in states.items():
            for axis in state.axes:
                for digit in self.digits.of((axis,)):
                    if owner.setdefault(digit, atom) != atom:
                        self._conflict(f"'{axis}' is wanted by '{owner[digit]}' and by '{atom}'")

    def _check_waiting(self) -> None:
        """In an einsum a digit is pending in one operand, and the others are replicated over it."""
        if self.reading.kind != "einsum":
            return
        splits = {
            digit: atom
            for operand in self.operands
            for (atom, _), state in zip(_marked(operand.term), operand.marks, strict=True)
            for digit in self.digits.of(state.axes)
        }
        waiting: dict[Mode, int] = {}
        for number, operand in enumerate(self.operands):
            for op, axis in operand.pending:
                if op not in LINEAR:
                    self._conflict(f"a pending {op} can't be multiplied; resolve it first")
                for digit in self.digits.of((axis,)):
                    if digit in splits:
                        self._conflict(f"'{axis}' splits '{splits[digit]}' and is pending in operand {number + 1}")
                    if (before := waiting.setdefault(digit, number)) != number:
                        self._conflict(
                            f"operands {before + 1} and {number + 1} are both pending over '{axis}', "
                            "and a product of sums isn't a sum of products"
                        )

    def _conflict(self, message: str) -> NoReturn:
        advice = "axes.reshard one of them before" if len(self.operands) > 1 else "axes.reshard it before"
        raise ShardingError(f"{message}\n{self._lines()}\nin  {self.reading.text}\n{advice}")

    # rule 4: what is pending

    def _contracted(self) -> list[str]:
        """The atoms that the result lacks."""
        right = set(self.reading.result.atoms)
        return [atom for atom in self.states if atom not in right]

    def _resolved(self) -> frozenset[Mode]:
        """The digits over which the right side decides what stays pending.

        They are those that the text mentions, and those of `f@*` on the left where f is summed away.
        """
        stars = [axis for atom in self._contracted() for axis in self.stars.get(atom, ())]
        return self.mentioned | frozenset(self.digits.of(stars))

    def _counted(self) -> list[tuple[str, NamedLayout]]:
        """`(atom, axis)` of what is reduced, split, and of which a plain shard doesn't show the whole size."""
        atoms = [atom for atom in self._contracted() if atom in self.assumed]
        return [(atom, axis) for atom in atoms for axis in self.states[atom].axes if axis.size > 1]

    def _arising(self) -> list[NamedLayout]:
        """The axes over which the local computation leaves the result pending."""
        found = []
        for atom in self._contracted():
            axes = [axis for axis in self.states[atom].axes if axis.size > 1]
            if axes and self.op not in _ACROSS:
                name = self.op if isinstance(self.op, str) else getattr(self.op, "__name__", "a function")
                raise ShardingError(
                    f"'{name}' doesn't reduce across ranks, and {place_text(axes)} splits '{atom}'\n{self._lines()}\n"
                    f"in  {self.reading.text}\ngather it first: '{atom}@{place_text(axes)}' on the left of a rearrange"
                )
            found += axes
        return found

    def _check_passes(self) -> None:
        """Pending values pass only reductions that commute with theirs."""
        if self.reading.kind != "reduce":
            return
        for op, axis in self.operands[0].pending:
            passes = (op in LINEAR and self.op in LINEAR) or (op == self.op)
            if not passes:
                name = self.op if isinstance(self.op, str) else getattr(self.op, "__name__", "a function")
                raise ShardingError(
                    f"'{name}' doesn't pass a pending {op}\n{self._lines()}\n"
                    f"in  {self.reading.text}\nresolve it first: '| {op}@{axis}' on the left of a rearrange"
                )

    def _derived_pending(self) -> tuple[list[Entry], list[Entry]]:
        """What is pending before the right side is looked at: inherited, and arising."""
        self._check_passes()
        inherited = [entry for operand in self.operands for entry in operand.pending]
        axes = self._arising()
        if self.op == "mean" and self.assumed:
            self._check_counted()
        if self.op == "mean" and self._counted():
            return inherited, [("sum", axis) for axis in axes]
        if self.op == "mean":
            return inherited, [(self._mean_as(axis), axis) for axis in axes]
        return inherited, [(str(self.op), axis) for axis in axes]

    def _even(self) -> bool:
        return all(is_even(self.states[atom], self.sizes[atom]) for atom in self._contracted())

    def _mean_as(self, axis: NamedLayout) -> str:
        """A mean pends as a mean where the shards are even and nobody asked for a sum."""
        wanted = {}
        for p in self.reading.result.pending or ():
            if p.place is not None:
                wanted.update(dict.fromkeys(self.digits.of(self.mesh.named(p.place.names)), p.op))
        asked = {wanted.get(digit) for digit in self.digits.of((axis,))} - {None}
        if not self._even():
            if "mean" in asked:
                raise ShardingError(
                    f"a mean over uneven shards isn't the mean of their means\n{self._lines()}\n"
                    f"in  {self.reading.text}\n"
                    f"write '| sum@{axis}' on the right; it pends as local sums over the whole size"
                )
            return "sum"
        return "sum" if "sum" in asked else "mean"

    def _target_pending(self, inherited: list[Entry], arising: list[Entry]) -> tuple[tuple[Entry, ...], Named]:
        """What the right side leaves pending, in the order of resolution; and what it calls the same."""
        term = self.reading.result
        derived = [*inherited, *arising]
        if term.keeps_any:
            return tuple(derived), ()
        listed, same = self._declared_pending(term)
        if same and self.is_global:
            self._fail("'same' is about gradients of plain tensors; a DTensor has none", term.pending[0].span)  # type: ignore[index]
        if term.pending is not None and not term.pending:
            return (), ()
        self._check_arising(arising)
        pending_digits = {(op, digit) for op, axis in derived for digit in self.digits.of((axis,))}
        for op, axis in listed:
            if any((op, digit) not in pending_digits for digit in self.digits.of((axis,))):
                self._not_pending(op, axis, derived)
        kept: list[Entry] = []
        for op, axis in derived:
            rest = frozenset(self.digits.of((axis,))) - self._resolved()
            if rest:
                kept += [(op, name) for name in self.digits.pick(axis, rest)]
        return (*kept, *listed), same

    def _check_counted(self) -> None:
        """Ranks can't count together what stays pending, nor where a split falls in a group of names.

        That depends on how much they have, which each knows of itself alone.
        """
        result, arising = self.reading.result, [axis for _, axis in self._counted()]
        pending = [p for p in result.pending or () if p.op != "same"]
        named = [axis for p in pending if p.place is not None for axis in self.mesh.named(p.place.names)]
        kept = set(self.digits.of(arising if result.keeps_any else named))
        if not kept.isdisjoint(self.digits.of(arising)):
            self._ask_size("stays pending", [atom for atom, _ in self._counted()])
        for slot in self.operands[0].term.slots:
            gone = set(slot.atoms) - set(result.atoms)
            if slot.axes and len(slot.atoms) > 1 and gone and self.assumed & {*slot.atoms}:
                self._ask_size(f"is over names of {slot}", [atom for atom in slot.atoms if atom in self.assumed])

    def _ask_size(self, what: str, atoms: Sequence[str]) -> NoReturn:
        whole = dict(self.reading.wholes)
        names = [name for atom in dict.fromkeys(atoms) for name in whole.get(atom, (atom,)) if is_name(name)]
        quoted = " and ".join(f"'{atom}'" for atom in dict.fromkeys(atoms))
        raise SizeError(
            f"a mean that {what} needs the whole size of {quoted}, and a shard shows this rank's part alone\n"
            f"{self._lines()}\nin  {self.reading.text}\ngive it as a keyword: {', '.join(f'{n}=...' for n in names)}"
        )

    def _check_arising(self, arising: list[Entry]) -> None:
        """Rule 4: a result that would be left pending without a word."""
        resolved = self._resolved()
        hidden = [(op, axis) for op, axis in arising if any(d not in resolved for d in self.digits.of((axis,)))]
        if not hidden:
            return
        clause = " ".join(map(str, pending_of(hidden)))
        axes = {axis for _, axis in hidden}
        at = ", ".join(_at(a, self.states[a]) for a in self._contracted() if axes & set(self.states[a].axes))
        raise ShardingError(
            f"the result would be left pending: {clause}\n{self._lines()}\nin  {self.reading.text}\n"
            f"write {at} on the left to have it reduced, or '| {clause}' or '| *' on the right to keep it"
        )

    def _not_pending(self, op: str, axis: NamedLayout, derived: list[Entry]) -> NoReturn:
        has = " ".join(map(str, pending_of(derived))) or "nothing"
        raise ShardingError(
            f"the right side keeps {op}@{axis}, but the result has {has} pending\n{self._lines()}\n"
            f"in  {self.reading.text}\nwrite '| *' to keep what arises"
        )

    # rule 3: what the right side wants

    def _target(self) -> tuple[dict[str, ShardedDim], dict[int, ShardedDim]]:
        """The state of each atom of the result; and of dims whose split doesn't fall on their atoms."""
        atoms: dict[str, ShardedDim] = {}
        dims: dict[int, ShardedDim] = {}
        for at, slot in enumerate(self.reading.result.slots):
            if slot.axes is None:
                atoms.update({m.atom: self._wanted(m.atom, m.axes) for m in slot.marks})
                continue
            if "*" in slot.axes:
                self._fail(f"write '*' at the name in {slot} that it is about", slot.span)
            sizes = [(atom, self.sizes[atom]) for atom in slot.atoms]
            whole = split(_group(slot), *self.mesh.named(slot.axes))
            landed = land(whole, math.prod(n for _, n in sizes), sizes)
            atoms.update(zip(slot.atoms, landed or [split(atom) for atom in slot.atoms], strict=True))
            if landed is None:
                dims[at] = whole
        return atoms, dims

    def _wanted(self, atom: str, axes: Axes | None) -> ShardedDim:
        has = self.states.get(atom, split(atom))
        if axes is None:
            return split(atom) if atom in self.reading.explicit and atom not in self.reading.starred else has
        if "*" not in axes:
            return split(atom, *self.mesh.named(axes))
        star = self.stars.get(atom)
        if axes == ("*",) and (star is None or star == has.axes):
            return has
        if len(has.factors) > 1:
            self._fail(
                f"'{atom}' is split by one of its factors; '*' has no place to add to", self.reading.span_of_atom(atom)
            )
        rest = has.axes if star is None else star
        return split(atom, *(each for axis in axes for each in (rest if axis == "*" else self.mesh.named((axis,)))))

    def _check_target(
        self, atoms: dict[str, ShardedDim], dims: dict[int, ShardedDim], pending: Sequence[Entry], same: Named
    ) -> None:
        """No digit twice in the result; where one flows into a place that the text gave away, say so."""
        uses = [(atom, axis) for atom, state in atoms.items() for axis in state.axes]
        uses += [(str(dim.factors[0].name), axis) for dim in dims.values() for axis in dim.axes]
        uses += [(f"| {op}", axis) for op, axis in [*pending, *(("same", axis) for axis in same)]]
        owner: dict[Any, str] = {}
        for what, axis in uses:
            for key in self.digits.of((axis,)) or (axis,):
                if owner.setdefault(key, what) == what:
                    continue
                other = owner[key]
                flowing = next((w for w in (what, other) if w in self.states and w not in self.reading.explicit), None)
                advice = "write the split of both"
                if flowing is not None:
                    written = _at(flowing, self.states[flowing])
                    advice = f"'{flowing}' came split over it: write {written} on the left to have it moved"
                raise ShardingError(
                    f"'{axis}' would split '{other}' and '{what}'\n{self._lines()}\nin  {self.reading.text}\n{advice}"
                )

    # the recipe

    def recipe(self) -> Recipe:
        """The steps, once everything that the four rules forbid has been refused."""
        reading, atoms = self.reading, self.reading.result.atoms
        inherited, arising = self._derived_pending()
        pending, same = self._target_pending(inherited, arising)
        counted = tuple(dict.fromkeys(axis for _, axis in self._counted()))
        mean = reading.kind == "reduce" and self.op == "mean"
        target, odd = self._target()
        self._check_target(target, odd, pending, same)
        final = pending_of([*pending, *(("same", axis) for axis in same)])
        wanted = Sharding(self.mesh, tuple(target[a] for a in atoms), final)
        if reading.kind == "repeat":
            # What repeat adds is made where it belongs: communicate before there is more of it.
            before = [Sharding(self.mesh, tuple(target[a] for a in o.term.atoms), final) for o in self.operands]
            derived = wanted
        else:
            before = [self._prepared(operand) for operand in self.operands]
            entries = [*inherited, *arising]
            if reading.kind == "rearrange":
                entries += [("same", axis) for axis in self.operands[0].same]
            derived = Sharding(self.mesh, tuple(self.states[a] for a in atoms), pending_of(entries))
        inputs = tuple(self._input(operand, sharding) for operand, sharding in zip(self.operands, before, strict=True))
        result = self._output(derived, wanted, odd)
        divisor = math.prod(self.sizes[a] for a in self._contracted()) if mean and not counted else 1
        multiplier = math.prod(axis.size for op, axis in arising if op == "mean")
        sizes = tuple(self.sizes.items())
        kind, text, op = reading.kind, reading.text, self.op
        found = Recipe(kind, text, self.mesh, op, sizes, inputs, result, divisor, multiplier, counted)
        if self.is_global:
            self._check_torch(found)
        return found

    def _prepared(self, operand: _Operand) -> Sharding:
        """The operand as the local computation takes it: what is `same` becomes an ordinary replica."""
        entries = list(operand.pending)
        if self.reading.kind == "rearrange":
            # A rearrangement commutes with communication, so that all of it happens at once, later.
            entries += [("same", axis) for axis in operand.same]
        states = tuple(self.states[atom] for atom in operand.term.atoms)
        return Sharding(self.mesh, states, pending_of(entries))

    def _input(self, operand: _Operand, prepared: Sharding) -> Input:
        pending = pending_of([*operand.pending, *(("same", axis) for axis in operand.same)])
        source = Sharding(self.mesh, operand.dims, pending)
        opened = Sharding(self.mesh, operand.opened, pending)
        elementary = Sharding(self.mesh, operand.marks, pending)
        groups = tuple(slot.atoms for slot in operand.term.slots)
        return Input(operand.shape, groups, source, opened, elementary, prepared)

    def _output(self, derived: Sharding, target: Sharding, odd: dict[int, ShardedDim]) -> Output:
        states = dict(zip(self.reading.result.atoms, target.dims, strict=True))
        closed, shape = [], []
        for slot in self.reading.result.slots:
            closed.append(self._closed([(states[a], self.sizes[a]) for a in slot.atoms]))
            shape.append(math.prod(self.sizes[a] for a in slot.atoms))
        final = [odd.get(at, dim) for at, dim in enumerate(closed)]
        groups = tuple(slot.atoms for slot in self.reading.result.slots)
        return Output(
            tuple(shape),
            groups,
            derived,
            target,
            Sharding(self.mesh, tuple(closed), target.pending),
            Sharding(self.mesh, tuple(final), target.pending),
        )

    def _closed(self, atoms: list[tuple[ShardedDim, int]]) -> ShardedDim:
        try:
            return close(atoms)
        except ShardingError as error:
            raise ShardingError(f"{error}\nin  {self.reading.text}") from None

    def _check_torch(self, found: Recipe) -> None:
        try:
            check_torch_can(found.result.output, found.result.shape)
        except ShardingError as error:
            raise ShardingError(f"{error}\nin  {self.reading.text}") from None


_OUTER: Axes = ("@group",)
"""In `_marked`: the atom stands in a group with a place of its own, which is asserted as a whole."""


def _marked(term: Term, groups: bool = True) -> list[tuple[str, Axes | None]]:
    """`(atom, place)` of each mark in order."""
    return [
        (mark.atom, mark.axes if slot.axes is None else slot.axes if groups else _OUTER)
        for slot in term.slots
        for mark in slot.marks
    ]


def _all_atoms(reading: Reading) -> Iterable[str]:
    return (atom for term in reading.terms for atom in term.atoms)


def _group(slot: Slot) -> str:
    names = " ".join(atom.split("#")[0] for atom in slot.atoms)
    return names if len(slot.atoms) == 1 else f"({names})"


def _at(atom: str, state: ShardedDim) -> str:
    if len(state.factors) > 1:
        return str(state)
    return f"'{atom}@{place_text(state.axes)}'" if state.axes else f"'{atom}'"


@dataclass(frozen=True)
class _Item:
    name: str
    size: int | None
