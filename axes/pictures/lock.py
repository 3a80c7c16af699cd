"""How a model lies on a mesh and what its step sends, as text that a repository keeps: `python -m axes explain`.

    # python -m axes explain train.py:build --mesh 'dp=2048 tp=8'

    rank 0
    parameter  up.weight  float32  _@tp _ on dp tp  [16384, 4096] -> [2048, 4096]  33,554,432 B
    forward    all_reduce  tp  1,835,008 B  MLP  axes.einsum 'b f@tp, d f@tp -> b d'

The first line is the command that has written it, by which it is written again and compared. Each other line is a fact
of its own, in columns that don't move with other lines, so that a change of layout is a changed line in a review. Lines
have neither the place in a file nor times nor versions, which change without the layout.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import itertools
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axes import AxesError, Mesh, sharding_of
from axes.extension import is_users, local, shown
from axes.pictures.recorder import entered_world, explained_step, who
from axes.pictures.show import Explanation, as_written

_BEGINS = "# python -m axes explain "

Line = tuple[str, ...]
"""A line in cells: of what it is, and what it says."""

_TENSOR, _COLLECTIVE = (9, 32, 8, 28, 28, 0), (9, 14, 8, 14, 26, 0)
_WIDTHS: dict[str, tuple[int, ...]] = {
    "parameter": _TENSOR,
    "buffer": _TENSOR,
    "forward": _COLLECTIVE,
    "backward": _COLLECTIVE,
    "total": (9, 14, 0),
    "note": (9, 0),
}
"""How wide the cells of each kind of line are, or as wide as what stands in them."""


def explained_model(model: str, mesh: Mesh, ranks: Sequence[int], command: Sequence[str]) -> Explanation:
    """The lines of a model on a mesh, of each of these ranks, behind the command that writes them.

    The function makes the model in a simulated world, once for each rank. Raises `AxesError` for a function that
    isn't there, that raises, or that returns something else.
    """
    with _run_for(model):
        make = _function(model)
        parts = {rank: [*_lines_of_rank(make, mesh.at(rank))] for rank in ranks}
    texts = ("\n".join((f"rank {rank}", *map(_aligned, lines))) for rank, lines in parts.items())
    told = [{"rank": rank, "lines": [[*line] for line in lines]} for rank, lines in parts.items()]
    facts = {"kind": "model", "model": model, "mesh": mesh.declaration, "ranks": told}
    return as_written("\n\n".join((f"{_BEGINS}{shlex.join(command)}", *texts)), facts)


def command_of_file(text: str, file: str) -> list[str]:
    """What is to be done again to compare a text, by its first line; `AxesError` where that is no such line."""
    first, _, _ = text.partition("\n")
    if not first.startswith(_BEGINS) or "--check" in first or first.count("'") % 2 or first.count('"') % 2:
        raise AxesError(
            f"{file} doesn't begin with the command that writes it, '{_BEGINS}...'; write it again: "
            f"python -m axes explain train.py:build --mesh MESH > {file}"
        )
    return shlex.split(first.removeprefix(_BEGINS))


def compared(file: str, kept: str, found: Explanation) -> Explanation:
    """What has changed since a text was written to a file, as a unified diff."""
    before, now = kept.rstrip().splitlines(), str(found).splitlines()
    changes, facts = [*difflib.unified_diff(before, now, file, "now", n=0, lineterm="")], found.json()
    model, facts = facts["model"], {**facts, "file": file, "same": not changes, "changes": changes}
    if not changes:
        return as_written(f"{file}: {model} is unchanged", facts)
    wrong = (
        f"the layout of {model} differs from {file}; if you meant to change it, write the file again and commit it: "
        f"{before[0].removeprefix('# ')} > {file}"
    )
    return as_written("\n".join(changes), facts, wrong)


# --- the function


@contextlib.contextmanager
def _run_for(model: str) -> Iterator[None]:
    """Runs code of the user's: without arguments of the command, what it prints on stderr, what it raises in a line."""
    arguments = sys.argv
    sys.argv = [model.rpartition(":")[0]]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        what = "" if isinstance(error, AxesError) else f"{type(error).__name__}: "
        walked = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_users(frame)]
        places = [f"\nat {Path(f.f_code.co_filename).name}:{line} in {f.f_code.co_name}" for f, line in walked]
        raise AxesError(f"{model}: {what}{error}{''.join(places[-1:])}") from error
    finally:
        sys.argv = arguments


