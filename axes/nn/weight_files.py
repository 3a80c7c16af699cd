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

import contextlib
import fnmatch
import itertools
import json
import math
import operator
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import DesyncError, ShardingError
from axes.extension import agree, boxes, local, shown
from axes.nn.module_tensors import by_tensor, fill

M = TypeVar("M", bound=torch.nn.Module)
Names = Mapping[str, str | None] | Callable[[str], str | None]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""What safetensors calls the dtypes of torch that a parameter or buffer may have."""

_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def load_safetensors(
    module: M,
    path: str | PathLike[str],
    names: Names | None = None,
    ignore: str | Collection[str] = (),
) -> M:
    """Fill the parameters and persistent buffers of a module from safetensors files, as Hugging Face's are.

    Each rank reads the parts of its own shards. Needs the package safetensors (`pip install
    axes-torch[safetensors]`).

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
            dtypes, files. It is raised before anything is changed.
        DesyncError: The same on every other rank that shares a mesh with the rank that found it.

    Examples:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> layer = torch.nn.Linear(6, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"w": torch.ones(4, 6), "b": torch.zeros(4)}, f"{folder}/model.safetensors")
        ...     load_safetensors(layer, folder, {"weight": "w", "bias": "b"}).weight.sum().item()
        24.0
    """
    found: list[tuple[torch.Tensor, Any]] = []
    with contextlib.ExitStack() as stack:

        def matched() -> None:
            tensors = _named("load", module, names)
            patterns = [ignore] if isinstance(ignore, str) else list(ignore)
            found.extend(_matched(tensors, _opened(Path(path), stack), patterns))

        meshes = _meshes(module) if isinstance(module, torch.nn.Module) else []
        _together(
            "load", "files that fit", meshes, matched, "every rank of a mesh calls it with the same module and files"
        )
        for tensor, values in found:
            fill(tensor, values)
    return module


def save_safetensors(
    module: torch.nn.Module, folder: str | PathLike[str], names: Names | None = None, file_bytes: int = 5_000_000_000
) -> None:
    """Write the parameters and persistent buffers of a module to safetensors files, as Hugging Face's are.

    Each rank writes its own shards to their place in the files, so no rank needs memory for more. With pipeline
    stages each rank passes its own module. All ranks of the job call it, and it returns when all have written. Files
    get their headers when they are complete, and nobody can read them before; if a rank fails, they are removed.
    With the model's `config.json` beside them (`model.config.save_pretrained(folder)`), `from_pretrained` of
    transformers loads them.

    Args:
        module: A module that is sharded (`axes.shard_module`, `fully_shard`) or plain.
        folder: A folder without safetensors files, on a file system that all ranks share. It is made if it doesn't
            exist.
        names: The files' names of parameters, as in `load_safetensors`; None leaves one out. A tied parameter is
            written once, under its first name.
        file_bytes: The most bytes of a file, unless one tensor has more. Several files get an index.

    Raises:
        ShardingError: A parameter can't be in such a file, two have one name, a part of one is missing, or the
            folder has such files. It is raised before anything is written.
        DesyncError: One rank fails, or folders differ; raised on all ranks.

    Examples:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_safetensors(torch.nn.Linear(6, 4), folder)
        ...     sorted((name, list(x.shape)) for name, x in load_file(f"{folder}/model.safetensors").items())
        [('bias', [4]), ('weight', [4, 6])]
    """
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = range(torch.distributed.get_world_size() if running else 1)
    is_first = not running or torch.distributed.get_rank() == 0
    path, own = Path(folder), dict[str, _Part]()

    def together(step: Callable[[], Any]) -> list[Any]:
        said, advice = f"{path}, {file_bytes} bytes a file", "all ranks of the job call it with one folder"
        return _together("save", said, [ranks], step, advice)

    def listed() -> list[Any]:
        own.update(_parts(module, names))
        if is_first:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.glob("*.safetensors*")):
                raise ShardingError(f"axes.nn.save_safetensors: {path} has such files already; pass a new folder")
        return [[name, _CODES[part.tensor.dtype], list(part.tensor.shape), *part[1:]] for name, part in own.items()]

    headers, writers = _planned(together(listed), file_bytes)
    own = {name: part for name, part in own.items() if part.copy == writers[name]}
    try:
        together(lambda: _write(path, headers, own))
        together(lambda: _finish(path, headers) if is_first else None)
    except Exception:
        for file in headers if is_first else ():
            (path / file).unlink(missing_ok=True)
        raise


def _named(what: str, module: Any, names: Names | None) -> list[tuple[list[str], torch.Tensor, list[str | None]]]:
    """Each parameter and persistent buffer: its names in the module (several where it is tied), and in the files."""
    if not isinstance(module, torch.nn.Module):
        raise ShardingError(f"axes.nn.{what}_safetensors takes a module; found {type(module).__name__}")
    if not (names is None or isinstance(names, Mapping) or callable(names)):
        raise ShardingError(
            f"names is a mapping, like {{'weight': 'w'}}, or a function of a name; found {shown(names)}"
        )
    module = getattr(module, "_orig_mod", module)  # of what torch.compile has wrapped
    # A state dict, since FSDP2 then puts sharded parameters back.
    state = {name: x for name, x in module.state_dict(keep_vars=True).items() if isinstance(x, torch.Tensor)}
    for name in names if isinstance(names, Mapping) else ():
        if name not in state:
            raise ShardingError(f"names: the module has no parameter {shown(name, list(state))}")
    found = []
    for own, x in by_tensor(state.items()):
        called = [
            name if names is None else names.get(name, name) if isinstance(names, Mapping) else names(name)
            for name in own
        ]
        if not all(each is None or isinstance(each, str) for each in called):
            raise ShardingError(f"names of '{own[0]}' is the name of a tensor in the files, or None; found {called}")
        if None not in called and (
            x.is_meta or any(placement.is_partial() for placement in getattr(x, "placements", ()))
        ):
            raise ShardingError(
                f"axes.nn.{what}_safetensors: {own[0]} has no values, on the device 'meta' or pending; shard the "
                "module (axes.shard_module), or module.to_empty(), before"
            )
        found.append((own, x, called))
    return found


def _together(what: str, said: str, groups: Iterable[Sequence[int]], step: Callable[[], Any], advice: str) -> list[Any]:
    """What a step gives on each rank of the last group. Where one rank fails, or says another thing, all fail."""
    found, failed = None, None
    try:
        found = step()
    except Exception as error:  # which the others are told
        failed = error
    every = [found]
    for ranks in groups:
        try:
            every = agree(f"{what}_safetensors", ranks, failed or said, found, advice=advice)
        except DesyncError as error:
            failed = error
    if failed is not None:
        raise failed
    return every


def _meshes(module: torch.nn.Module) -> list[Sequence[int]]:
    """The ranks of each mesh that has parameters and this rank, each once."""
    tensors = module.state_dict(keep_vars=True).values()  # FSDP2 then puts sharded parameters back
    meshes = dict.fromkeys(x.device_mesh for x in tensors if isinstance(x, DTensor))
    here = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    return list(dict.fromkeys(tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in here))


# --- files that are read


def _opened(path: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """safetensors' slice of each tensor in the files: its shape, its dtype, and by indices its values."""
    from safetensors import safe_open

    files = [sorted(path.glob(f"{name}*.safetensors")) for name in ("model", "")] if path.is_dir() else [[path]]
    if not any(files):
        raise ShardingError(f"{path} has no safetensors file")
    found: dict[str, Any] = {}
    for file in files[0] or files[-1]:
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except Exception as error:  # of the package's own kinds
            raise ShardingError(f"{file} can't be read as a safetensors file: {error}") from error
        for name in opened.keys():  # noqa: SIM118, not a dict
            if name in found:
                raise ShardingError(f"'{name}' is in {file} and in another file beside it; pass one file")
            found[name] = opened.get_slice(name)
    return found


