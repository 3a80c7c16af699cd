"""Every sequence of collectives that could be the best one, with its sizes in closed form.

A *stage* takes one state to the next. A redistribution without reductions is at most a slice and one
exchange, which receives exactly what is missing. With reductions over the digits Q it is one of:

- an all-reduce over Q, after slices, and then a move;
- a reduce-scatter over Q onto boxes on any dims, after slices, and then a move;
- an exchange in which each rank receives its part from all of Q and reduces it itself.

Where a reduce-scatter puts Q decides how much the move after it has to fetch. What the target wants
next on a dim goes there; the rest goes to the end of one dim, each in turn. Measured against every
possible intermediate state on 2x2x2, these few reach the same optimum for every pair of states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from axes.algebra.planning.digits import Digit, Space, Splits, State, descending, digits_of, size_of
from axes.algebra.sharding import Sharding, kind_of


class Stage(NamedTuple):
    """One step between two states. Sizes are in elements, of the rank that has most.

    outside: where the step ends if that has no such digits; `target` is the source then.
    group: the digits of the ranks that communicate, in the order of the group; None for all ranks of
        both states.
    op, divisor, resolved: for reductions, what to do and over which digits.
    padded: elements that every rank contributes where the collective needs equal parts.
    flat: whether the parts, end to end, are the larger tile as it lies in memory.
    sent, received: over the links, in `shares` of an element. send, receive: the buffers beside the tiles.
    copied: what packing and unpacking move through memory.
    """

    kind: str
    source: State
    target: State
    group: tuple[Digit, ...] | None = ()
    outside: Sharding | None = None
    op: str | None = None
    divisor: int = 1
    resolved: tuple[Digit, ...] = ()
    padded: int = 0
    flat: bool = False
    sent: int = 0
    received: int = 0
    shares: int = 1
    send: int = 0
    receive: int = 0
    copied: int = 0


Stages = tuple[Stage, ...]
COLLECTIVES = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "reduce_move"})
"""The kinds of steps that communicate."""


def candidates(space: Space, source: State, target: State, inside: Callable[[Digit], bool]) -> list[Stages]:
    """The sequences of stages worth weighing, the plainest first.

    inside: whether the ranks of a digit share a node.
    """
    if resolvable(source, target):
        found = [(*first, *move(space, first[-1].target, target)) for first in reductions(space, source, target)]
        found += _fused(space, source, target)
    else:
        direct = move(space, source, target)
        found = [direct, *_two_tier(space, source, target, direct, inside)]
    if len(found) == 1:
        return found
    held = space.largest(source.splits)
    small = [stages for stages in found if all(space.largest(each.target.splits) <= held for each in stages[:-1])]
    return bounded(small, space.padded(source.splits, target.splits))


def bounded(found: Sequence[Stages], limit: int) -> list[Stages]:
    """Those that keep every buffer within the limit, or the one that comes nearest."""

    def buffer(stages: Stages) -> int:
        return max([max(stage.send, stage.receive) for stage in stages], default=0)

    return [stages for stages in found if buffer(stages) <= limit] or [min(found, key=buffer)]


def resolvable(source: State, target: State) -> tuple[Digit, ...]:
    """The digits of the innermost class that the target no longer has pending."""
    kept = {digit for group in target.pending for _, digit in group}
    return tuple([digit for group in source.pending[:1] for _, digit in group if digit not in kept])


# --- moves ----------------------------------------------------------------------------------------


def move(space: Space, source: State, target: State) -> Stages:
    """A slice as far as that goes, then one exchange of what is missing."""
    first, cut = _sliced(source, target.splits)
    return first if cut.splits == target.splits else (*first, _exchange(space, cut, target))


def _sliced(source: State, splits: Splits) -> tuple[Stages, State]:
    """The source cut towards `splits` wherever that needs nothing from other ranks; and the stage that does it."""
    cut = source.split(_towards(source.splits, splits, source.free)[0])
    return (() if cut.splits == source.splits else (Stage("slice", source, cut),)), cut


def _towards(source: Splits, target: Splits, pool: Iterable[Digit]) -> tuple[Splits, tuple[Digit, ...]]:
    """Extend each slot by the atoms that the target has next, from the digits of `pool`; also what is left of it."""
    left, found = dict.fromkeys(pool), []
    for now, two in zip(source, target, strict=True):
        while two[: len(now)] == now != two and all(digit in left for digit in two[len(now)]):
            for digit in two[len(now)]:
                del left[digit]
            now = two[: len(now) + 1]
        found.append(now)
    return tuple(found), tuple(left)


def _exchange(space: Space, source: State, target: State) -> Stage:
    group, splits = _changed(space, source, target), (source.splits, target.splits)
    if all(one[: len(two)] == two for one, two in zip(*splits, strict=True)):
        return _equal_parts(space, "all_gather", source, target, group)
    received = space.largest(target.splits) - space.overlap(*splits)
    kind = "permute" if space.is_permutation(*splits) else "all_to_all"
    return exchanged(kind, source, target, descending(group), received, _most_sent(space, source, target, received))


def exchanged(
    kind: str,
    source: State,
    target: State,
    group: tuple[Digit, ...] | None,
    received: int,
    sent: int,
    reduced: int = 0,
    **how: Any,
) -> Stage:
    """An exchange in which the busiest ranks send and receive so much, and read or write `reduced` to reduce it."""
    copied = 0 if kind == "permute" else 2 * sent + (reduced or 2 * received)
    sizes: dict[str, Any] = {"sent": sent, "received": received, "send": sent, "receive": received}
    return Stage(kind, source, target, group, copied=copied, **sizes, **how)


def _equal_parts(space: Space, kind: str, source: State, target: State, group: tuple[Digit, ...], **how: Any) -> Stage:
    """A gather of parts that are padded to one size, or a reduction that is scattered in such."""
    gathers, size = kind == "all_gather", size_of(group)
    fine, coarse = (source.splits, target.splits) if gathers else (target.splits, source.splits)
    padded = space.largest(fine)
    flat = space.is_flat(fine, coarse) and space.largest(coarse) == size * padded
    whole, part = 0 if flat else size * padded, 0 if space.is_even(fine) else padded
    buffers: dict[str, Any] = {"send": part, "receive": whole} if gathers else {"send": whole, "receive": part}
    sizes: dict[str, Any] = {"sent": (size - 1) * padded, "received": (size - 1) * padded, "copied": 2 * whole}
    return Stage(kind, source, target, group, padded=padded, flat=flat, **sizes, **buffers, **how)


def _changed(space: Space, source: State, target: State) -> tuple[Digit, ...]:
    """The digits of the ranks that exchange, in the order of the slots.

    They are those after the common beginning of each slot. Where the source is the coarser there, the
    digits over which it is replicated only choose what of it is wanted, and ranks that agree in them
    have all of that among themselves, in equal parts if the slot divides.
    """
    found: dict[Digit, None] = {}
    for at, (one, two) in enumerate(zip(source.splits, target.splits, strict=True)):
        same = sum([1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))])
        alone = source.free if same == len(one) and space.divides(at, target.splits) else ()
        after = digits_of((one[same:], two[same:]))
        found.update(dict.fromkeys([digit for digit in after if digit not in alone]))
    return tuple(found)


def _most_sent(space: Space, source: State, target: State, received: int) -> int:
    """What the busiest rank sends: balanced, so never more than is received, save for uneven tiles."""
    if space.is_even(source.splits, target.splits):
        return received
    copies = size_of(target.free) * space.largest(source.splits)
    return max(received, -(-copies // size_of(source.free)))


def _two_tier(
    space: Space, source: State, target: State, direct: Stages, inside: Callable[[Digit], bool]
) -> Iterator[Stages]:
    """Move to a target that is also split within the nodes, then gather there.

    Without it, every member of a node fetches the same bytes from other nodes.
    """
    if not direct or all(map(inside, direct[-1].group or ())):
        return
    for splits in appended(space, target.splits, tuple(filter(inside, target.free))):
        between = target.split(splits)
        stages = move(space, source, between)
        if stages and stages[-1].kind in COLLECTIVES:
            yield (*stages, *move(space, between, target))


def appended(space: Space, splits: Splits, more: Sequence[Digit]) -> list[Splits]:
    """The digits at the minor end of one slot, each slot in turn; nothing where there are none.

    Where no slot divides by all of them, also one digit after the other wherever it divides.
    """
    if not more:
        return []
    whole = [len(sizes) == 1 for sizes in space.factors for _ in sizes]
    grown = [_grown(splits, at, more) for at in range(len(splits))]
    even = [space.divides(at, each) for at, each in enumerate(grown)]
    found = [each for at, each in enumerate(grown) if even[at] or whole[at]]
    spread: Splits | None = None if any(even) else splits
    for digit in more if spread is not None else ():
        some = [_grown(spread, at, (digit,)) for at in range(len(splits))] if spread is not None else []
        spread = next((each for at, each in enumerate(some) if space.divides(at, each)), None)
    return found if spread is None else [*found, spread]


def _grown(splits: Splits, at: int, more: Iterable[Digit]) -> Splits:
    return (*splits[:at], (*splits[at], *[(digit,) for digit in more]), *splits[at + 1 :])


# --- reductions -----------------------------------------------------------------------------------

_FEW = 36
"""How many ways go on from one kind of reduction to the next."""


def reductions(space: Space, source: State, target: State) -> list[Stages]:
    """Ways to resolve everything that the target has no longer pending, onto states in between.

    Different reductions don't mix: they are resolved one after the other, innermost first. Where there are many ways
    to resolve the first ones, those that receive the least go on.
    """
    found: list[Stages] = [()]
    while resolved := resolvable(found[0][-1].target if found[0] else source, target):
        if len(found) > _FEW:
            found = sorted(found, key=lambda stages: sum([each.received / each.shares for each in stages]))[:_FEW]
        ends = [(stages, stages[-1].target if stages else source) for stages in found]
        found = [(*stages, *more) for stages, end in ends for more in _resolving(space, end, target, resolved)]
    return found


def _resolving(space: Space, source: State, target: State, resolved: tuple[Digit, ...]) -> Iterator[Stages]:
    """Ways to resolve the innermost class, each onto another state."""
    cut, left = _towards(source.splits, target.splits, source.free)
    onto = [cut, *appended(space, cut, left)]
    cut, left = _towards(source.splits, target.splits, source.resolved(resolved).free)
    scattered = tuple([digit for digit in left if digit in resolved])
    onto += appended(space, cut, scattered) if scattered else [cut]
    if left != scattered:
        onto += appended(space, cut, left)
    for splits in onto:
        yield _reduced(space, source, resolved, splits)


def _reduced(space: Space, source: State, resolved: tuple[Digit, ...], splits: Splits) -> Stages:
    """The innermost class reduced, and scattered onto those of its digits that `splits` has: all, or none."""
    first, cut = _sliced(source, splits)
    after, how = source.resolved(resolved).split(splits), reduction(source, resolved)
    group = tuple([digit for digit in digits_of(splits) if digit in resolved])
    if group:
        return (*first, _equal_parts(space, "reduce_scatter", cut, after, group, **how))
    size = size_of(resolved)
    moved = 2 * (size - 1) * space.largest(splits)
    sizes: dict[str, Any] = {"sent": moved, "received": moved, "shares": size}
    return (*first, Stage("all_reduce", cut, after, descending(resolved), **sizes, **how))


def reduction(state: State, resolved: tuple[Digit, ...]) -> dict[str, Any]:
    """What resolves digits of the innermost class: a mean is a sum, divided once by the sizes of its digits."""
    ops = {digit: op for op, digit in state.pending[0]}
    divisor = math.prod([digit[0] for digit in resolved if ops[digit] == "mean"])
    return {"op": kind_of(ops[resolved[0]]), "divisor": divisor, "resolved": resolved}


def _fused(space: Space, source: State, target: State) -> list[Stages]:
    """One exchange in which each rank receives its part from all of `resolved` and reduces it."""
    first, cut = _sliced(source, target.splits)
    wanted = space.largest(target.splits)
    resolved = fusible(space, source, target, wanted)
    if not resolved:
        return []
    received = size_of(resolved) * wanted - space.overlap(cut.splits, target.splits)
    sent, reduced = _most_sent(space, cut, target, received), (size_of(resolved) + 1) * wanted
    group, how = descending({*resolved, *_changed(space, cut, target)}), reduction(source, resolved)
    return [(*first, exchanged("reduce_move", cut, target, group, received, sent, reduced, **how))]


def fusible(space: Space, source: State, target: State, wanted: int) -> tuple[Digit, ...]:
    """The digits that one exchange can resolve: of the only class, if no rank receives more than it has."""
    resolved = resolvable(source, target)
    one = not resolvable(source.resolved(resolved), target)
    return resolved if one and size_of(resolved) * wanted <= space.padded(source.splits) else ()
