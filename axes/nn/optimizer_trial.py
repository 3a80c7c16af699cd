"""Does an optimizer step each element by the history of this element alone? It is tried.

Small tensors with as many dims as the parameters, and of their dtype, are stepped whole, and in two halves along each
dim. Where the halves don't come out as the whole does, steps on shards would differ from one device. The gradients of
the trial are of usual size, zero but in one place, large, and at last infinite, or no number, in one place, so that
clipping by a norm and skipped steps are seen. What an optimizer does from its tenth step on, beyond a size, or
for numbers of its options that aren't those of the trial, isn't seen.

    names = tried_state(torch.optim.AdamW, {"lr": 0.1}, group, 2, torch.float32)    # {"step": False, "exp_avg": True}
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch

from axes.algebra.errors import ShardingError, shown
from axes.nn.local_gradients import local_tensor

_SCALES = (1.0, 1.0, 0.0, 1e3, 1.0, 1.0, 1.0, 1.0, math.inf)
"""Of the gradient of each step. Of 0 one element isn't 0, of infinity and NaN one element is that."""

_SMALL = (1.0, 0.0, 1.0, math.nan)
"""The same for a small tensor."""

_ROUNDING = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far whole and halves may be apart, relatively, in a narrow dtype; torch's loops round some elements otherwise."""

_LONG = (1.0, 1.0)
"""The same for a large matrix."""

_LARGE = (256, 128)
"""Optimizers that factor matrices leave small ones alone; 128 is the usual least size."""

_RATE = 0.5
"""The learning rate of the trial: an optimizer that starts with 0 would hide what it does."""


def tried_state(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    ndim: int,
    dtype: torch.dtype,
) -> dict[str, bool]:
    """The state that an optimizer has for a parameter, by name: whether it is one value for each element.

    options: those that the optimizer was made with. group: a group of parameters, with its options. ndim: the number
    of dims of the parameters, at least 1. dtype: theirs.

    Raises `ShardingError` where an element's step needs more than this element.
    """
    if group.get("differentiable"):
        raise ShardingError(
            "axes.nn.local_optimizer: differentiable=True needs steps that autograd sees, and steps on shards are "
            f"hidden from it; use torch.optim.{optimizer.__name__} itself"
        )
    for key, value in group.items():
        if key not in ("params", "param_names") and any(each.numel() > 1 for each in tensors_in(value)):
            raise ShardingError(
                f"axes.nn.local_optimizer: the option '{key}' is {shown(value)}; steps on shards take one number, not "
                "one for each element. Use the optimizer itself on DTensors, or on whole tensors"
            )
    device = next((local_tensor(each).device for each in group["params"] if not each.is_meta), torch.device("cpu"))
    trial = _Trial(optimizer, options, group, device, dtype)
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        found = trial.of((6, 4, 2, 4, 2, 2, 2, 2)[:ndim] if ndim > 1 else (40,), _SCALES)
        trial.of((2, 2, 2, 2, 2, 2, 2, 2)[:ndim], _SMALL, found)  # halves of which have a dim of size 1
        if ndim == 2:
            trial.of(_LARGE, _LONG, found)
    return found


