"""What tests share: one pool of eight long-lived local ranks, and fresh worlds of any size.

A test that needs ranks takes the `pool` fixture and runs a function of its own module on all of
them:

    def sum_of_ranks():
        x = torch.tensor(dist.get_rank())
        dist.all_reduce(x)
        return x.item()

    def test_all_reduce_sums_over_the_world(pool):
        assert pool.run(sum_of_ranks) == [28] * 8

Groups, caches and random state of the ranks outlive a test. One that needs a world without a past,
or of another size, or that kills its ranks, takes `world`: `axes.launch` with a time limit.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch.distributed.tensor import _dtensor_spec

import axes
from tests.ranks import COLLECT, StandingRanks

T = TypeVar("T")

LIMIT = 60.0

BEFORE_2_13 = not hasattr(_dtensor_spec, "_StridedShardNotDecodableError")
"""Whether this is a torch before 2.13, as what it offers says."""

READS_FACTORS = not BEFORE_2_13
"""Whether torch's own operations take what is split by a factor of a dim. Those of axes always do."""

takes_factors = pytest.mark.skipif(
    not READS_FACTORS, reason="torch before 2.13 takes every strided shard for an order of axes, and raises"
)
"""For tests in which torch's own operations meet such DTensors."""

forgets_meshes = pytest.mark.skipif(
    BEFORE_2_13, reason="torch before 2.13 keeps the schemas of some operations, and with them a DeviceMesh"
)
"""For tests of what stays of a world."""

multiplies_batches = pytest.mark.skipif(
    BEFORE_2_13, reason="torch before 2.13 can't multiply batches of DTensors that are split over the second dim"
)
"""For pages whose models do so with operations of torch's own."""

stages_send_at_once = pytest.mark.skipif(
    BEFORE_2_13, reason="torch before 2.13 has stages send each other a number before their first step"
)
"""For tests that list what the stages of a pipeline send."""

stages_reduce_outside_in = pytest.mark.skipif(
    torch.__version__ >= "2.15",
    reason="torch from 2.15 on has fully_shard reduce the gradients of a stage in another order",
)
"""For those that list it in its order."""

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")  # on a loaded machine a right answer may take its time

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background jobs ignore interrupts, and so would what is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)


os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else torch starts processes that compile, unasked

torch.set_num_threads(1)  # as ranks have: threads that wait for each other in vain take the cores from these
gc.set_threshold(*COLLECT)

REST = 12
"""How many threads a rank may keep while other modules run."""


LONG = ("test_laws", "test_compile", "test_docs", "test_examples", "test_desync", "test_launch")
"""The modules that take longest, which begin first: the other processes would wait for one that begins last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


class Ranks:
    """Worlds of local ranks, one of each size: each is started at its first call, and again after a call that broke it."""

    def __init__(self) -> None:
        self._standing: dict[int, StandingRanks] = {}

    def run(self, fn: Callable[..., T], *args: object, world: int = 8, timeout: float = LIMIT) -> list[T]:
        """`fn(*args)` on every rank of the world of so many; the results by rank."""
        __tracebackhide__ = True
        found = self._standing.get(world)
        if found is not None:
            found.rest()
        if found is None or not found.alive:
            found = self._standing[world] = StandingRanks(world)
        return found.run(fn, *args, timeout=timeout)

    def rest(self) -> None:
        """Lets groups go that would wake often while others work."""
        for found in self._standing.values():
            found.rest(REST)

    @property
    def pids(self) -> list[int]:
        """The process ids of the eight ranks; none before the first call and after a broken one."""
        found = self._standing.get(8)
        return found.pids if found is not None and found.alive else []

    def close(self) -> None:
        """Lets the ranks end, and waits for it."""
        for found in self._standing.values():
            found.close()


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """A test leaves no world behind in this process: the next one would find itself in it."""
    yield
    if dist.is_initialized():
        axes.destroy_process_groups()
        if dist.is_initialized():
            dist.destroy_process_group()
        pytest.fail("the test left torch.distributed running; end it with axes.destroy_process_groups()")


@pytest.fixture(scope="session")
def ranks_of_session() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def pool(ranks_of_session: Ranks) -> Iterator[Ranks]:
    """Eight ranks that stay for several modules, with a default group over gloo and one thread each."""
    yield ranks_of_session
    ranks_of_session.rest()


@pytest.fixture(scope="session")
def world() -> Callable[..., list[object]]:
    """`world(fn, world_size, *args)`: `axes.launch` that doesn't wait for ever."""

    def run(fn: Callable[..., T], world_size: int, *args: object, timeout: float = LIMIT) -> list[T]:
        return axes.launch(fn, world_size, *args, timeout=timeout)

    return run


@pytest.fixture(scope="module")
def warm(pool: Ranks) -> Callable[..., list[object]]:
    """`world`, on ranks that stay: they have imported what a compiler needs. What they compiled is forgotten."""

    def run(fn: Callable[..., T], world_size: int, *args: object, timeout: float = LIMIT) -> list[T]:
        return pool.run(forgetful, fn, *args, world=world_size, timeout=timeout)

    return run


def forgetful(fn: Callable[..., T], *args: object) -> T:
    """`fn(*args)` as in a process that has compiled nothing yet."""
    torch.compiler.reset()
    return fn(*args)
