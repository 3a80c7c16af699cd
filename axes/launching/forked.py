"""The fork server, the agent of a launch, and its ranks: what runs in them.

Importing torch, DTensor, FSDP and dynamo takes seconds, and every rank would pay for it. The fork server pays once. For
each launch it forks an agent, in milliseconds, and the agent forks the ranks; all are processes of `multiprocessing`.

The agent is to the ranks what torchrun's is. It hosts the store by which they find each other, on a port that the
system picks and that is listened on before anyone hears of it. It hears how the call ends on each rank. When one fails,
the others have a short grace: the first to fail is often not the most telling, and one that waits for it would wait for
ever. It and the ranks, with all that they start, are one process group, which ends with the launch, and with the
launching process or the agent.

It isn't `multiprocessing`'s own fork server, of which a program has one: its preload list and environment are the
program's, it runs the script again in all of its processes, and its socket is a file, which stays behind when the
program is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
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
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from axes.launching.launch import End, as_bytes

PRELOADED = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "torch._inductor")
"""What the server imports, beside all of axes. None of these starts a thread, initializes an accelerator (a fork would
break either) or starts a process (`torch._inductor.async_compile` would)."""

GRACE = 2.0
"""Seconds that the other ranks have to end by themselves when one has failed, or when told to end."""

_TICK = 0.5  # an end is seen at once, unless another process holds on to the pipe
_FORK = multiprocessing.get_context("fork")


def serve(control_fd: int, owner: int) -> None:
    """Import torch and axes, and fork an agent on each request until the process `owner` is gone."""
    for name in (
        *PRELOADED,
        *importlib.import_module("axes")._HOME,
    ):  # those of axes are imported when a name is first asked for
        importlib.import_module(name)
    gc.freeze()  # no collector of a rank will write to what it shares with the others
    control = socket.socket(fileno=control_fd)
    control.settimeout(_TICK)
    while os.getppid() == owner:  # a fork of the owner may hold on to the other end
        multiprocessing.active_children()  # waits for agents that have ended
        with contextlib.suppress(TimeoutError):
            _, fds, *_ = socket.recv_fds(control, 1, 3)
            if not fds:
                break
            _FORK.Process(target=_run_agent, args=fds).start()
            for fd in fds:
                os.close(fd)
    # Bindings that count what is left at the end of Python (triton's, with which torch 2.15 comes) would print a page
    # of what stays out of collection: this isn't such an end.
    os._exit(0)


# ---------------------------------------------------------------------------- the agent


class _Rank(NamedTuple):
    """A rank as its agent sees it. `stack`: a file without a name, where it writes its stack at a crash or SIGUSR1."""

    process: multiprocessing.context.ForkProcess
    channel: connection.Connection
    stack: IO[bytes]


def _run_agent(channel: int, *outputs: int) -> None:
    """Run the launch that comes by the channel, and tell how it ended on each rank. Nothing is left of it then."""
    os.setpgid(0, 0)
    for number, fd in enumerate(outputs, start=1):
        os.dup2(fd, number)
    try:
        with contextlib.suppress(EOFError, ConnectionError), connection.Connection(channel) as launching:  # it is gone
            launching.send(_ends(launching, *launching.recv()))
    except BaseException:
        traceback.print_exc()
    finally:
        os.killpg(0, signal.SIGKILL)


def _ends(
    launching: connection.Connection,
    size: int,
    device_type: str,
    deadline: float,
    environ: dict[str, str],
    *call: Any,
) -> list[End]:
    """How the call ends on all ranks: until `deadline`, and for a grace after a failure. Who is late then is killed."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    os.environ.clear()
    os.environ.update(environ, MASTER_PORT=str(listener.getsockname()[1]))
    tempfile.tempdir = None  # asked for again, of this environment
    ranks = [_forked(rank, device_type, *call) for rank in range(size)]
    address, fd = listener.getsockname(), listener.detach()  # its threads begin when all ranks are forked
    store = dist.TCPStore(*address, is_master=True, wait_for_workers=False, master_listen_fd=fd)  # noqa: F841 # kept
    ends: dict[_Rank, End] = {}
    while (late := [rank for rank in ranks if rank not in ends]) and time.monotonic() < deadline:
        ready = connection.wait([launching, *(rank.channel for rank in late)], _TICK)
        if launching in ready:  # it is interrupted, or gone
            break
        for rank in late:
            if rank.channel in ready or rank.process.exitcode is not None:
                ends[rank] = _answer(rank)
                if ends[rank].how != "finished":
                    deadline = min(deadline, time.monotonic() + GRACE)
    for rank in late:
        os.kill(rank.process.pid, signal.SIGUSR1)  # type: ignore[arg-type] # it was started
    for rank in ends:
        with contextlib.suppress(OSError):  # it is dead
            rank.channel.send("all are done")
    until = time.monotonic() + GRACE
    for rank in ranks:
        rank.process.join(max(0, until - time.monotonic()))
        rank.process.kill()
        rank.process.join()
    return [ends.get(rank) or End("hadn't finished" + _stack(rank)) for rank in ranks]


