"""The gradients of parameters as plain local tensors, which clipping and optimizers work on.

for parameter in distinct(model.parameters()):
    gradient = settled_gradient(parameter)     # sharded as the parameter, nothing pending
    if gradient is not None:
        local_tensor(gradient)                 # this rank's shard; of a plain tensor the tensor itself
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError
from axes.algebra.sizes import tuple_of
from axes.runtime import torch_private
from axes.runtime.check import waited
from axes.runtime.groups import of_world
from axes.runtime.routes import resharded
from axes.runtime.torch_placements import sharding_of_spec

Spec = Any
"""torch's `DTensorSpec`: mesh, placements, shape, strides and dtype in one hashable value."""


def distinct(tensors: torch.Tensor | Iterable[torch.Tensor], function: str) -> list[torch.Tensor]:
    """The tensors in order, each once: a tied parameter has one gradient, however often it is listed.

    Raises `ShardingError` for what is no tensor; `function` is the name that the error gives to the caller.
    """
    if isinstance(tensors, torch.nn.Module):
        raise ShardingError(f"{function} takes tensors; found a module, so pass its module.parameters()")
    if not isinstance(tensors, Iterable):
        raise ShardingError(f"{function} takes tensors, like module.parameters(); found {type(tensors).__name__}")
    found = (tensors,) if isinstance(tensors, torch.Tensor) else tuple_of(tensors)
    if found is None:
        raise ShardingError(
            f"{function} takes tensors; found {type(tensors).__name__}, which fails when it is iterated"
        )
    for tensor in found:
        if not isinstance(tensor, torch.Tensor):
            hint = "; pass module.parameters(), without names" if isinstance(tensor, tuple | str) else ""
            raise ShardingError(f"{function} takes tensors; found {type(tensor).__name__}{hint}")
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
    if torch_private.lie_alike(gradient, parameter):
        return gradient
    with torch.no_grad():
        parameter.grad = resharded(gradient, _resolved(torch_private.spec_of(parameter)))
    return parameter.grad


@of_world(4096)
def _resolved(spec: Spec) -> Any:
    """The sharding of a parameter, nothing pending."""
    return replace(sharding_of_spec(spec), pending=())


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, outside of autograd; a plain tensor itself."""
    return waited(torch_private.local_of(tensor)) if isinstance(tensor, DTensor) else tensor


def by_device_and_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors in lists that torch's operations on lists take in one go; empty tensors are left out."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(found.values())
