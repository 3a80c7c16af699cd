"""SPMD regions: a function that sees this rank's plain tensors, between DTensors outside.

    @axes.shard_map("b@dp s d, d f@tp -> b@dp s f@tp")
    def column_parallel(x, w):
        return x @ w                                # plain tensors: [b/dp s d], [d f/tp]

    @axes.shard_map("b s@cp d -> b d")
    def total(x):
        return axes.psum(x.sum(1), "cp")            # collectives by name, see axes.ops.collectives

    y = column_parallel(x, w)                       # DTensors in, a DTensor out

Each tensor among the arguments, in order, takes a spec of the left side; each tensor that the
function returns takes one of the right side. Trees are looked into as torch's pytree knows them:
tuples, lists and dicts in their own order, and what is registered, like a dataclass by
`torch.export.register_dataclass`; keyword arguments come last. What else holds tensors, like a set, is
an error. Other arguments pass as they are; results are tensors, numbers, text, None, or one of these arguments,
like a cache of keys and values that a model is given and gives back.

The **left side** says how the tensors have to be sharded. Other tensors are an error: nothing is moved. A name that
carries an `@` anywhere in the expression is explicit: where it has none it is unsplit. A name that never does
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

A plain tensor that needs a gradient and isn't an argument would get this rank's summand of it alone: one
that the function closes over, like a parameter of a module or the result of another region. That is an error,
which says how to pass it; `axes.to_local` inside says itself what its gradient is. What the function makes with
`requires_grad=True` looks the same, so it is detached before it is returned.

**Memory.** Shards are the tensors' own memory. A function that writes to one writes to its DTensor, and
autograd knows it; where the shard needs a gradient, torch refuses. A DTensor that is changed in place
before the backward pass, argument or result, is refused there where the function needs its old value. A
result shares no memory with an argument, with another result, or with a parameter or buffer of the module: where it
would, it is copied.

In `torch.compile` both borders are nodes of the graph, which serves all sizes that divide. There a new name on the
right that is split has its size in the text.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ExpressionError, MeshError, ShardingError, SizeError, shown
from axes.algebra.grammar import checked_text
from axes.algebra.mesh import Mesh, ambient_mesh, checked_mesh, pop_mesh, push_mesh, required_mesh
from axes.ops.arguments import (
    Tree,
    are_plain,
    check_result,
    named_specs,
    taken_apart,
)
from axes.ops.module_regions import ModuleFunction, RegionCall, region_of_module
from axes.ops.region_checks import Function, check_gradients, check_outputs
from axes.ops.regions import (
    Asked,
    Placed,
    Region,
    about,
    check_count,
    located,
    mesh_of_names,
    placed,
    read_region,
    region_of,
    result_parts,
    results_of,
    traced_region,
)
from axes.runtime import torch_private, watching
from axes.runtime.border import (
    Changes,
    check_closed,
    counted_whole,
    enter_global,
    leave_global,
    on_shards,
    traced,
    used,
)
from axes.runtime.graphs import device_mesh_input, kept
from axes.runtime.groups import of_world
from axes.runtime.linear import NODE
from axes.runtime.operation import check_dense, check_transforms, is_dense
from axes.runtime.sharded import placements_of, read_shard, told_shapes, traced_parts
from axes.runtime.watching import within

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=torch.nn.Module)
Names = Mapping[str, str] | None
"""Results that are asked for by name, with their specs."""


class Decorator(Protocol):
    """What `shard_map(expression)` is: plain tensors of a function's result become DTensors."""

    @overload
    def __call__(self, fn: Callable[P, torch.Tensor], /) -> Callable[P, DTensor]: ...

    @overload
    def __call__(self, fn: Callable[P, tuple[torch.Tensor, ...]], /) -> Callable[P, tuple[DTensor, ...]]: ...

    @overload
    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def shard_map(
    fn: M, expression: str, /, mesh: Mesh | None = None, check: bool = False, results: Names = None, **specs: str
) -> M: ...


@overload
def shard_map(  # type: ignore[overload-cannot-match]  # torch's modules are Any to mypy here
    fn: Callable[P, torch.Tensor],
    expression: str,
    /,
    mesh: Mesh | None = None,
    check: bool = False,
    results: Names = None,
    **specs: str,
) -> Callable[P, DTensor]: ...


@overload
def shard_map(  # type: ignore[overload-cannot-match]  # torch's modules are Any to mypy here
    fn: Callable[P, tuple[torch.Tensor, ...]],
    expression: str,
    /,
    mesh: Mesh | None = None,
    check: bool = False,
    results: Names = None,
    **specs: str,
) -> Callable[P, tuple[DTensor, ...]]: ...


