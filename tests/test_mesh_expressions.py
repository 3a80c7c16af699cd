"""Mesh expressions do to a mesh what einops does to an array of its ranks."""

from __future__ import annotations

from dataclasses import dataclass

import einops
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axes.algebra import mesh_expression
from axes.algebra.errors import ExpressionError, MeshError, SizeError
from axes.algebra.mesh import Mesh

from .strategies import factorizations


@dataclass(frozen=True)
class Case:
    """A mesh expression, the same for einops, and the names of the axes that it must give."""

    mesh: Mesh
    expression: str
    pattern: str
    sizes: dict[str, int]
    """Of every name on the left, as einops wants them."""
    keywords: dict[str, int]
    names: tuple[str, ...]


@st.composite
def expressions(draw: st.DrawFn) -> Case:
    """A mesh of up to 24 ranks; axes split, reordered, flattened with and without a name, ones added."""
    total: list[int] = []
    for size in draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 6]), min_size=1, max_size=4)):
        if int(np.prod(total)) * size <= 24:
            total.append(size)
    names = ["dp", "cp", "tp", "pp"][: len(total)]
    mesh = Mesh(
        " ".join(f"{n}={s}" for n, s in zip(names, total, strict=True)),
        ranks=draw(st.permutations(range(int(np.prod(total))))),
    )
    # The left side: some axes are split. Of each split, one size may be left out.
    hidden_from, hidden_to = sorted(draw(st.tuples(st.integers(0, len(names)), st.integers(0, len(names)))))
    dots = draw(st.booleans())
    left, einops_left, sizes, keywords, leaves = [], [], {}, {}, []
    for i, (name, size) in enumerate(zip(names, total, strict=True)):
        if dots and hidden_from <= i < hidden_to:
            continue
        if dots and i == hidden_to:
            left.append("...")
            einops_left.append("...")
        if draw(st.booleans()):
            cut = draw(factorizations(size, 3))
            parts = [f"{name}{letter}" for letter in "abc"[: len(cut)]]
            unknown = draw(st.integers(-1, len(cut) - 1))
            inner = []
            for j, (part, n) in enumerate(zip(parts, cut, strict=True)):
                sizes[part] = n
                if j == unknown:
                    inner.append(draw(st.sampled_from([part, f"{part}=-1"])))
                elif draw(st.booleans()):
                    inner.append(f"{part}={n}")
                else:
                    inner.append(part)
                    keywords[part] = n
            left.append(f"({' '.join(inner)})")
            einops_left.append(f"({' '.join(parts)})")
            leaves += parts
        else:
            left.append(name)
            einops_left.append(name)
            leaves.append(name)
    if dots and hidden_to == len(names):
        left.append("...")
        einops_left.append("...")
    hidden = names[hidden_from:hidden_to] if dots else []
    # The right side: all of it in any order with ones among it, some of it in groups.
    ones = [f"one{i}" for i in range(draw(st.integers(0, 2)))]
    items = list(draw(st.permutations([*leaves, *ones, *(["..."] if dots else [])])))
    right, einops_right, result = [], [], []
    while items:
        if items[0] == "...":
            items.pop(0)
            right.append("...")
            einops_right.append("...")
            result += hidden
            continue
        stop = items.index("...") if "..." in items else len(items)
        count = draw(st.integers(1, min(3, stop)))
        taken, items = items[:count], items[count:]
        texts = [f"{n}=1" if n in ones else n for n in taken]
        einops_texts = ["1" if n in ones else n for n in taken]
        if count == 1 and draw(st.booleans()):
            right.append(texts[0])
            einops_right.append(einops_texts[0])
            result.append(taken[0])
            continue
        label = draw(st.sampled_from(["", f"flat{len(right)}"]))
        right.append(f"{label}{'=' if label else ''}({' '.join(texts)})")
        einops_right.append(f"({' '.join(einops_texts)})")
        result.append(label or "_".join(taken))
    return Case(
        mesh,
        f"{' '.join(left)} -> {' '.join(right)}",
        f"{' '.join(einops_left)} -> {' '.join(einops_right)}",
        sizes,
        keywords,
        tuple(result),
    )


