"""Programs: plans as functions from this rank's tile to this rank's tile.

A plan says which boxes go where; a program is that with everything found beforehand: groups, counts,
where boxes lie in memory, buffers' shapes. One call of it is

    pack -> collective -> unpack        for each step of the plan

where packing and unpacking are views as often as memory allows (see `packing`). A program takes and
gives contiguous tensors, knows nothing of gradients, and is the same one on every call.

Each program exists in two forms. The eager one calls the methods of the `ProcessGroup`, at a third
of the Python that functional collectives cost. The traced one is made of functional collectives, one
node of a graph each; it also serves `async_op`, where the last collective's result isn't waited for.

What differs between backends is decided when a program is made:

- dtypes that a backend doesn't know are moved as integers of the same width;
- gloo reduces and scatters by an exchange and a local sum, which is more than twice as fast there
  as its own reduce-scatter, and sums 16-bit floats in 32 bits;
- a mean is a sum and a division, in the dtype in which the values were summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist

from axes.algebra.errors import ShardingError
from axes.algebra.plan import Plan
from axes.algebra.planning.exchange import Exchange, Region, Transfer
from axes.algebra.planning.step import Step
from axes.algebra.state import slots
from axes.runtime import packing, torch_private
from axes.runtime.packing import Boxes, Part, Places, Shape, filler, packer, places_of, slices_of, unpacker

Counts = Sequence[int] | None
"""Elements for or from each rank of a group; None where all are equal."""

Run = Callable[[torch.Tensor], torch.Tensor]

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

_CARRIER = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""What carries the bytes of an element of so many bytes; nothing is computed in it."""

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


# --- collectives ----------------------------------------------------------------------------------


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


class _Eager:
    """The methods of a `ProcessGroup`, waited for."""

    __slots__ = ("_exchange", "_gather", "_reduce", "_scatter", "size")

    def __init__(self, group: dist.ProcessGroup):
        self.size = group.size()
        self._gather, self._exchange, self._reduce, self._scatter = torch_private.collectives_of(group)

    def all_gather(self, x: torch.Tensor, shape: Shape) -> torch.Tensor:
        out = x.new_empty(shape)
        # gloo cuts the first dim, so the buffers are flat unless the parts are its rows.
        if x.dim() == len(shape) > 0 and x.shape[0] * self.size == shape[0]:
            self._gather(out, x)
        else:
            self._gather(out.view(-1), x.view(-1))
        return out

    def all_to_all(self, x: torch.Tensor, receives: Counts, sends: Counts, shape: Shape) -> torch.Tensor:
        out = x.new_empty(math.prod(shape))
        self._exchange(out, x, receives or [], sends or [])
        return out.view(shape)

    def all_reduce(self, x: torch.Tensor, op: str, owned: bool) -> torch.Tensor:
        out = x if owned else x.clone(memory_format=torch.contiguous_format)
        self._reduce(torch.view_as_real(out) if out.is_complex() else out, _REDUCE[op])
        return out

    def reduce_scatter(self, x: torch.Tensor, op: str, shape: Shape) -> torch.Tensor:
        out = x.new_empty(shape)
        if out.is_complex():
            self._scatter(torch.view_as_real(out), torch.view_as_real(x), _REDUCE[op])
        else:
            self._scatter(out.view(-1), x.view(-1), _REDUCE[op])
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


@dataclass(frozen=True)
class _Carried:
    """A link that moves a dtype which the backend doesn't know, as another one of `ratio` per element."""

    link: Link
    carrier: torch.dtype
    ratio: int

    def all_gather(self, x: torch.Tensor, shape: Shape) -> torch.Tensor:
        out = self.link.all_gather(x.view(-1).view(self.carrier), (math.prod(shape) * self.ratio,))
        return out.view(x.dtype).view(shape)

    def all_to_all(self, x: torch.Tensor, receives: Counts, sends: Counts, shape: Shape) -> torch.Tensor:
        got, given = (None if counts is None else [n * self.ratio for n in counts] for counts in (receives, sends))
        out = self.link.all_to_all(x.view(-1).view(self.carrier), got, given, (math.prod(shape) * self.ratio,))
        return out.view(x.dtype).view(shape)

    def all_reduce(self, x: torch.Tensor, op: str, owned: bool) -> torch.Tensor:
        return self.link.all_reduce(x, op, owned)

    def reduce_scatter(self, x: torch.Tensor, op: str, shape: Shape) -> torch.Tensor:
        return self.link.reduce_scatter(x, op, shape)


