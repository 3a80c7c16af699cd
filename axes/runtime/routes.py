"""Resharding DTensors: `redistribute`, with what torch needs around it, in the global view.

    y = resharded(x, mesh.sharding("b s d@tp"))

A call is one look-up by what x knows of itself (its `DTensorSpec`), a program on its shard, and a
DTensor around the result. The result's spec is made once, too.

**Gradients.** There is one loss, and a cotangent is one value however it is sharded: what arrives says so itself, and
nothing is reduced until something needs it (see the table in `gradients`). A leaf's gradient is resolved where it is
accumulated, by whoever made the leaf part of a computation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import wrong_dims
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import Sharding
from axes.runtime import torch_private
from axes.runtime.gradients import gradient_sharding
from axes.runtime.groups import of_world
from axes.runtime.linear import linear, writable
from axes.runtime.packing import strides_of
from axes.runtime.programs import Program
from axes.runtime.redistribute import Dtypes, both, carried, program
from axes.runtime.symbols import found_for, hints, is_symbolic, spec_at, vary
from axes.runtime.torch_placements import sharding_of_spec, torch_placements

Shape = tuple[int, ...]
Spec = Any
"""torch's `DTensorSpec`: mesh, placements, shape, strides and dtype in one hashable value."""


@dataclass(frozen=True, eq=False)
class Route:
    """A redistribution of DTensors with one spec: what their shards go through, and the spec of the result."""

    ends: tuple[Sharding, Sharding]
    made: Program
    spec: Spec
    gradient_dtype: torch.dtype | None
    stays: bool
    async_op: bool = False

    def at(self, shape: Shape) -> Route:
        """The same for tensors of another shape that is cut alike."""
        made = replace(self.made, shape=shape)
        if not made.is_only:
            made = program(*self.ends, made.dtype, made.comm_dtype, shape)
        return Route(self.ends, made, spec_at(self.spec, made.shape), self.gradient_dtype, self.stays, self.async_op)

    def take(self, x: DTensor) -> DTensor:
        """The DTensor in its new sharding; `x` itself where it is so already."""
        return x if self.stays else linear(self.moved, self.back, x)  # type: ignore[no-any-return]

    def moved(self, x: DTensor) -> DTensor:
        """The same, outside of autograd."""
        return torch_private.dtensor(carried(self.made, torch_private.local_of(x), self.async_op), self.spec)

    def back(self, cotangent: DTensor) -> DTensor:
        """The gradient of the source, by what the cotangent of the target is."""
        return _back(torch_private.spec_of(cotangent), self.ends[0], self.gradient_dtype).take(cotangent)


def resharded(x: DTensor, target: Sharding, comm_dtype: Dtypes = None) -> DTensor:
    """`x` in another sharding, on the target's mesh. Differentiable, any number of times.

    `comm_dtype` is the dtype in which values travel and are reduced, or a pair for `(values, gradients)`.

    Raises `ShardingError` where nothing takes the sharding of `x` to the target, or where DTensor can't
    express the target for this shape; on every rank, before anything is sent.
    """
    return route(torch_private.spec_of(x), target, both(comm_dtype)).take(x)


def same_axes(one: Mesh, other: Mesh) -> bool:
    """Whether a DTensor on one mesh is on the other: the same axes by name, over the same groups."""
    return one is other or (
        (one.universe, one.axis_names, one.layouts) == (other.universe, other.axis_names, other.layouts)
        and other.binding in (None, one.binding)
    )


def of_sizes(find: Callable[..., Route]) -> Callable[..., Route]:
    """`find(spec, *how)`, asked for one of all shapes that are cut as evenly, and kept by shape."""

    @of_world(4096)
    def kept(spec: Spec, *how: Any) -> Route:
        if is_symbolic(spec.shape):
            found = kept(spec_at(spec, hints(spec.shape)), *how)
            return found.at(vary(spec.shape, found.made.cuts))
        shape = tuple(spec.shape)

        def at(like: Shape) -> Route:
            return find(spec, *how) if like == shape else kept(spec_at(spec, like), *how)

        return found_for(shape, spec.mesh.size(), at, lambda route: route.made.cuts).at(shape)

    return kept


@of_sizes
def route(spec: Spec, target: Sharding, comm_dtypes: tuple[torch.dtype | None, torch.dtype | None]) -> Route:
    """How DTensors with this spec come to a target."""
    source, shape, dtype = sharding_of_spec(spec), tuple(spec.shape), spec.tensor_meta.dtype
    if target.ndim != len(shape):
        raise wrong_dims(target, target.ndim, len(shape), shape)
    target = target.sized(shape)
    check_torch_can(target, shape)
    made = program(source, target, dtype, comm_dtypes[0], shape)
    device_mesh = spec.mesh if same_axes(source.mesh, target.mesh) else target.mesh.device_mesh
    placements = torch_placements(target)
    stays = made.idle and device_mesh is spec.mesh and placements == spec.placements
    result = torch_private.dtensor_spec(device_mesh, placements, shape, strides_of(shape), dtype)
    return Route((source, target), made, result, comm_dtypes[1], stays)


def resolved(x: DTensor) -> DTensor:
    """`x`, whose gradient is brought to its own sharding here, nothing pending."""
    spec = torch_private.spec_of(x)
    own = replace(sharding_of_spec(spec), pending=())
    return linear(lambda x: torch_private.dtensor(torch_private.local_of(x), spec), lambda g: resharded(g, own), x)


@of_sizes
def _back(spec: Spec, source: Sharding, dtype: torch.dtype | None) -> Route:
    """The route of a cotangent with this spec to a value that was sharded as `source`."""
    return route(spec, gradient_sharding(source, sharding_of_spec(spec), tuple(spec.shape)), (dtype, dtype))


# --- the whole, as a plain tensor


def unsharded(x: DTensor) -> torch.Tensor:
    """The whole tensor on every rank. Its gradient must be the same on every rank, as its value is."""
    spec = torch_private.spec_of(x)
    gathering = route(spec, Mesh.from_device_mesh(spec.mesh).sharding(" ".join(["_"] * x.ndim)), (None, None))

    def whole(x: DTensor) -> torch.Tensor:
        local = torch_private.local_of(x)
        return writable(carried(gathering.made, local), local)

    return linear(whole, lambda g: gathering.back(_replicated(g.contiguous(), gathering.spec)), x)  # type: ignore[no-any-return]


def _replicated(local: torch.Tensor, spec: Spec) -> DTensor:
    """A plain tensor that is the same on every rank, as a DTensor."""
    return linear(lambda x: torch_private.dtensor(x.detach(), spec), unsharded, local)