def kind_of_options(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a group's options a trial depends on: flags, names and which numbers are 0, without the learning rate.

    >>> kind_of_options({"params": [], "lr": 0.1, "betas": (0.9, 0.0), "amsgrad": False})
    (('amsgrad', 'False'), ('betas', ('a number', '0')))
    """
    options = sorted((key, value) for key, value in group.items() if key not in ("params", "param_names", "lr"))
    return tuple((key, _kind(value)) for key, value in options)


def _kind(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if isinstance(value, float | int) and not isinstance(value, bool):
        return "a number" if value else "0"
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


class _Trial:
    """Steps of an optimizer with the options of a group."""

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        group: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.optimizer, self.device, self.dtype = optimizer, device, dtype
        own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        rate = {"lr": _RATE} if "lr" in own else {}
        self.own, self.options = {**own, **rate}, {**options, **rate}

    def of(
        self, shape: tuple[int, ...], scales: tuple[float, ...], known: Mapping[str, bool] = MappingProxyType({})
    ) -> dict[str, bool]:
        """The names of the state of a tensor of this shape, and which of it is one value for each element.

        known: that, as far as another shape has told it already.
        """
        generator = torch.Generator().manual_seed(0)
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        values = torch.randn(1 + len(scales), *shape, generator=generator, device="cpu", dtype=wide)
        for gradient, scale in zip(values[1:], scales, strict=True):
            last = gradient.flatten()[-1].clone()
            if math.isfinite(scale):
                gradient.mul_(scale)
            if not scale or not math.isfinite(scale):
                gradient.view(-1)[-1] = scale or last
        values = values.to(self.device, self.dtype)
        what = "a vector" if len(shape) == 1 else "a matrix" if len(shape) == 2 else f"a tensor of {len(shape)} dims"
        try:
            expected, state = self._stepped(values)
            halves = [[self._stepped(half) for half in values.chunk(2, 1 + dim)] for dim in range(len(shape))]
        except ShardingError as error:
            raise self._refusal(str(error)) from None
        except Exception as error:
            raise ShardingError(
                f"axes.nn.local_optimizer tries steps of {what} by {self.optimizer.__name__} without a closure, and "
                f"one raises {type(error).__name__}: {error}. One that can't step shards so works on DTensors, or on "
                "whole tensors"
            ) from error
        of_elements = {key: _shape(value) == expected.shape for key, value in state.items()} | dict(known)
        sane = values[1:].isfinite().all(0)  # of others the loops of torch's kernels and their ends make other numbers
        for dim, parts in enumerate(halves):
            parameters, states = zip(*parts, strict=True)
            if not self._close(torch.cat(parameters, dim)[sane], expected[sane]):
                raise self._refusal(f"two halves of {what} that are stepped apart don't step as the whole")
            for key, value in state.items():
                found = [each.get(key) for each in states]
                if of_elements[key] and _are_of(found, value) and value.shape == expected.shape:
                    found, value = [torch.cat(found, dim)[sane]], value[sane]
                if not all(self._close(each, value) for each in found):
                    raise self._refusal(f"its state '{key}' isn't one value for each element, nor for all")
        return of_elements

    def _stepped(self, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """A parameter and its state after steps: `values` are its first values, and its gradients."""
        parameter = torch.nn.Parameter(values[0].clone())
        own, options = copy.deepcopy((self.own, self.options))
        tried: Any = self.optimizer([{**own, "params": [parameter]}], **options)
        step = functools.partial(without_hooks(type(tried).step), tried)
        for gradient in values[1:]:
            parameter.grad = gradient.clone()
            step()
        if any(key is not parameter for key in tried.state):
            raise ShardingError("it keeps state that belongs to no parameter")
        if any(_holds_tensors(value) for key, value in tried.param_groups[0].items() if key not in {*own, "params"}):
            raise ShardingError("it keeps tensors among the options of a group")
        state = tried.state[parameter]
        if not isinstance(state, dict):
            raise ShardingError(f"its state of a parameter is no dict; found {type(state).__name__}")
        return parameter.detach(), dict(state)

    def _close(self, found: Any, expected: Any) -> bool:
        """Whether two values of state are the same up to rounding."""
        if isinstance(expected, torch.Tensor):
            if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (expected.shape, expected.dtype):
                return False
            if not expected.is_floating_point() and not expected.is_complex():
                return torch.equal(found, expected)
            finite = expected[expected.isfinite()]
            largest = float(finite.abs().amax()) if finite.numel() else 0.0
            rounding = _ROUNDING.get(self.dtype, 1e-4)
            return torch.allclose(found, expected, rounding, 1e-2 * rounding * (1 + largest), equal_nan=True)
        return type(found) is type(expected) and not isinstance(expected, dict | list | tuple) and found == expected

    def _refusal(self, reason: str) -> ShardingError:
        return ShardingError(
            f"axes.nn.local_optimizer: {self.optimizer.__name__} doesn't step each element by its own history: "
            f"{reason} (in {str(self.dtype).removeprefix('torch.')}). Steps on shards would differ from one device; "
            "use the optimizer itself on whole tensors, or on DTensors where torch has all that it does: in 2.13 that "
            "isn't so of Adafactor"
        )


def _holds_tensors(value: Any) -> bool:
    """Whether anything in it is a tensor that has dims."""
    return any(each.ndim > 0 for each in tensors_in(value))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a value, of a list, or of a dict, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, torch.Tensor) else None


def _are_of(found: list[Any], value: Any) -> bool:
    """Whether all are tensors with as many dims as the state of the whole."""
    return all(isinstance(each, torch.Tensor) and each.ndim == value.ndim for each in found)


def without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step of a class before torch put hooks around it."""
    while getattr(step, "hooked", False):
        step = cast("Any", step).__wrapped__
    return step
