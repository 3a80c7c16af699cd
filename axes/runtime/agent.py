"""The agent of a launched world, and its ranks: what happens below the fork server.

The agent is to the ranks what torchrun's is. It forks them and hosts the store by which they find
each other, on a port that the system picks and that is listened on before anyone hears of it; it
passes them calls, and tells the launching process how each ended. It ends when the launching
process is gone, however that ended, and takes all processes with it that its ranks have started:
they are one process group.

When one rank fails, the others have a short grace: the first to fail is often not the most telling,
and one that waits for it would wait for ever. A rank that is done stays until all are.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import itertools
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import IO, Any

from axes.algebra.errors import AxesError
from axes.runtime.transfer import Main, dumps, loads

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""The default process group's backend by device type."""

GRACE = 2.0
"""Seconds that the other ranks have to end by themselves when one has failed, or when told to end."""

_TICK = 0.5  # a rank's end is seen at once unless a process that it forked holds on to its channel
_STACK_SECONDS = 2.0  # that late ranks have to write where they are
_HEAD_START = 0.5  # a death is heard of later than the errors that it causes in its peers
_FRAMES = 12  # of the stack of a rank that hangs


@dataclass(frozen=True)
class WorldSpec:
    """What the launching process tells the agent: the world's size, and its own surroundings."""

    size: int
    device_type: str
    environ: dict[str, str]
    argv: list[str]
    path: list[str]
    directory: str
    start_method: str | None
    main: Main | None


@dataclass(frozen=True)
class End:
    """How a call ended on one rank: in words, and with its result or exception, pickled."""

    how: str
    value: bytes | None = None
    failed_at: float = math.inf
    traceback: str = ""

    @property
    def lost(self) -> bool:
        """Whether the rank can't take another call: it died, or is busy still."""
        return self.value is None and not self.traceback

    @classmethod
    def of(cls, error: BaseException) -> End:
        """An exception that reached us, without our own frames."""
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        value = None
        with contextlib.suppress(Exception):  # whatever: it's the user's; the traceback has all of it
            value = dumps(error)
        summary = "".join(traceback.format_exception_only(error)).strip()
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        return cls(f"failed: {summary}", value, time.monotonic(), text)

    @classmethod
    def death(cls, code: int | None) -> End:
        """A process that ended before the call did."""
        how = f"exited with code {code}"
        if code is not None and code < 0:
            names = {int(known): known.name for known in signal.Signals}
            how = f"was killed by {names.get(-code, f'signal {-code}')}"
            how += " (out of memory?)" if code == -signal.SIGKILL else ""
        return cls(how, failed_at=time.monotonic() - _HEAD_START)