# --- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Program:
    """A plan, made ready for one rank, dtype and device.

    groups: for each step that communicates, its group; None for others. backend: what serves them.
    comm_dtype: in which dtype values travel and are reduced, where that isn't their own.
    before: what the ranks do before each use, to see whether they agree.
    """

    plan: Plan
    dtype: torch.dtype
    groups: tuple[dist.ProcessGroup | None, ...]
    backend: str
    comm_dtype: torch.dtype | None = None
    before: Callable[[], None] | None = None

    @cached_property
    def eager(self) -> Run:
        """The program as a function of the contiguous tile."""
        return _compiled(self, _Eager)

    @cached_property
    def traced(self) -> Run:
        """The same, of functional collectives."""
        return _compiled(self, _Traced)

    @cached_property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.plan.steps and self.before is None


def check_dtypes(plan: Plan, dtype: torch.dtype, comm_dtype: torch.dtype | None) -> None:
    """Raise `ShardingError` where the plan reduces in a dtype in which that can't be done."""
    wire = dtype if comm_dtype is None else comm_dtype
    if comm_dtype is not None and dtype.is_complex and not comm_dtype.is_complex:
        raise ShardingError(f"comm_dtype={comm_dtype} would drop the imaginary part of {dtype}; use a complex one")
    for step in plan.steps:
        if step.op is None:
            continue
        if (
            wire not in REDUCED
            and not (wire.is_complex and step.op == "sum")
            and not (wire is torch.bool and step.op != "sum")
        ):
            raise ShardingError(
                f"{wire} isn't reduced by every backend: a {step.op} over '{' '.join(step.axes)}' needs "
                f"comm_dtype={_wider(wire)}\n  source  {plan.source}\n  target  {plan.target}"
            )


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point or dtype.is_complex else torch.int64


def _compiled(program: Program, made: type[_Eager] | type[_Traced]) -> Run:
    stages: list[Run] = [] if program.before is None else [_announced(program.before)]
    steps, wire, owned = program.plan.steps, program.dtype, False
    sending = [at for at, group in enumerate(program.groups) if group is not None]
    for at, step in enumerate(steps):
        if not step.takes_part(step.rank):
            continue
        if at in sending[:1] and program.comm_dtype not in (None, wire):
            wire, owned = program.comm_dtype or wire, True
            stages.append(_cast(wire))
        stages.append(_stage(program, at, made, wire, owned))
        owned = program.groups[at] is not None
        if at in sending[-1:] and wire is not program.dtype:
            wire = program.dtype
            stages.append(_cast(wire))
    return _chained(stages)


def _announced(before: Callable[[], None]) -> Run:
    def announce(x: torch.Tensor) -> torch.Tensor:
        before()
        return x

    return announce


def _cast(dtype: torch.dtype) -> Run:
    return lambda x: x.to(dtype)


def _chained(stages: Sequence[Run]) -> Run:
    if not stages:
        return lambda x: x
    if len(stages) == 1:
        return stages[0]
    if len(stages) == 2:
        first, second = stages
        return lambda x: second(first(x))

    def run(x: torch.Tensor) -> torch.Tensor:
        for stage in stages:
            x = stage(x)
        return x

    return run


