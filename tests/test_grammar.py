"""The grammar: every production, every error with its caret, and whatever anyone might type."""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from axes.algebra import grammar
from axes.algebra.errors import AxesError, ExpressionError, pointed, printable, shortened, suggestion
from axes.algebra.grammar import (
    LARGEST_SIZE,
    Dim,
    Ellipsis_,
    Factor,
    Group,
    Item,
    Pending,
    Place,
    Spec,
    leaves,
    parse_declaration,
    parse_equation,
    parse_mesh,
    parse_spec,
    parse_tensor,
)
from axes.algebra.mesh import Mesh
from tests.counting import calls

from .strategies import refusal

PARSERS = (parse_declaration, parse_equation, parse_mesh, parse_tensor, parse_spec)

MESH = Mesh("dp=2 cp=2 tp=2", "fsdp = dp cp")

USES: tuple[Callable[[str], object], ...] = (
    *PARSERS,
    Mesh,
    lambda text: Mesh("dp=2 cp=2", text),
    lambda text: Mesh(text, ranks=range(8)),
    MESH.rearrange,
    MESH.explain,
    MESH.define,
    MESH.sharding,
    MESH.layout,
    MESH.axis,
    MESH.__getitem__,
    lambda text: MESH.rearrange("dp cp tp -> dp cp tp", sizes={text: 2}),
    lambda text: MESH.sharding("b", sizes={text: 2}),
    lambda text: MESH.define("x = dp", sizes={text: 2}),
    lambda text: Mesh("dp", sizes={text: 2}),
)
"""Everything that text from a user goes into."""


# ---------------------------------------------------------------------------- productions


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("pp", [Item("pp")]),
        ("pp dp=2 cp tp", [Item("pp"), Item("dp", 2), Item("cp"), Item("tp")]),
        ("  pp\n\tdp = 2  ", [Item("pp"), Item("dp", 2)]),
        ("dp=2 cp=3", [Item("dp", 2), Item("cp", 3)]),
        ("dp=-1", [Item("dp")]),
        ("dp=007", [Item("dp", 7)]),
        (f"dp={LARGEST_SIZE}", [Item("dp", LARGEST_SIZE)]),
        ("_a __ a1 A", [Item("_a"), Item("__"), Item("a1"), Item("A")]),
        ("sum mean same", [Item("sum"), Item("mean"), Item("same")]),
    ],
)
def test_a_declaration_is_a_list_of_names_with_or_without_sizes(text, items):
    assert list(parse_declaration(text)) == items


@pytest.mark.parametrize(
    ("text", "left", "right"),
    [
        ("fsdp = dp cp", "fsdp", "dp cp"),
        ("fsdp=dp cp", "fsdp", "dp cp"),
        ("(dp cp tp) = efsdp ep", "dp cp tp", "efsdp ep"),
        ("dp cp = a b", "dp cp", "a b"),
        ("(dp=2 cp) = (a=2 b)", "dp=2 cp", "a=2 b"),
        ("fsdp=4 = dp cp", "fsdp=4", "dp cp"),
        ("a = b=3", "a", "b=3"),
        ("a = a", "a", "a"),
    ],
)
def test_an_equation_has_a_product_on_each_side(text, left, right):
    equation = parse_equation(text)
    assert " ".join(map(str, equation.left)) == left
    assert " ".join(map(str, equation.right)) == right
    assert equation.text == text


@pytest.mark.parametrize(
    ("text", "left", "right"),
    [
        ("(dp cp) tp -> dp cp tp", (Group((Item("dp"), Item("cp"))), Item("tp")), (Item("dp"), Item("cp"), Item("tp"))),
        ("a -> x=(a)", (Item("a"),), (Group((Item("a"),), "x"),)),
        ("(a=2 b)->b a", (Group((Item("a", 2), Item("b"))),), (Item("b"), Item("a"))),
        ("... tp -> tp ...", (Ellipsis_(), Item("tp")), (Item("tp"), Ellipsis_())),
        ("a -> a pp=1", (Item("a"),), (Item("a"), Item("pp", 1))),
        ("->", (), ()),
        ("(a) -> (a)", (Group((Item("a"),)),), (Group((Item("a"),)),)),
    ],
)
def test_a_mesh_expression_has_names_groups_and_dots_on_each_side(text, left, right):
    expression = parse_mesh(text)
    assert (expression.left, expression.right) == (left, right)


