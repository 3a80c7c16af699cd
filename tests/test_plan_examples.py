"""The planner by example: what it finds, how it prints, how much it takes, and what it refuses."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import axes
from axes.algebra import plan as planner
from axes.algebra.cost import CostModel, Traffic
from axes.algebra.errors import MeshError, ShardingError, SizeError
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Plan, choices, plan
from axes.algebra.planning import form
from axes.algebra.sharding import Sharding
from axes.algebra.universe import Universe
from tests import plan_oracle as oracle
from tests.counting import calls
from tests.test_plan import FLAT, PAIRS, cube

ROOT = Path(__file__).resolve().parent.parent


# --- saying it briefly ----------------------------------------------------------------------------


class Small:
    """A mesh for tests: `Small(dp=2, tp=4)("b@dp s@tp | sum@...")` is a state."""

    def __init__(self, universe: Universe | None = None, **sizes: int):
        stride = math.prod(sizes.values())
        self.universe = universe or Universe.of(range(stride))
        self.extent = Layout((stride,), (1,))
        self.axes: dict[str, Layout] = {}
        for name, size in sizes.items():
            stride //= size
            self.axes[name] = Layout((size,), (stride,))

    def __call__(self, text: str, extent: str = "") -> Sharding:
        dims, _, pending = text.partition("|")
        splits = tuple(self.place(dim.partition("@")[2]) for dim in _words(dims))
        reductions = tuple((word.partition("@")[0], self.place(word.partition("@")[2])) for word in _words(pending))
        whole = Layout.of(mode for name in extent.split() for mode in self.axes[name].modes) if extent else self.extent
        found = oracle.lying(self.universe, whole, splits, reductions, self.axes)
        return found.named([dim.partition("@")[0] for dim in _words(dims)])

    def place(self, text: str) -> tuple[Layout, ...]:
        return tuple(self.axes[name] for name in text.strip("()").split())


def _words(text: str) -> list[str]:
    """Split at blanks outside of brackets."""
    found, depth = [""], 0
    for letter in text.strip():
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == " " and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [word for word in found if word]


def kinds(found: Plan) -> list[tuple[str, tuple[str, ...]]]:
    return [(step.kind, step.axes) for step in found.steps]


# --- examples -------------------------------------------------------------------------------------

MESH = Small(dp=2, cp=2, tp=2)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("b s@tp d", "b s d", [("all_gather", ("tp",))]),
        ("b s d | sum@tp", "b s d", [("all_reduce", ("tp",))]),
        ("b s d | sum@tp", "b s@tp d", [("reduce_scatter", ("tp",))]),
        ("b s@tp d", "b s d@tp", [("all_to_all", ("tp",))]),
        ("b s d", "b s@tp d", [("slice", ())]),
        ("b s@cp d", "b s@(cp tp) d", [("slice", ())]),
        ("b s@(cp tp) d", "b s@(tp cp) d", [("permute", ("cp", "tp"))]),
        ("b s@(cp tp) d", "b s@cp d", [("all_gather", ("tp",))]),
        ("b s@(cp tp) d", "b s@tp d", [("all_to_all", ("cp", "tp"))]),
        ("b s@(cp tp) d", "b s@cp d@tp", [("all_to_all", ("tp",))]),
        ("b s@(cp tp) d", "b s@tp d@cp", [("all_to_all", ("cp", "tp"))]),
        ("b s d | sum@(cp tp)", "b s d", [("all_reduce", ("cp", "tp"))]),
        ("b s d | sum@(cp tp)", "b s d | sum@cp", [("all_reduce", ("tp",))]),
        ("b s d | sum@(cp tp)", "b s@tp d@cp", [("reduce_scatter", ("tp", "cp"))]),
        ("b s d | sum@(cp tp)", "b s@cp d | sum@tp", [("reduce_scatter", ("cp",))]),
        ("b s d | sum@cp mean@tp", "b s@(cp tp) d", [("reduce_scatter", ("cp", "tp"))]),
        ("b s d | sum@tp", "b@dp s@tp d", [("slice", ()), ("reduce_scatter", ("tp",))]),
        ("b@dp s d | sum@tp", "b@(tp dp) s d", [("reduce_move", ("dp", "tp"))]),
        ("b@dp s@cp d@tp", "b@dp s@cp d@tp", []),
    ],
)
def test_the_obvious_collective_is_found(source, target, expected):
    found = plan(MESH(source), MESH(target), (8, 16, 32), "bfloat16", FLAT)
    assert kinds(found) == expected
    oracle.run(replace(found, dtype="bfloat16"))


def test_a_plan_prints_itself():
    mesh = Small(dp=2, tp=4)
    found = plan(mesh("b@dp s@tp d"), mesh("b@dp s d@tp"), (8, 2048, 4096), "bfloat16")
    assert str(found) == (
        "b@dp s@tp d -> b@dp s d@tp     [8, 2048, 4096] bfloat16\n"
        "  1  all_to_all  tp  4 ranks, stride 1  12.0 MiB in, 12.0 MiB out"
    )
    assert (found.collectives, found.bytes_in, found.cost > 0) == (1, 12 << 20, True)
    assert found.peak_bytes == (16 + 16 + 12 + 12) << 20
    assert list(found.at(6).steps[0].ranks) == [4, 5, 6, 7]


def test_a_plan_is_its_text_in_an_interpreter_and_in_a_container():
    found = plan(MESH("b@dp s@tp d"), MESH("b@dp s d@tp"), (8, 2048, 4096), "bfloat16")
    assert repr(found) == str(found)
    assert repr([found]) == f"[{found}]"


def test_nothing_to_do_prints_so():
    assert str(plan(MESH("b"), MESH("b"), (3,))).endswith("nothing to do")


def test_gathers_and_scatters_of_the_first_dim_need_no_copy():
    gather, scatter = ("b@tp s", "b s"), ("b s | sum@tp", "b@tp s")
    for source, target in (gather, scatter):
        (step,) = plan(MESH(source), MESH(target), (8, 3)).steps
        assert step.flat
        assert step.send_bytes == step.receive_bytes == 0
    for source, target in (("b s@tp", "b s"), ("b s | sum@tp", "b s@tp")):
        (step,) = plan(MESH(source), MESH(target), (8, 4)).steps
        assert not step.flat


def test_an_uneven_gather_pads_to_the_ceiling_and_an_uneven_move_counts():
    mesh = Small(tp=2)
    (gather,) = plan(mesh("s@tp d"), mesh("s d"), (5, 4)).steps
    assert (gather.kind, gather.padded, gather.bytes_in) == ("all_gather", 12, 48)
    (move,) = plan(mesh("s@tp d"), mesh("s d@tp"), (5, 4)).steps
    assert [move.exchange(rank).receive_counts for rank in (0, 1)] == [(0, 4), (6, 0)]
    assert move.bytes_in == 24


def test_an_integer_mean_is_divided_once_and_only_by_the_means():
    (step,) = plan(MESH("d | sum@cp mean@(dp tp)"), MESH("d"), (4,)).steps
    assert (step.op, step.divisor, step.group_size) == ("sum", 4, 8)


def test_what_is_the_same_on_every_rank_needs_nothing():
    assert plan(MESH("d | same@tp"), MESH("d"), (4,)).steps == ()
    assert plan(MESH("d"), MESH("d | same@tp"), (4,)).steps == ()
    assert kinds(plan(MESH("d | sum@tp"), MESH("d | same@tp"), (4,))) == [("all_reduce", ("tp",))]


def test_a_fingerprint_tells_plans_apart_but_not_names_or_views():
    found = plan(MESH("s@tp d"), MESH("s d@tp"), (8, 8))
    renamed = Small(a=2, b=2, c=2)
    assert found.fingerprint == plan(renamed("x@c y"), renamed("x y@c"), (8, 8), rank=3).fingerprint
    others = [
        plan(MESH("s@tp d"), MESH("s d@tp"), (8, 16)),
        plan(MESH("s@tp d"), MESH("s d@tp"), (8, 8), "bfloat16"),
        plan(MESH("s@cp d"), MESH("s d@cp"), (8, 8)),
        plan(MESH("s@tp d"), MESH("s d"), (8, 8)),
    ]
    assert len({found.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_a_tensor_without_elements_moves_nothing():
    found = plan(MESH("s@tp d | sum@cp"), MESH("s d@tp"), (0, 4))
    assert (found.collectives, found.bytes_in) == (0, 0)
    assert found.steps[0].output_shape(1) == (0, 2)


def test_what_is_replicated_on_four_ranks_is_given_by_all_four():
    """The holder of one's own coordinate would send three times what anyone receives."""
    mesh = Small(x=4, y=4)
    found = plan(mesh("d@y"), mesh("d@x"), (16,), "float64", FLAT)
    oracle.run(found)
    (step,) = found.steps
    assert max(sum(step.exchange(rank).send_counts) for rank in range(16)) == 4


