"""What a picture is made of, however it is shown: a sheet of boards, tables and remarks.

What builds a sheet (of a mesh, a sharding, a plan) knows nothing of terminals and SVG; what shows one
(`in_text`, `in_svg`, `in_html`) nothing of meshes.

>>> board = Board(("dp",), "tp", (Head(("0",)), Head(("1",))), (Head(("0",)),), ((Cell("0"), Cell("1")),))
>>> Sheet("a mesh", "of two ranks", (board,)).panels[0].cells[0][1].text
'1'
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

COLORS = ("#3a75c6", "#b45e18", "#2a8456", "#9a5bb8", "#976e09", "#c2476f", "#278089", "#7a6a5a")
"""Colours by number: white reads on each of them, and each on white and on black."""


@dataclass(frozen=True)
class Cell:
    """A place of a board.

    tone: the number of its colour, None for none. mark: a letter that says the same as the colour.
    here: whether it is the place that the picture is seen from. wall: whether a node ends on its left.
    """

    text: str
    tone: int | None = None
    mark: str = ""
    here: bool = False
    wall: bool = False


@dataclass(frozen=True)
class Head:
    """What stands beside a row or above a column. extent: how large it is beside others. gap: stands for several."""

    labels: tuple[str, ...]
    extent: float = 1
    gap: bool = False


@dataclass(frozen=True)
class Board:
    """Places in rows and columns.

    corner: what the labels of rows are of. across: what those of columns are of. notes: what stands
    right of each row. caption: what stands above it all.
    """

    corner: tuple[str, ...]
    across: str
    columns: tuple[Head, ...]
    rows: tuple[Head, ...]
    cells: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    caption: str = ""

    @property
    def lines(self) -> Iterator[tuple[Head, tuple[Cell, ...], str]]:
        """Each row with what stands on both sides of it."""
        return zip(self.rows, self.cells, self.notes or [""] * len(self.rows), strict=True)


@dataclass(frozen=True)
class Listing:
    """A table of text. right: which columns are numbers. tones: the colour of each row's first cell."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    tones: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Remark:
    """Lines of text. close: whether they belong to what stands above them."""

    lines: tuple[str, ...]
    close: bool = False


@dataclass(frozen=True)
class Drawing:
    """An SVG that says what the panels after it say: text shows these alone."""

    svg: str


Panel = Board | Listing | Remark | Drawing


@dataclass(frozen=True)
class Sheet:
    """A picture. summary: what it shows, in a sentence, for who doesn't see it."""

    title: str
    summary: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Room:
    """How much a picture may take: columns and lines of text, each of which stands for a place of a board, too."""

    width: int = 80
    height: int = 24
