"""Redistribution: this rank's tile of one sharding to its tile of another, and DTensors so.

    made = program(mesh.sharding("b s@tp d"), mesh.sharding("b s d@tp"), local.dtype, None, (8, 32, 64))
    local = run(made, local)

One look-up gives what packs, sends, unpacks. Nothing happens where both shardings put the same data on the same ranks.

A redistribution is a linear map (but for max and min), and its gradient is the transposed map, which is a
redistribution, too; `axes.algebra.expressions.transpose` has the table.

Of plain tensors it is `moving`, the local view: each rank has a loss of its own. Axes can be declared `same`: equal
values *and* equal, whole gradients on every rank. Axes that neither side mentions are unknown: what differs along them
is never compared, mixed or borrowed.

Of DTensors it is a `Route`, the global view: there is one loss, and a cotangent is one value however it is sharded.
What arrives says so itself, and nothing is reduced until something needs it. A leaf's gradient is resolved where it is
accumulated, by whoever made the leaf part of a computation. A call is one look-up by what a DTensor knows of itself
(its `DTensorSpec`), a program on its shard, and a DTensor around the result. The result's spec is made once, too.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.chunks import Box, boxes_within, tile_shape
from axes.algebra.errors import AxesError, MeshError, ShardingError, shown, wrong_dims
from axes.algebra.expressions.transpose import gradient_sharding, on_own_axes, transposed
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.plan import Plan, cheapest, choices_between, cuts_of, model_of
from axes.algebra.sharding import EXTREMES, Sharding, unmarked
from axes.algebra.sizes import Shape
from axes.runtime import axis_groups, torch_private, watching
from axes.runtime.axis_groups import AxisGroup
from axes.runtime.graphs import hints, is_symbolic, vary
from axes.runtime.groups import current_world, of_world
from axes.runtime.linear import Kept, Map, both_ways, linear, writable
from axes.runtime.operation import PLAIN, raise_located, waited
from axes.runtime.packing import slices_of, strides_of
from axes.runtime.programs import Program, Run, check_dtypes, name_of
from axes.runtime.torch_placements import sharding_of_spec, torch_placements

Dtypes: TypeAlias = torch.dtype | tuple[torch.dtype | None, torch.dtype | None] | None
"""`comm_dtype`: one for values and gradients, or one for each."""

Spec = Any
"""torch's `DTensorSpec`: mesh, placements, shape, strides and dtype in one hashable value."""

Found = TypeVar("Found")


def moving(source: Sharding, target: Sharding, shape: Shape, comm_dtype: Dtypes, async_op: bool, is_local: bool) -> Map:
    """What takes this rank's tile of a tensor of the whole `shape` from one sharding to the other.

    It is for who holds it: looked up once, not on each call, and for no longer than the world that it was made in.
    `is_local`: with the gradient of the local view; what is `same` on a side stands among what is pending there.
    `comm_dtype` is the dtype in which values travel and are reduced, or a pair for `(values, gradients)`.
    """
    source, target, dtypes = source.at(hints(shape)), target.at(hints(shape)), both(comm_dtype)
    if is_local:
        source, target = on_own_axes(source, target)
    ends = unmarked(source)[0], unmarked(target)[0]
    made = functools.lru_cache(maxsize=16)(lambda dtype: program(*ends, dtype, dtypes[0], shape))
    back = functools.lru_cache(maxsize=16)(lambda dtype: _gradient(source, target, made(dtype), dtypes[1]))

    def moved(x: torch.Tensor) -> torch.Tensor:
        found = made(x.dtype)
        if not is_local or not (x.requires_grad and torch.is_grad_enabled()):
            return run(found, x, async_op)
        return both_ways(lambda x: run(found, x, async_op), back(x.dtype), x)

    return moved


def _gradient(source: Sharding, target: Sharding, forward: Program, comm_dtype: torch.dtype | None) -> Map:
    """The gradient of a move in the local view: from that of the target to this rank's summand of the source's."""
    resolved = [step.op for step in forward.plan.steps if step.op in EXTREMES]
    if resolved:
        raise ShardingError(
            f"a pending {resolved[0]} has no gradient where it is resolved: {source} -> {target}\n"
            f"reduce it by axes.p{resolved[0]}(x, axis) first, which has one; or leave the gradient out, x.detach()"
        )
    arriving, middle, divisor = transposed(source, target)
    made = program(arriving, middle, forward.dtype, comm_dtype, forward.shape)
    means = math.prod([step.divisor for step in forward.plan.steps])
    last = into_summand(middle, source, forward.shape, divisor * means)
    return functools.partial(run, made) if last is None else lambda g: last(run(made, g))


