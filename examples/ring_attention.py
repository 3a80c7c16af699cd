"""Ring attention: causal attention over a sequence that is split over ranks, exact, with gradients.

Each rank keeps its queries. Keys and values travel around the ring, one step for each rank, and what
a block of them adds is merged by an online softmax: the attention to several blocks is the mean of
the attentions to each, weighted by `exp(logsumexp)` of its scores. No rank ever holds the whole
sequence, nor a row of scores.

    rank 0   q0 q7    k0 k7  ->  k3 k4  ->  k2 k5  ->  k1 k6
    rank 1   q1 q6    k1 k6  ->  k0 k7  ->  k3 k4  ->  k2 k5
    rank 2   q2 q5    k2 k5  ->  k1 k6  ->  k0 k7  ->  k3 k4
    rank 3   q3 q4    k3 k4  ->  k2 k5  ->  k1 k6  ->  k0 k7

Under a causal mask the last part of a sequence has most to do, so each rank takes a part from the
front and one from the back (the zigzag order): then every rank computes half a block in every step.
A block that came from an earlier rank is seen by all queries, its early half alone; one from a later
rank is seen by the late queries, all of it.

The gradient is autograd's: `ppermute` sends the gradients of keys and values back around the ring.

    python examples/ring_attention.py --ranks 4

After Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (2023), and the zigzag order
of Zhu's ring-flash-attention.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from support import flag, largest, shown, too_many, verdict
from support import read_options as read_flags
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

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
    """The way back from the zigzag order."""
    parts = x.chunk(2, dim=-2)
    first, second = parts[::-1] if axes.axis_index("cp") % 2 else parts
    back = [[(target, source) for source, target in routes(i)] for i in range(2)]
    return torch.cat([axes.ppermute(p, "cp", perm=way) for p, way in zip((first, second), back, strict=True)], dim=-2)


def routes(half: int) -> list[tuple[int, int]]:
    """Where the first or second half of each rank's sequence goes: part p to rank p, or 2n-1-p."""
    size = axes.axis_size("cp")
    return [(i, min(2 * i + half, 2 * size - 1 - 2 * i - half)) for i in range(size)]


def compare(ranks: int, sequence: int, dtype: torch.dtype) -> dict[str, float]:
    """The largest distance to `scaled_dot_product_attention` on one device: result and gradients."""
    mesh = axes.init_mesh("cp", cp=ranks, device_type="cpu")
    generator = torch.Generator().manual_seed(0)
    q, k, v, weights = (torch.randn(2, 3, sequence, 16, generator=generator, dtype=dtype) for _ in range(4))
    shards = [axes.shard(x, "b h s@cp d", mesh=mesh).requires_grad_() for x in (q, k, v)]
    with CommDebugMode() as sent:
        out = ring_attention(*shards)
    (out * axes.shard(weights, "b h s@cp d", mesh=mesh)).sum().full_tensor().backward()

    leaves = [x.requires_grad_() for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*leaves, is_causal=True)
    (wanted * weights).sum().backward()
    found = {"out": axes.unshard(out) - wanted}
    found |= {f"d{name}": axes.unshard(x.grad) - y.grad for name, x, y in zip("qkv", shards, leaves, strict=True)}
    largest = {name: float(x.detach().abs().max()) for name, x in found.items()}
    return largest | {"collectives": sent.get_total_counts()}


# ---------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Options:
    """Causal attention around a ring of ranks."""

    ranks: int = flag(4, "local processes")
    sequence: int = flag(128, "a multiple of twice the ranks")


def what_is_wrong(options: Options) -> str | None:
    if options.sequence % (2 * options.ranks):
        return f"--sequence {options.sequence} isn't a multiple of twice --ranks {options.ranks}"
    return too_many(options.ranks)


read_options = partial(read_flags, "ring_attention.py", Options, what_is_wrong)


def main(arguments: list[str] | None = None) -> int:
    options = read_options(arguments)
    failed = 0
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-13)):
        off = largest(axes.launch(compare, options.ranks, options.ranks, options.sequence, dtype))
        sent = off.pop("collectives")
        print(f"{options.ranks} ranks, {str(dtype)[6:]}: {sent} collectives; distance to one device: {shown(off)}")
        failed |= verdict("ring_attention.py", off.values(), limit)
    return failed


if __name__ == "__main__":
    sys.exit(main())
