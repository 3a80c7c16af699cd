"""Shardings: what each rank holds, against `torch.chunk` after `torch.chunk` and numpy's reshape."""

from __future__ import annotations

import itertools
import math
import pickle
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from axes.algebra.chunks import factor_runs, largest_chunk, nested_chunk, same_chunks
from axes.algebra.errors import ExpressionError, MeshError, ShardingError, SizeError
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.algebra.placements import PlacementSpec, check_torch_can, placement_specs
from axes.algebra.plan import choices, plan
from axes.algebra.redistribution import retargeted
from axes.algebra.sharding import Sharding
from axes.algebra.specs import marked_sharding, parsed_sharding

from .strategies import (
    FactorCase,
    MeshCase,
    SpecCase,
    digit_systems,
    elements,
    listed,
    meshes,
    nested,
    place,
    refusal,
    regrouped,
    sharded,
    span,
    specs,
)


def of(mesh: MeshCase, spec: SpecCase) -> Sharding:
    return mesh.mesh.sharding(spec.spec)


def held(sharding: Sharding, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], ...]:
    """The indices of each dim that a rank holds."""
    return tuple(tuple(listed(found)) for found in sharding.local_indices(shape, rank))


def same_data(one: Sharding, other: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether both give every rank the same indices of each dim, by listing them."""
    return all(held(one, shape, rank) == held(other, shape, rank) for rank in one.mesh.universe.ranks)


# ---------------------------------------------------------------------------- what each rank holds


@given(sharded())
def test_every_rank_holds_what_nested_chunks_of_reshaped_dims_give(case):
    mesh, spec = case
    sharding = of(mesh, spec)
    for position, rank in enumerate(mesh.ranks):
        expected = elements(mesh, spec, position)
        assert held(sharding, spec.shape, rank) == tuple(map(tuple, expected))
        assert sharding.local_shape(spec.shape, rank) == tuple(len(found) for found in expected)


@given(sharded())
def test_local_indices_cut_the_shard_out_of_an_array(case):
    mesh, spec = case
    whole = np.arange(math.prod(spec.shape)).reshape(spec.shape)
    for position, rank in enumerate(mesh.ranks):
        expected = whole[np.ix_(*elements(mesh, spec, position))]
        found = whole
        for dim, indices in enumerate(of(mesh, spec).local_indices(spec.shape, rank)):
            runs = indices if isinstance(indices, tuple) else (indices,)
            found = np.concatenate([found[(slice(None),) * dim + (run,)] for run in runs], axis=dim)
        assert np.array_equal(found, expected)


@given(sharded())
def test_the_runs_of_a_shard_are_as_few_as_can_be_and_inside_the_tensor(case):
    mesh, spec = case
    for rank in mesh.ranks:
        for extent, indices in zip(spec.shape, of(mesh, spec).local_indices(spec.shape, rank), strict=True):
            runs = indices if isinstance(indices, tuple) else (indices,)
            assert runs
            assert all(0 <= run.start <= run.stop <= extent for run in runs)
            assert all(one.stop < other.start for one, other in itertools.pairwise(runs))
            assert len(runs) == 1 or all(run.start < run.stop for run in runs)


@given(sharded())
def test_shards_cover_the_tensor_and_each_element_lies_on_as_many_ranks_as_replicate_it(case):
    mesh, spec = case
    sharding = of(mesh, spec)
    count = Counter(element for rank in mesh.ranks for element in itertools.product(*held(sharding, spec.shape, rank)))
    split = math.prod(mesh.sizes[axis] for dim in spec.dims for factor in dim for axis in factor.axes)
    assert set(count) == set(itertools.product(*map(range, spec.shape)))
    assert set(count.values()) <= {len(mesh.ranks) // split}


@given(meshes(), st.data())
def test_a_submesh_holds_the_tensor_once_in_each_of_its_lines(case, data):
    names = data.draw(st.permutations(data.draw(st.sampled_from(case.disjoint))))
    mesh = case.mesh[tuple(names[: data.draw(st.integers(1, len(names)))])]
    sharding = mesh.sharding(f"a{place(mesh.axis_names)} b")
    for rank in case.ranks:
        line = np.array(mesh.at(rank).ranks).reshape(-1).tolist()
        found = [i for r in line for i in listed(sharding.local_indices((7, 2), r)[0])]
        assert sorted(found) == list(range(7))


@given(sharded())
def test_the_rank_that_a_sharding_is_seen_from_is_its_meshs(case):
    mesh, spec = case
    for rank in mesh.ranks:
        seen = mesh.mesh.at(rank).sharding(spec.spec)
        assert seen == of(mesh, spec)
        assert seen.local_indices(spec.shape) == of(mesh, spec).local_indices(spec.shape, rank)
        assert seen.local_shape(spec.shape) == of(mesh, spec).local_shape(spec.shape, rank)
    assert of(mesh, spec).local_shape(spec.shape) == of(mesh, spec).local_shape(spec.shape, mesh.mesh.rank)


@given(st.integers(0, 40), st.lists(st.integers(1, 5), max_size=3))
def test_a_nested_chunk_is_torch_chunk_after_torch_chunk(extent, sizes):
    pieces = []
    for coordinates in itertools.product(*map(range, sizes)):
        start, stop = nested_chunk(extent, zip(sizes, coordinates, strict=True))
        assert list(range(start, stop)) == nested(extent, sizes, coordinates)
        pieces.append((start, stop))
    assert [i for start, stop in pieces for i in range(start, stop)] == list(range(extent))
    assert largest_chunk(extent, sizes) == max(stop - start for start, stop in pieces)


def test_five_elements_over_two_times_two_and_over_four_as_the_design_has_it():
    mesh = Mesh("cp=2 tp=2", "both = cp tp")
    for spec, lengths in [("s@(cp tp)", [2, 1, 1, 1]), ("s@both", [2, 2, 1, 0]), ("s@(tp cp)", [2, 1, 1, 1])]:
        found = [mesh.sharding(spec).local_shape((5,), rank)[0] for rank in range(4)]
        assert found == lengths, spec


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_index_runs_are_the_merged_indices_of_a_restricted_grid(extents, data):
    ranges = []
    for extent in extents:
        start = data.draw(st.integers(0, extent))
        ranges.append((start, data.draw(st.integers(start, extent))))
    grid = np.arange(math.prod(extents)).reshape(extents)
    expected = grid[tuple(slice(*r) for r in ranges)].reshape(-1).tolist()
    runs = factor_runs(tuple(extents), tuple(ranges))
    assert [i for start, stop in runs for i in range(start, stop)] == expected
    assert all(a[1] < b[0] for a, b in itertools.pairwise(run for run in runs if run[0] < run[1]))


# ---------------------------------------------------------------------------- text


@given(sharded())
def test_the_spec_of_a_sharding_parses_to_it_again(case):
    mesh, spec = case
    sharding = of(mesh, spec)
    assert mesh.mesh.sharding(sharding.spec) == sharding
    assert mesh.mesh.sharding(sharding.spec).spec == sharding.spec == str(sharding)
    assert sharding.ndim == len(spec.shape)


@given(sharded())
def test_sized_fills_the_factors_in_and_changes_nothing_else(case):
    mesh, spec = case
    sharding = of(mesh, spec)
    sized = sharding.sized(spec.shape)
    assert sized.sized(spec.shape) == sized
    assert mesh.mesh.sharding(sized.spec) == sized
    assert sized.is_equivalent(sharding, spec.shape)
    for rank in mesh.ranks:
        assert sized.local_indices(spec.shape, rank) == sharding.local_indices(spec.shape, rank)


@given(sharded())
def test_a_sharding_survives_pickling_and_hashes_by_value(case):
    mesh, spec = case
    sharding = of(mesh, spec)
    again = pickle.loads(pickle.dumps(sharding))
    assert again == sharding
    assert hash(again) == hash(sharding)
    assert again.local_indices(spec.shape, mesh.ranks[-1]) == sharding.local_indices(spec.shape, mesh.ranks[-1])
    assert len({sharding, again, mesh.mesh.sharding(spec.spec)}) == 1


MESH = Mesh("dp=2 cp=2 tp=2", "fsdp = dp cp", "world = dp cp tp")


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("", ""),
        ("|", ""),
        ("b |", "b"),
        ("b s@tp", "b s@tp"),
        ("b@() s@(tp)", "b s@tp"),
        ("b | sum@tp sum@cp", "b | sum@tp sum@cp"),
        ("b|sum@(tp cp)", "b | sum@(tp cp)"),
        ("_ _@dp", "_ _@dp"),
        ("3 h=8@tp", "3 h=8@tp"),
        ("(h d)", "(h d)"),
        ("(h d)@tp", "(h d)@tp"),
        ("(h=2 d)@(dp tp)", "(h=2 d)@(dp tp)"),
        ("(h=2 d=3)@tp", "(h=2 d=3)@tp"),
        ("(2 3)", "(2 3)"),
        ("()", "()"),
        ("()@tp", "()@tp"),
        ("(h@tp)", "h@tp"),
        ("(h@tp d)", "(h@tp d)"),
        ("(h@() d)", "(h d)"),
        ("(3 h@tp 2)", "(3 h@tp 2)"),
        ("b | sum@()", "b | sum@()"),
    ],
)
def test_the_canonical_text_of_a_sharding(spec, canonical):
    sharding = MESH.sharding(spec)
    assert sharding.spec == canonical
    assert MESH.sharding(canonical) == sharding
    assert repr(sharding) == f"Sharding({canonical!r}, {MESH!r})"


def test_sizes_given_as_keywords_are_those_written_in_the_text():
    assert MESH.sharding("(h@tp d)", h=8) == MESH.sharding("(h=8@tp d)") == MESH.sharding("(h@tp d)", sizes={"h": 8})
    assert MESH.sharding("(h d)@tp", h=8).spec == "(h=8 d)@tp"
    assert MESH.sharding("h d", h=8).spec == "h=8 d"
    assert MESH.sharding("h d", h=-1).spec == "h d"


@pytest.mark.parametrize(
    ("spec", "shape", "rank", "indices"),
    [
        ("b@dp s@(cp tp) d", (4, 8, 2), 6, ((2, 3), (4, 5), (0, 1))),
        ("b@world", (8,), 5, ((5,),)),
        ("b@(tp cp dp)", (8,), 6, ((3,),)),
        ("(qkv=3 h@tp d=2)", (24,), 1, ((4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23),)),
        ("(a@dp b@tp)", (16,), 5, None),
        ("(a=4@dp b@tp)", (16,), 5, ((10, 11, 14, 15),)),
        ("(a b)@tp", (6,), 1, ((3, 4, 5),)),
        ("(a=3 b)@tp", (6,), 1, ((3, 4, 5),)),
        ("(a=3 b)@tp", (3,), 1, ((2,),)),
        ("b@fsdp", (3,), 6, ((),)),
        ("b@dp", (0,), 0, ((),)),
        ("b@dp", (1,), 4, ((),)),
        ("", (), 3, ()),
    ],
)
def test_local_indices_by_example(spec, shape, rank, indices):
    if indices is None:
        with pytest.raises(SizeError, match="more than one size is missing"):
            MESH.sharding(spec).local_indices(shape, rank)
    else:
        assert held(MESH.sharding(spec), shape, rank) == indices


# ---------------------------------------------------------------------------- equivalence


@given(meshes(ranks=False), st.data())
def test_equivalence_at_a_shape_is_the_same_indices_on_every_rank(case, data):
    one = data.draw(specs(case, pending=False))
    names = data.draw(st.permutations(data.draw(st.sampled_from(case.disjoint))))
    where = data.draw(st.lists(st.integers(-1, len(one.shape) - 1), min_size=len(names), max_size=len(names)))
    split = [[name for name, at in zip(names, where, strict=True) if at == d] for d in range(len(one.shape))]
    a, b = of(case, one), case.mesh.sharding(" ".join(f"x{d}{place(axes)}" for d, axes in enumerate(split)))
    expected = same_data(a, b, one.shape)
    assert a.is_equivalent(b, one.shape) == expected == b.is_equivalent(a, one.shape)
    assert a.is_equivalent(a, one.shape)
    assert a.is_equivalent(a)


@st.composite
def one_dim_pairs(draw) -> tuple[MeshCase, str, str, int]:
    """Two places for one dim, often the same digits under other names, and an extent."""
    case = draw(meshes(ranks=False))
    texts = []
    for _ in range(2):
        names = draw(st.permutations(draw(st.sampled_from(case.disjoint))))
        texts.append(f"s{place(names[: draw(st.integers(0, len(names)))])}")
    return case, *texts, draw(st.integers(0, 25))


@given(one_dim_pairs())
def test_equivalence_of_one_dim_split_over_any_axes_and_aliases_is_the_same_elements(case):
    mesh, one, other, extent = case
    a, b = mesh.mesh.sharding(one), mesh.mesh.sharding(other)
    assert a.is_equivalent(b, (extent,)) == same_data(a, b, (extent,))
    even = 2 * math.lcm(*(s.dims[0].pieces for s in (a, b)))
    assert a.is_equivalent(b) == same_data(a, b, (even,)) == b.is_equivalent(a)


@given(regrouped())
def test_equivalence_of_axes_flattened_behind_others_is_the_same_elements(case):
    mesh, one, other, extent = case
    a, b = mesh.sharding(one.partition(" |")[0]), mesh.sharding(other)
    assert a.is_equivalent(b, (extent,)) == same_data(a, b, (extent,)) == b.is_equivalent(a, (extent,))


@given(digit_systems(largest=64), st.data())
def test_chunks_by_any_digits_in_any_order_are_the_same_where_they_are_on_every_rank(system, data):
    digits = [digit for digit in system if digit[0] > 1]
    sides = []
    for _ in range(2):
        left, chunks = data.draw(st.permutations(digits)) if data.draw(st.booleans()) else digits, []
        while left:
            count = data.draw(st.integers(1, len(left)))
            chunks.append(left[:count])
            left = left[count:]
        sides.append(chunks)
    extent = data.draw(st.integers(0, 6) | st.integers(0, 150))

    def held(chunks: list[list[tuple[int, int]]], position: int) -> list[int]:
        layouts = [Layout.of(chunk) for chunk in chunks]
        return nested(extent, [each.size for each in layouts], [each.coordinate(position) for each in layouts])

    expected = all(held(sides[0], at) == held(sides[1], at) for at in range(span(system)))
    assert same_chunks(extent, *sides) == expected


def test_equivalence_at_a_size_that_does_not_divide_looks_at_no_rank():
    mesh = Mesh("a=1000000 b=1000000", "ab = a b")
    one, other, all_ = (mesh.sharding(text) for text in ("s@(a b)", "s@(b a)", "s@ab"))
    assert one.is_equivalent(mesh.sharding("x@(a b)"), (2 * 10**12 + 1,))
    assert not one.is_equivalent(other, (2 * 10**12 + 1,))
    assert not one.is_equivalent(all_, (2 * 10**12 + 1,))
    assert one.is_equivalent(all_, (2 * 10**12 - 1,))


@st.composite
def grouped_pairs(draw) -> tuple[MeshCase, SpecCase, SpecCase, int]:
    """Two ways to write one dim as factors with splits, and an extent that both fit."""
    case = draw(meshes(ranks=False))
    names = draw(st.permutations(draw(st.sampled_from(case.disjoint))))
    names = names[: draw(st.integers(0, len(names)))]
    total = math.prod(case.sizes[name] for name in names)
    free = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2))
    extent = total * math.prod(free)
    found = []
    for _ in range(2):
        # The same pieces in some order, cut into factors somewhere: an axis splits what it is major of.
        factors: list[FactorCase] = []
        axes, size = [], 1
        for piece in draw(st.permutations([*names, *free])) if draw(st.booleans()) else [*names, *free]:
            if isinstance(piece, str):
                axes.append(piece)
                size *= case.sizes[piece]
            else:
                size *= piece
                if draw(st.booleans()):
                    factors.append(FactorCase(f"f{len(factors)}", size, tuple(axes)))
                    axes, size = [], 1
        factors.append(FactorCase(f"f{len(factors)}", size, tuple(axes)))
        inner = " ".join(f"{f.name}={f.size}{place(f.axes)}" for f in factors)
        found.append(SpecCase(f"({inner})", (extent,), (tuple(factors),)))
    return case, *found, extent


@given(grouped_pairs())
def test_equivalence_of_factors_is_the_same_elements(case):
    mesh, one, other, extent = case
    a, b = of(mesh, one), of(mesh, other)
    expected = same_data(a, b, (extent,))
    assert a.is_equivalent(b, (extent,)) == expected
    # With every size written, that is the only shape there is.
    assert a.is_equivalent(b) == expected == b.is_equivalent(a)


@given(grouped_pairs())
def test_equivalence_of_factors_with_an_open_size_holds_for_every_shape_that_divides(case):
    mesh, one, other, extent = case

    def opened(spec: SpecCase) -> Sharding:
        *front, last = spec.dims[0]
        texts = [f"{f.name}={f.size}{place(f.axes)}" for f in front] + [f"{last.name}{place(last.axes)}"]
        return mesh.mesh.sharding(f"({' '.join(texts)})")

    a, b = opened(one), opened(other)
    expected = all(same_data(a, b, (extent * more,)) for more in (1, 2, 3, 6))
    assert a.is_equivalent(b) == expected == b.is_equivalent(a)


PENDING = st.lists(
    st.tuples(st.sampled_from(["sum", "mean", "max"]), st.lists(st.sampled_from(["dp", "cp", "tp"]), max_size=2)),
    max_size=3,
)


@given(PENDING, PENDING)
def test_pending_is_equivalent_where_the_same_reductions_come_in_the_same_order(one, other):
    def text(pending) -> str:
        return "b | " + " ".join(f"{op}@({' '.join(axes)})" for op, axes in pending)

    def meaning(pending) -> list[tuple[str, frozenset[str]]]:
        found: list[tuple[str, frozenset[str]]] = []
        for op, axes in pending:
            if not axes:
                continue
            if found and found[-1][0] == op:
                found[-1] = (op, found[-1][1] | set(axes))
            else:
                found.append((op, frozenset(axes)))
        return found

    try:
        a, b = MESH.sharding(text(one)), MESH.sharding(text(other))
    except ShardingError as error:
        assume("used twice" not in str(error))
        raise
    assert a.is_equivalent(b) == (meaning(one) == meaning(other)) == a.is_equivalent(b, (4,))


def test_a_pending_alias_is_equivalent_to_its_axes_and_axes_of_size_one_are_nothing():
    mesh = Mesh("dp=2 tp=2 one=1", "world = dp tp")
    assert mesh.sharding("b | sum@world").is_equivalent(mesh.sharding("b | sum@(tp dp)"))
    assert mesh.sharding("b | sum@tp max@one sum@dp").is_equivalent(mesh.sharding("b | sum@world"))
    assert mesh.sharding("b@one | sum@()").is_equivalent(mesh.sharding("b | max@one"))
    assert not mesh.sharding("b | sum@tp").is_equivalent(mesh.sharding("b | mean@tp"))
    assert not mesh.sharding("b | sum@tp max@dp").is_equivalent(mesh.sharding("b | max@dp sum@tp"))


def test_shardings_of_other_meshes_are_equivalent_where_ranks_and_digits_are():
    one, other = Mesh("dp=2 tp=4"), Mesh("a=2 b=2 c=2")
    assert one.sharding("s@tp").is_equivalent(other.sharding("x@(b c)"))
    assert not one.sharding("s@tp").is_equivalent(other.sharding("x@(c b)"))
    assert not one.sharding("s").is_equivalent(Mesh("dp=8", ranks=range(8, 16)).sharding("s"))
    assert not one.sharding("s").is_equivalent(one.sharding("s t"))
    assert one.sharding("s@tp").is_equivalent(other["b", "c"].sharding("x@(b c)"))


def test_two_factorizations_without_common_digits_are_equivalent_only_where_nothing_is_there():
    mesh = Mesh("a=2 b=3", "(a b) = c d", c=3)
    one, other = mesh.sharding("s@a"), mesh.sharding("s@d")
    assert one.is_equivalent(other, (0,))
    assert not one.is_equivalent(other, (1,))
    assert not one.is_equivalent(other, (6,))
    assert not one.is_equivalent(other)


# ---------------------------------------------------------------------------- names and views


def test_what_an_equal_sharding_was_asked_before_lends_neither_its_names_nor_its_view():
    for rank, names in itertools.product((0, 3), ("bsd", "xyz")):
        check_names_and_view(rank, names)


def check_names_and_view(rank: int, names: str) -> None:
    mesh = Mesh("dp=2 tp=2").at(rank)
    b, s, d = names
    grouped, plain = mesh.sharding(f"({b}@dp {s}) {d}", sizes={b: 4}), mesh.sharding(f"{b}@dp {s} {d} | sum@tp")
    marked, _ = marked_sharding(mesh, f"{b}@dp {s} | same@tp")
    made = [grouped, plain, marked, grouped.at((8, 8)), retargeted(plain, "... | *", (8, 8, 8))]
    assert [each.spec for each in made[3:]] == [f"({b} {s})@dp {d}", plain.spec]
    found = plan(plain, mesh.sharding(f"{b} {s}@dp {d}@tp"), (8, 8, 8))
    ends = [found.source, found.target, *(end for step in found.steps for end in (step.source, step.target))]
    ends += [end for each in choices(grouped, mesh.sharding(f"_ {d}@dp"), (8, 8)) for end in (each.source, each.target)]
    for each in (*made, *ends):
        assert {*re.findall(r"\b[a-z]\b", each.spec)} <= {*names}
        assert each.mesh.rank == rank
    assert mesh.rearrange("dp tp -> tp dp").rank == rank


def test_a_position_is_not_negative():
    with pytest.raises(MeshError, match="a position is a whole number from 0; found -1"):
        Layout((2,), (1,)).coordinate(-1)


# ---------------------------------------------------------------------------- placements


TORCH = {"sum": "sum", "mean": "avg", "max": "max", "min": "min"}


def torch_placements(found: tuple[PlacementSpec, ...]) -> list[object]:
    """What the runtime makes of placement specs, written once more."""

    def one(spec: PlacementSpec) -> object:
        if spec.op is not None:
            return Partial(TORCH[spec.op])
        if spec.dim is None:
            return Replicate()
        return Shard(spec.dim) if spec.split_factor == 1 else _StridedShard(spec.dim, split_factor=spec.split_factor)

    return [one(spec) for spec in found]


@given(sharded())
def test_placements_come_back_as_an_equivalent_sharding(case):
    mesh, spec = case
    sharding = of(mesh, spec).sized(spec.shape)
    try:
        check_torch_can(sharding, spec.shape)
    except ShardingError:
        return
    found = placement_specs(sharding)
    assert len(found) == mesh.mesh.ndim
    again = Sharding.from_placements(mesh.mesh, torch_placements(found), sharding.ndim, spec.shape)
    # Torch says per axis what is pending, not in which order: one kind of reduction at a time comes back.
    if len({op for op, _ in spec.pending}) <= 1:
        assert again.is_equivalent(sharding, spec.shape)
    for rank in mesh.ranks:
        assert held(again, spec.shape, rank) == held(sharding, spec.shape, rank)
    assert placement_specs(again) == found


@given(sharded(groups=False, pending=False))
def test_what_is_refused_as_no_product_of_axes_is_equivalent_to_no_plain_placements(case):
    mesh, spec = case
    sharding = of(mesh, spec)
    refused = refusal(ShardingError, lambda: placement_specs(sharding))
    if refused:
        assert "isn't a product of whole axes" in refused
        options = [Replicate(), *map(Shard, range(sharding.ndim))]
        for placements in itertools.product(options, repeat=mesh.mesh.ndim):
            assert not Sharding.from_placements(mesh.mesh, placements, sharding.ndim).is_equivalent(sharding)


@given(meshes(), st.data())
def test_plain_placements_are_the_sharding_that_they_say(case, data):
    ndim = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.integers(0, 9)) for _ in range(ndim))
    options = [Replicate(), *(Shard(d) for d in range(-ndim, ndim)), Partial(), Partial("avg"), Partial("max")]
    placements = [data.draw(st.sampled_from(options)) for _ in case.mesh.axis_names]
    sharding = Sharding.from_placements(case.mesh, placements, ndim, shape)
    for position, rank in enumerate(case.ranks):
        for dim, extent in enumerate(shape):
            axes = [
                name
                for name, found in zip(case.mesh.axis_names, placements, strict=True)
                if isinstance(found, Shard) and found.dim % ndim == dim
            ]
            expected = nested(extent, [case.sizes[a] for a in axes], [int(case.coordinates[a][position]) for a in axes])
            assert listed(sharding.local_indices(shape, rank)[dim]) == expected
    normal = [Shard(p.dim % ndim) if isinstance(p, Shard) else p for p in placements]
    assert torch_placements(placement_specs(sharding)) == normal


@pytest.mark.parametrize(
    ("spec", "placements"),
    [
        ("b@dp s@(cp tp)", (PlacementSpec(0), PlacementSpec(1), PlacementSpec(1))),
        ("b s", (PlacementSpec(), PlacementSpec(), PlacementSpec())),
        ("b s@(tp cp)", (PlacementSpec(), PlacementSpec(1, 2), PlacementSpec(1))),
        ("b@(tp cp dp)", (PlacementSpec(0, 4), PlacementSpec(0, 2), PlacementSpec(0))),
        ("b@(cp dp tp)", (PlacementSpec(0, 2), PlacementSpec(0), PlacementSpec(0))),
        ("b@world", (PlacementSpec(0), PlacementSpec(0), PlacementSpec(0))),
        ("b@fsdp s@tp", (PlacementSpec(0), PlacementSpec(0), PlacementSpec(1))),
        ("b | sum@fsdp", (PlacementSpec(op="sum"), PlacementSpec(op="sum"), PlacementSpec())),
        ("b | max@dp mean@tp", (PlacementSpec(op="max"), PlacementSpec(), PlacementSpec(op="mean"))),
        ("(qkv=3 h@tp d)", (PlacementSpec(), PlacementSpec(), PlacementSpec(0, 3))),
        ("(h=8@tp d)", (PlacementSpec(), PlacementSpec(), PlacementSpec(0))),
        ("(h=8@(dp tp) d)", (PlacementSpec(0), PlacementSpec(), PlacementSpec(0))),
        ("(one=1 h@(dp tp) d=2)", (PlacementSpec(0), PlacementSpec(), PlacementSpec(0))),
        ("(a=2@dp b@tp)", (PlacementSpec(0), PlacementSpec(), PlacementSpec(0))),
        ("s@(dp cp) (qkv=3 h@tp d=2)", (PlacementSpec(0), PlacementSpec(0), PlacementSpec(1, 3))),
    ],
)
def test_placements_by_example(spec, placements):
    assert placement_specs(MESH.sharding(spec)) == placements


@pytest.mark.parametrize(
    ("mesh", "spec", "message"),
    [
        (
            Mesh("dp=4 tp=2", "(dp) = a b", a=2),
            "s@a",
            "'a' isn't a product of whole axes of Mesh('dp=4 tp=2', 'dp = a=2 b=2'), so DTensor can't express it",
        ),
        (
            Mesh("dp=4 tp=2", "(dp) = a b", a=2),
            "s@a t@b",
            "use the sub-mesh that has these axes: mesh['a', 'b', 'tp']",
        ),
        (
            Mesh("dp=2 tp=8", "(tp) = a b c", a=2, b=2),
            "s@b",
            "use the sub-mesh that has these axes: mesh['dp', 'a', 'b', 'c']",
        ),
        (Mesh("dp=4 tp=2", "(dp) = a b", a=2), "s | sum@b", "'b' isn't a product of whole axes"),
        (
            MESH,
            "(qkv h@tp d=2)",
            "DTensor needs the sizes of the factors in front of 'tp' in (qkv h@tp d=2); write them: qkv=... h=...",
        ),
        (
            MESH,
            "(qkv=3 h@(dp tp) d)",
            "two axes on a dim with an unsplit factor in front; make the factor in front a dim of its own",
        ),
        (
            MESH,
            "s@(cp dp) (qkv=3 h@tp d=2)",
            "DTensor can't gather s@(cp dp), whose axes aren't in the mesh's order, beside (qkv=3 h@tp d=2)",
        ),
    ],
)
def test_what_dtensor_cannot_say_is_a_sharding_error_that_says_what_to_write(mesh, spec, message):
    with pytest.raises(ShardingError) as caught:
        placement_specs(mesh.sharding(spec))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "spec", "shape", "can"),
    [
        (Mesh("cp=2 tp=2", "both = cp tp"), "s@(cp tp)", (5,), True),
        (Mesh("cp=2 tp=2", "both = cp tp"), "s@both", (5,), False),
        (Mesh("cp=2 tp=2", "both = cp tp"), "s@both", (8,), True),
        (Mesh("cp=2 tp=2", "both = cp tp"), "s@(tp cp)", (8,), True),
        (Mesh("cp=2 tp=2", "both = cp tp"), "s@(tp cp)", (5,), False),
        (Mesh("cp=2 tp=2", "both = cp tp"), "s@(tp cp)", (0,), True),
        (Mesh("cp=2 one=1", "both = cp one"), "s@both", (5,), True),
    ],
)
def test_a_dim_that_does_not_divide_is_an_error_where_dtensor_would_cut_it_otherwise(mesh, spec, shape, can):
    sharding = mesh.sharding(spec)
    if can:
        check_torch_can(sharding, shape)
        return
    with pytest.raises(
        ShardingError, match=r"uneven parts, which DTensor on .* would cut otherwise; make the size a multiple of 4"
    ):
        check_torch_can(sharding, shape)


@pytest.mark.parametrize(
    ("placements", "ndim", "message"),
    [
        ([Shard(0)], 1, "has 3 axes; found 1 placements"),
        ([Shard(2), Replicate(), Replicate()], 2, "is about dim 2 of a tensor with 2 dims"),
        ([Shard(-3), Replicate(), Replicate()], 2, "of a tensor with 2 dims"),
        (
            [Partial("product"), Replicate(), Replicate()],
            2,
            "a pending 'product' has no name in axes; resolve it first",
        ),
        (
            [_StridedShard(0, split_factor=3), _StridedShard(0, split_factor=2), Replicate()],
            1,
            "doesn't fit what other axes split already; it has no spec",
        ),
    ],
)
def test_placements_that_no_spec_can_say_are_a_sharding_error(placements, ndim, message):
    with pytest.raises(ShardingError) as caught:
        Sharding.from_placements(MESH, placements, ndim)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("placements", "spec"),
    [
        ([Shard(0), Replicate(), Shard(1)], "_@dp _@tp"),
        ([Shard(1), Shard(1), Shard(1)], "_ _@(dp cp tp)"),
        ([Partial(), Partial("avg"), Shard(-1)], "_ _@tp | sum@dp mean@cp"),
        ([Partial(), Replicate(), Partial()], "_ _ | sum@(dp tp)"),
        ([_StridedShard(0, split_factor=2), Replicate(), Shard(0)], "_@(tp dp) _"),
        ([Replicate(), Replicate(), _StridedShard(0, split_factor=3)], "(3 inner0@tp) _"),
    ],
)
def test_placements_have_a_spec(placements, spec):
    sharding = Sharding.from_placements(MESH, placements, 2)
    assert sharding.spec == spec
    assert MESH.sharding(spec) == sharding


# ---------------------------------------------------------------------------- errors

CUT = Mesh("a=2 b=3", "(a b) = c d", c=3)


@pytest.mark.parametrize(
    ("mesh", "spec", "error", "message"),
    [
        (MESH, "b@ddp", MeshError, "the mesh has no axis 'ddp'; did you mean 'dp'?"),
        (
            MESH,
            "b@dp s@dp",
            ShardingError,
            "axis 'dp' is used twice: in b@dp and in s@dp; each axis splits one place or is pending",
        ),
        (MESH, "b@(dp dp)", ShardingError, "axis 'dp' is used twice"),
        (MESH, "b@dp | sum@dp", ShardingError, "axis 'dp' is used twice: in b@dp and in sum@dp"),
        (MESH, "b@fsdp s@cp", ShardingError, "axes 'fsdp' and 'cp' share ranks: in b@fsdp and in s@cp"),
        (MESH, "b@fsdp | max@dp", ShardingError, "axes 'fsdp' and 'dp' share ranks"),
        (Mesh("one=1 dp=2"), "b@one s@one", ShardingError, "axis 'one' is used twice"),
        (MESH["dp", "tp"], "b@cp", ShardingError, f"axis 'cp' isn't made of the axes of {MESH!r}['dp', 'tp']"),
        (MESH["dp", "tp"], "b@fsdp", ShardingError, "axis 'fsdp' isn't made of the axes of"),
        (
            CUT,
            "x@a y@d",
            ShardingError,
            "axes of one sharding are digits of the same factorization: 2:3 and 2:1 have no common digits",
        ),
        (CUT, "x@a | sum@d", ShardingError, "no common digits"),
        (MESH, "b b", ExpressionError, "dim 'b' stands twice"),
        (MESH, "b (b c)", ExpressionError, "dim 'b' stands twice"),
        (MESH, "...", ShardingError, "'...' stands for dims of a tensor; without one, write every dim (or '_')"),
        (MESH, "...@tp d", ShardingError, "'...' stands for whole dims that aren't split"),
        (MESH, "(... d)", ShardingError, "'...' stands for whole dims that aren't split"),
        (MESH, "b@*", ShardingError, "'*' is what a tensor has; a sharding names its axes"),
        (MESH, "b@(* tp)", ShardingError, "'*' is what a tensor has"),
        (MESH, "b | *", ShardingError, "'| *' is whatever arises; a sharding says what is pending, like '| sum@tp'"),
        (MESH, "b | same@tp", ShardingError, "'same' is about gradients of plain tensors"),
        (MESH, "b, c", ExpressionError, "expected one spec, found 2"),
        (MESH, "b -> c", ExpressionError, "expected one spec, found an expression with '->'"),
    ],
)
def test_a_spec_that_cannot_be_is_an_error_that_says_why(mesh, spec, error, message):
    with pytest.raises(error) as caught:
        mesh.sharding(spec)
    assert message in str(caught.value)


def test_an_error_about_a_place_in_the_spec_has_its_caret_there():
    with pytest.raises(ShardingError) as caught:
        MESH.sharding("b s@(cp *) d")
    assert str(caught.value).splitlines()[1:] == ["  b s@(cp *) d", "      ^^^^^^"]


@pytest.mark.parametrize(
    ("spec", "shape", "error", "message"),
    [
        ("b s", (4,), ShardingError, "the spec 'b s' has 2 dims, the tensor 1: [4]"),
        ("", (4,), ShardingError, "has 0 dims, the tensor 1"),
        ("s=4", (5,), SizeError, "the sizes don't multiply to the dim:  s=4 = 5"),
        ("3", (4,), SizeError, "the sizes don't multiply to the dim:  3 = 4"),
        ("(a=2 b@tp)", (7,), SizeError, "the sizes don't multiply to the dim:  (a=2 b@tp) = 7"),
        ("(a=2 b=2)@tp", (6,), SizeError, "the sizes don't multiply to the dim"),
        ("(a=4 b)@tp", (6,), SizeError, "the sizes don't multiply to the dim:  (a=4 b)@tp = 6"),
        ("(a=4 b)", (6,), SizeError, "the sizes don't multiply to the dim:  (a=4 b) = 6"),
        ("(a=2 h@tp)", (6,), ShardingError, "3 doesn't divide into 2 parts: h@tp is split inside a group"),
        ("(a@tp b)", (6,), SizeError, "more than one size is missing in  (a@tp b) = 6"),
        ("b", (-1,), SizeError, "a shape is whole numbers from 0; found (-1,)"),
    ],
)
def test_a_shape_that_does_not_fit_is_an_error_with_both(spec, shape, error, message):
    sharding = MESH.sharding(spec)
    for ask in (
        sharding.local_shape,
        sharding.local_indices,
        sharding.extents,
        lambda s: sharding.is_equivalent(sharding, s),
    ):
        with pytest.raises(error) as caught:
            ask(shape)
        assert message in str(caught.value)


def test_a_rank_outside_the_mesh_holds_nothing_and_asking_is_an_error():
    for rank in (8, -1, 10**30):
        with pytest.raises(MeshError, match=f"rank {rank} isn't one of the ranks of"):
            MESH.sharding("b@dp").local_shape((4,), rank)


def test_dots_stand_for_the_dims_that_a_tensor_has_beyond_those_named():
    assert parsed_sharding(MESH, "b@dp ... d@tp", (), 4).spec == "b@dp _ _ d@tp"
    assert parsed_sharding(MESH, "b@dp ...", (), 1).spec == "b@dp"
    with pytest.raises(ShardingError, match=r"the spec has 2 dims beside '...', the tensor has 1"):
        parsed_sharding(MESH, "b ... d", (), 1)


def test_named_gives_other_names_to_dims_that_are_no_groups():
    sharding = MESH.sharding("b@dp (h=8@tp d) s=3")
    assert sharding.named(["x", "y", "z"]).spec == "x@dp (h=8@tp d) z=3"


def test_placements_need_the_runtime_and_are_the_specs_as_torch_has_them():
    found = MESH.sharding("b@dp s@(tp cp)")
    assert list(found.placements) == torch_placements(placement_specs(found))


def test_shardings_of_131072_ranks_cost_no_more_than_those_of_eight():
    mesh = Mesh(
        "pp dp_replicate dp_shard cp tp", "batch = dp_replicate dp_shard",
        pp=8, dp_replicate=4, cp=8, tp=8, ranks=range(131_072),
    )  # fmt: skip
    sharding = mesh.sharding("batch@batch seq@(cp tp) embed | sum@pp")
    assert sharding.local_shape((2**20, 2**16, 64), 77_777) == (2**20 // 256, 2**16 // 64, 64)
    other = mesh.sharding("x@(dp_replicate dp_shard) y@(cp tp) z | sum@pp")
    assert sharding.is_equivalent(other)
    assert sharding.is_equivalent(other, (2**20, 2**16, 64))
    assert not sharding.is_equivalent(mesh.sharding("x@batch y@(tp cp) z | sum@pp"), (2**20, 2**16, 64))


def test_what_a_process_has_hashed_is_hashed_anew_in_another():
    sharding = Mesh("dp=2 tp=2").sharding("b@dp d | sum@tp")
    assert hash(sharding) == hash(Mesh("dp=2 tp=2").sharding("x@dp y | sum@tp"))
    travelled = pickle.loads(pickle.dumps(sharding))
    assert travelled == sharding
    assert "_hash" not in vars(travelled)
