"""Corners, each with its words: a program on a mesh and the same on one device, with gradients up to the third.

The laws draw what is usual; here is what they draw seldom or not at all: nothing of a dim, NaN and infinity, numbers that a
dtype can't hold, what is `same` over an axis, functions that reduce, autocast, graphs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import math
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import einops
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes
from tests.common import case

F16, F32, F64, C128 = torch.bfloat16, torch.float32, torch.float64, torch.complex128


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    """Few values, so that extremes have ties, and none where a derivative isn't one."""
    generator = torch.Generator().manual_seed(seed)
    count = (2, *shape) if dtype.is_complex else shape
    found = torch.randint(-3, 4, count, generator=generator).double() / 4 + 0.125
    return torch.complex(*found).to(dtype) if dtype.is_complex else found.to(dtype)


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0))


def curved(x: torch.Tensor) -> torch.Tensor:
    """A function with derivatives of every order."""
    return x.sin() * x


def own(x: torch.Tensor) -> torch.Tensor:
    """This rank's share of what all ranks of tp have: the shares add up to it."""
    return x * (1.5, -0.5)[axes.axis_index("tp")]


def whole_of(x: torch.Tensor) -> torch.Tensor:
    return axes.unshard(x) if isinstance(x, DTensor) else x


def plain(text: str) -> str:
    """An expression without its mesh."""
    return re.sub(r"\|[^>]*(?=->)|\|.*$|@\([^)]*\)|@[\w*]+", "", text)


def mesh() -> axes.Mesh:
    return axes.init_mesh("dp=2 cp=2 tp=2", "rest = cp tp", device_type="cpu")


# --- one device's, and as DTensors or shards --------------------------------------------------------


@dataclass(frozen=True)
class Corner:
    """Operands by their specs, what is computed of them, and the same on one device.

    `order` is how often it is differentiated. `result` is the spec of plain shards' result: then it is done with shards, too.
    """

    given: tuple[tuple[str, Callable[[], torch.Tensor]], ...]
    ours: Callable[..., torch.Tensor]
    theirs: Callable[..., torch.Tensor]
    result: str | None = None
    order: int = 1
    autocast: bool = False
    tolerance: float = 1e-9


def of(spec: str, *shape: int, dtype: torch.dtype = F64, seed: int = 1) -> tuple[str, Callable[[], torch.Tensor]]:
    return spec, lambda: numbers(*shape, dtype=dtype, seed=seed)


