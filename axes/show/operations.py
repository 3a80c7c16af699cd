"""What an expression does, without doing it: sizes, local work, collectives with bytes and time, groups, gradients.

    found = explained_operation("b s@tp d -> b s d@tp", [(8, 2048, 4096)], Mesh("dp=4 tp=2"), "bfloat16")

Everything is read off the recipe, the local computation and the plans that a call of the operation makes for
itself; of the local computation it is noted what torch does with tensors on `meta`. No process group is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

from axes.algebra.errors import ExpressionError, ShardingError, SizeError, shortened
from axes.algebra.explanation import Explanation, Section
from axes.algebra.expressions import Recipe, gradient, recipe, unmoved
from axes.algebra.expressions.rules import REDUCTIONS
from axes.algebra.grammar import Spec, TensorExpression
from axes.algebra.layout import Universe
from axes.algebra.mesh import Mesh
from axes.algebra.placements import sharding_from
from axes.algebra.plan import Step, bytes_text, itemsize_of, plan
from axes.algebra.planning.candidates import COLLECTIVES
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import checked_tensor_shape, given_sizes
from axes.algebra.specs import marked_sharding
from axes.extension import read, shown
from axes.ops.global_view import shared_cotangent
from axes.ops.recipes import BoundRecipe, computed_shapes, local_computation
from axes.ops.regions import expanded, region_of_shardings, result_sharding
from axes.runtime import torch_private
from axes.runtime.agreement import ranks_text
from axes.runtime.gradients import cotangent, on_own_axes, transposed
from axes.runtime.groups import process_groups
from axes.show.moves import MOST, moves_of_recipe
from axes.show.named_sizes import shape_of_names
from axes.show.rank_text import time_text

Shape = tuple[int, ...]

Moved = tuple[str, Step]
"""A step of a plan, and of what it is part: of an operand, the result, a gradient."""

KINDS = ("rearrange", "reduce", "repeat", "einsum", "reshard", "shard_map")
"""What an expression can be explained as."""

_LISTED = 256
"""Up to so many ranks, the shape of each one's tile is looked at."""