def grid(mesh: Mesh) -> np.ndarray:
    return np.array(mesh.universe.ranks).reshape(list(mesh.shape.values()))


@given(expressions())
def test_a_mesh_expression_does_to_ranks_what_einops_does_to_an_array_of_them(case):
    mesh = case.mesh.rearrange(case.expression, **case.keywords)
    expected = einops.rearrange(grid(case.mesh), case.pattern, **case.sizes)
    assert mesh.axis_names == case.names
    assert list(mesh.shape.values()) == list(expected.shape)
    assert np.array_equal(np.array(mesh.ranks).reshape(expected.shape), expected)
    assert mesh.universe == case.mesh.universe
    for rank in case.mesh.universe.ranks:
        where = mesh.at(rank).coordinate
        assert expected[tuple(where.values())] == rank


@given(expressions())
def test_every_name_that_an_expression_makes_joins_the_namespace_and_old_names_stay(case):
    mesh = case.mesh.rearrange(case.expression, **case.keywords)
    assert dict(list(mesh.namespace.items())[: case.mesh.ndim]) == dict(case.mesh.namespace)
    assert set(mesh.axis_names) <= set(mesh.names)
    assert {name: mesh.names[name] for name in case.sizes} == case.sizes


@given(expressions())
def test_an_expression_can_be_undone_by_indexing_with_the_old_names(case):
    mesh = case.mesh.rearrange(case.expression, **case.keywords)
    assert mesh[case.mesh.axis_names].ranks == case.mesh.ranks
    assert mesh[case.mesh.axis_names].layouts == case.mesh.layouts


@given(expressions())
def test_the_view_is_kept_and_the_result_is_cached(case):
    rank = case.mesh.universe.ranks[-1]
    seen = case.mesh.at(rank).rearrange(case.expression, **case.keywords)
    assert seen.rank == rank
    assert seen == case.mesh.rearrange(case.expression, **case.keywords)
    assert case.mesh.rearrange(case.expression, **case.keywords) is case.mesh.rearrange(
        case.expression, **case.keywords
    )


@given(expressions())
def test_the_printed_program_does_what_the_expression_does(case):
    """Runs the program from its printed text alone, on an array of ranks."""
    found = case.mesh.explain(case.expression, **case.keywords)
    lines = [found.heading, *("  " + step for section in found.sections for (step,) in section.rows)]
    array, names = grid(case.mesh), list(case.mesh.axis_names)
    assert lines[0].startswith(f"({' '.join(names)}) read as  ")
    for line in lines[1:]:
        kind, _, rest = line.strip().partition(" ")
        before, _, after = rest.strip().rpartition("  ->  ")

        def listed(text: str) -> list[str]:
            # `a 2:4, b (2:2, 2:8)`: names are what stands before a layout.
            return [
                word for word in text.replace("(", " ").replace(")", " ").replace(",", " ").split() if ":" not in word
            ]

        def sized(text: str) -> list[int]:
            parts = text.replace("), ", ")|").split("|") if "(" in text else text.split(", ")
            found: list[int] = []
            for part in parts:
                for one in part.split(", ") if "(" not in part else [part]:
                    words = one.replace("(", " ").replace(")", " ").replace(",", " ").split()
                    found.append(int(np.prod([int(w.split(":")[0]) for w in words[1:]])))
            return found

        if kind == "nothing":
            assert line == "  nothing to do"
        elif kind == "split":
            (name,) = listed(before)
            at = names.index(name)
            shape = list(array.shape)
            array = array.reshape([*shape[:at], *sized(after), *shape[at + 1 :]])
            names[at : at + 1] = listed(after)
        elif kind == "insert":
            names += listed(after or rest)
            array = array.reshape([*array.shape, *[1] * len(listed(after or rest))])
        elif kind == "permute":
            order = rest.split()
            array = array.transpose([names.index(name) for name in order])
            names = order
        else:
            assert kind == "flatten"
            old, (new,) = listed(before), listed(after)
            at = names.index(old[0])
            assert names[at : at + len(old)] == old
            shape = list(array.shape)
            array = array.reshape([*shape[:at], -1, *shape[at + len(old) :]])
            names[at : at + len(old)] = [new]
    result = case.mesh.rearrange(case.expression, **case.keywords)
    assert tuple(names) == result.axis_names
    assert np.array_equal(array, grid_of_axes(result))


