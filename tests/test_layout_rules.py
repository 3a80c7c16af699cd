"""Layout rules: what they make of names and shapes, against einops on whole arrays.

What a table or shapes that don't fit are told is in `refusals_algebra`.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import einops
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import axes
from axes import AxesError, LayoutRules, Mesh
from tests.counting import calls
from tests.strategies import examples, refusal

Arrays = dict[str, np.ndarray]


def view(x: np.ndarray, seen: Any) -> np.ndarray:
    """A view of a contiguous array by sizes, strides and offset in elements."""
    sizes, strides, offset = seen
    return np.lib.stride_tricks.as_strided(x.reshape(-1)[offset:], sizes, [s * x.itemsize for s in strides])


def steps(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[at + 1 :]) for at in range(len(shape))]


def copied(change: Any, sources: Arrays) -> Arrays:
    """The targets of a change, each element written once."""
    found = {}
    for name, parts in change.pieces.items():
        x, times = np.full(change.targets[name], -1), np.zeros(change.targets[name], int)
        for piece in parts:
            source, seen = sources[piece.source], piece.target_view(steps(x.shape))
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
    first = [dims[at], *dims[:at], *dims[at + 1 :]]  # the number in a name is the first dim
    return Drawn(f"{name}.{{{dims[at][0]}}}", text_of(first), parts)


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


@examples(150)
@given(rule())
def test_pieces_are_the_expression_and_the_way_back_is_the_same_rule(drawn):
    table, sources, targets = drawn
    rules = LayoutRules(table, sizes=used_sizes(table))
    change = rules.applied(shapes_of(sources))
    assert change.targets == shapes_of(targets)
    same(copied(change, sources), targets)
    same(copied(rules.inverse.applied(shapes_of(targets)), targets), sources)


# --- what a table says --------------------------------------------------------------------------------

FUSE = {("*.q", "*.k", "*.v"): ("*.qkv", "(h k) d, (g k) d, (g k) d -> (h k + g k + g k) d")}
QKV = {"0.q": (32, 5), "0.k": (8, 5), "0.v": (8, 5)}


def values(shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Arrays of these shapes, of which no two elements are the same."""
    return {
        name: np.arange(math.prod(shape)).reshape(shape) + 1000 * at for at, (name, shape) in enumerate(shapes.items())
    }


@pytest.mark.parametrize(
    ("table", "shapes", "sizes", "made"),
    [
        ({**FUSE}, {**QKV, "norm": (5,), "scale": ()}, {}, {"0.qkv": lambda x: np.concatenate([x["0.q"], x["0.k"], x["0.v"]]), "norm": lambda x: x["norm"], "scale": lambda x: x["scale"]}),
        ({("m.*.a.*", "m.*.b.*"): ("*.ab.*", "f, f -> (f + f)")}, {f"m.{n}.{w}.{end}": (3,) for n in (0, 11) for w in "ab" for end in ("w", "b")}, {}, {f"{n}.ab.{end}": lambda x, n=n, end=end: np.concatenate([x[f"m.{n}.a.{end}"], x[f"m.{n}.b.{end}"]]) for n in (0, 11) for end in ("w", "b")}),
        ({"q": ("q", "(h two k) d -> (h k two) d")}, {"q": (24, 5)}, {"h": 3, "two": 2}, {"q": lambda x: einops.rearrange(x["q"], "(h two k) d -> (h k two) d", h=3, two=2)}),
        ({"embed": ("embed", "head", "v d -> v d, d v")}, {"embed": (6, 4)}, {}, {"embed": lambda x: x["embed"], "head": lambda x: x["embed"].T}),
        ({"{l}.{e}.up": ("up.{e}", "l e f d -> e d l f")}, {f"{n}.{e}.up": (4, 3) for n in range(2) for e in range(3)}, {}, {f"up.{e}": lambda x, e=e: np.stack([x[f"{n}.{e}.up"] for n in range(2)]).transpose(2, 0, 1) for e in range(3)}),
        ({("a", "c"): ("b", "x y, z y -> (x + z) y")}, {"a": (0, 3), "c": (1, 3)}, {"z": 1}, {"b": lambda x: x["c"]}),
        ({"a.0": "first", "a.*": "others.*"}, {"a.0": (1,), "a.1": (1,)}, {}, {"first": lambda x: x["a.0"], "others.1": lambda x: x["a.1"]}),
        ({"head?": "output"}, {"norm": (5,)}, {}, {"norm": lambda x: x["norm"]}),
    ],
    ids=["fused", "stars", "rotary", "tied", "numbers", "empty", "first", "perhaps"],
)  # fmt: skip
def test_a_table_by_example_there_and_back(table, shapes, sizes, made):
    x = values(shapes)
    rules = LayoutRules(table, **sizes)
    change = rules.applied(shapes)
    there = copied(change, x)
    same(there, {name: make(x) for name, make in made.items()})
    again = pickle.loads(pickle.dumps(rules))
    assert (again, hash(again), again.applied(shapes)) == (rules, hash(rules), change)
    assert rules != LayoutRules({"other": "x"})
    back = (rules if sizes or "d -> (h" not in str(table) else LayoutRules(table, h=4, g=1)).inverse
    same(copied(back.applied(change.targets), there), x)
    assert back.applied(change.targets).unused == (("head",) if "embed" in shapes else ())


