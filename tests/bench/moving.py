"""The time of moving 4 MiB per rank on four processes, against the collective called by hand.

All versions take turns in the same processes, step by step; the hand-written ones copy where theirs
need it, too. gloo has no fast reduce-scatter: by hand it is torch's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import axes
from tests.bench.measure import Times, benchmark

ROUNDS = 40
RANKS = 4
SIDE = 2048
"""Rows and columns of a float32 tensor of 16 MiB: 4 MiB for each of four ranks."""

Call = Callable[[], object]


def exchange(mesh: axes.Mesh) -> tuple[Call, Call]:
    x = axes.randn("b@tp d", mesh=mesh, b=SIDE, d=SIDE)
    wanted, local = mesh.sharding("b d@tp"), x.to_local()
    rows, columns = SIDE // RANKS, SIDE // RANKS

    def by_hand() -> torch.Tensor:
        sent = local.view(rows, RANKS, columns).transpose(0, 1).contiguous()
        out = torch.empty_like(sent)
        dist.all_to_all_single(out, sent)
        return out.view(SIDE, columns)

    return lambda: axes.reshard(x, wanted), by_hand


def gather(mesh: axes.Mesh) -> tuple[Call, Call]:
    x = axes.randn("b@tp d", mesh=mesh, b=SIDE, d=SIDE)
    wanted, local = mesh.sharding("b d"), x.to_local()

    def by_hand() -> torch.Tensor:
        out = local.new_empty(SIDE, SIDE)
        dist.all_gather_into_tensor(out, local)
        return out

    return lambda: axes.reshard(x, wanted), by_hand


def scatter(mesh: axes.Mesh) -> tuple[Call, Call]:
    local = torch.randn(SIDE, SIDE)
    x = axes.from_local(local, "b d | sum@tp", mesh=mesh)
    wanted = mesh.sharding("b@tp d")

    def by_hand() -> torch.Tensor:
        out = local.new_empty(SIDE // RANKS, SIDE)
        dist.reduce_scatter_tensor(out, local)
        return out

    return lambda: axes.reshard(x, wanted), by_hand


def reduce(mesh: axes.Mesh) -> tuple[Call, Call]:
    local = torch.randn(SIDE // 2, SIDE // 2)
    x = axes.from_local(local, "b d | sum@tp", mesh=mesh)
    wanted = mesh.sharding("b d")

    def by_hand() -> torch.Tensor:
        out = local.clone()
        dist.all_reduce(out)
        return out

    return lambda: axes.reshard(x, wanted), by_hand


def two_axes(mesh: axes.Mesh) -> tuple[Call, Call]:
    square = mesh.rearrange("(rows columns) -> rows columns", rows=2)
    x = axes.randn("b@(rows columns) d", mesh=square, b=SIDE, d=SIDE)
    wanted = square.sharding("b d@(rows columns)")
    placements = wanted.placements
    return lambda: axes.reshard(x, wanted), lambda: x.redistribute(placements=placements)


def measured(made: Callable[[axes.Mesh], tuple[Call, Call]]) -> tuple[float, float]:
    torch.set_num_threads(1)
    ours, theirs = made(axes.init_mesh("tp=4", device_type="cpu"))
    with torch.no_grad():
        found = [(seconds(ours), seconds(theirs)) for _ in range(ROUNDS + 5)]
    medians = [statistics.median(column) for column in zip(*found[5:], strict=True)]
    return medians[0], medians[1]


def seconds(call: Call) -> float:
    dist.barrier()
    started = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - started


def register(
    what: str, peer: str, bar: float, made: Callable[[axes.Mesh], tuple[Call, Call]], page: bool = False
) -> None:
    @benchmark(f"{what}, four processes, 4 MiB per rank", peer=peer, bar=bar, page=page)
    def measure() -> Times:
        return Times(*axes.launch(measured, RANKS, made)[0])


register("reshard S -> S'", "`all_to_all_single`", 1 / 1.15, exchange)
register("reshard S -> R", "`all_gather_into_tensor`", 1 / 1.15, gather, page=True)
register("reshard P -> S", "`reduce_scatter_tensor`", 1 / 1.15, scatter)
register("reshard P -> R", "`all_reduce`", 1 / 1.15, reduce)
register("reshard of two axes, SS -> S'S'", "`DTensor.redistribute`", 3, two_axes, page=True)
