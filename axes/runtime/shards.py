"""What a plain tensor is the shard of: placements and the whole shape, by its spec.

The whole size of a dim is known where no axis splits it, where its names have sizes, or where the caller gives it. Any
other size the ranks tell each other, in one small all-gather over the axes that split such dims, each time: ranks meet
new shapes at different times, so no rank could rely on an earlier answer. The parts are compared with the shards of the
whole, so that rows which aren't `torch.chunk`'s are one `SizeError` on all these ranks.

A simulated world has no other ranks to tell anything: there every rank counts as having as much as this one. A compiled
graph needs its sizes before it runs: it takes the parts to be even, and its ranks tell each other in the graph.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from axes.algebra.errors import DesyncError, MeshError, ShardingError, SizeError, wrong_dims
from axes.algebra.layout import Layout, digits
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import Sharding, Slots
from axes.algebra.specs import marked_sharding
from axes.runtime.agreement import ranks_text
from axes.runtime.axis_groups import AxisGroup, all_gather, group_over
from axes.runtime.groups import current_world, of_world
from axes.runtime.symbols import are_equal, fixed, hints
from axes.runtime.torch_placements import torch_placements

Given = tuple[tuple[str, int], ...]
Shape = tuple[int, ...]
Known = tuple[int | None, ...]
"""A whole shape, with None for each size that this rank can't know by itself."""

_RANKS_SHOWN = 16

_MOST_DIMS = 64
"""How many dims a tensor has at most, to torch."""


class LocalPart(NamedTuple):
    """What this rank has of a tensor: how that is sharded, the local shape, and what is known of the whole one.

    same: the axes over which its gradient is whole on every rank. label: what errors call it.
    """

    sharding: Sharding
    local: Shape
    known: Known
    same: tuple[Layout, ...] = ()
    label: str = "the tensor"

    @property
    def open(self) -> tuple[int, ...]:
        """The dims of which the whole size isn't known."""
        return tuple([dim for dim, size in enumerate(self.known) if size is None])

    @property
    def even(self) -> Shape:
        """The whole shape, if each rank has as much as this one."""
        if None not in self.known:
            return self.known  # type: ignore[return-value]
        sizes = zip(self.known, self.local, self.sharding.dims, strict=True)
        return tuple([here * dim.pieces if size is None else size for size, here, dim in sizes])


def read_shard(mesh: Mesh, spec: str, local: Shape, given: Given, shape: Sequence[int] | None = None) -> LocalPart:
    """What a shard of this shape is a part of, by its spec.

    The whole size of a dim is known where it isn't split, by the `given` sizes of names, or by the whole `shape`.

    >>> part = read_shard(Mesh("dp=2 tp=4"), "b@dp d", (3, 8), ())
    >>> part.known, part.even
    ((None, 8), (6, 8))
    """
    sharding, same = marked_sharding(mesh, spec, given, len(local))
    if sharding.ndim != len(local):
        raise wrong_dims(spec, sharding.ndim, len(local), local)
    known: list[int | None] = []
    for dim, extent in zip(sharding.dims, local, strict=True):
        sizes = [slot.size for slot in dim]
        written = math.prod([size for size in sizes if size is not None]) if sizes and None not in sizes else None
        known.append(extent if written is None and dim.pieces == 1 else written)
    return LocalPart(sharding, local, tuple(known if shape is None else shape), same, f"the tensor, '{spec}',")


def placements_of(part: LocalPart, whole: Shape) -> tuple[Any, ...]:
    """The placements of a part; `ShardingError` where it isn't this rank's shard of a tensor of the `whole` shape."""
    sharding = part.sharding.sized(whole)
    check_torch_can(sharding, whole)
    check_share(part, whole)
    return torch_placements(sharding)


def check_share(part: LocalPart, whole: Shape) -> None:
    """Refuses a part that isn't this rank's shard of a tensor of the `whole` shape."""
    sharding = part.sharding.sized(whole)
    expected = part.local if sharding.mesh.coordinate is None else sharding.local_shape(whole)
    if expected != part.local:
        raise ShardingError(
            f"{part.label} is {list(whole)} in whole and so {list(expected)} on this rank; found {list(part.local)}"
        )


# --- sizes that ranks tell each other


