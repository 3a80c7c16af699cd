"""Programs: plans as functions from this rank's tile to this rank's tile.

A plan says which boxes go where; a program is that with everything found beforehand: groups, counts,
where boxes lie in memory, buffers' shapes. One call of it is

    pack -> collective -> unpack        for each step of the plan

where packing and unpacking are views as often as memory allows (see `packing`). A program takes and
gives contiguous tensors, and knows nothing of gradients. It has no sizes of its own: it is for every shape that its
steps cut as evenly, and what it is for one of them, `BoundProgram` says, by numbers or by symbols.

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
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from axes.algebra.chunks import tile_shape
from axes.algebra.errors import ShardingError
from axes.algebra.plan import Cuts, Plan, cuts_of
from axes.algebra.planning.boxes import Region
from axes.algebra.planning.exchange import Exchange
from axes.algebra.planning.step import Step
from axes.algebra.sharding import Sharding
from axes.algebra.universe import Universe
from axes.runtime import packing, torch_private
from axes.runtime.agreement import ranks_text
from axes.runtime.check import in_part
from axes.runtime.communicator import REDUCED, Communicator, communicator, recorded_communicator
from axes.runtime.packing import (
    Boxes,
    Part,
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
class Prepared:
    """A plan, made ready for one rank, dtype and device, for tensors of every shape that its steps cut alike.

    plan: at the smallest of these shapes, of which the others are multiples. stages: how a tensor lies on its way.
    is_only: whether there is no other plan that is cheaper at other sizes.
    group_of: the group of a step, None where this rank doesn't communicate in it; made at first use.
    device_type: where tensors are, which says what backend serves them.
    comm_dtype: in which dtype values travel and are reduced, where that isn't their own.
    """

    plan: Plan
    stages: tuple[Sharding, ...]
    is_only: bool
    dtype: torch.dtype
    group_of: Callable[[Step], dist.ProcessGroup | None]
    device_type: str
    comm_dtype: torch.dtype | None = None

    @cached_property
    def cuts(self) -> Cuts:
        """Into what the steps cut a tensor."""
        return cuts_of(*self.stages)

    @cached_property
    def groups(self) -> tuple[dist.ProcessGroup | None, ...]:
        """The group of each step."""
        return tuple(self.group_of(step) for step in self.plan.steps)

    @cached_property
    def steps(self) -> dict[int, LocalStep]:
        """The steps in which this rank takes part, by number."""
        return {at: local_step(step) for at, step in enumerate(self.plan.steps) if step.takes_part(step.rank)}

    @cached_property
    def backend(self) -> str:
        """What serves the groups: "gloo", "nccl"; nothing where nothing is sent."""
        group = next((group for group in self.groups if group is not None), None)
        if group is None:
            return ""
        return torch_private.served_devices(str(dist.get_backend(group))).get(self.device_type, "")

    @cached_property
    def tile(self) -> Shape:
        """This rank's tile of a tensor of the plan's shape; that of nothing for a rank that has none."""
        return held_shape(self.plan.source, self.plan.shape, self.plan.rank)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.plan.steps

    @cached_property
    def sends(self) -> bool:
        """Whether some rank sends something."""
        return any(step.kind != "slice" for step in self.plan.steps)

    def multiples(self, shape: Shape, tile: Shape | None = None) -> Shape:
        """How many times as large as the plan's shape a tensor of `shape` is; or its tile, where that is given.

        What no step cuts may be uneven: then that is what this rank has of it.
        """
        least = self.plan.shape
        if tile is None:
            if not any(map(operator.mod, shape, [size or 1 for size in least])):
                return tuple([size // (whole or 1) or 1 for size, whole in zip(shape, least, strict=True)])
            tile = held_shape(self.plan.source, shape, self.plan.rank)
        nothing = (0,) * len(shape)
        held, own = (each if len(each) == len(shape) else nothing for each in (tile, self.tile))
        sizes = zip(shape, least, held, own, strict=True)
        return tuple([mine // one if one else size // (whole or 1) or 1 for size, whole, mine, one in sizes])


def held_shape(source: Sharding, shape: Shape, rank: int) -> Shape:
    """The shape of a rank's tile; that of nothing where it has none."""
    held = source.tile(shape, rank)
    return (0,) if held is None else tile_shape(held)


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """A prepared plan for tensors of one shape, whose sizes may be symbolic."""

    program: Prepared
    shape: Shape

    @cached_property
    def tile(self) -> Shape:
        """This rank's tile, of numbers."""
        return held_shape(self.program.plan.source, self.shape, self.program.plan.rank)

    @cached_property
    def eager(self) -> Run:
        """The program as a function of the contiguous tile."""
        return _compiled(self, None, True)

    @cached_property
    def form(self) -> Callable[[bool, bool], Run]:
        """`form(eager, recorded)`: that, or of functional collectives; each of its collectives in the trace, or not."""
        return functools.lru_cache(maxsize=4)(functools.partial(_compiled, self, None))

    def traced_at(self, tile: Shape) -> Run:
        """The program of functional collectives, for a tile whose sizes may be symbolic."""
        return _compiled(self, tile, False)

    @property
    def said(self) -> str:
        """What it does, as errors and traces show it."""
        return f"{self.program.plan.source} -> {self.program.plan.target} of {self.tensor}"

    @property
    def tensor(self) -> str:
        """The whole shape, the dtype, and in which other one it travels."""
        program = self.program
        wire = "" if program.comm_dtype in (None, program.dtype) else f", moved as {name_of(program.comm_dtype)}"
        return f"{list(self.shape)} {program.plan.dtype}{wire}"

    @cached_property
    def lends(self) -> bool:
        """Whether what is sent last is the memory of the tile: until it has arrived nobody may change that."""
        program = self.program
        sending = [at for at in program.steps if program.groups[at] is not None]
        if not sending or sending[-1] != min(program.steps) or program.comm_dtype not in (None, program.dtype):
            return False
        task = task_of(program.steps[sending[-1]], program.multiples(self.shape))
        if task.step.kind == "all_gather":
            return math.prod(task.tile) == task.padded
        # What the rank keeps may go through the collective as well.
        sides = [task.step.side("sends", kept=kept) for kept in (False, True)]
        views = [isinstance(task.laid(side).places, packing.Run) for side in sides]
        return task.step.kind != "all_reduce" and any(views)


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


