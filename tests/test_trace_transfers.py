"""Transfers in a trace, within a job and between jobs: bytes as they were sent, tensors with specs, who with whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import axes
from axes.show import timeline
from tests.job_program import SHAPES
from tests.test_connect import Jobs
from tests.test_trace import Counted


def moved_in_a_job(folder: str) -> tuple[list[Any], str, int]:
    """What the dispatcher counts of a transfer to ranks some of which are the same, and the file of the trace."""
    source = axes.init_mesh("fsdp=3", ranks=range(3), device_type="cpu")
    target = axes.init_mesh("dp=1 tp=2", ranks=[3, 1], device_type="cpu")
    shapes = {"up": (50, 40), "norm": (7,), "bias": (3,)}
    ends = {"up": "f@fsdp d", "norm": "d@fsdp", "bias": "d"}, {"up": "f d@tp", "norm": "d@tp", "bias": "d"}
    move = axes.transfer(*ends, source, target, shapes, dtype="float32", bucket_mb=2e-3).at(dist.get_rank())
    held = (
        {}
        if source.coordinate is None
        else {n: torch.ones(source.sharding(s).local_shape(shapes[n])) for n, s in ends[0].items()}
    )
    move(held)
    counted = Counted()
    with axes.debug(trace=f"{folder}/in_a_job.jsonl"), counted:
        move(held)
    return counted.found, f"{folder}/in_a_job.{dist.get_rank()}.jsonl", move.lower_bound


def test_a_transfer_is_two_events_with_the_bytes_that_were_sent_and_its_largest_tensors(world, tmp_path):
    ran = world(moved_in_a_job, 4, str(tmp_path))
    for counted, path, _ in ran:
        compared, exchange = timeline.read_log(Path(path)).events
        assert counted[0] == ("all_reduce", compared.bytes_in, compared.bytes_out)
        sides = {side: [found for found in counted[1:] if found[0] == side] for side in ("send", "recv")}
        assert exchange.bytes_out == sum(out for _, _, out in sides["send"])
        assert exchange.bytes_in == sum(came for _, came, _ in sides["recv"])
        assert len(counted) == 1 + len(sides["send"]) + len(sides["recv"])
        assert exchange.op["what"].startswith("axes.transfer of 3 tensors in ")
        assert "'up' (f@fsdp d -> f d@tp), 'norm' (d@fsdp -> d@tp), 1 more" in exchange.op["what"]
        assert exchange.place.startswith("tests/test_trace_transfers.py:")
        assert exchange.op.get("apart"), "ranks wait for their partners alone"
    sent = sum(timeline.read_log(Path(path)).events[1].bytes_out for _, path, _ in ran)
    assert 0 <= sent - ran[0][2] < 500, "pieces begin at multiples of 16 bytes"
    text = str(timeline.read_traces(path for _, path, _ in ran))
    assert "exchange of axes.transfer of 3 tensors in" in text
    assert "hadn't ended" not in text


@pytest.fixture
def jobs():
    both = Jobs()
    for name in ("trainer", "generator"):
        both.start(name)
    yield both
    both.end()


def test_a_link_records_waiting_and_exchange_with_the_partner_the_specs_and_the_line(jobs, tmp_path):
    for name in ("trainer", "generator"):
        jobs.ask(name, "trace", path=str(tmp_path / f"{name}.jsonl"))
    for turn in range(2):
        assert all(found[0] == "ok" for found in jobs.ask_all("transfer", turn=turn).values())
    for name in ("trainer", "generator"):
        jobs.ask(name, "trace", path="")
    logs = {(name, rank): timeline.read_log(tmp_path / f"{name}.{rank}.jsonl") for name, rank in jobs.pipes}
    sent = dict.fromkeys(("trainer", "generator"), 0)
    for (name, _), log in logs.items():
        call, other = ("link.send", "generator") if name == "trainer" else ("link.receive", "trainer")
        found = [event for event in log.events if event.op["kind"] == call]
        assert [event.op["what"] == f"{call} waiting for '{other}'" for event in found] == [True, False] * 2
        assert found[1].op is found[3].op, "what repeats is said once"
        exchange = found[1]
        assert exchange.op["axis"] == "trainer to generator"
        assert exchange.op["what"].startswith(f"{call} of 3 tensors in ")
        assert "'c' (f d -> f@tp d), 'a' (f@fsdp d -> f d@tp), 1 more" in exchange.op["what"]
        assert f"of '{other}'" in exchange.op["what"]
        assert f"of '{name}'" not in exchange.op["what"]
        assert set(exchange.op["ranks"]) <= {0, 1}
        assert exchange.place == found[0].place
        assert exchange.place.startswith("tests/job_program.py:")
        assert all(event.ns is not None for event in found)
        sent[name] += exchange.bytes_out - exchange.bytes_in
    assert sent["trainer"] == -sent["generator"]
    # Each rank of the generator wants half of "a" and of "c", and all of "b".
    least = 4 * sum(torch.Size(SHAPES[name]).numel() * (2 if name == "b" else 1) for name in SHAPES)
    assert least <= sent["trainer"] < least + 500, "pieces begin at multiples of 16 bytes"
    for name in ("trainer", "generator"):
        text = str(timeline.read_traces(tmp_path / f"{name}.{rank}.jsonl" for rank in range(2)))
        assert "trainer to generator" in text
        assert "waiting for '" in text
        assert "hadn't ended" not in text
        assert max(map(len, text.splitlines())) <= 80


def test_an_exchange_in_which_the_other_job_dies_is_open_in_the_trace(jobs, tmp_path):
    jobs.ask("trainer", "trace", path=str(tmp_path / "trainer.jsonl"))
    jobs.tell("generator", 0, "transfer", turn=0, fault=("bytes", "SIGKILL"))
    jobs.tell("generator", 1, "transfer", turn=0)
    found = jobs.ask("trainer", "transfer", turn=0)
    assert all(answer[0] == "DesyncError" for answer in found)
    jobs.ask("trainer", "trace", path="")
    text = str(timeline.read_traces(tmp_path / f"trainer.{rank}.jsonl" for rank in range(2)))
    assert "link.send of 3 tensors" in text
