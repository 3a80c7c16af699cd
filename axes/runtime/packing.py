"""Packing: boxes of a tensor laid end to end in one buffer, and back, with as few copies as can be.

What a rank sends is a list of boxes of its tile; a collective wants them as one contiguous stretch of
memory. How much work that is depends on where the boxes lie, which is known beforehand:

- a `Run` is a stretch of the tile's own memory: nothing to copy, the buffer is a view. So it is for
  everything that is cut or joined along the first dim.
- a `Grid` is boxes of one shape at regular distances: one strided copy, whatever the number of boxes.
- `Boxes` are anything else: one copy for each.

>>> tile = (4, 6)
>>> arranged([(0, ((0, 2), (0, 6))), (12, ((2, 4), (0, 6)))]).within(tile, (1, 1))        # two halves of the rows
Run(start=0, stop=24)
>>> halves = arranged([(0, ((0, 4), (0, 3))), (12, ((0, 4), (3, 6)))]).within(tile, (1, 1))   # of the columns
>>> halves
Grid(sizes=(2, 4, 3), strides=(3, 6, 1), offset=0)
>>> packed = packer(halves, tile, 24)(torch.arange(24).view(4, 6))
>>> packed.view(-1)[:6].tolist(), unpacker(halves, tile)(packed)[0].tolist()
([0, 1, 2, 6, 7, 8], [0, 1, 2, 3, 4, 5])

Sizes may be symbolic while a graph is traced; nothing here asks more of them than arithmetic.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from axes.algebra.planning.boxes import Region

Part = tuple[int, Region]
"""Where in the buffer a box begins, in elements, and the box."""

Shape = tuple[int, ...]
Pack = Callable[[torch.Tensor], torch.Tensor]


class Run(NamedTuple):
    """Elements `start..stop` of the tile's memory, in order."""

    start: int
    stop: int


class Grid(NamedTuple):
    """Boxes of one shape at regular distances: the buffer is the tile seen with these strides."""

    sizes: Shape
    strides: Shape
    offset: int


@dataclass(frozen=True)
class Boxes:
    """Each box on its own."""

    parts: tuple[Part, ...]

    def within(self, shape: Shape, multiples: Shape) -> Run | Boxes:
        """Where they lie in a row-major tile of `shape`, in which their sizes are so many times larger."""
        more, parts = math.prod(multiples), self.parts
        if type(more) is not int or more != 1:
            parts = tuple([(start * more, times(box, multiples)) for start, box in parts])
        if not parts:
            return Run(0, 0)
        counts, runs = [elements_of(box) for _, box in parts], [_run(box, shape) for _, box in parts]
        at = [run for run in runs if run is not None]
        dense = len(at) == len(runs) and parts[0][0] == 0 and _adjoin([start for start, _ in parts], counts)
        return Run(at[0], at[-1] + counts[-1]) if dense and _adjoin(at, counts) else Boxes(parts)


@dataclass(frozen=True)
class Lattice:
    """Boxes of one shape at regular distances, end to end in the buffer.

    first: the first box. steps: the others are so many times, slowest first, so far from one another on each dim.
    """

    first: Region
    steps: tuple[tuple[int, Shape], ...]

    def within(self, shape: Shape, multiples: Shape) -> Run | Grid:
        """Where they lie in a row-major tile of `shape`, in which their sizes are so many times larger.

        >>> Lattice(((0, 2), (0, 1)), ((3, (0, 1)),)).within((10, 12), (5, 4))
        Grid(sizes=(3, 10, 4), strides=(4, 12, 1), offset=0)
        """
        return self.by(strides_of(shape), multiples)

    def by(self, strides: Sequence[int], multiples: Shape) -> Run | Grid:
        """Where they lie in memory in which a step along each dim goes so far."""
        apart = [*map(operator.mul, strides, multiples)]
        modes, offset = [(count, sum(map(operator.mul, step, apart))) for count, step in self.steps], 0
        for (start, stop), many, stride, far in zip(self.first, multiples, strides, apart, strict=True):
            modes.append(((stop - start) * many, stride))
            offset += start * far
        sizes, steps = _merged(modes)
        return Run(offset, offset + sizes[0]) if steps == (1,) else Grid(sizes, steps, offset)

    @property
    def corners(self) -> tuple[Shape, Shape]:
        """The least and the greatest index along each dim that any box has."""
        low, high = [start for start, _ in self.first], [stop - 1 for _, stop in self.first]
        for count, step in self.steps:
            for at, far in enumerate(step):
                low[at] += min(0, (count - 1) * far)
                high[at] += max(0, (count - 1) * far)
        return tuple(low), tuple(high)


Places = Run | Grid | Boxes


def arranged(parts: Sequence[Part], counts: Sequence[int] | None = None) -> Lattice | Boxes:
    """The boxes as a lattice where they are one, which needs no look at every box. `counts`: how large they are.

    Boxes are in the order of the buffer and hold at least one element each; what is a `Run` or a `Grid` in memory fills
    the buffer without gaps.
    """
    boxes = [box for _, box in parts]
    counts = [elements_of(box) for box in boxes] if counts is None else counts
    shapes = {tuple([stop - start for start, stop in box]) for box in boxes}
    dense = len(shapes) == 1 and parts[0][0] == 0 and _adjoin([start for start, _ in parts], counts)
    steps = _nested([tuple([start for start, _ in box]) for box in boxes]) if dense else None
    return Boxes(tuple(parts)) if steps is None else Lattice(boxes[0], tuple(steps))


