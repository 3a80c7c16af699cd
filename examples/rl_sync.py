"""A trainer and a generator, two jobs that share a store: weights go over each round, generated text comes back.

    python examples/rl_sync.py                         # eight local processes, four for each job
    python examples/rl_sync.py --rounds 10 --steps 50

The trainer runs train.py's model on `fsdp=2 tp=2`, by its `SPECS` and FSDP2. The generator runs on `dp=2 tp=2`, with a
part of the prompts on each `dp`, and keeps its weights as servers do: queries, keys and values are one tensor, gate and
up another. Each job has its own `torch.distributed`; neither knows of the other's ranks or mesh. In each round

1. the trainer takes some steps,
2. `link.send` brings its weights into the generator's, where they lie, fused on the way by `FUSED`: one plan for all,
3. the generator continues the prompts, byte by byte, and sends its text and its scores (logits) back,
4. the trainer computes the scores of the same text with its own model, and compares.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from support import flag, read_options, verdict
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from train import DECLARATION, SPECS, ParallelBlock, ParallelTransformer, batch_loss, gathered, parallelize
from train_options import corpus
from transformer import BYTES, Size, Transformer, linear

import axes

LIMIT = 1e-4  # how far the two models' scores may be from one another: the order of sums differs


@dataclass(frozen=True)
class Options:
    """A trainer and a generator that exchange weights and text."""

    rounds: int = flag(3, "rounds of training, sending and generating")
    steps: int = flag(20, "steps of training in each round")
    batch: int = flag(16, "samples of a step", least=2)
    prompts: int = flag(4, "prompts that the generator continues", least=2)
    length: int = flag(24, "bytes that it adds to each")
    width: int = flag(64, "width of the model", least=16)
    layers: int = flag(2, "layers of the model")
    sequence: int = flag(32, "bytes that the model sees", least=2)
    timeout: float = flag(60.0, "seconds that a job waits for the other")

    @property
    def size(self) -> Size:
        return Size(self.width, self.layers, 4, self.sequence)


QKV, GATE_UP = "(r h) d, (r h) d, (r h) d -> (r (h + h + h)) d", "(r f) d, (r f) d -> (r (f + f)) d"
FUSED = {
    ("*.query.weight", "*.key.weight", "*.value.weight"): ("*.qkv.weight", QKV),
    ("*.gate.weight", "*.up.weight"): ("*.gate_up.weight", GATE_UP),
}
"""How the generator's tensors follow from the trainer's: the rows of each of its `r` ranks one behind the other."""


@dataclass(frozen=True)
class Round:
    """What one round came to: the loss of the last step, how far the scores are apart, and a line of the text."""

    loss: float
    distance: float
    text: str


def what_is_wrong(options: Options) -> str | None:
    return "--width divides by 8: 4 heads of an even size" if options.width % 8 else None


def store_at(port: int) -> dist.TCPStore:
    """The store that both jobs reach."""
    return dist.TCPStore("localhost", port, None, False, timeout=timedelta(seconds=60))


@torch.no_grad()
def scores_of(model: Transformer, windows: Tensor, mesh: axes.Mesh) -> Tensor:
    """What the model says of the byte after each window."""
    logits = model(axes.shard(windows, "b s", mesh=mesh["tp"]))
    return axes.to_local(axes.rearrange(logits, "b s v@tp -> b s v"))[:, -1]


def trainer(options: Options, port: int) -> list[Round]:
    """What each rank of the trainer does."""
    torch.set_num_threads(1)
    mesh = axes.init_mesh(*DECLARATION, device_type="cpu", dp_replicate=1, fsdp=2, tp=2)
    model = ParallelTransformer(options.size)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    draw = torch.Generator().manual_seed(1)
    with axes.connect(store_at(port), "trainer", mesh, timeout=options.timeout) as link:
        rounds = []
        for _ in range(options.rounds):
            loss = trained(model, optimizer, options, mesh, draw)
            weights = model.state_dict()
            specs = {name: axes.sharding_of(weight) for name, weight in weights.items()}
            link.send(weights, specs, to="generator", rules=axes.LayoutRules(FUSED, r=2))

            text = torch.empty(options.prompts, options.sequence + options.length, dtype=torch.int64)
            scores = torch.empty(options.prompts, options.length, BYTES)
            whole = {"text": "prompt byte", "scores": "prompt step byte"}  # on each rank
            link.receive(into={"text": text, "scores": scores}, specs=whole, source="generator")

            windows = text[:, :-1].unfold(1, options.sequence, 1).flatten(0, 1)
            own = scores_of(model, windows, mesh).unflatten(0, scores.shape[:2])
            line = bytes(text[0].tolist()).decode(errors="replace")
            rounds.append(Round(loss, float((own - scores).abs().max()), line))
        return rounds


def trained(
    model: Transformer, optimizer: torch.optim.Optimizer, options: Options, mesh: axes.Mesh, draw: torch.Generator
) -> float:
    """Some steps; the loss of the last one."""
    text = corpus()
    rows = mesh.sharding("sample@batch byte").local_indices((options.batch, options.sequence + 1))[0]
    for _ in range(options.steps):
        starts = torch.randint(len(text) - options.sequence, (options.batch, 1), generator=draw)
        loss = batch_loss(model, text[starts + torch.arange(options.sequence + 1)][rows], options.batch, mesh)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


# ------------------------------------------------------------------------------------ the generator

FUSED_SPECS = {name: spec for name, spec in SPECS.items() if not any(name in names for names in FUSED)}
FUSED_SPECS |= {"*.qkv.weight": "heads@tp embed", "*.gate_up.weight": "hidden@tp embed"}


class FusedBlock(ParallelBlock):
    """The same block, with one product for queries, keys and values, and one for gate and up."""

    def __init__(self, size: Size):
        super().__init__(size)
        del self.attention.query, self.attention.key, self.attention.value, self.mlp.gate, self.mlp.up
        self.attention.qkv = linear(size.width, 3 * size.width)
        self.mlp.gate_up = linear(size.width, 2 * size.hidden)

    def forward(self, x: DTensor) -> DTensor:
        attention, mlp = self.attention, self.mlp
        qkv = axes.einsum(gathered(x, self.attention_norm), attention.qkv.weight, "b s d, h@tp d -> b s h@tp")
        q, k, v = axes.rearrange(qkv, "b s (r@tp three h) -> three b s (r@tp h)", r=2, three=3)
        heads = attention.heads(q, k, v)
        x = x + axes.einsum(heads, attention.out.weight, "b s h@tp, d h@tp -> b s@tp d")
        both = axes.einsum(gathered(x, self.mlp_norm), mlp.gate_up.weight, "b s d, f@tp d -> b s f@tp")
        gate, up = axes.rearrange(both, "b s (r@tp two f) -> two b s (r@tp f)", r=2, two=2)
        return x + axes.einsum(F.silu(gate) * up, mlp.down.weight, "b s f@tp, d f@tp -> b s@tp d")


class FusedTransformer(ParallelTransformer):
    Block = FusedBlock


def generator(options: Options, port: int) -> None:
    """What each rank of the generator does."""
    torch.set_num_threads(1)
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    model = FusedTransformer(options.size, seed=2)  # other weights than the trainer's
    axes.shard_module(model, FUSED_SPECS, mesh["tp"])
    starts = torch.arange(options.prompts).unsqueeze(1) * 1000
    rows = mesh.sharding("prompt@dp byte").local_indices((options.prompts, options.sequence))[0]
    prompts = corpus()[starts + torch.arange(options.sequence)][rows]
    with axes.connect(store_at(port), "generator", mesh, timeout=options.timeout) as link:
        for _ in range(options.rounds):
            weights = model.state_dict()
            link.receive(into=weights, specs={name: axes.spec_of(weight) for name, weight in weights.items()})
            text, scores = prompts, []
            for _ in range(options.length):
                scores.append(scores_of(model, text[:, -options.sequence :], mesh))
                text = torch.cat([text, scores[-1].argmax(-1, keepdim=True)], dim=1)
            specs = {"text": "prompt@dp byte", "scores": "prompt@dp step byte"}
            found = {"text": text, "scores": torch.stack(scores, dim=1)}
            parts = {name: axes.from_local(x, specs[name], mesh=mesh) for name, x in found.items()}  # of any size
            link.send(parts, specs, to="trainer")


def main(arguments: list[str] | None = None) -> int:
    options = read_options("rl_sync.py", Options, what_is_wrong, arguments)
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as jobs:
        both = [jobs.submit(axes.launch, job, 4, options, store.port) for job in (trainer, generator)]
        every, _ = (job.result() for job in both)
    for number, found in enumerate(every[0], 1):
        line = "".join(char if char.isprintable() else "·" for char in found.text)
        print(f"round {number}  loss {found.loss:.3f}  scores differ by {found.distance:.1e}  {line}")
    return verdict("rl_sync.py", (found.distance for rank in every for found in rank), LIMIT)


if __name__ == "__main__":
    sys.exit(main())
