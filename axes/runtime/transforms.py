"""Differentiation that goes around autograd: tangents of forward mode, and the transforms of `torch.func`.

A collective sends the numbers of a tensor. It sees neither the tangent that `torch.autograd.forward_ad`
keeps beside them nor what `torch.func.grad` or `vmap` wraps around them. A linear map therefore takes
the tangent along itself (`with_tangent`); everything else is refused before anything is sent. The
checks are called where `torch_private.transforms_are_on()`.

>>> with forward_ad.dual_level():
...     x = forward_ad.make_dual(torch.ones(2), torch.full((2,), 5.0))
...     y = with_tangent(lambda x: 3 * x.detach(), x)
...     forward_ad.unpack_dual(y).tangent.tolist()
[15.0, 15.0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from axes.algebra.errors import ShardingError
from axes.runtime import torch_private

Run = Callable[[torch.Tensor], torch.Tensor]
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of tensors that aren't part of a graph that is being traced. (To ask whether one of these is a DTensor
takes five times as long as to see that its type is among them.)"""

_STRIDED = torch.strided
Push = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From a value, the result and the value's tangent to the result's tangent."""


def has_tangent(x: torch.Tensor) -> bool:
    """Whether forward-mode differentiation follows a tensor."""
    return torch_private.may_have_tangents() and _is_dual(x)


# torch.compile gives up here, where a level is open: what it traces with has no tangents (2.13).
@torch.compiler.disable
def _is_dual(x: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


@torch.compiler.disable
def with_tangent(function: Run, x: torch.Tensor, push: Push | None = None) -> torch.Tensor:
    """`function(x)` with its tangent, by `push`, or for a linear function by the function itself.

    Both are differentiable if the two functions are.
    """
    value, tangent = forward_ad.unpack_dual(x)
    assert tangent is not None
    found = function(value)
    return forward_ad.make_dual(found, function(tangent) if push is None else push(value, found, tangent))


def check_shards(what: str, tensors: Iterable[Any]) -> None:
    """`ShardingError` for plain tensors with which `what` can't be differentiated as it is asked to be."""
    if torch.compiler.is_compiling():
        raise ShardingError(
            f"{what} is in a compiled graph, which has neither forward-mode differentiation nor transforms of "
            "torch.func; call it without torch.compile there"
        )
    for x in tensors:
        if not isinstance(x, torch.Tensor):
            continue
        if torch_private.is_wrapped(x) or (torch_private.functorch_is_active() and _needs_gradient(x)):
            refuse_transform(what)
        if torch_private.may_have_tangents():
            tangent = forward_ad.unpack_dual(x).tangent
            if tangent is not None and torch_private.is_wrapped(tangent):
                refuse_transform(what)


def check_whole(what: str, tensors: Iterable[Any]) -> None:
    """`ShardingError` for tensors that have a tangent, or that a transform has wrapped.

    For DTensors, and for what becomes one: torch has no forward mode for them (2.13).
    """
    tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
    check_shards(what, tensors)
    for x in tensors:
        if has_tangent(x) or (isinstance(x, DTensor) and has_tangent(torch_private.local_of(x))):
            raise ShardingError(
                f"{what}: the tensor has a tangent, and DTensors have no forward-mode differentiation. Write "
                "torch.autograd.functional.jvp, which goes by backward; or open the dual level in a function that "
                "axes.shard_map runs, where tensors are plain"
            )


def check_dense(x: torch.Tensor, function: str) -> None:
    """`ShardingError` for a tensor that isn't one block of numbers: sparse, nested or quantized."""
    if is_dense(x):
        return
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        kind = "a nested one" if x.is_nested else "a quantized one" if x.is_quantized else f"one of layout {x.layout}"
        hint = ". Write x.to_dense()" if x.layout is not torch.strided and not x.is_nested else ""
        raise ShardingError(f"{function} takes a dense tensor; found {kind}{hint}")
    if not torch.compiler.is_compiling() and is_lazy(x):
        raise ShardingError(f"{function} takes a tensor; found a lazy parameter that has no shape yet")


def is_dense(x: object) -> bool:
    """Whether `x` is a tensor of torch's own class that `check_dense` takes: at most calls there is nothing to ask."""
    return type(x) in PLAIN and x.layout is _STRIDED and not x.is_nested and not x.is_quantized  # type: ignore[attr-defined]


def as_plain(x: torch.Tensor) -> torch.Tensor:
    """`x` without a class of the user's that changes nothing below autograd; its results would take that class."""
    if type(x) in PLAIN or type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return x
    return x.as_subclass(torch.Tensor)


def check_not_wrapped(what: str, x: object) -> None:
    """`ShardingError` where there is a DTensor inside of what a transform has wrapped."""
    if isinstance(x, torch.Tensor) and torch_private.is_wrapped_dtensor(x):
        refuse_transform(what)


def check_one(gradient: torch.Tensor) -> None:
    """`ShardingError` for a batch of gradients, which backward can't send as one."""
    if not torch.compiler.is_compiling() and torch_private.is_batch(gradient):
        raise ShardingError(torch_private.BATCH)


def refuse_transform(what: str) -> NoReturn:
    """The error of what is called inside a transform of `torch.func`."""
    raise ShardingError(
        f"{what} was called inside a transform of torch.func (grad, vjp, jvp, vmap, jacrev, jacfwd, hessian), which "
        "wraps tensors, and a collective sends only numbers. Write torch.autograd.grad, with create_graph=True where "
        "it is differentiated again, or torch.autograd.functional; instead of vmap, write a dim of its own"
    )


def _needs_gradient(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()
