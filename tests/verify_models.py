"""A small model parallelized by hand, in Megatron's way, for `axes.verify` to find bugs in.

`program(tokens, labels, mesh)` runs it on whatever axes the mesh has of dp, cp and tp. `bug` puts one mistake in.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB, EMBED, MLP = 16, 8, 16


class Collective(torch.autograd.Function):
    """A collective forward and another one backward, each on a plain tensor."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, g):
        return ctx.back(g), None, None


class Axis:
    """The collectives over one axis of the mesh; nothing where the mesh doesn't have it, or it has size 1."""

    def __init__(self, mesh, name):
        self.size = mesh.shape.get(name, 1)
        self.index = mesh.coordinate[name] if self.size > 1 else 0
        self.group = mesh.axis(name).group if self.size > 1 else None

    def all_reduce(self, x):
        if self.size == 1:
            return x
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x

    def part(self, x, dim):
        return x.chunk(self.size, dim)[self.index].contiguous()

    def all_gather(self, x, dim):
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def f(self, x):
        """Identity; the gradient is summed."""
        return Collective.apply(x, lambda x: x.view_as(x), self.all_reduce)

    def g(self, x):
        """The sum; the gradient is whole on every rank."""
        return Collective.apply(x, self.all_reduce, lambda g: g)

    def gathered(self, x, dim):
        """All parts; the gradient is summed and split."""
        return Collective.apply(x, lambda x: self.all_gather(x, dim), lambda g: self.part(self.all_reduce(g), dim))

    def scattered(self, x, dim):
        """The sum, split; the gradient is gathered."""
        return Collective.apply(x, lambda x: self.part(self.all_reduce(x), dim), lambda g: self.all_gather(g, dim))


class Context:
    def __init__(self, mesh, bug=None, sequence=False):
        self.dp, self.cp, self.tp = (Axis(mesh, name) for name in ("dp", "cp", "tp"))
        self.bug, self.sequence = bug, sequence and self.tp.size > 1

    def enter(self, x):
        """Before a column-parallel layer."""
        return self.tp.gathered(x, 1) if self.sequence else self.tp.f(x)

    def leave(self, x):
        """After a row-parallel layer."""
        return self.tp.scattered(x, 1) if self.sequence else self.tp.g(x)


def split(parameter, axis, dim):
    return nn.Parameter(axis.part(parameter.detach(), dim).clone())


class Mlp(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.context = context
        self.up, self.down = nn.Linear(EMBED, MLP), nn.Linear(MLP, EMBED, bias=False)
        self.bias = nn.Parameter(torch.randn(EMBED) / 5)
        self.up.weight, self.up.bias = split(self.up.weight, context.tp, 0), split(self.up.bias, context.tp, 0)
        self.down.weight = split(self.down.weight, context.tp, 1)

    def forward(self, x):
        context = self.context
        h = F.gelu(self.up(context.enter(x)))
        if context.bug == "bias":
            return context.leave(self.down(h) + self.bias)
        y = self.down(h)
        if context.bug == "missing all-reduce":
            return y + self.bias
        if context.bug == "doubled all-reduce":
            y = context.tp.g(y)
        return context.leave(y) + self.bias


class Block(nn.Module):
    def __init__(self, context, dropout):
        super().__init__()
        self.norm1, self.mlp = nn.LayerNorm(EMBED), Mlp(context)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.mlp(self.norm1(x)))


class Model(nn.Module):
    def __init__(self, context, dropout=0.0, tied=True):
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCAB, EMBED)
        self.blocks = nn.ModuleList([Block(context, dropout) for _ in range(2)])
        self.norm = nn.LayerNorm(EMBED)
        self.head = nn.Linear(EMBED, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if context.bug == "tie" and context.tp.size > 1:  # what replaces each parameter by another does that
            self.head.weight = nn.Parameter(self.embedding.weight.detach().clone())

    def forward(self, tokens):
        context = self.context
        x = self.embedding(tokens)
        if context.sequence:
            x = Collective.apply(x, lambda x: context.tp.part(x, 1), lambda g: context.tp.all_gather(g, 1))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if context.sequence:
            x = Collective.apply(x, lambda x: context.tp.all_gather(x, 1), lambda g: context.tp.part(g, 1))
        return self.head(x)


def summed_over_tp(name):
    """What every rank of tp has, and uses for its part of the sequence alone."""
    return "norm" in name or name.endswith("mlp.bias")


def synchronized(model, context):
    """Sum gradients over the axes whose ranks have parts of the batch and the sequence."""
    for name, p in model.named_parameters():
        grad = context.cp.all_reduce(context.dp.all_reduce(p.grad))
        if context.sequence and summed_over_tp(name) and not (context.bug == "norm" and "norm1" in name):
            grad = context.tp.all_reduce(grad)
        if context.bug == "twice" and name == "blocks.0.mlp.up.weight":
            grad = context.cp.all_reduce(grad)
        p.grad = grad


def program(tokens, labels, mesh, bug=None, sequence=False, dropout=0.0, tied=True, local_loss=False, trained=True):
    context = Context(mesh, bug, sequence)
    model = Model(context, dropout, tied)
    if bug == "dropout":
        torch.manual_seed(7 + context.tp.index)
    tokens, labels = (context.cp.part(context.dp.part(x, 0), 1) for x in (tokens, labels))
    if not trained:
        return model(tokens), model
    logits = model(tokens).flatten(0, 1)
    total = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    counted = torch.tensor(labels.numel()) if bug == "padding" else (labels >= 0).sum()
    if bug != "loss":
        counted = context.cp.all_reduce(counted)
    loss = total / context.dp.all_reduce(counted)
    loss.backward()
    synchronized(model, context)
    return (loss if local_loss else context.cp.all_reduce(context.dp.all_reduce(loss.detach()))), model


def tokens_and_labels(rows=4, length=8, ignored=0):
    places = torch.arange(rows * length).view(rows, length)
    tokens = (places * 7 + places // length * 5) % VOCAB  # no two rows are alike
    labels = (tokens * 5 + 3) % VOCAB
    labels.view(-1)[:ignored] = -100
    return tokens, labels
