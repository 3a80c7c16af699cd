"""Requests: what a call of an operation asks for, and the one way to it, in both views.

    apply(requested("einsum", "b s d, d f@tp -> b s f@tp", "sum", mesh), (x, w))

A `Request` is the key under which the operation is kept once it is bound to its tensors, what a node of a compiled
graph refers to, and what errors and traces say. On DTensors (the global view) the left side asserts how they are
sharded; on plain tensors that hold this rank's shard (the local view) it declares it.

Each call costs one look-up, by the request and what the tensors know of themselves: torch's `DTensorSpec`, or a shape.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import MeshError, ShardingError, shortened
from axes.algebra.expressions import recipe
from axes.algebra.expressions.recipe import Op, op_name
from axes.algebra.mesh import Mesh, ambient_mesh, checked_mesh, required_mesh
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import Shape, checked_flag, written_sizes
from axes.algebra.specs import retargeted
from axes.ops import autocast
from axes.ops.global_view import on_dtensors, on_used
from axes.ops.recipes import BoundRecipe, traced_sizes
from axes.runtime import torch_private, watching
from axes.runtime.border import traced
from axes.runtime.graphs import device_mesh_input, fixed, hint, hints, is_symbolic
from axes.runtime.groups import of_world
from axes.runtime.linear import linear
from axes.runtime.operation import PLAIN, as_plain, check_dense, check_transforms, is_dense
from axes.runtime.redistribute import Dtypes, Route, both, of_sizes, route, same_axes, spec_at
from axes.runtime.torch_placements import sharding_of_spec
from axes.runtime.watching import within

T = TypeVar("T", DTensor, torch.Tensor)
"""A kind of tensor: of DTensors an operation makes DTensors, of plain tensors plain ones."""

Sizes = tuple[tuple[str, Any], ...]
Function = Callable[..., Any] | None
"""The caller's function, where that reduces."""

_SHAPE = operator.attrgetter("shape")

Held = tuple[Any, ...]
"""What is known of tensors: torch's `DTensorSpec`s of them, or the shapes of plain ones."""

ALONE = Mesh("rank=1")
"""Where an expression is looked up that names no axis."""


class Request(NamedTuple):
    """What a call asks for beside its tensors.

    called: the function that the user has called. kind: the operation. text: the expression, or a `Sharding`. op: a
    reduction; of the caller's function the name, since what is kept has no function. mesh: where names are looked up,
    `given` by the caller or else ambient.
    """

    called: str
    kind: str
    text: Any
    op: str
    mesh: Mesh | None
    given: bool
    sizes: tuple[Any, ...]
    comm_dtype: Dtypes
    async_op: bool

    @property
    def where(self) -> str:
        """The call, for errors."""
        return f"axes.{self.called}, '{self.text}',"


def requested(
    kind: str,
    text: Any,
    op: Op = "",
    mesh: Mesh | None = None,
    comm_dtype: Dtypes = None,
    async_op: bool = False,
    sizes: Mapping[str, int] | None = None,
    keywords: Mapping[str, Any] | None = None,
) -> Request:
    """The request of a call, once its options are what they can be: caches are asked after that."""
    if mesh is not None and type(mesh) is not Mesh:
        checked_mesh(mesh)
    if comm_dtype is not None:
        both(comm_dtype)
    if async_op is not False:
        checked_flag("async_op", async_op)
    given = written_sizes(keywords or {}, sizes) if keywords or sizes is not None else ()
    name, where = op if type(op) is str else op_name(op), ambient_mesh() if mesh is None else mesh
    return Request(kind, kind, text, name, where, mesh is not None, given, comm_dtype, async_op)


def apply(request: Request, tensors: Sequence[Any], function: Function = None) -> Any:
    """The operation, on DTensors or on this rank's shards."""
    if torch_private.transforms_are_on():
        check_transforms(request.where)
    is_local = type(tensors[0]) in PLAIN or not isinstance(tensors[0], DTensor)
    if is_local:
        request = _of_shards(request)
    if torch.compiler.is_compiling():
        what, sizes = without_sizes(request)
        device_mesh = None if is_local else device_mesh_input(request.mesh, *tensors)
        return traced(_in_graph, (function, *what), tensors, device_mesh, sizes)
    if is_local and not all(map(is_dense, tensors)):
        tensors = [_dense(request.called, x) for x in tensors]
    made = _kept(request, tuple(map(_SHAPE if is_local else torch_private.spec_of, tensors)))
    made = made if function is None else made.calling(function)
    run = _on_shards if is_local else on_dtensors
    if watching.listeners:
        return within(f"axes.{request.called}", request.text, run, made, tensors)
    return run(made, tensors)


def _of_shards(request: Request) -> Request:
    """The request of a call on plain tensors, and where its names are looked up."""
    if "@" not in request.text or (request.mesh is None and "@" not in request.text.replace("@*", "")):
        return request._replace(mesh=ALONE)
    if request.mesh is None:
        required_mesh(None, f"axes.{request.called} of plain tensors")
    return request


def _dense(called: str, x: Any) -> torch.Tensor:
    check_dense(x, f"axes.{called}", f". Make an array one, by torch.as_tensor, or call einops.{called}")
    return as_plain(x)


