"""einops' documented behaviour, case by case, on our functions: on plain tensors they are einops."""

from __future__ import annotations

import einops
import numpy as np
import pytest
import torch
from einops import EinopsError

from axes.ops.einops_ops import rearrange, reduce, repeat
from axes.ops.einsum import einsum

IMAGES = torch.arange(6 * 12 * 8 * 3, dtype=torch.float64).reshape(6, 12, 8, 3)
LISTED = list(IMAGES)

REARRANGE = [
    ("b h w c -> b h w c", {}),
    ("b h w c -> b c h w", {}),
    ("b h w c -> (b h) w c", {}),
    ("b h w c -> h (b w) c", {}),
    ("b h w c -> b (c h w)", {}),
    ("b h w c -> (b h w c)", {}),
    ("(b1 b2) h w c -> b1 b2 h w c", {"b1": 2}),
    ("(b1 b2) h w c -> (b1 h) (b2 w) c", {"b1": 2}),
    ("(b1 b2) h w c -> (b2 h) (b1 w) c", {"b1": 2}),
    ("b (h1 h) (w1 w) c -> (b h1 w1) h w c", {"h1": 2, "w1": 2}),
    ("b (h h1) (w w1) c -> b h w (c h1 w1)", {"h1": 2, "w1": 2}),
    ("b (h1 h) (w1 w) c -> b h w (h1 w1 c)", {"h1": 3, "h": 4, "w1": 2}),
    ("b h w c -> b h w c 1", {}),
    ("b h w c -> 1 b () h w c", {}),
    ("b h w c -> b (1 h) w c", {}),
    ("... c -> c ...", {}),
    ("b ... c -> b c ...", {}),
    ("... -> (...)", {}),
    ("b ... -> b (...)", {}),
    ("b ... c -> (b ...) c", {}),
    ("b h ... w c -> c ... w h b", {}),
    ("... (h1 h2) w c -> ... h1 (h2 w) c", {"h1": 3}),
]

REDUCE = [
    ("b h w c -> b c", {}),
    ("b h w c -> c", {}),
    ("b h w c ->", {}),
    ("b h w c -> 1 1 1 c", {}),
    ("b h w c -> b () () c", {}),
    ("b (h1 h2) (w1 w2) c -> b h1 w1 c", {"h2": 2, "w2": 2}),
    ("b (h1 2) (w1 2) c -> b h1 w1 c", {}),
    ("b (h1 h2) (w1 w2) c -> b h1 w1 c", {"h1": 3, "w1": 4}),
    ("b ... c -> b c", {}),
    ("... c -> c", {}),
    ("b h ... -> b ...", {}),
    ("(b1 b2) h w c -> h (b1 w) c", {"b1": 2}),
    ("b h w c -> b h w c", {}),
]

REPEAT = [
    ("h w -> h w c", {"c": 3}),
    ("h w -> c h w", {"c": 3}),
    ("h w -> (repeat h) w", {"repeat": 2}),
    ("h w -> h (w repeat)", {"repeat": 3}),
    ("h w -> (h2 h) (w3 w)", {"h2": 2, "w3": 3}),
    ("h w -> (h h2) (w w2)", {"h2": 2, "w2": 2}),
    ("h w -> h w 3", {}),
    ("h w -> (h 2) (2 w)", {}),
    ("... -> ... 2", {}),
    ("... w -> w ... n", {"n": 1}),
    ("h w -> h 1 w", {}),
    ("h w -> h w", {}),
]

EINSUM = [
    ("b h w, h w c -> b c", [(2, 3, 4), (3, 4, 5)]),
    ("a b c, c b d, a g k -> a b k", [(3, 3, 3)] * 3),
    ("out inner, ... inner -> ... out", [(5, 4), (2, 3, 4)]),
    ("i i ->", [(4, 4)]),
    ("i i -> i", [(4, 4)]),
    ("i, j -> i j", [(3,), (4,)]),
    ("batch head q d, batch head k d -> batch head q k", [(2, 2, 3, 4), (2, 2, 5, 4)]),
    ("i j -> j i", [(3, 4)]),
    ("... a, ... a -> ...", [(2, 3, 4), (2, 3, 4)]),
    (", a -> a", [(), (3,)]),
]


