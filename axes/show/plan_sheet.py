"""A plan as a sheet: what it says of itself, how the tensor lies after each step, and who sends how much to whom.

What a rank is sent is said by the step's `arrivals`. A mesh of few ranks is drawn, too.

>>> from axes.algebra.mesh import Mesh
>>> from axes.algebra.plan import plan
>>> from axes.show.in_text import lines_of, plain
>>> from axes.show.panels import Room
>>> mesh = Mesh("tp=2")
>>> made = plan(mesh.sharding("s@tp d"), mesh.sharding("s d@tp"), (1024, 512))
>>> print(plain(lines_of(sheet_of_plan(made, Room()), 80)))
s@tp d -> s d@tp     [1024, 512] float32
1  all_to_all  tp  2 ranks, stride 1  512.0 KiB in, 512.0 KiB out
about 23 us; peak memory 3.0 MiB
<BLANKLINE>
         lies as  rank 0 holds
before   s@tp d   512 x 512
after 1  s d@tp   1024 x 256
<BLANKLINE>
1  all_to_all in 1 group of 2: 0 1
<BLANKLINE>
   what goes from whom to whom:
from  to        [0]          1
[0]         [stays] 512.0 KiB
1         512.0 KiB      stays
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from axes.algebra.chunks import volume
from axes.algebra.plan import Plan, Step, bytes_text, itemsize_of
from axes.algebra.sharding import Sharding
from axes.show.moves import MOST, moves_of_plan
from axes.show.panels import Listing, Panel, Remark, Room, Sheet, exchange_board
from axes.show.rank_text import LEFT_OUT, groups_text, short_ranks, time_text
from axes.show.sharding_sheet import dim_names

PEERS = 1024
"""In a group of more ranks than this nobody is asked what it receives: that takes a time for each of them."""


def sheet_of_plan(made: Plan, room: Room) -> Sheet:
    """The picture of a plan, seen from its rank."""
    title, *lines = str(made).split("\n")
    if made.collectives:
        lines.append(f"about {time_text(made.cost)}; peak memory {bytes_text(made.peak_bytes)}")
    panels: list[Panel] = [Remark(tuple(line.strip() for line in lines), close=True)]
    if made.source.universe == made.target.universe and made.source.universe.size <= MOST:
        panels.append(moves_of_plan(made, dim_names(made.source)))
    rows = ((f"after {at}" if at else "before", str(each), _held(each, made)) for at, each in enumerate(made.states))
    panels.append(Listing(("", "lies as", f"rank {made.rank} holds"), tuple(rows)))
    for number, step in enumerate(made.steps, 1):
        panels += _step(made, number, step, room) if step.group_size > 1 else []
    return Sheet(title, f"What moves in the plan {title}: {'; '.join(lines)}.", tuple(panels))


def _held(state: Sharding, made: Plan) -> str:
    """The shape that this rank has of the tensor."""
    if state.universe.position(made.rank) is None:
        return "nothing"
    return " x ".join(map(str, state.local_shape(made.shape, made.rank))) or "one number"


def _step(made: Plan, number: int, step: Step, room: Room) -> Iterator[Panel]:
    """Who communicates with whom, and how much each sends to each in the group of the rank."""
    ranks = step.ranks
    yield Remark((f"{number}  {step.kind} {_groups(step, room.width - len(step.kind) - 5)}",))
    if not 0 < len(ranks) <= PEERS:
        return

    @functools.cache
    def came(rank: int) -> dict[int, int]:
        """How many elements come to a rank, by the rank that they come from."""
        return {peer: volume(tile) for _, peer, tile in step.arrivals(rank)}

    def count(sender: int, receiver: int) -> int:
        return came(receiver).get(sender, 0) * itemsize_of(made.dtype)

    senders, receivers = (
        [rank for rank in ranks if end.universe.position(rank) is not None] for end in (step.source, step.target)
    )
    what = "summands that go" if "reduce" in step.kind else "what goes"
    tone = step.source.universe.position
    yield exchange_board(senders, receivers, made.rank, [], count, tone, room, f"{what} from whom to whom")


def _groups(step: Step, width: int) -> str:
    """Who communicates with whom."""
    if step.layout is None:
        return f"among all ranks: {short_ranks(step.ranks, width - 17)}"
    number = step.source.universe.size // step.group_size
    many = f"in {number:,} group{'s' * (number != 1)} of {step.group_size:,}: "
    text = groups_text(step.source.universe, step.layout, width - len(many))
    return many + (text or f"{short_ranks(step.ranks, width - 24)}, {LEFT_OUT}")
