"""A process that has imported torch once, and forks children that have it too.

Importing torch, DTensor, FSDP and dynamo takes seconds, and eight processes on two cores would
each pay for it. The fork server pays once; its children start in milliseconds. It is one process
with one thread, so that forking it is safe, and it does three things: fork on request, tell the
requester each child's pid and exit code, and end every child when the requester is gone, however
that died.

    server = fork_server("axes.runtime.pool", "serve_rank")
    child = server.fork()           # runs axes.runtime.pool.serve_rank(channel, stacks) in a child
    child.send(b"work")             # the child's `channel` is the other end of this socket

`multiprocessing` has a fork server as well. This one isn't shared with the user's own use of that,
leaves no file (its socket has no name), shows a child's output where the requester's output goes
*now*, ends a child's own children with it, and ends all when the requester is killed.

It stays for the next launch, without a child and asleep, and ends with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable

PRELOADED = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch._inductor",
)
"""What the server imports. None of these starts a thread, initializes an accelerator (a fork would
break either) or starts a process (`torch._inductor.async_compile` would)."""

LOST = -1000
"""The exit code of a child whose server died, so that nobody saw it end."""

Work = Callable[[socket.socket, int], None]
"""What a child runs: it gets its end of the channel, and the descriptor for its stack."""

_NUMBER = struct.Struct("q")
_CHUNK = 1 << 20
_starting = threading.Lock()


class Child:
    """A forked process, as its requester sees it.

    `channel` carries messages both ways, `status` the pid and later the exit code, `stacks` what
    the child writes when it is asked where it is. All three can be selected; nothing here blocks
    but `send`.
    """

    def __init__(self, channel: socket.socket, status: socket.socket, stacks: int):
        self.channel, self.status, self.stacks = channel, status, stacks
        self.pid: int | None = None
        self.exit_code: int | None = None
        self._received = bytearray()

    def read_status(self) -> None:
        """Takes in one report of the server: first the pid, then the exit code."""
        report = self.status.recv(_NUMBER.size, socket.MSG_WAITALL)
        if not report:
            self.exit_code = LOST if self.exit_code is None else self.exit_code
        elif self.pid is None:
            (self.pid,) = _NUMBER.unpack(report)
        else:
            (self.exit_code,) = _NUMBER.unpack(report)

    def send(self, message: bytes, timeout: float | None) -> None:
        """Sends a message. `TimeoutError` if the child doesn't read, `OSError` if it is gone."""
        self.channel.settimeout(timeout)
        self.channel.sendall(_NUMBER.pack(len(message)))
        self.channel.sendall(message)

    def receive(self) -> bytes | None:
        """The next message if all of it is here, else None. `EOFError` where no more will come."""
        # Python waits for a socket that has a timeout, as `send` gives it, even where the call says not to.
        self.channel.setblocking(False)
        while True:
            head = len(self._received) >= _NUMBER.size
            end = _NUMBER.size + _NUMBER.unpack_from(self._received)[0] if head else 0
            if head and len(self._received) >= end:
                message = bytes(memoryview(self._received)[_NUMBER.size : end])
                del self._received[:end]
                return message
            try:
                chunk = self.channel.recv(_CHUNK)
            except BlockingIOError:
                return None
            except ConnectionError:  # it died with something of ours unread
                chunk = b""
            if not chunk:
                raise EOFError
            self._received += chunk

    def signal(self, number: int) -> None:
        """Signals the child if it runs; SIGKILL ends its own children with it."""
        if self.pid is None or self.exit_code not in (None, LOST):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended just now
            os.killpg(self.pid, number) if number == signal.SIGKILL else os.kill(self.pid, number)

    def close(self) -> None:
        """Closes this side. The server ends a child that still runs, or that it has yet to fork."""
        if self.stacks >= 0:
            self.channel.close()
            self.status.close()
            os.close(self.stacks)
            self.stacks = -1


def send(channel: socket.socket, message: bytes) -> None:
    """Sends a message from a child."""
    channel.sendall(_NUMBER.pack(len(message)))
    channel.sendall(message)


def receive(channel: socket.socket) -> bytearray | None:
    """Waits for a message in a child; None where the requester closed the channel."""
    head = _read(channel, _NUMBER.size)
    return None if head is None else _read(channel, _NUMBER.unpack(head)[0])


def _read(channel: socket.socket, size: int) -> bytearray | None:
    found = bytearray(size)
    view = memoryview(found)
    while view:
        count = channel.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return found


