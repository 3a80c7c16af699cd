"""The laws of layouts, against brute force over index sets and against torch's own layout algebra."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed import _mesh_layout, _pycute

from axes.algebra.errors import AxesError, MeshError, SizeError
from axes.algebra.layout import Layout, digits

from .strategies import (
    digit_systems,
    disjoint_families,
    factorizations,
    families,
    layouts,
    refusal,
    row_major,
    span,
)


def brute(modes) -> list[int]:
    """Offsets by coordinate: a nested loop over the digits, the last the fastest."""
    ranges = [range(0, size * stride, stride) for size, stride in modes]
    return [sum(offsets) for offsets in itertools.product(*ranges)]


def function_of(layout: Layout) -> list[int]:
    return brute(layout.modes)


# ---------------------------------------------------------------------------- one layout


@given(digit_systems(), st.data())
def test_offsets_are_what_nested_loops_over_the_written_digits_give(system, data):
    chosen = data.draw(st.permutations(system))[: data.draw(st.integers(0, len(system)))]
    layout = Layout([size for size, _ in chosen], [stride for _, stride in chosen])
    assert list(layout.offsets()) == brute(chosen)
    assert [layout.offset(i) for i in range(layout.size)] == brute(chosen)
    assert layout.size == len(brute(chosen)) == math.prod(layout.sizes)
    assert layout.cosize == max(brute(chosen)) + 1


@given(layouts())
def test_coordinate_inverts_offset(layout):
    assert [layout.coordinate(layout.offset(i)) for i in range(layout.size)] == list(range(layout.size))


@given(families(1), st.data())
def test_coordinate_reads_its_own_digits_and_no_others(family, data):
    world, (layout,) = family
    elsewhere = layout.complement(world)
    base = data.draw(st.sampled_from(list(elsewhere.offsets())))
    for i, offset in enumerate(layout.offsets()):
        assert layout.coordinate(base + offset) == i


@given(layouts())
def test_a_layout_is_canonical(layout):
    assert all(size > 1 for size in layout.sizes)
    for (_, above), (size, stride) in itertools.pairwise(layout.modes):
        assert above != size * stride


@given(digit_systems(most=4, largest=48))
def test_layouts_are_equal_where_their_functions_are(system):
    found = [Layout.of(chosen) for count in range(len(system) + 1) for chosen in itertools.permutations(system, count)]
    for one, other in itertools.product(found, repeat=2):
        assert (one == other) == (function_of(one) == function_of(other))
        assert one != other or (hash(one) == hash(other) and str(one) == str(other))


@given(layouts())
def test_a_layout_survives_pickling_and_copying_and_refuses_changes(layout):
    assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout
    assert hash(pickle.loads(pickle.dumps(layout))) == hash(layout)
    with pytest.raises(AttributeError):
        layout.size = 3
    assert layout != layout.modes
    assert len({layout, Layout.of(layout.modes)}) == 1


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 24)), max_size=3))
def test_whatever_is_accepted_hits_no_offset_twice_and_what_collides_is_refused(modes):
    offsets = brute(modes)
    try:
        layout = Layout.of(modes)
    except MeshError:
        # Not digits of a number. Sorted by stride, one isn't a multiple of the span below.
        real = sorted((stride, size) for size, stride in modes if size > 1)
        assert any(above % (size * stride) for (stride, size), (above, _) in itertools.pairwise(real))
    else:
        assert list(layout.offsets()) == offsets
        assert len(set(offsets)) == len(offsets)


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [((2,), ()), ((0,), (1,)), ((2,), (0,)), ((-2,), (1,)), ((2, 2), (1, 1)), ((2, 3), (3, 2)), ((4, 2), (1, 2))],
)
def test_sizes_and_strides_that_are_no_digits_are_a_mesh_error(sizes, strides):
    with pytest.raises(MeshError):
        Layout(sizes, strides)


@pytest.mark.parametrize("index", [-1, 8, 10**30])
def test_an_offset_outside_the_layout_is_a_mesh_error(index):
    with pytest.raises(MeshError, match=rf"coordinate {index} is outside 0\.\.7"):
        Layout((8,), (1,)).offset(index)


def test_the_offsets_of_one_digit_are_a_range_however_large():
    offsets = Layout((2**40,), (2**7,)).offsets()
    assert isinstance(offsets, range)
    assert len(offsets) == 2**40


# ---------------------------------------------------------------------------- split, product, splice


@given(layouts(), st.data())
def test_split_then_product_is_the_layout_again(layout, data):
    sizes = data.draw(factorizations(layout.size))
    refused = refusal(SizeError, lambda: layout.split(sizes))
    if refused:
        assert "cuts" in refused
        # Right to refuse: a piece boundary lies inside a digit without dividing it.
        bounds = [math.prod(layout.sizes[i:]) for i in range(len(layout.sizes) + 1)]
        wanted = [math.prod(sizes[i:]) for i in range(len(sizes) + 1)]
        chain = sorted({*bounds, *wanted})
        assert any(high % low for low, high in itertools.pairwise(chain))
        return
    parts = layout.split(sizes)
    assert [part.size for part in parts] == sizes
    assert Layout.product(*parts) == layout
    for i in range(layout.size):
        rest, offset = i, 0
        for part in reversed(parts):
            rest, coordinate = divmod(rest, part.size)
            offset += part.offset(coordinate)
        assert offset == layout.offset(i)


@given(disjoint_families())
def test_product_is_the_mixed_radix_number_of_its_parts(family):
    _, parts = family
    expected = [sum(offsets) for offsets in itertools.product(*(p.offsets() for p in parts))]
    assert list(Layout.product(*parts).offsets()) == expected


@given(disjoint_families())
def test_product_then_split_gives_the_parts_again(family):
    _, parts = family
    assert list(Layout.product(*parts).split([part.size for part in parts])) == parts


@given(families(2))
def test_a_product_of_what_overlaps_is_an_error_and_of_what_does_not_is_none(family):
    _, (one, other) = family
    if set(function_of(one)) & set(function_of(other)) == {0}:
        assert Layout.product(one, other).size == one.size * other.size
    else:
        with pytest.raises(MeshError):
            Layout.product(one, other)


@given(disjoint_families(2), st.data())
def test_splice_replaces_digits_in_their_place(family, data):
    _, (layout, new) = family
    start = data.draw(st.integers(0, len(layout.modes)))
    stop = data.draw(st.integers(start, len(layout.modes)))
    expected = brute([*layout.modes[:start], *new.modes, *layout.modes[stop:]])
    assert list(layout.splice(start, stop, [new]).offsets()) == expected


@given(layouts(), st.data())
def test_splicing_digits_with_themselves_changes_nothing(layout, data):
    start = data.draw(st.integers(0, len(layout.modes)))
    stop = data.draw(st.integers(start, len(layout.modes)))
    assert layout.splice(start, stop, [Layout.of(layout.modes[start:stop])]) == layout


@pytest.mark.parametrize("sizes", [(), (3,), (4, 4), (8, 0), (-2, -4), (2**40,)])
def test_splitting_into_sizes_that_do_not_multiply_is_a_size_error(sizes):
    with pytest.raises(SizeError, match="has size 8"):
        Layout((8,), (1,)).split(sizes)


def test_splitting_across_a_digit_is_a_size_error_that_shows_the_digit():
    with pytest.raises(SizeError, match="it cuts 3:1"):
        Layout((2, 3), (6, 1)).split((3, 2))


# ---------------------------------------------------------------------------- compose, complement


@given(layouts(), st.data())
def test_compose_is_function_composition(layout, data):
    inner = data.draw(digit_systems(largest=max(1, layout.size)))
    assume(span(inner) <= layout.size)
    other = Layout.of(data.draw(st.permutations(inner))[: data.draw(st.integers(0, len(inner)))])
    refused = refusal(MeshError, lambda: layout.compose(other))
    if refused:
        assert "cuts the digits" in refused
        # Right to refuse: the two have boundaries that don't divide, read in the same coordinates.
        coordinates = Layout.of(row_major(layout.sizes))
        bounds = {1, *(b for i in range(len(layout.sizes)) for b in [math.prod(layout.sizes[i:])])}
        bounds |= {b for size, stride in other.modes for b in (stride, size * stride)}
        assert coordinates.size == layout.size
        assert any(high % low for low, high in itertools.pairwise(sorted(bounds)))
    else:
        assert list(layout.compose(other).offsets()) == [layout.offset(o) for o in other.offsets()]


@given(disjoint_families(3))
def test_composing_with_the_row_major_parts_of_a_product_takes_it_apart(family):
    _, parts = family
    whole = Layout.product(*parts)
    for part, mode in zip(parts, row_major([p.size for p in parts]), strict=True):
        assert whole.compose(Layout.of([mode])) == part


@given(families(1))
def test_the_identity_composes_on_both_sides_to_the_layout(family):
    world, (layout,) = family
    assert layout.compose(Layout((layout.size,), (1,))) == layout
    assert Layout((world,), (1,)).compose(layout) == layout


@pytest.mark.parametrize("other", [Layout((16,), (1,)), Layout((2,), (8,)), Layout((2, 2), (1, 16))])
def test_composing_with_what_reaches_outside_is_a_mesh_error(other):
    with pytest.raises(MeshError, match="outside the 8"):
        Layout((8,), (1,)).compose(other)


@given(families(1))
def test_a_layout_and_its_complement_cover_every_position_once(family):
    world, (layout,) = family
    rest = layout.complement(world)
    assert sorted(Layout.product(rest, layout).offsets()) == list(range(world))
    assert rest.size * layout.size == world
    assert rest.complement(world) == Layout.of(sorted(layout.modes, key=lambda mode: -mode[1]))


@given(layouts(), st.integers(1, 100))
def test_there_is_no_complement_where_the_size_is_no_multiple(layout, size):
    spanned = max([1, *(n * stride for n, stride in layout.modes)])
    if size % spanned:
        with pytest.raises(MeshError, match="no complement"):
            layout.complement(size)
    else:
        assert layout.complement(size).size * layout.size == size


# ---------------------------------------------------------------------------- two layouts


@given(families(2))
def test_where_digits_share_a_chain_overlap_and_containment_are_those_of_index_sets(family):
    _, (one, other) = family
    mine, theirs = set(function_of(one)), set(function_of(other))
    assert one.overlaps(other) == other.overlaps(one) == (mine & theirs != {0})
    assert one.contains(other) == (theirs <= mine)


@given(layouts(), layouts())
def test_contains_never_says_yes_of_offsets_that_are_not_there(one, other):
    if one.contains(other):
        assert set(function_of(other)) <= set(function_of(one))


@given(layouts(), layouts())
def test_layouts_that_do_not_overlap_share_no_offset_but_zero(one, other):
    if not one.overlaps(other):
        assert set(function_of(one)) & set(function_of(other)) == {0}


@given(families(2))
def test_divide_leaves_what_product_with_the_divisor_gives_back(family):
    _, (one, other) = family
    if not one.contains(other):
        with pytest.raises(MeshError):
            one.divide(other)
        return
    rest = one.divide(other)
    assert rest.size * other.size == one.size
    assert sorted(Layout.product(rest, other).offsets()) == sorted(one.offsets())
    # In the layout's own order: what is left are its offsets where the divisor's coordinate is 0.
    assert list(rest.offsets()) == [o for o in one.offsets() if other.coordinate(o) == 0]


@given(families(3))
def test_digits_refine_each_layout_and_are_equal_or_apart(family):
    _, members = family
    refined = digits(*members)
    assert [Layout.of(found) for found in refined] == members
    for found, layout in zip(refined, members, strict=True):
        assert brute(found) == function_of(layout)
    every = {digit for found in refined for digit in found}
    for one, other in itertools.combinations(every, 2):
        assert set(brute([one])) & set(brute([other])) == {0}
    # The coarsest such refinement: each boundary is one of some layout's.
    bounds = {b for m in members for size, stride in m.modes for b in (stride, size * stride)}
    assert {b for size, stride in every for b in (stride, size * stride)} <= bounds


@given(layouts(), layouts())
def test_layouts_have_common_digits_exactly_where_their_boundaries_form_a_chain(one, other):
    bounds = sorted({b for m in (one, other) for size, stride in m.modes for b in (stride, size * stride)})
    chain = all(high % low == 0 for low, high in itertools.pairwise(bounds))
    refused = refusal(MeshError, lambda: digits(one, other))
    assert chain == (refused is None)
    assert chain or "have no common digits" in refused


def test_two_factorizations_without_common_digits_say_which_boundary_does_not_divide():
    with pytest.raises(MeshError, match="2:3 and 3:2 have no common digits: 3 isn't a multiple of 2"):
        digits(Layout((2,), (3,)), Layout((3,), (2,)))


# ---------------------------------------------------------------------------- scale


def test_the_algebra_of_a_million_million_ranks_lists_none_of_them():
    big = Layout((2**20,), (2**20,))
    small = Layout((2**20,), (1,))
    whole = Layout.product(big, small)
    assert whole == Layout((2**40,), (1,))
    assert whole.split((2**10, 2**30))[0] == Layout((2**10,), (2**30,))
    assert whole.divide(big) == small
    assert big.complement(2**41) == Layout((2, 2**20), (2**40, 1))
    assert whole.compose(big) == big
    assert whole.contains(big)
    assert not big.overlaps(small)
    assert Layout.product(small, big).coordinate(2**40 - 1) == 2**40 - 1


# ---------------------------------------------------------------------------- torch's algebra
#
# torch.distributed._pycute is lexicographic (row-major) as we are, unlike CuTe; a layout without
# digits is `1:0` there.


def pycute(layout: Layout) -> _pycute.Layout:
    return _pycute.Layout(layout.sizes, layout.strides) if layout.modes else _pycute.Layout(1, 0)


def from_pycute(layout: _pycute.Layout) -> list[tuple[int, int]]:
    sizes, strides = _pycute.flatten(layout.shape), _pycute.flatten(layout.stride)
    return [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]


@given(digit_systems(), st.data())
def test_the_canonical_form_is_what_pycute_calls_coalesced(system, data):
    chosen = data.draw(st.permutations(system))[: data.draw(st.integers(1, len(system)))]
    theirs = _pycute.Layout(tuple(s for s, _ in chosen), tuple(d for _, d in chosen))
    assert list(Layout.of(chosen).modes) == from_pycute(_pycute.coalesce(theirs))
    assert list(Layout.of(chosen).offsets()) == [theirs(i) for i in range(theirs.size())]
    assert Layout.of(chosen).cosize == theirs.cosize()


@given(families(1))
def test_complement_agrees_with_pycute(family):
    world, (layout,) = family
    assert list(layout.complement(world).modes) == from_pycute(_pycute.complement(pycute(layout), world))


@given(layouts(), st.data())
def test_composition_agrees_with_pycute_wherever_we_define_it(layout, data):
    inner = data.draw(digit_systems(largest=max(1, layout.size)))
    assume(span(inner) <= layout.size)
    other = Layout.of(data.draw(st.permutations(inner))[: data.draw(st.integers(0, len(inner)))])
    try:
        composed = layout.compose(other)
    except AxesError:
        return
    theirs = _pycute.composition(pycute(layout), pycute(other))
    assert list(composed.modes) == from_pycute(_pycute.coalesce(theirs))


def mesh_layout(parts: list[Layout]) -> _mesh_layout._MeshLayout:
    """torch's layout of a device mesh with these axes."""
    return _mesh_layout._MeshLayout([_mesh_layout._FlatLayout(p.sizes, p.strides) for p in parts])


