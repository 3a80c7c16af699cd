"""A sheet as SVG: for light and dark, without scripts and without anything from outside.

>>> from axes.show.panels import Board, Cell, Head, Sheet
>>> board = Board(("dp",), "tp", (Head(("0",)), Head(("1",))), (Head(("0",)),), ((Cell("0"), Cell("1")),))
>>> print(svg_of(Sheet("two ranks", "A mesh of two ranks.", (board,)))[:4])
<svg
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from axes.show.in_text import color
from axes.show.panels import Board, Cell, Drawing, Head, Listing, Panel, Remark, Sheet

LETTER, LINE, CELL, GAP, EDGE = 7.25, 18, 24, 14, 10
"""Pixels: a letter's width, a line of text, a cell's height, between panels, around it all."""

WIDEST = 96
"""Letters of a line of text before it is wrapped."""

STYLE = """
  .axes-sheet { background: #fff }
  .axes-sheet text { font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #24292f }
  .axes-sheet .title { font-weight: 700; font-size: 14px } .axes-sheet .quiet { fill: #57606a }
  .axes-sheet .mid { text-anchor: middle } .axes-sheet .end { text-anchor: end }
  .axes-sheet .on { fill: #fff } .axes-sheet .bold { font-weight: 700 }
  .axes-sheet .place { fill: #eff2f5; stroke: #fff } .axes-sheet .seen { fill: #24292f; stroke: #fff }
  .axes-sheet .toned { stroke: #fff } .axes-sheet .ring { fill: none; stroke: #24292f; stroke-width: 2.5 }
  .axes-sheet .wall { stroke: #24292f; stroke-width: 2.5 }
  @media (prefers-color-scheme: dark) {
    .axes-sheet { background: #0d1117 }
    .axes-sheet text { fill: #e6edf3 } .axes-sheet .quiet { fill: #9198a1 } .axes-sheet .on { fill: #fff }
    .axes-sheet .place { fill: #21262d; stroke: #0d1117 } .axes-sheet .toned { stroke: #0d1117 }
    .axes-sheet .seen { fill: #e6edf3; stroke: #0d1117 } .axes-sheet .seen + text { fill: #0d1117 }
    .axes-sheet .ring { stroke: #e6edf3 } .axes-sheet .wall { stroke: #e6edf3 }
  }
"""
"""Every rule is of a class of its own: in a page an SVG's rules are those of the whole page."""


@dataclass(frozen=True)
class Elements:
    """A panel that is drawn: its elements from the corner 0, 0 on, and how large it is."""

    body: str
    width: float
    height: float


def svg_of(sheet: Sheet) -> str:
    """A whole sheet as one SVG."""
    title = _lines([sheet.title], "title")
    pieces = [title, *(drawn_panel(panel) for panel in sheet.panels)]
    placed, y = [], float(EDGE)
    for at, piece in enumerate(pieces):
        placed.append(f'<g transform="translate({EDGE} {y:g})">{piece.body}</g>')
        following = sheet.panels[at] if at < len(sheet.panels) else None
        y += piece.height + (0 if isinstance(following, Remark) and following.close else GAP)
    width = max(piece.width for piece in pieces) + 2 * EDGE
    return document("\n".join(placed), width, y + EDGE - GAP, sheet.title, sheet.summary)


def svg_of_panel(panel: Board | Drawing, title: str, summary: str) -> str:
    """A board or a drawing as an SVG of its own."""
    piece = drawn_panel(panel)
    body = f'<g transform="translate(2 2)">{piece.body}</g>'
    return document(body, piece.width + 4, piece.height + 4, title, summary)


def document(body: str, width: float, height: float, title: str, summary: str) -> str:
    """The elements of an SVG with its head."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="axes-sheet" {size} role="img">'
    said = f"<title>{escape(title)}</title><desc>{escape(summary)}</desc>"
    return f"{head}\n{said}\n<style>{STYLE}</style>\n{body}\n</svg>\n"


def drawn_panel(panel: Panel) -> Elements:
    """A panel as the elements of an SVG."""
    match panel:
        case Board():
            return _board(panel)
        case Listing():
            return _listing(panel)
        case Remark():
            return _lines(panel.lines, "")
        case Drawing():
            return _drawing(panel)


def _lines(lines: Sequence[str], kind: str) -> Elements:
    wrapped = [part for line in lines for part in textwrap.wrap(line, WIDEST, subsequent_indent="  ") or [""]]
    body = "".join(_text(0, LINE * at + 13, line, kind) for at, line in enumerate(wrapped))
    letter = LETTER * 14 / 12 if kind == "title" else LETTER
    return Elements(body, max(map(len, wrapped), default=0) * letter, LINE * len(wrapped) + (4 if kind else 0))


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    shown = escape(text).replace("  ", "\u00a0 ")
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.5g}" y="{y:.5g}">{shown}</text>' if text else ""


def _drawing(panel: Drawing) -> Elements:
    """An SVG within the SVG."""
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', panel.svg)
    assert found is not None, "a drawing says how large it is"
    width, height = map(float, found.groups())
    return Elements(panel.svg.replace("<svg ", f'<svg height="{height:g}" ', 1), width, height)


# --- boards ---------------------------------------------------------------------------------------


def _board(board: Board) -> Elements:
    labels = [max(map(len, column)) for column in zip(board.corner, *_labels(board.rows), strict=True)]
    lefts = [0.0]
    for longest in labels:
        lefts.append(lefts[-1] + longest * LETTER + (12 if longest else 0))
    left = lefts[-1] + len(board.across) * LETTER + (8 if board.across else 0)
    widths, heights = _extents(board)
    top = CELL * bool(board.caption) + (CELL if any(head.labels[0] for head in board.columns) else 0)
    parts = [_text(0, 15, board.caption.strip(), "bold")] if board.caption else []
    parts += [_text(x, top - 8, name, "quiet") for x, name in zip(lefts, (*board.corner, board.across), strict=True)]
    x = left
    for head, width in zip(board.columns, widths, strict=True):
        parts.append(_text(x + width / 2, top - 8, head.labels[0], "quiet mid"))
        x += width
    y = float(top)
    for (head, cells, note), height in zip(board.lines, heights, strict=True):
        if head.gap:
            parts.append(_text(left, y + 15, f"\u22ee {head.labels[0]}", "quiet"))
            y += height
            continue
        middle = y + height / 2 + 4
        parts += [_text(at, middle, label, "quiet") for at, label in zip(lefts, head.labels, strict=False)]
        parts.append(_row(cells, widths, left, y, height))
        parts.append(_text(left + sum(widths) + 10, middle, note, "quiet"))
        y += height
    notes = max((len(note) * LETTER + 12 for note in board.notes), default=0)
    gaps = max((len(head.labels[0]) * LETTER + 20 for head in board.rows if head.gap), default=0)
    width = max(left + max(sum(widths) + notes, gaps), len(board.caption) * LETTER) + 2
    return Elements("".join(filter(None, parts)), width, y + 2)


def _labels(heads: Sequence[Head]) -> list[tuple[str, ...]]:
    return [head.labels for head in heads if not head.gap]


def _extents(board: Board) -> tuple[list[float], list[float]]:
    """How wide the columns are and how high the rows: by their extents, but with room for what stands in them."""
    least = [
        max(len(head.labels[0]), *(len(_said(row[at])) for row in board.cells)) * LETTER + 14
        for at, head in enumerate(board.columns)
    ]
    across = sum(head.extent for head in board.columns if not head.gap) or 1
    total = max(240.0 if len({head.extent for head in board.columns}) > 1 else 96.0, sum(least))
    widths = [
        short if head.gap else max(short, total * head.extent / across)
        for short, head in zip(least, board.columns, strict=True)
    ]
    shown = [head for head in board.rows if not head.gap]
    down = sum(head.extent for head in shown) or 1
    uneven = len({head.extent for head in shown}) > 1
    heights = [
        float(CELL) if head.gap or not uneven else max(float(CELL), 1.5 * CELL * len(shown) * head.extent / down)
        for head in board.rows
    ]
    return widths, heights


def _said(cell: Cell) -> str:
    return f"{cell.text} {cell.mark}" if cell.mark else cell.text


def _row(cells: Sequence[Cell], widths: Sequence[float], left: float, y: float, height: float) -> str:
    parts, over = [], []
    x = left
    for cell, width in zip(cells, widths, strict=True):
        box = f'x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}"'
        seen = cell.here and cell.tone is None
        kind = "seen" if seen else "place" if cell.tone is None else "toned"
        fill = f' style="fill:{color(cell.tone)}"' if cell.tone is not None else ""
        parts.append(f'<rect class="{kind}" {box}{fill}/>')
        bold = " bold" if cell.here else ""
        parts.append(
            _text(x + width / 2, y + height / 2 + 4, _said(cell), f"mid{bold}{' on' if kind != 'place' else ''}")
        )
        if cell.here and not seen:
            inner = f'x="{x + 2:.5g}" y="{y + 2:.5g}" width="{width - 4:.5g}" height="{height - 4:.5g}"'
            over.append(f'<rect class="ring" {inner}/>')
        if cell.wall:
            over.append(f'<line class="wall" x1="{x:.5g}" y1="{y:.5g}" x2="{x:.5g}" y2="{y + height:.5g}"/>')
        x += width
    return "".join((*parts, *over))


# --- tables ---------------------------------------------------------------------------------------


def _listing(listing: Listing) -> Elements:
    widths = [max(map(len, column)) * LETTER for column in zip(listing.head, *listing.rows, strict=True)]
    starts = [sum(widths[:at]) + 14 * at for at in range(len(widths))]
    parts = []
    for row, cells in enumerate((listing.head, *listing.rows)):
        tone = listing.tones[row - 1] if 0 < row <= len(listing.tones) else None
        y = LINE * row + 13
        for at, (text, start, wide) in enumerate(zip(cells, starts, widths, strict=True)):
            end = at in listing.right
            kind = " ".join(filter(None, ("quiet" if row == 0 else "", "end" if end else "")))
            if at == 0 and tone is not None and text:
                parts.append(_chip(start, y, text, tone))
            else:
                parts.append(_text(start + wide if end else start, y, text, kind))
    return Elements("".join(filter(None, parts)), starts[-1] + widths[-1], LINE * (len(listing.rows) + 1))


def _chip(x: float, y: float, text: str, tone: int) -> str:
    """A letter on its colour."""
    width = len(text) * LETTER + 6
    box = f'<rect x="{x:g}" y="{y - 12:g}" width="{width:g}" height="16" rx="3" fill="{color(tone)}"/>'
    return box + _text(x + 3, y, text, "on bold")
