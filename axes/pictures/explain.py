"""`axes.explain`: what an operation, a step of a model or a transfer sends, before it runs anywhere.

    print(axes.explain("b s@tp d -> b s d@tp", (8, 2048, 4096), mesh="dp=4 tp=2"))

What an operation does is read off the recipe and the plans that a call of it makes for itself, forward and backward.
No process group is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from axes import AxesError, ExpressionError, Mesh, Sharding, ShardingError, SizeError, Transfer, plan
from axes.extension import (
    COLLECTIVES,
    REDUCTIONS,
    Dtype,
    Recipe,
    Spec,
    TensorExpression,
    bytes_text,
    checked_tensor_shape,
    dtype_name,
    gradient,
    itemsize_of,
    marked_sharding,
    on_own_axes,
    ranks_text,
    read,
    recipe,
    required_mesh,
    shared_cotangent,
    shown,
    transposed,
    unmoved,
    whole_shape,
    written_sizes,
)
from axes.pictures.moves import MOST, moves_of_recipe
from axes.pictures.panels import Listing, sheet_of
from axes.pictures.recorder import explained_step, listing_of_sent
from axes.pictures.show import Explanation, explained_transfer

Shape = tuple[int, ...]

Sent = list[dict[str, Any]]
"""Collectives as data, in order, each with `what` it is of: an operand, the result, a gradient."""


def explain(
    what: str | Callable[..., Any],
    /,
    *inputs: Any,
    mesh: Mesh | str | None = None,
    dtype: str | Dtype = "float32",
    op: str = "sum",
    sizes: Mapping[str, int] | None = None,
    **keywords: int,
) -> Explanation:
    """Say what an expression does on a mesh, list every collective of a step, or show what a transfer moves.

    **An expression**, `explain("b s@tp d -> b s d", (8, 64, 32), mesh="tp=4")`: how it is read, its sizes, this
    rank's shards, and the communication forward and backward, with bytes and estimated time. No process is needed.

    **A step**, `explain(step, x, y)`: runs `step(x, y)`. If the step runs no backward pass itself and its result
    needs gradients, `explain` runs the backward pass from the result. Each collective has its origin (axes, the
    program, or torch, as DTensor and FSDP2), the expression or operation, the axes, the bytes, the path of the
    module, and the line of the program; a gradient has the line of the forward pass. In `axes.simulate` one
    process shows the step of any rank; in a running job all ranks call it. Compiled functions run eagerly.
    Afterwards random numbers are as before, and so are the gradients of the parameters of the modules that ran.

    **A transfer**, `explain(move)` or `explain(move.at(rank))`: the tensors and their shardings on both sides, the
    bytes of all ranks beside the least possible, and up to six buckets of one rank. With tensors, `explain(move,
    tensors)`, it is a step.

    Args:
        what: An expression, a function, a module or a transfer.
        *inputs: The whole shapes of the operands, or the arguments of the step.
        mesh: A mesh or its text, by default the ambient mesh. A step without a job gets a simulated job of this
            mesh.
        dtype: The dtype of the operands.
        op: The reduction, for an expression that drops names. An expression of one operand is a rearrangement, a
            reduction or a repetition, and one of several operands an einsum. Explain a region by its function.
        sizes: Sizes of names, for names that collide with a parameter.
        **keywords: Sizes of names. Without shapes, the sizes of all names.

    Returns:
        An `Explanation`, which prints itself, and has `json()`, `html()` and `svg()`.

    Raises:
        AxesError: The argument can't be explained.
        MeshError: There is no mesh.
        SizeError: Sizes are missing. An expression raises what its operation raises, too.

    Examples:
        >>> import torch, axes
        >>> print(explain("b s@tp d -> b s d", (8, 64, 32), mesh="dp=2 tp=4"))
        rearrange "b s@tp d -> b s d"
        read as
          operand  [8, 64, 32] float32  b s@tp d
          result   [8, 64, 32] float32  b s d
          sizes    b=8 s=64 d=32
          mesh     dp=2 tp=4, seen from rank 0
        shards
          operand  [8, 16, 32]  at most 16.0 KiB on a rank
          result   [8, 64, 32]  at most 64.0 KiB on a rank
        communication
          all_gather  tp  48.0 KiB  20 us  result
        backward, of DTensors: the result's gradient is sharded as the result
          nothing is sent
        backward, of plain shards: the loss is the sum of all ranks' losses
          reduce_scatter  tp  48.0 KiB  20 us  gradient
        >>> def step():
        ...     x = axes.ones("b@tp d", b=8, d=4).requires_grad_()
        ...     return axes.einsum(x, "b@tp d -> d").sum()
        >>> found = explain(step, mesh="tp=4").json()["collectives"]
        >>> [(each["kind"], each["axes"], each["bytes_in"]) for each in found]
        [('all_reduce', ['tp'], 24)]
    """
    given = dict(written_sizes(keywords, sizes))
    if isinstance(what, str):
        where = Mesh(mesh) if isinstance(mesh, str) else required_mesh(mesh, "axes.explain")
        return explained_operation(what, inputs, where, dtype_name(dtype), op, given)
    if not callable(what):
        raise AxesError(
            f"axes.explain takes the text of an expression, a module, a function or a transfer; found {shown(what)}"
        )
    if isinstance(what, Transfer) and not inputs:
        if mesh is not None or given:
            raise AxesError("a transfer has its meshes and sizes; axes.explain takes nothing else with it")
        return explained_transfer(what)
    if given or not isinstance(dtype, str) or (dtype, op) != ("float32", "sum"):
        raise AxesError(
            "sizes, dtype and op are of expressions; pass keywords of a step in a function: "
            "axes.explain(lambda x: model(x, cache=None), x)"
        )
    return explained_step(what, inputs, mesh)


def explained_operation(
    expression: str,
    shapes: Sequence[Sequence[int]],
    mesh: Mesh,
    dtype: str = "float32",
    op: str = "sum",
    sizes: Mapping[str, int] | None = None,
) -> Explanation:
    """What the operation of an expression does to tensors of these whole shapes.

    Without `shapes`, they follow from `sizes`. Raises what the operation itself raises.

    >>> found = explained_operation("b s@tp d -> b s d", [(8, 64, 32)], Mesh("tp=2"))
    >>> [(row["kind"], row["axes"], row["bytes_in"]) for row in found.json()["communication"]]
    [('all_gather', ['tp'], 32768)]
    """
    tree, given = read(expression), dict(sizes or {})
    if len(tree.results or ()) != 1:
        raise ExpressionError(
            "an expression to explain has two sides and one result, like 'b s@tp d -> b s d'; a region is explained "
            "with its function: axes.explain(axes.shard_map(fn, expression), x)",
            expression,
            0,
            len(expression),
        )
    if not (isinstance(op, str) and op in REDUCTIONS):
        raise ShardingError(f"explain knows the reductions {', '.join(REDUCTIONS)}; found {shown(op)}")
    itemsize_of(dtype)
    ends, wholes = zip(*_ends(mesh, tree, shapes, given), strict=True)
    kind = _kind(tree)
    reduced = {"reduce": op, "einsum": "sum"}.get(kind, "")
    # What the text says of gradients, `same`, is about plain shards alone.
    alone = any(p.op == "same" for spec in (*tree.operands, *(tree.results or ())) for p in spec.pending or ())
    tensors = [None] * len(ends) if alone else ends
    held = [end.local_shape(shape) for end, shape in zip(ends, wholes, strict=True)] if alone else wholes
    subject = recipe(kind, expression, reduced, tuple(tensors), tuple(held), mesh, tuple(given.items()))
    return _explained(subject, alone, dtype)


# --- which operation an expression is, and of which tensors


def _kind(tree: TensorExpression) -> str:
    """The operation that an expression is of."""
    left, right = _names(tree.operands[0]), _names((tree.results or ())[0])
    if len(tree.operands) > 1 or len({*left}) < len(left) or len({*right}) < len(right):
        return "einsum"
    return "reduce" if {*left} - {*right} else "repeat" if {*right} - {*left} else "rearrange"


def _names(spec: Spec) -> list[str]:
    """The names of a spec; a number that isn't 1 counts as one, since it comes or goes."""
    factors = [factor for dim in spec.dims for factor in dim.factors]
    return [f.name or f"#{f.size}" for f in factors if f.name is not None or f.size not in (None, 1)]


