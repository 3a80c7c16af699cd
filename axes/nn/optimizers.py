"""torch's optimizers, whose steps work on each rank's shards as plain tensors.

    optimizer = axes.nn.local_optimizer(torch.optim.AdamW, model.parameters(), lr=3e-4, fused=True)

An ordinary optimizer on DTensors sends each of its operations on each parameter through DTensor's
dispatch, tens of microseconds a time, and can't put parameters of two meshes in one list. AdamW computes
each element from that element's own history, so a rank may just as well step its shards by themselves:

| | is |
| --- | --- |
| `param_groups`, `state`, `state_dict()` | those of the ordinary optimizer: parameters and state are DTensors |
| during `step` | the same, with the local tensor of each DTensor in its place |
| after `step` | the state that was added is a DTensor, sharded as its parameter |

Nothing is copied: a DTensor's state and the plain tensor that the step changes share their memory. That
this gives what one device gives is a property of the optimizer, and it is tried (optimizer_trial.py) when it is made
and when its options become others.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError, shown
from axes.algebra.sizes import tuple_of
from axes.nn.local_gradients import local_tensor, settled_gradient
from axes.nn.optimizer_trial import kind_of_options, tensors_in, tried_state, without_hooks
from axes.runtime import torch_private
from axes.runtime.border import spec_around
from axes.runtime.transforms import check_dense

Parameters = Iterable[Any]
"""As torch's optimizers take them: tensors, pairs of a name and a tensor, or dicts of groups with options."""

State = dict[str, Any]

Dress = list[tuple[dict[str, Any], bool]]
"""Of each local tensor its attributes, and whether it needs a gradient."""

Kind = tuple[int, torch.dtype, tuple[Any, ...]]
"""What a trial depends on: the number of a parameter's dims, at least 1, its dtype, and the options of its group."""


