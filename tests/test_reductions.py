"""Sums and means over ranks in the corners: split dims of size 0 and 1, shards of unknown size, wide sums."""

from __future__ import annotations

import einops
import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes import ShardingError
from axes.algebra.errors import SizeError
from axes.ops.einops_ops import reduce


def mesh() -> axes.Mesh:
    return axes.init_mesh("dp=2 cp=2 tp=2", "rest = cp tp", device_type="cpu")


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


def shard(x: torch.Tensor, spec: str) -> torch.Tensor:
    """This rank's shard as a plain leaf."""
    return axes.to_local(axes.shard(x.detach(), spec)).clone().requires_grad_()


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.detach(), wanted.detach(), rtol=1e-10, atol=1e-10, equal_nan=True)


SIZES = [0, 1, 2, 3, 4, 5, 8]
PLACES = ["dp", "(dp cp)", "(cp tp)"]


# a mean where a rank may have nothing


def means_of_every_size() -> None:
    with mesh():
        for size in SIZES:
            for place in PLACES:
                whole = numbers(size, 3).requires_grad_()
                wanted = whole.mean(0)
                (gradient,) = torch.autograd.grad(wanted.square().sum(), whole)
                x = axes.shard(whole.detach(), f"b@{place} s").requires_grad_()
                y = reduce(x, f"b@{place} s -> s", "mean")
                close(axes.unshard(y), wanted)
                close(axes.unshard(reduce(x, f"b@{place} s -> s | sum@{place}", "mean")), wanted)
                axes.unshard(y).square().sum().backward()
                close(axes.unshard(x.grad), gradient)
                if size:  # plain shards, of which the whole size is given: each rank's loss has every rank's shard
                    local = shard(whole, f"b@{place} s")
                    y = reduce(local, f"b@{place} s -> s", "mean", b=size)
                    close(y, wanted)
                    ranks = 2 if place == "dp" else 4
                    close(torch.autograd.grad(y.square().sum(), local)[0] / ranks, shard(gradient, f"b@{place} s"))


def test_a_mean_over_a_split_dim_is_exact_where_ranks_have_one_element_or_none(pool):
    pool.run(means_of_every_size)


def extremes_of_nothing() -> None:
    with mesh():
        for op in ("max", "min"):
            for size in (1, 2, 3):
                # The result has no elements, and the dim that is reduced has some, on some ranks.
                whole = numbers(size, 2, 0)
                close(
                    axes.unshard(reduce(axes.shard(whole, "b@(dp cp) s t"), "b@(dp cp) s t -> t", op)),
                    whole.amax((0, 1)),
                )


def test_the_maximum_of_an_empty_tensor_over_a_dim_of_which_ranks_have_nothing_is_empty(pool):
    pool.run(extremes_of_nothing)


# plain shards whose whole size isn't given


CASES = [
    # expression, spec of the shard, what einops does with the whole
    ("b@{0} s -> s", "b@{0} s", "b s -> s"),
    ("b@{0} s -> ", "b@{0} s", "b s -> "),
    ("(b t)@{0} s -> s", "(b t)@{0} s", "(b t) s -> s"),
    ("(b@{0} t) s -> s", "(b@{0} t) s", "(b t) s -> s"),
]


def means_of_unknown_size() -> None:
    with mesh():
        for size in SIZES:
            for place in PLACES:
                for text, spec, plain in CASES:
                    given = {"t": 2} if "@{0} t" in text else {}
                    rows = size * (2 if "t" in text else 1)
                    if "@{0} t" in text and size % (2 if place == "dp" else 4):
                        continue  # DTensors aren't split unevenly inside a group
                    whole = numbers(rows, 3).requires_grad_()
                    sizes = {"t": 2} if "t" in plain else {}
                    wanted = einops.reduce(whole, plain, "mean", **sizes)
                    (gradient,) = torch.autograd.grad(wanted.square().sum(), whole)
                    spec, text = spec.format(place), text.format(place)
                    local = shard_of(whole, spec, sizes)
                    with CommDebugMode() as counted:
                        y = reduce(local, text, "mean", **given)
                    assert counted.get_total_counts() == 2, (size, place, text)
                    close(y, wanted)
                    ranks = 2 if place == "dp" else 4
                    (g,) = torch.autograd.grad(y.square().sum(), local)
                    close(g / ranks, shard_of(gradient, spec, sizes))


def shard_of(x: torch.Tensor, spec: str, sizes: dict[str, int]) -> torch.Tensor:
    sizes = {name: size for name, size in sizes.items() if name in spec}
    return axes.to_local(axes.shard(x.detach(), spec, **sizes)).clone().requires_grad_()


def test_ranks_count_together_where_the_size_of_a_mean_is_not_given(pool):
    pool.run(means_of_unknown_size)


def extremes_of_unknown_size() -> None:
    with mesh():
        for size in (1, 3, 5):
            whole = numbers(size, 3)
            for place in PLACES:
                local = shard(whole, f"b@{place} s")
                close(reduce(local, f"b@{place} s -> s", "max"), whole.amax(0))
                close(reduce(local, f"b@{place} s -> s", "min"), whole.amin(0))
                reduce(local, f"b@{place} s -> s", "max").sum().backward()


def test_a_maximum_of_unknown_size_passes_over_empty_shards(pool):
    pool.run(extremes_of_unknown_size)


