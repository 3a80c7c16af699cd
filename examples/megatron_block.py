"""A transformer block as Megatron splits it, in six expressions, against the same written by hand.

Tensor parallel with sequence parallel: between the parts of a block each rank of `tp` has its part
of the sequence (`s@tp`), inside attention its heads (`h@tp`), inside the MLP its hidden units
(`f@tp`). Sequence first, `s b d`, since what is gathered then lies in memory as it arrives.

    "s@tp b d -> s b d"                                      all-gather
    "s b d, (qkv h@tp k) d -> qkv b h@tp s k"                product, and views: q, k and v apart
    "b h@tp s k, d (h@tp k) -> s@tp b d"                     product, reduce-scatter
    "s@tp b d -> s b d"                                      all-gather
    "s b d, f@tp d -> s b f@tp"                              product
    "s b f@tp, d f@tp -> s@tp b d"                           product, reduce-scatter

That is `block` below. It takes DTensors (the *global view*) or plain tensors that hold this rank's
shard (the *local view*), and does the same to both. `block_by_hand` is what people write instead:
autograd functions around `torch.distributed`, as in Megatron-LM. All three train the same weights on
the same data, side by side:

    python examples/megatron_block.py --ranks 2

After Korthikanti and others, "Reducing Activation Recomputation in Large Transformer Models" (2022).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes

Weights = dict[str, Tensor]

HEAD_DIM = 32
LIMIT = 1e-5
WARM_UP = 5

SPECS = {
    "norm1": "d",
    "qkv": f"(qkv=3 h@tp k={HEAD_DIM}) d",  # queries, keys and values in one matrix, each split by heads
    "out": f"d (h@tp k={HEAD_DIM})",
    "norm2": "d",
    "up": "f@tp d",
    "down": "d f@tp",
}
ACTIVATIONS = "s@tp b d"


# --------------------------------------------------------------------------------- six expressions


class View(NamedTuple):
    """What a block does on each rank by itself: a norm of its positions, attention of its heads."""

    norm: Callable[[Tensor, Tensor], Tensor]
    attend: Callable[[Tensor], Tensor]


def block(x: Tensor, w: Weights, view: View) -> Tensor:
    """Attention and MLP of `sequence batch width`, the sequence split over `tp`."""
    h = axes.rearrange(view.norm(x, w["norm1"]), "s@tp b d -> s b d")
    qkv = axes.einsum(h, w["qkv"], "s b d, (qkv h@tp k) d -> qkv b h@tp s k", qkv=3, k=HEAD_DIM)
    x = x + axes.einsum(view.attend(qkv), w["out"], "b h@tp s k, d (h@tp k) -> s@tp b d")
    h = axes.rearrange(view.norm(x, w["norm2"]), "s@tp b d -> s b d")
    h = F.gelu(axes.einsum(h, w["up"], "s b d, f@tp d -> s b f@tp"))
    return x + axes.einsum(h, w["down"], "s b f@tp, d f@tp -> s@tp b d")


def norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.rms_norm(x, scale.shape, scale)


def attend(qkv: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*qkv, is_causal=True)


# The local view. A gradient is what this rank adds to it, unless it is said to be whole and the same
# on all ranks, `same@tp`. So "d | same@tp -> d" is nothing forward, and backward an all-reduce of
# the scale's gradient; "-> | same@tp" is an all-reduce forward, and nothing backward.


def norm_of_shards(x: Tensor, scale: Tensor) -> Tensor:
    return norm(x, axes.rearrange(scale, "d | same@tp -> d"))


def loss_of_shards(y: Tensor, wanted: Tensor) -> Tensor:
    whole = len(y) * axes.axis_size("tp")  # that all shards are as long is known here alone
    return axes.reduce((y - wanted) ** 2, "s@tp b d -> | same@tp", "mean", s=whole)


LOCAL = View(norm_of_shards, attend)


# The global view. A gradient is that of the one loss that there is. `shard_map` makes a function of
# plain tensors one of DTensors.


def loss_of_dtensors(y: DTensor, wanted: DTensor) -> DTensor:
    return axes.reduce((y - wanted) ** 2, "s@tp b d -> ", "mean")


GLOBAL = View(
    axes.shard_map("s@tp b d, d -> s@tp b d")(norm),
    axes.shard_map("qkv b h@tp s k -> b h@tp s k")(attend),
)


# ---------------------------------------------------------------------------------------- by hand

# torch 2.13 has new names for these two, and warns of the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    all_gather(out, x.contiguous(), group=group)
    return out


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    reduce_scatter(out, x.contiguous(), group=group)
    return out


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


class Gather(torch.autograd.Function):
    """The sequence of all ranks; backward the sum of what they say of this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return scattered(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    """This rank's part of the sum over the ranks; backward every rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient, ctx.group), None


class SumOfGradients(torch.autograd.Function):
    """Megatron's f: nothing; backward the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class Sum(torch.autograd.Function):
    """Megatron's g: the sum over the ranks; backward nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def block_by_hand(x: Tensor, w: Weights, group: dist.ProcessGroup) -> Tensor:
    """The same on this rank's plain tensors."""
    h = Gather.apply(norm(x, SumOfGradients.apply(w["norm1"], group)), group)
    qkv = F.linear(h, w["qkv"]).unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 1, 3, 0, 4)
    heads = attend(qkv).permute(2, 0, 1, 3).flatten(2)
    x = x + Scatter.apply(F.linear(heads, w["out"]), group)
    h = Gather.apply(norm(x, SumOfGradients.apply(w["norm2"], group)), group)
    h = F.gelu(F.linear(h, w["up"]))
    return x + Scatter.apply(F.linear(h, w["down"]), group)


