"""The Llama of the examples as one writes it with what else there is: torch's own plans, and `spmd_types`.

`by_parallelize_module` is torch's tensor parallelism (`parallelize_module`, `loss_parallel`) and `fully_shard`, as torchtitan
put them together. It has no context parallelism that gathers keys, so it is compared where cp is 1.

`by_spmd_types` is the block by hand with the collectives of `spmd_types`, sequences second and types erased, which is
torchtitan's default. `pip install --no-deps spmd-types==0.3.1` adds it; nothing else needs it.

Both train the same weights on the same samples as llama.py, and their losses are those of llama.py.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import axes
from tests.bench import llama_by_hand as hand
from tests.bench.measure import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from llama import Llama, Size, rotated

Step = Callable[[], float]


# --- torch: plans of modules


class Attention(nn.Module):
    def __init__(self, n: Size):
        super().__init__()
        self.wq, self.wo = nn.Linear(n.d, n.h * n.k, bias=False), nn.Linear(n.h * n.k, n.d, bias=False)
        self.wk, self.wv, self.k = nn.Linear(n.d, n.g * n.k, bias=False), nn.Linear(n.d, n.g * n.k, bias=False), n.k

    def forward(self, x: Tensor) -> Tensor:
        here = torch.arange(x.shape[1], device=x.device)
        q, k, v = (each(x).unflatten(-1, (-1, self.k)).transpose(1, 2) for each in (self.wq, self.wk, self.wv))
        seen = here[:, None] >= here
        q, k = rotated(q, here), rotated(k, here)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, n: Size):
        super().__init__()
        self.gate, self.up = nn.Linear(n.d, n.f, bias=False), nn.Linear(n.d, n.f, bias=False)
        self.down = nn.Linear(n.f, n.d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, n: Size):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.RMSNorm(n.d), Attention(n), nn.RMSNorm(n.d), MLP(n)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LlamaOfLayers(nn.Module):
    """The model of one device, out of torch's layers."""

    def __init__(self, n: Size):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(n.v, n.d), nn.RMSNorm(n.d)
        self.blocks = nn.ModuleDict({str(number): Block(n) for number in range(n.layers)})
        self.head = nn.Linear(n.d, n.v, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x))


def gathering() -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))


def plan_of_block() -> dict[str, Any]:
    return {
        "norm1": SequenceParallel(),
        "attention": gathering(),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "mlp": gathering(),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }


PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


def by_parallelize_module(whole: Llama, n: Size, mesh: axes.Mesh, tokens: Tensor, labels: Tensor, lr: float) -> Step:
    """A step of the model by `parallelize_module` and `fully_shard`, where cp is 1."""
    model, tp, dp = LlamaOfLayers(n), mesh["tp"].device_mesh, mesh["dp"].device_mesh
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1
            parameter.copy_(whole.get_parameter(name if is_norm else name.removesuffix(".weight")))
    for block in model.blocks.values():
        parallelize_module(block, tp, plan_of_block())
    parallelize_module(model, tp, PLAN)
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=dp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=True)

    def step() -> float:
        with loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().to_local().clone()
        dist.all_reduce(mean, group=dp.get_group())
        return mean.item() / dp.size()

    return step


# --- spmd_types: collectives with types


def spmd() -> Any:
    return importlib.import_module("spmd_types")


def gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return spmd().redistribute(x, group, src=spmd().S(dim), dst=spmd().R)


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return spmd().redistribute(x, group, src=spmd().P, dst=spmd().S(1))


class TypedNorm(hand.Norm):
    def forward(self, x: Tensor) -> Tensor:
        scale = spmd().convert(self.weight, self.groups.tp, src=spmd().I, dst=spmd().R)
        return F.rms_norm(x, scale.shape, scale)


class TypedAttention(hand.Attention):
    def forward(self, x: Tensor) -> Tensor:
        x = gathered(x, 1, self.groups.tp)
        first = self.groups.cp.rank() * x.shape[1]
        here = torch.arange(first, first + x.shape[1], device=x.device)
        q, k, v = (F.linear(x, w).unflatten(-1, (-1, self.k)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = (rotated(each, here) for each in (q, k))
        k, v = (gathered(each, 2, self.groups.cp) for each in (k, v))
        seen = here[:, None] >= torch.arange(k.shape[2], device=x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return scattered(F.linear(y.transpose(1, 2).flatten(2), self.wo), self.groups.tp)


class TypedMLP(hand.MLP):
    def forward(self, x: Tensor) -> Tensor:
        x = gathered(x, 1, self.groups.tp)
        return scattered(F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down), self.groups.tp)


class TypedBlock(hand.Block):
    def __init__(self, n: Size, groups: hand.Groups):
        super().__init__(n, groups)
        self.norm1, self.attention = TypedNorm(n, groups), TypedAttention(n, groups)
        self.norm2, self.mlp = TypedNorm(n, groups), TypedMLP(n, groups)


class TypedLlama(hand.LlamaByHand):
    """From this rank's tokens and labels to the mean loss of all."""

    def __init__(self, n: Size, groups: hand.Groups):
        super().__init__(n, groups)
        self.blocks = nn.ModuleDict({str(number): TypedBlock(n, groups) for number in range(n.layers)})
        self.norm = TypedNorm(n, groups)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        tp, rows = self.groups.tp, self.embedding.shape[0]
        mine = tokens - tp.rank() * rows
        here = (mine >= 0) & (mine < rows)
        x = scattered(F.embedding(mine * here, self.embedding) * here[..., None], tp)
        for block in self.blocks.values():
            x = block(x)
        logits = F.linear(gathered(self.norm(x), 1, tp), self.head)
        return hand.VocabularyLoss.apply(logits, labels, self.groups)


def by_spmd_types(whole: Llama, n: Size, mesh: axes.Mesh, tokens: Tensor, labels: Tensor, lr: float) -> Step:
    """A step of the model with the collectives of `spmd_types`, and FSDP2."""
    return hand.by_hand(whole, n, mesh, tokens, labels, lr, kind=TypedLlama)
