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

Nothing is copied: a DTensor's state and the plain tensor that the step changes share their memory.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import optim
from torch.distributed.tensor import DTensor

from axes import ShardingError
from axes.extension import dense, dtensor, shown
from axes.extension import local as local_tensor
from axes.nn.clip_grad_norm import settled_gradient

Parameters = Iterable[Any]
"""As torch's optimizers take them: tensors, pairs of a name and a tensor, or dicts of groups with options."""

State = dict[str, Any]

ELEMENTWISE = frozenset(
    {
        *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
        *(optim.Adadelta, optim.Adagrad, optim.RMSprop, optim.Rprop, optim.ASGD),
    }
)
"""The optimizers of torch that compute each element from the history of that element alone."""

_NUMBERS = frozenset({"step", "mu", "eta", "mu_product"})
"""State of these that is one number for a whole parameter, also where the parameter has no dims."""


def local_optimizer(
    optimizer: Any, parameters: Parameters, elementwise: bool | None = None, **options: Any
) -> optim.Optimizer:
    """Make an optimizer that steps on local shards, without operations on DTensors.

    The result is an instance of the class. Its state dict has the same keys and DTensors, so
    `torch.distributed.checkpoint` saves and loads it. Schedulers, hooks, closures, `zero_grad` and `add_param_group`
    work. A pending gradient is reduced first. A closure is called once, before the step.

    Results are bit for bit those of the same optimizer on one device, where torch rounds an element the same
    wherever it is in memory. torch's CPU loops for 16 bits and for `fused=True` don't.

    Args:
        optimizer: torch's `SGD`, `Adam`, `AdamW`, `NAdam`, `RAdam`, `Adamax`, `Adadelta`, `Adagrad`, `RMSprop`,
            `Rprop` or `ASGD`; or another class with `elementwise=True`.
        parameters: Tensors, named tensors, or groups with options, as the class takes them. DTensors on any meshes,
            those of FSDP2 included, and plain tensors.
        elementwise: Says of another class that a step computes each element of a parameter and of its state from
            this element alone, and that it finds parameters in `param_groups` and their state in `state`. LAMB,
            which takes a norm of a parameter, isn't elementwise.
        **options: Options of the class: `lr`, `foreach`, `fused`, ...

    Returns:
        The optimizer.

    Raises:
        ShardingError: The class isn't known to be elementwise, `differentiable=True`, an option has a value for each
            element, or at a step the state isn't sharded as its parameter.

    Examples:
        >>> import axes
        >>> with axes.simulate(4), axes.init_mesh("dp=2 tp=2"):
        ...     weight = axes.ones("d@dp f@tp", d=4, f=6, requires_grad=True)
        ...     optimizer = local_optimizer(torch.optim.AdamW, [weight], lr=0.5)
        ...     weight.grad = axes.ones("d@dp f@tp", d=4, f=6)
        ...     optimizer.step()
        ...     axes.spec_of(optimizer.state[weight]["exp_avg"])
        '_@dp _@tp'
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, optim.Optimizer)):
        raise ShardingError(
            f"axes.nn.local_optimizer takes a class of optimizers, such as torch.optim.AdamW; found {shown(optimizer)}"
        )
    if not (optimizer in ELEMENTWISE if elementwise is None else elementwise is True):
        said = "isn't known to step" if elementwise is None else f"is said, by elementwise={elementwise}, not to step"
        raise ShardingError(
            f"axes.nn.local_optimizer: {optimizer.__name__} {said} each element by its own history. Where "
            "it does, pass elementwise=True; where a step needs more than an element, as a norm, use the optimizer "
            "itself on DTensors, or on whole tensors"
        )
    if isinstance(parameters, torch.nn.Module):
        raise ShardingError("axes.nn.local_optimizer takes parameters; found a module, so pass its module.parameters()")
    _check_options(options)
    made: Any = _on_shards(optimizer)
    return made(parameters, **options)  # type: ignore[no-any-return]


def _check_options(options: Mapping[str, Any]) -> None:
    """`ShardingError` for options with which a rank can't step its shards by themselves."""
    for key, value in options.items():
        if key != "params" and isinstance(value, torch.Tensor):
            dense("axes.nn.local_optimizer", value)
            if value.numel() > 1 or isinstance(value, DTensor):
                raise ShardingError(
                    f"axes.nn.local_optimizer: the option '{key}' is {shown(value)}; steps on shards take one number, "
                    "not one for each element and no DTensor. Use the optimizer itself on DTensors, or on whole tensors"
                )
    if options.get("differentiable"):
        raise ShardingError(
            "axes.nn.local_optimizer: differentiable=True needs steps that autograd sees, and steps on shards are "
            "hidden from it; use the optimizer itself"
        )


@functools.lru_cache(maxsize=256)
def _on_shards(optimizer: Any) -> type[LocalSteps]:
    """The class of an optimizer whose steps work on shards."""
    return type(f"Local{optimizer.__name__}", (LocalSteps, optimizer), {"ordinary": optimizer})


