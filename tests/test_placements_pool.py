"""What DTensor really puts on each of eight ranks is what a sharding says, or the sharding is refused.

Thousands of generated specs, even and uneven, in any order of axes, with aliases and factors of
groups, go through `distribute_tensor` on real device meshes. Each rank compares its own shard.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from axes.algebra.errors import ShardingError
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import Sharding
from axes.runtime.torch_placements import torch_placements
from tests.conftest import READS_FACTORS, takes_factors

MESHES = {
    "a=2 b=2 c=2": ("x = a b", "y = b c", "z = a c", "w = a b c", "v = c b", "u = c b a"),
    "a=4 b=2": ("x = a b", "y = b a", "(a) = p q"),
    "a=2 b=4": ("x = a b", "y = b a", "(b) = p q"),
    "a=8": ("x = a", "(a) = p q"),
    "a=2 one=1 b=4": ("x = a one b", "y = b a"),
}


@dataclass(frozen=True)
class Case:
    declaration: str
    spec: str
    shape: tuple[int, ...]


@dataclass
class Found:
    """What one rank found out about one case."""

    refused: str = ""
    placements: str = ""  # empty where there are none to try
    same: bool = True
    whole: bool | None = None  # where it was asked
    back: bool = True
    text: str = ""


@functools.cache
def mesh_of(declaration: str) -> Mesh:
    sizes = {"p": 2} if "p q" in " ".join(MESHES[declaration]) else {}
    return Mesh(declaration, *MESHES[declaration], sizes=sizes)


def generated(count: int, seed: int) -> list[Case]:
    """Specs of one to three dims on all meshes, with shapes from nothing to a few of each piece."""
    draw = random.Random(seed)
    found: list[Case] = []
    while len(found) < count:
        declaration = draw.choice(list(MESHES))
        mesh = mesh_of(declaration)
        names = draw.sample(list(mesh.names), draw.randint(0, min(3, len(mesh.names))))
        ndim = draw.randint(1, 3)
        where = [draw.randrange(-1, ndim) for _ in names]
        texts, shape = [], []
        for d in range(ndim):
            axes = [n for n, w in zip(names, where, strict=True) if w == d]
            parts = math.prod(mesh.names[a] for a in axes)
            if draw.random() < 0.3 and axes:
                text, extent = group(draw, axes, mesh)
            else:
                text = f"d{d}" + (f"@({' '.join(axes)})" if axes else "")
                extent = draw.choice([draw.randint(0, 11), parts * draw.randint(1, 3), parts * draw.randint(1, 2)])
            texts.append(text.replace("f", f"f{d}_"))
            shape.append(extent)
        left = [n for n, w in zip(names, where, strict=True) if w == -1]
        if left and draw.random() < 0.3:
            texts += ["|", f"{draw.choice(['sum', 'max'])}@({' '.join(left)})"]
        spec = " ".join(texts)
        try:
            mesh.sharding(spec)
        except ShardingError:
            continue  # two names that share ranks
        found.append(Case(declaration, spec, tuple(shape)))
    return found


def group(draw: random.Random, axes: list[str], mesh: Mesh) -> tuple[str, int]:
    """A dim of two or three factors with the axes on some of them."""
    count = draw.randint(2, 3)
    owner = sorted(draw.randrange(count) for _ in axes) if draw.random() < 0.5 else [draw.randrange(count)] * len(axes)
    texts, extent = [], 1
    for i in range(count):
        mine = [a for a, o in zip(axes, owner, strict=True) if o == i]
        size = math.prod(mesh.names[a] for a in mine) * draw.randint(1, 3)
        extent *= size
        texts.append(f"f{i}={size}" + (f"@({' '.join(mine)})" if mine else ""))
    return f"({' '.join(texts)})", extent


# ---------------------------------------------------------------------------- on every rank


@functools.cache
def device_mesh_of(declaration: str) -> DeviceMesh:
    mesh = mesh_of(declaration)
    return init_device_mesh("cpu", tuple(mesh.shape.values()), mesh_dim_names=mesh.axis_names)


def shard_by_indices(whole: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    for dim, indices in enumerate(sharding.local_indices(whole.shape, rank)):
        runs = indices if isinstance(indices, tuple) else (indices,)
        whole = torch.cat([whole.narrow(dim, run.start, run.stop - run.start) for run in runs], dim)
    return whole


def naive_placements(sharding: Sharding, shape: tuple[int, ...]) -> list[Placement] | None:
    """The placements that one would write where the library refuses: each axis strided by what is in front."""
    mesh = sharding.mesh
    found: list[Placement] = [Replicate()] * mesh.ndim
    for index, dim in enumerate(sharding.sized(shape).dims):
        pieces: list[tuple[int, int]] = []  # of the dim, from the major side: the mesh axis or -1, and size
        for factor in dim.factors:
            names: list[str] = []
            for axis in factor.axes:
                made_of = mesh.factored(axis.layout)
                if made_of is None:
                    return None
                names += made_of
            pieces += [(mesh.axis_names.index(name), mesh.names[name]) for name in names]
            if len(dim.factors) > 1:
                pieces.append((-1, factor.size // math.prod(mesh.names[name] for name in names)))
        for at, (axis, _) in enumerate(pieces):
            if axis >= 0:
                front = math.prod(size for other, size in pieces[:at] if other < 0 or other > axis)
                found[axis] = Shard(index) if front == 1 else _StridedShard(index, split_factor=front)
    return found


def examine(cases: list[Case], gather: int) -> list[Found]:
    """On every rank: each case against its own DTensor; gathered, too, every so many cases."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return [examined(case, number % gather == 0) for number, case in enumerate(cases)]


