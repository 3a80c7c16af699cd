"""What an expression does, without doing it: sizes, local work, collectives with bytes and time, groups, gradients.

    found = explained_operation("b s@tp d -> b s d@tp", [(8, 2048, 4096)], Mesh("dp=4 tp=2"), "bfloat16")

Everything is read off the recipe, the local computation and the plans that a call of the operation makes for
itself; of the local computation it is noted what torch does with tensors on `meta`. No process group is needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

from axes.algebra.errors import ExpressionError, ShardingError, SizeError, shortened, shown
from axes.algebra.explanation import Explanation, Section
from axes.algebra.expressions import Recipe, gradient, recipe, unmoved
from axes.algebra.expressions.rules import REDUCTIONS
from axes.algebra.grammar import Dim, Spec, TensorExpression, parse_tensor
from axes.algebra.layout import Universe
from axes.algebra.mesh import Mesh
from axes.algebra.placements import sharding_from
from axes.algebra.plan import Step, bytes_text, itemsize_of, plan, time_text
from axes.algebra.planning.candidates import COLLECTIVES
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import checked_tensor_shape, given_sizes
from axes.algebra.specs import marked_sharding
from axes.ops.global_view import shared_cotangent
from axes.ops.recipes import BoundRecipe, computed_shapes, local_computation
from axes.ops.regions import Region, expanded, key_of, region_of_shardings, result_sharding
from axes.runtime import torch_private
from axes.runtime.agreement import ranks_text
from axes.runtime.gradients import cotangent, on_own_axes, transposed
from axes.runtime.groups import process_groups
from axes.show.picture import MOST, of_recipe

Shape = tuple[int, ...]

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
    tree = parse_tensor(expression)
    if tree.results is None:
        raise ExpressionError(
            "an expression to explain has two sides, like 'b s@tp d -> b s d'", expression, 0, len(expression)
        )
    if not (isinstance(op, str) and op in REDUCTIONS):
        raise ShardingError(f"explain knows the reductions {', '.join(REDUCTIONS)}; found {shown(op)}")
    itemsize_of(dtype)
    given = dict(sizes or {})
    what = _kind(tree, kind)
    wholes = _shapes(tree, shapes, given)
    ends = [_operand(mesh, spec, shape, given) for spec, shape in zip(tree.operands, wholes, strict=True)]
    if what == "shard_map":
        return _of_region(tree, mesh, ends, wholes, dtype, given)
    of_shards_alone = _says_same(tree)
    if of_shards_alone:
        tensors: list[Sharding | None] = [None] * len(ends)
        shapes = [end.local_shape(shape) for end, shape in zip(ends, wholes, strict=True)]
    else:
        tensors, shapes = list(ends), wholes
    how = "rearrange" if what == "reshard" else what
    subject = recipe(
        how,
        expression,
        {"reduce": op, "einsum": "sum"}.get(how, ""),
        tuple(tensors),
        tuple(map(tuple, shapes)),
        mesh,
        tuple(given.items()),
    )
    return _of_recipe(what, subject, of_shards_alone, dtype)


# --- what the expression is, and of which tensors


def _kind(tree: TensorExpression, wanted: str | None) -> str:
    """The operation that an expression is of; `wanted`, where it can be that."""
    results = tree.results or ()
    if wanted is not None and not (isinstance(wanted, str) and wanted in KINDS):
        found = shortened(wanted) if isinstance(wanted, str) else type(wanted).__name__
        raise ExpressionError(f"kind is one of {', '.join(KINDS)}; found {found}")
    if wanted == "shard_map" or (wanted is None and len(results) != 1):
        return "shard_map"
    if len(tree.operands) > 1 or wanted == "einsum":
        found = "einsum"
    else:
        left, right = _names(tree.operands[0]), _names(results[0])
        found = "reduce" if set(left) - set(right) else "repeat" if set(right) - set(left) else "rearrange"
        if len(set(left)) < len(left) or len(set(right)) < len(right):
            found = "einsum"
    if wanted not in (None, found) and (wanted, found) != ("reshard", "rearrange"):
        raise ExpressionError(
            f"this is {_article(found)}, and kind='{wanted}' is asked for", tree.text, 0, len(tree.text)
        )
    return wanted or found


def _article(kind: str) -> str:
    return f"an {kind}" if kind == "einsum" else f"a {kind}"


def _names(spec: Spec) -> list[str]:
    """The names of a spec; a number that isn't 1 counts as one, since it comes or goes."""
    factors = [factor for dim in spec.dims for factor in dim.factors]
    return [f.name or f"#{f.size}" for f in factors if f.name is not None or f.size not in (None, 1)]


