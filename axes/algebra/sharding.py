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
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from axes.algebra import providers
from axes.algebra.chunks import Runs, Tile, factor_runs, largest_chunk, nested_chunk, same_chunks
from axes.algebra.errors import MeshError, ShardingError, SizeError, shown
from axes.algebra.grammar import place_text
from axes.algebra.layout import Layout, NamedLayout, common_digits, digits
from axes.algebra.opaque import Placement
from axes.algebra.sizes import checked_rank, checked_shape, tuple_of, whole_number
from axes.algebra.universe import Universe

if TYPE_CHECKING:
    from axes.algebra.mesh import Mesh

Indices = slice | tuple[slice, ...]
Shape = tuple[int, ...]

_MOST_DIMS = 4096
"""More dims than any tensor has."""

LINEAR = frozenset({"sum", "mean"})
"""The reductions that pass through anything linear."""

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def cached_with_names(maxsize: int) -> Callable[[F], F]:
    """A cache for functions of meshes and shardings whose result shows names, or the rank that a mesh is seen from.

    Meshes and shardings are equal that differ in these, so its key has them beside the arguments, which are positional.
    """

    def decorate(make: F) -> F:
        kept = functools.lru_cache(maxsize)(lambda _, *key: make(*key))
        found: Any = functools.wraps(make)(lambda *key: kept(_looks(key), *key))
        found.cache_clear, found.cache_info = kept.cache_clear, kept.cache_info
        return cast("F", found)

    return decorate


def _looks(value: object) -> object:
    """What equality leaves out of a value, or of each part of a tuple."""
    return tuple(map(_looks, value)) if isinstance(value, tuple) else getattr(value, "looks", None)


