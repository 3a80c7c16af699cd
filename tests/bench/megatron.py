"""A training step of the Megatron block of the examples, on two ranks, against the same by hand.

Three versions train the same weights on the same data: by hand, in expressions on plain shards, and in expressions
on DTensors. They take turns, step by step; the ratio is the median of those of steps that followed each other. Over
gloo axes sends a reduce-scatter as an exchange and sums the parts, which is faster there; the peer sends a
reduce-scatter.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import axes
from tests.bench.measure import ROOT, Times, benchmark, in_turns, median_ratio
from tests.bench.megatron_by_hand import block_by_hand, loss_by_hand

sys.path.insert(0, str(ROOT / "examples"))

from megatron_block import ACTIVATIONS, HEAD_DIM, SPECS, attend, block, norm, shapes

WARM_UP = 5


# On plain shards a gradient is this rank's term of the whole gradient, except where `same@tp` says that it is whole
# and equal on all ranks. So "d | same@tp -> d" does nothing forward, and all-reduces the gradient of the scale
# backward; "-> | same@tp" is an all-reduce forward, and nothing backward.


def norm_of_shards(x: Tensor, scale: Tensor) -> Tensor:
    return norm(x, axes.rearrange(scale, "d | same@tp -> d"))


def loss_of_shards(y: Tensor, wanted: Tensor) -> Tensor:
    whole = len(y) * axes.axis_size("tp")  # that all shards are as long is known here alone
    return axes.reduce((y - wanted) ** 2, "s@tp b d -> | same@tp", "mean", s=whole)


def loss_of_dtensors(y: DTensor, wanted: DTensor) -> DTensor:
    return axes.reduce((y - wanted) ** 2, "s@tp b d -> ", "mean")


@dataclass(frozen=True)
class Size:
    width: int = 256
    heads: int = 8
    sequence: int = 256
    batch: int = 2


@dataclass
class Training:
    """One of the versions: its weights and data, as tensors of its kind."""

    block: Callable[[Tensor, dict[str, Tensor]], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    weights: dict[str, Tensor]
    data: list[Tensor]

    def __post_init__(self) -> None:
        for weight in self.weights.values():
            weight.requires_grad_()
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=1e-2, eps=1e-6, foreach=True)

    def step(self) -> float:
        """The loss before the step, the same on every rank."""
        x, wanted = self.data
        loss = self.loss(self.block(x, self.weights), wanted)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def versions(mesh: axes.Mesh, size: Size, dtype: torch.dtype) -> dict[str, Training]:
    """The same weights and data in each version, whose steps run inside `with mesh:`."""
    generator = torch.Generator().manual_seed(0)

    def numbers(shape: list[int], spec: str) -> DTensor:
        whole = torch.randn(shape, generator=generator, dtype=dtype) / shape[-1] ** 0.5
        return axes.shard(whole, spec, mesh=mesh)

    weights = {name: numbers(shape, SPECS[name]) for name, shape in shapes(size.width, size.heads).items()}
    data = [numbers([size.sequence, size.batch, size.width], ACTIVATIONS) * size.width**0.5 for _ in range(2)]
    group = mesh.axis("tp").group
    by_hand = partial(block_by_hand, group=group, head_dim=HEAD_DIM)
    found = {
        "by hand": (by_hand, partial(loss_by_hand, group=group), axes.to_local),
        "plain shards": (partial(block, norm=norm_of_shards, attend=attend), loss_of_shards, axes.to_local),
        "DTensors": (block, loss_of_dtensors, lambda x: x),
    }
    return {
        name: Training(block_, loss, {at: kind(w).clone() for at, w in weights.items()}, [kind(x) for x in data])
        for name, (block_, loss, kind) in found.items()
    }


def train(size: Size, steps: int, dtype: torch.dtype = torch.float32) -> tuple[dict, dict]:
    """The losses of each version, and the seconds of its steps. The versions take turns, step by step."""
    torch.set_num_threads(1)
    with axes.init_mesh("tp", device_type="cpu") as mesh:
        trainings = versions(mesh, size, dtype)
        return in_turns({name: training.step for name, training in trainings.items()}, steps)


@benchmark(
    "training step of a Megatron block in six expressions, `tp=2`",
    peer="autograd functions around `torch.distributed`",
    bar=1 / 1.05,
    page=True,
)
def step() -> Times:
    losses, seconds = axes.launch(train, 2, Size(), 80)[0]
    for version, found in losses.items():
        torch.testing.assert_close(found, losses["by hand"], rtol=1e-5, atol=0, msg=lambda m, at=version: f"{at}: {m}")
    peer = statistics.median(seconds["by hand"][WARM_UP:])
    return Times(peer * median_ratio(seconds["plain shards"], seconds["by hand"], WARM_UP), peer)