def explained_operation(
    expression: str,
    shapes: Sequence[Sequence[int]],
    mesh: Mesh,
    dtype: str = "float32",
    op: str = "sum",
    kind: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Explanation:
    """What the operation of an expression does to tensors of these whole shapes.

    Without `shapes`, they follow from `sizes`. Raises what the operation itself raises, and `ExpressionError` for an
    expression of another `kind` than is asked for.

    >>> found = explained_operation("b s@tp d -> b s d", [(8, 64, 32)], Mesh("tp=2"))
    >>> [(row["kind"], row["axes"], row["bytes_in"]) for row in found.json()["communication"]]
    [('all_gather', ['tp'], 32768)]
    """
    tree, given = read(expression), dict(sizes or {})
    if tree.results is None:
        raise ExpressionError(
            "an expression to explain has two sides, like 'b s@tp d -> b s d'", expression, 0, len(expression)
        )
    if not (isinstance(op, str) and op in REDUCTIONS):
        raise ShardingError(f"explain knows the reductions {', '.join(REDUCTIONS)}; found {shown(op)}")
    itemsize_of(dtype)
    what = _kind(tree, kind)
    wholes = _shapes(tree, shapes, given)
    ends = [_operand(mesh, spec, shape, given) for spec, shape in zip(tree.operands, wholes, strict=True)]
    if what == "shard_map":
        return _of_region(tree, mesh, ends, wholes, dtype, given)
    how = "rearrange" if what == "reshard" else what
    reduced = {"reduce": op, "einsum": "sum"}.get(how, "")
    # What the text says of gradients, `same`, is about plain shards alone.
    alone = any(p.op == "same" for spec in (*tree.operands, *tree.results) for p in spec.pending or ())
    tensors = [None] * len(ends) if alone else ends
    held = [end.local_shape(shape) for end, shape in zip(ends, wholes, strict=True)] if alone else wholes
    subject = recipe(how, expression, reduced, tuple(tensors), tuple(held), mesh, tuple(given.items()))
    return _of_recipe(what, subject, alone, dtype)


# --- what the expression is, and of which tensors


def _kind(tree: TensorExpression, wanted: str | None) -> str:
    """The operation that an expression is of; `wanted`, where it can be that."""
    results = tree.results or ()
    if wanted is not None and not (isinstance(wanted, str) and wanted in KINDS):
        raise ExpressionError(
            f"kind is one of {', '.join(KINDS)}; found "
            f"{shortened(wanted) if isinstance(wanted, str) else type(wanted).__name__}"
        )
    if wanted == "shard_map" or (wanted is None and len(results) != 1):
        return "shard_map"
    left, right = _names(tree.operands[0]), _names(results[0])
    found = "reduce" if {*left} - {*right} else "repeat" if {*right} - {*left} else "rearrange"
    if len(tree.operands) > 1 or wanted == "einsum" or len({*left}) < len(left) or len({*right}) < len(right):
        found = "einsum"
    if wanted not in (None, found) and (wanted, found) != ("reshard", "rearrange"):
        one = "an einsum" if found == "einsum" else f"a {found}"
        raise ExpressionError(f"this is {one}, and kind='{wanted}' is asked for", tree.text, 0, len(tree.text))
    return wanted or found


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
    if any(p.op == "*" for p in spec.pending or ()):
        raise ShardingError(f"'| *' is what a tensor has pending, and here is none; write what is, as in '{spec}'")
    if any("*" in place.names for d in spec.dims for place in (d.place, *(f.place for f in d.factors)) if place):
        raise ShardingError(f"a '*' left of '->' is the split that a tensor has, and here is none; write it: '{spec}'")
    names = {factor.name for dim in spec.dims if dim.grouped for factor in dim.factors}
    own = tuple(sorted((name, size) for name, size in sizes.items() if name in names))
    return marked_sharding(mesh, str(spec), own, len(shape))[0].sized(shape)


# --- what moves


def _moved(part: str, source: Sharding, target: Sharding, shape: Shape, dtype: str) -> list[Moved]:
    """The steps between two shardings, as the call plans them."""
    steps = () if unmoved(source, target, shape) else plan(source, target, shape, dtype=dtype).steps
    return [(part, step) for step in steps]


def _moves_of(subject: Recipe, dtype: str, of: str = "") -> list[Moved]:
    """The steps of an operation, in order."""
    count = len(subject.inputs)
    parts = [f"operand {number}" for number in range(1, count + 1)] if count > 1 else ["operand"]
    arrows = zip([*parts, "result"], subject.arrows, strict=True)
    return [moved for part, arrow in arrows for moved in _moved(of or part, *arrow, dtype)]


def _gradients(subject: Recipe, dtype: str) -> list[Moved] | None:
    """What the gradients of DTensors send, for a cotangent that lies as the result, and brought to their leaves.

    What the result has pending has a replicated cotangent. None where the gradient is no recipe: those of a maximum, a
    product or a function are computed on shards.
    """
    if subject.kind == "reduce" and subject.op not in ("sum", "mean"):
        return None
    arrived, count = replace(subject.result.tensor, pending=()), len(subject.inputs)
    found: list[Moved] = []
    recipes = [gradient(subject, index, arrived) for index in range(count)]
    target = shared_cotangent(recipes) if count > 1 else None
    if target is not None:
        found += _moved("cotangent", arrived, target, subject.whole(subject.result.groups), dtype)
        recipes = [gradient(subject, index, target) for index in range(count)]
    for number, (each, operand) in enumerate(zip(recipes, subject.inputs, strict=True), 1):
        name = f"gradient {number}" if count > 1 else "gradient"
        leaf = replace(operand.tensor, pending=())
        found += _moves_of(each, dtype, name)
        found += _moved(f"{name} at its leaf", each.result.tensor, leaf, subject.whole(operand.groups), dtype)
    return found


def _gradients_of_shards(subject: Recipe, dtype: str) -> list[Moved] | None:
    """What the gradients of plain shards send, each rank's loss one summand; None for a maximum across ranks."""
    if any(op in ("max", "min") for source, *_ in subject.moves for op, _ in source.pending):
        return None
    ends = [(*transposed(*on_own_axes(source, target))[:2], shape) for source, target, shape in subject.moves]
    return [moved for end in reversed(ends) for moved in _moved("gradient", *end, dtype)]


# --- what is computed


class _Computed(torch_private.DispatchMode):
    """What torch does while it is open, but for views: `(operation, shapes, shape of the result, FLOP)`."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not torch_private.is_view(func) and isinstance(out, torch.Tensor):
            listed = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else [arg])]
            count = flop_registry.get(func.overloadpacket)
            self.done.append(
                {
                    "op": str(func.overloadpacket),
                    "inputs": [list(x.shape) for x in listed if isinstance(x, torch.Tensor)],
                    "output": list(out.shape),
                    "flop": int(count(*args, **(kwargs or {}), out_val=out)) if count else 0,
                }
            )
        return out


def _local_work(subject: Recipe, dtype: str) -> list[dict[str, Any]]:
    """What this rank computes, as torch's operations on shards; `SizeError` for more bytes than torch can count."""
    if subject.mesh.coordinate is None:
        return []
    made = BoundRecipe(subject)
    try:
        given = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape in computed_shapes(made)]
        with torch.no_grad(), _Computed() as computed:
            local_computation(made)(*given)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise SizeError("a tensor that is computed would have 2**63 bytes or more, which torch can't count") from None
    return computed.done


