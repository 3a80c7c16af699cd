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

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from axes.algebra import providers
from axes.algebra.chunks import Tile, volume
from axes.algebra.cost import CostModel
from axes.algebra.errors import AxesError, ShardingError, SizeError, shortened, shown, suggestion
from axes.algebra.mesh import Mesh
from axes.algebra.plan import bytes_text, dtype_name, itemsize_of
from axes.algebra.planning.exchange import Exchange, GroupExchange, GroupSide, group_between, ranks_of_both
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import checked_rank, checked_tensor_shape, whole_number, written_sizes
from axes.algebra.specs import check_same_dims
from axes.transfers.buckets import Carriage, Kind, TensorPiece, bucketed, firsts, part_of
from axes.transfers.layout_pieces import LayoutPiece, whole_piece, without_overlap
from axes.transfers.layout_rules import LayoutChange, LayoutRules, Table
from axes.transfers.piece_links import PieceLink
from axes.transfers.transfer_ends import End, EndsOfSpecs, Meshes, by_name, check_patterns, meshes_by_name

_NODE = 8


@dataclass(frozen=True)
class TransferEnd:
    """A tensor on one side of a transfer: how it lies there, and its whole shape."""

    sharding: Sharding
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Like:
    """What says of a tensor its whole shape and dtype."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class BucketTraffic:
    """What one rank does in one bucket. sends, receives: elements' bytes by peer."""

    number: int
    pieces: tuple[TensorPiece, ...]
    sends: Mapping[int, int]
    receives: Mapping[int, int]
    kind: str = "exchange"

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


