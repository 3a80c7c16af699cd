"""One autograd function for every map of tensors that is linear, or linear around its operands.

A call says what the map does and what its gradient goes through. The way back is differentiable
itself, since it is made of the same function; so are gradients of gradients.

>>> x = torch.ones(2, requires_grad=True)
>>> linear(lambda x: 3 * x, lambda g: 3 * g, x).sum().backward()
>>> x.grad.tolist()
[3.0, 3.0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError
from axes.runtime import torch_private
from axes.runtime.operation import PLAIN

Map = Callable[[torch.Tensor], torch.Tensor]
Kept = tuple[Any, ...]
"""What is kept for backward of the operands and the result: the tensor, or None."""

Border = Literal["argument", "result"] | None
"""`argument`: the map brings a tensor into a region; `result`: out of one, and other ranks may have copies of it."""


_BATCH = (
    "backward: found a batch of gradients, and a collective takes one. Leave out vectorize=True and "
    "is_grads_batched=True, and call torch.autograd.grad once for each"
)


class _Linear(torch.autograd.Function):
    """`run(*xs)`, with the gradient that `linear` says."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Any], back: Callable[..., Any], border: Border, keep: Sequence[bool], *xs: Any
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.back, ctx.border, ctx.keep = back, border, keep
        found = run(*xs)
        if any(keep):
            ctx.save_for_backward(*[x if kept else None for x, kept in zip((*xs, found), keep, strict=True)])
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        needed, first = ctx.needs_input_grad[4:], None
        for g in gradients:
            if g is not None and not torch.compiler.is_compiling() and torch_private.is_batch(g):
                raise ShardingError(_BATCH)
            first = g if first is None else first
        if first is None:
            return (None,) * (4 + len(needed))
        found = ctx.back(first, needed, ctx.saved_tensors) if ctx.keep else ctx.back(*gradients)
        return (None, None, None, None, *found) if isinstance(found, tuple) else (None, None, None, None, found)


NODE: Any = torch_private.node_of(_Linear)
"""The type of the nodes that maps leave in the graph; the `border` of each says where it stands."""


def linear(
    run: Callable[..., Any],
    back: Callable[..., Any],
    *xs: torch.Tensor,
    border: Border = None,
    keep: Sequence[bool] = (),
) -> Any:
    """`run(*xs)`, whose gradient is `back` of its gradient. Of several results that have none, `back` is given None.

    The gradient of a DTensor arrives in whatever sharding it has, whole, split or pending: a `back` that works on
    shards brings it where it needs it first, as by `axes.reshard(g, axes.sharding_of(y))`.

    keep: of a map that is linear around its operands, which its gradient depends on: which of them and of the result,
    in this order, `back(gradient, needed, kept)` is given. `needed` says which operands need a gradient.
    """
    for x in xs if torch.is_grad_enabled() else ():
        if x.requires_grad:
            return _Linear.apply(run, back, border, keep, *xs)
    return run(*xs)


def both_ways(run: Map, back: Map, x: torch.Tensor) -> torch.Tensor:
    """`run(x)` of a plain tensor, where each of the two maps is the gradient of the other."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return run(x)
    return linear(lambda x: writable(run(x), x), lambda g: both_ways(back, run, g), x)


# --- tensors that are written in place

# A graph keeps the version of each tensor that it saves, and backward refuses one that was written since. torch counts
# a write for the tensor that it is given, for that tensor's base and for the views of it. It doesn't count what a
# collective writes, and a write to the shard of a DTensor isn't one of the DTensor.


def count_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Count a write of each tensor, and of the shard of each DTensor.

    >>> x = torch.ones(2, requires_grad=True)
    >>> y = (x * x).sum()
    >>> count_writes([x])
    >>> y.backward()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation...
    """
    written = []
    for x in tensors:
        written.append(x)
        if isinstance(x, DTensor):
            written.append(torch_private.local_of(x))
    torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])


def writable(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What an autograd function gives for `x`, which may be written in place unless it is a view of `x`.

    torch refuses to write to a view that a function has made, though nobody else has the buffer of which it is one.
    """
    if torch.compiler.is_compiling() or (type(result) not in PLAIN and not isinstance(result, torch_private.UnderWay)):
        return torch_private.untied(result)
    if (
        type(result) in PLAIN
        and torch_private.has_base(result)
        and torch_private.memory_of(result) != torch_private.memory_of(x)
    ):
        return result.data
    return result