def _compiled(made: BoundProgram, tile: Shape | None, eager: bool, recorded: bool = False) -> Run:
    stages: list[Run] = []
    program = made.program
    steps, groups, wire, owned = program.plan.steps, program.groups, program.dtype, False
    sending = [at for at, group in enumerate(groups) if group is not None]
    if steps and steps[0].source.universe.position(steps[0].rank) is None:
        # A rank that has no part of the source comes with nothing, whatever torch calls a part of a scalar there.
        stages.append(lambda x: x.new_empty(0))
    multiples = program.multiples(made.shape, tile) if steps else ()
    for at, step in program.steps.items():
        if at in sending[:1] and program.comm_dtype not in (None, wire):
            wire, owned = program.comm_dtype or wire, True
            stages.append(_cast(wire))
        stages.append(_stage(made, task_of(step, multiples), at, eager, wire, owned, recorded))
        owned = groups[at] is not None
        if at in sending[-1:] and wire is not program.dtype:
            wire = program.dtype
            stages.append(_cast(wire))
    return _chained(stages)


def _cast(dtype: torch.dtype) -> Run:
    return lambda x: x.to(dtype)


def _chained(stages: Sequence[Run]) -> Run:
    """One after the other."""

    def then(one: Run, two: Run) -> Run:
        return lambda x: two(one(x))

    return functools.reduce(then, stages) if stages else lambda x: x


def _stage(
    made: BoundProgram, task: Task, at: int, eager: bool, dtype: torch.dtype, owned: bool, recorded: bool
) -> Run:
    program, step = made.program, made.program.plan.steps[at]
    group = program.groups[at]
    about = _about(made, at, group, eager, dtype) if recorded and group is not None else None
    run = _run(program, task, group, eager, dtype, owned, about)
    if group is not None and program.groups.count(None) < len(program.groups) - 1:
        run = in_part(functools.partial(part_text, step, group), run)
    if task.step.grouped is None:
        return run
    tile, merged = task.tile, task.shape
    if len(merged) == len(task.multiples):  # a rank that leaves with nothing has no dims
        ends = [0, *accumulate(task.step.grouped)]
        merged = tuple([math.prod(merged[slice(*of)]) for of in pairwise(ends)])
    return lambda x: run(x.view(tile)).view(merged)


def part_text(step: Step, group: dist.ProcessGroup) -> str:
    """A step as errors show it."""
    axes = f" over '{' '.join(step.axes)}'" if step.axes else ""
    return f"{step.kind}{axes} of {ranks_text(Universe.of(dist.get_process_group_ranks(group)).ranks)}"


def _about(made: BoundProgram, at: int, group: dist.ProcessGroup, eager: bool, dtype: torch.dtype) -> Operation:
    """A step as a trace has it."""
    steps = made.program.plan.steps
    sending = [i for i, step in enumerate(steps) if step.kind != "slice"]
    ranks = Universe.of(dist.get_process_group_ranks(group)).ranks
    step, axis = steps[at], " ".join(steps[at].axes) or "both meshes"
    return Operation(
        *(made.said, step.kind, "", axis, str(group.group_name), ranks, name_of(dtype), made.program.device_type),
        step=(sending.index(at) + 1, len(sending)),
        later=not eager,
    )


