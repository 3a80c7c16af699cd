"""Train a small transformer on real English over eight processes, then on one, and compare.

    make demo                                                   # eight local processes, on CPUs
    torchrun --nproc-per-node 8 examples/train.py               # the same under torchrun
    torchrun --nproc-per-node 8 examples/train.py --device cuda # on GPUs, over NCCL

The mesh has three axes, `dp_replicate fsdp tp`, declared once. Each parameter has a spec that says
what `tp` splits (tensor parallel, through DTensor); FSDP2 splits it further over `fsdp` and keeps a
copy per `dp_replicate`; the batch is split over both, under the name `batch`. The model itself
(transformer.py) is plain PyTorch. The text is the reference that Python ships, 466 kB.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import math
import os
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformer import Size, Transformer, write

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
    "embedding.weight": "byte embed",
    "*norm.weight": "embed",
}

MOST_LOCAL = 64
"""More processes than this on one machine are a mistake."""

AGREEMENT = 1e-3
"""The largest relative difference that the two loss curves may have."""


# ------------------------------------------------------------------------------------ parallelism


def parallelize(model: Transformer, mesh: axes.Mesh) -> Transformer:
    """The model spread over the mesh: its parameters by `SPECS` on `tp`, then FSDP2 on the rest.

    Inside, every activation is a DTensor on `tp`. Attention alone works on this rank's own heads,
    as plain tensors. What a row-parallel layer leaves pending is summed right there, and so is the
    gradient that a column-parallel one leaves, rather than wherever DTensor would next want to.
    """
    tp = mesh["tp"]
    for name, parameter in list(model.named_parameters()):
        spec = next(spec for pattern, spec in SPECS.items() if fnmatch.fnmatch(name, pattern))
        owner, _, leaf = name.rpartition(".")
        sharded = axes.shard(parameter.detach(), spec, mesh=tp)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(sharded))

    whole = tp.sharding("batch sequence embed").placements

    def enter(module: nn.Module, arguments: tuple[Tensor]) -> DTensor:
        return axes.from_local(arguments[0], "batch sequence", mesh=tp)

    def leave(module: nn.Module, arguments: object, logits: DTensor) -> Tensor:
        return axes.unshard(logits)

    def own_heads(module: nn.Module, arguments: tuple[DTensor, ...]) -> tuple[Tensor, ...]:
        return tuple(axes.to_local(x) for x in arguments)

    def all_heads(module: nn.Module, arguments: object, mixed: Tensor) -> DTensor:
        return axes.from_local(mixed, "batch sequence heads@tp", mesh=tp)

    def summed(module: nn.Module, arguments: object, x: DTensor) -> DTensor:
        return x.redistribute(placements=whole)  # forward the value, backward its gradient

    for block in model.blocks:
        block.attention.heads.register_forward_pre_hook(own_heads)
        block.attention.heads.register_forward_hook(all_heads)
        for layer in (block.attention_norm, block.attention.out, block.mlp_norm, block.mlp.down):
            layer.register_forward_hook(summed)
    model.norm.register_forward_hook(summed)

    data_parallel = mesh["dp_replicate", "fsdp"].device_mesh
    for block in model.blocks:
        fully_shard(block, mesh=data_parallel)
    fully_shard(model, mesh=data_parallel)
    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave)
    return model


# --------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    steps: int = 200
    batch: int = 16
    width: int = 128
    layers: int = 2
    heads: int = 4
    sequence: int = 64
    lr: float = 3e-3
    seed: int = 0
    device: str = "cpu"
    ranks: int = 8
    dp_replicate: int = 2
    tp: int = 2
    prompt: str = "The "
    checkpoint: Path = Path("build/checkpoint")

    @property
    def size(self) -> Size:
        return Size(self.width, self.layers, self.heads, self.sequence)

    @property
    def axis_sizes(self) -> dict[str, int]:
        return {"dp_replicate": self.dp_replicate, "tp": self.tp}


@dataclass(frozen=True)
class Trained:
    model: Transformer
    losses: list[float]
    seconds: float


def corpus() -> Tensor:
    """The text as bytes."""
    text = "\n\n".join(topics.values()).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def learning_rate(options: Options, step: int) -> float:
    """A short warm-up, then a cosine down to a tenth."""
    warm = min(1.0, (step + 1) / 20)
    return options.lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / options.steps))


def train(options: Options, mesh: axes.Mesh | None = None) -> Trained:
    """Trains on this process alone, or with the other ranks of `mesh`: the same model and data.

    The losses are means over the whole batch, in nats per byte, the same on every rank.
    """
    device = torch.device(options.device)
    model = Transformer(options.size, options.seed).to(device)
    rows = slice(None)
    if mesh is not None:
        parallelize(model, mesh)
        window = (options.batch, options.sequence + 1)
        rows = mesh.sharding("sample@batch byte").local_indices(window)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    text, losses, started = corpus(), [], time.perf_counter()
    generator = torch.Generator().manual_seed(options.seed + 1)
    bar = Bar(options, mesh)
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.sequence, (options.batch, 1), generator=generator)
        window = text[starts + torch.arange(options.sequence + 1)][rows].to(device)
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(batch_mean(loss.detach(), mesh))
        bar.show(step, losses[-1])
    return Trained(model, losses, time.perf_counter() - started)


def batch_mean(loss: Tensor, mesh: axes.Mesh | None) -> float:
    """The mean over the ranks that had different samples."""
    if mesh is not None:
        batch = mesh.axis("batch")
        dist.all_reduce(loss, group=batch.group)
        loss = loss / batch.size
    return loss.item()


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


# ---------------------------------------------------------------------------------------- showing


class Bar:
    """Progress with the loss and the speed: one line that grows, or ten lines in a log."""

    def __init__(self, options: Options, mesh: axes.Mesh | None):
        self.steps, self.tokens = options.steps, options.batch * options.sequence
        self.who = "1 process" if mesh is None else f"{mesh.size} processes"
        self.silent = mesh is not None and mesh.rank != 0
        self.alive = sys.stdout.isatty()
        self.started = time.perf_counter()

    def show(self, step: int, loss: float) -> None:
        done, tenth = step + 1, max(1, self.steps // 10)
        if self.silent or not (self.alive or done % tenth == 0 or done == self.steps):
            return
        speed = done * self.tokens / (time.perf_counter() - self.started)
        filled = 24 * done // self.steps
        line = (
            f"{self.who:>12}  {'█' * filled}{'░' * (24 - filled)}  step {done:>3}/{self.steps}"
            f"  loss {loss:.4f}  {speed:,.0f} tokens/s"
        )
        if self.alive:
            print(f"\r{line}", end="\n" if done == self.steps else "", flush=True)
        else:
            print(line, flush=True)


def show_communicators() -> None:
    """Prints the job's communicators, each once, by the names that share it."""
    mine = [(made.names, made.backend, tuple(made.ranks)) for made in axes.process_groups()]
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if dist.get_rank() != 0:
        return
    distinct = sorted({row for rows in every for row in rows})
    print(f"\ncommunicators: {len(distinct)} in the job, {len(mine)} of them with this rank")
    for (names, backend), rows in itertools.groupby(distinct, key=lambda row: row[:2]):
        members = " | ".join(" ".join(map(str, ranks)) for _, _, ranks in rows)
        print(f"  {', '.join(names) or '(default)':<18} {backend:<6} ranks {members}")
    print(flush=True)


