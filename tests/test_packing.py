"""Packing and unpacking: every box where it belongs, and buffers as long as the collective wants them."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from axes.runtime.packing import filler, packer, places_of, slices_of, unpacker


@st.composite
def cut_tiles(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, int], ...]]]:
    """A tile's shape, and its boxes along a grid of cuts, in some order, empty ones left out."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    boxes: list[tuple[tuple[int, int], ...]] = [()]
    for size in shape:
        ends = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        ranges = list(itertools.pairwise(ends))
        boxes = [(*box, one) for box in boxes for one in ranges]
    if draw(st.booleans()):
        boxes = draw(st.permutations(boxes))
    return shape, boxes[: draw(st.integers(1, len(boxes)))]


def volume(box: tuple[tuple[int, int], ...]) -> int:
    return math.prod(stop - start for start, stop in box)


@given(cut_tiles(), st.integers(0, 3), st.booleans())
def test_a_packed_buffer_is_as_long_as_asked_and_unpacks_to_the_tile(cut, padding, spread):
    shape, boxes = cut
    tile = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    each = max(map(volume, boxes)) + padding
    dense = itertools.accumulate(map(volume, boxes[:-1]), initial=0)
    starts = [at * each for at in range(len(boxes))] if spread else list(dense)
    size = len(boxes) * each if spread else sum(map(volume, boxes)) + padding
    places = places_of(list(zip(starts, boxes, strict=True)), shape)
    buffer = packer(places, shape, size)(tile)
    assert buffer.is_contiguous()
    assert buffer.numel() == size
    flat = buffer.reshape(-1)
    for start, box in zip(starts, boxes, strict=True):
        assert torch.equal(flat[start : start + volume(box)], tile[slices_of(box)].reshape(-1))
    out = torch.full(shape, -1.0, dtype=torch.float64)
    if not padding and not spread:
        filler(places, shape)(out, flat)
        for box in boxes:
            assert torch.equal(out[slices_of(box)], tile[slices_of(box)])
    if sum(map(volume, boxes)) == tile.numel():
        assert torch.equal(unpacker(places, shape)(flat), tile)
