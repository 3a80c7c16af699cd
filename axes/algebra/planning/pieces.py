"""Pieces and grids: the tiles that the ranks of a group have on one side, and who has each.

Along each dim a side is cut into pieces by some digits of the position. So which tiles meet, and who has them, follows
dim by dim, without a look at all ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import chain, repeat
from operator import mul, sub

from axes.algebra.chunks import Runs, Tile, all_chunks, count, factor_runs
from axes.algebra.layout import Layout, digits
from axes.algebra.planning.boxes import shared_runs
from axes.algebra.sharding import ShardedDim
from axes.algebra.universe import Universe

NO_DIGITS = Layout()


@lru_cache(maxsize=1024)
def _layout_of(dim: ShardedDim) -> tuple[Layout, tuple[tuple[int, ...], ...]]:
    """All digits that split a dim, in its order; and for each factor into how many parts each of its axes cuts it."""
    sizes = tuple([tuple([layout.size for layout in factor.layouts]) for factor in dim.factors])
    return Layout.product(*(axis.layout for axis in dim.axes)), sizes


def _stop(interval: tuple[int, int]) -> int:
    return interval[1]


class Pieces:
    """The pieces that a dim is cut into, numbered in the order in which its axes step through the ranks.

    >>> from axes.algebra.mesh import Mesh
    >>> pieces = Pieces(Mesh("tp=4").sharding("s@tp").dims[0], (6,))
    >>> [pieces.runs(number) for number in range(4)], pieces.meeting(((1, 3),))
    ([((0, 2),), ((2, 4),), ((4, 6),), ((6, 6),)], [0, 1])
    """

    def __init__(self, dim: ShardedDim, extents: tuple[int, ...]):
        self.dim, self.extents = dim, extents
        self.layout, self.axes = _layout_of(dim)
        self.runs = self._interval if len(extents) == 1 else lru_cache(maxsize=8192)(self._runs_of_factors)

    def number(self, position: int) -> int:
        """Which piece the rank at a position has."""
        return self.layout.coordinate(position) if self.layout.modes else 0

    def _interval(self, number: int) -> Runs:
        return (self.cuts[0][number],)

    def _runs_of_factors(self, number: int) -> Runs:
        return factor_runs(self.extents, self.parts(number))

    @cached_property
    def cuts(self) -> Sequence[Sequence[tuple[int, int]]]:
        """For each factor the `(start, stop)` of its pieces, in order. A piece of the dim is one piece of each."""
        return tuple(map(all_chunks, self.extents, self.axes))

    def parts(self, number: int) -> Runs:
        """The `(start, stop)` of a piece in each factor."""
        found = []
        for pieces in reversed(self.cuts):
            number, at = divmod(number, len(pieces))
            found.append(pieces[at])
        return tuple(reversed(found))

    def by_factor(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of these pieces in each factor."""
        found = [numbers]
        for pieces in reversed(self.cuts[1:]):
            rest, size = found.pop(0), len(pieces)
            found = [[number // size for number in rest], [number % size for number in rest], *found]
        return found

    @cached_property
    def sizes(self) -> Sequence[int]:
        """How many indices each piece has."""
        if not self.extents:
            return [count(self.runs(number)) for number in range(self.layout.size)]
        found = [1]
        for pieces in self.cuts:
            lengths = [stop - start for start, stop in pieces]
            found = [so_far * length for so_far in found for length in lengths]
        return found

    def meeting(self, runs: Runs) -> Sequence[int]:
        """The numbers of the pieces that share elements with these runs, ascending."""
        if not self.layout.modes:
            return range(1)
        if len(self.extents) > 1:
            return self._meeting_factors(runs)
        if len(runs) > 1:
            return sorted({number for run in runs for number in self.meeting((run,))})
        (start, stop), size = runs[0], self.layout.size
        if self.extents[0] % size == 0:
            piece = self.extents[0] // size
            return range(start // piece, -(-stop // piece))
        ends = self.cuts[0]
        first = bisect_right(ends, start, key=_stop)
        found = range(first, bisect_left(ends, stop, key=_stop) + 1)
        return [number for number in found if ends[number][0] < ends[number][1]]

    def _meeting_factors(self, runs: Runs) -> Sequence[int]:
        """The same where factors are split: from one boundary to the next."""
        found: dict[int, None] = {}
        for start, stop in runs:
            while start < stop:
                number, start = self._piece_at(start)
                found[number] = None
        return sorted(found)

    def _piece_at(self, index: int) -> tuple[int, int]:
        """The number of the piece that an index is in, and where the run ends that it is in."""
        number, inner, stop = 0, math.prod(self.extents), self.extents[0]
        for factor, extent in zip(self.dim.factors, self.extents, strict=True):
            inner //= extent
            piece = extent // factor.pieces
            part = index // inner % extent // piece
            number = number * factor.pieces + part
            if factor.pieces > 1:
                stop = (index // (inner * extent) * extent + (part + 1) * piece) * inner
        return number, stop


Numbers = tuple[int, ...]
"""Which tile: the number of its piece along each dim."""


@lru_cache(maxsize=1024)
def _in_group(
    members: Layout, origin: int, layers: Layout, layouts: tuple[Layout, ...]
) -> tuple[Layout, int, tuple[Sequence[int], ...]]:
    """Of a group that `origin` is in, where dims are split by these layouts: the digits that split none; the position
    where all coordinates are 0; and which numbers of pieces occur along each dim."""
    own, layered, *split = digits(members, layers, *layouts)
    taken = {*layered, *(digit for each in split for digit in each)}
    free = Layout.of([digit for digit in own if digit not in taken])
    base = origin - sum(layout.offset(layout.coordinate(origin)) for layout in (free, layers, *layouts))
    within = [Layout.of([digit for digit in each if digit in own]) for each in split]
    return free, base, tuple(_numbers(layout, of, origin) for layout, of in zip(layouts, within, strict=True))


def _numbers(layout: Layout, varying: Layout, origin: int) -> Sequence[int]:
    """The coordinates on a layout of the positions that differ from `origin` in some of its digits."""
    if varying.size == layout.size:
        return range(layout.size)
    first = origin - varying.offset(varying.coordinate(origin))
    return sorted(layout.coordinate(first + offset) for offset in varying.offsets())


class TileGrid:
    """The tiles that a group's ranks have on one side, as a grid, and who has each.

    dims: what each dim is cut into. members: the digits of the position that the group steps through. origin: the
    position of one of its ranks. layers: the digits over which a reduction is pending.
    """

    def __init__(
        self, universe: Universe, dims: tuple[Pieces, ...], members: Layout, origin: int, layers: Layout = NO_DIGITS
    ):
        self.universe, self.members, self.layers = universe, members, layers
        self.dims = dims
        layouts = tuple([pieces.layout for pieces in self.dims])
        self.free, self.base, self.there = _in_group(members, origin, layers, layouts)

    @property
    def copies(self) -> int:
        """How many ranks have the same tile (of one layer)."""
        return self.free.size

    def numbers(self, position: int) -> Numbers:
        """Which tile the rank at a position has."""
        return tuple([pieces.number(position) for pieces in self.dims])

    def tile(self, numbers: Numbers) -> Tile:
        """The tile of the pieces with these numbers, one along each dim."""
        return tuple([pieces.runs(number) for pieces, number in zip(self.dims, numbers, strict=True)])

    def meeting(self, dim: int, runs: Runs) -> Sequence[int]:
        """The numbers along a dim of the pieces of the group that share elements with these runs."""
        found, there = self.dims[dim].meeting(runs), self.there[dim]
        if isinstance(there, range):
            return found
        if isinstance(found, range):
            return there[bisect_left(there, found.start) : bisect_left(there, found.stop)]
        return sorted({*found} & {*there})

    def ranks(self, numbers: Iterable[Sequence[int]], layer: int = 0) -> list[int]:
        """The ranks with any of these numbers along each dim, each number's in order."""
        positions = [self.base + self.layers.offset(layer)]
        for pieces, some in zip(self.dims, numbers, strict=True):
            every = len(some) == pieces.layout.size
            offsets = pieces.layout.offsets() if every else [pieces.layout.offset(number) for number in some]
            positions = [position + offset for position in positions for offset in offsets]
        free = self.free.offsets()
        return list(self.universe.pick([position + offset for position in positions for offset in free]))

    def holders(self, numbers: Numbers, layer: int = 0) -> list[int]:
        """The ranks that have a tile, ascending."""
        return sorted(self.ranks([(number,) for number in numbers], layer))


def overlaps(one: Pieces, two: Pieces, mine: list[int], theirs: list[int]) -> Iterable[int]:
    """How much the pieces with these numbers have in common, pair by pair."""
    if not same_factors(one, two):
        runs = [{at: side.runs(at) for at in {*numbers}} for side, numbers in ((one, mine), (two, theirs))]
        common = {(a, b): count(shared_runs(runs[0][a], runs[1][b])) for a, b in {*zip(mine, theirs, strict=True)}}
        return [common[pair] for pair in zip(mine, theirs, strict=True)]
    found = [1] * len(mine)
    for ours, others, some, more in zip(one.cuts, two.cuts, one.by_factor(mine), two.by_factor(theirs), strict=True):
        # A hundred thousand pairs: without a step of Python's own for each.
        (starts, stops), (begins, ends) = zip(*ours, strict=True), zip(*others, strict=True)
        first = map(max, map(starts.__getitem__, some), map(begins.__getitem__, more))
        last = map(min, map(stops.__getitem__, some), map(ends.__getitem__, more))
        found = list(map(mul, found, map(max, map(sub, last, first), repeat(0))))
    return found


def same_factors(one: Pieces, two: Pieces) -> bool:
    """Whether both cut the dim factor by factor, in the same factors."""
    return one.extents == two.extents != ()


def coordinates(layout: Layout, positions: Sequence[int]) -> list[int]:
    """`layout.coordinate` of many positions."""
    found = [0] * len(positions)
    for size, stride in layout.modes:
        digits = _digits(positions, size, stride)
        found = [at * size + digit for at, digit in zip(found, digits, strict=True)] if any(found) else digits
    return found


def _digits(positions: Sequence[int], size: int, stride: int) -> list[int]:
    """One digit of many positions.

    >>> _digits(range(7), 2, 2), _digits([6, 5], 2, 2)
    ([0, 0, 1, 1, 0, 0, 1], [1, 0])
    """
    if positions != range(len(positions)) or len(positions) < size * stride:
        return [position // stride % size for position in positions]
    once = list(chain.from_iterable(map(repeat, range(size), repeat(stride))))
    return (once * -(-len(positions) // len(once)))[: len(positions)]