@dataclass(frozen=True, slots=True)
class ShardedFactor:
    """A name, its size where it is known, and the axes that split it, major first.

    `name` is for printing, None for a plain number. A group that is split as a whole is one factor, whose
    size is a multiple of the sizes known in it.
    """

    name: str | None = field(compare=False)
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

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts that split the factor, each of which is one `torch.chunk`."""
        return tuple([axis.layout for axis in self.axes])


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
    def is_plain(self) -> bool:
        """Whether it is one factor, of any size."""
        major, *further = self.factors
        return not further and major.size is None and major.multiple == 1

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

    A value: two are equal that put the same data on the same ranks by the same digits of them. Names are for
    printing. Pending reductions are resolved in their order, the first innermost.

    Raises `ShardingError` where an axis isn't made of the mesh's axes, or where two places take
    the same ranks.
    """

    mesh: Mesh
    dims: tuple[ShardedDim, ...]
    pending: tuple[PendingReduction, ...] = ()

    def __post_init__(self) -> None:
        if not {*map(type, self.dims)} <= {ShardedDim}:
            raise ShardingError("a Sharding is made by mesh.sharding(text), or by Sharding.from_placements")
        _check_axes(self)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.dims, self.pending))

    def __reduce__(self) -> tuple[Any, ...]:
        return Sharding, (self.mesh, self.dims, self.pending)  # a hash is a process's own

    @property
    def ndim(self) -> int:
        """The number of dims of the tensor."""
        return len(self.dims)

    @functools.cached_property
    def spec(self) -> str:
        """Canonical text: `mesh.sharding(sharding.spec) == sharding`."""
        return " ".join([*map(str, self.dims), *(["|"] if self.pending else []), *map(str, self.pending)])

    @property
    def looks(self) -> tuple[str, int | None]:
        """What equal shardings may differ in: names, and the rank that the mesh is seen from."""
        return self.spec, self.mesh.looks

    def __str__(self) -> str:
        return self.spec

    def __repr__(self) -> str:
        return f"Sharding({self.spec!r}, {self.mesh!r})"

    def _repr_html_(self) -> str | None:
        return providers.html_of(self)

    def local_shape(self, shape: Sequence[int], rank: int | None = None) -> Shape:
        """The shape of the shard on a global rank, this one by default.

        >>> from axes.algebra.mesh import Mesh
        >>> Mesh("cp=2 tp=2").sharding("s@(cp tp)").local_shape((5,), rank=0)
        (2,)
        """
        parts = self._parts(checked_shape(shape), self._position(rank))
        return tuple(math.prod(stop - start for start, stop in each) for _, each in parts)

    def local_indices(self, shape: Sequence[int], rank: int | None = None) -> tuple[Indices, ...]:
        """Where the shard of a global rank lies in the whole tensor.

        Per dim a `slice`, or a tuple of slices in order where the shard isn't contiguous.

        >>> from axes.algebra.mesh import Mesh
        >>> Mesh("tp=2").sharding("(three heads@tp)", three=3).local_indices((12,), rank=1)
        ((slice(2, 4, None), slice(6, 8, None), slice(10, 12, None)),)
        """
        held = self._tile_at(checked_shape(shape), self._position(rank))
        return tuple(slice(*runs[0]) if len(runs) == 1 else tuple(slice(*run) for run in runs) for runs in held)

    def tile(self, shape: Sequence[int], rank: int) -> Tile | None:
        """What a global rank holds: for each dim its runs of indices; None for a rank outside the universe.

        >>> from axes.algebra.mesh import Mesh
        >>> Mesh("tp=2").sharding("(three heads@tp) d", three=3).tile((12, 5), 1)
        (((2, 4), (6, 8), (10, 12)), ((0, 5),))
        """
        position = self.mesh.universe.position(checked_rank("a rank", rank))
        return None if position is None else self._tile_at(checked_shape(shape), position)

    def largest_tile(self, shape: Sequence[int]) -> int:
        """Elements of the largest tile, in closed form."""
        pairs = [
            (size, factor)
            for dim, extents in zip(self.dims, self.extents(shape), strict=True)
            for size, factor in zip(extents, dim.factors, strict=True)
        ]
        return math.prod(largest_chunk(size, [axis.size for axis in factor.axes]) for size, factor in pairs)

    def divides(self, shape: Sequence[int]) -> bool:
        """Whether every dim divides into its pieces, as split factors of a group always do."""
        whole = checked_shape(shape)
        return len(whole) == self.ndim and not any(map(operator.mod, whole, self._pieces))

    @functools.cached_property
    def _pieces(self) -> tuple[int, ...]:
        """Into how many pieces each dim has to divide."""
        return tuple([1 if len(dim.factors) > 1 else dim.pieces for dim in self.dims])

    @property
    def universe(self) -> Universe:
        """The ranks, in order."""
        return self.mesh.universe

    @property
    def used(self) -> tuple[Layout, ...]:
        """Every layout that splits a dim or is pending, those of size 1 left out."""
        split = [axis for dim in self.dims for axis in dim.axes]
        pending = [axis for reduction in self.pending for axis in reduction.axes]
        return tuple([axis.layout for axis in (*split, *pending) if axis.size > 1])

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
        if not isinstance(other, Sharding):
            raise ShardingError(f"is_equivalent takes an axes.Sharding; found {shown(other)}")
        if self.mesh.universe != other.mesh.universe or self.ndim != other.ndim:
            return False
        if not _same_pending(self, other):
            return False
        if shape is None:
            pairs = zip(self.dims, other.dims, strict=True)
            return all(_pieces(one, _whole_size(two)) == _pieces(two, _whole_size(one)) for one, two in pairs)
        _extents(self, shape), _extents(other, shape)  # refuse what doesn't fit
        return all(itertools.starmap(same_cuts, zip(self.dims, other.dims, shape, strict=True)))

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The DTensor placements for `mesh.device_mesh`, one per axis of the mesh.

        Raises `ShardingError` where DTensor can't say it: an axis that is part of one of the mesh's
        axes, or a mesh axis whose digits would split two places.
        """
        return providers.runtime("sharding.placements").placements(self)

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
        if count is None or not 0 <= count <= _MOST_DIMS:
            raise SizeError(f"ndim is a whole number from 0 to {_MOST_DIMS}; found {shown(ndim)}")
        found = tuple_of(placements)
        if found is None:
            raise ShardingError(f"placements are a sequence, one for each axis of the mesh; found {shown(placements)}")
        return providers.runtime("Sharding.from_placements").from_placements(mesh, found, count, shape)

    def sized(self, shape: Sequence[int]) -> Sharding:
        """The same with the size of every factor of a group filled in from a tensor's shape."""
        whole = checked_shape(shape)
        if all(len(dim.factors) == 1 for dim in self.dims):
            return self
        return _sized(self, whole)

    def at(self, shape: Sequence[int]) -> Sharding:
        """What planning sees of it for tensors of this shape: the sizes of all factors of groups, and of a group
        whose major factor alone is split, that the dim is.

        >>> from axes.algebra.mesh import Mesh
        >>> Mesh("dp=2 tp=2").sharding("(b@dp s) (qkv=3 heads@tp d)", b=4, d=4).at((8, 24)).spec
        '(b s)@dp (qkv=3 heads=2@tp d=4)'
        """
        whole = checked_shape(shape)
        _extents(self, whole)  # refuses what doesn't fit
        return self if self.is_plain else _at(self, whole)

    def named(self, names: Sequence[str]) -> Sharding:
        """The same with other names for the dims that aren't groups."""
        found = tuple_of(names)
        if found is None or len(found) != self.ndim or not all(isinstance(name, str) for name in found):
            raise ShardingError(f"'{self}' has {self.ndim} dims, each with a name that is text; found {shown(names)}")
        dims = []
        for dim, name in zip(self.dims, found, strict=True):
            single = len(dim.factors) == 1
            dims.append(ShardedDim((replace(dim.factors[0], name=name),)) if single else dim)
        return replace(self, dims=tuple(dims))

    def on(self, mesh: Mesh) -> Sharding:
        """The same in the names of another mesh, whose axes have the same layouts in the same order.

        Raises `ShardingError` for a mesh whose axes have others.

        >>> from axes.algebra.mesh import Mesh
        >>> Mesh("dp=2 tp=2").sharding("b@tp | sum@dp").on(Mesh("a=2 b=2")).spec
        'b@b | sum@a'
        """
        if not isinstance(mesh, type(self.mesh)):
            raise MeshError(f"a mesh is an axes mesh, made by axes.init_mesh; found {shown(mesh)}")
        if mesh == self.mesh:
            return self if mesh.looks == self.mesh.looks else replace(self, mesh=mesh)
        if mesh.layouts != self.mesh.layouts:
            raise ShardingError(
                f"'{self}' is on {self.mesh!r}; on {mesh!r}, whose axes have other layouts, it can't be the same. "
                "Moving a tensor there is axes.reshard(x, spec, mesh=mesh)"
            )
        mine = self.mesh.named(self.mesh.axis_names)
        names = dict(zip(mine, mesh.axis_names, strict=True))

        def renamed(axes: tuple[NamedLayout, ...]) -> tuple[NamedLayout, ...]:
            return tuple([replace(axis, name=names.get(axis) or mesh.called(axis.layout).name) for axis in axes])

        dims = tuple(ShardedDim(tuple(replace(f, axes=renamed(f.axes)) for f in dim.factors)) for dim in self.dims)
        return Sharding(mesh, dims, tuple(replace(p, axes=renamed(p.axes)) for p in self.pending))

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether every dim is one factor, of any size."""
        return all(dim.is_plain for dim in self.dims)

    # inside

    def _parts(self, shape: Shape, position: int) -> list[tuple[Shape, Runs]]:
        """For each dim the sizes of its factors, and the part of each factor that a position has."""
        pairs = zip(self._layouts, _extents(self, shape), strict=True)
        return [(extents, _intervals(layouts, extents, position)) for layouts, extents in pairs]

    @functools.cached_property
    def _layouts(self) -> list[tuple[tuple[Layout, ...], ...]]:
        return [tuple([factor.layouts for factor in dim.factors]) for dim in self.dims]

    def _tile_at(self, shape: Shape, position: int) -> Tile:
        parts = self._parts(shape, position)
        return tuple([each if len(each) == 1 else factor_runs(extents, each) for extents, each in parts])

    def _position(self, rank: int | None) -> int:
        rank = self.mesh.rank if rank is None else checked_rank("a rank", rank)
        position = self.mesh.universe.position(rank)
        if position is None:
            raise MeshError(f"rank {rank} isn't one of the ranks of {self.mesh!r}")
        return position


@functools.lru_cache(maxsize=8192)
def _intervals(layouts: tuple[tuple[Layout, ...], ...], extents: Shape, position: int) -> Runs:
    """The part of each factor that a position has: `torch.chunk` by its layouts. Kept: ranks share most."""
    cuts = [[(layout.size, layout.coordinate(position)) for layout in each] for each in layouts]
    return tuple([nested_chunk(extent, each) for extent, each in zip(extents, cuts, strict=True)])


def _check_axes(sharding: Sharding) -> None:
    """Every axis is made of the mesh's axes, and no two places share a digit."""
    mesh = sharding.mesh
    held: list[ShardedDim | PendingReduction] = [*sharding.dims, *sharding.pending]
    places = [(place, axis) for place in held for axis in place.axes]
    if _are_apart(mesh, tuple([axis for _, axis in places])):
        return
    for _, axis in places:
        if not mesh.extent.contains(axis.layout):
            raise ShardingError(f"axis '{axis}' isn't made of the axes of {mesh!r}")
    for (there, other), (where, axis) in itertools.combinations(places, 2):
        if axis == other or axis.layout.overlaps(other.layout):
            both = (
                f"axis '{axis}' is used twice"
                if axis.name == other.name
                else f"axes '{other}' and '{axis}' share ranks"
            )
            raise ShardingError(f"{both}: in {there} and in {where}; each axis splits one place or is pending")
    try:
        digits(*(axis.layout for _, axis in places))
    except MeshError as error:
        raise ShardingError(f"axes of one sharding are digits of the same factorization: {error}") from None


