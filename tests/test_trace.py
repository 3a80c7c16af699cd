"""`AXES_TRACE` and `axes.debug(trace=)`: what ranks record is what they send, outlives them, and says who was slow."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import axes

# Imports from inside: the reader of traces, which the command line shows as text alone.
from axes.pictures import timeline
from tests.counting import Counter


def all_kinds(mesh: axes.Mesh) -> None:
    """Something of all that is sent."""
    x = torch.arange(64.0).view(8, 8)
    axes.psum(x, "tp", mesh=mesh)
    axes.pmax(x.bfloat16(), "dp", mesh=mesh)
    axes.psum(x.to(torch.complex64), "tp", mesh=mesh)
    axes.psum(x.bool(), "tp", mesh=mesh)
    axes.psum_scatter(x, ("dp", "tp"), mesh=mesh)
    axes.all_gather(x.to(torch.int16), "dp", 1, mesh=mesh)
    axes.all_to_all(x, "dp", 0, 1, mesh=mesh)
    sends, receives = ([1, 3], [1, 2]) if mesh.coordinate["tp"] == 0 else ([2, 2], [3, 2])
    axes.all_to_all(x[:4], "tp", send_sizes=sends, recv_sizes=receives, mesh=mesh)
    axes.ppermute(x, "tp", perm=[(0, 1)], mesh=mesh)
    uneven = axes.shard(torch.arange(35.0).view(5, 7), "a@dp b@tp", mesh=mesh)
    axes.reshard(uneven, "a b@(dp tp)")
    axes.reshard(axes.shard(torch.ones(8, 8, dtype=torch.complex64), "a@tp b", mesh=mesh), "a b@dp")
    axes.unshard(axes.reshard(uneven, "a b", comm_dtype=torch.bfloat16))
    leaf = axes.shard(x, "a@dp b@tp", mesh=mesh).requires_grad_()
    axes.to_local(axes.rearrange(leaf, "a@dp b@tp -> a b@dp"), grad="summed").sum().backward()
    axes.reduce(axes.shard(x.half(), "a@dp b@tp", mesh=mesh), "a@dp b@tp -> a", "max")
    axes.nn.clip_grad_norm_([leaf], 1.0)
    large = axes.shard(torch.ones(256, 512), "a@(dp tp) b", mesh=mesh)
    axes.reshard(large, "a@(tp dp) b")
    axes.reshard(axes.shard(torch.ones(4096, 2048), "a@tp b", mesh=mesh), "a b@dp")


def recorded(folder: str) -> list[tuple[str, int, int]]:
    """What is counted of calls that are traced, as the trace says it."""
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    all_kinds(mesh)
    with axes.debug(trace=f"{folder}/kinds.json"), Counter() as counter:
        all_kinds(mesh)
        axes.shard(torch.ones(4), "a@dp", mesh=mesh, source_rank=3)
    return [(kind, came, went) for kind, _, came, went in counter.found]


def told(path: Path) -> list[tuple[str, int, int]]:
    """What a trace says that was sent, call by call."""
    return [(event.op["by"], event.op["in"], event.op["out"]) for event in timeline.read_log(path).events]


@pytest.fixture(scope="module")
def ran(world, tmp_path_factory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("traces")
    return folder, world(recorded, 4, str(folder))


def test_events_are_what_is_counted_call_by_call_and_byte_by_byte(ran):
    kinds = set()
    for rank, counted in enumerate(ran[1]):
        path = ran[0] / f"kinds.{rank}.json"
        found = told(path)
        assert [kind for kind, *_ in found] == [kind for kind, *_ in counted]
        for one, two in zip(found, counted, strict=True):
            # A part of an element that goes around a ring is an element.
            assert all(
                0 <= there - here <= (8 if one[0] == "all_reduce" else 0)
                for here, there in zip(one[1:], two[1:], strict=True)
            ), (one, two)
        assert all(event.op["place"].startswith("tests/test_trace.py:") for event in timeline.read_log(path).events)
        kinds |= {kind for kind, *_ in found}
    assert kinds == {"all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast"}


def test_an_event_says_what_it_is_part_of(ran):
    events = timeline.read_log(ran[0] / "kinds.1.json").events
    found = [event for event in events if "a@dp b@tp -> a b@dp" in " ".join(event.op["parts"])]
    forward, backward = found
    assert forward.op["parts"] == ["axes.rearrange 'a@dp b@tp -> a b@dp'"]
    assert backward.op["parts"] == ["gradient of rearrange 'a@dp b@tp -> a b@dp'"]
    assert (forward.op["backward"], backward.op["backward"]) == (False, True)
    assert forward.op["place"].endswith(" in all_kinds")
    assert forward.op["axis"] == "dp tp"
    assert list(forward.op["ranks"]) == [0, 1, 2, 3]
    assert forward.op["dtype"] == "float32"
    assert forward.what == "all_to_all of _@dp _@tp -> _ _@dp of [8, 8] float32"
    assert all(event.ns is not None and event.ns > 0 for event in events)
    two = [event for event in events if event.op["step"][1] == 2]
    assert [event.op["step"] for event in two][:2] == [[1, 2], [2, 2]]


# --- how a process ends


def hung(folder: str, how: int) -> None:
    """Rank 1 ends rank 0, which waits for it."""
    mesh, x = axes.init_mesh("tp=2", device_type="cpu"), torch.ones(3)
    axes.debug(trace=f"{folder}/{{rank}}.json")
    axes.psum(x, "tp", mesh=mesh)
    if dist.get_rank() == 0:
        axes.pmin(x, "tp", mesh=mesh)
    else:
        other = Path(folder, "0.json")
        while b"pmin" not in other.read_bytes():
            time.sleep(0.01)
        os.kill(json.loads(other.read_bytes().splitlines()[1].rstrip(b","))["args"]["process"], how)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_who_is_killed_in_a_collective_has_said_in_which(world, tmp_path, how):
    with pytest.raises(axes.AxesError, match="rank 0 of 2 was "):
        world(hung, 2, str(tmp_path), how)
    job = timeline.read_traces([tmp_path / "0.json", tmp_path / "1.json"])
    (event,) = job.open
    assert event.rank == 0
    assert event.what == "pmin over 'tp' of [3] float32"
    assert job.missing(event) == [1]
    assert [each.what for each in job.logs[1].events] == ["psum over 'tp' of [3] float32"]
    assert "rank 0 hadn't ended pmin over 'tp' of [3] float32" in " ".join(str(job.explanation()).split())
    assert "rank 1 never came to it" in " ".join(str(job.explanation()).split())


def raising(folder: str) -> None:
    mesh = axes.init_mesh("tp=2", device_type="cpu")
    axes.psum(torch.ones(3), "tp", mesh=mesh)
    raise ValueError("a mistake")


def test_the_environment_begins_a_trace_and_an_exception_loses_none_of_it(world, tmp_path, monkeypatch):
    monkeypatch.setenv("AXES_TRACE", str(tmp_path / "trace.json"))
    (tmp_path / "trace.0.json").write_text("of an earlier job\n" * 100)
    with pytest.raises(ValueError, match="a mistake"):
        world(raising, 2, str(tmp_path))
    for path in (tmp_path / "trace.0.json", tmp_path / "trace.1.json"):
        assert json.loads(path.read_text() + "]"), "an array without its end, as Chrome reads it"
        assert [event.op["kind"] for event in timeline.read_log(path).events] == ["psum"]


# --- transfers


def moved_in_a_job(folder: str) -> tuple[list[Any], int]:
    """What is counted of a transfer to ranks some of which are the same, and how much that is at least."""
    source = axes.init_mesh("fsdp=3", ranks=range(3), device_type="cpu")
    target = axes.init_mesh("dp=1 tp=2", ranks=[3, 1], device_type="cpu")
    shapes = {"up": (50, 40), "norm": (7,), "bias": (3,)}
    ends = {"up": "f@fsdp d", "norm": "d@fsdp", "bias": "d"}, {"up": "f d@tp", "norm": "d@tp", "bias": "d"}
    move = axes.transfer(*ends, source, target, shapes, dtype="float32", bucket_mb=2e-3)
    inside = source.coordinate is not None
    held = {n: torch.ones(source.sharding(s).local_shape(shapes[n])) for n, s in ends[0].items()} if inside else {}
    move(held)
    with axes.debug(trace=f"{folder}/in_a_job.json"), Counter() as counter:
        move(held)
    return counter.found, move.lower_bound


def test_a_transfer_is_one_event_with_the_bytes_that_were_sent_and_its_largest_tensor(world, tmp_path):
    sent, paths = 0, [tmp_path / f"in_a_job.{rank}.json" for rank in range(4)]
    moved = world(moved_in_a_job, 4, str(tmp_path))
    for path, (counted, _) in zip(paths, moved, strict=True):
        (exchange,) = timeline.read_log(path).events
        assert counted[0][0] == "all_reduce"
        assert exchange.op["out"] == sum(out for *_, out in counted[1:])
        assert exchange.op["in"] == sum(came for _, _, came, _ in counted[1:])
        assert "the largest 'up' (f@fsdp d -> f d@tp)" in exchange.what
        assert exchange.op["place"].startswith("tests/test_trace.py:")
        assert exchange.op.get("apart"), "ranks wait for their partners alone"
        sent += exchange.op["out"]
    assert 0 <= sent - moved[0][1] < 500, "pieces begin at multiples of 16 bytes"
    text = " ".join(str(timeline.read_traces(paths).explanation()).split())
    assert "exchange of axes.transfer of 3 tensors in" in text
    assert "hadn't ended" not in text


# --- the file, in a simulated world


@pytest.fixture
def mesh():
    with axes.simulate(4):
        yield axes.init_mesh("tp=4", device_type="cpu")


def sums(mesh: axes.Mesh, *lengths: int) -> None:
    for length in lengths:
        axes.psum(torch.ones(length), "tp", mesh=mesh)


def lengths(path: Path) -> list[int]:
    return [int(event.what.partition("[")[2].partition("]")[0]) for event in timeline.read_log(path).events]


def test_blocks_are_nested_and_go_on_in_their_files(mesh, tmp_path):
    for first in (1, 11):
        with axes.debug(trace=tmp_path / "outer.json"):
            sums(mesh, first)
            with axes.debug(trace=tmp_path / "inner.json"):
                sums(mesh, first + 1)
            sums(mesh, first + 2)
            axes.debug(trace="")
            sums(mesh, first + 3)
    sums(mesh, 100)
    assert lengths(tmp_path / "outer.0.json") == [1, 3, 11, 13]
    assert lengths(tmp_path / "inner.0.json") == [2, 12]


def test_a_forked_process_leaves_the_trace_alone(mesh, tmp_path):
    with axes.debug(trace=tmp_path / "t"):
        sums(mesh, 1)
        child = os.fork()
        if not child:
            sums(mesh, 2)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        sums(mesh, 3)
    assert lengths(tmp_path / "t.0") == [1, 3]


def test_an_asynchronous_collective_is_marked(mesh, tmp_path):
    x = axes.shard(torch.ones(8), "a@tp", mesh=mesh)
    with axes.debug(trace=tmp_path / "t"):
        axes.unshard(axes.reshard(x, "a", async_op=True))
    (event,) = timeline.read_log(tmp_path / "t.0").events
    assert event.op["later"]
    assert not event.meets


# --- the reader


def log(rank: int, events: Sequence[tuple[str, Sequence[int], int, int | None]], **header: Any) -> str:
    """A file: of each event its kind, ranks, when it was issued and for how long."""
    about = {"axes_trace": 2, "rank": rank, "world": 4, "host": "h", "clock": "c", "wall": 0, **header}
    lines: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": about}]
    for number, (kind, ranks, at, ns) in enumerate(events, 1):
        lines.append({"ph": "M", "name": "group", "args": {"number": number, "group": str(ranks), "ranks": [*ranks]}})
        told = {"kind": kind, "by": "all_reduce", "axis": "x", "dtype": "float32", "step": [1, 1], "in": 8, "out": 8}
        told |= {"group": number, "later": False, "apart": False, "backward": False, "place": "", "parts": []}
        lines.append({"ph": "B", "name": f"{kind} over 'x'", "args": told, "tid": 1, "ts": at / 1000})
        if ns is not None:
            lines.append({"ph": "E", "tid": 1, "ts": (at + ns) / 1000})
    return "[\n" + ",\n".join(map(json.dumps, lines))


def job_of(folder: Path, texts: Mapping[int, str]) -> timeline.Timeline:
    for rank, text in texts.items():
        (folder / f"{rank}").write_text(text)
    return timeline.read_traces(folder / f"{rank}" for rank in texts)


def test_who_waited_is_known_without_a_common_clock(tmp_path):
    """Rank 1's clock is a second ahead: it is late by 80 twice, and its own calls are the shorter."""
    ahead = 10**9
    first = [("all_reduce", (0, 1), 0, 100), ("all_reduce", (0, 1), 1000, 130)]
    second = [("all_reduce", (0, 1), ahead + 80, 20), ("all_reduce", (0, 1), ahead + 1080, 50)]
    job = job_of(tmp_path, {0: log(0, first), 1: log(1, second, clock="d", host="i", wall=-ahead)})
    assert [job.waits[event] for event in job.events] == [80, 80, 0, 0]
    assert job.span == 1130
    assert job.slowest()["rank"] == 1
    assert "2 hosts" in str(job.explanation())


