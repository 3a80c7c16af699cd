"""What `axes.reshard` and `axes.plan` say in text, as shardings.

    source   b@dp s@(cp tp) d | sum@ep
    spec     b s d@tp                     the axes that it names go where it says, and leave where they were
    target   b@dp s@cp d@tp | sum@ep      what it doesn't name stays

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2 cp=2 tp=2 ep=2")
>>> source = mesh.sharding("b@dp s@(cp tp) d | sum@ep")
>>> [retargeted(source, spec, (8, 8, 8)).spec for spec in ("b s d@tp", "b@() s d@ep", "b s@(ep *) d |")]
['b@dp s@cp d@tp | sum@ep', 'b s@(cp tp) d@ep', 'b@dp s@(ep cp tp) d']
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from axes.algebra import plan as planning
from axes.algebra.ambient import required_mesh
from axes.algebra.cost import CostModel, Model
from axes.algebra.errors import AxesError, ExpressionError, MeshError, ShardingError, SizeError, shortened, suggestion
from axes.algebra.grammar import Dim, Spec, parse_spec
from axes.algebra.layout import Layout, digits
from axes.algebra.mesh import Mesh
from axes.algebra.opaque import Dtype
from axes.algebra.plan import Plan
from axes.algebra.sharding import PendingReduction, ShardedDim, Sharding, parsed_sharding, state_of
from axes.algebra.sizes import checked_shape, written_sizes

Shape = tuple[int, ...]
Sizes = tuple[tuple[str, Any], ...]
End = str | Sharding


def plan(
    source: End,
    target: End,
    shape: Sequence[int],
    mesh: Mesh | None = None,
    dtype: str | Dtype = "float32",
    cost_model: Model | None = None,
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
    Keywords are sizes of factors of grouped dims. `cost_model` is a `CostModel`, or anything hashable
    that can price a step; it decides between the candidates. No process is needed, and the time
    doesn't depend on the number of ranks.

    `plan.steps` are seen from the mesh's rank (`mesh.at(rank)`): each has `kind`, `axes`, `ranks`,
    `group_size`, `bytes_in` and `bytes_out`. Raises `ShardingError` where nothing takes the source to the
    target. The idea of searching redistributions is that of Rink et al., "Memory-efficient array
    redistribution through portable collective communication" (2021).

    >>> from axes.algebra.mesh import Mesh
    >>> print(plan("b@dp s@tp d", "b@dp s d@tp", (8, 2048, 4096), mesh=Mesh("dp=2 tp=4"), dtype="bfloat16"))
    b@dp s@tp d -> b@dp s d@tp     [8, 2048, 4096] bfloat16
      1  all_to_all  tp  4 ranks, stride 1  12.0 MiB in, 12.0 MiB out
    """
    shape, given = checked_shape(shape), dict(written_sizes(keywords, sizes))
    _check_names(given, source, target)
    one = _end("source", source, source_mesh if source_mesh is not None else mesh, shape, given)
    two = _end("target", target, target_mesh if target_mesh is not None else mesh, shape, given)
    nodes = one.mesh.ranks_per_node
    model = cost_model or (CostModel() if nodes is None else CostModel(ranks_per_node=nodes))
    name = str(dtype).removeprefix("torch.")
    return planning.plan(state_of(one, shape), state_of(two, shape), shape, name, model, one.mesh.rank)


def _end(side: str, end: End, mesh: Mesh | None, shape: Shape, given: Mapping[str, int]) -> Sharding:
    if isinstance(end, Sharding):
        found = end
    else:
        named = {name: size for name, size in given.items() if name in _factors(end)}
        found = parsed_sharding(required_mesh(mesh, "axes.plan"), end, tuple(sorted(named.items())), len(shape))
    if found.ndim != len(shape):
        raise ShardingError(f"the {side} '{found}' has {found.ndim} dims, the shape {len(shape)}: {list(shape)}")
    return found.sized(shape)


def _factors(spec: str) -> set[str]:
    return {factor.name for dim in parse_spec(spec).dims for factor in dim.factors if factor.name}


def _check_names(given: Mapping[str, int], *ends: End) -> None:
    known = {name for end in ends if isinstance(end, str) for name in _factors(end)}
    for name in given:
        if name not in known:
            raise SizeError(f"a size is given for {shortened(name)}, which isn't in the specs{suggestion(name, known)}")


# --- reshard --------------------------------------------------------------------------------------


def retargeted(
    source: Sharding, spec: str, shape: Shape, where: Mesh | None = None, mesh: Mesh | None = None, sizes: Sizes = ()
) -> Sharding:
    """Where `reshard(x, spec)` takes a tensor of this sharding and shape.

    Axes are looked up in `where`, the source's mesh by default. The result lies on `mesh`, the source's
    by default; on other ranks than the source's nothing stays, so there the spec is the whole truth.

    Raises `ExpressionError` for text outside the grammar and `ShardingError`, with both specs, for
    anything else.
    """
    where = where or mesh or source.mesh
    try:
        if mesh is not None and mesh.universe != source.mesh.universe:
            return parsed_sharding(mesh, spec, sizes, source.ndim).sized(shape)
        return _Retarget(source.sized(shape), where, mesh or source.mesh, _expanded(spec, source.ndim)).target(
            shape, dict(sizes)
        )
    except ExpressionError:
        raise
    except AxesError as error:
        raise ShardingError(f"{error}\n  source  {source}\n  target  {spec}") from None


