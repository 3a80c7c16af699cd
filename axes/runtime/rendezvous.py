"""Two jobs that meet at a store: who has joined, who begins a transfer with whom, and how it ended for all ranks.

Jobs that each run their own `torch.distributed` share nothing but a store. There each job has an entry under its name,
with a token that is new each time it joins. For a transfer the first rank of each job meets that of the other:

    first to come:   compare_set(waits, its own call)          polls for the answer, or withdraws when its time is up
    second to come:  compare_set(waits, taken), set(met, its own call)

So a call meets the other side's next one, whatever either of them has missed. From then on both jobs have a key for
this transfer, and its ranks are one list, numbered by job. All of them come to two *checks*, before the first byte and
after the last one. A check ends once, for all: well when the last rank comes, badly with an error that says which rank
of which job is missing.

>>> from torch.distributed import HashStore
>>> here = JobCall("trainer", "a1", 0, 2, "", 0)
>>> Pair(here, JobCall("generator", "b7", 0, 3, "", 1), 0).who(3)
"rank 1 of 'generator'"
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from axes.algebra import errors
from axes.algebra.errors import AxesError, DesyncError
from axes.runtime.agreement import asked, in_time

T = TypeVar("T")

GRACE = 1.0
"""Seconds that one waits longer than the other side: its error says more than one's own."""

