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
4. The ranks that exchange anything connect by a communicator that is no group of either job, and carry the plan out.
   The next transfer between the same ranks uses it again.
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
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any

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
from axes.runtime.agreement import agree_at
from axes.runtime.groups import as_timeout, current_world
from axes.runtime.operation import heard
from axes.runtime.programs import name_of
from axes.runtime.torch_placements import sharding_of_spec
from axes.runtime.transforms import check_dense
from axes.transfers.layout_rules import LayoutRules, Table
from axes.transfers.rendezvous import GRACE, JobCall, Pair, Rendezvous, connection_prefix
from axes.transfers.transfer_ends import on_own_ranks
from axes.transfers.transfer_runs import TransferRun, check_memory, check_writable
from axes.transfers.transfers import Like, Transfer, transfer

_ADVICE = "All ranks of the mesh call it alike, in the same order"

_CALLS = ("link.send", "link.receive")

Told = list[Any] | None
"""What a rank says of a tensor: whether its shape is the whole one, shape, dtype; None where it has none of it."""


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
    names = None if isinstance(peers, str) else tuple_of(peers)
    if names is None or len(names) < 2 or not all(map(_is_name, names)) or len({*names}) < len(names):
        raise MeshError(f"peers are two or more words, all different; found {shown(peers)}")
    if not isinstance(name, str) or name not in names:
        near = suggestion(name, names) if isinstance(name, str) else ""
        raise MeshError(f"{shown(name)} isn't among the peers{near}")
    whole = checked_mesh(mesh)
    if whole.size < whole.universe.size:
        named = ", ".join(f"'{axis}'" for axis in whole.axis_names)
        text = " ".join(f"{axis}={size}" for axis, size in whole.shape.items())
        line = [int(rank) for rank in whole.universe.group(whole.extent, whole.rank)]
        raise MeshError(
            f"mesh[{named}] is another one on each rank, and all ranks of the mesh of a link are one job. Connect by "
            f"the whole mesh; or by one of these ranks alone, like axes.init_mesh({text!r}, ranks={line})"
        )
    return JobLink(store, name, whole, names, as_timeout(timeout, "timeout"))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()


