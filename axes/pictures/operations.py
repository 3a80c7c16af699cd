"""What an expression does, without doing it: sizes, shards, collectives with bytes and time, gradients.

    found = explained_operation("b s@tp d -> b s d@tp", [(8, 2048, 4096)], Mesh("dp=4 tp=2"), "bfloat16")

Everything is read off the recipe and the plans that a call of the operation makes for itself. No process group is
needed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from axes.algebra.errors import ExpressionError, ShardingError, SizeError
from axes.algebra.explanation import Explanation, Section
from axes.algebra.expressions import Recipe, gradient, recipe, unmoved
from axes.algebra.expressions.rules import REDUCTIONS
from axes.algebra.expressions.transpose import on_own_axes, transposed
from axes.algebra.grammar import Spec, TensorExpression
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Step, bytes_text, itemsize_of, plan
from axes.algebra.planning.candidates import COLLECTIVES
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import checked_tensor_shape
from axes.algebra.specs import marked_sharding
from axes.extension import read, shown
from axes.ops.global_view import shared_cotangent
from axes.pictures.moves import MOST, moves_of_recipe
from axes.pictures.named_sizes import shape_of_names
from axes.pictures.sent import sent_section
from axes.runtime.agreement import ranks_text

Shape = tuple[int, ...]

Sent = list[dict[str, Any]]
"""Collectives as data, in order, each with `what` it is of: an operand, the result, a gradient."""


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
    wholes = _shapes(tree, shapes, given)
    ends = [_operand(mesh, spec, shape, given) for spec, shape in zip(tree.operands, wholes, strict=True)]
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


def _shapes(tree: TensorExpression, shapes: Sequence[Sequence[int]], sizes: Mapping[str, int]) -> tuple[Shape, ...]:
    """The whole shapes of the operands: as given, or by the sizes of all names."""
    if not shapes:
        factors = [f for spec in tree.operands for dim in spec.dims for f in dim.factors]
        known = {**sizes, **{f.name: f.size for f in factors if f.name and f.size is not None}}
        return tuple(shape_of_names(spec, known, tree.text) for spec in tree.operands)
    if len(shapes) != len(tree.operands):
        raise SizeError(
            f"'{tree.text}' has {len(tree.operands)} operands, and {len(shapes)} shapes are given; give the whole "
            "shape of each, or the sizes of all names"
        )
    return tuple(map(checked_tensor_shape, shapes))


def _operand(mesh: Mesh, spec: Spec, shape: Shape, sizes: Mapping[str, int]) -> Sharding:
    """How a tensor lies that is as the left side says."""
    names = {factor.name for dim in spec.dims if dim.grouped for factor in dim.factors}
    own = tuple(sorted((name, size) for name, size in sizes.items() if name in names))
    return marked_sharding(mesh, str(spec), own, len(shape))[0].sized(shape)


# --- what is sent


def _moved(what: str, source: Sharding, target: Sharding, shape: Shape, dtype: str) -> Sent:
    """The collectives between two shardings, as the call plans them."""
    steps = () if unmoved(source, target, shape) else plan(source, target, shape, dtype=dtype).steps
    return [_as_data(what, step) for step in steps if step.kind in COLLECTIVES]


def _as_data(what: str, step: Step) -> dict[str, Any]:
    told = {"what": what, "kind": step.kind, "axes": list(step.axes), "group_size": step.group_size}
    told |= {"ranks": ranks_text(step.ranks), "time_us": step.cost}
    return told | {"bytes_in": step.bytes_in, "bytes_out": step.bytes_out}


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name} {number}" for number in range(1, count + 1)] if count > 1 else [name]


def _moves_of(subject: Recipe, dtype: str, of: str = "") -> Sent:
    """The collectives of an operation, in order."""
    arrows = zip([*_numbered("operand", len(subject.inputs)), "result"], subject.arrows, strict=True)
    return [moved for name, arrow in arrows for moved in _moved(of or name, *arrow, dtype)]


def _gradients(subject: Recipe, dtype: str) -> Sent | None:
    """What the gradients of DTensors send, for a cotangent that lies as the result, and brought to their leaves.

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
        found += _moved(f"{name} at its leaf", each.result.tensor, leaf, subject.whole(operand.groups), dtype)
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
    rows, shards = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for tensor in tensors:
        spec = tensor["spec"] + (f", that is {tensor['atoms']}" if tensor["atoms"] != tensor["spec"] else "")
        rows.append((tensor["name"], f"{tensor['shape']} {dtype}", spec))
        largest = bytes_text(tensor["largest_shard_bytes"])
        shards.append((tensor["name"], str(tensor["local_shape"]), f"at most {largest} on a rank"))
    named = " ".join(f"{name}={size}" for name, size in facts["sizes"].items())
    rows += [("sizes", named)] if named else []
    rows += [("mesh", f"{mesh.declaration}, seen from rank {mesh.rank}")]
    sections = [Section("read as", tuple(rows)), Section("shards", tuple(shards))]
    sections += [
        sent_section(_TITLES[name], [(each, each["what"]) for each in found])
        for name, found in sent.items()
        if found is not None
    ]
    drawn = mesh.size <= MOST and all(subject.sizes.values())
    drawing = functools.partial(moves_of_recipe, subject, dtype) if drawn else None
    return Explanation(f'{subject.kind} "{subject.text}"', tuple(sections), facts, drawing)


_TITLES = {
    "communication": "communication",
    "backward": "backward, of DTensors: the result's gradient lies as the result",
    "backward_of_shards": "backward, of plain shards: the sum of all ranks' losses",
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
