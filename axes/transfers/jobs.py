"""Tensors between jobs: `axes.connect` and the link that it gives.

    link = axes.connect(store, "trainer", mesh)                       # in one job
    link.send(model.state_dict(), specs, to="generator")

    link = axes.connect(store, "generator", mesh)                     # in another
    link.receive(into=weights, specs=specs, source="trainer")

Each job runs its own `torch.distributed`, and what both reach is a store. There each job has an entry under its name,
with a token that is new each time it joins. A call for a transfer:

1. The first rank of each job puts a call into the store, and takes the other job's call out of it:

       set(call/trainer/generator, own call)          poll call/generator/trainer, and delete it

2. The ranks of a job compare what they call, and tell each other with whom, and the whole shapes and dtypes of their
   tensors. From then on the ranks of both jobs are one list, numbered by job, and come to barriers (see `agreement`).
3. At the first one each job says by text, for each tensor, its spec, whole shape and dtype, and the axes that the spec
   names, as digits of the job's ranks. From both texts each rank derives the plan: an `axes.transfer` over all ranks.
4. At the second one they compare fingerprints of the plan, and say whether their tensors fit, before the first byte.
5. All ranks connect by a communicator that is no group of either job, and carry the plan out. The next transfer
   between the same jobs uses it again.
6. At the third one they say how it ended. Where one failed or says nothing, all raise.

The keys of a transfer have the numbers of both calls in them, so that those of one that failed are found when nobody
reads them any more.

>>> here, there = JobCall("trainer", "generator", "a1.0", 2, 0), JobCall("generator", "trainer", "b7.0", 3, 1)
>>> JobPair(here, there, 0).whose([3])
"rank 0 of 'trainer'"
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from axes import AxesError, DesyncError, Layout, Mesh, MeshError, Sharding, ShardingError
from axes.extension import (
    LINGER_SECONDS,
    Barrier,
    Member,
    Operation,
    agree,
    agree_at,
    as_timeout,
    checked_mesh,
    current_world,
    dense,
    dtype_name,
    heard,
    in_time,
    note_key,
    polled,
    ranks_text,
    shortened,
    shown,
    suggestion,
    torch_private,
    tuple_of,
)
from axes.transfers.execution import Execution, telling
from axes.transfers.layout_rules import LayoutRules, Table
from axes.transfers.transfers import Like, Transfer, of_tensor, read_end, transfer

_ADVICE = "All ranks of the mesh call it alike, in the same order; none has other specs"

_CALLS = ("link.send", "link.receive")

_PLAN, _BEGIN, _END = "to plan it, before the first byte", "before the first byte", "after the last byte"
"""The barriers of a transfer."""

_STORE = "the link's store"
"""What errors call the store of a link."""

GRACE = 1.0
"""Seconds that one waits longer than the other side: its error says more than one's own."""

REPORT = 1.5
"""Seconds in which all ranks report a failure that closes their connections."""

BUCKET_MB = 64.0
"""MiB of the buffers of a bucket, the same in all jobs."""


