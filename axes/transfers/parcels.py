"""Messages between the ranks of a transfer, and what is packed in them.

What goes to a rank in a bucket is a few parcels, one message each. A large piece of a tensor is a parcel of its own,
which is sent from where it lies, without a copy, if its memory is in order. All else for the rank lies end to end in
one more.

    bucket's buffer   | small pieces for 1 and 2   | a piece for 1 | ...
    messages             to rank 1, to rank 2         to rank 1

Replicas are sent the same: where two parcels have the same contents, they are one stretch of the buffer, which is
packed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from axes.algebra.chunks import Box
from axes.algebra.planning.exchange import Message
from axes.runtime.packing import Part, elements_of
from axes.transfers.buckets import Carriage, part_of
from axes.transfers.layout_pieces import cut_box
from axes.transfers.transfers import Transfer

DIRECT = 2**18
"""Bytes of a piece from which it has a message of its own, without a copy where its memory lies right."""

_ALIGNED = 16
"""Every piece in a buffer begins at a multiple of so many bytes."""


@dataclass(frozen=True)
class PackedPiece:
    """A piece of a message: the tensor, the boxes of this rank's tile, and where it lies in what is packed.

    start, size: bytes. boxes: with where each begins in the piece, in elements.
    """

    tensor: int
    boxes: tuple[Part, ...]
    count: int
    start: int
    size: int


@dataclass(frozen=True)
class Parcel:
    """What goes to a rank in a bucket, or comes from it, as one message. peer: its index in the group.

    start, size: the bytes of the message in the bucket's buffer; parcels that begin in one place are the same message.
    """

    peer: int
    places: tuple[PackedPiece, ...]
    start: int
    size: int


@dataclass(frozen=True)
class BucketSide:
    """What a rank sends in a bucket, or receives. size: bytes of the buffer."""

    parcels: tuple[Parcel, ...]
    size: int


Pieces = tuple[int, Message, int, int]
"""A message about a tensor, with which of how many pieces of it goes."""


def parcels_of(move: Transfer, ranks: Sequence[int]) -> list[tuple[BucketSide, BucketSide]]:
    """What a rank sends and receives in each bucket of a transfer. ranks: those of the group, in its order."""
    index = {rank: at for at, rank in enumerate(ranks)}
    me, size = index.get(move.rank, 0), len(index)
    found = []
    for pieces in move.buckets:
        sends: dict[int, list[Pieces]] = {}
        receives: dict[int, list[Pieces]] = {}
        for piece in pieces:
            exchange = move.exchange(piece.tensor)
            if exchange is None:
                continue
            count = move.tensors[piece.tensor].pieces
            for side, messages in ((sends, exchange.sends), (receives, exchange.receives)):
                for message in messages:
                    peer = index[exchange.ranks[message.peer]]
                    side.setdefault(peer, []).append((piece.tensor, message, piece.piece, count))
        # Each rank begins with another one, so that not all send to the first at the same time.
        to = {peer: sends[peer] for peer in sorted(sends, key=lambda peer: (peer - me) % size)}
        origin = {peer: receives[peer] for peer in sorted(receives, key=lambda peer: (me - peer) % size)}
        found.append((_side(to, move.tensors), _side(origin, move.tensors)))
    return found


def _side(peers: Mapping[int, Sequence[Pieces]], tensors: Sequence[Carriage]) -> BucketSide:
    """One side of a bucket: the parcels of each peer, each in its place of the buffer.

    No two parcels that arrive have the same contents, as each element arrives once.
    """
    parcels: list[Parcel] = []
    starts: dict[Any, int] = {}
    end = 0
    for peer, messages in peers.items():
        for parcel in _parcels(peer, messages, tensors):
            if parcel.places not in starts:
                starts[parcel.places] = end
                end += -(-parcel.size // _ALIGNED) * _ALIGNED
            parcels.append(replace(parcel, start=starts[parcel.places]))
    return BucketSide(tuple(parcels), end)


def _parcels(peer: int, messages: Iterable[Pieces], tensors: Sequence[Carriage]) -> Iterator[Parcel]:
    """What goes to a peer, or comes from it: both ends find the same parcels in the same order."""
    small: list[PackedPiece] = []
    for tensor, message, piece, pieces in messages:
        start, stop = part_of(message.elements, piece, pieces)
        if start == stop:
            continue
        one = tensors[tensor]
        boxes = tuple(_boxes(message.boxes, start, stop))
        place = PackedPiece(tensor, boxes, stop - start, 0, (stop - start) * one.itemsize)
        if place.size >= DIRECT:
            yield Parcel(peer, (place,), 0, place.size)
        else:
            small.append(replace(place, start=-(-_end(small) // _ALIGNED) * _ALIGNED))
    if small:
        yield Parcel(peer, tuple(small), 0, _end(small))


def _end(places: Sequence[PackedPiece]) -> int:
    """Where what is packed ends."""
    return places[-1].start + places[-1].size if places else 0


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
