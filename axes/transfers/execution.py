"""Transfers carried out: this rank's part of an `axes.transfer`, with its own tensors.

A bucket is one exchange with the ranks that this one shares elements with. What goes to a rank is a few messages: a
large slice of a tensor is one by itself, which is sent from where it lies if its memory is in order, and arrives where
it belongs; all else for the rank lies end to end in one more, in the bucket's buffer. Replicas are sent one memory,
which is packed once. While one bucket travels the next is packed; so buffers of two buckets are all the memory that
there is beside the tensors.

    posted:   | receive 0, pack 0, send 0 | receive 1, pack 1, send 1 |             | receive 2 ...
    waited:                                                          | 0, unpack 0 |

Which memory is copied to which is found once for the tensors of a call, and kept for the next call with the same ones:
a training loop's parameters stay where they are. Between two calls the buffers have no memory on an accelerator, whose
allocator gives it back at once; on a CPU they keep it, as new memory takes longer than what is done with it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.chunks import Box, tile_shape
from axes.algebra.errors import ShardingError, shortened, shown, suggestion
from axes.algebra.plan import dtype_name
from axes.extension import dense, local, written
from axes.runtime import torch_private
from axes.runtime.operation import is_dense
from axes.runtime.packing import Grid, Part, Shape, arranged, elements_of
from axes.runtime.sharded import sharding_of
from axes.transfers.layout_pieces import cut_box
from axes.transfers.transfers import Slice, Transfer, TransferEnd, counted

DIRECT = 2**18
"""Bytes of a slice from which it has a message of its own, without a copy where its memory lies right."""

_ALIGNED = 16
"""Every slice in a buffer begins at a multiple of so many bytes."""

_NAMES_SHOWN = 8

Tiles = dict[str, torch.Tensor | None]
"""This rank's tiles of one side by name; None where it has none."""

Given = dict[str, tuple[Any, Any]]
"""Of the tensors of one side, as a caller gives them: the spec of a DTensor, and this rank's shard."""


OwnMessage = tuple[int, tuple[Slice, ...]]
"""What goes to a rank in a bucket, or comes from it: its index in the group, and the slices, end to end."""


class MessageMemory(NamedTuple):
    """Messages of one side of a bucket in their memory.

    posts: the peer and the memory of each. copies: of each, views of it and of the tensors, copied to each other.
    """

    posts: list[tuple[int, torch.Tensor]]
    copies: list[tuple[list[torch.Tensor], list[torch.Tensor]]]


class Bound(NamedTuple):
    """What a call with certain tensors copies, and sends from where. sides: of each bucket what goes, what comes."""

    copies: tuple[list[torch.Tensor], list[torch.Tensor]]
    sides: list[tuple[MessageMemory, MessageMemory]]
    buffers: list[torch.Tensor]


