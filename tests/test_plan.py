"""The planner: every plan is carried out on every rank by the oracle, which knows nothing of planning.

Each run of the oracle also checks the memory bound, the balance of what is sent, that the bytes a step
names are those that move, and that every element of the result is written exactly once.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from axes.algebra import plan as planner
from axes.algebra.cost import CostModel
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Plan, choices, even_ways, only_way, plan
from axes.algebra.sharding import PendingReduction, Sharding
from axes.algebra.universe import Universe
from axes.runtime.programs import Program, task_of
from tests import plan_oracle as oracle
from tests.strategies import regrouped

ROOT = Path(__file__).resolve().parent.parent
FLAT = CostModel(20.0, 50.0, 50.0, math.inf, ranks_per_node=1 << 40)


# --- all states of 2x2x2 --------------------------------------------------------------------------

CUBE = tuple(Layout((2,), (stride,)) for stride in (4, 2, 1))
STATES = oracle.all_states(3, 3)
PAIRS = [(a, b) for a in STATES for b in STATES if set(b[1]) <= set(a[1])]


def cube(place: tuple[tuple[tuple[int, ...], ...], tuple[int, ...]], op: str = "sum") -> Sharding:
    splits, pending = (tuple(tuple(CUBE[axis] for axis in dim) for dim in place[0]), place[1])
    reductions = ((op, tuple(CUBE[axis] for axis in pending)),) if pending else ()
    names = dict(zip("xyz", CUBE, strict=True))
    return oracle.lying(Universe.of(range(8)), Layout((8,), (1,)), splits, reductions, names)


def missing(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> int:
    """The most elements that any rank wants and hasn't, by the definition of the states."""
    most = 0
    for position in range(source.universe.size):
        want, have = (oracle.held(state, shape, position) for state in (target, source))
        shared = math.prod(len(np.intersect1d(a, b)) for a, b in zip(want, have, strict=True))
        most = max(most, math.prod(map(len, want)) - shared)
    return most


def check_pair(pair, model: CostModel = FLAT, shape: tuple[int, ...] = (8, 8, 8), op: str = "sum") -> Plan:
    source, target = cube(pair[0], op), cube(pair[1], op)
    found = plan(source, target, shape, "float64", model)
    oracle.run(found)
    assert found.collectives <= 2
    if not source.pending:
        assert found.collectives <= 1
        if all(size % 8 == 0 for size in shape):
            assert found.bytes_in == missing(source, target, shape) * 8
    return found


def test_there_are_20313_pairs_of_176_states():
    assert (len(STATES), len(PAIRS)) == (176, 20_313)


def test_every_45th_pair_of_states_of_2x2x2_arrives_in_at_most_two_collectives():
    seen = {step.kind for pair in PAIRS[::45] for step in check_pair(pair).steps}
    assert seen == {"slice", *planner.COLLECTIVES}


def test_every_150th_pair_arrives_for_dims_that_do_not_divide():
    for pair in PAIRS[7::150]:
        check_pair(pair, shape=(5, 3, 7))


@pytest.mark.parametrize("op", ["mean", "max", "min"])
def test_every_300th_pair_arrives_with_other_reductions(op):
    for pair in [pair for pair in PAIRS if pair[0][1]][11::300]:
        check_pair(pair, op=op)


@pytest.mark.full
@pytest.mark.parametrize("shape", [(8, 8, 8), (5, 3, 7)])
def test_all_pairs_of_states_of_2x2x2_arrive(shape):
    for pair in PAIRS:
        check_pair(pair, shape=shape)


@pytest.mark.full
def test_all_pairs_of_states_of_2x2x2_arrive_where_two_ranks_share_a_node():
    for pair in PAIRS:
        oracle.run(plan(cube(pair[0]), cube(pair[1]), (8, 8, 8), "float64", CostModel(ranks_per_node=2)))


