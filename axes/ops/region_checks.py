"""What `shard_map(check=True)` compares over the ranks: results and gradients that are said to be the same on all."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError
from axes.algebra.mesh import Mesh
from axes.ops.regions import Region
from axes.runtime.lines import Claim, disagreement

Check = bool | float
"""Whether ranks compare what claims to be replicated; a number is a tolerance."""


def check_outputs(region: Region, outputs: Sequence[DTensor], check: Check) -> None:
    """Compares results over the ranks that are said to have the same; and later their cotangents."""
    labels = [f"result {place}, '{spec}'," for place, spec in enumerate(region.reading.outputs)]
    claims = [claim for label, y in zip(labels, outputs, strict=False) for claim in _claims(label, y, region.home)]
    _compare(region, claims, check)
    for label, y in zip(labels, outputs, strict=False):
        if y.requires_grad:
            y.register_hook(functools.partial(_check_cotangent, region, f"the gradient of {label}", check))


def _check_cotangent(region: Region, label: str, check: Check, gradient: DTensor) -> None:
    _compare(region, _claims(label, gradient, region.home), check)


def check_gradients(region: Region, shards: Sequence[torch.Tensor], check: Check) -> None:
    """Compares, in backward, gradients that every rank has the same: of pending tensors, and where it is said."""
    for place, (shard, each) in enumerate(zip(shards, region.inputs, strict=True)):
        pending = tuple(axis for p in each.sharding.pending for axis in p.axes)
        for what, axes in (("pending", pending), ("'same'", each.same)):
            if axes and shard.requires_grad:
                label = f"the gradient of tensor {place}, which is {what},"
                mesh = each.sharding.mesh
                names = mesh.made_of(axis.layout for axis in axes) or ()
                shard.register_hook(functools.partial(_check_gradient, region, label, mesh, names, check))


def _check_gradient(
    region: Region, label: str, mesh: Mesh, axes: Sequence[str], check: Check, gradient: torch.Tensor
) -> None:
    _compare(region, [Claim(label, gradient, mesh, axis) for axis in axes], check)


def _claims(label: str, x: DTensor, mesh: Mesh) -> list[Claim]:
    axes = [name for name, p in zip(mesh.axis_names, x.placements, strict=True) if p.is_replicate()]
    return [Claim(label, x.to_local().detach(), mesh, axis) for axis in axes if mesh.layout(axis).size > 1]


def _compare(region: Region, claims: Sequence[Claim], check: Check) -> None:
    differences = disagreement(claims, region.home, 0.0 if check is True else check)
    if differences:
        found = "\n".join(map(str, differences))
        raise ShardingError(
            f"{found}\nreduce it in the function, like axes.psum(y, {differences[0].axis!r}), or write what it is, "
            f"like '| sum@{differences[0].axis}'\n  in  shard_map '{region.reading.text}'"
        )
