"""Programs: plans as functions from this rank's tile to this rank's tile.

A plan says which boxes go where; a program is that with everything found beforehand: groups, counts,
where boxes lie in memory, buffers' shapes. One call of it is

    pack -> collective -> unpack        for each step of the plan

where packing and unpacking are views as often as memory allows (see `packing`). A program takes and
gives contiguous tensors, and knows nothing of gradients. Its steps are found at the smallest shape that is cut as
evenly (`LocalStep`), and shared by the programs of all such shapes, of numbers or symbols.

In eager mode a program calls the methods of the `ProcessGroup`, at a third of the Python that functional
collectives cost. In a graph it is made of functional collectives, one node each; so it is for `async_op`,
where the last collective's result isn't waited for.

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
from typing import Any

import torch
import torch.distributed as dist

from axes.algebra.chunks import tile_shape
from axes.algebra.errors import ShardingError
from axes.algebra.layout import Universe
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Plan, Step
from axes.algebra.planning.exchange import Exchange, Message, ranks_of_both
from axes.algebra.sharding import Sharding
from axes.runtime import torch_private, watching
from axes.runtime.axis_groups import REDUCED, communicator, moved
from axes.runtime.groups import group_of, of_world
from axes.runtime.operation import Operation, heard
from axes.runtime.packing import Part, Shape, Side, arranged, elements_of, packer, unpacker

Run = Callable[[torch.Tensor], torch.Tensor]
Send = Callable[..., torch.Tensor]
"""A method of a `Communicator`."""

# --- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Program:
    """A plan as functions of this rank's contiguous tile of a tensor of one shape, whose sizes may be symbols.

    plan: for this rank, at the smallest shape that its steps cut alike, of which `shape` is a multiple. cuts: into how
    many pieces it cuts a tensor. is_only: whether there is no other plan that is cheaper at other sizes. comm_dtype: in
    which dtype values travel and are reduced, where that isn't their own.
    """

    plan: Plan
    cuts: Shape
    is_only: bool
    dtype: torch.dtype
    comm_dtype: torch.dtype | None
    shape: Shape

    @cached_property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.plan.stages

    @cached_property
    def eager(self) -> Run:
        """The plan by methods of process groups."""
        return self._at(None, eager=True)

    @cached_property
    def later(self) -> Run:
        """The same, whose last collective is waited for where its result is used."""
        return self._at(None, eager=False)

    def traced_at(self, tile: Shape) -> Run:
        """The plan as nodes of a graph, for a tile whose sizes may be symbols of their own."""
        return self._at(tile, eager=False)

    def _at(self, tile: Shape | None, eager: bool) -> Run:
        """The plan by methods of process groups or by functional collectives; in a graph, where there is a `tile`,
        nobody listens.
        """
        plan, wire, stages = self.plan, self.comm_dtype or self.dtype, list[Run]()
        sizes, least, device_type = self.shape, plan.shape, plan.source.mesh.binding.device_type
        if self.idle:
            return lambda x: x
        if plan.source.universe.position(plan.rank) is None:
            # A rank that has no part of the source comes with nothing, whatever torch calls a part of a scalar there.
            stages.append(lambda x: x.reshape(-1)[:0])
        elif tile is not None:
            sizes, least = tile, held_shape(plan.source, plan.shape, plan.rank)
        multiples = tuple([size // (one or 1) or 1 for size, one in zip(sizes, least, strict=True)])
        steps = local_steps(plan)
        sending = [step for step in steps if step.group is not None]
        for step in steps:
            how = tile is not None, step, *step.at(multiples)
            if step.group is None:
                # A copy of what the rank keeps: a view would hold on to all of the source, and share its memory.
                stages.append(_through(*how, lambda x, shape: x.view(shape), fresh=True))
                continue
            if step is sending[0] and wire is not self.dtype:
                stages.append(lambda x: x.to(wire))
            by = _method(step.step.kind, step.group, eager, device_type)
            send = getattr(communicator(step.group, wire, eager), by)
            if tile is None:
                send = functools.partial(_told, send, (self, step, by, wire, eager))
            # What a stage before has made may be written over.
            stages.append(_communicating(*how, by, send, owned=bool(stages)))
            if step is sending[-1] and wire is not self.dtype:
                stages.append(lambda x: x.to(self.dtype))
        return _chained(stages)

    @cached_property
    def operation(self) -> Operation:
        """What the ranks of the plan do together: all those of its meshes through this one."""
        plan = self.plan
        mesh, other = plan.source.mesh, plan.target.mesh
        if mesh.universe == other.universe:
            members = Universe.of(sorted(mesh.universe.group(mesh.extent, plan.rank))).ranks
        else:
            members = _union_of(mesh, other).universe.ranks
        return Operation(
            *(self.said, "redistribution", "", "", "", members, plan.dtype, mesh.binding.device_type),
            compared=f"{plan.fingerprint} of {self.tensor}" if plan.collectives else "",
            mesh=mesh,
        )

    @property
    def said(self) -> str:
        """What it does, as errors and traces show it."""
        return f"{self.plan.source} -> {self.plan.target} of {self.tensor}"

    @property
    def tensor(self) -> str:
        """The whole shape, the dtype, and in which other one it travels."""
        wire = "" if self.comm_dtype in (None, self.dtype) else f", moved as {name_of(self.comm_dtype)}"
        return f"{list(self.shape)} {self.plan.dtype}{wire}"


def _group(meshes: tuple[Mesh, Mesh], step: Step) -> dist.ProcessGroup | None:
    """The group of a step; None where nothing is sent, or nothing by this rank."""
    if step.kind == "slice":
        return None
    if step.layout is None:
        mesh = _union_of(*meshes)
        return group_of(mesh, mesh.layout_of_all, "union")
    mesh = next(mesh for mesh in meshes if mesh.universe == step.source.universe)
    if mesh.universe.position(step.rank) is None:
        return None
    return group_of(mesh, step.layout, " ".join(step.axes))


def _union_of(one: Mesh, two: Mesh) -> Mesh:
    """All ranks of two meshes as one axis, those of the first before the others."""
    return Mesh("union", ranks=ranks_of_both(one.universe, two.universe))._with(binding=one.binding)


def held_shape(source: Sharding, shape: Shape, rank: int) -> Shape:
    """The shape of a rank's tile; that of nothing where it has none."""
    held = source.tile(shape, rank)
    return (0,) if held is None else tile_shape(held)


