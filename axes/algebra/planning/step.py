"""One step of a plan: what an executor needs to carry it out, for any rank.

Everything a step says about boxes, counts and order comes from `exchange(rank)`. Tensors are local,
row-major; "the boxes of a message" are read or written one after the other, each row-major. Boxes are
those of `opened`, the same step on a tensor with one dim for each factor: there a part of a split
factor is one box, which lies in memory as the tile of the rank that has it. What an executor does, by
`kind`:

slice
    No communication. For each `(from_box, to_box)` of `copies`: `out[to_box] = tile[from_box]`. Where
    both have the same factors that is one box.

all_reduce
    `op` over the group, on a copy of the tile. Then divide by `divisor` where that isn't 1 (a mean),
    in the dtype in which the reduction was accumulated.

reduce_scatter
    `sends` holds one message for each rank of the group, itself included, in order: row `i` of the
    send buffer `[group_size, padded]` is message `i`'s boxes, the rest of the row arbitrary. Reduce
    and scatter; the first `receives[0].elements` elements of the result are its boxes of the output.
    Then divide by `divisor`. Where `flat`, the tile itself is the send buffer.

all_gather
    The tile, flattened and padded at its end to `padded`, is gathered to `[group_size, padded]`; from
    row `i` the first `receives[i].elements` elements go to the boxes of `receives[i]` (all ranks, itself
    included). Where `flat`, the output itself is the receive buffer.

all_to_all, permute
    Pack the boxes of `sends` end to end, exchange with `send_counts` and `receive_counts`, unpack into
    the boxes of `receives`; the `copies` stay on the rank. A permute sends to at most one rank and
    receives from at most one, so a pair of point-to-point calls does it, too.

reduce_move
    As all_to_all, but each message received, and the copies, are one contribution: that of its
    `layer`. The output is `op` over the contributions of layers `0..layers-1`, in that order, then
    divided by `divisor`. Every element of the output has exactly one contribution of each layer, which
    may come from several messages; the copies are those of the rank's own `layer`.

Between two sets of ranks, a rank for which `takes_part` is false does nothing in a step; one that has
no tile of the source comes with nothing (`input_shape` is None), one that has none of the target leaves
with nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from axes.algebra.chunks import Tile, tile_shape
from axes.algebra.errors import MeshError
from axes.algebra.layout import Layout
from axes.algebra.planning.boxes import regions, volume
from axes.algebra.planning.exchange import Deal, Exchange, Message
from axes.algebra.planning.form import aligned, sizes_of
from axes.algebra.sharding import ShardedDim, Sharding


@dataclass(frozen=True)
class Step:
    """One local or collective operation, which takes the sharding `source` to the sharding `target`.

    kind: slice, all_reduce, reduce_scatter, all_gather, all_to_all, permute or reduce_move.
    layout: the group, as the digits of the rank that it steps through, in its order; None where the
        group is all ranks of both meshes (between two sets of ranks).
    group_size: the number of ranks that communicate; 1 for a slice.
    op, divisor: of a reduction. resolved: the digits over which a reduce_move reduces.
    bytes_in, bytes_out: over the links, for the rank that has most. What the busiest rank sends is
        what the balance among replicated holders guarantees; it may turn out less.
    send_bytes, receive_bytes: the buffers beside the tiles; 0 where the tile itself is the buffer.
    padded: elements of each part where all parts must be equally large, else 0.
    flat: whether the group's parts end to end are the larger tile as it lies in memory.
    cost: modelled microseconds.
    rank: the rank that the step is seen from.
    """

    kind: str
    source: Sharding
    target: Sharding
    shape: tuple[int, ...]
    layout: Layout | None
    group_size: int
    rank: int
    op: str | None = None
    divisor: int = 1
    resolved: Layout = Layout()  # noqa: RUF009 - layouts are immutable
    bytes_in: int = 0
    bytes_out: int = 0
    send_bytes: int = 0
    receive_bytes: int = 0
    output_bytes: int = 0
    padded: int = 0
    flat: bool = False
    cost: float = 0.0
    ranks_per_node: int = 8

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes that the group steps through; none between two sets of ranks."""
        return () if self.layout is None else tuple(map(str, self.source.mesh.calls(self.layout.modes)))

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks of this rank's group, in its order."""
        return self.ranks_of(self.rank)

    def ranks_of(self, rank: int) -> Sequence[int]:
        """The global ranks of another rank's group, in its order; none where it takes no part."""
        if not self.takes_part(rank):
            return ()
        if self.layout is not None:
            return self.source.universe.line(self.layout, rank)
        sources = self.source.universe.ranks
        targets = self.target.universe.ranks
        has = sources if isinstance(sources, range) else frozenset(sources)
        return [*sources, *(other for other in targets if other not in has)]

    def takes_part(self, rank: int) -> bool:
        """Whether a rank does anything in this step."""
        one, two = self.source.mesh.universe, self.target.mesh.universe
        return one.position(rank) is not None or two.position(rank) is not None

    def input_shape(self, rank: int | None = None) -> tuple[int, ...] | None:
        """The shape of the tile that a rank comes with, or None where it has none."""
        return _shape(self.source.tile(self.shape, self._rank(rank)))

    def output_shape(self, rank: int | None = None) -> tuple[int, ...] | None:
        """The shape of the tile that a rank leaves with, or None where it has none."""
        return _shape(self.target.tile(self.shape, self._rank(rank)))

    @cached_property
    def is_even(self) -> bool:
        """Whether the tiles of all ranks have one shape, before the step and after."""
        return self.source.divides(self.shape) and self.target.divides(self.shape)

    @cached_property
    def factors(self) -> tuple[tuple[int, ...], ...]:
        """For each dim the sizes of the factors that both sides have, or its own size alone."""
        pairs = zip(self.source.dims, self.target.dims, self.shape, strict=True)
        return tuple(_common_factors(one, two) or (size,) for one, two, size in pairs)

    @cached_property
    def opened(self) -> Step:
        """The same step on the tensor with one dim for each of `factors`."""
        if all(len(sizes) == 1 for sizes in self.factors):
            return self
        source, target = _opened(self.source, self.target, self.factors)
        shape = tuple(size for sizes in self.factors for size in sizes)
        return replace(self, source=source, target=target, shape=shape)

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """Into how many parts each dim of `opened` is cut on both sides together; 0 where factors of one side are."""
        pairs = zip(self.opened.source.dims, self.opened.target.dims, strict=True)
        return tuple(_pieces(one, two) for one, two in pairs)

    @cached_property
    def unit(self) -> tuple[int, ...]:
        """The smallest shape at which `opened` is the same step but for its sizes.

        A dim that doesn't divide into its parts has its own size. At other multiples of the unit every box
        is multiplied.
        """
        found = zip(self.opened.shape, self.pieces, strict=True)
        return tuple(size if not parts or size % parts else min(size, parts) for size, parts in found)

    def exchange(self, rank: int | None = None) -> Exchange:
        """What a rank sends, receives and copies, in boxes of `opened`; this rank by default.

        Costs O(size of the group), and more where tiles are replicated: an executor keeps the answer.
        Raises `MeshError` for a rank that takes no part.
        """
        rank = self._rank(rank)
        if not self.takes_part(rank):
            raise MeshError(f"rank {rank} takes no part in this step")
        shape = self.opened.shape
        if any(size == 0 or not parts or size % parts for size, parts in zip(shape, self.pieces, strict=True)):
            return _exchange(self.opened, rank)  # uneven tiles are dealt out by their own sizes
        return self.exchange_at_unit(rank).times([size // unit for size, unit in zip(shape, self.unit, strict=True)])

    def exchange_at_unit(self, rank: int) -> Exchange:
        """`exchange` for a tensor of the shape `unit`, found once for all multiples of it."""
        step, unit = self.opened, self.unit
        return _kept_exchange(
            step.kind, step.source, step.target, unit, step.layout, step.resolved, step.ranks_per_node, rank
        )

    def _rank(self, rank: int | None) -> int:
        return self.rank if rank is None else rank


def _pieces(one: ShardedDim, two: ShardedDim) -> int:
    """Into how many equal parts two splits cut a dim together; 0 where factors of it are split."""
    return math.lcm(one.pieces, two.pieces) if len(one.factors) == len(two.factors) == 1 else 0


def _exchange(step: Step, rank: int) -> Exchange:
    """What a rank does in a step whose dims aren't factored further."""
    if step.kind == "slice":
        return _slice(step, rank)
    ranks = tuple(step.ranks_of(rank))
    if step.kind == "all_reduce":
        return Exchange(ranks)
    if step.kind == "reduce_scatter":
        return _reduce_scatter(step, ranks, rank)
    if step.kind == "all_gather":
        return _all_gather(step, ranks, rank)
    sides = step.source, step.target, step.shape
    return deal_of(*sides, step.layout, ranks[0], step.resolved, step.ranks_per_node).exchange(rank)


@lru_cache(maxsize=4096)
def _kept_exchange(
    kind: str,
    source: Sharding,
    target: Sharding,
    shape: tuple[int, ...],
    layout: Layout | None,
    resolved: Layout,
    ranks_per_node: int,
    rank: int,
) -> Exchange:
    """What a rank does in a step on a tensor of some unit's shape."""
    step = Step(kind, source, target, shape, layout, 0, rank, resolved=resolved, ranks_per_node=ranks_per_node)
    return _exchange(step, rank)


def _common_factors(one: ShardedDim, two: ShardedDim) -> tuple[int, ...] | None:
    """The sizes of the factors of a dim, where they are the same on both sides; None without factors."""
    found = aligned(one, two)
    return None if found is None else sizes_of(found[0])


def _opened(source: Sharding, target: Sharding, factors: Sequence[Sequence[int]]) -> tuple[Sharding, Sharding]:
    """Both as shardings of the tensor that has a dim for each factor."""
    sides: tuple[list[ShardedDim], list[ShardedDim]] = ([], [])
    for one, two, sizes in zip(source.dims, target.dims, factors, strict=True):
        pair = aligned(one, two) if len(sizes) > 1 else None
        for side, dim in zip(sides, pair or (one, two), strict=True):
            parts = [ShardedDim((replace(factor, size=None),)) for factor in dim.factors]
            side.extend(parts if pair is not None else (dim,))
    return replace(source, dims=tuple(sides[0])), replace(target, dims=tuple(sides[1]))


def _shape(held: Tile | None) -> tuple[int, ...] | None:
    return None if held is None else tile_shape(held)


def _tile(sharding: Sharding, shape: tuple[int, ...], rank: int) -> Tile:
    found = sharding.tile(shape, rank)
    assert found is not None, "every rank of a step's group is of its mesh"
    return found


def _whole(held: Tile) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in tile_shape(held))


def _slice(step: Step, rank: int) -> Exchange:
    source, target = (end.tile(step.shape, rank) for end in (step.source, step.target))
    if source is None or target is None or not volume(target):
        return Exchange((rank,))
    return Exchange((rank,), copies=tuple(zip(regions(target, source), regions(target, target), strict=True)))


def _all_gather(step: Step, ranks: tuple[int, ...], rank: int) -> Exchange:
    mine = _tile(step.source, step.shape, rank)
    whole = _tile(step.target, step.shape, rank)
    parts = [_tile(step.source, step.shape, peer) for peer in ranks]
    receives = tuple(_part(peer, part, whole) for peer, part in enumerate(parts))
    sends = (Message(ranks.index(rank), (_whole(mine),), volume(mine)),)
    return Exchange(ranks, sends, receives, padded=step.source.largest_tile(step.shape))


def _reduce_scatter(step: Step, ranks: tuple[int, ...], rank: int) -> Exchange:
    mine = _tile(step.target, step.shape, rank)
    whole = _tile(step.source, step.shape, rank)
    parts = [_tile(step.target, step.shape, peer) for peer in ranks]
    sends = tuple(_part(peer, part, whole) for peer, part in enumerate(parts))
    receives = (Message(ranks.index(rank), (_whole(mine),), volume(mine)),)
    padded = step.target.largest_tile(step.shape)
    return Exchange(ranks, sends, receives, layers=len(ranks), padded=padded)


def _part(peer: int, part: Tile, whole: Tile) -> Message:
    size = volume(part)
    return Message(peer, regions(part, whole) if size else (), size)


@lru_cache(maxsize=64)
def deal_of(
    source: Sharding,
    target: Sharding,
    shape: tuple[int, ...],
    members: Layout | None,
    rank: int,
    resolved: Layout,
    ranks_per_node: int,
) -> Deal:
    """Who sends what in a group. `rank` is its first, so that its ranks have one answer in common."""
    return Deal(source, target, shape, members, rank, resolved, ranks_per_node)
