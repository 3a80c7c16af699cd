"""Leaves: DTensors whose gradient is brought to their own sharding when it is accumulated.

A cotangent may arrive pending, or sharded otherwise, and operations leave it so: what goes into a
leaf is added up first, and resolved once. A hook of the leaf does that. What axes makes has it from the
start, so that torch's own operations find it there, also where `requires_grad_()` comes later. A leaf
that torch makes of another tensor (`nn.Parameter(x)`, `x.detach()`, a copy, one that was saved) has no
hooks; it gets this one from the first operation of axes that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.plan import cuts_of
from axes.algebra.sharding import Sharding
from axes.runtime import torch_private
from axes.runtime.graphs import check_groups, fixed, guard_whole_sizes, hint, hints, is_symbolic, kept, kept_name
from axes.runtime.groups import of_world
from axes.runtime.operation import waited
from axes.runtime.redistribute import Spec, resolved, route, spec_at
from axes.runtime.torch_placements import sharding_of_spec

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
    check_groups(*[x.device_mesh for x in tensors if isinstance(x, DTensor)])
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
