"""Agreement: ranks that disagree get an error that says how, on every rank, in place of a hang.

A collective that ranks enter with different ideas waits for ever and says nothing. So before
ranks rely on a common declaration or connect a process group, they compare what they hold through
the store that every `torch.distributed` job has. They do so at a *barrier*: each member *states* a
line of text, and the barrier *ends* well when all members have stated the same:

    store.compare_set(statement)         the first statement stays; another one ends the barrier
    store.add(count)                     the last rank to come ends the barrier
    store.append(came)                   this rank has come
    store.set(note)                      where this rank is
    wait for the end
    store.add(done)                      the last rank to read the end removes the barrier's keys

That is six store operations for each rank, whatever their number, and a poll now and then while it
waits. A barrier ends once, for all: whoever comes later reads the same end. It ends badly when

- a rank states something else: at once, with both statements;
- a rank raised an error of its own before it came (`refuse`): at once, with that error;
- the time is up: with the ranks that didn't come, and what each was last seen waiting for. One of the
  ranks that wait says the same in a warning after half a minute.

Rank 0 hosts the store of a job, so it leaves a failed barrier last, or the others would see a
broken connection in place of the error. A store whose host is stopped, or behind a link that is cut,
answers nothing and says nothing: so another thread asks it, and a rank waits for that thread as long as
it would have waited for the others.

>>> import torch.distributed as dist
>>> member = Member(dist.HashStore(), rank=0)
>>> agree(member, Barrier("init_mesh over rank 0", range(1), "mesh", 0), "dp=1", timedelta(seconds=5))
[None]
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import operator
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, NoReturn, TypeVar, cast

import torch.distributed as dist

from axes.algebra.errors import DesyncError
from axes.algebra.universe import Universe

T = TypeVar("T")

_HOST = 0
_RANK = operator.itemgetter("rank")
_LINGER_SECONDS = 5.0
_SILENCE_SECONDS = 1.0
_REPORT_SECONDS = 1.0
_FIRST_POLL_SECONDS = 0.0005
_SLOWEST_POLL_SECONDS = 0.1
_STALLED_SECONDS = 30.0
_REPORT_HOLDS_SECONDS = 60.0
_REPORTS_READ = 256
_RANKS_SHOWN = 16


class MissedError(DesyncError):
    """A barrier that the others have left, as this rank didn't come in time."""


@dataclass(frozen=True)
class Member:
    """A rank, and the store by which it reaches the others: what takes part in a barrier."""

    store: dist.Store
    rank: int
    store_name: str = "the job's store"


@dataclass(frozen=True)
class Barrier:
    """Where `members` compare what they state: the `attempt`-th barrier of its kind among these ranks.

    The set of the members names it, so that ranks which hold them in different orders come to the same
    barrier and can disagree. `subject` completes "rank 3 waits for ..."; `advice` says what to write instead.
    `doing` is what this rank is about to do there: the others are shown it, and compare it not.
    """

    subject: str
    members: Sequence[int]
    kind: str
    attempt: int
    advice: str = ""
    doing: str = ""

    @property
    def seen(self) -> str:
        """What others read of this rank while it is here."""
        return f"{self.subject}: {self.doing}" if self.doing else self.subject

    @cached_property
    def topic(self) -> str:
        """What all members call this kind of barrier: `attempt` counts the barriers of a topic."""
        ascending = isinstance(self.members, range)
        return f"{self.kind}/{digest(self.members if ascending else sorted(self.members))}"


def agree(member: Member, barrier: Barrier, statement: str, timeout: timedelta, told: Any = None) -> list[Any]:
    """Return when every member of the barrier has stated the same; `DesyncError` on all otherwise.

    Waits `timeout` at most, and on rank 0 up to five seconds more where the barrier fails. No key of the barrier stays
    in the store when all members have read how it ended. Gives what each member has `told` the others, as JSON can say
    it, in the order of the members.
    """
    key, every = _key(barrier), [f"told/{rank}" for rank in barrier.members]
    tells = [] if told is None else every
    found: list[Any] = []

    def meet(asking: Member) -> None:
        store, left = asking.store, every  # where ranks do different things, others may have told something
        if tells:
            store.set(f"{key}/told/{member.rank}", json.dumps(told))
        try:
            _meet(asking, barrier, statement, timeout)
            left = []
            found.extend(map(json.loads, store.multi_get([f"{key}/{each}" for each in tells]) if tells else ()))
        finally:
            # Where the store is gone that is being reported already.
            with contextlib.suppress(dist.DistError):
                if store.add(f"{key}/done", 1) == len(barrier.members):
                    # First what says that the barrier has begun: nobody waits at one that hasn't (see `_is_open`).
                    for part in (
                        "stated",
                        "count",
                        "came",
                        "end",
                        "left",
                        "reporter",
                        "warner",
                        "done",
                        *(tells or left),
                    ):
                        store.delete_key(f"{key}/{part}")

    if len(barrier.members) == 1:
        return [told]
    with store_errors(barrier.subject):
        ask_in_time(member, barrier.subject, timeout, meet)
    return found


