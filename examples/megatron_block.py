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
shard (the *local view*), and does the same to both. megatron_by_hand.py is what people write instead.
All three train the same weights on the same data, side by side:

    python examples/megatron_block.py --ranks 2

After Korthikanti and others, "Reducing Activation Recomputation in Large Transformer Models" (2022).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron_by_hand import block_by_hand, loss_by_hand
from support import collectives as kinds
from support import flag, in_turns, in_words, median_ratio, too_many
from support import read_options as read_flags
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes

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


def block(x: Tensor, w: dict[str, Tensor], view: View) -> Tensor:
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


# --------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Size:
    width: int = flag(256, "size of the residual stream")
    heads: int = flag(8, "attention heads, a multiple of --ranks")
    sequence: int = flag(256, "positions, a multiple of --ranks")
    batch: int = flag(2, "sequences")


@dataclass
class Training:
    """One of the versions: its weights and data, as tensors of its kind."""

    block: Callable[[Tensor, dict[str, Tensor]], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    weights: dict[str, Tensor]
    data: list[Tensor]

    def __post_init__(self) -> None:
        for weight in self.weights.values():
            weight.requires_grad_()
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=1e-2, eps=1e-6, foreach=True)

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
    by_hand = partial(block_by_hand, group=group, head_dim=HEAD_DIM)
    found = {
        "by hand": (by_hand, partial(loss_by_hand, group=group), axes.to_local),
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
    with axes.init_mesh("tp", device_type="cpu") as mesh:
        trainings = versions(mesh, size, dtype)
        return in_turns({name: training.step for name, training in trainings.items()}, steps)


def collectives(ranks: int, size: Size) -> dict[str, dict[str, int]]:
    """The collectives of a step of each version, counted in a simulated world, which sends nothing.

    (Over gloo axes sends a reduce-scatter as an exchange and sums what arrives, which is faster there.)
    """
    found = {}
    with axes.simulate(ranks), axes.init_mesh("tp", device_type="cpu") as mesh:
        for version, training in versions(mesh, size, torch.float32).items():
            with CommDebugMode() as sent:
                training.step()
            found[version] = kinds(sent)
    return found


# ---------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Options(Size):
    """A transformer block by expressions and by hand."""

    ranks: int = flag(2, "local processes, all on tp")
    steps: int = flag(40, "steps of each version; the first few aren't timed")


def what_is_wrong(options: Options) -> str | None:
    for name in ("heads", "sequence"):
        if getattr(options, name) % options.ranks:
            return f"--{name} {getattr(options, name)} doesn't divide over --ranks {options.ranks}"
    if 4 * options.width % options.ranks:
        return f"--width {options.width}: 4 times that doesn't divide over --ranks {options.ranks}"
    return too_many(options.ranks)


read_options = partial(read_flags, "megatron_block.py", Options, what_is_wrong)


def main(arguments: list[str] | None = None) -> int:
    options = read_options(arguments)
    sent = collectives(options.ranks, options)
    losses, seconds = axes.launch(train, options.ranks, options, options.steps)[0]

    wrong = []
    for version, counts in sent.items():
        found = losses[version]
        milliseconds = 1e3 * statistics.median(seconds[version])
        ratio = median_ratio(seconds[version], seconds["by hand"], WARM_UP)
        off = float((torch.tensor(found) / torch.tensor(losses["by hand"]) - 1).abs().max())
        print(f"{version}: {in_words(counts)} in a step")
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
