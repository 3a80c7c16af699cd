"""Meshes: every name's ranks and coordinates against numpy, from every rank, for any rank map."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import axes
from axes.algebra.ambient import ambient_mesh
from axes.algebra.errors import AxesError, ExpressionError, MeshError, SizeError
from axes.algebra.layout import Layout
from axes.algebra.mesh import Axis, Mesh
from axes.algebra.scopes import required_mesh, use_mesh
from axes.algebra.universe import Universe

from .strategies import (
    factorizations,
    joint_coordinate,
    meshes,
    ranks_through,
    refusal,
)

SPARSE = (
    "fsdp = dp_shard cp",
    "batch = dp_replicate dp_shard",
    "loss = batch cp",
    "(dp_shard cp tp) = efsdp ep",
)
LARGE = {"pp": 8, "dp_replicate": 4, "cp": 8, "tp": 8, "ep": 64}


def large(ranks: range = range(131_072)) -> Mesh:
    return Mesh("pp dp_replicate dp_shard cp tp", *SPARSE, ranks=ranks, **LARGE)


# ---------------------------------------------------------------------------- names, sizes, coordinates


@given(meshes())
def test_names_shape_and_size_are_what_was_declared(case):
    mesh = case.mesh
    declared = tuple(item.partition("=")[0] for item in case.declaration.split())
    assert mesh.axis_names == declared
    assert mesh.ndim == len(declared)
    assert mesh.shape == {name: case.sizes[name] for name in declared}
    assert list(mesh.shape) == list(declared)
    assert mesh.names == case.sizes
    assert list(mesh.names)[: len(declared)] == list(declared)
    assert mesh.size == len(case.ranks)
    assert list(mesh.universe.ranks) == list(case.ranks)


@given(meshes())
def test_the_coordinate_of_every_rank_on_every_name_is_numpys(case):
    for position, rank in enumerate(case.ranks):
        seen = case.mesh.at(rank)
        assert seen.rank == rank
        assert seen.coordinate == {name: case.coordinates[name][position] for name in seen.axis_names}
        for name in case.sizes:
            axis = seen.axis(name)
            assert (axis.name, axis.size, axis.index) == (name, case.sizes[name], case.coordinates[name][position])


@given(meshes())
def test_the_ranks_of_every_name_through_every_rank_are_those_that_share_the_other_digits(case):
    for name in case.sizes:
        lines = set()
        for position, rank in enumerate(case.ranks):
            expected = ranks_through(case, [name], position)
            assert list(case.mesh.at(rank).axis(name).ranks) == expected
            assert list(case.mesh.axis(name).ranks_of(rank)) == expected
            assert expected[case.coordinates[name][position]] == rank
            lines.add(tuple(expected))
        # Together the lines are a partition, and `all_ranks` lists them.
        found = [tuple(line) for line in case.mesh.axis(name).all_ranks()]
        assert len(found) == len(set(found)) == len(case.ranks) // case.sizes[name]
        assert set(found) == lines
        assert sorted(rank for line in found for rank in line) == sorted(case.ranks)


@given(meshes(), st.data())
def test_nested_ranks_of_a_submesh_are_numpys_transposed_grid(case, data):
    names = data.draw(st.permutations(data.draw(st.sampled_from(case.disjoint))))
    names = tuple(names[: data.draw(st.integers(1, len(names)))])
    mesh = case.mesh[names]
    assert mesh.axis_names == names
    assert mesh.shape == {name: case.sizes[name] for name in names}
    for position, rank in enumerate(case.ranks):
        line = ranks_through(case, names, position)
        grid = np.array(line).reshape([case.sizes[name] for name in names])
        assert mesh.at(rank).ranks == grid.tolist()
        assert mesh.at(rank).coordinate == {name: case.coordinates[name][position] for name in names}
        assert grid[tuple(case.coordinates[name][position] for name in names)] == rank


@given(meshes(ranks=False), st.data())
def test_the_whole_grid_is_numpys_reshape_of_the_rank_map(case, data):
    ranks = data.draw(st.permutations(range(50)))[: len(case.ranks)]
    mesh = Mesh(case.declaration, *case.equations, ranks=ranks)
    assert mesh.ranks == np.array(ranks).reshape(list(mesh.shape.values())).tolist()
    order = data.draw(st.permutations(mesh.axis_names))
    grid = np.array(ranks).reshape(list(mesh.shape.values()))
    assert mesh[tuple(order)].ranks == grid.transpose([mesh.axis_names.index(n) for n in order]).tolist()


@given(meshes(), st.integers(0, 30_000))
def test_a_rank_outside_the_mesh_has_no_coordinate_and_asking_for_its_line_is_an_error(case, rank):
    if rank in case.ranks:
        return
    seen = case.mesh.at(rank)
    assert seen.coordinate is None
    assert seen.rank == rank
    assert seen.ranks == case.mesh.ranks  # the whole mesh is one, whoever looks
    name = seen.axis_names[0]
    assert seen.axis(name).index is None
    for ask in (lambda: seen.axis(name).ranks, lambda: case.mesh.axis(name).ranks_of(rank)):
        with pytest.raises(MeshError, match=f"rank {rank} isn't one of the ranks of"):
            ask()
    assert "index -" in str(seen)


def test_a_submesh_seen_from_outside_says_to_look_from_another_rank():
    mesh = Mesh("dp=2 tp=2").at(9)["tp"]
    with pytest.raises(MeshError, match=r"rank 9 isn't in any of the meshes of .*mesh.at\(rank\)"):
        _ = mesh.ranks


@given(meshes())
def test_the_view_belongs_neither_to_equality_nor_to_the_hash(case):
    views = {case.mesh.at(rank) for rank in case.ranks}
    assert views == {case.mesh}


# ---------------------------------------------------------------------------- rank maps


@pytest.mark.parametrize(
    "ranks",
    [
        range(2048, 4096),
        range(0, 4096, 2),
        list(range(2048, 4096)),
        np.arange(2048, 4096),
        (rank for rank in range(2048, 4096)),
    ],
    ids=["range", "spaced", "list", "numpy", "generator"],
)
def test_evenly_spaced_ranks_are_kept_as_a_range(ranks):
    mesh = Mesh("pp=2 dp tp=8", ranks=ranks)
    assert isinstance(mesh.universe.ranks, range)
    assert mesh.shape == {"pp": 2, "dp": 128, "tp": 8}
    assert isinstance(mesh.axis("dp").ranks, range)


def test_a_block_of_a_larger_job_is_addressed_by_its_global_ranks():
    mesh = Mesh("pp=2 dp tp=8", "all = pp dp tp", ranks=range(2048, 4096))
    seen = mesh.at(3000)
    grid = np.arange(2048, 4096).reshape(2, 128, 8)
    where = tuple(np.argwhere(grid == 3000)[0])
    assert tuple(seen.coordinate.values()) == where
    assert list(seen.axis("tp").ranks) == grid[where[0], where[1]].tolist()
    assert list(seen.axis("dp").ranks) == grid[where[0], :, where[2]].tolist()
    assert list(seen.axis("pp").ranks) == grid[:, where[1], where[2]].tolist()
    assert seen.axis("all").ranks == range(2048, 4096)
    assert mesh.at(7).coordinate is None
    assert "ranks=range(2048, 4096)" in repr(mesh)


def test_a_permutation_and_an_arbitrary_subset_keep_their_order():
    assert Mesh("a=2 b=2", ranks=[3, 1, 0, 2]).ranks == [[3, 1], [0, 2]]
    mesh = Mesh("a=2 b=2", ranks=[90, 5, 17, 3])
    assert mesh.ranks == [[90, 5], [17, 3]]
    assert mesh.rank == 90
    assert list(mesh.at(3).axis("a").ranks) == [5, 3]
    many = Mesh("a=12", ranks=[*range(11), 40])
    assert repr(many) == f"Mesh('a=12', ranks={[*range(11), 40]})"
    assert str(many).startswith("Mesh('a=12', ranks=[0, 1, 2, 3, ... 12 in all])  12 ranks")
    assert repr(Mesh("a=65", ranks=[*range(64), 70])) == "Mesh('a=65', ranks=[0, 1, 2, 3, ... 65 in all])"


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "at least one rank"),
        (range(0), "at least one rank"),
        ([0, 1, 1, 2], "found 1 more than once"),
        ([0, -1], "none of them negative"),
        (range(3, -1, -1), None),
        ([0, 1.5], "distinct integers; found"),
        ([0, 1.0], "distinct integers; found"),
        ([0, True], "distinct integers; found"),
        ([0, "1"], "distinct integers; found"),
        ([0, None], "distinct integers; found"),
        ([0, float("nan")], "distinct integers; found"),
        ([0, float("inf")], "distinct integers; found"),
        (5, "distinct integers; found 5"),
        ("0123", "found a str"),
        (b"\0\1", "found a bytes"),
        ({0, 1}, "found a set"),
        ({0: 1}, "found a dict"),
        (np.arange(4).reshape(2, 2), "distinct integers; found"),
        (range(10**30), "ranks are below 281474976710656"),
        (range(10**30, 10, -(10**20)), "ranks are below"),
        ([0, 10**5000, -(10**5000)], "too long to show"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_ranks_that_cannot_be_are_a_mesh_error(ranks, message):
    if message is None:
        assert Universe.of(ranks).ranks == (3, 2, 1, 0)
        return
    with pytest.raises(MeshError) as caught:
        Mesh("dp", ranks=ranks)
    assert message in str(caught.value)


def test_a_repeated_rank_among_many_is_found_in_linear_time():
    listed = [*range(200_000), 199_999]
    with pytest.raises(MeshError, match="found 199999 more than once"):
        Universe.of(listed)


@given(st.lists(st.integers(0, 40), min_size=1, unique=True), st.data())
def test_a_universe_maps_positions_to_ranks_and_back(ranks, data):
    universe = Universe.of(ranks)
    assert universe.size == len(ranks)
    assert [universe.rank(p) for p in range(len(ranks))] == ranks
    assert [universe.position(r) for r in ranks] == list(range(len(ranks)))
    assert universe.position(41) is None
    assert universe == Universe.of(tuple(ranks)) == Universe.of(iter(ranks))
    assert hash(universe) == hash(Universe.of(tuple(ranks)))
    picked = data.draw(st.lists(st.integers(0, len(ranks) - 1)))
    assert list(universe.pick(picked)) == [ranks[p] for p in picked]
    start = data.draw(st.integers(0, len(ranks) - 1))
    spaced = range(start, len(ranks), data.draw(st.integers(1, 5)))
    assert list(universe.pick(spaced)) == [ranks[p] for p in spaced]


@given(st.integers(0, 50), st.integers(1, 40), st.integers(1, 7))
def test_a_range_however_written_is_one_universe(start, count, step):
    spaced = range(start, start + count * step, step)
    assert Universe.of(spaced) == Universe.of(list(spaced))
    assert hash(Universe.of(spaced)) == hash(Universe.of(list(spaced)))


@pytest.mark.parametrize("rank", [-1, 1.0, "1", None, True, [1], 2**48, -(10**5000)], ids=lambda v: type(v).__name__)
def test_a_rank_that_cannot_be_is_a_mesh_error(rank):
    with pytest.raises(MeshError, match="a rank is a whole number from 0; found"):
        Mesh("dp=2").at(rank)


def test_ranks_may_be_numpys_integers():
    mesh = Mesh("dp=2 tp=2").at(np.int64(3))
    assert mesh.rank == 3
    assert type(mesh.rank) is int


# ---------------------------------------------------------------------------- equality, pickling, text


@given(meshes(), meshes())
def test_meshes_are_equal_where_ranks_axes_and_names_are(one, other):
    same = (
        list(one.ranks) == list(other.ranks)
        and one.mesh.axis_names == other.mesh.axis_names
        and list(one.mesh.namespace.items()) == list(other.mesh.namespace.items())
    )
    assert (one.mesh == other.mesh) == same
    assert (one.mesh != other.mesh) != same
    assert not same or hash(one.mesh) == hash(other.mesh)


@given(meshes())
def test_a_mesh_is_rebuilt_from_its_text_and_by_pickling_and_copying(case):
    again = Mesh(case.declaration, *case.equations, ranks=case.ranks)
    assert again == case.mesh
    assert hash(again) == hash(case.mesh)
    assert repr(again) == repr(case.mesh)
    seen = case.mesh.at(case.ranks[-1])
    for copied in (pickle.loads(pickle.dumps(seen)), copy.copy(seen), copy.deepcopy(seen)):
        assert copied == case.mesh
        assert hash(copied) == hash(case.mesh)
        assert copied.rank == case.ranks[-1]
        assert copied.names == case.sizes
        assert copied.declaration == case.mesh.declaration


@given(meshes())
def test_the_canonical_declaration_declares_the_same_names(case):
    mesh = Mesh(case.declaration, *case.equations)
    axes_text, *further = mesh.declaration.split("; ")
    again = Mesh(axes_text, *(f"{text}" for text in further if ":" not in text and not text.endswith("= 1")))
    for name, layout in again.namespace.items():
        assert mesh.layout(name) == layout


def test_names_ranks_views_and_nodes_each_tell_meshes_apart():
    mesh = Mesh("dp=2 tp=2")
    assert mesh != Mesh("dp=2 tp=2", "x = dp")
    assert mesh != Mesh("dp=2 tp=2", ranks=range(4, 8))
    assert mesh != Mesh("dp=2 tp=2", ranks=[0, 2, 1, 3])
    assert mesh != Mesh("dp=2 tp=2", ranks_per_node=2)
    assert mesh != Mesh("tp=2 dp=2")
    assert mesh != mesh["tp", "dp"]
    assert mesh["dp", "tp"] == mesh
    assert mesh != "dp=2 tp=2"


def test_a_mesh_refuses_changes():
    mesh = Mesh("dp=2 tp=2")
    with pytest.raises(AttributeError, match="immutable"):
        mesh.size = 3
    with pytest.raises(TypeError):
        mesh.namespace["x"] = Layout()
    mesh.shape["dp"] = 7
    mesh.names["dp"] = 7
    assert mesh.shape["dp"] == mesh.names["dp"] == 2


def test_a_mesh_prints_its_names_with_what_they_are():
    mesh = Mesh("dp=2 cp=2 tp=2", "fsdp = dp cp", "(dp cp tp) = rows ep", ep=4)
    assert repr(mesh) == "Mesh('dp=2 cp=2 tp=2', 'fsdp = dp cp', 'rows = dp', 'ep = cp tp')"
    assert str(mesh.at(5)).splitlines() == [
        "Mesh('dp=2 cp=2 tp=2')  8 ranks, seen from rank 5",
        "  dp    size 2      layout 2:4            index 1",
        "  cp    size 2      layout 2:2            index 0",
        "  tp    size 2      layout 2:1            index 1",
        "  fsdp  size 4      layout 4:2            index 2      = dp cp",
        "  rows  size 2      layout 2:4            index 1      = dp",
        "  ep    size 4      layout 4:1            index 1      = cp tp",
    ]
    assert mesh.declaration == "dp=2 cp=2 tp=2; fsdp = dp cp; rows = dp; ep = cp tp"
    assert repr(mesh.axis("fsdp")) == "Axis('fsdp', size=4, layout=4:2)"


def test_a_sub_mesh_of_one_rank_is_none_for_those_who_ask():
    mesh = Mesh("dp=2 tp=1 cp=3", "fsdp = dp cp")
    assert mesh.get("fsdp") == mesh["fsdp"]
    assert mesh.get("tp", "dp") == mesh["tp", "dp"]
    assert mesh.get("tp") is None
    for names in (("pp",), (), ("dp", "fsdp"), ("dp", "dp")):
        with pytest.raises(MeshError):
            mesh.get(*names)


@settings(deadline=None)
@given(meshes(), st.data())
def test_what_a_mesh_and_each_of_its_sub_meshes_prints_makes_it_again(case, data):
    mesh = case.mesh
    assert eval(repr(mesh), {"Mesh": Mesh}) == mesh
    names: list[str] = []
    for name in data.draw(st.permutations(list(mesh.names))):
        layouts = [mesh.layout(other) for other in names]
        if not any(mesh.layout(name).overlaps(layout) for layout in layouts) and data.draw(st.booleans()):
            names.append(name)
    if names:
        sub = mesh[tuple(names)]
        assert eval(repr(sub), {"Mesh": Mesh}) == sub


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (Mesh("dp=4 tp=2")["tp"], "Mesh('dp=4 tp=2')['tp']"),
        (Mesh("dp=4 tp=2", "rows = dp")["tp", "rows"], "Mesh('dp=4 tp=2', 'rows = dp')['tp', 'rows']"),
        (Mesh("dp=2 cp=2 tp=2", "s = tp dp")["s"], "Mesh('dp=2 cp=2 tp=2', 's = tp dp')['s']"),
        (
            Mesh("dp=4 tp=2", "(dp tp) = rows ep", ep=4, ranks_per_node=4)["ep"],
            "Mesh('dp=4 tp=2', '(dp tp) = rows=2 ep=4', ranks_per_node=4)['ep']",
        ),
        (Mesh("dp=8 tp=1", ranks=range(8, 16))["tp"], "Mesh('dp=8 tp=1', ranks=range(8, 16))['tp']"),
        (
            Mesh("dp=4 tp=2").rearrange("(a b) tp -> ab=(b a) tp", a=2),
            "Mesh('dp=4 tp=2', 'dp = a=2 b=2', 'ab = b a')['ab', 'tp']",
        ),
        (
            Mesh("dp=4 tp=2").rearrange("dp tp -> dp node=1 tp").define("one = node"),
            "Mesh('dp=4 tp=2 node=1 one=1')['dp', 'node', 'tp']",
        ),
        (
            Mesh("dp=4 tp=2", "x = tp dp").rearrange("dp tp -> dp node=1 tp").define("one = node"),
            "Mesh('dp=4 tp=2', 'x = tp dp').rearrange('... -> ... node=1').define('one = node')['dp', 'node', 'tp']",
        ),
        (Mesh("a=2 b=2", ranks=[3, 1, 0, 2]).at(1)["b"], "Mesh('a=2 b=2', ranks=[3, 1, 0, 2])['b']"),
    ],
)
def test_a_sub_mesh_prints_the_call_that_makes_it(mesh, text):
    assert repr(mesh) == text
    assert eval(text, {"Mesh": Mesh}) == mesh


def test_a_mesh_that_no_text_makes_prints_in_angle_brackets():
    mesh = Mesh("dp=4 tp=2")
    half = mesh._with(axis_names=("half",), namespace={"half": Layout((2,), (4,))})
    assert repr(half) == "<Mesh 'half=2' of ranks range(0, 8)>"


def test_an_axis_has_one_stride_or_one_per_digit():
    mesh = Mesh("dp=2 cp=2 tp=2", "x = tp dp", "y = cp")
    assert mesh.axis("dp").stride == 4
    assert mesh.axis("x").stride == (1, 4)
    assert mesh.axis("y").stride == 2
    assert Mesh("one=1 dp=2").axis("one").stride == 1
    assert isinstance(mesh.axis("x"), Axis)


# ---------------------------------------------------------------------------- one name, one layout


@given(meshes(), st.data())
def test_a_name_can_be_said_again_but_never_redefined(case, data):
    names = data.draw(st.permutations(data.draw(st.sampled_from(case.disjoint))))
    parts = names[: data.draw(st.integers(1, len(names)))]
    name = data.draw(st.sampled_from(sorted(case.sizes)))
    number = int(np.prod([case.sizes[p] for p in parts]))
    same = number == case.sizes[name] and np.array_equal(joint_coordinate(case, parts), case.coordinates[name])
    equation = f"{name} = {' '.join(parts)}"
    if same:
        assert case.mesh.define(equation) == case.mesh
    else:
        with pytest.raises((MeshError, SizeError)) as caught:
            case.mesh.define(equation)
        assert equation in str(caught.value)


@given(meshes(), st.data())
def test_define_adds_what_declaring_at_once_gives(case, data):
    names = data.draw(st.permutations(data.draw(st.sampled_from(case.disjoint))))
    parts = names[: data.draw(st.integers(1, len(names)))]
    equation = f"fresh = {' '.join(parts)}"
    defined = case.mesh.define(equation)
    assert defined == Mesh(case.declaration, *case.equations, equation, ranks=case.ranks)
    assert "fresh" not in case.mesh.names
    for position, rank in enumerate(case.ranks):
        assert list(defined.at(rank).axis("fresh").ranks) == ranks_through(case, parts, position)


@given(meshes(), st.data())
def test_splitting_a_product_by_an_equation_gives_its_digits(case, data):
    names = data.draw(st.permutations(data.draw(st.sampled_from(case.disjoint))))
    parts = names[: data.draw(st.integers(1, len(names)))]
    joint = joint_coordinate(case, parts)
    cut = data.draw(factorizations(int(np.prod([case.sizes[p] for p in parts])), 3))
    fresh = [f"new{i}" for i in range(len(cut))]
    open_one = data.draw(st.integers(0, len(cut) - 1))
    written = [n if i == open_one else f"{n}={cut[i]}" for i, n in enumerate(fresh)]
    equation = f"({' '.join(parts)}) = {' '.join(written)}"
    refused = refusal(SizeError, lambda: case.mesh.define(equation))
    if refused:
        assert "it cuts" in refused  # a digit of the product, as 2 and 3 into 3 and 2 would
        return
    defined = case.mesh.define(equation)
    for name, coordinate in zip(fresh, np.unravel_index(joint, cut), strict=True):
        assert [defined.at(rank).axis(name).index for rank in case.ranks] == coordinate.tolist()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Mesh("dp=2 tp=2", "dp = tp"),
            MeshError,
            "the two sides are different ranks: 2:2 and 2:1\nin the equation  dp = tp",
        ),
        (lambda: Mesh("dp=2 tp=2", "x = dp", "x = tp"), MeshError, "different ranks"),
        (lambda: Mesh("dp=2 tp=2", "x = dp tp", "x = tp dp"), MeshError, "different ranks"),
        (
            lambda: Mesh("dp=2 tp=2", "x = dp y"),
            ExpressionError,
            "one side of an equation has only known names; 'y' isn't known",
        ),
        (
            lambda: Mesh("dp_shard=2 tp=2", "x = dp_shrad"),
            ExpressionError,
            "'dp_shrad' isn't known; did you mean 'dp_shard'?",
        ),
        (
            lambda: Mesh("dp=2 tp=2", "(dp tp) = a tp"),
            ExpressionError,
            "'tp' is known already, so it can't stand beside the new 'a'",
        ),
        (lambda: Mesh("dp=2 tp=2", "x y = z w"), ExpressionError, "isn't known"),
        (lambda: Mesh("a=2 b=3", "(a b) = c d", "x = a d", c=3), MeshError, "overlap or don't divide"),
        (lambda: Mesh("a=2 b=3", "(b a) = c d", c=2), SizeError, "doesn't split into"),
        (lambda: Mesh("dp=2", "x = dp").define("(x) = a b", a=3), SizeError, "2 doesn't divide by 3"),
        (lambda: Mesh("dp=2", ranks_per_node=0), MeshError, "ranks_per_node is a whole number from 1; found 0"),
        (lambda: Mesh("dp=2", ranks_per_node=2.5), MeshError, "ranks_per_node"),
        (lambda: Mesh("shard=2").layout("shrd"), MeshError, "the mesh has no axis 'shrd'; did you mean 'shard'?"),
        (lambda: Mesh("dp=2").axis("model"), MeshError, "the mesh has no axis 'model'; known: dp"),
        (lambda: Mesh("dp=2")["xx"], MeshError, "the mesh has no axis 'xx'"),
        (lambda: Mesh("dp=2")[()], MeshError, "a mesh is indexed by one or more axis names; found ()"),
        (lambda: Mesh("dp=2")[0], MeshError, "a mesh is indexed by one or more axis names; found 0"),
        (lambda: Mesh("dp=2")[["dp"]], MeshError, "a mesh is indexed by"),
        (lambda: Mesh("dp=2")[:1], MeshError, "a mesh is indexed by"),
        (lambda: Mesh("dp=2")["dp", ["x"]], MeshError, "the mesh has no axis"),
        (lambda: Mesh("dp=2")["dp", "dp"], MeshError, "axis 'dp' stands twice in mesh['dp', 'dp']"),
        (lambda: Mesh("dp=2 tp=2", "x = dp tp")["x", "tp"], MeshError, "axes 'x' (4:1) and 'tp' (2:1) share ranks"),
        (lambda: Mesh("a=2 b=3", "(a b) = c d", c=3)["a", "c"], MeshError, "axes 'a' (2:3) and 'c' (3:2) share ranks"),
        (
            lambda: Mesh("a=2 b=3", "(a b) = c d", c=3)["a", "d"],
            MeshError,
            "from factorizations that have no common digits: 2:3, 2:1",
        ),
    ],
)
def test_what_no_mesh_can_be_is_an_error_that_says_why(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert message in str(caught.value)


def test_an_error_in_an_equation_has_its_caret_under_the_name():
    with pytest.raises(ExpressionError) as caught:
        Mesh("dp=2 tp=2", "fsdp = dp ctp")
    assert str(caught.value).splitlines()[1:] == ["  fsdp = dp ctp", "            ^^^"]


def test_equations_may_use_the_names_of_those_before_but_not_after():
    assert Mesh("a=2 b=2", "x = a b", "y = x").names["y"] == 4
    with pytest.raises(AxesError):
        Mesh("a=2 b=2", "y = x", "x = a b")


# ---------------------------------------------------------------------------- scale


def measured(make) -> tuple[object, int]:
    """What `make` returns, and the most memory that it took beyond what there was, in bytes."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        value = make()
        return value, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_a_mesh_of_131072_ranks_lists_none_of_them():
    def use() -> Mesh:
        mesh = large()
        seen = mesh.at(77_777)
        for name in mesh.names:
            axis = seen.axis(name)
            assert axis.ranks[axis.index] == 77_777
            assert axis.size == len(axis.ranks)
        assert seen.coordinate is not None
        assert hash(mesh) == hash(pickle.loads(pickle.dumps(mesh)))
        assert seen["pp", "efsdp", "ep"].coordinate
        assert mesh.rearrange("pp dp_replicate ... -> pp ... dp_replicate").size == 131_072
        assert str(mesh)
        assert mesh.define("world = pp dp_replicate dp_shard cp tp").at(77_777).axis("world").ranks == range(131_072)
        mesh.sharding("batch@batch seq@(cp tp) embed").local_indices((2**20, 2**20, 8), 77_777)
        return mesh

    use()  # modules that are imported at first use, and what is cached by text, don't count
    mesh, peak = measured(use)
    assert mesh.size == 131_072
    assert peak < 1_000_000


