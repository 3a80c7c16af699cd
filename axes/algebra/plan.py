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
from functools import cached_property, lru_cache
from itertools import count, pairwise

from axes.algebra import seam
from axes.algebra.cost import CostModel, Traffic, members_of_node, node_size
from axes.algebra.errors import ShardingError, shown
from axes.algebra.layout import Layout
from axes.algebra.planning.candidates import COLLECTIVES, Leg, Legs, candidates, tiles_are_even
from axes.algebra.planning.crossing import crossings
from axes.algebra.planning.form import Digit, common, sharding_of_form
from axes.algebra.planning.step import Step
from axes.algebra.sharding import ShardedDim, ShardedFactor, Sharding, cached_with_names
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
        return seam.html_of(self)


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
    rank = source.universe.rank(0) if rank is None else checked_rank("rank", rank)
    return _plan(source, target, shape, dtype, cost_model, rank)


def _seen(end: Sharding, shape: tuple[int, ...]) -> Sharding:
    """What planning sees of a sharding.

    `same` says that values are equal on every rank, as replicated ones are: it matters to gradients alone.
    """
    if any(p.op == "same" for p in end.pending):
        end = replace(end, pending=tuple(p for p in end.pending if p.op != "same"))
    return end.at(shape)


def _without_names(end: Sharding) -> tuple[object, ...]:
    """What a sharding says, for ranks to compare."""
    dims = [[(factor.size, factor.layouts) for factor in dim.factors] for dim in end.dims]
    pending = [(p.op, [axis.layout for axis in p.axes]) for p in end.pending]
    return end.universe, end.mesh.extent, dims, pending


@cached_with_names(4096)
def _plan(source: Sharding, target: Sharding, shape: tuple[int, ...], dtype: str, model: CostModel, rank: int) -> Plan:
    if 0 in shape:
        check_pair(source, target, shape, dtype)
        empty = Step("slice", source, target, shape, Layout(), 1, rank)
        return Plan(source, target, shape, dtype, (empty,), 0.0, rank)
    ways = even_ways(source, target, shape, dtype, model) or _ways(source, target, shape, dtype, model)
    return ways.plan(ways.cheapest(shape), shape, rank)


def even_ways(source: Sharding, target: Sharding, shape: tuple[int, ...], dtype: str, model: CostModel) -> Ways | None:
    """The ways between two shardings for all shapes that are cut as `shape` is; None where a tile on one isn't even.

    Source and target are as planning sees them (`Sharding.at`).

    >>> from axes.algebra.mesh import Mesh
    >>> mesh = Mesh("tp=4")
    >>> split, whole = mesh.sharding("s@tp d"), mesh.sharding("s d")
    >>> ways = even_ways(split, whole, (4096, 100), "float32", _DEFAULT)
    >>> ways.plan(ways.cheapest((4096, 100)), ways.shape, 0)
    s@tp d -> s d     [8, 8] float32
      1  all_gather  tp  4 ranks, stride 1  192 B in, 192 B out
    >>> even_ways(split, whole, (4097, 100), "float32", _DEFAULT)
    """
    if 0 in shape or not (source.divides(shape) and target.divides(shape)):
        return None
    ways = _ways(source, target, _representative(source, target, shape), dtype, model)
    return ways if ways.are_even else None


