"""Two jobs and the link between them: `axes.connect` on real processes, and faults on the way."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import axes
from tests.job_program import LIMIT, forks, host, serve

WAIT = 60.0
"""Seconds that a rank may take for anything, on a machine that is busy."""

BOTH = ("trainer", "generator")


class Jobs:
    """Two jobs of two ranks each, the store between them, and what each rank is told."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="axes-jobs-")
        self.pipes: dict[tuple[str, int], Any] = {}
        self.processes: dict[tuple[str, int], Any] = {}
        self.started = 0
        ours, theirs = forks.Pipe()
        self.host = forks.Process(target=host, args=(theirs,), daemon=True)
        self.host.start()
        self.host_pipe = ours
        self.port = ours.recv()

    def start(self, name: str, connect: bool = True, **given: Any) -> list[Any]:
        """Start the ranks of a job, in the place of those that it had."""
        self.started += 1
        place = str(Path(self.folder.name) / f"{name}{self.started}")
        for rank in range(2):
            self.stop(name, rank)
            ours, theirs = forks.Pipe()
            process = forks.Process(target=serve, args=(theirs, name, rank, place, self.port), daemon=True)
            process.start()
            theirs.close()
            self.pipes[name, rank], self.processes[name, rank] = ours, process
        found = [self.answer(name, rank)[0] for rank in range(2)]
        assert found == ["ready", "ready"]
        return self.ask(name, "connect", **given) if connect else found

    def stop(self, name: str, rank: int) -> None:
        """Ends a rank, if there is one."""
        process = self.processes.pop((name, rank), None)
        if process is not None:
            process.kill()
            process.join()
            self.pipes.pop((name, rank)).close()

    def tell(self, name: str, rank: int, what: str, **given: Any) -> None:
        self.pipes[name, rank].send((what, given))

    def answer(self, name: str, rank: int) -> Any:
        """A rank's answer; None where it has died."""
        pipe = self.pipes[name, rank]
        try:
            assert pipe.poll(WAIT), f"rank {rank} of {name} doesn't answer"
            return pipe.recv()
        except EOFError:
            return None

    def ask(self, name: str, what: str, **given: Any) -> list[Any]:
        """Both ranks of a job do it."""
        for rank in range(2):
            self.tell(name, rank, what, **given)
        return [self.answer(name, rank) for rank in range(2)]

    def ask_all(self, what: str, names: tuple[str, ...] = ("trainer", "generator"), **given: Any) -> dict[Any, Any]:
        """All ranks of both jobs do it."""
        every = [(name, rank) for name in names for rank in range(2)]
        for each in every:
            self.tell(*each, what, **given)
        return {each: self.answer(*each) for each in every}

    def end(self) -> None:
        for name, rank in list(self.processes):
            self.stop(name, rank)
        os.kill(self.host.pid, signal.SIGCONT) if self.host.is_alive() else None
        self.host.kill()
        self.host.join()
        self.folder.cleanup()


@pytest.fixture(scope="module")
def jobs():
    running = Jobs()
    try:
        assert all(found[0] == "ok" for name in BOTH for found in running.start(name))
        yield running
    finally:
        running.end()


def good(jobs: Jobs, turn: int, **given: Any) -> None:
    """A transfer that has to be right on all ranks."""
    for each, (kind, text, _, memory) in jobs.ask_all("transfer", turn=turn, **given).items():
        assert kind == "ok", (each, text)
        assert all(arrived for arrived, _ in memory.values()), (each, memory)
        assert memory or each[0] == ("generator" if given.get("back") else "trainer")


FAULTS = [
    # a job and its rank, what happens, and where: at a call of the link's store, or at the first message
    *(("trainer", 0, "SIGKILL", point) for point in (0, 1, 2, "bytes")),
    *(("generator", 1, "SIGSTOP", point) for point in (0, 2, "bytes")),
    ("generator", 0, "SIGKILL", "bytes"),
    ("generator", 0, "late", 0),
    ("trainer", 1, "late", "bytes"),
    ("trainer", 1, "SIGKILL", 0),
]
FAST = (("trainer", 1, "SIGKILL", 0), ("trainer", 0, "SIGKILL", 1), ("generator", 1, "SIGSTOP", "bytes"))


