"""What is used again and again leaves nothing behind: lookups, worlds, meshes, launches, operations of ever-new shapes.

Descriptors, threads, child processes and memory are as before, once the caches are full. `make test` has the short runs,
`make test-full` those of 100,000 operations, 1,000 meshes and 200 launches.
"""

from __future__ import annotations

import ast
import gc
import itertools
import os
import re
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

import axes
from tests.conftest import forgets_meshes

FILES = Path(axes.__file__).parent
MIB = 1 << 20
Call = Callable[[], object]

# ------------------------------------------------------------------------------------- lookups


def measured() -> dict[str, int]:
    """How many objects there are that were made since `gc.freeze()`, and bytes by line of axes."""
    sys._clear_type_cache()  # Python's own, of the attributes that torch looks for in each type of an operand
    gc.collect()
    objects = len(gc.get_objects())
    ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"{FILES}/*")]).statistics("lineno")
    return {"objects": objects, **{f"bytes of {line.traceback[0]}": line.size for line in ours}}


def growing(calls: list[Call], times: int = 6) -> list[str]:
    """What grows by repeated calls: in each of three rounds, and by one for each call at least."""
    for call in calls * 3:
        call()
    gc.collect()
    gc.freeze()
    tracemalloc.start()
    try:
        measured()  # the first look compiles a pattern, and what is left of that would be missing afterwards
        found = [measured()]
        for _ in range(3):
            for call in calls * times:
                call()
            found.append(measured())
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    rounds = [{what: b.get(what, 0) - a.get(what, 0) for what in (*a, *b)} for a, b in itertools.pairwise(found)]
    return [f"{what}: {by}" for what, by in rounds[0].items() if all(grown.get(what, 0) >= times for grown in rounds)]


def trained(y: torch.Tensor) -> None:
    (axes.to_local(y, grad="summed") if isinstance(y, DTensor) else y).sum().backward()


@axes.shard_map("b@dp s@tp d -> b@dp s@tp d")
def region(x: torch.Tensor) -> torch.Tensor:
    return axes.ppermute(x, "tp", shift=1) * axes.axis_index("tp")


def refused(call: Call) -> None:
    with pytest.raises(axes.AxesError):
        call()


def lookups(whole: torch.Tensor, z: torch.Tensor) -> dict[str, list[Call]]:
    x = axes.shard(whole, "b@dp s@tp d").requires_grad_()
    w = torch.ones(4, 8, requires_grad=True)
    v = axes.shard(torch.ones(4, 8), "d f").requires_grad_()
    pending = axes.from_local(torch.ones(2, 8, 4), "b@dp s d | sum@tp").requires_grad_()
    there = axes.sharding_of(x)
    return {
        "DTensors": [
            lambda: trained(axes.reshard(x, "b s@() d")),
            lambda: trained(axes.reshard(pending, there)),
            lambda: trained(axes.rearrange(x, "b s@tp (h k) -> b h@tp s k", k=2)),
            lambda: trained(axes.reduce(x, "b s@tp d -> b d", "mean")),
            lambda: trained(axes.repeat(x, "b s d -> b s d n", n=2)),
            lambda: trained(axes.einsum(x, v, "b s@tp d, d f -> b s@tp f")),
            lambda: trained(region(x)),
            lambda: trained(axes.from_local(axes.to_local(x), "b@dp s@tp d")),
            lambda: axes.unshard(axes.shard(whole, "b@dp s@tp d")),
        ],
        "plain tensors": [
            lambda: trained(axes.reshard(z, "b s@tp d -> b s d")),
            lambda: trained(axes.rearrange(z, "b s@tp d -> b s d@tp")),
            lambda: trained(axes.reduce(z, "b s@tp d -> b d", "max")),
            lambda: trained(axes.einsum(z, w, "b s d@tp, d@tp f -> b s@tp f")),
            lambda: trained(axes.psum(z, ("dp", "tp"))),
            lambda: trained(axes.all_to_all(z, "tp", send_sizes=[1, 0, 3, 0], recv_sizes=[1, 1, 2, 0])),
        ],
        "mistakes": [
            lambda: refused(lambda: axes.reshard(x, "b s@(dp dp) d")),
            lambda: refused(lambda: axes.rearrange(x, "b s@dp d -> b s d")),
            lambda: refused(lambda: axes.psum(x, "tp")),
        ],
        "meshes of one content": [
            lambda: axes.psum(z, "a", mesh=axes.init_mesh("a=4 b=2", device_type="cpu")),
            lambda: axes.unshard(axes.shard(whole, "b@a s@b d", mesh=axes.init_mesh("a=4 b=2", device_type="cpu"))),
        ],
    }


