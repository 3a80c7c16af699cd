"""Who sends which box to whom: the one part of a plan that looks at ranks, group by group.

Every rank of a group holds a tile and wants a tile. What it wants and has, it copies. What it wants
and hasn't comes from a rank that holds it. Where several do, they share what is wanted of their tile
evenly: each serves its own node first, and then the ranks that are near it. A request that would make a
holder send more than the rank that receives most receives is cut: so the most that any rank sends is at
most the most that any receives, whenever that can be (a holder of more than its share of an uneven
dim has to send it).

Along each dim a side is cut into pieces by some digits of the position. So which tiles meet, and who has
them, follows dim by dim, and what one rank sends and receives is found without a look at the others.
Every rank derives the same answer.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2 tp=2")
>>> source, target = mesh.sharding("s@tp"), mesh.sharding("s")
>>> deal = Deal(source, target, (4,), mesh.axis("tp").layout, 0)
>>> deal.exchange(0).receives, deal.exchange(1).send_counts
((Message(peer=1, regions=(((2, 4),),), elements=2, layer=0),), (2, 0))
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, product, repeat
from operator import mul, sub
from typing import NamedTuple

from axes.algebra.chunks import Tile, count
from axes.algebra.layout import Layout
from axes.algebra.planning.boxes import (
    Region,
    between,
    intersection,
    local_runs,
    regions,
    shared_runs,
    volume,
)
from axes.algebra.planning.pieces import NO_DIGITS, Numbers, Pieces, TileGrid, coordinates, overlaps, same_factors
from axes.algebra.sharding import Sharding
from axes.algebra.universe import Universe


class Message(NamedTuple):
    """Boxes of a local tensor that go to or come from one rank, in the order of the message.

    peer: index in the group. regions: boxes of the local tensor, each read or written row-major.
    elements: how many that are. layer: the pending coordinate that a contribution to a reduction is of.
    """

    peer: int
    regions: tuple[Region, ...]
    elements: int
    layer: int = 0


Dealt = tuple[tuple[Message, ...], tuple[Message, ...], tuple[tuple[Region, Region], ...]]
"""What a rank sends, what it receives, and what it copies: a box of its tile and one of its new tile."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank does in one step.

    ranks: the group, in its order.
    sends: boxes of the source tile. receives: boxes of the target tile. Both by peer, ascending.
    copies: `(box of the source tile, box of the target tile)` that stay on the rank.
    layer: the pending coordinate of the copies. layers: how many contributions there are.
    padded: elements of each part where all must be equally large, else 0.
    """

    ranks: tuple[int, ...]
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    copies: tuple[tuple[Region, Region], ...] = ()
    layer: int = 0
    layers: int = 1
    padded: int = 0

    def times(self, multiples: Sequence[int]) -> Exchange:
        """The same where every size is a multiple of what it is here: every box is.

        >>> part = Message(1, (((0, 1), (0, 2)),), 2)
        >>> Exchange((0, 1), (part,)).times((3, 2)).sends
        (Message(peer=1, regions=(((0, 3), (0, 4)),), elements=12, layer=0),)
        """
        more = math.prod(multiples)
        if more == 1:
            return self

        def box(region: Region) -> Region:
            return tuple([(bounds[0] * m, bounds[1] * m) for bounds, m in zip(region, multiples, strict=True)])

        def scaled(messages: tuple[Message, ...]) -> tuple[Message, ...]:
            return tuple([Message(t.peer, tuple(map(box, t.regions)), t.elements * more, t.layer) for t in messages])

        copies = tuple((box(source), box(target)) for source, target in self.copies)
        sends, receives = scaled(self.sends), scaled(self.receives)
        return Exchange(self.ranks, sends, receives, copies, self.layer, self.layers, self.padded * more)

    def in_boxes(self, boxes: Callable[[Region], Iterable[Region]]) -> Exchange:
        """The same with each box as several, in order."""

        def taken(messages: tuple[Message, ...]) -> tuple[Message, ...]:
            return tuple(
                m._replace(regions=tuple([each for box in m.regions for each in boxes(box)])) for m in messages
            )

        copies = [pair for source, target in self.copies for pair in zip(boxes(source), boxes(target), strict=True)]
        return replace(self, sends=taken(self.sends), receives=taken(self.receives), copies=tuple(copies))

    @property
    def send_counts(self) -> tuple[int, ...]:
        """Elements for each rank of the group."""
        return _counts(self.sends, len(self.ranks))

    @property
    def receive_counts(self) -> tuple[int, ...]:
        """Elements from each rank of the group."""
        return _counts(self.receives, len(self.ranks))


def _peer(message: Message) -> int:
    return message.peer


def _counts(messages: Iterable[Message], size: int) -> tuple[int, ...]:
    found = [0] * size
    for message in messages:
        found[message.peer] = message.elements
    return tuple(found)


# --- who sends ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Receivers:
    """Who wants parts of a tile, ascending, each with the elements of its part in multiples of `scale`.

    ends: how much is wanted by all up to and including each.
    """

    ranks: Sequence[int]
    ends: Sequence[int]


@dataclass(frozen=True)
class Balance:
    """How evenly holders share: what a holder may send at most, and whether it may be more than an even share.

    most: elements that a holder may always send. slack: how many times its even share it may send.
    """

    most: int = 0
    slack: float = 1.0

    def limit(self, total: int, holders: int) -> int:
        """What one of several holders may send of what is wanted of them in all."""
        return max(self.most, int(total * self.slack) // holders, -(-total // holders))


class Shares:
    """Which of a tile's holders sends what to whom.

    What is wanted is a line, receiver by receiver in the order of their ranks; it is cut into one share for each
    holder. A holder serves its own node first, as far as its share goes; what is left goes along the line to what is
    left of the shares, so that ranks near each other meet. Holders get nothing from each other.

    >>> shares = Shares([0, 8], Receivers(range(1, 5), range(1, 5)), 6, Balance(most=6), ranks_per_node=4)
    >>> [(rank, shares.received(rank)) for rank in (1, 2, 3, 4)]
    [(1, [(0, 0, 6)]), (2, [(0, 0, 6)]), (3, [(8, 0, 6)]), (4, [(8, 0, 6)])]
    """

    def __init__(self, holders: list[int], receivers: Receivers, scale: int, balance: Balance, ranks_per_node: int):
        self.receivers, self.scale = receivers, scale
        wanting = receivers.ranks
        places = ((bisect_left(wanting, holder), holder) for holder in holders)
        self.left_out = [at for at, holder in places if at < len(wanting) and wanting[at] == holder]
        weights = [self._weight(at) for at in self.left_out]
        self.before = [0, *accumulate(weights)]
        count, total = len(wanting), self._place(len(wanting))
        even = isinstance(receivers.ends, range)
        whole = -(-(count - len(self.left_out)) // len(holders)) * scale if even else 0
        self.unit = scale if even and whole <= balance.limit(total, len(holders)) else 1
        self.starts: list[int] = []
        self.senders: list[int] = []
        if total:
            self._share(holders, total // self.unit, ranks_per_node)

    def _weight(self, at: int) -> int:
        ends = self.receivers.ends
        return (ends[at] - (ends[at - 1] if at else 0)) * self.scale

    def _place(self, at: int) -> int:
        """Where on the line the part of a receiver begins."""
        ends = self.receivers.ends
        return (ends[at - 1] * self.scale if at else 0) - self.before[bisect_left(self.left_out, at)]

    def _share(self, holders: list[int], total: int, ranks_per_node: int) -> None:
        nodes = {node: list(some) for node, some in groupby(holders, lambda holder: holder // ranks_per_node)}
        wanting = self.receivers.ranks
        bounds = {
            node: tuple(
                self._place(bisect_left(wanting, each * ranks_per_node)) // self.unit for each in (node, node + 1)
            )
            for node in nodes
        }
        shares = self._sizes(nodes, bounds, total, len(holders))
        at, left = 0, []
        rests: list[tuple[int, int]] = []
        for node, members in nodes.items():
            start, stop = bounds[node]
            rests.append((at, start))
            first = start
            sizes = [shares[member] for member in members]
            local = min(stop - start, sum(sizes))
            for number, member in enumerate(members):
                # What is wanted within the node is spread evenly over its members.
                now = min(sizes[number], (local - (start - first)) // (len(members) - number))
                now = max(now, local - (start - first) - sum(sizes[number + 1 :]))
                self._put(start, now, member)
                start += now
                if sizes[number] > now:
                    left.append((member, sizes[number] - now))
            at = stop
            rests.append((start, stop))
        rests.append((at, total))
        self._spread(rests, left)
        order = sorted(range(len(self.starts)), key=self.starts.__getitem__)
        self.starts = [self.starts[each] for each in order]
        self.senders = [self.senders[each] for each in order]

    def _sizes(
        self, nodes: dict[int, list[int]], bounds: dict[int, tuple[int, ...]], total: int, holders: int
    ) -> dict[int, int]:
        """What each holder sends: an even share; what doesn't divide goes to the nodes that want it, then apart."""
        share, over = divmod(total, holders)
        sizes = {member: share for members in nodes.values() for member in members}
        spare: list[int] = []
        for node, members in nodes.items():
            start, stop = bounds[node]
            more = max(0, min(over, len(members), stop - start - share * len(members)))
            over -= more
            sizes.update(dict.fromkeys(members[:more], share + 1))
            spare.extend(members[more:])
        for number in range(over):
            sizes[spare[number * len(spare) // over]] = share + 1
        return sizes

    def _spread(self, rests: Iterable[tuple[int, int]], left: list[tuple[int, int]]) -> None:
        """Give what nodes don't serve themselves to the holders with something left, both in their order."""
        senders = iter(left)
        holder, room = 0, 0
        for start, stop in rests:
            while start < stop:
                if not room:
                    holder, room = next(senders)
                now = min(room, stop - start)
                self._put(start, now, holder)
                start, room = start + now, room - now

    def _put(self, start: int, size: int, holder: int) -> None:
        if size:
            self.starts.append(start * self.unit)
            self.senders.append(holder)

    def received(self, rank: int) -> list[tuple[int, int, int]]:
        """`(holder, start, stop)` of what a receiver gets, in elements of its part."""
        at = bisect_left(self.receivers.ranks, rank)
        start, stop = self._place(at), self._place(at + 1)
        found = []
        number = bisect_right(self.starts, start) - 1
        while number < len(self.starts) and self.starts[number] < stop:
            until = self.starts[number + 1] if number + 1 < len(self.starts) else stop
            found.append((self.senders[number], max(self.starts[number], start) - start, min(until, stop) - start))
            number += 1
        return found

    def loads(self) -> Iterator[tuple[int, int]]:
        """`(holder, elements)` of each stretch of the line."""
        ends = [*self.starts[1:], self._place(len(self.receivers.ranks))]
        return ((holder, stop - start) for holder, start, stop in zip(self.senders, self.starts, ends, strict=False))

    def sent(self, holder: int) -> list[tuple[int, int, int]]:
        """`(receiver, start, stop)` of what a holder sends, in elements of the receiver's part."""
        found = []
        every = range(len(self.receivers.ranks))
        total = self._place(len(every))
        for number, sender in enumerate(self.senders):
            if sender != holder:
                continue
            start = self.starts[number]
            stop = self.starts[number + 1] if number + 1 < len(self.starts) else total
            at = bisect_right(every, start, key=self._place) - 1
            while at < len(every) and self._place(at) < stop:
                first, last = self._place(at), self._place(at + 1)
                if max(first, start) < min(last, stop):
                    found.append((self.receivers.ranks[at], max(first, start) - first, min(last, stop) - first))
                at += 1
        return found


@lru_cache(maxsize=16)
def _ranks_of_both(source: Universe, target: Universe) -> tuple[int, ...]:
    """The ranks of two universes, those of the source first."""
    one, two = source.ranks, target.ranks
    if isinstance(one, range) and isinstance(two, range) and (one[-1] < two[0] or two[-1] < one[0]):
        return (*one, *two)
    has = one if isinstance(one, range) else frozenset(one)
    return (*one, *[rank for rank in two if rank not in has])


@dataclass(frozen=True, eq=False)
class Deal:
    """Who sends what to whom in a group, between two shardings; of any rank without a look at all others.

    source, target: what is held and what is wanted. members: the digits of the position that the group steps
    through; None where all ranks of both sides communicate. rank: one of the group.
    resolved: digits over which a reduction is pending within the group: what is wanted is then wanted once from each
        of these layers. fixed: how evenly holders share, where not as plans do.
    """

    source: Sharding
    target: Sharding
    shape: tuple[int, ...]
    members: Layout | None
    rank: int
    resolved: Layout = NO_DIGITS
    ranks_per_node: int = 8
    fixed: Balance | None = None
    knots: tuple[tuple[Pieces, ...], tuple[Pieces, ...]] | None = None
    in_tiles: bool = True

    @cached_property
    def held(self) -> TileGrid:
        """What the ranks of the group have."""
        return self._grid(0, self.resolved)

    @cached_property
    def wanted(self) -> TileGrid:
        """What they get."""
        return self._grid(1, NO_DIGITS)

    def _grid(self, side: int, layers: Layout) -> TileGrid:
        sharding = (self.source, self.target)[side]
        universe, dims = sharding.universe, None if self.knots is None else self.knots[side]
        if dims is None:
            dims = tuple(map(Pieces, sharding.dims, sharding.extents(self.shape)))
        if self.members is None:
            return TileGrid(universe, dims, Layout((universe.size,), (1,)), 0, layers)
        origin = universe.position(self.rank)
        assert origin is not None, "a group that steps through digits is of the ranks of both sides"
        return TileGrid(universe, dims, self.members, origin, layers)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The group, in its order."""
        if self.members is not None:
            return tuple(self.source.universe.line(self.members, self.rank))
        return _ranks_of_both(self.source.universe, self.target.universe)

    @cached_property
    def peers(self) -> dict[int, int]:
        """The index of each rank in the group."""
        return {rank: index for index, rank in enumerate(self.ranks)}

    @property
    def depth(self) -> int:
        """The number of layers."""
        return self.resolved.size

    def holding(self, rank: int) -> tuple[int, Numbers] | None:
        """The layer and the tile that a rank has; None where that is nothing."""
        position = self.source.universe.position(rank)
        if position is None:
            return None
        numbers = self.held.numbers(position)
        return (self.resolved.coordinate(position), numbers) if volume(self.held.tile(numbers)) else None

    def wanting(self, rank: int) -> Numbers | None:
        """The tile that a rank wants; None where that is nothing."""
        position = self.target.universe.position(rank)
        if position is None:
            return None
        numbers = self.wanted.numbers(position)
        return numbers if volume(self.wanted.tile(numbers)) else None

    # totals, for all ranks at once

    @cached_property
    def _both(self) -> Sequence[int]:
        """The ranks that are on both sides."""
        one, two = self.source.universe.ranks, self.target.universe.ranks
        if self.members is not None:
            return self.ranks
        if isinstance(one, range) and isinstance(two, range) and (one[-1] < two[0] or two[-1] < one[0]):
            return ()
        has = one if isinstance(one, range) else frozenset(one)
        return [rank for rank in two if rank in has]

    @cached_property
    def _common(self) -> tuple[list[tuple[int, ...]], list[int], list[int], list[int]]:
        """For each rank on both sides: layer and numbers of its tile, how much it has, how much it wants, both."""
        sides = []
        for grid in (self.held, self.wanted):
            positions = grid.universe.positions(self._both)
            layouts = (grid.layers, *(pieces.layout for pieces in grid.dims))
            sides.append([coordinates(layout, positions) for layout in layouts])
        has = wants = shared = [1] * len(self._both)
        for one, two, mine, theirs in zip(self.held.dims, self.wanted.dims, sides[0][1:], sides[1][1:], strict=True):
            has = list(map(mul, has, map(one.sizes.__getitem__, mine)))
            wants = list(map(mul, wants, map(two.sizes.__getitem__, theirs)))
            shared = list(map(mul, shared, overlaps(one, two, mine, theirs)))
        return list(zip(*sides[0], strict=True)), has, wants, shared

    @cached_property
    def most_received(self) -> int:
        """The most that a rank receives, in elements: what it wants less what it has."""
        if not self._both:
            return self.depth * self.target.largest_tile(self.shape)
        return max((count for _, count in self.all_received()), default=0)

    @cached_property
    def most_sent(self) -> int:
        """The most that a rank may have to send, in elements: what is wanted of each tile over its holders.

        Every element is wanted equally often, from each layer, as the target's tiles don't overlap.
        """
        tiles, has, _, shared = self._common
        copies = self.wanted.copies
        totals = {tile: copies * size for tile, size in zip(tiles, has, strict=True)}
        for tile, common in zip(tiles, shared, strict=True):
            totals[tile] -= common
        most = self._limit(max(totals.values(), default=0))
        if len(self._both) < self.source.universe.size and self.members is None:
            most = max(most, self._limit(copies * self.source.largest_tile(self.shape)))
        return most

    def _limit(self, total: int) -> int:
        return total if self.held.copies == 1 else self.balance.limit(total, self.held.copies)

    @cached_property
    def balance(self) -> Balance:
        """How evenly ranks that have the same share what they send: by default none sends more than one receives."""
        if self.fixed is not None:
            return self.fixed
        return Balance(self.most_received) if self.held.copies > 1 else Balance()

    def all_received(self) -> list[tuple[int, int]]:
        """How many elements each rank receives that wants any."""
        _, _, wants, shared = self._common
        found = list(zip(self._both, map(sub, map(mul, wants, repeat(self.depth)), shared), strict=True))
        if self.members is None and len(found) < self.target.universe.size:
            has = {*self._both}
            outside = [rank for rank in self.target.universe.ranks if rank not in has]
            counts = [self.depth] * len(outside)
            positions = self.target.universe.positions(outside)
            for pieces in self.wanted.dims:
                numbers = coordinates(pieces.layout, positions)
                counts = [so_far * pieces.sizes[number] for so_far, number in zip(counts, numbers, strict=True)]
            found += zip(outside, counts, strict=True)
        return found

    def all_sent(self) -> list[tuple[int, int]]:
        """How many elements each rank sends that holds any."""
        tiles = product(range(self.depth), product(*self.held.there))
        return [load for tile in tiles if volume(self.held.tile(tile[1])) for load in self._shares(tile).loads()]

    def is_permutation(self) -> bool:
        """Whether whoever wants anything wants one whole tile, and there are holders enough to send one each."""
        if self.wanted.copies > self.held.copies:
            return False
        for one, two, there in zip(self.held.dims, self.wanted.dims, self.wanted.there, strict=True):
            ours, theirs = (one.parts, two.parts) if same_factors(one, two) else (one.runs, two.runs)
            wanted = [number for number in there if two.sizes[number]]
            if wanted and (first := two.runs(wanted[0])) not in map(one.runs, one.meeting(first)):
                return False  # the first piece is mostly enough to know it
            whole = set(map(ours, range(one.layout.size)))
            if not whole.issuperset(map(theirs, wanted)):
                return False
        return True

    # what one rank does

    def exchange(self, rank: int) -> Exchange:
        """What one rank of the group sends, receives and copies."""
        holding, wanting = self.holding(rank), self.wanting(rank)
        whole = self.held.copies == 1
        sends, receives, copies = (self._whole if whole else self._shared)(rank, holding, wanting)
        layer = self._layer(rank) if holding is None else holding[0]
        return Exchange(self.ranks, sends, receives, copies, layer, self.depth)

    def _whole(self, rank: int, holding: tuple[int, Numbers] | None, wanting: Numbers | None) -> Dealt:
        """Where a tile has one holder, who sends all that is wanted of it. What a rank keeps is a message to itself."""
        sent: list[Message] = []
        received: list[Message] = []
        if holding is not None:
            sent = self._whole_parts(self.held.tile(holding[1]), self.wanted, holding[0])
        if wanting is not None:
            tile = self.wanted.tile(wanting)
            received = [part for layer in range(self.depth) for part in self._whole_parts(tile, self.held, layer)]
        own, layer = self.peers[rank], holding[0] if holding is not None else None
        taken = (part.regions for part in sent if part.peer == own)
        put = (part.regions for part in received if part.peer == own and part.layer == layer)
        copies = tuple([pair for both in zip(taken, put, strict=True) for pair in zip(*both, strict=True)])
        others = ([part for part in parts if part.peer != own] for parts in (sent, received))
        sends, receives = (tuple(sorted(parts, key=_peer)) for parts in others)
        return sends, receives, copies

    def _shared(self, rank: int, holding: tuple[int, Numbers] | None, wanting: Numbers | None) -> Dealt:
        """Where several hold the same tile, and share what is wanted of it."""
        sends = () if holding is None else self._sent(rank, *holding)
        receives = () if wanting is None else self._received(rank, wanting, holding)
        copies: tuple[tuple[Region, Region], ...] = ()
        if holding is not None and wanting is not None:
            held, wanted = self.held.tile(holding[1]), self.wanted.tile(wanting)
            if (part := intersection(held, wanted)) is not None:
                copies = tuple(zip(self._regions(part, held), self._regions(part, wanted), strict=True))
        return sends, receives, copies

    def _sent(self, rank: int, layer: int, held: Numbers) -> tuple[Message, ...]:
        """The parts of a rank's tile that it sends."""
        tile = self.held.tile(held)
        found: dict[int, list[Tile]] = {}
        for receiver, start, stop in self._shares((layer, held)).sent(rank):
            part = self._wanted_part(tile, receiver)
            found.setdefault(receiver, []).extend(between(part, start, stop))
        return self._messages(found, tile, dict.fromkeys(found, layer))

    def _received(self, rank: int, wanting: Numbers, holding: tuple[int, Numbers] | None) -> tuple[Message, ...]:
        """The parts of the tile that a rank wants and hasn't."""
        wanted = self.wanted.tile(wanting)
        found: dict[int, list[Tile]] = {}
        layers: dict[int, int] = {}
        for layer, numbers in self._sources(wanting):
            if (layer, numbers) == holding:
                continue
            part = intersection(self.held.tile(numbers), wanted)
            assert part is not None, "the pieces meet along each dim"
            for holder, start, stop in self._shares((layer, numbers)).received(rank):
                found.setdefault(holder, []).extend(between(part, start, stop))
                layers[holder] = layer
        return self._messages(found, wanted, layers)

    def _whole_parts(self, tile: Tile, grid: TileGrid, layer: int) -> list[Message]:
        """A message for each of the ranks whose tiles on a side share elements with a tile: all of them.

        They are found dim by dim: there may be a hundred thousand.
        """
        numbers = [grid.meeting(dim, runs) for dim, runs in enumerate(tile)]
        counts, local = [1], list[Sequence[Iterable[tuple[int, int]]]]()
        for pieces, runs, some in zip(grid.dims, tile, numbers, strict=True):
            shared = [shared_runs(runs, pieces.runs(number)) for number in some]
            lengths = [count(part) for part in shared]
            counts = [so_far * length for so_far in counts for length in lengths]
            local.append([local_runs(part, runs) for part in shared] if self.in_tiles else shared)
        parts = [(tuple(product(*each)), size) for each, size in zip(product(*local), counts, strict=True)]
        if grid.copies > 1:
            parts = [part for part in parts for _ in range(grid.copies)]
        peers, ranks = self.peers, grid.ranks(numbers, layer if grid is self.held else 0)
        return [Message(peers[rank], *part, layer) for rank, part in zip(ranks, parts, strict=True)]

    def _regions(self, part: Tile, within: Tile) -> tuple[Region, ...]:
        return regions(part, within) if self.in_tiles else tuple(product(*part))

    def _layer(self, rank: int) -> int:
        position = self.source.universe.position(rank)
        return 0 if position is None else self.resolved.coordinate(position)

    def _messages(self, parts: dict[int, list[Tile]], within: Tile, layers: dict[int, int]) -> tuple[Message, ...]:
        found = []
        for peer in sorted(parts, key=self.peers.__getitem__):
            boxes = tuple([region for part in parts[peer] for region in self._regions(part, within)])
            found.append(Message(self.peers[peer], boxes, sum(map(volume, parts[peer])), layers[peer]))
        return tuple(found)

    def _sources(self, wanting: Numbers) -> Iterator[tuple[int, Numbers]]:
        """The layers and tiles that a wanted tile is made of."""
        dims = zip(self.held.dims, self.wanted.tile(wanting), strict=True)
        numbers = [self.held.meeting(dim, runs) for dim, (_, runs) in enumerate(dims)]
        return product(range(self.depth), product(*numbers))  # type: ignore[return-value]

    def _wanted_part(self, held: Tile, rank: int) -> Tile:
        """What a rank that wants some of a tile wants of it."""
        wanting = self.wanting(rank)
        part = None if wanting is None else intersection(held, self.wanted.tile(wanting))
        assert part is not None, "receivers want some of the tile"
        return part

    @cached_property
    def _shares(self) -> Callable[[tuple[int, Numbers]], Shares]:
        """How the holders of a tile of a layer share what is wanted of it."""

        def found(held: tuple[int, Numbers]) -> Shares:
            layer, numbers = held
            receivers, scale = self.receivers(numbers)
            return Shares(self.held.holders(numbers, layer), receivers, scale, self.balance, self.ranks_per_node)

        return lru_cache(maxsize=64)(found)

    def receivers(self, held: Numbers) -> tuple[Receivers, int]:
        """Who wants parts of a tile, its holders among them; and the scale of their amounts."""
        scale, numbers, amounts = 1, [], []
        for dim, number in enumerate(held):
            some, counts, each = self._meeting(dim, number)
            scale *= each
            numbers.append(some)
            amounts.append(counts)
        return self._receivers(tuple(numbers), tuple(amounts)), scale

    @cached_property
    def _meeting(self) -> Callable[[int, int], tuple[Sequence[int], tuple[int, ...], int]]:
        """Along a dim, by the number of a held piece: the wanted pieces that it meets, and how much of each.

        Where that is the same of all, no amounts and how much it is; else the amounts and 1.
        """

        def found(dim: int, number: int) -> tuple[Sequence[int], tuple[int, ...], int]:
            runs, pieces = self.held.dims[dim].runs(number), self.wanted.dims[dim]
            numbers = self.wanted.meeting(dim, runs)
            counts = tuple([count(shared_runs(runs, pieces.runs(each))) for each in numbers])
            even = len({*counts}) == 1
            some = numbers if isinstance(numbers, range) else tuple(numbers)
            return (some, (), counts[0]) if even else (some, counts, 1)

        return lru_cache(maxsize=8192)(found)

    @cached_property
    def _receivers(self) -> Callable[[tuple[Sequence[int], ...], tuple[tuple[int, ...], ...]], Receivers]:
        """Who wants these pieces along each dim, by how much of each; no amounts where all are equal."""

        def found(numbers: tuple[Sequence[int], ...], counts: tuple[tuple[int, ...], ...]) -> Receivers:
            ranks = self.wanted.ranks(numbers)
            if not any(counts):
                return Receivers(sorted(ranks), range(1, len(ranks) + 1))
            weights = [1]
            for some, each in zip(numbers, counts, strict=True):
                weights = [weight * size for weight in weights for size in each or (1,) * len(some)]
            weights = [weight for weight in weights for _ in range(self.wanted.copies)]
            order = sorted(range(len(ranks)), key=ranks.__getitem__)
            return Receivers([ranks[at] for at in order], list(accumulate([weights[at] for at in order])))

        return lru_cache(maxsize=64)(found)
