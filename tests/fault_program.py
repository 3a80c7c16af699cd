"""What the ranks of tests/faults.py do: a job of four phases, at one point of which a fault happens.

The phases are `axes.init_mesh`, the making of a group, a collective, and a checkpoint's save. The fault is injected by
the rank `victim` before a phase, in it, or after it: the point is reached by a hook, and never by waiting some time. Each
rank writes into a folder who it is, and how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils._python_dispatch import TorchDispatchMode

import axes
from tests.common import lives, stat_of, waited, written

_ = axes.init_mesh, axes.psum, axes.from_local  # imported now: what is forked from this process has them

PHASES = ("init_mesh", "group", "collective", "save")
MOMENTS = ("before", "in", "after")

LIMIT = 4.0
"""Seconds that ranks wait for one another: the timeout of the mesh and of its groups."""

START = 120.0
"""Seconds that a rank may take to start, on a machine that is busy."""


class InjectedError(Exception):
    """The exception that a rank raises where that is its fault."""


def wait_for(condition: Callable[[], bool]) -> None:
    if not waited(condition, START):
        raise TimeoutError("what this rank waits for didn't happen")


@dataclass
class Injector:
    """Where the fault of this run happens, seen from one rank."""

    folder: Path
    fault: str
    phase: str
    moment: str
    rank: int = field(default_factory=lambda: int(os.environ["RANK"]))
    size: int = field(default_factory=lambda: int(os.environ["WORLD_SIZE"]))
    saving: bool = False

    @property
    def victim(self) -> int:
        """The rank that injects the fault: the middle one of three, the first of two."""
        return (self.size - 1) // 2

    def is_at(self, phase: str, moment: str) -> bool:
        return (phase, moment) == (self.phase, self.moment)

    def meet(self, name: str) -> None:
        """Waits until all ranks are here."""
        (self.folder / f"{name}.{self.rank}").touch()
        wait_for(lambda: all((self.folder / f"{name}.{rank}").exists() for rank in range(self.size)))

    def reach(self, phase: str, moment: str) -> None:
        """The fault, where it is that of this point; the ranks that it doesn't hit go on when it has happened."""
        if self.is_at(phase, moment):
            self.meet("point")
            if self.rank == self.victim:
                self.inject()
            wait_for((self.folder / "fault").exists)

    def inject(self) -> None:
        """The fault. Returns where it is another process that it hits."""
        written(self.folder / "time", str(time.monotonic()))
        if self.fault in _ON_THIS_RANK:
            written(self.folder / "fault", "")
            _ON_THIS_RANK[self.fault]()
        elif self.fault == "cut link":
            (self.folder / "cut").touch()  # tests/hosts.sh does it
            wait_for((self.folder / "cut.done").exists)
        else:
            host = host_of_the_store()
            os.kill(host, signal.SIGKILL if self.fault == "store killed" else signal.SIGSTOP)
            wait_for(lambda: not lives(host) or stopped(host))
        written(self.folder / "fault", "")

    def hook(self) -> None:
        """Has the fault happen in its phase, where this rank is the one that injects it."""
        if self.moment == "in" and self.rank == self.victim:
            {"init_mesh": self._at_the_barrier, "group": self._connecting}.get(self.phase, lambda: None)()

    def _at_the_barrier(self) -> None:
        """When this rank has stated its mesh, and isn't counted yet: the others wait for it."""
        real = dist.Store.add

        def add(store: Any, key: str, *more: Any) -> Any:
            if key.startswith("axes/mesh") and key.endswith("/count"):
                self.inject()
            return real(store, key, *more)

        dist.Store.add = add  # type: ignore[method-assign]

    def _connecting(self) -> None:
        """When the members of the group have agreed on it: the others connect, and wait for this one's address."""
        make = dist.distributed_c10d._new_process_group_helper

        def making(*args: Any, **keywords: Any) -> Any:
            self.inject()
            return make(*args, **keywords)

        dist.distributed_c10d._new_process_group_helper = making

    def reduced(self, func: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """A reduction, which has begun on the victim when the fault happens; the last rank comes when it has."""
        if self.rank == self.size - 1:
            wait_for((self.folder / "fault").exists)
        work = func(*args, **keywords)
        if self.rank == self.victim:
            self.inject()
        return work

    def planner(self) -> dcp.DefaultSavePlanner:
        """A planner of a save that injects the fault when its rank writes."""
        injector = self

        class Planner(dcp.DefaultSavePlanner):
            def resolve_data(self, write_item: Any) -> Any:
                injector.inject()
                return super().resolve_data(write_item)

        return Planner() if self.is_at("save", "in") and self.rank == self.victim else dcp.DefaultSavePlanner()


def _raise() -> NoReturn:
    raise InjectedError("the fault of this rank")


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


_ON_THIS_RANK: dict[str, Callable[[], None]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": _stop,
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "exit": lambda: os._exit(0),
    "exception": _raise,
}


class Reducing(TorchDispatchMode):
    """Sees the backend's reduction begin."""

    def __init__(self, at: Injector) -> None:
        super().__init__()
        self.at = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.__name__.startswith("allreduce"):
            return self.at.reduced(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def host_of_the_store() -> int:
    """The process that does: torchrun, or the agent of a launch, which is the parent of this one."""
    return os.getppid()


def stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    return stat_of(pid)[0] == "T"


def job(at: Injector) -> None:
    """The four phases, with the points before and after each."""
    at.reach("init_mesh", "before")
    options = {"x": axes.GroupOptions(timeout=LIMIT)}
    mesh = axes.init_mesh("x", device_type="cpu", timeout=LIMIT, options=options)
    at.reach("init_mesh", "after")

    at.reach("group", "before")
    group = mesh.axis("x").group
    at.reach("group", "after")

    at.reach("collective", "before")
    with Reducing(at) if at.is_at("collective", "in") else contextlib.nullcontext():
        total = axes.psum(torch.tensor([float(at.rank)]), "x", mesh=mesh)
    assert total.item() == sum(range(at.size))
    at.reach("collective", "after")

    state = {"w": axes.from_local(torch.full((2, 3), float(at.rank)), "a@x b", mesh=mesh)}
    at.reach("save", "before")
    at.saving = True
    dcp.save(state, checkpoint_id=at.folder / "saved", planner=at.planner(), process_group=group)
    at.saving = False
    at.reach("save", "after")
    axes.destroy_process_groups()


def program(folder: str, fault: str, phase: str, moment: str) -> None:
    """`job`, and a file that says how this rank ended. An error of it goes on."""
    os.environ["TMPDIR"] = f"{folder}/tmp"
    at = Injector(Path(folder), fault, phase, moment)
    who = {"pid": os.getpid(), "port": int(os.environ["MASTER_PORT"]), "group": os.getpgid(0)}
    written(at.folder / f"who{at.rank}", json.dumps(who))
    at.meet("start")
    at.hook()
    kind, text, cause = "", "", ""
    try:
        job(at)
    except BaseException as error:
        kind, text, cause = type(error).__name__, str(error), type(error.__cause__).__name__
        raise
    finally:
        ended = {"kind": kind, "text": text, "cause": cause, "saving": at.saving, "time": time.monotonic()}
        written(at.folder / f"ended{at.rank}", json.dumps(ended))


if __name__ == "__main__":
    program(*sys.argv[1:])
