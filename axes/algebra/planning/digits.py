"""Two shardings in common digits: planning is then arithmetic on short tuples.

A *digit* `(size, stride)` is a digit of the rank's position. Where the source and the target have
common digits, each dim is split by a sequence of *atoms*, major first, and two sequences with the
same beginning cut the dim the same way to there. So "is a slice of", "is gathered from" and "how much
of it do I have already" are questions about prefixes, whatever the number of ranks.

An atom is one digit where the dim divides. Where it doesn't, a split is one `torch.chunk` that
neither merges nor splits, so all its digits stay together in one atom.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2 tp=2", "both = dp tp")
>>> source, target = mesh.sharding("a@both b"), mesh.sharding("a b@tp")
>>> space, s, t = common(source, target, (8, 8))
>>> s.splits, t.splits, t.free
(((((2, 2),), ((2, 1),)), ()), ((), (((2, 1),),)), ((2, 2),))
>>> common(source, target, (5, 8))[1].splits          # five elements: the four pieces stay one split
((((2, 2), (2, 1)),), ())

A *slot* is a dim, or a factor of a dim that is written as a group.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from axes.algebra.chunks import largest_chunk, smallest_chunk
from axes.algebra.layout import Layout, common_digits
from axes.algebra.sharding import Sharding, Slot, Slots, classes
from axes.algebra.splits import handed_down

Digit = tuple[int, int]
"""`(size, stride)` of one digit of the position."""

Atom = tuple[Digit, ...]
"""The digits of one split, slowest first."""

Splits = tuple[tuple[Atom, ...], ...]
"""For each slot its atoms, major first."""

Classes = tuple[tuple[tuple[str, Digit], ...], ...]
"""Pending reductions, innermost first, in classes that are resolved together: the order in one is immaterial."""


class State(NamedTuple):
    """How a tensor lies, in digits.

    splits: for each slot its atoms. free: the digits of the mesh over which the tensor is replicated. pending: classes.
    """

    splits: Splits
    free: tuple[Digit, ...]
    pending: Classes = ()

    def split(self, splits: Splits) -> State:
        """The state split so, with the digits that it takes for that no longer free."""
        taken = set(digits_of(splits))
        return self._replace(splits=splits, free=tuple([digit for digit in self.free if digit not in taken]))

    def resolved(self, done: Sequence[Digit]) -> State:
        """The state with these digits no longer pending but free."""
        pending = [tuple([item for item in group if item[1] not in done]) for group in self.pending]
        return State(self.splits, descending((*self.free, *done)), tuple(filter(None, pending)))


@dataclass(frozen=True)
class Space:
    """What all states of one plan share.

    origin: the sharding that lends its mesh to those in between.
    factors: for each dim the sizes of its factors, or its own alone. sizes: of each slot.
    """

    origin: Sharding
    factors: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    def largest(self, splits: Splits) -> int:
        """Elements of the largest tile."""
        return math.prod(map(_largest, self.sizes, splits))

    def divides(self, at: int, splits: Splits) -> bool:
        """Whether all pieces of a slot are equally large."""
        return self.sizes[at] % _pieces(splits[at]) == 0

    def is_even(self, *sides: Splits) -> bool:
        """Whether all tiles are equally large."""
        rests = [size % _pieces(slot) for splits in sides for size, slot in zip(self.sizes, splits, strict=True)]
        return not any(rests)

    def is_flat(self, fine: Splits, coarse: Splits) -> bool:
        """Whether the fine tiles of a group, end to end, *are* the coarse tile as it lies in memory.

        So it is where one slot differs, nothing comes before it, and all pieces are equal.
        """
        differing = [at for at, (one, two) in enumerate(zip(fine, coarse, strict=True)) if one != two]
        if len(differing) != 1 or not self.is_even(fine):
            return False
        return math.prod(map(_largest, self.sizes[: differing[0]], coarse)) == 1

    def is_permutation(self, one: Splits, two: Splits) -> bool:
        """Whether every tile of the second is one whole tile of the first."""
        return all(
            _pieces(mine) == _pieces(theirs)
            and (self.divides(at, one) or [*map(size_of, mine)] == [*map(size_of, theirs)])
            for at, (mine, theirs) in enumerate(zip(one, two, strict=True))
        )

    def overlap(self, source: Splits, target: Splits) -> int:
        """Elements of its target tile that every rank already has, at least.

        Where one sequence of atoms begins with the other the finer piece is within the coarser; where
        they part ways, some rank's pieces don't meet.
        """
        shared = 1
        for size, one, two in zip(self.sizes, source, target, strict=True):
            if two[: len(one)] == one:
                shared *= _largest(size, two)
            elif one[: len(two)] == two:
                shared *= _smallest(size, one)
            else:
                return 0
        return shared

    def padded(self, *sides: Splits) -> int:
        """What a buffer may hold: the largest of these tiles, dims counted as what their splits pad them to."""
        tiles = [1] * len(sides)
        for size, *slots in zip(self.sizes, *sides, strict=True):
            whole = max(size, *[_largest(size, atoms) * _pieces(atoms) for atoms in slots])
            tiles = [tile * -(-whole // _pieces(atoms)) for tile, atoms in zip(tiles, slots, strict=True)]
        return max(tiles)

    def sharding(self, state: State) -> Sharding:
        """The sharding that a state describes."""
        columns = iter([tuple(map(Layout.of, slot)) for slot in state.splits])
        sizes = [each if len(each) > 1 else (None,) for each in self.factors]
        dims = [Slots([Slot(next(columns), size) for size in each]) for each in sizes]
        pending = [(op, Layout.of([digit])) for group in state.pending for op, digit in group]
        return Sharding(self.origin.mesh, tuple(dims), tuple(pending))


def common(
    source: Sharding, target: Sharding, shape: Sequence[int], node: Layout | None = None
) -> tuple[Space, State, State] | None:
    """Both shardings in common digits and slots, or None where there are none.

    The target's mesh must be within the source's; the target is replicated over axes that only the source has.
    node: digits to cut at where that leaves whole digits, so that each is within a node or across nodes.
    """
    pairs = [aligned(one, two) for one, two in zip(source.dims, target.dims, strict=True)]
    if None in pairs:
        return None
    factors = tuple([sizes_of(pair[0]) or (size,) for pair, size in zip(pairs, shape, strict=True) if pair])
    space = Space(source, factors, tuple([size for sizes in factors for size in sizes]))
    slots = [[slot.layouts for pair in pairs if pair for slot in pair[side]] for side in (0, 1)]
    pending = [end.pending for end in (source, target)]
    layouts = [source.mesh.extent, target.mesh.extent]
    layouts += [layout for side in slots for slot in side for layout in slot]
    layouts += [layout for side in pending for _, layout in side]
    refined = (None if node is None else common_digits([*layouts, node])) or common_digits(layouts)
    if refined is None:
        return None

    def state(side: int) -> State:
        splits = tuple([_atoms(*each, refined) for each in zip(space.sizes, slots[side], strict=True)])
        waiting = sorted_classes([(op, digit) for op, layout in pending[side] for digit in refined[layout]])
        taken = {*digits_of(splits), *[digit for group in waiting for _, digit in group]}
        free = tuple([digit for digit in refined[source.mesh.extent] if digit not in taken])
        return State(splits, free, waiting)

    return space, state(0), state(1)


def sizes_of(slots: Slots) -> tuple[int, ...] | None:
    """The sizes of a dim's slots, or None where it is one."""
    return tuple([slot.size or 0 for slot in slots]) if len(slots) > 1 else None


