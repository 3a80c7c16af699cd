"""Meshes: names, coordinates, ranks and mesh expressions, against numpy and einops on arrays of ranks."""

from __future__ import annotations

import copy
import itertools
import math
import operator
import pickle
import re
import subprocess
import sys
import threading
import tracemalloc

import einops
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import axes
from axes import AxesError, Mesh, MeshError, SizeError
from tests.strategies import examples, factorizations, joint_coordinate, meshes, ranks_through, refusal

# ---------------------------------------------------------------------------- names, sizes, coordinates


@given(meshes(), st.integers(0, 30_000))
def test_a_mesh_is_what_numpy_makes_of_its_ranks_seen_from_every_rank(case, outside):
    mesh, declared = case.mesh, tuple(item.partition("=")[0] for item in case.declaration.split())
    assert (mesh.axis_names, mesh.ndim, mesh.size) == (declared, len(declared), len(case.ranks))
    assert (
        list(mesh.shape.items())
        == [(name, case.sizes[name]) for name in declared]
        == [*mesh.names.items()][: mesh.ndim]
    )
    assert mesh.names == case.sizes
    assert np.array(mesh.ranks).tolist() == np.reshape(case.ranks, list(mesh.shape.values())).tolist()
    assert {mesh.at(rank) for rank in case.ranks} == {mesh}
    for name in case.sizes:
        lines = {tuple(ranks_through(case, [name], position)) for position in range(len(case.ranks))}
        assert sorted(map(tuple, mesh.axis(name).all_ranks())) == sorted(lines)
        for position, rank in enumerate(case.ranks):
            axis, index = mesh.at(rank).axis(name), case.coordinates[name][position]
            assert (axis.name, axis.size, axis.index) == (name, case.sizes[name], index)
            assert list(axis.ranks) == list(mesh.axis(name).ranks_of(rank)) == ranks_through(case, [name], position)
            assert axis.ranks[index] == rank == mesh.at(rank).rank
            assert name not in declared or mesh.at(rank).coordinate[name] == index
    if outside not in case.ranks:
        seen = mesh.at(outside)
        assert (seen.coordinate, seen.rank, seen.ranks, seen.axis(declared[0]).index) == (
            None,
            outside,
            mesh.ranks,
            None,
        )
        for ask in (lambda: seen.axis(declared[0]).ranks, lambda: mesh.axis(declared[0]).ranks_of(outside)):
            assert f"rank {outside} isn't one of the ranks of" in (refusal(MeshError, ask) or "")


@given(meshes(), st.data())
def test_a_sub_mesh_is_the_transposed_grid_of_the_rank_that_looks(case, data):
    names = data.draw(st.permutations(data.draw(st.sampled_from(case.disjoint))))
    names = tuple(names[: data.draw(st.integers(1, len(names)))])
    sub = case.mesh[names]
    assert sub.axis_names == names
    assert sub.shape == {name: case.sizes[name] for name in names}
    assert case.mesh.get(*names) == (sub if sub.size > 1 else None)
    for position, rank in enumerate(case.ranks):
        grid = np.reshape(ranks_through(case, names, position), [case.sizes[name] for name in names])
        seen = sub.at(rank)
        assert seen.ranks == grid.tolist()
        assert seen.coordinate == {name: case.coordinates[name][position] for name in names}
        assert grid[tuple(seen.coordinate.values())] == rank


@given(meshes(), meshes())
def test_a_mesh_is_a_value_that_its_text_and_its_pickle_make_again(one, other):
    mesh, seen = one.mesh, one.mesh.at(one.ranks[-1])
    content, others = (([*each.ranks], each.mesh.axis_names, [*each.mesh.namespace.items()]) for each in (one, other))
    assert (mesh == other.mesh) == (content == others) != (mesh != other.mesh)
    again = Mesh(one.declaration, *one.equations, ranks=one.ranks)
    for made in (again, pickle.loads(pickle.dumps(seen)), copy.copy(seen), copy.deepcopy(seen)):
        assert (made, hash(made), made.names) == (mesh, hash(mesh), one.sizes)
    assert pickle.loads(pickle.dumps(seen)).rank == copy.copy(seen).rank == one.ranks[-1]
    with pytest.raises(AttributeError, match="immutable"):
        mesh.size = 3
    mesh.shape["dp"] = mesh.names["dp"] = -1
    assert mesh.names == one.sizes