def grid_of_axes(mesh: Mesh) -> np.ndarray:
    return np.array(mesh.ranks).reshape(list(mesh.shape.values()))


# ---------------------------------------------------------------------------- examples


def shape_of(mesh: Mesh, expression: str, **sizes: int) -> dict[str, int]:
    return mesh.rearrange(expression, **sizes).shape


DP8 = Mesh("dp=8 tp=2")
THREE = Mesh("dp=2 cp=3 tp=4", "fsdp = dp cp", "all = dp cp tp")


@pytest.mark.parametrize(
    ("mesh", "expression", "shape"),
    [
        (DP8, "(a=2 b) tp -> a b tp", {"a": 2, "b": 4, "tp": 2}),
        (DP8, "(a=2 b) tp -> tp b a", {"tp": 2, "b": 4, "a": 2}),
        (DP8, "dp tp -> dp tp", {"dp": 8, "tp": 2}),
        (DP8, "dp tp -> (dp tp)", {"dp_tp": 16}),
        (DP8, "dp tp -> world=(dp tp)", {"world": 16}),
        (DP8, "dp tp -> x=(dp) tp", {"x": 8, "tp": 2}),
        (DP8, "dp tp -> (dp) tp", {"dp": 8, "tp": 2}),
        (DP8, "dp tp -> pp=1 dp ep=1 tp", {"pp": 1, "dp": 8, "ep": 1, "tp": 2}),
        (DP8, "dp tp -> x=(dp one=1) tp", {"x": 8, "tp": 2}),
        (DP8, "... -> ...", {"dp": 8, "tp": 2}),
        (DP8, "... tp -> tp ...", {"tp": 2, "dp": 8}),
        (DP8, "dp ... -> ... dp", {"tp": 2, "dp": 8}),
        (DP8, "dp tp ... -> tp ... dp", {"tp": 2, "dp": 8}),
        (DP8, "(a b=4) ... -> ... x=(b a)", {"tp": 2, "x": 8}),
        (DP8, "(dp one=1) tp -> one dp tp", {"one": 1, "dp": 8, "tp": 2}),
        (THREE, "... tp -> tp ...", {"tp": 4, "dp": 2, "cp": 3}),
        (THREE, "dp cp tp -> fsdp=(dp cp) tp", {"fsdp": 6, "tp": 4}),
        (THREE["fsdp", "tp"], "(dp=2 cp) tp -> dp cp tp", {"dp": 2, "cp": 3, "tp": 4}),
        (THREE["fsdp", "tp"], "(dp cp) tp -> dp cp tp", {"dp": 2, "cp": 3, "tp": 4}),
        (THREE["tp", "fsdp"], "tp fsdp -> fsdp tp", {"fsdp": 6, "tp": 4}),
    ],
)
def test_the_grammar_by_example(mesh, expression, shape):
    found = mesh.rearrange(expression)
    assert found.shape == shape
    assert list(found.shape) == list(shape)


def test_names_that_the_mesh_knows_need_no_sizes():
    assert THREE["all",].rearrange("(fsdp tp) -> fsdp tp").shape == {"fsdp": 6, "tp": 4}


