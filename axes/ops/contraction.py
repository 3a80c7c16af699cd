"""The local part of an einsum: `linear` or `matmul` where it is one of these, else `torch.einsum`.

>>> x, w = (("s",), ("b",), ("d",)), (("h", "k"), ("d",))
>>> sizes = {"s": 3, "b": 2, "d": 4, "h": 5, "k": 2}
>>> contraction((x, w), (("s",), ("b",), ("h", "k")), sizes).__name__
'linear'
>>> contraction((x, w), (("b",), ("h",), ("s",), ("k",)), sizes)(torch.ones(3, 2, 4), torch.ones(10, 4)).shape
torch.Size([2, 5, 3, 2])
"""

from __future__ import annotations

import functools
import math
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from axes.algebra.errors import ExpressionError
from axes.algebra.expressions.reading import Groups

Atoms = tuple[str, ...]
Run = Callable[..., torch.Tensor]
Stage = Callable[[torch.Tensor], torch.Tensor]


def contraction(terms: Sequence[Groups], goal: Groups, sizes: Mapping[str, int]) -> Run:
    """A function of the operands, whose dims are groups of atoms, that gives a tensor with the dims of `goal`.

    `goal` has each atom once, and all of them are the operands'. `sizes` may be symbolic.
    """
    if len(terms) == 2 and (found := _linear(terms[0], terms[1], goal)) is not None:
        return found
    text = equation(tuple(map(flat, terms)), flat(goal))
    every = Counter([atom for term in terms for atom in {*flat(term)}])
    product = functools.partial(_einsum, text, any(every[atom] == 1 for atom in every.keys() - {*flat(goal)}))
    opening = [reshaping(term, [(atom,) for atom in flat(term)], sizes) for term in terms]
    merging = reshaping(goal, goal, sizes)
    if merging is None and not any(opening):
        return product

    def run(*xs: torch.Tensor) -> torch.Tensor:
        value = product(*[x if stage is None else stage(x) for stage, x in zip(opening, xs, strict=True)])
        return value if merging is None else merging(value)

    return run


def _einsum(text: str, sums_alone: bool, *xs: torch.Tensor) -> torch.Tensor:
    """`torch.einsum`; integers in int64 where a name of one operand alone is summed, whatever its size.

    torch does so but for a name of size 1, and then has operands of two dtypes, which it refuses.
    """
    if sums_alone and not any(x.is_floating_point() or x.is_complex() for x in xs):
        xs = tuple([x.to(torch.int64) for x in xs])
    return torch.einsum(text, *xs)


def _linear(one: Groups, two: Groups, goal: Groups) -> Run | None:
    """`... k` times a matrix, as it is or transposed, whose dims may be groups."""
    firsts, seconds = flat(one), flat(two)
    if len({*firsts}) < len(firsts) or len({*seconds}) < len(seconds):
        return None
    if len(one) < 2 or len(two) != 2 or goal[:-1] != one[:-1] or not {*flat(goal)}.isdisjoint(one[-1]):
        return None
    if two == (one[-1], goal[-1]):
        return torch.matmul
    return torch.nn.functional.linear if two == (goal[-1], one[-1]) else None


def flat(groups: Groups) -> Atoms:
    """The atoms of all dims, in order."""
    return tuple([atom for group in groups for atom in group])


def reshaping(term: Groups, groups: Sequence[Atoms], sizes: Mapping[str, int]) -> Stage | None:
    """From a tensor of the atoms of `term`, opened or merged, to one with a dim for each of `groups`."""
    if all(len(group) == 1 for group in term):
        return None
    shape = tuple([math.prod([sizes[atom] for atom in group]) for group in groups])
    return lambda x: torch.reshape(x, shape)


def equation(operands: tuple[Atoms, ...], result: Atoms) -> str:
    """The einsum in letters, as `torch.einsum` takes it."""
    names = dict.fromkeys(atom for atoms in operands for atom in atoms)
    if len(names) > len(string.ascii_letters):
        raise ExpressionError(f"an einsum has at most {len(string.ascii_letters)} names; found {len(names)}")
    letters = dict(zip(names, string.ascii_letters, strict=False))
    terms = ",".join("".join(letters[atom] for atom in atoms) for atoms in operands)
    return f"{terms}->{''.join(letters[atom] for atom in result)}"
