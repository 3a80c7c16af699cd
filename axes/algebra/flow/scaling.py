"""Scaling: sizes on which a recipe doesn't depend. It is found for one of them, and scaled to the others.

An atom that is a dim by itself wherever it stands meets no other size, and all that a recipe asks of its own is whether
splits divide it. Of every multiple of the number of ranks they do. So one size stands for all of these:

>>> from axes.algebra.flow.reading import read
>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2")
>>> reading = read("rearrange", "b s (h d) -> s b h d", (3,))
>>> standing_for(reading, mesh, (mesh.sharding("b@dp _ _"),), ((6, 5, 12),), {"h"})
(((4, 5, 12),), {'b': 6})
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from axes.algebra.flow.carrier import uses_of
from axes.algebra.flow.reading import Reading
from axes.algebra.flow.recipe import Groups, Recipe, Shape
from axes.algebra.mesh import Mesh
from axes.algebra.sharding import Sharding

_TIMES = 2
"""How often the number of ranks goes into a size that stands for others: none is one, on a single rank either."""


def standing_for(
    reading: Reading, mesh: Mesh, shardings: Sequence[Sharding | None], shapes: Sequence[Shape], given: Collection[str]
) -> tuple[tuple[Shape, ...], dict[str, int]]:
    """Shapes that stand for these, of which the recipe is the same one but for sizes; and the whole sizes of the atoms
    in which they differ. None differ where a size contradicts another.

    `given` are the names whose size the caller says: of these the recipe is found as they are.
    """
    standing, wholes = [list(shape) for shape in shapes], dict[str, int]()
    as_they_are = {*given, *(atom for operand, dim, atom in reading.alone if _has_factors(shardings[operand], dim))}
    for operand, dim, atom in reading.alone:
        sharding, extent = shardings[operand], shapes[operand][dim]
        axes = uses_of(reading.operands[operand].slots[dim]) if sharding is None else ()
        count = math.prod([mesh.layout(axis).size for _, axis in axes])
        whole = extent * count
        if atom in as_they_are or whole <= 1 or whole % mesh.size or mesh.size % count:
            continue
        if wholes.setdefault(atom, whole) != whole:
            return tuple(shapes), {}
        standing[operand][dim] = _TIMES * mesh.size // count
    return tuple(map(tuple, standing)), wholes


def _has_factors(sharding: Sharding | None, dim: int) -> bool:
    """Whether a dim is a group of factors, of which some have sizes."""
    return sharding is not None and len(sharding.dims[dim].factors) > 1


def scaled(found: Recipe, wholes: Mapping[str, int]) -> Recipe:
    """The recipe with other whole sizes of some atoms."""
    sizes = {**found.size, **wholes}

    def shape(groups: Groups) -> Shape:
        return tuple([math.prod([sizes[atom] for atom in group]) for group in groups])

    inputs = tuple([replace(i, shape=shape(i.groups)) for i in found.inputs])
    result = replace(found.result, shape=shape(found.result.groups))
    divisor = 1
    if found.divisor != 1:
        gone = {*inputs[0].atoms} - {*result.atoms}
        divisor = math.prod([sizes[atom] for atom in gone])
    return replace(found, sizes=tuple(sizes.items()), inputs=inputs, result=result, divisor=divisor)
