"""Models that are parallelized in other ways than by hand, right and wrong, for `axes.verify`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import axes
from tests.verify_models import tokens_and_labels

TOKENS, LABELS = tokens_and_labels()


def inputs(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 2, torch.Size(shape).numel()).mul(5).view(shape).sin()


class Feed(nn.Module):
    """A model that knows nothing of meshes."""

    def __init__(self, embed=8, mlp=12):
        super().__init__()
        self.embedding = nn.Embedding(16, embed)
        self.norm = nn.LayerNorm(embed)
        self.up, self.down = nn.Linear(embed, mlp), nn.Linear(mlp, embed)
        self.head = nn.Linear(embed, 16, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.hidden(self.norm(x)))

    def hidden(self, x):
        return self.down(F.gelu(self.up(x)))


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def part(x, mesh, *names):
    """This rank's part of a batch over these axes."""
    for name in names:
        x = x.chunk(mesh.shape[name])[mesh.coordinate[name]]
    return x


def averaged(model, mesh):
    """Gradients that are summed by hand."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad = axes.pmean(p.grad, "dp", mesh=mesh)
    return model


def fsdp(mesh, accumulate=1, evaluated=False, divided=True, dtype=None):
    """FSDP2, maybe with a forward pass after the last backward one; unless `divided` gradients are too large."""
    model = Feed()
    for each in (model.up, model.down, model):
        fully_shard(each, mesh=mesh["dp"].device_mesh, reshard_after_forward=None if evaluated else accumulate == 1)
    tokens, labels = (part(x, mesh, "dp") for x in (TOKENS, LABELS))
    run = torch.compile(model, backend="aot_eager") if dtype == "compiled" else model
    for _ in range(accumulate):
        loss = loss_of(run(tokens), labels) / accumulate
        (loss if divided else loss * mesh.shape["dp"]).backward()
    if evaluated:
        with torch.no_grad():
            return loss_of(model(tokens), labels), model
    return loss * accumulate, model


def torch_tp(mesh):
    """torch's own tensor parallelism, and FSDP2 around it."""
    model = Feed()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"].device_mesh, plan)
    fully_shard(model, mesh=mesh["dp"].device_mesh)
    loss = loss_of(model(part(TOKENS, mesh, "dp")), part(LABELS, mesh, "dp"))
    loss.backward()
    return loss, model


def data_parallel(mesh, synchronized=True, stepped=False):
    """Gradients averaged by hand, if `synchronized`; the loss left as each rank's own."""
    model = Feed()
    tokens, labels = (part(x, mesh, "dp") for x in (TOKENS, LABELS))
    loss = loss_of(model(tokens), labels)
    loss.backward()
    if synchronized:
        averaged(model, mesh)
    if stepped:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {"loss": loss, "logits": model(tokens)}, model


def stages(mesh):
    """A pipeline of two stages, each with its own parameters, that hand activations over."""
    model = Feed()
    there = torch.empty(*TOKENS.shape, 8)
    if mesh.shape["pp"] == 1:
        loss = loss_of(model(TOKENS), LABELS)
        loss.backward()
        return {"loss": loss}, model
    if mesh.coordinate["pp"] == 0:
        model.down = model.up = model.head = model.norm = None
        x = model.embedding(TOKENS)
        dist.send(x.detach(), 1)
        dist.recv(there, 1)
        x.backward(there)
        return {}, model
    model.embedding = None
    dist.recv(there, 0)
    x = there.requires_grad_()
    loss = loss_of(model.head(x + model.hidden(model.norm(x))), LABELS)
    loss.backward()
    dist.send(x.grad, 0)
    return {"loss": loss}, model


def dtensors(mesh):
    """Operations by name on DTensors of sizes that don't divide; one result is pending over tp."""
    model = nn.Module()
    model.w = nn.Parameter(axes.shard(torch.randn(11, 8), "f@tp e"))
    model.v = nn.Parameter(axes.shard(torch.randn(8, 11), "e f@tp"))
    x = axes.shard(torch.randn(5, 8), "b@dp e")
    h = axes.einsum(x, model.w, "b@dp e, f@tp e -> b@dp f@tp")
    y = axes.einsum(h, model.v, "b@dp f@tp, e f@tp -> b@dp e | sum@tp")
    whole = axes.reshard(y, "b@dp e")
    axes.unshard(whole).square().sum().backward()
    return {"pending": y, "whole": whole}, model