def both(comm_dtype: Dtypes) -> tuple[torch.dtype | None, torch.dtype | None]:
    """`comm_dtype` for values and for gradients; `ShardingError` for what is neither a dtype nor two of them."""
    if comm_dtype is None:
        return None, None
    found = comm_dtype if isinstance(comm_dtype, tuple) else (comm_dtype, comm_dtype)
    if len(found) != 2 or not all(each is None or isinstance(each, torch.dtype) for each in found):
        raise ShardingError(f"comm_dtype is a torch.dtype, or two: for values and gradients; found {shown(comm_dtype)}")
    return found


def run(made: Program, local: torch.Tensor, async_op: bool = False) -> torch.Tensor:
    """The program on this rank's tile: eager on a plain tensor, traced where a graph is being made."""
    if type(local) not in PLAIN:
        local = waited(local)
    sent = local.resolve_conj().resolve_neg().contiguous()  # a view may conjugate or negate where it is read
    if type(local) not in PLAIN:
        return made.traced_at(tuple(local.shape))(sent)
    # What `collective` does, at no price where nobody listens: ranks compare the program, and listeners hear of its
    # steps.
    if watching.compare is not None:
        watching.compare(made.operation)
    try:
        if not async_op:
            return made.eager(sent)
        if sent is local and made.plan.collectives:
            sent = sent.clone()  # the caller may write to its own before it has been sent
        return made.later(sent)
    except RuntimeError as error:
        if not made.plan.collectives:
            raise
        raise_located(error, made.operation)


def carried(made: Program, local: torch.Tensor, async_op: bool = False) -> torch.Tensor:
    """`run`, with a result that shares no memory with `local`.

    A DTensor has a version of its own: autograd wouldn't see that another one changed its memory.
    """
    if made.idle:
        return waited(local).clone(memory_format=torch.contiguous_format)
    return run(made, local, async_op)


# --- programs by what they do ---------------------------------------------------------------------


def check_takes_part(source: Sharding, target: Sharding) -> None:
    """An error where data can't go from one to the other, or this rank has neither of it."""
    meshes = source.mesh, target.mesh
    for mesh in meshes:
        if mesh.binding is None:
            raise MeshError(f"{mesh!r} has no processes; data moves on a mesh made with axes.init_mesh(...)")
    world = current_world()
    if all(mesh.universe.position(world.rank) is None for mesh in meshes):
        raise ShardingError(
            f"rank {world.rank} is neither among the ranks of the source nor among those of the target\n"
            f"  source  {source}  on  {source.mesh!r}\n  target  {target}  on  {target.mesh!r}"
        )


def program(
    source: Sharding, target: Sharding, dtype: torch.dtype, comm_dtype: torch.dtype | None, shape: Shape
) -> Program:
    """How this rank's tile of a tensor of some shape in one sharding becomes that in another.

    The plan is that of all shapes that are cut alike. Raises `ShardingError` where there is none, and `MeshError` where
    a mesh isn't of a running job.
    """
    check_takes_part(source, target)
    numbers, ranks = hints(shape), math.lcm(source.universe.size, target.universe.size)
    ends, pairs = (source.at(numbers), target.at(numbers)), enumerate(zip(source.dims, target.dims, strict=True))
    sized = {dim for dim, (one, two) in pairs if not (one.is_plain and two.is_plain)}

    def find(like: Shape) -> tuple[Plan, bool, Shape]:
        plans = choices_between(*ends, like, name_of(dtype), model_of(source.mesh))
        chosen = cheapest(plans, numbers)
        return chosen, len(plans) == 1, cuts_of(source, target, *chosen.states, chosen.target)

    found, is_only, cuts = found_for(numbers, ranks, find, operator.itemgetter(2), sized)
    shape = vary(shape, cuts) if is_symbolic(shape) else shape
    return Program(_for_this_rank(found, dtype, comm_dtype), cuts, is_only, dtype, comm_dtype, shape)


@of_world(4096)
def _for_this_rank(found: Plan, dtype: torch.dtype, comm_dtype: torch.dtype | None) -> Plan:
    least = found.least.at(current_world().rank)
    check_dtypes(least, dtype, comm_dtype)
    return least


# --- sizes that divide ----------------------------------------------------------------------------

# Where every size that is cut is a multiple of the pieces into which it is cut, plans, placements and gradients are the
# same ones at every size, with all boxes scaled. So they are found for small sizes that share the divisors, and kept by
# these. Where a size isn't a multiple, what is found is for this size alone.


