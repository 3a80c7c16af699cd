"""Two jobs that meet at a store: who has joined, who begins a transfer with whom, and how it ended for all ranks.

Jobs that each run their own `torch.distributed` share nothing but a store. There each job has an entry under its name,
with a token that is new each time it joins. For a transfer the first rank of each job puts its call into the store, and
takes the other job's out of it:

    set(call/trainer/generator, own call)          poll call/generator/trainer, and delete it

From then on both jobs have a key for this transfer, and its ranks are one list, numbered by job. All of them come to
two barriers (see `agreement`), before the first byte and after the last one. Where a job has ended in between, or given
up, the barrier says that its ranks are missing. The keys of a transfer have the numbers of both calls in them, so that
those of one that failed are found when nobody reads them any more.

>>> here, there = JobCall("trainer", "generator", "a1.0", 2, 0), JobCall("generator", "trainer", "b7.0", 3, 1)
>>> Pair.of(here, there).whose([3])
"rank 0 of 'trainer'"
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from axes.algebra.errors import AxesError, DesyncError
from axes.runtime.agreement import Barrier, Member, agree_at, in_time, leave_word, note_key, polled, ranks_text

T = TypeVar("T")

GRACE = 1.0
"""Seconds that one waits longer than the other side: its error says more than one's own."""

REPORT = 1.5
"""Seconds in which all ranks report a failure that closes their connections."""

STORE = "the link's store"
"""What errors call the store of a link."""

_SHOWN = 8
_NOTHING = "?"
"""What is under no key: a store that finds none says that it has found what was expected."""

AT_ITS_RANKS, RAISED = "waits for its own ranks", "raised in"
"""What the note of a job says whose call has begun, and of one whose call has failed before it met the other job."""


@dataclass(frozen=True)
class JobCall:
    """One call of a job for a transfer.

    other: the job with which it is. id: of no other call. size: ranks of the job. side: 0 where it sends, 1 where it
    receives. text: what the job says of its tensors.
    """

    name: str
    other: str
    id: str
    size: int
    side: int
    text: str = ""

    @property
    def names(self) -> tuple[str, str]:
        """Who sends, and who receives."""
        return (self.name, self.other) if self.side == 0 else (self.other, self.name)

    @property
    def said(self) -> str:
        """The transfer in words."""
        return f"the transfer from '{self.names[0]}' to '{self.names[1]}'"

    @property
    def places(self) -> tuple[str, str]:
        """Where this call waits to be taken, and where the other job's does."""
        return f"call/{self.name}/{self.other}", f"call/{self.other}/{self.name}"


@dataclass(frozen=True)
class Pair:
    """The calls of two jobs that have met, in the order in which their ranks are numbered."""

    jobs: tuple[JobCall, JobCall]

    @staticmethod
    def of(one: JobCall, two: JobCall) -> Pair:
        """The pair of two calls: every rank of both jobs numbers them alike."""
        return Pair((one, two) if one.name < two.name else (two, one))

    @property
    def key(self) -> str:
        """Under which its keys are."""
        return f"pair/{self.jobs[0].id}/{self.jobs[1].id}"

    @property
    def size(self) -> int:
        """The number of ranks of both."""
        return self.jobs[0].size + self.jobs[1].size

    @property
    def first(self) -> dict[str, int]:
        """The number of the first rank of each job."""
        return {self.jobs[0].name: 0, self.jobs[1].name: self.jobs[0].size}

    def whose(self, ranks: Sequence[int]) -> str:
        """Some ranks in words."""
        first = self.first
        own = [(job, [rank - first[job.name] for rank in ranks]) for job in self.jobs]
        each = [(job.name, [rank for rank in numbers if 0 <= rank < job.size]) for job, numbers in own]
        return " and ".join(f"{ranks_text(some)} of '{name}'" for name, some in each if some)


def rank_of(rank: int, job: str) -> str:
    """A rank of a job in words."""
    return f"rank {rank} of '{job}'"


