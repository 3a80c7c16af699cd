"""What is looked up again leaves nothing behind: no cache grows, no object stays, no byte in a list.

What calls leave behind grows in every round of calls; what axes or torch allocate once doesn't.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import pkgutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import axes
from axes.algebra.errors import AxesError
from axes.runtime import graphs

FILES = str(Path(axes.__file__).parent / "*")
WARM, ROUNDS, CALLS = 3, 3, 6

Call = Callable[[], object]


def caches() -> dict[str, functools._lru_cache_wrapper]:
    """Every cache of axes, also those that decorators hide."""
    every = [thing for thing in gc.get_objects() if type(thing) is functools._lru_cache_wrapper]
    ours = [cache for cache in every if cache.__module__.startswith("axes.")]
    return {f"{cache.__module__}.{cache.__qualname__} {id(cache):x}": cache for cache in ours}


@contextmanager
def watched() -> Iterator[None]:
    """Inside, Python's memory is traced, and `gc.get_objects()` are those that were made inside."""
    gc.collect()
    gc.freeze()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.unfreeze()


def measured(known: dict[str, functools._lru_cache_wrapper]) -> dict[str, int]:
    """Objects, bytes by line of axes, entries by cache."""
    sys._clear_type_cache()  # Python's own, of the attributes that torch looks for in each type of an operand
    gc.collect()
    lines = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, FILES)]).statistics("lineno")
    sizes = {f"bytes of {line.traceback[0]}": line.size for line in lines}
    entries = {f"entries of {name}": cache.cache_info().currsize for name, cache in known.items()}
    return {"objects": len(gc.get_objects()), **sizes, **entries}


def growing(calls: list[Call]) -> list[str]:
    """What grows by repeated calls: at each round, and by one for each call at least."""
    for _ in range(WARM):
        for call in calls:
            call()
    known = caches()
    with watched():
        found = [measured(known)]
        for _ in range(ROUNDS):
            for _ in range(CALLS):
                for call in calls:
                    call()
            found.append(measured(known))
    rounds = [
        {what: after.get(what, 0) - before.get(what, 0) for what in (*before, *after)}
        for before, after in itertools.pairwise(found)
    ]
    return [f"{what}: {by}" for what, by in rounds[0].items() if all(grown.get(what, 0) >= CALLS for grown in rounds)]


@pytest.fixture
def mesh() -> Iterator[axes.Mesh]:
    with axes.simulate(8), axes.init_mesh("dp=2 tp=4", device_type="cpu") as made:
        yield made


def trained(y: torch.Tensor) -> None:
    (axes.to_local(y, grad="summed") if isinstance(y, DTensor) else y).sum().backward()


@axes.shard_map("b@dp s@tp d -> b@dp s@tp d")
def region(x: torch.Tensor) -> torch.Tensor:
    return axes.ppermute(x, "tp", shift=1) * axes.axis_index("tp")


def test_operations_on_dtensors_leave_nothing_behind(mesh):
    whole = torch.ones(4, 8, 4)
    x = axes.shard(whole, "b@dp s@tp d").requires_grad_()
    w = axes.shard(torch.ones(4, 8), "d f").requires_grad_()
    pending = axes.from_local(torch.ones(2, 8, 4), "b@dp s d | sum@tp").requires_grad_()
    there = axes.sharding_of(x)
    found = growing(
        [
            lambda: trained(axes.reshard(x, "b s@() d")),
            lambda: trained(axes.reshard(pending, there)),
            lambda: trained(axes.rearrange(x, "b s@tp (h k) -> b h@tp s k", k=2)),
            lambda: trained(axes.reduce(x, "b s@tp d -> b d", "mean")),
            lambda: trained(axes.reduce(pending, "b s d -> b d", "sum")),
            lambda: trained(axes.repeat(x, "b s d -> b s d n", n=2)),
            lambda: trained(axes.einsum(x, w, "b s@tp d, d f -> b s@tp f")),
            lambda: trained(region(x)),
            lambda: trained(axes.from_local(axes.to_local(x), "b@dp s@tp d")),
            lambda: axes.unshard(axes.shard(whole, "b@dp s@tp d")),
        ]
    )
    assert not found, "\n".join(found)


