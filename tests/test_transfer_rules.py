"""Transfers by layout rules: parts of tensors that become parts of others, from any shards to any shards."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

import axes
from axes.algebra.chunks import tile_shape
from axes.algebra.errors import AxesError, ShardingError, SizeError
from axes.algebra.transfers import Transfer
from axes.runtime import parcels
from tests import transfer_cases
from tests.test_layout_rules import rule, used_sizes
from tests.test_transfer import indices, same_bits, strided, tile_of
from tests.transfer_cases import DrawnMesh

Arrays = dict[str, np.ndarray]

MESHES = [
    DrawnMesh("a=2 b=2", (0, 1, 2, 3), ("a", "b")),
    DrawnMesh("a=2 b=2 c=2", (0, 1, 2, 3, 4, 5, 6, 7), ("a", "b", "c")),
    DrawnMesh("a=4", (6, 1, 4, 3), ("a",)),
    DrawnMesh("a=3 b=2", (2, 3, 4, 5, 6, 7), ("a", "b")),
    DrawnMesh("a=3", (5, 3, 4), ("a",)),
    DrawnMesh("a=2 b=2", (4, 5, 6, 7), ("a", "b"), ("b",), 6),
    DrawnMesh("a=1", (7,), ("a",)),
]


class Drawn:
    """A rule, its arrays on both sides, and how each tensor lies."""

    def __init__(self, table: dict[Any, Any], sources: Arrays, targets: Arrays, seed: int):
        self.table, self.arrays, self.seed = table, (sources, targets), seed
        draw = random.Random(seed)
        self.meshes = draw.choice(MESHES), draw.choice(MESHES)
        self.specs = tuple(
            {name: spec_of(draw, x.shape, mesh) for name, x in side.items()}
            for side, mesh in zip(self.arrays, self.meshes, strict=True)
        )
        self.bucket_mb = draw.choice((1e-4, 64))

    def plan(self, make: Any) -> Transfer:
        """What `axes.transfer` makes of it."""
        meshes = [mesh.made(make) for mesh in self.meshes]
        shapes = {name: torch.empty(x.shape, dtype=torch.int64, device="meta") for name, x in self.arrays[0].items()}
        rules = axes.LayoutRules(self.table, sizes=used_sizes(self.table))
        return axes.transfer(*self.specs, *meshes, shapes, rules=rules, bucket_mb=self.bucket_mb)

    def __repr__(self) -> str:
        return f"{self.table} {[mesh.declaration for mesh in self.meshes]} {self.specs}"


def spec_of(draw: random.Random, shape: tuple[int, ...], mesh: DrawnMesh) -> str:
    """A spec of a tensor, some dims of it in factors."""
    dims = []
    for size in shape:
        cuts = [part for part in range(2, size) if size % part == 0]
        part = draw.choice(cuts) if cuts and draw.random() < 0.3 else 0
        dims.append((size // part, part) if part else (size,))
    return transfer_cases._spec(draw, dims, mesh)


drawn_cases = st.builds(lambda drawn, seed: Drawn(*drawn, seed), rule(), st.integers(0, 10**6))


def carried(views: dict[int, Transfer], number: int, wholes: tuple[Arrays, Arrays], made: Arrays) -> dict[int, int]:
    """Carry one part out on whole arrays, message by message, into `made`; returns what each rank received."""
    one = next(iter(views.values())).tensors[number]
    exchanges = {rank: found for rank, view in views.items() if (found := view.exchange(number)) is not None}
    own = [
        {rank: indices(end, shape, rank) for rank in exchanges}
        for end, shape in zip((one.source, one.target), one.shapes, strict=True)
    ]

    def values(rank: int, box: Any) -> np.ndarray:
        index = elements(one, 0, box)
        assert np.isin(index, own[0][rank]).all(), "what is sent is there"
        return wholes[0][one.source_name].reshape(-1)[index]

    def write(rank: int, box: Any, what: np.ndarray) -> None:
        index = elements(one, 1, box)
        assert np.isin(index, own[1][rank]).all(), "what is written is there"
        flat = made[f"{rank} {one.target_name}"].reshape(-1)
        assert (flat[index] == -1).all(), "an element is written twice"
        flat[index] = what

    received = dict.fromkeys(views, 0)
    for rank, exchange in exchanges.items():
        for source, target in exchange.copies:
            assert source == target
            write(rank, target, values(rank, source))
        for message in exchange.receives:
            peer = exchange.ranks[message.peer]
            other = next(m for m in exchanges[peer].sends if exchanges[peer].ranks[m.peer] == rank)
            assert peer != rank
            assert other.regions == message.regions
            for box in message.regions:
                write(rank, box, values(peer, box))
            received[rank] += message.elements
            assert message.elements == sum(math.prod(stop - start for start, stop in box) for box in message.regions)
    return received


def elements(one: Any, side: int, box: Any) -> np.ndarray:
    """The numbers, in the whole tensor, of the elements of a box of a part."""
    shape, link = one.shapes[side], one.link
    index = [np.full([stop - start for start, stop in box], offset) for offset in link.offsets[side]]
    for at, (dim, (start, stop)) in enumerate(zip(link.dims, box, strict=True)):
        own, stride = (dim.source, dim.source_stride) if side == 0 else (dim.target, dim.target_stride)
        steps = np.arange(start, stop) * stride
        index[own] = index[own] + steps.reshape([-1 if each == at else 1 for each in range(len(box))])
    return np.ravel_multi_index(index, shape).reshape(-1) if shape else np.zeros(1, int)


@settings(max_examples=200, deadline=None)
@given(drawn_cases)
def test_every_element_of_a_part_arrives_once_and_no_byte_more_is_sent(drawn: Drawn):
    move = drawn.plan(axes.Mesh)
    for plan, arrays in ((move, drawn.arrays), (move.inverse, drawn.arrays[::-1])):
        views = {rank: plan.at(rank) for rank in plan.ranks}
        received = dict.fromkeys(plan.ranks, 0)
        made = {f"{rank} {name}": np.full(x.shape, -1) for rank in plan.targets for name, x in arrays[1].items()}
        for number, one in enumerate(plan.tensors):
            if one.link is None:
                continue  # a whole tensor: tests/test_transfer.py
            for rank, count in carried(views, number, arrays, made).items():
                received[rank] += count * one.itemsize
        parted = {one.target_name for one in plan.tensors if one.link is not None}
        for rank in plan.targets:
            for name in parted:
                end = plan.ends[1][name]
                own = indices(end.sharding, end.shape, rank)
                wanted = np.full(arrays[1][name].shape, -1)
                if own is not None:
                    wanted.reshape(-1)[own.reshape(-1)] = arrays[1][name].reshape(-1)[own.reshape(-1)]
                np.testing.assert_array_equal(made[f"{rank} {name}"], wanted)
        if all(one.link is not None for one in plan.tensors):
            has = {
                rank: {
                    value
                    for name, end in plan.ends[0].items()
                    if (own := indices(end.sharding, end.shape, rank)) is not None
                    for value in arrays[0][name].reshape(-1)[own.reshape(-1)].tolist()
                }
                for rank in plan.ranks
            }
            for rank in plan.ranks:
                wants = {
                    value for key, x in made.items() if key.startswith(f"{rank} ") for value in x.reshape(-1).tolist()
                }
                assert received[rank] == 8 * len(wants - {-1} - has[rank]), "what a rank hasn't, and nothing else"
            assert plan.totals.received == received
        for rank in plan.ranks:
            for step in views[rank].steps:
                rounded = sum(16 * len(step.ranks) for _ in step.pieces)
                assert max(step.bytes_in, step.bytes_out) <= plan.bucket_bytes + rounded
    assert move.inverse.inverse.described == move.described


@settings(max_examples=100, deadline=None)
@given(drawn_cases)
def test_a_part_counts_in_a_bucket_with_what_a_rank_has_of_it_at_most(drawn: Drawn):
    move = drawn.plan(axes.Mesh)
    for plan in (move, move.inverse):
        for one in plan.tensors:
            for side, end in enumerate((one.source, one.target)):
                if one.link is None:
                    continue
                cut = one.link.pieces(side, end)
                every = [[pieces.number(position) for pieces in cut] for position in range(end.universe.size)]
                tiles = [[pieces.runs(at) for pieces, at in zip(cut, numbers, strict=True)] for numbers in every]
                assert one.link.largest(side, end) == max(math.prod(tile_shape(tile)) for tile in tiles)
                alike = one.link.like(one.source, one.target).pieces(side, end)
                assert [[pieces.runs(at) for pieces, at in zip(alike, each, strict=True)] for each in every] == tiles


def test_experts_that_are_stacked_share_buckets_where_ranks_have_little_of_each():
    shapes = {f"experts.{e}.up": (64, 32) for e in range(16)}
    specs = dict.fromkeys(shapes, "f@a d")
    rules = {"experts.{e}.up": ("up", "e f d -> e f d")}
    meshes = axes.Mesh("a=8"), axes.Mesh("a=8", ranks=range(8, 16))
    move = axes.transfer(specs, {"up": "e f@a d"}, *meshes, shapes, rules=rules, bucket_mb=8 / 1024)
    # A rank has 8 of the 64 rows of each expert, 1 KiB, on either side.
    assert list(map(len, move.buckets)) == list(map(len, move.inverse.buckets)) == [8, 8]
    assert move.tensors[0].kind == move.tensors[9].kind


def carry_out(drawn: Drawn) -> None:
    """Carry a drawn transfer out on this rank, there and back, by shards, DTensors and tensors in place."""
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    move = drawn.plan(lambda text, ranks: axes.init_mesh(text, ranks=ranks, device_type="cpu"))
    for plan, arrays in ((move, drawn.arrays), (move.inverse, drawn.arrays[::-1])):
        plan = plan.at(rank)
        held, wanted = (
            {
                name: tile_of(torch.from_numpy(arrays[side][name]), end.sharding, rank)
                for name, end in plan.ends[side].items()
            }
            for side in (0, 1)
        )
        into = {name: strided(x, (drawn.seed + at) % 4) for at, (name, x) in enumerate(wanted.items()) if x is not None}
        for given_into in (None, into, into):
            found = plan(held, given_into)
            assert found.keys() == {name for name, x in wanted.items() if x is not None and rank in plan.ranks}
            for name, value in found.items():
                local = axes.to_local(value) if isinstance(value, DTensor) else value
                assert same_bits(local, wanted[name]), (drawn, name)
                assert given_into is None or value is into[name]
            for x in into.values():
                x.zero_()


@settings(max_examples=50, deadline=None)
@given(drawn_cases)
def test_parts_arrive_on_real_processes(pool, drawn: Drawn):
    pool.run(carry_out, drawn)


# --- a model --------------------------------------------------------------------------------------

TABLE = {
    ("model.*.q", "model.*.k", "model.*.v"): (
        "*.qkv",
        "(tp h k) d, (tp g k) d, (tp g k) d -> (tp (h k + g k + g k)) d",
    ),
    ("model.*.experts.{e}.gate", "model.*.experts.{e}.up"): ("*.w13", "e f d, e f d -> e d (f + f)"),
    "model.embed": ("embed", "head"),
    "*.inv_freq": None,
    None: "step",
}
SIZES = {"tp": 2, "h": 4, "k": 2}
SHAPES = {
    "model.0.q": (16, 6),
    "model.0.k": (4, 6),
    "model.0.v": (4, 6),
    "model.embed": (10, 6),
    "norm": (6,),
    "rotary.inv_freq": (3,),
    **{f"model.0.experts.{e}.{which}": (5, 6) for e in range(4) for which in ("gate", "up")},
}
SOURCES = {
    "model.0.q": "f@tp d@fsdp",
    "model.0.k": "f@tp d@fsdp",
    "model.0.v": "f@tp d",
    "model.embed": "v@(fsdp tp) d",
    "norm": "d@fsdp",
    "rotary.inv_freq": "d",
    **{f"model.0.experts.{e}.{which}": "f@fsdp d@tp" for e in range(4) for which in ("gate", "up")},
}
TARGETS = {"0.qkv": "f@tp d", "0.w13": "e@dp d (two=2 f@tp)", "embed": "v@tp d", "head": "v d@dp", "norm": "d"}


def fused(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The targets, by torch."""
    q, k, v = (x[f"model.0.{each}"].unflatten(0, (2, -1)) for each in "qkv")
    both = [torch.cat([x[f"model.0.experts.{e}.gate"], x[f"model.0.experts.{e}.up"]]).T for e in range(4)]
    return {
        "0.qkv": torch.cat([q, k, v], 1).flatten(0, 1),
        "0.w13": torch.stack(both),
        "embed": x["model.embed"],
        "head": x["model.embed"],
        "norm": x["norm"],
    }