def _on_shards(made: BoundRecipe, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The operation on this rank's shards.

    `redistribute` brings the gradients of what is sent, by the rules of the local view, and torch's autograd those of
    everything else. A view of a leaf has a gradient in memory of its own: torch leaves a view where that of a view is
    accumulated, and what is added to one of two leaves would be added to the other.
    """
    first = tensors[0]
    is_kept = first.requires_grad and first.is_leaf and made.recipe.mesh is not ALONE
    if is_kept and made.may_be_view and torch.is_grad_enabled():
        tensors = (linear(lambda x: x.view_as(x), torch.clone, first),)
    if torch_private.autocast_may_be_on():
        return autocast.applied(made.recipe, made.run, tensors, torch.Tensor.to)
    return made.run(*tensors)


# --- what is kept, and what is traced


def _made(request: Request, held: Held) -> Any:
    """The operation for tensors of which this is known: a `BoundRecipe`, or of `reshard` a `Route`."""
    _, kind, text, op, mesh, given, sizes, comm_dtype, async_op = request
    if kind == "reshard":
        return _route(held[0], request._replace(sizes=tuple([(name, fixed(size)) for name, size in sizes])))
    shardings: tuple[Sharding | None, ...] = (None,) * len(held)
    device_mesh, is_local = None, isinstance(held[0], torch.Size)
    shapes = tuple([tuple(each if is_local else each.shape) for each in held])
    if not is_local:
        own = Mesh.from_device_mesh(held[0].mesh)
        mesh = mesh if mesh is not None and (given or mesh.universe == own.universe) else own
        shardings, device_mesh = tuple(map(sharding_of_spec, held)), held[0].mesh
    assert mesh is not None  # plain tensors had to have one
    numbers = tuple([(name, hint(size)) for name, size in sizes])
    found = recipe(kind, text, op, shardings, tuple(map(hints, shapes)), mesh, numbers)
    sized = traced_sizes(found, shapes, sizes) if _varies(shapes, sizes) else None
    return BoundRecipe(found, sized, device_mesh, comm_dtype, async_op)


def _varies(shapes: Sequence[Shape], sizes: Sizes) -> bool:
    """Whether one of the sizes is a symbol."""
    return any(map(is_symbolic, (*shapes, [size for _, size in sizes])))


@of_sizes
def _route(spec: Any, request: Request) -> Route:
    """The route of DTensors with this `DTensorSpec`, which `reshard` asks for."""
    found = route(spec, meant(spec, request), both(request.comm_dtype))
    return replace(found, async_op=request.async_op)


def meant(spec: Any, request: Request) -> Sharding:
    """The sharding that a request means for DTensors with this `DTensorSpec`.

    A text is looked up on the tensor's own mesh, or on the one that is given where that has other axes.
    """
    source, target, mesh = sharding_of_spec(spec), request.text, request.mesh
    own = source.mesh
    if isinstance(target, Sharding):
        if request.given and mesh != target.mesh:
            raise MeshError(f"a Sharding has its own mesh, {target.mesh!r}; leave out mesh={mesh!r}")
        return target
    if "->" in target:
        after = shortened(target.split("->")[1].strip())
        raise ShardingError(
            f"a DTensor knows how it is sharded: write only what it becomes, {after}\n"
            f"  source  {source}\n  target  {target}"
        )
    if mesh is None or not (request.given or mesh.universe == own.universe):
        mesh = own
    elsewhere = mesh if request.given and not same_axes(own, mesh) else None
    return retargeted(source, target, tuple(spec.shape), mesh, elsewhere, request.sizes)


_bound = of_world(8192)(_made)
_bound_alone = functools.lru_cache(maxsize=8192)(_made)
"""The same for meshes that belong to no world."""


def _kept(request: Request, held: Held) -> Any:
    """The operation for tensors of which this is known, made once."""
    if request.mesh is not None and request.mesh.binding is None and isinstance(held[0], torch.Size):
        return _bound_alone(request, held)
    return _bound(request, held)


def without_sizes(request: Request) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What a graph keeps of a request, with the names of sizes; and these, may be symbols, for the node."""
    names, sizes = [tuple([each[at] for each in request.sizes]) for at in (0, 1)]
    return tuple(request._replace(sizes=names, async_op=False)), sizes


def with_sizes(what: Sequence[Any], sizes: Sequence[Any]) -> Request:
    """The request of which a graph has kept this."""
    request = Request(*what)
    return request._replace(sizes=tuple(zip(request.sizes, sizes, strict=True)))


def _in_graph(function: Function, *what: Any) -> Any:
    """The operation on tensors that are traced."""
    *kept, sizes, tensors = what
    request = with_sizes(kept, sizes)
    is_local = not isinstance(tensors[0], DTensor)
    shapes = [tuple(x.shape) for x in tensors]
    # Strides may be symbols where no size is one.
    held = tuple([x.shape if is_local else spec_at(torch_private.spec_of(x), tuple(x.shape)) for x in tensors])
    made = (_made if _varies(shapes, request.sizes) else _kept)(request, held)
    made = made if function is None else made.calling(function)
    return (_on_shards if is_local else on_used)(made, tensors)
