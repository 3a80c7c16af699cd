"""The border between the local and the global view: where a DTensor becomes this rank's plain
tensor and back, and what its gradient is on the other side.

In the local view backward differentiates the sum of all ranks' losses, so a replicated value's
gradient is this rank's summand of it. In the global view there is one loss. Per axis:

| value | gradient into the global view (`to_local`) | gradient into the local view (`from_local`) |
| --- | --- | --- |
| split | split the same way | split the same way |
| replicated | pending sum of the ranks' summands | a summand: what is pending as it is, else 1/n |
| pending sum | replicated | replicated |
| pending mean | replicated, times n | replicated, by n |

>>> from torch.distributed.tensor import Partial, Replicate, Shard
>>> gradient_of_local([Shard(0), Replicate(), Partial("sum")])
(Shard(dim=0), Partial(sum), Replicate())

The rule is that of JAX's `shard_map` with replication tracking.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from axes.algebra.errors import ShardingError

Placements = tuple[Placement, ...]


def gradient_of_local(placements: Sequence[Placement]) -> Placements:
    """What the local gradients of `to_local` are, as one global value."""
    return tuple(
        Partial("sum") if p.is_replicate() else Replicate() if p.is_partial() else p for p in placements
    )


def leave_global(x: DTensor) -> torch.Tensor:
    """This rank's tensor of a DTensor, with the gradient rule of the border."""
    if not x.requires_grad:
        return x.to_local()
    local = x.to_local(grad_placements=gradient_of_local(x.placements))
    means = _sizes(x, lambda op: op == "avg" or op == "mean")
    if _sizes(x, lambda op: op in ("max", "min")) > 1:
        raise ShardingError(
            "a pending max or min has no gradient across the border; resolve it first, like "
            f"unshard, found {x.placements}"
        )
    return _scaled_gradient(local, means) if means > 1 else local


def enter_global(
    local: torch.Tensor, device_mesh: Any, placements: Placements, shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """The DTensor whose shard on this rank is `local`, with the gradient rule of the border."""
    if not (local.requires_grad and torch.is_grad_enabled()):
        return DTensor.from_local(local, device_mesh, placements, run_check=False, shape=shape, stride=stride)
    return _Enter.apply(local, device_mesh, placements, shape, stride)


def _sizes(x: DTensor, wanted: Any) -> int:
    """The product of the sizes of the axes over which a reduction that is `wanted` is pending."""
    pairs = zip(x.placements, x.device_mesh.shape, strict=True)
    return math.prod(size for p, size in pairs if isinstance(p, Partial) and wanted(p.reduce_op))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, device_mesh, placements, shape, stride):
        ctx.set_materialize_grads(False)
        ctx.placements, ctx.sizes = placements, tuple(device_mesh.shape)
        return DTensor.from_local(
            local.detach(), device_mesh, placements, run_check=False, shape=shape, stride=stride
        )

    @staticmethod
    def backward(ctx, cotangent):
        if cotangent is None:
            return None, None, None, None, None
        wanted, share = [], 1
        for placement, arrived, size in zip(ctx.placements, cotangent.placements, ctx.sizes, strict=True):
            summand = placement.is_replicate() and arrived.is_partial() and arrived.reduce_op == "sum"
            if placement.is_partial() and placement.reduce_op in ("max", "min") and size > 1:
                raise ShardingError(f"a pending {placement.reduce_op} has no gradient across the border; resolve it first")
            wanted.append(arrived if summand else Replicate() if placement.is_partial() else placement)
            mean = placement.is_partial() and placement.reduce_op == "avg"
            share *= size if mean or (placement.is_replicate() and not summand) else 1
        local = cotangent.redistribute(placements=wanted).to_local()
        return local / share if share > 1 else local, None, None, None, None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def _scaled_gradient(x: torch.Tensor, factor: int) -> torch.Tensor:
    """`x`, whose gradient is multiplied by `factor` on the way back."""
    return _ScaledGradient.apply(x, factor)


@functools.lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    found, stride = [], 1
    for extent in reversed(shape):
        found.append(stride)
        stride *= max(1, extent)
    return tuple(reversed(found))
