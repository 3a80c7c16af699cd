"""The tensors in nested values: tuples, lists and dicts in their own order, and what torch's pytree knows.

tensors_of_tree(((x, 3), {"mask": y}), refuse)         # [x, y]; `refuse` is called with what else isn't known
with_tensors(tree, iter([a, b]))                  # the same tree, a for x and b for y
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

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
