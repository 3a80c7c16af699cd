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
    Then divide by `divisor`. Where `send_bytes` is 0, the tile itself is the send buffer.

all_gather
    The tile, flattened and padded at its end to `padded`, is gathered to `[group_size, padded]`; from
    row `i` the first `receives[i].elements` elements go to the boxes of `receives[i]` (all ranks, itself
    included). Where `receive_bytes` is 0, the output itself is the receive buffer.

all_to_all, permute
    Pack the boxes of `sends` end to end, exchange, unpack into the boxes of `receives`; the `copies` stay on
    the rank. A permute sends to at most one rank and receives from at most one.

reduce_move
    As all_to_all, but each message received, and the copies, are one contribution: that of its
    `layer`. The output is `op` over the contributions of layers `0..layers-1`, in that order, then
    divided by `divisor`. Every element of the output has exactly one contribution of each layer, which
    may come from several messages; the copies are those of the rank's own `layer`.

Between two sets of ranks, a rank for which `takes_part` is false does nothing in a step; one that has
no tile of the source comes with nothing, one that has none of the target leaves with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from axes.algebra.chunks import regions, volume
from axes.algebra.errors import MeshError
from axes.algebra.layout import Layout
from axes.algebra.planning.digits import opened
from axes.algebra.planning.exchange import Exchange, Message, group_between, ranks_of_both
from axes.algebra.sharding import Sharding

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One local or collective operation, which takes the sharding `source` to the sharding `target`.

    kind: slice, all_reduce, reduce_scatter, all_gather, all_to_all, permute or reduce_move.
    layout: the group, as the digits of the rank that it steps through, in its order; None where the
        group is all ranks of both meshes (between two sets of ranks).
    group_size: the number of ranks that communicate; 1 for a slice.
    op, divisor: of a reduction. resolved: the digits over which a reduce_move reduces.
    bytes_in, bytes_out: over the links, for the rank that has most. What the busiest rank sends is an
        even share of those that have the same; whole messages may make it less, or slightly more.
    send_bytes, receive_bytes: the buffers beside the tiles; 0 where the tile itself is the buffer.
    cost: modelled microseconds.
    rank: the rank that the step is seen from.
    """

    kind: str
    source: Sharding
    target: Sharding
    shape: Shape
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
    cost: float = 0.0
    ranks_per_node: int = 8

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes that the group steps through; none between two sets of ranks."""
        return () if self.layout is None else self.source.mesh.calls(self.layout)

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
        return ranks_of_both(self.source.universe, self.target.universe)

    def takes_part(self, rank: int) -> bool:
        """Whether a rank does anything in this step."""
        return any(end.universe.position(rank) is not None for end in (self.source, self.target))

    @cached_property
    def is_even(self) -> bool:
        """Whether the tiles of all ranks have one shape, before the step and after."""
        return self.source.divides(self.shape) and self.target.divides(self.shape)

    @cached_property
    def _opened(self) -> tuple[tuple[Shape, ...], Sharding, Sharding]:
        return opened(self.source, self.target, self.shape)

    @property
    def factors(self) -> tuple[Shape, ...]:
        """For each dim the sizes of the factors that both sides have, or its own size alone."""
        return self._opened[0]

    @cached_property
    def opened(self) -> Step:
        """The same step on the tensor with one dim for each of `factors`."""
        factors, source, target = self._opened
        if source is self.source:
            return self
        return replace(self, source=source, target=target, shape=tuple([n for sizes in factors for n in sizes]))

    def exchange(self, rank: int | None = None) -> Exchange:
        """What a rank sends, receives and copies, in boxes of `opened`; this rank by default.

        Costs O(size of the group), and more where tiles are replicated: an executor keeps the answer.
        Raises `MeshError` for a rank that takes no part.
        """
        rank = self.rank if rank is None else rank
        if not self.takes_part(rank):
            raise MeshError(f"rank {rank} takes no part in this step")
        step = self.opened
        if step.kind == "slice":
            return _slice(step, rank)
        ranks = tuple(step.ranks_of(rank))
        if step.kind == "all_reduce":
            return Exchange(ranks)
        if step.kind in ("reduce_scatter", "all_gather"):
            return _equal_parts(step, ranks, rank)
        sides = step.source, step.target, step.shape
        return group_between(*sides, step.layout, ranks[0], step.resolved, step.ranks_per_node).exchange(rank)


def _slice(step: Step, rank: int) -> Exchange:
    source, target = (end.tile(step.shape, rank) for end in (step.source, step.target))
    if source is None or target is None or not volume(target):
        return Exchange((rank,))
    return Exchange((rank,), copies=tuple(zip(regions(target, source), regions(target, target), strict=True)))


def _equal_parts(step: Step, ranks: tuple[int, ...], rank: int) -> Exchange:
    """A gather, or a reduction that is scattered: the rank's own tile, and its peers' parts of the larger one."""
    gathers, at = step.kind == "all_gather", ranks.index(rank)
    fine, coarse = (step.source, step.target) if gathers else (step.target, step.source)
    whole = coarse.tile(step.shape, rank) or ()
    parts = [fine.tile(step.shape, peer) or () for peer in ranks]
    boxes = [regions(part, whole) if volume(part) else () for part in parts]
    messages = tuple(map(Message, range(len(ranks)), boxes, map(volume, parts)))
    own, padded = (messages[at]._replace(regions=regions(parts[at], parts[at])),), fine.largest_tile(step.shape)
    if gathers:
        return Exchange(ranks, own, messages, padded=padded)
    return Exchange(ranks, messages, own, layers=len(ranks), padded=padded)
