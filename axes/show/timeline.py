"""Traces of a job, read together: what took the time, and which rank the others waited for.

    job = read_traces(["trace.0.jsonl", "trace.1.jsonl"])
    print(job)                       # 80 columns
    job.chrome()                     # for chrome://tracing and Perfetto

Each rank writes its own file (`axes.runtime.trace`), by its own clock. The n-th collective of a process group is the
same one on all its ranks, which says three things:

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
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from axes.algebra.errors import AxesError
from axes.algebra.plan import bytes_text

VERSION = 1
"""Of the files that this reads."""

_WIDTH = 80


@dataclass(frozen=True)
class Issued:
    """A collective that a rank issued: nanoseconds on the clock of its machine. `ns` is None where it hasn't ended."""

    rank: int
    op: Mapping[str, Any]
    place: str
    parts: tuple[str, ...]
    backward: bool
    bytes_in: int
    bytes_out: int
    at: int
    ns: int | None
    gpu_ns: int | None = None

    @property
    def said(self) -> str:
        """What it is, and where."""
        inside = "".join(f"{part}: " for part in (["backward"] if self.backward else []) + [*self.parts])
        return f"{inside}{self.what}{f', at {self.place}' if self.place else ''}"

    @property
    def what(self) -> str:
        """The operation, with the step of its plan."""
        step, steps = self.op["step"]
        part = f" (step {step} of {steps})" if steps > 1 else ""
        collective = "" if self.op["kind"] == self.op["what"].split(" ")[0] else f"{self.op['kind']} of "
        return f"{collective}{self.op['what']}{part}"

    @property
    def counts(self) -> bool:
        """Whether all ranks of the group meet in it, and the call ends when it has ended."""
        return not self.op.get("apart") and not self.op.get("later")


@dataclass(frozen=True)
class Log:
    """The trace of one rank. `wall` is what its clock is to be added to, to be the time of day."""

    rank: int
    world: int
    host: str
    clock: str
    wall: int
    events: tuple[Issued, ...]


@dataclass(frozen=True)
class Clock:
    """A machine's clock: `offset` is added to its times, and may be wrong by `error`. Nanoseconds."""

    name: str
    host: str
    offset: int
    error: int


@dataclass(frozen=True)
class Together:
    """One collective on all of its ranks that were recorded, in the order in which they came."""

    group: str
    members: tuple[Issued, ...]
    starts: tuple[int, ...]

    @property
    def last(self) -> Issued:
        """Who came last."""
        return self.members[-1]

    def waits(self) -> list[tuple[Issued, int]]:
        """How long each one waited for the last."""
        late = self.starts[-1]
        pairs = zip(self.members, self.starts, strict=True)
        return [(each, late - start if each.ns is None else min(late - start, each.ns)) for each, start in pairs]


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
        raise AxesError("no trace is given; name the files that AXES_TRACE=trace.jsonl has written: trace.*.jsonl")
    worlds = {log.world for log in logs.values()}
    if len(worlds) > 1:
        raise AxesError(f"these are traces of several jobs: of {' and of '.join(map(str, sorted(worlds)))} ranks")
    return Timeline(tuple(logs[rank] for rank in sorted(logs)))


