"""Transfers: plans checked by brute force on arrays, and carried out on real processes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

import axes
from axes.algebra import transfers
from axes.algebra.sharding import Sharding
from axes.algebra.transfers import Carriage, Transfer, part_of
from tests.transfer_cases import WORLD, case

# --- by brute force -------------------------------------------------------------------------------


def indices(end: Sharding, shape: tuple[int, ...], rank: int) -> np.ndarray | None:
    """The number of each element of a rank's tile in the whole tensor."""
    if end.universe.position(rank) is None:
        return None
    local = [
        np.concatenate([np.arange(run.start, run.stop) for run in (dim if isinstance(dim, tuple) else (dim,))])
        for dim in end.local_indices(shape, rank)
    ]
    return np.arange(math.prod(shape)).reshape(shape)[np.ix_(*local)] if shape else np.array(0)


def carried(move: Transfer, number: int) -> dict[str, dict[int, int]]:
    """Carry one tensor out on arrays, piece by piece; returns the elements that each rank received and sent."""
    one = move.tensors[number]
    mine = {rank: move.at(rank).exchange(number) for rank in move.ranks}
    exchanges = {rank: found for rank, found in mine.items() if found is not None}
    held = {rank: indices(one.source, one.shape, rank) for rank in move.ranks}
    wanted = {rank: indices(one.target, one.shape, rank) for rank in move.ranks}
    sent: dict[tuple[int, int], np.ndarray] = {}
    for rank, exchange in exchanges.items():
        for message in exchange.sends:
            values = [held[rank][boxed(box)].reshape(-1) for box in message.regions]
            sent[rank, exchange.ranks[message.peer]] = np.concatenate(values)
            assert len(sent[rank, exchange.ranks[message.peer]]) == message.count > 0
    expected = 0
    for rank, exchange in exchanges.items():
        made = None if wanted[rank] is None else np.full(wanted[rank].shape, -1)
        for box, place in exchange.copies:
            fill(made, place, held[rank][boxed(box)].reshape(-1))
        for message in exchange.receives:
            peer = exchange.ranks[message.peer]
            assert peer != rank
            values = sent[peer, rank]
            expected += 1
            parts = [values[slice(*part_of(len(values), at, one.pieces))] for at in range(one.pieces)]
            values, start = np.concatenate(parts), 0
            for box in message.regions:
                size = math.prod(stop - first for first, stop in box)
                fill(made, box, values[start : start + size])
                start += size
            assert start == len(values) == message.count
        if made is not None:
            np.testing.assert_array_equal(made, wanted[rank])
    assert expected == len(sent), "what is sent is received"
    return {
        side: {rank: sum(m.count for m in getattr(exchange, side)) for rank, exchange in exchanges.items()}
        for side in ("receives", "sends")
    }


def boxed(box):
    return (*(slice(*bounds) for bounds in box), ...)


def fill(made: np.ndarray, box, values: np.ndarray) -> None:
    view = made[boxed(box)]
    assert (view == -1).all(), "an element is written twice"
    view[...] = values.reshape(view.shape)


def fair_shares(one: Carriage, ranks: tuple[int, ...]) -> dict[int, float]:
    """What each rank would send if all who hold an element shared what others want of it."""
    count = math.prod(one.shape)
    held = {
        rank: set(found.reshape(-1).tolist())
        for rank in ranks
        if (found := indices(one.source, one.shape, rank)) is not None
    }
    wanted = {
        rank: set(found.reshape(-1).tolist())
        for rank in ranks
        if (found := indices(one.target, one.shape, rank)) is not None
    }
    shares = dict.fromkeys(ranks, 0.0)
    for element in range(count):
        holders = [rank for rank in held if element in held[rank]]
        wants = sum(1 for rank in wanted if element in wanted[rank] and element not in held.get(rank, ()))
        for rank in holders:
            shares[rank] += wants / len(holders)
    return shares


@settings(max_examples=500)
@given(st.integers(0, 10**6))
def test_every_element_arrives_once_and_no_byte_more_is_sent(seed):
    move = case(seed).plan(axes.Mesh)
    received, sent = dict.fromkeys(move.ranks, 0), dict.fromkeys(move.ranks, 0)
    for number, one in enumerate(move.tensors):
        found = carried(move, number)
        for side, totals in (("receives", received), ("sends", sent)):
            for rank, count in found[side].items():
                totals[rank] += count * one.itemsize
        for rank in move.ranks:
            ends = [indices(end, one.shape, rank) for end in (one.source, one.target)]
            has, wants = (set() if end is None else set(end.reshape(-1).tolist()) for end in ends)
            assert found["receives"].get(rank, 0) == len(wants - has), "what a rank hasn't, and nothing else"
    assert move.totals == transfers.Totals(received, sent)
    assert move.lower_bound == sum(received.values()) == sum(sent.values())
    by_step = [
        [sum(getattr(step, side) for step in move.at(rank).steps) for rank in move.ranks]
        for side in ("bytes_in", "bytes_out")
    ]
    assert by_step == [[received[rank] for rank in move.ranks], [sent[rank] for rank in move.ranks]]


