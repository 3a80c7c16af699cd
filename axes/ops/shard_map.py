"""SPMD regions: a function that sees this rank's plain tensors, between DTensors outside.

    @axes.shard_map("b@dp s d, d f@tp -> b@dp s f@tp")
    def column_parallel(x, w):
        return x @ w                                # plain tensors: [b/dp s d], [d f/tp]

    @axes.shard_map("b s@cp d -> b d")
    def total(x):
        return axes.psum(x.sum(1), "cp")            # collectives by name, see axes.ops.collectives

    y = column_parallel(x, w)                       # DTensors in, a DTensor out

Each tensor among the arguments, in order, takes a spec of the left side; each tensor that the
function returns takes one of the right side. Tuples, lists and dicts are looked into, a dict in its
own order, keyword arguments last; what is no tensor passes as it is.

The **left side** asserts how tensors are sharded, and moves nothing. A name that carries an `@`
anywhere in the expression is explicit: where it has none it is unsplit. A name that never does
flows: it comes split as the tensor has it, and leaves with the same split on the right.

The **right side** says what the function has made: the split of each dim, `| sum@tp` where values
are summands of which the sum is meant, and for every axis that isn't mentioned that all its ranks
return the same. Nothing checks that, unless `check=True` compares the ranks.

Names are looked up in `mesh=` where it is given, else in the ambient mesh where that is of the
tensors' universe, else in the mesh that the tensors were made on. Inside, that mesh is the ambient
one. Results lie on the mesh of the tensors.

**Gradients** cross the border by its rule (see `axes.runtime.border`): outside they are those of
the one-device function, inside those of the sum of all ranks' losses. As JAX's `shard_map`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, overload

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from axes.algebra import ambient
from axes.algebra.errors import AxesError, ExpressionError, MeshError, ShardingError, SizeError
from axes.algebra.grammar import Dim, Factor, Spec, parse_tensor
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import Factor as ShardedFactor
from axes.algebra.sharding import ShardedDim, Sharding, parsed_sharding
from axes.ops.global_view import resolve_at_leaf
from axes.runtime import torch_private
from axes.runtime.border import enter_global, gradient_of_local, leave_global
from axes.runtime.collectives import Claim, disagreement, kept
from axes.runtime.groups import current_world
from axes.runtime.placements import contiguous_strides, sharding_of_spec, torch_placements
from axes.runtime.sharded import strides_like

Function = Callable[..., Any]


@overload
def shard_map(fn: Function, expression: str, /, mesh: Mesh | None = None, check: bool = False) -> Function: ...


@overload
def shard_map(
    fn: str, expression: None = None, /, mesh: Mesh | None = None, check: bool = False
) -> Callable[[Function], Function]: ...


def shard_map(
    fn: Function | str, expression: str | None = None, /, mesh: Mesh | None = None, check: bool = False
) -> Any:
    """`fn` on this rank's shards, as a function of DTensors: `shard_map(fn, "b@dp s -> b@dp s")`.

    Also a decorator, `@axes.shard_map("b@dp s -> b@dp s")`. With `check=True` every call compares,
    over the ranks, the outputs and cotangents that claim to be replicated: costly, for debugging.

    A split dim of a result has the global size that its name has on the left, or inline (`f=8@tp`);
    that of a new name is taken to divide evenly. Raises `ExpressionError` for text that doesn't
    parse, as soon as it is given; at the call `ShardingError` for tensors that aren't sharded as the
    left side says and for results that can't be what the right side says, and `MeshError` for names
    that the mesh doesn't have.

    >>> import axes
    >>> with axes.simulate(8), axes.init_mesh("dp=2 tp=4"):
    ...     x, w = axes.ones("b@dp d", b=4, d=6), axes.ones("d f@tp", d=6, f=8)
    ...     y = shard_map(torch.matmul, "b@dp d, d f@tp -> b@dp f@tp")(x, w)
    ...     y.shape, y.to_local().shape, axes.spec_of(y)
    (torch.Size([4, 8]), torch.Size([2, 2]), '_@dp _@tp')
    """
    if isinstance(fn, str) and expression is None:
        _read(fn)
        return functools.partial(_region_of, expression=fn, mesh=mesh, check=check)
    if expression is None or not callable(fn):
        raise ExpressionError(
            "shard_map takes a function and an expression, shard_map(fn, 'b@dp -> b@dp'), or the expression alone as "
            f"a decorator; found {type(fn).__name__} and {type(expression).__name__}"
        )
    return _region_of(fn, expression, mesh, check)


def _region_of(fn: Function, expression: str, mesh: Mesh | None, check: bool) -> Function:
    if not torch.compiler.is_compiling():
        _read(expression)

    def inside(*args: Any, **kwargs: Any) -> Any:
        return run(fn, expression, args, kwargs, mesh, check)

    return functools.update_wrapper(inside, fn, updated=())


def run(
    fn: Function,
    expression: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Mesh | None = None,
    check: bool = False,
) -> Any:
    """`shard_map(fn, expression, mesh, check)(*args, **kwargs)`."""
    tensors = _tensors((args, kwargs))
    held = tuple([_held(x, place, expression) for place, x in enumerate(tensors)])
    names = mesh if mesh is not None else ambient.ambient_mesh()
    region = _opened(expression, names, mesh is not None, held)
    shards = _left(region, tensors)
    if check:
        _check_gradients(region, shards)
    args, kwargs = _replaced((args, kwargs), iter(shards))
    ambient.push(region.mesh)
    try:
        result = fn(*args, **kwargs)
    finally:
        ambient.pop()
    outputs = _entered(region, _tensors(result))
    if check:
        _check_outputs(region, outputs)
    return _replaced(result, iter(outputs))


# trees


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested tuples, lists and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return [x for item in inside for x in _tensors(item)]


def _replaced(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The same tree with its tensors replaced, in order."""
    if isinstance(tree, torch.Tensor):
        return next(tensors)
    if isinstance(tree, dict):
        return {key: _replaced(item, tensors) for key, item in tree.items()}
    if not isinstance(tree, tuple | list):
        return tree
    items = [_replaced(item, tensors) for item in tree]
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


