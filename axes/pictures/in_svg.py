"""A sheet as SVG: for light and dark, without scripts and without anything from outside.

>>> from axes.pictures.panels import Board, Cell, Head, Sheet
>>> board = Board(("dp",), "tp", (Head(("0",)), Head(("1",))), (Head(("0",)),), ((Cell("0"), Cell("1")),))
>>> print(svg_of(Sheet("two ranks", "A mesh of two ranks.", (board,)))[:4])
<svg
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import accumulate
from typing import NamedTuple

from axes.pictures.in_text import Line, lines_of, panel_lines, plain, title_lines
from axes.pictures.panels import Board, Cell, Frames, Head, Moves, Panel, Patch, Remark, Sheet, color, widths_of

LETTER, LINE, CELL, GAP, EDGE = 7.25, 18, 24, 14, 10
"""Pixels: a letter's width, a line of text, a cell's height, between panels, around it all."""

SIDE, STRIP, APART, CAPTION, HEADS, STEP = 84, 20, 30, 190, 34, 54
"""Pixels of moves: a tensor's side, one with a single dim, between ranks, the captions, the heading, the arrows."""

WIDEST = 96
"""Letters of a line of text before it is wrapped."""

STYLE = """
  .axes-sheet { background: #fff }
  .axes-sheet text { font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #24292f }
  .axes-sheet .title text { font-weight: 700; font-size: 14px }
  .axes-sheet .dim { fill: #57606a } .axes-sheet .small { font-size: 11px; fill: #57606a }
  .axes-sheet .mid { text-anchor: middle } .axes-sheet .end { text-anchor: end }
  .axes-sheet .on { fill: #fff } .axes-sheet .bold { font-weight: 700 } .axes-sheet .joint { font-size: 17px }
  .axes-sheet .place { fill: #eff2f5; stroke: #fff } .axes-sheet .seen { fill: #24292f; stroke: #fff }
  .axes-sheet .toned { stroke: #fff } .axes-sheet .ring { fill: none; stroke: #24292f; stroke-width: 2.5 }
  .axes-sheet .wall { stroke: #24292f; stroke-width: 2.5 }
  .axes-sheet .whole { fill: none; stroke: #8c959f; stroke-dasharray: 3 3 }
  @media (prefers-color-scheme: dark) {
    .axes-sheet { background: #0d1117 } .axes-sheet text { fill: #e6edf3 }
    .axes-sheet .dim, .axes-sheet .small { fill: #9198a1 } .axes-sheet .on { fill: #fff }
    .axes-sheet .place { fill: #21262d; stroke: #0d1117 } .axes-sheet .toned { stroke: #0d1117 }
    .axes-sheet .seen { fill: #e6edf3; stroke: #0d1117 } .axes-sheet .seen + text { fill: #0d1117 }
    .axes-sheet .ring { stroke: #e6edf3 } .axes-sheet .wall { stroke: #e6edf3 }
  }
"""
"""Every rule is of a class of its own: in a page an SVG's rules are those of the whole page."""


class Elements(NamedTuple):
    """A panel that is drawn: its elements from the corner 0, 0 on, and how large it is."""

    body: str
    width: float
    height: float


