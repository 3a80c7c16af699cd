"""Extents: how large the atoms of a recipe are, as a whole and on this rank; symbolic in a compiled graph.

A recipe is found for numbers, and its extents are these:

>>> from axes.algebra.flow import recipe
>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("tp=2")
>>> found = recipe("rearrange", "b (h d)@tp -> b h@tp d", "", (None,), ((4, 6),), mesh, (("h", 4),))
>>> extents = extents_of(found)
>>> extents.shape(("b", "h", "d")), extents.local(("b", "h", "d"), found.result.output)
((4, 4, 3), (4, 2, 3))

While a graph with symbolic sizes is traced, the recipe is found for the sizes of the call that is
traced. Most atoms may vary then: the recipe is the same one at every multiple of the pieces into which
it splits them. Whether that is so of an atom is seen by finding the recipe again at other sizes; the
graph is guarded on the size being a multiple. What can't vary stays as it is on this rank, and the
graph is guarded on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from axes.algebra.errors import AxesError
from axes.algebra.flow import Recipe, unmoved
from axes.algebra.flow.recipe import Shape
from axes.algebra.sharding import ShardedDim, Sharding
from axes.runtime.symbols import are_equal, fixed, guard, hint, hints, is_symbolic

Sizes = Mapping[str, int]
Given = tuple[tuple[str, int], ...]
Find = Callable[[Sizes], Recipe]
"""The recipe at other sizes of its atoms."""


@dataclass(frozen=True, eq=False)
class Extents:
    """The sizes of a recipe's atoms.

    whole: the whole size of each atom, a number or a symbol. varying: the atoms of which this rank has
    an equal share whatever their size; of others it has what the recipe's own numbers say. find: the
    recipe at other sizes, where some may vary.
    """

    recipe: Recipe
    whole: Sizes
    varying: frozenset[str] = frozenset()
    find: Find | None = None

    @cached_property
    def is_symbolic(self) -> bool:
        """Whether a size is a symbol."""
        return is_symbolic(tuple(self.whole.values()))

    def derived(self, of: Callable[[Recipe], Recipe]) -> Extents:
        """The extents of a recipe that is derived from this one and has the same atoms."""
        found, find = of(self.recipe), self.find
        if find is None:
            return extents_of(found)
        return symbolic_extents(found, self.whole, lambda sizes: of(find(sizes)))

    def shape(self, atoms: Sequence[str]) -> Shape:
        """The whole shape of a tensor with one dim per atom."""
        return tuple([self.whole[atom] for atom in atoms])

    def merged(self, groups: Sequence[Sequence[str]]) -> Shape:
        """The whole shape of a tensor whose dims are groups of atoms."""
        return tuple([math.prod(self.whole[atom] for atom in group) for group in groups])

    def local(self, atoms: Sequence[str], sharding: Sharding) -> Shape:
        """This rank's shape of a tensor with one dim per atom."""
        mine = sharding.local_shape(self.recipe.shape_of(tuple(atoms)))
        if not self.varying:
            return mine
        return tuple(
            self.whole[atom] // dim.pieces if atom in self.varying else size
            for atom, dim, size in zip(atoms, sharding.dims, mine, strict=True)
        )

    @cached_property
    def computed(self) -> dict[str, int]:
        """What this rank has of each atom during the local computation."""
        found: dict[str, int] = {}
        for atoms, sharding in _computing(self.recipe):
            found.update(zip(atoms, self.local(atoms, sharding), strict=True))
        return found

    @cached_property
    def divisor(self) -> int:
        """By what the local sum is divided: the count of a mean."""
        if self.recipe.divisor == 1:
            return 1
        (operand, *_), result = self.recipe.inputs, self.recipe.result
        return math.prod(self.whole[atom] for atom in {*operand.atoms} ^ {*result.atoms})


def extents_of(found: Recipe) -> Extents:
    """The extents of a recipe at its own sizes."""
    return Extents(found, found.size)


def traced_extents(
    find: Callable[[tuple[Shape, ...], Given], Recipe], shapes: Sequence[Shape], given: Given
) -> Extents:
    """The extents of the recipe `find(shapes, given)`, where some of these sizes are symbolic.

    `shapes` are those that tensors have, whole or on this rank.
    """
    found = find(tuple(map(hints, shapes)), tuple((name, hint(size)) for name, size in given))
    ratios = [
        tuple(map(_ratio, [dim.pieces for dim in i.source.dims], i.shape, hints(shape)))
        for i, shape in zip(found.inputs, shapes, strict=True)
    ]
    wholes = [
        tuple(map(_whole, i.shape, shape, ratio)) for i, shape, ratio in zip(found.inputs, shapes, ratios, strict=True)
    ]

    def at(sizes: Sizes) -> Recipe:
        extents = [[math.prod(sizes[atom] for atom in group) for group in i.groups] for i in found.inputs]
        local = (tuple(map(_local, *each)) for each in zip(extents, ratios, strict=True))
        return find(tuple(local), tuple((name, sizes.get(name, hint(size))) for name, size in given))

    return symbolic_extents(found, sizes_of_atoms(found, wholes, given), at)


