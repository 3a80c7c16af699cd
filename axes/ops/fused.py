"""`rearrange` with blocks: a dim taken apart into several tensors, and several put together in one dim.

    q, k, v = axes.rearrange(qkv, "b s (h@tp k + g@tp k + g@tp k) -> b s h@tp k, b s g@tp k, b s g@tp k", k=64, g=4)
    qkv = axes.rearrange((q, k, v), "h k d, g k d, g k d -> (h k + g k + g k) d")

Each block is an expression of its own (`axes.algebra.flow.blocks`). Between them a tensor is cut, or several are put
together, along a dim of which every rank has its part of each block: that is local.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.ambient import ambient_mesh
from axes.algebra.errors import AxesError, ExpressionError, MeshError, ShardingError, SizeError
from axes.algebra.flow import Recipe, recipe
from axes.algebra.flow.blocks import Fused, names_of, read_blocks, sizes_of_blocks
from axes.algebra.flow.states import cuts, of_cuts, split
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.scopes import checked_mesh
from axes.algebra.sharding import ShardedDim, Sharding
from axes.ops.global_view import Grad
from axes.ops.local_view import ALONE
from axes.runtime import torch_private
from axes.runtime.graphs import node_of_graph, read_once
from axes.runtime.groups import of_world
from axes.runtime.leaves import leave_pending, resolve_at_leaf, settles
from axes.runtime.linear import linear
from axes.runtime.packing import strides_of
from axes.runtime.routes import resharded, settled
from axes.runtime.symbols import hints
from axes.runtime.torch_placements import sharding_of_spec, torch_placements
from axes.runtime.transforms import check_dense, check_transforms

Sizes = tuple[tuple[str, int], ...]
Rearrange = Callable[[Any, str, Sizes], Any]
"""`rearrange` of one tensor without blocks."""


def rearrange_blocks(
    tensors: Sequence[Any], text: str, given: Sizes, mesh: Mesh | None, grad: Grad, one: Rearrange
) -> Any:
    """The tensors of the right side, in a tuple if there are several."""
    needed = _check(text, tensors)
    shapes = tuple([_needed(x, dims) for x, dims in zip(tensors, needed, strict=True)])
    is_global = isinstance(tensors[0], DTensor)
    home = ambient_mesh() if mesh is None else checked_mesh(mesh)
    cuts_, expressions, joints = _steps(text, shapes, given, None if is_global else home)
    if not torch.compiler.is_compiling():
        ends = tuple([torch_private.spec_of(x) if is_global else tuple(x.shape) for x in tensors])
        check = _check_all if is_global or (home is not None and home.binding is not None) else _check_alone
        check(text, ends, shapes, given, home, mesh is not None)
    parts: list[Any] = []
    for x, cut in zip(tensors, cuts_, strict=True):
        parts.extend((x,) if cut is None else _apart(x, text, cut, grad, one))
    made = [_of_block(text, at, one, x, *expressions[at]) for at, x in enumerate(parts)]
    results = [made[joint[0]] if len(joint) == 1 else _joined(text, made, joint, one) for joint in joints]
    return tuple(results) if len(results) > 1 else results[0]


def _check(text: str, tensors: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """For each tensor the dims whose sizes matter."""
    needed = _needed_dims(text)
    if len(tensors) != len(needed):
        raise ExpressionError(
            f"the left side is {len(needed)} tensors; found {len(tensors)}", text, 0, text.index("->")
        )
    for x in tensors:
        if not isinstance(x, torch.Tensor):
            raise ShardingError(f"axes.rearrange takes tensors; found {type(x).__name__}\nin  {text}")
        check_dense(x, "axes.rearrange")
    if len({isinstance(x, DTensor) for x in tensors}) > 1:
        raise ShardingError(
            "axes.rearrange takes DTensors or plain tensors, not both; make all of them DTensors with axes.shard or "
            f"axes.from_local\nin  {text}"
        )
    if len({x.dtype for x in tensors}) > 1:
        found = ", ".join([str(x.dtype).removeprefix("torch.") for x in tensors])
        raise ShardingError(f"tensors that are put together have one dtype; found {found}\nin  {text}")
    if len({x.device for x in tensors}) > 1:
        found = ", ".join([str(x.device) for x in tensors])
        raise ShardingError(
            f"tensors that are put together lie on one device; found {found}. Write x.to(device)\nin  {text}"
        )
    if torch_private.transforms_are_on():
        check_transforms(f"axes.rearrange, '{text}',", tensors)
    return needed


@read_once
def _needed_dims(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple([each.needed if isinstance(each, Fused) else () for each in read_blocks(text).left])


End = tuple[Sharding | None, tuple[int, ...]]
"""How a tensor lies, and its whole shape; None and the shape of a plain shard."""


@dataclass(frozen=True)
class BlockRecipes:
    """The recipes of an expression with blocks, in the order in which they run, and what is done between them.

    opened: for each tensor of the left side the recipe that opens its dim of blocks, None where none is needed.
    taken: for each of them this dim, and how each block lies; None of a tensor without blocks. blocks: the recipe of
    each block. joined: for each tensor of the right side the first of its blocks, the last and one more, their dim,
    and how they lie together. closed: the recipe that closes this dim, or None. Plain shards lie as None.
    """

    opened: tuple[Recipe | None, ...]
    taken: tuple[tuple[int, tuple[Sharding | None, ...]] | None, ...]
    blocks: tuple[Recipe, ...]
    joined: tuple[tuple[int, int, int, Sharding | None], ...]
    closed: tuple[Recipe | None, ...]


def recipes_of_blocks(
    text: str, ends: Sequence[End], shapes: tuple[tuple[int, ...], ...], given: Sizes, home: Mesh | None, said: bool
) -> BlockRecipes:
    """What each step of the expression does to tensors that lie so; raises what some step would raise.

    `home` is a mesh that is `said`, or the ambient one.
    """
    is_global = ends[0][0] is not None
    cuts_, expressions, joints = _steps(text, shapes, given, None if is_global else home)

    def after(end: End, expression: str, sizes: Sizes) -> Recipe:
        sharding, shape = end
        where = home if home is not None else ALONE
        if sharding is not None and not (home is not None and (said or home.universe == sharding.universe)):
            where = sharding.mesh
        made = recipe("rearrange", expression, "", (sharding,), (shape,), where, sizes)
        if sharding is not None:
            check_torch_can(made.result.output, made.result.shape)
        return made

    def end_of(made: Recipe) -> End:
        output, shape = made.result.output, made.result.shape
        return (output, shape) if is_global else (None, output.local_shape(shape))

    parts: list[End] = []
    opened: list[Recipe | None] = []
    taken: list[tuple[int, tuple[Sharding | None, ...]] | None] = []
    for end, cut in zip(ends, cuts_, strict=True):
        if cut is None:
            parts.append(end)
            opened.append(None)
            taken.append(None)
            continue
        opening, sizes, dim, counts = cut
        opened.append(after(end, opening, sizes) if opening else None)
        sharding, shape = end if opened[-1] is None else end_of(opened[-1])
        dim %= len(shape)
        held = (None,) * len(counts) if sharding is None else blocks_of(sharding, shape, dim, counts, text)
        taken.append((dim, held))
        parts += [(each, _with(shape, dim, count)) for each, count in zip(held, counts, strict=True)]
    blocks = [_of_block(text, at, after, end, *expressions[at]) for at, end in enumerate(parts)]
    joined: list[tuple[int, int, int, Sharding | None]] = []
    closed: list[Recipe | None] = []
    for joint in joints:
        if len(joint) == 1:
            joined.append((joint[0], joint[0] + 1, 0, end_of(blocks[joint[0]])[0]))
            closed.append(None)
            continue
        first, last, dim, closing, sizes = joint
        mine = list(map(end_of, blocks[first:last]))
        dim %= len(mine[0][1])
        _check_joint([shape for _, shape in mine], dim, text)
        shape = _with(mine[0][1], dim, sum(each[dim] for _, each in mine))
        lying = tuple([each for each, _ in mine if each is not None])
        whole = whole_of(lying, tuple([each for _, each in mine]), dim, text) if lying else None
        joined.append((first, last, dim, whole))
        closed.append(after((whole, shape), closing, sizes) if closing else None)
    return BlockRecipes(tuple(opened), tuple(taken), tuple(blocks), tuple(joined), tuple(closed))


@of_world(1024)
def _check_all(
    text: str, ends: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...], given: Sizes, home: Mesh | None, said: bool
) -> None:
    """Refuses what some step of the expression would refuse, before any of them sends.

    `ends` are DTensorSpecs, or shapes of plain shards. `home` is a mesh that is `said`, or the ambient one.
    """
    is_global = not isinstance(ends[0], tuple)
    lying = [(sharding_of_spec(e), tuple(e.shape)) if is_global else (None, e) for e in ends]
    recipes_of_blocks(text, lying, shapes, given, home, said)


_check_alone = functools.lru_cache(maxsize=1024)(_check_all.__wrapped__)
"""The same where nothing of a world is looked at."""


def _check_joint(shapes: Sequence[Sequence[int]], dim: int, text: str) -> None:
    others = [(*shape[:dim], *shape[dim + 1 :]) for shape in shapes]
    if any(each != others[0] for each in others):
        found = ", ".join(str(list(shape)) for shape in shapes)
        raise SizeError(f"blocks have one size in every other dim; found {found}\nin  {text}")


def _needed(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with -1 for sizes that don't matter, which vary in a compiled graph."""
    known = [dim % x.ndim for dim in dims if -x.ndim <= dim < x.ndim]
    return tuple([operator.index(size) if dim in known else -1 for dim, size in enumerate(x.shape)])