OTHERS = [Mesh("dp=2 tp=2", "x = dp"), Mesh("dp=2 tp=2", ranks=range(4, 8)), Mesh("dp=2 tp=2", ranks=[0, 2, 1, 3]), Mesh("dp=2 tp=2", ranks_per_node=2), Mesh("tp=2 dp=2"), Mesh("dp=2 tp=2")["tp", "dp"], "dp=2 tp=2"]  # fmt: skip


@pytest.mark.parametrize("other", OTHERS, ids=repr)
def test_names_ranks_and_nodes_each_tell_meshes_apart(other):
    assert Mesh("dp=2 tp=2") == Mesh("dp=2 tp=2")["dp", "tp"] != other


@given(meshes(), st.data())
def test_equations_add_names_of_the_same_ranks_and_never_redefine_one(case, data):
    names = data.draw(st.permutations(data.draw(st.sampled_from(case.disjoint))))
    parts = names[: data.draw(st.integers(1, len(names)))]
    joint, total = joint_coordinate(case, parts), math.prod(case.sizes[p] for p in parts)
    # flattened
    equation = f"fresh = {' '.join(parts)}"
    defined = case.mesh.define(equation)
    assert defined == Mesh(case.declaration, *case.equations, equation, ranks=case.ranks)
    assert [defined.at(rank).axis("fresh").index for rank in case.ranks] == joint.tolist()
    assert "fresh" not in case.mesh.names
    # said again
    name = data.draw(st.sampled_from(sorted(case.sizes)))
    equation = f"{name} = {' '.join(parts)}"
    refused = refusal(AxesError, lambda: case.mesh.define(equation))
    same = total == case.sizes[name] and np.array_equal(joint, case.coordinates[name])
    assert equation in (refused or "") if not same else case.mesh.define(equation) == case.mesh
    # split
    cut = data.draw(factorizations(total, 3))
    fresh = [f"new{i}" for i in range(len(cut))]
    left_out = data.draw(st.integers(0, len(cut) - 1))
    equation = f"({' '.join(parts)}) = {' '.join(n if i == left_out else f'{n}={cut[i]}' for i, n in enumerate(fresh))}"
    refused = refusal(SizeError, lambda: case.mesh.define(equation))
    ends = [set(itertools.accumulate(reversed(s), operator.mul)) for s in ([case.sizes[p] for p in parts], cut)]
    nested = all(one % two == 0 or two % one == 0 for one, two in itertools.product(*ends))
    assert refused is None if nested else "it cuts" in (refused or "it cuts")  # as 2 and 3 into 3 and 2 would
    for name, coordinate in zip(fresh, np.unravel_index(joint, cut), strict=True) if refused is None else ():
        defined = case.mesh.define(equation)
        assert [defined.at(rank).axis(name).index for rank in case.ranks] == coordinate.tolist()


# ---------------------------------------------------------------------------- rank maps and text


@pytest.mark.parametrize("ranks", [range(2048, 4096), range(0, 4096, 2), [*range(2048, 4096)], np.arange(2048, 4096), iter(range(2048))], ids=["range", "spaced", "list", "numpy", "iterator"])  # fmt: skip
def test_evenly_spaced_ranks_stay_a_range_and_others_keep_their_order(ranks):
    mesh = Mesh("pp=2 dp tp=8", "all = pp dp tp", ranks=ranks)
    assert mesh.shape == {"pp": 2, "dp": 128, "tp": 8}
    assert {type(mesh.axis(name).ranks) for name in ("dp", "all")} == {range}
    assert (Mesh("a=2 b=2", ranks=[90, 5, 17, 3]).ranks, type(mesh.at(np.int64(3)).rank)) == ([[90, 5], [17, 3]], int)


