"""Logical names: a model says what its dims are, a table says where each of them goes on the mesh.

>>> from axes.algebra.mesh import Mesh
>>> rules = Rules(batch=("dp", "fsdp"), seq="cp", heads="tp", mlp="tp", embed=None)
>>> mesh = Mesh("dp=2 fsdp=2 cp=2 tp=4")
>>> rules.spec("batch seq embed", mesh)
'batch@(dp fsdp) seq@cp embed'
>>> print(rules.explain("(heads embed) mlp", mesh, (24, 8), heads=6))
heads=6  whole  (heads=tp: 6 doesn't divide into 4 parts)
embed=4  whole
mlp=8    tp

The same code runs on any mesh: another mesh is another table. As Flax's `logical_to_mesh_axes`, whose order of
rules this is.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from axes.algebra.errors import MeshError, ShardingError, SizeError, pointed, shortened, shown, suggestion, wrong_dims
from axes.algebra.grammar import (
    UNSPLIT,
    Dim,
    Place,
    Spec,
    checked_spec,
    items_of,
    leaves,
    parse_spec,
    place_text,
    without_dots,
)
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh, ambient_stack, required_mesh
from axes.algebra.sizes import Product, checked_flag, checked_tensor_shape, given_sizes, solve, tuple_of, written_sizes

Axes: TypeAlias = str | Sequence[str] | None
"""Where a rule puts a dim: an axis, several axes, major first, or None for a dim that stays whole."""

EVERYTHING = "..."
"""As a logical name: every name that no other rule is about."""


@dataclass(frozen=True)
class Rule:
    """One line of a table: a logical name and the mesh axes that split its dim, none where it stays whole."""

    name: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}={place_text(self.axes) if self.axes else None}"


@dataclass(frozen=True)
class Choice:
    """What happens to one logical name: the axes of the rule that applies, None if none does, and why others don't.

    error: why there is no answer, for a name that no rule is about.
    """

    name: str
    size: int | None
    axes: tuple[str, ...] | None = None
    passed: tuple[str, ...] = ()
    error: str = ""


@dataclass(init=False, repr=False, unsafe_hash=True)
class Rules:
    """A table from logical names of dims to axes of the mesh.

    Rules are tried in order. A rule applies to a dim of its name if the dim isn't split yet, the tensor uses none of
    the rule's axes, and the size divides. A dim without such a rule stays whole. A name may have several rules, in a
    list of pairs. `None` keeps a dim whole. A name that the table lacks is an error, unless the table ends with
    `("...", None)`. Like the logical axis rules of Flax and MaxText.

    With `strict=True` a rule that doesn't divide is a `SizeError`. An axis that another dim uses is passed over all
    the same.

    Raises:
        ShardingError: The argument isn't a table of rules.

    Examples:
        >>> Rules([("mlp", "tp"), ("embed", ("dp", "tp")), ("embed", "dp"), ("...", None)])
        Rules([('mlp', 'tp'), ('embed', ('dp', 'tp')), ('embed', 'dp'), ('...', None)])
    """

    rules: tuple[Rule, ...]
    strict: bool

    def __init__(
        self, table: Mapping[str, Axes] | Iterable[tuple[str, Axes]] = (), /, *, strict: bool = False, **more: Axes
    ):
        pairs = tuple_of(table.items() if isinstance(table, Mapping) else table)
        if pairs is None:
            raise ShardingError(f"rules are a mapping from logical names to axes, or pairs; found {shown(table)}")
        self.rules = tuple([_rule(pair) for pair in (*pairs, *more.items())])
        self.strict = checked_flag("strict", strict)

    def spec(
        self,
        spec: str,
        mesh: Mesh | None = None,
        shape: Sequence[int] | None = None,
        *,
        sizes: Mapping[str, int] | None = None,
        **keywords: int,
    ) -> str:
        """The spec on a mesh (the ambient one by default) of a tensor whose dims have these logical names.

        A dim with an `@` keeps what it says. Without a `shape`, and the sizes of the names in groups, every dim counts
        as divisible. Raises `ShardingError` for a name without a rule, `MeshError` for an axis that the mesh doesn't
        have, and of strict rules `SizeError` for a dim that doesn't divide.
        """
        where, tree = required_mesh(mesh, "Rules.spec"), parse_spec(spec)
        whole = None if shape is None else checked_tensor_shape(shape)
        found = _choices(self, spec, where, whole, written_sizes(keywords, sizes))
        wrong = next((each for each in found if each.error), None)
        if wrong is not None:
            name = wrong.name
            factor = next(f for dim in tree.dims for f in dim.factors if f.name == name)
            kind, hint = (
                (SizeError, f"a size that divides, other axes, or {name}=None; rules that aren't strict leave it whole")
                if name in self.names
                else (
                    ShardingError,
                    f"{name}=None for a dim that stays whole, or a last rule ('...', None) for all others",
                )
            )
            raise kind(f"{wrong.error}\n{pointed(spec, *factor.span)}\nwrite {hint}")
        axes = {each.name: each.axes for each in found if each.axes}
        return str(replace(tree, dims=tuple([_placed(dim, axes) for dim in tree.dims])))

    def explain(
        self,
        spec: str,
        mesh: Mesh | None = None,
        shape: Sequence[int] | None = None,
        *,
        sizes: Mapping[str, int] | None = None,
        **keywords: int,
    ) -> str:
        """For each logical name, a line: the rule that applies, and why those before it don't."""
        given, where = written_sizes(keywords, sizes), required_mesh(mesh, "Rules.explain")
        whole = None if shape is None else checked_tensor_shape(shape)
        found = _choices(self, checked_spec(spec), where, whole, given)
        names = [each.name if each.size is None else f"{each.name}={each.size}" for each in found]
        places = ["error" if each.error else place_text(each.axes) if each.axes else "whole" for each in found]
        reasons = [each.error or (f"({'; '.join(each.passed)})" if each.passed else "") for each in found]
        widths = [max(map(len, column), default=0) for column in (names, places)]
        rows = zip(names, places, reasons, strict=True)
        return "\n".join(f"{name:<{widths[0]}}  {place:<{widths[1]}}  {why}".rstrip() for name, place, why in rows)

    @staticmethod
    def ambient(what: str, rules: Rules | None = None) -> Rules | None:
        """The rules that are given, else those of `use_rules`, else None; `what` asks for them, as an error says."""
        return ambient_rules() if rules is None else checked_rules(rules, what)

    @property
    def names(self) -> tuple[str, ...]:
        """The logical names that the table is about, in its order."""
        return tuple(dict.fromkeys(rule.name for rule in self.rules))

    def __repr__(self) -> str:
        pairs = [(r.name, None if not r.axes else r.axes[0] if len(r.axes) == 1 else r.axes) for r in self.rules]
        return f"Rules({pairs!r}{', strict=True' if self.strict else ''})"