def test_lateness_is_handed_on_to_the_rank_that_caused_it(tmp_path):
    """Rank 2 computes for 900; 3 waits for it, and 1 for 3. At last 1 is late by itself, by 50."""
    job = job_of(
        tmp_path,
        {
            1: log(1, [("psum", (1, 3), 0, 1000), ("psum", (1, 3), 1150, 20)]),
            2: log(2, [("psum", (2, 3), 900, 60)]),
            3: log(3, [("psum", (2, 3), 0, 960), ("psum", (1, 3), 970, 30), ("psum", (1, 3), 1100, 70)]),
        },
    )
    assert job.causes == {1: {2: 900, 3: 70}, 3: {2: 900, 1: 50}}
    assert job.slowest()["rank"] == 2
    assert "the others waited for rank 2: " in str(job.explanation())


def test_where_no_rank_stands_out_none_is_named(tmp_path):
    turns = [("psum", (0, 1), 1000 * i + 100 * (i % 2), 200 - 100 * (i % 2)) for i in range(10)]
    others = [("psum", (0, 1), 1000 * i + 100 * (1 - i % 2), 100 + 100 * (i % 2)) for i in range(10)]
    job = job_of(tmp_path, {0: log(0, turns), 1: log(1, others)})
    assert sum(job.waits.values()) == 1000
    assert job.slowest() is None