class JobLink:
    """One job's end of a link to other jobs; made by `axes.connect`.

    All ranks of the job call `send` and `receive` alike. After an error the link is as usable as before: the next
    transfer begins anew. That isn't so where a rank has left a call out: then all calls of the job fail from there on,
    on this link and on another of the same ranks. `close`, or the end of a `with` block, leaves.
    """

    def __init__(self, store: dist.Store, name: str, mesh: Mesh, peers: tuple[str, ...], timeout: timedelta | None):
        self.name, self.peers = name, peers
        self.mesh = mesh
        self.device = torch.device(mesh.binding.device_type if mesh.binding is not None else "cpu")
        self.ranks = mesh.universe.ranks
        if dist.is_initialized():
            world = current_world()
            if world.fake:
                raise MeshError("axes.connect needs real processes; this world is made up, by axes.simulate")
            self.job_rank = world.rank
        elif len(self.ranks) > 1:
            raise MeshError(
                f"{mesh!r} has {len(self.ranks)} ranks, and torch.distributed isn't running; call axes.init_mesh"
            )
        else:
            self.job_rank = self.ranks[0]
        position = mesh.universe.position(self.job_rank)
        if position is None:
            raise MeshError(f"rank {self.job_rank} isn't one of the ranks of {mesh!r}, which are those that connect")
        self.rank = position
        if timeout is None:
            bound = None if mesh.binding is None else current_world().timeout
            timeout = bound or torch_private.usual_timeout("gloo")
        self.store, self.timeout, self.calls, self.closed = store, timeout, 0, False
        self.meeting = Rendezvous(store, name, position, timeout)
        self.connections: dict[str, Connection] = {}
        self.runs: dict[tuple[str, str], tuple[Any, LinkRun]] = {}
        self.texts: dict[tuple[str, int], tuple[str, str]] = {}
        said = f"axes.connect(store, '{name}', {mesh.declaration}, peers={peers})"
        token = self._told("axes.connect", said, uuid.uuid4().hex[:12])[0]
        self.meeting.join(token)

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
            self.connections.pop(name).end()
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
        wrong: AxesError | None = None
        own: OwnTensors | None = None
        text = ""
        waits = f"is in {said}, and waits for its own ranks"
        self.meeting.note(waits)
        try:
            own, text = self._described(tensors, specs, said, side, rules)
        except AxesError as failed:
            wrong = failed
        call = JobCall(
            self.name,
            self.meeting.token,
            self.calls,
            len(self.ranks),
            _digest(text),
            self.peers.index(self.name),
            side,
            "" if wrong is None else f"{type(wrong).__name__}: {wrong}",
        )
        if wrong is not None:
            if self.rank == 0:
                with contextlib.suppress(AxesError):  # its own error matters more
                    self.meeting.note(f"raised in {said}: {wrong}")
                    self.meeting.meet(call, other, text, said)
            raise wrong
        assert own is not None, "what isn't wrong is described"
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
        wrong: AxesError | None = None
        own: OwnTensors | None = None
        try:
            own = OwnTensors(self, tensors, specs, ("send", "receive")[side], rules)
        except AxesError as failed:
            wrong = failed
        told = [None, str(wrong), ""] if own is None else [own.told, "", own.written]
        every = self._told(said, f"call {self.calls} of the link: {said}", told)
        if wrong is not None:
            raise wrong
        for rank, (_, error, _) in enumerate(every):
            if error:
                raise ShardingError(f"rank {rank} of '{self.name}' can't take part in {said}: {error}")
        written = {text: rank for rank, (_, _, text) in enumerate(every)}
        if len(written) > 1:
            both = "".join(f"\n  rank {rank}: {text}" for text, rank in sorted(written.items(), key=lambda w: w[1])[:2])
            raise DesyncError(f"ranks of '{self.name}' have other specs in {said}:{both}")
        assert own is not None, "its error would have been raised"
        return own, own.text([found for found, *_ in every])

    def _met(self, call: JobCall, other: str, text: str, said: str) -> Pair:
        """The transfer for which the first ranks of both jobs have met: each tells its own job."""
        subject, told = f"{said}, which rank 0 begins with '{other}'", {}
        if self.rank == 0:
            try:
                pair = self.meeting.meet(call, other, text, said)
                told = {"jobs": [asdict(pair.source), asdict(pair.target)]}
            except DesyncError as error:
                with contextlib.suppress(DesyncError):  # its own error matters more
                    self._told(subject, "", {"error": str(error)}, 8 * GRACE)
                raise
        found = self._told(subject, "", told, 8 * GRACE)[0]
        if "error" in found:
            raise DesyncError(found["error"])
        source, target = (JobCall(**each) for each in found["jobs"])
        return Pair(source, target, call.side)

    def _told(self, subject: str, statement: str, told: Any, more: float = 0.0) -> list[Any]:
        """What each rank of this job tells the others, when all have come and stated the same.

        more: seconds beyond the limit.
        """
        if len(self.ranks) == 1:
            return [json.loads(json.dumps(told))]
        world = current_world()
        barrier = world.barrier("link", self.ranks, f"{subject}, in '{self.name}'", _ADVICE)
        return agree_at(world.member, barrier, statement, self.timeout + timedelta(seconds=more), told)

    def _carried_out(self, pair: Pair, own: OwnTensors, text: str, said: str) -> None:
        other = pair.other
        if other.error:
            raise DesyncError(f"'{other.name}' can't take part in {said}:\n  {other.error}\nNothing was written")
        theirs = self._text_of_other(pair, said)
        texts = (text, theirs) if pair.side == 0 else (theirs, text)
        rank = pair.first((pair.source, pair.target)[pair.side]) + self.rank
        wrong: AxesError | None = None
        move: Transfer | None = None
        try:
            first = (pair.first(pair.source), pair.first(pair.target))
            names = pair.source.name, pair.target.name
            move = _plan(texts, first, names, BUCKET_MB).at(rank)
        except AxesError as error:
            wrong = error
        connection = self.connections.get(other.name)
        part = move is not None and bool(move.partners)
        held = "" if connection is None or connection.of != (other.token, self.meeting.token) else connection.name
        plan = "" if move is None else move.fingerprint
        try:
            members, fresh = self.meeting.begin(pair, rank, plan, wrong, part, held, said)
        except AxesError as error:
            kind = DesyncError if isinstance(error, DesyncError) else type(error)
            raise kind(f"{error}\nNothing was written") from error
        assert move is not None, "all have the same plan"
        self._exchanged(pair, own, move, members, fresh, said)

    def _text_of_other(self, pair: Pair, said: str) -> str:
        digest, found = self.texts.get((pair.other.name, pair.side), ("", ""))
        if digest != pair.other.text:
            found = self.meeting.text_of(pair, 1 - pair.side, said)
            if _digest(found) != pair.other.text:
                raise DesyncError(f"'{pair.other.name}' has given up {said}, and begun another. Nothing was written")
            self.texts[pair.other.name, pair.side] = (pair.other.text, found)
        return found

    def _exchanged(
        self, pair: Pair, own: OwnTensors, move: Transfer, members: tuple[int, ...], fresh: bool, said: str
    ) -> None:
        error, place = "", members.index(move.rank) if fresh and move.rank in members else None
        run = LinkRun(move, members, self, pair)
        try:
            if move.partners:
                connection = self._connected(pair, move.rank, members, fresh)
                run = self._run_of(pair, move, connection)
            run.carry(*((own.local, {}, {}) if pair.side == 0 else ({}, own.local, own.given)))
        except (AxesError, RuntimeError) as failed:
            error = (str(failed).strip().splitlines() or [type(failed).__name__])[0]
            # Who waits for this rank hears it at once.
            self._disconnect(pair.other.name)
        try:
            self.meeting.end(pair, move.rank, error, place, said)
        except DesyncError as failed:
            whole = f"\n{run.state}" if pair.side == 1 else ""
            raise DesyncError(f"{failed}{whole}") from failed

    def _run_of(self, pair: Pair, move: Transfer, connection: Connection) -> LinkRun:
        """The plan made ready for this rank: that of the last call, where it was the same."""
        key, same = (pair.source.name, pair.target.name), (move.fingerprint, move.rank, connection.members)
        found = self.runs.get(key)
        if found is None or found[0] != same:
            found = self.runs[key] = (same, LinkRun(move, connection.members, self, pair))
        found[1].group = connection.group
        return found[1]

    def _connected(self, pair: Pair, rank: int, members: tuple[int, ...], fresh: bool) -> Connection:
        """The connection among the ranks that exchange anything; one that all of them have may have more members."""
        other = pair.other.name
        if fresh:
            self._disconnect(other)
            store = dist.PrefixStore(connection_prefix(pair), dist.PrefixStore("axes/link", self.store))
            place = members.index(rank), len(members)

            def make() -> Any:
                return torch_private.backend_over(store, *place, self.device.type, self.timeout)

            group = self.meeting.connect(make, f"the connections of '{pair.source.name}' and '{pair.target.name}'")
            self.connections[other] = Connection(pair.key, (pair.other.token, self.meeting.token), members, group)
        return self.connections[other]

    def _disconnect(self, other: str) -> None:
        found = self.connections.pop(other, None)
        if found is not None:
            found.end()


