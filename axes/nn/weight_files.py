"""Weights from safetensors files and back, each rank the part that it has.

    axes.nn.load_safetensors(model, "Llama-3.2-1B", names=lambda name: "model." + name)
    axes.nn.save_safetensors(model, "Llama-3.2-1B-tuned", names=lambda name: "model." + name)

A safetensors file begins with the name, dtype, shape and place of each tensor, and is mapped into memory: a
rank copies from there what lies in its shards, box by box, and the rest of the file isn't read. Who has which
boxes is what a checkpoint asks as well, so that every sharding is served.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

Tied = tuple[list[str], torch.Tensor]
"""A parameter or buffer, with its names in the module: several where it is tied."""

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_METADATA = "__metadata__"
_LINES = 8

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
    """Fill the parameters and persistent buffers of a module from safetensors files; returns the module.

    module: sharded (`axes.shard_module`, `fully_shard`) or plain. Each rank reads what lies in its own shards.
        Files are read page by page, so that rows of the first dim cost their bytes, and short pieces of the
        last dim more.
    path: a file; an index (`*.index.json`); or a folder with `model.safetensors.index.json`,
        `model.safetensors`, or other files of which no two have the same tensor.
    names: what the files call a parameter: a mapping from the module's names, in which names that are the same
        may be left out, or a function of the module's name. None in the place of a name: the parameter keeps
        its value.
    ignore: patterns (as of `fnmatch`) of tensors in the files that no parameter takes.

    A tied parameter may be in the files under any of its names; the first that is there is read. Floating point
    values are converted to the parameter's dtype, other dtypes have to be the same.

    Raises `ShardingError` with all that doesn't fit: parameters that aren't in the files, tensors in the files
    that nobody takes, shapes and dtypes, files that are missing or aren't such files. It is raised before
    anything is changed, on every rank that shares a mesh with the one that found it; if ranks find different
    files, `DesyncError`. Needs the package safetensors (`pip install axes-torch[safetensors]`).

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> layer = torch.nn.Linear(6, 4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"w": torch.ones(4, 6), "b": torch.zeros(4)}, f"{folder}/model.safetensors")
    ...     load_safetensors(layer, folder, {"weight": "w", "bias": "b"}).weight.sum().item()
    24.0
    """
    _check("load", module, path, names)
    if not isinstance(ignore, str | list | tuple | set | frozenset) or not all(
        isinstance(each, str) for each in ignore
    ):
        raise ShardingError(f"ignore is patterns of names in the files, like ['*.inv_freq']; found {shown(ignore)}")
    patterns, tensors = [ignore] if isinstance(ignore, str) else list(ignore), _tensors(module)
    found: list[tuple[torch.Tensor, Any]] = []
    with contextlib.ExitStack() as stack:

        def matched() -> tuple[str, Any]:
            takes = _matched(tensors, _opened(Path(path), stack), names, patterns)
            found.extend((tensor, there) for _, tensor, _, there in takes)
            lines = [f"{tied[0]} {list(x.shape)} {x.dtype} {name}" for tied, x, name, _ in takes]
            return f"{len(lines)} tensors, {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]}", None

        _together("load", _meshes(tensors), matched, "every rank of a mesh calls it with the same module")
        for tensor, there in found:
            fill(tensor, there)
    return module


def save_safetensors(
    module: torch.nn.Module, folder: str | PathLike[str], names: Names | None = None, file_bytes: int = 5_000_000_000
) -> None:
    """Write the parameters and persistent buffers of a module to safetensors files, as Hugging Face's are.

    module: sharded (`axes.shard_module`, `fully_shard`) or plain. Each rank writes what lies in its own shards to its
        place in the files, so that no rank ever has more; of copies one rank writes. With pipeline stages each rank
        passes its own, and the files have all of them.
    folder: is made, or has no safetensors files yet; the same on all ranks, on a file system that they share.
    names: what the files call a parameter, as in `load_safetensors`; None in the place of a name leaves it out. A tied
        parameter is written once, under its first name.
    file_bytes: a file has at most so many bytes, unless one tensor has more; several files get an index.

    All ranks of the job call it, and it returns when all have written. Files have their names when they are whole:
    until then they end in `.part`, and where a rank fails they are removed. Beside the model's `config.json`, written
    by `model.config.save_pretrained(folder)`, `from_pretrained` of transformers loads them.

    Raises `ShardingError` before anything is written where a parameter can't be in such a file, where two have one
    name, also on other ranks, where a part of one is missing, and where the folder has such files or can't be made;
    `DesyncError` on all ranks where one fails, or where folders differ.

    >>> import tempfile
    >>> from safetensors.torch import load_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_safetensors(torch.nn.Linear(6, 4), folder)
    ...     sorted((name, list(x.shape)) for name, x in load_file(f"{folder}/model.safetensors").items())
    [('bias', [4]), ('weight', [4, 6])]
    """
    _check("save", module, folder, names)
    if type(file_bytes) is not int or file_bytes < 1:
        raise ShardingError(f"file_bytes is a whole number from 1; found {shown(file_bytes)}")
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = range(torch.distributed.get_world_size() if running else 1)
    rank = torch.distributed.get_rank() if running else 0
    path, own = Path(folder), dict[str, torch.Tensor]()

    def listed() -> tuple[str, list[Any]]:
        own.update(_named(module, names))
        if rank == 0 and path.is_dir() and any(path.glob("*.safetensors*")):
            raise ShardingError(
                f"axes.nn.save_safetensors: {path} has safetensors files already, or what is left of some "
                "(.part); pass a new folder"
            )
        here = {name: x for name, x in own.items() if not isinstance(x, DTensor) or x.device_mesh.get_coordinate()}
        told = [[name, _CODES[x.dtype], list(x.shape), *_copy(x, rank)] for name, x in here.items()]
        return f"{path}, {file_bytes} bytes a file", told

    def together(step: Callable[[], tuple[str, Any] | None]) -> list[Any]:
        return _together("save", [ranks], step, "all ranks of the job call it with one folder")

    every = together(listed)
    if len(every) < len(ranks):
        raise ShardingError("axes.nn.save_safetensors: a simulated world has no other ranks to write their parts")
    files = _planned(every, file_bytes)
    mine = files if rank == 0 else []
    try:
        together(functools.partial(_begin, path, mine))
        together(functools.partial(_write, path, files, own, rank))
        together(functools.partial(_finish, path, mine))
    except Exception:
        for file in mine:
            (path / f"{file.name}.part").unlink(missing_ok=True)
        raise


def _check(what: str, module: object, path: Any, names: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ShardingError(f"axes.nn.{what}_safetensors takes a module; found {type(module).__name__}")
    try:
        Path(path)
    except Exception:  # no path, or a class that fails to say it
        raise ShardingError(f"path is a file or a folder with safetensors files; found {type(path).__name__}") from None
    if not (names is None or isinstance(names, Mapping) or callable(names)):
        raise ShardingError(
            "names is a mapping from the module's names to those in the files, like {'weight': 'w'}, or a function "
            f"of the module's name; found {type(names).__name__}"
        )


def _tensors(module: torch.nn.Module) -> list[Tied]:
    """What a state dict has. It is asked for one, since FSDP2 then puts sharded parameters back."""
    module = getattr(module, "_orig_mod", module)  # of what torch.compile has wrapped
    state = module.state_dict(keep_vars=True).items()
    return by_tensor((name, x) for name, x in state if isinstance(x, torch.Tensor))


def _together(
    what: str, groups: Iterable[Sequence[int]], step: Callable[[], tuple[str, Any] | None], advice: str
) -> list[Any]:
    """What each rank tells of a step, which gives a statement, the same on all ranks of a group, and what it tells.

    Where it fails on one rank, all raise.
    """
    said: str | Exception
    try:
        said, told = step() or ("done", None)
    except Exception as error:  # which the others are told
        said, told = error, None
    every = [told]
    for ranks in groups:
        try:
            every = agree(f"{what}_safetensors", ranks, said, told, advice=advice)
        except DesyncError as error:
            said = error
    if isinstance(said, OSError):
        raise ShardingError(f"axes.nn.{what}_safetensors: a file can't be read or written: {said}") from said
    if isinstance(said, Exception):
        raise said
    return every


def _meshes(tensors: Sequence[Tied]) -> list[Sequence[int]]:
    """The ranks of each mesh that has parameters and this rank, each once."""
    meshes = dict.fromkeys(x.device_mesh for _, x in tensors if isinstance(x, DTensor))
    here = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    return list(dict.fromkeys(tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in here))


# --- the files


def _opened(path: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """safetensors' slice of each tensor in the files: its shape, its dtype, and by indices its values."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ShardingError(
            "axes.nn.load_safetensors needs the package safetensors: pip install 'axes-torch[safetensors]'"
        ) from error
    files, places = [path], None
    if path.is_dir():
        path = next((path / name for name in (_INDEX, _WHOLE) if (path / name).is_file()), path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if path.suffix == ".json":
        places = _indexed(path)
        files = sorted({*places.values()})
    elif not files:
        raise ShardingError(f"{path} has no safetensors file")
    found: dict[str, Any] = {}
    home: dict[str, Path] = {}
    for file in files:
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except (OSError, ValueError, SafetensorError) as error:
            raise ShardingError(f"{file} can't be read as a safetensors file: {error}") from error
        for name in opened.keys():  # noqa: SIM118, not a dict
            if places is None or places.get(name) == file:
                if name in found:
                    raise ShardingError(f"'{name}' is in two files, {home[name].name} and {file.name}; pass one")
                found[name], home[name] = opened.get_slice(name), file
    for name, file in (places or {}).items():
        if name not in found:
            raise ShardingError(f"{file} has no tensor '{name}', which the index says it has")
    return found


def _indexed(path: Path) -> dict[str, Path]:
    """What an index says: `{"weight_map": {name of a tensor: name of a file beside the index}}`."""
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): path.parent / file for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardingError(
            f'{path} can\'t be read as an index, {{"weight_map": {{name: file}}}}: {type(error).__name__}: {error}'
        ) from error


