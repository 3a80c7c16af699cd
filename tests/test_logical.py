"""Rules: what they choose is what trying them one after the other chooses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axes.algebra.errors import MeshError, ShardingError, SizeError
from axes.algebra.logical import Rules, ambient_rules, use_rules
from axes.algebra.mesh import Mesh
from axes.algebra.specs import parsed_sharding

NAMES = ("batch", "seq", "heads", "embed", "mlp")
MESH = Mesh("dp=2 cp=3 tp=4 ep=1", "fsdp = dp cp")
AXES = ("dp", "cp", "tp", "ep", "fsdp")

tables = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.one_of(
            st.none(),
            st.sampled_from(AXES),
            st.lists(st.sampled_from(AXES[:4]), unique=True, max_size=3),
            st.sampled_from([("fsdp", "tp"), ("ep", "fsdp")]),
        ),
    ),
    max_size=8,
)


def tried(table, names, extents) -> dict[str, tuple[str, ...]]:
    """Every rule in order, on the digits that are free."""
    used: set[str] = set()
    found: dict[str, tuple[str, ...]] = {}
    own = {"fsdp": {"dp", "cp"}}
    for name, axes in table:
        chosen = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        digits = [digit for axis in chosen for digit in own.get(axis, {axis})]
        parts = math.prod(MESH.names[axis] for axis in chosen)
        if name in names and name not in found and used.isdisjoint(digits) and extents[name] % parts == 0:
            found[name] = chosen
            used.update(digits)
    return found


@given(tables, st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=4), st.data())
def test_the_first_rule_applies_whose_axes_are_free_and_whose_size_divides(table, names, data):
    extents = {name: data.draw(st.sampled_from((1, 2, 4, 6, 12, 24, 30))) for name in names}
    shape = tuple(extents[name] for name in names)
    rules = Rules([*table, ("...", None)])
    expected = tried(table, names, extents)
    spec = rules.spec(" ".join(names), MESH, shape)
    places = {name: axes[0] if len(axes) == 1 else f"({' '.join(axes)})" for name, axes in expected.items() if axes}
    assert spec == " ".join(f"{name}@{places[name]}" if name in places else name for name in names)
    assert parsed_sharding(MESH, spec).local_shape(shape, 0)


def test_what_rules_say_of_groups_goes_to_their_names():
    rules = Rules(heads="tp", head_dim=None, embed=("dp", "cp"))
    assert rules.spec("(heads head_dim) embed", MESH) == "(heads@tp head_dim) embed@(dp cp)"
    assert rules.spec("(heads head_dim) embed", MESH, (96, 12), heads=8) == "(heads@tp head_dim) embed@(dp cp)"
    assert rules.spec("(heads head_dim) embed", MESH, (96, 12), heads=6) == "(heads head_dim) embed@(dp cp)"


def test_an_at_in_a_logical_spec_stays_and_takes_its_axes():
    rules = Rules(batch="dp", seq=("cp", "tp"), embed="tp")
    assert rules.spec("batch@tp seq embed", MESH) == "batch@tp seq embed"
    assert rules.spec("batch seq@cp embed", MESH) == "batch@dp seq@cp embed@tp"
    assert rules.spec("... embed", MESH, (2, 2, 4)) == "... embed@tp"
    assert rules.spec("_ embed 3", MESH, (2, 4, 3)) == "_ embed@tp 3"


def test_an_explanation_says_which_rule_was_passed_over_and_why():
    rules = Rules([("batch", ("dp", "cp")), ("batch", "dp"), ("seq", "dp"), ("seq", "cp"), ("embed", None)])
    assert rules.explain("batch seq embed", MESH, (4, 9, 5)) == (
        "batch=4  dp     (batch=(dp cp): 4 doesn't divide into 6 parts)\n"
        "seq=9    cp     (seq=dp: 'dp' is used by another dim)\n"
        "embed=5  whole"
    )
    assert "sequence  error    no rule is about 'sequence'" in rules.explain("batch sequence", MESH)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Rules(batch="dp").spec("batch sequence", MESH), ShardingError, "no rule is about 'sequence'"),
        (lambda: Rules(seq="cp").spec("sec", MESH), ShardingError, "did you mean 'seq'"),
        (lambda: Rules(batch="fspd").spec("batch", MESH), MeshError, "did you mean 'fsdp'"),
        (lambda: Rules(batch=("fsdp", "dp")).spec("batch", MESH), MeshError, "which share ranks"),
        (lambda: Rules(batch="pp").spec("batch", MESH), MeshError, "declare it with size 1 ('pp=1')"),
        (lambda: Rules(batch=3), ShardingError, "an axis, a tuple of axes, or None; found 3"),
        (lambda: Rules(batch=("dp", "dp")), ShardingError, "has an axis twice"),
        (lambda: Rules([("batch", "dp", "tp")]), ShardingError, "a rule is a pair"),
        (lambda: Rules([("a b", "dp")]), ShardingError, "a logical name is a name"),
        (lambda: Rules([("...", "dp")]), ShardingError, "its axes are None"),
        (lambda: Rules(h="tp", k=None).spec("(h k)", MESH, (8,)), SizeError, "give all but one of them, like h=2"),
        (lambda: Rules(h="tp").spec("h", MESH, (8, 2)), ShardingError, "has 1 dims, the tensor 2"),
        (lambda: Rules(h="tp").spec("h", MESH, (8,), z=2), SizeError, "which isn't in the expression"),
        (lambda: Rules(h="tp").spec("h"), MeshError, "Rules.spec needs a mesh"),
        (lambda: use_rules({"h": "tp"}).__enter__(), ShardingError, "use_rules takes axes.Rules; found dict"),
    ],
)
def test_what_is_wrong_with_rules_is_said(make, error, says):
    with pytest.raises(error) as raised:
        make()
    assert says in str(raised.value)


def test_rules_are_values_and_nest():
    one, two = Rules(batch="dp"), Rules([("batch", "dp")])
    assert one == two
    assert hash(one) == hash(two)
    assert eval(repr(one)) == one
    assert Rules({"batch": "dp"}, seq="cp") == Rules(batch=("dp",), seq="cp")
    assert ambient_rules() is None
    with use_rules(one):
        with use_rules(Rules(seq="cp")):
            assert ambient_rules().names == ("seq",)
        assert ambient_rules() is one
    assert ambient_rules() is None
