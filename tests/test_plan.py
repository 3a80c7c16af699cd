"""Plans, carried out on all ranks at once by numpy: every one reaches its target, in the bytes and memory that it says.

`judged` is the one judge. What a rank holds is `Sharding.local_indices`, which test_sharding compares with numpy; who
sends which box is what the steps of the plan say. Real processes carry plans out in test_exhaustive and in the laws.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import axes
from axes import CostModel, Mesh
from tests.counting import calls
from tests.strategies import examples, listed, place

ROOT = Path(__file__).resolve().parent.parent
FLAT = CostModel(20.0, 50.0, 50.0, math.inf, ranks_per_node=1 << 40)
MODELS = [FLAT, CostModel(), CostModel(ranks_per_node=2), CostModel(1.0, 300.0, 5.0, ranks_per_node=3), CostModel(0.0, 50.0, 50.0, math.inf)]  # fmt: skip
COLLECTIVES = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "reduce_move"}
REDUCE = {"sum": np.add.reduce, "mean": np.mean, "max": np.maximum.reduce, "min": np.minimum.reduce}

Tiles = dict[int, np.ndarray]


@dataclass(frozen=True)
class State:
    """A sharding, and what is pending of it: `(op, axis)`, innermost first."""

    mesh: Mesh
    spec: str
    pending: tuple[tuple[str, str], ...] = ()
    sharding: axes.Sharding = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sharding", self.mesh.sharding(self.spec))

    @property
    def ranks(self) -> list[int]:
        """All ranks for which the mesh has a line."""
        return [rank for line in self.mesh.axis(self.mesh.axis_names[0]).all_ranks() for rank in line]

    def held(self, shape: tuple[int, ...], rank: int) -> Any:
        """The elements that a rank holds, as an index of the whole array."""
        return np.ix_(*map(listed, self.sharding.local_indices(shape, rank)))

    def largest(self, shape: tuple[int, ...]) -> int:
        return max(math.prod(self.sharding.local_shape(shape, rank)) for rank in self.ranks)

    def resolved(self, values: Tiles, rank: int) -> np.ndarray:
        """The value of what a rank holds a summand of."""

        def over(pending: tuple[tuple[str, str], ...], rank: int) -> np.ndarray:
            if not pending:
                return values[rank]
            *inner, (op, axis) = pending
            return REDUCE[op](np.stack([over(tuple(inner), r) for r in self.mesh.axis(axis).ranks_of(rank)]), axis=0)

        return over(self.pending, rank)

    def wholes(self, shape: tuple[int, ...]) -> Tiles:
        """An array for each rank: another one for each line of the mesh, and each coordinate of what is pending."""
        found = {}
        for rank in self.ranks:
            seen = self.mesh.at(rank)
            seed = [int(np.ravel(seen.ranks)[0]), *(seen.axis(name).index for _, name in self.pending)]
            found[rank] = np.random.default_rng(seed).integers(-99, 99, shape) * 60.0
        return found


# --- carrying out ---------------------------------------------------------------------------------


def boxes_of(tile: np.ndarray, boxes: Any) -> list[np.ndarray]:
    return [tile[(*(slice(*bounds) for bounds in each), ...)] for each in boxes]


def packed(tile: np.ndarray, boxes: Any) -> np.ndarray:
    return np.concatenate([np.empty(0), *(box.reshape(-1) for box in boxes_of(tile, boxes))])


def unpack(out: np.ndarray, boxes: Any, values: np.ndarray) -> None:
    for box in boxes_of(out, boxes):
        assert np.isnan(box).all(), "a box is written twice"
        box[...], values = values[: box.size].reshape(box.shape), values[box.size :]
    assert not values.size, "more is received than there is room for"


def carried(step: Any, tiles: Tiles) -> tuple[Tiles, dict[tuple[int, int], int]]:
    """The tiles after one step, and how many elements went from rank to rank."""
    if step.opened is not step:  # dims of which both sides split factors
        opened = step.opened
        shapes = {rank: opened.source.local_shape(opened.shape, rank) for rank in tiles}
        tiles, sent = carried(opened, {rank: x.reshape(shapes[rank]) for rank, x in tiles.items()})
        return {rank: x.reshape(step.target.local_shape(step.shape, rank)) for rank, x in tiles.items()}, sent
    ranks = sorted({*step.source.universe.ranks, *step.target.universe.ranks})
    if step.kind == "all_reduce":
        return {r: REDUCE[step.op]([tiles[p] for p in step.ranks_of(r)], axis=0) / step.divisor for r in ranks}, {}
    deals = {rank: step.exchange(rank) for rank in ranks if step.takes_part(rank)}
    messages = {(rank, d.ranks[m.peer]): packed(tiles[rank], m.boxes) for rank, d in deals.items() for m in d.sends}
    if step.kind == "all_gather":
        messages = {(peer, rank): tiles[peer].reshape(-1) for rank, d in deals.items() for peer in d.ranks}
    for rank, d in deals.items() if not step.send_bytes and step.kind == "reduce_scatter" else ():
        np.testing.assert_array_equal(np.concatenate([messages[rank, to] for to in d.ranks]), tiles[rank].reshape(-1))
    sent = {pair: values.size for pair, values in messages.items() if pair[0] != pair[1]}
    made = {}
    for rank in step.target.universe.ranks:
        deal = deals[rank]
        scattered = step.kind == "reduce_scatter"
        shape = step.target.local_shape(step.shape, rank)
        layers = [np.full(shape, np.nan) for _ in range(step.group_size if scattered else deal.layers)]
        for source, target in deal.copies:
            unpack(layers[deal.layer], [target], packed(tiles[rank], [source]))
        for m in deal.receives:
            for layer, peer in enumerate(deal.ranks) if scattered else [(m.layer, deal.ranks[m.peer])]:
                unpack(layers[layer], m.boxes, messages.pop((peer, rank)))
        assert not np.isnan(layers).any(), f"{step.kind} leaves holes on rank {rank}"
        made[rank] = layers[0] if step.op is None else REDUCE[step.op](layers, axis=0) / step.divisor
    assert not messages, "what is sent isn't received"
    return made, sent


def judged(source: State, target: State, shape: tuple[int, ...], model: Any = FLAT) -> axes.Plan:
    """The plan, which arrives, sends what it says, and fits into the memory that it says."""
    ends = {"source_mesh": source.mesh, "target_mesh": target.mesh}
    plan = axes.plan(source.spec, target.spec, shape, dtype="float64", cost_model=model, **ends)
    wholes = source.wholes(shape)
    tiles = {rank: wholes[rank][source.held(shape, rank)] for rank in source.ranks}
    same = plan.source.universe == plan.target.universe
    even = all(n % math.prod(s.mesh.shape.values()) == 0 for n in shape for s in (source, target))
    nested = even and not any(n & (n - 1) for s in (source, target) for n in s.mesh.shape.values())
    sizes = [end.largest(shape) for end in (source, target)]
    ranks = math.lcm(len(source.ranks), len(target.ranks))  # a scalar can't be shared: each replica gets it whole
    limit = (
        max(sizes)
        if even and same
        else max(*[padded(end, shape, ranks) for end in (source, target)], 0 if shape else ranks)
    )
    crossed = 0
    for step in plan.steps:
        tiles, sent = carried(step, tiles)
        received, given = (
            max((sum(n for pair, n in sent.items() if pair[end] == rank) for rank in step.ranks), default=0) * 8
            for end in (1, 0)
        )
        crossed += sum(n for (a, b), n in sent.items() if a not in target.ranks and b in target.ranks)
        if step.kind in ("all_gather", "reduce_scatter"):
            assert (
                step.bytes_in
                == step.bytes_out
                == (step.group_size - 1) * step.exchange(step.source.universe.ranks[0]).padded * 8
            )
        elif step.kind != "all_reduce":
            message = 0 if nested else max(sent.values(), default=0) * 8  # it isn't cut between those that have it
            assert received <= step.bytes_in
            assert given <= step.bytes_out + message
            assert not (same and even) or step.bytes_out <= received == step.bytes_in or step.kind == "slice"
        assert max(step.send_bytes, step.receive_bytes) <= limit * 8, f"{plan}: {limit}"
    for step in plan.steps[:-1]:
        assert step.target.largest_tile(shape) <= (sizes[0] if same else max(sizes)), plan
    assert plan.peak_bytes <= (max(sizes) + sum(sizes) + 2 * limit) * 8
    for rank in target.ranks:
        truth = source.resolved(wholes, rank if rank in wholes else source.ranks[0])
        found = target.resolved(tiles, rank)
        np.testing.assert_allclose(found, truth[target.held(shape, rank)], rtol=1e-12, err_msg=f"rank {rank}")
    ops = {op for op, _ in source.pending}
    if same and not ops & {"max", "min"}:
        assert plan.collectives <= (2 if ops or model is not FLAT else 1), plan
    if shape and not {*source.ranks} & {*target.ranks}:
        assert crossed == math.prod(shape), "between islands every element crosses once"
    if same and even and not ops and model is FLAT:
        assert plan.bytes_in == lacking(source, target, shape) * 8
    return plan


def lacking(source: State, target: State, shape: tuple[int, ...]) -> int:
    """The most elements that any rank wants and hasn't."""

    def missing(rank: int) -> int:
        want, have = ([set(listed(i)) for i in end.sharding.local_indices(shape, rank)] for end in (target, source))
        return math.prod(map(len, want)) - math.prod(len(a & b) for a, b in zip(want, have, strict=True))

    return max(map(missing, target.ranks))


