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
    shape = []
    for dim in tree.dims:
        known = [sizes.get(f.name or "") if f.size is None else f.size for f in dim.factors]
        missing = [factor.name or "_" for factor, size in zip(dim.factors, known, strict=True) if size is None]
        if "..." in missing or "_" in missing:
            raise SizeError(f"'{dim}' in '{text or spec}' has no name for a size: name each dim, as in 'b s d'")
        if missing:
            name = shortened(missing[0])
            raise SizeError(f"the size of {name} is open in '{text or spec}': give it, like {missing[0]}=8")
        shape.append(math.prod(size for size in known if size is not None))
    return tuple(shape)
