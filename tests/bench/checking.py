"""What it costs that ranks compare an operation before it is sent, as `axes.debug(check=True)` has it.

Four processes on this machine, whose store is on one of them. Without it nothing is compared, and the rows of
`dispatch.py` and `moving.py` say what an operation costs then.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import axes
from tests.bench.measure import Times, benchmark
from tests.test_desync import told_apart

RANKS = 4
ROUNDS = 10
LOOPS = 20


def compared() -> tuple[float, float]:
    """Seconds of a sum over four ranks, compared and by hand."""
    torch.set_num_threads(1)
    mesh, x = axes.init_mesh("tp=4", device_type="cpu"), torch.ones(1024)

    def ours() -> torch.Tensor:
        return axes.psum(x, "tp", mesh=mesh)

    def by_hand() -> None:
        dist.all_reduce(x.clone())

    with axes.debug(check=True):
        found = [(seconds(ours, LOOPS), seconds(by_hand, LOOPS)) for _ in range(ROUNDS + 1)]
    ours_, theirs = (statistics.median(column) for column in zip(*found[1:], strict=True))
    return ours_, theirs


def seconds(call: Callable[[], object], loops: int) -> float:
    """Of one call on all ranks, from when they are all there."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - started) / loops


@benchmark("`axes.psum` of 4 KiB, compared before it is sent, four processes", peer="`all_reduce`", bar=0.05)
def psum_compared() -> Times:
    return Times(*axes.launch(compared, RANKS)[0])


@benchmark("a program that differs on one rank, told on all four: the slowest of 60", peer="promised", bar=1)
def difference_told() -> Times:
    every = axes.launch(told_apart, RANKS, range(60))
    return Times(max(seconds for found in every for _, seconds, _ in found), 2.0)
