"""What a call costs at a size that wasn't seen before: of each size there is one call, on a fake world.

Where sizes divide, another size is the same plan with other numbers; where they don't, it is another plan.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch.distributed.tensor import DTensor

import axes
from tests.bench.measure import Times, benchmark

MOVES = {"S -> R": "s d", "S -> S'": "s d@tp"}
SIZES = {"that divides": range(400, 1 << 20, 4), "that doesn't": (size for size in itertools.count(401) if size % 4)}


def once_each(
    calls: tuple[Callable[[DTensor], object], Callable[[DTensor], object]],
    make: Callable[[int], DTensor],
    sizes: Iterator[int],
    count: int = 300,
) -> Times:
    """Medians in seconds of two calls that take turns, each on a tensor of another size.

    On one thread: a small product on several waits for theirs, where others use the cores, longer than all else takes.
    """
    found: tuple[list[float], list[float]] = ([], [])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for number in range(count + 20):
        for call, times in zip(calls, found, strict=True):
            x = make(next(sizes))
            started = time.perf_counter()
            call(x)
            if number >= 20:
                times.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return Times(*map(statistics.median, found))


def register(move: str, kind: str, bar: float) -> None:
    @benchmark(f"`axes.reshard`, {move}, a new size {kind}", peer="`DTensor.redistribute`", bar=bar)
    def measure() -> Times:
        with axes.simulate(4):
            mesh = axes.init_mesh("tp=4", device_type="cpu")
            placements = mesh.sharding(MOVES[move]).placements
            return once_each(
                (lambda x: axes.reshard(x, MOVES[move]), lambda x: x.redistribute(placements=placements)),
                lambda size: axes.shard(torch.zeros(size, 8), "s@tp d", mesh=mesh),
                iter(SIZES[kind]),
            )


for move in MOVES:
    register(move, "that divides", 2.0)
    register(move, "that doesn't", 1 / 1.5)


@benchmark("`axes.einsum` of DTensors, a new size that divides", peer="`torch.einsum` of DTensors", bar=50.0)
def product() -> Times:
    with axes.simulate(4):
        mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
        w = axes.shard(torch.zeros(8, 16), "d f@tp", mesh=mesh)
        return once_each(
            (
                lambda x: axes.einsum(x, w, "b@dp d, d f@tp -> b@dp f@tp"),
                lambda x: torch.einsum("bd,df->bf", x, w),
            ),
            lambda size: axes.shard(torch.zeros(size, 8), "b@dp d", mesh=mesh),
            iter(SIZES["that divides"]),
            count=60,
        )
