"""Transfers carried out: this rank's part of an `axes.transfer`, with its own tensors.

A bucket is one exchange with the ranks that this one shares elements with. What goes to a rank is a few messages: a
large slice of a tensor is one by itself, which is sent from where it lies if its memory is in order, and arrives where
it belongs; all else for the rank lies end to end in one more, in the bucket's buffer. Replicas are sent one memory,
which is packed once. While one bucket travels the next is packed; so buffers of two buckets are all the memory that
there is beside the tensors.

    posted:   | receive 0, pack 0, send 0 | receive 1, pack 1, send 1 |             | receive 2 ...
    waited:                                                          | 0, unpack 0 |

Before anything is sent, all ranks compare their plans and whether their tensors fit, by one small reduction: a wrong
tensor is an error on every rank. Which memory is copied to which is found once for the tensors of a call, and kept for
the next call with the same ones: a training loop's parameters stay where they are. Between two calls the buffers have
no memory on an accelerator, whose allocator gives it back at once; on a CPU they keep it, as new memory takes longer
than what is done with it.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, lru_cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from axes import AxesError, DesyncError, GroupOptions, Mesh, MeshError, Sharding, ShardingError, sharding_of
from axes.extension import (
    Box,
    Grid,
    MissedError,
    Operation,
    Universe,
    abort_group_of,
    agree,
    arranged,
    check_torch_can,
    collective,
    communicator,
    current_world,
    dense,
    dtensor,
    dtype_name,
    elements_of,
    group_of,
    is_dense,
    local,
    of_world,
    ranks_text,
    shortened,
    shown,
    suggestion,
    tile_shape,
    torch_private,
    written,
)
from axes.transfers.layout_pieces import Shape, cut_box
from axes.transfers.transfers import Like, Slice, Transfer, TransferEnd, counted, transfer

DIRECT = 2**18
"""Bytes of a slice from which it has a message of its own, without a copy where its memory lies right."""

_ALIGNED = 16
"""Every slice in a buffer begins at a multiple of so many bytes."""

Part = tuple[int, Box]
"""A box, and where in its message it begins, in elements."""

Tiles = dict[str, Any]
"""This rank's tiles of one side by name; None where it has none."""

Given = dict[tuple[int, str], tuple[Any, Any]]
"""Of the tensors that a caller gives, by side and name: the spec of a DTensor, and this rank's shard."""

