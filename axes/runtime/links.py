"""Links: the few collectives that redistribution needs, on one group, eager or traced.

    link = link_of(group, torch.float32, eager=True)
    whole = link.all_gather(part, (4 * n,))

Tensors are contiguous; what an element is doesn't matter to what is moved, so a dtype that a backend
doesn't know goes as integers of the same width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from axes.runtime import torch_private
from axes.runtime.groups import of_world
from axes.runtime.packing import Shape
from axes.runtime.trace import Event, Traced, recorder

Counts = Sequence[int] | None
"""Elements for or from each rank of a group; None where all are equal."""

MOVED = {
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
"""The dtypes that every backend moves."""

REDUCED = MOVED - {torch.bool}
"""The dtypes that every backend reduces; complex ones are summed as pairs."""

SUMS_OVERFLOW = (torch.float16, torch.complex32)
"""Dtypes in which the sum of a mean may be infinite where the mean isn't: summands are divided before."""

_CARRIER = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""What carries the bytes of an element of so many bytes; nothing is computed in it."""

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Link(Protocol):
    """The collectives of one group. Tensors are contiguous; results are new and have the shape asked for."""

    def all_gather(self, x: torch.Tensor, shape: Shape) -> torch.Tensor:
        """The `x` of every rank, end to end."""

    def all_to_all(self, x: torch.Tensor, receives: Counts, sends: Counts, shape: Shape) -> torch.Tensor:
        """`sends[i]` elements of `x` go to rank i, `receives[i]` come from it."""

    def all_reduce(self, x: torch.Tensor, op: str, owned: bool) -> torch.Tensor:
        """`op` of every rank's `x`; `x` is overwritten only where it is `owned`."""

    def reduce_scatter(self, x: torch.Tensor, op: str, shape: Shape) -> torch.Tensor:
        """This rank's part of `op` of every rank's `x`."""