@functools.lru_cache(maxsize=4096)
def _are_apart(mesh: Mesh, axes: tuple[NamedLayout, ...]) -> bool:
    """Whether axes are made of the mesh's own and no two of them share a digit."""
    layouts = [axis.layout for axis in axes]
    if len(set(axes)) < len(axes) or not all(map(mesh.extent.contains, layouts)):
        return False
    return common_digits(layouts) is not None and not any(
        one.overlaps(two) for one, two in itertools.combinations(layouts, 2)
    )


@functools.lru_cache(maxsize=8192)
def _extents(sharding: Sharding, shape: Shape) -> tuple[tuple[int, ...], ...]:
    if len(shape) != sharding.ndim:
        raise ShardingError(
            f"the spec '{sharding}' has {sharding.ndim} dims, the tensor {len(shape)}: {shown(list(shape))}"
        )
    if sharding.is_plain:
        return tuple([(size,) for size in shape])
    return tuple(_factor_sizes(sharding, dim, extent, shape) for dim, extent in zip(sharding.dims, shape, strict=True))


def _sized(sharding: Sharding, shape: Shape) -> Sharding:
    dims = []
    for dim, extents in zip(sharding.dims, sharding.extents(shape), strict=True):
        if len(dim.factors) > 1:
            factors = (replace(f, size=size) for f, size in zip(dim.factors, extents, strict=True))
            dim = ShardedDim(tuple(factors))
        dims.append(dim)
    return replace(sharding, dims=tuple(dims))


