"""Tiles and boxes: what two tiles share, where that lies in a local tensor, and parts of both in row-major order.

A tile is what a rank has of a tensor, runs of indices for each dim (see `axes.algebra.chunks`); a box is a part of a
local tensor.
"""

from __future__ import annotations

import math
from itertools import product

from axes.algebra.chunks import Runs, Tile, count

Region = tuple[tuple[int, int], ...]
"""A box of a local tensor: `(start, stop)` for each dim."""


def volume(held: Tile) -> int:
    """Elements of a tile."""
    return math.prod(map(count, held))


def intersection(one: Tile, two: Tile) -> Tile | None:
    """What two tiles share, or None where that is nothing.

    >>> intersection((((0, 4), (8, 12)),), (((2, 9),),))
    (((2, 4), (8, 9)),)
    """
    found: list[Runs] = []
    for mine, theirs in zip(one, two, strict=True):
        shared = shared_runs(mine, theirs)
        if not shared:
            return None
        found.append(shared)
    return tuple(found)


def shared_runs(mine: Runs, theirs: Runs) -> Runs:
    """What two lists of runs share."""
    found: list[tuple[int, int]] = []
    i = j = 0
    while i < len(mine) and j < len(theirs):
        start, stop = max(mine[i][0], theirs[j][0]), min(mine[i][1], theirs[j][1])
        if start < stop:
            found.append((start, stop))
        if mine[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def regions(part: Tile, within: Tile) -> tuple[Region, ...]:
    """The boxes of the local tensor of `within` that hold `part`, in row-major order of the runs.

    >>> regions((((2, 4), (8, 9)),), (((0, 4), (8, 12)),))
    (((2, 4),), ((4, 5),))
    """
    return tuple(product(*map(local_runs, part, within)))


def local_runs(part: Runs, within: Runs) -> list[tuple[int, int]]:
    """Where runs lie in a local dim that has the runs `within`."""
    found: list[tuple[int, int]] = []
    at, base = 0, 0
    for start, stop in part:
        while within[at][1] < stop:
            base += within[at][1] - within[at][0]
            at += 1
        offset = base - within[at][0]
        found.append((start + offset, stop + offset))
    return found
