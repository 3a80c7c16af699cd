"""Ranks that stay between tests: a world that `axes.launch` starts once, and that runs one call after another."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import axes
from axes import launch  # this one also where a test puts another in its place

T = TypeVar("T")

START, GRACE = 120.0, 5.0
"""Seconds for ranks to start, and for the others to end after one has failed."""

THREADS = 24
"""A rank has a thread for each of its groups over gloo, which wakes a hundred times a second: more of them slow all down."""

COLLECT = (10_000, 20, 20)
"""When garbage is looked for: drawing a case and tracing a graph make many objects, and few cycles."""


class Died(Exception):
    """A rank is gone."""


class StandingRanks:
    """A world of `size` local ranks that waits for calls. `pids`: their processes, by rank."""

    def __init__(self, size: int) -> None:
        self.size, key = size, os.urandom(16)
        self._world = threading.Thread(target=self._launch, args=(key,), daemon=True)
        self._failure: BaseException | None = None
        with Listener(family="AF_UNIX", backlog=size, authkey=key) as listener:
            self._address = listener.address
            listener._listener._socket.settimeout(START)  # type: ignore[attr-defined]
            self._world.start()
            connected = [listener.accept() for _ in range(size)]
        by_rank = sorted([(*connection.recv(), connection) for connection in connected], key=lambda each: each[0])
        self.pids: list[int] = [pid for _, pid, _ in by_rank]
        self._connections: list[Connection] = [connection for _, _, connection in by_rank]

    def _launch(self, key: bytes) -> None:
        try:
            launch(serve, self.size, self._address, key)
        except BaseException as error:
            self._failure = error

    @property
    def alive(self) -> bool:
        """Whether it takes another call. Its ranks end with the fork server, which a test may kill."""
        return bool(self._connections) and self._world.is_alive()

    def run(self, fn: Callable[..., T], *args: object, timeout: float) -> list[T]:
        """`fn(*args)` on every rank; the results by rank. Raises the exception of the rank that failed first."""
        __tracebackhide__ = True
        call = pickle.dumps((fn, args))
        for connection in self._connections:
            connection.send_bytes(call)
        ends: dict[int, tuple[bool, Any]] = {}
        failed: list[int] = []
        deadline = time.monotonic() + timeout
        while len(ends) < self.size:
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in ends}
            for connection in wait(list(waiting), max(0.0, deadline - time.monotonic())):
                rank = waiting[connection]  # type: ignore[index]
                try:
                    ends[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    ends[rank] = False, Died(f"rank {rank} of {self.size} died")
                if not ends[rank][0]:
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() >= deadline:
                break
        late = [rank for rank in range(self.size) if rank not in ends]
        if late:
            self.kill(late)
        if failed:
            error = ends[failed[0]][1]
            others = f"; ranks {late} waited for it" if late else ""
            error.add_note(f"rank {failed[0]} of {self.size} failed first, ranks {sorted(failed)} failed{others}")
            if any(isinstance(ends[rank][1], Died) for rank in failed):
                self.close()
                error.add_note(f"the launch says: {self._failure}")
            raise error
        if late:
            raise TimeoutError(
                f"{fn.__name__}: ranks {late} hadn't ended after {timeout:g} s (they are shown on stderr)"
            )
        return [ends[rank][1] for rank in range(self.size)]

    def kill(self, shown: list[int]) -> None:
        """Ends all ranks at once; those that are `shown` print where they are."""
        for rank in shown:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.3 if shown else 0)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Lets the ranks end, and waits for it."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        self._world.join(START)

    def rest(self, threads: int = THREADS) -> None:
        """Lets the ranks end their groups where one of them has so many threads; where that doesn't help, ends them."""
        if self.alive and most_threads(self.pids) >= threads:
            self.run(without_groups, timeout=START)
            for _ in range(40):  # a thread ends a moment after its group
                if most_threads(self.pids) < THREADS // 2:
                    return
                time.sleep(0.05)
            self.close()


def serve(address: str, key: bytes) -> None:
    """What each rank runs: calls, until the tests let it end."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    gc.set_threshold(*COLLECT)
    connection = Client(address, "AF_UNIX", key)
    connection.send((dist.get_rank(), os.getpid()))
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        connection.send_bytes(ended(call))


def ended(call: bytes) -> bytes:
    """How a call ended on this rank: whether it returned, and its result or its exception."""
    try:
        fn, args = pickle.loads(call)
        return pickle.dumps((True, fn(*args)))
    except BaseException as error:  # as torch's CheckpointException is one
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        text = "".join(traceback.format_tb(error.__traceback__)[1:])
        error.add_note(f"on rank {dist.get_rank()}:\n{text}")
        try:
            data = pickle.dumps((False, error))
            pickle.loads(data)
        except Exception:  # one whose constructor takes other arguments
            told = AssertionError(f"{type(error).__name__}: {error}")
            told.__notes__ = error.__notes__
            return pickle.dumps((False, told))
        return data


def without_groups() -> None:
    """Ends all groups, those that torch made too, and forgets what tests remember of them."""
    axes.destroy_process_groups()
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    for name in [name for name in sys.modules if name.startswith("tests.")]:
        for value in list(vars(sys.modules[name]).values()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
    gc.collect()
    gc.freeze()  # the next collection looks at what is made from now on


def most_threads(pids: list[int]) -> int:
    """How many threads the rank with most of them has, where the system says it."""
    folders = [Path(f"/proc/{pid}/task") for pid in pids]
    return max((len(list(folder.iterdir())) for folder in folders if folder.is_dir()), default=0)
