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
from functools import lru_cache
from itertools import pairwise

from axes.algebra import providers
from axes.algebra.cost import CostModel, Traffic, members_of_node, node_size
from axes.algebra.errors import ShardingError, shown
from axes.algebra.layout import Layout, common_digits
from axes.algebra.planning.candidates import COLLECTIVES, Stage, Stages, candidates
from axes.algebra.planning.crossing import crossings
from axes.algebra.planning.digits import Digit, Space, State, common, sorted_classes
from axes.algebra.planning.exchange import ranks_of_both
from axes.algebra.planning.step import Step
from axes.algebra.sharding import Sharding, unmarked
from axes.algebra.sizes import checked_rank, checked_shape
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

OPS = ("sum", "mean", "max", "min")
"""The reductions that can be pending."""

_DEFAULT = CostModel()

Shape = tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Plan:
    """The steps from one sharding to another, which it prints as a list.

    cost: modelled microseconds. rank: the rank that the plan is seen from; `at` gives another view.
    """

    source: Sharding
    target: Sharding
    shape: tuple[int, ...]
    dtype: str
    steps: tuple[Step, ...]
    cost: float
    rank: int

    def __hash__(self) -> int:
        return hash((self.source, self.target, self.shape, self.dtype, self.rank))

    @property
    def collectives(self) -> int:
        """The number of steps that communicate."""
        return sum(step.kind in COLLECTIVES for step in self.steps)

    @property
    def bytes_in(self) -> int:
        """Bytes received by the rank that receives most, summed over the steps."""
        return sum(step.bytes_in for step in self.steps)

    @property
    def bytes_out(self) -> int:
        """Bytes sent by the rank that sends most, summed over the steps."""
        return sum(step.bytes_out for step in self.steps)

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that ranks can compare: what is done to what, without names or views."""
        ends = [_without_names(end) for end in (self.source, self.target)]
        done = [(step.kind, step.layout, step.op, step.divisor, _without_names(step.target)) for step in self.steps]
        return hashlib.sha256(repr((ends, self.shape, self.dtype, done)).encode()).hexdigest()[:16]

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once: source, the result so far, and one step's two buffers.

        Supposes that an executor lets go of a tile in between once it is packed. Over gloo, even tiles that are
        reduced and scattered take up to 16 MiB more, where the parts arrive that are to be added up.
        """
        itemsize = itemsize_of(self.dtype)
        held = self.source.largest_tile(self.shape) * itemsize
        made = self.target.largest_tile(self.shape) * itemsize
        during = (step.output_bytes + step.send_bytes + step.receive_bytes for step in self.steps)
        return held + max(made, *during, 0)

    @property
    def states(self) -> tuple[Sharding, ...]:
        """How the tensor lies before the first step and after each, in the names of the source and of the target."""
        between = [replace(step.target, names=self.source.names) for step in self.steps[:-1]]
        return (self.source, *between, *[self.target][: len(self.steps)])

    def at(self, rank: int) -> Plan:
        """The same plan seen from another rank."""
        return replace(self, rank=rank, steps=tuple(replace(step, rank=rank) for step in self.steps))

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


Cuts = tuple[tuple[int, int], ...]
"""For each dim the number of its pieces, and what its sizes have to divide by if they are to be cut alike.

That is 1 where all stages of a plan cut the dim alike, and 0 where the stages know its size, or those of its factors.
"""


@lru_cache(maxsize=4096)
def cuts_of(*stages: Sharding) -> Cuts:
    """Into what a tensor is cut on the way through some shardings.

    >>> from axes.algebra.mesh import Mesh
    >>> mesh = Mesh("dp=2 tp=2")
    >>> cuts_of(mesh.sharding("a@dp b@tp c d"), mesh.sharding("a@dp b c@tp d"))
    ((2, 1), (2, 2), (2, 2), (1, 1))
    """
    one_universe = len({stage.universe for stage in stages}) == 1
    found = []
    for dims in zip(*[stage.dims for stage in stages], strict=True):
        pieces, same = math.lcm(*[dim.pieces for dim in dims]), one_universe and len({*dims}) == 1
        found.append((pieces, (1 if same else pieces) if all(dim.is_plain for dim in dims) else 0))
    return tuple(found)


def odd_dims(shape: Sequence[int], found: Cuts) -> set[int]:
    """The dims that can't have another size if they are to be cut so; the others can, if they divide as well."""
    sizes = enumerate(zip(shape, found, strict=True))
    return {dim for dim, (size, (_, divisor)) in sizes if not divisor or size % divisor}


def _without_names(end: Sharding) -> tuple[object, ...]:
    """What a sharding says, for ranks to compare."""
    return end.universe, end.mesh.extent, end.dims, end.pending


