"""Agreement: ranks that disagree get an error that says how, on every rank, in place of a hang.

A collective that ranks enter with different ideas waits for ever and says nothing. So before
ranks rely on a common declaration or connect a process group, they compare what they hold through
the store that every `torch.distributed` job has. They do so at a *barrier*: each member *states* a
line of text, and the barrier *ends* well when all members have stated the same:

    store.compare_set(stated)            the first statement stays; another one ends the barrier
    store.append(came)                   this rank has come, and what it tells the others
    store.add(count)                     the last rank to come ends the barrier
    store.set(note)                      where this rank is
    store.check(end)                     asked ever more slowly
    store.add(left)                      the last rank to read the end removes the barrier's keys

A barrier ends once, for all: whoever comes later reads the same end. It ends badly when

- a rank states something else: at once, with both statements;
- a rank states an error of its own, with which it can't come: at once, with that error;
- the time is up: with the ranks that didn't come, and what each was last seen waiting for. The rank that
  stated first says the same in a warning after half a minute.

Rank 0 hosts the store of a job, so it leaves a failed barrier last, or the others would see a
broken connection in place of the error. A store whose host is stopped, or behind a link that is cut,
answers nothing and says nothing: so another thread asks it, and a rank waits for that thread a few
seconds longer than for the other ranks.

>>> import torch.distributed as dist
>>> member = Member(dist.HashStore(), rank=0)
>>> agree_at(member, Barrier("mesh/0", range(1), "init_mesh over rank 0"), "dp=1", timedelta(seconds=5))
[None]
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from axes.algebra.errors import DesyncError
from axes.algebra.layout import Universe

T = TypeVar("T")

LINGER_SECONDS = 5.0
"""Seconds that the host of a store stays for others, and that connecting may take longer than torch says."""

_JOBS = "the job's store"
_SILENCE_SECONDS = 1.0

_FIRST_POLL_SECONDS = 0.0005
_SLOWEST_POLL_SECONDS = 0.1
_STALLED_SECONDS = 30.0
_RANKS_SHOWN = 16
_UNSEEN = "hasn't been seen: it is still starting, has ended, is stopped, or makes no mesh"


class MissedError(DesyncError):
    """A barrier that the others have left, as this rank didn't come in time."""


def digest(ranks: Sequence[int]) -> str:
    """Sixteen characters that stand for ranks in their order; O(1) for a range.

    >>> digest(range(4)) == digest((0, 1, 2, 3)), digest((0, 1)) == digest((1, 0))
    (True, False)
    """
    ranks = Universe.of(ranks).ranks
    content = f"{ranks}".encode() if isinstance(ranks, range) else array("q", ranks).tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as a person reads them, with a digest where they don't fit.

    >>> ranks_text(range(0, 16, 2)), ranks_text((3, 1)), ranks_text((5,))
    ('ranks 0..14 step 2', 'ranks 3, 1', 'rank 5')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if isinstance(ranks, range) and len(ranks) > 2:
        return f"ranks {ranks[0]}..{ranks[-1]}" + (f" step {ranks.step}" if ranks.step > 1 else "")
    if len(ranks) <= _RANKS_SHOWN:
        return f"ranks {', '.join(map(str, ranks))}"
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    return f"{len(ranks)} ranks {shown}, ... ({digest(ranks)})"


@dataclass(frozen=True)
class Member:
    """A rank that takes part in barriers, and the store by which it reaches the others. `who` names ranks in errors."""

    store: dist.Store
    rank: int
    store_name: str = _JOBS
    who: Callable[[Sequence[int]], str] = ranks_text


@dataclass(frozen=True)
class Barrier:
    """Where `members` compare what they state.

    `key` is what all of them call it, and no other barrier. `subject` completes "rank 3 waits for ..."; `advice` says
    what to write instead. `doing` is what this rank is about to do there: the others are shown it, and compare it not.
    `attempt` is the number of barriers of its kind among these ranks before it.
    """

    key: str
    members: Sequence[int]
    subject: str
    advice: str = ""
    attempt: int = 0
    doing: str = ""

    @property
    def seen(self) -> str:
        """What others read of this rank while it is here."""
        return f"{self.subject}: {self.doing}" if self.doing else self.subject


def agree_at(
    member: Member, barrier: Barrier, statement: str | Exception, timeout: timedelta, told: Any = None
) -> list[Any]:
    """Return when every member of the barrier has stated the same; `DesyncError` on all otherwise.

    Waits `timeout` at most, and on rank 0 up to five seconds more where the barrier fails. No key of the barrier stays
    in the store when all members have read how it ended. Gives what each member has `told` the others, as JSON can say
    it, in the order of the members.

    A rank that can't come states the error that it raises: that ends the barrier for all its members, and isn't raised
    here.
    """
    limit = timeout.total_seconds()
    if len(barrier.members) == 1:
        return [told]
    if isinstance(statement, Exception):
        call = functools.partial(_refused, member, barrier, statement)
        with contextlib.suppress(DesyncError):  # the caller's own error matters more
            in_time(barrier.subject, LINGER_SECONDS, call, member.store_name)
        return [told]
    agreed = functools.partial(_agreed, member, barrier, statement, limit, told)
    return in_time(barrier.subject, limit + LINGER_SECONDS, agreed, member.store_name)