@overload
def shard_map(  # type: ignore[overload-cannot-match]  # torch's modules are Any to mypy here
    fn: Callable[P, R],
    expression: str,
    /,
    mesh: Mesh | None = None,
    check: bool = False,
    results: Names = None,
    **specs: str,
) -> Callable[P, R]: ...


@overload
def shard_map(
    fn: str,
    expression: None = None,
    /,
    mesh: Mesh | None = None,
    check: bool = False,
    results: Names = None,
    **specs: str,
) -> Decorator: ...


def shard_map(
    fn: Function | str,
    expression: str | None = None,
    /,
    mesh: Mesh | None = None,
    check: bool = False,
    results: Names = None,
    **specs: str,
) -> Any:
    """Make a function of plain shards into a function of DTensors, or the `forward` of a module into a region.

    The function gets this rank's shards as plain tensors, and calls collectives by axis name. Also a decorator:
    `@axes.shard_map("b@dp s -> b@dp s")`. Like JAX's `jax.shard_map`.

    Of a module it changes `forward` in place. Parameters that are DTensors enter as this rank's shards. Arguments
    may be DTensors, or plain tensors, which are taken for shards; then results are plain shards too.

    Args:
        fn: A function of tensors, or a module. In the form of a decorator, the expression.
        expression: The shardings of the arguments and of the results: `"b@dp d, d f@tp -> b@dp f@tp"`.
        mesh: The mesh whose axes the expression names, by default the ambient mesh.
        check: Compare outputs and gradients that are declared to be replicated between the ranks at every call, bit
            by bit. This is costly, for debugging.
        results: Specs of results by name, as `{"logits": "b@dp s v@tp"}`, for functions that return a dict, a named
            tuple or a dataclass. Then nothing stands right of the arrow.
        **specs: Specs of arguments that may be absent, by the name of the parameter, as `attention_mask="b@dp s"`.

    Returns:
        The function, or the module itself.

    Raises:
        ExpressionError: The text isn't an expression; raised when the region is made.
        ShardingError: At a call: a tensor isn't sharded as the left side says, or a result isn't what the right side
            says.
        SizeError: Results of the ranks aren't shards of one tensor; raised on all ranks.
        MeshError: The mesh lacks an axis.

    A split dim of a result has the whole size that its name has on the left, or the size that is written (`f=8@tp`).
    For a new name without a size the ranks exchange their sizes in one small all-gather at each call, and the host
    waits for it.

    Examples:
        >>> import axes
        >>> with axes.simulate(8), axes.init_mesh("dp=2 tp=4"):
        ...     x, w = axes.ones("b@dp d", b=4, d=6), axes.ones("d f@tp", d=6, f=8)
        ...     y = shard_map(torch.matmul, "b@dp d, d f@tp -> b@dp f@tp")(x, w)
        ...     y.shape, y.to_local().shape, axes.spec_of(y)
        (torch.Size([4, 8]), torch.Size([2, 2]), '_@dp _@tp')
    """
    if not isinstance(check, bool):
        raise ShardingError(f"check is True or False; found {shown(check)}")
    if isinstance(fn, str) and expression is None:
        read_region(fn)
        return lambda function: shard_map(function, fn, mesh, check, results, **specs)
    if expression is None or not callable(fn):
        raise ExpressionError(
            "shard_map takes a function and an expression, shard_map(fn, 'b@dp -> b@dp'), or the expression alone as "
            f"a decorator; found {type(fn).__name__} and {type(expression).__name__}"
        )
    traced_now, module = torch.compiler.is_compiling(), fn if isinstance(fn, torch.nn.Module) else None
    if not traced_now:
        read_region(checked_text(expression))
    named = named_specs(fn if module is None else module.forward, expression, specs, results)
    call = RegionCall(expression, mesh, check, named)
    if module is not None:
        return region_of_module(module, call, run_region)

    def inside(*args: Any, **kwargs: Any) -> Any:
        return run_region(fn, call, args, kwargs)

    # In a graph nobody sees its name; and dynamo can't follow that of a builtin (2.11).
    return inside if traced_now else functools.update_wrapper(inside, fn, updated=())