# --- who takes what


def _wanted(tensors: Sequence[Tied], names: Names | None) -> Iterator[tuple[list[str], torch.Tensor, list[str | None]]]:
    """Each tensor, with its names in the module and in the files."""
    own = [name for tied, _ in tensors for name in tied]
    for name in names if isinstance(names, Mapping) else ():
        if name not in own:
            raise ShardingError(f"names: the module has no parameter {shown(name, own)}")
    for tied, tensor in tensors:
        yield tied, tensor, [_name_in_files(names, name) for name in tied]


def _name_in_files(names: Names | None, name: str) -> str | None:
    try:
        found = name if names is None else names.get(name, name) if isinstance(names, Mapping) else names(name)
    except Exception as error:  # of the caller's function, on this rank before anything is changed
        raise ShardingError(f"names of {name!r} raised {type(error).__name__}: {error}") from error
    if found is not None and not isinstance(found, str):
        raise ShardingError(f"names of {name!r} is the name of a tensor in the files, or None; found {shown(found)}")
    return found


def _matched(
    tensors: Sequence[Tied], files: Mapping[str, Any], names: Names | None, ignore: Sequence[str]
) -> list[tuple[list[str], torch.Tensor, str, Any]]:
    """Each tensor to fill with the name and the slice in the files that it takes; `ShardingError` with all that
    doesn't fit."""
    found, missing, wrong, taken = [], [], [], set[str | None]()
    for tied, x, wanted in _wanted(tensors, names):
        there = next((name for name in wanted if name in files), None)
        taken.update(wanted)
        if None in wanted:
            continue
        if there is None:
            asked = dict.fromkeys(f"'{name}'" for name in wanted)
            missing.append(f"  {' = '.join(tied)}  {list(x.shape)}    asked for {' or '.join(asked)}")
            continue
        if reason := _misfit(x, files[there]):
            wrong.append(f"  {tied[0]} = '{there}': {reason}")
        found.append((tied, x, there, files[there]))
    left = [name for name in files if name not in taken]
    unused = [f"  '{name}'" for name in left if not any(fnmatch.fnmatchcase(name, each) for each in ignore)]
    problems = ""
    for title, lines in (
        ("in no file", missing),
        ("in the files, and nobody takes them (ignore=[...] leaves them)", unused),
        ("of another shape or dtype than the file's", wrong),
    ):
        more = [f"  and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
        problems += "".join(f"\n{line}" for line in (title, *lines[:_LINES], *more)) if lines else ""
    if problems:
        raise ShardingError(f"axes.nn.load_safetensors{problems}")
    return found


def _misfit(tensor: torch.Tensor, there: Any) -> str:
    """Why a tensor can't take what a file has; nothing where it can."""
    shape, dtype = list(there.get_shape()), _DTYPES.get(there.get_dtype())
    if tensor.is_meta:
        return "the parameter has no memory; shard the module (axes.shard_module), or module.to_empty(), before"
    if shape != list(tensor.shape):
        return f"the parameter is {list(tensor.shape)}, the file has {shape}"
    if dtype is None:
        return f"the file has {there.get_dtype()}, which torch has no plain dtype for"
    if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.dtype.is_floating_point):
        return f"the parameter is {tensor.dtype}, the file has {dtype}; only floating point values are converted"
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        return f"a parameter has nothing pending; found {tensor.placements}"
    return ""