# --- what is said


def _of_recipe(kind: str, subject: Recipe, alone: bool, dtype: str) -> Explanation:
    """The explanation of an operation; `alone`: of plain shards alone."""
    many, result = len(subject.inputs) > 1, subject.result
    names = [f"operand {at}" if many else "operand" for at in range(1, len(subject.inputs) + 1)]
    tensors = [
        _tensor(name, each.tensor, subject.whole(each.groups), dtype, each.elementary.spec)
        for name, each in zip([*names, "result"], [*subject.inputs, result], strict=True)
    ]
    sizes = {name: size for name, size in subject.sizes.items() if name.isidentifier()}
    work, forward = _local_work(subject, dtype), _moves_of(subject, dtype)
    backward = None if alone else _gradients(subject, dtype)
    of_each = _gradients_of_shards(subject, dtype)
    drawn = subject.mesh.size <= MOST and subject.mesh.coordinate is not None and all(subject.sizes.values())
    titles = {
        "backward, of DTensors: the result's gradient lies as the result": backward,
        "backward, of plain shards: the sum of all ranks' losses": of_each,
    }
    sections = [
        Section("local work", tuple(map(_work_row, work)) or (("nothing: views alone",),)),
        _communication("communication", forward),
        *(_communication(title, moved) for title, moved in titles.items() if moved is not None),
    ]
    facts = _facts(kind, subject.text, subject.mesh, dtype, sizes, tensors, work, forward, backward, of_each)
    return _explained(facts, sections, functools.partial(moves_of_recipe, subject, dtype) if drawn else None)