def found_for(
    shape: Shape, ranks: int, find: Callable[[Shape], Found], cuts: Callable[[Found], Shape], own: Collection[int] = ()
) -> Found:
    """What is found for a shape, by the small one that is cut alike on this many ranks.

    `cuts` are those that it makes. Sizes that these don't divide stand for themselves, as those of the dims `own` do;
    and all of them where nothing is found.
    """
    like = [size if dim in own else small_size(size, ranks) for dim, size in enumerate(shape)]
    try:
        found = find(tuple(like))
    except AxesError:
        return find(shape)
    # A mesh that the tensor goes to may have more ranks: then the small size isn't cut as evenly.
    sizes = enumerate(zip(shape, like, cuts(found), strict=True))
    odd = {dim for dim, (size, small, pieces) in sizes if not pieces or size % pieces or small % pieces}
    return found if odd <= {*own} else found_for(shape, ranks, find, cuts, odd.union(own))


def small_size(size: int, ranks: int) -> int:
    """A small size that shares its divisors with the number of ranks.

    A size equal to its number of parts is kept: a leading dim of 1 makes a tile contiguous, which larger ones don't.

    >>> [small_size(size, 8) for size in (4096, 100, 8, 0)]
    [16, 12, 8, 0]
    """
    if ranks % (size or 1) == 0:
        return size
    parts = math.gcd(size, ranks)
    return next(small for small in itertools.count(2 * parts, parts) if math.gcd(small, ranks) == parts)


def spec_at(spec: Any, shape: Shape) -> Any:
    """The `DTensorSpec` at another shape."""
    return torch_private.resized_spec(spec, shape, strides_of(shape))


# --- of DTensors: the global view ---------------------------------------------------------------------


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


# --- gradients in the local view --------------------------------------------------------------


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def into_summand(middle: Sharding, source: Sharding, shape: Shape, share: int) -> Run | None:
    """What makes of this rank's tile of a gradient its summand of the gradient of a tensor; None where it is that.

    The tile is sharded as `middle`, the tensor as `source`: what the rank has of the tensor beside is zero. And `share`
    ranks have the whole of a gradient, of which each takes an equal part. It is of the sizes of this call, and in a
    graph good for all that both shardings divide as they divide these.
    """
    shape, rank = hints(shape), current_world().rank
    inner, outer = middle.tile(shape, rank), source.tile(shape, rank)
    if inner == outer or inner is None or outer is None:
        return None if share == 1 else lambda x: x / share
    tile, larger = tile_shape(inner), tile_shape(outer)
    places = [*zip(boxes_within(inner, inner), boxes_within(inner, outer), strict=True)] if math.prod(tile) else []

    def around(x: torch.Tensor) -> torch.Tensor:
        # In a graph sizes vary, and boxes with them.
        sizes = [(size, own) if own else (1, 1) for size, own in zip(x.shape, tile, strict=True)]
        boxes = [(_scaled(inner, sizes), _scaled(outer, sizes)) for inner, outer in places]
        whole = [stop for _, stop in _scaled([(0, size) for size in larger], sizes)]
        x, out = x if share == 1 else x / share, x.new_zeros(whole)
        for inner, outer in boxes:
            out[slices_of(outer)].copy_(x[slices_of(inner)])
        # A rank that has nothing to say takes part in the derivative all the same.
        return out if boxes or not x.requires_grad else out + x.sum()

    return around


def _scaled(box: Iterable[tuple[int, int]], sizes: Sequence[tuple[int, int]]) -> Box:
    """A box of a tile, in one of which each size is another: `(this size, that of the tile)`."""
    return tuple([(start * n // own, stop * n // own) for (start, stop), (n, own) in zip(box, sizes, strict=True)])


def extreme(
    x: torch.Tensor, op: str, group: AxisGroup, most: Map = _same, count: Map = _same, spread: Map = _same
) -> torch.Tensor:
    """The maximum (minimum) over the ranks of `most(x)`. Its gradient goes to where it is reached, on whatever rank, in
    equal parts.

    `most` is the maximum (minimum) over dims of `x`, `count` the sum over the same, and `spread` repeats along them.
    """
    total = functools.partial(axis_groups.all_reduce, op="sum", group=group)

    def back(g: torch.Tensor, _: tuple[bool, ...], kept: Kept) -> torch.Tensor:
        with torch.no_grad():
            reached = (kept[0] == spread(kept[1])).to(g.dtype)
            share = reached / spread(total(count(reached)))
        return share * spread(both_ways(total, total, g))

    def run(x: torch.Tensor) -> torch.Tensor:
        return writable(axis_groups.all_reduce(most(x), op, group), x)

    return linear(run, back, x, keep=(True, True))  # type: ignore[no-any-return]
