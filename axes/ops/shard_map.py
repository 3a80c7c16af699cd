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
the one-device function, inside those of the sum of all ranks' losses, so that each rank of an axis has
a summand of what is replicated over it. `| same@tp` says that its gradient is whole on every rank of
`tp` instead: on the left that the function makes it so, on the right that the function is given it so.
A block of Megatron's is `"b s d | same@tp, d f@tp, f@tp d -> b s d | same@tp"`. As JAX's `shard_map`.

In `torch.compile` both borders are nodes of the graph, which serves all sizes that divide evenly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch.distributed.tensor import DTensor

from axes.algebra import ambient
from axes.algebra.errors import ExpressionError, ShardingError
from axes.algebra.mesh import Mesh
from axes.ops.region_sizes import Asked, traced_region, traced_results
from axes.ops.regions import Region, check_count, located, mesh_of_names, placed, read, region_of
from axes.runtime import torch_private
from axes.runtime.border import enter_global, leave_global
from axes.runtime.collectives import Claim, disagreement, kept
from axes.runtime.graphs import known, number_of
from axes.runtime.groups import current_world
from axes.runtime.leaves import resolve_at_leaf
from axes.runtime.packing import strides_of
from axes.runtime.reshard import settled
from axes.runtime.sharded import device_mesh_input, strides_like
from axes.runtime.transforms import check_not_wrapped, check_whole

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
        read(fn)
        return functools.partial(_region_of, expression=fn, mesh=mesh, check=check)
    if expression is None or not callable(fn):
        raise ExpressionError(
            "shard_map takes a function and an expression, shard_map(fn, 'b@dp -> b@dp'), or the expression alone as "
            f"a decorator; found {type(fn).__name__} and {type(expression).__name__}"
        )
    return _region_of(fn, expression, mesh, check)


def _region_of(fn: Function, expression: str, mesh: Mesh | None, check: bool) -> Function:
    if not torch.compiler.is_compiling():
        read(expression)

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
    for place, x in enumerate(tensors):
        _check_input(x, place, expression)
    if torch_private.transforms_are_on():
        check_whole(f"shard_map '{expression}'", tensors)
    asked = expression, mesh if mesh is not None else ambient.ambient_mesh(), mesh is not None
    if torch.compiler.is_compiling():
        return _run_in_graph(fn, asked, args, kwargs, tensors, check)
    region = region_of(current_world().era, *asked, tuple([torch_private.spec_of(x) for x in tensors]))
    shards = _left(region, tensors)
    if check:
        _check_gradients(region, shards)
    result = _inside(fn, region.mesh, args, kwargs, shards)
    results = _tensors(result)
    _check_results(results, expression)
    outputs = _entered(region, results)
    if check:
        _check_outputs(region, outputs)
    return _replaced(result, iter(outputs))


def _inside(fn: Function, mesh: Mesh, args: Any, kwargs: Any, shards: Sequence[torch.Tensor]) -> Any:
    """What the function returns for the shards, with `mesh` as the ambient one."""
    args, kwargs = _replaced((args, kwargs), iter(shards))
    ambient.push(mesh)
    try:
        return fn(*args, **kwargs)
    finally:
        ambient.pop()


def _check_input(x: torch.Tensor, place: int, expression: str) -> None:
    if not isinstance(x, DTensor):
        check_not_wrapped(f"shard_map '{expression}'", x)
        raise ShardingError(
            f"tensor {place} among the arguments is a plain one; what goes into a region is a DTensor, made by "
            f"axes.shard or axes.from_local\n  in  shard_map '{expression}'"
        )


def _check_results(results: Sequence[torch.Tensor], expression: str) -> None:
    if any(isinstance(x, DTensor) for x in results):
        raise ShardingError(
            f"the function returned a DTensor; inside a region tensors are plain\n  in  shard_map '{expression}'"
        )
    if torch_private.transforms_are_on():
        check_whole(f"the result of shard_map '{expression}'", results)


def _left(region: Region, tensors: Sequence[DTensor]) -> list[torch.Tensor]:
    """The tensors' shards on this rank; the gradients of leaves are resolved when they have come."""
    for x in tensors:
        if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
            resolve_at_leaf(x)
    return [leave_global(x, each.counted) for x, each in zip(tensors, region.inputs, strict=False)]


def _entered(region: Region, results: Sequence[torch.Tensor]) -> list[DTensor]:
    """What the function has returned, as DTensors."""
    found = placed(region, tuple([tuple(x.shape) for x in results]))
    return [
        enter_global(x, p.device_mesh, p.placements, p.shape, strides_like(x, p.shape), p.counted)
        for x, p in zip(results, found, strict=False)
    ]


# in torch.compile: two nodes of the graph, with the function between them


