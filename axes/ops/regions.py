"""The structure of an SPMD region: what its expression says of the tensors on both sides of `->`.

With what the tensors that go in know of themselves it is a `Region`, and with the shapes that the
function has returned on this rank it says how the results lie:

    region = region_of("b@dp s d, d f@tp -> b@dp s f@tp", mesh, True, specs)
    parts = result_parts(region, ((2, 8, 16),), region.sizes)     # how results lie, what is known of their shapes

All of it is found from a few values that can be hashed, and remembered. Nothing here runs anything.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from axes.algebra.errors import AxesError, ExpressionError, MeshError, ShardingError, SizeError
from axes.algebra.grammar import Dim, Factor, Spec, check_different, dim_places, has_dots, parse_tensor
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_axes_are_whole
from axes.algebra.sharding import Sharding, Slot, Slots, same_cuts, slots_text
from axes.algebra.specs import marked_sharding
from axes.runtime.border import counted_as_same
from axes.runtime.graphs import hints, varying
from axes.runtime.groups import current_world, of_world
from axes.runtime.redistribute import spec_at
from axes.runtime.sharded import LocalPart, placements_of
from axes.runtime.torch_placements import sharding_of_spec

Axes = tuple[Layout, ...]
Placements = tuple[Placement, ...]
Shape = tuple[Any, ...]
Held = Any
"""What is known of a DTensor: torch's `DTensorSpec` of it."""

Asked = tuple[str, Mesh | None, bool]
"""What a call asks for: its expression, and where its names are looked up, a mesh that is given or ambient."""


# reading


@dataclass(frozen=True, eq=False)
class RegionExpression:
    """An expression, and which of its names are explicit: those with an `@` anywhere."""

    text: str
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    explicit: frozenset[str | None]


@functools.lru_cache(maxsize=1024)
def read_region(text: str) -> RegionExpression:
    """An expression with both sides; `ExpressionError` where a region can't have it."""
    tree = parse_tensor(text)
    if tree.results is None:
        raise ExpressionError("a region says what goes in and what comes out, 'b@dp s -> b@dp s'", text, 0, len(text))
    explicit: set[str | None] = set()
    for spec in (*tree.operands, *tree.results):
        check_different(text, spec)
        places = [(place.names, place.span) for dim in spec.dims for place in dim_places(dim)]
        places += [((each.op,), each.span) for each in spec.pending or ()]
        for names, span in places:
            if "*" in names:
                raise ExpressionError(
                    "a region has no '*': a name without '@' keeps the split that it has; of others write the axes, "
                    "and what is pending, '| sum@tp'",
                    text,
                    *span,
                )
        for dim in spec.dims:
            if has_dots(dim) and str(dim) != "...":
                raise ExpressionError("'...' in a region flows; name the dim that is split or grouped", text, *dim.span)
            explicit.update(f.name for f in dim.factors if dim.place is not None or f.place is not None)
    return RegionExpression(text, tree.operands, tree.results, frozenset(explicit))


def flows(reading: RegionExpression, dim: Dim) -> bool:
    """Whether the dim is split as its tensor happens to be."""
    return not dim_places(dim) and not any(factor.name in reading.explicit for factor in dim.factors)


def key_of(dim: Dim) -> str | None:
    """What the dim is called throughout the expression; None for `_` and numbers."""
    if dim.grouped:
        return f"({' '.join(factor.name or str(factor.size) for factor in dim.factors)})"
    return None if dim.factors[0].name == "_" else dim.factors[0].name


def expanded(spec: Spec, ndim: int, what: str) -> list[Dim]:
    """The dims of the spec for a tensor of `ndim` dims: `...` becomes as many as are missing."""
    dots = sum(map(has_dots, spec.dims))
    missing = ndim - len(spec.dims) + dots
    if missing < 0 or (missing and not dots):
        advice = "write a name for each dim, or '...' for dims that stay as they are" if ndim else "a scalar's is empty"
        raise ShardingError(f"{what} has {ndim} dims, its spec '{spec}' {len(spec.dims) - dots}; {advice}")
    filling = [Dim((Factor(f"...{i}"),)) for i in range(missing)]
    return [found for dim in spec.dims for found in (filling if has_dots(dim) else [dim])]


def check_count(who: str, count: int, specs: Sequence[Spec], side: str) -> None:
    """One spec for each tensor; none, which is one of a scalar, for no tensors."""
    if count != len(specs) and (count or specs != (Spec(()),)):
        by_name = ". One that may be absent has its spec by name, shard_map(..., mask='b s')" if side == "left" else ""
        raise ShardingError(f"{who} {count} tensors, and the {side} side has {len(specs)} specs; one for each{by_name}")