Cut = tuple[str, Sizes, int, tuple[int, ...]]
"""How a tensor is taken apart: what opens the dim of the blocks ("" for nothing), this dim, and its blocks."""


@read_once
def _steps(
    text: str, shapes: tuple[tuple[int, ...], ...], given: Sizes, mesh: Mesh | None
) -> tuple[tuple[Cut | None, ...], tuple[tuple[str, Sizes], ...], tuple[tuple[Any, ...], ...]]:
    """What `rearrange_blocks` does: the cuts of the left side, an expression for each block, the joints of the right.

    On a `mesh` the shapes are those of plain shards.
    """
    pieces = {} if mesh is None else {name: layout.size for name, layout in mesh.namespace.items()}
    found = read_blocks(text)
    known = found.given(dict(given))
    cuts_: list[Cut | None] = []
    for fused, shape in zip(found.left, shapes, strict=True):
        if isinstance(fused, Fused):
            learned, counts = sizes_of_blocks(fused, text, shape, known, pieces)
            known.update(learned)
            opening = "" if fused.is_open else f"{fused.spec} -> {fused.opened}"
            cuts_.append((opening, _of(opening, known), fused.dim, counts))
        else:
            cuts_.append(None)
    expressions = [f"{one} -> {other}" for one, other in found.pairs]
    at, joints = 0, list[tuple[Any, ...]]()
    for fused in found.right:
        if isinstance(fused, Fused):
            closing = "" if fused.is_open else f"{fused.opened} -> {fused.spec}"
            joints.append((at, at + len(fused.parts), fused.dim, closing, _of(closing, known)))
            at += len(fused.parts)
        else:
            joints.append((at,))
            at += 1
    return tuple(cuts_), tuple([(each, _of(each, known)) for each in expressions]), tuple(joints)


