"""The border of a region, both ways: one that does almost nothing, against the same with torch's own functions.

By hand each tensor enters by `to_local`, which is told what the local gradients are, and leaves by
`from_local`: as people write what `axes.shard_map` does.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

import axes
from tests.bench.measure import Times, benchmark, compare

SPECS = ("b{}@tp d{}", "b{} d{}@tp")


def crossed(count: int) -> Times:
    with axes.simulate(4):
        mesh = axes.init_mesh("tp=4", device_type="cpu")
        specs = [SPECS[i % len(SPECS)].format(i, i) for i in range(count)]
        leaves = [axes.shard(torch.randn(8, 16), spec, mesh=mesh).requires_grad_() for spec in specs]
        xs = [leaf * 1 for leaf in leaves]  # in the middle of a computation, where no leaf's hook is run
        xs = [x.detach().requires_grad_().view_as(x) for x in xs]
        cotangents = [x.detach() for x in xs]
        region = axes.shard_map(
            lambda *shards: tuple([x * 2 for x in shards]), f"{', '.join(specs)} -> {', '.join(specs)}"
        )

        def by_hand() -> list[DTensor]:
            found = []
            for x in xs:
                y = x.to_local(grad_placements=x.placements) * 2
                found.append(
                    DTensor.from_local(
                        y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
                    )
                )
            return found

        return compare(
            lambda: torch.autograd.grad(region(*xs), xs, cotangents),
            lambda: torch.autograd.grad(by_hand(), xs, cotangents),
            loops=100,
        )


def register(count: int) -> None:
    many = "tensor" if count == 1 else "tensors"

    @benchmark(f"border of a region of {count} {many}, forward and backward", peer="`to_local` and `from_local`", bar=1)
    def measure() -> Times:
        return crossed(count)


for count in (1, 4, 16):
    register(count)
