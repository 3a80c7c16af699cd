"""Agreement: ranks that disagree get an error that says how, on every rank, in place of a hang.

A collective that ranks enter with different ideas waits for ever and says nothing. So before
ranks rely on a common declaration or connect a process group, they compare what they hold through
the store that every `torch.distributed` job has. A *meeting* is one such comparison; a rank
*states* a line of text there, and the meeting *ends* well when all members have stated the same:

    store.set(note)                      this rank is at this meeting
    store.compare_set(statement)         the first statement stays; another one ends the meeting
    store.add(count)                     the last rank to come ends the meeting
    wait for the end

That is five store operations for each rank, whatever their number, and a poll now and then while it
waits. A meeting ends once, for all: whoever comes later reads the same end. It ends badly when

- a rank states something else: at once, with both statements;
- a rank raised an error of its own before it came (`refuse`): at once, with that error;
- members wait for one another in a circle, each at another meeting: within a second or so, with
  all that they wait for (the notes of the ranks tell);
- the time is up: with the ranks that didn't come, and what each was last seen waiting for.

Rank 0 hosts the store of a job, so it leaves a failed meeting last, or the others would see a
broken connection in place of the error.

>>> import torch.distributed as dist
>>> seat = Seat(dist.HashStore(), rank=0)
>>> agree(seat, Meeting("init_mesh over rank 0", range(1), "mesh", 0), "dp=1", timedelta(seconds=5))
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, NoReturn

import torch.distributed as dist

from axes.algebra.errors import DesyncError
from axes.algebra.universe import Universe

_HOST = 0
_LINGER_SECONDS = 5.0
_FIRST_POLL_SECONDS = 0.0005
_SLOWEST_POLL_SECONDS = 0.1
_FIRST_LOOK_SECONDS = 0.5
_NOTES_READ_AT_ONCE = 256
_RANKS_SHOWN = 16
_MEMBERS_STORED = 4096


@dataclass(frozen=True)
class Seat:
    """From where a rank takes part: the store of its world and its global rank."""

    store: dist.Store
    rank: int


@dataclass(frozen=True)
class Meeting:
    """One comparison among `members`: the `attempt`-th of its kind among these ranks.

    Members are met by their set, so that ranks which hold them in different orders meet and can
    disagree. `subject` completes "rank 3 waits for ..."; `advice` says what to write instead.
    """

    subject: str
    members: Sequence[int]
    kind: str
    attempt: int
    advice: str = ""

    @cached_property
    def topic(self) -> str:
        """What all members call this kind of meeting: `attempt` counts the meetings of a topic."""
        ascending = isinstance(self.members, range)
        return f"{self.kind}/{digest(self.members if ascending else sorted(self.members))}"


def agree(seat: Seat, meeting: Meeting, statement: str, timeout: timedelta) -> None:
    """Returns when every member of the meeting has stated the same; `DesyncError` on all otherwise.

    Waits `timeout` at most, and on rank 0 up to five seconds more where the meeting fails.
    """
    if len(meeting.members) == 1:
        return
    with _store_errors(meeting):
        key = _key(meeting)
        mine = {
            "rank": seat.rank,
            "text": statement,
            "subject": meeting.subject,
            "members": _packed(meeting.members),
        }
        _leave_note(seat, {"key": key, "subject": meeting.subject})
        first = json.loads(seat.store.compare_set(f"{key}/stated", "", json.dumps(mine)))
        if first["text"] != statement:
            error = _mismatch(meeting, first, mine)
            _end(seat.store, key, error, len(meeting.members), disagree=True)
        elif seat.store.add(f"{key}/count", 1) == len(meeting.members):
            _end(seat.store, key, None, len(meeting.members))
        end = _wait_for_end(seat, meeting, key, time.monotonic() + timeout.total_seconds(), timeout)
        if end["error"] is not None:
            _raise(seat, key, end, statement)


def refuse(seat: Seat, meeting: Meeting, error: Exception) -> None:
    """Ends a meeting for all its members because this rank can't come: it raises `error`."""
    if len(meeting.members) == 1:
        return
    # The caller raises `error`, which matters more than a store that can't be reached.
    with contextlib.suppress(dist.DistError):
        key = _key(meeting)
        said = f"{type(error).__name__}: {error}"
        _leave_note(seat, {"key": key, "subject": meeting.subject, "raised": said})
        text = f"rank {seat.rank} can't take part in {meeting.subject}, it raised {_indented(said)}"
        _end(seat.store, key, text, len(meeting.members))
        _leave(seat, key, len(meeting.members))


