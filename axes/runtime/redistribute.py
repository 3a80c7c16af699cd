"""Redistribution of local tensors: this rank's tile of one sharding to its tile of another.

    moves = moves_of(mesh.sharding("b s@tp d"), mesh.sharding("b s d@tp"), (8, 32, 64))
    local = moves(local.dtype).apply(local)

What packs, sends and unpacks is one `BoundProgram` for (source, target, dtype, shape). Nothing happens where both
shardings put the same data on the same ranks.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import torch

from axes.algebra.chunks import Region, regions, tile_shape
from axes.algebra.cost import CostModel
from axes.algebra.errors import MeshError, ShardingError, shown
from axes.algebra.layout import Layout, digits
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Plan, cheapest, choices_between
from axes.algebra.sharding import Pending, Sharding
from axes.runtime import flags
from axes.runtime.check import (
    compare_operation,
    raise_located,
    under_way,
    waited,
)
from axes.runtime.gradients import Same, of_shards, transposed
from axes.runtime.groups import current_world, of_world
from axes.runtime.linear import Kept, both_ways, linear
from axes.runtime.packing import slices_of
from axes.runtime.programs import BoundProgram, Program, Run, check_dtypes, name_of
from axes.runtime.symbols import found_for, hints, is_symbolic, vary
from axes.runtime.transforms import PLAIN
from axes.runtime.writes import writable

Axes = tuple[Layout, ...]
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
    same: tuple[Same, Same] = (None, None)
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
    if type(local) not in PLAIN:
        return made.traced_at(tuple(local.shape))(local.contiguous())
    # What `collective` does, at no price where nobody listens: ranks compare the program, and listeners hear of its
    # steps.
    if flags.check:
        compare_operation(made.operation)
    sent = local.contiguous()
    try:
        if not async_op:
            return made.eager(sent)
        if sent is local and made.program.sends:
            sent = sent.clone()  # the caller may write to its own before it has been sent
        return under_way(made.later(sent), _OPERATION, made)
    except RuntimeError as error:
        if not made.program.sends:
            raise
        raise_located(error, _OPERATION, made)


_OPERATION = operator.attrgetter("operation")


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


@functools.lru_cache(maxsize=64)
def model_of(mesh: Mesh) -> CostModel:
    """The cost model of a mesh: the default one, with the mesh's own number of ranks per node."""
    return CostModel() if mesh.ranks_per_node is None else CostModel(ranks_per_node=mesh.ranks_per_node)


