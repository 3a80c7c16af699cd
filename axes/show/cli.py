"""The command line: meshes, groups, expressions, plans and traces, from a terminal.

    python -m axes mesh "pp=2 dp=* tp=8" --world 64 --rank 13
    python -m axes explain "b s@tp d -> b s d@tp" b=8 s=2048 d=4096 --mesh "dp=4 tp=2"
    python -m axes plan "b s@tp d" "b s d@tp" b=8 s=2048 d=4096 --mesh "dp=4 tp=2"
    python -m axes transfer "f@fsdp d" "f d@tp" f=64 d=32 --source-mesh "fsdp=4" --target-mesh "dp=2 tp=2"
    python -m axes groups --mesh "dp=4 tp=2"
    python -m axes lock layout.lock --model train.py:build --mesh "dp=2048 tp=8"
    python -m axes lock layout.lock --check
    python -m axes trace trace.*.jsonl --chrome trace.json
    python -m axes demo

Every command has `--json`: one object, whose `schema` is the version of its form. It exits with 0; with 1 and one line
on stderr where what is asked can't be; with 2 where the command itself is wrong. `mesh`, `explain`, `plan` and
`transfer` write pictures and pages with `--svg` and `--html`. Only `demo`, `explain` and `lock` need torch.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import click

from axes.algebra.errors import AxesError, SizeError
from axes.algebra.grammar import parse_spec
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Plan, bytes_text
from axes.algebra.plan import plan as plan_of
from axes.show import timeline
from axes.show.show import show
from axes.show.transfer_sheet import facts_of_transfer
from axes.transfers.transfer_ends import names_in_spec
from axes.transfers.transfers import Like, Transfer, transfer

P = ParamSpec("P")

SCHEMA = 1
"""The version of what `--json` prints: a field may be added to it, and none changes."""

_WIDTH = 80
_GROUPS = 16
"""Groups of an axis that are listed, unless asked for all."""


def _command(run: Callable[P, None]) -> Callable[P, None]:
    """A command whose errors are one message on stderr, and which ends in peace where nobody reads on."""

    @functools.wraps(run)
    def found(*args: P.args, **options: P.kwargs) -> None:
        try:
            run(*args, **options)
            sys.stdout.flush()
        except AxesError as error:
            click.echo(f"{click.style('error:', fg='red', bold=True)} {error}", err=True, color=_coloured(sys.stderr))
            sys.exit(1)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
            sys.exit(1)

    return found


def _coloured(stream: Any) -> bool:
    """Whether a stream takes colours: a terminal, unless `NO_COLOR` is set."""
    return not os.environ.get("NO_COLOR") and stream.isatty()


def _print(text: str) -> None:
    """Prints text, in ASCII where the stream can't take more."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding), color=_coloured(sys.stdout))


def _title(text: str) -> str:
    return click.style(text, bold=True)