@dataclass(frozen=True)
class Totals:
    """What all ranks send and receive, in bytes: exact, and slower to find than any one rank's part."""

    received: Mapping[int, int]
    sent: Mapping[int, int]


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

    tensors: tuple[Carriage, ...]
    buckets: tuple[tuple[TensorPiece, ...], ...]
    bucket_bytes: int
    rank: int
    ranks_per_node: int = _NODE
    home: Mesh | None = None
    equal: tuple[Carriage, ...] = ()
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

    def __getstate__(self) -> dict[str, Any]:
        """What it was made of; what follows from that is found again."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

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
        kept = self.idle[0] - {one.target_name for one in moved}
        idle = self.idle[1] | tied, kept
        return _bucketed(moved, self.bucket_bytes, self.rank, self.ranks_per_node, self.home, equal, idle)

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

    @cached_property
    def _group(self) -> Callable[[Kind], GroupExchange]:
        """Who sends what of tensors of a kind."""

        def found(kind: Kind) -> GroupExchange:
            source, target, shape, link = kind
            if link is None:
                return group_between(source, target, shape, None, 0, ranks_per_node=self.ranks_per_node)
            before, after = (GroupSide(end.universe, link.pieces(at, end)) for at, end in enumerate((source, target)))
            ranks = ranks_of_both(source.universe, target.universe)
            return GroupExchange(before, after, ranks, self.ranks_per_node, link.boxes)

        return functools.lru_cache(maxsize=4096)(found)

    @cached_property
    def _exchange(self) -> Callable[[Kind], Exchange | None]:
        """What this rank does with tensors of a kind."""

        def found(kind: Kind) -> Exchange | None:
            if kind[0].universe.position(self.rank) is None and kind[1].universe.position(self.rank) is None:
                return None
            group = self._group(kind)
            has_part = self.rank in group.before.held or self.rank in group.after.held
            return group.exchange(self.rank) if has_part else None

        return functools.lru_cache(maxsize=4096)(found)

    def exchange(self, tensor: int) -> Exchange | None:
        """What this rank sends, receives and keeps of a tensor; None where it has no part in it."""
        return self._exchange(self.tensors[tensor].kind)

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
            sends: dict[int, int] = {}
            receives: dict[int, int] = {}
            for piece in pieces:
                exchange = self.exchange(piece.tensor)
                if exchange is None:
                    continue
                one = self.tensors[piece.tensor]
                itemsize = one.itemsize
                for side, messages in ((sends, exchange.sends), (receives, exchange.receives)):
                    for message in messages:
                        start, stop = part_of(message.elements, piece.piece, one.pieces)
                        peer = exchange.ranks[message.peer]
                        side[peer] = side.get(peer, 0) + (stop - start) * itemsize
            found.append(BucketTraffic(number, pieces, _filled(sends), _filled(receives)))
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
                found += model.time_us(step.kind, 1 + len(step.ranks), 1 + near, busiest, copied)
        return found

    # all ranks

    @cached_property
    def totals(self) -> Totals:
        """What every rank sends and receives."""
        received: dict[int, int] = dict.fromkeys(self.ranks, 0)
        sent: dict[int, int] = dict.fromkeys(self.ranks, 0)
        sizes: dict[Kind, int] = {}
        for one in [self.tensors[number] for number in {*firsts(self.tensors)}]:
            sizes[one.kind] = sizes.get(one.kind, 0) + one.itemsize
        for kind, size in sizes.items():
            group = self._group(kind)
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
        rows = []
        for one in self.tensors:
            ends = " -> ".join(
                f"{end} on {end.mesh.declaration} {end.universe.ranks}" for end in (one.source, one.target)
            )
            dtype = " to ".join(str(each) for each in one.dtypes)
            rows.append(f"{one.source_name} {one.target_name} {one.shape} {dtype} {one.pieces}: {ends}")
            if one.link is not None:
                rows.append(f"  {one.link}")
        rows += [
            f"{what}: {', '.join(sorted(names))}" for what, names in zip(("unread", "kept"), self.idle, strict=True)
        ]
        return "\n".join([f"buckets of {self.bucket_bytes}, nodes of {self.ranks_per_node}", *rows])

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
        read = {(one.source_name, one.link and one.link.offsets[0]) for one in self.tensors}
        apart = len(read) < len({*firsts(self.tensors)}) or self.equal
        least = "tied tensors that lie otherwise each by itself" if apart else "which is the least"
        lines = [
            self.heading,
            f"  buckets   {len(self.buckets)} of at most {bytes_text(self.bucket_bytes)}, one exchange each",
            f"  received  {bytes_text(self.lower_bound)} in all, {least}; at most "
            f"{bytes_text(self.bytes_in)} by a rank",
            f"  sent      at most {bytes_text(self.bytes_out)} by a rank, "
            f"{bytes_text(sum(sent.values()) // max(1, sum(map(bool, sent.values()))))} on average of "
            f"{sum(map(bool, sent.values()))} that send",
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


_OF_ALL_RANKS = ("_group", "described", "ends", "fingerprint", "ranks", "sources", "targets", "totals")
"""What is found once for the views from all ranks."""


def _filled(sizes: dict[int, int]) -> dict[int, int]:
    return {rank: sizes[rank] for rank in sorted(sizes) if sizes[rank]}


def _ranks_of(ends: Iterable[Sharding]) -> tuple[int, ...]:
    universes = dict.fromkeys(end.universe for end in ends)
    return tuple(sorted({rank for universe in universes for rank in universe.ranks}))


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{len(ranks)} ranks ({ranks[0]}..{ranks[-1]})"
    return f"{len(ranks)} rank{'s' if len(ranks) != 1 else ''}"


def _bucketed(
    tensors: Iterable[Carriage],
    bucket_bytes: int,
    rank: int,
    ranks_per_node: int,
    home: Mesh | None,
    equal: tuple[Carriage, ...],
    idle: tuple[frozenset[str], frozenset[str]],
) -> Transfer:
    """The transfer of these tensors, in buckets of at most `bucket_bytes`."""
    found, buckets = bucketed(tensors, bucket_bytes)
    return Transfer(found, buckets, bucket_bytes, rank, ranks_per_node, home, equal, idle)


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
    bucket_bytes = _checked_bucket(bucket_mb)
    _check_mapping("shapes", shapes, "a name to a whole shape")
    assert shapes is not None, "an absent mapping is refused"
    for what, meshes in (
        ("source_mesh", source_mesh),
        ("target_mesh", target_mesh),
        ("dtype", dtype),
    ):
        if isinstance(meshes, Mapping):
            _check_mapping(what, meshes, "patterns of names")
    for name in keywords.keys() & _GONE.keys():
        if whole_number(keywords[name]) is None:
            raise ShardingError(f"axes.transfer has no {name}= any more: {_GONE[name]}")
    given_sizes = dict(written_sizes(keywords, sizes))
    table = _table(rules, given_sizes)
    if table is None:
        _check_names(sources, targets)
        for name, source in sources.items():
            try:
                check_same_dims(source, targets[name])
            except AxesError as error:
                raise type(error)(f"{error}\n  of the tensor {shortened(name)}") from None
    wholes = dict[str, tuple[int, ...]]()
    for name in sorted(sources):
        if name not in shapes:
            raise ShardingError(f"shapes lacks {shortened(name)}{suggestion(name, shapes)}")
        wholes[name] = checked_tensor_shape(_shape_of(shapes[name]))
    ends = EndsOfSpecs(given_sizes, table)
    change = None if table is None else table.applied(wholes)
    made = wholes if change is None else change.targets
    if table is not None and change is not None:
        _check_targets(change, targets, table)

    def shardings(side: str, specs: Mapping[str, End], meshes: Meshes | None, shapes: Any) -> dict[str, Sharding]:
        found, mesh_of = {}, meshes_by_name(meshes, side)
        for name, shape in sorted(shapes.items()):
            try:
                found[name] = ends.sharding(specs[name], mesh_of(name), shape, side)
            except AxesError as error:
                raise type(error)(f"{error}\n  of the tensor {shortened(name)}, {shown(list(shape))}") from None
        return found

    before = shardings("source", sources, source_mesh, wholes)
    after = shardings("target", targets, target_mesh, made)

    dtype_of = by_name(dtype)

    def carriage(source: str, target: str, link: PieceLink | None) -> Carriage:
        own = getattr(shapes[source], "dtype", None)
        known = None if own is None else dtype_name(own)
        wanted = dtype_of(target)
        dtypes = known, known if wanted is None else dtype_name(wanted)
        shape = wholes[source] if link is None else link.extents
        return Carriage(source, target, shape, before[source], after[target], dtypes, link)

    def linked(pieces: Iterable[LayoutPiece]) -> list[Carriage]:
        return [
            carriage(each.source, each.target, _link(each, wholes[each.source], made[each.target])) for each in pieces
        ]

    equal: tuple[Carriage, ...] = ()
    idle: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    if change is None:
        found = [carriage(name, name, None) for name in wholes]
    else:
        found = linked(itertools.chain(*change.pieces.values()))
        equal = tuple(linked(change.equal))
        read = {one.source_name for one in found}
        idle = frozenset(sources.keys() - read), frozenset(targets.keys() - change.targets.keys())
        _check_dtypes(found)
    if isinstance(dtype, Mapping):
        check_patterns("dtype", dtype, after)
    ends.check_used()
    rank = found[0].source.universe.ranks[0] if found else 0
    nodes = next(
        (e.mesh.ranks_per_node for one in found for e in (one.source, one.target) if e.mesh.ranks_per_node), _NODE
    )
    return _bucketed(found, bucket_bytes, rank, nodes, ends.home, equal, idle)


_GONE = {
    "codec": "values in fewer bits and their scales are two tensors; encode before, and move both",
    "pages": "take the pages by index_select, move what that gives, and write it by index_copy_",
}
"""Keywords that there were, and what to write instead. Their names may be those of dims, whose sizes are numbers."""


def _link(piece: LayoutPiece, source: tuple[int, ...], target: tuple[int, ...]) -> PieceLink | None:
    """Which parts of both tensors a piece is; None where it is all of both, element by element."""
    if source == target and piece == whole_piece(piece.source, source, piece.target):
        return None
    return PieceLink.of(piece, source, target)


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


def _check_dtypes(found: Iterable[Carriage]) -> None:
    """`ShardingError` where parts of one target arrive in unlike dtypes."""
    first: dict[str, Carriage] = {}
    for one in found:
        other = first.setdefault(one.target_name, one)
        if other.dtypes[1] != one.dtypes[1]:
            each = " and ".join(f"{shortened(c.source_name)}, {c.dtypes[1] or 'unknown'}" for c in (other, one))
            raise ShardingError(f"{shortened(one.target_name)} is made of {each}; say which it becomes, with dtype=")


def _told_apart(tensors: Iterable[Carriage]) -> tuple[tuple[Carriage, ...], tuple[Carriage, ...]]:
    """Of what would be written to the same elements the first; and the others."""
    every = tuple(tensors)
    by_target: dict[str, list[int]] = {}
    for number, one in enumerate(every):
        by_target.setdefault(one.target_name, []).append(number)
    taken = [True] * len(every)
    for numbers in by_target.values():
        parts = [every[number] for number in numbers]
        if sum([math.prod(one.shape) for one in parts]) > math.prod(parts[0].shapes[1]):
            for number, is_first in zip(numbers, without_overlap(one.tile for one in parts), strict=True):
                taken[number] = is_first
    sides = [[one for one, is_first in zip(every, taken, strict=True) if is_first is which] for which in (True, False)]
    return tuple(sides[0]), tuple(sides[1])


def _check_mapping(what: str, given: object, hint: str) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ShardingError(f"{what} of axes.transfer map {hint}; found {shown(given)}")


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
