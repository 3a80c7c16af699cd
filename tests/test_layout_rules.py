"""Layout rules: what they make of names and shapes, against einops on whole arrays, and what they refuse."""

from __future__ import annotations

import itertools
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass

import einops
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axes import AxesError, ExpressionError, LayoutRules, ShardingError, SizeError
from axes.algebra.chunks import count
from axes.algebra.layout_pieces import LayoutPiece
from tests.counting import calls

Arrays = dict[str, np.ndarray]


def view(x: np.ndarray, seen: tuple) -> np.ndarray:
    """A view of a contiguous array by sizes, strides and offset in elements."""
    sizes, strides, offset = seen
    return np.lib.stride_tricks.as_strided(x.reshape(-1)[offset:], sizes, [s * x.itemsize for s in strides])


def steps(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[at + 1 :]) for at in range(len(shape))]


def copied(
    pieces: Mapping[str, tuple[LayoutPiece, ...]], shapes: Mapping[str, tuple[int, ...]], sources: Arrays
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


# --- what a table says --------------------------------------------------------------------------------

FUSE = {("*.q", "*.k", "*.v"): ("*.qkv", "(h k) d, (g k) d, (g k) d -> (h k + g k + g k) d")}
QKV = {"0.q": (32, 5), "0.k": (8, 5), "0.v": (8, 5)}


def values(shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    first, found = 0, {}
    for name, shape in shapes.items():
        found[name] = np.arange(first, first + math.prod(shape)).reshape(shape)
        first += math.prod(shape)
    return found


def converted(table: dict, sources: Arrays, **sizes: int) -> Arrays:
    change = LayoutRules(table, **sizes).applied(shapes_of(sources))
    return copied(change.pieces, change.targets, sources)


def test_a_tensor_that_no_rule_is_about_keeps_its_name():
    x = values({**QKV, "norm": (5,), "scale": ()})
    found = converted(FUSE, x)
    same(found, {"0.qkv": np.concatenate([x["0.q"], x["0.k"], x["0.v"]]), "norm": x["norm"], "scale": x["scale"]})


def test_several_stars_stand_for_the_same_texts_in_all_names():
    x = values(
        {f"model.{layer}.{w}.{end}": (3,) for layer in (0, 11) for w in ("gate", "up") for end in ("weight", "bias")}
    )
    table = {("model.*.gate.*", "model.*.up.*"): ("*.both.*", "f, f -> (f + f)")}
    found = converted(table, x)
    assert set(found) == {"0.both.weight", "0.both.bias", "11.both.weight", "11.both.bias"}
    np.testing.assert_array_equal(
        found["11.both.bias"], np.concatenate([x["model.11.gate.bias"], x["model.11.up.bias"]])
    )


def test_the_rows_of_rotary_embeddings_are_permuted():
    x = values({"q": (24, 5)})
    found = converted({"q": ("q", "(h two k) d -> (h k two) d")}, x, h=3, two=2)
    same(found, {"q": einops.rearrange(x["q"], "(h two k) d -> (h k two) d", h=3, two=2)})


def test_tied_tensors_are_one_source_with_two_targets_and_the_way_back_reads_one_of_them():
    x = values({"embed": (6, 4)})
    for text in ((), ("v d -> v d, d v",)):
        rules = LayoutRules({"embed": ("embed", "head", *text)})
        change = rules.applied(shapes_of(x))
        there = copied(change.pieces, change.targets, x)
        same(there, {"embed": x["embed"], "head": x["embed"].T if text else x["embed"]})
        for back in (change.inverse, rules.inverse.applied(change.targets)):
            same(copied(back.pieces, back.targets, there), x)
            assert [piece.source for piece in back.equal] == ["head"]
            assert back.inverse.pieces == change.pieces


def test_a_table_says_which_sources_nobody_needs_and_which_targets_keep_their_values():
    rules = LayoutRules({"*.inv_freq": None, None: ("*.scale", "step"), "model.*": "*"})
    change = rules.applied({"model.norm": (5,), "a.inv_freq": (2,), "b.inv_freq": (2,)})
    assert change.targets == {"norm": (5,)}
    assert change.unused == ("a.inv_freq", "b.inv_freq")
    assert change.inverse.targets == {"model.norm": (5,)}
    assert [rules.keeps(name) for name in ("0.scale", "step", "norm", "steps")] == [True, True, False, False]
    back = rules.inverse
    assert back.keeps("a.inv_freq")
    assert back.applied({"norm": (5,), "0.scale": (1,), "step": ()}).unused == ("0.scale", "step")


def test_a_number_in_a_name_is_a_dim_on_both_sides_or_on_one():
    x = values({f"{layer}.{e}.up": (4, 3) for layer in range(2) for e in range(3)})
    found = converted({"{l}.{e}.up": ("up.{e}", "l e f d -> e d l f")}, x)
    whole = np.stack([np.stack([x[f"{layer}.{e}.up"] for e in range(3)]) for layer in range(2)])
    same(found, {f"up.{e}": einops.rearrange(whole[:, e], "l f d -> d l f") for e in range(3)})


def test_a_tensor_without_elements_may_get_another_name():
    change = LayoutRules({"a": "b"}).applied({"a": (0, 3)})
    assert change.targets == {"b": (0, 3)}
    assert change.pieces["b"][0].shape == (0, 3)


def test_the_first_rule_that_is_about_a_tensor_applies():
    change = LayoutRules({"a.0": "first", "a.*": "others.*"}).applied({"a.0": (1,), "a.1": (1,)})
    assert set(change.targets) == {"first", "others.1"}


def test_dims_that_step_as_one_are_one():
    change = LayoutRules({**FUSE, "x": ("y", "(a b c) d -> a (b c d)")}, a=2, b=3).applied({**QKV, "x": (12, 5)})
    assert [piece.shape for piece in change.pieces["0.qkv"]] == [(32, 5), (8, 5), (8, 5)]
    assert [piece.shape for piece in change.pieces["y"]] == [(2, 6, 5)]


def test_a_pickled_table_is_equal_and_has_the_same_hash():
    rules = LayoutRules(FUSE, h=4)
    again = pickle.loads(pickle.dumps(rules))
    assert (again, hash(again)) == (rules, hash(rules))
    assert again.applied(QKV) == rules.applied(QKV)
    assert rules not in (LayoutRules(FUSE, h=2), LayoutRules(FUSE), FUSE)


def test_what_a_change_is_is_printed_in_a_few_lines():
    shapes = {f"experts.{e}.up": (3, 4) for e in range(5)} | {f"n{i}": (2,) for i in range(9)} | {"x": (1,)}
    lines = str(LayoutRules({"experts.{e}.up": "up", "x": None}).applied(shapes)).splitlines()
    assert lines[0] == "15 tensors -> 10 tensors, 1 unused"
    assert lines[1] == "  experts.0.up [3, 4], experts.1.up [3, 4], experts.2.up [3, 4], 2 more -> up [5, 3, 4]"
    assert lines[-1] == "  and 2 more"


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "shapes", "error", "said"),
    [
        (FUSE, {"0.q": (32, 5), "0.k": (8, 5)}, ShardingError, "takes 0.q together with 0.v, which isn't there"),
        (FUSE, {**QKV, "0.v": (8, 6)}, SizeError, "d=5 is 5, not 6"),
        (FUSE, {**QKV, "0.v": (12, 5)}, SizeError, "(g k)=8 is 8, not 12"),
        (FUSE, {**QKV, "0.q": (32, 5, 1)}, SizeError, "'(h k) d' has 2 dims; the tensor has 3"),
        (FUSE, {**QKV, "0.q": (0, 5)}, SizeError, "a tensor without elements"),
        (FUSE, {**QKV, "0.qkv": (1,)}, ShardingError, "two tensors would be '0.qkv': 0.q and 0.qkv"),
        (FUSE, {"norm": (5,)}, ShardingError, "*.q, *.k, *.v -> *.qkv"),
        ({"layers.*.up.w": "*"}, {"layers.0.upp.w": (1,)}, ShardingError, "did you mean 'layers.*.upp.w'?"),
        ({"*.w": "*.x", "0.w": "y"}, {"0.w": (1,)}, ShardingError, "0.w -> y: behind a wider one, *.w -> *.x"),
        (
            {"*.a": "x.*", "*.b": "x.*"},
            {"0.a": (1,), "0.b": (1,)},
            ShardingError,
            "two tensors would be 'x.0': 0.a and 0.b",
        ),
        ({"a": "x", "b": "x"}, {"a": (1,), "b": (1,)}, ShardingError, "two tensors would be 'x': a and b"),
        ({"a": ("x", "x")}, {"a": (1,)}, ShardingError, "makes 'x', twice"),
        ({"*.*": "**"}, {"a.b": (1,)}, ShardingError, "reads as another rule's"),
        ({None: "b", "a": "b"}, {"a": (2,)}, ShardingError, "'b' would keep its values, by the layout rules, and be"),
        ({"{e}.up": "up"}, {"1000000000.up": (3, 4)}, ShardingError, "about no tensor"),
        ({"{e}.up": "up"}, {"999999999.up": (3, 4)}, ShardingError, "there is none with e = 0"),
        ({"{e}.up": "up"}, {"0.up": (3, 4), "2.up": (3, 4)}, ShardingError, "there is none with e = 1"),
        ({"{e}.up": "up"}, {"1.up": (3, 4)}, ShardingError, "there is none with e = 0"),
        ({"{e}.up": "up"}, {"0.up": (3, 4), "1.up": (3, 5)}, ShardingError, "0.up is [3, 4] and 1.up is [3, 5]"),
        (
            {("{e}.a", "{e}.b"): ("c", "e d, e d -> e (d + d)")},
            {"0.a": (3,), "1.a": (3,), "0.b": (3,)},
            SizeError,
            "e=",
        ),
        ({"q": ("q", "(h two k) d -> (h k two) d")}, {"q": (24, 5)}, SizeError, "'h' and 'two' and 'k' don't follow"),
        ({"q": ("q", "(h two=2) d -> (two h) d")}, {"q": (7, 5)}, SizeError, "7 doesn't divide by 2"),
        (FUSE, {**QKV, "x": (-1,)}, SizeError, "the shape of 'x' is whole numbers; found (-1,)"),
        (FUSE, {**QKV, "x": 3}, SizeError, "found 3"),
        (FUSE, [1], ShardingError, "shapes are a mapping from names to shapes"),
        (FUSE, {1: (2,)}, ShardingError, "shapes are a mapping from names to shapes"),
    ],
)
def test_shapes_that_do_not_fit_a_table_are_refused_with_their_names(table, shapes, error, said):
    with pytest.raises(error, match=re.escape(said)):
        LayoutRules(table).applied(shapes)


