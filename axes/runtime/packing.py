"""Packing: boxes of a tensor laid end to end in one buffer, and back, with as few copies as can be.

What a rank sends is a list of boxes of its tile; a collective wants them as one contiguous stretch of
memory. Boxes at regular distances are one `Grid` of the tile's memory, whatever their number: one strided
copy. A grid that is a stretch of memory is no copy at all: the buffer is a view. So it is for everything
that is cut or joined along the first dim. Other boxes are a grid each, and so many copies.

>>> tile = (4, 6)
>>> rows, columns = [((0, 2), (0, 6)), ((2, 4), (0, 6))], [((0, 4), (0, 3)), ((0, 4), (3, 6))]     # two halves of each
>>> [laid(arranged([(0, one), (12, two)]), tile, (1, 1)) for one, two in (rows, columns)]
[[(0, Grid(sizes=(24,), strides=(1,), offset=0))], [(0, Grid(sizes=(2, 4, 3), strides=(3, 6, 1), offset=0))]]
>>> halves = Side(arranged([*zip((0, 12), columns)]), tile, (12, 12), 24)
>>> packed = packer(halves, (1, 1))(torch.arange(24).view(4, 6))
>>> packed.view(-1)[:6].tolist(), unpacker(halves, (1, 1), tile)(packed)[0].tolist()
([0, 1, 2, 6, 7, 8], [0, 1, 2, 3, 4, 5])

Sizes may be symbolic while a graph is traced; nothing here asks more of them than arithmetic.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from axes.algebra.chunks import Box

Part = tuple[int, Box]
"""Where in the buffer a box begins, in elements, and the box."""

Shape = tuple[int, ...]
Pack = Callable[[torch.Tensor], torch.Tensor]


class Grid(NamedTuple):
    """Elements of memory: of these sizes, with these strides, from an offset on."""

    sizes: Shape
    strides: Shape
    offset: int

    @property
    def numel(self) -> int:
        """How many elements there are."""
        return math.prod(self.sizes)

    @property
    def is_run(self) -> bool:
        """Whether the elements are one contiguous stretch, in order."""
        return self.strides == (1,)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The grid's elements of a contiguous tensor, as a view. The tensor is no result of a graph."""
        return x.as_strided(self.sizes, self.strides, x.storage_offset() + self.offset)

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of the grid's elements of a contiguous tensor. The tensor is no result of a graph."""
        return torch.as_strided_copy(x, self.sizes, self.strides, x.storage_offset() + self.offset)

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of the grid's elements of a contiguous tensor in a graph.

        The elements are found by their numbers: inductor may keep a tensor of the graph in another order of dims, in
        which `as_strided` finds other elements.
        """
        numbers = torch.zeros((), dtype=torch.int64, device=x.device)
        for size, stride in zip(self.sizes, self.strides, strict=True):
            numbers = numbers[..., None] + torch.arange(size, device=x.device) * stride
        return x.view(-1)[numbers + self.offset]


Places = Sequence[tuple[int, Grid]]
"""Grids of a tile, each with where it begins in the buffer."""


@dataclass(frozen=True)
class Lattice:
    """Boxes of one shape at regular distances, end to end in the buffer.

    first: the first box. steps: the others are so many times, slowest first, so far from one another on each dim.
    """

    first: Box
    steps: tuple[tuple[int, Shape], ...]

    def by(self, strides: Sequence[int], multiples: Shape) -> Grid:
        """Where they lie in memory in which a step along each dim goes so far, their sizes so many times larger.

        >>> Lattice(((0, 2), (0, 1)), ((3, (0, 1)),)).by((12, 1), (5, 4))
        Grid(sizes=(3, 10, 4), strides=(4, 12, 1), offset=0)
        """
        apart = [*map(operator.mul, strides, multiples)]
        modes, offset = [(count, sum(map(operator.mul, step, apart))) for count, step in self.steps], 0
        for (start, stop), many, stride, far in zip(self.first, multiples, strides, apart, strict=True):
            modes.append(((stop - start) * many, stride))
            offset += start * far
        return Grid(*_merged(modes), offset)


def arranged(parts: Sequence[Part]) -> tuple[tuple[int, Lattice], ...]:
    """The boxes as one lattice where they are one, else as one each; each with where it begins in the buffer.

    Boxes are in the order of the buffer and hold at least one element each.
    """
    starts, boxes = [start for start, _ in parts], [box for _, box in parts]
    shapes = {tuple([stop - start for start, stop in box]) for box in boxes}
    count = elements_of(boxes[0]) if boxes else 0
    dense = len(shapes) == 1 and starts == [number * count for number in range(len(parts))]
    steps = _nested([tuple([start for start, _ in box]) for box in boxes]) if dense else None
    if steps is None:
        return tuple([(start, Lattice(box, ())) for start, box in parts])
    return ((0, Lattice(boxes[0], tuple(steps))),)


def laid(places: Sequence[tuple[int, Lattice]], shape: Shape, multiples: Shape) -> Places:
    """Where boxes lie in a row-major tile of `shape`, in which their sizes are so many times larger."""
    strides, more, found = strides_of(shape), math.prod(multiples), list[tuple[int, Grid]]()
    for begins, lattice in places:
        start, grid = begins * more, lattice.by(strides, multiples)
        if found and grid.is_run and found[-1][1].is_run:
            first, before = found[-1]
            if first + before.numel == start and before.offset + before.numel == grid.offset:
                found[-1] = first, Grid((before.numel + grid.numel,), (1,), before.offset)
                continue
        found.append((start, grid))
    return found


def elements_of(box: Box) -> int:
    """Elements of a box."""
    return math.prod([stop - start for start, stop in box])


def strides_of(shape: Sequence[int]) -> Shape:
    """Strides of a row-major tensor, as torch has them.

    >>> strides_of((2, 3, 4))
    (12, 4, 1)
    """
    found, stride = [], 1
    for extent in reversed(shape):
        found.append(stride)
        stride *= extent or 1
    return tuple(reversed(found))


def _nested(at: Sequence[Shape]) -> list[tuple[int, Shape]] | None:
    """Places in a tile as nested arithmetic progressions `(count, step)`, slowest first; None where they aren't.

    >>> _nested([(0, 0), (0, 2), (5, 0), (5, 2)]), _nested([(0, 0), (0, 2), (0, 3)])
    ([(2, (5, 0)), (2, (0, 2))], None)
    """
    if len(at) == 1:
        return []
    steps = [tuple(map(operator.sub, two, one)) for one, two in pairwise(at)]
    step = steps[0]
    count = next((number for number, other in enumerate(steps, 1) if other != step), len(at))
    inner, heads = steps[: count - 1], at[::count]
    regular = [steps[number : number + count - 1] == inner for number in range(0, len(at), count)]
    # A stride is no less than zero.
    outer = _nested(heads) if all(regular) and step >= (0,) * len(step) else None
    return None if outer is None else [*outer, (count, step)]


def _merged(modes: Sequence[tuple[int, int]]) -> tuple[Shape, Shape]:
    """Sizes and strides without sizes of one, neighbours that continue each other as one."""
    found = [(1, 1)]
    for size, stride in [mode for mode in modes if mode[0] != 1]:
        before, apart = found[-1]
        if before == 1 or apart == size * stride:
            found[-1] = before * size, stride
        else:
            found.append((size, stride))
    sizes, strides = zip(*found, strict=True)
    return sizes, strides


# --- tile to buffer, and back ---------------------------------------------------------------------


class Side(NamedTuple):
    """The boxes of a tile of `shape` that a rank sends, or receives: `counts[i]` elements to or from rank i.

    places: the boxes, each with where it begins in the buffer. size: of the buffer, which may have gaps. In a tile
    that is so many `multiples` as large along each dim all of these are, too.
    """

    places: Sequence[tuple[int, Lattice]]
    shape: Shape
    counts: tuple[int, ...]
    size: int

    @property
    def is_padded(self) -> bool:
        """Whether the buffer has more than the boxes."""
        return self.size > sum(self.counts)

    def at(self, multiples: Shape) -> tuple[Places, Shape]:
        """Where the boxes lie in the memory of a tile whose sizes are so many times larger, and its shape."""
        # In a stack of tiles the first dim is none of the tensor's.
        many = (1, *multiples) if len(self.shape) > len(multiples) else multiples
        shape = tuple(map(operator.mul, self.shape, many))
        return laid(self.places, shape, many), shape


def _only(places: Places) -> Grid | None:
    """The grid of what is one, and begins where its buffer does."""
    return places[0][1] if len(places) == 1 and places[0][0] == 0 else None


def packer(side: Side, multiples: Shape, in_graph: bool = False, fresh: bool = False) -> Pack:
    """A function from a row-major tile to the buffer, a contiguous tensor, which shares the tile's memory where it can,
    unless it is to be `fresh`.

    What no box fills of it is arbitrary.
    """
    (places, shape), size = side.at(multiples), side.size * math.prod(multiples)
    grid = _only(places)
    if grid is None or grid.numel != size:

        def pack(tile: torch.Tensor) -> torch.Tensor:
            buffer = tile.new_empty(size)
            for start, grid in places:
                found = grid.taken(tile) if in_graph else grid.of(tile)
                buffer[start : start + grid.numel].view(grid.sizes).copy_(found)
            if not places:
                # In a graph, torch puts what depends on no tensor into both passes: a buffer would be sent twice.
                buffer[:0].copy_(tile.view(-1)[:0])
            return buffer

        return pack
    if fresh or not grid.is_run:
        return grid.taken if in_graph else grid.copied
    if shape and size == math.prod(shape):
        return lambda tile: tile
    start, stop = grid.offset, grid.offset + size
    return lambda tile: tile.view(-1)[start:stop]


def unpacker(side: Side, multiples: Shape, shape: Shape) -> Pack | None:
    """A function from a flat buffer to the row-major tile of `shape` that its boxes fill; None where it is the tile.

    The tile shares the buffer's memory where it can.
    """
    places, _ = side.at(multiples)
    grid = _only(places)
    if grid is not None and grid.is_run:
        count = math.prod(shape)
        return (lambda buffer: buffer[:count].view(shape)) if side.is_padded else None
    if grid is not None:
        # Read the buffer in the order of the tile's memory.
        read = zip(grid.strides, grid.sizes, strides_of(grid.sizes), strict=True)
        ordered = sorted(read, key=lambda mode: -mode[0])
        sizes, strides = tuple([mode[1] for mode in ordered]), tuple([mode[2] for mode in ordered])
        return lambda buffer: torch.reshape(torch.as_strided_copy(buffer, sizes, strides), shape)

    def unpack(buffer: torch.Tensor) -> torch.Tensor:
        if not places:
            return buffer[:0].view(shape)  # in a graph it depends on the buffer, see `packer`
        tile = buffer.new_empty(shape)
        for start, grid in places:
            grid.of(tile).copy_(buffer[start : start + grid.numel].view(grid.sizes))
        return tile

    return unpack


def slices_of(box: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(start, stop) for start, stop in box)
