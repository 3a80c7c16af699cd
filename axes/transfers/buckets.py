"""Buckets: which tensors of a transfer go together in one exchange.

A tensor of which some rank has more than a bucket goes in several pieces: piece i of n is that part of every message
about it. Each piece goes into the first bucket from the last of its ranks' on in which no rank would send or receive
more than a bucket. How much that is follows from bounds that hold for every rank, so that each rank finds the same
buckets by itself.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("tp=2")
>>> ends = mesh.sharding("f@tp d"), mesh.sharding("f d@tp")
>>> tensors = [Carriage(name, name, (64, 64), *ends, (None, "float32")) for name in "ab"]
>>> found, buckets = bucketed(tensors, 4096)
>>> [one.pieces for one in found], [[(piece.tensor, piece.piece) for piece in bucket] for bucket in buckets]
([2, 2], [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)]])
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from axes.algebra.chunks import Tile
from axes.algebra.layout import Universe
from axes.algebra.plan import itemsize_of
from axes.algebra.sharding import Sharding
from axes.transfers.piece_links import PieceLink

Kind = tuple[Sharding, Sharding, tuple[int, ...], PieceLink | None]
"""Source, target, shape and link: what an exchange follows from. Many tensors of a model have it in common."""


@dataclass(frozen=True)
class Carriage:
    """One tensor of a transfer, or a part of one that is a part of another: where it comes from, and where it goes.

    shape: of the tensor; of a part the extents of its link. source, target: shardings whose meshes are just the ranks
    that have the tensor.
    dtypes: at the source, None where that isn't known; and in which it travels and arrives.
    link: which part of the source it is, and of the target. pieces: in how many pieces it goes.
    """

    source_name: str
    target_name: str
    shape: tuple[int, ...]
    source: Sharding
    target: Sharding
    dtypes: tuple[str | None, str | None]
    link: PieceLink | None = None
    pieces: int = 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The whole shapes of both tensors."""
        return (self.shape, self.shape) if self.link is None else self.link.shapes

    @property
    def tile(self) -> Tile:
        """The elements of the target that it is."""
        return tuple([((0, size),) for size in self.shape]) if self.link is None else self.link.tile(1)

    @property
    def inverse(self) -> Carriage:
        """The way back."""
        dtypes = self.dtypes[1] or self.dtypes[0], self.dtypes[0] or self.dtypes[1]
        return replace(
            self,
            source_name=self.target_name,
            target_name=self.source_name,
            shape=self.shape if self.link is None else self.link.inverse.extents,
            source=self.target,
            target=self.source,
            dtypes=dtypes,
            link=None if self.link is None else self.link.inverse,
        )

    @property
    def wire(self) -> str:
        """The dtype of an element on its way, float32 where it isn't known."""
        return self.dtypes[1] or self.dtypes[0] or "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of an element on its way."""
        return itemsize_of(self.wire)

    @cached_property
    def kind(self) -> Kind:
        """What its exchange follows from."""
        ends = self.source, self.target
        return *ends, self.shape, None if self.link is None else self.link.like(*ends)


@dataclass(frozen=True)
class TensorPiece:
    """A tensor in a bucket: its number among the tensors, and which of its pieces."""

    tensor: int
    piece: int