def test_traces_that_dont_match_are_said(tmp_path):
    texts = {0: log(0, [("psum", (0, 1), 0, 5), ("pmax", (0, 1), 9, 5)]), 1: log(1, [("psum", (0, 1), 0, 5)] * 2)}
    job = job_of(tmp_path, texts)
    assert len(job.together) == 1
    assert "ranks of a group differ here for the first time: rank 0 pmax over 'x'; rank 1 psum over 'x'" in " ".join(
        str(job.explanation()).split()
    )


def test_a_collective_that_ranks_call_from_other_lines_is_said_since_one_may_have_skipped_a_call(tmp_path):
    texts = {rank: log(rank, [("psum", (0, 1), 0, 5)] * 2) for rank in (0, 1)}
    lines = texts[1].rpartition('"place": ""')
    job = job_of(tmp_path, texts | {1: f'{lines[0]}"place": "t.py:30 in step"{lines[2]}'})
    assert len(job.together) == 2
    assert "here for the first time: rank 0 psum over 'x'; rank 1 psum over 'x', at t.py:30 in step" in " ".join(
        str(job.explanation()).split()
    )


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    (tmp_path / "t").write_text(log(0, [("psum", (0, 1), 0, 5)] * 2)[:-10])
    assert [event.ns for event in timeline.read_log(tmp_path / "t").events] == [5, None]


