"""Redistribution of local tensors: this rank's tile of one sharding to its tile of another.

    local = redistribute(local, mesh.sharding("b s@tp d"), mesh.sharding("b s d@tp"), (8, 32, 64))

One look-up gives a `Program` for (source, target, shape, dtype); it packs, sends, unpacks. Nothing
happens where both shardings put the same data on the same ranks.

**Gradients.** A redistribution is a linear map (but for max and min), and its gradient is the
transposed map, which is a redistribution, too. What it is depends on what a gradient means, for each
axis:

- *local view*: backward differentiates the sum of all ranks' losses. The gradient of a replicated
  value is this rank's summand of it, so it is pending; the gradient of a pending value is replicated.
  Axes can be declared `same`: equal values *and* equal, whole gradients on every rank. Axes that
  neither side mentions are unknown: what differs along them is never compared, mixed or borrowed.
- *global view*: there is one loss and one gradient. That of a replicated value is replicated: every
  replicated axis is `same`. (A DTensor says of its gradient how it is sharded, and reduces nothing
  before it must: see `gradients`, which builds on this.)

So the two views are one rule with another set of `same` axes, and section by section the table of
gradients follows from it: split <-> split, replicated <-> pending, same <-> replicated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from axes.algebra.chunks import tile_shape
from axes.algebra.cost import CostModel
from axes.algebra.errors import MeshError, ShardingError, shown
from axes.algebra.layout import Layout, NamedLayout, digits
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Plan, even_choices, plan
from axes.algebra.planning.boxes import Region, regions
from axes.algebra.planning.step import Step
from axes.algebra.sharding import PendingReduction, Sharding
from axes.algebra.universe import Universe
from axes.runtime import flags
from axes.runtime.check import (
    compare_operation,
    raise_located,
    under_way,
    waited,
)
from axes.runtime.gradients import Same, of_shards, transposed
from axes.runtime.groups import current_world, group_of, of_world
from axes.runtime.linear import Kept, around, linear
from axes.runtime.packing import slices_of
from axes.runtime.programs import Program, check_dtypes, name_of, part_text
from axes.runtime.symbols import guard, is_symbolic, settled_sizes, stages_of
from axes.runtime.trace import Operation
from axes.runtime.transforms import PLAIN
from axes.runtime.writes import writable

Axes = tuple[NamedLayout, ...]
Shape = tuple[int, ...]
Dtypes: TypeAlias = torch.dtype | tuple[torch.dtype | None, torch.dtype | None] | None
"""`comm_dtype`: one for values and gradients, or one for each."""


def redistribute(
    local: torch.Tensor,
    source: Sharding,
    target: Sharding,
    shape: Sequence[int],
    *,
    view: Literal["global", "local"] = "global",
    comm_dtype: Dtypes = None,
    async_op: bool = False,
    source_same: Axes = (),
    target_same: Axes = (),
) -> torch.Tensor:
    """This rank's tile of `target`, from its tile of `source`, of a tensor whose whole shape is `shape`.

    The result may share memory with `local`, and is `local` where nothing has to be done.
    Differentiable; in the global view the gradient arrives with the target's splits, replicated over
    all other axes, and leaves so with the source's. `source_same` and `target_same` are axes that are
    `same` on that side, in the local view alone. `comm_dtype` is the dtype in which values travel and
    are reduced, or a pair for `(values, gradients)`. With `async_op` the result of the last
    collective is waited for at its first use.

    Raises `ShardingError` where `local` isn't the source's tile, or where nothing takes source to
    target; on every rank, before anything is sent.
    """
    shape, how = tuple(shape), (view, source_same, target_same, *both(comm_dtype))
    if is_symbolic(shape):
        return _move_of_symbols(source, target, shape, (local.dtype, *how), local.requires_grad).apply(local, async_op)
    return _move(source, target, shape, local.dtype, *how).of_tile(local.shape).apply(local, async_op)


def moves_of(
    source: Sharding,
    target: Sharding,
    shape: Shape,
    view: Literal["global", "local"],
    comm_dtype: Dtypes,
    source_same: Axes,
    target_same: Axes,
) -> Callable[[torch.dtype], Move]:
    """The moves of `redistribute` by dtype, for who holds them: they are looked up once, not on each call.

    Sizes are numbers. What holds the moves lives no longer than the world that they were made in.
    """
    how = view, source_same, target_same, *both(comm_dtype)
    return functools.lru_cache(maxsize=16)(lambda dtype: _move(source, target, shape, dtype, *how))


def pulled_back(
    gradient: torch.Tensor,
    source: Sharding,
    target: Sharding,
    shape: Sequence[int],
    *,
    view: Literal["global", "local"] = "global",
    comm_dtype: Dtypes = None,
    source_same: Axes = (),
    target_same: Axes = (),
) -> torch.Tensor:
    """The source's gradient from the target's: the transpose of `redistribute`, for what is linear. Differentiable."""
    shape, how = tuple(shape), (gradient.dtype, view, source_same, target_same, *both(comm_dtype))
    if is_symbolic(shape):
        return _move_of_symbols(source, target, shape, how, with_gradient=True).pull(gradient)
    return _move(source, target, shape, *how).pull(gradient)


def _move_of_symbols(
    source: Sharding, target: Sharding, shape: Shape, how: tuple[Any, ...], with_gradient: bool
) -> Move:
    """The move where sizes are symbolic."""
    return settled_sizes(
        shape,
        source.mesh.size,
        lambda numbers: _move(source, target, numbers, *how),
        lambda made: made.stages(with_gradient),
    )


@of_world(4096)
def _move(
    source: Sharding,
    target: Sharding,
    shape: Shape,
    dtype: torch.dtype,
    view: str,
    source_same: Axes,
    target_same: Axes,
    there: torch.dtype | None,
    back: torch.dtype | None,
) -> Move:
    """The move between two shardings."""
    source, target = source.at(shape), target.at(shape)
    if view == "global":
        if source_same or target_same:
            raise ShardingError("'same' is about gradients of plain tensors: it has no meaning in the global view")
        return Move(source, target, shape, dtype, (None, None), (there, back))
    source, target, same = of_shards(source, target, source_same, target_same)
    return Move(source, target, shape, dtype, same, (there, back))


def both(comm_dtype: Dtypes) -> tuple[torch.dtype | None, torch.dtype | None]:
    """`comm_dtype` for values and for gradients; `ShardingError` for what is neither a dtype nor two of them."""
    if comm_dtype is None:
        return None, None
    found = comm_dtype if isinstance(comm_dtype, tuple) else (comm_dtype, comm_dtype)
    if len(found) != 2 or not all(each is None or isinstance(each, torch.dtype) for each in found):
        raise ShardingError(f"comm_dtype is a torch.dtype, or two: for values and gradients; found {shown(comm_dtype)}")
    return found


def run(program: Program, local: torch.Tensor, async_op: bool = False) -> torch.Tensor:
    """The program on this rank's tile: eager on a plain tensor, traced where a graph is being made."""
    if type(local) not in PLAIN:
        local = waited(local)
    if type(local) in PLAIN:
        # What `collective` does, at no price where nobody listens: ranks compare the program, and listeners hear of its
        # steps.
        if flags.check:
            compare_operation(_operation(program))
        recorded, sent = flags.watched, local.contiguous()
        try:
            if async_op:
                sent = sent.clone() if sent is local and program.lends else sent
                later = program.recorded_later if recorded else program.traced
                return under_way(later(sent), _operation, program)
            return program.recorded(sent) if recorded else program.eager(sent)
        except RuntimeError as error:
            if not program.sends:
                raise
            raise_located(error, _operation, program)
    # A size that no step cuts may be any: the program is then for a stand-in of the whole, and not for this tile.
    tile = tuple(local.shape)
    traced = program.at_sizes(tile) if is_symbolic(tile) or program.tile not in (None, tile) else program.traced
    return traced(local.contiguous())