def dim(name: str | None, size: int | None = None, *axes: str) -> Dim:
    return Dim((Factor(name, size, Place(axes) if axes else None),))


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("", Spec(())),
        ("b", Spec((dim("b"),))),
        ("b s@tp", Spec((dim("b"), dim("s", None, "tp")))),
        ("s@(cp tp)", Spec((dim("s", None, "cp", "tp"),))),
        ("s @ (cp tp)", Spec((dim("s", None, "cp", "tp"),))),
        ("s@()", Spec((Dim((Factor("s", None, Place(())),)),))),
        ("s@*", Spec((dim("s", None, "*"),))),
        ("s@(* cp)", Spec((dim("s", None, "*", "cp"),))),
        ("h=16@tp", Spec((dim("h", 16, "tp"),))),
        ("h=-1", Spec((dim("h"),))),
        ("3 1", Spec((dim(None, 3), dim(None, 1)))),
        ("3@tp", Spec((dim(None, 3, "tp"),))),
        ("_ _@dp", Spec((dim("_"), dim("_", None, "dp")))),
        ("...", Spec((dim("..."),))),
        ("... d@tp", Spec((dim("..."), dim("d", None, "tp")))),
        ("...@tp", Spec((dim("...", None, "tp"),))),
        ("()", Spec((Dim((), grouped=True),))),
        ("(h d)", Spec((Dim((Factor("h"), Factor("d")), grouped=True),))),
        ("(h d)@tp", Spec((Dim((Factor("h"), Factor("d")), grouped=True, place=Place(("tp",))),))),
        (
            "(qkv=3 h@tp 2)",
            Spec((Dim((Factor("qkv", 3), Factor("h", None, Place(("tp",))), Factor(None, 2)), grouped=True),)),
        ),
        ("(... d)", Spec((Dim((Factor("..."), Factor("d")), grouped=True),))),
        ("b |", Spec((dim("b"),), ())),
        ("b | *", Spec((dim("b"),), (Pending("*"),))),
        ("|", Spec((), ())),
        ("b | sum@tp", Spec((dim("b"),), (Pending("sum", Place(("tp",))),))),
        (
            "| sum@(cp tp) max@dp",
            Spec((), (Pending("sum", Place(("cp", "tp"))), Pending("max", Place(("dp",))))),
        ),
        ("sum | sum@sum", Spec((dim("sum"),), (Pending("sum", Place(("sum",))),))),
        ("b | same@tp", Spec((dim("b"),), (Pending("same", Place(("tp",))),))),
        ("b | sum@()", Spec((dim("b"),), (Pending("sum", Place(())),))),
    ],
)
def test_a_spec_is_dims_and_what_is_pending(text, spec):
    assert parse_spec(text) == spec
    assert parse_spec(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "operands", "results"),
    [
        ("b s", ["b s"], None),
        ("b s -> s b", ["b s"], ["s b"]),
        ("b f@tp, f@tp d -> b d", ["b f@tp", "f@tp d"], ["b d"]),
        ("b f, f d -> b d | *", ["b f", "f d"], ["b d | *"]),
        ("b | sum@tp, c | -> d | max@tp", ["b | sum@tp", "c |"], ["d | max@tp"]),
        ("i@tp i -> i@tp", ["i@tp i"], ["i@tp"]),
        ("->", [""], [""]),
        (",", ["", ""], None),
        (", -> ,", ["", ""], ["", ""]),
        ("a -> b, c", ["a"], ["b", "c"]),
    ],
)
def test_a_tensor_expression_is_specs_with_or_without_an_arrow(text, operands, results):
    expression = parse_tensor(text)
    assert [str(spec) for spec in expression.operands] == operands
    assert (expression.results and [str(spec) for spec in expression.results]) == results


# ---------------------------------------------------------------------------- carets
#
# The second line of each is the first's carets: the message must point exactly there.

