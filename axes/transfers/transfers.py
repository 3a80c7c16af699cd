"""Transfers: many tensors from one layout to another, between any ranks, as one plan.

    trainer  = axes.Mesh("fsdp=4", ranks=range(4))
    server   = axes.Mesh("dp=2 tp=2", ranks=range(4, 8))
    move = transfer({"w": "f@fsdp d"}, {"w": "f d@tp"}, source_mesh=trainer, target_mesh=server, shapes={"w": (8, 8)})

A rank that needs an element gets it once: its own copy where it has one, else from a rank that holds it. Ranks that
have the same share the sending, within a node first (see `axes.algebra.planning.exchange`).

Tensors go in buckets, one exchange each (see `axes.transfers.buckets`). What goes in which follows from bounds for
all ranks, so that each rank plans its own part by itself.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from axes.algebra import providers
from axes.algebra.chunks import Tile, volume
from axes.algebra.cost import CostModel
from axes.algebra.errors import ShardingError, SizeError, shortened, shown, suggestion
from axes.algebra.mesh import Mesh
from axes.algebra.plan import bytes_text, dtype_name, itemsize_of
from axes.algebra.planning.exchange import Exchange, GroupExchange, GroupSide, Message, group_between, ranks_of_both
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import checked_rank, checked_tensor_shape, whole_number, written_sizes
from axes.algebra.specs import check_same_dims
from axes.transfers.buckets import MovedTensor, TensorKind, TensorPiece, bucketed, firsts
from axes.transfers.layout_pieces import LayoutPiece, covering
from axes.transfers.layout_rules import LayoutChange, LayoutRules, Table
from axes.transfers.transfer_ends import End, EndsOfSpecs, Meshes, by_name, check_patterns, of_tensor

_NODE = 8


class Like(NamedTuple):
    """What says of a tensor its whole shape and, where it is known, its dtype."""

    shape: tuple[int, ...]
    dtype: str


class TransferEnd(NamedTuple):
    """A tensor on one side of a transfer: how it lies there, and its whole shape."""

    sharding: Sharding
    shape: tuple[int, ...]


class Totals(NamedTuple):
    """What all ranks send and receive, in bytes: exact, and slower to find than any one rank's part."""

    received: Mapping[int, int]
    sent: Mapping[int, int]


