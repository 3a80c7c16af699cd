"""A training step of the Megatron block of the examples, on two ranks, against the same by hand.

Both train in the same processes and take turns, step by step; the ratio is the median of those of
steps that followed each other. Over gloo axes sends a reduce-scatter as an exchange and sums what
arrives, which is faster there; the peer sends it as it is.
"""

from __future__ import annotations

import statistics
import sys

import axes
from tests.bench.measure import ROOT, Times, benchmark

sys.path.insert(0, str(ROOT / "examples"))

from megatron_block import WARM_UP, Size, train
from support import median_ratio


@benchmark(
    "training step of a Megatron block in six expressions, `tp=2`",
    peer="autograd functions around `torch.distributed`",
    bar=1 / 1.05,
    page=True,
)
def step() -> Times:
    _, seconds = axes.launch(train, 2, Size(), 80)[0]
    peer = statistics.median(seconds["by hand"][WARM_UP:])
    return Times(peer * median_ratio(seconds["plain shards"], seconds["by hand"], WARM_UP), peer)
