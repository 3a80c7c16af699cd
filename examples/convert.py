"""A safetensors checkpoint in Hugging Face's names to a fused layout, and back, shard by shard, bit for bit.

    python examples/convert.py Llama-3.2-1B llama-fused --layout llama-megatron
    python examples/convert.py llama-fused Llama-again --layout llama-megatron --back
    python examples/convert.py                       # a small Llama with random weights: there, back, and compared

What goes where is said by the tables of weight_layouts.py. A shard of the target is in memory at a time, and of the
source the box around each piece, which is read from the file where it lies. Needs safetensors and rich:
`pip install safetensors rich`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import safe_open
from safetensors.torch import save_file
from support import Parser
from weight_layouts import TABLES

import axes

INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a folder of safetensors files, by name, as slices that aren't read yet."""

    def __init__(self, folder: Path, opened: ExitStack):
        self.slices: dict[str, Any] = {}
        self.bytes_read = 0
        for path in sorted(folder.glob("*.safetensors")):
            file = opened.enter_context(safe_open(path, framework="pt"))
            self.slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, not a dict
        self.shapes = {name: tuple(each.get_shape()) for name, each in self.slices.items()}

    def read(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        found = self.slices[name][box]
        self.bytes_read += found.nbytes
        return found

    def bytes_of(self, name: str) -> int:
        return math.prod(self.shapes[name]) * self.slices[name][(slice(0, 0),) * len(self.shapes[name])].itemsize


def rules_of(layout: str, folder: Path, back: bool) -> axes.LayoutRules:
    """A table, with the sizes that shapes don't tell by the names that it has for them."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    h = config["num_attention_heads"]
    k = config.get("head_dim") or config["hidden_size"] // h
    known = {"h": h, "g": config.get("num_key_value_heads") or h, "k": k}
    table, names = TABLES[layout]
    rules = axes.LayoutRules(table, sizes={name: known[name] for name in names.split()})
    return rules.inverse if back else rules


def made(source: Checkpoint, shape: tuple[int, ...], pieces: tuple) -> torch.Tensor:
    """One tensor of the target, of the boxes of the source that it consists of."""
    target = None
    for piece in pieces:
        sizes = [1] * len(piece.offsets[0])
        for dim in piece.dims:
            of, step = dim.ends[0]
            sizes[of] += step * (dim.size - 1)
        bounds = zip(piece.offsets[0], sizes, strict=True)
        box = source.read(piece.source, tuple(slice(start, start + size) for start, size in bounds))
        target = torch.empty(shape, dtype=box.dtype) if target is None else target
        if box.dtype != target.dtype:
            raise SystemExit(f"{piece.target} would be {target.dtype} and, of {piece.source}, {box.dtype}")
        shown = box.as_strided(*piece.source_view(box.stride())[:2])
        target.as_strided(*piece.target_view(target.stride())).copy_(shown)
    assert target is not None, "a tensor has at least one piece"
    return target


def shards(change: Any, source: Checkpoint, largest: int) -> Iterator[tuple[list[str], int]]:
    """Names of the target that go to one file, with their bytes."""
    names, total = [], 0
    for name, shape in change.targets.items():
        first = change.pieces[name][0].source
        size = source.bytes_of(first) * math.prod(shape) // max(1, math.prod(source.shapes[first]))
        if names and total + size > largest:
            yield names, total
            names, total = [], 0
        names.append(name)
        total += size
    yield names, total


def convert(source: Path, target: Path, layout: str, back: bool, largest: int) -> str:
    """Write the target folder; returns what was done, in a line."""
    target.mkdir(parents=True, exist_ok=True)
    if any(target.glob("*.safetensors")):
        raise SystemExit(f"{target} has safetensors files already; name an empty folder")
    for path in source.iterdir():  # the configuration and the tokenizer
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX:
            shutil.copy(path, target)
    with ExitStack() as opened:
        files = Checkpoint(source, opened)
        change = rules_of(layout, source, back).applied(files.shapes)
        parts = list(shards(change, files, largest))
        total = sum(size for _, size in parts)
        bar = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        task = bar.add_task(target.name, total=total)
        weight_map: dict[str, str] = {}
        opened.enter_context(bar)
        for number, (names, _) in enumerate(parts, 1):
            file = f"model-{number:05}-of-{len(parts):05}.safetensors"
            tensors = {}
            for name in names:
                tensors[name] = made(files, change.targets[name], change.pieces[name])
                bar.advance(task, tensors[name].nbytes)
            save_file(tensors, target / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    counts = f"{len(change.sources)} tensors -> {len(change.targets)} in {len(parts)} files"
    return f"{counts}, {files.bytes_read:,} bytes read of {total:,}"


def differences(one: Path, other: Path) -> list[str]:
    """Names that one checkpoint alone has, or whose bits are others."""
    with ExitStack() as opened:
        a, b = Checkpoint(one, opened), Checkpoint(other, opened)
        found = sorted(a.shapes.keys() ^ b.shapes.keys())
        for name in a.shapes.keys() & b.shapes.keys():
            x, y = (each.slices[name][...].contiguous().flatten().view(torch.uint8) for each in (a, b))
            if a.shapes[name] != b.shapes[name] or not torch.equal(x, y):
                found.append(name)
    return found


def demo(layout: str, largest: int) -> int:
    """A small model of transformers with random weights: there, back, and compared."""
    import transformers  # nobody else needs it

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
    if layout.startswith("llama"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        sizes |= {"num_experts": 6, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    with tempfile.TemporaryDirectory() as folder:
        first, fused, again = (Path(folder, name) for name in ("checkpoint", "fused", "again"))
        model.to(torch.bfloat16).save_pretrained(first)
        print(f"there  {convert(first, fused, layout, False, largest)}")
        print(f"back   {convert(fused, again, layout, True, largest)}")
        wrong = differences(first, again)
    print("bit for bit the same" if not wrong else f"differ: {', '.join(wrong[:8])}")
    return 1 if wrong else 0


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="convert.py", description="A safetensors checkpoint in another layout, and back.")
    parser.add_argument("source", type=Path, nargs="?", help="a folder with safetensors files and config.json")
    parser.add_argument("target", type=Path, nargs="?", help="a folder to write")
    parser.add_argument("--layout", choices=list(TABLES), default="llama-megatron", help="a table of weight_layouts.py")
    parser.add_argument(
        "--back", action=argparse.BooleanOptionalAction, default=False, help="to the names it came from"
    )
    parser.add_argument("--shard-mb", type=int, default=2048, help="the largest file of the target, in MiB")
    options = parser.parse_args(arguments)
    if options.shard_mb < 1:
        parser.error(f"--shard-mb is a whole number from 1; found {options.shard_mb}")
    if options.source is None:
        return demo(options.layout, options.shard_mb * 2**20)
    if options.target is None or not (options.source / "config.json").is_file():
        parser.error(f"a folder with config.json, and one to write; found {options.source} and {options.target}")
    try:
        print(convert(options.source, options.target, options.layout, options.back, options.shard_mb * 2**20))
    except axes.AxesError as error:
        print(f"convert.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