# reading


@dataclass(frozen=True, eq=False)
class _Reading:
    """An expression, and which of its names are explicit: those with an `@` that isn't relative."""

    text: str
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    explicit: frozenset[str | None]


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> _Reading:
    tree = parse_tensor(text)
    if tree.results is None:
        raise ExpressionError("a region says what goes in and what comes out, 'b@dp s -> b@dp s'", text, 0, len(text))
    relative: set[str | None] = set()
    explicit: set[str | None] = set()
    for side, specs in enumerate((tree.operands, tree.results)):
        for dim in (dim for spec in specs for dim in spec.dims):
            if _is_dots(dim) and str(dim) != "...":
                raise ExpressionError("'...' in a region flows; name the dim that is split or grouped", text, *dim.span)
            if _is_relative(dim):
                _check_relative(text, dim, side)
                relative.add(dim.factors[0].name)
            else:
                explicit.update(f.name for f in dim.factors if dim.place is not None or f.place is not None)
    return _Reading(text, tree.operands, tree.results, frozenset(explicit - relative))


def _check_relative(text: str, dim: Dim, side: int) -> None:
    if dim.grouped or dim.factors[0].name in (None, "_", "..."):
        raise ExpressionError("'*' in a region stands for the split that a name has", text, *dim.span)
    if side == 0 and str(dim.factors[0].place) != "*":
        raise ExpressionError("left of '->' in a region '*' stands alone: it is the whole split", text, *dim.span)


def _is_relative(dim: Dim) -> bool:
    """Whether `*`, the split that the dim has, is part of its place."""
    return any(place is not None and "*" in place.names for place in (dim.place, *(f.place for f in dim.factors)))


def _flows(reading: _Reading, dim: Dim) -> bool:
    """Whether the dim is split as its tensor happens to be."""
    bare = dim.place is None and all(factor.place is None for factor in dim.factors)
    return bare and not any(factor.name in reading.explicit for factor in dim.factors)


def _key(dim: Dim) -> str | None:
    """What the dim is called throughout the expression; None for `_` and numbers."""
    if dim.grouped:
        return f"({' '.join(factor.name or str(factor.size) for factor in dim.factors)})"
    return None if dim.factors[0].name == "_" else dim.factors[0].name


