"""What a trace costs, as `AXES_TRACE` and `axes.debug(trace=)` have it: on, and when it is off again.

A call is measured in a simulated world, where collectives return at once. The peer of a traced call is the same one
without a trace, and 5 microseconds: that is what it may cost. Times are of the processor, and the least of many rounds:
what other programs do to the caches of this machine costs some microseconds itself.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

import torch

import axes
from tests.bench.measure import Times, benchmark

LOOPS = 100
ROUNDS = 301
MAY_COST = 5e-6


def seconds(call: Callable[[], object]) -> float:
    """Of one call, by this thread's processor time."""
    started = time.thread_time()
    for _ in range(LOOPS):
        call()
    return (time.thread_time() - started) / LOOPS


def calls() -> dict[str, Callable[[], object]]:
    mesh, x = axes.init_mesh("tp=4", device_type="cpu"), torch.ones(8)
    split = axes.shard(torch.ones(4, 4), "a@tp b", mesh=mesh)
    return {
        "axes.psum": lambda: axes.psum(x, "tp", mesh=mesh),
        "axes.reshard": lambda: axes.reshard(split, "a b"),
    }


def traced(name: str) -> Times:
    """A call with a trace, and without one."""
    with axes.simulate(4), tempfile.TemporaryDirectory() as folder:
        call, on, off = calls()[name], list[float](), list[float]()
        for _ in range(ROUNDS):
            off.append(seconds(call))
            with axes.debug(trace=f"{folder}/trace.json"):
                call()  # which begins the file
                on.append(seconds(call))
    return Times(min(on), min(off) + MAY_COST)


def turned_off(name: str) -> Times:
    """A call after a trace was on, and one in a process that has never had one."""
    with axes.simulate(4), tempfile.TemporaryDirectory() as folder:
        call = calls()[name]
        never = [seconds(call) for _ in range(ROUNDS)]
        with axes.debug(trace=f"{folder}/trace.json"):
            call()
        after = [seconds(call) for _ in range(ROUNDS)]
    return Times(min(after), min(never))


def register(name: str) -> None:
    peer = "the same without a trace, plus 5 µs"

    @benchmark(f"`{name}` with a trace", peer=peer, bar=1, page=True)
    def on() -> Times:
        return traced(name)

    @benchmark(f"`{name}` after a trace was on", peer="the same before", bar=0.95, page=name == "axes.psum")
    def off() -> Times:
        return turned_off(name)


for name in ("axes.psum", "axes.reshard"):
    register(name)
