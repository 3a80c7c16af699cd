"""What is looked up again leaves nothing behind: no cache grows, no object stays, no byte in a list.

What calls leave behind grows in every round of calls; what axes or torch allocate once doesn't.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import gc
import importlib
import itertools
import pkgutil
import re
import sys
import tracemalloc
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import axes
from axes.algebra.errors import AxesError, MeshError
from axes.runtime import graphs, groups
from tests.conftest import forgets_meshes

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
    objects = len(gc.get_objects())  # before those that the look at the memory makes: as many as lines have some
    lines = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, FILES)]).statistics("lineno")
    sizes = {f"bytes of {line.traceback[0]}": line.size for line in lines}
    entries = {f"entries of {name}": cache.cache_info().currsize for name, cache in known.items()}
    return {"objects": objects, **sizes, **entries}


def growing(calls: list[Call]) -> list[str]:
    """What grows by repeated calls: at each round, and by one for each call at least."""
    for _ in range(WARM):
        for call in calls:
            call()
    known = caches()
    with watched():
        measured(known)  # the first look compiles a pattern, and what is left of that would be missing afterwards
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


def held() -> tuple[int, int]:
    """How many things compiled graphs refer to, by number and by name."""
    gc.collect()
    graphs._held_by_none.clear()
    return len(graphs._by_number), len(vars(graphs.kept))


def test_what_a_graph_refers_to_is_gone_with_the_graph(mesh):
    x = axes.shard(torch.ones(4, 8, 4), "b@dp s@tp d")
    torch._dynamo.reset()
    before = held()

    def compiled() -> Callable[[DTensor], DTensor]:
        return torch.compile(
            lambda x: axes.rearrange(region(axes.reshard(x, "b@dp s@tp d")), "b s@tp d -> d b s"), backend="eager"
        )

    def counted() -> tuple[int, int]:
        compiled()(x)
        return held()

    inside = counted()
    assert inside[0] > before[0]
    assert inside[1] > before[1]
    torch._dynamo.reset()
    assert held() == before
    assert counted() == inside


def test_what_two_graphs_refer_to_stays_for_the_second(mesh):
    x = axes.shard(torch.ones(4, 8, 4), "b@dp s@tp d")
    code = (lambda x: axes.rearrange(region(x), "b s@tp d -> d b s")).__code__
    first, second = (types.FunctionType(code.replace(co_name=name), globals()) for name in ("first", "second"))
    torch._dynamo.reset()
    before = held()
    whole = axes.unshard(torch.compile(first, backend="eager")(x))
    of_one = held()
    assert of_one > before
    run_second = torch.compile(second, backend="eager")
    assert torch.equal(axes.unshard(run_second(x)), whole)
    assert held() == of_one
    torch._dynamo.eval_frame.reset_code(first.__code__)
    assert held() == of_one
    assert torch.equal(axes.unshard(run_second(x)), whole)
    torch._dynamo.eval_frame.reset_code(second.__code__)
    assert held() == before


def test_what_is_cached_for_other_shapes_has_a_bound():
    for found in pkgutil.walk_packages(axes.__path__, "axes."):
        importlib.import_module(found.name)
    every = {
        f"{cache.__module__}.{cache.__qualname__}": cache.cache_parameters()["maxsize"] for cache in caches().values()
    }
    assert len(every) > 40
    assert not [name for name, bound in every.items() if bound is None]


UNBOUNDED = re.compile(r"functools\.cache$|lru_cache\(None\)|maxsize=None|from functools import .*\bcache\b")
EMPTY = re.compile(r"\{\}|\[\]|(set|dict|list|Counter|OrderedDict)\(\)|defaultdict\(.*\)")


def test_nothing_is_cached_without_a_bound_or_collected_in_a_module():
    found = []
    for path in sorted(Path(axes.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        uses = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute | ast.Call | ast.keyword | ast.ImportFrom)]
        found += [f"{path}: {text}" for text in map(ast.unparse, uses) if UNBOUNDED.fullmatch(text)]
        values = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
        found += [f"{path} line {value.lineno}" for value in values if EMPTY.fullmatch(ast.unparse(value))]
    assert not found, "\n".join(found)


# ---------------------------------------------------------------------- worlds that have ended


def used(mesh: axes.Mesh) -> list[weakref.ref]:
    """Does a bit of everything on a mesh; refers to what this needed of the world."""
    with mesh:
        x = axes.shard(torch.ones(4, 8, 4), "b@dp s@tp d").requires_grad_()
        w = axes.shard(torch.ones(4, 8), "d f").requires_grad_()
        y = axes.einsum(region(axes.rearrange(x, "b s@tp d -> b s@tp d")), w, "b s@tp d, d f -> b s@tp f")
        y = axes.reduce(y, "b s@tp f -> b f", "mean")
        trained(axes.reshard(y, "b@dp f@tp"))
        axes.lift(axes.shard(torch.ones(8), "a@tp", mesh=mesh["tp"]), mesh)
        axes.unshard(axes.shard(torch.ones(4, 8, 4), "b@dp s@tp d"))
        (x + 1).full_tensor()
        z = torch.ones(4, 8, 4, requires_grad=True)
        trained(axes.psum(axes.rearrange(z, "b s@tp d -> b s d@tp"), ("dp", "tp")))
        trained(axes.reduce(z, "b s@tp d -> b d", "max"))
    things = [mesh.device_mesh, mesh.axis("tp").group, mesh.axis("dp").group, groups.current_world()]
    return [weakref.ref(thing) for thing in things]


def alive(refs: list[weakref.ref]) -> list[object]:
    gc.collect()
    return [thing for thing in (ref() for ref in refs) if thing is not None]


@forgets_meshes
def test_nothing_of_a_world_stays_when_its_groups_are_destroyed():
    found = used(axes.init_mesh("dp=1 tp=1", device_type="cpu"))
    assert len(alive(found)) == len(found)
    axes.destroy_process_groups()
    assert not alive(found)


@forgets_meshes
def test_groups_that_axes_made_in_the_world_of_another_are_gone_when_they_are_destroyed():
    with axes.simulate(8):
        *found, _ = used(axes.init_mesh("dp=2 tp=4", device_type="cpu"))
        assert len(alive(found)) == len(found)
        axes.destroy_process_groups()
        assert not alive(found)
        used(axes.init_mesh("dp=2 tp=4", device_type="cpu"))


@forgets_meshes
def test_nothing_of_a_simulated_world_stays_when_it_ends():
    with axes.simulate(8):
        found = used(axes.init_mesh("dp=2 tp=4", device_type="cpu"))
    assert not alive(found)


def test_what_a_world_has_found_is_bounded_and_not_for_the_next():
    @groups.of_world(2)
    def rank(_: int) -> int:
        return torch.distributed.get_rank()

    for mine in (3, 5):
        with axes.simulate(8, rank=mine):
            assert [rank(i) for i in (0, 1, 2, 2)] == [mine] * 4
            info = groups.current_world().caches[rank.__wrapped__].cache_info()
            assert (info.hits, info.misses, info.currsize) == (1, 3, 2)


def test_what_a_world_has_found_is_an_error_once_others_have_ended_it():
    @groups.of_world(2)
    def size(_: int) -> int:
        return torch.distributed.get_world_size()

    with axes.simulate(8):
        assert size(0) == 8
        torch.distributed.destroy_process_group()
        gc.collect()
        with pytest.raises(MeshError, match="isn't running"):
            size(0)


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
    fnmatch._compile_pattern.cache_clear()  # as in a process that looks at the memory for the first time
    left = iter(range(10_000))
    found = growing([lambda: leak(next(left))])
    LEFT.clear()
    assert any(what in text for text in found), found
