"""Packing: boxes of a tensor laid end to end in one buffer, and back, with as few copies as can be.

What a rank sends is a list of boxes of its tile; a collective wants them as one contiguous stretch of
memory. How much work that is depends on where the boxes lie, which is known beforehand:

- a `Run` is a stretch of the tile's own memory: nothing to copy, the buffer is a view. So it is for
  everything that is cut or joined along the first dim.
- a `Grid` is boxes of one shape at regular distances: one strided copy, whatever the number of boxes.
- `Boxes` are anything else: one copy for each.

>>> tile = (4, 6)
>>> places_of([(0, ((0, 2), (0, 6))), (12, ((2, 4), (0, 6)))], tile)        # two halves of the rows
Run(start=0, stop=24)
>>> halves = places_of([(0, ((0, 4), (0, 3))), (12, ((0, 4), (3, 6)))], tile)   # of the columns
>>> halves
Grid(sizes=(2, 4, 3), strides=(3, 6, 1), offset=0)
>>> packed = packer(halves, tile, 24)(torch.arange(24).view(4, 6))
>>> packed.view(-1)[:6].tolist(), unpacker(halves, tile)(packed)[0].tolist()
([0, 1, 2, 6, 7, 8], [0, 1, 2, 3, 4, 5])

Sizes may be symbolic while a graph is traced; nothing here asks more of them than arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from axes.algebra.planning.exchange import Region

Part = tuple[int, Region]
"""Where in the buffer a box begins, in elements, and the box."""

Shape = tuple[int, ...]
Pack = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Run:
    """Elements `start..stop` of the tile's memory, in order."""

    start: int
    stop: int


@dataclass(frozen=True)
class Grid:
    """Boxes of one shape at regular distances: the buffer is the tile seen with these strides."""

    sizes: Shape
    strides: Shape
    offset: int


@dataclass(frozen=True)
class Boxes:
    """Each box on its own."""

    parts: tuple[Part, ...]


Places = Run | Grid | Boxes


def places_of(parts: Sequence[Part], shape: Shape) -> Places:
    """Where the boxes of a row-major tile of `shape` lie, said as simply as can be.

    Boxes are in the order of the buffer and hold at least one element each; a tile that has a `Run`
    or a `Grid` fills the buffer without gaps.
    """
    if not parts:
        return Run(0, 0)
    strides = strides_of(shape)
    sizes = [tuple([stop - start for start, stop in box]) for _, box in parts]
    at = [sum([start * stride for (start, _), stride in zip(box, strides, strict=True)]) for _, box in parts]
    counts = list(map(math.prod, sizes))
    if not _adjoin([start for start, _ in parts], counts) or parts[0][0] != 0:
        return Boxes(tuple(parts))
    if _adjoin(at, counts) and all(_is_run(size, shape) for size in sizes):
        return Run(at[0], at[-1] + counts[-1])
    steps = _nested(at) if all(size == sizes[0] for size in sizes) else None
    if steps is None:
        return Boxes(tuple(parts))
    outer = [(count, step) for count, step in steps if count > 1]
    inner = [(size, stride) for size, stride in zip(sizes[0], strides, strict=True) if size > 1]
    modes = _merged([*outer, *inner])
    return Grid(tuple(size for size, _ in modes), tuple(stride for _, stride in modes), at[0])


