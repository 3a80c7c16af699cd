"""A mixture of experts: the same ranks are factorized in one way for tokens, in another for experts.

Dense layers see the ranks as `dp_shard cp tp`, and the tokens are split over all three. Experts
see the same ranks as `efsdp ep`. One equation declares this second factorization:

    axes.init_mesh("dp_shard cp tp", "(dp_shard cp tp) = efsdp ep")

A rank has the experts of its coordinate on `ep`. Their matrices are split over `efsdp`, and
gathered before use. A router chooses experts for each token. One all-to-all over `ep`
takes the tokens to their experts, and a second one takes the results back:

                rank 0     rank 1
    tokens      t0 t1 t2   t3 t4 t5
    chosen      e1 e0 e1   e0 e0 e1
    dispatch    t1 t3 t4   t0 t2 t5        rank 0 has e0, rank 1 has e1
    combine     y0 y1 y2   y3 y4 y5

The number of tokens of an expert is known only after the router has chosen. There are two variants:

- with a *capacity*, an expert takes a fixed number of tokens from each rank, and drops the others. Then
  all messages have the same size, and both exchanges are expressions: `"e c@ep d -> e@ep c d"` and back;
- *dropless*, ranks first tell each other how many tokens they will send, in a small all-to-all. With these
  numbers as `send_sizes` and `recv_sizes`, `axes.all_to_all` moves all tokens, without padding.

    python examples/moe.py

compares both with one device that computes every expert for every token. After
Lepikhin and others, "GShard" (2020), and Gale and others, "MegaBlocks" (2022).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from support import Compared, compared, report
from torch import Tensor

import axes

DECLARATION = "dp_shard cp tp", "(dp_shard cp tp) = efsdp ep"

CHOICES = 2  # experts that each token is sent to

BATCH, WIDTH, HIDDEN = 8, 16, 32

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
) -> Tensor:
    """All experts for all tokens, with zero as the weight of each expert that a token didn't choose.

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
    return axes.einsum(hidden, down, weight * kept, "b s e f, e f d, b s e -> b s d")


def compare(
    sizes: dict[str, int], experts: int, sequence: int, factor: float, dtype: torch.dtype = torch.float32
) -> list[Compared]:
    """Both variants on each rank. The capacity is `factor` times a rank's even share of the choices of an expert."""
    mesh = axes.init_mesh(*DECLARATION, device_type="cpu", **sizes)
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    x, cotangent = numbers(2, BATCH, sequence, WIDTH)
    up, down = numbers(experts, WIDTH, HIDDEN) / WIDTH**0.5, numbers(experts, HIDDEN, WIDTH) / HIDDEN**0.5
    even = math.ceil(factor * CHOICES * BATCH * sequence / mesh.size / experts)
    parts = [mesh.sharding(TOKENS).local_indices(tuple(x.shape), rank) for rank in range(mesh.size)]
    sparse = mesh["efsdp", "ep"]  # the mesh of the experts' matrices
    inputs = {"x": (x, TOKENS, mesh), "router": (numbers(WIDTH, experts), ROUTER, mesh)}
    inputs |= {"up": (up, UP, sparse), "down": (down, DOWN, sparse)}
    found = []
    for capacity in (even, None):
        exchange = dropless if capacity is None else partial(with_capacity, capacity=capacity)
        one = partial(on_one_device, capacity=capacity, parts=parts)
        with mesh:
            found.append(compared(experts_layer(exchange), one, inputs, cotangent))
    return found


def main() -> int:
    every = axes.launch(compare, 8, {"dp_shard": 4, "cp": 1, "tp": 2, "ep": 4}, 8, 16, 1.0)
    failed = 0
    for variant, found in zip(("with a capacity", "dropless"), zip(*every, strict=True), strict=True):
        print(variant)
        failed |= report("moe.py", found)
    return failed


if __name__ == "__main__":
    sys.exit(main())