@pytest.mark.parametrize(
    ("table", "error", "said"),
    [
        ([("a", "b")], ShardingError, "layout rules are a mapping from names to names; found [('a', 'b')]"),
        ({"a b": "c"}, ShardingError, "'a b' isn't the name of a tensor; an expression stands last on the right"),
        ({"a": ("x y -> y x", "c")}, ShardingError, "'x y -> y x' isn't the name of a tensor"),
        ({"": "a"}, ShardingError, "'' isn't the name of a tensor"),
        ({3: "a"}, ShardingError, "found 3"),
        ({"a": 3}, ShardingError, "found 3"),
        ({"a": ()}, ShardingError, "found ()"),
        ({None: None}, ShardingError, "without names on one side has no expression; found None: None"),
        ({None: ("x", "a -> a")}, ShardingError, "without names on one side has no expression"),
        ({("b", "c"): "a"}, ShardingError, "several tensors on the left need an expression"),
        (
            {("b", "c"): ("a", "x y -> x y")},
            ExpressionError,
            "the left side is 1 tensors for 2 names, of the rule b, c -> a",
        ),
        ({"a": ("b", "x y -> x, y")}, ExpressionError, "the right side is 2 tensors for 1 names"),
        ({("b", "c"): ("a", "x d, y d -> x d")}, ExpressionError, "the left side is 2 tensors, blocks counted"),
        ({"b": ("a", "x@tp d -> x d")}, ExpressionError, "write '@' in their specs"),
        ({"b": ("a", "(x d)@tp -> x d")}, ExpressionError, "write '@' and '|' in their specs"),
        ({"b": ("a", "x d | sum@tp -> x d")}, ExpressionError, "write '@' and '|' in their specs"),
        (
            {"b.{e}": ("a", "x d -> x d")},
            ExpressionError,
            "'b.{e}' stands for one tensor with a dim 'e': 'x d' has no such",
        ),
        ({"b.{e}": ("a", "(e x) d -> x e d")}, ExpressionError, "'(e x) d' has no such dim of its own"),
        ({"b.{e}": ("a", "... e -> e ...")}, ExpressionError, "write 'e', a number in the name, before '...'"),
        ({"b.{}": "a"}, ExpressionError, "is the name of a dim, once"),
        ({"b.{e}.{e}": "a"}, ExpressionError, "is the name of a dim, once"),
        ({"b.*": "a"}, ShardingError, "write {e} for a number that becomes a dim e"),
        ({"a": ("b", "x -> ")}, ExpressionError, "'x' stands on the left only"),
        ({"a": ("b", "x -> 2 x")}, ExpressionError, "takes no number but 1"),
        ({"a": ("b", "x -> x y")}, ExpressionError, "'y' stands on the right only"),
    ],
)
def test_a_table_that_cannot_be_is_refused(table, error, said):
    with pytest.raises(error, match=re.escape(said)):
        LayoutRules(table)


