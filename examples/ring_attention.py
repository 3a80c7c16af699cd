"""Ring attention: causal attention over a sequence that is split over ranks, exact, with gradients.

Each rank keeps its queries. Keys and values travel around the ring, one step for each rank. An online
softmax merges the blocks: the attention to several blocks is the mean of the attentions to each, weighted
by `exp(logsumexp)` of its scores. No rank holds the whole sequence, or a whole row of scores.

    rank 0   q0 q7    k0 k7  ->  k3 k4  ->  k2 k5  ->  k1 k6
    rank 1   q1 q6    k1 k6  ->  k0 k7  ->  k3 k4  ->  k2 k5
    rank 2   q2 q5    k2 k5  ->  k1 k6  ->  k0 k7  ->  k3 k4
    rank 3   q3 q4    k3 k4  ->  k2 k5  ->  k1 k6  ->  k0 k7

Under a causal mask the late positions have the most work. So each rank takes a part from the front and one
from the back (the zigzag order), and every rank computes half a block in every step. All queries of a rank
see the early half of a block from an earlier rank. Its late queries alone see a block from a later rank,
and see all of it.

The gradient is autograd's: `ppermute` sends the gradients of keys and values back around the ring.

    python examples/ring_attention.py

After Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (2023), and the zigzag order
of Zhu's ring-flash-attention.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from support import Compared, compared, report
from torch import Tensor

import axes


@axes.shard_map("b h s@cp d, b h s@cp d, b h s@cp d -> b h s@cp d")
def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of `batch head sequence head_dim`; the sequence is split over `cp`."""
    size, index = axes.axis_size("cp"), axes.axis_index("cp")
    q, *kv = zigzag(torch.stack((q, k, v)))
    kv = torch.stack(kv)
    half = q.shape[-2] // 2
    out, weight = attend(q, *kv, causal=True)
    for step in range(1, size):
        kv = axes.ppermute(kv, "cp", shift=1)
        if (index - step) % size < index:
            out, weight = merged(out, weight, *attend(q, *kv[..., :half, :]))
        else:
            late = merged(out[..., half:, :], weight[..., half:, :], *attend(q[..., half:, :], *kv))
            out, weight = (torch.cat((x[..., :half, :], y), -2) for x, y in zip((out, weight), late, strict=True))
    return straight(out)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """The attention of some queries to some keys, and the logarithm of what its weights sum to."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    weight = scores.logsumexp(-1, keepdim=True)
    return (scores - weight).exp() @ v, weight


def merged(out: Tensor, weight: Tensor, more: Tensor, its_weight: Tensor) -> tuple[Tensor, Tensor]:
    """The attention to two disjoint sets of keys, from the attentions to each."""
    total = torch.logaddexp(weight, its_weight)
    return out * (weight - total).exp() + more * (its_weight - total).exp(), total


def zigzag(x: Tensor) -> Tensor:
    """From parts `2i, 2i+1` of the sequence on rank i to parts `i, 2n-1-i`."""
    first, second = x.chunk(2, dim=-2)
    parts = [axes.ppermute(first, "cp", perm=routes(0)), axes.ppermute(second, "cp", perm=routes(1))]
    return torch.cat(parts[::-1] if axes.axis_index("cp") % 2 else parts, dim=-2)


def straight(x: Tensor) -> Tensor:
    """The inverse of `zigzag`."""
    parts = x.chunk(2, dim=-2)
    first, second = parts[::-1] if axes.axis_index("cp") % 2 else parts
    back = [[(target, source) for source, target in routes(i)] for i in range(2)]
    return torch.cat([axes.ppermute(p, "cp", perm=perm) for p, perm in zip((first, second), back, strict=True)], dim=-2)


def routes(half: int) -> list[tuple[int, int]]:
    """Where the first or second half of each rank's sequence goes: part p to rank p, or 2n-1-p."""
    size = axes.axis_size("cp")
    return [(i, min(2 * i + half, 2 * size - 1 - 2 * i - half)) for i in range(size)]


def on_one_device(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def compare(ranks: int, sequence: int, dtype: torch.dtype) -> Compared:
    """Each rank: result, gradients and collectives. The sequence is a multiple of twice the ranks."""
    mesh = axes.init_mesh("cp", cp=ranks, device_type="cpu")
    torch.manual_seed(0)
    q, k, v, cotangent = torch.randn(4, 2, 3, sequence, 16, dtype=dtype)
    inputs = {name: (x, "b h s@cp d", mesh) for name, x in zip("qkv", (q, k, v), strict=True)}
    return compared(ring_attention, on_one_device, inputs, cotangent)


if __name__ == "__main__":
    sys.exit(report("ring_attention.py", axes.launch(compare, 4, 4, 128, torch.float64), limit=1e-13))
