"""The laws of layouts, against brute force over index sets."""

# Imports from inside: `digits`, the common refinement of layouts, which meshes, shardings and plans share and no public name does.

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axes import Layout, MeshError, SizeError
from axes.algebra.layout import digits
from tests.strategies import Modes, digit_systems, factorizations, parts_of, refusal, span


def brute(modes: Modes) -> list[int]:
    """Offsets by coordinate: a nested loop over the digits, the last the fastest."""
    return [sum(each) for each in itertools.product(*[range(0, size * stride, stride) for size, stride in modes])]


def boundaries(modes: Modes) -> set[int]:
    return {1, *(bound for size, stride in modes for bound in (stride, size * stride))}


def is_chain(bounds: set[int]) -> bool:
    """Whether each divides the next."""
    return all(high % low == 0 for low, high in itertools.pairwise(sorted(bounds)))


@given(digit_systems(), st.data())
def test_a_layout_is_nested_loops_over_its_digits_in_canonical_form(system, data):
    chosen = data.draw(st.permutations(system))[: data.draw(st.integers(0, len(system)))]
    layout, offsets = Layout([size for size, _ in chosen], [stride for _, stride in chosen]), brute(chosen)
    assert list(layout.offsets()) == [layout.offset(i) for i in range(layout.size)] == offsets
    assert layout.size == len(offsets)
    rest = layout.complement(span(system))
    for base in rest.offsets():
        assert [layout.coordinate(base + offset) for offset in offsets] == list(range(layout.size))
    assert all(size > 1 for size in layout.sizes)
    assert all(above != size * stride for (_, above), (size, stride) in itertools.pairwise(layout))
    for again in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout), Layout.of(layout)):
        assert (again, hash(again), str(again)) == (layout, hash(layout), str(layout))
    with pytest.raises(AttributeError):
        layout.size = 3


@given(digit_systems(most=4, largest=48))
def test_layouts_are_equal_where_their_functions_are(system):
    found = [Layout.of(chosen) for count in range(len(system) + 1) for chosen in itertools.permutations(system, count)]
    for one, other in itertools.product(found, repeat=2):
        assert (one == other) == (brute(one) == brute(other))
        assert one != other or hash(one) == hash(other)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 24)), max_size=3))
def test_whatever_is_accepted_hits_no_offset_twice_and_what_collides_is_refused(modes):
    refused = refusal(MeshError, lambda: Layout.of(modes))
    real = sorted((stride, size) for size, stride in modes if size > 1)
    collides = any(above % (size * stride) for (stride, size), (above, _) in itertools.pairwise(real))
    assert bool(refused) == collides
    assert collides or len(set(brute(modes))) == len(brute(modes))


@given(digit_systems(), st.data())
def test_split_and_product_undo_each_other(system, data):
    parts = data.draw(parts_of(system))
    whole = Layout.product(*parts)
    assert list(whole.offsets()) == [sum(each) for each in itertools.product(*(p.offsets() for p in parts))]
    assert list(whole.split([part.size for part in parts])) == parts
    sizes = data.draw(factorizations(whole.size))
    bounds = {math.prod(each[i:]) for each in (sizes, whole.sizes) for i in range(len(each) + 1)}
    refused = refusal(SizeError, lambda: whole.split(sizes))
    assert (refused is None) == is_chain(bounds), refused  # else a piece boundary lies inside a digit
    if refused is None:
        assert [part.size for part in whole.split(sizes)] == sizes
        assert Layout.product(*whole.split(sizes)) == whole


@given(digit_systems(), st.data(), st.integers(1, 100))
def test_a_layout_and_its_complement_cover_every_position_once(system, data, other):
    layout, size = Layout.of(data.draw(st.permutations(system))[: data.draw(st.integers(0, len(system)))]), span(system)
    rest = layout.complement(size)
    assert sorted(Layout.product(rest, layout).offsets()) == list(range(size))
    assert rest.complement(size) == Layout.of(sorted(layout, key=lambda mode: -mode[1]))
    refused = refusal(MeshError, lambda: layout.complement(other))
    assert bool(refused) == bool(other % max(boundaries(layout))), refused


@given(digit_systems(), digit_systems(), st.data())
def test_two_layouts_overlap_contain_and_divide_as_index_sets_do(system, foreign, data):
    one, other, away = (
        Layout.of(data.draw(st.permutations(s))[: data.draw(st.integers(0, len(s)))]) for s in (system, system, foreign)
    )
    mine, theirs, strange = ({*brute(each)} for each in (one, other, away))
    assert one.overlaps(other) == other.overlaps(one) == (mine & theirs != {0})
    assert one.contains(other) == (theirs <= mine)
    assert not one.contains(away) or strange <= mine
    assert one.overlaps(away) or mine & strange == {0}
    assert bool(refusal(MeshError, lambda: Layout.product(one, other))) == one.overlaps(other)
    if one.contains(other):
        rest = one.divide(other)
        inner = other.within(one)
        assert [one.offset(inner.offset(at)) for at in range(other.size)] == [*other.offsets()]
        assert sorted(Layout.product(rest, other).offsets()) == sorted(mine)
        # In the layout's own order: what is left are its offsets where the divisor's coordinate is 0.
        assert list(rest.offsets()) == [o for o in one.offsets() if other.coordinate(o) == 0]
    else:
        assert refusal(MeshError, lambda: one.divide(other))
        assert refusal(MeshError, lambda: other.within(one))


@given(digit_systems(), digit_systems(), st.data())
def test_digits_refine_all_layouts_whose_boundaries_form_a_chain(system, foreign, data):
    from_one = [Layout.of(data.draw(st.permutations(system))[: data.draw(st.integers(0, len(system)))]) for _ in "abc"]
    members = [*from_one, *data.draw(parts_of(foreign, 1))]
    refused = refusal(MeshError, lambda: digits(*members))
    bounds = set().union(*(boundaries(m) for m in members))
    assert (refused is None) == is_chain(bounds), refused
    refined = digits(*(members if refused is None else from_one))
    every = {digit for found in refined for digit in found}
    for found, layout in zip(refined, members, strict=False):
        assert Layout.of(found) == layout
        assert brute(found) == brute(layout)
    for one, other in itertools.combinations(every, 2):
        assert set(brute([one])) & set(brute([other])) == {0}
    assert boundaries([*every]) <= bounds  # the coarsest such refinement


def test_the_algebra_of_a_million_million_ranks_lists_none_of_them():
    big, small = Layout((2**20,), (2**20,)), Layout((2**20,), (1,))
    whole = Layout.product(big, small)
    assert (whole, whole.divide(big)) == (Layout((2**40,), (1,)), small)
    assert whole.split((2**10, 2**30))[0] == Layout((2**10,), (2**30,))
    assert big.complement(2**41) == Layout((2, 2**20), (2**40, 1))
    assert (whole.contains(big), big.overlaps(small), whole.offsets()) == (True, False, range(2**40))
    assert Layout.product(small, big).coordinate(2**40 - 1) == 2**40 - 1
