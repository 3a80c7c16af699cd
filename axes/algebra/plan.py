"""Plans: any sharding turned into any other, by the cheapest sequence of collectives.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2 tp=4")
>>> source, target = mesh.sharding("b@dp s@tp d"), mesh.sharding("b@dp s d@tp")
>>> print(plan(source, target, (8, 2048, 4096), dtype="bfloat16"))
b@dp s@tp d -> b@dp s d@tp     [8, 2048, 4096] bfloat16
  1  all_to_all  tp  4 ranks, stride 1  12.0 MiB in, 12.0 MiB out

A plan is made of algebra alone: two shardings, a shape and a dtype. It is the same on every rank,
whatever groups exist. Where both shardings have common digits, it takes the same time for eight ranks and
for a million: ranks are listed only when a step is asked for them (`ranks`, `exchange`). Without common
digits, as between two sets of ranks, the planner looks at the tiles of all ranks.

How the cheapest sequence is found stands in `axes.algebra.planning`. Of a step an executor needs to know:

Everything a step says about boxes, counts and order comes from `exchange(rank)`. Tensors are local,
row-major; "the boxes of a message" are read or written one after the other, each row-major. Boxes are
those of `opened`, the same step on a tensor with one dim for each factor: there a part of a split
factor is one box, which lies in memory as the tile of the rank that has it. What an executor does, by
`kind`:

slice
    No communication. For each `(from_box, to_box)` of `copies`: `out[to_box] = tile[from_box]`. Where
    both have the same factors that is one box.

all_reduce
    `op` over the group, on a copy of the tile. Then divide by `divisor` where that isn't 1 (a mean),
    in the dtype in which the reduction was accumulated.

reduce_scatter
    `sends` holds one message for each rank of the group, itself included, in order: row `i` of the
    send buffer `[group_size, padded]` is message `i`'s boxes, the rest of the row arbitrary. Reduce
    and scatter; the first `receives[0].elements` elements of the result are its boxes of the output.
    Then divide by `divisor`. Where `send_bytes` is 0, the tile itself is the send buffer.

all_gather
    The tile, flattened and padded at its end to `padded`, is gathered to `[group_size, padded]`; from
    row `i` the first `receives[i].elements` elements go to the boxes of `receives[i]` (all ranks, itself
    included). Where `receive_bytes` is 0, the output itself is the receive buffer.

all_to_all, permute
    Pack the boxes of `sends` end to end, exchange, unpack into the boxes of `receives`; the `copies` stay on
    the rank. A permute sends to at most one rank and receives from at most one.

reduce_move
    As all_to_all, but each message received, and the copies, are one contribution: that of its
    `layer`. The output is `op` over the contributions of layers `0..layers-1`, in that order, then
    divided by `divisor`. Every element of the output has exactly one contribution of each layer, which
    may come from several messages; the copies are those of the rank's own `layer`.

Between two sets of ranks, a rank for which `takes_part` is false does nothing in a step; one that has
no tile of the source comes with nothing, one that has none of the target leaves with nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import attrgetter

from axes.algebra import providers
from axes.algebra.chunks import Tile, boxes_within, volume
from axes.algebra.cost import CostModel, members_of_node, node_size
from axes.algebra.errors import MeshError, ShardingError, shown
from axes.algebra.layout import Layout, Universe
from axes.algebra.mesh import Mesh, required_mesh
from axes.algebra.opaque import Dtype
from axes.algebra.planning.candidates import COLLECTIVES, Digit, Stage, Stages, State, candidates, common, opened
from axes.algebra.planning.exchange import Exchange, Message, group_between, ranks_of_both
from axes.algebra.sharding import Sharding, Slots, unmarked
from axes.algebra.sizes import Shape, checked_tensor_shape, given_sizes
from axes.algebra.specs import check_same_dims, factors_by_name, parsed_sharding
from axes.algebra.splits import split

ITEMSIZE = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes per element of each dtype; any `float8...` or `float4...` has 1."""

_NARROW = ("float8", "float4")

End = str | Sharding