def bucketed(
    tensors: Iterable[Carriage], bucket_bytes: int
) -> tuple[tuple[Carriage, ...], tuple[tuple[TensorPiece, ...], ...]]:
    """The tensors, each in as many pieces as it needs; and buckets that no rank fills by more on either side."""
    most = functools.lru_cache(maxsize=4096)(_most)
    found, sizes = [], []
    for one in tensors:
        itemsize = one.itemsize
        sent, received = (count * itemsize for count in most(*one.kind))
        pieces = max(1, -(-max(sent, received) // bucket_bytes))
        found.append(one if one.pieces == pieces else replace(one, pieces=pieces))
        sizes.append((-(-sent // pieces), -(-received // pieces)))
    # Of ranks that are in the same universes of a side: the last bucket with a piece of theirs, and how full it is.
    filled: dict[tuple[int, int], tuple[int, int]] = {}

    def load(end: tuple[int, int], bucket: int) -> int:
        last, full = filled.get(end, (0, 0))
        return full if last == bucket else 0

    buckets: list[list[TensorPiece]] = []
    parts = _parts(one.source.universe for one in found), _parts(one.target.universe for one in found)
    for piece in _interleaved(found):
        one, size = found[piece.tensor], sizes[piece.tensor]
        here, there = parts[0][one.source.universe], parts[1][one.target.universe]
        ends = [*[(0, part) for part in here], *[(1, part) for part in there]]
        at = max([filled[end][0] for end in ends if end in filled], default=0)
        if any(load(end, at) + size[end[0]] > bucket_bytes for end in ends):
            at += 1
        filled.update([(end, (at, load(end, at) + size[end[0]])) for end in ends])
        buckets += [[] for _ in range(at + 1 - len(buckets))]
        buckets[at].append(piece)
    return tuple(found), tuple(map(tuple, buckets))


def _parts(universes: Iterable[Universe]) -> dict[Universe, tuple[int, ...]]:
    """Of which parts each universe is made. Ranks that are in the same of them are one part, here its number.

    >>> _parts([Universe.of([0, 1, 2]), Universe.of([2]), Universe.of([3])]).values()
    dict_values([(0, 1), (1,), (2,)])
    """
    within: dict[int, list[Universe]] = {}
    found: dict[Universe, list[int]] = {universe: [] for universe in universes}
    for universe in found:
        for rank in universe.ranks:
            within.setdefault(rank, []).append(universe)
    for number, some in enumerate({tuple(map(id, some)): some for some in within.values()}.values()):
        for universe in some:
            found[universe].append(number)
    return {universe: tuple(numbers) for universe, numbers in found.items()}


def _most(source: Sharding, target: Sharding, shape: tuple[int, ...], link: PieceLink | None) -> tuple[int, int]:
    """The most elements that any rank sends of a tensor, and that any receives: bounds, without a look at ranks."""
    held, wanted = (
        min(math.prod(shape), end.largest_tile(shape) if link is None else link.largest(side, end))
        for side, end in enumerate((source, target))
    )
    if not held or not wanted:
        return 0, 0
    total, holders = target.universe.size // _pieces(target) * held, source.universe.size // _pieces(source)
    share = -(-total // holders) + (min(held, wanted) if holders > 1 else 0)  # none is given two messages more
    return min(total, max(share, wanted)), wanted


def _pieces(sharding: Sharding) -> int:
    return math.prod(dim.pieces for dim in sharding.dims)


def _interleaved(tensors: Sequence[Carriage]) -> list[TensorPiece]:
    """All pieces, those of tensors on different ranks in turn: then all ranks are busy all the time."""
    groups: dict[tuple[Universe, Universe], list[int]] = {}
    for number, first in enumerate(firsts(tensors)):
        if number == first:
            one = tensors[number]
            groups.setdefault((one.source.universe, one.target.universe), []).append(number)
    placed = []
    for group in groups.values():
        count, at = sum(tensors[number].pieces for number in group), 0
        for number in group:
            for piece in range(tensors[number].pieces):
                placed.append(((2 * at + 1) / (2 * count), number, piece))
                at += 1
    return [TensorPiece(number, piece) for _, number, piece in sorted(placed)]


def firsts(tensors: Sequence[Carriage]) -> list[int]:
    """For each tensor the number of the first that brings the same elements to the same ranks."""
    # Shardings take long to hash, and few tensors begin where another does.
    seen: dict[Any, list[int]] = {}
    found = []
    for at, one in enumerate(tensors):
        others = seen.setdefault((one.source_name, one.link and one.link.offsets), [])
        mine = one.kind, one.dtypes
        same = (at for at in others if (tensors[at].kind, tensors[at].dtypes) == mine)
        found.append(next(same, at))
        others.extend([at] if found[-1] == at else [])
    return found


def part_of(count: int, piece: int, pieces: int) -> tuple[int, int]:
    """The elements of a message that go in one of several pieces.

    >>> [part_of(10, piece, 3) for piece in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return count * piece // pieces, count * (piece + 1) // pieces