@contextlib.contextmanager
def about(text: str) -> Iterator[None]:
    """Errors in the block say which expression they are about."""
    try:
        yield
    except (ShardingError, SizeError, MeshError) as error:
        raise located(error, text) from None


def located(error: AxesError, text: str) -> AxesError:
    """An error that says which expression it is about, if it is about none yet."""
    if "\n  in  shard_map '" not in str(error):
        error.args = (f"{error}\n  in  shard_map '{text}'",)
    return error


# going in


@dataclass(frozen=True, eq=False)
class Region:
    """What is known once the tensors are: the mesh of the names, and what results take over.

    Results lie on `tensor_mesh`, the mesh of the tensors. `splits` has, for each dim by name, how its
    tensor splits it; `sizes` its global size. `alone`: of plain shards, whose ranks don't ask each other for
    sizes. Each takes them to be even, so a name has its size only where it is split as on the left.
    """

    reading: RegionExpression
    mesh: Mesh
    tensor_mesh: Mesh
    device_mesh: Any
    splits: Mapping[str, Slots]
    sizes: Mapping[Any, int]
    inputs: tuple[RegionInput, ...]
    alone: bool


@dataclass(frozen=True)
class RegionInput:
    """A tensor that goes in: its dims as they are written, and how it lies; `counted` is what its gradient goes by."""

    dims: list[Dim]
    sharding: Sharding
    shape: Shape
    counted: Placements
    same: Axes


@of_world(1024)
def region_of(text: str, mesh: Mesh | None, given: bool, specs: tuple[Held, ...], alone: bool = False) -> Region:
    """The region of tensors with these `DTensorSpec`s. `mesh`: where the caller looks names up, passed or ambient."""
    if mesh is not None and mesh.rank != current_world().rank:  # equal to one that is seen from here, and found for it
        mesh = mesh.at(current_world().rank)
    ends = [(sharding_of_spec(each), tuple(each.shape), each.placements) for each in specs]
    found = _made(text, mesh, given, ends, alone)
    own = [each.mesh for each, (sharding, *_) in zip(specs, ends, strict=True) if sharding.mesh == found.tensor_mesh]
    return replace(found, device_mesh=own[0] if own else found.tensor_mesh.device_mesh)


def _made(
    text: str, mesh: Mesh | None, given: bool, ends: Sequence[tuple[Sharding, Shape, Placements]], alone: bool
) -> Region:
    reading = read_region(text)
    check_count("the function is called with", len(ends), reading.inputs, "left")
    tensor_mesh = _mesh_of_tensors([sharding.mesh for sharding, *_ in ends])
    names = _mesh_of_names(mesh, given, tensor_mesh)
    tensor_mesh = names if tensor_mesh is None else tensor_mesh
    if tensor_mesh.coordinate is None:
        raise MeshError(
            f"rank {tensor_mesh.rank} isn't one of the ranks of {tensor_mesh!r}; only they run a region on it"
        )
    pairs = enumerate(zip(reading.inputs, ends, strict=False))
    dims = [expanded(spec, len(shape), f"tensor {place}") for place, (spec, (_, shape, _)) in pairs]
    sizes, splits = _sizes(reading, dims, [shape for _, shape, _ in ends]), dict[str, Slots]()
    inputs = [_input(reading, names, place, *each, sizes) for place, each in enumerate(zip(dims, ends, strict=True))]
    for each in inputs:
        _take_over(splits, reading, each)
    region = Region(reading, names, tensor_mesh, None, splits, sizes, tuple(inputs), alone)
    for spec in reading.outputs:
        # What can't be is an error before the function runs and sends anything.
        result_sharding(region, spec, [dim for dim in spec.dims if not has_dots(dim)])
    return region


def mesh_of_names(mesh: Mesh | None, given: bool, device_meshes: Sequence[Any]) -> Mesh:
    """Where the names of a region are looked up, by the meshes that the tensors lie on."""
    return _mesh_of_names(mesh, given, _mesh_of_tensors([Mesh.from_device_mesh(each) for each in device_meshes]))


def _mesh_of_tensors(meshes: Sequence[Mesh]) -> Mesh | None:
    """The largest of the tensors' meshes, if it has the axes of all; None without tensors."""
    if not meshes:
        return None
    largest = max(meshes, key=lambda mesh: mesh.size)
    for mesh in meshes:
        if mesh.universe != largest.universe or not largest.layout_of_all.contains(mesh.layout_of_all):
            raise MeshError(
                f"the tensors lie on meshes of which none has all axes: {mesh!r} and {largest!r}; axes.from_local "
                "brings one onto a larger mesh"
            )
    return largest


