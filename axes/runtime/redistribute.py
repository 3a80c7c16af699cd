"""Redistribution of local tensors: this rank's tile of one sharding to its tile of another.

    moves = moves_of(mesh.sharding("b s@tp d"), mesh.sharding("b s d@tp"), (8, 32, 64))
    local = moves(local.dtype).apply(local)

One look-up gives a `Program` for (source, target, dtype), of which a shape makes what packs, sends, unpacks. Nothing
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
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from axes.algebra.chunks import tile_shape
from axes.algebra.cost import CostModel
from axes.algebra.errors import MeshError, ShardingError, shown
from axes.algebra.layout import Layout, NamedLayout, digits
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Choices, choices_between, cuts_of
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
from axes.runtime.packing import slices_of, times
from axes.runtime.programs import BoundProgram, Prepared, check_dtypes, name_of, part_text
from axes.runtime.symbols import fixed, found_for, hints, is_symbolic
from axes.runtime.trace import Operation
from axes.runtime.transforms import PLAIN
from axes.runtime.writes import writable

Axes = tuple[NamedLayout, ...]
Shape = tuple[int, ...]
Dtypes: TypeAlias = torch.dtype | tuple[torch.dtype | None, torch.dtype | None] | None
"""`comm_dtype`: one for values and gradients, or one for each."""


def moves_of(
    source: Sharding,
    target: Sharding,
    shape: Shape,
    view: Literal["global", "local"] = "global",
    comm_dtype: Dtypes = None,
    source_same: Axes = (),
    target_same: Axes = (),
) -> Callable[[torch.dtype], Move]:
    """The moves between two shardings of a tensor whose whole shape is `shape`, by dtype.

    They are for who holds them: looked up once, not on each call, and for no longer than the world that they were made
    in. In the global view the gradient arrives with the target's splits, replicated over all other axes, and leaves so
    with the source's. `source_same` and `target_same` are axes that are `same` on that side, in the local view alone.
    `comm_dtype` is the dtype in which values travel and are reduced, or a pair for `(values, gradients)`.
    """
    sized = sized_dims(source, target)
    same: tuple[Same, Same] = (None, None)
    shape = tuple([fixed(size) if dim in sized else size for dim, size in enumerate(shape)])
    source, target = source.at(hints(shape)), target.at(hints(shape))
    if view == "local":
        source, target, same = of_shards(source, target, source_same, target_same)
    elif source_same or target_same:
        raise ShardingError("'same' is about gradients of plain tensors: it has no meaning in the global view")
    return functools.lru_cache(maxsize=16)(lambda dtype: Move(source, target, shape, dtype, same, both(comm_dtype)))


def both(comm_dtype: Dtypes) -> tuple[torch.dtype | None, torch.dtype | None]:
    """`comm_dtype` for values and for gradients; `ShardingError` for what is neither a dtype nor two of them."""
    if comm_dtype is None:
        return None, None
    found = comm_dtype if isinstance(comm_dtype, tuple) else (comm_dtype, comm_dtype)
    if len(found) != 2 or not all(each is None or isinstance(each, torch.dtype) for each in found):
        raise ShardingError(f"comm_dtype is a torch.dtype, or two: for values and gradients; found {shown(comm_dtype)}")
    return found


def run(made: BoundProgram, local: torch.Tensor, async_op: bool = False) -> torch.Tensor:
    """The program on this rank's tile: eager on a plain tensor, traced where a graph is being made."""
    if type(local) not in PLAIN:
        local = waited(local)
    if type(local) in PLAIN:
        # What `collective` does, at no price where nobody listens: ranks compare the program, and listeners hear of its
        # steps.
        if flags.check:
            compare_operation(_operation(made))
        recorded, sent = flags.watched, local.contiguous()
        try:
            if async_op:
                if sent is local and made.program.sends:
                    sent = sent.clone()  # the caller may write to its own before it has been sent
                return under_way(made.form(False, recorded)(sent), _operation, made)
            return made.form(True, True)(sent) if recorded else made.eager(sent)
        except RuntimeError as error:
            if not made.program.sends:
                raise
            raise_located(error, _operation, made)
    return made.traced_at(tuple(local.shape))(local.contiguous())


def carried(made: BoundProgram, local: torch.Tensor, async_op: bool = False) -> torch.Tensor:
    """`run`, with a result that shares no memory with `local`.

    A DTensor has a version of its own: autograd wouldn't see that another one changed its memory.
    """
    return waited(local).clone() if made.program.idle else run(made, local, async_op)


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