class Recurrent(nn.Module):
    """Layers of torch that drop inside, of a packed sequence; attention drops inside as well."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.layers, self.head = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True), nn.Linear(8, 8)

    def forward(self, x):
        x = self.attention(x, x, x, need_weights=False)[0]
        found, _ = self.layers(nn.utils.rnn.pack_padded_sequence(x, [x.shape[1]] * len(x), batch_first=True))
        return self.head(nn.utils.rnn.pad_packed_sequence(found, batch_first=True)[0])


class Noise(nn.Module):
    """Dropout by hand."""

    def forward(self, x):
        return x * (torch.rand_like(x) > 0.3) / 0.7


def dropped(mesh):
    """Dropout in no module, which each rank draws by itself."""
    torch.manual_seed(50 + mesh.coordinate["tp"])
    return F.dropout(inputs(4, 8), 0.5)


def dropping(mesh, by_hand=False):
    """A model with dropout where torch's functions don't see each other, rows of its input over dp."""
    model = nn.Sequential(nn.Linear(8, 8), Noise(), nn.Linear(8, 8)) if by_hand else Recurrent()
    loss = model(part(inputs(4, 3, 8), mesh, "dp")).square().mean()
    loss.backward()
    return axes.pmean(loss.detach(), "dp", mesh=mesh), averaged(model, mesh)


class Region(nn.Module):
    """Two products in one, and one that is summed; `down` may have something wrong."""

    def __init__(self, down=None):
        super().__init__()
        self.gates, self.down = nn.Linear(8, 24, bias=False), nn.Linear(12, 8, bias=False) if down is None else down

    def forward(self, x):
        gate, up = self.gates(x).chunk(2, -1)
        y = gate.sigmoid() * up
        if type(self.down) is nn.Linear:
            return x + axes.einsum(y, self.down.weight, "b s f@tp, e f@tp -> b s e")
        return x + self.down(y)


class Unreduced(nn.Linear):
    """A row-parallel layer that forgets its sum."""

    def forward(self, x):
        return super().forward(x) * axes.axis_size("tp")


REGION = {"gates.weight": "(two=2 f@tp) e", "down.weight": "e f@tp"}


def region(down=None):
    torch.manual_seed(5)
    return axes.shard_map(Region(down), "b@dp s e -> b@dp s e")


class KeyBias(nn.Module):
    """Attention, in which the bias of the keys has a gradient that is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return scores.softmax(-1) @ self.value(x)