REPORT = 1.5
"""Seconds in which all ranks report a failure that closes their connections."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_SHOWN = 8
_NOTHING = "?"
"""What is under no key: a store that finds none says that it has found what was expected."""


@dataclass(frozen=True)
class JobCall:
    """One call of a job for a transfer.

    token: of the job since it joined. number: of the call. size: ranks of the job. text: a digest of what the job says
    of its tensors. place: of the job among the peers. error: why it can't take part, "" where it can. pages: which
    pages of them move, as text, "" where all that there is does.
    """

    name: str
    token: str
    number: int
    size: int
    text: str
    place: int
    error: str = ""
    pages: str = ""

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
        return f"pair/{self.source.id}-{self.target.id}"

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
        return f"rank {rank} of '{one.name}'" if rank < one.size else f"rank {rank - one.size} of '{two.name}'"

    def whose(self, ranks: Sequence[int]) -> str:
        """Some ranks in words."""
        shown = ", ".join(map(self.who, ranks[:_SHOWN]))
        return f"{shown} and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else shown


@dataclass(frozen=True)
class Begun:
    """What all ranks know when a transfer begins. members: ranks that exchange anything. fresh: they connect anew."""

    members: tuple[int, ...]
    fresh: bool


class Rendezvous:
    """What one rank of a job asks of the store of a link.

    rank: this rank's number in its job; the first one speaks for the job.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, timeout: timedelta):
        self.store = dist.PrefixStore("axes/link", store)
        self.name, self.rank, self.timeout = name, rank, timeout
        self.token = ""
        self.posted: dict[str, str] = {}
        self.channels: set[str] = set()
        self.met: list[Pair] = []
        self.over: list[tuple[float, Pair | str]] = []

    @property
    def seconds(self) -> float:
        """How long ranks wait for one another."""
        return self.timeout.total_seconds()

    def ask(self, subject: str, patience: float, question: Callable[[dist.Store], T]) -> T:
        """`question(store)`, which ends by itself within `patience` seconds, or an error that says what is wrong."""
        return asked(subject, patience, lambda: question(self.store), "the link's store")

    def connect(self, make: Callable[[], T], subject: str) -> T:
        """`make()`, which connects ranks through the store, within the limit."""
        return in_time(subject, self.seconds, make, "the link's store")

    # who is there

    def join(self, token: str, size: int) -> None:
        """Enters the job under its name, in the place of one that had the name before."""
        self.token = token
        if self.rank == 0:
            entry = json.dumps({"token": token, "size": size})
            self.ask("axes.connect", self.seconds, lambda store: store.set(f"job/{self.name}", entry))
            self.note("was last seen when it joined")

    def leave(self) -> None:
        """Removes what the job has in the store; that of a failure once the others have had the time to read it."""
        self.retire()
        if self.over:
            time.sleep(max(0.0, self.over[-1][0] + GRACE - time.monotonic()))

        def remove(store: dist.Store) -> None:
            self._forget_over(store, str | Pair)
            if self.rank == 0 and (_read(store, f"job/{self.name}") or {}).get("token") == self.token:
                for key in (f"job/{self.name}", f"note/{self.name}", *self.posted):
                    store.delete_key(key)
                for channel in self.channels:
                    if "taken" in (_read(store, f"{channel}/waits") or {}):
                        store.delete_key(f"{channel}/waits")

        self.ask("the end of a link", self.seconds, remove)

    def note(self, text: str) -> None:
        """Leaves word of where the job is, for others that wait for it."""
        if self.rank == 0:
            self.ask(
                "a note of where a job is", self.seconds, lambda store: store.set(f"note/{self.name}", json.dumps(text))
            )

    def _seen(self, store: dist.Store, name: str) -> str:
        if not store.check([f"job/{name}"]):
            return f"'{name}' hasn't joined, or has left"
        return f"'{name}' {_read(store, f'note/{name}') or 'has ended, is stopped, or calls something else'}"

    # meeting

    def meet(self, call: JobCall, other: str, side: int, text: str, said: str) -> Pair:
        """The transfer for which this job's call meets one of the other job; the same on all ranks of the job.

        The first rank of the job meets the other's, and tells its own job. `text`: what the job says of its tensors.
        """
        names = (call.name, other) if side == 0 else (other, call.name)
        channel = f"channel/{names[0]}/{names[1]}"
        if self.rank != 0:
            return self._told(call, side, said)

        def leader(store: dist.Store) -> Pair:
            self.retire()
            self._forget_over(store, str)  # all ranks of this job have come to this call, and have read it
            self.channels.add(channel)
            if (_read(store, f"job/{self.name}") or {}).get("token") != self.token:
                raise DesyncError(
                    f"another job has joined as '{self.name}' since this one did, or the store is a new one"
                )
            place = f"text/{channel}/{side}"
            if not call.error and self.posted.get(place) != call.text:
                store.set(place, text)
                self.posted[place] = call.text
            found = self._met(store, channel, call, other, side, said)
            self._forget_over(store, Pair)  # so have those of the other one
            return Pair(*((call, found) if side == 0 else (found, call)), side)

        def tell(told: dict[str, Any]) -> None:
            self.ask(said, 0, lambda store: store.set(f"call/{call.id}", json.dumps(told)))

        try:
            pair = self.ask(said, self.seconds + 2 * GRACE, leader)
        except AxesError as error:
            if call.size > 1:
                with contextlib.suppress(DesyncError):  # the store that can't be reached is what `error` says
                    tell({"error": str(error)})
                self.over.append((time.monotonic(), f"call/{call.id}"))
            raise
        self.met.append(pair)
        if call.size > 1:
            tell({"jobs": [asdict(pair.source), asdict(pair.target)]})
        return pair

    def _told(self, call: JobCall, side: int, said: str) -> Pair:
        key = f"call/{call.id}"
        limit = self.seconds + 3 * GRACE

        def follower(store: dist.Store) -> dict[str, Any] | None:
            return _read(store, key) if _polled(lambda: store.check([key]), limit) else None

        found = self.ask(said, limit, follower)
        if found is None:
            raise DesyncError(
                f"rank 0 of '{self.name}', which meets the other job for its ranks, says nothing in {said}"
            )
        if "error" in found:
            raise DesyncError(found["error"])
        one, two = (JobCall(**each) for each in found["jobs"])
        return Pair(one, two, side)

    def _met(self, store: dist.Store, channel: str, call: JobCall, other: str, side: int, said: str) -> JobCall:
        """The other job's call."""
        key, mine = f"{channel}/waits", json.dumps({"side": side, **asdict(call)})
        taken = json.dumps({"taken": call.id})
        expected = ""
        while (found := store.compare_set(key, expected, mine).decode()) != mine:
            there = json.loads(found or "{}")
            if there.get("side") == 1 - side:
                if store.compare_set(key, found, taken).decode() == taken:
                    store.set(f"met/{there['token']}.{there['number']}", mine)
                    return _call_of(there)
                found = ""
            # A torch that finds no key says that it found what was expected.
            expected = "" if found == expected else found
        answer = f"met/{call.id}"
        # Where the other one isn't there yet, it is shown this job's note when its time is up.
        patience = 0.0 if call.error else self.seconds + GRACE
        came = _polled(lambda: store.check([answer]), patience)
        if not came and store.compare_set(key, mine, taken).decode() != taken:
            came = _polled(lambda: store.check([answer]), GRACE)  # it came just now
        if not came:
            raise DesyncError(
                f"'{other}' didn't come to {said} within {self.seconds:g} s:\n  {self._seen(store, other)}"
            )
        met = json.loads(store.get(answer))
        store.delete_key(answer)
        return _call_of(met)

    def text_of(self, pair: Pair, side: int, said: str) -> str:
        """What the job of a side says of its tensors."""
        key = f"text/channel/{pair.source.name}/{pair.target.name}/{side}"
        return self.ask(said, self.seconds, lambda store: store.get(key).decode())

    # checks

    def begin(
        self, pair: Pair, rank: int, fingerprint: str, wrong: AxesError | None, part: bool, held: str, said: str
    ) -> Begun:
        """Returns when all ranks of both jobs are ready for the same transfer; an error on all of them otherwise.

        part: whether this rank exchanges anything. held: by which connections, "" for none yet.
        """
        key = f"{pair.key}/begin"

        def come(store: dist.Store) -> Begun:
            if wrong is not None:
                _end(store, key, f"{pair.who(rank)} raised {type(wrong).__name__}: {wrong}", type(wrong).__name__)
            first = json.loads(store.compare_set(f"{key}/plan", "", json.dumps([rank, fingerprint])))
            if first[1] != fingerprint:
                both = "".join(f"\n  {pair.who(r)}: {text}" for r, text in sorted((first, [rank, fingerprint])))
                _end(store, key, f"ranks have derived other plans for {said}:{both}")
            if part and store.compare_set(f"{key}/held", "", json.dumps([held])) != json.dumps([held]).encode():
                store.set(f"{key}/fresh", "")
            store.set(f"{key}/came/{rank}", "1" if part else "0")
            self._check(store, pair, key, f"{said}, before the first byte", self.seconds)
            every = store.multi_get([f"{key}/came/{each}" for each in range(pair.size)])
            members = tuple(each for each, found in enumerate(every) if found == b"1")
            return Begun(members, held == "" or store.check([f"{key}/fresh"]))

        return self.ask(said, self.seconds + 2 * GRACE, come)

    def end(self, pair: Pair, rank: int, error: str, made: int, said: str) -> None:
        """Returns when the transfer has succeeded on all ranks of both jobs; `DesyncError` on all of them otherwise.

        error: why it failed on this rank, "" where it didn't. made: how many ranks connected anew for it.
        """
        key = f"{pair.key}/end"
        patience = REPORT if error else self.seconds + REPORT + GRACE

        def come(store: dist.Store) -> None:
            store.set(f"{key}/came/{rank}", error)
            self._check(store, pair, key, said, patience, error)
            if store.add(f"{key}/left", 1) == pair.size:
                _forget(store, pair)
                for each in range(made):
                    store.delete_key(f"{connection_prefix(pair)}/0/{each}")

        self.ask(said, patience + 2 * GRACE, come)
        self.met = [each for each in self.met if each != pair]

    def _check(self, store: dist.Store, pair: Pair, key: str, said: str, patience: float, error: str = "") -> None:
        """Counts this rank at a check, and waits for its end."""
        if store.add(f"{key}/count", 1) == pair.size:
            _end(store, key, _failures(store, pair, key, said))
        if not _polled(lambda: store.check([key]), patience):
            text = _failures(store, pair, key, said)
            _end(store, key, text or f"{said} isn't complete after {patience:g} s, though all ranks came")
        ended = json.loads(store.get(key))
        if ended["error"]:
            raise getattr(errors, ended["kind"])(ended["error"])

    def retire(self) -> None:
        """Says that the transfers that this job has met for are over; whose keys are still there, those have failed."""
        self.over += [(time.monotonic(), pair) for pair in self.met]
        self.met = []

    def _forget_over(self, store: dist.Store, kind: Any) -> None:
        """Removes the keys of transfers that failed, or of calls that met no other: nobody reads them any more."""
        for _, past in self.over:
            if isinstance(past, kind):
                _forget(store, past) if isinstance(past, Pair) else store.delete_key(past)
        self.over = [each for each in self.over if not isinstance(each[1], kind)]