@dataclass(frozen=True)
class Step:
    """One local or collective operation, which takes the sharding `source` to the sharding `target`.

    kind: slice, all_reduce, reduce_scatter, all_gather, all_to_all, permute or reduce_move.
    layout: the group, as the digits of the rank that it steps through, in its order; None where the
        group is all ranks of both meshes (between two sets of ranks).
    group_size: the number of ranks that communicate; 1 for a slice.
    op, divisor: of a reduction. resolved: the digits over which a reduce_move reduces.
    bytes_in, bytes_out: over the links, for the rank that has most. What the busiest rank sends is an
        even share of those that have the same; whole messages may make it less, or slightly more.
    send_bytes, receive_bytes: the buffers beside the tiles; 0 where the tile itself is the buffer.
    cost: modelled microseconds.
    rank: the rank that the step is seen from.
    """

    kind: str
    source: Sharding
    target: Sharding
    shape: Shape
    layout: Layout | None
    group_size: int
    rank: int
    op: str | None = None
    divisor: int = 1
    resolved: Layout = Layout()  # noqa: RUF009 - layouts are immutable
    bytes_in: int = 0
    bytes_out: int = 0
    send_bytes: int = 0
    receive_bytes: int = 0
    cost: float = 0.0
    ranks_per_node: int = 8

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes that the group steps through; none between two sets of ranks."""
        return () if self.layout is None else self.source.mesh.calls(self.layout)

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks of this rank's group, in its order."""
        return self.ranks_of(self.rank)

    def ranks_of(self, rank: int) -> Sequence[int]:
        """The global ranks of another rank's group, in its order; none where it takes no part."""
        if not self.takes_part(rank):
            return ()
        if self.layout is not None:
            return self.source.universe.group(self.layout, rank)
        return ranks_of_both(self.source.universe, self.target.universe)

    def takes_part(self, rank: int) -> bool:
        """Whether a rank does anything in this step."""
        one, two = self.source.universe, self.target.universe
        return one.position(rank) is not None or two.position(rank) is not None

    @property
    def is_even(self) -> bool:
        """Whether the tiles of all ranks have one shape, before the step and after."""
        return self.source.divides(self.shape) and self.target.divides(self.shape)

    @property
    def factors(self) -> tuple[Shape, ...]:
        """For each dim the sizes of the factors that both sides have, or its own size alone."""
        return self._opened[0]

    @property
    def opened(self) -> Step:
        """The same step on the tensor with one dim for each of `factors`."""
        return self._opened[1]

    @cached_property
    def _opened(self) -> tuple[tuple[Shape, ...], Step]:
        factors, source, target = opened(self.source, self.target, self.shape)
        if source is self.source:
            return factors, self
        shape = tuple([n for sizes in factors for n in sizes])
        return factors, replace(self, source=source, target=target, shape=shape)

    def exchange(self, rank: int | None = None) -> Exchange:
        """What a rank sends, receives and copies, in boxes of `opened`; this rank by default.

        Costs O(size of the group), and more where tiles are replicated: an executor keeps the answer.
        Raises `MeshError` for a rank that takes no part.
        """
        rank = self.rank if rank is None else rank
        if not self.takes_part(rank):
            raise MeshError(f"rank {rank} takes no part in this step")
        step = self.opened
        if step.kind == "slice":
            return _slice(step, rank)
        ranks = tuple(step.ranks_of(rank))
        if step.kind == "all_reduce":
            return Exchange(ranks)
        if step.kind in ("reduce_scatter", "all_gather"):
            return _equal_parts(step, ranks, rank)
        sides = step.source, step.target, step.shape
        return group_between(*sides, step.layout, ranks[0], step.resolved, step.ranks_per_node).exchange(rank)

    def arrivals(self, rank: int) -> Iterable[tuple[int, int, Tile]]:
        """What a rank's tile after the step is made of: `(layer, the rank that it comes from, part of the tensor)`.

        Layers are reduced; the parts of one are apart. Costs O(size of the group).
        """
        ranks = (rank,) if self.kind == "slice" else self.ranks_of(rank)
        if self.kind in ("slice", "all_reduce", "reduce_scatter"):
            tile = self.target.tile(self.shape, rank)
            return [] if tile is None else [(layer, peer, tile) for layer, peer in enumerate(ranks)]
        sides = self.source, self.target, self.shape
        return group_between(*sides, self.layout, ranks[0], self.resolved, self.ranks_per_node).arrivals(rank)


def _slice(step: Step, rank: int) -> Exchange:
    source, target = (end.tile(step.shape, rank) for end in (step.source, step.target))
    if source is None or target is None or not volume(target):
        return Exchange((rank,))
    return Exchange((rank,), copies=tuple(zip(boxes_within(target, source), boxes_within(target, target), strict=True)))