def aligned(one: Slots, two: Slots) -> tuple[Slots, Slots] | None:
    """Two splits of one dim with the same slots, or None where they have none in common."""
    sizes = sizes_of(one) or sizes_of(two)
    if sizes is None:
        return one, two
    mine, theirs = [slots if sizes_of(slots) == sizes else factored(slots, sizes) for slots in (one, two)]
    return None if mine is None or theirs is None else (mine, theirs)


def factored(slots: Slots, sizes: Sequence[int]) -> Slots | None:
    """A dim that is one slot as slots of these sizes, or None where its splits cut across them.

    >>> from axes.algebra.mesh import Mesh
    >>> (dim,) = Mesh("tp=2").sharding("h@tp").dims
    >>> factored(dim, (4, 3)), factored(dim, (3, 4))
    ((Slot(layouts=(2:1,), size=4), Slot(layouts=(), size=3)), None)
    """
    found = handed_down(slots, [size or slots.pieces for size in sizes]) if len(slots) == 1 else None
    if found is None or any(map(operator.mod, sizes, [each.pieces for each in found])):
        return None
    return Slots([Slot(each.layouts, size) for size, each in zip(sizes, found, strict=True)])


def _atoms(size: int, layouts: Iterable[Layout], refined: dict[Layout, Atom]) -> tuple[Atom, ...]:
    """One atom for each digit as long as the dim divides. From the first layout that doesn't divide it on, one for
    each layout: pieces then differ in size, and some divide where others don't."""
    found: list[Atom] = []
    even = True
    for layout in layouts:
        even = even and size % layout.size == 0
        size //= layout.size
        if layout.size > 1:
            found.extend([(digit,) for digit in refined[layout]] if even else [refined[layout]])
    return tuple(found)


def sorted_classes(pending: Iterable[tuple[str, Digit]]) -> Classes:
    """Pending reductions in classes, the slowest digits first in each."""
    return tuple([tuple(sorted(group, key=lambda item: -item[1][1])) for group in classes(pending)])


# --- sizes ----------------------------------------------------------------------------------------


def digits_of(splits: Splits) -> list[Digit]:
    """The digits of all splits, slot by slot."""
    return [digit for slot in splits for atom in slot for digit in atom]


def descending(found: Iterable[Digit]) -> tuple[Digit, ...]:
    """Digits, slowest first."""
    return tuple(sorted(found, key=lambda digit: -digit[1]))


def size_of(found: Iterable[Digit]) -> int:
    """How many coordinates some digits have together."""
    return math.prod([size for size, _ in found])


@lru_cache(maxsize=4096)
def _pieces(atoms: tuple[Atom, ...]) -> int:
    return math.prod([size for atom in atoms for size, _ in atom])


@lru_cache(maxsize=4096)
def _largest(size: int, atoms: tuple[Atom, ...]) -> int:
    return largest_chunk(size, map(size_of, atoms))


@lru_cache(maxsize=4096)
def _smallest(size: int, atoms: tuple[Atom, ...]) -> int:
    return smallest_chunk(size, tuple(map(size_of, atoms)))
