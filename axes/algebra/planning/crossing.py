"""Where source and target have no common digits: other factors of the same ranks, or other ranks.

Two by three against three by two of six ranks, a dim whose factors are cut across, a training island
and a generation island: here the tiles of all ranks are looked at, one by one. Reductions still happen
in the source's own digits. Then one exchange takes what lies in one to where it belongs in the other.

Between two sets of ranks every byte crosses once: to a target whose replicas share it, each a part,
which they then gather among themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

from axes.algebra.errors import ShardingError
from axes.algebra.layout import Layout
from axes.algebra.planning.candidates import (
    Stage,
    Stages,
    appended,
    bounded,
    exchanged,
    fusible,
    move,
    reduction,
    reductions,
)
from axes.algebra.planning.digits import Digit, Space, State, common, descending, digits_of, size_of
from axes.algebra.planning.exchange import GroupExchange, group_between
from axes.algebra.sharding import Sharding
from axes.algebra.splits import split

Shape = tuple[int, ...]


def crossings(source: Sharding, target: Sharding, shape: Shape, ranks_per_node: int) -> tuple[Space, list[Stages]]:
    """The sequences of stages worth weighing between two shardings without common digits.

    Raises `ShardingError` where the target keeps pending what the source hasn't.
    """
    same = source.universe == target.universe
    kept = Sharding(source.mesh, (split(),) * source.ndim, target.pending if same else ())
    found, there = common(source, kept, shape), common(target, target, shape)
    if found is None or there is None or not (same or not target.pending):
        raise ShardingError(
            f"nothing can become pending on other axes than it is\n  source  {source}\n  target  {target}"
        )
    (space, start, waiting), (outside, end, _) = found, there
    ends = list(_ends(outside, end, target, set(source.universe.ranks) & set(target.universe.ranks), same))
    sequences = []
    for stages in reductions(space, start, waiting):
        state = stages[-1].target if stages else start
        sequences += [
            (*stages, *_meet(space, state, between, shape, ranks_per_node), *gather) for between, gather in ends
        ]
    if same:
        sequences += _fused(space, start, waiting, target, shape, ranks_per_node)
    return space, bounded(sequences, max(space.padded(start.splits), outside.padded(end.splits)))


def _ends(space: Space, end: State, target: Sharding, both: set[int], same: bool) -> Iterator[tuple[Sharding, Stages]]:
    """Where the exchange may end, and what then remains to be done among the target's ranks."""
    shares = [] if same else [end.split(splits) for splits in appended(space, end.splits, end.free)]
    for between in shares:
        yield space.sharding(between), tuple([stage._replace(outside=target) for stage in move(space, between, end)])
    if both or not shares:
        yield target, ()


def _meet(space: Space, state: State, target: Sharding, shape: Shape, ranks_per_node: int) -> Stages:
    """One exchange from a state of the source to a sharding of the target."""
    source, same = space.sharding(state), space.origin.universe == target.universe
    group = _line(state) if same else None
    messages = _messages(source, target, shape, group, (), ranks_per_node)
    if not messages.most_received:
        whole = same and source.dims == target.dims
        return () if whole else (Stage("slice", state, state, outside=target),)
    kind = "permute" if messages.is_permutation() else "all_to_all"
    return (exchanged(kind, state, state, group, messages.most_received, messages.most_sent, outside=target),)


def _fused(
    space: Space, source: State, kept: State, target: Sharding, shape: Shape, ranks_per_node: int
) -> list[Stages]:
    wanted = target.largest_tile(shape)
    resolved = fusible(space, source, kept, wanted)
    if not resolved:
        return []
    group, how = _line(source.resolved(resolved)), reduction(source, resolved)
    messages = _messages(space.sharding(source), target, shape, group, resolved, ranks_per_node)
    sizes, reduced = (messages.most_received, messages.most_sent), (size_of(resolved) + 1) * wanted
    return [(exchanged("reduce_move", source, source, group, *sizes, reduced, outside=target, **how),)]


def _messages(
    source: Sharding,
    target: Sharding,
    shape: Shape,
    group: tuple[Digit, ...] | None,
    resolved: tuple[Digit, ...],
    ranks_per_node: int,
) -> GroupExchange:
    members, first = None if group is None else Layout.of(group), source.universe.ranks[0]
    return group_between(source, target, shape, members, first, Layout.of(resolved), ranks_per_node)


def _line(state: State) -> tuple[Digit, ...]:
    """The digits that aren't pending: what stays pending isn't mixed."""
    return descending((*state.free, *digits_of(state.splits)))