def placed(whole: torch.Tensor, spec: str) -> DTensor:
    """A leaf in a sharding, with summands of their own on every rank where it is pending over tp."""
    if "|" not in spec or "same" in spec:
        return axes.shard(whole, spec.partition("|")[0]).requires_grad_(whole.is_floating_point() or whole.is_complex())
    noise = [numbers(*whole.shape, seed=90 + rank) for rank in range(2)]
    noise[0] = whole * (2 if "mean" in spec else 1) - noise[1]
    return axes.from_local(noise[axes.axis_index("tp")], spec).requires_grad_()


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, what: str) -> None:
    found, wanted = found.detach(), wanted.detach()
    assert found.dtype == wanted.dtype, f"{what}: {found.dtype} for {wanted.dtype}"
    torch.testing.assert_close(
        found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def derivatives(y: torch.Tensor, leaves: Sequence[torch.Tensor], order: int) -> list[torch.Tensor]:
    """The gradients of a loss, their products with a vector, and so on, each whole."""
    loss, found = (y * numbers(*y.shape, seed=50, dtype=y.dtype)).sum() + (y**3).sum() / 3 * (order > 1), []
    for seed in range(order):
        loss = loss.real if loss.is_complex() else loss
        slopes = torch.autograd.grad(loss, leaves, create_graph=order > 1, retain_graph=True, materialize_grads=True)
        found += [whole_of(slope) for slope in slopes]
        loss = sum((s * numbers(*s.shape, seed=70 + seed, dtype=s.dtype)).sum() for s in found[-len(leaves) :])
    return found


def arriving(y: torch.Tensor, how: str) -> torch.Tensor:
    """The whole of a result whose cotangent comes whole, split over a dim, or as summands."""
    if how == "split" and y.ndim:
        y = axes.reshard(y, " ".join(["_@(dp tp)"] + ["_@()"] * (y.ndim - 1)) + " |")
    elif how == "pending":
        y = axes.reshard(y, "... |") if "|" in axes.spec_of(y) else y
        over, rows = "dp" if "tp" in axes.spec_of(y) else "tp", numbers(4, seed=3) * 2 + 1
        copies = axes.einsum(y, axes.shard(rows.to(y.dtype), f"r@{over}"), f"..., r@{over} -> r@{over} ...")
        y = axes.reduce(copies, f"r@{over} ... -> ...", "sum") / rows.sum()
    return axes.unshard(y)


def compare(name: str) -> None:
    corner = CORNERS[name]
    wholes = [make() for _, make in corner.given]
    leaves = [x.clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in wholes]
    state = functools.partial(torch.autocast, "cpu", F16, enabled=corner.autocast)
    differentiated = [x for x in leaves if x.requires_grad] if corner.order else []
    with mesh() as here:
        with state():
            value = corner.theirs(*leaves)
        expected = derivatives(value, differentiated, corner.order) if differentiated else []
        for how in ("whole", "split", "pending") if corner.order > 2 else ("whole",):
            given = [placed(x, spec) for x, (spec, _) in zip(wholes, corner.given, strict=True)]
            with state():
                y = corner.ours(*given)
            assert isinstance(y, DTensor)
            close(axes.unshard(y), value, corner.tolerance, "the value")
            mine = [x for x, leaf in zip(given, leaves, strict=True) if leaf.requires_grad]
            found = derivatives(arriving(y, how), mine, corner.order) if differentiated else []
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                close(one, other, corner.tolerance, f"derivative {number // len(mine) + 1}, cotangent {how}")
        if corner.result is not None:
            shards = [placed(x, s).detach().to_local().clone() for x, (s, _) in zip(wholes, corner.given, strict=True)]
            shards = [x.requires_grad_(x.is_floating_point()) for x in shards]
            with state():
                y = corner.ours(*shards)
            close(y, axes.shard(value.detach(), corner.result).to_local(), corner.tolerance, "the shard")
            if not differentiated:
                return
            copies = math.prod(size for axis, size in here.shape.items() if axis not in names_of(corner.result))
            w = axes.shard(numbers(*value.shape, seed=50, dtype=value.dtype), corner.result).to_local() / copies
            slopes = torch.autograd.grad((y * w).sum(), [x for x in shards if x.requires_grad])
            wanted = torch.autograd.grad(
                (value * numbers(*value.shape, seed=50, dtype=value.dtype)).sum(), differentiated
            )
            specs = [spec for x, (spec, _) in zip(leaves, corner.given, strict=True) if x.requires_grad]
            for slope, other, spec in zip(slopes, wanted, specs, strict=True):
                lost = tuple(axis for axis in here.axis_names if axis not in names_of(spec))
                total = axes.psum(slope.double(), lost).to(slope.dtype) if lost else slope
                close(total, axes.shard(other, spec).to_local(), corner.tolerance, "the gradient of a shard")


def names_of(spec: str) -> set[str]:
    found = {*re.findall(r"\w+", " ".join(re.findall(r"@(\w+|\([^)]*\))", spec)))}
    return found | ({"cp", "tp"} if "rest" in found else set())


def reduction(spec: str, text: str, op: Any, *shape: int, **how: Any) -> Corner:
    def theirs(x: torch.Tensor) -> torch.Tensor:
        return einops.reduce(x, plain(text), op)

    result = None if "|" in spec + text else text.partition("->")[2].strip()
    return Corner((of(spec, *shape),), lambda x: axes.reduce(x, text, op), theirs, result, **how)


def region(text: str, inside: Callable[..., Any], theirs: Callable[..., Any] = curved, rows: int = 7) -> Corner:
    spec = text.split("->")[0].strip()
    return Corner((of(spec, rows, 4),), lambda x: axes.shard_map(inside, text)(x), theirs, order=3)


def twice(x: torch.Tensor) -> torch.Tensor:
    return curved(curved(x))


def log_of_sum(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return x.logsumexp(dims)


def nans(spec: str, *shape: int) -> tuple[str, Callable[[], torch.Tensor]]:
    def make() -> torch.Tensor:
        x = numbers(*shape)
        x.view(-1)[::5], x.view(-1)[::7], x.view(-1)[3::11] = math.inf, -math.inf, math.nan
        return x

    return spec, make


def half(text: str, *shapes: tuple[int, ...], dtype: torch.dtype = F32) -> Corner:
    """An einsum under autocast."""
    *specs, result = [each.strip() for each in re.split(",|->", text)]
    given = tuple(
        of(spec, *shape, dtype=dtype, seed=at) for at, (spec, shape) in enumerate(zip(specs, shapes, strict=True))
    )

    def theirs(*xs: torch.Tensor) -> torch.Tensor:
        """A product in 16 bits, also where torch would only multiply in 32."""
        factors = [x.to(F16) if len(xs) > 1 and x.dtype is F32 else x for x in xs]
        return einops.einsum(*factors, plain(text))

    return Corner(given, lambda *xs: axes.einsum(*xs, text), theirs, result, 1, True, 2e-2)


def alone(spec: str, ours: Callable[..., Any], theirs: Callable[..., Any], dtype: torch.dtype = F16) -> Corner:
    """A function of one tensor under autocast."""
    return Corner((of(spec, 4, 8, dtype=dtype),), ours, theirs, None, 1, True, 3e-2)


LABELS = torch.tensor([0, 3, 2, 1])
EINSUMS = [
    ("b k, k f@tp -> b f@tp", (4, 6), (6, 8)),
    ("b k@tp, k@tp f -> b f", (4, 6), (6, 8)),
    ("b k@tp, k@tp f -> b@tp f", (4, 6), (6, 8)),
    ("b@dp k@tp, f k@tp -> b@dp f@tp", (4, 6), (8, 6)),
    ("h b@dp q k, h b@dp k v -> h b@dp q v", (2, 4, 3, 5), (2, 4, 5, 6)),
    ("i@tp, j -> i@tp j", (4,), (3,)),
    ("b k@tp, b k@tp -> b k@tp", (4, 6), (4, 6)),
    ("b@dp k, k f -> b@dp f", (4, 1), (1, 8)),
    ("b k@tp, k@tp f -> b f", (4, 2), (2, 8)),
    ("k@tp, k@tp ->", (6,), (6,)),
    ("b k@tp -> b", (4, 6)),
    ("b k@tp, k@tp f, f d -> b d", (4, 6), (6, 3), (3, 5)),
]

CORNERS: dict[str, Corner] = {
    # means and extremes where ranks have one element or none
    **{f"a mean of {n} over {at}": reduction(f"b@{at} s", f"b@{at} s -> s", "mean", n, 3) for n in (0, 1, 2, 3, 5, 8) for at in ("dp", "(dp cp)")},
    **{f"a mean of {n}, summed": reduction("b@dp s", "b@dp s -> s | sum@dp", "mean", n, 3) for n in (1, 3)},
    "a complex product": Corner((of("n@tp d", 8, 4, dtype=C128), of("d@tp k", 4, 6, dtype=C128, seed=2)), lambda x, w: axes.einsum(x, axes.reshard(w, "d k@()"), "n@tp d, d k -> n@tp k"), lambda x, w: x @ w, order=3),
    "a complex product of three": Corner((of("n@tp", 8, dtype=C128), of("n@tp", 8, dtype=C128, seed=2), of("n@tp", 8, dtype=C128, seed=3)), lambda x, y, z: axes.einsum(x, y, z, "n@tp, n@tp, n@tp -> n@tp"), lambda x, y, z: x * y * z, order=3),
    "a mean of complex numbers": Corner((of("b@dp s", 5, 3, dtype=C128),), lambda x: axes.reduce(x, "b@dp s -> s", "mean"), lambda x: x.mean(0), "s", 0),
    "a mean over a group": Corner((of("(b t)@(dp cp) s", 6, 3),), lambda x: axes.reduce(x, "(b t)@(dp cp) s -> s", "mean"), lambda x: x.mean(0), "s"),
    "a mean over two axes": reduction("b@dp s@cp", "b@dp s@cp -> ", "mean", 3, 5),
    **{f"{op} of {n}": reduction("b@(cp tp) s", "b@(cp tp) s -> s", op, n, 3) for op in ("max", "min") for n in (1, 3, 5)},
    "the maximum of no columns": reduction("b@(dp cp) s t", "b@(dp cp) s t -> t", "max", 1, 2, 0, order=0),
    **{f"{op} of NaN": Corner((nans("t@rest a", 8, 5),), lambda x, op=op: axes.reduce(x, "t@rest a -> a", op), lambda x, op=op: getattr(x, f"a{op}")(0), "a") for op in ("max", "min")},
    **{f"{op} of NaN, scattered": Corner((nans("t@tp a", 8, 5),), lambda x, op=op: axes.reduce(x, "t@tp a -> a@tp", op), lambda x, op=op: getattr(x, f"a{op}")(0)) for op in ("max", "min")},
    # reductions and functions that reduce, three times differentiated
    **{f"{getattr(op, '__name__', op)} {text}, thrice": reduction(text.partition(" ->")[0], text, op, 7, 4, order=3) for op, text in (
        *(("max", "n@tp d -> d"), ("min", "n@(dp tp) d -> d@tp"), ("max", "n@tp d@dp -> n@tp"), ("min", "n d -> d@tp")),
        *(("prod", "n@dp d -> n@dp"), ("prod", "n d@tp -> d"), (log_of_sum, "n@tp d -> n@tp"), (log_of_sum, "n d -> d")),
        *(("sum", "n d | sum@tp -> d"), ("mean", "n d | mean@tp -> d"), ("mean", "n@tp d -> d")),
    )},
    # regions: all kinds of axes on both sides of the border
    "split": region("n@tp d -> n@tp d", curved),
    "replicated": region("n d -> n d", curved),
    "same": region("n d | same@tp -> n d | same@tp", curved),
    "pending": region("n d | sum@tp -> n d | sum@tp", lambda x: 3 * x, lambda x: 3 * x),
    "mean": region("n d | mean@tp -> n d | mean@tp", lambda x: 3 * x, lambda x: 3 * x),
    "sum, reduced": region("n d | sum@tp -> n d", lambda x: curved(axes.psum(x, "tp"))),
    "mean, reduced": region("n d | mean@tp -> n d", lambda x: curved(axes.pmean(x, "tp"))),
    "each its own": region("n d -> n d | sum@tp", lambda x: own(curved(x))),
    "all its own": region("n d -> n d", lambda x: axes.psum(own(curved(x)), "tp")),
    "gathered": region("m@tp d -> m d", lambda x: curved(axes.all_gather(x, "tp")), rows=8),
    "scattered": region("m d -> m@tp d", lambda x: curved(axes.psum_scatter(own(curved(x)), "tp")), twice, 8),
    "exchanged": region("m@tp d -> m d@tp", lambda x: curved(axes.all_to_all(x, "tp", split_dim=1, concat_dim=0)), rows=8),
    "shifted": region("m@tp d -> m@tp d", lambda x: curved(axes.ppermute(x, "tp", shift=1)), lambda x: curved(x).roll(4, 0), 8),
    "summed": region("n@tp d -> d", lambda x: curved(axes.psum(curved(x).sum(0), "tp")), lambda x: curved(curved(x).sum(0))),
    "left pending": region("n@tp d -> d | sum@tp", lambda x: curved(x).sum(0), lambda x: curved(x).sum(0)),
    "to same": region("n d -> n d | same@tp", lambda x: curved(axes.reshard(curved(x), "n d -> n d | same@tp")), twice),
    "from same": region("n d | same@tp -> n d", lambda x: curved(axes.reshard(curved(x), "n d | same@tp -> n d")), twice),
    "same, sliced": region("n d | same@tp -> n@tp d", lambda x: curved(axes.reshard(curved(x), "n d | same@tp -> n@tp d")), twice),
    "gathered, same": region("n@tp d -> n d | same@tp", lambda x: curved(axes.reshard(curved(x), "n@tp d -> n d | same@tp", n=7)), twice),
    "reduced, same": region("n d | sum@tp -> n d | same@tp", lambda x: curved(axes.reshard(x, "n d | sum@tp -> n d | same@tp"))),
    "mean, same": region("n d | mean@tp -> n d | same@tp", lambda x: curved(axes.reshard(x, "n d | mean@tp -> n d | same@tp"))),
    "same, its own": region(
        "n d | same@tp -> n d | same@tp",
        lambda x: axes.reshard(own(curved(axes.reshard(x, "n d | same@tp -> n d"))), "n d | sum@tp -> n d | same@tp"),
    ),
    "pmax": region("n@tp d -> d", lambda x: curved(axes.pmax(curved(x).amax(0), "tp")), lambda x: curved(curved(x).amax(0))),
    "pmin": region("n@tp d -> d", lambda x: curved(axes.pmin(x.amin(0), "tp")), lambda x: curved(x.amin(0))),
    "product": region("n d@tp -> d@tp", lambda x: curved(axes.reduce(x, "n d@tp -> d@tp", "prod")), lambda x: curved(x.prod(0))),
    # doors, three times differentiated
    "out and in, whole": Corner((of("n@dp d", 7, 4),), lambda x: axes.from_local(curved(axes.to_local(curved(x), grad="whole")), "n@dp d", shape=(7, 4), grad="whole"), twice, order=3),
    "out and in, summed": Corner((of("n@dp d", 7, 4),), lambda x: axes.from_local(axes.psum(curved(axes.to_local(curved(x), grad="summed")) / 4, ("cp", "tp")), "n@dp d", shape=(7, 4), grad="summed"), twice, order=3),
    "out and in, one of each": Corner((of("n@dp d", 7, 4),), lambda x: axes.from_local(axes.psum(own(curved(axes.to_local(curved(x), "n@dp d | same@cp", grad="summed"))), "tp"), "n@dp d | same@cp", shape=(7, 4), grad="summed"), twice, order=3),
    "a whole tensor, sharded": Corner((of("n d", 7, 4),), lambda x: axes.shard(curved(axes.unshard(x)), "n@tp d@cp"), curved, order=3),
    # functions over split dims
    "logsumexp of large numbers": Corner((("q k@rest", lambda: numbers(4, 8) + 800),), lambda x: axes.logsumexp(x, "q k@rest", over="k"), lambda x: x.logsumexp(1), "q", 1),
    "logsumexp of infinities": Corner((nans("q k@rest", 5, 8),), lambda x: axes.logsumexp(x, "q k@rest", over="k"), lambda x: x.logsumexp(1), "q", 0),
    "softmax of infinities": Corner((nans("q k@tp", 5, 8),), lambda x: axes.softmax(x, "q k@tp", over="k"), lambda x: x.softmax(1), "q k@tp", 0),
    "logsumexp over two dims": Corner((of("a k@(tp cp) j", 3, 8, 5),), lambda x: axes.logsumexp(x, "... k@(tp cp) j", over="j k"), lambda x: x.logsumexp((1, 2)), "a", 3),
    "rms_norm over two dims": Corner((of("b h@tp d", 3, 8, 5), of("h@tp d", 8, 5)), lambda x, w: axes.rms_norm(x, "b h@tp d", "h d", w), lambda x, w: F.rms_norm(x, (8, 5), w), order=3),
    **{f"layer_norm of {n} columns, whose number isn't given": Corner((of("b v@(dp cp)", 3, n), of("v@(dp cp)", n)), lambda x, w: axes.layer_norm(x, "b v@(dp cp)", "v", w), lambda x, w: F.layer_norm(x, w.shape, w), "b v@(dp cp)") for n in (2, 5, 8)},
    **{f"cross_entropy of {n} words": Corner((of("b v@tp", 4, n), ("b", lambda n=n: integers(n, 4))), lambda x, t: axes.cross_entropy(x, t, "b v@tp, b -> "), F.cross_entropy, "") for n in (1, 5)},
    **{f"cross_entropy, {text}": Corner((of("b@dp v@tp", 4, 8), ("b@dp", lambda: LABELS)), lambda x, t, text=text: axes.cross_entropy(x, t, f"b@dp v@tp, b@dp -> {text}"), F.cross_entropy) for text in ("| same@dp", "| same@(dp cp tp)", "| sum@dp")},
    "another label is ignored": Corner((of("v@tp b@dp", 8, 4), ("b@dp", lambda: LABELS)), lambda x, t: axes.cross_entropy(x, t, "v@tp b@dp, b@dp -> ", ignore_index=3), lambda x, t: F.cross_entropy(x.mT, t, ignore_index=3)),
    "all labels are ignored": Corner((of("b v@tp", 4, 8), ("b", lambda: torch.full((4,), -100))), lambda x, t: axes.cross_entropy(x, t, "b v@tp, b -> "), F.cross_entropy, "", 0),
    **{f"embedding, padded by {row}": Corner((("b", lambda: integers(5, 6)), of("v@tp d", 5, 3)), lambda i, t, row=row: axes.embedding(i, t, "b, v@tp d -> d b", padding_idx=row), lambda i, t, row=row: F.embedding(i, t, row).mT, "d b") for row in (0, -1)},
    # nothing of a dim
    "nothing, a region": Corner((of("b@tp v", 0, 4),), lambda x: axes.shard_map(lambda t: t * 2, "b@tp v -> b@tp v")(x), lambda x: 2 * x),
    "nothing, a sum in a region": Corner((of("b@tp v", 0, 4),), lambda x: axes.shard_map(lambda t: axes.psum(t.sum(0), "tp"), "b@tp v -> v")(x), lambda x: x.sum(0)),
    "nothing, a group": Corner((of("b@tp v", 0, 4),), lambda x: axes.shard_map(torch.flatten, "b@tp v -> (b v)@tp")(x), torch.flatten),
    "nothing, softmax": Corner((of("b@tp v", 0, 4),), lambda x: axes.softmax(x, "b@tp v", over="v"), lambda x: x.softmax(1), "b@tp v"),
    "nothing, rms_norm": Corner((of("b@tp v", 0, 4),), lambda x: axes.rms_norm(x, "b@tp v", over="v"), lambda x: F.rms_norm(x, (4,)), "b@tp v"),
    "nothing, cross_entropy": Corner((of("b@tp v", 0, 4), ("b@tp", lambda: integers(4, 0))), lambda x, t: axes.cross_entropy(x, t, "b@tp v, b@tp -> ", reduction="sum"), lambda x, t: F.cross_entropy(x, t, reduction="sum")),
    # under autocast
    **{f"einsum {text}, {dtype}": half(text, *shapes, dtype=dtype) for text, *shapes in EINSUMS for dtype in (F32, F16, F64) if dtype is F32 or (len(shapes) == 2 and "s" not in text)},
    **{f"autocast: {name}": alone(*row, dtype=dtype) for dtype in (F16, F32) for name, row in {
        f"rearrange {dtype}": ("b k@tp", lambda x: axes.rearrange(x, "b k@tp -> k@tp b"), lambda x: x.mT),
        f"mean {dtype}": ("b k@tp", lambda x: axes.reduce(x, "b k@tp -> b", "mean"), lambda x: x.mean(1)),
        f"prod {dtype}": ("b@tp k", lambda x: axes.reduce(x, "b@tp k -> b@tp", "prod"), lambda x: x.prod(1).to(x.dtype)),
        f"softmax {dtype}": ("b k@tp", lambda x: axes.softmax(x, "b k@tp", over="k"), lambda x: torch.softmax(x, 1)),
        f"logsumexp {dtype}": ("b k@tp", lambda x: axes.logsumexp(x, "b k@tp", over="k"), lambda x: torch.logsumexp(x, 1)),
        f"rms_norm {dtype}": ("b k@tp", lambda x: axes.rms_norm(x, "b k@tp", over="k"), lambda x: F.rms_norm(x, (8,))),
        f"layer_norm {dtype}": ("b k@tp", lambda x: axes.layer_norm(x, "b k@tp", over="k"), lambda x: F.layer_norm(x, (8,))),
        f"cross_entropy {dtype}": ("b k@tp", lambda x: axes.cross_entropy(x, axes.shard(LABELS, "b"), "b k@tp, b -> "), lambda x: F.cross_entropy(x, LABELS)),
        f"embedding {dtype}": ("v@tp d", lambda x: axes.embedding(axes.shard(LABELS, "b"), x, "b, v@tp d -> b d"), lambda x: F.embedding(LABELS, x)),
        f"region {dtype}": ("b k@tp", lambda x: axes.shard_map(lambda t: axes.psum(t @ t.mT, "tp"), "b k@tp -> b c")(x), lambda x: x @ x.mT),
    }.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", CORNERS)
def test_a_corner_is_that_of_one_device(pool, name):
    pool.run(compare, name)


# --- numbers that a dtype can't hold --------------------------------------------------------------


def wide_sums() -> None:
    with mesh():
        whole = torch.rand(5003, 4, generator=torch.Generator().manual_seed(0)).to(F16)
        text, off = "b@(dp cp tp) s -> ", []
        for op, wide in itertools.product(("sum", "mean"), (True, False)):
            x = axes.shard(whole, "b@(dp cp tp) s")
            x = x.float() if wide else x
            found = [whole_of(axes.reduce(x, text + right, op)) for right in ("s", "s@dp", "s@rest")]
            found += [axes.reduce(x.to_local(), text + "s", op, **b) for b in ({}, {"b": 5003})]
            rounded = [torch.equal(y.to(F16), getattr(whole.double(), op)(0).to(F16)) for y in found]
            assert all(rounded) or not wide, (op, found)
            off += [] if all(rounded) else [op]
        assert off == ["sum", "mean"], "the case is too easy: 16 bits do"


def means_of_large_numbers() -> None:
    x = torch.full((8,), 32768.0, dtype=torch.float16)
    with mesh():
        pending = axes.from_local(x, "a | mean@(dp cp tp)")
        found = [axes.reshard(pending, "a").to_local(), axes.reshard(pending, "a@(dp cp tp)").to_local()]
        found += [axes.pmean(x, ("dp", "cp", "tp")), axes.pmean(x, "rest"), axes.reduce(x, "b@rest ->", "mean")]
    assert [set(each.view(-1).tolist()) for each in found] == [{32768.0}] * 5


def outside(place: str) -> None:
    """A label or an index outside is NaN, in the value and in the gradient of its row; -100 is ignored."""
    whole, labels, ids = numbers(5, 6), torch.tensor([0, -1, 6, -100, 3]), torch.tensor([0, -1, 6, 3, 7])
    bad, rows = [False, True, True, False, False], [True, False, False, False, False, True]

    def judge(gradient: torch.Tensor, wanted: list[bool]) -> None:
        assert gradient.isnan().all(1).tolist() == gradient.isnan().any(1).tolist() == wanted

    with mesh():
        for right, op in (("b", "sum"), ("", "mean"), ("", "sum")):
            x = axes.shard(whole, f"b v{place}").requires_grad_()
            text = f"b v{place}, b -> {right}"
            loss = whole_of(axes.cross_entropy(x, axes.shard(labels, "b"), text, reduction=op))
            loss.sum().backward()
            assert loss.isnan().tolist() == (bad if right else True)
            judge(whole_of(x.grad), bad)
            local = x.detach().to_local().clone().requires_grad_()
            assert axes.cross_entropy(local, labels, text, reduction=op).isnan().tolist() == (bad if right else True)
        for right in ("b d", "b d | *") if place else ("b d",):
            t = axes.shard(whole.mT.contiguous(), f"v{place} d").requires_grad_()
            found = whole_of(axes.embedding(axes.shard(ids, "b"), t, f"b, v{place} d -> {right}"))
            assert found.isnan().all(1).tolist() == [False, True, True, False, True]
            found.sum().backward()
            judge(whole_of(t.grad), rows)
    assert axes.cross_entropy(torch.zeros(1, 200), torch.tensor([156], dtype=torch.uint8), "b v, b -> b").item() > 5


@pytest.mark.parametrize("check", [wide_sums, means_of_large_numbers])
def test_what_a_dtype_cant_hold_is_rounded_once(pool, check):
    pool.run(check)


@pytest.mark.parametrize("place", ["", "@tp", "@(dp tp)"])
def test_a_label_or_an_index_outside_of_its_range_is_nan(pool, place):
    pool.run(outside, place)


def changed_in_flight() -> None:
    whole = torch.arange(50_000 * 8.0, dtype=F64).view(-1, 8) + 1
    with mesh():
        for move in (
            "u@(dp cp) v -> u v",
            "u@(dp cp) v -> u@(cp dp) v",
            "u@dp v@cp -> u@cp v@dp",
            "u v | sum@(dp cp) -> u@dp v",
        ):
            source, target = move.split(" -> ")
            x = axes.from_local(whole.clone(), source) if "|" in source else axes.shard(whole, source)
            expected = whole_of(axes.reshard(x, target))
            for tensor in (x, axes.to_local(x)):
                if tensor is x:
                    y = axes.reshard(x, target, async_op=True)
                else:
                    y = axes.reshard(tensor, move, u=50_000, v=8, async_op=True)
                tensor.mul_(-1)
                with case(f"{move} of {type(tensor).__name__}"):
                    y = y if tensor is x else axes.from_local(y + 0, target, shape=whole.shape)
                    assert torch.equal(whole_of(y), expected)
                tensor.mul_(-1)


def test_a_source_may_be_changed_before_an_async_result_is_used(pool):
    pool.run(changed_in_flight)


# --- leaves ---------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[], DTensor]] = {
    "shard of a leaf": lambda: axes.shard(torch.ones(6, 8, requires_grad=True), "d f@tp"),
    "from_local": lambda: axes.from_local(torch.ones(6, 4), "d f@tp").requires_grad_(),
    "ones": lambda: axes.ones("d f@tp", d=6, f=8, requires_grad=True),
    "frozen and thawed": lambda: axes.ones("d f@tp", d=6, f=8, requires_grad=True).requires_grad_(False).requires_grad_(),
    "changed in place": lambda: axes.zeros("d f@tp", d=6, f=8).add_(1).requires_grad_(),
}  # fmt: skip
COPIES: dict[str, Callable[[DTensor], DTensor]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "parameter": torch.nn.Parameter,
    "detached": lambda w: w.detach().requires_grad_(),
}
FIRST: dict[str, Callable[[DTensor], object]] = {
    "einsum": lambda w: axes.einsum(w, "d f -> d f"),
    "unshard": axes.unshard,
    "to_local": lambda w: axes.to_local(w, grad="whole"),
    "reshard": lambda w: axes.reshard(w, "d f@tp"),
    "region": lambda w: axes.shard_map(torch.neg, "d f@tp -> d f@tp")(w),
}


def backward(y: DTensor, w: DTensor) -> str:
    """How the gradient of a leaf lies after a sum of y, whose cotangent is sharded as y is."""
    w.grad = None
    y.backward(torch.ones_like(y), retain_graph=True)
    return axes.spec_of(w.grad)


def leaves() -> None:
    with axes.init_mesh("dp=4 tp=2", device_type="cpu"), warnings.catch_warnings():
        warnings.simplefilter("error")
        x = axes.shard(torch.arange(24.0).view(4, 6), "b@dp d")
        for maker, make in MAKERS.items():
            w = make()
            with case(maker):
                assert (w.is_leaf, backward(x @ w, w)) == (True, "_ _@tp")
        made = MAKERS["ones"]()
        saved = io.BytesIO()
        torch.save(made, saved)
        saved.seek(0)
        copies = [(name, make(made)) for name, make in COPIES.items()]
        for name, w in [*copies, ("saved", torch.load(saved, weights_only=False))]:
            for first in FIRST if name == "parameter" else ["einsum"]:
                w = COPIES[name](made) if name == "parameter" else w
                FIRST[first](w)  # torch makes tensors without hooks: the first operation of axes gives them theirs
                with case(f"{name}, {first}"):
                    assert (w.is_leaf, w.requires_grad, backward(x @ w, w)) == (True, True, "_ _@tp")

        y = axes.zeros("d f@tp", d=6, f=8)
        y.add_(made)  # no longer a leaf: its gradient is as it comes
        came: list[str] = []
        y.register_hook(lambda g: came.append(axes.spec_of(g)))
        assert (backward(x @ y, made), came) == ("_ _@tp", ["_ _@tp | sum@dp"])


LAID: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row by row": lambda x: x.contiguous(),
    "column by column": lambda x: x.t().contiguous().t(),
    "one row for all": lambda x: x[:1].expand_as(x),
}


def memory_of_gradients() -> None:
    """A gradient lies in memory as its leaf does, or row by row where rows are shared; and nobody else has it."""
    with axes.init_mesh("dp=2 tp=4", device_type="cpu"):
        whole = torch.arange(42.0).view(6, 7)
        shard = axes.shard(whole, "d f@tp").to_local()
        for (way, laid), spec in itertools.product(LAID.items(), ("d f", "d f@tp", "d f@dp")):
            w = axes.from_local(laid(shard), "d f@tp", shape=(6, 7)).requires_grad_()
            given = axes.shard(whole, spec)
            axes.reshard(w, "d f").backward(given)
            with case(f"{way}, {spec}"):
                assert (axes.spec_of(w.grad), w.grad.stride()) == ("_ _@tp", w.stride() if w.stride(0) else (7, 1))
                assert torch.equal(whole_of(w.grad), whole)
                local = w.grad.to_local()
                assert (local.t() if w.stride(0) == 1 else local).is_contiguous()
                w.grad.zero_()
                assert torch.equal(whole_of(given), whole)


WRITTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{text: functools.partial(lambda text, x: axes.reshard(x, text), text) for text in (
        *("a b@tp -> a b", "a b@tp -> a@tp b", "a@(dp tp) b -> a@(tp dp) b", "a b | sum@tp -> a b@tp"),
    )},
    "reduce": lambda x: axes.reduce(x, "a@tp b -> b", "sum"),
    "psum": lambda x: axes.psum(x, "tp"),
    "all_gather": lambda x: axes.all_gather(x, "tp", 0),
    "psum_scatter": lambda x: axes.psum_scatter(x, "tp", 1),
    "all_to_all": lambda x: axes.all_to_all(x, "tp", 1, 0),
    "all_to_all of sizes": lambda x: axes.all_to_all(x, "tp", send_sizes=[2, 2], recv_sizes=[2, 2]),
    "ppermute": lambda x: axes.ppermute(x, "tp", shift=1),
    "ppermute to oneself": lambda x: axes.ppermute(x, "tp", perm=[(0, 0), (1, 1)]),
    "unshard": lambda x: axes.unshard(axes.from_local(x, "a b@tp", grad="summed")),
}  # fmt: skip
"""What sends anything: its result is nobody else's, and may be written in place."""


def written() -> None:
    with axes.init_mesh("dp=4 tp=2", device_type="cpu") as here:
        for name, call in WRITTEN.items():
            slopes = []
            for own_ in (lambda y: y, torch.clone):
                x = (numbers(4, 8) * 4).requires_grad_()
                with case(name):
                    own_(call(x.sin())).mul_(here.rank + 2).relu_().square().sum().backward()
                slopes.append(x.grad)
            assert torch.equal(*slopes), f"the gradient of {name} isn't that of a copy"


@pytest.mark.parametrize("check", [leaves, memory_of_gradients, written])
def test_leaves_and_results_own_their_memory_and_resolve_their_gradients(pool, check):
    pool.run(check, timeout=120)


# --- what is sent ---------------------------------------------------------------------------------

SENDS: dict[str, tuple[tuple[int, int], Callable[[torch.Tensor], torch.Tensor]]] = {
    # forward and backward, of a shard of [8, 4]
    "psum": ((1, 1), lambda x: axes.psum(x, "tp")),
    "pmean": ((1, 1), lambda x: axes.pmean(x, "rest")),
    "all_gather": ((1, 1), lambda x: axes.all_gather(x, "rest", dim=1)),
    "psum_scatter": ((1, 1), lambda x: axes.psum_scatter(x, "rest")),
    "all_to_all": ((1, 1), lambda x: axes.all_to_all(x, "rest", 0, 1)),
    "all_to_all of sizes": ((1, 1), lambda x: axes.all_to_all(x, "tp", send_sizes=[0, 8][::1], recv_sizes=[[0, 0], [8, 8]][axes.axis_index("tp")])),
    "ppermute": ((1, 1), lambda x: axes.ppermute(x, "dp", shift=1)),
    "ppermute to oneself": ((0, 0), lambda x: axes.ppermute(x, "dp", shift=-2)),
    "over nothing": ((0, 0), lambda x: axes.psum(x, ())),
    "softmax": ((2, 1), lambda x: axes.softmax(x, "b v@tp", over="v")),
    "logsumexp": ((2, 1), lambda x: axes.logsumexp(x, "b v@tp", over="v")),
    "rms_norm": ((1, 1), lambda x: axes.rms_norm(x, "b v@tp", over="v", v=8)),
    "rms_norm without the size": ((2, 1), lambda x: axes.rms_norm(x, "b v@tp", over="v")),
    "layer_norm": ((2, 2), lambda x: axes.layer_norm(x, "b v@tp", over="v", v=8)),
    "mean": ((1, 1), lambda x: axes.reduce(x, "b v@tp -> b", "mean", v=8)),
    "mean without the size": ((2, 1), lambda x: axes.reduce(x, "b v@tp -> b", "mean")),
    "mean of what isn't split": ((0, 0), lambda x: axes.reduce(x, "b v@tp -> v@tp", "mean")),
    "cross_entropy": ((2, 1), lambda x: axes.cross_entropy(x, integers(8, 8), "b v@tp, b -> b", v=8)),
    "cross_entropy, same": ((3, 0), lambda x: axes.cross_entropy(x, integers(8, 8), "b@dp v@tp, b@dp -> | same@(dp cp tp)", v=8)),
    "embedding": ((1, 1), lambda x: axes.embedding(integers(16, 5), x, "b, v@tp d -> b d", v=16)),
    "embedding, scattered": ((1, 1), lambda x: axes.embedding(integers(16, 6), x, "b, v@tp d -> b@tp d", v=16)),
    "Megatron's block": ((1, 1), lambda x: axes.einsum(torch.relu(axes.einsum(x, numbers(4, 6), "b d | same@tp, d f@tp -> b f@tp")), numbers(6, 4), "b f@tp, f@tp d -> b d | same@tp")),
}  # fmt: skip


def sent(name: str) -> tuple[int, int]:
    x = numbers(8, 4).requires_grad_()
    with mesh():
        with CommDebugMode() as forth:
            y = SENDS[name][1](x * 1)
        with CommDebugMode() as back:
            y.sum().backward()
    return forth.get_total_counts(), back.get_total_counts()


@pytest.mark.parametrize("name", SENDS)
def test_as_many_collectives_are_sent_as_are_promised(pool, name):
    assert pool.run(sent, name) == [SENDS[name][0]] * 8


class Image(torch.Tensor):
    """A tensor with a name of its own, as torchvision has them."""


def named() -> None:
    with axes.init_mesh("dp=4 tp=2 one=1", "also = tp", device_type="cpu") as here:
        axes.psum(torch.ones(1), "tp")
        groups = len(axes.process_groups())
        assert axes.psum(torch.ones(1), "also").item() == axes.psum(torch.ones(1), ("tp",)).item() == 2
        assert len(axes.process_groups()) == groups
        x = torch.arange(4.0, requires_grad=True)
        for y in (
            axes.psum(x, "one"),
            axes.pmax(x, "one"),
            axes.all_gather(x, "one"),
            axes.ppermute(x, "one", shift=3),
        ):
            assert y is x
        assert axes.ppermute(x, "one", perm=[]).tolist() == [0] * 4
        assert axes.psum(torch.tensor([True]), "one").dtype == torch.int64
        z = torch.tensor([1.5 + 2j, 3j])
        assert axes.all_gather(z.conj(), "tp").tolist() == z.conj().tolist() * 2
        assert axes.psum(z.conj().imag, "tp").tolist() == [-4, -6]
        for call in (
            lambda x: axes.psum(x, "tp"),
            lambda x: axes.rearrange(x, "n | sum@tp -> n"),
            lambda x: axes.softmax(x, "n@tp", "n"),
        ):
            image = torch.zeros(2).as_subclass(Image).requires_grad_()
            call(image).sum().backward()
            assert image.grad.shape == (2,)
        assert here.at(0).rank == 0


def test_collectives_share_groups_and_take_any_tensor(pool):
    pool.run(named)


def states_of_autocast() -> None:
    """One expression and one pair of operands under every state: nothing of one is kept for another."""
    x, w, text = numbers(4, 6, dtype=F32), numbers(6, 8, dtype=F32), "b k@tp, k@tp f -> b f"
    with mesh():
        operands = [axes.shard(x, "b k@tp"), axes.shard(w, "k@tp f")]
        for _, given in itertools.product("12", (operands, [each.to_local() for each in operands])):
            for state in (
                contextlib.nullcontext(),
                torch.autocast("cpu", F16),
                torch.autocast("cpu", torch.float16),
                torch.autocast("cpu", enabled=False),
            ):
                with state:
                    assert axes.einsum(*given, text).dtype == (x @ w).dtype
                    assert axes.einsum(*(each.long() for each in given), text).dtype == torch.int64


def test_every_state_of_autocast_has_its_own_result(pool):
    pool.run(states_of_autocast)