def test_two_tiers_send_between_nodes_only_once():
    mesh = Small(dp=4, tp=8)
    source, target = mesh("b@dp d"), mesh("b d@dp")
    slow = CostModel(5.0, 300.0, 10.0, math.inf, ranks_per_node=8)
    found = plan(source, target, (64, 1 << 20), "bfloat16", slow)
    assert kinds(found) == [("all_to_all", ("dp",)), ("all_gather", ("tp",))]
    flat = plan(source, target, (64, 1 << 20), "bfloat16", FLAT)
    assert kinds(flat) == [("all_to_all", ("dp",))]
    oracle.run(plan(source, target, (64, 32), "float64", slow))


def test_two_tiers_are_found_within_an_axis_that_covers_several_nodes():
    mesh = Small(dp=2, fsdp=16)
    model = CostModel(5.0, 300.0, 10.0, math.inf, ranks_per_node=8)
    found = plan(mesh("b@dp d"), mesh("b d@dp"), (64, 1 << 20), "bfloat16", model)
    assert kinds(found) == [("all_to_all", ("dp",)), ("all_gather", ("8:1",))]


def test_a_reduce_scatter_spreads_over_dims_where_no_dim_divides():
    found = plan(MESH("a b | sum@(dp cp tp)"), MESH("a b"), (2, 4), "float32", replace(FLAT, latency_us=0.0))
    assert found.bytes_in == 2 * 7 * 4
    spread = [p for p in choices(MESH("a b | sum@(dp cp tp)"), MESH("a b"), (2, 4)) if p.steps[0].padded == 1]
    assert [step.kind for step in spread[0].steps] == ["reduce_scatter", "all_gather"]
    oracle.run(replace(spread[0], dtype="float32"))


