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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.chunks import Box, Tile, tile_shape
from axes.algebra.errors import ShardingError, shortened, shown, suggestion
from axes.extension import written
from axes.runtime import torch_private
from axes.runtime.packing import Lattice, Part, Shape, arranged, elements_of
from axes.runtime.programs import name_of
from axes.runtime.torch_placements import sharding_of_spec
from axes.runtime.transforms import check_dense, is_dense
from axes.transfers.layout_pieces import LayoutPiece, cut_box
from axes.transfers.memory import in_common, is_freed, is_same, is_written_twice
from axes.transfers.transfers import Transfer

DIRECT = 2**18
"""Bytes of a slice from which it has a message of its own, without a copy where its memory lies right."""

_ALIGNED = 16
"""Every slice in a buffer begins at a multiple of so many bytes."""

_NAMES_SHOWN = 8
_SPECS_SHOWN = 2

Tiles = dict[str, torch.Tensor | None]
"""This rank's tiles of one side by name; None where it has none."""


class Slice(NamedTuple):
    """A part of a message: boxes of a tensor, each with where it begins, and the bytes that they are in the message."""

    tensor: int
    boxes: tuple[Part, ...]
    start: int
    size: int


class BucketMessage(NamedTuple):
    """What goes to a rank in a bucket, or comes from it. peer: its index in the group."""

    peer: int
    slices: tuple[Slice, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.slices[-1].start + self.slices[-1].size


class MessageMemory(NamedTuple):
    """A message in its memory. staged, lying: views of it and of the tensors, copied to each other."""

    peer: int
    memory: torch.Tensor
    staged: list[torch.Tensor]
    lying: list[torch.Tensor]


class Bound(NamedTuple):
    """What a call with certain tensors copies, and sends from where. sides: of each bucket what goes, what comes."""

    copies: tuple[list[torch.Tensor], list[torch.Tensor]]
    sides: list[tuple[list[MessageMemory], list[MessageMemory]]]
    buffers: list[torch.Tensor]


class Execution:
    """A transfer on this rank. ranks: of the group that carries it out, in its order."""

    def __init__(self, move: Transfer, ranks: Sequence[int], device: torch.device):
        self.move, self.ranks, self.device = move, ranks, device
        self.last: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        """Of the tensors of the last call by side: the spec of a DTensor, the shard as it was given, and the tile."""
        self.changed, self.arrived = True, -1
        self.bound: Bound | None = None

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
    def dtypes(self) -> tuple[dict[str, torch.dtype | None], dict[str, torch.dtype]]:
        """The dtype of each source, None where it may be any; and in which each target arrives."""
        before: dict[str, torch.dtype | None] = {}
        for one in self.move.tensors:
            # Where neither is known, the plan is for float32; where dtype= is given, any dtype becomes that.
            planned = one.dtypes[0] or ("float32" if one.dtypes[1] is None else None)
            before[one.source_name] = before.get(one.source_name) or (planned and getattr(torch, planned))
        return before, {one.target_name: wire for one, wire in zip(self.move.tensors, self.wires, strict=True)}

    @cached_property
    def messages(self) -> list[tuple[list[BucketMessage], list[BucketMessage]]]:
        """What this rank sends and receives in each bucket: both ends find the same messages in the same order."""
        index = {rank: at for at, rank in enumerate(self.ranks)}
        me = index.get(self.move.rank, 0)
        found = []
        for pieces in self.move.buckets:
            by_peer: tuple[dict[int, Any], dict[int, Any]] = {}, {}
            for side, rank, number, message, start, stop in self.move.messages(pieces):
                size = (stop - start) * self.move.tensors[number].itemsize
                large, small = by_peer[side].setdefault(index[rank], ([], []))
                end = small[-1].start + small[-1].size if small and size < DIRECT else 0
                one = Slice(number, tuple(_boxes(message.boxes, start, stop)), _aligned(end), size)
                small.append(one) if size < DIRECT else large.append((one,))
            # Each rank begins with another one, so that not all send to the first at the same time.
            sends, receives = (
                [
                    BucketMessage(peer, slices)
                    for _, peer in sorted([(sign * (peer - me) % len(index), peer) for peer in peers])
                    for slices in (*peers[peer][0], tuple(peers[peer][1]))
                    if slices
                ]
                for peers, sign in zip(by_peer, (1, -1), strict=True)
            )
            found.append((sends, receives))
        return found

    # tensors

    def fit(self, tensors: Mapping[str, Any], into: Mapping[str, Any]) -> tuple[Tiles, Tiles]:
        """The tiles of the sources and those to write, once it is clear that the plan can be carried out on them."""
        held, given = self._tiles(0, tensors), self._tiles(1, into)
        if self.changed:
            for name, tile in (*held.items(), *given.items()):
                if tile is not None and is_freed(tile):
                    raise ShardingError(
                        f"{shortened(name)} has no memory: its storage has been resized to less than it takes, as FSDP "
                        "does with parameters that it has sharded again; pass the sharded parameter"
                    )
            self._check_written(held, given)
            self.changed, self.bound = False, None
        return held, {name: given[name] for name in self.move.ends[1]}

    def _tiles(self, side: int, given: Mapping[str, Any]) -> Tiles:
        """This rank's tiles of one side, those that keep their values included; None where there is no tensor."""
        if not isinstance(given, Mapping):
            what = ("a transfer takes tensors by name", "into= maps names to tensors")[side]
            raise ShardingError(f"{what}; found {shown(given)}")
        ends, last, shapes = self.move.ends[side], self.last[side], self.shapes[side]
        idle = [name for name in given if name not in ends]
        if unknown := [name for name in idle if name not in self.move.idle[side]]:
            what = ("a source", "a target")[side]
            raise ShardingError(
                f"{shortened(unknown[0])} isn't {what} of the transfer{suggestion(str(unknown[0]), ends)}"
            )
        found: Tiles = {}
        for name in (*ends, *(idle if side else ())):
            value = local = given.get(name)
            spec = None
            if isinstance(value, DTensor):
                spec, local = torch_private.spec_of(value), torch_private.local_of(value)
            shape = shapes.get(name)
            if side and value is None and name in given and shape is not None and 0 not in shape:
                raise ShardingError(
                    f"{shortened(name)} of into= is None, and rank {self.move.rank} gets a shard of shape "
                    f"{list(shape)}; pass a tensor, or leave the name out and take it from the result"
                )
            before = last.get(name)
            same = before is not None and is_same(before[1], local)
            if before is None or not same or before[0] is not spec:
                last.pop(name, None)
                new = side and value is None and shape is not None and 0 not in shape
                tile = None if new else self._tile(side, name, local, spec)
                last[name] = spec, None if local is None else local.detach(), before[2] if before and same else tile
                self.changed |= not same
            found[name] = last[name][2]
        return found

    def _tile(self, side: int, name: str, value: Any, spec: Any) -> torch.Tensor | None:
        """This rank's tile, from what was given for it; `ShardingError` for what is another one."""
        if isinstance(value, torch.Tensor) and not is_dense(value):
            check_dense(value, f"a transfer of {shortened(name)}")
        if name not in self.move.ends[side]:
            if value is not None and not isinstance(value, torch.Tensor):
                raise ShardingError(f"{shortened(name)} of into= is a tensor or None; found {shown(value)}")
            return value
        end, shape, wanted = self.move.ends[side][name], self.shapes[side][name], self.dtypes[side][name]
        if spec is not None:
            self._check_spec(name, end.sharding, spec, end.shape)
        if shape is None:
            if value is None or (isinstance(value, torch.Tensor) and not value.numel()):
                return None
            raise ShardingError(
                f"rank {self.move.rank} has nothing of {shortened(name)} ('{end.sharding}'); found {_shown(value)}"
            )
        if value is None and not math.prod(shape):
            return torch.empty(shape, dtype=wanted or torch.float32, device=self.device)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
            raise ShardingError(
                f"{shortened(name)} is on rank {self.move.rank} a shard of shape {list(shape)} "
                f"('{end.sharding}' of {list(end.shape)}); found {_shown(value)}"
            )
        if value.device.type != self.device.type:
            raise ShardingError(f"{shortened(name)} is a shard on {self.device.type}; found it on {value.device}")
        if wanted is not None and value.dtype != wanted:
            found, hint = name_of(value.dtype), f"Pass dtype={value.dtype} to axes.transfer"
            if side:
                raise ShardingError(f"{shortened(name)} of into= is {found}; what arrives is {name_of(wanted)}. {hint}")
            raise ShardingError(
                f"{shortened(name)} is {found}, the plan is for {name_of(wanted)}; pass dtype= to axes.transfer, or "
                "shapes= with tensors of this dtype"
            )
        return value.detach() if side else value.detach().resolve_conj().resolve_neg()

    def _check_spec(self, name: str, end: Any, spec: Any, shape: Shape) -> None:
        found = sharding_of_spec(spec)
        if tuple(spec.shape) != shape:
            raise ShardingError(f"{shortened(name)} has shape {list(spec.shape)}; the plan is for {list(shape)}")
        if found.pending or any(
            found.tile(shape, rank) != end.tile(shape, rank) for rank in (self.move.rank, *end.universe.ranks[:1])
        ):
            raise ShardingError(f"{shortened(name)} isn't sharded as the plan says\n  plan    {end}\n  tensor  {found}")

    def _check_written(self, held: Tiles, given: Tiles) -> None:
        """What is written can be, once, and is nothing that is read, that keeps its values, or is written, too."""
        targets = [name for name in given if name in self.move.ends[1]]
        for name, tile in [(name, tile) for name in targets if (tile := given[name]) is not None]:
            if tile.is_conj() or tile.is_neg():
                why = "a view that conjugates or negates; pass the tensor that it is of"
            elif tile.is_inference() and not torch.is_inference_mode_enabled():
                why = "an inference tensor; call the transfer in torch.inference_mode()"
            elif is_written_twice(tile):
                why = ""
            else:
                continue
            raise ShardingError(
                f"{shortened(name)} of into= "
                + (f"is {why}" if why else "has several elements in one place, as an expanded tensor has; clone it")
            )
        what = [(name, "the source, which is read while it is written", tile) for name, tile in held.items()]
        kept = given.keys() - self.move.ends[1].keys()
        what += [(name, "of into=, which keeps its values", given[name]) for name in sorted(kept)]
        first = len(what)
        what += [(name, "of into=, where that is written", given[name]) for name in targets]
        for one, two in in_common([torch.empty(0) if tile is None else tile for *_, tile in what]):
            if two >= first:
                raise ShardingError(
                    f"{shortened(what[two][0])} of into= shares memory with {shortened(what[one][0])}, {what[one][1]}; "
                    "leave it out of into=, or clone one of them"
                )

    # memory

    def bind(self, held: Tiles, given: Tiles) -> tuple[Bound, Tiles]:
        """What a call copies and sends, and the tiles that it writes, new ones where none are given.

        It is kept for the next call where the caller gives all that is written.
        """
        made = {name: self._new(name) if tile is None else tile for name, tile in given.items()}
        keep = all(tile is given[name] or not tile.numel() for name, tile in made.items() if tile is not None)
        if keep and self.bound is not None:
            return self.bound, made
        turns = min(2, len(self.messages))
        most = [max((_size(sides[side]) for sides in self.messages), default=0) for side in (0, 1)]
        buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in most for _ in range(turns)]
        found = []
        for number, (sends, receives) in enumerate(self.messages):
            out, into = buffers[number % turns], buffers[turns + number % turns]
            found.append((self._memory(0, sends, out, held), self._memory(1, receives, into, made)))
        bound = Bound(self._copies(held, made), found, buffers)
        self.bound = bound if keep else None
        return bound, made

    def _new(self, name: str) -> torch.Tensor | None:
        shape = self.shapes[1][name]
        return None if shape is None else torch.empty(shape, dtype=self.dtypes[1][name], device=self.device)

    def _of(self, number: int, side: int) -> tuple[str, LayoutPiece | None, Tile]:
        """The name of a tensor on one side, which piece of it moves, and the elements that this rank has of it."""
        one = self.move.tensors[number]
        name = (one.source_name, one.target_name)[side]
        tile = self.move.tiles[side][name]
        assert tile is not None, "what is exchanged is of a tile that the rank has"
        return name, one.part, tile

    def _copies(self, held: Tiles, made: Tiles) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What this rank keeps: `(to, from)`."""
        to: list[torch.Tensor] = []
        origin: list[torch.Tensor] = []
        for number in range(len(self.move.tensors)):
            exchange = self.move.exchange(number)
            for boxes in () if exchange is None else exchange.copies:
                for found, side, tiles in ((origin, 0, held), (to, 1, made)):
                    name, piece, tile = self._of(number, side)
                    if (x := tiles[name]) is not None:
                        found.append(_box(x, piece, side, tile, boxes[side]))
        return to, origin

    def _memory(
        self, side: int, messages: Sequence[BucketMessage], buffer: torch.Tensor, tiles: Tiles
    ) -> list[MessageMemory]:
        """Messages of one side of a bucket in their memory."""
        found: list[MessageMemory] = []
        packed: dict[tuple[Slice, ...], torch.Tensor] = {}
        end = 0
        for peer, slices in messages:
            if slices in packed:  # what is sent to a replica is packed by now
                found.append(MessageMemory(peer, packed[slices], [], []))
                continue
            size = slices[-1].start + slices[-1].size
            memory, end = buffer[end : end + size], end + _aligned(size)
            staged: list[torch.Tensor] = []
            lying: list[torch.Tensor] = []
            for number, boxes, start, count in slices:
                flat = memory[start : start + count].view(self.wires[number])
                for each in (number, *(self.move.tied.get(number, ()) if side else ())):
                    name, piece, held = self._of(each, side)
                    tile = tiles[name]
                    assert tile is not None, "what is exchanged is of a tile that the rank has"
                    views = list(_views(tile, piece, side, held, boxes))
                    first = views[0][1]
                    alone = each == number and len(views) == 1 and count >= DIRECT and tile.dtype == flat.dtype
                    if alone and first.is_contiguous():
                        flat = first.view(-1)
                        memory = flat.view(torch.uint8)
                        continue
                    staged += [flat[at : at + view.numel()].view(view.shape) for at, view in views]
                    lying += [view for _, view in views]
            packed[slices] = memory
            found.append(MessageMemory(peer, memory, staged, lying))
        return found

    # what is sent

    def run(self, bound: Bound, group: Any) -> None:
        """Copy what stays, and exchange bucket after bucket, two at a time. group: None where nobody sends anything."""
        self.arrived = -1
        for buffer in bound.buffers:
            if not buffer.untyped_storage().size():
                buffer.untyped_storage().resize_(buffer.numel())
        _copy(*bound.copies)
        under_way: list[Any] = []
        for number, (sends, receives) in enumerate(bound.sides if group is not None else ()):
            out, into = ([(each.peer, each.memory) for each in side] for side in (sends, receives))
            works = torch_private.pass_all(group, out, into, functools.partial(_pack, sends))
            self._unpack(bound, number - 1, under_way)
            under_way = works
        self._unpack(bound, len(bound.sides) - 1, under_way)
        for buffer in bound.buffers if self.device.type != "cpu" else ():
            buffer.untyped_storage().resize_(0)

    def _unpack(self, bound: Bound, number: int, works: list[Any]) -> None:
        """Wait for a bucket, and copy what has arrived to where it belongs."""
        for work in works:
            work.wait()
        for message in bound.sides[number][1] if works else ():
            _copy(message.lying, message.staged)
        self.arrived = number

    def count_writes(self, into: Mapping[str, Any], given: Tiles) -> None:
        """Tell autograd what is about to be written. Who fails on the way has written a part of it."""
        written([into[name] for name, tile in given.items() if tile is not None and tile.numel() and name in into])

    # in words

    @property
    def contents(self) -> str:
        """How many tensors in how many buckets, and the largest of them with their specs, for a trace."""
        found = sorted(self.move.tensors, key=lambda one: -math.prod(one.shape) * one.itemsize)
        specs = [f"{shortened(one.target_name)} ({one.source} -> {one.target})" for one in found[:_SPECS_SHOWN]]
        more = [f"{len(found) - _SPECS_SHOWN} more"] if len(found) > _SPECS_SHOWN else []
        return f"{self.count} in {counted(len(self.messages), 'bucket')}, {', '.join(specs + more)}"

    @property
    def count(self) -> str:
        """How many tensors arrive."""
        return counted(len(self.move.ends[1]), "tensor")

    @property
    def wire(self) -> str:
        """The dtype in which tensors travel."""
        return "many" if len({*self.wires}) != 1 else name_of(self.wires[0])

    @property
    def moved(self) -> list[int]:
        """The bytes that this rank sends and receives, of all buckets."""
        return [sum(message.size for sides in self.messages for message in sides[side]) for side in (0, 1)]

    def state(self, who: str) -> str:
        """Which tensors that this rank gets are whole, and which aren't."""
        last = {one.target_name: -1 for one in self.move.tensors}
        for number, pieces in enumerate(self.move.buckets):
            every = [each for piece in pieces for each in (piece.tensor, *self.move.tied.get(piece.tensor, ()))]
            last.update({self.move.tensors[each].target_name: number for each in every})
        own = [name for name, shape in self.shapes[1].items() if shape is not None]
        whole, rest = ([name for name in own if (last[name] <= self.arrived) is right] for right in (True, False))
        return f"whole on {who}: {_listed(whole)}; not whole: {_listed(rest)}" if own else f"{who} gets no tensors"