def _representative(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A small shape that every step cuts as it cuts `shape`, if it cuts it evenly. Factors have one size."""
    found = alike(shape, math.lcm(source.universe.size, target.universe.size))
    pairs = zip(source.dims, target.dims, strict=True)
    factored = (any(len(dim.factors) > 1 for dim in pair) for pair in pairs)
    return tuple(size if whole else small for size, small, whole in zip(shape, found, factored, strict=True))


def alike(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Small sizes that divide into the same numbers of parts, where these divide the number of `ranks`.

    A size that is only just cut into single elements stays: what is behind it may lie end to end.

    >>> alike((4096, 100, 8, 0), 8)
    (16, 12, 8, 0)
    """
    return tuple([size if ranks % (size or 1) == 0 else _next_alike(math.gcd(size, ranks), ranks) for size in shape])


@lru_cache(maxsize=4096)
def _next_alike(parts: int, ranks: int) -> int:
    """The smallest size above `parts` that shares just these with the number of ranks."""
    return next(size for size in count(2 * parts, parts) if math.gcd(size, ranks) == parts)


@cached_with_names(4096)
def _ways(source: Sharding, target: Sharding, shape: tuple[int, ...], dtype: str, model: CostModel) -> Ways:
    check_pair(source, target, shape, dtype)
    return Ways(source, target, shape, dtype, model)


def choices(
    source: Sharding, target: Sharding, shape: Sequence[int], dtype: str = "float32", cost_model: CostModel = _DEFAULT
) -> list[Plan]:
    """Every plan that was weighed for a redistribution, the plainest first. For looking, and for tests."""
    shape = checked_shape(shape)
    if 0 in shape:
        return [plan(source, target, shape, dtype, cost_model)]
    source, target = _seen(source, shape), _seen(target, shape)
    ways = _ways(source, target, shape, dtype, cost_model)
    first = source.universe.rank(0)
    return [ways.plan(at, shape, first) for at in range(len(ways.legs))]


def _choices(source: Sharding, target: Sharding, shape: tuple[int, ...], model: CostModel) -> list[Legs]:
    universe = source.universe
    if source.is_equivalent(target, shape):
        return [()]
    node = Layout((model.ranks_per_node,), (1,))
    aligned = common(source, target, shape, node) if universe == target.universe else None
    if aligned is None:
        return crossings(source, target, shape)
    space, one, two = aligned

    def inside(digit: Digit) -> bool:
        return node_size(universe, (digit,), model.ranks_per_node) == digit[0]

    return candidates(space, one, two, inside)


# --- from legs to steps ---------------------------------------------------------------------------


Ratio = tuple[int, int]
"""How many times more elements a tensor has: a numerator and a denominator."""


def _times(elements: int, more: Ratio, shares: int = 1) -> int:
    return -(-elements * more[0] // (more[1] * shares))


class Ways:
    """The sequences of legs worth weighing between two shardings, for `shape` and, where all tiles are even, its like.

    Every number of a leg is then proportional to the elements of the tensor: for another shape that is cut
    alike the ways are the same, and which of them is the cheapest is asked of its own numbers.
    """

    def __init__(self, source: Sharding, target: Sharding, shape: tuple[int, ...], dtype: str, model: CostModel):
        self.source, self.target, self.shape, self.dtype = source, target, shape, dtype
        self.itemsize, self.model = itemsize_of(dtype), model
        self.legs = _choices(source, target, shape, model)
        self.near = lru_cache(maxsize=4096)(self._near)
        self.plan = lru_cache(maxsize=256)(self._plan)
        self.states = lru_cache(maxsize=256)(self._states)

    @cached_property
    def are_even(self) -> bool:
        """Whether every tile on every way has one size on all ranks."""
        legs = [leg for legs in self.legs for leg in legs]
        if any(leg.outside is not None for leg in legs):
            return False
        if not legs:
            return True
        splits = {form.splits for leg in legs for form in (leg.source, leg.target)}
        return all(tiles_are_even(legs[0].space, each) for each in splits)

    def cheapest(self, shape: tuple[int, ...]) -> int:
        """The number of the cheapest way for a tensor of `shape`."""
        if len(self.legs) == 1:
            return 0
        more = math.prod(shape), math.prod(self.shape)
        return min(range(len(self.legs)), key=lambda at: self.weight(at, more))

    def weight(self, at: int, more: Ratio) -> tuple[float, int, int, int]:
        """What the choice goes by: time; then fewer collectives, fewer bytes, the plainer way."""
        legs = [leg for leg in self.legs[at] if leg.kind in COLLECTIVES]
        time, received = 0.0, 0
        for leg in legs:
            elements = _times(leg.received, more, leg.shares)
            time += self.time(leg, more, elements)
            received += elements
        return float(f"{time:.9g}"), len(legs), received, at

    def time(self, leg: Leg, more: Ratio, received: int) -> float:
        """Modelled microseconds of a collective that receives so many elements."""
        size, near = self.near(leg.space.origin.universe, leg.group)
        copied = -(-leg.copied * more[0] // more[1])
        return self.model.time_us(Traffic(leg.kind, size, near, received * self.itemsize, copied * self.itemsize))

    def _near(self, universe: Universe, group: tuple[Digit, ...] | None) -> tuple[int, int]:
        """`(size of the group, how many of it share a node)`."""
        nodes = self.model.ranks_per_node
        if group is not None:
            return math.prod(size for size, _ in group), node_size(universe, group, nodes)
        has = set(self.source.universe.ranks)
        ranks = [*self.source.universe.ranks, *(r for r in self.target.universe.ranks if r not in has)]
        return len(ranks), members_of_node(ranks, nodes)

    def _states(self, at: int) -> list[Sharding]:
        # The ends are the shardings as they were given, so that nothing is lost of how they were said.
        between = [leg.outside or sharding_of_form(leg.space, leg.target) for leg in self.legs[at][:-1]]
        return [self.source, *between, self.target]

    def _plan(self, at: int, shape: tuple[int, ...], rank: int) -> Plan:
        """One of the ways as a plan for a tensor of `shape`, seen from a rank."""
        more = math.prod(shape), math.prod(self.shape)
        pairs = zip(self.legs[at], pairwise(self.states(at)), strict=False)
        steps = tuple(self._step(leg, *ends, shape, more, rank) for leg, ends in pairs)
        cost = sum(step.cost for step in steps)
        return Plan(self.source, self.target, shape, self.dtype, steps, cost, rank)

    def _step(
        self, leg: Leg, source: Sharding, target: Sharding, shape: tuple[int, ...], more: Ratio, rank: int
    ) -> Step:
        def bytes_of(elements: int, shares: int = 1) -> int:
            return _times(elements, more, shares) * self.itemsize

        received = _times(leg.received, more, leg.shares)

        return Step(
            leg.kind,
            source,
            target,
            shape,
            None if leg.group is None else Layout.of(leg.group),
            self.near(leg.space.origin.universe, leg.group)[0],
            rank,
            leg.op,
            leg.divisor,
            Layout.of(leg.resolved),
            received * self.itemsize,
            bytes_of(leg.sent, leg.shares),
            bytes_of(leg.send),
            bytes_of(leg.receive),
            target.largest_tile(shape) * self.itemsize,
            _times(leg.padded, more),
            leg.flat,
            self.time(leg, more, received) if leg.kind in COLLECTIVES else 0.0,
            self.model.ranks_per_node,
        )


# --- what can't be --------------------------------------------------------------------------------


def check_pair(source: Sharding, target: Sharding, shape: tuple[int, ...], dtype: str) -> None:
    """Raise `ShardingError` where nothing can take `source` to `target`. Cheap: no rank is looked at."""
    for end in (source, target):
        if end.ndim != len(shape):
            raise ShardingError(f"'{end}' has {end.ndim} dims; the tensor has shape {list(shape)}")
        unknown = next((p.op for p in end.pending if p.op not in OPS), None)
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
    unsplit = (ShardedDim((ShardedFactor("_"),)),)
    one_way, other = (Sharding(source.mesh, unsplit, end.pending) for end in (source, target))
    found = common(one_way, other, (1,)) if source.universe == target.universe else None
    if found is None:
        raise _impossible(source, target, "nothing can become pending on other axes than it is")
    _, one, two = found
    has = {digit: op for group in one.pending for op, digit in group}
    keeps = {digit: op for group in two.pending for op, digit in group}
    for digit, op in keeps.items():
        if digit not in has:
            raise _impossible(
                source,
                target,
                f"the target has {op} pending over {_axis_of(target, digit)}, where the source has nothing",
            )
        if has[digit] != op:
            raise _impossible(
                source, target, f"the source has {has[digit]} pending over {_axis_of(source, digit)}, not {op}"
            )
    left = tuple(tuple(item for item in group if item[1] in keeps) for group in one.pending)
    if tuple(group for group in left if group) != two.pending:
        raise _impossible(source, target, "reductions of different kinds keep their order")
    for before, after in zip(left, one.pending[1:], strict=False):
        if before and any(digit not in keeps for _, digit in after):
            raise _impossible(
                source,
                target,
                "reductions are resolved in their order, innermost first; the target keeps one "
                f"({before[0][0]}) that comes before one that it resolves ({after[0][0]})",
            )


def _axis_of(end: Sharding, digit: Digit) -> str:
    """The axis of what is pending that has a digit, by its name."""
    layout = Layout.of([digit])
    return next(axis.name for p in end.pending for axis in p.axes if axis.layout.contains(layout))


def _check_dtype(source: Sharding, target: Sharding, dtype: str) -> None:
    itemsize_of(dtype)
    for pending in source.pending:
        op = pending.op
        if pending in target.pending or all(axis.size == 1 for axis in pending.axes):
            continue
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