def adam(mesh, dtype=torch.float64, scale=1.0):
    """Steps of Adam, which divides gradients by their size, on attention that is computed in a dtype."""
    model, x = KeyBias(), part(inputs(6, 3, 8), mesh, "dp").to(dtype)
    nn.init.zeros_(model.key.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        narrow = {name: p.to(dtype) for name, p in model.named_parameters()}
        loss = scale * torch.func.functional_call(model, narrow, (x,)).double().square().mean()
        loss.backward()
        averaged(model, mesh)
        optimizer.step()
    return axes.pmean(loss.detach(), "dp", mesh=mesh), model


def zeros(mesh):
    """Outputs whose right value is zero: sums of what a norm has centered, on each device in another order."""
    model, norm = Feed(), nn.LayerNorm(8, bias=False)
    x = norm(model.hidden(inputs(6, 8)))
    model.norm = norm
    x.square().mean().backward()
    x = axes.shard(x.detach(), "b@dp e@tp", mesh=mesh)
    return [axes.reduce(x, f"b@dp e@tp -> {to}", "sum", mesh=mesh) for to in ("b@dp", "")], model


def summands(mesh):
    """A DTensor that is pending over dp; every summand has the whole bias."""
    model, x = nn.Linear(4, 3), inputs(6, 4)
    own = F.linear(x.chunk(mesh.size, 1)[mesh.rank], model.weight.chunk(mesh.size, 1)[mesh.rank])
    return axes.from_local(own + model.bias, "b e | sum@dp", mesh=mesh), model


STEPS = [0]


def counting(x, mesh):
    """A program that begins where its last run has ended; wrong on several ranks."""
    STEPS[0] += 1
    return x.sin() * STEPS[0] * (1.25 if mesh.size > 1 else 1)


def nested(mesh):
    return torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def unseen(x, mesh, kind, wrong=False):
    """Programs of which something can't be compared, right but where they are made `wrong`."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    loss = second(first(x)).square().mean() * (mesh.size if wrong else 1)
    return loss, nn.Sequential(first, second) if kind == "input" else first


# One error among what a program returns: `several` says whether there is one. `y` has a graph.

Planted = Callable[[torch.Tensor, bool], Any]


def large(y):
    return y.bfloat16().double().square().sum() * 1e5


@dataclass
class Found:
    """What a program returns may be a dataclass."""

    total: torch.Tensor
    squares: torch.Tensor


# fmt: off
PLANTED: dict[str, tuple[Planted, str]] = {
    "ids beside a large loss": (lambda y, several: {"loss": large(y), "ids": torch.tensor([1, 2, 4 if several else 3])}, "output['ids']: different: largest relative difference 3e-01"),
    "a large integer": (lambda y, several: (y.sum(), torch.tensor([10**9, 3 + several])), "output[1]: different: largest relative difference 1e-09"),
    "a mask": (lambda y, several: {"loss": large(y), "mask": torch.tensor([True, not several])}, "output['mask']: different: largest relative difference 1e+00"),
    "a flag": (lambda y, several: (y.sum(), torch.tensor(not several)), "output[1]: zero on every rank"),
    "a flag of one rank": (lambda y, several: (y.sum(), torch.tensor(not several or dist.get_rank() == 0)), "output[1]: not the same on the ranks of dp, where it should be"),
    "a number": (lambda y, several: (y.sum(), {"loss": y.square().mean().item() * (1 + several)}), "output[1]['loss']: 2 times too large over dp, as where a mean over dp is missing"),
    "in a dataclass": (lambda y, several: Found(y.sum(), y.detach().square() * (1 + several)), "output.squares: 2 times too large over dp, as where a mean over dp is missing"),
    "numbers that aren't there": (lambda y, several: y.detach().masked_fill(torch.arange(8) == 2, torch.nan) * (1 + several), "output: 2 times too large over dp, as where a mean over dp is missing"),
    "what isn't finite": (lambda y, several: (y.sum(), y.detach().abs().log() if several else (y.detach() - 9).log()), "output[1]: different: largest relative difference inf"),
    "a loss beside a count": (lambda y, several: {"loss": y.float().double().square().mean().detach() * (1.5 if several else 1), "n": 2.0**20}, "output['loss']: different: largest relative difference 5e-01"),
    "scores beside a mask": (lambda y, several: (y.detach() * (1 + 0.25 * several), torch.full((6, 6), torch.finfo(torch.float32).min).triu(1)), "output[0]: 1.25 times the right one"),
    "an output of no name": (lambda y, several: {"y": y.detach(), **({"z": y.detach()} if several else {})}, "output['z']: there, though one device has none"),
}
# fmt: on


def planted(mesh, kind, wrong=True):
    """A program on dp, right on one rank; on several ranks with an error in what it returns if `wrong`."""
    model = Feed()
    return PLANTED[kind][0](model.hidden(inputs(6, 8)), wrong and mesh.size > 1), model


GRADIENTS = {
    "small": "small.weight: its gradient is 2 times too large over dp",
    "complex": "up.weight: its gradient is 2 times too large over dp",
    "one rank": "up.weight: its gradient is pending over dp, and its sum is 2.001 times the right one",
    "frozen": "up.weight: its gradient is there, though one device has none",
    "tiny": "up.bias: its gradient is 2 times too large over dp",
}


def planted_gradient(mesh, kind):
    """A program that is right on one rank; on several ranks with a wrong gradient."""
    several, model, small = mesh.size > 1, Feed(), nn.Linear(8, 1, bias=False)
    if kind == "frozen":
        model.up.weight.requires_grad_(several)
    y = model.hidden(x := inputs(6, 8))
    if kind == "small":
        weight = 2 * small.weight - small.weight.detach() if several else small.weight
        (100 * (y.square().sum() + 3e-12 * F.linear(x, weight).mean())).backward()
        return y.detach().sum(), nn.ModuleDict({"model": model, "small": small})
    if kind == "complex":
        if several:
            model.up.weight.register_hook(lambda g: 2 * g)
        return torch.complex(y, y.square()).sum(), model
    (y.square() * 1e-200 if kind == "tiny" else y.square()).sum().backward()
    if several and (kind == "tiny" or (kind == "one rank" and mesh.rank == 1)):
        (model.up.bias if kind == "tiny" else model.up.weight).grad.mul_(2 if kind == "tiny" else 1.001)
    return y.detach().square().sum(), model