def _write(path: str, text: str) -> None:
    """Writes a file; `AxesError` where it can't be."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise AxesError(f"{path}: {error.strerror}") from None


def _write_pages(found: Any, svg: str | None, html: str | None) -> None:
    """Writes what is shown as a picture and as a page, where these are asked for."""
    if svg is not None:
        _write(svg, found.svg())
    if html is not None:
        _write(html, found.html())


def _write_pictures(of: Mesh | Plan | Transfer, svg: str | None, html: str | None) -> None:
    """The same of a mesh, a plan or a transfer, by `axes.show`."""
    if svg is not None or html is not None:
        _write_pages(show(of), svg, html)


def _print_json(command: str, found: Mapping[str, Any]) -> None:
    _print(json.dumps({"schema": SCHEMA, "command": command, **found}, indent=2))


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
on_mesh = click.option("--mesh", "mesh", required=True, metavar="MESH", help='The axes, slowest first: "dp=4 tp=2".')
to_svg = click.option("--svg", type=click.Path(), metavar="FILE", help="Write a picture.")
to_html = click.option("--html", type=click.Path(), metavar="FILE", help="Write a page that a browser shows.")
in_world = click.option("--world", type=click.IntRange(1), help="How many ranks there are; a size that is * follows.")
by_rank = click.option("--rank", type=click.IntRange(0), help="The rank to look from.")


@click.group(context_settings={"max_content_width": _WIDTH, "help_option_names": ["-h", "--help"]})
@click.version_option(package_name="axes-torch", prog_name="axes")
def main() -> None:
    """Meshes, groups, expressions, plans and traces of distributed programs with named axes.

    A mesh is written as its axes, slowest first: "pp=2 dp=* tp=8", where a * follows from --world. What follows a
    semicolon is a further name: "dp=4 cp=2 tp=2; fsdp = dp cp".
    """


def _mesh(text: str, world: int | None, rank: int | None, first: int = 0, advice: str = "add --world N") -> Mesh:
    """The mesh of `dp=* tp=8; fsdp = dp tp`, seen from a rank. first: the number of its first rank."""
    declaration, *equations = (part.strip() for part in text.split(";"))
    ranks = None if world is None else range(world)
    if ranks is None and (open_one := re.search(r"(\w+)\s*=\s*\*", declaration)):
        raise SizeError(f"how large '{open_one[1]}' is follows from the number of ranks: {advice}")
    # In a declaration an axis whose size follows has none.
    found = Mesh(re.sub(r"=\s*\*", "", declaration), *filter(None, equations), ranks=ranks)
    if first:
        found = Mesh(declaration, *filter(None, equations), ranks=range(first, first + found.size))
    if rank is not None:
        _check_rank(found, rank)
    return found if rank is None else found.at(rank)


def _check_rank(mesh: Mesh, rank: int) -> None:
    if rank >= mesh.size:
        raise SizeError(f"the mesh has ranks 0 to {mesh.size - 1}; there is no rank {rank}")


# --- mesh


@main.command("mesh")
@click.argument("declaration")
@click.argument("equations", nargs=-1)
@in_world
@by_rank
@to_svg
@to_html
@as_json
@_command
def mesh_command(
    declaration: str,
    equations: tuple[str, ...],
    world: int | None,
    rank: int | None,
    svg: str | None,
    html: str | None,
    as_json: bool,
) -> None:
    """The axes and names of a mesh, and the groups of a rank.

    Example: python -m axes mesh "pp=2 dp=* tp=8" "fsdp = pp dp" --world 64 --rank 13
    """
    found = _mesh("; ".join((declaration, *equations)), world, rank)
    _write_pictures(found, svg, html)
    if as_json:
        _print_json("mesh", mesh_data(found))
        return
    _print(str(found))
    _print("")
    where = ", ".join(f"{name} {index}" for name, index in (found.coordinate or {}).items())
    _print(_title(f"rank {found.rank}") + f" is at {where}; it communicates along")
    width = max(map(len, found.names))
    for name in found.names:
        ranks = found.axis(name).ranks
        _print(f"  {name:<{width}}  with {listed_ranks(ranks, _WIDTH - width - 9)}")


def mesh_data(found: Mesh) -> dict[str, Any]:
    """A mesh as `--json` has it."""
    names = {name: {"size": found.axis(name).size, "is": found.described(name)} for name in found.names}
    for name, about in names.items():
        about |= {"axis": name in found.axis_names, "index": found.axis(name).index}
        about |= {"stride": found.axis(name).stride, "group": [*found.axis(name).ranks]}
    return {
        "declaration": found.declaration,
        "ranks": found.size,
        "rank": found.rank,
        "coordinate": found.coordinate,
        "names": names,
    }


def listed_ranks(ranks: Sequence[int], width: int = _WIDTH) -> str:
    """Ranks in at most so many columns.

    >>> listed_ranks(range(0, 64, 8)), listed_ranks([3]), listed_ranks(range(0, 4096, 8), 30)
    ('0, 8, 16, 24, 32, 40, 48, 56', '3', '0, 8, ..., 4088 (512 ranks)')
    """
    whole = ", ".join(map(str, ranks)) if len(ranks) <= width else ""
    if whole and len(whole) <= width:
        return whole
    return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]} ({len(ranks)} ranks)"


# --- groups


@main.command("groups")
@on_mesh
@in_world
@by_rank
@click.option("--axis", "axes", multiple=True, metavar="NAME", help="Of this name alone; may be given several times.")
@click.option("--all", "every", is_flag=True, help=f"List all groups of an axis, not only {_GROUPS}.")
@as_json
@_command
def groups_command(
    mesh: str, world: int | None, rank: int | None, axes: tuple[str, ...], every: bool, as_json: bool
) -> None:
    """Who communicates with whom: the groups of each axis.

    With --rank, only those of one rank. Example: python -m axes groups --mesh "dp=4 tp=2"
    """
    found = _mesh(mesh, world, rank)
    names = axes or tuple(found.names)
    lists = {name: _groups_of(found, name, rank) for name in names}
    if as_json:
        told = {
            name: {"size": found.axis(name).size, "count": _count(found, name), "groups": [[*each] for each in each_of]}
            for name, each_of in lists.items()
        }
        _print_json("groups", {"mesh": found.declaration, "rank": rank, "axes": told})
        return
    for line in _lines_of_groups(found, lists, every or rank is not None):
        _print(line)


def _groups_of(found: Mesh, name: str, rank: int | None) -> list[Sequence[int]]:
    return found.axis(name).all_ranks() if rank is None else [found.axis(name).ranks]


def _count(found: Mesh, name: str) -> int:
    return found.universe.size // found.axis(name).size


def _lines_of_groups(found: Mesh, lists: Mapping[str, Sequence[Sequence[int]]], every: bool) -> Iterator[str]:
    for name, each_of in lists.items():
        size, count = found.axis(name).size, _count(found, name)
        if size == 1:
            yield f"{_title(name)}: size 1, no rank communicates"
            continue
        said = found.described(name)
        meaning = "" if name in found.axis_names else f" ({said})"
        yield f"{_title(name)}{meaning}: {count} group{'s' * (count != 1)} of {size} ranks"
        shown = each_of if every or len(each_of) <= _GROUPS else [*each_of[: _GROUPS - 1], each_of[-1]]
        for number, ranks in enumerate(shown):
            if number == len(shown) - 1 and len(shown) < len(each_of):
                yield f"  ... {len(each_of) - len(shown)} more; --all lists them"
            yield f"  {listed_ranks(ranks, _WIDTH - 2)}"


# --- explain


@main.command("explain")
@click.argument("expression")
@click.argument("sizes", nargs=-1, metavar="NAME=SIZE...")
@on_mesh
@in_world
@by_rank
@click.option("--dtype", default="float32", show_default=True, help="The dtype of the tensors.")
@click.option(
    "--op", default="sum", show_default=True, help="By what a reduction reduces: sum, mean, max, min, prod, any, all."
)
@click.option("--kind", metavar="KIND", help="reshard or shard_map, where the expression is meant as one.")
@to_svg
@to_html
@as_json
@_command
def explain_command(
    expression: str,
    sizes: tuple[str, ...],
    mesh: str,
    world: int | None,
    rank: int | None,
    dtype: str,
    op: str,
    kind: str | None,
    svg: str | None,
    html: str | None,
    as_json: bool,
) -> None:
    """What an expression computes and sends, forward and backward.

    Example: python -m axes explain "b s@tp d, d f -> b s f@tp" b=8 s=2048 d=4096 f=8192 --mesh "dp=4 tp=2"
    """
    from axes.show.explain import explain  # which imports torch

    made = explain(expression, mesh=_mesh(mesh, world, rank), dtype=dtype, op=op, kind=kind, sizes=_sizes(sizes))
    _write_pages(made, svg, html)
    if as_json:
        _print_json("explain", made.json())
        return
    _print(str(made))


# --- plan


@main.command("plan")
@click.argument("source")
@click.argument("target")
@click.argument("sizes", nargs=-1, metavar="NAME=SIZE...")
@on_mesh
@in_world
@by_rank
@click.option("--dtype", default="float32", show_default=True, help="The dtype of the tensor.")
@to_svg
@to_html
@as_json
@_command
def plan_command(
    source: str,
    target: str,
    sizes: tuple[str, ...],
    mesh: str,
    world: int | None,
    rank: int | None,
    dtype: str,
    svg: str | None,
    html: str | None,
    as_json: bool,
) -> None:
    """What is sent to take a tensor from one sharding to another.

    Example: python -m axes plan "b s@tp d" "b s d@tp" b=8 s=2048 d=4096 --mesh "dp=4 tp=2"
    """
    found = _mesh(mesh, world, rank)
    given = _sizes(sizes)
    shape = _shape(source, given)
    made = plan_of(source, target, shape, mesh=found, dtype=dtype, sizes=given)
    _write_pictures(made, svg, html)
    if as_json:
        steps = [_step_data(step) for step in made.steps]
        ends = {"source": str(made.source), "target": str(made.target), "shape": [*made.shape], "dtype": made.dtype}
        moved = {"bytes_in": made.bytes_in, "bytes_out": made.bytes_out, "peak_bytes": made.peak_bytes}
        costs = {"collectives": made.collectives, "microseconds": round(made.cost, 3), **moved}
        _print_json("plan", {"mesh": found.declaration, "rank": found.rank, **ends, **costs, "steps": steps})
        return
    _print(str(made))
    for step in made.steps:
        if step.group_size > 1:
            label = f"  {step.kind} on rank {found.rank}: with "
            _print(label + listed_ranks(step.ranks, _WIDTH - len(label)))
    _print(f"  modelled: {made.cost:.3g} us; at most {bytes_text(made.peak_bytes)} held at once")


def _step_data(step: Any) -> dict[str, Any]:
    moved = {"bytes_in": step.bytes_in, "bytes_out": step.bytes_out}
    return {"kind": step.kind, "axes": [*step.axes], "group_size": step.group_size, "ranks": [*step.ranks], **moved}


# --- transfer


@main.command("transfer")
@click.argument("source")
@click.argument("target")
@click.argument("sizes", nargs=-1, metavar="NAME=SIZE...")
@click.option("--source-mesh", required=True, metavar="MESH", help='The axes there: "fsdp=4".')
@click.option("--target-mesh", required=True, metavar="MESH", help='The axes here: "dp=2 tp=2".')
@click.option(
    "--first", type=click.IntRange(0), help="The first rank of the target mesh; behind the others unless told."
)
@by_rank
@click.option("--dtype", default="float32", show_default=True, help="The dtype of the tensor.")
@click.option("--to-dtype", metavar="DTYPE", help="What it becomes before it is sent.")
@click.option("--bucket-mb", default=64.0, show_default=True, help="MiB of the buffers of a bucket.")
@to_svg
@to_html
@as_json
@_command
def transfer_command(
    source: str,
    target: str,
    sizes: tuple[str, ...],
    source_mesh: str,
    target_mesh: str,
    first: int | None,
    rank: int | None,
    dtype: str,
    to_dtype: str | None,
    bucket_mb: float,
    svg: str | None,
    html: str | None,
    as_json: bool,
) -> None:
    """What is sent to take a tensor from one mesh to another.

    Their ranks may be the same, others, or some of both.

    Example: python -m axes transfer "f@fsdp d" "f d@tp" f=8192 d=4096 --source-mesh "fsdp=4" --target-mesh "dp=2 tp=2"
    """
    advice, given = "write it, as in dp=2", _sizes(sizes)
    there = _mesh(source_mesh, None, None, advice=advice)
    here = _mesh(target_mesh, None, None, there.size if first is None else first, advice)
    like = Like(_shape(source, given), dtype)
    wanted = {name: size for name, size in given.items() if name in names_in_spec(source) | names_in_spec(target)}
    moved = transfer(
        {"x": source}, {"x": target}, there, here, {"x": like}, dtype=to_dtype, bucket_mb=bucket_mb, sizes=wanted
    )
    if rank is not None and rank not in moved.ranks:
        raise SizeError(f"the transfer has ranks {listed_ranks(moved.ranks)}; there is no rank {rank}")
    found = moved if rank is None else moved.at(rank)
    _write_pictures(found, svg, html)
    if as_json:
        _print_json("transfer", facts_of_transfer(found))
        return
    _print(str(found))
    for said, side in (("sends to", "sends"), ("receives from", "receives")):
        peers = sorted({peer for step in found.steps for peer in getattr(step, side)})
        if peers:
            label = f"  rank {found.rank} {said} "
            _print(label + listed_ranks(peers, _WIDTH - len(label)))


def _sizes(texts: Sequence[str]) -> dict[str, int]:
    """`b=8 s=2048` as numbers; `SizeError` for anything else."""
    found: dict[str, int] = {}
    for text in texts:
        given = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", text)
        if given is None:
            raise SizeError(f"a size is written as NAME=NUMBER, like b=8; found {text!r}")
        found[given[1]] = int(given[2])
    return found


def _shape(spec: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The whole shape of a tensor, by the sizes of the names in its spec."""
    shape = []
    for dim in parse_spec(spec).dims:
        known = [factor.size or sizes.get(factor.name or "") for factor in dim.factors]
        missing = [factor.name for factor, size in zip(dim.factors, known, strict=True) if size is None]
        if "..." in missing:
            raise SizeError(f"'...' in '{spec}' has no name for a size: name each dim, as in 'b s d'")
        if missing:
            raise SizeError(f"how large is '{missing[0]}'? Add its size, like {missing[0]}=8")
        shape.append(math.prod(size for size in known if size is not None))
    return tuple(shape)


