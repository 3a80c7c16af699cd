"""A mixture of experts: ranks that split tokens in one way split experts in another.

Dense layers see the ranks as `dp_shard cp tp`, and the tokens are split over all of them. Experts
see the same ranks as `efsdp ep`, another factorization, which is one equation:

    axes.init_mesh("dp_shard cp tp", "(dp_shard cp tp) = efsdp ep")

A rank has the experts of its coordinate on `ep`; their matrices are split over `efsdp`, and
gathered where they are used. A router chooses experts for each token. One all-to-all over `ep`
takes the tokens to their experts, and a second one takes the results back:

                rank 0     rank 1
    tokens      t0 t1 t2   t3 t4 t5
    chosen      e1 e0 e1   e0 e0 e1
    dispatch    t1 t3 t4   t0 t2 t5        rank 0 has e0, rank 1 has e1
    combine     y0 y1 y2   y3 y4 y5

How many tokens choose an expert is known only once they have chosen. Two ways to live with it:

- with a *capacity*, an expert takes so many tokens of each rank, and the others are dropped. Then
  every rank sends as much, and both exchanges are expressions: `"e c@ep d -> e@ep c d"` and back;
- *dropless*, ranks first tell each other how many tokens they will send, in a small all-to-all. With these
  as `send_sizes` and `recv_sizes`, `axes.all_to_all` takes as many as there are, and nothing is padded.

    python examples/moe.py --dp-shard 4 --tp 2 --ep 4

compares both with one process that computes every expert for every token, gradients included. After
Lepikhin and others, "GShard" (2020), and Gale and others, "MegaBlocks" (2022).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from support import compared, flag, in_words, largest, shown, too_many, undeclared, verdict
from support import read_options as read_flags
from torch import Tensor

import axes

DECLARATION = "dp_shard cp tp", "(dp_shard cp tp) = efsdp ep"

CHOICES = 2  # experts that each token is sent to

BATCH, WIDTH, HIDDEN = 8, 16, 32
LIMIT = 1e-5

# What the region below takes and gives: tokens, the router, and two matrices of each expert.
TOKENS, ROUTER, UP, DOWN = "b@dp_shard s@(cp tp) d", "d e", "e@ep d@efsdp f", "e@ep f@efsdp d"


def experts_layer(exchange: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The layer as a function of DTensors. Inside the region, tensors are this rank's plain shards."""

    @axes.shard_map(f"{TOKENS}, {ROUTER}, {UP}, {DOWN} -> {TOKENS}")
    def layer(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
        up = axes.rearrange(up, "e d@efsdp f -> e d f", d=WIDTH)
        down = axes.rearrange(down, "e f@efsdp d -> e f d", f=HIDDEN)
        tokens = x.flatten(0, 1)
        chosen = choose(tokens, router)
        return exchange(tokens, chosen, up, down).view_as(x)

    return layer


class Chosen(NamedTuple):
    """Choices, `CHOICES` for each token, in the order of experts: token, expert, and what it counts."""

    token: Tensor
    expert: Tensor
    weight: Tensor


def choose(x: Tensor, router: Tensor) -> Chosen:
    """Each token chooses the experts with the highest probability, and weighs them by it."""
    weight, expert = (x @ router).softmax(-1).topk(CHOICES)
    expert, order = expert.flatten().sort(stable=True)
    return Chosen(order // CHOICES, expert, weight.flatten()[order])


def computed(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """An expert's tokens through its two matrices; with one more dim in each, those of several experts."""
    return F.gelu(x @ up) @ down


def combined(x: Tensor, chosen: Chosen, results: Tensor) -> Tensor:
    """For each token of `x` the weighted sum of the results of its choices."""
    return torch.zeros_like(x).index_add(0, chosen.token, results * chosen.weight[:, None])


def places(ids: Tensor) -> Tensor:
    """0, 1, 2, ... within each run of equal numbers, where `ids` are in order."""
    count = ids.bincount()
    return torch.arange(len(ids), device=ids.device) - (count.cumsum(0) - count)[ids]


def with_capacity(x: Tensor, chosen: Chosen, up: Tensor, down: Tensor, capacity: int) -> Tensor:
    """Each expert has `capacity` slots for tokens of this rank. A choice that finds none is dropped."""
    place = places(chosen.expert)
    kept = place < capacity
    chosen, place = Chosen(*(each[kept] for each in chosen)), place[kept]

    slots = x.new_zeros(len(up) * axes.axis_size("ep"), capacity, x.shape[-1])
    slots[chosen.expert, place] = x[chosen.token]
    slots = axes.rearrange(slots, "e c@ep d -> e@ep c d")  # dispatch
    slots = computed(slots, up, down)
    slots = axes.rearrange(slots, "e@ep c d -> e c@ep d")  # combine
    return combined(x, chosen, slots[chosen.expert, place])


def dropless(x: Tensor, chosen: Chosen, up: Tensor, down: Tensor) -> Tensor:
    """Each rank sends each other rank as many tokens as there are, and no token is dropped."""
    ranks, here = axes.axis_size("ep"), len(up)
    leaving = chosen.expert.bincount(minlength=ranks * here).view(ranks, here)  # [to, expert there]
    arriving = axes.all_to_all(leaving, "ep")  # [from, expert here]
    to, of = leaving.sum(1).tolist(), arriving.sum(1).tolist()

    arrived = axes.all_to_all(x[chosen.token], "ep", send_sizes=to, recv_sizes=of)  # dispatch
    expert = torch.arange(here, device=x.device).repeat(ranks).repeat_interleave(arriving.flatten())
    results = torch.zeros_like(arrived)
    for i in range(here):
        results[expert == i] = computed(arrived[expert == i], up[i], down[i])
    return combined(x, chosen, axes.all_to_all(results, "ep", send_sizes=of, recv_sizes=to))  # combine


# ------------------------------------------------------------------------------------ comparison


def on_one_device(
    x: Tensor, router: Tensor, up: Tensor, down: Tensor, capacity: int | None, parts: list[tuple]
) -> tuple[Tensor, int]:
    """What is right, and how many choices are dropped: all experts for all tokens, most times zero.

    With a capacity, an expert takes the first tokens that chose it of each of the `parts` of `x`.
    """
    probabilities = (x @ router).softmax(-1)
    best = probabilities.topk(CHOICES).indices
    weight = torch.zeros_like(probabilities).scatter(-1, best, probabilities.gather(-1, best))
    kept = wanted = weight > 0
    if capacity is not None:
        kept = torch.zeros_like(wanted)
        for part in parts:
            earlier = wanted[part].flatten(0, 1).cumsum(0).view_as(wanted[part])
            kept[part] = wanted[part] & (earlier <= capacity)
    hidden = F.gelu(axes.einsum(x, up, "b s d, e d f -> b s e f"))
    out = axes.einsum(hidden, down, weight * kept, "b s e f, e f d, b s e -> b s d")
    return out, int(wanted.sum() - kept.sum())


class Found(NamedTuple):
    """How far it is from one device, what it sends each way, and how many choices were dropped."""

    distance: dict[str, float]
    forward: dict[str, int]
    backward: dict[str, int]
    dropped: int


def compare(
    sizes: dict[str, int], experts: int, sequence: int, factor: float, dtype: torch.dtype = torch.float32
) -> dict[str, Found]:
    """Both variants against one device. A capacity is `factor` times what a rank would have if all were even."""
    mesh = axes.init_mesh(*DECLARATION, device_type="cpu", **sizes)
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    x, cotangent = numbers(2, BATCH, sequence, WIDTH)
    up, down = numbers(experts, WIDTH, HIDDEN) / WIDTH**0.5, numbers(experts, HIDDEN, WIDTH) / HIDDEN**0.5
    wholes = x, numbers(WIDTH, experts), up, down
    capacity = math.ceil(factor * CHOICES * BATCH * sequence / mesh.size / experts)
    parts = [mesh.sharding(TOKENS).local_indices(tuple(x.shape), rank) for rank in range(mesh.size)]
    # Tokens and router lie on the mesh of the dense layers, the experts' matrices on their own.
    sparse = mesh["efsdp", "ep"]
    specs = {"x": (TOKENS, mesh), "router": (ROUTER, mesh), "up": (UP, sparse), "down": (DOWN, sparse)}
    inputs = {name: (whole, *spec) for whole, (name, spec) in zip(wholes, specs.items(), strict=True)}

    def found(exchange: Callable[..., Tensor], capacity: int | None) -> Found:
        one = partial(on_one_device, capacity=capacity, parts=parts)
        with mesh:
            against = compared(experts_layer(exchange), lambda *x: one(*x)[0], inputs, cotangent)
        return Found(*against, dropped=one(*wholes)[1])

    return {"capacity": found(partial(with_capacity, capacity=capacity), capacity), "dropless": found(dropless, None)}


# ---------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Options:
    """A mixture of experts on a mesh with two factorizations."""

    dp_shard: int = flag(4, "ranks that share a batch")
    cp: int = flag(1, "ranks that share a sequence")
    tp: int = flag(2, "ranks that share it further")
    ep: int = flag(4, "ranks that share the experts")
    experts: int = flag(8, "a multiple of --ep")
    sequence: int = flag(16, "tokens of a sample")
    factor: float = flag(1.0, "of the capacity: 1 suits tokens that spread evenly")

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("dp_shard", "cp", "tp", "ep")}

    @property
    def ranks(self) -> int:
        return self.dp_shard * self.cp * self.tp


def what_is_wrong(options: Options) -> str | None:
    if wrong := too_many(options.ranks) or undeclared(DECLARATION, None, options.sizes):
        return wrong
    if options.experts < CHOICES or options.experts % options.ep:
        return f"--experts {options.experts} isn't a multiple of --ep {options.ep}, or fewer than {CHOICES}"
    return None


read_options = partial(read_flags, "moe.py", Options, what_is_wrong)


def main(arguments: list[str] | None = None) -> int:
    options = read_options(arguments)
    every = axes.launch(compare, options.ranks, options.sizes, options.experts, options.sequence, options.factor)
    distances: list[float] = []
    for variant, found in every[0].items():
        off = largest(each[variant].distance for each in every)
        print(f"{variant}: {found.dropped} choices of {CHOICES * BATCH * options.sequence} dropped")
        print(f"  forward   {in_words(found.forward)}\n  backward  {in_words(found.backward)}")
        print(f"  distance to one device: {shown(off)}")
        distances += off.values()
    return verdict("moe.py", distances, LIMIT)


if __name__ == "__main__":
    sys.exit(main())
