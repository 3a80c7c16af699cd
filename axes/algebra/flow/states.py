"""States: how single atoms are split, and how the splits of a dim land on its atoms and back.

The state of an atom is a `ShardedDim`, as that of a dim is. A dim that is a group of atoms hands
its splits down to them (`land`), and takes those of its atoms together (`close`).

>>> from axes.algebra.mesh import Mesh
>>> (tp,) = Mesh("tp=2").named(["tp"])
>>> [str(state) for state in land(split("hd", tp), 12, [("h", 6), ("d", 2)])]
['h@tp', 'd']
>>> land(split("sp", tp), 15, [("s", 3), ("p", 5)]) is None       # 15 is cut into 8 and 7
True
>>> str(close([(split("three"), 3), (split("h", tp), 4)]))
'(three=3 h=4@tp)'
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from axes.algebra.errors import ShardingError
from axes.algebra.layout import Mode, NamedLayout, digits
from axes.algebra.mesh import Mesh
from axes.algebra.sharding import PendingReduction, ShardedDim, ShardedFactor, same_cuts

Entry = tuple[str, NamedLayout]
"""`(op, axis)`, a pending reduction over one axis."""

Cut = tuple[int, NamedLayout]
"""`(pieces in front, axis)`: where in a dim, counted from its major side, an axis splits it."""


def split(name: str, *axes: NamedLayout) -> ShardedDim:
    """An atom that is split over axes, major first; over none, unsplit."""
    return ShardedDim((ShardedFactor(name, None, axes),))


def same_split(one: ShardedDim, other: ShardedDim, extent: int) -> bool:
    """Whether two states put the same of `extent` elements on every rank."""
    same_axes = len(one.factors) == len(other.factors) == 1 and one.axes == other.axes
    return same_axes or same_cuts(one, other, extent)


def is_even(state: ShardedDim, extent: int) -> bool:
    """Whether all shards are of one size; a split factor of a group always is."""
    return len(state.factors) > 1 or extent % state.pieces == 0


def sized(state: ShardedDim, extent: int) -> ShardedDim:
    """The state with the one size that it leaves open filled in."""
    if len(state.factors) == 1:
        return state
    known = math.prod(f.size for f in state.factors if f.size is not None)
    factors = (replace(f, size=extent // known) if f.size is None else f for f in state.factors)
    return ShardedDim(tuple(factors))


def cuts(state: ShardedDim, extent: int) -> list[Cut]:
    """Where the axes of a state split it, in order."""
    found: list[Cut] = []
    before = 1
    for factor in sized(state, extent).factors:
        at = before
        for axis in factor.axes:
            found.append((at, axis))
            at *= axis.size
        before *= extent if factor.size is None else factor.size
    return found


def land(state: ShardedDim, extent: int, atoms: Sequence[tuple[str, int]]) -> list[ShardedDim] | None:
    """The states of the atoms of a dim, or None where a split doesn't fall on atoms evenly.

    An axis lands on the atom that its cuts lie in; an atom that is split completely passes the next
    axis on.
    """
    if sum(size != 1 for _, size in atoms) <= 1 and atoms:
        whole = next((i for i, (_, size) in enumerate(atoms) if size != 1), 0)
        return [_renamed(state, name) if i == whole else split(name) for i, (name, _) in enumerate(atoms)]
    found: list[list[Cut]] = [[] for _ in atoms]
    for before, axis in cuts(state, extent):
        at = _atom_at(before, [n for _, n in atoms], axis.size)
        if at is None:
            return None
        front = math.prod(n for _, n in atoms[:at])
        if before % front or atoms[at][1] % (before // front * axis.size):
            return None
        found[at].append((before // front, axis))
    return [of_cuts(name, extent, each) for (name, extent), each in zip(atoms, found, strict=True)]


def _atom_at(before: int, sizes: Sequence[int], size: int) -> int | None:
    """The atom in which a cut that has `before` pieces in front lies; one of size 0 takes any."""
    front = 1
    for at, extent in enumerate(sizes):
        if extent == 0 or front <= before < front * extent or (size == 1 and front * extent >= before):
            return at
        front *= extent
    return None


def of_cuts(name: str, extent: int, found: Sequence[Cut]) -> ShardedDim:
    """The state of an atom with these cuts: one factor more wherever a cut leaves a gap."""
    factors: list[ShardedFactor] = []
    start, reach = 1, 1
    axes: list[NamedLayout] = []
    for before, axis in found:
        if before != reach:
            factors.append(ShardedFactor(None, before // start, tuple(axes)))
            start, axes = before, []
        axes.append(axis)
        reach = before * axis.size
    size = extent // start if factors else None
    return ShardedDim((*factors, ShardedFactor(name, size, tuple(axes))))


def _renamed(state: ShardedDim, name: str) -> ShardedDim:
    if len(state.factors) > 1:
        return state
    factor = state.factors[0]
    return state if factor.name == name else ShardedDim((ShardedFactor(name, None, factor.axes),))


def close(atoms: Sequence[tuple[ShardedDim, int]]) -> ShardedDim:
    """The state of the dim that consists of atoms in these states, with these whole sizes.

    Raises `ShardingError` where the shards of the atoms aren't regular shards of the dim.
    """
    if not atoms:
        return ShardedDim((ShardedFactor(None, 1),))
    if len(atoms) == 1:
        return atoms[0][0]
    opened = [factor for state, extent in atoms for factor in _sized_factors(state, extent)]
    factors = [f for f in opened if f.axes or f.size != 1] or opened[:1]
    _check_even(factors, opened)
    merged = [factors[0]]
    for factor in factors[1:]:
        last = merged[-1]
        # Pieces that are used up hand the rest of the split on to what follows.
        used_up = bool(last.axes) and last.size == last.pieces
        if (not factor.axes and not last.axes) or used_up:
            merged[-1] = _joined(last, factor)
        else:
            merged.append(factor)
    if len(merged) > 1 and merged[0].axes and not any(f.axes for f in merged[1:]):
        merged = [functools.reduce(_joined, merged)]
    if len(merged) == 1:
        return ShardedDim((ShardedFactor(_group_name(opened), None, merged[0].axes),))
    return ShardedDim(tuple(merged))


def _sized_factors(state: ShardedDim, extent: int) -> tuple[ShardedFactor, ...]:
    if len(state.factors) == 1:
        return (replace(state.factors[0], size=extent),)
    return sized(state, extent).factors


def _check_even(factors: Sequence[ShardedFactor], opened: Sequence[ShardedFactor]) -> None:
    if sum(factor.size != 1 or factor.pieces != 1 for factor in factors) <= 1:
        return
    for factor in factors:
        if factor.size is not None and factor.size % factor.pieces:
            raise ShardingError(
                f"{factor} is split into {factor.pieces} uneven parts inside {_group_name(opened)}, "
                "and a split factor of a group must divide"
            )


def _joined(one: ShardedFactor, other: ShardedFactor) -> ShardedFactor:
    assert one.size is not None
    assert other.size is not None
    return ShardedFactor(None, one.size * other.size, (*one.axes, *other.axes))


def _group_name(factors: Iterable[ShardedFactor]) -> str:
    return f"({' '.join(str(f.size) if f.name is None else f.name for f in factors)})"


class Digits:
    """Axes as sets of digits that all of them share: their common refinement."""

    def __init__(self, mesh: Mesh, axes: Iterable[NamedLayout]):
        self.mesh = mesh
        layouts = tuple(dict.fromkeys(axis.layout for axis in axes))
        self._of = dict(zip(layouts, digits(*layouts), strict=True))

    def of(self, axes: Iterable[NamedLayout]) -> tuple[Mode, ...]:
        """The digits of axes in order; an axis of size one has none."""
        return tuple([digit for axis in axes for digit in self._of[axis.layout]])

    def pick(self, axis: NamedLayout, wanted: frozenset[Mode] | set[Mode]) -> tuple[NamedLayout, ...]:
        """What of an axis consists of the digits in `wanted`."""
        mine = self._of[axis.layout]
        if all(digit in wanted for digit in mine):
            return (axis,) if mine or not wanted else ()
        return self.mesh.calls(digit for digit in mine if digit in wanted)


def pending_of(entries: Iterable[Entry]) -> tuple[PendingReduction, ...]:
    """`(op, axis)` in order of resolution as a sharding writes them: one entry per run of an op."""
    found: list[tuple[str, list[NamedLayout]]] = []
    for op, axis in entries:
        if found and found[-1][0] == op:
            found[-1][1].append(axis)
        else:
            found.append((op, [axis]))
    return tuple(PendingReduction(op, tuple(axes)) for op, axes in found)


def entries_of(pending: Iterable[PendingReduction]) -> list[Entry]:
    """A sharding's pending reductions as `(op, axis)` in order."""
    return [(reduction.op, axis) for reduction in pending for axis in reduction.axes]