OwnMessage = tuple[int, tuple[Slice, ...]]
"""What goes to a rank in a bucket, or comes from it: its index in the group, and the slices, end to end."""


Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Views that are written, and those that they are copied from, which may have another dtype."""


class MessageMemory(NamedTuple):
    """Messages of one side of a bucket in their memory: the peer and the memory of each, and what is copied for it."""

    posts: list[tuple[int, torch.Tensor]]
    copies: list[Copies]


class Bound(NamedTuple):
    """What a call with certain tensors copies, and sends from where. sides: of each bucket what goes, what comes."""

    copies: Copies
    sides: list[tuple[MessageMemory, MessageMemory]]
    buffers: list[torch.Tensor]


@contextlib.contextmanager
def telling(tell: Callable[[AxesError], object]) -> Iterator[None]:
    """Others are told of an error in this block, before it goes on."""
    try:
        yield
    except AxesError as error:
        with contextlib.suppress(DesyncError):  # this rank's own error matters more
            tell(error)
        raise


class Execution:
    """A transfer on this rank. ranks: of the group that carries it out, in its order. who: this rank in words.

    own_rank: its number in the job, where that isn't the one in the transfer.
    """

    def __init__(
        self, move: Transfer, ranks: Sequence[int], device: torch.device, who: str, own_rank: int | None = None
    ):
        self.move, self.ranks, self.device, self.who = move, ranks, device, who
        self.own_rank, self.count = move.rank if own_rank is None else own_rank, counted(len(move.ends[1]), "tensor")
        self.shapes: list[dict[str, Shape | None]] = [
            {name: None if tile is None else tile_shape(tile) for name, tile in side.items()} for side in move.tiles
        ]
        """Of this rank's tiles of each tensor, before and after."""
        self.wires = [getattr(torch, one.dtypes[1] or "float32") for one in move.tensors]
        """The dtype in which each tensor travels and arrives."""
        self.wire = "many" if len({*self.wires}) != 1 else dtype_name(self.wires[0])
        self.last: Given | None = None
        """The tensors of the last call."""
        self.tiles: tuple[Tiles, Tiles] = {}, {}
        """Those that are read, and those that are written, None where a new one is made."""
        self.bound: Bound | None = None
        self.arrived = -1
        self.messages = self._messages()

    def _messages(self) -> list[list[list[OwnMessage]]]:
        """What this rank sends and receives in each bucket: both ends find the same messages in the same order."""
        index = {rank: at for at, rank in enumerate(self.ranks)}
        found: list[list[list[OwnMessage]]] = [[[], []] for _ in self.move.steps]
        for sides, step in zip(found, self.move.steps, strict=True):
            for side, sign, by_rank in zip(sides, (1, -1), (step.sends, step.receives), strict=True):
                # Each rank begins with another one, so that not all send to the first at the same time.
                first = index.get(self.move.rank, 0)
                for rank in sorted(by_rank, key=lambda rank: sign * (index[rank] - first) % len(index)):
                    together = tuple([each for each in by_rank[rank] if each.size < DIRECT])
                    alone = [(each,) for each in by_rank[rank] if each.size >= DIRECT]
                    side += [(index[rank], each) for each in (together, *alone) if each]
        return found

    # tensors

    def fit(self, tensors: Mapping[str, Any], into: Mapping[str, Any]) -> None:
        """Take these tensors for the next call, once it is clear that the plan can be carried out on them."""
        self.arrived, last, given = -1, self.last, self._given(tensors, into)
        if last is not None and last.keys() == given.keys() and all(map(_is_same, last.values(), given.values())):
            return
        before, after = self.move.ends
        held = {name: self._tile(0, name, tensors.get(name)) for name in before}
        made: Tiles = {name: self._tile(1, name, into[name]) if name in into else None for name in after}
        _check_apart(held, made)
        self.tiles, self.bound = (held, made), None
        self.last = {key: (spec, x.detach() if isinstance(x, torch.Tensor) else x) for key, (spec, x) in given.items()}

    def _given(self, *sides: Mapping[str, Any]) -> Given:
        """The tensors of a call, those included that keep their values."""
        found = Given()
        for side, given in enumerate(sides):
            if not isinstance(given, Mapping):
                what = ("a transfer takes tensors by name", "into= maps names to tensors")[side]
                raise ShardingError(f"{what}; found {shown(given)}")
            ends, idle = self.move.ends[side], self.move.idle[side]
            for name, value in given.items():
                if name not in ends and name not in idle:
                    what = ("a source", "a target")[side]
                    raise ShardingError(f"{shortened(name)} isn't {what} of the transfer{suggestion(str(name), ends)}")
                is_global = isinstance(value, DTensor)
                both = (torch_private.spec_of(value), torch_private.local_of(value)) if is_global else (None, value)
                found[side, name] = both
        return found

    def _tile(self, side: int, name: str, given: Any) -> torch.Tensor | None:
        """This rank's tile, from the shard or DTensor that was given for it; `ShardingError` where it doesn't fit."""
        end, shape = self.move.ends[side][name], self.shapes[side][name]
        if isinstance(given, DTensor):
            self._check_sharding(name, end, given)
        value = None if given is None else dense(f"a transfer of {shortened(name)}", local(given)).detach()
        if (shape is None or 0 in shape) and (value is None or not value.numel()):
            return None
        if value is None or shape is None or tuple(value.shape) != shape:
            part = "nothing" if shape is None else f"a shard of shape {list(shape)}"
            found = f"a tensor of shape {list(value.shape)}" if value is not None else "None"
            raise ShardingError(
                f"{shortened(name)} is on {self.who} {part} ('{end.sharding}' of {list(end.shape)}); found {found}"
            )
        dtype, of_into = (
            dtype_name(value.dtype),
            "of into= is {}; what arrives is" if side else "is {}, the plan is for",
        )
        wrong = (
            (value.device.type != self.device.type, f"is a shard on {self.device.type}; found it on {value.device}"),
            (
                dtype != (end.dtype or dtype),
                f"{of_into.format(dtype)} {end.dtype}; pass dtype= to axes.transfer, or tensors of this dtype",
            ),
            (
                not value.untyped_storage().nbytes(),
                "has no memory: its storage has been resized to nothing, as FSDP does with parameters that it has "
                "sharded again; pass the sharded parameter",
            ),
            (
                side and (value.is_conj() or value.is_neg()),
                "of into= is a view that conjugates or negates; pass the tensor that it is of",
            ),
            (
                side and value.is_inference() and not torch.is_inference_mode_enabled(),
                "of into= is an inference tensor; call the transfer in torch.inference_mode()",
            ),
            (
                side and any(size > 1 and stride == 0 for stride, size in zip(value.stride(), shape, strict=True)),
                "of into= has several elements in one place, as an expanded tensor has; clone it",
            ),
        )
        for why in [why for is_wrong, why in wrong if is_wrong]:
            raise ShardingError(f"{shortened(name)} {why}")
        return value if side else value.resolve_conj().resolve_neg()

    def _check_sharding(self, name: str, end: TransferEnd, x: DTensor) -> None:
        found, shape, planned = sharding_of(x), tuple(x.shape), end.sharding
        same = shape == end.shape and found.tile(shape, self.own_rank) == planned.tile(shape, self.move.rank)
        if found.pending or not same:
            raise ShardingError(
                f"{shortened(name)} isn't sharded as the plan says\n  plan    {planned} of {list(end.shape)}\n"
                f"  tensor  {found} of {list(shape)}"
            )

    # memory

    def _bind(self) -> tuple[Bound, Tiles, bool]:
        """What a call copies and sends, and the tiles that it writes, new ones where none are given.

        And whether the next call with the same tensors can use it: where the caller gives all that is written.
        """
        held, given = self.tiles
        made = {name: self._new(name) if tile is None else tile for name, tile in given.items()}
        keep = all(tile is given[name] or not tile.numel() for name, tile in made.items() if tile is not None)
        if keep and self.bound is not None:
            return self.bound, made, True
        turns, buckets = min(2, len(self.messages)), zip(*self.messages, strict=True)
        most = [
            max([sum([_aligned(_size(one)) for one in {slices for _, slices in each}]) for each in side])
            for side in buckets
        ]
        buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in most for _ in range(turns)]
        found = []
        for number, (sends, receives) in enumerate(self.messages):
            out, into = buffers[number % turns], buffers[turns + number % turns]
            found.append((self._memory(0, sends, out, held), self._memory(1, receives, into, made)))
        exchanges = [(number, self.move.exchange(number)) for number in range(len(self.move.tensors))]
        stay = [(number, boxes) for number, each in exchanges if each is not None for boxes in each.copies]
        origin, to = (
            [self._views(side, number, [(0, boxes[side])], tiles)[0][1] for number, boxes in stay]
            for side, tiles in enumerate((held, made))
        )
        return Bound((to, origin), found, buffers), made, keep

    def _new(self, name: str) -> torch.Tensor | None:
        shape, dtype = self.shapes[1][name], getattr(torch, self.move.ends[1][name].dtype or "float32")
        return None if shape is None else torch.empty(shape, dtype=dtype, device=self.device)

    def _memory(self, side: int, messages: Sequence[OwnMessage], buffer: torch.Tensor, tiles: Tiles) -> MessageMemory:
        found = MessageMemory([], [])
        packed: dict[tuple[Slice, ...], torch.Tensor] = {}
        end = 0
        for peer, slices in messages:
            staged: list[torch.Tensor] = []
            lying: list[torch.Tensor] = []
            if slices not in packed:  # else it is sent to a replica, too
                begin = end
                for number, boxes, start, stop, size in slices:
                    flat, end = buffer[end : end + size].view(self.wires[number]), end + _aligned(size)
                    views = self._views(side, number, _boxes(boxes, start, stop), tiles)
                    first = views[0][1]
                    if size >= DIRECT and len(views) == 1 and first.dtype == flat.dtype and first.is_contiguous():
                        packed[slices] = first.view(-1).view(torch.uint8)
                        continue
                    staged += [flat[at : at + view.numel()].view(view.shape) for at, view in views]
                    lying += [view for _, view in views]
                packed.setdefault(slices, buffer[begin : begin + _size(slices)])
            found.posts.append((peer, packed[slices]))
            found.copies.append((lying, staged) if side else (staged, lying))
        return found

    def _views(self, side: int, number: int, boxes: Sequence[Part], tiles: Tiles) -> list[tuple[int, torch.Tensor]]:
        """Boxes of a tensor as views of this rank's tile, with where each begins in its message."""
        one = self.move.tensors[number]
        name = (one.source_name, one.target_name)[side]
        x, part = tiles[name], one.part
        tile: Any = self.move.tiles[side][name]
        if part is None and len(boxes) > 1:
            grids = [(start, lattice.by(x.stride(), (1,) * x.ndim)) for start, lattice in arranged(boxes)]
            if min([stride for _, grid in grids for stride in grid.strides]) >= 0:
                return [(start, grid.of(x)) for start, grid in grids]
        strides = x.stride() if part is None else part.strides(side, x.stride())
        found: list[tuple[int, torch.Tensor]] = []
        for start, box in boxes:
            first, sizes = [begin for begin, _ in box], tuple([stop - begin for begin, stop in box])
            place = first if part is None else part.place(side, tile, first)
            found.append((start, Grid(sizes, strides, sum(map(operator.mul, place, x.stride()))).of(x)))
        return found

    # what is sent

    @torch.no_grad()
    def carry(self, group: Any, into: Mapping[str, Any]) -> Tiles:
        """Copy what stays, and exchange bucket after bucket, two at a time; gives the tiles that are written.

        group: None where nobody sends anything. into: the caller's tensors, of which autograd is told. Who fails on the
        way has written a part of them.
        """
        bound, made, keep = self._bind()
        self.bound = None  # who fails on the way may leave messages behind that use its memory
        written([into[name] for name, tile in self.tiles[1].items() if tile is not None and tile.numel()])
        for buffer in [each for each in bound.buffers if not each.untyped_storage().size()]:
            buffer.untyped_storage().resize_(buffer.numel())
        _copy([bound.copies], 0)
        under_way: list[Any] = []
        for number, (sends, receives) in enumerate(bound.sides if group is not None else ()):
            works = torch_private.pass_all(group, sends.posts, receives.posts, partial(_copy, sends.copies))
            self._unpack(bound, number - 1, under_way)
            under_way = works
        self._unpack(bound, len(bound.sides) - 1, under_way)
        for buffer in bound.buffers if self.device.type != "cpu" else ():
            buffer.untyped_storage().resize_(0)
        self.bound = bound if keep else None
        return made

    def _unpack(self, bound: Bound, number: int, works: list[Any]) -> None:
        """Wait for a bucket, and copy what has arrived to where it belongs."""
        for work in works:
            work.wait()
        copies = bound.sides[number][1].copies if works else ()
        for each in range(len(copies)):
            _copy(copies, each)
        self.arrived = number

    # in words

    @property
    def contents(self) -> str:
        """How many tensors in how many buckets, and the largest of them with its specs, for a trace."""
        largest = sorted(self.move.tensors, key=lambda one: math.prod(one.shape) * one.itemsize)[-1:]
        lies = [f", the largest {shortened(one.target_name)} ({one.source} -> {one.target})" for one in largest]
        return f"{self.count} in {counted(len(self.messages), 'bucket')}{''.join(lies)}"

    @property
    def moved(self) -> list[int]:
        """The bytes that this rank sends and receives, of all buckets."""
        return [sum(_size(slices) for sides in self.messages for _, slices in sides[side]) for side in (0, 1)]

    @property
    def state(self) -> str:
        """Which tensors that this rank gets are whole, and which aren't."""
        buckets, tensors = enumerate(self.move.buckets), self.move.tensors
        last = {tensors[tensor].target_name: number for number, pieces in buckets for tensor, _ in pieces}
        own = [name for name, shape in self.shapes[1].items() if shape is not None]
        whole, rest = (
            [name for name in own if (last.get(name, -1) <= self.arrived) is right] for right in (True, False)
        )
        text = f"whole on {self.who}: {_listed(whole)}; not whole: {_listed(rest)}"
        return text if own else f"{self.who} gets no tensors"


