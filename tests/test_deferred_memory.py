"""The memory that a rank takes while a deferred module is sharded, in bytes that torch's allocator counts."""

from __future__ import annotations

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import axes


class Mixed(nn.Module):
    """An embedding, layers, a norm, and experts one of which is larger than what is drawn at once."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8192, 256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.norm = nn.LayerNorm(256)
        self.experts = nn.Parameter(torch.empty(2, 512, 1024))

    def reset_parameters(self):
        nn.init.trunc_normal_(self.experts, std=0.02)


SPECS = {
    "embedding.weight": "v@tp d",
    "up.weight": "f@tp d",
    "up.bias": "f@tp",
    "down.weight": "d f@tp",
    "experts": "e d@dp f@tp",
    "*": "...",
}


def bytes_taken():
    """What is left when the module is sharded, the most that there was until then, and what its shards take."""
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    with torch.device("meta"):
        model = Mixed()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        axes.shard_module(model, SPECS, mesh)
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    shards = [parameter.to_local().nbytes for parameter in model.parameters()]
    return live, most, sum(shards), max(shards)


def test_a_rank_never_has_more_than_its_shards_and_a_fifth_beside_the_largest(world):
    for live, most, shards, largest in world(bytes_taken, 4):
        assert shards <= live < 1.01 * shards
        assert most <= 1.2 * (shards + largest)