def loss_by_hand(y: Tensor, wanted: Tensor, group: dist.ProcessGroup) -> Tensor:
    return Sum.apply(((y - wanted) ** 2).mean() / group.size(), group)


# --------------------------------------------------------------------------------------- training


class Size(NamedTuple):
    width: int = 256
    heads: int = 8
    sequence: int = 256
    batch: int = 2


@dataclass
class Training:
    """One of the versions: its weights and data, as tensors of its kind."""

    block: Callable[[Tensor, Weights], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    weights: Weights
    data: list[Tensor]

    def __post_init__(self) -> None:
        for weight in self.weights.values():
            weight.requires_grad_()
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=1e-2, eps=1e-6)

    def step(self) -> float:
        """The loss before the step, the same on every rank."""
        x, wanted = self.data
        loss = self.loss(self.block(x, self.weights), wanted)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def versions(mesh: axes.Mesh, size: Size, dtype: torch.dtype) -> dict[str, Training]:
    """The same weights and data in each version, whose steps run inside `with mesh:`."""
    generator = torch.Generator().manual_seed(0)
    d, inner, hidden = size.width, size.heads * HEAD_DIM, 4 * size.width
    shapes = {"norm1": [d], "qkv": [3 * inner, d], "out": [d, inner], "norm2": [d], "up": [hidden, d]}
    shapes["down"] = [d, hidden]

    def numbers(shape: list[int], spec: str) -> DTensor:
        whole = torch.randn(shape, generator=generator, dtype=dtype) / shape[-1] ** 0.5
        return axes.shard(whole, spec, mesh=mesh)

    weights = {name: numbers(shape, SPECS[name]) for name, shape in shapes.items()}
    data = [numbers([size.sequence, size.batch, d], ACTIVATIONS) * d**0.5 for _ in range(2)]
    group = mesh.axis("tp").group
    found = {
        "by hand": (partial(block_by_hand, group=group), partial(loss_by_hand, group=group), axes.to_local),
        "plain shards": (partial(block, view=LOCAL), loss_of_shards, axes.to_local),
        "DTensors": (partial(block, view=GLOBAL), loss_of_dtensors, lambda x: x),
    }
    return {
        name: Training(block_, loss, {at: kind(w).clone() for at, w in weights.items()}, [kind(x) for x in data])
        for name, (block_, loss, kind) in found.items()
    }