def connect(
    store: dist.Store,
    name: str,
    mesh: Mesh,
    peers: Sequence[str] = ("trainer", "generator"),
    timeout: timedelta | float | None = None,
) -> JobLink:
    """Join this job to other jobs, to exchange tensors with them. All ranks of the mesh call it.

    Each job has its own `torch.distributed`, which it starts and ends by itself; a job of one rank needs none.
    `connect` waits for no other job, and a transfer does, so jobs may start in any order. A job that joins under a
    name that is taken replaces the job before.

    Args:
        store: A store that all jobs reach, such as a `TCPStore`, or a `FileStore` on one host. Its host should
            outlive the jobs. A `PrefixStore` of it keeps links apart.
        name: The name of this job, one of `peers`.
        mesh: The mesh of this job.
        peers: The names of all jobs.
        timeout: How long ranks wait for each other in each phase, a `timedelta` or seconds; by default as the mesh's
            groups.

    Returns:
        A link, with `send`, `receive` and `close`.

    Raises:
        MeshError: The store, the names or the mesh aren't valid.
        DesyncError: Ranks of this job disagree, or one doesn't come.

    Examples:
        >>> link = connect(dist.HashStore(), "trainer", Mesh("dp=1"), timeout=5)
        >>> link.close()
    """
    if not isinstance(store, dist.Store):
        raise MeshError(f"a link is made at a torch.distributed store, such as a TCPStore; found {shown(store)}")
    names = () if isinstance(peers, str) else tuple_of(peers) or ()
    words = {each for each in names if isinstance(each, str) and each.isidentifier()}
    if not 2 <= len(words) == len(names):
        raise MeshError(f"peers are two or more words, all different; found {shown(peers)}")
    _check_peer("peers", name, names)
    whole = checked_mesh(mesh)
    if whole.size < whole.universe.size:
        ranks = [int(rank) for rank in whole.universe.group(whole.extent, whole.rank)]
        raise MeshError(
            f"{whole!r} is another one on each rank, and all ranks of the mesh of a link are one job. Connect by the "
            f"whole mesh; or by one of these ranks alone, like axes.init_mesh(..., ranks={ranks})"
        )
    return JobLink(store, name, whole, names, as_timeout(timeout, "timeout"))


def _check_peer(what: str, name: Any, peers: Sequence[str]) -> None:
    if not isinstance(name, str) or name not in peers:
        near = suggestion(name, peers) if isinstance(name, str) else ""
        raise MeshError(f"{shown(name)} isn't among the {what}{near}")


@dataclass(frozen=True)
class JobCall:
    """One call of a job for a transfer, as the other job reads it.

    other: the job with which it is. id: of no other call. size: ranks of the job. side: 0 where it sends, 1 where it
    receives. error: why it can't take part.
    """

    name: str
    other: str
    id: str
    size: int
    side: int
    error: str = ""

    @property
    def names(self) -> tuple[str, str]:
        """Who sends, and who receives."""
        return (self.name, self.other) if self.side == 0 else (self.other, self.name)

    @property
    def said(self) -> str:
        """The transfer in words."""
        return f"the transfer from '{self.names[0]}' to '{self.names[1]}'"


class JobPair:
    """The calls of two jobs that have met. Their ranks are numbered job after job, the same by every rank of both.

    rank: the number of this rank in its job; then in both. key: what the keys of this transfer begin with. first: the
    number of each job's first rank.
    """

    def __init__(self, own: JobCall, other: JobCall, rank: int):
        one, two = self.jobs = sorted((own, other), key=lambda call: call.name)
        self.key, self.ranks = f"pair/{one.id}/{two.id}", range(one.size + two.size)
        self.first = {one.name: 0, two.name: one.size}
        self.rank = self.first[own.name] + rank

    def whose(self, ranks: Sequence[int]) -> str:
        """Some ranks in words."""
        own = [(job, [rank - self.first[job.name] for rank in ranks]) for job in self.jobs]
        each = [(job.name, [rank for rank in numbers if 0 <= rank < job.size]) for job, numbers in own]
        return " and ".join(f"{ranks_text(some)} of '{name}'" for name, some in each if some)


