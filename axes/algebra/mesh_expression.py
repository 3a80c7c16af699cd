"""Mesh expressions, `"(dp cp) tp -> dp fsdp=(cp tp)"`: from text to layout operations.

The left side is matched with the mesh's axes in order; its groups are splits. The right side is an order of the axes
that there are then, and its groups are flattened. So there are at most four kinds of operations: split, insert (axes of
size one), permute, flatten. All but the permute are equations, and are carried out as those are; `explain` prints the
operations that ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from axes.algebra.equations import Namespace, carried_out, solved
from axes.algebra.errors import ExpressionError, shortened, suggestion
from axes.algebra.explanation import Explanation, Section
from axes.algebra.grammar import Dim, Equation, Factor, Item, MeshExpression, has_dots, leaves, parse_mesh, without_dots
from axes.algebra.layout import Layout
from axes.algebra.sizes import Product

Dims = Sequence[Dim]


@dataclass(frozen=True)
class LayoutOperation:
    """One operation on the axes of a mesh: the axes `before` were replaced by the axes `after`."""

    kind: str
    before: Namespace
    after: Namespace

    def __str__(self) -> str:
        if self.kind == "permute":
            return f"permute  {' '.join(self.after)}"
        before, after = (
            ", ".join([f"{name} {layout}" for name, layout in axes.items()]) for axes in (self.before, self.after)
        )
        return f"{self.kind:<8} {before}  ->  {after}" if before else f"{self.kind:<8} {after}"


@dataclass(frozen=True)
class Rearrangement:
    """What an expression did to the axes of one mesh: how it was read, the operations, and the axes of the result.

    namespace: the names of the mesh, with those that the operations made.
    """

    reading: str
    sizes: Mapping[str, int]
    steps: tuple[LayoutOperation, ...]
    axis_names: tuple[str, ...]
    namespace: Namespace

    def explanation(self) -> Explanation:
        """The reading, and what is done step by step."""
        rows = tuple([(str(step),) for step in self.steps]) or (("nothing to do",),)
        facts = {
            "kind": "mesh",
            "read": self.reading,
            "sizes": dict(self.sizes),
            "steps": [{"kind": s.kind, "before": _texts(s.before), "after": _texts(s.after)} for s in self.steps],
        }
        return Explanation(self.reading, (Section("", rows),), facts)


def _texts(axes: Namespace) -> dict[str, str]:
    return {name: str(layout) for name, layout in axes.items()}


def rearranged(
    axes: Sequence[str], namespace: Mapping[str, Layout], expression: str, sizes: Mapping[str, int | None]
) -> Rearrangement:
    """Carry a mesh expression out on a mesh with these axes, in order, and these names.

    Raises `ExpressionError` with a caret where the expression isn't about this mesh, `SizeError`
    for sizes that don't follow, `MeshError` where a name already means other ranks.
    """
    tree = parse_mesh(expression)
    left, right = _without_dots(tree, axes)
    found = _solved(axes, namespace, tree, left, sizes)
    made, steps = dict(namespace), list[LayoutOperation]()

    def carry_out(kind: str, new: tuple[Item, ...], known: tuple[Item, ...]) -> None:
        before, after = carried_out(made, Equation(tree.text, new, known), found)
        made.update(after)
        steps.append(LayoutOperation(kind, before, after))

    for dim, axis in zip(left, axes, strict=True):
        if dim.grouped:
            carry_out("split", leaves([dim]), (Item(axis),))
    fresh = _inserted(tree, left, right, found)
    if fresh:
        carry_out("insert", fresh, ())
    order, wanted = [item.name for item in (*leaves(left), *fresh)], [item.name for item in leaves(right)]
    if order != wanted:
        steps.append(LayoutOperation("permute", {n: made[n] for n in order}, {n: made[n] for n in wanted}))
    for dim in right:
        if dim.grouped:
            carry_out("flatten", (Item(_label(dim), span=dim.span),), leaves([dim]))
    sides = "  ->  ".join(" ".join(str(_sized(dim, found)) for dim in side) for side in (left, right))
    reading = f"({' '.join(axes)}) read as  {sides}"
    written = {item.name: found[item.name] for item in (*leaves(left), *leaves(right))}
    return Rearrangement(reading, written, tuple(steps), tuple(map(_label, right)), made)


def _without_dots(tree: MeshExpression, names: Sequence[str]) -> tuple[Dims, Dims]:
    """Both sides with `...` as the axes that it stands for; the left one has an entry for each axis of the mesh."""
    dots = [dim for dim in (*tree.left, *tree.right) if has_dots(dim)]
    if len(dots) == 1:
        _wrong(tree, "'...' stands on both sides, or on none", dots[0].span)
    count = len(tree.left) - bool(dots)
    if count > len(names) or (count < len(names) and not dots):
        found = f"the mesh has {len(names)} axes ({' '.join(names)}), the left side describes {count}"
        _wrong(tree, found, (0, max(1, tree.text.find("->"))))
    first = tree.left.index(dots[0]) if dots else 0
    hidden = [Dim((Factor(name),)) for name in names[first : first + len(names) - count]]
    left, right = (without_dots(side, hidden) for side in (tree.left, tree.right))
    for dim, name in zip(left, names, strict=True):
        said = str(dim.factors[0].name)
        if not dim.grouped and said != name:
            hint = suggestion(said, names) if said not in names else ""
            _wrong(tree, f"the axis in this place is '{name}', not {shortened(said)}{hint}", dim.span)
    return left, right


def _solved(
    axes: Sequence[str],
    namespace: Mapping[str, Layout],
    tree: MeshExpression,
    left: Dims,
    sizes: Mapping[str, int | None],
) -> dict[str, int]:
    products = [
        Product(_names(dim), (), namespace[axis].size, f"axis '{axis}' has size {namespace[axis].size}")
        for dim, axis in zip(left, axes, strict=True)
        if dim.grouped
    ]
    # A flattened axis may be given its size; it is one more equation.
    labels = [dim for dim in tree.right if dim.name is not None]
    products += [Product((_label(dim),), _names(dim), 1, str(dim)) for dim in labels if dim.name in sizes]
    items = [*leaves(tree.left), *leaves(tree.right), *(Item(_label(dim)) for dim in labels)]
    return solved(namespace, products, items, sizes, None)


def _inserted(tree: MeshExpression, left: Dims, right: Dims, sizes: Mapping[str, int]) -> tuple[Item, ...]:
    """The new axes of the right side, of size one. All others must stand there, too."""
    there = {item.name: item for item in leaves(left)}
    fresh = tuple([item for item in leaves(right) if item.name not in there])
    for item in fresh:
        if sizes.get(item.name) != 1:
            hint = suggestion(item.name, there) if item.name not in sizes else ""
            why = f"{shortened(item.name)} isn't on the left; a new axis has size one, like pp=1{hint}"
            _wrong(tree, why, item.span)
    missing = there.keys() - {item.name for item in leaves(right)}
    if missing:
        start = tree.text.find("->")
        keep = ", ".join(f'"{name}"' for name in sorted(there.keys() - missing))
        names = " and ".join(f"'{name}'" for name in there if name in missing)
        message = f"{names} must be on the right, too; for a sub-mesh write mesh[{keep or '...'}]"
        _wrong(tree, message, (start, start + 2))
    return fresh


def _names(dim: Dim) -> tuple[str, ...]:
    return tuple([str(factor.name) for factor in dim.factors])


def _label(dim: Dim) -> str:
    return dim.name or "_".join(_names(dim))


def _sized(dim: Dim, sizes: Mapping[str, int]) -> Dim:
    return replace(dim, factors=tuple([Factor(name, sizes.get(name, 1)) for name in _names(dim)]))


def _wrong(tree: MeshExpression, message: str, span: tuple[int, int]) -> NoReturn:
    raise ExpressionError(message, tree.text, *span)
