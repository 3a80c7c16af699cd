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
over the groups that the parameters' own meshes have. The collectives follow from the parameters and not
from the gradients, so a rank without a gradient waits for nobody: it counts as zero. A gradient that is
pending is resolved before.

torch's `clip_grad_norm_` stacks the norms of DTensors, which fails where two of them are on different
meshes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from axes import AxesError, Layout, Mesh, MeshError, Sharding, ShardingError, pmax, psum, reshard, sharding_of
from axes.extension import local, shown, torch_private, within
from axes.nn.options import number

Tensors: TypeAlias = torch.Tensor | Iterable[torch.Tensor]
Axis: TypeAlias = tuple[Any, Layout]
"""An axis of some mesh: all ranks of the job that the mesh is of, and the axis's layout among them."""

AxisName: TypeAlias = str | tuple[str, ...]


_KIND = "the norm of gradients"
"""What a trace says, and ranks compare, with its order and limit."""


class NonFiniteNormError(AxesError, RuntimeError):
    """A norm that is NaN or infinite, where the caller asked for an error."""


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
    """Scale gradients in place so that their norm is at most `max_norm`. Like `torch.nn.utils.clip_grad_norm_`.

    Each element is counted once, whatever the meshes of the parameters. Gradients are scaled by `max_norm / (norm +
    1e-6)` if that is below 1, each rank its own shards. A pending gradient is replaced by its sum.

    Args:
        parameters: All parameters of the model, or of this rank's pipeline stage: DTensors on any meshes, those of
            FSDP2 included, and plain tensors, which are equal on all ranks. All ranks that hold a parameter list it,
            with a gradient or without.
        max_norm: The largest norm; `math.inf` only measures.
        norm_type: Any p above 0, or `math.inf` for the largest absolute value.
        error_if_nonfinite: Raise if the norm is NaN or infinite, on every rank, before anything is scaled.
        stages: The axis of the pipeline stages, or several axes: along it ranks list other parameters. Axes that
            split parameters aren't named here. A parameter whose own mesh has the axis follows its placements.
        copies: Parameters that an earlier stage counts already, such as a tied embedding on the last stage. They are
            scaled and not counted.
        mesh: Where `stages` is looked up, by default the ambient mesh.

    Returns:
        The norm before scaling: a plain tensor without dims, the same on every rank, in float64 if one of the
        parameters is, else in float32.

    Raises:
        NonFiniteNormError: A `RuntimeError`, with `error_if_nonfinite`.
        ShardingError: `max_norm` is negative, `norm_type` isn't above 0, or a copy isn't one of the parameters.
        MeshError: The mesh lacks the stages, or the mesh of a parameter has a part of them.

    Examples:
        >>> import axes
        >>> with axes.simulate(1), axes.init_mesh("dp=1", device_type="cpu") as mesh:
        ...     weight = axes.shard(torch.zeros(2), "n@dp").requires_grad_()
        ...     weight.grad = axes.shard(torch.tensor([3.0, 4.0]), "n@dp")
        ...     print(clip_grad_norm_([weight], max_norm=1.0), axes.to_local(weight.grad))
        tensor(5.) tensor([0.6000, 0.8000])
    """
    order = float(number("norm_type is a number above 0, or math.inf", norm_type, 5e-324))
    limit = float(number("max_norm is a number from 0, or math.inf", max_norm, 0.0))
    axes = _stage_axes(stages, mesh)
    every = distinct(parameters, "axes.nn.clip_grad_norm_")
    elsewhere = {id(each) for each in distinct(copies, "axes.nn.clip_grad_norm_")}
    if not elsewhere <= {id(each) for each in every}:
        raise ShardingError(
            "axes.nn.clip_grad_norm_: `copies` has a tensor that isn't one of the parameters. A wrapper such as "
            "fully_shard replaces parameters; take the copies from the model that it gives"
        )
    gradients = [settled_gradient(parameter) for parameter in every]
    locals_ = [None if gradient is None else local(gradient) for gradient in gradients]
    counted = [(p, shard) for p, shard in zip(every, locals_, strict=True) if id(p) not in elsewhere]
    norm = within(_KIND, f"of order {order}, clipped to {limit}", _norm, counted, order, axes)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise NonFiniteNormError(
            f"the gradients' norm of order {order} is {float(norm)}, and nothing was scaled; "
            "with error_if_nonfinite=False they are scaled all the same"
        )
    if limit < math.inf:
        scaled = [SimpleNamespace(grad=shard) for shard in locals_ if shard is not None]
        torch.nn.utils.clip_grads_with_norm_(scaled, limit, norm)  # type: ignore[arg-type]
        torch.autograd.graph.increment_version([each for each in gradients if isinstance(each, DTensor)])
    return norm


# --- gradients of parameters, as local tensors


def distinct(tensors: torch.Tensor | Iterable[torch.Tensor], function: str) -> list[torch.Tensor]:
    """The tensors in order, each once: a tied parameter has one gradient, however often it is listed.

    Raises `ShardingError` for what is no tensor; `function` is the name that the error gives to the caller.
    """
    found = list(tensors) if isinstance(tensors, Iterable) and not isinstance(tensors, torch.Tensor) else [tensors]
    for tensor in found:
        if not isinstance(tensor, torch.Tensor):
            raise ShardingError(f"{function} takes tensors, like module.parameters(); found {type(tensor).__name__}")
    return list({id(tensor): tensor for tensor in found}.values())


