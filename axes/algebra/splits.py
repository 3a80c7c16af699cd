"""Splits: where layouts cut a dim, handed down from a dim to the names in it and back.

`Slots` say how a name is split, as they do of a dim. A dim that is a group of names hands its splits down to them
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
from axes.algebra.sharding import Cut, Slot, Slots, cuts, of_cuts


def split(*layouts: Layout) -> Slots:
    """A dim that is split over layouts, major first; over none, unsplit."""
    return Slots((Slot(layouts),))


def _divided(slots: Slots) -> int:
    """A size that everything in a dim divides: an empty dim is split as one of this size."""
    return math.prod([slot.size or 2 * slot.pieces for slot in slots])


def handed_down(slots: Slots, sizes: Sequence[int]) -> list[Slots] | None:
    """How the names in a dim are split, by their sizes, or None where a cut doesn't fall on them evenly.

    A layout goes to the name that its cuts lie in; a name that is split completely passes the next one on. A name
    without elements is split as one that all layouts of the dim divide, and its size stays open.
    """
    if len(sizes) == 1 and slots.is_plain:
        return [slots]
    found: list[list[Cut]] = [[] for _ in sizes]
    known, sizes = [size or None for size in sizes], [size or _divided(slots) for size in sizes]
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
    return list(map(of_cuts, known, found))


def of_names(names: Sequence[tuple[Slots, int]]) -> Slots:
    """The dim that consists of names that are split so, with these sizes.

    Raises `ShardingError` where their shards aren't regular shards of the dim.
    """
    if len(names) < 2:
        return names[0][0] if names else Slots((Slot((), 1),))
    found, front = list[Cut](), 1
    large = [slots for slots, extent in names if extent != 1 or slots.pieces != 1]
    for slots, extent in names:
        size = extent or _divided(slots)
        if len(large) > 1 and size % slots.pieces:
            raise ShardingError(
                f"a factor of {size} is split into {slots.pieces} uneven parts inside a group, where it must divide"
            )
        found += [(front * before, layout) for before, layout in cuts(slots, size)]
        front *= size
    return of_cuts(front if all(size for _, size in names) else None, found)


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
        return self.mesh.parts(Layout._joined([digit for digit in mine if digit in wanted]))
