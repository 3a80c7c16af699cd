"""Local ranks that wait for work: below `axes.launch` and the tests' process pool.

    with Pool(8) as pool:
        pool.run(torch.distributed.get_rank)          # [0, 1, 2, 3, 4, 5, 6, 7]

A pool is the launching process's side of a world whose ranks run one call after another, the same
call on every rank. `axes.runtime.agent` is the other side.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from axes.algebra.errors import AxesError
from axes.runtime.agent import GRACE, End, WorldSpec
from axes.runtime.forkserver import fork_server
from axes.runtime.transfer import Call, loads, main_of_this_process

T = TypeVar("T")

_PATIENCE = 4 * GRACE  # for the agent, which waits as long as `GRACE` three times
_STOPPED = 5.0  # a whole job that is suspended, and goes on, may have its agent stopped for a moment longer than us


class Pool:
    """`world_size` local processes with a running default process group.

    `timeout`: seconds to start in. Raises `AxesError` where they don't start; what is left of a
    failed start is ended. Use it as a context manager, or call `close`. `pids`: by rank.
    """

    def __init__(self, world_size: int, device_type: str = "cpu", timeout: float | None = None):
        deadline = _deadline(timeout)
        self.pids: list[int] = []
        self._agent: int | None = None
        self._server = fork_server()
        self._socket = self._server.fork()
        self._channel = Connection(os.dup(self._socket.fileno()))
        path = [os.path.abspath(folder) for folder in sys.path]
        start_method = multiprocessing.get_start_method(allow_none=True)
        main = main_of_this_process()
        world = WorldSpec(world_size, device_type, dict(os.environ), sys.argv, path, os.getcwd(), start_method, main)
        self._finish("starting", deadline, world)

    @property
    def alive(self) -> bool:
        """Whether it takes another call."""
        return not self._channel.closed

    def run(self, fn: Callable[..., T], *args: object, timeout: float | None = None) -> list[T]:
        """Run `fn(*args)` on every rank; the results by rank.

        Raises the exception of the rank that failed first, with notes on all ranks; `AxesError`
        where a process died, or where ranks hadn't finished after `timeout` seconds. The pool takes
        further calls unless a process died, or was still busy some time after the failure.
        """
        return self.run_call(Call.of(fn, args), timeout)

    def run_call(self, call: Call, timeout: float | None = None) -> list[Any]:
        """`run`, of a call made beforehand."""
        if not self.alive:
            raise AxesError("this pool has been closed, maybe for a call that failed: make another")
        ends = self._finish(call.name, _deadline(timeout), call.data)
        try:
            return [loads(end.value or b"") for end in ends]
        except Exception as error:
            raise AxesError(f"what {call.name} returned can't be rebuilt in the launching process: {error}") from error

    def close(self) -> None:
        """End the ranks, whatever they do, and wait for it. Idle ones end by themselves."""
        if not self.alive:
            return
        stopped = self._agent is not None and is_stopped(self._agent)
        deadline = time.monotonic() + (0 if stopped else _PATIENCE)
        with self._socket, self._channel, contextlib.suppress(EOFError, OSError):
            try:
                self._socket.shutdown(socket.SHUT_WR)  # though a fork of this process has a copy
                while self._agent and self._channel.poll(max(0, deadline - time.monotonic())):
                    self._channel.recv()  # until the end, at which all are gone
            finally:
                if self._agent:  # where it was killed or stopped
                    os.killpg(self._agent, signal.SIGKILL)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish(self, name: str, deadline: float, request: WorldSpec | bytes) -> list[End]:
        """How a request ended on all ranks; the error where it failed on one."""
        try:
            if self._agent is None:
                self._agent = self._receive(name, deadline)
            self._channel.send((request, deadline))
            if not self.pids:
                self.pids = self._receive(name, deadline + _PATIENCE)
            ends: list[End] = self._receive(name, deadline + _PATIENCE)
        except BaseException as error:  # an interrupt: nobody knows what the ranks are at
            self.close()
            if isinstance(error, EOFError | ConnectionError):
                raise AxesError(f"{name}: the process that started the ranks died (its output is above)") from error
            raise
        if any(end.lost for end in ends):
            self.close()
        if any(end.how != "finished" for end in ends):
            raise _error(ends, name)
        return ends

    def _receive(self, name: str, deadline: float) -> Any:
        went = time.monotonic()
        while not self._channel.poll(max(0, min(0.5, deadline - time.monotonic()))):
            if self._agent is None:
                self._server.check()
            elif not is_stopped(self._agent):
                went = time.monotonic()
            elif time.monotonic() - went > _STOPPED:
                raise AxesError(
                    f"{name}: the process that started the ranks, {self._agent}, which hosts their store, has been "
                    f"stopped for {_STOPPED:g} s; it and the ranks are ended"
                )
            if time.monotonic() > deadline:
                missing = "the fork server, which may still import torch," if self._agent is None else "the agent"
                pid = self._agent or self._server.pid
                raise AxesError(f"{name}: time is up, {missing} (process {pid}) hasn't answered")
        return self._channel.recv()


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, where the system tells (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # another system, or it has ended
        return False


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


def _error(ends: Sequence[End], name: str) -> Exception:
    """The first failure as an exception, with notes on all ranks; or that time is up.

    A rank that died comes before those that raised: its end is seen later than the errors that it gives them.
    """
    size = len(ends)
    first = min(range(size), key=lambda at: (ends[at].failed_at == math.inf, not ends[at].lost, ends[at].failed_at))
    end = ends[first]
    if end.failed_at == math.inf:
        late = [rank for rank in range(size) if ends[rank].lost]
        error: Exception = AxesError(f"{name}: time is up, {_ranks(late)} of {size} hadn't finished")
        first = -1
    elif end.lost:
        error = AxesError(f"{name}: rank {first} of {size} {end.how}")
    else:
        error = _exception(end)
        error.add_note(f"rank {first} of {size} failed first, in {name}:\n{end.traceback}")
    alike: dict[str, list[int]] = {}
    for rank in range(size):
        if rank != first:
            alike.setdefault(ends[rank].how, []).append(rank)
    if alike:
        error.add_note("\n".join(f"{_ranks(ranks)} {how}" for how, ranks in alike.items()))
    return error


def _exception(end: End) -> Exception:
    """The exception itself, else a `RuntimeError` in its place."""
    found = None
    with contextlib.suppress(Exception):  # a constructor that takes other arguments, a module that isn't here
        found = loads(end.value or b"")
    # SystemExit, KeyboardInterrupt: those would end this process, not the rank.
    return found if isinstance(found, Exception) else RuntimeError(end.how.removeprefix("failed: "))


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 3 and 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    listed = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}"