def test_latency_asks_for_few_collectives_and_bandwidth_for_few_bytes():
    mesh = Small(x=8, y=8)
    source, target = mesh("a b | sum@x"), mesh("a b")
    latency = plan(source, target, (64, 64), "float32", CostModel(1e6, ranks_per_node=64))
    bandwidth = plan(source, target, (64, 64), "float32", CostModel(0.0, memory_gbps=math.inf, ranks_per_node=64))
    assert latency.collectives < bandwidth.collectives
    assert latency.bytes_in > bandwidth.bytes_in


def test_the_user_can_replace_the_cost_model():
    class NoReductionsOnTheWire:
        ranks_per_node = 8

        def time_us(self, traffic: Traffic) -> float:
            return 1.0 if traffic.kind == "reduce_move" else 100.0

    found = plan(MESH("s d | sum@tp"), MESH("s@tp d"), (8, 8), "float32", NoReductionsOnTheWire())
    assert kinds(found) == [("reduce_move", ("tp",))]


# --- size, and sameness ---------------------------------------------------------------------------

FIVE = [
    ("a@(v w) b@x c@y d", "a@x b@v c@(z w) d"),
    ("a@v b c@y d | sum@(w x z)", "a@y b@v c@(z w) d"),
    ("a@v b c d | sum@(w x z)", "a@y b@v c d"),
    ("a b c d | sum@(v w) max@(x y)", "a@(z y) b c d"),
    ("a@(v w x y z) b c d", "a b@(z y x w v) c d"),
    ("a@v b c@y d", "a@v b c d@y"),
]


def calls_of_a_cold_plan(mesh: Small, source: str, target: str, shape: tuple[int, ...]) -> int:
    """The functions that are called to plan what has never been planned."""
    states = (mesh(source), mesh(target))
    planner._plan.cache_clear()
    form.largest.cache_clear()
    form.smallest.cache_clear()
    return calls(lambda: plan(*states, shape))


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1])
@pytest.mark.parametrize(("source", "target"), FIVE)
def test_five_axes_of_65536_ranks_are_planned_in_some_thousand_calls(source, target, size):
    """At most 16,000, 9,000 of them in Python, when this was written, which took under 5 ms."""
    assert calls_of_a_cold_plan(Small(v=4, w=4, x=4, y=8, z=128), source, target, (size,) * 4) < 21_000


def test_planning_does_not_look_at_ranks():
    """A mesh of 2**40 ranks: listing them would never end."""
    mesh = Small(v=2**8, w=2**8, x=2**8, y=2**8, z=2**8)
    for source, target in FIVE:
        found = plan(mesh(source), mesh(target), (2**40, 2**20, 2**20, 2**10))
        assert str(found)
        assert found.peak_bytes > 0


def many_plans() -> str:
    """Plans and exchanges of pairs all over the place, as text."""
    found = [plan(cube(a), cube(b), (8, 6, 5), "float32", CostModel(ranks_per_node=2)) for a, b in PAIRS[::211]]
    mesh, other = Small(a=2, b=3), Small(c=3, d=2)
    found.append(plan(mesh("s@b t | sum@a"), other("s@d t@c"), (6, 6)))
    return "\n".join(f"{p}\n{[step.exchange(5) for step in p.steps]}" for p in found)