def _mesh_of_names(mesh: Mesh | None, is_given: bool, tensor_mesh: Mesh | None) -> Mesh:
    found = mesh if tensor_mesh is None or (mesh is not None and mesh.universe == tensor_mesh.universe) else tensor_mesh
    if found is None:
        raise MeshError("a region without tensors needs a mesh: pass mesh=..., or call it inside `with mesh:`")
    if is_given and found is not mesh:
        raise MeshError(f"mesh= is over other ranks than the tensors: {mesh!r} and {tensor_mesh!r}")
    return found


def _sizes(reading: RegionExpression, inputs: Sequence[list[Dim]], shapes: Sequence[Shape]) -> dict[str, int]:
    """The global size of every name that is a dim of a tensor, or whose size is written."""
    every = [dim for spec in (*reading.inputs, *reading.outputs) for dim in spec.dims]
    pairs = [pair for each in zip(inputs, shapes, strict=True) for pair in zip(*each, strict=True)]
    seen = [(f.name, f.size) for dim in every for f in dim.factors] + [(key_of(dim), size) for dim, size in pairs]
    found: dict[str, int] = {}
    for name, size in seen:
        if name is not None and size is not None and found.setdefault(name, size) != size:
            raise SizeError(f"'{name}' has two sizes, {found[name]} and {size}")
    for dim, size in pairs:
        if not dim.grouped and dim.factors[0].name is None and dim.factors[0].size != size:
            raise SizeError(f"a dim is written as {dim}, and has {size} elements")
    return found


def _input(
    reading: RegionExpression,
    names: Mesh,
    place: int,
    dims: list[Dim],
    end: tuple[Sharding, Shape, Placements],
    sizes: Mapping[str, int],
) -> RegionInput:
    """A tensor that goes in. Refuses one that isn't sharded as the left side says, and a spec that none can have."""
    spec, (actual, shape, placements) = reading.inputs[place], end
    said = {at: dim for at, dim in enumerate(dims) if not flows(reading, dim)}
    wanted, same = _marked(names, spec, list(said.values()), sizes)
    held = Sharding(actual.mesh, tuple([actual.dims[at] for at in said]), actual.pending)
    overlap = any(layout.overlaps(used) for layout in same for used in actual.used)
    if not overlap and wanted.is_equivalent(held, [shape[at] for at in said]):
        return RegionInput(dims, actual, shape, counted_as_same(actual.mesh, placements, same), same)
    pendings = [str(p) for p in spec.pending or () if p.op != "same"]
    texts = list(map(str, dims))
    for at in [at for at in range(len(dims)) if at not in said]:
        # A star keeps the axes that the tensor has there, unless the left side uses them elsewhere.
        taken = any(axis.overlaps(used) for axis in actual.dims[at].layouts for used in wanted.used)
        texts[at] = ("_" if has_dots(dims[at]) else str(dims[at])) + ("" if taken else "@*")
    target = " ".join([*texts, *(["|"] if pendings else []), *pendings])
    shown = replace(actual, names=tuple([(key_of(dim) or "",) for dim in dims]))
    raise ShardingError(
        f"tensor {place} isn't sharded as the left side says\n"
        f"  left side  {spec}\n"
        f"  tensor     {shown}    {list(shape)}, {actual.mesh!r}\n"
        f"write how it is sharded, or move it first: axes.reshard(x, '{target}')"
    )


def _marked(names: Mesh, spec: Spec, dims: Sequence[Dim], sizes: Mapping[str, int]) -> tuple[Sharding, Axes]:
    """Dims of a spec as they are written, and what it says is pending; and the axes over which it says `same`.

    Factors have their sizes where these are known; a tensor may have none of one.
    """
    known = {f.name: sizes[f.name] for dim in dims for f in dim.factors if f.name is not None and sizes.get(f.name)}
    pending = map(str, spec.pending or ())
    return marked_sharding(names, " ".join([*map(str, dims), "|", *pending]), tuple(sorted(known.items())))


def _take_over(splits: dict[str, Slots], reading: RegionExpression, each: RegionInput) -> None:
    """Remembers how each dim is split, for results with that dim. Where it flows the tensors agree."""
    for dim, split, extent in zip(each.dims, each.sharding.dims, each.shape, strict=True):
        key = key_of(dim)
        if key is None:
            continue
        other = splits.setdefault(key, split)
        if not same_cuts(split, other, extent) and flows(reading, dim):
            one, two = (slots_text(each.sharding.mesh, slots) for slots in (other, split))
            raise ShardingError(f"the tensors disagree on how '{key}' is split, {one} and {two}; reshard one of them")


# coming out


Placed = tuple[Any, Placements, Shape, Placements]
"""What a result is outside, as `enter_global` takes it: device mesh, placements, shape, what its gradient goes by."""


