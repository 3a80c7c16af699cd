"""Regions of symbolic sizes: what `torch.compile` traces so that one graph serves many shapes.

A region (see `axes.ops.regions`) depends on sizes through little: tensors agree on the size of a name,
and dims are cut in parts. Where the parts are even it is the same at every size, so numbers stand for
the symbols, those of a name the same one. That sizes are equal, and multiples of their parts, is asked
of the symbols, which guards the graph. A dim that is uneven, written with a number or split inside
has the size of this call, for which alone the graph is then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from axes.algebra.errors import AxesError
from axes.algebra.grammar import Dim
from axes.algebra.mesh import Mesh
from axes.algebra.sharding import ShardedDim
from axes.ops.regions import (
    Held,
    Placed,
    Region,
    RegionExpression,
    check_count,
    expanded,
    flows,
    key_of,
    placed,
    read_region,
    region_of,
    result_sharding,
    whole_size,
)
from axes.runtime.shards import LocalPart
from axes.runtime.symbols import are_equal, fixed, is_symbolic, spec_at, stand_in
from axes.runtime.torch_placements import sharding_of_spec

Asked = tuple[str, Mesh | None, bool]
"""What `region_of` is asked beside the tensors: the expression, the mesh of its names, and whether it is given."""

Shape = tuple[Any, ...]
Sizes = Mapping[Any, Any]
"""Numbers and symbols; these by name."""


def traced_region(asked: Asked, specs: Sequence[Held]) -> Region:
    """The region of tensors with these `DTensorSpec`s, whose sizes may be symbolic."""
    try:
        return _region(asked, specs, every=False)[0]
    except AxesError:
        return _region(asked, specs, every=True)[0]


def traced_results(
    asked: Asked, specs: Sequence[Held], shapes: Sequence[Shape]
) -> tuple[tuple[Placed, ...], tuple[LocalPart, ...]]:
    """What the results are outside that have these shapes on this rank; where it is symbolic, so is that there. And the
    results as parts, of which some may have to be told even.
    """
    try:
        return _results(*_region(asked, specs, every=False), shapes, every=False)
    except AxesError:
        return _results(*_region(asked, specs, every=True), shapes, every=True)


def _region(asked: Asked, specs: Sequence[Held], every: bool) -> tuple[Region, Sizes]:
    """The region at numbers, and the symbolic sizes of its names. `every` size is the number of this call."""
    reading = read_region(asked[0])
    shapes = [tuple(spec.shape) for spec in specs]
    if not any(map(is_symbolic, shapes)):
        found = region_of(*asked, tuple(specs))
        return found, found.sizes
    if every:
        numbers, symbols = [tuple(map(fixed, shape)) for shape in shapes], {}
    else:
        check_count("the function is called with", len(specs), reading.inputs, "left")
        dims = [_dims_of(reading, place, spec) for place, spec in enumerate(specs)]
        kept = _unvarying(reading, [each for tensor in dims for each in tensor])
        ranks = max(spec.mesh.size() for spec in specs)
        numbers = [
            tuple([fixed(d.size) if d.name in kept else stand_in((d.size,), ranks)[0] for d in tensor])
            for tensor in dims
        ]
        symbols = {d.name: d.size for tensor in dims for d in tensor}
    found = region_of(*asked, tuple(map(spec_at, specs, numbers)))
    return found, {**found.sizes, **symbols}


class _SizedDim(NamedTuple):
    """A dim of a tensor by name, or by its place where it has none, and whether its size can vary."""

    name: str | tuple[int, int]
    size: Any
    varies: bool


def _dims_of(reading: RegionExpression, place: int, held: Held) -> list[_SizedDim]:
    sharding = sharding_of_spec(held)
    dims = expanded(reading.inputs[place], sharding.ndim, f"tensor {place}")
    found = []
    for at, (dim, split, size) in enumerate(zip(dims, sharding.dims, held.shape, strict=True)):
        whole = len(split.factors) == 1 and (not dim.grouped or flows(reading, dim))
        even = whole and size % split.pieces == 0
        found.append(_SizedDim(key_of(dim) or (place, at), size, even))
    return found


def _unvarying(reading: RegionExpression, dims: Sequence[_SizedDim]) -> set[str | tuple[int, int]]:
    """The names whose sizes can't vary."""
    found: set[str | tuple[int, int]] = set()
    for written in (dim for spec in (*reading.inputs, *reading.outputs) for dim in spec.dims):
        inside = written.grouped and not flows(reading, written)
        found.update(f.name for f in written.factors if f.name and (inside or f.size is not None))
    first = {dim.name: dim.size for dim in reversed(dims)}
    for dim in dims:
        if not dim.varies or type(dim.size) is int or not are_equal(dim.size, first[dim.name]):
            found.add(dim.name)
    return found


def _results(
    region: Region, sizes: Sizes, shapes: Sequence[Shape], every: bool
) -> tuple[tuple[Placed, ...], tuple[LocalPart, ...]]:
    reading, named = region.reading, replace(region, sizes=sizes)
    check_count("the function returned", len(shapes), reading.outputs, "right")
    parts, numbers, wholes = [], [], []
    for place, (spec, shape) in enumerate(zip(reading.outputs, shapes, strict=False)):
        dims = expanded(spec, len(shape), f"result {place}")
        sharding = result_sharding(region, spec, dims)
        each = list(zip(dims, sharding.dims, shape, strict=True))
        parts.append(LocalPart(sharding, shape, tuple([whole_size(named, *one) for one in each])))
        wholes.append(parts[-1].even)
        pairs = [_numbers(region, *one, whole, every) for one, whole in zip(each, wholes[-1], strict=True)]
        here, there = zip(*pairs, strict=True) if pairs else ((), ())
        numbers.append((LocalPart(sharding, here, there), there))
    found = placed(region, *(tuple(each) for each in zip(*numbers, strict=True))) if numbers else ()
    return tuple([replace(one, shape=whole) for one, whole in zip(found, wholes, strict=True)]), tuple(parts)


def _numbers(region: Region, dim: Dim, split: ShardedDim, local: Any, whole: Any, every: bool) -> tuple[int, int]:
    """What stands for a size of a result on this rank, and for `whole`, its size outside."""
    count = split.pieces
    if every or len(split.factors) != 1 or whole % count or not are_equal(whole, local * count):
        return fixed(local), fixed(whole)
    (here,) = stand_in((local,), region.home.size)
    there = whole_size(region, dim, split, here)
    there = here * count if there is None else there
    return there // count, there
