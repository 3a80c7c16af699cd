"""The border between the local and the global view: where a DTensor becomes this rank's plain
tensor and back, and what its gradient is on the other side.

In the local view backward differentiates the sum of all ranks' losses, so a replicated value's
gradient is this rank's summand of it. In the global view there is one loss. Per axis:

| value | gradient into the global view (`leave_global`) | gradient into the local view (`enter_global`) |
| --- | --- | --- |
| split | split the same way | split the same way |
| replicated | pending sum of the ranks' summands | a summand: pending stays, split within zeros, else 1/n |
| pending sum | replicated | replicated |
| pending mean | replicated, times n | replicated, by n |
| replicated, `same` | replicated, `same` | replicated, `same` |

The rule is that of JAX's `shard_map` with replication tracking. A gradient crosses the border itself,
so its own gradient follows the same table: the gradient of what is pending is replicated and its
ranks' cotangents add up, and what is `same` stays so through every derivative.

A region knows both of its ends. A tensor that comes or goes alone doesn't: what its ranks do with
their copies is asked for (`counted_alone`).

At the other end of the global view are its leaves: a leaf's gradient is brought to the leaf's own sharding
when it is accumulated (`used`, `resolving`). Inside of a graph nothing is a leaf, and the node by which
tensors come in does it (`traced`).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from axes.algebra.errors import ShardingError, shown
from axes.algebra.expressions.transpose import copies, gradient_sharding
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.algebra.plan import cuts_of
from axes.algebra.sharding import Sharding
from axes.runtime import torch_private
from axes.runtime.graphs import (
    fixed,
    guard_whole_sizes,
    hint,
    hints,
    is_symbolic,
    kept,
    kept_name,
    vary,
)
from axes.runtime.groups import of_world
from axes.runtime.linear import NODE, Border, linear
from axes.runtime.operation import waited
from axes.runtime.packing import strides_of
from axes.runtime.programs import Run
from axes.runtime.redistribute import Route, Spec, into_summand, resolved, route, spec_at
from axes.runtime.torch_placements import (
    sharding_of_placements,
    sharding_of_spec,
    torch_placements,
)

T = TypeVar("T")
Placements = tuple[Placement, ...]
Axes = tuple[Layout, ...]


class Changes(list[tuple[torch.Tensor, int, torch.Tensor, int]]):
    """What is changed in place between the forward and the backward pass of a computation on shards.

    Of a change of a DTensor autograd counts a version of the DTensor alone. What saved its shard is told
    before it is used, and refuses then as it would on one device.
    """

    def watch(self, pairs: Iterable[tuple[DTensor, torch.Tensor]]) -> None:
        """From now on changes of these tensors are changes of their shards."""
        for x, shard in pairs:
            if not (x.is_inference() or shard.is_inference()):
                outer, inner = torch_private.counters_of(x, shard)
                self.append((outer, outer._version, inner, inner._version))

    def tell(self) -> None:
        """Counts changes since then for the shards."""
        for outer, then, inner, version in self:
            if outer._version != then and inner._version == version:
                torch.autograd.graph.increment_version(inner)


def on_shards(
    run: Callable[[list[torch.Tensor]], T],
    tensors: Sequence[DTensor],
    counted: Iterable[Placements | None],
    changes: Changes | None,
) -> tuple[list[torch.Tensor], T]:
    """The shards of DTensors, which leave as `leave_global` says, and what `run` makes of them.

    What it writes to a shard is a change of the DTensor.
    """
    shards = list(map(leave_global, tensors, counted, itertools.repeat(changes)))
    versions = list(map(torch_private.version_of, shards))
    try:
        return shards, run(shards)
    finally:
        for x, shard, version in zip(tensors, shards, versions, strict=True):
            if torch_private.version_of(shard) != version:
                torch.autograd.graph.increment_version(x)


def leave_global(x: DTensor, counted: Placements | None = None, changes: Changes | None = None) -> torch.Tensor:
    """This rank's tensor of a DTensor, with the gradient rule of the border.

    `counted`: the placements to apply the rule by, if not the tensor's own. An axis that is `same` is
    replicated in the tensor and Partial here (see `counted_as_same`). `changes` are those of the
    computation for which it leaves.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return torch_private.local_of(x)
    spec, by, means = _gradient(torch_private.spec_of(x), counted)

    def back(gradient: torch.Tensor) -> DTensor:
        return _enter((gradient * means if means > 1 else gradient).contiguous(), spec, by, changes)

    return linear(_shard, back, x, border="argument")


def _shard(x: DTensor) -> torch.Tensor:
    local = torch_private.local_of(x)
    return local.view_as(local)


