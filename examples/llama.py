"""A Llama on any mesh: grouped queries, rotary positions, SwiGLU; data, context and tensor parallel, FSDP2.

    python examples/llama.py --mesh "dp=2 cp=2 tp=2"            # eight local processes, then one, and compares
    torchrun --nproc-per-node 8 examples/llama.py --device cuda

The model is plain PyTorch that runs in a region: it sees this rank's tensors, and says in each product how they
lie and where the result goes. `SPECS` says what `tp` splits of the parameters; FSDP2 shards the rest over dp and cp.
On a mesh of one rank the same lines are the model of one device.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from dataclasses import dataclass, replace

import torch
import torch.distributed.checkpoint as dcp
from support import Bar, flag, read_options, show_curves
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from train_options import corpus

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
        x = axes.rearrange(x, "b s@(cp tp) d -> b s@cp d")
        first = axes.axis_index("cp") * x.shape[1]
        here = torch.arange(first, first + x.shape[1], device=x.device)
        q = rotated(axes.einsum(x, self.wq, "b s d, (h k) d -> b h s k", k=self.k), here)
        k = rotated(axes.einsum(x, self.wk, "b s d, (g k) d -> b g s k", k=self.k), here)
        v = axes.einsum(x, self.wv, "b s d, (g k) d -> b g s k", k=self.k)
        k, v = (axes.rearrange(each, "b g s@cp k -> b g s k") for each in (k, v))
        seen = here[:, None] >= torch.arange(k.shape[2], device=x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return axes.einsum(y, self.wo, "b h@tp s@cp k, d (h@tp k) -> b s@(cp tp) d")


class MLP(nn.Module):
    def __init__(self, n: Size):
        super().__init__()
        self.gate, self.up, self.down = weight(n.f, n.d), weight(n.f, n.d), weight(n.d, n.f)

    def forward(self, x: Tensor) -> Tensor:
        x = axes.rearrange(x, "b s@(cp tp) d -> b s@cp d")
        y = F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)
        return axes.einsum(y, self.down, "b s@cp f@tp, d f@tp -> b s@(cp tp) d")


class Block(nn.Module):
    def __init__(self, n: Size):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.RMSNorm(n.d), Attention(n), nn.RMSNorm(n.d), MLP(n)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """From tokens and labels, `b@dp s@cp`, to the mean loss of all of them, the same on every rank."""

    def __init__(self, n: Size, recompute: bool = False):
        super().__init__()
        self.embedding, self.head = weight(n.v, n.d), weight(n.v, n.d)
        self.blocks = nn.ModuleList(Block(n) for _ in range(n.layers))
        self.norm, self.recompute = nn.RMSNorm(n.d), recompute

    def init_weights(self) -> None:
        """Every value follows from the seed, its parameter's name and its place: it is the same on every mesh."""
        for name, parameter in self.named_parameters():
            small = name in ("embedding", "head")
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 if small else parameter.shape[1] ** -0.5)
            else:
                nn.init.ones_(parameter)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = axes.embedding(tokens, self.embedding, "b@dp s@cp, v@tp d -> b@dp s@(cp tp) d")
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = axes.rearrange(self.norm(x), "b s@(cp tp) d -> b s@cp d")
        return axes.cross_entropy(F.linear(x, self.head), labels, "b@dp s@cp v@tp, b@dp s@cp -> ")


# ----------------------------------------------------------------------------------- on a mesh


def made(options: Options, mesh: axes.Mesh) -> nn.Module:
    """The model, its shards made where they belong: no rank ever has a whole parameter."""
    with torch.device("meta"):
        model = Llama(Size(), options.recompute)
    torch.manual_seed(options.seed)
    axes.shard_module(model, SPECS, mesh["tp"])
    axes.shard_map(model, "b@dp s@cp, b@dp s@cp -> ", mesh)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["fsdp"].device_mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is a mean already
            module.set_force_sum_reduction_for_comms(True)
    return model


def train(options: Options) -> list[float]:
    """What each rank does; the losses."""
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    mesh = axes.init_mesh(options.mesh, "fsdp = dp cp", device_type=options.device)
    if mesh.rank == 0:
        print(f"{mesh}\n", flush=True)
    model = made(options, mesh)
    optimizer = axes.nn.local_optimizer(torch.optim.AdamW, model.parameters(), lr=options.lr)
    if options.resume:
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=options.checkpoint)
    rows, columns = mesh.sharding("b@dp s@cp").local_indices((options.batch, options.sequence))
    text, losses, generator = corpus(), [], torch.Generator().manual_seed(options.seed)
    bar = Bar(options.steps, options.batch * options.sequence, mesh)
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.sequence, (options.batch, 1), generator=generator)
        window = text[starts + torch.arange(options.sequence + 1)][rows].to(options.device)
        loss = model(window[:, :-1][:, columns], window[:, 1:][:, columns])
        loss.backward()
        axes.nn.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.show(step, losses[-1])
    if options.checkpoint and not options.resume:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # meant so
            dcp.save({"model": model.state_dict()}, checkpoint_id=options.checkpoint)
    return losses


# ------------------------------------------------------------------------------------ command line


@dataclass(frozen=True)
class Options:
    """Train a Llama on a mesh, and on one device, and compare."""

    mesh: str = flag("dp=2 cp=2 tp=2", "the axes dp, cp and tp with their sizes")
    steps: int = flag(40, "optimizer steps")
    batch: int = flag(8, "samples per step, over all ranks")
    sequence: int = flag(64, "bytes per sample")
    lr: float = flag(3e-3, "learning rate")
    seed: int = flag(0, "of the weights and the samples", least=0)
    recompute: int = flag(0, "1: recompute the blocks in backward", least=0)
    device: str = flag("cpu", "what to train on", choices=["cpu", "cuda"])
    checkpoint: str = flag("", "folder to write a checkpoint to")
    resume: int = flag(0, "1: begin with the checkpoint, whatever mesh wrote it", least=0)


def what_is_wrong(options: Options) -> str | None:
    """What can't be, as far as one process can tell."""
    try:
        mesh = axes.Mesh(options.mesh)
    except axes.AxesError as error:
        return f"--mesh {error}"
    if set(mesh.axis_names) != {"dp", "cp", "tp"}:
        return f"--mesh has the axes dp, cp and tp; found {options.mesh!r}"
    parts = mesh.names["cp"] * mesh.names["tp"]
    if Size.g % mesh.names["tp"] or options.sequence % parts or options.batch % mesh.names["dp"]:
        return f"--mesh {options.mesh}: tp divides {Size.g} key heads, cp * tp the sequence, dp the batch"
    return None


def main(arguments: list[str] | None = None) -> int:
    options = read_options("llama.py", Options, what_is_wrong, arguments)
    if "RANK" in os.environ:  # torchrun started this process and its siblings
        losses = train(options)
        axes.destroy_process_groups()
        return 0 if all(map(math.isfinite, losses)) else 1
    ranks, started = axes.Mesh(options.mesh).size, time.time()
    many = axes.launch(train, ranks, options, device_type=options.device)[0]
    checkpoint = options.checkpoint if options.resume else ""
    alone = replace(options, mesh="dp=1 cp=1 tp=1", checkpoint=checkpoint)
    one = axes.launch(train, 1, alone, device_type=options.device)[0]
    worst = show_curves(many, one, ranks)
    print(f"\nlargest relative difference over {len(one)} steps: {worst:.1e}    ({time.time() - started:.0f} s)")
    return 0 if worst <= 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
