"""Symbolic sizes: what `torch.compile` traces so that one graph serves tensors of many shapes.

A plan is made for numbers. But where every size that it cuts is a multiple of the pieces into which it
is cut, the plan is the same one at every size, with all boxes scaled. So for symbolic sizes the plan of
a stand-in is taken: of about the same size, and divisible by everything. What it needs of the sizes, it
asks of them, which guards the graph. Where a size isn't a multiple, the plan is for this size alone.

>>> stand_in((6, 10), 4)        # numbers stand for themselves
(6, 10)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from axes.algebra.errors import AxesError, SizeError
from axes.algebra.plan import Plan
from axes.algebra.sharding import Sharding
from axes.runtime import torch_private, torch_traced
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
    found = torch_traced.hint_of(size)
    return int(size) if found is None else found


def fixed(size: int) -> int:
    """The number of a size, for which alone the graph is then.

    The guard is on a remainder that only this number has: with a comparison alone, torch would put the number for the
    symbol, and leave the guard to the tensor whose size it is. After the guard it puts it, so that results have the
    number, too: where it found only in the backward pass that the symbol is one number, it would have counted the sizes
    that the graph returns before, as many as symbols. In the backward pass itself it is too late for that.
    """
    number = hint(size)
    guard(size % _MORE_THAN_ANY_SIZE == number)
    if torch_private.backward_pass() == torch_private.NO_BACKWARD:
        guard(size == number)
    return number


def guard(holds: Any) -> None:
    """Guard the graph on a condition of symbols, which holds in the call that is traced.

    Asking a symbolic condition for its truth makes the guard. So would an `assert`, but not under `python -O`.
    """
    if not holds:
        raise SizeError(f"sizes that are equal in this call are not equal in its graph: {holds}")


def are_equal(one: int, other: int) -> bool:
    """Whether two sizes are the same, asked as `fixed` asks: by a comparison one symbol would be put for the other."""
    return (one - other) % _MORE_THAN_ANY_SIZE == 0


_MORE_THAN_ANY_SIZE = 2**61 - 1


def stand_in(shape: Sequence[int], ranks: int, fixed_dims: Collection[int] = ()) -> Shape:
    """The shape with numbers for symbols: multiples of `ranks` near those of the call that is traced.

    Of the dims whose size can't vary, it is that of this call.
    """
    found = list(shape)
    for dim, size in enumerate(shape):
        if dim in fixed_dims:
            found[dim] = fixed(size)
        elif type(size) is not int:
            found[dim] = ranks * max(1, round(hint(size) / ranks))
    return tuple(found)


def spec_at(spec: Any, shape: Shape) -> Any:
    """The `DTensorSpec` at another shape."""
    return torch_private.dtensor_spec(spec.mesh, spec.placements, shape, strides_of(shape), spec.tensor_meta.dtype)


def stages_of(plan: Plan) -> list[Sharding]:
    """How a tensor lies on its way by a plan."""
    return [plan.source, *(step.target for step in plan.steps)]


def pieces(stages: Sequence[Sharding], dim: int) -> int | None:
    """Into how many pieces of one size a dim is cut on the way through all these stages.

    1 where all cut it alike, whatever its size; None where factors of it are split, which have sizes.
    """
    found = {stage.dims[dim] for stage in stages}
    if any(len(each.factors) > 1 for each in found):
        return None
    return 1 if len(found) == 1 else math.lcm(*(each.pieces for each in found))


def uneven(stages: Sequence[Sharding], shape: Sequence[int]) -> list[int]:
    """The dims of symbolic size that can't vary: the graph is guarded on the others being multiples.

    Neither can one of which shards have a single element: torch takes a size of 1 for a number.
    """
    found = []
    for dim, size in enumerate(shape):
        if type(size) is not int:
            count = pieces(stages, dim)
            if count is None or size % count or hint(size) == count:
                found.append(dim)
    return found


def settled_sizes(
    shape: Sequence[int], ranks: int, find: Callable[[Shape], Found], stages: Callable[[Found], Sequence[Sharding]]
) -> Found:
    """What is found for a shape with symbolic sizes, by one that stands for it.

    `stages` are those that a tensor goes through by what was found. Sizes that these don't divide are
    fixed; as all are where nothing is found for a stand-in.
    """
    symbols = {dim for dim, size in enumerate(shape) if type(size) is not int}
    fixed_dims: set[int] = set()
    while True:
        try:
            found = find(stand_in(shape, ranks, fixed_dims))
        except AxesError:
            if fixed_dims == symbols:
                raise
            fixed_dims = symbols
            continue
        odd = set(uneven(stages(found), shape)) - fixed_dims
        if not odd:
            return found
        fixed_dims |= odd
