"""Train a small transformer on real English over eight processes, then on one, and compare.

    make demo                                                   # eight local processes, on CPUs
    torchrun --nproc-per-node 8 examples/train.py               # the same under torchrun
    torchrun --nproc-per-node 8 examples/train.py --device cuda # on GPUs, over NCCL

The mesh has three axes, `dp_replicate fsdp tp`, declared once. `SPECS` says what `tp` splits of each
parameter; FSDP2 splits it further over `fsdp` and keeps a copy per `dp_replicate`; the batch is split over
both, under the name `batch`. The model is transformer.py's, which is plain PyTorch, with its products
written as expressions. The text is the reference that Python ships, 466 kB.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import Bar, show_communicators, show_curves
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from train_options import Options, corpus, read
from transformer import Block, Size, Transformer, write

import axes

DECLARATION = "dp_replicate fsdp tp", "batch = dp_replicate fsdp"

SPECS = {  # what the tp axis splits of each parameter; the first pattern that fits counts
    "*.query.weight": "heads@tp embed",
    "*.key.weight": "heads@tp embed",
    "*.value.weight": "heads@tp embed",
    "*.out.weight": "embed heads@tp",
    "*.gate.weight": "hidden@tp embed",
    "*.up.weight": "hidden@tp embed",
    "*.down.weight": "embed hidden@tp",
    "head.weight": "byte@tp embed",
    "embedding.weight": "byte@tp embed",
    "*norm.weight": "embed",
}


# ------------------------------------------------------------------------------------ parallelism


class ParallelBlock(Block):
    """The same block, of DTensors on `tp`: the sequence is split between its parts, heads and hidden units within."""

    def __init__(self, size: Size):
        super().__init__(size)
        axes.shard_map(self.attention.heads, "b s h@tp, b s h@tp, b s h@tp -> b s h@tp")

    def forward(self, x: DTensor) -> DTensor:
        attention, mlp = self.attention, self.mlp
        h = gathered(x, self.attention_norm)
        qkv = [
            axes.einsum(h, layer.weight, "b s d, h@tp d -> b s h@tp")
            for layer in (attention.query, attention.key, attention.value)
        ]
        x = x + axes.einsum(attention.heads(*qkv), attention.out.weight, "b s h@tp, d h@tp -> b s@tp d")
        h = gathered(x, self.mlp_norm)
        gate, up = (axes.einsum(h, layer.weight, "b s d, f@tp d -> b s f@tp") for layer in (mlp.gate, mlp.up))
        return x + axes.einsum(F.silu(gate) * up, mlp.down.weight, "b s f@tp, d f@tp -> b s@tp d")


class ParallelTransformer(Transformer):
    """The same model, from DTensors of tokens to DTensors of logits, each rank with its part of the bytes."""

    Block = ParallelBlock

    def forward(self, tokens: DTensor) -> DTensor:
        x = axes.embedding(tokens, self.embedding.weight, "b s, v@tp d -> b s@tp d")
        for block in self.blocks:
            x = block(x)
        return axes.einsum(gathered(x, self.norm), self.head.weight, "b s d, v@tp d -> b s v@tp")


def gathered(x: DTensor, norm: nn.RMSNorm) -> DTensor:
    """The whole sequence, after a norm of each rank's positions."""
    return axes.rearrange(axes.rms_norm(x, "b s@tp d", over="d", weight=norm.weight), "b s@tp d -> b s d")


def parallelize(model: Transformer, mesh: axes.Mesh) -> None:
    """Spread a model over the mesh: its parameters by `SPECS` over `tp`, then by FSDP2 over the rest."""
    axes.shard_module(model, SPECS, mesh["tp"])
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp_replicate", "fsdp"].device_mesh)


# --------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Trained:
    model: Transformer
    losses: list[float]
    seconds: float


def learning_rate(options: Options, step: int) -> float:
    """A short warm-up, then a cosine down to a tenth."""
    warm = min(1.0, (step + 1) / 20)
    return options.lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / options.steps))