def test_a_mesh_prints_its_names_with_what_they_are():
    mesh = Mesh("dp=2 cp=2 tp=2", "fsdp = dp cp", "(dp cp tp) = rows ep", "x = tp dp", ep=4)
    assert str(mesh.at(5)).splitlines() == [
        "Mesh('dp=2 cp=2 tp=2')  8 ranks, seen from rank 5",
        "  dp    size 2      layout 2:4            index 1",
        "  cp    size 2      layout 2:2            index 0",
        "  tp    size 2      layout 2:1            index 1",
        "  fsdp  size 4      layout 4:2            index 2      = dp cp",
        "  rows  size 2      layout 2:4            index 1      = dp",
        "  ep    size 4      layout 4:1            index 1      = cp tp",
        "  x     size 4      layout (2:1, 2:4)     index 3      = tp dp",
    ]
    assert mesh.declaration == "dp=2 cp=2 tp=2; fsdp = dp cp; rows = dp; ep = cp tp; x = tp dp"
    assert (repr(mesh.axis("fsdp")), mesh.axis("x").stride, mesh.axis("fsdp").stride) == (
        "Axis('fsdp', size=4, layout=4:2)",
        (1, 4),
        2,
    )
    many = Mesh("a=12", ranks=[*range(11), 40])
    assert repr(many) == f"Mesh('a=12', ranks={[*range(11), 40]})"
    assert str(many).startswith("Mesh('a=12', ranks=[0, 1, 2, 3, ... 12 in all])  12 ranks")


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (Mesh("dp=4 tp=2")["tp"], "Mesh('dp=4 tp=2')['tp']"),
        (Mesh("dp=4 tp=2", "(dp tp) = rows ep", ep=4, ranks_per_node=4)["ep"], "Mesh('dp=4 tp=2', ranks_per_node=4)['ep']"),
        (Mesh("dp=4 tp=2").rearrange("(a b) tp -> one=1 ab=(b a) tp", a=2), "Mesh('dp=4 tp=2 one=1')['one', 'ab', 'tp']"),
        (Mesh("a=2 b=2", ranks=[3, 1, 0, 2]).at(1)["b"], "Mesh('a=2 b=2', ranks=[3, 1, 0, 2])['b']"),
    ],
)  # fmt: skip
def test_a_sub_mesh_prints_how_its_axes_are_declared(mesh, text):
    assert repr(mesh) == text


# ---------------------------------------------------------------------------- mesh expressions


@st.composite
def expressions(draw: st.DrawFn) -> tuple[Mesh, str, dict[str, int], dict[str, int], tuple[str, ...]]:
    """A mesh, an expression that splits, reorders and flattens it and adds ones, sizes by keyword, those of all names
    on its left, and the axes of the result."""
    shape = draw(
        st.lists(st.sampled_from([1, 2, 2, 3, 4, 6]), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 24)
    )
    names = ["dp", "cp", "tp", "pp"][: len(shape)]
    mesh = Mesh(
        " ".join(f"{n}={s}" for n, s in zip(names, shape, strict=True)),
        ranks=draw(st.permutations(range(math.prod(shape)))),
    )
    first, last = sorted(draw(st.tuples(*[st.integers(0, len(names))] * 2)))  # the axes for which dots stand
    left, sizes, keywords = [], {}, {}
    for at, (name, size) in enumerate(zip(names, shape, strict=True)):
        cut = draw(factorizations(size, 3)) if draw(st.booleans()) and not first <= at < last else []
        parts = dict(zip([f"{name}{letter}" for letter in "abc"], cut, strict=False)) or {name: size}
        unknown, inner = draw(st.sampled_from([*parts, ""])), []
        for part, n in parts.items():
            form = draw(st.sampled_from(["", "=-1"] if part == unknown else ["", f"={n}"]))
            keywords |= {part: n} if cut and part != unknown and not form else {}
            inner.append(part + form)
        left.append("..." if first <= at < last else f"({' '.join(inner)})" if cut else name)
        sizes |= {} if first <= at < last else parts
    dots = ["..."] * (first < last)
    items = draw(st.permutations([*sizes, *["one0=1", "one1=1"][: draw(st.integers(0, 2))], *dots]))
    right, result = [], []
    while items:
        count = draw(st.integers(1, max(1, min(3, [*items, "..."].index("...")))))
        taken, items = items[:count], items[count:]
        bare, label = [each.removesuffix("=1") for each in taken], draw(st.sampled_from(["", f"flat{len(right)}"]))
        alone = taken == ["..."] or (count == 1 and draw(st.booleans()))
        right.append(taken[0] if alone else f"{label}{'=' * bool(label)}({' '.join(taken)})")
        result += (names[first:last] if taken == ["..."] else bare) if alone else [label or "_".join(bare)]
    left = [each for at, each in enumerate(left) if each != "..." or at == first]
    return mesh, f"{' '.join(left)} -> {' '.join(right)}", keywords, sizes, tuple(result)


