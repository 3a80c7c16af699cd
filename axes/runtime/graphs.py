"""Graphs: how `torch.compile` calls what it can't look into.

Dynamo traces Python line by line, and can't follow a look-up by a `DTensorSpec` or an autograd function
that makes a DTensor. So it doesn't: a function that is allowed in a graph is one node of it, which
AOTAutograd runs later on symbolic tensors, and finds the functional collectives inside. Such a node
takes tensors and numbers alone, so what else it needs goes by a name:

    def reshard(x, spec, mesh):
        if torch.compiler.is_compiling():
            return node(x, kept_name(spec, mesh))         # to the graph, a constant
        ...

    @torch.compiler.allow_in_graph
    def node(x, name):
        spec, mesh = getattr(kept, name)

There is one such node, `traced` in `axes.runtime.border`.

Ranks meet in a node, so all must run one of the same graph: its guards on the DTensors that come in are
such that depend on whole sizes, which are the same on every rank.

>>> getattr(kept, kept_name("b s@tp d", None))
('b s@tp d', None)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import SizeError
from axes.algebra.logical import Rules
from axes.algebra.mesh import Mesh, ambient_mesh, ambient_stack, pop_mesh, push_mesh
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import Shape
from axes.runtime import torch_private

for _kind in (Mesh, Sharding, Rules):
    torch_private.constant_in_graphs(_kind)

Read = TypeVar("Read")


_MOST = 8192


class Kept:
    """The things that compiled graphs use, as attributes: dynamo guards those, but not the result of a constant call.

    A call that dynamo may not trace is marked as one with a constant result, and returns the name of the thing that it
    has kept here: `getattr(kept, keep_region(...))`. Of the many that a process may come to the first are let go.
    """

    def __init__(self) -> None:
        self._names: dict[Hashable, str] = {}
        self._numbers = itertools.count()

    def keep(self, value: object) -> str:
        """The name of the attribute that `value` is."""
        return self._named(id(value), value)

    def _named(self, key: Hashable, thing: object) -> str:
        if key not in self._names:
            if len(self._names) == _MOST:
                delattr(self, self._names.pop(next(iter(self._names))))
            self._names[key] = f"{type(thing).__name__}_{next(self._numbers)}"
            setattr(self, self._names[key], thing)
        return self._names[key]


kept = Kept()


@torch.compiler.assume_constant_result
def kept_name(*thing: Hashable) -> str:
    """The name of a thing, equal things having the same; to `torch.compile` it is a constant."""
    return kept._named(thing, thing)


def read_once(read: Callable[..., Read]) -> Callable[..., Read]:
    """A function of texts, shapes and meshes, cached; to `torch.compile` what it gives is a constant."""
    cached = functools.lru_cache(maxsize=4096)(read)

    @torch.compiler.assume_constant_result
    @functools.wraps(read)
    def reading(*texts: Hashable) -> Read:
        return cached(*texts)

    return reading


@torch.compiler.assume_constant_result
def guard_whole_sizes() -> bool:
    """Guards the graph on whole sizes, so that every rank has one, or none, for the same calls.

    A size that is a number is guarded as such, and so is one that its parts don't divide, since then
    ranks have shards of several sizes. Where they do divide it and it varies, the shards vary, too.
    """
    for traced, real in torch_private.inputs_with_guarded_sizes():
        shard, static = torch_private.local_of(traced), []
        for dim, size in enumerate(traced.shape):
            sizes = zip(traced.placements, traced.device_mesh.shape, strict=True)
            count = math.prod(ranks for p, ranks in sizes if getattr(p, "dim", None) == dim)
            if type(size) is int or count == 1:
                continue
            is_number = type(shard.shape[dim]) is int
            if size % count or (is_number and shard.shape[dim] <= 1):  # to torch 0 and 1 are numbers, never symbols
                fixed(size)
            elif is_number:
                static.append(dim)
        if static:
            torch_private.trace_again_with_symbols(torch_private.local_of(real), static)
    return True


def device_mesh_input(mesh: Mesh | None, *tensors: DTensor) -> Any:
    """The `DeviceMesh` of a mesh, an input of the graph where a node is given it; None where one of `tensors` has it.

    AOTAutograd needs it there: for a DTensor that leaves a graph into which none on this mesh came, it
    would else take the mesh of the gradient that is yet to come (2.13).
    """
    if mesh is None or not torch_private.DEVICE_MESHES_ARE_INPUTS:
        return None
    name = _keep_device_mesh(mesh, *[x.device_mesh for x in tensors])
    return getattr(kept, name) if name else None


@torch.compiler.assume_constant_result
def _keep_device_mesh(mesh: Mesh, *known: Any) -> str:
    return "" if known and (mesh.binding is None or mesh.device_mesh in known) else kept.keep(mesh.device_mesh)


# The ambient mesh. To dynamo, a mesh that is pushed on a list is a side effect, which it doesn't allow where a
# graph is within another, as in a checkpoint. So the meshes that a traced function enters and leaves are kept
# here, by the trace: one that is given up leaves nothing behind. A trace never ends between the two, since
# dynamo runs a block whole or not at all.

_entered: WeakKeyDictionary[object, list[Mesh]] = WeakKeyDictionary()


@torch.compiler.substitute_in_graph(ambient_mesh)
def _ambient_mesh() -> Mesh | None:
    name, outside = _keep_entered(), ambient_stack.meshes
    return getattr(kept, name) if name else outside[-1] if outside else None


@torch.compiler.substitute_in_graph(push_mesh)
def _push(mesh: Mesh) -> None:
    _enter(mesh)


@torch.compiler.substitute_in_graph(pop_mesh)
def _pop() -> None:
    _leave()


@torch.compiler.assume_constant_result
def _keep_entered() -> str:
    meshes = _entered.get(torch_private.current_trace())
    return kept.keep(meshes[-1]) if meshes else ""


@torch.compiler.assume_constant_result
def _enter(mesh: Mesh) -> bool:
    _entered.setdefault(torch_private.current_trace(), []).append(mesh)
    return True


@torch.compiler.assume_constant_result
def _leave() -> bool:
    _entered[torch_private.current_trace()].pop()
    return True


# --- sizes that vary

# A size that is a symbol stands for any size that divides as that of the call that is traced does: what is found at the
# size of this call is good for all of them, and the graph is guarded on dividing so (`vary`).


def is_symbolic(shape: Sequence[int]) -> bool:
    """Whether a size of the shape is symbolic."""
    return not {int}.issuperset(map(type, shape))


def hints(shape: Sequence[int]) -> Shape:
    """The sizes that symbols have in the call that is being traced."""
    return tuple([size if type(size) is int else hint(size) for size in shape])


hint = torch_private.hint


def fixed(size: int) -> int:
    """The number of a size, for which alone the graph is then.

    The guard is on a remainder that only this number has: with a comparison alone, torch would put the number for the
    symbol, and leave the guard to the tensor whose size it is. After the guard it puts it, so that results have the
    number, too: where it found only in the backward pass that the symbol is one number, it would have counted the sizes
    that the graph returns before, as many as symbols. In the backward pass itself it is too late for that.
    """
    if type(size) is int:
        return size
    number = hint(size)
    # Asking a symbolic condition for its truth makes the guard. So would an `assert`, but not under `python -O`.
    is_backward = torch_private.backward_pass() >= 0
    if not (size % _MORE_THAN_ANY_SIZE == number and (is_backward or size == number)):
        raise SizeError(f"a size is {number} in this call, and isn't in its graph: {size}")
    return number


def are_equal(one: int, other: int) -> bool:
    """Whether two sizes are the same, asked as `fixed` asks: by a comparison one symbol would be put for the other."""
    return (one - other) % _MORE_THAN_ANY_SIZE == 0


_MORE_THAN_ANY_SIZE = 2**61 - 1


def vary(shape: Sequence[int], cuts: Shape) -> Shape:
    """The shape for which what was found at its `hints` is good in a graph: symbols, where these sizes divide by what
    they are cut into, and numbers elsewhere.
    """
    # Nor can a size vary of which shards have a single element: torch takes a size of 1 for a number.
    pairs = enumerate(zip(shape, cuts, strict=True))
    uses = [(dim, size, 0 if hint(size) == pieces else pieces) for dim, (size, pieces) in pairs]
    found = varying(uses)
    return tuple([found[dim] if dim in found else hint(size) for dim, size, _ in uses])


def varying(uses: Sequence[tuple[Any, Any, int]]) -> dict[Any, Any]:
    """The symbols of names that may have any size: each `(name, size, pieces)` has the same, and its pieces divide it.

    `pieces` is 0 where a size can't vary. The sizes of all other names are fixed.
    """
    found: dict[Any, Any] = {}
    stay = set()
    for name, size, pieces in uses:
        if type(size) is int or not pieces or size % pieces or not are_equal(size, found.setdefault(name, size)):
            stay.add(name)
    for name, size, _ in uses:
        if name in stay:
            fixed(size)
    return {name: size for name, size in found.items() if name not in stay}