def carried(program: Program, local: torch.Tensor, async_op: bool = False) -> torch.Tensor:
    """`run`, with a result that shares no memory with `local`.

    A DTensor has a version of its own: autograd wouldn't see that another one changed its memory.
    """
    return run(program, local, async_op) if program.plan.steps else waited(local).clone()


def is_plain(local: torch.Tensor) -> bool:
    """Whether a tensor isn't part of a graph that is being traced."""
    return type(local) in PLAIN


# --- programs by what they do ---------------------------------------------------------------------


def check_takes_part(source: Sharding, target: Sharding) -> None:
    """An error where data can't go from one to the other, or this rank has neither of it."""
    meshes = source.mesh, target.mesh
    for mesh in meshes:
        if mesh.binding is None:
            raise MeshError(f"{mesh!r} is algebra alone; data moves on a mesh made with axes.init_mesh(...)")
    world = current_world()
    if all(mesh.universe.position(world.rank) is None for mesh in meshes):
        raise ShardingError(
            f"rank {world.rank} is neither among the ranks of the source nor among those of the target\n"
            f"  source  {source}  on  {source.mesh!r}\n  target  {target}  on  {target.mesh!r}"
        )


@of_world(4096)
def program(
    source: Sharding, target: Sharding, shape: Shape, dtype: torch.dtype, comm_dtype: torch.dtype | None = None
) -> Program:
    """The program of this rank between two shardings, as planning sees them (`Sharding.at`).

    Raises `ShardingError` where there is none, and `MeshError` where a mesh isn't of a running job.
    """
    check_takes_part(source, target)
    how = source, target, shape, dtype, comm_dtype
    found = programs_alike(*how)
    if found is not None:
        return found(shape)
    made = plan(source, target, shape, name_of(dtype), model_of(source.mesh), current_world().rank)
    return _program_of(made, dtype, comm_dtype)


