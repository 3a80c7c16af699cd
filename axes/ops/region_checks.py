"""What `check=True` compares: values that a region says are the same on all ranks of an axis, and their gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError
from axes.algebra.mesh import Mesh
from axes.ops.regions import Region
from axes.runtime.agreement import agree_at, ranks_text
from axes.runtime.groups import current_world
from axes.runtime.operation import waited

Function = Callable[..., Any]


class Claim(NamedTuple):
    """That a tensor is the same on all ranks of an axis; `label` says what it is."""

    label: str
    x: torch.Tensor
    mesh: Mesh
    axis: str


def check_outputs(region: Region, outputs: Sequence[DTensor]) -> None:
    """Compares results over the ranks that are said to have the same; and later their cotangents."""
    labels = [f"result {place}, '{spec}'," for place, spec in enumerate(region.reading.outputs)]
    pairs = list(zip(labels, outputs, strict=False))
    _compare(region, [claim for pair in pairs for claim in _claims(region.tensor_mesh, *pair)])
    for label, y in pairs:
        if y.requires_grad:
            label = f"the gradient of {label}"
            y.register_hook(lambda g, label=label: _compare(region, _claims(region.tensor_mesh, label, g)))


def check_gradients(region: Region, shards: Sequence[torch.Tensor]) -> None:
    """Compares, in backward, gradients that every rank has the same: of pending tensors, and where it is said."""
    for place, (shard, each) in enumerate(zip(shards, region.inputs, strict=True)):
        pending, mesh = tuple([layout for _, layout in each.sharding.pending]), each.sharding.mesh
        for what, layouts in (("pending", pending), ("'same'", each.same)):
            if layouts and shard.requires_grad:
                label, axes = f"the gradient of tensor {place}, which is {what},", mesh.made_of(layouts) or ()
                told = [(label, mesh, axis) for axis in axes]

                def compare(g: torch.Tensor, told: Any = told) -> None:
                    _compare(region, [Claim(label, g, mesh, axis) for label, mesh, axis in told])

                shard.register_hook(compare)


def _claims(mesh: Mesh, label: str, x: DTensor) -> list[Claim]:
    axes = [name for name, p in zip(mesh.axis_names, x.placements, strict=True) if p.is_replicate()]
    return [Claim(label, x.to_local().detach(), mesh, axis) for axis in axes if mesh.layout(axis).size > 1]


def _compare(region: Region, claims: Sequence[Claim]) -> None:
    """`ShardingError`, the same on every rank of the region, where one of the claims isn't true.

    Equal is equal bit by bit, where NaN is NaN. All ranks call it with the same claims. In a simulated world, without
    values, all are true.
    """
    world, mesh = current_world(), region.tensor_mesh
    ranks = mesh.ranks_of(mesh.layout_of_all, world.rank)
    if world.fake or not claims or ranks is None or len(ranks) == 1:
        return
    barrier = world.barrier("replicated", ranks, "a comparison of what is the same on all ranks")
    every = agree_at(world.member, barrier, "", world.limit, [_digest(claim.x) for claim in claims])
    held, wrong = dict(zip(ranks, every, strict=True)), []
    for at, claim in enumerate(claims):
        along = claim.mesh.axis(claim.axis)
        first = {rank: along.ranks_of(rank)[0] for rank in ranks}
        off = [rank for rank in ranks if held[rank][at] != held[first[rank]][at]]
        if off:
            said = (
                f"{claim.label} claims to be the same on all ranks of '{claim.axis}'; {ranks_text(off)} differ from the"
            )
            wrong.append((claim.axis, f"{said} first of their line"))
    if wrong:
        axis = wrong[0][0]
        raise ShardingError(
            "\n".join(text for _, text in wrong)
            + f"\nreduce it in the function, like axes.psum(y, '{axis}'), or write what it is, like '| sum@{axis}'\n"
            f"  in  shard_map '{region.reading.text}'"
        )


def _digest(x: torch.Tensor) -> str:
    """Shape, dtype and values of a tensor in a word."""
    values = waited(x).resolve_conj().resolve_neg()
    values = torch.where(values.isnan(), torch.nan, values) if values.is_floating_point() else values
    held = values.cpu().contiguous().flatten().unsqueeze(-1).view(torch.uint8).numpy()
    return f"{list(x.shape)} {x.dtype} {hashlib.sha256(held).hexdigest()}"
