"""Sizes: what is found for one shape serves all that are cut as evenly, numbers and symbols.

Where every size that is cut is a multiple of the pieces into which it is cut, plans, placements and gradients are the
same ones at every size, with all boxes scaled. So they are found for small sizes that share the divisors, and kept by
these (`found_for`). Where a size isn't a multiple, what is found is for this size alone. For a symbolic size, which
`torch.compile` traces so that one graph serves tensors of many shapes, it is found at the size of the call that is
traced, and the graph is guarded on dividing by the pieces as that does (`vary`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from axes.algebra.errors import AxesError, SizeError
from axes.runtime import torch_private
from axes.runtime.packing import strides_of

Shape = tuple[int, ...]
Found = TypeVar("Found")

_NUMBERS = {int}


def is_symbolic(shape: Sequence[int]) -> bool:
    """Whether a size of the shape is symbolic."""
    return not _NUMBERS.issuperset(map(type, shape))


def hints(shape: Sequence[int]) -> Shape:
    """The sizes that symbols have in the call that is being traced."""
    return tuple([size if type(size) is int else hint(size) for size in shape])


def hint(size: Any) -> int:
    """The size that a symbol has in the call that is being traced."""
    found = torch_private.hint_of(size)
    return int(size) if found is None else found


def fixed(size: int) -> int:
    """The number of a size, for which alone the graph is then.

    The guard is on a remainder that only this number has: with a comparison alone, torch would put the number for the
    symbol, and leave the guard to the tensor whose size it is. After the guard it puts it, so that results have the
    number, too: where it found only in the backward pass that the symbol is one number, it would have counted the sizes
    that the graph returns before, as many as symbols. In the backward pass itself it is too late for that.
    """
    if type(size) is int:
        return size
    number = hint(size)
    # Asking a symbolic condition for its truth makes the guard. So would an `assert`, but not under `python -O`.
    is_backward = torch_private.backward_pass() >= 0
    if not (size % _MORE_THAN_ANY_SIZE == number and (is_backward or size == number)):
        raise SizeError(f"a size is {number} in this call, and isn't in its graph: {size}")
    return number


def are_equal(one: int, other: int) -> bool:
    """Whether two sizes are the same, asked as `fixed` asks: by a comparison one symbol would be put for the other."""
    return (one - other) % _MORE_THAN_ANY_SIZE == 0


_MORE_THAN_ANY_SIZE = 2**61 - 1


def spec_at(spec: Any, shape: Shape) -> Any:
    """The `DTensorSpec` at another shape."""
    return torch_private.resized_spec(spec, shape, strides_of(shape))


def found_for(
    shape: Shape, ranks: int, find: Callable[[Shape], Found], cuts: Callable[[Found], Shape], own: Collection[int] = ()
) -> Found:
    """What is found for a shape, by the small one that is cut alike on this many ranks.

    `cuts` are those that it makes. Sizes that these don't divide stand for themselves, as those of the dims `own` do;
    and all of them where nothing is found.
    """
    own = {*own}
    while True:
        like = [size if dim in own else small_size(size, ranks) for dim, size in enumerate(shape)]
        try:
            found = find(tuple(like))
        except AxesError:
            break
        # A mesh that the tensor goes to may have more ranks: then the small size isn't cut as evenly.
        sizes = enumerate(zip(shape, like, cuts(found), strict=True))
        odd = {dim for dim, (size, small, pieces) in sizes if not pieces or size % pieces or small % pieces}
        if odd <= own:
            return found
        own |= odd
    return find(shape)


def vary(shape: Sequence[int], cuts: Shape) -> Shape:
    """The shape for which what was found at its `hints` is good in a graph: symbols, where these sizes divide by what
    they are cut into, and numbers elsewhere.
    """
    # Nor can a size vary of which shards have a single element: torch takes a size of 1 for a number.
    pairs = enumerate(zip(shape, cuts, strict=True))
    uses = [(dim, size, 0 if hint(size) == pieces else pieces) for dim, (size, pieces) in pairs]
    found = varying(uses)
    return tuple([found[dim] if dim in found else hint(size) for dim, size, _ in uses])


def varying(uses: Sequence[tuple[Any, Any, int]]) -> dict[Any, Any]:
    """The symbols of names that may have any size: each `(name, size, pieces)` has the same, and its pieces divide it.

    `pieces` is 0 where a size can't vary. The sizes of all other names are fixed.
    """
    found: dict[Any, Any] = {}
    stay = set()
    for name, size, pieces in uses:
        if type(size) is int or not pieces or size % pieces or not are_equal(size, found.setdefault(name, size)):
            stay.add(name)
    for name, size, _ in uses:
        if name in stay:
            fixed(size)
    return {name: size for name, size in found.items() if name not in stay}


@functools.lru_cache(maxsize=4096)
def small_size(size: int, ranks: int) -> int:
    """A small size that shares its divisors with the number of ranks.

    A size equal to its number of parts is kept: a leading dim of 1 makes a tile contiguous, which larger ones don't.

    >>> [small_size(size, 8) for size in (4096, 100, 8, 0)]
    [16, 12, 8, 0]
    """
    if ranks % (size or 1) == 0:
        return size
    parts = math.gcd(size, ranks)
    return next(small for small in itertools.count(2 * parts, parts) if math.gcd(small, ranks) == parts)
