"""Pieces: which elements of one tensor are which of another, where names and layouts differ.

A piece is a box of a few dims, each of which steps through one dim of the source and one dim of the target. The query
heads of a fused projection `(g (r k + k + k)) d`, with 2 key heads, 3 queries each and 4 elements a head:

>>> g = PieceDim("g", 2, source=0, source_stride=12, target=0, target_stride=20)
>>> rows = PieceDim("r k", 12, source=0, source_stride=1, target=0, target_stride=1)
>>> d = PieceDim("d", 5, source=1, source_stride=1, target=1, target_stride=1)
>>> q = layout_piece("q", "qkv", (g, rows, d), ((0, 0), (0, 0)), ((24, 5), (40, 5)))
>>> q.target_tile
(((0, 12), (20, 32)), ((0, 5),))

Elements of a dim are counted, not bytes, and tensors are whole ones: what a rank has of them is a `Tile`.

Dims of both tensors through which one dim of a piece steps are *joined*: `(h k) d -> h k d` has `h` and `k` in one dim
of the source and in two of the target. What a rank has of either tensor is some stretches of the elements of a join,
and of the piece all their combinations: a piece is planned as a tensor with a dim for each join.

>>> q.joins, q.extents
([Join(dims=(0, 1), sides=((0,), (0,))), Join(dims=(2,), sides=((1,), (1,)))], (24, 5))
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from axes.algebra.chunks import Box, Runs, Tile, count, factor_runs, intersection, largest_chunk, merged, volume
from axes.algebra.layout import Layout
from axes.algebra.planning.exchange import Pieces, pieces_of
from axes.algebra.sharding import Sharding

View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and offset, as `as_strided` takes them."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PieceDim:
    """A dim of a piece: where it steps in both tensors.

    source, target: the number of a tensor's dim. source_stride, target_stride: how far a step goes in it.
    """

    name: str
    size: int
    source: int
    source_stride: int
    target: int
    target_stride: int

    def step(self, side: int) -> tuple[int, int]:
        """The dim that it steps through, of the source (0) or the target (1), and how far."""
        return (self.source, self.source_stride) if side == 0 else (self.target, self.target_stride)

    @property
    def inverse(self) -> PieceDim:
        """The same with source and target in each other's place."""
        return PieceDim(self.name, self.size, self.target, self.target_stride, self.source, self.source_stride)