MALFORMED = {
    parse_declaration: [
        ("", "^", "expected at least one axis, found the end"),
        ("   ", "   ^", "expected at least one axis, found the end"),
        ("dp dp", "   ^^", "'dp' is declared twice"),
        ("dp=2 tp dp=2", "        ^^^^", "'dp' is declared twice"),
        ("dp=0", "   ^", "a size is a whole number from 1"),
        ("dp=-2", "   ^^", "a size is a whole number from 1"),
        ("dp=-01", "   ^^^", "a size is a whole number from 1"),
        (f"dp={LARGEST_SIZE + 1}", "   " + "^" * 15, "a size is a whole number from 1"),
        ("dp=9999999999999999999999", "   " + "^" * 22, "a size is a whole number from 1"),
        ("dp=", "  ^", "found '='"),
        ("dp=x", "  ^", "found '='"),
        ("dp 2", "   ^", "found '2'"),
        ("2 dp", "^", "found '2'"),
        ("2dp", "^^^", "a name doesn't start with a digit"),
        ("dp=2tp", "   ^^^", "a name doesn't start with a digit"),
        ("dp _ tp", "   ^", "found '_'"),
        ("dp (tp)", "   ^", "found '('"),
        ("dp, tp", "  ^", "found ','"),
        ("dp -> tp", "   ^^", "found '->'"),
        ("dp-tp", "  ^", "'-' has no meaning here"),
        ("dp.tp", "  ^", "'.' has no meaning here"),
        ("dp@tp", "  ^", "found '@'"),
        ("dp+tp", "  ^", "expected an axis name or the end of the list, found '+'"),
        ("dp ~", "   ^", "'~' is reserved"),
        ("<dp", "^", "'<' is reserved"),
        ("dp>", "  ^", "'>' is reserved"),
        ("dp[0]", "  ^", "'[' is reserved"),
        ("dp ]", "   ^", "']' is reserved"),
        ("dp: tp", "  ^", "':' is reserved"),
        ("dp;tp", "  ^", "';' is reserved"),
        ("dp tp h²", "      ^^", "a name is an identifier of Python: letters, digits and underscores"),
        ("dp µ", "   ^", "Python reads this name as 'μ'; write it so"),
        ("dp " + "x" * 256, "   " + "^" * 69, "a name has at most 255 characters"),
        ("dp\x00tp", "  ^^^^", r"'\x00' has no meaning here"),
        ("dp\u202etp", "^^^^^^^^^^", "a name is an identifier of Python"),
        ("\u0663", "^", "a name is an identifier of Python"),
    ],
    parse_equation: [
        ("", "^", "expected an axis name, found the end"),
        ("a", " ^", "expected '=', found the end"),
        ("a b", "   ^", "expected '=', found the end"),
        ("= a", "^", "expected an axis name, found '='"),
        ("a =", "   ^", "expected an axis name, found the end"),
        ("a = b = c", "      ^", "expected the end of the equation, found '='"),
        ("a == b", "   ^", "expected an axis name, found '='"),
        ("(a b = c", "     ^", "found '='"),
        ("a b) = c", "   ^", "expected '=', found ')'"),
        ("a = (b (c))", "       ^", "groups don't nest"),
        ("() = a", " ^", "expected an axis name in the group, found ')'"),
        ("a = (b) c", "        ^", "expected the end of the equation, found 'c'"),
        ("a = b b", "      ^", "'b' stands twice in one product"),
        ("a a = b", "  ^", "'a' stands twice in one product"),
        ("a -> b", "  ^^", "found '->'"),
        ("a = 4", "     ^", "expected '=', found the end"),  # a=4 is an item
    ],
    parse_mesh: [
        ("", "^", "expected '->', found the end"),
        ("a b", "   ^", "expected '->', found the end"),
        ("a -> b -> c", "       ^^", "found '->'"),
        ("(a b -> c", "     ^^", "found '->'"),
        ("(a (b c)) -> a", "   ^", "groups don't nest"),
        ("a) -> a", " ^", "found ')'"),
        ("() -> a", " ^", "expected an axis name in the group, found ')'"),
        ("x=(a b) -> a b", "^", "a group is named on the right of '->' only"),
        ("a -> _=(a)", "     ^", "found '_'"),
        ("a a -> a", "  ^", "'a' stands twice on one side"),
        ("a -> (a) a", "         ^", "'a' stands twice on one side"),
        ("... ... -> a", "    ^^^", "'...' stands once on a side"),
        ("a -> ... a ...", "           ^^^", "'...' stands once on a side"),
        ("a@b -> a", " ^", "found '@'"),
        ("(a ...) -> a", "   ^^^", "found '...'"),
        ("a -> b=", "      ^", "found '='"),
        (".. -> a", "^", "'.' has no meaning here"),
    ],
    parse_tensor: [
        ("b s@", "    ^", "expected an axis name, '*' or '(' after '@', found the end"),
        ("b s@tp@cp", "      ^", "found '@'"),
        ("@tp", "^", "expected a dim name, a number, '_', '...' or '(', found '@'"),
        ("b s@(cp", "       ^", "expected ')', found the end"),
        ("b s@(cp (tp))", "        ^", "groups don't nest"),
        ("b s@(cp 2)", "        ^", "expected ')', found '2'"),
        ("b s@2", "    ^", "found '2'"),
        ("b s@_", "    ^", "found '_'"),
        ("s@(* *)", "  ^^^^^", "'*' stands once in a place"),
        ("b (h d", "      ^", "expected ')', found the end"),
        ("b h d)", "     ^", "found ')'"),
        ("b ((h) d)", "   ^", "groups don't nest"),
        ("b (h (d))", "     ^", "groups don't nest"),
        ("(h@tp d)@dp e", "^^^^^^^^^^^", "a group has '@' inside or outside, not both"),
        ("(_ d)", " ^", "found '_'"),
        ("(h | d)", "   ^", "found '|'"),
        ("... ...", "    ^^^", "'...' stands once in a spec"),
        ("a ... (... b)", "       ^^^", "'...' stands once in a spec"),
        ("b | tp", "    ^^", "expected one of sum, mean, max, min, same with '@', or '*', after '|', found 'tp'"),
        ("b | sum", "       ^", "expected '@' and the axes over which 'sum' is pending, found the end"),
        ("b | sum tp", "        ^^", "expected '@' and the axes"),
        ("b | sum@", "        ^", "expected an axis name, '*' or '(' after '@', found the end"),
        ("b | sum@*", "        ^", "write '| *' for whatever is pending"),
        ("b | sum@(tp *)", "        ^^^^^^", "write '| *' for whatever is pending"),
        ("b | * sum@tp", "      ^^^^^^", "'*' stands alone after '|'"),
        ("b | sum@tp *", "           ^", "'*' stands alone after '|'"),
        ("b | sum@tp | max@cp", "           ^", "found '|'"),
        ("b -> c -> d", "       ^^", "expected the end of the expression, found '->'"),
        ("b=0", "  ^", "a size is a whole number from 1"),
        ("0", "^", "a size is a whole number from 1"),
        ("-1", "^^", "a size is a whole number from 1"),
        ("b=x", " ^", "found '='"),
        ("*", "^", "found '*'"),
        ("_=3", " ^", "found '='"),
        ("h[0]", " ^", "'[' is reserved"),
    ],
    parse_spec: [
        ("b s, d", "^^^^^^", "expected one spec, found 2"),
        ("b s -> s b", "    ^^", "expected one spec, found an expression with '->'"),
    ],
}