def _of(text: str, known: dict[str, int]) -> Sizes:
    """The sizes of the names in an expression."""
    names = names_of(text) if text else ()
    return tuple([(name, size) for name, size in known.items() if name in names and size])


def _apart(x: Any, text: str, cut: Cut, grad: Grad, one: Rearrange) -> Sequence[Any]:
    """A tensor for each block."""
    opening, sizes, dim, counts = cut
    opened = one(x, opening, sizes) if opening else x
    dim %= opened.ndim
    if not isinstance(x, DTensor):
        starts = itertools.accumulate(counts, initial=0)
        return [opened.narrow(dim, start, count) for start, count in zip(starts, counts, strict=False)]
    return _taken_apart(opened, dim, counts, text, grad)


def _of_block(text: str, number: int, one: Rearrange, x: Any, expression: str, sizes: Sizes) -> Any:
    """What becomes of one block."""
    if torch.compiler.is_compiling():
        return one(x, expression, sizes)
    try:
        return one(x, expression, sizes)
    except AxesError as error:
        raise type(error)(f"{error}\nwhich is block {number + 1} of  {text}") from None


def _joined(text: str, made: Sequence[Any], joint: tuple[Any, ...], one: Rearrange) -> Any:
    """The tensor that holds some of what was made as blocks."""
    first, last, dim, closing, sizes = joint
    parts = tuple(made[first:last])
    dim %= parts[0].ndim
    opened = _put_together(parts, dim, text) if isinstance(parts[0], DTensor) else torch.cat(parts, dim)
    return one(opened, closing, sizes) if closing else opened


# --- DTensors