class JobLink(contextlib.AbstractContextManager["JobLink"]):
    """One job's end of a link to other jobs; made by `axes.connect`.

    All ranks of the job call `send` and `receive` alike. After an error the link is as usable as before: the next
    transfer begins anew. That isn't so where a rank has left a call out: then all calls of the job fail from there on,
    on this link and on another of the same ranks. `close`, or the end of a `with` block, leaves.
    """

    def __init__(self, store: dist.Store, name: str, mesh: Mesh, peers: tuple[str, ...], timeout: timedelta | None):
        self.name, self.mesh, self.ranks = name, mesh, mesh.universe.ranks
        self.others = [peer for peer in peers if peer != name]
        self.device = torch.device(mesh.binding.device_type if mesh.binding is not None else "cpu")
        running = dist.is_initialized()
        if not running and len(self.ranks) > 1:
            raise MeshError(
                f"{mesh!r} has {len(self.ranks)} ranks, and torch.distributed isn't running; call axes.init_mesh"
            )
        if running and max(self.ranks) >= dist.get_world_size():
            raise MeshError(f"{mesh!r} has rank {max(self.ranks)}, and the job has {dist.get_world_size()} ranks")
        if running and current_world().fake:
            raise MeshError(
                "axes.connect needs a real job, started by axes.init_mesh; found the world of axes.simulate"
            )
        self.job_rank = current_world().rank if running else self.ranks[0]
        position = mesh.universe.position(self.job_rank)
        if position is None:
            raise MeshError(f"rank {self.job_rank} isn't one of the ranks of {mesh!r}, which are those that connect")
        self.rank, self.who, self.subject = position, f"rank {position} of '{name}'", f"a call of the link of '{name}'"
        usual = current_world().limit if running else torch_private.usual_timeout("gloo")
        self.timeout, self.store = timeout or usual, dist.PrefixStore("axes/link", store)
        self.seconds, self.calls, self.closed = self.timeout.total_seconds(), 0, False
        self.failed: list[str] = []
        """What the keys begin with of transfers for which the job has met since the last one that ended well."""
        self.connections: dict[str, tuple[str, Any]] = {}
        """By other job the communicator of all ranks of both, with the key of the transfer that it was made for."""
        self.runs: dict[str, Execution] = {}
        said = f"axes.connect(store, '{name}', {mesh.declaration}, peers={peers})"
        self.token = self._told(said, uuid.uuid4().hex[:12])[0]
        if self.rank == 0:
            in_time("axes.connect", self.seconds, self._join, _STORE)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave: end this rank's connections and remove the job's keys from the store. It waits for no other rank."""
        if self.closed:
            return
        self.closed = True
        for other in self.others:
            self._disconnect(other)
        self.runs.clear()
        time.sleep(GRACE if self.failed else 0)  # in which others read how it failed
        with contextlib.suppress(DesyncError):  # a store that is gone keeps nothing
            in_time("the end of a link", self.seconds, self._leave, _STORE)

    def send(
        self,
        tensors: Mapping[str, Any],
        specs: Mapping[str, str | Sharding],
        to: str = "generator",
        rules: LayoutRules | Table | None = None,
    ) -> None:
        """Send tensors to the job `to`, which calls `receive` for them.

        tensors: by name, DTensors or this rank's shards; None, or nothing, on ranks that have none of a tensor.
        specs: by name how each tensor lies on this job's mesh, the same on all ranks: a whole spec, or a `Sharding`.
        rules: a table, or `axes.LayoutRules`, of how the other job's names and layouts follow from this one's.

        Returns when they have arrived on all ranks of the other job. Raises `ShardingError`, before anything is sent,
        where tensors don't fit their specs or those of the other job; `DesyncError` where ranks differ, and where the
        other job doesn't come, ends or stalls; `MeshError` where the link is closed. Where one rank raises, so do all
        of both jobs that take part in the call. A job that finds its own mistake before the other has come waits for
        nobody; the other one is told of it when it comes.
        """
        self._transfer(0, to, tensors, specs, rules)

    def receive(
        self,
        into: Mapping[str, Any],
        specs: Mapping[str, str | Sharding],
        source: str = "trainer",
    ) -> dict[str, Any]:
        """Receive tensors from the job `source`, which calls `send`, into this rank's own; returns them.

        into: by name, DTensors, shards or views of any strides, which are written where they lie; None, or nothing, on
        ranks that have none of a tensor. specs: as for `send`. Floating-point dtypes may differ: tensors become those
        of `into` before they are sent.

        Raises as `send`. An error before the first byte says that nothing was written; a later one which tensors are
        whole on this rank. A tensor that isn't whole has old and new elements.
        """
        self._transfer(1, source, into, specs, None)
        return dict(into)

    # one transfer

    def _transfer(self, side: int, other: str, tensors: Any, specs: Any, rules: Any) -> None:
        _check_peer("other peers", other, self.others)
        self.calls += 1
        call = JobCall(self.name, other, f"{self.token}.{self.calls}", len(self.ranks), side)
        if self.closed:
            raise MeshError(f"this link of '{self.name}' is closed; axes.connect makes another one for {call.said}")
        with telling(self._refuse), telling(lambda e: self._of_first(replace(call, error=f"{e}"), GRACE, self._offer)):
            own = OwnTensors(self, tensors, specs, _CALLS[side], rules)
        pair, text = heard(self._operation(call, f"{_CALLS[side]} waiting for '{other}'"), self._met, call, own)
        with telling(lambda _: self._disconnect(other)):
            self._carried_out(pair, call, text, own.given)

    def _met(self, call: JobCall, own: OwnTensors) -> tuple[JobPair, str]:
        """With whom the call has met, and what this job says of its tensors, when all of its ranks have come."""
        with telling(self._refuse):
            met = self._of_first(call, self.seconds + GRACE, self._meet)
        with telling(lambda wrong: met and self._agreed(JobPair(call, met, self.rank), _PLAN, wrong)):
            every = self._told(f"{call.said}, of {own.written}", [met and asdict(met), own.told])
            text = own.text([told for _, told in every])
        return JobPair(call, JobCall(**every[0][0]), self.rank), text

    def _refuse(self, wrong: AxesError) -> None:
        """Tell the other ranks of the job of an error: they come to `_told` instead."""
        agree(self.subject, self.ranks, wrong)

    def _told(self, statement: str, told: Any) -> list[Any]:
        """What each rank of this job tells the others, when all have come and stated the same."""
        # The first rank comes when it has met the other job.
        limit = self.timeout if self.rank == 0 else 2 * self.timeout + timedelta(seconds=4 * GRACE)
        return agree(self.subject, self.ranks, statement, told, advice=_ADVICE, timeout=limit)

    def _carried_out(self, pair: JobPair, call: JobCall, text: str, given: Mapping[str, Any]) -> None:
        """Plan from both texts, begin with all ranks of both jobs, exchange, and say how it ended."""
        (held, group), error = self.connections.get(call.other, ("", None)), ""
        # The other job's ranks wait for one another until then.
        every = self._agreed(pair, _PLAN, "", (held, text if self.rank == 0 else ""), self.seconds + 2 * GRACE)
        # All ranks of both jobs have come to another call, and have read how the last one ended.
        self._of_first(call, self.seconds, lambda _: self._forget(self.failed[:-1]))
        texts = {self.name: text, call.other: every[pair.first[call.other]][1]}
        with telling(lambda wrong: self._agreed(pair, _BEGIN, wrong)):
            run = self._ready(pair, call, texts, given)
        # Both jobs derive the plan, and need the same version of axes.
        plan = f"the plan {run.move.fingerprint} of axes {importlib.metadata.version('axes-torch')}"
        self._agreed(pair, _BEGIN, plan)
        try:
            if not held or any(other != held for other, _ in every):  # else all ranks have the same connections
                group = self._connect(pair, call.other)
            sent, received = run.moved
            what = f"{_CALLS[call.side]} of {run.contents}, with {pair.whose(run.move.partners)}"
            exchange = self._operation(call, what, dtype=run.wire, bytes_in=received, bytes_out=sent)
            heard(exchange, self._carry, run, group, given)
        except (AxesError, RuntimeError) as wrong:
            error = (str(wrong).strip().splitlines() or [type(wrong).__name__])[0]
            self._disconnect(call.other)  # who waits for this rank hears it at once
        try:
            self._ended(pair, call.said, error)
        except DesyncError as wrong:
            raise DesyncError(f"{wrong}\n{run.state}" if call.side == 1 else str(wrong)) from wrong

    def _ready(self, pair: JobPair, call: JobCall, texts: Mapping[str, str], given: Mapping[str, Any]) -> Execution:
        """The plan of both texts for this rank's tensors; that of the last call where it is the same."""
        source, target = call.names
        first = pair.first[source], pair.first[target]
        move = _plan((texts[source], texts[target]), call.names, first, pair.rank)
        run = self.runs.get(call.said)
        if run is None or run.move is not move:
            run = self.runs[call.said] = Execution(move, pair.ranks, self.device, self.who, self.job_rank)
        run.fit(*((given, {}) if call.side == 0 else ({}, given)))
        return run

    def _carry(self, run: Execution, group: Any, given: Mapping[str, Any]) -> None:
        """From these tensors or into them; return when a GPU has done all of it, within the limit."""
        run.carry(group, given)
        if self.device.type != "cpu":  # its backend's messages wait for the stream alone
            done = torch.Event(self.device)
            done.record()
            if not polled(done.query, self.seconds):
                run.arrived = -1  # nobody knows what has been written
                raise RuntimeError(f"the GPU waits for others, for {self.seconds:g} s now")

    def _operation(self, call: JobCall, what: str, **more: Any) -> Operation:
        """A part of a call as the trace of this rank's job has it."""
        axis, how = " to ".join(call.names), {"dtype": "", "device": self.device.type, "together": False, **more}
        return Operation(what, _CALLS[call.side], "send and receive", axis, f"link {axis}", self.ranks, **how)

    # all ranks of both jobs

    def _agreed(
        self, pair: JobPair, when: str, statement: str | AxesError, told: Any = "", seconds: float = 0.0
    ) -> list[Any]:
        """What each rank of both jobs tells, when all have come and stated the same."""
        member = Member(self.store, pair.rank, _STORE, pair.whose)
        barrier = Barrier(f"{pair.key}/{when}", pair.ranks, f"{pair.jobs[0].said}, {when}")
        return agree_at(member, barrier, statement, timedelta(seconds=seconds or self.seconds), told)

    def _ended(self, pair: JobPair, said: str, error: str) -> None:
        """Return when the transfer has succeeded on all ranks of both jobs; `DesyncError` on all of them otherwise.

        error: why it failed on this rank, "" where it didn't.
        """
        every = self._agreed(pair, _END, "", error, REPORT if error else self.seconds + REPORT + GRACE)
        failed = [f"  {pair.whose([each])}: {text}" for each, text in enumerate(every) if text]
        if failed:
            raise DesyncError("\n".join([f"{said} failed, and all ranks are there to say so:", *failed[:8]]))
        in_time(said, GRACE, lambda: self.store.delete_key(f"{pair.key}/connect/0/{pair.rank}"), _STORE)
        self.failed.clear()

    def _connect(self, pair: JobPair, other: str) -> Any:
        """Connect all ranks of both jobs."""
        self._disconnect(other)
        store = dist.PrefixStore(f"{pair.key}/connect", self.store)
        group = in_time(
            f"the connections of '{self.name}' and '{other}'",
            self.seconds + LINGER_SECONDS,
            lambda: torch_private.backend_over(store, pair.rank, len(pair.ranks), self.device.type, self.timeout),
            _STORE,
        )
        self.connections[other] = pair.key, group
        return group

    def _disconnect(self, other: str) -> None:
        """Close the connections with a job, so that who waits for this rank hears it."""
        _, group = self.connections.pop(other, ("", None))
        if group is not None:
            with contextlib.suppress(RuntimeError):  # one that has failed may be closed already
                group.abort()

    # the store: the first rank speaks for the job

    def _of_first(self, call: JobCall, seconds: float, ask: Callable[[JobCall], Any]) -> Any:
        """What the first rank asks the store, None on others."""
        return in_time(call.said, seconds, lambda: ask(call), _STORE) if self.rank == 0 else None

    def _read(self, key: str) -> str:
        """What is under a key, "" where nothing is. (`get` would wait where another job removes it just then.)"""
        found = self.store.compare_set(key, "?", "?").decode()  # it finds what was expected where nothing is
        return "" if found == "?" else found

    def _join(self) -> None:
        """Enter the job under its name, in the place of one that had the name before."""
        self.store.set(f"job/{self.name}", self.token)
        self._withdraw()

    def _offer(self, call: JobCall) -> None:
        """Put a call where the other job looks for it."""
        if self._read(f"job/{self.name}") != self.token:
            raise DesyncError(f"another job has joined as '{self.name}' since this one did, or the store is a new one")
        self.store.set(f"call/{self.name}/{call.other}", json.dumps(asdict(call)))

    def _withdraw(self) -> None:
        for other in self.others:
            self.store.delete_key(f"call/{self.name}/{other}")

    def _meet(self, call: JobCall) -> JobCall:
        """The other job's call, when both have come."""
        place = f"call/{call.other}/{self.name}"
        self._offer(call)
        if not polled(lambda: self._read(place) != "", self.seconds) or not (text := self._read(place)):
            self._withdraw()
            has_joined, limit = self._read(f"job/{call.other}") != "", f"the limit is {self.seconds:g} s"
            seen = "is at something else, or has ended" if has_joined else "hasn't joined, or has left"
            raise DesyncError(f"'{call.other}' didn't come to {call.said} ({limit}):\n  its rank 0 {seen}")
        found = JobCall(**json.loads(text))
        self.store.delete_key(place)
        if found.error:
            self._withdraw()
            raise DesyncError(f"'{call.other}' can't take part in {call.said}:\n  {found.error}")
        if found.side == call.side:
            raise DesyncError(f"'{call.other}' has come to {found.said}, and this job to {call.said}")
        self.failed.append(JobPair(call, found, 0).key)
        return found

    def _forget(self, failed: Sequence[str]) -> None:
        """Remove the keys of transfers that failed: nobody reads them any more."""
        for key in self.store.list_keys() if failed else ():
            if any(each in key for each in failed):
                self.store.delete_key(key)

    def _leave(self) -> None:
        """Remove the job's keys."""
        self._forget(self.failed)
        self.store.delete_key(note_key(self.who))
        if self.rank == 0 and self._read(f"job/{self.name}") == self.token:  # else another job has the name
            self._withdraw()
            self.store.delete_key(f"job/{self.name}")