@dataclass(frozen=True)
class Connection:
    """A communicator with ranks of another job.

    of: the tokens of both jobs, the other's first. members: its ranks among those of both jobs, in its order.
    """

    name: str
    of: tuple[str, str]
    members: tuple[int, ...]
    group: Any

    def end(self) -> None:
        """Close its connections, so that who waits for this rank hears it."""
        with contextlib.suppress(RuntimeError):  # one that has failed may be closed already
            self.group.abort()


class LinkRun(TransferRun):
    """A transfer between jobs on this rank: its group is no group of the job, and shards are tensors alone.

    members: the ranks of the group, in its order.
    """

    def __init__(self, move: Transfer, members: tuple[int, ...], link: JobLink, pair: Pair):
        super().__init__(move, None)
        self.ranks, self.device, self.group = members, link.device, None
        self.link, self.pair = link, pair
        self.who, self.patience = f"rank {link.rank} of '{link.name}'", link.timeout.total_seconds()

    def carry(self, tensors: Mapping[str, Any], into: Mapping[str, Any], given: Mapping[str, torch.Tensor]) -> None:
        """Carry it out, from these shards into those. given: the tensors that the shards in `into` are of."""
        self.arrived = -1
        with torch.no_grad():
            held, taken = self._fitting(tensors, into)
            made = {name: tensor if tensor is not None else self._new(name) for name, tensor in taken.items()}
            try:
                bound = self._bound(held, taken, made)
                self._count_writes(given, taken)
                if self.group is None:
                    self._run(bound)
                else:
                    heard(self._traced(), self._run, bound)
                self._wait_for_device()
            except RuntimeError:
                self.bound = None
                raise

    def _traced(self) -> Operation:
        """The exchange as the trace of this rank's job has it, in the job's own ranks."""
        first = self.move.rank - self.link.rank
        own = [self.link.ranks[rank - first] for rank in self.ranks if 0 <= rank - first < len(self.link.ranks)]
        other = [rank for rank in self.ranks if not 0 <= rank - first < len(self.link.ranks)]
        sent, received = self.moved
        return replace(
            self.link._waits(self.pair.other.name, self.pair.side),
            what=f"{_CALLS[self.pair.side]} of {self.contents}, with {self.pair.whose(other)}",
            ranks=own,
            dtype=self.wire_said,
            bytes_in=received,
            bytes_out=sent,
        )

    def _wait_for_device(self) -> None:
        """Return when a GPU has done all of it, within the limit: its backend's messages wait for the stream alone."""
        if self.device.type == "cpu":
            return
        done, end = torch.Event(self.device), time.monotonic() + self.patience
        done.record()
        while not done.query():
            if time.monotonic() > end:
                self.arrived = -1  # nobody knows what has been written
                raise RuntimeError(f"the GPU waits for others, for {self.patience:g} s now")
            time.sleep(0.001)

    @property
    def state(self) -> str:
        """Which tensors that this rank receives are whole, and which aren't."""
        return self._state().replace(f"rank {self.move.rank}", self.who, 1)


