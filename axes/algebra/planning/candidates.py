"""Every sequence of collectives that could be the best one, with its sizes in closed form.

A *leg* takes one form to the next. A redistribution without reductions is at most a slice and one
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
from dataclasses import dataclass, replace

from axes.algebra.planning.form import (
    Atom,
    Digit,
    Form,
    Space,
    Splits,
    atom_size,
    elements,
    largest,
    overlap,
    padded_limit,
    pieces_by,
)
from axes.algebra.sharding import LINEAR, Sharding


@dataclass(frozen=True, slots=True)
class Leg:
    """One step between two forms. Sizes are in elements, of the rank that has most.

    source, target: in digits of `space`.
    outside: where the leg ends if that has no such digits; `target` is the source then.
    group: the digits of the ranks that communicate, in the order of the group; None for all ranks of
        both states.
    op, divisor, resolved: for reductions, what to do and over which digits.
    padded: elements that every rank contributes where the collective needs equal parts.
    flat: whether the parts, end to end, are the larger tile as it lies in memory.
    sent, received: over the links, in `shares` of an element. send, receive: the buffers beside the tiles.
    copied: what packing and unpacking move through memory.
    """

    kind: str
    space: Space
    source: Form
    target: Form
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


Legs = tuple[Leg, ...]
COLLECTIVES = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "reduce_move"})
"""The kinds of steps that communicate."""


def candidates(space: Space, source: Form, target: Form, inside: Callable[[Digit], bool]) -> list[Legs]:
    """The sequences of legs worth weighing, the plainest first.

    inside: whether the ranks of a digit share a node.
    """
    found = list(_sequences(space, source, target, inside))
    if len(found) == 1:
        return found
    limit = padded_limit(space, source.splits, target.splits)
    held = elements(space, source.splits)
    small = [legs for legs in found if all(elements(space, leg.target.splits) <= held for leg in legs[:-1])]
    return bounded(small, limit)


def bounded(found: Iterable[Legs], limit: int) -> list[Legs]:
    """Those that keep every buffer within the limit, or the one that comes nearest."""
    found = list(found)
    fitting = [legs for legs in found if _buffer(legs) <= limit]
    return fitting or [min(found, key=_buffer)]


def _buffer(legs: Legs) -> int:
    return max((max(leg.send, leg.receive) for leg in legs), default=0)


def _sequences(space: Space, source: Form, target: Form, inside: Callable[[Digit], bool]) -> Iterator[Legs]:
    if not resolvable(source, target):
        direct = move(space, source, target)
        yield direct
        yield from _two_tier(space, source, target, direct, inside)
        return
    for legs in reductions(space, source, target):
        yield (*legs, *move(space, legs[-1].target, target))
    yield from _fused(space, source, target)


def reductions(space: Space, source: Form, target: Form) -> list[Legs]:
    """Ways to resolve everything that the target has no longer pending, onto forms in between.

    Different reductions don't mix: they are resolved one after the other, innermost first. Where there are many ways
    to resolve the first ones, those that receive the least go on.
    """

    def end(legs: Legs) -> Form:
        return legs[-1].target if legs else source

    found: list[Legs] = [()]
    while resolved := resolvable(end(found[0]), target):
        few = found if len(found) <= _FEW else sorted(found, key=_received)[:_FEW]
        found = [(*legs, *more) for legs in few for more in _resolving(space, end(legs), target, resolved)]
    return found


_FEW = 36
"""How many ways go on from one kind of reduction to the next."""


def _received(legs: Legs) -> float:
    """Elements that the busiest rank receives."""
    return sum(leg.received / leg.shares for leg in legs)


def resolvable(source: Form, target: Form) -> tuple[Digit, ...]:
    """The digits of the innermost class that the target no longer has pending."""
    kept = {digit for group in target.pending for _, digit in group}
    return tuple(digit for group in source.pending[:1] for _, digit in group if digit not in kept)


# --- moves ----------------------------------------------------------------------------------------


def move(space: Space, source: Form, target: Form) -> Legs:
    """A slice as far as that goes, then one exchange of what is missing."""
    cut = sliced(source, target)
    legs = (Leg("slice", space, source, cut),) if cut.splits != source.splits else ()
    if cut.splits == target.splits:
        return legs
    return (*legs, _exchange(space, cut, target))


def sliced(source: Form, target: Form) -> Form:
    """The source, cut towards the target wherever that needs nothing from other ranks."""
    splits, _ = _towards(source.splits, target.splits, source.free)
    return with_splits(source, splits)


def _towards(source: Splits, target: Splits, digits: Iterable[Digit]) -> tuple[Splits, tuple[Digit, ...]]:
    """Extend each slot by the atoms that the target has next, from `digits`; also what is left."""
    left = dict.fromkeys(digits)
    found: list[tuple[Atom, ...]] = []
    for one, two in zip(source, target, strict=True):
        at = len(one)
        if two[:at] == one:
            while at < len(two) and all(digit in left for digit in two[at]):
                for digit in two[at]:
                    del left[digit]
                at += 1
            found.append(two[:at])
        else:
            found.append(one)
    return tuple(found), tuple(left)


def with_splits(form: Form, splits: Splits) -> Form:
    """The form split so, with the digits that it takes for that no longer free."""
    taken = {digit for slot in splits for atom in slot for digit in atom}
    return replace(form, splits=splits, free=tuple(digit for digit in form.free if digit not in taken))


def _exchange(space: Space, source: Form, target: Form) -> Leg:
    changed = _changed(space, source, target)
    if all(one[: len(two)] == two for one, two in zip(source.splits, target.splits, strict=True)):
        return _gather(space, source, target, changed)
    received = elements(space, target.splits) - overlap(space, source.splits, target.splits)
    sent = _most_sent(space, source, target, received)
    kind = "permute" if _is_permutation(space, source.splits, target.splits) else "all_to_all"
    copied = 0 if kind == "permute" else 2 * (sent + received)
    group = tuple(sorted(changed, key=lambda digit: -digit[1]))
    return Leg(
        kind, space, source, target, group, sent=sent, received=received, send=sent, receive=received, copied=copied
    )


def _changed(space: Space, source: Form, target: Form) -> tuple[Digit, ...]:
    """The digits of the ranks that exchange, in the order of the slots.

    They are those after the common beginning of each slot. Where the source is the coarser there, the
    digits over which it is replicated only choose what of it is wanted, and ranks that agree in them
    have all of that among themselves, in equal parts if the slot divides.
    """
    found: dict[Digit, None] = {}
    for size, one, two in zip(space.sizes, source.splits, target.splits, strict=True):
        same = 0
        while same < min(len(one), len(two)) and one[same] == two[same]:
            same += 1
        alone = set(source.free) if same == len(one) and size % pieces_by(two) == 0 else set()
        after = (digit for side in (one, two) for atom in side[same:] for digit in atom)
        found.update(dict.fromkeys(digit for digit in after if digit not in alone))
    return tuple(found)


def _gather(space: Space, source: Form, target: Form, group: tuple[Digit, ...]) -> Leg:
    size = math.prod(n for n, _ in group)
    padded = elements(space, source.splits)
    flat = is_flat(space, source.splits, target.splits)
    receive = 0 if flat else size * padded
    moved = (size - 1) * padded
    return Leg(
        "all_gather",
        space,
        source,
        target,
        group,
        padded=padded,
        flat=flat,
        sent=moved,
        received=moved,
        send=0 if tiles_are_even(space, source.splits) else padded,
        receive=receive,
        copied=2 * receive,
    )


def _most_sent(space: Space, source: Form, target: Form, received: int) -> int:
    """What the busiest rank sends: balanced, so never more than is received, save for uneven tiles."""
    if tiles_are_even(space, source.splits) and tiles_are_even(space, target.splits):
        return received
    copies = _product(target.free) * elements(space, source.splits)
    return max(received, -(-copies // _product(source.free)))


def _is_permutation(space: Space, source: Splits, target: Splits) -> bool:
    """Whether every target tile is one whole source tile."""
    return all(
        pieces_by(one) == pieces_by(two)
        and (size % pieces_by(one) == 0 or [*map(atom_size, one)] == [*map(atom_size, two)])
        for size, one, two in zip(space.sizes, source, target, strict=True)
    )


def _two_tier(
    space: Space, source: Form, target: Form, direct: Legs, inside: Callable[[Digit], bool]
) -> Iterator[Legs]:
    """Move to a target that is also split within the nodes, then gather there.

    Without it, every member of a node fetches the same bytes from other nodes.
    """
    if not direct or all(map(inside, direct[-1].group or ())):
        return
    near = tuple(digit for digit in target.free if inside(digit))
    for splits in appended(space, target.splits, near):
        between = with_splits(target, splits)
        legs = move(space, source, between)
        if legs and legs[-1].kind in COLLECTIVES:
            yield (*legs, *move(space, between, target))


def appended(space: Space, splits: Splits, digits: Sequence[Digit]) -> Iterator[Splits]:
    """The digits at the minor end of one slot, each slot in turn; nothing where there are none.

    Where no slot divides by all of them, also one digit after the other wherever it divides.
    """
    if not digits:
        return
    divides = False
    for at in range(len(splits)):
        grown = _grown(splits, at, digits)
        even = space.sizes[at] % pieces_by(grown[at]) == 0
        divides = divides or even
        if even or space.factors[space.dims[at]] is None:
            yield grown
    if not divides:
        spread: Splits | None = splits
        for digit in digits:
            spread = None if spread is None else _placed(space, spread, digit)
        if spread is not None:
            yield spread


def _placed(space: Space, splits: Splits, digit: Digit) -> Splits | None:
    """The digit at the end of the first slot that it divides, or None where there is none."""
    grown = (_grown(splits, at, (digit,)) for at in range(len(splits)))
    even = (found for at, found in enumerate(grown) if space.sizes[at] % pieces_by(found[at]) == 0)
    return next(even, None)


def _grown(splits: Splits, at: int, digits: Iterable[Digit]) -> Splits:
    return (*splits[:at], (*splits[at], *((digit,) for digit in digits)), *splits[at + 1 :])


# --- reductions -----------------------------------------------------------------------------------


def _resolving(space: Space, source: Form, target: Form, resolved: tuple[Digit, ...]) -> Iterator[Legs]:
    """Ways to resolve the innermost class, each onto another form."""
    summed = without(source, resolved)
    cut, left = _towards(source.splits, target.splits, source.free)
    yield _all_reduce(space, source, resolved, cut)
    for splits in appended(space, cut, left):
        yield _all_reduce(space, source, resolved, splits)
    cut, left = _towards(source.splits, target.splits, summed.free)
    scattered = tuple(digit for digit in left if digit in resolved)
    if not scattered:
        yield _reduce_scatter(space, source, resolved, cut)
    for splits in appended(space, cut, scattered):
        yield _reduce_scatter(space, source, resolved, splits)
    if left != scattered:
        for splits in appended(space, cut, left):
            yield _reduce_scatter(space, source, resolved, splits)


def without(form: Form, resolved: Sequence[Digit]) -> Form:
    """The form with these digits no longer pending but free."""
    pending = tuple(tuple(item for item in group if item[1] not in resolved) for group in form.pending)
    free = tuple(sorted((*form.free, *resolved), key=lambda digit: -digit[1]))
    return replace(form, free=free, pending=tuple(group for group in pending if group))


def reduction(form: Form, resolved: Sequence[Digit]) -> tuple[str, int]:
    """`(op, divisor)`: a mean is a sum, divided once by the sizes of its digits."""
    ops = {digit: op for op, digit in form.pending[0]}
    op = ops[resolved[0]]
    divisor = math.prod(digit[0] for digit in resolved if ops[digit] == "mean")
    return ("sum", divisor) if op in LINEAR else (op, 1)


def _all_reduce(space: Space, source: Form, resolved: tuple[Digit, ...], splits: Splits) -> Legs:
    cut = with_splits(source, splits)
    legs = (Leg("slice", space, source, cut),) if splits != source.splits else ()
    op, divisor = reduction(source, resolved)
    size, held = _product(resolved), elements(space, splits)
    moved = 2 * (size - 1) * held
    group = tuple(sorted(resolved, key=lambda digit: -digit[1]))
    leg = Leg(
        "all_reduce",
        space,
        cut,
        without(cut, resolved),
        group,
        op=op,
        divisor=divisor,
        resolved=resolved,
        sent=moved,
        received=moved,
        shares=size,
    )
    return (*legs, leg)


def _reduce_scatter(space: Space, source: Form, resolved: tuple[Digit, ...], splits: Splits) -> Legs:
    result = with_splits(without(source, resolved), splits)
    cut = sliced(source, result)
    legs = (Leg("slice", space, source, cut),) if cut.splits != source.splits else ()
    op, divisor = reduction(source, resolved)
    group = tuple(digit for slot in splits for atom in slot for digit in atom if digit in resolved)
    size, padded = _product(group), elements(space, splits)
    flat = is_flat(space, splits, cut.splits) and elements(space, cut.splits) == size * padded
    send = 0 if flat else size * padded
    leg = Leg(
        "reduce_scatter",
        space,
        cut,
        result,
        group,
        op=op,
        divisor=divisor,
        resolved=resolved,
        padded=padded,
        flat=flat,
        sent=(size - 1) * padded,
        received=(size - 1) * padded,
        send=send,
        receive=0 if tiles_are_even(space, splits) else padded,
        copied=2 * send,
    )
    return (*legs, leg)


def _fused(space: Space, source: Form, target: Form) -> Iterator[Legs]:
    """One exchange in which each rank receives its part from all of `resolved` and reduces it."""
    resolved = resolvable(source, target)
    if resolvable(without(source, resolved), target):
        return
    size, wanted = _product(resolved), elements(space, target.splits)
    if size * wanted > padded_limit(space, source.splits, source.splits):
        return
    cut = sliced(source, target)
    legs = (Leg("slice", space, source, cut),) if cut.splits != source.splits else ()
    op, divisor = reduction(source, resolved)
    received = size * wanted - overlap(space, cut.splits, target.splits)
    sent = _most_sent(space, cut, target, received)
    digits = {*resolved, *_changed(space, cut, target)}
    leg = Leg(
        "reduce_move",
        space,
        cut,
        target,
        tuple(sorted(digits, key=lambda digit: -digit[1])),
        op=op,
        divisor=divisor,
        resolved=resolved,
        sent=sent,
        received=received,
        send=sent,
        receive=received,
        copied=2 * sent + (size + 1) * wanted,
    )
    yield (*legs, leg)


# --- shapes ---------------------------------------------------------------------------------------


def is_flat(space: Space, fine: Splits, coarse: Splits) -> bool:
    """Whether the fine tiles of a group, end to end, *are* the coarse tile as it lies in memory.

    So it is where one slot differs, nothing comes before it, and all pieces are equal.
    """
    if not tiles_are_even(space, fine):
        return False
    differing = [at for at, (one, two) in enumerate(zip(fine, coarse, strict=True)) if one != two]
    if len(differing) != 1:
        return False
    at = differing[0]
    leading = math.prod(map(largest, space.sizes[:at], coarse[:at]))
    return leading == 1


def tiles_are_even(space: Space, splits: Splits) -> bool:
    """Whether all tiles are equally large."""
    return all(size % pieces_by(atoms) == 0 for size, atoms in zip(space.sizes, splits, strict=True))


def _product(digits: Iterable[Digit]) -> int:
    return math.prod(size for size, _ in digits)
