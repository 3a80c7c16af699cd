"""The time of moving tensors on four processes, against the collective called by hand.

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
Made = Callable[[axes.Mesh, int], tuple[Call, Call]]


def exchange(mesh: axes.Mesh, side: int) -> tuple[Call, Call]:
    x = axes.randn("b@tp d", mesh=mesh, b=side, d=side)
    wanted, local = mesh.sharding("b d@tp"), x.to_local()
    rows, columns = side // RANKS, side // RANKS

    def by_hand() -> torch.Tensor:
        sent = local.view(rows, RANKS, columns).transpose(0, 1).contiguous()
        out = torch.empty_like(sent)
        dist.all_to_all_single(out, sent)
        return out.view(side, columns)

    return lambda: axes.reshard(x, wanted), by_hand


def gather(mesh: axes.Mesh, side: int) -> tuple[Call, Call]:
    x = axes.randn("b@tp d", mesh=mesh, b=side, d=side)
    wanted, local = mesh.sharding("b d"), x.to_local()

    def by_hand() -> torch.Tensor:
        out = local.new_empty(side, side)
        dist.all_gather_into_tensor(out, local)
        return out

    return lambda: axes.reshard(x, wanted), by_hand


def scatter(mesh: axes.Mesh, side: int) -> tuple[Call, Call]:
    local = torch.randn(side, side)
    x = axes.from_local(local, "b d | sum@tp", mesh=mesh)
    wanted = mesh.sharding("b@tp d")

    def by_hand() -> torch.Tensor:
        out = local.new_empty(side // RANKS, side)
        dist.reduce_scatter_tensor(out, local)
        return out

    return lambda: axes.reshard(x, wanted), by_hand


def reduce(mesh: axes.Mesh, side: int) -> tuple[Call, Call]:
    local = torch.randn(side, side)
    x = axes.from_local(local, "b d | sum@tp", mesh=mesh)
    wanted = mesh.sharding("b d")

    def by_hand() -> torch.Tensor:
        out = local.clone()
        dist.all_reduce(out)
        return out

    return lambda: axes.reshard(x, wanted), by_hand


def two_axes(mesh: axes.Mesh, side: int) -> tuple[Call, Call]:
    square = mesh.rearrange("(rows columns) -> rows columns", rows=2)
    x = axes.randn("b@(rows columns) d", mesh=square, b=side, d=side)
    wanted = square.sharding("b d@(rows columns)")
    placements = wanted.placements
    return lambda: axes.reshard(x, wanted), lambda: x.redistribute(placements=placements)


def permute(mesh: axes.Mesh, side: int) -> tuple[Call, Call]:
    square = mesh.rearrange("(rows columns) -> rows columns", rows=2)
    x = axes.randn("b@(rows columns) d", mesh=square, b=side, d=side)
    wanted, local, partner = square.sharding("b@(columns rows) d"), x.to_local(), (0, 2, 1, 3)[mesh.rank]

    def by_hand() -> torch.Tensor:
        if partner == mesh.rank:
            return local.clone()
        out = torch.empty_like(local)
        for work in (dist.irecv(out, partner), dist.isend(local, partner)):
            work.wait()
        return out

    return lambda: axes.reshard(x, wanted), by_hand


def measured(made: Made, side: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    ours, theirs = made(axes.init_mesh("tp=4", device_type="cpu"), side)
    loops = max(1, 256 // side) ** 2
    with torch.no_grad():
        found = [(seconds(ours, loops), seconds(theirs, loops)) for _ in range(ROUNDS + 5)]
    medians = [statistics.median(column) for column in zip(*found[5:], strict=True)]
    return medians[0], medians[1]


def seconds(call: Call, loops: int) -> float:
    """Of one call. Small ones follow each other without a barrier, which would take longer than they do."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(loops):
        call()
    dist.barrier()
    return (time.perf_counter() - started) / loops


def register(what: str, peer: str, bar: float, made: Made, side: int = SIDE, page: bool = False) -> None:
    @benchmark(what, peer=peer, bar=bar, page=page)
    def measure() -> Times:
        return Times(*axes.launch(measured, RANKS, made, side)[0])


EACH = "four processes, 4 MiB per rank"
register(f"reshard S -> S', {EACH}", "`all_to_all_single`", 1 / 1.15, exchange)
register(f"reshard S -> R, {EACH}", "`all_gather_into_tensor`", 1 / 1.15, gather, page=True)
register(f"reshard P -> S, {EACH}", "`reduce_scatter_tensor`", 1 / 1.15, scatter)
register(f"reshard P -> R, {EACH}", "`all_reduce`", 1 / 1.15, reduce, SIDE // 2)
register(f"reshard of two axes, SS -> S'S', {EACH}", "`DTensor.redistribute`", 3, two_axes, page=True)

BY_HAND = {
    "all-gather": (gather, "`all_gather_into_tensor`"),
    "reduce-scatter": (scatter, "`reduce_scatter_tensor`"),
    "all-reduce": (reduce, "`all_reduce`"),
    "all-to-all": (exchange, "`all_to_all_single`, and the packing"),
    "permutation": (permute, "`isend` and `irecv`"),
}
for size, side in (("4 KiB", 32), ("256 KiB", 256), ("4 MiB", 1024), ("64 MiB", 4096)):
    for kind, (made, peer) in BY_HAND.items():
        register(f"{kind} by `axes.reshard`, four processes, a tensor of {size}", peer, 1 / 1.1, made, side)
