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
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement

from axes.algebra.errors import AxesError, ExpressionError, MeshError, ShardingError, SizeError
from axes.algebra.grammar import Dim, Factor, Spec, check_different, parse_tensor
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_axes_are_whole, check_torch_can
from axes.algebra.sharding import Sharding, Slot, Slots, same_cuts, slots_text
from axes.algebra.specs import parsed_sharding
from axes.ops.request import Request
from axes.runtime.border import counted_as_same as _counted
from axes.runtime.groups import of_world
from axes.runtime.shards import LocalPart
from axes.runtime.torch_placements import sharding_of_spec, torch_placements

Axes = tuple[Layout, ...]
Placements = tuple[Placement, ...]
Shape = tuple[int, ...]
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
    for side, specs in enumerate((tree.operands, tree.results)):
        for dim in (dim for spec in specs for dim in spec.dims):
            if _is_dots(dim) and str(dim) != "...":
                raise ExpressionError("'...' in a region flows; name the dim that is split or grouped", text, *dim.span)
            if _is_relative(dim):
                _check_relative(text, dim, side)
                relative.add(dim.factors[0].name)
            else:
                explicit.update(f.name for f in dim.factors if dim.place is not None or f.place is not None)
    return RegionExpression(text, tree.operands, tree.results, frozenset(explicit - relative))


def _check_relative(text: str, dim: Dim, side: int) -> None:
    if dim.grouped or dim.factors[0].name in (None, "_", "..."):
        raise ExpressionError("'*' in a region stands for the split that a name has", text, *dim.span)
    if side == 0 and str(dim.factors[0].place) != "*":
        raise ExpressionError("left of '->' in a region '*' stands alone: it is the whole split", text, *dim.span)


def _is_relative(dim: Dim) -> bool:
    """Whether `*`, the split that the dim has, is part of its place."""
    return any(place is not None and "*" in place.names for place in (dim.place, *(f.place for f in dim.factors)))


def flows(reading: RegionExpression, dim: Dim) -> bool:
    """Whether the dim is split as its tensor happens to be."""
    bare = dim.place is None and all(factor.place is None for factor in dim.factors)
    return bare and not any(factor.name in reading.explicit for factor in dim.factors)


def key_of(dim: Dim) -> str | None:
    """What the dim is called throughout the expression; None for `_` and numbers."""
    if dim.grouped:
        return f"({' '.join(factor.name or str(factor.size) for factor in dim.factors)})"
    return None if dim.factors[0].name == "_" else dim.factors[0].name


def expanded(spec: Spec, ndim: int, what: str) -> list[Dim]:
    """The dims of the spec for a tensor of `ndim` dims: `...` becomes as many as are missing."""
    dots = sum(map(_is_dots, spec.dims))
    missing = ndim - len(spec.dims) + dots
    if missing < 0 or (missing and not dots):
        raise ShardingError(f"{what} has {ndim} dims, its spec '{spec}' {len(spec.dims) - dots}")
    filling = [Dim((Factor(f"...{i}"),)) for i in range(missing)]
    return [found for dim in spec.dims for found in (filling if _is_dots(dim) else [dim])]


def _is_dots(dim: Dim) -> bool:
    return any(factor.name == "..." for factor in dim.factors)


def check_count(who: str, count: int, specs: Sequence[Spec], side: str) -> None:
    """One spec for each tensor; none, which is one of a scalar, for no tensors."""
    if count != len(specs) and (count or specs != (Spec(()),)):
        raise ShardingError(f"{who} {count} tensors, and the {side} side has {len(specs)} specs; one for each")


@contextlib.contextmanager
def about(text: str) -> Iterator[None]:
    """Errors in the block say which expression they are about."""
    try:
        yield
    except (ShardingError, SizeError, MeshError) as error:
        raise located(error, text) from None


def located(error: AxesError, text: str) -> AxesError:
    """The same error with the expression that it is about."""
    return type(error)(f"{error}\n  in  shard_map '{text}'")


# going in


@dataclass(frozen=True, eq=False)
class Region:
    """What is known once the tensors are: the mesh of the names, and what results take over.

    Results lie on `home`, the mesh of the tensors. `splits` has, for each dim by name, how its
    tensor splits it; `sizes` its global size. `alone`: of plain shards, whose ranks don't ask each
    other for sizes. Each takes them to be even, and a split dim has its size only where it is split so.
    """

    reading: RegionExpression
    mesh: Mesh
    home: Mesh
    device_mesh: Any
    splits: Mapping[str, Slots]
    sizes: Mapping[Any, int]
    inputs: tuple[RegionInput, ...]
    alone: bool = False


