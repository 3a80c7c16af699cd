"""Mesh expressions against einops, which caches its recipes by pattern as we do."""

from __future__ import annotations

import itertools

import einops
import torch

import axes
from tests.bench.measure import Times, benchmark, compare

TENSOR = torch.zeros(4, 2, 8)
PATTERN = "dp cp tp -> (dp cp) tp"


@benchmark("`mesh.rearrange`, cached", peer="cached `einops.rearrange`, 4x2x8 tensor", bar=1)
def cached() -> Times:
    mesh = axes.Mesh("dp=4 cp=2 tp=8")
    return compare(
        lambda: mesh.rearrange("dp cp tp -> fsdp=(dp cp) tp"),
        lambda: einops.rearrange(TENSOR, PATTERN),
    )


@benchmark("`mesh.rearrange`, new expression", peer="cached `einops.rearrange`, 4x2x8 tensor", bar=1 / 200, page=True)
def compiled() -> Times:
    mesh = axes.Mesh("dp=4 cp=2 tp=8")
    fresh = itertools.count()
    return compare(
        lambda: mesh.rearrange(f"dp cp tp -> new{next(fresh)}=(dp cp) tp"),
        lambda: einops.rearrange(TENSOR, PATTERN),
        loops=40,
    )