def run_table(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "docs.planner_table", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_on_every_700th_pair_no_plan_is_worse_than_either_planner_of_dtensor():
    assert "NO" not in run_table("--every", "700")


@pytest.mark.full
def test_the_table_in_the_docs_is_what_its_script_prints():
    page = (ROOT / "docs" / "redistribution.md").read_text(encoding="utf-8")
    rows = [row for row in run_table().splitlines() if row.startswith("|")]
    assert len(rows) == 10
    assert "\n".join(rows) in page


# --- random states on random meshes ---------------------------------------------------------------

MESHES = [(2, 3), (3, 2), (6,), (2, 2, 3), (3, 4), (12,), (3, 2, 2), (2, 1, 3), (4, 2), (5, 2), (1,)]
MODELS = [
    FLAT,
    CostModel(),
    CostModel(ranks_per_node=2),
    CostModel(1.0, 300.0, 5.0, ranks_per_node=3),
    CostModel(0.0, 50.0, 50.0, math.inf),
]
models = st.sampled_from(MODELS)


def examples(number: int) -> settings:
    """The same examples in every run, and no clock."""
    return settings(max_examples=number, deadline=None, derandomize=True, database=None)


sizes = st.integers(1, 13)


def layouts(shape: tuple[int, ...]) -> list[Layout]:
    stride, found = math.prod(shape), []
    for size in shape:
        stride //= size
        found.append(Layout((size,), (stride,)))
    return found


@st.composite
def meshes(draw, shapes=MESHES) -> tuple[Universe, list[Layout]]:
    """A universe in any order of its ranks, and axes that cover it."""
    shape = draw(st.sampled_from(shapes))
    ranks = list(range(3, 3 + math.prod(shape)))
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    return Universe.of(ranks), layouts(shape)


@st.composite
def states(draw, mesh, ndim: int, ops=("sum",), pending: bool = True, extent: Layout | None = None) -> Sharding:
    universe, axes = mesh
    splits: list[list[Layout]] = [[] for _ in range(ndim)]
    reductions: list[tuple[str, tuple[Layout, ...]]] = []
    for axis in draw(st.permutations(axes)):
        place = draw(st.integers(-2 if pending else -1, ndim - 1))
        if place >= 0:
            splits[place].append(axis)
        elif place == -2:
            reductions.append((draw(st.sampled_from(ops)), (axis,)))
    whole = Layout((universe.size,), (1,)) if extent is None else extent
    return oracle.lying(universe, whole, tuple(map(tuple, splits)), tuple(reductions))


@st.composite
def kept(draw, source: Sharding, target: Sharding) -> Sharding:
    """The target with some of the source's last reductions still pending."""
    used = {axis for dim in target.dims for axis in dim.axes}
    keep: list[PendingReduction] = []
    for pending in reversed(source.pending):
        if used & set(pending.axes) or draw(st.booleans()):
            break
        keep.insert(0, pending)
    return replace(target, pending=tuple(keep))


@st.composite
def redistributions(draw, ops=("sum",), even: bool = False):
    mesh = draw(meshes())
    ndim = draw(st.integers(0, 3))
    whole = mesh[0].size
    shape = tuple(draw(st.sampled_from((whole, 2 * whole)) if even else sizes) for _ in range(ndim))
    source = draw(states(mesh, ndim, ops))
    return source, draw(kept(source, draw(states(mesh, ndim, pending=False)))), shape


@examples(150)
@given(redistributions(), models)
def test_any_state_becomes_any_other_whatever_divides(case, model):
    source, target, shape = case
    oracle.run(plan(source, target, shape, "float64", model))


@examples(150)
@given(regrouped(), models)
def test_axes_that_are_flattened_behind_others_are_cut_as_they_are_written(case, model):
    mesh, source, target, extent = case
    oracle.run(plan(mesh.sharding(source), mesh.sharding(target), (extent,), "float64", model))


@examples(60)
@given(redistributions(even=True), models)
def test_every_plan_that_was_weighed_arrives(case, model):
    source, target, shape = case
    for found in choices(source, target, shape, "float64", model):
        oracle.run(found)


@examples(150)
@given(redistributions(even=True), models, st.data())
def test_the_steps_of_a_small_tensor_are_those_of_any_that_is_cut_alike(case, model, data):
    source, target, shape = case
    shape = tuple(size * data.draw(st.sampled_from((1, 2, 3, 5, 6))) for size in shape)
    rank = data.draw(st.sampled_from(list(source.universe.ranks)))
    ways = even_ways(source, target, shape, "float64", model)
    assert ways is not None
    small = ways.plan(ways.cheapest(shape), ways.shape, rank)
    assert math.prod(small.shape) <= math.prod(shape)
    own = plan(source, target, shape, "float64", model, rank)
    one, two = (Program(made, torch.float64, lambda _: None, "cpu") for made in (small, own))
    alike = one.alike(shape)
    for at, step in enumerate(own.steps):
        assert (small.steps[at].kind, small.steps[at].layout) == (step.kind, step.layout)
        found, wanted = task_of(alike, at, None), task_of(two, at, None)
        for name in ("tile", "shape", "merged", "padded", "copies"):
            assert getattr(found, name) == getattr(wanted, name)
        padded = () if found.padded == 0 else ("padded_sends", "padded_receives")
        for name in ("sends", "receives", "sends_all", "receives_all", *padded):
            one_side, two_side = (task.at_sizes(getattr(task.unit, name)) for task in (found, wanted))
            assert one_side == two_side


@examples(60)
@given(redistributions(), models)
def test_no_other_size_has_the_steps_of_a_tensor_that_is_cut_unevenly(case, model):
    source, target, shape = case
    if not (source.divides(shape) and target.divides(shape)):
        assert even_ways(source, target, shape, "float64", model) is None


@st.composite
def chunked(draw, mesh: Mesh, ndim: int) -> Sharding:
    """No dim split by more than one axis."""
    axes = draw(st.permutations([*mesh.axis_names, *[""] * ndim]))[:ndim]
    return mesh.sharding(" ".join(f"{dim}@{axis}" if axis else dim for dim, axis in zip("xyz", axes, strict=False)))


@examples(150)
@given(st.sampled_from(("a=4", "a=2 b=3", "a=2 b=2 c=2")), st.integers(1, 3), models, st.data())
def test_the_only_way_at_a_size_is_that_of_all_that_leave_the_same_rests(axes, ndim, model, data):
    mesh = Mesh(axes)
    source, target = (data.draw(chunked(mesh, ndim)) for _ in range(2))
    shape = tuple(data.draw(st.integers(1, 40)) for _ in range(ndim))
    ways = only_way(source, target, shape, "float64", model)
    if ways is None:
        return
    rank = data.draw(st.sampled_from(list(source.universe.ranks)))
    found, own = ways.uncosted(shape, rank), plan(source, target, shape, "float64", model, rank)
    unpriced = dict.fromkeys(("bytes_in", "bytes_out", "send_bytes", "receive_bytes", "output_bytes"), 0)
    assert [step.exchange() for step in found.steps] == [step.exchange() for step in own.steps]
    assert found == replace(own, cost=0.0, steps=tuple(replace(step, cost=0.0, **unpriced) for step in own.steps))


@examples(60)
@given(redistributions(ops=("sum", "mean", "max", "min")), models)
def test_mixed_reductions_are_resolved_in_their_order(case, model):
    source, target, shape = case
    oracle.run(plan(source, target, shape, "float64", model))


def test_of_a_tensor_without_elements_one_plan_is_weighed():
    mesh = Mesh("dp=2")
    (found,) = choices(mesh.sharding("b@dp s"), mesh.sharding("b s@dp"), (0, 8))
    assert found == plan(mesh.sharding("b@dp s"), mesh.sharding("b s@dp"), (0, 8))


@pytest.mark.parametrize("kinds", [4, 12])
def test_reductions_of_kinds_that_take_turns_are_planned_one_after_the_other(kinds):
    names = "abcdefghijkl"[:kinds]
    mesh = Mesh(" ".join(f"{name}=2" for name in names))
    pending = " ".join(f"{('sum', 'max')[at % 2]}@{name}" for at, name in enumerate(names))
    ends, shape = (mesh.sharding(f"x y | {pending}"), mesh.sharding("x@a y@(d b)")), (mesh.size, 8)
    assert len(choices(*ends, shape)) < 500  # not a multiple more with each kind
    if kinds == 4:
        oracle.run(plan(*ends, shape, "float64"))


@examples(60)
@given(redistributions(even=True))
def test_a_single_move_receives_exactly_what_is_missing(case):
    source, target, shape = case
    source, target = replace(source, pending=()), replace(target, pending=())
    found = plan(source, target, shape, "float64", FLAT)
    assert found.collectives <= 1
    assert found.bytes_in == missing(source, target, shape) * 8


@examples(60)
@given(st.data(), models)
def test_there_and_back_is_where_it_was_and_a_detour_arrives_at_the_same(data, model):
    mesh = data.draw(meshes())
    shape = tuple(data.draw(st.lists(sizes, min_size=1, max_size=3)))
    a, b, c = (data.draw(states(mesh, len(shape), pending=False)) for _ in range(3))
    start = oracle.Truth(a, shape).tiles(a)

    def along(*route: Sharding) -> dict[int, np.ndarray]:
        tiles = start
        for one, two in itertools.pairwise(route):
            for step in plan(one, two, shape, "float64", model).steps:
                tiles = oracle.carry_out(step, tiles, 8)
        return tiles

    for one, two in ((along(a, b, a), start), (along(a, b, c), along(a, c))):
        assert one.keys() == two.keys()
        for rank in one:
            np.testing.assert_array_equal(one[rank], two[rank])


@examples(40)
@given(st.data(), models)
def test_a_submesh_moves_within_its_own_lines(data, model):
    universe, axes = data.draw(meshes([(2, 3), (2, 2, 3), (3, 2, 2), (2, 2, 2)]))
    left_out = data.draw(st.integers(0, len(axes) - 1))
    inside = [axis for at, axis in enumerate(axes) if at != left_out]
    extent = Layout.product(*inside)
    shape = tuple(data.draw(st.lists(sizes, max_size=2)))
    source = data.draw(states((universe, inside), len(shape), extent=extent))
    kept_axes = data.draw(st.sampled_from([inside, inside[:1], inside[1:]]))  # the target may know fewer axes
    smaller = Layout.product(*kept_axes)
    target = data.draw(states((universe, kept_axes), len(shape), pending=False, extent=smaller))
    found = plan(source, target, shape, "float64", model)
    oracle.run(found)
    for step in found.steps:
        for rank in universe.ranks:
            same = axes[left_out].coordinate(universe.position(rank))
            assert {axes[left_out].coordinate(universe.position(peer)) for peer in step.ranks_of(rank)} == {same}


@examples(80)
@given(st.data(), models)
def test_dense_becomes_sparse_on_the_same_ranks_with_or_without_common_digits(data, model):
    shapes = {6: [(2, 3), (3, 2), (6,)], 12: [(2, 2, 3), (3, 4), (4, 3), (2, 6), (12,), (3, 2, 2)]}
    universe, axes = data.draw(meshes([shape for group in shapes.values() for shape in group]))
    others = layouts(data.draw(st.sampled_from(shapes[universe.size])))
    shape = tuple(data.draw(st.lists(sizes, max_size=3)))
    source = data.draw(states((universe, axes), len(shape)))
    target = data.draw(states((universe, others), len(shape), pending=False))
    oracle.run(plan(source, target, shape, "float64", model))


@examples(80)
@given(st.data(), models)
def test_any_ranks_give_to_any_others(data, model):
    """Disjoint, overlapping, and the same ranks in another order."""
    mesh = data.draw(meshes())
    other = data.draw(meshes([(2,), (4,), (2, 2), (2, 3), (3, 2), (6,)]))
    shift = data.draw(st.sampled_from((0, 1, mesh[0].size, mesh[0].size + 2)))
    other = (Universe.of([rank + shift for rank in other[0].ranks]), other[1])
    shape = tuple(data.draw(st.lists(sizes, max_size=3)))
    source = data.draw(states(mesh, len(shape)))
    target = data.draw(states(other, len(shape), pending=False))
    oracle.run(plan(source, target, shape, "float64", model))


def crossings(found: Plan) -> int:
    """Elements that ranks of the target receive from ranks that aren't."""
    inside = set(found.target.universe.ranks)
    total = 0
    for step, rank in itertools.product(found.steps, inside):
        if step.takes_part(rank):
            exchange = step.exchange(rank)
            total += sum(t.elements for t in exchange.receives if exchange.ranks[t.peer] not in inside)
    return total


@examples(40)
@given(st.data())
def test_between_islands_every_element_crosses_once(data):
    source_mesh = data.draw(meshes())
    axes = data.draw(st.sampled_from([(2,), (2, 2), (3, 2), (4,)]))
    first = 3 + source_mesh[0].size
    target_mesh = (Universe.of(range(first, first + math.prod(axes))), layouts(axes))
    shape = tuple(data.draw(st.lists(sizes, min_size=1, max_size=3)))
    found = plan(
        data.draw(states(source_mesh, len(shape))), data.draw(states(target_mesh, len(shape), pending=False)), shape
    )
    assert crossings(found) == math.prod(shape)
    both = {*found.source.universe.ranks, *found.target.universe.ranks}
    assert all(set(step.ranks) <= both for step in found.steps)


@examples(60)
@given(st.data(), models)
def test_factors_of_a_dim_arrive_whether_or_not_the_other_side_is_factored(data, model):
    universe, axes = data.draw(meshes([(2,), (2, 2), (2, 3), (3, 2)]))
    extent = Layout((universe.size,), (1,))
    factors = (data.draw(st.integers(1, 3)), 6 * data.draw(st.integers(1, 2)), data.draw(st.sampled_from((1, 4, 6))))

    def split(axis: Layout) -> oracle.Grouped:
        where = data.draw(st.integers(0, 2).filter(lambda at: factors[at] % axis.size == 0))
        return oracle.Grouped(factors, tuple((axis,) if at == where else () for at in range(3)))

    at = data.draw(st.integers(0, 2))  # the dims in front matter: the parts of a factor aren't one stretch there

    def around(split: oracle.Grouped) -> tuple[oracle.Split, ...]:
        return (*((),) * at, split, *((),) * (2 - at))

    plain = data.draw(states((universe, axes), 3))
    one = oracle.lying(universe, extent, around(split(axes[0])), tuple(("sum", (axis,)) for axis in axes[1:]))
    two = data.draw(st.sampled_from([plain, oracle.lying(universe, extent, around(split(axes[0])))]))
    shape = tuple(math.prod(factors) if dim == at else data.draw(sizes) for dim in range(3))
    oracle.run(plan(one, replace(two, pending=()), shape, "float64", model))
    oracle.run(plan(plain, replace(one, pending=()), shape, "float64", model))
