"""Run a function on local ranks: a distributed program without a launcher.

    import axes, torch
    import torch.distributed as dist

    def total(start):
        x = torch.tensor(start + dist.get_rank())
        dist.all_reduce(x)
        return x.item()

    if __name__ == "__main__":
        print(axes.launch(total, 4, 10))          # [46, 46, 46, 46]

Each rank is a process of this machine with what `torchrun` would give it (`RANK`, `WORLD_SIZE`, ...) and with
`torch.distributed` already running; a function that calls `init_process_group` itself gets the world that it asks for
instead. Eight ranks start in a fraction of a second once the first launch has paid for importing torch: they are forked
from a process that is kept for that (`axes.launching.forked`).

The launching process is to the ranks what torchrun's agent is: it hosts the store by which they find each other, on a
port that the system picks and that is listened on before anyone hears of it. When one rank fails, the others have a
short grace: the first to fail is often not the most telling, and one that waits for it would wait for ever.

The ranks share this machine's hash seed, which those of a real job don't: iterating over a set of strings gives them
the same order here only.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import multiprocessing
import numbers
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from axes.algebra.errors import AxesError
from axes.launching.calls import End, packed, script

T = TypeVar("T")

MOST = 256
"""More local processes than this are a mistake."""

GRACE = 2.0
"""Seconds that the other ranks have to end by themselves when one has failed, or when told to end."""

_EARLIER = 1e9  # a rank's death comes before all errors: it is seen later than those that it causes
_STACK_SECONDS = 2.0  # that late ranks have to write where they are
_FRAMES = 12  # of the stack of a rank that hangs
_FORKED = f'"{Path(__file__).with_name("forked.py")}"'  # the frame below which there is only what every rank has
_FINDING = "looks for a function in the script"  # the name of a process that runs the script again


def launch(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    device_type: str = "cpu",
    timeout: float | None = None,
) -> list[T]:
    """Run a function on local processes, and return their results by rank.

    Each process has `torch.distributed` running, and the environment that torchrun sets. Like torchrun and
    `torch.multiprocessing.spawn`. No process is left, after an error or an interrupt either.

    Args:
        fn: A function at the top level of a module or script. With `cloudpickle` installed, any function.
        world_size: The number of processes, 1 to 256.
        *args: Its arguments, the same for every rank. They are pickled; tensors are sent by value.
        device_type: `"cpu"` (gloo), or `"cuda"` (rank i has GPU i; NCCL, and gloo for CPU tensors).
        timeout: Seconds for the whole call; None for no limit.

    Returns:
        The results, in the order of the ranks.

    Raises:
        AxesError: The call can't be launched; a rank was killed; or the time is up, with the ranks that hadn't
            finished and the lines where they were.
        Exception: The exception of the rank that failed first. Its notes have that rank's traceback, and how the
            other ranks ended.

    Examples:
        >>> launch(divmod, 2, 7, 2)
        [(3, 1), (3, 1)]
    """
    _check(fn, world_size, device_type, timeout)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    call = packed(name, fn, args)
    with _world(world_size) as (port, ranks):
        shared = _environ(world_size, port)
        for number, rank in enumerate(ranks):
            environ = shared | {"RANK": str(number), "LOCAL_RANK": str(number)}
            with contextlib.suppress(OSError):  # it has died, as will be seen
                rank.channel.send((device_type, environ, _surroundings(call)))
                rank.channel.send_bytes(call)
        ends = _gathered(ranks, deadline)
    if any(end.how != "finished" for end in ends):
        raise _error(ends, name)
    try:
        return [pickle.loads(end.value or b"") for end in ends]
    except Exception as error:
        raise AxesError(f"what {name} returned can't be rebuilt in the launching process: {error}") from error


def _check(fn: object, world_size: Any, device_type: object, timeout: Any) -> None:
    """Raise `AxesError` for what can't be launched."""
    if multiprocessing.current_process().name == _FINDING:
        raise AxesError(
            "this launch is in the part of the script that every rank runs again to find the "
            'function: put it under `if __name__ == "__main__":`'
        )
    is_number = isinstance(world_size, numbers.Integral) and not isinstance(world_size, bool)
    is_limit = isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 < timeout < math.inf
    for right, needed, found in (
        (hasattr(os, "fork"), "launch forks its processes, on Linux or macOS", sys.platform),
        (callable(fn), "launch needs a function to run on every rank", fn),
        (is_number, "the world size is a number of processes", world_size),
        (
            is_number and 1 <= world_size <= MOST,
            f"axes.simulate makes a world of any size in one; launch starts 1 to {MOST} processes on this machine",
            world_size,
        ),
        (timeout is None or is_limit, "the timeout is None or a positive number of seconds", timeout),
        (device_type in ("cpu", "cuda"), "launch knows the device types 'cpu' or 'cuda'", device_type),
    ):
        if not right:
            from axes.extension import shown

            raise AxesError(f"{needed}, not {shown(found)}")
    if device_type == "cuda":
        from torch.cuda import device_count

        if device_count() < world_size:
            raise AxesError(
                f"{world_size} ranks need a GPU each, and torch finds {device_count()} here: launch fewer, or with "
                'device_type="cpu"'
            )


