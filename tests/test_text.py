"""Text: names, sizes that are found again, rules that choose, and whatever anyone might type.

What an error says, with its caret, is in `refusals_algebra`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import axes
from axes import AxesError, Mesh, Rules, SizeError
from tests.counting import calls
from tests.strategies import examples, factorizations, place, refusal

MESH = Mesh("dp=2 cp=2 tp=2", "fsdp = dp cp")

USES: tuple[Callable[[str], object], ...] = (
    Mesh,
    lambda text: Mesh("dp=2 cp=2", text),
    lambda text: Mesh(text, ranks=range(8)),
    MESH.rearrange,
    MESH.explain,
    MESH.define,
    MESH.sharding,
    MESH.layout,
    MESH.__getitem__,
    lambda text: axes.plan(text, text, (2, 2), MESH),
    lambda text: axes.explain(text, (2, 2), (2, 2), mesh=MESH),
    lambda text: MESH.rearrange("dp cp tp -> dp cp tp", sizes={text: 2}),
    lambda text: MESH.sharding("b", sizes={text: 2}),
    lambda text: Mesh("dp", sizes={text: 2}),
    lambda text: Rules({text: "dp"}).spec(text, MESH),
    lambda text: axes.LayoutRules({"a": ("b", text)}),
)
"""What text from a user goes into."""

# ---------------------------------------------------------------------------- round trips

WORDS = ("b", "_h", "h_", "__", "_1", "β", "größe", "\u540d", "नाम", "lambda", "sum", "x" * 255)
SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))


@pytest.mark.parametrize("name", WORDS, ids=ascii)
def test_a_name_is_an_identifier_of_python_between_any_white_space(name):
    text = f"{SPACES}{name}{SPACES}={SPACES}2{SPACES}tp=2"
    assert Mesh(text).shape == {name: 2, "tp": 2}
    assert Mesh("dp=2", f"{name} = dp").names[name] == 2
    assert Mesh("dp=2").rearrange(f"dp -> {name}=(dp)").shape == {name: 2}
    spec = f"s {name}@(tp {name}) | sum@c"
    assert Mesh(f"{text} c=2").sharding(spec).spec == spec


# ---------------------------------------------------------------------------- anything anyone types

SIGNS = [*"()@|,=*_ \t\n", "->", "...", "+", "~", "[", ".", "-", "\x00", "\u202e", "é", "\ud800", "\u0662"]
LIKELY = st.sampled_from(
    [*SIGNS, "1", "2", "-1", "0", str(10**30), "9" * 5000, "dp", "tp", "b", "s", "sum", "same", "x" * 300]
)


@examples(150)
@given(st.text(max_size=40) | st.lists(LIKELY, max_size=14).map("".join) | st.lists(LIKELY, max_size=14).map(" ".join))
@example("dp=100000000000000 tp=100000000000000")
@example("(dp=-1 tp=-1) = a b")
@example("dp=" + "9" * 10_000)
def test_no_text_raises_anything_but_an_axes_error_whose_caret_stands_under_a_sign(text):
    for use in USES:
        message = refusal(AxesError, functools.partial(use, text))
        assert message != ""
        (message or "").encode()  # also with lone surrogates in the text
        lines = (message or "").split("\n")
        if len(lines) == 3 and lines[2].strip("^ ") == "" != lines[2]:
            assert len(lines[2]) <= len(lines[1]) + 1


HUGE = [
    "(" * 100_000,
    "(" * 10_000 + "a" + ")" * 10_000,
    "a@(" * 10_000,
    "a=" * 10_000,
    "->" * 10_000,
    "..." * 10_000,
    " " * 10_000,
    "1" * 10_000,
    "\x00" * 10_000,
    "a " * 10_000,
    " ".join(f"a{i}" for i in range(4_000)),
    " ".join(f"a{i}@tp" for i in range(4_000)) + " | " + "sum@tp " * 10_000,
    "dp cp tp -> " + " ".join(f"a{i}=1" for i in range(4_000)) + " dp cp tp",
]


@pytest.mark.parametrize("text", HUGE, ids=lambda text: f"{text[:12]!r}x{len(text)}")
def test_huge_texts_end_as_anything_else_does_and_recurse_nowhere(text):
    before, depth = sys.getrecursionlimit(), len(inspect.stack(0))
    for use in USES[:9]:
        sys.setrecursionlimit(depth + 60)
        try:
            message = refusal(AxesError, functools.partial(use, text))
        finally:
            sys.setrecursionlimit(before)
        assert len(message or "") < 4 * len(text)


def ones(n: int, form: str = "a{}=1") -> str:
    return " ".join(form.format(i) for i in range(n))


GROWING: dict[str, tuple[Callable[[str], object], Callable[[int], str]]] = {
    "declaration": (lambda text: Mesh(text, ranks=range(8)), lambda n: ones(n) + " rest"),
    "declaration without sizes": (Mesh, lambda n: ones(n, "a{}")),
    "equation": (lambda text: Mesh("dp=2", text), lambda n: f"(dp) = {ones(n)} rest"),
    "equation, unknown": (lambda text: Mesh("dp=2", text), lambda n: f"x = {ones(n, 'a{}')}"),
    "mesh expression": (MESH.rearrange, lambda n: f"dp cp tp -> {ones(n)} dp cp tp"),
    "mesh expression, split": (MESH.explain, lambda n: f"({ones(n)} x) cp tp -> cp tp x {ones(n, 'a{}')}"),
    "mesh expression, missing on the right": (MESH.explain, lambda n: f"({ones(n)} x) cp tp -> cp tp"),
    "spec of groups": (MESH.sharding, lambda n: ones(n, "(a{0}=2 b{0})") + " s@tp | sum@cp"),
    "spec of one group": (MESH.sharding, lambda n: f"(h@tp {ones(n)})"),
    "spec, an axis again and again": (MESH.sharding, lambda n: "s@(" + "tp " * n + ")"),
    "parentheses": (MESH.sharding, lambda n: "(" * n),
}


@pytest.mark.parametrize("name", GROWING)
def test_work_grows_no_faster_than_the_text(name):
    use, text = GROWING[name]

    def work(n: int) -> int:
        with contextlib.suppress(AxesError):
            return calls(lambda: refusal(AxesError, functools.partial(use, text(n))))

    assert work(2000) < 14 * work(200) + 2000


# ---------------------------------------------------------------------------- sizes


@st.composite
def equations(draw: st.DrawFn) -> tuple[list[str], dict[str, int], set[str]]:
    """A declaration and equations that hold, all sizes, and the names whose sizes are enough to know."""
    sizes = {name: draw(st.sampled_from([1, 2, 3, 4, 6])) for name in "abc"[: draw(st.integers(1, 3))]}
    texts, whole, known = [" ".join(sizes)], " ".join(sizes), {*sizes}
    for index in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            sizes[f"p{index}"] = math.prod(sizes[name] for name in whole.split())
            texts.append(f"p{index} = {whole}")
            known = (known | {f"p{index}"}) - {draw(st.sampled_from(sorted({*whole.split()} & known) or ["-"]))}
            whole = f"p{index}"
        else:
            axis = draw(st.sampled_from(sorted(name for name in sizes if name in "abc")))
            cut = draw(factorizations(sizes[axis], 3))
            fresh = [f"n{index}{letter}" for letter in "abcd"[: len(cut)]]
            sizes.update(zip(fresh, cut, strict=True))
            texts.append(f"({axis}) = {' '.join(fresh)}")
            known |= {*fresh} - {draw(st.sampled_from(fresh))}
    return texts, sizes, known


@examples(150)
@given(equations(), st.data())
def test_sizes_that_are_left_out_are_found_again_and_a_wrong_one_is_never_taken(case, data):
    texts, sizes, enough = case
    more = data.draw(st.sets(st.sampled_from(sorted(sizes))))
    given_ = {name: sizes[name] if name in enough | more else -1 for name in sizes}
    mesh = Mesh(*texts, sizes=given_)
    assert mesh.names == sizes
    name = data.draw(st.sampled_from(sorted(sizes)))
    wrong = {**sizes, name: sizes[name] + data.draw(st.integers(1, 7))}
    refused = refusal(AxesError, lambda: Mesh(*texts, sizes=wrong))
    assert refused or not any(re.search(rf"\b{name}\b", text) for text in texts[1:])  # in no equation


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5), st.data())
def test_an_axis_that_is_left_out_has_what_the_number_of_ranks_leaves(sizes, data):
    left_out = data.draw(st.integers(0, len(sizes) - 1))
    how = data.draw(st.sampled_from(["", "=-1", "-1", "None"]))
    inline = [data.draw(st.booleans()) and at != left_out for at in range(len(sizes))]
    texts = [
        f"a{i}={n}" if inline[i] else f"a{i}" + how * (i == left_out and how == "=-1") for i, n in enumerate(sizes)
    ]
    keywords = {f"a{i}": np.int64(n) for i, n in enumerate(sizes) if not inline[i] and i != left_out}
    keywords |= {f"a{left_out}": {"-1": -1, "None": None}[how]} if how in ("-1", "None") else {}
    mesh = Mesh(" ".join(texts), ranks=range(math.prod(sizes)), **keywords)
    assert list(mesh.shape.values()) == sizes


def test_sizes_follow_through_chains_of_equations_and_may_be_said_twice():
    assert Mesh("a b", "c = a b", "(c) = d e", d=2, e=6, a=3).shape == {"a": 3, "b": 4}
    assert Mesh("a", "(a) = b c", "(b) = d e", "(c) = f g", d=2, e=3, f=5, g=7).shape == {"a": 210}
    mesh = Mesh("dp=4 tp=2", sizes={"dp": 4}, tp=2)
    assert mesh.define("y = dp=4").names["y"] == 4
    assert mesh.rearrange("dp=4 tp -> tp dp", tp=2).shape == {"tp": 2, "dp": 4}
    for spec in ("(h=8@tp d)", "(h@tp d)"):
        assert mesh.sharding(spec, h=8) == mesh.sharding(spec, sizes={"h": 8}) == mesh.sharding("(h=8@tp d)")
    assert mesh.sharding("h d", h=-1).spec == "h d"
    assert mesh.rearrange("(a b) tp -> a b tp", a=2).shape == {"a": 2, "b": 2, "tp": 2}
    for wrong in ({"a": 2.0}, {"b": True}):  # equal to what was kept
        assert refusal(SizeError, functools.partial(mesh.rearrange, "(a b) tp -> a b tp", **wrong))


@pytest.mark.parametrize(
    "name", ["sizes", "ranks", "ranks_per_node", "self", "declaration", "expression", "spec", "mesh"]
)
def test_a_name_may_be_that_of_a_parameter(name):
    given_ = {"sizes": {name: 4}} if name in ("sizes", "ranks", "ranks_per_node") else {name: 4}
    assert Mesh(f"{name} tp=2", **given_).shape == {name: 4, "tp": 2}
    assert Mesh("x=8").rearrange(f"({name} b) -> {name} b", sizes={name: 4}).shape == {name: 4, "b": 2}
    assert Mesh("x=8").define(f"(x) = {name} b", sizes={name: 4}).names[name] == 4
    assert Mesh("x=2").sharding(
        f"({name} b@x)", **({"sizes": {name: 3}} if name == "sizes" else {name: 3})
    ).local_shape((12,)) == (6,)


def test_a_misspelled_option_is_neither_a_size_nor_an_option():
    assert "'devise', which is no option" in (refusal(SizeError, lambda: Mesh("dp", devise="cpu")) or "")
    assert "there is no option 'spek'" in (refusal(SizeError, lambda: MESH.sharding("b", spek="b@dp")) or "")


# ---------------------------------------------------------------------------- rules

NAMES = ("batch", "seq", "heads", "embed", "mlp")
GRID = Mesh("dp=2 cp=3 tp=4 ep=1", "fsdp = dp cp")
CHOICES = st.none() | st.sampled_from(["dp", "cp", "tp", "ep", "fsdp", ("fsdp", "tp"), ("ep", "fsdp"), ("tp", "dp")])


@examples(150)
@given(st.lists(st.tuples(st.sampled_from(NAMES), CHOICES), max_size=8), st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=4), st.data())  # fmt: skip
def test_the_first_rule_applies_whose_axes_are_free_and_whose_size_divides(table, names, data):
    extents = {name: data.draw(st.sampled_from((1, 2, 4, 6, 12, 24, 30))) for name in names}
    used: set[str] = set()
    found: dict[str, tuple[str, ...]] = {}
    for name, axis in table:
        chosen = () if axis is None else (axis,) if isinstance(axis, str) else axis
        digits = {digit for each in chosen for digit in ({"dp", "cp"} if each == "fsdp" else {each})}
        divides = name in extents and extents[name] % math.prod(GRID.names[each] for each in chosen) == 0
        if divides and name not in found and not used & digits:
            found[name] = chosen
            used |= digits
    rules = Rules([*table, ("...", None)])
    spec = rules.spec(" ".join(names), GRID, tuple(extents.values()))
    assert spec == " ".join(name + place(found.get(name, ())) for name in names)
    assert eval(repr(rules), {"Rules": Rules}) == rules


@pytest.mark.parametrize(
    ("spec", "shape", "sizes", "expected"),
    [
        ("(heads head_dim) embed", None, {}, "(heads@tp head_dim) embed@(dp cp)"),
        ("(heads head_dim) embed", (96, 12), {"heads": 8}, "(heads@tp head_dim) embed@(dp cp)"),
        ("(heads head_dim) embed", (96, 12), {"heads": 6}, "(heads head_dim) embed@(dp cp)"),
        ("embed@dp heads", None, {}, "embed@dp heads@tp"),
        ("... embed", (2, 2, 6), {}, "... embed@(dp cp)"),
        ("_ embed 3", (2, 6, 3), {}, "_ embed@(dp cp) 3"),
    ],
)
def test_rules_go_to_the_names_of_groups_and_an_at_stays(spec, shape, sizes, expected):
    assert Rules(heads="tp", head_dim=None, embed=("dp", "cp")).spec(spec, GRID, shape, **sizes) == expected


def test_an_explanation_says_which_rule_was_passed_over_and_why():
    rules = Rules([("batch", ("dp", "cp")), ("batch", "dp"), ("seq", "dp"), ("seq", "cp"), ("embed", None)])
    assert rules.explain("batch seq embed", GRID, (4, 9, 5)) == (
        "batch=4  dp     (batch=(dp cp): 4 doesn't divide into 6 parts)\n"
        "seq=9    cp     (seq=dp: 'dp' is used by another dim)\n"
        "embed=5  whole"
    )
    assert "sequence  error    no rule is about 'sequence'" in rules.explain("batch sequence", GRID)
    assert Rules({"batch": "dp"}, seq="cp") == Rules(batch=("dp",), seq="cp")
