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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from axes.algebra.errors import MeshError
from axes.algebra.explanation import Explanation, Section
from axes.algebra.plan import bytes_text, time_text
from axes.show.panels import Board, Cell, Head, Listing, Remark, Room, Sheet
from axes.show.rank_text import LEFT_OUT, folded, short_ranks
from axes.transfers.buckets import MovedTensor, TensorPiece
from axes.transfers.transfers import BucketTraffic, Transfer

MOST_ROWS = 6
"""Rows of a table of tensors, meshes or buckets in a picture; an explanation has all buckets of a rank."""

SHORT, NAMES = 16, 34
"""Letters of a cell that names a tensor, and of one that lists several, or ranks."""


def sheet_of_transfer(move: Transfer, room: Room) -> Sheet:
    """The picture of a transfer, seen from its rank."""
    if not move.tensors:
        return Sheet(move.heading, f"A transfer of {move.heading}.", ())
    buckets = _buckets_text(move)
    moved = (_between(move, room), *((_buckets(move, room),) if move.partners else ())) if move.bytes_in else ()
    panels = (
        Remark((buckets,), close=True),
        _totals(move),
        Remark((_least(move),), close=True),
        _meshes(move),
        _tensors(move),
        *moved,
        Remark((_own_text(move),), close=bool(moved)),
    )
    summary = f"Who sends how much to whom in a transfer of {move.heading}. {buckets}. {_in_words(move)}"
    return Sheet(move.heading, summary, panels)


def explained_transfer(move: Transfer) -> Explanation:
    """A transfer as `axes.explain` says it."""
    if not move.tensors:
        return Explanation(move.heading, (), facts_of_transfer(move))
    sections = [
        Section("meshes", tuple(_mesh_rows(move))),
        Section("tensors", tuple(_tensor_lines(move))),
        Section("sent", tuple(_sent_rows(move))),
        Section(f"rank {move.rank}", tuple(_bucket_lines(move))),
    ]
    return Explanation(move.heading, tuple(each for each in sections if each.rows), facts_of_transfer(move))


