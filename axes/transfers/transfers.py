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

import fnmatch
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from axes.algebra import providers
from axes.algebra.chunks import Box, Tile, volume
from axes.algebra.cost import CostModel
from axes.algebra.errors import ShardingError, SizeError, shortened, shown, suggestion
from axes.algebra.mesh import Mesh
from axes.algebra.plan import bytes_text, dtype_name, itemsize_of
from axes.algebra.planning.exchange import Exchange, GroupExchange, GroupSide, group_between, ranks_of_both
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import checked_rank, checked_tensor_shape, whole_number, written_sizes
from axes.algebra.specs import check_same_dims
from axes.transfers.buckets import MovedTensor, TensorKind, TensorPiece, bucketed
from axes.transfers.layout_pieces import LayoutPiece, covering
from axes.transfers.layout_rules import LayoutRules, Table
from axes.transfers.transfer_ends import End, Meshes, by_name, check_used, of_tensor, shardings

_NODE = 8


class Like(NamedTuple):
    """What says of a tensor its whole shape and, where it is known, its dtype."""

    shape: tuple[int, ...]
    dtype: str


class TransferEnd(NamedTuple):
    """A tensor on one side of a transfer: how it lies there, its whole shape, its dtype, None where it may be any."""

    sharding: Sharding
    shape: tuple[int, ...]
    dtype: str | None


class Slice(NamedTuple):
    """A part of a message about a tensor: the elements `start..stop` of boxes that lie end to end. size: in bytes."""

    tensor: int
    boxes: tuple[Box, ...]
    start: int
    stop: int
    size: int


Slices = Mapping[int, list[Slice]]
"""What goes to each rank, or comes from it."""


