"""The collectives on one axis, for plain tensors: any dim, any dtype, eager and traced alike.

An `AxisGroup` is the ranks of an axis through this one, and what they communicate by; rank i of it is
coordinate i on the axis. What is sent is always one contiguous tensor; dims other than the first
are brought to the front before and taken back after.

>>> from axes.runtime.simulate import simulate
>>> import axes
>>> with simulate(8, rank=5):
...     group = group_along(axes.init_mesh("dp=2 tp=4"), "tp")
...     group.size, group.coordinate, all_gather(torch.zeros(3, 2), 1, group).shape
(4, 1, torch.Size([3, 8]))

Eager calls go through the methods of the `ProcessGroup` (3 to 4 microseconds, where functional
collectives take 11 and more); in `torch.compile` each is one functional collective. Any dtype goes: see
`communicator`. Nothing here is differentiable: that is `axes.ops.collectives`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from axes.algebra.errors import MeshError, ShardingError, SizeError
from axes.algebra.layout import Layout, Universe
from axes.algebra.mesh import Mesh
from axes.algebra.sizes import Shape
from axes.runtime import torch_private
from axes.runtime.graphs import kept
from axes.runtime.groups import group_of, of_world
from axes.runtime.operation import PLAIN, Operation, collective, waited

AxisName = str | tuple[str, ...]
"""A name of the mesh's namespace, or several: their product, the first the slowest."""

_NAMES = {"sum": "psum", "mean": "pmean", "max": "pmax", "min": "pmin"}
"""What the reductions are called in public."""


class AxisGroup:
    """The ranks of an axis through this one, which is `coordinate` of `size`, and what they communicate by.

    group: theirs in torch; None of a single rank, which has nobody to talk to. fake: nobody else is there.
    """

    def __init__(self, mesh: Mesh, name: str, group: Any):
        self.mesh, self.name, self.group, self.size, self.coordinate, self.fake = mesh, name, group, 1, 0, False
        if group is not None:
            self.size, self.coordinate, self.group_name = group.size(), group.rank(), group.group_name
            self.fake = dist.get_backend(group) == "fake"

    @functools.cached_property
    def ranks(self) -> Sequence[int]:
        """The global ranks in order."""
        return Universe.of(dist.get_process_group_ranks(self.group)).ranks


def group_along(mesh: Mesh, axis: AxisName) -> AxisGroup:
    """The group of an axis of a bound mesh through this rank; made at first use.

    A product of several axes is an axis as well. To `torch.compile` a group is a constant, guarded
    by the mesh. Raises `MeshError` for a name that the mesh doesn't have, axes that share ranks, a
    mesh without a running job, and on a rank outside the mesh.
    """
    if torch.compiler.is_compiling():
        return getattr(kept, _keep(mesh, axis))
    if mesh.binding is None or mesh._view is not None:
        mesh._bound(f"a collective over {axis!r}")
    return _group_along(mesh, axis)


@torch.compiler.assume_constant_result
def _keep(mesh: Mesh, axis: AxisName) -> str:
    mesh._bound(f"a collective over {axis!r}")
    return kept.keep(_group_along(mesh, axis))


@of_world(1024)
def _group_along(mesh: Mesh, axis: AxisName) -> AxisGroup:
    return group_over(mesh, *axis_layout(mesh, axis))


def group_over(mesh: Mesh, layout: Layout, name: str) -> AxisGroup:
    """The group of a layout through this rank, by the name of the axis or the names of several."""
    return AxisGroup(mesh, name, group_of(mesh, layout, name) if layout.size > 1 else None)


def axis_layout(mesh: Mesh, axis: AxisName) -> tuple[Layout, str]:
    """The layout of an axis or of a product of axes, and what to call it."""
    if isinstance(axis, str):
        names = tuple(axis.split())
        if len(names) > 1 and {*names} <= {*mesh.namespace}:
            raise MeshError(f"several axes are a tuple: write {names} for {axis!r}")
        return mesh.layout(axis), axis
    return mesh[axis].layout_of_all if axis else Layout(), " ".join(axis)


