"""Resharding DTensors: `redistribute`, with what torch needs around it, in the global view.

    y = resharded(x, mesh.sharding("b s d@tp"))

A call is one look-up by what x knows of itself (its `DTensorSpec`), a program on its shard, and a
DTensor around the result. The result's spec is made once, too.

**Gradients.** There is one loss, and a cotangent is one value however it is sharded: what arrives
says so itself. Nothing is reduced until something needs it:

| value is | its gradient is |
| --- | --- |
| split | split the same way: a pending one is reduce-scattered, a whole one sliced |
| replicated | as it arrived: split or pending, it stays so |
| pending | replicated |

(`axes.algebra.flow.required` is this rule, digit by digit.) A leaf's gradient is resolved where it is
accumulated, by whoever made the leaf part of a computation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import AxesError, ShardingError
from axes.algebra.flow import required
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.plan import small_shape
from axes.algebra.sharding import Sharding
from axes.runtime import torch_private
from axes.runtime.groups import of_world
from axes.runtime.linear import linear
from axes.runtime.packing import strides_of
from axes.runtime.programs import Program
from axes.runtime.redistribute import (
    Dtypes,
    both,
    carried,
    program,
    programs_alike,
)
from axes.runtime.symbols import is_symbolic, settled_sizes, spec_at, stages_of
from axes.runtime.torch_placements import contiguous_strides, sharding_of_spec, torch_placements
from axes.runtime.writes import writable

Shape = tuple[int, ...]
Programs = Callable[[Shape], Program]
Spec = Any
"""torch's `DTensorSpec`: mesh, placements, shape, strides and dtype in one hashable value."""


@dataclass(frozen=True, eq=False)
class Route:
    """A redistribution of DTensors with one spec: `program` for their shards, `spec` of the result."""

    source: Sharding
    target: Sharding
    program: Program
    spec: Spec
    comm_dtypes: tuple[torch.dtype | None, torch.dtype | None]
    stays: bool

    def programs(self) -> Programs | None:
        """Those for all shapes that are cut as its own is, where the sharding is the same one for all of them."""
        ends, plan = (self.source, self.target), self.program.plan
        if not all(end.is_plain for end in ends) or ends[0].universe != ends[1].universe:
            return None
        return programs_alike(plan.source, plan.target, plan.shape, self.program.dtype, self.comm_dtypes[0])

    def by(self, made: Program, shape: Shape, strides: Shape) -> Route:
        """The same for tensors of another shape, by the program for that."""
        strides = contiguous_strides(shape) if made.plan.steps else strides
        spec = torch_private.resized_spec(self.spec, shape, strides)
        return Route(self.source, self.target, made, spec, self.comm_dtypes, self.stays)

    def take(self, x: DTensor, async_op: bool = False) -> DTensor:
        """The DTensor in its new sharding; `x` itself where it is so already."""
        if torch.is_grad_enabled() and x.requires_grad:
            return x if self.stays else linear(lambda x: self.moved(x, async_op), self.back, x)
        return x if self.stays else self.moved(x, async_op)

    def moved(self, x: DTensor, async_op: bool = False) -> DTensor:
        """The same, outside of autograd."""
        local = torch_private.local_of(x)
        found = carried(self.program, local, async_op)
        return torch_private.dtensor(found, self.spec if type(local) is torch.Tensor else self.spec_like(x))

    def back(self, cotangent: DTensor) -> DTensor:
        """The gradient of the source, by what the cotangent of the target is."""
        return routed(cotangent, _back, self.source, self.comm_dtypes[1]).take(cotangent)

    def spec_like(self, x: DTensor) -> Spec:
        """The result's spec: with the symbolic sizes of `x` where it has any."""
        spec = torch_private.spec_of(x)
        if not is_symbolic(spec.shape):
            return self.spec
        shape = tuple(spec.shape)
        strides = tuple(spec.tensor_meta.stride) if self.program.idle else strides_of(shape)
        return torch_private.dtensor_spec(self.spec.mesh, self.spec.placements, shape, strides, self.program.dtype)


def resharded(x: DTensor, target: Sharding, comm_dtype: Dtypes = None, async_op: bool = False) -> DTensor:
    """`x` in another sharding, on the target's mesh. Differentiable, any number of times.

    `comm_dtype` is the dtype in which values travel and are reduced, or a pair for `(values, gradients)`;
    with `async_op` the result of the last collective is waited for at its first use.

    Raises `ShardingError` where nothing takes the sharding of `x` to the target, or where DTensor can't
    express the target for this shape; on every rank, before anything is sent.
    """
    return routed(x, route, target, both(comm_dtype)).take(x, async_op)


def routed(x: DTensor, find: Callable[..., Route], *how: Any) -> Route:
    """The route `find(spec, *how)` of a DTensor, whose sizes may be symbolic."""
    spec = torch_private.spec_of(x)
    if type(torch_private.local_of(x)) is torch.Tensor or not is_symbolic(spec.shape):
        return find(spec, *how)
    return settled_sizes(
        spec.shape,
        spec.mesh.size(),
        lambda shape: find(spec_at(spec, shape), *how),
        lambda found: stages_of(found.program.plan),
    )


def same_axes(one: Mesh, other: Mesh) -> bool:
    """Whether a DTensor on one mesh is on the other: the same axes by name, over the same groups."""
    return one is other or (
        (one.universe, one.axis_names, one.layouts) == (other.universe, other.axis_names, other.layouts)
        and other.binding in (None, one.binding)
    )


