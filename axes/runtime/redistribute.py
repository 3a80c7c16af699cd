"""Redistribution of local tensors: this rank's tile of one sharding to its tile of another.

    made = program(mesh.sharding("b s@tp d"), mesh.sharding("b s d@tp"), local.dtype, None, (8, 32, 64))
    local = run(made, local)

One look-up gives what packs, sends, unpacks. Nothing happens where both shardings put the same data on the same ranks.

A redistribution is a linear map (but for max and min), and its gradient is the transposed map, which is a
redistribution, too. Of plain tensors it is a `Move`: each rank has a loss of its own, and `gradients` has the table of
the local view. Axes can be declared `same`: equal values *and* equal, whole gradients on every rank. Axes that neither
side mentions are unknown: what differs along them is never compared, mixed or borrowed. DTensors say of their
gradients how they are sharded: see `routes`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import torch

from axes.algebra.chunks import Box, boxes_within, tile_shape
from axes.algebra.errors import MeshError, ShardingError, shown
from axes.algebra.layout import Layout
from axes.algebra.plan import Plan, cheapest, choices_between, model_of
from axes.algebra.sharding import EXTREMES, Sharding, pending_runs, unmarked
from axes.algebra.splits import Digits
from axes.runtime import axis_groups, watching
from axes.runtime.axis_groups import AxisGroup
from axes.runtime.gradients import on_own_axes, transposed
from axes.runtime.groups import current_world, of_world
from axes.runtime.linear import Kept, Map, both_ways, linear, writable
from axes.runtime.operation import raise_located, waited
from axes.runtime.packing import slices_of
from axes.runtime.programs import BoundProgram, Program, Run, check_dtypes, name_of
from axes.runtime.symbols import found_for, hints, is_symbolic, vary
from axes.runtime.transforms import PLAIN

Shape = tuple[int, ...]
Dtypes: TypeAlias = torch.dtype | tuple[torch.dtype | None, torch.dtype | None] | None
"""`comm_dtype`: one for values and gradients, or one for each."""


def moving(source: Sharding, target: Sharding, shape: Shape, comm_dtype: Dtypes, async_op: bool, is_local: bool) -> Map:
    """What takes this rank's tile of a tensor of the whole `shape` from one sharding to the other.

    It is for who holds it: looked up once, not on each call, and for no longer than the world that it was made in.
    `is_local`: with the gradient of the local view; what is `same` on a side stands among what is pending there.
    `comm_dtype` is the dtype in which values travel and are reduced, or a pair for `(values, gradients)`.
    """
    source, target, dtypes = source.at(hints(shape)), target.at(hints(shape)), both(comm_dtype)
    if not is_local:
        bound = functools.lru_cache(maxsize=16)(lambda dtype: program(source, target, dtype, dtypes[0], shape))
        return lambda x: run(bound(x.dtype), x, async_op)
    ends = on_own_axes(source, target)
    moves = functools.lru_cache(maxsize=16)(lambda dtype: Move(*ends, shape, dtype, dtypes))
    return lambda x: moves(x.dtype).apply(x, async_op)


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
    sent = local.resolve_conj().resolve_neg().contiguous()  # a view may conjugate or negate where it is read
    if type(local) not in PLAIN:
        return made.traced_at(tuple(local.shape))(sent)
    # What `collective` does, at no price where nobody listens: ranks compare the program, and listeners hear of its
    # steps.
    if watching.compare is not None:
        watching.compare(made.operation)
    try:
        if not async_op:
            return made.eager(sent)
        if sent is local and made.program.sends:
            sent = sent.clone()  # the caller may write to its own before it has been sent
        return made.later(sent)
    except RuntimeError as error:
        if not made.program.sends:
            raise
        raise_located(error, made.operation)


def carried(made: BoundProgram, local: torch.Tensor, async_op: bool = False) -> torch.Tensor:
    """`run`, with a result that shares no memory with `local`.

    A DTensor has a version of its own: autograd wouldn't see that another one changed its memory.
    """
    if made.program.idle:
        return waited(local).clone(memory_format=torch.contiguous_format)
    return run(made, local, async_op)


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


def program(
    source: Sharding, target: Sharding, dtype: torch.dtype, comm_dtype: torch.dtype | None, shape: Shape
) -> BoundProgram:
    """How this rank's tile of a tensor of some shape in one sharding becomes that in another.

    For all shapes that are cut alike it is one `Program`. Raises `ShardingError` where there is none, and `MeshError`
    where a mesh isn't of a running job.
    """
    check_takes_part(source, target)
    numbers, ranks = hints(shape), math.lcm(source.universe.size, target.universe.size)
    ends, pairs = (source.at(numbers), target.at(numbers)), enumerate(zip(source.dims, target.dims, strict=True))
    sized = {dim for dim, (one, two) in pairs if not (one.is_plain and two.is_plain)}

    def find(like: Shape) -> Program:
        plans = choices_between(*ends, like, name_of(dtype), model_of(source.mesh))
        return _prepared((source, target), cheapest(plans, numbers), len(plans) == 1, dtype, comm_dtype)

    found = found_for(numbers, ranks, find, lambda found: found.cuts, sized)
    return BoundProgram(found, vary(shape, found.cuts) if is_symbolic(shape) else shape)


@of_world(4096)
def _prepared(
    ends: tuple[Sharding, Sharding], found: Plan, is_only: bool, dtype: torch.dtype, comm_dtype: torch.dtype | None
) -> Program:
    made = found.least.at(current_world().rank)
    check_dtypes(made, dtype, comm_dtype)
    return Program(ends, made, is_only, dtype, comm_dtype)


# --- moves, there and back --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Move:
    """What a redistribution does to a plain tensor, and back to its gradient.

    Source and target are as planning sees them (`Sharding.at`); what is `same` stands among what is pending.
    """

    source: Sharding
    target: Sharding
    shape: Shape
    dtype: torch.dtype
    comm_dtypes: tuple[torch.dtype | None, torch.dtype | None]

    @cached_property
    def forward(self) -> BoundProgram:
        """From the source to the target."""
        ends = unmarked(self.source)[0], unmarked(self.target)[0]
        return program(*ends, self.dtype, self.comm_dtypes[0], self.shape)

    @cached_property
    def way_back(self) -> tuple[BoundProgram, Run | None]:
        """From the target's gradient to the source's: a program, and what makes a summand of its result."""
        arriving, middle, divisor = transposed(self.source, self.target)
        means = math.prod([step.divisor for step in self.forward.program.plan.steps])
        made = program(arriving, middle, self.dtype, self.comm_dtypes[1], self.shape)
        return made, into_summand(middle, self.source, self.shape, divisor * means)

    @cached_property
    def idle(self) -> bool:
        """Whether neither the tensor nor its gradient changes."""
        made, last = self.way_back
        return self.forward.program.idle and made.program.idle and last is None

    @cached_property
    def has_extreme(self) -> bool:
        """Whether a maximum or a minimum is resolved."""
        return any(step.op in EXTREMES for step in self.forward.program.plan.steps)

    @cached_property
    def in_turn(self) -> tuple[str, AxisGroup, Move, Move]:
        """The first kind of reduction that is resolved: its name, over whom, as a move by itself; and what is left."""
        (plain, same), mesh = unmarked(self.source), self.source.mesh
        (op, layouts), kept = pending_runs(plain.pending)[0], [layout for _, layout in unmarked(self.target)[0].pending]
        if op in EXTREMES and self.comm_dtypes != (None, None):
            raise ShardingError(f"a pending {op} with a gradient is sent in its own dtype; leave out comm_dtype")
        found = Digits(mesh, [*kept, *layouts])
        still = frozenset(found.of(kept))
        resolved = sorted({*found.of(layouts)} - still, key=lambda digit: -digit[1])
        group = axis_groups.group_over(mesh, Layout.of(resolved), " ".join(map(mesh.called, layouts)))
        parts = [(op, part) for layout in layouts for part in found.pick(layout, still)]
        marks = [("same", layout) for layout in same]
        middle = replace(plain, pending=(*parts, *plain.pending[len(layouts) :], *marks))
        return op, group, replace(self, target=middle), replace(self, source=middle)

    def apply(self, x: torch.Tensor, async_op: bool = False) -> torch.Tensor:
        """The target's tile, with its gradient."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return run(self.forward, x, async_op)
        if self.has_extreme:
            op, group, first, rest = self.in_turn
            return rest.apply(extreme(x, op, group) if op in EXTREMES else first.apply(x), async_op)
        return x if self.idle else both_ways(lambda x: run(self.forward, x, async_op), self._back, x)

    def _back(self, g: torch.Tensor) -> torch.Tensor:
        made, last = self.way_back
        return run(made, g) if last is None else last(run(made, g))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def into_summand(middle: Sharding, source: Sharding, shape: Shape, share: int) -> Run | None:
    """What makes of this rank's tile of a gradient its summand of the gradient of a tensor; None where it is that.

    The tile lies as `middle` says, the tensor as `source`: what the rank has of the tensor beside is zero. And `share`
    ranks have the whole of a gradient, of which each takes an equal part. It is of the sizes of this call, and in a
    graph good for all that both shardings divide as they divide these.
    """
    shape, rank = hints(shape), current_world().rank
    inner, outer = middle.tile(shape, rank), source.tile(shape, rank)
    if inner == outer or inner is None or outer is None:
        return None if share == 1 else lambda x: x / share
    tile, larger = tile_shape(inner), tile_shape(outer)
    places = [*zip(boxes_within(inner, inner), boxes_within(inner, outer), strict=True)] if math.prod(tile) else []

    def around(x: torch.Tensor) -> torch.Tensor:
        # In a graph sizes vary, and boxes with them.
        sizes = [(size, own) if own else (1, 1) for size, own in zip(x.shape, tile, strict=True)]
        boxes = [(_scaled(inner, sizes), _scaled(outer, sizes)) for inner, outer in places]
        whole = [stop for _, stop in _scaled([(0, size) for size in larger], sizes)]
        x, out = x if share == 1 else x / share, x.new_zeros(whole)
        for inner, outer in boxes:
            out[slices_of(outer)].copy_(x[slices_of(inner)])
        # A rank that has nothing to say takes part in the derivative all the same.
        return out if boxes or not x.requires_grad else out + x.sum()

    return around


