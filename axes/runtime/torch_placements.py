"""Shardings as torch says them: the placements of a `DTensor`, and back.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2 tp=2")
>>> torch_placements(mesh.sharding("b@dp s | sum@tp"))
(Shard(dim=0), Partial(sum))
>>> torch_placements(mesh.sharding("b@(tp dp) s"))       # another order than the mesh's
(_StridedShard(dim=0, sf=2), Shard(dim=0))
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from axes.algebra.errors import ShardingError
from axes.algebra.mesh import Mesh
from axes.algebra.placements import placement_specs, sharding_from
from axes.algebra.sharding import Sharding
from axes.runtime import torch_private
from axes.runtime.groups import of_world


@functools.lru_cache(maxsize=4096)
def torch_placements(sharding: Sharding) -> tuple[Placement, ...]:
    """The DTensor placements of a sharding, one per axis of its mesh."""
    found: list[Placement] = []
    for spec in placement_specs(sharding):
        if spec.op is not None:
            found.append(Partial({"mean": "avg"}.get(spec.op, spec.op)))
        elif spec.dim is None:
            found.append(Replicate())
        elif spec.split_factor == 1:
            found.append(Shard(spec.dim))
        else:
            found.append(torch_private.StridedShard(spec.dim, split_factor=spec.split_factor))
    return tuple(found)


def sharding_of_spec(spec: Any) -> Sharding:
    """The sharding of a DTensor with this `DTensorSpec`, on the mesh that it was made on.

    Raises `ShardingError` for placements that no spec can say, and for an order of axes that
    placements don't show.
    """
    if not torch_private.has_default_order(spec):
        raise ShardingError(
            f"{spec.placements} with a shard_order of its own isn't supported; redistribute to the mesh's order first"
        )
    return sharding_of_placements(spec.mesh, spec.placements, len(spec.shape))


@of_world(4096)
def sharding_of_placements(device_mesh: Any, placements: tuple[Any, ...], ndim: int) -> Sharding:
    """The sharding of a tensor with these placements; `ShardingError` for such as no spec can say."""
    return sharding_from(Mesh.from_device_mesh(device_mesh), placements, ndim)