def _expanded(spec: Spec, ndim: int, what: str) -> list[Dim]:
    """The dims of the spec for a tensor of `ndim` dims: `...` becomes as many as are missing."""
    dots = sum(map(_is_dots, spec.dims))
    missing = ndim - len(spec.dims) + dots
    if missing < 0 or (missing and not dots):
        raise ShardingError(f"{what} has {ndim} dims, its spec '{spec}' {len(spec.dims) - dots}")
    filling = [Dim((Factor(f"...{i}"),)) for i in range(missing)]
    return [found for dim in spec.dims for found in (filling if _is_dots(dim) else [dim])]


def _is_dots(dim: Dim) -> bool:
    return any(factor.name == "..." for factor in dim.factors)


def _check_count(who: str, count: int, specs: Sequence[Spec], side: str) -> None:
    nothing = count == 0 and specs == (Spec(()),)
    if count != len(specs) and not nothing:
        raise ShardingError(f"{who} {count} tensors, and the {side} side has {len(specs)} specs; one for each")


def _located(error: AxesError, reading: _Reading) -> AxesError:
    """The same error with the expression that it is about."""
    return type(error)(f"{error}\n  in  shard_map '{reading.text}'")


# going in

Held = Any
"""What is known of a DTensor: torch's spec of it; in a graph, where that can't be, mesh, placements and shape."""


def _shape(x: torch.Tensor) -> tuple[int, ...]:
    """The shape in numbers: a compiled graph is for this shape, also with dynamic ones."""
    return tuple([operator.index(size) for size in x.shape])