def test_a_rearranged_name_is_the_same_layout_as_an_equation_gives():
    by_expression = Mesh("dp=2 cp=3 tp=4").rearrange("dp cp tp -> x=(tp dp) cp")
    by_equation = Mesh("dp=2 cp=3 tp=4", "x = tp dp")
    assert by_expression.layout("x") == by_equation.layout("x")
    assert by_expression == by_equation["x", "cp"]


def test_explain_prints_the_reading_and_the_operations():
    assert str(DP8.explain("(a b) tp -> pp=1 x=(tp a) b", a=2)).splitlines() == [
        "(dp tp) read as  (a=2 b=4) tp=2  ->  pp=1 x=(tp=2 a=2) b=4",
        "  split    dp 8:2  ->  a 2:8, b 4:2",
        "  insert   pp 1:1",
        "  permute  pp tp a b",
        "  flatten  tp 2:1, a 2:8  ->  x (2:1, 2:8)",
    ]
    assert str(DP8.explain("dp tp -> dp tp")).splitlines()[1:] == ["  nothing to do"]
    assert repr(DP8.explain("dp tp -> tp dp")) == str(DP8.explain("dp tp -> tp dp"))


def test_a_program_runs_to_the_axes_and_the_names_that_it_made():
    program = mesh_expression.compile(DP8.axes, DP8.namespace, "(a=2 b) tp -> x=(tp a) b", {})
    axes, made = program.run()
    assert list(axes) == ["x", "b"]
    assert set(made) == {"a", "b", "x", "tp"}
    assert [step.kind for step in program.steps] == ["split", "permute", "flatten"]


# ---------------------------------------------------------------------------- errors

ERRORS = [
    ("dp -> dp", "^^^", "the mesh has 2 axes (dp tp), the left side describes 1"),
    ("dp tp cp -> dp tp cp", "^^^^^^^^^", "the mesh has 2 axes (dp tp), the left side describes 3"),
    ("dp tp cp ... -> dp tp cp ...", "^^^^^^^^^^^^^", "the mesh has 2 axes (dp tp), the left side describes 3"),
    ("-> dp tp", "^", "the left side describes 0"),
    ("tp dp -> dp tp", "^^", "the axis in this place is 'dp', not 'tp'"),
    ("dp_ tp -> dp tp", "^^^", "the axis in this place is 'dp', not 'dp_'; did you mean 'dp'?"),
    ("dp cp -> dp cp", "   ^^", "the axis in this place is 'tp', not 'cp'"),
    ("dp tp -> dp", "      ^^", "'tp' must be on the right, too; for a sub-mesh write mesh[\"dp\"]"),
    ("dp tp ->", "      ^^", "'dp' and 'tp' must be on the right, too; for a sub-mesh write mesh[...]"),
    ("(a=2 b) tp -> a tp", "           ^^", '\'b\' must be on the right, too; for a sub-mesh write mesh["a", "tp"]'),
    ("dp tp -> dp tp cp", "               ^^", "'cp' isn't on the left; a new axis has size one, like pp=1"),
    (
        "dp tp -> dp tpp tp",
        "            ^^^",
        "'tpp' isn't on the left; a new axis has size one, like pp=1; did you mean 'tp'?",
    ),
    ("dp tp -> dp tp cp=2", "               ^^^^", "'cp' isn't on the left; a new axis has size one, like pp=1"),
    ("dp tp -> ... dp tp", "         ^^^", "'...' stands on the right only where it stands on the left"),
    ("... tp -> tp", "^^^", "'...' stands on the left, so it must stand on the right"),
    ("dp tp -> x=(dp) x=(tp)", "                ^^^^^^", "the result would have two axes 'x'"),
    ("dp tp -> tp=(dp) x=(tp)", "         ^^^^^^^", "'tp' is another axis of the expression; take another name"),
    (
        "(a b=2 c=2) tp -> a=(b c) x=(a) tp",
        "                  ^^^^^^^",
        "'a' is another axis of the expression; take another name",
    ),
    ("dp tp -> dp_tp=1 (dp tp)", "                 ^^^^^^^", "the result would have two axes 'dp_tp'"),
    ("dp tp -> a=(b=1) b=(a=1) dp tp", "         ^^^^^^^", "'a' is another axis of the expression; take another name"),
]