class Program:
    """How this rank's tiles of one sharding become those of another, of tensors of any shape.

    What it does has no size in it: for all shapes that are cut alike it is one `Prepared` plan. `bound` says what that
    is for one of them. `MeshError` where a mesh isn't of a running job.
    """

    def __init__(self, source: Sharding, target: Sharding, dtype: torch.dtype, comm_dtype: torch.dtype | None):
        check_takes_part(source, target)
        self.source, self.target, self.dtype, self.comm_dtype = source, target, dtype, comm_dtype
        self._ranks = math.lcm(source.universe.size, target.universe.size)
        self._sized = sized_dims(source, target)
        self._kept = functools.lru_cache(maxsize=4096)(self._bound)
        self._choices = functools.lru_cache(maxsize=64)(self._weighed)
        self._prepared = functools.lru_cache(maxsize=64)(self._prepare)

    def bound(self, shape: Shape) -> BoundProgram:
        """The program for tensors of a shape; kept where that is numbers. `ShardingError` where there is none."""
        return self._bound(shape) if is_symbolic(shape) else self._kept(shape)

    def _bound(self, shape: Shape) -> BoundProgram:
        source, target, numbers, own = self.source, self.target, shape, self._sized
        if is_symbolic(shape):
            shape = tuple([fixed(size) if dim in own else size for dim, size in enumerate(shape)])
            numbers = hints(shape)
        if own:
            source, target = source.at(numbers), target.at(numbers)
            own = sized_dims(source, target)

        def find(like: Shape) -> Prepared:
            found = self._choices(source, target, like)
            return self._prepared(found, found.cheapest(numbers))

        return BoundProgram(found_for(shape, self._ranks, find, lambda found: found.cuts, own), shape)

    def _weighed(self, source: Sharding, target: Sharding, shape: Shape) -> Choices:
        return choices_between(source, target, shape, name_of(self.dtype), model_of(source.mesh))

    def _prepare(self, found: Choices, at: int) -> Prepared:
        made = found.plan(at, found.least(at), current_world().rank)
        check_dtypes(made, self.dtype, self.comm_dtype)
        binding = made.source.mesh.binding
        assert binding is not None, "a plan is made ready on meshes of a running job"
        group_of_step = functools.partial(_group, (made.source.mesh, made.target.mesh))
        how = self.dtype, group_of_step, binding.device_type, self.comm_dtype
        return Prepared(made, found.states(at), len(found.sequences) == 1, *how)


program = of_world(4096)(Program)
"""The program of this rank between two shardings, made once."""


def sized_dims(*ends: Sharding) -> frozenset[int]:
    """The dims of which one of these knows a size: groups, and what is written with its own."""
    return frozenset([dim for end in ends for dim, each in enumerate(end.dims) if not each.is_plain])


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
    return group_of(mesh, step.layout, " ".join(step.axes))


@functools.lru_cache(maxsize=64)
def union_of(one: Mesh, two: Mesh) -> Mesh:
    """All ranks of two meshes as one axis, those of the first before the others."""
    has = set(one.universe.ranks)
    ranks = [*one.universe.ranks, *(rank for rank in two.universe.ranks if rank not in has)]
    return Mesh("union", ranks=ranks)._with(binding=one.binding)


@of_world(4096)
def _operation(bound: BoundProgram) -> Operation:
    """What the ranks of a program do together: all those of its meshes through this one."""
    program, made = bound.program, bound.program.plan
    meshes = made.source.mesh, made.target.mesh
    here = [mesh for mesh in meshes if mesh.universe.position(made.rank) is not None]
    lines = (mesh.universe.line(mesh.extent, made.rank) for mesh in here)
    members: Sequence[int] = sorted({rank for line in lines for rank in line})
    if meshes[0].universe != meshes[1].universe:
        members = sorted(union_of(*meshes).universe.ranks)
    ranks, compared = Universe.of(members).ranks, f"{made.fingerprint} of {bound.tensor}"
    named = bound.said, "redistribution", "", "", "", ranks, name_of(program.dtype), program.device_type
    part = functools.partial(_first_part, program)
    return Operation(*named, compared=compared if program.sends else "", mesh=meshes[0], part=part)


def _first_part(program: Prepared) -> str:
    """The first collective of this rank's in a program, as errors show it."""
    steps = zip(program.plan.steps, program.groups, strict=True)
    return next((part_text(step, group) for step, group in steps if group is not None), "")


