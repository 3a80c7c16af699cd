"""What `axes.reshard` and `axes.plan` say in text, as shardings.

    source   b@dp s@cp d | sum@ep
    spec     b@* s d@tp                   the whole truth: s unsplit, nothing pending
    target   b@dp s d@tp                  a * is what the tensor has

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2 cp=2 tp=2 ep=2")
>>> source = mesh.sharding("b@dp s@cp d | sum@ep")
>>> [retargeted(source, spec, (8, 8, 8)).spec for spec in ("b s d@tp", "b@* s@(* tp) d", "... d@tp | *")]
['b s d@tp', 'b@dp s@(cp tp) d', 'b@dp s@cp d@tp | sum@ep']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from axes.algebra import plan as planning
from axes.algebra.cost import CostModel
from axes.algebra.errors import AxesError, ExpressionError, MeshError, ShardingError, shown
from axes.algebra.grammar import axes_of, parse_spec
from axes.algebra.mesh import Mesh
from axes.algebra.opaque import Dtype
from axes.algebra.plan import Plan, dtype_name
from axes.algebra.scopes import required_mesh
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import checked_tensor_shape, given_sizes
from axes.algebra.specs import check_same_dims, factors_by_name, parsed_sharding, read_sharding

Shape = tuple[int, ...]
Sizes = tuple[tuple[str, Any], ...]
End = str | Sharding


def plan(
    source: End,
    target: End,
    shape: Sequence[int],
    mesh: Mesh | None = None,
    dtype: str | Dtype = "float32",
    cost_model: CostModel | None = None,
    *,
    source_mesh: Mesh | None = None,
    target_mesh: Mesh | None = None,
    sizes: Mapping[str, int] | None = None,
    **keywords: int,
) -> Plan:
    """The cheapest sequence of collectives from one sharding to another, as `reshard` would choose it.

    `source` and `target` are whole specs (a bare dim is unsplit) or `Sharding`s, `shape` is the whole
    shape, `dtype` a torch dtype or its name. Names are those of `mesh`, the ambient one by default, or
    of `source_mesh` and `target_mesh`: another factorization of the same ranks, or other ranks.
    Keywords are sizes of factors of grouped dims. `cost_model` has the numbers that decide between the
    candidates. No process is needed, and the time doesn't depend on the number of ranks.

    `plan.steps` are seen from the mesh's rank (`mesh.at(rank)`): each has `kind`, `axes`, `ranks`,
    `group_size`, `bytes_in` and `bytes_out`. Raises `ShardingError` where nothing takes the source to the
    target. The idea of searching redistributions is that of Rink et al., "Memory-efficient array
    redistribution through portable collective communication" (2021).

    >>> from axes.algebra.mesh import Mesh
    >>> print(plan("b@dp s@tp d", "b@dp s d@tp", (8, 2048, 4096), mesh=Mesh("dp=2 tp=4"), dtype="bfloat16"))
    b@dp s@tp d -> b@dp s d@tp     [8, 2048, 4096] bfloat16
      1  all_to_all  tp  4 ranks, stride 1  12.0 MiB in, 12.0 MiB out
    """
    shape = checked_tensor_shape(shape)
    known = dict.fromkeys(name for end in (source, target) if isinstance(end, str) for name in factors_by_name(end))
    given = given_sizes(keywords, sizes, (), known, "the specs")
    check_same_dims(source, target)
    one = _end("source", source, source_mesh if source_mesh is not None else mesh, shape, given)
    two = _end("target", target, target_mesh if target_mesh is not None else mesh, shape, given)
    nodes = one.mesh.ranks_per_node
    if cost_model is None:
        cost_model = CostModel() if nodes is None else CostModel(ranks_per_node=nodes)
    elif not isinstance(cost_model, CostModel):
        raise ShardingError(f"cost_model is an axes.CostModel; found {shown(cost_model)}")
    return planning.plan(one, two, shape, dtype_name(dtype), cost_model, one.mesh.rank)


def _end(side: str, end: End, mesh: Mesh | None, shape: Shape, given: Mapping[str, int]) -> Sharding:
    if isinstance(end, Sharding):
        found = end
    else:
        named = {name: size for name, size in given.items() if name in factors_by_name(end)}
        found = parsed_sharding(required_mesh(mesh, "axes.plan"), end, tuple(sorted(named.items())), len(shape))
    if found.ndim != len(shape):
        raise ShardingError(f"the {side} '{found}' has {found.ndim} dims, the shape {len(shape)}: {list(shape)}")
    return found.sized(shape)


# --- reshard --------------------------------------------------------------------------------------


def retargeted(
    source: Sharding, spec: str, shape: Shape, where: Mesh | None = None, mesh: Mesh | None = None, sizes: Sizes = ()
) -> Sharding:
    """Where `reshard(x, spec)` takes a tensor of this sharding and shape: exactly where the spec says.

    A bare dim is unsplit, and without a `|` nothing is pending. A `*` stands for what the tensor has: the
    axes of the dim, or what is pending; `...` stands for dims with `@*`. Axes are looked up in `where`, the
    source's mesh by default. The result lies on `mesh`, the source's by default.

    Raises `ExpressionError` for text outside the grammar; with both specs `MeshError` for an axis that isn't
    there, and `ShardingError` for anything else.
    """
    try:
        found = _meant(source.sized(shape), spec, where or mesh or source.mesh, mesh or source.mesh, sizes)
        names = [mine if any(mine) else had for mine, had in zip(found.names, source.names, strict=False)]
        return replace(found, mesh=found.mesh._seen_from((mesh or source.mesh)._view), names=tuple(names)).sized(shape)
    except ExpressionError:
        raise
    except AxesError as error:
        kind = MeshError if isinstance(error, MeshError) else ShardingError
        raise kind(f"{error}\n  source  {source}\n  target  {spec}") from None


@lru_cache(4096)
def _meant(source: Sharding, spec: str, where: Mesh, mesh: Mesh, sizes: Sizes) -> Sharding:
    """The sharding on `mesh` that a spec means for what lies as `source`, whatever sizes the tensor has."""
    if mesh.universe == source.mesh.universe:
        mesh = _with_names(mesh, where, axes_of(parse_spec(spec)))
    return read_sharding(mesh, spec, sizes, source.ndim, source)[0]


def _with_names(mesh: Mesh, where: Mesh, names: Sequence[str]) -> Mesh:
    """`mesh`, in which these names mean what they mean in `where`."""
    further = {}
    for name in names:
        layout = where.layout(name)
        if mesh.namespace.get(name, layout) != layout:
            raise MeshError(
                f"'{name}' is {layout} in {where!r}, where the spec is read, and {mesh.namespace[name]} in "
                f"{mesh!r}, where the tensor lies"
            )
        further[name] = layout
    return mesh if further.keys() <= mesh.namespace.keys() else mesh._with(namespace={**mesh.namespace, **further})
