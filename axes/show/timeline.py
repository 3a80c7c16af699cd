"""Traces of a job, read together: what took the time, and which rank the others waited for.

    job = read_traces(["trace.0.json", "trace.1.json"])
    print(job.explanation())         # 80 columns
    job.chrome()                     # for chrome://tracing and Perfetto

Each rank writes its own file, by its own clock. The n-th collective of a process group is the same one on all its
ranks, which says three things:

- **Clocks.** None ends on any rank before all have begun it. So the clocks of two machines differ by no less than one
  such difference and by no more than another; the middle between the closest ones is taken. Ranks of one machine read
  one clock.
- **Waiting.** Who issues it before the last waits from there on, for as long as its call takes at most.
- **Causes.** The last to come may itself have waited for someone, in a group that the others aren't in. If it has
  waited longer than they since they last met, so much of its lateness is due to the rank that it waited for, or to
  whom that one waited for.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from axes.algebra.errors import AxesError
from axes.algebra.explanation import Explanation, Section
from axes.algebra.plan import bytes_text
from axes.show.rank_text import short_ranks, time_text

VERSION = 2
"""Of the files that this reads."""

_WORTH = 0.005
"""Below this part of the time that all ranks were recorded nobody asks for whom they waited."""

_MOSTLY = 0.6
"""A rank stands out for which the others waited so much of what they waited."""

_ROWS = 16
"""Rows of a table of the text."""

_RANK = ("rank", "world", "host", "clock", "wall")
"""What a file says at least of its rank."""

_OPERATION = ("kind", "by", "axis", "ranks", "dtype", "step", "in", "out", "place", "parts", "backward")
"""What is said at least of a collective, with its group."""

_MEETING = ("all_reduce", "all_gather", "reduce_scatter", "psum_scatter")
"""What no rank ends before all have begun: each needs something of every other."""


@dataclass(eq=False)
class Issued:
    """A collective that a rank issued: nanoseconds on the clock of its machine. `ns` is None where it hasn't ended."""

    rank: int
    clock: str
    op: dict[str, Any]
    at: int
    ns: int | None = None
    gpu_ns: int = 0

    @property
    def said(self) -> str:
        """What it is, and where."""
        inside = "".join(f"{part}: " for part in (["backward"] if self.op["backward"] else []) + self.op["parts"])
        return f"{inside}{self.what}{f', at {place}' if (place := self.op['place']) else ''}"

    @property
    def what(self) -> str:
        """The operation, with the step of its plan."""
        step, steps = self.op["step"]
        part = f" (step {step} of {steps})" if steps > 1 else ""
        collective = "" if self.op["kind"] == self.op["what"].split(" ")[0] else f"{self.op['kind']} of "
        return f"{collective}{self.op['what']}{part}"

    @property
    def group(self) -> tuple[str, Sequence[int]]:
        """The process group, and its ranks."""
        return self.op["group"], self.op["ranks"]

    @property
    def counts(self) -> bool:
        """Whether all ranks of the group meet in it, and the call ends when it has ended."""
        return not self.op.get("apart") and not self.op.get("later")

    @property
    def meets(self) -> bool:
        """Whether it says that no rank had ended it before all had begun."""
        return self.counts and self.ns is not None and bool({self.op["by"], self.op["kind"]} & {*_MEETING})


class Log(NamedTuple):
    """The trace of one rank. `wall` is what its clock is to be added to, to be the time of day."""

    rank: int
    world: int
    host: str
    clock: str
    wall: int
    events: Sequence[Issued]


class Clock(NamedTuple):
    """A machine's clock: `offset` is added to its times, and may be wrong by `error`. Nanoseconds."""

    offset: int
    error: int


# --- files


