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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from axes.algebra import providers
from axes.algebra.chunks import Runs, Tile, factor_runs, largest_chunk, nested_chunk, same_chunks
from axes.algebra.errors import MeshError, ShardingError, SizeError, pointed, shown, wrong_dims
from axes.algebra.grammar import Span, Spec, place_text
from axes.algebra.layout import MOST_BITS, Layout, Universe, common_digits
from axes.algebra.opaque import Placement
from axes.algebra.sizes import Shape, checked_rank, checked_shape, tuple_of, whole_number

if TYPE_CHECKING:
    from axes.algebra.mesh import Mesh

Indices = slice | tuple[slice, ...]
_MOST_DIMS = 4096
"""More dims than any tensor has."""

LINEAR = frozenset({"sum", "mean"})
"""The reductions that pass through anything linear."""

EXTREMES = frozenset({"max", "min"})
"""The reductions across ranks that aren't linear."""

T = TypeVar("T")

Names = tuple[tuple[str, ...], ...]
"""For each dim the names in it, for printing; "" is a slot that has none, as a number in a group."""

Pending = tuple[tuple[str, Layout], ...]
"""Reductions that haven't happened yet: the value is `op` over the ranks along a layout."""


class Slot(NamedTuple):
    """A dim, or a factor of a dim that is written as a group: the layouts that split it, major first, and its size
    where that is written."""

    layouts: tuple[Layout, ...] = ()
    size: int | None = None

    @property
    def pieces(self) -> int:
        """Into how many pieces the slot is split."""
        return math.prod([layout.size for layout in self.layouts])


class Slots(tuple[Slot, ...]):
    """How a dim is split: its slots, major first; more than one where it was written as a group.

    layouts: those that split the dim or one of its factors, each of which is one `torch.chunk`. pieces: into how many
    they split it. is_plain: whether it is one slot, of any size.
    """

    layouts: tuple[Layout, ...]
    pieces: int
    is_plain: bool

    def __new__(cls, slots: Iterable[Slot]) -> Slots:
        """The dim of these slots."""
        found = super().__new__(cls, slots)
        found.layouts = tuple(itertools.chain.from_iterable(map(operator.attrgetter("layouts"), found)))
        found.pieces = math.prod(map(operator.attrgetter("size"), found.layouts))
        found.is_plain = len(found) == 1 and found[0].size is None
        return found

    @property
    def unsplit(self) -> Slots:
        """The dim without what splits it."""
        return Slots([Slot((), slot.size) for slot in self])


def names_of(names: Sequence[str], slots: Sequence[object]) -> tuple[str, ...]:
    """The names of the slots of a dim that consists of these names, or of atoms of an expression (`3#7` is a 3).

    >>> names_of(["h", "d"], [0, 1]), names_of(["h", "d"], [0]), names_of(["h"], [0, 1])
    (('h', 'd'), ('(h d)',), ('', 'h'))
    """
    texts = tuple([name.partition("#")[0] for name in names])
    if len(slots) == 1 and len(texts) > 1:
        return (f"({' '.join(texts)})",)
    last = texts if len(texts) == 1 and texts[0].isidentifier() else ("",)
    return texts if len(texts) == len(slots) else (*[""] * (len(slots) - 1), *last)


def slots_text(mesh: Mesh, slots: Slots, names: Sequence[str] = ()) -> str:
    """A dim as a spec writes it."""
    texts = []
    for slot, name in zip(slots, names or [""] * len(slots), strict=True):
        text = name or ("_" if slot.size is None else str(slot.size))
        sized = name and slot.size is not None and not name.startswith("(")  # a group has its sizes inside
        text += f"={slot.size}" if sized else ""
        texts.append(f"{text}@{layouts_text(mesh, slot.layouts)}" if slot.layouts else text)
    return texts[0] if len(texts) == 1 else f"({' '.join(texts)})"


def layouts_text(mesh: Mesh, layouts: Iterable[Layout]) -> str:
    """Layouts as they stand behind an `@`, by the names that a mesh has for them: `tp`, or `(cp tp)`."""
    return place_text(map(mesh.called, layouts))