def _ends(
    mesh: Mesh, tree: TensorExpression, shapes: Sequence[Sequence[int]], sizes: Mapping[str, int]
) -> Iterator[tuple[Sharding, Shape]]:
    """How the operands lie, and their whole shapes: as given, or by the sizes of all names."""
    if shapes and len(shapes) != len(tree.operands):
        raise SizeError(
            f"'{tree.text}' has {len(tree.operands)} operands, and {len(shapes)} shapes are given; give the whole "
            "shape of each, or the sizes of all names"
        )
    factors = [factor for spec in tree.operands for dim in spec.dims for factor in dim.factors]
    known = {**sizes, **{each.name: each.size for each in factors if each.name and each.size is not None}}
    for spec, given in zip_longest(tree.operands, map(checked_tensor_shape, shapes)):
        every, grouped = (
            tuple((factor.name, known[factor.name]) for dim in dims for factor in dim.factors if factor.name in known)
            for dims in (spec.dims, [dim for dim in spec.dims if dim.grouped])
        )
        shape = whole_shape(marked_sharding(mesh, str(spec), every)[0]) if given is None else given
        yield marked_sharding(mesh, str(spec), grouped, len(shape))[0].sized(shape), shape


# --- what is sent


def _moved(what: str, source: Sharding, target: Sharding, shape: Shape, dtype: str) -> Sent:
    """The collectives between two shardings, as the call plans them."""
    steps = () if unmoved(source, target, shape) else plan(source, target, shape, dtype=dtype).steps
    return [
        {
            "what": what,
            "kind": step.kind,
            "axes": list(step.axes),
            "group_size": step.group_size,
            "ranks": ranks_text(step.ranks),
            "time_us": step.cost,
            "bytes_in": step.bytes_in,
            "bytes_out": step.bytes_out,
        }
        for step in steps
        if step.kind in COLLECTIVES
    ]


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name} {number}" for number in range(1, count + 1)] if count > 1 else [name]