@pytest.mark.parametrize(("expression", "carets", "message"), ERRORS)
def test_an_expression_that_is_not_about_this_mesh_is_an_error_under_its_place(expression, carets, message):
    for use in (DP8.rearrange, DP8.explain):
        with pytest.raises(ExpressionError) as caught:
            use(expression)
        first, shown, below = str(caught.value).splitlines()
        assert first == message or message in first
        assert shown == f"  {expression}"
        assert below == f"  {carets}"


@pytest.mark.parametrize(
    ("mesh", "expression", "message"),
    [
        (
            DP8,
            "dp tp -> dp=(dp tp)",
            "'dp' already is the layout 8:2, not 16:1; take another name\n  dp tp -> dp=(dp tp)\n           ^^^^^^^^^^",
        ),
        (DP8, "(dp x=2) tp -> dp x tp", "dp=8 * x=2 is 16, not 8"),
        (THREE, "dp cp tp -> fsdp=(cp dp) tp", "'fsdp' already is the layout 6:4, not (3:4, 2:12)"),
        (DP8.define("p = dp"), "(p=2 q) tp -> p q tp", "'p' has size 8 in the mesh; found p=2"),
        (DP8.define("(dp) = p q", p=2), "(q p) tp -> p q tp", "'q' already is the layout 4:2, not 4:4"),
        (DP8.define("(dp) = p q", p=2), "dp tp -> dp tp p=1", "'p' has size 2 in the mesh; found p=1"),
        (DP8, "(a=2 b) tp -> dp=(b) a tp", "'dp' already is the layout 8:2, not 4:2"),
    ],
)
def test_a_name_that_means_other_ranks_already_is_an_error(mesh, expression, message):
    with pytest.raises((MeshError, SizeError, ExpressionError)) as caught:
        mesh.rearrange(expression)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("expression", "sizes", "message"),
    [
        ("(a b) tp -> a b tp", {}, "the sizes of 'a' and 'b' don't follow from  a * b = 8"),
        ("(a b) tp -> a b tp", {"a": 3}, "8 doesn't divide by 3:  a=3 * b = 8    (axis 'dp' has size 8)"),
        ("(a=2 b=2) tp -> a b tp", {}, "a=2 * b=2 is 4, not 8    (axis 'dp' has size 8)"),
        ("dp tp -> x=(dp tp)", {"x": 8}, "8 isn't 16:  x=8 = dp=8 * tp=2    (x=(dp tp))"),
        ("(a b) tp -> a b tp", {"c": 3}, "a size is given for 'c', which isn't in the expression"),
        (
            "dp tp -> (dp tp)",
            {"dp_tp": 16},
            "a size is given for 'dp_tp', which isn't in the expression; known: dp, tp",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_a_size_error_with_the_equation(expression, sizes, message):
    with pytest.raises(SizeError) as caught:
        DP8.rearrange(expression, **sizes)
    assert message in str(caught.value)


def test_a_split_that_cuts_a_digit_says_which():
    mesh = Mesh("a=2 b=3", "x = b a")["x",]
    with pytest.raises(SizeError, match=r"\(3:1, 2:3\) doesn't split into \(2, 3\): it cuts 2:3"):
        mesh.rearrange("(p=2 q=3) -> p q")


def test_a_name_hidden_in_dots_cannot_be_made_again():
    with pytest.raises(ExpressionError, match="two axes 'tp'") as caught:
        Mesh("dp=2 tp=1").rearrange("(tp dp) ... -> tp dp ...")
    assert str(caught.value).splitlines()[-1] == "  " + " " * 21 + "^^^"