def told_shapes(what: str, mesh: Mesh, parts: Sequence[LocalPart], tensors: Sequence[torch.Tensor]) -> list[Shape]:
    """The whole shapes of tensors of which each rank has a part; nothing is sent where all sizes are known.

    `what` says in errors who asks. `SizeError`, on all ranks that tell each other, where the parts aren't
    the shards of whole tensors; `DesyncError` where some tell them for another call. The host waits for the answer.
    """
    told_dims = tuple([part.sharding.dims[dim] for part in parts for dim in part.open])
    if not told_dims:
        return [part.even for part in parts]
    mesh._bound(what)
    if mesh.coordinate is None:
        raise MeshError(
            f"{what}: rank {mesh.rank} isn't one of the ranks of {mesh!r}, which tell each other the whole shape; give "
            "it as shape=..."
        )
    group, ranks = _tellers(mesh, told_dims)
    if group.fake:
        return [part.even for part in parts]
    # As many numbers from each rank, whose tensor may have another number of dims.
    call = zlib.crc32(what.encode())
    mine = [[call, *part.local, *[-1] * (_MOST_DIMS - len(part.local))] for part in parts]
    device = mesh.binding.device_type if tensors[0].is_meta else tensors[0].device
    numbers, found = torch.tensor([mine], dtype=torch.int64, device=device), []
    calls, every = all_gather(numbers, 0, group).cpu().split([1, _MOST_DIMS], 2)
    if others := [rank for rank, found in zip(ranks, calls[:, 0, 0].tolist(), strict=True) if found != call]:
        raise DesyncError(
            f"{what}: what {ranks_text(others)} told are sizes of another call's tensors. Ranks that share a tensor "
            "make the same calls in the same order, with the same spec"
        )
    most = int((every >= 0).sum(2).max())
    for part, rows in zip(parts, zip(*every[:, :, :most].tolist(), strict=True), strict=True):
        sizes = zip(part.known, map(sum, zip(*rows, strict=True)), part.sharding.dims, strict=False)
        whole = tuple([total * dim.pieces // len(rows) if size is None else size for size, total, dim in sizes])
        told = [tuple([size for size in row if size >= 0]) for row in rows]
        if told != _shares(part.sharding, whole, ranks):
            raise SizeError(_unequal(what, part, whole, told, ranks))
        found.append(whole)
    return found


@of_world(1024)
def _tellers(mesh: Mesh, dims: tuple[Slots, ...]) -> tuple[AxisGroup, tuple[int, ...]]:
    """The group of the ranks along all axes that split one of these dims, this one among them; and the ranks."""
    layouts = [layout for dim in dims for layout in dim.layouts]
    modes = {mode for each in digits(*layouts) for mode in each}
    layout = Layout.of(sorted(modes, key=lambda mode: mode[1], reverse=True))
    name = " ".join(dict.fromkeys(map(mesh.called, layouts)))
    return group_over(mesh, layout, name), tuple(mesh.ranks_of(layout, current_world().rank) or ())


@functools.lru_cache(maxsize=1024)
def _shares(sharding: Sharding, whole: Shape, ranks: tuple[int, ...]) -> list[Shape]:
    """The shape of the shard of each rank."""
    sized = sharding.sized(whole)
    return [sized.local_shape(whole, rank) for rank in ranks]


def _unequal(what: str, part: LocalPart, whole: Shape, told: Sequence[Shape], ranks: Sequence[int]) -> str:
    shares = _shares(part.sharding, whole, tuple(ranks))
    listed = [
        f"rank {rank} has {list(found)}, its shard is {list(share)}"
        for rank, found, share in zip(ranks, told, shares, strict=True)
    ]
    rest = [f"and {len(listed) - _RANKS_SHOWN} ranks more"] if len(listed) > _RANKS_SHOWN else []
    lines = "".join(f"\n  {line}" for line in listed[:_RANKS_SHOWN] + rest)
    return (
        f"{what}: {ranks_text(ranks)} don't have the shards of one tensor. Their parts of '{part.sharding}' together "
        f"are {list(whole)}, which is cut axis by axis, each time as torch.chunk does it:{lines}\n"
        "pad the parts, so that all ranks have as much; or pass them as plain shards into a region of a module, "
        "axes.shard_map(module, ...), where each rank may have a size of its own; or send them where they belong, by "
        "axes.all_to_all with send_sizes= and recv_sizes="
    )


# --- in torch.compile


def traced_parts(
    what: str, parts: Sequence[LocalPart], tensors: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, tuple[Any, ...], Shape]]:
    """Parts of whole tensors in a graph, contiguous, each with its placements and the whole shape.

    Sizes may be symbols where they are multiples of their parts. Others are numbers, for which alone the graph is.
    """
    placements = []
    for part in parts:
        for dim, here, size in zip(part.sharding.dims, part.local, part.even, strict=False):
            if len(dim) > 1 or type(size) is int or size % dim.pieces or not are_equal(size, here * dim.pieces):
                fixed(here), fixed(size)  # one that isn't that of the shard is refused below
        placements.append(placements_of(part._replace(local=hints(part.local)), hints(part.even)))
    first = told_even(tensors[0], what, parts) if any(part.open for part in parts) else tensors[0]
    each = zip((first, *tensors[1:]), placements, parts, strict=True)
    return [(x.contiguous(), placed, part.even) for x, placed, part in each]


def told_even(x: torch.Tensor, what: str, parts: Sequence[LocalPart]) -> torch.Tensor:
    """`x` in a graph in which the ranks tell each other that all have as much of these parts; else it is a `SizeError`.

    The result depends on the answer: a graph drops what nobody uses.
    """
    dims = [(part.sharding.dims[dim], part.local[dim]) for part in parts for dim in part.open]
    group, ranks = _tellers(parts[0].sharding.mesh, tuple([dim for dim, _ in dims]))
    if group.fake:
        return x
    mine = torch.stack([torch.full((), size, dtype=torch.int64, device=x.device) for _, size in dims])
    every = all_gather(mine, 0, group)
    zero = _check_even(every, len(ranks), f"{what} on {ranks_text(ranks)}")
    if x.dtype.itemsize == 1:  # torch subtracts neither booleans nor floats of 8 bits
        return (x.view(torch.uint8) - zero.to(torch.uint8)).view(x.dtype)
    return x - zero.to(x.dtype)


@torch.library.custom_op("axes::check_even", mutates_args=())
def _check_even(every: torch.Tensor, ranks: int, what: str) -> torch.Tensor:
    """Zero, where all ranks have told the same sizes."""
    rows = every.view(ranks, -1).tolist()
    if any(row != rows[0] for row in rows):
        raise SizeError(
            f"{what}: in a compiled graph each rank has as much as the others of a split dim whose whole size follows "
            f"from nothing; found the sizes {rows}. Give the whole size, in the spec (v=257@tp) or as shape=..."
        )
    return every.new_zeros(())


@_check_even.register_fake
def _(every: torch.Tensor, ranks: int, what: str) -> torch.Tensor:
    return every.new_empty(())
