"""Layouts: which ranks an axis steps through, as digits of the rank; and universes: the job's ranks in an order.

A rank's position is a number; an axis reads some of its digits. A layout lists those digits as
pairs `(size, stride)`, slowest first: coordinate `i` on the axis is the mixed-radix number that these
digits of the position make, and its offset is `sum(digit * stride)`.

>>> dp, tp = Layout((4,), (2,)), Layout((2,), (1,))     # "dp=4 tp=2" over eight ranks
>>> list(dp.offsets()), list(tp.offsets())
([0, 2, 4, 6], [0, 1])
>>> Layout.product(dp, tp)                              # flattened: one digit of size eight
8:1
>>> Layout.product(tp, dp)                              # the other order can't merge
(2:1, 4:2)

The strides of a layout form a divisibility chain: sorted by stride, each stride is a multiple of
the span (`size * stride`) of the one before. Digits of a number always do, and with it every
operation here costs O(number of digits), whatever the number of ranks.

Position `p` in `0..size-1` of a universe is global rank `ranks[p]`. Consecutive ranks are kept as a range, so a
universe of a million ranks costs nothing:

>>> island = Universe.of(range(2048, 4096))
>>> island.ranks[5], island.position(2053), island.position(7)
(2053, 5, None)

The idea is CuTe's layout algebra (NVIDIA CUTLASS; Shen et al.) in row-major order, as in
`torch.distributed._pycute`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

from axes.algebra.errors import MeshError, SizeError, shown
from axes.algebra.grammar import LARGEST_SIZE
from axes.algebra.sizes import checked_rank, tuple_of, whole_number, whole_numbers

Digit = tuple[int, int]
"""`(size, stride)`."""


MOST_BITS = 63
"""Sizes and strides have no more."""


class Layout(tuple[Digit, ...]):
    """A tuple of digits `(size, stride)`, slowest first, in canonical form.

    Canonical: no digit of size 1, neighbours merged where the left one continues the right one.
    Equal layouts compare and hash equal. A layout without digits has size 1.

    Raises `MeshError` where sizes or strides aren't positive, have more than 63 bits, or the digits overlap.
    """

    size: int

    def __new__(cls, sizes: Iterable[int] = (), strides: Iterable[int] = ()) -> Layout:
        """The layout with digits of these sizes and strides, slowest first."""
        one, two = whole_numbers(sizes), whole_numbers(strides)
        if (
            one is None
            or two is None
            or len(one) != len(two)
            or not 1 <= min(one + two, default=1) <= max(one + two, default=1) < 2**MOST_BITS
        ):
            raise MeshError(
                f"a layout has as many strides as sizes, whole numbers that are at least 1 and have {MOST_BITS} bits; "
                f"found {shown(sizes)} and {shown(strides)}"
            )
        return cls._joined(zip(one, two, strict=True))

    @classmethod
    def _joined(cls, every: Iterable[Digit]) -> Layout:
        """The layout with these digits, which are digits of layouts: `of` checks them, too."""
        merged: list[Digit] = []
        for size, stride in every:
            if merged and merged[-1][1] == size * stride:
                merged[-1] = (merged[-1][0] * size, stride)
            elif size > 1:
                merged.append((size, stride))
        for (size, stride), (_, above) in pairwise(sorted(merged, key=itemgetter(1))):
            if above % (size * stride):
                raise MeshError(
                    f"the digits of {_text(merged)} overlap or don't divide: "
                    f"stride {above} isn't a multiple of {size} * {stride}"
                )
        found = super().__new__(cls, merged)
        found.__dict__["size"] = math.prod(map(itemgetter(0), merged))
        return found

    @classmethod
    def of(cls, found: Iterable[Digit]) -> Layout:
        """The layout with these digits.

        Examples:
            >>> Layout.of([(2, 4), (2, 2)])
            4:2
        """
        pairs = tuple_of(found)
        if pairs is None or not {*map(type, pairs)} <= {tuple, list} or not {*map(len, pairs)} <= {2}:
            raise MeshError(f"the digits of a layout are pairs (size, stride); found {shown(found)}")
        return cls(*zip(*pairs, strict=True))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Layout is immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.sizes, self.strides)

    def __repr__(self) -> str:
        return _text(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each digit, slowest first."""
        return tuple([size for size, _ in self])

    @property
    def strides(self) -> tuple[int, ...]:
        """Stride of each digit in positions, slowest first."""
        return tuple([stride for _, stride in self])

    def offset(self, index: int) -> int:
        """The offset of coordinate `index`, `0 <= index < size`.

        Examples:
            >>> Layout((2, 4), (1, 2)).offset(5)
            3
        """
        at = whole_number(index)
        if at is None or not 0 <= at < self.size:
            raise MeshError(f"coordinate {shown(index)} is outside 0..{self.size - 1} of {self}")
        total = 0
        for size, stride in reversed(self):
            at, digit = divmod(at, size)
            total += digit * stride
        return total

    def offsets(self, start: int = 0) -> Sequence[int]:
        """The offsets of all coordinates in order, from `start` on, lazily where they are evenly spaced.

        Examples:
            >>> Layout((2,), (4,)).offsets()
            range(0, 8, 4)
        """
        if len(self) <= 1:
            size, stride = self[0] if self else (1, 1)
            return range(start, start + size * stride, stride)
        found = [start]
        for size, stride in self:
            found = [base + digit for base in found for digit in range(0, size * stride, stride)]
        return found

    def coordinate(self, position: int) -> int:
        """The coordinate on this axis of any position: what the digits of `position` read.

        Examples:
            >>> Layout((2, 4), (1, 2)).coordinate(3)
            5
        """
        # Asked of every rank for every layout: the check would take longer than the answer.
        at = position if type(position) is int and position >= 0 else checked_rank("a position", position)
        index = 0
        for size, stride in self:
            index = index * size + at // stride % size
        return index

    def split(self, sizes: Sequence[int]) -> tuple[Layout, ...]:
        """This axis as `len(sizes)` axes, slowest first, whose product is this layout.

        Raises `SizeError` where the sizes don't multiply to this size or cut a digit.

        Examples:
            >>> Layout((8,), (1,)).split((2, 4))
            (2:4, 4:1)
        """
        found = whole_numbers(sizes)
        if found is None or any(size < 1 for size in found) or math.prod(found) != self.size:
            raise SizeError(f"{self} has size {self.size}, which isn't split into {shown(sizes)}")
        parts: list[Layout] = []
        rest = list(self)
        for wanted in reversed(found):
            taken: list[Digit] = []
            while wanted > 1:
                size, stride = rest.pop()
                low = math.gcd(size, wanted)
                if low not in (size, wanted):
                    raise SizeError(f"{self} doesn't split into {found}: it cuts {size}:{stride}")
                taken.insert(0, (low, stride))
                wanted //= low
                if low < size:
                    rest.append((size // low, stride * low))
            parts.insert(0, Layout._joined(taken))
        return tuple(parts)

    @staticmethod
    def product(*layouts: Layout) -> Layout:
        """The layouts flattened into one, the first the slowest. They must not overlap.

        Examples:
            >>> Layout.product(Layout((2,), (4,)), Layout((4,), (1,)))
            8:1
        """
        return Layout._joined(chain.from_iterable(map(checked_layout, layouts)))

    def complement(self, size: int) -> Layout:
        """The digits of a universe of `size` positions that this layout doesn't read.

        Raises `MeshError` where its digits aren't digits of these positions.

        Examples:
            >>> Layout((2,), (4,)).complement(16)
            (2:8, 4:1)
        """
        return Layout((size,), (1,)).divide(self)

    def divide(self, other: Layout) -> Layout:
        """What is left of this layout, in its order, without the digits of `other`.

        Raises `MeshError` where `other` isn't made of this layout's digits.

        Examples:
            >>> Layout((8,), (1,)).divide(Layout((2,), (2,)))
            (2:4, 2:1)
        """
        mine, theirs = digits(self, checked_layout(other))
        taken = set(theirs)
        if not taken <= set(mine):
            raise MeshError(f"{other} isn't made of the digits of {self}")
        return Layout._joined([digit for digit in mine if digit not in taken])

    def contains(self, other: Layout) -> bool:
        """Whether every digit of `other` is a digit of this layout, in whatever order.

        Examples:
            >>> Layout((8,), (1,)).contains(Layout((2, 2), (1, 4)))
            True
        """
        found = common_digits((self, checked_layout(other)))
        return found is not None and set(found[other]) <= set(found[self])

    def within(self, whole: Layout) -> Layout:
        """This layout in terms of the coordinates on `whole`, which has all of its digits.

        Raises `MeshError` where `whole` lacks some of them.

        Examples:
            >>> Layout((2, 2), (8, 2)).within(Layout((2, 4), (8, 1)))
            4:2
        """
        checked_layout(whole).divide(self)  # refuses digits that `whole` lacks
        return Layout._joined([(size, whole.coordinate(stride)) for size, stride in digits(self, whole)[0]])

    def overlaps(self, other: Layout) -> bool:
        """Whether the two read a common digit (or cut each other's digits).

        Examples:
            >>> Layout((4,), (2,)).overlaps(Layout((2,), (4,)))
            True
        """
        return any(
            stride < size_ * stride_ and stride_ < size * stride
            for size, stride in self
            for size_, stride_ in checked_layout(other)
        )


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

    def group(self, layout: Layout, rank: int) -> Sequence[int]:
        """The global ranks of the group of `rank` along a layout, in the order of the layout.

        >>> Universe.of(range(8)).group(Layout((2,), (4,)), 5)
        range(1, 9, 4)
        """
        position = self.position(rank)
        if position is None:
            raise MeshError(f"rank {rank} isn't among the {self.size} ranks of the mesh")
        return self.pick(layout.offsets(position - layout.offset(layout.coordinate(position))))

    @cached_property
    def _positions(self) -> Mapping[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}


def checked_layout(value: object) -> Layout:
    """`value`; `MeshError` for what is no layout."""
    if not isinstance(value, Layout):
        raise MeshError(f"a layout is an axes.Layout, like mesh.layout('tp'); found {shown(value)}")
    return value


def digits(*layouts: Layout) -> tuple[tuple[Digit, ...], ...]:
    """The common refinement: each layout as an ordered tuple of digits that all of them share.

    Two digits of the result are the same or don't overlap. Raises `MeshError` where the boundaries
    of the digits form no divisibility chain.

    >>> digits(Layout((8,), (1,)), Layout((2,), (2,)))
    (((2, 4), (2, 2), (2, 1)), ((2, 2),))
    >>> digits(Layout((2,), (3,)), Layout((3,), (2,)))
    Traceback (most recent call last):
    axes.algebra.errors.MeshError: 2:3 and 3:2 have no common digits: 3 isn't a multiple of 2
    """
    bounds = sorted({b for lay in layouts for size, stride in lay for b in (stride, size * stride)})
    steps = list(pairwise(bounds))
    for low, high in steps:
        if high % low:
            texts = " and ".join(dict.fromkeys(map(str, layouts)))
            raise MeshError(f"{texts} have no common digits: {high} isn't a multiple of {low}")
    cut = [
        [(high // low, low) for s, d in layout for low, high in reversed(steps) if d <= low and high <= s * d]
        for layout in layouts
    ]
    return tuple(map(tuple, cut))


def common_digits(layouts: Iterable[Layout]) -> dict[Layout, tuple[Digit, ...]] | None:
    """Each layout as digits that are common to all of them, or None where there are none."""
    every = tuple(dict.fromkeys(layouts))
    try:
        return dict(zip(every, digits(*every), strict=True))
    except MeshError:
        return None


def _text(every: Sequence[Digit]) -> str:
    texts = [f"{size}:{stride}" for size, stride in every] or ["1:1"]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
