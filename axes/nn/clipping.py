"""The norm of all gradients, and clipping by it, whatever meshes the parameters are on.

    norm = axes.nn.clip_grad_norm_(model.parameters(), 1.0)                    # dense and expert parameters
    norm = axes.nn.clip_grad_norm_(stage.parameters(), 1.0, stages="pp")       # of all pipeline stages

Each element is counted once: what is split over an axis is summed over it, what is replicated counts on
one rank. Which is which the placements of each parameter say, on the mesh of that parameter:

| a parameter is | its part of the norm is |
| --- | --- |
| split over some axes of its mesh (`Shard`, strided, uneven) | summed over these axes |
| replicated over an axis of its mesh, or on an axis of size 1 | what each rank has |
| a plain tensor | what each rank has |
| on a mesh without the axis that `stages` names, or plain | summed over that axis, too |

**Communication.** Parameters that are split over the same axes share one number. These numbers go
together: one all-reduce of a few numbers for each axis that splits any parameter, and one for `stages`,
over the groups that the parameters' own meshes have. No group is made for it. The collectives follow
from the parameters and not from the gradients, so a rank without a gradient waits for nobody. A gradient
that is pending is resolved before.

torch's `clip_grad_norm_` stacks the norms of DTensors, which fails where two of them are on different
meshes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from axes.algebra.errors import AxesError, MeshError, ShardingError, shown
from axes.algebra.layout import Layout, Universe
from axes.algebra.mesh import Mesh, checked_mesh, required_mesh
from axes.algebra.sizes import checked_flag, tuple_of
from axes.nn.local_gradients import by_device_and_dtype, distinct, local_tensor, settled_gradient
from axes.runtime import flags, torch_private
from axes.runtime.axis_groups import AxisName
from axes.runtime.check import collective
from axes.runtime.communicator import communicator
from axes.runtime.device_mesh import mesh_known_for
from axes.runtime.groups import of_world
from axes.runtime.routes import resharded
from axes.runtime.torch_placements import sharding_of_spec
from axes.runtime.trace import Operation
from axes.runtime.transforms import check_dense

Tensors: TypeAlias = torch.Tensor | Iterable[torch.Tensor]

_EPSILON = 1e-6
"""Added to the norm before the division, as torch's `clip_grad_norm_` does."""


class NonFiniteNormError(AxesError, RuntimeError):
    """A norm that is NaN or infinite, where the caller asked for an error."""