def _taken_apart(x: DTensor, dim: int, counts: tuple[int, ...], text: str, grad: Grad) -> tuple[DTensor, ...]:
    """The blocks of a dim, each a DTensor: views, of which every rank has its part."""
    is_leaf = x.is_leaf and x.requires_grad and torch.is_grad_enabled()
    if is_leaf and grad == "pending":
        leave_pending(x)
    if torch.compiler.is_compiling():
        return _apart_node(dim, int(grad == "resolved" and settles(x)), *counts, x)
    if is_leaf and grad == "resolved":
        resolve_at_leaf(x)
    return _run_apart(x, dim, counts, text)


@node_of_graph
def _apart_node(dim: int, settling: int, *counts_and_tensor: Any) -> tuple[DTensor, ...]:
    """Taking apart as one node of a graph, where nothing is a leaf and no hook is reached."""
    *counts, x = counts_and_tensor
    return _run_apart(settled(x) if settling else x, dim, tuple(counts))


def _run_apart(x: DTensor, dim: int, counts: tuple[int, ...], text: str = "") -> tuple[DTensor, ...]:
    parts = _known_blocks(sharding_of_spec(torch_private.spec_of(x)), hints(tuple(x.shape)), dim, counts, text)
    spec = torch_private.spec_of(x)

    def back(*cotangents: DTensor | None) -> DTensor:
        arrived = [None if each is None else sharding_of_spec(torch_private.spec_of(each)) for each in cotangents]
        targets = where_put_together(arrived, parts, dim)
        if targets is not None:
            cotangents = tuple(
                [
                    _zeros(spec, part, _with(spec.shape, dim, count)) if each is None else resharded(each, part)
                    for each, part, count in zip(cotangents, targets, counts, strict=True)
                ]
            )
        return _run_together(cotangents, dim)  # type: ignore[arg-type]

    return linear(lambda x: _views(x, dim, counts, parts), back, x)


