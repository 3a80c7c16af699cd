"""Modules as SPMD regions: `forward` sees this rank's plain tensors, parameters included.

    block = axes.shard_map(block, "b@dp s d -> b@dp s d")
    y = block(x)                                      # x and y are DTensors; inside, everything is plain

A parameter that is a DTensor enters with its own sharding: `forward` has its shard, and its gradient is right by
the border's rule, since every rank of an axis over which it is replicated contributes its summand. Axes that every
input declares `same` are so for parameters as well: what the module computes has whole gradients there.

While a module of the region runs, its parameters' places hold the shards. Once a gradient is needed, modules inside are
asked again when they are called with plain tensors: `fully_shard` puts its parameters there just before, and a
checkpoint calls its module once more in backward, after the region has ended.

Plain shards, as in generation, go in as the DTensors that the left side declares, and come out as shards.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from axes.algebra.errors import ShardingError
from axes.algebra.layout import Layout, Universe, common_digits
from axes.algebra.mesh import Mesh, required_mesh, use_mesh
from axes.ops.arguments import NamedSpecs, are_plain, taken_apart
from axes.ops.regions import read_region
from axes.runtime import torch_private
from axes.runtime.border import counted_as_same, leave_global, used
from axes.runtime.groups import of_world
from axes.runtime.torch_placements import sharding_of_spec

M = TypeVar("M", bound=torch.nn.Module)


class RegionCall(NamedTuple):
    """What `shard_map` is told."""

    expression: str
    mesh: Mesh | None = None
    check: bool = False
    named: NamedSpecs = NamedSpecs()


@dataclass(eq=False)
class ModuleFunction:
    """What a region runs of a module: its `forward`, with shards in the places of its parameters.

    mesh: where names are looked up. tensor_mesh: that of the region's tensors, each of whose ranks has a summand of a
    gradient. shards: the DTensors that it has met, each with its shard.
    """

    module: torch.nn.Module
    forward: Callable[..., Any]
    call: RegionCall
    mesh: Mesh | None = None
    tensor_mesh: Mesh | None = None
    shards: list[tuple[DTensor, torch.Tensor]] = field(default_factory=list)

    @functools.cached_property
    def same(self) -> tuple[Layout, ...]:
        """The axes along which every rank has a whole gradient."""
        return _same_on_the_left(self.call.expression, self.mesh)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's results for these shards."""
        state: _State = self.module.__dict__[_STATE]
        with state.shared.lock:
            state.shared.ran = self.call, self.mesh, self.tensor_mesh
            if torch.is_grad_enabled() and not state.hooked:
                _hook(self.module)
            _stack.regions.append(self)
            places: _Places = []
            try:
                _enter(self.module, self, places)
                return self.forward(*args, **kwargs)
            finally:
                _stack.regions.pop()
                _restore(places)

    def tensors(self) -> list[torch.Tensor]:
        """This rank's shards of the module's parameters and buffers, as they are now."""
        found = (*self.module.parameters(), *self.module.buffers())
        return [torch_private.local_of(x) if isinstance(x, DTensor) else x for x in found]


class _Shared:
    """What the modules of a region share: how it ran last, and a lock, since one thread at a time has its shards in the
    parameters' places. A copy of the modules has one of its own.
    """

    def __init__(self) -> None:
        self.ran: tuple[RegionCall, Mesh | None, Mesh | None] = RegionCall(""), None, None
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Shared, ()


@dataclass
class _State:
    """What a module in a region keeps.

    call: what `shard_map` was told, of the region's own module. scopes: of the calls that run, each with what it has to
    undo. hooks: those that ask for its shards when it is called. hooked: of the region's own module, those inside ask.
    """

    shared: _Shared
    call: RegionCall | None = None
    scopes: list[contextlib.ExitStack] = field(default_factory=list)
    hooks: list[RemovableHandle] = field(default_factory=list)
    hooked: bool = False


class _Regions(threading.local):
    def __init__(self) -> None:
        self.regions: list[ModuleFunction] = []


_stack = _Regions()
_STATE, _SHARDED = "_axes_region", "_axes_sharded"
"""Where a module keeps its `_State`; and which of its own parameters were sharded, with their specs."""


def _state(module: torch.nn.Module) -> _State | None:
    return module.__dict__.get(_STATE)


