"""Traces of a job, read together: what took the time, and which rank the others waited for.

    job = read_traces(["trace.0.json", "trace.1.json"])
    print(job.explanation())         # 80 columns

Each rank writes its own file, by its own clock. The n-th collective of a process group is the same one on all its
ranks, and of most kinds none ends on any rank before all have begun it:

- **Waiting.** All end it at about the same time. So the last to come has the shortest call, and each other has waited
  for as long as its own is longer. No clock has to be compared with that of another machine.
- **Causes.** The last to come may itself have waited for someone, in a group that the others aren't in. If it has
  waited longer than they since they last met, so much of its lateness is due to the rank that it waited for, or to
  whom that one waited for.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axes import AxesError
from axes.extension import bytes_text
from axes.pictures.panels import Listing, Remark, sheet_of
from axes.pictures.rank_text import short_ranks, time_text
from axes.pictures.show import Explanation

VERSION = 2
"""Of the files that this reads."""

_WORTH = 0.005
"""Below this part of the time that all ranks were recorded nobody asks for whom they waited."""

_MOSTLY = 0.6
"""A rank stands out for which the others waited so much of what they waited."""

_ROWS = 16
"""Rows of a table of the text."""

_MEETING = {"all_reduce", "all_gather", "reduce_scatter", "psum_scatter"}
"""What no rank ends before all have begun: each needs something of every other. Of an exchange the kind says that."""


@dataclass(eq=False)
class Issued:
    """A collective that a rank issued: nanoseconds on the clock of its machine.

    op: its facts. ns: how long it took, on the device where that is known, else its call; None where that hasn't ended.
    """

    rank: int
    clock: str
    what: str
    op: dict[str, Any]
    at: int
    ns: int | None = None

    @property
    def said(self) -> str:
        """What it is, and where."""
        inside = "".join(f"{part}: " for part in (["backward"] if self.op["backward"] else []) + self.op["parts"])
        return f"{inside}{self.what}{f', at {place}' if (place := self.op['place']) else ''}"

    @property
    def meets(self) -> bool:
        """Whether no rank had ended it before all had begun, and how long it took is known."""
        waited_for = self.ns is not None and not self.op["apart"] and not self.op["later"]
        return waited_for and (self.op["kind"] == "all_to_all" or bool({self.op["by"], self.op["kind"]} & _MEETING))


@dataclass
class Log:
    """The trace of one rank. `wall` and a time of its clock are the time of day."""

    rank: int
    world: int
    host: str
    clock: str
    wall: int
    events: list[Issued] = field(default_factory=list)


# --- files


def read_traces(paths: Iterable[str | Path]) -> Timeline:
    """The traces of a job's ranks, from their files. `AxesError` for what isn't one, or two of one rank."""
    logs, left_out = dict[int, Log](), list[str]()
    for path in paths:
        found = read_log(Path(path))
        if found is None:
            left_out.append(str(path))
        elif logs.setdefault(found.rank, found) is not found:
            raise AxesError(f"{path}: there is another trace of rank {found.rank}; give those of one job")
    if not logs:
        raise AxesError(
            f"no trace is given{' in ' * bool(left_out)}{', '.join(left_out)}; "
            "name the files that AXES_TRACE=trace.json has written: trace.*.json"
        )
    worlds = {log.world for log in logs.values()}
    if len(worlds) > 1:
        raise AxesError(f"these are traces of several jobs: of {' and of '.join(map(str, sorted(worlds)))} ranks")
    return Timeline([logs[rank] for rank in sorted(logs)], left_out)


def read_log(path: Path) -> Log | None:
    """The trace in a file; None where its process was killed before it had said whose it is.

    The last line is left out where it was cut off.
    """
    lines = path.read_bytes().splitlines()
    log: Any = None
    groups: dict[int, dict[str, Any]] = {}
    running: dict[int, list[Issued]] = defaultdict(list)
    begun: dict[tuple[int, float], Issued] = {}
    for number, line in enumerate(lines[1:], 2):
        try:
            said = json.loads(line.rstrip(b","))
            kind, told = said["ph"], said.get("args", {})
            if kind == "M" and said["name"] == "process_name":
                if told["axes_trace"] != VERSION:
                    raise AxesError(f"{path} is a trace of version {told['axes_trace']}; this reads version {VERSION}")
                log = Log(*(told[name] for name in ("rank", "world", "host", "clock", "wall")))
            elif kind == "M":
                ranks = told["ranks"]
                groups[told["number"]] = {**told, "ranks": range(*ranks["range"]) if "range" in ranks else tuple(ranks)}
            elif kind == "B":
                op = told | groups[told["group"]]
                event = Issued(log.rank, log.clock, _named(said["name"], op), op, _ns(said["ts"]))
                begun[said["tid"], said["ts"]] = event
                log.events.append(event)
                running[said["tid"]].append(event)
            elif kind == "E":
                event = running[said["tid"]].pop()
                event.ns = _ns(said["ts"]) - event.at
            else:
                begun[said["tid"], said["ts"]].ns = _ns(told["us"])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            if number < len(lines):
                raise AxesError(f"{path}, line {number}: {_NOT_OURS} ({type(error).__name__}: {error})") from None
    if lines[:1] not in ([], [b"["]):
        raise AxesError(f"{path}: {_NOT_OURS}")
    return log


_NOT_OURS = "this isn't a trace of axes; those are the files that AXES_TRACE=trace.json writes"


def _named(what: str, op: Mapping[str, Any]) -> str:
    """The operation, with the step of its plan."""
    part = " (step {} of {})".format(*op["step"]) if op["step"][1] > 1 else ""
    return f"{'' if op['kind'] == what.split(' ')[0] else op['kind'] + ' of '}{what}{part}"


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


# --- what the ranks did together


class Timeline:
    """The traces of a job's ranks, those that are given.

    left_out: the files that don't say whose they are. events: everything that was recorded, by rank, in its order
    there. start: the time of day at which an event was issued, by the clock of its machine. together: the collectives
    in which ranks waited for one another, in order of time, each as its events in the order in which they came;
    unlike: of each group the first one that isn't the same on all ranks, or is on other lines: the traces began at
    different times, or a rank skipped a call. waits: how long an event waited for the last rank to come. causes: by
    rank for whom it waited how long, in the end. span: from the first event to the end of the last one. open: what
    hadn't ended when its rank's trace did. All times are nanoseconds.
    """

    def __init__(self, logs: Sequence[Log], left_out: Sequence[str] = ()):
        self.logs, self.left_out = logs, left_out
        self.events = [event for log in logs for event in log.events]
        self._issued: dict[Any, dict[int, list[Issued]]] = defaultdict(lambda: defaultdict(list))
        for event in self.events:
            if not event.op["apart"]:
                self._issued[_group(event)][event.rank].append(event)
        met = [[*zip(*lists.values(), strict=False)] for lists in self._issued.values() if len(lists) > 1]
        self.unlike = [members for each in met for members in [*itertools.filterfalse(_on_one_line, each)][:1]]
        matched = [members for each in met for members in itertools.takewhile(_alike, each)]
        wall = {log.clock: log.wall for log in logs}  # ranks of one machine read one clock
        self.start = {event: event.at + wall[event.clock] for event in self.events}
        longest = [sorted(each, key=lambda e: (-(e.ns or 0), e.rank)) for each in matched if all(e.meets for e in each)]
        self.together = sorted(longest, key=lambda members: self.start[members[-1]])
        self.waits = {e: (e.ns or 0) - (each[-1].ns or 0) for each in self.together for e in each}
        self.causes = causes_of(self)
        ends = [self.start[event] + (event.ns or 0) for event in self.events]
        self.span = max(ends, default=0) - min(self.start.values(), default=0)
        self.open = [event for event in self.events if event.ns is None]

    def missing(self, event: Issued) -> list[int]:
        """The recorded ranks of the group of an event that never came to it."""
        lists = self._issued[_group(event)]
        number = lists[event.rank].index(event) if event in lists[event.rank] else -1
        return [
            log.rank for log in self.logs if log.rank in event.op["ranks"] and len(lists.get(log.rank, ())) <= number
        ]

    # what is said of them

    def slowest(self) -> dict[str, Any] | None:
        """The rank that the others waited for, where it is mostly one; at what they waited for it most."""
        waited, total = sum(self.waits.values()), sum(self.causes.values(), Counter[int]())
        rank, amount = next(iter(total.most_common(1)), (0, 0))
        if not waited or waited < self.span * len(self.logs) * _WORTH or amount < waited * _MOSTLY:
            return None
        late = Counter[str]()
        for *others, last in self.together:
            if last.rank == rank:
                late[last.said] += sum(self.waits[event] for event in others)
        return {"rank": rank, "awaited_ns": amount, "waited_ns": waited, "at": late.most_common(1)[0][0]}

    def summed(self, name: str, key: Callable[[Issued], str]) -> list[dict[str, Any]]:
        """Sums over all ranks of what has the same key, what took longest first."""
        sums: dict[str, Counter[str]] = defaultdict(Counter)
        for event in self.events:
            amounts = {"calls": 1, "bytes_in": event.op["in"], "bytes_out": event.op["out"], "ns": event.ns or 0}
            sums[key(event)].update(amounts, waited_ns=self.waits.get(event, 0))
        rows: list[dict[str, Any]] = [{name: each, **amounts} for each, amounts in sums.items()]
        return sorted(rows, key=lambda row: (-row["ns"], row[name]))

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
        facts: dict[str, Any] = {
            "ranks": [log.rank for log in self.logs],
            "world": self.logs[0].world,
            "left_out": [*self.left_out],
            "span_ns": self.span,
            "axes": self.summed("axis", lambda event: event.op["axis"] or "-"),
            "operations": self.summed("operation", lambda event: event.said),
            "by_rank": self.by_rank(),
            "slowest": self.slowest(),
            "open": [{"rank": e.rank, "operation": e.said, "missing": self.missing(e)} for e in self.open],
            "unlike": [[{"rank": e.rank, "operation": e.said} for e in members] for members in self.unlike],
        }
        ranks, hosts = len(self.logs), len({log.host for log in self.logs})
        last = sorted(facts["by_rank"], key=lambda row: (-row["awaited_ns"], row["rank"]))[:_ROWS]
        rows = [
            tuple([_time(amount) if name.endswith("ns") else str(amount) for name, amount in row.items()])
            for row in sorted(last, key=lambda row: int(row["rank"]))
        ]
        title = f"{ranks} of {self.logs[0].world} ranks, {hosts} host{'s' * (hosts != 1)}, {_time(self.span)}"
        sheet = sheet_of(
            title,
            "",
            Remark(tuple(f"  {note}" for note in self._notes(facts)), close=True),
            _sums("axes, averages over the ranks", facts["axes"], "axis", ranks) if self.events else None,
            _sums("operations", facts["operations"], "operation", ranks) if self.events else None,
            Listing(_HEAD_OF_RANKS, tuple(rows), title="ranks") if self.events else None,
        )
        return Explanation(lambda room: sheet, facts)

    def _notes(self, facts: Mapping[str, Any]) -> Iterator[str]:
        """What stands above the tables."""
        ranks, spent, waited = len(self.logs), sum(e.ns or 0 for e in self.events), sum(self.waits.values())
        calls = f"a rank spent {_time(spent // ranks)} in {len(self.events) // ranks} collectives"
        yield f"on average {calls}, {_time(waited // ranks)} of it waiting for others"
        for path in self.left_out[:_ROWS]:
            yield f"{path} is left out: it ends before it says whose it is"
        for each in facts["open"][:_ROWS]:
            missing = each["missing"]
            never = f"; rank{'s' * (len(missing) > 1)} {short_ranks(missing)} never came to it" if missing else ""
            yield f"rank {each['rank']} hadn't ended {each['operation']}{never}"
        for members in facts["unlike"][:_ROWS]:
            pair = "; ".join(f"rank {each['rank']} {each['operation']}" for each in members[:2])
            yield f"ranks of a group differ here for the first time: {pair}"
        if (slowest := facts["slowest"]) is not None:
            part = f"{_time(slowest['awaited_ns'])} of the {_time(slowest['waited_ns'])} that ranks waited in all"
            yield f"the others waited for rank {slowest['rank']}: {part}, most of it at its {slowest['at']}"


def _group(event: Issued) -> tuple[str, Sequence[int]]:
    """The process group of a collective, and its ranks."""
    return event.op["group"], event.op["ranks"]


def _alike(members: Sequence[Issued]) -> bool:
    return len({(each.op["kind"], each.op["by"], each.op["dtype"]) for each in members}) == 1


def _on_one_line(members: Sequence[Issued]) -> bool:
    return _alike(members) and len({each.op["place"] for each in members}) == 1


def causes_of(job: Timeline) -> dict[int, Counter[int]]:
    """By rank for whom it waited how long, in the end: see the top of this file."""
    found: dict[int, Counter[int]] = defaultdict(Counter)
    waited: dict[int, list[tuple[int, Counter[int]]]] = defaultdict(list)
    met: dict[Any, int] = {}
    for members in job.together:
        last = members[-1]
        since, now = met.get(_group(last)), job.start[last]
        mine = _since(waited[last.rank], since)
        for event in (each for each in members[:-1] if job.waits[each]):
            longer = mine.total() - _since(waited[event.rank], since).total()
            handed_on = min(job.waits[event], max(0, longer))
            blamed = Counter({rank: handed_on * amount // mine.total() for rank, amount in mine.items()})
            blamed[last.rank] += job.waits[event] - handed_on
            waited[event.rank].append((now, blamed))
            found[event.rank] += blamed
        met[_group(last)] = now
    return dict(found)


def _since(waited: Sequence[tuple[int, Counter[int]]], time: int | None) -> Counter[int]:
    """For whom a rank waited how long after a time."""
    recent = itertools.takewhile(lambda each: time is None or each[0] > time, reversed(waited))
    return sum((blamed for _, blamed in recent), Counter())


# --- text


def _sums(title: str, sums: Sequence[dict[str, Any]], name: str, ranks: int) -> Listing:
    """A table of sums, as the averages over the ranks."""
    means = ({**row, **{each: row[each] // ranks for each in ("bytes_out", "ns", "waited_ns")}} for row in sums)
    rows = (
        (
            f"{round(row['calls'] / ranks, 1):g}",
            bytes_text(row["bytes_out"]),
            _time(row["ns"]),
            _time(row["waited_ns"]),
            row[name],
        )
        for row in itertools.islice(means, _ROWS)
    )
    return Listing(("calls", "bytes out", "time", "waiting", name), tuple(rows), title=title)


_HEAD_OF_RANKS = ("rank", "calls", "time", "waited", "came last", "others waited for it")


def _time(nanoseconds: int) -> str:
    return time_text(nanoseconds / 1000)
