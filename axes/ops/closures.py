"""Regions that use a tensor which isn't an argument: what it is, and how it should be passed.

A function that closes over a tensor gives this rank's summand of its gradient, where one device would give the whole.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError
from axes.ops.module_regions import ModuleFunction
from axes.ops.regions import read_region
from axes.runtime import torch_private
from axes.runtime.linear import border_of

Function = Callable[..., Any]


def check_closed(
    results: Sequence[torch.Tensor], expression: str, fn: Function | None = None, own: Sequence[torch.Tensor] = ()
) -> None:
    """Refuses results that depend on a leaf, or on what another region gave, by another way than an argument.

    Its gradient would be this rank's summand. The graph is walked back from the results to where the
    arguments came in; each node costs a third of a microsecond.
    """
    if not torch.is_grad_enabled():
        return
    needing = [x for x in results if x.requires_grad]
    for x in needing:
        if x.grad_fn is None:
            raise _closed_over(x, expression, fn)
    ahead = [x.grad_fn for x in needing]
    seen = set(ahead)
    to_local = torch_private.TO_LOCAL
    while ahead:
        node = ahead.pop()
        border = border_of(node)
        if border == "argument" or (type(node) is to_local and torch_private.says_its_gradient(node)):
            continue
        if border == "result":
            raise ShardingError(
                "the function uses a result of another region that needs a gradient and isn't an argument; what came "
                "would be this rank's summand of its gradient\npass it as an argument, with its spec on the left; or "
                f"use its detach()\n  in  shard_map '{expression}'"
            )
        nearer = node.next_functions
        if not nearer and (leaf := getattr(node, "variable", None)) is not None:
            if any(leaf is each for each in own):
                continue
            raise _closed_over(leaf, expression, fn)
        for below, _ in nearer:
            if below is not None and below not in seen:
                seen.add(below)
                ahead.append(below)


def _closed_over(leaf: torch.Tensor, expression: str, fn: Function | None) -> ShardingError:
    left, _, right = expression.partition("->")
    taken = {factor.name for spec in read_region(expression).inputs for dim in spec.dims for factor in dim.factors}
    taken |= {factor.name for spec in read_region(expression).outputs for dim in spec.dims for factor in dim.factors}
    spec = " ".join([letter for letter in "ijklmnopqrstuvwxyzabcdefgh" if letter not in taken][: leaf.ndim])
    name = _name_in(fn, leaf)
    passing = f"{left.strip()}, {spec} -> {right.strip()}" if left.strip() else f"{spec} -> {right.strip()}"
    which, with_spec = f"{list(leaf.shape)} {leaf.dtype}", f"with its spec on the left: '{passing}'"
    if name is None:
        which = f"one of {which}, under no name that is seen from here"
        advice = (
            f"if the function makes it, leave out requires_grad=True, or detach the result; else pass it, {with_spec}"
        )
    elif isinstance(fn, ModuleFunction):
        advice = (
            f"make its parameters DTensors before: axes.shard_module(module, {{'{name}': '{spec}', ...}}, mesh=mesh)"
        )
    else:
        made = f', axes.from_local({name}, "{spec}", grad="summed") or axes.shard({name}, "{spec}")'
        made = "" if isinstance(leaf, DTensor) else made
        advice = f"pass it as an argument{made}, {with_spec}; or use {name}.detach()"
    which = which if name is None else f"{name}, {which}"
    who = "module" if isinstance(fn, ModuleFunction) else "function"
    return ShardingError(
        f"the {who} uses a tensor that needs a gradient and isn't an argument: {which}; what came would be this rank's "
        f"summand of its gradient\n{advice}\n  in  shard_map '{expression}'"
    )


def _name_in(fn: Function | None, leaf: torch.Tensor) -> str | None:
    """What the function calls a tensor that it closes over; None if it makes the tensor, or reaches it another way."""
    if isinstance(fn, ModuleFunction):
        fn = fn.module
    known = [("", fn), ("", getattr(fn, "__self__", None))]
    fn = getattr(fn, "__func__", fn)
    if isinstance(fn, types.FunctionType):
        names, cells = fn.__code__.co_freevars, fn.__closure__ or ()
        known += [(name, cell.cell_contents) for name, cell in zip(names, cells, strict=True)]
        known += [(name, fn.__globals__.get(name)) for name in fn.__code__.co_names]
    for name, value in known:
        if value is leaf:
            return name
        if isinstance(value, torch.nn.Module):
            for inner, parameter in value.named_parameters(prefix=name):
                if parameter is leaf:
                    return inner
    return None
