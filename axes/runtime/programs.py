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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from axes.algebra.chunks import tile_shape
from axes.algebra.errors import ShardingError
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Cuts, Plan, cuts_of
from axes.algebra.planning.exchange import Exchange, Message, ranks_of_both
from axes.algebra.planning.step import Step
from axes.algebra.sharding import Sharding
from axes.algebra.universe import Universe
from axes.runtime import torch_private
from axes.runtime.agreement import ranks_text
from axes.runtime.communicator import REDUCED, Communicator, communicator, recorded_communicator
from axes.runtime.groups import group_of
from axes.runtime.packing import (
    Part,
    Shape,
    arranged,
    elements_of,
    is_run,
    laid,
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
    comm_dtype: in which dtype values travel and are reduced, where that isn't their own.
    """

    plan: Plan
    stages: tuple[Sharding, ...]
    is_only: bool
    dtype: torch.dtype
    comm_dtype: torch.dtype | None

    @cached_property
    def cuts(self) -> Cuts:
        """Into what the steps cut a tensor."""
        return cuts_of(*self.stages)

    @cached_property
    def groups(self) -> tuple[dist.ProcessGroup | None, ...]:
        """The group of each step, made at first use; None where this rank doesn't communicate in it."""
        meshes = self.plan.source.mesh, self.plan.target.mesh
        return tuple([_group(meshes, step) for step in self.plan.steps])

    @property
    def device_type(self) -> str:
        """Where tensors are, which says what backend serves them."""
        return self.plan.source.mesh.binding.device_type

    @cached_property
    def steps(self) -> dict[int, LocalStep]:
        """The steps in which this rank takes part, by number."""
        return {at: local_step(step) for at, step in enumerate(self.plan.steps) if step.takes_part(step.rank)}

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


def _group(meshes: tuple[Mesh, Mesh], step: Step) -> dist.ProcessGroup | None:
    """The group of a step; None where nothing is sent or this rank takes no part."""
    if step.kind == "slice" or not step.takes_part(step.rank):
        return None
    if step.layout is None:
        mesh = _union_of(*meshes)
        return group_of(mesh, mesh.layout_of_all, "union")
    mesh = next(mesh for mesh in meshes if mesh.universe == step.source.universe)
    if mesh.universe.position(step.rank) is None:
        return None
    return group_of(mesh, step.layout, " ".join(step.axes))


@functools.lru_cache(maxsize=64)
def _union_of(one: Mesh, two: Mesh) -> Mesh:
    """All ranks of two meshes as one axis, those of the first before the others."""
    return Mesh("union", ranks=ranks_of_both(one.universe, two.universe))._with(binding=one.binding)


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

    @cached_property
    def operation(self) -> Operation:
        """What the ranks of the program do together: all those of its meshes through this one."""
        program, made = self.program, self.program.plan
        meshes = made.source.mesh, made.target.mesh
        lines = [
            mesh.universe.line(mesh.extent, made.rank)
            for mesh in meshes
            if mesh.universe.position(made.rank) is not None
        ]
        members: Sequence[int] = sorted({rank for line in lines for rank in line})
        if meshes[0].universe != meshes[1].universe:
            members = sorted(_union_of(*meshes).universe.ranks)
        named = (
            self.said,
            "redistribution",
            "",
            "",
            "",
            Universe.of(members).ranks,
            program.plan.dtype,
            program.device_type,
        )
        compared = f"{made.fingerprint} of {self.tensor}" if program.sends else ""
        return Operation(*named, compared=compared, mesh=meshes[0], part=self._collectives)

    def _collectives(self) -> str:
        """The collectives of this rank's, as errors show them."""
        steps = zip(self.program.plan.steps, self.program.groups, strict=True)
        return " or ".join(part_text(step, group) for step, group in steps if group is not None)

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
    program, stages = made.program, list[Run]()
    steps, groups, wire = program.plan.steps, program.groups, program.comm_dtype or program.dtype
    sending = [at for at, group in enumerate(groups) if group is not None]
    if steps and steps[0].source.universe.position(steps[0].rank) is None:
        # A rank that has no part of the source comes with nothing, whatever torch calls a part of a scalar there.
        stages.append(lambda x: x.new_empty(0))
    multiples = program.multiples(made.shape, tile) if steps else ()
    for at, step in program.steps.items():
        group, many = groups[at], step.opened(multiples)
        if group is None:
            stages.append(_slice(step, many, eager))
            continue
        if at == sending[0] and wire is not program.dtype:
            stages.append(lambda x: x.to(wire))
        how = group, wire, eager
        link = recorded_communicator(*how, _about(made, at, *how)) if recorded else communicator(*how)
        # Over gloo an exchange and a sum on this rank take less than half the time of its own reduce-scatter.
        by_exchange = eager and step.kind == "reduce_scatter" and _is_gloo(group, program.device_type)
        # What a stage before has made may be written over.
        run = _communicating(step, many, link, by_exchange, owned=bool(stages))
        stages.append(run)
        if at == sending[-1] and wire is not program.dtype:
            stages.append(lambda x: x.to(program.dtype))
    return _chained(stages)


def _is_gloo(group: dist.ProcessGroup, device_type: str) -> bool:
    return torch_private.served_devices(str(dist.get_backend(group))).get(device_type, "") == "gloo"


def _chained(stages: Sequence[Run]) -> Run:
    """One after the other."""

    def then(one: Run, two: Run) -> Run:
        return lambda x: two(one(x))

    return functools.reduce(then, stages) if stages else lambda x: x


def part_text(step: Step, group: dist.ProcessGroup) -> str:
    """A step as errors show it."""
    axes = f" over '{' '.join(step.axes)}'" if step.axes else ""
    return f"{step.kind}{axes} of {ranks_text(Universe.of(dist.get_process_group_ranks(group)).ranks)}"


def _about(made: BoundProgram, at: int, group: dist.ProcessGroup, dtype: torch.dtype, eager: bool) -> Operation:
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


# --- steps ----------------------------------------------------------------------------------------


class Side(NamedTuple):
    """What a rank packs of a tile of `shape`, or unpacks into one: boxes, `counts[i]` elements for or from rank i.

    places: lattices of boxes; in a tile of another size grids of its memory. Each has where it begins in the buffer.
    size: of the buffer. is_padded: whether it has more than the boxes.
    """

    places: Sequence[tuple[int, Any]]
    shape: Shape
    counts: list[int]
    size: int
    is_padded: bool

    def times(self, multiples: Shape) -> Side:
        """The same in a tile whose sizes are so many times larger, and where that lies in memory."""
        # In a stack of tiles the first dim is none of the tensor's.
        many = (1, *multiples) if len(self.shape) > len(multiples) else multiples
        shape = tuple(map(operator.mul, self.shape, many))
        places, more = laid(self.places, shape, many), math.prod(multiples)
        return Side(places, shape, [count * more for count in self.counts], self.size * more, self.is_padded)


@dataclass(frozen=True, eq=False)
class LocalStep:
    """A step as this rank carries it out on a small tensor, whose multiples it carries out in the same way.

    `tile` and `shape`, before and after, have one dim for each factor, as the boxes do. factors: how many of them the
    dims have; None where each has one. receives: of the stack of `layers` tiles that a `reduce_move` reduces.
    """

    kind: str
    op: str
    divisor: int
    layers: int
    is_even: bool
    factors: tuple[int, ...] | None
    tile: Shape
    shape: Shape
    sends: Side
    receives: Side

    def opened(self, multiples: Shape) -> Shape:
        """The multiples of the factors by those of the dims: the factors of a group are as they are."""
        if self.factors is None:
            return multiples
        pairs = zip(multiples, self.factors, strict=True)
        return tuple([one for many, count in pairs for one in ([many] if count == 1 else [1] * count)])

    def at(self, multiples: Shape) -> tuple[Side, Side, Shape]:
        """Both sides at the multiples of the factors, and the shape that is received."""
        shape = self.result(multiples)
        stacked = (self.layers, *shape) if self.kind == "reduce_move" else shape
        return self.sends.times(multiples), self.receives.times(multiples), stacked

    def result(self, multiples: Shape) -> Shape:
        """The shape of the new tile in the dims of the tensor, by the multiples of its factors."""
        shape = _larger(self.shape, multiples)
        if self.factors is None or len(shape) != len(multiples):  # a rank that leaves with nothing has no dims
            return shape
        ends = pairwise([0, *accumulate(self.factors)])
        return tuple([math.prod(shape[start:stop]) for start, stop in ends])

    @cached_property
    def is_balanced(self) -> bool:
        """Whether each rank sends as much to each rank as it gets from each, itself included."""
        # Between even tiles the counts of one rank are, in another order, those of every other.
        return self.is_even and len({*self.sends.counts, *self.receives.counts}) == 1


def local_step(step: Step) -> LocalStep:
    """A step on this rank, of a tensor of the step's own shape."""
    opened, exchange = step.opened, step.exchange()
    factors = None if opened is step else tuple(map(len, step.factors))
    tile, shape = (held_shape(end, opened.shape, step.rank) for end in (opened.source, opened.target))
    # What a rank keeps goes through an exchange like the rest: so the boxes are as regular as they can be.
    here, kept = exchange.ranks.index(step.rank), zip(*exchange.copies, strict=True)
    own = [Message(here, boxes, 0, exchange.layer) for boxes in kept]
    sends, receives = sorted([*exchange.sends, *own[:1]]), sorted([*exchange.receives, *own[1:]])
    stack = shape
    if step.kind == "reduce_move":
        receives = [m._replace(regions=tuple([((m.layer, m.layer + 1), *box) for box in m.regions])) for m in receives]
        stack = (exchange.layers, *shape)
    sides = _side(sends, tile, exchange), _side(receives, stack, exchange)
    how = step.kind, step.op or "sum", step.divisor, exchange.layers, step.is_even, factors
    return LocalStep(*how, tile, shape, *sides)


def _side(messages: Sequence[Message], shape: Shape, exchange: Exchange) -> Side:
    counts, parts, lengths, start = [0] * len(exchange.ranks), list[Part](), list[int](), 0
    for number, message in enumerate(messages):
        start = number * exchange.padded or start
        for box in message.regions:
            if count := elements_of(box):
                parts.append((start, box))
                lengths.append(count)
                start += count
                counts[message.peer] += count
    size, places = len(messages) * exchange.padded or start, arranged(parts, lengths) if parts else ()
    return Side(places, shape, counts, size, size > sum(counts))


def _larger(shape: Shape, multiples: Shape) -> Shape:
    """A shape so many times as large along each dim; nothing stays nothing, whatever the dims of the tensor."""
    return tuple(map(operator.mul, shape, multiples)) if len(shape) == len(multiples) else shape


def _slice(step: LocalStep, multiples: Shape, eager: bool) -> Run:
    """A copy of what the rank keeps: a view would hold on to all of the source, and share its memory."""
    tile, shape = _larger(step.tile, multiples), step.result(multiples)
    lattices = [lattice for _, lattice in step.sends.places]
    if len(lattices) != 1 or lattices[0].steps:
        return _through(*step.at(multiples), lambda x, shape: x.clone().view(shape))
    only = times(lattices[0].first, multiples)
    cut = [dim for dim, (box, size) in enumerate(zip(only, tile, strict=True)) if box != (0, size)]
    if eager and len(cut) == 1 and step.factors is None:
        dim, start, length = cut[0], only[cut[0]][0], shape[cut[0]]
        return lambda x: torch.narrow_copy(x, dim, start, length)  # half the time of a view and a copy
    box = slices_of(only)
    return lambda x: x.view(tile)[box].clone(memory_format=torch.contiguous_format).view(shape)


def _communicating(step: LocalStep, multiples: Shape, link: Communicator, by_exchange: bool, owned: bool) -> Run:
    """A tile packed, sent by a collective, and unpacked, with as few copies as can be, or none."""
    kind, op, divisor, layers = step.kind, step.op, step.divisor, step.layers
    if kind == "all_reduce":
        return lambda x: link.all_reduce(x, op, owned, divisor)
    (sends, receives, shape), reduce = step.at(multiples), _local_reduction(step)
    run = functools.partial(_through, sends, receives, shape)
    if kind == "all_gather":
        return run(link.all_gather)
    exchange, scatter = link.all_to_all, link.reduce_scatter
    if by_exchange:
        return run(lambda x, shape: reduce(exchange(x, None, None, (layers, *shape))))
    if kind == "reduce_scatter":
        return run(lambda x, shape: scatter(x, op, shape, divisor))
    # Where all counts are equal, on all ranks alike, backends have another algorithm.
    got, given = (None, None) if step.is_balanced else (receives.counts, sends.counts)
    moved = run(lambda x, shape: exchange(x, got, given, shape))
    return moved if kind != "reduce_move" else lambda x: reduce(moved(x))


def _through(sends: Side, receives: Side, shape: Shape, move: Callable[[torch.Tensor, Shape], torch.Tensor]) -> Run:
    """Packed, moved by what gives a tensor of a shape, and unpacked."""
    pack = packer(sends.places, sends.shape, sends.size)
    if is_run(receives.places) and not receives.is_padded:
        return lambda x: move(pack(x), shape)
    flat, unpack = (receives.size,), unpacker(receives.places, shape)
    return lambda x: unpack(move(pack(x), flat))


def _local_reduction(step: LocalStep) -> Run:
    """Reduces the first dim, in order; 16-bit floats in 32 bits."""
    op, divisor, layers = step.op, step.divisor, step.layers
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