def enter_global(
    local: torch.Tensor,
    device_mesh: Any,
    placements: Placements,
    shape: Sequence[int],
    counted: Placements | None = None,
    changes: Changes | None = None,
) -> DTensor:
    """The DTensor whose shard on this rank is `local`, with the gradient rule of the border.

    `counted` and `changes` are as for `leave_global`. The dims are in memory as those of `local`.
    """
    spec = spec_around(local, device_mesh, placements, tuple(shape))
    if not (local.requires_grad and torch.is_grad_enabled()):
        return torch_private.dtensor(local.detach() if local.requires_grad else local, spec)
    if any(map(Placement.is_partial, placements)):
        _check_differentiable(device_mesh, placements)
    found = _enter(local, spec, counted or placements, changes)
    if changes is not None:
        changes.watch([(found, local)])
    return found


def spec_around(local: torch.Tensor, device_mesh: Any, placements: Placements, shape: tuple[int, ...]) -> Spec:
    """What a DTensor knows of itself whose shard on this rank is `local`: one object for all that know the same."""
    return _spec(device_mesh, placements, shape, None if local.is_contiguous() else local.stride(), local.dtype)


def whole_strides(strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of the whole tensor with the dims in the order of memory that they have locally; 0 stays."""
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        if strides[dim] or shape[dim] == 1:
            found[dim] = step
            step *= max(1, shape[dim])
    return tuple(found)


# --- axes whose gradient is whole on every rank


def counted_as_same(mesh: Mesh, placements: Placements, same: Axes) -> Placements:
    """The placements to apply the rule by, where axes are `same`: as those of pending values, gradients are whole."""
    if not same:
        return placements
    pending = torch_placements(Sharding(mesh, (), tuple([("sum", layout) for layout in same])))
    return tuple(mine if mine.is_partial() else other for mine, other in zip(pending, placements, strict=True))


def counted_whole(placements: Placements) -> Placements:
    """The placements to apply the rule by, where every axis over which the value is replicated is `same`."""
    return tuple(Partial("sum") if p.is_replicate() else p for p in placements)


def check_grad(function: str, grad: object) -> None:
    """Refuses what `grad` can't be."""
    if grad is not None and not (isinstance(grad, str) and grad in ("whole", "summed")):
        raise ShardingError(f"{function}: grad is 'whole' or 'summed'; found {shown(grad)}")


@functools.lru_cache(maxsize=4096)
def counted_alone(mesh: Mesh, placements: Placements, same: Axes, grad: str | None, call: str, spec: str) -> Placements:
    """The placements to apply the rule by, for a tensor that needs a gradient and crosses the border alone.

    `same` and `grad` are what the caller says of its copies, `call` is the call without its end, and `spec` says how
    the tensor is sharded; both are for the error. Raises `ShardingError` where the tensor is replicated over an axis
    for which nothing is said.
    """
    counted = counted_as_same(mesh, placements, same)
    pairs = zip(mesh.axis_names, counted, strict=True)
    unsaid = [axis for axis, p in pairs if p.is_replicate() and mesh.layout(axis).size > 1]
    if unsaid and grad is None:
        raise ShardingError(_question(mesh, unsaid, call, spec))
    return counted_whole(counted) if grad == "whole" else counted


def _question(mesh: Mesh, axes: Sequence[str], call: str, spec: str) -> str:
    """What to write for each of the ways in which ranks use their copies."""
    over = " and ".join(f"'{axis}' ({mesh.layout(axis).size} ranks)" for axis in axes)
    place = axes[0] if len(axes) == 1 else f"({' '.join(axes)})"
    return f"""{call.split("(")[0]}: the tensor needs a gradient and is replicated over {over}.
Say how the ranks use their copies:
  - all in the same way, so that each rank has the whole gradient (torch's own to_local and from_local assume this):
      {call}, grad="whole")
  - each in its own way, so that the gradients add up:
      {call}, grad="summed")
If the gradient is whole over only some of the axes, pass a spec that names these axes after same@:
      '{spec} {"" if "|" in spec else "| "}same@{place}'"""


# --- the rule, of a value with this spec, by the placements that are `counted`


@of_world(4096)
def _spec(
    device_mesh: Any, placements: Placements, shape: tuple[int, ...], strides: Sequence[int] | None, dtype: torch.dtype
) -> Spec:
    whole = strides_of(shape) if strides is None else whole_strides(strides, shape)
    return torch_private.dtensor_spec(device_mesh, placements, shape, whole, dtype)


def _pending_size(device_mesh: Any, placements: Placements, *ops: str) -> int:
    """The product of the sizes of the axes over which one of `ops` is pending."""
    pairs = zip(placements, device_mesh.shape, strict=True)
    return math.prod(size for p, size in pairs if isinstance(p, Partial) and p.reduce_op in ops)


def _check_differentiable(device_mesh: Any, placements: Placements) -> None:
    if _pending_size(device_mesh, placements, "max", "min") > 1:
        raise ShardingError(
            f"a pending max or min has no gradient across the border; resolve it first. Found {placements}"
        )


@of_world(4096)
def _gradient(spec: Spec, counted: Placements | None) -> tuple[Spec, Placements, int]:
    """What the gradients of a DTensor's shards are as one value: its spec; the placements by which its own gradient
    goes, by the same table; and a factor, of what is pending as a mean.
    """
    by = counted or spec.placements
    _check_differentiable(spec.mesh, by)
    shape = tuple(spec.shape)
    placements = tuple([Partial("sum") if p.is_replicate() else Replicate() if p.is_partial() else p for p in by])
    found = torch_private.dtensor_spec(spec.mesh, placements, shape, strides_of(shape), spec.tensor_meta.dtype)
    return found, _still_same(spec.placements, by, placements), _pending_size(spec.mesh, by, "avg", "mean")


def _enter(local: torch.Tensor, spec: Spec, counted: Placements, changes: Changes | None) -> DTensor:
    """The DTensor of a shard; this rank's gradient is its part of the one gradient, as the table says."""

    def back(cotangent: DTensor) -> torch.Tensor:
        if changes is not None:
            changes.tell()
        move, by, last = _entering(spec, counted, torch_private.spec_of(cotangent))
        local = leave_global(move.take(cotangent), by, changes)
        return local if last is None else last(local)

    # What becomes of a DTensor's copies is said where it becomes a plain tensor: a result has none but in a region.
    border: Border = None if changes is None else "result"
    return linear(lambda x: torch_private.dtensor(x.detach(), spec), back, local, border=border)


def _still_same(placements: Placements, counted: Placements, other: Placements) -> Placements:
    """The placements to apply the rule by to a gradient with the placements `other`, of a value with these.

    What is `same` stays so: replicated, with gradients that are whole on every rank.
    """
    triples = zip(placements, counted, other, strict=True)
    return tuple([by if mine.is_replicate() and by.is_partial() else found for mine, by, found in triples])


@of_world(4096)
def _entering(value: Spec, counted: Placements, cotangent: Spec) -> tuple[Route, Placements, Run | None]:
    """How a cotangent becomes this rank's gradient: a route; the placements by which its own gradient goes behind that;
    and what makes it this rank's summand.
    """
    shape = hints(value.shape)
    whole = sharding_of_placements(value.mesh, counted, len(shape))
    middle = gradient_sharding(whole, sharding_of_spec(cotangent), shape)
    framed = middle.at(shape), replace(whole, pending=()).at(shape)
    move = route(spec_at(cotangent, vary(cotangent.shape, cuts_of(*framed))), middle, (None, None))
    # What is pending as a mean is one of each rank: summands of it are smaller.
    means = [_pending_size(value.mesh, each, "avg", "mean") for each in (counted, move.spec.placements)]
    last = into_summand(*framed, shape, copies(whole, middle) * math.prod(means))
    return move, _still_same(value.placements, counted, move.spec.placements), last


# tensors that aren't arguments

_REQUIRES_GRAD, _NODE = operator.attrgetter("requires_grad"), operator.attrgetter("node")


def check_closed(results: Sequence[torch.Tensor], module: torch.nn.Module | None = None) -> bool:
    """Refuses results that depend on a leaf, or on what another region gave, by another way than an argument; returns
    whether there are gradients.

    Its gradient would be this rank's summand. The graph is walked back from the results to where the arguments came in,
    at each call, since what a function closes over may need a gradient from one call to the next; a node costs a third
    of a microsecond. A module may use what `fully_shard` has gathered for it.
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
            if module is not None and torch_private.reduced_by_fsdp(leaf) is not None:
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
            "pass it to axes.shard_map as an argument, with its spec on the left, as axes.from_local(x, spec, "
            "grad='summed') or axes.shard(x, spec); or use its detach(), also of what the function makes itself"
        )
    return ShardingError(
        f"the {'module' if module else 'function'} uses a tensor that needs a gradient and isn't an argument: {which}; "
        f"its gradient would be this rank's term of the sum alone\n{advice}"
    )


# --- leaves

# A cotangent may arrive pending, or sharded otherwise, and operations leave it so: what goes into a leaf is added up
# first, and resolved once. A hook of the leaf does that. What axes makes has it from the start, so that torch's own
# operations find it there, also where `requires_grad_()` comes later. A leaf that torch makes of another tensor
# (`nn.Parameter(x)`, `x.detach()`, a copy, one that was saved) has no hooks; it gets this one from the first operation
# of axes that uses it.

_HOOK = -1
"""The number of the hook that resolves the gradient of a leaf."""


def resolving(made: DTensor) -> DTensor:
    """A DTensor that was just made, which resolves its gradient if it is ever a leaf with one; none is in a graph."""
    spec = torch_private.spec_of(made)
    if (made.dtype.is_floating_point or made.dtype.is_complex) and not is_symbolic(spec.shape):
        torch_private.hooks_of(made)[_HOOK] = _resolve(spec)
    return made


def used(x: DTensor) -> DTensor:
    """The operand of an operation; the gradient of a leaf is resolved from here on to the leaf's own sharding, once,
    when it is accumulated.

    One that `fully_shard` sums over axes of the leaf's own mesh is left to it, summands and all.
    """
    is_leaf = x.requires_grad and x.is_leaf and torch.is_grad_enabled()
    if is_leaf and _HOOK not in torch_private.hooks_of(x) and not _is_left_to_fsdp(x):
        torch_private.hooks_of(x)[_HOOK] = _resolve(torch_private.spec_of(x))
    return x


@of_world(4096)
def _resolve(spec: Spec) -> _Resolve:
    """The hook of leaves with this `DTensorSpec`; a leaf is outside of a graph, so no size is a symbol."""
    sharding = sharding_of_spec(spec)
    return _Resolve(replace(sharding, pending=()), sharding.mesh.coordinate is not None)


@dataclass(frozen=True, eq=False)
class _Resolve:
    """A leaf's hook: its gradient in its own sharding, nothing pending, in memory of its own.

    A gradient on its way may be a view of another, or another DTensor of its shard: autograd would make it the leaf's,
    and add to it in place.
    """

    target: Sharding
    is_member: bool

    __torch_unserializable__: ClassVar[bool] = True  # torch.save leaves it out without a warning

    def __call__(self, found: torch.Tensor) -> DTensor | None:
        if not isinstance(found, DTensor) or not self.is_member:
            return None  # a rank outside the mesh has no part of the leaf
        x = route(torch_private.spec_of(found), self.target, (None, None)).take(found)
        if torch.is_grad_enabled() or torch_private.owns_its_memory(x):
            return x
        spec, local = torch_private.spec_of(x), waited(torch_private.local_of(x))
        copy = local.clone(memory_format=torch.contiguous_format)
        return torch_private.dtensor(copy, spec_at(spec, tuple(spec.shape)))


# --- a node of a graph


def traced(
    run: Callable[..., Any],
    what: tuple[Any, ...],
    tensors: Sequence[torch.Tensor],
    device_mesh: Any = None,
    numbers: Sequence[Any] = (),
    resolves: bool = True,
) -> Any:
    """`run(*what, numbers, tensors)` as one node of a graph; there, every collective is waited for where it is used.

    A `device_mesh` on which no tensor is goes in beside them (see `device_mesh_input`). Inside a graph nothing is a
    leaf, and no hook is reached: gradients of leaves outside are resolved here, where it `resolves`
    them: once for each way in.
    """
    leaves = [resolves and isinstance(x, DTensor) and x.is_leaf and x.requires_grad for x in tensors]
    resolve = tuple([leaf and not _is_left_to_fsdp(x) for x, leaf in zip(tensors, leaves, strict=True)])
    found = _node(kept_name(run, *what), device_mesh, resolve, tuple(numbers), *tensors)
    guard_whole_sizes()
    return found


@torch.compiler.allow_in_graph
def _node(name: str, _: Any, resolve: tuple[bool, ...], numbers: tuple[Any, ...], *tensors: Any) -> Any:
    run, *what = getattr(kept, name)
    for x in tensors:
        if isinstance(x, DTensor):
            _fix_uneven_sizes(x)
    return run(*what, numbers, [resolved(x) if leaf else x for x, leaf in zip(tensors, resolve, strict=True)])


def _fix_uneven_sizes(x: DTensor) -> None:
    """Makes numbers of the sizes of dims that are split unevenly, whole and on this rank, before anything has them.

    torch may have one symbol for this rank's size and for another dim of the same size: a result would keep the symbol.
    """
    local = torch_private.local_of(x)
    if is_symbolic(local.shape):
        spec, whole = torch_private.spec_of(x), hints(x.shape)
        pieces = cuts_of(sharding_of_spec(spec_at(spec, whole)).at(whole))
        for size, part, cuts in zip(x.shape, local.shape, pieces, strict=True):
            if cuts and hint(size) % cuts:
                fixed(size), fixed(part)


@torch.compiler.assume_constant_result
def _is_left_to_fsdp(leaf: DTensor) -> bool:
    return getattr(torch_private.reduced_by_fsdp(leaf), "is_spmd_mesh", False)