@pytest.mark.parametrize(
    ("parse", "text", "carets", "message"),
    [(parse, *row) for parse, rows in MALFORMED.items() for row in rows],
    ids=lambda value: repr(value) if isinstance(value, str) else getattr(value, "__name__", None),
)
def test_an_error_has_its_caret_under_the_offending_characters(parse, text, carets, message):
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    first, shown, below = (str(caught.value) if text else f"{caught.value}\n  \n  ^").split("\n")
    assert message in first
    assert shown == f"  {printable(text)}" or len(text) > 70
    assert below == f"  {carets}"


@given(st.text(max_size=60), st.data())
def test_a_caret_stands_under_what_it_is_about_in_any_text(text, data):
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    shown, below = pointed(text, start, stop).split("\n")
    marked = "".join(c for c, caret in zip(shown.ljust(len(below)), below, strict=False) if caret == "^")
    assert marked.rstrip() == printable(text[start:stop]).rstrip() or start == stop
    assert all(c.isprintable() for c in shown)


def test_in_a_long_text_the_error_shows_an_excerpt_around_the_place():
    text = "a " * 5000 + "]" + " b" * 5000
    with pytest.raises(ExpressionError) as caught:
        parse_tensor(text)
    _, shown, below = str(caught.value).split("\n")
    assert len(shown) < 100
    assert shown[below.index("^")] == "]"
    assert shown.startswith("  ...")
    assert shown.endswith("...")


