"""Transfers beside their law (`tests.law_transfers`): who sends, what is refused, what is told where a rank fails, memory."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import axes
from axes import Mesh
from tests.common import case, error_of
from tests.counting import Counter
from tests.strategies import MeshCase, examples, meshes

# --- the plan alone -------------------------------------------------------------------------------

SPECS = ("a b", "a@x b", "a b@(x y)", "a@y b@x", "(p=4 q@y) b@x")


@pytest.mark.parametrize(("source", "target", "node"), list(product(SPECS, SPECS, (2, 8))))
def test_holders_of_the_same_share_what_they_send(source: str, target: str, node: int):
    """By brute force: for each element who has it and who lacks it."""
    shape, ends = (128, 160), [Mesh("x=2 y=2", ranks=ranks, ranks_per_node=node) for ranks in (range(4), (3, 6, 2, 7))]
    move = axes.transfer({"w": source}, {"w": target}, *ends, {"w": shape}, dtype="bfloat16")
    has, lacks = (torch.zeros(8, *shape, dtype=torch.bool) for _ in range(2))
    for held, mesh, spec in ((has, ends[0], source), (lacks, ends[1], target)):
        for rank in range(4) if mesh is ends[0] else (3, 6, 2, 7):
            rows, columns = mesh.sharding(spec).local_indices(shape, rank)
            for one in rows if isinstance(rows, tuple) else (rows,):
                for two in columns if isinstance(columns, tuple) else (columns,):
                    held[rank, one, two] = True
    lacks &= ~has
    fair = (has * lacks.sum(0) / has.sum(0)).sum((1, 2)) * 2
    most = int(lacks.sum((1, 2)).max()) * 2
    for rank in range(8):
        assert sum(step.bytes_in for step in move.at(rank).steps) == lacks[rank].sum() * 2
        assert sum(step.bytes_out for step in move.at(rank).steps) <= max(fair[rank], most)
    assert move.lower_bound == lacks.sum() * 2


@given(meshes(), st.data())
@examples(40)
def test_a_sub_mesh_has_all_names_of_its_ranks(drawn: MeshCase, data: st.DataObject):
    """Also those that cut its axes: each rank has of the tensor what it has on the whole mesh."""
    names = data.draw(st.sampled_from(drawn.disjoint).flatmap(st.permutations))[: data.draw(st.integers(1, 3))]
    mesh, rank = drawn.mesh, data.draw(st.sampled_from(drawn.ranks))
    taken = mesh.at(rank)[tuple(names)]
    for name in mesh.names:
        if taken.layout_of_all.contains(mesh.layout(name)):
            move = axes.transfer({"x": f"a@{name}"}, {"x": "a"}, taken, Mesh("t=1"), {"x": (24,)})
            end, whole = move.tensors[0].source, mesh.sharding(f"a@{name}")
            ranks = [*mesh.universe.group(taken.layout_of_all, rank)]
            assert sorted(end.universe.ranks) == sorted(ranks)
            assert end.mesh.shape == taken.shape
            assert [end.tile((24,), each) for each in ranks] == [whole.tile((24,), each) for each in ranks]


def test_within_a_node_before_across_nodes():
    """Four holders, one on each node of two ranks: every receiver is served by its own node."""
    source, target = Mesh("dp=4", ranks=(0, 2, 4, 6), ranks_per_node=2), Mesh("dp=4", ranks=(1, 3, 5, 7))
    move = axes.transfer({"w": "a b"}, {"w": "a b"}, source, target, {"w": (128, 64)})
    assert [move.at(rank).partners for rank in (1, 3, 5, 7)] == [(0,), (2,), (4,), (6,)]


def test_buckets_bound_what_a_rank_packs_and_experts_on_ranks_of_their_own_fill_the_same_ones():
    """Four experts on two ranks each, and a tensor on all eight: a bucket has a piece of each, as ranks have room."""
    here, there = Mesh("ep=4 dp=2"), Mesh("dp=2 ep=4", ranks=range(8, 16))
    names = [f"experts.{expert}.{part}" for expert in range(4) for part in ("up", "down")]
    specs, shapes = dict.fromkeys(["all", *names], "f d"), dict.fromkeys(["all", *names], (16, 16))
    sources = {"all": here, **{name: here.at(2 * int(name[8]))["dp"] for name in names}}
    targets = {"all": there, **{name: there.at(8 + int(name[8]))["dp"] for name in names}}
    move = axes.transfer(specs, specs, sources, targets, shapes, bucket_mb=1 / 1024)
    steps = [step for rank in range(16) for step in move.at(rank).steps]
    assert max(max(step.bytes_in, step.bytes_out) for step in steps) <= 1024
    # No rank has room for more: it may have to send what it has to two ranks that lack it.
    assert len(move.at(0).steps) == 6
    assert all(move.at(rank).peak_bytes <= 3 * 1024 * 2 + 4 * 1024 for rank in range(16))
    again = pickle.loads(pickle.dumps(move))
    assert (again.fingerprint, again.lower_bound) == (move.fingerprint, move.lower_bound)


def test_tied_tensors_go_once_each_way():
    one, two = Mesh("a=2"), Mesh("a=2", ranks=(2, 3))
    shapes = {"embed": (4, 6), "head": (6, 4), "copy": (4, 6)}
    table = {("embed", "head"): ("w", "v d, d v -> v d")}
    sources = {"embed": "v@a d", "head": "d v", "copy": "v d"}
    move = axes.transfer(sources, {"w": "v d@a", "copy": "v d"}, one, two, shapes, rules=table)
    size = 4 * 6 * 4
    assert (move.lower_bound, move.inverse.lower_bound) == (size + 2 * size, size + 2 * size), "'head' isn't written"
    stack = {"w": ("z", "x.{e}", "e f d -> e f d, e f d")}
    targets = {"z": "e f d", "x.0": "f d", "x.1": "f d"}
    move = axes.transfer({"w": "e f@a d"}, targets, one, Mesh("b=1", ranks=[9]), {"w": (2, 4, 3)}, rules=stack)
    assert move.inverse.lower_bound == 2 * 4 * 3 * 4, "what is tied with its parts is written once on the way back"


# --- on ranks -------------------------------------------------------------------------------------

SOURCES = {"up": "f@fsdp d", "down": "d@fsdp f", "norm": "d@fsdp"}
TARGETS = {"up": "f@tp d", "down": "d f@tp", "norm": "d"}
SHAPES = {"up": (8, 12), "down": (12, 8), "norm": (12,)}
State = dict[str, Any]


def both_sides(**how: Any) -> tuple[axes.Mesh, axes.Mesh, Any]:
    """A trainer on ranks 0 to 3, a server on ranks 4 to 7, and the plan between them."""
    trainer = axes.init_mesh("fsdp=4", ranks=range(4), device_type="cpu")
    server = axes.init_mesh("dp=2 tp=2", ranks=range(4, 8), device_type="cpu")
    return trainer, server, axes.transfer(SOURCES, TARGETS, trainer, server, SHAPES, **how)


def state(mesh: axes.Mesh, specs: dict[str, str], dtype: torch.dtype = torch.float32) -> State:
    """A state dict on a mesh, its values whole numbers; nothing on ranks outside it."""
    if mesh.coordinate is None:
        return {}
    wholes = {name: torch.arange(float(math.prod(shape))).reshape(shape).to(dtype) for name, shape in SHAPES.items()}
    return {name: axes.shard(whole, specs[name], mesh=mesh) for name, whole in wholes.items()}


def shards(tensors: State) -> State:
    return {name: axes.to_local(x).clone() for name, x in tensors.items()}


def a_state_dict() -> None:
    trainer, server, move = both_sides(dtype=torch.bfloat16)
    held, expected = state(trainer, SOURCES), state(server, TARGETS, torch.bfloat16)
    found = move(held)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].full_tensor(), expected[name].full_tensor()) for name in found)
    into = {name: torch.nn.Parameter(torch.zeros_like(x)) for name, x in expected.items()}
    with axes.debug(check=True), Counter() as counter:
        again = move(dict.fromkeys(SOURCES) if trainer.coordinate is None else held, into)
    assert all(
        again[name] is x and torch.equal(x.full_tensor(), expected[name].full_tensor()) for name, x in into.items()
    )
    ends = SOURCES, {**TARGETS, "step": "d"}
    keeping = axes.transfer(*ends, trainer, server, SHAPES, dtype=torch.bfloat16, rules={None: "step"})
    kept = torch.full((3,), 7.0, dtype=torch.bfloat16)
    assert keeping(held, {**into, "step": kept} if into else {}).get("step", kept) is kept
    assert kept.eq(7).all(), "a target that no source becomes"
    steps = move.at(dist.get_rank()).steps
    for kind, way, planned in (("recv", 2, "bytes_in"), ("send", 3, "bytes_out")):
        counted = sum(each[way] for each in counter.found if each[0] == kind)
        assert 0 <= counted - sum(getattr(step, planned) for step in steps) < 16 * 3 * 4, "pieces begin at 16 bytes"
    back = axes.transfer(TARGETS, SOURCES, server, trainer, SHAPES, dtype="bfloat16")(expected)
    assert all(torch.equal(x.full_tensor(), held[name].full_tensor().bfloat16()) for name, x in back.items())


def test_a_state_dict_of_dtensors_goes_to_other_ranks_and_back_and_as_many_bytes_as_the_plan_says(pool):
    pool.run(a_state_dict)


DTYPES = [
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "bool", "complex64", "complex128"),
]


def every_dtype() -> None:
    mesh = axes.init_mesh("a=8", device_type="cpu")
    for dtype in DTYPES:
        with case(dtype):
            kind = getattr(torch, dtype)
            raw = torch.randint(
                0, 2 if dtype == "bool" else 256, (9, 2, kind.itemsize), generator=torch.Generator().manual_seed(1)
            )
            whole = raw.to(torch.uint8).view(kind).view(9, 2)
            move = axes.transfer({"w": "f@a d"}, {"w": "f d"}, mesh, mesh, {"w": whole})
            found = move({"w": whole[slice(*mesh.sharding("f@a d").local_indices((9, 2))[0].indices(9)[:2])]})["w"]
            assert torch.equal(axes.to_local(found).view(torch.uint8), whole.view(torch.uint8))
    for dtype in ("bfloat16", "float64"):  # of what has no dtype before it arrives
        move = axes.transfer({"w": "f@a d"}, {"w": "f d@a"}, mesh, mesh, {"w": (9, 8)}, dtype=dtype)
        whole = torch.arange(72.0).view(9, 8)
        back = move.inverse(move({"w": axes.shard(whole, "f@a d", mesh=mesh)}))["w"]
        assert torch.equal(back.full_tensor(), whole.to(getattr(torch, dtype)))


def test_tensors_of_any_dtype_arrive_bit_for_bit(pool):
    pool.run(every_dtype)


# --- what is wrong on one rank --------------------------------------------------------------------

MISTAKES: list[tuple[int, Callable[[State, State], tuple[Any, Any]], str]] = [
    (1, lambda x, y: ({**x, "up": torch.zeros(3, 3)}, y), "'up' is on rank 1 a shard of shape [2, 12] ('f@fsdp d' of [8, 12]); found a tensor of shape [3, 3]"),
    (0, lambda x, y: ({**x, "gate": x["up"]}, y), "'gate' isn't a source of the transfer"),
    (1, lambda x, y: ({**x, "up": x["up"].double()}, y), "'up' is float64, the plan is for float32"),
    (1, lambda x, y: ({**x, "up": x["up"].to("meta")}, y), "found it on meta"),
    (1, lambda x, y: ({**x, "up": x["up"].to_sparse()}, y), "takes a dense tensor; found one of layout torch.sparse_coo"),
    (1, lambda x, y: ({**x, "up": torch.nn.UninitializedParameter()}, y), "a lazy parameter that has no shape yet"),
    (6, lambda x, y: (x, {**y, "norm": y["norm"].double()}), "'norm' of into= is float64; what arrives is float32"),
    (6, lambda x, y: (x, {**y, "norm": None}), "'norm' is on rank 6 a shard of shape [12] ('d' of [12]); found None"),
    (6, lambda x, y: (x, {**y, "norm": torch.zeros(1).expand(12)}), "'norm' of into= has several elements in one place, as an expanded tensor has; clone it"),
    (6, lambda x, y: (x, {**y, "norm": inferred()}), "'norm' of into= is an inference tensor; call the transfer in torch.inference_mode()"),
    (6, lambda x, y: (x, {**y, "norm": y["up"].view(-1)[:12]}), "of into= shares memory with"),
    (6, lambda x, y: (x, {**y, "norm": without_memory()}), "'norm' has no memory: its storage has been resized to nothing"),
]  # fmt: skip
"""A rank, what it passes in the place of its sources and of its targets, and what it is told."""


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(12)


def without_memory() -> torch.Tensor:
    found = torch.zeros(12)
    found.untyped_storage().resize_(0)
    return found


def mistaken() -> list[str]:
    trainer, server, move = both_sides(bucket_mb=1e-4)
    rank, found = dist.get_rank(), []
    held, into = shards(state(trainer, SOURCES)), shards(state(server, TARGETS))
    for at, change, _ in MISTAKES:
        call = change(held, into) if rank == at else (held, into)
        found.append(error_of(lambda call=call: move(*call)))
    found.append(
        error_of(lambda: move({**held, "norm": state(trainer, {**SOURCES, "norm": "d"})["norm"]} if held else {}, into))
    )
    other = axes.transfer(SOURCES, TARGETS, trainer, server, SHAPES, bucket_mb=32 if rank == 2 else 64)
    found.append(error_of(lambda: other(held, into)))
    apart = torch.zeros(2, 4, 12) if into else None  # disjoint views of one memory are fine
    views = {} if apart is None else {"up": apart[0], "down": apart[1].view(12, 4), "norm": into["norm"]}
    for name, tile in move(held, views).items():
        assert torch.equal(tile, state(server, TARGETS)[name].to_local()), "after all that the next one is right"
    return found


def test_a_tensor_that_does_not_fit_on_one_rank_is_an_error_on_every_rank_before_anything_is_sent(pool):
    *columns, spec, plan = zip(*pool.run(mistaken), strict=True)
    for column, (at, _, said) in zip(columns, MISTAKES, strict=True):
        for rank, told in enumerate(column):
            with case(f"{said!r}, told on rank {rank}"):
                assert told.startswith("ShardingError: " if rank == at else "DesyncError: "), told
                assert said in told, told
                assert rank == at or f"rank {at} can't take part" in told, told
    assert "'norm' isn't sharded as the plan says\n  plan    d@fsdp of [12]\n  tensor  _" in spec[3]
    assert all("ranks have other plans" in each and "buckets of 33554432" in each for each in plan)


def conjugated() -> None:
    """A view that conjugates or negates is resolved where it is read, and refused where it is written."""
    mesh, rank = axes.init_mesh("tp=8", device_type="cpu"), dist.get_rank()
    whole = torch.complex(torch.arange(24.0), torch.arange(24.0) + 1).view(8, 3)
    move = axes.transfer({"w": "f@tp d"}, {"w": "f d"}, mesh, mesh, {"w": whole})
    own = whole[rank : rank + 1].conj()
    assert torch.equal(axes.to_local(move({"w": own if rank % 2 else own.resolve_conj()})["w"]), whole.conj())
    with pytest.raises(axes.AxesError, match=r"conjugates or negates"):
        move({"w": own}, {"w": torch.zeros_like(whole).conj() if rank == 3 else torch.zeros_like(whole)})


def test_a_conjugate_view_is_read_as_what_it_is(pool):
    pool.run(conjugated)


class Breaks(TorchDispatchMode):
    """A link that breaks at the n-th message."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "c10d" and func.__name__.startswith(("send", "recv")):
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("Connection reset by peer")
        return func(*args, **(kwargs or {}))


