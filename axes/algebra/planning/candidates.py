"""Every sequence of collectives that could be the best one, with its sizes in closed form.

A *digit* `(size, stride)` is a digit of the rank's position. Where the source and the target have
common digits, each dim is split by a sequence of *atoms*, major first, and two sequences with the
same beginning cut the dim the same way to there. So "is a slice of", "is gathered from" and "how much
of it do I have already" are questions about prefixes, whatever the number of ranks.

An atom is one digit where the dim divides. Where it doesn't, a split is one `torch.chunk` that
neither merges nor splits, so all its digits stay together in one atom.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2 tp=2", "both = dp tp")
>>> source, target = mesh.sharding("a@both b"), mesh.sharding("a b@tp")
>>> s, t = common(source, target, (8, 8))
>>> s.splits, t.splits, t.free
(((((2, 2),), ((2, 1),)), ()), ((), (((2, 1),),)), ((2, 2),))
>>> common(source, target, (5, 8))[0].splits          # five elements: the four pieces stay one split
((((2, 2), (2, 1)),), ())

A *slot* is a dim, or a factor of a dim that both sides write, or can write, as a group of the same factors (`opened`).

A *stage* takes one state to the next. A redistribution without reductions is at most a slice and one
exchange, which receives exactly what is missing. With reductions over the digits Q it is one of:

- an all-reduce over Q, after slices, and then a move;
- a reduce-scatter over Q onto boxes on any dims, after slices, and then a move;
- an exchange in which each rank receives its part from all of Q and reduces it itself.

Where a reduce-scatter puts Q decides how much the move after it has to fetch. What the target wants
next on a dim goes there; the rest goes to the end of one dim, each in turn. Measured against every
possible intermediate state on 2x2x2, these few reach the same optimum for every pair of states.

Where source and target have no common digits (two by three against three by two of six ranks, a dim whose
factors are cut across, a training island and a generation island), their states are of two spaces.
Reductions happen in the source's own digits. The exchange looks at the tiles of all ranks, one by one.
Between two sets of ranks every byte crosses once: to a target whose replicas share it, each a part,
which they then gather among themselves.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, takewhile
from operator import itemgetter
from typing import Any, NamedTuple

from axes.algebra.chunks import largest_chunk, smallest_chunk
from axes.algebra.cost import node_size
from axes.algebra.layout import Layout, Universe, common_digits
from axes.algebra.planning.exchange import group_between
from axes.algebra.sharding import Sharding, Slot, Slots, classes, kind_of
from axes.algebra.sizes import Shape
from axes.algebra.splits import handed_down

Digit = tuple[int, int]
"""`(size, stride)` of one digit of the position."""

Atom = tuple[Digit, ...]
"""The digits of one split, slowest first."""

Splits = tuple[tuple[Atom, ...], ...]
"""For each slot its atoms, major first."""

Factors = tuple[tuple[int, ...], ...]
"""For each dim the sizes of its factors; its own alone where it is one slot."""

Classes = tuple[tuple[tuple[str, Digit], ...], ...]
"""Pending reductions, innermost first, in classes that are resolved together: the slowest digits first in each."""


class Space(NamedTuple):
    """What the states of one side of a plan share: all of them, where both sides have common digits.

    origin: the sharding that lends its mesh to those in between.
    factors: for each dim the sizes of its slots. sizes: of each slot.
    """

    origin: Sharding
    factors: Factors
    sizes: tuple[int, ...]
    ranks_per_node: int

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        return tuple(map(math.prod, self.factors))

    def divides(self, at: int, splits: Splits) -> bool:
        """Whether all pieces of a slot are equally large."""
        return self.sizes[at] % size_of(chain(*splits[at])) == 0

    def inside(self, digit: Digit) -> bool:
        """Whether the ranks of a digit share a node."""
        return node_size(self.origin.universe, (digit,), self.ranks_per_node) == digit[0]


@dataclass(frozen=True)
class State:
    """How a tensor is sharded, in digits.

    splits: for each slot its atoms. free: the digits of the mesh over which the tensor is replicated. pending: classes.
    """

    space: Space
    splits: Splits
    free: tuple[Digit, ...]
    pending: Classes = ()

    def split(self, splits: Splits) -> State:
        """The state split so, with the digits that it takes for that no longer free."""
        taken = set(digits_of(splits))
        return replace(self, splits=splits, free=tuple([digit for digit in self.free if digit not in taken]))

    def resolved(self, done: Sequence[Digit]) -> State:
        """The state with these digits no longer pending but free."""
        pending = [tuple([item for item in group if item[1] not in done]) for group in self.pending]
        return replace(self, free=descending((*self.free, *done)), pending=tuple(filter(None, pending)))

    @property
    def universe(self) -> Universe:
        """The ranks, in order."""
        return self.space.origin.universe

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """Into how many pieces each slot is split."""
        return tuple([size_of(chain(*atoms)) for atoms in self.splits])

    @cached_property
    def tile(self) -> Shape:
        """The shape of the largest tile."""
        return tuple(map(_largest, self.space.sizes, self.splits))

    @property
    def largest(self) -> int:
        """Elements of the largest tile."""
        return math.prod(self.tile)

    @property
    def is_even(self) -> bool:
        """Whether all tiles are equally large."""
        return not any(map(operator.mod, self.space.sizes, self.pieces))

    @property
    def sharding(self) -> Sharding:
        """The sharding that the state describes."""
        columns = iter([tuple(map(Layout._joined, slot)) for slot in self.splits])
        sizes = [each if len(each) > 1 else (None,) for each in self.space.factors]
        dims = [Slots([Slot(next(columns), size) for size in each]) for each in sizes]
        pending = [(op, Layout._joined([digit])) for group in self.pending for op, digit in group]
        return Sharding(self.space.origin.mesh, tuple(dims), tuple(pending))


# --- two states of one space ----------------------------------------------------------------------


def is_flat(fine: State, coarse: State) -> bool:
    """Whether the fine tiles of a group, end to end, *are* the coarse tile as it lies in memory.

    So it is where one slot differs, nothing comes before it, and all pieces are equal.
    """
    differing = [at for at, (one, two) in enumerate(zip(fine.splits, coarse.splits, strict=True)) if one != two]
    if len(differing) != 1 or not fine.is_even:
        return False
    return math.prod(coarse.tile[: differing[0]]) == 1


def is_permutation(source: State, target: State) -> bool:
    """Whether every tile of the target is one whole tile of the source."""
    slots = zip(source.space.sizes, source.pieces, source.splits, target.splits, strict=True)
    return source.pieces == target.pieces and all(
        size % pieces == 0 or [*map(size_of, mine)] == [*map(size_of, theirs)] for size, pieces, mine, theirs in slots
    )


def overlap(source: State, target: State) -> int:
    """Elements of its target tile that every rank already has, at least.

    Where one sequence of atoms begins with the other the finer piece is within the coarser; where
    they part ways, some rank's pieces don't meet.
    """
    shared = 1
    for size, one, two, wanted in zip(source.space.sizes, source.splits, target.splits, target.tile, strict=True):
        if two[: len(one)] == one:
            shared *= wanted
        elif one[: len(two)] == two:
            shared *= smallest_chunk(size, map(size_of, one))
        else:
            return 0
    return shared


def padded(*sides: State) -> int:
    """What a buffer may hold: the largest of these tiles, dims counted as what their splits pad them to."""
    wholes = list(map(max, zip(*[map(operator.mul, side.tile, side.pieces) for side in sides], strict=True)))
    return max([math.prod([-(-n // pieces) for n, pieces in zip(wholes, side.pieces, strict=True)]) for side in sides])


# --- from shardings -------------------------------------------------------------------------------


def common(source: Sharding, target: Sharding, shape: Shape, ranks_per_node: int = 8) -> tuple[State, State] | None:
    """Both shardings in common digits and slots, or None where there are none.

    The target's mesh must be within the source's; the target is replicated over axes that only the source has.
    Digits are cut at the size of a node where that leaves whole digits, so that each is within a node or across nodes.
    """
    factors, *ends = opened(source, target, shape)
    if max(map(len, chain(*[end.dims for end in ends])), default=1) > 1:
        return None
    space = Space(source, factors, tuple([size for sizes in factors for size in sizes]), ranks_per_node)
    layouts = [source.mesh.extent, target.mesh.extent, *ends[0].used, *ends[1].used]
    refined = common_digits([*layouts, Layout((ranks_per_node,), (1,))]) or common_digits(layouts)
    if refined is None:
        return None

    def state(end: Sharding) -> State:
        splits = tuple([_atoms(size, dim.layouts, refined) for size, dim in zip(space.sizes, end.dims, strict=True)])
        waiting = classes([(op, digit) for op, layout in end.pending for digit in refined[layout]])
        taken = {*digits_of(splits), *[digit for group in waiting for _, digit in group]}
        pending = [tuple(sorted(group, key=lambda item: -item[1][1])) for group in waiting]
        return State(space, splits, tuple([d for d in refined[source.mesh.extent] if d not in taken]), tuple(pending))

    return state(ends[0]), state(ends[1])


def opened(source: Sharding, target: Sharding, shape: Shape) -> tuple[Factors, Sharding, Sharding]:
    """Two shardings of the tensor with a dim for each factor that both have in common, and for each dim these factors.

    A dim of which they have none in common stays as it is.

    >>> from axes.algebra.mesh import Mesh
    >>> mesh = Mesh("tp=2")
    >>> groups, plain = mesh.sharding("(h=4@tp d=3)"), mesh.sharding("h@tp")
    >>> opened(groups, plain, (12,))[0], opened(mesh.sharding("(h=3 d=4@tp)"), plain, (12,))[0]
    (((4, 3),), ((12,),))
    """
    if source.is_plain and target.is_plain:
        return tuple(zip(shape)), source, target
    factors: list[tuple[int, ...]] = []
    ends: tuple[list[Slots], list[Slots]] = ([], [])
    for size, *pair in zip(shape, source.dims, target.dims, strict=True):
        groups = [dim for dim in pair if len(dim) > 1]
        sizes = sizes_of(groups[0]) if groups else (size,)
        found = [_factored(dim, sizes) for dim in pair] if groups else []
        both = [dim for dim in found if dim is not None]
        if len(both) < 2:
            sizes, both = (size,), pair
        factors.append(sizes)
        for dims, dim in zip(ends, both, strict=True):
            dims += [Slots([Slot(slot.layouts)]) for slot in dim] if len(sizes) > 1 else [dim]
    if len(ends[0]) == len(shape):
        return tuple(factors), source, target
    one, two = [replace(end, dims=tuple(dims), names=()) for end, dims in zip((source, target), ends, strict=True)]
    return tuple(factors), one, two


def _factored(dim: Slots, sizes: Shape) -> Slots | None:
    """A dim as slots of these sizes, or None where its splits cut across them."""
    if len(dim) > 1:
        return dim if sizes_of(dim) == sizes else None
    found = handed_down(dim, [size or dim.pieces for size in sizes])
    if found is None or any(map(operator.mod, sizes, [each.pieces for each in found])):
        return None
    return Slots([Slot(each.layouts, size) for size, each in zip(sizes, found, strict=True)])


def sizes_of(dim: Slots) -> Shape:
    """The sizes of a dim's slots, 0 where they are open."""
    return tuple([slot.size or 0 for slot in dim])


