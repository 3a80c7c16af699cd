"""What a call costs before anything is sent: a fake world, tensors of 8x16, against DTensor's own.

One axis of four ranks, or two axes of two. `axes.reshard` is given a `Sharding`, `redistribute` its
placements; both find what they found before.
"""

from __future__ import annotations

from collections.abc import Callable

import einops
import torch
from torch.distributed.tensor import DTensor

import axes
from tests.bench.measure import Times, benchmark, compare

SPECS = {
    "S -> R": ("b@tp d", "b d"),
    "P -> R": ("b d | sum@tp", "b d"),
    "P -> S": ("b d | sum@tp", "b@tp d"),
    "R -> S": ("b d", "b@tp d"),
    "S -> S'": ("b@tp d", "b d@tp"),
    "two axes, SS -> S'S'": ("b@(dp cp) d", "b d@(dp cp)"),
    "two axes, PP -> RR": ("b d | sum@(dp cp)", "b d"),
}
ON_THE_PAGE = {("S -> R", "data"), ("S -> S'", "data"), ("two axes, SS -> S'S'", "data"), ("S -> R", "backward")}
BARS = {"S -> S'": 8.0, "two axes, SS -> S'S'": 10.0, "two axes, PP -> RR": 10.0}


def moved(name: str, how: str) -> Times:
    """Both on one tensor, without gradients ("data"), forward alone with them, or back as well."""
    source, target = SPECS[name]
    with axes.simulate(4):
        mesh = axes.init_mesh("dp=2 cp=2" if "two" in name else "tp=4", device_type="cpu")
        wanted = mesh.sharding(target)
        local = torch.randn(mesh.sharding(source).local_shape((8, 16)))
        x = axes.from_local(local, source, mesh=mesh, shape=(8, 16))
        if how == "data":
            with torch.no_grad():
                return compare(lambda: axes.reshard(x, wanted), by_torch(x, wanted))
        # A tensor in the middle of a computation: a leaf's gradient would be resolved as well.
        x = (x.detach().requires_grad_() * 1).detach().requires_grad_()
        middle = x.view_as(x)
        if how == "forward":
            return compare(lambda: axes.reshard(middle, wanted), by_torch(middle, wanted))
        cotangent = axes.reshard(x.detach(), wanted)

        def both_ways(move: Callable[[], DTensor]) -> Callable[[], object]:
            return lambda: torch.autograd.grad(move(), middle, cotangent)

        theirs = by_torch(middle, wanted)
        return compare(both_ways(lambda: axes.reshard(middle, wanted)), both_ways(theirs))


def by_torch(x: DTensor, wanted: axes.Sharding) -> Callable[[], DTensor]:
    placements = wanted.placements
    return lambda: x.redistribute(placements=placements)


def register(name: str, how: str, bar: float) -> None:
    label = {"data": "", "forward": ", forward with gradients", "backward": ", forward and backward"}[how]

    page = (name, how) in ON_THE_PAGE

    @benchmark(f"overhead of `axes.reshard`, {name}{label}", peer="`DTensor.redistribute`", bar=bar, page=page)
    def measure() -> Times:
        return moved(name, how)


for name in SPECS:
    register(name, "data", BARS.get(name, 5.0))
for name in SPECS:
    for how in ("forward", "backward"):
        register(name, how, 5.0 if "two" in name else 3.0)


def contracted(equation: str, text: str, specs: tuple[str, str], grad: bool = False, scatter: str = "") -> Times:
    with axes.simulate(4):
        mesh = axes.init_mesh("tp=4", device_type="cpu")
        x, w = (axes.shard(torch.randn(16, 16), spec, mesh=mesh) for spec in specs)
        if scatter:
            placements = mesh.sharding(scatter).placements
            return compare(
                lambda: axes.einsum(x, w, text),
                lambda: torch.einsum(equation, x, w).redistribute(placements=placements),
            )
        if not grad:
            return compare(lambda: axes.einsum(x, w, text), lambda: torch.einsum(equation, x, w))
        x.requires_grad_()
        w.requires_grad_()
        a, b = x.view_as(x), w.view_as(w)
        cotangent = axes.einsum(x.detach(), w.detach(), text)
        return compare(
            lambda: torch.autograd.grad(axes.einsum(a, b, text), (a, b), cotangent),
            lambda: torch.autograd.grad(torch.einsum(equation, a, b), (a, b), cotangent),
        )


@benchmark("overhead of `axes.einsum`, no communication", peer="`torch.einsum` on the same DTensors", bar=5, page=True)
def column() -> Times:
    return contracted("bd,df->bf", "b d, d f@tp -> b f@tp", ("b d", "d f@tp"))


@benchmark("overhead of `axes.einsum`, reduce-scatter", peer="`torch.einsum` and `redistribute`", bar=5)
def row() -> Times:
    return contracted("bf,fd->bd", "b f@tp, f@tp d -> b@tp d", ("b f@tp", "f@tp d"), scatter="b@tp d")


@benchmark("overhead of `axes.einsum`, forward and backward", peer="`torch.einsum` on the same DTensors", bar=5)
def both() -> Times:
    return contracted("bd,df->bf", "b d, d f@tp -> b f@tp", ("b d", "d f@tp"), grad=True)


@benchmark("`axes.rearrange` of a shard, no communication", peer="`einops.rearrange`", bar=1, page=True)
def local() -> Times:
    x = torch.randn(8, 16)
    with axes.simulate(4), axes.init_mesh("tp=4", device_type="cpu"):
        return compare(
            lambda: axes.rearrange(x, "b (h@tp d) -> b h@tp d", h=16),
            lambda: einops.rearrange(x, "b (h d) -> b h d", h=4),
        )
