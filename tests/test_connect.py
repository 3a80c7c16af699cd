"""`axes.connect`: transfers between jobs, and faults on their way, on real processes."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import axes
from tests.job_program import LIMIT, forks, host, serve

WAIT = 60.0
"""Seconds that a rank may take for anything, on a machine that is busy."""


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


# --- the faults -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault of one rank at a phase. names: what the other job's error says."""

    job: str
    rank: int
    kind: str
    phase: str

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank} of the {self.job} at {self.phase}"

    @property
    def others(self) -> str:
        """The job that the fault doesn't hit."""
        return "generator" if self.job == "trainer" else "trainer"

    @property
    def names(self) -> str:
        """What the other job's error says: the rank, or its job where the two haven't met."""
        return f"'{self.job}'" if self.phase in ("join", "own ranks", "meet") else f"rank {self.rank} of '{self.job}'"


FAULTS = [
    Fault(job, rank, kind, phase)
    for kind in ("SIGSTOP", "SIGKILL")
    for job, rank in (("trainer", 0), ("generator", 1))
    for phase in ("join", "own ranks", "meet", "fingerprint", "connect", "bytes", "end")
] + [
    Fault("generator", 0, "late", "meet"),
    Fault("trainer", 1, "late", "fingerprint"),
    Fault("generator", 1, "late", "bytes"),
]

PATIENCE = LIMIT + 6.0
"""Seconds after which an error is there: the limit of one phase, what was spent before, and slack for a busy machine."""


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    running = Jobs()
    try:
        assert all(found[0] == "ok" for name in ("trainer", "generator") for found in running.start(name))
        yield running
    finally:
        running.end()


def good(jobs: Jobs, turn: int, **given: Any) -> None:
    """A transfer that has to be right on all ranks."""
    found = jobs.ask_all("transfer", turn=turn, **given)
    wrong = {each: answer for each, answer in found.items() if answer is None or answer[0] != "ok"}
    assert not wrong, "\n".join(f"{each}: {answer}" for each, answer in wrong.items())
    receiver = "trainer" if given.get("back") else "generator"
    for rank in range(2):
        arrived, _ = found[receiver, rank][3]
        assert arrived
        assert all(arrived.values()), arrived


def as_documented(text: str, memory: Any) -> None:
    """What an error says of the receiver's tensors is so."""
    arrived, kept = memory
    found = re.search(r"whole on rank \d of '\w+': (.*); not whole: (.*)", text)
    if "Nothing was written" in text:
        assert all(kept.values()), (text, kept)
    elif found is not None:
        whole = re.findall(r"'(\w+)'", found[1])
        assert all(arrived[name] for name in whole), (text, arrived)
        assert {*whole, *re.findall(r"'(\w+)'", found[2])} == {*arrived}
    else:
        assert "didn't come" in text or "can't take part" in text or "says nothing" in text, text
        assert all(kept.values()), (text, kept)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_an_error_that_names_it_and_the_next_transfer_works(jobs: Jobs, fault: Fault):
    turn = 10 * (FAULTS.index(fault) + 1)
    good(jobs, turn)
    victim = (fault.job, fault.rank)
    if fault.phase == "join":
        jobs.start(fault.job, connect=False)
        for rank in range(2):
            jobs.tell(fault.job, rank, "connect", **({"fault": ("join", fault.kind)} if rank == fault.rank else {}))
        asked = [(fault.others, rank) for rank in range(2)]
        waited = [*asked, *((fault.job, rank) for rank in range(2) if rank != fault.rank)]
    else:
        asked = [(name, rank) for name in ("trainer", "generator") for rank in range(2)]
        waited = [each for each in asked if each != victim or fault.kind == "late"]
    for each in asked:
        hit = {"fault": (fault.phase, fault.kind)} if each == victim else {}
        jobs.tell(*each, "transfer", turn=turn + 1, limit=LIMIT, **hit)
    answers = {each: jobs.answer(*each) for each in waited}
    if fault.kind == "SIGSTOP":
        os.kill(jobs.processes[victim].pid, signal.SIGCONT)
        jobs.answer(*victim)
    for (name, rank), (kind, text, seconds, memory) in answers.items():
        if name == fault.others:
            assert kind == "DesyncError", (name, rank, kind, text)
            assert fault.names in text, text
            assert seconds < PATIENCE, (seconds, text)
            if name == "generator":
                as_documented(text, memory)
        elif fault.phase != "join":
            assert kind != "ok", (name, rank)
    if fault.kind == "SIGKILL" or fault.phase == "join":
        assert all(found[0] == "ok" for found in jobs.start(fault.job)), "a new job joins in its place"
    good(jobs, turn + 2)


