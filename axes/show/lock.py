"""How a model lies on a mesh and what its step sends, as text that a repository keeps: `python -m axes lock`.

    axes lock 1
    model  train.py:build
    mesh   dp=2048 tp=8
    ranks  0

    rank 0
    group      tp  size 8  ranks 0..7
    parameter  up.weight  float32  _@tp _ on dp tp  [16384, 4096] -> [2048, 4096]  33,554,432 B
    forward    all_reduce  tp  1,835,008 B  MLP  axes.einsum 'b f@tp, d f@tp -> b d'

Each line is a fact of its own, in columns that don't move with other lines, so that a change of layout is a changed
line in a review. Lines have neither the place in a file nor times nor versions, which change without the layout.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import AxesError, ShardingError, shown, suggestion
from axes.algebra.mesh import Mesh
from axes.runtime import torch_private
from axes.runtime.agreement import ranks_text
from axes.runtime.groups import process_groups
from axes.runtime.places import is_users, line_of_code
from axes.runtime.sharded import sharding_of
from axes.show.recorder import entered_world, explained_step

VERSION = 1
"""The version of the text: a line of another form is another version."""

_ABOUT = "# Written by `python -m axes lock`, and compared by `python -m axes lock --check`."
_MOST = 40
"""Lines that a diff shows."""


@dataclass(frozen=True)
class Subject:
    """What a lock is of.

    model: the function that makes the model, as text. declared: the mesh as text, with the sizes of all axes.
    ranks: those whose part of it is told.
    """

    model: str
    declared: str
    ranks: tuple[int, ...]

    @property
    def mesh(self) -> Mesh:
        """The mesh, without a job."""
        return Mesh(*self.declared.split("; "))

    @property
    def head(self) -> list[str]:
        """The first lines of the text, by which it can be made again."""
        ranks = " ".join(map(str, self.ranks))
        head = [f"axes lock {VERSION}", f"model  {self.model}", f"mesh   {self.declared}", f"ranks  {ranks}"]
        return [_ABOUT, *head]


def subject_of(text: str, file: str) -> Subject:
    """What the lock in a file is of, by its first lines; `AxesError` where they aren't those of a lock."""
    head = text.split("\n\n", 1)[0].splitlines()
    words = (line.partition(" ") for line in head if not line.startswith("#"))
    lines = {name: value.strip() for name, _, value in words}
    version = lines.get("axes", "").removeprefix("lock ")
    if version != str(VERSION):
        what = f"is of version {version}, and this is version {VERSION}" if version.isdecimal() else "isn't a lock"
        raise AxesError(f"{file} {what}; write it anew: python -m axes lock {file} --model MODEL --mesh MESH")
    missing = [name for name in ("model", "mesh", "ranks") if not lines.get(name)]
    ranks = lines.get("ranks", "").split()
    if missing or not all(rank.isdecimal() for rank in ranks):
        raise AxesError(f"{file} has no line '{(missing or ['ranks'])[0]}  ...' that can be read")
    return Subject(lines["model"], lines["mesh"], tuple(map(int, ranks)))


def with_all_sizes(mesh: Mesh, text: str) -> str:
    """The text of a mesh with the sizes of its axes, and its further names as they are written.

    >>> with_all_sizes(Mesh("dp tp=2", ranks=range(8)), "dp=* tp=2; both = dp tp;")
    'dp=4 tp=2; both = dp tp'
    """
    further = (each.strip() for each in text.split(";")[1:])
    return "; ".join(filter(None, (mesh.declaration.partition(";")[0], *further)))


def locked(subject: Subject) -> list[dict[str, Any]]:
    """What is locked of each rank, as data: groups, parameters, buffers and collectives.

    The function makes the model in a simulated world, once for each rank. Raises `AxesError` for a function that
    isn't there, that raises, or that returns something else.
    """
    with _run_for(subject.model):
        make = _function(subject.model)
    return [_locked_rank(subject, make, rank) for rank in subject.ranks]


def text_of_lock(subject: Subject, parts: Sequence[Mapping[str, Any]]) -> str:
    """The text of a file."""
    lines = list(subject.head)
    for part in parts:
        lines += ["", f"rank {part['rank']}"]
        if not part["exact"]:
            lines.append(_line("note", ("bytes of some exchanges are as if other ranks told what this one does", 0)))
        for rows in (_group_rows(part), _tensor_rows(part), _collective_rows(part), _total_rows(part)):
            lines += rows
    return "\n".join(lines) + "\n"