@pytest.mark.parametrize(
    "fault", [pytest.param(each, marks=[] if each in FAST else pytest.mark.full) for each in FAULTS], ids=str
)
def test_a_fault_is_an_error_that_names_it_and_the_next_transfer_works(jobs: Jobs, fault: tuple[str, int, str, Any]):
    name, victim, how, point = fault
    turn, every = 10 * (FAULTS.index(fault) + 1), [(job, rank) for job in BOTH for rank in range(2)]
    good(jobs, turn)
    for each in every:
        jobs.tell(*each, "transfer", turn=turn + 1, **({"fault": (how, point)} if each == (name, victim) else {}))
    answers = {each: jobs.answer(*each) for each in every if each != (name, victim) or how == "late"}
    if how == "SIGSTOP":
        os.kill(jobs.processes[name, victim].pid, signal.SIGCONT)
        jobs.answer(name, victim)
    for (job, rank), (kind, text, seconds, memory) in answers.items():
        if job == name:
            continue
        assert kind == "DesyncError", (job, rank, kind, text)
        assert f"rank {victim} " in text, text
        assert f"'{name}'" in text, text
        assert seconds < 3 * LIMIT, (seconds, text)
        assert job == "generator" or "whole on rank" not in text, "who sends gets nothing"
        found = re.search(r"whole on rank \d of '\w+': (.*); not whole: (.*)", text)
        if "Nothing was written" in text:
            assert all(kept for _, kept in memory.values()), (text, memory)
        elif found is not None:
            assert all(memory[whole][0] for whole in re.findall(r"'(\w+)'", found[1])), (text, memory)
    if how == "SIGKILL":
        assert all(found[0] == "ok" for found in jobs.start(name)), "a new job joins in its place"
    good(jobs, turn + 2)


TEXTS = {
    "a shape": ({"shapes": {"a": (6, 10)}}, ("generator", None), "ShardingError", "'a' has other shapes"),
    "a dtype": ({"dtypes": {"a": "int64"}}, ("generator", None), "ShardingError", "int64 in 'generator'"),
    "a name": ({"specs": {"z": "d"}, "shapes": {"z": (3,)}}, ("trainer", None), "ShardingError", "targets lack 'z'"),
    "a tensor of one sender": ({"without": "a"}, ("trainer", 1), "ShardingError|DesyncError", r"'a' is on rank 1 of 'trainer' a shard of shape \[3, 8\]"),
    "a tensor of one receiver": ({"without": "c"}, ("generator", 1), "ShardingError|DesyncError", "'c' is on rank 1 of 'generator' a shard"),
    "both send": ({"back": True}, ("generator", None), "DesyncError", "has come to the transfer from"),
    "a spec of one rank": ({"specs": {"a": "f d"}}, ("trainer", 1), "DesyncError", "other specs"),
    "a spec of one receiver": ({"specs": {"b": "d@tp"}}, ("generator", 0), "DesyncError", "other specs"),
    "an unknown axis": ({"said": {"a": "f@pp d"}}, ("generator", 1), "DesyncError|ShardingError|MeshError", "pp"),
    "a dtype of one rank": ({"dtypes": {"b": "float64"}}, ("trainer", 0), "ShardingError|DesyncError", "float64 on rank 0"),
}  # fmt: skip
"""What is other in a job, or on one rank of it; the error; and what it says on the other side."""


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.full if what == "an unknown axis" else ()) for what in TEXTS]
)
def test_other_texts_are_an_error_on_both_sides_before_a_byte_is_sent(jobs: Jobs, what: str):
    change, (name, rank), kinds, says = TEXTS[what]
    every = [(job, each) for job in BOTH for each in range(2)]
    for each in every:
        jobs.tell(*each, "transfer", turn=1000, **(change if each[0] == name and rank in (None, each[1]) else {}))
    for each, (kind, text, _, memory) in {each: jobs.answer(*each) for each in every}.items():
        assert re.fullmatch(kinds, kind), (each, kind, text)
        assert re.search(says, text), (each, text)
        assert all(kept for _, kept in memory.values()), (each, text)
    good(jobs, 1001)


def test_a_transfer_goes_both_ways_and_leaves_no_key(jobs: Jobs):
    good(jobs, 2000)
    before = jobs.ask("trainer", "keys")[0][1]
    for turn in range(2001, 2004):
        good(jobs, turn)
    assert jobs.ask("trainer", "keys")[0][1] == before
    good(jobs, 2007, back=True)
    for turn in (2010, 2012):
        good(jobs, turn, back=True, only="b")  # one of two holders sends it, so that three ranks exchange anything
        good(jobs, turn + 1)
    assert not [key for key in before if "pair/" in key or "call/" in key or "met/" in key], before


