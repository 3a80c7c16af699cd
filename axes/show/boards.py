"""Boards of any size in the room that there is: what is far from the rank that looks is left out.

>>> from axes.show.in_text import panel_lines, plain
>>> def side(name: str, own: int, *left_out: str) -> BoardSide:
...     return BoardSide((name,), 1000, lambda at: Head((f"{at}",)), around(own, 1000), *left_out)
>>> down, across = side("x", 7, "{:,} more"), side("y", 500)
>>> print(plain(panel_lines(board_of(down, across, lambda row, column: Cell(f"{row * column}"), Room(24), 5), 80)))
x    y  ..     500  ..
0       ..       0  ..
.. 6 more
7       ..    3500  ..
.. 991 more
999     ..  499500  ..
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise

from axes.algebra.plan import bytes_text
from axes.show.panels import Board, Cell, Head, Room, widths_of
from axes.show.rank_text import LEFT_OUT


@dataclass(frozen=True)
class BoardSide:
    """The rows of a board, or its columns: how many there are, what stands beside each, which matter most, in order.

    names: what the labels are of. left_out: what is said of several.
    """

    names: tuple[str, ...]
    count: int
    head: Callable[[int], Head]
    wanted: Iterable[int]
    left_out: str = LEFT_OUT

    def heads(self, shown: Sequence[int | range]) -> tuple[Head, ...]:
        """What stands beside those that are shown."""
        return tuple(
            Head((self.left_out.format(len(at)),), gap=True) if isinstance(at, range) else self.head(at) for at in shown
        )


def around(own: int, count: int) -> list[int]:
    """Which of `count` things matter most: one's own, the ends, and one's neighbours."""
    return [own, 0, count - 1, *(at for at in (own + 1, own - 1) if 0 <= at < count)]


def board_of(
    down: BoardSide, across: BoardSide, cell: Callable[[int, int], Cell], room: Room, lines: int, caption: str = ""
) -> Board:
    """A board of so many lines, with as many columns as there is room for."""
    rows = folded(down.count, down.wanted, lines)
    beside = down.heads(rows)
    labels = widths_of([down.names, *(head.labels for head in beside if not head.gap)])
    note = max(2 * bool(head.note) + len(head.note) for head in beside)
    left = room.width - sum(labels) - 2 * len(labels) - len(across.names[0]) - 1 - note

    @cache
    def column(at: int) -> list[Cell]:
        return [Cell("") if isinstance(row, range) else cell(row, at) for row in rows]

    def width(at: int) -> int:
        texts = (across.head(at).labels[0], *(each.text for each in column(at)))
        return 2 + any(each.wall for each in column(at)) + max(map(len, texts))

    columns = folded(across.count, across.wanted, left, width, 2 + len(LEFT_OUT))
    gaps = [Cell("" if isinstance(row, range) else LEFT_OUT) for row in rows]
    cells = zip(*(gaps if isinstance(at, range) else column(at) for at in columns), strict=True)
    return Board(down.names, across.names[0], across.heads(columns), beside, tuple(cells), caption)


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

    def side(name: str, ranks: Sequence[int], left_out: str) -> BoardSide:
        first, *others = [ranks.index(rank) for rank in (own, *partners[:16]) if rank in ranks] or [0]
        wanted = [first, *others[:3], *around(first, len(ranks)), *others]
        heads = [f"[{rank}]" if rank == own else f"{rank}" for rank in ranks]
        return BoardSide((name,), len(ranks), lambda at: Head((heads[at],)), wanted, left_out)

    def cell(row: int, column: int) -> Cell:
        sender, receiver = senders[row], receivers[column]
        size = count(sender, receiver)
        if sender == receiver:
            return Cell("stays" if size else "-", here=sender == own)
        return Cell(bytes_text(size), tone(sender)) if size else Cell("-")

    down, across = side("from", senders, "{:,} more ranks"), side("to", receivers, LEFT_OUT)
    return board_of(down, across, cell, room, max(3, min(10, room.height - 14)), f"   {caption}:")


def few_rows(count: int, row: Callable[[int], tuple[str, ...]], most: int) -> tuple[tuple[str, ...], ...]:
    """Rows of a table: of many the first and the last one."""
    return tuple(
        (f"{LEFT_OUT} {len(at):,} more", *[""] * (len(row(0)) - 1)) if isinstance(at, range) else row(at)
        for at in folded(count, [0, count - 1], most)
    )


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
