"""`torch.autocast` around sharded operations: dtypes, values and gradients are those of torch on the whole tensors."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import einops
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import axes
from axes.algebra.errors import ShardingError
from axes.algebra.mesh import Mesh
from tests.conftest import BEFORE_2_13

F16, F32, F64, I64 = torch.bfloat16, torch.float32, torch.float64, torch.int64


def mesh() -> Mesh:
    return axes.init_mesh("dp=4 tp=2", device_type="cpu")


@dataclass(frozen=True)
class Case:
    """An einsum of operands of these whole shapes."""

    text: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def specs(self) -> list[str]:
        return [spec.strip() for spec in re.split(",|->", self.text)]

    @property
    def plain(self) -> str:
        return re.sub(r"@\(.*?\)|@\w+", "", self.text)


CASES = [
    Case("b k, k f@tp -> b f@tp", ((4, 6), (6, 8))),
    Case("b k@tp, k@tp f -> b f", ((4, 6), (6, 8))),
    Case("b k@tp, k@tp f -> b@tp f", ((4, 6), (6, 8))),
    Case("b@dp s k, k f -> b@dp s f", ((4, 3, 6), (6, 8))),
    Case("b@dp k@tp, f k@tp -> b@dp f@tp", ((4, 6), (8, 6))),
    Case("h b@dp q k, h b@dp k v -> h b@dp q v", ((2, 4, 3, 5), (2, 4, 5, 6))),
    # What isn't summed is only multiplied, and isn't cast.
    Case("i@tp, j -> i@tp j", ((4,), (3,))),
    Case("b k@tp, b k@tp -> b k@tp", ((4, 6), (4, 6))),
    # A dim of size 1 is no sum; a shard of size 1 is.
    Case("b@dp k, k f -> b@dp f", ((4, 1), (1, 8))),
    Case("b k@tp, k@tp f -> b f", ((4, 2), (2, 8))),
    Case("k@tp, k@tp ->", ((6,), (6,))),
    Case("b k@tp -> b", ((4, 6),)),
    Case("b k@tp, k@tp f, f d -> b d", ((4, 6), (6, 3), (3, 5))),
    Case("b k@tp, k@tp f, f -> b f", ((4, 6), (6, 3), (3,))),
]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers that 16 bits hold, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 9, shape, generator=generator) / 8).to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert got.dtype == wanted.dtype, f"{what}: {got.dtype} instead of {wanted.dtype}"
    got, wanted = got.detach().double(), wanted.detach().double()
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    assert got.shape == wanted.shape, what
    assert float((got - wanted).abs().max()) <= 2e-2 * scale, f"{what}: {got} instead of {wanted}"


Loss = Callable[[list[torch.Tensor]], torch.Tensor]


def derivatives(
    call: Loss, leaves: list[torch.Tensor], inside: bool, seed: int
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None]]:
    """The value, the gradients of all leaves, and the second derivatives, with backward inside of autocast or out."""
    with torch.autocast("cpu", F16):
        value = call(leaves)
        with contextlib.nullcontext() if inside else torch.autocast("cpu", enabled=False):
            cotangent = drawn(tuple(value.shape), value.dtype, seed)
            if isinstance(value, DTensor):
                cotangent = axes.shard(cotangent, " ".join("_" * value.ndim), mesh=axes.sharding_of(value).mesh)
            first = torch.autograd.grad(value, leaves, cotangent, create_graph=True, allow_unused=True)
            total = sum((whole(g).double() ** 2).sum() for g in first)
            if not isinstance(total, torch.Tensor) or not total.requires_grad:
                return value, list(first), [None for _ in leaves]
            second = torch.autograd.grad(total, leaves, allow_unused=True)
    return value, list(first), list(second)


def whole(x: torch.Tensor) -> torch.Tensor:
    return axes.unshard(x) if isinstance(x, DTensor) else x


def check_einsums() -> None:
    with mesh():
        for seed, (case, inside) in enumerate(itertools.product(CASES, (False, True))):
            for dtypes in {(F32,) * 3, (F16,) * 3, (F16, F32, F32), (F32, F16, F16), (F64,) * 3}:
                wholes = [drawn(s, d, seed + i) for i, (s, d) in enumerate(zip(case.shapes, dtypes, strict=False))]
                what = f"{case}, {dtypes}, backward {'inside' if inside else 'outside'}"
                try:
                    check_einsum(case, wholes, inside, seed, what)
                except Exception as error:
                    error.add_note(what)
                    raise


def check_einsum(case: Case, wholes: list[torch.Tensor], inside: bool, seed: int, what: str) -> None:
    plain = [x.clone().requires_grad_() for x in wholes]
    value, first, second = derivatives(lambda xs: einops.einsum(*xs, case.plain), plain, inside, seed)
    leaves = [axes.shard(x, spec).requires_grad_() for x, spec in zip(wholes, case.specs, strict=False)]
    got = derivatives(lambda xs: axes.einsum(*xs, case.text), leaves, inside, seed)
    close(whole(got[0]), value, f"value of {what}")
    for mine, theirs in zip([*got[1], *got[2]], [*first, *second], strict=True):
        assert (mine is None) == (theirs is None), what
        if mine is not None and theirs is not None:
            close(whole(mine), theirs, f"gradient of {what}")


def test_an_einsum_of_dtensors_is_that_of_the_whole_with_all_derivatives(pool):
    pool.run(check_einsums)


def check_local() -> None:
    with mesh() as m:
        for seed, (case, dtype) in enumerate(itertools.product(CASES, (F32, F16, F64))):
            wholes = [drawn(s, dtype, seed + i) for i, s in enumerate(case.shapes)]
            plain = [x.clone().requires_grad_() for x in wholes]
            with torch.autocast("cpu", F16):
                value = einops.einsum(*plain, case.plain)
            weight = drawn(tuple(value.shape), value.dtype, seed)
            expected = torch.autograd.grad(value, plain, weight)
            shards = [
                axes.shard(x, spec).to_local().requires_grad_() for x, spec in zip(wholes, case.specs, strict=False)
            ]
            with torch.autocast("cpu", F16):
                y = axes.einsum(*shards, case.text)
            result = m.sharding(case.specs[-1])
            assert y.dtype == value.dtype, f"{case}: {y.dtype}"
            close(y, axes.shard(value.detach(), case.specs[-1]).to_local(), f"{case}")
            # Every rank has a loss; where results are replicated, each takes its part of the whole one.
            mine = axes.shard(weight, case.specs[-1]).to_local() / copies(m, result.spec)
            for grad, theirs, spec in zip(torch.autograd.grad(y, shards, mine), expected, case.specs, strict=False):
                assert grad.dtype == dtype
                names = tuple(axis for axis in m.axis_names if axis not in spec)
                got = axes.psum(grad.double(), names).to(dtype) if names else grad
                close(got, axes.shard(theirs, spec).to_local(), f"gradient of {case}")


def copies(m: Mesh, spec: str) -> int:
    found = 1
    for axis in m.axis_names:
        found *= 1 if axis in spec else m.shape[axis]
    return found


def test_an_einsum_of_plain_shards_is_that_of_the_whole(pool):
    pool.run(check_local)


def check_states() -> None:
    """One expression and one pair of operands under every state: nothing of one is kept for another."""
    with mesh():
        x, w = drawn((4, 6), F32, 0), drawn((6, 8), F32, 1)
        operands = [axes.shard(x, "b k@tp"), axes.shard(w, "k@tp f")]
        shards = [each.to_local() for each in operands]
        text = "b k@tp, k@tp f -> b f"
        for _ in range(2):
            for state in states():
                for given in (operands, shards):
                    with state:
                        assert axes.einsum(*given, text).dtype == (x @ w).dtype
        with torch.autocast("cpu", F16):
            with torch.autocast("cpu", enabled=False):
                assert axes.einsum(*operands, text).dtype == F32
            assert axes.einsum(*operands, text).dtype == F16
            numbers = [axes.shard(each.long(), spec) for each, spec in ((x, "b k@tp"), (w, "k@tp f"))]
            assert axes.einsum(*numbers, text).dtype == I64
            mixed = axes.shard(x.double(), "b k@tp"), operands[1]
            if BEFORE_2_13:  # asked without values, it says a dtype, and axes casts to that
                assert axes.einsum(*mixed, text).dtype == F16
                return
            with pytest.raises(
                ShardingError, match=r"under autocast torch has no einsum of torch.float64, torch.float"
            ):
                axes.einsum(*mixed, text)


def states() -> list[contextlib.AbstractContextManager[object]]:
    return [
        contextlib.nullcontext(),
        torch.autocast("cpu", F16),
        torch.autocast("cpu", torch.float16),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", F16, enabled=False),
    ]


def test_every_state_of_autocast_has_its_own_result(pool):
    pool.run(check_states)


# what takes one operand, and functions over split dims

Functional = tuple[str, Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]

LABELS = torch.arange(4) % 8

ONE: list[Functional] = [
    ("b k@tp", lambda x: axes.rearrange(x, "b k@tp -> k@tp b"), lambda x: x.mT),
    ("b k@tp", lambda x: axes.rearrange(x, "b k@tp -> b k"), lambda x: x),
    ("b k@tp", lambda x: axes.reduce(x, "b k@tp -> b", "sum"), lambda x: x.sum(1)),
    ("b k@tp", lambda x: axes.reduce(x, "b k@tp -> b", "mean"), lambda x: x.mean(1)),
    ("b k@tp", lambda x: axes.reduce(x, "b k@tp -> b", "max"), lambda x: x.amax(1)),
    ("b@tp k", lambda x: axes.reduce(x, "b@tp k -> b@tp", "prod"), lambda x: x.prod(1)),
    ("b k@tp", lambda x: axes.repeat(x, "b k@tp -> b n k@tp", n=2), lambda x: x[:, None].expand(4, 2, 8)),
    ("b k@tp", lambda x: axes.softmax(x, "b k@tp", over="k"), lambda x: torch.softmax(x, 1)),
    ("b k@tp", lambda x: axes.logsumexp(x, "b k@tp", over="k"), lambda x: torch.logsumexp(x, 1)),
    ("b k@tp", lambda x: axes.rms_norm(x, "b k@tp", over="k", k=8), lambda x: F.rms_norm(x, (8,))),
    ("b k@tp", lambda x: axes.layer_norm(x, "b k@tp", over="k", k=8), lambda x: F.layer_norm(x, (8,))),
    (
        "b k@tp",
        lambda x: axes.cross_entropy(x, like(x, LABELS), "b k@tp, b -> ", k=8),
        lambda x: F.cross_entropy(x, LABELS),
    ),
    (
        "v@tp d",
        lambda x: axes.embedding(like(x, LABELS // 2), x, "b, v@tp d -> b d"),
        lambda x: F.embedding(LABELS // 2, x),
    ),
]


def like(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return axes.shard(value, "b") if isinstance(x, DTensor) else value


def check_one_operand() -> None:
    with mesh():
        for seed, ((spec, ours, theirs), dtype) in enumerate(itertools.product(ONE, (F32, F16, F64))):
            x = drawn((4, 8), dtype, seed)
            plain, leaf = x.clone().requires_grad_(), axes.shard(x, spec).requires_grad_()
            shard = leaf.detach().to_local().requires_grad_()
            with torch.autocast("cpu", F16):
                value, got, local = theirs(plain), ours(leaf), ours(shard)
            close(axes.unshard(got), value, f"{spec} {seed}")
            assert local.dtype == value.dtype
            (wanted,) = torch.autograd.grad(value.sum(), plain)
            (found,) = torch.autograd.grad(axes.unshard(got).sum(), leaf)
            close(axes.unshard(found), wanted, f"gradient {spec} {seed}")


def test_one_operand_and_functions_over_split_dims_have_torchs_dtypes(pool):
    pool.run(check_one_operand)


def check_region() -> None:
    with mesh():
        x, w = drawn((4, 6), F32, 0), drawn((6, 8), F32, 1)
        plain = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        leaves = [axes.shard(x, "b k@tp").requires_grad_(), axes.shard(w, "k@tp f").requires_grad_()]
        region = axes.shard_map(lambda x, w: axes.psum(x @ w, "tp"), "b k@tp, k@tp f -> b f")
        with torch.autocast("cpu", F16):
            wanted, got = plain[0] @ plain[1], region(*leaves)
            moved = axes.reshard(got, "b@dp f@tp")
        close(axes.unshard(moved), wanted, "region")
        for mine, theirs in zip(
            torch.autograd.grad(axes.unshard(moved).float().sum(), leaves),
            torch.autograd.grad(wanted.float().sum(), plain),
            strict=True,
        ):
            close(axes.unshard(mine), theirs, "gradient of a region")


def test_a_region_under_autocast_is_that_of_the_whole(pool):
    pool.run(check_region)


# torch.compile


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return axes.einsum(x, w, "b k@tp, k@tp f -> b f")


def product_under_autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", F16):
        return axes.einsum(x, w, "b k@tp, k@tp f -> b f")


def check_compiled() -> None:
    with axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        x, w = drawn((4, 6), F32, 0), drawn((6, 8), F32, 1)
        for function, outside in ((product, True), (product, False), (product_under_autocast, False)):
            torch._dynamo.reset()
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
            for state in (autocast(outside), contextlib.nullcontext(), autocast(outside)):
                plain = [x.clone().requires_grad_(), w.clone().requires_grad_()]
                leaves = [axes.shard(x, "b k@tp").requires_grad_(), axes.shard(w, "k@tp f").requires_grad_()]
                with state:
                    with torch.autocast("cpu", F16) if function is product_under_autocast else contextlib.nullcontext():
                        wanted = plain[0] @ plain[1]
                    got = compiled(*leaves)
                close(axes.unshard(got), wanted, f"{function.__name__}")
                got.sum().backward()
                wanted.sum().backward()
                for mine, theirs in zip(leaves, plain, strict=True):
                    assert mine.grad is not None
                    assert theirs.grad is not None
                    close(axes.unshard(mine.grad), theirs.grad, f"gradient of {function.__name__}")


@contextlib.contextmanager
def autocast(enabled: bool) -> Iterator[None]:
    with torch.autocast("cpu", F16, enabled=enabled):
        yield


def test_compiled_functions_follow_autocast_inside_and_outside(warm):
    warm(check_compiled, 4, timeout=120)