TEXTS = {
    "a shape": ({"shapes": {"a": (6, 10)}}, ("generator", None), "ShardingError", "'a' has other shapes"),
    "a dtype": ({"dtypes": {"a": "int64"}}, ("generator", None), "ShardingError", "int64 in 'generator'"),
    "a name": (
        {"specs": {"z": "d"}, "shapes": {"z": (3,)}},
        ("trainer", None),
        "ShardingError",
        "'trainer' has 'z', 'generator' hasn't",
    ),
    "a version": ({"version": "9.9"}, ("generator", None), "DesyncError", "'generator' '?9.9"),
    "another plan": ({"bucket": 1.0}, ("trainer", None), "DesyncError", "ranks have derived other plans"),
    "another plan of one rank": ({"bucket": 1.0}, ("generator", 1), "DesyncError", "rank 1 of 'generator'"),
    "a spec of one rank": ({"specs": {"a": "f d"}}, ("trainer", 1), "DesyncError", "other specs"),
    "a spec of one receiver": ({"specs": {"b": "d@tp"}}, ("generator", 0), "DesyncError", "other specs"),
    "an unknown axis": ({"said": {"a": "f@pp d"}}, ("generator", 1), "DesyncError|ShardingError|MeshError", "pp"),
    "a dtype of one rank": (
        {"dtypes": {"b": "float64"}},
        ("trainer", 0),
        "ShardingError|DesyncError",
        "float64 on rank 0",
    ),
}
"""What is other in a job, or on one rank of it; the error; and what it says on the other side."""


@pytest.mark.parametrize("what", TEXTS)
def test_other_texts_are_an_error_on_both_sides_before_a_byte_is_sent(jobs: Jobs, what: str):
    change, (name, rank), kinds, says = TEXTS[what]
    turn = 1000 + 10 * list(TEXTS).index(what)
    good(jobs, turn)
    every = [(job, each) for job in ("trainer", "generator") for each in range(2)]
    for each in every:
        changes = each[0] == name and rank in (None, each[1])
        jobs.tell(*each, "transfer", turn=turn + 1, limit=LIMIT, **(change if changes else {}))
    for each, (kind, text, seconds, (_, kept)) in {each: jobs.answer(*each) for each in every}.items():
        assert re.fullmatch(kinds, kind), (each, kind, text)
        assert re.search(says, text), (each, text)
        assert seconds < PATIENCE
        assert all(kept.values()), (each, text)
    good(jobs, turn + 2)


def test_a_transfer_goes_both_ways_and_leaves_no_key(jobs: Jobs):
    before = jobs.ask("trainer", "keys")[0][1]
    for turn in range(2001, 2006):
        good(jobs, turn)
    assert jobs.ask("trainer", "keys")[0][1] == before
    good(jobs, 2007, back=True)
    good(jobs, 2008, plain=True)
    for turn in (2010, 2012):
        good(jobs, turn, back=True, only="b")  # one of two holders sends it, so that three ranks exchange anything
        good(jobs, turn + 1)
    assert not [key for key in before if "pair/" in key or "call/" in key or "met/" in key], before


POOLS = {"trainer": 6, "generator": 9}


@settings(max_examples=15)
@given(data=st.data())
def test_pages_of_one_jobs_cache_are_written_to_pages_of_the_others(jobs: Jobs, data: Any):
    count, turn = data.draw(st.integers(0, POOLS["generator"])), data.draw(st.integers(1, 99))
    sent = data.draw(st.lists(st.integers(0, POOLS["trainer"] - 1), min_size=count, max_size=count))
    written = data.draw(st.permutations(range(POOLS["generator"])))[:count]
    how = {"turn": turn, "pools": POOLS, "sent": ("page", sent), "written": ("page", written)}
    found = jobs.ask_all("pages", **how)
    source = torch.arange(POOLS["trainer"] * 8.0).view(-1, 2, 4) + 1000 * turn
    expected = torch.full((POOLS["generator"], 2, 4), -1.0)
    expected[written] = source[sent]
    for (name, rank), (kind, *said) in found.items():
        assert kind == "ok", (name, rank, said)
        if name == "generator":
            assert said[0] == {"k": expected.tolist(), "v": expected.tolist()}