def test_a_mesh_of_more_ranks_than_there_is_memory_works_as_well():
    def use() -> Mesh:
        mesh = Mesh("pp=16 dp tp=8", "x = tp pp", ranks=range(2**44))
        assert mesh.at(2**43 + 5).coordinate == {"pp": 8, "dp": 0, "tp": 5}
        assert mesh.at(2**43 + 5).axis("dp").ranks == range(2**43 + 5, 2**43 + 5 + 2**40, 8)
        assert len(mesh.at(2**43 + 5).axis("x").ranks) == 128
        return mesh

    _, peak = measured(use)
    assert peak < 1_000_000


@pytest.mark.parametrize("ranks", [range(131_072), range(5, 5 + 131_072)])
def test_the_ranks_of_131072_seen_from_77777_are_numpys(ranks):
    mesh = large(ranks)
    sizes = list(mesh.shape.values())
    position = 77_777 - ranks[0]
    where = np.unravel_index(position, sizes)
    grid = np.asarray(ranks).reshape(sizes)
    seen = mesh.at(77_777)
    assert seen.coordinate == dict(zip(mesh.axis_names, where, strict=True))
    for i, name in enumerate(mesh.axis_names):
        index = list(where)
        index[i] = slice(None)
        assert list(seen.axis(name).ranks) == grid[tuple(index)].tolist()
    pp, rep, _, cp, tp = where
    assert list(seen.axis("fsdp").ranks) == grid[pp, rep, :, :, tp].reshape(-1).tolist()
    assert list(seen.axis("batch").ranks) == grid[pp, :, :, cp, tp].reshape(-1).tolist()
    assert list(seen.axis("loss").ranks) == grid[pp, :, :, :, tp].reshape(-1).tolist()
    sparse = grid[pp, rep].reshape(-1, 64)
    row, column = np.argwhere(sparse == 77_777)[0]
    assert list(seen.axis("ep").ranks) == sparse[row].tolist()
    assert list(seen.axis("efsdp").ranks) == sparse[:, column].tolist()


