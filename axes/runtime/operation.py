"""Operations: what ranks do together, who hears of it before they do it, and what is said when it fails.

Everything by which axes communicates goes through `collective`, or, where nanoseconds count, does what it does:

    collective(describe, subject, run, *args)        # run(*args), where describe(*subject) is an Operation

Listeners hear of an operation: what `axes.debug` turns on (see `axes.debugging`), what `axes.explain` records, and a
caller's own (`axes.extension.listen`). Without listeners `collective` is a call and nothing else, unless the backend
fails, as it does on all ranks where one dies: then the error says what failed, where, and between which ranks.

Compiled graphs hold the collectives alone: nobody hears of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from axes.algebra.errors import DesyncError, ShardingError
from axes.runtime import torch_private, watching
from axes.runtime.agreement import OF_ONE_RANK, first_line, ranks_text
from axes.runtime.groups import who_else_failed
from axes.runtime.watching import at_user_place, whole_text

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Operation:
    """What some ranks do together: the value that listeners hear of (see `collective`), and a trace has.

    what: the operation with its tensor, as a person reads it. kind: a step of a plan, or a collective by its public
    name. by: the method of the process group, "" for a plan of several steps. axis: its name, or several. group: the
    name of the process group, whose `ranks` are in order. step: which of how many steps of the plan. dtype: of what is
    sent. later: whether the call returns before the collective has ended (`async_op`). together: whether all ranks of
    the group take part. compared: what is the same on all ranks, which names aren't; "" where nothing is compared.
    sends[i] and receives[i]: for and from the i-th of the ranks, where each says what comes from whom. mesh: that of
    the axis, if there is one.
    """

    what: str
    kind: str
    by: str
    axis: str
    group: str
    ranks: Sequence[int]
    dtype: str
    device: str
    step: tuple[int, int] = (1, 1)
    bytes_in: int = 0
    bytes_out: int = 0
    later: bool = False
    together: bool = True
    compared: str = ""
    sends: Sequence[int] = ()
    receives: Sequence[int] = ()
    mesh: Any = None

    @staticmethod
    def place() -> tuple[str, tuple[str, ...]]:
        """The innermost line of the user's code that led here, and the expressions that run, the outermost first.

        The line is `file:line in function`, or "" in a backward pass that has a thread of its own.
        """
        return watching.user_place(), watching.parts()


Listener = Callable[[Operation], Callable[[], None] | None]
"""Who hears of an operation, before ranks communicate; it gives what to call when that has returned, if anything."""


def collective(describe: Callable[..., Operation], subject: tuple[Any, ...], run: Callable[..., T], *args: Any) -> T:
    """`run(*args)`, by which ranks communicate: `describe(*subject)`, of which listeners hear.

    Raises `DesyncError` where ranks are compared and differ, and where the backend fails.
    """
    try:
        return heard(describe(*subject), run, *args) if watching.listeners else run(*args)
    except RuntimeError as error:
        raise_located(error, describe(*subject))


def heard(operation: Operation, run: Callable[..., T], *args: Any) -> T:
    """`run(*args)`, of which all listeners hear that it is this operation."""
    ends = [hear(operation) for hear in watching.listeners]
    result = run(*args)
    for end in filter(None, ends):
        end()
    return result


def raise_located(error: RuntimeError, operation: Operation) -> NoReturn:
    """Raises what says that an operation failed, for which line, and between which ranks; the error itself where it is
    this rank's own.
    """
    if isinstance(error, OF_ONE_RANK):
        raise error
    rank, others = who_else_failed(operation.ranks, operation.what)
    raise DesyncError(
        f"{whole_text()}{operation.what} failed on rank {rank}{at_user_place()}\n"
        f"  with {ranks_text(operation.ranks)}: {first_line(error)}{others}\n"
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
        raise DesyncError(f"a collective that was under way failed{at_user_place()}: {error}") from error


# --- what can be sent

# A collective sends the numbers of a tensor. It sees neither the tangent that `torch.autograd.forward_ad` keeps beside
# them nor what `torch.func.grad` or `vmap` wraps around them, so every door is closed while one of these is on, before
# anything is sent.

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of tensors that aren't part of a graph that is being traced. (To ask whether one of these is a DTensor
takes five times as long as to see that its type is among them.)"""


def check_transforms(what: str) -> None:
    """`ShardingError` in forward mode, and inside a transform of `torch.func`."""
    if torch_private.transforms_are_on():
        raise ShardingError(
            f"{what} was called in forward-mode differentiation, or inside a transform of torch.func (grad, vjp, jvp, "
            "vmap, jacrev, jacfwd, hessian), where a tensor is more than its numbers, and a collective sends only "
            "these. Write torch.autograd.grad, with create_graph=True where it is differentiated again, or "
            "torch.autograd.functional, whose jvp goes by backward; instead of vmap, write a dim of its own"
        )


def check_dense(x: Any, function: str, hint: str = "") -> None:
    """`ShardingError` for what isn't a tensor, for which `hint` says what to write instead, and for a tensor that isn't
    one block of numbers: sparse, nested or quantized.
    """
    if is_dense(x):
        return
    if not isinstance(x, torch.Tensor):
        raise ShardingError(f"{function} takes a tensor; found {type(x).__name__}{hint}")
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        kind = "a nested one" if x.is_nested else "a quantized one" if x.is_quantized else f"one of layout {x.layout}"
        dense = ". Write x.to_dense()" if x.layout is not torch.strided and not x.is_nested else ""
        raise ShardingError(f"{function} takes a dense tensor; found {kind}{dense}")
    if not torch.compiler.is_compiling() and is_lazy(x):
        raise ShardingError(f"{function} takes a tensor; found a lazy parameter that has no shape yet")


def check_plain(function: str, x: Any, instead: str) -> None:
    """`ShardingError` for what isn't a plain tensor that a collective can send; `instead` is advice for a DTensor."""
    if not is_dense(x):
        if isinstance(x, DTensor):
            raise ShardingError(f"{function} takes this rank's plain tensor; found a DTensor. {instead}")
        check_dense(x, function)
    check_transforms(function)


def is_dense(x: object) -> bool:
    """Whether `x` is a tensor of torch's own class that `check_dense` takes: at most calls there is nothing to ask."""
    return type(x) in PLAIN and x.layout is torch.strided and not x.is_nested and not x.is_quantized  # type: ignore[attr-defined]


def as_plain(x: torch.Tensor) -> torch.Tensor:
    """`x` without a class of the user's that changes nothing below autograd; its results would take that class."""
    if type(x) in PLAIN or type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return x
    return x.as_subclass(torch.Tensor)