def signs_of_end(pid: int) -> list[int]:
    """Descriptors that are ready when process `pid` has ended; none where the system has no such."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux; ended already, as its socket will say
        return [os.pidfd_open(pid)]
    return []


# ---------------------------------------------------------------------------- the agent


@dataclass(frozen=True)
class _Rank:
    channel: Connection
    process: BaseProcess
    pid: int
    stack: IO[bytes]  # where it writes its stack at SIGUSR1: a file without a name


def run_agent(channel: Connection, owner: int) -> None:
    """Start a world and run calls on it until `channel` ends, the process `owner` does, or a rank is lost."""
    os.setpgid(0, 0)
    owner_gone: list[Any] = [channel, *signs_of_end(owner)]
    ranks: list[_Rank] = []
    try:
        channel.send(os.getpid())
        world, deadline = channel.recv()
        _move_to(world)
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        for number in range(world.size):
            inherited = [listener, channel, *(end for rank in ranks for end in (rank.channel, rank.stack))]
            ranks.append(_start(world, number, listener.getsockname()[1], inherited))
        _store = _hosted(listener)  # after the forks: it has a thread
        channel.send([rank.pid for rank in ranks])
        ends = _gather(ranks, deadline, owner_gone)
        while True:
            if any(end.lost for end in ends):
                _end(ranks, signal.SIGTERM, signal.SIGKILL)
            channel.send(ends)
            call, deadline = channel.recv()
            for rank in ranks:
                with contextlib.suppress(OSError):  # it has died, as will be seen
                    rank.channel.send_bytes(call)
            ends = _gather(ranks, deadline, owner_gone)
    except (EOFError, ConnectionError):  # of `channel`, or of `_gather` for it
        pass
    except Exception:
        traceback.print_exc()
    finally:
        _end(ranks, 0, signal.SIGTERM, signal.SIGKILL)
        os.killpg(0, signal.SIGKILL)  # this process too, and what the ranks have left


def _start(world: WorldSpec, number: int, port: int, inherited: Sequence[Any]) -> _Rank:
    ours, theirs = multiprocessing.Pipe()
    stack = tempfile.TemporaryFile()  # noqa: SIM115
    process = multiprocessing.get_context("fork").Process(
        target=_run_rank, args=(world, number, port, theirs, stack, [ours, *inherited])
    )
    process.start()
    theirs.close()
    assert process.pid is not None
    return _Rank(ours, process, process.pid, stack)


def _hosted(listener: socket.socket) -> Any:
    from torch.distributed import TCPStore

    port = listener.getsockname()[1]
    fd = listener.detach()
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def _gather(ranks: Sequence[_Rank], deadline: float, owner_gone: Sequence[Any]) -> list[End]:
    """How all end: until `deadline`, and for a grace after a failure. `EOFError` without an owner."""
    ends: dict[int, End] = {}
    while len(ends) < len(ranks) and (left := deadline - time.monotonic()) > 0:
        waiting = [rank.channel for number, rank in enumerate(ranks) if number not in ends]
        ready = wait([*owner_gone, *waiting], min(left, _TICK))
        if any(sign in ready for sign in owner_gone):
            _end(ranks, signal.SIGTERM, signal.SIGKILL)
            raise EOFError
        for number, rank in enumerate(ranks):
            if number not in ends and (rank.channel in ready or rank.process.exitcode is not None):
                ends[number] = _answer(rank)
                if ends[number].failed_at < math.inf:
                    deadline = min(deadline, time.monotonic() + GRACE)
    late = [rank for number, rank in enumerate(ranks) if number not in ends]
    for rank in late:
        os.kill(rank.pid, signal.SIGUSR1)
    until = time.monotonic() + _STACK_SECONDS  # a rank that is stopped writes none
    while not all(__file__ in _stack(rank) for rank in late) and time.monotonic() < until:
        time.sleep(0.02)
    return [ends[number] if number in ends else End(_place(rank)) for number, rank in enumerate(ranks)]


def _answer(rank: _Rank) -> End:
    try:
        end: End = rank.channel.recv()
    except (EOFError, OSError):
        rank.process.join(GRACE)
        return End.death(rank.process.exitcode)
    return end


def _stack(rank: _Rank) -> str:
    """The stack that a rank has written by now, down to its own loop in this file at last."""
    return os.pread(rank.stack.fileno(), 1 << 20, 0).decode(errors="replace")  # the rank shares the file's position


def _place(rank: _Rank) -> str:
    lines = [line for line in _stack(rank).splitlines() if line.startswith("  File")]
    # Below the rank's own loop there is only what every rank has.
    frames = list(itertools.takewhile(lambda line: f'"{__file__}"' not in line, lines))
    return "\n".join(["hadn't finished" + (", most recent call first:" if frames else ""), *frames[:_FRAMES]])


def _end(ranks: Sequence[_Rank], *signals: int) -> None:
    """End the ranks: by the end of their channels (0), and by signals to those that stay."""
    for number in signals:
        for rank in ranks:
            if not number:
                rank.channel.close()  # an idle rank exits
            elif rank.process.exitcode is None:
                os.kill(rank.pid, number)
        deadline = time.monotonic() + GRACE
        for rank in ranks:
            rank.process.join(max(0, deadline - time.monotonic()))


def _move_to(world: WorldSpec) -> None:
    """Give this process, and so the ranks, the surroundings of the launching process."""
    local = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    defaults = {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": local} if local else {})
    os.environ.clear()
    os.environ.update(defaults | world.environ)
    os.chdir(world.directory)
    sys.path[:] = world.path
    sys.argv[:] = world.argv
    tempfile.tempdir = None  # asked for again, of this environment


# ---------------------------------------------------------------------------- a rank


def _run_rank(
    world: WorldSpec, rank: int, port: int, channel: Connection, stack: IO[bytes], inherited: Sequence[Any]
) -> None:
    """Join the world, then run calls until the channel ends."""
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for end in inherited:
        end.close()
    gc.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    multiprocessing.set_start_method(world.start_method, force=True)  # else that by which we were started
    with contextlib.suppress(EOFError, OSError):  # the agent is gone
        channel.send(_attempt(rank, _join, world, rank, port))
        while True:
            channel.send(_attempt(rank, _run, channel.recv_bytes(), world.main))


def _run(call: bytes, main: Main | None) -> object:
    function, arguments = loads(call, main)
    return function(*arguments)


def _attempt(rank: int, work: Callable[..., object], *args: object) -> End:
    """How `work(*args)` ended on this rank."""
    try:
        value = work(*args)
    except BaseException as error:  # SystemExit too: a rank that leaves early has failed
        return End.of(error)
    finally:
        with contextlib.suppress(Exception):  # closed, or a dead pipe
            sys.stdout.flush()
    try:
        return End("finished", dumps(value))
    except Exception as error:
        wrong = AxesError(
            f"what rank {rank} returned, a {type(value).__qualname__}, can't be sent back: "
            f"{error}. Return plain data or plain tensors"
        )
        wrong.__cause__ = error
        return End.of(wrong)


def _join(world: WorldSpec, rank: int, port: int) -> None:
    """Make this process the rank: environment, threads, device, default process group."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world.size),
        LOCAL_WORLD_SIZE=str(world.size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the agent hosts the store, not rank 0
    )
    import torch
    import torch.distributed as dist

    if os.environ["OMP_NUM_THREADS"].isdecimal():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "numpy" in sys.modules:  # all forks of one process have its random numbers
        sys.modules["numpy"].random.seed()
    if world.device_type == "cuda":
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    place = {"rank": rank, "world_size": world.size}
    dist.init_process_group(BACKENDS[world.device_type], store=dist.PrefixStore("launch", store), **place)
    _let_the_function_initialize(store, place)


def _let_the_function_initialize(store: Any, place: Mapping[str, int]) -> None:
    """Let `init_process_group` start another world in place of the one that launch has started.

    A function that was written for torchrun calls it. A second call is the function's error, as ever.
    """
    import torch.distributed as dist

    initialize, launched, worlds = dist.init_process_group, dist.group.WORLD, itertools.count()

    @functools.wraps(initialize)
    def init_process_group(backend: Any = None, init_method: str | None = None, *args: Any, **options: Any) -> None:
        if dist.group.WORLD is launched:
            dist.destroy_process_group()
        if init_method in (None, "env://") and not args and options.get("store") is None:
            # The store keeps the addresses of earlier worlds: each world has a part of it to itself.
            options |= {"store": dist.PrefixStore(f"world {next(worlds)}", store), **place}
            init_method = None
        initialize(backend, init_method, *args, **options)

    dist.init_process_group = init_process_group