LISTS = {
    "a page that isn't there": (("page", [6]), ("page", [0]), "the sources have 6 pages, from 0 on; found 6"),
    "a page written twice": (("page", [1, 2]), ("page", [3, 3]), "page 3 of the targets is in the list twice"),
    "fewer pages": (("page", [1, 2]), ("page", [3]), "as many of the sources as of the targets; found 2 and 1"),
    "pages of one job": (("page", [1]), None, "'trainer' passes pages=, 'generator' doesn't"),
    "another dim": (("page", [1]), ("d", [1]), "the dim of pages is 'page' in 'trainer' and 'd' in 'generator'"),
    "no numbers": (("page", [1.5]), ("page", [1]), r"send takes pages=\(name of a dim, numbers of pages\)"),
}


@pytest.mark.parametrize("what", LISTS)
def test_lists_that_dont_fit_are_an_error_in_both_jobs_before_a_byte_is_sent(jobs: Jobs, what: str):
    sent, written, says = LISTS[what]
    for each, (kind, text, seconds, _) in jobs.ask_all(
        "pages", turn=1, limit=LIMIT, pools=POOLS, sent=sent, written=written
    ).items():
        assert kind in ("ShardingError", "DesyncError"), (each, text)
        assert re.search(says, text), (each, text)
        assert seconds < PATIENCE
    good(jobs, 3000 + list(LISTS).index(what))


def test_pages_of_pools_of_two_sizes_are_refused_in_both_jobs(jobs: Jobs):
    pools = {"trainer": 6, "generator": {"k": 9, "v": 5}}
    for each, (kind, text, *_) in jobs.ask_all(
        "pages", turn=1, limit=LIMIT, pools=pools, sent=("page", [1]), written=("page", [0])
    ).items():
        assert kind == "ShardingError", (each, kind, text)
        assert "tensors whose pages are moved together have as many of them" in text, text


def test_other_pages_of_one_rank_are_an_error_on_all(jobs: Jobs):
    right, other = ("page", [1, 2]), ("page", [1, 3])
    every = [(name, rank) for name in ("trainer", "generator") for rank in range(2)]
    for each in every:
        sent = other if each == ("trainer", 1) else right
        jobs.tell(*each, "pages", turn=1, limit=LIMIT, pools=POOLS, sent=sent, written=right)
    for each in every:
        kind, text, *_ = jobs.answer(*each)
        assert kind == "DesyncError", (each, kind, text)
        assert "other specs" in text, text


def test_a_second_generator_joins_and_the_first_one_leaves():
    running, peers = Jobs(), ("trainer", "generator", "other")
    try:
        for name in peers:
            assert all(found[0] == "ok" for found in running.start(name, peers=peers))
        for turn, name in enumerate(("generator", "other", "generator")):
            for rank in range(2):
                running.tell("trainer", rank, "transfer", turn=turn, other=name)
                running.tell(name, rank, "transfer", turn=turn)
            for each in ("trainer", name):
                for rank in range(2):
                    kind, text, _, (arrived, _) = running.answer(each, rank)
                    assert (kind, each == "trainer" or all(arrived.values())) == ("ok", True), text
        assert all(found[0] == "ok" for found in running.ask("generator", "close"))
        for kind, text, *_ in running.ask("trainer", "transfer", turn=7, other="generator", limit=LIMIT):
            assert (kind, "'generator' hasn't joined, or has left" in text) == ("DesyncError", True), text
        for rank in range(2):
            running.tell("trainer", rank, "transfer", turn=8, other="other")
        assert all(found[0] == "ok" and all(found[3][0].values()) for found in running.ask("other", "transfer", turn=8))
    finally:
        running.end()


@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
def test_a_store_that_is_gone_is_an_error_that_names_the_store(how: str):
    running = Jobs()
    try:
        for name in ("trainer", "generator"):
            running.start(name)
        good(running, 1)
        os.kill(running.host.pid, getattr(signal, how))
        for each, (kind, text, seconds, (_, kept)) in running.ask_all("transfer", turn=2, limit=LIMIT).items():
            assert kind == "DesyncError", each
            assert "the link's store" in text
            assert seconds < PATIENCE
            assert all(kept.values())
    finally:
        running.end()


# --- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "peers", "says"),
    [
        ("trainer", ("generator", "other"), "'trainer' isn't among the peers"),
        ("trainer", ("trainer",), "two or more words, all different"),
        ("trainer", "trainer", "two or more words"),
        ("a b", ("a b", "c"), "two or more words"),
    ],
)
def test_what_can_not_be_a_link_is_refused(name: str, peers: Any, says: str):
    with pytest.raises(axes.MeshError, match=says):
        axes.connect(dist.HashStore(), name, axes.Mesh("dp=1"), peers)


