"""How llama.py and moe_llama.py train: pipeline stages, microbatches, a weight that two stages share, one norm.

    model = stage_of(model, mesh)                                   # this rank's blocks, under the names they had
    run = forward_backward(model, loss, mesh, microbatches)         # torch's schedule, or one batch where pp is 1
    loss = run(tokens, labels)                                      # the mean of all tokens, on every rank

A stage is a region of a module: this rank's plain shards come in and go out, and torch's schedules send them. Its mesh
has no `pp`, for along it every rank has other tensors.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from support import Bar, flag, schedule_of, show_curves
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from train_options import corpus

import axes

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


@dataclass(frozen=True)
class Training:
    """What both scripts can be told. `batch` is the samples per step over all ranks."""

    mesh: str = ""
    steps: int = flag(40, "optimizer steps")
    batch: int = flag(8, "samples per step, over all ranks")
    sequence: int = flag(64, "bytes per sample")
    words: int = flag(256, "in the vocabulary, which begins with all bytes", least=256)
    microbatches: int = flag(2, "that a rank's samples are cut into where pp isn't 1")
    schedule: str = flag("1f1b", "of the microbatches", choices=list(SCHEDULES))
    tied: int = flag(0, "1: one weight is the embedding and the head", least=0)
    lr: float = flag(3e-3, "learning rate")
    clip: float = flag(1.0, "largest norm of all gradients")
    seed: int = flag(0, "of the weights and the samples", least=0)
    recompute: int = flag(0, "1: recompute the blocks in backward", least=0)
    compile: int = flag(0, "1: torch.compile of every block", least=0)
    dtype: str = flag("float32", "of weights and activations", choices=["float32", "float64"])
    device: str = flag("cpu", "what to train on", choices=["cpu", "cuda"])
    checkpoint: str = flag("", "folder to write a checkpoint to")
    resume: int = flag(0, "1: begin with the checkpoint, whatever mesh wrote it", least=0)


class Curves(NamedTuple):
    """The loss and the norm of all gradients, step by step."""

    losses: list[float]
    norms: list[float]


O = TypeVar("O", bound=Training)  # noqa: E741 - options


# ---------------------------------------------------------------------------------------- mesh


def declaration(text: str, names: Sequence[str]) -> str:
    """The text of a mesh with all of these axes: one that isn't written has size 1."""
    written = axes.Mesh(text).axis_names if text else ()
    if extra := set(written) - set(names):
        raise axes.MeshError(f"has the axes {', '.join(names)}; found {min(extra)!r} in {text!r}")
    return " ".join([text, *(f"{name}=1" for name in names if name not in written)])


def mesh_of(options: Training, names: Sequence[str], *equations: str, **sizes: int) -> axes.Mesh:
    """The mesh of the running job, printed by its first rank; this rank's device and threads are set."""
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    mesh = axes.init_mesh(declaration(options.mesh, names), *equations, device_type=options.device, **sizes)
    if mesh.rank == 0:
        print(f"{mesh}\n", flush=True)
    return mesh


def summed(model: nn.Module) -> nn.Module:
    """Have FSDP2 add gradients up and not divide: a loss is a mean already, and gradients are its summands."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


# --------------------------------------------------------------------------------------- stages


def stage_of(model: nn.Module, mesh: axes.Mesh) -> nn.Module:
    """Take from a whole model, which is on `meta` and costs nothing, what other stages have."""
    pp, layers = mesh.axis("pp"), len(model.blocks)
    model.first, model.last = pp.index == 0, pp.index == pp.size - 1
    for number in range(layers):
        if number * pp.size // layers != pp.index:
            del model.blocks[str(number)]
    if not (model.first or (model.last and model.tied)):
        model.embedding = None
    if not model.last:
        model.norm = model.head = None
    return model


def forward_backward(
    model: nn.Module, loss: nn.Module, mesh: axes.Mesh, microbatches: int, schedule: str
) -> Callable[[Tensor, Tensor], Tensor]:
    """From this rank's tokens and labels to the mean loss of all; gradients are in the parameters then."""
    pp, like = mesh.axis("pp"), next(model.parameters())

    def at_once(tokens: Tensor, labels: Tensor) -> Tensor:
        found = loss(model(tokens), labels)
        found.backward()
        return found.detach()

    if pp.size == 1:
        return at_once

    running = lru_cache(maxsize=1)(partial(schedule_of, SCHEDULES[schedule], model, loss, mesh, microbatches))

    def in_stages(tokens: Tensor, labels: Tensor) -> Tensor:
        found: list[Tensor] = []
        running(*tokens.shape).step(
            *([tokens.contiguous()] if model.first else []), target=labels if model.last else None, losses=found
        )
        mean = torch.stack(found).mean().detach() if model.last else torch.zeros((), dtype=like.dtype).to(like.device)
        return axes.psum(mean, "pp", mesh=mesh)  # the last stage has it, the others add nothing

    return in_stages