@settings(max_examples=500)
@given(st.integers(0, 10**6))
def test_holders_of_the_same_share_what_they_send(seed, monkeypatch_module):
    monkeypatch_module.setattr(transfers, "SMALLEST", 0)
    move = case(seed).plan(axes.Mesh)
    for number, one in enumerate(move.tensors):
        sends = carried(move, number)["sends"]
        fair = fair_shares(one, move.ranks)
        for rank, count in sends.items():
            assert count <= 1.1 * fair[rank] + 1, (str(one.source), str(one.target), one.shape, rank)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


# --- on real processes ----------------------------------------------------------------------------


def whole_of(name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """The whole tensor of a name, the same on every rank."""
    numbers = torch.arange(math.prod(shape)) * 7 + sum(map(ord, name))
    kind = getattr(torch, dtype)
    if kind is torch.bool:
        return (numbers % 3 == 0).reshape(shape)
    return (numbers % 61).reshape(shape).to(torch.float32 if kind.is_floating_point else kind).to(kind)


def tile_of(whole: torch.Tensor, end: Sharding, rank: int) -> torch.Tensor | None:
    """A rank's tile of a whole tensor."""
    found = indices(end, tuple(whole.shape), rank)
    return None if found is None else whole.reshape(-1)[torch.from_numpy(found.reshape(-1))].reshape(found.shape)


def strided(like: torch.Tensor, how: int) -> torch.Tensor:
    """A tensor of zeros of this shape: dense, every other element of a larger one, or transposed in memory."""
    if how == 1 and like.dim():
        return torch.zeros((*like.shape[:-1], 2 * like.shape[-1]), dtype=like.dtype)[..., ::2]
    if how == 2 and like.dim() > 1:
        return torch.zeros(like.shape[::-1], dtype=like.dtype).permute(*reversed(range(like.dim())))
    return torch.zeros_like(like)


def bits(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.reshape(-1), x.new_empty(0)]).view(torch.uint8)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))


def carry_out_cases(first: int, last: int) -> int:
    """Carry generated transfers out, there and back, twice each; returns how many."""
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    known: dict[tuple[Any, ...], axes.Mesh] = {}

    def make(declaration: str, ranks: tuple[int, ...]) -> axes.Mesh:
        if (declaration, ranks) not in known:
            known[declaration, ranks] = axes.init_mesh(declaration, ranks=ranks, device_type="cpu")
        return known[declaration, ranks]

    for seed in range(first, last):
        drawn = case(seed)
        move = drawn.plan(make).at(rank)
        wholes = {one.source_name: whole_of(one.source_name, one.shape, str(one.dtypes[0])) for one in move.tensors}
        tensors, expected = {}, {}
        for one in move.tensors:
            tensors[one.source_name] = tile_of(wholes[one.source_name], one.source, rank)
            arrived = wholes[one.source_name].to(getattr(torch, str(one.dtypes[1])))
            expected[one.source_name] = tile_of(arrived, one.target, rank)
        into = {
            name: strided(tile, (seed + at) % 4) for at, (name, tile) in enumerate(expected.items()) if tile is not None
        }
        into = {name: tile for at, (name, tile) in enumerate(into.items()) if (seed + at) % 3}
        before = {name: tile.data_ptr() for name, tile in into.items()}
        for _ in range(2):
            found = move(tensors, into if seed % 2 else None)
            assert found.keys() == {name for name, tile in expected.items() if tile is not None and rank in move.ranks}
            for name, value in found.items():
                local = axes.to_local(value) if isinstance(value, DTensor) else value
                assert same_bits(local, expected[name]), (seed, name)
                assert seed % 2 == 0 or name not in into or (value is into[name] and value.data_ptr() == before[name])
            for tile in into.values():
                tile.zero_()
    return last - first


CASES = 1000


def test_generated_transfers_arrive_on_real_processes(pool):
    assert pool.run(carry_out_cases, 0, CASES, timeout=600) == [CASES] * WORLD