class Execution:
    """A transfer on this rank. ranks: of the group that carries it out, in its order. who: this rank in words."""

    def __init__(self, move: Transfer, ranks: Sequence[int], device: torch.device, who: str):
        self.move, self.ranks, self.device, self.who = move, ranks, device, who
        self.last: list[Given] = []
        """The tensors of the last call by side."""
        self.tiles: tuple[Tiles, Tiles] = {}, {}
        """Those that are read, and those that are written, None where a new one is made."""
        self.bound: Bound | None = None
        self.arrived = -1

    @cached_property
    def shapes(self) -> list[dict[str, Shape | None]]:
        """The shapes of this rank's tiles of each tensor, before and after."""
        return [
            {name: None if tile is None else tile_shape(tile) for name, tile in side.items()}
            for side in self.move.tiles
        ]

    @cached_property
    def wires(self) -> list[torch.dtype]:
        """The dtype in which each tensor travels and arrives."""
        return [getattr(torch, one.dtypes[1] or "float32") for one in self.move.tensors]

    @cached_property
    def messages(self) -> list[list[list[OwnMessage]]]:
        """What this rank sends and receives in each bucket: both ends find the same messages in the same order."""
        index = {rank: at for at, rank in enumerate(self.ranks)}
        me = index.get(self.move.rank, 0)
        found = []
        for step in self.move.steps:
            sides: list[list[OwnMessage]] = [[], []]
            for side, sign, by_rank in zip(sides, (1, -1), (step.sends, step.receives), strict=True):
                # Each rank begins with another one, so that not all send to the first at the same time.
                peers = sorted([(sign * (index[rank] - me) % len(index), rank) for rank in by_rank])
                for peer, slices in [(index[rank], by_rank[rank]) for _, rank in peers]:
                    together = tuple([each for each in slices if each.size < DIRECT])
                    alone = [(each,) for each in slices if each.size >= DIRECT]
                    side += [(peer, each) for each in (together, *alone) if each]
            found.append(sides)
        return found

    # tensors

    def fit(self, tensors: Mapping[str, Any], into: Mapping[str, Any]) -> None:
        """Take these tensors for the next call, once it is clear that the plan can be carried out on them."""
        self.arrived = -1
        sources, targets = given = [self._given(0, tensors), self._given(1, into)]
        if self.last and all(map(_are_same, self.last, given)):
            return
        before, after = self.move.ends
        held = {name: self._tile(0, name, tensors.get(name)) for name in before}
        made: Tiles = {name: self._tile(1, name, into[name]) if name in into else None for name in after}
        kept: Tiles = {
            name: dense(f"a transfer into {shortened(name)}", x)
            for name, (_, x) in targets.items()
            if name not in after and x is not None
        }
        self._check_memory({**held, **kept}, made)
        self.tiles, self.bound = (held, made), None
        shards = [
            {name: (spec, x.detach() if isinstance(x, torch.Tensor) else x) for name, (spec, x) in side.items()}
            for side in given
        ]
        # What is conjugated or negated is read from a copy of now.
        copied = any(x.is_conj() or x.is_neg() for _, x in sources.values() if isinstance(x, torch.Tensor))
        self.last = [] if copied else shards

    def _given(self, side: int, given: Mapping[str, Any]) -> Given:
        """The tensors of one side by name, those included that keep their values."""
        if not isinstance(given, Mapping):
            what = ("a transfer takes tensors by name", "into= maps names to tensors")[side]
            raise ShardingError(f"{what}; found {shown(given)}")
        ends, idle, found = self.move.ends[side], self.move.idle[side], Given()
        for name, value in given.items():
            if name not in ends and name not in idle:
                what = ("a source", "a target")[side]
                raise ShardingError(f"{shortened(name)} isn't {what} of the transfer{suggestion(str(name), ends)}")
            is_global = isinstance(value, DTensor)
            found[name] = (torch_private.spec_of(value), torch_private.local_of(value)) if is_global else (None, value)
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
            raise ShardingError(
                f"{shortened(name)} is on {self.who} {part} ('{end.sharding}' of {list(end.shape)}); "
                f"found {_shown(value)}"
            )
        if value.device.type != self.device.type:
            raise ShardingError(f"{shortened(name)} is a shard on {self.device.type}; found it on {value.device}")
        if (dtype := dtype_name(value.dtype)) != (end.dtype or dtype):
            both = f"of into= is {dtype}; what arrives is" if side else f"is {dtype}, the plan is for"
            raise ShardingError(
                f"{shortened(name)} {both} {end.dtype}; pass dtype= to axes.transfer, or tensors of this dtype"
            )
        if not value.untyped_storage().nbytes():
            raise ShardingError(
                f"{shortened(name)} has no memory: its storage has been resized to nothing, as FSDP does with "
                "parameters that it has sharded again; pass the sharded parameter"
            )
        return value if side else value.resolve_conj().resolve_neg()

    def _check_sharding(self, name: str, end: TransferEnd, x: DTensor) -> None:
        found, shape, planned = sharding_of(x), tuple(x.shape), end.sharding
        ranks = self.move.rank, planned.universe.ranks[0]
        same = shape == end.shape and all(found.tile(shape, rank) == planned.tile(shape, rank) for rank in ranks)
        if found.pending or not same:
            raise ShardingError(
                f"{shortened(name)} isn't sharded as the plan says\n  plan    {planned} of {list(end.shape)}\n"
                f"  tensor  {found} of {list(shape)}"
            )

    def _check_memory(self, read: Tiles, targets: Tiles) -> None:
        """What is written can be, and nobody else has its memory."""
        spans = []
        every = [(name, x, side is targets) for side in (read, targets) for name, x in side.items()]
        for name, x, is_written in every:
            if x is None or not x.numel():
                continue
            steps = list(zip(x.stride(), x.shape, strict=True))
            reach = sum([stride * (size - 1) for stride, size in steps]) + 1
            spans.append((x.data_ptr(), x.data_ptr() + reach * x.itemsize, is_written, name))
            why = ""
            if x.is_conj() or x.is_neg():
                why = "is a view that conjugates or negates; pass the tensor that it is of"
            elif x.is_inference() and not torch.is_inference_mode_enabled():
                why = "is an inference tensor; call the transfer in torch.inference_mode()"
            elif any(size > 1 and stride == 0 for stride, size in steps):
                why = "has several elements in one place, as an expanded tensor has; clone it"
            if is_written and why:
                raise ShardingError(f"{shortened(name)} of into= {why}")
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

    # memory

    def _bind(self) -> tuple[Bound, Tiles]:
        """What a call copies and sends, and the tiles that it writes, new ones where none are given.

        It is kept for the next call where the caller gives all that is written.
        """
        held, given = self.tiles
        made = {name: self._new(name) if tile is None else tile for name, tile in given.items()}
        keep = all(tile is given[name] or not tile.numel() for name, tile in made.items() if tile is not None)
        if keep and self.bound is not None:
            return self.bound, made
        turns, every = min(2, len(self.messages)), []
        for sides in self.messages:
            unlike = [{slices for _, slices in messages} for messages in sides]
            every.append([sum([_aligned(_size(slices)) for slices in side]) for side in unlike])
        most = map(max, zip(*every, strict=True))
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
        bound = Bound((to, origin), found, buffers)
        self.bound = bound if keep else None
        return bound, made

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
            found.copies.append((staged, lying))
        return found

    def _views(self, side: int, number: int, boxes: Sequence[Part], tiles: Tiles) -> list[tuple[int, torch.Tensor]]:
        """Boxes of a tensor as views of this rank's tile, with where each begins in its message."""
        one = self.move.tensors[number]
        name = (one.source_name, one.target_name)[side]
        x, tile, part = tiles[name], self.move.tiles[side][name], one.part
        assert x is not None, "a tensor is exchanged of which the rank has a part"
        assert tile is not None, "a tensor is exchanged of which the rank has a part"
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

    def carry(self, group: Any, into: Mapping[str, Any]) -> Tiles:
        """Copy what stays, and exchange bucket after bucket, two at a time; gives the tiles that are written.

        group: None where nobody sends anything. into: the caller's tensors, of which autograd is told. Who fails on the
        way has written a part of them.
        """
        bound, made = self._bind()
        kept, self.bound = self.bound, None  # who fails on the way may leave messages behind that use its memory
        written([into[name] for name, tile in self.tiles[1].items() if tile is not None and tile.numel()])
        for buffer in bound.buffers:
            if not buffer.untyped_storage().size():
                buffer.untyped_storage().resize_(buffer.numel())
        _copy(*bound.copies)
        under_way: list[Any] = []
        for number, (sends, receives) in enumerate(bound.sides if group is not None else ()):
            works = torch_private.pass_all(group, sends.posts, receives.posts, functools.partial(_pack, sends))
            self._unpack(bound, number - 1, under_way)
            under_way = works
        self._unpack(bound, len(bound.sides) - 1, under_way)
        for buffer in bound.buffers if self.device.type != "cpu" else ():
            buffer.untyped_storage().resize_(0)
        self.bound = kept
        return made

    def _unpack(self, bound: Bound, number: int, works: list[Any]) -> None:
        """Wait for a bucket, and copy what has arrived to where it belongs."""
        for work in works:
            work.wait()
        for staged, lying in bound.sides[number][1].copies if works else ():
            _copy(lying, staged)
        self.arrived = number

    # in words

    @property
    def contents(self) -> str:
        """How many tensors in how many buckets, and the largest of them with its specs, for a trace."""
        largest = sorted(self.move.tensors, key=lambda one: math.prod(one.shape) * one.itemsize)[-1:]
        lies = [f", the largest {shortened(one.target_name)} ({one.source} -> {one.target})" for one in largest]
        return f"{self.count} in {counted(len(self.messages), 'bucket')}{''.join(lies)}"

    @property
    def count(self) -> str:
        """How many tensors arrive."""
        return counted(len(self.move.ends[1]), "tensor")

    @property
    def wire(self) -> str:
        """The dtype in which tensors travel."""
        return "many" if len({*self.wires}) != 1 else dtype_name(self.wires[0])

    @property
    def moved(self) -> list[int]:
        """The bytes that this rank sends and receives, of all buckets."""
        return [sum(_size(slices) for sides in self.messages for _, slices in sides[side]) for side in (0, 1)]

    @property
    def state(self) -> str:
        """Which tensors that this rank gets are whole, and which aren't."""
        last = {one.target_name: -1 for one in self.move.tensors}
        for number, pieces in enumerate(self.move.buckets):
            last.update({self.move.tensors[piece.tensor].target_name: number for piece in pieces})
        own = [name for name, shape in self.shapes[1].items() if shape is not None]
        whole, rest = ([name for name in own if (last[name] <= self.arrived) is right] for right in (True, False))
        if not own:
            return f"{self.who} gets no tensors"
        return f"whole on {self.who}: {_listed(whole)}; not whole: {_listed(rest)}"