def of_sizes(find: Callable[..., Route]) -> Callable[..., Route]:
    """Keep what `find(spec, *how)` gives, and find it once for all shapes that divide into the same parts."""

    @of_world(4096)
    def base(mesh: Any, placements: Any, shape: Shape, dtype: torch.dtype, *how: Any) -> Any:
        spec = torch_private.dtensor_spec(mesh, placements, shape, contiguous_strides(shape), dtype)
        try:
            found = find(spec, *how)
        except AxesError:
            return None, None  # what is refused is refused with its own sizes
        return found, found.programs()

    @of_world(4096)
    @functools.wraps(find)
    def found(spec: Spec, *how: Any) -> Route:
        meta = spec.tensor_meta
        shape = tuple(meta.shape)
        smaller = small_shape(shape, _ranks(spec.mesh))
        if smaller != shape:
            there, programs = base(spec.mesh, spec.placements, smaller, meta.dtype, *how)
            if programs is not None:
                return there.by(programs(shape), shape, meta.stride)
        return find(spec, *how)

    return found


@of_world(64)
def _ranks(device_mesh: Any) -> int:
    """How many ranks there are, those on other axes included."""
    return Mesh.from_device_mesh(device_mesh).universe.size


@of_sizes
def route(spec: Spec, target: Sharding, comm_dtypes: tuple[torch.dtype | None, torch.dtype | None]) -> Route:
    """How DTensors with this spec come to a target."""
    source, shape, dtype = sharding_of_spec(spec), tuple(spec.shape), spec.tensor_meta.dtype
    if target.ndim != len(shape):
        raise ShardingError(
            f"the target has {target.ndim} dims, the tensor {len(shape)}: {list(shape)}\n"
            f"  source  {source}\n  target  {target}"
        )
    target = target.sized(shape)
    check_torch_can(target, shape)
    made = program(source.at(shape), target.at(shape), shape, dtype, comm_dtypes[0])
    device_mesh = spec.mesh if same_axes(source.mesh, target.mesh) else target.mesh.device_mesh
    placements = torch_placements(target)
    stays = made.idle and device_mesh is spec.mesh and placements == spec.placements
    strides = tuple(spec.tensor_meta.stride) if made.idle else contiguous_strides(shape)
    result = torch_private.dtensor_spec(device_mesh, placements, shape, strides, dtype)
    return Route(source, target, made, result, comm_dtypes, stays)


def settled(x: DTensor) -> DTensor:
    """`x`, whose gradient is brought to its own sharding here, nothing pending."""
    spec = torch_private.spec_of(x)
    own = replace(sharding_of_spec(spec), pending=())
    return linear(lambda x: torch_private.dtensor(torch_private.local_of(x), spec), lambda g: resharded(g, own), x)


@of_sizes
def _back(spec: Spec, source: Sharding, dtype: torch.dtype | None) -> Route:
    """The route of a cotangent with this spec to a value that was sharded as `source`."""
    return route(spec, gradient_sharding(source, sharding_of_spec(spec), tuple(spec.shape)), (dtype, dtype))


def gradient_sharding(source: Sharding, arrived: Sharding, shape: tuple[int, ...]) -> Sharding:
    """What sharding the gradient of a value gets, by that of the cotangent that arrives.

    >>> from axes.algebra.mesh import Mesh
    >>> mesh = Mesh("dp=2 tp=2")
    >>> gradient_sharding(mesh.sharding("b@dp d"), mesh.sharding("b d | sum@(dp tp)"), (4, 4)).spec
    'b@dp d | sum@tp'
    """
    plain = replace(source, pending=())
    if source.mesh.universe != arrived.mesh.universe or source.mesh.layouts != arrived.mesh.layouts:
        return plain
    arrived = arrived.on(source.mesh)
    try:
        found = required(source.sized(shape), arrived.sized(shape))
        check_torch_can(found, shape)
    except ShardingError:
        # What is kept as it arrived may not fit the dims of the source; then it is gathered.
        return required(source.sized(shape), arrived.sized(shape), lazy=False)
    return found


# --- the whole, as a plain tensor


def unsharded(x: DTensor) -> torch.Tensor:
    """The whole tensor on every rank. Its gradient must be the same on every rank, as its value is."""
    there = routed(x, _to_whole)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return carried(there.program, torch_private.local_of(x))
    spec = there.spec_like(x)

    def whole(x: DTensor) -> torch.Tensor:
        local = torch_private.local_of(x)
        return writable(carried(there.program, local), local)

    return linear(whole, lambda g: there.back(_replicated(g.contiguous(), _dense(spec))), x)


@of_sizes
def _to_whole(spec: Spec) -> Route:
    mesh = sharding_of_spec(spec).mesh
    return route(spec, mesh.sharding(" ".join(["_"] * len(spec.shape))), (None, None))


def _dense(spec: Spec) -> Spec:
    """The spec with the strides of a contiguous tensor."""
    shape = tuple(spec.shape)
    return spec_at(spec, shape) if is_symbolic(shape) else _dense_spec(spec)


@of_world(4096)
def _dense_spec(spec: Spec) -> Spec:
    return spec_at(spec, tuple(spec.shape))


def _replicated(local: torch.Tensor, spec: Spec) -> DTensor:
    """A plain tensor that is the same on every rank, as a DTensor."""
    return linear(lambda x: torch_private.dtensor(x.detach(), spec), unsharded, local)
