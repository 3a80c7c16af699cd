"""What autograd is told of tensors that are written in place.

A graph keeps the version of each tensor that it saves, and backward refuses one that was written since. torch counts a
write for the tensor that it is given, for that tensor's base and for the views of it. It doesn't count what a
collective writes, and a write to the shard of a DTensor isn't one of the DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from axes.runtime import torch_private
from axes.runtime.transforms import PLAIN


def count_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Count a write of each tensor, and of the shard of each DTensor.

    >>> x = torch.ones(2, requires_grad=True)
    >>> y = (x * x).sum()
    >>> count_writes([x])
    >>> y.backward()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation...
    """
    written = []
    for x in tensors:
        written.append(x)
        if isinstance(x, DTensor):
            written.append(torch_private.local_of(x))
    torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])


def writable(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What an autograd function gives for `x`, which may be written in place unless it is a view of `x`.

    torch refuses to write to a view that a function has made, though nobody else has the buffer of which it is one.
    """
    if torch.compiler.is_compiling() or (type(result) not in PLAIN and not isinstance(result, torch_private.UnderWay)):
        return torch_private.untied(result)
    if type(result) in PLAIN and torch_private.has_base(result) and not torch_private.share_memory(result, x):
        return result.data
    return result
