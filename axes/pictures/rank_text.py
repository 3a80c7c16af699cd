"""Ranks as text that stays short: runs and ranges as such, and of many the first and the last.

>>> short_ranks(range(8)), short_ranks(range(0, 16, 4)), short_ranks([0, 1, 8, 9]), short_ranks([3])
('0..7', '0 4 8 12', '0 1 8 9', '3')
>>> short_ranks(range(7232, 60000, 16384)), short_ranks([at + i for at in range(0, 4096, 8) for i in range(4)], 36)
('7232 23616 40000 56384', '0..3 8..11 16..19 24..27 .. 4091')
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice

from axes import Layout, MeshError
from axes.extension import Universe

LEFT_OUT = ".."
"""What stands for what is left out."""

MOST_RUNS = 64
"""Of more runs than this only the first are looked for, and the last rank."""


def short_ranks(ranks: Sequence[int], width: int = 64) -> str:
    """Ranks in their order: `0 4`, `0..7`, `0..56 step 8`; as many as fit in `width` columns.

    A run is left out rather than cut, so that every number in the text is a rank.

    >>> short_ranks([0, 4, 8, 12, 1, 5, 9, 13], 12), short_ranks(range(1000, 9000, 7), 9)
    ('0 4 8 .. 13', '1,143 ranks')
    >>> short_ranks([3, 11, 19, 27, 35])
    '3..35 step 8'
    """
    ranks = Universe.of(ranks).ranks if ranks else ()  # a range where they are evenly spaced
    runs = list(islice(runs_of(ranks), MOST_RUNS + 1))
    runs[MOST_RUNS:] = [ranks[-1:]] * (len(runs) > MOST_RUNS)
    texts = list(map(_run, runs))
    short = joined(len(texts), texts.__getitem__, " ", width, "")
    return short or joined(len(ranks), lambda at: str(ranks[at]), " ", width, f"{len(ranks):,} ranks")


def runs_of(ranks: Sequence[int]) -> Iterator[Sequence[int]]:
    """The runs of consecutive ranks; a range as it is.

    >>> list(runs_of([0, 1, 2, 8, 9, 12]))
    [[0, 1, 2], [8, 9], [12]]
    """
    if isinstance(ranks, range):
        yield ranks
        return
    for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        yield [rank for _, rank in run]


def _run(run: Sequence[int]) -> str:
    step = run[1] - run[0] if len(run) > 1 else 1
    short = f"{run[0]}..{run[-1]}" + ("" if step == 1 else f" step {step}")
    if len(run) > 2 and (step == 1 or len(run) > 4):
        return short
    return " ".join(map(str, run))


def joined(count: int, text: Callable[[int], str], separator: str, width: int, instead: str) -> str:
    """`count` texts with the last one, and as many of the first as fit; `instead` where not even these two do.

    Asks only for the texts that it shows, so `count` may be large.

    >>> joined(1000, str, " ", 20, "many")
    '0 1 2 3 4 5 6 .. 999'
    """
    whole = separator.join(map(text, range(min(count, width + 2))))
    if count <= width + 1 and len(whole) <= width:
        return whole
    shown, last = list[str](), f"{LEFT_OUT} {text(count - 1)}"
    for at in range(min(count - 1, width)):
        if len(separator.join([*shown, text(at), last])) > width:
            break
        shown.append(text(at))
    return separator.join([*shown, last]) if shown else instead


def groups_text(universe: Universe, layout: Layout, width: int) -> str:
    """The groups that the ranks form along a layout, as many as fit; "" where not even two do.

    An adopted slice of a job says nothing of the ranks beside it: of its groups "" is said, too.

    >>> groups_text(Universe.of(range(16)), Layout((2,), (8,)), 20)
    '0 8, 1 9, .. 7 15'
    """
    firsts = layout.complement(universe.size)

    def group(number: int) -> str:
        return short_ranks(universe.group(layout, universe.ranks[firsts.offset(number)]), width)

    with contextlib.suppress(MeshError):
        return "" if group(0).endswith(" ranks") else joined(firsts.size, group, ", ", width, "")
    return ""


def time_text(microseconds: float) -> str:
    """A time in the unit that reads best.

    >>> time_text(61.94), time_text(2500.0), time_text(0.25), time_text(3.2e6)
    ('62 us', '2.5 ms', '0.2 us', '3.2 s')
    """
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.1f} {unit}"
    return f"{microseconds:.1f} us" if microseconds < 10 else f"{microseconds:.0f} us"


def seen_rank(rank: int | None, of: str, ranks: Sequence[int], own: Callable[[], int]) -> int:
    """The rank from which something of these ranks is seen: without one this rank, or the first where it has no part.

    own: this rank; `MeshError` where its job has ended.

    >>> seen_rank(None, "a mesh", range(4, 8), lambda: 5), seen_rank(None, "a mesh", range(4, 8), lambda: 0)
    (5, 4)
    >>> seen_rank(3, "a mesh", range(4, 8), lambda: 5)
    Traceback (most recent call last):
    axes.algebra.errors.MeshError: rank 3 isn't one of the ranks of a mesh
    """
    if rank is not None and rank not in ranks:
        raise MeshError(f"rank {rank} isn't one of the ranks of {of}")
    with contextlib.suppress(MeshError):
        rank = own() if rank is None else rank
    return rank if rank is not None and (rank in ranks or not ranks) else ranks[0]