def _matched(
    tensors: Iterable[tuple[list[str], torch.Tensor, list[str | None]]], files: Mapping[str, Any], ignore: Iterable[str]
) -> list[tuple[torch.Tensor, Any]]:
    """Each tensor to fill, with the slice in the files that it takes; `ShardingError` with all that doesn't fit."""
    found, problems, taken = [], [], set[str | None]()
    for own, x, names in tensors:
        taken.update(names)
        if None in names:
            continue
        name = next((name for name in names if name in files), None)
        if name is None:
            asked = " or ".join(f"'{each}'" for each in dict.fromkeys(names))
            problems.append(f"{' = '.join(own)} {list(x.shape)} is in no file; asked for {asked}")
            continue
        shape, code = list(files[name].get_shape()), files[name].get_dtype()
        dtype = _DTYPES.get(code, torch.bool)
        if shape != list(x.shape) or (dtype != x.dtype and not (dtype.is_floating_point and x.is_floating_point())):
            problems.append(f"{own[0]} is {x.dtype} {list(x.shape)}, and '{name}' in the files {code} {shape}")
        found.append((x, files[name]))
    idle = [name for name in files if name not in taken and not any(fnmatch.fnmatchcase(name, each) for each in ignore)]
    problems += [f"'{name}' is in the files, and nobody takes it; ignore=['{name}'] leaves it" for name in idle]
    if problems:
        listed = "\n  ".join(problems[:16] + ([f"and {len(problems) - 16} more"] if len(problems) > 16 else []))
        raise ShardingError(f"axes.nn.load_safetensors: the files don't fit (floats are converted)\n  {listed}")
    return found


# --- files that are written


class _Part(NamedTuple):
    """What a rank has of a tensor: of which copy it is a part, how many parts that has, a checksum of a few elements.

    The copy is a number for the ranks that have its parts; a plain tensor is the only part of one.
    """

    tensor: torch.Tensor
    copy: int
    parts: int
    checksum: int