def read_log(path: Path) -> Log:
    """The trace in a file. What its process hadn't finished writing when it was killed is left out."""
    try:
        lines = path.read_bytes().rstrip(b"\0").split(b"\n")
    except OSError as error:
        raise AxesError(f"{path}: {error.strerror}") from None
    header: dict[str, Any] = {}
    ops: dict[int, Any] = {}
    places, parts, events = {0: ""}, {0: ()}, list[Issued]()
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            said = json.loads(line)
            if "axes_trace" in said:
                if said["axes_trace"] != VERSION:
                    raise AxesError(f"{path} is a trace of version {said['axes_trace']}; this reads version {VERSION}")
                header = {name: said[name] for name in _OF_RANK}
            elif not header:
                raise KeyError("axes_trace")
            elif "what" in said:
                ops[said["op"]] = (
                    said | {name: said[name] for name in _OF_OPERATION} | {"ranks": _listed(said["ranks"])}
                )
            elif "place" in said:
                places[said["at"]] = said["place"]
            elif "parts" in said:
                parts[said["of"]] = tuple(said["parts"])
            else:
                where = places[said["at"]], parts[said["of"]], bool(said["back"])
                times = header["start"] + said["t"], said["ns"], said.get("gpu")
                op = ops[said["op"]]
                events.append(Issued(header["rank"], op, *where, op["in"], op["out"], *times))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and header:
                continue  # the last line, cut off
            raise AxesError(
                f"{path}, line {number}: this isn't a trace of axes ({type(error).__name__}: {error}); those are the "
                "files that AXES_TRACE=trace.jsonl writes"
            ) from None
    if not header:
        raise AxesError(f"{path} is empty: a trace of axes begins with a line that says of which rank it is")
    place = header["rank"], header["world"], header["host"], str(header["clock"])
    return Log(*place, header["wall"] - header["start"], tuple(events))


_OF_RANK = ("rank", "world", "host", "clock", "start", "wall")
_OF_OPERATION = ("kind", "axis", "group", "dtype", "step", "in", "out")
"""The fields that the line of a rank has at least, and that of an operation."""


def _listed(ranks: Any) -> Sequence[int]:
    return range(ranks["start"], ranks["stop"], ranks["step"]) if isinstance(ranks, dict) else ranks


# --- what the ranks did together


