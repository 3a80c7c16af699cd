"""The local part of an einsum: `linear`, or one matrix product of dims that are merged where they lie.

>>> x, w = (("s",), ("b",), ("d",)), (("h", "k"), ("d",))
>>> sizes = {"s": 3, "b": 2, "d": 4, "h": 5, "k": 2}
>>> contraction((x, w), (("s",), ("b",), ("h", "k")), sizes).__name__
'linear'
>>> to_heads = contraction((x, w), (("b",), ("h",), ("s",), ("k",)), sizes)
>>> heads = to_heads(torch.ones(3, 2, 4), torch.ones(10, 4))
>>> heads.shape, heads.stride()
(torch.Size([2, 5, 3, 2]), (10, 2, 20, 1))

`torch.einsum` brings the dims of each operand into the order that they have in the result, and copies what
isn't in that order already. Here the order is the operand's own: positions and sequences (`s b`) are merged as
they lie in memory, the product is that of two matrices, and the result is a view of it.

The order that needs the fewest copies depends on how the operands lie in memory. It is found for the strides of
a call, and remembered.
"""

from __future__ import annotations

import functools
import itertools
import math
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from axes.algebra.errors import ExpressionError
from axes.algebra.flow.recipe import Groups
from axes.runtime.redistribute import is_plain
from axes.runtime.symbols import hints, is_symbolic

Atoms = tuple[str, ...]
Run = Callable[..., torch.Tensor]
Stage = Callable[[torch.Tensor], torch.Tensor]
Strides = tuple[int, ...]


def contraction(terms: Sequence[Groups], goal: Groups, sizes: Mapping[str, int]) -> Run:
    """A function of the operands, whose dims are groups of atoms, that gives a tensor with the dims of `goal`.

    `goal` has each atom once, and all of them are the operands'. `sizes` may be symbolic.
    """
    if len(terms) == 2 and not any(map(_repeats, terms)):
        one, two = terms
        found = _linear(one, two, goal) or _product(one, two, goal, sizes)
        if found is not None:
            return found
    return _einsum(terms, goal, sizes)


def _flat(groups: Groups) -> Atoms:
    return tuple([atom for group in groups for atom in group])


def _repeats(groups: Groups) -> bool:
    atoms = _flat(groups)
    return len({*atoms}) < len(atoms)


# --- in general: torch.einsum


def _einsum(terms: Sequence[Groups], goal: Groups, sizes: Mapping[str, int]) -> Run:
    text = equation(tuple(map(_flat, terms)), _flat(goal))
    opening = [_reshaping(_is_merged(term), [(atom,) for atom in _flat(term)], sizes) for term in terms]
    merging = _reshaping(_is_merged(goal), goal, sizes)
    if merging is None and not any(opening):
        return functools.partial(torch.einsum, text)

    def run(*xs: torch.Tensor) -> torch.Tensor:
        value = torch.einsum(text, *[x if stage is None else stage(x) for stage, x in zip(opening, xs, strict=True)])
        return value if merging is None else merging(value)

    return run


def _is_merged(groups: Groups) -> bool:
    return any(len(group) != 1 for group in groups)


def _reshaping(needed: bool, groups: Sequence[Atoms], sizes: Mapping[str, int]) -> Stage | None:
    if not needed:
        return None
    shape = _shape(groups, sizes)
    return lambda x: x.reshape(shape)