def refuse(member: Member, barrier: Barrier, error: Exception) -> None:
    """Ends a barrier for all its members because this rank can't come: it raises `error`."""
    if len(barrier.members) == 1:
        return
    said = f"{type(error).__name__}: {error}"

    def end(asking: Member) -> None:
        key = _key(barrier)
        _leave_note(asking, f"raised in {barrier.subject}: {_indented(said)}")
        text = f"rank {member.rank} can't take part in {barrier.subject}, it raised {_indented(said)}"
        _end(asking.store, key, text, len(barrier.members))
        _leave(asking, key, len(barrier.members))

    # The caller raises `error`, which matters more than a store that can't be reached.
    with contextlib.suppress(dist.DistError, DesyncError):
        ask_in_time(member, barrier.subject, timedelta(seconds=_LINGER_SECONDS), end)


def leave_word(member: Member, text: str) -> None:
    """Note why this rank doesn't come, for members that expect it: they read it behind "rank 3"."""
    with contextlib.suppress(dist.DistError, DesyncError):
        limit = timedelta(seconds=_LINGER_SECONDS)
        ask_in_time(member, "a note of where a rank is", limit, lambda asking: _leave_note(asking, text))


def digest(ranks: Sequence[int]) -> str:
    """Sixteen characters that stand for ranks in their order; O(1) for a range.

    >>> digest(range(4)) == digest((0, 1, 2, 3)), digest((0, 1)) == digest((1, 0))
    (True, False)
    """
    ranks = Universe.of(ranks).ranks
    if isinstance(ranks, range):
        return hashlib.sha256(f"{ranks}".encode()).hexdigest()[:16]
    return hashlib.sha256(array("q", ranks).tobytes()).hexdigest()[:16]


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


@contextlib.contextmanager
def store_errors(subject: str) -> Iterator[None]:
    """Makes an error of the store, in this block, a `DesyncError` that says what it was asked for."""
    try:
        yield
    except dist.DistError as error:
        raise DesyncError(
            f"the job's store can't be reached in {subject}: {str(error).splitlines()[0]}\n"
            "Its host may have ended, and says why: the launcher where it has an agent, as torchrun has, "
            f"else rank {_HOST}"
        ) from error


def without_report(member: Member, barrier: Barrier) -> str:
    """Report that what the members of a barrier do fails on this rank; say which of them report nothing.

    The others have a second for it. One that has ended, is stopped, or failed somewhere else reports nothing: each is
    shown with where it was last seen. Returns "" where all report. A report holds for a minute, so that one of an
    earlier failure, which this rank had alone, isn't taken for one of the next.
    """
    key, found = _key(barrier), list[str]()

    def ask(asking: Member) -> None:
        _leave_note(asking, f"was last seen failing in {barrier.subject}")
        asking.store.set(f"{key}/{member.rank}", json.dumps(time.time()))
        silent = [rank for rank in itertools.islice(barrier.members, _REPORTS_READ) if rank != member.rank]
        end = time.monotonic() + _REPORT_SECONDS
        while silent := [rank for rank in silent if not _has_reported(asking.store, f"{key}/{rank}")]:
            if time.monotonic() > end:
                break
            time.sleep(_SLOWEST_POLL_SECONDS)
        if silent:
            found.append(f"\n  no report of it by {ranks_text(silent)}, which ended, is stopped, or failed elsewhere:")
            found.extend(f"\n    {_last_seen(asking, rank)}" for rank in silent[:_RANKS_SHOWN])

    try:
        with store_errors("a question for who else failed"):
            ask_in_time(member, "a question for who else failed", timedelta(seconds=_REPORT_SECONDS), ask)
    except DesyncError as error:  # that it failed matters more
        return f"\n  {str(error).splitlines()[0]}"
    return "".join(found)


def _has_reported(store: dist.Store, key: str) -> bool:
    at = _read(store, key)
    return at is not None and abs(time.time() - at) < _REPORT_HOLDS_SECONDS


# Questions to the store