@dataclass(frozen=True)
class Timeline:
    """The traces of a job's ranks, those that are given."""

    logs: tuple[Log, ...]

    @cached_property
    def clocks(self) -> dict[str, Clock]:
        """The clocks of the machines, by name."""
        return clocks_of(self.logs, self._matched)

    def start(self, event: Issued) -> int:
        """When it was issued, on a clock that is the same for all ranks. Nanoseconds."""
        return event.at + self.clocks[self._clock_of[event.rank]].offset

    @cached_property
    def _clock_of(self) -> dict[int, str]:
        return {log.rank: log.clock for log in self.logs}

    @cached_property
    def events(self) -> list[Issued]:
        """Everything that was recorded, by rank, in its order there."""
        return [event for log in self.logs for event in log.events]

    @cached_property
    def _in_groups(self) -> dict[Any, dict[int, list[Issued]]]:
        """By group and rank what was issued there, in order."""
        found: dict[Any, dict[int, list[Issued]]] = {}
        for event in self.events:
            if not event.op.get("apart"):
                of_group = found.setdefault((event.op["group"], tuple(event.op["ranks"])), {})
                of_group.setdefault(event.rank, []).append(event)
        return found

    @cached_property
    def _matched(self) -> list[tuple[str, tuple[Issued, ...]]]:
        """The collectives that several ranks have recorded, group by group in order, as far as they are the same."""
        return [
            (str(group), members)
            for group, lists in self._in_groups.items()
            if len(lists) > 1
            for members in _same(zip(*lists.values(), strict=False))
        ]

    @cached_property
    def unlike(self) -> list[tuple[Issued, ...]]:
        """In each group the first collective that isn't the same on all ranks: the traces began at different times."""
        every = (next(_other(zip(*lists.values(), strict=False)), None) for lists in self._in_groups.values())
        return [members for members in every if members is not None]

    @cached_property
    def together(self) -> list[Together]:
        """The collectives in which ranks waited for one another, in order of time."""
        found = []
        for group, members in self._matched:
            if all(each.counts for each in members):
                starts = {id(each): self.start(each) for each in members}
                came = sorted(members, key=lambda each: (starts[id(each)], each.rank))
                found.append(Together(group, tuple(came), tuple(starts[id(each)] for each in came)))
        return sorted(found, key=lambda each: each.starts[-1])

    @cached_property
    def waits(self) -> dict[int, int]:
        """By the identity of an event how long it waited for the last rank to come."""
        return {id(event): wait for each in self.together for event, wait in each.waits()}

    @cached_property
    def causes(self) -> dict[int, Counter[int]]:
        """By rank for whom it waited how long, in the end."""
        return causes_of(self.together)

    @cached_property
    def span(self) -> int:
        """From the first event to the end of the last one."""
        ends = [self.start(event) + (event.ns or 0) for event in self.events]
        return max(ends) - min(map(self.start, self.events)) if ends else 0

    @cached_property
    def open(self) -> list[Issued]:
        """What hadn't ended when its rank's trace did."""
        return [event for event in self.events if event.ns is None]

    def missing(self, event: Issued) -> list[int]:
        """The recorded ranks of the group of an event that never came to it."""
        lists = self._in_groups.get((event.op["group"], tuple(event.op["ranks"])), {})
        mine = next((i for i, each in enumerate(lists.get(event.rank, [])) if each is event), None)
        recorded = {log.rank for log in self.logs}
        return [] if mine is None else [r for r in event.op["ranks"] if r in recorded and len(lists.get(r, ())) <= mine]

    # what is said of them

    @cached_property
    def slowest(self) -> Slowest | None:
        """The rank that the others waited for, where it is mostly one."""
        waited = sum(self.waits.values())
        total: Counter[int] = Counter()
        for causes in self.causes.values():
            total.update(causes)
        if not waited or waited < self.span * len(self.logs) * _WORTH:
            return None
        rank, amount = total.most_common(1)[0]
        if amount < waited * _MOSTLY:
            return None
        last = {id(each.last) for each in self.together}
        events = next(log.events for log in self.logs if log.rank == rank)
        late: Counter[str] = Counter()
        for before, event in itertools.pairwise(events):
            if id(event) in last:
                late[event.said] += event.at - before.at - (before.ns or 0)
        late.update({each.last.said: 0 for each in self.together if each.last.rank == rank})
        return Slowest(rank, amount, waited, late.most_common(1)[0][0])

    def by_axis(self) -> list[dict[str, Any]]:
        """What each axis took: sums over all ranks, those that took longest first."""
        return self._summed(lambda event: event.op["axis"] or "-", "axis")

    def by_operation(self) -> list[dict[str, Any]]:
        """What each operation took at each line."""
        return self._summed(lambda event: event.said, "operation")

    def _summed(self, key: Callable[[Issued], str], name: str) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for event in self.events:
            zero = {name: key(event), "calls": 0, "bytes_in": 0, "bytes_out": 0, "ns": 0, "waited_ns": 0, "gpu_ns": 0}
            row = found.setdefault(key(event), zero)
            row["calls"] += 1
            row["bytes_in"] += event.bytes_in
            row["bytes_out"] += event.bytes_out
            row["ns"] += event.ns or 0
            row["waited_ns"] += self.waits.get(id(event), 0)
            row["gpu_ns"] += event.gpu_ns or 0
        return sorted(found.values(), key=lambda row: (-row["ns"], row[name]))

    def by_rank(self) -> list[dict[str, Any]]:
        """What each rank did and waited, how often it came last, and how long others waited for it in the end."""
        rows: dict[int, dict[str, Any]] = {
            log.rank: {"rank": log.rank, "calls": 0, "ns": 0, "waited_ns": 0, "last": 0, "awaited_ns": 0}
            for log in self.logs
        }
        for event in self.events:
            rows[event.rank]["calls"] += 1
            rows[event.rank]["ns"] += event.ns or 0
            rows[event.rank]["waited_ns"] += self.waits.get(id(event), 0)
        for each in self.together:
            rows[each.last.rank]["last"] += 1
        for causes in self.causes.values():
            for rank, amount in causes.items():
                rows[rank]["awaited_ns"] += amount
        return list(rows.values())

    def json(self) -> dict[str, Any]:
        """All of it, as `python -m axes trace --json` prints it."""
        slowest = self.slowest
        return {
            "schema": 1,
            "command": "trace",
            "ranks": [log.rank for log in self.logs],
            "world": self.logs[0].world,
            "span_ns": self.span,
            "clocks": [vars(clock) for clock in self.clocks.values()],
            "axes": self.by_axis(),
            "operations": self.by_operation(),
            "by_rank": self.by_rank(),
            "slowest": None if slowest is None else vars(slowest),
            "open": [{"rank": e.rank, "operation": e.said, "missing": self.missing(e)} for e in self.open],
            "unlike": [[{"rank": e.rank, "operation": e.said} for e in members] for members in self.unlike],
        }

    def chrome(self) -> dict[str, Any]:
        """The trace as Chrome's viewer and Perfetto read it: a process for each rank, a row for each axis."""
        first = min(map(self.start, self.events), default=0)
        rows = {axis: number for number, axis in enumerate(sorted({event.op["axis"] or "-" for event in self.events}))}
        last = {id(event): each.last.rank for each in self.together for event in each.members}
        found: list[dict[str, Any]] = []
        for log in self.logs:
            found.append(_named("process_name", log.rank, 0, f"rank {log.rank} ({log.host})"))
            found += [_named("thread_name", log.rank, number, axis) for axis, number in rows.items()]
        for event in self.events:
            where: dict[str, Any] = {
                "pid": event.rank,
                "tid": rows[event.op["axis"] or "-"],
                "ts": (self.start(event) - first) / 1000,
            }
            told: dict[str, Any] = {"operation": event.what, "line": event.place, "part of": [*event.parts]}
            told |= {"bytes in": event.bytes_in, "bytes out": event.bytes_out, "dtype": event.op["dtype"]}
            told |= {"backward": event.backward, "ranks": str([*event.op["ranks"]][:64]), "ended": event.ns is not None}
            told |= {} if event.gpu_ns is None else {"device us": event.gpu_ns / 1000}
            name = f"{event.op['kind']} {event.op['axis']}".strip()
            found.append({"ph": "X", "name": name, "dur": (event.ns or 0) / 1000, "args": told, **where})
            if waited := self.waits.get(id(event)):
                name = f"waits for rank {last[id(event)]}"
                found.append({"ph": "X", "name": name, "cat": "waiting", "dur": waited / 1000, **where})
        return {"traceEvents": found, "displayTimeUnit": "ms"}

    def __str__(self) -> str:
        return "\n".join(report_of(self))


