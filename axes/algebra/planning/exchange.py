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
(Message(peer=1, regions=(((2, 4),),), elements=2, layer=0),)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import heapify, heapreplace
from itertools import product
from operator import itemgetter
from typing import NamedTuple

from axes.algebra.chunks import Runs, Tile, all_chunks, factor_runs
from axes.algebra.layout import Layout, digits
from axes.algebra.planning.boxes import Region, intersection, regions, volume
from axes.algebra.sharding import Sharding, Slots
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

    def in_boxes(self, boxes: Callable[[Region], Iterable[Region]]) -> Exchange:
        """The same with each box as several, in order."""

        def changed(message: Message) -> Message:
            return message._replace(regions=tuple([each for box in message.regions for each in boxes(box)]))

        copies = [pair for source, target in self.copies for pair in zip(boxes(source), boxes(target), strict=True)]
        sends, receives = (tuple(map(changed, side)) for side in (self.sends, self.receives))
        return replace(self, sends=sends, receives=receives, copies=tuple(copies))


# --- tiles ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces that a dim is cut into. layout: its coordinates are their numbers. runs: the indices of each.

    >>> from axes.algebra.mesh import Mesh
    >>> pieces = pieces_of(Mesh("tp=4").sharding("s@tp").dims[0], (6,))
    >>> pieces.runs, pieces.meeting(((1, 3),))
    ((((0, 2),), ((2, 4),), ((4, 6),), ((6, 6),)), [0, 1])
    """

    layout: Layout
    runs: Sequence[Runs]

    @cached_property
    def _line(self) -> list[tuple[int, int, int]]:
        """`(stop, start, number)` of all runs that aren't empty, ascending: each index is in one."""
        every = [(stop, start, number) for number, runs in enumerate(self.runs) for start, stop in runs]
        return sorted([run for run in every if run[0] > run[1]])

    def meeting(self, runs: Runs) -> list[int]:
        """The numbers of the pieces that share elements with these runs, ascending."""
        found: set[int] = set()
        for start, stop in runs:
            at = bisect_right(self._line, start, key=itemgetter(0))
            while start < stop and at < len(self._line) and self._line[at][1] < stop:
                found.add(self._line[at][2])
                at += 1
        return sorted(found)


@lru_cache(maxsize=1024)
def pieces_of(dim: Slots, extents: tuple[int, ...]) -> Pieces:
    """The pieces of a dim whose factors have these sizes."""
    cuts = [
        all_chunks(extent, tuple([layout.size for layout in slot.layouts]))
        for extent, slot in zip(extents, dim, strict=True)
    ]
    whole = len(cuts) == 1
    runs = [parts if whole else factor_runs(extents, parts) for parts in product(*cuts)]
    return Pieces(Layout.product(*dim.layouts), tuple(runs))


Numbers = tuple[int, ...]
"""Which tile: the number of its piece along each dim."""


class GroupSide:
    """The tiles that the ranks of a group have before an exchange or after it, and who has each.

    pieces: what each dim is cut into. members: the digits of the position that the group steps through, None for all.
    origin: the position of one of its ranks. layers: the digits over which a reduction is pending.
    """

    def __init__(
        self,
        universe: Universe,
        pieces: Sequence[Pieces],
        members: Layout | None = None,
        origin: int = 0,
        layers: Layout = Layout(),  # noqa: B008 - layouts are immutable
    ):
        self.universe, self.pieces, self.layers = universe, pieces, layers
        layouts = [each.layout for each in pieces]
        group = Layout((universe.size,), (1,)) if members is None else members
        own, layered, *split = digits(group, layers, *layouts)
        taken = {*layered, *[digit for each in split for digit in each]}
        self.copies = Layout.of([digit for digit in own if digit not in taken])
        self.base = origin - sum(
            [layout.offset(layout.coordinate(origin)) for layout in (self.copies, layers, *layouts)]
        )
        within = [Layout.of([digit for digit in each if digit in own]) for each in split]
        self.numbers = [_numbers(*pair, origin) for pair in zip(layouts, within, strict=True)]

    def held(self, rank: int) -> tuple[int, Numbers] | None:
        """The layer and the tile that a rank has; None where that is nothing."""
        position = self.universe.position(rank)
        if position is None:
            return None
        numbers = tuple([each.layout.coordinate(position) for each in self.pieces])
        return (self.layers.coordinate(position), numbers) if volume(self.tile(numbers)) else None

    def tile(self, numbers: Numbers) -> Tile:
        """The tile of the pieces with these numbers, one along each dim."""
        return tuple([each.runs[number] for each, number in zip(self.pieces, numbers, strict=True)])

    def tiles(self) -> Iterator[tuple[int, Numbers]]:
        """The layers and tiles of the group."""
        return product(range(self.layers.size), product(*self.numbers))  # type: ignore[return-value]

    def meeting(self, tile: Tile) -> Iterator[tuple[int, Numbers]]:
        """The layers and tiles of the group that share elements with a tile."""
        dims = zip(self.pieces, self.numbers, tile, strict=True)
        numbers = [[number for number in each.meeting(runs) if number in there] for each, there, runs in dims]
        return product(range(self.layers.size), product(*numbers))  # type: ignore[return-value]

    def ranks(self, layer: int, numbers: Numbers) -> list[int]:
        """The ranks that have a tile, ascending."""
        first = self.base + self.layers.offset(layer)
        first += sum([each.layout.offset(number) for each, number in zip(self.pieces, numbers, strict=True)])
        return sorted(self.universe.pick([first + offset for offset in self.copies.offsets()]))