@torch.no_grad()
def total_norm(
    tensors: Tensors, norm_type: float = 2.0, *, stages: AxisName = (), mesh: Mesh | None = None
) -> torch.Tensor:
    """The norm of tensors as if all their elements stood in one vector. Each element is counted once.

    `tensors`: gradients, or anything else: DTensors, on several meshes if need be, and plain tensors, which
    are the same on all ranks. All ranks pass the same list; of parameters of which some may lack a gradient
    take `clip_grad_norm_(parameters, math.inf)`, which changes nothing. `norm_type` is any p above 0, or
    `math.inf` for the largest absolute value. `stages` and `mesh` are those of `clip_grad_norm_`.

    Gives a plain tensor without dims, the same on every rank: float64 where one of the tensors is, else
    float32. Tensors of 16 bits are added up in float32.

    Raises `ShardingError` for a `norm_type` that isn't above 0, and for what is no tensor; `MeshError` for
    `stages` that the mesh doesn't have.

    >>> import axes
    >>> with axes.simulate(1), axes.init_mesh("dp=1", device_type="cpu") as mesh:
    ...     total_norm([axes.shard(torch.tensor([3.0, 4.0]), "n@dp"), torch.full((3,), -4.0)], norm_type=1)
    tensor(19.)
    """
    order = _checked_order(norm_type)
    axes = _stage_axes(stages, mesh)
    every = distinct(tensors, "axes.nn.total_norm")
    for tensor in every:
        check_dense(tensor, "axes.nn.total_norm")
        if tensor.is_meta:
            raise ShardingError("axes.nn.total_norm takes tensors with values; found one on the device 'meta'")
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.itemsize < 2:
            raise ShardingError(f"axes.nn.total_norm is of floats; found {tensor.dtype}. Write x.float()")
    settled = [_nothing_pending(tensor) for tensor in every]
    return _norm([_Part(tensor, local_tensor(tensor)) for tensor in settled], order, axes)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    stages: AxisName = (),
    copies: Tensors = (),
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`; give the norm that they had.

    parameters: all parameters of the model, or of this rank's pipeline stage: DTensors on any meshes, those of
        FSDP2 included, and plain tensors, which are the same on all ranks. All ranks that hold a parameter
        list it, with a gradient or without.
    max_norm: `math.inf` only measures.
    norm_type: any p above 0, or `math.inf` for the largest absolute value.
    error_if_nonfinite: raise where the norm is NaN or infinite, on every rank, before anything is scaled.
    stages: the axis of the pipeline stages, or several axes: along it each rank lists other parameters than its
        neighbours. (It is called by what is on the axis. An axis that splits parameters isn't named: their
        placements say it.) A parameter whose own mesh has the axis isn't of one stage; its placements decide.
    copies: those of `parameters` that an earlier stage counts already, such as a tied embedding on the last
        stage. They are scaled and not counted. Their gradients are equal on the stages that hold them.
    mesh: where `stages` is looked up, the ambient mesh by default.

    Gives what `total_norm` gives. The gradients are scaled by `max_norm / (norm + 1e-6)` where that is below
    1, as torch does it, each rank its own shards. A pending gradient is replaced by the resolved one.

    Raises `NonFiniteNormError`, a `RuntimeError`; `ShardingError` for a negative `max_norm`, a `norm_type` that
    isn't above 0, or a copy that isn't one of the parameters; `MeshError` for `stages` that the mesh doesn't
    have, or that the mesh of a parameter has in part.

    >>> import axes
    >>> with axes.simulate(1), axes.init_mesh("dp=1", device_type="cpu") as mesh:
    ...     weight = axes.shard(torch.zeros(2), "n@dp").requires_grad_()
    ...     weight.grad = axes.shard(torch.tensor([3.0, 4.0]), "n@dp")
    ...     print(clip_grad_norm_([weight], max_norm=1.0), axes.to_local(weight.grad))
    tensor(5.) tensor([0.6000, 0.8000])
    """
    order, limit = _checked_order(norm_type), _checked_limit(max_norm)
    error_if_nonfinite = checked_flag("axes.nn.clip_grad_norm_: error_if_nonfinite", error_if_nonfinite)
    axes = _stage_axes(stages, mesh)
    held = distinct(parameters, "axes.nn.clip_grad_norm_")
    elsewhere = {id(each) for each in distinct(copies, "axes.nn.clip_grad_norm_")}
    if not elsewhere <= {id(each) for each in held}:
        raise ShardingError(
            "axes.nn.clip_grad_norm_: `copies` has a tensor that isn't one of the parameters. A wrapper such as "
            "fully_shard replaces parameters; take the copies from the model that it gives"
        )
    gradients = [settled_gradient(parameter) for parameter in held]
    locals_ = [None if gradient is None else local_tensor(gradient) for gradient in gradients]
    if len({each.is_meta for each in held}) > 1:
        raise ShardingError("axes.nn.clip_grad_norm_ takes tensors with values; found some on the device 'meta'")
    parts = [_Part(p, local) for p, local in zip(held, locals_, strict=True) if id(p) not in elsewhere]
    norm = _norm(parts, order, axes, limit)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise NonFiniteNormError(
            f"the gradients' norm of order {order} is {float(norm)}, and nothing was scaled; "
            "with error_if_nonfinite=False they are scaled all the same"
        )
    if limit < math.inf:
        factor = (limit / (norm + _EPSILON)).clamp(max=1.0)
        for group in by_device_and_dtype([local for local in locals_ if local is not None]):
            torch_private.scale_all(group, factor.to(group[0].device))
        torch.autograd.graph.increment_version([each for each in gradients if isinstance(each, DTensor)])
    return norm


@dataclass(frozen=True)
class _SplitAxis:
    """An axis over which something is summed, and the group of the ranks along it through this one."""

    universe: Universe
    device_type: str
    layout: Layout
    group: dist.ProcessGroup = field(compare=False)
    name: str = field(compare=False)
    mesh: Mesh | None = field(compare=False)


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: the axes that split it, and the ranks of its mesh as one layout."""

    split: tuple[_SplitAxis, ...]
    universe: Universe
    extent: Layout


@dataclass(frozen=True)
class _Part:
    """A tensor that says where its elements are, and this rank's elements: None where they are missing."""

    tensor: torch.Tensor
    local: torch.Tensor | None


def _checked_order(norm_type: float) -> float:
    try:
        order = float(norm_type)
    except Exception:  # of a foreign object's own methods
        order = math.nan
    if not order > 0:
        raise ShardingError(f"norm_type is a number above 0, or math.inf; found {shown(norm_type)}")
    return order


def _checked_limit(max_norm: float) -> float:
    try:
        limit = float(max_norm)
    except Exception:  # of a foreign object's own methods
        limit = math.nan
    if not limit >= 0:
        raise ShardingError(f"max_norm is a number from 0, or math.inf; found {shown(max_norm)}")
    return limit


def _nothing_pending(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    return resharded(tensor, replace(sharding_of_spec(torch_private.spec_of(tensor)), pending=()))


def _stage_axes(stages: AxisName, mesh: Mesh | None) -> list[_SplitAxis]:
    """The axes of the stages, those of size one left out, in an order that is the same on every rank."""
    names = (stages,) if isinstance(stages, str) else tuple_of(stages)
    if names is None or not all(isinstance(name, str) for name in names):
        raise MeshError(f"stages is the name of an axis, or several; found {shown(stages)}")
    if mesh is not None:
        checked_mesh(mesh)
    if not names:
        return []
    where = required_mesh(mesh, "axes.nn.clip_grad_norm_(stages=...)")
    product = Layout.product(*[where.layout(name) for name in names])  # refuses axes that share ranks
    if product.size == 1:
        return []
    axes = [where.axis(name) for name in names]
    device_type = "cpu" if where.binding is None else where.binding.device_type
    found = [
        _SplitAxis(where.universe, device_type, axis.layout, axis.group, axis.name, where)
        for axis in axes
        if axis.size > 1
    ]
    return _ordered(found)


def _ordered(axes: Iterable[_SplitAxis]) -> list[_SplitAxis]:
    """The axes in an order that only their ranks decide, so that no two ranks wait for each other in turn."""
    return sorted(axes, key=lambda axis: (axis.universe.size, axis.universe.ranks[0], axis.layout))


@of_world(4096)
def _place(spec: Any) -> _Place | None:
    """Where a DTensor with this `DTensorSpec` lies; None on a rank outside its mesh.

    The groups are those of the `DeviceMesh` itself, whoever made it: a mesh without names, such as FSDP2's
    default, is as good as any.
    """
    mesh = spec.mesh
    if mesh.get_coordinate() is None:
        return None
    universe = Universe.of(torch_private.root_ranks(mesh))
    layouts = [Layout.of(modes) for modes in torch_private.dims_of(mesh)]
    known = mesh_known_for(mesh)
    names = mesh.mesh_dim_names or [f"dim {number}" for number in range(mesh.ndim)]
    split = [
        _SplitAxis(universe, mesh.device_type, layout, mesh.get_group(number), names[number], known)
        for number, (layout, placement) in enumerate(zip(layouts, spec.placements, strict=True))
        if layout.size > 1 and not placement.is_replicate()
    ]
    return _Place(tuple(_ordered(split)), universe, Layout.product(*layouts))


def _is_of_one_stage(place: _Place | None, stages: Sequence[_SplitAxis]) -> bool:
    """Whether a tensor is another one on each stage: its mesh doesn't have the axes of the stages."""
    if place is None or not stages or place.universe != stages[0].universe:
        return True
    has = [place.extent.overlaps(axis.layout) for axis in stages]
    whole = [place.extent.contains(axis.layout) for axis in stages]
    if any(has) != all(whole):
        raise MeshError(
            "the mesh of a parameter has a part of the axes that `stages` names; found "
            f"{place.extent} of the axes {', '.join(str(axis.layout) for axis in stages)}. "
            "Put the parameter on all of them, or on none"
        )
    return not any(has)


def _norm(
    parts: Sequence[_Part], order: float, stages: Sequence[_SplitAxis], limit: float | None = None
) -> torch.Tensor:
    """The norm of all parts, to be clipped to `limit`; the same collectives on every rank that has the same tensors."""
    # Parts that are reduced over the same axes are one sum: of powers, or for an infinite order a maximum.
    sums: dict[tuple[tuple[_SplitAxis, ...], bool], list[torch.Tensor]] = {}
    placed: list[tuple[torch.Tensor, _Place]] = []
    for part in parts:
        place = _place(torch_private.spec_of(part.tensor)) if isinstance(part.tensor, DTensor) else None
        key = (() if place is None else place.split, _is_of_one_stage(place, stages))
        locals_ = sums.setdefault(key, [])
        if place is not None:
            placed.append((part.tensor, place))
        if part.local is not None:
            locals_.append(part.local)
    axes = _ordered({axis for split, _ in sums for axis in split})
    device = _device([*axes, *stages], parts)
    values = {key: _sum(locals_, order, device) for key, locals_ in sums.items()}
    for axis in axes:
        here = [key for key in values if axis in key[0]]
        how = _compared(order, limit, placed, axis) if flags.check else ""
        values.update(zip(here, _reduced([values[key] for key in here], order, axis, how), strict=True))
    mine, everyones = (
        _combined([value for (_, staged), value in values.items() if staged is wanted], order, device)
        for wanted in (True, False)
    )
    for axis in stages:
        (mine,) = _reduced([mine], order, axis, _compared(order, limit, (), axis) if flags.check else "")
    total = _combined([mine, everyones], order, device)
    total = total if order == math.inf else total.pow(1 / order)
    wide = any(part.tensor.dtype in (torch.float64, torch.complex128) for part in parts)
    return total if wide else total.float()


def _device(axes: Sequence[_SplitAxis], parts: Sequence[_Part]) -> torch.device:
    """Where the numbers are added up: where they are reduced, else where the tensors are."""
    if axes:
        return torch.device(axes[0].device_type)
    return local_tensor(parts[0].tensor).device if parts else torch.device("cpu")


def _nothing(device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def _sum(locals_: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The sum of the powers of all elements on this rank, for an infinite order their maximum, in float64.

    (In float32 the square of a norm above 2e19 would be infinite.)
    """
    norms = [
        torch.stack(list(torch_private.norms_of(group, order))).to(device, torch.float64)
        for group in by_device_and_dtype(locals_)
    ]
    if not norms:
        return _nothing(device)
    every = torch.cat(norms)
    return every.amax() if order == math.inf else every.pow(order).sum()


def _combined(values: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The sum of sums, for an infinite order the maximum of maxima."""
    if not values:
        return _nothing(device)
    every = torch.stack(list(values))
    return every.amax() if order == math.inf else every.sum()


def _compared(
    order: float, limit: float | None, placed: Sequence[tuple[torch.Tensor, _Place]], axis: _SplitAxis
) -> str:
    """What the ranks along an axis compare of a norm: its order, the limit, and the tensors on meshes with the axis."""
    have = [
        (tuple(tensor.shape), axis in place.split)
        for tensor, place in placed
        if place.universe == axis.universe and place.extent.contains(axis.layout)
    ]
    of = f" of {len(have)} tensors ({hashlib.sha256(str(have).encode()).hexdigest()[:8]})" if placed else ""
    return f"{of}, of order {order}{'' if limit is None else f', clipped to {limit}'}"


def _reduced(values: Sequence[torch.Tensor], order: float, axis: _SplitAxis, how: str) -> Sequence[torch.Tensor]:
    """Each value combined with those of all ranks along the axis, in one collective."""
    op = "max" if order == math.inf else "sum"
    wire = torch.stack(list(values)).to(axis.device_type)
    run = communicator(axis.group, wire.dtype, True).all_reduce
    return collective(_operation, (axis, wire, op, how), run, wire, op, True).to(values[0].device).unbind()


def _operation(axis: _SplitAxis, wire: torch.Tensor, op: str, how: str) -> Operation:
    """What the ranks along an axis do together. how: which norm it is and of what, where that is compared."""
    ranks = Universe.of(dist.get_process_group_ranks(axis.group)).ranks
    said = f"the norm of gradients, {op} of {len(wire)} parts{how}"
    moved = 2 * wire.numel() * wire.element_size() * (len(ranks) - 1) // len(ranks)
    named = said, "the norm of gradients", "all_reduce", axis.name, str(axis.group.group_name), ranks
    lies = str(wire.dtype).removeprefix("torch."), axis.device_type
    return Operation(*named, *lies, bytes_in=moved, bytes_out=moved, compared=said, mesh=axis.mesh)
