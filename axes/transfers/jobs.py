"""Tensors between jobs: `axes.connect` and the link that it gives.

    link = axes.connect(store, "trainer", mesh)                       # in one job
    link.send(model.state_dict(), specs, to="generator")

    link = axes.connect(store, "generator", mesh)                     # in another
    link.receive(into=weights, specs=specs, source="trainer")

Each job runs its own `torch.distributed`, and what both reach is a store (see `rendezvous`). A call for a transfer:

1. The ranks of a job compare what they call, and tell each other the shapes and dtypes of their shards.
2. The jobs meet, and each reads the other's text: for each tensor its spec, whole shape and dtype, and the axes that
   the spec names, as digits of the job's ranks.
3. Each rank derives the plan from both texts: an `axes.transfer` over the ranks of both, numbered by job in the order
   of the peers. All ranks compare fingerprints before the first byte.
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
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from axes.algebra.chunks import tile_shape
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
from axes.algebra.planning.exchange import pieces_of
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import tuple_of
from axes.algebra.specs import parsed_sharding
from axes.extension import Operation
from axes.runtime import torch_private
from axes.runtime.agreement import LINGER_SECONDS, agree_at, in_time
from axes.runtime.groups import as_timeout, current_world
from axes.runtime.operation import heard
from axes.runtime.programs import name_of
from axes.runtime.torch_placements import sharding_of_spec
from axes.runtime.transforms import check_dense
from axes.transfers.execution import Execution
from axes.transfers.layout_rules import LayoutRules, Table
from axes.transfers.rendezvous import GRACE, STORE, JobCall, Pair, Rendezvous
from axes.transfers.transfer_ends import of_tensor, on_own_ranks
from axes.transfers.transfers import Like, Transfer, transfer

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
    """Join this job to others, to exchange tensors with them. All ranks of `mesh` call it.

    store: one that all jobs reach, such as a `TCPStore`, or a `FileStore` on one host; who hosts it should outlive the
    jobs. A `PrefixStore` of it keeps links apart. name: this job's, among `peers`, whose order numbers the ranks of a
    transfer. timeout: how long ranks wait for one another in each phase, by default as in the mesh's groups.

    Each job has its own `torch.distributed`, started and ended on its own; a job of one rank needs none. `connect`
    waits for no other job: a transfer does, so that jobs may start in any order. A job that joins under a name that is
    taken replaces the one before, and the next transfer is with it.

    Raises `MeshError` for what can't be a link, `DesyncError` where ranks of this job differ or don't come.

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
        self.name, self.peers, self.mesh, self.ranks = name, peers, mesh, mesh.universe.ranks
        self.device = torch.device(mesh.binding.device_type if mesh.binding is not None else "cpu")
        if not dist.is_initialized() and len(self.ranks) > 1:
            raise MeshError(
                f"{mesh!r} has {len(self.ranks)} ranks, and torch.distributed isn't running; call axes.init_mesh"
            )
        if dist.is_initialized() and current_world().fake:
            raise MeshError("axes.connect needs real processes; this world is made up, by axes.simulate")
        self.job_rank = current_world().rank if dist.is_initialized() else self.ranks[0]
        position = mesh.universe.position(self.job_rank)
        if position is None:
            raise MeshError(f"rank {self.job_rank} isn't one of the ranks of {mesh!r}, which are those that connect")
        bound = None if mesh.binding is None else current_world().timeout
        self.timeout = timeout or bound or torch_private.usual_timeout("gloo")
        self.store, self.rank, self.calls, self.closed = store, position, 0, False
        self.meeting = Rendezvous(store, name, position, self.timeout)
        self.connections: dict[str, Connection] = {}
        self.runs: dict[tuple[str, str], Execution] = {}
        said = f"axes.connect(store, '{name}', {mesh.declaration}, peers={peers})"
        self.meeting.join(self._told("axes.connect", said, uuid.uuid4().hex[:12])[0])

    def __repr__(self) -> str:
        return f"<link of '{self.name}' with {', '.join(repr(peer) for peer in self.peers if peer != self.name)}>"

    def __enter__(self) -> JobLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            with contextlib.suppress(DesyncError):  # the error of the block matters more
                self.close()

    def close(self) -> None:
        """Leave: end this rank's connections and remove the job's keys from the store. It waits for no other rank."""
        if self.closed:
            return
        self.closed = True
        for name in list(self.connections):
            self._disconnect(name)
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
        self._transfer(tensors, specs, self._other(to), 0, rules)

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
        self._transfer(into, specs, self._other(source), 1, None)
        return dict(into)

    def _other(self, name: object) -> str:
        others = [peer for peer in self.peers if peer != self.name]
        if not isinstance(name, str) or name not in others:
            near = suggestion(name, others) if isinstance(name, str) else ""
            raise MeshError(f"a transfer is with another peer, not {shown(name)}{near}")
        return name

    # one transfer

    def _transfer(self, tensors: Any, specs: Any, other: str, side: int, rules: Any) -> None:
        said = f"the transfer from '{(self.name, other)[side]}' to '{(other, self.name)[side]}'"
        if self.closed:
            raise MeshError(f"this link of '{self.name}' is closed; axes.connect makes another one for {said}")
        self.calls += 1
        self.meeting.note(f"is in {said}, and waits for its own ranks")
        call = JobCall(
            self.name, self.meeting.token, self.calls, len(self.ranks), "", self.peers.index(self.name), side
        )
        try:
            own, text = self._described(tensors, specs, said, side, rules)
        except AxesError as wrong:
            if self.rank == 0:
                with contextlib.suppress(AxesError):  # its own error matters more
                    self.meeting.note(f"raised in {said}: {wrong}")
                    self.meeting.meet(replace(call, error=f"{type(wrong).__name__}: {wrong}"), other, "", said)
            raise
        call = replace(call, text=_digest(text))
        pair = heard(self._waits(other, side), self._met, call, other, text, said)
        try:
            self._carried_out(pair, own, text, said)
        except AxesError:
            self._disconnect(other)
            self.meeting.note(f"failed in {said}, and has gone on")
            raise
        self.meeting.note(f"was last seen at the end of {said}")

    def _waits(self, other: str, side: int) -> Operation:
        """The call as a trace has it, until the other job has come."""
        source, target = (self.name, other)[:: 1 - 2 * side]
        kind, way = _CALLS[side], f"{source} to {target}"
        what = f"{kind} waiting for '{other}'"
        named = what, kind, "send and receive", way, f"link {way}", self.ranks, "", self.device.type
        return Operation(*named, together=False)

    def _described(self, tensors: Any, specs: Any, said: str, side: int, rules: Any) -> tuple[OwnTensors, str]:
        """This rank's tensors, and what the job says of all of them; errors are the same on all its ranks."""
        subject = f"call {self.calls} of the link, {said}"
        try:
            own = OwnTensors(self, tensors, specs, ("send", "receive")[side], rules)
        except AxesError as wrong:
            self._told(subject, "", None, wrong=wrong)
            raise
        return own, own.text(self._told(subject, f"{said}, of {own.written}", own.told))

    def _met(self, call: JobCall, other: str, text: str, said: str) -> Pair:
        """The transfer for which the first ranks of both jobs have met: each tells its own job."""
        subject, told = f"{said}, which rank 0 begins with '{other}'", list[Any]()
        try:
            if self.rank == 0:
                pair = self.meeting.meet(call, other, text, said)
                told = [asdict(pair.source), asdict(pair.target)]
        except DesyncError as wrong:
            self._told(subject, "", None, wrong=wrong)
            raise
        source, target = (JobCall(**each) for each in self._told(subject, "", told, 8 * GRACE)[0])
        return Pair(source, target, call.side)

    def _told(
        self, subject: str, statement: str, told: Any, more: float = 0.0, wrong: AxesError | None = None
    ) -> list[Any]:
        """What each rank of this job tells the others, when all have come and stated the same.

        more: seconds beyond the limit. wrong: why this rank can't come, which the others are told.
        """
        if len(self.ranks) == 1:
            return [json.loads(json.dumps(told))]
        world = current_world()
        barrier = world.barrier("link", self.ranks, f"{subject}, in '{self.name}'", _ADVICE)
        return agree_at(world.member, barrier, wrong or statement, self.timeout + timedelta(seconds=more), told)

    def _carried_out(self, pair: Pair, own: OwnTensors, text: str, said: str) -> None:
        """Plan from both texts, begin with all ranks of both jobs, and exchange."""
        other, rank = pair.other, pair.first((pair.source, pair.target)[pair.side]) + self.rank
        if other.error:
            raise DesyncError(f"'{other.name}' can't take part in {said}:\n  {other.error}\nNothing was written")
        theirs = self.meeting.text_of(pair, said)
        if _digest(theirs) != other.text:
            raise DesyncError(f"'{other.name}' has given up {said}, and begun another. Nothing was written")
        texts = (text, theirs) if pair.side == 0 else (theirs, text)
        move: Transfer | None = None
        wrong: AxesError | None = None
        try:
            firsts = pair.first(pair.source), pair.first(pair.target)
            move = _plan(texts, firsts, (pair.source.name, pair.target.name), BUCKET_MB).at(rank)
        except AxesError as error:
            wrong = error
        of = other.token, self.meeting.token
        held = self.connections.get(other.name)
        name = held.name if held is not None and held.of == of else ""
        try:
            kept = self.meeting.begin(pair, rank, "" if move is None else move.fingerprint, wrong, name, said)
        except AxesError as error:
            raise type(error)(f"{error}\nNothing was written") from error
        assert move is not None, "all have the same plan"
        self._exchanged(pair, own, move, kept, said)

    def _exchanged(self, pair: Pair, own: OwnTensors, move: Transfer, kept: bool, said: str) -> None:
        """Carry the plan out, over the connection that all ranks have `kept` or a new one; and say how it ended."""
        key, error = (pair.source.name, pair.target.name), ""
        run = self.runs.get(key)
        if run is None or (run.move.fingerprint, run.move.rank) != (move.fingerprint, move.rank):
            run = self.runs[key] = Execution(move, range(pair.size), self.device)
        run.arrived = -1
        try:
            if not kept:
                self._connect(pair, move.rank)
            with torch.no_grad():
                self._carry(run, pair, own)
        except (AxesError, RuntimeError) as failed:
            error = (str(failed).strip().splitlines() or [type(failed).__name__])[0]
            run.bound = None
            self._disconnect(pair.other.name)  # who waits for this rank hears it at once
        try:
            self.meeting.end(pair, move.rank, error, not kept, said)
        except DesyncError as failed:
            whole = f"\n{run.state(f'rank {self.rank} of {self.name!r}')}" if pair.side == 1 else ""
            raise DesyncError(f"{failed}{whole}") from failed

    def _carry(self, run: Execution, pair: Pair, own: OwnTensors) -> None:
        """From these shards into those; return when a GPU has done all of it, within the limit."""
        held, given = run.fit(*((own.local, {}) if pair.side == 0 else ({}, own.local)))
        bound, _ = run.bind(held, given)
        run.count_writes(own.given, given)
        heard(self._operation(run, pair), run.run, bound, self.connections[pair.other.name].group)
        if self.device.type == "cpu":
            return
        done, end = torch.Event(self.device), time.monotonic() + self.timeout.total_seconds()
        done.record()
        while not done.query():  # its backend's messages wait for the stream alone
            if time.monotonic() > end:
                run.arrived = -1  # nobody knows what has been written
                raise RuntimeError(f"the GPU waits for others, for {self.timeout.total_seconds():g} s now")
            time.sleep(0.001)

    def _operation(self, run: Execution, pair: Pair) -> Operation:
        """The exchange as the trace of this rank's job has it."""
        sent, received = run.moved
        return replace(
            self._waits(pair.other.name, pair.side),
            what=f"{_CALLS[pair.side]} of {run.contents}, with {pair.whose(run.move.partners)}",
            dtype=run.wire,
            bytes_in=received,
            bytes_out=sent,
        )

    def _connect(self, pair: Pair, rank: int) -> None:
        """Connect all ranks of both jobs."""
        self._disconnect(pair.other.name)
        store = dist.PrefixStore(f"axes/link/{pair.key}/connect", self.store)
        group = in_time(
            f"the connections of '{pair.source.name}' and '{pair.target.name}'",
            self.timeout.total_seconds() + LINGER_SECONDS,
            lambda: torch_private.backend_over(store, rank, pair.size, self.device.type, self.timeout),
            STORE,
        )
        self.connections[pair.other.name] = Connection(pair.key, (pair.other.token, self.meeting.token), group)

    def _disconnect(self, other: str) -> None:
        """Close the connections with a job, so that who waits for this rank hears it."""
        if (found := self.connections.pop(other, None)) is not None:
            with contextlib.suppress(RuntimeError):  # one that has failed may be closed already
                found.group.abort()