class Join(NamedTuple):
    """Dims of a piece that are joined. dims: the numbers of the piece's. sides: those of both tensors."""

    dims: tuple[int, ...]
    sides: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class LayoutPiece:
    """A part of a source that is a part of a target, element by element; made by `layout_piece`.

    source, target: the names of the tensors. dims: join by join, in the target's order.
    offsets: for each dim of both tensors, where the piece begins. shapes: of both whole tensors.
    """

    source: str = field(compare=False)
    target: str = field(compare=False)
    dims: tuple[PieceDim, ...]
    offsets: tuple[Shape, Shape]
    shapes: tuple[Shape, Shape]

    @property
    def shape(self) -> Shape:
        """The size of each dim of the piece."""
        return tuple([dim.size for dim in self.dims])

    @property
    def is_whole(self) -> bool:
        """Whether it is all of both tensors, element by element."""
        here, there = self.shapes
        rows = [(dim.step(0), dim.step(1)) for dim in self.dims]
        whole = here == there and self.shape == tuple([size for size in here if size != 1])
        return whole and all(one == two and one[1] == 1 for one, two in rows)

    @property
    def inverse(self) -> LayoutPiece:
        """The way back."""
        dims = [dim.inverse for dim in self.dims]
        return layout_piece(self.target, self.source, dims, self.offsets[::-1], self.shapes[::-1])

    @property
    def source_offset(self) -> Shape:
        """Where it begins in the source."""
        return self.offsets[0]

    @property
    def target_offset(self) -> Shape:
        """Where it begins in the target."""
        return self.offsets[1]

    def source_view(self, strides: Sequence[int]) -> View:
        """The piece as a view of a whole source that has these strides."""
        return self.shape, self.strides(0, strides), sum(map(math.prod, zip(strides, self.offsets[0], strict=True)))

    def target_view(self, strides: Sequence[int]) -> View:
        """The piece as a view of a whole target that has these strides.

        `target.as_strided(*piece.target_view(target.stride())).copy_(source.as_strided(*piece.source_view(...)))`
        """
        return self.shape, self.strides(1, strides), sum(map(math.prod, zip(strides, self.offsets[1], strict=True)))

    @property
    def source_tile(self) -> Tile:
        """The elements of the source, as runs of each of its dims."""
        return tuple([_runs(self.steps(0, dim), offset) for dim, offset in enumerate(self.offsets[0])])

    @property
    def target_tile(self) -> Tile:
        """The elements of the target, as runs of each of its dims."""
        return tuple([_runs(self.steps(1, dim), offset) for dim, offset in enumerate(self.offsets[1])])

    def steps(self, side: int, dim: int) -> list[tuple[int, int, int]]:
        """`(number, size, stride)` of the piece's dims that step through a tensor's dim, the widest first."""
        ends = [(at, each.size, *each.step(side)) for at, each in enumerate(self.dims)]
        return sorted([(at, size, far) for at, size, of, far in ends if of == dim], key=lambda step: -step[2])

    def strides(self, side: int, strides: Sequence[int]) -> tuple[int, ...]:
        """How far a step of each of the piece's dims goes in a tensor that has these strides."""
        return tuple([strides[of] * far for of, far in [dim.step(side) for dim in self.dims]])

    def within(self, box: Box) -> LayoutPiece:
        """The part of the piece in a box of its own dims."""
        offsets = [*self.offsets[0]], [*self.offsets[1]]
        for dim, (start, _) in zip(self.dims, box, strict=True):
            for side in (0, 1):
                of, far = dim.step(side)
                offsets[side][of] += start * far
        dims = tuple([replace(dim, size=stop - start) for dim, (start, stop) in zip(self.dims, box, strict=True)])
        return replace(self, dims=dims, offsets=(tuple(offsets[0]), tuple(offsets[1])))

    def boxes_in_target(self, tile: Tile) -> Iterator[Box]:
        """The boxes of the piece whose elements a tile of the target holds; they don't overlap.

        >>> dims = PieceDim("h", 3, 0, 4, 0, 5), PieceDim("k", 4, 0, 1, 0, 1)
        >>> list(layout_piece("q", "qkv", dims, ((0,), (100,)), ((12,), (200,))).boxes_in_target((((102, 111),),)))
        [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
        """
        for box in self._boxes_within(1, range(len(tile)), tile):
            yield tuple([box[at] for at in range(len(self.dims))])

    def with_boxes_of_source(self) -> Iterator[LayoutPiece]:
        """The piece cut so that each part is one box of the source, as few as that takes: what a file is read by."""
        whole = [(0, dim.size) for dim in self.dims]
        cut = [index for index, dim in enumerate(self.dims) if not self._is_dense(dim)]
        for where in itertools.product(*[range(self.dims[index].size) for index in cut]):
            for index, at in zip(cut, where, strict=True):
                whole[index] = (at, at + 1)
            yield self.within(tuple(whole))

    def _is_dense(self, dim: PieceDim) -> bool:
        """Whether the steps of a dim leave no gap in the source."""
        inner = [d for d in self.dims if d.source == dim.source and d.source_stride < dim.source_stride]
        return dim.size == 1 or dim.source_stride == math.prod([d.size for d in inner])

    def _boxes_within(
        self, side: int, dims: Sequence[int], runs: Sequence[Runs]
    ) -> Iterator[dict[int, tuple[int, int]]]:
        """The elements of the piece in runs of these dims of a tensor, as boxes of the dims that step through them."""
        order: list[int] = []
        choices: list[list[Box]] = []
        for dim, own in zip(dims, runs, strict=True):
            steps, begin = self.steps(side, dim), self.offsets[side][dim]
            order += [at for at, _, _ in steps]
            inner = [step[1:] for step in steps]
            choices.append([box for run in own for box in boxes_in_run(inner, run[0] - begin, run[1] - begin)])
        for parts in itertools.product(*choices):
            yield dict(zip(order, itertools.chain(*parts), strict=True))

    # as ranks have it

    @cached_property
    def joins(self) -> list[Join]:
        """What is joined, in the order of the target's dims. A dim that no step of the piece is in is alone."""
        ends = tuple([(dim.source, dim.target) for dim in self.dims])
        return _joins(ends, (len(self.shapes[0]), len(self.shapes[1])))

    @cached_property
    def extents(self) -> Shape:
        """The elements of each join."""
        return tuple([math.prod([self.dims[at].size for at in join.dims]) for join in self.joins])

    def pieces(self, side: int, sharding: Sharding) -> tuple[Pieces, ...]:
        """What a sharding of one of the tensors cuts each join into, numbered as the pieces of its dims together."""
        dims = list(map(pieces_of, sharding.dims, sharding.extents(self.shapes[side])))
        found = []
        for join in self.joins:
            cut = [dims[dim] for dim in join.sides[side]]
            every = [list(itertools.product(*runs)) for runs in itertools.product(*[each.runs for each in cut])]
            # Stretches in other runs of the tensor aren't joined where they touch.
            runs = [tuple(sorted([run for one in of for run in self._stretches(join, side, one)])) for of in every]
            found.append(Pieces(Layout.product(*[each.layout for each in cut]), runs))
        return tuple(found)

    def _stretches(self, join: Join, side: int, runs: Sequence[tuple[int, int]]) -> Runs:
        """The elements of a join in a run of each of its dims of a tensor."""
        sizes = tuple([self.dims[at].size for at in join.dims])
        boxes = self._boxes_within(side, join.sides[side], [(run,) for run in runs])
        found = [factor_runs(sizes, tuple([box[at] for at in join.dims])) for box in boxes]
        return merged(sorted(itertools.chain(*found)))

    def boxes(self, part: Tile, _: Tile) -> tuple[Box, ...]:
        """The elements of stretches of each join as boxes of the piece, in the order in which they are sent."""
        found: list[Box] = []
        for bounds in itertools.product(*part):
            whole = [tuple([(0, self.dims[at].size) for at in join.dims]) for join in self.joins]
            parts = [
                cut_box(*each) if each[0] else [()] for each in zip(whole, *zip(*bounds, strict=True), strict=True)
            ]
            found += [tuple(itertools.chain(*boxes)) for boxes in itertools.product(*parts)]
        return tuple(found)

    def like(self, *ends: Sharding) -> LayoutPiece:
        """A piece of which ranks have, of shardings of both tensors, the same elements: one of many that are alike.

        Along a dim through which the piece takes no step it begins where the ranks' shards do; and at the first element
        of a dim that no axis splits.
        """
        offsets = [
            tuple(
                [
                    first_alike(end, self.shapes[side], dim, at, bool(self.steps(side, dim)))
                    for dim, at in enumerate(self.offsets[side])
                ]
            )
            for side, end in enumerate(ends)
        ]
        return replace(self, offsets=(offsets[0], offsets[1]))

    def largest(self, side: int, sharding: Sharding) -> int:
        """The most elements of the piece that a rank may have: a bound."""
        ends = zip(sharding.dims, sharding.extents(self.shapes[side]), strict=True)
        cuts = [[(size, [each.size for each in slot.layouts]) for slot, size in zip(*end, strict=True)] for end in ends]
        tile = [math.prod([largest_chunk(*each) for each in cut]) for cut in cuts]
        every = [math.prod([size for _, size, _ in self.steps(side, dim)]) for dim in range(len(tile))]
        return math.prod(map(min, every, tile))

    def place(self, side: int, tile: Tile, at: Sequence[int]) -> tuple[Shape, Shape | None]:
        """Where an element of the piece is in a shard of one of the tensors, and in which run of each dim.

        tile: the elements of the shard. at: the element, by the piece's dims. None where the shard hasn't got it.
        """
        index = list(self.offsets[side])
        for each, number in zip(self.dims, at, strict=True):
            of, far = each.step(side)
            index[of] += number * far
        where = [bisect_right(runs, there, key=_start) - 1 for there, runs in zip(index, tile, strict=True)]
        for there, run, runs in zip(index, where, tile, strict=True):
            if run < 0 or there >= runs[run][1]:
                return (), None
        found = [there - runs[run][0] + count(runs[:run]) for there, run, runs in zip(index, where, tile, strict=True)]
        return tuple(found), tuple(where)