@settings(max_examples=10)
@given(st.integers(0, 131_071), st.permutations(["pp", "dp_replicate", "dp_shard", "cp", "tp"]), st.integers(1, 5))
def test_flattening_any_axes_of_131072_ranks_in_any_order_is_numpys_transpose(rank, order, count):
    mesh = large().define(f"flat = {' '.join(order[:count])}")
    sizes = mesh.shape
    grid = np.arange(131_072).reshape(list(sizes.values()))
    where = np.unravel_index(rank, grid.shape)
    index = tuple(slice(None) if name in order[:count] else w for name, w in zip(sizes, where, strict=True))
    kept = [name for name in sizes if name in order[:count]]
    expected = grid[index].transpose([kept.index(name) for name in order[:count]]).reshape(-1)
    assert list(mesh.at(rank).axis("flat").ranks) == expected.tolist()


# ---------------------------------------------------------------------------- without a running job


@pytest.mark.parametrize(
    "use",
    [
        lambda mesh: mesh.device_mesh,
        lambda mesh: mesh.create_groups(),
        lambda mesh: mesh.create_groups("dp"),
        lambda mesh: mesh.axis("dp").group,
    ],
)
def test_what_needs_a_running_job_says_so_on_a_mesh_that_is_algebra_alone(use):
    with pytest.raises(MeshError, match=r"needs a mesh that is bound to torch.distributed.*axes.init_mesh"):
        use(Mesh("dp=2"))


