"""einops' documented behaviour, case by case, on our functions: on plain tensors they are einops."""

from __future__ import annotations

import gc
import math
import random
import re
import weakref
from collections.abc import Callable
from typing import Any

import einops
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

import axes
from axes import ExpressionError, Mesh, MeshError, ShardingError, SizeError
from axes.ops.einops_ops import rearrange, reduce, repeat
from axes.ops.einsum import einsum
from axes.runtime import torch_private
from tests.flow_cases import case, stripped

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
    (rearrange, "b h w c -> b h w", {}, ExpressionError, "'c' stands on the left only; rearrange keeps"),
    (rearrange, "b h w -> b h w", {}, SizeError, "'b h w' has 3 dims; the tensor has 4"),
    (rearrange, "b h w c -> b h w c d", {}, ExpressionError, "'d' stands on the right only; repeat adds names"),
    (rearrange, "b b w c -> b w c", {}, ExpressionError, "'b' stands twice in one tensor"),
    (rearrange, "b (h (w c)) -> b h w c", {}, ExpressionError, "groups don't nest"),
    (rearrange, "(b1 b2) h w c -> b1 b2 h w c", {}, SizeError, "the sizes of 'b1' and 'b2' don't follow from"),
    (rearrange, "(b1 b2) h w c -> b1 b2 h w c", {"b1": 5}, SizeError, "6 doesn't divide by 5"),
    (rearrange, "b h w c -> b h w c", {"q": 5}, SizeError, "a size is given for 'q', which isn't in the expression"),
    (rearrange, "(b ...) c -> b ... c", {}, ExpressionError, "'...' in a group on the left leaves its sizes open"),
    (rearrange, "b h w 2 -> b h w", {}, ExpressionError, "rearrange takes no number but 1 on the left"),
    (rearrange, "b h w c -> b h w ...", {}, ExpressionError, "'...' is in the result and in no operand"),
    (repeat, "b h w c -> b h w c d", {}, SizeError, "the size of 'd' isn't known from any tensor; give it, like d=2"),
    (repeat, "b h w c -> b h w d", {"d": 2}, ExpressionError, "'c' stands on the left only; repeat adds to what"),
    (rearrange, "b h w c - > b h w c", {}, ExpressionError, "'-' has no meaning here"),
    (rearrange, "b h w c, -> b h w c", {}, ExpressionError, "rearrange takes one tensor; found 2 specs"),
]


@pytest.mark.parametrize(("function", "pattern", "sizes", "kind", "message"), WRONG)
@pytest.mark.parametrize("whole", [IMAGES, IMAGES.numpy()], ids=["a tensor", "an array of NumPy"])
def test_what_einops_refuses_is_refused_in_our_words(
    whole, function, pattern: str, sizes: dict[str, int], kind, message
):
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever einops raises
        getattr(einops, function.__name__)(IMAGES, pattern, **sizes)
    with pytest.raises(kind, match=re.escape(message)):
        function(whole, pattern, **sizes)


def test_reduce_refuses_what_einops_refuses():
    with pytest.raises(ExpressionError, match="'x' stands on the right only"):
        reduce(IMAGES, "b h w c -> b x", "sum")
    with pytest.raises(ShardingError, match=r"reduce knows sum, .* and functions; found 'median'"):
        reduce(IMAGES, "b h w c -> b", "median")
    for found in (3, "b", [], [3]):
        with pytest.raises(ShardingError, match=r"axes.rearrange takes a (list of )?tensors?; found"):
            rearrange(found, "b -> b")


# One language: a model runs with the same text on one device and sharded.

NAMES = ["_h", "h_", "__", "_1", "β", "größe", "h2", "\u540d", "नाम", "lambda", "sum", "self", "mesh", "a" * 40]
SPACES = [" ", "  ", "\t", "\n", "\r\n", "\u00a0", " \u3000"]
SIGNS = [*"@|,=()*+.-><~_2é²\x00", "...", "1", "()", " 3 ", "(2 ", " _ ", "µ", " -> "]


