"""The tensors in nested values: tuples, lists and dicts in their own order, and what torch's pytree knows.

tensors_of_tree(((x, 3), {"mask": y}), refuse)         # [x, y]; `refuse` is called with what else isn't known
with_tensors(tree, iter([a, b]))                  # the same tree, a for x and b for y
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence
from typing import Any

import torch

from axes.algebra.errors import ShardingError
from axes.runtime import torch_private

_ROWS = (tuple, list)
_PASSES = (type(None), bool, int, float, str)


def tensors_of_tree(tree: Any, check: Callable[[Any], None]) -> list[torch.Tensor]:
    """The tensors of a tree, in order. `check` refuses what may be no part of it."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    kind = type(tree)
    if kind in _PASSES:
        return []
    inside = tree if kind in _ROWS else tree.values() if kind is dict else torch_private.children_of(tree)
    if inside is None:
        check(tree)
        return []
    return [x for item in inside for x in tensors_of_tree(item, check)]


def with_tensors(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The same tree with its tensors replaced, in order."""
    if isinstance(tree, torch.Tensor):
        return next(tensors)
    kind = type(tree)
    if kind in _PASSES:
        return tree
    if kind in _ROWS:
        return kind([with_tensors(item, tensors) for item in tree])
    if kind is dict:
        return {key: with_tensors(item, tensors) for key, item in tree.items()}
    children = torch_private.children_of(tree)
    if children is None:
        return tree
    return torch_private.with_children(tree, [with_tensors(item, tensors) for item in children])


# --- what may be no part of a tree


_NO_TREES = (
    numbers.Number,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)
"""What is no tree and holds no tensors; the first for speed."""

_TREES = (
    "tuples, lists, dicts, or what torch's pytree knows, like a dataclass after torch.export.register_dataclass(...)"
)


def check_result(passed: Sequence[object], part: Any) -> None:
    """Refuse what a function has returned beside tensors, but for numbers, text, and the arguments that it `passed`."""
    if not isinstance(part, _NO_TREES) and not any(part is each for each in passed):
        raise ShardingError(
            f"the function returned a value of type {_named(part)}, in which a region can't see tensors; return "
            f"tensors, numbers and text in {_TREES}; or make the {type(part).__name__} outside and pass it: an "
            "argument may be returned"
        )


def check_argument(passed: list[object], part: Any) -> None:
    """Refuse an argument that hides tensors, or that can be looked into once only; note any other in `passed`."""
    inside: Iterable[Any] = ()
    if isinstance(part, Mapping):
        inside = part.values()
    elif dataclasses.is_dataclass(part):
        inside = [getattr(part, field.name, None) for field in dataclasses.fields(part)]
    elif isinstance(part, _CONTAINERS):
        inside = part
    if isinstance(part, _ONCE) or any(isinstance(x, torch.Tensor) for x in inside):
        raise ShardingError(
            f"among the arguments is a value of type {_named(part)}, in which a region can't see tensors; pass them in "
            f"{_TREES}"
        )
    passed.append(part)


_ONCE = (types.GeneratorType, map, filter, zip)
_CONTAINERS: Any = (set, frozenset, MappingView)


def _named(part: object) -> str:
    kind = type(part)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