class Rendezvous:
    """What one rank of a job asks of the store of a link.

    rank: this rank's number in its job; the first one speaks for the job.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, timeout: timedelta):
        self.store = dist.PrefixStore("axes/link", store)
        self.name, self.rank, self.timeout, self.seconds = name, rank, timeout, timeout.total_seconds()
        self.token, self.open = "", ""
        """`open` is the key of the last transfer that this job has met for, unless it has ended well: its keys stay."""

    def ask(self, subject: str, patience: float, question: Callable[[dist.Store], T]) -> T:
        """`question(store)`, which ends by itself within `patience` seconds, or an error that says what is wrong."""
        return in_time(subject, patience, lambda: question(self.store), STORE)

    # who has joined

    def join(self, token: str, others: Sequence[str]) -> None:
        """Enter the job under its name, in the place of one that had the name before."""
        self.token = token

        def enter(store: dist.Store) -> None:
            store.set(f"job/{self.name}", token)
            for other in others:
                store.delete_key(f"call/{self.name}/{other}")

        if self.rank == 0:
            self.ask("axes.connect", self.seconds, enter)
            self.note("was last seen when it joined")

    def leave(self) -> None:
        """Remove the job's keys; those of a failure once the others have had the time to read them."""
        time.sleep(GRACE if self.open else 0)

        def remove(store: dist.Store) -> None:
            self._forget(store)
            store.delete_key(note_key(rank_of(self.rank, self.name)))
            if self.rank == 0 and _read(store, f"job/{self.name}") == self.token:  # else another job has the name
                store.delete_key(f"job/{self.name}")

        with contextlib.suppress(DesyncError):  # a store that is gone keeps nothing
            self.ask("the end of a link", self.seconds, remove)

    def note(self, text: str) -> None:
        """Leave word of where the job is, for others that wait for it."""
        if self.rank == 0:
            leave_word(Member(self.store, 0, STORE, lambda _: rank_of(0, self.name)), text, GRACE)

    # meeting

    def meet(self, call: JobCall) -> JobCall:
        """The other job's call, when both have come. The first rank asks for its job."""
        own, theirs = call.places
        note = note_key(rank_of(0, call.other))

        def question(store: dist.Store) -> str:
            if _read(store, f"job/{self.name}") != self.token:
                raise DesyncError(
                    f"another job has joined as '{self.name}' since this one did, or the store is a new one"
                )
            store.set(own, json.dumps(asdict(call)))
            before = _read(store, note)

            def is_known() -> bool:
                """Whether the other job has come, or has raised since."""
                seen = _read(store, note)
                return _read(store, theirs) != "" or (seen != before and seen.startswith(RAISED))

            # A job that waits for its own ranks will say which of them is missing.
            if not polled(is_known, self.seconds) and AT_ITS_RANKS in _read(store, note):
                polled(is_known, self.seconds + GRACE)
            found = _read(store, theirs)
            if not found:
                store.delete_key(own)
                seen = _read(store, note) or "hasn't joined, or has left"
                limit = f"the limit is {self.seconds:g} s"
                raise DesyncError(f"'{call.other}' didn't come to {call.said} ({limit}):\n  '{call.other}' {seen}")
            store.delete_key(theirs)
            self._forget(store)  # both jobs have come to another call, and have read how the last one ended
            return found

        met = JobCall(**json.loads(self.ask(call.said, 2 * (self.seconds + GRACE), question)))
        if met.side == call.side:
            raise DesyncError(f"'{call.other}' has come to {met.said}, and this job to {call.said}")
        self.open = Pair.of(call, met).key
        return met

    # barriers of all ranks of both jobs

    def begin(self, pair: Pair, rank: int, plan: str | AxesError, held: str) -> bool:
        """Whether all ranks of both jobs, which are ready for the same transfer, hold the same connection already.

        plan: its fingerprint, or the error of this rank, which is then one on all of them. held: the name of the
        connection that this rank has, "" for none.
        """
        member = Member(self.store, rank, STORE, pair.whose)
        barrier = Barrier(f"{pair.key}/begin", range(pair.size), f"{pair.jobs[0].said}, before the first byte")
        every = {*agree_at(member, barrier, plan, self.timeout, held)}
        if isinstance(plan, AxesError):
            raise plan
        return len(every) == 1 and "" not in every

    def end(self, pair: Pair, rank: int, error: str) -> None:
        """Return when the transfer has succeeded on all ranks of both jobs; `DesyncError` on all of them otherwise.

        error: why it failed on this rank, "" where it didn't.
        """
        seconds, said = REPORT if error else self.seconds + REPORT + GRACE, pair.jobs[0].said
        barrier = Barrier(f"{pair.key}/end", range(pair.size), f"the end of {said}")
        every = agree_at(Member(self.store, rank, STORE, pair.whose), barrier, "", timedelta(seconds=seconds), error)
        failed = [f"  {pair.whose([each])}: {text}" for each, text in enumerate(every) if text]
        if failed:
            raise DesyncError("\n".join([f"{said} failed, and all ranks are there to say so:", *failed[:_SHOWN]]))
        self.ask(said, GRACE, lambda store: store.delete_key(f"{pair.key}/connect/0/{rank}"))
        self.open = ""

    def _forget(self, store: dist.Store) -> None:
        """Remove the keys of a transfer that failed: nobody reads them any more."""
        for key in store.list_keys() if self.open else ():
            if self.open in key:
                store.delete_key(key)
        self.open = ""


def _read(store: dist.Store, key: str) -> str:
    """What is under a key, "" where nothing is. (`get` would wait where another job removes it just then.)"""
    found = store.compare_set(key, _NOTHING, _NOTHING).decode()
    return "" if found == _NOTHING else found