def other_costs_and_dtypes() -> None:
    with mesh():
        local = shard(numbers(6, 3), "b@dp s")
        with CommDebugMode() as counted:
            reduce(local, "b@dp s -> s", "mean", b=6)  # the size is given
            reduce(local, "b@dp s -> b@dp", "mean")  # what is reduced isn't split
        assert counted.get_total_counts() == 1
        with CommDebugMode() as counted:
            close(reduce(shard(numbers(4, 4), "b@dp s@cp"), "b@dp s@cp -> ", "mean"), numbers(4, 4).mean())
            reduce(axes.shard(numbers(5, 3), "b@dp s"), "b@dp s -> s", "mean")  # a DTensor knows
        assert counted.get_total_counts() == 3
        # a sum that 16 bits can't hold
        half = shard(torch.full((5, 2), 40000.0, dtype=torch.float16), "b@dp s")
        assert reduce(half, "b@dp s -> s", "mean").tolist() == [40000.0] * 2
        assert reduce(half, "b@dp s -> ", "mean").dtype == torch.float16
        with pytest.raises(ShardingError, match=r"a mean of torch\.int64 isn't"):
            reduce(torch.arange(4), "b@dp -> ", "mean")


def test_a_given_size_sends_nothing_more(pool):
    pool.run(other_costs_and_dtypes)


PENDING = ["mean@dp", "sum@dp", "*"]


def pending_means() -> None:
    with mesh():
        local = shard(numbers(5, 3), "b@dp s")
        with CommDebugMode() as counted:
            for pending in PENDING:
                text = r"stays pending needs the whole size of 'b'(.|\n)*give it as a keyword: b=\.\.\."
                with pytest.raises(SizeError, match=text):
                    reduce(local, f"b@dp s -> s | {pending}", "mean")
            with pytest.raises(SizeError, match="whole size of 'b' and 's'"):
                reduce(local, "b@dp s@(cp tp) -> | sum@cp", "mean")
            with pytest.raises(
                SizeError, match=r"over names of \(b t\)@dp needs the whole size of 'b'(.|\n)*: b=\.\.\."
            ):
                reduce(local, "(b t)@dp s -> t s", "mean", t=2)
            for pending in PENDING[1:]:
                reduce(local, f"b@dp s -> s | {pending}", "mean", b=5)
        assert counted.get_total_counts() == 0


def test_a_mean_that_stays_pending_asks_for_the_size(pool):
    pool.run(pending_means)


def compiled() -> None:
    with axes.init_mesh("dp=2", device_type="cpu"):
        for size in (5, 1):
            whole = numbers(size, 3)
            function = torch.compile(lambda x: reduce(x, "b@dp s -> s", "mean"), backend="aot_eager", fullgraph=True)
            local = shard(whole, "b@dp s")
            y = function(local)
            close(y, whole.mean(0))
            y.sum().backward()
            close(local.grad, torch.full_like(local, 2 / size))


def test_counting_together_compiles(world):
    world(compiled, 2, timeout=120)


# a wider dtype on the way


WIDE = [torch.float32, (torch.float32, None)]


def wide_sums() -> None:
    with mesh():
        whole = torch.rand(5003, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        exact = {"sum": whole.double().sum(0), "mean": whole.double().mean(0)}
        off = []
        for op, wanted in exact.items():
            rounded = wanted.to(torch.bfloat16)
            for how in (*WIDE, None):
                x = axes.shard(whole, "b@(dp cp tp) s").requires_grad_()
                local = shard(whole, "b@(dp cp tp) s")
                found = [
                    axes.unshard(reduce(x, f"b@(dp cp tp) s -> {right}", op, comm_dtype=how))
                    for right in ("s", "s@dp", "s@(cp tp)")
                ]
                found.append(reduce(local, "b@(dp cp tp) s -> s", op, comm_dtype=how, b=5003))
                found.append(reduce(local, "b@(dp cp tp) s -> s", op, comm_dtype=how))
                scattered = reduce(local, "b@(dp cp tp) s -> s@dp", op, comm_dtype=how)
                found.append(axes.unshard(axes.from_local(scattered.detach(), "s@dp")))
                assert all(y.dtype == torch.bfloat16 for y in found)
                if how is None:
                    off.append(any(not torch.equal(y.detach(), rounded) for y in found))
                else:
                    for y in found:
                        assert torch.equal(y.detach(), rounded), (op, how, y, rounded)
        assert all(off), "the case is too easy: 16 bits do"


def test_a_sum_in_a_wider_dtype_is_rounded_once(pool):
    pool.run(wide_sums)


def wide_gradients() -> None:
    with mesh():
        # that of a mean, in the local view, is the sum of what ranks have of it
        local = shard(numbers(5, 3, dtype=torch.bfloat16), "b@(cp tp) s")
        mine = torch.full((3,), 1 + 2**-7 * (1 + axes.axis_index("rest")), dtype=torch.bfloat16)
        y = reduce(local, "b@(cp tp) s -> s", "mean", b=5, comm_dtype=(None, torch.float32))
        (g,) = torch.autograd.grad(y, local, mine)
        total = sum(1 + 2**-7 * (1 + i) for i in range(4)) / 5
        assert torch.equal(g, torch.full_like(local, total))


def test_a_gradient_that_is_a_sum_is_rounded_once(pool):
    pool.run(wide_gradients)
