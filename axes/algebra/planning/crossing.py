"""Where source and target have no common digits: other factors of the same ranks, or other ranks.

Two by three against three by two of six ranks, a dim whose factors are cut across, a training island
and a generation island: here the tiles of all ranks are looked at, one by one. Reductions still happen
in the source's own digits. Then one exchange takes what lies in one to where it belongs in the other.

Between two sets of ranks every byte crosses once: to a target whose replicas share it, each a part,
which they then gather among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from axes.algebra.errors import ShardingError
from axes.algebra.layout import Layout
from axes.algebra.planning.candidates import (
    Leg,
    Legs,
    appended,
    bounded,
    move,
    reduction,
    reductions,
    resolvable,
    with_splits,
    without,
)
from axes.algebra.planning.exchange import Deal
from axes.algebra.planning.form import Digit, Form, Space, alone, common, padded_limit, sharding_of_form
from axes.algebra.planning.step import deal_of
from axes.algebra.sharding import ShardedDim, ShardedFactor, Sharding


def crossings(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> list[Legs]:
    """The sequences of legs worth weighing between two shardings without common digits.

    Raises `ShardingError` where the target keeps pending what the source hasn't.
    """
    same = source.universe == target.universe
    whole = ShardedDim((ShardedFactor("_"),))
    kept = Sharding(source.mesh, (whole,) * source.ndim, target.pending if same else ())
    aligned = common(source, kept, shape)
    if aligned is None or not (same or not target.pending):
        raise ShardingError(
            f"nothing can become pending on other axes than it is\n  source  {source}\n  target  {target}"
        )
    space, start, wanted = aligned
    limit = max(padded_limit(space, start.splits, start.splits), _padded(target, shape))
    return bounded(_sequences(space, start, wanted, target, shape, same), limit)


def _padded(target: Sharding, shape: tuple[int, ...]) -> int:
    space, form = alone(replace(target, pending=()), shape)
    return padded_limit(space, form.splits, form.splits)


def _sequences(
    space: Space, source: Form, kept: Form, target: Sharding, shape: tuple[int, ...], same: bool
) -> Iterator[Legs]:
    ends = list(_ends(space.origin, target, shape, same))
    for legs in reductions(space, source, kept):
        form = legs[-1].target if legs else source
        for between, gather in ends:
            yield (*legs, *_meet(space, form, between, shape, same), *gather)
    if same and resolvable(source, kept):
        yield from _fused(space, source, kept, target, shape)


def _ends(source: Sharding, target: Sharding, shape: tuple[int, ...], same: bool) -> Iterator[tuple[Sharding, Legs]]:
    """Where the exchange may end, and what then remains to be done among the target's ranks."""
    space, form = alone(target, shape)
    shares = [] if same else [with_splits(form, s) for s in appended(space, form.splits, form.free)]
    for between in shares:
        yield sharding_of_form(space, between), move(space, between, form)
    if not shares or set(source.universe.ranks) & set(target.universe.ranks):
        yield target, ()


def _meet(space: Space, form: Form, target: Sharding, shape: tuple[int, ...], same: bool) -> Legs:
    """One exchange from a form of the source to a sharding of the target."""
    source = sharding_of_form(space, form)
    group = _line(form) if same else None
    deal = _deal(source, target, shape, group)
    received = deal.most_received
    if not received:
        whole = same and source.dims == target.dims
        return () if whole else (Leg("slice", space, form, form, outside=target),)
    sent = deal.most_sent
    kind = "permute" if deal.is_permutation() else "all_to_all"
    copied = 0 if kind == "permute" else 2 * (sent + received)
    return (
        Leg(
            kind,
            space,
            form,
            form,
            group,
            target,
            sent=sent,
            received=received,
            send=sent,
            receive=received,
            copied=copied,
        ),
    )


def _fused(space: Space, source: Form, kept: Form, target: Sharding, shape: tuple[int, ...]) -> Iterator[Legs]:
    resolved = resolvable(source, kept)
    if resolvable(without(source, resolved), kept):
        return
    size = math.prod(digit[0] for digit in resolved)
    if size * target.largest_tile(shape) > padded_limit(space, source.splits, source.splits):
        return
    start, group = sharding_of_form(space, source), _line(without(source, resolved))
    op, divisor = reduction(source, resolved)
    deal = _deal(start, target, shape, group, resolved)
    received, sent = deal.most_received, deal.most_sent
    leg = Leg(
        "reduce_move",
        space,
        source,
        source,
        group,
        target,
        op,
        divisor,
        resolved,
        sent=sent,
        received=received,
        send=sent,
        receive=received,
        copied=2 * sent + (size + 1) * target.largest_tile(shape),
    )
    yield (leg,)


def _line(form: Form) -> tuple[Digit, ...]:
    """The digits that aren't pending: what stays pending isn't mixed."""
    split = (digit for slot in form.splits for atom in slot for digit in atom)
    return tuple(sorted((*form.free, *split), key=lambda digit: -digit[1]))


def _deal(
    source: Sharding,
    target: Sharding,
    shape: tuple[int, ...],
    group: tuple[Digit, ...] | None,
    resolved: Sequence[Digit] = (),
) -> Deal:
    members = None if group is None else Layout.of(group)
    return deal_of(source, target, shape, members, source.universe.rank(0), Layout.of(resolved), 1)
