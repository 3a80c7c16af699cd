"""How a dim that doesn't divide is cut: `torch.chunk`, nested in the written order.

Five elements over axes of size 2 and 2 are cut into 3 and 2, then each into 2 and 1, 1 and 1:

>>> [nested_chunk(5, (2, 2), (i, j)) for i in range(2) for j in range(2)]
[(0, 2), (2, 3), (3, 4), (4, 5)]
>>> [nested_chunk(5, (4,), (i,)) for i in range(4)]
[(0, 2), (2, 4), (4, 5), (5, 5)]
"""

from __future__ import annotations

from collections.abc import Iterable


def nested_chunk(extent: int, sizes: Iterable[int], coordinates: Iterable[int]) -> tuple[int, int]:
    """`(start, stop)` of the piece at `coordinates` of `extent` elements cut into `sizes`, major first."""
    start, stop = 0, extent
    for size, coordinate in zip(sizes, coordinates, strict=True):
        piece = -(-(stop - start) // size)
        start, stop = min(stop, start + coordinate * piece), min(stop, start + (coordinate + 1) * piece)
    return start, stop


def largest_chunk(extent: int, sizes: Iterable[int]) -> int:
    """Elements of the largest piece, which is the one at the origin."""
    for size in sizes:
        extent = -(-extent // size)
    return extent
