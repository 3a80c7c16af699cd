"""Shardings: what each rank holds, against `torch.chunk` after `torch.chunk` and numpy's reshape."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import axes
from axes import Mesh, Sharding, ShardingError
from tests.strategies import (
    FactorCase,
    MeshCase,
    elements,
    examples,
    listed,
    meshes,
    nested,
    place,
    refusal,
    sharded,
    specs,
)

Shape = tuple[int, ...]


def held(sharding: Sharding, shape: Shape, rank: int) -> tuple[tuple[int, ...], ...]:
    """The indices of each dim that a rank holds."""
    return tuple(tuple(listed(found)) for found in sharding.local_indices(shape, rank))


def same_data(one: Sharding, other: Sharding, shape: Shape, ranks: tuple[int, ...]) -> bool:
    """Whether both give every rank the same indices of each dim, by listing them."""
    return all(held(one, shape, rank) == held(other, shape, rank) for rank in ranks)


# ---------------------------------------------------------------------------- what each rank holds


@examples(200)
@given(sharded())
def test_every_rank_holds_what_nested_chunks_of_reshaped_dims_give(case):
    mesh, spec = case
    sharding, shape = mesh.mesh.sharding(spec.spec), spec.shape
    whole, count = np.arange(math.prod(shape)).reshape(shape), Counter()
    for position, rank in enumerate(mesh.ranks):
        expected = elements(mesh, spec, position)
        assert held(sharding, shape, rank) == tuple(map(tuple, expected))
        assert sharding.local_shape(shape, rank) == tuple(map(len, expected))
        seen = mesh.mesh.at(rank).sharding(spec.spec)
        assert (seen, seen.local_indices(shape)) == (sharding, sharding.local_indices(shape, rank))
        found = whole
        for dim, (extent, indices) in enumerate(zip(shape, seen.local_indices(shape), strict=True)):
            runs = indices if isinstance(indices, tuple) else (indices,)
            assert all(0 <= run.start <= run.stop <= extent for run in runs)
            assert all(one.start < one.stop < other.start < other.stop for one, other in itertools.pairwise(runs))
            found = np.concatenate([found[(slice(None),) * dim + (run,)] for run in runs], axis=dim)
        assert np.array_equal(found, whole[np.ix_(*expected)])
        count.update(found.reshape(-1).tolist())
    split = math.prod(mesh.sizes[axis] for dim in spec.dims for factor in dim for axis in factor.axes)
    assert count == dict.fromkeys(range(whole.size), len(mesh.ranks) // split)


@given(sharded())
def test_a_sharding_is_a_value_that_its_text_makes_again(case):
    mesh, spec = case
    sharding = mesh.mesh.sharding(spec.spec)
    assert sharding.ndim == len(spec.shape)
    assert mesh.mesh.sharding(sharding.spec).spec == sharding.spec == str(sharding)
    for again in (mesh.mesh.sharding(sharding.spec), pickle.loads(pickle.dumps(sharding))):
        assert (again, hash(again)) == (sharding, hash(sharding))


@given(meshes(), st.data())
def test_a_sub_mesh_holds_the_tensor_once_in_each_of_its_lines(case, data):
    names = data.draw(st.permutations(data.draw(st.sampled_from(case.disjoint))))
    mesh = case.mesh[tuple(names[: data.draw(st.integers(1, len(names)))])]
    sharding = mesh.sharding(f"a{place(mesh.axis_names)} b")
    for rank in case.ranks:
        line = np.ravel(mesh.at(rank).ranks).tolist()
        assert sorted(i for r in line for i in listed(sharding.local_indices((7, 2), r)[0])) == list(range(7))


MESH = Mesh("dp=2 cp=2 tp=2", "fsdp = dp cp", "world = dp cp tp")


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("|", ""),
        ("b@() s@(tp) |", "b s@tp"),
        ("b|sum@(tp cp)", "b | sum@(tp cp)"),
        ("_ _@dp", "_ _@dp"),
        ("3 h=8@tp", "3 h=8@tp"),
        ("(h d)@tp", "(h d)@tp"),
        ("(h=2 d)@(dp tp)", "(h=2 d)@(dp tp)"),
        ("(2 3)", "(2 3)"),
        ("()@tp", "()@tp"),
        ("(h@tp)", "h@tp"),
        ("(h@() d)", "(h d)"),
        ("(3 h@tp 2)", "(3 h@tp 2)"),
        ("b | sum@()", "b"),
        ("b\n s  @\t( cp\r\ntp )|max@dp", "b s@(cp tp) | max@dp"),
    ],
)
def test_the_canonical_text_of_a_sharding(spec, canonical):
    sharding = MESH.sharding(spec)
    assert (sharding.spec, MESH.sharding(canonical)) == (canonical, sharding)
    assert repr(sharding) == f"Sharding({canonical!r}, {MESH!r})"


def test_what_an_equal_sharding_was_asked_before_lends_neither_its_names_nor_its_view():
    for rank, (b, s, d) in itertools.product((0, 3), ("bsd", "xyz")):
        mesh = Mesh("dp=2 tp=2").at(rank)
        spec = f"({b}@dp {s}) {d} | sum@tp"
        found = axes.plan(spec, f"{s} {d}@tp", (8, 8), mesh, sizes={b: 4})
        assert str(found).startswith(f"({b} {s})@dp {d} | sum@tp -> {s} {d}@tp ")
        assert {found.rank, mesh.sharding(spec).mesh.rank, mesh.rearrange("dp tp -> tp dp").rank} == {rank}
        dots = axes.plan(f"{b}@dp ... {d}@tp", f"{b} {s} ...", (8, 8, 8, 8), mesh)
        assert str(dots).startswith(f"{b}@dp _ _ {d}@tp -> {b} {s} _ _ ")


# ---------------------------------------------------------------------------- equivalence


@st.composite
def pairs(draw: st.DrawFn) -> tuple[MeshCase, Sharding, Sharding, Shape]:
    """Two shardings of one tensor: by any axes and aliases, of one dim in the same order, or as factors of a group."""
    case = draw(meshes(ranks=False))
    kind = draw(st.sampled_from(["specs", "one dim", "factors", "opened"]))
    names = draw(st.permutations(draw(st.sampled_from(case.disjoint))))
    if kind == "specs":
        one = draw(specs(case, pending=False))
        where = [draw(st.integers(-1, len(one.shape) - 1)) for _ in names]
        on = [[name for name, at in zip(names, where, strict=True) if at == d] for d in range(len(one.shape))]
        return (
            case,
            case.mesh.sharding(one.spec),
            case.mesh.sharding(" ".join(f"x{place(a)}".replace("x", f"x{d}") for d, a in enumerate(on))),
            one.shape,
        )
    if kind == "one dim":
        two = draw(st.permutations(draw(st.sampled_from(case.disjoint))))
        texts = [f"s{place(each[: draw(st.integers(0, len(each)))])}" for each in (names, two)]
        return case, *map(case.mesh.sharding, texts), (draw(st.integers(0, 25)),)
    names = names[: draw(st.integers(0, len(names)))]
    free = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2))
    texts = []
    for _ in range(2):
        # The same pieces in some order, cut into factors somewhere: an axis splits what it is major of.
        factors, on, size = [], [], 1
        for piece in draw(st.permutations([*names, *free])) if draw(st.booleans()) else [*names, *free]:
            on += [piece] if isinstance(piece, str) else []
            size *= case.sizes[piece] if isinstance(piece, str) else piece
            if isinstance(piece, int) and draw(st.booleans()):
                factors.append(FactorCase(f"f{len(factors)}", size, tuple(on)))
                on, size = [], 1
        factors.append(FactorCase(f"f{len(factors)}", size, tuple(on)))
        sizes = [f"={f.size}" for f in factors[:-1]] + ["" if kind == "opened" else f"={size}"]
        texts.append(f"({' '.join(f'{f.name}{n}{place(f.axes)}' for f, n in zip(factors, sizes, strict=True))})")
    return case, *map(case.mesh.sharding, texts), (math.prod(case.sizes[name] for name in names) * math.prod(free),)


@examples(300)
@given(pairs())
def test_shardings_are_equivalent_where_every_rank_holds_the_same_elements(drawn):
    case, one, other, shape = drawn
    expected = same_data(one, other, shape, case.ranks)
    assert one.is_equivalent(other, shape) == expected == other.is_equivalent(one, shape)
    assert one.is_equivalent(one)
    assert one.is_equivalent(one, shape)
    if len(shape) == 1 and "=" not in one.spec + other.spec:  # for every shape that divides
        even = 6 * math.lcm(one.dims[0].pieces, other.dims[0].pieces)
        assert one.is_equivalent(other) == same_data(one, other, (even,), case.ranks)
    elif expected is False and not all(shape):
        assert not one.is_equivalent(other)


@examples(200)
@given(*[st.lists(st.tuples(st.sampled_from(["sum", "mean", "max"]), st.lists(st.sampled_from(["dp", "cp", "tp"]), max_size=2)), max_size=3)] * 2)  # fmt: skip
def test_pending_is_equivalent_where_the_same_reductions_come_in_the_same_order(one, other):
    def meaning(pending: list[tuple[str, list[str]]]) -> list[tuple[str, set[str]]]:
        found: list[tuple[str, set[str]]] = []
        for op, names in pending:
            same = bool(names and found and found[-1][0] == op)
            found[len(found) - same :] = [(op, found[-1][1] | {*names} if same else {*names})] if names else []
        return found

    texts = ["b | " + " ".join(f"{op}@({' '.join(names)})" for op, names in pending) for pending in (one, other)]
    once = all(len(used) == len({*used}) for used in ([a for _, names in p for a in names] for p in (one, other)))
    refused = refusal(ShardingError, lambda: [MESH.sharding(text) for text in texts])
    assert bool(refused) != once, refused
    if once:
        a, b = map(MESH.sharding, texts)
        assert a.is_equivalent(b) == (meaning(one) == meaning(other)) == a.is_equivalent(b, (4,))


CUT = Mesh("a=2 b=3", "(a b) = c d", c=3)
LARGE = Mesh("a=1000000 b=1000000", "ab = a b")


@pytest.mark.parametrize(
    ("mesh", "one", "other", "shape", "same"),
    [
        ((Mesh("dp=2 tp=4"), MESH), "s@tp", "x@(cp tp)", None, True),
        ((Mesh("dp=2 tp=4"), MESH), "s@tp", "x@(tp cp)", None, False),
        ((Mesh("dp=2 tp=4"), MESH["cp", "tp"]), "s@tp", "x@(cp tp)", None, True),
        ((MESH, Mesh("dp=8", ranks=range(8, 16))), "s", "s", None, False),
        (Mesh("dp=2 tp=2 one=1 two=1"), "b@one | sum@tp max@two sum@dp", "b | sum@(dp tp)", None, True),
        (MESH, "b | sum@tp", "b | mean@tp", None, False),
        (MESH, "s", "s t", None, False),
        (CUT, "s@a", "s@d", (0,), True),
        (CUT, "s@a", "s@d", (6,), False),
        (CUT, "s@a", "s@d", None, False),
        (LARGE, "s@(a b)", "s@(b a)", (2 * 10**12 + 1,), False),
        (LARGE, "s@(a b)", "s@ab", (2 * 10**12 + 1,), False),
        (LARGE, "s@(a b)", "s@ab", (2 * 10**12 - 1,), True),
        (LARGE, "s@(a b)", "s@ab", None, True),
    ],
)
def test_equivalence_by_example(mesh, one, other, shape, same):
    first, second = mesh if isinstance(mesh, tuple) else (mesh, mesh)
    assert first.sharding(one).is_equivalent(second.sharding(other), shape) == same


# ---------------------------------------------------------------------------- placements


@examples(200)
@given(sharded())
def test_placements_come_back_as_an_equivalent_sharding_and_are_refused_where_no_plain_ones_say_it(case):
    mesh, spec = case
    plan = axes.plan(spec.spec, spec.spec, spec.shape, mesh.mesh)  # with the sizes of its factors
    found: list[tuple[object, ...]] = []
    refused = refusal(ShardingError, lambda: found.append(plan.source.placements))
    if found:
        even = all(f.size % math.prod(mesh.sizes[a] for a in f.axes) == 0 for dim in spec.dims for f in dim)
        said: list[Sharding] = []
        place_back = functools.partial(Sharding.from_placements, mesh.mesh, found[0], len(spec.shape), spec.shape)
        why = refusal(ShardingError, lambda: said.append(place_back()))
        assert said or (not even and "would cut in another way" in why), why
        assert not said or said[0].placements == found[0]
        assert not even or same_data(said[0], plan.source, spec.shape, mesh.ranks)
        # Torch says per axis what is pending, not in which order: one kind of reduction at a time comes back.
        assert not even or len({op for op, _ in spec.pending}) > 1 or said[0].is_equivalent(plan.source, spec.shape)
    elif "isn't a product of whole axes" in refused and all(len(dim) == 1 for dim in spec.dims):
        options = [Replicate(), *map(Shard, range(len(spec.shape)))]
        for placements in itertools.product(options, repeat=mesh.mesh.ndim):
            said = Sharding.from_placements(mesh.mesh, placements, len(spec.shape))
            assert spec.pending or not said.is_equivalent(plan.source)
    else:
        assert re.search(
            "isn't a product of whole axes|two axes on a dim with an unsplit factor|DTensor can't|DTensor keeps only",
            refused,
        )


@given(meshes(), st.data())
def test_plain_placements_are_the_sharding_that_they_say(case, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    ndim = len(shape)
    options = [Replicate(), *(Shard(d) for d in range(-ndim, ndim)), Partial(), Partial("avg"), Partial("max")]
    placements = [data.draw(st.sampled_from(options)) for _ in case.mesh.axis_names]
    sharding = Sharding.from_placements(case.mesh, placements, ndim, shape)
    for (position, rank), (dim, extent) in itertools.product(enumerate(case.ranks), enumerate(shape)):
        pairs = zip(case.mesh.axis_names, placements, strict=True)
        names = [name for name, p in pairs if isinstance(p, Shard) and p.dim % ndim == dim]
        expected = nested(extent, [case.sizes[a] for a in names], [int(case.coordinates[a][position]) for a in names])
        assert listed(sharding.local_indices(shape, rank)[dim]) == expected
    said = [Shard(p.dim % ndim) if isinstance(p, Shard) else p for p in placements]
    alone = [case.sizes[name] == 1 for name in case.mesh.axis_names]  # one rank has all of it, however that is said
    assert list(sharding.placements) == [Replicate() if one else p for one, p in zip(alone, said, strict=True)]


R, STRIDED = Replicate(), _StridedShard


@pytest.mark.parametrize(
    ("spec", "placements", "again"),
    [
        ("b@dp s@(cp tp)", (Shard(0), Shard(1), Shard(1)), "_@dp _@(cp tp)"),
        ("b s@(tp cp)", (R, STRIDED(1, split_factor=2), Shard(1)), "_ _@(tp cp)"),
        ("b@(tp cp dp)", (STRIDED(0, split_factor=4), STRIDED(0, split_factor=2), Shard(0)), "_@(tp cp dp)"),
        ("b@world", (Shard(0), Shard(0), Shard(0)), "_@(dp cp tp)"),
        ("b | max@dp mean@tp", (Partial("max"), R, Partial("avg")), "_ | max@dp mean@tp"),
        ("b | sum@fsdp", (Partial(), Partial(), R), "_ | sum@(dp cp)"),
        ("(qkv=3 h@tp d)", (R, R, STRIDED(0, split_factor=3)), "(3 inner0@tp)"),
        ("(h=8@(dp tp) d)", (Shard(0), R, Shard(0)), "_@(dp tp)"),
        ("(one=1 h@(dp tp) d=2)", (Shard(0), R, Shard(0)), "_@(dp tp)"),
        ("(a=2@dp b@tp)", (Shard(0), R, Shard(0)), "_@(dp tp)"),
        ("s@(dp cp) (qkv=3 h@tp d=2)", (Shard(0), Shard(0), STRIDED(1, split_factor=3)), "_@(dp cp) (3 inner1@tp)"),
    ],
)
def test_placements_by_example_and_the_spec_that_they_have(spec, placements, again):
    sharding = MESH.sharding(spec)
    assert sharding.placements == placements
    assert Sharding.from_placements(MESH, placements, sharding.ndim).spec == again
    with pytest.raises(ShardingError, match="doesn't fit what other axes split already; it has no spec"):
        Sharding.from_placements(MESH, [STRIDED(0, split_factor=3), STRIDED(0, split_factor=2), R], 1)
