"""Every redistribution of a tensor with three dims on a 2x2x2 mesh, on eight real processes.

Each axis is replicated, on one of the dims with every order of several on one dim, or pending: 176
states and 20,313 pairs. A fixed sample that holds every kind of step is executed in every run, all of
them by `make test-full`. Values are compared with numpy's.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

import axes
from axes.algebra.plan import plan
from axes.runtime.redistribute import redistribute
from tests.redistribution_cases import AXES, Placing, at, coordinate_of, expected, pairs, placings, varied

SHAPE = (8, 8, 8)
SAMPLE = 2048
BATCH = 1024
KINDS = {"slice", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "reduce_move"}

Pair = tuple[Placing, Placing]


def sample() -> list[Pair]:
    return random.Random(20313).sample(pairs(), SAMPLE)


def kinds(chosen: list[Pair]) -> Counter[str]:
    mesh = axes.Mesh("a=2 b=2 c=2")
    found: Counter[str] = Counter()
    for pair in chosen:
        found.update(step.kind for step in plan(*(mesh.sharding(placing.spec) for placing in pair), SHAPE).steps)
    return found


def test_there_are_as_many_states_and_pairs_as_the_documentation_says():
    assert (len(placings()), len(pairs())) == (176, 20313)


def wrong(chosen: list[Pair], shape: tuple[int, ...]) -> list[str]:
    """On each rank: the pairs whose result isn't numpy's."""
    mesh = axes.init_mesh("a=2 b=2 c=2", device_type="cpu")
    coordinate = coordinate_of(mesh.rank)
    values = varied(0, shape).astype(np.float32)
    found = []
    for source, target in chosen:
        local = torch.from_numpy(source.cut(at(values, coordinate, source.pending), coordinate))
        got = redistribute(local, mesh.sharding(source.spec), mesh.sharding(target.spec), shape)
        if not np.array_equal(got.numpy(), expected(source, target, values, coordinate)):
            found.append(f"{source.spec} -> {target.spec}")
    return found


def executed(pool, chosen: list[Pair], shape: tuple[int, ...]) -> None:
    for start in range(0, len(chosen), BATCH):
        for rank, found in enumerate(pool.run(wrong, chosen[start : start + BATCH], shape, timeout=300)):
            assert not found, f"rank {rank}: {found[:5]}"


def test_the_sample_holds_every_kind_of_step():
    found = kinds(sample())
    assert set(found) == KINDS
    assert min(found.values()) >= 20


def test_a_sample_of_all_redistributions_on_eight_processes_is_what_numpy_says(pool):
    executed(pool, sample(), SHAPE)


def test_uneven_redistributions_on_eight_processes_are_what_numpy_says(pool):
    executed(pool, sample()[:256], (5, 7, 3))


@pytest.mark.full
@pytest.mark.parametrize("shape", [SHAPE, (5, 7, 3)], ids=str)
def test_all_redistributions_on_eight_processes_are_what_numpy_says(pool, shape):
    executed(pool, pairs(), shape)


def test_all_axes_are_known():
    assert set(coordinate_of(0)) == set(AXES)
