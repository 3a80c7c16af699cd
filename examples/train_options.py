"""What the command line of train.py says, and what of it can't be; and the text that is learned."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
from support import flag, too_many, undeclared
from support import read_options as read_flags
from torch import Tensor
from transformer import Size


@dataclass(frozen=True)
class Options:
    """Train a small transformer on eight processes."""

    steps: int = flag(200, "optimizer steps")
    batch: int = flag(16, "samples per step, over all ranks")
    width: int = flag(128, "size of the residual stream")
    layers: int = flag(2, "blocks of the transformer")
    heads: int = flag(4, "attention heads")
    sequence: int = flag(64, "bytes per sample")
    lr: float = flag(3e-3, "largest learning rate")
    seed: int = flag(0, "of the weights and the samples", least=0)
    device: str = flag("cpu", "what to train on", choices=["cpu", "cuda"])
    ranks: int = flag(8, "local processes, where torchrun doesn't say")
    dp_replicate: int = flag(2, "copies of the model")
    tp: int = flag(2, "ranks that share each matrix")
    prompt: str = flag("The ", "what the generated line starts with")
    checkpoint: Path = flag(Path("build/checkpoint"), "folder to write")  # noqa: RUF009 - a field

    @property
    def size(self) -> Size:
        return Size(self.width, self.layers, self.heads, self.sequence)

    @property
    def axis_sizes(self) -> dict[str, int]:
        return {"dp_replicate": self.dp_replicate, "tp": self.tp}


def corpus() -> Tensor:
    """The text as bytes."""
    text = "\n\n".join(topics.values()).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def read(declaration: Sequence[str], arguments: list[str] | None = None) -> Options:
    options = read_flags("train.py", Options, partial(what_is_wrong, declaration), arguments)
    return replace(options, ranks=ranks_of(options))


def ranks_of(options: Options) -> int:
    return int(os.environ.get("WORLD_SIZE", options.ranks))


def what_is_wrong(declaration: Sequence[str], options: Options) -> str | None:
    """What can't be, as far as one process can tell."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", options.ranks))
    wrong = undeclared(declaration, ranks_of(options), options.axis_sizes) or too_many(local)
    if wrong:
        return wrong
    if options.heads % options.tp:
        return f"--heads {options.heads} doesn't divide over --tp {options.tp}: ranks share whole heads"
    if options.width % (2 * options.heads):
        return f"--width {options.width} isn't a multiple of 2 * --heads {options.heads}"
    if not options.prompt:
        return "--prompt has at least one character"
    if options.sequence >= len(corpus()):
        return f"--sequence {options.sequence} is longer than the text of {len(corpus())} bytes"
    if options.device == "cuda" and torch.cuda.device_count() < local:
        return f"--device cuda needs a GPU per rank: {local}, found {torch.cuda.device_count()}"
    try:
        options.checkpoint.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--checkpoint {options.checkpoint} can't be made: {error.strerror}"
    return None