@examples(150)
@given(expressions())
def test_a_mesh_expression_does_to_ranks_what_einops_does_to_an_array_of_them(drawn):
    before, expression, keywords, sizes, names = drawn
    mesh = before.rearrange(expression, **keywords)
    pattern = re.sub(r"=-?\d+", "", re.sub(r"\w+=(?=\()", "", re.sub(r"one\d=1", "1", expression)))
    expected = einops.rearrange(np.array(before.ranks), pattern, **sizes)
    assert mesh.axis_names == names
    assert np.array(mesh.ranks).tolist() == expected.tolist()
    assert list(mesh.shape.values()) == list(expected.shape)
    for rank in np.ravel(expected).tolist():
        seen = before.at(rank).rearrange(expression, **keywords)
        assert (expected[tuple(seen.coordinate.values())], seen.rank, seen) == (rank, rank, mesh)
    # Each name that it makes joins the namespace, and the old names stay: by them it is undone.
    assert list(mesh.names.items())[: before.ndim] == list(before.names.items())
    assert {name: mesh.names[name] for name in sizes} == sizes
    assert mesh[before.axis_names].ranks == before.ranks


DP8 = Mesh("dp=8 tp=2")
THREE = Mesh("dp=2 cp=3 tp=4", "fsdp = dp cp", "all = dp cp tp")


@pytest.mark.parametrize(
    ("mesh", "expression", "shape"),
    [
        (DP8, "dp tp -> (dp tp)", {"dp_tp": 16}),
        (DP8, "dp tp -> (dp) tp", {"dp": 8, "tp": 2}),
        (DP8, "dp tp -> x=(dp one=1) tp", {"x": 8, "tp": 2}),
        (DP8, "dp tp ... -> tp ... dp", {"tp": 2, "dp": 8}),
        (DP8, "(dp one=1) tp -> one dp tp", {"one": 1, "dp": 8, "tp": 2}),
        (THREE, "... tp -> tp ...", {"tp": 4, "dp": 2, "cp": 3}),
        (THREE["fsdp", "tp"], "(dp cp) tp -> dp cp tp", {"dp": 2, "cp": 3, "tp": 4}),
        (THREE["tp", "fsdp"], "tp fsdp -> fsdp tp", {"fsdp": 6, "tp": 4}),
        (THREE["all",], "(fsdp tp) -> fsdp tp", {"fsdp": 6, "tp": 4}),
    ],
)
def test_the_grammar_by_example(mesh, expression, shape):
    found = mesh.rearrange(expression)
    assert list(found.shape.items()) == list(shape.items())
    assert found is mesh.rearrange(expression)


def test_explain_prints_the_reading_and_the_operations():
    assert str(DP8.explain("(a b) tp -> pp=1 x=(tp a) b", a=2)).splitlines() == [
        "(dp tp) read as  (a=2 b=4) tp=2  ->  pp=1 x=(tp=2 a=2) b=4",
        "  split    dp 8:2  ->  a 2:8, b 4:2",
        "  insert   pp 1:1",
        "  permute  pp tp a b",
        "  flatten  tp 2:1, a 2:8  ->  x (2:1, 2:8)",
    ]
    assert str(DP8.explain("dp tp -> dp tp")).splitlines()[1:] == ["  nothing to do"]