def train(options: Options, mesh: axes.Mesh | None = None) -> Trained:
    """Trains on this process alone, or with the other ranks of `mesh`: the same model and data.

    The losses are means over the whole batch, in nats per byte, the same on every rank.
    """
    model = (Transformer if mesh is None else ParallelTransformer)(options.size, options.seed).to(options.device)
    rows = slice(None)
    if mesh is not None:
        parallelize(model, mesh)
        window = (options.batch, options.sequence + 1)
        rows = mesh.sharding("sample@batch byte").local_indices(window)[0]
    # torch picks foreach by itself for plain tensors alone.
    settings = {"lr": options.lr, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "foreach": True}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    text, losses, started = corpus(), [], time.perf_counter()
    generator = torch.Generator().manual_seed(options.seed + 1)
    bar = Bar(options.steps, options.batch * options.sequence, mesh)
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.sequence, (options.batch, 1), generator=generator)
        window = text[starts + torch.arange(options.sequence + 1)][rows].to(options.device)
        loss = batch_loss(model, window, options.batch, mesh)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.show(step, losses[-1])
    return Trained(model, losses, time.perf_counter() - started)


def batch_loss(model: Transformer, window: Tensor, samples: int, mesh: axes.Mesh | None) -> Tensor:
    """The mean loss of all samples, of which this rank has some; and its gradients."""
    tokens, labels = window[:, :-1], window[:, 1:]
    if mesh is None:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        return loss.detach()
    tokens, labels = (axes.shard(x, "b s", mesh=mesh["tp"]) for x in (tokens, labels))
    # Ranks may have other numbers of samples. FSDP2 takes the mean over ranks, and so do we.
    share = mesh.names["batch"] / (samples * labels.shape[1])
    loss = axes.cross_entropy(model(tokens), labels, "b s v@tp, b s -> ", "sum") * share
    loss.backward()
    return axes.pmean(axes.to_local(loss.detach()), "batch", mesh=mesh)


def train_on_mesh(options: Options) -> list[float]:
    """What each rank of the job does: trains, shows what was made for it, writes the checkpoint."""
    torch.set_num_threads(1)  # the ranks share the machine's cores
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = axes.init_mesh(*DECLARATION, device_type=options.device, **options.axis_sizes)
    if dist.get_rank() == 0:
        print(f"{mesh}\n", flush=True)
    trained = train(options, mesh)
    show_communicators()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # meant so
        dcp.save({"model": trained.model.state_dict()}, checkpoint_id=options.checkpoint)
    return trained.losses


# ------------------------------------------------------------------------------------- comparing

AGREEMENT = 1e-3
"""The largest relative difference that the two loss curves may have."""


def compare(options: Options, many: list[float], ranks: int) -> int:
    """Trains in this process alone, compares, and lets the checkpoint write a line; exit status."""
    torch.set_num_threads(1)  # as each rank had; more don't help a model of this size
    one = train(options).losses
    worst = show_curves(many, one, ranks)
    print(f"\nlargest relative difference over {len(one)} steps: {worst:.1e}")
    print(f"loss of the last step: {many[-1]:.3f} nats per byte")
    line = write(read_checkpoint(options), options.prompt.encode(), 120, options.sequence)
    print(f"{options.checkpoint}, read back by one process, writes:\n\n  {line}\n")
    if not worst <= AGREEMENT:  # so is a NaN
        print(f"train.py: the loss curves differ by more than {AGREEMENT}", file=sys.stderr)
        return 1
    return 0


def read_checkpoint(options: Options) -> Transformer:
    """The whole model in this process, from what the ranks wrote of their shards."""
    model = Transformer(options.size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # meant so
        dcp.load({"model": model.state_dict()}, checkpoint_id=options.checkpoint, no_dist=True)
    return model


def read_options(arguments: list[str] | None = None) -> Options:
    return read(DECLARATION, arguments)


def main(arguments: list[str] | None = None) -> int:
    options = read_options(arguments)
    if "RANK" in os.environ:  # torchrun started this process and its siblings
        losses = train_on_mesh(options)
        first = dist.get_rank() == 0
        axes.destroy_process_groups()
        return compare(options, losses, options.ranks) if first else 0
    every = axes.launch(train_on_mesh, options.ranks, options, device_type=options.device)
    return compare(options, every[0], options.ranks)


if __name__ == "__main__":
    sys.exit(main())