def spelled(any_of: random.Random, text: str, sizes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text with other names and other white space."""
    names = dict(zip("abcdefg", any_of.sample(NAMES, 7), strict=True))

    def anew(found: re.Match[str]) -> str:
        return any_of.choice(SPACES) if found[0].isspace() else names.get(found[0], found[0])

    return re.sub(r"@\w+|\b[a-g]\b|\s+", anew, text), {names.get(name, name): size for name, size in sizes.items()}


def mistaken(
    any_of: random.Random, text: str, sizes: dict[str, Any], xs: list[torch.Tensor]
) -> tuple[str, dict[str, Any], list[torch.Tensor]]:
    """A call with a mistake, as people make them."""
    what, at = any_of.randrange(6), any_of.randrange(len(text))
    if what == 0:
        text = text.replace("->", any_of.choice([" ", "- >", f"-> {text} ->", "-> h"]))
    elif what == 1:
        text = text[:at] + any_of.choice(["", *SIGNS]) + text[at + any_of.randrange(2) :]
    elif what == 2:
        text = re.sub(r"\b[a-g]\b", any_of.choice("abcdefgh"), text, count=1)
    elif what == 3:
        sizes = {name: size for name, size in sizes.items() if any_of.random() < 0.7}
    elif what == 4:
        sizes = {**sizes, any_of.choice([*sizes, "h"]): any_of.choice([0, 1, 2, 3, 7, -1, -3, 1.5, True, "x", None])}
    else:
        xs = [xs[0][None], *xs[1:]] if any_of.random() < 0.5 or not xs[0].ndim else [torch.cat([xs[0]] * 2), *xs[1:]]
    return text, sizes, xs


def outcome(kind: str, *arguments: Any, **options: Any) -> str | torch.Tensor:
    try:
        found = getattr(axes, kind)(*arguments, **options)
    except axes.AxesError as error:
        kinds = (ExpressionError, SizeError, MeshError, ShardingError)
        return next(kind.__name__ for kind in kinds if isinstance(error, kind))
    return axes.unshard(found) if isinstance(found, DTensor) else found


def agree(one: str | torch.Tensor, other: str | torch.Tensor) -> bool:
    return one == other if isinstance(one, str) or isinstance(other, str) else one.equal(other)


@pytest.mark.parametrize("seed", range(4))
def test_one_text_is_the_same_or_the_same_mistake_on_plain_tensors_shards_and_dtensors(seed: int):
    any_of = random.Random(seed)
    with axes.simulate(1), axes.init_mesh("tp=1", device_type="cpu") as mesh:
        for _ in range(150):
            found = case(any_of, mesh=Mesh("tp=1"))
            text, sizes, xs, right = stripped(found.text), found.given, [*found.wholes], any_of.random() < 0.4
            if not right:
                text, sizes, xs = mistaken(any_of, text, sizes, xs)
            named = re.sub(rf"\b{any_of.choice('abcdefg')}\b", r"\g<0>@tp", text)
            names = any_of.random()
            op = (found.op,) if found.kind == "reduce" else ()
            whole = [axes.shard(x, " ".join("_" * x.ndim), mesh=mesh) for x in xs]
            for written in (text, named):
                said, given = spelled(random.Random(names), written, sizes)
                here, there = (outcome(found.kind, *each, said, *op, mesh=mesh, sizes=given) for each in (xs, whole))
                assert agree(here, there), (found.kind, said, op, given, [x.shape for x in xs], here, there)
                if right and written == text:
                    assert agree(here, found.expected()), (found, here)


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


# --- shards of which nothing is sent: the same, with this rank's sizes


class Called(TorchFunctionMode):
    """The functions of torch that are called on tensors, by name; what only reads a tensor isn't among them."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names += [function.__name__] * (function.__name__ != "__get__")
        return function(*args, **(kwargs or {}))


VIEWS = [
    (rearrange, "b d@tp -> b d@tp", {}, []),
    (rearrange, "b (h@tp d) -> b h@tp d", {"h": 8}, ["reshape"]),
    (rearrange, "b (h@tp d) -> (b h@tp) d", {"h": 8}, ["reshape"]),
    (rearrange, "b d@tp -> d@tp b", {}, ["permute"]),
    (rearrange, "b (h@tp d) -> h@tp b d", {"h": 8}, ["reshape", "permute"]),
    (rearrange, "b (h@tp d) -> h@tp (b d)", {"h": 8}, ["reshape", "permute", "reshape"]),
    (repeat, "b d@tp -> b n d@tp", {"n": 3}, ["unsqueeze", "expand"]),
    (repeat, "b d@tp -> d@tp (b n)", {"n": 3}, ["permute", "unsqueeze", "expand", "reshape"]),
]


@pytest.mark.parametrize(("function", "text", "sizes", "views"), VIEWS)
def test_a_rearranged_shard_costs_its_views_alone(monkeypatch, function, text: str, sizes: dict[str, int], views):
    x = torch.randn(8, 16)
    with axes.simulate(4), axes.init_mesh("tp=4", device_type="cpu"):
        expected = function(x, text, **sizes)
        monkeypatch.setattr(einops, function.__name__, None)
        with Called() as called:
            found = function(x, text, **sizes)
    assert called.names == views
    assert torch.equal(found, expected)


def test_a_slice_of_a_shard_is_one_copy():
    x = torch.randn(8, 16)
    with axes.simulate(4), axes.init_mesh("tp=4", device_type="cpu"):
        axes.reshard(x, "b d -> b d@tp")
        with Called() as called:
            found = axes.reshard(x, "b d -> b d@tp")
    assert called.names == ["dim", "contiguous", "narrow_copy"]  # of which the second gives what it is asked of
    assert torch.equal(found, x[:, :4])
    assert not torch_private.share_memory(found, x)


def groups(atoms: list[str], any_of: random.Random) -> list[list[str]]:
    """The atoms, in order, in groups of up to three; a group may be empty."""
    found = []
    while atoms:
        count = any_of.choice([0, 1, 1, 1, 2, 3])
        found.append(atoms[:count])
        atoms = atoms[count:]
    return found


def written(dims: list[list[str]], split: dict[str, str]) -> str:
    texts = [" ".join(atom + (f"@{split[atom]}" if atom in split else "") for atom in dim) for dim in dims]
    return " ".join(text if len(dim) == 1 else f"({text})" for text, dim in zip(texts, dims, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_a_rearranged_shard_is_einops_of_it_in_values_memory_and_gradients(seed: int):
    any_of = random.Random(seed)
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        for _ in range(50):
            atoms = [*"abcde"[: any_of.randint(1, 5)]]
            mine = {atom: any_of.randint(1, 4) for atom in atoms}
            split = {any_of.choice(atoms): axis for axis in ("dp", "tp") if any_of.random() < 0.7}
            left, right = groups(atoms, any_of), groups(any_of.sample(atoms, len(atoms)), any_of)
            texts = [f"{written(left, split)} -> {written(right, split)}" for split in (split, {})]
            if not split:
                texts[0] += " |"
            named = [atom for dims in (left, right) for dim in dims for atom in dim if len(dim) > 1]
            x = torch.randn([math.prod(mine[atom] for atom in dim) for dim in left])
            x = x.mT.contiguous().mT if any_of.random() < 0.5 and x.dim() > 1 else x
            x = (x.requires_grad_() * 1) if any_of.random() < 0.5 else x.requires_grad_()
            found = rearrange(x, texts[0], sizes={a: mine[a] * (2 if a in split else 1) for a in named})
            expected = einops.rearrange(x, texts[1], **{a: mine[a] for a in named})
            assert torch.equal(found, expected), texts
            shared = [torch_private.share_memory(y, x) for y in (found, expected)]
            assert shared[0] == shared[1] <= (found is x or found._is_view()), texts
            g = torch.randn_like(found)
            gradients = [torch.autograd.grad(y, x, g)[0] for y in (found, expected)]
            assert torch.equal(*gradients), texts


@pytest.mark.parametrize("kind", ["plain shards", "DTensors"])
@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x, dims: x, r"a tensor of \[2, 3\]"),
        (lambda x, dims: x.sum(dims, keepdim=True), r"a tensor of \[2, 1\]"),
        (lambda x, dims: None, "None"),
        (lambda x, dims: 1.0, r"1\.0"),
    ],
)
def test_a_function_that_reduces_gives_the_tensor_without_its_dims(kind: str, function: Callable[..., Any], found: str):
    with axes.simulate(2), axes.init_mesh("tp=2", device_type="cpu"):
        x = axes.shard(torch.ones(4, 3), "a@tp b") if kind == "DTensors" else torch.ones(2, 3)
        text = "a@tp b -> a@tp"
        with pytest.raises(axes.ShardingError, match=rf"of \[2, 3\] without dims \(1,\) that is \[2\]; found {found}"):
            axes.reduce(x, text, function)
        assert axes.reduce(x, text, lambda x, dims: x.logsumexp(dims)).shape[-1] == (4 if kind == "DTensors" else 2)


