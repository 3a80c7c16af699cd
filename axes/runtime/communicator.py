"""The four collectives of one group, eager or as nodes of a graph, for tensors of any dtype.

    gather = communicator(group, torch.float32, True).all_gather
    whole = gather(part, (4 * n,))

Tensors are contiguous, results are new. What an element is doesn't matter to what is moved, so a dtype that a backend
doesn't know goes as integers of the same width. It is reduced in a wider dtype, complex numbers as pairs; and the
maximum of floats is that of integers in the same order, so that a NaN wins on every backend, as in torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from axes.algebra.errors import ShardingError
from axes.runtime import torch_private
from axes.runtime.groups import of_world

Shape = tuple[int, ...]

Counts = Sequence[int] | None
"""Elements for or from each rank of a group; None where all are equal."""

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}

REDUCED = _FLOATS | {torch.int8, torch.uint8, torch.int32, torch.int64}
"""The dtypes that every backend reduces; complex ones are summed as pairs. It moves them, and bool."""

_WIDER = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
"""In which dtype others are reduced."""

_CARRIER = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""What carries the bytes of an element of so many bytes; nothing is computed in it."""

_SUMS_OVERFLOW = (torch.float16, torch.complex32)
"""Dtypes in which the sum of a mean may be infinite where the mean isn't: summands are divided before."""

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def moved(
    by: str, x: int, dtype: torch.dtype, op: str, size: int, rank: int, receives: Counts = None, sends: Counts = None
) -> list[int]:
    """How many bytes a rank of a group of `size` receives and sends at least by a collective of `x` elements."""
    each = dtype.itemsize
    if by in ("all_reduce", "reduce_scatter"):
        wide = _WIDER.get(dtype, dtype).itemsize
        each = max(4, wide) if dtype.is_floating_point and op in ("max", "min") else wide
    even = x * each * {"all_gather": size, "all_reduce": 2}.get(by, 1) * (size - 1) // size
    return [even if of is None else (sum(of) - of[rank]) * each for of in (receives, sends)]