class Connection(NamedTuple):
    """A communicator of all ranks of two jobs. of: the tokens of both, the other's first."""

    name: str
    of: tuple[str, str]
    group: Any


# --- what a job says of its tensors ---------------------------------------------------------------


class OwnTensors:
    """The tensors of one call on this rank, and their shardings on the job's mesh.

    given: the tensors by name. local: this rank's shards of them. written: the specs as they stand.
    told: of each tensor what the rank tells the others of its job: the shape of its shard, the dtype, and the whole
    shape where it knows that; None where it has nothing of it.
    """

    def __init__(self, link: JobLink, tensors: Any, specs: Any, does: str, rules: Any):
        for what, mapping in (("specs", specs), ("tensors", tensors)):
            if not isinstance(mapping, Mapping) or not all(isinstance(name, str) for name in mapping):
                raise ShardingError(f"{does} takes {what} by name; found {shown(mapping)}")
        if missing := [name for name in tensors if name not in specs]:
            raise ShardingError(f"{does}: specs lack {shortened(missing[0])}{suggestion(missing[0], specs)}")
        self.link, self.names = link, sorted(specs)
        self.given = {name: value for name in self.names if (value := tensors.get(name)) is not None}
        self.local: dict[str, torch.Tensor] = {}
        self.ends: dict[str, Sharding] = {}
        self.told: list[Any] = []
        for name in self.names:
            with of_tensor(name):
                if isinstance(value := self.given.get(name), torch.Tensor):
                    check_dense(value, does)
                self.ends[name] = self._end(specs[name], value)
                self.told.append(None if value is None else self._tell(name, value))
        self.rules = rules if rules is None or isinstance(rules, LayoutRules) else LayoutRules(rules)
        self.written = ", ".join([f"{shortened(n)}: '{end}' on {end.mesh.declaration}" for n, end in self.ends.items()])
        if self.rules is not None:  # of a long table only the first rules are shown
            self.written += f"; {self.rules!r} {_digest(json.dumps(self.rules._as_data))}"

    def _end(self, spec: Any, value: Any) -> Sharding:
        if not isinstance(spec, str | Sharding):
            raise ShardingError(f"a tensor lies by a spec, like 'f@tp d', or a Sharding; found {shown(spec)}")
        ndim = value.dim() if isinstance(value, torch.Tensor) else None
        found = spec if isinstance(spec, Sharding) else parsed_sharding(self.link.mesh, spec, (), ndim)
        if found.pending:
            raise ShardingError(f"'{found}' has something pending; resolve it first, with axes.reshard")
        small = on_own_ranks(found)
        if any(self.link.mesh.universe.position(rank) is None for rank in small.universe.ranks):
            raise ShardingError(f"'{found}' is on ranks that aren't of the mesh of the link, {self.link.mesh!r}")
        return small

    def _tell(self, name: str, value: Any) -> list[Any]:
        if not isinstance(value, torch.Tensor):
            raise ShardingError(f"it is a DTensor, a shard, or None; found {shown(value)}")
        end, shape, whole = self.ends[name], [*value.shape], None
        if len(shape) != end.ndim:
            raise wrong_dims(end, end.ndim, len(shape), shape)
        if isinstance(value, DTensor):
            found, whole = sharding_of_spec(torch_private.spec_of(value)), shape
            rank = self.link.job_rank
            if found.pending or found.tile(shape, rank) != end.tile(shape, rank):
                raise ShardingError(f"it isn't sharded as the spec says\n  spec    {end}\n  tensor  {found}")
            value = torch_private.local_of(value)
        if value.device.type != self.link.device.type:
            raise ShardingError(f"it is on {value.device}; the link's mesh is on '{self.link.device.type}'")
        self.local[name] = value
        return [[*value.shape], name_of(value.dtype), whole]

    def text(self, every: Sequence[Sequence[Any]]) -> str:
        """What the job says, from what each of its ranks tells: the same on all of them."""
        meshes: dict[str, int] = {}
        rows = {}
        for number, name in enumerate(self.names):
            end = self.ends[name]
            told = {rank: ranks[number] for rank, ranks in enumerate(every) if ranks[number] is not None}
            shape, dtype = _whole(name, end, told, self.link)
            mesh = json.dumps(_mesh_text(end, self.link.mesh))
            rows[name] = [meshes.setdefault(mesh, len(meshes)), end.at(shape).spec, list(shape), dtype]
        rules = {} if self.rules is None else {"rules": self.rules._as_data}
        said = {"axes": _version(), "peers": self.link.peers, "meshes": list(meshes), "tensors": rows, **rules}
        return json.dumps(said, sort_keys=True)


