"""Sizes that are left out are found again; contradictions show their equation with its numbers."""

from __future__ import annotations

import contextlib
import inspect
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import axes
import axes.nn
from axes.algebra.errors import AxesError, MeshError, SizeError
from axes.algebra.grammar import LARGEST_SIZE, Item
from axes.algebra.mesh import Mesh
from axes.algebra.sizes import OPTIONS, Product, given_sizes, solve, written_sizes

from .strategies import factorizations

# ---------------------------------------------------------------------------- found again


@st.composite
def solvable(draw):
    """Products of sizes that hold, all sizes, and which of them are enough to know."""
    sizes: dict[str, int] = {}
    products, known = [], set()
    for index in range(draw(st.integers(1, 5))):
        # A product of some names that exist, if any, is equal to a product of fresh ones.
        left = tuple(draw(st.lists(st.sampled_from(sorted(sizes)), max_size=3, unique=True))) if sizes else ()
        total = math.prod(sizes[name] for name in left) or 1
        factor = 1
        if not left:
            total = factor = draw(st.integers(1, 720))
        cut = draw(factorizations(total))
        right = tuple(f"n{index}{letter}" for letter in "abcdef"[: len(cut)])
        sizes.update(zip(right, cut, strict=True))
        products.append(Product(right, left, factor, f"equation {index}"))
        unknown = draw(st.sampled_from(right))
        known |= set(right) - {unknown}
    return draw(st.permutations(products)), sizes, known


@given(solvable(), st.data())
def test_sizes_that_are_left_out_are_found_again_in_any_order_of_the_equations(case, data):
    products, sizes, enough = case
    more = data.draw(st.sets(st.sampled_from(sorted(sizes))))
    found = solve(products, {name: sizes[name] for name in sizes if name in enough | more})
    assert found == sizes


@given(solvable(), st.data())
def test_a_size_that_is_wrong_is_a_contradiction_and_never_a_wrong_answer(case, data):
    products, sizes, _ = case
    name = data.draw(st.sampled_from(sorted(sizes)))
    wrong = {**sizes, name: sizes[name] + data.draw(st.integers(1, 7))}
    with pytest.raises(SizeError) as caught:
        solve(products, wrong)
    assert "equation" in str(caught.value)
    assert f"{name}={wrong[name]}" in str(caught.value)


@given(solvable(), st.data())
def test_what_is_found_always_fulfils_every_equation(case, data):
    products, sizes, _ = case
    given_ = {name: data.draw(st.integers(1, 12)) for name in data.draw(st.sets(st.sampled_from(sorted(sizes))))}
    try:
        found = solve(products, given_)
    except SizeError:
        return
    for p in products:
        left, right = (math.prod(found[name] for name in side) for side in (p.left, p.right))
        assert left == right * p.factor
    assert all(found[name] == size for name, size in given_.items())


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5), st.data())
def test_a_mesh_solves_the_axis_that_is_left_out_from_the_number_of_ranks(sizes, data):
    left_out = data.draw(st.integers(0, len(sizes) - 1))
    how = data.draw(st.sampled_from(["nothing", "inline -1", "keyword -1", "keyword None", "sizes -1"]))
    names = [f"a{i}" for i in range(len(sizes))]
    inline = [data.draw(st.booleans()) for _ in sizes]
    texts, keywords = [], {}
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        if i == left_out:
            texts.append(f"{name}=-1" if how == "inline -1" else name)
        else:
            texts.append(f"{name}={size}" if inline[i] else name)
            keywords.update({} if inline[i] else {name: size})
    if how.startswith("keyword"):
        keywords[names[left_out]] = -1 if how.endswith("-1") else None
    more = {names[left_out]: -1} if how == "sizes -1" else None
    mesh = Mesh(" ".join(texts), ranks=range(math.prod(sizes)), sizes=more, **keywords)
    assert mesh.shape == dict(zip(names, sizes, strict=True))


def test_the_example_of_the_design_needs_no_arithmetic_from_the_user():
    mesh = Mesh(
        "pp dp_replicate dp_shard cp tp",
        "fsdp  = dp_shard cp",
        "batch = dp_replicate dp_shard",
        "loss  = batch cp",
        "(dp_shard cp tp) = efsdp ep",
        pp=2, dp_replicate=1, cp=2, tp=4, ep=8, ranks=range(64),
    )  # fmt: skip
    assert mesh.shape == {"pp": 2, "dp_replicate": 1, "dp_shard": 4, "cp": 2, "tp": 4}
    assert mesh.names["efsdp"] == 4
    assert mesh.names["fsdp"] == mesh.names["loss"] == 8


