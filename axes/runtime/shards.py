"""What a plain tensor is the shard of: placements and the whole shape, by its spec.

>>> from axes.algebra.mesh import Mesh
>>> shard_of(Mesh("dp=2 tp=4"), "b@dp d", (3, 8), None, ())
((Shard(dim=0), Replicate()), torch.Size([6, 8]), ())
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from axes.algebra.errors import AxesError, ShardingError
from axes.algebra.layout import NamedLayout
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import ShardedDim, Sharding
from axes.algebra.specs import marked_sharding
from axes.runtime.symbols import are_equal, fixed, is_symbolic, stand_in
from axes.runtime.torch_placements import torch_placements

Given = tuple[tuple[str, int], ...]
Described = tuple[tuple[Any, ...], Sequence[int], tuple[NamedLayout, ...]]
"""Placements, the whole shape, and the axes that the spec says are `same`."""


def shard_of(mesh: Mesh, spec: str, local: Sequence[int], shape: Sequence[int] | None, given: Given) -> Described:
    """What a shard of this shape is; `shape` is that of the whole where it is given, `given` are sizes of names."""
    sharding, same = _described(mesh, spec, local, given)
    whole = torch.Size(shape) if shape is not None else shape_of_whole(sharding, local)
    sharding = sharding.sized(whole)
    check_torch_can(sharding, whole)
    if mesh.coordinate is not None and (expected := sharding.local_shape(whole)) != tuple(local):
        raise ShardingError(
            f"the shard of {list(whole)} on this rank is {list(expected)} by '{spec}'; found {list(local)}"
            + ("" if shape is not None else ". Uneven shards need shape=...")
        )
    return torch_placements(sharding), whole, same


def _described(mesh: Mesh, spec: str, local: Sequence[int], given: Given) -> tuple[Sharding, tuple[NamedLayout, ...]]:
    sharding, same = marked_sharding(mesh, spec, given, len(local))
    if sharding.ndim != len(local):
        raise ShardingError(f"the spec '{spec}' has {sharding.ndim} dims, the tensor {len(local)}: {list(local)}")
    return sharding, same


def traced_shard_of(
    mesh: Mesh, spec: str, local: Sequence[int], shape: Sequence[int] | None, given: Given
) -> Described:
    """The same for symbolic sizes, which may vary where they are multiples of their parts."""
    if not is_symbolic((*local, *(shape or ()), *(size for _, size in given))):
        return shard_of(mesh, spec, local, shape, given)
    numbers = tuple([(name, fixed(size)) for name, size in given])
    sharding, same = _described(mesh, spec, local, numbers)
    whole = tuple(shape) if shape is not None else tuple(shape_of_whole(sharding, local))
    try:
        found = [_stand_ins(sharding.mesh, *each) for each in zip(sharding.dims, local, whole, strict=True)]
        placements, _, _ = shard_of(mesh, spec, [here for here, _ in found], [there for _, there in found], numbers)
    except (AxesError, ValueError):  # also where the shape has another number of dims, which is said below
        number = None if shape is None else tuple(map(fixed, shape))
        placements, _, _ = shard_of(mesh, spec, tuple(map(fixed, local)), number, numbers)
    return placements, whole, same


def _stand_ins(mesh: Mesh, dim: ShardedDim, local: int, whole: int) -> tuple[int, int]:
    """Numbers for a size on this rank and in whole."""
    count = dim.pieces
    if len(dim.factors) != 1 or dim.factors[0].size is not None or whole % count or not are_equal(whole, local * count):
        return fixed(local), fixed(whole)
    (here,) = stand_in((local,), mesh.size)
    return here, here * count


def shape_of_whole(sharding: Sharding, local: Sequence[int]) -> torch.Size:
    """The whole shape of even shards, or of the sizes that the spec's names are given."""
    found = []
    for dim, extent in zip(sharding.dims, local, strict=True):
        sizes = [factor.size for factor in dim.factors]
        known = math.prod(size for size in sizes if size is not None)
        found.append(known if sizes and None not in sizes else extent * dim.pieces)
    return torch.Size(found)