def name_of(dtype: torch.dtype | None) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _run(
    program: Prepared,
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
    if step.kind == "reduce_scatter" and program.backend == "gloo" and eager:
        return _reduce_by_exchange(task, link)
    makers = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "reduce_move": _reduce_move}
    return makers.get(step.kind, _exchanged)(task, link)


# --- steps ----------------------------------------------------------------------------------------


class Side(NamedTuple):
    """What a rank sends, or receives: boxes of a tile of `shape`, `counts[i]` elements for rank i.

    places: a `Lattice` or `Boxes`; at the sizes of a task where these lie in memory, a `Run`, `Grid` or `Boxes`.
    """

    places: Any
    shape: Shape
    counts: list[int]

    def times(self, multiples: Shape) -> Side:
        """The same in a tile whose sizes are so many times larger, and where that lies in memory."""
        shape, more = tuple(map(operator.mul, self.shape, multiples)), math.prod(multiples)
        return Side(self.places.within(shape, multiples), shape, [count * more for count in self.counts])


@dataclass(frozen=True, eq=False)
class LocalStep:
    """A step as this rank carries it out on a small tensor, whose multiples it carries out in the same way.

    `tile` and `shape`, before and after, have one dim for each factor, as the boxes do. grouped: how many factors the
    dims have; None where each has one.
    """

    kind: str
    rank: int
    op: str | None
    divisor: int
    is_even: bool
    grouped: tuple[int, ...] | None
    tile: Shape
    shape: Shape
    exchange: Exchange

    @cached_property
    def side(self) -> Callable[..., Side]:
        """What the rank "sends" of its tile, or "receives" of its new one: of the stack that a `reduce_move` reduces.

        `side("sends", kept=True)` is with what it keeps, `padded=True` in parts of one size.
        """
        return functools.lru_cache(maxsize=8)(self._side)

    def _side(self, end: Literal["sends", "receives"], kept: bool = False, padded: bool = False) -> Side:
        exchange, comes = self.exchange, end == "receives"
        messages = exchange.receives if comes else exchange.sends
        boxed = [(m.peer, self._on_layer(m.layer, m.regions) if comes else m.regions) for m in messages if m.regions]
        if kept:
            mine = self.keeps if comes else tuple([box for box, _ in exchange.copies])
            boxed = sorted([*boxed, (exchange.ranks.index(self.rank), mine)])
        counts, parts, lengths, start = [0] * self.size, list[Part](), list[int](), 0
        for peer, boxes in boxed:
            start = peer * exchange.padded if padded else start
            for box in boxes:
                parts.append((start, box))
                lengths.append(count := elements_of(box))
                start += count
                counts[peer] += count
        stacked = comes and self.kind == "reduce_move"
        shape = (exchange.layers, *self.shape) if stacked else self.shape if comes else self.tile
        return Side(arranged(parts, lengths) if parts else Boxes(()), shape, counts)

    @cached_property
    def keeps(self) -> tuple[Region, ...]:
        """Where what the rank keeps comes to lie."""
        return self._on_layer(self.exchange.layer, tuple([box for _, box in self.exchange.copies]))

    @cached_property
    def is_balanced(self) -> bool:
        """Whether as many elements go to each rank as come from each, what the rank keeps included."""
        return len({count for end in ("sends", "receives") for count in self.side(end, kept=True).counts}) == 1

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return len(self.exchange.ranks)

    def _on_layer(self, layer: int, boxes: tuple[Region, ...]) -> tuple[Region, ...]:
        return tuple(((layer, layer + 1), *box) for box in boxes) if self.kind == "reduce_move" else boxes


def local_step(step: Step) -> LocalStep:
    """A step on this rank, of a tensor of the step's own shape."""
    opened, own = step.opened, step.rank
    grouped = None if opened is step else tuple(map(len, step.factors))
    tiles = held_shape(opened.source, opened.shape, own), held_shape(opened.target, opened.shape, own)
    return LocalStep(step.kind, own, step.op, step.divisor, step.is_even, grouped, *tiles, step.exchange())


