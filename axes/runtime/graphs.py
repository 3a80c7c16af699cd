"""Graphs: how `torch.compile` calls what it can't look into.

Dynamo traces Python line by line, and can't follow a look-up by a `DTensorSpec` or an autograd function
that makes a DTensor. So it doesn't: a function that is allowed in a graph is one node of it, which
AOTAutograd runs later on symbolic tensors, and finds the functional collectives inside. Such a node
takes tensors and numbers alone, so what else it needs goes by a number:

    def reshard(x, spec, mesh):
        if torch.compiler.is_compiling():
            return node(x, number_of((spec, mesh)))       # to the graph, a constant
        ...

    @torch.compiler.allow_in_graph
    def node(x, number):
        spec, mesh = known(number)

>>> known(number_of(("b s@tp d", None)))
('b s@tp d', None)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from axes.algebra.mesh import Mesh
from axes.algebra.sharding import Sharding
from axes.runtime import torch_private

for _kind in (Mesh, Sharding):
    torch_private.constant_in_graphs(_kind)

Read = TypeVar("Read")

_things: list[Hashable] = []


@functools.cache
def _number(thing: Hashable) -> int:
    _things.append(thing)
    return len(_things) - 1


@torch.compiler.assume_constant_result
def number_of(*thing: Hashable) -> int:
    """The number of a thing, equal things having the same; to `torch.compile` it is a constant."""
    return _number(thing[0] if len(thing) == 1 else thing)


def read_once(read: Callable[..., Read]) -> Callable[..., Read]:
    """A function of texts, cached; to `torch.compile` what it gives is a constant."""
    cached = functools.lru_cache(maxsize=4096)(read)

    @torch.compiler.assume_constant_result
    @functools.wraps(read)
    def reading(*texts: Hashable) -> Read:
        return cached(*texts)

    return reading


def known(number: int) -> Any:
    """The thing that a number stands for."""
    return _things[number]
