"""Shardings: which axes split each dim of a tensor, in which order, and what is pending.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2 cp=2 tp=2")
>>> sharding = mesh.sharding("batch@dp seq@(cp tp) embed")
>>> sharding.local_shape((8, 32, 16)), sharding.local_indices((8, 32, 16), rank=5)
((4, 8, 16), (slice(4, 8, None), slice(8, 16, None), slice(0, 16, None)))

What a sharding doesn't mention is replicated. A dim that doesn't divide is cut as `torch.chunk`
cuts it, nested in the written order. A dim may be a group of factors, one of which is split:
`(qkv=3 heads@tp head_dim)` is a fused projection split by heads, and its shards aren't contiguous.

As JAX's `NamedSharding`, with what DTensor calls `Partial` written after a `|`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from itertools import product as cartesian
from typing import TYPE_CHECKING, Any, NoReturn

from axes.algebra import grammar, seam
from axes.algebra.chunks import nested_chunk
from axes.algebra.errors import MeshError, ShardingError, SizeError, pointed, shortened, shown, suggestion
from axes.algebra.grammar import parse_spec, place_text
from axes.algebra.layout import Layout, Mode, NamedLayout, digits
from axes.algebra.opaque import Placement
from axes.algebra.sizes import checked_rank, checked_shape, checked_size, whole_number
from axes.algebra.state import LINEAR, Factors, Split, State

if TYPE_CHECKING:
    from axes.algebra.mesh import Mesh

Indices = slice | tuple[slice, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardedFactor:
    """A name, its size where it is known, and the axes that split it, major first.

    `name` is None for a plain number. A group that is split as a whole is one factor, whose size is
    a multiple of the sizes known in it.
    """

    name: str | None
    size: int | None = None
    axes: tuple[NamedLayout, ...] = ()
    multiple: int = 1

    def __str__(self) -> str:
        text = str(self.size) if self.name is None else self.name
        grouped = text.startswith("(")  # a group that is split as a whole shows its sizes inside
        text += f"={self.size}" if self.name is not None and self.size is not None and not grouped else ""
        return f"{text}@{place_text(self.axes)}" if self.axes else text

    @property
    def pieces(self) -> int:
        """Into how many pieces the factor is split."""
        return math.prod([axis.layout.size for axis in self.axes])


@dataclass(frozen=True, slots=True)
class ShardedDim:
    """One dim: its factors, major first; more than one where it was written as a group."""

    factors: tuple[ShardedFactor, ...]

    def __str__(self) -> str:
        text = " ".join(map(str, self.factors))
        return text if len(self.factors) == 1 else f"({text})"

    @property
    def axes(self) -> tuple[NamedLayout, ...]:
        """The axes that split the dim or one of its factors."""
        return tuple([axis for factor in self.factors for axis in factor.axes])

    @property
    def pieces(self) -> int:
        """Into how many pieces the dim is split."""
        return math.prod([axis.layout.size for axis in self.axes])


@dataclass(frozen=True, slots=True)
class PendingReduction:
    """A reduction that hasn't happened yet: the value is `op` over the ranks of `axes`."""

    op: str
    axes: tuple[NamedLayout, ...]

    def __str__(self) -> str:
        return f"{self.op}@{place_text(self.axes)}"


