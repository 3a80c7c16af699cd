"""Ranks of two jobs, as tests of `axes.connect` drive them: real processes that do what they are told, one by one.

Each rank belongs to a job with a `torch.distributed` of its own. It is told to connect and to transfer, with a fault
at a point of the way, and answers with what came of it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import axes
from axes.runtime import jobs, rendezvous, transfer_runs

_ = axes.init_mesh, axes.connect, axes.from_local  # imported now: what is forked from this process has them

LIMIT = 4.0
"""Seconds that ranks wait for one that has a fault, and for bytes."""

CALM = 30.0
"""Seconds that ranks wait for one another where none has a fault: on a busy machine any of them may be late."""

MESHES = {"trainer": "fsdp=2", "generator": "dp=1 tp=2", "other": "dp=1 tp=2"}
SPECS = {
    "trainer": {"a": "f@fsdp d", "b": "d@fsdp", "c": "f d"},
    "generator": {"a": "f d@tp", "b": "d", "c": "f@tp d"},
}
SPECS["other"] = SPECS["generator"]
SHAPES = {"a": (6, 8), "b": (7,), "c": (64, 64)}

PHASES = {
    "join": (rendezvous.Rendezvous, "join"),
    "own ranks": (jobs.JobLink, "_described"),
    "meet": (rendezvous.Rendezvous, "meet"),
    "texts": (jobs.JobLink, "_text_of_other"),
    "fingerprint": (rendezvous.Rendezvous, "begin"),
    "connect": (jobs.JobLink, "_connected"),
    "bytes": (transfer_runs.TransferRun, "_arrived"),
    "end": (rendezvous.Rendezvous, "end"),
}
"""Where a fault can happen: just before the rank calls this."""

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["tests.job_program"])


def values(name: str, turn: int) -> torch.Tensor:
    """The whole tensor of a round."""
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1000 * turn


def faulty(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real` with a fault at its first call: a rank that goes on is not hit again by what it calls for each bucket."""
    happened = []

    def call(*args: Any, **keywords: Any) -> Any:
        if not happened:
            happened.append(kind)
            if kind == "late":
                time.sleep(LIMIT + 4)
            elif kind.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, kind))
        return real(*args, **keywords)

    return call