@cached_with_names(8192)
def _at(sharding: Sharding, shape: Shape) -> Sharding:
    dims = tuple(map(_whole, _sized(sharding, shape).dims))
    return sharding if dims == sharding.dims else replace(sharding, dims=dims)


def _whole(dim: ShardedDim) -> ShardedDim:
    """A dim without its own size, as one factor where its major factor alone is split: then that splits the dim."""
    major, *further = dim.factors
    if any(factor.axes for factor in further):
        return dim
    names = " ".join(str(f.size) if f.name is None else f.name for f in dim.factors)
    return ShardedDim((ShardedFactor(f"({names})" if further else names, None, major.axes),))


def _factor_sizes(sharding: Sharding, dim: ShardedDim, extent: int, shape: Shape) -> tuple[int, ...]:
    known = [factor.size for factor in dim.factors]
    missing = known.count(None)
    rest = math.prod(size for size in known if size is not None)

    def filled() -> str:
        return f"{dim} = {shown(extent)}    (dim of {shown(list(shape))} in '{sharding}')"

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
                    f"{_fewer(sharding.mesh, factor, size)}"
                )
    return sizes


def _fewer(mesh: Mesh, factor: ShardedFactor, size: int) -> str:
    """What to write where an axis has more ranks than a factor has parts."""
    if len(factor.axes) != 1 or factor.pieces % size or size == 1:
        return ""
    axis = str(factor.axes[0])
    parts = [part for name in mesh.axis_names for part in (("kv", "rep") if name == axis else (name,))]
    return (
        f'\nsplit the axis first, in two steps: declare the mesh with "({axis}) = kv={size} rep", and shard on '
        f"mesh{parts}, {factor.name or 'the factor'} over kv alone: ranks along rep have the same"
    )


def _same_pending(one: Sharding, two: Sharding) -> bool:
    """The same reductions over the same digits; order matters only between reductions that don't commute."""
    ends = [[(p.op, axis.layout) for p in end.pending for axis in p.axes] for end in (one, two)]
    found = common_digits([layout for end in ends for _, layout in end])
    if found is None:
        return False
    mine, theirs = ([(op, digit) for op, layout in end for digit in found[layout]] for end in ends)
    return list(map(set, classes(mine))) == list(map(set, classes(theirs)))


def classes(pending: Iterable[tuple[str, T]]) -> list[list[tuple[str, T]]]:
    """Neighbours that may be resolved together: sums with means, max with max, min with min."""
    return [list(group) for _, group in itertools.groupby(pending, lambda entry: kind_of(entry[0]))]


def kind_of(op: str) -> str:
    """What resolves a reduction: a mean is a sum, divided."""
    return "sum" if op in LINEAR else op


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
        layout = Layout.product(*factor.layouts)
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


def same_cuts(mine: ShardedDim, theirs: ShardedDim, extent: int) -> bool:
    """Whether two dims of this extent are cut the same on every rank."""
    if extent == 0 or mine == theirs:
        return True
    even = [len(dim.factors) > 1 or extent % dim.pieces == 0 for dim in (mine, theirs)]
    if any(even):
        # Equal pieces are never the same as unequal ones.
        return all(even) and _pieces(mine, extent) == _pieces(theirs, extent)
    found = common_digits([axis.layout for dim in (mine, theirs) for axis in dim.axes])
    if found is None:
        return False
    return same_chunks(extent, *[[found[axis.layout] for axis in dim.axes] for dim in (mine, theirs)])