def padded(state: State, shape: tuple[int, ...], ranks: int) -> int:
    """Its largest tile, were every dim rounded up to a multiple of the number of ranks, which its splits divide."""
    return math.prod([ranks * -(-n // ranks) for n in shape]) // math.prod(dim.pieces for dim in state.sharding.dims)


# --- all states of 2x2x2 --------------------------------------------------------------------------

CUBE = Mesh("x=2 y=2 z=2")


def states(op: str = "sum") -> list[State]:
    """Each axis replicated, on one of three dims in every order of several, or pending."""
    found = []
    for places in itertools.product(range(-2, 3), repeat=3):
        on = [[axis for axis, at in zip("xyz", places, strict=True) if at == dim] for dim in range(3)]
        pending = tuple((op, axis) for axis, at in zip("xyz", places, strict=True) if at == -1)
        for order in itertools.product(*map(itertools.permutations, on)):
            dims = " ".join(f"{dim}{place(splits)}" for dim, splits in zip("abc", order, strict=True))
            found.append(State(CUBE, " ".join([dims, "|", *(f"{op}@{axis}" for _, axis in pending)]), pending))
    return found


def pairs(op: str = "sum") -> list[tuple[State, State]]:
    return [(a, b) for a, b in itertools.product(states(op), repeat=2) if {*b.pending} <= {*a.pending}]


def test_every_150th_of_the_20313_pairs_of_states_arrives_by_every_kind_of_step():
    every = pairs()
    assert (len(states()), len(every)) == (176, 20_313)
    kinds = {step.kind for pair in every[::150] for step in judged(*pair, (8, 8, 8)).steps}
    assert kinds == {"slice", *COLLECTIVES}
    for pair in every[7::600]:
        judged(*pair, (5, 3, 7))


@pytest.mark.full
@pytest.mark.parametrize(("shape", "model"), [((8, 8, 8), FLAT), ((5, 3, 7), FLAT), ((8, 8, 8), CostModel(ranks_per_node=2))])  # fmt: skip
def test_all_pairs_of_states_arrive(shape, model):
    for pair in pairs():
        judged(*pair, shape, model)


def compared_with_dtensor(*arguments: str) -> str:
    command = [sys.executable, "-m", "docs.planner_table", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_on_every_4000th_pair_no_plan_is_worse_than_either_planner_of_dtensor():
    assert "NO" not in compared_with_dtensor("--every", "4000")


@pytest.mark.full
def test_the_table_in_the_docs_is_what_its_script_prints():
    rows = [row for row in compared_with_dtensor().splitlines() if row.startswith("|")]
    assert len(rows) == 10
    assert "\n".join(rows) in (ROOT / "docs" / "redistribution.md").read_text(encoding="utf-8")


# --- random states on random meshes ---------------------------------------------------------------

GRIDS = {6: [(2, 3), (3, 2), (6,)], 12: [(2, 2, 3), (3, 4), (4, 3), (12,), (3, 2, 2)], 8: [(2, 2, 2), (4, 2)], 10: [(5, 2)], 1: [(1,)]}  # fmt: skip


def mesh_of(grid: tuple[int, ...], ranks: Any) -> Mesh:
    """Axes a, b, c, and every product of them in any order as a further name."""
    names = "abc"[: len(grid)]
    products = [p for n in range(2, len(grid) + 1) for p in itertools.permutations(names, n)]
    declaration = " ".join(f"{name}={size}" for name, size in zip(names, grid, strict=True))
    return Mesh(declaration, *(f"{''.join(p)} = {' '.join(p)}" for p in products), ranks=ranks)


@st.composite
def state(
    draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...], ops: tuple[str, ...], kept: State | None = None
) -> State:
    """Any axis on any dim, pending or neither; neighbours here and there as their product; dims of 36 as groups.

    Of a state that is `kept`, some of the last reductions stay pending.
    """
    pending: list[tuple[str, str]] = []
    for each in reversed(kept.pending if kept else ()):
        if not draw(st.booleans()):
            break
        pending.insert(0, each)
    on: list[list[str]] = [[] for _ in shape]
    for name in draw(st.permutations([name for name in mesh.axis_names if name not in dict(map(reversed, pending))])):
        at = draw(st.integers(-2 if ops else -1, len(shape) - 1))
        if at >= 0:
            on[at].append(name)
        elif at == -2:
            pending.append((draw(st.sampled_from(ops)), name))
    dims = []
    for at, (size, names) in enumerate(zip(shape, on, strict=True)):
        cut = draw(st.integers(0, 3)) if len(names) > 1 else 0
        written = place([*names[: cut - 2], "".join(names[cut - 2 : cut])] if cut > len(names) else names)
        if cut in (1, 2):  # a product of the first, or of the last, before or behind a chunk that may be uneven
            joint = [*names[: cut - 1], "".join(names[cut - 1 : cut + 1]), *names[cut + 1 :]]
            written = place(joint)
        grouped = size == 36 and 12 % math.prod(mesh.shape[name] for name in names) == 0 and draw(st.booleans())
        dims.append(f"(p{at}=3 d{at}=12{written})" if grouped else f"d{at}{written}")
    return State(mesh, " ".join([*dims, "|", *(f"{op}@{axis}" for op, axis in pending)]), tuple(pending))


@st.composite
def redistributions(draw: st.DrawFn, mixed: bool = False) -> tuple[State, State, tuple[int, ...]]:
    """On one mesh, on two factorizations of its ranks, on a sub-mesh, or between any two sets of ranks."""
    total = draw(st.sampled_from([6, 12, 8, 6, 12, 10, 1]))
    grid = draw(st.sampled_from(GRIDS[total]))
    ranks = draw(
        st.sampled_from([list(range(3, 3 + total)), *draw(st.lists(st.permutations(range(total)), max_size=2))])
    )
    size = st.sampled_from([36, 36, total, 2 * total]) if draw(st.booleans()) else st.integers(0, 13) | st.just(36)
    shape = tuple(draw(st.lists(size, max_size=3)))
    mesh = other = mesh_of(grid, ranks)
    kind = draw(st.sampled_from(["same", "same", "same", "factored", "inside", "elsewhere"]))
    if kind == "factored":
        other = mesh_of(draw(st.sampled_from(GRIDS[total])), ranks)
    elif kind == "elsewhere":
        small = draw(st.sampled_from([(2,), (4,), (2, 2), (2, 3), (3, 2)]))
        first = draw(st.sampled_from([0, 3, 3 + total, 20]))
        other = mesh_of(small, draw(st.permutations(range(first, first + math.prod(small)))))
    elif kind == "inside" and len(grid) > 1:
        inside = draw(st.permutations(mesh.axis_names))[: len(grid) - 1]
        mesh, other = mesh[tuple(inside)], mesh[tuple(inside[: draw(st.integers(1, len(inside)))])]
    ops = ("sum", "mean", "max", "min") if mixed else ("sum",)
    source = draw(state(mesh, shape, ops))
    return source, draw(state(other, shape, (), source if mesh is other else None)), shape


@examples(300)
@given(redistributions(), st.sampled_from(MODELS))
@example((State(m := mesh_of((3, 2, 2), range(12)), "s@(a bc)"), State(m, "s@(a b c)"), (35,)), FLAT)
@example((State(m, "s@a t@b"), State(m, "s@a t@(b c)"), (0, 5)), FLAT)
def test_any_sharding_becomes_any_other_whatever_divides(case, model):
    judged(*case, model)


@examples(60)
@given(redistributions(mixed=True), st.sampled_from(MODELS))
def test_mixed_reductions_are_resolved_in_their_order(case, model):
    judged(*case, model)


# --- examples -------------------------------------------------------------------------------------

MESH = Mesh("dp=2 cp=2 tp=2")


def kinds(plan: axes.Plan) -> list[tuple[str, tuple[str, ...]]]:
    return [(step.kind, step.axes) for step in plan.steps]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("b s@tp d -> b s d", [("all_gather", ("tp",))]),
        ("b s d | sum@tp -> b s d", [("all_reduce", ("tp",))]),
        ("b s d | sum@tp -> b s@tp d", [("reduce_scatter", ("tp",))]),
        ("b s@tp d -> b s d@tp", [("all_to_all", ("tp",))]),
        ("b s d -> b s@tp d", [("slice", ())]),
        ("b s@cp d -> b s@(cp tp) d", [("slice", ())]),
        ("b s@(cp tp) d -> b s@(tp cp) d", [("permute", ("cp", "tp"))]),
        ("b s@(cp tp) d -> b s@cp d", [("all_gather", ("tp",))]),
        ("b s@(cp tp) d -> b s@tp d", [("all_to_all", ("cp", "tp"))]),
        ("b s@(cp tp) d -> b s@cp d@tp", [("all_to_all", ("tp",))]),
        ("b s d | sum@(cp tp) -> b s d", [("all_reduce", ("cp", "tp"))]),
        ("b s d | sum@(cp tp) -> b s d | sum@cp", [("all_reduce", ("tp",))]),
        ("b s d | sum@(cp tp) -> b s@tp d@cp", [("reduce_scatter", ("tp", "cp"))]),
        ("b s d | sum@(cp tp) -> b s@cp d | sum@tp", [("reduce_scatter", ("cp",))]),
        ("b s d | sum@cp mean@tp -> b s@(cp tp) d", [("reduce_scatter", ("cp", "tp"))]),
        ("b s d | sum@tp -> b@dp s@tp d", [("slice", ()), ("reduce_scatter", ("tp",))]),
        ("b@dp s d | sum@tp -> b@(tp dp) s d", [("reduce_move", ("dp", "tp"))]),
        ("b@dp s@cp d@tp -> b@dp s@cp d@tp", []),
    ],
)
def test_the_obvious_collective_is_found(expression, expected):
    assert kinds(axes.plan(*expression.split(" -> "), (8, 16, 32), MESH, "bfloat16", FLAT)) == expected


def test_a_plan_prints_itself_and_has_what_it_costs():
    found = axes.plan("b@dp s@tp d", "b@dp s d@tp", (8, 2048, 4096), Mesh("dp=2 tp=4"), "bfloat16")
    assert (
        repr([found])
        == f"[{found}]"
        == (
            "[b@dp s@tp d -> b@dp s d@tp     [8, 2048, 4096] bfloat16\n"
            "  1  all_to_all  tp  4 ranks, stride 1  12.0 MiB in, 12.0 MiB out]"
        )
    )
    assert (found.collectives, found.bytes_in, found.bytes_out, found.cost > 0) == (1, 12 << 20, 12 << 20, True)
    assert found.peak_bytes == (16 + 16 + 12 + 12) << 20
    assert list(found.at(6).steps[0].ranks) == [4, 5, 6, 7]
    assert str(axes.plan("b", "b", (3,), MESH)).endswith("nothing to do")


def test_a_fingerprint_tells_plans_apart_but_not_names_or_views():
    found = axes.plan("s@tp d", "s d@tp", (8, 8), MESH).fingerprint
    assert found == axes.plan("x@c y", "x y@c", (8, 8), Mesh("a=2 b=2 c=2").at(3)).fingerprint
    others = [("s@tp d", "s d@tp", (8, 16)), ("s@tp d", "s d@tp", (8, 8), MESH, "bfloat16"), ("s@cp d", "s d@cp", (8, 8)), ("s@tp d", "s d", (8, 8))]  # fmt: skip
    assert len({found, *(axes.plan(*each, *[MESH][len(each) - 3 :]).fingerprint for each in others)}) == 5


FLAT_STEPS = [("b@tp s", "b s", True), ("b s | sum@tp", "b@tp s", True), ("b s@tp", "b s", False), ("b s | sum@tp", "b s@tp", False)]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "flat"), FLAT_STEPS)
def test_gathers_and_scatters_of_the_first_dim_need_no_copy(source, target, flat):
    (step,) = axes.plan(source, target, (8, 4), MESH).steps
    assert (step.send_bytes + step.receive_bytes == 0) == flat


