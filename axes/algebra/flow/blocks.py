"""Expressions with blocks, in the rules of transfers: a dim that holds several tensors, one behind the other.

`"(h k + g k + g k) d -> h k d, g k d, g k d"` takes a fused projection apart. It is three expressions, one for each
block, between tensors that are cut out of the fused one:

>>> expression = read_blocks("(h k + g k + g k) d -> h k d, g k d, g k d")
>>> expression.pairs
(('(h k) d', 'h k d'), ('(g k) d', 'g k d'), ('(g k) d', 'g k d'))

The blocks of the left side, in their order, become those of the right side. What stands beside the blocks in a group
is opened before the cut: of `(g (r q + k)) d` the tensor that is cut has the dims `g blocks d`.

The notation is that of einx.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from axes.algebra import grammar
from axes.algebra.errors import ExpressionError, SizeError
from axes.algebra.grammar import Dim, Factor, Spec


@dataclass(frozen=True)
class Fused:
    """A tensor of which one dim holds blocks: its spec, the number of this dim, and for each block the tensor of it."""

    tree: Spec
    at: int
    parts: tuple[str, ...]


@dataclass(frozen=True)
class BlocksExpression:
    """An expression with blocks: the tensors of both sides, and in `pairs` what each block becomes."""

    left: tuple[Fused | str, ...]
    right: tuple[Fused | str, ...]
    pairs: tuple[tuple[str, str], ...]


@functools.lru_cache(maxsize=4096)
def read_blocks(text: str) -> BlocksExpression:
    """The expressions that an expression with blocks consists of. Cached.

    Raises `ExpressionError` where the sides hold different numbers of blocks.
    """
    tree = grammar.parse_blocks(text)
    if tree.results is None:
        raise ExpressionError("an expression needs '->' and the result behind it", text, len(text) - 1, len(text))
    left, right = tuple(map(_fused, tree.operands)), tuple(map(_fused, tree.results))
    one, other = _parts(left), _parts(right)
    if len(one) != len(other):
        raise ExpressionError(
            f"the left side is {len(one)} tensors, blocks counted, and the right side {len(other)}; "
            "each block becomes one tensor or block, in their order",
            text,
            0,
            len(text),
        )
    return BlocksExpression(left, right, tuple(zip(one, other, strict=True)))


def _parts(side: Iterable[Fused | str]) -> list[str]:
    return [part for each in side for part in (each.parts if isinstance(each, Fused) else (each,))]


def _fused(spec: Spec) -> Fused | str:
    at = next((i for i, dim in enumerate(spec.dims) if any(f.blocks for f in dim.factors)), None)
    if at is None:
        return str(spec)
    factors = spec.dims[at].factors
    number = next(i for i, f in enumerate(factors) if f.blocks)
    before, behind = _opened([*spec.dims[:at], *map(_alone, factors[:number])]), _opened(spec.dims[at + 1 :])
    behind = (*map(_alone, factors[number + 1 :]), *behind)
    blocks = [Dim(block, grouped=len(block) > 1) for block in factors[number].blocks]
    return Fused(spec, at, tuple([str(replace(spec, dims=(*before, block, *behind))) for block in blocks]))


def _alone(factor: Factor) -> Dim:
    return Dim((factor,))


def _opened(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """Each factor as a dim, so that no size is asked for."""
    return tuple([_alone(factor) for dim in dims for factor in dim.factors])


def sizes_of_blocks(
    fused: Fused, text: str, shape: tuple[int, ...], given: Mapping[str, int]
) -> tuple[dict[str, int], tuple[int, ...]]:
    """The sizes of names, and how many elements each block has in a tensor of this shape.

    Raises `SizeError` where a size doesn't follow or doesn't fit.

    >>> (qkv,) = read_blocks("(h k + g k + g k) d -> h k d, g k d, g k d").left
    >>> sizes_of_blocks(qkv, "", (32, 5), {"h": 8, "g": 4})
    ({'h': 8, 'g': 4, 'k': 2}, (16, 8, 8))
    """
    dims, dim = fused.tree.dims, fused.tree.dims[fused.at]
    dots = [at for at, each in enumerate(dims) if grammar.has_dots(each)]
    if len(shape) != len(dims) and not (dots and len(shape) >= len(dims) - 1):
        raise SizeError(f"'{fused.tree}' has {len(dims)} dims; the tensor has {len(shape)}\nin  {text}")
    extents = {
        at: shape[at - len(dims) if dots and at > dots[0] else at] for at in range(len(dims)) if str(dims[at]) != "..."
    }
    occurring = [f for each in dim.factors for f in (itertools.chain(*each.blocks) if each.blocks else (each,))]
    names = dict.fromkeys(str(factor.name) for factor in occurring if factor.name)
    alone = {str(dims[at].factors[0].name): size for at, size in extents.items() if len(dims[at].factors) == 1}
    known = {**{name: size for name, size in alone.items() if name in names}, **given}
    missing = [name for name in names if name not in known]

    def elements(factors: Iterable[Factor], sizes: Mapping[str, int]) -> int:
        return math.prod([factor.size or 1 if factor.name is None else sizes[factor.name] for factor in factors])

    def whole(sizes: Mapping[str, int]) -> int:
        parts = [each.blocks or ((each,),) for each in dim.factors]
        return math.prod([sum([elements(block, sizes) for block in blocks]) for blocks in parts])

    total = extents[fused.at]
    if len(missing) > 1:
        raise SizeError(
            f"the sizes of {' and '.join(map(repr, missing))} don't follow from  {dim} = {total}\n"
            f"give all but one of them, like {missing[0]}=2\nin  {text}"
        )
    for name in missing:
        # A name stands once in a block: how many elements there are grows evenly with its size.
        none, one = whole({**known, name: 0}), whole({**known, name: 1})
        if one > none and total >= none and (total - none) % (one - none) == 0:
            known[name] = (total - none) // (one - none)
    if any(name not in known for name in missing) or whole(known) != total:
        written = ", ".join(f"{name}={known[name]}" for name in names if name in known)
        raise SizeError(f"{dim} can't be {total}{', with ' if written else ''}{written}\nin  {text}")
    blocks = next(factor.blocks for factor in dim.factors if factor.blocks)
    return known, tuple([elements(block, known) for block in blocks])
