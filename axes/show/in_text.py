"""A sheet as lines of text: of ASCII, of a width, the same with colour and without.

>>> from axes.show.panels import Board, Cell, Head, Listing, Sheet
>>> columns = tuple(Head((str(at),)) for at in range(3))
>>> cells = (Cell("4", tone=0, mark="t"), Cell("5", here=True), Cell("6", wall=True))
>>> board = Board(("dp",), "tp", columns, (Head(("1",)),), (cells,), ("node 1",))
>>> print(plain(lines_of(Sheet("three ranks", "", (board,)), 80)))
three ranks
<BLANKLINE>
dp  tp  0  1 | 2
1       4t[5]| 6   node 1
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from axes.show.panels import COLORS, Board, Cell, Drawing, Listing, Panel, Remark, Sheet
from axes.show.rank_text import LEFT_OUT


class Span(NamedTuple):
    """Text in a style, as rich names it."""

    text: str
    style: str = ""


Line = list[Span]

HEAD = "bold"
QUIET = "dim"
HERE = "bold reverse"


def plain(lines: Iterable[Line]) -> str:
    """Lines without their styles."""
    return "\n".join("".join(span.text for span in line) for line in lines)


def lines_of(sheet: Sheet, width: int) -> list[Line]:
    """The lines of a sheet, each of at most `width` columns."""
    found: list[Line] = [[Span(line, HEAD)] for line in _wrapped(sheet.title, width)]
    for panel in sheet.panels:
        lines = [_cut(_stripped(line), width) for line in _panel(panel, width)]
        apart = bool(lines) and not (isinstance(panel, Remark) and panel.close)
        found += [[], *lines] if apart else lines
    return found


def _panel(panel: Panel, width: int) -> Iterator[Line]:
    match panel:
        case Board():
            yield from _board(panel)
        case Listing():
            yield from _listing(panel)
        case Remark():
            yield from ([Span(text)] for line in panel.lines for text in _wrapped(line, width))
        case Drawing():
            return


def _wrapped(text: str, width: int) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _stripped(line: Line) -> Line:
    """A line without the spaces at its end."""
    found = list(line)
    while found:
        last = found.pop()
        if last.text.rstrip():
            return [*found, Span(last.text.rstrip(), last.style)]
    return found


def _cut(line: Line, width: int) -> Line:
    """A line without what doesn't fit, which only names that are too long lead to."""
    found: Line = []
    left = width - sum(len(span.text) for span in line)
    if left >= 0:
        return line
    left = width - len(LEFT_OUT)
    for span in line:
        found.append(Span(span.text[:left], span.style))
        left -= len(found[-1].text)
    return [*found, Span(LEFT_OUT)]


def color(tone: int) -> str:
    """A colour by its number."""
    return COLORS[tone % len(COLORS)]


def _board(board: Board) -> Iterator[Line]:
    if board.caption:
        yield [Span(board.caption)]
    labels = _widths([board.corner, *(head.labels for head in board.rows if not head.gap)])
    walls = [any(row[at].wall for row in board.cells) for at in range(len(board.columns))]
    widths = [
        max(len(text) for text in (*head.labels, *(row[at].text for row in board.cells)))
        for at, head in enumerate(board.columns)
    ]
    title: Line = [Span(_padded(board.corner, labels), QUIET), Span(f"  {board.across} ", QUIET)]
    indent = sum(len(span.text) for span in title)
    for at, (head, wide) in enumerate(zip(board.columns, widths, strict=True)):
        title.append(Span(_wall(walls[at], walls[at]) + f" {head.labels[0]:>{wide}} ", QUIET))
    if any(span.text.strip() for span in title):
        yield title
    for head, cells, note in board.lines:
        if head.gap:
            yield [Span(f"{LEFT_OUT} {head.labels[0]}", QUIET)]
            continue
        label = _padded(head.labels, labels)
        line = [Span(label, QUIET), Span(" " * (indent - len(label)))]
        for at, (cell, wide) in enumerate(zip(cells, widths, strict=True)):
            line += [Span(_wall(walls[at], cell.wall)), _cell(cell, wide)]
        yield [*line, Span(f"  {note}", QUIET)]


def _wall(in_column: bool, here: bool) -> str:
    return "" if not in_column else "|" if here else " "


def _cell(cell: Cell, wide: int) -> Span:
    text = f"[{cell.text}]" if cell.here else f"{cell.text}{cell.mark or ' '}"
    style = HERE if cell.here else "" if cell.tone is None else f"bold {color(cell.tone)}"
    return Span(f"{text:>{wide + 2}}", style)


def _listing(listing: Listing) -> Iterator[Line]:
    widths = _widths([listing.head, *listing.rows])
    yield [Span(_padded(listing.head, widths, listing.right), QUIET)]
    for row, tone in zip_longest(listing.rows, listing.tones[: len(listing.rows)]):
        text = _padded(row, widths, listing.right)
        first = widths[0]
        yield [Span(text[:first], "" if tone is None else f"bold {color(tone)}"), Span(text[first:])]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _padded(texts: Sequence[str], widths: Sequence[int], right: Sequence[int] = ()) -> str:
    cells = (f"{text:{'>' if at in right else '<'}{wide}}" for at, (text, wide) in enumerate(zip(texts, widths)))  # noqa: B905
    return "  ".join(cells)
