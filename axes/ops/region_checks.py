"""What a region is checked for: a tensor that it uses and isn't given, and, with `check=True`, claims that aren't true.

A function that closes over a tensor gives this rank's summand of its gradient, where one device would give the whole.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError
from axes.algebra.mesh import Mesh
from axes.ops.regions import Region
from axes.runtime import torch_private
from axes.runtime.axis_groups import AxisGroup, broadcast, gathered_values, group_along
from axes.runtime.check import waited
from axes.runtime.groups import current_world
from axes.runtime.linear import NODE

Function = Callable[..., Any]
Check = bool | float
"""Whether ranks compare what claims to be replicated; a number is a tolerance."""


# --- tensors that aren't arguments

_REQUIRES_GRAD, _NODE = operator.attrgetter("requires_grad"), operator.attrgetter("node")


def check_closed(
    results: Sequence[torch.Tensor], module: torch.nn.Module | None = None, own: Sequence[torch.Tensor] = ()
) -> bool:
    """Refuses results that depend on a leaf, or on what another region gave, by another way than an argument; returns
    whether there are gradients.

    Its gradient would be this rank's summand. The graph is walked back from the results to where the arguments came in,
    at each call, since what a function closes over may need a gradient from one call to the next; a node costs a third
    of a microsecond. `own` are leaves that may be used.
    """
    needed = list(filter(_REQUIRES_GRAD, results)) if torch.is_grad_enabled() else []
    ahead: list[Any] = list(map(_NODE, map(get_gradient_edge, needed)))
    seen = set(ahead)
    to_local = torch_private.TO_LOCAL
    while ahead:
        node = ahead.pop()
        border = node.border if type(node) is NODE else None
        if border == "argument" or (type(node) is to_local and torch_private.says_its_gradient(node)):
            continue
        if border == "result":
            raise _closed_over(None, module)
        nearer = node.next_functions
        if not nearer and (leaf := getattr(node, "variable", None)) is not None:
            if any(leaf is each for each in own):
                continue
            raise _closed_over(leaf, module)
        for below, _ in nearer:
            if below is not None and below not in seen:
                seen.add(below)
                ahead.append(below)
    return bool(needed)


def _closed_over(leaf: torch.Tensor | None, module: torch.nn.Module | None) -> ShardingError:
    which = "a result of another region" if leaf is None else f"{list(leaf.shape)} {leaf.dtype}"
    names = [] if module is None else [name for name, x in module.named_parameters() if x is leaf]
    if names:
        spec = " ".join("ijklmnop"[: module.get_parameter(names[0]).ndim])  # type: ignore[union-attr]
        which, told = f"{names[0]}, {which}", f"{{'{names[0]}': '{spec}', ...}}"
        advice = f"make its parameters DTensors before: axes.shard_module(module, {told}, mesh=mesh)"
    else:
        advice = (
            "pass it as an argument, with its spec on the left, as axes.from_local(x, spec, grad='summed') or "
            "axes.shard(x, spec); or use its detach(), also of what the function makes itself"
        )
    return ShardingError(
        f"the {'module' if module else 'function'} uses a tensor that needs a gradient and isn't an argument: {which}; "
        f"what came would be this rank's summand of its gradient\n{advice}"
    )


# --- what claims to be the same on all ranks

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
    _compare(region, check, [claim for pair in pairs for claim in _claims(region.home, *pair)])
    for label, y in pairs:
        if y.requires_grad:
            label = f"the gradient of {label}"
            y.register_hook(lambda g, label=label: _compare(region, check, _claims(region.home, label, g)))


def check_gradients(region: Region, shards: Sequence[torch.Tensor], check: Check) -> None:
    """Compares, in backward, gradients that every rank has the same: of pending tensors, and where it is said."""
    for place, (shard, each) in enumerate(zip(shards, region.inputs, strict=True)):
        pending = tuple(layout for _, layout in each.sharding.pending)
        for what, axes in (("pending", pending), ("'same'", each.same)):
            if axes and shard.requires_grad:
                mesh = each.sharding.mesh
                label, names = f"the gradient of tensor {place}, which is {what},", mesh.made_of(axes)
                shard.register_hook(functools.partial(_check_gradient, region, check, label, mesh, names or ()))


def _check_gradient(
    region: Region, check: Check, label: str, mesh: Mesh, names: Sequence[str], gradient: torch.Tensor
) -> None:
    _compare(region, check, [Claim(label, gradient, mesh, name) for name in names])


def _claims(mesh: Mesh, label: str, x: DTensor) -> list[Claim]:
    axes = [name for name, p in zip(mesh.axis_names, x.placements, strict=True) if p.is_replicate()]
    return [Claim(label, x.to_local().detach(), mesh, axis) for axis in axes if mesh.layout(axis).size > 1]


def _compare(region: Region, check: Check, claims: Sequence[Claim]) -> None:
    """`ShardingError`, the same on every rank of the region, where one of the claims isn't true.

    Equal is equal bit by bit, where NaN is NaN; or up to a tolerance times the largest value. All ranks call it with
    the same claims. In a simulated world, without values, all are true.
    """
    mesh = region.home
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
    tolerance, said, axes = 0.0 if check is True else check, "", []
    for claim, each in zip(claims, zip(*gathered_values(found, _COMPARISON, everyone), strict=True), strict=True):
        off = {rank: of for rank, of in zip(ranks, each, strict=True) if of and not _within(tolerance, *of)}
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


def _within(tolerance: float, most: float, scale: float) -> bool:
    return tolerance > 0 and most <= tolerance * min(scale, 1e300)


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
