"""The structure of an SPMD region: what its expression says of the tensors on both sides of `->`.

With what the tensors that go in know of themselves it is a `Region`, and with the shapes that the
function has returned on this rank it says how the results lie:

    region = region_of(requested("shard_map", "b@dp s d, d f@tp -> b@dp s f@tp", "", mesh), specs)
    parts, found = results_of(region, ((2, 8, 16),))   # how results lie, their placements and global shapes

All of it is found from a few values that can be hashed, and remembered. Nothing here runs anything.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor.placement_types import Placement

from axes.algebra.errors import AxesError, ExpressionError, MeshError, ShardingError, SizeError
from axes.algebra.grammar import Dim, Factor, Spec, check_different, dim_places, has_dots, parse_tensor
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_axes_are_whole, check_torch_can
from axes.algebra.sharding import Sharding, Slot, Slots, same_cuts, slots_text
from axes.algebra.specs import marked_sharding
from axes.ops.request import Request
from axes.runtime.border import counted_as_same as _counted
from axes.runtime.groups import current_world, of_world
from axes.runtime.shards import LocalPart
from axes.runtime.symbols import are_equal, fixed, hints, spec_at, varying
from axes.runtime.torch_placements import sharding_of_spec, torch_placements

Axes = tuple[Layout, ...]
Placements = tuple[Placement, ...]
Shape = tuple[Any, ...]
Held = Any
"""What is known of a DTensor: torch's `DTensorSpec` of it."""


# reading


@dataclass(frozen=True, eq=False)
class RegionExpression:
    """An expression, and which of its names are explicit: those with an `@` that isn't relative."""

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
    relative: set[str | None] = set()
    explicit: set[str | None] = set()
    for spec in (*tree.operands, *tree.results):
        check_different(text, spec)
        for dim in spec.dims:
            if has_dots(dim) and str(dim) != "...":
                raise ExpressionError("'...' in a region flows; name the dim that is split or grouped", text, *dim.span)
            if not _is_relative(dim):
                explicit.update(f.name for f in dim.factors if dim.place is not None or f.place is not None)
            elif dim.grouped or dim.factors[0].name in (None, "_", "..."):
                raise ExpressionError("'*' in a region stands for the split that a name has", text, *dim.span)
            else:
                relative.add(dim.factors[0].name)
    for dim in (dim for spec in tree.operands for dim in spec.dims):
        if _is_relative(dim) and str(dim.factors[0].place) != "*":
            raise ExpressionError("left of '->' in a region '*' stands alone: it is the whole split", text, *dim.span)
    return RegionExpression(text, tree.operands, tree.results, frozenset(explicit - relative))