def test_a_job_without_torch_distributed_has_one_rank():
    with pytest.raises(axes.MeshError, match=r"call axes\.init_mesh"):
        axes.connect(dist.HashStore(), "trainer", axes.Mesh("dp=2"))


def test_two_jobs_of_one_rank_need_no_torch_distributed_and_nothing_is_left_in_the_store(tmp_path: Path):
    before = torch.arange(12.0).reshape(3, 4)
    into = torch.zeros(4, 3, dtype=torch.float64).t()

    def job(name: str) -> None:
        store = dist.FileStore(str(tmp_path / "store"), -1)
        with axes.connect(store, name, axes.Mesh("dp=1"), timeout=10) as link:
            for _ in range(2):
                if name == "trainer":
                    link.send({"w": before}, {"w": "f@dp d"})
                else:
                    link.receive({"w": into}, {"w": "f d"})

    with ThreadPoolExecutor(2) as both:
        list(both.map(job, ("trainer", "generator")))
    assert torch.equal(into, before.double())
    assert not dist.is_initialized()
    left = dist.FileStore(str(tmp_path / "store"), -1).list_keys()
    assert not [key for key in left if "axes/link" in key], left


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "several elements in one place": lambda: torch.zeros(1, 3).expand(4, 3),
    "an inference tensor": lambda: torch.inference_mode()(torch.zeros)(4, 3),
    "a view that conjugates or negates": lambda: torch.zeros(4, 3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("says", KINDS)
def test_what_can_not_be_written_is_an_error_before_the_jobs_meet(says: str):
    store, before, into = dist.HashStore(), torch.arange(12.0).reshape(4, 3), torch.zeros(4, 3)

    def job(name: str) -> list[str]:
        found = []
        with axes.connect(store, name, axes.Mesh("dp=1"), timeout=2) as link:
            for target in (KINDS[says](), into):
                try:
                    if name == "trainer":
                        link.send({"w": before}, {"w": "f d"})
                    else:
                        if target is not into:
                            store.wait(["axes/link/channel/trainer/generator/waits"])  # the trainer comes first
                        link.receive({"w": target}, {"w": "f d"})
                except axes.AxesError as error:
                    found.append(f"{type(error).__name__}: {error}")
        return found

    with ThreadPoolExecutor(2) as both:
        (sent,), (received,) = both.map(job, ("trainer", "generator"))
    assert received.startswith("ShardingError: 'w' of into= ")
    assert says in received
    assert says in sent
    assert torch.equal(into, before)


def waiting_alone(port: int) -> tuple[str, int]:
    """What a rank of a job says that waits for another job, where all close their links at once; keys that are left."""
    mesh = axes.init_mesh("tp=2", device_type="cpu")
    store = dist.TCPStore("127.0.0.1", port, None, False)
    try:
        with axes.connect(store, "trainer", mesh, timeout=1) as link:
            link.send({"w": torch.ones(1, 4)}, {"w": "f@tp d"})
    except axes.DesyncError as error:
        said = str(error)
    dist.barrier()
    return said, sum("axes/link" in key for key in store.list_keys())


def test_a_rank_that_closes_its_link_leaves_the_others_the_time_to_read_why(world):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for said, left in world(waiting_alone, 2, store.port):
        assert "'generator' didn't come" in said
        assert left == 0


def test_a_link_that_was_closed_says_so():
    link = axes.connect(dist.HashStore(), "trainer", axes.Mesh("dp=1"), timeout=WAIT)
    for _ in range(2):
        link.close()
    with pytest.raises(axes.MeshError, match=r"this link of 'trainer' is closed; axes\.connect makes"):
        link.send({"w": torch.ones(4)}, {"w": "a"})


def connecting_by_a_line(port: int) -> tuple[str, list[int]]:
    """What a rank is told that connects by its sub-mesh, and the ranks of that."""
    whole = axes.init_mesh("pp=2 dp=2", device_type="cpu", timeout=WAIT)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    with pytest.raises(axes.MeshError) as found:
        axes.connect(store, "trainer", whole["dp"])
    return str(found.value), whole["dp"].ranks


def test_a_sub_mesh_is_refused_with_what_to_write(world):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for said, ranks in world(connecting_by_a_line, 4, store.port):
        assert said.startswith("mesh['dp'] is another one on each rank")
        assert said.endswith(f"axes.init_mesh('dp=2', ranks={ranks})")