@pytest.mark.parametrize("kind", ["DTensors", "plain tensors", "mistakes", "meshes of one content"])
def test_what_is_looked_up_again_leaves_nothing_behind(kind):
    with axes.simulate(8), axes.init_mesh("dp=2 tp=4", device_type="cpu"):
        found = growing(lookups(torch.ones(4, 8, 4), torch.ones(4, 8, 4, requires_grad=True))[kind])
    assert not found, "\n".join(found)


def test_what_a_graph_refers_to_stays_for_those_that_have_it_and_is_gone_with_the_last():
    def traced(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    shared = axes.shard_map(traced, "b@dp s -> b@dp s")
    held = [
        lambda x, f=shared: axes.rearrange(f(x), "b s -> s b"),
        lambda x, f=shared: axes.rearrange(f(x), "b s -> s b"),
    ]
    with axes.simulate(4), axes.init_mesh("dp=4", device_type="cpu"):
        x = axes.shard(torch.ones(4, 8), "b@dp s")
        torch._dynamo.reset()
        first, second = (torch.compile(each, backend="eager") for each in held)
        found = [first(x), second(x)]
        torch._dynamo.eval_frame.reset_code(held[0].__code__)
        gc.collect()
        assert all(torch.equal(axes.to_local(y), axes.to_local(second(x))) for y in found)
        gone = weakref.ref(traced)
        del traced, shared, held, first, second
        torch._dynamo.reset()
    gc.collect()
    assert gone() is None


UNBOUNDED = re.compile(r"functools\.cache$|lru_cache\(None\)|maxsize=None|from functools import .*\bcache\b")
EMPTY = re.compile(r"\{\}|\[\]|(set|dict|list|Counter|OrderedDict)\(\)|defaultdict\(.*\)")


def test_nothing_is_cached_without_a_bound_or_collected_in_a_module():
    found = []
    for path in sorted(FILES.rglob("*.py")):
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
        for calls in lookups(torch.ones(4, 8, 4), torch.ones(4, 8, 4, requires_grad=True)).values():
            for call in calls[:5]:
                call()
        axes.shard(torch.ones(8), "a@tp", mesh=mesh["tp"])
        (axes.shard(torch.ones(4, 8, 4), "b@dp s@tp d") + 1).full_tensor()
    return [weakref.ref(thing) for thing in (mesh.device_mesh, mesh.axis("tp").group, mesh.axis("dp").group)]


def alive(refs: list[weakref.ref]) -> list[object]:
    gc.collect()
    return [thing for thing in (ref() for ref in refs) if thing is not None]


@forgets_meshes
def test_nothing_of_a_world_stays_when_it_ends_or_its_groups_are_destroyed():
    with axes.simulate(8):
        destroyed = used(axes.init_mesh("dp=2 tp=4", device_type="cpu"))
        assert len(alive(destroyed)) == 3
        axes.destroy_process_groups()
        assert not alive(destroyed)
        left = used(axes.init_mesh("dp=2 tp=4", device_type="cpu"))
    assert not alive(left)


# ------------------------------------------------------------------------------------- long runs


Held = dict[str, int]
"""What a process holds: Python's blocks of memory, bytes of all memory, descriptors, threads, child processes."""

CLEAR_CACHES: Call = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
"""Python looks attributes up in a table of 4,096 entries that keep the names, and fills it over hundreds of launches."""


def held() -> Held:
    CLEAR_CACHES()
    for _ in range(3):
        gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    entries = [len(os.listdir(folder)) for folder in ("/proc/self/fd", "/proc/self/task")]
    found = (sys.getallocatedblocks(), pages * os.sysconf("SC_PAGE_SIZE"), *entries, len(children))
    return dict(zip(("blocks", "resident", "descriptors", "threads", "children"), found, strict=True))


def looked(run: Callable[[int], object], count: int, each: int) -> list[Held]:
    """What the process holds after every `each` of so many steps."""
    found = []
    for i in range(count):
        run(i)
        if i % each == each - 1:
            found.append(held())
    return found


def no_growth(found: list[Held], steps: int, objects: float = 1, looks: int = 1) -> None:
    """Over the last so many looks, each so many steps after the one before, a step leaves less than an object, or than
    so many."""
    before, after, steps = found[-1 - looks], found[-1], steps * looks
    allowed = {"blocks": objects * steps, "resident": 4 * MIB + 1024 * steps}
    more = {name: after[name] - before[name] for name in after}
    grown = [f"{by:,} more {name}" for name, by in more.items() if by > allowed.get(name, 0)]
    assert not grown, f"{grown} after {steps:,} steps: {found}"


def rank_and_sum() -> tuple[int, float]:
    mesh = axes.init_mesh("dp=2", device_type="cpu")
    return dist.get_rank(), axes.psum(torch.ones(()), "dp", mesh=mesh).item()


def launched(_: int) -> None:
    assert axes.launch(rank_and_sum, 2, timeout=60) == [(0, 2.0), (1, 2.0)]


def full(*arguments: object) -> object:
    return pytest.param(*arguments, marks=pytest.mark.full)


@pytest.mark.full
def test_launches_leave_no_process_descriptor_or_thread():
    no_growth(looked(launched, 200, 50), 50)


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
    lambda n, x, shard: axes.shard_map(lambda t: axes.ppermute(t, "tp", shift=1), "a@dp b@tp -> a@dp b@tp")(x),
    lambda n, x, shard: refused(lambda: axes.rearrange(x, f"a{n}@dp b{n}@tp -> c{n}")),
    lambda n, x, shard: axes.rearrange(shard.requires_grad_(), f"a{n}@dp b{n}@tp -> b{n}@tp a{n}").sum().backward(),
    lambda n, x, shard: axes.einsum(shard, shard, f"a{n}@dp b{n}@tp, c{n} b{n}@tp -> a{n} c{n}"),
    lambda n, x, shard: axes.all_gather(axes.psum(shard, "dp"), "tp", 1),
    lambda n, x, shard: str(
        axes.plan(f"a{n}@dp b{n}@tp", f"a{n} b{n}@(dp tp)", x.shape, mesh=axes.sharding_of(x).mesh)
    ),
    lambda n, x, shard: str(axes.explain(f"a{n}@dp b{n}@tp -> a{n} b{n}", x.shape, mesh=axes.sharding_of(x).mesh)),
    lambda n, x, shard: axes.Mesh(f"x{n}={x.shape[0]} y{n}={x.shape[1]}").sharding(f"a{n}@x{n} b{n}@y{n}"),
    lambda n, x, shard: axes.unshard(axes.shard(shard.T, f"a{n}@dp b{n}@tp")),
]
"""Operations of names that there were never before. torch's own of DTensors aren't among them: torch remembers those for
ever (docs/limits.md)."""


