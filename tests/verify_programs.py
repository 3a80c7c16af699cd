"""Models that are parallelized in other ways than by hand, right and wrong, for `axes.verify`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import axes
from tests.test_module_regions import Loss, Model
from tests.verify_models import tokens_and_labels

TOKENS, LABELS = tokens_and_labels()


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
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def rows(mesh, *names):
    """This rank's part of the batch over these axes."""
    tokens, labels = TOKENS, LABELS
    for name in names:
        if mesh.shape.get(name, 1) > 1:
            size, index = mesh.shape[name], mesh.coordinate[name]
            tokens, labels = tokens.chunk(size)[index], labels.chunk(size)[index]
    return tokens, labels


def fsdp(mesh, reshard=True, accumulate=1, evaluated=False, divided=True):
    """FSDP2, maybe with a forward pass after the last backward one; unless `divided` gradients are too large."""
    model = Feed()
    for each in (model.up, model.down, model):
        fully_shard(each, mesh=mesh["dp"].device_mesh, reshard_after_forward=reshard)
    tokens, labels = rows(mesh, "dp")
    for _ in range(accumulate):
        loss = loss_of(model(tokens), labels) / accumulate
        (loss if divided else loss * mesh.shape["dp"]).backward()
    if evaluated:
        with torch.no_grad():
            return loss_of(model(tokens), labels), model
    return loss * accumulate, model


def exact(mesh, off=0, flipped=False, finite=False):
    """Truth values, integers, and numbers that aren't finite; those of several ranks may be wrong."""
    x, several = torch.linspace(-1, 2, 48, dtype=torch.float64).view(6, 8), mesh.size > 1
    mask = (x < 0) if several and flipped else (x > 0)
    logs = x.abs().log() if several and finite else x.log()
    numbers = torch.tensor([10**9, 3 + off * several])
    return axes.shard(mask, "b@dp d", mesh=mesh), mask.all(), numbers, axes.shard(logs, "b@dp d", mesh=mesh)


def hsdp(mesh, twice=False):
    model = Feed()
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"].device_mesh)
    tokens, labels = rows(mesh, "dp_replicate", "dp_shard")
    loss = loss_of(model(tokens), labels)
    loss.backward()
    if twice:
        for p in model.parameters():
            p.grad /= mesh.shape["dp_replicate"]
    return loss, model


def torch_tp(mesh, dp=False):
    """torch's own tensor parallelism, and FSDP2 around it."""
    model = Feed()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"].device_mesh, plan)
    tokens, labels = rows(mesh, "dp") if dp else (TOKENS, LABELS)
    if dp:
        fully_shard(model, mesh=mesh["dp"].device_mesh)
    loss = loss_of(model(tokens), labels)
    loss.backward()
    return loss, model


def torch_sequence_parallel(mesh):
    model = Feed()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=True),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"].device_mesh, plan)
    loss = loss_of(model(TOKENS), LABELS)
    loss.backward()
    return loss, model


def data_parallel(mesh):
    """Gradients averaged by hand, the loss left as each rank's own."""
    model = Feed()
    tokens, labels = rows(mesh, "dp")
    loss = loss_of(model(tokens), labels)
    loss.backward()
    for p in model.parameters():
        if mesh.shape["dp"] > 1:
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM, group=mesh.axis("dp").group)
            p.grad /= mesh.shape["dp"]
    return {"loss": loss, "logits": model(tokens)}, model


def stages(mesh):
    """A pipeline of two stages, each with its own parameters, that hand activations over."""
    model = Feed()
    pp = mesh.shape["pp"]
    stage = mesh.coordinate["pp"] if pp > 1 else 0
    if pp == 1:
        loss = loss_of(model(TOKENS), LABELS)
        loss.backward()
        return {"loss": loss}, model
    there = torch.empty(*TOKENS.shape, 8)
    if stage == 0:
        model.down = model.up = model.head = model.norm = None
        x = model.embedding(TOKENS)
        dist.send(x.detach(), 1)
        dist.recv(there, 1)
        x.backward(there)
        return {}, model
    model.embedding = None
    dist.recv(there, 0)
    x = there.requires_grad_()
    loss = loss_of(model.head(x + model.down(F.gelu(model.up(model.norm(x))))), LABELS)
    loss.backward()
    dist.send(x.grad, 0)
    return {"loss": loss}, model