def test_the_algebra_imports_no_torch():
    code = (
        "import sys; from axes.algebra.mesh import Mesh; import axes.algebra.sharding\n"
        "m = Mesh('dp=2 tp=4', 'x = dp tp').at(3); m.ranks, m.sharding('b@dp s@tp').local_shape((4, 8))\n"
        "m.rearrange('(a=2 b) tp -> b a tp'), str(m), m.explain('dp tp -> tp dp')\n"
        "import axes; axes.Mesh('dp=2')\n"
        "print('torch' in sys.modules, 'einops' in sys.modules, 'numpy' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"] * 3


def test_the_public_names_are_these_classes():
    assert axes.Mesh is Mesh
    assert axes.Axis is Axis
    assert axes.Layout is Layout


# ---------------------------------------------------------------------------- the ambient mesh


def test_the_innermost_mesh_is_ambient_and_the_one_before_it_afterwards():
    one, other = Mesh("dp=2"), Mesh("tp=2")
    assert ambient_mesh() is None
    with one as entered:
        assert entered is one
        with use_mesh(other) as inner:
            assert inner is other
            assert ambient_mesh() is other
            with one, pytest.raises(ZeroDivisionError), other:
                _ = 1 / 0
            assert ambient_mesh() is other
        assert ambient_mesh() is one
    assert ambient_mesh() is None


def test_each_thread_has_its_own_ambient_mesh():
    seen = []
    with Mesh("dp=2"):
        thread = threading.Thread(target=lambda: seen.append(ambient_mesh()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_without_a_mesh_the_error_says_how_to_give_one():
    with pytest.raises(MeshError, match=r"shard needs a mesh; pass mesh=\.\.\. or write it inside `with mesh:`"):
        required_mesh(None, "shard")
    mesh = Mesh("dp=2")
    assert required_mesh(mesh, "shard") is mesh
    with mesh:
        assert required_mesh(None, "shard") is mesh


@pytest.mark.parametrize("wrong", ["dp=2", 3, object()])
def test_what_is_no_mesh_cannot_be_ambient(wrong):
    with pytest.raises(MeshError, match="an axes mesh, made by"), use_mesh(wrong):
        pass
    with pytest.raises(MeshError):
        required_mesh(wrong, "shard")
    assert ambient_mesh() is None