NAMES = st.text("ab.*{}?", max_size=6) | st.sampled_from(["a", "a.{e}", "{e}.b", "*", "a.*", "a.0"])
EXPRESSIONS = st.text("ab e12().+->@|,_=", max_size=14) | st.sampled_from(
    ["a b -> b a", "e ... -> e ...", "a, b -> (a + b)"]
)
SIDES = NAMES | st.none() | st.lists(NAMES, max_size=3).map(tuple)


@settings(max_examples=500, deadline=None)
@given(
    st.dictionaries(SIDES, SIDES | st.tuples(NAMES, EXPRESSIONS) | st.tuples(NAMES, NAMES, EXPRESSIONS), max_size=3),
    st.dictionaries(NAMES, st.lists(st.integers(0, 4), max_size=3), max_size=4),
)
def test_any_text_is_a_table_or_an_error_that_says_why(table, shapes):
    try:
        rules = LayoutRules(table)
        change = rules.applied(shapes)
    except AxesError:
        return
    sources = values({name: tuple(shape) for name, shape in shapes.items()})
    there = copied(change.pieces, change.targets, sources)
    back = copied(change.inverse.pieces, change.inverse.targets, there)
    same(back, {name: x for name, x in sources.items() if name not in change.unused})
    for name in there:
        assert rules.pieces_of(name, shapes) == (change.targets[name], change.pieces[name])


