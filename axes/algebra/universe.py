"""A universe: the job's ranks in an order. Position `p` in `0..size-1` is global rank `ranks[p]`.

>>> island = Universe.of(range(2048, 4096))
>>> island.ranks[5], island.position(2053), island.position(7)
(2053, 5, None)

Consecutive ranks are kept as a range, so a universe of a million ranks costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from axes.algebra.errors import MeshError, shown
from axes.algebra.grammar import LARGEST_SIZE
from axes.algebra.layout import Layout
from axes.algebra.sizes import whole_numbers


@dataclass(frozen=True)
class Universe:
    """Distinct global ranks by position; a `range` wherever they are evenly spaced and ascending."""

    ranks: range | tuple[int, ...]

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Universe:
        """The universe of any sequence of distinct ranks, at least one; `MeshError` otherwise."""
        listed = ranks if isinstance(ranks, range) else whole_numbers(ranks)
        if listed is None or isinstance(ranks, Set | Mapping):
            raise MeshError(f"ranks is a sequence of distinct integers; found {shown(ranks)}")
        ends = [listed[0], listed[-1]] if isinstance(listed, range) and listed else listed
        if not listed or min(ends) < 0 or max(ends) >= LARGEST_SIZE:
            raise MeshError(f"ranks holds at least one rank, all of them from 0 and below 2**48; found {shown(ranks)}")
        step = listed[1] - listed[0] if len(listed) > 1 else 1
        if step > 0 and (isinstance(listed, range) or all(b - a == step for a, b in pairwise(listed))):
            return cls(range(listed[0], listed[-1] + 1, step))
        if len(set(listed)) != len(listed):
            twice, _ = Counter(listed).most_common(1)[0]
            raise MeshError(f"ranks are distinct; found {shown(twice)} more than once")
        return cls(tuple(listed))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.ranks)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def position(self, rank: int) -> int | None:
        """Where a global rank lies, or None where it isn't of this universe."""
        if isinstance(self.ranks, range):
            return self.ranks.index(rank) if rank in self.ranks else None
        return self._positions.get(rank)

    def pick(self, positions: Sequence[int]) -> Sequence[int]:
        """The global ranks at these positions; a range for a range."""
        if isinstance(self.ranks, range) and isinstance(positions, range) and len(positions):
            step = self.ranks.step
            first = self.ranks.start + positions.start * step
            return range(first, first + len(positions) * positions.step * step, positions.step * step)
        return [self.ranks[position] for position in positions]

    def line(self, layout: Layout, rank: int) -> Sequence[int]:
        """The global ranks on the layout's line through `rank`, in the order of the layout.

        >>> Universe.of(range(8)).line(Layout((2,), (4,)), 5)
        range(1, 9, 4)
        """
        position = self.position(rank)
        if position is None:
            raise MeshError(f"rank {rank} isn't among the {self.size} ranks of the mesh")
        base = position - layout.offset(layout.coordinate(position))
        offsets = layout.offsets()
        if isinstance(offsets, range):
            return self.pick(range(base + offsets.start, base + offsets.stop, offsets.step))
        return self.pick([base + offset for offset in offsets])

    @cached_property
    def _positions(self) -> Mapping[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}