def a_model() -> None:
    trainer = axes.init_mesh("fsdp=2 tp=2", ranks=range(4), device_type="cpu")
    server = axes.init_mesh("dp=2 tp=2", ranks=range(4, 8), device_type="cpu")
    generator = torch.Generator().manual_seed(0)
    wholes = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    targets = {**TARGETS, "0.w13": "e@dp d f", "step": "d"}  # two blocks of 5 don't divide over tp
    move = axes.transfer(SOURCES, targets, trainer, server, wholes, rules=TABLE, dtype="bfloat16", **SIZES)
    held = (
        {}
        if trainer.coordinate is None
        else {name: axes.shard(x, SOURCES[name], mesh=trainer) for name, x in wholes.items()}
    )
    found = move(held)
    expected = {name: x.bfloat16() for name, x in fused(wholes).items()}
    assert set(found) == (set() if server.coordinate is None else set(expected))
    for name, x in found.items():
        assert torch.equal(x.full_tensor(), expected[name]), name
    into = {name: torch.nn.Parameter(torch.zeros_like(x)) for name, x in found.items()}
    kept = torch.full((3,), 7.0, dtype=torch.bfloat16)
    with axes.debug(check=True):
        again = move(held, {**into, **({"step": kept} if into else {})})
    assert all(again[name] is x and torch.equal(x.full_tensor(), expected[name]) for name, x in into.items())
    assert torch.equal(kept, torch.full((3,), 7.0, dtype=torch.bfloat16))
    assert not into or again["step"] is kept
    back = move.inverse
    came = back(found)
    for name, x in came.items():
        assert torch.equal(x.full_tensor(), wholes[name].bfloat16().float()), name
    assert set(came) == ((set(SHAPES) - {"rotary.inv_freq"}) if trainer.coordinate is not None else set())


