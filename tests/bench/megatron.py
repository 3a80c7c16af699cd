"""A training step of the Megatron block of the examples, on two ranks, against the same by hand.

Both train in the same processes and take turns, step by step. The peer sends a reduce-scatter as
one; over gloo axes sends it as an exchange and sums what arrives, which is faster there.
"""

from __future__ import annotations

import statistics

import axes
from examples.megatron_block import WARM_UP, Size, train
from tests.bench.measure import Times, benchmark


@benchmark(
    "training step of a Megatron block in six expressions, `tp=2`",
    peer="autograd functions around `torch.distributed`",
    bar=1 / 1.05,
)
def step() -> Times:
    _, seconds = axes.launch(train, 2, Size(), 60)[0]
    ours, peer = (statistics.median(seconds[version][WARM_UP:]) for version in ("plain shards", "by hand"))
    return Times(ours, peer)