@dataclass(frozen=True)
class BucketTraffic:
    """What one rank does in one bucket."""

    number: int
    pieces: tuple[TensorPiece, ...]
    sends: Slices
    receives: Slices

    @property
    def bytes_in(self) -> int:
        """Bytes that the rank receives."""
        return _bytes_of(self.receives)

    @property
    def bytes_out(self) -> int:
        """Bytes that the rank sends."""
        return _bytes_of(self.sends)

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
    idle: names of sources that nobody reads, and of targets that keep the values that they have.
    """

    tensors: tuple[MovedTensor, ...]
    buckets: tuple[tuple[TensorPiece, ...], ...]
    bucket_bytes: int
    rank: int
    ranks_per_node: int = _NODE
    home: Mesh | None = None
    idle: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())

    def __call__(self, tensors: Mapping[str, Any], into: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Carry the plan out: every rank of the sources and of the targets calls it.

        tensors: by name, what this rank has of the sources: DTensors or shards; None, or nothing, on ranks without.
        into: by name, tensors of this rank that are written in place: DTensors, shards, or views of any strides.

        Returns the tensors that this rank has of the targets. Without `into` these are DTensors, on a mesh made with
        `axes.init_mesh` whose DTensors can say the sharding, else shards. With it, they are the tensors of `into`, and
        shards for names that it lacks.

        Raises `ShardingError` for a tensor that isn't the shard that the plan says, and `DesyncError` on all other
        ranks, before anything is sent; `DesyncError` where ranks have other plans, or where one fails in the middle:
        it says which tensors are whole.
        """
        return providers.module("transfers", "a transfer").carry_out(self, tensors, into)

    def at(self, rank: int) -> Transfer:
        """The same plan seen from another rank."""
        return replace(self, rank=checked_rank("a rank", rank))

    @cached_property
    def inverse(self) -> Transfer:
        """The plan of the way back: what is read of the sources is written, by the first of targets that are equal."""
        moved = _without_repeats([one.inverse for one in self.tensors])
        unread = self.ends[1].keys() - {one.source_name for one in moved}
        return replace(self, **_in_buckets(moved, self.bucket_bytes), idle=(self.idle[1] | unread, frozenset()))

    @cached_property
    def ends(self) -> tuple[dict[str, TransferEnd], dict[str, TransferEnd]]:
        """The tensors of both sides by name."""
        source, target = dict[str, TransferEnd](), dict[str, TransferEnd]()
        for one in self.tensors:
            known, arrives = one.dtypes[0] or (None if one.dtypes[1] else "float32"), one.dtypes[1] or "float32"
            source.setdefault(one.source_name, TransferEnd(one.source, one.shapes[0], known))
            target.setdefault(one.target_name, TransferEnd(one.target, one.shapes[1], arrives))
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

    # this rank's part

    def exchange(self, tensor: int) -> Exchange | None:
        """What this rank sends, receives and keeps of a tensor; None where it has no part in it."""
        return _exchange_of(self.tensors[tensor].kind, self.ranks_per_node, self.rank)

    @cached_property
    def tiles(self) -> tuple[dict[str, Tile | None], dict[str, Tile | None]]:
        """What this rank has of each tensor, before and after; None where it isn't one of its ranks."""
        before, after = (
            {name: end.sharding.tile(end.shape, self.rank) for name, end in side.items()} for side in self.ends
        )
        return before, after

    @cached_property
    def steps(self) -> tuple[BucketTraffic, ...]:
        """What this rank does in each bucket. Piece i of n of a tensor is that part of each message about it."""
        found = []
        for number, pieces in enumerate(self.buckets):
            sides: tuple[dict[int, list[Slice]], dict[int, list[Slice]]] = {}, {}
            for tensor, piece in pieces:
                one, exchange = self.tensors[tensor], self.exchange(tensor) or Exchange(())
                for by_rank, messages in zip(sides, (exchange.sends, exchange.receives), strict=True):
                    for message in messages:
                        start, stop = (message.elements * at // one.pieces for at in (piece, piece + 1))
                        if start < stop:
                            slices = by_rank.setdefault(exchange.ranks[message.peer], [])
                            slices.append(Slice(tensor, message.boxes, start, stop, (stop - start) * one.itemsize))
            found.append(BucketTraffic(number, pieces, *sides))
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
        buffers = [max((getattr(step, side) for step in self.steps), default=0) for side in ("bytes_in", "bytes_out")]
        travel = {one.source_name: one.itemsize for one in self.tensors}  # what has any dtype counts as on its way
        ends = [(name, end, self.tiles[side][name]) for side in (0, 1) for name, end in self.ends[side].items()]
        sizes = [(itemsize_of(end.dtype) if end.dtype else travel[name], tile) for name, end, tile in ends]
        tensors = sum(size * volume(tile) for size, tile in sizes if tile is not None)
        return tensors + min(2, len(self.steps)) * sum(buffers)

    @cached_property
    def cost(self) -> float:
        """Microseconds of this rank's part, bucket after bucket, as the default cost model reckons."""
        model, found, node = CostModel(ranks_per_node=self.ranks_per_node), 0.0, self.ranks_per_node
        for step in [step for step in self.steps if step.ranks]:
            near, both = sum(peer // node == self.rank // node for peer in step.ranks), (step.bytes_in, step.bytes_out)
            found += model.time_us("exchange", 1 + len(step.ranks), 1 + near, max(both), sum(both))
        return found

    # all ranks

    @cached_property
    def totals(self) -> tuple[dict[int, int], dict[int, int]]:
        """The bytes that every rank receives and sends: exact, and slower to find than any one rank's part."""
        received, sent = dict.fromkeys(self.ranks, 0), dict.fromkeys(self.ranks, 0)
        sizes: dict[TensorKind, int] = {}
        for one in self.tensors:
            sizes[one.kind] = sizes.get(one.kind, 0) + one.itemsize
        for kind, size in sizes.items():
            group = _group_of(kind, self.ranks_per_node)
            for side, found in ((received, group.received), (sent, group.sent)):
                for rank, count in found.items():
                    side[rank] += count * size
        return received, sent

    @property
    def bytes_in(self) -> int:
        """Bytes received by the rank that receives most."""
        return max(self.totals[0].values(), default=0)

    @property
    def bytes_out(self) -> int:
        """Bytes sent by the rank that sends most."""
        return max(self.totals[1].values(), default=0)

    @property
    def lower_bound(self) -> int:
        """Bytes that have to be sent, whatever the plan: what ranks need and don't have. No more are.

        Targets that are tied, made of the same elements, arrive as one where they lie alike, else each by itself.
        """
        return sum(self.totals[0].values())

    # text

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that ranks can compare: what is moved, from where to where, and in what buckets."""
        return hashlib.sha256(self.described.encode()).hexdigest()[:16]

    @cached_property
    def described(self) -> str:
        """All that ranks have to agree on, a line for each tensor."""
        idle = ", ".join([*sorted(self.idle[0]), *sorted(self.idle[1])])
        rows = [f"buckets of {self.bucket_bytes}, nodes of {self.ranks_per_node}, unread or kept: {idle}"]
        for one in self.tensors:
            ends = [f"{end} on {end.mesh.declaration} {end.universe.ranks}" for end in (one.source, one.target)]
            what = f"{one.source_name} {one.target_name} {one.shape} {one.dtypes} {one.pieces} {one.part}"
            rows.append(f"{what}: {' -> '.join(ends)}")
        return "\n".join(rows)

    @property
    def heading(self) -> str:
        """How many tensors of how many bytes, from which ranks to which."""
        whole = sum(math.prod(one.shape) * one.itemsize for one in self.tensors)
        before, after = map(len, self.ends)
        many = f" as {after}" if after != before else ""
        ranks = f"{_ranks_text(self.sources)} -> {_ranks_text(self.targets)}"
        return f"{counted(before, 'tensor')}{many}, {bytes_text(whole)}: {ranks}"

    def __str__(self) -> str:
        received, sent = self.totals
        senders = sum(map(bool, sent.values()))
        read = {(one.source_name, one.part and one.part.offsets[0]) for one in self.tensors}
        least = "which is the least" if len(read) == len(self.tensors) else "tied tensors each by itself"
        lines = [
            self.heading,
            f"  buckets   {len(self.buckets)} of at most {bytes_text(self.bucket_bytes)}, one exchange each",
            f"  received  {bytes_text(self.lower_bound)} in all, {least}; at most "
            f"{bytes_text(self.bytes_in)} by a rank",
            f"  sent      at most {bytes_text(self.bytes_out)} by a rank, "
            f"{bytes_text(sum(sent.values()) // max(1, senders))} on average of {senders} that send",
        ]
        if self.rank in received:
            lines.append(
                f"  rank {self.rank:<5}{bytes_text(received[self.rank])} in, {bytes_text(sent[self.rank])} out, with "
                f"{counted(len(self.partners), 'rank')}; peak {bytes_text(self.peak_bytes)}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


def _bytes_of(side: Slices) -> int:
    return sum([each.size for slices in side.values() for each in slices])


def _ranks_of(ends: Iterable[Sharding]) -> tuple[int, ...]:
    return tuple(sorted({rank for universe in {end.universe for end in ends} for rank in universe.ranks}))


def _ranks_text(ranks: Sequence[int]) -> str:
    row = f" ({ranks[0]}..{ranks[-1]})" if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1 else ""
    return f"{counted(len(ranks), 'rank')}{row}"


def counted(count: int, what: str) -> str:
    """How many there are.

    >>> counted(1, "bucket"), counted(2, "bucket")
    ('1 bucket', '2 buckets')
    """
    return f"{count} {what}{'s' if count != 1 else ''}"


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
    """Plan the move of many tensors from one layout to another, on any ranks: a state dict, a batch, a cache.

    The ranks of the two sides may be the same, others, or some of both. In a running job every rank of either side
    calls the plan with its tensors: `move(tensors)`. Planning needs no process: `print(move)` shows what is sent,
    and `move.at(rank)` is the part of one rank.

    Args:
        sources: Specs or `Sharding`s by name. A spec is complete: a dim without an `@` is unsplit.
        targets: The same for the result, with the same names unless there are rules.
        source_mesh: A mesh; or meshes by patterns of names as of `fnmatch`, the first that matches applies
            (`{"layers.0.*": stage0, "*": stage1}`). By default the ambient mesh.
        target_mesh: The same for the targets.
        shapes: Whole shapes by name, or objects that have a `shape` and a `dtype`, such as tensors on the device
            `meta`. With rules, those of the sources.
        dtype: The dtype of the result, one for all or by patterns of the targets' names. Tensors keep their own by
            default.
        rules: A table, or `axes.LayoutRules`, where names or layouts of the two sides differ.
        bucket_mb: Tensors are sent together in buckets of at most so many MiB, which bounds the buffers.
        sizes: Sizes of names, for names that collide with a parameter.
        **keywords: Sizes of names in groups, and in the expressions of the rules.

    Returns:
        A `Transfer`.

    Raises:
        ShardingError: A name is on one side alone, a reduction is pending, or a spec doesn't fit.
        MeshError: A name has no mesh.

    Examples:
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
    bucket_bytes, given_sizes = _checked_bucket(bucket_mb), dict(written_sizes(keywords, sizes))
    wholes = dict[str, tuple[int, ...]]()
    for name in sorted(sources):
        if name not in shapes:
            raise ShardingError(f"shapes lacks {shortened(name)}{suggestion(name, shapes)}")
        wholes[name] = checked_tensor_shape(_shape_of(shapes[name]))
    table = _table(rules, given_sizes)
    change = None if table is None else table.applied(wholes)
    made = wholes if change is None else change.targets
    _check_targets(made, targets, table)
    for name in wholes if table is None else ():
        with of_tensor(name):
            check_same_dims(sources[name], targets[name])
    before, own = shardings("source", sources, source_mesh, wholes, given_sizes)
    after, others = shardings("target", targets, target_mesh, made, given_sizes)
    dtype_of = by_name(dtype)

    def moved(source: str, target: str, part: LayoutPiece | None) -> MovedTensor:
        own, wanted = getattr(shapes[source], "dtype", None), dtype_of(target)
        known = None if own is None else dtype_name(own)
        dtypes = known, known if wanted is None else dtype_name(wanted)
        shape = wholes[source] if part is None else part.extents
        return MovedTensor(source, target, shape, before[source], after[target], dtypes, part)

    if change is None:
        found = [moved(name, name, None) for name in wholes]
    else:
        pieces = itertools.chain(*change.pieces.values())
        found = [moved(each.source, each.target, None if each.is_whole else each) for each in pieces]
    read = {one.source_name for one in found}
    first: dict[str, MovedTensor] = {}
    for one in found:
        other = first.setdefault(one.target_name, one)
        if other.dtypes[1] != one.dtypes[1]:
            each = " and ".join(f"{shortened(c.source_name)}, {c.dtypes[1] or 'unknown'}" for c in (other, one))
            raise ShardingError(f"{shortened(one.target_name)} is made of {each}; say which it becomes, with dtype=")
    for pattern in dtype if isinstance(dtype, Mapping) else ():
        if pattern not in targets and not fnmatch.filter(targets, pattern):
            raise ShardingError(f"{shortened(pattern)} of dtype= matches no target{suggestion(pattern, targets)}")
    check_used(given_sizes, (*sources.values(), *targets.values()), table)
    nodes = [end.mesh.ranks_per_node for one in found for end in (one.source, one.target)]
    return Transfer(
        **_in_buckets(found, bucket_bytes),
        bucket_bytes=bucket_bytes,
        rank=found[0].source.universe.ranks[0] if found else 0,
        ranks_per_node=next(filter(None, nodes), _NODE),
        home=own or others,
        idle=(frozenset(sources.keys() - read), frozenset(targets.keys() - made.keys())),
    )


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


def _check_targets(made: Mapping[str, Any], targets: Mapping[str, End], rules: LayoutRules | None) -> None:
    advice = (
        "both sides have the same names, or rules= says how they relate: {names: None} of sources that nobody needs, "
        "{None: name} of a target that keeps its values"
    )
    for name in made:
        if name not in targets:
            raise ShardingError(
                f"targets lack {shortened(name)}, which sources become{suggestion(name, targets)}; {advice}"
            )
    for name in targets:
        if name not in made and (rules is None or not rules.keeps(name)):
            raise ShardingError(f"no source becomes {shortened(name)} of targets{suggestion(name, made)}; {advice}")


def _without_repeats(tensors: Iterable[MovedTensor]) -> list[MovedTensor]:
    """Of what would be written to the same elements the first."""
    by_target: dict[str, list[MovedTensor]] = {}
    for one in tensors:
        by_target.setdefault(one.target_name, []).append(one)
    found: list[MovedTensor] = []
    for parts in by_target.values():
        found += parts[: covering([math.prod(one.shape) for one in parts], math.prod(parts[0].shapes[1]))]
    return found


def _check_mapping(what: str, given: object, hint: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ShardingError(f"{what} of axes.transfer map {hint}; found {shown(given)}")
    return given


def _checked_bucket(bucket_mb: object) -> int:
    number = bucket_mb if isinstance(bucket_mb, float) else whole_number(bucket_mb)
    if number is None or not 0 < number <= 2**20:
        raise SizeError(f"bucket_mb is a number of MiB above 0; found {shown(bucket_mb)}")
    return max(1, int(number * 2**20))
