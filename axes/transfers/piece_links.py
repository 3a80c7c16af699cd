"""Links: a piece of one tensor that is a piece of another, as ranks hold it that have shards of both.

A piece steps through dims of both tensors at once: `(h k) d -> h k d` has `h` and `k` in one dim of the source and in
two of the target. Dims that hang together so are a *knot*. A rank's shard of either tensor holds some stretches of the
elements of each knot, and of the piece all their combinations: a piece is planned as a tensor with a dim for each knot.

>>> h, k = PieceDim("h", 4, 0, 3, 0, 1), PieceDim("k", 3, 0, 1, 1, 1)
>>> d = PieceDim("d", 5, 1, 1, 2, 1)
>>> link = PieceLink.of(LayoutPiece("w", "x", (h, k, d), (0, 0), (0, 0, 0)), (12, 5), (4, 3, 5))
>>> link.extents, [knot.sides for knot in link.knots]
((12, 5), [((0,), (0, 1)), ((1,), (2,))])
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from axes.algebra.chunks import Box, Runs, Tile, count, largest_chunk, merged
from axes.algebra.layout import Layout
from axes.algebra.planning.exchange import Pieces, pieces_of
from axes.algebra.sharding import Sharding, Slots
from axes.transfers.layout_pieces import LayoutPiece, PieceDim, boxes_in_run, cut_box

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Knot:
    """Dims of a piece that hang together. dims: the numbers of the piece's. sides: those of both tensors."""

    dims: tuple[int, ...]
    sides: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class PieceLink:
    """A piece without names. dims: knot by knot. offsets, shapes: of both whole tensors."""

    dims: tuple[PieceDim, ...]
    offsets: tuple[Shape, Shape]
    shapes: tuple[Shape, Shape]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.offsets, self.shapes))

    def __reduce__(self) -> tuple[Any, ...]:
        return PieceLink, (self.dims, self.offsets, self.shapes)  # a hash is a process's own

    @staticmethod
    def of(piece: LayoutPiece, source: Shape, target: Shape) -> PieceLink:
        """The link that a piece is, of tensors of these shapes."""
        offsets, shapes = (piece.source_offset, piece.target_offset), (source, target)
        knots = PieceLink(piece.dims, offsets, shapes).knots
        order = itertools.chain(*[knot.dims for knot in knots])
        return PieceLink(tuple([piece.dims[at] for at in order]), offsets, shapes)

    @property
    def inverse(self) -> PieceLink:
        """The way back."""
        (here, there), (source, target) = self.offsets, self.shapes
        piece = LayoutPiece("", "", self.dims, here, there).inverse
        return PieceLink.of(piece, target, source)

    @cached_property
    def knots(self) -> tuple[Knot, ...]:
        """What hangs together, in the order of the target's dims. A dim that no step of the piece is in is alone."""
        ends = tuple([(dim.source, dim.target) for dim in self.dims])
        return _knots(ends, (len(self.shapes[0]), len(self.shapes[1])))

    @cached_property
    def extents(self) -> Shape:
        """The elements of each knot."""
        return tuple([math.prod(self._sizes(knot)) for knot in self.knots])

    def _sizes(self, knot: Knot) -> Shape:
        return tuple([self.dims[at].size for at in knot.dims])

    def steps(self, side: int, dim: int) -> list[tuple[int, int, int]]:
        """`(number, size, stride)` of the piece's dims that step through a tensor's dim, the widest first."""
        ends = [each.step(side) for each in self.dims]
        own = [(at, self.dims[at].size, stride) for at, (of, stride) in enumerate(ends) if of == dim]
        return sorted(own, key=lambda step: -step[2])

    def pieces(self, side: int, sharding: Sharding) -> tuple[Pieces, ...]:
        """What a sharding of one of the tensors cuts each knot into."""
        dims = tuple(map(pieces_of, sharding.dims, sharding.extents(self.shapes[side])))
        return tuple([_pieces_of_knot(self, knot, side, dims) for knot in self.knots])

    def like(self, *ends: Sharding) -> PieceLink:
        """A link of which ranks have, of shardings of both tensors, the same elements: one of many that are alike.

        Along a dim through which the piece takes no step it begins where the ranks' shards do; and at the first element
        of a dim that no axis splits.
        """
        moving = tuple([dim.source for dim in self.dims]), tuple([dim.target for dim in self.dims])
        here, there = map(_first_alike, ends, self.shapes, self.offsets, moving)
        return self if (here, there) == self.offsets else PieceLink(self.dims, (here, there), self.shapes)

    def largest(self, side: int, sharding: Sharding) -> int:
        """The most elements of the piece that a rank has."""
        ends = zip(sharding.dims, sharding.extents(self.shapes[side]), self.offsets[side], strict=True)
        steps = [tuple([step[1:] for step in self.steps(side, dim)]) for dim in range(len(self.shapes[side]))]
        return math.prod([_most_in_a_piece(each, *end) for each, end in zip(steps, ends, strict=True)])

    def boxes(self, part: Tile, _: Tile) -> tuple[Box, ...]:
        """The elements of stretches of each knot as boxes of the piece, in the order in which they are sent."""
        return tuple(itertools.chain(*map(self._boxes, itertools.product(*part))))

    def _boxes(self, box: Box) -> list[Box]:
        parts = [
            cut_box(tuple([(0, size) for size in self._sizes(knot)]), start, stop) if knot.dims else [()]
            for knot, (start, stop) in zip(self.knots, box, strict=True)
        ]
        return [tuple(itertools.chain(*boxes)) for boxes in itertools.product(*parts)]

    def tile(self, side: int) -> Tile:
        """The elements of one of the tensors that the piece is, as runs of each dim."""
        piece = LayoutPiece("", "", self.dims, *self.offsets)
        return piece.source_tile if side == 0 else piece.target_tile

    def __str__(self) -> str:
        steps = [f"{dim.size} by {dim.step(0)} to {dim.step(1)}" for dim in self.dims]
        ends = [f"{list(offset)} of {list(shape)}" for offset, shape in zip(self.offsets, self.shapes, strict=True)]
        return f"{' -> '.join(ends)}: {', '.join(steps)}"

    def place(self, side: int, tile: Tile, at: Sequence[int]) -> tuple[Shape, Shape] | None:
        """Where an element of the piece is in a shard of one of the tensors, and in which run of each dim.

        tile: the elements of the shard. at: the element, by the piece's dims. None where the shard hasn't got it.
        """
        index = list(self.offsets[side])
        for each, number in zip(self.dims, at, strict=True):
            dim, stride = each.step(side)
            index[dim] += number * stride
        found, where = [], []
        for there, runs in zip(index, tile, strict=True):
            run = bisect_right(runs, there, key=_start) - 1
            if run < 0 or there >= runs[run][1]:
                return None
            found.append(there - runs[run][0] + count(runs[:run]))
            where.append(run)
        return tuple(found), tuple(where)

    def strides(self, side: int, strides: Sequence[int]) -> tuple[int, ...]:
        """How far a step of each of the piece's dims goes in a tensor that has these strides."""
        steps = [dim.step(side) for dim in self.dims]
        return tuple([strides[dim] * stride for dim, stride in steps])


