"""Run a function on local ranks: a distributed program without a launcher.

    import axes, torch
    import torch.distributed as dist

    def total(start):
        x = torch.tensor(start + dist.get_rank())
        dist.all_reduce(x)
        return x.item()

    if __name__ == "__main__":
        print(axes.launch(total, 4, 10))          # [46, 46, 46, 46]

Each rank is a process of this machine with what `torchrun` would give it (`RANK`, `WORLD_SIZE`,
...) and with `torch.distributed` already running; a function that calls `init_process_group` itself
gets the world that it asks for instead. Eight ranks start in a fraction of a second once the first
launch has paid for importing torch: they are forked from a process that is kept for that
(`axes.runtime.forkserver`). It isn't the fork server of `multiprocessing`, which is left alone, as
is the program's start method. `axes.runtime.agent` tells what happens when a rank fails.

The ranks share this machine's hash seed, which those of a real job don't: iterating over a set of
strings gives them the same order here only.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import TypeVar

from axes.algebra.errors import AxesError, shown
from axes.algebra.sizes import whole_number
from axes.runtime.agent import BACKENDS
from axes.runtime.pool import Pool
from axes.runtime.transfer import Call, loading_main

T = TypeVar("T")

MOST = 256
"""More local processes than this are a mistake."""


def launch(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    device_type: str = "cpu",
    timeout: float | None = None,
) -> list[T]:
    """Run `fn(*args)` on `world_size` local processes; the results, by rank.

    `device_type`: "cpu" (gloo) or "cuda" (rank i has GPU i; nccl, and gloo for CPU tensors).
    `timeout`: seconds for everything, None for no limit. `fn` is a function at the top level of a
    module or script, or any function (a lambda, a notebook's) where `cloudpickle` is installed.
    Arguments and results are what pickles, tensors go by value.

    Raises the exception of the rank that failed first: notes on it hold that rank's traceback and
    how the other ranks ended. Raises `AxesError` for what can't be launched, before any process
    starts; where a rank is killed; and when time is up, naming the ranks that hadn't finished and
    where they were. In every case, an interrupt too, no rank is left.

    The idea is `torchrun`'s and `torch.multiprocessing.spawn`'s.
    """
    began = time.monotonic()
    ranks = _check(fn, world_size, device_type, timeout)
    call = Call.of(fn, args)
    with Pool(ranks, device_type, timeout) as pool:
        left = None if timeout is None else timeout - (time.monotonic() - began)
        return pool.run_call(call, left)


def _check(fn: object, world_size: object, device_type: object, timeout: object) -> int:
    if loading_main():
        raise AxesError(
            "this launch is in the part of the script that every rank runs again to find the "
            'function: put it under `if __name__ == "__main__":`'
        )
    if not hasattr(os, "fork"):
        raise AxesError("launch forks its processes, which this system can't: use Linux or macOS")
    if not callable(fn):
        raise AxesError(f"launch needs a function to run on every rank, not {shown(fn)}")
    ranks = whole_number(world_size)
    if ranks is None:
        raise AxesError(f"the world size is a number of processes, not {shown(world_size)}")
    if not 1 <= ranks <= MOST:
        raise AxesError(
            f"launch starts 1 to {MOST} processes on this machine, not {shown(ranks)}; "
            f"axes.simulate makes a world of any size in one process"
        )
    is_flag = isinstance(timeout, bool)
    if timeout is not None and (is_flag or not isinstance(timeout, int | float) or not 0 < timeout < math.inf):
        raise AxesError(f"the timeout is a positive number of seconds, or None; not {shown(timeout)}")
    if not isinstance(device_type, str) or device_type not in BACKENDS:
        known = " or ".join(repr(name) for name in BACKENDS)
        raise AxesError(f"launch knows the device types {known}, not {shown(device_type)}")
    if device_type == "cuda":
        _check_gpus(ranks)
    return ranks


def _check_gpus(world_size: int) -> None:
    import torch

    found = torch.cuda.device_count()
    if found < world_size:
        raise AxesError(
            f'{world_size} ranks need a GPU each, and torch finds {found} here: launch fewer, or with device_type="cpu"'
        )
