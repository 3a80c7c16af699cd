"""What a reshard costs before anything is sent, against `DTensor.redistribute`.

A fake process group moves nothing, so what is left is Python, on 8x16 tensors: without gradient,
forward with gradient, forward and backward. Two axes are a 4x2 mesh.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import axes
from tests.bench.measure import Times, benchmark, compare

REPLICATE, PENDING = Replicate(), Partial()

CASES = {
    # mesh, from, to, the same in text, promised without gradient
    "S->R": ("a=8", [Shard(0)], [REPLICATE], "m@() n", 5),
    "P->R": ("a=8", [PENDING], [REPLICATE], "m n |", 5),
    "P->S": ("a=8", [PENDING], [Shard(0)], "m@a n", 5),
    "R->S": ("a=8", [REPLICATE], [Shard(0)], "m@a n", 5),
    "S->S'": ("a=8", [Shard(0)], [Shard(1)], "m n@a", 8),
    "S0 S0->S1 S1": ("a=4 b=2", [Shard(0), Shard(0)], [Shard(1), Shard(1)], "m n@(a b)", 10),
    "P P->R R": ("a=4 b=2", [PENDING, PENDING], [REPLICATE, REPLICATE], "m n |", 10),
    "S0 S0->R S0": ("a=4 b=2", [Shard(0), Shard(0)], [REPLICATE, Shard(0)], "m@b n", 10),
}


def dtensor(mesh: axes.Mesh, placements: list[Placement]) -> DTensor:
    return DTensor.from_local(torch.randn(8, 16), mesh.device_mesh, placements, run_check=False)


def measured(name: str, how: str) -> Times:
    """`how`: "values", "forward" or "both"."""
    declaration, source, target, spec, _ = CASES[name]
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns of what it does
    with axes.simulate(8):
        mesh = axes.init_mesh(declaration, device_type="cpu")
        x = dtensor(mesh, source).requires_grad_(how != "values")
        ours: Callable[[], DTensor] = lambda: axes.reshard(x, spec)  # noqa: E731
        peer: Callable[[], DTensor] = lambda: x.redistribute(placements=target)  # noqa: E731
        assert ours().placements == tuple(target)
        if how != "both":
            return compare(ours, peer, loops=100, repeats=41)
        arrived = [REPLICATE if placement.is_partial() else placement for placement in target]
        local = torch.randn(*ours().to_local().shape)
        g = DTensor.from_local(local, mesh.device_mesh, arrived, run_check=False)
        return compare(
            lambda: torch.autograd.grad(ours(), x, g), lambda: torch.autograd.grad(peer(), x, g), loops=50, repeats=41
        )


def _register(name: str, how: str, text: str, bar: float) -> None:
    @benchmark(f"overhead of {name}, {text}", peer="`DTensor.redistribute`", bar=bar)
    def run() -> Times:
        return measured(name, how)


for name, (declaration, *_, bar) in CASES.items():
    two = " " in declaration
    _register(name, "values", "no gradient", bar)
    _register(name, "forward", "forward with gradient", 5 if two else 3)
    _register(name, "both", "forward and backward", 5 if two else 3)
