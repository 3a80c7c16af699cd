"""What it costs to see: an operation and a step explained, a picture of a large mesh, the lock of a large job.

The peer of each is the time that is promised for it. What is measured is made with other numbers each time, so that
nothing is remembered. It is processor time, without imports and the first call; of the lock, the whole command by the
clock.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import axes
from tests.bench.measure import ROOT, Times, benchmark, duration
from tests.bench.transferring import MIXTURE


def promised(what: str, seconds: float, measure: Callable[[], float], page: bool = True) -> None:
    @benchmark(what, peer=f"promised: {duration(seconds)}", bar=1, page=page)
    def row() -> Times:
        return Times(measure(), seconds)


def median_of(call: Callable[[int], object], rounds: int, clock: Callable[[], float] = time.process_time) -> float:
    """Seconds of a call; each is made with another number, so that none is remembered. What it prints is left out."""
    taken = []
    with contextlib.redirect_stdout(io.StringIO()):
        call(0)
        for at in range(1, rounds + 1):
            started = clock()
            call(at)
            taken.append(clock() - started)
    return statistics.median(taken)


def operation() -> float:
    expression, sizes = "b@dp s f@tp, f@tp d -> b@dp s@tp d", {"b": 8, "f": 256, "d": 64}
    return median_of(lambda at: str(axes.explain(expression, s=64 + 16 * at, mesh="dp=4 tp=2", **sizes)), 21)


def step() -> float:
    """Forward and backward of llama.py, the model made, in a process that has imported it."""
    sys.path.insert(0, str(ROOT / "examples"))
    from tests.explained_steps import explain_steps

    return median_of(lambda at: str(explain_steps(["llama"], at)), 3)


def picture() -> float:
    def show(at: int) -> str:
        mesh = axes.Mesh("pp=4 dp=2048 tp=8", "fsdp = dp tp", ranks_per_node=8)
        return str(axes.show(mesh, rank=40_000 + at))

    return median_of(show, 21)


def lock() -> float:
    """The whole command, in a process of its own: llama.py on 16,384 ranks."""
    command = [sys.executable, "-m", "axes", "explain", "examples/llama.py:build"]
    mesh = ["--mesh", "pp=1 dp=2048 cp=2 tp=4; fsdp = dp cp"]
    return median_of(
        lambda _: subprocess.run([*command, *mesh], cwd=ROOT, check=True, capture_output=True), 3, time.perf_counter
    )


def transfer_picture() -> float:
    """One screen of a mixture of experts on its way, the plan made before: from ranks of both sides."""
    space: dict[str, Any] = {}
    exec(MIXTURE.split("started =")[0], space)
    made = (space[name] for name in ("sources", "targets", "stages", "server", "shapes"))
    move = axes.transfer(*made, dtype="bfloat16")
    return median_of(lambda at: str(axes.show(replace(move), rank=at * 409)), 5)


promised("`axes.explain` of an einsum", 0.02, operation)
promised("building llama.py, and `axes.explain` of its step", 5, step)
promised("`axes.show` of a mesh of 65,536 ranks", 0.1, picture)
promised("`axes.show` of a transfer of a trillion parameters, 1,024 ranks to 1,024", 1, transfer_picture)
promised("`python -m axes explain` of llama.py on 16,384 ranks", 10, lock)
