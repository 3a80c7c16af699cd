"""Derivatives of derivatives, up to the third, against one device's: every kind of border, both views, any cotangent.

The loss of a case is differentiated as `torch.autograd.grad(..., create_graph=True)` does it: the gradient,
its product with a vector (a Hessian-vector product), and that one's. Ranks are real, numbers are float64, and
what one device says is einops and torch on the whole tensors.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import einops
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import axes

Function = Callable[[torch.Tensor], torch.Tensor]


def numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Few values, so that extremes have ties, and none where a derivative isn't one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, tuple(shape), generator=generator).double() / 4 + 0.125


def curved(x: torch.Tensor) -> torch.Tensor:
    """A function with derivatives of every order."""
    return x.sin() * x


def own(x: torch.Tensor) -> torch.Tensor:
    """This rank's share of what all ranks of tp have: the shares add up to it."""
    return x * (1.0, 3.0, -2.0, -1.0)[axes.axis_index("tp")] / {2: 4.0, 4: 1.0}[axes.axis_size("tp")]


def whole_of(x: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, for one loss that every rank has."""
    return axes.unshard(x) if isinstance(x, DTensor) else x


def derivatives(loss: torch.Tensor, x: torch.Tensor, order: int = 3) -> list[torch.Tensor]:
    """The gradient, its product with a vector, and so on, each whole."""
    found = []
    for seed in range(order):
        (x_bar,) = torch.autograd.grad(loss, x, create_graph=True, materialize_grads=True)
        found.append(whole_of(x_bar))
        loss = (found[-1] * numbers(found[-1].shape, 70 + seed)).sum()
    return [each.detach() for each in found]


def difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> list[float]:
    return [((a - b).abs().max() / (1 + b.abs().max())).item() for a, b in zip(ours, theirs, strict=True)]


def loss_of(y: torch.Tensor, arrival: str) -> torch.Tensor:
    """A loss with derivatives of every order, whose cotangent arrives whole, split over a dim, or pending."""
    if not isinstance(y, DTensor):
        return (y * numbers(y.shape, 50) + y**3 / 3).sum()
    if arrival == "split":
        y = axes.reshard(y, " ".join(["_@(dp tp)"] + ["_@()"] * (y.ndim - 1)) + " |")
    elif arrival == "pending":
        # What ranks multiply by rows of their own comes back as summands.
        y = axes.reshard(y, "... |") if "|" in axes.spec_of(y) else y
        over = "dp" if "tp" in axes.spec_of(y) else "tp"
        rows = numbers((4,), 3) * 2 + 1
        copies = axes.einsum(y, axes.shard(rows, f"r@{over}"), f"..., r@{over} -> r@{over} ...")
        y = axes.reduce(copies, f"r@{over} ... -> ...", "sum") / rows.sum()
    return loss_of(axes.unshard(y), arrival)


# --- regions: all kinds of axes on both sides of the border


@dataclass(frozen=True)
class Case:
    """A region over `tp`, the function inside, and the same on one device."""

    text: str
    inside: Function
    whole: Function = curved


N = 7
"""An uneven dim."""

REGIONS = {
    "split": Case("n@tp d -> n@tp d", curved),
    "replicated": Case("n d -> n d", curved),
    "same": Case("n d | same@tp -> n d | same@tp", curved),
    "pending": Case("n d | sum@tp -> n d | sum@tp", lambda x: 3 * x, lambda x: 3 * x),
    "mean": Case("n d | mean@tp -> n d | mean@tp", lambda x: 3 * x, lambda x: 3 * x),
    "sum, reduced": Case("n d | sum@tp -> n d", lambda x: curved(axes.psum(x, "tp"))),
    "mean, reduced": Case("n d | mean@tp -> n d", lambda x: curved(axes.pmean(x, "tp"))),
    "each its own": Case("n d -> n d | sum@tp", lambda x: own(curved(x))),
    "all its own": Case("n d -> n d", lambda x: axes.psum(own(curved(x)), "tp")),
    "gathered": Case("m@tp d -> m d", lambda x: curved(axes.all_gather(x, "tp"))),
    "scattered": Case("m d -> m@tp d", lambda x: curved(axes.psum_scatter(own(curved(x)), "tp")), lambda x: curved(curved(x))),
    "exchanged": Case("m@tp d -> m d@tp", lambda x: curved(axes.all_to_all(x, "tp", split_dim=1, concat_dim=0))),
    "shifted": Case("m@tp d -> m@tp d", lambda x: curved(axes.ppermute(x, "tp", shift=1)), lambda x: curved(x).roll(8 // axes.axis_size("tp"), 0)),
    "summed": Case("n@tp d -> d", lambda x: curved(axes.psum(curved(x).sum(0), "tp")), lambda x: curved(curved(x).sum(0))),
    "left pending": Case("n@tp d -> d | sum@tp", lambda x: curved(x).sum(0), lambda x: curved(x).sum(0)),
    "to same": Case("n d -> n d | same@tp", lambda x: curved(axes.reshard(curved(x), "n d -> n d | same@tp")), lambda x: curved(curved(x))),
    "from same": Case("n d | same@tp -> n d", lambda x: curved(axes.reshard(curved(x), "n d | same@tp -> n d")), lambda x: curved(curved(x))),
    "same, sliced": Case("n d | same@tp -> n@tp d", lambda x: curved(axes.reshard(curved(x), "n d | same@tp -> n@tp d")), lambda x: curved(curved(x))),
    "gathered, same": Case("n@tp d -> n d | same@tp", lambda x: curved(axes.reshard(curved(x), "n@tp d -> n d | same@tp", n=N)), lambda x: curved(curved(x))),
    "reduced, same": Case("n d | sum@tp -> n d | same@tp", lambda x: curved(axes.reshard(x, "n d | sum@tp -> n d | same@tp"))),
    "mean, same": Case("n d | mean@tp -> n d | same@tp", lambda x: curved(axes.reshard(x, "n d | mean@tp -> n d | same@tp"))),
    "same, its own": Case(
        "n d | same@tp -> n d | same@tp",
        lambda x: axes.reshard(own(curved(axes.reshard(x, "n d | same@tp -> n d"))), "n d | sum@tp -> n d | same@tp"),
    ),
    "pmax": Case("n@tp d -> d", lambda x: curved(axes.pmax(curved(x).amax(0), "tp")), lambda x: curved(curved(x).amax(0))),
    "pmin": Case("n@tp d -> d", lambda x: curved(axes.pmin(x.amin(0), "tp")), lambda x: curved(x.amin(0))),
    "max": Case("n@tp d -> d", lambda x: curved(axes.reduce(x, "n@tp d -> d", "max", n=N)), lambda x: curved(x.amax(0))),
    "product": Case("n d@tp -> d@tp", lambda x: curved(axes.reduce(x, "n d@tp -> d@tp", "prod")), lambda x: curved(x.prod(0))),
}  # fmt: skip


def placed(whole: torch.Tensor, spec: str) -> DTensor:
    """A leaf in a sharding, with summands of their own on every rank where it is pending."""
    if "|" not in spec or "same" in spec:
        return axes.shard(whole.detach(), spec.split("|")[0]).requires_grad_()
    index, size = axes.axis_index("tp"), axes.axis_size("tp")
    noise = [numbers(whole.shape, 90 + rank) for rank in range(size)]
    noise[0] = whole.detach() * (size if "mean" in spec else 1) - sum(noise[1:])
    return axes.from_local(noise[index], spec).requires_grad_()


def island(size: int) -> range:
    start = dist.get_rank() // size * size
    return range(start, start + size)


def regions(names: Sequence[str], declaration: str) -> dict[str, float]:
    """How far three derivatives of each region are off, for each way in which a cotangent arrives."""
    torch.set_num_threads(1)
    found = {}
    with axes.init_mesh(declaration, ranks=island(4), device_type="cpu"):
        for name in names:
            case = REGIONS[name]
            dims = case.text.split("->")[0].strip()
            whole = numbers((8 if dims[0] == "m" else N, 4), 1).requires_grad_()
            expected = derivatives(loss_of(case.whole(whole), ""), whole)
            for arrival in ("whole", "split", "pending"):
                x = placed(whole, dims)
                y = axes.shard_map(case.inside, case.text)(x)
                found[f"{name}, {arrival}"] = max(difference(derivatives(loss_of(y, arrival), x), expected))
    return found


MESHES = ("dp=2 tp=2", "dp=1 tp=4")


@pytest.mark.parametrize("declaration", MESHES)
def test_three_derivatives_of_a_region_are_those_of_one_device(pool, declaration):
    for found in pool.run(regions, tuple(REGIONS), declaration, timeout=180):
        assert {name: off for name, off in found.items() if not off < 1e-12} == {}


def block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Two layers of Megatron's, its f and g at the ends."""
    x = axes.rearrange(x, "b d | same@tp -> b d")
    return axes.rearrange((x @ w).tanh() @ v, "b d | sum@tp -> b d | same@tp")


def blocks(declaration: str) -> float:
    """How far the derivatives by several operands together are off: two blocks, one after the other."""
    wholes = [numbers(shape, at).requires_grad_() for at, shape in enumerate(((4, 6), (6, 8), (8, 6)))]
    specs = ("b@dp d", "d f@tp", "f@tp d")

    def products(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = []
        for seed in range(3):
            gradients = torch.autograd.grad(loss, leaves, create_graph=True)
            found += [whole_of(each) for each in gradients]
            loss = sum((g * numbers(g.shape, 30 + seed)).sum() for g in found[-len(leaves) :])
        return [each.detach() for each in found]

    def whole_block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (x @ w).tanh() @ v

    x, w, v = wholes
    expected = products(loss_of(whole_block(whole_block(x, w, v), w, v), ""), wholes)
    with axes.init_mesh(declaration, ranks=island(4), device_type="cpu"):
        leaves = [axes.shard(t.detach(), spec).requires_grad_() for t, spec in zip(wholes, specs, strict=True)]
        region = axes.shard_map(block, "b@dp d | same@tp, d f@tp, f@tp d -> b@dp d | same@tp")
        y = region(region(*leaves), *leaves[1:])
        return max(difference(products(loss_of(y, "whole"), leaves), expected))


@pytest.mark.parametrize("declaration", MESHES)
def test_three_derivatives_of_megatron_blocks_are_those_of_one_device(pool, declaration):
    assert max(pool.run(blocks, declaration)) < 1e-12


def lifted() -> float:
    """How far three derivatives are off through `lift`, `reshard` and an operation of torch's."""
    whole = numbers((8, 4), 1).requires_grad_()
    expected = derivatives(loss_of(curved(curved(whole)), ""), whole)
    found = [0.0]
    with axes.init_mesh("dp=2 tp=2", ranks=island(4), device_type="cpu") as mesh:
        for arrival in ("whole", "split", "pending"):
            x = axes.shard(whole.detach(), "n@tp d", mesh=mesh["tp"]).requires_grad_()
            y = axes.reshard(curved(axes.lift(curved(x), mesh)), "n d@tp")
            found += difference(derivatives(loss_of(y, arrival), x), expected)
    return max(found)


def test_three_derivatives_through_a_lift_are_those_of_one_device(pool):
    assert max(pool.run(lifted)) < 1e-12


# --- expressions in both views


def log_of_sum(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return x.logsumexp(dims)


@dataclass(frozen=True)
class Reduction:
    """A reduction, and how its operand is sharded."""

    spec: str
    text: str
    op: object


REDUCTIONS = [
    Reduction("n@tp d", "n@tp d -> d", "max"),
    Reduction("n@tp d", "n@tp d -> d", "min"),
    Reduction("n@(dp tp) d", "n@(dp tp) d -> d@tp", "max"),
    Reduction("n@tp d@dp", "n@tp d@dp -> n@tp", "max"),
    Reduction("n@tp d@dp", "n@tp d@dp -> ", "min"),
    Reduction("n d", "n d -> d", "max"),
    Reduction("n d", "n d -> d@tp", "min"),
    Reduction("n@dp d", "n@dp d -> n@dp", "prod"),
    Reduction("n d", "n d -> d@tp", "prod"),
    Reduction("n d@tp", "n d@tp -> d", "prod"),
    Reduction("n@tp d", "n@tp d -> n@tp", log_of_sum),
    Reduction("n d", "n d -> d", log_of_sum),
    Reduction("n d | sum@tp", "n d | sum@tp -> d", "sum"),
    Reduction("n d | mean@tp", "n d | mean@tp -> d", "mean"),
    Reduction("n@tp d", "n@tp d -> d", "mean"),
]


def plain(text: str) -> str:
    """An expression without its mesh, for einops."""
    return re.sub(r"\|[^>]*(?=->)|@\([^)]*\)|@\w+", "", text)


def reductions(declaration: str) -> dict[str, float]:
    """How far three derivatives of each reduction are off, in the global and in the local view."""
    torch.set_num_threads(1)
    found = {}
    with axes.init_mesh(declaration, ranks=island(4), device_type="cpu"):
        for case in REDUCTIONS:
            whole = numbers((N, 4), 1).requires_grad_()
            expected = derivatives(loss_of(einops.reduce(whole, plain(case.text), case.op), ""), whole)
            for arrival in ("whole", "split", "pending"):
                x = placed(whole, case.spec)
                y = axes.reduce(x, case.text, case.op)
                if y.ndim or arrival != "split":
                    found[f"{case}, {arrival}"] = max(difference(derivatives(loss_of(y, arrival), x), expected))
            x = placed(whole, case.spec)
            y = axes.shard_map(functools.partial(axes.reduce, n=N), case.text)(x, case.text, case.op)
            found[f"{case}, in a region"] = max(difference(derivatives(loss_of(y, "whole"), x), expected))
    return found


@pytest.mark.parametrize("declaration", MESHES)
def test_three_derivatives_of_a_reduction_are_those_of_one_device_in_both_views(pool, declaration):
    for found in pool.run(reductions, declaration, timeout=180):
        assert {name: off for name, off in found.items() if not off < 1e-12} == {}


def of_an_empty_cotangent() -> list[str]:
    """A second derivative by a cotangent of which half of the ranks have nothing."""
    mesh = axes.init_mesh("a=2 b=2", ranks=island(4), device_type="cpu")
    found = []
    for spec in ("d0@b d1@a", "d0@(a b) d1", "d0 d1@b"):
        whole, cotangent = numbers((3, 1), 1).requires_grad_(), numbers((3, 1), 2).requires_grad_()
        x = axes.shard(whole.detach().clone().requires_grad_(), "d0 d1", mesh=mesh)
        c = axes.shard(cotangent.detach().clone().requires_grad_(), spec, mesh=mesh)
        y = axes.shard_map(lambda t: torch.tanh(t) * t, "d0 d1 | same@b -> d0 d1 | same@b", mesh=mesh)(x)
        (mine,) = torch.autograd.grad(y, x, c, create_graph=True)
        (right,) = torch.autograd.grad(torch.tanh(whole) * whole, whole, cotangent, create_graph=True)
        mine.backward(axes.shard(torch.ones(3, 1, dtype=torch.float64), "d0 d1", mesh=mesh))
        right.backward(torch.ones(3, 1, dtype=torch.float64))
        for name, one, other in (("value", x, whole), ("cotangent", c, cotangent)):
            if one.grad is None or not torch.allclose(axes.unshard(one.grad), other.grad):
                found.append(f"{name} of {spec}")
    return found


def test_ranks_that_have_nothing_of_a_cotangent_take_part(pool):
    assert pool.run(of_an_empty_cotangent) == [[]] * 8