def pass_by(seat: Seat, subject: str) -> None:
    """Notes that this rank isn't a member of what it declares, for members that expect it."""
    with contextlib.suppress(dist.DistError):
        _leave_note(seat, {"subject": subject, "outside": True})


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


# The end of a meeting


def _end(store: dist.Store, key: str, error: str | None, present: int, disagree: bool = False) -> None:
    """Ends a meeting unless it has ended; `present` members are there to read it."""
    end = {"error": error, "present": present, "disagree": disagree}
    store.compare_set(f"{key}/end", "", json.dumps(end))


def _ended(store: dist.Store, key: str) -> dict[str, Any] | None:
    return _read(store, f"{key}/end")


def _read(store: dist.Store, key: str) -> dict[str, Any] | None:
    return json.loads(store.get(key)) if store.check([key]) else None


def _wait_for_end(seat: Seat, meeting: Meeting, key: str, deadline: float, timeout: timedelta) -> dict[str, Any]:
    """Polls, ever more slowly, since a blocking wait that times out writes warnings of its own."""
    started = time.monotonic()
    look = _FIRST_LOOK_SECONDS
    slowest = max(_SLOWEST_POLL_SECONDS, len(meeting.members) / 20_000)
    while (end := _ended(seat.store, key)) is None:
        now = time.monotonic()
        if now >= deadline:
            _time_is_up(seat, meeting, key, timeout)
        elif now - started >= look:
            look *= 2
            _end_circles(seat, meeting, key)
        pause = min(max(_FIRST_POLL_SECONDS, (now - started) / 8), slowest)
        time.sleep(max(0.0, min(pause, deadline - now)))
    return end


def _time_is_up(seat: Seat, meeting: Meeting, key: str, timeout: timedelta) -> None:
    """Ends a meeting with who is missing. One rank looks, the others wait for what it finds."""
    store = seat.store
    if store.compare_set(f"{key}/reporter", "", str(seat.rank)) != str(seat.rank).encode():
        patience = time.monotonic() + _LINGER_SECONDS + len(meeting.members) / 5_000
        while time.monotonic() < patience:
            if _ended(store, key) is not None:
                return
            time.sleep(_SLOWEST_POLL_SECONDS)
    missing = [rank for rank in meeting.members if _note(seat, rank).get("key") != key]
    seconds = f"{timeout.total_seconds():g} s"
    lines = [f"{meeting.subject} isn't complete after {seconds}, though all have been seen there"]
    if missing:
        lines = [f"{ranks_text(missing)} didn't come to {meeting.subject} within {seconds}:"]
    lines += [f"  {_last_seen(seat, rank)}" for rank in missing[:_RANKS_SHOWN]]
    present = [rank for rank in meeting.members if rank not in set(missing)]
    lines += [f"  {ranks_text(present)} waited for {meeting.subject}", meeting.advice]
    _end(store, key, "\n".join(filter(None, lines)), len(present))


def _raise(seat: Seat, key: str, end: dict[str, Any], statement: str) -> NoReturn:
    _leave(seat, key, end["present"])
    mine = ""
    if end["disagree"] and _indented(statement) not in end["error"]:
        mine = f"\nThis rank, {seat.rank}, holds: {_indented(statement)}"
    raise DesyncError(end["error"] + mine)


def _leave(seat: Seat, key: str, present: int) -> None:
    """Says that this rank has read the end. The host of the store waits for the others a while."""
    # The error that is being reported matters more than a store that is gone already.
    with contextlib.suppress(dist.DistError):
        seat.store.add(f"{key}/left", 1)
        patience = time.monotonic() + _LINGER_SECONDS
        while seat.rank == _HOST and time.monotonic() < patience and seat.store.add(f"{key}/left", 0) < present:
            time.sleep(0.005)


