"""What `check=True` compares: values that a region says are the same on all ranks of an axis, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError
from axes.algebra.mesh import Mesh
from axes.ops.regions import Region
from axes.runtime.axis_groups import AxisGroup, broadcast, gathered_values, group_along
from axes.runtime.groups import current_world
from axes.runtime.operation import waited

Function = Callable[..., Any]
Check = bool | float
"""Whether ranks compare what claims to be replicated; a number is a tolerance."""

_COMPARISON = "a comparison of what is the same on all ranks"


class Claim(NamedTuple):
    """That a tensor is the same on all ranks of an axis; `label` says what it is."""

    label: str
    x: torch.Tensor
    mesh: Mesh
    axis: str


def check_outputs(region: Region, outputs: Sequence[DTensor], check: Check) -> None:
    """Compares results over the ranks that are said to have the same; and later their cotangents."""
    labels = [f"result {place}, '{spec}'," for place, spec in enumerate(region.reading.outputs)]
    pairs = list(zip(labels, outputs, strict=False))
    _compare(region, check, [claim for pair in pairs for claim in _claims(region.tensor_mesh, *pair)])
    for label, y in pairs:
        if y.requires_grad:
            label = f"the gradient of {label}"
            y.register_hook(lambda g, label=label: _compare(region, check, _claims(region.tensor_mesh, label, g)))


def check_gradients(region: Region, shards: Sequence[torch.Tensor], check: Check) -> None:
    """Compares, in backward, gradients that every rank has the same: of pending tensors, and where it is said."""
    for place, (shard, each) in enumerate(zip(shards, region.inputs, strict=True)):
        pending, mesh = tuple([layout for _, layout in each.sharding.pending]), each.sharding.mesh
        for what, layouts in (("pending", pending), ("'same'", each.same)):
            if layouts and shard.requires_grad:
                label, axes = f"the gradient of tensor {place}, which is {what},", mesh.made_of(layouts) or ()
                told = [(label, mesh, axis) for axis in axes]

                def compare(g: torch.Tensor, told: Any = told) -> None:
                    _compare(region, check, [Claim(label, g, mesh, axis) for label, mesh, axis in told])

                shard.register_hook(compare)


def _claims(mesh: Mesh, label: str, x: DTensor) -> list[Claim]:
    axes = [name for name, p in zip(mesh.axis_names, x.placements, strict=True) if p.is_replicate()]
    return [Claim(label, x.to_local().detach(), mesh, axis) for axis in axes if mesh.layout(axis).size > 1]


def _compare(region: Region, check: Check, claims: Sequence[Claim]) -> None:
    """`ShardingError`, the same on every rank of the region, where one of the claims isn't true.

    Equal is equal bit by bit, where NaN is NaN; or up to a tolerance times the largest value. All ranks call it with
    the same claims. In a simulated world, without values, all are true.
    """
    mesh = region.tensor_mesh
    if current_world().fake or not claims or mesh.size == 1:
        return
    everyone = group_along(mesh, mesh.axis_names)
    mine, ranks = [(tuple(claim.x.shape), claim.x.dtype) for claim in claims], everyone.ranks
    kinds = dict(zip(ranks, gathered_values(mine, _COMPARISON, everyone), strict=True))
    found: list[tuple[float, float] | None] = []
    for at, claim in enumerate(claims):
        line = claim.mesh.axis(claim.axis).ranks
        if all(kinds[rank][at] == kinds[line[0]][at] for rank in line):
            found.append(_deviation(claim.x, _of_first(claim.x, group_along(claim.mesh, claim.axis))))
        else:
            found.append(None if kinds[mesh.rank][at] == kinds[line[0]][at] else (math.inf, math.inf))
    said, axes = "", []
    for claim, each in zip(claims, zip(*gathered_values(found, _COMPARISON, everyone), strict=True), strict=True):
        off = {rank: of for rank, of in zip(ranks, each, strict=True) if of and (check is True or _is_off(check, *of))}
        if off:
            axes.append(claim.axis)
            much = _much(*map(max, zip(*off.values(), strict=True)))
            said += (
                f"{claim.label} claims to be the same on all ranks of '{claim.axis}'; ranks "
                f"{', '.join(map(str, off))} differ from the first of their line {much}\n"
            )
    if axes:
        raise ShardingError(
            f"{said}reduce it in the function, like axes.psum(y, {axes[0]!r}), or write what it is, "
            f"like '| sum@{axes[0]}'\n  in  shard_map '{region.reading.text}'"
        )


def _is_off(tolerance: float, most: float, scale: float) -> bool:
    return most > tolerance * min(scale, 1e300)


def _much(most: float, scale: float) -> str:
    if scale == math.inf:
        return "in shape or dtype"
    much = "in the sign of a zero" if most == 0 else f"by up to {most:.3g}"
    return f"{much} (values up to {scale:.3g})"


def _deviation(x: torch.Tensor, other: torch.Tensor) -> tuple[float, float] | None:
    """The largest distance between the two, and the largest value; None where they are the same bit by bit.

    NaN is NaN, and as far as can be from a number.
    """
    x, other = (torch.view_as_real(each) if each.is_complex() else each for each in map(_resolved, (x, other)))
    differ = (_bytes(x) != _bytes(other)).any(-1)
    # Every float is one of 64 bits; of integers the difference is one.
    x, other = (each.flatten().to(torch.float64 if each.is_floating_point() else torch.int64) for each in (x, other))
    if x.is_floating_point():
        differ &= ~(x.isnan() & other.isnan())
    if not differ.any():
        return None
    distance = (x - other)[differ].abs().double().nan_to_num(nan=math.inf)
    return float(distance.max()), float(other.abs().double().nan_to_num(nan=0.0, posinf=0.0).max())


def _of_first(x: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """Coordinate 0's `x`, on every rank of the group."""
    wire = _bytes(_resolved(x)).clone()
    broadcast(wire, group.ranks[0], group, _COMPARISON)
    return wire.view(x.dtype).view(x.shape)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, in order."""
    return x.contiguous().flatten().unsqueeze(-1).view(torch.uint8)


def _resolved(x: torch.Tensor) -> torch.Tensor:
    """The values themselves: what is still under way has come, nothing waits to be conjugated or negated."""
    return waited(x).resolve_conj().resolve_neg()