def _run_in_graph(fn: Function, asked: Asked, args: Any, kwargs: Any, tensors: list[DTensor], check: bool) -> Any:
    """The same, traced. `asked` is what `region_of` is asked, beside the tensors."""
    if check:
        raise ShardingError(f"check=True compares ranks in each call; not in a graph\n  in  shard_map '{asked[0]}'")
    number = number_of(*asked)
    leaves = tuple([x.is_leaf and x.requires_grad for x in tensors])
    shards = _leave_node(number, leaves, *tensors) if tensors else ()
    mesh = getattr(kept, _keep_mesh(number, tuple([x.device_mesh for x in tensors])))
    result = _inside(fn, mesh, args, kwargs, shards)
    results = _tensors(result)
    _check_results(results, asked[0])
    _check_counts(number, len(results))
    home = None if tensors else device_mesh_input(mesh)
    outputs = _enter_node(number, home, len(tensors), *tensors, *results) if results else ()
    return _replaced(result, iter(outputs))


@torch.compiler.allow_in_graph
def _leave_node(number: int, leaves: tuple[bool, ...], *tensors: DTensor) -> tuple[torch.Tensor, ...]:
    """The tensors' shards; what is a leaf outside of the graph is resolved here, where it is none."""
    region = traced_region(known(number), [torch_private.spec_of(x) for x in tensors])
    settling = [settled(x) if leaf else x for x, leaf in zip(tensors, leaves, strict=True)]
    return tuple([leave_global(x, each.counted) for x, each in zip(settling, region.inputs, strict=True)])


@torch.compiler.allow_in_graph
def _enter_node(number: int, _: Any, count: int, *tensors: torch.Tensor) -> tuple[DTensor, ...]:
    """The results as DTensors. The first `count` tensors are those that went in, which say what a result is.

    Where none went in, the mesh must (see `device_mesh_input`).
    """
    specs, results = [torch_private.spec_of(x) for x in tensors[:count]], tensors[count:]
    found = traced_results(known(number), specs, [tuple(x.shape) for x in results])
    return tuple(
        [
            enter_global(x.contiguous(), p.device_mesh, p.placements, p.shape, strides_of(p.shape), p.counted)
            for x, p in zip(results, found, strict=True)
        ]
    )


@torch.compiler.assume_constant_result
def _keep_mesh(number: int, device_meshes: tuple[Any, ...]) -> str:
    expression, mesh, is_given = known(number)
    if not device_meshes:
        # No tensor's node has looked at it yet.
        region_of(current_world().era, expression, mesh, is_given, ())
    return kept.keep(mesh_of_names(mesh, is_given, device_meshes))


@torch.compiler.assume_constant_result
def _check_counts(number: int, results: int) -> None:
    reading = read(known(number)[0])
    try:
        check_count("the function returned", results, reading.outputs, "right")
    except ShardingError as error:
        raise located(error, reading) from None


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


# check=True


def _check_outputs(region: Region, outputs: Sequence[DTensor]) -> None:
    """Compares results over the ranks that are said to have the same; and later their cotangents."""
    labels = [f"result {place}, '{spec}'," for place, spec in enumerate(region.reading.outputs)]
    claims = [claim for label, y in zip(labels, outputs, strict=False) for claim in _claims(label, y, region.home)]
    _compare(region, claims)
    for label, y in zip(labels, outputs, strict=False):
        if y.requires_grad:
            y.register_hook(functools.partial(_check_cotangent, region, f"the gradient of {label}"))


def _check_cotangent(region: Region, label: str, gradient: DTensor) -> None:
    _compare(region, _claims(label, gradient, region.home))


def _check_gradients(region: Region, shards: Sequence[torch.Tensor]) -> None:
    """Compares, in backward, gradients that every rank has the same: of pending tensors, and where it is said."""
    for place, (shard, each) in enumerate(zip(shards, region.inputs, strict=True)):
        pending = tuple(axis for p in each.sharding.pending for axis in p.axes)
        for what, axes in (("pending", pending), ("'same'", each.same)):
            if axes and shard.requires_grad:
                label = f"the gradient of tensor {place}, which is {what},"
                shard.register_hook(functools.partial(_check_gradient, region, label, each.sharding.mesh, axes))


def _check_gradient(region: Region, label: str, mesh: Mesh, axes: Sequence[str], gradient: torch.Tensor) -> None:
    _compare(region, [Claim(label, gradient, mesh, axis) for axis in axes])


def _claims(label: str, x: DTensor, mesh: Mesh) -> list[Claim]:
    axes = [name for name, p in zip(mesh.axis_names, x.placements, strict=True) if p.is_replicate()]
    return [Claim(label, x.to_local().detach(), mesh, axis) for axis in axes if mesh.layout(axis).size > 1]


def _compare(region: Region, claims: Sequence[Claim]) -> None:
    differences = disagreement(claims, region.home)
    if differences:
        found = "\n".join(map(str, differences))
        raise ShardingError(
            f"{found}\nreduce it in the function, like axes.psum(y, {differences[0].axis!r}), or write what it is, "
            f"like '| sum@{differences[0].axis}'\n  in  shard_map '{region.reading.text}'"
        )
