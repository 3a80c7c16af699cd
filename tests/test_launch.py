"""`axes.launch`: results by rank, errors that tell all, and nothing left behind however it ends."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import axes
from axes import AxesError, launch
from tests.common import lives, stat_of, waited, written

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After each test here: no rank, no descriptor, no temporary file."""
    others = set(children(server()))  # the pool's ranks, where there is one
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # with which more functions travel
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert waited(lambda: set(children(server())) <= others)
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer where the test let the pool go
    # Importing torch's compiler makes the folder of its cache, with or without us.
    assert [f for f in temporary.iterdir() if not f.name.startswith("torchinductor")] == []


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


SERVERS: list[int] = []


def parent_of_the_agent() -> int:
    return int(stat_of(os.getppid())[1])


def server() -> int:
    """The process from which agents are forked: the last known one, while it lives."""
    if not SERVERS or not lives(SERVERS[-1]):
        SERVERS.append(launch(parent_of_the_agent, 1)[0])
    return SERVERS[-1]


def refuses(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def failure(kind: type[BaseException], fn: Callable[..., object], size: int, *args: object, **how: Any) -> str:
    """The error that `fn` on so many ranks ends with, and its notes."""
    with pytest.raises(kind) as caught:
        launch(fn, size, *args, **how)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def run_python(*arguments: str, text: str = "", folder: Path = ROOT) -> tuple[str, str]:
    command, environ = [sys.executable, *arguments], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=text, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


@contextmanager
def meanwhile(does: Callable[[], object]) -> Iterator[None]:
    """`does`, beside a launch."""
    thread = threading.Thread(target=does)
    thread.start()
    yield
    thread.join()


# ---------------------------------------------------------------------------- what ranks do


def total(start: int = 0) -> int:
    x = torch.tensor(start + dist.get_rank())
    dist.all_reduce(x)
    return int(x)


def look() -> tuple[Any, ...]:
    world = dist.get_rank(), dist.get_world_size(), dist.get_backend(), torch.get_num_threads()
    return (*world, os.getcwd(), sys.argv, tempfile.gettempdir(), dict(os.environ))


def write_down(pid: int, folder: Path) -> None:
    written(folder / f"{dist.get_rank()}.pid", str(pid))


def written_down(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("*.pid")]


def sleep_on(rank: int, folder: Path) -> None:
    """Writes down its pid, then sleeps where `rank` is this one."""
    write_down(os.getpid(), folder)
    if dist.get_rank() == rank or rank < 0:
        time.sleep(600)


# ---------------------------------------------------------------------------- running


@pytest.mark.parametrize("size", [1, 2, 5])
def test_results_come_by_rank(size: int):
    assert launch(dist.get_rank, size) == list(range(size))
    assert launch(functools.partial(total, 10), size) == [sum(range(size)) + 10 * size] * size
    assert launch("a-{}".format, size, 5) == ["a-5"] * size


def test_a_rank_has_what_torchrun_would_give_it_and_sees_the_launching_process_as_it_is_now(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AXES_TEST", "now")
    monkeypatch.setattr(sys, "argv", ["me", "--fast"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for rank, (*world, cwd, argv, temporary, environ) in enumerate(launch(look, 3)):
        assert world == [rank, 3, "gloo", 1]
        assert (cwd, argv, temporary) == (str(tmp_path), ["me", "--fast"], os.environ["TMPDIR"])
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "AXES_TEST": "now"}
        expected |= {"LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        assert expected.items() <= environ.items()
    monkeypatch.delenv("AXES_TEST")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    *_, threads, _, _, _, environ = launch(look, 1)[0]
    assert (threads, "AXES_TEST" in environ) == (2, False)


def speak() -> tuple[float, float]:
    import numpy

    print(f"rank {dist.get_rank()} speaks\n", end="")  # in one write, whatever buffers the environment asks for
    print("to all\n", end="", file=sys.stderr)
    return float(torch.rand(())), float(numpy.random.rand())  # noqa: NPY002


def test_output_goes_where_the_launching_process_writes_and_numpy_draws_other_numbers_on_each_rank(capfd):
    drawn = launch(speak, 3)
    written = capfd.readouterr()
    assert sorted(written.out.splitlines()) == [f"rank {rank} speaks" for rank in range(3)]
    assert written.err == "to all\n" * 3
    assert [len({*each}) for each in zip(*drawn, strict=True)] == [1, 3], "torch's are the same"


def begin_again() -> int:
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    return total()


def leave_early() -> int:
    """Rank 0 is done at once; the others go on talking, through the store too."""
    if dist.get_rank() == 0:
        return 3
    x = torch.ones(1)
    dist.all_reduce(x, group=dist.new_group([1, 2], use_local_synchronization=True))
    return 1 + int(x)


def begin_as_under_torchrun(method: str | None) -> int:
    with pytest.MonkeyPatch.context() as patch:
        if method == "tcp://":  # rank 0 hosts the store on a port that it has found
            patch.delenv("TORCHELASTIC_USE_AGENT_STORE")
            with socket.create_server(("127.0.0.1", 0)) as free:
                found = [free.getsockname()[1]]
            dist.broadcast_object_list(found)
            method = f"tcp://127.0.0.1:{found[0]}"
        given = {} if method is None else {"init_method": method, "rank": dist.get_rank(), "world_size": 3}
        dist.init_process_group("gloo", **given)
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("gloo")
    return total()


@pytest.mark.parametrize(
    "call",
    [
        (begin_again,),
        (leave_early,),
        (begin_as_under_torchrun, None),
        (begin_as_under_torchrun, "env://"),
        (begin_as_under_torchrun, "tcp://"),
    ],
    ids=lambda call: " ".join([call[0].__name__, *map(str, call[1:])]),
)
def test_a_rank_starts_and_leaves_worlds_as_under_torchrun(call: tuple[Any, ...]):
    assert launch(call[0], 3, *call[1:]) == [3] * 3


def start_a_process(method: str) -> int | None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=before is not None)
    process = multiprocessing.Process(target=sys.exit, args=(5,))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(m, marks=pytest.mark.full) for m in ("spawn", "forkserver"))]
)
def test_a_rank_may_start_processes_by_any_method(method: str):
    assert launch(start_a_process, 1, method) == [5]