def region_of_module(module: M, call: RegionCall, run: Callable[..., Any]) -> M:
    """Make `forward` of a module a region, which `run` runs; returns the module.

    The module gets a `forward` of its own in front of that of its class, so that hooks, `fully_shard`, copies and
    `state_dict` find the module that they know. Raises `ShardingError` where it is the region of another expression.
    """
    if torch.compiler.is_compiling():
        raise ShardingError("shard_map of a module changes the module; make the region before compiling what calls it")
    state = _state(module)
    if state is not None and state.call is not None:
        if state.call != call:
            raise ShardingError(f"{type(module).__name__} is a region already, of '{state.call.expression}'")
        return module
    shared = _Shared()
    for inner in module.modules():
        inner.__dict__.setdefault(_STATE, _State(shared)).shared = shared
        _note_sharded(inner)
    module.__dict__[_STATE].call = call
    # Who asks for the signature, as transformers does before it generates, finds that of the module's own.
    own, forward = module.forward, functools.partial(_forward, run, module, module.forward)
    module.forward = functools.update_wrapper(forward, own, updated=())
    module.forward.region = call
    return module


def _hook(module: torch.nn.Module) -> None:
    """Have the modules in a region ask for their shards when they are called.

    Only a checkpoint's second run and `fully_shard` need it, so generation goes without: two hooks cost each call of a
    module five microseconds. A hook stands before those of others, which see shards, but behind that of `fully_shard`.
    """
    own: _State = module.__dict__[_STATE]
    with _NUMBERING:
        after = RemovableHandle.next_id
        for inner in module.modules():
            state = inner.__dict__.setdefault(_STATE, _State(own.shared))  # of one put in since, as by a checkpoint
            if inner is not module and not state.hooks:
                RemovableHandle.next_id, first = _HOOK_NUMBER, not isinstance(inner, FSDPModule)
                state.hooks = [
                    inner.register_forward_pre_hook(_enter_inner, with_kwargs=True, prepend=first),
                    inner.register_forward_hook(_leave_inner, prepend=True, always_call=True),
                ]
        RemovableHandle.next_id = after
    own.hooked = True


_NUMBERING, _HOOK_NUMBER = threading.Lock(), 2**48
"""Hooks of every module get the same numbers, more than any other hook's: dynamo guards on them, and equal layers are
to share a graph.
"""


