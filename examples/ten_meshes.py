"""The Llama with mixtures of experts on ten meshes of eight ranks, each against one device, as a table.

    python examples/ten_meshes.py                  # a few minutes; the table of docs/examples.md

Each mesh trains twice: 50 steps in float32 and 10 in float64, and so does one device. The table has the largest
relative difference at any step, of the losses and of the norms of all gradients.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moe_llama import Options, train
from pipelined import Curves, alone, largest_difference
from support import flag, read_options

import axes


def on(mesh: str, ep: int, etp: int = 1, **options: int | str) -> Options:
    """Small training runs whose embedding is the head, too: in a pipeline, the first stage and the last one have it."""
    return replace(Options(mesh=mesh, ep=ep, etp=etp, tied=1), **options)


TEN = (
    on("dp_shard=8", ep=8),
    on("dp_replicate=2 dp_shard=4", ep=4),
    on("dp_shard=2 tp=4", ep=4, recompute=1),
    on("dp_shard=2 cp=4", ep=4, etp=2),
    on("dp_shard=2 cp=2 tp=2", ep=2, etp=2),
    on("dp_replicate=2 cp=2 tp=2", ep=2),
    on("pp=2 dp_shard=2 tp=2", ep=4),
    on("pp=2 dp_replicate=2 dp_shard=2", ep=2, schedule="gpipe"),
    on("pp=2 cp=2 tp=2", ep=2, etp=2),
    on("pp=4 dp_shard=2", ep=2, microbatches=4),
)
LIMITS = {"float32": 1e-3, "float64": 1e-9}


@dataclass(frozen=True)
class Lengths:
    """Train on ten meshes and on one device, and print how far they are from each other."""

    float32: int = flag(50, "steps in float32")
    float64: int = flag(10, "steps in float64")


def differences(options: Sequence[Options], steps: dict[str, int]) -> Iterator[list[float]]:
    """For each mesh, dtype by dtype, the largest relative differences of losses and of norms."""
    one = {dtype: curves(replace(alone(options[0]), dtype=dtype, steps=count)) for dtype, count in steps.items()}
    for each in options:
        many = {dtype: curves(replace(each, dtype=dtype, steps=count)) for dtype, count in steps.items()}
        pairs = [pair for dtype in steps for pair in zip(many[dtype], one[dtype], strict=True)]
        yield [largest_difference(*pair) for pair in pairs]


def curves(options: Options) -> tuple[list[float], list[float]]:
    """The losses and the norms; all ranks have the same."""
    found, *others = axes.launch(quietly, axes.Mesh(options.mesh or "pp=1").size, options)
    if any(other != found for other in others):
        raise ValueError(f"ranks of {options.mesh} have different losses or norms")
    return found.losses, found.norms


def quietly(options: Options) -> Curves:
    with contextlib.redirect_stdout(io.StringIO()):
        return train(options)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> int:
    options = read_options("ten_meshes.py", Lengths, lambda _: None, arguments)
    steps = {"float32": options.float32, "float64": options.float64}
    heads = [head for dtype, count in steps.items() for head in (f"losses, {dtype}, {count} steps", "norms")]
    print(row("mesh", "experts", *heads), row(*["---"] * 6), sep="\n", flush=True)
    found = []
    for each, numbers in zip(TEN, differences(TEN, steps), strict=True):
        experts = f"`ep={each.ep}`" if each.etp == 1 else f"`ep={each.ep} etp={each.etp}`"
        print(row(f"`{each.mesh}`", experts, *(f"{number:.1e}" for number in numbers)), flush=True)
        found.append(numbers)
    limits = [limit for limit in LIMITS.values() for _ in range(2)]
    return 0 if all(n <= limit for numbers in found for n, limit in zip(numbers, limits, strict=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
