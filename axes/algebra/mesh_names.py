"""Declarations and equations: from text and a few sizes to the layout of every name.

The axes of a declaration are the digits of the rank, slowest first. An equation says that two products are the same
digits. The names of one side are known; the names of the other are the parts into which their product is split:
`fsdp = dp_shard cp` flattens, `(dp_shard cp tp) = efsdp ep` splits what it flattened. A name that is known already must
be the same part. One name, one layout.

>>> from axes.algebra.grammar import parse_declaration, parse_equation
>>> equation = parse_equation("(dp tp) = rows ep")
>>> declared(parse_declaration("dp tp"), [equation], 8, {"tp": 2, "ep": 4}, None)
{'dp': 4:2, 'tp': 2:1, 'rows': 2:4, 'ep': 4:1}

A mesh expression, `"(dp cp) tp -> dp fsdp=(cp tp)"`, is carried out by layout operations.

The left side is matched with the mesh's axes in order; its groups are splits. The right side is an order of the axes
that there are then, and its groups are flattened. So there are at most four kinds of operations: split, insert (axes of
size one), permute, flatten. All but the permute are equations, and are carried out as those are; `explain` prints the
operations that ran.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from axes.algebra.errors import ExpressionError, MeshError, SizeError, naming, pointed, shortened, shown, suggestion
from axes.algebra.grammar import (
    LARGEST_SIZE,
    Dim,
    Equation,
    Factor,
    Item,
    MeshExpression,
    has_dots,
    leaves,
    parse_mesh,
    without_dots,
)
from axes.algebra.layout import Layout
from axes.algebra.sizes import Product, given_sizes, solve

Namespace = dict[str, Layout]
Sizes = Mapping[str, int]
Dims = Sequence[Dim]


def declared(
    items: Sequence[Item],
    equations: Sequence[Equation],
    world_size: int | None,
    keywords: Sizes,
    sizes: Sizes | None,
) -> Namespace:
    """The namespace of a declaration with its equations, in the order in which names appear.

    Sizes that aren't given follow from the equations and from `world_size`, where that is known.
    Raises `ExpressionError`, `SizeError` or `MeshError` that shows the equation.
    """
    names = tuple(item.name for item in items)
    check_sides(names, equations)
    ranks = f"the axes multiply to the {world_size} ranks; a size that is left out follows"
    whole = [] if world_size is None else [Product(names, (), world_size, ranks)]
    found = solved({}, [*whole, *map(_as_product, equations)], [*items, *_items(equations)], keywords, sizes)
    for name in names:
        if name not in found:
            raise SizeError(f"the size of '{name}' is open: give it, like {name}=2, or the number of ranks")
    total = math.prod(found[name] for name in names)
    if total > LARGEST_SIZE:
        raise SizeError(f"a mesh has at most {LARGEST_SIZE} ranks; its axes have {shown(total)}")
    layouts = Layout((total,), (1,)).split([found[name] for name in names])
    return _with_equations(dict(zip(names, layouts, strict=True)), equations, found)


def defined(
    namespace: Mapping[str, Layout], equations: Sequence[Equation], keywords: Sizes, sizes: Sizes | None
) -> Namespace:
    """A namespace with the further names of some equations.

    Raises as `declared` does, and `MeshError` for a size that isn't the known name's.
    """
    check_sides(namespace, equations)
    found = solved(namespace, map(_as_product, equations), _items(equations), keywords, sizes)
    return _with_equations(dict(namespace), equations, found)


def solved(
    namespace: Mapping[str, Layout],
    products: Iterable[Product],
    items: Sequence[Item],
    keywords: Mapping[str, int | None],
    sizes: Sizes | None,
) -> dict[str, int]:
    """The sizes of known names, of those of a text that are given, and of those that follow."""
    known = {name: layout.size for name, layout in namespace.items()}
    for name, size in given_sizes(keywords, sizes, items, [item.name for item in items]).items():
        if known.setdefault(name, size) != size:
            raise MeshError(f"'{name}' has size {known[name]} in the mesh; found {name}={size}")
    return solve(products, known)


def carried_out(namespace: Mapping[str, Layout], equation: Equation, sizes: Sizes) -> tuple[Namespace, Namespace]:
    """The known side of an equation, and the other with the layouts that follow.

    >>> whole = Layout((8,), (1,))
    >>> carried_out({"dp": whole}, Equation("a b = dp", (Item("a"), Item("b")), (Item("dp"),)), {"a": 2, "b": 4})
    ({'dp': 8:1}, {'a': 2:4, 'b': 4:1})
    """
    known, new = _sides(namespace, equation)
    before = {item.name: namespace[item.name] for item in known}
    with naming(equation.text):
        whole = Layout.product(*before.values())
        parts = (whole,) if len(new) == 1 else whole.split([sizes[item.name] for item in new])
    after = {item.name: part for item, part in zip(new, parts, strict=True)}
    for item in new:
        old = namespace.get(item.name, after[item.name])
        if old != after[item.name]:
            raise MeshError(
                f"'{item.name}' already is the layout {old}, not {after[item.name]}; take another name\n"
                f"{pointed(equation.text, *item.span)}"
            )
    return before, after


def _items(equations: Sequence[Equation]) -> list[Item]:
    return [item for equation in equations for item in (*equation.left, *equation.right)]


def _as_product(equation: Equation) -> Product:
    left, right = (tuple([item.name for item in side]) for side in (equation.left, equation.right))
    return Product(left, right, 1, equation.text)


def _with_equations(namespace: Namespace, equations: Sequence[Equation], sizes: Sizes) -> Namespace:
    for equation in equations:
        namespace.update(carried_out(namespace, equation, sizes)[1])
    return namespace


def check_sides(known: Collection[str], equations: Sequence[Equation]) -> None:
    """Each equation, in order, has a side of known names: said before sizes are missing for that."""
    seen = set(known)
    for equation in equations:
        _sides(seen, equation)
        seen.update(item.name for item in _items([equation]))


def _sides(known: Collection[str], equation: Equation) -> tuple[Sequence[Item], Sequence[Item]]:
    """The side of an equation whose names are known, and the other."""
    sides = equation.right, equation.left
    unknown = [[item for item in side if item.name not in known] for side in sides]
    if not all(unknown):
        return sides if not unknown[0] else (sides[1], sides[0])
    item = unknown[0 if len(equation.left) == 1 else 1][0]
    message = f"one side of an equation has only known names; {shortened(item.name)} isn't known"
    raise ExpressionError(message + suggestion(item.name, known), equation.text, *item.span)


# --- mesh expressions -----------------------------------------------------------------------------

LayoutOperation = dict[str, Any]
"""One operation on the axes of a mesh: its `kind`, the layouts of the axes `before` it, and of those `after` it."""


def rearranged(
    axes: Sequence[str], namespace: Mapping[str, Layout], expression: str, sizes: Mapping[str, int | None]
) -> tuple[tuple[str, ...], Namespace, dict[str, Any]]:
    """Carry a mesh expression out on a mesh with these axes, in order, and these names.

    Returns the axes of the result, the names with those that the operations made, and how it was read and carried out.

    Raises `ExpressionError` with a caret where the expression isn't about this mesh, `SizeError`
    for sizes that don't follow, `MeshError` where a name already means other ranks.
    """
    tree = parse_mesh(expression)
    left, right = _without_dots(tree, axes)
    found = _solved(axes, namespace, tree, left, sizes)
    made, steps = dict(namespace), list[LayoutOperation]()

    def note(kind: str, before: Namespace, after: Namespace) -> None:
        made.update(after)
        texts = [{name: str(layout) for name, layout in axes.items()} for axes in (before, after)]
        steps.append({"kind": kind, "before": texts[0], "after": texts[1]})

    def carry_out(kind: str, new: tuple[Item, ...], known: tuple[Item, ...]) -> None:
        note(kind, *carried_out(made, Equation(tree.text, new, known), found))

    for dim, axis in zip(left, axes, strict=True):
        if dim.grouped:
            carry_out("split", leaves([dim]), (Item(axis),))
    fresh = _inserted(tree, left, right, found)
    if fresh:
        carry_out("insert", fresh, ())
    order, wanted = [item.name for item in (*leaves(left), *fresh)], [item.name for item in leaves(right)]
    if order != wanted:
        note("permute", {n: made[n] for n in order}, {n: made[n] for n in wanted})
    for dim in right:
        if dim.grouped:
            carry_out("flatten", (Item(_label(dim), span=dim.span),), leaves([dim]))
    sides = "  ->  ".join(" ".join(str(_sized(dim, found)) for dim in side) for side in (left, right))
    reading = f"({' '.join(axes)}) read as  {sides}"
    written = {item.name: found[item.name] for item in (*leaves(left), *leaves(right))}
    return tuple(map(_label, right)), made, {"kind": "mesh", "read": reading, "sizes": written, "steps": steps}


def _without_dots(tree: MeshExpression, names: Sequence[str]) -> tuple[Dims, Dims]:
    """Both sides with `...` as the axes that it stands for; the left one has an entry for each axis of the mesh."""
    dots = [dim for dim in (*tree.left, *tree.right) if has_dots(dim)]
    if len(dots) == 1:
        raise ExpressionError("'...' stands on both sides, or on none", tree.text, *dots[0].span)
    count = len(tree.left) - bool(dots)
    if count > len(names) or (count < len(names) and not dots):
        found = f"the mesh has {len(names)} axes ({' '.join(names)}), the left side describes {count}"
        raise ExpressionError(found, tree.text, 0, max(1, tree.text.find("->")))
    first = tree.left.index(dots[0]) if dots else 0
    hidden = [Dim((Factor(name),)) for name in names[first : first + len(names) - count]]
    left, right = (without_dots(side, hidden) for side in (tree.left, tree.right))
    for dim, name in zip(left, names, strict=True):
        said = str(dim.factors[0].name)
        if not dim.grouped and said != name:
            hint = suggestion(said, names) if said not in names else ""
            message = f"the axis in this place is '{name}', not {shortened(said)}{hint}"
            raise ExpressionError(message, tree.text, *dim.span)
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
            raise ExpressionError(why, tree.text, *item.span)
    missing = there.keys() - {item.name for item in leaves(right)}
    if missing:
        start = tree.text.find("->")
        keep = ", ".join(f'"{name}"' for name in sorted(there.keys() - missing))
        names = " and ".join(f"'{name}'" for name in there if name in missing)
        message = f"{names} must be on the right, too; for a sub-mesh write mesh[{keep or '...'}]"
        raise ExpressionError(message, tree.text, start, start + 2)
    return fresh


def _names(dim: Dim) -> tuple[str, ...]:
    return tuple([str(factor.name) for factor in dim.factors])


def _label(dim: Dim) -> str:
    return dim.name or "_".join(_names(dim))


def _sized(dim: Dim, sizes: Mapping[str, int]) -> Dim:
    return replace(dim, factors=tuple([Factor(name, sizes.get(name, 1)) for name in _names(dim)]))
