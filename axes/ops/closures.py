"""Regions that use a tensor which isn't an argument.

A function that closes over a tensor gives this rank's summand of its gradient, where one device would give the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from axes.algebra.errors import ShardingError
from axes.ops.module_regions import ModuleFunction
from axes.runtime import torch_private
from axes.runtime.linear import border_of

Function = Callable[..., Any]


def check_closed(
    results: Sequence[torch.Tensor], expression: str, fn: Function | None = None, own: Sequence[torch.Tensor] = ()
) -> None:
    """Refuses results that depend on a leaf, or on what another region gave, by another way than an argument.

    Its gradient would be this rank's summand. The graph is walked back from the results to where the arguments came in,
    at each call, since what a function closes over may need a gradient from one call to the next; a node costs a third
    of a microsecond.
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
            raise _closed_over(None, expression, fn)
        nearer = node.next_functions
        if not nearer and (leaf := getattr(node, "variable", None)) is not None:
            if any(leaf is each for each in own):
                continue
            raise _closed_over(leaf, expression, fn)
        for below, _ in nearer:
            if below is not None and below not in seen:
                seen.add(below)
                ahead.append(below)


def _closed_over(leaf: torch.Tensor | None, expression: str, fn: Function | None) -> ShardingError:
    who, which = "function", "a result of another region" if leaf is None else f"{list(leaf.shape)} {leaf.dtype}"
    advice = (
        "pass it as an argument, with its spec on the left, as axes.from_local(x, spec, grad='summed') or "
        "axes.shard(x, spec); or use its detach(), also of what the function makes itself"
    )
    if isinstance(fn, ModuleFunction):
        who = "module"
        for name in [name for name, x in fn.module.named_parameters() if x is leaf]:
            which, spec = f"{name}, {which}", " ".join("ijklmnop"[: fn.module.get_parameter(name).ndim])
            advice = (
                "make its parameters DTensors before: "
                f"axes.shard_module(module, {{'{name}': '{spec}', ...}}, mesh=mesh)"
            )
    return ShardingError(
        f"the {who} uses a tensor that needs a gradient and isn't an argument: {which}; what came would be this rank's "
        f"summand of its gradient\n{advice}\n  in  shard_map '{expression}'"
    )