def dtensors(mesh):
    """Operations by name on DTensors; the result is pending over tp."""
    w = nn.Parameter(axes.shard(torch.randn(12, 8), "f@tp e"))
    v = nn.Parameter(axes.shard(torch.randn(8, 12), "e f@tp"))
    model = nn.Module()
    model.w, model.v = w, v
    x = axes.shard(torch.randn(4, 8), "b@dp e")
    h = axes.einsum(x, w, "b@dp e, f@tp e -> b@dp f@tp")
    y = axes.einsum(h, v, "b@dp f@tp, e f@tp -> b@dp e | sum@tp")
    whole = axes.reshard(y, "b@dp e")
    axes.unshard(whole).square().sum().backward()
    return {"pending": y, "whole": whole}, model


def uneven(mesh):
    """Seven rows over dp, five columns over tp."""
    torch.manual_seed(3)
    model = nn.Linear(6, 5)
    axes.shard_module(model, {"weight": "f@tp e", "bias": "f@tp"})
    x = axes.shard(torch.randn(7, 6), "b@dp e")
    y = model(x)
    axes.unshard(y).square().mean().backward()
    return y, model


REGION_SPECS = {
    "*.qkv.weight": "(three=3 h@tp k=2) e",
    "*.out.weight": "e f@tp",
    "*.up.weight": "f@tp e",
    "*.up.bias": "f@tp",
    "*.down.weight": "e f@tp",
    "*": "...",
}


class Recurrent(nn.Module):
    """Layers of torch that drop inside; of a packed sequence where it is `packed`."""

    def __init__(self, kind, packed=False, **options):
        super().__init__()
        self.layers = getattr(nn, kind)(8, 8, 2, dropout=0.3, batch_first=True, **options)
        self.head, self.packed = nn.Linear(8, 8), packed

    def forward(self, x):
        if not self.packed:
            return self.head(self.layers(x)[0])
        found, _ = self.layers(nn.utils.rnn.pack_padded_sequence(x, [x.shape[1]] * len(x), batch_first=True))
        return self.head(nn.utils.rnn.pad_packed_sequence(found, batch_first=True)[0])


class Attention(nn.Module):
    """torch's attention, which drops inside."""

    def __init__(self, need_weights):
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True), need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Noise(nn.Module):
    """Dropout by hand."""

    def forward(self, x):
        return x * (torch.rand_like(x) > 0.3) / 0.7


DROPPING = {
    "attention": lambda: Attention(need_weights=True),
    "fused attention": lambda: Attention(need_weights=False),
    "a transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True), 2),
    "LSTM": lambda: Recurrent("LSTM"),
    "LSTM of a packed sequence": lambda: Recurrent("LSTM", packed=True),
    "GRU": lambda: Recurrent("GRU"),
    "RNN": lambda: Recurrent("RNN", nonlinearity="relu"),
    "dropout by hand": lambda: nn.Sequential(nn.Linear(8, 8), Noise(), nn.Linear(8, 8)),
}


def dropping(mesh, kind):
    """A model with dropout where torch's functions don't see each other, rows of its input over dp."""
    model = DROPPING[kind]()
    x = torch.linspace(-1, 2, 96).view(4, 3, 8).sin()
    loss = model(x.chunk(mesh.size)[mesh.rank]).square().mean()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = axes.pmean(parameter.grad, "dp", mesh=mesh)
    return axes.pmean(loss.detach(), "dp", mesh=mesh), model


class Unrecorded(Feed):
    """A model whose output has no gradients."""

    @torch.no_grad()
    def forward(self, tokens):
        return super().forward(tokens)