# --- moves, there and back --------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way of a move: a program, and what the way back may need beside, zeros around the result and a division."""

    made: BoundProgram
    frame: Frame | None = None
    divisor: int = 1

    def __call__(self, x: torch.Tensor, async_op: bool = False) -> torch.Tensor:
        """This rank's tile at the end."""
        y = run(self.made, x, async_op)
        if self.frame is not None:
            y = self.frame.around(y)
        return y if self.divisor == 1 else y / self.divisor

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the program."""
        return self.made.program.plan.steps

    @cached_property
    def idle(self) -> bool:
        """Whether nothing changes."""
        return not self.steps and self.frame is None and self.divisor == 1


@dataclass(frozen=True)
class Frame:
    """Where a tile lies in a larger one of `shape`, and so do multiples: `(box of the tile, box of the larger)`."""

    tile: Shape
    shape: Shape
    boxes: tuple[tuple[Region, Region], ...]

    def around(self, x: torch.Tensor) -> torch.Tensor:
        """The larger tile, zero where `x` has nothing to say."""
        multiples = [size // own if own else 1 for size, own in zip(x.shape, self.tile, strict=True)]
        boxes = [(times(inner, multiples), times(outer, multiples)) for inner, outer in self.boxes]
        shape = tuple(map(operator.mul, self.shape, multiples))
        if len(boxes) == 1 and self.boxes[0][0] == tuple([(0, size) for size in self.tile]):
            ends = zip(reversed(boxes[0][1]), reversed(shape), strict=True)
            return torch.nn.functional.pad(x, [n for (start, stop), size in ends for n in (start, size - stop)])
        out = x.new_zeros(shape)
        for inner, outer in boxes:
            out[slices_of(outer)].copy_(x[slices_of(inner)])
        # A rank that has nothing to say takes part in the derivative all the same.
        return out if boxes or not x.requires_grad else out + x.sum()


@dataclass(frozen=True, eq=False)
class Move:
    """What a redistribution does to a local tensor, and back to its gradient.

    Source and target are as planning sees them (`Sharding.at`). `same` are the digits that count as `same` in the
    source and in the target.
    """

    source: Sharding
    target: Sharding
    shape: Shape
    dtype: torch.dtype
    same: tuple[Same, Same]
    comm_dtypes: tuple[torch.dtype | None, torch.dtype | None]

    @cached_property
    def there(self) -> Way:
        """From the source to the target."""
        return Way(program(self.source, self.target, self.dtype, self.comm_dtypes[0]).bound(self.shape))

    @cached_property
    def back(self) -> Way:
        """From the target's gradient to the source's."""
        arriving, middle, divisor = transposed(self.source, self.target, self.same)
        means = math.prod(step.divisor for step in self.there.steps)
        made = program(arriving, middle, self.dtype, self.comm_dtypes[1]).bound(self.shape)
        return Way(made, frame_of(middle, self.source, self.shape), divisor * means)

    @cached_property
    def idle(self) -> bool:
        """Whether neither the tensor nor its gradient changes."""
        return self.there.idle and self.back.idle

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The kinds of reductions that are resolved, in order: "sum", "max" or "min"."""
        return tuple(step.op for step in self.there.steps if step.op is not None)

    @cached_property
    def reached(self) -> tuple[BoundProgram, BoundProgram, Move]:
        """Of a maximum: the maximum on the source's own splits, the count of where it is reached, the move as a sum."""
        added = replace(self.source, pending=_as_sum(self.source, self.target))
        here = replace(self.source, pending=self.target.pending)
        how = here, self.dtype, self.comm_dtypes[0]
        extreme, total = (program(end, *how).bound(self.shape) for end in (self.source, added))
        return extreme, total, replace(self, source=added)

    @cached_property
    def one_by_one(self) -> tuple[Move, Move]:
        """The first of several kinds of reductions on its own, and the others."""
        first = next(step for step in self.there.steps if step.op is not None)
        middle, (source_same, target_same) = replace(self.source, pending=first.target.pending), self.same
        return (
            replace(self, target=middle, same=(source_same, source_same)),
            replace(self, source=middle, same=(source_same, target_same)),
        )

    def of_tile(self, tile: Shape) -> Move:
        """The move itself; `ShardingError` where this isn't the shape of this rank's tile of the source."""
        own = self.there.made.tile
        if tile != own:
            raise ShardingError(
                f"the tile of {list(self.shape)} on this rank is {list(own)} by '{self.source}'; found {list(tile)}"
            )
        return self

    def apply(self, x: torch.Tensor, async_op: bool = False) -> torch.Tensor:
        """The target's tile, with its gradient."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return run(self.there.made, x, async_op)
        if self.idle:
            return x
        if not {"max", "min"}.intersection(self.classes):
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
    if is_symbolic(shape):
        found = cuts_of(middle, source)
        return found_for(shape, source.universe.size, lambda like: frame_of(middle, source, like), lambda _: found)
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
    if is_symbolic(made.shape):
        _ = made.reached[2].back  # what it asks of sizes can't be asked in the backward pass any more

    def back(g: torch.Tensor, _: tuple[bool, ...], kept: Kept) -> torch.Tensor:
        extreme, total, summed = made.reached
        with torch.no_grad():  # where this rank's values are the maximum: 1, divided among ties, else 0
            hits = (kept[0] == run(extreme, kept[0])).to(kept[0].dtype)
            share = hits / run(total, hits)
        return summed.pull(g) * share

    return around(lambda x: writable(made.there(x, async_op), x), back, x, keep=(True, False))


def _as_sum(source: Sharding, target: Sharding) -> tuple[PendingReduction, ...]:
    """What the source has pending, as a sum over all that the target has no longer."""
    kept = [axis.layout for pending in target.pending for axis in pending.axes]
    refined = digits(*kept, *(axis.layout for pending in source.pending for axis in pending.axes))
    still = {digit for layout in refined[: len(kept)] for digit in layout}
    resolved = dict.fromkeys(digit for layout in refined[len(kept) :] for digit in layout if digit not in still)
    summed = tuple([source.mesh.called(Layout.of([digit])) for digit in resolved])
    return (PendingReduction("sum", summed), *target.pending)
