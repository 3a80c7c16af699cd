"""DTensor's placements as algebra: what torch's objects say about a sharding, without torch.

DTensor describes a tensor by one placement per axis of the mesh and cuts it axis by axis in mesh
order. A spec lists, per dim, axes in any order. The two meet here: an axis that a spec writes before
an earlier one of the mesh, or behind a factor that isn't split, becomes a strided shard.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("cp=2 tp=2")
>>> placement_specs(mesh.sharding("s@(tp cp) d"))[0]
PlacementSpec(dim=0, split_factor=2, op=None)

What DTensor can't say, or would cut in another way, is a `ShardingError`, never another tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from axes.algebra.errors import ShardingError, shown
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh, checked_mesh
from axes.algebra.sharding import (
    EXTREMES,
    LINEAR,
    Cut,
    Sharding,
    Slot,
    Slots,
    classes,
    cuts,
    of_cuts,
    pending_runs,
    pending_text,
    same_cuts,
)
from axes.algebra.splits import split


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """One placement: `dim` is None for replicated and pending; `split_factor` is 1 for a plain shard."""

    dim: int | None = None
    split_factor: int = 1
    op: str | None = None


@functools.lru_cache(maxsize=4096)
def placement_specs(sharding: Sharding) -> tuple[PlacementSpec, ...]:
    """What DTensor needs to be told per axis of the mesh; `ShardingError` where it can't be.

    DTensor cuts by mesh axis in mesh order. An axis that is written before an earlier one of the
    mesh, or behind a factor that isn't split, becomes a strided shard: `split_factor` counts the
    pieces that still lie in front of it at that time.
    """
    mesh = sharding.mesh
    found = {name: PlacementSpec() for name in mesh.axis_names}
    runs = pending_runs(sharding.pending)
    written = [(op, name) for op, layouts in runs for name in _whole(mesh, layouts, mesh.made_of(layouts))]
    found.update({name: PlacementSpec(op=op) for op, name in written})
    _check_order_of_pending(sharding, written)
    strided: dict[str, str] = {}
    for index in [at for at, dim in enumerate(sharding.dims) if dim.layouts]:
        ends = cuts(_in_axes(sharding, index), 0)
        order = sorted(range(len(ends)), key=lambda at: mesh.layouts.index(ends[at][1]))
        for number, at in enumerate(order):
            before, axis = ends[at]
            is_behind = before > math.prod(other.size for _, other in ends[:at])
            if len(order) > 1 and is_behind:
                raise ShardingError(
                    f"DTensor can't express {sharding.text_of(index)}: two axes on a dim with an unsplit factor in "
                    "front; make the factor in front a dim of its own"
                )
            in_front = before // math.prod(ends[other][1].size for other in order[:number] if other < at)
            found[mesh.axis_names[mesh.layouts.index(axis)]] = PlacementSpec(index, in_front)
            if in_front > 1:
                strided.setdefault("factor" if is_behind else "order", sharding.text_of(index))
    if len(strided) > 1:
        # torch 2.13 undoes strided shards either as an order of axes or as strides, never both.
        raise ShardingError(
            f"DTensor can't gather {strided['order']}, whose axes aren't in the mesh's order, beside "
            f"{strided['factor']}, which has an unsplit factor in front; use the sub-mesh with the axes in "
            f"the order of {strided['order']}, like mesh['tp', 'cp']"
        )
    return tuple(found[name] for name in mesh.axis_names)


def _check_order_of_pending(sharding: Sharding, written: Sequence[tuple[str, str]]) -> None:
    """`ShardingError` where reductions that don't commute, by axis, are written in another order than the mesh's.

    Placements stand in mesh order, and so a tensor that is made of them is resolved in that order.
    """
    mesh = sharding.mesh
    in_order = sorted(written, key=lambda entry: mesh.axis_names.index(entry[1]))
    if list(map(set, classes(written))) != list(map(set, classes(in_order))):
        text, first = (pending_text(mesh, entries) for entries in (sharding.pending, sharding.pending[:1]))
        order = ", ".join(repr(name) for _, name in written)
        raise ShardingError(
            f"'| {text}' is resolved in the order in which it stands, and DTensor keeps only that of the mesh, "
            f"{' '.join(mesh.axis_names)}; resolve {first} first, or use the sub-mesh mesh[{order}]"
        )


def _in_axes(sharding: Sharding, dim: int) -> Slots:
    """A dim split by axes of the mesh itself; `ShardingError` where a size in front of one isn't known."""
    mesh, slots = sharding.mesh, sharding.dims[dim]
    for at, slot in enumerate(slots):
        behind = [layout for other in slots[at + 1 :] for layout in other.layouts]
        if slot.size is None and behind:
            open_ = [name for name, each in zip(sharding.names_of(dim), slots, strict=True) if each.size is None]
            raise ShardingError(
                f"DTensor needs the sizes of the factors in front of '{mesh.called(behind[0])}' in "
                f"{sharding.text_of(dim)}; write them: {' '.join(f'{name}=...' for name in open_)}"
            )
    return Slots([Slot(mesh.splits(_in_order(mesh, slot.layouts)), slot.size) for slot in slots])


def _in_order(mesh: Mesh, layouts: Sequence[Layout]) -> list[str]:
    return _whole(mesh, layouts, mesh.factored(Layout.product(*layouts)))


