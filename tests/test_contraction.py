"""The local products of an einsum are those of `torch.einsum`, however the operands lie in memory."""

from __future__ import annotations

import functools
import math
import string
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from axes.ops.contraction import contraction

Groups = tuple[tuple[str, ...], ...]


class Case(NamedTuple):
    """A product, the sizes of its atoms, and for each operand the order in which its dims lie in memory."""

    terms: tuple[Groups, ...]
    goal: Groups
    sizes: dict[str, int]
    orders: tuple[tuple[int, ...], ...]


@st.composite
def grouped(draw: st.DrawFn, atoms: tuple[str, ...]) -> Groups:
    """The atoms in any order, some neighbours of them one dim, and dims of one element between them."""
    order = list(draw(st.permutations(atoms)))
    groups: list[tuple[str, ...]] = []
    for atom in order:
        if groups and draw(st.booleans()):
            groups[-1] = (*groups[-1], atom)
        else:
            groups.append((atom,))
    if draw(st.integers(0, 5)) == 0:
        groups.insert(draw(st.integers(0, len(groups))), ())
    return tuple(groups)


@st.composite
def products(draw: st.DrawFn) -> Case:
    """Two operands, with atoms of each kind: of both and of the result, of one, summed; also summed in one alone."""
    letters = iter(string.ascii_lowercase)

    def some(most: int) -> tuple[str, ...]:
        return tuple(next(letters) for _ in range(draw(st.integers(0, most))))

    batch, rows, columns, summed = some(2), some(2), some(2), some(3)
    alone = some(1) if draw(st.integers(0, 9)) == 0 else ()
    terms = draw(grouped((*batch, *rows, *summed, *alone))), draw(grouped((*batch, *columns, *summed)))
    sizes = {atom: draw(st.sampled_from([1, 2, 2, 3, 3, 5])) for atom in (*batch, *rows, *columns, *summed, *alone)}
    if draw(st.integers(0, 19)) == 0 and sizes:
        sizes[draw(st.sampled_from(sorted(sizes)))] = 0
    orders = tuple(tuple(draw(st.permutations(range(len(term))))) for term in terms)
    return Case(terms, draw(grouped((*batch, *rows, *columns))), sizes, orders)


def made(shape: list[int], order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers in a tensor whose dims lie in this order: sums of products of them are exact."""
    back = [order.index(dim) for dim in range(len(order))]
    values = torch.randint(-4, 5, [shape[dim] for dim in order]).to(dtype)
    if dtype.is_complex:
        values = values * (1 + 2j)
    return values.permute(back)


def shape_of(groups: Groups, sizes: dict[str, int]) -> list[int]:
    return [math.prod(sizes[atom] for atom in group) for group in groups]


def by_torch(case: Case, *xs: torch.Tensor) -> torch.Tensor:
    flat = [[atom for group in groups for atom in group] for groups in (*case.terms, case.goal)]
    opened = [x.reshape([case.sizes[atom] for atom in atoms]) for x, atoms in zip(xs, flat, strict=False)]
    text = f"{','.join(map(''.join, flat[:-1]))}->{''.join(flat[-1])}"
    return torch.einsum(text, *opened).reshape(shape_of(case.goal, case.sizes))


def operands(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    pairs = zip(case.terms, case.orders, strict=True)
    return [made(shape_of(term, case.sizes), order, dtype) for term, order in pairs]


@given(products(), st.sampled_from([torch.float64, torch.complex128, torch.int64]))
@settings(max_examples=150, deadline=None)
def test_a_product_is_that_of_einsum(case: Case, dtype: torch.dtype):
    xs = operands(case, dtype)
    ours = contraction(case.terms, case.goal, case.sizes)
    assert torch.equal(ours(*xs), by_torch(case, *xs))
    # Of operands that lie otherwise, the same function finds another order.
    xs = [x.contiguous() for x in xs]
    assert torch.equal(ours(*xs), by_torch(case, *xs))


@given(products())
@settings(max_examples=60, deadline=None)
def test_gradients_and_second_derivatives_are_those_of_einsum(case: Case):
    xs = [x.detach().requires_grad_() for x in operands(case, torch.float64)]
    found = []
    for function in (contraction(case.terms, case.goal, case.sizes), functools.partial(by_torch, case)):
        y = function(*xs)
        first = torch.autograd.grad((y**2).sum(), xs, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), xs)
        found.append((*first, *second))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@given(products())
@settings(max_examples=25, deadline=None)
def test_tangents_and_batches_of_products_are_those_of_einsum(case: Case):
    xs = tuple(operands(case, torch.float64))
    ours, theirs = contraction(case.terms, case.goal, case.sizes), functools.partial(by_torch, case)
    for one, two in zip(torch.func.jvp(ours, xs, xs), torch.func.jvp(theirs, xs, xs), strict=True):
        assert torch.equal(one, two)
    many = tuple(torch.stack([x, 2 * x, -x]) for x in xs)
    assert torch.equal(torch.func.vmap(ours)(*many), torch.func.vmap(theirs)(*many))


SIZES = {"s": 6, "b": 2, "d": 4, "q": 3, "h": 5, "k": 2}
S, B, D, Q, H, K = (("s",), ("b",), ("d",), ("q",), ("h",), ("k",))


@pytest.mark.parametrize(
    ("terms", "goal"),
    [
        (((S, B, D), (Q + H + K, D)), (Q, B, H, S, K)),
        (((S, B, D), (D, H + K)), (B, H, S, K)),
        (((S, B, H + K), (D, H, K)), (S, B, D)),
        (((B, S, H, K), (H + K, D)), (B, S, D)),
        (((S, B, H), (S, B, D)), (D, H)),
        (((B, H, S, K), (B, H, D, K)), (B, H, S, D)),
        (((B, H, S, K), (B, H, K, D)), (B, H, D, S)),
    ],
)
def test_nothing_is_copied_where_memory_allows_views(terms: tuple[Groups, ...], goal: Groups):
    product = contraction(terms, goal, SIZES)
    xs = [torch.randn(shape_of(term, SIZES)) for term in terms]
    product(*xs)
    with torch.profiler.profile() as seen:
        product(*xs)
    names = {event.name for event in seen.events()}
    assert not names & {"aten::clone", "aten::copy_", "aten::contiguous"}, names


def test_a_traced_product_serves_other_sizes():
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        sizes = {"s": x.shape[0], "b": x.shape[1], "d": 4, "h": 5, "k": 2}
        return contraction(((S, B, D), (H + K, D)), (B, H, S, K), sizes)(x, w)

    traced = torch.fx.experimental.proxy_tensor.make_fx(product, tracing_mode="symbolic")
    w = torch.randn(10, 4)
    graph = traced(torch.randn(6, 3, 4), w)
    x = torch.randn(7, 9, 4)
    torch.testing.assert_close(graph(x, w), torch.einsum("sbd,hkd->bhsk", x, w.view(5, 2, 4)))
