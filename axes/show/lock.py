"""How a model lies on a mesh and what its step sends, as text that a repository keeps: `python -m axes explain`.

    # python -m axes explain train.py:build --mesh 'dp=2048 tp=8'

    rank 0
    group      tp  size 8  ranks 0..7
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

from axes.algebra.errors import AxesError, ShardingError
from axes.algebra.mesh import Mesh
from axes.extension import local, shown
from axes.runtime.agreement import ranks_text
from axes.runtime.groups import process_groups
from axes.runtime.sharded import sharding_of
from axes.runtime.watching import is_users
from axes.show.recorder import entered_world, explained_step

_BEGINS = "# python -m axes explain "

Line = tuple[str, ...]
"""A line in cells: of what it is, and what it says."""

_WIDTHS = {
    "group": (14, 12),
    "parameter": (32, 8, 28, 28),
    "buffer": (32, 8, 28, 28),
    "forward": (14, 8, 14, 26),
    "backward": (14, 8, 14, 26),
    "total": (14, 16),
}
"""How wide the cells behind the first are, or as wide as what stands in them."""


def lines_of_model(model: str, mesh: Mesh, ranks: Sequence[int]) -> dict[int, list[Line]]:
    """The lines of a model on a mesh, of each of these ranks.

    The function makes the model in a simulated world, once for each rank. Raises `AxesError` for a function that
    isn't there, that raises, or that returns something else.
    """
    with _run_for(model):
        make = _function(model)
        return {rank: [*_lines_of_rank(make, mesh.at(rank))] for rank in ranks}


def text_of_model(command: Sequence[str], parts: Mapping[int, Sequence[Line]]) -> str:
    """The lines as the text of a file, behind the command that writes it."""
    texts = ("\n".join((f"rank {rank}", *map(_aligned, lines))) for rank, lines in parts.items())
    return "\n\n".join((f"{_BEGINS}{shlex.join(command)}", *texts))


def command_of_file(text: str, file: str) -> list[str]:
    """What is to be done again to compare a text, by its first line; `AxesError` where that is no such line."""
    first, _, _ = text.partition("\n")
    if not first.startswith(_BEGINS) or "--check" in first:
        raise AxesError(
            f"{file} doesn't begin with the command that writes it, '{_BEGINS}...'; write it anew: "
            f"python -m axes explain train.py:build --mesh MESH > {file}"
        )
    return shlex.split(first.removeprefix(_BEGINS))


def changed_lines(kept: str, found: str) -> list[str]:
    """The lines that only one of two texts has, each behind `-` or `+`, and behind the rank where there are several."""
    changes: list[str] = []
    before, after = _by_rank(kept), _by_rank(found)
    for rank in dict.fromkeys((*before, *after)):
        lines = difflib.unified_diff(before.get(rank, []), after.get(rank, []), lineterm="", n=0)
        several = f"{rank}: " if max(len(before), len(after)) > 1 else ""
        changes += [f"{line[0]} {several}{line[1:]}" for line in itertools.islice(lines, 2, None) if line[0] in "+-"]
    return changes


def _by_rank(text: str) -> dict[str, list[str]]:
    """The lines of a text, by the rank that they are of."""
    parts = (part.strip().splitlines() for part in text.split("\nrank ")[1:])
    return {f"rank {first}": [*map(str.rstrip, lines)] for first, *lines in parts}


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
    file = Path(where).resolve() if where.endswith(".py") else None
    if file is not None and not file.is_file():
        raise AxesError(f"there is no file {where!r} in {Path.cwd()}; the path is from the working directory")
    folder = str(Path.cwd() if file is None else file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.import_module(where if file is None else file.stem)
    if file is not None and Path(module.__file__ or "").resolve() != file:
        raise AxesError(
            f"another module is called {file.stem!r}, {module.__file__}; name it as package.module:function"
        )
    found = getattr(module, name, None)
    if not callable(found) or isinstance(found, torch.nn.Module):
        known = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise AxesError(f"{where} has no function {shown(name, known)}")
    return found


def _made(make: Callable[..., Any], mesh: Mesh) -> tuple[torch.nn.Module, Callable[..., Any] | None, Sequence[Any]]:
    """The module, the step and what it is called with, of what a function returns."""
    taken = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(make).parameters.values()
    found = make(*[mesh for each in parameters if each.kind in taken and each.default is each.empty][:1])
    module, *rest = found if isinstance(found, tuple) and found else (found,)
    if not isinstance(module, torch.nn.Module):
        raise AxesError(
            "the function returns a module, and in a tuple with it a step, or what the module is called with: "
            f"(model, x), or (model, lambda: train_step(model)); found {shown(found)}"
        )
    return (module, rest[0], ()) if len(rest) == 1 and callable(rest[0]) else (module, module if rest else None, rest)


# --- the lines of a rank


def _lines_of_rank(make: Callable[..., Any], mesh: Mesh) -> Iterator[Line]:
    """How the part of a rank lies, from which the mesh is seen, and what it sends."""
    told: Mapping[str, Any] = {"exact": True, "collectives": (), "totals": ()}
    with contextlib.ExitStack() as stack:
        mesh = entered_world(stack, mesh, []) or mesh
        torch.manual_seed(0)
        module, step, inputs = _made(make, mesh)
        told = told if step is None else explained_step(step, inputs, mesh).facts
        if not told["exact"]:
            yield "note", "bytes of some exchanges are as if other ranks told what this one does"
        yield from _groups_on(mesh)
        yield from _tensors_of("parameter", module.named_parameters(remove_duplicate=False))
        yield from _tensors_of("buffer", module.named_buffers(remove_duplicate=False))
        for line, alike in itertools.groupby(map(_collective, told["collectives"])):
            times = sum(1 for _ in alike)
            yield (*line[:-1], line[-1] + (f"  {times} times" if times > 1 else ""))
        for total in told["totals"]:
            count, moved = total["collectives"], f"{total['bytes_in']:,} B in, {total['bytes_out']:,} B out"
            yield "total", " ".join(total["axes"]) or "-", f"{count} collective{'s' * (count != 1)}", moved
        held = sum(local(x).numel() * x.element_size() for x in module.parameters())
        yield "total", "parameters", f"{held:,} B"


def _groups_on(mesh: Mesh) -> list[Line]:
    """The communicators of this rank, each with all names of its ranks."""
    found = []
    for info in (each for each in process_groups() if len(each.ranks) > 1):
        names = [name for name in mesh.namespace if [*mesh.axis(name).ranks] == [*info.ranks]]
        names = [*dict.fromkeys((*names, *info.names))] or ["world"]
        ranks = ranks_text(info.ranks)
        found.append((len(info.ranks), ranks, ("group", ", ".join(names), f"size {len(info.ranks)}", ranks)))
    return [line for *_, line in sorted(found)]


def _tensors_of(kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Line]:
    """How tensors lie. A tensor that has two names is told under the first."""
    first: dict[int, str] = {}
    for name, x in named:
        known = first.setdefault(id(x), name)
        yield (kind, name, f"is {known}") if known != name else (kind, name, *_layout_of(x, kind))


def _layout_of(x: torch.Tensor, kind: str) -> Line:
    """The dtype, spec and mesh, shapes and bytes of a tensor."""
    held = local(x)
    lies, shapes, largest = "on each rank", str([*held.shape]), held.numel()
    if isinstance(x, DTensor):
        try:
            sharding = sharding_of(x)
            spec, on, largest = sharding.spec, sharding.mesh.axis_names, sharding.largest_tile(tuple(x.shape))
        except ShardingError:  # a placement that has no spec
            spec, on = " ".join(map(str, x.placements)), tuple(x.device_mesh.mesh_dim_names or ())
        lies, shapes = f"{spec or '(scalar)'} on {' '.join(on)}", f"{[*x.shape]} -> {shapes}"
    sizes = [f"{count * held.element_size():,} B" for count in dict.fromkeys((held.numel(), largest))]
    frozen = "  frozen" if kind == "parameter" and not x.requires_grad else ""
    return str(x.dtype).removeprefix("torch."), lies, shapes, ", at most ".join(sizes) + frozen


def _collective(sent: Mapping[str, Any]) -> Line:
    """A collective, without its place and time."""
    over = " ".join(sent["axes"]) or f"{sent['group_size']} ranks"
    moved = f"{sent['bytes_in']:,} B"
    if sent["bytes_out"] != sent["bytes_in"]:
        moved += f" in, {sent['bytes_out']:,} B out"
    what = sent["what"] if sent["by"] == "axes" else f"[{sent['by']}] {sent['what']}".rstrip()
    return sent["phase"], sent["kind"], over, moved, sent["module"] or "-", what


def _aligned(line: Line) -> str:
    kind, *cells = line
    widths = (*_WIDTHS.get(kind, ()), 0)
    padded = [f"{cell:<{width}}" for cell, width in itertools.zip_longest(cells, widths[: len(cells)], fillvalue=0)]
    return "  ".join((f"{kind:<9}", *padded)).rstrip()