@dataclass(frozen=True)
class RegionInput:
    """A tensor that goes in: its spec, dim by dim, and how it is sharded; `counted` is what its gradient goes by."""

    spec: Spec
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
        found = _made(request.text, request.mesh, request.given, ends)
    own = [each.mesh for each, (sharding, *_) in zip(specs, ends, strict=True) if sharding.mesh == found.home]
    sizes = _own_sizes(found) if alone else found.sizes
    return replace(found, device_mesh=own[0] if own else found.home.device_mesh, sizes=sizes, alone=alone)


def region_of_shardings(expression: str, mesh: Mesh, shardings: Sequence[Sharding], shapes: Sequence[Shape]) -> Region:
    """The region of tensors that lie so, without a running job: nothing can run in it."""
    with about(expression):
        return _made(
            expression, mesh, True, list(zip(shardings, shapes, map(torch_placements, shardings), strict=True))
        )


def _own_sizes(region: Region) -> dict[Any, int]:
    """The sizes by name; those of dims that are split, by name and split, but where they are written."""
    written, found = dict(_written(region.reading)), {}
    for name, size in region.sizes.items():
        split = region.splits.get(name)
        is_open = split is not None and split.pieces > 1 and name not in written
        found[(name, split) if is_open else name] = size
    return found


def _made(text: str, mesh: Mesh | None, is_given: bool, ends: Sequence[tuple[Sharding, Shape, Placements]]) -> Region:
    reading = read_region(text)
    check_count("the function is called with", len(ends), reading.inputs, "left")
    home = _home([sharding.mesh for sharding, *_ in ends])
    names = _mesh_of_names(mesh, is_given, home)
    home = names if home is None else home
    if home.coordinate is None:
        raise MeshError(f"rank {home.rank} isn't one of the ranks of {home!r}; only they run a region on it")
    inputs: list[RegionInput] = []
    for place, (spec, (sharding, shape, placements)) in enumerate(zip(reading.inputs, ends, strict=False)):
        dims, same = expanded(spec, len(shape), f"tensor {place}"), _same(names, spec)
        inputs.append(RegionInput(spec, dims, sharding, shape, _counted(sharding.mesh, placements, same), same))
    sizes = _sizes(reading, inputs)
    splits: dict[str, Slots] = {}
    for place, each in enumerate(inputs):
        _check_lies(reading, names, place, each, sizes)
        _take_over(splits, reading, each)
    region = Region(reading, names, home, None, splits, sizes, tuple(inputs))
    for spec in reading.outputs:
        # What can't be is an error before the function runs and sends anything.
        result_sharding(region, spec, [dim for dim in spec.dims if not _is_dots(dim)])
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


def _sizes(reading: RegionExpression, inputs: Sequence[RegionInput]) -> dict[str, int]:
    """The global size of every name that is a dim of a tensor, or whose size is written."""
    seen = _written(reading)
    for each in inputs:
        for dim, extent in zip(each.dims, each.shape, strict=True):
            seen.append((key_of(dim), extent))
            if not dim.grouped and dim.factors[0].name is None and dim.factors[0].size != extent:
                raise SizeError(f"a dim of {list(each.shape)} is written as {dim}, and has {extent} elements")
    found: dict[str, int] = {}
    for name, size in seen:
        if name is not None and size is not None and found.setdefault(name, size) != size:
            raise SizeError(f"'{name}' has two sizes, {found[name]} and {size}")
    return found


def _written(reading: RegionExpression) -> list[tuple[str | None, int]]:
    """Names, and the sizes that are written at them."""
    specs = (*reading.inputs, *reading.outputs)
    return [(f.name, f.size) for spec in specs for dim in spec.dims for f in dim.factors if f.size is not None]


def _check_lies(
    reading: RegionExpression, names: Mesh, place: int, each: RegionInput, sizes: Mapping[str, int]
) -> None:
    """Refuses a tensor that isn't sharded as the left side says, and a spec that none can have."""
    spec, actual = each.spec, each.sharding
    told = [None if flows(reading, d) or _is_relative(d) else _explicit(names, d, sizes) for d in each.dims]
    is_open = any(pending.op == "*" for pending in spec.pending or ())
    pending = () if is_open else _pending(names, spec).pending
    said = [d for d in told if d is not None]
    dims, called = tuple([d.dims[0] for d in said]), tuple([d.names[0] for d in said])
    _with_same(Sharding(names, dims, pending, called), each.same)
    held = Sharding(actual.mesh, (), actual.pending)
    fits = _is_replicated(actual, each.same) and (is_open or Sharding(names, (), pending).is_equivalent(held))
    if fits and all(
        d is None or d.is_equivalent(Sharding(actual.mesh, (split,)), (extent,))
        for d, split, extent in zip(told, actual.dims, each.shape, strict=True)
    ):
        return
    pendings = [str(p) for p in spec.pending or () if p.op != "same"]
    texts = [f"{'_' if _is_dots(dim) else dim}@*" if flows(reading, dim) else str(dim) for dim in each.dims]
    target = " ".join([*texts, *(["|"] if pendings else []), *pendings])
    shown = actual.named([key_of(dim) or "_" for dim in each.dims])
    raise ShardingError(
        f"tensor {place} isn't sharded as the left side says\n"
        f"  left side  {spec}\n"
        f"  tensor     {shown}    {list(each.shape)}, {actual.mesh!r}\n"
        f"write how it is sharded, or move it first: axes.reshard(x, '{target}')"
    )