class Task(NamedTuple):
    """A step as this rank carries it out on a tensor that is `multiples` times as large; symbols where sizes are."""

    step: LocalStep
    multiples: Shape
    tile: Shape
    shape: Shape

    @property
    def padded(self) -> int:
        """The size of the parts of a collective whose parts have one size."""
        return self.step.exchange.padded * math.prod(self.multiples)

    @property
    def copies(self) -> list[tuple[Region, Region]]:
        """What the rank keeps: boxes of its tile, and those where they come to lie."""
        pairs = zip(self.step.exchange.copies, self.step.keeps, strict=True)
        return [(times(box, self.multiples), times(kept, self._over(kept))) for (box, _), kept in pairs]

    def laid(self, side: Side) -> Side:
        """A side of the step at the sizes of the task."""
        return side.times(self._over(side.shape))

    def _over(self, dims: Sequence[object]) -> Shape:
        """The multiples of so many dims: in a stack of tiles the first one is none of the tensor's."""
        return self.multiples if len(dims) == len(self.multiples) else (1, *self.multiples)


def task_of(step: LocalStep, multiples: Shape) -> Task:
    """A step for a tensor that is so many times as large along each dim; factors of groups are as they are."""
    if step.grouped is not None:
        pairs = zip(multiples, step.grouped, strict=True)
        multiples = tuple([one for many, count in pairs for one in ([many] if count == 1 else [1] * count)])
    return Task(step, multiples, _larger(step.tile, multiples), _larger(step.shape, multiples))


def _larger(shape: Shape, multiples: Shape) -> Shape:
    """A shape so many times as large along each dim; nothing stays nothing, whatever the dims of the tensor."""
    return tuple(map(operator.mul, shape, multiples)) if len(shape) == len(multiples) else shape


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


def _all_reduce(step: LocalStep, link: Communicator, owned: bool) -> Run:
    op, divisor, reduce = step.op or "sum", step.divisor, link.all_reduce
    return lambda x: reduce(x, op, owned, divisor)


def _all_gather(task: Task, link: Communicator) -> Run:
    shape, padded, gather, mine = task.shape, task.padded, link.all_gather, math.prod(task.tile)
    everything = (task.step.size * padded,)
    places = task.laid(task.step.side("receives", padded=True)).places
    if isinstance(places, packing.Run) and math.prod(shape) == everything[0]:
        return lambda x: gather(x, shape)
    unpack = unpacker(places, shape)
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
    pack = packer(task.laid(step.side("sends", padded=True)).places, task.tile, step.size * padded)
    count = math.prod(shape)
    if count == padded:
        return lambda x: scatter(pack(x), op, shape, divisor)
    return lambda x: scatter(pack(x), op, (padded,), divisor)[:count].view(shape)


def _reduce_by_exchange(task: Task, link: Communicator) -> Run:
    """A reduce-scatter as an exchange of the parts and a local reduction in the order of the group."""
    sends, layers, shape, even = task.laid(task.step.side("sends")), task.step.size, task.shape, task.step.is_even
    pack = packer(sends.places, task.tile, sum(sends.counts))
    given, got = (None, None) if even else (sends.counts, [math.prod(shape)] * layers)
    move, reduce, stack = link.all_to_all, _local_reduction(task.step, layers), (layers, *shape)
    return lambda x: reduce(move(pack(x), got, given, stack))


def _local_reduction(step: LocalStep, layers: int) -> Run:
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
    collect, reduce = _exchanged(task, link), _local_reduction(task.step, task.step.exchange.layers)
    return lambda x: reduce(collect(x))


def _exchanged(task: Task, link: Communicator) -> Run:
    """Boxes of the tile sent, boxes of the result received, and the rank's own boxes copied.

    Where it makes both sides regular, what the rank keeps goes through the collective as well: then
    there is at most one strided copy on either side, and often none. Where all counts are equal it
    must, on all ranks alike: backends have another algorithm for that.
    """
    step = task.step
    # Between even tiles the counts of one rank are, in another order, those of every other.
    alike = step.is_even and step.is_balanced
    every_send, every_receive = task.laid(step.side("sends", kept=True)), task.laid(step.side("receives", kept=True))
    regular = not isinstance(every_send.places, Boxes) and not isinstance(every_receive.places, Boxes)
    if alike or regular:
        return _all_through(link, every_send, every_receive, alike)
    sends, receives = task.laid(step.side("sends")), task.laid(step.side("receives"))
    pack = packer(sends.places, sends.shape, sum(sends.counts))
    fill = filler(receives.places)
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


def _all_through(link: Communicator, sends: Side, receives: Side, alike: bool) -> Run:
    """An exchange through which everything goes, what the rank keeps as well."""
    shape, move = receives.shape, link.all_to_all
    pack = packer(sends.places, sends.shape, sum(sends.counts))
    given, got = (None, None) if alike else (sends.counts, receives.counts)
    if isinstance(receives.places, packing.Run):
        return lambda x: move(pack(x), got, given, shape)
    count, unpack = (sum(receives.counts),), unpacker(receives.places, shape)
    return lambda x: unpack(move(pack(x), got, given, count))
