"""The local view beside `spmd_types`, where that is installed: plain shards on a fake world, one axis of four ranks.

`pip install --no-deps spmd-types==0.3.1` adds these rows; nothing else needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

import axes
from tests.bench.measure import Times, benchmark, compare, is_installed

MOVES = {
    "S -> R": ("b@tp d", "b d", "S0", "R"),
    "P -> R": ("b d | sum@tp", "b d", "P", "R"),
    "P -> S": ("b d | sum@tp", "b@tp d", "P", "S0"),
    "S -> S'": ("b@tp d", "b d@tp", "S0", "S1"),
}


def register(name: str, backward: bool) -> None:
    source, target, *kinds = MOVES[name]
    label = ", forward and backward" if backward else ""

    @benchmark(f"local `axes.reshard`, {name}{label}", peer="`spmd_types.redistribute`", bar=3 if backward else 5)
    def measure() -> Times:
        peer = importlib.import_module("spmd_types")
        types = {"R": peer.R, "P": peer.P, "S0": peer.S(0), "S1": peer.S(1)}
        src, dst = (types[kind] for kind in kinds)
        with axes.simulate(4):
            mesh = axes.init_mesh("tp=4", device_type="cpu")
            group = mesh.axis("tp").group
            x = torch.randn(mesh.sharding(source).local_shape((8, 16)), requires_grad=backward)

            def ours() -> torch.Tensor:
                return axes.reshard(x, f"{source} -> {target}", mesh=mesh)

            def theirs() -> torch.Tensor:
                return peer.redistribute(x, group, src=src, dst=dst)

            if not backward:
                return compare(ours, theirs)
            cotangent = ours().detach()

            def both_ways(move: Callable[[], torch.Tensor]) -> Callable[[], object]:
                return lambda: torch.autograd.grad(move(), x, cotangent)

            return compare(both_ways(ours), both_ways(theirs))


if is_installed("spmd_types", "0.3.1", "local `axes.reshard` beside spmd_types"):
    for move in MOVES:
        for both in (False, True):
            register(move, both)