def connection_prefix(pair: Pair) -> str:
    """Under which ranks that connect for a transfer leave their addresses."""
    return f"{pair.key}/connect"


def _call_of(record: dict[str, Any]) -> JobCall:
    return JobCall(**{name: value for name, value in record.items() if name != "side"})


def _end(store: dist.Store, key: str, error: str, kind: str = "DesyncError") -> None:
    """Ends a check, unless it has ended."""
    store.compare_set(key, "", json.dumps({"error": error, "kind": kind}))


def _failures(store: dist.Store, pair: Pair, key: str, said: str) -> str:
    """What went wrong, from what the ranks have reported; "" where all came and none failed."""
    came = [store.check([f"{key}/came/{rank}"]) for rank in range(pair.size)]
    missing = [rank for rank, found in enumerate(came) if not found]
    failed = []
    if key.endswith("/end"):
        reports = [(rank, store.get(f"{key}/came/{rank}").decode()) for rank, found in enumerate(came) if found]
        failed = [f"  {pair.who(rank)}: {text}" for rank, text in reports if text]
    lines = []
    if missing:
        lines = [
            f"{pair.whose(missing)} didn't come to {'the end of ' * bool(failed)}{said}: ended, stopped, or cut off"
        ]
    elif failed:
        lines = [f"{said} failed, and all ranks are there to say so:"]
    return "\n".join([*lines, *failed[:_SHOWN]])


def _forget(store: dist.Store, pair: Pair) -> None:
    for part in ("begin", "end"):
        key = f"{pair.key}/{part}"
        for each in ("plan", "held", "fresh", "count", "left", *(f"came/{rank}" for rank in range(pair.size))):
            store.delete_key(f"{key}/{each}")
        store.delete_key(key)
    for call in (pair.source, pair.target):
        store.delete_key(f"call/{call.id}")
        store.delete_key(f"met/{call.id}")
    for rank in range(pair.size):
        store.delete_key(f"{connection_prefix(pair)}/0/{rank}")


def _read(store: dist.Store, key: str) -> Any:
    """What is under a key, None where nothing is. (`get` would wait where another job removes it just then.)"""
    found = store.compare_set(key, _NOTHING, _NOTHING).decode()
    return None if found == _NOTHING else json.loads(found)


def _polled(condition: Callable[[], bool], patience: float) -> bool:
    """Whether it becomes true within some seconds; asked ever more slowly."""
    end, pause = time.monotonic() + patience, _FIRST_PAUSE
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True