class Captured:
    """What a function holds on to."""


def collected(kind: str, text: str, gradient: bool) -> bool:
    """Whether what a function captures is gone after it was called, and its gradient computed."""
    x = torch.ones(2, 3)
    whole = {"plain": x, "array": x.numpy(), "shards": x, "DTensors": None}[kind]
    x = axes.shard(torch.ones(4, 3), "a@tp b") if whole is None else whole
    x = x.requires_grad_() if gradient else x

    def call(captured: Captured) -> None:
        y = axes.reduce(x, text, lambda x, dims: (captured, x.sum(dims))[1])
        if gradient:
            y.sum().backward()

    captured = Captured()
    alive = weakref.ref(captured)
    call(captured)
    del captured
    gc.collect()
    return alive() is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("plain", "a b -> a"),
        ("array", "a b -> b"),
        *(
            (kind, text)
            for kind in ("shards", "DTensors")
            for text in ("a@tp b -> a@tp", "a@tp b -> a", "a@tp b -> a@tp 1")
        ),
    ],
)
def test_a_function_that_reduces_is_not_kept_and_each_gives_its_own(kind: str, text: str):
    with axes.simulate(2), axes.init_mesh("tp=2", device_type="cpu"):
        for gradient in (False, True)[: 1 + (kind != "array")]:
            assert collected(kind, text, gradient)
        for scale in (1, 2):
            x = axes.shard(torch.ones(4, 3), "a@tp b") if kind == "DTensors" else torch.ones(2, 3)
            found = axes.reduce(
                x.numpy() if kind == "array" else x, text, lambda x, dims, scale=scale: scale * x.sum(dims)
            )
            assert float(found.flatten()[0]) == scale * (2 if kind == "array" else 3)
