"""Flags: what a run is asked for beside its results, by `axes.debug` or by the environment.

`axes.debug` is what a program says, and goes before `AXES_CHECK`, which is read when axes is imported and by each
`axes.init_mesh`. What is asked is part of what ranks compare when they make a mesh or a group: it is the same on all.
"""

from __future__ import annotations

import os

check = os.environ.get("AXES_CHECK") == "1"
"""Whether ranks compare each operation before they communicate."""

told = check
"""Whether operations say what they are and what they are part of: for who compares them, or listens (`listen`)."""

_said: bool | None = None
_listeners = 0


def said() -> bool | None:
    """What the program has said of `check`; None where it has said nothing, and the environment counts."""
    return _said


def say(wanted: bool | None) -> None:
    """Have operations compared, or not; with None as the environment says."""
    global _said
    _said = wanted
    read_environment()


def read_environment() -> None:
    """Takes `AXES_CHECK` for what it is now, where the program has said nothing."""
    global check, told
    check = os.environ.get("AXES_CHECK") == "1" if _said is None else _said
    told = check or _listeners > 0


def listen(more: int) -> None:
    """Have operations say what they are to one more who listens, or with -1 to one less."""
    global _listeners
    _listeners += more
    read_environment()


def flags_text() -> str:
    """What is asked for, as ranks compare it; nothing where nothing is."""
    return "operations are compared (AXES_CHECK=1, axes.debug)" if check else ""