# --- what a job says of its tensors ---------------------------------------------------------------


class OwnTensors:
    """The tensors of one call on this rank, and their shardings on the job's mesh.

    given: the tensors by name, None where it has none. written: the specs as they stand. told: what the rank tells the
    others of its job, of each of its tensors the whole shape and the dtype.
    """

    def __init__(self, link: JobLink, tensors: Any, specs: Any, does: str, rules: Any):
        for what, mapping in (("specs", specs), ("tensors", tensors)):
            if not isinstance(mapping, Mapping) or not all(isinstance(name, str) for name in mapping):
                raise ShardingError(f"{does} takes {what} by name; found {shown(mapping)}")
        if missing := [name for name in tensors if name not in specs]:
            raise ShardingError(f"{does}: specs lack {shortened(missing[0])}{suggestion(missing[0], specs)}")
        self.link = link
        self.given = {name: tensors.get(name) for name in specs}
        self.ends: dict[str, Sharding] = {}
        self.told: dict[str, Any] = {}
        for name in sorted(specs):
            with of_tensor(name):
                end = self.ends[name] = read_end(specs[name], link.mesh)
                if any(link.mesh.universe.position(rank) is None for rank in end.universe.ranks):
                    raise ShardingError(f"'{end}' is on ranks that aren't of the mesh of the link, {link.mesh!r}")
                if self.given[name] is not None:
                    self.told[name] = _told_of(end, dense(does, self.given[name]))
        self.rules = rules if rules is None or isinstance(rules, LayoutRules) else LayoutRules(rules)
        lies = [f"{shortened(name)}: '{end}' on {end.mesh.declaration}" for name, end in self.ends.items()]
        self.written = ", ".join(lies) + ("" if self.rules is None else f"; {self.rules!r}")

    def text(self, every: Sequence[Mapping[str, Any]]) -> str:
        """What the job says, from what each of its ranks tells: the same on all of them."""
        rows = {}
        for name, end in self.ends.items():
            ranks = reversed([rank for rank, found in enumerate(every) if name in found])
            said = {json.dumps(every[rank][name]): rank for rank in ranks}  # what ranks say, and the first that does
            if not said:
                raise ShardingError(f"no rank of '{self.link.name}' has {shortened(name)}; leave it out of specs")
            (shape, dtype), *others = told = [json.loads(each) for each in said]
            if others:
                parts = [
                    f"{d} on rank {r}, by its part {s} in all" for (s, d), r in zip(told, said.values(), strict=True)
                ]
                raise ShardingError(
                    f"{shortened(name)} of '{self.link.name}' is {', and '.join(parts)}; where ranks have parts of "
                    "unlike sizes, pass DTensors, as axes.from_local makes them"
                )
            rows[name] = [_mesh_text(end, self.link.mesh), end.at(shape).spec, shape, dtype]
        rules = {} if self.rules is None else {"rules": self.rules._as_data}
        return json.dumps({"tensors": rows, **rules}, sort_keys=True)


