"""Annotations: the logical names of a parameter's dims, written where the parameter is made.

    class Attention(nn.Module):
        def __init__(self, embed, heads, head_dim):
            super().__init__()
            self.wq = axes.annotate(nn.Parameter(torch.empty(heads * head_dim, embed)), "(heads head_dim) embed")

`shard_module` reads them. What a name means on a mesh is said elsewhere, by `axes.Rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from axes import ShardingError
from axes.extension import read, shown
from axes.nn.module_tensors import tensors_of

T = TypeVar("T", torch.Tensor, torch.nn.Module)

_ATTRIBUTE = "_axes_specs"
"""On a tensor its spec; on a module a mapping from its own parameters' and buffers' names to specs."""


def annotate(thing: T, spec: str | Mapping[str, str]) -> T:
    """Name the dims of a parameter, or of several parameters and buffers of a module, for `axes.shard_module`.

    Annotations of a module stay if a parameter is replaced; those of a tensor belong to the tensor. A later
    annotation replaces an earlier one. Like Flax's `nn.with_partitioning`.

    Args:
        thing: A tensor or a module.
        spec: For a tensor its dims, as `"(heads head_dim) embed"`; for a module a mapping from names to dims, in
            which names may have dots.

    Returns:
        The tensor or module.

    Raises:
        ExpressionError: The text isn't a spec.
        ShardingError: The module has no such name. `axes.shard_module` checks the number of dims.

    Examples:
        >>> linear = annotate(torch.nn.Linear(4, 8), {"weight": "mlp embed", "bias": "mlp"})
        >>> annotated(linear)
        {'weight': 'mlp embed', 'bias': 'mlp'}
    """
    if isinstance(thing, torch.nn.Module):
        specs = checked_specs("a module is annotated by a mapping from names to specs", spec, "{'weight': 'f d'}")
        own = dict(tensors_of(thing))
        for name, each in specs.items():
            if name not in own:
                raise ShardingError(f"{type(thing).__name__} has no parameter or buffer {shown(name, own)}")
            read(each)
        thing.__dict__[_ATTRIBUTE] = {**thing.__dict__.get(_ATTRIBUTE, {}), **specs}
    elif isinstance(thing, torch.Tensor):
        if not isinstance(spec, str):
            raise ShardingError(f"a tensor is annotated by one spec, like 'heads embed'; found {shown(spec)}")
        read(spec)
        setattr(thing, _ATTRIBUTE, spec)
    else:
        raise ShardingError(f"annotate takes a parameter, a buffer or a module; found {type(thing).__name__}")
    return thing


def annotated(module: torch.nn.Module) -> dict[str, str]:
    """The specs that a module and those in it were annotated with, by the whole names of parameters and buffers.

    Of two that are about one name the outer module's applies, and a module's goes before a tensor's own.
    """
    found: dict[str, str] = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        for name, spec in each.__dict__.get(_ATTRIBUTE, {}).items():
            found.setdefault(f"{prefix}.{name}" if prefix else name, spec)
    for name, tensor in tensors_of(module):
        spec = getattr(tensor, _ATTRIBUTE, None)
        if spec is not None:
            found.setdefault(name, spec)
    return found


def checked_specs(what: str, values: object, hint: str) -> Mapping[str, str]:
    """A mapping from text to text; `ShardingError`, with an example, for anything else."""
    if not isinstance(values, Mapping) or not all(isinstance(each, str) for pair in values.items() for each in pair):
        raise ShardingError(f"{what}, like {hint}; found {shown(values)}")
    return values