def local_optimizer(optimizer: Any, parameters: Parameters, **options: Any) -> torch.optim.Optimizer:
    """An optimizer of this class whose steps work on local shards, without an operation on DTensors.

    optimizer: a class whose steps change each element by the history of this element alone: `SGD`, `Adam`,
        `AdamW`, `NAdam`, `RAdam`, `Adamax`, `Adadelta`, `Adagrad`, `RMSprop`, `Rprop`, `ASGD`, or another.
    parameters: as the class takes them: tensors, named tensors, or groups with options of their own. DTensors
        on any meshes, those of FSDP2 included, and plain tensors.
    options: as the class takes them: `lr`, `foreach`, `fused`, ...

    The result is an instance of the class. The state dict has the same keys and the same DTensors, so that
    `torch.distributed.checkpoint` saves and loads it as ever; schedulers, hooks, closures, `zero_grad` and
    `add_param_group` work. A gradient that is pending when the step begins is resolved first, and the
    parameters' memory is looked up at each step, since FSDP2 may replace it. A closure sees the DTensors, each time
    that the optimizer calls it. Results are bit for bit those
    of the same optimizer with the same options on one device, on the whole tensors, where torch rounds
    an element the same wherever it lies in memory: its CPU loops for 16 bits and for `fused=True` don't.

    Raises `ShardingError` for an optimizer that needs more than an element to step it (`Adafactor`, `Muon`,
    `LBFGS`, LAMB), for `differentiable=True`, and at a step for state that isn't sharded as its parameter. The first
    is tried with small tensors, nine steps and the options as they are: whether numbers are 0, not how large. A class
    that keeps parameters in its own attributes is refused, too: in a step, plain tensors are in `param_groups` and
    `state` alone.

    >>> import axes
    >>> with axes.simulate(4), axes.init_mesh("dp=2 tp=2"):
    ...     weight = axes.ones("d@dp f@tp", d=4, f=6, requires_grad=True)
    ...     optimizer = local_optimizer(torch.optim.AdamW, [weight], lr=0.5)
    ...     weight.grad = axes.ones("d@dp f@tp", d=4, f=6)
    ...     optimizer.step()
    ...     axes.spec_of(optimizer.state[weight]["exp_avg"])
    '_@dp _@tp'
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise ShardingError(
            f"axes.nn.local_optimizer takes a class of optimizers, such as torch.optim.AdamW; found {shown(optimizer)}"
        )
    made: Any = _on_shards(optimizer)
    if isinstance(parameters, torch.nn.Module):
        raise ShardingError("axes.nn.local_optimizer takes parameters; found a module, so pass its module.parameters()")
    for each in options.values():
        if isinstance(each, torch.Tensor):
            check_dense(each, "axes.nn.local_optimizer")
    return made(_checked_parameters(parameters), **options)


def _checked_parameters(parameters: Any) -> Any:
    """What an optimizer is made of; `ShardingError` for what holds neither tensors, named tensors nor groups."""
    if isinstance(parameters, torch.Tensor):
        check_dense(parameters, "axes.nn.local_optimizer")
        return parameters  # torch says that one tensor isn't several
    found = tuple_of(parameters)
    if found is None or not all(isinstance(each, torch.Tensor | dict) or _is_named(each) for each in found):
        raise ShardingError(
            "axes.nn.local_optimizer takes tensors, named tensors or dicts of groups, like module.parameters(); "
            f"found {shown(parameters)}"
        )
    return list(found)


def _is_named(each: object) -> bool:
    if not isinstance(each, tuple) or len(each) != 2:
        return False
    return isinstance(each[0], str) and isinstance(each[1], torch.Tensor)


@functools.lru_cache(maxsize=256)
def _on_shards(optimizer: Any) -> type[LocalSteps]:
    """The class of an optimizer whose steps work on shards."""
    own = {"ordinary": optimizer, "plain_steps": optimizer.__module__.startswith("torch.optim.")}
    return type(f"Local{optimizer.__name__}", (LocalSteps, optimizer), own)


class _Entered(NamedTuple):
    """What a step on shards has put aside: where it puts it back."""

    view: _View
    groups: list[dict[str, Any]]
    wholes: list[list[torch.Tensor]]
    state: defaultdict[torch.Tensor, State]
    gradients: list[torch.Tensor | None]
    versions: list[tuple[int, list[int]]]
    dressed: Dress | None


class LocalSteps(torch.optim.Optimizer):
    """What goes before a class of optimizers, the `ordinary` one, so that its steps see local tensors."""

    ordinary: ClassVar[type[torch.optim.Optimizer]]
    plain_steps: ClassVar[bool]
    """Whether steps look at nothing of a parameter but its values, as those of torch's own classes do."""
    param_groups: list[dict[str, Any]]
    state: defaultdict[torch.Tensor, State]

    def __init__(self, parameters: Parameters, **options: Any):
        self.options = options
        self.tried: dict[Kind, dict[str, bool]] = {}
        """By the kind of parameters their state, by name: is it one value for each element?"""
        self.kinds: dict[int, Kind] = {}
        """The kind of each parameter, by its id."""
        self.seen: list[list[Any]] = []
        self.view: _View | None = None
        self.entered: _Entered | None = None
        super().__init__(parameters, **options)
        self._check_attributes()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimizers do.

        Raises `ShardingError` where the optimizer, with the options of this group, needs more than an element.
        """
        if isinstance(param_group, dict) and "params" not in param_group:
            raise ShardingError(f"a group of parameters is a dict with 'params'; found {shown(param_group)}")
        if isinstance(param_group, dict) and not isinstance(param_group["params"], torch.Tensor | set):
            param_group["params"] = list(param_group["params"])
        super().add_param_group(param_group)
        try:
            self._try(self.param_groups[-1])
        except ShardingError:
            self.param_groups.pop()
            raise

    def _try(self, group: Mapping[str, Any]) -> None:
        """Try the optimizer with the options of a group, unless that has been done."""
        options = kind_of_options(group)
        for each in group["params"]:
            kind = self.kinds[id(each)] = (max(1, each.ndim), _tried_dtype(each.dtype), options)
            if kind not in self.tried:
                self.tried[kind] = tried_state(self.ordinary, self.options, group, *kind[:2])

    def _try_options(self) -> None:
        """The same for all groups, where any option is another object than at the last step."""
        values = [list(group.values()) for group in self.param_groups]
        if len(values) != len(self.seen) or not all(map(_are_same, values, self.seen)):
            for group in self.param_groups:
                self._try(group)
            self.seen = values

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step all parameters that have a gradient, as the ordinary class does, and give what that gives."""
        step = functools.partial(without_hooks(self.ordinary.step), self, **options)
        self._enter()
        try:
            return step() if closure is None else step(functools.partial(self._evaluated, closure))
        finally:
            self._leave()

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        """What a closure gives that a step calls: it has the DTensors meanwhile."""
        self._leave()
        try:
            return closure()
        finally:
            self._enter()

    def _enter(self) -> None:
        """Put local tensors in the place of the DTensors."""
        self._try_options()
        view = self.view
        if view is None or not view.is_of(self.param_groups, self.state):
            for group in self.param_groups:
                self._try(group)
            self._check_state()
            self._check_attributes()
            view = _View.of(self.param_groups, self.state)
        dressed = None if self.plain_steps else view.dress()
        try:
            gradients = view.take_gradients()
        except BaseException:
            for local in view.shards:
                local.grad = None
            if dressed is not None:
                view.undress(dressed)
            raise
        idle = [at for at, gradient in enumerate(gradients) if gradient is None]
        versions = [(at, [*map(torch_private.version_of, view.memory_of[at])]) for at in idle]
        groups = list(self.param_groups)
        wholes = [group["params"] for group in groups]
        self.view, self.entered = view, _Entered(view, groups, wholes, self.state, gradients, versions, dressed)
        for group, locals_ in zip(groups, view.locals, strict=True):
            group["params"] = locals_
        self.state = view.local_state

    def _leave(self) -> None:
        """Put the DTensors back, with the state that there is now; autograd is told what has changed."""
        entered, self.entered = self.entered, None
        if entered is None:
            return
        view, local_state = entered.view, self.state
        self.state = entered.state
        for group, parameters in zip(entered.groups, entered.wholes, strict=True):
            group["params"] = parameters
        view.give_gradients(entered.gradients)
        if entered.dressed is not None:
            view.undress(entered.dressed)
        torch.autograd.graph.increment_version(view.changed(entered.versions))
        if not view.local.is_still(local_state):
            self.view = None
            self._keep_all(view, local_state)
            self.view = view.with_state(self.state, local_state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's optimizers do. What is zeroed by one call of `foreach` is plain tensors alone, or DTensors."""
        if set_to_none:
            super().zero_grad()
            return
        groups = self.param_groups
        try:
            for sharded in (False, True):
                chosen = [[p for p in group["params"] if isinstance(p, DTensor) is sharded] for group in groups]
                self.param_groups = [{**group, "params": each} for group, each in zip(groups, chosen, strict=True)]
                super().zero_grad(set_to_none=False)
        finally:
            self.param_groups = groups

    def _keep_all(self, view: _View, local_state: Mapping[torch.Tensor, State]) -> None:
        """Put state that a step made or replaced to where it is kept; what it removed is removed there."""
        for parameter, local in zip(view.sharded, view.shards, strict=True):
            if local in local_state:
                self._keep(parameter, local_state[local])
            else:
                self.state.pop(parameter, None)
        known = {*view.shards, *view.plain}
        if foreign := [key for key in local_state if key not in known]:
            raise ShardingError(
                f"{self.ordinary.__name__} keeps state of {_said(foreign[0])}, which is none of the parameters that a "
                "step on shards has; use the optimizer itself on DTensors, or on whole tensors"
            )
        for parameter in view.plain:
            if parameter in local_state:
                self.state[parameter] = local_state[parameter]
            else:
                self.state.pop(parameter, None)

    def _check_state(self) -> None:
        """Raise `ShardingError` where state that was loaded, or put there, isn't sharded as its parameter."""
        for parameter, state in self.state.items():
            if isinstance(parameter, DTensor):
                state.update({key: self._checked(key, value, parameter) for key, value in state.items()})

    def _check_attributes(self) -> None:
        """Raise `ShardingError` where the optimizer has parameters in attributes: those are DTensors in a step, too."""
        ids = {id(each) for group in self.param_groups for each in group["params"] if isinstance(each, DTensor)}
        for name, value in vars(self).items():
            if name not in _OF_ALL and _holds_parameters(value, ids):
                raise ShardingError(
                    f"axes.nn.local_optimizer: {self.ordinary.__name__} keeps parameters, or other DTensors, in its "
                    f"attribute '{name}'. A step on shards has plain tensors in param_groups and state alone; keep "
                    "what belongs to a parameter in self.state or in its group, or use the optimizer itself on DTensors"
                )

    def _is_of_elements(self, key: str, parameter: DTensor) -> bool | None:
        """Whether state of this name is one value for each element; None where the trial has not seen it."""
        kind = self.kinds.get(id(parameter))
        return None if kind is None else self.tried[kind].get(key)

    def _checked(self, key: str, value: Any, parameter: DTensor) -> Any:
        if isinstance(value, DTensor):
            if torch_private.lie_alike(value, parameter):
                return value
            found = f"is {value.placements} on {value.device_mesh}"
        elif self._is_of_elements(key, parameter) and isinstance(value, torch.Tensor):
            if value.shape == parameter.shape and all(each.is_replicate() for each in parameter.placements):
                return _whole(value, parameter)  # torch loads state without dims as plain tensors
            found = f"is a plain tensor of shape {list(value.shape)}"
        else:
            return value
        raise ShardingError(
            f"state '{key}' of a parameter of shape {list(parameter.shape)} {found}; the parameter is "
            f"{parameter.placements} on {parameter.device_mesh}. Load state by "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which shards it"
        )

    def _keep(self, parameter: DTensor, state: State) -> None:
        """Make the state of a parameter, which is kept as DTensors, what a step has left."""
        kept = self.state[parameter]
        for key in [key for key in kept if key not in state]:
            del kept[key]
        locals_ = _local_values(kept)
        for key, value in state.items():
            if key not in locals_ or value is not locals_[key]:
                kept[key] = self._kept(key, value, parameter)

    def _kept(self, key: str, value: Any, parameter: DTensor) -> Any:
        """What the step left under a name: a DTensor where it is one value for each element of the parameter.

        The trial says which is; what comes later than its steps must have the shard's shape, or be one number.
        """
        of_elements, shape = self._is_of_elements(key, parameter), local_tensor(parameter).shape
        if isinstance(value, torch.Tensor) and value.shape == shape:
            return _whole(value, parameter) if of_elements or (of_elements is None and value.ndim) else value
        tensors = list(tensors_in(value))
        if of_elements or (of_elements is None and any(each.ndim and each.numel() != 1 for each in tensors)):
            found = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
            raise ShardingError(
                f"after a step, state '{key}' of a parameter of shape {list(parameter.shape)}, of which this rank has "
                f"{list(shape)}, is neither one value for each element nor one number: {found}. "
                f"{self.ordinary.__name__} can't step shards by itself; use it on DTensors, or on whole tensors"
            )
        return value

    def __setstate__(self, state: State) -> None:
        super().__setstate__(state)  # what `load_state_dict` calls as well
        self.view = self.entered = None

    def __getstate__(self) -> State:
        own = {"options": self.options, "tried": self.tried, "kinds": {}, "seen": []}
        return {**super().__getstate__(), **own}

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self.ordinary,), self.__getstate__()  # the class was made here, and has no name to import