def show_curves(many: list[float], one: list[float], ranks: int) -> float:
    """Prints both loss curves side by side; their largest relative difference at any step."""
    differences = [abs(a - b) / b for a, b in zip(many, one, strict=True)]
    print(f"\n  step  {f'{ranks} processes':>12}  {'1 process':>10}  difference")
    for step in sorted({*range(0, len(one), max(1, len(one) // 20)), len(one) - 1}):
        bar = "▪" * round(40 * one[step] / max(one))
        print(f"  {step + 1:>4}  {many[step]:>12.6f}  {one[step]:>10.6f}  {differences[step]:>10.1e}  {bar}")
    return math.nan if any(map(math.isnan, differences)) else max(differences)


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


# ---------------------------------------------------------------------------------------- options


class Parser(argparse.ArgumentParser):
    """Bad options get one line, from one rank."""

    def error(self, message: str) -> NoReturn:
        first = os.environ.get("RANK", "0") == "0"
        self.exit(2, f"{self.prog}: {message}\n" if first else None)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


positive.__name__ = "positive whole number"  # argparse says "invalid positive whole number value"


def read_options(arguments: list[str] | None = None) -> Options:
    """The options, checked as far as one process can, so that nothing starts that would fail."""
    default = Options()
    parser = Parser(prog="train.py", description="Train a small transformer on eight processes.")
    for name, meaning in {
        "steps": "optimizer steps",
        "batch": "samples per step, over all ranks",
        "width": "size of the residual stream",
        "layers": "blocks of the transformer",
        "heads": "attention heads",
        "sequence": "bytes per sample",
        "ranks": "local processes, where torchrun doesn't say",
        "dp_replicate": "copies of the model",
        "tp": "ranks that share each matrix",
    }.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=positive, default=getattr(default, name), help=meaning)
    parser.add_argument("--lr", type=float, default=default.lr, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default.device)
    parser.add_argument("--prompt", default=default.prompt, help="what the generated line starts with")
    parser.add_argument("--checkpoint", type=Path, default=default.checkpoint, help="folder to write")
    found = vars(parser.parse_args(arguments))
    options = Options(**{**found, "ranks": int(os.environ.get("WORLD_SIZE", found["ranks"]))})
    wrong = what_is_wrong(options)
    if wrong:
        parser.error(wrong)
    return options


def what_is_wrong(options: Options) -> str | None:
    try:
        mesh = axes.Mesh(*DECLARATION, ranks=range(options.ranks), **options.axis_sizes)
    except axes.AxesError as error:
        return " ".join(str(error).split())
    batch, local = mesh.names["batch"], int(os.environ.get("LOCAL_WORLD_SIZE", options.ranks))
    if options.batch % batch:
        return f"--batch {options.batch} doesn't divide over the {batch} ranks of axis 'batch'"
    if options.heads % options.tp:
        return f"--heads {options.heads} don't divide over --tp {options.tp}"
    if options.width % (2 * options.heads):
        return f"--width {options.width} isn't a multiple of 2 * --heads {options.heads}"
    if not (options.lr > 0 and math.isfinite(options.lr)):
        return f"--lr is a number above 0, found {options.lr}"
    if not options.prompt:
        return "--prompt has at least one character"
    if options.sequence >= len(corpus()):
        return f"--sequence {options.sequence} is longer than the text of {len(corpus())} bytes"
    if local > MOST_LOCAL:
        return f"--ranks {local} is more than one machine should start ({MOST_LOCAL})"
    if options.device == "cuda" and torch.cuda.device_count() < local:
        return f"--device cuda needs a GPU per rank: {local}, found {torch.cuda.device_count()}"
    try:
        options.checkpoint.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--checkpoint {options.checkpoint} can't be made: {error.strerror}"
    return None


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