def _is_same(before: tuple[Any, Any], given: tuple[Any, Any]) -> bool:
    """Whether the same tensor is given again, in the same memory, which is still there, and is read as it lies.

    FSDP gives memory back by `resize_(0)`, and keeps the storage.
    """
    (spec, x), (wanted, y) = before, given
    if spec is not wanted or not is_dense(y) or not isinstance(x, torch.Tensor):
        return spec is wanted and x is y
    alike = x.dtype == y.dtype and x.device == y.device and not (y.is_conj() or y.is_neg())
    return alike and x.is_set_to(y) and (y.data_ptr() != 0 or not y.numel())


def _check_apart(read: Tiles, targets: Tiles) -> None:
    """`ShardingError` where somebody else has the memory of what is written."""
    every = [(name, x, side is targets) for side in (read, targets) for name, x in side.items()]
    spans = []
    for name, x, is_written in every:
        if x is None or not x.numel():
            continue
        reach = sum([stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True)]) + 1
        spans.append((x.data_ptr(), x.data_ptr() + reach * x.itemsize, is_written, name))
    ends = {False: (0, ""), True: (0, "")}
    for start, stop, is_written, name in sorted(spans):
        for other, (end, of) in ends.items():
            if start < end and (is_written or other):
                one, two = (name, of) if is_written else (of, name)
                raise ShardingError(
                    f"{shortened(one)} of into= shares memory with {shortened(two)}, or lies between its elements; "
                    "leave it out of into=, or clone one of them"
                )
        ends[is_written] = max(ends[is_written], (stop, name))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _size(slices: Sequence[Slice]) -> int:
    """Bytes of a message."""
    return sum([_aligned(each.size) for each in slices[:-1]]) + slices[-1].size