@dataclass(frozen=True)
class BucketTraffic:
    """What one rank does in one bucket. sends, receives: elements' bytes by peer, ascending."""

    number: int
    pieces: tuple[TensorPiece, ...]
    sends: Mapping[int, int]
    receives: Mapping[int, int]

    @property
    def bytes_in(self) -> int:
        """Bytes that the rank receives."""
        return sum(self.receives.values())

    @property
    def bytes_out(self) -> int:
        """Bytes that the rank sends."""
        return sum(self.sends.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks with which it exchanges."""
        return tuple(sorted({*self.sends, *self.receives}))


@lru_cache(maxsize=4096)
def _group_of(kind: TensorKind, ranks_per_node: int) -> GroupExchange:
    """Who sends what of tensors of a kind."""
    source, target, shape, part = kind
    if part is None:
        return group_between(source, target, shape, None, 0, ranks_per_node=ranks_per_node)
    before, after = (GroupSide(end.universe, part.pieces(at, end)) for at, end in enumerate((source, target)))
    return GroupExchange(before, after, ranks_of_both(source.universe, target.universe), ranks_per_node, part.boxes)


@lru_cache(maxsize=4096)
def _exchange_of(kind: TensorKind, ranks_per_node: int, rank: int) -> Exchange | None:
    """What a rank does with tensors of a kind; None where it has no part in them."""
    if all(end.universe.position(rank) is None for end in kind[:2]):
        return None
    group = _group_of(kind, ranks_per_node)
    return group.exchange(rank) if rank in group.before.held or rank in group.after.held else None


@dataclass(frozen=True, eq=False)
class Transfer(providers.Pictured):
    """A plan that takes tensors from one layout to another; made by `axes.transfer`.

    Called with this rank's tensors by name it carries the plan out, and returns the tensors that arrive here.

    tensors: what moves. bucket_bytes: how large the buffers of a bucket are.
    buckets: which pieces go together; of tensors that are tied and lie alike those of the first.
    rank: the rank that it is seen from; `at` gives another view. home: a mesh of the running job, if any is.
    equal: what has the same elements as a tensor that moves, so that it moves on the way back alone.
    idle: names of sources that nobody reads, and of targets that keep the values that they have.
    """

    tensors: tuple[MovedTensor, ...]
    buckets: tuple[tuple[TensorPiece, ...], ...]
    bucket_bytes: int
    rank: int
    ranks_per_node: int = _NODE
    home: Mesh | None = None
    equal: tuple[MovedTensor, ...] = ()
    idle: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())

    def __call__(self, tensors: Mapping[str, Any], into: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Carry the plan out: every rank of the sources and of the targets calls it.

        tensors: by name, what this rank has of the sources: DTensors or shards; None, or nothing, on ranks without.
        into: by name, tensors of this rank that are written in place: DTensors, shards, or views of any strides.

        Returns the tensors that this rank has of the targets. Without `into` these are DTensors, on a mesh made with
        `axes.init_mesh` whose DTensors can say the sharding, else shards. With it, they are the tensors of `into`, and
        shards for names that it lacks. All ranks that receive pass it, or none.

        Raises `ShardingError` for a tensor that isn't the shard that the plan says, on every rank, before anything is
        sent; `DesyncError` where ranks have other plans, or where a rank fails: it says which tensors are whole.
        """
        return providers.module("transfers", "a transfer").carry_out(self, tensors, into)

    def at(self, rank: int) -> Transfer:
        """The same plan seen from another rank."""
        found = replace(self, rank=checked_rank("a rank", rank))
        found.__dict__.update({name: self.__dict__[name] for name in _OF_ALL_RANKS if name in self.__dict__})
        return found

    @cached_property
    def inverse(self) -> Transfer:
        """The plan of the way back."""
        moved, equal = _told_apart(one.inverse for one in (*self.tensors, *self.equal))
        tied = frozenset([one.source_name for one in equal]) - {one.source_name for one in moved}
        idle = self.idle[1] | tied, self.idle[0] - {one.target_name for one in moved}
        return replace(self, **_in_buckets(moved, self.bucket_bytes), equal=equal, idle=idle)

    @cached_property
    def ends(self) -> tuple[dict[str, TransferEnd], dict[str, TransferEnd]]:
        """The tensors of both sides by name."""
        source, target = dict[str, TransferEnd](), dict[str, TransferEnd]()
        for one in self.tensors:
            source.setdefault(one.source_name, TransferEnd(one.source, one.shapes[0]))
            target.setdefault(one.target_name, TransferEnd(one.target, one.shapes[1]))
        return source, target

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The ranks that have any of the tensors, ascending."""
        return _ranks_of(one.source for one in self.tensors)

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """The ranks that get any of them, ascending."""
        return _ranks_of(one.target for one in self.tensors)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        return tuple(sorted({*self.sources, *self.targets}))

    @cached_property
    def tied(self) -> Mapping[int, tuple[int, ...]]:
        """Of tensors that are the same elements on the same ranks the first, with the others: they arrive as one."""
        found: dict[int, tuple[int, ...]] = {}
        for number, first in enumerate(firsts(self.tensors)):
            if number != first:
                found[first] = (*found.get(first, ()), number)
        return found

    # this rank's part

    def exchange(self, tensor: int) -> Exchange | None:
        """What this rank sends, receives and keeps of a tensor; None where it has no part in it."""
        return _exchange_of(self.tensors[tensor].kind, self.ranks_per_node, self.rank)

    def messages(self, pieces: Iterable[TensorPiece]) -> Iterator[tuple[int, int, int, Message, int, int]]:
        """What this rank sends (0) and receives (1) of these pieces: `(side, peer, tensor, message, start, stop)`.

        The elements `start..stop` of the message of the whole tensor go in the piece.
        """
        for number, piece in pieces:
            exchange, count = self.exchange(number), self.tensors[number].pieces
            for side, messages in enumerate(() if exchange is None else (exchange.sends, exchange.receives)):
                for message in messages:
                    start, stop = (message.elements * at // count for at in (piece, piece + 1))
                    if start < stop and exchange is not None:
                        yield side, exchange.ranks[message.peer], number, message, start, stop

    @cached_property
    def tiles(self) -> tuple[dict[str, Tile | None], dict[str, Tile | None]]:
        """What this rank has of each tensor, before and after; None where it isn't one of its ranks."""
        before, after = (
            {name: end.sharding.tile(end.shape, self.rank) for name, end in side.items()} for side in self.ends
        )
        return before, after

    @cached_property
    def steps(self) -> tuple[BucketTraffic, ...]:
        """What this rank does in each bucket."""
        found = []
        for number, pieces in enumerate(self.buckets):
            sides: tuple[dict[int, int], dict[int, int]] = {}, {}
            for side, peer, tensor, _, start, stop in self.messages(pieces):
                sides[side][peer] = sides[side].get(peer, 0) + (stop - start) * self.tensors[tensor].itemsize
            found.append(BucketTraffic(number, pieces, *[dict(sorted(side.items())) for side in sides]))
        return tuple(found)

    @property
    def partners(self) -> tuple[int, ...]:
        """The ranks with which this rank exchanges anything."""
        return tuple(sorted({rank for step in self.steps for rank in step.ranks}))

    @property
    def peak_bytes(self) -> int:
        """The most that this rank holds: its tensors of both sides, and the buffers of two buckets.

        Each piece begins at a multiple of 16 bytes there, which isn't counted.
        """
        before = {one.source_name: one.dtypes[0] or one.dtypes[1] for one in self.tensors}
        after = {one.target_name: one.dtypes[1] for one in self.tensors}
        tensors = sum(
            volume(tile) * itemsize_of(dtypes[name] or "float32")
            for tiles, dtypes in zip(self.tiles, (before, after), strict=True)
            for name, tile in tiles.items()
            if tile is not None
        )
        most = [max((getattr(step, side) for step in self.steps), default=0) for side in ("bytes_in", "bytes_out")]
        return tensors + min(2, len(self.steps)) * sum(most)

    @cached_property
    def cost(self) -> float:
        """Microseconds of this rank's part, bucket after bucket, as the default cost model reckons."""
        model, node, found = CostModel(ranks_per_node=self.ranks_per_node), self.rank // self.ranks_per_node, 0.0
        for step in self.steps:
            near = sum(peer // self.ranks_per_node == node for peer in step.ranks)
            busiest, copied = max(step.bytes_in, step.bytes_out), step.bytes_in + step.bytes_out
            if copied:
                found += model.time_us("exchange", 1 + len(step.ranks), 1 + near, busiest, copied)
        return found

    # all ranks

    @cached_property
    def totals(self) -> Totals:
        """What every rank sends and receives."""
        received, sent = dict.fromkeys(self.ranks, 0), dict.fromkeys(self.ranks, 0)
        sizes: dict[TensorKind, int] = {}
        for one in [self.tensors[number] for number in {*firsts(self.tensors)}]:
            sizes[one.kind] = sizes.get(one.kind, 0) + one.itemsize
        for kind, size in sizes.items():
            group = _group_of(kind, self.ranks_per_node)
            for side, found in ((received, group.received), (sent, group.sent)):
                for rank, count in found.items():
                    side[rank] += count * size
        return Totals(received, sent)

    @property
    def bytes_in(self) -> int:
        """Bytes received by the rank that receives most."""
        return max(self.totals.received.values(), default=0)

    @property
    def bytes_out(self) -> int:
        """Bytes sent by the rank that sends most."""
        return max(self.totals.sent.values(), default=0)

    @property
    def lower_bound(self) -> int:
        """Bytes that have to be sent, whatever the plan: what ranks need and don't have. No more are.

        Targets that are tied, made of the same elements, arrive as one where they lie alike, else each by itself.
        """
        return sum(self.totals.received.values())

    # text

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that ranks can compare: what is moved, from where to where, and in what buckets."""
        return hashlib.sha256(self.described.encode()).hexdigest()[:16]

    @cached_property
    def described(self) -> str:
        """All that ranks have to agree on, a line for each tensor."""
        rows = [f"buckets of {self.bucket_bytes}, nodes of {self.ranks_per_node}"]
        for one in self.tensors:
            ends = [f"{end} on {end.mesh.declaration} {end.universe.ranks}" for end in (one.source, one.target)]
            dtype = " to ".join(map(str, one.dtypes))
            rows.append(f"{one.source_name} {one.target_name} {one.shape} {dtype} {one.pieces}: {' -> '.join(ends)}")
            rows += [f"  {one.part}"] if one.part is not None else []
        pairs = zip(("unread", "kept"), self.idle, strict=True)
        return "\n".join([*rows, *[f"{what}: {', '.join(sorted(names))}" for what, names in pairs]])

    @property
    def heading(self) -> str:
        """How many tensors of how many bytes, from which ranks to which."""
        whole = sum(math.prod(one.shape) * one.itemsize for one in self.tensors)
        before, after = map(len, self.ends)
        return (
            f"{before} tensor{'s' if before != 1 else ''}{f' as {after}' if after != before else ''}, "
            f"{bytes_text(whole)}: "
            f"{_ranks_text(self.sources)} -> {_ranks_text(self.targets)}"
        )

    def __str__(self) -> str:
        received, sent = self.totals.received, self.totals.sent
        read = {(one.source_name, one.part and one.part.offsets[0]) for one in self.tensors}
        apart = len(read) < len({*firsts(self.tensors)}) or self.equal
        least, senders = (
            "tied tensors that lie otherwise each by itself" if apart else "which is the least",
            sum(map(bool, sent.values())),
        )
        lines = [
            self.heading,
            f"  buckets   {len(self.buckets)} of at most {bytes_text(self.bucket_bytes)}, one exchange each",
            f"  received  {bytes_text(self.lower_bound)} in all, {least}; at most "
            f"{bytes_text(self.bytes_in)} by a rank",
            f"  sent      at most {bytes_text(self.bytes_out)} by a rank, "
            f"{bytes_text(sum(sent.values()) // max(1, senders))} on average of {senders} that send",
        ]
        if self.rank in received:
            partners = self.partners
            lines.append(
                f"  rank {self.rank:<5}{bytes_text(received[self.rank])} in, {bytes_text(sent[self.rank])} out, with "
                f"{len(partners)} rank{'s' if len(partners) != 1 else ''}; peak {bytes_text(self.peak_bytes)}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


_OF_ALL_RANKS = ("described", "ends", "fingerprint", "ranks", "sources", "targets", "totals")
"""What is found once for the views from all ranks."""


def _ranks_of(ends: Iterable[Sharding]) -> tuple[int, ...]:
    return tuple(sorted({rank for universe in {end.universe for end in ends} for rank in universe.ranks}))


def _ranks_text(ranks: Sequence[int]) -> str:
    row = f" ({ranks[0]}..{ranks[-1]})" if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1 else ""
    return f"{len(ranks)} rank{'s' if len(ranks) != 1 else ''}{row}"


def _in_buckets(tensors: Iterable[MovedTensor], bucket_bytes: int) -> dict[str, Any]:
    """The tensors of a transfer, and the buckets in which they go."""
    return dict(zip(("tensors", "buckets"), bucketed(tensors, bucket_bytes), strict=True))


# --- from what users write ------------------------------------------------------------------------


def transfer(
    sources: Mapping[str, End],
    targets: Mapping[str, End],
    source_mesh: Meshes | None = None,
    target_mesh: Meshes | None = None,
    shapes: Mapping[str, Any] | None = None,
    *,
    dtype: Any = None,
    rules: LayoutRules | Table | None = None,
    bucket_mb: float = 64,
    sizes: Mapping[str, int] | None = None,
    **keywords: int,
) -> Transfer:
    """A plan that takes tensors from one layout to another: a state dict, a batch, a cache, on any ranks.

    `sources` and `targets` map the same names to specs, whole ones (a bare dim is unsplit), or to `Sharding`s.
    `source_mesh` and `target_mesh` say where: a mesh, or meshes by patterns of names as `fnmatch` reads them, the first
    that matches applies (`{"layers.0.*": stage0, "*": stage1}`); the ambient mesh by default. The ranks of the two
    sides may be the same, others, or some of both, in any order. `shapes` maps names to whole shapes, or to anything
    that has a `shape` (and a `dtype`), such as a module's tensors on the device `meta`.

    `dtype` is what tensors become before they are sent, one for all or by patterns of the targets' names; without it
    they keep their own. `rules`, a table or `axes.LayoutRules`, says how names and layouts of the two sides relate
    where they differ; `shapes` are then those of the sources. `bucket_mb` bounds the buffers: tensors go together in
    buckets of as many MiB. Keywords are sizes of names in groups, and in the expressions of the rules.

    It needs no process: `str(plan)` shows what moves, and `plan.at(rank)` the part of any rank. In a running job every
    rank of either side calls the plan with its tensors, `plan(tensors)`.

    Raises `ShardingError` for names that are on one side alone, for what is pending and for specs that don't fit,
    `MeshError` for a name without a mesh.

    >>> from axes.algebra.mesh import Mesh
    >>> trainer, server = Mesh("fsdp=4"), Mesh("dp=2 tp=2", ranks=range(4, 8))
    >>> shapes = {"w": (1024, 1024), "b": (1024,)}
    >>> print(transfer({"w": "f@fsdp d", "b": "d@fsdp"}, {"w": "f d@tp", "b": "d"}, trainer, server, shapes))
    2 tensors, 4.0 MiB: 4 ranks (0..3) -> 4 ranks (4..7)
      buckets   1 of at most 64.0 MiB, one exchange each
      received  8.0 MiB in all, which is the least; at most 2.0 MiB by a rank
      sent      at most 2.0 MiB by a rank, 2.0 MiB on average of 4 that send
      rank 0    0 B in, 2.0 MiB out, with 4 ranks; peak 3.0 MiB
    """
    for what, given in (("sources", sources), ("targets", targets)):
        _check_mapping(what, given, "a name to a spec")
    shapes = _check_mapping("shapes", shapes, "a name to a whole shape")
    for what, maybe in (("source_mesh", source_mesh), ("target_mesh", target_mesh), ("dtype", dtype)):
        if isinstance(maybe, Mapping):
            _check_mapping(what, maybe, "patterns of names")
    for name in keywords.keys() & _GONE.keys():
        if whole_number(keywords[name]) is None:
            raise ShardingError(f"axes.transfer has no {name}= any more: {_GONE[name]}")
    bucket_bytes, given_sizes = _checked_bucket(bucket_mb), dict(written_sizes(keywords, sizes))
    table = _table(rules, given_sizes)
    if table is None:
        _check_names(sources, targets)
    for name in sorted(sources) if table is None else ():
        with of_tensor(name):
            check_same_dims(sources[name], targets[name])
    wholes = dict[str, tuple[int, ...]]()
    for name in sorted(sources):
        if name not in shapes:
            raise ShardingError(f"shapes lacks {shortened(name)}{suggestion(name, shapes)}")
        wholes[name] = checked_tensor_shape(_shape_of(shapes[name]))
    ends = EndsOfSpecs(given_sizes, table)
    change = None if table is None else table.applied(wholes)
    if table is not None and change is not None:
        _check_targets(change, targets, table)
    made = wholes if change is None else change.targets
    before, after = (
        ends.shardings(*side)
        for side in (("source", sources, source_mesh, wholes), ("target", targets, target_mesh, made))
    )
    dtype_of = by_name(dtype)

    def moved(source: str, target: str, part: LayoutPiece | None) -> MovedTensor:
        own, wanted = getattr(shapes[source], "dtype", None), dtype_of(target)
        known = None if own is None else dtype_name(own)
        dtypes = known, known if wanted is None else dtype_name(wanted)
        shape = wholes[source] if part is None else part.extents
        return MovedTensor(source, target, shape, before[source], after[target], dtypes, part)

    def of_pieces(pieces: Iterable[LayoutPiece]) -> list[MovedTensor]:
        return [moved(each.source, each.target, None if each.is_whole else each) for each in pieces]

    equal = () if change is None else tuple(of_pieces(change.equal))
    found = (
        [moved(name, name, None) for name in wholes]
        if change is None
        else of_pieces(itertools.chain(*change.pieces.values()))
    )
    read = {one.source_name for one in found}
    _check_dtypes(found)
    if isinstance(dtype, Mapping):
        check_patterns("dtype", dtype, after)
    ends.check_used()
    nodes = [end.mesh.ranks_per_node for one in found for end in (one.source, one.target)]
    return Transfer(
        **_in_buckets(found, bucket_bytes),
        bucket_bytes=bucket_bytes,
        rank=found[0].source.universe.ranks[0] if found else 0,
        ranks_per_node=next(filter(None, nodes), _NODE),
        home=ends.home,
        equal=equal,
        idle=(frozenset(sources.keys() - read), frozenset(targets.keys() - made.keys())),
    )


_GONE = {
    "codec": "values in fewer bits and their scales are two tensors; encode before, and move both",
    "pages": "take the pages by index_select, move what that gives, and write it by index_copy_",
}
"""Keywords that there were, and what to write instead. Their names may be those of dims, whose sizes are numbers."""


def _table(rules: LayoutRules | Table | None, sizes: Mapping[str, int]) -> LayoutRules | None:
    """The layout rules, with the sizes that their expressions have names for."""
    if rules is None:
        return None
    found = rules if isinstance(rules, LayoutRules) else LayoutRules(rules)
    return found._sized({name: size for name, size in sizes.items() if name in found._names})


def _shape_of(value: Any) -> Any:
    """The shape of a tensor, or a shape that is given itself; the tensor where it has none, as a lazy one."""
    try:
        return getattr(value, "shape", value)
    except Exception:  # of the tensor's class
        return value


def _check_targets(change: LayoutChange, targets: Mapping[str, End], rules: LayoutRules) -> None:
    for name in change.targets:
        if name not in targets:
            raise ShardingError(
                f"{shortened(name)}, which the layout rules make, isn't in targets{suggestion(name, targets)}; "
                "say how it lies, or {names: None} of sources that nobody needs"
            )
    for name in targets:
        if name not in change.targets and not rules.keeps(name):
            raise ShardingError(
                f"the layout rules make no {shortened(name)} of these sources{suggestion(name, change.targets)}; "
                "say {None: name} of a target that keeps its values"
            )


def _check_dtypes(found: Iterable[MovedTensor]) -> None:
    """`ShardingError` where parts of one target arrive in unlike dtypes."""
    first: dict[str, MovedTensor] = {}
    for one in found:
        other = first.setdefault(one.target_name, one)
        if other.dtypes[1] != one.dtypes[1]:
            each = " and ".join(f"{shortened(c.source_name)}, {c.dtypes[1] or 'unknown'}" for c in (other, one))
            raise ShardingError(f"{shortened(one.target_name)} is made of {each}; say which it becomes, with dtype=")


def _told_apart(tensors: Iterable[MovedTensor]) -> tuple[tuple[MovedTensor, ...], tuple[MovedTensor, ...]]:
    """Of what would be written to the same elements the first; and the others."""
    by_target: dict[str, list[MovedTensor]] = {}
    for one in tensors:
        by_target.setdefault(one.target_name, []).append(one)
    sides: tuple[list[MovedTensor], list[MovedTensor]] = [], []
    for parts in by_target.values():
        taken = covering([math.prod(one.shape) for one in parts], math.prod(parts[0].shapes[1]))
        sides[0].extend(parts[:taken])
        sides[1].extend(parts[taken:])
    return tuple(sides[0]), tuple(sides[1])


def _check_mapping(what: str, given: object, hint: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ShardingError(f"{what} of axes.transfer map {hint}; found {shown(given)}")
    return given


def _check_names(sources: Mapping[str, End], targets: Mapping[str, End]) -> None:
    for here, there, sides in ((sources, targets, ("sources", "targets")), (targets, sources, ("targets", "sources"))):
        missing = [name for name in here if name not in there]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ShardingError(
                f"{shortened(missing[0])}{more} in {sides[0]} isn't in {sides[1]}{suggestion(missing[0], there)}; both "
                "have the same names, or rules= says how they relate"
            )


def _checked_bucket(bucket_mb: object) -> int:
    number = bucket_mb if isinstance(bucket_mb, float) else whole_number(bucket_mb)
    if number is None or not 0 < number <= 2**20:
        raise SizeError(f"bucket_mb is a number of MiB above 0; found {shown(bucket_mb)}")
    return max(1, int(number * 2**20))
