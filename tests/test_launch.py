"""`launch`: results by rank, errors that tell all, and nothing left behind however it ends."""

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
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from axes.algebra.errors import AxesError, DesyncError, ExpressionError
from axes.runtime.forkserver import ForkServer, fork_server
from axes.runtime.launch import launch

ROOT = Path(__file__).resolve().parent.parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After each test here: no rank, no descriptor, no temporary file."""
    launch(os.getpid, 1)  # the fork server itself stays
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before, others = descriptors(), set(children(server().pid))  # the pool's ranks, where there is one
    yield
    assert set(children(server().pid)) <= others
    assert descriptors() <= before  # fewer where the test let the pool go
    # Importing torch's compiler makes the folder of its cache, with or without us.
    assert [f for f in temporary.iterdir() if not f.name.startswith("torchinductor")] == []


def server() -> ForkServer:
    return fork_server()


def children(pid: int) -> list[int]:
    if sys.platform != "linux":
        return []
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def lives(pid: int) -> bool:
    """Whether a process runs; one that ended and wasn't waited for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end while its file is read
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 90) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def refuses(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


# ---------------------------------------------------------------------------- what ranks do


@dataclass(frozen=True)
class Seen:
    rank: int
    size: int
    backend: str
    threads: int
    environ: dict[str, str]


def look() -> Seen:
    return Seen(
        dist.get_rank(),
        dist.get_world_size(),
        dist.get_backend(),
        torch.get_num_threads(),
        dict(os.environ),
    )


def total(start: int) -> int:
    x = torch.tensor(start + dist.get_rank())
    dist.all_reduce(x)
    return int(x)


def fail_on(*ranks: int) -> None:
    if dist.get_rank() in ranks:
        raise ExpressionError(f"rank {dist.get_rank()} can't read this", "b s@tp d", 4, 6)


def fail_then_others_notice() -> None:
    dist.barrier()
    if dist.get_rank() == 2:
        raise ValueError("the first")
    time.sleep(0.5)
    raise DesyncError(f"rank {dist.get_rank()} misses rank 2")


def fail_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("before the barrier")
    wait_in_a_barrier()


def wait_in_a_barrier() -> None:
    dist.barrier()


def kill_myself(rank: int, number: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    dist.barrier()


def exit_quietly(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def exit_properly(code: int) -> None:
    sys.exit(code)


class Picky(Exception):
    """Pickles, and can't be rebuilt."""

    def __init__(self, code: int, *, reason: str):
        super().__init__(f"{code} because {reason}")


class Unsendable(Exception):
    """Holds what doesn't pickle."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def raise_picky() -> None:
    raise Picky(7, reason="of the moon")


def raise_unsendable() -> None:
    raise Unsendable


def write_down(pid: int, folder: Path) -> None:
    new = folder / f"{dist.get_rank()}.new"
    new.write_text(str(pid))
    new.rename(new.with_suffix(".pid"))  # so that nobody reads half of it


def written_down(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("*.pid")]


def sleep_on(rank: int, folder: Path) -> None:
    """Writes down its pid, then sleeps where `rank` is this one."""
    write_down(os.getpid(), folder)
    if dist.get_rank() == rank or rank < 0:
        time.sleep(600)


def wait_for_leave(folder: Path) -> int:
    write_down(os.getpid(), folder)
    assert wait_until((folder / f"{dist.get_rank()}.go").exists)
    return total(0)


def ignore_requests_to_end(folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_on(-1, folder)


def leave_a_child(folder: Path) -> None:
    child = subprocess.Popen(["sleep", "600"])
    write_down(child.pid, folder)


def big(elements: int) -> torch.Tensor:
    return torch.full((elements,), float(dist.get_rank()))


def same(x: torch.Tensor) -> float:
    return float(x.sum())


def lock_on(rank: int) -> object:
    return threading.Lock() if dist.get_rank() == rank else None


class Grenade:
    """A result that pickles, and whose rebuilding fails."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return int, ("not a number",)


def grenade() -> Grenade:
    return Grenade()


def leave_early() -> float:
    """Rank 0 is done at once; the others go on talking, through the store too."""
    if dist.get_rank() == 0:
        return 0.0
    time.sleep(0.3)
    group = dist.new_group([1, 2], use_local_synchronization=True)
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    return float(x)


def begin_again() -> int:
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    return total(0)


def begin_as_under_torchrun(method: str | None) -> tuple[int, bool]:
    with pytest.MonkeyPatch.context() as patch:
        if method == "tcp://":  # rank 0 hosts the store on a port that it has found
            patch.delenv("TORCHELASTIC_USE_AGENT_STORE")
            found = [free_port()]
            dist.broadcast_object_list(found)
            method = f"tcp://127.0.0.1:{found[0]}"
        given = {} if method is None else {"init_method": method, "rank": dist.get_rank(), "world_size": 3}
        dist.init_process_group("gloo", **given)
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("gloo")
    found = total(0)
    meet("done")
    dist.destroy_process_group()
    return found, dist.is_initialized()


def begin_many_times(times: int) -> list[int]:
    found = []
    for start in range(times):
        dist.init_process_group("gloo")
        found.append(total(start))
        meet(f"start {start}")
        dist.destroy_process_group()
    return found


def meet(key: str) -> None:
    """Wait for all ranks: gloo resets the connections of those that are still reading."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.add(key, 1)
    assert wait_until(lambda: store.add(key, 0) == int(os.environ["WORLD_SIZE"]))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def start_a_process(method: str) -> tuple[str | None, int | None]:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=before is not None)
    process = multiprocessing.Process(target=sys.exit, args=(5,))
    process.start()
    process.join()
    return before, process.exitcode


def hang_in_c(folder: Path) -> None:
    """Never gives the interpreter back: no handler and no other thread of this process runs."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"{dist.get_rank()}.port").write_text(os.environ["MASTER_PORT"])
    write_down(os.getpid(), folder)
    re.match("(a+)+$", "a" * 60 + "b")


def launch_inside() -> list[int]:
    return launch(total, 2, dist.get_rank())


def dtensor_mean() -> float:
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return float(distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).mean().full_tensor())


def speak() -> None:
    print(f"rank {dist.get_rank()} speaks")
    print("to all", file=sys.stderr)


def where() -> tuple[str, list[str], str, str | None]:
    return os.getcwd(), sys.argv, tempfile.gettempdir(), os.environ.get("AXES_TEST")


def draw() -> tuple[float, float]:
    import numpy

    return float(torch.rand(())), float(numpy.random.rand())  # noqa: NPY002


def port() -> int:
    return int(os.environ["MASTER_PORT"])


def port_then_fail(folder: Path) -> None:
    (folder / "port").write_text(os.environ["MASTER_PORT"])
    raise ValueError("with a port")


# ---------------------------------------------------------------------------- running


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_results_come_by_rank(world_size: int):
    assert launch(dist.get_rank, world_size) == list(range(world_size))
    whole = sum(range(world_size)) + 10 * world_size
    assert launch(total, world_size, 10) == [whole] * world_size


def test_a_rank_has_a_running_world_and_what_torchrun_would_give_it():
    for rank, seen in enumerate(launch(look, 3)):
        assert (seen.rank, seen.size, seen.backend, seen.threads) == (rank, 3, "gloo", 1)
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3"}
        expected |= {"LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        assert expected.items() <= seen.environ.items()


def test_the_users_number_of_threads_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert [seen.threads for seen in launch(look, 2)] == [2, 2]


def test_a_rank_sees_the_launching_process_as_it_is_now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AXES_TEST", "now")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["me", "--fast"])
    assert launch(where, 1) == [(str(tmp_path), ["me", "--fast"], str(tmp_path), "now")]
    monkeypatch.delenv("AXES_TEST")
    assert launch(where, 1)[0][-1] is None


def test_output_goes_where_the_launching_process_writes(capfd: pytest.CaptureFixture[str]):
    launch(speak, 2)
    written = capfd.readouterr()
    assert sorted(written.out.splitlines()) == ["rank 0 speaks", "rank 1 speaks"]
    assert written.err == "to all\n" * 2


def test_dtensors_work():
    assert launch(dtensor_mean, 4) == [3.5] * 4


def test_numpy_draws_other_numbers_on_each_rank_and_torch_the_same():
    drawn = launch(draw, 3)
    assert len({torchs for torchs, _ in drawn}) == 1
    assert len({numpys for _, numpys in drawn}) == 3


def test_a_rank_that_is_done_first_harms_nobody():
    assert launch(leave_early, 3) == [0.0, 2.0, 2.0]


def test_the_function_may_start_the_world_again_from_the_environment():
    assert launch(begin_again, 3) == [3] * 3


@pytest.mark.parametrize("method", [None, "env://", "tcp://"])
def test_the_function_may_start_a_world_itself_as_under_torchrun(method: str | None):
    assert launch(begin_as_under_torchrun, 3, method) == [(3, False)] * 3


def test_the_function_may_start_and_end_worlds():
    assert launch(begin_many_times, 3, 3) == [[3, 6, 9]] * 3


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_rank_may_start_processes_by_any_method(method: str):
    assert launch(start_a_process, 1, method) == [(multiprocessing.get_start_method(allow_none=True), 5)]


def test_the_start_method_and_the_fork_server_of_multiprocessing_stay_the_programs(tmp_path: Path):
    code = """
        import multiprocessing, sys
        from axes.runtime.launch import launch
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


def test_a_rank_may_launch_ranks():
    assert launch(launch_inside, 1) == [[1, 1]]


def test_two_threads_may_launch_at_once():
    results: dict[int, list[int]] = {}

    def run(start: int) -> None:
        results[start] = launch(total, 3, start)

    threads = [threading.Thread(target=run, args=(start,)) for start in (0, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [3] * 3, 10: [33] * 3}


def test_a_partial_and_a_method_can_be_launched():
    assert launch(functools.partial(total, 1), 2) == [3, 3]
    assert launch("a-{}".format, 2, 5) == ["a-5", "a-5"]


def test_large_tensors_go_both_ways_by_value():
    elements = 100_000_000 // 4
    results = launch(big, 2, elements)
    assert [float(x[-1]) for x in results] == [0.0, 1.0]
    assert [x.numel() for x in results] == [elements] * 2
    assert launch(same, 2, torch.ones(5_000_000)) == [5_000_000.0] * 2


def test_importing_it_imports_no_torch():
    code = "import sys, axes.runtime.launch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---------------------------------------------------------------------------- failing


def test_the_exception_of_the_failing_rank_is_raised_with_its_traceback():
    with pytest.raises(ExpressionError, match="rank 1 can't read this") as caught:
        launch(fail_on, 3, 1)
    assert (caught.value.start, caught.value.stop) == (4, 6)
    told = notes(caught.value)
    assert "rank 1 of 3 failed first, in fail_on:" in told
    assert f'File "{__file__}"' in told
    assert "raise ExpressionError(f" in told
    assert "ranks 0 and 2 finished" in told
    assert "pool.py" not in told


def test_the_first_failure_is_raised_and_the_others_are_told():
    with pytest.raises(ValueError, match="the first") as caught:
        launch(fail_then_others_notice, 4)
    for rank in (0, 1, 3):
        assert f"rank {rank} failed: axes.algebra.errors.DesyncError: rank {rank} misses rank 2" in (
            notes(caught.value)
        )


def test_ranks_that_wait_for_the_failed_one_are_ended_soon_and_shown_where_they_were():
    began = time.monotonic()
    with pytest.raises(ValueError, match="before the barrier") as caught:
        launch(fail_while_others_wait, 3)
    assert time.monotonic() - began < 20  # the barrier alone would wait for half an hour
    told = notes(caught.value)
    assert "hadn't finished, most recent call first" in told
    assert "in wait_in_a_barrier" in told


@pytest.mark.parametrize(
    ("function", "message"),
    [(raise_picky, "7 because of the moon"), (raise_unsendable, "holds a lock")],
)
def test_an_exception_that_does_not_travel_becomes_a_runtime_error_with_all_of_it(
    function: Callable[[], None], message: str
):
    with pytest.raises(RuntimeError, match=message) as caught:
        launch(function, 2)
    assert f"in {function.__name__}" in notes(caught.value)


def test_a_rank_that_is_killed_is_named_with_its_signal():
    with pytest.raises(AxesError, match=r"kill_myself: rank 2 of 4 was killed by SIGKILL"):
        launch(kill_myself, 4, 2, signal.SIGKILL)
    with pytest.raises(AxesError, match=r"rank 0 of 2 was killed by SIGSEGV"):
        launch(kill_myself, 2, 0, signal.SIGSEGV)


def test_a_rank_that_leaves_is_named_with_its_code():
    with pytest.raises(AxesError, match="rank 1 of 3 exited with code 3"):
        launch(exit_quietly, 3, 1, 3)
    with pytest.raises(AxesError, match="rank 1 of 3 exited with code 0"):
        launch(exit_quietly, 3, 1, 0)
    with pytest.raises(RuntimeError, match="SystemExit: 0"):
        launch(exit_properly, 2, 0)


def test_when_time_is_up_the_late_ranks_are_named_and_shown_where_they_were(tmp_path: Path):
    began = time.monotonic()
    with pytest.raises(AxesError, match="sleep_on: time is up, rank 2 of 4 hadn't") as caught:
        launch(sleep_on, 4, 2, tmp_path, timeout=4)
    assert 4 <= time.monotonic() - began < 20
    assert "ranks 0 to 1 and 3 finished" in notes(caught.value)
    assert "in sleep_on" in notes(caught.value)


def test_ranks_that_ignore_requests_to_end_are_ended(tmp_path: Path):
    with pytest.raises(AxesError, match="ranks 0 to 1 of 2 hadn't finished"):
        launch(ignore_requests_to_end, 2, tmp_path, timeout=3)
    assert [lives(pid) for pid in written_down(tmp_path)] == [False, False]


@linux
def test_what_a_rank_starts_ends_with_it(tmp_path: Path):
    launch(leave_a_child, 2, tmp_path)
    pids = written_down(tmp_path)
    assert len(pids) == 2
    assert wait_until(lambda: not any(lives(pid) for pid in pids))


def test_the_port_is_closed_afterwards_even_while_the_error_is_kept(tmp_path: Path):
    assert refuses(launch(port, 2)[0])
    with pytest.raises(ValueError, match="with a port") as caught:
        launch(port_then_fail, 2, tmp_path)
    assert refuses(int((tmp_path / "port").read_text()))
    assert caught.value.__traceback__ is not None


def test_a_result_that_cannot_be_sent_names_the_rank():
    with pytest.raises(AxesError, match=r"what rank 1 returned, a lock, can't be sent back"):
        launch(lock_on, 3, 1)


def test_a_result_that_cannot_be_rebuilt_is_an_error():
    with pytest.raises(AxesError, match=r"can't be rebuilt in the launching process: invalid lit"):
        launch(grenade, 2)


# ---------------------------------------------------------------------------- interrupted


def test_an_interrupt_ends_the_ranks(tmp_path: Path):
    def interrupt() -> None:
        wait_until(lambda: len(written_down(tmp_path)) == 3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch(sleep_on, 3, -1, tmp_path)
    thread.join()
    assert [lives(pid) for pid in written_down(tmp_path)] == [False] * 3


@linux
def test_an_interrupt_while_torch_is_imported_ends_at_once_and_leaves_nothing():
    code = """
        import os, signal, threading, time
        from tests.test_launch import children, launch, server, total, wait_until
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            launch(total, 3, 0)
        except KeyboardInterrupt:
            print(len(children(server().pid)), launch(total, 2, 0), children(server().pid))
    """
    out, err = run_python("-c", textwrap.dedent(code))
    assert out == "0 [1, 1] []\n", err


@linux
def test_when_the_launching_process_is_killed_its_ranks_end_too(tmp_path: Path):
    code = f"""
        from pathlib import Path
        from tests.test_launch import launch, sleep_on
        launch(sleep_on, 2, -1, Path({str(tmp_path)!r}))
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT)
    try:
        assert wait_until(lambda: len(written_down(tmp_path)) == 2)
        descendants = written_down(tmp_path)
        descendants += children(parent.pid)  # the fork server
        assert len(descendants) == 3
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: not any(lives(pid) for pid in descendants))


@linux
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
        assert wait_until(lambda: len(written_down(pids)) == 2)
        descendants = written_down(pids)
        for pid in (parent.pid, *children(parent.pid)):
            descendants += children(pid)  # the fork server, the agent
        assert len(descendants) == 4
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: not any(lives(pid) for pid in descendants))
    # A process whose first thread has ended holds its sockets until the others have.
    assert wait_until(lambda: refuses(int((pids / "0.port").read_text())))
    assert [f for f in temporary.iterdir() if not f.name.startswith("torchinductor")] == []