def _whole(name: str, end: Sharding, told: Mapping[int, Any], link: JobLink) -> tuple[tuple[int, ...], str]:
    """The whole shape and the dtype of a tensor, from what ranks say of their shards."""
    if not told:
        raise ShardingError(f"no rank of '{link.name}' has {shortened(name)}; leave it out of specs")
    kinds = {dtype: rank for rank, (_, dtype, _) in told.items()}
    if len(kinds) > 1:
        both = " and ".join(f"{dtype} on rank {rank}" for dtype, rank in sorted(kinds.items()))
        raise ShardingError(f"{shortened(name)} is {both} of '{link.name}'")
    known = [whole for *_, whole in told.values() if whole is not None]
    whole = tuple(known[0]) if known else _summed(end, {link.ranks[at]: shape for at, (shape, *_) in told.items()})
    for at, rank in sorted(enumerate(link.ranks), key=lambda each: each[0] in told):  # who has nothing may be why
        tile, (shape, _, said) = end.tile(whole, rank), told.get(at, (None, "", None))
        wanted = None if tile is None else list(tile_shape(tile))
        if (shape != wanted and (shape or wanted or [0]).count(0) == 0) or (said or list(whole)) != list(whole):
            held = "nothing" if shape is None else f"{said or shape}"
            raise ShardingError(
                f"rank {at} of '{link.name}' has {held} of {shortened(name)}; by '{end}' of {[*whole]} it has {wanted}"
            )
    return whole, next(iter(kinds))