def test_a_models_names_and_layouts_change_on_the_way_and_back(pool):
    pool.run(a_model)


def test_tied_tensors_go_once_each_way():
    one, two = axes.Mesh("a=2"), axes.Mesh("a=2", ranks=(2, 3))
    shapes = {"embed": (4, 6), "head": (6, 4), "copy": (4, 6)}
    table = {("embed", "head"): ("w", "v d, d v -> v d")}
    move = axes.transfer(
        {"embed": "v@a d", "head": "d v", "copy": "v d"}, {"w": "v d@a", "copy": "v d"}, one, two, shapes, rules=table
    )
    assert [t.source_name for t in move.tensors] == ["copy", "embed"]
    assert [t.source_name for t in move.equal] == ["head"]
    back = move.inverse
    assert [t.target_name for t in back.tensors] == ["copy", "embed", "head"]
    assert [t.source_name for t in back.inverse.tensors] == ["copy", "embed"]


@pytest.mark.parametrize("stack", ["a", "z"])
def test_a_stack_that_is_tied_with_its_parts_is_written_once_on_the_way_back(stack: str):
    one, two = axes.Mesh("a=2"), axes.Mesh("b=1", ranks=[9])
    targets = {stack: "e f d", "x.0": "f d", "x.1": "f d"}
    table = {"w": (stack, "x.{e}", "e f d -> e f d, e f d")}
    move = axes.transfer({"w": "e f@a d"}, targets, one, two, {"w": (2, 4, 3)}, rules=table)
    assert move.inverse.lower_bound == 2 * 4 * 3 * 4
    assert sorted(t.target_name for t in move.inverse.inverse.tensors) == sorted(targets)
    change = axes.LayoutRules(table).applied({"w": (2, 4, 3)})
    assert sum(math.prod(piece.shape) for piece in change.inverse.pieces["w"]) == 24


