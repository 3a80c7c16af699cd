"""Leaves: DTensors whose gradient is brought to their own sharding when it is accumulated.

A cotangent may arrive pending, or sharded otherwise, and operations leave it so: what goes into a
leaf is added up first, and resolved once. A hook of the leaf does that. What axes makes has it from the
start, so that torch's own operations find it there, also where `requires_grad_()` comes later. A leaf
that torch makes of another tensor (`nn.Parameter(x)`, `x.detach()`, a copy, one that was saved) has no
hooks; it gets this one from the first operation of axes that uses it.

`grad="pending"` takes the hook away, until a use that doesn't say so: of several the last one counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.sharding import Sharding
from axes.runtime import torch_private
from axes.runtime.check import waited
from axes.runtime.groups import of_world
from axes.runtime.routes import resharded
from axes.runtime.symbols import is_symbolic, spec_at
from axes.runtime.torch_placements import sharding_of_spec

Spec = Any
"""torch's `DTensorSpec`: mesh, placements, shape, strides and dtype in one hashable value."""


def resolve_at_leaf(leaf: DTensor) -> None:
    """Have the gradient of a leaf resolved to the leaf's own sharding, once, when it is accumulated."""
    if not _has_hook(leaf):
        torch_private.add_hook(leaf, _resolve(leaf))


def resolving(made: DTensor) -> DTensor:
    """A DTensor that was just made, which resolves its gradient if it ever is a leaf with one."""
    if made.dtype.is_floating_point or made.dtype.is_complex:
        torch_private.add_hook(made, _resolve(made))
    return made


def used(x: DTensor) -> DTensor:
    """The operand of an operation; the gradient of a leaf is resolved from here on."""
    if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        resolve_at_leaf(x)
    return x


def leave_pending(leaf: DTensor) -> None:
    """Have the gradient of a leaf left as it comes."""
    if not torch.compiler.is_compiling():
        torch_private.remove_hooks(leaf, _Resolve)
    elif _has_hook_outside(leaf):
        _leave_pending_outside(leaf)


def _has_hook(leaf: DTensor) -> bool:
    return any(type(hook) is _Resolve for hook in torch_private.hooks_of(leaf))


@torch.compiler.assume_constant_result
def _has_hook_outside(leaf: DTensor) -> bool:
    return _has_hook(leaf)


@torch.compiler.disable(reason="grad='pending' takes a hook of a leaf away, outside of the graph")
def _leave_pending_outside(leaf: DTensor) -> None:
    torch_private.remove_hooks(leaf, _Resolve)


def _resolve(leaf: DTensor) -> _Resolve:
    spec = torch_private.spec_of(leaf)
    return (_resolve_at.__wrapped__ if is_symbolic(spec.shape) else _resolve_at)(spec)


@of_world(4096)
def _resolve_at(spec: Spec) -> _Resolve:
    """The hook of leaves with this `DTensorSpec`."""
    return _Resolve(replace(sharding_of_spec(spec), pending=()))


@dataclass(frozen=True, eq=False)
class _Resolve:
    """A leaf's hook: its gradient in its own sharding, nothing pending."""

    target: Sharding

    __torch_unserializable__: ClassVar[bool] = True  # torch.save leaves it out without a warning

    def __call__(self, found: torch.Tensor) -> DTensor | None:
        if not isinstance(found, DTensor) or self.target.mesh.coordinate is None:
            return None  # a rank outside the mesh has no part of the leaf
        return _owned(resharded(found, self.target))


def _owned(x: DTensor) -> DTensor:
    """The gradient in memory that is its own, no more than it needs, and contiguous.

    A gradient on its way may be a view of another: autograd would make it the leaf's, and add to it in
    place. Of one that isn't contiguous autograd makes a copy that has the leaf's strides, at the price of
    two operations on DTensors; and torch 2.11 replicates it where a dim is split unevenly.
    """
    local = torch_private.local_of(x)
    if torch.is_grad_enabled() or (local.is_contiguous() and torch_private.owns_its_memory(local)):
        return x
    found = waited(local).clone(memory_format=torch.contiguous_format)
    return torch_private.dtensor(found, _dense_spec(torch_private.spec_of(x)))


@of_world(4096)
def _dense_spec(spec: Spec) -> Spec:
    return spec_at(spec, tuple(spec.shape))
