"""The optimizer's part of a training step: `local_optimizer` on the DTensors of the Llama of the examples, which FSDP2
stores over dp and cp, against the same optimizer on plain tensors of the same sizes. In a simulated world.

As in llama_by_hand.py the gradients of the plain tensors are taken from those that FSDP2 gives; or they are there already.
"""

from __future__ import annotations

import sys

import torch
from torch.distributed.fsdp import fully_shard

import axes
from axes.runtime import torch_private
from tests.bench.measure import ROOT, Times, benchmark, compare

sys.path.insert(0, str(ROOT / "examples"))

from llama import SPECS, Llama, Size


def register(width: int, taken: bool, bar: float) -> None:
    @benchmark(
        f"`local_optimizer` step of the parameters of llama.py, width {width}{'' if taken else ', gradients there'}",
        peer="`AdamW(foreach=True)` on plain tensors" + (", gradients by `to_local`" if taken else ""),
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
            parameters = list(model.parameters())
            ours = axes.nn.local_optimizer(torch.optim.AdamW, parameters, lr=1e-3, foreach=True)
            plain = [torch.nn.Parameter(p.to_local().detach().clone()) for p in parameters]
            peer = torch.optim.AdamW(plain, lr=1e-3, foreach=True)
            for parameter, other in zip(parameters, plain, strict=True):
                # As FSDP2 gives them, with the very spec of the parameter.
                parameter.grad = torch_private.dtensor(torch.ones_like(other), torch_private.spec_of(parameter))
                other.grad = parameter.grad.to_local().clone()

            def step() -> None:
                for parameter, other in zip(parameters, plain, strict=True):
                    other.grad = parameter.grad.to_local()
                peer.step()

            return compare(ours.step, step if taken else peer.step, loops=20, repeats=31)


for width in (256, 64):
    register(width, taken=True, bar=1 / 1.1)
    register(width, taken=False, bar=1 / 1.1)