def train(size: Size, steps: int, dtype: torch.dtype = torch.float32) -> tuple[dict, dict]:
    """The losses of each version, and the seconds of its steps. The versions take turns, step by step."""
    torch.set_num_threads(1)
    losses, seconds = {}, {}
    with axes.init_mesh("tp", device_type="cpu") as mesh:
        trainings = versions(mesh, size, dtype)
        for step in range(steps):
            for name, training in list(trainings.items())[:: 1 if step % 2 else -1]:
                dist.barrier()
                started = time.perf_counter()
                losses.setdefault(name, []).append(training.step())
                seconds.setdefault(name, []).append(time.perf_counter() - started)
    return losses, seconds


def times_by_hand(seconds: dict[str, list[float]], version: str) -> float:
    """The median ratio of steps that followed each other: what else the machine does meets both."""
    pairs = zip(seconds[version], seconds["by hand"], strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    return statistics.median(ratios[WARM_UP:] or ratios)


def collectives(ranks: int, size: Size) -> dict[str, dict[str, int]]:
    """The collectives of a step of each version, counted in a simulated world, which sends nothing.

    (Over gloo axes sends a reduce-scatter as an exchange and sums what arrives, which is faster there.)
    """
    names = "all_gather", "all_reduce", "all_to_all", "reduce_scatter"
    found = {}
    with axes.simulate(ranks), axes.init_mesh("tp", device_type="cpu") as mesh:
        for version, training in versions(mesh, size, torch.float32).items():
            with CommDebugMode() as sent:
                training.step()
            counts = {str(op).replace("_", ""): count for op, count in sent.get_comm_counts().items()}
            kinds = {name: sum(n for op, n in counts.items() if name.replace("_", "") in op) for name in names}
            found[version] = {name: count for name, count in kinds.items() if count}
    return found


# ---------------------------------------------------------------------------------------- options


class Parser(argparse.ArgumentParser):
    """A bad option gets one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="megatron_block.py", description="A transformer block by expressions and by hand.")
    parser.add_argument("--ranks", type=int, default=2, help="local processes, all on tp")
    parser.add_argument("--steps", type=int, default=40, help="steps of each version; the first few aren't timed")
    parser.add_argument("--width", type=int, default=256, help="size of the residual stream")
    parser.add_argument("--heads", type=int, default=8, help="attention heads, a multiple of --ranks")
    parser.add_argument("--sequence", type=int, default=256, help="positions, a multiple of --ranks")
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    options = parser.parse_args(arguments)
    wrong = what_is_wrong(options)
    if wrong:
        parser.error(wrong)
    return options


def what_is_wrong(options: argparse.Namespace) -> str | None:
    for name, value in vars(options).items():
        if value < 1:
            return f"--{name} is a whole number from 1; found {value}"
    if options.ranks > 64:
        return f"--ranks {options.ranks} is more than one machine should start (64)"
    for name in ("heads", "sequence"):
        if getattr(options, name) % options.ranks:
            return f"--{name} {getattr(options, name)} doesn't divide over --ranks {options.ranks}"
    if 4 * options.width % options.ranks:
        return f"--width {options.width}: 4 times that doesn't divide over --ranks {options.ranks}"
    return None


def main(arguments: list[str] | None = None) -> int:
    options = read_options(arguments)
    size = Size(options.width, options.heads, options.sequence, options.batch)
    sent = collectives(options.ranks, size)
    losses, seconds = axes.launch(train, options.ranks, size, options.steps)[0]

    wrong = []
    for version, counts in sent.items():
        found = losses[version]
        milliseconds, ratio = 1e3 * statistics.median(seconds[version]), times_by_hand(seconds, version)
        off = float((torch.tensor(found) / torch.tensor(losses["by hand"]) - 1).abs().max())
        print(f"{version}: {', '.join(f'{count} {kind}' for kind, count in counts.items())} in a step")
        print(f"  {milliseconds:.1f} ms a step, {ratio:.2f} times by hand")
        print(f"  loss {found[0]:.6f} to {found[-1]:.6f}, by hand but for {off:.1e}")
        if not off < LIMIT:  # so is a NaN
            wrong.append(f"the losses of {version} differ by {off:.1e} from those by hand; expected {LIMIT}")
        if counts != sent["by hand"]:
            wrong.append(f"{version} sent other collectives than those by hand")
    for line in wrong:
        print(f"megatron_block.py: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
