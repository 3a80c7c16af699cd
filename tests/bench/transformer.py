"""A training step of four layers of the Megatron block of the examples, on two ranks, against the same by hand.

On plain shards and on DTensors, at a size at which what is computed takes no time and at an ordinary one.
All train in the same processes and take turns, step by step; a ratio is the median of those of steps
that followed each other.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch

import axes
from tests.bench.measure import Times, benchmark, in_turns, median_ratio
from tests.bench.megatron import WARM_UP, Size, Training, versions

LAYERS, RANKS = 4, 2
SIZES = {"tiny": Size(width=32, heads=2, sequence=8, batch=1), "width 256": Size()}
BARS = {
    ("tiny", "plain shards"): 1.15,
    ("tiny", "DTensors"): 2.0,
    ("width 256", "plain shards"): 1.02,
    ("width 256", "DTensors"): 1.05,
}

Weights = dict[str, torch.Tensor]


def deep(block: Callable[[torch.Tensor, Weights], torch.Tensor], x: torch.Tensor, weights: Weights) -> torch.Tensor:
    for layer in range(LAYERS):
        x = block(x, {name.removeprefix(f"{layer}."): w for name, w in weights.items() if name[0] == str(layer)})
    return x


def train(size: Size, steps: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    with axes.init_mesh("tp", device_type="cpu") as mesh:
        layers = [versions(mesh, size, torch.float32) for _ in range(LAYERS)]
        trainings = {}
        for name, one in layers[0].items():
            weights = {f"{at}.{key}": w for at, layer in enumerate(layers) for key, w in layer[name].weights.items()}
            trainings[name] = Training(functools.partial(deep, one.block), one.loss, weights, one.data)
        return in_turns({name: training.step for name, training in trainings.items()}, steps)[1]


@functools.cache
def seconds_of_steps(size: str) -> dict[str, list[float]]:
    return axes.launch(train, RANKS, SIZES[size], 120 if size == "tiny" else 30)[0]


def register(size: str, version: str, most: float) -> None:
    @benchmark(
        f"training step of {LAYERS} Megatron blocks on {version}, {size}",
        peer="autograd functions around `torch.distributed`",
        bar=1 / most,
    )
    def measure() -> Times:
        seconds = seconds_of_steps(size)
        peer = statistics.median(seconds["by hand"][WARM_UP:])
        return Times(peer * median_ratio(seconds[version], seconds["by hand"], WARM_UP), peer)


for (size, version), most in BARS.items():
    register(size, version, most)