class JobRank:
    """One rank of a job, and what it is told to do."""

    def __init__(self, name: str, rank: int, folder: str, port: int, size: int = 2):
        self.name, self.rank = name, rank
        own = dist.FileStore(folder, size)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=CALM))
        self.mesh = axes.init_mesh(MESHES[name], timeout=CALM)
        self.store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30))
        self.link: Any = None
        jobs.BUCKET_MB = 1e-3

    def do(self, what: str, fault: tuple[str, str] | None = None, limit: float = CALM, **given: Any) -> Any:
        """Do it with a fault on the way: `(phase, kind)`. limit: seconds to wait for ranks that don't come."""
        if self.link is not None:
            self.link.meeting.timeout = timedelta(seconds=limit)
        place = None if fault is None else PHASES[fault[0]]
        if place is None or fault is None:
            return getattr(self, what)(**given)
        real = getattr(*place)
        setattr(*place, faulty(fault[1], real))
        try:
            return getattr(self, what)(**given)
        finally:
            setattr(*place, real)

    def connect(self, peers: tuple[str, ...] = ("trainer", "generator")) -> str:
        self.link = axes.connect(self.store, self.name, self.mesh, peers, LIMIT)
        return repr(self.link)

    def trace(self, path: str) -> None:
        """Record what is sent in a file, until the path is ''."""
        axes.debug(trace=path)

    def close(self) -> int:
        self.link.close()
        return int(self.store.num_keys())

    def keys(self) -> list[str]:
        return sorted(self.store.list_keys())

    def transfer(
        self,
        turn: int,
        back: bool = False,
        other: str = "",
        specs: dict[str, str] | None = None,
        said: dict[str, str] | None = None,
        shapes: dict[str, tuple[int, ...]] | None = None,
        dtypes: dict[str, str] | None = None,
        version: str = "",
        bucket: float = 0,
        plain: bool = False,
        only: str = "",
    ) -> dict[str, Any]:
        """A transfer with a round's values, checked where it arrives; what isn't given is as it should be."""
        sends = (self.name == "trainer") != back
        other = other or ("generator" if self.name == "trainer" else "trainer")
        lies = {**SPECS[self.name], **(specs or {})}
        lies = {name: spec for name, spec in lies.items() if name in (only or lies)}
        old = {name: values(name, turn if sends else -1) for name in lies if name in SHAPES}
        for name, shape in (shapes or {}).items():
            old[name] = torch.zeros(shape)
        for name, dtype in (dtypes or {}).items():
            old[name] = old[name].to(getattr(torch, dtype))
        tensors: dict[str, Any] = {name: axes.shard(x, lies[name], mesh=self.mesh) for name, x in old.items()}
        if plain:
            tensors = {name: axes.to_local(x) for name, x in tensors.items()}
        jobs._version.cache_clear()
        real = jobs.importlib.metadata.version
        try:
            if version:
                jobs.importlib.metadata.version = lambda _: version
            if bucket:
                jobs.BUCKET_MB = bucket
            with torch.no_grad():
                if sends:
                    self.link.send(tensors, {**lies, **(said or {})}, to=other)
                else:
                    self.link.receive(into=tensors, specs={**lies, **(said or {})}, source=other)
            state = "whole"
        except axes.AxesError as error:
            state = str(error)
            raise
        finally:
            jobs.importlib.metadata.version = real
            jobs._version.cache_clear()
            jobs.BUCKET_MB = 1e-3
            if not sends and not shapes and not dtypes:
                self.arrived = {n: self._is(x, n, turn, lies[n]) for n, x in tensors.items()}
                self.kept = {n: self._is(x, n, -1, lies[n]) for n, x in tensors.items()}
        return {"state": state, "arrived": dict(getattr(self, "arrived", {}))}

    def pages(self, turn: int, pools: dict[str, Any], sent: Any, written: Any) -> dict[str, Any]:
        """Pages of a cache of a round, sent by the trainer, and what the generator's cache is then, whole."""
        specs = {
            "trainer": {"k": "page@fsdp d h", "v": "page d h@fsdp"},
            "generator": {"k": "page d@tp h", "v": "page@tp d h"},
        }
        pool, sends = pools[self.name], self.name == "trainer"
        lies, cache = specs[self.name], {}
        for name, spec in lies.items():
            shape = (pool if isinstance(pool, int) else pool[name]), 2, 4
            numbers = torch.arange(float(torch.Size(shape).numel())).view(shape)
            whole = numbers + 1000 * turn if sends else torch.full(shape, -1.0)
            cache[name] = axes.shard(whole, spec, mesh=self.mesh)
        if sends:
            self.link.send(cache, lies, pages=sent)
        else:
            self.link.receive(cache, lies, pages=written)
        return {name: x.full_tensor().tolist() for name, x in cache.items()}

    def _is(self, x: Any, name: str, turn: int, spec: str) -> bool:
        local = x if not hasattr(x, "to_local") else axes.to_local(x)
        whole = axes.to_local(axes.shard(values(name, turn), spec, mesh=self.mesh))
        return bool(torch.equal(local, whole))


def serve(pipe: Connection, name: str, rank: int, folder: str, port: int) -> None:
    """Do what comes through the pipe, and answer, until it is closed."""
    torch.set_num_threads(1)
    job = JobRank(name, rank, folder, port)
    pipe.send(("ready", "", 0.0, None))
    while True:
        try:
            what, given = pipe.recv()
        except EOFError:
            return
        began = time.monotonic()
        job.arrived = job.kept = {}
        try:
            found = ("ok", job.do(what, **given))
        except axes.AxesError as error:
            found = (type(error).__name__, str(error))
        pipe.send((*found, time.monotonic() - began, (job.arrived, job.kept)))


def host(pipe: Connection) -> None:
    """Host the store of a link."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()
