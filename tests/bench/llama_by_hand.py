"""The peer of examples/llama.py: the same model written without axes, after Megatron-LM.

Activations have the sequence first, so that a collective joins whole rows. Where an expression of llama.py has an
`@`, this file calls an autograd function around `torch.distributed`, and each rank cuts its parameters itself.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import axes
from tests.bench.measure import ROOT, in_turns
from tests.bench.megatron_by_hand import Gather, Scatter, SumOfGradients

sys.path.insert(0, str(ROOT / "examples"))

from llama import LOSS, SPECS, Llama, Loss, Size, rotated, weight
from pipelined import summed as with_sums

WARM_UP = 5


class Groups(NamedTuple):
    """The groups of this rank; `data` is dp and cp."""

    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    data: dist.ProcessGroup


class VocabularyLoss(torch.autograd.Function):
    """The mean loss of tokens whose logits are split by vocabulary over tp, and which themselves are over dp and cp."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, groups: Groups) -> Tensor:
        size = logits.shape[-1]
        most = logits.amax(-1)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=groups.tp)
        exp = (logits - most[..., None]).exp_()
        mine = labels - groups.tp.rank() * size
        here = (mine >= 0) & (mine < size)
        mine = mine.clamp(0, size - 1)
        said = (logits.gather(-1, mine[..., None])[..., 0] - most) * here
        both = torch.stack((exp.sum(-1), said))
        dist.all_reduce(both, group=groups.tp)
        tokens = labels.numel() * groups.data.size()
        loss = (both[0].log() - both[1]).sum() / tokens
        dist.all_reduce(loss, group=groups.data)
        ctx.tokens = tokens
        ctx.save_for_backward(exp.div_(both[0][..., None]), mine, here)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        found, mine, here = ctx.saved_tensors
        found = found.clone()
        found.scatter_add_(-1, mine[..., None], -here.to(found.dtype)[..., None])
        return found.mul_(gradient / ctx.tokens), None, None


def embedded(tokens: Tensor, table: Tensor, groups: Groups) -> Tensor:
    """`s/(cp tp) b d` from the `b s/cp` tokens and this rank's part of the vocabulary."""
    mine = tokens.T - groups.tp.rank() * table.shape[0]
    here = (mine >= 0) & (mine < table.shape[0])
    return Scatter.apply(F.embedding(mine * here, table) * here[..., None], groups.tp)


class Norm(nn.Module):
    """Each rank of tp has its part of the sequence, so that gradients of the scale are summands."""

    def __init__(self, n: Size, groups: Groups):
        super().__init__()
        self.weight, self.groups = nn.Parameter(torch.empty(n.d)), groups

    def forward(self, x: Tensor) -> Tensor:
        scale = SumOfGradients.apply(self.weight, self.groups.tp)
        return F.rms_norm(x, scale.shape, scale)