def _shapes(tree: TensorExpression, shapes: Sequence[Sequence[int]], sizes: Mapping[str, int]) -> tuple[Shape, ...]:
    """The whole shapes of the operands: as given, or by the sizes of all names."""
    if shapes:
        if len(shapes) != len(tree.operands):
            raise SizeError(
                f"'{tree.text}' has {len(tree.operands)} operands, and {len(shapes)} shapes are given; give the whole "
                "shape of each, or the sizes of all names"
            )
        return tuple(checked_tensor_shape(shape) for shape in shapes)
    factors = [f for spec in tree.operands for dim in spec.dims for f in dim.factors]
    written = {f.name: f.size for f in factors if f.size is not None}
    known = {**sizes, **{name: size for name, size in written.items() if name is not None}}
    return tuple(tuple(_extent(tree, dim, known) for dim in spec.dims) for spec in tree.operands)


def _extent(tree: TensorExpression, dim: Dim, sizes: Mapping[str, int]) -> int:
    unknown = [f.name for f in dim.factors if f.size is None and f.name is not None and f.name not in sizes]
    if any(name in ("...", "_") for name in unknown):
        raise SizeError(
            f"'{dim}' in '{tree.text}' has no name for a size: name the dim, or give the whole shape of each operand"
        )
    if unknown:
        raise SizeError(
            f"the size of {shortened(unknown[0])} is open in '{tree.text}': give it, like explain(..., "
            f"{unknown[0]}=8), or the whole shape of each operand, like explain(..., (8, 2048, 4096))"
        )
    return math.prod(sizes[f.name] if f.size is None and f.name is not None else f.size or 1 for f in dim.factors)


def _operand(mesh: Mesh, spec: Spec, shape: Shape, sizes: Mapping[str, int]) -> Sharding:
    """How a tensor lies that is as the left side says."""
    if any(p.op == "*" for p in spec.pending or ()):
        raise ShardingError(f"'| *' is what a tensor has pending, and here is none; write what is, as in '{spec}'")
    if any("*" in place.names for d in spec.dims for place in (d.place, *(f.place for f in d.factors)) if place):
        raise ShardingError(f"a '*' left of '->' is the split that a tensor has, and here is none; write it: '{spec}'")
    names = {factor.name for dim in spec.dims if dim.grouped for factor in dim.factors}
    own = tuple(sorted((name, size) for name, size in sizes.items() if name in names))
    return marked_sharding(mesh, str(spec), own, len(shape))[0].sized(shape)


def _says_same(tree: TensorExpression) -> bool:
    """Whether the text is about gradients of plain shards."""
    return any(p.op == "same" for spec in (*tree.operands, *(tree.results or ())) for p in spec.pending or ())


# --- what moves


@dataclass(frozen=True)
class Moved:
    """A step of a plan, and of what it is part: of an operand, the result, a gradient."""

    part: str
    step: Step

    @property
    def row(self) -> tuple[str, ...]:
        """The step as text."""
        step = self.step
        if step.kind not in COLLECTIVES:
            return (step.kind, "", "", "no communication", "", self.part)
        moved = f"{bytes_text(step.bytes_in)} in, {bytes_text(step.bytes_out)} out"
        return (step.kind, " ".join(step.axes), f"{step.group_size} ranks", moved, time_text(step.cost), self.part)

    @property
    def facts(self) -> dict[str, Any]:
        """The step as data."""
        step = self.step
        return {
            "part": self.part,
            "kind": step.kind,
            "axes": list(step.axes),
            "group_size": step.group_size,
            "ranks": ranks_text(step.ranks) if step.kind in COLLECTIVES else "",
            "bytes_in": step.bytes_in,
            "bytes_out": step.bytes_out,
            "time_us": step.cost,
        }


def _moved(part: str, source: Sharding, target: Sharding, shape: Shape, dtype: str) -> list[Moved]:
    """The steps between two shardings, as the call plans them."""
    if unmoved(source, target, shape):
        return []
    made = plan(source, target, shape, dtype=dtype)
    return [Moved(part, step) for step in made.steps]


def _moves_of(subject: Recipe, dtype: str, of: str = "") -> list[Moved]:
    """The steps of an operation, in order."""
    many = len(subject.inputs) > 1
    found: list[Moved] = []
    for number, arrow in enumerate(subject.arrows):
        part = of or ("result" if number == len(subject.inputs) else f"operand {number + 1}" if many else "operand")
        found += _moved(part, *arrow, dtype)
    return found