# --- files that are written


class _File(NamedTuple):
    """A file to write: its name, its header, its size, and of each tensor the place and the first rank that has it."""

    name: str
    header: bytes
    places: dict[str, tuple[int, int]]
    size: int


def _named(module: torch.nn.Module, names: Names | None) -> dict[str, torch.Tensor]:
    """The tensors of a module by their names in the files."""
    found: dict[str, torch.Tensor] = {}
    for tied, x, (name, *_) in _wanted(_tensors(module), names):
        if name is None:
            continue
        pending = any(p.is_partial() for p in getattr(x, "placements", ()))
        wrong = "two parameters have this name" if name in found else "no tensor can have this name"
        if x.dtype not in _CODES:
            wrong = f"such a file has no {x.dtype}"
        elif x.is_meta:
            wrong = "it has no values, on the device 'meta'"
        elif pending:
            wrong = "something of it is pending; reshard it first"
        elif name not in found and name != _METADATA:
            found[name] = x if isinstance(x, DTensor) else x.resolve_conj().resolve_neg()
            continue
        raise ShardingError(f"axes.nn.save_safetensors: {tied[0]} can't be in the files as '{name}': {wrong}")
    return found


def _copy(x: torch.Tensor, rank: int) -> tuple[str, int, int]:
    """Of which copy of a tensor this rank has a part, by the ranks that share it, how many they are, and a checksum."""
    ranks = sorted(x.device_mesh.mesh.flatten().tolist()) if isinstance(x, DTensor) else [rank]
    numbers = local(x).detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(str(ranks).encode()).hexdigest()[:16], len(ranks), int(numbers.sum(dtype=torch.int64))


