"""Ulysses: attention over a sequence that is split over ranks, by two rearranges.

A head of attention needs the whole sequence, and nothing of the other heads. So each rank trades
its part of the sequence, with all heads, for its part of the heads, with the whole sequence; and
back when attention is done. Each way is one all-to-all.

            b s@cp (h d)                    b h@cp s d
    rank 0  s = 0 1   h = 0 1 2 3           s = 0 1 2 3 4 5 6 7   h = 0
    rank 1  s = 2 3   h = 0 1 2 3     ->    s = 0 1 2 3 4 5 6 7   h = 1
    rank 2  s = 4 5   h = 0 1 2 3     <-    s = 0 1 2 3 4 5 6 7   h = 2
    rank 3  s = 6 7   h = 0 1 2 3           s = 0 1 2 3 4 5 6 7   h = 3

Heads that `tp` splits already are split further: `h@(* cp)` is "as it was, and then over cp".

    python examples/ulysses.py --cp 2 --tp 2

compares with `scaled_dot_product_attention` on one device, gradients included, in both views: on
DTensors, and on plain tensors that hold this rank's shard. After Jacobs and others, "DeepSpeed
Ulysses" (2023).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from support import flag, largest, shown, too_many, verdict
from support import read_options as read_flags
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes

HEAD_DIM = 16
LIMIT = 1e-5


def ulysses(q: Tensor, k: Tensor, v: Tensor, attend: Callable[[Tensor], Tensor], sequence: int) -> Tensor:
    """Causal attention of `batch sequence (heads head_dim)`, whose sequence is split over `cp`.

    Plain shards don't tell the whole `sequence`. As in einops, a list of tensors is one with a new first dim: q, k and
    v travel together.
    """
    qkv = axes.rearrange([q, k, v], "qkv b s@cp (h d) -> qkv b h@(* cp) s d", d=HEAD_DIM, s=sequence)
    mixed = attend(qkv)
    return axes.rearrange(mixed, "b h@(* cp) s d -> b s@cp (h@* d)")


def attention(qkv: Tensor) -> Tensor:
    """What each rank does with its heads, on plain tensors: `qkv batch head sequence head_dim`."""
    return F.scaled_dot_product_attention(*qkv, is_causal=True)


# The same for DTensors. Nothing has an `@` here, so that heads stay split as they come.
attention_of_shards = axes.shard_map("qkv b h s d -> b h s d")(attention)


def on_one_device(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is right: the same on whole tensors, by einops alone."""
    qkv = axes.rearrange([q, k, v], "qkv b s (h d) -> qkv b h s d", d=HEAD_DIM)
    return axes.rearrange(attention(qkv), "b h s d -> b s (h d)")


def compare(
    cp: int, tp: int, sequence: int, heads: int, dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, float]]:
    """For each view: the collectives it sent, and how far result and gradients are from one device's."""
    mesh = axes.init_mesh("cp tp", cp=cp, tp=tp, device_type="cpu")
    generator = torch.Generator().manual_seed(0)
    shape = (2, sequence, heads * HEAD_DIM)
    *inputs, cotangent = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(4))
    wanted = results(on_one_device, inputs, cotangent)

    def shard(x: Tensor) -> DTensor:
        return axes.shard(x, "b s@cp (h@tp d)", mesh=mesh, d=HEAD_DIM)

    def plain(x: Tensor) -> Tensor:
        return axes.to_local(shard(x))

    found = {}
    for view, part, attend in ("DTensors", shard, attention_of_shards), ("plain shards", plain, attention):
        with mesh, CommDebugMode() as sent:  # plain tensors know no mesh: `with mesh:` says which
            fn = partial(ulysses, attend=attend, sequence=sequence)
            values = results(fn, [part(x) for x in inputs], part(cotangent))
        found[view] = {name: distance(x, part(wanted[name])) for name, x in values.items()}
        found[view]["collectives"] = sent.get_total_counts()
    return found


def results(fn: Callable[..., Tensor], inputs: list[Tensor], cotangent: Tensor) -> dict[str, Tensor]:
    """The value of a function of q, k and v, and its gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    out.backward(cotangent)
    return {"out": out.detach()} | {f"d{name}": x.grad for name, x in zip("qkv", leaves, strict=True)}


def distance(x: Tensor, wanted: Tensor) -> float:
    """The largest difference between two tensors that are sharded alike, on this rank."""
    x, wanted = (axes.to_local(each) if isinstance(each, DTensor) else each for each in (x, wanted))
    return float((x - wanted).abs().max()) if x.numel() else 0.0


# ---------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Options:
    """Context-parallel attention by two rearranges."""

    cp: int = flag(2, "ranks that share a sequence")
    tp: int = flag(2, "ranks that share the heads from the start")
    sequence: int = flag(64, "positions")
    heads: int = flag(8, "attention heads, a multiple of cp times tp")


def what_is_wrong(options: Options) -> str | None:
    ranks = options.cp * options.tp
    if too_many(ranks):
        return too_many(ranks)
    if options.heads % ranks:
        wanted = f"a multiple of --cp {options.cp} times --tp {options.tp}"
        return f"--heads {options.heads} isn't {wanted}: a rank has whole heads"
    return None


read_options = partial(read_flags, "ulysses.py", Options, what_is_wrong)


def main(arguments: list[str] | None = None) -> int:
    options = read_options(arguments)
    every = axes.launch(compare, options.cp * options.tp, options.cp, options.tp, options.sequence, options.heads)
    distances: list[float] = []
    for view in every[0]:
        off = largest(each[view] for each in every)
        sent = off.pop("collectives")
        print(f"{len(every)} ranks, {view}: {sent} collectives; distance to one device: {shown(off)}")
        distances += off.values()
    return verdict("ulysses.py", distances, LIMIT)


if __name__ == "__main__":
    sys.exit(main())
