"""Collectives by axis name, against one process that sees every rank's tensor.

Each rank can make every rank's input from a seed, so it computes what the collective should give,
and the gradient of the sum of all ranks' losses, by plain torch and compares with what came.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.algebra.errors import AxesError, MeshError, ShardingError, SizeError
from axes.ops import collectives as named
from axes.runtime.collectives import axis_layout

DECLARATION = ("dp=2 cp=2 tp=2", "rest = cp tp", "back = tp dp", "(dp cp tp) = rows ep")
AXES = ("dp", "cp", "tp", "rest", "back", "ep", ("tp", "cp"), ("dp", "cp", "tp"), ("tp",), ())
REDUCTIONS = ("psum", "pmean", "pmax", "pmin")
OPERATIONS = (*REDUCTIONS, "all_gather", "psum_scatter", "all_to_all", "ppermute")

FLOATS = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 1e-2, torch.bfloat16: 5e-2}
OTHERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)


def mesh() -> axes.Mesh:
    return axes.init_mesh(*DECLARATION, ep=4, device_type="cpu")


@dataclass(frozen=True)
class Case:
    operation: str
    axis: str | tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    other: int
    shift: int | None
    shuffle: int
    strided: bool
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    operation = draw(st.sampled_from(OPERATIONS))
    axis = draw(st.sampled_from(AXES))
    size = axis_layout(axes.Mesh(*DECLARATION, ep=4), axis)[0].size
    needs_dim = operation in ("all_gather", "psum_scatter", "all_to_all")
    ndim = draw(st.integers(1 if needs_dim else 0, 4))
    shape = [draw(st.integers(0, 3)) for _ in range(ndim)]
    dim = draw(st.integers(-ndim, ndim - 1)) if ndim else 0
    if operation in ("psum_scatter", "all_to_all"):
        shape[dim] *= size
    dtypes = list(FLOATS) if operation == "pmean" else [*FLOATS, *OTHERS]
    if operation in ("pmax", "pmin"):
        dtypes.remove(torch.complex64)
    return Case(
        operation,
        axis,
        tuple(shape),
        draw(st.sampled_from(dtypes)),
        dim,
        draw(st.integers(-ndim, ndim - 1)) if ndim else 0,
        draw(st.none() | st.integers(-9, 9)),
        draw(st.integers(0, 999)),
        draw(st.booleans()),
        draw(st.integers(0, 2**31)),
    )


def random(shape: tuple[int, ...], dtype: torch.dtype, strided: bool, seed: int) -> torch.Tensor:
    """Small numbers with ties, in a memory order that isn't that of the dims where `strided`."""
    generator = torch.Generator().manual_seed(seed)
    flipped = tuple(reversed(shape)) if strided else shape
    x = torch.randint(0 if not dtype.is_signed else -4, 5, flipped, generator=generator)
    x = x > 0 if dtype == torch.bool else x.to(torch.float32).to(dtype)
    return x.permute(tuple(reversed(range(len(shape))))) if strided else x


def pairs(case: Case, size: int) -> list[tuple[int, int]]:
    """A random partial permutation."""
    generator = torch.Generator().manual_seed(case.shuffle)
    sources, targets = (torch.randperm(size, generator=generator).tolist() for _ in range(2))
    return list(zip(sources, targets, strict=True))[: case.shuffle % (size + 1)]


def called(case: Case, x: torch.Tensor, size: int) -> torch.Tensor:
    function = getattr(named, case.operation)
    if case.operation in REDUCTIONS:
        return function(x, case.axis)
    if case.operation == "all_to_all":
        return function(x, case.axis, case.dim, case.other)
    if case.operation == "ppermute":
        return function(
            x, case.axis, **({"shift": case.shift} if case.shift is not None else {"perm": pairs(case, size)})
        )
    return function(x, case.axis, dim=case.dim)


def expected(case: Case, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each coordinate gets, from the inputs of all."""
    size = len(xs)
    every = torch.stack(xs)
    if case.operation in REDUCTIONS:
        return [reduced(case.operation, every)] * size
    if case.operation == "all_gather":
        return [torch.cat(xs, case.dim)] * size
    if case.operation == "psum_scatter":
        return list(reduced("psum", every).tensor_split(size, case.dim))
    if case.operation == "all_to_all":
        cut = [x.tensor_split(size, case.dim) for x in xs]
        return [torch.cat([cut[source][i] for source in range(size)], case.other) for i in range(size)]
    found = [torch.zeros_like(x) for x in xs]
    moves = pairs(case, size) if case.shift is None else [(i, (i + case.shift) % size) for i in range(size)]
    for source, target in moves:
        found[target] = xs[source]
    return found


def reduced(operation: str, every: torch.Tensor) -> torch.Tensor:
    """Over the first dim, in a dtype in which nothing is lost."""
    dtype = every.dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    if operation == "psum":
        return every.to(wide).sum(0).to(torch.int64 if dtype == torch.bool else dtype)
    if operation == "pmean":
        return every.to(wide).mean(0).to(dtype)
    return (every.to(wide).amax(0) if operation == "pmax" else every.to(wide).amin(0)).to(dtype)


def check(cases: list[Case]) -> None:
    with mesh() as m:
        for case in cases:
            layout, _ = axis_layout(m, case.axis)
            ranks = m.ranks_of(layout)
            here = list(ranks).index(dist.get_rank())
            xs = [random(case.shape, case.dtype, case.strided, case.seed + rank) for rank in ranks]
            before = xs[here].clone()
            got, wanted = called(case, xs[here], len(xs)), expected(case, xs)[here]
            assert same(got, wanted, case), f"{case}: {got} instead of {wanted}"
            assert same(xs[here], before, case), f"{case} changed its input"
            if case.dtype in FLOATS:
                check_gradients(case, [x.detach().requires_grad_() for x in xs], ranks, here)


def check_gradients(case: Case, xs: list[torch.Tensor], ranks: list[int], here: int) -> None:
    """Backward differentiates the sum of all ranks' losses; each loss weighs its rank's result at random."""
    outs = expected(case, xs)
    weights = [
        random(tuple(y.shape), case.dtype, not case.strided, case.seed - 1 - rank)
        for y, rank in zip(outs, ranks, strict=True)
    ]
    loss = sum((y * w).double().sum() for y, w in zip(outs, weights, strict=True))
    (wanted,) = torch.autograd.grad(loss, xs[here], allow_unused=True) if loss.requires_grad else (None,)
    x = xs[here].detach().requires_grad_()
    y = called(case, x, len(xs))
    (got,) = torch.autograd.grad((y * weights[here]).sum(), x, allow_unused=True) if y.requires_grad else (None,)
    zero = torch.zeros_like(x)
    got, wanted = zero if got is None else got, zero if wanted is None else wanted
    assert same(got, wanted, case), f"{case}: gradient {got} instead of {wanted}"


def same(got: torch.Tensor, wanted: torch.Tensor, case: Case) -> bool:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    wide = torch.complex128 if got.dtype.is_complex else torch.float64
    tolerance = FLOATS.get(case.dtype, 0.0)
    return torch.allclose(got.to(wide), wanted.to(wide), rtol=tolerance, atol=tolerance)


@settings(max_examples=12, phases=[Phase.generate], deadline=None, derandomize=True, database=None)
@given(st.lists(cases(), min_size=30, max_size=30))
def test_values_and_gradients_are_those_of_one_process_that_sees_all(pool, cases):
    pool.run(check, cases)
