"""What a picture is made of, however it is shown: a sheet of boards, tables, remarks and moves.

What builds a sheet (of a mesh, a sharding, a plan) knows nothing of terminals and SVG; what shows one
(`in_text`, `in_svg`, `in_html`) nothing of meshes.

>>> board = Board(("dp",), "tp", (Head(("0",)), Head(("1",))), (Head(("0",)),), ((Cell("0"), Cell("1")),))
>>> Sheet("a mesh", "of two ranks", (board,)).panels[0].cells[0][1].text
'1'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise

from axes import Layout
from axes.extension import bytes_text
from axes.pictures.rank_text import LEFT_OUT

COLORS = ("#3a75c6", "#b45e18", "#2a8456", "#9a5bb8", "#976e09", "#c2476f", "#278089", "#7a6a5a")
"""Colours by number: white reads on each of them, and each on white and on black."""


def color(tone: int) -> str:
    """A colour by its number."""
    return COLORS[tone % len(COLORS)]


@dataclass(frozen=True)
class Cell:
    """A place of a board.

    tone: the number of its colour, None for none. mark: a letter that says the same as the colour.
    here: whether it is the place that the picture is seen from. wall: whether a node ends on its left.
    """

    text: str
    tone: int | None = None
    mark: str = ""
    here: bool = False
    wall: bool = False


@dataclass(frozen=True)
class Head:
    """What stands beside a row or above a column.

    extent: how large it is beside others. gap: stands for several. note: what stands at the other end of the row.
    """

    labels: tuple[str, ...]
    extent: float = 1
    gap: bool = False
    note: str = ""


@dataclass(frozen=True)
class Board:
    """Places in rows and columns.

    corner: what the labels of rows are of. across: what those of columns are of. caption: what stands above it all.
    """

    corner: tuple[str, ...]
    across: str
    columns: tuple[Head, ...]
    rows: tuple[Head, ...]
    cells: tuple[tuple[Cell, ...], ...]
    caption: str = ""


@dataclass(frozen=True)
class Listing:
    """A table of text. right: which columns are numbers. tones: the colour of each row's first cell.

    title: stands above it. A row of one cell is a line of its own.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    tones: tuple[int | None, ...] = ()
    title: str = ""


@dataclass(frozen=True)
class Remark:
    """Lines of text. close: whether they belong to what stands above them."""

    lines: tuple[str, ...]
    close: bool = False


Patch = tuple[tuple[float, float], tuple[float, float], tuple[int, ...]]
"""A part of a tensor: from where to where down and across, as parts of a side, and the numbers of its ranks."""


@dataclass(frozen=True)
class Frames:
    """A tensor, beside each other as it lies on each rank.

    step, arrows: what happened before, in two texts, and from which rank to which.
    ways: which dims go down and across, or across alone. patches: the parts that each rank holds.
    joints: what stands before each rank's frame.
    """

    caption: str
    ways: tuple[str, ...]
    patches: tuple[tuple[Patch, ...], ...]
    joints: tuple[str, ...]
    step: tuple[str, ...] = ()
    arrows: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Moves:
    """What moves, drawn rank by rank; text shows the panels after it alone, which say the same.

    heads: above each rank its number, and where in the mesh it is. draw: makes the rows, where they are drawn.
    """

    heads: tuple[tuple[str, str], ...]
    draw: Callable[[], Iterable[Frames]]

    @cached_property
    def rows(self) -> tuple[Frames, ...]:
        """The tensor at first and after each step."""
        return tuple(self.draw())

    @property
    def words(self) -> str:
        """The picture in words: how the tensor lies, and what happens in between."""
        return "; ".join(text for row in self.rows for text in (" ".join(row.step), row.caption) if text)


Panel = Board | Listing | Remark | Moves


@dataclass(frozen=True)
class Sheet:
    """A picture. summary: what it shows, in a sentence, for who doesn't see it; without one, its text."""

    title: str
    summary: str
    panels: tuple[Panel, ...]


def sheet_of(title: str, summary: str, *panels: Panel | None) -> Sheet:
    """A sheet of the panels that there are."""
    return Sheet(title, summary, tuple(panel for panel in panels if panel is not None))


@dataclass(frozen=True)
class Room:
    """How much a picture may take: columns and lines of text, each of which stands for a place of a board, too."""

    width: int = 80
    height: int = 24