def test_an_expression_error_keeps_its_place_when_pickled():
    with pytest.raises(ExpressionError) as caught:
        parse_spec("b s@")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert (again.text, again.start, again.stop) == ("b s@", 4, 4)


def test_a_name_that_is_nearly_a_known_one_is_suggested_and_others_list_what_is_known():
    assert suggestion("dp_shrad", ["dp_shard", "tp"]) == "; did you mean 'dp_shard'?"
    assert suggestion("qqqq", ["dp", "tp"]) == "; known: dp, tp"
    assert suggestion("qqqq", []) == ""
    assert suggestion("zz", [f"axis{i}" for i in range(40)]).endswith("axis11, ...")


def test_names_in_messages_are_escaped_and_cut():
    assert shortened("a\x1b[31m") == r"'a\x1b[31m'"
    assert len(shortened("x" * 10**6)) < 80


# ---------------------------------------------------------------------------- text round trips

NAMES = st.sampled_from(["a", "b", "heads", "_x", "sum", "A1", "q_k_v"])
AXES = st.sampled_from(["dp", "tp", "cp_2", "max"])
SIZES = st.none() | st.integers(1, LARGEST_SIZE)
PLACES = st.none() | st.builds(
    Place, st.lists(AXES | st.just("*"), max_size=3).filter(lambda names: names.count("*") <= 1).map(tuple)
)
FACTORS = st.builds(Factor, NAMES, SIZES, PLACES) | st.builds(Factor, st.none(), st.integers(1, 99), PLACES)
SINGLES = (FACTORS | st.builds(Factor, st.just("_"), st.none(), PLACES)).map(lambda factor: Dim((factor,)))
BARE = st.builds(Factor, NAMES, SIZES) | st.builds(Factor, st.none(), st.integers(1, 99))
GROUPS = st.builds(lambda fs: Dim(tuple(fs), grouped=True), st.lists(FACTORS, max_size=3)) | st.builds(
    lambda fs, place: Dim(tuple(fs), grouped=True, place=place), st.lists(BARE, max_size=3), PLACES
)
UNRESOLVED = st.builds(
    Pending,
    st.sampled_from(grammar.REDUCTIONS),
    st.builds(Place, st.lists(AXES, max_size=3).map(tuple)),
)
PENDING = st.none() | st.just((Pending("*"),)) | st.lists(UNRESOLVED, max_size=3).map(tuple)
SPECS = st.builds(Spec, st.lists(SINGLES | GROUPS, max_size=4).map(tuple), PENDING)


@given(SPECS)
def test_a_spec_parses_from_its_own_text_to_itself_unless_it_names_two_dims_alike(spec):
    names = [f.name for dim in spec.dims for f in dim.factors if f.name not in (None, "_", "...")]
    if len({*names}) < len(names):
        with pytest.raises(ExpressionError, match=r"dim '.*' stands twice in one tensor"):
            parse_spec(str(spec))
        return
    assert parse_spec(str(spec)) == spec
    assert str(parse_spec(str(spec))) == str(spec)


@given(st.lists(SPECS, min_size=1, max_size=3), st.none() | st.lists(SPECS, min_size=1, max_size=2))
def test_specs_keep_their_places_in_an_expression(operands, results):
    text = ", ".join(map(str, operands))
    text += "" if results is None else " -> " + ", ".join(map(str, results))
    expression = parse_tensor(text)
    assert list(expression.operands) == operands
    assert expression.results == (None if results is None else tuple(results))


