"""What `explain` returns: sections of rows, that are printed, drawn, or read by a program.

>>> found = Explanation("dp tp", (Section("groups", (("dp", "4 ranks"), ("tp", "2 ranks"))),), {"kind": "mesh"})
>>> print(found)
dp tp
groups
  dp  4 ranks
  tp  2 ranks
>>> found.json()
{'schema': 1, 'kind': 'mesh'}

Text is at most 80 columns wide and ASCII where names are. HTML and SVG know light and dark, load nothing from
elsewhere and run no script.
"""

from __future__ import annotations

import copy
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

SCHEMA = 1
"""The version of what `Explanation.json` returns."""

WIDTH = 80
_NARROWEST = 30
_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}


@dataclass(frozen=True)
class Section:
    """Rows under a title. Cells of a row are aligned with those above; a row of one cell is a line of its own."""

    title: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, repr=False)
class Explanation:
    """An explanation. `str()` and `print()` show it, a notebook shows `html()`.

    heading: what is explained. facts: the same as data, for `json`. drawing: makes the picture of what moves, where
    there is one.
    """

    heading: str
    sections: tuple[Section, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)
    drawing: Callable[[], str] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        return str(self)

    def json(self) -> dict[str, Any]:
        """The facts as data that `json.dumps` takes; `"schema"` is the version of their form.

        docs/explain.md says what each fact is. A name may be added to a version, none changes or goes.
        """
        return {"schema": SCHEMA, **copy.deepcopy(dict(self.facts))}

    def html(self) -> str:
        """A page of its own, as text."""
        head = (
            f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta name="color-scheme" content="light dark">'
            f"<title>{escape(self.heading)}</title><style>{_PAGE_STYLE}</style>"
        )
        return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{self._repr_html_()}</body>\n</html>\n'

    def svg(self) -> str:
        """A picture: what moves from rank to rank where that can be drawn, else the text."""
        return self.drawing() if self.drawing is not None else _text_as_svg(self.heading, _lines(self))

    def _repr_html_(self) -> str:
        parts = [f"<style>{_STYLE}</style>", f"<h2><code>{escape(self.heading)}</code></h2>"]
        if self.drawing is not None:
            parts.append(f'<div class="wide">{self.drawing()}</div>')
        for section in self.sections:
            title = f"<caption>{escape(section.title)}</caption>" if section.title else ""
            widest = max(map(len, section.rows), default=1)
            rows = "".join(_row_as_html(row, widest) for row in section.rows)
            parts.append(f'<div class="wide"><table>{title}<tbody>{rows}</tbody></table></div>')
        return '<div class="axes-explanation">\n' + "\n".join(parts) + "\n</div>\n"


def _lines(found: Explanation) -> Iterator[str]:
    """The text, line by line."""
    yield from _wrapped("", found.heading)
    for section in found.sections:
        if section.title:
            yield section.title
        cells = itertools.zip_longest(*(row[:-1] for row in section.rows), fillvalue="")
        columns = [max(map(len, column)) for column in cells]
        for row in section.rows:
            before = "".join(f"{cell:<{width}}  " for cell, width in zip(row[:-1], columns, strict=False))
            yield from _wrapped("  " + before, row[-1])


def _wrapped(before: str, text: str) -> Iterator[str]:
    """`text` behind `before`, broken between words; what follows stands under its beginning."""
    room = WIDTH - len(before)
    indent = len(before) if room >= _NARROWEST else 6
    if len(text) <= room:
        yield (before + text).rstrip()
        return
    first = textwrap.wrap(text, max(1, room), **_WORDS)[0]
    if len(first) > room:  # not even a word
        first = ""
    yield (before + first).rstrip()
    for line in textwrap.wrap(text[len(first) :].strip(), WIDTH - indent, **_WORDS):
        yield " " * indent + line


def _row_as_html(row: tuple[str, ...], widest: int) -> str:
    cells = [f"<td>{escape(cell)}</td>" for cell in row[:-1]]
    span = f' colspan="{widest - len(row) + 1}"' if len(row) < widest else ""
    return f"<tr>{''.join(cells)}<td{span}>{escape(row[-1])}</td></tr>"


_PAGE_STYLE = (
    "body { margin: 0; background: #fff } @media (prefers-color-scheme: dark) { body { background: #0d1117 } }"
)

# A notebook has rules of its own for tables, with stripes: those here have to win.
_STYLE = """
.axes-explanation { color: #24292f; background: #fff; padding: 0.5em }
.axes-explanation, .axes-explanation code { font: 14px ui-monospace, Menlo, Consolas, monospace }
.axes-explanation h2 { font-size: 15px; overflow-wrap: anywhere }
.axes-explanation .wide { overflow-x: auto } .axes-explanation .wide svg { max-width: none !important }
.axes-explanation table { border-collapse: collapse; margin: 0.5em 0; max-width: 60em; color: inherit;
  font: inherit }
.axes-explanation tr { background: none !important }
.axes-explanation caption { text-align: left; font-weight: bold; padding: 0.3em 0 }
.axes-explanation .wide td { border-top: 1px solid #d0d7de; padding: 0.2em 0.7em; text-align: left; vertical-align: top;
  white-space: nowrap }
.axes-explanation .wide td:last-child { white-space: normal; min-width: 16em }
@media (prefers-color-scheme: dark) {
  .axes-explanation { color: #e6edf3; background: #0d1117 }
  .axes-explanation .wide td { border-color: #30363d }
}
"""

_SVG_STYLE = """
  .paper { fill: #fff } text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #24292f; white-space: pre }
  @media (prefers-color-scheme: dark) { .paper { fill: #0d1117 } text { fill: #e6edf3 } }
"""


def _text_as_svg(title: str, lines: Iterator[str]) -> str:
    shown = list(lines)
    width, height = 8 * max(WIDTH, *map(len, shown)) + 16, 18 * len(shown) + 14
    texts = [
        f'<text x="8" y="{18 * at + 20}" xml:space="preserve">{escape(line)}</text>' for at, line in enumerate(shown)
    ]
    size = f'viewBox="0 0 {width} {height}" width="{width}" style="max-width:100%;height:auto"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    said = f"<title>{escape(title)}</title><desc>{escape(chr(10).join(shown))}</desc><style>{_SVG_STYLE}</style>"
    paper = f'<rect class="paper" width="{width}" height="{height}"/>'
    return "\n".join((head, said, paper, *texts, "</svg>")) + "\n"
