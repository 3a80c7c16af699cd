"""How the benchmarks measure, and the list that they register in.

A benchmark is a function in a file of this folder that returns two times in seconds, its own and
that of a peer, both measured in this run:

    @benchmark("flattening two axes, cached", peer="einops.rearrange of a small tensor")
    def flattening() -> Times:
        return compare(lambda: mesh.rearrange(...), lambda: einops.rearrange(...))

`make bench` runs those with `page=True` and prints the table of docs/benchmarks.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Times:
    """Medians in seconds: ours and the peer's."""

    ours: float
    peer: float


@dataclass(frozen=True)
class Benchmark:
    """One row. `bar` is the smallest `peer / ours` that the project promises, `page` whether docs/benchmarks.md has it."""

    what: str
    peer: str
    bar: float
    page: bool
    measure: Callable[[], Times]


BENCHMARKS: list[Benchmark] = []
LEFT_OUT: dict[str, str] = {}
"""What isn't measured here, and why."""


def is_installed(package: str, version: str, what: str) -> bool:
    """Whether a package that nothing else needs is there, as the peer of some rows; else they are noted as left out."""
    if importlib.util.find_spec(package) is not None:
        return True
    LEFT_OUT[what] = f"pip install --no-deps {package.replace('_', '-')}=={version}"
    return False


def benchmark(what: str, *, peer: str, bar: float, page: bool = False) -> Callable[[Callable[[], Times]], Benchmark]:
    """Registers the function below it as a row."""

    def registered(measure: Callable[[], Times]) -> Benchmark:
        made = Benchmark(what, peer, bar, page, measure)
        BENCHMARKS.append(made)
        return made

    return registered


def seconds_of(call: Callable[[], object], loops: int) -> float:
    """Mean seconds of one call over `loops` of them."""
    started = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - started) / loops


def compare(ours: Callable[[], object], peer: Callable[[], object], *, loops: int = 200, repeats: int = 51) -> Times:
    """Medians of many repeats of two calls that take turns, so that noise meets both."""
    seconds_of(ours, loops)
    seconds_of(peer, loops)
    pairs = [(seconds_of(ours, loops), seconds_of(peer, loops)) for _ in range(repeats)]
    return Times(*(statistics.median(column) for column in zip(*pairs, strict=True)))


def in_fresh_processes(ours: str, peer: str, repeats: int = 5) -> Times:
    """Medians over fresh interpreters that take turns: for what is only cold once.

    Each text is a program that prints its own time in seconds as the last line.
    """
    pairs = [(printed_by(ours), printed_by(peer)) for _ in range(repeats)]
    return Times(*(statistics.median(column) for column in zip(*pairs, strict=True)))


def printed_by(program: str) -> float:
    """The number in the last line that a Python program prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a benchmark's program failed:\n{program}\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, scale = next((pair for pair in units if seconds >= pair[1]), units[-1])
    return f"{seconds / scale:.3g} {unit}"


def in_turns(
    steps: Mapping[str, Callable[[], float]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[dict, dict]:
    """What each of some steps returns and the seconds it takes by the clock, in every round; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            started = clock()
            found[name].append(steps[name]())
            seconds[name].append(clock() - started)
    return found, seconds


def median_ratio(seconds: Sequence[float], peer: Sequence[float], warm_up: int) -> float:
    """The median ratio of steps that followed each other: what else the machine does meets both."""
    ratios = [ours / theirs for ours, theirs in zip(seconds, peer, strict=True)]
    return statistics.median(ratios[warm_up:] or ratios)
