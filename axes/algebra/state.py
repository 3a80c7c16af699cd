"""A state: which ranks hold which part of a tensor, in the few words that planning needs.

A sharding has names and text; a state is what is left when they are stripped: for each dim the
layouts that split it (major first), and the layouts whose reductions are still pending.

>>> world = Universe.of(range(4))
>>> cp, tp = Layout((2,), (2,)), Layout((2,), (1,))
>>> state = State(world, Layout((4,), (1,)), ((cp, tp), ()), names=((cp, "cp"), (tp, "tp")))
>>> str(state)
'd0@(cp tp) d1'
>>> [tile(state, (8, 3), rank)[0] for rank in range(4)]
[((0, 2),), ((2, 4),), ((4, 6),), ((6, 8),)]

One layout is one split, a `torch.chunk`: where a dim doesn't divide, the layouts of a state neither
merge nor split. Everything else is replicated over the *extent*, the ranks that take part. Where
the extent isn't the whole universe, the ranks that differ in other digits hold independent tensors:
what is planned happens within the line of the extent through each rank.

A dim may be a product of factors, as `(qkv=3 heads@tp hd)` is: `Factors` says which factor is
split. A rank's part of such a dim is several runs of indices, `runs` below, so what follows treats
every part as a tuple of runs, of which an ordinary split has exactly one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product

from axes.algebra.chunks import largest_chunk, nested_chunk
from axes.algebra.errors import MeshError, ShardingError
from axes.algebra.grammar import place_text
from axes.algebra.layout import Layout, digits
from axes.algebra.universe import Universe

LINEAR = frozenset({"sum", "mean"})
OPS = ("sum", "mean", "max", "min")
"""The reductions that can be pending."""

Runs = tuple[tuple[int, int], ...]
"""Ascending, disjoint `(start, stop)` along one dim; `((start, start),)` where there is nothing."""

Tile = tuple[Runs, ...]
"""What a rank holds: the product, over the dims, of their runs."""


@dataclass(frozen=True)
class Factors:
    """A dim that is a product of factors (major first), each split over its own layouts.

    `Factors((3, 8, 64), ((), (tp,), ()))` is `(qkv=3 heads@tp hd)`. A split factor must divide.
    """

    sizes: tuple[int, ...]
    splits: tuple[tuple[Layout, ...], ...]


Split = tuple[Layout, ...] | Factors
"""How a dim is split: over layouts, major first, or factor by factor."""


@dataclass(frozen=True)
class State:
    """Where the parts of a tensor are. Equal states hold the same parts on the same ranks.

    universe: the ranks, in order.
    extent: which positions of the universe take part, as a layout (its order doesn't matter).
    splits: for each dim the layouts that split it, major first.
    pending: `(op, layouts)` in the order in which the reductions are resolved, innermost first.
        op is "sum", "mean", "max" or "min".
    names: what layouts are called, for printing.
    text: the sharding as its author wrote it, for printing.
    """

    universe: Universe
    extent: Layout
    splits: tuple[Split, ...]
    pending: tuple[tuple[str, tuple[Layout, ...]], ...] = ()
    names: tuple[tuple[Layout, str], ...] = ()
    text: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # Digits in the order of the universe, so that equal sets of ranks are equal extents.
        by_stride = sorted(self.extent.modes, key=lambda mode: -mode[1])
        object.__setattr__(self, "extent", Layout.of(by_stride))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.universe, self.extent, self.splits, self.pending))

    def __str__(self) -> str:
        return self.text if self.text is not None else _text(self)

    @property
    def ndim(self) -> int:
        """The number of dims of the tensor."""
        return len(self.splits)

    def line(self, rank: int) -> Sequence[int]:
        """The global ranks that take part together with `rank`, in the order of the universe."""
        return line(self.universe, self.extent, rank)


def slots(state: State, shape: Sequence[int]) -> tuple[tuple[int, int, tuple[Layout, ...]], ...]:
    """`(dim, size, splits)` of each factor; a dim that isn't factored is its only factor.

    >>> world = Universe.of(range(2))
    >>> slots(State(world, Layout((2,), (1,)), (Factors((3, 4), ((), (Layout((2,), (1,)),))), ())), (12, 5))
    ((0, 3, ()), (0, 4, (2:1,)), (1, 5, ()))
    """
    found: list[tuple[int, int, tuple[Layout, ...]]] = []
    for dim, (split, size) in enumerate(zip(state.splits, shape, strict=True)):
        if isinstance(split, Factors):
            found.extend((dim, *factor) for factor in zip(split.sizes, split.splits, strict=True))
        else:
            found.append((dim, size, split))
    return tuple(found)


def divides_evenly(state: State, shape: Sequence[int]) -> bool:
    """Whether every dim divides into its pieces, as factors always do."""
    return len(shape) == state.ndim and not any(
        isinstance(split, tuple) and size % math.prod([layout.size for layout in split])
        for split, size in zip(state.splits, shape, strict=True)
    )


def check_state(state: State, shape: Sequence[int]) -> None:
    """Raise `ShardingError` where the state can't be, or not for a tensor of this shape.

    An axis twice, axes outside the extent, a wrong number of dims, a split factor that doesn't
    divide, a reduction that isn't known.
    """
    if state.ndim != len(shape):
        raise ShardingError(f"'{state}' has {state.ndim} dims; the tensor has shape {list(shape)}")
    for dim, (split, size) in enumerate(zip(state.splits, shape, strict=True)):
        if isinstance(split, Factors):
            _check_factors(state, dim, split, size)
    for op, _ in state.pending:
        if op not in OPS:
            raise ShardingError(f"'{state}' has '{op}' pending; known reductions: {', '.join(OPS)}")
    _check_layouts(state)


def _check_factors(state: State, dim: int, split: Factors, size: int) -> None:
    if len(split.sizes) != len(split.splits) or math.prod(split.sizes) != size:
        raise ShardingError(f"'{state}': dim {dim} has {size} elements, not {' * '.join(map(str, split.sizes))}")
    for factor, layouts in zip(split.sizes, split.splits, strict=True):
        pieces = math.prod(layout.size for layout in layouts)
        if factor % pieces:
            raise ShardingError(
                f"'{state}': a split factor must divide; found {factor} of dim {dim} over {pieces} ranks"
            )


def _check_layouts(state: State) -> None:
    used = used_layouts(state)
    seen: list[Layout] = []
    for layout in used:
        for other in seen:
            if layout.overlaps(other):
                raise ShardingError(
                    f"'{state}' uses {layout_name(state, layout)} twice"
                    if layout == other
                    else f"'{state}' uses {layout_name(state, layout)} and {layout_name(state, other)}, "
                    "which share digits of the rank; an axis may be used once"
                )
        seen.append(layout)
    try:
        whole = set(digits(state.extent, *used)[0])
    except MeshError as error:
        raise ShardingError(f"'{state}' uses axes that don't fit together: {error}") from error
    for layout in used:
        if not set(digits(state.extent, layout)[1]) <= whole and not state.extent.contains(layout):
            raise ShardingError(f"'{state}' uses {layout_name(state, layout)}, which isn't of its mesh")
    if state.extent.cosize > state.universe.size:
        raise ShardingError(f"'{state}' reaches outside its {state.universe.size} ranks")


def used_layouts(state: State) -> tuple[Layout, ...]:
    """Every layout that splits a dim or is pending, those of size 1 left out."""
    splits = (
        layout
        for split in state.splits
        for layouts in (split.splits if isinstance(split, Factors) else (split,))
        for layout in layouts
    )
    pending = (layout for _, layouts in state.pending for layout in layouts)
    return tuple(layout for group in (splits, pending) for layout in group if layout.size > 1)


# --- ranks ----------------------------------------------------------------------------------------


def line(universe: Universe, layout: Layout, rank: int) -> Sequence[int]:
    """The global ranks on the layout's line through `rank`, in the order of the layout.

    >>> line(Universe.of(range(8)), Layout((2,), (4,)), 5)
    range(1, 9, 4)
    """
    position = universe.position(rank)
    if position is None:
        raise MeshError(f"rank {rank} isn't among the {universe.size} ranks of the mesh")
    base = position - layout.offset(layout.coordinate(position))
    offsets = layout.offsets()
    if isinstance(offsets, range):
        return universe.pick(range(base + offsets.start, base + offsets.stop, offsets.step))
    return universe.pick([base + offset for offset in offsets])


# --- tiles ----------------------------------------------------------------------------------------


def tile(state: State, shape: Sequence[int], rank: int) -> Tile | None:
    """What `rank` holds: for each dim its runs of indices; None where the rank isn't of the state."""
    position = state.universe.position(rank)
    return None if position is None else tile_at(state, tuple(shape), position)


def tile_at(state: State, shape: tuple[int, ...], position: int) -> Tile:
    """`tile` by position in the universe."""
    found: list[Runs] = []
    for size, split in zip(shape, state.splits, strict=True):
        if not isinstance(split, Factors):
            found.append((_piece(size, split, position),))
            continue
        factors = zip(split.sizes, split.splits, strict=True)
        found.append(factor_runs(split.sizes, tuple(_piece(n, lay, position) for n, lay in factors)))
    return tuple(found)


def _piece(size: int, layouts: Sequence[Layout], position: int) -> tuple[int, int]:
    if not layouts:
        return 0, size
    return nested_chunk(size, [lay.size for lay in layouts], [lay.coordinate(position) for lay in layouts])


@lru_cache(maxsize=4096)
def factor_runs(sizes: tuple[int, ...], pieces: tuple[tuple[int, int], ...]) -> Runs:
    """The runs of a factored dim: a product of intervals, flattened in row-major order.

    >>> factor_runs((3, 4), ((0, 3), (2, 4)))
    ((2, 4), (6, 8), (10, 12))
    """
    if any(start >= stop for start, stop in pieces):
        return ((0, 0),)
    inner = 1
    last = len(sizes) - 1
    while last > 0 and pieces[last] == (0, sizes[last]):
        inner *= sizes[last]
        last -= 1
    length = (pieces[last][1] - pieces[last][0]) * inner
    runs: list[tuple[int, int]] = []
    for outer in product(*(range(*piece) for piece in pieces[:last])):
        at = 0
        for index, size in zip((*outer, pieces[last][0]), sizes, strict=False):
            at = at * size + index
        runs.append((at * inner, at * inner + length))
    return merged(runs)


def merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """Adjacent runs as one."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def count(runs: Runs) -> int:
    """How many indices the runs hold."""
    return sum(stop - start for start, stop in runs)


def tile_shape(held: Tile) -> tuple[int, ...]:
    """The shape of the local tensor that holds a tile."""
    return tuple(count(runs) for runs in held)


def largest_tile(state: State, shape: Sequence[int]) -> int:
    """Elements of the largest tile, in closed form."""
    return math.prod(
        largest_chunk(size, [layout.size for layout in layouts]) for _, size, layouts in slots(state, shape)
    )


# --- text -----------------------------------------------------------------------------------------


def layout_name(state: State, layout: Layout) -> str:
    """What the state calls a layout: its name, the names of its parts, or its digits.

    >>> dp, tp = Layout((2,), (2,)), Layout((2,), (1,))
    >>> state = State(Universe.of(range(4)), Layout((4,), (1,)), (), names=((dp, "dp"), (tp, "tp")))
    >>> layout_name(state, dp), layout_name(state, Layout.product(tp, dp)), layout_name(state, Layout((4,), (1,)))
    ('dp', 'tp dp', 'dp tp')
    """
    return " ".join(names_of(state, (layout,)))


def names_of(state: State, layouts: Sequence[Layout]) -> tuple[str, ...]:
    """Names for the digits of some layouts in their order, the longest named stretches first."""
    known = sorted(state.names, key=lambda item: -item[0].size)
    modes = [mode for layout in layouts for mode in layout.modes]
    found: list[str] = []
    while modes:
        for layout, name in known:
            rest = _after(modes, layout) if layout.size > 1 else None
            if rest is not None:
                found.append(name)
                modes = rest
                break
        else:
            found.append("{}:{}".format(*modes.pop(0)))
    return tuple(found)


def _after(modes: Sequence[tuple[int, int]], layout: Layout) -> list[tuple[int, int]] | None:
    """What is left of the digits after those of `layout`, or None where they don't begin with it."""
    left = list(modes)
    for size, stride in layout.modes:
        if not left or left[0][0] * left[0][1] != size * stride or left[0][0] % size:
            return None
        rest, low = left[0][0] // size, left[0][1]
        left[:1] = [(rest, low)] if rest > 1 else []
    return left


def _place(state: State, layouts: Sequence[Layout]) -> str:
    """Layouts as a place of the grammar: `tp`, or `(cp tp)`."""
    return place_text(name for layout in layouts for name in names_of(state, (layout,)))


def _text(state: State) -> str:
    dims: list[str] = []
    for dim, split in enumerate(state.splits):
        if isinstance(split, Factors):
            parts = zip(split.sizes, split.splits, strict=True)
            factors = [f"{size}@{_place(state, lay)}" if lay else str(size) for size, lay in parts]
            dims.append(f"({' '.join(factors)})")
        else:
            dims.append(f"d{dim}@{_place(state, split)}" if split else f"d{dim}")
    pending = " ".join(f"{op}@{_place(state, layouts)}" for op, layouts in state.pending)
    return f"{' '.join(dims)} | {pending}" if pending else " ".join(dims)


def smallest_chunk(extent: int, sizes: Iterable[int]) -> int:
    """Elements of the smallest piece of `nested_chunk`.

    >>> smallest_chunk(5, (2, 2)), smallest_chunk(5, (4,))
    (1, 0)
    """
    # Not always the last piece: a smaller extent may be cut more evenly than a larger one.
    extents = {extent}
    for size in sizes:
        extents = {piece for whole in extents for piece in _piece_sizes(whole, size)}
    return min(extents)


def _piece_sizes(extent: int, size: int) -> set[int]:
    piece = -(-extent // size)
    full = extent // piece if piece else size
    rest = {extent - full * piece} if full < size else set()
    return ({piece} if full else set()) | rest | ({0} if full + 1 < size else set())