def leave_word(member: Member, text: str, seconds: float = LINGER_SECONDS) -> None:
    """Note why this rank doesn't come, for members that expect it: they read it behind "rank 3"."""
    with contextlib.suppress(DesyncError):  # the next question to the store says what is wrong with it
        in_time("a note of where a rank is", seconds, lambda: _leave_note(member, text), member.store_name)


def without_report(member: Member, barriers: Iterable[Barrier]) -> str:
    """Report that something fails that ranks do together; say who doesn't come to the first barrier that isn't over.

    They have a second for it. One that has ended, is stopped, or failed somewhere else doesn't come: each is shown with
    where it was last seen. A barrier that is over was of a failure that others had without this rank.
    """
    for barrier in barriers:
        try:
            agree_at(member, barrier, "", timedelta(seconds=1))
            break
        except MissedError:
            continue
        except DesyncError as error:  # that it failed matters more
            return f"\n{error}".replace("\n", "\n  ")
    return ""


def in_time(subject: str, seconds: float, call: Callable[[], T], store_name: str = _JOBS) -> T:
    """`call()`, which asks a store and ends by itself within `seconds`. `DesyncError` where the store, or a host, says
    nothing, or can't be reached.

    It runs on another thread, which stays behind where a host is silent.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=f"axes: {subject}", daemon=True).start()
    if not wait([outcome], seconds + _SILENCE_SECONDS).done:
        raise DesyncError(
            f"{store_name} doesn't answer in {subject}: its host, or that of a rank, is stopped, or can't be reached "
            "from here"
        )
    try:
        return outcome.result()
    except dist.DistError as error:
        host = ": the launcher where it has an agent, as torchrun has, else rank 0" if store_name == _JOBS else ""
        raise DesyncError(
            f"{store_name} can't be reached in {subject}: {first_line(error)}\n"
            f"Its host may have ended, or waits for ranks that haven't started, and says so{host}"
        ) from error


def connected(member: Member, barrier: Barrier, seconds: float, connect: Callable[[], T]) -> T:
    """`connect()`, in which torch connects the members of a barrier, at which they have agreed, within `seconds`.

    It returns when all members are connected: one that is ahead could end, and cut the connections of the others. Where
    it fails on a member it fails on all, and the error names those that report nothing.
    """
    subject = f"the roll call of {barrier.subject}"
    roll_call = replace(barrier, key=f"{barrier.key}/connected", subject=subject, advice="")

    def run() -> T:
        try:
            return connect()
        except OF_ONE_RANK as error:
            agree_at(member, roll_call, error, timedelta())
            raise
        except dist.DistNetworkError:
            raise  # of the store
        except RuntimeError as error:
            said = f"failed on rank {member.rank}, in connecting: {first_line(error)}"
            others = without_report(member, [replace(roll_call, doing=said)])
            raise DesyncError(f"{barrier.subject} {said}{others}") from error

    until = time.monotonic() + seconds
    made = in_time(barrier.subject, seconds + LINGER_SECONDS, run, member.store_name)
    agree_at(member, roll_call, "connected", timedelta(seconds=max(until - time.monotonic(), LINGER_SECONDS)))
    return made


OF_ONE_RANK = torch.OutOfMemoryError, NotImplementedError, RecursionError
"""Runtime errors of this rank alone, which no backend has for others."""


def first_line(error: Exception) -> str:
    """The first line of an error's text, else its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def failure(what: str) -> str:
    """The barrier to which ranks come where `what` they do together fails."""
    return f"the roll call after {what} failed"


# A barrier


def _agreed(member: Member, barrier: Barrier, statement: str, limit: float, told: Any) -> list[Any]:
    """State the text at the barrier and wait for its end: what ranks have told, or its error."""
    store, key, mine = member.store, barrier.key, [member.rank, statement, barrier.doing or statement]
    first = json.loads(store.compare_set(f"{key}/stated", "", json.dumps(mine)))
    store.append(f"{key}/came", json.dumps([member.rank, told]) + "\n")
    mismatch = "" if first[1] == statement else _mismatch(member, barrier, first, mine)
    if mismatch or store.add(f"{key}/count", 1) == len(barrier.members):
        _end(member, barrier, mismatch)
    _leave_note(member, f"waits for {barrier.seen}")
    error, missing = _wait_for_end(member, barrier, limit, first[0] == member.rank)
    _leave_note(member, f"was last seen when it {'failed in' if error else 'passed'} {barrier.seen}")
    every = {} if error or told is None else _came(member, barrier)
    _leave(member, barrier, len(barrier.members) - len(missing) if error else 0)
    if error:  # of several mismatches a rank shows its own
        raise (MissedError if member.rank in missing else DesyncError)(mismatch or error)
    return [every.get(rank) for rank in barrier.members]


