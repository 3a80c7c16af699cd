"""The peer of examples/megatron_block.py: the same block by autograd functions around `torch.distributed`.

As in Megatron-LM, whose names for two of them stand beside them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# torch 2.13 has new names for these two, and warns of the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    all_gather(out, x.contiguous(), group=group)
    return out


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    reduce_scatter(out, x.contiguous(), group=group)
    return out


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


class Gather(torch.autograd.Function):
    """The sequence of all ranks; backward the sum of what they say of this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return scattered(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    """This rank's part of the sum over the ranks; backward every rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient, ctx.group), None


class SumOfGradients(torch.autograd.Function):
    """Megatron's f: nothing; backward the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class Sum(torch.autograd.Function):
    """Megatron's g: the sum over the ranks; backward nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.rms_norm(x, scale.shape, scale)


def block_by_hand(x: Tensor, w: dict[str, Tensor], group: dist.ProcessGroup, head_dim: int) -> Tensor:
    """The block of megatron_block.py on this rank's plain tensors."""
    h = Gather.apply(norm(x, SumOfGradients.apply(w["norm1"], group)), group)
    qkv = F.linear(h, w["qkv"]).unflatten(-1, (3, -1, head_dim)).permute(2, 1, 3, 0, 4)
    heads = F.scaled_dot_product_attention(*qkv, is_causal=True).permute(2, 0, 1, 3).flatten(2)
    x = x + Scatter.apply(F.linear(heads, w["out"]), group)
    h = Gather.apply(norm(x, SumOfGradients.apply(w["norm2"], group)), group)
    h = F.gelu(F.linear(h, w["up"]))
    return x + Scatter.apply(F.linear(h, w["down"]), group)


def loss_by_hand(y: Tensor, wanted: Tensor, group: dist.ProcessGroup) -> Tensor:
    return Sum.apply(((y - wanted) ** 2).mean() / group.size(), group)