def _forked(rank: int, *call: Any) -> _Rank:
    (channel, theirs), stack = multiprocessing.Pipe(), tempfile.TemporaryFile()  # noqa: SIM115
    process = _FORK.Process(target=_run_rank, args=(rank, theirs, stack, *call))
    with theirs:
        process.start()
    return _Rank(process, channel, stack)


def _answer(rank: _Rank) -> End:
    with contextlib.suppress(EOFError, OSError):
        if rank.channel.poll():
            return End(*rank.channel.recv())
    rank.process.join(GRACE)
    code = rank.process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    how += " (out of memory?)" * (code == -signal.SIGKILL)
    # A death comes before all errors: it is seen later than those that it causes.
    return End(how + _stack(rank), failed_at=time.monotonic() - 1e9)


def _stack(rank: _Rank) -> str:
    """Where a rank was in the user's code, where it has said it: one that is stopped, or hasn't begun, says nothing."""
    said = os.pread(rank.stack.fileno(), 1 << 20, 0).decode(errors="replace").partition(f'  File "{__file__}"')[0]
    frames = [line for line in said.splitlines() if line.startswith("  File")]
    return "\n".join([", most recent call first:" * (said != ""), *frames[:12]])


# ---------------------------------------------------------------------------- a rank


def _run_rank(
    rank: int,
    channel: connection.Connection,
    stack: IO[bytes],
    device_type: str,
    surroundings: dict[str, Any],
    call: list[bytes],
) -> None:
    """Run the call, say how it ended, and wait until it has on all ranks."""
    threading.Thread(target=_end_with_the_agent, daemon=True).start()
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False, chain=True)  # and end, as the signal says
    gc.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    try:
        _join(rank, device_type)
        spawn.prepare(surroundings)
        multiprocessing.current_process().name = f"rank {rank}"
        function, *arguments = map(pickle.loads, call)
        value = function(*arguments)
        returned = f"what rank {rank} returned, a {type(value).__qualname__},"
        end = End("finished", as_bytes(value, returned, "Return plain data or plain tensors"))
    except BaseException as error:  # SystemExit too: a rank that leaves early has failed
        frames, sent = error.__traceback__.tb_next, b""  # type: ignore[union-attr]
        with contextlib.suppress(Exception):  # whatever: it's the user's; the traceback has all of it
            sent = (
                as_bytes(error, "") if isinstance(error, Exception) else b""
            )  # others would end the launching process
        end = End(
            f"failed: {traceback.format_exception_only(error)[-1 if isinstance(error, SyntaxError) else 0].strip()}",
            sent,
            "".join(traceback.format_exception(type(error), error, frames)).rstrip(),
            time.monotonic(),
        )
    channel.send(end)
    channel.recv()


def _end_with_the_agent() -> None:
    connection.wait([multiprocessing.parent_process().sentinel])  # type: ignore[union-attr]
    os.killpg(0, signal.SIGKILL)


def _join(rank: int, device_type: str) -> None:
    """Make this process the rank: threads, device, default process group."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    if "numpy" in sys.modules:  # all forks of one process have its random numbers
        sys.modules["numpy"].random.seed()
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    worlds: list[Any] = []
    initialize = dist.init_process_group

    def init_process_group(backend: Any = None, init_method: str | None = None, *args: Any, **options: Any) -> None:
        """A function that was written for torchrun starts a world itself: in place of this one. Each world has its own
        part of the store, which keeps the addresses of earlier ones."""
        if dist.group.WORLD in worlds[:1]:
            dist.destroy_process_group()
        if init_method is None and not args:
            options = {
                "store": dist.PrefixStore(f"world {len(worlds)}", store),
                "rank": rank,
                "world_size": int(os.environ["WORLD_SIZE"]),
                **options,
            }
        initialize(backend, init_method, *args, **options)
        worlds.append(dist.group.WORLD)

    dist.init_process_group = init_process_group
    init_process_group({"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device_type])
