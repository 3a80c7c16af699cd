"""An explanation as a sheet: the drawing of what moves where there is one, then its sections as tables.

>>> from axes.algebra.explanation import Explanation, Section
>>> from axes.show.in_text import lines_of, plain
>>> found = Explanation("dp tp", (Section("groups", (("dp", "4 ranks"), ("tp", "2 ranks"), ("in all 6 ranks",))),))
>>> print(plain(lines_of(sheet_of_explanation(found), 80)))
dp tp
<BLANKLINE>
groups
dp      4 ranks
tp      2 ranks
  in all 6 ranks
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from axes.algebra.explanation import Explanation, Section
from axes.show.panels import Listing, Panel, Remark, Sheet

WIDEST_CELL = 64
"""Letters of a last cell before it goes on in a row below."""


def sheet_of_explanation(found: Explanation) -> Sheet:
    """The picture of an explanation; who doesn't see it is told its text."""
    drawn = [] if found.drawing is None else [found.drawing()]
    panels = (panel for section in found.sections for panel in _panels(section))
    return Sheet(found.heading, str(found), (*drawn, *panels))


def _panels(section: Section) -> Iterator[Panel]:
    """A table of the rows that have columns, and lines for those that have none."""
    widest = max(map(len, section.rows), default=1)
    rows = tuple(part for row in section.rows if len(row) > 1 for part in _rows(row, widest))
    lines = tuple(f"  {row[0]}" for row in section.rows if len(row) == 1)
    if rows:
        named = bool(rows[0][0])  # else the first row says what the columns are
        head = ("",) * (widest - 1) if named else rows[0][1:]
        yield Listing((section.title, *head), rows if named else rows[1:])
    if lines:
        title = (section.title,) if section.title and not rows else ()
        yield Remark((*title, *lines), close=not title)


def _rows(row: tuple[str, ...], widest: int) -> Iterator[tuple[str, ...]]:
    """A row with its last cell in the last column, and below it what doesn't fit there."""
    before = (*row[:-1], *[""] * (widest - len(row)))
    for text in textwrap.wrap(row[-1], WIDEST_CELL, break_on_hyphens=False) or [""]:
        yield (*before, text)
        before = ("",) * len(before)
