"""A sheet as lines of text: of ASCII, of a width, the same with colour and without.

>>> from axes.pictures.panels import Board, Cell, Head, Sheet
>>> columns = tuple(Head((str(at),)) for at in range(3))
>>> cells = (Cell("4", tone=0, mark="t"), Cell("5", here=True), Cell("6", wall=True))
>>> board = Board(("dp",), "tp", columns, (Head(("1",), note="node 1"),), (cells,))
>>> print(plain(lines_of(Sheet("three ranks", "", (board,)), 80)))
three ranks
<BLANKLINE>
dp  tp  0  1 | 2
1       4t[5]| 6   node 1
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

from axes.pictures.panels import Board, Cell, Listing, Panel, Remark, Sheet, widths_of
from axes.pictures.rank_text import LEFT_OUT

CODES = {"bold": "1", "dim": "2", "bold reverse": "1;7"}
"""How a terminal is told of each weight."""

TERMINAL_COLORS = (68, 130, 29, 133, 94, 168, 30, 95)
"""`COLORS` as near as the 256 colours come that terminals have."""


_NARROWEST = 30
"""Letters of the last column of a table; where there is less room for a long text, the whole row is broken."""


class Span(NamedTuple):
    """Text of a weight, which is one of `CODES`, and of a colour."""

    text: str
    weight: str = ""
    tone: int | None = None


Line = list[Span]


def plain(lines: Iterable[Line]) -> str:
    """Lines without weight and colour."""
    return "\n".join(map(_letters, lines))


def coded(lines: Iterable[Line], colors: bool = True) -> str:
    """Lines as a terminal takes them."""

    def span_text(span: Span) -> str:
        hue = [] if span.tone is None or not colors else [f"38;5;{TERMINAL_COLORS[span.tone % len(TERMINAL_COLORS)]}"]
        codes = ";".join([*filter(None, [CODES.get(span.weight)]), *hue])
        return f"\x1b[{codes}m{span.text}\x1b[0m" if codes else span.text

    return "\n".join("".join(map(span_text, line)) for line in lines)


def lines_of(sheet: Sheet, width: int) -> list[Line]:
    """The lines of a sheet, each of at most `width` columns."""
    found = title_lines(sheet, width)
    for panel in sheet.panels:
        lines = [_cut(line, width) for line in panel_lines(panel, width)]
        close = panel.title if isinstance(panel, Listing) else isinstance(panel, Remark) and panel.close
        apart = lines and not close
        found += [[], *lines] if apart else lines
    return found


def title_lines(sheet: Sheet, width: int) -> list[Line]:
    """The title of a sheet."""
    return [[Span(line, "bold")] for line in _wrapped(sheet.title, width)]


def panel_lines(panel: Panel, width: int) -> Iterable[Line]:
    """The lines of a panel. Text is wrapped at `width`, boards and tables are as wide as they are."""
    match panel:
        case Board():
            return _board(panel)
        case Listing():
            return _listing(panel, width)
        case Remark():
            return [[Span(text)] for line in panel.lines for text in _wrapped(line, width)]
    return []


def _wrapped(text: str, width: int) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _letters(line: Line) -> str:
    return "".join(span.text for span in line).rstrip()


def _cut(line: Line, width: int) -> Line:
    """A line without what doesn't fit: the spaces at its end, or what names that are too long lead to."""
    found, letters = list[Span](), len(_letters(line))
    fits = letters <= width
    left = letters if fits else width - len(LEFT_OUT)
    for span in line:
        found.append(span._replace(text=span.text[:left]))
        left -= len(found[-1].text)
    return found if fits else [*found, Span(LEFT_OUT)]


def _board(board: Board) -> Iterator[Line]:
    """Labels, places and notes as one table, in which a place has no room around it but its mark or brackets."""
    walls = [any(cell.wall for cell in column) for column in zip(*board.cells, strict=True)]
    first = [Span(f"{text}  ", "dim") for text in board.corner] + [Span(f"{board.across} ", "dim")]
    heads = (Span(f" {head.labels[0]} ", "dim") for head in board.columns)
    between = (Span("|" * wall) for wall in walls)
    rows = [[*first, *chain.from_iterable(zip(between, heads, strict=True)), Span("")]]
    for row, cells in zip(board.rows, board.cells, strict=True):
        beside = [Span(f"{text}  ", "dim") for text in row.labels] if not row.gap else [Span("")] * len(board.corner)
        places = [[Span("|" * cell.wall or " " * wall), _place(cell)] for cell, wall in zip(cells, walls, strict=True)]
        rows.append([*beside, Span(""), *chain.from_iterable(places), Span(f"  {row.note}", "dim")])
    right = range(len(first) + 1, len(rows[0]) - 1, 2)
    title, *lines = _aligned(rows, right)
    if board.caption:
        yield [Span(board.caption)]
    if _letters(title):
        yield title
    for row, line in zip(board.rows, lines, strict=True):
        yield [Span(f"{LEFT_OUT} {row.labels[0]}", "dim")] if row.gap else line


def _place(cell: Cell) -> Span:
    if cell.here:
        return Span(f"[{cell.text}]", "bold reverse")
    return Span(f" {cell.text}{cell.mark or ' '}", "" if cell.tone is None else "bold", cell.tone)


def _listing(listing: Listing, width: int) -> Iterator[Line]:
    """The rows, under a title if there is one."""
    rows = [[Span(f"{text}  ", "dim") for text in listing.head]] if listing.head else []
    rows += [
        [Span(f"{first}  ", "" if tone is None else "bold", tone), *(Span(f"{text}  ") for text in others)]
        for (first, *others), tone in zip_longest(listing.rows, listing.tones[: len(listing.rows)])
    ]
    aligned = _aligned([row for row in rows if len(row) > 1], listing.right)
    if listing.title:
        yield [Span(listing.title)]
    for row in rows:
        line = next(aligned) if len(row) > 1 else row
        yield from _broken([Span("  "), *line] if listing.title else line, width)


def _broken(line: Line, width: int) -> list[Line]:
    """The line, with its last text broken between words where that is too long; the rest stands under its beginning."""
    *before, last = line
    start, text = sum(len(span.text) for span in before), last.text.rstrip()
    if start + len(text) > width < start + _NARROWEST:
        return [
            [Span(part)]
            for part in textwrap.wrap(_letters(line), width, subsequent_indent=" " * 6, break_on_hyphens=False)
        ]
    parts = textwrap.wrap(text, max(1, width - start), break_on_hyphens=False) or [""]
    below = [[Span(" " * start), last._replace(text=part)] for part in parts[1:]]
    return [[*before, last._replace(text=parts[0])], *below]


def _aligned(rows: Sequence[Line], right: Sequence[int]) -> Iterator[Line]:
    """The rows with each cell as wide as its column; numbers stand on its right."""
    widths = widths_of([[span.text for span in row] for row in rows])
    forms = [f"{'>' if at in right else '<'}{wide}" for at, wide in enumerate(widths)]
    for row in rows:
        yield [span._replace(text=f"{span.text:{form}}") for span, form in zip(row, forms, strict=True)]