def _equal_parts(step: Step, ranks: tuple[int, ...], rank: int) -> Exchange:
    """A gather, or a reduction that is scattered: the rank's own tile, and its peers' parts of the larger one."""
    gathers, at = step.kind == "all_gather", ranks.index(rank)
    fine, coarse = (step.source, step.target) if gathers else (step.target, step.source)
    whole = coarse.tile(step.shape, rank) or ()
    parts = [fine.tile(step.shape, peer) or () for peer in ranks]
    boxes = [boxes_within(part, whole) if volume(part) else () for part in parts]
    messages = tuple(map(Message, range(len(ranks)), boxes, map(volume, parts)))
    own, padded = (messages[at]._replace(boxes=boxes_within(parts[at], parts[at])),), fine.largest_tile(step.shape)
    if gathers:
        return Exchange(ranks, own, messages, padded=padded)
    return Exchange(ranks, messages, own, layers=len(ranks), padded=padded)


@dataclass(frozen=True, repr=False)
class Plan(providers.Pictured):
    """The steps from one sharding to another, which it prints as a list.

    stages: the same steps in digits, with what they move of `elements`, those of the tensor that they were found for.
    Of any other shape that they cut alike (`cuts_of`) they move as many times more. rank: the rank that the plan is
    seen from; `at` gives another view.
    """

    source: Sharding
    target: Sharding
    shape: tuple[int, ...]
    dtype: str
    rank: int
    stages: Stages
    elements: int
    model: CostModel

    def __hash__(self) -> int:
        return hash((self.source, self.target, self.shape, self.dtype, self.rank))

    @property
    def states(self) -> tuple[Sharding, ...]:
        """The shardings before the first step and after each, in the names of the source and of the target."""
        between = [replace(stage.target.sharding, names=self.source.names) for stage in self.stages[:-1]]
        return (self.source, *between, *[self.target][: len(self.stages)])

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """What is done, one after the other."""
        return tuple([self._step(stage, *pair) for stage, pair in zip(self.stages, pairwise(self.states), strict=True)])

    @property
    def cost(self) -> float:
        """Modelled microseconds."""
        return sum([self._time(stage, math.prod(self.shape)) for stage in self.stages])

    def weight(self, size: int) -> tuple[float, int, int]:
        """What plans are compared by, of a tensor of so many elements: time, then collectives, then bytes."""
        time = sum([self._time(stage, size) for stage in self.stages])
        return float(f"{time:.9g}"), self.collectives, sum([self._bytes(stage.received, size) for stage in self.stages])

    @property
    def collectives(self) -> int:
        """The number of steps that communicate."""
        return sum([stage.kind in COLLECTIVES for stage in self.stages])

    @property
    def bytes_in(self) -> int:
        """Bytes received by the rank that receives most, summed over the steps."""
        return sum([step.bytes_in for step in self.steps])

    @property
    def bytes_out(self) -> int:
        """Bytes sent by the rank that sends most, summed over the steps."""
        return sum([step.bytes_out for step in self.steps])

    @property
    def least(self) -> Plan:
        """The same at the smallest shape that is cut alike; of an odd dim, or of nothing, the size is what it is."""
        sizes = zip(self.shape, cuts_of(*self.states, self.target), strict=True)
        return replace(self, shape=tuple([n if not n or not pieces or n % pieces else pieces for n, pieces in sizes]))

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that ranks can compare: what is done to what, without names or views."""
        ends = [(end.universe, end.mesh.extent, end.dims, end.pending) for end in (self.source, self.target)]
        done = [(stage.kind, stage.group, stage.op, stage.divisor, stage.target.splits) for stage in self.stages]
        return hashlib.sha256(repr((ends, self.shape, self.dtype, done)).encode()).hexdigest()[:16]

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once: source, the result so far, and one step's two buffers.

        Supposes that an executor lets go of a tile in between once it is packed.
        """
        itemsize = itemsize_of(self.dtype)
        held = self.source.largest_tile(self.shape) * itemsize
        made = self.target.largest_tile(self.shape) * itemsize
        steps = [(step.target.largest_tile(self.shape) * itemsize, step) for step in self.steps]
        return held + max([made, *[result + step.send_bytes + step.receive_bytes for result, step in steps]])

    def at(self, rank: int) -> Plan:
        """The same plan seen from another rank."""
        return replace(self, rank=rank)

    def __str__(self) -> str:
        title = f"{self.source} -> {self.target}     {list(self.shape)} {self.dtype}"
        rows = [_row(number, step) for number, step in enumerate(self.steps, 1)]
        if not rows:
            return f"{title}\n  nothing to do"
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join((title, *(f"  {text}" for text in lines)))

    __repr__ = __str__

    def _bytes(self, elements: int | Fraction, size: int) -> int:
        return -(-elements * size // self.elements) * itemsize_of(self.dtype)

    def _time(self, stage: Stage, size: int) -> float:
        if stage.kind not in COLLECTIVES:
            return 0.0
        group = _group(stage.source.universe, stage.target.universe, stage.group, self.model.ranks_per_node)
        moved = self._bytes(stage.received, size), self._bytes(stage.copied, size)
        return self.model.time_us(stage.kind, *group, *moved)

    def _step(self, stage: Stage, source: Sharding, target: Sharding) -> Step:
        one, two, nodes = stage.source.universe, stage.target.universe, self.model.ranks_per_node
        size = math.prod(self.shape)
        return Step(
            stage.kind,
            source,
            target,
            self.shape,
            None if stage.group is None else Layout._joined(stage.group),
            _group(one, two, stage.group, nodes)[0],
            self.rank,
            stage.op,
            stage.divisor,
            Layout._joined(stage.resolved),
            self._bytes(stage.received, size),
            self._bytes(stage.sent, size),
            self._bytes(stage.send, size),
            self._bytes(stage.receive, size),
            self._time(stage, size),
            nodes,
        )


def plan(
    source: End,
    target: End,
    shape: Sequence[int],
    mesh: Mesh | None = None,
    dtype: str | Dtype = "float32",
    cost_model: CostModel | None = None,
    *,
    source_mesh: Mesh | None = None,
    target_mesh: Mesh | None = None,
    sizes: Mapping[str, int] | None = None,
    **keywords: int,
) -> Plan:
    """Find the collectives that take a tensor from one sharding to another, as `axes.reshard` runs them.

    No process is needed, and the time doesn't depend on the number of ranks. The search follows Rink et al.,
    "Memory-efficient array redistribution through portable collective communication" (2021).

    Args:
        source: The sharding of the tensor, a spec or a `Sharding`. A spec is complete: a dim without an `@` is
            unsplit.
        target: The sharding of the result, in the same form.
        shape: The whole shape.
        mesh: The mesh of both, by default the ambient one.
        dtype: A torch dtype or its name.
        cost_model: The numbers that decide between candidates.
        source_mesh: The mesh of the source, where it differs: another factorization of the same ranks, or other
            ranks.
        target_mesh: The mesh of the target, in the same way.
        sizes: Sizes of factors of grouped dims, for names that collide with a parameter.
        **keywords: Sizes of factors of grouped dims.

    Returns:
        A `Plan`, seen from the mesh's rank.

    Raises:
        ShardingError: No sequence of collectives takes the source to the target.
        SizeError: Sizes don't follow or don't divide.
        MeshError: There is no mesh, or it lacks an axis.

    Examples:
        >>> from axes.algebra.mesh import Mesh
        >>> print(plan("b@dp s@tp d", "b@dp s d@tp", (8, 2048, 4096), mesh=Mesh("dp=2 tp=4"), dtype="bfloat16"))
        b@dp s@tp d -> b@dp s d@tp     [8, 2048, 4096] bfloat16
          1  all_to_all  tp  4 ranks, stride 1  12.0 MiB in, 12.0 MiB out
    """
    shape = checked_tensor_shape(shape)
    known = dict.fromkeys(name for end in (source, target) if isinstance(end, str) for name in factors_by_name(end))
    given = given_sizes(keywords, sizes, (), known, "the specs")
    check_same_dims(source, target)
    one = _end(source, source_mesh if source_mesh is not None else mesh, shape, given)
    two = _end(target, target_mesh if target_mesh is not None else mesh, shape, given)
    model = model_of(one.mesh) if cost_model is None else cost_model
    if not isinstance(model, CostModel):
        raise ShardingError(f"cost_model is an axes.CostModel; found {shown(cost_model)}")
    found = cheapest(choices_between(one, two, shape, dtype_name(dtype), model), shape)
    # What is kept is of shardings that are equal, whatever the names of their dims.
    return replace(found, source=one, target=two, rank=one.mesh.rank)


def _end(end: End, mesh: Mesh | None, shape: Shape, given: Mapping[str, int]) -> Sharding:
    if isinstance(end, Sharding):
        found = end
    else:
        named = {name: size for name, size in given.items() if name in factors_by_name(end)}
        found = parsed_sharding(required_mesh(mesh, "axes.plan"), end, tuple(sorted(named.items())), len(shape))
    # `same` says that values are equal on every rank, as replicated ones are: it matters to gradients alone.
    return unmarked(found)[0].at(shape)


def model_of(mesh: Mesh) -> CostModel:
    """The cost model of a mesh: the default one, with the mesh's own number of ranks per node."""
    return CostModel() if mesh.ranks_per_node is None else CostModel(ranks_per_node=mesh.ranks_per_node)


def cuts_of(*stages: Sharding) -> Shape:
    """Into how many pieces a tensor is cut on the way through some shardings, of whose sizes these are divisors.

    That is 0 for a dim where the stages know its size, or those of its factors.

    >>> from axes.algebra.mesh import Mesh
    >>> mesh = Mesh("dp=2 tp=2")
    >>> cuts_of(mesh.sharding("a@dp b@tp c d"), mesh.sharding("a@dp b c@tp d"))
    (2, 2, 2, 1)
    """

    def cut(*dims: Slots) -> int:
        return math.lcm(*map(attrgetter("pieces"), dims)) if all(map(attrgetter("is_plain"), dims)) else 0

    return tuple(map(cut, *[stage.dims for stage in stages]))


@lru_cache(maxsize=4096)
def choices_between(source: Sharding, target: Sharding, shape: Shape, dtype: str, model: CostModel) -> list[Plan]:
    """The plans worth weighing between two shardings as planning sees them (`Sharding.at`), the plainest first."""
    check_pair(source, target, shape, dtype)
    found = _sequences(source, target, shape, model)
    # They are kept for shardings that are equal, whatever the names of their dims.
    ends, elements = (replace(source, names=()), replace(target, names=())), math.prod(shape) or 1
    return [Plan(*ends, shape, dtype, source.universe.ranks[0], stages, elements, model) for stages in found]


def cheapest(found: Sequence[Plan], shape: Shape) -> Plan:
    """The cheapest plan for another shape that all cut alike: by time, collectives, bytes; the plainer of equals."""
    size = math.prod(shape)
    return found[0] if len(found) == 1 else min(found, key=lambda plan: plan.weight(size))


def _sequences(source: Sharding, target: Sharding, shape: Shape, model: CostModel) -> list[Stages]:
    if source.is_equivalent(target, shape):
        return [()]
    same, nodes = source.universe == target.universe, model.ranks_per_node
    found = common(source, target, shape, nodes) if same else None
    kept = found
    if found is None and (same or not target.pending):
        # What the target keeps pending is in the source's digits, how it is split isn't.
        whole = Sharding(source.mesh, (split(),) * source.ndim, target.pending)
        kept = common(source, whole, shape, nodes)
    found = found or common(target, target, shape, nodes)
    if kept is None or found is None:
        raise _impossible(source, target, "nothing can become pending on other axes than it is")
    _check_pending(source, target, *kept)
    if 0 in shape:
        return [(Stage("slice", kept[0], found[1]),)]
    return candidates(kept[0], found[1], kept[1])


@lru_cache(maxsize=4096)
def _group(one: Universe, two: Universe, group: tuple[Digit, ...] | None, ranks_per_node: int) -> tuple[int, int]:
    """`(size of the group, how many of it share a node)`; all ranks of both universes without a group."""
    if group is not None:
        return math.prod([size for size, _ in group]), node_size(two, group, ranks_per_node)
    ranks = ranks_of_both(one, two)
    return len(ranks), members_of_node(ranks, ranks_per_node)


# --- what can't be --------------------------------------------------------------------------------


def check_pair(source: Sharding, target: Sharding, shape: tuple[int, ...], dtype: str) -> None:
    """Raise `ShardingError` where nothing can take `source` to `target`. Cheap: no rank is looked at."""
    if source.universe == target.universe:
        here, there = source.mesh.extent, target.mesh.extent
        if here != there and not here.contains(there):
            raise _impossible(
                source,
                target,
                f"the target's mesh ({there}) has ranks that the source's ({here}) says nothing "
                "about; declare the tensor replicated over them first, with axes.from_local on the target's mesh",
            )
    elif any(end.mesh.size != end.universe.size for end in (source, target)):
        raise _impossible(
            source, target, "between different sets of ranks both meshes must be whole; take the sub-mesh's own ranks"
        )
    _check_dtype(source, target, dtype)


def _impossible(source: Sharding, target: Sharding, why: str) -> ShardingError:
    return ShardingError(f"{why}\n  source  {source}\n  target  {target}")


def _check_pending(source: Sharding, target: Sharding, start: State, kept: State) -> None:
    has, keeps = ({digit: op for group in state.pending for op, digit in group} for state in (start, kept))
    for digit, op in keeps.items():
        if has.get(digit) != op:
            (over, *_) = [layout for _, layout in target.pending if layout.overlaps(Layout._joined([digit]))]
            axis, there = target.mesh.called(over), has.get(digit, "nothing")
            raise _impossible(source, target, f"the target has {op} pending over {axis}, where the source has {there}")
    left = [tuple([item for item in group if item[1] in keeps]) for group in start.pending]
    goes = [any(digit not in keeps for _, digit in group) for group in start.pending]
    out_of_order = any(stays and leaves for stays, leaves in zip(left, goes[1:], strict=False))
    if out_of_order or tuple(filter(None, left)) != kept.pending:
        why = "reductions are resolved in their order, innermost first, and those of different kinds keep their order"
        raise _impossible(source, target, why)


def _check_dtype(source: Sharding, target: Sharding, dtype: str) -> None:
    itemsize_of(dtype)
    for op, _ in [entry for entry in source.pending if entry not in target.pending]:
        if op == "mean" and not dtype.startswith(("float", "bfloat", "complex")):
            raise _impossible(source, target, f"a mean of {dtype} isn't {dtype}; convert it first, or take the sum")
        if op in ("max", "min") and dtype.startswith("complex"):
            raise _impossible(source, target, f"{dtype} has no order, so no {op}")


def itemsize_of(dtype: str) -> int:
    """Bytes of one element; `ShardingError` for a dtype that isn't known."""
    name = dtype.removeprefix("torch.")
    found = 1 if name.startswith(_NARROW) else ITEMSIZE.get(name)
    if found is None:
        raise ShardingError(f"unknown dtype '{dtype}'; known: {', '.join(ITEMSIZE)}, float8...")
    return found


def dtype_name(dtype: object) -> str:
    """The name of a dtype of torch or numpy; `ShardingError` for what is neither that nor a name of one.

    >>> dtype_name("torch.bfloat16"), dtype_name("float8_e4m3fn")
    ('bfloat16', 'float8_e4m3fn')
    """
    is_text = isinstance(dtype, str)
    is_known = is_text or type(dtype).__module__.partition(".")[0] in ("torch", "numpy")
    name = str(dtype).removeprefix("torch.") if is_known else ""
    if not is_text and name not in ITEMSIZE and not name.startswith(_NARROW):
        raise ShardingError(f"dtype is a torch dtype or its name, like 'bfloat16'; found {shown(dtype)}")
    itemsize_of(name)
    return name


# --- text -----------------------------------------------------------------------------------------


def _row(number: int, step: Step) -> tuple[str, ...]:
    if step.kind not in COLLECTIVES:
        return (str(number), step.kind, "", "no communication", "")
    group = f"{step.group_size} ranks"
    if step.layout is not None:
        ranks = step.source.universe.ranks
        apart = ranks.step if isinstance(ranks, range) else 1
        strides = " ".join(str(stride * apart) for stride in step.layout.strides)
        group += f", stride{'s' if len(step.layout.strides) > 1 else ''} {strides}"
    moved = f"{bytes_text(step.bytes_in)} in, {bytes_text(step.bytes_out)} out"
    return (str(number), step.kind, " ".join(step.axes), group, moved)


def bytes_text(count: int) -> str:
    """Bytes in the unit that reads best.

    >>> bytes_text(12 << 20), bytes_text(100)
    ('12.0 MiB', '100 B')
    """
    if count < 1024:
        return f"{count} B"
    power = min(4, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
