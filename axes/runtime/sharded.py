"""Sharded tensors: torch's own `DTensor`, made from and described by specs.

    x = axes.shard(tensor, "batch@dp seq@(cp tp) embed", mesh=mesh)    # every rank has the whole
    x = axes.from_local(local, "batch@dp seq embed", mesh=mesh)        # every rank has its shard
    axes.spec_of(x)                                                    # '_@dp _@(cp tp) _'
    axes.unshard(x)                                                    # the whole, on every rank

In a spec the whole truth is written: a bare name is unsplit, an axis that isn't named is
replicated. FSDP2, tensor-parallel styles, optimizers, `torch.compile` and distributed checkpoint
take these DTensors as they take their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from axes.algebra import seam
from axes.algebra.ambient import required_mesh
from axes.algebra.errors import MeshError, ShardingError
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import Indices, Sharding, parsed_sharding
from axes.algebra.sizes import checked_rank, checked_shape, written_sizes
from axes.runtime import torch_private
from axes.runtime.agreement import ranks_text
from axes.runtime.border import contiguous_strides, enter_global, leave_global
from axes.runtime.collectives import kept
from axes.runtime.graphs import known, number_of
from axes.runtime.packing import strides_of
from axes.runtime.placements import sharding_of_spec, torch_placements
from axes.runtime.reshard import resharded, unsharded
from axes.runtime.shards import Given, shard_of, traced_shard_of
from axes.runtime.transforms import check_not_wrapped, check_whole, refuse_transform

Sizes = Mapping[str, int]


def shard(
    tensor: torch.Tensor,
    spec: str,
    /,
    mesh: Mesh | None = None,
    source_rank: int | None = None,
    *,
    sizes: Sizes | None = None,
    **keywords: int,
) -> DTensor:
    """A tensor that every rank has whole, as a DTensor that keeps this rank's shard of it.

    Nothing is sent, unless `source_rank` names a global rank whose tensor is broadcast first, to the
    ranks of the mesh alone: of `mesh["tp"]` these are the ranks along `tp` through this one, and the
    ranks along another call `shard` by themselves, or not at all, with a source of their own. The
    shard is a copy on the mesh's device; `requires_grad` carries over. Sizes are those of factors
    of grouped dims. As `torch.distributed.tensor.distribute_tensor`, which always broadcasts.

    Raises `ShardingError` for a spec that doesn't fit the tensor, that has something pending, or
    that DTensor can't express for this shape; the same on every rank, before anything is sent.

        w = axes.shard(weight, "(qkv=3 heads@tp dim) embed@fsdp", mesh=mesh, heads=16)
    """
    mesh = required_mesh(mesh, "axes.shard")
    _plain(tensor, "axes.shard", "axes.reshard")
    if tensor.requires_grad and not tensor.is_leaf:
        raise ShardingError(
            "axes.shard takes a leaf or a tensor without gradient; found the result of a computation. "
            "Inside one, use axes.from_local"
        )
    sharding = _whole_spec(mesh, spec, tensor.ndim, tensor.shape, written_sizes(keywords, sizes))
    if sharding.pending:
        raise ShardingError(f"a whole tensor has nothing pending; found '{spec}'. Use axes.from_local for summands")
    source = None if source_rank is None else _source(mesh, source_rank)
    device_mesh = mesh.device_mesh
    value = tensor.detach()
    if source is not None:
        value = _broadcast(value, mesh, source)
    local = take_shard(value, sharding).to(mesh.binding.device_type)
    made = dtensor_of(local, sharding, tensor.shape, device_mesh)
    return made.requires_grad_(tensor.requires_grad)


def from_local(
    local: torch.Tensor,
    spec: str,
    /,
    mesh: Mesh | None = None,
    shape: Sequence[int] | None = None,
    *,
    sizes: Sizes | None = None,
    **keywords: int,
) -> DTensor:
    """The DTensor whose shard on this rank is `local`. Nothing is sent or copied.

    `shape` is the whole shape; without it, split dims are taken to divide evenly, or have the whole
    sizes that `sizes` and keywords give to names. What isn't split must be equal on every rank of
    the mesh. Differentiable: the gradient of `local` is this rank's (see `axes.runtime.border`).

    Raises `ShardingError` where `local` isn't the shard that the spec and the shape say.

        h = axes.from_local(torch.randn(4, 8), "batch@dp embed | sum@tp", mesh=mesh)
    """
    mesh = required_mesh(mesh, "axes.from_local")
    _plain(local, "axes.from_local", "axes.reshard")
    given = written_sizes(keywords, sizes)
    shape = None if shape is None else checked_shape(shape)
    if torch.compiler.is_compiling():
        number = number_of(mesh, spec, tuple([name for name, _ in given]), shape is not None)
        return _from_local_node(local, device_mesh_input(mesh), number, shape or (), tuple([size for _, size in given]))
    placements, whole = shard_of(mesh, spec, tuple(local.shape), shape, given)
    return enter_global(local, mesh.device_mesh, placements, whole, strides_like(local, whole))


def unshard(x: DTensor) -> torch.Tensor:
    """The whole tensor on every rank, pending reductions done. Differentiable.

    axes.unshard(axes.shard(torch.arange(8), "n@dp", mesh=mesh))     # tensor([0, 1, ..., 7])
    """
    _distributed(x, "axes.unshard")
    if torch_private.transforms_are_on():
        check_whole("axes.unshard", (x,))
    return _unshard_node(x) if torch.compiler.is_compiling() else unsharded(x)


def to_local(x: DTensor) -> torch.Tensor:
    """This rank's shard as a plain tensor. Nothing is sent or copied.

    Differentiable by the border's rule: the gradient of a replicated tensor is each rank's summand.
    (torch's `x.to_local()` takes it to be the whole on every rank unless it is told otherwise.)
    """
    _distributed(x, "axes.to_local")
    if torch_private.transforms_are_on():
        check_whole("axes.to_local", (x,))
    return _to_local_node(x) if torch.compiler.is_compiling() else leave_global(x)


def spec_of(x: DTensor) -> str:
    """The sharding of a DTensor as text; its dims have no names: `'_@dp _@(cp tp) _ | sum@ep'`."""
    if torch.compiler.is_compiling():
        _distributed(x, "axes.spec_of")
        return _text(x.device_mesh, x.placements, x.ndim)
    return sharding_of(x).spec


def sharding_of(x: DTensor) -> Sharding:
    """The sharding of a DTensor, on the mesh that it was made on.

    Raises `ShardingError` for placements that no spec can say.
    """
    _distributed(x, "axes.sharding_of")
    if torch.compiler.is_compiling():
        return getattr(kept, _keep_sharding(x.device_mesh, x.placements, x.ndim))
    return sharding_of_spec(torch_private.spec_of(x))


def lift(x: DTensor, mesh: Mesh) -> DTensor:
    """`x`, declared to be replicated over the further axes of a larger mesh. A copy; nothing is sent.

    Differentiable; the gradient is resolved over the further axes.

    Raises `MeshError` where `mesh` lacks an axis of the mesh that `x` is on.

        w = axes.lift(axes.shard(weight, "d f@tp", mesh=mesh["tp"]), mesh["dp", "tp"])
    """
    _distributed(x, "axes.lift")
    if torch_private.transforms_are_on():
        check_whole("axes.lift", (x,))
    if torch.compiler.is_compiling():
        return _lift_node(x, device_mesh_input(mesh), number_of(mesh))
    return _lifted(x, mesh)


def _lifted(x: DTensor, mesh: Mesh) -> DTensor:
    sharding = sharding_of_spec(torch_private.spec_of(x))
    old = sharding.mesh
    if old.universe != mesh.universe:
        raise MeshError(f"lift stays within one universe; x is on {old!r}, the mesh is {mesh!r}")
    names = []
    for name, layout in zip(old.axis_names, old.layouts, strict=True):
        match = next((new for new, other in zip(mesh.axis_names, mesh.layouts, strict=True) if other == layout), None)
        if match is None:
            raise MeshError(f"axis '{name}' ({layout}) of the tensor isn't an axis of {mesh!r}")
        names.append(match)
    by_name = dict(zip(names, x.placements, strict=True))
    placements = tuple(by_name.get(name, Replicate()) for name in mesh.axis_names)
    order = [name for name in mesh.axis_names if name in by_name]
    if order != names and any(not isinstance(p, Replicate) for p in x.placements):
        # Placements apply in mesh order: in another order the same sharding reads differently.
        renamed = dict(zip(old.axis_names, names, strict=True))
        placements = torch_placements(_renamed(sharding, mesh, renamed))
    spec = torch_private.dtensor_spec(mesh.device_mesh, placements, x.shape, x.stride(), x.dtype)
    return _Lift.apply(x, spec)


# in torch.compile: nodes of the graph, and constants


@torch.compiler.allow_in_graph
def _unshard_node(x: DTensor) -> torch.Tensor:
    return unsharded(x)


@torch.compiler.allow_in_graph
def _to_local_node(x: DTensor) -> torch.Tensor:
    return leave_global(x)


@torch.compiler.allow_in_graph
def _from_local_node(
    local: torch.Tensor, _: Any, number: int, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> DTensor:
    mesh, spec, names, is_given = known(number)
    given = tuple(zip(names, sizes, strict=True))
    placements, whole = traced_shard_of(mesh, spec, tuple(local.shape), shape if is_given else None, given)
    return enter_global(local.contiguous(), mesh.device_mesh, placements, whole, strides_of(tuple(whole)))


@torch.compiler.allow_in_graph
def _lift_node(x: DTensor, _: Any, number: int) -> DTensor:
    return _lifted(x, known(number))


def device_mesh_input(mesh: Mesh) -> Any:
    """The `DeviceMesh` of a mesh, which is an input of the graph where a node is given it.

    AOTAutograd needs it there: for a DTensor that leaves a graph into which none on this mesh came, it
    would else take the mesh of the gradient that is yet to come (2.13).
    """
    return getattr(kept, _keep_device_mesh(mesh)) if torch_private.DEVICE_MESHES_ARE_INPUTS else None


@torch.compiler.assume_constant_result
def _keep_device_mesh(mesh: Mesh) -> str:
    return kept.keep(mesh.device_mesh)


@torch.compiler.assume_constant_result
def _text(device_mesh: Any, placements: tuple[Any, ...], ndim: int) -> str:
    return Sharding.from_placements(Mesh.from_device_mesh(device_mesh), placements, ndim).spec


@torch.compiler.assume_constant_result
def _keep_sharding(device_mesh: Any, placements: tuple[Any, ...], ndim: int) -> str:
    return kept.keep(Sharding.from_placements(Mesh.from_device_mesh(device_mesh), placements, ndim))


# what the rest of the runtime uses


def take_shard(tensor: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """This rank's shard of a whole tensor, as a copy; empty outside the mesh."""
    if sharding.mesh.coordinate is None:
        return tensor.new_empty(0)
    for dim, indices in enumerate(sharding.local_indices(tensor.shape)):
        tensor = _taken(tensor, dim, indices)
    return tensor.clone(memory_format=torch.contiguous_format)


def strides_like(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of the whole tensor, its dims in memory in the order of those of `local`."""
    if local.is_contiguous():
        return contiguous_strides(tuple(shape))
    order = sorted(range(local.ndim), key=lambda dim: (-local.stride(dim), dim))
    packed = contiguous_strides(tuple(shape[dim] for dim in order))
    by_dim = dict(zip(order, packed, strict=True))
    return tuple(by_dim[dim] for dim in range(local.ndim))


def _whole_spec(mesh: Mesh, spec: str, ndim: int, shape: Sequence[int], sizes: Given) -> Sharding:
    sharding = parsed_sharding(mesh, spec, sizes, ndim).sized(shape)
    check_torch_can(sharding, shape)
    return sharding


def _taken(tensor: torch.Tensor, dim: int, indices: Indices) -> torch.Tensor:
    if isinstance(indices, slice):
        return tensor.narrow(dim, indices.start, indices.stop - indices.start)
    return torch.cat([_taken(tensor, dim, run) for run in indices], dim)


def dtensor_of(local: torch.Tensor, sharding: Sharding, shape: Sequence[int], device_mesh: Any) -> DTensor:
    """The DTensor of a shard, outside of autograd."""
    # torch's own from_local takes the shape of a scalar for none at all.
    whole = tuple(shape)
    placements = torch_placements(sharding)
    spec = torch_private.dtensor_spec(device_mesh, placements, whole, contiguous_strides(whole), local.dtype)
    return torch_private.dtensor(local, spec)


def _source(mesh: Mesh, source_rank: int) -> int:
    """`source_rank`, once it is clear that it is one of the ranks that share the tensor with this one."""
    line = mesh.ranks_of(mesh.layout_of_all)
    members = mesh.universe.ranks if line is None else line
    source = checked_rank("source_rank", source_rank)
    if source not in members:
        raise ShardingError(
            f"source_rank is one of the ranks of {mesh!r} through this one, {ranks_text(members)}; found {source}. "
            "The ranks of each line share a tensor of their own, and so a source"
        )
    return source


def _broadcast(tensor: torch.Tensor, mesh: Mesh, source: int) -> torch.Tensor:
    """The tensor of the rank `source`, on the ranks of the mesh through this one."""
    layout = mesh.layout_of_all
    if layout.size == 1 or mesh.coordinate is None:
        return tensor
    group = seam.runtime("axes.shard").group(mesh, layout, "source_rank")
    tensor = tensor.to(mesh.binding.device_type).clone(memory_format=torch.contiguous_format)
    dist.broadcast(tensor, src=source, group=group)
    return tensor


def _renamed(sharding: Sharding, mesh: Mesh, names: Mapping[str, str]) -> Sharding:
    dims = tuple(
        replace(dim, factors=tuple(replace(f, axes=tuple(names[a] for a in f.axes)) for f in dim.factors))
        for dim in sharding.dims
    )
    pending = tuple(replace(p, axes=tuple(names[a] for a in p.axes)) for p in sharding.pending)
    return Sharding(mesh, dims, pending)


class _Lift(torch.autograd.Function):
    """The same local tensor on a larger mesh; its gradient is resolved over the further axes."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, spec: Any) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.old, ctx.new = torch_private.spec_of(x), spec
        return torch_private.dtensor(torch_private.local_of(x).clone(), spec)

    @staticmethod
    def backward(ctx: Any, cotangent: DTensor | None) -> tuple[DTensor | None, None]:
        if cotangent is None:
            return None, None
        resolved = resharded(cotangent, replace(sharding_of_spec(ctx.new), pending=()))
        placements = [Replicate() if p.is_partial() else p for p in ctx.old.placements]
        lowered = DTensor.from_local(
            resolved.to_local(),
            ctx.old.mesh,
            placements,
            run_check=False,
            shape=cotangent.shape,
            stride=resolved.stride(),
        )
        return lowered, None


def _plain(tensor: Any, function: str, instead: str) -> None:
    if isinstance(tensor, DTensor):
        raise ShardingError(f"{function} takes a plain tensor; found a DTensor. To move one, use {instead}")
    if not isinstance(tensor, torch.Tensor):
        raise ShardingError(f"{function} takes a tensor; found {type(tensor).__name__}")
    if torch_private.transforms_are_on():
        check_whole(function, (tensor,))
        if function == "axes.shard" and torch_private.functorch_is_active():
            # torch makes a DTensor by an autograd function, which transforms don't take.
            refuse_transform(function)


def _distributed(x: Any, function: str) -> None:
    if not isinstance(x, DTensor):
        check_not_wrapped(function, x)
        raise ShardingError(f"{function} takes a DTensor; found {type(x).__name__}")