def _environ(size: int, port: int) -> dict[str, str]:
    """The environment of all ranks: this process's, and what torchrun says."""
    local = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    defaults = {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": local} if local else {})
    told = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    # Rank 0 doesn't host the store, as it doesn't where torchrun's agent does.
    return defaults | os.environ | told | {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _surroundings(call: bytes) -> dict[str, Any]:
    """What ranks have of this process, for `multiprocessing.spawn.prepare`; its script too where the call needs it."""
    return {
        "name": _FINDING,
        "sys_path": [os.path.abspath(folder) for folder in sys.path],
        "sys_argv": sys.argv,
        "dir": os.getcwd(),
        "start_method": multiprocessing.get_start_method(allow_none=True),  # else the one by which they are started
        **(script() if b"main__" in call else {}),
    }


# ---------------------------------------------------------------------------- processes

_starting = threading.Lock()


@functools.lru_cache(maxsize=1)
def _server_of(pid: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The fork server of this process, by its id: a forked copy needs its own. It ends when the process does."""
    control, theirs = socket.socketpair()
    path = [os.path.abspath(folder) for folder in sys.path]
    # A fifth of the time of the imports would be looking for garbage.
    code = f"import gc, sys; gc.disable(); sys.path[:] = {path!a}; from axes.launching.forked import serve"
    # OpenMP and OpenBLAS make their threads when they are loaded: the server must have one
    # thread to fork safely. NVML answers "is there a GPU?" without initializing CUDA.
    environ = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", f"{code}; serve({theirs.fileno()}, {pid})"],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | environ,
            start_new_session=True,  # Ctrl-C in a terminal interrupts this process alone
        )
    return process, control


def _fork_server() -> socket.socket:
    """Where ranks are asked for; the server is started if there is none, and goes on if somebody has stopped it."""
    with _starting:
        if _server_of(os.getpid())[0].poll() is not None:
            _server_of.cache_clear()
        process, control = _server_of(os.getpid())
        process.send_signal(signal.SIGCONT)
        return control


class _Rank(NamedTuple):
    """A process that the fork server forks.

    `channel` leads to the rank itself: a call there, its end back; when it is closed, an idle rank ends. `handle` leads
    to the server: signals there, the exit code back; when it is closed, as at the end of this process, the rank is
    killed with all that it has started. `stack`: where the rank writes its stack at SIGUSR1, a file without a name.
    """

    channel: Connection
    handle: socket.socket
    stack: IO[bytes]

    @classmethod
    def fork(cls) -> _Rank:
        """Ask for a rank. Returns at once, maybe while the server still imports torch."""
        (channel, theirs), (handle, servers), stack = Pipe(), socket.socketpair(), tempfile.TemporaryFile()  # noqa: SIM115
        with theirs, servers, contextlib.suppress(ConnectionError):  # it is dead, as the handle's end will say
            socket.send_fds(_fork_server(), [b"f"], [theirs.fileno(), servers.fileno(), stack.fileno(), 1, 2])
        return cls(channel, handle, stack)

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        with contextlib.suppress(OSError):
            self.handle.send(bytes([number]))

    def frames(self) -> list[str]:
        """The stack that the rank has written by now, down to its beginning at last."""
        text = os.pread(self.stack.fileno(), 1 << 20, 0).decode(errors="replace")  # it shares the file's position
        return [frame for frame in text.splitlines() if frame.startswith("  File")]


@contextlib.contextmanager
def _world(size: int) -> Iterator[tuple[int, list[_Rank]]]:
    """The port of a store on this machine alone, and so many ranks.

    At the end none is left: idle ones end with their channels, the others by a signal. The store is closed then,
    whoever keeps an error that passes here.
    """
    print(end="", flush=True)  # what was printed before stands before theirs
    ranks: list[_Rank] = []
    try:
        ranks.extend(_Rank.fork() for _ in range(size))  # one by one: an interrupt finds those that there are
        from torch.distributed import TCPStore  # while the fork server imports it, too

        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        port, fd = listener.getsockname()[1], listener.detach()
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        yield port, ranks
    finally:
        store = None  # noqa: F841
        for rank in ranks:
            rank.channel.close()
        until = time.monotonic() + GRACE
        for rank in ranks:
            if not wait([rank.handle], max(0, until - time.monotonic())):
                rank.signal(signal.SIGKILL)
                wait([rank.handle], max(0, until + GRACE - time.monotonic()))
            rank.handle.close()
            rank.stack.close()


# ---------------------------------------------------------------------------- how it ended


def _gathered(ranks: Sequence[_Rank], deadline: float) -> list[End]:
    """How all end: until `deadline`, and for a grace after a failure. Who is late then is killed."""
    ends: dict[_Rank, End] = {}
    while late := [rank for rank in ranks if rank not in ends]:
        left = None if deadline == math.inf else max(0, deadline - time.monotonic())
        ready = wait([each for rank in late for each in (rank.channel, rank.handle)], left)
        if not ready:
            break
        for rank in late:
            if rank.channel in ready or rank.handle in ready:
                ends[rank] = _answer(rank)
                if ends[rank].failed_at < math.inf:
                    deadline = min(deadline, time.monotonic() + GRACE)
    for rank in late:
        rank.signal(signal.SIGUSR1)
    until = time.monotonic() + _STACK_SECONDS  # a rank that is stopped, or hasn't begun, writes none
    while time.monotonic() < until and not all(_FORKED in "".join(rank.frames()) for rank in late):
        time.sleep(0.02)
    for rank in late:
        rank.signal(signal.SIGKILL)
        frames = list(itertools.takewhile(lambda frame: _FORKED not in frame, rank.frames()))[:_FRAMES]
        ends[rank] = End("\n".join(["hadn't finished" + (", most recent call first:" if frames else ""), *frames]))
    return [ends[rank] for rank in ranks]


def _answer(rank: _Rank) -> End:
    with contextlib.suppress(EOFError, OSError):
        if rank.channel.poll():
            end: End = rank.channel.recv()
            return end
    code = rank.handle.recv(16).decode() if wait([rank.handle], GRACE) else ""
    known = {str(-number): f"was killed by {number.name}" for number in signal.Signals}
    known |= {"-9": "was killed by SIGKILL (out of memory?)"}
    known |= {"": "was lost with the fork server, which died (its output is above)"}
    return End(known.get(code, f"exited with code {code}"), failed_at=time.monotonic() - _EARLIER)


def _error(ends: Sequence[End], name: str) -> Exception:
    """The first failure as an exception, with notes on all ranks; or that time is up."""
    size = len(ends)
    first = min(range(size), key=lambda rank: ends[rank].failed_at)
    end = ends[first]
    found: Any = None
    if end.failed_at == math.inf:
        first = -1
        late = [rank for rank in range(size) if ends[rank].value is None]
        found = AxesError(f"{name}: time is up, {_numbers(late)} of {size} hadn't finished")
    elif not end.traceback:
        found = AxesError(f"{name}: rank {first} of {size} {end.how}")
    else:
        with contextlib.suppress(Exception):  # a constructor that takes other arguments, a module that isn't here
            found = pickle.loads(end.value or b"")
        # SystemExit, KeyboardInterrupt: those would end this process, not the rank.
        found = found if isinstance(found, Exception) else RuntimeError(end.how.removeprefix("failed: "))
        found.add_note(f"rank {first} of {size} failed first, in {name}:\n{end.traceback}")
    alike: dict[str, list[int]] = {}
    for rank in range(size):
        if rank != first:
            alike.setdefault(ends[rank].how, []).append(rank)
    if alike:
        found.add_note("\n".join(f"{_numbers(ranks)} {how}" for how, ranks in alike.items()))
    return found


def _numbers(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0..3, 5`."""
    runs = [list(run) for _, run in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    texts = [f"{run[0][1]}..{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(texts)}"