def _refused(member: Member, barrier: Barrier, error: Exception) -> None:
    """End the barrier with the error that this rank raises."""
    said = _indented(f"{type(error).__name__}: {error}")
    _leave_note(member, f"raised in {barrier.subject}: {said}")
    _end(member, barrier, f"{member.who([member.rank])} can't take part in {barrier.subject}, it raised {said}")
    _leave(member, barrier, len(barrier.members))


def _end(member: Member, barrier: Barrier, error: str, missing: Sequence[int] = ()) -> None:
    """Ends a barrier unless it has ended, well with "". Those that are missing aren't there to read it."""
    member.store.compare_set(f"{barrier.key}/end", "", json.dumps([error, missing]))


def _wait_for_end(member: Member, barrier: Barrier, limit: float, warns: bool) -> tuple[str, list[int]]:
    """Poll, ever more slowly, since a blocking wait that times out writes warnings of its own.

    One of the ranks that wait `warns`. The time of the first that came is up first, and it reports who is missing.
    """

    def ended(patience: float) -> bool:
        return polled(lambda: member.store.check([f"{barrier.key}/end"]), patience, len(barrier.members) / 20_000)

    over = ended(min(limit, _STALLED_SECONDS))
    if not over and limit > _STALLED_SECONDS:
        if warns and (text := _missing(member, barrier, f"for {_STALLED_SECONDS:.0f} s so far")[0]):
            warnings.warn(text, stacklevel=2)
        over = ended(limit - _STALLED_SECONDS)
    if not over:
        _end(member, barrier, *_missing(member, barrier, f"within {limit:g} s"))
    return tuple(json.loads(member.store.get(f"{barrier.key}/end")))


def polled(condition: Callable[[], bool], patience: float, slowest: float = 0.0) -> bool:
    """Whether a condition becomes true within some seconds; asked ever more slowly."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        if waited >= patience:
            return False
        pause = min(max(_FIRST_POLL_SECONDS, waited / 8), max(_SLOWEST_POLL_SECONDS, slowest))
        time.sleep(min(pause, patience - waited))
    return True


def _came(member: Member, barrier: Barrier) -> dict[int, Any]:
    """The ranks that have come to a barrier, and what each tells."""
    return dict(map(json.loads, member.store.get(f"{barrier.key}/came").decode().splitlines()))


def _missing(member: Member, barrier: Barrier, how_long: str) -> tuple[str, list[int]]:
    """A text that says which members haven't come, with where each was last seen, and these members.

    All may have come, and one be gone before it was counted: then it is "", and the next barrier says who is missing.
    """
    came = _came(member, barrier)
    missing = [rank for rank in barrier.members if rank not in came]
    lines = [f"{member.who(missing)} didn't come to {barrier.subject} {how_long}:"]
    lines += [f"  {_last_seen(member, rank)}" for rank in missing[:_RANKS_SHOWN]]
    lines += [f"  {member.who(sorted(came))} waited for {barrier.seen}", barrier.advice]
    said = [(rank, text) for rank, text in sorted(came.items()) if text and isinstance(text, str)]
    lines += [f"  {member.who([rank])}: {_indented(text)}" for rank, text in said]
    return "\n".join(filter(None, lines)) if missing else "", missing


def _leave(member: Member, barrier: Barrier, present: int) -> None:
    """Says that this rank has read the end. Of `present` ranks the host of the store goes last, or after a while."""
    store, left, patience = member.store, f"{barrier.key}/left", time.monotonic() + LINGER_SECONDS
    with contextlib.suppress(dist.DistError):  # the error that is being reported matters more than a store that is gone
        hosts = member.rank == 0 and member.store_name == _JOBS
        while hosts and store.add(left, 0) < present - 1 and time.monotonic() < patience:
            time.sleep(0.005)
        if store.add(left, 1) == len(barrier.members):
            for part in ("stated", "came", "count", "end", "left"):
                store.delete_key(f"{barrier.key}/{part}")


# Notes: where each rank was last seen, as text that follows "rank 3"


def _leave_note(member: Member, text: str) -> None:
    member.store.set(note_key(member.who([member.rank])), text)


def note_key(who: str) -> str:
    """Where the note of a rank is."""
    return f"axes/at/{who}"


def _last_seen(member: Member, rank: int) -> str:
    note = note_key(member.who([rank]))
    return f"{member.who([rank])} {member.store.get(note).decode() if member.store.check([note]) else _UNSEEN}"


# Text


def _mismatch(member: Member, barrier: Barrier, *said: list[Any]) -> str:
    lines = [f"  {member.who([rank])}: {_indented(shown)}" for rank, _, shown in sorted(said)]
    return "\n".join(filter(None, [f"ranks disagree in {barrier.subject}:", *lines, barrier.advice]))


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")