@given(SPECS)
def test_the_spans_of_a_spec_cut_its_dims_out_of_the_text(spec):
    text = str(spec)
    for found in parse_tensor(text).operands[0].dims:
        assert text[slice(*found.span)] == str(found)
        for factor in found.factors:
            assert text[slice(*factor.span)] == str(factor)


def test_white_space_is_no_part_of_what_is_meant():
    assert parse_spec("b\n s  @\t( cp\r\ntp )|sum@ep") == parse_spec("b s@(cp tp) | sum@ep")


NAMES = ("b", "_h", "h_", "__", "_1", "β", "größe", "\u540d", "नाम", "lambda", "sum", "x" * 255)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_what_python_calls_an_identifier(name):
    assert name.isidentifier()
    for space in filter(str.isspace, map(chr, range(0x3001))):
        assert [item.name for item in parse_declaration(f"{space}{name}=2{space}tp{space}")] == [name, "tp"]
    assert str(parse_spec(f"s {name}@(tp {name}) | sum@{name}")) == f"s {name}@(tp {name}) | sum@{name}"
    assert leaves(parse_mesh(f"{name} -> ({name})").right)[0].name == name
    assert parse_equation(f"a = {name}").right[0].name == name


# ---------------------------------------------------------------------------- anything anyone types

SIGNS = [*"()@|,=*_ \t\n", "->", "...", "+", "~", "[", ".", "-", "\x00", "\u202e", "é", "\ud800", "\u0662"]
NUMBERS = ["1", "2", "-1", "0", "10", str(10**30), "9" * 5000]
WORDS = ["dp", "tp", "cp", "fsdp", "b", "s", "sum", "mean", "same", "x" * 300]
LIKELY = st.sampled_from([*SIGNS, *NUMBERS, *WORDS])


@given(st.text(max_size=40) | st.lists(LIKELY, max_size=14).map("".join) | st.lists(LIKELY, max_size=14).map(" ".join))
@example("dp=2\x00")
@example("\ud800")
@example("dp=100000000000000 tp=100000000000000")
@example("dp=281474976710656 tp=281474976710656 -> dp tp")
@example("(dp=-1 tp=-1) = a b")
@example("9" * 10_000)
@example("dp=" + "9" * 10_000)
def test_no_text_raises_anything_but_an_axes_error(text):
    for use in USES:
        message = refusal(AxesError, functools.partial(use, text))
        assert message != ""
        (message or "").encode()  # also with lone surrogates in the text


@pytest.mark.parametrize("text", [None, 3, 2.5, b"dp", ["dp"], {"dp": 2}, ("dp",), {"dp"}, object(), len])
def test_what_is_not_text_is_an_axes_error(text):
    uses = [*PARSERS, Mesh, MESH.rearrange, MESH.explain, MESH.define, MESH.sharding, lambda t: Mesh("dp=2", t)]
    for use in uses:
        with pytest.raises(ExpressionError, match="an expression is text; found"):
            use(text)
    for use in (MESH.layout, MESH.axis):
        with pytest.raises(AxesError):
            use(text)


HUGE = [
    "(" * 100_000,
    "(" * 10_000 + "a" + ")" * 10_000,
    ")" * 10_000,
    "a@" * 10_000,
    "a@(" * 10_000,
    "b (" + "c " * 10_000,
    "a=" * 10_000,
    "a = " * 5_000,
    "->" * 10_000,
    "|" * 10_000,
    "," * 10_000,
    "." * 10_001,
    "..." * 10_000,
    " " * 10_000,
    "a" * 10_000,
    "dp=" + "1" * 10_000,
    "1" * 10_000,
    "-" * 10_000,
    "\x00" * 10_000,
    "\u202e" * 10_000,
    "a " * 10_000,
    " ".join(f"a{i}" for i in range(4_000)),
    "x = " + " ".join(f"a{i}" for i in range(4_000)),
    " ".join(f"a{i}@tp" for i in range(4_000)) + " | " + "sum@tp " * 10_000,
    "dp cp tp -> " + " ".join(f"a{i}=1" for i in range(4_000)) + " dp cp tp",
    "(" + " ".join(f"a{i}" for i in range(4_000)) + ") cp tp -> dp",
]


