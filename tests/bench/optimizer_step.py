"""The optimizer's part of a training step: `local_optimizer` on the DTensors of the Llama of the examples, which FSDP2
stores over dp and cp, against the same optimizer on plain tensors of the same sizes. In a simulated world.
"""

from __future__ import annotations

import sys

import torch
from torch.distributed.fsdp import fully_shard

import axes
from tests.bench.measure import ROOT, Times, benchmark, compare

sys.path.insert(0, str(ROOT / "examples"))

from llama import SPECS, Llama, Size


def register(width: int, bar: float) -> None:
    @benchmark(
        f"`local_optimizer` step of the parameters of llama.py, width {width}",
        peer="`AdamW(foreach=True)` on plain tensors",
        bar=bar,
    )
    def measure() -> Times:
        torch.set_num_threads(1)
        with axes.simulate(8):
            mesh = axes.init_mesh("dp=2 cp=2 tp=2", "fsdp = dp cp", device_type="cpu")
            model = Llama(Size(d=width, f=2 * width, k=width // Size.h, layers=4))
            model.init_weights()
            axes.shard_module(model, SPECS, mesh["tp"])
            fully_shard(model, mesh=mesh["fsdp"].device_mesh)
            ours = axes.nn.local_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3, foreach=True)
            plain = [torch.nn.Parameter(p.to_local().detach().clone()) for p in model.parameters()]
            peer = torch.optim.AdamW(plain, lr=1e-3, foreach=True)
            for parameter, other in zip(model.parameters(), plain, strict=True):
                parameter.grad = torch.ones_like(parameter)
                other.grad = parameter.grad.to_local().clone()
            return compare(ours.step, peer.step, loops=20, repeats=31)


for width in (256, 64):
    register(width, bar=1 / 1.1)