@pytest.mark.full
def test_the_start_method_and_the_fork_server_of_multiprocessing_stay_the_programs(tmp_path: Path):
    code = """
        import multiprocessing, sys
        from axes import launch
        if __name__ == "__main__":
            print(launch(abs, 2, -1), multiprocessing.get_start_method(allow_none=True), flush=True)
            multiprocessing.set_start_method("forkserver")
            multiprocessing.set_forkserver_preload(["this"])
            process = multiprocessing.Process(target=sys.exit, args=(5,))
            process.start()
            process.join()
            print(process.exitcode, launch(multiprocessing.get_start_method, 2))
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    out, err = run_python("script.py", folder=tmp_path)
    assert out.startswith("[1, 1] None\n"), err
    assert out.endswith("5 ['forkserver', 'forkserver']\n"), err
    assert out.count("The Zen of Python") == 1


def launch_inside() -> list[int]:
    return launch(total, 2, dist.get_rank())


@pytest.mark.full
def test_a_rank_may_launch_ranks():
    assert launch(launch_inside, 1) == [[1, 1]]


def test_two_threads_may_launch_at_once():
    results: dict[int, list[int]] = {}
    with meanwhile(lambda: results.update({10: launch(total, 3, 10)})):
        results[0] = launch(total, 3, 0)
    assert results == {0: [3] * 3, 10: [33] * 3}


def negative(x: torch.Tensor) -> torch.Tensor:
    return -x


def test_large_tensors_go_both_ways_by_value():
    x = torch.arange(5_000_000.0)
    assert [torch.equal(each, -x) for each in launch(negative, 2, x)] == [True, True]


def test_importing_it_imports_no_torch():
    code = "import sys, axes; axes.launch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---------------------------------------------------------------------------- failing


def cannot_read(rank: int) -> None:
    if dist.get_rank() == rank:
        raise axes.ExpressionError(f"rank {rank} can't read this", "b s@tp d", 4, 6)


def test_the_exception_of_the_failing_rank_is_raised_with_its_traceback():
    with pytest.raises(axes.ExpressionError, match="rank 1 can't read this") as caught:
        launch(cannot_read, 3, 1)
    assert (caught.value.start, caught.value.stop) == (4, 6)
    told = "\n".join(caught.value.__notes__)
    for part in ("rank 1 of 3 failed first, in cannot_read:", f'File "{__file__}"', "raise axes.ExpressionError(f"):
        assert part in told
    assert "ranks 0, 2 finished" in told
    assert "axes/launching" not in told, "frames of the library say nothing to users"


def fail_then_others_notice() -> None:
    dist.barrier()
    if dist.get_rank() == 2:
        raise ValueError("the first")
    time.sleep(0.5)
    raise axes.DesyncError(f"rank {dist.get_rank()} misses rank 2")


def fail_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the first")
    wait_in_a_barrier()


def wait_in_a_barrier() -> None:
    dist.barrier()


def test_the_first_failure_is_raised_and_others_are_told_or_shown_where_they_waited():
    told = failure(ValueError, fail_then_others_notice, 4)
    assert told.startswith("the first\n")
    for rank in (0, 1, 3):
        assert re.search(rf"rank {rank} failed: [\w.]*DesyncError: rank {rank} misses rank 2", told)
    began = time.monotonic()
    told = failure(ValueError, fail_while_others_wait, 3)
    assert time.monotonic() - began < 20  # the barrier alone would wait for half an hour
    assert "hadn't finished, most recent call first" in told
    assert "in wait_in_a_barrier" in told


class Picky(Exception):
    """Pickles, and can't be rebuilt."""

    def __init__(self, code: int, *, reason: str):
        super().__init__(f"{code} because {reason}")
        self.add_note("a note of its own")