def region(checkpointed=False, expression="b@dp s@tp -> b@dp s@tp v"):
    torch.manual_seed(5)
    return axes.shard_map(Model(parallel=True, checkpointed=checkpointed), expression)


class Scaled(nn.Linear):
    """A row-parallel layer whose output is multiplied by the size of tp."""

    def __init__(self):
        super().__init__(16, 8, bias=False)

    def forward(self, x):
        return super().forward(x) * axes.axis_size("tp")


def same_region():
    torch.manual_seed(1)
    return axes.shard_map(Loss(), "b@dp d | same@tp -> b@dp d | same@tp")


class Named(nn.Module):
    """Layers of axes.nn on DTensors."""

    def __init__(self):
        super().__init__()
        self.norm = axes.nn.RMSNorm("b s embed", over="embed", embed=8)
        self.up = axes.nn.Einsum("b s embed, mlp embed -> b s mlp", embed=8, mlp=12)
        self.down = axes.nn.Einsum("b s mlp@*, embed mlp@* -> b s embed", embed=8, mlp=12)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@dataclass
class Answer:
    """What a model of transformers returns is like this, too."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


def compiled(mesh):
    """FSDP2 around a module that is compiled by a wrapper."""
    model = Feed()
    fully_shard(model, mesh=mesh["dp"].device_mesh)
    tokens, labels = rows(mesh, "dp")
    loss = loss_of(torch.compile(model, backend="aot_eager")(tokens), labels)
    loss.backward()
    return loss, model


def stepped(mesh, synchronized=True):
    """A program that steps its optimizer; unless `synchronized` with each rank's own gradients."""
    model = Feed()
    tokens, labels = rows(mesh, "dp")
    loss = loss_of(model(tokens), labels)
    loss.backward()
    for p in model.parameters() if synchronized else ():
        p.grad = axes.pmean(p.grad, "dp", mesh=mesh)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return axes.pmean(loss.detach(), "dp", mesh=mesh), model


class NarrowNorm(nn.Module):
    """Llama's: it computes in float32 whatever comes."""

    def __init__(self, embed=8):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, embed))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).type_as(x)


class Narrow(nn.Module):
    """A product that is split over tp between two norms that round; a wrong one without its all-reduce."""

    def __init__(self, answer=False, reduced=True):
        super().__init__()
        self.norm1, self.norm2 = NarrowNorm(), NarrowNorm()
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)
        self.answer, self.reduced = answer, reduced

    def forward(self, x):
        y = torch.tanh(self.up(self.norm1(x)))
        expression = "b f@tp, e f@tp -> b e"
        y = axes.einsum(y, self.down.weight, expression) if self.reduced else self.down(y)
        y = self.norm2(x + y)
        return Answer(y, None) if self.answer else y


NARROW_SPECS = {"up.weight": "f@tp e", "down.weight": "e f@tp", "*": "..."}


def narrow(mesh, answer=False, reduced=True):
    """`Narrow` as a function that takes shards out of its parameters by itself."""
    model = Narrow(answer, reduced)
    for name, dim in (("up", 0), ("down", 1)):
        layer, tp = getattr(model, name), mesh.axis("tp")
        layer.weight = nn.Parameter(layer.weight.detach().chunk(tp.size, dim)[tp.index].clone())
    with axes.use_mesh(mesh):
        return model(torch.linspace(-1, 2, 48).view(6, 8)), model


