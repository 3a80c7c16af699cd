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
this gives what one device gives is a property of the optimizer, and it is tried when it is made: two
halves of a matrix that are stepped apart must come out as the matrix does.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError, shown
from axes.algebra.sizes import tuple_of
from axes.nn.local_gradients import local_tensor, settled_gradient
from axes.runtime import torch_private
from axes.runtime.sharded import strides_like
from axes.runtime.transforms import check_dense

Parameters = Iterable[Any]
"""As torch's optimizers take them: tensors, pairs of a name and a tensor, or dicts of groups with options."""

State = dict[str, Any]


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
    parameters' memory is looked up at each step, since FSDP2 may replace it. Results are bit for bit those
    of the same optimizer with the same options on one device, on the whole tensors, where torch rounds
    an element the same wherever it lies in memory: its CPU loops for 16 bits and for `fused=True` don't.

    Raises `ShardingError` for an optimizer that needs more than an element to step it (`Adafactor`, `Muon`,
    `LBFGS`, LAMB), for `differentiable=True`, and at a step for state that isn't sharded as its parameter.

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
    return type(f"Local{optimizer.__name__}", (LocalSteps, optimizer), {"ordinary": optimizer})


class LocalSteps(torch.optim.Optimizer):
    """What goes before a class of optimizers, the `ordinary` one, so that its steps see local tensors."""

    ordinary: ClassVar[type[torch.optim.Optimizer]]
    param_groups: list[dict[str, Any]]
    state: defaultdict[torch.Tensor, State]

    def __init__(self, parameters: Parameters, **options: Any):
        self.options = options
        self.elementwise: set[str] = set()
        self.tried: list[State] = []
        self.view: _View | None = None
        super().__init__(parameters, **options)

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
        options = {key: value for key, value in group.items() if key not in ("params", "param_names", "lr")}
        if not any(_same_options(options, other) for other in self.tried):
            self.elementwise |= elementwise_state(self.ordinary, self.options, group)
            self.tried.append(options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; give the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        view = self.view
        if view is None or not view.is_of(self.param_groups, self.state):
            self._check_state()
            view = _View.of(self.param_groups, self.state)
        wholes, kept = [group["params"] for group in self.param_groups], self.state
        try:
            view.take_gradients()
            for group, locals_ in zip(self.param_groups, view.locals, strict=True):
                group["params"] = locals_
            self.state = view.local_state
            _without_hooks(self.ordinary.step)(self)
        finally:
            self.state = kept
            for group, parameters in zip(self.param_groups, wholes, strict=True):
                group["params"] = parameters
            for local in view.shards:
                local.grad = None
            self.view = view
            if not view.local.is_still(view.local_state):
                self._keep_all(view)
                self.view = None
            torch.autograd.graph.increment_version(view.written)
        return loss

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

    def _keep_all(self, view: _View) -> None:
        """Put state that a step made or replaced to where it is kept; what it removed is removed there."""
        for parameter, local in zip(view.sharded, view.shards, strict=True):
            if local in view.local_state:
                self._keep(parameter, view.local_state[local])
            elif self.state.get(parameter):
                del self.state[parameter]
        for parameter in view.plain:
            if parameter in view.local_state:
                self.state[parameter] = view.local_state[parameter]
            elif self.state.get(parameter):
                del self.state[parameter]

    def _check_state(self) -> None:
        """Raise `ShardingError` where state that was loaded, or put there, isn't sharded as its parameter."""
        for parameter, state in self.state.items():
            if isinstance(parameter, DTensor):
                state.update({key: self._checked(key, value, parameter) for key, value in state.items()})

    def _checked(self, key: str, value: Any, parameter: DTensor) -> Any:
        if isinstance(value, DTensor):
            if torch_private.lie_alike(value, parameter):
                return value
            found = f"is {value.placements} on {value.device_mesh}"
        elif key in self.elementwise and isinstance(value, torch.Tensor):
            if value.shape == parameter.shape and all(each.is_replicate() for each in parameter.placements):
                return self._whole(key, value, parameter)  # torch loads state without dims as plain tensors
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
        locals_ = torch_private.local_values(kept)
        for key, value in state.items():
            if value is not locals_.get(key):
                kept[key] = self._whole(key, value, parameter)

    def _whole(self, key: str, value: Any, parameter: DTensor) -> Any:
        """What the step left under a name: a DTensor where it is one value for each element of the parameter."""
        if not isinstance(value, torch.Tensor):
            return value
        local = local_tensor(parameter)
        new = value.shape == local.shape and local.ndim > 0 and value.numel() != 1
        if key not in self.elementwise and not new:
            return value
        spec = torch_private.spec_of(parameter)
        if value.dtype != spec.tensor_meta.dtype or value.stride() != local.stride():
            shape = tuple(spec.shape)
            spec = torch_private.dtensor_spec(
                spec.mesh, spec.placements, shape, strides_like(value, shape), value.dtype
            )
        return torch_private.dtensor(value, spec)

    def __setstate__(self, state: State) -> None:
        super().__setstate__(state)  # what `load_state_dict` calls as well
        self.view = None

    def __getstate__(self) -> State:
        own = {"options": self.options, "elementwise": self.elementwise, "tried": self.tried}
        return {**super().__getstate__(), **own}

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self.ordinary,), self.__getstate__()  # the class was made here, and has no name to import


