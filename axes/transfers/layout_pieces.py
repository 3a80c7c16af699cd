"""Pieces: which elements of one tensor are which of another, where names and layouts differ.

A piece is a box of a few dims, each of which steps through one dim of the source and one of the target. The query
heads of a fused projection `(g (r k + k + k)) d`, with 2 key heads, 3 queries each and 4 elements a head:

>>> g = PieceDim("g", 2, ends=((0, 12), (0, 20)))
>>> rows = PieceDim("r k", 12, ends=((0, 1), (0, 1)))
>>> d = PieceDim("d", 5, ends=((1, 1), (1, 1)))
>>> q = layout_piece("q", "qkv", (g, rows, d), ((0, 0), (0, 0)), ((24, 5), (40, 5)))
>>> q.target_view((5, 1))
((2, 12, 5), (100, 5, 1), 0)

Elements of a dim are counted, not bytes, and tensors are whole ones: what a rank has of them is a `Tile`.

Dims of both tensors through which one dim of a piece steps are *joined*: `(h k) d -> h k d` has `h` and `k` in one dim
of the source and in two of the target. What a rank has of either tensor is some stretches of the elements of a join,
and of the piece all their combinations: a piece is planned as a tensor with a dim for each join.

>>> [(join.sides, [dim.name for dim in join.dims]) for join in q.joins], q.extents
([(((0,), (0,)), ['g', 'r k']), (((1,), (1,)), ['d'])], (24, 5))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from axes import Layout, Sharding
from axes.extension import Box, Pieces, Runs, Tile, count, factor_runs, local_runs, merged, pieces_of

View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and offset, as `as_strided` takes them."""

Shape = tuple[int, ...]


class PieceDim(NamedTuple):
    """A dim of a piece. ends: through which dim of the source it steps, and how far; and of the target."""

    name: str
    size: int
    ends: tuple[tuple[int, int], tuple[int, int]]


class Join(NamedTuple):
    """Dims of a piece that are joined. sides: the dims of both tensors through which they step."""

    dims: tuple[PieceDim, ...]
    sides: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class LayoutPiece:
    """A part of a source that is a part of a target, element by element; made by `layout_piece`.

    source, target: the names of the tensors. dims: join by join, in the target's order.
    offsets: for each dim of both tensors, where the piece begins. shapes: of both whole tensors. joins: what is joined.
    """

    source: str = field(compare=False)
    target: str = field(compare=False)
    dims: tuple[PieceDim, ...]
    offsets: tuple[Shape, Shape]
    shapes: tuple[Shape, Shape]
    joins: tuple[Join, ...] = field(compare=False, repr=False)

    @property
    def shape(self) -> Shape:
        """The size of each dim of the piece."""
        return tuple([dim.size for dim in self.dims])

    @property
    def is_whole(self) -> bool:
        """Whether it is all of both tensors, element by element."""
        whole = self.shapes[0] == self.shapes[1] and self.shape == tuple([n for n in self.shapes[0] if n != 1])
        return whole and all(source == target and source[1] == 1 for _, _, (source, target) in self.dims)

    @property
    def inverse(self) -> LayoutPiece:
        """The way back."""
        dims = [dim._replace(ends=dim.ends[::-1]) for dim in self.dims]
        return layout_piece(self.target, self.source, dims, self.offsets[::-1], self.shapes[::-1])

    def source_view(self, strides: Sequence[int]) -> View:
        """The piece as a view of a whole source that has these strides."""
        return self.shape, self.strides(0, strides), sum(map(math.prod, zip(strides, self.offsets[0], strict=True)))

    def target_view(self, strides: Sequence[int]) -> View:
        """The piece as a view of a whole target that has these strides.

        `target.as_strided(*piece.target_view(target.stride())).copy_(source.as_strided(*piece.source_view(...)))`
        """
        return self.shape, self.strides(1, strides), sum(map(math.prod, zip(strides, self.offsets[1], strict=True)))

    def strides(self, side: int, strides: Sequence[int]) -> tuple[int, ...]:
        """How far a step of each of the piece's dims goes in a tensor that has these strides."""
        return tuple([strides[of] * far for of, far in [dim.ends[side] for dim in self.dims]])

    # as ranks have it

    @property
    def extents(self) -> Shape:
        """The elements of each join."""
        return tuple([math.prod([dim.size for dim in join.dims]) for join in self.joins])

    def pieces(self, side: int, sharding: Sharding) -> tuple[Pieces, ...]:
        """What a sharding of one of the tensors cuts each join into, numbered as the pieces of its dims together."""
        dims = list(map(pieces_of, sharding.dims, sharding.extents(self.shapes[side])))
        found = []
        for join in self.joins:
            cut = [dims[dim] for dim in join.sides[side]]
            # Stretches in other runs of the tensor aren't joined where they touch.
            runs = [
                tuple(sorted(itertools.chain(*[self._stretches(join, side, one) for one in itertools.product(*each)])))
                for each in itertools.product(*[each.runs for each in cut])
            ]
            found.append(Pieces(Layout.product(*[each.layout for each in cut]), runs))
        return tuple(found)

    def _stretches(self, join: Join, side: int, runs: Sequence[tuple[int, int]]) -> Runs:
        """The elements of a join in a run of each of its dims of a tensor."""
        steps = [
            sorted([dim for dim in join.dims if dim.ends[side][0] == at], key=lambda dim: -dim.ends[side][1])
            for at in join.sides[side]
        ]
        begins = [self.offsets[side][at] for at in join.sides[side]]
        choices = [
            boxes_in_run([(dim.size, dim.ends[side][1]) for dim in own], start - begin, stop - begin)
            for own, begin, (start, stop) in zip(steps, begins, runs, strict=True)
        ]
        found = list[tuple[int, int]]()
        for boxes in itertools.product(*choices):
            box = dict(zip(itertools.chain(*steps), itertools.chain(*boxes), strict=True))
            found += factor_runs(tuple([dim.size for dim in join.dims]), tuple([box[dim] for dim in join.dims]))
        return merged(sorted(found))

    def boxes(self, part: Tile, _: Tile) -> tuple[Box, ...]:
        """The elements of stretches of each join as boxes of the piece, in the order in which they are sent."""
        wholes = [tuple([(0, dim.size) for dim in join.dims]) for join in self.joins]
        found: list[Box] = []
        for bounds in itertools.product(*part):
            parts = [cut_box(whole, *each) for whole, each in zip(wholes, bounds, strict=True)]
            found += [tuple(itertools.chain(*boxes)) for boxes in itertools.product(*parts)]
        return tuple(found)

    def largest(self, side: int, sharding: Sharding) -> int:
        """The most elements of the piece that a rank may have."""
        return math.prod([max(map(count, each.runs)) for each in self.pieces(side, sharding)])

    def index(self, side: int, at: Sequence[int]) -> Shape:
        """Where an element of the piece is in one of the tensors. at: the element, by the piece's dims."""
        found = list(self.offsets[side])
        for dim, number in zip(self.dims, at, strict=True):
            of, far = dim.ends[side]
            found[of] += number * far
        return tuple(found)

    def place(self, side: int, tile: Tile, at: Sequence[int]) -> Shape:
        """Where an element of the piece is in a shard of one of the tensors. tile: the elements of the shard."""
        pairs = zip(self.index(side, at), tile, strict=True)
        return tuple([local_runs(((one, one + 1),), runs)[0][0] for one, runs in pairs])


