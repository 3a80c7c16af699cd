"""Two shardings in common digits: the form in which planning is arithmetic on short tuples.

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

The dims of a form are *slots*: a dim that is a product of factors is as many slots as factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from axes.algebra.chunks import largest_chunk, smallest_chunk
from axes.algebra.errors import MeshError
from axes.algebra.layout import Layout, NamedLayout, digits
from axes.algebra.sharding import LINEAR, PendingReduction, ShardedDim, ShardedFactor, Sharding

Digit = tuple[int, int]
"""`(size, stride)` of one digit of the position."""

Atom = tuple[Digit, ...]
"""The digits of one split, slowest first."""

Splits = tuple[tuple[Atom, ...], ...]
"""For each slot its atoms, major first."""


@dataclass(frozen=True)
class Form:
    """A sharding in digits that it has in common with another: in these, planning is about prefixes of tuples.

    splits: for each slot its atoms, major first.
    free: the digits of the mesh that do nothing: the tensor is replicated over them.
    pending: the classes of pending reductions, innermost first; in a class the order is immaterial.
    """

    splits: Splits
    free: tuple[Digit, ...]
    pending: tuple[tuple[tuple[str, Digit], ...], ...] = ()


@dataclass(frozen=True)
class Space:
    """What all forms of one plan share.

    origin: the sharding that lends its mesh and the names of its dims to those in between.
    sizes: the size of each slot.
    dims: the dim of each slot.
    factors: for each dim the sizes of its factors, or None where it is one slot.
    """

    origin: Sharding
    sizes: tuple[int, ...]
    dims: tuple[int, ...]
    factors: tuple[tuple[int, ...] | None, ...]


def common(
    source: Sharding, target: Sharding, shape: Sequence[int], node: Layout | None = None
) -> tuple[Space, Form, Form] | None:
    """Both shardings in common digits and slots, or None where there are none.

    The target's mesh must be within the source's; the target counts as replicated over the rest.
    node: digits to cut at where that leaves whole digits, so that each is within a node or across nodes.
    """
    found = [aligned(a, b) for a, b in zip(source.dims, target.dims, strict=True)]
    if any(pair is None for pair in found):
        return None
    pairs = [pair for pair in found if pair is not None]
    factors = tuple(sizes_of(a) for a, _ in pairs)
    sizes: list[int] = []
    dims: list[int] = []
    for dim, (size, factored) in enumerate(zip(shape, factors, strict=True)):
        sizes.extend(factored or (size,))
        dims.extend([dim] * len(factored or (size,)))
    space = Space(source, tuple(sizes), tuple(dims), factors)
    columns = [[factor.layouts for dim in side for factor in dim.factors] for side in zip(*pairs, strict=True)]
    if not columns:
        columns = [[], []]
    return _forms(space, source, target, columns, node)


def alone(sharding: Sharding, shape: Sequence[int]) -> tuple[Space, Form]:
    """One sharding in its own digits."""
    found = common(sharding, sharding, shape)
    assert found is not None, "a sharding has digits of its own"
    return found[0], found[1]


def sizes_of(dim: ShardedDim) -> tuple[int, ...] | None:
    """The sizes of a dim's factors, or None where it is one."""
    return tuple([factor.size or 0 for factor in dim.factors]) if len(dim.factors) > 1 else None


def aligned(one: ShardedDim, two: ShardedDim) -> tuple[ShardedDim, ShardedDim] | None:
    """Two splits of one dim with the same factors, or None where they have none in common."""
    sizes = sizes_of(one) or sizes_of(two)
    if sizes is None:
        return one, two
    found = [dim if sizes_of(dim) == sizes else factored(dim, sizes) for dim in (one, two)]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def factored(dim: ShardedDim, sizes: Sequence[int]) -> ShardedDim | None:
    """A dim that is one factor as factors of these sizes, or None where its splits cut across them.

    >>> from axes.algebra.mesh import Mesh
    >>> (dim,) = Mesh("tp=2").sharding("h@tp").dims
    >>> print(factored(dim, (4, 3)), factored(dim, (3, 4)))
    (4@tp 3) None
    """
    if len(dim.factors) > 1:
        return None
    axes: list[list[NamedLayout]] = [[] for _ in sizes]
    at, left = 0, sizes[0]
    for axis in dim.axes:
        while left == 1 and at + 1 < len(sizes):
            at, left = at + 1, sizes[at + 1]
        if left % axis.size:
            return None
        axes[at].append(axis)
        left //= axis.size
    return ShardedDim(tuple(ShardedFactor(None, *each) for each in zip(sizes, map(tuple, axes), strict=True)))


def _forms(
    space: Space, source: Sharding, target: Sharding, columns: list[list[tuple[Layout, ...]]], node: Layout | None
) -> tuple[Space, Form, Form] | None:
    """Refine every layout to digits common to all of them, then each slot to atoms."""
    ends = (source, target)
    layouts: dict[Layout, Atom] = dict.fromkeys(
        [
            source.mesh.extent,
            target.mesh.extent,
            *(layout for column in columns for slot in column for layout in slot),
            *(axis.layout for end in ends for pending in end.pending for axis in pending.axes),
        ],
        (),
    )
    refined = None if node is None else _digits(*layouts, node)
    refined = refined or _digits(*layouts)
    if refined is None:
        return None
    layouts = dict(zip(layouts, refined, strict=False))
    whole = layouts[source.mesh.extent]
    forms: list[Form] = []
    for end, column in zip(ends, columns, strict=True):
        splits = tuple(
            _atoms(size, [layouts[layout] for layout in slot]) for size, slot in zip(space.sizes, column, strict=True)
        )
        pending = _classes((p.op, digit) for p in end.pending for axis in p.axes for digit in layouts[axis.layout])
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
    """One atom for each digit as long as the dim divides. From the first layout that doesn't divide it on, one for
    each layout: pieces then differ in size, and some divide where others don't."""
    found: list[Atom] = []
    even = True
    for layout in layouts:
        pieces = math.prod(n for n, _ in layout)
        even = even and size % pieces == 0
        size //= pieces
        if pieces > 1:
            found.extend(((digit,) for digit in layout) if even else (layout,))
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


@lru_cache(maxsize=4096)
def largest(size: int, atoms: tuple[Atom, ...]) -> int:
    """Elements of the largest piece of a slot."""
    return largest_chunk(size, map(atom_size, atoms))


@lru_cache(maxsize=4096)
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


# --- back to shardings ----------------------------------------------------------------------------


def sharding_of_form(space: Space, form: Form) -> Sharding:
    """The sharding that a form describes."""
    called = space.origin.mesh.called
    columns = [tuple([called(Layout.of(atom)) for atom in slot]) for slot in form.splits]
    dims: list[ShardedDim] = []
    at = 0
    for sizes, had in zip(space.factors, space.origin.dims, strict=True):
        if sizes is None:
            dims.append(ShardedDim((ShardedFactor(had.factors[0].name, None, columns[at]),)))
        else:
            parts = zip(sizes, columns[at : at + len(sizes)], strict=True)
            dims.append(ShardedDim(tuple(ShardedFactor(None, *part) for part in parts)))
        at += len(sizes or (0,))
    pending = tuple(
        PendingReduction(op, (called(Layout.of([digit])),)) for group in form.pending for op, digit in group
    )
    return Sharding(space.origin.mesh, tuple(dims), pending)