def test_a_table_says_which_sources_nobody_needs_and_which_targets_keep_their_values():
    rules = LayoutRules({"*.inv_freq": None, None: ("*.scale", "step"), "model.*": "*", "b?": "x", "c?": "x"})
    change = rules.applied({"model.norm": (5,), "a.inv_freq": (2,), "c": (3,)})
    assert (change.targets, change.unused) == ({"norm": (5,), "x": (3,)}, ("a.inv_freq",))
    assert [rules.keeps(name) for name in ("0.scale", "step", "norm", "steps")] == [True, True, False, False]
    assert rules.inverse.keeps("a.inv_freq")
    assert rules.inverse.applied({"norm": (5,), "0.scale": (1,), "step": (), "x": (3,)}).unused == ("0.scale", "step")


def test_what_a_change_is_is_printed_in_a_few_lines():
    shapes = {f"experts.{e}.up": (3, 4) for e in range(5)} | {f"n{i}": (2,) for i in range(9)} | {"x": (1,)}
    lines = str(LayoutRules({"experts.{e}.up": "up", "x": None}).applied(shapes)).splitlines()
    assert (lines[0], lines[1], lines[-1]) == (
        "15 tensors -> 10 tensors, 1 unused",
        "  experts.0.up [3, 4], experts.1.up [3, 4], experts.2.up [3, 4], 2 more -> up [5, 3, 4]",
        "  and 2 more",
    )


NAMES = st.text("ab.*{}?", max_size=6) | st.sampled_from(["a", "a.{e}", "{e}.b", "*", "a.*", "a.0"])
EXPRESSIONS = st.text("ab e12().+->@|,_=", max_size=14) | st.sampled_from(
    ["a b -> b a", "e ... -> e ...", "a, b -> (a + b)"]
)
SIDES = NAMES | st.none() | st.lists(NAMES, max_size=3).map(tuple)


@examples(300)
@given(
    st.dictionaries(SIDES, SIDES | st.tuples(NAMES, EXPRESSIONS) | st.tuples(NAMES, NAMES, EXPRESSIONS), max_size=3),
    st.dictionaries(NAMES, st.lists(st.integers(0, 4), max_size=3), max_size=4),
)
def test_any_text_is_a_table_or_an_error_that_says_why(table, shapes):
    made: list[Any] = []
    refusal(AxesError, lambda: made.append(LayoutRules(table).applied(shapes)))
    for change in made:
        copied(change, values({name: tuple(shape) for name, shape in shapes.items()}))


WORDS = st.sampled_from(["a", "b", "ab", "layers", "0", "10", "", "A", "[", "]", "!", "a]", "-"])
MARKS = st.sampled_from(["*", "**", "?", "[a-b]", "[!a]", "[.]", "[a.b]", "[]]", "[", "]", "*a", "a*", "?b", "[!.]x"])
names = st.lists(WORDS, min_size=1, max_size=5).map(".".join)


@examples(200)
@given(st.lists(st.lists(WORDS | MARKS, min_size=1, max_size=5).map(".".join), min_size=1, max_size=12), names)
def test_the_first_pattern_that_matches_says_the_mesh_and_before_it_the_name_itself(every, name):
    meshes = {each: Mesh("a=1", ranks=[at]) for at, each in enumerate(dict.fromkeys(every))}
    wanted = [name] if name in meshes else [each for each in meshes if fnmatch.fnmatchcase(name, each)]
    made = list[Any]()
    refusal(
        AxesError,
        lambda: made.append(axes.transfer({name: "d"}, {name: "d"}, meshes, Mesh("b=1", ranks=[99]), {name: (1,)})),
    )
    assert [move.sources for move in made] == [tuple(meshes[each].universe.ranks) for each in wanted[:1]]


def test_work_for_a_table_grows_with_its_names():
    rules = LayoutRules({("*.{e}.gate", "*.{e}.up"): ("*.w13", "e f d, e f d -> e (f + f) d"), "*.{e}.down": "*.w2"})
    each = LayoutRules({f"m.*.experts.{e}.up?": f"*.{e}.w" for e in range(400)})  # a name is held against few of them
    for table, form in ((rules, ("0.{}.gate", "0.{}.up", "0.{}.down")), (each, ("m.0.experts.{}.up",))):
        shapes = [{name.format(e): (2, 2) for e in range(n) for name in form} for n in (50, 400)]
        few, many = (calls(lambda table=table, of=of: table.applied(of)) for of in shapes)
        assert many < 9 * few