def _are_same(before: Given, given: Given) -> bool:
    """Whether the same tensors are given again, in the same memory, which is still there.

    FSDP gives memory back by `resize_(0)`, and keeps the storage.
    """
    same = before.keys() == given.keys()
    return same and all(spec is before[n][0] and _is_same(before[n][1], x) for n, (spec, x) in given.items())


def _is_same(x: Any, y: Any) -> bool:
    if not is_dense(y) or not isinstance(x, torch.Tensor):
        return x is y
    alike = x.dtype == y.dtype and x.device == y.device
    return alike and x.is_set_to(y) and (y.data_ptr() != 0 or not y.numel())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _size(slices: Sequence[Slice]) -> int:
    """Bytes of a message."""
    return sum([_aligned(each.size) for each in slices[:-1]]) + slices[-1].size


def _pack(messages: MessageMemory, number: int) -> None:
    """Fill the message of a number."""
    _copy(*messages.copies[number])


def _copy(to: list[torch.Tensor], origin: list[torch.Tensor]) -> None:
    """Copy each view of `origin` to that of `to`, which may have another dtype."""
    if to:
        torch_private.copy_all(to, origin)


@functools.lru_cache(maxsize=4096)
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


def _shown(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*map(shortened, names[:_NAMES_SHOWN]), *["..."] * (len(names) > _NAMES_SHOWN)]) or "none"
