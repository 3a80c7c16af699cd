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
- a mean is a sum and a division, in the dtype in which the values were summed; in float16 the division comes first.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from axes.algebra.chunks import tile_shape
from axes.algebra.errors import ShardingError
from axes.algebra.plan import Plan
from axes.algebra.planning.boxes import Region
from axes.algebra.planning.exchange import Exchange, Message
from axes.algebra.planning.step import Step
from axes.algebra.universe import Universe
from axes.runtime import packing, torch_private
from axes.runtime.agreement import ranks_text
from axes.runtime.check import in_part
from axes.runtime.communicator import REDUCED, Communicator, communicator, recorded_communicator
from axes.runtime.packing import (
    Boxes,
    Lattice,
    Part,
    Places,
    Shape,
    arranged,
    elements_of,
    filler,
    packer,
    slices_of,
    times,
    unpacker,
)
from axes.runtime.trace import Operation

Run = Callable[[torch.Tensor], torch.Tensor]

# --- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Program:
    """A plan, made ready for one rank, dtype and device.

    group_of: the group of a step, None where this rank doesn't communicate in it; made at first use.
    device_type: where tensors are, which says what backend serves them.
    comm_dtype: in which dtype values travel and are reduced, where that isn't their own.
    base: the program of the plan at its own shape, where this one is for another.
    shape: of a tensor that the steps cut as evenly as one of the plan's shape, where it is for that one.
    """

    plan: Plan
    dtype: torch.dtype
    group_of: Callable[[Step], dist.ProcessGroup | None]
    device_type: str
    comm_dtype: torch.dtype | None = None
    base: Program | None = None
    shape: Shape = ()

    def alike(self, shape: Shape) -> Program:
        """The same for a tensor of another shape, where every step cuts both evenly."""
        if shape == self.plan.shape:
            return self
        return Program(self.plan, self.dtype, self.group_of, self.device_type, self.comm_dtype, self, shape)

    @property
    def own(self) -> Program:
        """The program which has what doesn't depend on sizes: groups, backend, in which steps this rank takes part."""
        return self.base or self

    @cached_property
    def groups(self) -> tuple[dist.ProcessGroup | None, ...]:
        """The group of each step."""
        return tuple(self.group_of(step) for step in self.plan.steps)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """The steps in which this rank takes part, by number."""
        return tuple(at for at, step in enumerate(self.plan.steps) if step.takes_part(step.rank))

    @cached_property
    def units(self) -> tuple[Unit | None, ...]:
        """Each step on the smallest tensor that it cuts in the same way; None where this rank takes no part."""
        return tuple(_unit(step) if at in self.parts else None for at, step in enumerate(self.plan.steps))

    @cached_property
    def backend(self) -> str:
        """What serves the groups: "gloo", "nccl"; nothing where nothing is sent."""
        group = next((group for group in self.groups if group is not None), None)
        if group is None:
            return ""
        return torch_private.served_devices(str(dist.get_backend(group))).get(self.device_type, "")

    @cached_property
    def eager(self) -> Run:
        """The program as a function of the contiguous tile."""
        return _compiled(self, eager=True)

    @cached_property
    def traced(self) -> Run:
        """The same, of functional collectives."""
        return _compiled(self, eager=False)

    @cached_property
    def recorded(self) -> Run:
        """`eager`, with each of its collectives in the trace."""
        return _compiled(self, eager=True, recorded=True)

    @cached_property
    def recorded_later(self) -> Run:
        """`traced` as it serves `async_op`, with each of its collectives in the trace."""
        return _compiled(self, eager=False, recorded=True)

    @property
    def said(self) -> str:
        """What it does, as errors and traces show it."""
        return f"{self.plan.source} -> {self.plan.target} of {self.tensor}"

    @property
    def tensor(self) -> str:
        """The whole shape, the dtype, and in which other one it travels."""
        wire = "" if self.comm_dtype in (None, self.dtype) else f", moved as {name_of(self.comm_dtype)}"
        return f"{list(self.shape or self.plan.shape)} {self.plan.dtype}{wire}"

    def at_sizes(self, tile: Shape) -> Run:
        """The traced form for a tile of other sizes than the plan's: for symbolic ones.

        Sizes may differ where the plan's own divide evenly into what the steps cut them into.
        """
        return _compiled(self, eager=False, tile=tile)

    @cached_property
    def tile(self) -> Shape | None:
        """The tile of this rank that it is for; None where it does nothing, or where the rank comes without one."""
        if not self.plan.steps:
            return None
        step = self.plan.steps[0]
        held = step.source.tile(self.shape or step.shape, step.rank)
        return None if held is None else tile_shape(held)

    @cached_property
    def lends(self) -> bool:
        """Whether what is sent last is the memory of the tile: until it has arrived nobody may change that."""
        parts, groups = self.own.parts, self.own.groups
        sending = [at for at in parts if groups[at] is not None]
        if not sending or sending[-1] != parts[0] or self.comm_dtype not in (None, self.dtype):
            return False
        task = task_of(self, parts[0], None)
        if task.step.kind == "all_gather":
            return task.step.flat or math.prod(task.tile) == task.padded
        sides = (task.unit.sends, task.unit.sends_all)  # what the rank keeps may go through the collective as well
        views = [isinstance(task.at_sizes(side).places, packing.Run) for side in sides]
        return task.step.kind != "all_reduce" and any(views)

    @cached_property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.plan.steps

    @cached_property
    def sends(self) -> bool:
        """Whether some rank sends something."""
        return any(step.kind != "slice" for step in self.plan.steps)


