"""Long runs leave nothing: launches, worlds, meshes and operations of ever-new shapes and expressions; and the looks see that.

Descriptors, threads, child processes and memory are as before, once the caches are full. `make test` has the short runs,
`make test-full` those of 100,000 operations, 1,000 meshes, 200 launches and 200 worlds.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

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


CLEAR_CACHES: Callable[[], None] = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
"""Python looks attributes up in a table of 4,096 entries that keep the names, and fills it over hundreds of launches."""


def held() -> Held:
    CLEAR_CACHES()
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


def no_growth(found: list[Held], steps: int, objects: float = 1, looks: int = 1) -> None:
    """Over the last so many looks, each so many steps after the one before, a step leaves less than an object, or than
    so many. Prints all looks."""
    for at, look in enumerate(found):
        print(f"after {(at + 1) * steps:,} steps: {look}")
    steps *= looks
    assert not found[-1].beyond(found[-1 - looks], blocks=objects * steps, resident=4 * MIB + 1024 * steps), found


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


@pytest.mark.full
def test_two_hundred_launches_leave_no_process_descriptor_or_thread():
    no_growth(launches(200, 50), 50)


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


# ------------------------------------------------------------------------------------- operations, meshes, worlds


@axes.shard_map("a@dp b@tp -> a@dp b@tp")
def region(x: torch.Tensor) -> torch.Tensor:
    return axes.ppermute(x, "tp", shift=1) * 2


def mistaken(x: DTensor, text: str) -> str:
    with pytest.raises(axes.AxesError) as found:
        axes.rearrange(x, text)
    return str(found.value)


OPERATIONS: list[Callable[[int, DTensor, torch.Tensor], object]] = [
    lambda n, x, shard: axes.unshard(axes.shard(shard, f"a{n}@dp b{n}@tp")),
    lambda n, x, shard: axes.ones(f"a{n}@dp b{n}", sizes={f"a{n}": x.shape[0], f"b{n}": x.shape[1]}),
    lambda n, x, shard: axes.to_local(x, f"a{n}@dp b{n}@tp"),
    lambda n, x, shard: axes.rearrange(x, f"a{n}@dp b{n}@tp -> b{n}@tp a{n}"),
    lambda n, x, shard: axes.reduce(x, f"a{n}@dp b{n}@tp -> a{n}@dp", "sum"),
    lambda n, x, shard: axes.repeat(x, f"a{n}@dp b{n}@tp -> a{n}@dp b{n}@tp k", k=2),
    lambda n, x, shard: axes.einsum(x, x, f"a{n}@dp b{n}@tp, a{n}@dp b{n}@tp -> a{n}@dp"),
    lambda n, x, shard: axes.reshard(x, f"a{n} b{n}@(dp tp)"),
    lambda n, x, shard: axes.softmax(x, f"a{n}@dp b{n}@tp", over=f"b{n}"),
    lambda n, x, shard: region(x),
    lambda n, x, shard: mistaken(x, f"a{n}@dp b{n}@tp -> c{n}"),
    lambda n, x, shard: axes.rearrange(shard.requires_grad_(), f"a{n}@dp b{n}@tp -> b{n}@tp a{n}").sum().backward(),
    lambda n, x, shard: axes.einsum(shard, shard, f"a{n}@dp b{n}@tp, c{n} b{n}@tp -> a{n} c{n}"),
    lambda n, x, shard: axes.all_gather(axes.psum(shard, "dp"), "tp", 1),
    lambda n, x, shard: str(
        axes.plan(f"a{n}@dp b{n}@tp", f"a{n} b{n}@(dp tp)", x.shape, mesh=axes.sharding_of(x).mesh)
    ),
    lambda n, x, shard: str(axes.explain(f"a{n}@dp b{n}@tp -> a{n} b{n}", x.shape, mesh=axes.sharding_of(x).mesh)),
    lambda n, x, shard: axes.Mesh(f"x{n}={x.shape[0]} y{n}={x.shape[1]}").sharding(f"a{n}@x{n} b{n}@y{n}"),
]
"""Operations of names that there were never before. torch's own of DTensors aren't among them: torch remembers those for
ever (docs/limits.md)."""

IN_TURN = [*OPERATIONS, lambda n, x, shard: axes.unshard(axes.shard(shard.T, f"a{n}@dp b{n}@tp"))]
"""They fill the caches: most remember 4,096 calls of one operation. The first comes twice, the other time of the shapes turned
round: those that divide are remembered together."""


def ever_new(number: int) -> None:
    """One operation, of a shape that it never had: 2 to 634 rows and columns."""
    operation, count = IN_TURN[number % len(IN_TURN)], number // len(IN_TURN)
    shard = torch.ones(count % 317 + 1, count // 317 + 1)
    operation(number, axes.from_local(shard, "a@dp b@tp"), shard.clone())


def steps_in_one_world(count: int, each: int) -> list[Held]:
    with axes.simulate(4, rank=1), axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        return looked(ever_new, count, each)


@pytest.mark.full
def test_a_hundred_thousand_ever_new_operations_leave_nothing_once_the_caches_are_full():
    # The last cache, of routes, is full after 125,000. A dictionary that is made anew at its next size is no leak.
    no_growth(steps_in_one_world(165_000, 5_000), 5_000, looks=3)


# What torch remembers of ever-new shapes, without a bound: docs/limits.md gives the calls that clear it.

TORCHS: dict[str, Callable[[DTensor], object]] = {
    "x + 1": lambda x: x + 1,
    "x.redistribute(...)": lambda x: x.redistribute(placements=[Replicate(), Replicate()]),
    "loss.backward()": lambda x: axes.to_local(x.detach().requires_grad_(), grad="summed").sum().backward(),
}


def bytes_by_torch(call: Callable[[DTensor], object], count: int) -> float:
    """How much of Python's memory the calls of the page free for each shape on which torch was called."""
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu"), traced():
        exec(CLEARS)
        tensors = [axes.from_local(torch.ones(1, number + 1), "a@dp b@tp") for number in range(count)]
        for x in tensors:
            call(x)
        before = held_by_python()
        exec(CLEARS)
        return (before - held_by_python()) / count


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def held_by_python() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


