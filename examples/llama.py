"""A Llama on any mesh: grouped queries, rotary positions, SwiGLU; pipeline, data, context and tensor parallel, FSDP2.

    python examples/llama.py --mesh "dp=2 cp=2 tp=2"            # eight local processes, then one, and compares
    python examples/llama.py --mesh "pp=2 dp=2 tp=2" --tied 1   # two pipeline stages, and a weight that both have
    torchrun --nproc-per-node 8 examples/llama.py --device cuda

The model is plain PyTorch that runs in a region: it sees this rank's tensors, and says in each product how they
lie and where the result goes. `SPECS` says what `tp` splits of the parameters; FSDP2 shards the rest over dp and cp.
On a mesh of one rank the same lines are the model of one device. How it is cut into stages, and trained, is in
pipelined.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from pipelined import Curves, Training, compared, declaration, forward_backward, mesh_of, stage_of, summed, trained
from support import flag, read_options
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import axes

SPECS = {
    "embedding": "v@tp d",
    "*.wq": "(h k)@tp d",
    "*.wk": "(g k)@tp d",
    "*.wv": "(g k)@tp d",
    "*.wo": "d (h k)@tp",
    "*.gate": "f@tp d",
    "*.up": "f@tp d",
    "*.down": "d f@tp",
    "head": "v@tp d",
    "*": "...",  # norms: whole on every rank of tp
}
AXES = "pp", "dp", "cp", "tp"
HIDDEN, LOGITS = "s@(cp tp) b@dp d", "b@dp s@cp v@tp"  # hidden: positions first, so that shards of s are whole rows
# Every rank has the loss, and begins backward with its whole gradient.
LOSS = f"{LOGITS}, b@dp s@cp -> | same@(dp cp tp)"


# ------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Size:
    d: int = 64
    layers: int = 2
    h: int = 8
    g: int = 4
    k: int = 8
    f: int = 128
    v: int = 256


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """`b heads s k`, turned by the positions of its s."""
    frequencies = 10_000.0 ** -torch.arange(0, 1, 2 / x.shape[-1], dtype=x.dtype, device=x.device)
    angle = torch.outer(positions.to(x.dtype), frequencies)
    even, odd = x.chunk(2, dim=-1)
    return torch.cat((even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()), dim=-1)


class Attention(nn.Module):
    def __init__(self, n: Size):
        super().__init__()
        self.wq, self.wk, self.wv = weight(n.h * n.k, n.d), weight(n.g * n.k, n.d), weight(n.g * n.k, n.d)
        self.wo, self.k = weight(n.d, n.h * n.k), n.k

    def forward(self, x: Tensor) -> Tensor:
        x = axes.rearrange(x, "s@(cp tp) b d -> s@cp b d")
        first = axes.axis_index("cp") * x.shape[0]
        here = torch.arange(first, first + x.shape[0], device=x.device)
        q = rotated(axes.einsum(x, self.wq, "s b d, (h k) d -> b h s k", k=self.k), here)
        k = rotated(axes.einsum(x, self.wk, "s b d, (g k) d -> b g s k", k=self.k), here)
        v = axes.einsum(x, self.wv, "s b d, (g k) d -> b g s k", k=self.k)
        k, v = (axes.rearrange(each, "b g s@cp k -> b g s k") for each in (k, v))
        seen = here[:, None] >= torch.arange(k.shape[2], device=x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return axes.einsum(y, self.wo, "b h@tp s@cp k, d (h@tp k) -> s@(cp tp) b d")


class MLP(nn.Module):
    def __init__(self, n: Size):
        super().__init__()
        self.gate, self.up, self.down = weight(n.f, n.d), weight(n.f, n.d), weight(n.d, n.f)

    def forward(self, x: Tensor) -> Tensor:
        x = axes.rearrange(x, "s@(cp tp) b d -> s@cp b d")
        y = F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)
        return axes.einsum(y, self.down, "s@cp b f@tp, d f@tp -> s@(cp tp) b d")


class Block(nn.Module):
    def __init__(self, n: Size):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.RMSNorm(n.d), Attention(n), nn.RMSNorm(n.d), MLP(n)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """From tokens to logits. A stage of a pipeline lacks some parts: then from what the stage before gives."""

    def __init__(self, n: Size, block: type[Block] = Block, tied: bool = False, recompute: bool = False):
        super().__init__()
        self.embedding = weight(n.v, n.d)
        self.blocks = nn.ModuleDict({str(number): block(n) for number in range(n.layers)})
        self.norm = nn.RMSNorm(n.d)
        self.register_parameter("head", None if tied else weight(n.v, n.d))
        self.first = self.last = True
        self.v, self.width, self.tied, self.recompute = n.v, n.d, tied, recompute

    @property
    def expression(self) -> str:
        """What this stage takes and gives."""
        taken, given = ("b@dp s@cp" if self.first else HIDDEN), (LOGITS if self.last else HIDDEN)
        return f"{taken} -> {given}"

    def init_weights(self) -> None:
        """Every value follows from the seed, its parameter's name and its place: it is the same on every mesh."""
        for name, parameter in self.named_parameters():
            small = name in ("embedding", "head")
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=0.02 if small else parameter.shape[-1] ** -0.5)
            else:
                nn.init.ones_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = axes.embedding(x, self.embedding, f"b@dp s@cp, v@tp d -> {HIDDEN}", v=self.v)
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        if not self.last:
            return x
        x = axes.rearrange(self.norm(x), "s@(cp tp) b d -> s@cp b d")
        return F.linear(x.transpose(0, 1), self.embedding if self.tied else self.head)


