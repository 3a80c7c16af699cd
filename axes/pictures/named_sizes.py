"""Whole shapes by the sizes of names, where none is given.

>>> shape_of_names("b (h@tp d)", {"b": 8, "h": 4, "d": 64})
(8, 256)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from axes.algebra.errors import SizeError, shortened
from axes.algebra.grammar import Spec, parse_spec


def shape_of_names(spec: str | Spec, sizes: Mapping[str, int], text: str = "") -> tuple[int, ...]:
    """The whole shape of a tensor, from the sizes of the names in its spec. text: of which it is a part.

    Raises `SizeError` for a dim whose size isn't known.
    """
    tree = parse_spec(spec) if isinstance(spec, str) else spec
    factors = [factor for dim in tree.dims for factor in dim.factors]
    known = {each: sizes.get(each.name or "") if each.size is None else each.size for each in factors}
    for factor in (factor for factor, size in known.items() if size is None):
        if factor.name in (None, "_", "..."):
            raise SizeError(f"'{factor}' in '{text or spec}' has no name for a size: name each dim, as in 'b s d'")
        name = shortened(factor.name)
        raise SizeError(f"the size of {name} is open in '{text or spec}': give it, like {factor.name}=8")
    return tuple(math.prod(known[factor] or 0 for factor in dim.factors) for dim in tree.dims)
