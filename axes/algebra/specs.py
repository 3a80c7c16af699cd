"""Specs: the text of a sharding, read on a mesh.

>>> from axes.algebra.mesh import Mesh
>>> print(parsed_sharding(Mesh("dp=2 tp=2"), "b@dp (three=3 h@tp) ...", (), 4))
b@dp (three=3 h@tp) _ _
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from axes.algebra import grammar
from axes.algebra.errors import MeshError, ShardingError, SizeError, pointed, shortened, unknown_axis
from axes.algebra.grammar import checked_spec, has_dots, parse_spec, without_dots
from axes.algebra.layout import NamedLayout
from axes.algebra.sharding import PendingReduction, ShardedDim, ShardedFactor, Sharding
from axes.algebra.sizes import given_sizes

if TYPE_CHECKING:
    from axes.algebra.mesh import Mesh


def parsed_sharding(
    mesh: Mesh, spec: str, sizes: tuple[tuple[str, Any], ...] = (), ndim: int | None = None
) -> Sharding:
    """The sharding of a spec on a mesh; `...` stands for what is missing to `ndim` dims. Cached."""
    return _parsed(mesh, checked_spec(spec), sizes, ndim).on(mesh)


@functools.lru_cache(maxsize=4096)
def _parsed(mesh: Mesh, spec: str, sizes: tuple[tuple[str, Any], ...], ndim: int | None) -> Sharding:
    tree = parse_spec(spec)
    items = [item for item in grammar.leaves(tree.dims) if item.name != "_"]
    given = given_sizes(dict(sizes), None, items, [item.name for item in items], "the spec")
    try:
        dims = [_dim(mesh, spec, dim, given) for dim in _opened(spec, tree, ndim).dims]
        pending = tuple(_pending(mesh, spec, p) for p in tree.pending or ())
        return Sharding(mesh, tuple(dims), pending)
    except (ShardingError, MeshError) as error:
        if spec in str(error):
            raise
        raise type(error)(f"{error}\n  in  {grammar.Spec.__str__(tree)[:200]}") from None


def check_same_dims(source: str | Sharding, target: str | Sharding) -> None:
    """Refuse two specs of one tensor that disagree on a name: between specs nothing is rearranged.

    Raises `SizeError` where both say its size and these differ, `ShardingError` where it is another dim.

    >>> check_same_dims("b s@tp", "b@tp s")
    """
    if not (isinstance(source, str) and isinstance(target, str)):
        return
    one, two = _factors_by_name(source), _factors_by_name(target)
    both = [(name, one[name], two[name]) for name in one if name in two]
    for name, (_, size), (_, other) in both:
        if None not in (size, other) and size != other:
            raise SizeError(
                f"{shortened(name)} is given two sizes: {size} in {shortened(source)} and {other} in "
                f"{shortened(target)}. Both specs are of one tensor"
            )
    if "..." in one or "..." in two:
        return
    for name, (dim, _), (other, _) in both:
        if dim != other:
            raise ShardingError(
                f"{shortened(name)} is dim {dim} of {shortened(source)} and dim {other} of {shortened(target)}. Both "
                "specs are of one tensor, whose dims stay where they are; to rearrange them use axes.rearrange, or a "
                "rule of a transfer"
            )


@functools.lru_cache(maxsize=4096)
def _factors_by_name(spec: str) -> dict[str, tuple[int, int | None]]:
    """The dim in which each name stands, and its size where it is written; an underscore is no name."""
    factors = ((at, factor) for at, dim in enumerate(parse_spec(spec).dims) for factor in dim.factors)
    return {factor.name: (at, factor.size) for at, factor in factors if factor.name not in (None, "_")}


def marked_sharding(
    mesh: Mesh, spec: str, sizes: tuple[tuple[str, Any], ...] = (), ndim: int | None = None
) -> tuple[Sharding, tuple[NamedLayout, ...]]:
    """The sharding of a spec that may say `same`, and the axes that are `same`: they are about gradients alone."""
    found, same = _marked(mesh, checked_spec(spec), sizes, ndim)
    return found.on(mesh), same


@functools.lru_cache(maxsize=4096)
def _marked(
    mesh: Mesh, spec: str, sizes: tuple[tuple[str, Any], ...], ndim: int | None
) -> tuple[Sharding, tuple[NamedLayout, ...]]:
    tree = parse_spec(spec)
    marks = [p for p in tree.pending or () if p.op == "same" and p.place is not None]
    if not marks:
        return parsed_sharding(mesh, spec, sizes, ndim), ()
    rest = tuple(p for p in tree.pending or () if p not in marks)
    found = parsed_sharding(mesh, str(replace(tree, pending=rest or None)), sizes, ndim)
    same = tuple(axis for p in marks for axis in _axes(mesh, spec, p.place))
    replace(found, pending=(*found.pending, PendingReduction("same", same)))  # refuses what is split or pending
    return found, same


def _dim(mesh: Mesh, spec: str, dim: grammar.Dim, sizes: Mapping[str, int]) -> ShardedDim:
    factors = []
    for factor in dim.factors:
        size = factor.size if factor.name is None else sizes.get(factor.name)
        factors.append(ShardedFactor(factor.name, size, _axes(mesh, spec, factor.place)))
    if not dim.grouped:
        return ShardedDim(tuple(factors))
    if dim.place is not None or not any(factor.axes for factor in factors):
        # Split as a whole, or not at all: to a sharding such a group is one name.
        known = [factor.size for factor in factors]
        multiple = math.prod(size for size in known if size is not None)
        name = f"({' '.join(str(ShardedFactor(f.name, f.size)) for f in factors)})"
        axes = _axes(mesh, spec, dim.place)
        return ShardedDim((ShardedFactor(name, None if None in known else multiple, axes, multiple),))
    return ShardedDim(tuple(factors))


def _axes(mesh: Mesh, spec: str, place: grammar.Place | None) -> tuple[NamedLayout, ...]:
    if place is None:
        return ()
    if "*" in place.names:
        _wrong("'*' is what a tensor has; a sharding names its axes", spec, place.span)
    return tuple([_named(mesh, name) for name in place.names])


def _named(mesh: Mesh, name: str) -> NamedLayout:
    """Where names end: an axis of the text as its digits."""
    layout = mesh.namespace.get(name)
    if layout is None:
        raise unknown_axis(name, mesh.namespace)
    return NamedLayout(layout, name)


def _opened(spec: str, tree: grammar.Spec, ndim: int | None) -> grammar.Spec:
    """The spec without `...`, which stands for whole dims."""
    dots = next(filter(has_dots, tree.dims), None)
    if dots is None:
        return tree
    if dots.grouped or dots.factors[0].place is not None:
        _wrong("'...' stands for whole dims that aren't split; name the dim that is", spec, dots.span)
    if ndim is None:
        _wrong("'...' stands for dims of a tensor; without one, write every dim (or '_')", spec, dots.span)
    if ndim < len(tree.dims) - 1:
        _wrong(f"the spec has {len(tree.dims) - 1} dims beside '...', the tensor has {ndim}", spec, (0, len(spec)))
    return without_dots(tree, ndim)


def _pending(mesh: Mesh, spec: str, pending: grammar.Pending) -> PendingReduction:
    if pending.op == "*":
        _wrong("'| *' is whatever arises; a sharding says what is pending, like '| sum@tp'", spec, pending.span)
    if pending.op == "same":
        _wrong("'same' is about gradients of plain tensors; a sharding can't have it", spec, pending.span)
    return PendingReduction(pending.op, _axes(mesh, spec, pending.place))


def _wrong(message: str, spec: str, span: tuple[int, int]) -> NoReturn:
    raise ShardingError(f"{message}\n{pointed(spec, *span)}")
