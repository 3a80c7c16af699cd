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
instead. Eight ranks start in a fraction of a second once the first launch has paid for importing torch: this process
keeps a fork server, which has imported it. It forks an agent for each launch, and the agent forks the ranks
(`axes.launching.forked`).

A function is sent as its module and name, a tensor as its numbers. So a rank needs the module, and nothing (no shared
memory, no descriptor) is left over when either side ends. A function without a name that a rank could find it by (a
lambda, a function in a function, in a notebook or another interactive session) goes by `cloudpickle`, where that is
installed.

The ranks share this machine's hash seed, which those of a real job don't: iterating over a set of strings gives them
the same order here only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple, TypeVar

from axes import AxesError

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds that the agent has to end all ranks when time is up, or when this process is interrupted."""

_FINDING = "looks for a function in the script"  # the name of a process that runs the script again


class End(NamedTuple):
    """How a call ended on a rank: in words, with its result or exception as bytes, and with the exception's traceback.

    `failed_at`: a time, by which the first failure is found.
    """

    how: str
    value: bytes | None = None
    traceback: str = ""
    failed_at: float = math.inf


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
        *args: Its arguments, the same for every rank. Each is pickled by itself; tensors are sent by value.
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
    call = _packed(name, fn, args)
    with _agent() as agent:
        try:
            agent.send((world_size, device_type, deadline, *_surroundings(world_size, call), call))
            ends = (
                agent.recv()
                if agent.poll(None if timeout is None else timeout + PATIENCE)
                else [End("hadn't begun")] * world_size
            )
        except (EOFError, ConnectionError) as error:
            raise AxesError(
                f"{name} on {world_size} ranks was lost: the process that started them died (its output is above)"
            ) from error
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
    for right, needed, found in (
        (hasattr(os, "fork"), "launch forks its processes, on Linux or macOS", sys.platform),
        (callable(fn), "launch needs a function to run on every rank", fn),
        (type(world_size) is int, "the world size is a number of processes", world_size),
        (
            type(world_size) is int and 1 <= world_size <= 256,
            "axes.simulate makes a world of any size in one; launch starts 1 to 256 processes on this machine",
            world_size,
        ),
        (
            timeout is None or (type(timeout) in (int, float) and 0 < timeout < math.inf),
            "the timeout is None or a positive number of seconds",
            timeout,
        ),
        (device_type in ("cpu", "cuda"), "launch knows the device types 'cpu' or 'cuda'", device_type),
    ):
        if not right:
            raise AxesError(f"{needed}, not {found!r}")
    if device_type == "cuda":
        from torch.cuda import device_count  # a launch on CPUs needs no torch in this process

        if device_count() < world_size:
            raise AxesError(
                f"{world_size} ranks need a GPU each, and torch finds {device_count()} here: launch fewer, or with "
                'device_type="cpu"'
            )


def _surroundings(size: int, call: list[bytes]) -> tuple[dict[str, str], dict[str, Any]]:
    """What ranks have of this process: the environment, with what torchrun says; and the rest, for
    `multiprocessing.spawn.prepare`, the script too where the call needs it."""
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    told = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    # Rank 0 doesn't host the store, as it doesn't where torchrun's agent does.
    environ = defaults | os.environ | told | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    return environ, {
        "name": _FINDING,
        "sys_path": [os.path.abspath(folder) for folder in sys.path],
        "sys_argv": sys.argv,
        "dir": os.getcwd(),
        "start_method": multiprocessing.get_start_method(allow_none=True),  # else the one by which they are started
        **(_script() if any(b"main__" in part for part in call) else {}),
    }


def _script() -> dict[str, str]:
    """This program's own file, as `multiprocessing.spawn.prepare` runs it again; nothing in an interactive session."""
    main = sys.modules["__main__"]
    path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if path is None or not os.path.isfile(path):
        return {}
    return {"init_main_from_name": spec.name} if spec else {"init_main_from_path": os.path.abspath(path)}


# ---------------------------------------------------------------------------- the call as bytes


