"""A transfer as a sheet, and as data: which tensors go where, the bytes that each rank sends to each, and what one
rank does.

All of it is read off the `Transfer` that runs: its tensors and buckets, and what its views from ranks send and receive.

>>> from axes.algebra.mesh import Mesh
>>> from axes.transfers.transfers import transfer
>>> from axes.pictures.in_text import lines_of, plain
>>> from axes.pictures.panels import Room
>>> trainer, server = Mesh("fsdp=2"), Mesh("tp=2", ranks=range(2, 4))
>>> move = transfer({"w": "f@fsdp d"}, {"w": "f d@tp"}, trainer, server, {"w": (1024, 512)}, dtype="bfloat16")
>>> print(plain(lines_of(sheet_of_transfer(move, Room()), 80)))
1 tensor, 1.0 MiB: 2 ranks (0..1) -> 2 ranks (2..3)
buckets   1 of at most 64.0 MiB per rank; each is one exchange
received  1.0 MiB in all, the least possible; at most 512.0 KiB by a rank
sent      at most 512.0 KiB by a rank, 512.0 KiB on average of 2 that send
rank 0    0 B in, 512.0 KiB out, with 2 ranks; peak 1.0 MiB
about 22 us for rank 0
<BLANKLINE>
      mesh    ranks  tensors
from  fsdp=2  0 1          1
to    tp=2    2 3          1
<BLANKLINE>
tensors    bytes  shape       dtype     sharded
w        1.0 MiB  1024 x 512  -         f@fsdp d
  -> w            1024 x 512  bfloat16  f d@tp
<BLANKLINE>
   bytes that each rank sends to each:
from  to          2          3
[0]       256.0 KiB  256.0 KiB
1         256.0 KiB  256.0 KiB
<BLANKLINE>
rank 0          out  in  with
bucket 0  512.0 KiB   -  2 3
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from axes import Transfer
from axes.extension import bytes_text
from axes.pictures.panels import Board, Listing, Remark, Room, Sheet, exchange_board, sheet_of
from axes.pictures.rank_text import LEFT_OUT, short_ranks, time_text

MOST_BUCKETS = 6
"""Buckets that are shown; the facts have all of them."""

NAMES = 34
"""Letters of a cell that lists ranks."""


def sheet_of_transfer(move: Transfer, room: Room) -> Sheet:
    """The picture of a transfer, seen from its rank."""
    lines = [line.strip() for line in str(move).split("\n")[1:]]
    lines += [f"about {time_text(move.cost)} for rank {move.rank}"] if move.partners else []
    own = f"Rank {move.rank} exchanges with {short_ranks(move.partners, 60) or 'nobody'}"
    return sheet_of(
        move.heading,
        f"The bytes that each rank sends to each in a transfer of {move.heading}. {own}.",
        Remark(tuple(lines), close=True),
        _meshes(move) if move.tensors else None,
        _tensors(move) if move.tensors else None,
        _between(move, room) if move.bytes_in else None,
        _buckets(move, max(16, room.width - 64)) if move.partners else None,
    )


def facts_of_transfer(move: Transfer) -> dict[str, Any]:
    """A transfer as data: what `Explanation.json` returns."""
    kinds = [_facts_of_kind(kind) for kind in _kinds(move)]
    return {
        "kind": "transfer",
        "sources": [*move.sources],
        "targets": [*move.targets],
        "bytes": sum(kind["bytes"] for kind in kinds),
        "received_in_all": move.lower_bound,
        "most": {"bytes_in": move.bytes_in, "bytes_out": move.bytes_out},
        "most_by": {"bytes_in": _who(move.totals[0]), "bytes_out": _who(move.totals[1])},
        "buckets": len(move.buckets),
        "bucket_bytes": move.bucket_bytes,
        "fingerprint": move.fingerprint,
        "tensors": kinds,
        "rank": move.rank,
        "partners": [*move.partners],
        "bytes_in": sum(step.bytes_in for step in move.steps),
        "bytes_out": sum(step.bytes_out for step in move.steps),
        "peak_bytes": move.peak_bytes,
        "time_us": round(move.cost, 3),
        "steps": [
            {"bucket": step.number, "bytes_in": step.bytes_in, "bytes_out": step.bytes_out, "ranks": [*step.ranks]}
            for step in move.steps
        ],
    }


# --- tensors and meshes -----------------------------------------------------------------------------


def _kinds(move: Transfer) -> list[list[Any]]:
    """The tensors, or parts of them, that have shape, dtype and specs in common; those of most bytes first."""
    found: dict[Any, list[Any]] = {}
    for one in move.tensors:
        found.setdefault((str(one.source), str(one.target), one.shape, one.shapes, one.dtypes), []).append(one)
    return sorted(found.values(), key=lambda kind: -_bytes_of(kind))


def _bytes_of(kind: Sequence[Any]) -> int:
    """Bytes of all, on their way."""
    return sum(math.prod(one.shape) * one.itemsize for one in kind)


def _facts_of_kind(kind: Sequence[Any]) -> dict[str, Any]:
    first = kind[0]
    return {
        "sources": [one.source_name for one in kind],
        "targets": [one.target_name for one in kind],
        "source": str(first.source),
        "target": str(first.target),
        "source_shape": [*first.shapes[0]],
        "target_shape": [*first.shapes[1]],
        "source_dtype": first.dtypes[0],
        "dtype": first.dtypes[1],
        "bytes": _bytes_of(kind),
    }


def _tensors(move: Transfer) -> Listing:
    """What goes where, two rows each: before, and after."""
    rows = list[tuple[str, ...]]()
    for kind in _kinds(move):
        facts, size, before = _facts_of_kind(kind), bytes_text(_bytes_of(kind)), ""
        for side, dtype in (("source", "source_dtype"), ("target", "dtype")):
            first, *others = dict.fromkeys(facts[f"{side}s"])
            name = first + (f" and {len(others):,} more" if others else "")
            shape = " x ".join(map(str, facts[f"{side}_shape"])) or "one number"
            rows.append((before + name, size, shape, facts[dtype] or "-", facts[side] or "whole"))
            before, size = "  -> ", ""
    return Listing(("tensors", "bytes", "shape", "dtype", "sharded"), tuple(rows), right=(1,))


def _meshes(move: Transfer) -> Listing:
    """The meshes of both sides, each with its ranks, and how many tensors lie on it."""
    rows = []
    for side, ends in zip(("from", "to"), move.ends, strict=True):
        found = Counter((end.sharding.mesh.declaration, end.sharding.universe.ranks) for end in ends.values())
        rows += [(side, mesh, short_ranks(ranks, NAMES), f"{count:,}") for (mesh, ranks), count in found.items()]
    return Listing(("", "mesh", "ranks", "tensors"), tuple(rows), right=(3,))


# --- bytes of all ranks -----------------------------------------------------------------------------


def _who(counts: Mapping[int, int]) -> list[int]:
    """The ranks that have most; nobody where nothing is sent."""
    most = max(counts.values(), default=0)
    return [rank for rank in sorted(counts) if counts[rank] == most] if most else []


def _between(move: Transfer, room: Room) -> Board:
    """How much each rank that has tensors sends to each that gets some."""

    @lru_cache(maxsize=64)
    def view(rank: int) -> Transfer:
        return move if rank == move.rank else move.at(rank)

    def count(sender: int, receiver: int) -> int:
        if sender == receiver:
            kept = map(view(sender).exchange, range(len(move.tensors)))
            return any(found is not None and found.copies for found in kept)
        return sum(part.size for step in view(receiver).steps for part in step.receives.get(sender, ()))

    senders, receivers, partners = move.sources, move.targets, move.partners
    caption = "bytes that each rank sends to each"
    return exchange_board(senders, receivers, move.rank, partners, count, senders.index, room, caption)


# --- one rank ---------------------------------------------------------------------------------------


def _buckets(move: Transfer, width: int) -> Listing:
    """What the rank does in each bucket."""
    rows, steps = [], [step for step in move.steps if step.ranks]
    for step in steps[:MOST_BUCKETS]:
        both = (bytes_text(count) if count else "-" for count in (step.bytes_out, step.bytes_in))
        rows.append((f"bucket {step.number}", *both, short_ranks(step.ranks, width)))
    rows += [(f"{LEFT_OUT} {len(steps) - len(rows):,} more", "", "", "")] if len(steps) > len(rows) else []
    return Listing((f"rank {move.rank}", "out", "in", "with"), tuple(rows), right=(1, 2))
