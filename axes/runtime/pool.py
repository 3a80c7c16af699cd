"""Local ranks that wait for work: the machinery below `axes.launch` and the tests' process pool.

A pool is a small job of its own on this machine. Its processes come from a fork server that has
imported torch already, join one `torch.distributed` world, and then run one call after another, the
same call on every rank:

    with Pool(8) as pool:
        pool.run(torch.distributed.get_rank)          # [0, 1, 2, 3, 4, 5, 6, 7]

Three decisions make it dependable.

- **The parent hosts the store** by which the ranks find each other, on a port that the system picks
  and that is listened on before anyone hears of it. No port is raced for, and no rank sees a
  network error because the one that hosted the store was done first. Only this machine reaches it.
- **A finished rank stays** until all have finished, so that its connections do.
- **A rank that fails is heard, and so are the others.** They get a short grace, because the first
  to fail is often not the most telling, and one that waits for it would wait for ever. The error is
  the first one's own exception; its notes tell its traceback and how each other rank ended, with
  the place where those were that hadn't.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from axes.algebra.errors import AxesError
from axes.runtime import forkserver
from axes.runtime.forkserver import LOST, Child, fork_server
from axes.runtime.transfer import Call, Main, dumps, loads, main_of_this_process

if TYPE_CHECKING:
    from torch.distributed import TCPStore

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""The default process group's backend by device type."""

GRACE = 2.0
"""Seconds that the other ranks have to end by themselves when one has failed."""

_PATIENCE = 2.0  # seconds for a process to end once it was told to
_HEAD_START = 0.5  # a death is heard of later than the errors that it causes in its peers
_LINES = 12  # of the stack of a rank that hangs


# ---------------------------------------------------------------------------- how a call ends


@dataclass(frozen=True)
class Finished:
    """The call returned."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """The call raised: `error` is the pickled exception where that's possible."""

    at: float
    summary: str
    text: str
    error: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """What to tell of an exception that reached us, without our own frames."""
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        try:
            data = dumps(error)
        except Exception:  # whatever: it's the user's; text has all of it
            data = None
        return cls(
            time.monotonic(),
            "".join(traceback.format_exception_only(error)).strip(),
            "".join(traceback.format_exception(type(error), error, frames)),
            data,
        )

    def exception(self) -> Exception:
        """The exception itself, else a `RuntimeError` in its place."""
        try:
            found = None if self.error is None else loads(self.error)
        except Exception:  # a constructor that takes other arguments, a module that isn't here
            found = None
        # SystemExit, KeyboardInterrupt: those would end this process, not the rank.
        return found if isinstance(found, Exception) else RuntimeError(self.summary)


@dataclass(frozen=True)
class Died:
    """The process ended before the call did."""

    at: float
    code: int

    @property
    def summary(self) -> str:
        """How it died, in words."""
        if self.code == LOST:
            return "was lost with the fork server that started it (its output is above)"
        if self.code >= 0:
            return f"exited with code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"


@dataclass(frozen=True)
class Running:
    """The call hadn't ended; `stack` is where it was."""

    stack: str


Outcome = Finished | Failed | Died | Running


# ---------------------------------------------------------------------------- the parent's side


