"""Tensors between jobs: `axes.connect` and the link that it gives.

    link = axes.connect(store, "trainer", mesh)                       # in one job
    link.send(model.state_dict(), specs, to="generator")

    link = axes.connect(store, "generator", mesh)                     # in another
    link.receive(into=weights, specs=specs, source="trainer")

Each job runs its own `torch.distributed`, and what both reach is a store (see `rendezvous`). A call for a transfer:

1. The ranks of a job compare what they call, and tell each other the whole shapes and dtypes of their tensors.
2. The jobs meet, and each reads the other's text: for each tensor its spec, whole shape and dtype, and the axes that
   the spec names, as digits of the job's ranks.
3. Each rank derives the plan from both texts: an `axes.transfer` over the ranks of both, numbered job after job. All
   ranks compare fingerprints, and say whether their tensors fit, before the first byte.
4. All ranks connect by a communicator that is no group of either job, and carry the plan out. The next transfer
   between the same jobs uses it again.
5. All ranks say how it ended. Where one failed or says nothing, all raise.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from axes.algebra.errors import (
    AxesError,
    DesyncError,
    MeshError,
    ShardingError,
    shortened,
    shown,
    suggestion,
    wrong_dims,
)
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh, checked_mesh
from axes.algebra.plan import dtype_name
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import tuple_of
from axes.algebra.specs import parsed_sharding
from axes.extension import Operation, agree, dense, local
from axes.runtime import torch_private
from axes.runtime.agreement import LINGER_SECONDS, in_time, polled
from axes.runtime.groups import as_timeout, current_world
from axes.runtime.operation import heard
from axes.runtime.sharded import sharding_of
from axes.transfers.execution import Execution
from axes.transfers.layout_rules import LayoutRules, Table
from axes.transfers.rendezvous import AT_ITS_RANKS, GRACE, RAISED, STORE, JobCall, Pair, Rendezvous, rank_of
from axes.transfers.transfers import Like, Transfer, of_tensor, read_end, transfer

_ADVICE = "All ranks of the mesh call it alike, in the same order; none has other specs"

_CALLS = ("link.send", "link.receive")

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
        peers: The names of all jobs. Their order numbers the ranks of a transfer.
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
    if (
        len(names) < 2
        or not all(isinstance(each, str) and each.isidentifier() for each in names)
        or len({*names}) < len(names)
    ):
        raise MeshError(f"peers are two or more words, all different; found {shown(peers)}")
    if not isinstance(name, str) or name not in names:
        near = suggestion(name, names) if isinstance(name, str) else ""
        raise MeshError(f"{shown(name)} isn't among the peers{near}")
    whole = checked_mesh(mesh)
    if whole.size < whole.universe.size:
        named = ", ".join(f"'{axis}'" for axis in whole.axis_names)
        text = " ".join(f"{axis}={size}" for axis, size in whole.shape.items())
        ranks = [int(rank) for rank in whole.universe.group(whole.extent, whole.rank)]
        raise MeshError(
            f"mesh[{named}] is another one on each rank, and all ranks of the mesh of a link are one job. Connect by "
            f"the whole mesh; or by one of these ranks alone, like axes.init_mesh({text!r}, ranks={ranks})"
        )
    return JobLink(store, name, whole, names, as_timeout(timeout, "timeout"))


class JobLink:
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
        if running and current_world().fake:
            raise MeshError("axes.connect needs real processes; this world is made up, by axes.simulate")
        self.job_rank = current_world().rank if running else self.ranks[0]
        position = mesh.universe.position(self.job_rank)
        if position is None:
            raise MeshError(f"rank {self.job_rank} isn't one of the ranks of {mesh!r}, which are those that connect")
        usual = current_world().limit if running else torch_private.usual_timeout("gloo")
        self.store, self.rank, self.calls, self.closed = store, position, 0, False
        self.timeout = timeout or usual
        self.meeting = Rendezvous(store, name, position, self.timeout)
        self.connections: dict[str, tuple[str, Any]] = {}
        """By other job the communicator of all ranks of both, with the name of the transfer that it was made for."""
        self.runs: dict[str, Execution] = {}
        said = f"axes.connect(store, '{name}', {mesh.declaration}, peers={peers})"
        self.meeting.join(self._told(said, uuid.uuid4().hex[:12])[0], self.others)

    def __repr__(self) -> str:
        return f"<link of '{self.name}' with {', '.join(map(repr, self.others))}>"

    def __enter__(self) -> JobLink:
        return self

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
        self.meeting.leave()

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
        nobody; the other one is told of it when its time is up.
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
        if not isinstance(other, str) or other not in self.others:
            near = suggestion(other, self.others) if isinstance(other, str) else ""
            raise MeshError(f"a transfer is with another peer, not {shown(other)}{near}")
        self.calls += 1
        call = JobCall(self.name, other, f"{self.meeting.token}.{self.calls}", len(self.ranks), side)
        if self.closed:
            raise MeshError(f"this link of '{self.name}' is closed; axes.connect makes another one for {call.said}")
        self.meeting.note(f"is in {call.said}, and {AT_ITS_RANKS}")
        try:
            with self._failing_alike():
                own = OwnTensors(self, tensors, specs, _CALLS[side], rules)
            call = replace(call, text=own.text(self._told(f"{call.said}, of {own.written}", own.told)))
        except AxesError as wrong:
            self.meeting.note(f"{RAISED} {call.said}: {wrong}")
            raise
        pair = heard(self._operation(call, f"{_CALLS[side]} waiting for '{other}'"), self._met, call)
        try:
            self._carried_out(pair, call, own)
        except AxesError:
            self._disconnect(other)
            raise

    def _told(self, statement: str, told: Any, more: float = 0.0) -> list[Any]:
        """What each rank of this job tells the others, when all have come and stated the same."""
        limit = self.timeout + timedelta(seconds=more)
        return agree(self._subject, self.ranks, statement, told, advice=_ADVICE, timeout=limit)

    @contextlib.contextmanager
    def _failing_alike(self) -> Iterator[None]:
        """The other ranks of the job, which come to `_told` instead, are told of an error in this block."""
        try:
            yield
        except AxesError as wrong:
            agree(self._subject, self.ranks, wrong)
            raise

    @property
    def _subject(self) -> str:
        return f"a call of the link of '{self.name}'"

    def _met(self, call: JobCall) -> Pair:
        """The pair of this call and one of the other job, which the first rank of this job meets."""
        with self._failing_alike():
            theirs = asdict(self.meeting.meet(call)) if self.rank == 0 else {}
        more = self.timeout.total_seconds() + 8 * GRACE
        told = self._told(f"{call.said}, which rank 0 begins with '{call.other}'", theirs, more)
        return Pair.of(call, JobCall(**told[0]))

    def _carried_out(self, pair: Pair, call: JobCall, own: OwnTensors) -> None:
        """Plan from both texts, begin with all ranks of both jobs, exchange, and say how it ended."""
        ready: Execution | AxesError
        try:
            ready = self._ready(pair, call, own)
        except AxesError as wrong:
            ready = type(wrong)(f"{wrong}\n  in {call.said}")
        held, group = self.connections.get(call.other, ("", None))
        rank, error = pair.first[self.name] + self.rank, ""
        # Both jobs derive the plan, and need the same version of axes.
        plan = ready if isinstance(ready, AxesError) else f"the plan {ready.move.fingerprint} of axes {_version()}"
        kept = self.meeting.begin(pair, rank, plan, held)
        assert isinstance(ready, Execution), "an error is raised on all ranks"
        try:
            group = group if kept else self._connect(pair, rank, call.other)
            sent, received = ready.moved
            what = f"{_CALLS[call.side]} of {ready.contents}, with {pair.whose(ready.move.partners)}"
            exchange = self._operation(call, what, dtype=ready.wire, bytes_in=received, bytes_out=sent)
            heard(exchange, self._carry, ready, group, own)
        except (AxesError, RuntimeError) as failed:
            error = (str(failed).strip().splitlines() or [type(failed).__name__])[0]
            self._disconnect(call.other)  # who waits for this rank hears it at once
        try:
            self.meeting.end(pair, rank, error)
        except DesyncError as failed:
            raise DesyncError(f"{failed}\n{ready.state}" if call.side == 1 else str(failed)) from failed

    def _ready(self, pair: Pair, call: JobCall, own: OwnTensors) -> Execution:
        """The plan of both texts for this rank's tensors; that of the last call where it is the same."""
        source, target = sorted(pair.jobs, key=lambda each: each.side)
        names = source.name, target.name
        rank, first = pair.first[self.name] + self.rank, (pair.first[source.name], pair.first[target.name])
        move, run = _plan((source.text, target.text), names, first, rank), self.runs.get(call.said)
        if run is None or run.move is not move:
            run = Execution(move, range(pair.size), self.device, rank_of(self.rank, self.name))
            self.runs[call.said] = run
        run.fit(*((own.local, {}) if call.side == 0 else ({}, own.local)))
        return run

    def _carry(self, run: Execution, group: Any, own: OwnTensors) -> None:
        """From these shards into those; return when a GPU has done all of it, within the limit."""
        with torch.no_grad():
            run.carry(group, own.given)
        if self.device.type != "cpu":  # its backend's messages wait for the stream alone
            done, seconds = torch.Event(self.device), self.timeout.total_seconds()
            done.record()
            if not polled(done.query, seconds):
                run.arrived = -1  # nobody knows what has been written
                raise RuntimeError(f"the GPU waits for others, for {seconds:g} s now")

    def _operation(self, call: JobCall, what: str, **more: Any) -> Operation:
        """A part of a call as the trace of this rank's job has it."""
        between = " to ".join(call.names)
        named = what, _CALLS[call.side], "send and receive", between, f"link {between}", self.ranks
        return Operation(*named, **{"dtype": "", "device": self.device.type, "together": False, **more})

    def _connect(self, pair: Pair, rank: int, other: str) -> Any:
        """Connect all ranks of both jobs."""
        self._disconnect(other)
        store = dist.PrefixStore(f"axes/link/{pair.key}/connect", self.store)
        group = in_time(
            f"the connections of '{self.name}' and '{other}'",
            self.timeout.total_seconds() + LINGER_SECONDS,
            lambda: torch_private.backend_over(store, rank, pair.size, self.device.type, self.timeout),
            STORE,
        )
        self.connections[other] = pair.key, group
        return group

    def _disconnect(self, other: str) -> None:
        """Close the connections with a job, so that who waits for this rank hears it."""
        _, group = self.connections.pop(other, ("", None))
        if group is not None:
            with contextlib.suppress(RuntimeError):  # one that has failed may be closed already
                group.abort()


