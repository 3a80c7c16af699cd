"""Sizes that nobody should have to compute: solved from the others in their product.

An equation says that two products of names are equal, `fsdp = dp_shard cp`; one more says that
the declared axes multiply to the size of the world. Each can give the one size it lacks, and what
it gives may complete another.

Here is also what every function asks that takes a size, a shape or a rank: whether it is a whole number.
They ask before any cache is looked into, since Python finds 4.0 and True where 4 and 1 were kept.

>>> world = Product(("dp", "tp"), (), 64, "dp tp = the world")
>>> sparse = Product(("dp", "tp"), ("rows", "ep"), 1, "(dp tp) = rows ep")
>>> solve([sparse, world], {"tp": 4, "ep": 8})
{'tp': 4, 'ep': 8, 'dp': 16, 'rows': 8}
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from axes.algebra.errors import MeshError, ShardingError, SizeError, shortened, shown, suggestion
from axes.algebra.grammar import LARGEST_SIZE, Item

Shape = tuple[int, ...]
"""The sizes of a tensor's dims."""

_SHOWN = 12
_PLAIN = frozenset({int})


@dataclass(frozen=True, slots=True)
class Product:
    """`left[0] * left[1] * ... == factor * right[0] * ...`, and how to write it in an error."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    factor: int
    text: str


def whole_number(value: object) -> int | None:
    """`value` as a plain `int`, of whatever integer type it is; None for anything else, and for a bool.

    >>> whole_number(4), whole_number(4.0), whole_number(True), whole_number("4")
    (4, None, None, None)
    """
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except Exception:  # of the value's own class: tensors without values raise a RuntimeError
        return None


def tuple_of(values: object) -> tuple[Any, ...] | None:
    """What an iterable gives; None for what isn't one, and where it raises instead (as a sharded DTensor does).

    >>> tuple_of([1, "b"]), tuple_of(3)
    ((1, 'b'), None)
    """
    try:
        return tuple(values)  # type: ignore[arg-type]
    except Exception:  # of the iterable's own class
        return None


def whole_numbers(values: object) -> tuple[int, ...] | None:
    """A sequence of integers as plain `int`; None where it isn't one.

    >>> whole_numbers([4, -1]), whole_numbers((4, 1.0)), whole_numbers(4)
    ((4, -1), None, None)
    """
    found = tuple(values) if isinstance(values, tuple | list) else tuple_of(values)
    if found is None or _PLAIN.issuperset(map(type, found)):
        return found
    numbers = []
    for value in found:  # up to the first that is none: a text may be long
        if (number := whole_number(value)) is None:
            return None
        numbers.append(number)
    return tuple(numbers)


def checked_shape(shape: object) -> tuple[int, ...]:
    """A shape as a tuple of plain `int`; `SizeError` for what isn't whole numbers from 0.

    >>> checked_shape([4, 8])
    (4, 8)
    """
    found = whole_numbers(shape)
    if found is None or [size for size in found if size < 0]:  # dynamo can't follow `min` of symbols
        raise SizeError(f"a shape is whole numbers from 0; found {shown(shape)}")
    return found


def checked_tensor_shape(shape: object) -> tuple[int, ...]:
    """The same of a tensor that torch can have; `SizeError` for one of more elements than torch can count."""
    found = checked_shape(shape)
    if math.prod(found) >= 2**63:
        raise SizeError(f"a tensor has fewer than 2**63 elements; found the shape {shown(list(found))}")
    return found


def checked_rank(what: str, rank: object, least: int = 0) -> int:
    """A rank, or a number of ranks from `least` on, as a plain `int`; `MeshError`, which says what was given, for
    anything else."""
    found = rank if type(rank) is int else whole_number(rank)
    if found is None or not least <= found < LARGEST_SIZE:
        raise MeshError(f"{what} is a whole number from {least}; found {shown(rank)}")
    return found


def checked_flag(what: str, value: object) -> bool:
    """True or False; `ShardingError`, which says what was given, for anything else.

    >>> checked_flag("async_op", True)
    True
    """
    if not isinstance(value, bool):
        raise ShardingError(f"{what} is True or False; found {shown(value)}")
    return value


def checked_texts(what: str, values: object, hint: str) -> Mapping[str, str]:
    """A mapping from text to text; `ShardingError`, with an example, for anything else."""
    if not isinstance(values, Mapping) or not all(isinstance(each, str) for pair in values.items() for each in pair):
        raise ShardingError(f"{what}, like {hint}; found {shown(values)}")
    return values


def given_sizes(
    keywords: Mapping[str, object],
    sizes: Mapping[str, object] | None,
    items: Iterable[Item] = (),
    known: Iterable[str] | None = None,
    where: str = "the expression",
) -> dict[str, int]:
    """All sizes that the user wrote, by name: keywords, the `sizes` mapping and inline.

    `known` are the names that may have one, of the text that `where` says. Raises `SizeError` for an unknown name, for
    what isn't a whole number from 1, and where two places disagree. -1 and None mean "to be solved".
    """
    if sizes is not None and not isinstance(sizes, Mapping):
        raise SizeError(f"sizes is a mapping from names to sizes; found {type(sizes).__name__}")
    names = None if known is None else dict.fromkeys(known)
    found: dict[str, int] = {}
    for name, value in [*keywords.items(), *(sizes or {}).items(), *[(item.name, item.size) for item in items]]:
        if names is not None and name not in names:
            near = suggestion(str(name), [each for each in names if each != name])
            raise SizeError(f"a size is given for {shortened(name)}, which is no option and isn't in {where}{near}")
        size = checked_size(str(name), value)
        if size is not None and found.setdefault(str(name), size) != size:
            raise SizeError(f"{shortened(name)} is given two sizes: {found[str(name)]} and {size}")
    return found


def written_sizes(
    keywords: Mapping[str, object], sizes: Mapping[str, object] | None = None
) -> tuple[tuple[str, int], ...]:
    """Keywords and the `sizes` mapping together, as plain `int`: a part of the caches' keys.

    Raises `SizeError` for what isn't a whole number, and where both give one name another size.

    >>> written_sizes({"tp": 2}, {"dp": 4, "pp": None})
    (('dp', 4), ('tp', 2))
    """
    if not keywords and sizes is None:
        return ()
    if sizes is None and _PLAIN.issuperset(map(type, keywords.values())):
        return tuple([(name, keywords[name]) for name in sorted(keywords)])  # type: ignore[misc]
    found = given_sizes(keywords, sizes)
    return tuple([(name, found[name]) for name in sorted(found)])


def checked_size(name: str, value: object) -> int | None:
    """`value` as a size, None where it is to be solved; `SizeError` where it can't be one."""
    if value is None:
        return None
    size = whole_number(value)
    if size == -1:
        return None
    if size is None or not 1 <= size <= LARGEST_SIZE:
        hint = "" if size is not None else f", and there is no option {shortened(name)}"
        raise SizeError(
            f"the size of {shortened(name)} is a whole number from 1 to {LARGEST_SIZE}; found {shown(value)}{hint}"
        )
    return size