# --- lock


@main.command("lock")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--model", metavar="MODEL", help="Who makes the model: train.py:build or package.module:build.")
@click.option("--mesh", metavar="MESH", help='The axes, slowest first: "dp=2048 tp=8".')
@in_world
@click.option("--rank", "ranks", type=click.IntRange(0), multiple=True, help="A rank to tell of, 0 unless told.")
@click.option("--check", is_flag=True, help="Write nothing; end with 1 where the file would change.")
@as_json
@_command
def lock_command(
    file: str,
    model: str | None,
    mesh: str | None,
    world: int | None,
    ranks: tuple[int, ...],
    check: bool,
    as_json: bool,
) -> None:
    """How a model lies and what its step sends, as a file to keep.

    MODEL is a function that takes the mesh, or nothing, and returns (module, inputs...) or (module, step); it runs in
    a simulated world, without devices. FILE says what it is of: without --model and --mesh it is written anew. --rank
    may be given several times, for one rank of each pipeline stage.

    Example: python -m axes lock layout.lock --model train.py:build --mesh "dp=2048 tp=8"
    """
    from axes.show import lock  # which imports torch

    kept = _kept(file)
    if check and (model or mesh or world or ranks):
        raise click.UsageError("--check takes the model, the mesh and the ranks from FILE")
    if kept is None and (check or not (model and mesh)):
        raise AxesError(f"there is no {file} yet: python -m axes lock {file} --model train.py:build --mesh MESH")
    before = None if model and mesh else lock.subject_of(kept or "", file)
    text = mesh or (before.declared if before else "")
    where = _mesh(text, world, None)
    seen = ranks or (before.ranks if before else (0,))
    for rank in seen:
        _check_rank(where, rank)
    subject = lock.Subject(model or (before.model if before else ""), lock.with_all_sizes(where, text), seen)
    parts = lock.locked(subject)
    found = lock.text_of_lock(subject, parts)
    changes = [] if kept is None else lock.changed_lines(kept, found)
    if not check:
        _write(file, found)
    if as_json:
        same = None if kept is None else kept == found
        told = {"file": file, "model": subject.model, "mesh": subject.declared, "same": same}
        _print_json("lock", {**told, "changes": changes, "ranks": parts})
        sys.exit(1 if check and changes else 0)
    if check and changes:
        for line in lock.shown_changes(changes):
            _print(line)
        raise AxesError(
            f"{len(changes)} lines of {file} aren't what {subject.model} does now; if that is meant, write it anew and "
            f"commit it: python -m axes lock {file}"
        )
    for line in (f"{file}: {'as it was' if kept == found else 'written'}", *lock.summary_of_lock(parts)):
        _print(line)


def _kept(file: str) -> str | None:
    """What a file has; None where there is none."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise AxesError(f"{file} isn't text") from None
    except OSError as error:
        raise AxesError(f"{file}: {error.strerror}") from None


# --- trace


@main.command("trace")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.option("--chrome", type=click.Path(), metavar="OUT", help="Write a trace for Perfetto or chrome://tracing.")
@as_json
@_command
def trace_command(files: tuple[str, ...], chrome: str | None, as_json: bool) -> None:
    """What took the time in a job, and for whom ranks waited.

    FILE... are what AXES_TRACE=trace.jsonl has written, one for each rank: trace.*.jsonl
    """
    job = timeline.read_traces(files)
    if chrome is not None:
        _write(chrome, json.dumps(job.chrome()))
    if as_json:
        _print(json.dumps(job.json(), indent=2))
        return
    _print(str(job))


# --- demo


@main.command("demo")
@as_json
@_command
def demo_command(as_json: bool) -> None:
    """Four local processes multiply, and show what they send.

    It takes some seconds, most of them to import torch.
    """
    from axes.show import demo as four_processes

    found = four_processes.run_demo()
    if as_json:
        _print_json("demo", found)
        return
    for line in four_processes.lines(found):
        _print(line)