@pytest.mark.skipif(not hasattr(_mesh_layout, "_FlatLayout"), reason="torch before 2.13 nests sizes and strides")
class TestTorchsMeshLayout:
    @given(disjoint_families())
    def test_an_axis_is_torchs_flat_layout(self, family):
        _, parts = family
        for part, theirs in zip(parts, mesh_layout(parts), strict=True):
            assert (part.sizes, part.strides) == (theirs.shape, theirs.stride)
            assert part.size == theirs.numel()
            assert list(part.offsets()) == theirs.all_ranks_from_zero()

    @given(disjoint_families())
    def test_product_is_torchs_collapse(self, family):
        _, parts = family
        theirs = mesh_layout(parts).collapse()
        whole = Layout.product(*parts)
        assert (whole.sizes, whole.strides) == (theirs.shape, theirs.stride)

    @given(families(1))
    def test_the_lines_along_an_axis_are_torchs_global_ranks(self, family):
        world, (layout,) = family
        theirs = mesh_layout([layout]).collapse().global_ranks(world)
        ours = [[base + o for o in layout.offsets()] for base in layout.complement(world).offsets()]
        assert ours == theirs

    @given(layouts(), st.data())
    def test_split_is_torchs_unflatten(self, layout, data):
        sizes = data.draw(factorizations(layout.size))
        try:
            parts = layout.split(sizes)
        except SizeError:
            return
        inner = _mesh_layout._MeshLayout.from_sizes_strides(tuple(sizes))
        theirs = mesh_layout([layout]).collapse().composition(inner)
        assert mesh_layout(list(parts)) == theirs
