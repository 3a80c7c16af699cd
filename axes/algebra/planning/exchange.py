"""Who sends which box to whom: the one part of a plan that looks at ranks, group by group.

Every rank of a group has a tile and wants a tile. What it wants and has, it copies. Anything else comes from a rank
that has it. Where several do, each serves the receivers of its own node first, as far as none sends more than one rank
receives, or more than its share; the others are served by whoever sends least. What goes from one tile to one rank is
one message: it isn't cut between those that have the tile.

Along each dim a side is cut into pieces by some digits of the position. So which tiles meet, and who has them,
follows dim by dim, and one rank's messages are found without a look at all others. Every rank derives the same answer.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2 tp=2")
>>> group = group_between(mesh.sharding("s@tp"), mesh.sharding("s"), (4,), mesh.axis("tp").layout, 0)
>>> group.exchange(0).receives
(Message(peer=1, boxes=(((2, 4),),), elements=2, layer=0),)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapreplace
from itertools import product
from operator import getitem, itemgetter
from typing import NamedTuple

from axes.algebra.chunks import Box, Runs, Tile, all_chunks, boxes_within, factor_runs, intersection, volume
from axes.algebra.layout import Layout, Universe
from axes.algebra.sharding import Sharding, Slots


class Message(NamedTuple):
    """Boxes of a local tensor that go to or come from one rank, in the order of the message.

    peer: index in the group. boxes: of the local tensor, each read or written row-major.
    elements: how many that are. layer: the pending coordinate that a contribution to a reduction is of.
    """

    peer: int
    boxes: tuple[Box, ...]
    elements: int
    layer: int = 0


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
    copies: tuple[tuple[Box, Box], ...] = ()
    layer: int = 0
    layers: int = 1
    padded: int = 0


# --- tiles ----------------------------------------------------------------------------------------


class Pieces(NamedTuple):
    """The pieces that a dim is cut into. layout: its coordinates are their numbers. runs: the indices of each.

    >>> from axes.algebra.mesh import Mesh
    >>> list(pieces_of(Mesh("tp=4").sharding("s@tp").dims[0], (6,)).runs)
    [((0, 2),), ((2, 4),), ((4, 6),), ((6, 6),)]
    """

    layout: Layout
    runs: Sequence[Runs]


@lru_cache(maxsize=1024)
def pieces_of(dim: Slots, extents: tuple[int, ...]) -> Pieces:
    """The pieces of a dim whose slots have these sizes."""
    cuts = [
        all_chunks(extent, tuple([layout.size for layout in slot.layouts]))
        for extent, slot in zip(extents, dim, strict=True)
    ]
    whole = len(cuts) == 1
    runs = [parts if whole else factor_runs(extents, parts) for parts in product(*cuts)]
    return Pieces(Layout.product(*dim.layouts), tuple(runs))


Held = tuple[int, ...]
"""Which tile: the pending coordinate of which it is a summand, then the number of its piece along each dim."""


class GroupSide:
    """The tiles that the ranks of a group have before an exchange or after it, and who has each.

    pieces: what each dim is cut into. members: the digits of the position that the group steps through, None for all.
    first: the position of its first rank. layers: the digits over which a reduction is pending.
    held: the tile of each rank. ranks: those that have a tile, ascending. sizes: the elements of each tile, of
    which `largest` is the most. Tiles of no elements are left out.
    """

    def __init__(
        self,
        universe: Universe,
        pieces: Sequence[Pieces],
        members: Layout | None = None,
        first: int = 0,
        layers: Layout = Layout(),  # noqa: B008 - layouts are immutable
    ):
        self.pieces, self.layers = pieces, layers.size
        layout = Layout((universe.size,), (1,)) if members is None else members
        positions = layout.offsets(first)
        columns = [[*map(each.coordinate, positions)] for each in (layers, *[each.layout for each in pieces])]
        self.spans = list(map(_spans, pieces, columns[1:]))
        self.ranks: dict[Held, list[int]] = {}
        for held, rank in zip(zip(*columns, strict=True), universe.pick(positions), strict=True):
            self.ranks.setdefault(held, []).append(rank)
        runs = [each.runs for each in pieces]
        self.tiles = {held: tuple(map(getitem, runs, held[1:])) for held in self.ranks}
        sizes = {held: volume(tile) for held, tile in self.tiles.items()}
        self.sizes = {held: size for held, size in sizes.items() if size}
        self.largest = max(self.sizes.values(), default=0)
        self.ranks = {held: sorted(self.ranks[held]) for held in self.sizes}
        self.held = {rank: held for held, ranks in self.ranks.items() for rank in ranks}

    def meeting(self, tile: Tile) -> Iterator[Held]:
        """The tiles of the group that share elements with a tile."""
        return product(range(self.layers), *map(_meeting, self.spans, tile))


Spans = list[tuple[int, int, int]]
"""`(stop, start, number)` of runs that aren't empty, ascending: each index is in one at most."""


