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

import functools
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch.distributed.tensor import _dtensor_spec

from axes.runtime import forkserver
from axes.runtime.groups import destroy_process_groups
from axes.runtime.launch import launch
from axes.runtime.pool import Pool

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
forkserver.PRELOADED = (
    *forkserver.PRELOADED,
    "hypothesis.extra.numpy",
    "pytest",
    "torch._dynamo.repro.after_dynamo",
    "torch._dynamo.testing",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",  # with what a first graph imports
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.testing._internal.distributed.fake_pg",
)  # a second of imports that each rank of each world would do again

torch.set_num_threads(1)  # as ranks have: threads that wait for each other in vain take the cores from these
COLLECT = (10_000, 20, 20)
"""When garbage is looked for: what traces a graph, or draws a case, makes many objects, and few cycles."""
gc.set_threshold(*COLLECT)

THREADS = 32
"""A rank has a thread for each of its groups over gloo, which wakes a hundred times a second: eight idle ranks with
sixteen groups each take a fifth of a core from all that runs beside them."""

REST = 12
"""How many threads a rank may keep while other modules run."""


def fit(pool: Pool | None, size: int) -> Pool:
    """The pool without the many groups that its ranks have made; a fresh one where it is broken or can't let go.

    One that keeps half of the threads has to let go before every other test, which takes longer than the test.
    """
    crowded = pool is not None and pool.alive and most_threads(pool) >= THREADS
    rested(pool, THREADS)
    if pool is not None and pool.alive and not (crowded and keeps(pool, THREADS // 2)):
        return pool
    if pool is not None:
        pool.close()
    fresh = Pool(size, timeout=LIMIT)
    fresh.run(gc.set_threshold, *COLLECT)
    return fresh


def keeps(pool: Pool, threads: int) -> bool:
    """Whether a rank keeps that many threads. Those of a group end a moment after it: wait for that."""
    for _ in range(40):
        if most_threads(pool) < threads:
            return False
        time.sleep(0.05)
    return True


def rested(pool: Pool | None, threads: int) -> None:
    """Lets ranks end their groups where one of them has that many threads."""
    if pool is not None and pool.alive and most_threads(pool) >= threads:
        pool.run(without_groups)


def without_groups() -> None:
    """Ends all groups, those that torch made too, and forgets what tests remember of them."""
    destroy_process_groups()
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    for name in [name for name in sys.modules if name.startswith("tests.")]:
        for value in list(vars(sys.modules[name]).values()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
    gc.collect()
    gc.freeze()  # the next collection, of eight ranks, looks at what is made from now on


def most_threads(pool: Pool) -> int:
    """How many threads the rank with most of them has."""
    return max(map(threads_of, pool.pids), default=0)


def threads_of(pid: int | None) -> int:
    """How many threads a process has, where the system says it."""
    threads = Path(f"/proc/{pid}/task")
    return len(list(threads.iterdir())) if threads.is_dir() else 0


class Ranks:
    """Eight ranks that are started at the first call, and again after a call that broke them."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def run(self, fn: Callable[..., T], *args: object, world: int = 8, timeout: float = LIMIT) -> list[T]:
        """`fn(*args)` on every rank; the results by rank. Not 8: a `world` of its own."""
        if world != 8:
            return launch(fn, world, *args, timeout=timeout)
        self._pool = fit(self._pool, 8)
        return self._pool.run(fn, *args, timeout=timeout)

    def rest(self) -> None:
        """Lets groups go that would wake often while others work."""
        rested(self._pool, REST)

    @property
    def pids(self) -> list[int | None]:
        """The process ids by rank; none before the first call and after a broken one."""
        return [] if self._pool is None else self._pool.pids

    def close(self) -> None:
        """Lets the ranks end, and waits for it."""
        if self._pool is not None:
            self._pool.close()


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """A test leaves no world behind in this process: the next one would find itself in it."""
    yield
    if dist.is_initialized():
        destroy_process_groups()
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
        return launch(fn, world_size, *args, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def warm_of_session() -> Iterator[dict[int, Pool]]:
    pools: dict[int, Pool] = {}
    yield pools
    for found in pools.values():
        found.close()


@pytest.fixture(scope="module")
def warm(warm_of_session: dict[int, Pool]) -> Iterator[Callable[..., list[object]]]:
    """`world`, on ranks that stay: they have imported what a compiler needs. What they compiled is forgotten."""

    def run(fn: Callable[..., T], world_size: int, *args: object, timeout: float = LIMIT) -> list[T]:
        found = warm_of_session[world_size] = fit(warm_of_session.get(world_size), world_size)
        return found.run(forgetful, fn, *args, timeout=timeout)

    yield run
    for found in warm_of_session.values():
        rested(found, REST)


def forgetful(fn: Callable[..., T], *args: object) -> T:
    """`fn(*args)` as in a process that has compiled nothing yet."""
    torch.compiler.reset()
    return fn(*args)
