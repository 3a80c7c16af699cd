"""The trace of a running job: each collective that axes issues, one line of a file for each.

    AXES_TRACE=trace.jsonl python train.py          # writes trace.0.jsonl, trace.1.jsonl, ...
    axes.debug(trace="/tmp/{rank}.jsonl")           # the same from a line of the program
    python -m axes trace trace.*.jsonl              # says what took the time, and who waited for whom

A line is a JSON object. What repeats is said once, in lines of its own, and has a number:

    {"axes_trace": 1, "rank": 0, "world": 4, ...}            the header: clocks, host
    {"op": 0, "what": "psum over 'tp' ...", "axis": "tp", "ranks": [0, 1], "in": 16, "out": 16, ...}
    {"at": 0, "place": "train.py:31 in step"}
    {"of": 1, "parts": ["axes.rearrange 'b s@tp d -> b s d'"]}
    {"op": 0, "at": 0, "of": 1, "back": 0, "t": 1200, "ns": 90100}

The last is an event: `t` nanoseconds after the header's clock it was issued, after `ns` of them the call returned. A
number 0 is none: no line of the user's, no expression. `in` and
`out` are the bytes that this rank receives and sends, of the least that the collective can do with.

The file is memory that is mapped, so that what is written outlives the process however it ends; nothing is to be
flushed. `ns` is null until the collective has ended: who is killed in one has said in which. A file that its process
hasn't closed ends with zeros.

On an accelerator a call returns before its collective has ended; `gpu` is then the nanoseconds between two events on
the stream that it was issued to, once they are known.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import multiprocessing.util
import os
import platform
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from types import CodeType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from axes.algebra.errors import AxesError
from axes.extension import Operation, shown
from axes.runtime.torch_private import backward_pass
from axes.runtime.watching import Part, context, line_of_code, part_said, passed_files, user_frame

VERSION = 1
"""Of the file; a reader refuses others."""

WINDOW = 2**20
"""Bytes of the file that are mapped at once: some eight thousand events."""

_MOST = 65536
"""Different operations, places or expressions that are remembered: then they are said once more."""


_OWN = 5
"""Frames of axes at the top of the stack when an event begins, at least."""

_NULL = b"         null"
_WIDTH = len(_NULL)


class Recorder:
    """Writes the trace of this process to a file.

    open: the recorders of this process by the path that was asked for, until it isn't any more. begun: the last files
    that it has begun, in which it goes on; it writes over those of a job before.
    """

    open: ClassVar[dict[str, Recorder]] = {}
    begun: ClassVar[deque[Path]] = deque(maxlen=4096)

    def __init__(self, path: str):
        self.path = Path(path)
        self._lock = threading.Lock()
        self._ops: dict[Operation, int] = {}
        self._lines: dict[bytes, int] = {}
        self._places: dict[tuple[int, int], int] = {}
        self._codes: dict[int, CodeType] = {}
        self._parts: dict[tuple[Part, ...], int] = {}
        self._ends: deque[tuple[Any, Any, Any, int]] = deque()
        self._numbers = self._used = self._start = 0
        try:
            again = self.path in Recorder.begun
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | (0 if again else os.O_TRUNC), 0o644)
            self._start = os.fstat(self._file).st_size // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            self._used = os.fstat(self._file).st_size - self._start
            self._map()
        except OSError as error:
            raise AxesError(f"the trace can't be written: {error}. It needs a file that can be mapped") from error
        except ValueError as error:  # Python's, for text that is no path: one with "\\0", or a lone surrogate
            raise AxesError(f"the trace can't be written: {shown(path)} is no path of a file ({error})") from error
        if not again:
            Recorder.begun.append(self.path)
        self._clock = perf_counter_ns()
        self._put(_line(self._header()))

    def _header(self) -> dict[str, Any]:
        rank, world = _place_in_job()
        clocks = {"clock": _clock_of_machine(), "start": self._clock, "wall": time.time_ns()}
        told = {"host": platform.node(), "pid": os.getpid(), "torch": str(torch.__version__)}
        return {"axes_trace": VERSION, "rank": rank, "world": world, **told, **clocks}

    # events

    def hear(self, operation: Operation) -> Callable[[], None] | None:
        """Writes that a collective is issued; of a plan of several steps, these are. Gives what ends it."""
        if not operation.by:
            return None
        # Each call that this makes, and each frame that it passes, is a part of what a trace costs.
        number = self._ops.get(operation) or self._number_of("op", _described(operation), self._ops, operation)
        at = of = 0
        frame: Any = None
        try:
            frame = sys._getframe(_OWN)
            while passed_files[frame.f_code.co_filename]:
                frame = frame.f_back
        except (KeyError, AttributeError, ValueError):  # a file that isn't known yet, or no frame of the user's
            frame = user_frame()
        if frame is not None:
            code, instruction = frame.f_code, frame.f_lasti
            at = self._places.get((id(code), instruction)) or self._number_of_place(code, instruction)
        if context.parts:
            inside = tuple(context.parts)
            of = self._parts.get(inside) or self._number_of(
                "of", {"parts": [*map(part_said, inside)]}, self._parts, inside
            )
        form, behind, stream = _EVENT, _END_AT, None
        if operation.device != "cpu" and (stream := _recorded_on(operation.device)) is not None:
            form, behind = _EVENT_ON_STREAM, _GPU_AT  # the device says when it is done
        back, now = backward_pass() >= 0, perf_counter_ns()
        with self._lock:
            text = form % (number, at, of, back, now - self._clock)
            stop = self._used + len(text)
            if stop > self._room:
                stop = self._move_on(len(text))
            window = self._window
            window[self._used : stop] = text
            self._used = stop
        return functools.partial(self._end, window, stop - behind, now, stream)

    def _end(self, window: mmap.mmap, at: int, began: int, stream: Any) -> None:
        """Writes how long it has taken, where its time goes. Who fails never comes here."""
        window[at : at + _WIDTH] = b"%13d" % (perf_counter_ns() - began)
        if stream is not None:
            self._ends.append((stream, _recorded_on(stream.device.type), window, at + _WIDTH + len(_GPU)))
            self._read_streams()

    def _read_streams(self) -> None:
        """Writes the times on the device that are known by now."""
        with self._lock:
            while self._ends and self._ends[0][1].query():
                first, last, window, at = self._ends.popleft()
                window[at : at + _WIDTH] = b"%13d" % int(first.elapsed_time(last) * 1e6)

    # what repeats

    def _number_of(self, kind: str, said: dict[str, Any], known: dict[Any, int], key: Any) -> int:
        """The number of an operation, a place or an expression, in a line of its own."""
        line = _line({kind: 0, **said})
        with self._lock:
            number = self._lines.get(line)
            if number is None:
                number = self._numbers = self._numbers + 1
                with_room(self._lines)[line] = number
                self._put(_line({kind: number, **said}))
            with_room(known)[key] = number
        return number

    def _number_of_place(self, code: CodeType, instruction: int) -> int:
        if len(self._codes) >= _MOST:
            self._places.clear()
            self._codes.clear()
        self._codes[id(code)] = code  # which lives as long as its places are known, so that no other has its id
        said = {"place": line_of_code(code, instruction)}
        return self._number_of("at", said, self._places, (id(code), instruction))

    # the file

    def _put(self, text: bytes) -> None:
        """Writes a line, which ends at `_used`."""
        stop = self._used + len(text)
        if stop > self._room:
            stop = self._move_on(len(text))
        self._window[self._used : stop] = text
        self._used = stop

    def _move_on(self, size: int) -> int:
        """Goes on in the next window, from the page in which a line of `size` bytes begins; where that ends."""
        skipped = self._used // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        self._start, self._used = self._start + skipped, self._used - skipped
        try:
            self._map(size)
        except OSError as error:
            # A job isn't ended for its trace: the last window is written over from here on, and thrown away.
            warnings.warn(f"the trace {self.path} ends here: {error}", stacklevel=2)
            self._end_file()
            self._map(size)
        return self._used + size

    def _map(self, least: int = 0) -> None:
        """Has memory that is the file from `_start`, with room for more lines. `OSError` where there is none.

        Behind the end of the trace it is memory that is nobody's.
        """
        size = self._used + least + WINDOW
        if self._file < 0:
            self._window = mmap.mmap(-1, size)
        else:
            size = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            if hasattr(os, "posix_fallocate"):
                # A page without a place on the disk would end the process when it is written.
                os.posix_fallocate(self._file, self._start, size)
            else:
                os.ftruncate(self._file, self._start + size)
            self._window = mmap.mmap(self._file, size, offset=self._start)
        self._room = len(self._window)

    def close(self) -> None:
        """Cuts the file where the trace ends. Times on a device that aren't known yet stay null."""
        self._read_streams()
        with self._lock:
            if self._file >= 0:
                self._end_file()
                self._used = 0
                self._map()

    def _end_file(self) -> None:
        os.ftruncate(self._file, self._start + self._used)
        self.leave()

    def leave(self) -> None:
        """In a process that was forked: the file is its parent's."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


_EVENT_BEGINS = b'{"op":%d,"at":%d,"of":%d,"back":%d,"t":%d,"ns":' + _NULL
_GPU = b',"gpu":'
_EVENT = _EVENT_BEGINS + b"}\n"
_EVENT_ON_STREAM = _EVENT_BEGINS + _GPU + _NULL + b"}\n"
_END_AT = len(_NULL + b"}\n")
_GPU_AT = len(_NULL + _GPU + _NULL + b"}\n")


def _described(operation: Operation) -> dict[str, Any]:
    """What the line of an operation's number says of it."""
    ranks = operation.ranks
    listed = {"start": ranks.start, "stop": ranks.stop, "step": ranks.step} if isinstance(ranks, range) else ranks
    said: dict[str, Any] = {"what": operation.what, "kind": operation.kind, "by": operation.by, "axis": operation.axis}
    said |= {"group": operation.group, "ranks": listed, "dtype": operation.dtype, "step": operation.step}
    said |= {"in": operation.bytes_in, "out": operation.bytes_out}
    return said | {
        name: True for name, wanted in (("later", operation.later), ("apart", not operation.together)) if wanted
    }


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def with_room(known: dict[Any, Any]) -> dict[Any, Any]:
    """What is remembered, emptied where it has grown too large."""
    if len(known) >= _MOST:
        known.clear()
    return known


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

    >>> path_for("/tmp/trace.jsonl", 3), path_for("{rank}/trace", 3), path_for("trace", 12)
    ('/tmp/trace.3.jsonl', '3/trace', 'trace.12')
    """
    if "{rank}" in wanted:
        return wanted.replace("{rank}", str(rank))
    path = Path(wanted)
    if path.name in ("", ".."):
        raise AxesError(f"the trace can't be written: {shown(wanted)} is a folder; write the path of a file")
    return str(path.with_name(f"{path.stem}.{rank}{path.suffix}"))


def recorder(wanted: str) -> Recorder:
    """That of the file which is asked for; made where there is none yet. `AxesError` where it can't be."""
    return Recorder.open.get(wanted) or _opened(wanted)


_opening = threading.Lock()


def _opened(wanted: str) -> Recorder:
    """The recorder of a path; of threads that begin at the same time one makes it."""
    with _opening:
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