def test_operations_on_plain_tensors_leave_nothing_behind(mesh):
    x, w = torch.ones(4, 8, 4, requires_grad=True), torch.ones(4, 8, requires_grad=True)
    sizes = {"send_sizes": [1, 0, 3, 0], "recv_sizes": [1, 1, 2, 0]}
    found = growing(
        [
            lambda: trained(axes.reshard(x, "b s@tp d -> b s d")),
            lambda: trained(axes.rearrange(x, "b s@tp d -> b s d@tp")),
            lambda: trained(axes.reduce(x, "b s@tp d -> b d", "max")),
            lambda: trained(axes.repeat(x, "b s d -> b s d n", n=2)),
            lambda: trained(axes.einsum(x, w, "b s d@tp, d@tp f -> b s@tp f")),
            lambda: trained(axes.psum(x, ("dp", "tp"))),
            lambda: trained(axes.all_to_all(x, "tp", 1, 0)),
            lambda: trained(axes.all_to_all(x, "tp", **sizes)),
        ]
    )
    assert not found, "\n".join(found)


def test_mistakes_leave_nothing_behind(mesh):
    x = axes.shard(torch.ones(4, 8, 4), "b@dp s@tp d").requires_grad_()
    wrong: list[Call] = [
        lambda: axes.reshard(x, "b s@(dp dp) d"),
        lambda: axes.rearrange(x, "b s@dp d -> b s d"),
        lambda: axes.reduce(axes.to_local(x), "b s@tp d -> b s e", "sum"),
        lambda: axes.psum(x, "tp"),
    ]

    def caught(call: Call) -> None:
        with suppress(AxesError):
            call()
            pytest.fail("no error")

    found = growing([functools.partial(caught, call) for call in wrong])
    assert not found, "\n".join(found)


def test_meshes_of_one_content_leave_nothing_behind(mesh):
    x = torch.ones(4, 8)
    found = growing([lambda: axes.psum(axes.unshard(axes.shard(x, "b@a s@b", mesh=again())), "a", mesh=again())])
    assert not found, "\n".join(found)


def again() -> axes.Mesh:
    return axes.init_mesh("a=4 b=2", device_type="cpu")


def test_a_graph_that_is_made_again_is_given_the_numbers_that_it_had(mesh):
    x = axes.shard(torch.ones(4, 8, 4), "b@dp s@tp d")

    def numbers() -> int:
        torch._dynamo.reset()
        torch.compile(lambda x: axes.rearrange(axes.reshard(x, "b s@() d"), "b s d -> d b s"), backend="eager")(x)
        return len(graphs._things)

    assert numbers() == numbers()


UNBOUNDED = {
    "axes.algebra.plan._Assembly._near",  # gone with the assembly of one plan
    "axes.runtime.forkserver._server_of",  # one for each process, which is one
    "axes.runtime.graphs._number",  # compiled graphs have the numbers in them
    "axes.runtime.transfer._run_main",  # one for the script that a process serves
}


def test_what_is_cached_for_other_shapes_has_a_bound():
    for found in pkgutil.walk_packages(axes.__path__, "axes."):
        importlib.import_module(found.name)
    every = {
        f"{cache.__module__}.{cache.__qualname__}": cache.cache_parameters()["maxsize"] for cache in caches().values()
    }
    assert len(every) > 40
    assert {name for name, bound in every.items() if bound is None} <= UNBOUNDED


# ---------------------------------------------------------------------- the watch sees what it is for

LEFT: list[object] = []


@pytest.mark.parametrize(
    ("leak", "what"),
    [
        (lambda i: LEFT.append([i]), "objects"),
        (lambda i: LEFT.append(axes.Mesh("a=2").layout("a")), "bytes of"),
        (lambda i: axes.reshard(axes.shard(torch.ones(8, i + 8), "b@dp s"), "b s@dp"), "entries of axes.runtime"),
    ],
    ids=["an object", "memory of axes", "an entry of a cache"],
)
def test_what_is_left_behind_is_seen(mesh, leak, what):
    left = iter(range(10_000))
    found = growing([lambda: leak(next(left))])
    LEFT.clear()
    assert any(what in text for text in found), found