def _planned(every: Sequence[Sequence[Sequence[Any]]], file_bytes: int) -> list[_File]:
    """The files for all tensors of all ranks, the same on each of them."""
    tensors: dict[str, tuple[str, list[int], int]] = {}
    copies: dict[str, dict[tuple[str, int], list[int]]] = {}
    for rank, told in enumerate(every):
        for name, code, shape, copy, size, checksum in told:
            known = tensors.setdefault(name, (code, shape, rank))
            if known[:2] != (code, shape):
                raise ShardingError(
                    f"axes.nn.save_safetensors: '{name}' is {known[0]} {known[1]} on rank {known[2]}, and {code} "
                    f"{shape} on rank {rank}"
                )
            copies.setdefault(name, {}).setdefault((copy, size), []).append(checksum)
    for name, found in copies.items():
        for (_, size), checksums in found.items():
            if len(checksums) != size:
                raise ShardingError(
                    f"axes.nn.save_safetensors: '{name}' lies on {size} ranks, and {len(checksums)} of them have it "
                    "under this name; give it one name on all"
                )
        if len({tuple(sorted(checksums)) for checksums in found.values()}) > 1:
            raise ShardingError(
                f"axes.nn.save_safetensors: '{name}' is another tensor on other ranks. Stages of a pipeline name their "
                "parameters as the whole model does, by names=; copies of one have equal values"
            )
    groups, size = [list[str]()], 0
    for name, (code, shape, _) in tensors.items():
        size += math.prod(shape) * _DTYPES[code].itemsize
        if groups[-1] and size > file_bytes:
            groups.append([])
            size = math.prod(shape) * _DTYPES[code].itemsize
        groups[-1].append(name)
    names = [f"model-{at + 1:05}-of-{len(groups):05}.safetensors" for at in range(len(groups))]
    names = names if len(groups) > 1 else [_WHOLE]
    return [_file(name, {each: tensors[each] for each in group}) for name, group in zip(names, groups, strict=True)]