@linux
def test_when_the_fork_server_is_killed_what_it_started_goes_on_and_the_next_launch_works(tmp_path: Path):
    before = server().pid

    def kill() -> None:
        wait_until(lambda: len(written_down(tmp_path)) == 2)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: not lives(before))
        for rank in range(2):
            (tmp_path / f"{rank}.go").touch()

    thread = threading.Thread(target=kill)
    thread.start()
    assert launch(wait_for_leave, 2, tmp_path) == [1, 1]
    thread.join()
    assert wait_until(lambda: not any(lives(pid) for pid in written_down(tmp_path)))
    assert launch(total, 2, 0) == [1, 1]
    assert server().pid != before


def test_what_is_left_of_a_program_that_is_killed_says_nothing(tmp_path: Path):
    """Python's end would, where bindings count what is left: triton's do, which torch 2.15 imports."""
    (tmp_path / "script.py").write_text(
        "import os, signal\n"
        "from axes.runtime.launch import launch\n"
        'if __name__ == "__main__":\n'
        "    print(len(launch(os.getpid, 2)), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run_python("script.py", folder=tmp_path) == ("2\n", "")


@linux
def test_when_the_agent_is_killed_the_ranks_end_and_the_next_launch_works(tmp_path: Path):
    others = children(server().pid)

    def kill() -> None:
        wait_until(lambda: len(written_down(tmp_path)) == 2)
        for agent in set(children(server().pid)) - set(others):
            os.kill(agent, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(AxesError, match="sleep_on: the process that started the ranks died"):
        launch(sleep_on, 2, -1, tmp_path)
    thread.join()
    assert wait_until(lambda: not any(lives(pid) for pid in written_down(tmp_path)))
    assert launch(total, 2, 0) == [1, 1]


@linux
def test_a_fork_server_that_is_stopped_is_named_and_not_waited_for():
    pid, others = server().pid, children(server().pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(2):
            with pytest.raises(AxesError, match=f"process {pid}, is stopped: .* `kill -CONT {pid}`"):
                launch(total, 2, 0)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert launch(total, 2, 0) == [1, 1]
    assert wait_until(lambda: set(children(pid)) <= set(others))  # what was asked for when it was stopped


def test_a_fork_server_that_is_late_is_named():
    code = """
        from tests.test_launch import AxesError, launch, server, total
        try:
            launch(total, 2, 0, timeout=0.01)
        except AxesError as error:
            print(str(error).replace(str(server().pid), "..."), launch(total, 2, 0))
    """
    out, err = run_python("-c", textwrap.dedent(code))
    told = "starting: time is up, the fork server, which may still import torch, (process ...) hasn't answered"
    assert out == f"{told} [1, 1]\n", err


# ---------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((total, 0), {}, "1 to 256 processes on this machine, not 0"),
        ((total, -1), {}, "not -1"),
        ((total, 10**9), {}, "axes.simulate makes a world of any size"),
        ((total, 2.0), {}, "a number of processes, not 2.0"),
        ((total, True), {}, "a number of processes, not True"),
        ((total, None), {}, "a number of processes, not None"),
        (("total", 2), {}, "a function to run on every rank, not 'total'"),
        ((total, 2), {"device_type": "tpu"}, "device types 'cpu' or 'cuda', not 'tpu'"),
        ((total, 2), {"device_type": None}, "not None"),
        ((total, 99), {"device_type": "cuda"}, r"99 ranks need a GPU each, and torch finds \d+"),
        ((total, 2), {"timeout": 0}, "positive number of seconds, or None; not 0"),
        ((total, 2), {"timeout": float("nan")}, "not nan"),
        ((total, 2), {"timeout": "5"}, "not '5'"),
        ((total, 2), {"timeout": True}, "not True"),
        ((lambda: 0, 2), {}, r"<lambda> can't be sent .* Define it with `def` at the top level"),
        ((total, 2, threading.Lock()), {}, "argument 0 of total, a lock, can't be sent"),
        ((total, 2, 1, lambda: 0), {}, "argument 1 of total, a function, can't be sent"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_any_process_starts(
    arguments: tuple[object, ...],
    options: dict[str, object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(ForkServer, "fork", lambda self: pytest.fail("a process was started"))
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(AxesError, match=message):
        launch(*arguments, **options)  # type: ignore[arg-type]


def test_a_function_inside_a_function_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    def local() -> None: ...

    with pytest.raises(AxesError, match=r"<locals>.local can't be sent .* not inside another .*or install cloudpickle"):
        launch(local, 2)


def test_with_cloudpickle_lambdas_and_inner_functions_travel_and_what_they_return():
    pytest.importorskip("cloudpickle", reason="cloudpickle is optional, and isn't installed here")

    @dataclass
    class Local:
        rank: int

    assert launch(lambda start: total(start), 2, 10) == [21, 21]
    found = launch(lambda: (Local(dist.get_rank()), lambda: Local(7)), 2)
    assert [local for local, _ in found] == [Local(0), Local(1)]
    assert found[0][1]() == Local(7)
    with pytest.raises(AxesError, match=r"argument 0 of .*, a lock, can't be sent"):
        launch(lambda lock: lock, 2, threading.Lock())
    with pytest.raises(AxesError, match="what rank 1 returned, a lock, can't be sent back"):
        launch(lambda: lock_on(1), 2)


# ---------------------------------------------------------------------------- scripts

SCRIPT = """
from dataclasses import dataclass

import torch.distributed as dist
from axes.runtime.launch import launch

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


def run_python(*arguments: str, text: str = "", folder: Path = ROOT) -> tuple[str, str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, input=text, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


@pytest.mark.parametrize("how", ["path", "module"])
def test_functions_and_classes_of_a_script_work(tmp_path: Path, how: str):
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = ("script.py",) if how == "path" else ("-m", "script")
    out, err = run_python(*arguments, folder=tmp_path)
    argument = "x=Point(rank=9, x='argument')"
    assert out == f"[Point(rank=0, {argument}), Point(rank=1, {argument})]\n", err


def test_a_script_without_its_guard_gets_told(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    _, err = run_python("script.py", folder=tmp_path)
    assert "AxesError: this launch is in the part of the script that every rank runs again" in err
    assert 'put it under `if __name__ == "__main__":`' in err


def test_a_function_behind_the_guard_gets_told(tmp_path: Path):
    (tmp_path / "script.py").write_text(
        "from axes.runtime.launch import launch\n"
        'if __name__ == "__main__":\n'
        "    def inner(): ...\n"
        "    launch(inner, 2)\n"
    )
    _, err = run_python("script.py", folder=tmp_path)
    assert "AxesError: inner isn't there when another process runs the script" in err


INTERACTIVE = """
import sys
{hidden}
from dataclasses import dataclass
from axes.runtime.launch import launch

@dataclass
class Point:
    x: int

def f(): return Point(1)

print(launch(f, 2) == [Point(1)] * 2)
"""


@pytest.mark.parametrize("arguments", [(), ("-c",)])
def test_a_function_of_an_interactive_session_gets_told(arguments: tuple[str, ...]):
    code = INTERACTIVE.format(hidden="sys.modules['cloudpickle'] = None")
    _, err = run_python(*arguments, *([code] if arguments else []), text=code)
    assert "AxesError: f is defined in an interactive session" in err
    assert "or install cloudpickle" in err


@pytest.mark.parametrize("arguments", [(), ("-c",)])
def test_with_cloudpickle_a_function_of_an_interactive_session_travels(arguments: tuple[str, ...]):
    pytest.importorskip("cloudpickle", reason="cloudpickle is optional, and isn't installed here")
    code = INTERACTIVE.format(hidden="")
    out, err = run_python(*arguments, *([code] if arguments else []), text=code)
    assert out == "True\n", err