def _spans(pieces: Pieces, numbers: Iterable[int]) -> Spans:
    """The pieces of a dim with these numbers."""
    runs = [(stop, start, number) for number in {*numbers} for start, stop in pieces.runs[number] if stop > start]
    return sorted(runs)


def _meeting(spans: Spans, runs: Runs) -> list[int]:
    """The numbers of the pieces that share elements with these runs, ascending."""
    found: set[int] = set()
    for start, stop in runs:
        at = bisect_right(spans, start, key=itemgetter(0))
        while start < stop and at < len(spans) and spans[at][1] < stop:
            found.add(spans[at][2])
            at += 1
    return sorted(found)


# --- who sends ------------------------------------------------------------------------------------


class GroupExchange:
    """Who sends what to whom among the `ranks` of a group, asked of one rank at a time.

    boxes: where a part of a tile lies in it. peers: the index of each rank in the group.
    """

    def __init__(
        self,
        before: GroupSide,
        after: GroupSide,
        ranks: tuple[int, ...],
        ranks_per_node: int = 8,
        boxes: Callable[[Tile, Tile], tuple[Box, ...]] = boxes_within,
    ):
        self.before, self.after, self.ranks, self.ranks_per_node, self.boxes = (
            before,
            after,
            ranks,
            ranks_per_node,
            boxes,
        )
        self.peers = {rank: index for index, rank in enumerate(ranks)}
        self._senders = lru_cache(maxsize=64)(self._senders_of)

    @cached_property
    def kept(self) -> dict[int, int]:
        """How many elements of what each rank wants it has."""
        found = dict.fromkeys(self.ranks, 0)
        for rank in self.before.held.keys() & self.after.held.keys():
            had, wanted = self.before.tiles[self.before.held[rank]], self.after.tiles[self.after.held[rank]]
            found[rank] = volume(intersection(had, wanted))
        return found

    @property
    def received(self) -> dict[int, int]:
        """How many elements each rank receives: what it wants of each layer, less what it has."""
        wanted = {rank: self.after.sizes[held] for rank, held in self.after.held.items()}
        return {rank: self.before.layers * wanted.get(rank, 0) - kept for rank, kept in self.kept.items()}

    @cached_property
    def most_received(self) -> int:
        """The most elements that a rank receives."""
        return max(self.received.values())

    @property
    def most_sent(self) -> int:
        """The most elements that a rank sends: an even share of what is wanted of those that have the same."""
        every, found = len(next(iter(self.after.ranks.values()), ())), [0]
        for held, ranks in self.before.ranks.items():
            # Of a tile each element is wanted as often as any other.
            wanted = every * self.before.sizes[held] - sum([self.kept[rank] for rank in ranks])
            found.append(wanted if len(ranks) == 1 else max(self.most_received, -(-wanted // len(ranks))))
        return max(found)

    @property
    def sent(self) -> dict[int, int]:
        """How many elements each rank sends."""
        found = dict.fromkeys(self.ranks, 0)
        for held, (first, *_) in self.before.ranks.items():
            senders = self._senders(held)
            for wanted, part in self._parts(held):
                count, receivers = volume(part), self.after.ranks[wanted]
                for receiver in [each for each in receivers if self.before.held.get(each) != held]:
                    found[senders.get(receiver, first)] += count
        return found

    def is_permutation(self) -> bool:
        """Whether whoever wants anything wants one whole tile, and there are ranks enough that have it."""
        have = {self.before.tiles[held]: len(ranks) for held, ranks in self.before.ranks.items()}
        return all(len(ranks) <= have.get(self.after.tiles[held], 0) for held, ranks in self.after.ranks.items())

    def exchange(self, rank: int) -> Exchange:
        """What one rank of the group sends, receives and copies."""
        held = self.before.held.get(rank)
        sends: list[Message] = []
        receives: list[Message] = []
        copies: tuple[tuple[Box, Box], ...] = ()
        for layer, sender, part in self.arrivals(rank):
            mine = self.after.tiles[self.after.held[rank]]
            if sender == rank and held is not None:
                copies = tuple(zip(self.boxes(part, self.before.tiles[held]), self.boxes(part, mine), strict=True))
            else:
                receives.append(self._message(sender, part, mine, layer))
        if held is not None:
            senders = self._senders(held)
            for wanted, part in self._parts(held):
                to = [other for other in self.after.ranks[wanted] if other != rank and senders.get(other, rank) == rank]
                sends += [self._message(other, part, self.before.tiles[held], held[0]) for other in to]
        layer = 0 if held is None else held[0]
        return Exchange(self.ranks, tuple(sorted(sends)), tuple(sorted(receives)), copies, layer, self.before.layers)

    def arrivals(self, rank: int) -> Iterator[tuple[int, int, Tile]]:
        """What a rank's tile after the exchange is made of: `(layer, the rank that it comes from, part)`."""
        wanted, held = self.after.held.get(rank), self.before.held.get(rank)
        if wanted is None:
            return
        mine = self.after.tiles[wanted]
        for each in self.before.meeting(mine):
            sender = rank if each == held else self._senders(each).get(rank, self.before.ranks[each][0])
            yield each[0], sender, intersection(self.before.tiles[each], mine)

    def _message(self, peer: int, part: Tile, within: Tile, layer: int) -> Message:
        return Message(self.peers[peer], self.boxes(part, within), volume(part), layer)

    def _parts(self, held: Held) -> Iterator[tuple[Held, Tile]]:
        """The tiles that are wanted of which a tile has a part, and that."""
        tile = self.before.tiles[held]
        return ((wanted, intersection(tile, self.after.tiles[wanted])) for wanted in self.after.meeting(tile))

    def _senders_of(self, held: Held) -> dict[int, int]:
        """Of a tile that several ranks have, for each rank that wants some of it, who gives it that."""
        holders, counts = self.before.ranks[held], dict[int, int]()
        if len(holders) == 1:
            return counts
        for wanted, part in self._parts(held):
            counts.update(dict.fromkeys(self.after.ranks[wanted], volume(part)))
        found = {rank: rank for rank in holders if rank in counts}
        rest = sorted({*counts} - {*found}, key=lambda rank: (-counts[rank], rank))
        share = -(-sum([counts[rank] for rank in rest]) // len(holders))
        most = max(share, self.most_received * self.before.sizes[held] // self.before.largest)
        sent = dict.fromkeys(holders, 0)
        for node in (self.ranks_per_node, math.inf):
            queues: dict[float, list[tuple[int, int]]] = {}
            for count, holder in sorted([(sent[holder], holder) for holder in holders]):
                queues.setdefault(holder // node, []).append((count, holder))
            for rank in [rank for rank in rest if rank not in found]:
                queue = queues.get(rank // node, [])
                if queue and (node == math.inf or queue[0][0] + counts[rank] <= most):
                    count, holder = queue[0]
                    sent[holder] = count + counts[rank]
                    heapreplace(queue, (sent[holder], holder))
                    found[rank] = holder
        return found


@lru_cache(maxsize=64)
def group_between(
    source: Sharding,
    target: Sharding,
    shape: tuple[int, ...],
    members: Layout | None,
    rank: int,
    resolved: Layout = Layout(),  # noqa: B008
    ranks_per_node: int = 8,
) -> GroupExchange:
    """The group of a rank that steps through some digits of the position, or of all ranks of both shardings.

    rank: its first, so that there is one group for all of its ranks.
    """
    sides = []
    for end, layers in ((source, resolved), (target, Layout())):
        first = 0 if members is None else end.universe.position(rank)
        assert first is not None, "a group that steps through digits is of the ranks of both sides"
        pieces = list(map(pieces_of, end.dims, end._extents(shape)))
        sides.append(GroupSide(end.universe, pieces, members, first, layers))
    ranks = ranks_of_both(source.universe, target.universe) if members is None else source.universe.group(members, rank)
    return GroupExchange(sides[0], sides[1], tuple(ranks), ranks_per_node)


@lru_cache(maxsize=64)
def ranks_of_both(one: Universe, two: Universe) -> tuple[int, ...]:
    """The ranks of two universes, those of the first before the others."""
    return (*one.ranks, *[rank for rank in two.ranks if one.position(rank) is None])
