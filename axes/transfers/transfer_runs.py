"""Transfers carried out: this rank's part of an `axes.transfer`, with its own tensors.

A bucket is one exchange with the ranks that this one shares elements with: what goes to a rank lies end to end in the
bucket's buffer, and goes as one message. While one bucket travels the next is packed; so buffers of two buckets are
all the memory that there is beside the tensors. A large piece that lies in memory as it is sent has a message of its
own, which is sent from where it lies; one that arrives so is written where it belongs.

    posted:   | receive 0, pack 0, send 0 | receive 1, pack 1, send 1 |             | receive 2 ...
    waited:                                                          | 0, unpack 0 |

Which memory is copied to which is found once for the tensors of a call, and kept for the next call with the same ones:
a training loop's parameters stay where they are. Between two calls the buffers have no memory on an accelerator, whose
allocator gives it back at once; on a CPU they keep it, as new memory takes longer than what is done with it.

Before anything is sent, all ranks of the transfer compare their plans and whether their tensors fit, by one small
reduction. So a wrong tensor is an error on every rank.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from axes.algebra.chunks import tile_shape
from axes.algebra.errors import AxesError, DesyncError, MeshError, ShardingError, shortened, shown, suggestion
from axes.algebra.layout import Universe
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import Sharding
from axes.extension import Operation, collective
from axes.runtime import torch_private
from axes.runtime.agreement import MissedError, ranks_text
from axes.runtime.communicator import communicator
from axes.runtime.groups import GroupOptions, abort_group_of, current_world, group_of, of_world
from axes.runtime.linear import count_writes
from axes.runtime.packing import Shape
from axes.runtime.programs import name_of
from axes.runtime.sharded import dtensor_of
from axes.runtime.torch_placements import sharding_of_spec
from axes.runtime.transforms import check_dense, is_dense
from axes.transfers import parcels
from axes.transfers.parcels import BucketSide, parcels_of
from axes.transfers.transfer_views import (
    MessageCopy,
    TileViews,
    Views,
    copy_views,
    identity_of,
    in_common,
    is_freed,
    is_written_twice,
)
from axes.transfers.transfers import Like, Transfer, transfer

_NAMES_SHOWN = 8
_SPECS_SHOWN = 2

_STATE = 5
"""Numbers that ranks compare before a transfer."""

Tensors = dict[str, torch.Tensor | None]
"""This rank's tiles of one side by name; None where it has none."""

_LANE = "transfer"
"""The name of the group of a transfer, and of the lane of one that has a time limit of its own."""


def carry_out(move: Transfer, tensors: Mapping[str, Any], into: Mapping[str, Any] | None) -> dict[str, Any]:
    """Carry a transfer out on this rank; see `Transfer.__call__`."""
    run = run_of(move)
    run.keep_to_limit()
    if run.group is None and not run.takes_part:
        return {}
    with torch.no_grad():
        return run(tensors, into)


TransferKind = tuple[str, Sharding, Sharding, Shape, str]
"""A tensor that moves: its name, how it lies and will lie, its shape and its dtype."""


def carry_kinds(kinds: tuple[TransferKind, ...], tensors: Mapping[str, DTensor]) -> dict[str, Any]:
    """Carry out the transfer of these tensors by name: what `axes.reshard` of many is."""
    return carry_out(_transfer_of(kinds), {name: tensors[name] for name, *_ in kinds}, None)


@functools.lru_cache(maxsize=64)
def _transfer_of(kinds: tuple[TransferKind, ...]) -> Transfer:
    sources = {name: source for name, source, *_ in kinds}
    targets = {name: target for name, _, target, *_ in kinds}
    return transfer(sources, targets, shapes={name: Like(shape, dtype) for name, _, _, shape, dtype in kinds})


@of_world(32)
def run_of(move: Transfer) -> TransferRun:
    """A transfer, made ready for this rank."""
    world = current_world()
    if move.home is None and move.tensors:
        raise MeshError("the meshes of this transfer are algebra alone; data moves on a mesh made with axes.init_mesh")
    return TransferRun(move.at(world.rank), move.home)


# --- one call -------------------------------------------------------------------------------------