def svg_of(sheet: Sheet) -> str:
    """A whole sheet as one SVG."""
    title = _lines(title_lines(sheet, WIDEST * 12 // 14), 14 / 12)
    first = Elements(f'<g class="title">{title.body}</g>', title.width, title.height + 4)
    pieces = [first, *map(_drawn, sheet.panels)]
    gaps = [0 if isinstance(panel, Remark) and panel.close else GAP for panel in sheet.panels]
    steps = (piece.height + gap for piece, gap in zip(pieces, [*gaps, 0], strict=True))
    *tops, end = accumulate(steps, initial=float(EDGE))
    placed = (f'<g transform="translate({EDGE} {y:g})">{piece.body}</g>' for y, piece in zip(tops, pieces, strict=True))
    width = max(piece.width for piece in pieces) + 2 * EDGE
    return _document("\n".join(placed), width, end + EDGE, sheet.title, sheet.summary or plain(lines_of(sheet, WIDEST)))


def svg_of_panel(panel: Board | Moves, title: str, summary: str) -> str:
    """A board or moves as an SVG of its own."""
    piece = _drawn(panel)
    body = f'<g transform="translate(2 2)">{piece.body}</g>'
    return _document(body, piece.width + 4, piece.height + 4, title, summary)


def _document(body: str, width: float, height: float, title: str, summary: str) -> str:
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="axes-sheet" {size} role="img">'
    said = f"<title>{escape(title)}</title><desc>{escape(summary)}</desc>"
    return _NO_XML.sub("\ufffd", f"{head}\n{said}\n<style>{STYLE}</style>\n{body}\n</svg>\n")


_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")
"""Characters that a name may have and a document of XML may not."""


def _drawn(panel: Panel) -> Elements:
    match panel:
        case Board():
            return _board(panel)
        case Moves():
            return _moves(panel)
        case _:
            return _lines(list(panel_lines(panel, WIDEST)))


def _lines(lines: Sequence[Line], scale: float = 1) -> Elements:
    """Lines of text. Where one has a colour, it stands on it."""
    parts, width = [], 0.0
    for at, line in enumerate(lines):
        x, y = 0.0, LINE * at + 13
        for text, weight, tone in line:
            if tone is not None and text.strip():
                box = f'x="{x:g}" y="{y - 12}" width="{len(text.rstrip()) * LETTER + 6:g}" height="16" rx="3"'
                parts.append(f'<rect {box} fill="{color(tone)}"/>{_text(x + 3, y, text, "on bold")}')
            else:
                parts.append(_text(x, y, text, weight))
            x += len(text) * LETTER * scale
        width = max(width, x)
    return Elements("".join(parts), width, LINE * len(lines))


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    shown = re.sub("^ | (?= )", "\u00a0", escape(text.rstrip()))
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.5g}" y="{y:.5g}">{shown}</text>' if shown else ""


def _box(kind: str, x: float, y: float, width: float, height: float, fill: str = "") -> str:
    style = f' style="fill:{fill}"' if fill else ""
    return f'<rect class="{kind}" x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}"{style}/>'


# --- boards ---------------------------------------------------------------------------------------


def _board(board: Board) -> Elements:
    shown = [head for head in board.rows if not head.gap]
    labels = widths_of([board.corner, *(head.labels for head in shown)])
    lefts = [*accumulate((count * LETTER + 12 if count else 0 for count in labels), initial=0.0)]
    left = lefts[-1] + (len(board.across) * LETTER + 8 if board.across else 0)
    heads = [head.labels[0] for head in board.columns]
    top = CELL * (bool(board.caption) + any((*board.corner, board.across, *heads)))
    texts = [[f"{cell.text} {cell.mark}".strip() for cell in row] for row in board.cells]
    letters = [count * LETTER + 14 for count in widths_of([heads, *texts])]
    wide = max(*letters, 96 / len(letters))
    least = [own if head.gap else wide for own, head in zip(letters, board.columns, strict=True)]
    widths = _shares(board.columns, least, 240)
    heights = _shares(board.rows, [CELL] * len(board.rows), 1.5 * CELL * len(shown))
    parts = [_text(0, 15, board.caption.strip(), "bold")]
    parts += [_text(x, top - 8, name, "dim") for x, name in zip(lefts, (*board.corner, board.across), strict=True)]
    for head, start, width in zip(board.columns, accumulate(widths, initial=left), widths, strict=False):
        parts.append(_text(start + width / 2, top - 8, head.labels[0], "dim mid"))
    end, y = left + sum(widths), float(top)
    ends = [end, len(board.caption) * LETTER]
    for head, cells, height in zip(board.rows, board.cells, heights, strict=True):
        middle = y + height / 2 + 4
        if head.gap:
            parts.append(_text(left, middle - 1, f"\u22ee {head.labels[0]}", "dim"))
        else:
            parts += [_text(at, middle, label, "dim") for at, label in zip(lefts, head.labels, strict=False)]
            parts += [*_row(cells, widths, left, y, height), _text(end + 10, middle, head.note, "dim")]
        ends.append(left + len(head.labels[0]) * LETTER + 20 if head.gap else end + len(head.note) * LETTER + 12)
        y += height
    return Elements("".join(parts), max(ends) + 2, y + 2)


def _shares(heads: Sequence[Head], least: Sequence[float], spread: float) -> list[float]:
    """How large rows or columns are: by their extents where these differ, but with room for what stands in them."""
    extents = [0 if head.gap else head.extent for head in heads]
    share = spread / (sum(extents) or 1) if len({*extents} - {0}) > 1 else 0
    return [max(short, share * extent) for short, extent in zip(least, extents, strict=True)]


def _row(cells: Sequence[Cell], widths: Sequence[float], left: float, y: float, height: float) -> list[str]:
    parts = []
    for cell, x, width in zip(cells, accumulate(widths, initial=left), widths, strict=False):
        kind = "toned" if cell.tone is not None else "seen" if cell.here else "place"
        parts.append(_box(kind, x, y, width, height, "" if cell.tone is None else color(cell.tone)))
        style = f"mid{' bold' * cell.here}{' on' * (kind != 'place')}"
        parts.append(_text(x + width / 2, y + height / 2 + 4, f"{cell.text} {cell.mark}", style))
        if cell.here and kind == "toned":
            parts.append(_box("ring", x + 2, y + 2, width - 4, height - 4))
        if cell.wall:
            parts.append(f'<line class="wall" x1="{x:.5g}" y1="{y:.5g}" x2="{x:.5g}" y2="{y + height:.5g}"/>')
    return parts


# --- moves ----------------------------------------------------------------------------------------


def _moves(moves: Moves) -> Elements:
    left = max([CAPTION, *(len(row.caption) * LETTER + 48 for row in moves.rows)])
    lefts = [left + at * (SIDE + APART) for at in range(len(moves.heads))]
    striped = dict.fromkeys(ranks for row in moves.rows for held in row.patches for *_, ranks in held if len(ranks) > 1)
    parts = [f"<defs>{''.join(map(_stripes, striped))}</defs>"] if striped else []
    for x, (rank, where) in zip(lefts, moves.heads, strict=True):
        parts += [_text(x + SIDE / 2, 13, f"rank {rank}", "mid"), _text(x + SIDE / 2, 26, where, "mid small")]
    y = float(HEADS - APART)
    for row in moves.rows:
        parts += _arrows(row, lefts, y)
        y += STEP if row.step else APART
        height = SIDE if len(row.ways) > 1 else STRIP
        parts += _frames(row, [rank for rank, _ in moves.heads], lefts, y, height)
        y += height
    return Elements("".join(parts), lefts[-1] + SIDE + 2, y + 2)


def _arrows(row: Frames, lefts: Sequence[float], y: float) -> Iterator[str]:
    """What happened before a row."""
    for below, kind, text in zip((24, 39), ("", "small"), row.step, strict=False):
        yield _text(0, y + below, text, kind)
    for source, target in row.arrows:
        lean = SIDE / 2 + 5 * (target - source)
        x1, x2, y2 = lefts[source] + lean, lefts[target] + SIDE - lean, y + STEP - 6
        ends = f'x1="{x1:g}" y1="{y + 5:g}" x2="{x2:g}" y2="{y2:g}"'
        yield f'<line {ends} stroke="{color(source)}" stroke-width="1.4"/>'
        turn = math.degrees(math.atan2(y2 - y - 5, x2 - x1))
        turned = f"translate({x2:g} {y2:g}) rotate({turn:.4g})"
        yield f'<path d="M-5 -3L1 0L-5 3z" transform="{turned}" fill="{color(source)}"/>'


def _frames(row: Frames, names: Sequence[str], lefts: Sequence[float], y: float, height: float) -> Iterator[str]:
    middle = y + height / 2 + 4
    yield _text(0, middle, row.caption)
    for at, way in enumerate(row.ways):
        yield _text(lefts[0] - 14, middle + 15 * (at - (len(row.ways) - 1) / 2), way, "small end")
    for x, held, joint in zip(lefts, row.patches, row.joints, strict=True):
        yield from (_patch(patch, names, x, y, height) for patch in held)
        yield _box("whole", x, y, SIDE, height)
        yield _text(x - APART / 2, middle + 2, joint, "mid joint")


def _patch(patch: Patch, names: Sequence[str], x: float, y: float, height: float) -> str:
    down, across, ranks = patch
    (top, bottom), (start, stop) = [height * at for at in down], [SIDE * at for at in across]
    label = "+".join(names[rank] for rank in ranks)
    fill = color(ranks[0]) if len(ranks) == 1 else f"url(#{_name(ranks)})"
    box = _box("tile", x + start + 0.7, y + top + 0.7, stop - start - 1.4, bottom - top - 1.4, fill)
    fits = stop - start >= 8 * len(label) + 4 and bottom - top >= 15
    return box + (_text(x + (start + stop) / 2, y + (top + bottom) / 2 + 4, label, "mid on") if fits else "")


def _stripes(ranks: Sequence[int]) -> str:
    """A pattern in the colours of these ranks. Its name says them: it means the same in every picture of a page."""
    size = 7 * len(ranks)
    stripes = "".join(
        f'<rect x="{7 * at}" width="7" height="{size}" fill="{color(rank)}"/>' for at, rank in enumerate(ranks)
    )
    units = f'width="{size}" height="{size}" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"'
    return f'<pattern id="{_name(ranks)}" {units}>{stripes}</pattern>'


def _name(ranks: Iterable[int]) -> str:
    return "of-" + "-".join(map(str, ranks))