def programs_alike(
    source: Sharding, target: Sharding, shape: Shape, dtype: torch.dtype, comm_dtype: torch.dtype | None
) -> Callable[[Shape], Program] | None:
    """The programs by shape, for all shapes that are cut as this one is; None where a tile isn't even."""
    rank, found = current_world().rank, even_choices(source, target, shape, name_of(dtype), model_of(source.mesh))
    if found is None:
        return None

    @functools.lru_cache(maxsize=16)
    def base(at: int) -> Program:
        return _program_of(found.plan(at, found.shape, rank), dtype, comm_dtype)

    return lambda shape: base(found.cheapest(shape)).alike(shape)


@of_world(4096)
def _program_of(made: Plan, dtype: torch.dtype, comm_dtype: torch.dtype | None) -> Program:
    """The program of a plan."""
    meshes = made.source.mesh, made.target.mesh
    check_dtypes(made, dtype, comm_dtype)
    binding = made.source.mesh.binding
    assert binding is not None, "a plan becomes a program on meshes of a running job"
    group_of_step = functools.partial(_group, meshes)
    return Program(made, dtype, group_of_step, binding.device_type, comm_dtype)


@functools.lru_cache(maxsize=64)
def model_of(mesh: Mesh) -> CostModel:
    """The cost model of a mesh: the default one, with the mesh's own number of ranks per node."""
    return CostModel() if mesh.ranks_per_node is None else CostModel(ranks_per_node=mesh.ranks_per_node)


def _group(meshes: tuple[Mesh, Mesh], step: Step) -> dist.ProcessGroup | None:
    """The group of a step; None where nothing is sent or this rank takes no part."""
    if step.kind == "slice" or not step.takes_part(step.rank):
        return None
    if step.layout is None:
        mesh = union_of(*meshes)
        return group_of(mesh, mesh.layout_of_all, "union")
    mesh = next(mesh for mesh in meshes if mesh.universe == step.source.universe)
    if mesh.universe.position(step.rank) is None:
        return None
    names = step.axes
    if any(name in dict(mesh.binding.lanes) and name not in mesh.axis_names for name in names):
        # The lane of a further name is for who asks by that name. A move has digits, and goes by the axes.
        names = tuple(mesh.factored(step.layout) or [str(step.layout)])
    return group_of(mesh, step.layout, " ".join(names))