def _gradients(subject: Recipe, dtype: str) -> list[Moved]:
    """What the gradients of DTensors send, for a cotangent that lies as the result, and brought to their leaves.

    What the result has pending has a replicated cotangent.
    """
    arrived = replace(subject.result.tensor, pending=())
    found: list[Moved] = []
    recipes = [gradient(subject, index, arrived) for index in range(len(subject.inputs))]
    target = shared_cotangent(recipes) if len(recipes) > 1 else None
    if target is not None:
        found += _moved("cotangent", arrived, target, subject.whole(subject.result.groups), dtype)
        recipes = [gradient(subject, index, target) for index in range(len(subject.inputs))]
    for index, (each, operand) in enumerate(zip(recipes, subject.inputs, strict=True)):
        name = f"gradient {index + 1}" if len(recipes) > 1 else "gradient"
        found += _moves_of(each, dtype, name)
        leaf = replace(operand.tensor, pending=())
        found += _moved(f"{name} at its leaf", each.result.tensor, leaf, subject.whole(operand.groups), dtype)
    return found


def _has_gradient(subject: Recipe) -> bool:
    """Whether the gradient is a recipe: those of a maximum, a product or a function are computed on shards."""
    return subject.kind != "reduce" or subject.op in ("sum", "mean")


def _gradients_of_shards(subject: Recipe, dtype: str) -> list[Moved] | None:
    """What the gradients of plain shards send, each rank's loss one summand; None for a maximum across ranks."""
    found: list[Moved] = []
    for source, target, shape in reversed(subject.moves):
        if any(op in ("max", "min") for op, _ in source.pending):
            return None
        arriving, middle, _ = transposed(*on_own_axes(source, target))
        found += _moved("gradient", arriving, middle, shape, dtype)
    return found


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
    """What this rank computes, as torch's operations on shards."""
    if subject.mesh.coordinate is None:
        return []
    made = BoundRecipe(subject)
    return _computed(local_computation(made), computed_shapes(made), dtype)


def _computed(run: Callable[..., Any], shapes: Iterable[Shape], dtype: str) -> list[dict[str, Any]]:
    """What torch does when this runs on tensors of these shapes; `SizeError` for more bytes than it can count."""
    try:
        given = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape in shapes]
        with torch.no_grad(), _Computed() as computed:
            run(*given)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise SizeError("a tensor that is computed would have 2**63 bytes or more, which torch can't count") from None
    return computed.done


# --- what is said


def _of_recipe(kind: str, subject: Recipe, of_shards_alone: bool, dtype: str) -> Explanation:
    """The explanation of an operation."""
    many = len(subject.inputs) > 1
    names = [f"operand {at + 1}" if many else "operand" for at in range(len(subject.inputs))]
    tensors = [
        _tensor(name, i.tensor, subject.whole(i.groups), dtype, i.elementary.spec)
        for name, i in zip(names, subject.inputs, strict=True)
    ]
    result = subject.result
    tensors.append(_tensor("result", result.tensor, subject.whole(result.groups), dtype, result.elementary.spec))
    backward = _gradients(subject, dtype) if _has_gradient(subject) and not of_shards_alone else None
    drawn = subject.mesh.size <= MOST and subject.mesh.coordinate is not None and all(subject.size.values())
    return _explained(
        f'{kind} "{subject.text}"',
        {"kind": kind, **_said_of(subject.text, subject.mesh, dtype)},
        subject.mesh,
        {name: size for name, size in subject.sizes if name.isidentifier()},
        tensors,
        _local_work(subject, dtype),
        _moves_of(subject, dtype),
        backward,
        _gradients_of_shards(subject, dtype),
        functools.partial(_picture, subject, dtype) if drawn else None,
    )


def _explained(
    heading: str,
    said: dict[str, Any],
    mesh: Mesh,
    sizes: Mapping[str, int],
    tensors: Sequence[Mapping[str, Any]],
    work: Sequence[Mapping[str, Any]],
    forward: Sequence[Moved],
    backward: Sequence[Moved] | None,
    of_each: Sequence[Moved] | None,
    drawing: Callable[[], str] | None,
) -> Explanation:
    """All that is told of an operation, as sections and as data."""
    sections = [
        _read(mesh, tensors, sizes, said["dtype"]),
        _on_ranks(tensors),
        Section("local work", _work_rows(work)),
        _communication("communication", forward),
    ]
    if backward is not None:
        sections.append(_communication("backward, of DTensors: the result's gradient lies as the result", backward))
    if of_each is not None:
        sections.append(_communication("backward, of plain shards: the sum of all ranks' losses", of_each))
    groups = _groups(mesh, [*forward, *(backward or ()), *(of_each or ())])
    sections.append(_groups_section(groups))
    facts = {
        **said,
        "sizes": dict(sizes),
        "tensors": tensors,
        "local_work": work,
        **_totals(forward),
        "backward": None if backward is None else [each.facts for each in backward],
        "backward_of_shards": None if of_each is None else [each.facts for each in of_each],
        "groups": groups,
    }
    return Explanation(heading, tuple(s for s in sections if s.rows), facts, drawing)


