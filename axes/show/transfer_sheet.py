"""A transfer as a sheet, and explained: which tensors go where, who sends how much to whom, what one rank does.

All of it is read off the `Transfer` that runs: its tensors and buckets, and what its views from ranks send and receive.

>>> from axes.algebra.mesh import Mesh
>>> from axes.transfers.transfers import transfer
>>> from axes.show.in_text import lines_of, plain
>>> from axes.show.panels import Room
>>> trainer, server = Mesh("fsdp=2"), Mesh("tp=2", ranks=range(2, 4))
>>> move = transfer({"w": "f@fsdp d"}, {"w": "f d@tp"}, trainer, server, {"w": (1024, 512)}, dtype="bfloat16")
>>> print(plain(lines_of(sheet_of_transfer(move, Room()), 80)))
1 tensor, 1.0 MiB: 2 ranks (0..1) -> 2 ranks (2..3)
1 bucket of at most 64.0 MiB, one exchange each; about 22 us for rank 0
<BLANKLINE>
           in all    average       most  by rank
received  1.0 MiB  512.0 KiB  512.0 KiB  2 3
sent      1.0 MiB  512.0 KiB  512.0 KiB  0 1
received is what ranks need and don't have: no plan sends less
<BLANKLINE>
      mesh    ranks  tensors
from  fsdp=2  0 1          1
to    tp=2    2 3          1
<BLANKLINE>
tensors    bytes  shape, dtype  lies as
w        1.0 MiB  1024 x 512    f@fsdp d
  ->              bfloat16      f d@tp
<BLANKLINE>
   who sends how much to whom:
from  to          2          3
[0]       256.0 KiB  256.0 KiB
1         256.0 KiB  256.0 KiB
<BLANKLINE>
rank 0          out  in  with  tensors
bucket 0  512.0 KiB   -  2 3   w
rank 0 in all: 512.0 KiB out, with 2 ranks, in about 22 us; peak memory 1.0 MiB
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from axes.algebra.errors import MeshError
from axes.algebra.explanation import Explanation, Section
from axes.algebra.plan import bytes_text
from axes.show.boards import exchange_board, few_rows
from axes.show.panels import Board, Listing, Panel, Remark, Room, Sheet
from axes.show.rank_text import LEFT_OUT, short_ranks, time_text
from axes.transfers.transfers import Transfer

MOST_ROWS = 6
"""Rows of a table of tensors, meshes or buckets in a picture; an explanation has all of them."""

SHORT, NAMES = 16, 34
"""Letters of a cell that names a tensor, and of one that lists several, or ranks."""


def sheet_of_transfer(move: Transfer, room: Room) -> Sheet:
    """The picture of a transfer, seen from its rank."""
    if not move.tensors:
        return Sheet(move.heading, f"A transfer of {move.heading}.", ())
    buckets = _buckets_text(move)
    *panels, last = _tables(move, MOST_ROWS, max(16, room.width - 64))
    if move.bytes_in:
        panels.insert(4, _between(move, room))
    own = f"Rank {move.rank} exchanges with {short_ranks(move.partners, 60) or 'nobody'}"
    summary = f"Who sends how much to whom in a transfer of {move.heading}. {buckets}. {own}."
    return Sheet(move.heading, summary, (Remark((buckets,), close=True), *panels, last))


def explained_transfer(move: Transfer) -> Explanation:
    """A transfer as `axes.explain` says it."""
    sections = [Section("", ((_buckets_text(move),),))] if move.tensors else []
    for panel in _tables(move, len(move.tensors) + len(move.buckets), 2 * NAMES) if move.tensors else ():
        match panel:
            case Listing():
                sections.append(Section(panel.head[0], (("", *panel.head[1:]), *panel.rows)))
            case Remark():
                sections.append(Section("", tuple((line,) for line in panel.lines)))
    return Explanation(move.heading, tuple(sections), _facts_of(move))


def _facts_of(move: Transfer) -> dict[str, Any]:
    """A transfer as data: what `Explanation.json` returns."""
    kinds = [_facts_of_kind(kind) for kind in _kinds(move)]
    return {
        "kind": "transfer",
        "sources": [*move.sources],
        "targets": [*move.targets],
        "bytes": sum(kind["bytes"] for kind in kinds),
        "received_in_all": move.lower_bound,
        "most": {"bytes_in": move.bytes_in, "bytes_out": move.bytes_out},
        "most_by": {"bytes_in": _who(move.totals.received), "bytes_out": _who(move.totals.sent)},
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


def seen_transfer(move: Transfer, rank: int | None = None) -> Transfer:
    """A transfer seen from a rank: without one from its own where that has a part in it, else from the first.

    Raises `MeshError` for a rank that has none.
    """
    if rank is not None and rank not in move.ranks:
        raise MeshError(f"rank {rank} isn't one of the ranks of the transfer: {short_ranks(move.ranks, NAMES)}")
    if rank is None and (move.rank in move.ranks or not move.ranks):
        return move
    return move.at(move.ranks[0] if rank is None else rank)


def _tables(move: Transfer, most: int, width: int) -> Iterator[Panel]:
    """What is said of tensors, meshes and ranks. width: letters of a list of ranks."""
    yield _totals(move)
    moved = sum(math.prod(one.shape) for one in move.tensors)
    tied = move.equal or moved > sum(math.prod(end.shape) for end in move.ends[0].values())
    least = "; tied targets may each count" if tied else ": no plan sends less"
    yield Remark((f"received is what ranks need and don't have{least}",), close=True)
    yield Listing(("", "mesh", "ranks", "tensors"), (*_meshes(move, 0, most), *_meshes(move, 1, most)), right=(3,))
    yield _tensors(move, most)
    if move.partners:
        yield _buckets(move, most, width)
    yield Remark((_own_text(move),), close=bool(move.bytes_in))


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


def _tensors(move: Transfer, most: int) -> Listing:
    """What goes where, two rows each: before, and after."""
    kinds, rows = _kinds(move), list[tuple[str, ...]]()
    for kind in kinds[:most]:
        first = kind[0]
        sources, targets = (
            list(dict.fromkeys(getattr(one, f"{side}_name") for one in kind)) for side in ("source", "target")
        )
        like = f"{len(sources):,} like " if len(sources) > 1 else ""
        others = f" and {len(targets) - 1:,} more" if len(targets) > 1 else ""
        there = "" if sources == targets else f" {targets[0]}{others}"
        before, after = (" x ".join(map(str, shape)) or "one number" for shape in first.shapes)
        held, sent = first.dtypes
        dtype = "taken as float32" if sent is None else sent if held in (None, sent) else f"{held} as {sent}"
        rows.append((f"{like}{sources[0]}", bytes_text(_bytes_of(kind)), before, str(first.source) or "whole"))
        rows.append((f"  ->{there}", "", dtype if after == before else after, str(first.target) or "whole"))
    rest = [one for kind in kinds[most:] for one in kind]
    if rest:
        count = len({one.source_name for one in rest})
        rows.append((f"{LEFT_OUT} {count:,} more", bytes_text(_bytes_of(rest)), "", ""))
    return Listing(("tensors", "bytes", "shape, dtype", "lies as"), tuple(rows), right=(1,))


def _meshes(move: Transfer, side: int, most: int) -> tuple[tuple[str, ...], ...]:
    """The meshes of one side, each with its ranks, and how many tensors lie on it."""
    ends = [end.sharding for end in move.ends[side].values()]
    found = [*Counter((end.mesh.declaration, end.universe.ranks) for end in ends).items()]

    def row(at: int) -> tuple[str, ...]:
        (declared, ranks), count = found[at]
        return ("from", "to")[side], declared, short_ranks(ranks, NAMES), f"{count:,}"

    return few_rows(len(found), row, max(2, most // 2))


# --- bytes of all ranks -----------------------------------------------------------------------------


def _buckets_text(move: Transfer) -> str:
    """How many buckets there are, and how long they take the rank that receives or sends most."""
    received, sent = move.totals.received, move.totals.sent
    busiest = move.at(max(move.ranks, key=lambda rank: max(received[rank], sent[rank])))
    return (
        f"{len(move.buckets):,} bucket{'s' if len(move.buckets) != 1 else ''} of at most "
        f"{bytes_text(move.bucket_bytes)}, one exchange each; about {time_text(busiest.cost)} for rank {busiest.rank}"
    )


def _totals(move: Transfer) -> Listing:
    rows = []
    for name, counts in (("received", move.totals.received), ("sent", move.totals.sent)):
        some = [count for count in counts.values() if count]
        numbers = sum(some), sum(some) // max(1, len(some)), max(some, default=0)
        rows.append((name, *map(bytes_text, numbers), short_ranks(_who(counts), NAMES)))
    return Listing(("", "in all", "average", "most", "by rank"), tuple(rows), right=(1, 2, 3))


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
        return sum(step.receives.get(sender, 0) for step in view(receiver).steps)

    senders, receivers, partners = move.sources, move.targets, move.partners
    caption = "who sends how much to whom"
    return exchange_board(senders, receivers, move.rank, partners, count, senders.index, room, caption)


# --- one rank ---------------------------------------------------------------------------------------


def _buckets(move: Transfer, most: int, width: int) -> Listing:
    """What the rank does in each bucket."""
    steps = [step for step in move.steps if step.ranks]

    def row(at: int) -> tuple[str, ...]:
        step = steps[at]
        both = (bytes_text(count) if count else "-" for count in (step.bytes_out, step.bytes_in))
        return f"bucket {step.number}", *both, short_ranks(step.ranks, width), _names(move, step.pieces)

    head = f"rank {move.rank}", "out", "in", "with", "tensors"
    return Listing(head, few_rows(len(steps), row, most), right=(1, 2))


def _names(move: Transfer, pieces: Sequence[Any]) -> str:
    """The tensors of a bucket in which the rank has a part, as many as fit."""
    names = []
    for piece in pieces:
        one, found = move.tensors[piece.tensor], move.exchange(piece.tensor)
        if found is not None and (found.sends or found.receives):
            names.append(one.source_name if one.pieces == 1 else f"{one.source_name} {piece.piece + 1}/{one.pieces}")
    shown = [name for at, name in enumerate(names) if at == 0 or len(", ".join(names[: at + 1])) <= SHORT]
    return ", ".join(shown) + (f" and {len(names) - len(shown):,} more" if len(shown) < len(names) else "")


def _own_text(move: Transfer) -> str:
    """What the rank does in all."""
    peers, peak = move.partners, f"peak memory {bytes_text(move.peak_bytes)}"
    if not peers:
        return f"rank {move.rank} sends and receives nothing; {peak}"
    ways = [(sum(getattr(step, f"bytes_{way}") for step in move.steps), way) for way in ("out", "in")]
    moved = ", ".join(f"{bytes_text(count)} {way}" for count, way in ways if count)
    among = f"rank {peers[0]}" if len(peers) == 1 else f"{len(peers):,} ranks"
    return f"rank {move.rank} in all: {moved}, with {among}, in about {time_text(move.cost)}; {peak}"
