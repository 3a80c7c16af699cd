"""Splits: where layouts cut a dim, handed down from a dim to the names in it and back.

How a name is split is told as of a dim, by `Slots`. A dim that is a group of names hands its splits down to them
(`handed_down`), and takes those of its names together (`of_names`).

>>> from axes.algebra.mesh import Mesh
>>> tp = Mesh("tp=2").layout("tp")
>>> handed_down(split(tp), [6, 2]) == [split(tp), split()]
True
>>> handed_down(split(tp), [3, 5]) is None       # 15 is cut into 8 and 7
True
>>> of_names([(split(), 3), (split(tp), 4)])
(Slot(layouts=(), size=3), Slot(layouts=(2:1,), size=4))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from axes.algebra.errors import ShardingError
from axes.algebra.layout import Digit, Layout, digits
from axes.algebra.mesh import Mesh
from axes.algebra.sharding import Cut, Slot, Slots, cuts, sized


def split(*layouts: Layout) -> Slots:
    """A dim that is split over layouts, major first; over none, unsplit."""
    return Slots((Slot(layouts),))


def _divided(slots: Slots) -> int:
    """A size that everything in a dim divides: an empty dim is split as one of this size."""
    return math.prod([slot.size or 2 * slot.pieces for slot in slots])


def of_cuts(extent: int | None, found: Iterable[Cut]) -> Slots:
    """The dim that is split so, of any size or this one: one slot more wherever a cut leaves a gap."""
    slots: list[Slot] = []
    start, layouts = 1, tuple[Layout, ...]()
    for before, layout in found:
        if before != start * math.prod([each.size for each in layouts]):
            slots.append(Slot(layouts, before // start))
            start, layouts = before, ()
        layouts = (*layouts, layout)
    return Slots((*slots, Slot(layouts, extent // start if extent and slots else None)))


def handed_down(slots: Slots, sizes: Sequence[int]) -> list[Slots] | None:
    """How the names in a dim are split, by their sizes, or None where a cut doesn't fall on them evenly.

    A layout goes to the name that its cuts lie in; a name that is split completely passes the next one on. A name
    without elements is split as one that all layouts of the dim divide, and its size stays open.
    """
    if len(sizes) == 1 and slots.is_plain:
        return [slots]
    found: list[list[Cut]] = [[] for _ in sizes]
    empty = [size == 0 for size in sizes]
    sizes = [size or _divided(slots) for size in sizes]
    every = cuts(slots, math.prod(sizes))
    large = [at for at, size in enumerate(sizes) if size > 1]
    if len(large) < 2 and sizes:
        found[large[0] if large else 0] = every
    else:
        at, front = 0, 1
        for before, layout in every:
            while at + 1 < len(sizes) and before >= front * sizes[at]:
                front *= sizes[at]
                at += 1
            if before % front or sizes[at] % (before // front * layout.size):
                return None
            found[at].append((before // front, layout))
    splits = map(of_cuts, sizes, found)
    return [_open(split) if is_empty else split for split, is_empty in zip(splits, empty, strict=True)]


def of_names(names: Sequence[tuple[Slots, int]]) -> Slots:
    """The dim that consists of names that are split so, with these sizes.

    Raises `ShardingError` where their shards aren't regular shards of the dim.
    """
    if len(names) < 2:
        return names[0][0] if names else Slots((Slot((), 1),))
    every = [slot for slots, extent in names for slot in sized(slots, extent or _divided(slots))]
    found: list[Slot] = []
    large = [slot for slot in every if slot.size != 1 or slot.pieces != 1]
    for slot in large:
        size, last = slot.size or 1, found[-1] if found else None
        if len(large) > 1 and size % slot.pieces:
            raise ShardingError(
                f"a factor of {size} is split into {slot.pieces} uneven parts; inside a group it must divide"
            )
        # Pieces that are used up hand the rest of the split on to what follows.
        if last and (not (last.layouts or slot.layouts) or (last.layouts and last.size == last.pieces)):
            found[-1] = Slot((*last.layouts, *slot.layouts), (last.size or 1) * size)
        else:
            found.append(slot)
    if not any(slot.layouts for slot in found[1:]):
        return split(*(found[0].layouts if found else ()))
    return Slots(found) if all(size for _, size in names) else _open(Slots(found))


def _open(slots: Slots) -> Slots:
    """The dim with a last slot whose size follows from the others, as of an empty dim."""
    return Slots((*slots[:-1], slots[-1]._replace(size=None)))


class Digits:
    """Layouts as sets of digits that all of them share: their common refinement."""

    def __init__(self, mesh: Mesh, layouts: Iterable[Layout]):
        self.mesh = mesh
        every = tuple(dict.fromkeys(layouts))
        self._of = dict(zip(every, digits(*every), strict=True))

    def of(self, layouts: Iterable[Layout]) -> tuple[Digit, ...]:
        """The digits of layouts in order."""
        return tuple([digit for layout in layouts for digit in self._of[layout]])

    def shared(self, uses: Iterable[tuple[str, Layout]]) -> tuple[Layout, str, str] | None:
        """A layout of which a digit is used twice, and the two that use it; None where each is used once."""
        owner: dict[Digit, str] = {}
        for what, layout in uses:
            for digit in self.of((layout,)):
                if owner.setdefault(digit, what) != what:
                    return layout, owner[digit], what
        return None

    def pick(self, layout: Layout, wanted: frozenset[Digit]) -> tuple[Layout, ...]:
        """What of a layout consists of the digits in `wanted`."""
        mine = self._of[layout]
        if all(digit in wanted for digit in mine):
            return (layout,)
        return self.mesh.parts(Layout.of(digit for digit in mine if digit in wanted))