# --- moves, there and back --------------------------------------------------------------------


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
    def there(self) -> BoundProgram:
        """From the source to the target."""
        return program(self.source, self.target, self.dtype, self.comm_dtypes[0], self.shape)

    @cached_property
    def way_back(self) -> tuple[BoundProgram, Run | None, int]:
        """From the target's gradient to the source's: a program, zeros around its result, and what divides it."""
        arriving, middle, divisor = transposed(self.source, self.target, self.same)
        means = math.prod([step.divisor for step in self.there.program.plan.steps])
        made = program(arriving, middle, self.dtype, self.comm_dtypes[1], self.shape)
        return made, zeros_around(middle, self.source, self.shape), divisor * means

    @cached_property
    def idle(self) -> bool:
        """Whether neither the tensor nor its gradient changes."""
        made, around, divisor = self.way_back
        return self.there.program.idle and made.program.idle and around is None and divisor == 1

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The kinds of reductions that are resolved, in order: "sum", "max" or "min"."""
        return tuple([step.op for step in self.there.program.plan.steps if step.op is not None])

    @cached_property
    def reached(self) -> tuple[BoundProgram, BoundProgram, Move]:
        """Of a maximum: the maximum on the source's own splits, the count of where it is reached, the move as a sum."""
        added = replace(self.source, pending=_as_sum(self.source, self.target))
        here = replace(self.source, pending=self.target.pending)
        how = here, self.dtype, self.comm_dtypes[0], self.shape
        extreme, total = (program(end, *how) for end in (self.source, added))
        return extreme, total, replace(self, source=added)

    @cached_property
    def one_by_one(self) -> tuple[Move, Move]:
        """The first of several kinds of reductions on its own, and the others."""
        first = next(step for step in self.there.program.plan.steps if step.op is not None)
        middle, (source_same, target_same) = replace(self.source, pending=first.target.pending), self.same
        return (
            replace(self, target=middle, same=(source_same, source_same)),
            replace(self, source=middle, same=(source_same, target_same)),
        )

    def apply(self, x: torch.Tensor, async_op: bool = False) -> torch.Tensor:
        """The target's tile, with its gradient."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return run(self.there, x, async_op)
        if self.idle:
            return x
        if not {"max", "min"}.intersection(self.classes):
            return both_ways(lambda x: run(self.there, x, async_op), self._back, x)
        if len(self.classes) == 1:
            return _extreme(x, self, async_op)
        first, rest = self.one_by_one
        return rest.apply(first.apply(x), async_op)

    def pull(self, g: torch.Tensor) -> torch.Tensor:
        """The source's gradient from the target's; differentiable."""
        return both_ways(self._back, lambda g: run(self.there, g), g)

    def _back(self, g: torch.Tensor) -> torch.Tensor:
        made, around, divisor = self.way_back
        y = run(made, g)
        y = y if around is None else around(y)
        return y if divisor == 1 else y / divisor


def zeros_around(middle: Sharding, source: Sharding, shape: Shape) -> Run | None:
    """What puts this rank's tile of `middle` within zeros, as its tile of `source`; None where that is the same tile.

    It is of the sizes of this call, and in a graph good for all that both divide as they divide these.
    """
    shape, rank = hints(shape), current_world().rank
    inner, outer = middle.tile(shape, rank), source.tile(shape, rank)
    if inner == outer or inner is None or outer is None:
        return None
    tile, larger = tile_shape(inner), tile_shape(outer)
    places = [*zip(regions(inner, inner), regions(inner, outer), strict=True)] if math.prod(tile) else []

    def around(x: torch.Tensor) -> torch.Tensor:
        # In a graph sizes vary, and boxes with them.
        sizes = [(size, own) if own else (1, 1) for size, own in zip(x.shape, tile, strict=True)]
        boxes = [(_scaled(inner, sizes), _scaled(outer, sizes)) for inner, outer in places]
        whole = [stop for _, stop in _scaled([(0, size) for size in larger], sizes)]
        if len(boxes) == 1 and places[0][0] == tuple([(0, size) for size in tile]):
            ends = zip(reversed(boxes[0][1]), reversed(whole), strict=True)
            return torch.nn.functional.pad(x, [n for (start, stop), size in ends for n in (start, size - stop)])
        out = x.new_zeros(whole)
        for inner, outer in boxes:
            out[slices_of(outer)].copy_(x[slices_of(inner)])
        # A rank that has nothing to say takes part in the derivative all the same.
        return out if boxes or not x.requires_grad else out + x.sum()

    return around


def _scaled(box: Iterable[tuple[int, int]], sizes: Sequence[tuple[int, int]]) -> Region:
    """A box of a tile, in one of which each size is another: `(this size, that of the tile)`."""
    return tuple([(start * n // own, stop * n // own) for (start, stop), (n, own) in zip(box, sizes, strict=True)])


def _extreme(x: torch.Tensor, made: Move, async_op: bool) -> torch.Tensor:
    """A pending maximum or minimum, resolved. Its gradient goes to where it was reached, in equal parts."""
    if is_symbolic(made.shape):
        _ = made.reached[2].way_back  # what it asks of sizes can't be asked in the backward pass any more

    def back(g: torch.Tensor, _: tuple[bool, ...], kept: Kept) -> torch.Tensor:
        extreme, total, summed = made.reached
        with torch.no_grad():  # where this rank's values are the maximum: 1, divided among ties, else 0
            hits = (kept[0] == run(extreme, kept[0])).to(kept[0].dtype)
            share = hits / run(total, hits)
        return summed.pull(g) * share

    return linear(lambda x: writable(run(made.there, x, async_op), x), back, x, keep=(True, False))


def _as_sum(source: Sharding, target: Sharding) -> Pending:
    """What the source has pending, as a sum over all that the target has no longer."""
    kept = [layout for _, layout in target.pending]
    refined = digits(*kept, *(layout for _, layout in source.pending))
    still = {digit for layout in refined[: len(kept)] for digit in layout}
    resolved = dict.fromkeys(digit for layout in refined[len(kept) :] for digit in layout if digit not in still)
    return (*[("sum", Layout.of([digit])) for digit in resolved], *target.pending)
