"""Flags: what a run is asked for beside its results, by `axes.debug` or by the environment.

`axes.debug` is what a program says, and goes before `AXES_CHECK`, which is read when axes is imported and by each
`axes.init_mesh`. What is asked is part of what ranks compare when they make a mesh or a group: it is the same on all.
"""

from __future__ import annotations

import os

check = os.environ.get("AXES_CHECK") == "1"
"""Whether ranks compare each operation before they communicate."""

_said: bool | None = None


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
    global check
    check = os.environ.get("AXES_CHECK") == "1" if _said is None else _said


def flags_text() -> str:
    """What is asked for, as ranks compare it; nothing where nothing is."""
    return "operations are compared (AXES_CHECK=1, axes.debug)" if check else ""
