"""Two jobs that meet at a store: who has joined, who begins a transfer with whom, and how it ended for all ranks.

Jobs that each run their own `torch.distributed` share nothing but a store. There each job has an entry under its name,
with a token that is new each time it joins. For a transfer the first rank of each job meets that of the other:

    first to come:   compare_set(waits, its own call)          polls for the answer, or withdraws when its time is up
    second to come:  compare_set(waits, taken), set(met, its own call)

So a call meets the other side's next one, whatever either of them has missed. From then on both jobs have a key for
this transfer, and its ranks are one list, numbered by job. All of them come to two barriers (see `agreement`), before
the first byte and after the last one. The keys of a transfer have the calls in them, so that those of one that failed
are found when nobody reads them any more.

>>> here = JobCall("trainer", "a1", 0, 2, "", 0, 0)
>>> Pair(here, JobCall("generator", "b7", 0, 3, "", 1, 1), 0).who(3)
"rank 1 of 'generator'"
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from axes.algebra.errors import AxesError, DesyncError
from axes.runtime.agreement import (
    Barrier,
    Member,
    agree_at,
    in_time,
    leave_word,
    note_key,
    polled,
)

T = TypeVar("T")

GRACE = 1.0
"""Seconds that one waits longer than the other side: its error says more than one's own."""

REPORT = 1.5
"""Seconds in which all ranks report a failure that closes their connections."""

_SHOWN = 8
STORE = "the link's store"
"""What errors call the store of a link."""

_NOTHING = "?"
"""What is under no key: a store that finds none says that it has found what was expected."""


@dataclass(frozen=True)
class JobCall:
    """One call of a job for a transfer.

    token: of the job since it joined. number: of the call. size: ranks of the job. text: a digest of what the job says
    of its tensors. place: of the job among the peers. side: 0 where it sends, 1 where it receives. error: why it can't
    take part, "" where it can.
    """

    name: str
    token: str
    number: int
    size: int
    text: str
    place: int
    side: int
    error: str = ""

    @property
    def id(self) -> str:
        """What no other call has."""
        return f"{self.token}.{self.number}"


@dataclass(frozen=True)
class Pair:
    """A transfer for which two jobs have met. side: 0 on ranks of the source, else 1."""

    source: JobCall
    target: JobCall
    side: int

    @property
    def key(self) -> str:
        """Under which its keys are."""
        return f"pair/{self.source.id}/{self.target.id}"

    @property
    def jobs(self) -> tuple[JobCall, JobCall]:
        """Both, in the order in which their ranks are numbered."""
        one, two = self.source, self.target
        return (one, two) if one.place < two.place else (two, one)

    @property
    def size(self) -> int:
        """The number of ranks of both."""
        return self.source.size + self.target.size

    @property
    def other(self) -> JobCall:
        """The job on the other side."""
        return (self.target, self.source)[self.side]

    def first(self, job: JobCall) -> int:
        """The number of the first rank of a job."""
        return 0 if job is self.jobs[0] else self.jobs[0].size

    def who(self, rank: int) -> str:
        """A rank of the union as the user knows it."""
        one, two = self.jobs
        return rank_of(rank, one.name) if rank < one.size else rank_of(rank - one.size, two.name)

    def whose(self, ranks: Sequence[int]) -> str:
        """Some ranks in words."""
        shown = ", ".join(map(self.who, ranks[:_SHOWN]))
        return f"{shown} and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else shown


def rank_of(rank: int, job: str) -> str:
    """A rank of a job in words."""
    return f"rank {rank} of '{job}'"


