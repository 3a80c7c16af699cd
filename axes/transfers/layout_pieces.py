"""Pieces: which elements of one tensor are which of another, where names and layouts differ.

A piece is a box of a few dims, each of which steps through one dim of the source and one dim of the target. The query
heads of a fused projection `(g (r k + k + k)) d`, with 2 key heads, 3 queries each and 4 elements a head:

>>> g = PieceDim("g", 2, source=0, source_stride=12, target=0, target_stride=20)
>>> rows = PieceDim("r k", 12, source=0, source_stride=1, target=0, target_stride=1)
>>> d = PieceDim("d", 5, source=1, source_stride=1, target=1, target_stride=1)
>>> q = LayoutPiece("q", "qkv", (g, rows, d), (0, 0), (0, 0))
>>> q.target_tile
(((0, 12), (20, 32)), ((0, 5),))

Elements of a dim are counted, not bytes, and tensors are whole ones: what a rank has of them is a `Tile`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from axes.algebra.chunks import Box, Runs, Tile, intersection, merged, volume

View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and offset, as `as_strided` takes them."""


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


@dataclass(frozen=True, slots=True)
class LayoutPiece:
    """A part of a source that is a part of a target, element by element.

    source, target: the names of the tensors. dims: in the target's order.
    source_offset, target_offset: for each dim of the tensor, where the piece begins.
    """

    source: str
    target: str
    dims: tuple[PieceDim, ...]
    source_offset: tuple[int, ...]
    target_offset: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dim of the piece."""
        return tuple([dim.size for dim in self.dims])

    @property
    def inverse(self) -> LayoutPiece:
        """The way back."""
        dims = sorted([dim.inverse for dim in self.dims], key=lambda dim: (dim.target, -dim.target_stride))
        return LayoutPiece(self.target, self.source, tuple(dims), self.target_offset, self.source_offset)

    def source_view(self, strides: Sequence[int]) -> View:
        """The piece as a view of a whole source that has these strides."""
        moves = [strides[dim.source] * dim.source_stride for dim in self.dims]
        return self.shape, tuple(moves), sum(map(math.prod, zip(strides, self.source_offset, strict=True)))

    def target_view(self, strides: Sequence[int]) -> View:
        """The piece as a view of a whole target that has these strides.

        `target.as_strided(*piece.target_view(target.stride())).copy_(source.as_strided(*piece.source_view(...)))`
        """
        moves = [strides[dim.target] * dim.target_stride for dim in self.dims]
        return self.shape, tuple(moves), sum(map(math.prod, zip(strides, self.target_offset, strict=True)))

    @property
    def source_tile(self) -> Tile:
        """The elements of the source, as runs of each of its dims."""
        steps = [(dim.source, dim.size, dim.source_stride) for dim in self.dims]
        return tuple([_runs(steps, at, offset) for at, offset in enumerate(self.source_offset)])

    @property
    def target_tile(self) -> Tile:
        """The elements of the target, as runs of each of its dims."""
        steps = [(dim.target, dim.size, dim.target_stride) for dim in self.dims]
        return tuple([_runs(steps, at, offset) for at, offset in enumerate(self.target_offset)])

    def within(self, box: Box) -> LayoutPiece:
        """The part of the piece in a box of its own dims."""
        source, target = list(self.source_offset), list(self.target_offset)
        dims = []
        for dim, (start, stop) in zip(self.dims, box, strict=True):
            source[dim.source] += start * dim.source_stride
            target[dim.target] += start * dim.target_stride
            dims.append(replace(dim, size=stop - start))
        return LayoutPiece(self.source, self.target, tuple(dims), tuple(source), tuple(target))

    def boxes_in_target(self, tile: Tile) -> Iterator[Box]:
        """The boxes of the piece whose elements a tile of the target holds; they don't overlap.

        >>> dims = PieceDim("h", 3, 0, 4, 0, 4), PieceDim("k", 4, 0, 1, 0, 1)
        >>> list(LayoutPiece("q", "qkv", dims, (0,), (100,)).boxes_in_target((((102, 109),),)))
        [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
        """
        return _boxes([(d.target, d.size, d.target_stride) for d in self.dims], self.target_offset, tile)

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


def _runs(steps: Iterable[tuple[int, int, int]], dim: int, offset: int) -> Runs:
    """The elements of one dim that steps `(dim, size, stride)` reach."""
    found: Runs = ((0, 1),)
    for _, size, stride in sorted([step for step in steps if step[0] == dim], key=lambda step: step[2]):
        if len(found) == 1 and found[0] == (0, stride):
            found = ((0, stride * size),)
        else:
            found = merged((at * stride + start, at * stride + stop) for at in range(size) for start, stop in found)
    return tuple([(offset + start, offset + stop) for start, stop in found])


def _boxes(steps: Sequence[tuple[int, int, int]], offset: tuple[int, ...], tile: Tile) -> Iterator[Box]:
    """The boxes of the steps `(dim, size, stride)` in a tile."""
    order: list[int] = []
    choices: list[list[Box]] = []
    for dim, (begin, runs) in enumerate(zip(offset, tile, strict=True)):
        own = sorted([at for at, step in enumerate(steps) if step[0] == dim], key=lambda at: -steps[at][2])
        order.extend(own)
        inner = [steps[at][1:] for at in own]
        choices.append([box for start, stop in runs for box in boxes_in_run(inner, start - begin, stop - begin)])
    for parts in itertools.product(*choices):
        found = dict(zip(order, itertools.chain(*parts), strict=True))
        yield tuple([found[at] for at in range(len(steps))])


def boxes_in_run(steps: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[Box]:
    """The boxes of nested steps `(size, stride)`, the widest first, whose elements lie from `start` to `stop`."""
    if not steps:
        if start <= 0 < stop:
            yield ()
        return
    (size, stride), *inner = steps
    span = 1 + sum([(count - 1) * step for count, step in inner])
    first, last = max(0, (start - span) // stride + 1), min(size, -(-stop // stride))  # those that share something
    full = max(first, -(-start // stride)), min(last, (stop - span) // stride + 1)  # those that lie in it whole
    if full[0] >= full[1]:
        full = last, last
    for at in range(first, full[0]):
        for box in boxes_in_run(inner, start - at * stride, stop - at * stride):
            yield (at, at + 1), *box
    if full[0] < full[1]:
        yield full, *[(0, count) for count, _ in inner]
    for at in range(full[1], last):
        for box in boxes_in_run(inner, start - at * stride, stop - at * stride):
            yield (at, at + 1), *box


def cut_box(box: Box, start: int, stop: int) -> list[Box]:
    """The elements `start..stop` of a box in row-major order, as boxes.

    >>> cut_box(((0, 2), (0, 3)), 2, 6)
    [((0, 1), (2, 3)), ((1, 2), (0, 3))]
    """
    sizes = [last - first for first, last in box]
    steps = [(size, math.prod(sizes[at + 1 :])) for at, size in enumerate(sizes)]
    boxes = boxes_in_run(steps, start, stop) if start < stop else ()
    return [tuple([(first + a, first + b) for (first, _), (a, b) in zip(box, each, strict=True)]) for each in boxes]


def simplified(dims: Iterable[PieceDim]) -> tuple[PieceDim, ...]:
    """Dims without those of size one; neighbours that step as one in both tensors are one."""
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
            name, size = f"{outer.name} {dim.name}", outer.size * dim.size
            dim = replace(dim, name=name, size=size)
            found.pop()
        found.append(dim)
    return tuple(found)


def without_overlap(tiles: Iterable[Tile]) -> list[bool]:
    """Which of these parts of a tensor are to be taken, so that each element is in one.

    Where parts overlap, tensors are equal, and those of each cover the same elements and follow one another: the first
    that have an element are taken.

    >>> without_overlap([(((0, 4),),), (((0, 2),),), (((2, 4),),)])
    [True, False, False]
    """
    taken: list[Tile] = []
    found = []
    for tile in tiles:
        found.append(not any(volume(intersection(tile, other)) for other in taken))
        if found[-1]:
            taken.append(tile)
    return found


def whole_piece(source: str, shape: tuple[int, ...], target: str | None = None) -> LayoutPiece:
    """A tensor that is the same on both sides."""
    nowhere = (0,) * len(shape)
    dims = tuple([PieceDim(f"dim{at}", size, at, 1, at, 1) for at, size in enumerate(shape) if size != 1])
    return LayoutPiece(source, source if target is None else target, dims, nowhere, nowhere)