def test_sizes_follow_through_chains_of_equations_in_both_directions():
    assert Mesh("a b", "c = a b", "(c) = d e", d=2, e=6, a=3).shape == {"a": 3, "b": 4}
    assert Mesh("a", "(a) = b c", "(b) = d e", "(c) = f g", d=2, e=3, f=5, g=7).shape == {"a": 210}


def test_without_a_number_of_ranks_the_sizes_say_it():
    assert Mesh("dp=2 tp", tp=3).size == 6
    assert Mesh("dp tp", "x = dp tp", dp=2, x=6).shape == {"dp": 2, "tp": 3}


# ---------------------------------------------------------------------------- contradictions


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Mesh("dp tp=3", ranks=range(8)),
            "8 doesn't divide by 3:  dp * tp=3 = 8    (the axes over the 8 ranks)",
        ),
        (lambda: Mesh("dp=2 tp=2", ranks=range(8)), "dp=2 * tp=2 is 4, not 8    (the axes over the 8 ranks)"),
        (lambda: Mesh("dp=4 tp=4", ranks=range(8)), "dp=4 * tp=4 is 16, not 8    (the axes over the 8 ranks)"),
        (lambda: Mesh("dp=16 tp", ranks=range(8)), "8 doesn't divide by 16:  dp=16 * tp = 8"),
        (lambda: Mesh("dp tp", ranks=range(8)), "the sizes of 'dp' and 'tp' don't follow from  dp * tp = 8"),
        (lambda: Mesh("dp tp", ranks=range(8)), "give all but one of them, like dp=2"),
        (lambda: Mesh("dp tp=2"), "the size of 'dp' is open: give it, like dp=2, or the number of ranks"),
        (
            lambda: Mesh("dp=4 tp=2", "(dp tp) = a ep", ep=3),
            "8 doesn't divide by 3:  dp=4 * tp=2 = a * ep=3    ((dp tp) = a ep)",
        ),
        (lambda: Mesh("dp=4 tp=2", "x = dp tp", x=4), "4 isn't 8:  x=4 = dp=4 * tp=2    (x = dp tp)"),
        (lambda: Mesh("dp=4 tp=2", "(dp tp) = a b"), "the sizes of 'a' and 'b' don't follow from  dp=4 * tp=2 = a * b"),
        (lambda: Mesh("dp=2", dp=4), "'dp' is given two sizes: 4 and 2"),
        (lambda: Mesh("dp", "x = dp=4", dp=2), "'dp' is given two sizes: 2 and 4"),
        (lambda: Mesh("dp", sizes={"dp": 3}, dp=2), "'dp' is given two sizes: 2 and 3"),
        (lambda: Mesh("dp=8").rearrange("(a b) -> a b", sizes={"a": 4}, a=2), "'a' is given two sizes: 2 and 4"),
        (lambda: Mesh("dp=8").rearrange("(a b) -> a b"), "the sizes of 'a' and 'b' don't follow from  a * b = 8"),
        (
            lambda: Mesh("dp=8").rearrange("(a=3 b) -> a b"),
            "8 doesn't divide by 3:  a=3 * b = 8    (axis 'dp' has size 8)",
        ),
        (lambda: Mesh("a=2 b=2").rearrange("a b -> x=(a b)", x=8), "8 isn't 4:  x=8 = a=2 * b=2    (x=(a b))"),
        (lambda: Mesh("tp=2").sharding("(h=4@tp d)", h=2), "'h' is given two sizes: 2 and 4"),
        (
            lambda: Mesh("tp=2").sharding("(h=4@tp d)").local_shape((6,)),
            "(h=4@tp d) = 6    (dim of [6] in '(h=4@tp d)')",
        ),
        (lambda: Mesh("tp=2").sharding("(h@tp d)").local_shape((6,)), "more than one size is missing in  (h@tp d) = 6"),
        (lambda: Mesh("tp=2").sharding("s=4").local_shape((6,)), "s=4 = 6    (dim of [6] in 's=4')"),
        (
            lambda: Mesh(" ".join(f"a{i}={2**24}" for i in range(3)), "x = a0 a1 a2"),
            f"more than {LARGEST_SIZE} in one product:  x = a0=16777216 * a1=16777216",
        ),
        (
            lambda: Mesh(" ".join(f"a{i}={2**24}" for i in range(3))),
            f"a mesh has at most {LARGEST_SIZE} ranks; the last 3 of its axes have {2**72}",
        ),
    ],
)
def test_a_contradiction_shows_the_equation_with_its_numbers(make, message):
    with pytest.raises(SizeError) as caught:
        make()
    assert message in str(caught.value)


