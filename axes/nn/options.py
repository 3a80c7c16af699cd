"""Checks of options: numbers and flags."""

from __future__ import annotations

import math
import numbers
from typing import Any

from axes.algebra.errors import ShardingError
from axes.algebra.sizes import whole_number
from axes.extension import shown


def number(what: str, value: Any, least: float, most: float = math.inf, whole: bool = False) -> Any:
    """`value`; `ShardingError` for what isn't a number, or a whole one, from `least` to `most`.

    >>> number("k is a whole number from 1", 5, least=1, whole=True)
    5
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    found: Any = whole_number(value) if whole else value if is_number else None
    if found is None or not least <= found <= most:
        raise ShardingError(f"{what}; found {shown(value)}")
    return found


def flag(what: str, value: object) -> bool:
    """True or False; `ShardingError` for anything else."""
    if not isinstance(value, bool):
        raise ShardingError(f"{what} is True or False; found {shown(value)}")
    return value