class Gate(nn.Module):
    """A region whose gate has a small gradient, on more than one rank twice as large as it should be."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(2)
        self.large, self.gate = nn.Linear(8, 8, bias=False), nn.Parameter(torch.ones(8))
        self.to(dtype)

    def forward(self, x):
        gate = doubled(self.gate, axes.axis_size("tp") > 1)
        return (self.large(x) * 100).square().sum(), 1e-4 * (x * gate).square().mean()


def doubled(x, wrong):
    """`x`, with a gradient that is twice as large if `wrong`."""
    return 2 * x - x.detach() if wrong else x


def feed(mesh, wrong):
    """A model with inputs, of which one gradient is wrong on more than one rank if `wrong`."""
    model, x = Feed(), torch.linspace(-1, 2, 48).view(6, 8).sin()
    if wrong and mesh.size > 1:
        model.up.weight.register_hook(lambda g: 2 * g)
    return model, x


def planted(mesh, kind, wrong=True):
    """A program on dp, right on one rank; on several ranks with an error in what it returns if `wrong`."""
    several = wrong and mesh.size > 1
    model, x = feed(mesh, False)
    y = model.down(F.gelu(model.up(x)))
    z = y.detach()
    if kind == "ids beside a large loss":
        loss = y.bfloat16().double().square().sum() * 1e5
        return {"loss": loss, "ids": torch.tensor([1, 2, 4 if several else 3])}
    if kind == "mask beside a large loss":
        loss = y.bfloat16().double().square().sum() * 1e5
        return {"loss": loss, "mask": torch.tensor([True, not several])}
    if kind == "count":
        return y.sum(), torch.tensor(9 if several else 7)
    if kind == "flag":
        return y.sum(), torch.tensor(not several)
    if kind == "flag of one rank":
        return y.sum(), torch.tensor(not several or mesh.coordinate["dp"] == 0)
    if kind == "number":
        return y.sum(), {"loss": z.square().mean().item() * (2 if several else 1)}
    if kind == "share":
        part = z.chunk(mesh.size)[mesh.rank].square().mean()
        return axes.pmean(part, "dp", mesh=mesh) / (mesh.size if wrong else 1)
    if kind == "missing numbers":
        y = z.masked_fill(torch.arange(8) == 2, torch.nan)
        return y * (2 if several else 1)
    if kind in ("loss beside a count", "loss of bfloat16 beside a count"):
        loss = (y.bfloat16() if "bfloat16" in kind else y.float()).double().square().mean().detach()
        return {"loss": loss * (1.5 if several else 1), "tokens": 65536.0 * 16}
    if kind in ("scores beside a mask", "scores of float32 beside a mask"):
        z = F.layer_norm(z.float(), (8,)).double() if "float32" in kind else z
        fill = -1e9 if "float32" in kind else torch.finfo(torch.float32).min
        return z * (1 + 0.25 * several), torch.full((6, 6), fill).triu(1)
    if kind == "scores in a mask":
        scores = F.linear(z, z) * (1 + 0.25 * several)
        return scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), torch.finfo(z.dtype).min)
    if kind == "output of no name":
        return {"y": y.detach(), **({"z": z} if several else {})}
    raise AssertionError(kind)


def planted_gradient(mesh, kind, wrong=True):
    """A program that is right on one rank; on several ranks with a wrong gradient, if `wrong`."""
    several = wrong and mesh.size > 1
    model, x = feed(mesh, several and kind in ("complex", "no scalar"))
    small = nn.Linear(8, 1, bias=False)
    y = model.down(F.gelu(model.up(x)))
    both = nn.ModuleDict({"model": model, "small": small})
    if kind in ("small", "small beside a mask"):
        mask = torch.ones(8).bfloat16() if "mask" in kind else torch.ones(8)
        z = F.linear(x, doubled(small.weight, several)).mean()
        loss = ((y * mask.to(y.dtype)).square().sum() + (3e-12 if kind == "small" else 1e-6) * z) * 100
        loss.backward()
        return loss.detach(), both
    if kind == "small beside a large one":
        z = F.linear(x.bfloat16(), doubled(small.weight, several).bfloat16()).double().square().mean()
        (1e6 * y.square().sum() + z).backward()
        return z_of(y), both
    if kind == "complex":
        return torch.complex(y, y.square()).sum(), model
    if kind == "no scalar":
        return y.softmax(-1), model
    if kind == "one rank":
        y.square().sum().backward()
        if several and mesh.rank == 1:
            model.up.weight.grad.mul_(1.001)
        return z_of(y), model
    if kind == "frozen":
        model.up.weight.requires_grad_(several)
        model.down(F.gelu(model.up(x))).sum().backward()
        return z_of(y), model
    if kind in ("tiny", "huge"):
        (y * (1e-200 if kind == "tiny" else 1e200)).sum().backward()
        if several:
            model.up.bias.grad.mul_(2)
        return z_of(y), model
    raise AssertionError(kind)


def z_of(y):
    return y.detach().square().sum()


def counted(mesh):
    """Each rank's own count of its rows, as many on all ranks, beside its share of a loss."""
    model, x = feed(mesh, False)
    rows = x.chunk(mesh.size)[mesh.rank]
    loss = model.down(F.gelu(model.up(rows))).square().sum()
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = axes.psum(parameter.grad, "dp", mesh=mesh)
    return (loss.detach(), torch.tensor(len(rows))), model


