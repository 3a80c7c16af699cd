"""Modules as SPMD regions: `forward` sees this rank's plain tensors, parameters included.

    block = axes.shard_map(block, "b@dp s d -> b@dp s d")
    y = block(x)                                      # x and y are DTensors; inside, everything is plain

A parameter that is a DTensor enters with its own sharding: `forward` has its shard, and its gradient is right by
the border's rule, since every rank of an axis over which it is replicated contributes its summand. Axes that every
input declares `same` are so for parameters as well: what the module computes has whole gradients there.

While a module of the region runs, its parameters' places hold the shards. Modules inside are asked again when they are
called with plain tensors: `fully_shard` puts its parameters there just before, and a checkpoint calls its module once
more in backward, after the region has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from axes.algebra.ambient import ambient_mesh
from axes.algebra.errors import ShardingError
from axes.algebra.grammar import Spec
from axes.algebra.layout import NamedLayout
from axes.algebra.mesh import Mesh
from axes.algebra.scopes import required_mesh
from axes.ops.regions import read_region
from axes.runtime import torch_private
from axes.runtime.border import counted_as_same, leave_global
from axes.runtime.leaves import resolve_at_leaf
from axes.runtime.sharded import from_local, sharding_of, to_local

M = TypeVar("M", bound=torch.nn.Module)


class InRegion(Protocol):
    """Runs a function in the region of an expression. `own`: leaves that it may use though they are no arguments."""

    @property
    def expression(self) -> str:
        """What goes in and comes out."""

    @property
    def mesh(self) -> Mesh | None:
        """Where names are looked up, if not in the ambient mesh."""

    def __call__(self, fn: Callable[..., Any], args: Any, kwargs: Any, own: Sequence[torch.Tensor]) -> Any:
        """The function's results, as DTensors."""


@dataclass(frozen=True)
class _Running:
    """A region that runs: the axes that are `same`, and the plain parameters that `fully_shard` has put in."""

    same: tuple[NamedLayout, ...]
    own: list[torch.Tensor] = field(default_factory=list)


class _Regions(threading.local):
    def __init__(self) -> None:
        self.regions: list[_Running] = []


_stack = _Regions()
_REGION, _PLACES = "_axes_region", "_axes_places"
"""Where a module keeps its region, and one inside what was in its parameters' places."""