def _blank(ordinary: Any) -> LocalSteps:
    made: Any = _on_shards(ordinary)
    return made.__new__(made)


def _whole(local: torch.Tensor, parameter: DTensor) -> DTensor:
    """The DTensor that has this shard, sharded as a parameter is."""
    spec, like = torch_private.spec_of(parameter), local_tensor(parameter)
    if local.dtype != spec.tensor_meta.dtype or local.stride() != like.stride():
        spec = spec_around(local, spec.mesh, spec.placements, tuple(spec.shape))
    return torch_private.dtensor(local, spec)


class _Values(NamedTuple):
    """State at some time, to be recognized by identity: the dicts, and what is in them."""

    dicts: list[State]
    names: list[str]
    values: list[Any]

    @classmethod
    def of(cls, state: Mapping[torch.Tensor, State]) -> _Values:
        """The state as it is."""
        dicts = list(state.values())
        return cls(dicts, list(chain.from_iterable(dicts)), list(chain.from_iterable(map(dict.values, dicts))))

    def is_still(self, state: Mapping[torch.Tensor, State]) -> bool:
        """Whether nobody has put anything else there."""
        dicts = list(state.values())
        if not _are_same(dicts, self.dicts) or list(chain.from_iterable(dicts)) != self.names:
            return False
        return _are_same(list(chain.from_iterable(map(dict.values, dicts))), self.values)