def broken_link() -> str:
    trainer, server, move = both_sides(bucket_mb=64 / 2**20)
    held, messages = state(trainer, SOURCES), sum(len(step.ranks) for step in move.at(dist.get_rank()).steps)
    with Breaks(3 * messages // 4):
        found = error_of(lambda: move(held))
    dist.barrier()
    for name, x in move(held).items():
        assert torch.equal(x.to_local(), state(server, TARGETS)[name].to_local())
    return found


def test_a_transfer_that_fails_says_which_tensors_are_whole_and_the_next_one_works(pool):
    for rank, text in enumerate(pool.run(broken_link)):
        assert text.startswith("DesyncError: axes.transfer of 3 tensors in 7 buckets, "), text
        assert "Connection reset by peer" in text
        whole = rf"whole on rank {rank}: ('\w+'(, )?)+; not whole: ('\w+'(, )?)+$"
        assert re.search(whole if rank > 3 else f"rank {rank} gets no tensors$", text), text


LIMIT = 2.0
"""Seconds that ranks of these meshes wait for one another."""


def transfers_without(absent: Sequence[int], many: bool) -> str:
    """A transfer that some ranks don't call, between two that all call; what this rank was told."""
    rank, meshes = dist.get_rank(), []
    for ranks in (range(8), range(7, -1, -1)):
        meshes.append(axes.init_mesh("a=8", ranks=ranks, device_type="cpu", timeout=LIMIT))
        dist.group.WORLD.set_timeout(timedelta(minutes=2))
    whole = torch.arange(64.0).view(8, 8)
    x = axes.shard(whole, "f@a d", mesh=meshes[0])
    move = axes.transfer({"w": "f@a d"}, {"w": "f d@a"}, *meshes, {"w": (8, 8)})

    def call() -> torch.Tensor:
        with torch.no_grad():
            return (axes.reshard({"w": x}, {"w": "f d@a"}) if many else move({"w": x}))["w"].full_tensor()

    assert torch.equal(call(), whole)
    told = "" if rank in absent else error_of(call)
    dist.barrier()
    told = told or error_of(call)  # what it comes to has ended
    dist.barrier()
    assert torch.equal(call(), whole), "the next one is right"
    return told


@pytest.mark.parametrize(("absent", "many"), [((3,), False), ((0, 6), True)])
def test_a_rank_that_never_calls_is_an_error_that_names_it_within_the_limit(pool, absent, many):
    for rank, text in enumerate(pool.run(transfers_without, absent, many)):
        assert text.startswith("DesyncError: axes.transfer of 1 tensor in 1 bucket, the largest 'w' "), text
        if rank not in absent:
            # A rank that comes to its own error late is named by those that were early.
            named = re.search(r"ranks? ([\d, ]+) didn't come to the roll call after axes.transfer of 1", text)
            assert named is not None, text
            assert {*absent} <= {*map(int, named[1].split(","))} <= {*range(8)} - {rank}, text


# --- what a graph has saved -----------------------------------------------------------------------

ROWS, COLUMNS = 512, 1024
"""A whole tensor of 2 MiB: what goes from one of four ranks to another is large enough to be sent from where it lies."""


def twos(mesh: axes.Mesh) -> torch.Tensor:
    return axes.shard(torch.full((ROWS, COLUMNS), 2.0), "f@b d", mesh=mesh).requires_grad_()


# fmt: off
SAVED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "a plain tensor": lambda w: (p := w.to_local().detach().requires_grad_(), p),
    "a view": lambda w: (base := torch.full((ROWS // 4, 2 * COLUMNS), 2.0).requires_grad_(), base[:, ::2]),
    "a shard": lambda w: (w.to_local(), w),
    "a view of a DTensor": lambda w: (w, w.view(ROWS, COLUMNS)),
}
# fmt: on
"""What a graph saves, and what a transfer writes into: the memory of both is the same."""


def written_after_it_is_saved() -> None:
    trainer = axes.init_mesh("a=4", ranks=range(4), device_type="cpu")
    server = axes.init_mesh("b=4", ranks=range(4, 8), device_type="cpu")
    move = axes.transfer({"w": "f@a d"}, {"w": "f@b d"}, trainer, server, {"w": (ROWS, COLUMNS)})
    for name, make in SAVED.items():
        with case(name):
            if server.coordinate is None:
                for _ in range(2):
                    move({"w": torch.ones(ROWS // 4, COLUMNS)})
                continue
            saved, into = make(twos(server))
            loss = (saved * saved).sum()
            move({}, into={"w": into})
            with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
                loss.backward()
            w = torch.nn.Parameter(make(twos(server))[1].detach())
            move({}, into={"w": w})
            (w * w).sum().backward()  # what is saved behind the transfer is right
            grad = w.grad.to_local() if isinstance(w.grad, DTensor) else w.grad
            assert torch.equal(grad, torch.full((ROWS // 4, COLUMNS), 2.0))


def test_backward_refuses_what_a_transfer_has_written_since_it_was_saved(pool):
    pool.run(written_after_it_is_saved)
