"""A sharding as a sheet: the blocks of the tensor, each with the ranks that hold it.

A block that several ranks hold is a copy on each (`0 4`); where a reduction is pending each of the ranks
holds a summand (`sum(0 1)`). The dims that are split go down and across, the minor two where there are
more: then a board is one block of the other dims.

>>> from axes.algebra.mesh import Mesh
>>> from axes.show.in_text import lines_of, plain
>>> from axes.show.panels import Room
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from axes.algebra.layout import Layout
from axes.algebra.plan import bytes_text, itemsize_of
from axes.algebra.planning.exchange import Pieces, pieces_of
from axes.algebra.sharding import Sharding, Slot, Slots, layouts_text, pending_runs, slots_text
from axes.show.boards import BoardSide, board_of, folded
from axes.show.panels import Board, Cell, Head, Listing, Panel, Remark, Room, Sheet
from axes.show.rank_text import LEFT_OUT, joined, short_ranks

WIDEST = 28
"""The ranks of a block have at most this many columns, where blocks stand beside each other."""


def sheet_of_sharding(
    sharding: Sharding, shape: Sequence[int] | None, room: Room, rank: int | None = None, dtype: str | None = None
) -> Sheet:
    """The picture of a sharding, seen from a rank (the mesh's by default). Without a shape, a dim is so many parts."""
    blocks = Blocks(sharding, None if shape is None else tuple(shape), sharding.mesh.rank if rank is None else rank)
    title = (str(sharding) or "a scalar") + ("" if shape is None else f"     {list(shape)}")
    title += f" {dtype}" if dtype is not None else ""
    where, listing, remarks = _where(blocks, dtype), _dims(blocks), tuple(_remarks(blocks))
    boards = _boards(blocks, room, room.height - 5 - len(listing.rows) - len(remarks))
    panels: list[Panel] = [Remark((where,), close=True), *boards]
    panels += [listing] if listing.rows else []
    panels += [Remark(remarks, close=bool(listing.rows))] if remarks else []
    summary = f"The blocks of a tensor that lies as {title}, and the ranks that hold each. {where}."
    return Sheet(title, summary, tuple(panels))


def dim_names(sharding: Sharding) -> tuple[str, ...]:
    """The dims as the spec calls them, without their axes; by their number where they have no name."""
    texts = [slots_text(sharding.mesh, dim.unsplit, sharding.names_of(at)) for at, dim in enumerate(sharding.dims)]
    return tuple(f"dim {at}" if text == "_" else text for at, text in enumerate(texts))


# --- which ranks hold what ------------------------------------------------------------------------


@dataclass(frozen=True)
class CutDim:
    """A dim as the blocks that it is cut into, in order: `(start, stop, which of the pieces it is a part of)`.

    at: its number. extents: of its factors. own: the first block of the rank that looks.
    """

    at: int
    name: str
    extents: tuple[int, ...]
    pieces: Pieces
    blocks: tuple[tuple[int, int, int], ...]
    own: int


ALONE = CutDim(-1, "", (1,), Pieces(Layout(), (((0, 1),),)), ((0, 1, 0),), 0)
"""What goes down or across where no dim does."""


@dataclass(frozen=True)
class Blocks:
    """A sharding with a shape, seen from a rank. shape: None where it is any; then a dim has its pieces alone."""

    sharding: Sharding
    shape: tuple[int, ...] | None
    rank: int

    @property
    def position(self) -> int | None:
        """The place of the rank in the mesh."""
        return self.sharding.universe.position(self.rank)

    @cached_property
    def dims(self) -> tuple[CutDim, ...]:
        """How each dim is cut."""
        cut, shape, found = self.sharding, self.shape, []
        if shape is None:  # every factor has as many elements as pieces, where its size isn't known
            sized = [Slots([Slot(slot.layouts, slot.size or slot.pieces) for slot in dim]) for dim in cut.dims]
            cut = replace(cut, dims=tuple(sized))
            shape = tuple(math.prod(slot.size or 1 for slot in dim) for dim in sized)
        names = dim_names(self.sharding)
        for number, (name, slots, extents) in enumerate(zip(names, cut.dims, cut.extents(shape), strict=True)):
            pieces = pieces_of(slots, extents)
            blocks = sorted((*run, piece) for piece, runs in enumerate(pieces.runs) for run in runs)
            mine = pieces.layout.coordinate(self.position or 0)
            own = next(at for at, (_, _, piece) in enumerate(blocks) if piece == mine)
            found.append(CutDim(number, name, extents, pieces, tuple(blocks), own))
        return tuple(found)

    @cached_property
    def levels(self) -> list[tuple[str, Layout]]:
        """What ranks have of a block: copies, of each copy what is pending, innermost last."""
        runs = pending_runs(entry for entry in self.sharding.pending if entry[0] != "same")
        pending = [(op, Layout.product(*layouts)) for op, layouts in runs]
        used = Layout.product(*[dim.pieces.layout for dim in self.dims], *[layout for _, layout in pending])
        return [("", self.sharding.mesh.extent.divide(used)), *reversed(pending)]

    def cell(self, blocks: Sequence[int], width: int | None) -> Cell:
        """A block, which is given by dim, with the ranks that hold it; there is a colour for each set of ranks."""
        pieces = [dim.blocks[block][2] for dim, block in zip(self.dims, blocks, strict=True)]
        tone, seen, extent = 0, self.position or 0, self.sharding.mesh.extent
        start = seen - extent.offset(extent.coordinate(seen))
        for dim, piece in zip(self.dims, pieces, strict=True):
            tone, start = tone * dim.pieces.layout.size + piece, start + dim.pieces.layout.offset(piece)
        here = self.position is not None and pieces == [dim.blocks[dim.own][2] for dim in self.dims]
        return Cell(self._held(start, self.levels, width), tone, here=here)

    def _held(self, start: int, levels: Sequence[tuple[str, Layout]], width: int | None) -> str:
        """The ranks from a position on: copies side by side, summands in parentheses."""
        (op, layout), *inner = levels
        room = None if width is None else max(1, width - (len(op) + 2 if op else 0))

        def each(at: int) -> str:
            return self._held(start + layout.offset(at), inner, None if op else width)

        if inner:
            text = joined(layout.size, each, " ", room, "") or (LEFT_OUT if op else f"{each(0)} {LEFT_OUT}")
        else:
            text = short_ranks(self.sharding.universe.pick(layout.offsets(start)), room)
        return f"{op}({text})" if op else text

    def label(self, dim: CutDim, block: int) -> str:
        """The indices of a block; without a shape, which part it is."""
        start, stop, _ = dim.blocks[block]
        if self.shape is None and len(dim.blocks) > 1:
            return f"{block + 1}/{len(dim.blocks)}"
        return "" if dim is ALONE else f"{start}:{stop}" if start < stop else "nothing"

    def inside(self, dim: CutDim, block: int) -> str:
        """The indices of a block in the factors of a dim that has several; of those alone that the split reaches."""
        if len(dim.extents) == 1:
            return ""
        slots, names = self.sharding.dims[dim.at], self.sharding.names_of(dim.at)
        split = max((at + 1 for at, slot in enumerate(slots) if slot.layouts), default=0)
        factors = [*zip(slots, names, dim.extents, strict=True)][:split]
        inner = math.prod(dim.extents[split:]) or 1
        start, stop, _ = dim.blocks[block]
        first, size, texts = start // inner, (stop - start) // inner, list[str]()
        for slot, name, extent in reversed(factors):
            first, low = divmod(first, extent or 1)
            texts.insert(0, f"{name or slot.size} {low}" + (f":{low + size}" if size != 1 else ""))
            size = 1
        return ", ".join(texts)


# --- the sheet ------------------------------------------------------------------------------------


def _where(blocks: Blocks, dtype: str | None) -> str:
    """The mesh, and what the rank that looks has."""
    mesh = " ".join(f"{name}={size}" for name, size in blocks.sharding.mesh.shape.items())
    if blocks.position is None:
        return f"on {mesh}, seen from rank {blocks.rank}, which isn't one of its ranks"
    if blocks.shape is None:
        return f"on {mesh}, seen from rank {blocks.rank}; a tensor of any size that divides"
    local = blocks.sharding.local_shape(blocks.shape, blocks.rank)
    text = f"on {mesh}; rank {blocks.rank} holds {' x '.join(map(str, local)) or 'one number'}"
    return text if dtype is None else f"{text}, {bytes_text(math.prod(local) * itemsize_of(dtype))}"


def _boards(blocks: Blocks, room: Room, lines: int) -> Iterator[Panel]:
    """A board for each block of the dims that don't go down or across; of many, the one of this rank and a few."""
    split = [dim for dim in blocks.dims if len(dim.blocks) > 1]
    whole = [dim for dim in blocks.dims if len(dim.blocks) == 1]
    chosen = [*whole, *split][-2:]
    drawn, outer = [dim for dim in blocks.dims if dim in chosen], split[:-2]
    down, across = [*drawn, ALONE, ALONE][:2] if split else [ALONE, ALONE, *drawn][-2:]
    total, own = 1, 0
    for dim in outer:
        total, own = total * len(dim.blocks), own * len(dim.blocks) + dim.own
    high = min(len(down.blocks), 8)
    for number in folded(total, [own, 0, total - 1], max(1, lines // (high + 3))):
        if isinstance(number, range):
            names = " and ".join(dim.name for dim in outer)
            yield Remark((f"{LEFT_OUT} {len(number):,} more blocks of {names}",))
            continue
        fixed = dict.fromkeys(range(len(blocks.dims)), 0)
        for dim in reversed(outer):
            number, fixed[dim.at] = divmod(number, len(dim.blocks))
        caption = "  ".join(f"{dim.name} {blocks.label(dim, fixed[dim.at])}" for dim in outer)
        yield _board(blocks, down, across, fixed, caption, room, lines)


def _board(
    blocks: Blocks, down: CutDim, across: CutDim, fixed: Mapping[int, int], caption: str, room: Room, lines: int
) -> Board:
    """The blocks of the dims that are drawn, at one block of each other dim."""

    def cell(row: int, column: int, width: int | None) -> Cell:
        at = {**fixed, down.at: row, across.at: column}
        return blocks.cell([at[dim.at] for dim in blocks.dims], width)

    def side(dim: CutDim, left_out: str) -> BoardSide:
        count = len(dim.blocks)
        wide = max(len(blocks.label(dim, block)) for block in (0, dim.own, count - 1))

        def head(block: int) -> Head:
            start, stop, _ = dim.blocks[block]
            inside = blocks.inside(dim, block) if dim is down else ""
            return Head((f"{blocks.label(dim, block):{wide * bool(inside)}}  {inside}".rstrip(),), stop - start)

        near = (at for at in (dim.own + 1, dim.own - 1) if 0 <= at < count)
        return BoardSide((dim.name,), count, head, [dim.own, 0, count - 1, *near], left_out)

    rows, columns = side(down, "{:,} more blocks"), side(across, LEFT_OUT)
    corners = [[dim.own, 0, len(dim.blocks) - 1] for dim in (down, across)]
    label = max(len(down.name), *(len(rows.head(row).labels[0]) for row in corners[0]))
    left, breadth = room.width - label - len(across.name) - 3, len(across.blocks)
    needed = max(len(cell(row, column, None).text) for row, column in product(*corners))
    wide = left - 2 if breadth == 1 else min(needed, max(WIDEST, left // breadth - 3), left // 3 - 3)
    return board_of(rows, columns, lambda row, column: cell(row, column, wide), room, max(5, lines - 2), caption)


def _dims(blocks: Blocks) -> Listing:
    """A row for each dim: its size, what splits it, and what this rank has of it."""
    rows, mesh = [], blocks.sharding.mesh
    for dim, slots in zip(blocks.dims, blocks.sharding.dims, strict=True):
        named = zip(blocks.sharding.names_of(dim.at), slots, strict=True)
        split = [(name or slot.size, slot.layouts) for name, slot in named if slot.layouts]
        axes = " ".join(f"{name}@{layouts_text(mesh, layouts)}" for name, layouts in split)
        axes = axes if len(slots) > 1 else " ".join(map(mesh.called, slots.layouts))
        sizes = {sum(stop - start for start, stop in runs) for runs in dim.pieces.runs}
        each = "..".join(f"{size:,}" for size in dict.fromkeys((min(sizes), max(sizes))))
        held = dim.pieces.runs[dim.blocks[dim.own][2]]
        runs = [f"{start}:{stop}" for start, stop in held if start < stop] or ["nothing"]
        mine = joined(len(runs), runs.__getitem__, " ", 24, f"{len(runs)} runs")
        rows.append((dim.name, f"{math.prod(dim.extents):,}", axes or "-", f"{slots.pieces:,}", each, mine))
    head = ("dim", "size", "split over", "parts", "each has", f"rank {blocks.rank} has")
    if blocks.shape is None:
        return Listing(head[:1] + head[2:4], tuple(row[:1] + row[2:4] for row in rows), right=(2,))
    shown = 5 if blocks.position is None else 6
    return Listing(head[:shown], tuple(row[:shown] for row in rows), right=(1, 3, 4))


def _remarks(blocks: Blocks) -> Iterator[str]:
    """What the blocks alone don't say: copies, and what is pending."""
    (_, copies), mesh = blocks.levels[0], blocks.sharding.mesh
    if copies.size > 1:
        yield f"copies: {copies.size:,} of each block, over {' '.join(mesh.calls(copies))}"
    for op, layouts in pending_runs(entry for entry in blocks.sharding.pending if entry[0] != "same"):
        size = math.prod(each.size for each in layouts)
        yield f"{op}@{layouts_text(mesh, layouts)} is pending: {op}(..) are {size:,} ranks whose {op} is the value"