def layout_piece(
    source: str, target: str, dims: Iterable[PieceDim], offsets: tuple[Shape, Shape], shapes: tuple[Shape, Shape]
) -> LayoutPiece:
    """The piece with these dims, in whatever order: without those of size one, neighbours that step as one as one."""
    found: list[PieceDim] = []
    for dim in sorted(dims, key=lambda dim: (dim.target, -dim.target_stride)):
        outer = found[-1] if found else None
        if dim.size == 1:
            continue
        if (
            outer is not None
            and (outer.source, outer.target) == (dim.source, dim.target)
            and outer.source_stride == dim.size * dim.source_stride
            and outer.target_stride == dim.size * dim.target_stride
        ):
            dim = replace(dim, name=f"{outer.name} {dim.name}", size=outer.size * dim.size)
            found.pop()
        found.append(dim)
    joins = LayoutPiece(source, target, tuple(found), offsets, shapes).joins
    return LayoutPiece(source, target, tuple([found[at] for join in joins for at in join.dims]), offsets, shapes)


def whole_piece(source: str, shape: Shape, target: str | None = None) -> LayoutPiece:
    """A tensor that is the same on both sides."""
    nowhere = (0,) * len(shape)
    dims = tuple([PieceDim(f"dim{at}", size, at, 1, at, 1) for at, size in enumerate(shape) if size != 1])
    return LayoutPiece(source, source if target is None else target, dims, (nowhere, nowhere), (shape, shape))


