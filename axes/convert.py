"""Converters: JAX's partition specs, logical axis rules and transformers' `tp_plan`, to axes and back.

| from | to axes | and back |
| --- | --- | --- |
| `PartitionSpec` of JAX | `from_partition_spec` | `to_partition_spec` |
| logical axis rules of Flax, T5X and MaxText | `from_logical_rules` | `to_logical_rules` |
| `tp_plan` of transformers | `from_tp_plan` | `to_tp_plan` |

>>> from_partition_spec(("dp", None, ("cp", "tp")), "batch seq embed")
'batch@dp seq embed@(cp tp)'

Neither JAX nor transformers is imported: what they write is read as tuples and dicts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from axes.algebra.errors import ShardingError, pointed, shown
from axes.algebra.grammar import Dim, Place, Spec, checked_spec, dim_places, has_dots, parse_spec, place_text
from axes.algebra.logical import EVERYTHING, Axes, Rules, checked_rules
from axes.algebra.sizes import checked_tensor_shape, tuple_of

__all__ = [
    "from_logical_rules",
    "from_partition_spec",
    "from_tp_plan",
    "to_logical_rules",
    "to_partition_spec",
    "to_tp_plan",
]

_SPLIT = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "embedding_rowwise"), -2),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "embedding_colwise"), -1),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "sequence_parallel", "local_params"), 0),
    **dict.fromkeys(("all_reduce", "mla_kv_a_proj", "moe_tp_experts", "moe_identity_expert"), 0),
}
"""The dim of a parameter that a style of transformers splits, counted from the end; 0 where it splits none."""

_PLAN = "a tp_plan is a mapping from names to styles, like {'model.layers.*.mlp.up_proj': 'colwise'}"


def from_partition_spec(partition: Iterable[Axes], dims: str) -> str:
    """The spec of a tensor that JAX shards by a `PartitionSpec`.

    Args:
        partition: The `PartitionSpec`, or a tuple of its entries: for each dim an axis, a tuple of axes with the major
            one first, or None. Dims behind the last entry aren't split, as in JAX.
        dims: A name for each dim, or `_`: `"batch seq embed"`. A group counts as one dim: `"(heads head_dim) embed"`.

    Returns:
        The spec, for a mesh whose axes have the same names.

    Raises:
        ExpressionError: `dims` isn't in the grammar.
        ShardingError: There are more entries than dims, `dims` has an `@` or `...`, an axis is there twice, or an entry
            is none that axes has: `UNCONSTRAINED`, or values that are reduced or unreduced over an axis.

    Examples:
        >>> from_partition_spec(("dp",), "b d"), from_partition_spec((None, ("tp", "dp")), "b (h k)")
        ('b@dp d', 'b (h k)@(tp dp)')
    """
    tree = parse_spec(checked_spec(dims))
    if tree.places or tree.pending is not None or any(map(has_dots, tree.dims)):
        raise ShardingError(f"dims are a name for each dim and nothing else, like 'batch embed'; found {shown(dims)}")
    for kind, text in (("unreduced", "' | sum@{}' behind the spec"), ("reduced", "' | same@{}' behind it")):
        over = sorted(getattr(partition, kind, None) or ())
        if over:
            raise ShardingError(
                f"{shown(partition)} is {kind} over {', '.join(over)}, which no entry says; convert its "
                f"'.partitions', and write {text.format(place_text(over))}"
            )
    entries = tuple_of(partition)
    if entries is None or isinstance(partition, str) or len(entries) > len(tree.dims):
        raise ShardingError(
            f"a partition spec has an entry for each dim, at most {len(tree.dims)} for {shown(dims)}; found "
            f"{shown(partition)}"
        )
    found = Spec((*map(_split, tree.dims, entries), *tree.dims[len(entries) :]))
    if len({*found.axes}) < len(found.axes):
        raise ShardingError(f"an axis splits one dim; found one twice in {shown(partition)}")
    return str(found)


def _split(dim: Dim, entry: Any) -> Dim:
    """A dim that an entry of a partition spec splits."""
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    if not isinstance(axes, tuple | list) or not all(isinstance(axis, str) and axis.isidentifier() for axis in axes):
        raise ShardingError(
            f"an entry is an axis, a tuple of axes, or None for a dim that isn't split; found {shown(entry)} for "
            f"'{dim}'. To keep the split that a tensor has, write '{dim}@*' in axes.reshard"
        )
    place = Place(tuple(axes)) if axes else None
    return replace(dim, place=place) if dim.grouped else Dim((replace(dim.factors[0], place=place),))


def to_partition_spec(spec: str) -> tuple[Axes, ...]:
    """The entries of the `PartitionSpec` for a spec: `jax.P(*to_partition_spec("b@dp d"))`.

    Args:
        spec: A spec with a dim for each dim of the tensor.

    Returns:
        For each dim an axis, a tuple of axes with the major one first, or None.

    Raises:
        ExpressionError: The text isn't a spec.
        ShardingError: The spec has what no entry can say: `...`, `*`, something pending, or an axis at one of several
            names of a group.

    Examples:
        >>> to_partition_spec("b@dp s (h k)@(cp tp)")
        ('dp', None, ('cp', 'tp'))
    """
    tree = parse_spec(checked_spec(spec))
    if tree.pending:
        message = "entries say nothing of what is pending; in JAX write P(..., unreduced={'tp'})"
        raise ShardingError(f"{message}\n{pointed(spec, spec.index('|'), len(spec))}")
    for dim in tree.dims:
        inside = len(dim.factors) > 1 and any(factor.place for factor in dim.factors)
        has_star = any("*" in place.names for place in dim_places(dim))
        if inside or has_star or has_dots(dim):
            names = " ".join([str(factor.name or factor.size) for factor in dim.factors])
            advice = "write its axes" if has_star else "write a name for each dim"
            advice = f"where it divides, '({names})@tp' splits the same elements" if inside else advice
            message = f"an entry is about a whole dim and names its axes; {advice}"
            raise ShardingError(f"{message}\n{pointed(spec, *dim.span)}")
    places = [[name for place in dim_places(dim) for name in place.names] for dim in tree.dims]
    return tuple([_entry(names) for names in places])


def _entry(axes: Sequence[str]) -> Axes:
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def from_logical_rules(table: Mapping[str, Axes] | Iterable[tuple[str, Axes]]) -> Rules:
    """The rules of a table of logical axis rules, as Flax, T5X and MaxText write them.

    Rules apply in the order of the table, as in Flax's `logical_to_mesh_axes`, and a name without a rule isn't split. A
    dim that doesn't divide is an error in JAX; here the next rule of its name applies. `Rules(..., strict=True)` is
    strict about it.

    Args:
        table: Pairs of a logical name and a mesh axis, several axes with the major one first, or None.

    Returns:
        `axes.Rules`, for `axes.use_rules`, `axes.shard_module` and `axes.constrain`.

    Raises:
        ShardingError: The argument isn't a table of rules.

    Examples:
        >>> from_logical_rules((("batch", ("data", "fsdp")), ("heads", "tensor"), ("embed", None)))
        Rules([('batch', ('data', 'fsdp')), ('heads', 'tensor'), ('embed', None), ('...', None)])
    """
    rules = Rules(table)
    if EVERYTHING in rules.names:
        return rules
    return Rules([*((rule.name, rule.axes) for rule in rules.rules), (EVERYTHING, None)])


def to_logical_rules(rules: Rules) -> tuple[tuple[str, Axes], ...]:
    """The pairs of some rules, as Flax's `logical_axis_rules` takes them.

    Args:
        rules: The rules. The last rule `("...", None)` is left out: it is what Flax does with other names.

    Returns:
        Pairs of a logical name and an axis, a tuple of axes, or None.

    Raises:
        ShardingError: The argument isn't `axes.Rules`.

    Examples:
        >>> to_logical_rules(Rules(batch=("data", "fsdp"), embed=None))
        (('batch', ('data', 'fsdp')), ('embed', None))
    """
    checked = checked_rules(rules, "to_logical_rules")
    return tuple([(rule.name, _entry(rule.axes)) for rule in checked.rules if rule.name != EVERYTHING])


def from_tp_plan(plan: Mapping[str, str], shapes: Mapping[str, Sequence[int]], axis: str = "tp") -> dict[str, str]:
    """The specs of a model's parameters for `axes.shard_module`, from its `tp_plan` in transformers.

    A plan says as well what a module does with its inputs and results. Specs don't: see
    [coming from a tp_plan](../coming-from.md#transformers-tp_plan) for the calls to write.

    Args:
        plan: The plan: names of modules, or of parameters, with a `*` for each number, and their styles.
        shapes: The shapes of the parameters by name: `{name: p.shape for name, p in model.named_parameters()}`.
        axis: The mesh axis that splits.

    Returns:
        A spec for each parameter, by patterns that have a `*` for each number.

    Raises:
        ShardingError: A style isn't one of tensor parallelism, no name of the plan is one of a parameter, or
            parameters of one pattern need two specs.

    Examples:
        >>> plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
        >>> shapes = {"layers.0.up.weight": (8, 4), "layers.0.down.weight": (4, 8), "layers.0.down.bias": (4,)}
        >>> from_tp_plan(plan, shapes)
        {'layers.*.down.weight': '_ _@tp', 'layers.*.up.weight': '_@tp _', 'layers.*.down.bias': '_'}
    """
    _check_mapping(_PLAN, plan)
    _check_mapping("shapes are a mapping from names of parameters to shapes", shapes)
    found = dict[str, str]()
    for name, shape in shapes.items():
        pattern = re.sub(r"(?<![^.])\d+(?=\.|$)", "*", name)
        spec = _spec_of(pattern, plan, len(checked_tensor_shape(shape)), axis)
        if found.setdefault(pattern, spec) != spec:
            raise ShardingError(
                f"parameters called '{pattern}' have other numbers of dims, and need two specs: '{found[pattern]}' and "
                f"'{spec}'; convert the plan for one of them at a time"
            )
    if plan and found and not plan.keys() & {*found, *(pattern.rpartition(".")[0] for pattern in found)}:
        raise ShardingError(
            f"no name of the plan is one of the parameters, as {shown(next(iter(plan)))} beside "
            f"{shown(next(iter(found)))}; give both the same prefix"
        )
    # Of patterns that match a name the first applies, and a `*` may match dots: longer ones go first.
    return dict(sorted(found.items(), key=lambda each: -len(each[0])))


def to_tp_plan(specs: Mapping[str, str], axis: str = "tp", embeddings: Collection[str] = ()) -> dict[str, str]:
    """The `tp_plan` of transformers for specs of parameters.

    A plan says as well whether a module's result is gathered, which no spec says: write `"colwise_gather_output"` for
    `"colwise"` where it is.

    Args:
        specs: Specs by names of parameters, in full and with a `*` for each number, as `from_tp_plan` gives them. A
            whole one is left out, and so is `"*": "..."`.
        axis: The mesh axis that splits. A group that is split at its first name, `(h@tp k)`, counts as split whole.
        embeddings: The names of modules that are embeddings, in the same form.

    Returns:
        A style for each module, or for a parameter that is neither a weight nor a bias.

    Raises:
        ExpressionError: A text isn't a spec.
        ShardingError: A name isn't in full, or no style splits a parameter as the spec says.

    Examples:
        >>> to_tp_plan({"layers.*.up.weight": "f@tp d", "layers.*.down.weight": "d f@tp", "*": "..."})
        {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}
    """
    _check_mapping("specs are a mapping from names of parameters to specs", specs)
    if not isinstance(embeddings, Collection) or not all(isinstance(name, str) for name in embeddings):
        raise ShardingError(f"embeddings are names of modules, like ['model.embed_tokens']; found {shown(embeddings)}")
    if unknown := [name for name in embeddings if f"{name}.weight" not in specs]:
        raise ShardingError(
            f"specs have no embedding {shown(unknown[0], [name.removesuffix('.weight') for name in specs])}"
        )
    plan, dims_of = dict[str, str](), {name: _unnamed(parse_spec(checked_spec(spec))) for name, spec in specs.items()}
    for name, dims in dims_of.items():
        if any("@" in dim for dim in dims) and not name.endswith(".bias"):
            if not re.fullmatch(r"\w+(\.(\w+|\*))*", name):
                raise ShardingError(
                    f"a tp_plan names modules in full, with a '*' for each number, like 'model.layers.*.mlp.up_proj'; "
                    f"found {shown(name)}"
                )
            key = name.removesuffix(".weight")
            kind = "embedding_" if key in embeddings else "packed_" if any(dim[0] == "(" for dim in dims) else ""
            column, row = ("rowwise", "colwise") if kind == "embedding_" else ("colwise", "rowwise")
            plan[key] = kind + (row if "@" in dims[-1] and len(dims) > 1 else column)
    for name, dims in dims_of.items():
        if dims != ["..."] and _spec_of(name, plan, len(dims), axis) != " ".join(dims):
            raise ShardingError(
                f"no style of transformers splits '{name}' as '{specs[name]}': a style splits one of the last two dims "
                f"of a weight by '{axis}'; 'colwise' splits the bias as well, and 'rowwise' leaves it whole"
            )
    return plan


def _spec_of(name: str, plan: Mapping[str, str], ndim: int, axis: str) -> str:
    """The spec of a parameter with so many dims: its own style applies, else that of its module."""
    if not isinstance(axis, str) or not axis.isidentifier():
        raise ShardingError(f"axis is the name of a mesh axis, like 'tp'; found {shown(axis)}")
    module, _, own = name.rpartition(".")
    style = plan.get(name) or plan.get(module) or "replicate"
    if not isinstance(style, str) or style not in _SPLIT:
        raise ShardingError(
            f"a tp_plan has styles of tensor parallelism; found for {shown(name)} {shown(style, _SPLIT)}\n"
            "where ranks have experts of their own, leave out the style and write the spec: 'e@ep f d'"
        )
    is_packed, at = style.startswith("packed_") and ndim > 1, _SPLIT[style]
    is_whole = at == 0 or (at == -1 and (own == "bias" or (style == "packed_rowwise" and ndim == 1)))
    dims = ["_"] * ndim
    if dims and not is_whole:
        dims[max(at, -ndim)] = f"(2 f@{axis})" if is_packed else f"_@{axis}"
    return " ".join(dims)


def _unnamed(tree: Spec) -> list[str]:
    """The dims of a spec as `_spec_of` writes them. A group that is split at its first name is split as a whole."""
    found = []
    for dim in tree.dims:
        first, places = dim.factors[0] if dim.factors else None, dim_places(dim)
        is_packed = first is not None and (first.name, first.size, first.place, dim.place) == (None, 2, None, None)
        if len(dim.factors) == 2 and places and is_packed:
            found.append(f"(2 f@{places[0]})")
        elif places and (dim.place or (first and first.place)) and len(places) == 1:
            found.append(f"_@{places[0]}")
        else:
            found.append(str(dim) if places or has_dots(dim) else "_")
    return [*found, *map(str, tree.pending or ())]


def _check_mapping(what: str, value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ShardingError(f"{what}; found {shown(value)}")