@pytest.mark.full
def test_a_second_generator_joins_the_first_one_leaves_and_the_store_goes():
    running, peers = Jobs(), (*BOTH, "other")
    try:
        for name in peers:
            assert all(found[0] == "ok" for found in running.start(name, peers=peers))
        for turn, name in enumerate(("generator", "other", "generator")):
            for rank in range(2):
                running.tell("trainer", rank, "transfer", turn=turn, other=name)
                running.tell(name, rank, "transfer", turn=turn)
            for each in ("trainer", name):
                for rank in range(2):
                    kind, text, _, memory = running.answer(each, rank)
                    assert (kind, all(arrived for arrived, _ in memory.values())) == ("ok", True), text
        assert all(found[0] == "ok" for found in running.ask("generator", "close"))
        for kind, text, *_ in running.ask("trainer", "transfer", turn=7, other="generator"):
            assert kind == "DesyncError"
            assert "'generator' " in text
        os.kill(running.host.pid, signal.SIGSTOP)
        for kind, text, *_ in running.ask_all("transfer", ("trainer",), turn=8, other="other").values():
            assert kind == "DesyncError"
            assert "the link's store" in text
    finally:
        running.end()


def test_two_jobs_of_one_rank_need_no_torch_distributed_and_nothing_is_left_in_the_store(tmp_path: Path):
    before, into = torch.arange(12.0).reshape(3, 4), torch.zeros(4, 3, dtype=torch.float64).t()

    def job(name: str) -> str:
        store = dist.FileStore(str(tmp_path / "store"), -1)
        with axes.connect(store, name, axes.Mesh("dp=1"), timeout=10) as link:
            for _ in range(2):
                if name == "trainer":
                    link.send({"w": before}, {"w": "f@dp d"})
                else:
                    link.receive({"w": into}, {"w": "f d"})
        if name == "trainer":
            with pytest.raises(axes.MeshError, match=r"this link of 'trainer' is closed; axes\.connect makes"):
                link.send({"w": before}, {"w": "f d"})
        return repr(link)

    with ThreadPoolExecutor(2) as both:
        list(both.map(job, BOTH))
    assert torch.equal(into, before.double())
    assert not dist.is_initialized()
    left = dist.FileStore(str(tmp_path / "store"), -1).list_keys()
    assert not [key for key in left if "axes/link" in key], left
    with pytest.raises(axes.MeshError, match=r"call axes\.init_mesh"):
        axes.connect(dist.HashStore(), "trainer", axes.Mesh("dp=2"))
    with axes.init_mesh("a=1", device_type="cpu"), pytest.raises(axes.MeshError, match=r"rank 1, and the job has 1"):
        axes.connect(dist.HashStore(), "trainer", axes.Mesh("x=2"))
    axes.destroy_process_groups()
    with axes.simulate(2), pytest.raises(axes.MeshError, match=r"needs a real job, started by axes\.init_mesh"):
        axes.connect(dist.HashStore(), "trainer", axes.init_mesh("dp=2", device_type="cpu"))


def alone(port: int) -> tuple[str, str]:
    """What a rank is told that connects by its sub-mesh, and what one is that waits for another job."""
    whole, store = (
        axes.init_mesh("pp=2 dp=2", device_type="cpu", timeout=WAIT),
        dist.TCPStore("127.0.0.1", port, None, False),
    )
    with pytest.raises(axes.MeshError) as found:
        axes.connect(store, "trainer", whole["dp"])
    mesh = axes.init_mesh("tp=4", device_type="cpu")
    with pytest.raises(axes.DesyncError) as waited, axes.connect(store, "trainer", mesh, timeout=1) as link:
        link.send({"w": torch.ones(1, 4)}, {"w": "f@tp d"})
    dist.barrier()
    assert not [key for key in store.list_keys() if "axes/link" in key]
    return str(found.value).replace(str(whole["dp"].ranks), "..."), str(waited.value)


def test_a_sub_mesh_is_refused_and_who_waits_alone_has_the_time_to_read_why(world):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for said, waited in world(alone, 4, store.port):
        assert said.startswith("Mesh('pp=2 dp=2')['dp'] is another one on each rank")
        assert said.endswith("axes.init_mesh(..., ranks=...)")
        assert "'generator' didn't come" in waited
