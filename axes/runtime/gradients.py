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
>>> from axes.algebra.sharding import state_of
>>> mesh = Mesh("tp=2")
>>> whole, split = (state_of(mesh.sharding(spec), (8,)) for spec in ("s", "s@tp"))
>>> str(transposed(split, whole, (frozenset(), frozenset()))[0])       # S -> R: arrives as a summand
'd0 | sum@tp'
>>> [str(state) for state in transposed(whole, split, (frozenset(), frozenset()))[:2]]     # R -> S
['d0@tp', 'd0@tp']
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from axes.algebra.errors import MeshError, ShardingError
from axes.algebra.layout import Layout, Mode, digits
from axes.algebra.state import Factors, Split, State, layout_name, used_layouts

Same = frozenset[Mode] | None
"""The digits that are `same` on one side; None for all that are replicated: the global view."""


def transposed(source: State, target: State, same: tuple[Same, Same]) -> tuple[State, State, int]:
    """`(arriving, middle, divisor)` of the gradient of a redistribution.

    `arriving` is how the target's gradient lies, `middle` how the source's lies before it is put
    within zeros where `middle` has more splits than the source, and divided by `divisor`: once for
    each rank that takes the whole of a gradient for its summand.
    """
    if target.universe == source.universe:
        target = replace(target, extent=source.extent, text=None)
    if same == (None, None):
        return replace(target, text=None), replace(source, pending=target.pending, text=None), 1
    sides = _digits_of(source, target, same)
    replicated_target = [digit for digit in sides.extent if digit not in sides.target]
    replicated_source = [digit for digit in sides.extent if digit not in sides.source]
    still = [digit for digit in replicated_target if digit in replicated_source]
    sliced = [digit for digit in replicated_source if sides.target.get(digit) == "split"]
    whole = [digit for digit in replicated_source if sides.target.get(digit) == "same"]
    splits = tuple(_appended(sides, *pair, sliced) for pair in zip(source.splits, target.splits, strict=True))
    arriving = replace(target, pending=_pending(replicated_target, target), text=None)
    middle = replace(source, splits=splits, pending=_pending(still, target), text=None)
    return arriving, middle, math.prod(size for size, _ in whole)


def _pending(summands: Iterable[Mode], target: State) -> tuple[tuple[str, tuple[Layout, ...]], ...]:
    """Sums over `summands`, and what the target keeps pending: that isn't touched on the way back."""
    layouts = tuple(Layout.of([digit]) for digit in summands)
    return ((("sum", layouts),) if layouts else ()) + target.pending


@dataclass(frozen=True)
class _Digits:
    """Common digits of two states: what each does to them, and those of each layout."""

    extent: tuple[Mode, ...]
    source: Mapping[Mode, str]
    target: Mapping[Mode, str]
    refined: Mapping[Layout, tuple[Mode, ...]]


def _digits_of(source: State, target: State, same: tuple[Same, Same]) -> _Digits:
    used = {layout: None for state in (source, target) for layout in used_layouts(state)}
    declared = {Layout.of([digit]): None for side in same for digit in side or ()}
    layouts = [source.extent, *used, *declared]
    try:
        if source.universe != target.universe:
            raise MeshError("they are of different ranks")
        refined = dict(zip(layouts, digits(*layouts), strict=True))
    except MeshError as error:
        raise ShardingError(
            f"in the local view a gradient needs common digits of source and target: {error}\n"
            f"  source  {source}\n  target  {target}"
        ) from None

    def roles(state: State, side: Same) -> dict[Mode, str]:
        found = {digit: "same" for layout in declared for digit in refined[layout] if layout.modes[0] in (side or ())}
        pending = {layout for _, layouts in state.pending for layout in layouts}
        for layout in used_layouts(state):
            for digit in refined[layout]:
                if digit in found:
                    raise ShardingError(
                        f"'{layout_name(state, layout)}' can't be same in '{state}': it is "
                        + ("pending" if layout in pending else "split")
                    )
                found[digit] = "pending" if layout in pending else "split"
        return found

    return _Digits(refined[source.extent], roles(source, same[0]), roles(target, same[1]), refined)


def _appended(sides: _Digits, source: Split, target: Split, sliced: Iterable[Mode]) -> Split:
    """The source's split of a dim, and after it the target's by digits that the source is replicated over."""
    if isinstance(target, Factors) or isinstance(source, Factors):
        sizes = target.sizes if isinstance(target, Factors) else source.sizes if isinstance(source, Factors) else ()
        mine, theirs = _factors(source, sizes), _factors(target, sizes)
        pairs = zip(mine, theirs, strict=True)
        return Factors(sizes, tuple((*one, *_within(sides, two, sliced)) for one, two in pairs))
    return (*source, *_within(sides, target, sliced))


def _within(sides: _Digits, layouts: Iterable[Layout], sliced: Iterable[Mode]) -> tuple[Layout, ...]:
    wanted = set(sliced)
    found = []
    for layout in layouts:
        if layout.size > 1:
            kept = [digit for digit in sides.refined[layout] if digit in wanted]
            found += [Layout.of(kept)] if kept else []
    return tuple(found)


def _factors(split: Split, sizes: tuple[int, ...]) -> tuple[tuple[Layout, ...], ...]:
    if isinstance(split, Factors):
        if split.sizes != sizes:
            raise ShardingError(f"factors of {split.sizes} and {sizes} of one dim have no common gradient")
        return split.splits
    # An ordinary split is one of the major factor, where that divides.
    parts = math.prod(layout.size for layout in split)
    if parts > 1 and sizes[0] % parts:
        raise ShardingError(f"a dim of factors {sizes} is split into {parts} across them; it has no gradient here")
    return (split, *((),) * (len(sizes) - 1))
