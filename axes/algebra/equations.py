"""Declarations and equations: from text and a few sizes to the layout of every name.

The axes of a declaration are the digits of the rank, slowest first. An equation gives further
names: `fsdp = dp_shard cp` flattens, `(dp_shard cp tp) = efsdp ep` splits what it flattened, and
one whose names are all known asserts that both sides are the same layout. One name, one layout.

>>> from axes.algebra.grammar import parse_declaration, parse_equation
>>> equation = parse_equation("(dp tp) = rows ep")
>>> declared(parse_declaration("dp tp"), [equation], 8, {"tp": 2, "ep": 4}, None)
{'dp': 4:2, 'tp': 2:1, 'rows': 2:4, 'ep': 4:1}
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from axes.algebra.errors import AxesError, ExpressionError, MeshError, SizeError, shortened, suggestion
from axes.algebra.grammar import LARGEST_SIZE, Equation, Item
from axes.algebra.layout import Layout
from axes.algebra.sizes import Product, given_sizes, solve

Namespace = Mapping[str, Layout]
Sizes = Mapping[str, int]


def declared(
    items: Sequence[Item],
    equations: Sequence[Equation],
    world_size: int | None,
    keywords: Sizes,
    sizes: Sizes | None,
) -> dict[str, Layout]:
    """The namespace of a declaration with its equations, in the order in which names appear.

    Sizes that aren't given follow from the equations and from `world_size`, where that is known.
    Raises `ExpressionError`, `SizeError` or `MeshError` that shows the equation.
    """
    every = [*items, *_items(equations)]
    names = tuple(item.name for item in items)
    _check_sides(names, equations)
    given = given_sizes(keywords, sizes, every, [item.name for item in every])
    _check_taken({name: size for name, size in given.items() if name in names}, equations, given)
    products = [_as_product(equation) for equation in equations]
    if world_size is not None:
        products.insert(0, Product(names, (), world_size, f"the axes over the {world_size} ranks"))
    else:
        # Without a number of ranks, each axis has a size of its own or one from an equation.
        products.extend(Product((name,), (name,), 1, "each axis has a size") for name in names if name not in given)
    try:
        solved = solve(products, given)
    except SizeError as error:
        if str(error).endswith(f"over the {world_size} ranks)"):
            raise SizeError(
                f"{error}\nthe sizes of the axes multiply to the number of ranks; one that is left out follows"
            ) from None
        raise
    layouts = row_major([solved[name] for name in names])
    return _with_equations(dict(zip(names, layouts, strict=True)), equations, solved)


def defined(
    namespace: Namespace, equations: Sequence[Equation], keywords: Sizes, sizes: Sizes | None
) -> dict[str, Layout]:
    """A namespace with the further names of some equations.

    Raises as `declared` does, and `MeshError` for a size that isn't the known name's.
    """
    known = {name: layout.size for name, layout in namespace.items()}
    _check_sides(known, equations)
    items = _items(equations)
    for name, size in given_sizes(keywords, sizes, items, [item.name for item in items]).items():
        if known.setdefault(name, size) != size:
            raise MeshError(f"'{name}' has size {known[name]} in the mesh; found {name}={size}")
    _check_taken(known, equations, known)
    solved = solve([_as_product(equation) for equation in equations], known)
    return _with_equations(dict(namespace), equations, solved)


def row_major(sizes: Sequence[int]) -> list[Layout]:
    """The digits of a number in these sizes, the first the slowest.

    >>> row_major((2, 4))
    [2:4, 4:1]
    """
    found: list[Layout] = []
    stride = 1
    for size in reversed(sizes):
        found.append(Layout((size,), (stride,)))
        stride *= size
        if stride > LARGEST_SIZE:
            axes = f"the last {len(found)} of its axes have {stride}"
            raise SizeError(f"a mesh has at most {LARGEST_SIZE} ranks; {axes}")
    return found[::-1]


def _items(equations: Sequence[Equation]) -> list[Item]:
    return [item for equation in equations for item in (*equation.left, *equation.right)]


def _as_product(equation: Equation) -> Product:
    left = tuple(item.name for item in equation.left)
    right = tuple(item.name for item in equation.right)
    return Product(left, right, 1, equation.text)


def _with_equations(namespace: dict[str, Layout], equations: Sequence[Equation], sizes: Sizes) -> dict[str, Layout]:
    for equation in equations:
        namespace.update(_new_names(namespace, equation, sizes))
    return namespace


def _new_names(namespace: Namespace, equation: Equation, sizes: Sizes) -> dict[str, Layout]:
    """The new names of one equation with their layouts; none where it is an assertion that holds."""
    new_side = _new_side(namespace, equation)
    new, known = (equation.left, equation.right) if new_side == 0 else (equation.right, equation.left)
    try:
        whole = Layout.product(*(namespace[item.name] for item in known))
        if new_side is None:
            other = Layout.product(*(namespace[item.name] for item in new))
            if other != whole:
                raise MeshError(f"the two sides are different ranks: {whole} and {other}")
            return {}
        parts = whole.split([sizes[item.name] for item in new])
    except AxesError as error:
        raise type(error)(f"{error}\nin the equation  {equation.text}") from None
    return {item.name: part for item, part in zip(new, parts, strict=True)}


def _check_sides(known: Collection[str], equations: Sequence[Equation]) -> None:
    """Each equation, in order, has new names on one side at most."""
    seen = set(known)
    for equation in equations:
        _new_side(seen, equation)
        seen.update(item.name for item in (*equation.left, *equation.right))


def _check_taken(axes: Sizes, equations: Sequence[Equation], sizes: Sizes) -> None:
    """No equation gives a name that is there already to other ranks."""
    for equation in equations:
        for one, other in ((equation.left, equation.right), (equation.right, equation.left)):
            names = [item.name for item in other]
            if len(one) == 1 and one[0].name in axes and all(name in sizes for name in names):
                name, size = one[0].name, math.prod(sizes[name] for name in names)
                if axes[name] != size:
                    raise MeshError(
                        f"'{name}' is a name of the mesh already, of size {axes[name]}; {' * '.join(names)} is {size}. "
                        f"Give it another name\nin the equation  {equation.text}"
                    )


def _new_side(known: Collection[str], equation: Equation) -> int | None:
    """Which side of an equation has the new names, None where both are known."""
    sides = equation.left, equation.right
    left, right = ([item for item in side if item.name not in known] for side in sides)
    if left and right:
        item = right[0] if len(sides[0]) == 1 else left[0]
        hint = suggestion(item.name, known)
        raise _at(
            equation,
            item,
            f"one side of an equation has only known names; {shortened(item.name)} isn't known{hint}",
        )
    for side, new in ((sides[0], left), (sides[1], right)):
        if new and len(new) < len(side):
            old = next(item for item in side if item.name in known)
            raise _at(
                equation,
                old,
                f"'{old.name}' is known already, so it can't stand beside the new '{new[0].name}'",
            )
    return 0 if left else 1 if right else None


def _at(equation: Equation, item: Item, message: str) -> ExpressionError:
    return ExpressionError(message, equation.text, *item.span)