@dataclass
class Bound:
    """What a call with certain tensors copies, and sends from where.

    memory: what tells these tensors from others, None where some of them were made for the call. pack, unpack: what is
    copied for each message of each bucket. sends, receives: `(peer, tensor)` for each bucket. buffers: two on each
    side, which buckets take in turns.
    """

    memory: tuple[Any, ...] | None
    copies: tuple[Views, Views]
    pack: list[list[MessageCopy]] = field(default_factory=list)
    unpack: list[list[MessageCopy]] = field(default_factory=list)
    sends: list[list[tuple[int, torch.Tensor]]] = field(default_factory=list)
    receives: list[list[tuple[int, torch.Tensor]]] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)


class TransferRun:
    """A transfer on this rank: who it exchanges with, and by which boxes."""

    def __init__(self, move: Transfer, mesh: Mesh | None):
        self.move = move
        self.mesh = mesh
        self.ranks = Universe.of(move.ranks).ranks if move.ranks else ()
        self.takes_part = move.rank in self.ranks
        self.bound: Bound | None = None
        self.fitting: tuple[Any, ...] | None = None
        self.seen: dict[tuple[int, str], Any] = {}
        self.limit: timedelta | None = None
        self.arrived = -1

    @cached_property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all ranks of the transfer; None where nobody sends anything.

        Where `init_mesh` has set a time limit, that is the group's: a rank that never comes is an error on the
        others then. A rank that has missed some of their attempts to connect takes part in the next one.
        """
        if self.mesh is None or not self.takes_part or len(self.ranks) == 1:
            return None
        union = Mesh("union", ranks=self.ranks)
        own = [(union.layout_of_all, GroupOptions(timeout=self.limit, lane=_LANE))]
        limited = self.limit is not None and self.device.type == "cpu"
        union = union._with(binding=replace(self.mesh.binding, options=tuple(own) if limited else ()))
        while True:
            try:
                return group_of(union, union.layout_of_all, _LANE)
            except MissedError:
                continue

    def keep_to_limit(self) -> None:
        """Connect anew where ranks wait for one another for another time by now."""
        limit = None if self.mesh is None else current_world().timeout
        if limit != self.limit:
            vars(self).pop("group", None)
        self.limit = limit

    @cached_property
    def device(self) -> torch.device:
        """Where tensors are."""
        assert self.mesh is not None, "a transfer of tensors has meshes"
        return torch.device(self.mesh.binding.device_type)

    @cached_property
    def shapes(self) -> tuple[dict[str, Shape | None], dict[str, Shape | None]]:
        """The shapes of this rank's tiles of each tensor, before and after."""
        before, after = (
            {name: None if tile is None else tile_shape(tile) for name, tile in side.items()}
            for side in self.move.tiles
        )
        return before, after

    @cached_property
    def wires(self) -> list[torch.dtype]:
        """The dtype in which each tensor travels and arrives."""
        return [getattr(torch, one.dtypes[1] or "float32") for one in self.move.tensors]

    @cached_property
    def dtypes(self) -> tuple[dict[str, torch.dtype | None], dict[str, torch.dtype]]:
        """The dtype of each source, None where it may be any; and in which each target arrives."""
        before: dict[str, torch.dtype | None] = {}
        for one in self.move.tensors:
            # Where neither is known, the plan is for float32; where dtype= is given, any dtype becomes that.
            planned = one.dtypes[0] or ("float32" if one.dtypes[1] is None else None)
            before[one.source_name] = before.get(one.source_name) or (planned and getattr(torch, planned))
        return before, {one.target_name: wire for one, wire in zip(self.move.tensors, self.wires, strict=True)}

    @cached_property
    def buckets(self) -> list[tuple[BucketSide, BucketSide]]:
        """What this rank sends and receives in each bucket."""
        return parcels_of(self.move, self.ranks)

    @cached_property
    def views(self) -> TileViews:
        """Boxes of tensors as views of this rank's tiles."""
        return TileViews(self.move)

    @cached_property
    def last(self) -> dict[str, int]:
        """The number of the bucket with the last piece of each target."""
        found = {one.target_name: -1 for one in self.move.tensors}
        for number, pieces in enumerate(self.move.buckets):
            every = [each for piece in pieces for each in (piece.tensor, *self.move.tied.get(piece.tensor, ()))]
            found.update({self.move.tensors[each].target_name: number for each in every})
        return found

    # tensors

    def __call__(self, tensors: Mapping[str, Any], into: Mapping[str, Any] | None) -> dict[str, Any]:
        """The tensors that this rank has of the targets, from those that it has of the sources."""
        error: AxesError | None = None
        held: Tensors = {}
        given: Tensors = {}
        try:
            held, given = self._fitting(tensors, {} if into is None else into)
        except AxesError as failed:
            error = failed
        try:
            self._agree(error, into is None)
        except DesyncError as failed:
            self._end_group(failed)
            raise
        made = {name: tensor if tensor is not None else self._new(name) for name, tensor in given.items()}
        bound = self._bound(held, given, made)
        self._count_writes({} if into is None else into, given)
        try:
            collective(self._operation, (), self._run, bound)
        except DesyncError as failed:
            self.bound = None
            self._end_group(failed)
            raise DesyncError(f"{failed}\n{self._state()}") from failed
        found = {
            name: self._result(name, tile) if into is None else tile if into.get(name) is None else into[name]
            for name, tile in made.items()
            if tile is not None
        }
        kept = {} if into is None else {name: into[name] for name in into if name in self.move.idle[1]}
        return {**found, **{name: x for name, x in kept.items() if x is not None}}

    def _fitting(self, tensors: Mapping[str, Any], into: Mapping[str, Any]) -> tuple[Tensors, Tensors]:
        """The tiles of the sources and those to write, once it is clear that the plan can be carried out on them."""
        held, given = self._held(tensors), self._given(into)
        kept = self._kept(into)
        memory = tuple([identity_of(t) for t in (*held.values(), *kept.values(), *given.values())])
        if memory != self.fitting:
            for tiles in (held, given):
                for name, x in tiles.items():
                    if x is not None:
                        check_memory(name, x, written=tiles is given)
            self._check_apart(held, kept, given)
            self.fitting = memory
        return held, given

    def _held(self, tensors: Mapping[str, Any]) -> Tensors:
        """The tiles of the sources, in order."""
        if not isinstance(tensors, Mapping):
            raise ShardingError(f"a transfer takes tensors by name; found {shown(tensors)}")
        self._check_known(tensors, 0, "a source")
        found: Tensors = {}
        for name, planned in self.dtypes[0].items():
            local = self._local(name, tensors.get(name), 0)
            if local is not None and planned is not None and local.dtype != planned:
                raise ShardingError(
                    f"{shortened(name)} is {name_of(local.dtype)}, the plan is for {name_of(planned)}; pass "
                    "dtype= to axes.transfer, or shapes= with tensors of this dtype"
                )
            found[name] = None if local is None else local.resolve_conj().resolve_neg()
        return found

    def _given(self, into: Mapping[str, Any]) -> Tensors:
        """The tensors to write, in order; None where there is none."""
        if not isinstance(into, Mapping):
            raise ShardingError(f"into= maps names to tensors; found {shown(into)}")
        self._check_known(into, 1, "a target")
        found: Tensors = {}
        for name, wire in self.dtypes[1].items():
            value = into.get(name)
            if value is None and name in into and (shape := self.shapes[1][name]) is not None and 0 not in shape:
                raise ShardingError(
                    f"{shortened(name)} of into= is None, and rank {self.move.rank} gets a shard of shape "
                    f"{list(shape)}; pass a tensor, or leave the name out and take it from the result"
                )
            local = None if value is None else self._local(name, value, 1)
            if local is not None and local.dtype != wire:
                raise ShardingError(
                    f"{shortened(name)} of into= is {name_of(local.dtype)}; what arrives is "
                    f"{name_of(wire)}. Pass dtype={local.dtype} to axes.transfer"
                )
            if local is not None:
                check_writable(name, local)
            found[name] = local
        return found

    def _count_writes(self, into: Mapping[str, Any], given: Tensors) -> None:
        """Tell autograd what is about to be written. Who fails on the way has written a part of it."""
        written = [name for name, tile in given.items() if tile is not None and tile.numel()]
        count_writes([into[name] for name in written if into.get(name) is not None])

    def _kept(self, into: Mapping[str, Any]) -> Tensors:
        """This rank's tiles of targets that the layout rules say keep their values."""
        found: Tensors = {}
        for name in into.keys() & self.move.idle[1]:
            value = into[name]
            if value is not None and not isinstance(value, torch.Tensor):
                raise ShardingError(f"{shortened(name)} of into= is a tensor or None; found {shown(value)}")
            if value is not None:
                self._check_dense(name, value)
            found[name] = torch_private.local_of(value) if isinstance(value, DTensor) else value
        return dict(sorted(found.items()))

    def _check_known(self, tensors: Mapping[str, Any], side: int, what: str) -> None:
        known = self.move.ends[side]
        if unknown := tensors.keys() - known.keys() - self.move.idle[side]:
            name = next(name for name in tensors if name in unknown)
            raise ShardingError(f"{shortened(name)} isn't {what} of the transfer{suggestion(str(name), known)}")

    def _check_dense(self, name: str, x: torch.Tensor) -> None:
        if not is_dense(x):  # asked first, as to write a name takes longer than all else that a round does with it
            check_dense(x, f"a transfer of {shortened(name)}")

    def _local(self, name: str, value: Any, side: int) -> torch.Tensor | None:
        """This rank's tile in a DTensor, or the tile itself; `ShardingError` for what is another one."""
        shape = self.shapes[side][name]
        if value is None and shape is None:
            return None
        end = self.move.ends[side][name]
        if isinstance(value, DTensor):
            spec = torch_private.spec_of(value)
            if self.seen.get((side, name)) is not spec:
                self._check_spec(name, end.sharding, spec, end.shape)
                self.seen[side, name] = spec
            value = torch_private.local_of(value)
        if isinstance(value, torch.Tensor):
            self._check_dense(name, value)
        if shape is None:
            if isinstance(value, torch.Tensor) and not value.numel():
                return None
            raise ShardingError(
                f"rank {self.move.rank} has nothing of {shortened(name)} ('{end.sharding}'); found {_shown(value)}"
            )
        if value is None and not math.prod(shape):
            return torch.empty(shape, dtype=self.dtypes[side][name] or torch.float32, device=self.device)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
            raise ShardingError(
                f"{shortened(name)} is on rank {self.move.rank} a shard of shape {list(shape)} "
                f"('{end.sharding}' of {list(end.shape)}); found {_shown(value)}"
            )
        if value.device.type != self.device.type:
            raise ShardingError(f"{shortened(name)} is a shard on {self.device.type}; found it on {value.device}")
        return value.detach()

    def _check_spec(self, name: str, end: Any, spec: Any, shape: Shape) -> None:
        found = sharding_of_spec(spec)
        if tuple(spec.shape) != shape:
            raise ShardingError(f"{shortened(name)} has shape {list(spec.shape)}; the plan is for {list(shape)}")
        if found.pending or any(
            found.tile(shape, rank) != end.tile(shape, rank) for rank in (self.move.rank, *end.universe.ranks[:1])
        ):
            raise ShardingError(f"{shortened(name)} isn't sharded as the plan says\n  plan    {end}\n  tensor  {found}")

    def _new(self, name: str) -> torch.Tensor | None:
        shape = self.shapes[1][name]
        return None if shape is None else torch.empty(shape, dtype=self.dtypes[1][name], device=self.device)

    def _result(self, name: str, local: torch.Tensor) -> Any:
        """What arrives without `into`: a DTensor where the target's mesh can have one."""
        end = self.move.ends[1][name]
        mesh = end.sharding.mesh
        if mesh.binding is None:
            return local
        try:
            check_torch_can(end.sharding, end.shape)
            return dtensor_of(local, end.sharding, end.shape)
        except ShardingError:  # DTensor can't say every sharding; the shard is right
            return local

    # memory

    def _bound(self, held: Tensors, given: Tensors, made: Tensors) -> Bound:
        """What a call copies and sends; kept for the next one where the caller gives all that is written."""
        keep = all(x is made[name] or identity_of(made[name]) is None for name, x in given.items())
        memory = self.fitting if keep else None
        if keep and self.bound is not None and self.bound.memory == memory:
            return self.bound
        bound = Bound(memory, self._copies(held, made))
        most = [max((sides[side].size for sides in self.buckets), default=0) for side in (0, 1)]
        turns = min(2, len(self.buckets))
        sizes = [size for size in most for _ in range(turns)]
        bound.buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        for number, (sends, receives) in enumerate(self.buckets):
            given, taken = (bound.buffers[side * turns + number % turns] for side in (0, 1))
            packed, sent = self._views(sends, 0, given, held)
            unpacked, received = self._views(receives, 1, taken, made)
            bound.pack.append(packed)
            bound.unpack.append(unpacked)
            bound.sends.append(sent)
            bound.receives.append(received)
        self.bound = bound if keep else None
        return bound

    def _check_apart(self, held: Tensors, kept: Tensors, given: Tensors) -> None:
        """What is written is nothing that is still to be read, that keeps its values, or that is written, too."""
        what = [(name, "the source, which is read while it is written") for name in held]
        what += [(name, "of into=, which keeps its values") for name in kept]
        what += [(name, "of into=, where that is written") for name in given]
        every = (*held.values(), *kept.values(), *given.values())
        for one, two in in_common([torch.empty(0) if x is None else x for x in every]):
            if two >= len(held) + len(kept):
                raise ShardingError(
                    f"{shortened(what[two][0])} of into= shares memory with {shortened(what[one][0])}, {what[one][1]}; "
                    "leave it out of into=, or clone one of them"
                )

    def _copies(self, held: Tensors, made: Tensors) -> tuple[Views, Views]:
        """What this rank keeps: `(to, from)`."""
        to, origin = [], []
        for number, one in enumerate(self.move.tensors):
            exchange = self.move.exchange(number)
            source, target = held[one.source_name], made[one.target_name]
            if exchange is None or source is None or target is None:
                continue
            for box, place in exchange.copies:
                to.append(self.views.box(number, 1, target, place))
                origin.append(self.views.box(number, 0, source, box))
        return to, origin

    def _views(
        self, side: BucketSide, end: int, buffer: torch.Tensor, tiles: Tensors
    ) -> tuple[list[MessageCopy], list[tuple[int, torch.Tensor]]]:
        """What is copied for each message; and the messages by rank."""
        copied, passed = [], []
        packed_at: dict[int, torch.Tensor] = {}
        for parcel in side.parcels:
            if (message := packed_at.get(parcel.start)) is not None:  # what is sent to a replica is packed by now
                copied.append(MessageCopy([], []))
                passed.append((parcel.peer, message))
                continue
            stretch: torch.Tensor | None = None
            staged: Views = []
            lying: Views = []
            message = buffer[parcel.start : parcel.start + parcel.size]
            for place in parcel.places:
                wire = self.wires[place.tensor]
                flat = message[place.start : place.start + place.size].view(wire)
                for number in (place.tensor, *(self.move.tied.get(place.tensor, ()) if end else ())):
                    one = self.move.tensors[number]
                    tile = tiles[(one.source_name, one.target_name)[end]]
                    assert tile is not None, "what is exchanged is of a tile that the rank has"
                    views = list(self.views.lying(number, place.boxes, end, tile))
                    alone = number == place.tensor and len(parcel.places) == len(views) == 1 and tile.dtype == wire
                    where = views[0][1] if alone and place.size >= parcels.DIRECT else None
                    if isinstance(where, torch.Tensor) and where.is_contiguous():
                        flat = stretch = where.view(-1)
                        continue
                    staged += [flat[start : start + view.numel()].view(view.shape) for start, view in views]
                    lying += [view for _, view in views]
            copied.append(MessageCopy(staged, lying))
            message = message if stretch is None else stretch.view(torch.uint8)
            packed_at[parcel.start] = message
            passed.append((parcel.peer, message))
        return copied, passed

    # what is sent

    def _exchange(self, bound: Bound) -> None:
        """Exchange bucket after bucket, two at a time."""
        group = self.group
        assert group is not None, "there are buckets where ranks exchange anything"
        under_way: list[Any] = []
        for number in range(len(self.buckets)):
            works = torch_private.pass_all(
                group, bound.sends[number], bound.receives[number], functools.partial(self._pack, bound.pack[number])
            )
            if number:
                self._arrived(bound, number - 1, under_way)
            under_way = works
        self._arrived(bound, len(self.buckets) - 1, under_way)

    def _arrived(self, bound: Bound, number: int, works: list[Any]) -> None:
        for work in works:
            work.wait()
        for message in bound.unpack[number]:
            copy_views(message.lying, message.staged)
        self.arrived = number

    def _pack(self, messages: Sequence[MessageCopy], number: int) -> None:
        """Fill the message of a number."""
        message = messages[number]
        copy_views(message.staged, message.lying)

    def _run(self, bound: Bound) -> None:
        self.arrived = -1
        for buffer in bound.buffers:
            if not buffer.untyped_storage().size():
                buffer.untyped_storage().resize_(buffer.numel())
        copy_views(*bound.copies)
        if self.group is not None and self.buckets:
            self._exchange(bound)
        for buffer in bound.buffers if self.device.type != "cpu" else ():
            buffer.untyped_storage().resize_(0)

    # all ranks

    @cached_property
    def said(self) -> str:
        """The transfer as errors and traces show it."""
        count = len(self.move.ends[1])
        return f"axes.transfer of {count} tensor{'s' if count != 1 else ''}, {ranks_text(self.ranks)}"

    @property
    def contents(self) -> str:
        """How many tensors in how many buckets, and the largest of them with their specs, for a trace."""
        count, tensors = len(self.buckets), len(self.move.ends[1])
        found = sorted(self.move.tensors, key=lambda one: -math.prod(one.shape) * one.itemsize)
        specs = [f"{shortened(one.target_name)} ({one.source} -> {one.target})" for one in found[:_SPECS_SHOWN]]
        more = [f"{len(found) - _SPECS_SHOWN} more"] if len(found) > _SPECS_SHOWN else []
        buckets = f"{count} bucket{'s' if count != 1 else ''}"
        return f"{tensors} tensor{'s' if tensors != 1 else ''} in {buckets}, {', '.join(specs + more)}"

    @property
    def wire_said(self) -> str:
        """The dtype in which tensors travel."""
        return "many" if len({*self.wires}) != 1 else name_of(self.wires[0])

    @property
    def moved(self) -> tuple[int, int]:
        """The bytes that this rank sends and receives, of all buckets."""
        sent, received = (sum(p.size for sides in self.buckets for p in sides[side].parcels) for side in (0, 1))
        return sent, received

    def _comparison(self) -> Operation:
        """What ranks tell each other before: whether their tensors fit, and by which plan, which isn't compared yet."""
        found, size = self._operation(), len(self.ranks)
        moved = 2 * _STATE * torch.int64.itemsize * (size - 1) // size
        return replace(
            found,
            what=f"all_reduce before {self.said}",
            kind="all_reduce",
            by="all_reduce",
            dtype="int64",
            bytes_in=moved,
            bytes_out=moved,
            together=True,
            compared="axes.transfer",
        )

    def _operation(self) -> Operation:
        assert self.mesh is not None, "what is sent is of a mesh"
        group, moved = self.group, self.moved
        name = "" if group is None else str(group.group_name)
        return Operation(
            *(
                f"axes.transfer of {self.contents}",
                "exchange",
                "send and receive",
                "all ranks",
                name,
                self.ranks,
                self.wire_said,
            ),
            device=self.mesh.binding.device_type,
            bytes_in=moved[1],
            bytes_out=moved[0],
            together=False,  # a rank waits for those that it exchanges with
            compared=f"{self.said} {self.move.fingerprint}",
            mesh=self.mesh,
            short=self.said,
        )

    def _agree(self, error: AxesError | None, new: bool) -> None:
        """Returns where all ranks have one plan, and each has tensors that fit; an error on all of them otherwise."""
        group = self.group
        if group is None:
            if error is not None:
                raise error
            return
        plan = int(self.move.fingerprint[:15], 16)
        targets = self.move.rank in self.move.targets
        flags = [error is not None, targets and new, targets and not new]
        state = torch.tensor([*flags, plan, -plan], dtype=torch.int64, device=self.device)
        assert state.numel() == _STATE, "what a trace counts"
        collective(self._comparison, (), _greatest, group, state)
        wrong, some, others, most, least = state.tolist()
        if wrong or (some and others) or most != -least:
            into = f"into= {'is left out' if new else 'is passed'}" if targets else ""
            said = self.move.described
            mine = json.dumps((None if error is None else str(error), into, said))
            told = [json.loads(text) for text in collective(self._comparison, (), _texts, group, mine, self.device)]
            if error is not None:
                raise error
            raise self._disagreement(told, said)

    def _end_group(self, failed: DesyncError) -> None:
        """End a group whose backend has failed, if it is of transfers alone: the next transfer connects anew."""
        if self.group is not None and isinstance(failed.__cause__, RuntimeError):
            abort_group_of(self.group, _LANE)
            vars(self).pop("group", None)

    def _disagreement(self, told: list[tuple[str | None, str, str]], mine: str) -> AxesError:
        """What to raise on a rank whose own tensors fit."""
        failed = [f"rank {rank}: {text}" for rank, (text, *_) in zip(self.ranks, told, strict=True) if text is not None]
        if failed:
            more = [f"and {len(failed) - 1} more"] if len(failed) > 1 else []
            return ShardingError("\n  ".join([f"{self.said}: the tensors of other ranks don't fit", failed[0], *more]))
        passes = {into: rank for rank, (_, into, _) in zip(self.ranks, told, strict=True) if into}
        if len(passes) > 1:
            both = "".join(f"\n  rank {rank}: {into}" for into, rank in passes.items())
            return DesyncError(f"{self.said}: into= is passed on all ranks that receive, or on none{both}")
        rank, theirs = next(
            (rank, text.splitlines()) for rank, (*_, text) in zip(self.ranks, told, strict=True) if text != mine
        )
        lines = zip_longest(mine.splitlines(), theirs, fillvalue="nothing")
        one, two = next(pair for pair in lines if pair[0] != pair[1])
        return DesyncError(
            f"ranks have other plans for {self.said}\n  rank {self.move.rank}: {one}\n  rank {rank}: {two}"
        )

    def _state(self) -> str:
        """Which tensors that this rank gets are whole, and which aren't."""
        whole, rest = list[str](), list[str]()
        for name, shape in self.shapes[1].items():
            if shape is not None:
                (whole if self.last[name] <= self.arrived else rest).append(name)
        if not whole and not rest:
            return f"rank {self.move.rank} gets no tensors"
        return f"whole on rank {self.move.rank}: {_listed(whole)}; not whole: {_listed(rest)}"