@dataclass
class Pool:
    """`world_size` local processes with a running default process group.

    `timeout`: seconds to start in. Raises `AxesError` where they don't start; what is left of a
    failed start is ended. Use it as a context manager, or call `close`.
    """

    world_size: int
    device_type: str = "cpu"
    timeout: float | None = None
    _children: list[Child] = field(default_factory=list, repr=False)
    _store: TCPStore | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        deadline = _deadline(self.timeout)
        server = fork_server("axes.runtime.pool", "serve_rank")
        try:
            # The server imports torch meanwhile.
            for _ in range(self.world_size):
                self._children.append(server.fork())
            self._store, port = _hosted_store()
            places = [self._place(rank, port) for rank in range(self.world_size)]
            self._call([dumps(place) for place in places], deadline, "starting", GRACE)
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """Whether it takes another call."""
        return bool(self._children)

    @property
    def pids(self) -> list[int | None]:
        """The process ids by rank; none when closed."""
        return [child.pid for child in self._children]

    def run(
        self,
        fn: Callable[..., T],
        *args: object,
        timeout: float | None = None,
        grace: float = GRACE,
    ) -> list[T]:
        """`fn(*args)` on every rank; the results by rank.

        Raises the exception of the rank that failed first, with notes on all ranks; `AxesError`
        where a process died, or where ranks hadn't finished after `timeout` seconds. The pool takes
        further calls unless a process died or was still busy `grace` seconds after the failure.
        """
        return self.run_call(Call.of(fn, args), timeout, grace)

    def run_call(self, call: Call, timeout: float | None = None, grace: float = GRACE) -> list[Any]:
        """`run`, of a call made beforehand."""
        if not self.alive:
            raise AxesError("this pool has been closed, maybe for a call that failed: make another")
        messages = [call.data] * self.world_size
        return self._call(messages, _deadline(timeout), call.name, grace)

    def close(self) -> None:
        """Lets the processes end, and waits for it."""
        self._end([])

    def kill(self) -> None:
        """Ends the processes, whatever they do."""
        self._end([signal.SIGTERM, signal.SIGKILL])

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        self.close() if error is None else self.kill()

    def _place(self, rank: int, port: int) -> Place:
        path = [os.path.abspath(folder) for folder in sys.path]
        return Place(
            rank,
            self.world_size,
            self.device_type,
            port,
            dict(os.environ),
            list(sys.argv),
            path,
            os.getcwd(),
            main_of_this_process(),
        )

    def _call(self, messages: Sequence[bytes], deadline: float, name: str, grace: float) -> list[Any]:
        try:
            outcomes = self._gather(messages, deadline, grace)
        except BaseException:  # an interrupt: nobody knows what the ranks are at
            self.kill()
            raise
        if any(isinstance(outcome, Died | Running) for outcome in outcomes):
            self.kill()
        if not all(isinstance(outcome, Finished) for outcome in outcomes):
            raise _error(outcomes, name)
        return [outcome.value for outcome in outcomes if isinstance(outcome, Finished)]

    def _gather(self, messages: Sequence[bytes], deadline: float, grace: float) -> list[Outcome]:
        """Sends each rank its message; waits for all, but only `grace` seconds after a failure."""
        outcomes: dict[int, Outcome] = {}
        with selectors.DefaultSelector() as selector:
            for rank, child in enumerate(self._children):
                _send(child, messages[rank], deadline)
                for source in (child.channel, child.status):
                    selector.register(source, selectors.EVENT_READ, rank)
            while len(outcomes) < self.world_size and time.monotonic() < deadline:
                left = deadline - time.monotonic()
                for key, _ in selector.select(None if left == math.inf else left):
                    rank = key.data
                    outcome = _heard(self._children[rank], key.fileobj, selector)
                    if outcome is None or rank in outcomes:
                        continue
                    outcomes[rank] = outcome
                    if not isinstance(outcome, Finished):
                        deadline = min(deadline, time.monotonic() + grace)
        late = [rank for rank in range(self.world_size) if rank not in outcomes]
        stacks = _stacks([self._children[rank] for rank in late])
        outcomes |= {rank: Running(stack) for rank, stack in zip(late, stacks, strict=True)}
        return [outcomes[rank] for rank in range(self.world_size)]

    def _end(self, signals: Sequence[signal.Signals]) -> None:
        """Closes the channels, at which an idle rank exits, and signals those that stay."""
        try:
            _all_ended(self._children, 0)  # hears of those that the server has forked meanwhile
            for number in signals or (None, signal.SIGTERM, signal.SIGKILL):
                for child in self._children:
                    if number is not None:
                        child.signal(number)
                    elif child.exit_code is None:
                        child.channel.close()
                if _all_ended(self._children, _PATIENCE):
                    break
        finally:
            for child in self._children:
                child.signal(signal.SIGKILL)  # after an interrupt of the above, or for a lost one
                child.close()
            self._children = []
            self._store = None  # closes the port, even while a traceback holds on to this pool


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


def _hosted_store() -> tuple[TCPStore, int]:
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def _send(child: Child, message: bytes, deadline: float) -> None:
    left = max(0.001, deadline - time.monotonic())
    with contextlib.suppress(OSError):  # dead or not reading: its status, or the clock, will tell
        child.send(message, None if left == math.inf else left)


def _heard(child: Child, source: object, selector: selectors.BaseSelector) -> Outcome | None:
    """What a readable `source` of a child, its channel or status, tells."""
    if source is child.status:
        child.read_status()
        if child.exit_code is None:
            return None
        selector.unregister(child.status)
    try:
        message = child.receive()
    except EOFError:  # its end: the status tells how
        if child.channel in selector.get_map():
            selector.unregister(child.channel)
        message = None
    if message is not None:
        return _rebuilt(message)
    if child.exit_code is not None:
        return Died(time.monotonic() - _HEAD_START, child.exit_code)
    return None


def _rebuilt(message: bytes) -> Outcome:
    try:
        outcome: Outcome = loads(message)
    except Exception as error:
        wrong = AxesError(f"what it returned can't be rebuilt in the launching process: {error}")
        wrong.__cause__ = error
        return Failed.of(wrong)
    return outcome


def _stacks(children: Sequence[Child]) -> list[str]:
    """Where each child is, innermost frame first; "" for one that doesn't say."""
    for child in children:
        child.signal(signal.SIGUSR1)
    if children:
        time.sleep(0.2)
    return [_stack(child) for child in children]


def _stack(child: Child) -> str:
    try:
        text = os.read(child.stacks, 1 << 16).decode(errors="replace")
    except BlockingIOError:
        return ""
    lines = [line for line in text.splitlines() if line.startswith("  File")]
    # Below the rank's own loop there is only what every rank has.
    mine = next((at for at, line in enumerate(lines) if f'"{__file__}"' in line), len(lines))
    return "\n".join(lines[:mine][:_LINES])