def ever_new(number: int) -> None:
    """One operation, of a shape that it never had: 2 to 634 rows and columns."""
    operation, count = OPERATIONS[number % len(OPERATIONS)], number // len(OPERATIONS)
    shard = torch.ones(count % 317 + 1, count // 317 + 1)
    operation(number, axes.from_local(shard, "a@dp b@tp"), shard.clone())


@pytest.mark.full
def test_a_hundred_thousand_ever_new_operations_leave_nothing_once_the_caches_are_full():
    # The last cache is full after 125,000. A dictionary that is made anew at its next size is no leak.
    with axes.simulate(4, rank=1), axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        no_growth(looked(ever_new, 165_000, 5_000), 5_000, looks=3)


# What torch remembers of ever-new shapes, without a bound: docs/limits.md gives the calls that clear it.

PAGE = (FILES.parent / "docs/limits.md").read_text(encoding="utf-8")
CLEARS = re.search(r"```text\n(from torch\.distributed\.tensor import _redistribute.*?)```", PAGE, re.DOTALL)[1]


@pytest.mark.full
def test_what_torch_remembers_of_ever_new_shapes_is_freed_by_the_calls_of_the_page():
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        exec(CLEARS)
        tracemalloc.start()
        for x in [axes.from_local(torch.ones(1, number + 1), "a@dp b@tp") for number in range(50)]:
            (x + 1).redistribute(placements=[Replicate(), Replicate()])
        before, _ = tracemalloc.get_traced_memory()
        exec(CLEARS)
        gc.collect()
        assert before - tracemalloc.get_traced_memory()[0] > 50_000
        tracemalloc.stop()


NAMES = 8
"""So many names take turns in meshes: what axes remembers of text has a bound, which these don't reach."""


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


@pytest.mark.parametrize(("count", "each"), [(48, 16), full(1_000, 200)])
def test_meshes_whose_groups_are_ended_leave_a_name(world, count, each):
    for found in world(meshes, 2, count, each, timeout=900):
        no_growth(found, each, 16)  # torch keeps the tag of every group that ever was, axes the last 4,096 names
