"""The tensors in nested values: tuples, lists and dicts in their own order, and what torch's pytree knows.

tree = taken_apart(((x, 3), {"mask": y}), refuse)         # `refuse` is called with what else isn't known
tree.tensors                                               # [x, y]
tree.holding([a, b])                                       # ((a, 3), {"mask": b})
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
import types
from collections.abc import Callable, Iterable, Mapping, MappingView, Sequence
from typing import Any, NamedTuple

import torch

from axes.algebra.errors import ShardingError
from axes.runtime import torch_private

_PASSES = (type(None), bool, int, float, str)


class Tree(NamedTuple):
    """A nested value, taken apart: its leaves, which of them are tensors, and what puts leaves together."""

    leaves: list[Any]
    tensors: list[torch.Tensor]
    structure: Any

    def holding(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The same tree with other tensors, in order."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return torch_private.put_together(leaves, self.structure)


def taken_apart(tree: Any, check: Callable[[Any], None], what: str = "an argument of a region") -> Tree:
    """A tree by its leaves. `check` refuses what may be no part of it; `ShardingError` for a tree without an end."""
    try:
        leaves, structure = torch_private.take_apart(tree)
    except RecursionError:
        raise ShardingError(f"{what} holds itself, or is nested too deep") from None
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif type(leaf) not in _PASSES:
            check(leaf)
    return Tree(leaves, tensors, structure)


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