def test_sizes_go_to_a_table_and_to_rules_that_lack_them():
    table = {"x": ("q", "k", "(h k + g k) d -> (h k) d, (g k) d")}
    mesh = axes.Mesh("a=2")
    for rules in (table, axes.LayoutRules(table), axes.LayoutRules(table, h=4)):
        move = axes.transfer(
            {"x": "f@a d"}, {"q": "f@a d", "k": "f d"}, mesh, mesh, {"x": (24, 2)}, rules=rules, h=4, g=2
        )
        assert move.ends[1]["q"].shape == (16, 2)
    with pytest.raises(SizeError, match="'h' is 4 in the layout rules, and 2 is given for it"):
        axes.transfer({"x": "f@a d"}, {"q": "f@a d", "k": "f d"}, mesh, mesh, {"x": (24, 2)}, rules=rules, h=2)


def test_a_flattened_matrix_is_cut_anywhere():
    one, two = axes.Mesh("a=8"), axes.Mesh("b=5", ranks=range(8, 13))
    rules = {"w": ("w", "f d -> (f d)")}
    move = axes.transfer({"w": "f d@a"}, {"w": "x@b"}, one, two, {"w": (7, 11)}, rules=rules)
    assert [step.bytes_in for step in move.at(9).steps] == [16 * 4]
    assert move.lower_bound == 7 * 11 * 4


