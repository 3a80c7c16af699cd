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

from axes.algebra.chunks import largest_chunk, nested_chunk, smallest_chunk
from axes.algebra.errors import MeshError
from axes.algebra.layout import Layout
from axes.algebra.plan import bytes_text, itemsize_of
from axes.algebra.sharding import Sharding, Slot, Slots, layouts_text, pending_runs, slots_text
from axes.show.panels import Board, Cell, Head, Listing, Panel, Remark, Room, Sheet
from axes.show.rank_text import LEFT_OUT, folded, joined, short_ranks

WIDEST = 28
"""The ranks of a block have at most this many columns, where blocks stand beside each other."""


def sheet_of_sharding(
    sharding: Sharding, shape: Sequence[int] | None, room: Room, rank: int | None = None, dtype: str | None = None
) -> Sheet:
    """The picture of a sharding, seen from a rank (the mesh's by default).

    Without a shape, a dim is so many parts. Raises `MeshError` for a rank that isn't of the mesh.
    """
    blocks = Blocks.of(sharding, shape, rank)
    title = (str(sharding) or "a scalar") + ("" if shape is None else f"     {list(shape)}")
    title += f" {dtype}" if dtype is not None else ""
    panels: list[Panel] = [Remark((_where(blocks, dtype),), close=True)]
    listing, remarks = _dims(blocks), _remarks(blocks)
    panels += _boards(blocks, room, room.height - 5 - len(listing.rows) - len(remarks))
    panels += [listing] if listing.rows else []
    panels += [Remark(tuple(remarks), close=bool(listing.rows))] if remarks else []
    summary = f"The blocks of a tensor that lies as {title}, and the ranks that hold each. {_where(blocks, dtype)}."
    return Sheet(title, summary, tuple(panels))


# --- how a dim is cut -----------------------------------------------------------------------------


