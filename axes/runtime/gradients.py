"""What a gradient is, axis by axis, and with it what the transpose of a redistribution is.

A value is split (S), replicated (R) or pending (P) over an axis. Its gradient, over the same axis:

| value | local view: every rank has a loss, their sum counts | global view: there is one loss |
| --- | --- | --- |
| S | S | S |
| R | P: this rank's summand of it | as it arrives: whole, split or pending |
| `same` | R | |
| P sum | R | R |
| P mean | R, divided by n | R, divided by n |

(The last row is about each rank's own contribution. As one value, a mean that is pending has the gradient of the mean;
the border between the views multiplies by n.)

`cotangent` is the column of the local view. A gradient that arrives, in whatever sharding, is brought to what the value
requires (`axes.algebra.expressions.required`): split where the value is, whole where it is pending or `same`, elsewhere
as it arrived. For a rank's own tensor that is a summand: the slice of a rank that has only a slice is put within zeros,
and what several ranks have whole is divided among them (`copies`).

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("tp=2")
>>> whole, split = mesh.sharding("s"), mesh.sharding("s@tp")
>>> str(transposed(split, whole)[0])       # S -> R: arrives as a summand
's | sum@tp'
>>> [str(found) for found in transposed(whole, split)[:2]]     # R -> S
['s@tp', 's@tp']
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from axes.algebra.errors import ShardingError
from axes.algebra.expressions import required
from axes.algebra.layout import Digit, Layout, digits
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import Sharding, unmarked
from axes.algebra.splits import Digits


def cotangent(value: Sharding) -> Sharding:
    """How the ranks' gradients of their tensors lie as one value, where these are a value that lies so.

    What is `same` stands among what is pending, as `axes.algebra.sharding.unmarked` takes it apart.
    """
    return replace(value, pending=tuple([("sum", Layout.of([digit])) for digit in _replicated(value)]))


def copies(value: Sharding, arrived: Sharding) -> int:
    """How many ranks have the whole of a gradient, lying so, of which each takes a part for its own tensor."""
    return math.prod([size for size, _ in _replicated(value, arrived)])


def _replicated(*shardings: Sharding) -> list[Digit]:
    """The digits of the mesh over which all of these are replicated."""
    mesh, used = shardings[0].mesh, [layout for each in shardings for layout in each.used]
    found = Digits(mesh, [mesh.extent, *used])
    taken = {*found.of(used)}
    return [digit for digit in found.of([mesh.extent]) if digit not in taken]


def of_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The same of a DTensor's placements.

    >>> from torch.distributed.tensor import Shard
    >>> of_placements([Shard(0), Replicate(), Partial("sum")])
    (Shard(dim=0), Partial(sum), Replicate())
    """
    return tuple(Partial("sum") if p.is_replicate() else Replicate() if p.is_partial() else p for p in placements)


def on_own_axes(source: Sharding, target: Sharding) -> tuple[Sharding, Sharding]:
    """Both ends of a redistribution of plain tensors, on the axes that one side mentions.

    Tensors may differ along the other axes, so nothing may be taken from there.
    """
    used = {digit for refined in digits(*source.used, *target.used) for digit in refined}
    line = Layout.of(sorted(used, key=lambda digit: -digit[1]))
    one, two = (replace(end, mesh=end.mesh.along(line)) for end in (source, target))
    return one, two


def gradient_sharding(source: Sharding, arrived: Sharding, shape: tuple[int, ...]) -> Sharding:
    """What sharding the gradient of a value gets, by that of the cotangent that arrives.

    >>> from axes.algebra.mesh import Mesh
    >>> mesh = Mesh("dp=2 tp=2")
    >>> gradient_sharding(mesh.sharding("b@dp d"), mesh.sharding("b d | sum@(dp tp)"), (4, 4)).spec
    'b@dp d | sum@tp'
    """
    plain = replace(source, pending=())
    if source.mesh.universe != arrived.mesh.universe or source.mesh.layouts != arrived.mesh.layouts:
        return plain
    arrived = arrived.on(source.mesh)
    try:
        found = required(source.sized(shape), arrived.sized(shape))
        check_torch_can(found, shape)
    except ShardingError:
        # What is kept as it arrived may not fit the dims of the source; then it is gathered.
        return required(source.sized(shape), arrived.sized(shape), lazy=False)
    return found


def transposed(source: Sharding, target: Sharding) -> tuple[Sharding, Sharding, int]:
    """`(arriving, middle, divisor)` of the gradient of a redistribution in the local view.

    `arriving` is how the target's gradient lies, `middle` how the source's lies before it is put within zeros where
    `middle` has more splits than the source, and divided by `divisor`. What the target keeps pending isn't touched on
    the way back.
    """
    arriving, kept = cotangent(target), unmarked(target)[0].pending
    middle = required(source, arriving)
    divisor = copies(source, middle)
    arriving, middle = (replace(end, pending=(*end.pending, *kept)) for end in (arriving, middle))
    return arriving, middle, divisor
