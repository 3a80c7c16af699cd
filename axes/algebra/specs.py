"""Specs: the text of a sharding, read on a mesh; for `axes.reshard` with a `*` for what the tensor has.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2 cp=2 tp=2 ep=2")
>>> print(parsed_sharding(mesh, "b@dp (three=3 h@tp) ...", (), 4))
b@dp (three=3 h@tp) _ _
>>> source = mesh.sharding("b@dp s@cp d | sum@ep")
>>> [retargeted(source, spec, (8, 8, 8)).spec for spec in ("b s d@tp", "b@* s@(* tp) d", "... d@tp | *")]
['b s d@tp', 'b@dp s@(cp tp) d', 'b@dp s@cp d@tp | sum@ep']
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from axes.algebra import grammar
from axes.algebra.errors import (
    AxesError,
    ExpressionError,
    MeshError,
    ShardingError,
    SizeError,
    naming,
    pointed,
    shortened,
    wrong_dims,
)
from axes.algebra.grammar import checked_spec, has_dots, parse_spec, without_dots
from axes.algebra.layout import Layout
from axes.algebra.sharding import Sharding, Slot, Slots, check_once, slots_text
from axes.algebra.sizes import given_sizes

if TYPE_CHECKING:
    from axes.algebra.mesh import Mesh


def parsed_sharding(
    mesh: Mesh, spec: str, sizes: tuple[tuple[str, Any], ...] = (), ndim: int | None = None
) -> Sharding:
    """The sharding of a spec on a mesh; `...` stands for what is missing to `ndim` dims. Cached."""
    return _parsed(mesh, checked_spec(spec), sizes, ndim, False)[0].on(mesh)


def marked_sharding(
    mesh: Mesh, spec: str, sizes: tuple[tuple[str, Any], ...] = (), ndim: int | None = None
) -> tuple[Sharding, tuple[Layout, ...]]:
    """The sharding of a spec that may say `same`, and the axes that are `same`: they are about gradients alone."""
    found, same = _parsed(mesh, checked_spec(spec), sizes, ndim, True)
    return found.on(mesh), same


@functools.lru_cache(maxsize=4096)
def _parsed(
    mesh: Mesh, spec: str, sizes: tuple[tuple[str, Any], ...], ndim: int | None, marks: bool
) -> tuple[Sharding, tuple[Layout, ...]]:
    with naming(spec):
        return read_sharding(mesh, spec, sizes, ndim, marks=marks)


def read_sharding(
    mesh: Mesh,
    spec: str,
    sizes: tuple[tuple[str, Any], ...],
    ndim: int | None,
    source: Sharding | None = None,
    marks: bool = False,
) -> tuple[Sharding, tuple[Layout, ...]]:
    """The sharding of a spec on a mesh, and the axes that are `same`, which it may say where there are `marks`.

    source: how the tensor is sharded, where there is one: `*` stands for what it has, and `...` for dims that stay.
    """
    tree = parse_spec(spec)
    items = [item for item in grammar.leaves(tree.dims) if item.name != "_"]
    given = given_sizes(dict(sizes), None, items, [item.name for item in items], "the spec")
    dims = _without_dots(spec, tree, ndim, source)
    if source is not None and len(dims) != source.ndim:
        raise wrong_dims(spec, len(dims), source.ndim)
    found = [_dim(mesh, spec, dim, given, source, at) for at, dim in enumerate(dims)]
    check_once(mesh, spec, tree)
    pending: list[tuple[str, Layout]] = []
    same: tuple[Layout, ...] = ()
    for each in tree.pending or ():
        if each.op == "*" and source is not None:
            pending = [(op, kept) for op, layout in source.pending for kept in _kept(mesh, source.mesh, (layout,))]
        elif each.op == "*":
            _wrong("'| *' is whatever arises; a sharding says what is pending, like '| sum@tp'", spec, each.span)
        elif each.op == "same" and not marks:
            _wrong("'same' is about gradients of plain tensors; a sharding can't have it", spec, each.span)
        elif each.op == "same":
            same += _axes(mesh, spec, each.place)
        else:
            pending += [(each.op, layout) for layout in _axes(mesh, spec, each.place)]
    slots, names = [slots for slots, _ in found], [names for _, names in found]
    return Sharding(mesh, tuple(slots), tuple(pending), tuple(names)), same


def retargeted(
    source: Sharding,
    spec: str,
    shape: tuple[int, ...],
    where: Mesh | None = None,
    mesh: Mesh | None = None,
    sizes: tuple[tuple[str, Any], ...] = (),
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


@functools.lru_cache(maxsize=4096)
def _meant(source: Sharding, spec: str, where: Mesh, mesh: Mesh, sizes: tuple[tuple[str, Any], ...]) -> Sharding:
    """The sharding on `mesh` that a spec means for a tensor of this sharding and any sizes."""
    if mesh.universe == source.mesh.universe:
        mesh = mesh._knowing(where, parse_spec(spec).axes)
    return read_sharding(mesh, spec, sizes, source.ndim, source)[0]


def check_same_dims(source: str | Sharding, target: str | Sharding) -> None:
    """Refuse two specs of one tensor that disagree on a name: between specs nothing is rearranged.

    Raises `SizeError` where both say its size and these differ, `ShardingError` where it is another dim.

    >>> check_same_dims("b s@tp", "b@tp s")
    """
    if not (isinstance(source, str) and isinstance(target, str)):
        return
    one, two = factors_by_name(source), factors_by_name(target)
    for name, (dim, size), (other, its) in [(name, one[name], two[name]) for name in one if name in two]:
        if None not in (size, its) and size != its:
            raise SizeError(
                f"{shortened(name)} is given two sizes: {size} in {shortened(source)} and {its} in "
                f"{shortened(target)}. Both specs are of one tensor"
            )
        if dim != other and "..." not in (*one, *two):
            raise ShardingError(
                f"{shortened(name)} is dim {dim} of {shortened(source)} and dim {other} of {shortened(target)}. Both "
                "specs are of one tensor, whose dims stay where they are; to rearrange them use axes.rearrange, or a "
                "rule of a transfer"
            )


def factors_by_name(spec: str) -> dict[str, tuple[int, int | None]]:
    """The dim in which each name stands, and its size where it is written; an underscore is no name."""
    factors = ((at, factor) for at, dim in enumerate(parse_spec(spec).dims) for factor in dim.factors)
    return {factor.name: (at, factor.size) for at, factor in factors if factor.name not in (None, "_")}


def _dim(
    mesh: Mesh, spec: str, dim: grammar.Dim, sizes: Mapping[str, int], source: Sharding | None, at: int
) -> tuple[Slots, tuple[str, ...]]:
    """A dim of a spec, and the names in it; `*` in it stands for what splits the dim of the source."""
    names = tuple([factor.name or "" for factor in dim.factors])
    stars = [place for place in grammar.dim_places(dim) if "*" in place.names]
    if stars and source is not None:
        had, called = source.dims[at], source.names_of(at)
        kept = _kept(mesh, source.mesh, had.layouts)
        if stars[0].names == ("*",) and (dim.place is not None or len(dim.factors) == 1):
            return Slots([Slot(_kept(mesh, source.mesh, slot.layouts), slot.size) for slot in had]), called
        if len(dim.factors) > 1 or len(had) > 1:
            text = source.text_of(at)
            _wrong(f"'*' in {dim} would be what the dim has, {text}; in a group write the axes", spec, dim.span)
        layouts = [each for name in stars[0].names for each in (kept if name == "*" else mesh.splits((name,)))]
        return Slots((Slot(tuple(layouts), had[0].size),)), names if dim.factors[0].name else called
    slots = [Slot(_axes(mesh, spec, f.place), f.size if f.name is None else sizes.get(f.name)) for f in dim.factors]
    if dim.grouped and (dim.place is not None or not any(slot.layouts for slot in slots)):
        # Split as a whole, or not at all: to a sharding such a group is one name.
        known = [slot.size for slot in slots]
        whole = None if None in known else math.prod(size for size in known if size is not None)
        name = slots_text(mesh, Slots([Slot((), size) for size in known]), names)
        return Slots((Slot(_axes(mesh, spec, dim.place), whole),)), (f"({name})" if len(slots) == 1 else name,)
    return Slots(slots), names


def _axes(mesh: Mesh, spec: str, place: grammar.Place | None) -> tuple[Layout, ...]:
    if place is not None and "*" in place.names:
        _wrong("'*' is what a tensor has; a sharding names its axes", spec, place.span)
    return () if place is None else mesh.splits(place.names)


def _kept(mesh: Mesh, source: Mesh, layouts: Iterable[Layout]) -> tuple[Layout, ...]:
    """Layouts that split something on `source` as those of axes of `mesh`."""
    found: list[Layout] = []
    for layout in layouts:
        name = source.called(layout)
        if mesh.universe != source.universe:
            raise ShardingError(
                f"'*' stands for '{name}' of {source!r}, which {mesh!r} on other ranks hasn't; write its axes"
            )
        parts = mesh.parts(layout)
        if not {*mesh.namespace.values()}.issuperset(parts):
            raise ShardingError(f"'*' stands for '{name}' ({layout}), which isn't a product of axes of {mesh!r}")
        found.extend(parts)
    return tuple(found)


_STAYS = grammar.Dim((grammar.Factor("_", place=grammar.Place(("*",))),))


def _without_dots(spec: str, tree: grammar.Spec, ndim: int | None, source: Sharding | None) -> tuple[grammar.Dim, ...]:
    """The dims of a spec, with whole ones for `...`: those that stay as they are where there is a source."""
    dots = next(filter(has_dots, tree.dims), None)
    if dots is None:
        return tree.dims
    places = [place.names for place in grammar.dim_places(dots)]
    if dots.grouped or places not in ([], [] if source is None else [("*",)]):
        stay = "aren't split" if source is None else "stay as they are"
        _wrong(f"'...' stands for whole dims that {stay}; name the dim that is split", spec, dots.span)
    if ndim is None:
        _wrong("'...' stands for dims of a tensor; without one, write every dim (or '_')", spec, dots.span)
    if ndim < len(tree.dims) - 1:
        _wrong(f"the spec has {len(tree.dims) - 1} dims beside '...', the tensor has {ndim}", spec, (0, len(spec)))
    return without_dots(tree.dims, [grammar.UNSPLIT if source is None else _STAYS] * (ndim + 1 - len(tree.dims)))


def _wrong(message: str, spec: str, span: tuple[int, int]) -> NoReturn:
    raise ShardingError(f"{message}\n{pointed(spec, *span)}")