def test_plans_and_exchanges_are_the_same_for_every_hash_seed():
    code = "from tests.test_plan_examples import many_plans; print(many_plans())"
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1] == many_plans() + "\n"


# --- what can't be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("s d", "s d | sum@tp", "pending over tp, where the source has nothing"),
        ("s d | max@tp", "s d | sum@tp", "has max pending over tp, not sum"),
        ("s d | sum@cp max@tp", "s d | sum@cp", "innermost first"),
        ("s d | sum@cp max@tp", "s d | max@tp sum@cp", "keep their order"),
        ("s d | prod@cp", "s d", "known reductions: sum, mean, max, min"),
        ("s d", "s d e", "has 3 dims, the tensor 2: [8, 8]"),
    ],
)
def test_impossible_targets_are_errors_that_show_the_state(source, target, why):
    with pytest.raises(ShardingError) as error:
        plan(MESH(source), MESH(target), (8, 8))
    assert why in str(error.value)
    assert target in str(error.value) or source in str(error.value)


def test_what_is_pending_is_told_by_its_name_also_inside_of_a_place():
    with pytest.raises(ShardingError, match="the target has sum pending over tp, where the source has nothing"):
        plan(MESH("s d | sum@cp"), MESH("s d | sum@(cp tp)"), (8, 8))


@pytest.mark.parametrize(
    ("source", "printed"), [("8@tp b", "8@tp b"), ("(2 4)@tp b", "(2 4)@tp b"), ("(2@dp 4) 8", "(2 4)@dp 8")]
)
def test_a_number_in_a_spec_is_printed_as_itself(source, printed):
    mesh = Mesh("dp=2 tp=4")
    assert str(axes.plan(source, "a b", (8, 8), mesh=mesh)).startswith(f"{printed} -> a b ")
    assert mesh.sharding(source).at((8, 8)).spec == printed


@pytest.mark.parametrize("text", ["s@tp d@tp", "s@(tp tp) d", "s@tp d | sum@tp"])
def test_an_axis_is_used_once(text):
    with pytest.raises(ShardingError, match="axis 'tp' is used twice"):
        MESH(text)


def test_an_error_about_both_states_has_each_on_a_line():
    with pytest.raises(ShardingError, match=r"\n  source  s d\n  target  s d \| sum@tp"):
        plan(MESH("s d"), MESH("s d | sum@tp"), (8, 8))


def test_ranks_of_which_the_source_says_nothing_are_an_error():
    with pytest.raises(ShardingError, match="lift"):
        plan(MESH("s@tp", extent="tp"), MESH("s@(dp tp)"), (8,))
    with pytest.raises(ShardingError, match="axis 'dp' isn't made of the axes of"):
        MESH("s@dp", extent="tp")
    with pytest.raises(ShardingError, match="must be whole"):
        plan(MESH("s@tp", extent="tp"), Small(Universe.of(range(8, 10)), x=2)("s@x"), (8,))


def test_a_reduction_stays_pending_only_on_the_axes_it_is_pending_on():
    with pytest.raises(ShardingError, match="other axes"):
        plan(MESH("s | sum@tp"), Small(Universe.of(range(8, 10)), x=2)("s | sum@x"), (8,))


def test_a_split_factor_divides():
    mesh = Small(tp=2)
    with pytest.raises(ShardingError, match="3 doesn't divide into 2 parts: 3@tp is split inside a group"):
        plan(
            mesh("d"),
            oracle.lying(mesh.universe, mesh.extent, (oracle.Grouped((3, 4), (mesh.place("tp"), ())),), (), mesh.axes),
            (12,),
        )
    with pytest.raises(SizeError, match=r"the sizes don't multiply to the dim:  \(3 5\) = 12"):
        plan(mesh("d"), oracle.lying(mesh.universe, mesh.extent, (oracle.Grouped((3, 5), ((), ())),)), (12,))


def test_dtypes_that_cannot_be_reduced_so_are_errors():
    with pytest.raises(ShardingError, match="a mean of int64"):
        plan(MESH("d | mean@tp"), MESH("d"), (8,), "int64")
    with pytest.raises(ShardingError, match="no order"):
        plan(MESH("d | max@tp"), MESH("d"), (8,), "complex64")
    with pytest.raises(ShardingError, match="unknown dtype"):
        plan(MESH("d"), MESH("d"), (8,), "float7")
    assert plan(MESH("d@cp | mean@tp"), MESH("d | mean@tp"), (8,), "int64").collectives == 1


def test_a_rank_that_takes_no_part_has_no_exchange():
    (step,) = plan(MESH("d@tp"), MESH("d"), (8,)).steps
    with pytest.raises(MeshError, match="rank 8 takes no part"):
        step.exchange(8)