@dataclass(frozen=True)
class CutDim:
    """A dim as the blocks that it is cut into, in order; each is `start..stop`, and empty where nothing is left.

    extents: of its factors. Before the last factor that is split every index is a block of its own.
    """

    dim: Slots
    extents: tuple[int, ...]
    names: tuple[str, ...]

    @cached_property
    def last(self) -> int:
        """The last factor that is split, -1 where none is."""
        return max((at for at, factor in enumerate(self.dim) if factor.layouts), default=-1)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many parts each factor has."""
        return tuple(
            max(1, extent) if at < self.last else factor.pieces
            for at, (factor, extent) in enumerate(zip(self.dim, self.extents, strict=True))
        )

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return math.prod(self.counts)

    def parts(self, block: int) -> tuple[int, ...]:
        """Which part of each factor a block is."""
        found = []
        for count in reversed(self.counts):
            block, part = divmod(block, count)
            found.append(part)
        return tuple(reversed(found))

    def span(self, block: int) -> tuple[int, int]:
        """Where a block starts and stops in the dim."""
        if self.last < 0 or 0 in self.extents:
            return 0, math.prod(self.extents)
        start, stop = 0, 0
        for at, part in enumerate(self.parts(block)[: self.last + 1]):
            first, end = self._part_span(at, part)
            start, stop = start * self.extents[at] + first, start * self.extents[at] + end
        inner = math.prod(self.extents[self.last + 1 :])
        return start * inner, stop * inner

    def _part_span(self, at: int, part: int) -> tuple[int, int]:
        if at < self.last:
            return part, part + 1
        return nested_chunk(self.extents[at], _cuts(self.dim[at], part))

    def offset(self, block: int) -> int:
        """How far the ranks that hold a block are from those that hold the first, in positions."""
        return sum(
            layout.offset(index)
            for at, part in enumerate(self.parts(block))
            for layout, (_, index) in zip(self.dim[at].layouts, _cuts(self.dim[at], self._piece(at, part)), strict=True)
        )

    def block_at(self, position: int) -> int:
        """The first block that the rank at a position holds."""
        found = 0
        for at, (factor, extent, count) in enumerate(zip(self.dim, self.extents, self.counts, strict=True)):
            piece = 0
            for layout in factor.layouts:
                piece = piece * layout.size + layout.coordinate(position)
            found = found * count + (piece * (extent // factor.pieces) if at < self.last else piece)
        return found

    def piece(self, block: int) -> int:
        """Which of the pieces that ranks hold a block is a part of."""
        found = 0
        for at, part in enumerate(self.parts(block)):
            found = found * self.dim[at].pieces + self._piece(at, part) * bool(self.dim[at].layouts)
        return found

    def _piece(self, at: int, part: int) -> int:
        """Which piece of a factor one of its parts is of. Pieces are even where the parts are single indices."""
        return part * self.dim[at].pieces // max(1, self.extents[at]) if at < self.last else part

    def label(self, block: int) -> str:
        """The indices of a block."""
        start, stop = self.span(block)
        return f"{start}:{stop}" if start < stop else "nothing"

    def factors_label(self, block: int) -> str:
        """The indices of a block in the factors of the dim; nothing for a dim of one factor."""
        if len(self.dim) == 1 or self.last < 0:
            return ""
        texts = []
        for at, part in enumerate(self.parts(block)[: self.last + 1]):
            first, stop = self._part_span(at, part)
            texts.append(f"{self.names[at] or self.dim[at].size} {first}" + ("" if stop == first + 1 else f":{stop}"))
        return ", ".join(texts)

    def sizes(self) -> str:
        """How much of the dim a rank has: one number, or the least and the most."""
        most = least = 1
        for factor, extent in zip(self.dim, self.extents, strict=True):
            pieces = [layout.size for layout in factor.layouts]
            most, least = most * largest_chunk(extent, pieces), least * smallest_chunk(extent, pieces)
        return f"{most:,}" if most == least else f"{least:,}..{most:,}"


def _cuts(factor: Slot, piece: int) -> list[tuple[int, int]]:
    """A piece of a factor as what its axes cut out: `(parts, which of them)`, major first."""
    found = []
    for layout in reversed(factor.layouts):
        piece, index = divmod(piece, layout.size)
        found.append((layout.size, index))
    return found[::-1]


# --- which ranks hold what ------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """A sharding with a shape, seen from a rank. shape: None where it is any; then a dim has its pieces alone."""

    sharding: Sharding
    shape: tuple[int, ...] | None
    dims: tuple[CutDim, ...]
    rank: int
    position: int | None
    written: Sharding

    @classmethod
    def of(cls, sharding: Sharding, shape: Sequence[int] | None, rank: int | None) -> Blocks:
        """Raises `MeshError` for a given rank that isn't of the mesh, and what doesn't fit the shape."""
        seen = sharding.mesh.rank if rank is None else rank
        position = sharding.universe.position(seen)
        if rank is not None and position is None:
            raise MeshError(f"rank {rank} isn't one of the ranks of {sharding.mesh!r}")
        written = sharding
        if shape is None:
            sharding = replace(sharding, dims=tuple(map(_sized, sharding.dims)))
        whole = tuple(math.prod(slot.size or 1 for slot in dim) for dim in sharding.dims) if shape is None else shape
        cut = tuple(
            CutDim(dim, sizes, sharding.names_of(at))
            for at, (dim, sizes) in enumerate(zip(sharding.dims, sharding.extents(whole), strict=True))
        )
        return cls(sharding, None if shape is None else tuple(whole), cut, seen, position, written)

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The first block of this rank, by dim."""
        return tuple(0 if self.position is None else cut.block_at(self.position) for cut in self.dims)

    @cached_property
    def base(self) -> int:
        """The lowest position of the mesh that this rank is in."""
        extent = self.sharding.mesh.extent
        return 0 if self.position is None else self.position - extent.offset(extent.coordinate(self.position))

    @cached_property
    def reductions(self) -> list[tuple[str, list[Layout]]]:
        """What is pending, without what is the same on all ranks."""
        return pending_runs(entry for entry in self.sharding.pending if entry[0] != "same")

    @cached_property
    def copies(self) -> Layout:
        """Along which digits the ranks have copies."""
        split = [layout for dim in self.sharding.dims for layout in dim.layouts]
        pending = [layout for _, layouts in self.reductions for layout in layouts]
        return self.sharding.mesh.extent.divide(Layout.product(*split, *pending))

    def holders(self, blocks: Sequence[int], width: int | None) -> str:
        """The ranks that hold a block, which is given by dim: copies side by side, summands in parentheses."""
        start = self.base + sum(cut.offset(block) for cut, block in zip(self.dims, blocks, strict=True))
        if not self.reductions:
            return self._ranks(start, self.copies, width)
        level = len(self.reductions) - 1
        copies = joined(
            self.copies.size, lambda at: self._summands(start + self.copies.offset(at), level, width), " ", width, ""
        )
        return copies or f"{self._summands(start, level, width)} {LEFT_OUT}"

    def _summands(self, start: int, level: int, width: int | None) -> str:
        op, layouts = self.reductions[level]
        layout = Layout.product(*layouts)
        room = None if width is None else max(1, width - len(op) - 2)
        if level == 0:
            return f"{op}({self._ranks(start, layout, room)})"
        inner = joined(
            layout.size, lambda at: self._summands(start + layout.offset(at), level - 1, None), " ", room, LEFT_OUT
        )
        return f"{op}({inner})"

    def _ranks(self, start: int, layout: Layout, width: int | None) -> str:
        offsets, universe = layout.offsets(), self.sharding.universe
        if isinstance(offsets, range):
            return short_ranks(universe.pick(range(start, start + offsets.stop, offsets.step)), width)
        return short_ranks(universe.pick([start + offset for offset in offsets]), width)

    def is_own(self, blocks: Sequence[int]) -> bool:
        """Whether this rank holds a block."""
        if self.position is None:
            return False
        there = sum(cut.offset(block) for cut, block in zip(self.dims, blocks, strict=True))
        mine = sum(cut.offset(block) for cut, block in zip(self.dims, self.own, strict=True))
        return there == mine

    def tone(self, blocks: Sequence[int]) -> int:
        """A colour for each set of ranks."""
        found = 0
        for cut, block in zip(self.dims, blocks, strict=True):
            found = found * cut.dim.pieces + cut.piece(block)
        return found

    def name(self, dim: int) -> str:
        """A dim as the spec calls it, without its axes; by its number where it has no name."""
        text = slots_text(self.written.mesh, self.written.dims[dim].unsplit, self.written.names_of(dim))
        return f"dim {dim}" if text == "_" else text


