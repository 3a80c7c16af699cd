"""A sheet as HTML: its boards as SVG, its tables as tables. On a narrow screen each scrolls by itself.

>>> from axes.pictures.panels import Listing, Sheet
>>> html = page_of(Sheet("a mesh", "A mesh of two ranks.", (Listing(("axis", "size"), (("tp", "2"),)),)))
>>> "<td>tp</td>" in html, "<script" in html
(True, False)
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import zip_longest

from axes.pictures.in_svg import svg_of_panel
from axes.pictures.panels import Board, Listing, Moves, Panel, Remark, Sheet, color

# A notebook has rules of its own for tables, with stripes: those here have to win.
STYLE = """
  .axes-picture { font: 13px/1.45 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; margin: 0;
    padding: 12px; color: #24292f; background: #fff; text-align: left }
  .axes-picture figcaption { font-weight: 700; font-size: 15px; overflow-wrap: anywhere; white-space: pre-wrap }
  .axes-picture p { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap }
  .axes-picture .apart { margin-top: 12px }
  .axes-picture .wide { overflow-x: auto; margin: 12px 0 }
  .axes-picture svg { display: block; max-width: none !important }
  .axes-picture table { border-collapse: collapse; font: inherit; margin: 0; border: 0; color: inherit }
  .axes-picture .wide th, .axes-picture .wide td { padding: 2px 14px 2px 0; text-align: left; white-space: pre;
    vertical-align: top; background: none; border: 0 }
  .axes-picture .wide td:last-child { white-space: pre-wrap; min-width: 12em }
  .axes-picture th { color: #57606a; font-weight: 400 }
  .axes-picture .wide .number { text-align: right } .axes-picture tr { background: none !important }
  .axes-picture b { color: #fff; padding: 0 4px; border-radius: 3px }
  @media (prefers-color-scheme: dark) {
    .axes-picture { color: #e6edf3; background: #0d1117 } .axes-picture th { color: #9198a1 }
  }
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
  body {{ margin: 0; background: #fff }}
  @media (prefers-color-scheme: dark) {{ body {{ background: #0d1117 }} }}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def page_of(sheet: Sheet) -> str:
    """A page of its own."""
    return PAGE.format(title=escape(sheet.title), body=part_of_page(sheet))


def part_of_page(sheet: Sheet) -> str:
    """A part of a page, as a notebook shows it."""
    panels = "\n".join(_panel(panel, sheet) for panel in sheet.panels)
    head = f'<figure class="axes-picture">\n<style>{STYLE}</style>\n<figcaption>{escape(sheet.title)}</figcaption>'
    return f"{head}\n{panels}\n</figure>"


def _panel(panel: Panel, sheet: Sheet) -> str:
    match panel:
        case Board():
            title = panel.caption.strip() or sheet.title
            return f'<div class="wide">{svg_of_panel(panel, title, sheet.summary)}</div>'
        case Moves():
            return f'<div class="wide">{svg_of_panel(panel, sheet.title, panel.words)}</div>'
        case Listing():
            return f'<div class="wide">{_table(panel)}</div>'
        case Remark():
            kind = "" if panel.close else ' class="apart"'
            return f"<p{kind}>{escape(chr(10).join(panel.lines))}</p>"


def _table(listing: Listing) -> str:
    wide = max(map(len, (listing.head, *listing.rows)))

    def row(tag: str, texts: Sequence[str], tone: int | None = None) -> str:
        cells = []
        for at, text in enumerate(texts):
            kind = ' class="number"' if at in listing.right else ""
            span = f' colspan="{wide}"' if len(texts) == 1 < wide else ""
            shown = escape(text)
            if text and not at and tone is not None:
                shown = f'<b style="background:{color(tone)}">{shown}</b>'
            cells.append(f"<{tag}{kind}{span}>{shown}</{tag}>")
        return f"<tr>{''.join(cells)}</tr>"

    head = "\n".join(row("th", texts) for texts in ((listing.title,), listing.head) if any(texts))
    tones = listing.tones[: len(listing.rows)]
    body = "\n".join(row("td", texts, tone) for texts, tone in zip_longest(listing.rows, tones))
    return f"<table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"