def check_dtypes(plan: Plan, dtype: torch.dtype, comm_dtype: torch.dtype | None) -> None:
    """Raise `ShardingError` where the plan reduces in a dtype in which that can't be done."""
    wire = dtype if comm_dtype is None else comm_dtype
    if comm_dtype is not None and dtype.is_complex and not comm_dtype.is_complex:
        raise ShardingError(f"comm_dtype={comm_dtype} would drop the imaginary part of {dtype}; use a complex one")
    if not _holds(wire, dtype):
        raise ShardingError(
            f"comm_dtype={comm_dtype} can't hold the values of {dtype}; use one of the same kind, like {_wider(dtype)}"
        )
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
                f"comm_dtype={_wider(wire)}, as axes.reshard(x, {str(plan.target)!r}, comm_dtype={_wider(wire)})\n"
                f"  source  {plan.source}\n  target  {plan.target}"
            )


def _holds(wire: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether values may travel in a dtype: of floats in any floats, rounded; of integers in no smaller ones."""
    if dtype.is_complex or dtype.is_floating_point:
        return wire.is_complex == dtype.is_complex and wire.is_floating_point == dtype.is_floating_point
    integral = not (wire.is_complex or wire.is_floating_point)
    return integral and wire.itemsize >= dtype.itemsize and (wire is not torch.bool or dtype is torch.bool)


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point or dtype.is_complex else torch.int64


def _compiled(program: Program, eager: bool, tile: Shape | None = None, recorded: bool = False) -> Run:
    stages: list[Run] = []
    steps, groups, wire, owned = program.plan.steps, program.own.groups, program.dtype, False
    sending = [at for at, group in enumerate(groups) if group is not None]
    if steps and steps[0].source.universe.position(steps[0].rank) is None:
        # A rank that has no part of the source comes with nothing, whatever torch calls a part of a scalar there.
        stages.append(lambda x: x.new_empty(0))
    for at in program.own.parts:
        if at in sending[:1] and program.comm_dtype not in (None, wire):
            wire, owned = program.comm_dtype or wire, True
            stages.append(_cast(wire))
        task = task_of(program, at, tile)
        stages.append(_stage(program, task, at, eager, wire, owned, recorded))
        tile = None if tile is None else task.merged
        owned = groups[at] is not None
        if at in sending[-1:] and wire is not program.dtype:
            wire = program.dtype
            stages.append(_cast(wire))
    return _chained(stages)


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


def _stage(program: Program, task: Task, at: int, eager: bool, dtype: torch.dtype, owned: bool, recorded: bool) -> Run:
    group = program.own.groups[at]
    about = _about(program, at, group, eager, dtype) if recorded and group is not None else None
    run = _run(program, task, group, eager, dtype, owned, about)
    if group is not None and program.own.groups.count(None) < len(program.own.groups) - 1:
        run = in_part(functools.partial(part_text, task.step, group), run)
    if task.step.opened is task.step:
        return run
    tile, merged = task.tile, task.merged
    return lambda x: run(x.view(tile)).view(merged)


def part_text(step: Step, group: dist.ProcessGroup) -> str:
    """A step as errors show it."""
    axes = f" over '{' '.join(step.axes)}'" if step.axes else ""
    return f"{step.kind}{axes} of {ranks_text(Universe.of(dist.get_process_group_ranks(group)).ranks)}"


def _about(program: Program, at: int, group: dist.ProcessGroup, eager: bool, dtype: torch.dtype) -> Operation:
    """A step as a trace has it."""
    steps = program.plan.steps
    sending = [i for i, step in enumerate(steps) if step.kind != "slice"]
    ranks = Universe.of(dist.get_process_group_ranks(group)).ranks
    step, axis = steps[at], " ".join(steps[at].axes) or "both meshes"
    return Operation(
        *(program.said, step.kind, "", axis, str(group.group_name), ranks, name_of(dtype), program.device_type),
        step=(sending.index(at) + 1, len(sending)),
        later=not eager,
    )


def name_of(dtype: torch.dtype | None) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _run(
    program: Program,
    task: Task,
    group: dist.ProcessGroup | None,
    eager: bool,
    dtype: torch.dtype,
    owned: bool,
    about: Operation | None,
) -> Run:
    step = task.step
    if group is None:
        return _slice(task, eager)
    how = group, dtype, eager
    link = communicator(*how) if about is None else recorded_communicator(*how, about)
    if step.kind == "all_reduce":
        return _all_reduce(step, link, owned)
    if step.kind == "all_gather":
        return _all_gather(task, link)
    if step.kind == "reduce_scatter":
        if program.own.backend == "gloo" and eager:
            return _reduce_by_exchange(task, link)
        return _reduce_scatter(task, link)
    if step.kind == "reduce_move":
        return _reduce_move(task, link)
    return _exchanged(task, link)


# --- steps ----------------------------------------------------------------------------------------


class Laid(NamedTuple):
    """What a rank sends, or receives: places in the memory of a tile of `shape`, `counts[i]` elements for rank i."""

    places: Places
    shape: Shape
    counts: list[int]


class Side(NamedTuple):
    """The same in boxes, for a tile of any size that is a multiple of this one's."""

    boxes: Lattice | Boxes
    shape: Shape
    counts: list[int]

    def times(self, multiples: Shape) -> Laid:
        """Where they lie in a tile whose sizes are so many times larger."""
        shape, more = tuple(map(operator.mul, self.shape, multiples)), math.prod(multiples)
        return Laid(self.boxes.within(shape, multiples), shape, [count * more for count in self.counts])


Boxed = tuple[int, tuple[Region, ...]]
"""A rank of the group, and boxes of a tile for it or from it."""


def _side(boxed: Sequence[Boxed], shape: Shape, size: int, padded: int | None = None) -> Side:
    """Boxes for each of `size` ranks: one after the other, or those of rank i from `i * padded`."""
    counts, parts, lengths, start = [0] * size, list[Part](), list[int](), 0
    for peer, boxes in boxed:
        start = start if padded is None else peer * padded
        for box in boxes:
            parts.append((start, box))
            lengths.append(count := elements_of(box))
            start += count
            counts[peer] += count
    return Side(arranged(parts, lengths) if parts else Boxes(()), shape, counts)


@dataclass(frozen=True, eq=False)
class Unit:
    """A step as this rank carries it out on a small tensor, whose multiples it carries out in the same way.

    `tile` and `shape`, before and after, have one dim for each factor, as the boxes do.
    """

    kind: str
    rank: int
    tile: Shape
    shape: Shape
    exchange: Exchange

    @cached_property
    def sends(self) -> Side:
        """What the rank sends of its tile."""
        return _side(_boxed(self.exchange.sends), self.tile, self.size)

    @cached_property
    def receives(self) -> Side:
        """What the rank receives of its new tile; of the stack of them that a `reduce_move` reduces."""
        return _side(self._received, self._filled, self.size)

    @cached_property
    def sends_all(self) -> Side:
        """What the rank sends and keeps."""
        own = (self.exchange.ranks.index(self.rank), tuple([box for box, _ in self.exchange.copies]))
        return _side(sorted([*_boxed(self.exchange.sends), own]), self.tile, self.size)

    @cached_property
    def receives_all(self) -> Side:
        """What the rank receives and keeps."""
        own = (self.exchange.ranks.index(self.rank), self.keeps)
        return _side(sorted([*self._received, own]), self._filled, self.size)

    @cached_property
    def padded_sends(self) -> Side:
        """What the rank sends, in parts of one size."""
        return _side(_boxed(self.exchange.sends), self.tile, self.size, self.exchange.padded)

    @cached_property
    def padded_receives(self) -> Side:
        """What the rank receives, in parts of one size."""
        return _side(self._received, self._filled, self.size, self.exchange.padded)

    @cached_property
    def keeps(self) -> tuple[Region, ...]:
        """Where what the rank keeps comes to lie."""
        return self._on_layer(self.exchange.layer, tuple([box for _, box in self.exchange.copies]))

    @cached_property
    def is_balanced(self) -> bool:
        """Whether as many elements go to each rank as come from each, what the rank keeps included."""
        return len({*self.sends_all.counts, *self.receives_all.counts}) == 1

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return len(self.exchange.ranks)

    @property
    def _received(self) -> tuple[Boxed, ...]:
        received = self.exchange.receives
        if self.kind != "reduce_move":
            return _boxed(received)
        return tuple([(t.peer, self._on_layer(t.layer, t.regions)) for t in received if t.regions])

    @property
    def _filled(self) -> Shape:
        return (self.exchange.layers, *self.shape) if self.kind == "reduce_move" else self.shape

    def _on_layer(self, layer: int, boxes: tuple[Region, ...]) -> tuple[Region, ...]:
        return tuple(((layer, layer + 1), *box) for box in boxes) if self.kind == "reduce_move" else boxes


def _boxed(messages: Sequence[Message]) -> tuple[Boxed, ...]:
    return tuple([(message.peer, message.regions) for message in messages if message.regions])


class Task(NamedTuple):
    """A step as this rank carries it out: what it does at a `unit`, times `multiples`.

    `tile` and `shape` have one dim for each factor; `merged` is `shape` with the dims of the tensor. Numbers are
    symbols where sizes are symbolic.
    """

    step: Step
    unit: Unit
    multiples: Shape
    tile: Shape
    shape: Shape
    merged: Shape

    @property
    def padded(self) -> int:
        """The size of the parts of a collective whose parts have one size."""
        return self.unit.exchange.padded * math.prod(self.multiples)

    @property
    def copies(self) -> list[tuple[Region, Region]]:
        """What the rank keeps: boxes of its tile, and those where they come to lie."""
        pairs = zip(self.unit.exchange.copies, self.unit.keeps, strict=True)
        return [(times(box, self.multiples), times(kept, self._over(kept))) for (box, _), kept in pairs]

    def at_sizes(self, side: Side) -> Laid:
        """A side of the unit at the sizes of the task."""
        return side.times(self._over(side.shape))

    def _over(self, dims: Sequence[object]) -> Shape:
        """The multiples of so many dims: in a stack of tiles the first one is none of the tensor's."""
        return self.multiples if len(dims) == len(self.multiples) else (1, *self.multiples)


def _unit(step: Step) -> Unit:
    """A step on a tensor of the shape `step.unit`."""
    opened = replace(step.opened, shape=step.unit)
    before, after = _held(opened.input_shape()), _held(opened.output_shape())
    return Unit(step.kind, step.rank, before, after, step.opened.exchange_at_unit(step.rank))


def task_of(program: Program, at: int, tile: Shape | None) -> Task:
    """A step on this rank, for the program's own sizes; or for a tile of sizes that vary."""
    step = program.plan.steps[at]
    unit = program.own.units[at]
    assert unit is not None, "only what takes part is carried out"
    multiples = _multiples(step, unit, program.shape or step.shape, tile)
    before, after = _larger(unit.tile, multiples), _larger(unit.shape, multiples)
    if step.opened is step or len(after) < len(multiples):  # a rank that leaves with nothing
        return Task(step, unit, multiples, before, after, after)
    ends = [0, *accumulate(map(len, step.factors))]
    merged = tuple([math.prod(after[slice(*of)]) for of in pairwise(ends)])
    return Task(step, unit, multiples, before, after, merged)


def _larger(shape: Shape, multiples: Shape) -> Shape:
    """A shape so many times as large along each dim; nothing stays nothing, whatever the dims of the tensor."""
    return tuple(map(operator.mul, shape, multiples)) if len(shape) == len(multiples) else shape


def _multiples(step: Step, unit: Unit, shape: Shape, tile: Shape | None) -> Shape:
    """How many times as large as the unit each factor of a tensor of `shape` is; or of one whose tile is given."""
    found: list[int] = []
    for dim, (sizes, size) in enumerate(zip(step.factors, shape, strict=True)):
        if tile is None or len(sizes) > 1:
            whole = sizes if len(sizes) > 1 else (size,)
            found.extend([each // (least or 1) for each, least in zip(whole, step.unit[len(found) :], strict=False)])
        else:
            least = unit.tile[len(found)]
            found.append(tile[dim] // least if least else 1)
    return tuple(found)


def _held(shape: Shape | None) -> Shape:
    """The shape of a tile; that of nothing for a rank that has none."""
    return (0,) if shape is None else shape


def _slice(task: Task, eager: bool) -> Run:
    """A copy of what the rank keeps: a view would hold on to all of the source, and share its memory."""
    shape = task.shape
    boxes = [(slices_of(source), slices_of(target)) for source, target in task.copies]
    if len(boxes) == 1:
        only = boxes[0][0]
        cut = [dim for dim, (box, size) in enumerate(zip(only, task.tile, strict=True)) if box != slice(0, size)]
        if eager and len(cut) == 1:
            (dim,), (start, stop) = cut, task.copies[0][0][cut[0]]
            length = stop - start
            return lambda x: torch.narrow_copy(x, dim, start, length)  # half the time of a view and a copy
        return lambda x: x[only].clone(memory_format=torch.contiguous_format)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(shape)
        for source, target in boxes:
            out[target].copy_(x[source])
        return out

    return run


def _all_reduce(step: Step, link: Communicator, owned: bool) -> Run:
    op, divisor, reduce = step.op or "sum", step.divisor, link.all_reduce
    return lambda x: reduce(x, op, owned, divisor)


def _all_gather(task: Task, link: Communicator) -> Run:
    shape, padded, gather = task.shape, task.padded, link.all_gather
    if task.step.flat:
        return lambda x: gather(x, shape)
    mine = math.prod(task.tile)
    everything = (task.unit.size * padded,)
    unpack = unpacker(task.at_sizes(task.unit.padded_receives).places, shape)
    if mine == padded:
        return lambda x: unpack(gather(x, everything))

    def run(x: torch.Tensor) -> torch.Tensor:
        row = x.new_empty(padded)
        row[:mine].copy_(x.view(-1))
        return unpack(gather(row, everything))

    return run


def _reduce_scatter(task: Task, link: Communicator) -> Run:
    step, shape, padded = task.step, task.shape, task.padded
    op, divisor, scatter = step.op or "sum", step.divisor, link.reduce_scatter
    pack = packer(task.at_sizes(task.unit.padded_sends).places, task.tile, task.unit.size * padded)
    count = math.prod(shape)
    if count == padded:
        return lambda x: scatter(pack(x), op, shape, divisor)
    return lambda x: scatter(pack(x), op, (padded,), divisor)[:count].view(shape)


def _reduce_by_exchange(task: Task, link: Communicator) -> Run:
    """A reduce-scatter as an exchange of the parts and a local reduction in the order of the group."""
    sends, layers, shape, even = task.at_sizes(task.unit.sends), task.unit.size, task.shape, task.step.is_even
    pack = packer(sends.places, task.tile, sum(sends.counts))
    given, got = (None, None) if even else (sends.counts, [math.prod(shape)] * layers)
    move, reduce, stack = link.all_to_all, _local_reduction(task.step, layers), (layers, *shape)
    return lambda x: reduce(move(pack(x), got, given, stack))


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


def _reduce_move(task: Task, link: Communicator) -> Run:
    """As a move, into a stack of one tile for each layer, which is then reduced."""
    collect, reduce = _exchanged(task, link), _local_reduction(task.step, task.unit.exchange.layers)
    return lambda x: reduce(collect(x))


def _exchanged(task: Task, link: Communicator) -> Run:
    """Boxes of the tile sent, boxes of the result received, and the rank's own boxes copied.

    Where it makes both sides regular, what the rank keeps goes through the collective as well: then
    there is at most one strided copy on either side, and often none. Where all counts are equal it
    must, on all ranks alike: backends have another algorithm for that.
    """
    unit = task.unit
    # Between even tiles the counts of one rank are, in another order, those of every other.
    alike = task.step.is_even and unit.is_balanced
    every_send, every_receive = task.at_sizes(unit.sends_all), task.at_sizes(unit.receives_all)
    regular = not isinstance(every_send.places, Boxes) and not isinstance(every_receive.places, Boxes)
    if alike or regular:
        return _all_through(link, every_send, every_receive, alike)
    sends, receives = task.at_sizes(unit.sends), task.at_sizes(unit.receives)
    pack = packer(sends.places, sends.shape, sum(sends.counts))
    fill = filler(receives.places, receives.shape)
    given, got, shape, move = sends.counts, receives.counts, receives.shape, link.all_to_all
    count = (sum(got),)
    copies = [(slices_of(source), slices_of(target)) for source, target in task.copies]

    def run(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(shape)
        fill(out, move(pack(x), got, given, count))
        for source, target in copies:
            out[target].copy_(x[source])
        return out

    return run


def _all_through(link: Communicator, sends: Laid, receives: Laid, alike: bool) -> Run:
    """An exchange through which everything goes, what the rank keeps as well."""
    shape, move = receives.shape, link.all_to_all
    pack = packer(sends.places, sends.shape, sum(sends.counts))
    given, got = (None, None) if alike else (sends.counts, receives.counts)
    if isinstance(receives.places, packing.Run):
        return lambda x: move(pack(x), got, given, shape)
    count, unpack = (sum(receives.counts),), unpacker(receives.places, shape)
    return lambda x: unpack(move(pack(x), got, given, count))