def test_a_size_of_no_name_and_two_sizes_of_one_are_refused():
    with pytest.raises(SizeError, match=r"a size is given for 'hh'.*did you mean 'h'"):
        LayoutRules(FUSE, hh=2)
    with pytest.raises(SizeError, match="'two' is given two sizes: 3 and 2"):
        LayoutRules({"q": ("q", "(h two=2) d -> (two h) d")}, two=3)
    with pytest.raises(SizeError, match="32 doesn't divide by 5"):
        LayoutRules(FUSE, h=5).applied(QKV)
    with pytest.raises(SizeError, match="'h' and 'k' and 'g' don't follow from"):
        LayoutRules(FUSE).inverse.applied({"0.qkv": (48, 5)})


def test_a_rule_with_a_question_mark_may_be_about_no_tensor():
    assert LayoutRules({"head?": "output"}).applied({"norm": (5,)}).targets == {"norm": (5,)}
    assert LayoutRules({"head?": "output"}).inverse.applied({"output": (5,)}).targets == {"head": (5,)}


def test_a_target_may_have_one_of_two_sources():
    rules = LayoutRules({"b?": "x", "*.a?": "*.x", "c?": "x", "x": None})
    for source in ("b", "c"):
        shapes = {source: (3,), "x": (1,)}
        change = rules.applied(shapes)
        assert change.targets == {"x": (3,)}
        assert rules.pieces_of("x", shapes) == ((3,), change.pieces["x"])
    with pytest.raises(ShardingError, match="two tensors would be 'x': b and c"):
        rules.applied({"b": (3,), "c": (3,), "x": (1,)})


@pytest.mark.parametrize("name", ["1.qkv", "0.q", "nothing"])
def test_a_target_that_the_table_does_not_make_is_refused(name):
    with pytest.raises(ShardingError, match=re.escape(f"make no '{name}' of these tensors")):
        LayoutRules(FUSE).pieces_of(name, QKV)
    with pytest.raises(ShardingError, match="a name and a mapping to shapes"):
        LayoutRules(FUSE).pieces_of(name, [name])


# --- many ---------------------------------------------------------------------------------------------


def shapes_of_experts(layers, experts):
    shapes = {f"layers.{at}.norm": (64,) for at in range(layers)}
    for layer, e, which in itertools.product(range(layers), range(experts), ("gate", "up", "down")):
        shapes[f"layers.{layer}.experts.{e}.{which}"] = (64, 32) if which == "down" else (32, 64)
    return shapes


def test_work_for_a_table_grows_with_its_names_and_one_name_of_seventy_thousand_is_asked_for_alone():
    shapes = shapes_of_experts(61, 384)
    rules = LayoutRules(
        {
            ("layers.*.experts.{e}.gate", "layers.*.experts.{e}.up"): ("*.w13", "e f d, e f d -> e (f + f) d"),
            "layers.*.experts.{e}.down": "*.w2",
        }
    )
    few, many = (calls(lambda count=count: rules.applied(shapes_of_experts(4, count))) for count in (24, 96))
    assert many < 4.5 * few
    change = rules.applied(shapes)
    assert len(change.targets) == 3 * 61
    assert sum(map(len, change.pieces.values())) == len(shapes)

    class Asked(dict):
        """Shapes that count who asks for them, and can't be listed."""

        asked = 0

        def __getitem__(self, name):
            Asked.asked += 1
            return super().__getitem__(name)

        def __iter__(self):
            raise AssertionError("all names are listed")

    for name, most in (("7.w13", 768), ("layers.7.norm", 1)):
        Asked.asked = 0
        assert rules.pieces_of(name, Asked(shapes)) == (change.targets[name], change.pieces[name])
        assert Asked.asked <= most