def _parts(module: torch.nn.Module, names: Names | None) -> dict[str, _Part]:
    """The parts that this rank has, by the names in the files; of those of one mesh that are equal the first."""
    found: dict[str, _Part] = {}
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for own, x, (name, *_) in _named("save", module, names):
        if name in found or x.dtype not in _CODES:
            why = "two parameters have this name" if name in found else f"such a file has no {x.dtype}"
            raise ShardingError(f"axes.nn.save_safetensors: {own[0]} can't be in the files as '{name}': {why}")
        ranks = torch.tensor(rank)
        if isinstance(x, DTensor):
            split = [not placement.is_replicate() for placement in x.placements]
            ranks = x.device_mesh.mesh[tuple(slice(None) if each else 0 for each in split)]
        if name is not None and rank in ranks:
            few = local(x).detach().flatten()[:1024].cpu().view(torch.uint8).numpy()
            found[name] = _Part(x, zlib.crc32(str(ranks.tolist()).encode()), ranks.numel(), zlib.crc32(few))
    return found


def _planned(every: Iterable[Iterable[Any]], file_bytes: int) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """The header of each file, and of each tensor the copy that is written: the same on all ranks."""
    tensors: dict[str, tuple[str, list[int]]] = {}
    writers: dict[str, int] = {}
    copies: dict[str, dict[tuple[Any, ...], list[int]]] = {}
    for name, code, shape, copy, parts, checksum in itertools.chain.from_iterable(every):
        tensors.setdefault(name, (code, shape))
        writers.setdefault(name, copy)
        copies.setdefault(name, {}).setdefault((parts, copy, code, *shape), []).append(checksum)
    for name, found in copies.items():
        for (parts, *_), checksums in found.items():
            if len(checksums) != parts:
                raise ShardingError(
                    f"axes.nn.save_safetensors: '{name}' has {parts} parts, and {len(checksums)} ranks have one under "
                    "this name; give it one name on all"
                )
        if len({(*tensor, *sorted(checksums)) for (_, _, *tensor), checksums in found.items()}) > 1:
            raise ShardingError(
                f"axes.nn.save_safetensors: '{name}' is another tensor on other ranks. Stages of a pipeline name their "
                "parameters as the whole model does, by names=; copies of one have equal values"
            )
    headers, end = [dict[str, Any]()], 0
    for name, (code, shape) in sorted(tensors.items(), key=lambda each: -_DTYPES[each[1][0]].itemsize):  # all aligned
        begin, end = end, end + math.prod(shape) * _DTYPES[code].itemsize
        if begin and end > file_bytes:
            headers, begin, end = [*headers, {}], 0, end - begin
        headers[-1][name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    files = [f"model-{at + 1:05}-of-{len(headers):05}.safetensors" for at in range(len(headers))]
    return dict(zip(files if len(files) > 1 else ["model.safetensors"], headers, strict=True)), writers


def _encoded(header: Mapping[str, Any]) -> bytes:
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(path: Path, headers: Mapping[str, Mapping[str, Any]], own: Mapping[str, _Part]) -> None:
    """Write these parts to their places in the files."""
    for file, header in headers.items():
        (path / file).touch()
        with (path / file).open("r+b") as opened:
            first = len(_encoded(header))
            for name in header.keys() & own.keys():
                for box in boxes(own[name].tensor):
                    _write_box(opened, first + header[name]["data_offsets"][0], own[name].tensor, box)


def _write_box(opened: BinaryIO, start: int, x: torch.Tensor, box: Any) -> None:
    """Write a box of a tensor, row by row of elements that are contiguous in the whole."""
    split = next((dim for dim in reversed(range(x.ndim)) if box.sizes[dim] != x.shape[dim]), 0)
    values = box.within(local(x)).detach().cpu().contiguous().view(-1).view(torch.uint8)
    strides = [math.prod(x.shape[dim + 1 :]) * x.itemsize for dim in range(x.ndim)]
    start += sum(map(operator.mul, box.offsets, strides))
    places = itertools.product(*map(range, box.sizes[:split]))
    row = math.prod(box.sizes[split:]) * x.itemsize
    for at, place in enumerate(places if row else ()):
        opened.seek(start + sum(map(operator.mul, place, strides)))
        opened.write(memoryview(values[at * row : (at + 1) * row].numpy()))


def _finish(path: Path, headers: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the headers, without which nobody reads the files, and the index of several."""
    for file, header in headers.items():
        with (path / file).open("r+b") as opened:
            opened.write(_encoded(header))
    if len(headers) > 1:
        places = {name: file for file, header in headers.items() for name in header}
        text = json.dumps({"metadata": {}, "weight_map": places}, indent=2)
        (path / "model.safetensors.index.json").write_text(text, encoding="utf-8")


__all__ = ["load_safetensors", "save_safetensors"]