def widths_of(rows: Sequence[Sequence[str]]) -> list[int]:
    """How many letters wide each column is."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


# --- boards of any size ---------------------------------------------------------------------------


@dataclass(frozen=True)
class BoardSide:
    """What goes down or across, by the digits of a position: its name, and what stands beside a position."""

    name: str
    layout: Layout
    head: Callable[[int], Head]


def around(own: int, count: int) -> list[int]:
    """Which of `count` things matter most: one's own, the ends, and one's neighbours."""
    return [own, 0, count - 1, *(at for at in (own + 1, own - 1) if 0 <= at < count)]


def board_of(
    down: Sequence[BoardSide],
    across: BoardSide,
    cell: Callable[[int, int], Cell],
    wanted: tuple[Iterable[int], Iterable[int]],
    room: Room,
    lines: int,
    left_out: str = "rows",
    note: Callable[[int], str] = lambda position: "",
    caption: str = "",
) -> Board:
    """A board of so many lines, with as many columns as there is room for; what isn't wanted first is left out.

    cell, note: by the positions of a row and of a column. wanted: numbers of rows and of columns.

    >>> from axes.pictures.in_text import panel_lines, plain
    >>> x, y = [BoardSide(name, Layout((1000,), (1,)), lambda at: Head((f"{at}",))) for name in "xy"]
    >>> wanted = around(7, 1000), around(500, 1000)
    >>> board = board_of([x], y, lambda row, column: Cell(f"{row * column}"), wanted, Room(24), 5)
    >>> print(plain(panel_lines(board, 80)))
    x    y  ..     500  ..
    0       ..       0  ..
    .. 6 more rows
    7       ..    3500  ..
    .. 991 more rows
    999     ..  499500  ..
    """
    rows, columns = Layout.product(*[side.layout for side in down]), across.layout

    def beside(row: int | range) -> Head:
        if isinstance(row, range):
            return Head((f"{len(row):,} more {left_out}",), gap=True)
        heads = [side.head(rows.offset(row)) for side in down]
        extent = heads[-1].extent if heads else 1
        return Head(tuple(head.labels[0] for head in heads), extent, note=note(rows.offset(row)))

    def above(at: int | range) -> Head:
        return Head((LEFT_OUT,), gap=True) if isinstance(at, range) else across.head(columns.offset(at))

    @lru_cache(maxsize=1024)
    def column(at: int | range) -> list[Cell]:
        def place(row: int | range) -> Cell:
            if isinstance(row, range) or isinstance(at, range):
                return Cell("" if isinstance(row, range) else LEFT_OUT)
            return cell(rows.offset(row), columns.offset(at))

        return list(map(place, shown))

    def width(at: int) -> int:
        texts = (above(at).labels[0], *(each.text for each in column(at)))
        return 2 + any(each.wall for each in column(at)) + max(map(len, texts))

    shown = folded(rows.size, wanted[0], lines)
    heads, corner = tuple(map(beside, shown)), tuple(side.name for side in down)
    labels = widths_of([corner, *(head.labels for head in heads if not head.gap)])
    notes = max(2 * bool(head.note) + len(head.note) for head in heads)
    left = room.width - sum(labels) - 2 * len(labels) - len(across.name) - 1 - notes
    found = folded(columns.size, wanted[1], left, width, 2 + len(LEFT_OUT))
    cells = tuple(zip(*map(column, found), strict=True))
    return Board(corner, across.name, tuple(map(above, found)), heads, cells, caption)


def exchange_board(
    senders: Sequence[int],
    receivers: Sequence[int],
    own: int,
    partners: Sequence[int],
    count: Callable[[int, int], int],
    tone: Callable[[int], int | None],
    room: Room,
    caption: str,
) -> Board:
    """How many bytes each rank has from each, itself included; seen from `own`, which exchanges with `partners`."""

    def side(name: str, ranks: Sequence[int]) -> BoardSide:
        layout = Layout((len(ranks),), (1,))
        return BoardSide(name, layout, lambda at: Head((f"[{own}]" if ranks[at] == own else f"{ranks[at]}",)))

    def wanted(ranks: Sequence[int]) -> list[int]:
        first, *others = [ranks.index(rank) for rank in (own, *partners[:16]) if rank in ranks] or [0]
        return [first, *others[:3], *around(first, len(ranks)), *others]

    def cell(row: int, column: int) -> Cell:
        sender, receiver = senders[row], receivers[column]
        size = count(sender, receiver)
        if sender == receiver:
            return Cell("stays" if size else "-", here=sender == own)
        return Cell(bytes_text(size), tone(sender)) if size else Cell("-")

    lines, both = max(3, min(10, room.height - 14)), (wanted(senders), wanted(receivers))
    sides = [side("from", senders)], side("to", receivers)
    return board_of(*sides, cell, both, room, lines, "ranks", caption=f"   {caption}:")


def folded(
    count: int, wanted: Iterable[int], room: int, size: Callable[[int], int] = lambda at: 1, gap: int = 1
) -> list[int | range]:
    """Which of `count` things are shown in a room: their numbers, and a range for each gap between them.

    The first of `wanted` is always shown, the others in their order of importance, then the first things.

    >>> folded(4, [], 5), folded(1000, [500, 0, 999], 8)
    ([0, 1, 2, 3], [0, 1, 2, 3, range(4, 500), 500, range(501, 999), 999])
    """
    shown: list[int | range] = []
    for at in chain(wanted, range(min(count, room))):
        more = _with_gaps(count, {at, *(each for each in shown if isinstance(each, int))})
        if shown and sum(gap if isinstance(each, range) else size(each) for each in more) > room:
            break
        shown = more
    return shown


def _with_gaps(count: int, shown: Iterable[int]) -> list[int | range]:
    found: list[int | range] = []
    for before, after in pairwise((-1, *sorted(shown), count)):
        between = range(before + 1, after)
        found += [*between, after] if len(between) < 2 else [between, after]
    return found[:-1]
