"""Splits: where axes cut a dim, handed down from a dim to the names in it and back.

How a name is split is a `ShardedDim`, as of a dim. A dim that is a group of names hands its splits down to them
(`handed_down`), and takes those of its names together (`of_names`). Axes of size one split nothing, and are left out.

>>> from axes.algebra.mesh import Mesh
>>> (tp,) = Mesh("tp=2").named(["tp"])
>>> [str(each) for each in handed_down(split("hd", tp), [("h", 6), ("d", 2)])]
['h@tp', 'd']
>>> handed_down(split("sp", tp), [("s", 3), ("p", 5)]) is None       # 15 is cut into 8 and 7
True
>>> str(of_names([(split("three"), 3), (split("h", tp), 4)]))
'(three=3 h=4@tp)'
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import itemgetter

from axes.algebra.errors import ShardingError
from axes.algebra.layout import Mode, NamedLayout, digits
from axes.algebra.mesh import Mesh
from axes.algebra.sharding import PendingReduction, ShardedDim, ShardedFactor, Sharding

Entry = tuple[str, NamedLayout]
"""`(op, axis)`, a pending reduction over one axis."""

Cut = tuple[int, NamedLayout]
"""`(pieces in front, axis)`: where in a dim, counted from its major side, an axis splits it."""


def split(name: str, *axes: NamedLayout) -> ShardedDim:
    """A name that is split over axes, major first; over none, unsplit."""
    return ShardedDim((ShardedFactor(name, None, axes),))


def cuts(dim: ShardedDim, extent: int) -> list[Cut]:
    """Where axes split a dim of this extent, in order."""
    found: list[Cut] = []
    front = 1
    for factor in _sized(dim, extent):
        before = front
        for axis in factor.axes:
            if axis.size > 1:
                found.append((before, axis))
            before *= axis.size
        front *= factor.size or 2 * factor.pieces  # an empty factor is cut as one that is larger than its pieces
    return found


def _sized(dim: ShardedDim, extent: int) -> list[ShardedFactor]:
    """The factors of a dim, with the one size that they leave open."""
    known = math.prod(factor.size or 1 for factor in dim.factors)
    return [factor if factor.size else replace(factor, size=extent // known) for factor in dim.factors]


def of_cuts(name: str, extent: int | None, found: Iterable[Cut]) -> ShardedDim:
    """The dim that is split so, of any size or this one: one factor more wherever a cut leaves a gap."""
    factors: list[ShardedFactor] = []
    start, axes = 1, tuple[NamedLayout, ...]()
    for before, axis in found:
        if before != start * math.prod([each.size for each in axes]):
            factors.append(ShardedFactor(None, before // start, axes))
            start, axes = before, ()
        axes = (*axes, axis)
    return ShardedDim((*factors, ShardedFactor(name, extent // start if extent and factors else None, axes)))


def handed_down(dim: ShardedDim, names: Sequence[tuple[str, int]]) -> list[ShardedDim] | None:
    """How the names in a dim are split, or None where a cut doesn't fall on them evenly.

    An axis goes to the name that its cuts lie in; a name that is split completely passes the next axis on.
    """
    found: list[list[Cut]] = [[] for _ in names]
    every = cuts(dim, math.prod(size for _, size in names))
    large = [at for at, (_, size) in enumerate(names) if size > 1]
    if len(large) < 2 and names:
        found[large[0] if large else 0] = every
    else:
        at, front = 0, 1
        for before, axis in every:
            while at + 1 < len(names) and before >= front * names[at][1]:
                front *= names[at][1]
                at += 1
            if before % front or names[at][1] % (before // front * axis.size):
                return None
            found[at].append((before // front, axis))
    splits = [of_cuts(*name, each) for name, each in zip(names, found, strict=True)]
    return [dim] if splits == [dim] and len(dim.factors) > 1 else splits  # whose factors have names


def of_names(names: Sequence[tuple[ShardedDim, int]], empty: bool = False) -> ShardedDim:
    """The dim that consists of names that are split so, with these sizes; an `empty` one has others in their place.

    Raises `ShardingError` where their shards aren't regular shards of the dim.
    """
    if len(names) < 2:
        return names[0][0] if names else ShardedDim((ShardedFactor(None, 1),))
    every = [factor for dim, extent in names for factor in _sized(dim, extent)]
    text = f"({' '.join(str(f.size) if f.name is None else f.name for f in every)})"
    found: list[ShardedFactor] = []
    large = [factor for factor in every if factor.size != 1 or factor.pieces != 1]
    for factor in large:
        size, last = factor.size or 1, found[-1] if found else None
        if len(large) > 1 and size % factor.pieces:
            raise ShardingError(
                f"{factor} is split into {factor.pieces} uneven parts inside {text}, "
                "and a split factor of a group must divide"
            )
        # Pieces that are used up hand the rest of the split on to what follows.
        if last and (not (last.axes or factor.axes) or (last.axes and last.size == last.pieces)):
            found[-1] = ShardedFactor(None, (last.size or 1) * size, (*last.axes, *factor.axes))
        else:
            found.append(factor)
    if not any(factor.axes for factor in found[1:]):
        return split(text, *(found[0].axes if found else ()))
    return of_open_size(ShardedDim(tuple(found))) if empty else ShardedDim(tuple(found))


def of_open_size(dim: ShardedDim) -> ShardedDim:
    """The dim with a last factor whose size follows from the others, as of an empty dim."""
    return ShardedDim((*dim.factors[:-1], replace(dim.factors[-1], size=None)))


class Digits:
    """Axes as sets of digits that all of them share: their common refinement."""

    def __init__(self, mesh: Mesh, axes: Iterable[NamedLayout]):
        self.mesh = mesh
        layouts = tuple(dict.fromkeys(axis.layout for axis in axes))
        self._of = dict(zip(layouts, digits(*layouts), strict=True))

    def of(self, axes: Iterable[NamedLayout]) -> tuple[Mode, ...]:
        """The digits of axes in order; an axis of size one has none."""
        return tuple([digit for axis in axes for digit in self._of[axis.layout]])

    def pick(self, axis: NamedLayout, wanted: frozenset[Mode]) -> tuple[NamedLayout, ...]:
        """What of an axis consists of the digits in `wanted`."""
        mine = self._of[axis.layout]
        if all(digit in wanted for digit in mine):
            return (axis,) if mine or not wanted else ()
        return self.mesh.calls(digit for digit in mine if digit in wanted)


def pending_of(entries: Iterable[Entry]) -> tuple[PendingReduction, ...]:
    """`(op, axis)` in order of resolution as a sharding writes them: one entry per run of an op."""
    runs = itertools.groupby(entries, itemgetter(0))
    return tuple(PendingReduction(op, tuple(axis for _, axis in run)) for op, run in runs)


def all_axes(*shardings: Sharding) -> list[NamedLayout]:
    """The axes that split a dim of some shardings, or are pending."""
    splits = [axis for sharding in shardings for dim in sharding.dims for axis in dim.axes]
    return splits + [axis for sharding in shardings for reduction in sharding.pending for axis in reduction.axes]


def entries_of(pending: Iterable[PendingReduction]) -> list[Entry]:
    """A sharding's pending reductions as `(op, axis)` in order."""
    return [(reduction.op, axis) for reduction in pending for axis in reduction.axes]