def run_region(fn: Function, call: RegionCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """`fn(*args, **kwargs)` in a region.

    Plain tensors that a module is called with are shards, which are what the left side declares; so are the results.
    Outside, every rank does the same with what is replicated: gradients are whole there.
    """
    if torch.compiler.is_compiling():
        return _run_in_graph(fn, call, args, kwargs)
    try:
        if watching.listeners:
            return within("shard_map", call.expression, _run_region, fn, call, args, kwargs)
        return _run_region(fn, call, args, kwargs)
    except (ShardingError, SizeError, MeshError) as error:
        raise located(error, call.expression) from None


def _run_region(fn: Function, call: RegionCall, args: Any, kwargs: Mapping[str, Any]) -> Any:
    asked, tree, passed = _asked(call, args, kwargs)
    of_module, tensors = fn if isinstance(fn, ModuleFunction) else None, tree.tensors
    plain = of_module is not None and are_plain(tensors)
    if plain:
        asked, tensors = _declared(asked, tensors)
    _check_inputs(asked[0], tensors)
    held = tuple(map(torch_private.spec_of, tensors))
    region = region_of(*asked, held, plain)
    changes = Changes() if torch.is_grad_enabled() else None
    if of_module is not None:
        of_module.mesh, of_module.tensor_mesh = region.mesh, region.tensor_mesh
    inside = functools.partial(_inside, fn, region.mesh, tree)
    shards, result = on_shards(inside, list(map(used, tensors)), map(_COUNTED, region.inputs), changes)
    if call.check:
        check_gradients(region, shards)
    found = _results(result, passed)
    if call.named.results is not None:
        region = region_of(call.named.of_results(asked[0], result), *asked[1:], held, plain)
    pairs, others, module = list(zip(tensors, shards, strict=True)), shards, None
    if of_module is not None:
        pairs, others, module = pairs + of_module.shards, shards + of_module.tensors(), of_module.module
    if check_closed(found.tensors, module) and changes is not None:
        changes.watch(pairs)
    outputs = _entered(region, _unshared(found.tensors, others), changes)
    if call.check:
        check_outputs(region, outputs)
    return found.holding([_undeclared(y) for y in outputs] if plain else outputs)


def _asked(call: RegionCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Asked, Tree, list[object]]:
    """What a call asks for, its arguments as a tree, and those that hold no tensors."""
    if call.mesh is not None and type(call.mesh) is not Mesh:
        checked_mesh(call.mesh)
    passed: list[object] = []
    tree, text = taken_apart((args, kwargs), passed.append), call.expression
    if call.named.arguments or call.named.results is not None:
        text = call.named.of_call(text, args, kwargs)
    return (text, ambient_mesh() if call.mesh is None else call.mesh, call.mesh is not None), tree, passed


def _check_inputs(expression: str, tensors: Sequence[Any]) -> None:
    if torch_private.transforms_are_on():
        check_transforms(f"shard_map '{expression}'")
    for place, x in enumerate(tensors):
        if not isinstance(x, DTensor):
            raise ShardingError(
                f"tensor {place} among the arguments is a plain one; what goes into a region is a DTensor, made by "
                "axes.shard or axes.from_local. Inside a region tensors are shards already: there, call the function "
                "itself"
            )


def _unshared(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results, copied where their memory is that of one of the others, or of another result."""
    taken = set(map(torch_private.memory_of, others))
    found = []
    for x in results:
        memory = torch_private.memory_of(x)
        found.append(x.clone() if memory in taken else x)
        taken.add(memory)
    return found


def _declared(asked: Asked, shards: Sequence[torch.Tensor]) -> tuple[Asked, list[DTensor]]:
    """Plain shards as the DTensors that the left side declares, whose gradients every rank has whole."""
    text, mesh, _ = asked
    mesh = required_mesh(mesh, f"shard_map of a module, '{text}', on plain tensors")
    for place, x in enumerate(shards):
        check_dense(x, f"shard_map '{text}', as tensor {place},")
    declared = _declarations(text, mesh, tuple([tuple(x.shape) for x in shards]))
    return (text, mesh, True), [enter_global(x, *each) for x, each in zip(shards, declared, strict=True)]


@of_world(1024)
def _declarations(text: str, mesh: Mesh, shapes: tuple[tuple[int, ...], ...]) -> list[Placed]:
    """What plain shards of these shapes are as DTensors. Ranks don't ask each other: they are taken to be even."""
    specs, found = read_region(text).inputs, []
    check_count("the function is called with", len(shapes), specs, "left")
    for spec, shape in zip(specs, shapes, strict=True):
        part = read_shard(mesh, str(spec), shape, ())
        placements = placements_of(part, part.even)
        found.append((mesh.device_mesh, placements, part.even, counted_whole(placements)))
    return found


def _undeclared(y: DTensor) -> torch.Tensor:
    """This rank's shard of a result; where it has a gradient, a copy and no view.

    Of a view `fully_shard` couldn't see an in-place change, and torch's zero-bubble schedules detach what a pipeline
    stage gives in place.
    """
    shard = leave_global(y, counted_whole(y.placements))
    return shard.clone() if shard.requires_grad else shard


def _inside(fn: Function, mesh: Mesh, tree: Tree, shards: Sequence[torch.Tensor]) -> Any:
    """What the function returns for the shards, with `mesh` as the ambient one."""
    args, kwargs = tree.holding(shards)
    push_mesh(mesh)
    try:
        return fn(*args, **kwargs)
    finally:
        pop_mesh()


def _results(result: Any, passed: Sequence[object]) -> Tree:
    """What the function has returned. `passed`: the arguments that hold no tensors."""
    found = taken_apart(result, functools.partial(check_result, passed), "the function returned a value that")
    for place, x in enumerate(found.tensors):
        if isinstance(x, DTensor):
            raise ShardingError("the function returned a DTensor; inside a region tensors are plain")
        if not is_dense(x):
            check_dense(x, f"as result {place} a region")
    return found


def _entered(region: Region, results: Sequence[torch.Tensor], changes: Changes | None) -> list[DTensor]:
    """What the function has returned, as DTensors. Ranks tell each other the sizes that follow from nothing."""
    parts, found = results_of(region, tuple(map(_SHAPE, results)))
    if found is None:
        told = told_shapes(_RESULTS.format(region.reading.text), region.tensor_mesh, parts, results)
        wholes = list(zip(parts, told, strict=True))
        found = [placed(region, part, placements_of(part, whole), whole) for part, whole in wholes]
    return [enter_global(x, *each, changes) for x, each in zip(results, found, strict=False)]


_SHAPE, _COUNTED = operator.attrgetter("shape"), operator.attrgetter("counted")
_RESULTS = "the results of shard_map '{}'"


# in torch.compile: two nodes of the graph, with the function between them


def _run_in_graph(fn: Function, call: RegionCall, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The same, traced."""
    if call.check:
        raise ShardingError("check=True compares ranks in each call of a region; not in a graph")
    asked, tree, passed = _asked(call, args, kwargs)
    tensors: Sequence[Any] = tree.tensors
    _check_inputs(asked[0], tensors)
    shards = traced(_left_in_graph, asked, tensors) if tensors else ()
    mesh = getattr(kept, _keep_mesh(*asked[1:], tuple([x.device_mesh for x in tensors])))
    result = _inside(fn, mesh, tree, shards)
    found = _results(result, passed)
    if call.named.results is not None:
        asked = call.named.of_results(asked[0], result), *asked[1:]
    if not found.tensors and not asked[0].partition("->")[2].strip():
        return result
    given, device_mesh = (*tensors, *shards, *found.tensors), device_mesh_input(mesh, *tensors)
    return found.holding(traced(_entered_in_graph, asked, given, device_mesh, (len(tensors),), False))


def _left_in_graph(text: str, mesh: Mesh | None, given: bool, _: Any, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The tensors' shards."""
    with about(text):
        region, _ = traced_region((text, mesh, given), list(map(torch_private.spec_of, tensors)))
    return tuple([leave_global(x, each.counted) for x, each in zip(tensors, region.inputs, strict=True)])


def _entered_in_graph(
    text: str, mesh: Mesh | None, given: bool, numbers: Sequence[int], tensors: Sequence[Any]
) -> tuple[DTensor, ...]:
    """The results as DTensors. The first tensors are those that went in, which say what a result is; behind them are
    their shards.
    """
    (count,) = numbers
    went, shards, results = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
    # Where the function broke its graph, this is the rest of it: what it was given has come in as a leaf.
    nodes: list[Any] = [x.grad_fn for x in shards if x.requires_grad]
    with about(text):
        if all(type(node) is NODE and node.border == "argument" for node in nodes):
            check_closed(results)
        results = _unshared(results, list(map(torch_private.local_of, went)))
        region, sizes = traced_region((text, mesh, given), list(map(torch_private.spec_of, went)))
        parts = result_parts(region, [tuple(x.shape) for x in results], sizes)
        found = list(zip(parts, traced_parts(_RESULTS.format(text), parts, results), strict=True))
    return tuple([enter_global(x, *placed(region, part, *how)) for part, (x, *how) in found])


@torch.compiler.assume_constant_result
def _keep_mesh(mesh: Mesh | None, given: bool, device_meshes: tuple[Any, ...]) -> str:
    return kept.keep(mesh_of_names(mesh, given, device_meshes))