def _shape(groups: Sequence[Atoms], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple([math.prod([sizes[atom] for atom in group]) for group in groups])


@functools.lru_cache(maxsize=1024)
def equation(operands: tuple[Atoms, ...], result: Atoms) -> str:
    """The einsum in letters, as `torch.einsum` takes it."""
    names = dict.fromkeys(atom for atoms in operands for atom in atoms)
    if len(names) > len(string.ascii_letters):
        raise ExpressionError(f"an einsum has at most {len(string.ascii_letters)} names; found {len(names)}")
    letters = dict(zip(names, string.ascii_letters, strict=False))
    terms = ",".join("".join(letters[atom] for atom in atoms) for atoms in operands)
    return f"{terms}->{''.join(letters[atom] for atom in result)}"


# --- two operands: a product of matrices


def _linear(one: Groups, two: Groups, goal: Groups) -> Run | None:
    """`... k` times a matrix, as it is or transposed."""
    if len(one) < 2 or len(two) != 2 or goal[:-1] != one[:-1] or _overlap(_flat(goal), one[-1]):
        return None
    if two == (one[-1], goal[-1]):
        return torch.matmul
    return torch.nn.functional.linear if two == (goal[-1], one[-1]) else None


def _overlap(one: Atoms, other: Atoms) -> bool:
    return not set(one).isdisjoint(other)


@dataclass(frozen=True)
class Order:
    """The atoms of a product by what becomes of them, each in the order in which they are merged.

    batch: in both operands and the result. rows, columns: in the result, and in the first or the second
    operand. summed: in both operands, and not in the result.
    """

    batch: Atoms
    rows: Atoms
    columns: Atoms
    summed: Atoms

    def matrix(self, kept: Atoms) -> Groups:
        """The dims of an operand: a matrix, or one for each element of the batch."""
        return (self.batch, kept, self.summed) if self.batch else (kept, self.summed)

    @property
    def product(self) -> Groups:
        """The dims of the product."""
        return (self.batch, self.rows, self.columns) if self.batch else (self.rows, self.columns)


@dataclass(frozen=True)
class InMemory:
    """How an operand lies in memory: its atoms of more than one element in order, and the stride of each."""

    atoms: Atoms
    strides: Mapping[str, int]

    def by_stride(self, atoms: Atoms) -> Atoms:
        """These atoms in the order of memory."""
        return tuple(sorted(atoms, key=lambda atom: -self.strides[atom]))


def _product(one: Groups, two: Groups, goal: Groups, sizes: Mapping[str, int]) -> Run | None:
    """The product of two operands as one of matrices; None where no atom is summed, or one that stands alone."""
    firsts, seconds, result = map(_flat, (one, two, goal))
    if {*firsts, *seconds} == {*result} or not {*firsts} ^ {*seconds} <= {*result}:
        return None

    def arranged(first: Strides, second: Strides) -> Run:
        numbers = dict(zip(sizes, hints(tuple(sizes.values())), strict=True))
        held = [_held(*each, sizes, numbers) for each in ((one, first), (two, second))]
        return _matrices((one, two), goal, sizes, _cheapest(held[0], held[1], _without_ones(result, sizes), numbers))

    remembered = functools.lru_cache(maxsize=64)(arranged)

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = x.stride(), y.stride()
        if (is_plain(x) and is_plain(y)) or not is_symbolic((*first, *second)):
            return remembered(first, second)(x, y)
        return arranged(hints(first), hints(second))(x, y)

    return product


def _without_ones(atoms: Atoms, sizes: Mapping[str, int]) -> Atoms:
    """The atoms that may have more than one element: of others it doesn't matter where they are."""
    return tuple([atom for atom in atoms if type(sizes[atom]) is not int or sizes[atom] != 1])


def _held(groups: Groups, strides: Strides, sizes: Mapping[str, int], numbers: Mapping[str, int]) -> InMemory:
    found = {}
    for group, stride in zip(groups, strides, strict=True):
        for atom in reversed(group):
            found[atom] = stride
            stride *= numbers[atom]
    return InMemory(_without_ones(_flat(groups), sizes), found)


def _cheapest(one: InMemory, two: InMemory, result: Atoms, sizes: Mapping[str, int]) -> Order:
    """The order by which the fewest elements are copied: of operands, or of a result that isn't contiguous."""

    def cost(order: Order) -> tuple[int, int]:
        matrices = [order.matrix(order.rows), order.matrix(order.columns)]
        copied = sum(_copied(held, matrix, sizes) for held, matrix in zip((one, two), matrices, strict=True))
        permuted = sum(
            held.atoms not in (_flat(matrix), _flat(_turned(matrix)))
            for held, matrix in zip((one, two), matrices, strict=True)
        )
        straight = result in (_flat(order.product), _flat(_turned(order.product)))
        return copied + (0 if straight else math.prod([sizes[atom] for atom in result])), permuted

    return min(_orders(one, two, result), key=cost)


def _orders(one: InMemory, two: InMemory, result: Atoms) -> Iterator[Order]:
    """Of each kind of atoms the orders that they have in memory or in the result."""
    batch, rows, columns = (
        tuple([atom for atom in result if (atom in one.atoms, atom in two.atoms) == where])
        for where in ((True, True), (True, False), (False, True))
    )
    summed = tuple([atom for atom in one.atoms if atom not in result])
    every = (
        dict.fromkeys([one.by_stride(batch), two.by_stride(batch), batch]),
        dict.fromkeys([one.by_stride(rows), rows]),
        dict.fromkeys([two.by_stride(columns), columns]),
        dict.fromkeys([one.by_stride(summed), two.by_stride(summed)]),
    )
    return itertools.starmap(Order, itertools.product(*every))


def _copied(held: InMemory, matrix: Groups, sizes: Mapping[str, int]) -> int:
    """The elements of an operand, where it is no matrix that a product can take as it lies; else 0."""
    is_view = all(
        held.strides[left] == sizes[right] * held.strides[right]
        for atoms in matrix
        for left, right in itertools.pairwise(atoms)
    )
    ends = [held.strides[atoms[-1]] for atoms in matrix[-2:] if atoms]
    return 0 if is_view and (not ends or 1 in ends) else math.prod([sizes[atom] for atom in held.atoms])


def _matrices(terms: tuple[Groups, Groups], goal: Groups, sizes: Mapping[str, int], order: Order) -> Run:
    """The product in this order."""
    one, two = terms
    if _flat(_turned(order.product)) == _without_ones(_flat(goal), sizes) != _flat(order.product):
        turned = Order(order.batch, order.columns, order.rows, order.summed)
        product = _matrices((two, one), goal, sizes, turned)
        return lambda x, y: product(y, x)
    left, left_turned = _as_matrix(one, order.matrix(order.rows), sizes)
    right, right_turned = _as_matrix(two, order.matrix(order.columns), sizes)
    finish = _rearranging(order.product, goal, sizes)
    multiply = torch.bmm if order.batch else torch.mm

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x if left is None else left(x)
        y = y if right is None else right(y)
        found = multiply(x.mT if left_turned else x, y if right_turned else y.mT)
        return found if finish is None else finish(found)

    return run


def _turned(matrix: Groups) -> Groups:
    """The dims of the transposed matrix, or matrices."""
    *batch, rows, columns = matrix
    return (*batch, columns, rows)


def _as_matrix(groups: Groups, matrix: Groups, sizes: Mapping[str, int]) -> tuple[Stage | None, bool]:
    """From an operand to this matrix, and whether it is the transposed one, as which it lies in memory."""
    turned = _flat(_turned(matrix)) == _without_ones(_flat(groups), sizes) != _flat(matrix)
    return _rearranging(groups, _turned(matrix) if turned else matrix, sizes), turned


def _rearranging(source: Groups, target: Groups, sizes: Mapping[str, int]) -> Stage | None:
    """From a tensor whose dims are the groups of `source` to that with those of `target`; None where they are the same.

    Atoms of one element stand in no group, or in any.
    """
    shape = _shape(target, sizes)
    source, target = (tuple([_without_ones(group, sizes) for group in groups]) for groups in (source, target))
    if source == target:
        return None
    have, want = _flat(source), _flat(target)
    if have == want:
        return lambda x: x.reshape(shape)
    permutation = [have.index(atom) for atom in want]
    opened = _reshaping(source != _singles(have), _singles(have), sizes)
    merged = _reshaping(target != _singles(want), target, sizes)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = (x if opened is None else opened(x)).permute(permutation)
        return x if merged is None else x.reshape(shape)

    return run


def _singles(atoms: Atoms) -> Groups:
    return tuple([(atom,) for atom in atoms])