def _picture(subject: Recipe, dtype: str) -> str:
    """What moves, rank by rank, in a width that fits a screen."""
    svg = of_recipe(subject, dtype)
    told = "; ".join(" ".join(filter(None, each.row)) for each in _moves_of(subject, dtype)) or "nothing moves"
    svg = svg.replace(' role="img">', ' role="img" style="max-width:100%;height:auto">', 1)
    return svg.replace("</title>", f"</title>\n<desc>{escape(told)}</desc>", 1)


def _said_of(text: str, mesh: Mesh, dtype: str) -> dict[str, Any]:
    return {"expression": text, "mesh": mesh.declaration, "rank": mesh.rank, "dtype": dtype}


def _totals(forward: Sequence[Moved]) -> dict[str, Any]:
    return {
        "communication": [each.facts for each in forward],
        "bytes_in": sum(each.step.bytes_in for each in forward),
        "time_us": sum(each.step.cost for each in forward),
    }


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
    mesh = sharding.mesh
    if sharding.divides(shape):
        return [(sharding.local_shape(shape), "every rank")]
    if mesh.size > _LISTED:
        return [(sharding.local_shape(shape), f"rank {mesh.rank}, others differ")]
    found: dict[Shape, list[int]] = {}
    for rank in mesh.universe.group(mesh.layout_of_all, mesh.rank):
        found.setdefault(sharding.local_shape(shape, rank), []).append(rank)
    if len(found) == 1:
        return [(shape, "every rank") for shape in found]
    return [(local, ranks_text(Universe.of(ranks).ranks)) for local, ranks in found.items()]


def _read(mesh: Mesh, tensors: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], dtype: str) -> Section:
    rows: list[tuple[str, ...]] = []
    for tensor in tensors:
        spec = tensor["spec"] if tensor["atoms"] == tensor["spec"] else f"{tensor['spec']}, that is {tensor['atoms']}"
        rows.append((tensor["name"], f"{tensor['shape']} {dtype}", spec))
    named = " ".join(f"{name}={size}" for name, size in sizes.items() if name.isidentifier())
    rows += [("sizes", named)] if named else []
    return Section("read as", (*rows, ("mesh", f"{mesh.declaration}, seen from rank {mesh.rank}")))


def _on_ranks(tensors: Sequence[Mapping[str, Any]]) -> Section:
    rows = []
    for tensor in tensors:
        largest = bytes_text(tensor["largest_shard_bytes"])
        shapes = "; ".join(f"{each['shape']} on {each['ranks']}" for each in tensor["local"])
        rows.append((tensor["name"], f"{shapes}, at most {largest}"))
    return Section("shards", tuple(rows))


