"""What a rank has: how a dim is cut, what two tiles share, and where that lies in a local tensor.

A dim that doesn't divide is cut as `torch.chunk` cuts it, nested in the written order.

Five elements over axes of size 2 and 2 are cut into 3 and 2, then each into 2 and 1, 1 and 1:

>>> [nested_chunk(5, ((2, i), (2, j))) for i in range(2) for j in range(2)]
[(0, 2), (2, 3), (3, 4), (4, 5)]
>>> [nested_chunk(5, ((4, i),)) for i in range(4)]
[(0, 2), (2, 4), (4, 5), (5, 5)]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain, product

from axes.algebra.layout import Digit

Runs = tuple[tuple[int, int], ...]
"""Ascending, disjoint `(start, stop)` along one dim; `((start, start),)` where there is nothing."""

Tile = tuple[Runs, ...]
"""What a rank holds of a tensor: the product, over the dims, of their runs."""

Box = tuple[tuple[int, int], ...]
"""A box of a local tensor: `(start, stop)` for each dim."""


def nested_chunk(extent: int, cuts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """`(start, stop)` of what `cuts` leave of `extent` elements: each `(parts, which of them)`, major first."""
    start, stop = 0, extent
    for size, coordinate in cuts:
        piece = -(-(stop - start) // size)
        start, stop = min(stop, start + coordinate * piece), min(stop, start + (coordinate + 1) * piece)
    return start, stop


def all_chunks(extent: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The pieces of `nested_chunk`, all of them in order.

    >>> all_chunks(5, (2, 2))
    ((0, 2), (2, 3), (3, 4), (4, 5))
    """
    coordinates = product(*[[(size, at) for at in range(size)] for size in sizes])
    return tuple([nested_chunk(extent, each) for each in coordinates])


def largest_chunk(extent: int, sizes: Iterable[int]) -> int:
    """Elements of the largest piece, which is the one at the origin."""
    for size in sizes:
        extent = -(-extent // size)
    return extent


def smallest_chunk(extent: int, sizes: Iterable[int]) -> int:
    """Elements of the smallest piece of `nested_chunk`.

    >>> smallest_chunk(5, (2, 2)), smallest_chunk(5, (4,))
    (1, 0)
    """
    # Not always the last piece: a smaller extent may be cut more evenly than a larger one.
    extents = {extent}
    for size in sizes:
        pieces = [(whole, -(-whole // size)) for whole in extents]
        # The first, the one that is cut short, and the last.
        extents = {
            max(0, min(piece, whole - at * piece))
            for whole, piece in pieces
            for at in (0, min(size - 1, whole // (piece or 1)), size - 1)
        }
    return min(extents)


def same_chunks(extent: int, one: Sequence[Sequence[Digit]], two: Sequence[Sequence[Digit]]) -> bool:
    """Whether two lists of chunks leave the same of `extent` elements on every rank.

    Each chunk is given by its digits, slowest first, in digits that both lists share. The cost doesn't depend on the
    number of ranks.

    >>> a, b = (2, 2), (2, 1)
    >>> [same_chunks(extent, [[a], [b]], [[a, b]]) for extent in (4, 5, 7)]
    [True, False, True]
    """
    mine, theirs = _varying(extent, one), _varying(extent, two)
    alike = [digit for digit, *_ in mine] == [digit for digit, *_ in theirs]
    return alike and {*chain(*one)} == {*chain(*two)} and _agree(extent, mine, theirs)


Varying = list[tuple[Digit, int, int]]


def _varying(extent: int, chunks: Iterable[Sequence[Digit]]) -> Varying:
    """The digits in which ranks that have elements differ; all others of these ranks' digits are 0.

    With each how many pieces its chunk has in all, 0 where that is said at a digit before; and how many of them lie
    between two neighbours along the digit.
    """
    found: Varying = []
    for digits in chunks:
        below = pieces = said = math.prod([size for size, _ in digits])
        for digit in digits:
            below //= digit[0]
            if extent > below:
                found.append((digit, said, below))
                said = 0
        extent = -(-extent // pieces)
    return found


def _agree(extent: int, one: Varying, two: Varying, lengths: tuple[int, int] = (0, 0)) -> bool:
    """Whether two lists of digits cut `extent` elements the same. `lengths` are those of the chunks that have begun."""
    if extent < 2 or not one:
        return True
    (_, my_pieces, my_step), (_, their_pieces, their_step) = one[0], two[0]
    mine = -(-extent // my_pieces) if my_pieces else lengths[0]
    theirs = -(-extent // their_pieces) if their_pieces else lengths[1]
    part = min(extent, mine * my_step)
    if part != min(extent, theirs * their_step):
        return False
    return all(_agree(each, one[1:], two[1:], (mine, theirs)) for each in {part, extent % part})


def factor_runs(sizes: tuple[int, ...], pieces: tuple[tuple[int, int], ...]) -> Runs:
    """The runs of a factored dim: a product of intervals, flattened in row-major order.

    >>> factor_runs((3, 4), ((0, 3), (2, 4)))
    ((2, 4), (6, 8), (10, 12))
    """
    found = [(0, 1)]
    for size, (first, last) in zip(sizes, pieces, strict=True):
        if (first, last) == (0, size):
            found = [(start * size, stop * size) for start, stop in found]
        else:
            each = [at * size for start, stop in found for at in range(start, stop)]
            found = [(start + first, start + last) for start in each if first < last]
    return tuple(found) or ((0, 0),)


def merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """Adjacent runs as one."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def count(runs: Runs) -> int:
    """How many indices the runs hold."""
    found = 0
    for start, stop in runs:
        found += stop - start
    return found


def tile_shape(held: Tile) -> tuple[int, ...]:
    """The shape of the local tensor that holds a tile."""
    return tuple(map(count, held))


# --- tiles and boxes ------------------------------------------------------------------------------


def volume(held: Tile) -> int:
    """Elements of a tile."""
    return math.prod(map(count, held))


def intersection(one: Tile, two: Tile) -> Tile:
    """What two tiles share.

    >>> intersection((((0, 4), (8, 12)),), (((2, 9),),))
    (((2, 4), (8, 9)),)
    """
    return tuple(map(shared_runs, one, two))


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


def boxes_within(part: Tile, within: Tile) -> tuple[Box, ...]:
    """The boxes of the local tensor of `within` that hold `part`, in row-major order of the runs.

    >>> boxes_within((((2, 4), (8, 9)),), (((0, 4), (8, 12)),))
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