class Loss(nn.Module):
    """The mean loss of all tokens, the same on every rank."""

    def __init__(self, v: int = Size.v):
        super().__init__()
        self.v = v

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return axes.cross_entropy(logits, labels, LOSS, v=self.v)  # ranks needn't tell each other the whole size


# ----------------------------------------------------------------------------------- on a mesh


def made(options: Training, mesh: axes.Mesh) -> nn.Module:
    """This rank's stage, its shards made where they belong: no rank ever has a whole parameter."""
    with torch.device("meta"):
        model = Llama(Size(v=options.words), tied=bool(options.tied), recompute=bool(options.recompute))
    model = stage_of(model, mesh).to(getattr(torch, options.dtype))
    torch.manual_seed(options.seed)
    axes.shard_module(model, SPECS, mesh["tp"])
    axes.shard_map(model, model.expression, mesh["dp", "cp", "tp"])
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=mesh["fsdp"].device_mesh)
    if options.compile:
        for block in model.blocks.values():
            block.compile()
    return summed(model)


def loss_on(mesh: axes.Mesh, v: int = Size.v) -> nn.Module:
    return axes.shard_map(Loss(v), LOSS, mesh["dp", "cp", "tp"])


def train(options: Options) -> Curves:
    """What each rank does."""
    mesh = mesh_of(options, AXES, "fsdp = dp cp")
    return trained(options, mesh, made(options, mesh), loss_on(mesh, options.words))


def build(mesh: axes.Mesh) -> tuple[nn.Module, Callable[[], None]]:
    """A model and a step of its training, as `python -m axes explain` asks for them: llama.lock has what they are."""
    options = Options(batch=4 * mesh.names["dp"])
    model = made(options, mesh)
    run = forward_backward(model, loss_on(mesh), mesh, options.microbatches, options.schedule)
    tokens = torch.zeros(mesh.sharding("b@dp s@cp").local_shape((options.batch, options.sequence))).long()

    def step() -> None:
        run(tokens, tokens)
        axes.nn.clip_grad_norm_(model.parameters(), options.clip, stages="pp", mesh=mesh)

    return model, step


# ------------------------------------------------------------------------------------ command line


@dataclass(frozen=True)
class Options(Training):
    """Train a Llama on a mesh, and on one device, and compare."""

    mesh: str = flag("dp=2 cp=2 tp=2", f"of the axes {', '.join(AXES)}, with their sizes")


def what_is_wrong(options: Training, names: Sequence[str] = AXES, n: Size = Size()) -> str | None:
    """What can't be, as far as one process can tell."""
    try:
        mesh = axes.Mesh(declaration(options.mesh, names))
    except axes.AxesError as error:
        return f"--mesh {error}"
    sizes = {**mesh.names, "dp": math.prod(size for name, size in mesh.names.items() if name.startswith("dp"))}
    if n.g % sizes["tp"] or options.sequence % (sizes["cp"] * sizes["tp"]):
        return f"--mesh {options.mesh}: tp divides {n.g} key heads, and cp * tp the sequence"
    if sizes["pp"] > 1 and options.batch % (sizes["dp"] * options.microbatches):
        return f"--mesh {options.mesh}: in a pipeline dp * microbatches divides the batch, for stages expect one shape"
    if n.layers % sizes["pp"] or (sizes["pp"] > 1 and options.microbatches < sizes["pp"]):
        return f"--mesh {options.mesh}: pp divides {n.layers} layers, and there are as many microbatches"
    return None


def main(arguments: list[str] | None = None) -> int:
    options = read_options("llama.py", Options, what_is_wrong, arguments)
    return compared(options, train, AXES)


if __name__ == "__main__":
    sys.exit(main())