def _moves_of(subject: Recipe, dtype: str, of: str = "") -> Sent:
    """The collectives of an operation, in order."""
    arrows = zip([*_numbered("operand", len(subject.inputs)), "result"], subject.arrows, strict=True)
    return [moved for name, arrow in arrows for moved in _moved(of or name, *arrow, dtype)]


def _gradients(subject: Recipe, dtype: str) -> Sent | None:
    """What the gradients of DTensors send, for a cotangent sharded as the result, and brought to their leaves.

    What the result has pending has a replicated cotangent. None where the gradient is no recipe: those of a maximum, a
    product or a function are computed on shards.
    """
    if subject.kind == "reduce" and subject.op not in ("sum", "mean"):
        return None
    arrived, count, found = replace(subject.result.tensor, pending=()), len(subject.inputs), Sent()
    back = [gradient(subject, index, arrived) for index in range(count)]
    target = shared_cotangent(back) if count > 1 else None
    if target is not None:
        found += _moved("cotangent", arrived, target, subject.whole(subject.result.groups), dtype)
        back = [gradient(subject, index, target) for index in range(count)]
    for name, each, operand in zip(_numbered("gradient", count), back, subject.inputs, strict=True):
        leaf = replace(operand.tensor, pending=())
        found += _moves_of(each, dtype, name)
        found += _moved(f"{name} into .grad", each.result.tensor, leaf, subject.whole(operand.groups), dtype)
    return found


def _gradients_of_shards(subject: Recipe, dtype: str) -> Sent | None:
    """What the gradients of plain shards send, each rank's loss one summand; None for a maximum across ranks."""
    if any(op in ("max", "min") for source, *_ in subject.moves for op, _ in source.pending):
        return None
    ends = [(*transposed(*on_own_axes(source, target))[:2], shape) for source, target, shape in subject.moves]
    return [moved for end in reversed(ends) for moved in _moved("gradient", *end, dtype)]


# --- what is said


def _explained(subject: Recipe, alone: bool, dtype: str) -> Explanation:
    """The explanation of an operation, as data and as text; `alone`: of plain shards alone."""
    mesh, every = subject.mesh, [*subject.inputs, subject.result]
    sent: dict[str, Sent | None] = {
        "communication": _moves_of(subject, dtype),
        "backward": None if alone else _gradients(subject, dtype),
        "backward_of_shards": _gradients_of_shards(subject, dtype),
    }
    tensors = [
        _tensor(name, each.tensor, subject.whole(each.groups), dtype, each.elementary.spec)
        for name, each in zip([*_numbered("operand", len(every) - 1), "result"], every, strict=True)
    ]
    facts: dict[str, Any] = {
        "kind": subject.kind,
        "expression": subject.text,
        "mesh": mesh.declaration,
        "rank": mesh.rank,
        "dtype": dtype,
        "sizes": {name: size for name, size in subject.sizes.items() if name.isidentifier()},
        "tensors": tensors,
        **sent,
    }
    about = {
        "sizes": " ".join(f"{name}={size}" for name, size in facts["sizes"].items()),
        "mesh": f"{mesh.declaration}, seen from rank {mesh.rank}",
    }
    wide = len(tensors[0]["name"])
    rows: list[tuple[str, ...]] = [
        (each["name"], f"{each['shape']} {dtype}", ", that is ".join(dict.fromkeys((each["spec"], each["atoms"]))))
        for each in tensors
    ]
    rows += [(f"{name:<{wide}}  {text}",) for name, text in about.items() if text]
    shards = [
        (each["name"], str(each["local_shape"]), f"at most {bytes_text(each['largest_shard_bytes'])} on a rank")
        for each in tensors
    ]
    drawn = mesh.size <= MOST and all(subject.sizes.values())
    sheet = sheet_of(
        f'{subject.kind} "{subject.text}"',
        "",
        moves_of_recipe(subject, dtype) if drawn else None,
        Listing((), tuple(rows), title="read as"),
        Listing((), tuple(shards), title="shards"),
        *(
            listing_of_sent(_TITLES[name], [(each, each["what"]) for each in found])
            for name, found in sent.items()
            if found is not None
        ),
    )
    return Explanation(lambda room: sheet, facts)


_TITLES = {
    "communication": "communication",
    "backward": "backward, of DTensors: the result's gradient is sharded as the result",
    "backward_of_shards": "backward, of plain shards: the loss is the sum of all ranks' losses",
}


def _tensor(name: str, sharding: Sharding, shape: Shape, dtype: str, atoms: str) -> dict[str, Any]:
    """A tensor as data, with the shape of this rank's shard, and the bytes of the largest."""
    return {
        "name": name,
        "spec": sharding.spec,
        "atoms": atoms,
        "shape": list(shape),
        "largest_shard_bytes": sharding.largest_tile(shape) * itemsize_of(dtype),
        "local_shape": list(sharding.local_shape(shape)),
    }