class Functional:
    """Functional collectives: nodes of a graph, or results that are waited for at their first use."""

    __slots__ = ("is_fake", "name", "size")

    def __init__(self, name: str, size: int, is_fake: bool):
        self.name, self.size, self.is_fake = name, size, is_fake

    def all_gather(self, x: torch.Tensor, shape: Shape) -> torch.Tensor:
        """The `x` of every rank, end to end."""
        return torch_private.functional("all_gather_into_tensor", x.view(-1), self.size, self.name).view(shape)

    def all_to_all(self, x: torch.Tensor, receives: Counts, sends: Counts, shape: Shape) -> torch.Tensor:
        """`receives[i]` elements from rank i, to which `sends[i]` go; None where all are equal."""
        each = [x.numel() // self.size] * self.size
        got, given = each if receives is None else receives, each if sends is None else sends
        if self.is_fake and sends is not None and not sum(sends):  # that backend can't receive where nothing is sent
            x, given = x.new_zeros(sum(got)), got
        return torch_private.functional("all_to_all_single", x.view(-1), [*got], [*given], self.name).view(shape)

    def all_reduce(self, x: torch.Tensor, op: str, owned: bool) -> torch.Tensor:
        """`op` of the `x` of all ranks, a new tensor."""
        return torch_private.functional("all_reduce", x, op, self.name)

    def reduce_scatter(self, x: torch.Tensor, op: str, shape: Shape) -> torch.Tensor:
        """This rank's part of `op` of the `x` of all ranks."""
        return torch_private.functional("reduce_scatter_tensor", x.view(-1), op, self.size, self.name).view(shape)


class Communicator:
    """The collectives of a group for tensors of one dtype, by what carries them out."""

    def __init__(self, raw: Any, dtype: torch.dtype):
        self._raw, self._dtype = raw, dtype
        self._is_float, self._is_complex = dtype.is_floating_point, dtype.is_complex
        self._is_reduced, self._wide = dtype in REDUCED, _WIDER.get(dtype)
        self._carrier = dtype if dtype in REDUCED or dtype is torch.bool else _CARRIER[dtype.itemsize]
        self.all_gather, self.all_to_all = raw.all_gather, raw.all_to_all
        if self._carrier is not dtype:
            self.all_gather = functools.partial(self._carried, raw.all_gather)
            self.all_to_all = functools.partial(self._carried, raw.all_to_all)

    all_gather: Callable[[torch.Tensor, Shape], torch.Tensor]
    """The `x` of every rank, end to end."""

    all_to_all: Callable[[torch.Tensor, Counts, Counts, Shape], torch.Tensor]
    """`receives[i]` elements come from rank i, `sends[i]` of `x` go to it."""

    def all_reduce(self, x: torch.Tensor, op: str, owned: bool = False, divisor: int = 1) -> torch.Tensor:
        """`op` of every rank's `x`, divided; `x` is overwritten only where it is `owned`."""
        if self._is_reduced and divisor == 1 and (op == "sum" or not self._is_float):
            return self._raw.all_reduce(x, op, owned)
        wire = self._to_reduce(x, op, divisor)
        owned = owned or not (wire is x or self._is_complex)
        return self._of_reduced(self._raw.all_reduce(wire, op, owned), op, divisor)

    def reduce_scatter(self, x: torch.Tensor, op: str, shape: Shape, divisor: int = 1) -> torch.Tensor:
        """This rank's part of `op` of every rank's `x`, divided."""
        wire = self._to_reduce(x, op, divisor)
        part = self._raw.reduce_scatter(wire, op, (*shape, 2) if self._is_complex else shape)
        return self._of_reduced(part, op, divisor)

    def _carried(self, run: Callable[..., torch.Tensor], x: torch.Tensor, *counts_and_shape: Any) -> torch.Tensor:
        (*counts, shape), ratio = counts_and_shape, self._dtype.itemsize // self._carrier.itemsize
        # One element has any stride and is contiguous; a view as a narrower dtype wants stride 1.
        flat = x.view(-1) if x.numel() != 1 else x.as_strided((1,), (1,))
        scaled = [None if of is None else [n * ratio for n in of] for of in counts]
        return run(flat.view(self._carrier), *scaled, (math.prod(shape) * ratio,)).view(self._dtype).view(shape)

    def _to_reduce(self, x: torch.Tensor, op: str, divisor: int) -> torch.Tensor:
        if not (self._is_reduced or self._wide or (self._is_complex and op == "sum")):
            raise ShardingError(
                f"no {op} over ranks for {self._dtype}; convert it first, x.to(torch.int64) or x.float()"
            )
        if self._is_float and op != "sum":
            return ordered(x, op)
        wire = torch.view_as_real(x) if self._is_complex else x if self._wide is None else x.to(self._wide)
        return wire / divisor if divisor > 1 and self._dtype in _SUMS_OVERFLOW else wire

    def _of_reduced(self, wire: torch.Tensor, op: str, divisor: int) -> torch.Tensor:
        if self._is_float and op != "sum":
            return unordered(wire, self._dtype)
        if divisor > 1 and self._dtype not in _SUMS_OVERFLOW:
            wire = wire.div_(divisor) if wire.is_floating_point() else wire / divisor
        return torch.view_as_complex(wire) if self._is_complex else wire.to(self._dtype)


def ordered(x: torch.Tensor, op: str) -> torch.Tensor:
    """Floats as integers in the same order, where NaN wins a maximum ("max") or a minimum ("min"). A copy.

    >>> ordered(torch.tensor([-1.0, 0.0, 2.0]), "max").diff().gt(0).tolist()
    [True, True]
    >>> unordered(ordered(torch.tensor([float("nan"), 1.0]), "min").amin(0), torch.float32)
    tensor(nan)
    """
    # The largest and the smallest integer are a NaN in their bits.
    wide = x if x.dtype in _BITS else x.float()
    bits = wide.view(_BITS[wide.dtype])
    limits = torch.iinfo(bits.dtype)
    return torch.where(wide.isnan(), limits.max if op == "max" else limits.min, _swapped(bits))


def unordered(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The floats of integers that `ordered` made."""
    return _swapped(x).view(torch.float64 if x.dtype is torch.int64 else torch.float32).to(dtype)


def _swapped(bits: torch.Tensor) -> torch.Tensor:
    """The bits of a float as a number in its order, and back: of a negative one the lower bits count downwards."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


@of_world(512)
def communicator(group: dist.ProcessGroup, dtype: torch.dtype, eager: bool) -> Communicator:
    """The collectives of a group for a dtype; made once."""
    if eager:
        return Communicator(torch_private.Collectives(group), dtype)
    return Communicator(Functional(group.group_name, group.size(), dist.get_backend(group) == "fake"), dtype)