@dataclass(frozen=True, eq=False)
class _View:
    """The parameters and the state of an optimizer as a step found them, with local tensors in the place of DTensors.

    wholes: the parameters of each group. locals: the same, local. sharded: those that are DTensors. shards: their local
    tensors. plain: the others. kept: the state. local_state: the same, local; `local` is that before the step.
    state_of: the DTensors in the state of each of `sharded`. state_tensors: all of these. state_shards: their local
    tensors.
    """

    wholes: list[list[torch.Tensor]]
    locals: list[list[torch.Tensor]]
    sharded: list[DTensor]
    shards: list[torch.Tensor]
    plain: list[torch.Tensor]
    kept: _Values
    local_state: defaultdict[torch.Tensor, State]
    local: _Values
    state_of: list[list[DTensor]]
    state_tensors: list[DTensor]
    state_shards: list[torch.Tensor]

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Any]], state: Mapping[torch.Tensor, State]) -> _View:
        """The local tensors of what an optimizer has now. State that isn't there isn't there on either side."""
        wholes: list[list[torch.Tensor]] = [list(group["params"]) for group in groups]
        local: dict[torch.Tensor, torch.Tensor] = {each: local_tensor(each) for every in wholes for each in every}
        there = {each: state[each] for each in local if each in state}
        made = [(local[p], _local_values(of) if isinstance(p, DTensor) else of) for p, of in there.items()]
        local_state = defaultdict[torch.Tensor, State](dict, made)
        sharded = [each for each in local if isinstance(each, DTensor)]
        plain = [each for each in local if not isinstance(each, DTensor)]
        state_of = _dtensors(sharded, state)
        state_tensors = list(chain.from_iterable(state_of))
        return cls(
            wholes,
            [[local[each] for each in every] for every in wholes],
            sharded,
            [local[each] for each in sharded],
            plain,
            _Values.of(state),
            local_state,
            _Values.of(local_state),
            state_of,
            state_tensors,
            [*map(torch_private.local_of, state_tensors)],
        )

    def with_state(self, state: Mapping[torch.Tensor, State], local_state: defaultdict[torch.Tensor, State]) -> _View:
        """The same with state that a step has made, and that is kept now."""
        state_of = _dtensors(self.sharded, state)
        state_tensors = list(chain.from_iterable(state_of))
        return replace(
            self,
            kept=_Values.of(state),
            local_state=local_state,
            local=_Values.of(local_state),
            state_of=state_of,
            state_tensors=state_tensors,
            state_shards=[*map(torch_private.local_of, state_tensors)],
        )

    @cached_property
    def written(self) -> list[DTensor]:
        """What a step of all parameters changes, of which autograd would else not see that it was."""
        return [*self.sharded, *self.state_tensors]

    @cached_property
    def memory_of(self) -> list[list[torch.Tensor]]:
        """The local tensors of each parameter and its state."""
        return [[x, *map(torch_private.local_of, state)] for x, state in zip(self.shards, self.state_of, strict=True)]

    def changed(self, versions: Sequence[tuple[int, list[int]]]) -> list[DTensor]:
        """What a step has changed: all that had a gradient, and of the others what is of another version now."""
        if not versions:
            return self.written
        same = {at for at, before in versions if [*map(torch_private.version_of, self.memory_of[at])] == before}
        found = [[self.sharded[at], *state] for at, state in enumerate(self.state_of) if at not in same]
        return list(chain.from_iterable(found))

    def is_of(self, groups: Sequence[Mapping[str, Any]], state: Mapping[torch.Tensor, State]) -> bool:
        """Whether the optimizer has the same parameters and state, with the same memory."""
        return (
            len(groups) == len(self.wholes)
            and all(_are_same(group["params"], every) for group, every in zip(groups, self.wholes, strict=True))
            and _are_same([*map(torch_private.local_of, self.sharded)], self.shards)
            and _are_same([*map(torch_private.local_of, self.state_tensors)], self.state_shards)
            and self.kept.is_still(state)
        )

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Give the local tensors of parameters the local gradients, which are the result."""
        found = [*map(_local_gradient, self.sharded)]
        for at, (parameter, local) in enumerate(zip(self.sharded, self.shards, strict=True)):
            gradient = found[at]
            if gradient is None:
                whole = settled_gradient(parameter)
                if whole is None:
                    continue
                found[at] = gradient = local_tensor(whole)
            try:
                local.grad = gradient
            except RuntimeError:
                if gradient.dtype == local.grad_dtype:
                    raise
                local.grad_dtype = gradient.dtype  # torch else refuses a gradient of another dtype
                local.grad = gradient
        return found

    def dress(self) -> Dress:
        """Give the local tensors what else a step may ask of a parameter: attributes, and whether it is trained.

        The attributes are the parameter's own while the step lasts; the result is what the local tensors had.
        """
        before: Dress = []
        try:
            for parameter, local in zip(self.sharded, self.shards, strict=True):
                before.append((local.__dict__, local.requires_grad))
                local.__dict__ = parameter.__dict__
                local.requires_grad = parameter.requires_grad
        except BaseException:
            self.undress(before)
            raise
        return before

    def undress(self, before: Dress) -> None:
        """Make the local tensors again what they were before `dress`, as far as it has come."""
        for local, (attributes, requires_grad) in zip(self.shards, before, strict=False):
            local.__dict__ = attributes
            local.requires_grad = requires_grad

    def give_gradients(self, taken: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients from the local tensors again; a step may have removed or replaced them."""
        for parameter, local, before in zip(self.sharded, self.shards, taken, strict=True):
            gradient = local.grad
            if gradient is not before:
                parameter.grad = None if gradient is None else _whole(gradient, parameter)
            local.grad = None


