"""Recipes on plain tensors that hold this rank's shard: the same expressions, under torch's autograd.

    y = apply_local("rearrange", "b s@cp (h d) -> b s h@cp d", "", (x,), mesh, (("h", 16),))

The left side declares what the shards are; `redistribute` brings the gradients of what is sent, by
the rules of the local view, and torch's autograd those of everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from axes.algebra.ambient import ambient_mesh
from axes.algebra.errors import MeshError, ShardingError
from axes.algebra.flow import Recipe, recipe
from axes.algebra.flow.recipe import Op, Shape, op_name
from axes.algebra.mesh import Mesh
from axes.algebra.scopes import required_mesh
from axes.ops import autocast
from axes.ops.extents import extents_of, traced_extents
from axes.ops.recipes import BoundRecipe, bind
from axes.runtime import flags, torch_private
from axes.runtime.graphs import known, node_of_graph, number_of
from axes.runtime.groups import of_world
from axes.runtime.linear import linear
from axes.runtime.places import within
from axes.runtime.redistribute import Dtypes
from axes.runtime.symbols import is_symbolic
from axes.runtime.transforms import as_plain, check_dense, check_transforms, is_dense

Sizes = tuple[tuple[str, Any], ...]

ALONE = Mesh("rank=1")
"""Where an expression is looked up that names no axis."""


def apply_local(
    kind: str,
    text: str,
    op: Op,
    operands: Sequence[torch.Tensor],
    mesh: Mesh | None = None,
    sizes: Sizes = (),
    comm_dtype: Dtypes = None,
    async_op: bool = False,
    grad: str = "resolved",
    called: str = "",
) -> torch.Tensor:
    """The operation on this rank's shards. The options are checked (`check_options`).

    called: the function that the user has called, where that isn't the one of this kind.
    """
    function = called or kind
    if grad != "resolved":
        raise ShardingError(
            f"axes.{function}: grad={grad!r} is about the leaves of DTensors; found a plain tensor, whose gradient is "
            "this rank's. Leave grad out, or pass a DTensor, as axes.from_local makes one"
        )
    if torch_private.transforms_are_on():
        check_transforms(f"axes.{function}, '{text}',", operands)
    mesh = (ambient_mesh() or _mesh_for(function, text)) if mesh is None else mesh
    if torch.compiler.is_compiling():
        number = number_of(kind, text, op, mesh, tuple(name for name, _ in sizes), comm_dtype)
        return _node(number, tuple(size for _, size in sizes), *operands)
    for x in operands:
        if not is_dense(x):
            operands = [_dense(function, x) for x in operands]
            break
    first = operands[0]
    shapes = (first.shape,) if len(operands) == 1 else tuple([x.shape for x in operands])
    make = _made_alone if mesh.binding is None else _made
    made = make(kind, text, op if type(op) is str else op_name(op), shapes, mesh, sizes, comm_dtype, async_op)
    if first.requires_grad and first.is_leaf and made.may_be_view and torch.is_grad_enabled():
        operands = (_own(first),)
    if flags.watched:
        return within(f"axes.{function}", text, _run, made, operands, op)
    return _run(made, operands, op) if made.may_be_cast else made.run(*operands)


def _own(leaf: torch.Tensor) -> torch.Tensor:
    """The identity on a leaf, whose gradient gets memory of its own.

    torch leaves a view where the gradient of a view is accumulated: two leaves then have one memory, and
    what is added to the one is added to the other.
    """
    return linear(lambda x: x.view_as(x), torch.clone, leaf)


@node_of_graph
def _node(number: int, given: tuple[int, ...], *operands: torch.Tensor) -> torch.Tensor:
    """The operation as one node of a graph; there, every collective is waited for where it is used."""
    kind, text, op, mesh, names, comm_dtype = known(number)
    sizes = tuple(zip(names, given, strict=True))
    shapes = tuple([x.shape for x in operands])
    if not any(map(is_symbolic, (*shapes, given))):
        make = _made_alone if mesh.binding is None else _made
        return _run(make(kind, text, op_name(op), shapes, mesh, sizes, comm_dtype, False), operands, op)
    _check_mesh(mesh, text)

    def find(shapes: tuple[Shape, ...], sizes: Sizes) -> Recipe:
        return recipe(kind, text, op_name(op), (None,) * len(shapes), shapes, mesh, sizes)

    return _run(bind(traced_extents(find, shapes, sizes), "local", comm_dtype), operands, op)


def _run(made: BoundRecipe, operands: Sequence[torch.Tensor], op: Op) -> torch.Tensor:
    if not isinstance(op, str):
        made = made.calling(op)
    if torch_private.autocast_may_be_on():
        return autocast.applied(made.extents.recipe, made.run, operands, torch.Tensor.to)
    return made.run(*operands)


def _dense(function: str, x: object) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise ShardingError(f"axes.{function} with '@' takes a tensor; found {type(x).__name__}")
    check_dense(x, f"axes.{function}")
    return as_plain(x)


def _mesh_for(function: str, text: str) -> Mesh:
    """Where there is no mesh: none is needed for text that names no axis."""
    return required_mesh(None, f"axes.{function} of plain tensors") if "@" in text.replace("@*", "") else ALONE


@of_world(8192)
def _made(
    kind: str,
    text: str,
    op: str,
    shapes: tuple[torch.Size, ...],
    mesh: Mesh,
    sizes: Sizes,
    comm_dtype: Dtypes,
    async_op: bool,
) -> BoundRecipe:
    _check_mesh(mesh, text)
    found = recipe(kind, text, op, (None,) * len(shapes), tuple(tuple(shape) for shape in shapes), mesh, sizes)
    return bind(extents_of(found), "local", comm_dtype, async_op)


_made_alone = functools.lru_cache(maxsize=8192)(_made.__wrapped__)
"""The same for meshes that belong to no world."""


def _check_mesh(mesh: Mesh, text: str) -> None:
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh is an axes mesh; found {type(mesh).__name__}")
    if mesh.coordinate is None:
        raise MeshError(f"rank {mesh.rank} isn't one of the ranks of {mesh!r}, so it holds no shard\nin  {text}")