def _work_rows(work: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    rows = []
    for each in work:
        taken = " x ".join(str(shape) for shape in each["inputs"])
        rows.append(
            (each["op"], f"{count_text(each['flop'])}FLOP" if each["flop"] else "", f"{taken} -> {each['output']}")
        )
    return tuple(rows) or (("nothing: views alone",),)


def _communication(title: str, moved: Sequence[Moved]) -> Section:
    rows = tuple(each.row for each in moved)
    received = sum(each.step.bytes_in for each in moved)
    if sum(each.step.kind in COLLECTIVES for each in moved) > 1:
        rows += ((f"in all {bytes_text(received)} in, {time_text(sum(each.step.cost for each in moved))}",),)
    return Section(title, rows or (("nothing is sent",),))


def _groups(mesh: Mesh, moved: Iterable[Moved]) -> list[dict[str, Any]]:
    """The groups that the steps use, each once: is there one already, and what else is called so?"""
    there = {tuple(info.ranks): info for info in process_groups()} if dist.is_initialized() and mesh.binding else {}
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for each in moved:
        step = each.step
        if step.kind not in COLLECTIVES or step.axes in found or step.layout is None:
            continue
        shared = [n for n, layout in mesh.namespace.items() if layout == step.layout and (n,) != step.axes]
        known = there.get(tuple(step.ranks))
        found[step.axes] = {
            "axes": list(step.axes),
            "size": step.group_size,
            "ranks": ranks_text(step.ranks),
            "also": shared,
            "exists": known is not None,
            "made_as": [] if known is None else list(known.names),
        }
    return list(found.values())


def _groups_section(groups: Sequence[Mapping[str, Any]]) -> Section:
    rows = []
    for each in groups:
        also = f"; also called {', '.join(each['also'])}" if each["also"] else ""
        made = f"there already, as {', '.join(each['made_as']) or 'the default group'}" if each["exists"] else "new"
        rows.append((" ".join(each["axes"]), f"{each['size']} ranks", f"{each['ranks']}; {made}{also}"))
    return Section("groups, by the one that this rank is in", tuple(rows))


# --- regions


def _of_region(
    tree: TensorExpression,
    mesh: Mesh,
    ends: Sequence[Sharding],
    shapes: Sequence[Shape],
    dtype: str,
    sizes: dict[str, int],
) -> Explanation:
    """The explanation of a region: its border moves nothing but gradients."""
    region = region_of_shardings(tree.text, mesh, ends, shapes)
    tensors, backward = [], []
    for number, each in enumerate(region.inputs, 1):
        tensors.append(_tensor(f"tensor {number}", each.sharding, each.shape, dtype))
        arriving = cotangent(sharding_from(mesh, each.counted, len(each.shape))).sized(each.shape)
        leaf = replace(each.sharding, pending=())
        backward += _moved(f"gradient {number} at its leaf", arriving, leaf, each.shape, dtype)
    tensors += [_result(region, number, spec, dtype, sizes) for number, spec in enumerate(region.reading.outputs, 1)]
    known = {**region.sizes, **{n: size for n, size in sizes.items() if n in {f.name for f in _factors(tree)}}}
    _check_used(tree, sizes)
    groups = _groups(mesh, backward)
    sections = (
        _read(mesh, tensors, known, dtype),
        _on_ranks(tensors),
        Section("communication", (("the border sends nothing; what the function sends is said by explain(fn, ...)",),)),
        _communication("backward, of gradients that each rank has a summand of", backward),
        _groups_section(groups),
    )
    facts = {
        "kind": "shard_map",
        **_said_of(tree.text, mesh, dtype),
        "sizes": known,
        "tensors": tensors,
        "local_work": [],
        **_totals([]),
        "backward": [each.facts for each in backward],
        "backward_of_shards": None,
        "groups": groups,
    }
    return Explanation(f'shard_map "{tree.text}"', tuple(s for s in sections if s.rows), facts)


def _factors(tree: TensorExpression) -> Iterator[Any]:
    return (f for spec in (*tree.operands, *(tree.results or ())) for dim in spec.dims for f in dim.factors)


def _check_used(tree: TensorExpression, sizes: Mapping[str, int]) -> None:
    names = {factor.name for factor in _factors(tree) if factor.name}
    given_sizes(sizes, None, (), sorted(names), f"'{tree.text}'")


def _result(region: Region, number: int, spec: Spec, dtype: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """A result of a region; what its function makes says the sizes that the expression leaves open."""
    known = {**sizes, **region.sizes}
    dots = [key for key in region.splits if key.startswith("...")]
    dims = expanded(spec, len(spec.dims) - 1 + len(dots) if any(_is_open(d) for d in spec.dims) else len(spec.dims), "")
    lies, _ = result_sharding(region, spec, dims)
    shape = []
    for dim in dims:
        key = key_of(dim)
        whole = known.get(key) if key is not None else None
        if whole is None and all(f.size is not None or f.name in known for f in dim.factors):
            whole = math.prod(known[f.name] if f.size is None and f.name else f.size or 1 for f in dim.factors)
        if whole is None:
            raise SizeError(
                f"the size of {shortened(str(dim))} of result {number} is what the function makes it: say it, like "
                f"explain(..., {dim.factors[0].name}=8)"
            )
        shape.append(whole)
    return _tensor(f"result {number}", lies.sized(shape), tuple(shape), dtype)


def _is_open(dim: Dim) -> bool:
    return any(factor.name == "..." for factor in dim.factors)


# --- amounts


def count_text(count: int) -> str:
    """A large number with its power of a thousand.

    >>> count_text(999), count_text(12_300_000_000)
    ('999 ', '12.3 G')
    """
    power = min(5, (len(str(count)) - 1) // 3)
    return f"{count} " if power == 0 else f"{count / 1000**power:.1f} {'kMGTP'[power - 1]}"