def result_parts(region: Region, shapes: Sequence[Shape], sizes: Mapping[Any, Any]) -> tuple[LocalPart, ...]:
    """What this rank has of the results, which have these shapes; `sizes` are those of names."""
    outputs, found = region.reading.outputs, []
    check_count("the function returned", len(shapes), outputs, "right")
    for place, (spec, local) in enumerate(zip(outputs, shapes, strict=False)):
        dims = expanded(spec, len(local), f"result {place}")
        sharding, same = result_sharding(region, spec, dims)
        known = [_whole_size(region, sizes, *each) for each in zip(dims, sharding.dims, local, strict=True)]
        found.append(LocalPart(sharding, local, tuple(known), same, f"result {place}, '{spec}',"))
    return tuple(found)


def result_sharding(region: Region, spec: Spec, dims: Sequence[Dim]) -> tuple[Sharding, Axes]:
    """How a result of these dims lies, on the mesh of the tensors; and the axes over which it is `same`."""
    marked, same = _marked(region.mesh, spec, (), {})
    splits = tuple([_split(region, dim) for dim in dims])
    sharding = Sharding(region.tensor_mesh, splits, marked.pending, tuple(map(_names, dims, splits)))
    check_axes_are_whole(replace(sharding, pending=(*sharding.pending, *[("same", layout) for layout in same])))
    return sharding, same


def _names(dim: Dim, split: Slots) -> tuple[str, ...]:
    names = tuple([factor.name or "" for factor in dim.factors])
    return names if len(names) == len(split) else (key_of(dim) or "",)


def _split(region: Region, dim: Dim) -> Slots:
    """How a dim of a result is split."""
    if not flows(region.reading, dim):
        return _marked(region.mesh, Spec(()), (dim,), region.sizes)[0].dims[0]
    key = key_of(dim)
    if key is not None and key in region.splits:
        return region.splits[key]
    _check_new(region, dim)
    return Slots((Slot(),))


def _check_new(region: Region, dim: Dim) -> None:
    """A new name is unsplit; refuses one that only seems new, since a split tensor has it in a group or out of one."""
    names = {factor.name for factor in dim.factors}
    for key, split in region.splits.items():
        if split.layouts and names & set(key.strip("()").split()):
            text = slots_text(region.tensor_mesh, split, (key,) if len(split) == 1 else ())
            raise ShardingError(
                f"{dim} on the right was part of '{key}' on the left, which is {text}; write how it is split now"
            )


def _whole_size(region: Region, sizes: Mapping[str, Any], dim: Dim, split: Slots, local: Any) -> Any:
    """The global size of a dim of a result: that of its name, or its own where it isn't split; else nobody knows it."""
    key = key_of(dim)
    if key is not None and (not region.alone or region.splits.get(key) == split):
        if key in sizes:
            return sizes[key]
        if all(factor.name is None or factor.name in sizes for factor in dim.factors):
            return math.prod([sizes[factor.name] if factor.name else factor.size for factor in dim.factors])
    return local if split.pieces == 1 else None


@of_world(1024)
def results_of(region: Region, shapes: tuple[Shape, ...]) -> tuple[tuple[LocalPart, ...], list[Placed] | None]:
    """The results that have these shapes on this rank, and what they are outside; None where their whole shapes have to
    be told by the ranks.
    """
    parts = result_parts(region, shapes, region.sizes)
    if not region.alone and any(part.open for part in parts):
        return parts, None
    return parts, [placed(region, part, placements_of(part, part.even), part.even) for part in parts]


def placed(region: Region, part: LocalPart, placements: Placements, whole: Shape) -> Placed:
    """What a result is outside."""
    return region.device_mesh, placements, whole, counted_as_same(region.tensor_mesh, placements, part.same)


# in torch.compile: a region is the same at every size that its splits divide. Such sizes stay symbols, and the graph is
# guarded on the remainder. Other sizes become numbers, those in groups and those that are written too


def traced_region(asked: Asked, specs: Sequence[Held]) -> tuple[Region, Mapping[Any, Any]]:
    """The region of tensors with these `DTensorSpec`s, at the sizes of the call that is traced; and the sizes of its
    names, symbols where they may vary.
    """
    found = region_of(*asked, tuple([spec_at(spec, hints(spec.shape)) for spec in specs]))
    every = [dim for spec in (*found.reading.inputs, *found.reading.outputs) for dim in spec.dims]
    opened = [dim for dim in every if dim.grouped and not flows(found.reading, dim)]
    stay = {f.name for dim in every for f in dim.factors if f.size is not None or dim in opened}
    uses = []
    for place, (each, spec) in enumerate(zip(found.inputs, specs, strict=True)):
        for at, (dim, split, size) in enumerate(zip(each.dims, each.sharding.dims, spec.shape, strict=True)):
            name = key_of(dim) or (place, at)
            may = name not in stay and len(split) == 1 and dim not in opened
            uses.append((name, size, split.pieces if may else 0))
    return found, {**found.sizes, **varying(uses)}
