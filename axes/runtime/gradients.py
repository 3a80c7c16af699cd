"""What a gradient is, axis by axis, and with it what the transpose of a redistribution is.

A value is split (S), replicated (R) or pending (P) over an axis. Its gradient, over the same axis:

| value | local view: every rank has a loss, their sum counts | global view: there is one loss |
| --- | --- | --- |
| S | S | S |
| R | P: this rank's summand of it | R |
| `same` | R | R |
| P sum | R | R |
| P mean | R, divided by n | R, divided by n |

(The last row is about each rank's own contribution. As one value, a mean that is pending has the
gradient of the mean; the border between the views multiplies by n.) So the transpose of a
redistribution takes the target's gradient, of the sharding that this table says, to the source's.
Where a replicated value was split, the local view asks for what no collective gives: a gradient that
is pending, of which this rank knows its own slice. It is that slice within zeros.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("tp=2")
>>> whole, split = mesh.sharding("s"), mesh.sharding("s@tp")
>>> str(transposed(split, whole, (frozenset(), frozenset()))[0])       # S -> R: arrives as a summand
's | sum@tp'
>>> [str(found) for found in transposed(whole, split, (frozenset(), frozenset()))[:2]]     # R -> S
['s@tp', 's@tp']
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from axes.algebra.errors import MeshError, ShardingError
from axes.algebra.layout import Layout, Mode, digits
from axes.algebra.mesh import Mesh
from axes.algebra.planning.digits import aligned
from axes.algebra.sharding import Pending, Sharding, Slots, slots_text

Same = frozenset[Mode] | None
"""The digits that are `same` on one side; None for all that are replicated: the global view."""


def of_shards(
    source: Sharding, target: Sharding, source_same: Iterable[Layout], target_same: Iterable[Layout]
) -> tuple[Sharding, Sharding, tuple[frozenset[Mode], frozenset[Mode]]]:
    """Both ends of a redistribution in the local view, on the axes that one side mentions, and what is `same` there.

    Tensors may differ along the other axes, so nothing may be taken from there.
    """
    same = _modes(source_same), _modes(target_same)
    layouts = [*source.used, *target.used, *(Layout.of([digit]) for side in same for digit in side)]
    found = {digit for refined in digits(*layouts) for digit in refined}
    line = Layout.of(sorted(found, key=lambda digit: -digit[1]))
    source, target = (replace(end, mesh=end.mesh.along(line)) for end in (source, target))
    return source, target, same


def _modes(layouts: Iterable[Layout]) -> frozenset[Mode]:
    return frozenset(mode for layout in layouts for mode in layout.modes)


def transposed(source: Sharding, target: Sharding, same: tuple[Same, Same]) -> tuple[Sharding, Sharding, int]:
    """`(arriving, middle, divisor)` of the gradient of a redistribution.

    `arriving` is how the target's gradient lies, `middle` how the source's lies before it is put
    within zeros where `middle` has more splits than the source, and divided by `divisor`: once for
    each rank that takes the whole of a gradient for its summand.
    """
    if target.universe == source.universe:
        target = replace(target, mesh=source.mesh)
    if same == (None, None):
        return target, replace(source, pending=target.pending), 1
    sides = _digits_of(source, target, same)
    replicated_target = [digit for digit in sides.extent if digit not in sides.target]
    replicated_source = [digit for digit in sides.extent if digit not in sides.source]
    still = [digit for digit in replicated_target if digit in replicated_source]
    sliced = {digit for digit in replicated_source if sides.target.get(digit) == "split"}
    whole = [digit for digit in replicated_source if sides.target.get(digit) == "same"]
    dims = tuple(_appended(sides, *pair, sliced) for pair in zip(source.dims, target.dims, strict=True))
    arriving = replace(target, pending=_pending(replicated_target, target))
    middle = replace(source, dims=dims, pending=_pending(still, target))
    return arriving, middle, math.prod(size for size, _ in whole)


def _pending(summands: Iterable[Mode], target: Sharding) -> Pending:
    """Sums over `summands`, and what the target keeps pending: that isn't touched on the way back."""
    return (*[("sum", Layout.of([digit])) for digit in summands], *target.pending)


@dataclass(frozen=True)
class _Digits:
    """Common digits of two shardings: what each does to them, and those of each layout."""

    mesh: Mesh
    extent: tuple[Mode, ...]
    source: Mapping[Mode, str]
    target: Mapping[Mode, str]
    refined: Mapping[Layout, tuple[Mode, ...]]


def _digits_of(source: Sharding, target: Sharding, same: tuple[Same, Same]) -> _Digits:
    used = {layout: None for end in (source, target) for layout in end.used}
    declared = {Layout.of([digit]): None for side in same for digit in side or ()}
    layouts = [source.mesh.extent, *used, *declared]
    try:
        if source.universe != target.universe:
            raise MeshError("they are of different ranks")
        refined = dict(zip(layouts, digits(*layouts), strict=True))
    except MeshError as error:
        raise ShardingError(
            f"in the local view a gradient needs common digits of source and target: {error}\n"
            f"  source  {source}\n  target  {target}"
        ) from None

    def roles(end: Sharding, side: Same) -> dict[Mode, str]:
        found = {digit: "same" for layout in declared for digit in refined[layout] if layout.modes[0] in (side or ())}
        places = [("split", layout) for dim in end.dims for layout in dim.layouts]
        places += [("pending", layout) for _, layout in end.pending]
        for role, layout in places:
            for digit in refined[layout]:
                if digit in found:
                    raise ShardingError(f"'{end.mesh.called(layout)}' can't be same in '{end}': it is {role}")
                found[digit] = role
        return found

    return _Digits(source.mesh, refined[source.mesh.extent], roles(source, same[0]), roles(target, same[1]), refined)


def _appended(sides: _Digits, source: Slots, target: Slots, sliced: Set[Mode]) -> Slots:
    """The source's split of a dim, and after it the target's by digits that the source is replicated over."""
    pair = aligned(source, target)
    if pair is None:
        one, two = (slots_text(sides.mesh, slots) for slots in (source, target))
        raise ShardingError(f"'{one}' and '{two}' split factors of one dim that have no common gradient")
    slots = zip(*pair, strict=True)
    return Slots([replace(a, layouts=(*a.layouts, *_within(sides, b.layouts, sliced))) for a, b in slots])


def _within(sides: _Digits, layouts: Iterable[Layout], sliced: Set[Mode]) -> tuple[Layout, ...]:
    kept = ([digit for digit in sides.refined[layout] if digit in sliced] for layout in layouts)
    return tuple([Layout.of(each) for each in kept if each])
