"""Operands: what the tensors of an expression are, before the local computation.

Rule 1 hands the splits of dims down to atoms, rule 2 compares them with what the left side says, and rule 3
has all operands say the same of an atom that they share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from axes.algebra.errors import MeshError, ShardingError, SizeError
from axes.algebra.flow.carrier import uses_of
from axes.algebra.flow.reading import Axes, Mark, Reading, Slot, Term
from axes.algebra.flow.recipe import Shape
from axes.algebra.flow.states import (
    Digits,
    Entry,
    close,
    entries_of,
    land,
    pending_of,
    same_split,
    split,
)
from axes.algebra.grammar import place_text
from axes.algebra.layout import Mode, NamedLayout
from axes.algebra.mesh import Mesh
from axes.algebra.sharding import LINEAR, ShardedDim, ShardedFactor, Sharding
from axes.algebra.sizes import Product, given_sizes, solve

Named = tuple[NamedLayout, ...]


@dataclass(frozen=True)
class Operand:
    """An operand's states: per dim, and per atom."""

    term: Term
    shape: Shape
    dims: tuple[ShardedDim, ...]
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


def _respec(operand: Operand, atom: str, axes: Named) -> str:
    """The operand as it is, but for one name, which is split over `axes`."""
    dims, marks = list(operand.dims), list(operand.marks)
    for at, slot in enumerate(operand.term.slots):
        if slot.atoms == (atom,):
            dims[at] = split(atom, *axes)
    for at, (name, _) in enumerate(marks_of(operand.term)):
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