_WORTH = 0.005
"""Below this part of the time that all ranks were recorded nobody asks for whom they waited."""

_MOSTLY = 0.6
"""A rank stands out for which the others waited so much of what they waited."""


@dataclass(frozen=True)
class Slowest:
    """The rank that the others waited for: nanoseconds, of how many, and before what it spent most time of its own."""

    rank: int
    awaited_ns: int
    waited_ns: int
    at: str


def _alike(members: Sequence[Issued]) -> bool:
    return len({(each.op["kind"], each.op["by"], each.op["dtype"]) for each in members}) == 1


def _same(matched: Iterable[tuple[Issued, ...]]) -> Iterator[tuple[Issued, ...]]:
    return itertools.takewhile(_alike, matched)


def _other(matched: Iterable[tuple[Issued, ...]]) -> Iterator[tuple[Issued, ...]]:
    return (members for members in matched if not _alike(members))


def clocks_of(logs: Sequence[Log], matched: Sequence[tuple[str, tuple[Issued, ...]]]) -> dict[str, Clock]:
    """The clocks of the machines, by the collectives that their ranks have in common."""
    hosts: dict[str, str] = {}
    wall: dict[str, int] = {}
    for log in logs:
        hosts.setdefault(log.clock, log.host)
        wall.setdefault(log.clock, log.wall)
    of_rank = {log.rank: log.clock for log in logs}
    bounds: dict[tuple[str, str], tuple[int, int]] = {}
    for _, members in matched:
        if len(hosts) == 1:
            break
        if all(each.counts and each.ns is not None and _meet(each) for each in members):
            for one, two in itertools.permutations(members, 2):
                pair = of_rank[one.rank], of_rank[two.rank]
                if pair[0] != pair[1]:
                    # Neither ends before the other has begun: between these lies what is added to `two`, less `one`'s.
                    ends = [each.at + wall[clock] for each, clock in zip((one, two), pair, strict=True)]
                    low, high = ends[0] - (ends[1] + (two.ns or 0)), ends[0] + (one.ns or 0) - ends[1]
                    before = bounds.get(pair, (low, high))
                    bounds[pair] = max(before[0], low), min(before[1], high)
    return _from_first(hosts, wall, bounds)