def _ratio(count: int, whole: int, size: int) -> int | None:
    """How often a tensor's size is in the whole one; None where ranks don't have as much each."""
    return next((times for times in (1, count) if size * times == whole), None)


def _whole(whole: int, size: int, ratio: int | None) -> int:
    """The whole size, as symbolic as that of the tensor where all ranks have as much."""
    if ratio is not None:
        return size * ratio
    fixed(size)
    return whole


def _local(whole: int, ratio: int | None) -> int:
    return whole // (ratio or 1)


def symbolic_extents(found: Recipe, whole: Sizes, find: Find) -> Extents:
    """The extents of a recipe that was found at the hints of `whole`; `find` gives it at other sizes."""
    symbols = [atom for atom, size in whole.items() if type(size) is not int]
    varying = []
    for atom in symbols:
        count = math.lcm(*(dim.pieces for name, dim in _splits(found) if name == atom))
        if _may_vary(found, atom, count, find) and whole[atom] % count == 0:
            varying.append(atom)
        else:
            fixed(whole[atom])
    return Extents(found, whole, frozenset(varying), find)


def _may_vary(found: Recipe, atom: str, count: int, find: Find) -> bool:
    """Whether a recipe is the same one for every size of an atom that is a multiple of `count`.

    What it is depends on which splits divide which sizes, so on the primes of the number of ranks.
    """
    primes = [p for p in range(2, found.mesh.size + 1) if found.mesh.size % p == 0 and all(p % q for q in range(2, p))]
    form = _form(found)
    try:
        return all(_form(find({**found.size, atom: count * times})) == form for times in {2, *primes, 7})
    except AxesError:
        return False


def _form(found: Recipe) -> tuple[Any, ...]:
    """All of a recipe but sizes."""
    result = found.result
    inputs = [(i.groups, i.source, i.elementary, i.prepared, i.conjugate) for i in found.inputs]
    output = (result.groups, result.derived, result.target, result.output)
    stays = [unmoved(*arrow) for arrow in found.arrows]
    return inputs, output, stays, found.divisor == 1, found.multiplier


def _computing(found: Recipe) -> Iterator[tuple[tuple[str, ...], Sharding]]:
    """The atoms of the operands and of the result as the local computation has them, and their shardings."""
    yield from ((i.atoms, i.prepared) for i in found.inputs)
    yield found.result.atoms, found.result.derived


def _splits(found: Recipe) -> Iterator[tuple[str, ShardedDim]]:
    """`(atom, its dim)` of every atom, wherever the recipe splits atoms."""
    states = [*_computing(found), *((i.atoms, i.elementary) for i in found.inputs)]
    states.append((found.result.atoms, found.result.target))
    for atoms, sharding in states:
        yield from zip(atoms, sharding.dims, strict=True)


def sizes_of_atoms(found: Recipe, shapes: Sequence[Shape], given: Given) -> dict[str, int]:
    """The sizes of a recipe's atoms by the whole shapes of its operands, which may be symbolic.

    `found` is the recipe at the hints of these shapes and of the `given` sizes.
    """
    known: dict[str, int] = {name: size for name, size in given if name in found.size}
    dims = [pair for i, shape in zip(found.inputs, shapes, strict=True) for pair in zip(i.groups, shape, strict=True)]
    while True:
        before = len(known)
        for group, extent in dims:
            missing = [atom for atom in dict.fromkeys(group) if atom not in known]
            if len(missing) == 1 and group.count(missing[0]) == 1:
                known[missing[0]] = extent // math.prod(known[atom] for atom in group if atom in known)
        if len(known) == before:
            break
    # Of what stands nowhere else, the recipe says the size; and dims that are one atom have one size.
    whole = {atom: known.get(atom, size) for atom, size in found.size.items()}
    for group, extent in dims:
        _check_same(math.prod(whole[atom] for atom in group), extent)
    return whole


def _check_same(one: int, other: int) -> None:
    """Guards the graph on two sizes being the same, as they are in the call that is traced."""
    alike = (type(one) is int) == (type(other) is int)
    guard(one == other if alike else are_equal(one, other))
