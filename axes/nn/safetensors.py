"""Weights from safetensors files and back, each rank the part that it has.

    axes.nn.load_safetensors(model, "Llama-3.2-1B", names=lambda name: "model." + name)
    axes.nn.save_safetensors(model, "Llama-3.2-1B-tuned", names=lambda name: "model." + name)

A safetensors file begins with the name, dtype, shape and place of each tensor, and is mapped into memory: a
rank copies from there what lies in its shards, box by box, and the rest of the file isn't read. Who has which
boxes is what a checkpoint asks as well, so that every sharding is served.

Why not torch's `HuggingFaceStorageWriter`: a rank would need memory for twice its shards, and the first rank for
more, since the files are written twice; and a tensor that is split by a factor has no place there.
"""

from __future__ import annotations

import fnmatch
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from axes import AxesError, Mesh, ShardingError
from axes.extension import agree, boxes, local, shown
from axes.nn.module_tensors import by_tensor, fill

M = TypeVar("M", bound=torch.nn.Module)
Names = Mapping[str, str | None] | Callable[[str], str | None]

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""What safetensors calls the dtypes of torch that a parameter or buffer may have."""


def load_safetensors(
    module: M,
    path: str | PathLike[str],
    names: Names | None = None,
    ignore: str | Collection[str] = (),
) -> M:
    """Fill the parameters and persistent buffers of a module from safetensors files, as Hugging Face's are.

    Each rank reads the parts of its own shards. Needs the package safetensors (`pip
    install safetensors`).

    Args:
        module: A module that is sharded (`axes.shard_module`, `fully_shard`) or plain.
        path: A file; or a folder, whose files `model*.safetensors` are read, or all its safetensors files if it has
            none of these. No two files have the same tensor.
        names: The files' names of parameters: a mapping from the module's names, which may leave out equal ones, or
            a function of the module's name. A parameter whose name is None keeps its value.
        ignore: Patterns (as of `fnmatch`) of tensors in the files that no parameter takes.

    Returns:
        The module. Floats are converted to the parameter's dtype; other dtypes must be equal. A tied parameter may
        be in the files under any of its names.

    Raises:
        ShardingError: Everything that doesn't fit: missing parameters, tensors that no parameter takes, shapes,
            dtypes, files. It is raised before anything is changed. Ranks don't communicate here: a file that one node
            lacks is an error on the ranks of that node.

    Examples:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> layer = torch.nn.Linear(6, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"w": torch.ones(4, 6), "b": torch.zeros(4)}, f"{folder}/model.safetensors")
        ...     load_safetensors(layer, folder, {"weight": "w", "bias": "b"}).weight.sum().item()
        24.0
    """
    for x, values in _matched(list(_named("load", module, names)), _opened(Path(path)), ignore):
        fill(x, values)
    return module


def save_safetensors(
    module: torch.nn.Module, path: str | PathLike[str], names: Names | None = None, mesh: Mesh | None = None
) -> None:
    """Write the parameters and persistent buffers of a module to a safetensors file, as Hugging Face's are.

    Each rank writes its own shards to their place in the file, so no rank needs memory for more. All ranks call it
    with the same module, and it returns when all have written. The file gets its header when it is complete, and nobody
    can read it before; if a rank fails, it is removed. With the model's `config.json` beside it
    (`model.config.save_pretrained(folder)`), `from_pretrained` of transformers loads it.

    Args:
        module: A module that is sharded (`axes.shard_module`, `fully_shard`) or plain.
        path: A folder, in which the file is `model.safetensors`, or a file with this suffix that doesn't exist yet. All
            ranks share the file system. The folder is made if it doesn't exist.
        names: The file's names of parameters, as in `load_safetensors`; None leaves one out. A tied parameter is
            written once, under its first name.
        mesh: The mesh of all ranks that call it, by default those of the job. Each stage of a pipeline writes a file of
            its own with the mesh of its ranks.

    Raises:
        ShardingError: A parameter can't be in such a file, two have one name, the ranks together don't have all of one,
            or the file can't be written. The same on all ranks.
        DesyncError: Paths differ, or a rank doesn't come.

    Examples:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_safetensors(torch.nn.Linear(6, 4), folder)
        ...     sorted((name, list(x.shape)) for name, x in load_file(f"{folder}/model.safetensors").items())
        [('bias', [4]), ('weight', [4, 6])]
    """
    file = Path(path) if Path(path).suffix == ".safetensors" else Path(path, "model.safetensors")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    first, *others = range(size) if mesh is None else torch.tensor(mesh.ranks).flatten().tolist()
    header, places, wanted = _planned(module, names)

    def together(step: Callable[[], Any]) -> list[Any]:
        return _together([first, *others], f"{wanted} bytes to {file} ({zlib.crc32(header.numpy()):x})", step)

    def create() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(exist_ok=False)

    together(int)  # all mean one file, before it is made
    together(create if rank == first else int)
    try:
        written = sum(together(lambda: sum(_write(file, places, first, rank))))
        if written != wanted:
            raise ShardingError(
                f"axes.nn.save_safetensors: {written} of {wanted} bytes are on the ranks that share a tensor with rank "
                f"{first}; pass the mesh= of all ranks that have this module"
            )
        together(lambda: sum(_write(file, [(0, header)], first, rank)))  # without it nobody reads the file
    except Exception:
        if rank == first:
            file.unlink()
        raise


def _named(what: str, module: torch.nn.Module, names: Names | None) -> Iterator[tuple[str, torch.Tensor, list[str]]]:
    """Each parameter and persistent buffer: its names in the module, and in the files; without those that stay out."""
    if not isinstance(module, torch.nn.Module):
        raise ShardingError(f"axes.nn.{what}_safetensors takes a module; found {type(module).__name__}")
    if not (names is None or isinstance(names, Mapping) or callable(names)):
        raise ShardingError(
            f"names is a mapping, like {{'weight': 'w'}}, or a function of a name; found {shown(names)}"
        )
    rename: Any = (lambda name: names.get(name, name)) if isinstance(names, Mapping) else names or str
    # A state dict, since FSDP2 then puts sharded parameters back; of the module that torch.compile has wrapped.
    state = getattr(module, "_orig_mod", module).state_dict(keep_vars=True)
    for own, x in by_tensor((name, x) for name, x in state.items() if isinstance(x, torch.Tensor)):
        called = [each for each in map(rename, own) if each is not None]
        if called and (x.is_meta or any(placement.is_partial() for placement in getattr(x, "placements", ()))):
            raise ShardingError(
                f"axes.nn.{what}_safetensors: {own[0]} has no values, on the device 'meta' or pending; shard the "
                "module (axes.shard_module), or module.to_empty(), before"
            )
        if called:
            yield " = ".join(own), x, called


# --- files that are read


def _opened(path: Path) -> dict[str, Any]:
    """safetensors' slice of each tensor in the files: its shape, its dtype, and by indices its values."""
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for file in sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors")) or [path]:
        try:
            opened = safe_open(file, framework="pt")
        except Exception as error:  # of the package's own kinds
            raise ShardingError(f"{file} can't be read as a safetensors file: {error}") from error
        for name in opened.keys():  # noqa: SIM118, not a dict
            if name in found:
                raise ShardingError(f"'{name}' is in {file} and in another file beside it; pass one file")
            found[name] = opened.get_slice(name)
    return found


