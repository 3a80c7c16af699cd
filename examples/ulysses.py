"""Ulysses: attention over a sequence that is split over ranks, by two rearranges.

A head of attention needs the whole sequence, and no other head. So the ranks of `cp` exchange: each
gives its part of the sequence, with all heads, and gets its part of the heads, with the whole sequence.
After attention they exchange back. Each exchange is one all-to-all.

            b s@cp (h d)                    b h@cp s d
    rank 0  s = 0 1   h = 0 1 2 3           s = 0 1 2 3 4 5 6 7   h = 0
    rank 1  s = 2 3   h = 0 1 2 3     ->    s = 0 1 2 3 4 5 6 7   h = 1
    rank 2  s = 4 5   h = 0 1 2 3     <-    s = 0 1 2 3 4 5 6 7   h = 2
    rank 3  s = 6 7   h = 0 1 2 3           s = 0 1 2 3 4 5 6 7   h = 3

    python examples/ulysses.py

compares with `scaled_dot_product_attention` on one device. After Jacobs and others, "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from support import Compared, compared, report
from torch import Tensor

import axes

HEAD_DIM = 16


def ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of `batch sequence (heads head_dim)`; `cp` splits the sequence.

    As in einops, a list of tensors is one tensor with a new first dim: q, k and v travel together. Heads
    that `tp` already splits are split further: `h@(* cp)` is their old sharding, and then `cp`.
    """
    qkv = axes.rearrange([q, k, v], "qkv b s@cp (h d) -> qkv b h@(* cp) s d", d=HEAD_DIM)
    return axes.rearrange(attention(qkv), "b h@(* cp) s d -> b s@cp (h@* d)")


@axes.shard_map("qkv b h s d -> b h s d")
def attention(qkv: Tensor) -> Tensor:
    """Each rank computes its heads on plain tensors. A dim without an `@` keeps the sharding that it has."""
    return F.scaled_dot_product_attention(*qkv, is_causal=True)


def on_one_device(*qkv: Tensor) -> Tensor:
    q, k, v = (axes.rearrange(x, "b s (h d) -> b h s d", d=HEAD_DIM) for x in qkv)
    return axes.rearrange(F.scaled_dot_product_attention(q, k, v, is_causal=True), "b h s d -> b s (h d)")


def compare(cp: int, tp: int, sequence: int) -> Compared:
    """Each rank: result, gradients and collectives, of eight heads."""
    mesh = axes.init_mesh("cp tp", cp=cp, tp=tp, device_type="cpu")
    torch.manual_seed(0)
    q, k, v, cotangent = torch.randn(4, 2, sequence, 8 * HEAD_DIM)
    inputs = {name: (x, f"b s@cp (h@tp d={HEAD_DIM})", mesh) for name, x in zip("qkv", (q, k, v), strict=True)}
    return compared(ulysses, on_one_device, inputs, cotangent)


if __name__ == "__main__":
    sys.exit(report("ulysses.py", axes.launch(compare, 4, 2, 2, 64)))