@pytest.mark.parametrize("length", [0, 1, 2, 30])
def test_a_rank_that_was_killed_before_it_had_said_who_it_is_is_left_out_and_named(tmp_path, length):
    whole = log(0, [("psum", (0, 1), 0, 5)])
    job = job_of(tmp_path, {0: whole, 1: log(1, [])[:length]})
    assert [one.rank for one in job.logs] == [0]
    assert f"{tmp_path / '1'} is left out: it ends before" in " ".join(str(job.explanation()).split())


WRONG = {
    "no trace": ("import axes\n", "this isn't a trace of axes"),
    "another JSON": ('{"a": 1}\n', "this isn't a trace of axes"),
    "a list": ("[1]\n", "this isn't a trace of axes"),
    "another version": (log(0, [], axes_trace=3), "of version 3; this reads version 2"),
    "a rank without a field": (log(0, []).replace('"rank"', '"r"') + ",\n{}", r"line 2: .* \(KeyError: 'rank'\)"),
    "broken in the middle": (log(0, [("psum", (0, 1), 0, 5)]).replace('"ts"', "ts"), "line 4: this isn't a trace"),
    "an end without a beginning": (log(0, []) + ',\n{"ph": "E", "tid": 1, "ts": 0},\n{}', "line 3: this isn't a trace"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_isnt_a_trace_is_one_error(tmp_path, case):
    text, message = WRONG[case]
    (tmp_path / "t").write_text(text)
    with pytest.raises(axes.AxesError, match=message):
        timeline.read_log(tmp_path / "t")


def test_traces_of_two_jobs_and_two_of_a_rank_are_told_apart(tmp_path):
    with pytest.raises(axes.AxesError, match="there is another trace of rank 0"):
        job_of(tmp_path, {0: log(0, []), 1: log(0, [])})
    with pytest.raises(axes.AxesError, match="of several jobs: of 4 and of 8 ranks"):
        job_of(tmp_path, {0: log(0, []), 1: log(1, [], world=8)})
    with pytest.raises(axes.AxesError, match="no trace is given"):
        timeline.read_traces([])