def _file(name: str, tensors: Mapping[str, tuple[str, list[int], int]]) -> _File:
    end, header, begins = 0, dict[str, Any]({_METADATA: {"format": "pt"}}), dict[str, int]()
    for each in sorted(tensors, key=lambda each: -_DTYPES[tensors[each][0]].itemsize):  # so that each is aligned
        code, shape, _ = tensors[each]
        begins[each], end = end, end + math.prod(shape) * _DTYPES[code].itemsize
        header[each] = {"dtype": code, "shape": shape, "data_offsets": [begins[each], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    places = {each: (first + begin, tensors[each][2]) for each, begin in begins.items()}
    return _File(name, len(text).to_bytes(8, "little") + text, places, first + end)


def _begin(path: Path, files: Sequence[_File]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for file in files:
        with (path / f"{file.name}.part").open("xb") as opened:
            opened.write(file.header)
            opened.truncate(file.size)


def _write(path: Path, files: Sequence[_File], own: Mapping[str, torch.Tensor], rank: int) -> None:
    """Write what this rank has and no rank before it."""
    for file in files:
        here = [(own[name], start, first) for name, (start, first) in file.places.items() if name in own]
        mine = [(x, start) for x, start, first in here if _is_first(x, first, rank)]
        if mine:
            with (path / f"{file.name}.part").open("r+b") as opened:
                for x, start in mine:
                    for box in boxes(x):
                        _write_box(opened, start, x, box)


def _is_first(x: torch.Tensor, first: int, rank: int) -> bool:
    """Whether this rank is the first of those that have the same part of a tensor."""
    if not isinstance(x, DTensor):
        return rank == first
    coordinate = x.device_mesh.get_coordinate()
    return coordinate is not None and not any(
        at for at, placement in zip(coordinate, x.placements, strict=True) if placement.is_replicate()
    )


def _write_box(opened: BinaryIO, start: int, x: torch.Tensor, box: Any) -> None:
    """Write a box of a tensor, row by row of what is contiguous in the whole."""
    shape = x.shape
    count = next((dim for dim in reversed(range(x.ndim)) if box.sizes[dim] != shape[dim]), 0)
    rows = box.within(local(x)).detach().cpu().contiguous().view(-1).view(torch.uint8)
    strides = [math.prod(shape[dim + 1 :]) * x.itemsize for dim in range(x.ndim)]
    first = start + sum(at * stride for at, stride in zip(box.offsets, strides, strict=True))
    places = itertools.product(*[range(size) for size in box.sizes[:count]])
    each = math.prod(box.sizes[count:]) * x.itemsize
    for place, row in zip(places, rows.split(each) if each else (), strict=False):
        opened.seek(first + sum(at * stride for at, stride in zip(place, strides, strict=False)))
        opened.write(memoryview(row.numpy()))


def _finish(path: Path, files: Sequence[_File]) -> None:
    for file in files:
        (path / f"{file.name}.part").rename(path / file.name)
    if len(files) > 1:
        total = sum(file.size - len(file.header) for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": {name: f.name for f in files for name in f.places}}
        (path / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


__all__ = ["load_safetensors", "save_safetensors"]