SLOW = CostModel(5.0, 300.0, 10.0, math.inf, ranks_per_node=8)


@pytest.mark.parametrize(
    ("declaration", "model", "expected"),
    [
        ("dp=4 tp=8", SLOW, [("all_to_all", ("dp",)), ("all_gather", ("tp",))]),
        ("dp=4 tp=8", FLAT, [("all_to_all", ("dp",))]),
        ("dp=2 fsdp=16", SLOW, [("all_to_all", ("dp",)), ("all_gather", ("8:1",))]),
    ],
)
def test_two_tiers_send_between_nodes_only_once(declaration, model, expected):
    found = axes.plan("b@dp d", "b d@dp", (64, 1 << 20), Mesh(declaration), "bfloat16", model)
    assert kinds(found) == expected


def test_latency_asks_for_few_collectives_and_bandwidth_for_few_bytes():
    dear, cheap = (
        axes.plan("a b | sum@x", "a b", (64, 64), Mesh("x=8 y=8"), cost_model=CostModel(us, memory_gbps=math.inf, ranks_per_node=64))
        for us in (1e6, 0.0)
    )  # fmt: skip
    assert dear.collectives < cheap.collectives
    assert dear.bytes_in > cheap.bytes_in


FIVE = [
    ("a@(v w) b@x c@y d", "a@x b@v c@(z w) d"),
    ("a@v b c@y d | sum@(w x z)", "a@y b@v c@(z w) d"),
    ("a b c d | sum@(v w) max@(x y)", "a@(z y) b c d"),
    ("a@(v w x y z) b c d", "a b@(z y x w v) c d"),
]


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("ends", FIVE)
def test_five_axes_of_65536_ranks_are_planned_in_some_thousand_calls_and_2_to_the_40_in_as_many(ends, more):
    """At most 16,000, 9,000 of them in Python, when this was written, which took under 5 ms. Nobody lists the ranks."""
    mesh = Mesh("v=4 w=4 x=4 y=8 z=128")
    assert calls(lambda: axes.plan(*ends, ((1 << 15) + more,) * 4, mesh)) < 25_000
    large = axes.plan(*ends, (2**40 + more, 2**8, 2**6, 2**6), Mesh("v=256 w=256 x=256 y=256 z=256"))
    assert len(str(large)) < 1000 < large.peak_bytes


def many_texts() -> str:
    """Plans and what each rank sends, all over the place, as text."""
    found = [
        axes.plan(a.spec, b.spec, (8, 6, 5), CUBE, cost_model=CostModel(ranks_per_node=2)) for a, b in pairs()[::401]
    ]
    found.append(
        axes.plan("s@b t | sum@a", "s@d t@c", (6, 6), source_mesh=Mesh("a=2 b=3"), target_mesh=Mesh("c=3 d=2"))
    )
    rules = axes.LayoutRules({("*.q", "*.k"): ("*.qk", "(h k) d, (g k) d -> (h k + g k) d"), "*": "x.*"}, k=2)
    change = rules.applied({"0.q": (4, 3), "0.k": (2, 3), "b": (2,), "a": (1,)})
    return "\n".join(f"{p}\n{[step.exchange(5) for step in p.steps]}" for p in found) + f"\n{change}{change.pieces}"


@pytest.mark.full
def test_plans_and_what_is_sent_are_the_same_for_any_hash_seed():
    code = "from tests.test_plan import many_texts; print(many_texts())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == many_texts() + "\n"  # the seed of this process is another one