def settled_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter in the sharding of the parameter; None where there is none.

    A gradient that is pending, or sharded otherwise, is resharded, and the result becomes `parameter.grad`.
    All ranks of the parameter's mesh take part in that.

    Raises `ShardingError` where axes can't say how the gradient or the parameter is sharded.
    """
    gradient = parameter.grad
    if gradient is None or not isinstance(parameter, DTensor):
        return gradient
    if not isinstance(gradient, DTensor):
        raise ShardingError(
            f"the gradient of a DTensor of shape {list(parameter.shape)} is a plain tensor of shape "
            f"{list(gradient.shape)}; make it one by axes.shard or axes.from_local"
        )
    if gradient.placements != parameter.placements or gradient.device_mesh != parameter.device_mesh:
        with torch.no_grad():
            parameter.grad = reshard(gradient, replace(sharding_of(parameter), pending=()))
    return parameter.grad


# --- the norm


def _stage_axes(stages: AxisName, mesh: Mesh | None) -> dict[Axis, Mesh]:
    """The axes of the stages, those of size one left out, each with the mesh that has it."""
    names = (stages,) if isinstance(stages, str) else stages
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise MeshError(f"stages is the name of an axis, or several; found {shown(stages)}")
    if not names and mesh is None:
        return {}
    where = Mesh.ambient("axes.nn.clip_grad_norm_(stages=...)", mesh)
    layouts = [where.layout(name) for name in names]
    Layout.product(*layouts)  # refuses axes that share ranks
    return {(where.universe, layout): where for layout in layouts if layout.size > 1}


def _is_of_one_stage(sharding: Sharding | None, stages: Collection[Axis]) -> bool:
    """Whether a tensor is another one on each stage: its mesh doesn't have the axes of the stages."""
    if sharding is None or not stages or any(universe != sharding.universe for universe, _ in stages):
        return True
    extent = sharding.mesh.layout_of_all
    has = [extent.overlaps(layout) for _, layout in stages]
    if any(has) != all(extent.contains(layout) for _, layout in stages):
        raise MeshError(
            "the mesh of a parameter has a part of the axes that `stages` names; found "
            f"{extent} of the axes {', '.join(str(layout) for _, layout in stages)}. "
            "Put the parameter on all of them, or on none"
        )
    return not any(has)


def _norm(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor | None]], order: float, stages: Mapping[Axis, Mesh]
) -> torch.Tensor:
    """The norm of all parts: the same collectives on every rank that has the same tensors.

    parts: tensors that say where their elements are, with this rank's elements: None where they are missing.
    """
    # Parts that are reduced over the same axes are one sum: of powers, or for an infinite order a maximum.
    sums: dict[tuple[frozenset[Axis], bool], list[torch.Tensor]] = {}
    meshes: dict[Axis, Mesh] = {}
    shared: dict[Sharding | None, list[torch.Tensor]] = {}
    for tensor, shard in parts:
        locals_ = shared.setdefault(sharding_of(tensor) if isinstance(tensor, DTensor) else None, [])
        locals_ += [] if shard is None else [shard]
    for sharding, locals_ in shared.items():
        here = None if sharding is None or sharding.mesh.coordinate is None else sharding
        split = {} if here is None else {(here.universe, each): here.mesh for each in here.used}
        meshes |= split
        sums.setdefault((frozenset(split), _is_of_one_stage(here, stages)), []).extend(locals_)
    axes = sorted(meshes, key=_same_everywhere)
    first = next(iter({**meshes, **stages}.values()), None)
    device = torch.device(first.device_mesh.device_type if first else local(parts[0][0]).device if parts else "cpu")
    values = {key: _sum(locals_, order, device) for key, locals_ in sums.items()}
    for axis in axes:
        keys = [key for key in values if axis in key[0]]
        values.update(zip(keys, _reduced([values[key] for key in keys], order, axis, meshes[axis]), strict=True))
    mine, everyones = (
        _combined([value for (_, staged), value in values.items() if staged is wanted], order, device)
        for wanted in (True, False)
    )
    for axis in sorted(stages, key=_same_everywhere):
        (mine,) = _reduced([mine], order, axis, stages[axis])
    total = _combined([mine, everyones], order, device)
    total = total if order == math.inf else total.pow(1 / order)
    return total if any(x.dtype in (torch.float64, torch.complex128) for x, _ in parts) else total.float()


def _same_everywhere(axis: Axis) -> tuple[int, int, Layout]:
    """An order of axes that only their ranks decide, so that no two ranks wait for each other in turn."""
    universe, layout = axis
    return universe.size, universe.ranks[0], layout


def _sum(locals_: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The sum of the powers of all elements on this rank, for an infinite order their maximum, in float64.

    (In float32 the square of a norm above 2e19 would be infinite.)
    """
    norms = [
        torch.stack(list(torch_private.norms_of(group, order))).to(device, torch.float64)
        for group in _by_device_and_dtype(locals_)
    ]
    every = torch.cat(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    return every.amax() if order == math.inf else every.pow(order).sum()


def _combined(values: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The sum of sums, for an infinite order the maximum of maxima."""
    every = torch.stack(list(values)) if values else torch.zeros(1, dtype=torch.float64, device=device)
    return every.amax() if order == math.inf else every.sum()


def _reduced(values: Sequence[torch.Tensor], order: float, axis: Axis, mesh: Mesh) -> Sequence[torch.Tensor]:
    """Each value combined with those of all ranks along the axis, in one collective."""
    wire = torch.stack(list(values)).to(mesh.device_mesh.device_type)
    run = pmax if order == math.inf else psum
    return run(wire, mesh.called(axis[1]), mesh=mesh).to(values[0].device).unbind()


def _by_device_and_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors in lists that torch's operations on lists take in one go; empty tensors are left out."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(found.values())
