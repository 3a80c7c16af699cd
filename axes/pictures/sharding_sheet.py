"""A sharding as a sheet: the blocks of the tensor, each with the ranks that hold it.

A block that several ranks hold is a copy on each (`0 4`); where a reduction is pending each of the ranks
holds a summand (`sum(0 1)`). The dims that are split go down and across, the minor two where there are
more: then a board is one block of the other dims.

>>> from axes.algebra.mesh import Mesh
>>> from axes.pictures.in_text import lines_of, plain
>>> from axes.pictures.panels import Room
>>> sharding = Mesh("dp=2 cp=2 tp=2").sharding("b@dp s@tp d | sum@cp")
>>> print(plain(lines_of(sheet_of_sharding(sharding, (8, 5, 16), Room()), 80)))
b@dp s@tp d | sum@cp     [8, 5, 16]
on dp=2 cp=2 tp=2; rank 0 holds 4 x 3 x 16
<BLANKLINE>
b    s       0:3       3:5
0:4    [sum(0 2)] sum(1 3)
4:8     sum(4 6)  sum(5 7)
<BLANKLINE>
dim  size  split over  parts  each has  rank 0 has
b       8  dp              2         4  0:4
s       5  tp              2      2..3  0:3
d      16  -               1        16  0:16
sum@cp is pending: sum(..) are 2 ranks whose sum is the value
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from axes import Layout, Sharding
from axes.extension import (
    bytes_text,
    itemsize_of,
    largest_chunk,
    layouts_text,
    nested_chunk,
    pending_runs,
    slots_text,
    smallest_chunk,
)
from axes.pictures.panels import (
    Board,
    BoardSide,
    Cell,
    Head,
    Listing,
    Remark,
    Room,
    Sheet,
    around,
    board_of,
    sheet_of,
)
from axes.pictures.rank_text import LEFT_OUT, joined, short_ranks

WIDEST = 28
"""The ranks of a block have at most this many columns, where blocks stand beside each other."""


def sheet_of_sharding(
    sharding: Sharding, shape: Sequence[int] | None, room: Room, rank: int | None = None, dtype: str | None = None
) -> Sheet:
    """The picture of a sharding, seen from a rank (the mesh's by default). Without a shape, a dim is so many parts."""
    blocks = Blocks(sharding, None if shape is None else tuple(shape), sharding.mesh.rank if rank is None else rank)
    title = (
        (str(sharding) or "a scalar") + ("" if shape is None else f"     {list(shape)}") + f" {dtype or ''}".rstrip()
    )
    where, listing, remarks = _where(blocks, dtype), _dims(blocks), tuple(_remarks(blocks))
    board = _board(blocks, room, room.height - 5 - len(listing.rows) - len(remarks))
    summary = f"The blocks of a tensor sharded as {title}, and the ranks that hold each. {where}."
    table, rest = listing if listing.rows else None, Remark(remarks, close=bool(listing.rows)) if remarks else None
    return sheet_of(title, summary, Remark((where,), close=True), board, table, rest)


def dim_names(sharding: Sharding) -> tuple[str, ...]:
    """The dims as the spec calls them, without their axes; by their number where they have no name."""
    texts = [slots_text(sharding.mesh, dim.unsplit, sharding.names_of(at)) for at, dim in enumerate(sharding.dims)]
    return tuple(f"dim {at}" if text == "_" else text for at, text in enumerate(texts))


# --- which ranks hold what ------------------------------------------------------------------------


def _side(name: str, layouts: tuple[Layout, ...], size: int | None) -> BoardSide:
    """A dim, or a factor of one, in the pieces that these layouts cut it into. size: None where it is any."""
    layout = Layout.product(*layouts)

    def head(position: int) -> Head:
        cuts = [(each.size, each.coordinate(position)) for each in layouts]
        start, stop = nested_chunk(layout.size if size is None else size, cuts)
        text = f"{start}:{stop}" if start < stop else "nothing"
        return Head((text if size is not None else f"{layout.coordinate(position) + 1}/{layout.size}",), stop - start)

    return BoardSide(name, layout, head)


ALONE = BoardSide("", Layout(), lambda position: Head(("",)))
"""What goes across where no second dim does."""


@dataclass(frozen=True)
class Blocks:
    """A sharding with a shape, seen from a rank. shape: None where it is any; then a dim has its pieces alone."""

    sharding: Sharding
    shape: tuple[int, ...] | None
    rank: int

    @property
    def position(self) -> int:
        """The place of the rank in the mesh."""
        return self.sharding.universe.position(self.rank) or 0

    @property
    def drawn(self) -> list[BoardSide]:
        """The factors of each dim up to the last one that is split, and dims that aren't, where there is room."""
        found, whole = list[BoardSide](), list[BoardSide]()
        sizes = None if self.shape is None else self.sharding.extents(self.shape)
        for at, (slots, name) in enumerate(zip(self.sharding.dims, dim_names(self.sharding), strict=True)):
            names = [name] if len(slots) == 1 else self.sharding.names_of(at)
            extents = [slot.size for slot in slots] if sizes is None else sizes[at]
            split = max((number for number, slot in enumerate(slots, 1) if slot.pieces > 1), default=0)
            for called, slot, size in [*zip(names, slots, extents, strict=True)][:split]:
                found.append(_side(called or f"{slot.size}", slot.layouts, size))
            if not split:
                whole.append(_side(name, (), None if self.shape is None else self.shape[at]))
                found.append(whole[-1])
        for each in whole[: max(0, len(found) - 2)]:
            found.remove(each)
        return [*found, *[ALONE] * (2 - len(found))]

    @cached_property
    def split(self) -> Layout:
        """The digits of the position that all dims are split by."""
        return Layout.product(*[layout for dim in self.sharding.dims for layout in dim.layouts])

    @cached_property
    def levels(self) -> list[tuple[str, Layout]]:
        """What ranks have of a block: copies, of each copy what is pending, innermost last."""
        runs = pending_runs(entry for entry in self.sharding.pending if entry[0] != "same")
        pending = [(op, Layout.product(*layouts)) for op, layouts in runs]
        used = Layout.product(self.split, *[layout for _, layout in pending])
        return [("", self.sharding.mesh.extent.divide(used)), *reversed(pending)]

    def cell(self, position: int, width: int) -> Cell:
        """A block whose first holder has this position, with all holders; there is a colour for each set of ranks."""
        extent = self.sharding.mesh.extent
        position += self.position - extent.offset(extent.coordinate(self.position))
        tone = self.split.coordinate(position)
        return Cell(self._held(position, self.levels, width), tone, here=tone == self.split.coordinate(self.position))

    def _held(self, start: int, levels: Sequence[tuple[str, Layout]], width: int) -> str:
        """The ranks from a position on: copies side by side, summands in parentheses."""
        (op, layout), *inner = levels
        room = max(1, width - (len(op) + 2 if op else 0))

        def each(at: int) -> str:
            return self._held(start + layout.offset(at), inner, room)

        if inner:
            text = joined(layout.size, each, " ", room, LEFT_OUT if op else f"{each(0)} {LEFT_OUT}")
        else:
            text = short_ranks(self.sharding.universe.pick(layout.offsets(start)), room)
        return f"{op}({text})" if op else text


# --- the sheet ------------------------------------------------------------------------------------


def _where(blocks: Blocks, dtype: str | None) -> str:
    """The mesh, and what the rank that looks has."""
    mesh = " ".join(f"{name}={size}" for name, size in blocks.sharding.mesh.shape.items())
    if blocks.shape is None:
        return f"on {mesh}, seen from rank {blocks.rank}; a tensor of any size that divides"
    local = blocks.sharding.local_shape(blocks.shape, blocks.rank)
    text = f"on {mesh}; rank {blocks.rank} holds {' x '.join(map(str, local)) or 'one number'}"
    return text if dtype is None else f"{text}, {bytes_text(math.prod(local) * itemsize_of(dtype))}"


def _board(blocks: Blocks, room: Room, lines: int) -> Board:
    """The blocks, the last dim that is split across, the others down."""
    *down, across = blocks.drawn
    rows, columns, seen = Layout.product(*[side.layout for side in down]), across.layout, blocks.position
    wide = max(min(WIDEST, room.width // 2 - 4), room.width // columns.size - 16)
    wanted = (around(rows.coordinate(seen), rows.size), around(columns.coordinate(seen), columns.size))
    return board_of(
        down, across, lambda row, column: blocks.cell(row + column, wide), wanted, room, max(5, lines - 2), "blocks"
    )


def _dims(blocks: Blocks) -> Listing:
    """A row for each dim: its size, what splits it, and what this rank has of it."""
    rows, mesh, (sharding, shape) = [], blocks.sharding.mesh, (blocks.sharding, blocks.shape)
    for at, (name, slots) in enumerate(zip(dim_names(sharding), sharding.dims, strict=True)):
        size = "any" if shape is None else f"{shape[at]:,}"
        row: tuple[str, ...] = (name, size, " ".join(map(mesh.called, slots.layouts)) or "-", f"{slots.pieces:,}")
        if shape is not None:
            cuts = [*zip(sharding.extents(shape)[at], slots, strict=True)]
            sizes = [
                math.prod(chunk(extent, [layout.size for layout in slot.layouts]) for extent, slot in cuts)
                for chunk in (smallest_chunk, largest_chunk)
            ]
            runs = [f"{start}:{stop}" for start, stop in (sharding.tile(shape, blocks.rank) or ())[at] if start < stop]
            own = joined(len(runs), runs.__getitem__, " ", 24, f"{len(runs)} runs") or "nothing"
            row += ("..".join(f"{size:,}" for size in dict.fromkeys(sizes)), own)
        rows.append(row)
    head = ("dim", "size", "split over", "parts", "each has", f"rank {blocks.rank} has")
    return Listing(head[: len(rows[0]) if rows else 0], tuple(rows), right=(1, 3, 4))


def _remarks(blocks: Blocks) -> Iterator[str]:
    """What the blocks alone don't say: copies, and what is pending."""
    (_, copies), mesh = blocks.levels[0], blocks.sharding.mesh
    if copies.size > 1:
        yield f"copies: {copies.size:,} of each block, over {' '.join(mesh.calls(copies))}"
    for op, layouts in pending_runs(entry for entry in blocks.sharding.pending if entry[0] != "same"):
        size = math.prod(each.size for each in layouts)
        yield f"{op}@{layouts_text(mesh, layouts)} is pending: {op}(..) are {size:,} ranks whose {op} is the value"