def _matched(
    tensors: Sequence[tuple[str, torch.Tensor, list[str]]], files: Mapping[str, Any], ignore: str | Collection[str]
) -> list[tuple[torch.Tensor, Any]]:
    """Each tensor to fill, with the slice in the files that it takes; `ShardingError` with all that doesn't fit."""
    found, problems, idle = [], [], set(files)
    for own, x, called in tensors:
        idle -= {*called}
        name = next((each for each in called if each in files), None)
        code, shape = ("", []) if name is None else (files[name].get_dtype(), files[name].get_shape())
        floats = code.startswith(("F", "BF")) and x.is_floating_point()
        if name and shape == list(x.shape) and (floats or code == _CODES.get(x.dtype)):
            found.append((x, files[name]))
        else:
            problems.append(
                f"{own} is {x.dtype} {list(x.shape)}, and "
                + (f"'{name}' in the files {code} {shape}" if name else f"no file has {' or '.join(map(repr, called))}")
            )
    for pattern in [ignore] if isinstance(ignore, str) else ignore:
        idle -= {*fnmatch.filter(idle, pattern)}
    problems += [f"'{each}' is in the files, and nobody takes it; ignore=['{each}'] leaves it" for each in sorted(idle)]
    if problems:
        raise ShardingError(
            f"axes.nn.load_safetensors: {len(problems)} tensors don't fit (floats are converted)"
            + "".join(f"\n  {problem}" for problem in problems[:16])
        )
    return found