# ---------------------------------------------------------------------------- scale

SPARSE = ("fsdp = dp_shard cp", "batch = dp_replicate dp_shard", "loss = batch cp", "(dp_shard cp tp) = efsdp ep")
LARGE = {"pp": 8, "dp_replicate": 4, "cp": 8, "tp": 8, "ep": 64}


@examples(10)
@given(
    st.integers(0, 131_071),
    st.permutations(["pp", "dp_replicate", "dp_shard", "cp", "tp"]),
    st.integers(1, 5),
    st.sampled_from([0, 5]),
)
def test_131072_ranks_are_numpys_and_nobody_lists_them(rank, order, count, first):
    tracemalloc.start()
    mesh = Mesh("pp dp_replicate dp_shard cp tp", *SPARSE, ranks=range(first, first + 131_072), **LARGE)
    mesh = mesh.define(f"flat = {' '.join(order[:count])}")
    seen = mesh.at(rank + first)
    pickle.loads(pickle.dumps(mesh)), str(mesh), seen["pp", "efsdp", "ep"].coordinate
    mesh.rearrange("pp dp_replicate ... -> pp ... dp_replicate")
    mesh.sharding("batch@batch seq@(cp tp) embed").local_indices((2**20, 2**20, 8), rank + first)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_500_000
    grid = np.arange(first, first + 131_072).reshape(list(mesh.shape.values()))
    where = dict(zip(mesh.axis_names, np.unravel_index(rank, grid.shape), strict=True))
    assert seen.coordinate == where
    for name, names in (("flat", order[:count]), ("fsdp", ["dp_shard", "cp"])):
        kept = [name for name in mesh.axis_names if name in names]
        line = grid[tuple(slice(None) if name in names else at for name, at in where.items())]
        assert list(seen.axis(name).ranks) == line.transpose([kept.index(name) for name in names]).reshape(-1).tolist()


def test_a_mesh_of_more_ranks_than_there_is_memory_works_as_well():
    mesh = Mesh("pp=16 dp tp=8", "x = tp pp", ranks=range(2**44)).at(2**43 + 5)
    assert (mesh.coordinate, len(mesh.axis("x").ranks)) == ({"pp": 8, "dp": 0, "tp": 5}, 128)
    assert mesh.axis("dp").ranks == range(2**43 + 5, 2**43 + 5 + 2**40, 8)


def test_the_algebra_imports_no_torch():
    code = (
        "import sys, axes; m = axes.Mesh('dp=2 tp=4', 'x = dp tp').at(3); m.ranks, m.sharding('b@dp s@tp').local_shape((4, 8))\n"
        "m.rearrange('(a=2 b) tp -> b a tp'), str(m), m.explain('dp tp -> tp dp'), axes.plan('b@dp', 'b', (4,), m)\n"
        "print([name for name in ('torch', 'einops', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---------------------------------------------------------------------------- the ambient mesh


def ambient() -> Mesh | None:
    """The mesh in which a function looks that is told none."""
    found: list[Mesh] = []
    refused = refusal(MeshError, lambda: found.append(axes.plan("b", "b", (1,)).source.mesh))
    assert refused is None or "axes.plan needs a mesh; pass mesh=... or write it inside `with mesh:`" in refused
    return found[0] if found else None


def test_the_innermost_mesh_is_ambient_in_its_thread_and_the_one_before_it_afterwards():
    one, other, seen = Mesh("dp=2"), Mesh("tp=2"), []
    assert ambient() is None
    with one as entered, axes.use_mesh(other) as inner:
        assert (entered, inner, ambient()) == (one, other, other)
        thread = threading.Thread(target=lambda: seen.append(ambient()))
        thread.start()
        thread.join()
        with one, pytest.raises(ZeroDivisionError), other:
            _ = 1 / 0
        assert ambient() == other
    assert (ambient(), seen) == (None, [None])