def _views(x: DTensor, dim: int, counts: tuple[int, ...], parts: tuple[Sharding, ...]) -> tuple[DTensor, ...]:
    spec = torch_private.spec_of(x)
    held = [count // part.dims[dim].pieces for count, part in zip(counts, parts, strict=True)]
    locals_ = torch_private.local_of(x).split(held, dim)
    return tuple(
        [
            _dtensor(local, spec.mesh, part, _with(x.shape, dim, count))
            for local, part, count in zip(locals_, parts, counts, strict=True)
        ]
    )


def _put_together(xs: Sequence[DTensor], dim: int, text: str = "") -> DTensor:
    """The tensor of which one dim holds these, one behind the other."""
    if torch.compiler.is_compiling():
        return _together_node(dim, *xs)
    return _run_together(xs, dim, text)


@node_of_graph
def _together_node(dim: int, *xs: DTensor) -> DTensor:
    return _run_together(xs, dim)


def _run_together(xs: Sequence[DTensor], dim: int, text: str = "") -> DTensor:
    specs = [torch_private.spec_of(x) for x in xs]
    if any(spec.mesh != specs[0].mesh for spec in specs):
        raise MeshError(f"tensors that are put together are on one mesh; axes.reshard them before\nin  {text}")
    shardings = tuple([sharding_of_spec(spec) for spec in specs])
    whole = _known_whole(shardings, tuple([hints(tuple(x.shape)) for x in xs]), dim, text)
    counts = tuple([x.shape[dim] for x in xs])

    def back(cotangent: DTensor) -> tuple[DTensor, ...]:
        arrived = sharding_of_spec(torch_private.spec_of(cotangent))
        target = where_taken_apart(arrived, whole, dim)
        return _run_apart(cotangent if target is arrived else resharded(cotangent, target), dim, counts)

    return linear(lambda *xs: _cat(xs, dim, whole), back, *xs)


def _cat(xs: Sequence[DTensor], dim: int, whole: Sharding) -> DTensor:
    local = torch.cat([torch_private.local_of(x) for x in xs], dim)
    shape = _with(xs[0].shape, dim, sum(x.shape[dim] for x in xs))
    return _dtensor(local, torch_private.spec_of(xs[0]).mesh, whole, shape)


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _dtensor(local: torch.Tensor, device_mesh: Any, sharding: Sharding, shape: tuple[int, ...]) -> DTensor:
    spec = torch_private.dtensor_spec(device_mesh, torch_placements(sharding), shape, strides_of(shape), local.dtype)
    return torch_private.dtensor(local, spec)


def blocks_of(
    sharding: Sharding, shape: tuple[int, ...], dim: int, counts: tuple[int, ...], text: str
) -> tuple[Sharding, ...]:
    """How each block lies; `ShardingError` where a rank doesn't have its part of every block."""
    state, number = sharding.dims[dim], len(counts)
    if state.pieces == 1:
        dims = [split("_", *state.axes) for _ in counts]
    else:
        found = [(before, axis) for before, axis in cuts(state, shape[dim]) if axis.size > 1]
        alike = len(set(counts)) == 1
        if not alike or any(before % number or counts[0] % (before // number * axis.size) for before, axis in found):
            raise ShardingError(
                f"a rank doesn't have its part of every block: {state} of {shape[dim]} is {number} blocks of "
                f"{', '.join(map(str, counts))}\n  has   {sharding}\nin  {text}\n"
                "axes.reshard it so that the dim isn't split, or to blocks that are, like (2 f@tp)"
            )
        inner = [(before // number, axis) for before, axis in found]
        dims = [of_cuts(f"inner{dim}", count, inner) for count in counts]
    made = tuple([replace(sharding, dims=_set(sharding.dims, dim, each)) for each in dims])
    for part, count in zip(made, counts, strict=True):
        check_torch_can(part, _with(shape, dim, count))
    return made


def whole_of(shardings: tuple[Sharding, ...], shapes: tuple[tuple[int, ...], ...], dim: int, text: str) -> Sharding:
    """How the tensor lies that holds these as blocks; `ShardingError` where they lie otherwise."""
    first, counts = shardings[0], [shape[dim] for shape in shapes]
    alike = all(
        replace(other, dims=_set(other.dims, dim, first.dims[dim])).is_equivalent(first, shapes[0])
        for other in shardings[1:]
    )
    is_split = any(each.dims[dim].pieces > 1 for each in shardings)
    if is_split:
        even = all(count % each.dims[dim].pieces == 0 for count, each in zip(counts, shardings, strict=True))
        alike = alike and even and len(set(counts)) == 1
        alike = alike and all(other.is_equivalent(first, shapes[0]) for other in shardings[1:])
    if not alike:
        lines = "\n".join(
            f"  block {number}  {each}    {list(shape)}"
            for number, (each, shape) in enumerate(zip(shardings, shapes, strict=True), 1)
        )
        raise ShardingError(
            "blocks of a DTensor lie alike, and where they are split they have one size; DTensor has no placement for "
            f"others\n{lines}\nin  {text}\naxes.reshard them so that the dim of the blocks isn't split; or put the "
            "parts of each rank, or of each key head, together: (g@tp (r q + k + v))"
        )
    state = first.dims[dim]
    if is_split:
        inner = [(before * len(counts), axis) for before, axis in cuts(state, counts[0])]
        state = of_cuts(f"inner{dim}", sum(counts), inner)
    else:
        state = split("_", *state.axes)
    whole = replace(first, dims=_set(first.dims, dim, state))
    check_torch_can(whole, _with(shapes[0], dim, sum(counts)))
    return whole


_known_blocks, _known_whole = of_world(4096)(blocks_of), of_world(4096)(whole_of)
"""The same, remembered."""


def _set(dims: tuple[ShardedDim, ...], at: int, dim: ShardedDim) -> tuple[ShardedDim, ...]:
    return (*dims[:at], dim, *dims[at + 1 :])


def where_put_together(
    arrived: Sequence[Sharding | None], parts: Sequence[Sharding], dim: int
) -> tuple[Sharding, ...] | None:
    """Where the gradients of blocks are brought to before they are put together: None where they stay as they arrived.

    That is where they lie alike, and the dim isn't split; else each is brought to where its block lies.
    """
    if len({*arrived}) == 1 and _fits(arrived[0], parts[0], dim):
        return None
    return tuple([replace(part, pending=()) for part in parts])


def where_taken_apart(arrived: Sharding, whole: Sharding, dim: int) -> Sharding:
    """Where the gradient of blocks that were put together is brought to before it is taken apart."""
    return arrived if _fits(arrived, whole, dim) else replace(whole, pending=())


def _fits(arrived: Sharding | None, part: Sharding, dim: int) -> bool:
    """Whether gradients that arrive so can be put together as they are."""
    return arrived is not None and arrived.mesh == part.mesh and arrived.dims[dim].pieces == 1


def _zeros(spec: Any, part: Sharding, shape: tuple[int, ...]) -> DTensor:
    dtype = spec.tensor_meta.dtype
    local = torch.zeros(part.local_shape(shape), dtype=dtype, device=spec.mesh.device_type)
    return _dtensor(local, spec.mesh, part, shape)
