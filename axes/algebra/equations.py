"""Declarations and equations: from text and a few sizes to the layout of every name.

The axes of a declaration are the digits of the rank, slowest first. An equation says that two products are the same
digits. The names of one side are known; the names of the other are the parts into which their product is split:
`fsdp = dp_shard cp` flattens, `(dp_shard cp tp) = efsdp ep` splits what it flattened. A name that is known already must
be the same part. One name, one layout.

>>> from axes.algebra.grammar import parse_declaration, parse_equation
>>> equation = parse_equation("(dp tp) = rows ep")
>>> declared(parse_declaration("dp tp"), [equation], 8, {"tp": 2, "ep": 4}, None)
{'dp': 4:2, 'tp': 2:1, 'rows': 2:4, 'ep': 4:1}
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from axes.algebra.errors import AxesError, ExpressionError, MeshError, SizeError, pointed, shortened, shown, suggestion
from axes.algebra.grammar import LARGEST_SIZE, Equation, Item
from axes.algebra.layout import Layout
from axes.algebra.sizes import Product, given_sizes, solve

Namespace = dict[str, Layout]
Sizes = Mapping[str, int]


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
    _check_sides(names, equations)
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
    _check_sides(namespace, equations)
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
    try:
        whole = Layout.product(*before.values())
        parts = (whole,) if len(new) == 1 else whole.split([sizes[item.name] for item in new])
    except AxesError as error:
        raise type(error)(f"{error}\nin  {equation.text}") from None
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


def _check_sides(known: Collection[str], equations: Sequence[Equation]) -> None:
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