@dataclass(frozen=True)
class Sharding:
    """How a tensor lies on a mesh. Made by `mesh.sharding(text)` or `from_placements`.

    Raises `ShardingError` where an axis isn't made of the mesh's axes, or where two places take
    the same ranks.
    """

    mesh: Mesh
    dims: tuple[ShardedDim, ...]
    pending: tuple[PendingReduction, ...] = ()

    def __post_init__(self) -> None:
        _check_axes(self)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.dims, self.pending))

    @property
    def ndim(self) -> int:
        """The number of dims of the tensor."""
        return len(self.dims)

    @property
    def spec(self) -> str:
        """Canonical text: `mesh.sharding(sharding.spec) == sharding`."""
        return " ".join([*map(str, self.dims), *(["|"] if self.pending else []), *map(str, self.pending)])

    def __str__(self) -> str:
        return self.spec

    def __repr__(self) -> str:
        return f"Sharding({self.spec!r}, {self.mesh!r})"

    def local_shape(self, shape: Sequence[int], rank: int | None = None) -> Shape:
        """The shape of the shard on a global rank, this one by default.

        >>> from axes.algebra.mesh import Mesh
        >>> Mesh("cp=2 tp=2").sharding("s@(cp tp)").local_shape((5,), rank=0)
        (2,)
        """
        position = self._position(rank)
        return tuple(
            math.prod(stop - start for start, stop in _factor_ranges(dim, extents, position))
            for dim, extents in zip(self.dims, self.extents(shape), strict=True)
        )

    def local_indices(self, shape: Sequence[int], rank: int | None = None) -> tuple[Indices, ...]:
        """Where the shard of a global rank lies in the whole tensor.

        Per dim a `slice`, or a tuple of slices in order where the shard isn't contiguous.

        >>> from axes.algebra.mesh import Mesh
        >>> Mesh("tp=2").sharding("(three heads@tp)", three=3).local_indices((12,), rank=1)
        ((slice(2, 4, None), slice(6, 8, None), slice(10, 12, None)),)
        """
        position = self._position(rank)
        found: list[Indices] = []
        for dim, extents in zip(self.dims, self.extents(shape), strict=True):
            runs = index_runs(extents, _factor_ranges(dim, extents, position))
            found.append(slice(*runs[0]) if len(runs) == 1 else tuple(slice(*run) for run in runs))
        return tuple(found)

    def extents(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Per dim the sizes of its factors, solved from the tensor's shape.

        Raises `ShardingError` for another number of dims, `SizeError` where factors don't follow or
        don't divide.
        """
        return _extents(self, checked_shape(shape))

    def is_equivalent(self, other: Sharding, shape: Sequence[int] | None = None) -> bool:
        """Whether both put the same data on the same ranks, whatever the names.

        Without a `shape`, for every shape that all splits divide. With one, for that shape: the
        cuts of a dim that doesn't divide depend on how its axes are grouped.

        >>> from axes.algebra.mesh import Mesh
        >>> mesh = Mesh("cp=2 tp=2", "both = cp tp")
        >>> one, two = mesh.sharding("s@both"), mesh.sharding("s@(cp tp)")
        >>> one.is_equivalent(two), one.is_equivalent(two, (5,))
        (True, False)
        """
        shape = None if shape is None else checked_shape(shape)
        if self.mesh.universe != other.mesh.universe or self.ndim != other.ndim:
            return False
        if not _same_pending(self, other):
            return False
        if shape is None:
            return all(itertools.starmap(_same_digits, zip(self.dims, other.dims, strict=True)))
        pairs = zip(self.dims, self.extents(shape), other.dims, other.extents(shape), strict=True)
        return all(itertools.starmap(same_cuts, pairs))

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The DTensor placements for `mesh.device_mesh`, one per axis of the mesh.

        Raises `ShardingError` where DTensor can't say it: an axis that is part of one of the mesh's
        axes, or a mesh axis whose digits would split two places.
        """
        return seam.runtime("sharding.placements").placements(self)

    @classmethod
    def from_placements(
        cls, mesh: Mesh, placements: Iterable[Placement], ndim: int, shape: Sequence[int] | None = None
    ) -> Sharding:
        """The sharding that DTensor placements say on the axes of `mesh`, for a tensor of `ndim` dims.

        Names no dims. With `shape`, raises
        `ShardingError` where that shape is cut otherwise than the spec says.

        >>> from axes.algebra.mesh import Mesh
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> Sharding.from_placements(Mesh("dp=2 tp=2"), [Shard(0), Replicate()], 2).spec
        '_@dp _'
        """
        count = whole_number(ndim)
        if count is None or count < 0:
            raise SizeError(f"ndim is a whole number from 0; found {shown(ndim)}")
        return seam.runtime("Sharding.from_placements").from_placements(mesh, tuple(placements), count, shape)

    def sized(self, shape: Sequence[int]) -> Sharding:
        """The same with the size of every factor of a group filled in from a tensor's shape."""
        whole = checked_shape(shape)
        if all(len(dim.factors) == 1 for dim in self.dims):
            return self
        return _sized(self, whole)

    def named(self, names: Sequence[str]) -> Sharding:
        """The same with other names for the dims that aren't groups."""
        dims = []
        for dim, name in zip(self.dims, names, strict=True):
            single = len(dim.factors) == 1
            dims.append(ShardedDim((replace(dim.factors[0], name=name),)) if single else dim)
        return replace(self, dims=tuple(dims))

    def on(self, mesh: Mesh) -> Sharding:
        """The same in the names of another mesh, whose axes have the same layouts in the same order.

        >>> from axes.algebra.mesh import Mesh
        >>> Mesh("dp=2 tp=2").sharding("b@tp | sum@dp").on(Mesh("a=2 b=2")).spec
        'b@b | sum@a'
        """
        if mesh == self.mesh:
            return self if mesh is self.mesh else replace(self, mesh=mesh)
        names = dict(zip(self.mesh.axis_names, mesh.axis_names, strict=True))

        def renamed(axes: tuple[NamedLayout, ...]) -> tuple[NamedLayout, ...]:
            return tuple([replace(axis, name=names.get(axis.name) or mesh.called(axis.layout).name) for axis in axes])

        dims = tuple(ShardedDim(tuple(replace(f, axes=renamed(f.axes)) for f in dim.factors)) for dim in self.dims)
        return Sharding(mesh, dims, tuple(replace(p, axes=renamed(p.axes)) for p in self.pending))

    # inside

    def _position(self, rank: int | None) -> int:
        rank = self.mesh.rank if rank is None else checked_rank("a rank", rank)
        position = self.mesh.universe.position(rank)
        if position is None:
            raise MeshError(f"rank {rank} isn't one of the ranks of {self.mesh!r}")
        return position


def _factor_ranges(dim: ShardedDim, extents: Sequence[int], position: int) -> list[tuple[int, int]]:
    """The part of each factor that the rank at a position has."""
    found = []
    for factor, extent in zip(dim.factors, extents, strict=True):
        layouts = [axis.layout for axis in factor.axes]
        found.append(nested_chunk(extent, (a.size for a in layouts), (a.coordinate(position) for a in layouts)))
    return found


def index_runs(extents: Sequence[int], ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The contiguous runs of a flattened dim whose factors are restricted to `ranges`, in order.

    >>> index_runs((3, 4), [(0, 3), (2, 4)])
    [(2, 4), (6, 8), (10, 12)]
    >>> index_runs((3, 4), [(1, 3), (0, 4)])
    [(4, 12)]
    """
    runs, inner = [(0, 1)], 1
    for extent, (start, stop) in zip(reversed(extents), reversed(ranges), strict=True):
        if runs == [(0, inner)]:
            runs = [(start * inner, stop * inner)]
        else:
            runs = [(i * inner + a, i * inner + b) for i in range(start, stop) for a, b in runs]
        inner *= extent
    return runs or [(0, 0)]


def parsed_sharding(
    mesh: Mesh, spec: str, sizes: tuple[tuple[str, Any], ...] = (), ndim: int | None = None
) -> Sharding:
    """The sharding of a spec on a mesh; `...` stands for what is missing to `ndim` dims. Cached."""
    if mesh._view is None:
        return _parsed(mesh, spec, sizes, ndim)
    return replace(_parsed(mesh._with(view=None), spec, sizes, ndim), mesh=mesh)


@functools.lru_cache(maxsize=4096)
def _parsed(mesh: Mesh, spec: str, sizes: tuple[tuple[str, Any], ...], ndim: int | None) -> Sharding:
    tree = parse_spec(spec)
    given = _given(tree, dict(sizes))
    dims: list[ShardedDim] = []
    try:
        for dim in tree.dims:
            if any(f.name == "..." for f in dim.factors):
                dims.extend(_ellipsis(spec, tree, dim, ndim))
            else:
                dims.append(_dim(mesh, spec, dim, given))
        pending = tuple(_pending(mesh, spec, p) for p in tree.pending or ())
        _check_names(spec, tree)
        return Sharding(mesh, tuple(dims), pending)
    except (ShardingError, MeshError) as error:
        if spec in str(error):
            raise
        raise type(error)(f"{error}\n  in  {grammar.Spec.__str__(tree)[:200]}") from None


@functools.lru_cache(maxsize=4096)
def marked_sharding(
    mesh: Mesh, spec: str, sizes: tuple[tuple[str, Any], ...] = (), ndim: int | None = None
) -> tuple[Sharding, tuple[NamedLayout, ...]]:
    """The sharding of a spec that may say `same`, and the axes that are `same`: they are about gradients alone."""
    tree = parse_spec(spec)
    marks = [p for p in tree.pending or () if p.op == "same" and p.place is not None]
    if not marks:
        return parsed_sharding(mesh, spec, sizes, ndim), ()
    rest = tuple(p for p in tree.pending or () if p not in marks)
    found = parsed_sharding(mesh, str(replace(tree, pending=rest or None)), sizes, ndim)
    same = tuple(axis for p in marks for axis in _axes(mesh, spec, p.place))
    replace(found, pending=(*found.pending, PendingReduction("same", same)))  # refuses what is split or pending
    return found, same


def _given(tree: grammar.Spec, sizes: Mapping[str, Any]) -> dict[str, int]:
    names = {f.name: f for dim in tree.dims for f in dim.factors if f.name not in (None, "_", "...")}
    found: dict[str, int] = {}
    for name, value in [*sizes.items(), *((f.name, f.size) for f in names.values())]:
        if name not in names:
            hint = suggestion(str(name), [n for n in names if n])
            raise SizeError(f"a size is given for {shortened(name)}, which isn't in the spec{hint}")
        size = checked_size(str(name), value)
        if size is not None and found.setdefault(name, size) != size:
            raise SizeError(f"'{name}' is given two sizes: {found[name]} and {size}")
    return found


def _dim(mesh: Mesh, spec: str, dim: grammar.Dim, sizes: Mapping[str, int]) -> ShardedDim:
    factors = []
    for factor in dim.factors:
        size = factor.size if factor.name is None else sizes.get(factor.name)
        factors.append(ShardedFactor(factor.name, size, _axes(mesh, spec, factor.place)))
    if not dim.grouped:
        return ShardedDim(tuple(factors))
    if dim.place is not None or not any(factor.axes for factor in factors):
        # Split as a whole, or not at all: to a sharding such a group is one name.
        known = [factor.size for factor in factors]
        multiple = math.prod(size for size in known if size is not None)
        name = f"({' '.join(str(ShardedFactor(f.name, f.size)) for f in factors)})"
        axes = _axes(mesh, spec, dim.place)
        return ShardedDim((ShardedFactor(name, None if None in known else multiple, axes, multiple),))
    return ShardedDim(tuple(factors))


def _axes(mesh: Mesh, spec: str, place: grammar.Place | None) -> tuple[NamedLayout, ...]:
    if place is None:
        return ()
    if "*" in place.names:
        _wrong("'*' is what a tensor has; a sharding names its axes", spec, place.span)
    return tuple([_named(mesh, name) for name in place.names])


def _named(mesh: Mesh, name: str) -> NamedLayout:
    """Where names end: an axis of the text as its digits."""
    layout = mesh.namespace.get(name)
    if layout is None:
        raise ShardingError(f"the mesh has no axis {shortened(name)}{suggestion(name, mesh.namespace)}")
    return NamedLayout(layout, name)


def _ellipsis(spec: str, tree: grammar.Spec, dim: grammar.Dim, ndim: int | None) -> list[ShardedDim]:
    factor = dim.factors[0]
    if dim.grouped or factor.place is not None:
        _wrong("'...' stands for whole dims that aren't split; name the dim that is", spec, dim.span)
    if ndim is None:
        _wrong("'...' stands for dims of a tensor; without one, write every dim (or '_')", spec, dim.span)
    missing = ndim - (len(tree.dims) - 1)
    if missing < 0:
        _wrong(f"the spec has {len(tree.dims) - 1} dims beside '...', the tensor has {ndim}", spec, (0, len(spec)))
    return [ShardedDim((ShardedFactor("_"),)) for _ in range(missing)]


def _pending(mesh: Mesh, spec: str, pending: grammar.Pending) -> PendingReduction:
    if pending.op == "*":
        _wrong("'| *' is whatever arises; a sharding says what is pending, like '| sum@tp'", spec, pending.span)
    if pending.op == "same":
        _wrong("'same' is about gradients of plain tensors; a sharding can't have it", spec, pending.span)
    return PendingReduction(pending.op, _axes(mesh, spec, pending.place))


def _check_names(spec: str, tree: grammar.Spec) -> None:
    seen: set[str] = set()
    for factor in (f for dim in tree.dims for f in dim.factors):
        if factor.name in (None, "_", "..."):
            continue
        if factor.name in seen:
            _wrong(f"dim {shortened(factor.name)} stands twice", spec, factor.span)
        seen.add(str(factor.name))


def _wrong(message: str, spec: str, span: tuple[int, int]) -> NoReturn:
    raise ShardingError(f"{message}\n{pointed(spec, *span)}")


def _check_axes(sharding: Sharding) -> None:
    """Every axis is made of the mesh's axes, and no two places share a digit."""
    mesh = sharding.mesh
    held: list[ShardedDim | PendingReduction] = [*sharding.dims, *sharding.pending]
    places = [(place, axis) for place in held for axis in place.axes]
    if _are_apart(mesh, tuple([axis for _, axis in places])):
        return
    seen: list[tuple[object, NamedLayout]] = []
    for where, axis in places:
        if not mesh.layout_of_all.contains(axis.layout):
            raise ShardingError(f"axis '{axis}' isn't made of the axes of {mesh!r}")
        for there, other in seen:
            if axis == other or axis.layout.overlaps(other.layout):
                twice = axis.name == other.name
                both = f"axis '{axis}' is used twice" if twice else f"axes '{other}' and '{axis}' share ranks"
                raise ShardingError(f"{both}: in {there} and in {where}; each axis splits one place or is pending")
        seen.append((where, axis))
    try:
        digits(*(axis.layout for _, axis in seen))
    except MeshError as error:
        raise ShardingError(f"axes of one sharding are digits of the same factorization: {error}") from None


@functools.lru_cache(maxsize=8192)
def _are_apart(mesh: Mesh, axes: tuple[NamedLayout, ...]) -> bool:
    """Whether axes are made of the mesh's own and no two of them share a digit."""
    layouts = [axis.layout for axis in axes]
    if len(set(axes)) < len(axes) or not all(map(mesh.layout_of_all.contains, layouts)):
        return False
    try:
        digits(*layouts)
    except MeshError:
        return False
    return not any(one.overlaps(two) for one, two in combinations(layouts, 2))


@functools.lru_cache(maxsize=8192)
def _extents(sharding: Sharding, shape: Shape) -> tuple[tuple[int, ...], ...]:
    if len(shape) != sharding.ndim:
        raise ShardingError(f"the spec '{sharding}' has {sharding.ndim} dims, the tensor {len(shape)}: {list(shape)}")
    return tuple(_factor_sizes(sharding, dim, extent, shape) for dim, extent in zip(sharding.dims, shape, strict=True))


@functools.lru_cache(maxsize=8192)
def _sized(sharding: Sharding, shape: Shape) -> Sharding:
    dims = []
    for dim, extents in zip(sharding.dims, sharding.extents(shape), strict=True):
        if len(dim.factors) > 1:
            factors = (replace(f, size=size) for f, size in zip(dim.factors, extents, strict=True))
            dim = ShardedDim(tuple(factors))
        dims.append(dim)
    return replace(sharding, dims=tuple(dims))


def _factor_sizes(sharding: Sharding, dim: ShardedDim, extent: int, shape: Shape) -> tuple[int, ...]:
    known = [factor.size for factor in dim.factors]
    missing = known.count(None)
    rest = math.prod(size for size in known if size is not None)

    def filled() -> str:
        return f"{dim} = {extent}    (dim of {list(shape)} in '{sharding}')"

    if missing > 1:
        raise SizeError(f"more than one size is missing in  {filled()}")
    multiple = math.prod(factor.multiple if factor.size is None else factor.size for factor in dim.factors)
    if (missing and extent % multiple) or (not missing and rest != extent):
        raise SizeError(f"the sizes don't multiply to the dim:  {filled()}")
    sizes = tuple(extent // rest if size is None else size for size in known)
    if len(dim.factors) > 1:
        for factor, size in zip(dim.factors, sizes, strict=True):
            count = factor.pieces
            if size % count:
                raise ShardingError(
                    f"{size} doesn't divide into {count} parts: {factor} is split inside a group:  {filled()}"
                )
    return sizes


def _same_pending(one: Sharding, two: Sharding) -> bool:
    """The same reductions over the same digits; order matters only between reductions that don't commute."""

    def classes(sharding: Sharding) -> list[dict[str, Layout]]:
        found: list[dict[str, list[Mode]]] = []
        for pending in sharding.pending:
            modes = [mode for axis in pending.axes for mode in axis.layout.modes]
            if modes and not (found and _commute(pending.op, *found[-1])):
                found.append({})
            if modes:
                found[-1].setdefault(pending.op, []).extend(modes)
        return [
            {op: Layout.of(sorted(modes, key=lambda mode: -mode[1])) for op, modes in each.items()} for each in found
        ]

    return classes(one) == classes(two)


def _commute(*ops: str) -> bool:
    """Whether it doesn't matter which of these reductions comes first."""
    return len({"sum" if op in LINEAR else op for op in ops}) == 1


def _same_digits(mine: ShardedDim, theirs: ShardedDim) -> bool:
    """Whether two dims are cut the same wherever everything divides."""
    return _pieces(mine, _whole_size(theirs)) == _pieces(theirs, _whole_size(mine))


def _whole_size(dim: ShardedDim) -> int | None:
    """The size of a dim where its factors say it."""
    sizes = [factor.size for factor in dim.factors]
    return math.prod(s for s in sizes if s is not None) if None not in sizes else None


def _pieces(dim: ShardedDim, whole: int | None) -> list[tuple[Layout, int | None]]:
    """A dim from the major side, whatever its factors: digits that split it, and how much stays whole behind them.

    None is a size that is open; a dim of size `whole` leaves none open.
    """
    known = math.prod(factor.size for factor in dim.factors if factor.size is not None)
    found: list[tuple[Layout, int | None]] = []
    for factor in dim.factors:
        layout = Layout.product(*(axis.layout for axis in factor.axes))
        size = whole // known if factor.size is None and whole is not None else factor.size
        rest = None if size is None else size // layout.size
        before, between = found[-1] if found else (Layout(), 1)
        if found and not layout.modes:
            found[-1] = before, None if rest is None or between is None else between * rest
        elif found and between == 1:
            found[-1] = Layout.product(before, layout), rest
        else:
            found.append((layout, rest))
    return found


def same_cuts(mine: ShardedDim, my: Sequence[int], theirs: ShardedDim, their: Sequence[int]) -> bool:
    """Whether two dims are cut the same at these extents of their factors, on every rank."""
    layouts = [axis.layout for dim in (mine, theirs) for axis in dim.axes]
    if not layouts or math.prod(my) == 0:
        return True
    try:
        refined = sorted({digit for found in digits(*layouts) for digit in found})
    except MeshError:
        return False
    if len(mine.factors) == len(theirs.factors) == 1 and _same_digits(mine, theirs):
        parts = math.prod(size for size, _ in refined)
        if my[0] % parts == 0:
            return True
    steps = [range(0, size * stride, stride) for size, stride in refined]
    for offsets in cartesian(*steps):
        position = sum(offsets)
        left = index_runs(my, _factor_ranges(mine, my, position))
        right = index_runs(their, _factor_ranges(theirs, their, position))
        if _nonempty(left) != _nonempty(right):
            return False
    return True


def _nonempty(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    return [run for run in runs if run[0] < run[1]]


@functools.lru_cache(maxsize=8192)
def state_of(sharding: Sharding, shape: Shape) -> State:
    """What planning needs of a sharding: layouts in place of names.

    >>> from axes.algebra.mesh import Mesh
    >>> state_of(Mesh("dp=2 tp=2").sharding("b@dp (qkv=3 heads@tp d)", d=4), (8, 24)).splits
    ((2:2,), Factors(sizes=(3, 2, 4), splits=((), (2:1,), ())))
    """
    mesh = sharding.mesh

    def layouts(axes: Sequence[NamedLayout]) -> tuple[Layout, ...]:
        return tuple(axis.layout for axis in axes)

    def split(dim: ShardedDim, extents: Sequence[int]) -> Split:
        outer = all(not factor.axes for factor in dim.factors[1:])
        if outer:  # splits of the major factor are splits of the dim
            return layouts(dim.axes)
        return Factors(tuple(extents), tuple(layouts(factor.axes) for factor in dim.factors))

    return State(
        mesh.universe,
        mesh.layout_of_all,
        tuple(split(dim, extents) for dim, extents in zip(sharding.dims, sharding.extents(shape), strict=True)),
        tuple((pending.op, layouts(pending.axes)) for pending in sharding.pending),
        tuple((layout, name) for name, layout in mesh.namespace.items()),
        sharding.spec,
    )