class LocalSteps(optim.Optimizer):
    """What goes before a class of optimizers, the `ordinary` one, so that its steps see local tensors."""

    ordinary: ClassVar[type[optim.Optimizer]]
    param_groups: list[dict[str, Any]]
    state: defaultdict[torch.Tensor, State]

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step all parameters that have a gradient, as the ordinary class does, and give what that gives."""
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            options["closure"] = lambda: loss
        groups, kept = list(self.param_groups), self.state
        for group in groups:
            _check_options(group)
        wholes = [group["params"] for group in groups]
        local = {p: local_tensor(p) for every in wholes for p in every}
        sharded = [p for p in local if isinstance(p, DTensor)]
        gradients = [settled_gradient(p) for p in sharded]
        state = {local[p]: _local_state(p, kept[p]) if isinstance(p, DTensor) else kept[p] for p in local if p in kept}
        given = [_given(local[p], gradient) for p, gradient in zip(sharded, gradients, strict=True)]
        self.state = defaultdict(dict, state)
        for group, every in zip(groups, wholes, strict=True):
            group["params"] = [local[p] for p in every]
        step: Any = self.ordinary.step
        while getattr(step, "hooked", False):  # the hooks of this optimizer run around this method
            step = step.__wrapped__
        try:
            return step(self, **options)
        finally:
            made, self.state = self.state, kept
            for group, every in zip(groups, wholes, strict=True):
                group["params"] = every
            for p, gradient in zip(sharded, given, strict=True):
                x, local[p].grad = local[p].grad, None
                if x is not gradient:
                    p.grad = None if x is None else dtensor(x, p)
            # torch's fused steps count no version of what they write.
            steps, is_known = zip(sharded, given, strict=True), self.ordinary in ELEMENTWISE
            changed = [p for p, gradient in steps if gradient is not None or not is_known]
            states = [value for p in changed for value in kept.get(p, {}).values() if isinstance(value, DTensor)]
            torch.autograd.graph.increment_version([*changed, *states])
            self._keep(local, made)

    def _keep(self, local: Mapping[torch.Tensor, torch.Tensor], made: Mapping[torch.Tensor, State]) -> None:
        """Put the state that a step has left, by local tensors, to where it is kept."""
        for p, x in local.items():
            if x not in made:
                self.state.pop(p, None)
            else:
                before = self.state.get(p, {})
                self.state[p] = _whole_state(self.ordinary, p, made[x], before) if isinstance(p, DTensor) else made[x]
        known = set(local.values())
        if foreign := [key for key in made if key not in known]:
            raise ShardingError(
                f"{self.ordinary.__name__} keeps state of {shown(foreign[0])}, which is none of the parameters that a "
                "step on shards has; use the optimizer itself on DTensors, or on whole tensors"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self.ordinary,), self.__getstate__()  # the class was made here, and has no name to import


def _blank(ordinary: Any) -> LocalSteps:
    made: Any = _on_shards(ordinary)
    return made.__new__(made)


def _given(local: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The local gradient that a local tensor has during the step."""
    if gradient is not None:
        gradient = local_tensor(gradient)
        if local.grad_dtype not in (None, gradient.dtype):
            local.grad_dtype = gradient.dtype  # torch else refuses a gradient of another dtype
        local.grad = gradient
    return gradient


def _local_state(parameter: DTensor, state: State) -> State:
    """The state of a parameter with local tensors; `ShardingError` where it isn't sharded as the parameter."""
    found = {}
    for key, value in state.items():
        if isinstance(value, DTensor):
            same = value.placements == parameter.placements and value.device_mesh == parameter.device_mesh
            said = "" if same else f"{value.placements} on {value.device_mesh}"
        else:
            many = isinstance(value, torch.Tensor) and value.numel() > 1
            said = f"a plain tensor of shape {list(value.shape)}" if many else ""
        if said:
            raise ShardingError(
                f"state '{key}' of a parameter of shape {list(parameter.shape)} is {said}; the parameter is "
                f"{parameter.placements} on {parameter.device_mesh}. Load state by "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which shards it"
            )
        found[key] = local_tensor(value) if isinstance(value, torch.Tensor) else value
    return found


def _whole_state(optimizer: type[optim.Optimizer], parameter: DTensor, made: State, before: State) -> State:
    """What a step has left of the state of a parameter, with DTensors for what has a value for each element."""
    shape, found = local_tensor(parameter).shape, {}
    numbers = _NUMBERS if optimizer in ELEMENTWISE else ()
    for key, value in made.items():
        old = before.get(key)
        if isinstance(old, DTensor) and local_tensor(old) is value:
            found[key] = old
        else:
            is_whole = isinstance(value, torch.Tensor) and value.shape == shape and key not in numbers
            if isinstance(value, torch.Tensor) and not is_whole and value.ndim and key not in numbers:
                raise ShardingError(
                    f"the step of {optimizer.__name__} keeps state '{key}' of a parameter of shape "
                    f"{list(parameter.shape)} that is neither a value of each element nor a number; use the optimizer "
                    "itself on DTensors, or on whole tensors"
                )
            found[key] = dtensor(value, parameter) if is_whole else value
    return found
