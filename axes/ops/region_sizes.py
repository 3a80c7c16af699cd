"""Regions of symbolic sizes: what `torch.compile` traces so that one graph serves many shapes.

A region (see `axes.ops.regions`) is the same at every size that its splits divide. Such sizes stay symbols, and the
graph is guarded on the remainder. Other sizes become numbers, those in groups and those that are written too, and
another size is compiled anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from axes.algebra.grammar import Dim
from axes.ops.regions import (
    Held,
    Placed,
    Region,
    expanded,
    flows,
    key_of,
    placed,
    region_of,
    result_sharding,
    whole_size,
)
from axes.ops.request import Request
from axes.runtime.shards import LocalPart
from axes.runtime.symbols import are_equal, fixed, hint, hints, is_symbolic, spec_at, varying

Shape = tuple[Any, ...]


def traced_region(request: Request, specs: Sequence[Held]) -> tuple[Region, Mapping[str, Any]]:
    """The region of tensors with these `DTensorSpec`s, at the sizes of the call that is traced; and the sizes of its
    names, symbols where they may vary.
    """
    if not any(is_symbolic(spec.shape) for spec in specs):
        found = region_of(request, tuple(specs))
        return found, found.sizes
    found = region_of(request, tuple([spec_at(spec, hints(spec.shape)) for spec in specs]))
    every = [dim for spec in (*found.reading.inputs, *found.reading.outputs) for dim in spec.dims]
    stay = {f.name for dim in every for f in dim.factors if f.size is not None or _is_opened(found, dim)}
    uses = []
    for place, (each, spec) in enumerate(zip(found.inputs, specs, strict=True)):
        for at, (dim, split, size) in enumerate(zip(each.dims, each.sharding.dims, spec.shape, strict=True)):
            name = key_of(dim) or (place, at)
            may = name not in stay and len(split) == 1 and not _is_opened(found, dim)
            uses.append((name, size, split.pieces if may else 0))
    return found, {**found.sizes, **varying(uses)}


def _is_opened(region: Region, dim: Dim) -> bool:
    return dim.grouped and not flows(region.reading, dim)


def traced_results(
    request: Request, specs: Sequence[Held], shapes: Sequence[Shape]
) -> tuple[tuple[Placed, ...], tuple[LocalPart, ...]]:
    """What the results are outside that have these shapes on this rank; where it is symbolic, so is that there. And the
    results as parts, of which some may have to be told even.
    """
    region, sizes = traced_region(request, specs)
    named, parts, numbers = replace(region, sizes=sizes), [], []
    for place, (spec, shape) in enumerate(zip(region.reading.outputs, shapes, strict=False)):
        dims = expanded(spec, len(shape), f"result {place}")
        sharding = result_sharding(region, spec, dims)
        known = [whole_size(named, *each) for each in zip(dims, sharding.dims, shape, strict=True)]
        parts.append(LocalPart(sharding, shape, tuple(known)))
        for split, local, whole in zip(sharding.dims, shape, parts[-1].even, strict=True):
            if len(split) != 1 or whole % split.pieces or not are_equal(whole, local * split.pieces):
                fixed(local), fixed(whole)
        wholes = tuple(map(hint, parts[-1].even))
        numbers.append((LocalPart(sharding, hints(shape), wholes), wholes))
    found = placed(region, *map(tuple, zip(*numbers, strict=True))) if numbers else ()
    return tuple([replace(p, shape=part.even) for p, part in zip(found, parts, strict=True)]), tuple(parts)
