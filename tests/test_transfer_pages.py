"""Transfers of pages: some pages of one pool to some of another, checked by brute force and on real processes."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import axes
from axes.algebra import buckets
from axes.algebra.errors import AxesError, ShardingError, SizeError
from axes.algebra.page_links import PageLink
from axes.algebra.transfers import Transfer
from axes.runtime import transfer_runs
from tests import transfer_cases
from tests.test_transfer import indices, refused, same_bits, strided, tile_of, whole_of
from tests.transfer_cases import DTYPES, Like

Lists = tuple[list[int], list[int]]


class Drawn:
    """Caches whose pages move: meshes, specs with the pages at any dim, pools of two sizes, and lists of pages."""

    def __init__(self, seed: int):
        draw = random.Random(seed)
        self.seed = seed
        self.meshes = [transfer_cases._mesh(draw, names) for names in ("abc", "def")]
        self.pools = draw.randint(1, 12), draw.randint(1, 12)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.specs: tuple[dict[str, str], dict[str, str]] = ({}, {})
        self.dtypes: dict[str, tuple[str, str]] = {}
        for name in ("k", "v", "w")[: draw.randint(1, 3)]:
            dims = [(draw.choice((1, 2, 3, 4, 6)),) for _ in range(draw.choice((0, 1, 2, 2)))]
            at = draw.randint(0, len(dims))
            dims.insert(at, (self.pools[0],))
            for specs, mesh in zip(self.specs, self.meshes, strict=True):
                texts = transfer_cases._spec(draw, dims, mesh)
                specs[name] = texts.replace(f"x{at}", "page", 1)
            self.shapes[name] = tuple(size for (size,) in dims)
            dtype = draw.choice(DTYPES)
            self.dtypes[name] = (dtype, "bfloat16" if dtype == "float32" and draw.random() < 0.5 else dtype)
        self.bucket_mb = draw.choice((1e-4, 1e-3, 64))
        most = min(self.pools[1], 8)
        self.lists = [self.drawn(draw, draw.randint(0, most)) for _ in range(2)]
        self.lists.append(self.drawn(draw, len(self.lists[1][0])))

    def drawn(self, draw: random.Random, count: int) -> Lists:
        """A list of pages: those of the source as often as may be, each of the target once."""
        return draw.choices(range(self.pools[0]), k=count), draw.sample(range(self.pools[1]), count)

    def plan(self, make: Any) -> Transfer:
        """What `axes.transfer` makes of it."""
        meshes = [mesh.made(make) for mesh in self.meshes]
        like = {name: Like(shape, self.dtypes[name][0]) for name, shape in self.shapes.items()}
        to = {name: to for name, (_, to) in self.dtypes.items()}
        pages = ("page", self.pools[1])
        return axes.transfer(*self.specs, *meshes, like, dtype=to, pages=pages, bucket_mb=self.bucket_mb)

    def __repr__(self) -> str:
        return f"{self.seed}: {self.specs} {self.shapes} {[mesh.declaration for mesh in self.meshes]} {self.lists}"


drawn_cases = st.builds(Drawn, st.integers(0, 10**6))


def after(source: Any, target: Any, dim: int, lists: Lists) -> Any:
    """The whole target, once these pages of the source are in it."""
    made = target.copy() if isinstance(target, np.ndarray) else target.clone()
    for page, place in zip(*lists, strict=True):
        made[(slice(None),) * dim + (place,)] = source[(slice(None),) * dim + (page,)]
    return made


def carried(views: dict[int, Transfer], number: int, lists: Lists) -> dict[int, int]:
    """Carry the pages of one tensor out on arrays; returns the elements that each rank received."""
    one = next(iter(views.values())).tensors[number]
    assert isinstance(one.link, PageLink)
    source, target = (np.arange(math.prod(shape)).reshape(shape) + 1 for shape in one.shapes)
    expected = after(source, -target, one.link.dim, lists)

    def tile(rank: int, side: int, whole: np.ndarray) -> tuple[np.ndarray | None, Any]:
        own = indices((one.source, one.target)[side], one.shapes[side], rank)
        if own is None:
            return None, None
        where = (slice(None),) * one.link.dim + (one.link.index(side, (one.source, one.target)[side], rank),)
        return whole.reshape(-1)[own], where

    def boxed(box: Any) -> Any:
        return tuple(slice(*bounds) for bounds in box)

    exchanges = {rank: found for rank, view in views.items() if (found := view.exchange(number)) is not None}
    held = {rank: x[where] for rank in exchanges for x, where in [tile(rank, 0, source)] if x is not None}
    received = dict.fromkeys(views, 0)
    for rank, exchange in exchanges.items():
        x, where = tile(rank, 1, -target)
        if x is None:
            assert not exchange.receives
            continue
        made = np.zeros_like(x[where])
        for here, there in exchange.copies:
            assert (made[boxed(there)] == 0).all(), "an element is written twice"
            made[boxed(there)] = held[rank][boxed(here)]
        for message in exchange.receives:
            peer = exchange.ranks[message.peer]
            other = next(m for m in exchanges[peer].sends if exchanges[peer].ranks[m.peer] == rank)
            values, start = np.concatenate([held[peer][boxed(box)].reshape(-1) for box in other.regions]), 0
            assert peer != rank
            assert len(values) == message.elements == other.elements
            for box in message.regions:
                assert (made[boxed(box)] == 0).all(), "an element is written twice"
                size = made[boxed(box)].size
                made[boxed(box)] = values[start : start + size].reshape(made[boxed(box)].shape)
                start += size
            received[rank] += message.elements
        x[where] = made
        np.testing.assert_array_equal(x, tile(rank, 1, expected)[0])
    return received


@settings(max_examples=300)
@given(drawn_cases)
def test_every_page_arrives_once_and_no_byte_more_is_sent(drawn: Drawn):
    plan = drawn.plan(axes.Mesh)
    for forward in drawn.lists:
        listed = plan.of_pages(*forward)
        back = (forward[1], forward[0]) if len({*forward[0]}) == len(forward[0]) else None
        for move, lists in [(listed, forward), *([(listed.inverse, back)] if back else [])]:
            views = {rank: move.at(rank) for rank in move.ranks}
            received = dict.fromkeys(move.ranks, 0)
            for number, one in enumerate(move.tensors):
                dim, found = one.link.dim, carried(views, number, lists)
                pages = np.arange(math.prod(one.shapes[0])).reshape(one.shapes[0])
                for rank in move.ranks:
                    both = zip((one.source, one.target), one.shapes, strict=True)
                    ends = [indices(end, shape, rank) for end, shape in both]
                    has = set() if ends[0] is None else {*ends[0].reshape(-1).tolist()}
                    numbers = np.full(one.shapes[1], -1)
                    numbers = after(pages, numbers, dim, lists).reshape(-1)
                    wants = [] if ends[1] is None else numbers[ends[1].reshape(-1)].tolist()
                    assert found[rank] == sum(each >= 0 and each not in has for each in wants), "no byte more"
                    received[rank] += found[rank] * one.itemsize
            assert move.totals.received == received
            assert move.lower_bound == sum(move.totals.sent.values())
            for rank in move.ranks:
                assert sum(step.bytes_in for step in views[rank].steps) == received[rank]
                for step in views[rank].steps:
                    rounded = sum(16 * len(step.ranks) for _ in step.pieces)
                    assert max(step.bytes_in, step.bytes_out) <= move.bucket_bytes + rounded


@settings(max_examples=100)
@given(drawn_cases)
def test_holders_of_a_page_share_what_they_send(drawn: Drawn):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "SMALLEST", 0)
        plan = drawn.plan(axes.Mesh)
        lists = list(range(drawn.pools[0])), list(range(drawn.pools[0]))
        if drawn.pools[0] > drawn.pools[1]:
            return
        move = plan.of_pages(*lists)
        for number, one in enumerate(move.tensors):
            sends = {rank: view.exchange(number) for rank in move.ranks for view in [move.at(rank)]}
            held = {
                r: {*x.reshape(-1).tolist()}
                for r in move.ranks
                if (x := indices(one.source, one.shapes[0], r)) is not None
            }
            for rank, exchange in sends.items():
                if exchange is None or rank not in held:
                    continue
                alike = [other for other in held if held[other] == held[rank]]
                total = sum(m.elements for r in alike if sends[r] is not None for m in sends[r].sends)
                assert sum(m.elements for m in exchange.sends) <= 1.1 * total / len(alike) + 1


def carry_pages(drawn: Drawn) -> None:
    """Carry lists of pages out on this rank, one after another."""
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    move = drawn.plan(lambda text, ranks: axes.init_mesh(text, ranks=ranks, device_type="cpu")).at(rank)
    dims = {one.source_name: one.link.dim for one in move.tensors}
    sources, ends = {}, move.ends
    for name, end in ends[0].items():
        sources[name] = whole_of(name, end.shape, drawn.dtypes[name][0])
    wholes = {
        name: torch.zeros(end.shape, dtype=getattr(torch, drawn.dtypes[name][1])) for name, end in ends[1].items()
    }
    held = {name: tile_of(x, ends[0][name].sharding, rank) for name, x in sources.items()}
    tiles = {name: tile_of(x, ends[1][name].sharding, rank) for name, x in wholes.items()}
    into = {n: strided(x, (drawn.seed + at) % 3) for at, (n, x) in enumerate(tiles.items()) if x is not None}
    for turn, lists in enumerate((*drawn.lists, drawn.lists[0])):
        for name in wholes:
            moved = sources[name].roll(turn).to(wholes[name].dtype)
            wholes[name] = after(moved, wholes[name], dims[name], lists)
            if held[name] is not None:
                held[name].copy_(tile_of(sources[name].roll(turn), ends[0][name].sharding, rank))
        found = move(held, into, pages=tuple(torch.tensor(each, dtype=torch.int64) for each in lists))
        assert found.keys() == into.keys()
        for name, x in into.items():
            assert found[name] is x
            assert same_bits(x, tile_of(wholes[name], ends[1][name].sharding, rank)), (turn, name)


@settings(max_examples=60)
@given(drawn_cases)
def test_pages_arrive_on_real_processes(pool, drawn: Drawn):
    pool.run(carry_pages, drawn)


# --- what users write -----------------------------------------------------------------------------


def caches() -> tuple[axes.Mesh, axes.Mesh, Transfer]:
    """Prefill on ranks 0 to 3, decode on ranks 4 to 7."""
    prefill = axes.init_mesh("dp=1 tp=4", ranks=range(4), device_type="cpu")
    decode = axes.init_mesh("dp=2 tp=2", ranks=range(4, 8), device_type="cpu")
    spec = {"k": "page@dp slot h@tp d"}
    shapes = {"k": torch.empty(6, 2, 4, 3, dtype=torch.bfloat16, device="meta")}
    return prefill, decode, axes.transfer(spec, spec, prefill, decode, shapes, pages=("page", 8))


WRONG = [
    (([0, 6], [0, 1]), "the sources have 6 pages, from 0 on; found 6"),
    (([0, 1], [-1, 1]), "the targets have 8 pages, from 0 on; found -1"),
    (([0, 1], [3, 3]), "page 3 of the targets is in the list twice; each is written once"),
    (([0, 1], [3]), "as many of the sources as of the targets; found 2 and 1"),
    (([0, 1.5], [3, 4]), "the pages of the sources are whole numbers"),
    (([0, True], [3, 4]), "the pages of the sources are whole numbers"),
    (([0, 1],), "pages= are two lists"),
    (None, "this transfer is of pages; say which, with pages="),
    (7, "pages= are two lists"),
]


def wrong_lists() -> list[tuple[str, bool]]:
    """Each is passed by one rank alone; what each rank is told, and whether its cache is as it was."""
    _, _, move = caches()
    rank = torch.distributed.get_rank()
    held = {"k": torch.ones(6, 2, 1, 3, dtype=torch.bfloat16)} if rank < 4 else {}
    into = {"k": torch.zeros(4, 2, 2, 3, dtype=torch.bfloat16)} if rank >= 4 else {}
    right = [0, 5], [7, 2]
    found = []
    for at, (wrong, _) in enumerate(WRONG):
        said = refused(lambda at=at, wrong=wrong: move(held, into, pages=wrong if rank == at % 8 else right))
        found.append((said, not into or not into["k"].any()))
    found.append((refused(lambda: move(held, into, pages=([0, 5], [7, 3]) if rank == 6 else right)), True))
    found.append((refused(lambda: move(held, {} if rank == 5 else into, pages=right)), True))
    move(held, into, pages=right)
    mine = {4: 2, 5: 2, 6: 7 - 4, 7: 7 - 4}
    assert not into or into["k"].float().sum((1, 2, 3)).nonzero().flatten().tolist() == [mine[rank]]
    return found


def test_a_bad_list_of_one_rank_is_refused_on_all_before_anything_is_sent(pool):
    by_rank = pool.run(wrong_lists)
    for at, (_, said) in enumerate(WRONG):
        for rank in range(8):
            text, kept = by_rank[rank][at]
            assert kept
            assert text.startswith("ShardingError: "), text
            assert said in text, text
    for rank in range(8):
        other, lacking = (by_rank[rank][len(WRONG) + more][0] for more in (0, 1))
        assert other.startswith("DesyncError: ranks have other plans"), other
        assert "2 pages of the targets" in other
        assert "pages are written in place; pass 'k' of this rank in into=" in lacking


def pages_of_every_dtype() -> None:
    mesh = axes.init_mesh("a=8", device_type="cpu")
    rank = torch.distributed.get_rank()
    for dtype in EVERY:
        whole = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, 16)
        whole = (whole % 2).bool() if dtype == torch.bool else whole.view(dtype).view(16, -1)
        spec = {"k": "page@a d"}, {"k": "page d@a"}
        move = axes.transfer(*spec, mesh, mesh, {"k": whole}, pages="page")
        own, width = whole.shape[1] // 8, whole.shape[1]
        into = torch.zeros(16, width // 8, dtype=dtype) if own else None
        move({"k": whole[2 * rank : 2 * rank + 2].clone()}, {"k": into}, pages=(iter([3, 3, 9]), range(5, 8)))
        bits = whole.view(torch.uint8)[[3, 3, 9]].view(3, 8, -1)[:, rank]
        assert torch.equal(into.view(torch.uint8)[5:8], bits), dtype


EVERY = (
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.uint16, torch.int16, torch.bfloat16, torch.float16),
)
"""A page of 16 bytes splits over eight ranks in elements of two bytes and fewer; those of more are in the drawn cases."""


def test_pages_have_any_dtype(pool):
    pool.run(pages_of_every_dtype)


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_wide_unsigned_numbers_are_pages_too(pool, dtype):
    pool.run(unsigned_pages, dtype)


def unsigned_pages(name: str) -> None:
    mesh, dtype = axes.init_mesh("a=8", device_type="cpu"), getattr(torch, name)
    rank = torch.distributed.get_rank()
    whole = (torch.arange(64) + 2**31).to(dtype).view(8, 8)
    move = axes.transfer({"k": "page@a d"}, {"k": "page d@a"}, mesh, mesh, {"k": whole}, pages="page")
    into = torch.zeros(8, 1, dtype=dtype)
    move({"k": whole[rank : rank + 1].clone()}, {"k": into}, pages=([6, 1], [0, 7]))
    assert [int(into[0, 0]), int(into[7, 0])] == [2**31 + 48 + rank, 2**31 + 8 + rank]


def test_the_way_back_of_pages_that_are_read_twice_is_refused():
    with pytest.raises(ShardingError, match="page 1 of the targets is in the list twice"):
        _ = plan(pages="page").of_pages([1, 1], [0, 2]).inverse
    assert plan(pages="page").of_pages((at for at in (1, 3)), [0, 2]).lists == ((1, 3), (0, 2))


MESH = axes.Mesh("dp=2 tp=2")
CACHE = {"k": "page@dp slot d"}


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda: plan(pages="block"),
            ShardingError,
            "pages= says that 'block' is a dim of pages; 'page@dp slot d' has no",
        ),
        (lambda: plan(pages=("page", -1)), SizeError, "pages= is the name of a dim, or a name and how many pages"),
        (lambda: plan(pages=4), SizeError, "pages= is the name of a dim"),
        (lambda: plan(pages="page", rules={"k": "k"}), ShardingError, "pages= and rules= don't go together"),
        (
            lambda: plan({"k": "slot@dp page d"}, pages="page"),
            ShardingError,
            "'page' is dim 0 of 'page@dp slot d' and dim",
        ),
        (lambda: plan({"k": "pages@dp slot d"}, pages="page"), ShardingError, "'page' is dim 0 of 'k'"),
        (lambda: plan(shapes={"k": (4, 2, 3), "v": (5, 2, 3)}, pages="page"), SizeError, "4 of 'k' and 5 of 'v'"),
        (lambda: plan(pages="page").of_pages([4], [0]), ShardingError, "the sources have 4 pages"),
        (lambda: plan().of_pages([1], [0]), ShardingError, "this transfer has no dim of pages"),
    ],
)
def test_what_cant_be_pages_is_refused(call: Any, error: type[AxesError], said: str):
    with pytest.raises(error) as caught:
        call()
    assert said in str(caught.value)


def plan(targets: Any = None, shapes: Any = None, **how: Any) -> Transfer:
    shapes = shapes or {"k": (4, 2, 3)}
    specs = dict.fromkeys(shapes, CACHE["k"])
    return axes.transfer(specs, targets or specs, MESH, MESH, shapes, **how)


def test_pages_of_a_call_that_has_none_are_refused():
    with axes.simulate(1):
        mesh = axes.init_mesh("dp=1")
        move = axes.transfer({"k": "page d"}, {"k": "page d"}, mesh, mesh, {"k": (4, 2)})
        with pytest.raises(ShardingError, match="this transfer has no dim of pages"):
            move({"k": torch.ones(4, 2)}, pages=([0], [1]))


def kept_views() -> list[bool]:
    """Whether what is copied where is found anew: for a list as long as the last one, and for a longer one."""
    _, _, move = caches()
    rank = torch.distributed.get_rank()
    held = {"k": torch.ones(6, 2, 1, 3, dtype=torch.bfloat16)} if rank < 4 else {}
    into = {"k": torch.zeros(4, 2, 2, 3, dtype=torch.bfloat16)} if rank >= 4 else {}
    run, found = transfer_runs.run_of(move), []
    for lists in (([0, 1], [2, 5]), ([3, 1], [4, 0]), ([3, 1, 2], [4, 0, 1])):
        before = run.bound
        move(held, into, pages=lists)
        found.append(before is not None and run.bound is before)
    return found


def test_a_list_with_as_many_pages_of_each_rank_finds_nothing_anew(pool):
    assert pool.run(kept_views) == [[False, True, False]] * 8