def check_dtypes(plan: Plan, dtype: torch.dtype, comm_dtype: torch.dtype | None) -> None:
    """Raise `ShardingError` where the plan reduces in a dtype in which that can't be done."""
    wire = dtype if comm_dtype is None else comm_dtype
    wider = torch.complex64 if dtype.is_complex else torch.float32 if dtype.is_floating_point else torch.int64
    if not _holds(wire, dtype):
        raise ShardingError(
            f"comm_dtype={comm_dtype} can't hold the values of {dtype}; use one of the same kind, like {wider}"
        )
    for step in plan.steps:
        # Every backend reduces these, as they are or as another dtype that holds their values.
        is_served = (
            wire in REDUCED or (wire.is_complex and step.op == "sum") or (wire is torch.bool and step.op != "sum")
        )
        if step.op is not None and not is_served:
            raise ShardingError(
                f"{wire} isn't reduced by every backend: a {step.op} over '{' '.join(step.axes)}' needs "
                f"comm_dtype={wider}, as axes.reshard(x, {str(plan.target)!r}, comm_dtype={wider})\n"
                f"  source  {plan.source}\n  target  {plan.target}"
            )


def _holds(wire: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether values may travel in a dtype: of floats in any floats, rounded; of integers in no smaller ones."""
    same = wire.is_complex == dtype.is_complex and wire.is_floating_point == dtype.is_floating_point
    inexact = dtype.is_complex or dtype.is_floating_point
    return same and (inexact or wire is dtype or (wire is not torch.bool and wire.itemsize >= dtype.itemsize))


def _method(kind: str, group: dist.ProcessGroup, eager: bool, device_type: str) -> str:
    """The collective that carries a step out."""
    if kind == "reduce_scatter" and eager:
        # Over gloo an exchange and a sum on this rank take less than half the time of its own reduce-scatter.
        served = torch_private.served_devices(str(dist.get_backend(group)))
        return "all_to_all" if served.get(device_type, "") == "gloo" else kind
    return kind if kind in ("all_gather", "all_reduce", "reduce_scatter") else "all_to_all"


def _told(send: Send, about: tuple[Any, ...], x: torch.Tensor, *how: Any) -> torch.Tensor:
    """`send(x, *how)`, of which listeners hear."""
    return heard(_operation(*about, x.numel(), *how), send, x, *how) if watching.listeners else send(x, *how)


@of_world(4096)
def _operation(
    made: Program, local: LocalStep, by: str, dtype: torch.dtype, eager: bool, elements: int, *how: Any
) -> Operation:
    """The collective of a step, as a trace has it."""
    every, group = [step for step in made.plan.steps if step.kind != "slice"], local.group
    assert group is not None, "it sends something"
    ranks = Universe.of(dist.get_process_group_ranks(group)).ranks
    counts, op = how[:2] if by == "all_to_all" else (), local.step.op or "sum"
    sides = moved(by, elements, dtype, op, len(ranks), group.rank(), *counts)
    axis = " ".join(local.step.axes) or "both meshes"
    return Operation(
        *(made.said, local.step.kind, by, axis, str(group.group_name), ranks, name_of(dtype)),
        made.plan.source.mesh.binding.device_type,
        step=(every.index(local.step) + 1, len(every)),
        bytes_in=sides[0],
        bytes_out=sides[1],
        later=not eager,
    )


def _chained(stages: Sequence[Run]) -> Run:
    """One after the other."""

    def then(one: Run, two: Run) -> Run:
        return lambda x: two(one(x))

    return functools.reduce(then, stages) if stages else lambda x: x


def name_of(dtype: torch.dtype | None) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


# --- steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LocalStep:
    """A step as this rank carries it out on a small tensor, whose multiples it carries out in the same way.

    group: None where nothing is sent. shape: of the new tile. sends, receives: boxes of the tiles before and after,
    with a dim for each factor; after a `reduce_move` of the stack of `layers` tiles that it reduces.
    """

    step: Step
    group: dist.ProcessGroup | None
    layers: int
    shape: Shape
    sends: Side
    receives: Side

    def at(self, multiples: Shape) -> tuple[Shape, Shape]:
        """The multiples of the factors by those of the dims, and the shape of the new tile.

        The factors of a group are as they are, and a rank that has nothing has nothing at every size.
        """
        pairs, shape = zip(multiples, self.step.factors, strict=True), self.shape
        many = [each for more, sizes in pairs for each in ([more] if len(sizes) == 1 else [1] * len(sizes))]
        larger = tuple(map(operator.mul, shape, multiples)) if len(shape) == len(multiples) else shape
        return tuple(many), larger

    @property
    def is_balanced(self) -> bool:
        """Whether each rank sends as much to each rank as it gets from each, itself included."""
        # Between even tiles the counts of one rank are, in another order, those of every other.
        return self.step.is_even and len({*self.sends.counts, *self.receives.counts}) == 1


@of_world(4096)
def local_steps(plan: Plan) -> tuple[LocalStep, ...]:
    """The steps of a plan in which its rank takes part. Their groups are made at first use."""
    meshes = plan.source.mesh, plan.target.mesh
    return tuple([local_step(step, _group(meshes, step)) for step in plan.steps if step.takes_part(step.rank)])


def local_step(step: Step, group: dist.ProcessGroup | None) -> LocalStep:
    """A step on this rank, of a tensor of the step's own shape."""
    opened, exchange = step.opened, step.exchange()
    tile, shape = (held_shape(end, opened.shape, step.rank) for end in (opened.source, opened.target))
    after = shape if opened is step else held_shape(step.target, step.shape, step.rank)
    # What a rank keeps goes through an exchange like the rest: so the boxes are as regular as they can be.
    here, kept = exchange.ranks.index(step.rank), zip(*exchange.copies, strict=True)
    own = [Message(here, boxes, 0, exchange.layer) for boxes in kept]
    sends, receives = sorted([*exchange.sends, *own[:1]]), sorted([*exchange.receives, *own[1:]])
    if step.kind == "reduce_move":
        receives = [m._replace(boxes=tuple([((m.layer, m.layer + 1), *box) for box in m.boxes])) for m in receives]
        shape = (exchange.layers, *shape)
    sides = _side(sends, tile, exchange), _side(receives, shape, exchange)
    return LocalStep(step, group, exchange.layers, after, *sides)


def _side(messages: Sequence[Message], shape: Shape, exchange: Exchange) -> Side:
    counts, parts, start = [0] * len(exchange.ranks), list[Part](), 0
    for number, message in enumerate(messages):
        start = number * exchange.padded or start
        for box in message.boxes:
            if count := elements_of(box):
                parts.append((start, box))
                start += count
                counts[message.peer] += count
    return Side(arranged(parts), shape, tuple(counts), len(messages) * exchange.padded or start)


def _communicating(
    in_graph: bool, local: LocalStep, multiples: Shape, shape: Shape, by: str, send: Send, owned: bool
) -> Run:
    """A tile packed, sent by a collective, and unpacked, with as few copies as can be, or none."""
    op, divisor, layers, kind = local.step.op or "sum", local.step.divisor, local.layers, local.step.kind
    if by == "all_reduce":
        return lambda x: send(x, op, owned, divisor)
    run = functools.partial(_through, in_graph, local, multiples)
    if by == "all_gather":
        return run(shape, send)
    if by == "reduce_scatter":
        return run(shape, lambda x, shape: send(x, op, shape, divisor))
    got = given = None
    if not (kind == "reduce_scatter" or local.is_balanced):
        # Where all counts are equal, on all ranks alike, backends have another algorithm.
        more = math.prod(multiples)
        got, given = (tuple([n * more for n in side.counts]) for side in (local.receives, local.sends))
    if local.step.op is None:
        return run(shape, lambda x, shape: send(x, got, given, shape))
    reduce = _local_reduction(op, divisor)
    if kind == "reduce_scatter":
        return run(shape, lambda x, shape: reduce(send(x, None, None, (layers, *shape))))
    moved = run((layers, *shape), lambda x, shape: send(x, got, given, shape))
    return lambda x: reduce(moved(x))


def _through(
    in_graph: bool,
    local: LocalStep,
    multiples: Shape,
    shape: Shape,
    move: Callable[[torch.Tensor, Shape], torch.Tensor],
    fresh: bool = False,
) -> Run:
    """Packed, moved by what gives a tensor of a shape, and unpacked."""
    pack, unpack = packer(local.sends, multiples, in_graph, fresh), unpacker(local.receives, multiples, shape)
    if unpack is None:
        return lambda x: move(pack(x), shape)
    flat = (local.receives.size * math.prod(multiples),)
    return lambda x: unpack(move(pack(x), flat))


def _local_reduction(op: str, divisor: int) -> Run:
    """Reduces the first dim, in order; means of 16-bit floats in 32 bits."""
    if op != "sum":
        return lambda stack: getattr(stack, f"a{op}")(0)
    if divisor == 1:
        return lambda stack: stack.sum(0, dtype=stack.dtype)
    wide = {2: torch.float32}
    return lambda stack: stack.sum(0, dtype=wide.get(stack.dtype.itemsize)).div_(divisor).to(stack.dtype)