def _meet(event: Issued) -> bool:
    """Whether no rank ends before all have begun: each needs something of every other."""
    return event.op["by"] in _MEETING or event.op["kind"] in _MEETING


_MEETING = ("all_reduce", "all_gather", "reduce_scatter", "psum_scatter")


def _from_first(
    hosts: Mapping[str, str], wall: Mapping[str, int], bounds: Mapping[tuple[str, str], tuple[int, int]]
) -> dict[str, Clock]:
    """Offsets from the first clock on, over the pairs of clocks that are known best."""
    names = [*hosts]
    found = {names[0]: Clock(names[0], hosts[names[0]], wall[names[0]], 0)}
    while len(found) < len(names):
        reach = [
            (high - low, one, two) for (one, two), (low, high) in bounds.items() if one in found and two not in found
        ]
        if not reach:
            # No collective in common: the time of day is all there is.
            lost = next(name for name in names if name not in found)
            found[lost] = Clock(lost, hosts[lost], wall[lost], 10**9)
            continue
        width, one, two = min(reach)
        low, high = bounds[one, two]
        moved = found[one].offset - wall[one] + (low + high) // 2
        found[two] = Clock(two, hosts[two], wall[two] + moved, found[one].error + abs(width) // 2)
    return found


def causes_of(together: Sequence[Together]) -> dict[int, Counter[int]]:
    """By rank for whom it waited how long, in the end: see the top of this file."""
    found: dict[int, Counter[int]] = defaultdict(Counter)
    waited: dict[int, list[tuple[int, int, Mapping[int, float]]]] = defaultdict(list)
    met: dict[str, int] = {}
    for each in together:
        since, late = met.get(each.group, -1), each.last.rank
        mine = _since(waited[late], since)
        for event, wait in each.waits():
            if event.rank == late or not wait:
                continue
            others = _since(waited[event.rank], since)
            passed_on = min(wait, max(0, sum(mine.values()) - sum(others.values())))
            blamed: Counter[int] = Counter({late: wait - int(passed_on)})
            for rank, amount in mine.items():
                blamed[rank] += int(passed_on * amount / sum(mine.values()))
            found[event.rank].update(blamed)
            waited[event.rank].append((each.starts[-1], wait, blamed))
        met[each.group] = each.starts[-1]
    return {rank: Counter({who: ns for who, ns in causes.items() if ns}) for rank, causes in found.items()}


def _since(waited: Sequence[tuple[int, int, Mapping[int, float]]], time: int) -> Counter[int]:
    """For whom a rank waited how long after a time."""
    total: Counter[int] = Counter()
    for at, _, blamed in reversed(waited):
        if at <= time:
            break
        total.update(blamed)
    return total


def _named(what: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "args": {"name": name}}


# --- text


def report_of(job: Timeline) -> Iterator[str]:
    """A timeline as text of 80 columns."""
    ranks, hosts = len(job.logs), len({log.host for log in job.logs})
    events = job.events
    yield f"{ranks} of {job.logs[0].world} ranks, {hosts} host{'s' * (hosts != 1)}, {span_text(job.span)}"
    if len(job.clocks) > 1:
        yield f"clocks of different machines agree within {span_text(max(c.error for c in job.clocks.values()))}"
    if not events:
        yield "no collective was recorded"
        return
    spent, waited = sum(event.ns or 0 for event in events), sum(job.waits.values())
    of_rank = f"a rank spent {span_text(spent // ranks)} in {len(events) // ranks} collectives"
    yield from wrapped(f"on average {of_rank}, {span_text(waited // ranks)} of it waiting for others")
    yield ""
    yield f"{'axis (means of a rank)':<24}{_HEAD}"
    for row in job.by_axis()[:_ROWS]:
        yield f"{shortened_to(row['axis'], 23):<24}{row['calls'] // ranks:>8}{_of_row(row, ranks)}"
    yield ""
    yield f"{'operation':<24}{_HEAD}"
    for row in job.by_operation()[:_TOP]:
        yield from textwrap.wrap(row["operation"], _WIDTH, subsequent_indent="    ")
        yield f"{'':<24}{row['calls'] // ranks:>8}{_of_row(row, ranks)}"
    yield ""
    yield from _lines_of_ranks(job)
    if job.open or job.unlike:
        yield ""
    for event in job.open[:_ROWS]:
        missing = job.missing(event)
        never = f"; {ranks_said(missing)} never came to it" if missing else ""
        yield from wrapped(f"rank {event.rank} hadn't ended {event.said}{never}")
    for members in job.unlike[:_ROWS]:
        said = "; ".join(f"rank {each.rank} {each.said}" for each in members[:2])
        yield from wrapped(f"the traces of a group don't match from here on: {said}")
    if (slowest := job.slowest) is not None:
        part = f"{span_text(slowest.awaited_ns)} of the {span_text(slowest.waited_ns)} that ranks waited in all"
        yield ""
        yield from wrapped(f"The others waited for rank {slowest.rank}: {part}, mostly before its {slowest.at}")


_ROWS, _TOP, _RANKS = 16, 5, 16
_HEAD = f"{'calls':>8}{'bytes out':>12}{'time':>10}{'waiting':>10}"


def _of_row(row: Mapping[str, Any], ranks: int) -> str:
    moved = bytes_text(row["bytes_out"] // ranks)
    return f"{moved:>12}{span_text(row['ns'] // ranks):>10}{span_text(row['waited_ns'] // ranks):>10}"


def _lines_of_ranks(job: Timeline) -> Iterator[str]:
    rows = job.by_rank()
    yield f"{'rank':<8}{'calls':>8}{'in them':>12}{'waited':>12}{'came last':>12}{'others waited for it':>24}"
    shown = sorted(rows, key=lambda row: (-row["awaited_ns"], row["rank"]))[:_RANKS]
    for row in sorted(shown, key=lambda row: row["rank"]):
        times = f"{span_text(row['ns']):>12}{span_text(row['waited_ns']):>12}"
        yield f"{row['rank']:<8}{row['calls']:>8}{times}{row['last']:>12}{span_text(row['awaited_ns']):>24}"
    if len(rows) > len(shown):
        yield f"and {len(rows) - len(shown)} more ranks, for which others waited less"


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of 80 columns, those after the first indented further."""
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def shortened_to(text: str, width: int) -> str:
    """`text`, or its beginning."""
    return text if len(text) <= width else text[: width - 3] + "..."


def ranks_said(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 2`, `ranks 1, 2 and 30 more`."""
    first = ", ".join(map(str, ranks[:8]))
    rest = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) != 1)} {first}{rest}"


def span_text(nanoseconds: int) -> str:
    """A time in three digits.

    >>> span_text(1_234_567), span_text(999), span_text(0)
    ('1.23 ms', '0.999 us', '0')
    """
    if not nanoseconds:
        return "0"
    unit, size = next(((u, s) for u, s in (("s", 10**9), ("ms", 10**6)) if nanoseconds >= s), ("us", 10**3))
    return f"{nanoseconds / size:.3g} {unit}" if nanoseconds < 1000 * size else f"{nanoseconds / size:.0f} {unit}"
