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
>>> s, t = common(source, target, (8, 8))
>>> s.splits, t.splits, t.free
(((((2, 2),), ((2, 1),)), ()), ((), (((2, 1),),)), ((2, 2),))
>>> common(source, target, (5, 8))[0].splits          # five elements: the four pieces stay one split
((((2, 2), (2, 1)),), ())

A *slot* is a dim, or a factor of a dim that both sides write, or can write, as a group of the same factors (`opened`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from axes.algebra.chunks import largest_chunk, smallest_chunk
from axes.algebra.cost import node_size
from axes.algebra.layout import Layout, common_digits
from axes.algebra.sharding import Sharding, Slot, Slots, classes
from axes.algebra.splits import handed_down
from axes.algebra.universe import Universe

Digit = tuple[int, int]
"""`(size, stride)` of one digit of the position."""

Atom = tuple[Digit, ...]
"""The digits of one split, slowest first."""

Splits = tuple[tuple[Atom, ...], ...]
"""For each slot its atoms, major first."""

Factors = tuple[tuple[int, ...], ...]
"""For each dim the sizes of its factors; its own alone where it is one slot."""

Shape = tuple[int, ...]

Classes = tuple[tuple[tuple[str, Digit], ...], ...]
"""Pending reductions, innermost first, in classes that are resolved together: the order in one is immaterial."""


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
        return self.sizes[at] % _pieces(splits[at]) == 0

    def inside(self, digit: Digit) -> bool:
        """Whether the ranks of a digit share a node."""
        return node_size(self.origin.universe, (digit,), self.ranks_per_node) == digit[0]


class State(NamedTuple):
    """How a tensor lies, in digits.

    splits: for each slot its atoms. free: the digits of the mesh over which the tensor is replicated. pending: classes.
    """

    space: Space
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
        return self._replace(free=descending((*self.free, *done)), pending=tuple(filter(None, pending)))

    @property
    def universe(self) -> Universe:
        """The ranks, in order."""
        return self.space.origin.universe

    @property
    def largest(self) -> int:
        """Elements of the largest tile."""
        return math.prod(map(_largest, self.space.sizes, self.splits))

    @property
    def is_even(self) -> bool:
        """Whether all tiles are equally large."""
        return not any(map(operator.mod, self.space.sizes, map(_pieces, self.splits)))

    @property
    def sharding(self) -> Sharding:
        """The sharding that the state describes."""
        columns = iter([tuple(map(Layout.of, slot)) for slot in self.splits])
        sizes = [each if len(each) > 1 else (None,) for each in self.space.factors]
        dims = [Slots([Slot(next(columns), size) for size in each]) for each in sizes]
        pending = [(op, Layout.of([digit])) for group in self.pending for op, digit in group]
        return Sharding(self.space.origin.mesh, tuple(dims), tuple(pending))


# --- two states of one space ----------------------------------------------------------------------


def is_flat(fine: State, coarse: State) -> bool:
    """Whether the fine tiles of a group, end to end, *are* the coarse tile as it lies in memory.

    So it is where one slot differs, nothing comes before it, and all pieces are equal.
    """
    differing = [at for at, (one, two) in enumerate(zip(fine.splits, coarse.splits, strict=True)) if one != two]
    if len(differing) != 1 or not fine.is_even:
        return False
    return math.prod(map(_largest, fine.space.sizes[: differing[0]], coarse.splits)) == 1


def is_permutation(source: State, target: State) -> bool:
    """Whether every tile of the target is one whole tile of the source."""
    return all(
        _pieces(mine) == _pieces(theirs)
        and (source.space.divides(at, source.splits) or [*map(size_of, mine)] == [*map(size_of, theirs)])
        for at, (mine, theirs) in enumerate(zip(source.splits, target.splits, strict=True))
    )


def overlap(source: State, target: State) -> int:
    """Elements of its target tile that every rank already has, at least.

    Where one sequence of atoms begins with the other the finer piece is within the coarser; where
    they part ways, some rank's pieces don't meet.
    """
    shared = 1
    for size, one, two in zip(source.space.sizes, source.splits, target.splits, strict=True):
        if two[: len(one)] == one:
            shared *= _largest(size, two)
        elif one[: len(two)] == two:
            shared *= _smallest(size, one)
        else:
            return 0
    return shared


def padded(*sides: State) -> int:
    """What a buffer may hold: the largest of these tiles, dims counted as what their splits pad them to."""
    tiles = [1] * len(sides)
    for size, *slots in zip(sides[0].space.sizes, *[side.splits for side in sides], strict=True):
        whole = max(size, *[_largest(size, atoms) * _pieces(atoms) for atoms in slots])
        tiles = [tile * -(-whole // _pieces(atoms)) for tile, atoms in zip(tiles, slots, strict=True)]
    return max(tiles)


# --- from shardings -------------------------------------------------------------------------------


def common(source: Sharding, target: Sharding, shape: Shape, ranks_per_node: int = 8) -> tuple[State, State] | None:
    """Both shardings in common digits and slots, or None where there are none.

    The target's mesh must be within the source's; the target is replicated over axes that only the source has.
    Digits are cut at the size of a node where that leaves whole digits, so that each is within a node or across nodes.
    """
    factors, *ends = opened(source, target, shape)
    if any(len(dim) > 1 for end in ends for dim in end.dims):
        return None
    space = Space(source, factors, tuple([size for sizes in factors for size in sizes]), ranks_per_node)
    layouts = [source.mesh.extent, target.mesh.extent, *ends[0].used, *ends[1].used]
    refined = common_digits([*layouts, Layout((ranks_per_node,), (1,))]) or common_digits(layouts)
    if refined is None:
        return None

    def state(end: Sharding) -> State:
        splits = tuple([_atoms(size, dim.layouts, refined) for size, dim in zip(space.sizes, end.dims, strict=True)])
        waiting = sorted_classes([(op, digit) for op, layout in end.pending for digit in refined[layout]])
        taken = {*digits_of(splits), *[digit for group in waiting for _, digit in group]}
        return State(space, splits, tuple([d for d in refined[source.mesh.extent] if d not in taken]), waiting)

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
    factors: list[tuple[int, ...]] = []
    ends: tuple[list[Slots], list[Slots]] = ([], [])
    for size, *pair in zip(shape, source.dims, target.dims, strict=True):
        found = aligned(*pair)
        sizes = (sizes_of(found[0]) if found else None) or (size,)
        factors.append(sizes)
        for dims, dim in zip(ends, found or pair, strict=True):
            dims += [Slots([Slot(slot.layouts)]) for slot in dim] if len(sizes) > 1 else [dim]
    if len(ends[0]) == len(shape):
        return tuple(factors), source, target
    one, two = [replace(end, dims=tuple(dims), names=()) for end, dims in zip((source, target), ends, strict=True)]
    return tuple(factors), one, two


def aligned(one: Slots, two: Slots) -> tuple[Slots, Slots] | None:
    """Two splits of one dim with the same slots, or None where they have none in common."""
    sizes = sizes_of(one) or sizes_of(two)
    if sizes is None:
        return one, two
    mine, theirs = [_factored(dim, sizes) for dim in (one, two)]
    return None if mine is None or theirs is None else (mine, theirs)


def _factored(dim: Slots, sizes: Shape) -> Slots | None:
    """A dim as slots of these sizes, or None where its splits cut across them."""
    if len(dim) > 1:
        return dim if sizes_of(dim) == sizes else None
    found = handed_down(dim, [size or dim.pieces for size in sizes])
    if found is None or any(map(operator.mod, sizes, [each.pieces for each in found])):
        return None
    return Slots([Slot(each.layouts, size) for size, each in zip(sizes, found, strict=True)])


def sizes_of(dim: Slots) -> tuple[int, ...] | None:
    """The sizes of a dim's slots, or None where it is one."""
    return tuple([slot.size or 0 for slot in dim]) if len(dim) > 1 else None


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