def all_reduce(x: torch.Tensor, op: str, group: AxisGroup) -> torch.Tensor:
    """`op` over the axis, elementwise, in the dtype of `x`: every rank gets the same tensor.

    `op` is "sum", "max", "min", or "mean", which divides before it rounds to the dtype of `x`: in float16 the summands.
    """
    reduction, divisor = ("sum", group.size) if op == "mean" else (op, 1)
    return _carried_out("all_reduce", (_NAMES[op], x, None, group), x, reduction, False, divisor)


def reduce_scatter(x: torch.Tensor, dim: int, group: AxisGroup) -> torch.Tensor:
    """The sum over the axis, of which coordinate i gets the i-th of equal pieces along `dim`."""
    sent = cut_evenly(x, dim, group)
    return _carried_out("reduce_scatter", ("psum_scatter", x, dim, group), sent, "sum", tuple(sent.shape[1:]))


def all_gather(x: torch.Tensor, dim: int, group: AxisGroup) -> torch.Tensor:
    """Every coordinate's `x`, concatenated along `dim` in order."""
    found = _carried_out("all_gather", ("all_gather", x, dim, group), x, (group.size, *x.shape))
    return _joined(found, dim)


def all_to_all(x: torch.Tensor, split_dim: int, concat_dim: int, group: AxisGroup) -> torch.Tensor:
    """Cut along `split_dim` into equal pieces, the i-th for coordinate i; what arrives is concatenated."""
    sent = cut_evenly(x, split_dim, group)
    described = "all_to_all", x, (split_dim, concat_dim), group
    return _joined(_carried_out("all_to_all", described, sent, None, None, tuple(sent.shape)), concat_dim)


def exchange(
    x: torch.Tensor, dim: int, sends: Sequence[int], receives: Sequence[int], group: AxisGroup
) -> torch.Tensor:
    """Cut along `dim` into pieces of `sends[i]`, the i-th for coordinate i; `receives[i]` come from it."""
    rows = x.movedim(dim, 0)
    row = math.prod(rows.shape[1:])
    given, got = ([count * row for count in counts] for counts in (sends, receives))
    described = "all_to_all", x, dim, group, sends, receives
    found = _carried_out("all_to_all", described, rows, got, given, (sum(receives), *rows.shape[1:]))
    return found.movedim(0, dim)


def permute(x: torch.Tensor, target: int | None, source: int | None, group: AxisGroup) -> torch.Tensor:
    """Sends `x` to coordinate `target` and returns what `source` sends: zeros where there is none.

    Every rank of the group calls it, also one that neither sends nor receives.
    """
    count = x.numel()
    sends = tuple([count if i == target else 0 for i in range(group.size)])
    receives = tuple([count if i == source else 0 for i in range(group.size)])
    described = "ppermute", x, None, group, sends, receives
    sent = x if target is not None else x.reshape(-1)[:0]
    received = _carried_out("all_to_all", described, sent, receives, sends, (sum(receives),))
    if source is not None:
        return received.view(x.shape)
    # A compiled graph drops what nobody uses, and with it what this rank sends: so use the nothing that came.
    zeros = torch.nn.functional.pad(received.view(torch.uint8), (0, count * x.element_size()))
    return zeros.view(x.dtype).view(x.shape)


def _carried_out(by: str, described: tuple[Any, ...], x: torch.Tensor, *how: Any) -> torch.Tensor:
    """The collective `by` of a communicator: in a graph a node of it."""
    group = described[3]
    if type(x) not in PLAIN:
        x = waited(x)
    x = x.resolve_conj().resolve_neg().contiguous()
    if torch.compiler.is_compiling() or type(x) not in PLAIN:
        return getattr(Communicator(Functional(group.group_name, group.size, group.fake), x.dtype), by)(x, *how)
    return collective(_named, described, getattr(communicator(group.group, x.dtype, True), by), x, *how)


def broadcast(x: torch.Tensor, source: int, group: AxisGroup, what: str) -> None:
    """Writes the `x` of the global rank `source` into that of all ranks of a group. `what` is it for?"""
    text, sent = f"{what}, of rank {source}, {_tensor_text(x.shape, x.dtype)}", x.numel() * x.element_size()
    sides = (0, sent) if source == dist.get_rank() else (sent, 0)
    collective(_operation, (text, "broadcast", sides, group), dist.broadcast, x, source, group.group)