class Attention(nn.Module):
    def __init__(self, n: Size, groups: Groups):
        super().__init__()
        tp = groups.tp.size()
        self.wq = weight(n.h * n.k // tp, n.d)
        self.wk, self.wv = weight(n.g * n.k // tp, n.d), weight(n.g * n.k // tp, n.d)
        self.wo, self.k, self.groups = weight(n.d, n.h * n.k // tp), n.k, groups

    def forward(self, x: Tensor) -> Tensor:
        x = Gather.apply(x, self.groups.tp)
        first = self.groups.cp.rank() * x.shape[0]
        here = torch.arange(first, first + x.shape[0], device=x.device)
        q, k, v = (F.linear(x, w).unflatten(-1, (-1, self.k)) for w in (self.wq, self.wk, self.wv))
        q, k = (rotated(each.permute(1, 2, 0, 3), here) for each in (q, k))
        k = Gather.apply(k.permute(2, 0, 1, 3), self.groups.cp).permute(1, 2, 0, 3)
        v = Gather.apply(v, self.groups.cp).permute(1, 2, 0, 3)
        seen = here[:, None] >= torch.arange(k.shape[2], device=x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return Scatter.apply(F.linear(y.permute(2, 0, 1, 3).flatten(2), self.wo), self.groups.tp)


class MLP(nn.Module):
    def __init__(self, n: Size, groups: Groups):
        super().__init__()
        inner = n.f // groups.tp.size()
        self.gate, self.up, self.down = weight(inner, n.d), weight(inner, n.d), weight(n.d, inner)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        x = Gather.apply(x, self.groups.tp)
        return Scatter.apply(F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down), self.groups.tp)


class Block(nn.Module):
    def __init__(self, n: Size, groups: Groups):
        super().__init__()
        self.norm1, self.attention = Norm(n, groups), Attention(n, groups)
        self.norm2, self.mlp = Norm(n, groups), MLP(n, groups)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LlamaByHand(nn.Module):
    """From this rank's tokens and labels to the mean loss of all."""

    def __init__(self, n: Size, groups: Groups):
        super().__init__()
        self.embedding, self.head = weight(n.v // groups.tp.size(), n.d), weight(n.v // groups.tp.size(), n.d)
        self.blocks = nn.ModuleDict({str(number): Block(n, groups) for number in range(n.layers)})
        self.norm, self.groups = Norm(n, groups), groups

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = embedded(tokens, self.embedding, self.groups)
        for block in self.blocks.values():
            x = block(x)
        logits = F.linear(Gather.apply(self.norm(x), self.groups.tp), self.head)
        return VocabularyLoss.apply(logits, labels.T, self.groups)


# ------------------------------------------------------------------------------------ both in turns


def cut(name: str, whole: Tensor, tp: dist.ProcessGroup) -> Tensor:
    """This rank's part of a parameter."""
    if whole.ndim == 1:
        return whole
    return whole.chunk(tp.size(), 1 if name.endswith(("wo", "down")) else 0)[tp.rank()]


def by_hand(
    whole: Llama, n: Size, mesh: axes.Mesh, tokens: Tensor, labels: Tensor, lr: float, kind: type = LlamaByHand
) -> Callable[[], float]:
    groups = Groups(mesh.axis("tp").group, mesh.axis("cp").group, mesh.axis("fsdp").group)
    model = kind(n, groups)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(cut(name, whole.get_parameter(name), groups.tp))
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=mesh["fsdp"].device_mesh)
    with_sums(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([p.to_local().detach() for p in parameters], lr=lr, foreach=True)

    def step() -> float:
        loss = model(tokens, labels)
        loss.backward()
        for local, parameter in zip(optimizer.param_groups[0]["params"], parameters, strict=True):
            local.grad = parameter.grad.to_local()
        optimizer.step()
        model.zero_grad()
        return loss.item()

    return step


def with_axes(whole: Llama, mesh: axes.Mesh, tokens: Tensor, labels: Tensor, lr: float) -> Callable[[], float]:
    model = copy.deepcopy(whole)
    axes.shard_module(model, SPECS, mesh["tp"])
    axes.shard_map(model, model.expression, mesh)
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=mesh["fsdp"].device_mesh)
    with_sums(model)
    loss_of = axes.shard_map(Loss(), LOSS, mesh)
    optimizer = axes.nn.local_optimizer(torch.optim.AdamW, model.parameters(), lr=lr, foreach=True)

    def step() -> float:
        loss = loss_of(model(tokens), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def in_both_ways(options: Options, peer: Callable[..., Callable[[], float]] = by_hand, **how: Any) -> tuple[dict, dict]:
    """Losses and seconds of the steps of both. `how` is for `in_turns`."""
    torch.set_num_threads(1)
    with axes.init_mesh(options.mesh, "fsdp = dp cp", device_type="cpu") as mesh:
        n = Size(d=options.width, f=2 * options.width, k=options.width // Size.h)
        torch.manual_seed(0)
        whole = Llama(n)
        whole.init_weights()
        window = torch.randint(n.v, (options.batch, options.sequence + 1))
        rows, columns = mesh.sharding("b@dp s@cp").local_indices((options.batch, options.sequence))
        tokens, labels = window[rows, :-1][:, columns].clone(), window[rows, 1:][:, columns].clone()
        steps = {
            "axes": with_axes(whole, mesh, tokens, labels, options.lr),
            "peer": peer(whole, n, mesh, tokens, labels, options.lr),
        }
        return in_turns(steps, options.steps, **how)


@dataclass(frozen=True)
class Options:
    """Sizes of the model and of its steps."""

    mesh: str = "dp=2 cp=2 tp=2"
    steps: int = 40
    width: int = 128
    batch: int = 8
    sequence: int = 128
    lr: float = 1e-3