def _is_relative(dim: Dim) -> bool:
    """Whether `*`, the split that the dim has, is part of its place."""
    return any("*" in place.names for place in dim_places(dim))


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

    Results lie on `home`, the mesh of the tensors. `splits` has, for each dim by name, how its
    tensor splits it; `sizes` its global size. `alone`: of plain shards, whose ranks don't ask each other for
    sizes. Each takes them to be even, so a name has its size only where it is split as on the left.
    """

    reading: RegionExpression
    mesh: Mesh
    home: Mesh
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
def region_of(request: Request, specs: tuple[Held, ...], alone: bool = False) -> Region:
    """The region that is asked for, of tensors with these `DTensorSpec`s. `alone` is as in `Region`."""
    with about(request.text):
        ends = [(sharding_of_spec(each), tuple(each.shape), each.placements) for each in specs]
        mesh = request.mesh
        if mesh is not None and mesh._view is not None:  # meshes that ranks see differently are equal
            mesh = mesh.at(current_world().rank)
        found = _made(request.text, mesh, request.given, ends, alone)
    own = [each.mesh for each, (sharding, *_) in zip(specs, ends, strict=True) if sharding.mesh == found.home]
    return replace(found, device_mesh=own[0] if own else found.home.device_mesh)


def region_of_shardings(expression: str, mesh: Mesh, shardings: Sequence[Sharding], shapes: Sequence[Shape]) -> Region:
    """The region of tensors that lie so, without a running job: nothing can run in it."""
    ends = list(zip(shardings, shapes, map(torch_placements, shardings), strict=True))
    with about(expression):
        return _made(expression, mesh, True, ends, False)


def _made(
    text: str, mesh: Mesh | None, is_given: bool, ends: Sequence[tuple[Sharding, Shape, Placements]], alone: bool
) -> Region:
    reading = read_region(text)
    check_count("the function is called with", len(ends), reading.inputs, "left")
    home = _home([sharding.mesh for sharding, *_ in ends])
    names = _mesh_of_names(mesh, is_given, home)
    home = names if home is None else home
    if home.coordinate is None:
        raise MeshError(f"rank {home.rank} isn't one of the ranks of {home!r}; only they run a region on it")
    pairs = enumerate(zip(reading.inputs, ends, strict=False))
    dims = [expanded(spec, len(shape), f"tensor {place}") for place, (spec, (_, shape, _)) in pairs]
    sizes, splits = _sizes(reading, dims, [shape for _, shape, _ in ends]), dict[str, Slots]()
    inputs = tuple(
        [_input(reading, names, place, *each, sizes) for place, each in enumerate(zip(dims, ends, strict=True))]
    )
    for each in inputs:
        _take_over(splits, reading, each)
    region = Region(reading, names, home, None, splits, sizes, inputs, alone)
    for spec in reading.outputs:
        # What can't be is an error before the function runs and sends anything.
        result_sharding(region, spec, [dim for dim in spec.dims if not has_dots(dim)])
    return region


def mesh_of_names(request: Request, device_meshes: Sequence[Any]) -> Mesh:
    """Where the names of a region are looked up, by the meshes that the tensors lie on."""
    home = _home([Mesh.from_device_mesh(each) for each in device_meshes])
    return _mesh_of_names(request.mesh, request.given, home)


def _home(meshes: Sequence[Mesh]) -> Mesh | None:
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


def _mesh_of_names(mesh: Mesh | None, is_given: bool, home: Mesh | None) -> Mesh:
    if home is None:
        if mesh is None:
            raise MeshError("a region without tensors needs a mesh: pass mesh=..., or call it inside `with mesh:`")
        return mesh
    if mesh is not None and mesh.universe == home.universe:
        return mesh
    if is_given:
        raise MeshError(f"mesh= is over other ranks than the tensors: {mesh!r} and {home!r}")
    return home


def _sizes(reading: RegionExpression, inputs: Sequence[list[Dim]], shapes: Sequence[Shape]) -> dict[str, int]:
    """The global size of every name that is a dim of a tensor, or whose size is written."""
    specs = (*reading.inputs, *reading.outputs)
    seen = [(f.name, f.size) for spec in specs for dim in spec.dims for f in dim.factors if f.size is not None]
    for dims, shape in zip(inputs, shapes, strict=True):
        for dim, extent in zip(dims, shape, strict=True):
            seen.append((key_of(dim), extent))
            if not dim.grouped and dim.factors[0].name is None and dim.factors[0].size != extent:
                raise SizeError(f"a dim of {list(shape)} is written as {dim}, and has {extent} elements")
    found: dict[str, int] = {}
    for name, size in seen:
        if name is not None and size is not None and found.setdefault(name, size) != size:
            raise SizeError(f"'{name}' has two sizes, {found[name]} and {size}")
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
    said = {at: dim for at, dim in enumerate(dims) if not (flows(reading, dim) or _is_relative(dim))}
    wanted, same = _marked(names, spec, list(said.values()), sizes)
    is_open = any(pending.op == "*" for pending in spec.pending or ())
    held = Sharding(actual.mesh, tuple([actual.dims[at] for at in said]), () if is_open else actual.pending)
    overlap = any(layout.overlaps(used) for layout in same for used in actual.used)
    if not overlap and wanted.is_equivalent(held, [shape[at] for at in said]):
        return RegionInput(dims, actual, shape, _counted(actual.mesh, placements, same), same)
    pendings = [str(p) for p in spec.pending or () if p.op != "same"]
    texts = [f"{'_' if has_dots(dim) else dim}@*" if flows(reading, dim) else str(dim) for dim in dims]
    target = " ".join([*texts, *(["|"] if pendings else []), *pendings])
    shown = actual.named([key_of(dim) or "_" for dim in dims])
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
    pending = [str(each) for each in spec.pending or () if each.op != "*"]
    return marked_sharding(names, " ".join([*map(str, dims), "|", *pending]), tuple(sorted(known.items())))


def _take_over(splits: dict[str, Slots], reading: RegionExpression, each: RegionInput) -> None:
    """Remembers how each dim is split, for results with that dim. Where it flows the tensors agree."""
    for dim, split, extent in zip(each.dims, each.sharding.dims, each.shape, strict=True):
        key = key_of(dim)
        if key is None:
            continue
        other = splits.setdefault(key, split)
        if not same_cuts(split, other, extent) and (flows(reading, dim) or _is_relative(dim)):
            one, two = (slots_text(each.sharding.mesh, slots) for slots in (other, split))
            raise ShardingError(f"the tensors disagree on how '{key}' is split, {one} and {two}; reshard one of them")


# coming out


class Placed(NamedTuple):
    """What a result is outside, as `enter_global` takes it: how it lies, its shape, what its gradient goes by."""

    device_mesh: Any
    placements: Placements
    shape: tuple[Any, ...]
    counted: Placements


@of_world(1024)
def results_of(region: Region, shapes: tuple[Shape, ...]) -> tuple[tuple[LocalPart, ...], tuple[Placed, ...] | None]:
    """The results that have these shapes on this rank, and what they are outside; None where their whole shapes have to
    be told by the ranks.
    """
    parts = _parts(region, shapes, region.sizes)
    is_open = not region.alone and any(part.open for part in parts)
    return parts, None if is_open else placed(region, parts, tuple([part.even for part in parts]))


def _parts(region: Region, shapes: Sequence[Shape], sizes: Mapping[str, Any]) -> tuple[LocalPart, ...]:
    """What this rank has of the results, which have these shapes; `sizes` are those of names."""
    outputs, found = region.reading.outputs, []
    with about(region.reading.text):
        check_count("the function returned", len(shapes), outputs, "right")
        for place, (spec, local) in enumerate(zip(outputs, shapes, strict=False)):
            dims = expanded(spec, len(local), f"result {place}")
            sharding = result_sharding(region, spec, dims)
            known = [_whole_size(region, sizes, *each) for each in zip(dims, sharding.dims, local, strict=True)]
            found.append(LocalPart(sharding, local, tuple(known)))
    return tuple(found)


@of_world(1024)
def placed(region: Region, parts: tuple[LocalPart, ...], wholes: tuple[Shape, ...]) -> tuple[Placed, ...]:
    """What the results are outside, of these whole shapes."""
    found = []
    with about(region.reading.text):
        for place, (part, whole) in enumerate(zip(parts, wholes, strict=True)):
            spec, expected = region.reading.outputs[place], part.sharding.local_shape(whole)
            if expected != part.local:
                known = "" if region.alone else f"{list(whole)} in whole and so "
                raise ShardingError(
                    f"result {place}, '{spec}', is {known}{list(expected)} on this rank; the function returned "
                    f"{list(part.local)}"
                )
            sharding = part.sharding.sized(whole)
            check_torch_can(sharding, whole)
            placements = torch_placements(sharding)
            counted = _counted(region.home, placements, _marked(region.mesh, spec, (), {})[1])
            found.append(Placed(region.device_mesh, placements, torch.Size(whole), counted))
    return tuple(found)


def result_sharding(region: Region, spec: Spec, dims: Sequence[Dim]) -> Sharding:
    """How a result of these dims lies, on the mesh of the tensors."""
    if any(pending.op == "*" for pending in spec.pending or ()):
        raise ShardingError(
            "'| *' on the right: only the function knows what it leaves pending; write it, like '| sum@tp'"
        )
    marked, same = _marked(region.mesh, spec, (), {})
    splits = tuple([_split(region, dim) for dim in dims])
    sharding = Sharding(region.home, splits, marked.pending, tuple(map(_names, dims, splits)))
    check_axes_are_whole(replace(sharding, pending=(*sharding.pending, *[("same", layout) for layout in same])))
    return sharding


def _names(dim: Dim, split: Slots) -> tuple[str, ...]:
    names = tuple([factor.name or "" for factor in dim.factors])
    return names if len(names) == len(split) else (key_of(dim) or "",)


def _split(region: Region, dim: Dim) -> Slots:
    """How a dim of a result is split."""
    key = key_of(dim)
    if flows(region.reading, dim):
        if key is not None and key in region.splits:
            return region.splits[key]
        _check_new(region, dim)
        return Slots((Slot(),))
    if not _is_relative(dim):
        return _marked(region.mesh, Spec(()), (dim,), region.sizes)[0].dims[0]
    if key is None or key not in region.splits:
        raise ShardingError(f"'*' in {dim} is how '{key}' is split on the left, where it isn't")
    split = region.splits[key]
    if len(split) > 1:
        text = slots_text(region.home, split)
        raise ShardingError(f"'*' in {dim} would be {text}, which is split inside; write it out")
    names = place.names if (place := dim.factors[0].place) else ()
    layouts = [each for name in names for each in (split.layouts if name == "*" else region.mesh.splits((name,)))]
    return Slots((Slot(tuple(layouts)),))


def _check_new(region: Region, dim: Dim) -> None:
    """A new name is unsplit; refuses one that only seems new, since a split tensor has it in a group or out of one."""
    names = {factor.name for factor in dim.factors}
    for key, split in region.splits.items():
        if split.layouts and names & set(key.strip("()").split()):
            text = slots_text(region.home, split, (key,) if len(split) == 1 else ())
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


# in torch.compile: a region is the same at every size that its splits divide. Such sizes stay symbols, and the graph is
# guarded on the remainder. Other sizes become numbers, those in groups and those that are written too


def traced_region(request: Request, specs: Sequence[Held]) -> tuple[Region, Mapping[str, Any]]:
    """The region of tensors with these `DTensorSpec`s, at the sizes of the call that is traced; and the sizes of its
    names, symbols where they may vary.
    """
    found = region_of(request, tuple([spec_at(spec, hints(spec.shape)) for spec in specs]))
    every = [dim for spec in (*found.reading.inputs, *found.reading.outputs) for dim in spec.dims]
    stay = {f.name for dim in every for f in dim.factors if f.size is not None or _is_opened(found, dim)}
    uses = []
    for place, (each, spec) in enumerate(zip(found.inputs, specs, strict=True)):
        for at, (dim, split, size) in enumerate(zip(each.dims, each.sharding.dims, spec.shape, strict=True)):
            name = key_of(dim) or (place, at)
            may = name not in stay and len(split) == 1 and not _is_opened(found, dim)
            uses.append((name, size, split.pieces if may else 0))
    return found, {**found.sizes, **varying(uses)}


def _is_opened(region: Region, dim: Dim) -> bool:
    return dim.grouped and not flows(region.reading, dim)


def traced_results(
    request: Request, specs: Sequence[Held], shapes: Sequence[Shape]
) -> tuple[tuple[Placed, ...], tuple[LocalPart, ...]]:
    """What the results are outside that have these shapes on this rank; where it is symbolic, so is that there. And the
    results as parts, of which some may have to be told even.
    """
    region, sizes = traced_region(request, specs)
    parts = _parts(region, shapes, sizes)
    for part in parts:
        for split, local, whole in zip(part.sharding.dims, part.local, part.even, strict=True):
            if len(split) != 1 or whole % split.pieces or not are_equal(whole, local * split.pieces):
                fixed(local), fixed(whole)
    wholes = tuple([hints(part.even) for part in parts])
    numbers = tuple([LocalPart(part.sharding, hints(part.local), n) for part, n in zip(parts, wholes, strict=True)])
    found = placed(region, numbers, wholes)
    return tuple([p._replace(shape=part.even) for p, part in zip(found, parts, strict=True)]), parts