class _AskedStore:
    """A store that knows how long its answer has been awaited."""

    def __init__(self, store: dist.Store):
        self.store = store
        self.since: float | None = None

    @property
    def silence(self) -> float:
        """For how many seconds the present question has had no answer; 0 where none is asked."""
        since = self.since
        return 0.0 if since is None else time.monotonic() - since

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.store, name)

        def ask(*args: Any) -> Any:
            self.since = time.monotonic()
            try:
                return method(*args)
            finally:
                self.since = None

        return ask


def ask_in_time(member: Member, subject: str, timeout: timedelta, ask: Callable[[Member], None]) -> None:
    """`ask(member)`, which ends by itself about when `timeout` is over, as long as the store answers.

    It runs on another thread, since a question to the store waits for ever where the host is silent. Then
    that thread stays behind, and this raises.
    """
    store = _AskedStore(member.store)
    outcome = _on_a_thread(lambda: ask(replace(member, store=cast("dist.Store", store))))
    patience = timeout.total_seconds()
    while not wait([outcome], patience).done:
        if store.silence > _SILENCE_SECONDS:
            raise DesyncError(
                f"{member.store_name}{_host_of(member.store)} doesn't answer in {subject}, for {store.silence:.1f} s "
                "now: its host is stopped, or can't be reached from here"
            )
        patience = _SLOWEST_POLL_SECONDS
    outcome.result()


def in_time(member: Member | None, subject: str, timeout: timedelta, call: Callable[[], T]) -> T:
    """`call()`, in which torch connects to others or to the store, and which it ends by itself when `timeout` is over.

    It doesn't where the store, or a host behind a link that is cut, says nothing. Then the thread of the call stays
    behind, and this raises `DesyncError` for a store that doesn't answer `member`, otherwise `dist.DistNetworkError`.
    """
    outcome = _on_a_thread(call)
    patience = timeout.total_seconds() + _SILENCE_SECONDS
    if not wait([outcome], patience).done:
        if member is not None:
            ask_in_time(member, subject, timedelta(0), lambda asking: asking.store.check(["axes"]))
        if not wait([outcome], _LINGER_SECONDS).done:
            seconds = patience + _LINGER_SECONDS
            raise dist.DistNetworkError(
                f"no answer within {seconds:g} s from a host that is stopped, or can't be reached"
            )
    return outcome.result()


def _on_a_thread(call: Callable[[], T]) -> Future[T]:
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="axes: a question to the store", daemon=True).start()
    return outcome


def _host_of(store: dist.Store) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f" at {store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""


# The end of a barrier


def _meet(member: Member, barrier: Barrier, statement: str, timeout: timedelta) -> None:
    """State the text at the barrier and wait for its end."""
    key = _key(barrier)
    mine = {"rank": member.rank, "text": statement, "shown": barrier.doing or statement}
    first = json.loads(member.store.compare_set(f"{key}/stated", "", json.dumps(mine)))
    if first["text"] != statement:
        error = _mismatch(barrier, first, mine)
        _end(member.store, key, error, len(barrier.members), disagree=True)
    elif member.store.add(f"{key}/count", 1) == len(barrier.members):
        _end(member.store, key, None, len(barrier.members))
    # After the count: a rank that died before it hasn't come, and is named.
    member.store.append(f"{key}/came", f"{member.rank} ")
    _leave_note(member, barrier.seen, key)
    end = _wait_for_end(member, barrier, key, timeout)
    if end["error"] is not None:
        _leave_note(member, f"was last seen failing in {barrier.seen}")
        _raise(member, key, end, barrier.doing or statement)


def _end(
    store: dist.Store, key: str, error: str | None, present: int, disagree: bool = False, missing: Sequence[int] = ()
) -> None:
    """Ends a barrier unless it has ended; `present` members are there to read it, those `missing` weren't."""
    end = {"error": error, "present": present, "disagree": disagree, "missing": missing}
    store.compare_set(f"{key}/end", "", json.dumps(end))


def _ended(store: dist.Store, key: str) -> dict[str, Any] | None:
    return _read(store, f"{key}/end")


