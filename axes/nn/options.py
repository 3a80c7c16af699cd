"""Checks of options."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Collection, Mapping
from typing import Any

from axes.algebra.errors import ShardingError, SizeError
from axes.extension import shown


def number(what: str, value: Any, least: float, most: float = math.inf, whole: bool = False) -> Any:
    """`value`; `ShardingError` for what isn't a number, or a whole one, from `least` to `most`.

    >>> number("k is a whole number from 1", 5, least=1, whole=True)
    5
    """
    kind = numbers.Integral if whole else numbers.Real
    if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= most:  # type: ignore[operator]
        raise ShardingError(f"{what}; found {shown(value)}")
    return value


def checked_sizes(
    sizes: Mapping[str, int], known: Collection[str] | None = None, where: str = "the expression"
) -> dict[str, int]:
    """Sizes of names; `SizeError` for what is no whole number from 1, or no name of those that may have one."""
    found: dict[str, int] = {}
    for name, size in sizes.items():
        if known is not None and name not in known:
            near = ", ".join(known)
            raise SizeError(f"a size is given for '{name}', which is no option and isn't in {where}; known: {near}")
        try:
            whole = 0 if isinstance(size, bool) else operator.index(size)
        except TypeError:
            whole = 0
        if whole < 1:
            raise SizeError(f"the size of '{name}' is a whole number from 1; found {shown(size)}")
        found[name] = whole
    return found