def _copy(copies: Sequence[Copies], number: int) -> None:
    """Make the copies of this number."""
    if copies[number][0]:
        torch_private.copy_all(*copies[number])


@lru_cache(maxsize=4096)
def _boxes(boxes: Sequence[Box], start: int, stop: int) -> tuple[Part, ...]:
    """The elements `start..stop` of boxes end to end, as boxes with where they begin."""
    found: list[Part] = []
    first, place = 0, 0
    for whole in boxes:
        size = elements_of(whole)
        for box in cut_box(whole, max(start - first, 0), min(stop - first, size)):
            found.append((place, box))
            place += elements_of(box)
        first += size
    return tuple(found)


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*map(shortened, names[:8]), *["..."] * (len(names) > 8)]) or "none"


# --- transfers of a job ---------------------------------------------------------------------------

_LANE = "transfer"
"""The name of the group of a transfer, and of the lane of one that has a time limit of its own."""

TransferKind = tuple[str, Sharding, Sharding, tuple[int, ...], str]
"""A tensor that moves: its name, how it lies and will lie, its shape and its dtype."""


def carry_kinds(kinds: tuple[TransferKind, ...], tensors: Mapping[str, DTensor]) -> dict[str, Any]:
    """Carry out the transfer of these tensors by name: what `axes.reshard` of many is."""
    return carry_out(_transfer_of(kinds), {name: tensors[name] for name, *_ in kinds}, None)