class Unsendable(Exception):
    """Holds what doesn't pickle."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Grenade:
    """A result that pickles, and whose rebuilding fails."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return int, ("not a number",)


def end(how: str) -> object:
    """Rank 1 ends in some way, while the others wait for it."""
    if dist.get_rank() == 1:
        if how.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, how))
        elif how == "exit":
            sys.exit(0)
        elif how.startswith("leave"):
            os._exit(int(how[-1]))
        elif how == "lock":
            return threading.Lock()
        elif how == "grenade":
            return Grenade()
        else:
            raise Picky(7, reason="of the moon") if how == "picky" else Unsendable
    if how not in ("lock", "grenade"):
        dist.barrier()
    return None


ENDS = {
    "SIGKILL": (AxesError, "end: rank 1 of 3 was killed by SIGKILL"),
    "SIGSEGV": (AxesError, "rank 1 of 3 was killed by SIGSEGV, most recent call first:"),
    "leave 3": (AxesError, "rank 1 of 3 exited with code 3"),
    "leave 0": (AxesError, "rank 1 of 3 exited with code 0"),
    "exit": (RuntimeError, "SystemExit: 0"),
    "picky": (RuntimeError, "7 because of the moon"),
    "unsendable": (RuntimeError, "holds a lock"),
    "lock": (AxesError, "what rank 1 returned, a lock, can't be sent"),
    "grenade": (AxesError, "can't be rebuilt in the launching process: invalid lit"),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_ends_otherwise_than_by_a_result_is_named_with_how(how: str):
    kind, said = ENDS[how]
    told = failure(kind, end, 3, how)
    assert said in told.split("failed first")[0], "in the message, before the notes"
    assert kind is AxesError or "in end" in told


def sleep_stubbornly(folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_on(1, folder)


def test_when_time_is_up_late_ranks_are_named_shown_where_they_were_and_ended(tmp_path: Path):
    began = time.monotonic()
    told = failure(AxesError, sleep_stubbornly, 3, tmp_path, timeout=10)  # in which ranks import this file, too
    assert 10 <= time.monotonic() - began < 32
    assert told.startswith("sleep_stubbornly: time is up, rank 1 of 3 hadn't")
    assert "ranks 0, 2 finished" in told
    assert "in sleep_on" in told
    assert [lives(pid) for pid in written_down(tmp_path)] == [False] * 3


def leave_a_child(folder: Path) -> int:
    write_down(subprocess.Popen(["sleep", "600"]).pid, folder)
    (folder / "port").write_text(os.environ["MASTER_PORT"])
    raise ValueError("with a child")


def test_what_a_rank_starts_ends_with_it_and_the_port_is_closed_while_the_error_is_kept(tmp_path: Path):
    with pytest.raises(ValueError, match="with a child") as caught:
        launch(leave_a_child, 1, tmp_path)
    (child,) = written_down(tmp_path)
    assert waited(lambda: not lives(child))
    assert refuses(int((tmp_path / "port").read_text()))
    assert caught.value.__traceback__ is not None


# ---------------------------------------------------------------------------- interrupted


def test_an_interrupt_ends_the_ranks(tmp_path: Path):
    def interrupt() -> None:
        waited(lambda: len(written_down(tmp_path)) == 3)
        os.kill(os.getpid(), signal.SIGINT)

    with meanwhile(interrupt), pytest.raises(KeyboardInterrupt):
        launch(sleep_on, 3, -1, tmp_path)
    assert [lives(pid) for pid in written_down(tmp_path)] == [False] * 3


def hang_in_c(folder: Path) -> None:
    """Never gives the interpreter back: no handler and no other thread of this process runs."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"{dist.get_rank()}.port").write_text(os.environ["MASTER_PORT"])
    write_down(os.getpid(), folder)
    re.match("(a+)+$", "a" * 60 + "b")


def test_when_the_launching_process_is_killed_nothing_is_left_of_ranks_that_hang(tmp_path: Path):
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    pids.mkdir()
    temporary.mkdir()
    code = f"""
        from pathlib import Path
        from tests.test_launch import hang_in_c, launch
        launch(hang_in_c, 2, Path({str(pids)!r}))
    """
    environ = os.environ | {"TMPDIR": str(temporary)}
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env=environ)
    try:
        assert waited(lambda: len(written_down(pids)) == 2)
        (fork_server,) = children(parent.pid)
        descendants = [*written_down(pids), fork_server, *children(fork_server)]
        assert len(descendants) == 4
    finally:
        parent.kill()
        parent.wait()
    assert waited(lambda: not any(lives(pid) for pid in descendants))
    # A process whose first thread has ended holds its sockets until the others have.
    assert waited(lambda: refuses(int((pids / "0.port").read_text())))
    assert [f for f in temporary.iterdir() if not f.name.startswith("torchinductor")] == []


def sleep_under_an_agent(folder: Path) -> None:
    (folder / "agent").write_text(str(os.getppid()))
    sleep_on(-1, folder)


def test_when_the_agent_is_killed_the_launch_says_so_and_no_rank_is_left(tmp_path: Path):
    def kill() -> None:
        waited(lambda: len(written_down(tmp_path)) == 2)
        os.kill(int((tmp_path / "agent").read_text()), signal.SIGKILL)

    with meanwhile(kill):
        told = failure(AxesError, sleep_under_an_agent, 2, tmp_path)
    assert "sleep_under_an_agent on 2 ranks was lost: the process that started them died" in told
    assert waited(lambda: not any(map(lives, written_down(tmp_path)))), (
        "ranks end by themselves when their agent has died"
    )


def kill_the_server(pid: int) -> int:
    if dist.get_rank() == 0:
        os.kill(pid, signal.SIGKILL)
    return total()


def test_when_the_fork_server_is_killed_the_launch_goes_on_and_the_next_one_starts_another():
    before = server()
    assert launch(kill_the_server, 2, before) == [1, 1]
    assert server() != before


# ---------------------------------------------------------------------------- what can be sent


def test_functions_and_arguments_that_other_processes_cant_have_are_refused():
    def local() -> None: ...

    for arguments, said in (
        ((lambda: 0, 2), r"<lambda> can't be sent .* Define it with `def` at the top level"),
        ((local, 2), r"<locals>.local can't be sent .* not inside another .*or install cloudpickle"),
        ((total, 2, threading.Lock()), "argument 0 of total, a lock, can't be sent"),
        ((total, 2, 1, lambda: 0), "argument 1 of total, a function, can't be sent"),
    ):
        with pytest.raises(AxesError, match=said):
            launch(*arguments)
    with pytest.raises(AxesError, match=r"program of axes\.verify can't be sent"):
        axes.verify(lambda x: x, torch.ones(4), mesh="dp=2")


SCRIPT = """
import torch.distributed as dist
from dataclasses import dataclass
from axes import launch

@dataclass
class Point:
    rank: int
    x: object

def point(x):
    return Point(dist.get_rank(), x)

if __name__ == "__main__":
    found = launch(point, 2, Point(9, "argument"))
    assert all(isinstance(p, Point) and isinstance(p.x, Point) for p in found), found
    print(found)
"""
POINTS = ", ".join(f"Point(rank={rank}, x=Point(rank=9, x='argument'))" for rank in range(2))
BEHIND = SCRIPT.replace("    found = launch(point, 2", "    inner = lambda x: x\n    found = launch(inner, 2")
WITHOUT_GUARD = SCRIPT.replace('if __name__ == "__main__":', "if True:")
HIDDEN = "import sys; sys.modules['cloudpickle'] = None\n"

SCRIPTS = {
    "a script": (SCRIPT, ("script.py",), f"[{POINTS}]\n"),
    "a module": (SCRIPT, ("-m", "script"), f"[{POINTS}]\n"),
    "without a guard": (WITHOUT_GUARD, ("script.py",), 'put it under `if __name__ == "__main__":`'),
    "behind the guard": (BEHIND, ("script.py",), "can't be sent"),
    "of a session": (
        HIDDEN + SCRIPT,
        ("-c",),
        "point can't be sent to other processes: it is defined in an interactive session",
    ),
}
"""A program, how it is run, and what it prints or its error says."""


@pytest.mark.full
@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_script_defines_travels_where_other_processes_find_it(tmp_path: Path, name: str):
    code, arguments, said = SCRIPTS[name]
    (tmp_path / "script.py").write_text(code)
    out, err = run_python(*arguments, *([code] if arguments == ("-c",) else []), folder=tmp_path)
    assert out == said if out else re.search(f"AxesError: .*{re.escape(said)}", err, re.DOTALL), out + err