def layout_piece(
    source: str, target: str, dims: Iterable[PieceDim], offsets: tuple[Shape, Shape], shapes: tuple[Shape, Shape]
) -> LayoutPiece:
    """The piece with these dims, in whatever order, without those of size one."""
    kept = sorted([dim for dim in dims if dim.size != 1], key=lambda dim: (dim.ends[1][0], -dim.ends[1][1]))
    # The dims of both tensors that are joined, as (side, dim). A dim that no step of the piece is in is alone.
    groups = [{(side, at)} for side in (1, 0) for at in range(len(shapes[side]))]
    for _, _, ((one, _), (two, _)) in kept:
        first, *others = [group for group in groups if (1, two) in group or (0, one) in group]
        first.update(*others)
        groups = [group for group in groups if group not in others]
    joins = []
    for group in groups:
        own = [dim for dim in kept if (1, dim.ends[1][0]) in group]
        here, there = [tuple(sorted([at for of, at in group if of == side])) for side in (0, 1)]
        joins.append(Join(tuple(own), (here, there)))
    dims = tuple(itertools.chain(*[join.dims for join in joins]))
    return LayoutPiece(source, target, dims, offsets, shapes, tuple(joins))


def boxes_in_run(steps: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[Box]:
    """The boxes of nested steps `(size, stride)`, the widest first, whose elements lie from `start` to `stop`."""
    if not steps:
        yield from [()] if start <= 0 < stop else []
        return
    (size, stride), *inner = steps
    span = 1 + sum([(many - 1) * step for many, step in inner])
    some = range(max(0, (start - span) // stride + 1), min(size, -(-stop // stride)))  # share elements with the run
    whole = range(max(0, -(-start // stride)), min(size, (stop - span) // stride + 1))  # lie in it
    if whole:
        yield (whole.start, whole.stop), *[(0, many) for many, _ in inner]
    for at in dict.fromkeys((*some[:1], *some[-1:])):
        if at not in whole:
            yield from [((at, at + 1), *box) for box in boxes_in_run(inner, start - at * stride, stop - at * stride)]


def cut_box(box: Box, start: int, stop: int) -> list[Box]:
    """The elements `start..stop` of a box in row-major order, as boxes: whole rows first.

    >>> cut_box(((0, 2), (0, 3)), 2, 6)
    [((1, 2), (0, 3)), ((0, 1), (2, 3))]
    """
    sizes = [last - first for first, last in box]
    steps = [(size, math.prod(sizes[at + 1 :])) for at, size in enumerate(sizes)]
    boxes = boxes_in_run(steps, start, stop) if start < stop else ()
    return [tuple([(first + a, first + b) for (first, _), (a, b) in zip(box, each, strict=True)]) for each in boxes]