def solve(products: Iterable[Product], known: Mapping[str, int]) -> dict[str, int]:
    """The size of every name, in the order in which they were found.

    Each product gives at most one unknown, which may complete others: they are gone through until none gives more.
    Raises `SizeError`, with the equation and its numbers filled in, where one contradicts itself,
    doesn't divide, or lacks more than it can give.
    """
    sizes, waiting, left = dict(known), list[Product](), list(products)
    while len(waiting) != len(left):
        waiting, left = left, []
        for product in waiting:
            missing = [name for name in (*product.left, *product.right) if name not in sizes]
            if len(missing) > 1:
                left.append(product)
            elif missing:
                sizes[missing[0]] = _missing(product, missing[0], sizes)
            else:
                _check(product, sizes)
    for product in left[:1]:
        missing = [n for n in dict.fromkeys((*product.left, *product.right)) if n not in sizes]
        names = " and ".join(f"'{name}'" for name in missing[:8])
        raise SizeError(
            f"the sizes of {names} don't follow from  {filled(product, sizes)}\n"
            f"give {'all but one of them' if len(missing) > 1 else 'it'}, like {missing[0]}=2"
        )
    return sizes


def filled(product: Product, sizes: Mapping[str, int]) -> str:
    """The equation with its numbers: `dp_shard * cp=2 = 8`."""

    left, right = _product(product.left, sizes), _product(product.right, sizes, product.factor)
    return f"{left} = {right}    ({product.text})"


def _product(names: tuple[str, ...], sizes: Mapping[str, int], factor: int = 1) -> str:
    """One side of an equation with its numbers."""
    texts = [_sized(name, sizes) for name in names[:_SHOWN]]
    texts += ["..."] if len(names) > _SHOWN else []
    return " * ".join([*texts, *([str(factor)] if factor != 1 or not texts else [])])


def _sized(name: str, sizes: Mapping[str, int]) -> str:
    """A name with its size; of a number of an expression, which is called `3#...`, the number."""
    number, is_number, _ = name.partition("#")
    return number if is_number else f"{name}={sizes[name]}" if name in sizes else name


def _check(product: Product, sizes: Mapping[str, int]) -> None:
    left, right = _sides(product, sizes)
    if left != right and not product.right and len(product.left) == 1:
        name = product.left[0].partition("#")[0]
        hint = "\na size of 1 isn't repeated by itself: give x.expand(...)" if 1 in (left, right) else ""
        raise SizeError(f"'{name}' is {shown(left)}, found {shown(right)}    ({product.text}){hint}")
    if left != right and not product.right:
        raise SizeError(f"{_product(product.left, sizes)} is {shown(left)}, not {shown(right)}    ({product.text})")
    if left != right:
        raise SizeError(f"{shown(left)} isn't {shown(right)}:  {filled(product, sizes)}")


def _missing(product: Product, name: str, sizes: Mapping[str, int]) -> int:
    """What `name`, which stands in the product once, must be."""
    left, right = _sides(product, sizes)
    here, there = (left, right) if name in product.left else (right, left)
    size, remainder = divmod(there, here) if here else (0, 1)  # of nothing, any size would do
    if remainder or (size < 1 and there):
        raise SizeError(f"{shown(there)} doesn't divide by {shown(here)}:  {filled(product, sizes)}")
    return size


def _sides(product: Product, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Both products over the names that have a size."""
    left, right = [math.prod(map(sizes.get, side, itertools.repeat(1))) for side in (product.left, product.right)]
    return left, product.factor * right
