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
    if len(mine) == 1 and len(theirs) == 1:
        start, stop = max(mine[0][0], theirs[0][0]), min(mine[0][1], theirs[0][1])
        return ((start, stop),) if start < stop else ()
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
    if len(within) == 1:
        begin = within[0][0]
        return [(start - begin, stop - begin) for start, stop in part]
    found: list[tuple[int, int]] = []
    at, base = 0, 0
    for start, stop in part:
        while within[at][1] < stop:
            base += within[at][1] - within[at][0]
            at += 1
        offset = base - within[at][0]
        found.append((start + offset, stop + offset))
    return found


def cut(part: Tile, first: int) -> tuple[list[Tile], list[Tile]]:
    """The first elements of a tile in row-major order, and the rest, both as tiles.

    >>> cut((((0, 2),), ((0, 3),)), 4)
    ([(((0, 1),), ((0, 3),)), (((1, 2),), ((0, 1),))], [(((1, 2),), ((1, 3),))])
    """
    head: list[Tile] = []
    tail: list[Tile] = []
    for dim, runs in enumerate(part):
        inner = math.prod(count(below) for below in part[dim + 1 :])
        whole, first = divmod(first, inner)
        before, after = _cut_runs(runs, whole)
        if before:
            head.append((*part[:dim], before, *part[dim + 1 :]))
        if not first:
            if after:
                tail.insert(0, (*part[:dim], after, *part[dim + 1 :]))
            break
        row, after = _cut_runs(after, 1)
        if after:
            tail.insert(0, (*part[:dim], after, *part[dim + 1 :]))
        part = (*part[:dim], row, *part[dim + 1 :])
    return head, tail


def cut_box(region: Region, start: int, stop: int) -> list[Region]:
    """The elements `start..stop` of a box in row-major order, as boxes.

    >>> cut_box(((0, 2), (0, 3)), 2, 6)
    [((0, 1), (2, 3)), ((1, 2), (0, 3))]
    """
    if (start, stop) == (0, math.prod([last - first for first, last in region])):
        return [region]
    (first, _), *inner = region
    row = math.prod([last - begin for begin, last in inner])
    top, bottom = -(-start // row), stop // row

    def within(number: int, low: int, high: int) -> list[Region]:
        """A part of one row."""
        boxes = cut_box(tuple(inner), low - number * row, high - number * row)
        return [((first + number, first + number + 1), *box) for box in boxes]

    if bottom < top:
        return within(bottom, start, stop)
    found = within(top - 1, start, top * row) if start < top * row else []
    if top < bottom:
        found.append(((first + top, first + bottom), *inner))
    return found + (within(bottom, bottom * row, stop) if bottom * row < stop else [])


def _cut_runs(runs: Runs, first: int) -> tuple[Runs, Runs]:
    head: list[tuple[int, int]] = []
    tail: list[tuple[int, int]] = []
    for start, stop in runs:
        middle = min(stop, start + first)
        first -= middle - start
        if start < middle:
            head.append((start, middle))
        if middle < stop:
            tail.append((middle, stop))
    return tuple(head), tuple(tail)


def between(part: Tile, start: int, stop: int) -> list[Tile]:
    """The elements `start..stop` of a tile in row-major order, as tiles.

    >>> between((((0, 2),), ((0, 3),)), 2, 4)
    [(((0, 1),), ((2, 3),)), (((1, 2),), ((0, 1),))]
    """
    head = [part]
    if stop < volume(part):
        head, _ = cut(part, stop)
    found = []
    for each in head:
        size = volume(each)
        if start < size:
            found.extend([each] if start <= 0 else cut(each, start)[1])
        start -= size
    return found
