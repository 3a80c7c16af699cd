"""`torch.autocast`: products are computed in its dtype, and whatever else an expression does in the tensors' own.

Autocast casts inside of torch's operations, by what a call turns out to be, and a shard may turn out otherwise than the
whole. So operands of a product are cast before, and what follows runs without autocast, on every rank alike. The casts
are differentiable: gradients come back in the dtype of the operand.

>>> with torch.autocast("cpu", torch.bfloat16):
...     of_factor(torch.ones(2))
torch.bfloat16
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from axes.algebra.expressions import Recipe

T = TypeVar("T", bound=torch.Tensor)


def of_factor(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a tensor is multiplied: float64, integers and complex numbers keep their own."""
    device = x.device.type
    if x.dtype is torch.float64 or not x.is_floating_point() or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def applied(found: Recipe, run: Callable[..., T], operands: Sequence[T], cast: Callable[[T, torch.dtype], T]) -> T:
    """`run(*operands)` where autocast may be on; of a function of the caller's it stays on."""
    if callable(found.op):
        return run(*operands)
    if found.kind == "einsum" and len(operands) > 1:
        operands = [cast(x, of_factor(x)) for x in operands]
    with torch.autocast(operands[0].device.type, enabled=False):
        return run(*operands)