def _blank(ordinary: Any) -> LocalSteps:
    made: Any = _on_shards(ordinary)
    return made.__new__(made)


class _Values(NamedTuple):
    """State at some time, to be recognized by identity: the dicts that aren't empty, and what is in them."""

    dicts: list[State]
    names: list[str]
    values: list[Any]

    @classmethod
    def of(cls, state: Mapping[torch.Tensor, State]) -> _Values:
        """The state as it is."""
        dicts = list(filter(None, state.values()))
        return cls(dicts, list(chain.from_iterable(dicts)), list(chain.from_iterable(map(dict.values, dicts))))

    def is_still(self, state: Mapping[torch.Tensor, State]) -> bool:
        """Whether nobody has put anything else there."""
        dicts = list(filter(None, state.values()))
        if not _are_same(dicts, self.dicts) or list(chain.from_iterable(dicts)) != self.names:
            return False
        return _are_same(list(chain.from_iterable(map(dict.values, dicts))), self.values)


@dataclass(frozen=True, eq=False)
class _View:
    """The parameters and the state of an optimizer as a step found them, with local tensors in the place of DTensors.

    wholes: the parameters of each group. locals: the same, local. sharded: those that are DTensors. shards: their local
    tensors. plain: the others. kept: the state. local_state: the same, local; `local` is that before the step.
    state_tensors: the DTensors of the state. state_shards: their local tensors.
    """

    wholes: list[list[torch.Tensor]]
    locals: list[list[torch.Tensor]]
    sharded: list[DTensor]
    shards: list[torch.Tensor]
    plain: list[torch.Tensor]
    kept: _Values
    local_state: defaultdict[torch.Tensor, State]
    local: _Values
    state_tensors: list[DTensor]
    state_shards: list[torch.Tensor]

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Any]], state: Mapping[torch.Tensor, State]) -> _View:
        """The local tensors of what an optimizer has now. State that isn't there isn't there on either side."""
        wholes: list[list[torch.Tensor]] = [list(group["params"]) for group in groups]
        local: dict[torch.Tensor, torch.Tensor] = {each: local_tensor(each) for every in wholes for each in every}
        there = {each: state[each] for each in local if state.get(each)}
        made = [(local[p], torch_private.local_values(of) if isinstance(p, DTensor) else of) for p, of in there.items()]
        local_state = defaultdict[torch.Tensor, State](dict, made)
        sharded = [each for each in local if isinstance(each, DTensor)]
        plain = [each for each in local if not isinstance(each, DTensor)]
        state_tensors = [x for of in there.values() for x in of.values() if isinstance(x, DTensor)]
        return cls(
            wholes,
            [[local[each] for each in every] for every in wholes],
            sharded,
            [local[each] for each in sharded],
            plain,
            _Values.of(state),
            local_state,
            _Values.of(local_state),
            state_tensors,
            torch_private.locals_of(state_tensors),
        )

    @cached_property
    def written(self) -> list[DTensor]:
        """What a step changes, of which autograd would else not see that it was."""
        return [*self.sharded, *self.state_tensors]

    def is_of(self, groups: Sequence[Mapping[str, Any]], state: Mapping[torch.Tensor, State]) -> bool:
        """Whether the optimizer has the same parameters and state, with the same memory."""
        return (
            len(groups) == len(self.wholes)
            and all(_are_same(group["params"], every) for group, every in zip(groups, self.wholes, strict=True))
            and _are_same(torch_private.locals_of(self.sharded), self.shards)
            and _are_same(torch_private.locals_of(self.state_tensors), self.state_shards)
            and self.kept.is_still(state)
        )

    def take_gradients(self) -> None:
        """Give the local tensors of parameters the local gradients."""
        found = torch_private.local_gradients(self.sharded)
        for parameter, local, gradient in zip(self.sharded, self.shards, found, strict=True):
            if gradient is None:
                whole = settled_gradient(parameter)
                if whole is None:
                    continue
                gradient = local_tensor(whole)
            try:
                local.grad = gradient
            except RuntimeError:
                if gradient.dtype == local.grad_dtype:
                    raise
                local.grad_dtype = gradient.dtype  # torch else refuses a gradient of another dtype
                local.grad = gradient


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether both have the very same things, in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step of a class before torch put hooks around it, which run around the step on shards already."""
    while getattr(step, "hooked", False):
        step = cast("Any", step).__wrapped__
    return step


def _same_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(repr(value) == repr(other[key]) for key, value in one.items())


# --- does an optimizer step each element by itself?

_ROWS, _COLUMNS, _STEPS = 6, 4, 3
_TRIED_RATE = 0.5
"""The learning rate of the trial: an optimizer that starts with 0 would hide what it does."""


def elementwise_state(
    optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any], group: Mapping[str, Any]
) -> set[str]:
    """The names of the state that an optimizer has for each element, found by stepping a small matrix.

    The matrix is stepped whole, in two halves by rows, and in two halves by columns. `group` is a group of
    parameters with its options.

    Raises `ShardingError` where the halves don't come out as the whole does.
    """
    if group.get("differentiable"):
        raise ShardingError(
            "axes.nn.local_optimizer: differentiable=True needs steps that autograd sees, and steps on shards are "
            f"hidden from it; use torch.optim.{optimizer.__name__} itself"
        )
    device = next((local_tensor(each).device for each in group["params"] if not each.is_meta), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(1 + _STEPS, _ROWS, _COLUMNS, generator=generator, device="cpu").to(device)
    stepped = functools.partial(_stepped, optimizer, options, group)
    try:
        expected, state = stepped(whole)
        halves = {dim: [stepped(half) for half in whole.chunk(2, dim)] for dim in (1, 2)}
    except Exception as error:
        raise _whole_matrices(optimizer, f"a step of a matrix raises {type(error).__name__}: {error}") from error
    shaped = {key for key, value in state.items() if _shape(value) == expected.shape}
    for dim, parts in halves.items():
        values, states = zip(*parts, strict=True)
        if not _close(torch.cat(values, dim - 1), expected):
            raise _whole_matrices(optimizer, "two halves of a matrix that are stepped apart don't step as the matrix")
        for key, value in state.items():
            found = [each.get(key) for each in states]
            together = torch.cat(found, dim - 1) if key in shaped else found[0]
            if not _close(together, value) or (key not in shaped and not _close(found[1], value)):
                raise _whole_matrices(optimizer, f"its state '{key}' isn't one value for each element, nor for all")
    return shaped


def _stepped(
    optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any], group: Mapping[str, Any], values: torch.Tensor
) -> tuple[torch.Tensor, State]:
    """A parameter and its state after steps: `values` are its first values, and its gradients."""
    parameter = torch.nn.Parameter(values[0].clone())
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    rate = {"lr": _TRIED_RATE} if "lr" in own else {}
    tried = optimizer([{**own, **rate, "params": [parameter]}], **{**options, **rate})  # type: ignore[call-arg]
    for gradient in values[1:]:
        parameter.grad = gradient.clone()
        tried.step()
    if any(key is not parameter for key in tried.state):
        raise ShardingError("it keeps state that belongs to no parameter")
    return parameter.detach(), dict(tried.state[parameter])


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, torch.Tensor) else None


def _close(found: Any, expected: Any) -> bool:
    """Whether two values of state are the same up to rounding."""
    if isinstance(expected, torch.Tensor):
        return _shape(found) == expected.shape and torch.allclose(found, expected, 1e-4, 1e-6, equal_nan=True)
    return type(found) is type(expected) and not isinstance(expected, dict | list | tuple) and found == expected


def _whole_matrices(optimizer: type[torch.optim.Optimizer], reason: str) -> ShardingError:
    return ShardingError(
        f"axes.nn.local_optimizer: {optimizer.__name__} doesn't step each element by its own history: {reason}. "
        f"Steps on shards would differ from one device; use the optimizer itself on DTensors, or on whole tensors"
    )