def _told_of(end: Sharding, value: torch.Tensor) -> list[Any]:
    """The whole shape and the dtype of a tensor: a shard says them where all ranks have as much."""
    shape = list(value.shape)
    if len(shape) != end.ndim:
        raise ShardingError(f"'{end}' has {end.ndim} dims, and the tensor {len(shape)}: {shape}")
    if not isinstance(value, DTensor):
        shape = [size * dim.pieces for size, dim in zip(shape, end.dims, strict=True)]
    return [shape, dtype_name(value.dtype)]


def _mesh_text(end: Sharding, mesh: Mesh) -> str:
    """The mesh of a sharding: its ranks as numbers in the job, and the digits of its axes and further names."""
    axes = {name: [list(mode) for mode in layout] for name, layout in end.mesh.namespace.items()}
    ranks = [mesh.universe.position(rank) for rank in end.universe.ranks]
    return json.dumps([ranks, end.mesh.axis_names, axes, mesh.ranks_per_node])


def _mesh_from(text: str, first: int) -> Mesh:
    """That mesh again, on the ranks from `first`."""
    ranks, axis_names, axes, node = json.loads(text)
    namespace = {name: Layout.of([(size, stride) for size, stride in modes]) for name, modes in axes.items()}
    mesh = Mesh("ranks", ranks=[first + rank for rank in ranks], ranks_per_node=node)
    return mesh._with(axis_names=tuple(axis_names), namespace=namespace)