def _link(made: type[_Eager] | type[_Traced], group: dist.ProcessGroup, dtype: torch.dtype) -> Link:
    link = made(group)
    if dtype in MOVED:
        return link
    carrier = _CARRIER[dtype.itemsize]
    return _Carried(link, carrier, dtype.itemsize // carrier.itemsize)


def _stage(program: Program, at: int, made: type[_Eager] | type[_Traced], dtype: torch.dtype, owned: bool) -> Run:
    step, group = program.plan.steps[at], program.groups[at]
    exchange = step.exchange()
    if group is None:
        return _slice(step, exchange)
    link = _link(made, group, dtype)
    if step.kind == "all_reduce":
        return _all_reduce(step, link, owned)
    if step.kind == "all_gather":
        return _all_gather(step, exchange, link)
    if step.kind == "reduce_scatter":
        if program.backend == "gloo" and made is _Eager:
            return _reduce_by_exchange(step, exchange, link)
        return _reduce_scatter(step, exchange, link)
    if step.kind == "reduce_move":
        return _reduce_move(step, exchange, link)
    return _move(step, exchange, link)


# --- steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """What a rank sends, or receives: boxes of a tile of `shape` for each of `size` ranks."""

    transfers: tuple[tuple[int, tuple[Region, ...]], ...]
    shape: Shape
    size: int

    @cached_property
    def counts(self) -> list[int]:
        """Elements for each rank."""
        found = [0] * self.size
        for peer, boxes in self.transfers:
            found[peer] = sum(map(_volume, boxes))
        return found

    @cached_property
    def places(self) -> Places:
        """Where the boxes lie, one after the other without gaps."""
        boxes = [box for _, boxes in self.transfers for box in boxes]
        ends = accumulate(map(_volume, boxes), initial=0)
        return places_of(list(zip(ends, boxes, strict=False)), self.shape)

    def padded(self, padded: int) -> Places:
        """The same, where the boxes of rank i begin at `i * padded`."""
        parts: list[Part] = []
        for peer, boxes in self.transfers:
            ends = accumulate(map(_volume, boxes), initial=peer * padded)
            parts.extend(zip(ends, boxes, strict=False))
        return places_of(parts, self.shape)

    def joined(self, peer: int, boxes: tuple[Region, ...]) -> Side:
        """With boxes for one rank more."""
        if not boxes:
            return self
        return Side(tuple(sorted((*self.transfers, (peer, boxes)))), self.shape, self.size)


def _volume(box: Region) -> int:
    return math.prod(stop - start for start, stop in box)


def _side(transfers: Sequence[Transfer], shape: Shape, exchange: Exchange) -> Side:
    return Side(tuple((t.peer, t.regions) for t in transfers if t.count), shape, len(exchange.ranks))


def _shape(shape: Shape | None) -> Shape:
    """The shape of a tile, empty where a rank holds none."""
    return (0,) if shape is None else shape


def _slice(step: Step, exchange: Exchange) -> Run:
    shape = _shape(step.output_shape())
    boxes = [(slices_of(source), slices_of(target)) for source, target in exchange.copies]
    if len(boxes) == 1:
        only = boxes[0][0]
        return lambda x: x[only].contiguous()

    def run(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(shape)
        for source, target in boxes:
            out[target].copy_(x[source])
        return out

    return run


def _all_reduce(step: Step, link: Link, owned: bool) -> Run:
    op, reduce, divide = step.op or "sum", link.all_reduce, _divided(step.divisor)
    return lambda x: divide(reduce(x, op, owned))


def _divided(divisor: int) -> Run:
    return (lambda x: x) if divisor == 1 else (lambda x: x.div_(divisor))


def _all_gather(step: Step, exchange: Exchange, link: Link) -> Run:
    shape, padded, gather = _shape(step.output_shape()), exchange.padded, link.all_gather
    if step.flat:
        return lambda x: gather(x, shape)
    mine = math.prod(_shape(step.input_shape()))
    everything = (len(exchange.ranks) * padded,)
    unpack = unpacker(_side(exchange.receives, shape, exchange).padded(padded), shape)
    if mine == padded:
        return lambda x: unpack(gather(x, everything))

    def run(x: torch.Tensor) -> torch.Tensor:
        row = x.new_empty(padded)
        row[:mine].copy_(x.view(-1))
        return unpack(gather(row, everything))

    return run


def _reduce_scatter(step: Step, exchange: Exchange, link: Link) -> Run:
    shape, tile = _shape(step.output_shape()), _shape(step.input_shape())
    padded, op, divide, scatter = exchange.padded, step.op or "sum", _divided(step.divisor), link.reduce_scatter
    rows = _side(exchange.sends, tile, exchange).padded(padded)
    pack = packer(rows, tile, len(exchange.ranks) * padded)
    count = math.prod(shape)
    if count == padded:
        return lambda x: divide(scatter(pack(x), op, shape))
    return lambda x: divide(scatter(pack(x), op, (padded,))[:count].view(shape))


def _reduce_by_exchange(step: Step, exchange: Exchange, link: Link) -> Run:
    """A reduce-scatter as an exchange of the parts and a local reduction in the order of the group."""
    shape, tile = _shape(step.output_shape()), _shape(step.input_shape())
    sends = _side(exchange.sends, tile, exchange)
    pack = packer(sends.places, tile, sum(sends.counts))
    layers = len(exchange.ranks)
    even = _even(step)
    given, got = None if even else sends.counts, None if even else [math.prod(shape)] * layers
    move, reduce, stack = link.all_to_all, _local_reduction(step, layers), (layers, *shape)
    return lambda x: reduce(move(pack(x), got, given, stack))


def _even(step: Step) -> bool:
    """Whether the tiles of all ranks have one shape, before the step and after."""
    return all(
        size % math.prod(layout.size for layout in layouts) == 0
        for state in (step.source, step.target)
        for _, size, layouts in slots(state, step.shape)
    )


def _local_reduction(step: Step, layers: int) -> Run:
    """Reduces the first dim, in order; 16-bit floats in 32 bits."""
    op, divisor = step.op or "sum", step.divisor
    if op == "max":
        return lambda stack: stack.amax(0)
    if op == "min":
        return lambda stack: stack.amin(0)
    if divisor == 1:
        return lambda stack: stack.sum(0, dtype=stack.dtype)
    if divisor == layers:
        return lambda stack: stack.mean(0)

    def mean(stack: torch.Tensor) -> torch.Tensor:
        wide = torch.float32 if stack.dtype.itemsize == 2 else stack.dtype
        return stack.sum(0, dtype=wide).div_(divisor).to(stack.dtype)

    return mean


def _move(step: Step, exchange: Exchange, link: Link) -> Run:
    receives = _side(exchange.receives, _shape(step.output_shape()), exchange)
    return _exchanged(step, exchange, link, receives, tuple(box for _, box in exchange.copies))


def _reduce_move(step: Step, exchange: Exchange, link: Link) -> Run:
    """As a move, into a stack of one tile for each layer, which is then reduced."""

    def at(layer: int, boxes: Sequence[Region]) -> tuple[Region, ...]:
        return tuple(((layer, layer + 1), *box) for box in boxes)

    stack = (exchange.layers, *_shape(step.output_shape()))
    transfers = tuple((t.peer, at(t.layer, t.regions)) for t in exchange.receives if t.count)
    kept = at(exchange.layer, [box for _, box in exchange.copies])
    collect = _exchanged(step, exchange, link, Side(transfers, stack, len(exchange.ranks)), kept)
    reduce = _local_reduction(step, exchange.layers)
    return lambda x: reduce(collect(x))


def _exchanged(step: Step, exchange: Exchange, link: Link, receives: Side, kept: tuple[Region, ...]) -> Run:
    """Boxes of the tile sent, boxes of the result received, and the rank's own boxes copied.

    Where it makes both sides regular, what the rank keeps goes through the collective as well: then
    there is at most one strided copy on either side, and often none. Where all counts are equal it
    must, on all ranks alike: backends have another algorithm for that.
    """
    sends = _side(exchange.sends, _shape(step.input_shape()), exchange)
    me = exchange.ranks.index(step.rank)
    every_send = sends.joined(me, tuple(box for box, _ in exchange.copies))
    every_receive = receives.joined(me, kept)
    # Between even tiles the counts of one rank are, in another order, those of every other.
    alike = len({*every_send.counts, *every_receive.counts}) == 1 and _even(step)
    regular = not isinstance(every_send.places, Boxes) and not isinstance(every_receive.places, Boxes)
    if alike or regular:
        return _all_through(link, every_send, every_receive, alike)
    pack = packer(sends.places, sends.shape, sum(sends.counts))
    fill = filler(receives.places, receives.shape)
    given, got, shape, move = sends.counts, receives.counts, receives.shape, link.all_to_all
    count = (sum(got),)
    copies = [(slices_of(source), slices_of(target)) for (source, _), target in zip(exchange.copies, kept, strict=True)]

    def run(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(shape)
        fill(out, move(pack(x), got, given, count))
        for source, target in copies:
            out[target].copy_(x[source])
        return out

    return run


def _all_through(link: Link, sends: Side, receives: Side, alike: bool) -> Run:
    """An exchange through which everything goes, what the rank keeps as well."""
    shape, move = receives.shape, link.all_to_all
    pack = packer(sends.places, sends.shape, sum(sends.counts))
    given, got = (None, None) if alike else (sends.counts, receives.counts)
    if isinstance(receives.places, packing.Run):
        return lambda x: move(pack(x), got, given, shape)
    count, unpack = (sum(receives.counts),), unpacker(receives.places, shape)
    return lambda x: unpack(move(pack(x), got, given, count))