def _adjoin(starts: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether each stretch begins where the one before it ends."""
    return all(start + count == after for start, count, after in zip(starts, counts, starts[1:], strict=False))


def strides_of(shape: Shape) -> Shape:
    """Strides of a row-major tensor."""
    found, stride = [], 1
    for extent in reversed(shape):
        found.append(stride)
        stride *= extent
    return tuple(reversed(found))


def _is_run(size: Shape, shape: Shape) -> bool:
    """Whether a box of `size` in a tile of `shape` is one stretch of memory."""
    whole = True
    for taken, extent in zip(reversed(size), reversed(shape), strict=True):
        if not whole and taken > 1:
            return False
        whole = whole and taken == extent
    return True


def _nested(at: Sequence[int]) -> list[tuple[int, int]] | None:
    """Numbers as nested arithmetic progressions `(count, step)`, slowest first; None where they aren't.

    >>> _nested([0, 2, 10, 12]), _nested([0, 2, 3])
    ([(2, 10), (2, 2)], None)
    """
    if len(at) == 1:
        return []
    step = at[1] - at[0]
    count = 1
    while count < len(at) and at[count] - at[count - 1] == step:
        count += 1
    if len(at) % count:
        return None
    inner = [number - at[0] for number in at[:count]]
    heads = at[::count]
    for head, start in zip(heads, range(0, len(at), count), strict=True):
        if [number - head for number in at[start : start + count]] != inner:
            return None
    outer = _nested(heads)
    return None if outer is None or step < 0 else [*outer, (count, step)]


def _merged(modes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for size, stride in modes:
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found


# --- tile to buffer -------------------------------------------------------------------------------


def packer(places: Places, shape: Shape, size: int) -> Pack:
    """A function from a row-major tile of `shape` to the buffer of `size` elements, a contiguous tensor.

    The buffer shares the tile's memory where it can. What no box fills of it is arbitrary.
    """
    if isinstance(places, Run):
        start, stop = places.start, places.stop
        if (start, stop) == (0, math.prod(shape)):
            return _lengthened(lambda tile: tile.view(-1), stop - start, size)
        return _lengthened(lambda tile: tile.view(-1)[start:stop], stop - start, size)
    if isinstance(places, Grid):
        return _lengthened(_strided(places), math.prod(places.sizes), size)
    parts = [_extents(part) for part in places.parts]

    def pack(tile: torch.Tensor) -> torch.Tensor:
        buffer = tile.new_empty(size)
        for start, stop, box, extents in parts:
            buffer[start:stop].view(extents).copy_(tile[box])
        return buffer

    return pack


def _strided(grid: Grid) -> Pack:
    sizes, strides, offset = grid.sizes, grid.strides, grid.offset
    if offset == 0:
        return lambda tile: tile.as_strided(sizes, strides).contiguous()
    return lambda tile: tile.as_strided(sizes, strides, tile.storage_offset() + offset).contiguous()


def _lengthened(pack: Pack, count: int, size: int) -> Pack:
    """`pack`, which gives `count` elements, with as many arbitrary ones behind them as the buffer has more."""
    if count == size:
        return pack

    def lengthened(tile: torch.Tensor) -> torch.Tensor:
        buffer = tile.new_empty(size)
        buffer[:count].copy_(pack(tile).view(-1))
        return buffer

    return lengthened


def slices_of(box: Region) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(start, stop) for start, stop in box)


def _extents(part: Part) -> tuple[int, int, tuple[slice, ...], Shape]:
    """`(start in the buffer, stop, index of the box, its shape)`."""
    place, box = part
    extents = tuple(stop - start for start, stop in box)
    return place, place + math.prod(extents), slices_of(box), extents


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
        return lambda buffer: buffer.as_strided(sizes, strides, buffer.storage_offset()).reshape(shape).contiguous()
    write = filler(places, shape)

    def unpack(buffer: torch.Tensor) -> torch.Tensor:
        tile = buffer.new_empty(shape)
        write(tile, buffer)
        return tile

    return unpack


def filler(places: Places, shape: Shape) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A function that writes the boxes of a flat buffer into a row-major tile that exists."""
    if isinstance(places, Run):
        start, stop = places.start, places.stop

        def fill_run(tile: torch.Tensor, buffer: torch.Tensor) -> None:
            tile.view(-1)[start:stop].copy_(buffer)

        return fill_run
    if isinstance(places, Grid):
        sizes, strides, offset = places.sizes, places.strides, places.offset

        def fill_grid(tile: torch.Tensor, buffer: torch.Tensor) -> None:
            tile.as_strided(sizes, strides, tile.storage_offset() + offset).copy_(buffer.view(sizes))

        return fill_grid
    parts = [_extents(part) for part in places.parts]

    def fill(tile: torch.Tensor, buffer: torch.Tensor) -> None:
        for start, stop, box, extents in parts:
            tile[box].copy_(buffer[start:stop].view(extents))

    return fill