def _expanded(spec: str, ndim: int) -> Spec:
    """The tree of a spec with `...` as the dims that it stands for."""
    tree = parse_spec(spec)
    dims: list[Dim] = []
    for dim in tree.dims:
        if [factor.name for factor in dim.factors] == ["..."] and not dim.grouped and dim.factors[0].place is None:
            dims.extend([replace(dim, factors=(replace(dim.factors[0], name="_"),))] * (ndim + 1 - len(tree.dims)))
        elif any(factor.name == "..." for factor in dim.factors):
            raise ShardingError("'...' stands for whole dims that stay as they are; name the dim that is split")
        else:
            dims.append(dim)
    if len(dims) != ndim:
        raise ShardingError(f"the spec has {len(dims)} dims, the tensor {ndim}")
    return replace(tree, dims=tuple(dims))


class _Retarget:
    """One target, from the source's sharding and the tree of a spec."""

    def __init__(self, source: Sharding, where: Mesh, mesh: Mesh, tree: Spec):
        self.source, self.where, self.tree = source, where, tree
        places = [place for dim in tree.dims for place in (dim.place, *(f.place for f in dim.factors)) if place]
        places += [p.place for p in tree.pending or () if p.place]
        self.named = [axis for place in places for axis in place.names if axis != "*"]
        self.mesh = _with_names(mesh, where, self.named)
        self.layouts = [where.layout(axis) for axis in self.named]

    def target(self, shape: Shape, sizes: dict[str, int]) -> Sharding:
        """The sharding that the spec asks for."""
        pairs = zip(self.tree.dims, self.source.dims, strict=True)
        dims = tuple(self._dim(dim, had, sizes) for dim, had in pairs)
        return Sharding(self.mesh, dims, self._pending()).sized(shape)

    def _dim(self, dim: Dim, had: ShardedDim, sizes: dict[str, int]) -> ShardedDim:
        places = [place for place in (dim.place, *(factor.place for factor in dim.factors)) if place is not None]
        if not places:
            return self._kept(had)
        named = {name: size for name, size in sizes.items() if name in {f.name for f in dim.factors}}
        if not any("*" in place.names for place in places):
            return parsed_sharding(self.mesh, str(dim), tuple(sorted(named.items()))).dims[0]
        if len(dim.factors) > 1 or len(had.factors) > 1:
            raise ShardingError(f"'*' in {dim} would be what the dim has, {had}; in a group write the axes")
        left = self._kept(had).axes
        axes = [axis for name in places[0].names for axis in (left if name == "*" else (name,))]
        factor = replace(had.factors[0], name=dim.factors[0].name or had.factors[0].name, axes=tuple(axes))
        return ShardedDim((factor,))

    def _kept(self, had: ShardedDim) -> ShardedDim:
        factors = tuple(replace(factor, axes=self._left(factor.axes)) for factor in had.factors)
        return ShardedDim(factors)

    def _pending(self) -> tuple[PendingReduction, ...]:
        tree = self.tree.pending
        if tree is None or [pending.op for pending in tree] == ["*"]:
            left = (PendingReduction(p.op, self._left(p.axes)) for p in self.source.pending)
            return tuple(pending for pending in left if pending.axes)
        spec = f"_ | {' '.join(map(str, tree))}"
        return parsed_sharding(self.mesh, spec).pending

    def _left(self, axes: Sequence[str]) -> tuple[str, ...]:
        """What is left of axes of the source without the digits that the spec names, in the target's names."""
        found: list[str] = []
        for axis in axes:
            layout = self.source.mesh.namespace[axis]
            rest = _without(layout, self.layouts)
            if rest.size > 1:
                found.extend([axis] if self.mesh.namespace.get(axis) == rest else self._names_of(rest, axis))
        return tuple(found)

    def _names_of(self, layout: Layout, axis: str) -> Iterable[str]:
        for name, other in self.mesh.namespace.items():
            if other == layout:
                return [name]
        names = self.mesh.factored(layout)
        if names is None:
            raise ShardingError(f"what is left of '{axis}' ({layout}) isn't a product of axes of {self.mesh!r}")
        return names


def _without(layout: Layout, taken: Sequence[Layout]) -> Layout:
    overlapping = [other for other in taken if other.overlaps(layout)]
    if not overlapping:
        return layout
    mine, *theirs = digits(layout, *overlapping)
    gone = {digit for other in theirs for digit in other}
    return Layout.of(digit for digit in mine if digit not in gone)


@functools.lru_cache(maxsize=1024)
def _named_mesh(mesh: Mesh, where: Mesh, names: tuple[str, ...]) -> Mesh:
    further = {}
    for name in names:
        layout = where.layout(name)
        if mesh.namespace.get(name, layout) != layout:
            raise MeshError(
                f"'{name}' is {layout} in {where!r}, where the spec is read, and {mesh.namespace[name]} in "
                f"{mesh!r}, where the tensor lies"
            )
        further[name] = layout
    return mesh._with(namespace={**mesh.namespace, **further})


def _with_names(mesh: Mesh, where: Mesh, names: Sequence[str]) -> Mesh:
    """`mesh`, in which these names mean what they mean in `where`."""
    for name in names:
        where.layout(name)
    if all(mesh.namespace.get(name) == where.namespace[name] for name in names):
        return mesh
    return _named_mesh(mesh, where, tuple(names))