@lru_cache(maxsize=1024)
def _knots(ends: tuple[tuple[int, int], ...], ndims: tuple[int, int]) -> tuple[Knot, ...]:
    """The knots of dims that step through these dims of the source and the target. Pieces of a model are much alike."""
    nodes = [(side, dim) for side in (1, 0) for dim in range(ndims[side])]
    root = {node: node for node in nodes}

    def find(node: tuple[int, int]) -> tuple[int, int]:
        while root[node] != node:
            node = root[node]
        return node

    for source, target in ends:
        one, two = sorted((find((1, target)), find((0, source))), key=nodes.index)
        root[two] = one
    found = []
    for first in [node for node in nodes if find(node) == node]:
        members = [node for node in nodes if find(node) == first]
        dims = [at for at, (_, target) in enumerate(ends) if find((1, target)) == first]
        sides = [tuple([dim for side, dim in members if side == each]) for each in (0, 1)]
        found.append(Knot(tuple(dims), (sides[0], sides[1])))
    return tuple(found)


@lru_cache(maxsize=8192)
def _first_alike(sharding: Sharding, shape: Shape, offset: Shape, moving: tuple[int, ...]) -> Shape:
    """The first offset that the same ranks have as this one, also after steps through the dims of these numbers."""

    def first(dim: int, at: int) -> int:
        if sharding.dims[dim].pieces == 1:
            return 0
        if dim in moving:
            return at
        pieces = pieces_of(sharding.dims[dim], sharding.extents(shape)[dim]).runs
        return next(start for runs in pieces for start, stop in runs if start <= at < stop)

    return tuple(itertools.starmap(first, enumerate(offset)))