# Notes: where each rank was last seen


def _leave_note(seat: Seat, note: dict[str, Any]) -> None:
    seat.store.set(f"axes/rank/{seat.rank}", json.dumps(note))


def _note(seat: Seat, rank: int) -> dict[str, Any]:
    return _read(seat.store, f"axes/rank/{rank}") or {}


def _last_seen(seat: Seat, rank: int) -> str:
    note = _note(seat, rank)
    if not note:
        return f"rank {rank} hasn't been seen: it is still starting, has ended, or makes no mesh"
    if "outside" in note:
        return f"rank {rank} isn't a member of what it declared last, {note['subject']}"
    if "raised" in note:
        return f"rank {rank} raised in {note['subject']}: {_indented(note['raised'])}"
    end = _ended(seat.store, note["key"])
    if end is None:
        return f"rank {rank} waits for {note['subject']}"
    return f"rank {rank} was last seen {'failing' if end['error'] else 'passing'} in {note['subject']}"


def _end_circles(seat: Seat, meeting: Meeting, key: str) -> None:
    """Ends the meetings of ranks that wait for one another, this one among them, if there are any.

    From a meeting, the notes of the members that are missing lead to other meetings. A way back to
    a meeting that misses this rank is a circle: no meeting on it can end, since each misses a rank
    that is held at the next. That the meetings are still open is checked once the circle is found.
    """
    budget = iter(range(_NOTES_READ_AT_ONCE))
    circle = _way_back(seat, key, meeting.members, [(seat.rank, key, meeting.subject)], budget)
    if circle is None or any(_ended(seat.store, held) is not None for _, held, _ in circle):
        return
    waits = "".join(f"\n  rank {rank} waits for {subject}" for rank, _, subject in circle)
    error = f"ranks wait for one another:{waits}\n{meeting.advice}"
    for _, held, _ in circle:
        _end(seat.store, held, error, seat.store.add(f"{held}/count", 0))


_Wait = tuple[int, str, str]
"""A rank, the key of the meeting at which it is held, and that meeting's subject."""


def _way_back(
    seat: Seat, key: str, members: Sequence[int], way: list[_Wait], budget: Iterator[int]
) -> list[_Wait] | None:
    for rank in members:
        if rank == seat.rank and len(way) > 1:
            return way
        if rank in {passed for passed, _, _ in way} or next(budget, None) is None:
            continue
        note = _note(seat, rank)
        held = note.get("key", key)
        if held == key or _ended(seat.store, held) is not None:
            continue
        stated = _read(seat.store, f"{held}/stated") or {"members": ""}
        onward = [*way, (rank, held, note["subject"])]
        found = _way_back(seat, held, _unpacked(stated["members"]), onward, budget)
        if found is not None:
            return found
    return None


# Text


def _key(meeting: Meeting) -> str:
    return f"axes/{meeting.topic}/{meeting.attempt}"


def _mismatch(meeting: Meeting, first: dict[str, Any], mine: dict[str, Any]) -> str:
    lines = [f"ranks disagree in {meeting.subject}:"]
    lines += [f"  rank {said['rank']}: {_indented(said['text'])}" for said in (first, mine)]
    return "\n".join([*lines, meeting.advice] if meeting.advice else lines)


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def _packed(ranks: Sequence[int]) -> str:
    """Ranks as short text; none where it would be long, and circles through them aren't seen."""
    if isinstance(ranks, range):
        return f"{ranks.start}:{ranks.stop}:{ranks.step}"
    return ",".join(map(str, ranks)) if len(ranks) <= _MEMBERS_STORED else ""


def _unpacked(text: str) -> Sequence[int]:
    if ":" in text:
        return range(*map(int, text.split(":")))
    return tuple(map(int, text.split(","))) if text else ()


@contextlib.contextmanager
def _store_errors(meeting: Meeting) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise DesyncError(
            f"the job's store can't be reached in {meeting.subject}: {str(error).splitlines()[0]}\n"
            f"Rank {_HOST}, which hosts it, may have ended; its own error says why"
        ) from error