def flush() -> None:
    """Shows what was printed, where there is still somewhere to show it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # none, closed, a dead pipe
            stream.flush()


class ForkServer:
    """The requester's side of a fork server, whose children call `function` of `module`."""

    def __init__(self, module: str, function: str):
        ours, theirs = socket.socketpair()
        path = json.dumps([os.path.abspath(folder) for folder in sys.path])
        command = (
            f"import sys, json; sys.path[:] = json.loads({path!r}); "
            f"from axes.runtime.forkserver import serve; "
            f"serve({theirs.fileno()}, {module!r}, {function!r})"
        )
        # OpenMP and OpenBLAS make their threads when they are loaded: the server must have one
        # thread to fork safely. NVML answers "is there a GPU?" without initializing CUDA.
        environ = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        with theirs:
            # A session of its own: Ctrl-C in a terminal interrupts the requester alone, which then
            # ends the children in order.
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environ,
                start_new_session=True,
            )
        self._control = ours
        self._lock = threading.Lock()
        self._owner = os.getpid()
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server lives (maybe still importing)."""
        return self._process.poll() is None

    def fork(self) -> Child:
        """Asks for a child. Returns at once; `Child.status` says when it is there."""
        ours, theirs = socket.socketpair()
        status, status_end = socket.socketpair()
        stacks, stacks_end = os.pipe()
        os.set_blocking(stacks, False)
        flush()  # so that what was printed before stands before what the child prints
        with theirs, status_end, self._lock:
            try:
                fds = [theirs.fileno(), status_end.fileno(), stacks_end, 1, 2]
                socket.send_fds(self._control, [b"f"], fds)
            except ConnectionError:
                pass  # the server is dead: the status, which ends here, says so
            finally:
                os.close(stacks_end)
        return Child(ours, status, stacks)

    def stop(self) -> None:
        """Ends the server and all children. It also ends by itself when this process does."""
        if self._owner != os.getpid():  # a fork of the owner must not stop the owner's server
            return
        atexit.unregister(self.stop)
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:  # still importing
            self._process.kill()
            self._process.wait()


def fork_server(module: str, function: str) -> ForkServer:
    """This process's fork server for `module.function`, started if there is none."""
    with _starting:
        server = _server_of(os.getpid(), module, function)
        if not server.running:
            server.stop()
            _server_of.cache_clear()
            server = _server_of(os.getpid(), module, function)
        return server


@functools.cache
def _server_of(pid: int, module: str, function: str) -> ForkServer:
    return ForkServer(module, function)  # by pid: a forked copy of this process needs its own


# ---------------------------------------------------------------------------- in the server


def serve(control_fd: int, module: str, function: str) -> None:
    """Forks on request until the requester is gone. Runs in the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # a fifth of the time of these imports would be looking for garbage
    work: Work = getattr(importlib.import_module(module), function)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # no collector of a child will write to what it shares with the others

    control = socket.socket(fileno=control_fd)
    ended, wake = socket.socketpair()
    ended.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler of ours, so that `wake` is written
    signal.set_wakeup_fd(wake.fileno())
    statuses: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj: key.data for key, _ in selector.select()}
            for pid in ready.values():
                if pid is not None:  # its requester has closed the status
                    _end_group(pid)
                    selector.unregister(statuses[pid])
            if ended in ready:
                ended.recv(4096)
                _reap(statuses, selector)
            if control in ready:
                request, fds, _, _ = socket.recv_fds(control, 1, 5)
                if not request:
                    break
                if _fork(fds, statuses, selector):
                    selector.close()
                    for ours in (control, ended, wake, *statuses.values()):
                        ours.close()
                    _run_child(fds, work)
    for pid in statuses:
        _end_group(pid)


def _reap(statuses: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while statuses:
        pid, code = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        _end_group(pid)  # its own children, if it left any: the number is theirs while they live
        status = statuses.pop(pid)
        if status in selector.get_map():
            selector.unregister(status)
        _report(status, os.waitstatus_to_exitcode(code))
        status.close()


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in it
        os.killpg(pid, signal.SIGKILL)


def _report(status: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the requester doesn't want to know any more
        status.sendall(_NUMBER.pack(number))


def _fork(fds: list[int], statuses: dict[int, socket.socket], selector: selectors.BaseSelector) -> bool:
    """Whether this is the child."""
    pid = os.fork()
    if pid == 0:
        return True
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it did so itself, and ended
        os.setpgid(pid, pid)  # on both sides of the fork, so that no one sees it without
    channel, status, stacks, out, err = fds
    statuses[pid] = socket.socket(fileno=status)
    selector.register(statuses[pid], selectors.EVENT_READ, pid)
    _report(statuses[pid], pid)
    for fd in (channel, stacks, out, err):
        os.close(fd)
    return False


def _run_child(fds: list[int], work: Work) -> None:
    channel, status, stacks, out, err = fds
    code = 1
    try:
        os.setpgid(0, 0)
        gc.enable()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out, 1)
        os.dup2(err, 2)
        for fd in (status, out, err):
            os.close(fd)
        for fd in (channel, stacks):  # received descriptors survive exec unless told otherwise
            os.set_inheritable(fd, False)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        work(socket.socket(fileno=channel), stacks)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Without the destructors and exit handlers of the server, of which this is a copy.
        flush()
        os._exit(code)
