"""Compares the planner with both of DTensor's, on every pair of states of a 3-d tensor on 2x2x2.

    python -m docs.planner_table               all 20,313 pairs; about fifteen minutes, nearly all of it DTensor's
    python -m docs.planner_table --every 100   every hundredth pair

A state puts each of three axes on nothing, on one of three dims (in every order where several share one)
or leaves it pending; a target's pending axes are pending in the source. Dims are even, the topology flat.
Bytes are those that the busiest rank receives, in units of the whole tensor, summed over the steps; both
sides are counted by the same rules. DTensor plans for 1 MiB, with every flattened mesh made beforehand;
its min-cost planner starts from an empty cache for each pair, because what it remembers of one pair
changes what it does for the next.

It exits with 1 where a claim under the table doesn't hold. DTensor's planners are private: this was
written against torch 2.13.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.tensor._redistribute as dtensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from axes.algebra.cost import CostModel
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Plan, choices_between, plan
from axes.algebra.sharding import Sharding

SIDE = 64
WHOLE = SIDE**3 * 4
AXES = "xyz"

Pair = tuple["Place", "Place"]
Count = tuple[int, float]
"""`(collectives, bytes)`, bytes in units of the whole tensor."""


@dataclass(frozen=True)
class Place:
    """For each dim its axes in order, and the axes that are pending."""

    dims: tuple[tuple[int, ...], ...]
    pending: tuple[int, ...]

    def sharding(self) -> Sharding:
        """As our planner takes it."""
        dims = [f"_@({' '.join(AXES[axis] for axis in dim)})" for dim in self.dims]
        pending = f"| sum@({' '.join(AXES[axis] for axis in self.pending)})" if self.pending else ""
        return Mesh("x=2 y=2 z=2").sharding(" ".join([*dims, pending]))

    def spec(self, mesh: DeviceMesh) -> DTensorSpec:
        """As DTensor takes it."""
        placements: list[Partial | Replicate | Shard] = [Replicate()] * 3
        for dim, axes in enumerate(self.dims):
            for axis in axes:
                placements[axis] = Shard(dim)
        for axis in self.pending:
            placements[axis] = Partial()
        order = tuple(ShardOrderEntry(dim, axes) for dim, axes in enumerate(self.dims) if axes)
        meta = TensorMeta(torch.Size((SIDE,) * 3), (SIDE * SIDE, SIDE, 1), torch.float32)
        return DTensorSpec(mesh, tuple(placements), tensor_meta=meta, shard_order=order)


def places() -> Iterator[Place]:
    """All 176 states."""
    for where in itertools.product(("replicated", 0, 1, 2, "pending"), repeat=3):
        lists = [[axis for axis in range(3) if where[axis] == dim] for dim in range(3)]
        pending = tuple(axis for axis in range(3) if where[axis] == "pending")
        for order in itertools.product(*map(itertools.permutations, lists)):
            yield Place(tuple(map(tuple, order)), pending)


def pairs(every: int = 1) -> list[Pair]:
    """All pairs whose target leaves pending only what the source has, or each `every`-th of them."""
    found = [(a, b) for a in places() for b in places() if set(b.pending) <= set(a.pending)]
    return found[::every]


# --- DTensor --------------------------------------------------------------------------------------


def fake_mesh() -> DeviceMesh:
    """2x2x2 in this process alone, with all flattened meshes."""
    logging.getLogger(dtensor.__name__).setLevel(logging.ERROR)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("x", "y", "z"))
    for names in (("x", "y"), ("x", "z"), ("y", "z"), ("x", "y", "z")):
        mesh[names]._flatten()
    return mesh


def dtensor_counts(mesh: DeviceMesh, pair: Pair, min_cost: bool) -> Count:
    """What DTensor would do for a pair, by one of its planners."""
    source, target = (place.spec(mesh) for place in pair)
    dtensor.clear_redistribute_planner_cache()
    infos = dtensor._gen_transform_infos_non_cached(source, target, min_cost)
    infos = dtensor._optimize_transform_infos(infos, mesh, source.placements, target.placements)
    now = list(source.placements)
    collectives, received = 0, 0.0
    for info in infos:
        flattened = isinstance(info, dtensor._FlattenedTransformInfo)
        axes = info.original_mesh_dims if flattened else (info.mesh_dim,)
        size, tile = 2 ** len(axes), 0.5 ** sum(placement.is_shard() for placement in now)
        kind = info._comm_type_key()
        share = {
            None: 0.0,
            "all_reduce": 2 * (size - 1) / size,
            "reduce_scatter": (size - 1) / size,
            "all_to_all": (size - 1) / size,
            "all_gather": size - 1.0,
        }
        collectives += kind is not None
        received += share[kind] * tile
        for axis in axes:
            now[axis] = info.src_dst_placements[1]
    assert tuple(now) == target.placements
    return collectives, received


# --- the comparison -------------------------------------------------------------------------------

MODELS: dict[str, tuple[CostModel, int]] = {
    "latency only": (CostModel(1.0, math.inf, math.inf, math.inf), WHOLE),
    "bandwidth only": (CostModel(0.0, 50.0, 50.0, math.inf), WHOLE),
    **{
        f"20 us, 50 GB/s, {text}": (CostModel(20.0, 50.0, 50.0, math.inf), size)
        for text, size in (("16 KiB", 2**14), ("1 MiB", 2**20), ("64 MiB", 2**26), ("4 GiB", 2**32))
    },
}
"""Flat topologies: a cost model, and the bytes of the whole tensor."""


def shape_of(size: int) -> tuple[int, int, int]:
    """Three even dims that hold `size` bytes of float32."""
    return (8, 8, size // 256)


def counts(found: Plan) -> Count:
    """Collectives and bytes of one of our plans."""
    return found.collectives, found.bytes_in / (4 * math.prod(found.shape))


def time_us(model: CostModel, size: int, count: Count) -> float:
    """The modelled time of some collectives and bytes, the same way for everyone."""
    return model.latency_us * count[0] + count[1] * size / model.inter_node_gbps / 1e3


def compare(chosen_pairs: list[Pair], progress: Callable[[str], None]) -> bool:
    """Print the table and the claims; whether all claims hold."""
    mesh = fake_mesh()
    theirs: dict[str, list[Count]] = {}
    for name, min_cost in (("greedy", False), ("min-cost", True)):
        progress(f"DTensor, {name}: {len(chosen_pairs)} pairs")
        theirs[name] = [dtensor_counts(mesh, pair, min_cost) for pair in chosen_pairs]
    ours: dict[str, list[Count]] = {}
    for name, (model, size) in MODELS.items():
        progress(f"axes, {name}")
        shape = shape_of(size)
        ours[name] = [counts(plan(a.sharding(), b.sharding(), shape, cost_model=model)) for a, b in chosen_pairs]
    progress("axes, all candidates")
    weighed = [
        [
            counts(found)
            for found in choices_between(a.sharding(), b.sharding(), shape_of(WHOLE), "float32", CostModel())
        ]
        for a, b in chosen_pairs
    ]
    print_table(theirs, ours)
    return check(theirs, ours, weighed)


def print_table(theirs: dict[str, list[Count]], ours: dict[str, list[Count]]) -> None:
    """Totals over all pairs, and our share of DTensor's."""
    total = {name: (sum(n for n, _ in row), sum(b for _, b in row)) for name, row in (theirs | ours).items()}
    print("| planner | collectives | of greedy | of min-cost | bytes | of greedy | of min-cost | most |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, row in (theirs | ours).items():
        title = f"DTensor, {name}" if name in theirs else f"axes, {name}"
        cells = []
        for at, text in ((0, "{:,.0f}"), (1, "{:,.1f}")):
            cells.append(text.format(total[name][at]))
            cells.extend(f"{total[name][at] / total[other][at]:.3f}" for other in theirs)
        print(f"| {title} | {' | '.join(cells)} | {max(n for n, _ in row)} |")


def check(theirs: dict[str, list[Count]], ours: dict[str, list[Count]], weighed: list[list[Count]]) -> bool:
    """Print each claim with what was found."""
    claims: dict[str, bool] = {}
    for other, rows in theirs.items():
        missing = sum(
            not any(n <= most and b <= bytes_in + 1e-9 for n, b in found)
            for found, (most, bytes_in) in zip(weighed, rows, strict=True)
        )
        claims[
            f"candidates hold a plan with no more collectives and no more bytes than {other}: {missing} without"
        ] = not missing
        worse = sum(
            time_us(model, size, mine) > time_us(model, size, yours) * (1 + 1e-9)
            for name, (model, size) in MODELS.items()
            for mine, yours in zip(ours[name], rows, strict=True)
        )
        claims[f"the chosen plan is never slower than {other}, by any of the models: {worse} slower"] = not worse
    most = max(n for row in ours.values() for n, _ in row)
    claims[f"at most two collectives: {most}"] = most <= 2
    print()
    for text, holds in claims.items():
        print(f"- {'yes' if holds else 'NO'}: {text}")
    return all(claims.values())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="compare only every n-th pair")
    every = parser.parse_args().every
    chosen_pairs = pairs(every)
    print(f"{len(chosen_pairs):,} pairs of {len(list(places()))} states, torch {torch.__version__}\n")
    holds = compare(chosen_pairs, lambda text: print(text, file=sys.stderr, flush=True))
    dist.destroy_process_group()
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