def _rule(pair: object) -> Rule:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ShardingError(
            f"a rule is a pair of a logical name and its axes, like ('heads', 'tp'); found {shown(pair)}"
        )
    name, axes = pair
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, (tuple, list)) or not all(isinstance(axis, str) and axis.isidentifier() for axis in names):
        raise ShardingError(f"the rule of {shortened(name)} is an axis, a tuple of axes, or None; found {shown(axes)}")
    if name == EVERYTHING and names:
        raise ShardingError(f"'...' is every other name, whose dims stay whole: its axes are None; found {shown(axes)}")
    if name != EVERYTHING and not name.isidentifier():
        raise ShardingError(f"a logical name is a name, or '...'; found {shortened(name)}")
    if len(set(names)) < len(names):
        raise ShardingError(f"the rule of {shortened(name)} has an axis twice: {shown(axes)}")
    return Rule(name, tuple(names))


@functools.lru_cache(maxsize=4096)
def _choices(
    rules: Rules, spec: str, mesh: Mesh, shape: tuple[int, ...] | None, sizes: tuple[tuple[str, Any], ...]
) -> tuple[Choice, ...]:
    """What happens to each logical name of a spec, in the order of the spec."""
    tree = parse_spec(spec)
    factors = [factor for dim in tree.dims if dim.place is None for factor in dim.factors]
    logical = [f.name for f in factors if f.place is None and f.name not in (None, "_", EVERYTHING)]
    extents = _extents(tree, spec, shape, dict(sizes))
    used = [(name, mesh.layout(name)) for name in tree.axes]
    found = {str(name): Choice(str(name), extents.get(str(name))) for name in logical}
    for rule in rules.rules:
        _check_axes(rule, mesh)
        choice = found.get(rule.name)
        if choice is None or choice.axes is not None:
            continue
        why = _passes_over(rule, mesh, used, choice.size)
        if not why:
            used += [(axis, mesh.layout(axis)) for axis in rule.axes]
            found[rule.name] = replace(choice, axes=rule.axes)
            continue
        strict = f"the rule {rule} is strict: {why}" if rules.strict and why.endswith(" parts") else ""
        passed = (*choice.passed, f"{rule}: {why}")
        found[rule.name] = replace(choice, passed=passed, error=choice.error or strict)
    if EVERYTHING not in rules.names:
        there = f"; rules: {', '.join(rules.names) or 'none'}"
        for name in found.keys() - {*rules.names}:
            error = f"no rule is about {shortened(name)}{suggestion(name, set(rules.names)) or there}"
            found[name] = replace(found[name], error=error)
    return tuple(found.values())


