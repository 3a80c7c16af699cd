"""Flags: what a run is asked for beside its results, by `axes.debug` or by the environment.

`axes.debug` is what a program says, and goes before `AXES_CHECK` and `AXES_TRACE`, which are read when axes is imported
and by each `axes.init_mesh`. That operations are compared is part of what ranks compare when they make a mesh or a
group: it is the same on all. A trace is of each rank by itself.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from axes.algebra.errors import AxesError, shown

_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "": False,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
"""What `AXES_CHECK` may be, in any case."""


class Said(NamedTuple):
    """What the program has said; None where it has said nothing, and the environment counts."""

    check: bool | None = None
    trace: str | None = None


check = False
"""Whether ranks compare each operation before they communicate."""

trace = ""
"""To which file collectives are recorded; "" where they aren't."""

watched = False
"""Whether one of the two is so, or somebody listens: all that an operation looks at where nothing is."""

listeners: tuple[Any, ...] = ()
"""Who else hears of operations (see `trace.Listener`)."""

_said = Said()


def said() -> Said:
    """What the program has said."""
    return _said


def say(wanted: Said) -> None:
    """Have operations compared and recorded, or not; with None as the environment says."""
    global _said
    _said = wanted
    read_environment()


def read_environment() -> None:
    """Take the environment for what it is now, where the program has said nothing.

    Raises `AxesError` for an `AXES_CHECK` that is no word for yes or no: a job that hangs would be believed compared.
    """
    global check, trace, watched
    word = os.environ.get("AXES_CHECK", "")
    if word.lower() not in _WORDS:
        raise AxesError(f"AXES_CHECK is 1 (true, yes, on) or 0 (false, no, off); found {shown(word)}")
    check = _WORDS[word.lower()] if _said.check is None else _said.check
    trace = os.environ.get("AXES_TRACE", "") if _said.trace is None else _said.trace
    watched = check or trace != "" or bool(listeners)


def flags_text() -> str:
    """What ranks are asked for together, as they compare it; nothing where nothing is."""
    return "operations are compared (AXES_CHECK=1, axes.debug)" if check else ""


read_environment()