def _summed(end: Sharding, shapes: Mapping[int, list[int]]) -> tuple[int, ...]:
    """The whole shape of which these are the shards, by rank: along each dim, the sizes of its pieces together."""
    found = []
    for at, dim in enumerate(end.dims):
        layout = pieces_of(dim, (0,)).layout if len(dim) == 1 else Layout()
        positions = {rank: position for rank in shapes if (position := end.universe.position(rank)) is not None}
        sizes = {layout.coordinate(position): shapes[rank][at] for rank, position in positions.items()}
        found.append(sum(sizes.values()) * (dim.pieces if len(dim) > 1 else 1))
    return tuple(found)


def _mesh_text(end: Sharding, mesh: Mesh) -> dict[str, Any]:
    """The mesh of a sharding: its ranks as numbers in the job, and the digits of its axes and of those in the spec."""
    names = dict(zip(end.mesh.axis_names, end.mesh.layouts, strict=True))
    names |= {end.mesh.called(layout): layout for layout in end.used}
    axes = {name: [list(mode) for mode in layout] for name, layout in names.items()}
    ranks = [mesh.universe.position(rank) for rank in end.universe.ranks]
    return {"ranks": ranks, "names": list(end.mesh.axis_names), "axes": axes, "node": mesh.ranks_per_node}