def elements_of(box: Region) -> int:
    """Elements of a box."""
    found = 1
    for start, stop in box:
        found *= stop - start
    return found


def times(box: Region, multiples: Sequence[int]) -> Region:
    """A box of a tile whose sizes are so many times larger."""
    return tuple([(start * more, stop * more) for (start, stop), more in zip(box, multiples, strict=True)])


def _adjoin(starts: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether each stretch begins where the one before it ends."""
    return all(start + count == after for start, count, after in zip(starts, counts, starts[1:], strict=False))


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


def _run(box: Region, shape: Shape) -> int | None:
    """Where a box of a row-major tile begins, if it is one stretch of memory."""
    at, stride, whole = 0, 1, True
    for (start, stop), extent in zip(reversed(box), reversed(shape), strict=True):
        if not whole and stop - start > 1:
            return None
        whole = whole and stop - start == extent
        at, stride = at + start * stride, stride * extent
    return at


def _nested(at: Sequence[Shape]) -> list[tuple[int, Shape]] | None:
    """Places in a tile as nested arithmetic progressions `(count, step)`, slowest first; None where they aren't.

    >>> _nested([(0, 0), (0, 2), (5, 0), (5, 2)]), _nested([(0, 0), (0, 2), (0, 3)])
    ([(2, (5, 0)), (2, (0, 2))], None)
    """
    if len(at) == 1:
        return []
    step = _apart(at[0], at[1])
    count = 2
    while count < len(at) and _apart(at[count - 1], at[count]) == step:
        count += 1
    heads, first = at[::count], at[:count]
    inner = [_apart(at[0], place) for place in first]
    if len(at) % count or step < _apart(step, step):
        return None  # a stride is no less than zero
    for number in range(1, len(heads)):
        if [_apart(heads[number], place) for place in at[number * count : (number + 1) * count]] != inner:
            return None
    outer = _nested(heads)
    return None if outer is None else [*outer, (count, step)]


def _apart(one: Shape, other: Shape) -> Shape:
    return tuple(map(operator.sub, other, one))


def _merged(modes: Sequence[tuple[int, int]]) -> tuple[Shape, Shape]:
    """Sizes and strides without sizes of one, neighbours that continue each other as one."""
    sizes, strides = [1], [1]
    for size, stride in modes:
        if size == 1:
            continue
        if sizes[-1] == 1 or strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    return tuple(sizes), tuple(strides)


# --- tile to buffer -------------------------------------------------------------------------------


def packer(places: Places, shape: Shape, size: int) -> Pack:
    """A function from a row-major tile of `shape` to the buffer of `size` elements, a contiguous tensor.

    The buffer shares the tile's memory where it can. What no box fills of it is arbitrary.
    """
    if isinstance(places, Run) and places.stop - places.start == size:
        start, stop = places
        if shape and size == math.prod(shape):
            return lambda tile: tile
        return lambda tile: tile.view(-1)[start:stop]
    if isinstance(places, Grid) and math.prod(places.sizes) == size:
        sizes, strides, offset = places
        if offset == 0:
            return lambda tile: torch.as_strided_copy(tile, sizes, strides)
        return lambda tile: torch.as_strided_copy(tile, sizes, strides, tile.storage_offset() + offset)
    views = _viewer(places)

    def pack(tile: torch.Tensor) -> torch.Tensor:
        buffer = tile.new_empty(size)
        for start, stop, view in views(tile):
            buffer[start:stop].view(view.shape).copy_(view)
        return buffer

    return pack


def _viewer(places: Places) -> Callable[[torch.Tensor], list[tuple[int, int, torch.Tensor]]]:
    """A function from a tile to views of what lies there, each with where it begins and ends in the buffer."""
    if isinstance(places, Run):
        start, stop = places
        return lambda tile: [(0, stop - start, tile.view(-1)[start:stop])]
    if isinstance(places, Grid):
        (sizes, strides, offset), count = places, math.prod(places.sizes)
        return lambda tile: [(0, count, tile.as_strided(sizes, strides, tile.storage_offset() + offset))]
    parts = [(start, start + elements_of(box), slices_of(box)) for start, box in places.parts]
    return lambda tile: [(start, stop, tile[box]) for start, stop, box in parts]


def slices_of(box: Region) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(start, stop) for start, stop in box)


# --- buffer to tile -------------------------------------------------------------------------------


def unpacker(places: Places, shape: Shape) -> Pack:
    """A function from a flat buffer to the row-major tile of `shape` that its boxes fill.

    The tile shares the buffer's memory where it can.
    """
    if isinstance(places, Run):
        count = math.prod(shape)  # behind it there may be padding
        return lambda buffer: buffer[:count].view(shape)
    if isinstance(places, Grid):
        # Read the buffer in the order of the tile's memory.
        read = zip(places.strides, places.sizes, strides_of(places.sizes), strict=True)
        ordered = sorted(read, key=lambda mode: -mode[0])
        sizes, strides = tuple(mode[1] for mode in ordered), tuple(mode[2] for mode in ordered)
        return lambda buffer: torch.reshape(torch.as_strided_copy(buffer, sizes, strides), shape)
    views = _viewer(places)

    def unpack(buffer: torch.Tensor) -> torch.Tensor:
        tile = buffer.new_empty(shape)
        for start, stop, view in views(tile):
            view.copy_(buffer[start:stop].view(view.shape))
        return tile

    return unpack