_MOST_CUTS = 4096
"""So many pieces of a dim are looked at one by one."""


@lru_cache(maxsize=4096)
def _most_in_a_piece(steps: tuple[tuple[int, int], ...], dim: Slots, extents: Shape, begin: int) -> int:
    """The most elements of nested steps `(size, stride)` from `begin` on that one piece of a dim has.

    Of a dim that is cut into more than `_MOST_CUTS` pieces a bound: as many as the largest piece has.

    >>> from axes.algebra.mesh import Mesh
    >>> dim = Mesh("tp=2").sharding("f@tp").dims[0]
    >>> _most_in_a_piece(((2, 6), (3, 1)), dim, (12,), 0), _most_in_a_piece(((3, 1),), dim, (12,), 5)
    (3, 2)
    """
    every = math.prod([size for size, _ in steps])
    if dim.pieces > _MOST_CUTS:
        sizes = [[layout.size for layout in slot.layouts] for slot in dim]
        return min(every, math.prod(map(largest_chunk, extents, sizes)))
    most = 0
    for piece in pieces_of(dim, extents).runs:
        runs = [(start - begin, stop - begin) for start, stop in piece]
        most = max(most, sum([_volume(box) for run in runs for box in boxes_in_run(steps, *run)]))
        if most == every:
            break
    return most


def _volume(box: Box) -> int:
    return math.prod([stop - start for start, stop in box])


def _pieces_of_knot(link: PieceLink, knot: Knot, side: int, dims: Sequence[Pieces]) -> Pieces:
    """The pieces that a sharding of one tensor cuts a knot into, numbered as those of its dims together."""
    cut = [dims[dim] for dim in knot.sides[side]]
    boxes = [itertools.product(*runs) for runs in itertools.product(*[pieces.runs for pieces in cut])]
    # Those in other runs of the tensor aren't joined where they touch.
    stretches = [tuple(sorted(itertools.chain(*[_within(link, knot, side, each) for each in of]))) for of in boxes]
    return Pieces(Layout.product(*[pieces.layout for pieces in cut]), stretches)


def _within(link: PieceLink, knot: Knot, side: int, runs: Sequence[tuple[int, int]]) -> Runs:
    """The elements of the knot in a run of each dim of the tensor."""
    order: list[int] = []
    choices: list[list[Box]] = []
    for dim, (start, stop) in zip(knot.sides[side], runs, strict=True):
        steps, begin = link.steps(side, dim), link.offsets[side][dim]
        order.extend([at for at, _, _ in steps])
        choices.append(list(boxes_in_run([step[1:] for step in steps], start - begin, stop - begin)))
    whole = {at: (0, link.dims[at].size) for at in knot.dims}
    sizes = [link.dims[at].size for at in knot.dims]
    found: list[tuple[int, int]] = []
    for parts in itertools.product(*choices):
        box = {**whole, **dict(zip(order, itertools.chain(*parts), strict=True))}
        found.extend(_flat(tuple([box[at] for at in knot.dims]), sizes))
    return merged(sorted(found))


def _start(run: Sequence[int]) -> int:
    return run[0]


def _flat(box: Box, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The elements of a box, numbered row-major, as stretches.

    >>> list(_flat(((0, 2), (1, 3)), (2, 4)))
    [(1, 3), (5, 7)]
    """
    strides = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    last = len(box) - 1
    while last > 0 and box[last] == (0, sizes[last]):
        last -= 1
    # What is whole behind a dim is one stretch with it.
    stretch = (box[last][1] - box[last][0]) * strides[last] if box else 1
    begin = box[last][0] * strides[last] if box else 0
    for index in itertools.product(*[range(*bounds) for bounds in box[: max(0, last)]]):
        start = begin + sum([at * stride for at, stride in zip(index, strides, strict=False)])
        yield start, start + stretch
