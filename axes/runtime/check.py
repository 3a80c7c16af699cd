"""Checks: what ranks do together, compared before they do it, and said when it fails.

Everything by which axes communicates goes through `collective`, or, where nanoseconds count, does what it does:

    collective(describe, subject, run, *args)        # run(*args), where describe(*subject) is an Operation

Listeners hear of an operation: the comparison, the trace, and what `axes.explain` records. With
`axes.debug(check=True)`, or `AXES_CHECK=1` in the environment, the ranks of an `Operation` compare it first,
through the job's store (see `agreement`): what is done, of what expression, dtype and whole shape, whether in a
backward pass, and which in their order it is. Ranks that do different things, or one that doesn't come, are a
`DesyncError` on all of them, before anything is sent; it shows each side with its line of the user's code. When all
have read how it ended, the store has no more keys than before.

Without listeners `collective` is a call and nothing else, unless the backend fails, as it does on all ranks where one
dies: then the error says what failed, where, and between which ranks.

In compiled graphs nothing is compared: they hold the collectives alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from axes.algebra.errors import AxesError, DesyncError, shown
from axes.runtime import flags, torch_private
from axes.runtime.agreement import OF_ONE_RANK, Barrier, agree_at, leave_word, ranks_text
from axes.runtime.groups import World, as_timeout, current_world, time_limit, who_else_failed
from axes.runtime.places import user_place, whole_text
from axes.runtime.trace import Listener, Operation, recorder, stop
from axes.runtime.transforms import as_plain

T = TypeVar("T")

_SHOWN = 16
"""Lines of an error that there could be one of for each two ranks."""
_ADVICE = (
    "All ranks of a mesh call the same operations on the same tensors, in the same order; a branch that depends on the "
    "rank or on its data, or a loop of another length, may be why they don't"
)


def collective(describe: Callable[..., Operation], subject: tuple[Any, ...], run: Callable[..., T], *args: Any) -> T:
    """`run(*args)`, by which ranks communicate: `describe(*subject)`, of which listeners hear.

    Raises `DesyncError` where ranks are compared and differ, and where the backend fails.
    """
    try:
        return heard(describe(*subject), run, *args) if flags.watched else run(*args)
    except RuntimeError as error:
        raise_located(error, describe, *subject)


def heard(operation: Operation, run: Callable[..., T], *args: Any) -> T:
    """`run(*args)`, of which all listeners hear that it is this operation."""
    listeners: list[Listener] = [compare_operation] if flags.check else []
    listeners += [recorder().hear] if flags.trace else []
    ends = [hear(operation) for hear in (*listeners, *flags.listeners)]
    result = run(*args)
    for end in ends:
        if end is not None:
            end()
    return result


# before


def compare_operation(operation: Operation) -> None:
    """Returns when all ranks of the operation are about to do the same; `DesyncError` on all of them otherwise."""
    world = current_world()
    alone = len(operation.ranks) == 1 or world.rank not in operation.ranks
    if world.fake or alone or not operation.compared:
        return
    whole = whole_text()
    found = world.barrier(f"check-{_lane(operation)}-{world.times_debugged}", operation.ranks, "", _ADVICE)
    subject = f"operation {found.attempt + 1} of {ranks_text(operation.ranks)}"
    barrier = replace(found, subject=subject, doing=f"{whole}{operation.said}{_at(user_place())}")
    told = [*map(list, (operation.sends, operation.receives))] if operation.sends else None
    every = agree_at(world.member, barrier, f"{whole}{operation.compared}", _waits(world, operation), told)
    if told:
        _compare_sizes(barrier, operation, every)


def _lane(operation: Operation) -> str:
    """What tells operations on a group, or on the groups of a mesh's axes, from those on others of the same ranks.

    Threads that use different groups may do so in any order, so that each lane counts its own operations.
    """
    if operation.group:
        return operation.group
    own = operation.mesh.binding.options
    return operation.device + "".join(f" {each} {options.text}" for each, options in own)


def _waits(world: World, operation: Operation) -> timedelta:
    """How long the ranks wait for one another: in a group that has a timeout of its own, that."""
    own = [entry.options.timeout for entry in world.groups.values() if entry.group.group_name == operation.group]
    return as_timeout(own[0] if own else None, "timeout") or time_limit(operation.device)


def _compare_sizes(barrier: Barrier, operation: Operation, every: Sequence[Any]) -> None:
    """`DesyncError` where a rank sends another than that expects; all ranks compare all of them."""
    ranks, (given, taken) = operation.ranks, zip(*every, strict=True)
    wrong = [
        f"rank {ranks[i]} sends {given[i][j]} to rank {ranks[j]}, which expects {taken[j][i]}"
        for i in range(len(ranks))
        for j in range(len(ranks))
        if given[i][j] != taken[j][i]
    ]
    if wrong:
        rest = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise DesyncError("\n  ".join([f"ranks disagree in {barrier.seen}:", *wrong[:_SHOWN], *rest]))


def _at(place: str) -> str:
    return f", at {place}" if place else ""


# after


def raise_located(error: RuntimeError, describe: Callable[..., Operation], *subject: Any) -> NoReturn:
    """Raises what says that `describe(*subject)` failed, for which line, and between which ranks; the error itself
    where it is this rank's own.
    """
    if isinstance(error, OF_ONE_RANK):
        raise error
    operation, (rank, others) = describe(*subject), (0, "")
    part = f", in its {operation.part()}" if operation.part else ""
    first = str(error).strip().splitlines() or [type(error).__name__]
    if dist.is_initialized():
        rank, others = dist.get_rank(), who_else_failed(operation.ranks, operation.said)
    raise DesyncError(
        f"{whole_text()}{operation.said} failed on rank {rank}{part}{_at(user_place())}\n"
        f"  with {ranks_text(operation.ranks)}: {first[0]}{others}\n"
        "A rank that ended, failed, or came with something else ends it for the others: the first error among all "
        "ranks says why. To find ranks that do different things, run with AXES_CHECK=1"
    ) from error


def waited(x: torch.Tensor) -> torch.Tensor:
    """`x`, waited for where it is the result of a collective that is still under way.

    Of a subclass that only has a name of its own, not a way of its own to compute, it is the tensor itself: torch
    can't make one of what a collective gives. Raises `DesyncError` where the collective has failed.
    """
    if not isinstance(x, torch_private.UnderWay):
        return as_plain(x)
    try:
        return x.trigger_wait()
    except RuntimeError as error:
        if (found := getattr(x, _OPERATION, None)) is not None:
            raise_located(error, *found)
        raise DesyncError(f"a collective that was under way failed{_at(user_place())}: {error}") from error


_OPERATION = "_operation_of_axes"


def under_way(x: torch.Tensor, *described: Any) -> torch.Tensor:
    """`x`, which knows by what its `Operation` is described, in case that it never comes."""
    if isinstance(x, torch_private.UnderWay):
        setattr(x, _OPERATION, described)
    return x


# axes.debug


def _left(
    before: Mapping[str, Any], kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
) -> None:
    """What `axes.debug` has turned on is as it was before; others that expect this rank to compare are told."""
    was_on, traced = flags.check, flags.trace
    flags.say(before)
    if traced != flags.trace:
        stop(traced)
    if was_on and not flags.check:
        left = f"has left the block of axes.debug(check=True){_at(user_place())}"
        say_why(left if error is None else f"raised {type(error).__name__}: {error}")


def say_why(text: str) -> None:
    """Tells ranks that wait for this one why it doesn't come: they read it behind "rank 3"."""
    if dist.is_initialized() and not current_world().fake:
        leave_word(current_world().member, text.replace("\n", "\n    "))


