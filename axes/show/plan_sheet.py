"""A plan as a sheet: each step, between whom it moves what, how many bytes, and how long that takes.

What a rank is sent is said by `arrivals` of `axes.show.picture`, from the boxes of the step's exchange. A mesh
of few ranks is drawn, too.

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
   one group of 2: 0 1
<BLANKLINE>
   what goes from whom to whom:
from  to          0          1
0            [stays] 512.0 KiB
1         512.0 KiB      stays
<BLANKLINE>
rank 0 has from                           bytes
0, itself        s 0:512  d 0:256     512.0 KiB
1                s 512:1024  d 0:256  512.0 KiB
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from axes.algebra.chunks import Box
from axes.algebra.errors import MeshError
from axes.algebra.plan import Plan, Step, bytes_text, itemsize_of, time_text
from axes.algebra.planning.candidates import COLLECTIVES
from axes.algebra.sharding import Sharding
from axes.show.panels import Board, Cell, Drawing, Head, Listing, Panel, Remark, Room, Sheet
from axes.show.picture import MOST, arrivals, of_plan
from axes.show.rank_text import LEFT_OUT, folded, joined, short_ranks

PEERS = 1024
"""In a group of more ranks than this nobody is asked what it receives: that takes a time for each of them."""

_REDUCING = ("all_reduce", "reduce_scatter", "reduce_move")


def sheet_of_plan(made: Plan, room: Room) -> Sheet:
    """The picture of a plan, seen from its rank."""
    names = dim_names(made.source)
    panels: list[Panel] = [Remark((_total(made),), close=True)]
    if _is_drawn(made):
        shape = ["b" if len(made.shape) > 2 and at < len(made.shape) - 2 else name for at, name in enumerate(names)]
        panels.append(Drawing(of_plan(made, made.source.mesh, names, frozenset(shape[:-2]) - set(shape[-2:]))))
    panels.append(_tiles(made))
    for number, step in enumerate(made.steps, 1):
        panels += _step(made, number, step, names, room)
    title = f"{made.source} -> {made.target}     {list(made.shape)} {made.dtype}"
    steps = "; ".join(f"{step.kind} over {' '.join(step.axes)}" if step.axes else step.kind for step in made.steps)
    return Sheet(title, f"What moves in the plan {title}: {steps or 'nothing'}. {_total(made)}.", tuple(panels))


def dim_names(sharding: Sharding) -> tuple[str, ...]:
    """The dims as the spec calls them, without their axes; by their number where they have no name."""
    whole = replace(sharding, dims=tuple([dim.unsplit for dim in sharding.dims]), pending=())
    texts = map(whole.text_of, range(whole.ndim))
    return tuple(f"dim {at}" if text == "_" else text for at, text in enumerate(texts))


def _is_drawn(made: Plan) -> bool:
    one, two = made.source.universe, made.target.universe
    return one == two and one.size <= MOST and math.prod(made.shape) > 0


def _total(made: Plan) -> str:
    if not made.collectives:
        return "nothing is sent" if made.steps else "nothing to do"
    count = "1 collective" if made.collectives == 1 else f"{made.collectives} collectives"
    moved = f"{bytes_text(made.bytes_in)} in, {bytes_text(made.bytes_out)} out"
    return f"{count}: {moved}, about {time_text(made.cost)}; peak memory {bytes_text(made.peak_bytes)}"


def _tiles(made: Plan) -> Listing:
    """What this rank has before the first step and after each."""
    itemsize = itemsize_of(made.dtype)
    rows = []
    stages = [(f"after {at}" if at else "before", state) for at, state in enumerate(made.states)]
    for name, sharding in stages:
        held = sharding.universe.position(made.rank) is not None
        local = sharding.local_shape(made.shape, made.rank) if held else None
        tile = "nothing" if local is None else " x ".join(map(str, local)) or "one number"
        size = "" if local is None else bytes_text(math.prod(local) * itemsize)
        rows.append((name, str(sharding), tile, size))
    return Listing(("", "lies as", f"rank {made.rank} holds", ""), tuple(rows), right=(3,))


def _step(made: Plan, number: int, step: Step, names: Sequence[str], room: Room) -> Iterator[Panel]:
    if step.kind not in COLLECTIVES:
        yield Remark((f"{number}  {step.kind}: each rank takes a part of what it has; nothing is sent",))
        return
    over = f" over {' '.join(step.axes)}" if step.axes else ""
    moved = f"{bytes_text(step.bytes_in)} in, {bytes_text(step.bytes_out)} out"
    lines = [
        f"{number}  {step.kind}{over}: {moved}, about {time_text(step.cost)}",
        f"   {_groups(step, room.width - 3)}",
    ]
    ranks = step.ranks
    if not ranks:
        yield Remark((*lines, f"   rank {made.rank} takes no part"))
        return
    if len(ranks) > PEERS or math.prod(step.shape) == 0:
        more = [f"   (in a group of more than {PEERS:,} it isn't listed who sends what)"] if len(ranks) > PEERS else []
        yield Remark((*lines, *more))
        return
    yield Remark(tuple(lines))
    yield _between(made, step, ranks, room)
    received = _received(made, step, ranks, names)
    if received.rows:
        yield received


def _groups(step: Step, width: int) -> str:
    """Who communicates with whom."""
    if step.layout is None:
        return f"one group of all ranks: {short_ranks(step.ranks, width - 24)}"
    universe, layout = step.source.universe, step.layout
    try:
        firsts = layout.complement(universe.size)
    except MeshError:
        return f"a group of {step.group_size:,}: {short_ranks(step.ranks, width - 20)}"
    many = f"{firsts.size:,} groups" if firsts.size > 1 else "one group"
    count = f"{many} of {step.group_size:,}: "

    def group(number: int) -> str:
        return short_ranks(universe.group(layout, universe.ranks[firsts.offset(number)]), width - len(count))

    return count + joined(firsts.size, group, ", ", width - len(count), f"{group(0)}, {LEFT_OUT}")


def _bytes(boxes: Iterable[Box], itemsize: int) -> int:
    return sum(math.prod(stop - start for start, stop in box) for box in boxes) * itemsize


def _between(made: Plan, step: Step, ranks: Sequence[int], room: Room) -> Board:
    """How much of what each rank of the group has comes to each other one."""
    itemsize = itemsize_of(made.dtype)
    senders, receivers = (
        [rank for rank in ranks if end.universe.position(rank) is not None] for end in (step.source, step.target)
    )

    @functools.lru_cache(maxsize=4096)
    def came(rank: int) -> dict[int, int]:
        return {peer: _bytes(boxes, itemsize) for peer, boxes in arrivals(step, rank)}

    shown = _wanted(receivers, made.rank)
    widest = max(7, *(len(bytes_text(count)) for at in shown for count in came(receivers[at]).values())) + 2
    across = folded(len(receivers), shown, max(3, (room.width - 12) // widest))
    down = folded(len(senders), _wanted(senders, made.rank), max(3, min(10, room.height - 14)))

    def cell(row: int, column: int | range) -> Cell:
        if isinstance(column, range):
            return Cell(LEFT_OUT)
        peer, rank = senders[row], receivers[column]
        count = came(rank).get(peer, 0)
        if peer == rank:
            return Cell("stays" if count else "-", here=rank == made.rank)
        return Cell(bytes_text(count) if count else "-", step.source.universe.position(peer) if count else None)

    rows = [tuple(Cell("") if isinstance(row, range) else cell(row, column) for column in across) for row in down]
    what = "summands that go" if step.kind in _REDUCING else "what goes"
    heads = tuple(_rank_head(senders, row, "{:,} more ranks") for row in down)
    columns = tuple(_rank_head(receivers, column, LEFT_OUT) for column in across)
    return Board(("from",), "to", columns, heads, tuple(rows), caption=f"   {what} from whom to whom:")


def _wanted(ranks: Sequence[int], own: int) -> list[int]:
    """Which ranks matter most, by their place in the group: this one, the first, the last, those beside it."""
    at = ranks.index(own) if own in ranks else 0
    return [at, 0, len(ranks) - 1, *(near for near in (at + 1, at - 1) if 0 <= near < len(ranks))]


def _rank_head(ranks: Sequence[int], at: int | range, left_out: str) -> Head:
    return Head((left_out.format(len(at)),), gap=True) if isinstance(at, range) else Head((str(ranks[at]),))


def _received(made: Plan, step: Step, ranks: Sequence[int], names: Sequence[str]) -> Listing:
    """What comes to this rank, by the rank that it comes from."""
    itemsize = itemsize_of(made.dtype)
    came = [(peer, boxes) for peer, boxes in arrivals(step, made.rank) if _bytes(boxes, itemsize)]
    came.sort(key=lambda each: ranks.index(each[0]))
    rows = []
    for at in folded(len(came), [0, len(came) - 1], 6):
        if isinstance(at, range):
            rows.append((f"{LEFT_OUT} {len(at):,} more", "", ""))
            continue
        peer, boxes = came[at]
        size = bytes_text(_bytes(boxes, itemsize))
        rows.append((f"{peer}" if peer != made.rank else f"{peer}, itself", _boxes(boxes, names), size))
    return Listing((f"rank {made.rank} has from", "", "bytes"), tuple(rows), right=(2,))


def _boxes(boxes: Sequence[Box], names: Sequence[str]) -> str:
    """Boxes of the whole tensor, the first of many."""
    first = "  ".join(f"{name} {start}:{stop}" for name, (start, stop) in zip(names, boxes[0], strict=True))
    return first if len(boxes) == 1 else f"{first} and {len(boxes) - 1:,} more boxes"