def pending_runs(pending: Iterable[tuple[str, Layout]]) -> list[tuple[str, list[Layout]]]:
    """Pending reductions in order, one for neighbours of the same kind."""
    return [(op, [layout for _, layout in run]) for op, run in itertools.groupby(pending, operator.itemgetter(0))]


def pending_text(mesh: Mesh, pending: Iterable[tuple[str, Layout]]) -> str:
    """What is pending, as a spec writes it behind the `|`."""
    return " ".join([f"{op}@{layouts_text(mesh, layouts)}" for op, layouts in pending_runs(pending)])


@dataclass(frozen=True)
class Sharding(providers.Pictured):
    """How a tensor is sharded on a mesh. Made by `mesh.sharding(text)` or `from_placements`.

    A value: two are equal that put the same data on the same ranks by the same digits of them. The names of dims are
    for printing alone; axes are printed by the first name that the mesh has for them, and those of one rank, which
    split nothing, aren't part of it. Pending reductions are resolved in their order, the first innermost.

    universe: the ranks, in order. ndim: the number of dims of the tensor. is_plain: whether every dim is one slot, of
    any size. used: every layout that splits a dim or is pending.

    Raises `ShardingError` where an axis isn't made of the mesh's axes, or where two places take
    the same ranks.
    """

    mesh: Mesh
    dims: tuple[Slots, ...]
    pending: Pending = ()
    names: Names = field(default=(), compare=False)
    universe: Universe = field(init=False, compare=False)
    ndim: int = field(init=False, compare=False)
    is_plain: bool = field(init=False, compare=False)
    used: tuple[Layout, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not {*map(type, self.dims)} <= {Slots}:
            raise ShardingError("a Sharding is made by mesh.sharding(text), or by Sharding.from_placements")
        splits = itertools.chain.from_iterable(map(operator.attrgetter("layouts"), self.dims))
        used = (*splits, *map(operator.itemgetter(1), self.pending))
        is_plain = all(map(operator.attrgetter("is_plain"), self.dims))
        self.__dict__.update(universe=self.mesh.universe, ndim=len(self.dims), is_plain=is_plain, used=used)
        _check_axes(self)

    @property
    def spec(self) -> str:
        """Canonical text: `mesh.sharding(sharding.spec) == sharding`."""
        pending = ["|", pending_text(self.mesh, self.pending)] if self.pending else []
        return " ".join([*map(self.text_of, range(self.ndim)), *pending])

    def text_of(self, dim: int) -> str:
        """One of the dims as the spec writes it."""
        return slots_text(self.mesh, self.dims[dim], self.names_of(dim))

    def names_of(self, dim: int) -> tuple[str, ...]:
        """The names of the slots of a dim."""
        return names_of(self.names[dim] if self.names else (), self.dims[dim])

    def __str__(self) -> str:
        return self.spec

    def __repr__(self) -> str:
        return f"Sharding({self.spec!r}, {self.mesh!r})"

    def local_shape(self, shape: Sequence[int], rank: int | None = None) -> Shape:
        """The shape of the shard on a global rank, this one by default.

        Examples:
            >>> from axes.algebra.mesh import Mesh
            >>> Mesh("cp=2 tp=2").sharding("s@(cp tp)").local_shape((5,), rank=0)
            (2,)
        """
        parts = self._parts(checked_shape(shape), self.mesh._position(rank))
        return tuple([math.prod([stop - start for start, stop in each]) for _, each in parts])

    def local_indices(self, shape: Sequence[int], rank: int | None = None) -> tuple[Indices, ...]:
        """Where the shard of a global rank is in the whole tensor.

        Per dim a `slice`, or a tuple of slices in order where the shard isn't contiguous.

        Examples:
            >>> from axes.algebra.mesh import Mesh
            >>> Mesh("tp=2").sharding("(three heads@tp)", three=3).local_indices((12,), rank=1)
            ((slice(2, 4, None), slice(6, 8, None), slice(10, 12, None)),)
        """
        held = self._tile_at(checked_shape(shape), self.mesh._position(rank))
        return tuple(slice(*runs[0]) if len(runs) == 1 else tuple(slice(*run) for run in runs) for runs in held)

    def tile(self, shape: Sequence[int], rank: int) -> Tile | None:
        """What a global rank holds: for each dim its runs of indices; None for a rank outside the universe.

        Examples:
            >>> from axes.algebra.mesh import Mesh
            >>> Mesh("tp=2").sharding("(three heads@tp) d", three=3).tile((12, 5), 1)
            (((2, 4), (6, 8), (10, 12)), ((0, 5),))
        """
        position = self.universe.position(checked_rank("a rank", rank))
        return None if position is None else self._tile_at(checked_shape(shape), position)

    def largest_tile(self, shape: Sequence[int]) -> int:
        """Elements of the largest tile, in closed form."""
        pairs = zip(itertools.chain(*self.dims), itertools.chain(*self.extents(shape)), strict=True)
        return math.prod([largest_chunk(size, [each.size for each in slot.layouts]) for slot, size in pairs])

    def divides(self, shape: Sequence[int]) -> bool:
        """Whether every dim divides into its pieces, as split factors of a group always do."""
        whole = checked_shape(shape)
        sizes = [size % dim.pieces for size, dim in zip(whole, self.dims, strict=False) if len(dim) == 1]
        return len(whole) == self.ndim and not any(sizes)

    def extents(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Per dim the sizes of its factors, solved from the tensor's shape.

        Raises `ShardingError` for another number of dims, `SizeError` where factors don't follow or
        don't divide.
        """
        return self._extents(checked_shape(shape))

    def is_equivalent(self, other: Sharding, shape: Sequence[int] | None = None) -> bool:
        """Whether both put the same data on the same ranks, whatever the names.

        Without a `shape`, for every shape that all splits divide. With one, for that shape: the
        cuts of a dim that doesn't divide depend on how its axes are grouped.

        Examples:
            >>> from axes.algebra.mesh import Mesh
            >>> mesh = Mesh("cp=2 tp=2", "both = cp tp")
            >>> one, two = mesh.sharding("s@both"), mesh.sharding("s@(cp tp)")
            >>> one.is_equivalent(two), one.is_equivalent(two, (5,))
            (True, False)
        """
        shape = None if shape is None else checked_shape(shape)
        if not isinstance(other, Sharding):
            raise ShardingError(f"is_equivalent takes an axes.Sharding; found {shown(other)}")
        if (
            self.universe != other.universe
            or self.ndim != other.ndim
            or not (self.pending == other.pending or _same_pending(self, other))
        ):
            return False
        if shape is None:
            return all(map(_same_even_cuts, self.dims, other.dims))
        self._extents(shape), other._extents(shape)  # refuse what doesn't fit
        return all(itertools.starmap(same_cuts, zip(self.dims, other.dims, shape, strict=True)))

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The DTensor placements for `mesh.device_mesh`, one per axis of the mesh.

        Raises `ShardingError` where DTensor can't say it: an axis that is part of one of the mesh's
        axes, or a mesh axis whose digits would split two places.
        """
        return providers.module("runtime", "sharding.placements").placements(self)

    @classmethod
    def from_placements(
        cls, mesh: Mesh, placements: Iterable[Placement], ndim: int, shape: Sequence[int] | None = None
    ) -> Sharding:
        """The sharding that DTensor placements say on the axes of `mesh`, for a tensor of `ndim` dims.

        Names no dims. With `shape`, raises
        `ShardingError` where that shape is cut otherwise than the spec says.

        Examples:
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
        whole = None if shape is None else checked_shape(shape)
        return providers.module("runtime", "Sharding.from_placements").from_placements(mesh, found, count, whole)

    def sized(self, shape: Sequence[int]) -> Sharding:
        """The same with the size of every factor of a group filled in from a tensor's shape."""
        whole = checked_shape(shape)
        if self.is_plain or max(map(len, self.dims)) == 1:
            return self
        self._extents(whole)  # refuses what doesn't fit
        pairs = zip(self.dims, whole, strict=True)
        return replace(self, dims=tuple([Slots(sized(*each)) if len(each[0]) > 1 else each[0] for each in pairs]))

    def at(self, shape: Sequence[int]) -> Sharding:
        """What planning sees of it for tensors of this shape: the sizes of all factors of groups, and of a group
        whose major factor alone is split, that the dim is.

        Examples:
            >>> from axes.algebra.mesh import Mesh
            >>> Mesh("dp=2 tp=2").sharding("(b@dp s) (qkv=3 heads@tp d)", b=4, d=4).at((8, 24)).spec
            '(b s)@dp (qkv=3 heads=2@tp d=4)'
        """
        self._extents(tuple(shape))  # refuses what doesn't fit
        if self.is_plain:
            return self
        dims = [Slots(sized(*each)) for each in zip(self.dims, shape, strict=True)]
        names = list(map(self.names_of, range(self.ndim)))
        for at, slots in enumerate(self.dims):
            if not any(slot.layouts for slot in slots[1:]):  # the major factor alone is split, and with it the dim
                inner = " ".join([name or str(slot.size) for name, slot in zip(names[at], slots, strict=True)])
                names[at] = (f"({inner})",) if len(slots) > 1 else names[at]
                dims[at] = Slots((Slot(slots[0].layouts),))
        return replace(self, dims=tuple(dims), names=tuple(names))

    def on(self, mesh: Mesh) -> Sharding:
        """The same in the names of another mesh, whose axes have the same layouts in the same order.

        Raises `ShardingError` for a mesh whose axes have others.

        Examples:
            >>> from axes.algebra.mesh import Mesh
            >>> Mesh("dp=2 tp=2").sharding("b@tp | sum@dp").on(Mesh("a=2 b=2")).spec
            'b@b | sum@a'
        """
        if not isinstance(mesh, type(self.mesh)):
            raise MeshError(f"a mesh is an axes mesh, made by axes.init_mesh; found {shown(mesh)}")
        if mesh is self.mesh or (mesh == self.mesh and mesh._view == self.mesh._view):
            return self
        if mesh.layouts != self.mesh.layouts:
            raise ShardingError(
                f"'{self}' is on {self.mesh!r}; on {mesh!r}, whose axes have other layouts, it can't be the same. "
                "Moving a tensor there is axes.reshard(x, spec, mesh=mesh)"
            )
        return replace(self, mesh=mesh)

    # inside

    def _extents(self, shape: Shape) -> tuple[Shape, ...]:
        """`extents` of a shape that has been checked."""
        if len(shape) != self.ndim:
            raise wrong_dims(self, self.ndim, len(shape), shape)
        return tuple(zip(shape)) if self.is_plain else tuple([_sizes(self, dim, shape) for dim in range(self.ndim)])

    def _parts(self, shape: Shape, position: int) -> list[tuple[Shape, Runs]]:
        """For each dim the sizes of its factors, and the part of each factor that a position has."""
        pairs = zip(self.dims, self._extents(shape), strict=True)
        return [(sizes, tuple(map(_interval, slots, sizes, itertools.repeat(position)))) for slots, sizes in pairs]

    def _tile_at(self, shape: Shape, position: int) -> Tile:
        parts = self._parts(shape, position)
        return tuple([each if len(each) == 1 else factor_runs(extents, each) for extents, each in parts])


def _interval(slot: Slot, size: int, position: int) -> tuple[int, int]:
    """The part of a factor that a position has: `torch.chunk` by its layouts."""
    if not slot.layouts:
        return 0, size
    return nested_chunk(size, [(layout.size, layout.coordinate(position)) for layout in slot.layouts])


def whole_shape(sharding: Sharding) -> Shape:
    """The whole shape of a tensor, by the sizes in its spec; `SizeError` where one isn't known.

    >>> from axes.algebra.mesh import Mesh
    >>> whole_shape(Mesh("tp=2").sharding("b (h@tp d)", b=8, h=4, d=64))
    (8, 256)
    """
    every = [pair for at, dim in enumerate(sharding.dims) for pair in zip(sharding.names_of(at), dim, strict=True)]
    missing = [name for name, slot in every if slot.size is None]
    if missing:
        names = " and ".join(f"'{name}'" for name in missing) + (" need sizes" if len(missing) > 1 else " needs a size")
        raise SizeError(f"{names} in '{sharding}', like {missing[0]}=8")
    return tuple(math.prod(slot.size or 1 for slot in dim) for dim in sharding.dims)


def unmarked(sharding: Sharding) -> tuple[Sharding, tuple[Layout, ...]]:
    """A sharding without what is `same`, and the layouts along which values are: that is about gradients alone."""
    same = tuple([layout for op, layout in sharding.pending if op == "same"])
    if not same:
        return sharding, ()
    return replace(sharding, pending=tuple([entry for entry in sharding.pending if entry[0] != "same"])), same


def _check_axes(sharding: Sharding) -> None:
    """Every axis is made of the mesh's axes, and no two places share a digit."""
    mesh = sharding.mesh
    if _are_apart(mesh.extent, sharding.used):
        return
    places = [(sharding.text_of(at), layout) for at, dim in enumerate(sharding.dims) for layout in dim.layouts]
    places += [(pending_text(mesh, [entry]), entry[1]) for entry in sharding.pending]
    for _, layout in places:
        if not mesh.extent.contains(layout):
            raise ShardingError(f"axis '{mesh.called(layout)}' isn't made of the axes of {mesh!r}")
    check_apart([(where, mesh.called(layout), layout, (0, 0)) for where, layout in places])
    found = " and ".join(map(str, sharding.used))
    raise ShardingError(f"axes of one sharding are digits of the same factorization; {found} have no common digits")


def check_apart(places: Iterable[tuple[object, str, Layout, Span]], text: str = "") -> None:
    """Refuse an axis in two places of a tensor, or two that share ranks.

    Each place is `(the dim or reduction, the name and the layout of the axis, where that is in the whole text)`.
    """
    for (there, other, one, _), (where, name, two, span) in itertools.combinations(places, 2):
        if name == other or one.overlaps(two):
            both = f"axis '{name}' is used twice" if name == other else f"axes '{other}' and '{name}' share ranks"
            caret = f"\n{pointed(text, *span)}" if text else ""
            raise ShardingError(f"{both}: in {there} and in {where}; each axis splits one place or is pending{caret}")


def check_once(mesh: Mesh, text: str, tree: Spec) -> None:
    """Refuse axes that stand twice in a tensor or share ranks, by the names that the text has, whatever their size."""
    places = [(where, name, place.span) for where, place in tree.places for name in place.names]
    check_apart([(where, name, mesh.layout(name), span) for where, name, span in places if name != "*"], text)


@functools.lru_cache(maxsize=4096)
def _are_apart(extent: Layout, layouts: tuple[Layout, ...]) -> bool:
    """Whether layouts are made of a mesh's own, its `extent`, and no two of them share a digit."""
    found = common_digits((extent, *layouts))
    used = [digit for layout in layouts for digit in found[layout]] if found is not None else []
    return found is not None and len({*used}) == len(used) and {*found[extent]}.issuperset(used)


def _sizes(sharding: Sharding, dim: int, shape: Shape) -> tuple[int, ...]:
    """The sizes of the slots of a dim."""
    slots, extent = sharding.dims[dim], shape[dim]
    missing = sum(slot.size is None for slot in slots)
    known = math.prod([slot.size for slot in slots if slot.size is not None])

    def filled() -> str:
        return f"{sharding.text_of(dim)} = {shown(extent)}    (dim of {shown(list(shape))} in '{sharding}')"

    if missing > 1:
        raise SizeError(f"more than one size is missing in  {filled()}")
    if (missing and extent % known) or (not missing and known != extent):
        raise SizeError(f"the sizes don't multiply to the dim:  {filled()}")
    sizes = tuple([extent // known if slot.size is None else slot.size for slot in slots])
    for at, (slot, size) in enumerate(zip(slots, sizes, strict=True)):
        if len(slots) > 1 and size % slot.pieces:
            name = sharding.names_of(dim)[at]
            raise ShardingError(
                f"{size} doesn't divide into {slot.pieces} parts: {slots_text(sharding.mesh, Slots((slot,)), (name,))} "
                f"is split inside a group:  {filled()}{_fewer(sharding.mesh, slot, size, name)}"
            )
    return sizes


def _fewer(mesh: Mesh, slot: Slot, size: int, name: str) -> str:
    """What to write where an axis has more ranks than a factor has parts."""
    if len(slot.layouts) != 1 or slot.pieces % size or size == 1:
        return ""
    axis = mesh.called(slot.layouts[0])
    parts = [part for name in mesh.axis_names for part in (("kv", "rep") if name == axis else (name,))]
    return (
        f'\nsplit the axis first, in two steps: declare the mesh with "({axis}) = kv={size} rep", and shard on '
        f"mesh{parts}, {name or 'the factor'} over kv alone: ranks along rep have the same"
    )


def _same_pending(one: Sharding, two: Sharding) -> bool:
    """The same reductions over the same digits; order matters only between reductions that don't commute."""
    ends = one.pending, two.pending
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


Cut = tuple[int, Layout]
"""`(pieces in front, layout)`: where in a dim, counted from its major side, a layout splits it."""


def cuts(slots: Slots, extent: int) -> list[Cut]:
    """Where layouts split a dim of this extent, in order."""
    found: list[Cut] = []
    front = 1
    for slot in sized(slots, extent):
        before = front
        for layout in slot.layouts:
            found.append((before, layout))
            before *= layout.size
        front *= slot.size or 2 * slot.pieces  # an empty factor is cut as one that is larger than its pieces
    return found


def sized(slots: Slots, extent: int) -> list[Slot]:
    """The slots of a dim, with the one size that they leave open."""
    known = math.prod([slot.size or 1 for slot in slots])
    return [slot if slot.size else Slot(slot.layouts, extent // known) for slot in slots]


def of_cuts(extent: int | None, found: Iterable[Cut]) -> Slots:
    """The dim that is split so, of any size or this one: one slot more wherever a cut leaves a gap."""
    slots: list[Slot] = []
    start, layouts = 1, tuple[Layout, ...]()
    for before, layout in found:
        if before != start * math.prod([each.size for each in layouts]):
            slots.append(Slot(layouts, before // start))
            start, layouts = before, ()
        layouts = (*layouts, layout)
    return Slots((*slots, Slot(layouts, extent // start if extent and slots else None)))


def _canonical(slots: Slots, extent: int) -> list[tuple[Layout, int | None]]:
    """The slots of a dim that all of its splits divide, as few as can be: what splits each, and its size."""
    return [(Layout.product(*slot.layouts), slot.size) for slot in of_cuts(extent, cuts(slots, extent))]


def _same_even_cuts(mine: Slots, theirs: Slots) -> bool:
    """Whether two dims are cut the same wherever all splits divide."""
    known = [math.prod([slot.size or 1 for slot in slots]) for slots in (mine, theirs)]
    wholes = {size for size, slots in zip(known, (mine, theirs), strict=True) if all(slot.size for slot in slots)}
    # Of a size that is open the open factors are larger than any that is written.
    whole = min(wholes, default=math.prod(known) << MOST_BITS)
    return len(wholes) < 2 and _canonical(mine, whole) == _canonical(theirs, whole)


def same_cuts(mine: Slots, theirs: Slots, extent: int) -> bool:
    """Whether two dims of this extent are cut the same on every rank."""
    if extent == 0 or mine == theirs:
        return True
    even = [len(slots) > 1 or extent % slots.pieces == 0 for slots in (mine, theirs)]
    if any(even):
        # Equal pieces are never the same as unequal ones.
        return all(even) and mine.pieces == theirs.pieces and _canonical(mine, extent) == _canonical(theirs, extent)
    found = common_digits([*mine.layouts, *theirs.layouts])
    if found is None:
        return False
    return same_chunks(extent, *[[found[layout] for layout in slots.layouts] for slots in (mine, theirs)])
