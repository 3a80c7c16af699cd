"""The local part of an einsum: `torch.matmul` and `linear` where they are the same, else `torch.einsum`.

>>> contraction((("b", "s", "d"), ("d", "f")), ("b", "s", "f")).__name__
'matmul'
>>> contraction((("b", "s", "d"), ("b", "s", "f")), ("d", "f")).__name__     # a weight's gradient
'flattened'

For small tensors `torch.einsum` is several times slower than the product it ends in, since it
permutes and reshapes each operand in general.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable

import torch

from axes.algebra.errors import ExpressionError

Atoms = tuple[str, ...]
Run = Callable[..., torch.Tensor]


@functools.lru_cache(maxsize=1024)
def contraction(operands: tuple[Atoms, ...], result: Atoms) -> Run:
    """A function of the operands, whose dims are these atoms, that gives a tensor with those of `result`."""
    if len(operands) == 2:
        found = _product(*operands, result)
        if found is not None:
            return found
    return _einsum(operands, result)


def _einsum(operands: tuple[Atoms, ...], result: Atoms) -> Run:
    return functools.partial(torch.einsum, equation(operands, result))


@functools.lru_cache(maxsize=1024)
def equation(operands: tuple[Atoms, ...], result: Atoms) -> str:
    """The einsum in letters, as `torch.einsum` takes it."""
    names = dict.fromkeys(atom for atoms in operands for atom in atoms)
    if len(names) > len(string.ascii_letters):
        raise ExpressionError(f"an einsum has at most {len(string.ascii_letters)} names; found {len(names)}")
    letters = dict(zip(names, string.ascii_letters, strict=False))
    terms = ",".join("".join(letters[atom] for atom in atoms) for atoms in operands)
    return f"{terms}->{''.join(letters[atom] for atom in result)}"


def _product(one: Atoms, two: Atoms, result: Atoms) -> Run | None:
    """One matrix product, batched or not, of dims that stand in the right order already."""
    atoms = {*one, *two}
    if len(set(one)) < len(one) or len(set(two)) < len(two) or not set(result) <= atoms:
        return None
    shared = set(one) & set(two)
    if any(atom not in shared and atom not in result for atom in atoms):
        return None
    contracted = [atom for atom in one if atom in shared and atom not in result]
    if len(contracted) == 1:
        return _linear(one, two, result, contracted[0]) or _batched(one, two, result, contracted[0])
    return _flattened(one, two, result, contracted)


def _linear(one: Atoms, two: Atoms, result: Atoms, k: str) -> Run | None:
    """`... k` times a matrix, as it is or transposed."""
    if one[-1] != k or len(two) != 2 or len(one) < 2 or result[:-1] != one[:-1]:
        return None
    if two == (k, result[-1]):
        return torch.matmul
    return torch.nn.functional.linear if two == (result[-1], k) else None


def _batched(one: Atoms, two: Atoms, result: Atoms, k: str) -> Run | None:
    """Matrices with the same leading dims, each as it is or transposed."""
    if not len(one) == len(two) == len(result) >= 2 or not one[:-2] == two[:-2] == result[:-2]:
        return None
    m, n = ({*term[-2:]} - {k} for term in (one, two))
    if len(m) != 1 or len(n) != 1 or {*result[-2:]} != {*m, *n}:
        return None
    first, second = one[-1] != k, two[-1] == k
    if result[-2] in m:
        return _transposing(first, second, swapped=False)
    return _transposing(not second, not first, swapped=True)


def _transposing(first: bool, second: bool, swapped: bool) -> Run:
    """`x @ y`, or `y @ x`, with either of the two factors transposed."""

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = (y, x) if swapped else (x, y)
        return torch.matmul(x.mT if first else x, y.mT if second else y)

    return product


def _flattened(one: Atoms, two: Atoms, result: Atoms, contracted: list[str]) -> Run | None:
    """All leading dims contracted, which leaves one dim of each: the gradient of a weight."""
    if not contracted or one[:-1] != tuple(contracted) or two[:-1] != tuple(contracted):
        return None
    if one[-1] == two[-1] or set(result) != {one[-1], two[-1]}:
        return None
    straight = result[0] == one[-1]

    def flattened(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows, columns = (x, y) if straight else (y, x)
        return rows.flatten(0, -2).mT @ columns.flatten(0, -2)

    return flattened
