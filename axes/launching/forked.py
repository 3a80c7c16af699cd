"""The fork server and the ranks that it forks: what runs in them.

Importing torch, DTensor, FSDP and dynamo takes seconds, and every rank would pay for it. The fork server pays once, and
then forks ranks, which are processes of `multiprocessing`, in milliseconds. A rank joins the world that it is told of,
runs one call, and stays until all ranks are done. It and all that it starts are one process group, which ends with the
rank, the launching process and the server.

It isn't `multiprocessing`'s own fork server, of which a program has one: its preload list and environment are the
program's, a start waits for ever where it is stopped, and its socket is a file, which stays behind when the program is
killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing import connection, spawn
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from axes.algebra.errors import AxesError
from axes.launching.calls import End, dumps, sendable

PRELOADED = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "torch._inductor")
"""What the server imports, beside all of axes. None of these starts a thread, initializes an accelerator (a fork would
break either) or starts a process (`torch._inductor.async_compile` would)."""

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""The default process group's backend by device type."""

_TICK = 0.5  # an end is seen at once, unless another process holds on to the sentinel or the socket
_KILL = bytes([signal.SIGKILL])


def serve(control_fd: int, owner: int) -> None:
    """Import torch and axes, and fork ranks on request until the process `owner` is gone.

    A request has a channel, which the rank gets, and a handle: a signal that comes by it is sent to the rank, its end
    kills the rank, and the exit code goes back.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        importlib.import_module(name)
    library = importlib.import_module("axes")
    for name in library.__all__:  # whose modules are imported when a name is first asked for
        getattr(library, name)
    gc.freeze()  # no collector of a rank will write to what it shares with the others

    control = socket.socket(fileno=control_fd)
    ranks: dict[socket.socket, BaseProcess] = {}
    while True:
        ready = connection.wait([control, *ranks, *(process.sentinel for process in ranks.values())], _TICK)
        request, fds, *_ = socket.recv_fds(control, 1, 5) if control in ready else (b"-", [])
        over = not request or os.getppid() != owner  # a fork of the owner may hold on to `control`
        for handle, process in list(ranks.items()):
            told = handle.recv(1) or _KILL if handle in ready else b""
            if over or told == _KILL or process.exitcode is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left of it
                    os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type] # it was started
            elif told:
                os.kill(process.pid, told[0])  # type: ignore[arg-type]
            if process.exitcode is not None:
                with contextlib.suppress(OSError), handle:  # nobody may listen any more
                    handle.send(str(process.exitcode).encode())
                del ranks[handle]
        if over:
            # Bindings that count what is left at the end of Python (triton's, with which torch 2.15 comes) would print
            # a page of what stays out of collection: this isn't such an end.
            os._exit(0)
        if fds:
            handle = socket.socket(fileno=fds.pop(1))
            inherited = [each.fileno() for each in (control, handle, *ranks)]
            process = multiprocessing.get_context("fork").Process(target=_become_rank, args=(inherited, *fds))
            process.start()
            os.setpgid(process.pid, 0)  # type: ignore[arg-type]
            ranks[handle] = process
            for fd in fds:
                os.close(fd)


# ---------------------------------------------------------------------------- a rank


def _become_rank(inherited: list[int], channel: int, stack: int, *outputs: int) -> None:
    """Run the call that comes by the channel, and wait for its end."""
    os.setpgid(0, 0)
    for fd in inherited:
        os.close(fd)
    for number, fd in enumerate(outputs, start=1):
        os.dup2(fd, number)
        os.close(fd)
    for fd in (channel, stack):
        os.set_inheritable(fd, False)  # received descriptors survive exec unless told otherwise
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with contextlib.suppress(EOFError, OSError), Connection(channel) as launching:  # it is gone
        told, call = launching.recv(), launching.recv_bytes()
        launching.send(_end_of(call, *told))
        launching.recv()


def _end_with_the_server() -> None:
    connection.wait([multiprocessing.parent_process().sentinel])  # type: ignore[union-attr]
    os.killpg(0, signal.SIGKILL)


def _end_of(call: bytes, device_type: str, environ: dict[str, str], surroundings: dict[str, Any]) -> End:
    """How the call ends on this rank."""
    try:
        os.environ.clear()
        os.environ.update(environ)
        tempfile.tempdir = None  # asked for again, of this environment
        _join(device_type)
        spawn.prepare(surroundings)
        multiprocessing.current_process().name = f"rank {environ['RANK']}"
        function, arguments = _found(call)
        value = function(*arguments)
        part = f"what rank {environ['RANK']} returned, a {type(value).__qualname__},"
        return End("finished", sendable(part, value, "Return plain data or plain tensors"))
    except BaseException as error:  # SystemExit too: a rank that leaves early has failed
        frames, sent = error.__traceback__.tb_next, b""  # type: ignore[union-attr]
        with contextlib.suppress(Exception):  # whatever: it's the user's; the traceback has all of it
            sent = dumps(error)
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        summary = "".join(traceback.format_exception_only(error)).strip()
        return End(f"failed: {summary}", sent, text, time.monotonic())
    finally:
        with contextlib.suppress(Exception):  # closed, or a dead pipe
            sys.stdout.flush()


def _found(call: bytes) -> Any:
    """The function and its arguments."""
    try:
        return pickle.loads(call)
    except AttributeError as error:
        raise AxesError(
            f'{error}: another process runs the script without the part under `if __name__ == "__main__":`; define '
            f"above that part, at the top level, all that ranks need"
        ) from error


def _join(device_type: str) -> None:
    """Make this process the rank: threads, device, default process group."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ["OMP_NUM_THREADS"].isdecimal():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "numpy" in sys.modules:  # all forks of one process have its random numbers
        sys.modules["numpy"].random.seed()
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    initialize, worlds, launched = dist.init_process_group, itertools.count(), []

    def init_process_group(backend: Any = None, init_method: str | None = None, *args: Any, **options: Any) -> None:
        """A function that was written for torchrun starts a world itself: in place of this one, in its own part of the
        store, which keeps the addresses of earlier worlds. A second call is the function's error, as ever."""
        if dist.group.WORLD in launched:
            dist.destroy_process_group()
        if init_method in (None, "env://") and not args and options.get("store") is None:
            options |= {"store": dist.PrefixStore(f"world {next(worlds)}", store), "rank": rank, "world_size": size}
            init_method = None
        initialize(backend, init_method, *args, **options)

    dist.init_process_group = init_process_group
    init_process_group(BACKENDS[device_type])
    launched.append(dist.group.WORLD)
