"""A training step of the Llama of the examples with FSDP2, against the same by hand and by what else there is.

Two train in the same processes and take turns, step by step; a ratio is the median of those of steps that
followed each other. Where other programs share the cores, what waits for whom is chance: the time that the processors
spend on a step, of all ranks, isn't.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import axes
from tests.bench.llama_by_hand import WARM_UP, Options, by_hand, in_both_ways
from tests.bench.llama_peers import by_parallelize_module, by_spmd_types
from tests.bench.measure import Times, benchmark, is_installed, median_ratio

TINY, ORDINARY = {"width": 64, "sequence": 64, "steps": 60}, {"width": 256, "sequence": 256, "steps": 30}
NO_CP = "dp=4 cp=1 tp=2"


def register_processor_time(options: Options, most: float) -> None:
    @benchmark(
        f"processor time of a training step of llama.py on {options.mesh}, width {options.width}, per rank",
        peer="autograd functions, FSDP2, AdamW",
        bar=1 / most,
    )
    def measure() -> Times:
        ranks = axes.launch(functools.partial(in_both_ways, clock=time.process_time), 8, options)
        ours, peer = (
            statistics.mean([statistics.median(seconds[name][WARM_UP:]) for _, seconds in ranks])
            for name in ("axes", "peer")
        )
        return Times(ours, peer)


def register(options: Options, peer: str, step: Callable[..., Callable[[], float]], most: float) -> None:
    @benchmark(
        f"training step of llama.py on {options.mesh}, width {options.width}, beside {peer}", peer=peer, bar=1 / most
    )
    def measure() -> Times:
        losses, seconds = axes.launch(in_both_ways, 8, options, step)[0]
        for one, other in zip(losses["axes"], losses["peer"], strict=True):
            if abs(one - other) > 1e-3 * abs(other):
                raise RuntimeError(f"{peer} trains something else: its loss is {other}, that of axes {one}")
        typical = statistics.median(seconds["peer"][WARM_UP:])
        return Times(typical * median_ratio(seconds["axes"], seconds["peer"], WARM_UP), typical)


register(Options(**ORDINARY), "autograd functions, FSDP2, AdamW", by_hand, most=1.03)
register(Options(**TINY), "autograd functions, FSDP2, AdamW", by_hand, most=1.15)
register_processor_time(Options(**ORDINARY), most=1.03)
register_processor_time(Options(**TINY), most=1.15)
for sizes in (ORDINARY, TINY):
    register(
        Options(mesh=NO_CP, **sizes), "`parallelize_module`, `fully_shard`, AdamW", by_parallelize_module, most=1.0
    )
    if is_installed("spmd_types", "0.3.1", "training step of llama.py beside spmd_types"):
        register(Options(**sizes), "`spmd_types`, FSDP2, AdamW", by_spmd_types, most=1.0)