# --- what a job says of its tensors ---------------------------------------------------------------


class OwnTensors:
    """The tensors of one call on this rank, and their shardings on the job's mesh.

    given: the tensors by name. local: this rank's shards of them. told: what the rank tells the others of its job.
    written: the specs as they stand.
    """

    def __init__(self, link: JobLink, tensors: Any, specs: Any, does: str, rules: Any):
        for what, given in (("specs", specs), ("tensors", tensors)):
            if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
                raise ShardingError(f"{does} takes {what} by name; found {shown(given)}")
        if missing := [name for name in tensors if name not in specs]:
            raise ShardingError(f"{does}: specs lack {shortened(missing[0])}{suggestion(missing[0], specs)}")
        self.link = link
        self.names = sorted(specs)
        self.given: dict[str, torch.Tensor] = {}
        self.local: dict[str, torch.Tensor] = {}
        self.ends: dict[str, Sharding] = {}
        self.told: list[Told] = []
        for name in self.names:
            value = tensors.get(name)
            try:
                if isinstance(value, torch.Tensor):
                    check_dense(value, does)
                self.ends[name] = self._end(specs[name], value)
                self.told.append(self._tell(name, value))
            except AxesError as error:
                raise type(error)(f"{error}\n  of the tensor {shortened(name)}") from None
        for name, value in self.local.items():
            check_memory(name, value, written=does == "receive")
            if does == "receive":
                check_writable(name, value)
        self.rules = None if rules is None else rules if isinstance(rules, LayoutRules) else LayoutRules(rules)
        self.written = ", ".join(
            f"{shortened(name)}: '{end}' on {end.mesh.declaration}" for name, end in self.ends.items()
        )
        if self.rules is not None:  # of a long table only the first rules are shown
            self.written += f"; {self.rules!r} {_digest(json.dumps(self.rules._as_data))}"

    def _end(self, spec: Any, value: Any) -> Sharding:
        if isinstance(spec, Sharding):
            found = spec
        elif isinstance(spec, str):
            ndim = value.dim() if isinstance(value, torch.Tensor) else None
            found = parsed_sharding(self.link.mesh, spec, (), ndim)
        else:
            raise ShardingError(f"a tensor lies by a spec, like 'f@tp d', or a Sharding; found {shown(spec)}")
        if found.pending:
            raise ShardingError(f"'{found}' has something pending; resolve it first, with axes.reshard")
        small = on_own_ranks(found)
        if any(self.link.mesh.universe.position(rank) is None for rank in small.universe.ranks):
            raise ShardingError(f"'{found}' is on ranks that aren't of the mesh of the link, {self.link.mesh!r}")
        return small

    def _tell(self, name: str, value: Any) -> Told:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            raise ShardingError(f"it is a DTensor, a shard, or None; found {shown(value)}")
        end = self.ends[name]
        self.given[name] = value
        whole = isinstance(value, DTensor)
        shape = list(value.shape)
        if len(shape) != end.ndim:
            raise wrong_dims(end, end.ndim, len(shape), shape)
        if isinstance(value, DTensor):
            found = sharding_of_spec(torch_private.spec_of(value))
            rank = self.link.job_rank
            if found.pending or found.tile(shape, rank) != end.tile(shape, rank):
                raise ShardingError(f"it isn't sharded as the spec says\n  spec    {end}\n  tensor  {found}")
            value = torch_private.local_of(value)
        if value.device.type != self.link.device.type:
            raise ShardingError(f"it is on {value.device}; the link's mesh is on '{self.link.device.type}'")
        self.local[name] = value.detach()
        return [whole, shape, name_of(value.dtype)]

    def text(self, every: Sequence[Sequence[Told]]) -> str:
        """What the job says, from what each of its ranks tells: the same on all of them."""
        meshes: dict[str, int] = {}
        rows = {}
        for number, name in enumerate(self.names):
            end = self.ends[name]
            told = {rank: ranks[number] for rank, ranks in enumerate(every) if ranks[number] is not None}
            shape, dtype = _whole(name, end, told, self.link)
            mesh = json.dumps(_mesh_text(end, self.link.mesh))
            rows[name] = [meshes.setdefault(mesh, len(meshes)), end.at(shape).spec, list(shape), dtype]
        said = {"axes": _version(), "peers": self.link.peers, "meshes": list(meshes), "tensors": rows}
        if self.rules is not None:
            said["rules"] = self.rules._as_data
        return json.dumps(said, sort_keys=True)