@functools.lru_cache(maxsize=64)
def union_of(one: Mesh, two: Mesh) -> Mesh:
    """All ranks of two meshes as one axis, those of the first before the others."""
    has = set(one.universe.ranks)
    ranks = [*one.universe.ranks, *(rank for rank in two.universe.ranks if rank not in has)]
    return Mesh("union", ranks=ranks)._with(binding=one.binding)


@of_world(4096)
def _operation(program: Program) -> Operation:
    """What the ranks of a program do together: all those of its meshes through this one."""
    made = program.plan
    meshes = made.source.mesh, made.target.mesh
    here = [mesh for mesh in meshes if mesh.universe.position(made.rank) is not None]
    lines = (mesh.universe.line(mesh.extent, made.rank) for mesh in here)
    members: Sequence[int] = sorted({rank for line in lines for rank in line})
    if meshes[0].universe != meshes[1].universe:
        members = sorted(union_of(*meshes).universe.ranks)
    ranks, compared = Universe.of(members).ranks, f"{made.fingerprint} of {program.tensor}"
    named = program.said, "redistribution", "", "", "", ranks, name_of(program.dtype), program.device_type
    part = functools.partial(_first_part, program)
    return Operation(*named, compared=compared if program.sends else "", mesh=meshes[0], part=part)


def _first_part(program: Program) -> str:
    """The first collective of this rank's in a program, as errors show it."""
    steps = zip(program.plan.steps, program.groups, strict=True)
    return next((part_text(step, group) for step, group in steps if group is not None), "")


# --- moves, there and back --------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way of a move: a program, and what the way back may need beside, zeros around the result and a division."""

    program: Program
    frame: Frame | None = None
    divisor: int = 1

    def __call__(self, x: torch.Tensor, async_op: bool = False) -> torch.Tensor:
        """This rank's tile at the end."""
        y = run(self.program, x, async_op)
        if self.frame is not None:
            y = self.frame.around(y)
        return y if self.divisor == 1 else y / self.divisor

    @cached_property
    def idle(self) -> bool:
        """Whether nothing changes."""
        return self.program.idle and self.frame is None and self.divisor == 1


