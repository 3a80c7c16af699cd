"""Layout rules: what they make of names and shapes, against einops on whole arrays, and what they refuse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import einops
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import axes
from axes import ExpressionError, LayoutRules, ShardingError, SizeError
from axes.algebra.chunks import count
from axes.algebra.pieces import TensorPiece

Arrays = dict[str, np.ndarray]


def view(x: np.ndarray, seen: tuple) -> np.ndarray:
    """A view of a contiguous array by sizes, strides and offset in elements."""
    sizes, strides, offset = seen
    return np.lib.stride_tricks.as_strided(x.reshape(-1)[offset:], sizes, [s * x.itemsize for s in strides])


def steps(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[at + 1 :]) for at in range(len(shape))]


def copied(
    pieces: Mapping[str, tuple[TensorPiece, ...]], shapes: Mapping[str, tuple[int, ...]], sources: Arrays
) -> Arrays:
    """The targets of pieces, each element written once."""
    found = {}
    for name, parts in pieces.items():
        x, times = np.full(shapes[name], -1), np.zeros(shapes[name], int)
        for piece in parts:
            source = sources[piece.source]
            seen = piece.target_view(steps(x.shape))
            view(x, seen)[...] = view(source, piece.source_view(steps(source.shape)))
            view(times, seen)[...] += 1
        assert (times == 1).all(), f"elements of {name} aren't written once"
        found[name] = x
    return found


def same(found: Arrays, wanted: Arrays) -> None:
    assert set(found) == set(wanted)
    for name, x in wanted.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


# --- any rule -----------------------------------------------------------------------------------------

SIZES = {"a": 2, "b": 3, "c": 1, "h": 3, "k": 2, "m": 4}
SHARED, OWN = ("a", "b", "c"), ("h", "k", "m")


@dataclass
class Drawn:
    """A tensor of a rule: its name, its spec, and its values by name."""

    pattern: str
    spec: str
    arrays: Arrays


def groups(draw: st.DrawFn, names: list[str]) -> list[list[str]]:
    """Names in another order, cut into dims."""
    order, dims = draw(st.permutations(names)), [[]]
    for name in order:
        if dims[-1] and draw(st.booleans()):
            dims.append([])
        dims[-1].append(name)
    return [dim for dim in dims if dim]


def text_of(dims: list[list[str]]) -> str:
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims)


@st.composite
def tensor(draw: st.DrawFn, name: str, blocks: list[tuple[list[str], np.ndarray]]) -> Drawn:
    """A tensor that holds these blocks, each an array with a dim for each of its names."""
    if len(blocks) == 1:
        names, values = blocks[0]
        dims = groups(draw, names)
        values = einops.rearrange(values, f"{' '.join(names)} -> {text_of(dims)}", **sized(names))
    else:
        shared = [name for name in blocks[0][0] if name in SHARED]
        dims = groups(draw, [*shared, "+"])
        inner = [draw(st.permutations([name for name in names if name not in SHARED])) for names, _ in blocks]
        flat = list(itertools.chain(*dims))
        parts = []
        for (names, array), own in zip(blocks, inner, strict=True):
            out = " ".join(f"({' '.join(own)})" if name == "+" else name for name in flat)
            parts.append(einops.rearrange(array, f"{' '.join(names)} -> {out}", **sized(names)))
        values = np.concatenate(parts, flat.index("+"))
        blocked = {**SIZES, "+": values.shape[flat.index("+")]}
        values = values.reshape([math.prod(blocked[name] for name in dim) for dim in dims])
        written = f"({' + '.join(' '.join(own) for own in inner)})"
        dims = [[written if name == "+" else name for name in dim] for dim in dims]
    alone = [at for at, dim in enumerate(dims) if len(dim) == 1 and "+" not in dim[0]]
    if not alone or draw(st.booleans()):
        return Drawn(name, text_of(dims), {name: values})
    at = draw(st.sampled_from(alone))
    parts = {f"{name}.{i}": np.array(values.take(i, at)) for i in range(values.shape[at])}
    return Drawn(f"{name}.{{{dims[at][0]}}}", text_of(dims), parts)


def sized(names: list[str]) -> dict[str, int]:
    return {name: SIZES[name] for name in names}


@st.composite
def rule(draw: st.DrawFn) -> tuple[dict, Arrays, Arrays]:
    """A table of one rule, and the arrays of both sides."""
    shared = draw(st.lists(st.sampled_from(SHARED), unique=True))
    blocks, first = [], 0
    for _ in range(draw(st.integers(1, 4))):
        names = [*shared, *draw(st.lists(st.sampled_from(OWN), min_size=1, unique=True))]
        shape = [SIZES[name] for name in names]
        blocks.append((names, np.arange(first, first + math.prod(shape)).reshape(shape)))
        first += math.prod(shape)
    sides = []
    for letter in "st":
        cuts = [at for at in range(1, len(blocks)) if draw(st.booleans())]
        spans = zip([0, *cuts], [*cuts, len(blocks)], strict=True)
        sides.append([draw(tensor(f"{letter}{i}", blocks[a:b])) for i, (a, b) in enumerate(spans)])
    text = " -> ".join(", ".join(each.spec for each in side) for side in sides)
    left, right = (tuple(each.pattern for each in side) for side in sides)
    arrays = [{name: x for each in side for name, x in each.arrays.items()} for side in sides]
    return {left: (*right, text)}, *arrays


def shapes_of(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: x.shape for name, x in arrays.items()}


def used_sizes(table: dict) -> dict[str, int]:
    ((*_, text),) = table.values()
    return {
        name: size
        for name, size in SIZES.items()
        if name in text.split("->")[0].replace("(", " ").replace(")", " ").split()
    }


@settings(max_examples=400, deadline=None)
@given(rule())
def test_pieces_are_the_expression_and_the_way_back_is_the_same_rule(drawn):
    table, sources, targets = drawn
    rules = LayoutRules(table, sizes=used_sizes(table))
    change = rules.applied(shapes_of(sources))
    assert change.targets == shapes_of(targets)
    same(copied(change.pieces, change.targets, sources), targets)
    same(copied(change.inverse.pieces, change.inverse.targets, targets), sources)
    back = rules.inverse.applied(shapes_of(targets))
    same(copied(back.pieces, back.targets, targets), sources)
    assert change.inverse.inverse.pieces.keys() == change.pieces.keys()
    for name in targets:
        assert rules.pieces_of(name, change.sources) == (change.targets[name], change.pieces[name])


@settings(max_examples=200, deadline=None)
@given(rule(), st.data())
def test_a_tile_of_a_target_is_boxes_of_pieces(drawn, data):
    """What a rank has of either side, in boxes of the pieces: these elements, each once."""
    table, sources, targets = drawn
    change = LayoutRules(table, sizes=used_sizes(table)).applied(shapes_of(sources))
    for pieces, arrays, side in ((change.pieces, targets, "target"), (change.inverse.pieces, sources, "source")):
        for name, x in arrays.items():
            tile = tuple(data.draw(runs(extent)) for extent in x.shape)
            marked = np.zeros(x.shape, int)
            for piece in pieces[name]:
                turned = piece if side == "target" else piece.inverse
                boxes = turned.boxes_in_target(tile) if side == "target" else turned.boxes_in_source(tile)
                for part in map(turned.within, boxes):
                    held = part.target_tile if side == "target" else part.source_tile
                    marked[np.ix_(*[np.r_[tuple(slice(*run) for run in dim)] for dim in held])] += 1
            wanted = np.zeros(x.shape, int)
            wanted[np.ix_(*[np.r_[tuple(slice(*run) for run in dim)] for dim in tile])] = 1
            np.testing.assert_array_equal(marked, wanted)


@st.composite
def runs(draw: st.DrawFn, extent: int) -> tuple[tuple[int, int], ...]:
    """Some runs of a dim, at least one element."""
    ends = sorted(draw(st.sets(st.integers(0, extent), min_size=2, max_size=4)))
    return tuple(zip(ends[: len(ends) // 2 * 2 : 2], ends[1::2], strict=True))


@settings(max_examples=200, deadline=None)
@given(rule())
def test_a_piece_is_read_in_boxes_of_the_source(drawn):
    table, sources, targets = drawn
    change = LayoutRules(table, sizes=used_sizes(table)).applied(shapes_of(sources))
    cut = {
        name: tuple(part for piece in parts for part in piece.with_boxes_of_source())
        for name, parts in change.pieces.items()
    }
    for part in itertools.chain(*cut.values()):
        assert all(len(dim) == 1 for dim in part.source_tile)
        assert math.prod(map(count, part.source_tile)) == math.prod(part.shape)
    same(copied(cut, change.targets, sources), targets)
