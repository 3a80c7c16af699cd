"""A plan as a sheet: each step, between whom it moves what, how many bytes, and how long that takes.

What a rank is sent is said by the step's `arrivals`. A mesh of few ranks is drawn, too.

>>> from axes.algebra.mesh import Mesh
>>> from axes.algebra.plan import plan
>>> from axes.show.in_text import lines_of, plain
>>> from axes.show.panels import Room
>>> mesh = Mesh("tp=2")
>>> made = plan(mesh.sharding("s@tp d"), mesh.sharding("s d@tp"), (1024, 512))
>>> print(plain(lines_of(sheet_of_plan(made, Room()), 80)))
s@tp d -> s d@tp     [1024, 512] float32
1 collective: 512.0 KiB in, 512.0 KiB out, about 23 us; peak memory 3.0 MiB
<BLANKLINE>
         lies as  rank 0 holds
before   s@tp d   512 x 512     1.0 MiB
after 1  s d@tp   1024 x 256    1.0 MiB
<BLANKLINE>
1  all_to_all over tp: 512.0 KiB in, 512.0 KiB out, about 23 us
   1 group of 2: 0 1
<BLANKLINE>
   what goes from whom to whom:
from  to        [0]          1
[0]          [stays] 512.0 KiB
1         512.0 KiB      stays
<BLANKLINE>
rank 0 has from                           bytes
0, itself        s 0:512  d 0:256     512.0 KiB
1                s 512:1024  d 0:256  512.0 KiB
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

from axes.algebra.chunks import Tile, volume
from axes.algebra.plan import Plan, Step, bytes_text, itemsize_of
from axes.show.moves import MOST, moves_of_plan
from axes.show.panels import Listing, Panel, Remark, Room, Sheet, exchange_board, few_rows
from axes.show.rank_text import LEFT_OUT, groups_text, short_ranks, time_text
from axes.show.sharding_sheet import dim_names

PEERS = 1024
"""In a group of more ranks than this nobody is asked what it receives: that takes a time for each of them."""


def sheet_of_plan(made: Plan, room: Room) -> Sheet:
    """The picture of a plan, seen from its rank."""
    names, total = dim_names(made.source), _total(made)
    panels: list[Panel] = [Remark((total,), close=True)]
    if made.source.universe == made.target.universe and made.source.universe.size <= MOST and all(made.shape):
        panels.append(moves_of_plan(made, names))
    panels.append(_tiles(made))
    for number, step in enumerate(made.steps, 1):
        panels += _step(made, number, step, names, room)
    title = f"{made.source} -> {made.target}     {list(made.shape)} {made.dtype}"
    steps = "; ".join(f"{step.kind} over {' '.join(step.axes)}" if step.axes else step.kind for step in made.steps)
    return Sheet(title, f"What moves in the plan {title}: {steps or 'nothing'}. {total}.", tuple(panels))


def _total(made: Plan) -> str:
    if not made.collectives:
        return "nothing is sent" if made.steps else "nothing to do"
    count = "1 collective" if made.collectives == 1 else f"{made.collectives} collectives"
    return f"{count}: {_cost(made)}; peak memory {bytes_text(made.peak_bytes)}"


def _cost(of: Plan | Step) -> str:
    return f"{bytes_text(of.bytes_in)} in, {bytes_text(of.bytes_out)} out, about {time_text(of.cost)}"


def _tiles(made: Plan) -> Listing:
    """What this rank has before the first step and after each."""
    rows = []
    for at, sharding in enumerate(made.states):
        tile, size = "nothing", ""
        if sharding.universe.position(made.rank) is not None:
            local = sharding.local_shape(made.shape, made.rank)
            tile = " x ".join(map(str, local)) or "one number"
            size = bytes_text(math.prod(local) * itemsize_of(made.dtype))
        rows.append((f"after {at}" if at else "before", str(sharding), tile, size))
    return Listing(("", "lies as", f"rank {made.rank} holds", ""), tuple(rows), right=(3,))


def _step(made: Plan, number: int, step: Step, names: Sequence[str], room: Room) -> Iterator[Panel]:
    if step.kind == "slice":
        yield Remark((f"{number}  {step.kind}: each rank takes a part of what it has; nothing is sent",))
        return
    over = f" over {' '.join(step.axes)}" if step.axes else ""
    lines = [f"{number}  {step.kind}{over}: {_cost(step)}", f"   {_groups(step, room.width - 3)}"]
    ranks = step.ranks
    if not ranks:
        lines.append(f"   rank {made.rank} takes no part")
    elif len(ranks) > PEERS:
        lines.append(f"   (in a group of more than {PEERS:,} it isn't listed who sends what)")
    yield Remark(tuple(lines))
    if not 0 < len(ranks) <= PEERS or math.prod(step.shape) == 0:
        return

    @functools.lru_cache(maxsize=4096)
    def came(rank: int) -> dict[int, Tile]:
        """What comes to a rank, by the rank that it comes from."""
        return {peer: tile for _, peer, tile in step.arrivals(rank) if volume(tile)}

    def count(sender: int, receiver: int) -> int:
        return volume(came(receiver)[sender]) * itemsize_of(made.dtype) if sender in came(receiver) else 0

    def row(at: int) -> tuple[str, ...]:
        peer, tile = received[at]
        first = "  ".join(f"{name} {start}:{stop}" for name, ((start, stop), *_) in zip(names, tile, strict=True))
        boxes = math.prod(map(len, tile)) - 1
        more = f" and {boxes:,} more boxes" if boxes else ""
        size = bytes_text(volume(tile) * itemsize_of(made.dtype))
        return f"{peer}{', itself' * (peer == made.rank)}", first + more, size

    ends = [[rank for rank in ranks if end.universe.position(rank) is not None] for end in (step.source, step.target)]
    what = "summands that go" if "reduce" in step.kind else "what goes"
    tone = step.source.universe.position
    yield exchange_board(ends[0], ends[1], made.rank, [], count, tone, room, f"{what} from whom to whom")
    received = sorted(came(made.rank).items(), key=lambda each: ranks.index(each[0]))
    if received:
        rows = few_rows(len(received), row, 6)
        yield Listing((f"rank {made.rank} has from", "", "bytes"), rows, right=(2,))


def _groups(step: Step, width: int) -> str:
    """Who communicates with whom."""
    if step.layout is None:
        return f"one group of all ranks: {short_ranks(step.ranks, width - 24)}"
    number = step.source.universe.size // step.group_size
    many = f"{number:,} group{'s' * (number != 1)} of {step.group_size:,}: "
    text = groups_text(step.source.universe, step.layout, width - len(many))
    return many + (text or f"{short_ranks(step.ranks, width - 24)}, {LEFT_OUT}")