def zeroed(mesh):
    """A step of training that drops its gradients and returns the loss with its graph, which is gone."""
    model, x = feed(mesh, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model.down(F.gelu(model.up(x))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, model


def sparse(mesh):
    """An embedding with sparse gradients, and a sparse output."""
    embedding = nn.Embedding(8, 4, sparse=True)
    loss = embedding(torch.tensor([1, 2, 2])).square().sum()
    loss.backward()
    return {"loss": loss.detach(), "eye": torch.eye(3).to_sparse()}, embedding


def nested(mesh):
    return torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


class KeyBias(nn.Module):
    """Attention, in which the bias of the keys has a gradient that is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return scores.softmax(-1) @ self.value(x)


def without_backward(mesh, sharded=False):
    """Outputs of this rank's rows; backward was never run, and no gradient is summed, unless FSDP2 does."""
    model = KeyBias()
    if sharded:
        fully_shard(model, mesh=mesh["dp"].device_mesh)
    x = torch.linspace(-1, 2, 144).view(6, 3, 8).sin()
    return model(x.chunk(mesh.size)[mesh.rank]).softmax(-1), model


def adam(mesh):
    """Steps of Adam, which divides gradients by their size, also those that are zero but for rounding."""
    model, x = KeyBias(), torch.linspace(-1, 2, 144).view(6, 3, 8).sin()
    nn.init.zeros_(model.key.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x.chunk(mesh.size)[mesh.rank]).square().mean()
        loss.backward()
        for p in model.parameters():
            p.grad = axes.pmean(p.grad, "dp", mesh=mesh)
        optimizer.step()
    return loss.detach(), model


def one_graph(mesh):
    """Attention as one compiled graph; the gradient of the bias of keys is zero but for rounding."""
    model, x = KeyBias(), torch.linspace(-1, 2, 144).view(6, 3, 8).sin()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(x.chunk(mesh.size)[mesh.rank]).square().mean()
    loss.backward()
    for p in model.parameters():
        p.grad = axes.pmean(p.grad, "dp", mesh=mesh)
    return axes.pmean(loss.detach(), "dp", mesh=mesh), model


def narrow_adam(mesh, dtype=torch.bfloat16, scale=1e6):
    """Steps of Adam on attention that is computed in a narrow dtype, with a loss that is scaled."""
    model, x = KeyBias(), torch.linspace(-1, 2, 144).view(6, 3, 8).sin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        narrow = {name: p.to(dtype) for name, p in model.named_parameters()}
        y = torch.func.functional_call(model, narrow, (x.chunk(mesh.size)[mesh.rank].to(dtype),))
        loss = scale * y.double().square().mean()
        loss.backward()
        for p in model.parameters():
            p.grad = axes.pmean(p.grad, "dp", mesh=mesh)
        optimizer.step()
    return axes.pmean(loss.detach(), "dp", mesh=mesh), model


def centered(mesh, dtype=torch.float64):
    """Sums that are zero but for rounding, beside one that isn't; the parameters are of no module that is called."""
    x = torch.linspace(-1, 2, 4096, dtype=dtype).mul(37).sin().view(512, 8)
    parameters = nn.ParameterDict({"query": torch.randn(8, 8, dtype=dtype), "bias": torch.randn(8, dtype=dtype)})
    own = x.chunk(mesh.size)[mesh.rank]
    mean = axes.pmean(own.mean(0), "dp", mesh=mesh)
    keys = x[:16] + parameters["bias"]
    loss = ((own @ parameters["query"]) @ keys.T).softmax(-1)[:, :8].square().mean()
    loss.backward()
    for p in parameters.values():
        p.grad = axes.pmean(p.grad, "dp", mesh=mesh)
    zero, large = axes.psum((own - mean).sum(0), "dp", mesh=mesh), axes.psum(own.exp().sum(), "dp", mesh=mesh)
    return {"zero": zero, "large": large}, parameters


class Routed(nn.Module):
    """Each row goes to two of four experts."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 8) / 3), nn.Parameter(torch.randn(4, 8, 16) / 4)

    def forward(self, x):
        weights, experts = self.router(x).softmax(-1).topk(2)
        gates = torch.zeros(len(x), 4, dtype=x.dtype).scatter(-1, experts, weights)
        hidden = torch.einsum("bd,efd->bef", x, self.up).relu()
        return torch.einsum("bef,edf,be->bd", hidden, self.down, gates)


def routed(mesh, dtype=torch.float64):
    model, x = Routed(), torch.linspace(-1, 2, 512).mul(9).sin().view(64, 8)
    narrow = {name: p.to(dtype) for name, p in model.named_parameters()}
    own = x.chunk(mesh.size)[mesh.rank].to(dtype)
    loss = torch.func.functional_call(model, narrow, (own,)).double().square().mean()
    loss.backward()
    for p in model.parameters():
        p.grad = axes.pmean(p.grad, "dp", mesh=mesh)
    return axes.pmean(loss.detach(), "dp", mesh=mesh), model


STEPS = [0]


def counting(x, mesh):
    """A program that begins where its last run has ended; wrong on several ranks."""
    STEPS[0] += 1
    return x.sin() * STEPS[0] * (1.25 if mesh.size > 1 else 1)


def particular(x, mesh):
    """A program that runs with its own numbers alone, and is wrong on several ranks."""
    if not bool((x == 1 / 3).all()):
        raise ValueError("found other numbers")
    return torch.arange(4.0).sin() * (1.25 if mesh.size > 1 else 1)


class Unreduced(nn.Module):
    """Two layers that are split over tp, without a sum after them; with a mask beside it if `fill`."""

    def __init__(self, fill=None):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.fill = fill

    def forward(self, x):
        y = self.down(F.gelu(self.up(x)))
        return y if self.fill is None else (y, torch.full((6, 6), self.fill).triu(1))


UNREDUCED_SPECS = {"up.weight": "f@tp e", "down.weight": "e f@tp"}


def summands(mesh, divided=False):
    """A DTensor that is pending over dp; every summand has the whole bias, unless `divided`."""
    model, x = nn.Linear(4, 3), torch.linspace(-1, 2, 24).view(6, 4).sin()
    own = F.linear(x.chunk(mesh.size, 1)[mesh.rank], model.weight.chunk(mesh.size, 1)[mesh.rank])
    bias = model.bias / mesh.size if divided else model.bias
    return axes.from_local(own + bias, "b e | sum@dp", mesh=mesh), model


class Method(nn.Module):
    """Its loss is a method, so nothing says where `scale` belongs."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def loss(self, x):
        return (self.linear(x) * self.scale).square().mean()


def unseen(x, mesh, kind, wrong=False):
    """Programs of which something can't be compared, right but where they are made `wrong`."""
    if kind == "method":
        return Method().loss(x)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    loss = second(first(x)).square().mean() * (mesh.size if wrong else 1)
    return loss, nn.Sequential(first, second) if kind == "input" else first
