"""Tensors that a collective can't send as they are: of forward mode, of the transforms of `torch.func`, sparse ones.

A collective sends the numbers of a tensor. It sees neither the tangent that `torch.autograd.forward_ad`
keeps beside them nor what `torch.func.grad` or `vmap` wraps around them, so every door is closed while one of these is
on, before anything is sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from axes.algebra.errors import ShardingError
from axes.runtime import torch_private

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of tensors that aren't part of a graph that is being traced. (To ask whether one of these is a DTensor
takes five times as long as to see that its type is among them.)"""

_STRIDED = torch.strided


def check_transforms(what: str) -> None:
    """`ShardingError` in forward mode, and inside a transform of `torch.func`."""
    if torch_private.transforms_are_on():
        raise ShardingError(
            f"{what} was called in forward-mode differentiation, or inside a transform of torch.func (grad, vjp, jvp, "
            "vmap, jacrev, jacfwd, hessian), where a tensor is more than its numbers, and a collective sends only "
            "these. Write torch.autograd.grad, with create_graph=True where it is differentiated again, or "
            "torch.autograd.functional, whose jvp goes by backward; instead of vmap, write a dim of its own"
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


def check_plain(function: str, x: Any, instead: str) -> None:
    """`ShardingError` for what isn't a plain tensor that a collective can send; `instead` is advice for a DTensor."""
    if not is_dense(x):
        if isinstance(x, DTensor):
            raise ShardingError(f"{function} takes this rank's plain tensor; found a DTensor. {instead}")
        if not isinstance(x, torch.Tensor):
            raise ShardingError(f"{function} takes a tensor; found {type(x).__name__}")
        check_dense(x, function)
    check_transforms(function)


def is_dense(x: object) -> bool:
    """Whether `x` is a tensor of torch's own class that `check_dense` takes: at most calls there is nothing to ask."""
    return type(x) in PLAIN and x.layout is _STRIDED and not x.is_nested and not x.is_quantized  # type: ignore[attr-defined]


def as_plain(x: torch.Tensor) -> torch.Tensor:
    """`x` without a class of the user's that changes nothing below autograd; its results would take that class."""
    if type(x) in PLAIN or type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return x
    return x.as_subclass(torch.Tensor)