@pytest.mark.parametrize(("pattern", "sizes"), REARRANGE)
def test_rearrange_is_einops_rearrange(pattern: str, sizes: dict[str, int]):
    expected = einops.rearrange(IMAGES, pattern, **sizes)
    found = rearrange(IMAGES, pattern, **sizes)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert (found.data_ptr() == IMAGES.data_ptr()) == (expected.data_ptr() == IMAGES.data_ptr())


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize(("pattern", "sizes"), REDUCE)
def test_reduce_is_einops_reduce(pattern: str, sizes: dict[str, int], op: str):
    expected = einops.reduce(IMAGES, pattern, op, **sizes)
    torch.testing.assert_close(reduce(IMAGES, pattern, op, **sizes), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", ["any", "all"])
def test_reduce_knows_the_logical_reductions(op: str):
    mask = IMAGES % 5 == 0
    assert torch.equal(reduce(mask, "b h w c -> b c", op), einops.reduce(mask, "b h w c -> b c", op))


@pytest.mark.parametrize(("pattern", "sizes"), REPEAT)
def test_repeat_is_einops_repeat(pattern: str, sizes: dict[str, int]):
    image = IMAGES[0, :, :, 0]
    assert torch.equal(repeat(image, pattern, **sizes), einops.repeat(image, pattern, **sizes))


@pytest.mark.parametrize(("pattern", "shapes"), EINSUM)
def test_einsum_is_einops_einsum(pattern: str, shapes: list[tuple[int, ...]]):
    tensors = [torch.arange(float(np.prod(shape))).reshape(shape) for shape in shapes]
    assert torch.equal(einsum(*tensors, pattern), einops.einsum(*tensors, pattern))


@pytest.mark.parametrize("pattern", ["b h w c -> b h w c", "b h w c -> h w c b", "b h w c -> (b h) w c"])
def test_a_list_of_tensors_is_stacked(pattern: str):
    assert torch.equal(rearrange(LISTED, pattern), einops.rearrange(LISTED, pattern))
    assert torch.equal(reduce(LISTED, "b h w c -> h w c", "mean"), IMAGES.mean(0))


def test_a_callable_reduces_the_dims_it_is_given():
    def logsumexp(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        return torch.logsumexp(x, dims)

    assert torch.equal(
        reduce(IMAGES, "b (h 2) w c -> b h c", logsumexp),
        einops.reduce(IMAGES, "b (h 2) w c -> b h c", logsumexp),
    )


def test_other_arrays_go_to_einops_too():
    array = IMAGES.numpy()
    found = rearrange(array, "b h w c -> b (h w c)")
    assert isinstance(found, np.ndarray)
    assert found.shape == (6, 288)


def test_a_dim_may_be_called_as_a_parameter_is():
    x = torch.arange(12)
    assert rearrange(x, "(x expression) -> expression x", x=3).shape == (4, 3)
    assert rearrange(x, "(mesh op) -> op mesh", sizes={"mesh": 3}).shape == (4, 3)
    assert reduce(x, "(op n) -> n", "sum", sizes={"op": 3}).tolist() == x.reshape(3, 4).sum(0).tolist()


def test_gradients_pass_as_through_einops():
    x = IMAGES.clone().requires_grad_()
    reduce(rearrange(x, "b h w c -> b (h w) c"), "b n c -> b", "max").sum().backward()
    y = IMAGES.clone().requires_grad_()
    einops.reduce(einops.rearrange(y, "b h w c -> b (h w) c"), "b n c -> b", "max").sum().backward()
    assert torch.equal(x.grad, y.grad)


WRONG = [
    (rearrange, "b h w c -> b h w", {}),
    (rearrange, "b h w -> b h w", {}),
    (rearrange, "b h w c -> b h w c d", {}),
    (rearrange, "b b w c -> b w c", {}),
    (rearrange, "b (h (w c)) -> b h w c", {}),
    (rearrange, "(b1 b2) h w c -> b1 b2 h w c", {}),
    (rearrange, "(b1 b2) h w c -> b1 b2 h w c", {"b1": 5}),
    (rearrange, "b h w c -> b h w c", {"q": 5}),
    (rearrange, "(b ...) c -> b ... c", {}),
    (rearrange, "b h w 2 -> b h w", {}),
    (rearrange, "b h w c -> b h w ...", {}),
    (repeat, "b h w c -> b h w c d", {}),
    (repeat, "b h w c -> b h w d", {"d": 2}),
    (rearrange, "b h w c - > b h w c", {}),
    (rearrange, "b h w c, -> b h w c", {}),
]


@pytest.mark.parametrize(("function", "pattern", "sizes"), WRONG)
def test_what_einops_refuses_is_refused_by_einops(function, pattern: str, sizes: dict[str, int]):
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever einops raises
        getattr(einops, function.__name__)(IMAGES, pattern, **sizes)
    with pytest.raises(type(theirs.value)) as ours:
        function(IMAGES, pattern, **sizes)
    assert str(ours.value) == str(theirs.value)


def test_reduce_refuses_what_einops_refuses():
    with pytest.raises(EinopsError):
        reduce(IMAGES, "b h w c -> b x", "sum")
    with pytest.raises(EinopsError):
        reduce(IMAGES, "b h w c -> b", "median")
    with pytest.raises(NotImplementedError):
        einsum(IMAGES, "(b h) w c k -> b")


INLINE = [
    (rearrange, "(b1=2 b2) h w c -> b1 (b2 h w c)", "(b1 b2) h w c -> b1 (b2 h w c)", {"b1": 2}),
    (rearrange, "b h w c | * -> b (h w c)", "b h w c -> b (h w c)", {}),
    (repeat, "b h w c -> b (h n=2) w c |", "b h w c -> b (h n) w c", {"n": 2}),
]


@pytest.mark.parametrize(("function", "ours", "theirs", "sizes"), INLINE)
def test_inline_sizes_and_empty_clauses_need_no_mesh(function, ours: str, theirs: str, sizes: dict[str, int]):
    assert torch.equal(function(IMAGES, ours), getattr(einops, function.__name__)(IMAGES, theirs, **sizes))


def test_an_einsum_takes_sizes_and_groups_where_einops_has_none():
    x, w = torch.randn(4, 6), torch.randn(6, 10)
    found = einsum(x, w, "b k, k (h d) -> b h d", h=5)
    assert torch.allclose(found, (x @ w).reshape(4, 5, 2))