def debug(check: bool | None = None, trace: str | os.PathLike[str] | None = None) -> contextlib.ExitStack:
    """Has ranks compare each operation before they communicate, or records what they send: for a job that hangs, whose
    numbers are wrong, or that is slow.

        axes.debug(check=True)                 # for the rest of the program
        with axes.debug(check=True): ...       # for a block
        axes.debug(trace="trace.jsonl")        # each rank writes a file of its own: trace.0.jsonl, ...

    What isn't named stays as it is. `AXES_CHECK=1` and `AXES_TRACE=trace.jsonl` in the environment are the same for the
    whole program.

    **check.** A difference is a `DesyncError` on all ranks that would meet. It shows each side: the operation, its
    expression, dtype and whole shape, which in the order of these ranks it is, and its line of the program. A rank that
    doesn't come is named, with what it did last, when the time limit of the group is over. All ranks of the job call
    it alike and wait for each other there, as they do in `axes.init_mesh`; `DesyncError` where one asks for something
    else. A block ends on each rank by itself. Before the job has started it is part of what `init_mesh` compares. It
    costs some store operations for each rank and operation: nothing to leave on.

    **trace.** Every collective is a line of the file: its operation, expression and line of the program, axis, ranks,
    bytes, dtype, whether in a backward pass, when it was issued and how long it took; on a GPU also by events on its
    stream. The rank stands for `{rank}` in the path, else before the suffix; "" ends the trace. Files of an earlier job
    are written over. `python -m axes trace FILE...` says what took the time and which rank the others waited for. Each
    rank decides for itself, and waits for nobody. It costs a few microseconds for each collective.

    Both see what axes does, forward and backward; not what torch's own operations on DTensors send, and nothing in
    compiled graphs. Raises `AxesError` where the file can't be written.

    >>> import axes
    >>> with axes.simulate(8), debug(check=True):
    ...     mesh = axes.init_mesh("dp=2 tp=4")
    ...     axes.psum(torch.ones(3), "tp", mesh=mesh).shape
    torch.Size([3])
    """
    if check is not None and not isinstance(check, bool):
        raise AxesError(f"axes.debug(check=): True or False; found {shown(check)}")
    if trace is not None and not isinstance(trace, str | os.PathLike):
        raise AxesError(f"axes.debug(trace=): the path of a file, or ''; found {shown(trace)}")
    wanted = dict[str, Any](flags.said)
    if check is not None:
        _agree_on(check)
        wanted["check"] = check
    if trace is not None:
        wanted["trace"] = os.fspath(trace)
    with contextlib.ExitStack() as block:
        block.push(functools.partial(_left, flags.said))
        flags.say(wanted)
        if trace is not None and flags.trace and dist.is_initialized():
            recorder()  # a file that can't be written is found here
        return block.pop_all()


def _agree_on(check: bool) -> None:
    """Returns where all ranks of the running job ask for the same."""
    if dist.is_initialized() and not current_world().fake:
        world, subject = current_world(), "axes.debug, which all ranks of the job call"
        found = world.barrier("debug", range(world.size), subject, "Ask for the same on all ranks")
        world.times_debugged += 1  # what ranks count of a group, they count since then
        barrier = replace(found, doing=f"axes.debug(check={check}){_at(user_place())}")
        agree_at(world.member, barrier, f"check={check}", time_limit("cpu"))