def facts_of_transfer(move: Transfer) -> dict[str, Any]:
    """A transfer as data: what `--json` prints, and `Explanation.json` returns."""
    totals = move.totals
    return {
        "kind": "transfer",
        "sources": [*move.sources],
        "targets": [*move.targets],
        "bytes": sum(kind.bytes for kind in kinds_of(move)),
        "received_in_all": move.lower_bound,
        "most": {"bytes_in": move.bytes_in, "bytes_out": move.bytes_out},
        "most_by": {"bytes_in": _who(totals.received), "bytes_out": _who(totals.sent)},
        "buckets": len(move.buckets),
        "bucket_bytes": move.bucket_bytes,
        "fingerprint": move.fingerprint,
        "tensors": [kind.facts for kind in kinds_of(move)],
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


# --- tensors that lie alike -------------------------------------------------------------------------


@dataclass(frozen=True)
class KindOfTensors:
    """Tensors, or parts of them, that have shape, dtype and specs in common. bytes: of all, on their way."""

    first: MovedTensor
    names: tuple[tuple[str, str], ...]
    bytes: int

    @property
    def said(self) -> tuple[str, str]:
        """The first source with how many there are, and what they become where that has another name."""
        sources, targets = (list(dict.fromkeys(side)) for side in zip(*self.names, strict=True))
        count = f"{len(sources):,} like " if len(sources) > 1 else ""
        more = f" and {len(targets) - 1:,} more" if len(targets) > 1 else ""
        return f"{count}{sources[0]}", "" if sources == targets else f"{targets[0]}{more}"

    @property
    def specs(self) -> tuple[str, str]:
        """How they lie before and after; a tensor of one number has no dims to speak of."""
        return str(self.first.source) or "whole", str(self.first.target) or "whole"

    @property
    def dtype(self) -> str:
        """What it travels in, and what it was before where that is another. What isn't known counts as float32."""
        before, after = self.first.dtypes
        if after is None:
            return "taken as float32"
        return after if before in (None, after) else f"{before} as {after}"

    @property
    def facts(self) -> dict[str, Any]:
        """As data."""
        before, after = self.first.dtypes
        shapes = self.first.shapes
        return {
            "sources": [source for source, _ in self.names],
            "targets": [target for _, target in self.names],
            "source": str(self.first.source),
            "target": str(self.first.target),
            "source_shape": [*shapes[0]],
            "target_shape": [*shapes[1]],
            "source_dtype": before,
            "dtype": after,
            "bytes": self.bytes,
        }


def kinds_of(move: Transfer) -> list[KindOfTensors]:
    """The tensors by kind, those of most bytes first."""
    found: dict[Any, list[MovedTensor]] = {}
    for one in move.tensors:
        key = (str(one.source), str(one.target), one.shape, one.shapes, one.dtypes)
        found.setdefault(key, []).append(one)
    kinds = [
        KindOfTensors(
            each[0],
            tuple((one.source_name, one.target_name) for one in each),
            sum(math.prod(one.shape) * one.itemsize for one in each),
        )
        for each in found.values()
    ]
    return sorted(kinds, key=lambda kind: -kind.bytes)


def _tensors(move: Transfer) -> Listing:
    """What goes where, two rows each: before, and after."""
    kinds, rows = kinds_of(move), []
    for kind in kinds[:MOST_ROWS]:
        source, target = kind.said
        before, after = ([*map(str, shape)] for shape in kind.first.shapes)
        other = "" if after == before else " x ".join(after)
        lies, will_lie = kind.specs
        rows.append((source, bytes_text(kind.bytes), " x ".join(before) or "one number", lies))
        rows.append((f"  -> {target}".rstrip(), "", other or kind.dtype, will_lie))
    if len(kinds) > MOST_ROWS:
        rest = kinds[MOST_ROWS:]
        count = len({source for kind in rest for source, _ in kind.names})
        rows.append((f"{LEFT_OUT} {count:,} more", bytes_text(sum(kind.bytes for kind in rest)), "", ""))
    return Listing(("tensors", "bytes", "shape, dtype", "lies as"), tuple(rows), right=(1,))


def _tensor_lines(move: Transfer) -> Iterator[tuple[str, ...]]:
    for kind in kinds_of(move):
        source, target = kind.said
        shapes = [str([*shape]) for shape in kind.first.shapes]
        lies, will_lie = kind.specs
        there = f"of {target} {shapes[1]}" if target else ""
        yield source, bytes_text(kind.bytes), f"{shapes[0]} {kind.dtype}, {lies} -> {will_lie} {there}".rstrip()


# --- meshes -----------------------------------------------------------------------------------------


def _meshes(move: Transfer) -> Listing:
    rows = []
    for side, ends in (("from", 0), ("to", 1)):
        found = _meshes_of(move, ends)
        for at in folded(len(found), [0, len(found) - 1], MOST_ROWS // 2):
            if isinstance(at, range):
                rows.append(("", f"{LEFT_OUT} {len(at):,} more", "", ""))
                continue
            rows.append((side, *found[at]))
    return Listing(("", "mesh", "ranks", "tensors"), tuple(rows), right=(3,))


def _mesh_rows(move: Transfer) -> Iterator[tuple[str, ...]]:
    for side, ends in (("from", 0), ("to", 1)):
        for mesh, ranks, count in _meshes_of(move, ends):
            yield side, mesh, f"ranks {ranks}, {count} tensor{'s' if count != '1' else ''}"


def _meshes_of(move: Transfer, side: int) -> list[tuple[str, str, str]]:
    """The meshes of one side, each with its ranks, and how many tensors lie on it."""
    found: dict[tuple[str, Sequence[int]], int] = {}
    for end in move.ends[side].values():
        key = end.sharding.mesh.declaration, end.sharding.universe.ranks
        found[key] = found.get(key, 0) + 1
    return [(declared, short_ranks(ranks, NAMES), f"{count:,}") for (declared, ranks), count in found.items()]


# --- bytes of all ranks -----------------------------------------------------------------------------


def _buckets_text(move: Transfer) -> str:
    """How many buckets there are, and how long they take the busiest rank."""
    count = f"{len(move.buckets):,} bucket{'s' if len(move.buckets) != 1 else ''}"
    busiest = _busiest(move)
    return (
        f"{count} of at most {bytes_text(move.bucket_bytes)}, one exchange each; about {time_text(busiest.cost)} for "
        f"rank {busiest.rank}"
    )


def _busiest(move: Transfer) -> Transfer:
    """The view from the rank that receives or sends most."""
    received, sent = move.totals.received, move.totals.sent
    return move.at(max(move.ranks, key=lambda rank: max(received[rank], sent[rank])))


def _totals(move: Transfer) -> Listing:
    rows = []
    for what, counts in (("received", move.totals.received), ("sent", move.totals.sent)):
        some = [count for count in counts.values() if count]
        average = sum(some) // max(1, len(some))
        row = (sum(some), average, max(some, default=0))
        rows.append((what, *map(bytes_text, row), short_ranks(_who(counts), NAMES)))
    return Listing(("", "in all", "average", "most", "by rank"), tuple(rows), right=(1, 2, 3))


def _sent_rows(move: Transfer) -> Iterator[tuple[str, ...]]:
    for row in _totals(move).rows:
        what, whole, average, most, who = row
        text = f"{whole} in all, {average} on average, at most {most}, by {_ranks_said(who)}"
        yield what, text if who else "nothing"
    yield "least", _least(move)
    yield "in", _buckets_text(move)


def _ranks_said(who: str) -> str:
    return f"rank {who}" if who.isdigit() else f"ranks {who}"


def _least(move: Transfer) -> str:
    """Of what the bytes that are received are the least."""
    read = {(one.source_name, one.part and one.part.offsets) for one in move.tensors}
    tied = len(read) < len(move.tensors) or move.equal
    more = "; tied targets may each count" if tied else ": no plan sends less"
    return f"received is what ranks need and don't have{more}"


def _who(counts: Mapping[int, int]) -> list[int]:
    """The ranks that have most; nobody where nothing is sent."""
    most = max(counts.values(), default=0)
    return [rank for rank in sorted(counts) if counts[rank] == most] if most else []


# --- between whom -----------------------------------------------------------------------------------


def _between(move: Transfer, room: Room) -> Board:
    """How much each rank that has tensors sends to each that gets some."""

    @lru_cache(maxsize=64)
    def view(rank: int) -> Transfer:
        return move if rank == move.rank else move.at(rank)

    @lru_cache(maxsize=64)
    def came(rank: int) -> dict[int, int]:
        """Bytes by the rank that they come from."""
        return _by_peer(step.receives for step in view(rank).steps)

    senders, receivers = move.sources, move.targets
    gives, gets = (_by_peer(getattr(step, side) for step in move.steps) for side in ("sends", "receives"))
    shown = _wanted(receivers, move.rank, gives)
    widest = max([7, *(len(bytes_text(count)) for at in shown[:4] for count in came(receivers[at]).values())]) + 2
    across = folded(len(receivers), shown, max(3, (room.width - 14) // widest))
    down = folded(len(senders), _wanted(senders, move.rank, gets), max(3, min(10, room.height - 14)))

    def cell(row: int, column: int | range) -> Cell:
        if isinstance(column, range):
            return Cell(LEFT_OUT)
        sender, receiver = senders[row], receivers[column]
        if sender == receiver:
            return Cell("stays" if _keeps(view(sender)) else "-", here=sender == move.rank)
        count = came(receiver).get(sender, 0)
        return Cell(bytes_text(count), row) if count else Cell("-")

    rows = [tuple(Cell("") if isinstance(row, range) else cell(row, column) for column in across) for row in down]
    heads = tuple(_head(senders, row, "{:,} more ranks", move.rank) for row in down)
    columns = tuple(_head(receivers, column, LEFT_OUT, move.rank) for column in across)
    return Board(("from",), "to", columns, heads, tuple(rows), caption="   who sends how much to whom:")


def _wanted(ranks: Sequence[int], own: int, partners: Mapping[int, int]) -> list[int]:
    """Which ranks matter most, by their place: this one, its partners, the first and the last."""
    at = {rank: place for place, rank in enumerate(ranks)}
    first = [rank for rank in (own, *partners) if rank in at] or [ranks[0]]
    return [at[rank] for rank in (*first[:4], ranks[0], ranks[-1], *first[4:16])]


def _head(ranks: Sequence[int], at: int | range, left_out: str, own: int) -> Head:
    if isinstance(at, range):
        return Head((left_out.format(len(at)),), gap=True)
    return Head((f"[{ranks[at]}]" if ranks[at] == own else f"{ranks[at]}",))


def _by_peer(sides: Iterable[Mapping[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for side in sides:
        for peer, count in side.items():
            found[peer] = found.get(peer, 0) + count
    return found


def _keeps(view: Transfer) -> bool:
    """Whether a rank has any of what it gets."""
    return any(found is not None and found.copies for found in map(view.exchange, range(len(view.tensors))))


# --- one rank ---------------------------------------------------------------------------------------


def _taken_part(move: Transfer) -> list[BucketTraffic]:
    return [step for step in move.steps if step.ranks]


def _buckets(move: Transfer, room: Room) -> Listing:
    """What the rank does in each bucket."""
    rows: list[tuple[str, ...]] = []
    steps = _taken_part(move)
    for at in folded(len(steps), [0, len(steps) - 1], MOST_ROWS):
        if isinstance(at, range):
            rows.append((f"{LEFT_OUT} {len(at):,} more", "", "", "", ""))
            continue
        step = steps[at]
        peers = short_ranks(step.ranks, max(16, room.width - 64))
        rows.append((f"bucket {step.number}", *_both(step.bytes_out, step.bytes_in), peers, _pieces(move, step)))
    return Listing((f"rank {move.rank}", "out", "in", "with", "tensors"), tuple(rows), right=(1, 2))


def _bucket_lines(move: Transfer) -> Iterator[tuple[str, ...]]:
    for step in _taken_part(move):
        with_whom = f"with {short_ranks(step.ranks, NAMES)}: {_pieces(move, step)}"
        yield f"bucket {step.number}", _moved(step.bytes_out, step.bytes_in), with_whom
    yield (_own_text(move),)


def _both(*counts: int) -> tuple[str, ...]:
    return tuple(bytes_text(count) if count else "-" for count in counts)


def _pieces(move: Transfer, step: BucketTraffic) -> str:
    """The tensors of a bucket in which the rank has a part, as many as fit."""
    names = [_piece_said(move, piece) for piece in step.pieces if _has_part(move, piece)]
    text, at = names[0], 1
    while at < len(names) and len(text) + len(names[at]) + 2 <= SHORT:
        text, at = f"{text}, {names[at]}", at + 1
    return text if at == len(names) else f"{text} and {len(names) - at:,} more"


def _has_part(move: Transfer, piece: TensorPiece) -> bool:
    found = move.exchange(piece.tensor)
    return found is not None and bool(found.sends or found.receives)


def _piece_said(move: Transfer, piece: TensorPiece) -> str:
    one = move.tensors[piece.tensor]
    return one.source_name if one.pieces == 1 else f"{one.source_name} {piece.piece + 1}/{one.pieces}"


def _own_text(move: Transfer) -> str:
    """What the rank does in all."""
    peers = move.partners
    if not peers:
        return f"rank {move.rank} sends and receives nothing; peak memory {bytes_text(move.peak_bytes)}"
    said = _moved(*(sum(getattr(step, side) for step in move.steps) for side in ("bytes_out", "bytes_in")))
    among = f"rank {peers[0]}" if len(peers) == 1 else f"{len(peers):,} ranks"
    return (
        f"rank {move.rank} in all: {said}, with {among}, in about {time_text(move.cost)}; peak memory "
        f"{bytes_text(move.peak_bytes)}"
    )


def _moved(out: int, came: int) -> str:
    return ", ".join(f"{bytes_text(count)} {way}" for count, way in ((out, "out"), (came, "in")) if count)


def _in_words(move: Transfer) -> str:
    """The board for who doesn't see it, of the rank that it is seen from."""
    gives, gets = (_by_peer(getattr(step, side) for step in move.steps) for side in ("sends", "receives"))
    to, came = (short_ranks(sorted(each), 60) for each in (gives, gets))
    said = [f"sends to {to}" if gives else "", f"receives from {came}" if gets else ""]
    return f"Rank {move.rank} {' and '.join(filter(None, said)) or 'sends and receives nothing'}."