def read_traces(paths: Iterable[str | Path]) -> Timeline:
    """The traces of a job's ranks, from their files. `AxesError` for what isn't one, or two of one rank."""
    logs: dict[int, Log] = {}
    for path in paths:
        found = read_log(Path(path))
        if found.rank in logs:
            raise AxesError(f"{path}: there is another trace of rank {found.rank}; give those of one job")
        logs[found.rank] = found
    if not logs:
        raise AxesError("no trace is given; name the files that AXES_TRACE=trace.json has written: trace.*.json")
    worlds = {log.world for log in logs.values()}
    if len(worlds) > 1:
        raise AxesError(f"these are traces of several jobs: of {' and of '.join(map(str, sorted(worlds)))} ranks")
    return Timeline([logs[rank] for rank in sorted(logs)])


def read_log(path: Path) -> Log:
    """The trace in a file. What its process hadn't finished writing when it was killed is left out."""
    lines = path.read_bytes().splitlines()
    head: dict[str, Any] = {}
    groups: dict[int, dict[str, Any]] = {}
    events: list[Issued] = []
    running: dict[int, list[Issued]] = defaultdict(list)
    begun: dict[tuple[int, float], Issued] = {}
    for number, line in enumerate(lines, 1):
        if number == 1 and line == b"[":
            continue
        try:
            said = json.loads(line.rstrip(b","))
            kind, told = said["ph"], said.get("args", {})
            if kind == "M" and said["name"] == "process_name":
                head = told
                if told["axes_trace"] != VERSION:
                    raise AxesError(f"{path} is a trace of version {told['axes_trace']}; this reads version {VERSION}")
                _check_fields(told, _RANK)
            elif kind == "M":
                ranks = told["ranks"]
                groups[told["number"]] = {**told, "ranks": range(*ranks["range"]) if "range" in ranks else tuple(ranks)}
            elif kind == "B":
                op = {**told, **groups[told["group"]], "what": said["name"]}
                _check_fields(op, _OPERATION)
                event = Issued(head["rank"], str(head["clock"]), op, _ns(said["ts"]))
                events.append(event)
                running[said["tid"]].append(event)
                begun[said["tid"], said["ts"]] = event
            elif kind == "E":
                event = running[said["tid"]].pop()
                event.ns = _ns(said["ts"]) - event.at
            else:
                begun[said["tid"], said["ts"]].gpu_ns = _ns(told["us"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            if number == len(lines) and head:
                continue  # the last line, cut off
            raise AxesError(
                f"{path}, line {number}: this isn't a trace of axes ({type(error).__name__}: {error}); those are the "
                "files that AXES_TRACE=trace.json writes"
            ) from None
    if not head:
        raise AxesError(f"{path} says nothing of its rank: a trace of axes begins with a line about it")
    return Log(head["rank"], head["world"], head["host"], str(head["clock"]), head["wall"], events)


def _check_fields(said: dict[str, Any], names: Sequence[str]) -> None:
    """`KeyError` with the first name of which nothing is said."""
    for name in names:
        said[name]


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


# --- what the ranks did together


class Timeline:
    """The traces of a job's ranks, those that are given.

    events: everything that was recorded, by rank, in its order there. clocks: of the machines, by name. start: when an
    event was issued, on a clock that is the same for all ranks. together: the collectives in which ranks waited for one
    another, in order of time, each as its events in the order in which they came; unlike: of each group the first one
    that isn't the same on all ranks, since the traces began at different times. waits: how long an event waited for the
    last rank to come. causes: by rank for whom it waited how long, in the end. span: from the first event to the end of
    the last one. open: what hadn't ended when its rank's trace did. All times are nanoseconds.
    """

    def __init__(self, logs: Sequence[Log]):
        self.logs = logs
        self.events = [event for log in logs for event in log.events]
        self._issued: dict[Any, dict[int, list[Issued]]] = defaultdict(lambda: defaultdict(list))
        for event in self.events:
            if not event.op.get("apart"):
                self._issued[event.group][event.rank].append(event)
        met = [[*zip(*lists.values(), strict=False)] for lists in self._issued.values() if len(lists) > 1]
        self.unlike = [next(itertools.filterfalse(_alike, each)) for each in met if not all(map(_alike, each))]
        matched = [members for each in met for members in itertools.takewhile(_alike, each)]
        self.clocks = clocks_of(logs, matched)
        start = self.start = {event: event.at + self.clocks[event.clock].offset for event in self.events}
        counted = (members for members in matched if all(event.counts for event in members))
        came = [sorted(members, key=lambda event: (start[event], event.rank)) for members in counted]
        self.together = sorted(came, key=lambda members: start[members[-1]])
        self.waits = {
            event: late if event.ns is None else min(late, event.ns)
            for members in self.together
            for event in members
            for late in [start[members[-1]] - start[event]]
        }
        self.causes = causes_of(self)
        self.span = max((start[e] + (e.ns or 0) for e in self.events), default=0) - min(start.values(), default=0)
        self.open = [event for event in self.events if event.ns is None]

    def missing(self, event: Issued) -> list[int]:
        """The recorded ranks of the group of an event that never came to it."""
        lists = self._issued[event.group]
        if event not in lists[event.rank]:
            return []
        number, recorded = lists[event.rank].index(event), {log.rank for log in self.logs}
        return [r for r in event.op["ranks"] if r in recorded and len(lists.get(r, ())) <= number]

    # what is said of them

    def slowest(self) -> dict[str, Any] | None:
        """The rank that the others waited for, where it is mostly one; before what it spent most time of its own."""
        waited, total = sum(self.waits.values()), sum(self.causes.values(), Counter[int]())
        rank, amount = next(iter(total.most_common(1)), (0, 0))
        if not waited or waited < self.span * len(self.logs) * _WORTH or amount < waited * _MOSTLY:
            return None
        last = [members[-1] for members in self.together if members[-1].rank == rank]
        late = Counter({event.said: 0 for event in last})
        events = next(log.events for log in self.logs if log.rank == rank)
        for before, event in itertools.pairwise(events):
            if event in last:
                late[event.said] += event.at - before.at - (before.ns or 0)
        return {"rank": rank, "awaited_ns": amount, "waited_ns": waited, "at": late.most_common(1)[0][0]}

    def summed(self, name: str, key: Callable[[Issued], str]) -> list[dict[str, Any]]:
        """Sums over all ranks of what has the same key, what took longest first."""
        found: dict[str, dict[str, Any]] = {}
        for event in self.events:
            amounts = {"calls": 1, "bytes_in": event.op["in"], "bytes_out": event.op["out"], "ns": event.ns or 0}
            amounts |= {"waited_ns": self.waits.get(event, 0), "gpu_ns": event.gpu_ns}
            row = found.setdefault(key(event), {name: key(event), **dict.fromkeys(amounts, 0)})
            row |= {each: row[each] + amount for each, amount in amounts.items()}
        return sorted(found.values(), key=lambda row: (-row["ns"], row[name]))

    def by_rank(self) -> list[dict[str, Any]]:
        """What each rank did and waited, how often it came last, and how long others waited for it in the end."""
        last, awaited = Counter(each[-1].rank for each in self.together), sum(self.causes.values(), Counter[int]())
        return [
            {
                "rank": log.rank,
                "calls": len(log.events),
                "ns": sum(event.ns or 0 for event in log.events),
                "waited_ns": sum(self.waits.get(event, 0) for event in log.events),
                "last": last[log.rank],
                "awaited_ns": awaited[log.rank],
            }
            for log in self.logs
        ]

    def explanation(self) -> Explanation:
        """All of it as text and as data."""
        ranks, hosts, calls = len(self.logs), len({log.host for log in self.logs}), len(self.events)
        spent, waited = sum(event.ns or 0 for event in self.events), sum(self.waits.values())
        axes = self.summed("axis", lambda event: event.op["axis"] or "-")
        operations = self.summed("operation", lambda event: event.said)
        by_rank, slowest = self.by_rank(), self.slowest()
        facts = {
            "ranks": [log.rank for log in self.logs],
            "world": self.logs[0].world,
            "span_ns": self.span,
            "clocks": [{"name": name, **clock._asdict()} for name, clock in self.clocks.items()],
            "axes": axes,
            "operations": operations,
            "by_rank": by_rank,
            "slowest": slowest,
            "open": [{"rank": e.rank, "operation": e.said, "missing": self.missing(e)} for e in self.open],
            "unlike": [[{"rank": e.rank, "operation": e.said} for e in members] for members in self.unlike],
        }
        of_rank = f"a rank spent {_time(spent // ranks)} in {calls // ranks} collectives"
        notes = [f"on average {of_rank}, {_time(waited // ranks)} of it waiting for others"]
        if not calls:
            notes = ["no collective was recorded"]
        if len(self.clocks) > 1:
            error = max(clock.error for clock in self.clocks.values())
            notes.append(f"clocks of different machines agree within {_time(error)}")
        for event, missing in zip(self.open[:_ROWS], map(self.missing, self.open), strict=False):
            never = f"; rank{'s' * (len(missing) > 1)} {short_ranks(missing)} never came to it" if missing else ""
            notes.append(f"rank {event.rank} hadn't ended {event.said}{never}")
        for members in self.unlike[:_ROWS]:
            pair = "; ".join(f"rank {event.rank} {event.said}" for event in members[:2])
            notes.append(f"the traces of a group don't match from here on: {pair}")
        if slowest is not None:
            part = f"{_time(slowest['awaited_ns'])} of the {_time(slowest['waited_ns'])} that ranks waited in all"
            notes.append(f"the others waited for rank {slowest['rank']}: {part}, mostly before its {slowest['at']}")
        head = ("calls", "bytes out", "time", "waiting")
        last = sorted(by_rank, key=lambda row: (-row["awaited_ns"], row["rank"]))[:_ROWS]
        rows = [
            tuple(
                _time(amount) if name.endswith("_ns") or name == "ns" else str(amount) for name, amount in row.items()
            )
            for row in sorted(last, key=lambda row: row["rank"])
        ]
        sections = (
            Section("", tuple((note,) for note in notes)),
            Section("axes, means of a rank", ((*head, "axis"), *(_row(row, ranks, "axis") for row in axes[:_ROWS]))),
            Section("operations", ((*head, ""), *(_row(row, ranks, "operation") for row in operations[:_ROWS]))),
            Section("ranks", (("rank", "calls", "in them", "waited", "came last", "others waited for it"), *rows)),
        )
        heading = f"{ranks} of {self.logs[0].world} ranks, {hosts} host{'s' * (hosts != 1)}, {_time(self.span)}"
        return Explanation(heading, tuple(s for s in sections if calls or not s.title), facts)

    def chrome(self) -> dict[str, Any]:
        """The trace as Chrome's viewer and Perfetto read it: a process for each rank, a row for each axis."""
        rows = {axis: number for number, axis in enumerate(sorted({event.op["axis"] or "-" for event in self.events}))}
        last = {event: members[-1].rank for members in self.together for event in members}
        first = min(self.start.values(), default=0)
        found = [
            {"ph": "M", "name": name, "pid": log.rank, "tid": number, "args": {"name": text}}
            for log in self.logs
            for name, number, text in [("process_name", 0, f"rank {log.rank} ({log.host})")]
            + [("thread_name", number, axis) for axis, number in rows.items()]
        ]
        for event in self.events:
            axis, start = event.op["axis"], (self.start[event] - first) / 1000
            where = {"ph": "X", "pid": event.rank, "tid": rows[axis or "-"], "ts": start}
            told = {
                "operation": event.what,
                "line": event.op["place"],
                "part of": event.op["parts"],
                "backward": event.op["backward"],
                "bytes in": event.op["in"],
                "bytes out": event.op["out"],
                "dtype": event.op["dtype"],
                "ranks": short_ranks(event.op["ranks"]),
                "ended": event.ns is not None,
                "device us": event.gpu_ns / 1000,
            }
            found.append({**where, "name": f"{event.op['kind']} {axis}", "dur": (event.ns or 0) / 1000, "args": told})
            if waited := self.waits.get(event):
                name = f"waits for rank {last[event]}"
                found.append({**where, "name": name, "cat": "waiting", "dur": waited / 1000})
        return {"traceEvents": found, "displayTimeUnit": "ms"}


def _alike(members: Sequence[Issued]) -> bool:
    return len({(each.op["kind"], each.op["by"], each.op["dtype"]) for each in members}) == 1


def clocks_of(logs: Sequence[Log], matched: Iterable[Sequence[Issued]]) -> dict[str, Clock]:
    """The clocks of the machines, from the first on, by the collectives that their ranks have in common."""
    wall: dict[str, int] = {}
    for log in logs:
        wall.setdefault(log.clock, log.wall)
    bounds: dict[tuple[str, str], tuple[int, int]] = {}
    for members in matched if len(wall) > 1 else ():
        if all(each.meets for each in members):
            for one, two in itertools.permutations(members, 2):
                # Neither ends before the other has begun: between these lies what is added to `two`, less `one`'s.
                low, high = one.at - two.at - (two.ns or 0), one.at + (one.ns or 0) - two.at
                before = bounds.get((one.clock, two.clock), (low, high))
                bounds[one.clock, two.clock] = max(before[0], low), min(before[1], high)
    found = {logs[0].clock: Clock(logs[0].wall, 0)}
    while lost := [name for name in wall if name not in found]:
        reach = [(high - low, *pair) for pair, (low, high) in bounds.items() if pair[0] in found and pair[1] in lost]
        if reach:
            width, near, far = min(reach)  # the pair of clocks that is known best
            middle = sum(bounds[near, far]) // 2
            found[far] = Clock(found[near].offset + middle, found[near].error + abs(width) // 2)
        else:  # no collective in common: the time of day is all there is
            found[lost[0]] = Clock(wall[lost[0]], 10**9)
    return found


def causes_of(job: Timeline) -> dict[int, Counter[int]]:
    """By rank for whom it waited how long, in the end: see the top of this file."""
    found: dict[int, Counter[int]] = defaultdict(Counter)
    waited: dict[int, list[tuple[int, Counter[int]]]] = defaultdict(list)
    met: dict[Any, int] = {}
    for members in job.together:
        last = members[-1]
        since, now = met.get(last.group), job.start[last]
        mine = _since(waited[last.rank], since)
        for event in (each for each in members[:-1] if job.waits[each]):
            longer = mine.total() - _since(waited[event.rank], since).total()
            handed_on = min(job.waits[event], max(0, longer))
            blamed = Counter({rank: handed_on * amount // mine.total() for rank, amount in mine.items()})
            blamed[last.rank] += job.waits[event] - handed_on
            waited[event.rank].append((now, blamed))
            found[event.rank] += blamed
        met[last.group] = now
    return dict(found)


def _since(waited: Sequence[tuple[int, Counter[int]]], time: int | None) -> Counter[int]:
    """For whom a rank waited how long after a time."""
    recent = itertools.takewhile(lambda each: time is None or each[0] > time, reversed(waited))
    return sum((blamed for _, blamed in recent), Counter())


# --- text


def _row(row: dict[str, Any], ranks: int, name: str) -> tuple[str, ...]:
    """A row of sums, as the means of a rank."""
    times = _time(row["ns"] // ranks), _time(row["waited_ns"] // ranks)
    return str(row["calls"] // ranks), bytes_text(row["bytes_out"] // ranks), *times, row[name]


def _time(nanoseconds: int) -> str:
    return time_text(nanoseconds / 1000)