def test_a_very_long_equation_is_shown_by_its_first_names():
    names = [f"a{i}" for i in range(40)]
    with pytest.raises(SizeError) as caught:
        Mesh(" ".join(f"{name}=1" for name in names), ranks=range(2))
    assert re.search(r"a0=1 \* a1=1 .* a11=1 \* \.\.\. is 1, not 2 ", str(caught.value))


# ---------------------------------------------------------------------------- who may have a size


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Mesh("dp_shard tp", dp_shrad=2),
            "a size is given for 'dp_shrad', which isn't in the expression; did you mean 'dp_shard'?",
        ),
        (lambda: Mesh("dp tp", qqq=2), "a size is given for 'qqq', which isn't in the expression; known: dp, tp"),
        (lambda: Mesh("dp tp", sizes={"x y": 2}), "a size is given for 'x y', which"),
        (lambda: Mesh("dp tp", sizes={3: 2}), "a size is given for '3', which"),
        (
            lambda: Mesh("dp=8").rearrange("(a b) -> a b", aa=2),
            "a size is given for 'aa', which isn't in the expression; did you mean 'a'?",
        ),
        (lambda: Mesh("dp=8").rearrange("dp -> dp", tp=-1), "a size is given for 'tp', which"),
        (lambda: Mesh("dp=8").define("x = dp", y=2), "a size is given for 'y', which"),
        (
            lambda: Mesh("dp=8").sharding("heads", head=2),
            "a size is given for 'head', which isn't in the spec; did you mean 'heads'?",
        ),
        (lambda: Mesh("dp=8").sharding("heads@dp", dp=2), "a size is given for 'dp', which isn't in the spec"),
    ],
)
def test_a_size_for_a_name_that_is_not_there_is_an_error_with_a_suggestion(make, message):
    with pytest.raises(SizeError) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [0, -2, 2.0, 2.5, "2", True, False, LARGEST_SIZE + 1, 10**5000, -(10**5000), [2], (), object(), float("nan")],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_whole_number_from_one_is_no_size(value):
    makes = [
        lambda: Mesh("dp", dp=value),
        lambda: Mesh("dp", sizes={"dp": value}),
        lambda: Mesh("dp=8").rearrange("(a b) -> a b", a=value),
        lambda: Mesh("dp=8").explain("(a b) -> a b", a=value),
        lambda: Mesh("dp=8").define("(dp) = a b", a=value),
        lambda: Mesh("dp=8").sharding("(h d@dp)", h=value),
    ]
    name = re.compile(r"the size of '(dp|a|h)' is a whole number from 1 to|there is no option '(dp|a|h)'")
    for make in makes:
        with pytest.raises(SizeError) as caught:
            make()
        assert name.match(str(caught.value))


def test_a_misspelled_option_is_held_against_those_of_all_functions_that_take_sizes():
    options = set()
    for function in (getattr(home, name) for home in (axes, axes.nn) for name in home.__all__):
        with contextlib.suppress(TypeError, ValueError):  # a value that isn't called, or has no signature
            parameters = inspect.signature(function).parameters.values()
            if any(p.kind is p.VAR_KEYWORD for p in parameters):
                options |= {p.name for p in parameters if p.default is not p.empty and len(p.name) > 1}
    assert {*OPTIONS} == options - {"expression", "kind", "op", "table"}  # what stands in its place, without a name


def test_integers_of_numpy_are_sizes():
    assert Mesh("dp tp=2", dp=np.int64(4)).shape == {"dp": 4, "tp": 2}
    assert Mesh("dp=8").rearrange("(a b) -> a b", a=np.int32(4)).shape == {"a": 4, "b": 2}


def test_a_size_that_was_cached_as_an_integer_is_not_accepted_as_another_kind_of_number():
    mesh = Mesh("dp=8")
    assert mesh.rearrange("(a b) -> a b", a=2).shape == {"a": 2, "b": 4}
    assert mesh.rearrange("(a b) -> a b", b=1).shape == {"a": 8, "b": 1}
    for wrong in ({"a": 2.0}, {"b": True}):
        with pytest.raises(SizeError):
            mesh.rearrange("(a b) -> a b", **wrong)


