"""A transformer block as Megatron splits it, in six expressions.

Tensor parallel with sequence parallel. Between the parts of a block, each rank of `tp` has its part
of the sequence (`s@tp`); inside attention its heads (`h@tp`); inside the MLP its hidden units
(`f@tp`). The sequence is the first dim, `s b d`, because gathered parts are then contiguous in memory.

    "s@tp b d -> s b d"                                      all-gather
    "s b d, (qkv h@tp k) d -> qkv b h@tp s k"                product, and views: q, k and v apart
    "b h@tp s k, d (h@tp k) -> s@tp b d"                     product, reduce-scatter
    "s@tp b d -> s b d"                                      all-gather
    "s b d, f@tp d -> s b f@tp"                              product
    "s b f@tp, d f@tp -> s@tp b d"                           product, reduce-scatter

    python examples/megatron_block.py

compares with one device. `make bench` compares its speed with the same block written by hand. After
Korthikanti and others, "Reducing Activation Recomputation in Large Transformer Models" (2022).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from support import Compared, compared, report
from torch import Tensor

import axes

HEAD_DIM = 32

SPECS = {
    "norm1": "d",
    "qkv": f"(qkv=3 h@tp k={HEAD_DIM}) d",  # queries, keys and values in one matrix, each split by heads
    "out": f"d (h@tp k={HEAD_DIM})",
    "norm2": "d",
    "up": "f@tp d",
    "down": "d f@tp",
}
ACTIVATIONS = "s@tp b d"


def norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.rms_norm(x, scale.shape, scale)


def attend(qkv: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*qkv, is_causal=True)


# `shard_map` makes functions of DTensors: each rank computes the norm of its positions, the attention of its heads.
norm_of_dtensors = axes.shard_map("s@tp b d, d -> s@tp b d")(norm)
attend_of_dtensors = axes.shard_map("qkv b h@tp s k -> b h@tp s k")(attend)


def block(
    x: Tensor,
    w: dict[str, Tensor],
    norm: Callable[[Tensor, Tensor], Tensor] = norm_of_dtensors,
    attend: Callable[[Tensor], Tensor] = attend_of_dtensors,
) -> Tensor:
    """Attention and MLP of `sequence batch width`; `tp` splits the sequence."""
    h = axes.rearrange(norm(x, w["norm1"]), "s@tp b d -> s b d")
    qkv = axes.einsum(h, w["qkv"], "s b d, (qkv h@tp k) d -> qkv b h@tp s k", qkv=3, k=HEAD_DIM)
    x = x + axes.einsum(attend(qkv), w["out"], "b h@tp s k, d (h@tp k) -> s@tp b d")
    h = axes.rearrange(norm(x, w["norm2"]), "s@tp b d -> s b d")
    h = F.gelu(axes.einsum(h, w["up"], "s b d, f@tp d -> s b f@tp"))
    return x + axes.einsum(h, w["down"], "s b f@tp, d f@tp -> s@tp b d")


def on_one_device(x: Tensor, *weights: Tensor) -> Tensor:
    """The block on whole tensors."""
    norm1, qkv, out, norm2, up, down = weights
    heads = attend(F.linear(norm(x, norm1), qkv).unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 1, 3, 0, 4))
    x = x + F.linear(heads.permute(2, 0, 1, 3).flatten(2), out)
    return x + F.linear(F.gelu(F.linear(norm(x, norm2), up)), down)


def shapes(width: int, heads: int) -> dict[str, list[int]]:
    """The whole shape of each weight."""
    inner, hidden = heads * HEAD_DIM, 4 * width
    found = {"norm1": [width], "qkv": [3 * inner, width], "out": [width, inner], "norm2": [width]}
    return found | {"up": [hidden, width], "down": [width, hidden]}


def compare(ranks: int, width: int, heads: int, sequence: int) -> Compared:
    """Each rank: result, gradients and collectives."""
    mesh = axes.init_mesh("tp", tp=ranks, device_type="cpu")
    torch.manual_seed(0)
    x, cotangent = torch.randn(2, sequence, 2, width)
    weights = {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes(width, heads).items()}
    inputs = {"x": (x, ACTIVATIONS, mesh)} | {name: (w, SPECS[name], mesh) for name, w in weights.items()}
    return compared(lambda x, *w: block(x, dict(zip(SPECS, w, strict=True))), on_one_device, inputs, cotangent)


if __name__ == "__main__":
    sys.exit(report("megatron_block.py", axes.launch(compare, 4, 4, 256, 8, 256), limit=1e-4))