def _read(store: dist.Store, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None


def _wait_for_end(member: Member, barrier: Barrier, key: str, timeout: timedelta) -> dict[str, Any]:
    """Poll, ever more slowly, since a blocking wait that times out writes warnings of its own."""
    started, stalled, limit = time.monotonic(), _STALLED_SECONDS, timeout.total_seconds()
    slowest = max(_SLOWEST_POLL_SECONDS, len(barrier.members) / 20_000)
    while (end := _ended(member.store, key)) is None:
        waited = time.monotonic() - started
        if waited >= limit:
            _time_is_up(member, barrier, key, limit)
        elif waited >= stalled:
            stalled = math.inf
            _warn(member, barrier, key, waited)
        time.sleep(max(0.0, min(max(_FIRST_POLL_SECONDS, waited / 8), slowest, limit - waited)))
    return end


def _is_first(member: Member, key: str) -> bool:
    """Whether this rank is the first that asks for a key: one rank looks for those that are missing."""
    return member.store.compare_set(key, "", str(member.rank)) == str(member.rank).encode()


def _warn(member: Member, barrier: Barrier, key: str, waited: float) -> None:
    """Say for whom ranks wait, long before their time is up. Of ranks in a circle each barrier says its part."""
    if _is_first(member, f"{key}/warner"):
        _, lines = _missing(member, barrier, key, f"for {waited:.0f} s so far")
        if _ended(member.store, key) is None:
            warnings.warn("\n".join(lines), stacklevel=2)


def _time_is_up(member: Member, barrier: Barrier, key: str, limit: float) -> None:
    """End a barrier with who is missing. One rank looks, the others wait for what it finds."""
    store = member.store
    if not _is_first(member, f"{key}/reporter"):
        patience = time.monotonic() + _LINGER_SECONDS + len(barrier.members) / 5_000
        while time.monotonic() < patience:
            if _ended(store, key) is not None:
                return
            time.sleep(_SLOWEST_POLL_SECONDS)
    missing, lines = _missing(member, barrier, key, f"within {limit:g} s")
    _end(store, key, "\n".join(lines), len(barrier.members) - len(missing), missing=missing)


def _missing(member: Member, barrier: Barrier, key: str, how_long: str) -> tuple[list[int], list[str]]:
    """The members that haven't come, and lines that say so, with where each was last seen."""
    came = set(map(int, member.store.get(f"{key}/came").split()))
    missing, present = ([rank for rank in barrier.members if (rank in came) == there] for there in (False, True))
    lines = [f"{ranks_text(missing)} didn't come to {barrier.subject} {how_long}:"]
    if not missing:
        lines = [f"{barrier.subject} isn't complete {how_long}, though all have been seen there"]
    lines += [f"  {_last_seen(member, rank)}" for rank in missing[:_RANKS_SHOWN]]
    lines += [f"  {ranks_text(present)} waited for {barrier.seen}", barrier.advice]
    return missing, [*filter(None, lines)]


def _raise(member: Member, key: str, end: dict[str, Any], statement: str) -> NoReturn:
    _leave(member, key, end["present"])
    mine = ""
    if end["disagree"] and _indented(statement) not in end["error"]:
        mine = f"\nThis rank, {member.rank}, holds: {_indented(statement)}"
    kind = MissedError if member.rank in end["missing"] else DesyncError
    raise kind(end["error"] + mine)


def _leave(member: Member, key: str, present: int) -> None:
    """Says that this rank has read the end. The host of the store waits for the others a while."""
    # The error that is being reported matters more than a store that is gone already.
    with contextlib.suppress(dist.DistError):
        member.store.add(f"{key}/left", 1)
        patience = time.monotonic() + _LINGER_SECONDS
        while member.rank == _HOST and time.monotonic() < patience and member.store.add(f"{key}/left", 0) < present:
            time.sleep(0.005)


# Notes: where each rank was last seen


def _leave_note(member: Member, text: str, key: str = "") -> None:
    """Note where a rank is: a barrier that it has come to, by subject and key; or any text that follows "rank 3"."""
    member.store.set(f"axes/rank/{member.rank}", json.dumps([text, key]))


def _last_seen(member: Member, rank: int) -> str:
    text, key = _read(member.store, f"axes/rank/{rank}") or ("", "")
    if key:
        text = f"{'waits for' if _is_open(member.store, key) else 'was last seen passing in'} {text}"
    return f"rank {rank} {text or _UNSEEN}"


_UNSEEN = "hasn't been seen: it is still starting, has ended, is stopped, or makes no mesh"


def _is_open(store: dist.Store, key: str) -> bool:
    """Whether ranks wait at a barrier: it hasn't ended, and has begun.

    Of one that is forgotten the beginning is removed first. Nothing is read, which would wait for what is removed.
    """
    return not store.check([f"{key}/end"]) and store.check([f"{key}/stated"])


# Text


def _key(barrier: Barrier) -> str:
    return f"axes/{barrier.topic}/{barrier.attempt}"


def _mismatch(barrier: Barrier, first: dict[str, Any], mine: dict[str, Any]) -> str:
    lines = [f"ranks disagree in {barrier.subject}:"]
    lines += [f"  rank {said['rank']}: {_indented(said['shown'])}" for said in sorted((first, mine), key=_RANK)]
    return "\n".join([*lines, barrier.advice] if barrier.advice else lines)


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")
