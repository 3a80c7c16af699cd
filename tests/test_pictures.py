"""A picture of a plan shows where every value comes from: adding up what it says of each part gives the target's shard."""

# Imports from inside: a picture is SVG to the public; what it says of each part is in the scenes that it is drawn from.

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import numpy as np
import pytest

import axes
from axes.pictures.moves import trace

MESH = axes.Mesh("x=2 y=2 z=2", "xy = x y", "zx = z x")
PLACES = [
    "{}",
    "{}@x",
    "{}@y",
    "{}@z",
    "{}@xy",
    "{}@zx",
    "{}@(z y)",
    "{}@(x y z)",
    "(2 {}@x)",
    "({}@y 3)",
    "({0}{0}=2@z {0}@y)",
]
DIGITS = {" | sum@x": 4, " | sum@(y z)": 3}
"""The digits of a rank that an axis is: pending over it, ranks that differ in these alone have summands of one value."""
SENDING = {"all_gather", "all_reduce", "all_to_all", "reduce_scatter", "permute", "reduce_move"}


def ends(rng: Random) -> Iterator[tuple[axes.Sharding, int]]:
    """Two shardings of a tensor of three dims, each with the digits of ranks over which it is pending."""
    pending = rng.choice(["", "", *DIGITS])
    for kept in (pending, rng.choice(["", pending])):
        while True:
            text = " ".join(rng.choice(PLACES).format(name) for name in "abc") + kept
            with contextlib.suppress(axes.AxesError):  # an axis twice
                yield MESH.sharding(text), DIGITS.get(kept, 0)
                break


def held(sharding: axes.Sharding, shape: tuple[int, ...], rank: int) -> tuple[np.ndarray, ...]:
    """Where a rank's shard lies in the whole."""
    runs = [place if isinstance(place, tuple) else (place,) for place in sharding.local_indices(shape, rank)]
    return np.ix_(*(np.r_[each] if each else np.arange(0) for each in runs))


@pytest.mark.parametrize("seed", range(60))
def test_a_picture_shows_where_every_value_comes_from(seed):
    rng = Random(seed)
    while True:
        (source, summed), (target, left) = ends(rng)
        shape = (8, 8, 8) if rng.random() < 0.3 else tuple(rng.choice([1, 2, 3, 5, 6, 7, 9, 12]) for _ in range(3))
        with contextlib.suppress(axes.AxesError):  # a group that doesn't divide
            made = axes.plan(source, target, shape, dtype="float64")
            break
    whole, own = np.arange(1.0, 1 + np.prod(shape)).reshape(shape), {}
    for rank in range(8):
        others = [1000.0 * peer for peer in range(8) if peer & ~summed == rank & ~summed and peer & summed]
        own[rank] = np.full(shape, np.nan)
        inside = held(source, shape, rank)
        own[rank][inside] = 1000.0 * rank if rank & summed else whole[inside] - sum(others)
    scenes = trace(made)
    shown = [drawn(scenes[-1].held[rank], own, shape) for rank in range(8)]
    for rank in range(8):
        inside = held(target, shape, rank)
        assert np.isfinite(shown[rank]).sum() == shown[rank][inside].size, f"a part of rank {rank} lies outside"
        total = sum(shown[peer][inside] for peer in range(8) if peer & ~left == rank & ~left)
        assert (total == whole[inside]).all(), f"rank {rank}: {source.spec} -> {target.spec} of {shape}"
    for before, after in pairwise(scenes):
        assert not after.arrows or after.step.kind in SENDING
        if all(extent % 8 == 0 for extent in shape):  # else what a step says may be more than it turns out to be
            assert bool(after.arrows) == (after.step.kind in SENDING)
        assert all(one != other and before.held[one] for one, other in after.arrows)


def drawn(parts: list, own: dict[int, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of the whole shape with what the parts say, and nan elsewhere."""
    found = np.full(shape, np.nan)
    for tile, origins in parts:
        at = np.ix_(*(np.r_[tuple(slice(*run) for run in runs)] for runs in tile))
        assert np.isnan(found[at]).all(), "parts overlap"
        found[at] = sum(own[origin][at] for origin in origins)
    return found
