"""Watching: who hears of operations, of which expression they are part, and from which line of the user's code.

What `axes.debug` turns on is a listener too; the core only knows that somebody listens.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

from axes.runtime import torch_private

T = TypeVar("T")
Part = tuple[str, Any]
"""What an operation is part of: its kind, and the expression or sharding."""


class _Context(threading.local):
    """What operations of a thread are part of just now, the outermost first."""

    def __init__(self) -> None:
        self.parts: list[Part] = []


context = _Context()


def within(kind: str, expression: Any, run: Callable[..., T], *args: Any) -> T:
    """`run(*args)`, whose operations are part of an expression: ranks compare that, too, and a trace has it."""
    parts = context.parts
    parts.append((kind, expression))
    try:
        return run(*args)
    finally:
        parts.pop()


listeners: tuple[Any, ...] = ()
"""Who hears of operations, in this order (see `operation.Listener`). Replaced as a whole; where there are none, an
operation looks at nothing else.
"""

compare: Any = None
"""The listener that compares an operation among its ranks, where there is one: of a plan, before its steps."""

statement = ""
"""What ranks are asked for together beside results, as they compare it when they make a mesh or a group."""


def parts() -> tuple[str, ...]:
    """What operations are part of just now, the outermost first, each as it is shown."""
    return tuple(map(part_said, context.parts))


def part_said(part: Part) -> str:
    """A part as it is shown."""
    return "{} '{}'".format(*part)


def whole_text() -> str:
    """What operations are part of just now, as errors show it."""
    backward = ["backward"] if torch_private.backward_pass() >= 0 else []
    return "".join(f"{part}: " for part in (*backward, *parts()))


def user_frame() -> FrameType | None:
    """The innermost frame of the user's code that led here; None where there is none.

    There is none in the backward pass on an accelerator, which has a thread of its own.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    return frame


_PASSED = {"axes", "torch", "einops", "contextlib", "functools", "importlib"}
"""Packages whose lines aren't the user's."""

passed_files = {__file__: True}
"""Whether files are of these packages, as far as it is known."""


def is_users(frame: FrameType) -> bool:
    """Whether a frame is of the user's code."""
    file = frame.f_code.co_filename
    passed = passed_files.get(file)
    if passed is None:
        module = frame.f_globals.get("__name__", "")
        passed = module.partition(".")[0] in _PASSED or file.startswith(("<frozen", "<eval_with_key"))
        if not file.startswith("<"):  # in such a one there may be anything
            passed_files[file] = passed
    return not passed


def user_place() -> str:
    """The line of the user's code that led here, as `file:line in function`; "" where there is none."""
    frame = user_frame()
    return "" if frame is None else line_of_code(frame.f_code, frame.f_lasti)


def at_user_place() -> str:
    """The line of the user's code that led here, as an error ends with it; "" where there is none."""
    place = user_place()
    return f", at {place}" if place else ""


def line_of_code(code: CodeType, instruction: int) -> str:
    """An instruction of a function as `file:line in function`."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None)
    return f"{_short(code.co_filename)}:{next(lines, code.co_firstlineno)} in {code.co_name}"


def _short(file: str) -> str:
    """A path from the working directory."""
    with contextlib.suppress(OSError):  # the working directory has been removed
        return file.removeprefix(os.getcwd() + os.sep)
    return file