@contextmanager
def recursion_limited_to(more: int) -> Iterator[None]:
    """Room for `more` frames above this one."""
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + more)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("text", HUGE, ids=lambda text: f"{text[:12]!r}x{len(text)}")
def test_huge_texts_end_as_anything_else_does_and_recurse_nowhere(text):
    for use in USES:
        with recursion_limited_to(60):
            try:
                use(text)
            except AxesError as error:
                message = str(error)
            else:
                message = ""
        assert len(message) < 4 * len(text)


def calls_for(use: Callable[[str], object], text: str) -> int:
    """How much work the text is, refused or not."""

    def tried() -> None:
        with contextlib.suppress(AxesError):
            use(text)

    return calls(tried)


GROWING: dict[str, tuple[Callable[[str], object], Callable[[int], str]]] = {
    "declaration": (Mesh, lambda n: " ".join(f"a{i}=1" for i in range(n))),
    "declaration, one to solve": (
        lambda text: Mesh(text, ranks=range(8)),
        lambda n: " ".join(f"a{i}=1" for i in range(n)) + " rest",
    ),
    "declaration without sizes": (Mesh, lambda n: " ".join(f"a{i}" for i in range(n))),
    "declaration, all twice": (Mesh, lambda n: " ".join(f"a{i // 2}" for i in range(n))),
    "equation": (
        lambda text: Mesh("dp=2", text),
        lambda n: "(dp) = " + " ".join(f"a{i}=1" for i in range(n)) + " rest",
    ),
    "equation, unknown": (lambda text: Mesh("dp=2", text), lambda n: "x = " + " ".join(f"a{i}" for i in range(n))),
    "mesh expression": (
        MESH.rearrange,
        lambda n: "dp cp tp -> " + " ".join(f"a{i}=1" for i in range(n)) + " dp cp tp",
    ),
    "mesh expression, split": (
        MESH.explain,
        lambda n: (
            "(" + (ones := " ".join(f"a{i}=1" for i in range(n))) + " x) cp tp -> cp tp x " + ones.replace("=1", "")
        ),
    ),
    "mesh expression, flattened": (
        MESH.explain,
        lambda n: "dp cp tp -> dp cp tp " + " ".join(f"x{i}=(a{i}=1)" for i in range(n)),
    ),
    "mesh expression, missing on the right": (
        MESH.explain,
        lambda n: "(" + " ".join(f"a{i}=1" for i in range(n)) + " x) cp tp -> cp tp",
    ),
    "spec": (MESH.sharding, lambda n: " ".join(f"a{i}" for i in range(n)) + " | sum@tp"),
    "spec of groups": (MESH.sharding, lambda n: " ".join(f"(a{i}=2 b{i})" for i in range(n)) + " s@tp"),
    "spec of one group": (MESH.sharding, lambda n: "(h@tp " + " ".join(f"a{i}=1" for i in range(n)) + ")"),
    "spec, an axis again and again": (MESH.sharding, lambda n: "s@(" + "tp " * n + ")"),
    "einsum": (parse_tensor, lambda n: ", ".join(f"a{i} b@tp" for i in range(n)) + " -> b"),
    "places": (parse_tensor, lambda n: "s@(" + " ".join(f"a{i}" for i in range(n)) + ")"),
    "parentheses": (parse_tensor, lambda n: "(" * n),
}


@pytest.mark.parametrize("name", GROWING)
def test_work_grows_no_faster_than_the_text(name):
    use, text = GROWING[name]
    small, large = calls_for(use, text(200)), calls_for(use, text(2000))
    assert large < 14 * small + 2000


def test_parsing_is_cached_by_text_and_what_is_absurdly_long_is_not_kept():
    assert parse_tensor("b s@tp d") is parse_tensor("b s@tp d")
    long = " ".join(f"a{i}" for i in range(2000))
    assert parse_tensor(long) is not parse_tensor(long)