class Rendezvous:
    """What one rank of a job asks of the store of a link.

    rank: this rank's number in its job; the first one speaks for the job.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, timeout: timedelta):
        self.store = dist.PrefixStore("axes/link", store)
        self.name, self.rank, self.timeout = name, rank, timeout
        self.seconds, self.token, self.entry = timeout.total_seconds(), "", f"job/{name}"
        self.texts: dict[str, tuple[str, str]] = {}
        """What other jobs have said of their tensors, with its digest."""
        self.posted: dict[str, str] = {}
        """What the job has in the store, by key: its token, digests of its texts."""
        self.open: Pair | None = None
        """The last transfer that this job has met for, unless it has ended well: its keys are still there."""

    def ask(self, subject: str, patience: float, question: Callable[[dist.Store], T]) -> T:
        """`question(store)`, which ends by itself within `patience` seconds, or an error that says what is wrong."""
        return in_time(subject, patience, lambda: question(self.store), STORE)

    # who is there

    def join(self, token: str) -> None:
        """Enters the job under its name, in the place of one that had the name before."""
        self.token = token
        if self.rank == 0:
            self.ask("axes.connect", self.seconds, lambda store: store.set(self.entry, token))
            self.posted[self.entry] = token
            self.note("was last seen when it joined")

    def leave(self) -> None:
        """Removes what the job has in the store; that of a failure once the others have had the time to read it."""
        if self.open is not None:
            time.sleep(GRACE)

        def remove(store: dist.Store) -> None:
            self._forget(store)
            if self.rank == 0 and _read(store, self.entry) != self.token:
                return  # another job has the name by now
            for key in (note_key(rank_of(self.rank, self.name)), *self.posted):
                store.delete_key(key)

        self.ask("the end of a link", self.seconds, remove)

    def note(self, text: str) -> None:
        """Leaves word of where the job is, for others that wait for it."""
        if self.rank == 0:
            leave_word(Member(self.store, 0, STORE, lambda _: rank_of(0, self.name)), text, GRACE)

    # meeting

    def meet(self, call: JobCall, other: str, text: str, said: str) -> Pair:
        """The transfer for which this job's call meets one of the other job. The first rank asks for its job.

        `text`: what the job says of its tensors.
        """
        names = (call.name, other) if call.side == 0 else (other, call.name)
        channel = f"channel/{names[0]}/{names[1]}"

        def leader(store: dist.Store) -> Pair:
            if _read(store, self.entry) != self.token:
                raise DesyncError(
                    f"another job has joined as '{self.name}' since this one did, or the store is a new one"
                )
            place = f"text/{channel}/{call.side}"
            if not call.error and self.posted.get(place) != call.text:
                store.set(place, text)
                self.posted[place] = call.text
            found = self._met(store, channel, call, other, said)
            self._forget(store)  # both jobs have come to another call, and have read how the last one ended
            return Pair(*((call, found) if call.side == 0 else (found, call)), call.side)

        self.open = self.ask(said, self.seconds + 2 * GRACE, leader)
        return self.open

    def _met(self, store: dist.Store, channel: str, call: JobCall, other: str, said: str) -> JobCall:
        """The other job's call."""
        key, mine, taken = f"{channel}/waits", json.dumps(asdict(call)), _TAKEN + call.id
        expected = ""
        while (found := store.compare_set(key, expected, mine).decode()) != mine:
            if found and not found.startswith(_TAKEN):
                there = JobCall(**json.loads(found))
                if there.side != call.side:
                    if store.compare_set(key, found, taken).decode() == taken:
                        store.set(_answer(there), mine)
                        return there
                    found = ""
            # A torch that finds no key says that it found what was expected.
            expected = "" if found == expected else found
        answer = _answer(call)
        # Where the other one isn't there yet, it is shown this job's note when its time is up.
        patience = 0.0 if call.error else self.seconds + GRACE
        came = polled(lambda: store.check([answer]), patience)
        if not came and store.compare_set(key, mine, taken).decode() != taken:
            came = polled(lambda: store.check([answer]), GRACE)  # it came just now
        if _read(store, key).startswith(_TAKEN):
            store.delete_key(key)
        if not came:
            seen = _read(store, note_key(rank_of(0, other))) or "hasn't joined, or has left"
            raise DesyncError(f"'{other}' didn't come to {said} within {self.seconds:g} s:\n  '{other}' {seen}")
        met = JobCall(**json.loads(store.get(answer)))
        store.delete_key(answer)
        return met

    def text_of(self, pair: Pair, said: str) -> str:
        """What the other job says of its tensors."""
        key = f"text/channel/{pair.source.name}/{pair.target.name}/{1 - pair.side}"
        digest, found = self.texts.get(key, ("", ""))
        if digest != pair.other.text:
            found = self.ask(said, self.seconds, lambda store: store.get(key).decode())
            self.texts[key] = pair.other.text, found
        return found

    # barriers

    def begin(self, pair: Pair, rank: int, plan: str, wrong: AxesError | None, held: str, said: str) -> bool:
        """Whether all ranks of both jobs, which are ready for the same transfer, hold the same connection already.

        held: the name of this rank's, "" for none yet. An error of one rank is an error on all of them.
        """
        member = Member(self.store, rank, STORE, pair.whose)
        barrier = Barrier(f"{pair.key}/begin", range(pair.size), f"{said}, before the first byte")
        if wrong is not None:
            agree_at(member, barrier, wrong, self.timeout)
            raise wrong
        every = {*agree_at(member, barrier, f"the plan {plan}", self.timeout, held)}
        return len(every) == 1 and "" not in every

    def end(self, pair: Pair, rank: int, error: str, connected: bool, said: str) -> None:
        """Returns when the transfer has succeeded on all ranks of both jobs; `DesyncError` on all of them otherwise.

        error: why it failed on this rank, "" where it didn't. connected: whether the ranks have connected for it.
        """
        seconds = REPORT if error else self.seconds + REPORT + GRACE
        barrier = Barrier(f"{pair.key}/end", range(pair.size), f"the end of {said}")
        every = agree_at(Member(self.store, rank, STORE, pair.whose), barrier, "", timedelta(seconds=seconds), error)
        failed = [f"  {pair.who(each)}: {text}" for each, text in enumerate(every) if text]
        if failed:
            raise DesyncError("\n".join([f"{said} failed, and all ranks are there to say so:", *failed[:_SHOWN]]))
        if connected:
            self.ask(said, GRACE, lambda store: store.delete_key(f"{pair.key}/connect/0/{rank}"))
        self.open = None

    def _forget(self, store: dist.Store) -> None:
        """Removes the keys of a transfer that failed: nobody reads them any more."""
        calls = () if self.open is None else self.open.jobs
        for key in store.list_keys() if calls else ():
            if any(f"/{call.id}/" in key for call in calls):
                store.delete_key(key)
        self.open = None


_TAKEN = "taken by "
"""What stands in the place of a call that doesn't wait any more."""


def _answer(call: JobCall) -> str:
    """Where a call that waits finds the one that it has met."""
    return f"met/{call.id}/"


def _read(store: dist.Store, key: str) -> str:
    """What is under a key, "" where nothing is. (`get` would wait where another job removes it just then.)"""
    found = store.compare_set(key, _NOTHING, _NOTHING).decode()
    return "" if found == _NOTHING else found