def _explicit(names: Mesh, dim: Dim, sizes: Mapping[str, int]) -> Sharding:
    """A dim alone as it is written, with its factors' sizes where they are known; a tensor may have none of one."""
    known = {f.name: sizes[f.name] for f in dim.factors if f.name is not None and sizes.get(f.name)}
    return parsed_sharding(names, str(dim), tuple(sorted(known.items())))


def _pending(names: Mesh, spec: Spec) -> Sharding:
    """What a spec says is pending, as the sharding of a scalar."""
    return parsed_sharding(names, f"| {' '.join(str(p) for p in spec.pending or () if p.op != 'same')}")


def _same(names: Mesh, spec: Spec) -> Axes:
    """The axes over which a spec says `same`."""
    return tuple(a for p in spec.pending or () if p.op == "same" and p.place for a in names.splits(p.place.names))


def _is_replicated(sharding: Sharding, axes: Axes) -> bool:
    try:
        _with_same(sharding, axes)
    except ShardingError:
        return False
    return True


def _with_same(sharding: Sharding, axes: Axes) -> Sharding:
    """The sharding that is also `same` over axes; `ShardingError` where these split it or are pending."""
    return replace(sharding, pending=(*sharding.pending, *[("same", layout) for layout in axes])) if axes else sharding


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


@dataclass(frozen=True)
class Placed:
    """What a result is outside: how it lies, the placements its gradient goes by, its global shape."""

    device_mesh: Any
    placements: Placements
    counted: Placements
    shape: tuple[Any, ...]


@of_world(1024)
def results_of(region: Region, shapes: tuple[Shape, ...]) -> tuple[tuple[LocalPart, ...], tuple[Placed, ...] | None]:
    """The results that have these shapes on this rank, and what they are outside; None where their whole shapes have to
    be told by the ranks.
    """
    outputs, found = region.reading.outputs, []
    with about(region.reading.text):
        check_count("the function returned", len(shapes), outputs, "right")
        for place, (spec, local) in enumerate(zip(outputs, shapes, strict=False)):
            dims = expanded(spec, len(local), f"result {place}")
            sharding = result_sharding(region, spec, dims)
            known = tuple([whole_size(region, *each) for each in zip(dims, sharding.dims, local, strict=True)])
            found.append(LocalPart(sharding, local, known))
    parts = tuple(found)
    is_open = not region.alone and any(part.open for part in parts)
    return parts, None if is_open else placed(region, parts, tuple([part.even for part in parts]))


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
            counted = _counted(region.home, placements, _same(region.mesh, spec))
            found.append(Placed(region.device_mesh, placements, counted, torch.Size(whole)))
    return tuple(found)


def result_sharding(region: Region, spec: Spec, dims: Sequence[Dim]) -> Sharding:
    """How a result of these dims lies, on the mesh of the tensors."""
    if any(pending.op == "*" for pending in spec.pending or ()):
        raise ShardingError(
            "'| *' on the right: only the function knows what it leaves pending; write it, like '| sum@tp'"
        )
    pending = _pending(region.mesh, spec).pending
    sharding = Sharding(region.home, tuple(_split(region, dim) for dim in dims), pending)
    check_axes_are_whole(_with_same(sharding, _same(region.mesh, spec)))
    return sharding


def _split(region: Region, dim: Dim) -> Slots:
    """How a dim of a result is split."""
    key = key_of(dim)
    if flows(region.reading, dim):
        if key is not None and key in region.splits:
            return region.splits[key]
        _check_new(region, dim)
        return Slots((Slot(),))
    if not _is_relative(dim):
        return _explicit(region.mesh, dim, region.sizes).dims[0]
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


def whole_size(region: Region, dim: Dim, split: Slots, local: int) -> int | None:
    """The global size of a dim of a result: that of its name, or its own where it isn't split; else nobody knows it."""
    key, sizes = key_of(dim), region.sizes
    for known in (key, (key, split)):
        if known in sizes:
            return sizes[known]
    if key is not None and all(factor.name is None or factor.name in sizes for factor in dim.factors):
        return math.prod([sizes[factor.name] if factor.name else factor.size for factor in dim.factors])  # type: ignore[misc]
    return local if split.pieces == 1 else None
