"""Every public function under torch's modes: inference, no gradients, default dtypes and devices, determinism.

The tables are those of `tests.test_transforms`. What a mode must not change is compared bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import axes
from tests.test_transforms import DTENSORS, SHARDS, WHOLE, drawn, held, mesh


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "deterministic": deterministic,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: default_device("meta"),
    "meta by with": lambda: torch.device("meta"),
}

Results = list[tuple[str, torch.Tensor | None]]


def results(inputs: tuple[torch.Tensor, DTensor, torch.Tensor], gradients: bool) -> Results:
    """What every function of the tables gives, and the gradient of the sum of its squares."""
    held.cache_clear()
    shard, sharded, whole = inputs
    tables = ((SHARDS, shard), (DTENSORS, sharded), (WHOLE, whole))
    found: Results = []
    for name, call, x in [(n, c, x) for table, x in tables for n, calls in table.items() for c in calls]:
        # In inference mode torch has no view of a DTensor that was made outside of it, so no detach (2.13).
        leaf = x.detach().requires_grad_() if gradients and x is not whole else x
        y = call(leaf)
        value = axes.unshard(y) if isinstance(y, DTensor) else y
        found.append((name, value.detach()))
        if value.requires_grad:
            (slope,) = torch.autograd.grad((value**2).sum(), leaf)
            found.append((f"gradient of {name}", axes.unshard(slope) if isinstance(slope, DTensor) else slope))
    for make in (axes.rand, axes.randn):
        made = make("a@tp b", a=4, b=2, dtype=torch.float32)
        found.append((make.__name__, None if made.device.type == "cpu" else made.to_local()))
    return found


def inputs() -> tuple[torch.Tensor, DTensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 4, generator=generator, device="cpu", dtype=torch.float32)
    return drawn(0), axes.shard(whole, "a@tp b"), whole


def compare(got: Results, wanted: Results, mode: str) -> None:
    assert [name for name, _ in got] == [name for name, _ in wanted], mode
    for (name, mine), (_, theirs) in zip(got, wanted, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs, f"{name} under {mode}"
            continue
        assert (mine.dtype, mine.device) == (theirs.dtype, theirs.device), f"{name} under {mode}"
        assert torch.equal(mine, theirs), f"{name} under {mode}: {mine} instead of {theirs}"


def check_mode(mode: str) -> None:
    gradients = mode not in ("inference", "no gradients")
    with mesh():
        before = inputs()
        wanted = results(before, gradients)
        with MODES[mode]():
            compare(results(before, gradients), wanted, mode)
            compare(results(inputs(), gradients), wanted, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_changes_no_result_and_no_gradient(pool, mode):
    pool.run(check_mode, mode)


def first_use(mode: str) -> None:
    """The mesh, its groups and all that is kept is made under the mode; what comes after it is as ever."""
    with MODES[mode](), axes.init_mesh("dp=1 tp=2", device_type="cpu"):
        first = results(inputs(), gradients=False)
    with axes.init_mesh("dp=1 tp=2", device_type="cpu"):
        compare(first, results(inputs(), gradients=False), mode)
        assert len(results(inputs(), gradients=True)) > len(first)


@pytest.mark.parametrize("mode", ["inference", "meta"])
def test_nothing_that_is_kept_belongs_to_a_mode(world, mode):
    world(first_use, 2, mode)


def follow_defaults() -> None:
    with mesh(), default_dtype(torch.float64), default_device("meta"):
        for made in (axes.zeros("a@tp", a=4), axes.full("a@tp", 2.0, a=4), axes.rand("a@tp", a=4)):
            assert made.dtype == torch.float64
            assert made.to_local().device.type == "cpu"


def test_factories_follow_the_default_dtype_and_the_device_of_the_mesh(pool):
    pool.run(follow_defaults)


def integers() -> None:
    with mesh():
        n = axes.shard(torch.arange(8), "n@tp")
        for call in (axes.unshard, lambda n: axes.reshard(n, "n"), lambda n: axes.reduce(n, "n@tp -> ", "sum")):
            found = call(n)
            assert found.dtype == torch.int64
            assert not found.requires_grad
        weight = axes.shard(torch.ones(8), "n@tp").requires_grad_()
        (found,) = torch.autograd.grad(axes.unshard(axes.einsum(n.float(), weight, "n@tp, n@tp -> ")), weight)
        assert axes.unshard(found).tolist() == list(range(8))
        region = axes.shard_map(lambda n, w: (n, w * n), "n@tp, n@tp -> n@tp, n@tp")
        same, scaled = region(n, weight)
        assert (same.dtype, same.requires_grad, scaled.requires_grad) == (torch.int64, False, True)


def test_integers_pass_beside_what_needs_a_gradient(pool):
    pool.run(integers)