def counted(count: int, what: str) -> str:
    """How many there are.

    >>> counted(1, "bucket"), counted(2, "bucket")
    ('1 bucket', '2 buckets')
    """
    return f"{count} {what}{'s' if count != 1 else ''}"


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _size(messages: Iterable[BucketMessage]) -> int:
    """Bytes of a buffer that has each message once."""
    return sum([_aligned(size) for size in {message.slices: message.size for message in messages}.values()])


def _pack(messages: Sequence[MessageMemory], number: int) -> None:
    """Fill the message of a number."""
    _copy(messages[number].staged, messages[number].lying)


def _copy(to: list[torch.Tensor], origin: list[torch.Tensor]) -> None:
    """Copy each view of `origin` to that of `to`, which may have another dtype."""
    if to:
        torch_private.copy_all(to, origin)


def _boxes(boxes: Iterable[Box], start: int, stop: int) -> Iterator[Part]:
    """The elements `start..stop` of boxes end to end, as boxes with where they begin."""
    at = 0
    for whole in boxes:
        size = elements_of(whole)
        low, high = max(start - at, 0), min(stop - at, size)
        place = at + low - start
        for box in cut_box(whole, low, high) if low < high else ():
            yield place, box
            place += elements_of(box)
        at += size


def _views(
    x: torch.Tensor, piece: LayoutPiece | None, side: int, tile: Tile, boxes: Sequence[Part]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Boxes of a tensor, or of a piece of it, as views of this rank's tile `x`, with where each begins in its message.

    It is one view where the boxes of a tensor are at regular distances.
    """
    strides = x.stride() if piece is None else piece.strides(side, x.stride())
    found = arranged(boxes) if piece is None else [(start, Lattice(box, ())) for start, box in boxes]
    for start, lattice in found:
        grid = lattice.by(strides, (1,) * len(strides))
        offset = grid.offset if piece is None else _offset(x, piece, side, tile, lattice.first)
        yield start, x.as_strided(grid.sizes, grid.strides, x.storage_offset() + offset)


def _box(x: torch.Tensor, piece: LayoutPiece | None, side: int, tile: Tile, box: Box) -> torch.Tensor:
    """A box of a tensor, or of a piece of it, as a view of this rank's tile `x`."""
    sizes = [stop - start for start, stop in box]
    if piece is None:
        return x[tuple([slice(*bounds) for bounds in box])]
    offset = x.storage_offset() + _offset(x, piece, side, tile, box)
    return x.as_strided(sizes, piece.strides(side, x.stride()), offset)


def _offset(x: torch.Tensor, piece: LayoutPiece, side: int, tile: Tile, box: Box) -> int:
    index = piece.place(side, tile, [start for start, _ in box])
    return sum([at * stride for at, stride in zip(index, x.stride(), strict=True)])


def _shown(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(map(shortened, names[:_NAMES_SHOWN])) + more