def _left(region: _Region, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors' shards on this rank; the gradients of leaves are resolved when they have come."""
    if not torch.compiler.is_compiling():
        for x in tensors:
            if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
                resolve_at_leaf(x)
        return [leave_global(x) for x in tensors]
    return [_traced_leave(x, border) for x, border in zip(tensors, region.borders, strict=True)]


@dataclass(frozen=True, eq=False)
class _Region:
    """What is known once the tensors are: the mesh of the names, and what results take over.

    Results lie on `home`, the mesh of the tensors. `splits` has, for each dim by name, how its
    tensor splits it, on that tensor's own mesh; `sizes` its global size. `pending` has, for each
    tensor, the axes of its own mesh over which it is pending; `borders` what becomes of gradients.
    """

    reading: _Reading
    mesh: Mesh
    home: Mesh
    device_mesh: Any
    splits: Mapping[str, tuple[ShardedDim, Mesh]]
    sizes: Mapping[str, int]
    pending: tuple[tuple[Mesh, tuple[str, ...]], ...]
    borders: tuple[_Border, ...]


@dataclass(frozen=True)
class _Operand:
    """A tensor that goes in: its spec, dim by dim, and how it is sharded."""

    spec: Spec
    dims: list[Dim]
    sharding: Sharding
    shape: tuple[int, ...]
    device_mesh: Any
    placements: tuple[Placement, ...]


def _operand(place: int, spec: Spec, held: Held) -> _Operand:
    if isinstance(held, tuple):
        device_mesh, placements, shape = held
        sharding = Sharding.from_placements(Mesh.from_device_mesh(device_mesh), placements, len(shape))
    else:
        device_mesh, placements, shape, sharding = held.mesh, held.placements, tuple(held.shape), sharding_of_spec(held)
    return _Operand(spec, _expanded(spec, len(shape), f"tensor {place}"), sharding, shape, device_mesh, placements)


def _held(x: torch.Tensor, place: int, expression: str) -> Held:
    if not isinstance(x, DTensor):
        raise ShardingError(
            f"tensor {place} among the arguments is a plain one; what goes into a region is a DTensor, made by "
            f"axes.shard or axes.from_local\n  in  shard_map '{expression}'"
        )
    return (x.device_mesh, x.placements, _shape(x)) if torch.compiler.is_compiling() else torch_private.spec_of(x)


def _opened(expression: str, mesh: Mesh | None, is_given: bool, held: tuple[Held, ...]) -> _Region:
    if torch.compiler.is_compiling():
        return getattr(kept, _keep_region(expression, mesh, is_given, held))
    return _region(current_world().era, expression, mesh, is_given, held)


@torch.compiler.assume_constant_result
def _keep_region(expression: str, mesh: Mesh | None, is_given: bool, held: tuple[Held, ...]) -> str:
    return kept.keep(_region(current_world().era, expression, mesh, is_given, held))


@functools.lru_cache(maxsize=1024)
def _region(era: object, expression: str, mesh: Mesh | None, is_given: bool, held: tuple[Held, ...]) -> _Region:
    """The region; `era` is that of the world of the tensors."""
    reading = _read(expression)
    try:
        _check_count("the function is called with", len(held), reading.inputs, "left")
        return _made_region(reading, mesh, is_given, held)
    except (ShardingError, SizeError, MeshError) as error:
        raise _located(error, reading) from None


def _made_region(reading: _Reading, mesh: Mesh | None, is_given: bool, held: tuple[Held, ...]) -> _Region:
    operands = [
        _operand(place, spec, each) for place, (spec, each) in enumerate(zip(reading.inputs, held, strict=False))
    ]
    home = _home([operand.sharding.mesh for operand in operands])
    names = _mesh_of_names(mesh, is_given, home)
    _check_names(reading, names)
    home = names if home is None else home
    if home.coordinate is None:
        raise MeshError(f"rank {home.rank} isn't one of the ranks of {home!r}; only they run a region on it")
    sizes = _sizes(reading, operands)
    splits: dict[str, tuple[ShardedDim, Mesh]] = {}
    for place, operand in enumerate(operands):
        if not _is_as_written(reading, names, operand, sizes):
            _mismatch(place, operand)
        _take_over(splits, reading, operand)
    pending = [(o.sharding.mesh, tuple(axis for p in o.sharding.pending for axis in p.axes)) for o in operands]
    device_meshes = [operand.device_mesh for operand in operands if operand.sharding.mesh == home]
    borders = tuple(_border(operand.device_mesh, operand.placements) for operand in operands)
    region = _Region(
        reading, names, home, (device_meshes or [home.device_mesh])[0], splits, sizes, tuple(pending), borders
    )
    for spec in reading.outputs:
        # What can't be is an error before the function runs and sends anything.
        _sharding(region, spec, [dim for dim in spec.dims if not _is_dots(dim)])
    return region


def _home(meshes: Sequence[Mesh]) -> Mesh | None:
    """The largest of the tensors' meshes, if it has the axes of all; None without tensors."""
    if not meshes:
        return None
    largest = max(meshes, key=lambda mesh: mesh.size)
    for mesh in meshes:
        if mesh.universe != largest.universe or not largest.layout_of_all.contains(mesh.layout_of_all):
            raise MeshError(
                f"the tensors lie on meshes of which none has all axes: {mesh!r} and {largest!r}; axes.lift brings "
                "one onto a larger mesh"
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


def _check_names(reading: _Reading, names: Mesh) -> None:
    for dim in (dim for spec in (*reading.inputs, *reading.outputs) for dim in spec.dims):
        for place in (dim.place, *(factor.place for factor in dim.factors)):
            for axis in place.names if place is not None else ():
                if axis != "*":
                    names.layout(axis)


def _sizes(reading: _Reading, operands: Sequence[_Operand]) -> dict[str, int]:
    """The global size of every name that is a dim of a tensor, or whose size is written."""
    specs = (*reading.inputs, *reading.outputs)
    seen = [(f.name, f.size) for spec in specs for dim in spec.dims for f in dim.factors if f.size is not None]
    for operand in operands:
        for dim, extent in zip(operand.dims, operand.shape, strict=True):
            seen.append((_key(dim), extent))
            if not dim.grouped and dim.factors[0].name is None and dim.factors[0].size != extent:
                raise SizeError(f"a dim of {list(operand.shape)} is written as {dim}, and has {extent} elements")
    found: dict[str, int] = {}
    for name, size in seen:
        if name is not None and size is not None and found.setdefault(name, size) != size:
            raise SizeError(f"'{name}' has two sizes, {found[name]} and {size}")
    return found


def _is_as_written(reading: _Reading, names: Mesh, operand: _Operand, sizes: Mapping[str, int]) -> bool:
    """Whether explicit dims are split as the spec says, and what is pending is what it says."""
    actual, spec = operand.sharding, operand.spec
    for dim, split, extent in zip(operand.dims, actual.dims, operand.shape, strict=True):
        if not _flows(reading, dim) and not _is_relative(dim):
            written = Sharding(names, (_explicit(names, dim, sizes),))
            if not written.is_equivalent(Sharding(actual.mesh, (split,)), (extent,)):
                return False
    if any(pending.op == "*" for pending in spec.pending or ()):
        return True
    return _pending(names, spec).is_equivalent(Sharding(actual.mesh, (), actual.pending))


def _explicit(names: Mesh, dim: Dim, sizes: Mapping[str, int]) -> ShardedDim:
    """A dim as it is written, with the sizes of its factors where they are known."""
    known = {f.name: sizes[f.name] for f in dim.factors if f.name is not None and f.name in sizes}
    return parsed_sharding(names, str(dim), tuple(sorted(known.items()))).dims[0]


def _pending(names: Mesh, spec: Spec) -> Sharding:
    """What a spec says is pending, as the sharding of a scalar."""
    return parsed_sharding(names, f"| {' '.join(map(str, spec.pending or ()))}")


def _mismatch(place: int, operand: _Operand) -> NoReturn:
    spec, actual = operand.spec, operand.sharding
    target = spec if spec.pending is not None else f"{spec} |"
    shown = actual.named([_key(dim) or "_" for dim in operand.dims])
    raise ShardingError(
        f"tensor {place} isn't sharded as the left side says\n"
        f"  left side  {spec}\n"
        f"  tensor     {shown}    {list(operand.shape)}, {actual.mesh!r}\n"
        f"write how it is sharded, or move it first: axes.reshard(x, '{target}')"
    )


def _take_over(splits: dict[str, tuple[ShardedDim, Mesh]], reading: _Reading, operand: _Operand) -> None:
    """Remembers how each dim is split, for results with that dim. Where it flows the tensors agree."""
    mesh = operand.sharding.mesh
    for dim, split, extent in zip(operand.dims, operand.sharding.dims, operand.shape, strict=True):
        key = _key(dim)
        if key is None:
            continue
        other, its_mesh = splits.setdefault(key, (split, mesh))
        agree = Sharding(mesh, (split,)).is_equivalent(Sharding(its_mesh, (other,)), (extent,))
        if not agree and (_flows(reading, dim) or _is_relative(dim)):
            raise ShardingError(
                f"the tensors disagree on how '{key}' is split, {other} and {split}; reshard one of them"
            )


# coming out


@dataclass(frozen=True)
class _Placed:
    """What a result is outside: how it lies, its global shape, and by what its gradient is divided.

    `strides` are those of a contiguous one.
    """

    device_mesh: Any
    placements: tuple[Placement, ...]
    shape: torch.Size
    strides: tuple[int, ...]
    share: int


def _entered(region: _Region, results: list[torch.Tensor]) -> list[torch.Tensor]:
    if any(isinstance(x, DTensor) for x in results):
        error = ShardingError("the function returned a DTensor; inside a region tensors are plain")
        raise _located(error, region.reading)
    shapes = tuple([_shape(x) for x in results])
    if torch.compiler.is_compiling():
        placed = getattr(kept, _keep_placed(region, shapes))
        return [_traced_enter(x, p) for x, p in zip(results, placed, strict=True)]
    return [_enter(x, p) for x, p in zip(results, _placed(region, shapes), strict=True)]


def _enter(x: torch.Tensor, placed: _Placed) -> DTensor:
    return enter_global(x, placed.device_mesh, placed.placements, placed.shape, strides_like(x, placed.shape))


@torch.compiler.assume_constant_result
def _keep_placed(region: _Region, shapes: tuple[tuple[int, ...], ...]) -> str:
    return kept.keep(_placed(region, shapes))


@functools.lru_cache(maxsize=1024)
def _placed(region: _Region, shapes: tuple[tuple[int, ...], ...]) -> tuple[_Placed, ...]:
    reading, found = region.reading, []
    try:
        _check_count("the function returned", len(shapes), reading.outputs, "right")
        for place, shape in enumerate(shapes):
            sharding, whole = _result(region, place, shape)
            placements = torch_placements(sharding)
            copies = math.prod(n for n, p in zip(region.device_mesh.shape, placements, strict=True) if p.is_replicate())
            share = copies * _mean_size(region.device_mesh, placements)
            found.append(_Placed(region.device_mesh, placements, torch.Size(whole), contiguous_strides(whole), share))
    except (ShardingError, SizeError, MeshError) as error:
        raise _located(error, reading) from None
    return tuple(found)


def _result(region: _Region, place: int, local: tuple[int, ...]) -> tuple[Sharding, tuple[int, ...]]:
    """The sharding and the global shape of a result that is `local` on this rank."""
    spec = region.reading.outputs[place]
    dims = _expanded(spec, len(local), f"result {place}")
    sharding = _sharding(region, spec, dims)
    whole = tuple(_whole(region, *each) for each in zip(dims, sharding.dims, local, strict=True))
    expected = sharding.local_shape(whole)
    if expected != local:
        raise ShardingError(
            f"result {place}, '{spec}', is {list(whole)} in whole and so {list(expected)} on this rank; the function "
            f"returned {list(local)}"
        )
    sharding = sharding.sized(whole)
    check_torch_can(sharding, whole)
    return sharding, whole


def _sharding(region: _Region, spec: Spec, dims: Sequence[Dim]) -> Sharding:
    """How a result of these dims lies, on the mesh of the tensors."""
    if any(pending.op == "*" for pending in spec.pending or ()):
        raise ShardingError(
            "'| *' on the right: only the function knows what it leaves pending; write it, like '| sum@tp'"
        )
    pending = _pending(region.mesh, spec).pending
    pending = tuple(replace(p, axes=_named_in(region.home, region.mesh, p.axes)) for p in pending)
    return Sharding(region.home, tuple(_split(region, dim) for dim in dims), pending)


def _split(region: _Region, dim: Dim) -> ShardedDim:
    """How a dim of a result is split, in the names of the mesh that it lies on."""
    key = _key(dim)
    if _flows(region.reading, dim):
        if key is not None and key in region.splits:
            split, mesh = region.splits[key]
            return _moved(split, mesh, region.home)
        _check_new(region, dim)
        return ShardedDim((ShardedFactor(key if key else "_"),))
    if not _is_relative(dim):
        return _moved(_explicit(region.mesh, dim, region.sizes), region.mesh, region.home)
    if key is None or key not in region.splits:
        raise ShardingError(f"'*' in {dim} is how '{key}' is split on the left, where it isn't")
    split, mesh = region.splits[key]
    if len(split.factors) > 1:
        raise ShardingError(f"'*' in {dim} would be {split}, which is split inside; write it out")
    has = _named_in(region.home, mesh, split.axes)
    place = dim.factors[0].place
    axes = [
        axis
        for name in (place.names if place else ())
        for axis in (has if name == "*" else _named_in(region.home, region.mesh, (name,)))
    ]
    return ShardedDim((ShardedFactor(key, None, tuple(axes)),))


def _check_new(region: _Region, dim: Dim) -> None:
    """A new name is unsplit; refuses one that only seems new, since a split tensor has it in a group or out of one."""
    names = {factor.name for factor in dim.factors}
    for key, (split, _) in region.splits.items():
        if split.axes and names & set(key.strip("()").split()):
            raise ShardingError(
                f"{dim} on the right was part of '{key}' on the left, which is {split}; write how it is split now"
            )


def _whole(region: _Region, dim: Dim, split: ShardedDim, local: int) -> int:
    """The global size of a dim of a result: that of its name, else even shards."""
    key = _key(dim)
    if key is not None and key in region.sizes:
        return region.sizes[key]
    sizes = [factor.size if factor.name is None else region.sizes.get(factor.name) for factor in dim.factors]
    if None not in sizes and key is not None:
        return math.prod(size for size in sizes if size is not None)
    return local * math.prod(region.home.layout(axis).size for axis in split.axes)


def _moved(dim: ShardedDim, source: Mesh, target: Mesh) -> ShardedDim:
    """The same split in the names of another mesh."""
    factors = (replace(factor, axes=_named_in(target, source, factor.axes)) for factor in dim.factors)
    return dim if source is target else ShardedDim(tuple(factors))


def _named_in(target: Mesh, source: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Axes of `source` as those of `target`; `ShardingError` where it doesn't have them."""
    found: list[str] = []
    for axis in axes:
        layout = source.layout(axis)
        if target.namespace.get(axis) == layout:
            found.append(axis)
            continue
        names = target.factored(layout)
        if names is None:
            raise ShardingError(f"axis '{axis}' isn't made of the axes of {target!r}, on which the tensors lie")
        found.extend(names)
    return tuple(found)


# the border in torch.compile: its rule in what dynamo can trace


@dataclass(frozen=True)
class _Border:
    """What the gradients of a tensor's shards are as one value, and what they are multiplied by."""

    placements: tuple[Placement, ...]
    times: int
    is_linear: bool


def _border(device_mesh: Any, placements: tuple[Placement, ...]) -> _Border:
    extreme = any(p.is_partial() and p.reduce_op in ("max", "min") for p in placements)
    return _Border(gradient_of_local(placements), _mean_size(device_mesh, placements), not extreme)


def _mean_size(device_mesh: Any, placements: Sequence[Placement]) -> int:
    """The number of ranks over which a mean is pending."""
    means = [p.is_partial() and p.reduce_op == "avg" for p in placements]
    return math.prod(size for size, is_mean in zip(device_mesh.shape, means, strict=True) if is_mean)


def _traced_leave(x: DTensor, border: _Border) -> torch.Tensor:
    if x.requires_grad and not border.is_linear:
        raise ShardingError("a pending max or min has no gradient across the border; resolve it first")
    local = x.to_local(grad_placements=border.placements)
    return local if border.times == 1 else scaled_gradient(local, border.times, 1)


def _traced_enter(x: torch.Tensor, placed: _Placed) -> DTensor:
    local = x if placed.share == 1 else scaled_gradient(x, 1, placed.share)
    return DTensor.from_local(
        local.contiguous(),
        placed.device_mesh,
        placed.placements,
        run_check=False,
        shape=placed.shape,
        stride=placed.strides,
    )


def scaled_gradient(x: torch.Tensor, times: int, over: int) -> torch.Tensor:
    """`x`, whose gradient is multiplied by `times` and divided by `over`."""
    return _Scaled.apply(x, times, over)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: int, over: int) -> torch.Tensor:
        ctx.times, ctx.over = times, over
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient * ctx.times / ctx.over, None, None


# check=True


def _check_outputs(region: _Region, outputs: Sequence[DTensor]) -> None:
    """Compares results over the ranks that are said to have the same; and later their cotangents."""
    labels = [f"result {place}, '{spec}'," for place, spec in enumerate(region.reading.outputs)]
    claims = [claim for label, y in zip(labels, outputs, strict=False) for claim in _claims(label, y, region.home)]
    _compare(region, claims)
    for label, y in zip(labels, outputs, strict=False):
        if y.requires_grad:
            y.register_hook(functools.partial(_check_cotangent, region, f"the gradient of {label}"))


def _check_cotangent(region: _Region, label: str, gradient: DTensor) -> None:
    _compare(region, _claims(label, gradient, region.home))


def _check_gradients(region: _Region, shards: Sequence[torch.Tensor]) -> None:
    """Compares, in backward, the gradients of pending tensors: every rank's summand has the same."""
    for place, (shard, (mesh, axes)) in enumerate(zip(shards, region.pending, strict=True)):
        if axes and shard.requires_grad:
            label = f"the gradient of tensor {place}, which is pending"
            shard.register_hook(functools.partial(_check_gradient, region, label, mesh, axes))


def _check_gradient(region: _Region, label: str, mesh: Mesh, axes: Sequence[str], gradient: torch.Tensor) -> None:
    _compare(region, [Claim(label, gradient, mesh, axis) for axis in axes])


def _claims(label: str, x: DTensor, mesh: Mesh) -> list[Claim]:
    axes = [name for name, p in zip(mesh.axis_names, x.placements, strict=True) if p.is_replicate()]
    return [Claim(label, x.to_local().detach(), mesh, axis) for axis in axes if mesh.layout(axis).size > 1]


def _compare(region: _Region, claims: Sequence[Claim]) -> None:
    differences = disagreement(claims, region.home)
    if differences:
        found = "\n".join(map(str, differences))
        raise ShardingError(
            f"{found}\nreduce it in the function, like axes.psum(y, {differences[0].axis!r}), or write what it is, "
            f"like '| sum@{differences[0].axis}'\n  in  shard_map '{region.reading.text}'"
        )
