"""Boards of any size in the room that there is: what is far from the rank that looks is left out.

>>> from axes.show.in_text import panel_lines, plain
>>> def side(name: str, own: int, *left_out: str) -> BoardSide:
...     return BoardSide((name,), 1000, lambda at: Head((f"{at}",)), (own, 0, 999), *left_out)
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
from itertools import chain, islice, pairwise

from axes.algebra.plan import bytes_text
from axes.show.in_text import panel_lines, plain
from axes.show.panels import Board, Cell, Head, Room
from axes.show.rank_text import LEFT_OUT

LEAST = 3
"""Columns that are shown of a board that has as many."""


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


def board_of(
    down: BoardSide, across: BoardSide, cell: Callable[[int, int], Cell], room: Room, lines: int, caption: str = ""
) -> Board:
    """A board of so many lines, with as many columns as there is room for."""
    rows = folded(down.count, down.wanted, lines)
    wanted = [*across.wanted]

    def made(columns: Sequence[int | range]) -> Board:
        cells = tuple(
            tuple(
                Cell("" if isinstance(row, range) else LEFT_OUT)
                if isinstance(row, range) or isinstance(column, range)
                else cell(row, column)
                for column in columns
            )
            for row in rows
        )
        return Board(down.names, across.names[0], across.heads(columns), down.heads(rows), cells, caption)

    few = made([*islice(dict.fromkeys(wanted), LEAST)])  # others are about as wide
    widest = max(len(each.text) for each in chain(*few.cells))
    places = LEAST + max(0, (room.width - _width(few)) // (widest + 2))
    while _width(found := made(folded(across.count, wanted, places))) > room.width and places > LEAST:
        places -= 1
    return found


def _width(board: Board) -> int:
    return max(map(len, plain(panel_lines(board, 0)).split("\n")))


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
        first = [ranks.index(rank) for rank in (own, *partners[:16]) if rank in ranks] or [0]
        near = [at for at in (first[0] + 1, first[0] - 1) if 0 <= at < len(ranks)]
        wanted = [*first[:4], 0, len(ranks) - 1, *first[4:], *near]
        heads = [f"[{rank}]" if rank == own else f"{rank}" for rank in ranks]
        return BoardSide((name,), len(ranks), lambda at: Head((heads[at],)), wanted, left_out)

    def cell(row: int, column: int) -> Cell:
        sender, receiver = senders[row], receivers[column]
        size = count(sender, receiver)
        if sender == receiver:
            return Cell("stays" if size else "-", here=sender == own)
        return Cell(bytes_text(size), tone(sender)) if size else Cell("-")

    down, across = side("from", senders, "{:,} more ranks"), side("to", receivers, LEFT_OUT)
    return board_of(down, across, cell, room, max(LEAST, min(10, room.height - 14)), f"   {caption}:")


def few_rows(count: int, row: Callable[[int], tuple[str, ...]], most: int) -> tuple[tuple[str, ...], ...]:
    """Rows of a table: of many the first and the last one."""
    return tuple(
        (f"{LEFT_OUT} {len(at):,} more", *[""] * (len(row(0)) - 1)) if isinstance(at, range) else row(at)
        for at in folded(count, [0, count - 1], most)
    )


def folded(count: int, wanted: Iterable[int], room: int) -> list[int | range]:
    """Which of `count` things are shown in `room` places: their numbers, and a range for each that is left out.

    The first of `wanted` is always shown, the others in their order of importance, then the first things.

    >>> folded(4, [], 5), folded(1000, [500, 0, 999], 8)
    ([0, 1, 2, 3], [0, 1, 2, 3, range(4, 500), 500, range(501, 999), 999])
    """
    if count <= room:
        return list(range(count))
    shown: set[int] = set()
    for at in chain(wanted, range(min(count, room))):
        more = shown | {at}
        if not shown or len(_with_gaps(count, more)) <= room:
            shown = more
    return _with_gaps(count, shown)


def _with_gaps(count: int, shown: Iterable[int]) -> list[int | range]:
    found: list[int | range] = []
    for before, after in pairwise((-1, *sorted(shown), count)):
        between = range(before + 1, after)
        found += [*between, after] if len(between) < 2 else [between, after]
    return found[:-1]
