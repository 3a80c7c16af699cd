"""Laws on thousands of generated cases, on real processes; and every split of a factor, exhaustively.

A case has all of a sharding's features together: groups, factors anywhere in them, uneven dims, dims
of size 0 and 1, nested splits in any order, permuted ranks, sub-meshes and other ranks, aliases, other
meshes, any dtype and strides, pending reductions, gradients, changes in place. `tests.whole_cases`
draws them, `tests.whole_laws` says what must hold. A failing case is in the error's notes, as a program.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import axes
from tests.conftest import BEFORE_2_13
from tests.whole_cases import on_island, watch
from tests.whole_laws import LAWS, island_of, run_case, work

CASES: dict[str, dict[int, int]] = {
    # law: ranks of an island -> cases of an island; there are 8 // ranks islands side by side
    "whole": {1: 10, 2: 100, 3: 60, 4: 240, 6: 90, 8: 112},
    "chain": {1: 6, 2: 60, 3: 36, 4: 130, 6: 24, 8: 72},
    "shards": {1: 5, 2: 60, 3: 30, 4: 180, 6: 170, 8: 42},
    "gradients": {1: 5, 2: 54, 3: 20, 4: 46, 6: 13, 8: 15},
    "leaves": {2: 19, 3: 9, 4: 18, 8: 5},
    "inplace": {1: 5, 2: 40, 3: 10, 4: 36, 6: 7, 8: 5},
    "operations": {1: 4, 2: 76, 3: 28, 4: 80, 6: 18, 8: 28},
    "functions": {2: 24, 3: 12, 4: 60, 6: 11, 8: 25},
    "regions": {1: 3, 2: 24, 3: 12, 4: 27, 6: 9, 8: 12},
    "after_torch": {2: 9, 3: 6, 4: 19, 8: 9},
    "doors": {1: 3, 2: 24, 3: 14, 4: 35, 6: 9, 8: 12},
    "compiled": {2: 3, 4: 3},
    "autocast": {2: 5, 4: 4, 8: 2},
    "told": {2: 14, 3: 9, 4: 24, 6: 9, 8: 12},
    "training": {2: 4, 4: 3, 8: 2},
    "files": {8: 4},
    "named": {1: 3, 2: 50, 3: 12, 4: 48, 6: 40, 8: 18},
    "sizes": {2: 9, 4: 14, 8: 6},
    "many": {2: 7, 3: 5, 4: 17, 8: 7},
    "dropout": {2: 9, 4: 11, 8: 5},
    "transfers": {1: 2, 2: 9, 3: 6, 4: 12, 6: 6, 8: 6},
}

TIMES = int(os.environ.get("AXES_CASES", "1"))
"""How many times as many cases are drawn; `AXES_SEED` draws others."""

TESTED = [(law, ranks, count * TIMES) for law, counts in CASES.items() for ranks, count in counts.items()]

FEATURES = {
    # each occurs at least so often
    "group": 600,
    "factor": 400,
    "inner factor": 250,
    "factor behind a dim": 150,
    "split number": 30,
    "whole group": 200,
    "even": 1500,
    "uneven": 400,
    "size 0 split": 60,
    "size 1 split": 60,
    "scalar": 150,
    "nested": 300,
    "order of axes": 150,
    "permuted ranks": 800,
    "sub-mesh": 500,
    "sub-universe": 300,
    "alias": 300,
    "another mesh": 200,
    "other ranks": 50,
    "another universe": 40,
    "pending sum": 250,
    "pending mean": 100,
    "pending max": 60,
    "pending min": 60,
    "mixed pending": 50,
    "stride transposed": 200,
    "stride strided": 200,
    "stride offset": 200,
    "stride expanded": 200,
    "stride lazy": 200,
    "float32": 40,
    "bfloat16": 40,
    "int64": 40,
    "bool": 40,
    "complex64": 40,
    "refused": 150,
    "async": 400,
    "as text": 300,
    "einsum of integers": 8,
    "local view": 700,
    "gradient": 1200,
    "second backward": 250,
    "second derivative": 150,
    "gradient changed in place": 80,
    "operation of torch before": 250,
    "operation of torch after": 200,
    "two leaves": 200,
    "in place": 300,
    "made as a leaf": 400,
    "no size given": 100,
    "some sizes given": 30,
    "told from_local": 40,
    "told region": 40,
    "told dropout": 40,
    "unequal parts": 40,
    "mean of some sizes given": 3,
    "region renamed": 5,
    "compiled": 18,
    "autocast": 30,
    "groups of its own": 60,
    "vector_norm of torch": 20,
    "embedding of torch": 20,
    "amax of torch": 5,
    **dict.fromkeys(("named psum", "named pmean", "named pmax", "named pmin", "named all_gather"), 10),
    **dict.fromkeys(("named psum_scatter", "named all_to_all", "named sizes", "named ppermute"), 15),
}

ALONE = {"scalar", "compiled", "autocast", "refused"}
"""What has few features beside it."""

PAIRS = (
    # every two of these meet at least three times
    *("group", "inner factor", "uneven", "nested", "order of axes", "permuted ranks", "sub-mesh", "alias"),
    *("async", "gradient", "second backward", "stride transposed", "local view", "size 0 split", "size 1 split"),
)

APART = {
    frozenset(("second backward", "in place")),
}
"""Pairs that no law draws."""

drawn: dict[tuple[str, int], list[frozenset[str]]] = {}
"""The features of each case that was run, by law and ranks."""


@pytest.mark.parametrize(("law", "ranks", "count"), TESTED, ids=[f"{law}-{ranks}" for law, ranks, _ in TESTED])
def test_the_law_holds_on_generated_cases(pool, law: str, ranks: int, count: int):
    found = pool.run(work, law, ranks, count, timeout=400 * TIMES)
    features = [case for rank in found for case in rank]
    assert len(features) == count * (8 // ranks)
    drawn[law, ranks] = list(map(frozenset, features))


def broken_law() -> None:
    LAWS["broken"] = lambda d: d.program.do("assert len('axes') == 5")
    run_case("broken", 4, dist.get_rank() // 4, 7)


def test_a_case_that_fails_comes_with_the_program_that_repeats_it(pool):
    with pytest.raises(AssertionError) as caught:
        pool.run(broken_law)
    notes = "\n".join(caught.value.__notes__)
    assert re.search(r"law 'broken', case 7, rank \d of 4. This program repeats it:", notes)
    assert "assert len('axes') == 5" in notes
    assert "of 8 failed first" in notes


def test_every_law_is_run_and_at_least_six_thousand_cases():
    assert set(CASES) == set(LAWS)
    assert sum(count * (8 // ranks) for _, ranks, count in TESTED) >= 6000


def test_every_feature_and_every_pair_of_features_was_drawn():
    if len(drawn) < len(TESTED):
        pytest.skip("some laws weren't run")
    cases = [case for found in drawn.values() for case in found]
    counts = Counter(feature for case in cases for feature in case)
    assert {name: counts[name] for name, least in FEATURES.items() if counts[name] < least} == {}
    pairs = Counter(pair for case in cases for pair in itertools.combinations(sorted(case), 2))
    wanted = [tuple(sorted(pair)) for pair in itertools.combinations(PAIRS, 2) if frozenset(pair) not in APART]
    assert {pair: pairs[pair] for pair in wanted if pairs[pair] < 3} == {}


# ---------------------------------------------------------------------------- every split of a factor

LARGEST = 12
BATCH = 1500


def factor_splits(tp: int) -> list[tuple[tuple[int, int, int], int, tuple[int, int, int]]]:
    """`(shape, dim, (before, split, behind))` of all 3-d tensors of up to twelve elements per dim."""
    found = []
    for split in range(tp, LARGEST + 1, tp):
        for before in range(1, LARGEST // split + 1):
            for behind in range(1, LARGEST // (split * before) + 1):
                size = before * split * behind
                for one, two in itertools.product(range(1, LARGEST + 1), repeat=2):
                    for dim in range(3):
                        shape = [one, two]
                        shape.insert(dim, size)
                        found.append((tuple(shape), dim, (before, split, behind)))
    return found


def wrong_splits(tp: int, first: int, count: int) -> list[str]:
    """Works through some of them on this rank's island: what isn't as it is on the whole tensor."""
    island = island_of(tp)
    if island is None:
        return []
    torch.set_num_threads(1)
    watch()
    on_island(island * tp)
    mesh = axes.init_mesh(f"tp={tp}", ranks=range(island * tp, island * tp + tp), device_type="cpu")
    here, found = dist.get_rank() - island * tp, []
    plain = [mesh.sharding(text) for text in ("a b c", "a@tp b c", "a b@tp c", "a b c@tp")]
    for shape, dim, sizes in factor_splits(tp)[first : first + count][island :: 8 // tp]:
        whole = torch.arange(float(math.prod(shape))).view(shape)
        names = ["a", "b", "c"]
        names[dim] = f"(x={sizes[0]} y={sizes[1]}@tp z={sizes[2]})"
        text = " ".join(names)
        opened = whole.view(*shape[:dim], *sizes, *shape[dim + 1 :])
        part = opened.chunk(tp, dim + 1)[here]
        part = part.reshape(*shape[:dim], -1, *shape[dim + 1 :])
        x = axes.shard(whole, text, mesh=mesh)
        own = mesh.sharding(text)
        results = {
            "shard": (x.to_local(), part),
            "unshard": (axes.unshard(x), whole),
            **({} if BEFORE_2_13 else {"full_tensor": (x.full_tensor(), whole)}),  # torch's own refused it
            "from_local": (axes.unshard(axes.from_local(part, text, mesh=mesh, shape=shape)), whole),
        }
        for at, target in enumerate(plain):
            chunks = whole.chunk(tp, at - 1) if at else [whole] * tp
            expected = chunks[here] if here < len(chunks) else whole.narrow(at - 1, 0, 0)
            y = axes.reshard(x, target)
            results[f"to {target.spec}"] = (y.to_local(), expected)
            results[f"from {target.spec}"] = (
                axes.reshard(axes.shard(whole, target.spec, mesh=mesh), own).to_local(),
                part,
            )
            results[f"back from {target.spec}"] = (axes.reshard(y, own).to_local(), part)
        found += [f"{text} of {list(shape)}: {what}" for what, pair in results.items() if not torch.equal(*pair)]
    return found


def test_there_are_as_many_splits_of_a_factor_as_there_should_be():
    assert [len(factor_splits(tp)) for tp in (2, 3, 4)] == [10800, 5616, 3024]


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_sample_of_all_splits_of_a_factor_is_right(pool, tp: int):
    for rank, found in enumerate(pool.run(wrong_splits, tp, 1000, 100, timeout=300)):
        assert not found, f"rank {rank}: {found[:5]}"


@pytest.mark.full
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_all_splits_of_a_factor_are_right(pool, tp: int):
    for first in range(0, len(factor_splits(tp)), BATCH):
        for rank, found in enumerate(pool.run(wrong_splits, tp, first, BATCH, timeout=600)):
            assert not found, f"rank {rank}: {found[:5]}"
