"""Checks of options."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Collection, Mapping
from typing import Any

from axes import ShardingError, SizeError
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


def checked_sizes(sizes: Mapping[str, int], known: Collection[str] | None = None, why: str = "") -> dict[str, int]:
    """Sizes of names; `SizeError` for what is no whole number from 1, or no `known` name, with the reason."""
    found: dict[str, int] = {}
    for name, size in sizes.items():
        if known is not None and name not in known:
            raise SizeError(f"a size is given for '{name}', which is no option and {why}; known: {', '.join(known)}")
        try:
            found[name] = operator.index(size)
        except TypeError:
            found[name] = 0
        if found[name] < 1 or isinstance(size, bool):
            raise SizeError(f"the size of '{name}' is a whole number from 1; found {shown(size)}")
    return found
