"""A process that has imported torch once, and forks others that have it too.

Importing torch, DTensor, FSDP and dynamo takes seconds, and every rank would pay for it. The fork
server pays once: an agent (`axes.runtime.agent`) that is forked from it starts in milliseconds, and
forks the ranks. The server ends with the process that started it, however that ended.

`multiprocessing` does the forking, which is safe in a process of one thread. Its own fork server
isn't used: there is one per program, whose preload list is the user's; starting a process settles
the program's default start method, runs the program's script again and waits for ever where the
server is stopped; and its socket is a file, which stays behind when the program is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from axes.algebra.errors import AxesError
from axes.runtime.agent import run_agent, signs_of_end

PRELOADED = ("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "torch._inductor")
"""What a server imports, beside all of axes. None of these starts a thread, initializes an accelerator (a fork would
break either) or starts a process (`torch._inductor.async_compile` would). A program whose ranks import more may name it
here, before its first launch."""

_starting = threading.Lock()


class ForkServer:
    """The fork server, as the process that started it sees it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        path = [os.path.abspath(folder) for folder in sys.path]
        code = f"import os, sys; sys.path[:] = {path!a}; from axes.runtime.forkserver import serve"
        # OpenMP and OpenBLAS make their threads when they are loaded: the server must have one
        # thread to fork safely. NVML answers "is there a GPU?" without initializing CUDA.
        environ = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        with theirs:
            self._process = subprocess.Popen(
                # What it imported stays out of collection: bindings that count what is left at the end of Python
                # (triton's, with which torch 2.15 comes) would print a page of it. So this isn't such an end.
                [sys.executable, "-c", f"{code}; serve({theirs.fileno()}, {os.getpid()}, {PRELOADED!a}); os._exit(0)"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | environ,
                start_new_session=True,  # Ctrl-C in a terminal interrupts this process alone
            )
        self.pid = self._process.pid
        self._lock = threading.Lock()
        atexit.register(self.stop)

    @property
    def running(self) -> bool:
        """Whether the server lives; maybe it still imports torch."""
        return self._process.poll() is None

    def check(self) -> None:
        """Raise `AxesError` where the server is stopped. (macOS tells from Python 3.13 on.)"""
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        if self.running and hasattr(os, "waitid") and os.waitid(os.P_PID, self.pid, options):
            raise AxesError(
                f"the fork server of axes.launch, process {self.pid}, is stopped: let it go on with "
                f"`kill -CONT {self.pid}`, or end it with `kill -KILL {self.pid}` for a new one"
            )

    def fork(self) -> socket.socket:
        """Ask for an agent; the channel to it, which ends when the agent is gone. Returns at once."""
        ours, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):  # what was printed before stands before theirs
            with contextlib.suppress(AttributeError, ValueError, OSError):  # none, closed, a dead pipe
                stream.flush()
        with theirs, self._lock, contextlib.suppress(ConnectionError):  # dead: so `ours` ends here
            socket.send_fds(self._control, [b"f"], [theirs.fileno(), 1, 2])
        return ours

    def stop(self) -> None:
        """End the server, but no agent. (In a fork of this process, whose child it isn't, do nothing.)"""
        atexit.unregister(self.stop)
        self._control.close()
        self._process.kill()
        self._process.wait()


def fork_server() -> ForkServer:
    """This process's fork server, started if there is none."""
    with _starting:
        server = _server_of(os.getpid())
        server.check()
        if not server.running:
            server.stop()
            _server_of.cache_clear()
            server = _server_of(os.getpid())
        return server


@functools.lru_cache(maxsize=1)
def _server_of(pid: int) -> ForkServer:
    return ForkServer()  # by pid: a forked copy of this process needs its own


def serve(control_fd: int, owner: int, preloaded: tuple[str, ...]) -> None:
    """Import these modules, and fork agents on request until the process `owner` is gone. Runs in the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # a fifth of the time of these imports would be looking for garbage
    for name in (*preloaded, "axes.runtime.bridge"):
        importlib.import_module(name)
    library = importlib.import_module("axes")
    for name in library.__all__:  # whose modules are imported when a name is first asked for
        getattr(library, name)
    gc.freeze()  # no collector of a rank will write to what it shares with the others

    control = socket.socket(fileno=control_fd)
    # A sentinel of multiprocessing isn't ready while a rank lives, which has a copy; a SIGCHLD comes.
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler of ours, so that `wake` is written
    signal.set_wakeup_fd(wake.fileno())
    owner_gone = signs_of_end(owner)
    channels: dict[BaseProcess, int] = {}
    while True:
        ready = wait([control, ended, *owner_gone])
        if any(sign in ready for sign in owner_gone):
            return
        if ended in ready:
            ended.recv(4096)
            for process in channels.keys() - set(multiprocessing.active_children()):  # which reaps
                with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in its group
                    os.killpg(process.ident, signal.SIGKILL)  # type: ignore[arg-type] # it was started
                os.close(channels.pop(process))  # only now does the launching process see the end
        if control in ready:
            request, fds, *_ = socket.recv_fds(control, 1, 3)
            if not request:
                return
            inherited = [control.fileno(), ended.fileno(), wake.fileno(), *owner_gone, *channels.values()]
            process = multiprocessing.get_context("fork").Process(target=_become_agent, args=(fds, owner, inherited))
            process.start()
            channels[process] = fds[0]
            for fd in fds[1:]:
                os.close(fd)


def _become_agent(fds: list[int], owner: int, inherited: list[int]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd in inherited:
        os.close(fd)
    channel, *outputs = fds
    os.set_inheritable(channel, False)  # received descriptors survive exec unless told otherwise
    for number, fd in enumerate(outputs, start=1):
        os.dup2(fd, number)
        os.close(fd)
    run_agent(Connection(channel), owner)
