"""Tensors of a transfer as views: boxes of what is carried, in this rank's tiles of the users' tensors.

What is carried may be all of a tensor, or a part of one that layout rules say. A box is a view of the
tile in both cases, and packing is a copy from views to a buffer:

    views = TileViews(move)
    for start, view in views.lying(number, boxes, 0, tile):      # of the source (0), at `start` of the message
        ...

Views are found once for the tensors of a call, and kept for as long as `identity_of` says that they are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from axes.algebra.chunks import Box, Tile
from axes.runtime import torch_private
from axes.runtime.packing import Part, arranged, laid, slices_of
from axes.transfers.piece_links import PieceLink
from axes.transfers.transfers import Transfer

Views: TypeAlias = list[torch.Tensor]


class LinkedTile:
    """A piece of a tensor in this rank's tile of it. side: whether that is the source (0) or the target (1)."""

    def __init__(self, link: PieceLink, side: int, tile: Tile):
        self.link, self.side, self.tile = link, side, tile

    def box(self, x: torch.Tensor, box: Box) -> torch.Tensor:
        """A box of the piece, which is in one run of each dim of the tensor, as a view of the tile."""
        steps = self.link.strides(self.side, x.stride())
        return x.as_strided([stop - start for start, stop in box], steps, self._offset(x, [start for start, _ in box]))

    def views(self, x: torch.Tensor, boxes: Sequence[Part]) -> Iterator[tuple[int, torch.Tensor]]:
        """Boxes as views of the tile, with where each begins: one view where they are a lattice in one run."""
        found = arranged(boxes)
        if len(found) == 1:
            lattice = found[0][1]
            low, high = (self.link.place(self.side, self.tile, corner) for corner in lattice.corners)
            if low is not None and high is not None and low[1] == high[1]:
                sizes, strides, _ = lattice.by(self.link.strides(self.side, x.stride()), (1,) * len(self.link.dims))
                if min(strides) >= 0:  # torch has no others
                    yield 0, x.as_strided(sizes, strides, self._offset(x, [start for start, _ in lattice.first]))
                    return
        for start, box in boxes:
            yield start, self.box(x, box)

    def _offset(self, x: torch.Tensor, at: Sequence[int]) -> int:
        place = self.link.place(self.side, self.tile, at)
        assert place is not None, "what is carried is in the tile"
        return x.storage_offset() + sum(map(operator.mul, place[0], x.stride()))


class TileViews:
    """Boxes of what a transfer carries, as views of this rank's tiles. side: of the source (0), or the target (1)."""

    def __init__(self, move: Transfer):
        self.move = move

    def box(self, number: int, side: int, tile: torch.Tensor, box: Box) -> torch.Tensor:
        """A box of what is carried, in this rank's tile of a tensor."""
        one = self.move.tensors[number]
        if one.link is None:
            return tile[slices_of(box)]
        return self._linked(number, one.link, side).box(tile, box)

    def _linked(self, number: int, link: PieceLink, side: int) -> LinkedTile:
        one = self.move.tensors[number]
        tile = self.move.tiles[side][(one.source_name, one.target_name)[side]]
        assert tile is not None, "what is exchanged is of a tile that the rank has"
        return LinkedTile(link, side, tile)

    def lying(
        self, number: int, boxes: Sequence[Part], side: int, tile: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Boxes of what is carried as views of the tile, as few as can be, with where each begins in their message."""
        link = self.move.tensors[number].link
        if link is not None:
            yield from self._linked(number, link, side).views(tile, boxes)
            return
        if tile.is_contiguous():
            for start, grid in laid(arranged(boxes), tuple(tile.shape), (1,) * tile.dim()):
                yield start, grid.of(tile)
            return
        for start, box in boxes:
            yield start, self.box(number, side, tile, box)


@dataclass
class MessageCopy:
    """What is copied for a message: views of a buffer, and views of the tensors."""

    staged: Views
    lying: Views


def copy_views(to: Views, origin: Views) -> None:
    """Copy each view of `origin` to that of `to`, which may have another dtype."""
    if to:
        torch_private.copy_all(to, origin)


def identity_of(x: torch.Tensor | None) -> tuple[Any, ...] | None:
    """What tells a tensor's memory from another's.

    The storage counts, as an address may be another tensor's by now: FSDP gives memory back by `resize_(0)`, and keeps
    the storage. A storage of which there are views isn't freed, so that its own number is nobody else's. A tensor
    without elements has no memory.
    """
    if x is None or not x.numel():
        return None
    return (torch_private.memory_of(x), x.data_ptr(), x.dtype, x.shape, x.stride())


# --- memory that tensors have in common -----------------------------------------------------------


def in_common(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs of tensors, by number, that have any byte in common: views of one memory, through whatever storage.

    >>> x = torch.zeros(4, 6)
    >>> list(in_common([x[:, ::2], x[:, 1::2], x[1:3, 3:]]))
    [(0, 2), (1, 2)]
    """
    open_spans: list[tuple[int, int, int]] = []
    for start, stop, at in sorted(
        (t.data_ptr(), t.data_ptr() + _last(t) + 1, n) for n, t in enumerate(tensors) if t.numel()
    ):
        open_spans = [span for span in open_spans if span[1] > start]
        for first, _, before in open_spans:
            if _meet([*_steps(tensors[before]), *_steps(tensors[at])], _last(tensors[at]) + start - first):
                yield min(at, before), max(at, before)
        open_spans.append((start, stop, at))


def is_written_twice(x: torch.Tensor) -> bool:
    """Whether elements of a tensor may lie in the same place, as those of an expanded one do.

    >>> is_written_twice(torch.zeros(4).expand(3, 4)), is_written_twice(torch.zeros(4, 6)[:, ::2])
    (True, False)
    """
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return x.numel() > 0
        reach += stride * (size - 1)
    return False


def is_freed(x: torch.Tensor) -> bool:
    """Whether the storage of a tensor has been resized to less than the tensor takes.

    >>> x = torch.zeros(4)
    >>> _ = x.untyped_storage().resize_(0)
    >>> is_freed(x)
    True
    """
    return x.numel() > 0 and x.storage_offset() * x.element_size() + _last(x) + 1 > x.untyped_storage().nbytes()


def _steps(x: torch.Tensor) -> list[tuple[int, int]]:
    """The bytes of a tensor: `start + sum(step * n)` for every `n` of `0..most` in each `(step, most)`."""
    dims = zip(x.stride(), x.shape, strict=True)
    return [(1, x.element_size() - 1), *((stride * x.element_size(), size - 1) for stride, size in dims)]


def _last(x: torch.Tensor) -> int:
    return sum(step * most for step, most in _steps(x))


def _meet(steps: Sequence[tuple[int, int]], total: int) -> bool:
    """Whether `sum(step * n)` can be `total`, with `n` of `0..most` for each `(step, most)`.

    Two tensors meet where `a + sum(steps of one) = b + sum(steps of the other)`; counted from its last byte backwards,
    the steps of the other stand on the left as well.
    """
    merged: dict[int, int] = {}
    for step, most in steps:
        if step and most:
            merged[step] = merged.get(step, 0) + most
    terms = sorted(merged.items(), reverse=True)

    def reachable(at: int, left: int) -> bool:
        if at == len(terms):
            return left == 0
        step, most = terms[at]
        rest = sum(step * most for step, most in terms[at + 1 :])
        low, high = max(0, -(-(left - rest) // step)), min(most, left // step)
        return any(reachable(at + 1, left - step * n) for n in range(low, high + 1))

    return reachable(0, total)