def _atoms(size: int, layouts: Iterable[Layout], refined: dict[Layout, Atom]) -> tuple[Atom, ...]:
    """One atom for each digit as long as the dim divides. From the first layout that doesn't divide it on, one for
    each layout: pieces then differ in size, and some divide where others don't."""
    found: list[Atom] = []
    even = True
    for layout in layouts:
        even = even and size % layout.size == 0
        size //= layout.size
        found.extend([(digit,) for digit in refined[layout]] if even else [refined[layout]])
    return tuple(found)


# --- sizes ----------------------------------------------------------------------------------------


def digits_of(splits: Splits) -> list[Digit]:
    """The digits of all splits, slot by slot."""
    return [digit for slot in splits for atom in slot for digit in atom]


def descending(found: Iterable[Digit]) -> tuple[Digit, ...]:
    """Digits, slowest first."""
    return tuple(sorted(found, key=lambda digit: -digit[1]))


def size_of(found: Iterable[Digit]) -> int:
    """How many coordinates some digits have together."""
    return math.prod(map(itemgetter(0), found))


def _largest(size: int, atoms: tuple[Atom, ...]) -> int:
    return largest_chunk(size, map(size_of, atoms))


# --- stages ---------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """One step between two states. Sizes are in elements, of the rank that has most.

    group: the digits of the ranks that communicate, in the order of the group; None for all ranks of
        both states.
    op, divisor, resolved: for reductions, what to do and over which digits.
    sent, received: over the links; of an all-reduce parts of elements. send, receive: the buffers beside the tiles.
    copied: what packing and unpacking move through memory.
    """

    kind: str
    source: State
    target: State
    group: tuple[Digit, ...] | None = ()
    op: str | None = None
    divisor: int = 1
    resolved: tuple[Digit, ...] = ()
    sent: int | Fraction = 0
    received: int | Fraction = 0
    send: int = 0
    receive: int = 0
    copied: int = 0


Stages = tuple[Stage, ...]
COLLECTIVES = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "reduce_move"})
"""The kinds of steps that communicate."""


def candidates(source: State, target: State, kept: State) -> list[Stages]:
    """The sequences of stages worth weighing, the plainest first.

    kept: what the target keeps pending, in the digits of the source: the target itself, where these are its own.
    """
    crosses, found = target.space is not source.space, list[Stages]()
    for first in _reductions(source, kept):
        after = first[-1].target if first else source
        rests = _moves(after, target) if crosses or not first else [_move(after, target)]
        found += [(*first, *rest) for rest in rests]
    found += _fused(source, target, kept)
    if crosses:
        return _bounded(found, max(padded(source), padded(target)))
    if len(found) > 1:
        found = [stages for stages in found if all(each.target.largest <= source.largest for each in stages[:-1])]
    return _bounded(found, padded(source, target))


def _bounded(found: Sequence[Stages], limit: int) -> list[Stages]:
    """Those that keep every buffer within the limit, or the one that comes nearest."""

    def buffer(stages: Stages) -> int:
        return max([max(stage.send, stage.receive) for stage in stages], default=0)

    return [stages for stages in found if buffer(stages) <= limit] or [min(found, key=buffer)]


def _resolvable(source: State, kept: State) -> tuple[Digit, ...]:
    """The digits of the innermost class that the target no longer has pending."""
    pending = {digit for group in kept.pending for _, digit in group}
    return tuple([digit for group in source.pending[:1] for _, digit in group if digit not in pending])


# --- moves ----------------------------------------------------------------------------------------


def _moves(source: State, target: State) -> Iterator[Stages]:
    """The ways to a state without reductions.

    The plain one; and two tiers: to the target as it is split over its replicas as well, and there a gather. Without
    that, every replica fetches the same bytes: those of a node from other nodes, those of an island from another one.
    """
    space, one, two = source.space, source.universe, target.universe
    shares = _appended(target.space, target.splits, target.free) if one != two else []
    if not shares or not {*one.ranks}.isdisjoint(two.ranks):
        direct = _move(source, target)
        yield direct
        if space is target.space and direct and not all(map(space.inside, direct[-1].group or ())):
            shares = _appended(space, target.splits, tuple(filter(space.inside, target.free)))
    for splits in shares:
        between = target.split(splits)
        stages = _move(source, between)
        if one != two or (stages and stages[-1].kind in COLLECTIVES):
            yield (*stages, *_move(between, target))


def _move(source: State, target: State) -> Stages:
    """A slice as far as that goes, then one exchange of what is missing."""
    if source.space is not target.space:
        same = source.sharding.is_equivalent(target.sharding, source.space.shape)
        return () if same else (_exchange(source, target),)
    first, cut = _sliced(source, target.splits)
    if cut.splits == target.splits:
        return first
    if all(one[: len(two)] == two for one, two in zip(cut.splits, target.splits, strict=True)):
        return (*first, _equal_parts("all_gather", cut, target, _changed(cut, target)))
    return (*first, _exchange(cut, target))


def _sliced(source: State, splits: Splits) -> tuple[Stages, State]:
    """The source cut towards `splits` wherever that needs nothing from other ranks; and the stage that does it."""
    cut = source.split(_towards(source.splits, splits, source.free)[0])
    return (() if cut.splits == source.splits else (Stage("slice", source, cut),)), cut


def _towards(source: Splits, target: Splits, pool: Iterable[Digit]) -> tuple[Splits, tuple[Digit, ...]]:
    """Extend each slot by the atoms that the target has next, from the digits of `pool`; also what is left of it."""
    left, found = dict.fromkeys(pool), []
    for now, two in zip(source, target, strict=True):
        while two[: len(now)] == now != two and left.keys() >= {*two[len(now)]}:
            for digit in two[len(now)]:
                del left[digit]
            now = two[: len(now) + 1]
        found.append(now)
    return tuple(found), tuple(left)


def _exchange(source: State, target: State, resolved: tuple[Digit, ...] = ()) -> Stage:
    """One exchange of what is missing, in which each rank may reduce what it gets from all of `resolved`."""
    how, wanted = _reduction(source, resolved), size_of(resolved) * target.largest
    group: tuple[Digit, ...] | None
    if source.space is target.space:
        group, whole = descending({*resolved, *_changed(source, target)}), is_permutation(source, target)
        received = wanted - overlap(source, target)
        sent = _most_sent(source, target, received)
    else:
        group, (received, sent, whole) = _listed(source, target, resolved)
    kind = "reduce_move" if resolved else "permute" if whole else "all_to_all"
    if not received:
        return Stage("slice", source, target)
    copied = 0 if kind == "permute" else 2 * sent + (wanted + target.largest if resolved else 2 * received)
    how |= {"sent": sent, "received": received, "send": sent, "receive": received, "copied": copied}
    return Stage(kind, source, target, group, **how)


def _listed(
    source: State, target: State, resolved: tuple[Digit, ...]
) -> tuple[tuple[Digit, ...] | None, tuple[int, int, bool]]:
    """The group of an exchange between two spaces, what its ranks receive and send at most, and whether that is tiles.

    What stays pending isn't mixed.
    """
    one, two, space = source.sharding, target.sharding, source.space
    left = source.resolved(resolved)
    group = descending((*left.free, *digits_of(left.splits))) if one.universe == two.universe else None
    members = None if group is None else Layout._joined(group)
    how = members, one.universe.ranks[0], Layout._joined(resolved), space.ranks_per_node
    found = group_between(one, two, space.shape, *how)
    return group, (found.most_received, found.most_sent, found.is_permutation())


def _equal_parts(kind: str, source: State, target: State, group: tuple[Digit, ...], **how: Any) -> Stage:
    """A gather of parts that are padded to one size, or a reduction that is scattered in such."""
    gathers, size = kind == "all_gather", size_of(group)
    fine, coarse = (source, target) if gathers else (target, source)
    each = fine.largest
    flat = is_flat(fine, coarse) and coarse.largest == size * each
    whole, part, moved = 0 if flat else size * each, 0 if fine.is_even else each, (size - 1) * each
    send, receive = (part, whole) if gathers else (whole, part)
    return Stage(
        kind, source, target, group, sent=moved, received=moved, send=send, receive=receive, copied=2 * whole, **how
    )


def _changed(source: State, target: State) -> tuple[Digit, ...]:
    """The digits of the ranks that exchange, in the order of the slots.

    They are those after the common beginning of each slot. Where the source is the coarser there, the
    digits over which it is replicated only choose what of it is wanted, and ranks that agree in them
    have all of that among themselves, in equal parts if the slot divides.
    """
    found: dict[Digit, None] = {}
    for at, (one, two) in enumerate(zip(source.splits, target.splits, strict=True)):
        same = sum([1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))])
        alone = source.free if same == len(one) and source.space.sizes[at] % target.pieces[at] == 0 else ()
        after = digits_of((one[same:], two[same:]))
        found.update(dict.fromkeys([digit for digit in after if digit not in alone]))
    return tuple(found)


def _most_sent(source: State, target: State, received: int) -> int:
    """What the busiest rank sends: balanced, so never more than is received, save for uneven tiles."""
    if source.is_even and target.is_even:
        return received
    copies = size_of(target.free) * source.largest
    return max(received, -(-copies // size_of(source.free)))


def _appended(space: Space, splits: Splits, more: Sequence[Digit]) -> list[Splits]:
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


def _reductions(source: State, kept: State) -> list[Stages]:
    """Ways to resolve everything that the target has no longer pending, onto states in between.

    Different reductions don't mix: they are resolved one after the other, innermost first. Where there are many ways
    to resolve the first ones, those that receive the least go on.
    """
    found: list[Stages] = [()]
    while resolved := _resolvable(found[0][-1].target if found[0] else source, kept):
        if len(found) > _FEW:
            found = sorted(found, key=lambda stages: sum([each.received for each in stages]))[:_FEW]
        ends = [(stages, stages[-1].target if stages else source) for stages in found]
        found = [(*stages, *more) for stages, end in ends for more in _resolving(end, kept.splits, resolved)]
    return found


def _resolving(source: State, target: Splits, resolved: tuple[Digit, ...]) -> Iterator[Stages]:
    """Ways to resolve the innermost class, each onto another state."""
    cut, left = _towards(source.splits, target, source.free)
    onto = [cut, *_appended(source.space, cut, left)]
    cut, left = _towards(source.splits, target, source.resolved(resolved).free)
    scattered = tuple([digit for digit in left if digit in resolved])
    onto += _appended(source.space, cut, scattered) if scattered else [cut]
    if left != scattered:
        onto += _appended(source.space, cut, left)
    for splits in onto:
        yield _reduced(source, resolved, splits)


def _reduced(source: State, resolved: tuple[Digit, ...], splits: Splits) -> Stages:
    """The innermost class reduced, and scattered onto those of its digits that `splits` has: all, or none."""
    first, cut = _sliced(source, splits)
    after, how = source.resolved(resolved).split(splits), _reduction(source, resolved)
    group = tuple([digit for digit in digits_of(splits) if digit in resolved])
    if group:
        return (*first, _equal_parts("reduce_scatter", cut, after, group, **how))
    moved = Fraction(2 * (size_of(resolved) - 1) * after.largest, size_of(resolved))
    return (*first, Stage("all_reduce", cut, after, descending(resolved), sent=moved, received=moved, **how))


def _reduction(state: State, resolved: tuple[Digit, ...]) -> dict[str, Any]:
    """What resolves digits of the innermost class: a mean is a sum, divided once by the sizes of its digits."""
    if not resolved:
        return {}
    ops = {digit: op for op, digit in state.pending[0]}
    divisor = math.prod([digit[0] for digit in resolved if ops[digit] == "mean"])
    return {"op": kind_of(ops[resolved[0]]), "divisor": divisor, "resolved": resolved}


def _fused(source: State, target: State, kept: State) -> Iterator[Stages]:
    """One exchange in which each rank receives its part from all of the only class, if that is no more than it has."""
    resolved = _resolvable(source, kept)
    same, only = source.universe == target.universe, not _resolvable(source.resolved(resolved), kept)
    if resolved and same and only and size_of(resolved) * target.largest <= padded(source):
        first, cut = _sliced(source, kept.splits)
        yield (*first, _exchange(cut, target, resolved))
