"""What a collective costs: a latency, bytes over the links, bytes through memory.

>>> model = CostModel(latency_us=10, intra_node_gbps=100, inter_node_gbps=25, ranks_per_node=8)
>>> model.time_us("all_to_all", 8, 8, bytes_in=1_000_000)     # within a node
20.0
>>> model.time_us("all_to_all", 2, 1, bytes_in=1_000_000)     # across nodes
50.0

A rank's bytes count where the rank receives them. In an exchange each byte has its own way, so the
share that comes from other nodes takes the slow link. Gathers and reductions are node-aware in every
backend: what comes from other nodes enters each node once, spread over the links of the node's
members, and goes around inside.

To choose by other numbers, give the planner a `CostModel` of them, the same on every rank.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from axes.algebra.errors import ShardingError, shown
from axes.algebra.layout import Universe
from axes.algebra.sizes import checked_rank

_NODE_AWARE = frozenset({"all_reduce", "reduce_scatter", "all_gather"})


@dataclass(frozen=True)
class CostModel:
    """Numbers by which plans are compared: latency of a collective, and bandwidths of a rank.

    The defaults are of the order of NCCL on nodes of eight current GPUs with one 400 Gbit/s link each. A field that
    you leave out keeps its default.

    Examples:
        >>> CostModel(latency_us=5).latency_us
        5
    """

    latency_us: float = 20.0
    intra_node_gbps: float = 300.0
    inter_node_gbps: float = 40.0
    memory_gbps: float = 2000.0
    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        for name in ("latency_us", "intra_node_gbps", "inter_node_gbps", "memory_gbps"):
            found = getattr(self, name)
            is_number = isinstance(found, numbers.Real) and not isinstance(found, bool)
            if not (is_number and found >= 0 and (found < 1e300 or found == math.inf)) or (
                found == 0 and name != "latency_us"
            ):
                raise ShardingError(f"CostModel.{name} is a positive number; found {shown(found)}")
        checked_rank("CostModel.ranks_per_node", self.ranks_per_node, 1)

    def time_us(self, kind: str, group_size: int, ranks_of_a_node: int, bytes_in: int, bytes_copied: int = 0) -> float:
        """Microseconds for one step; nothing for a step that only takes a view.

        kind: "slice", "all_reduce", ... as in a plan. Of the `group_size` ranks that communicate, `ranks_of_a_node`
        share a node. bytes_in: what the busiest rank receives; bytes_copied: what it packs and unpacks.
        """
        if group_size <= 1:
            return bytes_copied / self.memory_gbps / 1e3
        outside = bytes_in * (group_size - ranks_of_a_node) / (group_size - 1)
        if kind in _NODE_AWARE:
            outside /= ranks_of_a_node
        seconds = (bytes_in - outside) / self.intra_node_gbps + outside / self.inter_node_gbps
        return self.latency_us + (seconds + bytes_copied / self.memory_gbps) / 1e3


def node_size(universe: Universe, digits: Iterable[tuple[int, int]], ranks_per_node: int) -> int:
    """How many ranks of a group with these digits share the node of the first one, digit by digit.

    In closed form where the universe is evenly spaced; else it looks at the ranks along each digit.

    >>> from axes.algebra.layout import Universe
    >>> node_size(Universe.of(range(64)), [(4, 8), (8, 1)], 8), node_size(Universe.of(range(64)), [(8, 4)], 8)
    (8, 2)
    """
    ranks = universe.ranks
    if isinstance(ranks, range):
        reach = ranks_per_node - ranks.start % ranks_per_node
        return math.prod(min(size, -(-reach // (stride * ranks.step))) for size, stride in digits)
    lines = ([ranks[at * stride] for at in range(size)] for size, stride in digits)
    return math.prod(members_of_node(line, ranks_per_node) for line in lines)


def members_of_node(ranks: Sequence[int], ranks_per_node: int) -> int:
    """How many of these ranks share the node of the first one."""
    return sum(1 for rank in ranks if rank // ranks_per_node == ranks[0] // ranks_per_node)
