"""Launches leave nothing: descriptors, threads, child processes and memory are as before; and the looks see what they are for."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import axes

MIB = 1 << 20


@dataclass(frozen=True)
class Held:
    """What a process holds: Python's blocks of memory, bytes of all memory, descriptors, threads, child processes."""

    blocks: int
    resident: int
    descriptors: int
    threads: int
    children: int

    def beyond(self, before: Held, blocks: float, resident: int) -> list[str]:
        """What there is more than before, by more than so many blocks and bytes."""
        more = {name: getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__}
        allowed = {"blocks": blocks, "resident": resident}
        return [f"{by:,} more {name}: {self}" for name, by in more.items() if by > allowed.get(name, 0)]


def entries(folder: str) -> int:
    return len(os.listdir(folder))


def held() -> Held:
    for _ in range(3):
        gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return Held(
        sys.getallocatedblocks(),
        pages * os.sysconf("SC_PAGE_SIZE"),
        entries("/proc/self/fd"),
        entries("/proc/self/task"),
        len(children),
    )


def no_growth(found: list[Held], steps: int) -> None:
    """Between two looks, so many steps apart, a step leaves less than an object."""
    assert not found[-1].beyond(found[-2], blocks=steps, resident=4 * MIB + 1024 * steps), found


def rank_and_sum() -> tuple[int, float]:
    mesh = axes.init_mesh("dp=2", device_type="cpu")
    return dist.get_rank(), axes.psum(torch.ones(()), "dp", mesh=mesh).item()


def launches(count: int, each: int) -> list[Held]:
    found = []
    for i in range(count):
        assert axes.launch(rank_and_sum, 2, timeout=60) == [(0, 2.0), (1, 2.0)]
        if i % each == each - 1:
            found.append(held())
    return found


def test_launches_leave_no_process_descriptor_or_thread():
    no_growth(launches(6, 2), 20)


def looked(run: Callable[[int], None], count: int, each: int) -> list[Held]:
    """What the process holds after every `each` of so many steps."""
    found = []
    for i in range(count):
        run(i)
        if i % each == each - 1:
            found.append(held())
    return found


LEFT: list[object] = []


@pytest.mark.parametrize(
    "leak",
    [lambda: LEFT.append([0.5]), lambda: LEFT.append(bytearray(1 << 20)), lambda: LEFT.append(open(os.devnull))],  # noqa: SIM115
    ids=["an object", "memory", "a descriptor"],
)
def test_what_a_step_leaves_behind_is_seen(leak):
    def step(_: int) -> None:
        leak()

    with pytest.raises(AssertionError):
        no_growth(looked(step, 60, 20), 20)
    LEFT.clear()