def _named(
    what: str,
    x: torch.Tensor,
    dims: int | tuple[int, ...] | None,
    group: AxisGroup,
    sends: Sequence[int] = (),
    receives: Sequence[int] = (),
) -> Operation:
    """What the ranks of a group do together, by its public name."""
    return _named_of(what, x.shape, x.dtype, dims, group, tuple(sends), tuple(receives))


@of_world(4096)  # a trace may cost 5 us for each collective
def _named_of(
    what: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    dims: int | tuple[int, ...] | None,
    group: AxisGroup,
    sends: tuple[int, ...],
    receives: tuple[int, ...],
) -> Operation:
    """The same of a tensor of this shape and dtype. The dim by which `sends` count isn't compared."""
    varies = dims if sends and isinstance(dims, int) else None
    along = "" if dims is None else f", dim {dims}" if isinstance(dims, int) else f", dims {dims[0]} and {dims[1]}"
    tensor = _tensor_text(shape, dtype, varies) + along
    row = 1 if varies is None else math.prod((*shape[:varies], *shape[varies + 1 :]))
    counts = [[count * row for count in of] for of in (receives, sends)] if sends else ()
    by, op = _METHODS[what], what.removeprefix("p")
    sides = moved(by, math.prod(shape), dtype, op, group.size, group.coordinate, *counts)
    return replace(
        _operation(f"{what} over '{group.name}' of {tensor}", by, sides, group),
        kind=what,
        dtype=str(dtype).removeprefix("torch."),
        compared=f"{what} in {[*group.ranks]} of {tensor}",
        sends=sends,
        receives=receives,
    )


def _operation(what: str, by: str, sides: Sequence[int], group: AxisGroup) -> Operation:
    """What the ranks of a group do together, by which each receives and sends so many bytes."""
    return Operation(
        *(what, by, by, group.name, str(group.group_name), group.ranks, "", group.mesh.binding.device_type),
        bytes_in=sides[0],
        bytes_out=sides[1],
        compared=f"{what} in {[*group.ranks]}",
        mesh=group.mesh,
    )


_METHODS = {
    **dict.fromkeys(_NAMES.values(), "all_reduce"),
    "psum_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "ppermute": "all_to_all",
}
"""The method of a process group behind each public name."""


def _tensor_text(shape: Sequence[int], dtype: torch.dtype, varies: int | None = None) -> str:
    """Shape and dtype; `*` for the size of a dim that may vary."""
    sizes = ", ".join("*" if dim == varies else str(size) for dim, size in enumerate(shape))
    return f"[{sizes}] {str(dtype).removeprefix('torch.')}"


def cut_evenly(x: torch.Tensor, dim: int, group: AxisGroup) -> torch.Tensor:
    """`x` cut along `dim` into one piece for each coordinate: `[size, *piece]`, contiguous.

    Raises `SizeError` where it doesn't divide.
    """
    extent = x.shape[dim]
    if extent % group.size:
        raise SizeError(
            f"dim {dim} of {list(x.shape)} has {extent} elements, which doesn't divide into {group.size} pieces, "
            f"one for each rank of '{group.name}'; pad it to {-(-extent // group.size) * group.size}"
        )
    return x.unflatten(dim, (group.size, extent // group.size)).movedim(dim, 0).contiguous()


def _joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """`[size, *piece]` concatenated along `dim` of the pieces; a view where memory allows."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


# --- what ranks communicate by

# Tensors are contiguous, results are new. What an element is doesn't matter to what is moved, so a dtype that a backend
# doesn't know goes as integers of the same width. It is reduced in a wider dtype, complex numbers as pairs; and the
# maximum of floats is that of integers in the same order, so that a NaN wins on every backend, as in torch.

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
    traced = Functional(group.group_name, group.size(), dist.get_backend(group) == "fake")
    return Communicator(torch_private.Collectives(group) if eager else traced, dtype)
