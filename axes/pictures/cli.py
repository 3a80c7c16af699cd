"""The command line: meshes, groups, expressions, models, plans and traces, from a terminal.

    python -m axes mesh "pp=2 dp=* tp=8" --world 64 --rank 13
    python -m axes groups --mesh "dp=4 tp=2"
    python -m axes explain "b s@tp d -> b s d@tp" b=8 s=2048 d=4096 --mesh "dp=4 tp=2"
    python -m axes explain train.py:build --mesh "dp=2048 tp=8" > layout.lock
    python -m axes explain --check layout.lock
    python -m axes plan "b s@tp d" "b s d@tp" b=8 s=2048 d=4096 --mesh "dp=4 tp=2"
    python -m axes transfer "f@fsdp d" "f d@tp" f=64 d=32 --source-mesh "fsdp=4" --target-mesh "dp=2 tp=2"
    python -m axes trace trace.*.json
    python -m axes check train.py models

A verb is a function of the options given, and answers with an `Explanation`. In `main` alone answers are printed (as
text, `--json`) and drawn (`--svg`, `--html`), and errors said: one message on stderr, and the status 1.
Only `explain` needs torch.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from axes import AxesError, Mesh, SizeError, plan, transfer
from axes.extension import factors_by_name, whole_shape
from axes.pictures import timeline
from axes.pictures.checker import mistakes_in
from axes.pictures.mesh_sheet import sheet_of_mesh
from axes.pictures.moves import sheet_of_plan
from axes.pictures.panels import Listing, Sheet
from axes.pictures.rank_text import short_ranks
from axes.pictures.show import SCHEMA, Explanation, as_written, explained_transfer, seen_mesh

_WIDTH = 80

_MESH = 'its axes, slowest first, and further names: "dp=* tp=8; all = dp tp"'
_OPTIONS: dict[str, dict[str, Any]] = {
    "declaration": {"help": _MESH},
    "equations": {"nargs": "*", "help": 'further names: "fsdp = pp dp"'},
    "subject": {"nargs": "?", "help": "an expression, or who makes a model: train.py:build, package.module:build"},
    "source": {"help": 'how it lies: "b s@tp d"'},
    "target": {"help": 'how it is to lie: "b s d@tp"'},
    "sizes": {"nargs": "*", "metavar": "NAME=SIZE", "help": "sizes of names: b=8"},
    "files": {"nargs": "+", "metavar": "FILE", "help": "what AXES_TRACE=trace.json has written: trace.*.json"},
    "sources": {"nargs": "+", "metavar": "PATH", "help": "Python files, and folders of them"},
    "--mesh": {"help": _MESH},
    "--source-mesh": {"required": True, "metavar": "MESH", "help": 'the axes there: "fsdp=4"'},
    "--target-mesh": {"required": True, "metavar": "MESH", "help": 'the axes here: "dp=2 tp=2"'},
    "--first": {"type": int, "help": "the first rank of the target mesh; behind the others unless told"},
    "--world": {"type": int, "help": "how many ranks there are; a size that is * follows"},
    "--rank": {"type": int, "action": "append", "help": "the rank to look from; of a model there may be several"},
    "--axis": {"action": "append", "metavar": "NAME", "help": "of this name alone; may be given several times"},
    "--dtype": {"default": "float32", "help": "the dtype of the tensors"},
    "--to-dtype": {"metavar": "DTYPE", "help": "what it becomes before it is sent"},
    "--bucket-mb": {"type": float, "default": 64, "help": "MiB of the buffers of a bucket"},
    "--op": {"default": "sum", "help": "by what a reduction reduces: sum, mean, max, min, prod, any, all"},
    "--check": {"metavar": "FILE", "help": "explain the model of FILE again; end with 1 where FILE says otherwise"},
    "--svg": {"metavar": "FILE", "help": "write a picture"},
    "--html": {"metavar": "FILE", "help": "write a page that a browser shows"},
    "--json": {"action": "store_true", "help": "print one JSON object"},
}
"""All that verbs take: without dashes in front, in this order."""


def main(program: str, words: Sequence[str]) -> None:
    """Carries out a command, and ends the process with its status."""
    try:
        given = _parsed(program, words)
        answer = given.run(given)
        for kind in ("svg", "html"):
            if path := getattr(given, kind, None):
                Path(path).write_text(getattr(answer, kind)(), encoding="utf-8")
        told = {"schema": SCHEMA, "command": given.verb, **answer.json()}
        print(json.dumps(told, indent=2) if given.json else str(answer), flush=True)
        wrong = answer.wrong
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
        sys.exit(1)
    except OSError as error:
        wrong = f"{error.filename}: {error.strerror}"
    except AxesError as error:
        wrong = str(error)
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(1)


def _parsed(program: str, words: Sequence[str]) -> argparse.Namespace:
    """The verb and the options of a command; ends the process with 2 where they are wrong."""
    parser = argparse.ArgumentParser(program, description="Distributed programs with named axes, without a job.")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, (run, takes) in _VERBS.items():
        about = inspect.cleandoc(str(run.__doc__))
        kept = argparse.RawDescriptionHelpFormatter
        one = verbs.add_parser(name, help=about.split("\n")[0], description=about, formatter_class=kept)
        for each in (*takes.split(), "--json"):
            one.add_argument(each, **_OPTIONS[each])
        one.set_defaults(run=run, verb=name, words=words[1:])
    known = verbs.choices.get(words[0]) if words else None
    # Sizes may stand among the options, which argparse's own way to a verb doesn't allow.
    return known.parse_intermixed_args(words[1:]) if known else parser.parse_args(words)


# --- verbs


def _of_mesh(given: argparse.Namespace) -> Explanation:
    """The axes and names of a mesh, and where a rank is.

    Example: python -m axes mesh "pp=2 dp=* tp=8" "fsdp = pp dp" --world 64
    """
    mesh = _mesh("; ".join((given.declaration, *given.equations)), given)
    names = {
        name: {"size": axis.size, "is": mesh.described(name), "axis": name in mesh.axis_names, "index": axis.index}
        | {"stride": axis.stride, "group": [*axis.ranks]}
        for name, axis in ((name, mesh.axis(name)) for name in mesh.names)
    }
    about = {"declaration": mesh.declaration, "ranks": mesh.size, "rank": mesh.rank, "coordinate": mesh.coordinate}
    return Explanation(partial(sheet_of_mesh, mesh), {**about, "names": names})


def _of_groups(given: argparse.Namespace) -> Explanation:
    """Who communicates with whom: the groups of each axis, or those of a rank.

    Example: python -m axes groups --mesh "dp=4 tp=2"
    """
    mesh = _mesh(given.mesh, given)
    facts, tables = dict[str, Any](), list[Listing]()
    for name in given.axis or mesh.names:
        axis, meaning = mesh.axis(name), "" if name in mesh.axis_names else f" ({mesh.described(name)})"
        groups, count = [axis.ranks] if given.rank else axis.all_ranks(), mesh.universe.size // axis.size
        facts[name] = {"size": axis.size, "count": count, "groups": [[*ranks] for ranks in groups]}
        many = f"{name}{meaning}: {count} group{'s' * (count != 1)} of {axis.size} ranks"
        rows = [(short_ranks(ranks, _WIDTH - 2),) for ranks in groups if axis.size > 1]
        title = many if rows else f"{name}: size 1, no rank communicates"
        tables.append(Listing((), tuple(rows), title=title))
    sheet = Sheet(f"Groups of {mesh.declaration}", "", tuple(tables))
    rank = mesh.rank if given.rank else None
    return Explanation(lambda room: sheet, {"mesh": mesh.declaration, "rank": rank, "axes": facts})


def _of_explain(given: argparse.Namespace) -> Explanation:
    """What an expression holds and sends; how a model lies, and what it sends.

    A model is a function that takes the mesh, or nothing, and returns
    (module, inputs...) or (module, step). It runs in a simulated world, without
    devices. With --check, what it says is compared with what it said before.

    Examples: python -m axes explain "b s@tp -> b s" b=8 s=2048 --mesh "tp=2"
              python -m axes explain train.py:build --mesh "dp=64" > layout.lock
              python -m axes explain --check layout.lock
    """
    from axes.pictures import explain, lock  # which import torch

    if given.check is not None:
        if given.subject or given.mesh or given.rank:
            raise AxesError("--check FILE takes the model, the mesh and the ranks from FILE; give it alone")
        kept = Path(given.check).read_text(encoding="utf-8", errors="replace")
        again = _parsed("python -m axes", ["explain", *lock.command_of_file(kept, given.check)])
        return lock.compared(given.check, kept, again.run(again))
    if not given.subject:
        raise AxesError("explain takes an expression, 'b s@tp -> b s', a model, train.py:build, or --check FILE")
    mesh = _mesh(given.mesh, given)
    if "->" in given.subject:
        return explain.explain(given.subject, mesh=mesh, dtype=given.dtype, op=given.op, sizes=_sizes(given.sizes))
    return lock.explained_model(given.subject, mesh, given.rank or [0], given.words)


def _of_plan(given: argparse.Namespace) -> Explanation:
    """What is sent to take a tensor from one sharding to another.

    Example: python -m axes plan "b s@tp" "b@tp s" b=8 s=64 --mesh "dp=4 tp=2"
    """
    mesh, sizes = _mesh(given.mesh, given), _sizes(given.sizes)
    shape = _shape(mesh, given.source, sizes)
    made = plan(given.source, given.target, shape, mesh=mesh, dtype=given.dtype, sizes=sizes)
    facts = {
        "mesh": mesh.declaration,
        "rank": mesh.rank,
        "source": str(made.source),
        "target": str(made.target),
        "shape": [*shape],
        "dtype": made.dtype,
        "collectives": made.collectives,
        "microseconds": round(made.cost, 3),
        **{name: getattr(made, name) for name in ("bytes_in", "bytes_out", "peak_bytes")},
        "steps": [
            {"kind": step.kind, "axes": [*step.axes], "group_size": step.group_size, "ranks": [*step.ranks]}
            | {"bytes_in": step.bytes_in, "bytes_out": step.bytes_out}
            for step in made.steps
        ],
    }
    return Explanation(partial(sheet_of_plan, made), facts)


def _of_transfer(given: argparse.Namespace) -> Explanation:
    """What is sent to take a tensor from one mesh to another.

    Their ranks may be the same, others, or some of both.

    Example: python -m axes transfer "f@a d" "f d@b" f=8 d=4 --source-mesh "a=4"
                 --target-mesh "b=2"
    """
    sizes, there = _sizes(given.sizes), _mesh(given.source_mesh)
    here = _mesh(given.target_mesh, first=there.size if given.first is None else given.first)
    like = argparse.Namespace(shape=_shape(there, given.source, sizes), dtype=given.dtype)
    how = {"dtype": given.to_dtype, "bucket_mb": given.bucket_mb, "sizes": sizes}
    move = transfer({"x": given.source}, {"x": given.target}, there, here, {"x": like}, **how)
    return explained_transfer(move, (given.rank or [None])[-1])


def _of_trace(given: argparse.Namespace) -> Explanation:
    """What took the time in a job, and for whom ranks waited.

    Example: python -m axes trace trace.*.json
    """
    return timeline.read_traces(given.files).explanation()


def _of_check(given: argparse.Namespace) -> Explanation:
    """Mistakes in the expressions and specs of programs, without running them.

    Example: python -m axes check train.py models
    """
    count, found = mistakes_in(given.sources)
    lines = ["{file}:{line}:{column}: {message}".format(**each) for each in found]
    wrong = f"mistakes found: {len(found)}" if found else ""
    return as_written("\n".join(lines) or "no mistake", {"files": count, "mistakes": found}, wrong)


_VERBS: dict[str, tuple[Callable[[argparse.Namespace], Explanation], str]] = {
    "mesh": (_of_mesh, "declaration equations --world --rank --svg --html"),
    "groups": (_of_groups, "--mesh --world --rank --axis --svg --html"),
    "explain": (_of_explain, "subject sizes --mesh --world --rank --dtype --op --check --svg --html"),
    "plan": (_of_plan, "source target sizes --mesh --world --rank --dtype --svg --html"),
    "transfer": (
        _of_transfer,
        "source target sizes --source-mesh --target-mesh --first --rank --dtype --to-dtype --bucket-mb --svg --html",
    ),
    "trace": (_of_trace, "files --svg --html"),
    "check": (_of_check, "sources"),
}
"""The verbs: who answers, and the options that each takes beside `--json`."""


# --- what they take


def _mesh(text: str | None, given: argparse.Namespace | None = None, first: int = 0) -> Mesh:
    """The mesh of `dp=* tp=8; fsdp = dp tp`, from rank `first` on, in the world and from the rank that are given."""
    if text is None:
        raise AxesError('--mesh is missing: its axes, slowest first, like --mesh "dp=4 tp=2"')
    # In a declaration an axis whose size follows from the world has none.
    names = list(filter(None, map(str.strip, re.sub(r"=\s*\*", "", text).split(";")))) or [""]
    world, ranks = getattr(given, "world", None), getattr(given, "rank", None) or []
    found = Mesh(*names, ranks=None if world is None else range(world))
    if first:
        found = Mesh(*names, ranks=range(first, first + found.size))
    return [found, *(seen_mesh(found, rank) for rank in ranks)][-1]


def _sizes(texts: Sequence[str]) -> dict[str, int]:
    """`b=8 s=2048` as numbers; `SizeError` for anything else."""
    found = [re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", text) for text in texts]
    sizes = {size[1]: int(size[2]) for size in found if size}
    if len(sizes) < len(texts):
        raise SizeError(f"sizes are written as NAME=NUMBER, each name once, like b=8 s=64; found {' '.join(texts)}")
    return sizes


def _shape(mesh: Mesh, spec: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The whole shape of a tensor, by the sizes of the names in its spec."""
    named = {name: size for name, size in sizes.items() if name in factors_by_name(spec)}
    return whole_shape(mesh.sharding(spec, sizes=named))