MESH = axes.Mesh("dp=2 tp=2")


@pytest.mark.parametrize(
    ("sources", "targets", "rules", "how", "error", "said"),
    [
        ({"a": "d"}, {"b": "d"}, {"a": "c"}, {}, ShardingError, "'c', which the layout rules make, isn't in targets"),
        ({"a": "d"}, {"b": "d", "c": "d"}, {"a": "b"}, {}, ShardingError, "the layout rules make no 'c' of these"),
        ({"a": "d"}, {"b": "d"}, {"x": "b"}, {}, ShardingError, "layout rules that are about no tensor"),
        ({"a": "d"}, {"b": "d"}, [("a", "b")], {}, ShardingError, "layout rules are a mapping"),
        ({"a": "d"}, {"b": "d e"}, {"a": "b"}, {}, ShardingError, "of the tensor 'b', [4]"),
        (
            {"a": "d"},
            {"b": "d"},
            {"a": ("b", "(h k) -> (k h)")},
            {},
            SizeError,
            "the sizes of 'h' and 'k' don't follow",
        ),
        ({"a": "d"}, {"b": "d"}, {"a": ("b", "(h k) -> (k h)")}, {"h": 3}, SizeError, "3"),
        ({"a": "d"}, {"b": "d"}, {"a": "b"}, {"h": 2}, SizeError, "a size is given for 'h'"),
        (
            {"a": "d", "c": "d"},
            {"b": "d"},
            {("a", "c"): ("b", "d, d -> (d + d)")},
            {},
            ShardingError,
            "say which it becomes",
        ),
    ],
)
def test_rules_that_cant_be_are_refused(sources, targets, rules, how, error, said):
    shapes = {"a": torch.empty(4, device="meta"), "c": torch.empty(4, device="meta", dtype=torch.float64)}
    with pytest.raises(error) as caught:
        axes.transfer(sources, targets, MESH, MESH, shapes, rules=rules, **how)
    assert said in str(caught.value)


def test_what_isnt_moved_may_be_passed_and_what_is_unknown_may_not():
    table = {"a": "b", "old": None, None: "kept"}
    with axes.simulate(1):
        mesh = axes.init_mesh("tp=1")
        shapes = {"a": (4,), "old": (2,)}
        move = axes.transfer({"a": "d", "old": "d"}, {"b": "d", "kept": "d"}, mesh, mesh, shapes, rules=table)
        x = torch.arange(4.0)
        kept = torch.ones(3)
        found = move({"a": x, "old": torch.zeros(2)}, {"b": torch.zeros(4), "kept": kept})
        assert torch.equal(found["b"], x)
        assert found["kept"] is kept
        assert torch.equal(kept, torch.ones(3))
        both = torch.zeros(6)
        for call, said in (
            (lambda: move({"a": x, "c": x}), "'c' isn't a source of the transfer"),
            (lambda: move({"a": x}, {"a": x}), "'a' isn't a target of the transfer"),
            (lambda: move({"a": x}, {"b": both[:4], "kept": both[3:]}), "'kept', of into=, which keeps its values"),
            (lambda: move({"a": x}, {"kept": "hello"}), "'kept' of into= is a tensor or None; found 'hello'"),
        ):
            with pytest.raises(AxesError) as caught:
                call()
            assert said in str(caught.value)


# --- tied targets ---------------------------------------------------------------------------------


