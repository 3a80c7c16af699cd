"""A training step of the Llama of the examples on dp=2 cp=2 tp=2 with FSDP2, against the same by hand.

Both train in the same processes and take turns, step by step; a ratio is the median of those of steps that followed
each other.
"""

from __future__ import annotations

import statistics
import sys

import axes
from tests.bench.measure import ROOT, Times, benchmark

sys.path.insert(0, str(ROOT / "examples"))

from llama_by_hand import WARM_UP, Options, in_both_ways
from support import median_ratio


def register(what: str, options: Options, most: float) -> None:
    @benchmark(
        f"training step of llama.py on {options.mesh}, {what}", peer="autograd functions, FSDP2, AdamW", bar=1 / most
    )
    def measure() -> Times:
        _, seconds = axes.launch(in_both_ways, 8, options)[0]
        peer = statistics.median(seconds["by hand"][WARM_UP:])
        return Times(peer * median_ratio(seconds["axes"], seconds["by hand"], WARM_UP), peer)


register("width 256", Options(width=256, sequence=256, steps=30), most=1.03)
register("width 64", Options(width=64, sequence=64, steps=60), most=1.15)
