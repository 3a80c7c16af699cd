"""`axes.debug`: what a program, or its environment, asks for beside results.

`axes.debug` is what a program says, and goes before `AXES_CHECK` and `AXES_TRACE`, which are read when axes is imported
and by each `axes.init_mesh`. That operations are compared is part of what ranks compare when they make a mesh or a
group: it is the same on all. A trace is of each rank by itself. Both are listeners of the core.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any

import torch.distributed as dist

from axes import AxesError
from axes.debugging.check import compare_operation
from axes.debugging.trace import leave_all, recorder, stop
from axes.extension import Operation, agree_at, at_user_place, current_world, say_why, shown, watching

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

path = ""
"""To which file collectives are recorded; "" where they aren't."""


def say(wanted: Mapping[str, Any]) -> None:
    """Have operations compared and recorded, or not; of what isn't named the environment decides."""
    global said
    said = wanted
    read_environment()


def read_environment() -> None:
    """Take the environment for what it is now, where the program has said nothing.

    Raises `AxesError` for an `AXES_CHECK` that is no word for yes or no, as a job that hangs would be believed
    compared; and for a trace that can't be written.
    """
    global path
    word = os.environ.get("AXES_CHECK", "")
    if word.lower() not in _WORDS:
        raise AxesError(f"AXES_CHECK is 1 (true, yes, on) or 0 (false, no, off); found {shown(word)}")
    check, path = said.get("check", _WORDS[word.lower()]), said.get("trace", os.environ.get("AXES_TRACE", ""))
    others = [each for each in watching.listeners if each not in (compare_operation, _record)]
    own = [compare_operation] * check + [_record] * (path != "")
    watching.listeners, watching.compare = (*own, *others), compare_operation if check else None
    watching.statement = "operations are compared (AXES_CHECK=1, axes.debug)" if check else ""
    if path and dist.is_initialized():
        recorder(path)  # the rank is known: a file that can't be written is found here


def _record(operation: Operation) -> Callable[[], None] | None:
    return recorder(path).hear(operation)


def _left(
    before: Mapping[str, Any], kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
) -> None:
    """What `axes.debug` has turned on is as it was before; others that expect this rank to compare are told."""
    was_on, traced = watching.compare is not None, path
    say(before)
    if traced != path:
        stop(traced)
    if was_on and watching.compare is None:
        left = f"has left the block of axes.debug(check=True){at_user_place()}"
        say_why(left if error is None else f"raised {type(error).__name__}: {error}")


def debug(check: bool | None = None, trace: str | os.PathLike[str] | None = None) -> contextlib.ExitStack:
    """Compare operations between ranks before they communicate, or record them: for a job that hangs, is slow, or
    computes wrong numbers.

        axes.debug(check=True)                 # for the rest of the program
        with axes.debug(check=True): ...       # for a block
        axes.debug(trace="trace.json")         # each rank writes a file of its own: trace.0.json, ...

    `AXES_CHECK=1` and `AXES_TRACE=trace.json` in the environment do the same for a whole program. Neither sees the
    communication of torch's own operations on DTensors, or of compiled graphs.

    Args:
        check: Ranks compare the operation, its expression, dtype and whole shape. All ranks of the job call it, and
            wait for each other. It takes some requests to the job's store for each operation: not for production.
        trace: A path. Every collective is a line in the file, in Chrome's format: operation, line of the program,
            axis, ranks, bytes, time. `{rank}` in the path, else the place before the suffix, becomes the rank. ""
            ends the trace. `python -m axes trace FILE...` reads the files of all ranks together. It costs 8 to 12
            microseconds for each collective.

    Raises:
        DesyncError: Ranks differ, in an operation or in this call; raised on all of them, with the line of each.
        AxesError: The file can't be written.

    Examples:
        >>> import axes, torch
        >>> with axes.simulate(8), debug(check=True):
        ...     mesh = axes.init_mesh("dp=2 tp=4")
        ...     axes.psum(torch.ones(3), "tp", mesh=mesh).shape
        torch.Size([3])
    """
    if check is not None and not isinstance(check, bool):
        raise AxesError(f"axes.debug(check=): True or False; found {shown(check)}")
    if trace is not None and not isinstance(trace, str | os.PathLike):
        raise AxesError(f"axes.debug(trace=): the path of a file, or ''; found {shown(trace)}")
    wanted = dict[str, Any](said)
    if check is not None:
        _agree_on(check)
        wanted["check"] = check
    if trace is not None:
        wanted["trace"] = os.fspath(trace)
    with contextlib.ExitStack() as block:
        block.push(functools.partial(_left, said))
        say(wanted)
        return block.pop_all()


def _agree_on(check: bool) -> None:
    """Returns where all ranks of the running job ask for the same."""
    if dist.is_initialized() and not current_world().fake:
        world, subject = current_world(), "axes.debug, which all ranks of the job call"
        found = world.barrier("debug", range(world.size), subject, "Ask for the same on all ranks")
        world.times_debugged += 1  # what ranks count of a group, they count since then
        barrier = replace(found, doing=f"axes.debug(check={check}){at_user_place()}")
        agree_at(world.member, barrier, f"check={check}", world.limit)


def _forked() -> None:
    """In a process that was forked from one which writes a trace: that isn't its own, and it writes none."""
    if leave_all():
        say({**said, "trace": ""})


os.register_at_fork(after_in_child=_forked)
read_environment()