def _new(x: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Memory for a tensor like `x`. (torch reads sizes faster one by one than as a tuple.)"""
    return x.new_empty(*shape) if shape else x.new_empty(())


class _Eager:
    """The methods of a `ProcessGroup`, waited for."""

    __slots__ = ("_exchange", "_gather", "_reduce", "_scatter", "size")

    def __init__(self, group: dist.ProcessGroup):
        self.size = group.size()
        self._gather, self._exchange, self._reduce, self._scatter = torch_private.collectives_of(group)

    def all_gather(self, x: torch.Tensor, shape: Shape) -> torch.Tensor:
        out = _new(x, shape)
        # gloo cuts the first dim, so the buffers are flat unless the parts are its rows.
        if x.dim() == len(shape) > 0 and x.shape[0] * self.size == shape[0]:
            self._gather(out, x)
        else:
            self._gather(out.ravel(), x.ravel())
        return out

    def all_to_all(self, x: torch.Tensor, receives: Counts, sends: Counts, shape: Shape) -> torch.Tensor:
        # Backends cut the first dim, and a view takes longer than a buffer.
        if receives is None and x.shape[0] % self.size == 0:
            out = torch.empty_like(x)
            self._exchange(out, x, [], [])
        else:
            out = x.new_empty(math.prod(shape))
            self._exchange(out, x.ravel(), receives or [], sends or [])
        return torch.reshape(out, shape)

    def all_reduce(self, x: torch.Tensor, op: str, owned: bool) -> torch.Tensor:
        out = x if owned else x.clone(memory_format=torch.contiguous_format)
        self._reduce(torch.view_as_real(out) if out.is_complex() else out, _REDUCE[op])
        return out

    def reduce_scatter(self, x: torch.Tensor, op: str, shape: Shape) -> torch.Tensor:
        out = _new(x, shape)
        if out.is_complex():
            self._scatter(torch.view_as_real(out), torch.view_as_real(x), _REDUCE[op])
        elif x.dim() == len(shape) > 0 and x.shape[0] == shape[0] * self.size:
            self._scatter(out, x, _REDUCE[op])
        else:
            self._scatter(out.ravel(), x.ravel(), _REDUCE[op])
        return out


class _Traced:
    """Functional collectives: nodes of a graph, or results that are waited for at their first use."""

    __slots__ = ("name", "size")

    def __init__(self, group: dist.ProcessGroup):
        self.name, self.size = group.group_name, group.size()

    def all_gather(self, x: torch.Tensor, shape: Shape) -> torch.Tensor:
        return torch_private.functional_gather(x.view(-1), self.size, self.name).view(shape)

    def all_to_all(self, x: torch.Tensor, receives: Counts, sends: Counts, shape: Shape) -> torch.Tensor:
        each = [x.numel() // self.size] * self.size
        got, given = each if receives is None else receives, each if sends is None else sends
        return torch_private.functional_exchange(x.view(-1), got, given, self.name).view(shape)

    def all_reduce(self, x: torch.Tensor, op: str, owned: bool) -> torch.Tensor:
        if x.is_complex():
            return torch.view_as_complex(torch_private.functional_reduce(torch.view_as_real(x), op, self.name))
        return torch_private.functional_reduce(x, op, self.name)

    def reduce_scatter(self, x: torch.Tensor, op: str, shape: Shape) -> torch.Tensor:
        if x.is_complex():
            pairs = torch.view_as_real(x.view(-1))
            part = torch_private.functional_scatter(pairs, op, self.size, self.name)
            return torch.view_as_complex(part).view(shape)
        return torch_private.functional_scatter(x.view(-1), op, self.size, self.name).view(shape)


_OWN = 7
"""Frames of axes at the top of the stack when a collective of a program begins, at least."""


class _Recorded:
    """A link each of whose collectives is an event of the trace, as `about` says but for the method and the bytes.

    The bytes that go through it are those of one stage of a program: the same for as many elements.
    """

    __slots__ = ("_about", "_known", "_link", "_size", "_who")

    def __init__(self, link: Link, group: dist.ProcessGroup, about: Traced):
        self._link, self._about, self._size, self._who = link, about, group.size(), group.rank()
        self._known: dict[tuple[str, int], Traced] = {}

    def _begin(self, method: str, x: torch.Tensor, whole: int, receives: Counts = None, sends: Counts = None) -> Event:
        """`whole`: how many times the tensor is moved in equal parts, if it is, one of them the rank's own."""
        key = method, x.numel()
        found = self._known.get(key)
        if found is None:
            even = key[1] * whole * (self._size - 1) // self._size
            each = [even if of is None else sum(of) - of[self._who] for of in (receives, sends)]
            moved = [count * x.element_size() for count in each]
            found = self._known[key] = replace(self._about, by=method, bytes_in=moved[0], bytes_out=moved[1])
        return recorder().begin(found, _OWN)

    def all_gather(self, x: torch.Tensor, shape: Shape) -> torch.Tensor:
        event = self._begin("all_gather", x, self._size)
        out = self._link.all_gather(x, shape)
        event[0].end(event)
        return out

    def all_to_all(self, x: torch.Tensor, receives: Counts, sends: Counts, shape: Shape) -> torch.Tensor:
        event = self._begin("all_to_all", x, 1, receives, sends)
        out = self._link.all_to_all(x, receives, sends, shape)
        event[0].end(event)
        return out

    def all_reduce(self, x: torch.Tensor, op: str, owned: bool) -> torch.Tensor:
        event = self._begin("all_reduce", x, 2)
        out = self._link.all_reduce(x, op, owned)
        event[0].end(event)
        return out

    def reduce_scatter(self, x: torch.Tensor, op: str, shape: Shape) -> torch.Tensor:
        event = self._begin("reduce_scatter", x, 1)
        out = self._link.reduce_scatter(x, op, shape)
        event[0].end(event)
        return out


@dataclass(frozen=True)
class _Carried:
    """A link that moves a dtype which the backend doesn't know, as another one of `ratio` per element."""

    link: Link
    carrier: torch.dtype
    ratio: int

    def _as_carried(self, x: torch.Tensor) -> torch.Tensor:
        # One element has any stride and is contiguous; a view as a narrower dtype wants stride 1.
        return x.as_strided((x.numel(),), (1,)).view(self.carrier)

    def all_gather(self, x: torch.Tensor, shape: Shape) -> torch.Tensor:
        out = self.link.all_gather(self._as_carried(x), (math.prod(shape) * self.ratio,))
        return out.view(x.dtype).view(shape)

    def all_to_all(self, x: torch.Tensor, receives: Counts, sends: Counts, shape: Shape) -> torch.Tensor:
        got, given = (None if counts is None else [n * self.ratio for n in counts] for counts in (receives, sends))
        out = self.link.all_to_all(self._as_carried(x), got, given, (math.prod(shape) * self.ratio,))
        return out.view(x.dtype).view(shape)

    def all_reduce(self, x: torch.Tensor, op: str, owned: bool) -> torch.Tensor:
        return self.link.all_reduce(x, op, owned)

    def reduce_scatter(self, x: torch.Tensor, op: str, shape: Shape) -> torch.Tensor:
        return self.link.reduce_scatter(x, op, shape)


@dataclass(frozen=True)
class _Ordered:
    """A link whose maxima and minima of floats keep NaN, as torch's own do: they are taken of `ordered` integers.

    Backends compare floats each in its own way: gloo forgets a NaN, or doesn't, by the order of the ranks.
    """

    link: Link

    def all_gather(self, x: torch.Tensor, shape: Shape) -> torch.Tensor:
        return self.link.all_gather(x, shape)

    def all_to_all(self, x: torch.Tensor, receives: Counts, sends: Counts, shape: Shape) -> torch.Tensor:
        return self.link.all_to_all(x, receives, sends, shape)

    def all_reduce(self, x: torch.Tensor, op: str, owned: bool) -> torch.Tensor:
        return unordered(self.link.all_reduce(ordered(x, op), op, True), x.dtype)

    def reduce_scatter(self, x: torch.Tensor, op: str, shape: Shape) -> torch.Tensor:
        return unordered(self.link.reduce_scatter(ordered(x, op), op, shape), x.dtype)


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


_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


@of_world(512)
def link_of(group: dist.ProcessGroup, dtype: torch.dtype, eager: bool, op: str | None = None) -> Link:
    """The collectives of a group, for tensors of a dtype and the reduction `op`, if any."""
    return _for_dtype(_Eager(group) if eager else _Traced(group), dtype, op)


def recorded_link_of(group: dist.ProcessGroup, dtype: torch.dtype, eager: bool, op: str | None, about: Traced) -> Link:
    """The same, with its collectives in the trace."""
    return _for_dtype(_Recorded(_Eager(group) if eager else _Traced(group), group, about), dtype, op)


def _for_dtype(link: Link, dtype: torch.dtype, op: str | None) -> Link:
    if op in ("max", "min") and dtype.is_floating_point:
        link = _Ordered(link)
    if dtype in MOVED:
        return link
    carrier = _CARRIER[dtype.itemsize]
    return _Carried(link, carrier, dtype.itemsize // carrier.itemsize)