def _dtensors(parameters: Sequence[DTensor], state: Mapping[torch.Tensor, State]) -> list[list[DTensor]]:
    """The DTensors in the state of each parameter."""
    return [[x for x in state.get(each, {}).values() if isinstance(x, DTensor)] for each in parameters]


def _local_values(named: State) -> State:
    """The same with the local tensor in the place of each DTensor."""
    return {
        name: torch_private.local_of(value) if isinstance(value, DTensor) else value for name, value in named.items()
    }


def _local_gradient(parameter: DTensor) -> torch.Tensor | None:
    """The local tensor of a parameter's gradient; None where there is none, or one that lies otherwise."""
    x = parameter.grad
    there = type(x) is DTensor and torch_private.lie_alike(x, parameter)
    local = torch_private.local_of(x) if there else None  # type: ignore[arg-type]
    return local if type(local) is torch.Tensor else None


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether both have the very same things, in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _tried_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype with which parameters of a dtype are tried: theirs, where torch draws and compares its values."""
    return dtype if (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1 else torch.float32


_OF_ALL = {*vars(torch.optim.SGD([torch.zeros(1)])), "options", "tried", "kinds", "seen", "view", "entered"}
"""The attributes of every optimizer, which aren't looked at for parameters."""


def _holds_parameters(value: Any, ids: set[int]) -> bool:
    """Whether a list, dict or set, however deep, has a DTensor, an optimizer of its own, or the id of a parameter."""
    if isinstance(value, DTensor | torch.optim.Optimizer):
        return True
    if isinstance(value, int) and not isinstance(value, bool):
        return value in ids
    if isinstance(value, Mapping):
        return any(_holds_parameters(each, ids) for each in chain(value.keys(), value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(_holds_parameters(each, ids) for each in value)
    return False


def _said(tensor: Any) -> str:
    return f"a tensor of shape {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else shown(tensor)