@torch.compiler.disable(reason="a module region puts shards in its parameters' places; compile the modules inside it")
def _forward(
    run: Callable[..., Any], module: torch.nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The module's `own` forward on this rank's shards."""
    call: RegionCall = module.__dict__[_STATE].call
    expression, mesh, *_ = call
    if not (_stack.regions and _plain_tensors(args, kwargs)):
        return run(ModuleFunction(module, own, call), call, args, kwargs)
    # A region inside a region: its shards are those of the region around it, and so is what a gradient means.
    outer = _stack.regions[-1]
    names = required_mesh(mesh, f"shard_map '{expression}'")
    inner = replace(outer, module=module, forward=own, call=call, mesh=names)
    if {*inner.same} != {*outer.same}:
        mine, theirs = (" ".join(map(names.called, each.same)) or "no axis" for each in (inner, outer))
        raise ShardingError(
            f"a region inside a region: its inputs are the same over {mine}, those of the region around it over "
            f"{theirs}; write same@ in both or in neither\n  in  shard_map '{expression}'"
        )
    with use_mesh(names):
        return inner(*args, **kwargs)


def _plain_tensors(args: Any, kwargs: Any) -> bool:
    """Whether there are tensors among the arguments, all of them plain."""
    return are_plain(taken_apart((args, kwargs), lambda part: None).tensors)


@functools.lru_cache(maxsize=1024)
def _same_on_the_left(expression: str, mesh: Mesh | None) -> tuple[Layout, ...]:
    """The axes of a mesh that every input of the expression declares `same`, be it by a name of several."""
    if mesh is None:
        return ()
    said = []
    for spec in read_region(expression).inputs:
        names = [name for p in spec.pending or () if p.op == "same" and p.place is not None for name in p.place.names]
        said.append(set(mesh.made_of(map(mesh.layout, names)) or names))
    return mesh.splits(sorted(set.intersection(*said))) if said else ()


# --- parameters


_Places = list[tuple[dict[str, Any], str, DTensor, torch.Tensor]]
"""Where a shard was put: the module's parameters or buffers, the name, what was there, and the shard."""


def _enter(module: torch.nn.Module, region: ModuleFunction, places: _Places) -> None:
    """Put shards in the places of DTensors, and note in `places` what was there. A tied parameter has one shard."""
    shards: dict[int, torch.Tensor] = {}
    has_gradients = torch.is_grad_enabled()
    for holder in _held(module):
        for there in (holder._parameters, holder._buffers):
            for name, x in there.items():
                if x is None:
                    continue
                if x.is_meta:
                    raise ShardingError(
                        f"'{_path(module, x)}' has no values, it is on the device meta; axes.shard_module(module, ...) "
                        "makes what was made there, each rank its shards"
                    )
                by_fsdp = torch_private.reduced_by_fsdp(x)
                if not isinstance(x, DTensor) and not by_fsdp:
                    if name in holder.__dict__.get(_SHARDED, ()) and len(_stack.regions) == 1:
                        raise _replaced(module, holder, name, x)
                    if _stack.regions:
                        continue  # check_closed refuses it; but it doesn't see the graph of a checkpoint's second run
                if x.requires_grad and has_gradients and (x.is_leaf or isinstance(x, DTensor)):
                    _check_summed(module, x, region, by_fsdp)
                if isinstance(x, DTensor):
                    shard = shards[id(x)] if id(x) in shards else _left(x, region, by_fsdp is not None)
                    shards[id(x)] = there[name] = shard
                    places.append((there, name, x, shard))


def _path(module: torch.nn.Module, x: torch.Tensor) -> str:
    """The name of a module's parameter or buffer."""
    return next(name for name, each in (*module.named_parameters(), *module.named_buffers()) if each is x)


def _check_summed(module: torch.nn.Module, x: torch.Tensor, region: ModuleFunction, by_fsdp: Any) -> None:
    """Refuses a parameter of which nobody adds up the gradients along an axis of the region: copies would drift apart.

    They are added up along the axes of the parameter's own mesh, and of that which `fully_shard` reduces over.
    """
    own = x.device_mesh if isinstance(x, DTensor) else None
    missing = region.tensor_mesh and _not_summed(region.tensor_mesh, region.same, own, by_fsdp and by_fsdp.mesh)
    if missing:
        lies = "is a plain tensor" if own is None else f"lies on {_axes_of(own)}"
        reduced = f", and fully_shard adds up over {_axes_of(by_fsdp.mesh)}" if by_fsdp else ""
        raise ShardingError(
            f"each rank of {' '.join(missing)} has a term of the gradient of '{_path(module, x)}', and nothing adds "
            f"them up: it {lies}{reduced}\nput it on a mesh that has these axes, axes.shard_module(module, specs, "
            "mesh=...), or have fully_shard reduce over them as well"
        )


def _axes_of(device_mesh: Any) -> str:
    return " ".join(device_mesh.mesh_dim_names or [str(device_mesh)])


@of_world(1024)
def _not_summed(mesh: Mesh, same: tuple[Layout, ...], *device_meshes: Any) -> tuple[str, ...]:
    """The axes of a mesh that are neither `same` nor in one of these device meshes."""
    over = [each for each in device_meshes if each is not None]
    if any(Universe.of(torch_private.root_ranks(each)) != mesh.universe for each in over):
        return ()  # one of other ranks, of whose axes nothing is known here
    summed = [*same, *[Layout.of(modes) for each in over for modes in torch_private.dims_of(each)]]
    found = common_digits((*mesh.layouts, *summed)) or {}  # none where they cut the ranks in other places
    digits = {digit for layout in summed for digit in found.get(layout, ())}
    return tuple([name for name, layout in mesh.axes.items() if not digits.issuperset(found.get(layout, layout))])


def _note_sharded(holder: torch.nn.Module) -> None:
    """Note which parameters and buffers of a module are sharded, as a region asks when it runs.

    `load_state_dict(assign=True)`, an assignment and `functional_call` put other tensors in their places.
    `fully_shard` does, too, and a region around this one; these are right. A buffer that every rank has whole may be
    plain as well.
    """
    for name, x in (holder._parameters | holder._buffers).items():
        if isinstance(x, DTensor) and (name in holder._parameters or not all(p.is_replicate() for p in x.placements)):
            holder.__dict__.setdefault(_SHARDED, {})[name] = sharding_of_spec(torch_private.spec_of(x)).spec


def _replaced(module: torch.nn.Module, holder: torch.nn.Module, name: str, x: torch.Tensor) -> ShardingError:
    path = next(path for path, each in module.named_modules() if each is holder)
    spec = holder.__dict__[_SHARDED][name]
    return ShardingError(
        f"'{path}{'.' if path else ''}{name}' was sharded as '{spec}', and a plain tensor stands in its place, "
        f"{list(x.shape)}, as load_state_dict(assign=True) or an assignment puts one there\n"
        f"put a DTensor there, axes.shard(tensor, '{spec}', mesh=mesh); or load whole tensors with "
        "torch.distributed.checkpoint.state_dict.set_model_state_dict(module, tensors, "
        "options=StateDictOptions(full_state_dict=True))"
    )


def _restore(places: _Places) -> None:
    """Put back what was there; what `forward` has assigned to a buffer since is its new value.

    Raises `ShardingError` for an assignment that can't be one.
    """
    wrong = ""
    for there, name, x, shard in places:
        found, there[name] = there.get(name), x
        if found is not None and found is shard:
            memory_of, local_of = torch_private.memory_of, torch_private.local_of
            if type(shard) is torch.Tensor and memory_of(shard) != memory_of(local_of(x)):
                wrong = f"forward assigned to the data of '{name}', which is a shard here and not the parameter"
            continue
        if isinstance(found, torch.nn.Parameter) or found is None or found.shape != shard.shape or x.requires_grad:
            wrong = f"forward put another tensor in the place of '{name}', which isn't a shard like the one before"
        else:
            there[name] = torch_private.dtensor(found.detach(), torch_private.spec_of(x))
    if wrong:
        raise ShardingError(f"{wrong}; change a parameter in place, or outside of the region")


def _held(module: torch.nn.Module) -> list[torch.nn.Module]:
    """A module and those in it, but for what `fully_shard` gathers only when it is called."""
    found, seen = [module], {id(module)}
    for each in found:  # grows as it goes
        for child in each._modules.values():
            if child is None or id(child) in seen:
                continue
            seen.add(id(child))
            if not isinstance(child, FSDPModule):
                found.append(child)
            elif (state := _state(child)) is None or not state.hooks:
                _hook(module)
    return found


def _left(x: DTensor, region: ModuleFunction, gathered: bool) -> torch.Tensor:
    """This rank's shard of a parameter or buffer; its gradient is a summand, or whole along axes that are `same`."""
    spec = torch_private.spec_of(x)
    counted = _counted_same(spec, region.same) if x.requires_grad and torch.is_grad_enabled() else None
    # fully_shard adds up copies by itself, but with an operation on DTensors for each parameter.
    own = not gathered or any(placement.is_replicate() for placement in spec.placements)
    shard = leave_global(used(x) if own else x, counted)
    if not gathered:  # what it has gathered it writes anew
        region.shards.append((x, shard))
    return shard


@of_world(1024)
def _counted_same(spec: Any, same: tuple[Layout, ...]) -> tuple[Placement, ...]:
    """The placements by which a parameter's gradient is whole along these axes."""
    held = sharding_of_spec(spec)
    modes = Layout.of(sorted((mode for layout in same for mode in layout), key=lambda mode: -mode[1]))
    touched = [layout for layout in held.mesh.layouts if layout not in held.used and modes.overlaps(layout)]
    for layout in touched:
        if not modes.contains(layout):
            raise ShardingError(
                f"a parameter lies on {held.mesh!r}, and the region's inputs are the same along a part of "
                f"'{held.mesh.called(layout)}': put it on a mesh that has this part as an axis"
            )
    return counted_as_same(held.mesh, spec.placements, tuple(touched))


# --- modules inside: their hooks are reached by whoever calls them


_OUTSIDE = torch.compiler.disable(reason="parameters are put in place outside of a graph, which takes them as inputs")


def _is_entered(module: torch.nn.Module) -> bool:
    """Whether a module's shards are in place when it is called: the region around it has put them there, or, where a
    graph is traced, the call of the module that has begun it.
    """
    if isinstance(module, FSDPModule):
        return False
    return module._compiled_call_impl is None if torch.compiler.is_compiling() else bool(_stack.regions)


def _enter_inner(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _is_entered(module):
        _enter_called(module, args, kwargs)


@_OUTSIDE
def _enter_called(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a module of a region: what the region's start didn't find, or what a checkpoint runs once more."""
    state: _State = module.__dict__[_STATE]
    again = not _stack.regions and torch_private.backward_pass() >= 0 and _plain_tensors(args, kwargs)
    scope = contextlib.ExitStack()
    state.scopes.append(scope)  # before errors: _leave_called follows them
    if again:
        scope.enter_context(state.shared.lock)
    ran = ModuleFunction(module, module.forward, *state.shared.ran)
    if again and ran.mesh is not None:
        scope.enter_context(use_mesh(ran.mesh))
    if again or isinstance(module, FSDPModule):
        places: _Places = []
        scope.callback(_restore, places)
        _enter(module, _stack.regions[-1] if _stack.regions else ran, places)


def _leave_inner(module: torch.nn.Module, args: Any, result: Any) -> None:
    if not _is_entered(module):
        _leave_called(module)


@_OUTSIDE
def _leave_called(module: torch.nn.Module) -> None:
    state = _state(module)
    if state is not None and state.scopes:
        state.scopes.pop().close()