PAGE = Path(axes.__file__).parents[1] / "docs/limits.md"
CLEARS = re.search(
    r"```text\n(from torch\.distributed\.tensor import _redistribute.*?)```", PAGE.read_text(), re.DOTALL
)[1]


@pytest.mark.parametrize("name", ["x + 1", "x.redistribute(...)"])
def test_what_torch_remembers_of_ever_new_shapes_is_freed_by_the_calls_of_the_page(name):
    assert bytes_by_torch(TORCHS[name], 50) > 1_000


NAMES = 8
"""So many names take turns in worlds and meshes: what axes remembers of text has a bound, which these don't reach."""


def short_world(number: int) -> None:
    name = f"t{number % NAMES}"
    with axes.simulate(8, rank=number % 8), axes.init_mesh(f"dp=2 {name}=4", device_type="cpu") as mesh:
        x = axes.shard(torch.ones(4, 8), f"a@dp b@{name}")
        assert axes.unshard(axes.reduce(x, f"a@dp b@{name} -> a", "sum")).shape == (4,)
        assert mesh.device_mesh.size() == 8


def started_world(number: int) -> None:
    """A world over gloo that axes starts and ends, of this process alone."""
    name = f"d{number % NAMES}"
    with axes.init_mesh(f"{name}=1", device_type="cpu"):
        assert axes.psum(torch.ones(()), name).item() == 1
    axes.destroy_process_groups()


def torchs_world(_: int) -> None:
    """A world by torch alone, with two groups: several objects of it stay for ever."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    for ranks in ([0, 1], [0, 2, 4, 6]):
        dist.new_group(ranks)
    dist.destroy_process_group()


def worlds(world: Callable[[int], None], count: int, each: int) -> None:
    """Asserts that a world of axes leaves no more than one of torch; each count of objects may be one off."""
    of_torch = looked(torchs_world, 3 * each, each)
    left = (of_torch[-1].blocks - of_torch[-2].blocks) / each
    print(f"a world of torch's own leaves {left:.1f} objects")
    assert left < 20
    no_growth(looked(world, count, each), each, left + 2)


@pytest.mark.parametrize("world", [short_world, started_world])
def test_worlds_leave_no_more_than_torchs_own(world):
    worlds(world, 96, 16)  # the first fifty fill torch's own memory of small things


@pytest.mark.full
@pytest.mark.parametrize("world", [short_world, started_world])
def test_two_hundred_worlds_leave_no_more_than_torchs_own(world):
    worlds(world, 200, 40)


def meshes(count: int, each: int) -> list[Held]:
    """Meshes with communicators of their own, which are ended after every `NAMES`."""

    def run(number: int) -> None:
        name = f"x{number % NAMES}"
        options = {name: axes.GroupOptions(lane=f"lane{number % NAMES}")}
        with axes.init_mesh(f"{name}=2", device_type="cpu", options=options) as mesh:
            assert axes.psum(torch.ones(()), name).item() == 2
            assert mesh.device_mesh.size() == 2
        if number % NAMES == NAMES - 1:
            axes.destroy_process_groups()

    return looked(run, count, each)


OF_A_NAME = 16
"""torch keeps the tag of every group that ever was, with an empty list, and axes what it read of the name of the last 4,096."""


def test_meshes_whose_groups_are_ended_leave_a_name(world):
    for found in world(meshes, 2, 48, 16):
        no_growth(found, 16, OF_A_NAME)


@pytest.mark.full
def test_a_thousand_meshes_whose_groups_are_ended_leave_a_name(world):
    for found in world(meshes, 2, 1_000, 200, timeout=900):
        no_growth(found, 200, OF_A_NAME)


if __name__ == "__main__":
    for name, call in TORCHS.items():
        found = bytes_by_torch(call, 1000)
        print(f"{name}: torch {torch.__version__} keeps {found:,.0f} bytes of Python for each shape")