class Tied:
    """A weight that the first stage and the last one have: the embedding, where it is the head as well.

    Both stages draw the same values for it, by its name. The sum of their gradients steps it, and counts once.
    """

    def __init__(self, model: nn.Module, mesh: axes.Mesh, device: str):
        pp, self.copies = mesh.axis("pp"), []
        self.weight = model.embedding if model.tied and pp.size > 1 else None  # None between the two ends
        if self.weight is None:
            return
        self.copies = [self.weight] if model.last else []
        lines = pp.all_ranks()
        ends = [line[0] for line in lines] + [line[-1] for line in lines]
        self.ends = axes.init_mesh("ends=2 line", ranks=ends, device_type=device)

    def add(self) -> None:
        """Give the weight the sum of both stages' gradients."""
        if self.weight is not None:
            gradient = axes.to_local(self.weight.grad)
            gradient.copy_(axes.psum(gradient, "ends", mesh=self.ends))


# ----------------------------------------------------------------------------------- checkpoints

BY_NAME = states.StateDictOptions(flatten_optimizer_state_dict=True)
"""Each state and each setting of the optimizer under the name of its parameter: stages have other parameters."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What a checkpoint has, under the names of the whole model, so that any mesh can go on with it."""
    return {
        "model": model.state_dict(),
        "optimizer": states.get_optimizer_state_dict(model, optimizer, options=BY_NAME),
        "step": step,
    }


def resumed(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> int:
    """Go on with what a checkpoint has; the steps that were done."""
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=folder)
    states.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=BY_NAME)
    return state["step"]


# ------------------------------------------------------------------------------------- training


def trained(options: Training, mesh: axes.Mesh, model: nn.Module, loss: nn.Module) -> Curves:
    """Train this rank's stage; the loss and the norm of all gradients of each step."""
    optimizer = axes.nn.local_optimizer(torch.optim.AdamW, model.parameters(), lr=options.lr)
    run = forward_backward(model, loss, mesh, options.microbatches, options.schedule)
    tied = Tied(model, mesh, options.device)
    done = resumed(model, optimizer, options.checkpoint) if options.resume else 0
    rows, columns = mesh.sharding("b@dp s@cp").local_indices((options.batch, options.sequence))
    text, found, generator = corpus(), Curves([], []), torch.Generator().manual_seed(options.seed)
    draw = partial(torch.randint, len(text) - options.sequence, (options.batch, 1), generator=generator)
    for _ in range(done):
        draw()  # the samples of the steps that were done
    bar = Bar(options.steps, options.batch * options.sequence, mesh)
    for step in range(options.steps):
        starts = draw()
        window = text[starts + torch.arange(options.sequence + 1)][rows].to(options.device)
        mean = run(window[:, :-1][:, columns], window[:, 1:][:, columns])
        tied.add()
        norm = axes.nn.clip_grad_norm_(model.parameters(), options.clip, stages="pp", copies=tied.copies, mesh=mesh)
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(mean.item())
        found.norms.append(norm.item())
        bar.show(step, found.losses[-1])
    if options.checkpoint and not options.resume:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # meant so
            dcp.save(state_of(model, optimizer, done + options.steps), checkpoint_id=options.checkpoint)
    return found


def largest_difference(many: list[float], one: list[float]) -> float:
    """The largest relative difference at any step; not a number, if one isn't."""
    differences = [abs(a - b) / b for a, b in zip(many, one, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def compared(options: O, train: Callable[[O], Curves], names: Sequence[str]) -> int:
    """Train on the mesh and on one device, and print both; the exit status."""
    if "RANK" in os.environ:  # torchrun started this process and its siblings
        losses = train(options).losses
        axes.destroy_process_groups()
        return 0 if all(map(math.isfinite, losses)) else 1
    ranks, started = axes.Mesh(declaration(options.mesh, names)).size, time.time()
    many = axes.launch(train, ranks, options, device_type=options.device)[0]
    one = axes.launch(train, 1, alone(options), device_type=options.device)[0]
    worst = show_curves(many.losses, one.losses, ranks), largest_difference(many.norms, one.norms)
    print(f"\nlargest relative difference over {len(one.losses)} steps: ", end="")
    print(f"{worst[0]:.1e} of losses, {worst[1]:.1e} of norms    ({time.time() - started:.0f} s)")
    return 0 if all(each <= 1e-3 for each in worst) else 1


def alone(options: O) -> O:
    """The same on one device; it writes no checkpoint."""
    return replace(options, mesh="", checkpoint=options.checkpoint if options.resume else "")