def _of_region(
    tree: TensorExpression,
    mesh: Mesh,
    ends: Sequence[Sharding],
    shapes: Sequence[Shape],
    dtype: str,
    sizes: dict[str, int],
) -> Explanation:
    """The explanation of a region: its border moves nothing but gradients."""
    names = {name for spec in (*tree.operands, *(tree.results or ())) for name in _names(spec)}
    given_sizes(sizes, None, (), sorted(names), f"'{tree.text}'")
    region = region_of_shardings(tree.text, mesh, ends, shapes)
    known, tensors, backward = {**sizes, **region.sizes}, [], list[Moved]()
    for number, each in enumerate(region.inputs, 1):
        tensors.append(_tensor(f"tensor {number}", each.sharding, each.shape, dtype))
        arriving = cotangent(sharding_from(mesh, each.counted, len(each.shape))).sized(each.shape)
        leaf = replace(each.sharding, pending=())
        backward += _moved(f"gradient {number} at its leaf", arriving, leaf, each.shape, dtype)
    for number, spec in enumerate(region.reading.outputs, 1):
        shape = shape_of_names(spec, known, tree.text)
        lies, _ = result_sharding(region, spec, expanded(spec, len(shape), f"result {number}"))
        tensors.append(_tensor(f"result {number}", lies.sized(shape), shape, dtype))
    sections = [
        Section("communication", (("the border sends nothing; what the function sends is said by explain(fn, ...)",),)),
        _communication("backward, of gradients that each rank has a summand of", backward),
    ]
    return _explained(_facts("shard_map", tree.text, mesh, dtype, known, tensors, [], [], backward, None), sections)


def _facts(
    kind: str,
    text: str,
    mesh: Mesh,
    dtype: str,
    sizes: Mapping[str, int],
    tensors: Sequence[Mapping[str, Any]],
    work: Sequence[Mapping[str, Any]],
    forward: Sequence[Moved],
    backward: Sequence[Moved] | None,
    of_each: Sequence[Moved] | None,
) -> dict[str, Any]:
    """All that is told of an operation, as data."""
    return {
        "kind": kind,
        "expression": text,
        "mesh": mesh.declaration,
        "rank": mesh.rank,
        "dtype": dtype,
        "sizes": dict(sizes),
        "tensors": tensors,
        "local_work": work,
        "communication": [_step(*each) for each in forward],
        "bytes_in": sum(step.bytes_in for _, step in forward),
        "time_us": sum(step.cost for _, step in forward),
        "backward": None if backward is None else [_step(*each) for each in backward],
        "backward_of_shards": None if of_each is None else [_step(*each) for each in of_each],
        "groups": _groups(mesh, [*forward, *(backward or ()), *(of_each or ())]),
    }


def _explained(facts: dict[str, Any], sections: Sequence[Section], drawing: Any = None) -> Explanation:
    """The same as text: how it is read, the shards, what is special to the kind, and the groups."""
    read_as, shards, groups = [], [], []
    for tensor in facts["tensors"]:
        spec = tensor["spec"] + (f", that is {tensor['atoms']}" if tensor["atoms"] != tensor["spec"] else "")
        read_as.append((tensor["name"], f"{tensor['shape']} {facts['dtype']}", spec))
        shapes = "; ".join(f"{each['shape']} on {each['ranks']}" for each in tensor["local"])
        shards.append((tensor["name"], f"{shapes}, at most {bytes_text(tensor['largest_shard_bytes'])}"))
    named = " ".join(f"{name}={size}" for name, size in facts["sizes"].items() if name.isidentifier())
    rows = [*read_as, *([("sizes", named)] if named else [])]
    rows.append(("mesh", f"{facts['mesh']}, seen from rank {facts['rank']}"))
    for each in facts["groups"]:
        also = f"; also called {', '.join(each['also'])}" if each["also"] else ""
        made = f"there already, as {', '.join(each['made_as']) or 'the default group'}" if each["exists"] else "new"
        groups.append((" ".join(each["axes"]), f"{each['size']} ranks", f"{each['ranks']}; {made}{also}"))
    first = Section("read as", tuple(rows)), Section("shards", tuple(shards))
    last = Section("groups, by the one that this rank is in", tuple(groups))
    every = tuple(section for section in (*first, *sections, last) if section.rows)
    return Explanation(f'{facts["kind"]} "{facts["expression"]}"', every, facts, drawing)