@dataclass(frozen=True)
class Frame:
    """Where a tile lies in a larger one of `shape`: pairs of `(box of the tile, box of the larger)`."""

    tile: Shape
    shape: Shape
    boxes: tuple[tuple[Region, Region], ...]

    def around(self, x: torch.Tensor) -> torch.Tensor:
        """The larger tile, zero where `x` has nothing to say."""
        tile = tuple(x.shape)
        made = self.at_sizes(tile) if is_symbolic(tile) or tile != self.tile else self
        if made.padding is not None:
            return torch.nn.functional.pad(x, made.padding)
        out = x.new_zeros(made.shape)
        for inner, outer in made.boxes:
            out[slices_of(outer)].copy_(x[slices_of(inner)])
        # A rank that has nothing to say takes part in the derivative all the same.
        return out if made.boxes or not x.requires_grad else out + x.sum()

    @cached_property
    def padding(self) -> list[int] | None:
        """The zeros before and after on each dim, last dim first, where all of the tile lies in one box."""
        if len(self.boxes) != 1:
            return None
        inner, outer = self.boxes[0]
        if inner != tuple([(0, size) for size in self.tile]):
            return None
        ends = zip(reversed(outer), reversed(self.shape), strict=True)
        return [zeros for (start, stop), size in ends for zeros in (start, size - stop)]

    def at_sizes(self, tile: Shape) -> Frame:
        """The frame of a tile of other sizes, where tiles are even."""
        units = [self._unit(dim, found) for dim, found in enumerate(tile)]

        def scaled(sizes: Iterable[int]) -> Shape:
            return tuple(size // mine * found for size, (mine, found) in zip(sizes, units, strict=True))

        def box(region: Region) -> Region:
            return tuple(zip(*(scaled(ends) for ends in zip(*region, strict=True)), strict=True))

        boxes = tuple((box(inner), box(outer)) for inner, outer in self.boxes)
        return Frame(tile, scaled(self.shape), boxes)

    def _unit(self, dim: int, found: int) -> tuple[int, int]:
        """A size here and what it becomes, where tiles are `found`; all others are multiples."""
        mine = self.tile[dim]
        ends = [end for boxes in self.boxes for box in boxes for end in box[dim]]
        if mine and all(size % mine == 0 for size in (self.shape[dim], *ends)):
            return mine, found
        guard(found == mine)  # this dim has one size
        return 1, 1


@dataclass(frozen=True, eq=False)
class Move:
    """What a redistribution does to a local tensor, and back to its gradient.

    Source and target are as planning sees them (`Sharding.at`). There is one for each pair of them, dtype and
    so on, kept as long as the groups live. `same` are the digits that count as `same` in the source and in
    the target.
    """

    source: Sharding
    target: Sharding
    shape: Shape
    dtype: torch.dtype
    same: tuple[Same, Same]
    comm_dtypes: tuple[torch.dtype | None, torch.dtype | None]

    @cached_property
    def tile(self) -> Shape:
        """The shape of this rank's tile of the source."""
        held = self.source.tile(self.shape, current_world().rank)
        return (0,) if held is None else tile_shape(held)

    @cached_property
    def there(self) -> Way:
        """From the source to the target."""
        return Way(program(self.source, self.target, self.shape, self.dtype, self.comm_dtypes[0]))

    @cached_property
    def back(self) -> Way:
        """From the target's gradient to the source's."""
        arriving, middle, divisor = transposed(self.source, self.target, self.same)
        means = math.prod(step.divisor for step in self.there.program.plan.steps)
        made = program(arriving, middle, self.shape, self.dtype, self.comm_dtypes[1])
        return Way(made, frame_of(middle, self.source, self.shape), divisor * means)

    def stages(self, with_gradient: bool) -> list[Sharding]:
        """How the tensor lies on its way, and how its gradient does."""
        there = stages_of(self.there.program.plan)
        if not with_gradient:
            return there
        if self.is_linear:
            return [*there, *stages_of(self.back.program.plan)]
        if len(self.classes) > 1:
            return [stage for one in self.one_by_one for stage in one.stages(with_gradient)]
        extreme, total, summed = self.reached
        return [*there, *stages_of(extreme.plan), *stages_of(total.plan), *summed.stages(with_gradient)]

    @cached_property
    def idle(self) -> bool:
        """Whether neither the tensor nor its gradient changes."""
        return self.there.idle and self.back.idle

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The kinds of reductions that are resolved, in order: "sum", "max" or "min"."""
        return tuple(step.op for step in self.there.program.plan.steps if step.op is not None)

    @cached_property
    def reached(self) -> tuple[Program, Program, Move]:
        """Of a maximum: the maximum on the source's own splits, the count of where it is reached, the move as a sum."""
        return _reached(self)

    @cached_property
    def one_by_one(self) -> tuple[Move, Move]:
        """The first of several kinds of reductions on its own, and the others."""
        return _one_by_one(self)

    @cached_property
    def is_linear(self) -> bool:
        """Whether no maximum or minimum is resolved."""
        return not any(op in ("max", "min") for op in self.classes)

    def of_tile(self, tile: Shape) -> Move:
        """The move itself; `ShardingError` where this isn't the shape of this rank's tile of the source."""
        if tile != self.tile:
            raise ShardingError(
                f"the tile of {list(self.shape)} on this rank is {list(self.tile)} by '{self.source}'; found "
                f"{list(tile)}"
            )
        return self

    def apply(self, x: torch.Tensor, async_op: bool = False) -> torch.Tensor:
        """The target's tile, with its gradient."""
        has_gradient = x.requires_grad and torch.is_grad_enabled()
        if not has_gradient:
            return run(self.there.program, x, async_op)
        if self.idle if has_gradient else self.there.idle:
            return x
        if self.is_linear:
            return _linear(x, self, False, async_op)
        if len(self.classes) == 1:
            return _extreme(x, self, async_op)
        first, rest = self.one_by_one
        return rest.apply(first.apply(x), async_op)

    def pull(self, g: torch.Tensor, reverse: bool = False) -> torch.Tensor:
        """The source's gradient from the target's, or in `reverse` that gradient's own; differentiable."""
        if g.requires_grad and torch.is_grad_enabled():
            return _linear(g, self, not reverse)
        return (self.there if reverse else self.back)(g)


def frame_of(middle: Sharding, source: Sharding, shape: Shape) -> Frame | None:
    """Where this rank's tile of `middle` lies in its tile of `source`; None where it is all of it."""
    rank = current_world().rank
    inner, outer = middle.tile(shape, rank), source.tile(shape, rank)
    if inner == outer or inner is None or outer is None:
        return None
    pairs = zip(regions(inner, inner), regions(inner, outer), strict=True) if math.prod(tile_shape(inner)) else ()
    return Frame(tile_shape(inner), tile_shape(outer), tuple(pairs))


def _linear(x: torch.Tensor, made: Move, reverse: bool, async_op: bool = False) -> torch.Tensor:
    """A move or its way back, differentiable: each is the other's gradient."""
    way, way_back = (made.back, made.there) if reverse else (made.there, made.back)

    def pull(g: torch.Tensor) -> torch.Tensor:
        if way_back.idle and (made.idle or not g.requires_grad):
            return g  # itself: of two leaves that share it, torch gives each a copy
        return made.pull(g, reverse)

    return linear(lambda x: writable(way(x, async_op), x), pull, x)


def _extreme(x: torch.Tensor, made: Move, async_op: bool) -> torch.Tensor:
    """A pending maximum or minimum, resolved. Its gradient goes to where it was reached, in equal parts."""

    def back(g: torch.Tensor, _: tuple[bool, ...], kept: Kept) -> torch.Tensor:
        share, summed = _share(kept[0], made)
        return summed.pull(g) * share

    return around(lambda x: writable(made.there(x, async_op), x), back, x, keep=(True, False))


def _share(x: torch.Tensor, made: Move) -> tuple[torch.Tensor, Move]:
    """Where this rank's values are the maximum: 1, divided among ties, else 0. And `made` as a sum."""
    extreme, total, summed = made.reached
    with torch.no_grad():
        hits = (x == run(extreme, x)).to(x.dtype)
        return hits / run(total, hits), summed


def _reached(made: Move) -> tuple[Program, Program, Move]:
    """The extreme on the source's own splits, the count of where it is reached, and `made` as a sum."""
    source, target, how = made.source, made.target, (made.shape, made.dtype, made.comm_dtypes[0])
    added = replace(source, pending=_as_sum(source, target))
    here = replace(source, pending=target.pending)
    return program(source, here, *how), program(added, here, *how), replace(made, source=added)


def _as_sum(source: Sharding, target: Sharding) -> tuple[PendingReduction, ...]:
    """What the source has pending, as a sum over all that the target has no longer."""
    kept = [axis.layout for pending in target.pending for axis in pending.axes]
    refined = digits(*kept, *(axis.layout for pending in source.pending for axis in pending.axes))
    still = {digit for layout in refined[: len(kept)] for digit in layout}
    resolved = dict.fromkeys(digit for layout in refined[len(kept) :] for digit in layout if digit not in still)
    summed = tuple([source.mesh.called(Layout.of([digit])) for digit in resolved])
    return (PendingReduction("sum", summed), *target.pending)


def _one_by_one(made: Move) -> tuple[Move, Move]:
    """The first of several kinds of reductions on its own, and the others."""
    steps = made.there.program.plan.steps
    first = next(step for step in steps if step.op is not None)
    middle = replace(made.source, pending=first.target.pending)
    source_same, target_same = made.same
    return (
        replace(made, target=middle, same=(source_same, source_same)),
        replace(made, source=middle, same=(source_same, target_same)),
    )