def _whole(mesh: Mesh, layouts: Sequence[Layout], found: list[str] | None) -> list[str]:
    """The axes of the mesh that were `found` for a product of layouts; `ShardingError` where it cuts one.

    They are in its order (`Mesh.factored`). Where the order means nothing, pieces of an axis may stand apart
    (`Mesh.made_of`).
    """
    if found is None:
        names = list(map(mesh.called, layouts))
        raise ShardingError(
            f"'{' '.join(names)}' isn't a product of whole axes of {mesh!r}, so DTensor can't express it; use a "
            f"sub-mesh that has these axes: mesh[{', '.join(map(repr, names))}]"
        )
    return found


def check_axes_are_whole(sharding: Sharding) -> None:
    """`ShardingError` where a sharding cuts an axis of its mesh, for which DTensor has no placement."""
    for slot in [slot for dim in sharding.dims for slot in dim]:
        _in_order(sharding.mesh, slot.layouts)
    for _, layouts in pending_runs(sharding.pending):
        _whole(sharding.mesh, layouts, sharding.mesh.made_of(layouts))


def check_torch_can(sharding: Sharding, shape: Sequence[int]) -> None:
    """`ShardingError` where DTensor would cut a tensor of this shape otherwise than the sharding says."""
    specs = placement_specs(sharding)
    for index, (dim, extents) in enumerate(zip(sharding.dims, sharding._extents(tuple(shape)), strict=True)):
        count = dim.pieces
        if len(dim) > 1 or extents[0] % count == 0:
            continue
        levels = [layout for layout, spec in zip(sharding.mesh.layouts, specs, strict=True) if spec.dim == index]
        strided = any(spec.dim == index and spec.split_factor > 1 for spec in specs)
        if strided or not same_cuts(dim, split(*levels), extents[0]):
            raise ShardingError(
                f"{sharding.text_of(index)} cuts a dim of {extents[0]} into {count} uneven parts, which DTensor on "
                f"{sharding.mesh!r} would cut in another way; make the size a multiple of {count}, or use a sub-mesh "
                "with these axes in this order"
            )


_KNOWN = ("Replicate", "Shard", "_StridedShard", "Partial")
"""torch's placements by name. What is derived of them means something else: a `_MaskPartial` isn't a sum."""


def sharding_from(mesh: Mesh, placements: tuple[Any, ...], ndim: int, shape: Sequence[int] | None = None) -> Sharding:
    """The sharding of placements on the axes of a mesh; see `Sharding.from_placements`."""
    checked_mesh(mesh)
    if len(placements) != mesh.ndim:
        raise ShardingError(f"{mesh!r} has {mesh.ndim} axes; found {len(placements)} placements")
    ends: list[list[Cut]] = [[] for _ in range(ndim)]
    pending: list[tuple[str, Layout]] = []
    for (axis, layout), placement in zip(mesh.axes.items(), placements, strict=True):
        if type(placement).__name__ not in _KNOWN:
            raise ShardingError(
                f"axis '{axis}' has {shown(placement)}, whose meaning only torch knows; resolve it by torch's own "
                "means, x.redistribute(placements=[...]) with Replicate() or a Shard there"
            )
        dim = getattr(placement, "dim", None)
        op = getattr(placement, "reduce_op", None)
        if op is not None:
            op = {"avg": "mean"}.get(op, op)
            if op not in LINEAR | EXTREMES:
                raise ShardingError(f"a pending '{op}' has no name in axes; resolve it first")
            pending += [(op, layout)] * (layout.size > 1)
        elif dim is not None:
            dim = dim + ndim if dim < 0 else dim
            if not 0 <= dim < ndim:
                raise ShardingError(f"{placement} is about dim {dim} of a tensor with {ndim} dims")
            if layout.size > 1 and not _cut(ends[dim], layout, placement):
                raise ShardingError(
                    f"{placement} on axis '{axis}' doesn't fit what other axes split already; it has no spec"
                )
    dims = list(map(of_cuts, [None] * ndim, ends))
    for index, each in enumerate(ends):
        if len(each) > 1 and each[-1][0] > math.prod(layout.size for _, layout in each[:-1]):
            # FSDP2 makes such placements, and puts other rows on the ranks than they say.
            raise ShardingError(
                f"dim {index} of {list(placements)} on {mesh!r} is split by two axes and by a factor, and torch "
                "doesn't keep to such placements. Where fully_shard made them, give it a shard_placement_fn for "
                "another dim, or make the factor a dim of its own"
            )
    # `_` has no place in a group, so what is left of the dim gets a name.
    names = [("",) * (len(dim) - 1) + (f"inner{at}" if len(dim) > 1 else "",) for at, dim in enumerate(dims)]
    found = Sharding(mesh, tuple(dims), tuple(pending), tuple(names))
    if shape is not None:
        check_torch_can(found, shape)
    return found


def _cut(ends: list[Cut], layout: Layout, placement: Any) -> bool:
    """Adds one more shard to the cuts of a dim: as many unsplit pieces stay in front of it as the placement says.

    False where it doesn't fit what others split already.
    """
    at, end, left = 0, 1, getattr(placement, "split_factor", 1)
    gaps = [before // reach for (before, _), reach in zip(ends, [1, *(b * a.size for b, a in ends)], strict=False)]
    while at < len(ends) and (gaps[at] == 1 or (left > 1 and left % gaps[at] == 0)):
        left, end, at = left // gaps[at], ends[at][0] * ends[at][1].size, at + 1
    if at < len(ends) and gaps[at] % (left * layout.size):
        return False
    ends.insert(at, (end * left, layout))
    return True