def summary_of_lock(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each rank."""
    return [
        f"  rank {part['rank']}: {len(part['parameters'])} parameters, {len(part['groups'])} groups, "
        f"{sum(each['times'] for each in part['collectives'])} collectives"
        for part in parts
    ]


def changed_lines(kept: str, found: str) -> list[str]:
    """The lines that only one of two locks has, each behind `-` or `+`, and behind the rank where there are several."""
    changes: list[str] = []
    before, after = _by_rank(kept), _by_rank(found)
    for rank in dict.fromkeys((*before, *after)):
        lines = difflib.unified_diff(before.get(rank, []), after.get(rank, []), lineterm="", n=0)
        several = f"{rank}: " if rank and max(len(before), len(after)) > 2 else ""
        changes += [f"{line[0]} {several}{line[1:]}" for line in itertools.islice(lines, 2, None) if line[0] in "+-"]
    return changes


def shown_changes(changes: Sequence[str]) -> list[str]:
    """The first of them, and how many more there are."""
    more = len(changes) - _MOST
    return [*changes[:_MOST], *([f"... {more} more lines"] if more > 0 else [])]


def _by_rank(text: str) -> dict[str, list[str]]:
    """The lines of a lock, by the rank that they are of: those of its head under ""."""
    found: dict[str, list[str]] = {"": []}
    for line in text.splitlines():
        if line.startswith("rank "):
            found[line] = []
        elif line.strip():
            found[list(found)[-1]].append(line.rstrip())
    return found


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
        place = _place_of(error.__traceback__)
        raise AxesError(f"{model}: {what}{error}{f'{chr(10)}at {place}' if place else ''}") from error
    finally:
        sys.argv = arguments


def _place_of(raised: TracebackType | None) -> str:
    """The innermost line of the user's that an error came through."""
    found = ""
    while raised is not None:
        if is_users(raised.tb_frame):
            found = line_of_code(raised.tb_frame.f_code, raised.tb_lasti)
        raised = raised.tb_next
    return found


def _function(model: str) -> Callable[..., Any]:
    """The function that `train.py:build` or `package.module:build` is."""
    where, _, name = model.rpartition(":")
    if not where or not name.isidentifier():
        raise AxesError("--model is a function in a file or a module, like train.py:build or package.module:build")
    module = _module_of_file(Path(where)) if where.endswith(".py") else _module(where)
    found = getattr(module, name, None)
    if not callable(found) or isinstance(found, torch.nn.Module):
        known = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise AxesError(f"{where} has no function {name!r}{suggestion(name, known)}")
    return found


def _module(name: str) -> Any:
    _first_in_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # one that the module needs
        raise AxesError(f"there is no module {error.name!r}; modules are looked for from {Path.cwd()} on") from None


def _module_of_file(file: Path) -> Any:
    """The module of a file, as `python file` would find what it imports beside it."""
    if not file.is_file():
        raise AxesError(f"there is no file {str(file)!r} in {Path.cwd()}; the path is from the working directory")
    _first_in_path(file.resolve().parent)
    found = importlib.import_module(file.stem)
    if Path(found.__file__ or "").resolve() != file.resolve():
        raise AxesError(f"another module is called {file.stem!r}, {found.__file__}; name it as package.module:function")
    return found


def _first_in_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


# --- what is locked


def _locked_rank(subject: Subject, make: Callable[..., Any], rank: int) -> dict[str, Any]:
    """The part of one rank."""
    with contextlib.ExitStack() as stack:
        mesh = entered_world(stack, subject.mesh.at(rank), [])
        assert mesh is not None
        torch.manual_seed(0)
        with _run_for(subject.model):
            module, step, inputs = _made(make(mesh) if _takes_one(make) else make())
            told = {} if step is None else explained_step(step, inputs, mesh).facts
        alike = (list(each) for _, each in itertools.groupby(told.get("collectives", ()), _line_of))
        return {
            "rank": rank,
            "exact": told.get("exact", True),
            "groups": _groups_on(mesh),
            "parameters": _tensors_of(module.named_parameters(remove_duplicate=False)),
            "buffers": _tensors_of(module.named_buffers(remove_duplicate=False)),
            "collectives": [_kept_of(each[0], len(each)) for each in alike],
        }


def _takes_one(make: Callable[..., Any]) -> bool:
    """Whether the function takes the mesh."""
    empty = inspect.Parameter.empty
    taken = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in taken and each.default is empty for each in inspect.signature(make).parameters.values())


def _made(made: Any) -> tuple[torch.nn.Module, Callable[..., Any] | None, tuple[Any, ...]]:
    """The module, the step and what it is called with, of what a function returned."""
    module, *rest = made if isinstance(made, tuple) and made else (made,)
    if not isinstance(module, torch.nn.Module):
        raise AxesError(
            "the function returns a module, and in a tuple with it a step, or what the module is called with: "
            f"(model, x), or (model, lambda: train_step(model)); found {shown(made)}"
        )
    if len(rest) == 1 and callable(rest[0]):
        return module, rest[0], ()
    return module, module if rest else None, tuple(rest)


def _groups_on(mesh: Mesh) -> list[dict[str, Any]]:
    """The communicators of this rank, each with all names of its ranks."""
    found = []
    for info in process_groups():
        if len(info.ranks) == 1:
            continue
        lines = {name: mesh.axis(name).ranks_of(mesh.rank) for name in mesh.namespace}
        named = [name for name, ranks in lines.items() if len(ranks) == len(info.ranks) and [*ranks] == [*info.ranks]]
        names = [*named, *(name for name in info.names if name not in named)]
        found.append({"names": names or ["world"], "size": len(info.ranks), "ranks": ranks_text(info.ranks)})
    return sorted(found, key=lambda each: (each["size"], each["ranks"], each["names"]))