def check_memory(name: str, x: torch.Tensor, written: bool) -> None:
    """`ShardingError` for a tensor whose memory is gone, and for one to write of which elements share a place."""
    if is_freed(x):
        raise ShardingError(
            f"{shortened(name)} has no memory: its storage has been resized to less than it takes, as FSDP does with "
            "parameters that it has sharded again; pass the sharded parameter"
        )
    if written and is_written_twice(x):
        raise ShardingError(
            f"{shortened(name)} of into= has several elements in one place, as an expanded tensor has; clone it"
        )


def check_writable(name: str, x: torch.Tensor) -> None:
    """`ShardingError` for a tensor of a kind that isn't written in place."""
    if x.is_conj() or x.is_neg():
        raise ShardingError(
            f"{shortened(name)} of into= is a view that conjugates or negates; pass the tensor that it is of"
        )
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise ShardingError(
            f"{shortened(name)} of into= is an inference tensor; call the transfer in torch.inference_mode()"
        )


def _greatest(group: dist.ProcessGroup, state: torch.Tensor) -> None:
    communicator(group, state.dtype, True).all_reduce(state, "max", True)


def _texts(group: dist.ProcessGroup, text: str, device: torch.device) -> list[str]:
    """The text of every rank of the group."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([len(mine)], device=device)
    _greatest(group, size)
    row = mine.new_zeros(int(size))
    row[: len(mine)] = mine
    rows = communicator(group, row.dtype, True).all_gather(row, (group.size() * len(row),)).view(group.size(), -1)
    return [bytes(each.tolist()).rstrip(b"\0").decode() for each in rows]


def _shown(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(map(shortened, names[:_NAMES_SHOWN])) + more