def _scaled(box: Iterable[tuple[int, int]], sizes: Sequence[tuple[int, int]]) -> Box:
    """A box of a tile, in one of which each size is another: `(this size, that of the tile)`."""
    return tuple([(start * n // own, stop * n // own) for (start, stop), (n, own) in zip(box, sizes, strict=True)])


def extreme(
    x: torch.Tensor, op: str, group: AxisGroup, most: Map = _same, count: Map = _same, spread: Map = _same
) -> torch.Tensor:
    """The maximum (minimum) over the ranks of `most(x)`. Its gradient goes to where it is reached, on whatever rank, in
    equal parts.

    `most` is the maximum (minimum) over dims of `x`, `count` the sum over the same, and `spread` repeats along them.
    """
    total = functools.partial(axis_groups.all_reduce, op="sum", group=group)

    def back(g: torch.Tensor, _: tuple[bool, ...], kept: Kept) -> torch.Tensor:
        with torch.no_grad():
            reached = (kept[0] == spread(kept[1])).to(g.dtype)
            share = reached / spread(total(count(reached)))
        return share * spread(both_ways(total, total, g))

    def run(x: torch.Tensor) -> torch.Tensor:
        return writable(axis_groups.all_reduce(most(x), op, group), x)

    return linear(run, back, x, keep=(True, True))  # type: ignore[no-any-return]