def _step(part: str, step: Step) -> dict[str, Any]:
    """A step as data."""
    said = {"part": part, "kind": step.kind, "axes": list(step.axes), "group_size": step.group_size}
    ranks = ranks_text(step.ranks) if step.kind in COLLECTIVES else ""
    return said | {"ranks": ranks, "bytes_in": step.bytes_in, "bytes_out": step.bytes_out, "time_us": step.cost}


def _step_row(part: str, step: Step) -> tuple[str, ...]:
    """A step as text."""
    if step.kind not in COLLECTIVES:
        return (step.kind, "", "", "no communication", "", part)
    moved = f"{bytes_text(step.bytes_in)} in, {bytes_text(step.bytes_out)} out"
    return (step.kind, " ".join(step.axes), f"{step.group_size} ranks", moved, time_text(step.cost), part)


def _communication(title: str, moved: Sequence[Moved]) -> Section:
    rows = [_step_row(*each) for each in moved]
    if sum(step.kind in COLLECTIVES for _, step in moved) > 1:
        received, time = sum(step.bytes_in for _, step in moved), sum(step.cost for _, step in moved)
        rows.append((f"in all {bytes_text(received)} in, {time_text(time)}",))
    return Section(title, tuple(rows) or (("nothing is sent",),))


def _tensor(name: str, sharding: Sharding, shape: Shape, dtype: str, atoms: str = "") -> dict[str, Any]:
    """A tensor as data. `local` has each shape that a shard has, and the ranks that have it."""
    return {
        "name": name,
        "spec": sharding.spec,
        "atoms": atoms or sharding.spec,
        "shape": list(shape),
        "largest_shard_bytes": sharding.largest_tile(shape) * itemsize_of(dtype),
        "local": [{"shape": list(local), "ranks": ranks} for local, ranks in _by_rank(sharding, shape)],
    }


def _by_rank(sharding: Sharding, shape: Shape) -> list[tuple[Shape, str]]:
    """Each shape that shards have, and the ranks that have it: of many ranks with uneven shards, this rank's."""
    mesh, found = sharding.mesh, dict[Shape, list[int]]()
    even, few = sharding.divides(shape), mesh.size <= _LISTED
    ranks = mesh.universe.group(mesh.layout_of_all, mesh.rank) if few and not even else [mesh.rank]
    for rank in ranks:
        found.setdefault(sharding.local_shape(shape, rank), []).append(rank)
    if len(found) == 1:
        told = "every rank" if even or few else f"rank {mesh.rank}, others differ"
        return [(local, told) for local in found]
    return [(local, ranks_text(Universe.of(having).ranks)) for local, having in found.items()]


def _work_row(work: Mapping[str, Any]) -> tuple[str, ...]:
    taken = " x ".join(map(str, work["inputs"]))
    return work["op"], f"{count_text(work['flop'])}FLOP" if work["flop"] else "", f"{taken} -> {work['output']}"


def _groups(mesh: Mesh, moved: Iterable[Moved]) -> list[dict[str, Any]]:
    """The groups that the steps use, each once: is there one already, and what else is called so?"""
    there = {tuple(info.ranks): info for info in process_groups()} if dist.is_initialized() and mesh.binding else {}
    found = {}
    for _, step in moved:
        if step.kind in COLLECTIVES and step.layout is not None:
            known = there.get(tuple(step.ranks))
            found[step.axes] = {
                "axes": list(step.axes),
                "size": step.group_size,
                "ranks": ranks_text(step.ranks),
                "also": [n for n, layout in mesh.namespace.items() if layout == step.layout and (n,) != step.axes],
                "exists": known is not None,
                "made_as": [] if known is None else list(known.names),
            }
    return list(found.values())


def count_text(count: int) -> str:
    """A large number with its power of a thousand.

    >>> count_text(999), count_text(12_300_000_000)
    ('999 ', '12.3 G')
    """
    power = min(5, (len(str(count)) - 1) // 3)
    return f"{count} " if power == 0 else f"{count / 1000**power:.1f} {'kMGTP'[power - 1]}"