def _function(model: str) -> Callable[..., Any]:
    """The function that `train.py:build` or `package.module:build` is, as `python train.py` would import it."""
    where, _, name = model.rpartition(":")
    if not where or not name.isidentifier():
        raise AxesError(
            "a model is a function in a file or a module, like train.py:build or package.module:build; an expression "
            "has two sides, like 'b s@tp d -> b s d'"
        )
    if where.endswith(".py") and not Path(where).is_file():
        raise AxesError(f"there is no file {where}")
    folder, module_name = (Path(where).parent, Path(where).stem) if where.endswith(".py") else (Path(), where)
    sys.path.insert(0, str(folder.resolve()))
    module = importlib.import_module(module_name)
    found = getattr(module, name, None)
    if not callable(found) or isinstance(found, torch.nn.Module):
        known = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise AxesError(f"{where} has no function {shown(name, known)}")
    return found


def _made(make: Callable[..., Any], mesh: Mesh) -> tuple[torch.nn.Module, Callable[..., Any], Sequence[Any]]:
    """The module, the step and what it is called with, of what a function returns."""
    needed = [each for each in inspect.signature(make).parameters.values() if each.default is each.empty]
    found = make(mesh) if needed else make()
    module, *rest = found if isinstance(found, tuple) and found else (found,)
    if not isinstance(module, torch.nn.Module):
        raise AxesError(
            "the function returns a module, and in a tuple with it a step, or what the module is called with: "
            f"(model, x), or (model, lambda: train_step(model)); found {shown(found)}"
        )
    return (module, rest[0], ()) if len(rest) == 1 and callable(rest[0]) else (module, module if rest else tuple, rest)


# --- the lines of a rank


def _lines_of_rank(make: Callable[..., Any], mesh: Mesh) -> Iterator[Line]:
    """How the part of a rank lies, from which the mesh is seen, and what it sends."""
    with contextlib.ExitStack() as stack:
        mesh = entered_world(stack, mesh, []) or mesh
        torch.manual_seed(0)
        module, step, inputs = _made(make, mesh)
        told = explained_step(step, inputs, mesh).json()
        if not told["exact"]:
            yield "note", "bytes of some exchanges are as if other ranks told what this one does"
        yield from _tensors_of("parameter", module.named_parameters())
        yield from _tensors_of("buffer", module.named_buffers())
        for line, alike in itertools.groupby(map(_collective, told["collectives"])):
            times = sum(1 for _ in alike)
            yield (*line[:-1], line[-1] + (f"  {times} times" if times > 1 else ""))
        held = sum(local(x).numel() * x.element_size() for x in module.parameters())
        yield "total", "parameters", f"{held:,} B"


def _tensors_of(kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Line]:
    """How tensors lie: dtype, spec and axes, shapes and bytes. One that has two names is under the first."""
    for name, x in named:
        held = local(x)
        lies, shapes, largest = "on each rank", str([*held.shape]), held.numel()
        if isinstance(x, DTensor):
            sharding = sharding_of(x)
            lies = f"{sharding.spec or '(scalar)'} on {' '.join(sharding.mesh.axis_names)}"
            shapes, largest = f"{[*x.shape]} -> {shapes}", sharding.largest_tile(tuple(x.shape))
        sizes = [f"{count * held.element_size():,} B" for count in dict.fromkeys((held.numel(), largest))]
        frozen = "  frozen" if kind == "parameter" and not x.requires_grad else ""
        yield kind, name, str(x.dtype).removeprefix("torch."), lies, shapes, ", at most ".join(sizes) + frozen


def _collective(sent: Mapping[str, Any]) -> Line:
    """A collective, without its place and time."""
    over = " ".join(sent["axes"]) or f"{sent['group_size']} ranks"
    moved = f"{sent['bytes_in']:,} B"
    if sent["bytes_out"] != sent["bytes_in"]:
        moved += f" in, {sent['bytes_out']:,} B out"
    return sent["phase"], sent["kind"], over, moved, sent["module"] or "-", who(sent)


def _aligned(line: Line) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(line, _WIDTHS[line[0]], strict=False)).rstrip()