def _mesh_from(said: Mapping[str, Any], first: int) -> Mesh:
    """That mesh again, on the ranks from `first`."""
    ranks = [first + rank for rank in said["ranks"]]
    namespace = {name: Layout.of([(size, stride) for size, stride in modes]) for name, modes in said["axes"].items()}
    return Mesh("ranks", ranks=ranks, ranks_per_node=said["node"])._with(
        axis_names=tuple(said["names"]), namespace=namespace
    )


@functools.lru_cache(maxsize=16)
def _plan(written: tuple[str, str], first: tuple[int, int], names: tuple[str, str], bucket_mb: float) -> Transfer:
    """The plan of what two jobs say: the same on every rank of both. first: the numbers of their first ranks."""
    texts = json.loads(written[0]), json.loads(written[1])
    source, target = names
    if texts[0]["axes"] != texts[1]["axes"]:
        raise DesyncError(
            f"both jobs derive the plan, and need the same version of axes: '{source}' has {texts[0]['axes']}, "
            f"'{target}' {texts[1]['axes']}"
        )
    order = [[peer for peer in text["peers"] if peer in names] for text in texts]
    if order[0] != order[1]:
        raise DesyncError(f"jobs have other peers: '{source}' {texts[0]['peers']}, '{target}' {texts[1]['peers']}")
    rows = texts[0]["tensors"], texts[1]["tensors"]
    rules = None if "rules" not in texts[0] else LayoutRules(**texts[0]["rules"])
    for one, two in ((0, 1), (1, 0)) if rules is None else ():
        missing = [name for name in rows[one] if name not in rows[two]]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ShardingError(
                f"'{names[one]}' has {shortened(missing[0])}{more}, '{names[two]}' hasn't"
                f"{suggestion(missing[0], rows[two])}"
            )
    ends: tuple[dict[str, Sharding], dict[str, Sharding]] = ({}, {})
    for side, text in enumerate(texts):
        meshes = [_mesh_from(json.loads(mesh), first[side]) for mesh in text["meshes"]]
        for name, (mesh, spec, shape, _) in rows[side].items():
            ends[side][name] = parsed_sharding(meshes[mesh], spec, (), len(shape))
    shapes = {name: Like(tuple(shape), dtype) for name, (_, _, shape, dtype) in rows[0].items()}
    made = {name: like.shape for name, like in shapes.items()}
    if rules is not None:
        made = dict(rules.applied(made).targets)
    for name, shape in made.items():
        if name in rows[1] and list(shape) != rows[1][name][2]:
            said = f"'{rows[0][name][1]}'" if rules is None else "by the layout rules"
            raise ShardingError(
                f"{shortened(name)} has other shapes\n  '{source}'  {list(shape)}  {said}\n"
                f"  '{target}'  {rows[1][name][2]}  '{rows[1][name][1]}'"
            )
    dtypes = {name: dtype for name, (_, _, _, dtype) in rows[1].items() if name in made}
    move = transfer(*ends, shapes=shapes, dtype=dtypes, rules=rules, bucket_mb=bucket_mb)
    for carried in move.tensors:
        dtype, other = rows[0][carried.source_name][3], rows[1][carried.target_name][3]
        if dtype != other and not (_converts(dtype) and _converts(other)):
            raise ShardingError(
                f"{shortened(carried.source_name)} is {dtype} in '{source}' and {other} in '{target}'; only "
                "floating-point numbers of 16 bits and more are converted on the way"
            )
    return move


def _converts(dtype: str) -> bool:
    found = getattr(torch, dtype)
    return bool(found.is_floating_point and found.itemsize > 1)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


@functools.lru_cache(maxsize=1)
def _version() -> str:
    return importlib.metadata.version("axes-torch")
