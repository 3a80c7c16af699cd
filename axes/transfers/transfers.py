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

import contextlib
import fnmatch
import hashlib
import importlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from axes import AxesError, CostModel, Mesh, MeshError, Sharding, ShardingError, SizeError
from axes.extension import (
    Box,
    Exchange,
    GroupExchange,
    GroupSide,
    Pictured,
    Tile,
    bytes_text,
    check_same_dims,
    checked_rank,
    checked_tensor_shape,
    dtype_name,
    factors_by_name,
    given_sizes,
    group_between,
    itemsize_of,
    parsed_sharding,
    ranks_of_both,
    required_mesh,
    shortened,
    shown,
    suggestion,
    volume,
    whole_number,
    written_sizes,
)
from axes.transfers.buckets import MovedTensor, TensorKind, TensorPiece, bucketed
from axes.transfers.layout_pieces import Shape
from axes.transfers.layout_rules import LayoutRules, Table

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
    """What a rank does with tensors of a kind; None where it is on neither side."""
    if all(end.universe.position(rank) is None for end in kind[:2]):
        return None
    return _group_of(kind, ranks_per_node).exchange(rank)


@dataclass(frozen=True, eq=False)
class Transfer(Pictured):
    """A plan that takes tensors from one sharding to another, maybe on other ranks; made by `axes.transfer`.

    Called with this rank's tensors by name, it carries the plan out, and returns the tensors that arrive here.
    `print` shows its totals, `axes.show` its picture.

    Args:
        tensors: Each tensor that moves: its names, shardings, whole shapes and dtypes on both sides.
        buckets: The pieces of tensors that are sent together.
        bucket_bytes: The size of the buffers of a bucket.
        rank: The rank that the transfer is seen from; `at` gives another view.
        ranks_per_node: How many ranks share a node.
        home: A mesh of the running job, if one of the two is.
        idle: The names of sources that nobody reads, and of targets that keep their values.

    Examples:
        >>> from axes.algebra.mesh import Mesh
        >>> trainer, server = Mesh("fsdp=4"), Mesh("tp=2", ranks=range(4, 6))
        >>> move = transfer({"w": "f@fsdp d"}, {"w": "f d@tp"}, trainer, server, {"w": (8, 8)})
        >>> move.sources, move.targets, move.at(4).partners, move.lower_bound
        ((0, 1, 2, 3), (4, 5), (0, 1, 2, 3), 256)
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
        return importlib.import_module("axes.transfers.execution").carry_out(self, tensors, into)

    def at(self, rank: int) -> Transfer:
        """The same plan seen from another rank."""
        return replace(self, rank=checked_rank("a rank", rank))

    @cached_property
    def inverse(self) -> Transfer:
        """The plan of the way back: what is read of the sources is written, by the first of targets that are equal."""
        moved, written = list[MovedTensor](), dict[str, int]()
        for one in [each.inverse for each in self.tensors]:
            done = written.get(one.target_name, 0)
            if one.target_name not in written or done < math.prod(one.shapes[1]):
                moved.append(one)
                written[one.target_name] = done + math.prod(one.shape)
        tensors, buckets = bucketed(moved, self.bucket_bytes)
        unread = self.ends[1].keys() - {one.source_name for one in moved}
        return replace(self, tensors=tensors, buckets=buckets, idle=(self.idle[1] | unread, frozenset()))

    @cached_property
    def ends(self) -> tuple[dict[str, TransferEnd], dict[str, TransferEnd]]:
        """The tensors of both sides by name."""
        source, target = dict[str, TransferEnd](), dict[str, TransferEnd]()
        for one in self.tensors:
            known, arrives = one.dtypes[0] or (None if one.dtypes[1] else "float32"), one.dtypes[1] or "float32"
            source.setdefault(one.source_name, TransferEnd(one.source, one.shapes[0], known))
            target.setdefault(one.target_name, TransferEnd(one.target, one.shapes[1], arrives))
        return source, target

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks that have any of the tensors, ascending."""
        return _ranks_of(one.source for one in self.tensors)

    @property
    def targets(self) -> tuple[int, ...]:
        """The ranks that get any of them, ascending."""
        return _ranks_of(one.target for one in self.tensors)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        return tuple(sorted({*self.sources, *self.targets}))

    # this rank's part

    def exchange(self, tensor: int) -> Exchange | None:
        """What this rank sends, receives and keeps of a tensor; None where it is on neither side."""
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

    @property
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
        received, sent = (Counter(dict.fromkeys(self.ranks, 0)) for _ in range(2))
        sizes = Counter[TensorKind]()
        for one in self.tensors:
            sizes[one.kind] += one.itemsize
        for kind, size in sizes.items():
            group = _group_of(kind, self.ranks_per_node)
            received.update({rank: count * size for rank, count in group.received.items()})
            sent.update({rank: count * size for rank, count in group.sent.items()})
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
        """Bytes that all ranks receive: the elements that a rank needs and doesn't have, each once.

        No plan can send less, unless several targets are tied, made of the same elements: each of them is sent.
        """
        return sum(self.totals[0].values())

    # text

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that ranks can compare: what is moved, from where to where, and in what buckets."""
        return hashlib.sha256(self.described.encode()).hexdigest()[:16]

    @property
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
        least = "the least possible" if len(read) == len(self.tensors) else "each tied tensor sent separately"
        lines = [
            self.heading,
            f"  buckets   {len(self.buckets)} of at most {bytes_text(self.bucket_bytes)} per rank; "
            "each is one exchange",
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

    __repr__ = __str__


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


# --- how tensors lie ------------------------------------------------------------------------------

End = str | Sharding
Meshes = Mesh | Mapping[str, Mesh]


def read_end(end: End, mesh: Mesh, sizes: tuple[tuple[str, int], ...] = (), ndim: int | None = None) -> Sharding:
    """A spec on a mesh, or a sharding, on a mesh that has no more ranks than the tensor. sizes: of any names.

    Raises `ShardingError` for what is neither, and for what is pending.

    >>> read_end("f@tp", Mesh("pp=2 tp=2").at(3)["tp"]).universe
    Universe(ranks=range(2, 4))
    """
    if not isinstance(end, str | Sharding):
        raise ShardingError(f"a tensor lies by a spec, like 'f@tp d', or a Sharding; found {shown(end)}")
    if isinstance(end, Sharding):
        mesh, found = end.mesh, end
    else:
        named = tuple([each for each in sizes if each[0] in factors_by_name(end)])
        found = parsed_sharding(mesh, end, named, ndim)
    if any(op != "same" for op, _ in found.pending):
        raise ShardingError(f"'{found}' has something pending; resolve it first, with axes.reshard")
    found, own = replace(found, pending=()), _on_own_ranks(mesh)
    return replace(found, mesh=own) if own.size == mesh.universe.size else parsed_sharding(own, found.spec)


def _on_own_ranks(mesh: Mesh) -> Mesh:
    """The mesh of these axes alone, seen from no rank: of a sub-mesh that of the ranks that it is seen from."""
    if mesh.size == mesh.universe.size:
        return mesh._seen_from(None)
    if mesh.binding is not None and mesh._view is None:
        names = ", ".join(f'"{name}"' for name in mesh.axis_names)
        raise MeshError(
            f"mesh[{names}] is another one on each rank; a transfer is the same on all. "
            f"Say which one it is, by one of its ranks: mesh.at(rank)[{names}]"
        )
    # Its DTensors would be on another device mesh than the user's own, so that it is algebra alone.
    whole = mesh.layout_of_all
    own = Mesh("ranks", ranks=mesh.universe.group(whole, mesh.rank), ranks_per_node=mesh.ranks_per_node)
    named = {name: layout.within(whole) for name, layout in mesh.namespace.items() if whole.contains(layout)}
    return own._with(axis_names=mesh.axis_names, namespace=named)


@lru_cache(maxsize=4096)
def _sized_end(end: End, mesh: Mesh, shape: Shape, sizes: tuple[tuple[str, int], ...], *_: Any) -> Sharding:
    """An end of a tensor, kept for its names and the view of its mesh as well: equal ones may differ in these."""
    return read_end(end, mesh, sizes, len(shape)).at(shape)


def _shardings(
    side: str, specs: Mapping[str, End], meshes: Meshes | None, shapes: Mapping[str, Shape], sizes: Mapping[str, int]
) -> tuple[dict[str, Sharding], Mesh | None]:
    """The shardings of tensors of these shapes by name, each on a mesh of its own ranks; and a mesh of the job."""
    found, home, mesh_of, given = {}, None, _by_name(meshes), tuple(sorted(sizes.items()))
    for name, shape in sorted(shapes.items()):
        with of_tensor(name, shape):
            end = specs[name]
            own = end.mesh if isinstance(end, Sharding) else mesh_of(name)
            if own is None and isinstance(meshes, Mapping):
                raise MeshError(f"no pattern of {side}_mesh matches: {', '.join(map(shortened, meshes))}")
            mesh = required_mesh(own, "axes.transfer")
            found[name] = _sized_end(end, mesh, shape, given, getattr(end, "names", ()), mesh._view)
            home = home or (mesh if mesh.binding is not None else None)
    return found, home


@contextlib.contextmanager
def of_tensor(name: str, shape: Shape | None = None) -> Iterator[None]:
    """Errors in this block say of which tensor they are."""
    try:
        yield
    except AxesError as error:
        whole = "" if shape is None else f", {shown(list(shape))}"
        raise type(error)(f"{error}\n  of the tensor {shortened(name)}{whole}") from None


def _by_name(given: Any) -> Callable[[str], Any]:
    """What is said of each name: one value for all, or that of the name itself, or of the first pattern that matches.

    >>> [_by_name({"*.b": 1, "*": 2, "a.b": 3})(name) for name in ("a.b", "c.b", "c")]
    [3, 1, 2]
    """
    if not isinstance(given, Mapping):
        return lambda name: given
    listed = [each for each in given if re.search(r"[*?[]", each)]
    table = re.compile("|".join([f"({fnmatch.translate(each)})" for each in listed]) or "(?!)")

    def found(name: str) -> Any:
        match = None if name in given else table.match(name)
        return given.get(name) if match is None or match.lastindex is None else given[listed[match.lastindex - 1]]

    return found


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
        dtype: The dtype of the result, one for all or by patterns of the targets' names. By default that of the
            object in `shapes`, and float32 where `shapes` has the shape alone.
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
          buckets   1 of at most 64.0 MiB per rank; each is one exchange
          received  8.0 MiB in all, the least possible; at most 2.0 MiB by a rank
          sent      at most 2.0 MiB by a rank, 2.0 MiB on average of 4 that send
          rank 0    0 B in, 2.0 MiB out, with 4 ranks; peak 3.0 MiB
    """
    maybe = [("source_mesh", source_mesh), ("target_mesh", target_mesh), ("dtype", dtype)]
    for what, given, hint in (
        ("sources", sources, "a name to a spec"),
        ("targets", targets, "a name to a spec"),
        ("shapes", shapes, "a name to a whole shape"),
        *[(what, given, "patterns of names") for what, given in maybe if isinstance(given, Mapping)],
    ):
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise ShardingError(f"{what} of axes.transfer map {hint}; found {shown(given)}")
    assert shapes is not None, "it has just been checked"
    number = bucket_mb if isinstance(bucket_mb, float) else whole_number(bucket_mb)
    if number is None or not 0 < number <= 2**20:
        raise SizeError(f"bucket_mb is a number of MiB above 0; found {shown(bucket_mb)}")
    bucket_bytes, given_here = max(1, int(number * 2**20)), dict(written_sizes(keywords, sizes))
    wholes = dict[str, Shape]()
    for name in sorted(sources):
        if name not in shapes:
            raise ShardingError(f"shapes lacks {shortened(name)}{suggestion(name, shapes)}")
        wholes[name] = checked_tensor_shape(_shape_of(shapes[name]))
    table = rules if isinstance(rules, LayoutRules) else LayoutRules({} if rules is None else rules)
    change = table._sized(given_here).applied(wholes)
    for name in (*change.targets, *targets):
        if name not in targets or not (name in change.targets or table.keeps(name)):
            lacks = f"targets lack {shortened(name)}, which sources become{suggestion(name, targets)}"
            added = f"no source becomes {shortened(name)} of targets{suggestion(name, change.targets)}"
            raise ShardingError(
                f"{added if name in targets else lacks}; both sides have the same names, or rules= says how they "
                "relate: {names: None} of sources that nobody needs, {None: name} of a target that keeps its values"
            )
    for name in wholes if rules is None else ():
        with of_tensor(name):
            check_same_dims(sources[name], targets[name])
    before, own = _shardings("source", sources, source_mesh, wholes, given_here)
    after, others = _shardings("target", targets, target_mesh, change.targets, given_here)
    dtype_of, found, first = _by_name(dtype), list[MovedTensor](), dict[str, MovedTensor]()
    for part in itertools.chain(*change.pieces.values()):
        known, wanted = getattr(shapes[part.source], "dtype", None), dtype_of(part.target)
        dtypes = [None if each is None else dtype_name(each) for each in (known, known if wanted is None else wanted)]
        shape, rest = (wholes[part.source], None) if part.is_whole else (part.extents, part)
        one = MovedTensor(
            part.source, part.target, shape, before[part.source], after[part.target], (dtypes[0], dtypes[1]), rest
        )
        other = first.setdefault(part.target, one)
        if other.dtypes[1] != one.dtypes[1]:
            each = " and ".join(f"{shortened(c.source_name)}, {c.dtypes[1] or 'unknown'}" for c in (other, one))
            raise ShardingError(f"{shortened(one.target_name)} is made of {each}; say which it becomes, with dtype=")
        found.append(one)
    for pattern in dtype if isinstance(dtype, Mapping) else ():
        if pattern not in targets and not fnmatch.filter(targets, pattern):
            raise ShardingError(f"{shortened(pattern)} of dtype= matches no target{suggestion(pattern, targets)}")
    named = [factors_by_name(end) for end in {*sources.values(), *targets.values()} if isinstance(end, str)]
    given_sizes(given_here, None, (), sorted(table._names.union(*named)), "the specs")
    nodes = [end.mesh.ranks_per_node for one in found for end in (one.source, one.target)]
    return Transfer(
        *bucketed(found, bucket_bytes),
        bucket_bytes=bucket_bytes,
        rank=found[0].source.universe.ranks[0] if found else 0,
        ranks_per_node=next(filter(None, nodes), _NODE),
        home=own or others,
        idle=(frozenset(change.unused), frozenset(targets.keys() - change.targets.keys())),
    )


def _shape_of(value: Any) -> Any:
    """The shape of a tensor, or a shape that is given itself; the tensor where it has none, as a lazy one."""
    try:
        return getattr(value, "shape", value)
    except Exception:  # of the tensor's class
        return value
