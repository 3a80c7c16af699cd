"""Shared by the examples: options, counts of collectives, comparisons with one device, printing."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes

O = TypeVar("O")  # noqa: E741 - options

MOST_LOCAL = 64
"""More processes than this on one machine are a mistake."""


# ---------------------------------------------------------------------------------------- options


def flag(default: Any, meaning: str, choices: Sequence[str] | None = None, least: int = 1) -> Any:
    """A field of a dataclass of options: its default, what `--help` says of it, and what it may be."""
    return field(default=default, metadata={"help": meaning, "choices": choices, "least": least})


class Parser(argparse.ArgumentParser):
    """Bad options get one line, from one rank."""

    def error(self, message: str) -> NoReturn:
        first = os.environ.get("RANK", "0") == "0"
        self.exit(2, f"{self.prog}: {message}\n" if first else None)


def read_options(
    script: str, options: type[O], what_is_wrong: Callable[[O], str | None], arguments: list[str] | None = None
) -> O:
    """The command line as a dataclass, checked before anything starts that would fail."""
    parser = Parser(prog=script, description=options.__doc__)
    for each in fields(options):  # type: ignore[arg-type]
        settings = {"help": each.metadata["help"], "choices": each.metadata["choices"]}
        parser.add_argument(option(each.name), type=type(each.default), default=each.default, **settings)
    found = vars(parser.parse_args(arguments))
    for each in fields(options):  # type: ignore[arg-type]
        value, least = found[each.name], each.metadata["least"]
        if isinstance(value, int) and value < least:
            parser.error(f"{option(each.name)} is a whole number from {least}; found {value}")
        if isinstance(value, float) and not 0 < value < math.inf:
            parser.error(f"{option(each.name)} is a number above 0; found {value}")
    wrong = what_is_wrong(options(**found))
    if wrong:
        parser.error(wrong)
    return options(**found)


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def too_many(ranks: int) -> str | None:
    """What is wrong with as many local processes."""
    return f"{ranks} ranks are more than one machine should start ({MOST_LOCAL})" if ranks > MOST_LOCAL else None


def undeclared(declaration: Sequence[str], ranks: int | None, sizes: Mapping[str, int]) -> str | None:
    """What is wrong with a mesh, in one line."""
    try:
        axes.Mesh(*declaration, ranks=None if ranks is None else range(ranks), **sizes)
    except axes.AxesError as error:
        return " ".join(str(error).split())
    return None


# ---------------------------------------------------------------------------------- what is sent

KINDS = "all_gather", "all_reduce", "all_to_all", "reduce_scatter"


def collectives(sent: CommDebugMode) -> dict[str, int]:
    """How many collectives of each kind were sent."""
    counts = {str(op).replace("_", ""): count for op, count in sent.get_comm_counts().items()}
    found = {kind: sum(n for op, n in counts.items() if kind.replace("_", "") in op) for kind in KINDS}
    return {kind: count for kind, count in found.items() if count}


def in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "nothing"


# ------------------------------------------------------------------------------------- comparing


class Compared(NamedTuple):
    """How far a function of DTensors is from one device, with gradients, and what it sends each way."""

    distance: dict[str, float]
    forward: dict[str, int]
    backward: dict[str, int]


def compared(
    fn: Callable[..., DTensor],
    one: Callable[..., Tensor],
    inputs: Mapping[str, tuple[Tensor, str, axes.Mesh]],
    cotangent: Tensor,
) -> Compared:
    """A function of DTensors against one of whole tensors, which `inputs` has by name, each with its sharding."""
    leaves = [whole.clone().requires_grad_() for whole, _, _ in inputs.values()]
    wanted = one(*leaves)
    wanted.backward(cotangent)
    shards = [axes.shard(whole, spec, mesh=mesh).requires_grad_() for whole, spec, mesh in inputs.values()]
    with CommDebugMode() as forward:
        out = fn(*shards)
    with CommDebugMode() as backward:
        out.backward(axes.shard(cotangent, axes.spec_of(out), mesh=axes.sharding_of(out).mesh))
    pairs = {"out": (out, wanted)}
    pairs |= {f"d{name}": (x.grad, y.grad) for name, x, y in zip(inputs, shards, leaves, strict=True)}
    distance = {name: float((axes.unshard(x) - y).detach().abs().max()) for name, (x, y) in pairs.items()}
    return Compared(distance, collectives(forward), collectives(backward))


def report(script: str, every: Sequence[Compared], limit: float = 1e-5) -> int:
    """Prints what all ranks found of a comparison; the exit status."""
    distances = largest(each.distance for each in every)
    print(f"{len(every)} ranks, forward: {in_words(every[0].forward)}; backward: {in_words(every[0].backward)}")
    print(f"distance to one device: {shown(distances)}")
    return verdict(script, distances.values(), limit)


def largest(every: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """By name the largest of the ranks' numbers; not a number, if one isn't."""
    rows = list(every)
    return {name: max((row[name] for row in rows), key=lambda x: (math.isnan(x), x)) for name in rows[0]}


def shown(distances: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.1e}" for name, value in distances.items())


def verdict(script: str, distances: Iterable[float], limit: float) -> int:
    """The exit status: 0 where all distances are below the limit; not a number isn't."""
    if all(distance < limit for distance in distances):
        return 0
    print(f"{script}: the distances should be below {limit}", file=sys.stderr)
    return 1


def show_curves(many: list[float], one: list[float], ranks: int) -> float:
    """Prints both loss curves side by side; their largest relative difference at any step."""
    differences = [abs(a - b) / b for a, b in zip(many, one, strict=True)]
    print(f"\n  step  {f'{ranks} processes':>12}  {'1 process':>10}  difference")
    for step in sorted({*range(0, len(one), max(1, len(one) // 20)), len(one) - 1}):
        bar = "▪" * round(40 * one[step] / max(one))
        print(f"  {step + 1:>4}  {many[step]:>12.6f}  {one[step]:>10.6f}  {differences[step]:>10.1e}  {bar}")
    return math.nan if any(map(math.isnan, differences)) else max(differences)


# -------------------------------------------------------------------------------------- printing


class Bar:
    """Progress with the loss and the speed: one line that grows, or ten lines in a log."""

    def __init__(self, steps: int, tokens: int, mesh: axes.Mesh | None):
        self.steps, self.tokens = steps, tokens
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


# -------------------------------------------------------------------------------------- pipelines


def schedule_of(kind: Any, model: Any, loss: Any, mesh: axes.Mesh, microbatches: int, rows: int, words: int) -> Any:
    """A schedule of a stage that is told its shapes and asks no other for them: a simulated world can run it."""
    pp, like, ends = mesh.axis("pp"), next(model.parameters()), []
    whole = {
        "b": rows // microbatches * mesh.names["dp"],
        "s": words * mesh.names["cp"],
        "d": model.width,
        "v": model.v,
    }
    for spec in model.expression.split(" -> "):
        names = re.sub(r"@(\w+|\([^)]*\))", "", spec).split()
        shape, numbers = mesh.sharding(spec).local_shape([whole[name] for name in names]), {"d", "v"} & {*names}
        dtype = like.dtype if numbers else torch.long
        ends.append(torch.empty(shape, dtype=dtype, device="meta", requires_grad=bool(numbers)))
    stage = PipelineStage(model, pp.index, pp.size, like.device, *ends, group=pp.group)
    return kind(stage, microbatches, loss_fn=loss)