def _all_ended(children: Sequence[Child], patience: float) -> bool:
    """Waits for the children that were forked. Any other will find its channel closed, and exit."""
    deadline = time.monotonic() + patience
    with selectors.DefaultSelector() as selector:
        for child in children:
            if child.exit_code is None and (child.pid is not None or not patience):
                selector.register(child.status, selectors.EVENT_READ, child)
        while selector.get_map():
            ready = selector.select(max(0, deadline - time.monotonic()))
            if not ready:
                return False
            for key, _ in ready:
                key.data.read_status()
                if key.data.exit_code is not None:
                    selector.unregister(key.fileobj)
    return True


def _error(outcomes: Sequence[Outcome], name: str) -> Exception:
    """The first failure as an exception, with notes on all ranks; or that time is up."""
    size = len(outcomes)
    at = {rank: end.at for rank, end in enumerate(outcomes) if isinstance(end, Failed | Died)}
    if not at:
        late = [rank for rank, end in enumerate(outcomes) if isinstance(end, Running)]
        error: Exception = AxesError(f"{name}: time is up, {_ranks(late)} of {size} hadn't finished")
        first = None
    else:
        first = min(at, key=lambda rank: at[rank])
        end = outcomes[first]
        if isinstance(end, Failed):
            error = end.exception()
            error.add_note(f"rank {first} of {size} failed first, in {name}:\n{end.text.rstrip()}")
        else:
            assert isinstance(end, Died)
            error = AxesError(f"{name}: rank {first} of {size} {end.summary}")
    note = _others(outcomes, first)
    if note:
        error.add_note(note)
    return error


def _others(outcomes: Sequence[Outcome], first: int | None) -> str:
    """How the ranks but `first` ended, those that ended alike together."""
    alike: dict[str, list[int]] = {}
    for rank, end in enumerate(outcomes):
        if rank != first:
            alike.setdefault(_ending(end), []).append(rank)
    return "\n".join(f"{_ranks(ranks)} {ending}" for ending, ranks in alike.items())


def _ending(end: Outcome) -> str:
    if isinstance(end, Finished):
        return "finished"
    if isinstance(end, Failed):
        return f"failed: {end.summary}"
    if isinstance(end, Died):
        return end.summary
    return "hadn't finished" + (f", most recent call first:\n{end.stack}" if end.stack else "")


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


# ---------------------------------------------------------------------------- the rank's side


@dataclass(frozen=True)
class Place:
    """What a process needs to know to become a rank."""

    rank: int
    world_size: int
    device_type: str
    port: int
    environ: dict[str, str]
    argv: list[str]
    path: list[str]
    directory: str
    main: Main | None


def serve_rank(channel: socket.socket, stacks: int) -> None:
    """Takes a place, then runs calls until the channel closes. Runs in a forked process."""
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    message = forkserver.receive(channel)
    if message is None:
        return
    place: Place = loads(message)
    forkserver.send(channel, _attempt(place.rank, _join, place))
    while (call := forkserver.receive(channel)) is not None:
        forkserver.send(channel, _attempt(place.rank, _run, call, place.main))


def _run(call: bytearray, main: Main | None) -> object:
    function, arguments = loads(call, main)
    return function(*arguments)


def _attempt(rank: int, work: Callable[..., object], *args: object) -> bytes:
    """How `work(*args)` on this rank ended, as a message."""
    try:
        value = work(*args)
    except BaseException as error:  # SystemExit too: a rank that leaves early has failed
        return dumps(Failed.of(error))
    finally:
        forkserver.flush()
    try:
        return dumps(Finished(value))
    except Exception as error:
        wrong = AxesError(
            f"what rank {rank} returned, a {type(value).__qualname__}, can't be sent back: "
            f"{error}. Return plain data or plain tensors"
        )
        wrong.__cause__ = error
        return dumps(Failed.of(wrong))


def _join(place: Place) -> None:
    """Makes this process the rank: environment, threads, device, default process group."""
    os.environ.clear()
    os.environ.update(place.environ | _environment(place))
    os.chdir(place.directory)
    sys.path[:] = place.path
    sys.argv[:] = place.argv
    tempfile.tempdir = None  # asked for again, of this environment

    import torch
    import torch.distributed as dist

    if os.environ["OMP_NUM_THREADS"].isdecimal():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "numpy" in sys.modules:  # all forks of one process have its random numbers
        sys.modules["numpy"].random.seed()
    if place.device_type == "cuda":
        torch.cuda.set_device(place.rank)
    store = dist.TCPStore("127.0.0.1", place.port, is_master=False)
    # Under a prefix: a call that destroys the group and starts its own by the environment meets a
    # store without the first one's addresses.
    dist.init_process_group(
        BACKENDS[place.device_type],
        store=dist.PrefixStore("axes.launch", store),
        rank=place.rank,
        world_size=place.world_size,
    )


def _environment(place: Place) -> dict[str, str]:
    """What torchrun would set, and the ways to talk within one machine."""
    local = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    defaults = {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": local} if local else {})
    return {name: place.environ.get(name, value) for name, value in defaults.items()} | {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent hosts the store, not rank 0
    }