def _whole(name: str, end: Sharding, told: Mapping[int, Any], link: JobLink) -> tuple[tuple[int, ...], str]:
    """The whole shape and the dtype of a tensor, from what ranks say of their parts."""
    if not told:
        raise ShardingError(f"no rank of '{link.name}' has {shortened(name)}; leave it out of specs")
    kinds = {dtype: rank for rank, (_, _, dtype) in told.items()}
    if len(kinds) > 1:
        both = " and ".join(f"{dtype} on rank {rank}" for dtype, rank in sorted(kinds.items()))
        raise ShardingError(f"{shortened(name)} is {both} of '{link.name}'")
    wholes = [tuple(shape) for whole, shape, _ in told.values() if whole]
    shape = wholes[0] if wholes else _summed(name, end, {rank: shape for rank, (_, shape, _) in told.items()}, link)
    for rank in end.universe.ranks:
        at = link.mesh.universe.position(rank)
        assert at is not None, "checked when the spec was read"
        tile = end.tile(shape, rank)
        assert tile is not None, "the rank is of the universe"
        here = tile_shape(tile)
        if at not in told and 0 not in here:
            raise ShardingError(
                f"rank {at} of '{link.name}' has nothing of {shortened(name)}; by '{end}' it has {list(here)}"
            )
        if at in told:
            is_whole, found, _ = told[at]
            wanted = shape if is_whole else here
            if tuple(found) != wanted:
                silent = [rank for rank in range(len(link.ranks)) if rank not in told]
                without = f", where rank {silent[0]} has nothing of it" if silent else ""
                raise ShardingError(
                    f"{shortened(name)} is {found} on rank {at} of '{link.name}'{without}; by '{end}' of {list(shape)} "
                    f"it is {list(wanted)}"
                )
    return shape, next(iter(kinds))


def _summed(name: str, end: Sharding, shapes: Mapping[int, list[int]], link: JobLink) -> tuple[int, ...]:
    """The whole shape of which these are the shards: along each dim, the sizes of its pieces together."""
    first = next(iter(shapes.values()))
    found = []
    for at, dim in enumerate(end.dims):
        if len(dim) > 1:
            found.append(first[at] * dim.pieces)
            continue
        layout = pieces_of(dim, (0,)).layout
        sizes = {}
        for rank, shape in shapes.items():
            position = end.universe.position(link.ranks[rank])
            if position is not None:
                sizes[layout.coordinate(position)] = shape[at]
        found.append(sum(sizes.values()))
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


BUCKET_MB = 64.0
"""MiB of the buffers of a bucket, the same in all jobs."""


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
    rules = None if "rules" not in texts[0] else LayoutRules._from_data(texts[0]["rules"])
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