# --- what a job says of its tensors ---------------------------------------------------------------


class OwnTensors:
    """The tensors of one call on this rank, and their shardings on the job's mesh.

    given: the tensors by name. local: this rank's shards of them, None where it has none. written: the specs as they
    stand. told: what the rank tells the others of its job, of each of its tensors the whole shape and the dtype.
    """

    def __init__(self, link: JobLink, tensors: Any, specs: Any, does: str, rules: Any):
        for what, mapping in (("specs", specs), ("tensors", tensors)):
            if not isinstance(mapping, Mapping) or not all(isinstance(name, str) for name in mapping):
                raise ShardingError(f"{does} takes {what} by name; found {shown(mapping)}")
        if missing := [name for name in tensors if name not in specs]:
            raise ShardingError(f"{does}: specs lack {shortened(missing[0])}{suggestion(missing[0], specs)}")
        self.link = link
        self.given = {name: value for name, value in tensors.items() if value is not None}
        self.local: dict[str, torch.Tensor | None] = dict.fromkeys(specs)
        self.ends: dict[str, Sharding] = {}
        self.told: dict[str, Any] = {}
        for name in sorted(specs):
            with of_tensor(name):
                end = self.ends[name] = read_end(specs[name], link.mesh)
                if any(link.mesh.universe.position(rank) is None for rank in end.universe.ranks):
                    raise ShardingError(f"'{end}' is on ranks that aren't of the mesh of the link, {link.mesh!r}")
                if name in self.given:
                    self.told[name] = self._tell(name, dense(does, self.given[name]))
        self.rules = rules if rules is None or isinstance(rules, LayoutRules) else LayoutRules(rules)
        self.written = ", ".join([f"{shortened(n)}: '{end}' on {end.mesh.declaration}" for n, end in self.ends.items()])
        if self.rules is not None:  # of a long table only the first rules are shown
            digest = hashlib.sha256(json.dumps(self.rules._as_data).encode()).hexdigest()[:16]
            self.written += f"; {self.rules!r} {digest}"

    def _tell(self, name: str, value: torch.Tensor) -> list[Any]:
        """The whole shape and the dtype of a tensor: a shard says them where all ranks have as much."""
        end, shape, rank = self.ends[name], list(value.shape), self.link.job_rank
        if len(shape) != end.ndim:
            raise wrong_dims(end, end.ndim, len(shape), shape)
        self.local[name] = local(value)
        if not isinstance(value, DTensor):
            return [[size * dim.pieces for size, dim in zip(shape, end.dims, strict=True)], dtype_name(value.dtype)]
        found = sharding_of(value)
        if found.pending or found.tile(shape, rank) != end.tile(shape, rank):
            raise ShardingError(f"it isn't sharded as the spec says\n  spec    {end}\n  tensor  {found}")
        return [shape, dtype_name(value.dtype)]

    def text(self, every: Sequence[Mapping[str, Any]]) -> str:
        """What the job says, from what each of its ranks tells: the same on all of them."""
        told: dict[str, tuple[int, Any]] = {}
        for rank, found in enumerate(every):
            for name, (shape, dtype) in found.items():
                first, other = told.setdefault(name, (rank, [shape, dtype]))
                if other != [shape, dtype]:
                    raise ShardingError(
                        f"{shortened(name)} is {other[1]} on rank {first} of '{self.link.name}', by its part "
                        f"{other[0]} in all, and {dtype} on rank {rank}, by its part {shape} in all; where ranks have "
                        "parts of unlike sizes, pass DTensors, as axes.from_local makes them"
                    )
        if missing := [name for name in self.ends if name not in told]:
            raise ShardingError(f"no rank of '{self.link.name}' has {shortened(missing[0])}; leave it out of specs")
        rows = {
            name: [_mesh_text(end, self.link.mesh), end.at(told[name][1][0]).spec, *told[name][1]]
            for name, end in self.ends.items()
        }
        rules = {} if self.rules is None else {"rules": self.rules._as_data}
        return json.dumps({"tensors": rows, **rules}, sort_keys=True)


def _mesh_text(end: Sharding, mesh: Mesh) -> str:
    """The mesh of a sharding: its ranks as numbers in the job, and the digits of its axes and further names."""
    axes = {name: [list(mode) for mode in layout] for name, layout in end.mesh.namespace.items()}
    ranks = [mesh.universe.position(rank) for rank in end.universe.ranks]
    return json.dumps([ranks, end.mesh.axis_names, axes, mesh.ranks_per_node])


@functools.lru_cache(maxsize=64)
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
    ends = [
        {
            name: parsed_sharding(_mesh_from(mesh, at), spec, (), len(shape))
            for name, (mesh, spec, shape, _) in side.items()
        }
        for side, at in zip(rows, first, strict=True)
    ]
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


@functools.lru_cache(maxsize=1)
def _version() -> str:
    return importlib.metadata.version("axes-torch")
