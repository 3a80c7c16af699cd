"""What `explain` returns: sections of rows, that are printed, drawn, or read by a program.

>>> found = Explanation("dp tp", (Section("groups", (("dp", "4 ranks"), ("tp", "2 ranks"))),), {"kind": "mesh"})
>>> print(found)
dp tp
groups
  dp  4 ranks
  tp  2 ranks
>>> found.json()
{'schema': 2, 'kind': 'mesh'}

Text is at most 80 columns wide and ASCII where names are. HTML and SVG are drawn by `axes.show`, as all pictures are.
"""

from __future__ import annotations

import copy
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from axes.algebra import providers

SCHEMA = 2
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
class Explanation(providers.Pictured):
    """An explanation. `str()` and `print()` show it, a notebook shows `html()`.

    heading: what is explained. facts: the same as data, for `json`. drawing: what moves, as `axes.show` draws it,
    where that can be drawn.
    """

    heading: str
    sections: tuple[Section, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)
    drawing: Callable[[], Any] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    __repr__ = __str__

    def json(self) -> dict[str, Any]:
        """The facts as data that `json.dumps` takes; `"schema"` is the version of their form.

        docs/explain.md says what each fact is. A name may be added to a version, none changes or goes.
        """
        return {"schema": SCHEMA, **copy.deepcopy(dict(self.facts))}

    def html(self) -> str:
        """A page of its own, as text."""
        return providers.picture_of(self).html()

    def svg(self) -> str:
        """A picture: what moves from rank to rank where that can be drawn, and the text."""
        return providers.picture_of(self).svg()


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


def _wrapped(before: str, text: str) -> list[str]:
    """`text` behind `before`, broken between words; what follows stands under its beginning."""
    if len(before + text) <= WIDTH:
        return [(before + text).rstrip()]
    indent = " " * (len(before) if WIDTH - len(before) >= _NARROWEST else 6)
    if before.strip() and len(before + text.split()[0]) > WIDTH:  # not even a word fits behind it
        return [before.rstrip(), *_wrapped(indent, text)]
    return textwrap.wrap(text, WIDTH, initial_indent=before, subsequent_indent=indent, **_WORDS)