@lru_cache(maxsize=1024)
def _joins(ends: tuple[tuple[int, int], ...], ndims: tuple[int, int]) -> list[Join]:
    """The joins of dims that step through these dims of the source and the target. Pieces of a model are much alike."""
    nodes = [(side, dim) for side in (1, 0) for dim in range(ndims[side])]
    joined = {node: frozenset([node]) for node in nodes}
    for source, target in ends:
        both = joined[1, target] | joined[0, source]
        joined.update(dict.fromkeys(both, both))
    found = []
    for members in dict.fromkeys([joined[node] for node in nodes]):
        dims = tuple([at for at, (_, target) in enumerate(ends) if (1, target) in members])
        sides = [tuple(sorted([dim for of, dim in members if of == side])) for side in (0, 1)]
        found.append(Join(dims, (sides[0], sides[1])))
    return found


@lru_cache(maxsize=8192)
def first_alike(sharding: Sharding, shape: Shape, dim: int, at: int, moves: bool) -> int:
    """The first place along a dim that the same ranks have as this one; itself where a piece moves through the dim."""
    if sharding.dims[dim].pieces == 1:
        return 0
    every = pieces_of(sharding.dims[dim], sharding.extents(shape)[dim]).runs
    return at if moves else next(start for runs in every for start, stop in runs if start <= at < stop)


def _start(run: Sequence[int]) -> int:
    return run[0]


def _runs(steps: Sequence[tuple[int, int, int]], offset: int) -> Runs:
    """The elements of one dim that steps `(number, size, stride)` reach."""
    found: Runs = ((0, 1),)
    for _, size, stride in reversed(steps):
        if found == ((0, stride),):
            found = ((0, stride * size),)
        else:
            found = merged((at * stride + start, at * stride + stop) for at in range(size) for start, stop in found)
    return tuple([(offset + start, offset + stop) for start, stop in found])


def boxes_in_run(steps: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[Box]:
    """The boxes of nested steps `(size, stride)`, the widest first, whose elements lie from `start` to `stop`."""
    if not steps:
        if start <= 0 < stop:
            yield ()
        return
    (size, stride), *inner = steps
    span = 1 + sum([(many - 1) * step for many, step in inner])
    first, last = max(0, (start - span) // stride + 1), min(size, -(-stop // stride))  # those that share something
    full = max(first, -(-start // stride)), min(last, (stop - span) // stride + 1)  # those that lie in it whole
    if full[0] >= full[1]:
        full = last, last
    for at in (*range(first, full[0]), full, *range(full[1], last)):
        if not isinstance(at, tuple):
            yield from [((at, at + 1), *box) for box in boxes_in_run(inner, start - at * stride, stop - at * stride)]
        elif full[0] < full[1]:
            yield full, *[(0, many) for many, _ in inner]


def cut_box(box: Box, start: int, stop: int) -> list[Box]:
    """The elements `start..stop` of a box in row-major order, as boxes.

    >>> cut_box(((0, 2), (0, 3)), 2, 6)
    [((0, 1), (2, 3)), ((1, 2), (0, 3))]
    """
    sizes = [last - first for first, last in box]
    steps = [(size, math.prod(sizes[at + 1 :])) for at, size in enumerate(sizes)]
    boxes = boxes_in_run(steps, start, stop) if start < stop else ()
    return [tuple([(first + a, first + b) for (first, _), (a, b) in zip(box, each, strict=True)]) for each in boxes]


def without_overlap(tiles: Sequence[Tile], size: int) -> list[bool]:
    """Which of these parts of a tensor of a size are to be taken, so that each element is in one.

    Where parts overlap, tensors are equal, and those of each cover the same elements and follow one another: the first
    that have an element are taken.

    >>> without_overlap([(((0, 4),),), (((0, 2),),), (((2, 4),),)], 4)
    [True, False, False]
    """
    taken: list[Tile] = []
    found = []
    overlap = sum(map(volume, tiles)) > size
    for tile in tiles:
        found.append(not overlap or not any(volume(intersection(tile, other)) for other in taken))
        if found[-1]:
            taken.append(tile)
    return found
