"""The four rules: what an expression means for tensors that are sharded as they are.

1. What is annotated is explicit, what isn't flows.
2. The left side is an assertion (for a plain tensor: a declaration).
3. Data moves only where the right side differs from the left.
4. Nothing is left pending that the expression doesn't name.

`recipe` below reads top to bottom: the expression, the mesh that its result lies on (`meshes`), sizes and
states of the operands (`operands`), and here what is pending after the local computation, what the right side
wants, and the recipe that does it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from axes.algebra.errors import AxesError, ShardingError, SizeError
from axes.algebra.flow.meshes import check_axes, mesh_of_result
from axes.algebra.flow.operands import Operand, Operands
from axes.algebra.flow.reading import KINDS, Axes, Reading, is_name, read
from axes.algebra.flow.recipe import Input, Output, Recipe, Shape, sharding_by_atoms, singles
from axes.algebra.grammar import place_text
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import LINEAR, Sharding, Slots, layouts_text, pending_text
from axes.algebra.splits import split

REDUCTIONS = ("sum", "mean", "max", "min", "prod", "any", "all")
"""The reductions by name; the first four also across ranks."""

_ACROSS = ("sum", "mean", "max", "min")


def recipe(
    kind: str,
    text: str,
    op: str,
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
    reading = read(kind, text, tuple(map(len, shapes)), units_of(kind, text, shapes))
    home = mesh_of_result(reading, mesh, shardings)
    actual = tuple([None if s is None else s.on(home).sized(n) for s, n in zip(shardings, shapes, strict=True)])
    given = {name for name, _ in sizes}
    standing, wholes = _standing(reading, home, actual, shapes, given)
    if wholes:
        with contextlib.suppress(AxesError):
            found = _kept(home.rank, reading, home, actual, standing, sizes, op)
            return replace(found, sizes=tuple({**found.size, **wholes}.items()))
    return recipe_at(reading, home, actual, shapes, sizes, op)


def _standing(
    reading: Reading, mesh: Mesh, shardings: Sequence[Sharding | None], shapes: Sequence[Shape], given: Collection[str]
) -> tuple[tuple[Shape, ...], dict[str, int]]:
    """Shapes with the same recipe but for sizes, and the sizes in which they differ.

    An atom that is a dim by itself wherever it stands meets no other size, and all that a recipe asks of its own is
    whether splits divide it. They divide every multiple of the number of ranks: twice that stands for all of these.
    None differ where a size contradicts another, or is `given`.
    """
    standing, wholes = [list(shape) for shape in shapes], dict[str, int]()
    pairs = [(atom, shardings[operand], dim) for operand, dim, atom in reading.alone]
    as_they_are = {*given, *(atom for atom, s, dim in pairs if s is not None and len(s.dims[dim]) > 1)}
    for operand, dim, atom in reading.alone:
        uses = reading.operands[operand].slots[dim].uses if shardings[operand] is None else []
        count = math.prod([mesh.layout(axis).size for _, axis, _ in uses])
        whole = shapes[operand][dim] * count
        if atom in as_they_are or whole <= 1 or whole % mesh.size or mesh.size % count:
            continue
        if wholes.setdefault(atom, whole) != whole:
            return tuple(shapes), {}
        standing[operand][dim] = 2 * mesh.size // count
    return tuple(map(tuple, standing)), wholes


def recipe_at(
    reading: Reading,
    home: Mesh,
    shardings: tuple[Sharding | None, ...],
    shapes: tuple[Shape, ...],
    sizes: tuple[tuple[str, Any], ...],
    op: str,
) -> Recipe:
    """The recipe for tensors of these shapes, found from the start; an error is about these."""
    check_axes(reading, home)
    return _Result(Operands(reading, home, shardings, shapes, sizes), op).recipe()


@functools.lru_cache(maxsize=4096)
def _kept(_: int, *args: Any) -> Recipe:
    """The same, kept for a rank."""
    return recipe_at(*args)


def units_of(kind: str, text: str, shapes: Sequence[Shape]) -> frozenset[tuple[int, int]]:
    """The dims of size one, which `...` in an einsum broadcasts."""
    if kind != "einsum" or "..." not in text:
        return frozenset()
    return frozenset((i, d) for i, shape in enumerate(shapes) for d, extent in enumerate(shape) if extent == 1)


class _Result:
    """What the expression makes of its operands: what is left pending, what the right side wants, and the recipe.

    gone: the atoms that the result lacks. split: these with the axes that split them. unknown: those of which a plain
    shard doesn't show the whole size. resolved: the digits over which the right side decides what stays pending: those
    that the text mentions, and those of `f@*` on the left where f is summed away.
    """

    def __init__(self, has: Operands, op: str):
        self.has, self.op = has, op
        self.reading, self.mesh, self.digits = has.reading, has.mesh, has.digits
        self.gone = [atom for atom in has.splits if atom not in self.reading.result.atoms]
        self.split = [(atom, layout) for atom in self.gone for layout in has.splits[atom].layouts]
        self.unknown = list(dict.fromkeys(atom for atom, _ in self.split if atom in has.assumed))
        # Ranks count what they reduce together, all of it, where one size of it is unknown.
        self.counted = tuple(dict.fromkeys(layout for _, layout in self.split)) if self.unknown else ()
        stars = [layout for atom in self.gone for layout in has.stars.get(atom, ())]
        self.resolved = has.mentioned | frozenset(self.digits.of(stars))

    # rule 4: what is pending

    def _kept(self, operand: Operand) -> list[tuple[str, Layout]]:
        """What is pending in an operand as it is computed on. What is the same becomes an ordinary replica there, but
        for a rearrangement: it commutes with communication, so that all of it happens at once, later."""
        return [entry for entry in operand.pending if entry[0] != "same" or self.reading.kind == "rearrange"]

    def _check_passes(self, inherited: Sequence[tuple[str, Layout]]) -> None:
        """Pending values pass only reductions that commute with theirs."""
        for op, layout in inherited if self.reading.kind == "reduce" else ():
            if op != self.op and not {op, self.op} <= LINEAR:
                clause = pending_text(self.mesh, [(op, layout)])
                raise ShardingError(
                    f"'{self.op}' doesn't pass a pending {op}\n{self.has.lines()}\n"
                    f"in  {self.reading.text}\nresolve it first: '| {clause}' on the left of a rearrange"
                )

    def _arising(self) -> list[tuple[str, Layout]]:
        """What the local computation leaves pending."""
        if self.split and self.op not in _ACROSS:
            atom = self.split[0][0]
            place = layouts_text(self.mesh, self.has.splits[atom].layouts)
            raise ShardingError(
                f"'{self.op}' doesn't reduce across ranks, and {place} splits '{atom}'\n"
                f"{self.has.lines()}\n"
                f"in  {self.reading.text}\ngather it first: '{atom}@{place}' on the left of a rearrange"
            )
        if self.op == "mean":
            self._check_counted()
        return [(self._mean_as(layout) if self.op == "mean" else self.op, layout) for _, layout in self.split]

    def _mean_as(self, layout: Layout) -> str:
        """A mean pends as a mean where the shards are even and nobody asked for a sum."""
        if self.counted:
            return "sum"
        places = [(p.op, p.place.names) for p in self.reading.result.pending or () if p.place is not None]
        wanted = {digit: op for op, names in places for digit in self.digits.of(self.mesh.splits(names))}
        asked = {wanted.get(digit) for digit in self.digits.of((layout,))}
        states = [(self.has.splits[atom], self.has.sizes[atom]) for atom in self.gone]
        if all(len(state) > 1 or size % state.pieces == 0 for state, size in states):
            return "sum" if "sum" in asked else "mean"
        if "mean" in asked:
            raise ShardingError(
                f"a mean over uneven shards isn't the mean of their means\n{self.has.lines()}\n"
                f"in  {self.reading.text}\n"
                f"write '| sum@{self.mesh.called(layout)}' on the right; it pends as local sums over the whole size"
            )
        return "sum"

    def _target_pending(
        self, derived: list[tuple[str, Layout]], arising: list[tuple[str, Layout]]
    ) -> Sequence[tuple[str, Layout]]:
        """What the right side leaves pending, in the order of resolution; and what it calls the same."""
        term = self.reading.result
        if term.keeps_any:
            return derived
        listed = self.has.declared_pending(term)
        if term.pending == ():
            return []
        self._check_arising(arising)
        digits = {(op, digit) for op, axis in derived for digit in self.digits.of((axis,))}
        for op, axis in listed:
            if op != "same" and not digits.issuperset((op, digit) for digit in self.digits.of((axis,))):
                keeps, has = pending_text(self.mesh, [(op, axis)]), pending_text(self.mesh, derived) or "nothing"
                raise ShardingError(
                    f"the right side keeps {keeps}, but the result has {has} pending\n{self.has.lines()}\n"
                    f"in  {self.reading.text}\nwrite '| *' to keep what arises"
                )
        rest = [(op, axis, frozenset(self.digits.of((axis,))) - self.resolved) for op, axis in derived]
        return [*((op, name) for op, axis, free in rest if free for name in self.digits.pick(axis, free)), *listed]

    def _check_counted(self) -> None:
        """Ranks can't count together what stays pending, nor where a split falls in a group of names.

        That depends on how much they have, which each knows of itself alone.
        """
        result, assumed = self.reading.result, self.has.assumed
        entries = [(op, axis) for op, axis in self.has.declared_pending(result) if op != "same"]
        kept = self.counted if result.keeps_any else [axis for _, axis in entries]
        if not {*self.digits.of(kept)}.isdisjoint(self.digits.of(self.counted)):
            self._ask_size("stays pending", self.unknown)
        for slot in self.has.operands[0].term.slots:
            atoms = [atom for atom in slot.atoms if atom in assumed]
            if slot.axes and len(slot.atoms) > 1 and atoms and not {*slot.atoms} <= {*result.atoms}:
                self._ask_size(f"is over names of {slot}@{place_text(slot.axes)}", atoms)

    def _ask_size(self, what: str, atoms: Sequence[str]) -> NoReturn:
        whole = dict(self.reading.wholes)
        names = [name for atom in atoms for name in whole.get(atom, (atom,)) if is_name(name)]
        raise SizeError(
            f"a mean that {what} needs the whole size of {' and '.join(map(repr, atoms))}, and a shard shows this "
            f"rank's part alone\n{self.has.lines()}\nin  {self.reading.text}\n"
            f"give it as a keyword: {', '.join(f'{name}=...' for name in names)}"
        )

    def _check_arising(self, arising: list[tuple[str, Layout]]) -> None:
        """Rule 4: a result that would be left pending without a word."""
        hidden = [(op, axis) for op, axis in arising if not self.resolved.issuperset(self.digits.of((axis,)))]
        if hidden:
            clause, axes = pending_text(self.mesh, hidden), {axis for _, axis in hidden}
            atoms = dict.fromkeys(atom for atom, axis in self.split if axis in axes)
            at = ", ".join(self.has.place_of(atom, self.has.splits[atom]) for atom in atoms)
            raise ShardingError(
                f"the result would be left pending: {clause}\n{self.has.lines()}\nin  {self.reading.text}\n"
                f"write {at} on the left to have it reduced, or '| {clause}' or '| *' on the right to keep it"
            )

    # rule 3: what the right side wants

    def _target(self) -> dict[str, Slots]:
        """How each atom of the result is split."""
        found: dict[str, Slots] = {}
        for slot in self.reading.result.slots:
            splits = [self._wanted(mark.atom, mark.axes) for mark in slot.marks]
            if slot.axes is not None:
                advice = f"write '{slot}' on the right, and split the result in a second call"
                splits = self.has.handed_down(split(*self.mesh.splits(slot.axes)), slot, advice)
            found.update(zip(slot.atoms, splits, strict=True))
        return found

    def _wanted(self, atom: str, axes: Axes | None) -> Slots:
        has = self.has.splits.get(atom, split())
        if axes is None:
            return split() if atom in self.reading.explicit and atom not in self.reading.starred else has
        star = self.has.stars.get(atom, has.layouts)
        if axes == ("*",) and star == has.layouts:
            return has
        if "*" in axes and len(has) > 1:
            self.reading.fail(
                f"'{atom}' is split by one of its factors; '*' has no place to add to", self.reading.span_of(atom)
            )
        return split(*(each for axis in axes for each in (star if axis == "*" else self.mesh.splits((axis,)))))

    def _check_target(self, atoms: dict[str, Slots], pending: Sequence[tuple[str, Layout]]) -> None:
        """No digit twice in the result; where one flows into a place that the text gave away, say so."""
        uses = [(atom, axis) for atom, state in atoms.items() for axis in state.layouts]
        owner: dict[Any, str] = {}
        for what, axis in [*uses, *((f"| {op}", axis) for op, axis in pending)]:
            for key in self.digits.of((axis,)):
                other = owner.setdefault(key, what)
                if other == what:
                    continue
                flowing = [w for w in (what, other) if w in self.has.splits and w not in self.reading.explicit]
                advice = "write the split of both"
                if flowing:
                    written = self.has.place_of(flowing[0], self.has.splits[flowing[0]])
                    advice = f"'{flowing[0]}' came split over it: write {written} on the left to have it moved"
                raise ShardingError(
                    f"'{self.mesh.called(axis)}' would split '{other}' and '{what}'\n{self.has.lines()}\n"
                    f"in  {self.reading.text}\n{advice}"
                )

    # the recipe

    def recipe(self) -> Recipe:
        """The steps, once everything that the four rules forbid has been refused."""
        reading, has, atoms = self.reading, self.has, self.reading.result.atoms
        every = [entry for operand in has.operands for entry in self._kept(operand)]
        inherited = [entry for entry in every if entry[0] != "same"]
        self._check_passes(inherited)
        arising = self._arising()
        pending = self._target_pending([*inherited, *arising], arising)
        target = self._target()
        self._check_target(target, pending)
        wanted = sharding_by_atoms(self.mesh, singles(atoms), [target[a] for a in atoms], pending)
        derived = wanted
        if reading.kind != "repeat":
            derived = sharding_by_atoms(self.mesh, singles(atoms), [has.splits[a] for a in atoms], [*every, *arising])
        result = self._output(derived, wanted)
        averages = reading.kind == "reduce" and self.op == "mean" and not self.counted
        multiplier = math.prod(layout.size for op, layout in arising if op == "mean")
        sizes, inputs = tuple(has.sizes.items()), tuple([self._input(operand, wanted) for operand in has.operands])
        found = Recipe(
            reading.kind, reading.text, self.mesh, self.op, sizes, inputs, result, averages, multiplier, self.counted
        )
        if has.is_global:
            self._check_torch(found)
        return found

    def _input(self, operand: Operand, wanted: Sharding) -> Input:
        groups, atoms = tuple([slot.atoms for slot in operand.term.slots]), operand.term.atoms
        source = sharding_by_atoms(self.mesh, groups, operand.dims, operand.pending)
        elementary = sharding_by_atoms(self.mesh, singles(atoms), operand.atoms, operand.pending)
        if self.reading.kind == "repeat":
            # What repeat adds is made where it belongs: communicate before there is more of it.
            splits, pending = dict(zip(self.reading.result.atoms, wanted.dims, strict=True)), wanted.pending
        else:
            splits, pending = self.has.splits, tuple(self._kept(operand))
        prepared = sharding_by_atoms(self.mesh, singles(atoms), [splits[atom] for atom in atoms], pending)
        return Input(groups, source, elementary, prepared)

    def _output(self, derived: Sharding, target: Sharding) -> Output:
        slots, splits = self.reading.result.slots, iter(target.dims)
        groups = tuple([slot.atoms for slot in slots])
        dims = [self.has.joined(slot, [next(splits) for _ in slot.marks]) for slot in slots]
        return Output(groups, derived, target, sharding_by_atoms(self.mesh, groups, dims, target.pending))

    def _check_torch(self, found: Recipe) -> None:
        try:
            check_torch_can(found.result.output, found.whole(found.result.groups))
        except ShardingError as error:
            raise ShardingError(f"{error}\nin  {self.reading.text}") from None
