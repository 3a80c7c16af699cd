"""Two states in common digits: the form in which planning is arithmetic on short tuples.

A *digit* `(size, stride)` is a digit of the rank's position. Where the source and the target have
common digits, each dim is split by a sequence of *atoms*, major first, and two sequences with the
same beginning cut the dim the same way to there. So "is a slice of", "is gathered from" and "how much
of it do I have already" are questions about prefixes, whatever the number of ranks.

An atom is one digit where the dim divides. Where it doesn't, a split is one `torch.chunk` that
neither merges nor splits, so all its digits stay together in one atom.

>>> from axes.algebra.universe import Universe
>>> world, both = Universe.of(range(4)), Layout((4,), (1,))
>>> source = State(world, both, ((both,), ()))
>>> target = State(world, both, ((), (Layout((2,), (1,)),)))
>>> space, s, t = common(source, target, (8, 8))
>>> s.splits, t.splits, t.free
(((((2, 2),), ((2, 1),)), ()), ((), (((2, 1),),)), ((2, 2),))
>>> common(source, target, (5, 8))[1].splits          # five elements: the four pieces stay one split
((((2, 2), (2, 1)),), ())

The dims of a form are *slots*: a dim that is a product of factors is as many slots as factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from axes.algebra.chunks import largest_chunk
from axes.algebra.errors import MeshError
from axes.algebra.layout import Layout, digits
from axes.algebra.state import LINEAR, Factors, Split, State, smallest_chunk

Digit = tuple[int, int]
"""`(size, stride)` of one digit of the position."""

Atom = tuple[Digit, ...]
"""The digits of one split, slowest first."""

Splits = tuple[tuple[Atom, ...], ...]
"""For each slot its atoms, major first."""


@dataclass(frozen=True)
class Form:
    """A state in common digits.

    splits: for each slot its atoms, major first.
    free: the digits of the extent that do nothing: the tensor is replicated over them.
    pending: the classes of pending reductions, innermost first; in a class the order is immaterial.
    """

    splits: Splits
    free: tuple[Digit, ...]
    pending: tuple[tuple[tuple[str, Digit], ...], ...] = ()


@dataclass(frozen=True)
class Space:
    """What all forms of one plan share.

    origin: the state that lends universe, extent and names to the states in between.
    sizes: the size of each slot.
    dims: the dim of each slot.
    factors: for each dim the sizes of its factors, or None where it is one slot.
    """

    origin: State
    sizes: tuple[int, ...]
    dims: tuple[int, ...]
    factors: tuple[tuple[int, ...] | None, ...]


def common(
    source: State, target: State, shape: Sequence[int], node: Layout | None = None
) -> tuple[Space, Form, Form] | None:
    """Both states in common digits and slots, or None where there are none.

    The target's extent must be within the source's; the target counts as replicated over the rest.
    node: digits to cut at where that leaves whole digits, so that each is within a node or across nodes.
    """
    found = [aligned(a, b) for a, b in zip(source.splits, target.splits, strict=True)]
    if any(pair is None for pair in found):
        return None
    pairs = [pair for pair in found if pair is not None]
    factors = tuple(a.sizes if isinstance(a, Factors) else None for a, _ in pairs)
    sizes: list[int] = []
    dims: list[int] = []
    for dim, (size, factored) in enumerate(zip(shape, factors, strict=True)):
        sizes.extend(factored or (size,))
        dims.extend([dim] * len(factored or (size,)))
    space = Space(source, tuple(sizes), tuple(dims), factors)
    columns = [[layouts for split in side for layouts in _slots_of(split)] for side in zip(*pairs, strict=True)]
    if not columns:
        columns = [[], []]
    return _forms(space, source, target, columns, node)


def alone(state: State, shape: Sequence[int]) -> tuple[Space, Form]:
    """One state in its own digits."""
    found = common(state, state, shape)
    assert found is not None, "a valid state has digits of its own"
    return found[0], found[1]


def _slots_of(split: Split) -> tuple[tuple[Layout, ...], ...]:
    return split.splits if isinstance(split, Factors) else (split,)


def aligned(one: Split, two: Split) -> tuple[Split, Split] | None:
    """The splits of one dim with the same factors, or None where there are none."""
    if isinstance(one, Factors) and isinstance(two, Factors):
        return (one, two) if one.sizes == two.sizes else None
    if isinstance(one, Factors):
        other = factored(two, one.sizes) if isinstance(two, tuple) else None
        return None if other is None else (one, other)
    if isinstance(two, Factors):
        other = factored(one, two.sizes)
        return None if other is None else (other, two)
    return one, two


def factored(layouts: Sequence[Layout], sizes: Sequence[int]) -> Factors | None:
    """An ordinary split as a split of factors, or None where it cuts across them.

    >>> factored((Layout((2,), (1,)),), (4, 3)), factored((Layout((2,), (1,)),), (3, 4))
    (Factors(sizes=(4, 3), splits=((2:1,), ())), None)
    """
    splits: list[list[Layout]] = [[] for _ in sizes]
    at, left = 0, sizes[0] if sizes else 1
    for layout in layouts:
        while left == 1 and at + 1 < len(sizes):
            at, left = at + 1, sizes[at + 1]
        if left % layout.size:
            return None
        splits[at].append(layout)
        left //= layout.size
    return Factors(tuple(sizes), tuple(map(tuple, splits)))


def _forms(
    space: Space, source: State, target: State, columns: list[list[tuple[Layout, ...]]], node: Layout | None
) -> tuple[Space, Form, Form] | None:
    """Refine every layout to digits common to all of them, then each slot to atoms."""
    states = (source, target)
    layouts: dict[Layout, Atom] = dict.fromkeys(
        [
            source.extent,
            target.extent,
            *(layout for column in columns for slot in column for layout in slot),
            *(layout for state in states for _, pending in state.pending for layout in pending),
        ],
        (),
    )
    refined = None if node is None else _digits(*layouts, node)
    refined = refined or _digits(*layouts)
    if refined is None:
        return None
    layouts = dict(zip(layouts, refined, strict=False))
    whole = layouts[source.extent]
    forms: list[Form] = []
    for state, column in zip(states, columns, strict=True):
        splits = tuple(
            _atoms(size, [layouts[layout] for layout in slot]) for size, slot in zip(space.sizes, column, strict=True)
        )
        pending = _classes((op, digit) for op, lays in state.pending for lay in lays for digit in layouts[lay])
        taken = {digit for slot in splits for atom in slot for digit in atom}
        taken.update(digit for group in pending for _, digit in group)
        forms.append(Form(splits, tuple(digit for digit in whole if digit not in taken), pending))
    return space, forms[0], forms[1]


def _digits(*layouts: Layout) -> tuple[Atom, ...] | None:
    try:
        return digits(*layouts)
    except MeshError:
        return None


def _atoms(size: int, layouts: Iterable[Atom]) -> tuple[Atom, ...]:
    """One atom for each digit as long as the dim divides, then one for each layout."""
    found: list[Atom] = []
    for layout in layouts:
        pieces = math.prod(n for n, _ in layout)
        if pieces == 1:
            continue
        if size % pieces == 0:
            found.extend((digit,) for digit in layout)
        else:
            found.append(layout)
        size = -(-size // pieces)
    return tuple(found)


def _classes(pending: Iterable[tuple[str, Digit]]) -> tuple[tuple[tuple[str, Digit], ...], ...]:
    """Neighbours that may be resolved together: sums with means, max with max, min with min."""
    found: list[list[tuple[str, Digit]]] = []
    for op, digit in pending:
        if found and _kind(found[-1][0][0]) == _kind(op):
            found[-1].append((op, digit))
        else:
            found.append([(op, digit)])
    return tuple(tuple(sorted(group, key=lambda item: -item[1][1])) for group in found)


def _kind(op: str) -> str:
    return "sum" if op in LINEAR else op


# --- sizes ----------------------------------------------------------------------------------------


def atom_size(atom: Atom) -> int:
    """How many pieces an atom cuts a slot into."""
    return math.prod(size for size, _ in atom)


def pieces_by(atoms: Iterable[Atom]) -> int:
    """How many pieces a sequence of atoms cuts a slot into."""
    return math.prod(size for atom in atoms for size, _ in atom)


@lru_cache(maxsize=8192)
def largest(size: int, atoms: tuple[Atom, ...]) -> int:
    """Elements of the largest piece of a slot."""
    return largest_chunk(size, map(atom_size, atoms))


@lru_cache(maxsize=8192)
def smallest(size: int, atoms: tuple[Atom, ...]) -> int:
    """Elements of the smallest piece of a slot."""
    return smallest_chunk(size, tuple(map(atom_size, atoms)))


def elements(space: Space, splits: Splits) -> int:
    """Elements of the largest tile."""
    return math.prod(map(largest, space.sizes, splits))


def overlap(space: Space, source: Splits, target: Splits) -> int:
    """Elements of its target tile that every rank already has, at least.

    Where one sequence of atoms begins with the other the finer piece is within the coarser; where
    they part ways, some rank's pieces don't meet.
    """
    shared = 1
    for size, one, two in zip(space.sizes, source, target, strict=True):
        if two[: len(one)] == one:
            shared *= largest(size, two)
        elif one[: len(two)] == two:
            shared *= smallest(size, one)
        else:
            return 0
    return shared


def padded_limit(space: Space, source: Splits, target: Splits) -> int:
    """What a buffer may hold: the larger tile, where dims count as what their splits pad them to."""
    tiles = [1, 1]
    for size, one, two in zip(space.sizes, source, target, strict=True):
        whole = max(size, *(largest(size, atoms) * pieces_by(atoms) for atoms in (one, two)))
        tiles[0] *= -(-whole // pieces_by(one))
        tiles[1] *= -(-whole // pieces_by(two))
    return max(tiles)


# --- back to states -------------------------------------------------------------------------------


def state_of_form(space: Space, form: Form) -> State:
    """The state that a form describes."""
    columns = [tuple(Layout.of(atom) for atom in slot) for slot in form.splits]
    splits: list[Split] = []
    at = 0
    for sizes in space.factors:
        if sizes is None:
            splits.append(columns[at])
            at += 1
        else:
            splits.append(Factors(sizes, tuple(columns[at : at + len(sizes)])))
            at += len(sizes)
    pending = tuple((op, (Layout.of([digit]),)) for group in form.pending for op, digit in group)
    origin = space.origin
    return State(origin.universe, origin.extent, tuple(splits), pending, origin.names)