class Tied:
    """A source that becomes several targets, of which some lie alike."""

    def __init__(self, seed: int):
        draw = random.Random(seed)
        self.seed, self.meshes = seed, (draw.choice(MESHES), draw.choice(MESHES))
        self.shape, self.turned = (draw.choice((4, 6, 12)), draw.choice((3, 8))), draw.random() < 0.5
        made = self.shape[::-1] if self.turned else self.shape
        lies = [spec_of(draw, made, self.meshes[1]) for _ in range(2)]
        self.source = spec_of(draw, self.shape, self.meshes[0])
        self.targets = {f"y{at}": draw.choice(lies) for at in range(draw.randint(2, 4))}
        self.bucket_mb, self.dtype = draw.choice((1e-4, 64)), draw.choice(("float32", "bfloat16"))

    def plan(self, make: Any) -> Transfer:
        """The plan, with the source's name that of no target."""
        meshes = [mesh.made(make) for mesh in self.meshes]
        texts = [f"f d -> {', '.join(['d f'] * len(self.targets))}"] if self.turned else []
        rules = {"x": (*self.targets, *texts)}
        shapes = {"x": torch.empty(self.shape, device="meta")}
        how = {"rules": rules, "bucket_mb": self.bucket_mb, "dtype": self.dtype}
        return axes.transfer({"x": self.source}, self.targets, *meshes, shapes, **how)

    def __repr__(self) -> str:
        return f"{self.source} {self.targets} {[mesh.declaration for mesh in self.meshes]} turned {self.turned}"


tied_cases = st.builds(Tied, st.integers(0, 10**6))


@settings(max_examples=200, deadline=None)
@given(tied_cases)
def test_targets_that_lie_alike_arrive_once(tied: Tied):
    move = tied.plan(axes.Mesh)
    numbers = np.arange(math.prod(tied.shape)).reshape(tied.shape)
    received = dict.fromkeys(move.ranks, 0)
    for rank in move.ranks:
        own = indices(move.tensors[0].source, tied.shape, rank)
        has = set() if own is None else {*own.reshape(-1).tolist()}
        for end in {one.target for one in move.tensors}:  # each of them once
            whole = numbers.T if tied.turned else numbers
            wanted = indices(end, whole.shape, rank)
            if wanted is not None:
                received[rank] += len({*whole.reshape(-1)[wanted.reshape(-1)].tolist()} - has)
    size = move.tensors[0].itemsize
    assert move.totals.received == {rank: count * size for rank, count in received.items()}
    assert sum(move.totals.sent.values()) == move.lower_bound
    for rank in move.ranks:
        assert sum(step.bytes_in for step in move.at(rank).steps) == received[rank] * size
    assert move.inverse.inverse.described == move.described


def carry_tied(tied: Tied) -> None:
    """Carry a transfer of tied targets out, some of them in place; and the way back."""
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    move = tied.plan(lambda text, ranks: axes.init_mesh(text, ranks=ranks, device_type="cpu")).at(rank)
    whole = torch.arange(math.prod(tied.shape)).reshape(tied.shape).float()
    held = {"x": tile_of(whole, move.tensors[0].source, rank)}
    made = (whole.T if tied.turned else whole).to(getattr(torch, tied.dtype))
    wanted = {one.target_name: tile_of(made, one.target, rank) for one in move.tensors}
    into = {name: strided(x, (tied.seed + at) % 4) for at, (name, x) in enumerate(wanted.items()) if x is not None}
    patch = pytest.MonkeyPatch()
    patch.setattr(parcels, "DIRECT", 16 if tied.seed % 2 else 2**18)
    for given_into in (None, into, dict(list(into.items())[1:])):
        found = move(held, None if tied.seed % 3 == 0 else given_into)
        assert found.keys() == {name for name, x in wanted.items() if x is not None}
        for name, value in found.items():
            local = axes.to_local(value) if isinstance(value, DTensor) else value
            assert same_bits(local, wanted[name]), (tied, name)
        for x in into.values():
            x.zero_()
    patch.undo()
    back = move.inverse(wanted)
    assert all(torch.equal(axes.to_local(x) if isinstance(x, DTensor) else x, held["x"]) for x in back.values())


@settings(max_examples=30, deadline=None)
@given(tied_cases)
def test_tied_targets_are_right_on_real_processes(pool, tied: Tied):
    pool.run(carry_tied, tied)