def examined(case: Case, gather: bool) -> Found:
    found = Found()
    mesh, device_mesh = mesh_of(case.declaration), device_mesh_of(case.declaration)
    sharding = mesh.sharding(case.spec).sized(case.shape)
    try:
        check_torch_can(sharding, case.shape)
        placements: Sequence[Placement] | None = torch_placements(sharding)
        back = Sharding.from_placements(mesh, placements, len(case.shape), case.shape)
        found.back = back.is_equivalent(sharding, case.shape)
    except ShardingError as error:
        found.refused = str(error)
        placements = naive_placements(sharding, case.shape)
        if placements is None:
            return found
    split = [Replicate() if isinstance(p, Partial) else p for p in placements]
    found.placements = str(split)
    whole = torch.arange(math.prod(case.shape)).reshape(case.shape)
    expected = shard_by_indices(whole, sharding, torch.distributed.get_rank())
    x = distribute_tensor(whole, device_mesh, split, src_data_rank=None)
    found.same = x.to_local().shape == expected.shape and torch.equal(x.to_local(), expected)
    if gather and not found.refused and (READS_FACTORS or not any(isinstance(p, _StridedShard) for p in split)):
        found.whole = torch.equal(x.full_tensor(), whole)
    if not found.same or found.whole is False:
        found.text = f"{case}: {split} -> {x.to_local().tolist()}, not {expected.tolist()}"
    return found


def gathered_right(cases: list[Case]) -> list[bool]:
    """On every rank: whether torch gathers what the naive placements of refused cases put there."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    results = []
    for case in cases:
        sharding = mesh_of(case.declaration).sharding(case.spec)
        whole = torch.arange(math.prod(case.shape)).reshape(case.shape)
        placements = naive_placements(sharding, case.shape)
        x = distribute_tensor(whole, device_mesh_of(case.declaration), placements, src_data_rank=None)
        try:
            results.append(torch.equal(x.full_tensor(), whole))
        except RuntimeError:  # torch's own check of its padding, on every rank
            results.append(False)
    return results


# ---------------------------------------------------------------------------- together


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return generated(2100, seed=1)


@pytest.fixture(scope="module")
def found(pool, cases) -> list[list[Found]]:
    """By case, what each of the eight ranks found."""
    return list(zip(*pool.run(examine, cases, 8, timeout=120), strict=True))


def test_what_dtensor_puts_on_each_rank_is_what_the_sharding_says(found):
    accepted = [ranks for ranks in found if not ranks[0].refused]
    wrong = [rank.text for ranks in accepted for rank in ranks if not rank.same]
    assert not wrong, wrong[:5]
    assert len(accepted) > 1500


def test_torch_gathers_the_whole_tensor_again(found):
    asked = [rank for ranks in found for rank in ranks if rank.whole is not None]
    assert not [rank.text for rank in asked if not rank.whole][:5]
    assert len(asked) > 8 * (200 if READS_FACTORS else 190)


def test_placements_come_back_as_an_equivalent_sharding(found):
    assert all(rank.back for ranks in found for rank in ranks)


def test_every_rank_refuses_the_same_cases_for_the_same_reason(found):
    assert all(len({(rank.refused, rank.placements) for rank in ranks}) == 1 for ranks in found)


def test_an_uneven_dim_is_refused_only_where_dtensor_cuts_it_otherwise_or_strides(cases, found):
    """With strided placements that is every uneven size, also the few that torch happens to get right."""
    uneven = [(case, ranks) for case, ranks in zip(cases, found, strict=True) if "uneven" in ranks[0].refused]
    by_luck = [(case, ranks) for case, ranks in uneven if all(rank.same for rank in ranks)]
    assert all("_StridedShard" in ranks[0].placements for _, ranks in by_luck), by_luck[:5]
    assert len(uneven) > 40
    assert len(by_luck) < len(uneven) / 2


def test_the_cases_are_of_every_kind(cases, found):
    def is_uneven(case: Case) -> bool:
        sharding = mesh_of(case.declaration).sharding(case.spec)
        split = [dim.pieces for dim in sharding.dims]
        return any(extent % parts for extent, parts in zip(case.shape, split, strict=True))

    accepted = [(case, ranks[0]) for case, ranks in zip(cases, found, strict=True) if not ranks[0].refused]
    kinds = Counter()
    for case, rank in accepted:
        kinds["strided"] += "_StridedShard" in rank.placements
        kinds["group"] += "=" in case.spec
        kinds["uneven"] += is_uneven(case)
        kinds["empty"] += 0 in case.shape
        kinds["pending"] += "|" in case.spec
        kinds["alias"] += any(f"({alias})" in case.spec for alias in "xyzwvu")
    assert all(kinds[kind] >= 40 for kind in ("strided", "group", "uneven", "empty", "pending", "alias")), kinds
    reasons = Counter(ranks[0].refused.partition("DTensor")[0] for ranks in found if ranks[0].refused)
    assert len(reasons) > 10


@takes_factors
def test_what_is_refused_because_of_an_unsplit_factor_in_front_torch_gathers_wrongly(pool, cases, found):
    refused = [
        case for case, ranks in zip(cases, found, strict=True) if "two axes" in ranks[0].refused and 0 not in case.shape
    ][:30]
    assert len(refused) > 20
    for x, y, z in itertools.permutations("abc"):
        case = Case("a=2 b=2 c=2", f"s@({x} {y}) (k=3 h=4@{z} d=2)", (8, 24))
        if (x, y) == tuple(sorted((x, y))):
            check_torch_can(mesh_of(case.declaration).sharding(case.spec), case.shape)
        else:
            refused.append(case)
    assert not any(any(right) for right in zip(*pool.run(gathered_right, refused), strict=True))