def _numbers(layout: Layout, varying: Layout, origin: int) -> Sequence[int] | set[int]:
    """The coordinates on a layout of the positions that differ from `origin` in some of its digits."""
    if varying.size == layout.size:
        return range(layout.size)
    first = origin - varying.offset(varying.coordinate(origin))
    return {layout.coordinate(first + offset) for offset in varying.offsets()}


# --- who sends ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GroupExchange:
    """Who sends what to whom among the `ranks` of a group, asked of one rank at a time.

    in_tiles: whether boxes are of the ranks' tiles, else of the whole.
    """

    before: GroupSide
    after: GroupSide
    ranks: tuple[int, ...]
    ranks_per_node: int = 8
    in_tiles: bool = True

    @cached_property
    def peers(self) -> dict[int, int]:
        """The index of each rank in the group."""
        return {rank: index for index, rank in enumerate(self.ranks)}

    @cached_property
    def parts(self) -> dict[int, tuple[tuple[int, Numbers] | None, int, int]]:
        """For each rank the tile that it has, how many elements it wants, and how many of these it has."""
        found = {}
        for rank in self.ranks:
            held, wanted = self.before.held(rank), self.after.held(rank)
            mine = None if wanted is None else self.after.tile(wanted[1])
            own = None if held is None or mine is None else intersection(self.before.tile(held[1]), mine)
            found[rank] = held, 0 if mine is None else volume(mine), 0 if own is None else volume(own)
        return found

    @cached_property
    def received(self) -> dict[int, int]:
        """How many elements each rank receives: what it wants of each layer, less what it has."""
        return {rank: self.before.layers.size * wants - own for rank, (_, wants, own) in self.parts.items()}

    @cached_property
    def most_received(self) -> int:
        """The most elements that a rank receives."""
        return max(self.received.values())

    @cached_property
    def most_sent(self) -> int:
        """The most elements that a rank sends: an even share of what is wanted of those that have the same."""
        totals: dict[tuple[int, Numbers], int] = {}
        for held, _, own in self.parts.values():
            if held is not None:
                # Of a tile each element is wanted as often as any other.
                every = self.after.copies.size * volume(self.before.tile(held[1]))
                totals[held] = totals.get(held, every) - own
        most, holders = max(totals.values(), default=0), self.before.copies.size
        return most if holders == 1 else max(self.most_received, -(-most // holders))

    @cached_property
    def sent(self) -> dict[int, int]:
        """How many elements each rank sends."""
        found = dict.fromkeys(self.ranks, 0)
        for held in self.before.tiles():
            for receiver, (sender, count) in self._senders(held).items():
                found[sender] += count if receiver != sender else 0
        return found

    def is_permutation(self) -> bool:
        """Whether whoever wants anything wants one whole tile, and there are ranks enough that have it."""
        if self.after.copies.size > self.before.copies.size:
            return False
        for one, two, numbers in zip(self.before.pieces, self.after.pieces, self.after.numbers, strict=True):
            if not {*one.runs}.issuperset([runs for runs in map(two.runs.__getitem__, numbers) if volume((runs,))]):
                return False
        return True

    def exchange(self, rank: int) -> Exchange:
        """What one rank of the group sends, receives and copies."""
        held, wanted = self.before.held(rank), self.after.held(rank)
        sends: list[Message] = []
        receives: list[Message] = []
        copies: tuple[tuple[Region, Region], ...] = ()
        if wanted is not None:
            mine = self.after.tile(wanted[1])
            for each in self.before.meeting(mine):
                part = _shared(self.before.tile(each[1]), mine)
                if each == held:
                    there = self.before.tile(each[1])
                    copies = tuple(zip(self._regions(part, there), self._regions(part, mine), strict=True))
                else:
                    receives.append(self._message(self._sender(each, rank), part, mine, each[0]))
        if held is not None:
            mine, alone = self.before.tile(held[1]), self.before.copies.size == 1
            for each in self.after.meeting(mine):
                part = _shared(mine, self.after.tile(each[1]))
                others = [other for other in self.after.ranks(*each) if other != rank]
                mine_to = [other for other in others if alone or self._sender(held, other) == rank]
                sends += [self._message(other, part, mine, held[0]) for other in mine_to]
        position, layers = self.before.universe.position(rank), self.before.layers
        layer = 0 if position is None else layers.coordinate(position)
        return Exchange(self.ranks, tuple(sorted(sends)), tuple(sorted(receives)), copies, layer, layers.size)

    def _message(self, peer: int, part: Tile, within: Tile, layer: int) -> Message:
        return Message(self.peers[peer], self._regions(part, within), volume(part), layer)

    def _regions(self, part: Tile, within: Tile) -> tuple[Region, ...]:
        return regions(part, within) if self.in_tiles else tuple(product(*part))

    def _sender(self, held: tuple[int, Numbers], receiver: int) -> int:
        """Who gives a receiver what it wants of a tile."""
        return self.before.ranks(*held)[0] if self.before.copies.size == 1 else self._senders(held)[receiver][0]

    @cached_property
    def _senders(self) -> Callable[[tuple[int, Numbers]], dict[int, tuple[int, int]]]:
        """Of a tile, for each rank that wants some of it, who gives it that, and how many elements."""
        return lru_cache(maxsize=64)(self._all_senders)

    def _all_senders(self, held: tuple[int, Numbers]) -> dict[int, tuple[int, int]]:
        tile, holders = self.before.tile(held[1]), self.before.ranks(*held)
        counts: dict[int, int] = {}
        for each in self.after.meeting(tile):
            counts.update(dict.fromkeys(self.after.ranks(*each), volume(_shared(tile, self.after.tile(each[1])))))
        found = {rank: (rank, counts[rank]) for rank in holders if rank in counts}
        if len(holders) == 1:
            return {rank: (holders[0], count) for rank, count in counts.items()}
        rest = sorted({*counts} - {*found}, key=lambda rank: (-counts[rank], rank))
        share = -(-sum([counts[rank] for rank in rest]) // len(holders))
        most = max(share, self.most_received * volume(tile) // self._largest)
        sent = dict.fromkeys(holders, 0)
        for node in (self.ranks_per_node, math.inf):
            queues: dict[float, list[tuple[int, int]]] = {}
            for holder in holders:
                queues.setdefault(holder // node, []).append((sent[holder], holder))
            for queue in queues.values():
                heapify(queue)
            for rank in [rank for rank in rest if rank not in found]:
                queue = queues.get(rank // node, [])
                if queue and (node == math.inf or queue[0][0] + counts[rank] <= most):
                    before, holder = queue[0]
                    sent[holder] = before + counts[rank]
                    heapreplace(queue, (sent[holder], holder))
                    found[rank] = holder, counts[rank]
        return found

    @cached_property
    def _largest(self) -> int:
        """Elements of the largest tile that a rank has before; 1 where no rank has any."""
        return max(1, math.prod([max([volume((runs,)) for runs in each.runs]) for each in self.before.pieces]))


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
        origin = 0 if members is None else end.universe.position(rank)
        assert origin is not None, "a group that steps through digits is of the ranks of both sides"
        pieces = list(map(pieces_of, end.dims, end.extents(shape)))
        sides.append(GroupSide(end.universe, pieces, members, origin, layers))
    ranks = ranks_of_both(source.universe, target.universe) if members is None else source.universe.line(members, rank)
    return GroupExchange(sides[0], sides[1], tuple(ranks), ranks_per_node)


@lru_cache(maxsize=64)
def ranks_of_both(one: Universe, two: Universe) -> tuple[int, ...]:
    """The ranks of two universes, those of the first before the others."""
    return (*one.ranks, *[rank for rank in two.ranks if one.position(rank) is None])


def _shared(one: Tile, two: Tile) -> Tile:
    found = intersection(one, two)
    assert found is not None, "the pieces meet along each dim"
    return found
