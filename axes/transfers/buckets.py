"""Buckets: which tensors of a transfer go together in one exchange.

A tensor of which some rank has more than a bucket goes in several pieces: piece i of n is that part of every message
about it. Each piece goes into the first bucket from the last of its ranks' on in which no rank would send or receive
more than a bucket. How much that is follows from bounds that hold for every rank, so that each rank finds the same
buckets by itself.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("tp=2")
>>> ends = mesh.sharding("f@tp d"), mesh.sharding("f d@tp")
>>> tensors = [MovedTensor(name, name, (64, 64), *ends, (None, "float32")) for name in "ab"]
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
from typing import Any, NamedTuple

from axes.algebra.layout import Universe
from axes.algebra.plan import itemsize_of
from axes.algebra.sharding import Sharding
from axes.transfers.layout_pieces import LayoutPiece

TensorKind = tuple[Sharding, Sharding, tuple[int, ...], LayoutPiece | None]
"""Source, target, shape and part: what an exchange follows from. Many tensors of a model have it in common."""


@dataclass(frozen=True)
class MovedTensor:
    """One tensor of a transfer, or a part of one that is a part of another: where it comes from, and where it goes.

    shape: of the tensor; of a part its extents. source, target: shardings whose meshes are just the ranks that have the
    tensor. dtypes: at the source, None where that isn't known; and in which it travels and arrives.
    part: which part of the source it is, and of the target; None where it is all of both. pieces: in how many it goes.
    """

    source_name: str
    target_name: str
    shape: tuple[int, ...]
    source: Sharding
    target: Sharding
    dtypes: tuple[str | None, str | None]
    part: LayoutPiece | None = None
    pieces: int = 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The whole shapes of both tensors."""
        return (self.shape, self.shape) if self.part is None else self.part.shapes

    @property
    def inverse(self) -> MovedTensor:
        """The way back."""
        part = None if self.part is None else self.part.inverse
        names, shape = (self.target_name, self.source_name), self.shape if part is None else part.extents
        dtypes = self.dtypes[1] or self.dtypes[0], self.dtypes[0] or self.dtypes[1]
        return MovedTensor(*names, shape, self.target, self.source, dtypes, part)

    @property
    def itemsize(self) -> int:
        """Bytes of an element on its way; it is float32 where that isn't known."""
        return itemsize_of(self.dtypes[1] or self.dtypes[0] or "float32")

    @cached_property
    def kind(self) -> TensorKind:
        """What its exchange follows from."""
        ends = self.source, self.target
        if self.part is None:
            return *ends, self.shape, None
        # Where a part begins along a dim that isn't split is the same to all ranks: experts of a stack are of one kind.
        begins = [
            tuple([at if dim.pieces > 1 else 0 for dim, at in zip(end.dims, offset, strict=True)])
            for end, offset in zip(ends, self.part.offsets, strict=True)
        ]
        return *ends, self.shape, replace(self.part, offsets=(begins[0], begins[1]))


class TensorPiece(NamedTuple):
    """A tensor in a bucket: its number among the tensors, and which of its pieces."""

    tensor: int
    piece: int


def bucketed(
    tensors: Iterable[MovedTensor], bucket_bytes: int
) -> tuple[tuple[MovedTensor, ...], tuple[tuple[TensorPiece, ...], ...]]:
    """The tensors, each in as many pieces as it needs; and buckets that no rank fills by more on either side."""
    most = functools.lru_cache(maxsize=4096)(_most)
    found, sizes = [], []
    for one in tensors:
        whole = [count * one.itemsize for count in most(*one.kind)]
        pieces = max(1, -(-max(whole) // bucket_bytes))
        found.append(one if one.pieces == pieces else replace(one, pieces=pieces))
        sizes.append([-(-size // pieces) for size in whole])
    # Of ranks that are in the same universes of a side: the last bucket with a piece of theirs, and how full it is.
    filled: dict[tuple[int, int], tuple[int, int]] = {}
    buckets: list[list[TensorPiece]] = []
    parts = _parts(one.source.universe for one in found), _parts(one.target.universe for one in found)
    for piece in _interleaved(found):
        one, size = found[piece.tensor], sizes[piece.tensor]
        ends = [(0, part) for part in parts[0][one.source.universe]]
        ends += [(1, part) for part in parts[1][one.target.universe]]
        last = [filled.get(end, (0, 0)) for end in ends]
        at = max([bucket for bucket, _ in last])
        loads = [(full if bucket == at else 0) + size[end[0]] for end, (bucket, full) in zip(ends, last, strict=True)]
        if max(loads) > bucket_bytes:
            at, loads = at + 1, [size[side] for side, _ in ends]
        filled.update({end: (at, load) for end, load in zip(ends, loads, strict=True)})
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


def _most(source: Sharding, target: Sharding, shape: tuple[int, ...], part: LayoutPiece | None) -> tuple[int, int]:
    """The most elements that any rank sends of a tensor, and that any receives: bounds, without a look at ranks."""
    held, wanted = (
        min(math.prod(shape), end.largest_tile(shape) if part is None else part.largest(side, end))
        for side, end in enumerate((source, target))
    )
    if not held or not wanted:
        return 0, 0
    copies = [end.universe.size // math.prod([dim.pieces for dim in end.dims]) for end in (source, target)]
    total, holders = copies[1] * held, copies[0]
    share = -(-total // holders) + (min(held, wanted) if holders > 1 else 0)  # none is given two messages more
    return min(total, max(share, wanted)), wanted


def _interleaved(tensors: Sequence[MovedTensor]) -> list[TensorPiece]:
    """All pieces, those of tensors on different ranks in turn: then all ranks are busy all the time."""
    groups: dict[tuple[Universe, Universe], list[TensorPiece]] = {}
    for number, first in enumerate(firsts(tensors)):
        if number == first:
            group = groups.setdefault((tensors[number].source.universe, tensors[number].target.universe), [])
            group += [TensorPiece(number, piece) for piece in range(tensors[number].pieces)]
    placed = [((2 * at + 1) / (2 * len(group)), each) for group in groups.values() for at, each in enumerate(group)]
    return [piece for _, piece in sorted(placed)]


def firsts(tensors: Sequence[MovedTensor]) -> list[int]:
    """For each tensor the number of the first that brings the same elements to the same ranks."""
    # Shardings take long to hash, and few tensors begin where another does.
    seen: dict[Any, list[int]] = {}
    found = []
    for at, one in enumerate(tensors):
        others = seen.setdefault((one.source_name, one.part and one.part.offsets), [])
        same = [at for at in others if (tensors[at].kind, tensors[at].dtypes) == (one.kind, one.dtypes)]
        found.append(same[0] if same else at)
        others.append(found[-1])
    return found
