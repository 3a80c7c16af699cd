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

from axes.algebra.errors import AxesError
from axes.debugging.check import compare_operation
from axes.debugging.trace import leave_all, recorder, stop
from axes.extension import Operation, shown
from axes.runtime import watching
from axes.runtime.agreement import agree_at
from axes.runtime.groups import current_world, say_why
from axes.runtime.watching import at_user_place

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
    """Has ranks compare each operation before they communicate, or records what they send: for a job that hangs, whose
    numbers are wrong, or that is slow.

        axes.debug(check=True)                 # for the rest of the program
        with axes.debug(check=True): ...       # for a block
        axes.debug(trace="trace.json")         # each rank writes a file of its own: trace.0.json, ...

    What isn't named stays as it is. `AXES_CHECK=1` and `AXES_TRACE=trace.json` in the environment are the same for the
    whole program.

    **check.** A difference is a `DesyncError` on all ranks that would meet. It shows each side: the operation, its
    expression, dtype and whole shape, which in the order of these ranks it is, and its line of the program. A rank that
    doesn't come is named, with what it did last, when the time limit of the group is over. All ranks of the job call
    it alike and wait for each other there, as they do in `axes.init_mesh`; `DesyncError` where one asks for something
    else. A block ends on each rank by itself. Before the job has started it is part of what `init_mesh` compares. It
    costs some store operations for each rank and operation: nothing to leave on.

    **trace.** Every collective is in the file, in Chrome's own format: its operation, expression and line of the
    program, axis, ranks, bytes, dtype, whether in a backward pass, when it was issued and how long it took; on a GPU
    also by events on its stream. The rank stands for `{rank}` in the path, else before the suffix; "" ends the trace.
    Files of an earlier job are written over. `python -m axes trace FILE...` says what took the time and which rank the
    others waited for. Each rank decides for itself, and waits for nobody. It costs 5 to 10 microseconds for each
    collective.

    Both see what axes does, forward and backward; not what torch's own operations on DTensors send, and nothing in
    compiled graphs. Raises `AxesError` where the file can't be written.

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
