"""The four rules: what an expression means for tensors that are sharded as they are.

1. What is annotated is explicit, what isn't flows.
2. The left side is an assertion (for a plain tensor: a declaration).
3. Data moves only where the right side differs from the left.
4. Nothing is left pending that the expression doesn't name.

`recipe` below reads top to bottom: the expression, the mesh that its result lives on (`carrier`), sizes and
states of the operands (`operands`), and here what is pending after the local computation, what the right side
wants, and the recipe that does it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NoReturn

from axes.algebra.errors import AxesError, ShardingError, SizeError
from axes.algebra.flow.carrier import carrier_of, check_axes
from axes.algebra.flow.operands import Named, Operand, Operands, closed, group_text, place_of
from axes.algebra.flow.reading import KINDS, Axes, Reading, is_name, read
from axes.algebra.flow.recipe import Input, Output, Recipe, Shape
from axes.algebra.flow.scaling import scaled, standing_for
from axes.algebra.flow.states import Entry, is_even, land, pending_of, split
from axes.algebra.grammar import place_text
from axes.algebra.layout import Mode, NamedLayout
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import LINEAR, ShardedDim, Sharding, cached_with_names

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
    carrier = carrier_of(reading, mesh, shardings)
    actual = tuple([None if s is None else s.on(carrier).sized(n) for s, n in zip(shardings, shapes, strict=True)])
    standing, wholes = standing_for(reading, carrier, actual, shapes, dict(sizes))
    if wholes:
        with contextlib.suppress(AxesError):
            return scaled(_kept(carrier.rank, reading, carrier, actual, standing, sizes, op), wholes)
    return recipe_at(reading, carrier, actual, shapes, sizes, op)


def recipe_at(
    reading: Reading,
    carrier: Mesh,
    shardings: tuple[Sharding | None, ...],
    shapes: tuple[Shape, ...],
    sizes: tuple[tuple[str, Any], ...],
    op: str,
) -> Recipe:
    """The recipe for tensors of these shapes, found from the start; an error is about these."""
    check_axes(reading, carrier)
    return _Result(Operands(reading, carrier, shardings, shapes, sizes), op).recipe()


@cached_with_names(4096)
def _kept(_: int, *args: Any) -> Recipe:
    """The same, kept for a rank."""
    return recipe_at(*args)


def units_of(kind: str, text: str, shapes: Sequence[Shape]) -> frozenset[tuple[int, int]]:
    """The dims of size one, which `...` in an einsum broadcasts."""
    if kind != "einsum" or "..." not in text:
        return frozenset()
    return frozenset((i, d) for i, shape in enumerate(shapes) for d, extent in enumerate(shape) if extent == 1)


class _Result:
    """What the expression makes of its operands: what is left pending, what the right side wants, and the recipe."""

    def __init__(self, has: Operands, op: str):
        self.has, self.op = has, op
        self.reading, self.mesh, self.digits = has.reading, has.mesh, has.digits
        self.states, self.sizes = has.states, has.sizes

    # rule 4: what is pending

    def _contracted(self) -> list[str]:
        """The atoms that the result lacks."""
        right = set(self.reading.result.atoms)
        return [atom for atom in self.states if atom not in right]

    def _resolved(self) -> frozenset[Mode]:
        """The digits over which the right side decides what stays pending.

        They are those that the text mentions, and those of `f@*` on the left where f is summed away.
        """
        stars = [axis for atom in self._contracted() for axis in self.has.stars.get(atom, ())]
        return self.has.mentioned | frozenset(self.digits.of(stars))

    def _unknown(self) -> list[str]:
        """The atoms that are reduced, split, and of which a plain shard doesn't show the whole size."""
        return [a for a in self._contracted() if a in self.has.assumed and any(x.size > 1 for x in self.states[a].axes)]

    def _counted(self) -> tuple[NamedLayout, ...]:
        """The axes along which ranks count what they reduce together, all of it, where one size of it is unknown."""
        axes = [axis for atom in self._contracted() for axis in self.states[atom].axes if axis.size > 1]
        return tuple(dict.fromkeys(axes)) if self._unknown() else ()

    def _arising(self) -> list[NamedLayout]:
        """The axes over which the local computation leaves the result pending."""
        found = []
        for atom in self._contracted():
            axes = [axis for axis in self.states[atom].axes if axis.size > 1]
            if axes and self.op not in _ACROSS:
                raise ShardingError(
                    f"'{self.op}' doesn't reduce across ranks, and {place_text(axes)} splits '{atom}'\n"
                    f"{self.has.lines()}\n"
                    f"in  {self.reading.text}\ngather it first: '{atom}@{place_text(axes)}' on the left of a rearrange"
                )
            found += axes
        return found

    def _check_passes(self) -> None:
        """Pending values pass only reductions that commute with theirs."""
        if self.reading.kind != "reduce":
            return
        for op, axis in self.has.operands[0].pending:
            passes = (op in LINEAR and self.op in LINEAR) or (op == self.op)
            if not passes:
                raise ShardingError(
                    f"'{self.op}' doesn't pass a pending {op}\n{self.has.lines()}\n"
                    f"in  {self.reading.text}\nresolve it first: '| {op}@{axis}' on the left of a rearrange"
                )

    def _derived_pending(self) -> tuple[list[Entry], list[Entry]]:
        """What is pending before the right side is looked at: inherited, and arising."""
        self._check_passes()
        inherited = [entry for operand in self.has.operands for entry in operand.pending]
        axes = self._arising()
        if self.op == "mean" and self.has.assumed:
            self._check_counted()
        if self.op == "mean" and self._counted():
            return inherited, [("sum", axis) for axis in axes]
        if self.op == "mean":
            return inherited, [(self._mean_as(axis), axis) for axis in axes]
        return inherited, [(self.op, axis) for axis in axes]

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
                    f"a mean over uneven shards isn't the mean of their means\n{self.has.lines()}\n"
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
        listed, same = self.has.declared_pending(term)
        if same and self.has.is_global:
            self.reading.fail("'same' is about gradients of plain tensors; a DTensor has none", term.pending[0].span)  # type: ignore[index]
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
        result, arising = self.reading.result, self._counted()
        pending = [p for p in result.pending or () if p.op != "same"]
        named = [axis for p in pending if p.place is not None for axis in self.mesh.named(p.place.names)]
        kept = set(self.digits.of(arising if result.keeps_any else named))
        if not kept.isdisjoint(self.digits.of(arising)):
            self._ask_size("stays pending", self._unknown())
        for slot in self.has.operands[0].term.slots:
            gone = set(slot.atoms) - set(result.atoms)
            if slot.axes and len(slot.atoms) > 1 and gone and self.has.assumed & {*slot.atoms}:
                self._ask_size(f"is over names of {slot}", [atom for atom in slot.atoms if atom in self.has.assumed])

    def _ask_size(self, what: str, atoms: Sequence[str]) -> NoReturn:
        whole = dict(self.reading.wholes)
        names = [name for atom in dict.fromkeys(atoms) for name in whole.get(atom, (atom,)) if is_name(name)]
        quoted = " and ".join(f"'{atom}'" for atom in dict.fromkeys(atoms))
        raise SizeError(
            f"a mean that {what} needs the whole size of {quoted}, and a shard shows this rank's part alone\n"
            f"{self.has.lines()}\nin  {self.reading.text}\ngive it as a keyword: {', '.join(f'{n}=...' for n in names)}"
        )

    def _check_arising(self, arising: list[Entry]) -> None:
        """Rule 4: a result that would be left pending without a word."""
        resolved = self._resolved()
        hidden = [(op, axis) for op, axis in arising if any(d not in resolved for d in self.digits.of((axis,)))]
        if not hidden:
            return
        clause = " ".join(map(str, pending_of(hidden)))
        axes = {axis for _, axis in hidden}
        at = ", ".join(place_of(a, self.states[a]) for a in self._contracted() if axes & set(self.states[a].axes))
        raise ShardingError(
            f"the result would be left pending: {clause}\n{self.has.lines()}\nin  {self.reading.text}\n"
            f"write {at} on the left to have it reduced, or '| {clause}' or '| *' on the right to keep it"
        )

    def _not_pending(self, op: str, axis: NamedLayout, derived: list[Entry]) -> NoReturn:
        has = " ".join(map(str, pending_of(derived))) or "nothing"
        raise ShardingError(
            f"the right side keeps {op}@{axis}, but the result has {has} pending\n{self.has.lines()}\n"
            f"in  {self.reading.text}\nwrite '| *' to keep what arises"
        )

    # rule 3: what the right side wants

    def _target(self) -> dict[str, ShardedDim]:
        """The state of each atom of the result."""
        atoms: dict[str, ShardedDim] = {}
        for slot in self.reading.result.slots:
            if slot.axes is None:
                atoms.update({m.atom: self._wanted(m.atom, m.axes) for m in slot.marks})
                continue
            if "*" in slot.axes:
                self.reading.fail(f"write '*' at the name in {slot} that it is about", slot.span)
            sizes = [(atom, self.sizes[atom]) for atom in slot.atoms]
            whole = split(group_text(slot), *self.mesh.named(slot.axes))
            landed = land(whole, math.prod(n for _, n in sizes), sizes)
            if landed is None:
                advice = f"write '{group_text(slot)}' on the right, and split the result in a second call"
                raise self.has.between_names(whole, sizes, slot, advice)
            atoms.update(zip(slot.atoms, landed, strict=True))
        return atoms

    def _wanted(self, atom: str, axes: Axes | None) -> ShardedDim:
        has = self.states.get(atom, split(atom))
        if axes is None:
            return split(atom) if atom in self.reading.explicit and atom not in self.reading.starred else has
        if "*" not in axes:
            return split(atom, *self.mesh.named(axes))
        star = self.has.stars.get(atom)
        if axes == ("*",) and (star is None or star == has.axes):
            return has
        if len(has.factors) > 1:
            self.reading.fail(
                f"'{atom}' is split by one of its factors; '*' has no place to add to", self.reading.span_of_atom(atom)
            )
        rest = has.axes if star is None else star
        return split(atom, *(each for axis in axes for each in (rest if axis == "*" else self.mesh.named((axis,)))))

    def _check_target(self, atoms: dict[str, ShardedDim], pending: Sequence[Entry], same: Named) -> None:
        """No digit twice in the result; where one flows into a place that the text gave away, say so."""
        uses = [(atom, axis) for atom, state in atoms.items() for axis in state.axes]
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
                    written = place_of(flowing, self.states[flowing])
                    advice = f"'{flowing}' came split over it: write {written} on the left to have it moved"
                raise ShardingError(
                    f"'{axis}' would split '{other}' and '{what}'\n{self.has.lines()}\n"
                    f"in  {self.reading.text}\n{advice}"
                )

    # the recipe

    def recipe(self) -> Recipe:
        """The steps, once everything that the four rules forbid has been refused."""
        reading, atoms = self.reading, self.reading.result.atoms
        inherited, arising = self._derived_pending()
        pending, same = self._target_pending(inherited, arising)
        counted = self._counted()
        mean = reading.kind == "reduce" and self.op == "mean"
        target = self._target()
        self._check_target(target, pending, same)
        final = pending_of([*pending, *(("same", axis) for axis in same)])
        wanted = Sharding(self.mesh, tuple(target[a] for a in atoms), final)
        if reading.kind == "repeat":
            # What repeat adds is made where it belongs: communicate before there is more of it.
            before = [Sharding(self.mesh, tuple(target[a] for a in o.term.atoms), final) for o in self.has.operands]
            derived = wanted
        else:
            before = [self._prepared(operand) for operand in self.has.operands]
            entries = [*inherited, *arising]
            if reading.kind == "rearrange":
                entries += [("same", axis) for axis in self.has.operands[0].same]
            derived = Sharding(self.mesh, tuple(self.states[a] for a in atoms), pending_of(entries))
        inputs = tuple(
            self._input(operand, sharding) for operand, sharding in zip(self.has.operands, before, strict=True)
        )
        result = self._output(derived, wanted)
        divisor = math.prod(self.sizes[a] for a in self._contracted()) if mean and not counted else 1
        multiplier = math.prod(axis.size for op, axis in arising if op == "mean")
        sizes = tuple(self.sizes.items())
        kind, text, op = reading.kind, reading.text, self.op
        found = Recipe(kind, text, self.mesh, op, sizes, inputs, result, divisor, multiplier, counted)
        if self.has.is_global:
            self._check_torch(found)
        return found

    def _prepared(self, operand: Operand) -> Sharding:
        """The operand as the local computation takes it: what is `same` becomes an ordinary replica."""
        entries = list(operand.pending)
        if self.reading.kind == "rearrange":
            # A rearrangement commutes with communication, so that all of it happens at once, later.
            entries += [("same", axis) for axis in operand.same]
        states = tuple(self.states[atom] for atom in operand.term.atoms)
        return Sharding(self.mesh, states, pending_of(entries))

    def _input(self, operand: Operand, prepared: Sharding) -> Input:
        pending = pending_of([*operand.pending, *(("same", axis) for axis in operand.same)])
        source = Sharding(self.mesh, operand.dims, pending)
        elementary = Sharding(self.mesh, operand.marks, pending)
        groups = tuple(slot.atoms for slot in operand.term.slots)
        return Input(operand.shape, groups, source, elementary, prepared)

    def _output(self, derived: Sharding, target: Sharding) -> Output:
        states = dict(zip(self.reading.result.atoms, target.dims, strict=True))
        dims, shape = [], []
        for slot in self.reading.result.slots:
            dims.append(closed([(states[a], self.sizes[a]) for a in slot.atoms], self.reading))
            shape.append(math.prod(self.sizes[a] for a in slot.atoms))
        groups = tuple(slot.atoms for slot in self.reading.result.slots)
        return Output(tuple(shape), groups, derived, target, Sharding(self.mesh, tuple(dims), target.pending))

    def _check_torch(self, found: Recipe) -> None:
        try:
            check_torch_can(found.result.output, found.result.shape)
        except ShardingError as error:
            raise ShardingError(f"{error}\nin  {self.reading.text}") from None