@pytest.mark.parametrize("sizes", [5, "ab", [("dp", 2)], {"dp"}])
def test_sizes_that_are_no_mapping_are_a_size_error(sizes):
    for make in (
        lambda: Mesh("dp", sizes=sizes),
        lambda: Mesh("dp=2").rearrange("dp -> dp", sizes=sizes),
        lambda: Mesh("dp=2").explain("dp -> dp", sizes=sizes),
        lambda: Mesh("dp=2").define("x = dp", sizes=sizes),
        lambda: Mesh("dp=2").sharding("b@dp", sizes=sizes),
    ):
        with pytest.raises(SizeError, match="sizes is a mapping from names to sizes; found"):
            make()


@pytest.mark.parametrize("name", ["sizes", "ranks", "ranks_per_node", "binding"])
def test_an_axis_may_be_named_as_a_parameter_is_with_its_size_in_sizes(name):
    mesh = Mesh(f"{name} tp", sizes={name: 4}, tp=2)
    assert mesh.shape == {name: 4, "tp": 2}
    assert mesh.rearrange(f"{name} tp -> tp {name}").shape == {"tp": 2, name: 4}


@pytest.mark.parametrize("name", ["self", "declaration", "equations", "expression", "spec", "mesh", "cls", "keywords"])
def test_a_name_that_only_looks_like_a_parameter_takes_its_size_as_a_keyword(name):
    mesh = Mesh(f"{name} tp=2", **{name: 4})
    assert mesh.shape == {name: 4, "tp": 2}
    split = Mesh("x=8").rearrange(f"({name} b) -> {name} b", **{name: 2})
    assert split.shape == {name: 2, "b": 4}
    assert str(Mesh("x=8").explain(f"({name} b) -> {name} b", **{name: 2})).count(f"{name}=2") == 2
    assert Mesh("x=8").define(f"(x) = {name} b", **{name: 2}).names[name] == 2
    assert Mesh("x=2").sharding(f"({name} b@x)", **{name: 3}).local_shape((12,)) == (6,)


def test_a_dim_named_sizes_takes_its_size_in_sizes():
    assert Mesh("x=2").sharding("(sizes b@x)", sizes={"sizes": 3}).local_shape((12,)) == (6,)
    assert Mesh("x=8").rearrange("(sizes b) -> sizes b", sizes={"sizes": 2}).shape == {"sizes": 2, "b": 4}


def test_written_sizes_are_one_sorted_key_whatever_the_way_they_were_given():
    assert written_sizes({}, None) == written_sizes({}, {}) == ()
    assert written_sizes({"b": 2}, {"a": 1}) == written_sizes({"a": 1, "b": 2}, None) == (("a", 1), ("b", 2))
    assert written_sizes({"a": -1}, {"b": None}) == (("a", -1), ("b", -1))
    with pytest.raises(SizeError, match="'a' is given two sizes: 1 and 2"):
        written_sizes({"a": 1}, {"a": 2})


def test_inline_sizes_that_agree_with_keywords_may_stand_twice():
    assert given_sizes({"a": 2}, {"a": 2}, [Item("a", 2), Item("b")], ["a", "b"]) == {"a": 2}
    assert Mesh("a=2", sizes={"a": 2}, a=2).shape == {"a": 2}


def test_a_size_that_the_mesh_has_already_may_be_repeated_but_not_changed():
    mesh = Mesh("dp=4 tp=2", "x = dp tp")
    assert mesh.define("y = dp=4").names["y"] == 4
    assert mesh.rearrange("dp=4 tp -> tp dp", tp=2).shape == {"tp": 2, "dp": 4}
    with pytest.raises(MeshError, match="'dp' has size 4 in the mesh; found dp=2"):
        mesh.define("y = dp=2")
    with pytest.raises(MeshError, match="'tp' has size 2 in the mesh; found tp=4"):
        mesh.rearrange("dp tp -> tp dp", tp=4)


@given(st.integers(1, 64), st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers(-3, 70)))
def test_no_sizes_raise_anything_but_an_axes_error_and_what_they_make_covers_the_ranks(ranks, sizes):
    try:
        mesh = Mesh("a b c", "(a b) = d e", ranks=range(ranks), sizes=sizes)
    except AxesError:
        return
    assert mesh.size == ranks
    assert mesh.names["d"] * mesh.names["e"] == mesh.names["a"] * mesh.names["b"]
    assert all(mesh.names[name] == size for name, size in sizes.items() if size != -1)