def region_of_module(module: M, run: InRegion) -> M:
    """Make `forward` of a module a region; returns the module.

    Its class becomes a subclass of what it was, so that hooks, `fully_shard`, copies and `state_dict` find the module
    that they know. Raises `ShardingError` for a module that is a region already.
    """
    if _REGION in module.__dict__:
        raise ShardingError(f"{type(module).__name__} is a region already, of '{module.__dict__[_REGION].expression}'")
    kind = type(module)
    module.__dict__[_REGION] = run
    module.__class__ = type(kind.__name__, (_Region, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    for inner in module.modules():
        if inner is not module:
            inner.register_forward_pre_hook(_enter_inner, with_kwargs=True)
            inner.register_forward_hook(_leave_inner, prepend=True, always_call=True)
    return module


def without_regions(module: M) -> dict[str, str]:
    """Make the regions in a module, itself among them, plain modules again; returns their expressions, by name."""
    found = {}
    for name, each in module.named_modules():
        run = each.__dict__.pop(_REGION, None)
        if run is not None:
            found[name] = run.expression
            each.__class__ = next(kind for kind in type(each).__mro__ if not issubclass(kind, _Region))
    for each in module.modules():
        for hooks, own in ((each._forward_pre_hooks, _enter_inner), (each._forward_hooks, _leave_inner)):
            for number in [number for number, hook in hooks.items() if hook is own]:
                del hooks[number]
                each._forward_pre_hooks_with_kwargs.pop(number, None)
                each._forward_hooks_always_called.pop(number, None)
    return found


class _Region(torch.nn.Module):
    """A module whose `forward` runs in a region."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own `forward` on this rank's shards."""
        run: InRegion = self.__dict__[_REGION]
        forward = super().forward
        own: list[torch.Tensor] = []

        def inside(*args: Any, **kwargs: Any) -> Any:
            running = _Running(_same_on_the_left(run.expression, ambient_mesh()), own)
            _stack.regions.append(running)
            places = _enter(self, running)
            try:
                return forward(*args, **kwargs)
            finally:
                _restore(places)
                _stack.regions.pop()

        if _plain_tensors(args, kwargs):
            return _on_plain(run, inside, args, kwargs, own)
        return run(inside, args, kwargs, own)


def _plain_tensors(args: Any, kwargs: Any) -> bool:
    """Whether there are tensors among the arguments, all of them plain."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return bool(tensors) and not any(isinstance(x, DTensor) for x in tensors)


def _on_plain(run: InRegion, inside: Callable[..., Any], args: Any, kwargs: Any, own: Sequence[torch.Tensor]) -> Any:
    """The region of plain shards, which are what the expression declares; its results are plain shards, too.

    Outside, every rank does the same with what is replicated: gradients are whole there.
    """
    mesh = required_mesh(run.mesh, f"shard_map of a module, '{run.expression}', on plain tensors")
    specs = iter(read_region(run.expression).inputs)

    def entering(x: Any) -> Any:
        spec = next(specs, None) if isinstance(x, torch.Tensor) else None
        return x if spec is None else from_local(x, without_same(spec), mesh=mesh, grad="whole")

    args, kwargs = tuple(map(entering, args)), {name: entering(x) for name, x in kwargs.items()}
    result = run(inside, args, kwargs, own)
    return torch_private.mapped(lambda x: to_local(x, grad="whole") if isinstance(x, DTensor) else x, result)


def without_same(spec: Spec) -> str:
    """A spec without what it says of gradients."""
    pending = tuple(p for p in spec.pending or () if p.op != "same")
    return str(replace(spec, pending=pending or None))


def _same_on_the_left(expression: str, mesh: Mesh | None) -> tuple[NamedLayout, ...]:
    """The axes that every input of the expression declares `same`."""
    inputs = read_region(expression).inputs
    if mesh is None or not inputs:
        return ()
    said = [
        {name for p in spec.pending or () if p.op == "same" and p.place is not None for name in p.place.names}
        for spec in inputs
    ]
    return mesh.named(sorted(set.intersection(*said)))


# --- parameters


_Places = list[tuple[dict[str, Any], str, torch.Tensor]]


def _enter(module: torch.nn.Module, running: _Running) -> _Places:
    """Put shards in the places of DTensors; returns what was there. A tied parameter has one shard."""
    places: _Places = []
    shards: dict[int, torch.Tensor] = {}
    gathered = isinstance(module, FSDPModule)
    for holder in _held(module):
        for there in (holder._parameters, holder._buffers):
            for name, x in there.items():
                if isinstance(x, DTensor):
                    if id(x) not in shards:
                        shards[id(x)] = _shard(x, running.same)
                    places.append((there, name, x))
                elif gathered and x is not None and x.requires_grad:
                    running.own.append(x)
    for there, name, x in places:
        there[name] = shards[id(x)]
    return places


def _restore(places: _Places) -> None:
    for there, name, x in places:
        there[name] = x


def _held(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A module and those in it, but for what `fully_shard` gathers only when it is called."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _held(child)


def _shard(x: DTensor, same: Sequence[NamedLayout]) -> torch.Tensor:
    """This rank's shard of a parameter; its gradient is a summand, or whole along axes that are `same`."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return torch_private.local_of(x)
    if torch.compiler.is_compiling():
        return to_local(x, grad="summed")
    if x.is_leaf:
        resolve_at_leaf(x)
    if not same:
        return leave_global(x)
    held = sharding_of(x)
    whole = [axis for axis in same if axis.layout in held.mesh.layouts and axis.layout not in held.used]
    return leave_global(x, counted_as_same(held.mesh, x.placements, tuple(whole)))


# --- modules inside: their hooks are reached by whoever calls them


def _enter_inner(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a module of a region: what the region's start didn't find, or what runs once more after its end."""
    running = _stack.regions[-1] if _stack.regions else None
    places: _Places = []
    if isinstance(module, FSDPModule) or (running is None and _plain_tensors(args, kwargs)):
        places = _enter(module, running or _Running(()))
    module.__dict__.setdefault(_PLACES, []).append(places)


def _leave_inner(module: torch.nn.Module, args: Any, result: Any) -> None:
    there = module.__dict__.get(_PLACES)
    if there:
        _restore(there.pop())