def _packed(name: str, function: object, arguments: tuple[object, ...]) -> list[bytes]:
    """The function and its arguments, each as bytes. `AxesError` for the part that can't be sent."""
    return [
        as_bytes(
            function,
            name,
            "Define it with `def` at the top level of a module, a file (not a lambda, not inside another function), "
            "and pass what it needs as arguments, or install cloudpickle",
        ),
        *(
            as_bytes(
                value,
                f"argument {i} of {name}, a {type(value).__qualname__},",
                "Send plain data, and make the rest there",
            )
            for i, value in enumerate(arguments)
        ),
    ]


def as_bytes(value: object, name: str, advice: str = "") -> bytes:
    """A value for another process, tensors by value; by cloudpickle where only that can, and is installed.

    >>> as_bytes((i for i in "ab"), "the argument", "Send a list")    # doctest: +ELLIPSIS
    Traceback (most recent call last):
    axes.algebra.errors.AxesError: the argument can't be sent to other processes: cannot pickle ... Send a list
    """
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if b"__main__" in data and not _script():
            raise pickle.PicklingError("it is defined in an interactive session")
        return data
    except Exception as error:  # whatever its own code raises
        with contextlib.suppress(Exception):  # not there, or can't do it either
            return bytes(importlib.import_module("cloudpickle").dumps(value, pickle.HIGHEST_PROTOCOL))
        raise AxesError(f"{name} can't be sent to other processes: {error}. {advice}") from error


# ---------------------------------------------------------------------------- processes


@functools.lru_cache(maxsize=1)
def _server_of(pid: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The fork server of this process, by its id: a forked copy needs its own. It ends when the process does."""
    control, theirs = socket.socketpair()
    environ = {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path),
        # OpenMP and OpenBLAS make their threads when they are loaded: the server must have one thread to fork safely.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # NVML answers "is there a GPU?" without initializing CUDA
    }
    # A fifth of the time of the imports would be looking for garbage.
    code = f"import gc; gc.disable(); from axes.launching.forked import serve; serve({theirs.fileno()}, {pid})"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | environ,
            start_new_session=True,  # Ctrl-C in a terminal interrupts this process alone
        )
    return process, control


@contextlib.contextmanager
def _agent() -> Iterator[Connection]:
    """The agent of a launch, which the fork server forks; that is started if there is none.

    At the end of this block the agent and its ranks are gone: each of them has the other end of the pipe until then.
    """
    print(end="", flush=True)  # what was printed before stands before theirs
    if _server_of(os.getpid())[0].poll() is not None:
        _server_of.cache_clear()
    agent, theirs = Pipe()
    try:
        with theirs, contextlib.suppress(ConnectionError):  # the server is dead, as the pipe's end will say
            socket.send_fds(_server_of(os.getpid())[1], [b"f"], [theirs.fileno(), 1, 2])
        yield agent
    finally:
        with agent, contextlib.suppress(EOFError, ConnectionError):
            agent.send("it is over")
            while agent.poll(PATIENCE):
                agent.recv()


# ---------------------------------------------------------------------------- how it ended


def _error(ends: list[End], name: str) -> Exception:
    """The first failure as an exception, with notes on all ranks; or that time is up."""
    first = min(range(len(ends)), key=lambda rank: (ends[rank].failed_at, ends[rank].how == "finished"))
    end, subject = ends[first], f"rank {first} of {len(ends)}"
    error: Exception = AxesError(f"{name}: {'time is up, ' * (end.failed_at == math.inf)}{subject} {end.how}")
    if end.traceback:
        error = RuntimeError(end.how.removeprefix("failed: "))
        with contextlib.suppress(Exception):  # a constructor that takes other arguments, a module that isn't here
            error = pickle.loads(end.value or b"")
        error.add_note(f"{subject} failed first, in {name}:\n{end.traceback}")
    others: dict[str, list[int]] = {}
    for rank in {*range(len(ends))} - {first}:
        others.setdefault(ends[rank].how, []).append(rank)
    for how, ranks in others.items():
        error.add_note(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {how}")
    return error
