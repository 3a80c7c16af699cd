"""Ranks of two jobs, as tests of `axes.connect` drive them: real processes that do what they are told, one by one.

Each rank belongs to a job with a `torch.distributed` of its own. It is told to connect and to transfer, with a fault
at a point of the way, and answers with what came of it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import axes

_ = axes.init_mesh, axes.connect, axes.from_local  # imported now: what is forked from this process has them

LIMIT = 6.0
"""Seconds that the ranks of a link wait for one another."""

MESHES = {"trainer": "fsdp=2", "generator": "dp=1 tp=2", "other": "dp=1 tp=2"}
SPECS = {
    "trainer": {"a": "f@fsdp d", "b": "d@fsdp", "c": "f d"},
    "generator": {"a": "f d@tp", "b": "d", "c": "f@tp d"},
}
SPECS["other"] = SPECS["generator"]
SHAPES = {"a": (6, 8), "b": (7,), "c": (64, 64)}

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["tests.job_program"])


BACKEND = next(kind for kind in dist.ProcessGroupGloo.__mro__ if "send" in vars(kind))
"""What a link sends by."""


def values(name: str, turn: int) -> torch.Tensor:
    """The whole tensor of a round."""
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1000 * turn


@contextmanager
def fault(kind: str, point: str | int) -> Iterator[None]:
    """A fault of this rank, once: at a call of the store, counted from 0, or at the first "bytes" that it sends or gets."""
    left = [0 if point == "bytes" else int(point)]

    def before(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                time.sleep(LIMIT + 4) if kind == "late" else os.kill(os.getpid(), getattr(signal, kind))
            return real(*args)

        return call

    patched = [(BACKEND, "send"), (BACKEND, "recv")] if point == "bytes" else [(dist.Store, "compare_set")]
    reals = [getattr(*each) for each in patched]
    try:
        for (owner, name), real in zip(patched, reals, strict=True):
            setattr(owner, name, before(real))
        yield
    finally:
        for (owner, name), real in zip(patched, reals, strict=True):
            setattr(owner, name, real)


class JobRank:
    """One rank of a job, and what it is told to do."""

    def __init__(self, name: str, rank: int, folder: str, port: int, size: int = 2):
        self.name, self.rank = name, rank
        own = dist.FileStore(folder, size)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=30))
        self.mesh = axes.init_mesh(MESHES[name], timeout=30)
        self.store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30))
        self.link: Any = None
        self.memory: dict[str, tuple[bool, bool]] = {}

    def connect(self, peers: tuple[str, ...] = ("trainer", "generator")) -> str:
        self.link = axes.connect(self.store, self.name, self.mesh, peers, LIMIT)
        return repr(self.link)

    def close(self) -> list[str]:
        self.link.close()
        return self.keys()

    def keys(self) -> list[str]:
        return sorted(self.store.list_keys())

    def transfer(
        self,
        turn: int,
        back: bool = False,
        other: str = "",
        only: str = "",
        without: str = "",
        specs: dict[str, str] | None = None,
        said: dict[str, str] | None = None,
        shapes: dict[str, tuple[int, ...]] | None = None,
        dtypes: dict[str, str] | None = None,
    ) -> None:
        """A transfer with a round's values, checked where it arrives; what isn't given is as it should be."""
        sends, other = (self.name == "trainer") != back, other or ("generator" if self.name == "trainer" else "trainer")
        lies = {name: spec for name, spec in {**SPECS[self.name], **(specs or {})}.items() if name in (only or name)}
        old = {name: values(name, turn if sends else -1) for name in lies if name in SHAPES}
        old |= {name: torch.zeros(shape) for name, shape in (shapes or {}).items()}
        old |= {name: old[name].to(getattr(torch, dtype)) for name, dtype in (dtypes or {}).items()}
        tensors = {name: axes.shard(x, lies[name], mesh=self.mesh) for name, x in old.items() if name != without}
        try:
            with torch.no_grad():
                if sends:
                    self.link.send(tensors, {**lies, **(said or {})}, to=other)
                else:
                    self.link.receive(into=tensors, specs={**lies, **(said or {})}, source=other)
        finally:
            for name, x in {} if sends or shapes or dtypes else tensors.items():
                both = [axes.shard(values(name, at), lies[name], mesh=self.mesh).to_local() for at in (turn, -1)]
                self.memory[name] = torch.equal(x.to_local(), both[0]), torch.equal(x.to_local(), both[1])


def serve(pipe: Connection, name: str, rank: int, folder: str, port: int) -> None:
    """Do what comes through the pipe, and answer, until it is closed."""
    torch.set_num_threads(1)
    job = JobRank(name, rank, folder, port)
    pipe.send(("ready", "", 0.0, {}))
    while True:
        try:
            what, given = pipe.recv()
        except EOFError:
            return
        began, job.memory, at = time.monotonic(), {}, given.pop("fault", None)
        try:
            with fault(*at) if at else torch.no_grad():
                found = ("ok", getattr(job, what)(**given))
        except axes.AxesError as error:
            found = (type(error).__name__, str(error))
        pipe.send((*found, time.monotonic() - began, job.memory))


def host(pipe: Connection) -> None:
    """Host the store of a link."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()