@functools.lru_cache(maxsize=16)
def _plan(written: tuple[str, str], names: tuple[str, str], first: tuple[int, int], rank: int) -> Transfer:
    """The plan of what two jobs say, as a rank of both sees it. first: the numbers of their first ranks."""
    texts = [json.loads(each) for each in written]
    sources, targets = rows = texts[0]["tensors"], texts[1]["tensors"]
    ends = []
    for side, at in zip(rows, first, strict=True):
        meshes = {text: _mesh_from(text, at) for text in {mesh for mesh, *_ in side.values()}}
        ends.append({name: meshes[mesh].sharding(spec) for name, (mesh, spec, *_) in side.items()})
    rules = None if "rules" not in texts[0] else LayoutRules(**texts[0]["rules"])
    shapes = {name: Like(tuple(shape), dtype) for name, (*_, shape, dtype) in sources.items()}
    dtypes = {name: dtype for name, (*_, dtype) in targets.items()}
    move = transfer(ends[0], ends[1], shapes=shapes, dtype=dtypes, rules=rules, bucket_mb=BUCKET_MB)
    for one in move.tensors:
        (*_, spec, shape, dtype), other = targets[one.target_name], sources[one.source_name][3]
        if shape != list(one.shapes[1]):
            raise ShardingError(
                f"{shortened(one.target_name)} has other shapes\n  '{names[0]}'  {list(one.shapes[1])}  "
                f"'{one.source.spec}'\n  '{names[1]}'  {shape}  '{spec}'"
            )
        if dtype != other and not (getattr(torch, dtype).is_floating_point and getattr(torch, other).is_floating_point):
            raise ShardingError(
                f"{shortened(one.source_name)} is {other} in '{names[0]}' and {dtype} in '{names[1]}'; only "
                "floating-point numbers are converted on the way"
            )
    return move.at(rank)