@lru_cache(maxsize=64)
def _transfer_of(kinds: tuple[TransferKind, ...]) -> Transfer:
    sources = {name: source for name, source, *_ in kinds}
    targets = {name: target for name, _, target, *_ in kinds}
    return transfer(sources, targets, shapes={name: Like(shape, dtype) for name, _, _, shape, dtype in kinds})


def carry_out(move: Transfer, tensors: Mapping[str, Any], into: Mapping[str, Any] | None) -> dict[str, Any]:
    """Carry a transfer out on this rank; see `Transfer.__call__`."""
    if move.home is None and move.tensors:
        raise MeshError("the meshes of this transfer have no processes; data moves on a mesh made with axes.init_mesh")
    run = run_of(move, None if move.home is None else current_world().timeout)
    if run.move.rank not in run.ranks:
        return {}
    return run(tensors, into)


@of_world(32)
def run_of(move: Transfer, limit: timedelta | None) -> JobExecution:
    """A transfer, made ready for this rank, whose ranks wait for one another for this time."""
    return JobExecution(move.at(current_world().rank), limit)


class JobExecution(Execution):
    """A transfer among ranks of one job. limit: how long they wait for one another, as `init_mesh` has said."""

    def __init__(self, move: Transfer, limit: timedelta | None):
        kind = "cpu" if move.home is None else move.home.binding.device_type
        ranks = Universe.of(move.ranks).ranks if move.ranks else ()
        super().__init__(move, ranks, torch.device(kind), f"rank {move.rank}")
        self.limit, self.said = limit, f"axes.transfer of {self.count}, {ranks_text(ranks)}"

    @cached_property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all ranks of the transfer; None where nobody sends anything.

        Where `init_mesh` has set a time limit, that is the group's: a rank that never comes is an error on the
        others then. A rank that has missed some of their attempts to connect takes part in the next one.
        """
        if self.move.home is None or len(self.ranks) < 2:
            return None
        union = Mesh("union", ranks=self.ranks)
        limited = self.limit is not None and self.device.type == "cpu"
        own = ((union.layout_of_all, GroupOptions(timeout=self.limit, lane=_LANE)),) if limited else ()
        union = union._with(binding=replace(self.move.home.binding, options=own))
        while True:
            try:
                return group_of(union, union.layout_of_all, _LANE)
            except MissedError:
                continue

    def __call__(self, tensors: Mapping[str, Any], into: Mapping[str, Any] | None) -> dict[str, Any]:
        """The tensors that this rank has of the targets, from those that it has of the sources."""
        given = {} if into is None else into
        with telling(partial(self._together, self._agree)):
            self.fit(tensors, given)
        found = {name: tile for name, tile in self._together(self._carried, given).items() if tile is not None}
        if into is None:
            return {name: self._result(name, tile) for name, tile in found.items()}
        return {**found, **{name: x for name, x in into.items() if x is not None}}

    def _carried(self, into: Mapping[str, Any]) -> Tiles:
        self._agree(None)
        return self.carry(self.group, into)

    def _together(self, run: Callable[[Any], Any], argument: Any) -> Any:
        """`run(argument)`, by which all ranks of the transfer communicate."""
        if self.group is None:
            return run(argument)
        try:
            return collective(self._operation, (), run, argument)
        except DesyncError as failed:
            if not isinstance(failed.__cause__, RuntimeError):
                raise
            # The backend has failed: if the group is of transfers alone, the next one connects anew.
            abort_group_of(self.group, _LANE)
            raise DesyncError(f"{failed}\n{self.state}") from failed.__cause__

    def _result(self, name: str, local: torch.Tensor) -> Any:
        """What arrives without `into`: a DTensor where the target's mesh can have one."""
        end = self.move.ends[1][name]
        if end.sharding.mesh.binding is None:
            return local
        try:
            check_torch_can(end.sharding, end.shape)
            return dtensor(local, end.sharding, end.shape)
        except ShardingError:  # DTensor can't say every sharding; the shard is right
            return local

    # all ranks

    def _operation(self) -> Operation:
        sent, received = self.moved
        return Operation(
            what=f"axes.transfer of {self.contents}",
            kind="exchange",
            by="send and receive",
            axis="all ranks",
            group="" if self.group is None else str(self.group.group_name),
            ranks=self.ranks,
            dtype=self.wire,
            device=self.device.type,
            bytes_in=received,
            bytes_out=sent,
            together=False,  # a rank waits for those that it exchanges with
            compared=f"{self.said} {self.move.fingerprint}",
            mesh=self.move.home,
        )

    def _agree(self, error: AxesError | None) -> None:
        """Return where all ranks have one plan, and each has tensors that fit; an error on all of them otherwise."""
        if self.group is not None:
            plan = int(self.move.fingerprint[:15], 16)
            state = torch.tensor([error is not None, plan, -plan], dtype=torch.int64, device=self.device)
            communicating = communicator(self.group, state.dtype, True)
            communicating.all_reduce(state, "max", True)
            wrong, most, least = state.tolist()
            if wrong or most != -least:
                self._disagree(error)

    def _disagree(self, error: AxesError | None) -> None:
        """Tell the other ranks of an error, and raise one of theirs, or how their plan differs."""
        mine = self.move.described.splitlines()
        told = zip(self.ranks, agree("axes.transfer", self.ranks, error or "", mine), strict=error is None)
        pairs = [(rank, *both) for rank, theirs in told for both in zip_longest(mine, theirs, fillvalue="nothing")]
        for rank, one, two in [each for each in pairs if each[1] != each[2]]:
            both = f"\n  rank {self.move.rank}: {one}\n  rank {rank}: {two}"
            raise DesyncError(f"ranks have other plans for {self.said}{both}")
