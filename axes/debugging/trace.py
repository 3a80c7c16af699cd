"""The trace of a running job: each collective that axes issues, in a file for each rank.

    AXES_TRACE=trace.json python train.py           # writes trace.0.json, trace.1.json, ...
    axes.debug(trace="/tmp/{rank}.json")            # the same from a line of the program
    python -m axes trace trace.*.json               # says what took the time, and who waited for whom

A file is in Chrome's own format, so Perfetto and `chrome://tracing` open it as it is: an array, an event on each line,
which needs no end.

    [
    {"ph":"M","name":"process_name","pid":0,"args":{"name":"rank 0","axes_trace":2,"world":4,"clock":...}},
    {"ph":"M","name":"group","pid":0,"args":{"number":1,"group":"...","ranks":[0,1]}},
    {"ph":"B","pid":0,"name":"psum over 'tp' of [3] float32","cat":"tp","args":{"group":1,...},"tid":7,"ts":12.345},
    {"ph":"E","pid":0,"tid":7,"ts":102.445}

A collective is a line `B` when it is issued, and a line `E` when the call has returned. A line is one call of the
operating system: what is written outlives the process however it ends, and who is killed in a collective has said in
which. `in` and `out` are the bytes that this rank receives and sends, of the least that the collective can do with.

On an accelerator a call returns before its collective has ended. How long that took between two events on the stream
that it was issued to is a line `i` with the `ts` of its `B`, once it is known.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing.util
import os
import platform
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from types import CodeType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from axes import AxesError
from axes.extension import Operation, context, line_of_code, part_said, passed_files, shown, torch_private, user_frame

VERSION = 2
"""Of the file; a reader refuses others."""

_MOST = 65536
"""Different lines that are remembered: then they are made anew."""

_OWN = 5
"""Frames of axes at the top of the stack when a collective begins, at least."""


class Recorder:
    """Writes the trace of this process to a file.

    open: the recorders of this process by the path that was asked for, until it isn't any more. begun: the last files
    that it has begun, in which it goes on; it writes over those of a job before.
    """

    open: ClassVar[dict[str, Recorder]] = {}
    begun: ClassVar[deque[str]] = deque(maxlen=4096)

    def __init__(self, path: str):
        self.path = path
        self._rank, world = _place_in_job()
        self._known: dict[Any, tuple[bytes, CodeType | None]] = {}  # code that lives keeps its id for itself
        self._groups: dict[tuple[str, Sequence[int]], int] = {}
        self._on_device: deque[tuple[Any, Any, int, float]] = deque()
        goes_on = path in Recorder.begun
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if goes_on else os.O_TRUNC), 0o644)
        except OSError as error:
            raise AxesError(f"the trace can't be written: {error}") from error
        except ValueError as error:  # Python's, for text that is no path: one with "\0", or a lone surrogate
            raise AxesError(f"the trace can't be written: {shown(path)} is no path of a file ({error})") from error
        if not goes_on:
            Recorder.begun.append(path)
            clocks = {"clock": _clock_of_machine(), "wall": time.time_ns() - perf_counter_ns()}
            told = {"host": platform.node(), "process": os.getpid(), "torch": str(torch.__version__)}
            about = {"name": f"rank {self._rank}", "axes_trace": VERSION, "rank": self._rank, "world": world}
            self._write(b"[\n" + self._line("M", name="process_name", args={**about, **told, **clocks}))

    def hear(self, operation: Operation) -> Callable[[], None] | None:
        """Writes that a collective is issued; of a plan of several steps, these are. Gives what writes its end."""
        if not operation.by:
            return None
        # Each call that this makes, and each frame that it passes, is a part of what a trace costs.
        frame: Any = None
        try:
            frame = sys._getframe(_OWN)
            while passed_files[frame.f_code.co_filename]:
                frame = frame.f_back
        except (KeyError, AttributeError, ValueError):  # a file that isn't known yet, or no frame of the user's
            frame = user_frame()
        code, instruction = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
        key = operation, id(code), instruction, tuple(context.parts), torch_private.backward_pass() >= 0
        text, _ = self._known.get(key) or self._described(key, code)
        event = None if operation.device == "cpu" else _recorded_on(operation.device)
        thread, now = threading.get_ident(), perf_counter_ns() / 1000
        self._write(text % (thread, now))
        return functools.partial(self._end, thread, now, event)

    def _end(self, thread: int, began: float, event: Any) -> None:
        """Writes that the call has returned. Who fails never comes here."""
        self._write(b',\n{"ph":"E","pid":%d,"tid":%d,"ts":%.3f}' % (self._rank, thread, perf_counter_ns() / 1000))
        if event is not None:
            self._on_device.append((event, _recorded_on(event.device.type), thread, began))
            self._read_streams()

    def _read_streams(self) -> None:
        """Writes the times on the device that are known by now."""
        while self._on_device and self._on_device[0][1].query():
            first, last, thread, began = self._on_device.popleft()
            took = {"us": first.elapsed_time(last) * 1e3}
            self._write(
                b",\n" + self._line("i", name="on the device", s="t", tid=thread, ts=round(began, 3), args=took)
            )

    def _described(self, key: Any, code: CodeType | None) -> tuple[bytes, CodeType | None]:
        """The line of a collective, but for its thread and its time; it is remembered by its key."""
        operation, _, instruction, parts, backward = key
        ranks = operation.ranks if isinstance(operation.ranks, range) else tuple(operation.ranks)
        group = operation.group, ranks
        if group not in self._groups:
            number = self._groups[group] = len(self._groups) + 1
            listed = {"range": [ranks.start, ranks.stop, ranks.step]} if isinstance(ranks, range) else ranks
            about = {"number": number, "group": operation.group, "ranks": listed}
            self._write(b",\n" + self._line("M", name="group", args=about))
        told = {"kind": operation.kind, "by": operation.by, "axis": operation.axis, "group": self._groups[group]}
        told |= {"dtype": operation.dtype, "step": operation.step, "in": operation.bytes_in, "out": operation.bytes_out}
        told |= {"later": operation.later, "apart": not operation.together, "backward": backward}
        told |= {"place": line_of_code(code, instruction) if code else "", "parts": [*map(part_said, parts)]}
        line = self._line("B", name=operation.what, cat=operation.axis or "-", args=told)
        if len(self._known) >= _MOST:
            self._known.clear()
        text = b",\n" + line[:-1].replace(b"%", b"%%") + b',"tid":%d,"ts":%.3f}'
        return self._known.setdefault(key, (text, code))

    def _line(self, kind: str, **said: Any) -> bytes:
        return json.dumps({"ph": kind, "pid": self._rank, **said}, separators=(",", ":")).encode()

    def _write(self, text: bytes) -> None:
        try:
            if self._file >= 0:
                os.write(self._file, text)
        except OSError as error:  # a job isn't ended for its trace
            warnings.warn(f"the trace {self.path} ends here: {error}", stacklevel=2)
            self.leave()

    def close(self) -> None:
        """Ends the file. Times on a device that aren't known yet aren't written."""
        self._read_streams()
        self.leave()

    def leave(self) -> None:
        """Closes the file as it is; in a process that was forked it is its parent's."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _place_in_job() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _clock_of_machine() -> str:
    """What is the same for all processes that read the same clock: the machine since it was started."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{platform.node()} {os.getpid()}"


def _recorded_on(device: str) -> Any:
    """An event on the current stream of a device; None while a graph is being captured, where events have no time."""
    if device == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


# what others call


def path_for(wanted: str, rank: int) -> str:
    """The file of a rank: with its number for `{rank}`, or before the suffix; `AxesError` for a folder.

    >>> path_for("/tmp/trace.json", 3), path_for("{rank}/trace", 3), path_for("trace", 12)
    ('/tmp/trace.3.json', '3/trace', 'trace.12')
    """
    if "{rank}" in wanted:
        return wanted.replace("{rank}", str(rank))
    path = Path(wanted)
    if path.name in ("", "..") or wanted.endswith(os.sep) or path.is_dir():
        raise AxesError(f"the trace can't be written: {shown(wanted)} is a folder; write the path of a file")
    return str(path.with_name(f"{path.stem}.{rank}{path.suffix}"))


_opening = threading.Lock()


def recorder(wanted: str) -> Recorder:
    """That of the file which is asked for; made where there is none yet. `AxesError` where it can't be."""
    if (known := Recorder.open.get(wanted)) is not None:
        return known
    with _opening:  # of threads that begin at the same time one makes it
        if (found := Recorder.open.get(wanted)) is None:
            found = Recorder.open[wanted] = Recorder(path_for(wanted, _place_in_job()[0]))
            # At the end of the program, and of a process that another has forked, which `atexit` doesn't serve.
            multiprocessing.util.Finalize(None, stop, (wanted,), exitpriority=0)
    return found


def stop(path: str) -> None:
    """Closes the file of a path that was asked for."""
    if (found := Recorder.open.pop(path, None)) is not None:
        found.close()


def leave_all() -> bool:
    """In a process that was forked: its parent's files are left to that. Whether there were any."""
    left = [Recorder.open.pop(path) for path in [*Recorder.open]]
    for found in left:
        found.leave()
    return bool(left)
