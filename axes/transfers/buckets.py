"""Buckets: which tensors of a transfer go together in one exchange.

A tensor of which some rank has more than a bucket goes in several pieces: piece i of n is that part of every message
about it. Pieces go into a bucket as long as no rank would send or receive more than that. How much it is follows from
bounds that hold for every rank, so that each rank finds the same buckets by itself.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("tp=2")
>>> ends = mesh.sharding("f@tp d"), mesh.sharding("f d@tp")
>>> tensors = [MovedTensor(name, name, (64, 64), *ends, (None, "float32")) for name in "ab"]
>>> found, buckets = bucketed(tensors, 4096)
>>> [one.pieces for one in found], buckets
([2, 2], (((0, 0),), ((0, 1),), ((1, 0),), ((1, 1),)))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from axes import Sharding
from axes.extension import Universe, itemsize_of
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


MOST_BUCKETS = 10_000
"""Buckets are larger than asked where there would be many more: a rank plans and carries out one by one."""


TensorPiece = tuple[int, int]
"""A tensor in a bucket: its number among the tensors, and which of its pieces."""


def bucketed(
    tensors: Iterable[MovedTensor], bucket_bytes: int
) -> tuple[tuple[MovedTensor, ...], tuple[tuple[TensorPiece, ...], ...]]:
    """The tensors, each in as many pieces as it needs; and buckets that no rank fills by more on either side."""
    found = list(tensors)
    most = {kind: _most(*kind) for kind in {one.kind for one in found}}
    wholes = [[count * one.itemsize for count in most[one.kind]] for one in found]
    limit = max(bucket_bytes, sum(map(max, wholes)) // MOST_BUCKETS)
    found = [replace(one, pieces=max(1, -(-max(whole) // limit))) for one, whole in zip(found, wholes, strict=True)]
    some = _some_ranks([end.universe for one in found for end in (one.source, one.target)])
    buckets: list[list[TensorPiece]] = []
    filled: dict[tuple[int, int], int] = {}  # bytes in the last bucket, of each side and rank
    for number, piece in _in_turns(found):
        one, whole = found[number], wholes[number]
        adds = {
            (side, rank): -(-whole[side] // one.pieces)
            for side, end in enumerate((one.source, one.target))
            for rank in some[end.universe]
        }
        if not buckets or any(filled.get(end, 0) + size > limit for end, size in adds.items()):
            buckets.append([])
            filled = {}
        filled.update({end: filled.get(end, 0) + size for end, size in adds.items()})
        buckets[-1].append((number, piece))
    return tuple(found), tuple(map(tuple, buckets))


def _in_turns(tensors: Sequence[MovedTensor]) -> list[TensorPiece]:
    """All pieces, those of tensors on different ranks in turn: then all ranks send all the time."""
    groups: dict[tuple[Universe, Universe], list[TensorPiece]] = {}
    for number, one in enumerate(tensors):
        group = groups.setdefault((one.source.universe, one.target.universe), [])
        group += [(number, piece) for piece in range(one.pieces)]
    placed = [((2 * at + 1) / (2 * len(group)), each) for group in groups.values() for at, each in enumerate(group)]
    return [piece for _, piece in sorted(placed)]


def _some_ranks(universes: Iterable[Universe]) -> dict[Universe, list[int]]:
    """Ranks of each universe of which any other rank is in the same universes as one of them.

    >>> _some_ranks([Universe.of([0, 1, 2]), Universe.of([2]), Universe.of([3])]).values()
    dict_values([[1, 2], [2], [3]])
    """
    within: dict[int, list[Universe]] = {}
    for universe in dict.fromkeys(universes):
        for rank in universe.ranks:
            within.setdefault(rank, []).append(universe)
    found: dict[Universe, list[int]] = {}
    for rank in {tuple(map(id, several)): rank for rank, several in within.items()}.values():
        for universe in within[rank]:
            found.setdefault(universe, []).append(rank)
    return found


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