def _sized(dim: Slots) -> Slots:
    """A dim of which every factor has a size: as many parts as it is cut into, where none is known."""
    return Slots([Slot(slot.layouts, slot.size or slot.pieces) for slot in dim])


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
    split = [dim for dim, cut in enumerate(blocks.dims) if cut.count > 1]
    whole = [dim for dim in range(len(blocks.dims)) if dim not in split]
    drawn = sorted([*whole[max(0, len(whole) + len(split) - 2) if len(split) < 2 else len(whole) :], *split[-2:]][-2:])
    outer = [dim for dim in split if dim not in drawn]
    counts = [blocks.dims[dim].count for dim in outer]
    total = math.prod(counts)
    own = 0
    for dim, count in zip(outer, counts, strict=True):
        own = own * count + blocks.own[dim]
    down = min(blocks.dims[drawn[0]].count, 8) if len(drawn) == 2 else 1
    for number in folded(total, [own, 0, total - 1], max(1, lines // (down + 3))):
        if isinstance(number, range):
            yield Remark((f"{LEFT_OUT} {len(number):,} more blocks of {' and '.join(map(blocks.name, outer))}",))
            continue
        fixed: dict[int | None, int] = dict.fromkeys(range(len(blocks.dims)), 0)
        rest = number
        for dim in reversed(outer):
            rest, fixed[dim] = divmod(rest, blocks.dims[dim].count)
        caption = "  ".join(f"{blocks.name(dim)} {_label(blocks, dim, fixed[dim])}" for dim in outer)
        yield _block_board(blocks, drawn, fixed, caption, room, lines)


def _label(blocks: Blocks, dim: int, block: int) -> str:
    cut = blocks.dims[dim]
    return f"{block + 1}/{cut.count}" if blocks.shape is None and cut.count > 1 else cut.label(block)


def _block_board(
    blocks: Blocks, drawn: Sequence[int], fixed: Mapping[int | None, int], caption: str, room: Room, lines: int
) -> Board:
    """The blocks of the dims that are drawn, at one block of each other dim."""
    down, across = (drawn[0], drawn[1]) if len(drawn) == 2 else (None, drawn[0] if drawn else None)
    if len(drawn) == 1 and blocks.dims[drawn[0]].count > 1:  # a tensor of one dim goes down, with a line for each block
        down, across = drawn[0], None

    def at(row: int, column: int) -> list[int]:
        found = {**fixed, down: row, across: column}
        return [found[dim] for dim in range(len(blocks.dims))]

    def name_of(dim: int | None) -> str:
        return "" if dim is None else blocks.name(dim)

    height = 1 if down is None else blocks.dims[down].count
    breadth = 1 if across is None else blocks.dims[across].count
    own_row = 0 if down is None else blocks.own[down]
    own_column = 0 if across is None else blocks.own[across]
    rows = folded(height, _near(own_row, height), max(5, lines - 2))
    first = _beside(blocks, down, rows)
    label = max(sum(map(len, head.labels)) + 2 * len(head.labels) for head in first if not head.gap)
    left = room.width - max(label, len(name_of(down)) + 2) - len(name_of(across)) - 1
    ends = [at(row, column) for row in (0, own_row, height - 1) for column in (0, own_column, breadth - 1)]
    needed = max(len(blocks.holders(end, None)) for end in ends)
    wide = left - 2 if breadth == 1 else min(needed, max(WIDEST, left // breadth - 3), left // 3 - 3)
    shown = _near(own_column, breadth)
    widest = max(wide, *(len(_head(blocks, across, column, None).labels[0]) for column in shown)) + 2
    columns = folded(breadth, shown, max(3, left // widest))
    cells = [
        tuple(
            Cell("")
            if isinstance(row, range)
            else Cell(LEFT_OUT)
            if isinstance(column, range)
            else Cell(
                blocks.holders(at(row, column), wide), blocks.tone(at(row, column)), here=blocks.is_own(at(row, column))
            )
            for column in columns
        )
        for row in rows
    ]
    heads = [_head(blocks, across, column, None) for column in columns]
    return Board((name_of(down),), name_of(across), tuple(heads), tuple(first), tuple(cells), caption=caption)


def _near(own: int, count: int) -> list[int]:
    """Blocks in the order of their importance: this rank's, the first, the last, those beside it."""
    return [own, 0, count - 1, *(at for at in (own + 1, own - 1) if 0 <= at < count)]


def _head(blocks: Blocks, dim: int | None, block: int | range, left_out: str | None) -> Head:
    if isinstance(block, range):
        return Head((LEFT_OUT if left_out is None else f"{len(block):,} {left_out}",), gap=True)
    if dim is None:
        return Head(("",))
    start, stop = blocks.dims[dim].span(block)
    return Head((_label(blocks, dim, block),), stop - start)


def _beside(blocks: Blocks, dim: int | None, rows: Sequence[int | range]) -> list[Head]:
    """What stands beside the rows: the indices, and behind them those in the factors of the dim."""
    heads = [_head(blocks, dim, row, "more blocks") for row in rows]
    wide = max(len(head.labels[0]) for head in heads if not head.gap)
    inside = ["" if isinstance(row, range) or dim is None else blocks.dims[dim].factors_label(row) for row in rows]
    return [
        replace(head, labels=(f"{head.labels[0]:{wide}}  {text}",)) if text else head
        for head, text in zip(heads, inside, strict=True)
    ]


def _dims(blocks: Blocks) -> Listing:
    """A row for each dim: its size, what splits it, and what this rank has of it."""
    rows = []
    held = None
    if blocks.shape is not None and blocks.position is not None:
        held = blocks.sharding.tile(blocks.shape, blocks.rank)
    for dim, cut in enumerate(blocks.dims):
        mesh = blocks.sharding.mesh
        if len(cut.dim) == 1:
            axes = " ".join(map(mesh.called, cut.dim.layouts))
        else:
            named = zip(cut.names, cut.dim, strict=True)
            split = [(name or slot.size, slot.layouts) for name, slot in named if slot.layouts]
            axes = " ".join(f"{name}@{layouts_text(mesh, layouts)}" for name, layouts in split)
        row = [blocks.name(dim), axes or "-", f"{cut.dim.pieces:,}"]
        if blocks.shape is not None:
            row[1:1] = [f"{blocks.shape[dim]:,}"]
            row.append(cut.sizes())
        if held is not None:
            runs = [f"{start}:{stop}" for start, stop in held[dim] if start < stop] or ["nothing"]
            row.append(joined(len(runs), runs.__getitem__, " ", 24, f"{len(runs)} runs"))
        rows.append(tuple(row))
    if blocks.shape is None:
        return Listing(("dim", "split over", "parts"), tuple(rows), right=(2,))
    mine = [f"rank {blocks.rank} has"] if held is not None else []
    return Listing(("dim", "size", "split over", "parts", "each has", *mine), tuple(rows), right=(1, 3, 4))


def _remarks(blocks: Blocks) -> list[str]:
    """What the blocks alone don't say: copies, what is pending, blocks that are empty."""
    found = []
    if blocks.copies.size > 1:
        over = " ".join(blocks.sharding.mesh.calls(blocks.copies))
        found.append(f"copies: {blocks.copies.size:,} of each block, over {over}")
    for op, layouts in blocks.reductions:
        size, text = math.prod(each.size for each in layouts), f"{op}@{layouts_text(blocks.sharding.mesh, layouts)}"
        found.append(f"{text} is pending: {op}(..) are {size:,} ranks whose {op} is the value")
    return found
