"""Extents: how large the atoms of a recipe are, as a whole and on this rank; symbolic in a compiled graph.

A recipe is found for numbers, and its extents are these:

>>> from axes.algebra.flow import recipe
>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("tp=2")
>>> found = recipe("rearrange", "b (h d)@tp -> b h@tp d", "", (None,), ((4, 6),), mesh, (("h", 4),))
>>> extents = extents_of(found)
>>> extents.shape(("b", "h", "d")), extents.local(("b", "h", "d"), found.result.output)
((4, 4, 3), (4, 2, 3))

While a graph with symbolic sizes is traced, the recipe is that of the sizes of the call that is traced. An atom that is
a dim by itself wherever it stands may vary: the recipe is the same one at every multiple of the pieces into which it
splits the atom, and the graph is guarded on that. Any other size is the number that it is, and another one is compiled
anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from axes.algebra.flow import Recipe
from axes.algebra.flow.reading import read
from axes.algebra.flow.recipe import Shape
from axes.algebra.flow.rules import units_of
from axes.algebra.sharding import Sharding
from axes.runtime.symbols import fixed, hint, hints, is_symbolic, varying

Sizes = Mapping[str, int]
Given = tuple[tuple[str, int], ...]


@dataclass(frozen=True, eq=False)
class Extents:
    """The sizes of a recipe's atoms.

    whole: the whole size of each atom, a number or a symbol. A symbol may have any size that the splits of its atom
    divide; of other atoms this rank has what the recipe's own numbers say.
    """

    recipe: Recipe
    whole: Sizes

    @cached_property
    def is_symbolic(self) -> bool:
        """Whether a size is a symbol."""
        return is_symbolic(tuple(self.whole.values()))

    def derived(self, of: Callable[[Recipe], Recipe]) -> Extents:
        """The extents of a recipe that is derived from this one and has the same atoms."""
        found = of(self.recipe)
        return Extents(found, _dividing(found, self.whole)) if self.is_symbolic else extents_of(found)

    def shape(self, atoms: Sequence[str]) -> Shape:
        """The whole shape of a tensor with one dim per atom."""
        return tuple([self.whole[atom] for atom in atoms])

    def merged(self, groups: Sequence[Sequence[str]]) -> Shape:
        """The whole shape of a tensor whose dims are groups of atoms."""
        return tuple([math.prod(self.whole[atom] for atom in group) for group in groups])

    def local(self, atoms: Sequence[str], sharding: Sharding) -> Shape:
        """This rank's shape of a tensor with one dim per atom."""
        mine = sharding.local_shape(self.recipe.shape_of(tuple(atoms)))
        if not self.is_symbolic:
            return mine
        sizes = zip(self.shape(atoms), sharding.dims, mine, strict=True)
        return tuple([size if type(whole) is int else whole // dim.pieces for whole, dim, size in sizes])

    @cached_property
    def computed(self) -> dict[str, int]:
        """What this rank has of each atom during the local computation."""
        result, found = self.recipe.result, dict[str, int]()
        for atoms, sharding in (*((i.atoms, i.prepared) for i in self.recipe.inputs), (result.atoms, result.derived)):
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


def traced_extents(found: Recipe, shapes: Sequence[Shape], given: Given) -> Extents:
    """The extents of the recipe that was found at the hints of these sizes, of which some are symbols.

    `shapes` are those that tensors have, whole or on this rank.
    """
    numbers = tuple(map(hints, shapes))
    reading = read(found.kind, found.text, tuple(map(len, shapes)), units_of(found.kind, found.text, numbers))
    alone = {(operand, dim): atom for operand, dim, atom in reading.alone}
    uses: list[tuple[Any, Any, int]] = [(name, size, int(name in alone.values())) for name, size in given]
    for place, (operand, shape) in enumerate(zip(found.inputs, shapes, strict=True)):
        whole = found.whole(operand.groups)
        for dim, (size, extent, split) in enumerate(zip(shape, whole, operand.source.dims, strict=True)):
            is_cut_once = (place, dim) in alone and len(split) == 1
            may = type(size) is not int and is_cut_once and extent % hint(size) == 0
            uses.append((alone.get((place, dim)), size * (extent // hint(size)) if may else size, int(may)))
    return Extents(found, _dividing(found, {**found.size, **varying(uses)}))


def _dividing(found: Recipe, whole: Sizes) -> Sizes:
    """The sizes of atoms, where those that the recipe doesn't split evenly are the numbers of this call."""
    result = found.result
    states = [(i.atoms, end) for i in found.inputs for end in (i.elementary, i.prepared)]
    states += [(result.atoms, end) for end in (result.derived, result.target)]
    splits = [split for atoms, sharding in states for split in zip(atoms, sharding.dims, strict=True)]
    counts = {atom: math.lcm(*[dim.pieces for name, dim in splits if name == atom]) for atom in whole}
    return {atom: fixed(size) if size % counts[atom] else size for atom, size in whole.items()}
