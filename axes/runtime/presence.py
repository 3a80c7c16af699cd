"""Where this process waits for others: at which barriers, and whether another of its threads may come to one meanwhile.

    with staying(rank, key, "psum over 'tp'", "0:4:1"):
        stays(rank)                             # {key: ("psum over 'tp'", "0:4:1")}, and those of other threads

A rank that waits at one barrier can't come to another, so ranks that wait for one another in a circle wait for ever;
unless a rank has more than one thread that calls: then another of them may still come.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

OWN = "axes: "
"""How the names of threads begin that axes itself has made: they wait for the store, and come to no barrier."""


class _Here:
    """By rank the barriers at which threads of this process wait; by thread the rank for which it has come to one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stays: dict[int, dict[str, tuple[str, str, threading.Thread]]] = {}
        self.came: weakref.WeakKeyDictionary[threading.Thread, int] = weakref.WeakKeyDictionary()


_here = _Here()


@contextlib.contextmanager
def staying(rank: int, key: str, subject: str, members: str) -> Iterator[None]:
    """While the block lasts, this thread waits at the barrier `key`, for the members."""
    thread = threading.current_thread()
    with _here.lock:
        _here.came[thread] = rank
        _here.stays.setdefault(rank, {})[key] = (subject, members, thread)
    try:
        yield
    finally:
        with _here.lock:
            _here.stays[rank].pop(key, None)


def stays(rank: int) -> dict[str, tuple[str, str]]:
    """The barriers at which threads of this process wait for the rank: subject and members of each."""
    with _here.lock:
        return {key: (subject, members) for key, (subject, members, _) in _here.stays.get(rank, {}).items()}


def is_alone(rank: int, waited: float) -> bool:
    """Whether the rank waits with one thread, and no other one is known to call what ranks do together.

    A thread counts that has come to a barrier, or that the program waits for before it ends; a daemon that hasn't come
    yet for a while alone, since most never do. `waited`: for how many seconds the rank waits. The main thread waits
    itself where autograd has its own threads run a backward pass.
    """
    with _here.lock:
        here = [thread for _, _, thread in _here.stays.get(rank, {}).values()]
        if len(here) != 1:
            return False
        others = [each for each in threading.enumerate() if each is not here[0] and not each.name.startswith(OWN)]
        main = threading.main_thread()
        of_autograd = isinstance(here[0], threading._DummyThread)  # one that Python hasn't started
        for thread in others:
            of = _here.came.get(thread)
            if thread is main:
                counts = of == rank and not of_autograd
            else:
                counts = of == rank or (of is None and (not thread.daemon or waited < _FOR_DAEMONS))
            if counts:
                return False
        return True


_FOR_DAEMONS = 5.0
"""Seconds in which a daemon thread may still come to its first barrier."""