@lru_cache(maxsize=4096)
def _plan(source: Sharding, target: Sharding, shape: Shape, dtype: str, model: CostModel, rank: int) -> Plan:
    found = choices_between(source, target, shape, dtype, model)
    return found.plan(found.cheapest(shape), shape, rank)


@lru_cache(maxsize=4096)
def choices_between(source: Sharding, target: Sharding, shape: Shape, dtype: str, model: CostModel) -> Choices:
    """The sequences of stages worth weighing between two shardings as planning sees them (`Sharding.at`)."""
    check_pair(source, target, shape, dtype)
    return Choices(source, target, shape, dtype, model)


def choices(
    source: Sharding, target: Sharding, shape: Sequence[int], dtype: str = "float32", cost_model: CostModel = _DEFAULT
) -> list[Plan]:
    """Every plan that was weighed for a redistribution, the plainest first. For looking, and for tests."""
    shape = checked_shape(shape)
    found = choices_between(_seen(source, shape), _seen(target, shape), shape, dtype, cost_model)
    return [found.plan(at, shape, source.universe.ranks[0]) for at in range(len(found.sequences))]


class Choices:
    """The sequences of stages worth weighing between two shardings, for tensors of `shape`.

    Where the stages cut another shape alike (`cuts_of`), every number of a stage is proportional to the elements
    of the tensor: its sequences are the same, and which is the cheapest is asked of its own numbers.
    """

    def __init__(self, source: Sharding, target: Sharding, shape: Shape, dtype: str, model: CostModel):
        # It is kept for shardings that are equal, whatever the names of their dims.
        self.source, self.target = replace(source, names=()), replace(target, names=())
        self.shape, self.dtype, self.model = shape, dtype, model
        self.space, self.sequences = _sequences(source, target, shape, model)
        self.states = lru_cache(maxsize=256)(self._states)

    def cheapest(self, shape: Shape) -> int:
        """The number of the cheapest sequence at a shape: by time, then collectives, bytes, and the plainer one."""
        if len(self.sequences) == 1:
            return 0

        def weight(at: int) -> tuple[float, int, int]:
            steps = [self._traffic(stage, shape) for stage in self.sequences[at] if stage.kind in COLLECTIVES]
            time = sum([self.model.time_us(traffic) for traffic in steps])
            return float(f"{time:.9g}"), len(steps), sum([traffic.bytes_in for traffic in steps])

        return min(range(len(self.sequences)), key=weight)

    def least(self, at: int) -> Shape:
        """The smallest shape that one of the sequences cuts alike; of an odd dim, or of nothing, the size itself."""
        found = cuts_of(*self.states(at))
        odd, sizes = odd_dims(self.shape, found), enumerate(zip(self.shape, found, strict=True))
        return tuple([size if dim in odd or not size else pieces for dim, (size, (pieces, _)) in sizes])

    def plan(self, at: int, shape: Shape, rank: int) -> Plan:
        """One of the sequences as a plan for a tensor of `shape`, seen from a rank."""
        ends = pairwise(self.states(at))  # of a plan without a step these are two, and the same shards
        steps = tuple([self._step(*each, shape, rank) for each in zip(self.sequences[at], ends, strict=False)])
        return Plan(self.source, self.target, shape, self.dtype, steps, sum([step.cost for step in steps]), rank)

    def _states(self, at: int) -> tuple[Sharding, ...]:
        # The ends are the shardings as they were given, so that nothing is lost of how they were said.
        between = [stage.outside or self.space.sharding(stage.target) for stage in self.sequences[at][:-1]]
        return (self.source, *between, self.target)

    def _traffic(self, stage: Stage, shape: Shape) -> Traffic:
        """A stage as the cost model sees it."""
        universe = self.source.universe if stage.outside is None else stage.outside.universe
        group = _group(universe, self.source.universe, stage.group, self.model.ranks_per_node)
        moved = self._bytes(stage.received, shape, stage.shares), self._bytes(stage.copied, shape)
        return Traffic(stage.kind, *group, *moved)

    def _bytes(self, elements: int, shape: Shape, shares: int = 1) -> int:
        return self._times(elements, shape, shares) * itemsize_of(self.dtype)

    def _times(self, elements: int, shape: Shape, shares: int = 1) -> int:
        """What elements for a tensor of the own shape are for another one's."""
        return -(-elements * math.prod(shape) // ((math.prod(self.shape) or 1) * shares))

    def _step(self, stage: Stage, ends: tuple[Sharding, Sharding], shape: Shape, rank: int) -> Step:
        traffic = self._traffic(stage, shape)
        return Step(
            stage.kind,
            *ends,
            shape,
            None if stage.group is None else Layout.of(stage.group),
            traffic.group_size,
            rank,
            stage.op,
            stage.divisor,
            Layout.of(stage.resolved),
            traffic.bytes_in,
            self._bytes(stage.sent, shape, stage.shares),
            self._bytes(stage.send, shape),
            self._bytes(stage.receive, shape),
            self._bytes(ends[1].largest_tile(self.shape), shape),
            self._times(stage.padded, shape),
            stage.flat,
            self.model.time_us(traffic) if stage.kind in COLLECTIVES else 0.0,
            self.model.ranks_per_node,
        )


def _sequences(source: Sharding, target: Sharding, shape: Shape, model: CostModel) -> tuple[Space, list[Stages]]:
    if 0 in shape or source.is_equivalent(target, shape):
        nothing = State((), ())
        return Space(source, (), ()), [(Stage("slice", nothing, nothing),) if 0 in shape else ()]
    universe, node = source.universe, Layout((model.ranks_per_node,), (1,))
    found = common(source, target, shape, node) if universe == target.universe else None
    if found is None:
        return crossings(source, target, shape, model.ranks_per_node)

    def inside(digit: Digit) -> bool:
        return node_size(universe, (digit,), model.ranks_per_node) == digit[0]

    return found[0], candidates(*found, inside)


@lru_cache(maxsize=4096)
def _group(
    universe: Universe, source: Universe, group: tuple[Digit, ...] | None, ranks_per_node: int
) -> tuple[int, int]:
    """`(size of the group, how many of it share a node)`; all ranks of both universes without a group."""
    if group is not None:
        return math.prod([size for size, _ in group]), node_size(universe, group, ranks_per_node)
    ranks = ranks_of_both(source, universe)
    return len(ranks), members_of_node(ranks, ranks_per_node)


# --- what can't be --------------------------------------------------------------------------------


def check_pair(source: Sharding, target: Sharding, shape: tuple[int, ...], dtype: str) -> None:
    """Raise `ShardingError` where nothing can take `source` to `target`. Cheap: no rank is looked at."""
    for end in (source, target):
        if end.ndim != len(shape):
            raise ShardingError(f"'{end}' has {end.ndim} dims; the tensor has shape {list(shape)}")
        unknown = next((op for op, _ in end.pending if op not in OPS), None)
        if unknown is not None:
            raise ShardingError(f"'{end}' has '{unknown}' pending; known reductions: {', '.join(OPS)}")
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
    _check_pending(source, target)
    _check_dtype(source, target, dtype)


def _impossible(source: Sharding, target: Sharding, why: str) -> ShardingError:
    return ShardingError(f"{why}\n  source  {source}\n  target  {target}")


def _check_pending(source: Sharding, target: Sharding) -> None:
    if not target.pending:
        return
    layouts = [layout for _, layout in (*source.pending, *target.pending)]
    refined = common_digits(layouts) if source.universe == target.universe else None
    if refined is None:
        raise _impossible(source, target, "nothing can become pending on other axes than it is")
    has, keeps = (
        {digit: (op, end.mesh.called(layout)) for op, layout in end.pending for digit in refined[layout]}
        for end in (source, target)
    )
    for digit, (op, axis) in keeps.items():
        if digit not in has:
            why = f"the target has {op} pending over {axis}, where the source has nothing"
            raise _impossible(source, target, why)
        if has[digit][0] != op:
            why = f"the source has {has[digit][0]} pending over {has[digit][1]}, not {op}"
            raise _impossible(source, target, why)
    one, two = (sorted_classes([(op, digit) for digit, (op, _) in side.items()]) for side in (has, keeps))
    left = [tuple([item for item in group if item[1] in keeps]) for group in one]
    if tuple(filter(None, left)) != two:
        raise _impossible(source, target, "reductions of different kinds keep their order")
    for before, after in zip(left, one[1:], strict=False):
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
    if name.startswith(_NARROW):
        return 1
    if name not in ITEMSIZE:
        raise ShardingError(f"unknown dtype '{dtype}'; known: {', '.join(ITEMSIZE)}, float8...")
    return ITEMSIZE[name]


def dtype_name(dtype: object) -> str:
    """The name of a dtype of torch or numpy; `ShardingError` for what is neither that nor a name of one.

    >>> dtype_name("torch.bfloat16"), dtype_name("float8_e4m3fn")
    ('bfloat16', 'float8_e4m3fn')
    """
    if isinstance(dtype, str):
        itemsize_of(dtype)
        return dtype.removeprefix("torch.")
    try:
        name = str(dtype).removeprefix("torch.")
    except Exception:  # of the value's own class, or of Python for integers of thousands of digits
        name = ""
    is_dtype = type(dtype).__module__.partition(".")[0] in ("torch", "numpy")
    if not is_dtype or (name not in ITEMSIZE and not name.startswith(_NARROW)):
        raise ShardingError(f"dtype is a torch dtype or its name, like 'bfloat16'; found {shown(dtype)}")
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