# --- the file that is written


def _planned(module: torch.nn.Module, names: Names | None) -> tuple[torch.Tensor, list[tuple[int, torch.Tensor]], int]:
    """The header of a file, where in the file each tensor begins, and the bytes of all tensors."""
    header, places, end = dict[str, Any](__metadata__={"format": "pt"}), [], 0
    # Wide elements come first, so that each is aligned.
    for own, x, (name, *_) in sorted(_named("save", module, names), key=lambda each: -each[1].itemsize):
        if name in header or x.dtype not in _CODES:
            raise ShardingError(
                f"axes.nn.save_safetensors: {own} can't be in the file as '{name}': "
                + ("two parameters have this name" if name in header else f"such a file has no {x.dtype}")
            )
        begin, end = end, end + x.numel() * x.itemsize
        header[name] = {"dtype": _CODES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
        places.append((begin, x))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    encoded = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return encoded, [(len(encoded) + begin, x) for begin, x in places], end


def _together(ranks: Sequence[int], said: str, step: Callable[[], Any]) -> list[Any]:
    """What a step gives on each of these ranks. Where it fails on one, all raise the same error."""
    try:
        told, failed = [step(), ""], None
    except Exception as error:  # which all are told
        told, failed = [None, str(error) if isinstance(error, AxesError) else f"{type(error).__name__}: {error}"], error
    every = agree("save_safetensors", ranks, said, told, advice="all ranks call it with the same module and path")
    for wrong in [error for _, error in every if error]:
        raise ShardingError(f"axes.nn.save_safetensors: {wrong}") from failed
    return [found for found, _ in every]


def _write(file: Path, places: Sequence[tuple[int, torch.Tensor]], first: int, rank: int) -> Iterator[int]:
    """Write what this rank has of the copy of each tensor of which the first rank has a part; gives how many bytes."""
    with file.open("r+b") as opened:
        for start, x in places:
            ranks = (
                x.device_mesh.mesh[tuple(0 if each.is_replicate() else slice(None) for each in x.placements)]
                if isinstance(x, DTensor)
                else torch.tensor(first)
            )
            for box in boxes(x) if rank in ranks and first in ranks else ():
                part = box.within(local(x)).detach().cpu()
                _write_part(opened, start, part, box.offsets, tuple(x.shape))
                yield part.nbytes


def _write_part(opened: BinaryIO, start: int, part: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> None:
    """Write a part of a tensor that begins at `start`: whole rows of any number of dims in one go."""
    row = math.prod(shape[1:]) * part.itemsize
    start += row * sum(offsets[:1])
    if part.shape[1:] == shape[1:]:
        opened.seek(start)
        opened.write(part.flatten().view(torch.uint8).numpy())
    else:
        for at, each in enumerate(part):
            _write_part(opened, start + row * at, each, offsets[1:], shape[1:])
