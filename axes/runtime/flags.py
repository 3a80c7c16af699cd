"""Flags: what a run is asked for beside its results, by `axes.debug` or by the environment.

`axes.debug` is what a program says, and goes before `AXES_CHECK` and `AXES_TRACE`, which are read when axes is imported
and by each `axes.init_mesh`. That operations are compared is part of what ranks compare when they make a mesh or a
group: it is the same on all. A trace is of each rank by itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

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


said: Mapping[str, Any] = MappingProxyType({})  # replaced as a whole, by `say`
"""What the program has said of `check` and `trace`; where it has said nothing, the environment counts."""

check = False
"""Whether ranks compare each operation before they communicate."""

trace = ""
"""To which file collectives are recorded; "" where they aren't."""

watched = False
"""Whether one of the two is so, or somebody listens: all that an operation looks at where nothing is."""

listeners: tuple[Any, ...] = ()
"""Who else hears of operations (see `trace.Listener`)."""


def say(wanted: Mapping[str, Any]) -> None:
    """Have operations compared and recorded, or not; of what isn't named the environment decides."""
    global said
    said = wanted
    read_environment()


def read_environment() -> None:
    """Take the environment for what it is now, where the program has said nothing.

    Raises `AxesError` for an `AXES_CHECK` that is no word for yes or no: a job that hangs would be believed compared.
    """
    global check, trace, watched
    word = os.environ.get("AXES_CHECK", "")
    if word.lower() not in _WORDS:
        raise AxesError(f"AXES_CHECK is 1 (true, yes, on) or 0 (false, no, off); found {shown(word)}")
    check = said.get("check", _WORDS[word.lower()])
    trace = said.get("trace", os.environ.get("AXES_TRACE", ""))
    watched = check or trace != "" or bool(listeners)


def flags_text() -> str:
    """What ranks are asked for together, as they compare it; nothing where nothing is."""
    return "operations are compared (AXES_CHECK=1, axes.debug)" if check else ""


read_environment()