def _passes_over(rule: Rule, mesh: Mesh, used: Sequence[tuple[str, Layout]], size: int | None) -> str:
    """Why a rule doesn't apply; nothing where it does."""
    layouts = [mesh.layout(axis) for axis in rule.axes]
    for axis, layout in zip(rule.axes, layouts, strict=True):
        if any(axis == name or layout.overlaps(other) for name, other in used):
            return f"'{axis}' is used by another dim"
    parts = math.prod(layout.size for layout in layouts)
    return f"{size} doesn't divide into {parts} parts" if size is not None and size % parts else ""


def _check_axes(rule: Rule, mesh: Mesh) -> None:
    for axis in rule.axes:
        if axis not in mesh.namespace:
            raise MeshError(
                f"the rule {rule} names an axis that {mesh!r} doesn't have{suggestion(axis, mesh.namespace)}\n"
                f"declare it with size 1 ('{axis}=1'), or leave it out of the rule"
            )
    for one, other in itertools.combinations(rule.axes, 2):
        if mesh.layout(one).overlaps(mesh.layout(other)):
            raise MeshError(f"the rule {rule} names '{one}' and '{other}', which share ranks on {mesh!r}")


def _extents(tree: Spec, spec: str, shape: tuple[int, ...] | None, sizes: dict[str, Any]) -> dict[str, int]:
    """The size of each name, as far as the shape and the given sizes say it."""
    items = [item for item in leaves(tree.dims) if item.name != "_"]
    known = given_sizes(sizes, None, items, [item.name for item in items])
    if shape is None:
        return known
    dims = without_dots(tree.dims, [UNSPLIT] * (len(shape) + 1 - len(tree.dims)))
    if len(dims) != len(shape):
        raise wrong_dims(spec, len(dims), len(shape), shape)
    products = []
    for number, (dim, extent) in enumerate(zip(dims, shape, strict=True)):
        numbers = {f"{f.size}#{number}.{at}": f.size or 1 for at, f in enumerate(dim.factors) if f.name is None}
        known.update(numbers)
        names = [f"_#{number}" if item.name == "_" else item.name for item in items_of(dim.factors)]
        if extent:
            products.append(Product((*names, *numbers), (), extent, f"dim {number} of {list(shape)} in '{spec}'"))
    return {name: size for name, size in solve(products, known).items() if name.isidentifier()}


def _placed(dim: Dim, axes: Mapping[str, tuple[str, ...]]) -> Dim:
    """A dim with the places of its logical names."""
    if dim.place is not None:
        return dim
    factors = [
        replace(f, place=Place(axes[f.name])) if f.place is None and f.name is not None and f.name in axes else f
        for f in dim.factors
    ]
    return replace(dim, factors=tuple(factors))


def checked_rules(rules: object, function: str) -> Rules:
    """`rules`; `ShardingError` for what are none."""
    if not isinstance(rules, Rules):
        raise ShardingError(f"{function} takes axes.Rules; found {type(rules).__name__}")
    return rules


@contextmanager
def use_rules(rules: Rules) -> Iterator[Rules]:
    """Make rules the ambient ones of a block: `constrain`, `shard` and `shard_module` read specs by them.

    Args:
        rules: The table.

    Examples:
        >>> with use_rules(Rules(batch="dp", embed=None)):
        ...     ambient_rules().names
        ('batch', 'embed')
    """
    ambient_stack.rules.append(checked_rules(rules, "use_rules"))
    try:
        yield rules
    finally:
        ambient_stack.rules.pop()


def ambient_rules() -> Rules | None:
    """The innermost rules of this thread, or None."""
    return ambient_stack.rules[-1] if ambient_stack.rules else None