class Operands:
    """The tensors of one expression as it finds them: sizes, states of atoms, what all operands say of an atom."""

    def __init__(
        self,
        reading: Reading,
        mesh: Mesh,
        shardings: Sequence[Sharding | None],
        shapes: Sequence[Shape],
        given: tuple[tuple[str, Any], ...],
    ):
        self.reading, self.mesh = reading, mesh
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
                count = 1 if self.is_global else math.prod(self.mesh.layout(a).size for _, a in uses_of(slot))
                # A plain shard of a known size may be uneven; it is checked against its rank's share.
                if count == 1 or not all(a in sized for a in slot.atoms):
                    if count > 1:
                        self.assumed.update(a for a in slot.atoms if a not in sized)
                    where = f"dim {dim} of {list(shape)}" + (f", operand {index + 1}" if len(shapes) > 1 else "")
                    equations.append(Product(slot.atoms, (), extent * count, f"{where}, in  {reading.text}"))
        for whole_name, inner in reading.wholes:
            self._check_whole(whole_name, inner, known)
        found = solve(equations, sized)
        open_ = [atom for term in reading.terms for atom in term.atoms if atom not in found]
        if open_:
            raise SizeError(
                f"the size of '{open_[0]}' isn't known from any tensor; give it, like {open_[0]}=2\nin  {reading.text}"
            )
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

    def _operand(self, index: int, shape: Shape) -> Operand:
        term = self.reading.operands[index]
        found = self._asserted(index, term) if self.is_global else self._declared(index, term, shape)
        if not self.is_global:
            self._check_local(index, found, shape)
        return found

    def _declared(self, index: int, term: Term, shape: Shape) -> Operand:
        dims: list[ShardedDim] = []
        marks: list[ShardedDim] = []
        for slot in term.slots:
            atoms = [(atom, self.sizes[atom]) for atom in slot.atoms]
            extent = math.prod(size for _, size in atoms)
            if slot.axes is not None:
                axes = self._starless(slot.axes)
                dim = split(group_text(slot), *axes)
                landed = self._landed(dim, extent, atoms, slot)
            else:
                landed = [split(m.atom, *self._starless(m.axes or ())) for m in slot.marks]
                dim = closed([*zip(landed, (n for _, n in atoms), strict=True)], self.reading)
            dims.append(dim)
            marks.extend(self._as_written(slot, landed) if extent == 0 else landed)
        self._bind_stars(term, marks)
        pending, same = self.declared_pending(term)
        whole = tuple(math.prod(self.sizes[a] for a in slot.atoms) for slot in term.slots)
        return Operand(term, whole, tuple(dims), tuple(marks), pending, same)

    def _bind_stars(self, term: Term, marks: Sequence[ShardedDim]) -> None:
        """On a plain tensor a `*` on the left is nothing: what isn't declared isn't known."""
        right = set(self.reading.result.atoms)
        for (atom, axes), _ in zip(marks_of(term), marks, strict=True):
            if axes is None or "*" not in axes:
                continue
            if atom not in right and self.mesh.size > 1:  # a rank alone has all of it
                self._fail(
                    f"a plain tensor doesn't say what splits '{atom}', over which the sum would be resolved; write "
                    f"its axes in place of '*'",
                    self.reading.span_of_atom(atom),
                )
            self.stars[atom] = ()

    def _starless(self, axes: Axes) -> Named:
        return self.mesh.named(axis for axis in axes if axis != "*")

    def declared_pending(self, term: Term) -> tuple[tuple[Entry, ...], Named]:
        """What a term says is pending, and over which axes its gradient is the same."""
        entries = [(p.op, axis) for p in term.pending or () if p.place for axis in self.mesh.named(p.place.names)]
        same = tuple(axis for op, axis in entries if op == "same")
        return tuple(entry for entry in entries if entry[0] != "same"), same

    def _check_local(self, index: int, operand: Operand, shape: Shape) -> None:
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

    def _asserted(self, index: int, term: Term) -> Operand:
        sharding = self.actual[index]
        assert sharding is not None
        dims = [self._unmentioned(*pair) for pair in zip(sharding.dims, term.slots, strict=True)]
        shape = tuple(math.prod(self.sizes[a] for a in slot.atoms) for slot in term.slots)
        entries = tuple(entries_of(sharding.pending))
        operand = self._handed_down(term, shape, dims, entries)
        self._assert_pending(index, operand)
        marks = list(operand.marks)
        for at, (atom, axes) in enumerate(marks_of(term, groups=False)):
            marks[at] = self._assert_mark(index, operand, atom, axes, marks[at])
        return Operand(term, shape, tuple(dims), tuple(marks), entries, ())

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

    def _handed_down(self, term: Term, shape: Shape, dims: Sequence[ShardedDim], pending: tuple[Entry, ...]) -> Operand:
        """The operand with its splits handed down to its atoms."""
        raw = Operand(term, shape, tuple(dims), (), pending, ())
        marks: list[ShardedDim] = []
        for slot, dim, extent in zip(term.slots, dims, shape, strict=True):
            atoms = [(atom, self.sizes[atom]) for atom in slot.atoms]
            if slot.axes is not None:
                wanted = split(group_text(slot), *self._starless(slot.axes))
                if "*" in slot.axes:
                    self._fail(f"write '*' at the name in {slot} that it is about", slot.span)
                if not same_split(dim, wanted, extent):
                    self._mismatch(raw)
            landed = self._landed(dim, extent, atoms, slot)
            marks.extend(self._as_written(slot, landed) if extent == 0 else landed)
        return Operand(term, shape, tuple(dims), tuple(marks), pending, ())

    def _assert_mark(self, index: int, operand: Operand, atom: str, axes: Axes | None, state: ShardedDim) -> ShardedDim:
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

    def _matched(self, operand: Operand, atom: str, axes: Axes, state: ShardedDim) -> ShardedDim:
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

    def _bind(self, operand: Operand, atom: str, axes: Named | None) -> None:
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

    def _assert_pending(self, index: int, operand: Operand) -> None:
        """What the text mentions is pending exactly where the left says so."""
        term = operand.term
        for p in term.pending or ():
            if p.op == "same":
                self._fail("'same' is about gradients of plain tensors; a DTensor has none", p.span)
        if term.keeps_any:
            return
        declared, _ = self.declared_pending(term)
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

    def _mismatch(self, operand: Operand) -> NoReturn:
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

    def _landed(self, dim: ShardedDim, extent: int, atoms: Sequence[tuple[str, int]], slot: Slot) -> list[ShardedDim]:
        """The states of the atoms of a dim; `ShardingError` where its split doesn't fall on them."""
        found = land(dim, extent, atoms)
        if found is None:
            raise self.between_names(dim, atoms, slot, f"axes.reshard it to '{group_text(slot)}' before")
        return found

    def between_names(
        self, dim: ShardedDim, atoms: Sequence[tuple[str, int]], slot: Slot, advice: str
    ) -> ShardingError:
        """The error for a split of a group that doesn't fall on the names in it."""
        sizes = " ".join(f"{name.split('#')[0]}={size}" for name, size in atoms)
        return ShardingError(
            f"{place_text(dim.axes)} splits {group_text(slot)} into {dim.pieces} parts that don't fall "
            f"on its names: ({sizes})\nin  {self.reading.text}\n{advice}, or choose sizes that divide"
        )

    def _fail(self, message: str, span: tuple[int, int] | None = None) -> NoReturn:
        self.reading.fail(message, span)

    # what the operands say together

    def _common(self) -> dict[str, ShardedDim]:
        """The one state of each atom of the operands; rule 3 forbids to make it one."""
        found: dict[str, tuple[ShardedDim, Operand]] = {}
        self._check_waiting()
        for operand in self.operands:
            for (atom, _), state in zip(marks_of(operand.term), operand.marks, strict=True):
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

    def _disagree(self, atom: str, one: tuple[ShardedDim, Operand], other: tuple[ShardedDim, Operand]) -> NoReturn:
        if one[1] is other[1]:
            raise ShardingError(
                f"a diagonal needs '{atom}' unsplit in both places\n  has   {one[1].text()}\nin  {self.reading.text}\n"
                "axes.reshard the tensor before"
            )
        states = f"{place_of(atom, one[0])} and {place_of(atom, other[0])}"
        raise ShardingError(
            f"the operands disagree on '{atom}': {states}\n{self.lines()}\n"
            f"in  {self.reading.text}\n{self._resolve(atom, one, other)}"
        )

    def _resolve(self, atom: str, one: tuple[ShardedDim, Operand], other: tuple[ShardedDim, Operand]) -> str:
        """The reshard that would make two operands agree."""
        split_one, bare = (one, other) if one[0].axes else (other, one)
        number = next(i for i, operand in enumerate(self.operands) if operand is bare[1]) + 1
        spec = _respec(bare[1], atom, split_one[0].axes)
        return f"axes.reshard operand {number} to '{spec}' before"

    def lines(self) -> str:
        """The operands as they are, a line each."""
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
            for (atom, _), state in zip(marks_of(operand.term), operand.marks, strict=True)
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
        raise ShardingError(f"{message}\n{self.lines()}\nin  {self.reading.text}\n{advice}")


_OUTER: Axes = ("@group",)
"""In `marks_of`: the atom stands in a group with a place of its own, which is asserted as a whole."""


def marks_of(term: Term, groups: bool = True) -> list[tuple[str, Axes | None]]:
    """`(atom, place)` of each mark in order."""
    return [
        (mark.atom, mark.axes if slot.axes is None else slot.axes if groups else _OUTER)
        for slot in term.slots
        for mark in slot.marks
    ]


def group_text(slot: Slot) -> str:
    """A slot without its places."""
    names = " ".join(atom.split("#")[0] for atom in slot.atoms)
    return names if len(slot.atoms) == 1 else f"({names})"


def place_of(atom: str, state: ShardedDim) -> str:
    """An atom with its place, quoted as one writes it."""
    if len(state.factors) > 1:
        return str(state)
    return f"'{atom}@{place_text(state.axes)}'" if state.axes else f"'{atom}'"


@dataclass(frozen=True)
class _Item:
    name: str
    size: int | None


def closed(atoms: list[tuple[ShardedDim, int]], reading: Reading) -> ShardedDim:
    """The dim that atoms with these states and sizes make."""
    try:
        return close(atoms)
    except ShardingError as error:
        raise ShardingError(f"{error}\nin  {reading.text}") from None
