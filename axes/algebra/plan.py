"""Plans: any sharding turned into any other, by the cheapest sequence of collectives.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2 tp=4")
>>> source, target = mesh.sharding("b@dp s@tp d"), mesh.sharding("b@dp s d@tp")
>>> print(plan(source, target, (8, 2048, 4096), "bfloat16"))
b@dp s@tp d -> b@dp s d@tp     [8, 2048, 4096] bfloat16
  1  all_to_all  tp  4 ranks, stride 1  12.0 MiB in, 12.0 MiB out

A plan is made of algebra alone: two shardings, a shape and a dtype. It is the same on every rank,
whatever groups exist, and takes the same time for eight ranks and for a million: ranks are listed
only when a step is asked for them (`ranks`, `exchange`).

How the cheapest sequence is found is told in `axes.algebra.planning`; what an executor does with a
step in `axes.algebra.planning.step`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise

from axes.algebra import providers
from axes.algebra.cost import CostModel, members_of_node, node_size
from axes.algebra.errors import ShardingError, shown
from axes.algebra.layout import Layout
from axes.algebra.planning.candidates import COLLECTIVES, Stage, Stages, candidates
from axes.algebra.planning.digits import Digit, State, common
from axes.algebra.planning.exchange import ranks_of_both
from axes.algebra.planning.step import Step
from axes.algebra.sharding import Sharding, Slots, unmarked
from axes.algebra.sizes import checked_rank, checked_shape
from axes.algebra.splits import split
from axes.algebra.universe import Universe

ITEMSIZE = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes per element of each dtype; any `float8...` or `float4...` has 1."""

_NARROW = ("float8", "float4")

_DEFAULT = CostModel()

Shape = tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Plan:
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

    @cached_property
    def states(self) -> tuple[Sharding, ...]:
        """How the tensor lies before the first step and after each, in the names of the source and of the target."""
        between = [replace(stage.target.sharding, names=self.source.names) for stage in self.stages[:-1]]
        return (self.source, *between, *[self.target][: len(self.stages)])

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """What is done, one after the other."""
        return tuple([self._step(stage, *pair) for stage, pair in zip(self.stages, pairwise(self.states), strict=True)])

    @cached_property
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
        ends = [_without_names(end) for end in (self.source, self.target)]
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

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str | None:
        return providers.html_of(self)

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
            None if stage.group is None else Layout.of(stage.group),
            _group(one, two, stage.group, nodes)[0],
            self.rank,
            stage.op,
            stage.divisor,
            Layout.of(stage.resolved),
            self._bytes(stage.received, size),
            self._bytes(stage.sent, size),
            self._bytes(stage.send, size),
            self._bytes(stage.receive, size),
            self._time(stage, size),
            nodes,
        )


def plan(
    source: Sharding,
    target: Sharding,
    shape: Sequence[int],
    dtype: str = "float32",
    cost_model: CostModel = _DEFAULT,
    rank: int | None = None,
) -> Plan:
    """The cheapest plan that takes a tensor of `shape` from `source` to `target`.

    rank: the rank to see it from, the first of the source by default.

    Raises `ShardingError`, with both shardings on a line each, where there is no such redistribution:
    an axis twice, a split factor that doesn't divide, ranks that the source says nothing about,
    a reduction pending where the source has none, or kept while one after it is resolved.
    """
    shape = checked_shape(shape)
    source, target = _seen(source, shape), _seen(target, shape)
    rank = source.universe.ranks[0] if rank is None else checked_rank("rank", rank)
    # What is kept is of shardings that are equal, whatever the names of their dims.
    return replace(_plan(source, target, shape, dtype, cost_model, rank), source=source, target=target)


def _seen(end: Sharding, shape: tuple[int, ...]) -> Sharding:
    """What planning sees of a sharding.

    `same` says that values are equal on every rank, as replicated ones are: it matters to gradients alone.
    """
    return unmarked(end)[0].at(shape)


@lru_cache(maxsize=4096)
def cuts_of(*stages: Sharding) -> Shape:
    """Into how many pieces a tensor is cut on the way through some shardings, of whose sizes these are divisors.

    That is 0 for a dim where the stages know its size, or those of its factors.

    >>> from axes.algebra.mesh import Mesh
    >>> mesh = Mesh("dp=2 tp=2")
    >>> cuts_of(mesh.sharding("a@dp b@tp c d"), mesh.sharding("a@dp b c@tp d"))
    (2, 2, 2, 1)
    """

    def cut(*dims: Slots) -> int:
        return 0 if False in [dim.is_plain for dim in dims] else math.lcm(*[dim.pieces for dim in dims])

    return tuple(map(cut, *[stage.dims for stage in stages]))


def _without_names(end: Sharding) -> tuple[object, ...]:
    """What a sharding says, for ranks to compare."""
    return end.universe, end.mesh.extent, end.dims, end.pending


@lru_cache(maxsize=4096)
def _plan(source: Sharding, target: Sharding, shape: Shape, dtype: str, model: CostModel, rank: int) -> Plan:
    return replace(cheapest(choices_between(source, target, shape, dtype, model), shape), rank=rank)


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
            (over, *_) = [layout for _, layout in target.pending if layout.overlaps(Layout.of([digit]))]
            axis, there = target.mesh.called(over), has.get(digit, "nothing")
            raise _impossible(source, target, f"the target has {op} pending over {axis}, where the source has {there}")
    left = [tuple([item for item in group if item[1] in keeps]) for group in start.pending]
    if tuple(filter(None, left)) != kept.pending:
        raise _impossible(source, target, "reductions of different kinds keep their order")
    for before, after in zip(left, start.pending[1:], strict=False):
        if before and any(digit not in keeps for _, digit in after):
            raise _impossible(
                source,
                target,
                "reductions are resolved in their order, innermost first; the target keeps one "
                f"({before[0][0]}) that comes before one that it resolves ({after[0][0]})",
            )


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


def time_text(microseconds: float) -> str:
    """A time in the unit that reads best.

    >>> time_text(61.94), time_text(2500.0), time_text(0.25), time_text(3.2e6)
    ('62 us', '2.5 ms', '0.2 us', '3.2 s')
    """
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.1f} {unit}"
    return f"{microseconds:.1f} us" if microseconds < 10 else f"{microseconds:.0f} us"


def bytes_text(count: int) -> str:
    """Bytes in the unit that reads best.

    >>> bytes_text(12 << 20), bytes_text(100)
    ('12.0 MiB', '100 B')
    """
    if count < 1024:
        return f"{count} B"
    power = min(4, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
