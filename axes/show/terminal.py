"""Lines in colour, where they are read in a terminal and rich is installed; the same lines without it elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from axes.show.in_text import Line, plain
from axes.show.panels import Room

if TYPE_CHECKING:
    from rich.text import Text

NARROWEST, WIDEST = 40, 160
"""A picture is at least so many columns wide, and no wider, however large the terminal is."""


def room_of(stream: IO[str] | None) -> Room:
    """The size of the terminal that a stream goes to; 80 x 24 where it goes elsewhere."""
    if not is_terminal(stream):
        return Room()
    size = shutil.get_terminal_size()
    return Room(min(max(size.columns, NARROWEST), WIDEST), max(size.lines - 1, Room().height))


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether someone reads the stream in a terminal."""
    return stream is not None and stream.isatty()


def written(lines: Sequence[Line], stream: IO[str] | None) -> str:
    """The lines as a terminal takes them: in the colours that it has, and none where `NO_COLOR` is set."""
    if not is_terminal(stream):
        return plain(lines)
    try:
        from rich.console import Console
    except ImportError:
        return plain(lines)
    console = Console(file=stream, highlight=False, soft_wrap=True)
    with console.capture() as captured:
        console.print(rich_text(lines), end="")
    return captured.get()


def rich_text(lines: Sequence[Line]) -> Text:
    """The lines as rich has text."""
    from rich.text import Text

    rows = (Text.assemble(*((span.text, span.style) for span in line), no_wrap=True) for line in lines)
    return Text("\n").join(rows)