def _tensors_of(named: Iterator[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """How tensors lie. A tensor that has two names is told under the first."""
    found: list[dict[str, Any]] = []
    first: dict[int, str] = {}
    for name, x in named:
        known = first.setdefault(id(x), name)
        found.append({"name": name, "same_as": known} if known != name else {"name": name, **_layout_of(x)})
    return found


def _layout_of(x: torch.Tensor) -> dict[str, Any]:
    """How a tensor lies, as data: one that isn't a DTensor has neither spec nor axes."""
    local = torch_private.local_of(x) if isinstance(x, DTensor) else x
    spec, on, largest = None, list[str](), local.numel()
    if isinstance(x, DTensor):
        try:
            sharding = sharding_of(x)
            spec, on, largest = sharding.spec, [*sharding.mesh.axis_names], sharding.largest_tile(tuple(x.shape))
        except ShardingError:  # a placement that has no spec
            spec, on = " ".join(map(str, x.placements)), [*(x.device_mesh.mesh_dim_names or ())]
    return {
        "dtype": str(x.dtype).removeprefix("torch."),
        "spec": spec,
        "mesh": on,
        "shape": list(x.shape),
        "local": list(local.shape),
        "bytes": local.numel() * local.element_size(),
        "largest_bytes": largest * local.element_size(),
        "trained": isinstance(x, torch.nn.Parameter) and x.requires_grad,
    }


_OF_COLLECTIVE = ("phase", "kind", "axes", "group_size", "bytes_in", "bytes_out", "module", "by", "what")


def _line_of(sent: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells collectives apart that follow one another."""
    return tuple(str(sent[name]) for name in _OF_COLLECTIVE)


def _kept_of(sent: Mapping[str, Any], times: int) -> dict[str, Any]:
    return {**{name: sent[name] for name in _OF_COLLECTIVE}, "times": times}


# --- as lines


def _line(kind: str, *cells: tuple[str, int]) -> str:
    """A line in columns, each as wide as is said, or as what stands in it."""
    return "  ".join([f"{kind:<9}", *(f"{text:<{width}}" for text, width in cells)]).rstrip()


def _group_rows(part: Mapping[str, Any]) -> list[str]:
    return [
        _line("group", (", ".join(each["names"]), 14), (f"size {each['size']}", 12), (each["ranks"], 0))
        for each in part["groups"]
    ]


def _tensor_rows(part: Mapping[str, Any]) -> list[str]:
    return [
        _tensor_row(kind, each)
        for kind, tensors in (("parameter", part["parameters"]), ("buffer", part["buffers"]))
        for each in tensors
    ]


def _tensor_row(kind: str, each: Mapping[str, Any]) -> str:
    if "same_as" in each:
        return _line(kind, (each["name"], 32), (f"is {each['same_as']}", 0))
    lies = f"{each['spec'] or '(scalar)'} on {' '.join(each['mesh'])}" if each["mesh"] else "on each rank"
    shapes = f"{each['shape']} -> {each['local']}" if each["mesh"] else str(each["local"])
    size = f"{each['bytes']:,} B"
    if each["largest_bytes"] != each["bytes"]:
        size += f", at most {each['largest_bytes']:,} B"
    frozen = "  frozen" if kind == "parameter" and not each["trained"] else ""
    return _line(kind, (each["name"], 32), (each["dtype"], 8), (lies, 28), (shapes, 28), (size + frozen, 0))


def _collective_rows(part: Mapping[str, Any]) -> list[str]:
    return [_collective_row(each) for each in part["collectives"]]


def _collective_row(each: Mapping[str, Any]) -> str:
    over = " ".join(each["axes"]) or f"{each['group_size']} ranks"
    moved = f"{each['bytes_in']:,} B"
    if each["bytes_out"] != each["bytes_in"]:
        moved += f" in, {each['bytes_out']:,} B out"
    what = each["what"] if each["by"] == "axes" else f"[{each['by']}] {each['what']}".rstrip()
    times = f"  {each['times']} times" if each["times"] > 1 else ""
    return _line(
        each["phase"], (each["kind"], 14), (over, 8), (moved, 14), (each["module"] or "-", 26), (what + times, 0)
    )


def _total_rows(part: Mapping[str, Any]) -> list[str]:
    """What is sent over each axis, added up, so that the sum of many small changes is seen."""
    totals: dict[str, list[int]] = {}
    for each in part["collectives"]:
        sums = totals.setdefault(" ".join(each["axes"]) or f"{each['group_size']} ranks", [0, 0, 0])
        for at, count in enumerate((1, each["bytes_in"], each["bytes_out"])):
            sums[at] += count * each["times"]
    rows = [
        _line(
            "total",
            (axes, 14),
            (f"{count} collective{'s' * (count != 1)}", 16),
            (f"{taken:,} B in, {given:,} B out", 0),
        )
        for axes, (count, taken, given) in totals.items()
    ]
    held = sum(each.get("bytes", 0) for each in part["parameters"])
    return [*rows, _line("total", ("parameters", 14), (f"{held:,} B", 0))]
