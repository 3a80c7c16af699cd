"""Who sends which box to whom: the one part of a plan that looks at ranks, group by group.

Every rank of a group holds a tile and wants a tile. What it wants and has, it copies. What it wants
and hasn't comes from a rank that holds it; where several do, from the one with the least to send so
far, then one on the same node, then the nearest, then the lowest. A request that would make a holder
send more than the rank that receives most receives is cut: so the most that any rank sends is at most
the most that any rank receives, whenever that can be (a holder of more than its share of an uneven
dim has to send it).

All of it follows from the group's tiles alone, so every rank derives the same answer.

>>> half, other = ((0, 2),), ((2, 4),)
>>> deal = Deal((0, 1, 2, 3), ((half,), (other,), (half,), (other,)), ((((0, 4),),),) * 4)
>>> deal.exchange(0).receives, deal.exchange(1).send_counts
((Transfer(peer=1, regions=(((2, 4),),), count=2, layer=0),), (2, 0, 0, 0))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from axes.algebra.chunks import Runs, Tile, count

Region = tuple[tuple[int, int], ...]
"""A box of a local tensor: `(start, stop)` for each dim."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Boxes of a local tensor that go to or come from one rank, in the order of the message.

    peer: index in the group. regions: boxes of the local tensor, each read or written row-major.
    count: their elements. layer: the pending coordinate that a contribution to a reduction is of.
    """

    peer: int
    regions: tuple[Region, ...]
    count: int
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
    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    copies: tuple[tuple[Region, Region], ...] = ()
    layer: int = 0
    layers: int = 1
    padded: int = 0

    def times(self, multiples: Sequence[int]) -> Exchange:
        """The same where every size is a multiple of what it is here: every box is.

        >>> part = Transfer(1, (((0, 1), (0, 2)),), 2)
        >>> Exchange((0, 1), (part,)).times((3, 2)).sends
        (Transfer(peer=1, regions=(((0, 3), (0, 4)),), count=12, layer=0),)
        """
        more = math.prod(multiples)

        def box(region: Region) -> Region:
            return tuple((start * m, stop * m) for (start, stop), m in zip(region, multiples, strict=True))

        def scaled(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
            return tuple(Transfer(t.peer, tuple(map(box, t.regions)), t.count * more, t.layer) for t in transfers)

        copies = tuple((box(source), box(target)) for source, target in self.copies)
        sends, receives = scaled(self.sends), scaled(self.receives)
        return Exchange(self.ranks, sends, receives, copies, self.layer, self.layers, self.padded * more)

    @property
    def send_counts(self) -> tuple[int, ...]:
        """Elements for each rank of the group."""
        return _counts(self.sends, len(self.ranks))

    @property
    def receive_counts(self) -> tuple[int, ...]:
        """Elements from each rank of the group."""
        return _counts(self.receives, len(self.ranks))


def _counts(transfers: Iterable[Transfer], size: int) -> tuple[int, ...]:
    found = [0] * size
    for transfer in transfers:
        found[transfer.peer] = transfer.count
    return tuple(found)


# --- tiles ----------------------------------------------------------------------------------------


def volume(held: Tile) -> int:
    """Elements of a tile."""
    return math.prod(map(count, held))


def intersection(one: Tile, two: Tile) -> Tile | None:
    """What two tiles share, or None where that is nothing.

    >>> intersection((((0, 4), (8, 12)),), (((2, 9),),))
    (((2, 4), (8, 9)),)
    """
    found: list[Runs] = []
    for mine, theirs in zip(one, two, strict=True):
        shared = _shared(mine, theirs)
        if not shared:
            return None
        found.append(shared)
    return tuple(found)


def _shared(mine: Runs, theirs: Runs) -> Runs:
    if len(mine) == 1 and len(theirs) == 1:
        start, stop = max(mine[0][0], theirs[0][0]), min(mine[0][1], theirs[0][1])
        return ((start, stop),) if start < stop else ()
    found: list[tuple[int, int]] = []
    i = j = 0
    while i < len(mine) and j < len(theirs):
        start, stop = max(mine[i][0], theirs[j][0]), min(mine[i][1], theirs[j][1])
        if start < stop:
            found.append((start, stop))
        if mine[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def regions(part: Tile, within: Tile) -> tuple[Region, ...]:
    """The boxes of the local tensor of `within` that hold `part`, in row-major order of the runs.

    >>> regions((((2, 4), (8, 9)),), (((0, 4), (8, 12)),))
    (((2, 4),), ((4, 5),))
    """
    return tuple(product(*map(_local, part, within)))


def _local(part: Runs, within: Runs) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    at, base = 0, 0
    for start, stop in part:
        while within[at][1] < stop:
            base += within[at][1] - within[at][0]
            at += 1
        offset = base - within[at][0]
        found.append((start + offset, stop + offset))
    return found


def cut(part: Tile, first: int) -> tuple[list[Tile], list[Tile]]:
    """The first elements of a tile in row-major order, and the rest, both as tiles.

    >>> cut((((0, 2),), ((0, 3),)), 4)
    ([(((0, 1),), ((0, 3),)), (((1, 2),), ((0, 1),))], [(((1, 2),), ((1, 3),))])
    """
    head: list[Tile] = []
    tail: list[Tile] = []
    for dim, runs in enumerate(part):
        inner = math.prod(count(below) for below in part[dim + 1 :])
        whole, first = divmod(first, inner)
        before, after = _cut_runs(runs, whole)
        if before:
            head.append((*part[:dim], before, *part[dim + 1 :]))
        if not first:
            if after:
                tail.insert(0, (*part[:dim], after, *part[dim + 1 :]))
            break
        row, after = _cut_runs(after, 1)
        if after:
            tail.insert(0, (*part[:dim], after, *part[dim + 1 :]))
        part = (*part[:dim], row, *part[dim + 1 :])
    return head, tail


def _cut_runs(runs: Runs, first: int) -> tuple[Runs, Runs]:
    head: list[tuple[int, int]] = []
    tail: list[tuple[int, int]] = []
    for start, stop in runs:
        middle = min(stop, start + first)
        first -= middle - start
        if start < middle:
            head.append((start, middle))
        if middle < stop:
            tail.append((middle, stop))
    return tuple(head), tuple(tail)


# --- who gives ------------------------------------------------------------------------------------

Gift = tuple[int, int, Tile]
"""`(giver, taker, part)`, the ranks as indices in the group."""


@dataclass(frozen=True)
class Deal:
    """What the ranks of one group hold and want, and from it who gives what to whom.

    ranks: the group. held, wanted: the tile of each rank, None where it has no part in that side.
    layers: where a reduction is pending within the group, each rank's coordinate on it: what is
        wanted is then wanted once from each layer.
    """

    ranks: tuple[int, ...]
    held: tuple[Tile | None, ...]
    wanted: tuple[Tile | None, ...]
    layers: tuple[int, ...] = ()
    ranks_per_node: int = 8

    @cached_property
    def depth(self) -> int:
        """The number of layers."""
        return max(self.layers, default=0) + 1

    def layer(self, index: int) -> int:
        """The layer that a rank holds."""
        return self.layers[index] if self.layers else 0

    @cached_property
    def holders(self) -> dict[tuple[int, Tile], list[int]]:
        """Who holds each tile of each layer; empty tiles are left out."""
        found: dict[tuple[int, Tile], list[int]] = {}
        for index, held in enumerate(self.held):
            if held is not None and volume(held):
                found.setdefault((self.layer(index), held), []).append(index)
        return found

    @cached_property
    def takers(self) -> dict[Tile, list[int]]:
        """Who wants each tile; empty tiles are left out."""
        found: dict[Tile, list[int]] = {}
        for index, wanted in enumerate(self.wanted):
            if wanted is not None and volume(wanted):
                found.setdefault(wanted, []).append(index)
        return found

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Elements that each rank receives: what it wants less what it has."""
        return tuple(
            0 if wanted is None else self.depth * volume(wanted) - _common(held, wanted)
            for held, wanted in zip(self.held, self.wanted, strict=True)
        )

    @cached_property
    def most_sent(self) -> int:
        """The most that a rank may have to send, without dealing: each tile's requests over its holders.

        Every element is wanted equally often, from each layer, as the targets' tiles don't overlap.
        """
        wanted = sum(volume(tile) for tile in self.wanted if tile is not None)
        whole = sum(volume(tile) for tile in self.takers)
        most = 0
        for (_, tile), holders in self.holders.items():
            own = sum(_common(tile, mine) for mine in (self.wanted[h] for h in holders) if mine is not None)
            total = volume(tile) * wanted // whole - own if whole else 0
            most = max(most, self._limit(total, len(holders)))
        return most

    def _limit(self, total: int, holders: int) -> int:
        return total if holders == 1 else max(*self.received, -(-total // holders))

    @cached_property
    def gifts(self) -> dict[tuple[int, Tile], tuple[Gift, ...]]:
        """What is given of each tile that several ranks hold."""
        return {key: self.given(key) for key, holders in self.holders.items() if len(holders) > 1}

    def given(self, key: tuple[int, Tile]) -> tuple[Gift, ...]:
        """Who takes which parts of one tile from which of its holders, itself not included."""
        holders = self.holders[key]
        has = set(holders)
        requests: list[tuple[int, Tile]] = []
        for wanted, takers in self.takers.items():
            part = intersection(key[1], wanted)
            if part is not None:
                requests.extend((taker, part) for taker in takers if taker not in has)
        requests.sort(key=lambda request: request[0])
        if len(holders) == 1:
            return tuple((holders[0], taker, part) for taker, part in requests)
        return tuple(self._dealt(holders, requests))

    def _dealt(self, holders: list[int], requests: list[tuple[int, Tile]]) -> Iterator[Gift]:
        loads = dict.fromkeys(holders, 0)
        total = sum(volume(part) for _, part in requests)
        limit = self._limit(total, len(holders))
        for taker, part in requests:
            rest = [part]
            while rest:
                part = rest.pop(0)
                giver = min(holders, key=lambda holder: self._preference(holder, taker, loads))
                room = limit - loads[giver]
                now = [part]
                if volume(part) > room:
                    now, later = cut(part, room)
                    rest = [*later, *rest]
                for piece in now:
                    loads[giver] += volume(piece)
                    yield giver, taker, piece

    def _preference(self, giver: int, taker: int, loads: dict[int, int]) -> tuple[int, bool, int, int]:
        one, two = self.ranks[giver], self.ranks[taker]
        apart = one // self.ranks_per_node != two // self.ranks_per_node
        return loads[giver], apart, abs(one - two), one

    def exchange(self, rank: int) -> Exchange:
        """What one rank of the group sends, receives and copies."""
        me = self.ranks.index(rank)
        held, wanted = self.held[me], self.wanted[me]
        sends: dict[int, list[Tile]] = {}
        receives: dict[int, list[Tile]] = {}
        copies: tuple[tuple[Region, Region], ...] = ()
        if held is not None and volume(held):
            for giver, taker, part in self._given((self.layer(me), held)):
                if giver == me:
                    sends.setdefault(taker, []).append(part)
        if wanted is not None:
            for key, holders in self.holders.items():
                shared = intersection(key[1], wanted)
                if shared is None:
                    continue
                if me in holders:
                    copies = tuple(zip(regions(shared, key[1]), regions(shared, wanted), strict=True))
                elif len(holders) == 1:
                    receives[holders[0]] = [shared]
                else:
                    for giver, taker, piece in self._given(key):
                        if taker == me:
                            receives.setdefault(giver, []).append(piece)
        return Exchange(
            self.ranks,
            tuple(self._transfer(peer, sends[peer], held, me) for peer in sorted(sends)),
            tuple(self._transfer(peer, receives[peer], wanted, peer) for peer in sorted(receives)),
            copies,
            self.layer(me),
            self.depth,
        )

    def _given(self, key: tuple[int, Tile]) -> tuple[Gift, ...]:
        return self.gifts[key] if len(self.holders[key]) > 1 else self.given(key)

    def _transfer(self, peer: int, parts: list[Tile], within: Tile | None, giver: int) -> Transfer:
        assert within is not None
        boxes = tuple([region for part in parts for region in regions(part, within)])
        return Transfer(peer, boxes, sum(map(volume, parts)), self.layer(giver))


def _common(held: Tile | None, wanted: Tile) -> int:
    part = None if held is None else intersection(held, wanted)
    return 0 if part is None else volume(part)
