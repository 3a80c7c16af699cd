"""What moves in a plan or an operation: drawn rank by rank, and a plan as a sheet.

A row of the drawing is a tensor as it lies on the ranks: the dashed frame is the whole, what is filled is the tile
that the rank holds, in the colours of the ranks that its values come from. A `+` between ranks joins summands of a
pending sum; where it has been taken, the tile is striped in the colours of all the summands. Arrows show who sends
to whom.

Nothing is drawn that a plan doesn't say: `trace` follows the parts of tiles from rank to rank.

>>> from axes.algebra.mesh import Mesh
>>> from axes.algebra.plan import plan
>>> mesh, shape = Mesh("tp=2"), (4, 6)
>>> made = plan(mesh.sharding("s@tp d"), mesh.sharding("s d@tp"), shape)
>>> before, after = trace(made)
>>> before.held[0]
[((((0, 2),), ((0, 6),)), (0,))]
>>> after.held[0]
[((((0, 2),), ((0, 3),)), (0,)), ((((2, 4),), ((0, 3),)), (1,))]
>>> after.arrows
((1, 0), (0, 1))

A plan's sheet is what it says of itself, how the tensor is sharded after each step, and the bytes that each rank
sends to each:

>>> from axes.pictures.in_text import lines_of, plain
>>> made = plan(mesh.sharding("s@tp d"), mesh.sharding("s d@tp"), (1024, 512))
>>> print(plain(lines_of(sheet_of_plan(made, Room()), 80)))
s@tp d -> s d@tp     [1024, 512] float32
1  all_to_all  tp  2 ranks, stride 1  512.0 KiB in, 512.0 KiB out
about 23 us; peak memory 3.0 MiB
<BLANKLINE>
         sharded  rank 0 holds
before   s@tp d   512 x 512
after 1  s d@tp   1024 x 256
<BLANKLINE>
1  all_to_all in 1 group of 2: 0 1
<BLANKLINE>
   bytes that each rank sends to each:
from  to        [0]          1
[0]          [stays] 512.0 KiB
1         512.0 KiB      stays
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import product

from axes import Mesh, Plan, Sharding, plan
from axes.extension import Recipe, Step, Tile, bytes_text, intersection, itemsize_of, unmarked, unmoved, volume
from axes.pictures.panels import Frames, Listing, Moves, Panel, Patch, Remark, Room, Sheet, exchange_board, sheet_of
from axes.pictures.rank_text import LEFT_OUT, groups_text, short_ranks, time_text
from axes.pictures.sharding_sheet import dim_names

MOST = 8
"""More ranks than this don't fit beside each other."""

PEERS = 1024
"""In a group of more ranks than this nobody is asked what it receives: that takes a time for each of them."""

Part = tuple[Tile, tuple[int, ...]]
"""A part of the whole tensor, and the ranks whose values it is made of."""

# --- what moves -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """A tensor on its ranks, in parts that are apart; and how it came there: what `step` sent, as `(from, to)`."""

    held: Mapping[int, list[Part]]
    arrows: tuple[tuple[int, int], ...] = ()
    step: Step | None = None


def trace(made: Plan) -> list[Scene]:
    """The tensor before the plan, every rank's tile its own; and after each step, with its origins."""
    tiles = {rank: made.source.tile(made.shape, rank) for rank in made.source.universe.ranks}
    scenes = [Scene({rank: _shared(tile, [(tile, (rank,))]) for rank, tile in tiles.items() if tile is not None})]
    for step in made.steps:
        before, after, arrows = scenes[-1].held, dict[int, list[Part]](), dict[tuple[int, int], None]()
        for rank in step.target.universe.ranks:
            layers: dict[int, list[Part]] = {}
            for layer, peer, tile in step.arrivals(rank):
                sent = _shared(tile, before[peer])
                layers.setdefault(layer, []).extend(sent)
                arrows.update({(peer, rank): None} if sent and peer != rank else {})
            after[rank] = reduce(_reduced, layers.values() or [[]])
        scenes.append(Scene(after, tuple(arrows), step))
    return scenes


def _shared(tile: Tile, parts: Iterable[Part]) -> list[Part]:
    """What lies in a tile of these parts."""
    return [(both, origins) for part, origins in parts if volume(both := intersection(tile, part))]


def _reduced(one: list[Part], two: list[Part]) -> list[Part]:
    """The values of two layers of a reduction, which are of the same elements."""
    return [(part, tuple(sorted({*a, *b}))) for tile, a in one for part, b in _shared(tile, two)]


# --- what is drawn --------------------------------------------------------------------------------


def moves_of_recipe(found: Recipe, dtype: str = "float32", hidden: Collection[str] = ()) -> Moves:
    """An operation: its operands, what is computed on each rank, and what moves.

    Without the dims that are `hidden`; the last two others are drawn. What a rank has computed has its own colour,
    whatever it was computed from.
    """
    return _moves(found.mesh, lambda: _rows_of_recipe(found, dtype, hidden))


def _moves(mesh: Mesh, draw: Callable[[], Iterator[Frames]]) -> Moves:
    ranks = mesh.universe.ranks
    where = [" ".join(f"{axis}={at}" for axis, at in (mesh.at(rank).coordinate or {}).items()) for rank in ranks]
    return Moves(tuple(zip(map(str, ranks), where, strict=True)), draw)


def _rows_of_recipe(found: Recipe, dtype: str, hidden: Collection[str]) -> Iterator[Frames]:
    """An operation, row by row."""

    def moved(source: Sharding, target: Sharding, names: tuple[str, ...]) -> list[Frames]:
        """The row of `source`, and those that follow where it isn't the target already."""
        shape = found.shape_of(names)
        made = plan(unmarked(source)[0], unmarked(target)[0], shape, dtype=dtype)
        first, *rest = _rows(made, names, hidden)
        return [replace(first, caption=str(source))] if unmoved(source, target, shape) else [first, *rest]

    for i in found.inputs:
        yield from moved(i.elementary, i.computed, i.atoms)
    result = found.result
    first, *rest = moved(result.computed, result.elementary, result.atoms)
    if found.kind == "rearrange":  # the operand's row is that of the derived result, but for the order of its dims
        yield from rest or [replace(first, step=("nothing moves", ""))]
    else:
        gone = " ".join(atom for atom in found.inputs[0].atoms if atom not in result.atoms)
        does = f"{found.op} over {gone}" if found.kind == "reduce" else found.kind
        yield from (replace(first, step=(does, "on each rank")), *rest)


def _rows(made: Plan, names: Sequence[str], hidden: Collection[str] = ()) -> Iterator[Frames]:
    """The tensor before the plan and after each step. Its last two dims are drawn that aren't hidden."""
    dims = [dim for dim, name in enumerate(names) if name not in hidden][-2:]
    ways = tuple(f"{way} {names[dim]}" for way, dim in zip(("↓", "→")[2 - len(dims) :], dims, strict=True))
    for scene, now in zip(trace(made), made.states, strict=True):
        numbers = {rank: at for at, rank in enumerate(now.universe.ranks)}
        joints = dict.fromkeys(numbers, "")
        for op, layout in now.pending:
            joints |= {rank: "+" if op == "sum" else op for rank, at in numbers.items() if layout.coordinate(at)}
        arrows = tuple((numbers[source], numbers[target]) for source, target in scene.arrows)
        step = (scene.step.kind, " ".join(scene.step.axes) if arrows else "no communication") if scene.step else ()
        tiles = tuple(tuple(_tiles(made.shape, dims, scene.held.get(rank, []), numbers)) for rank in numbers)
        yield Frames(str(now), ways, tiles, tuple(joints.values()), step, arrows)


def _tiles(
    shape: Sequence[int], dims: Sequence[int], parts: Sequence[Part], numbers: Mapping[int, int]
) -> Iterator[Patch]:
    """Where the parts of a tensor lie in its frame, and the numbers of the ranks that they come from."""
    for tile, origins in parts:
        sides = [[(start / shape[dim], stop / shape[dim]) for start, stop in tile[dim]] for dim in dims]
        for down, across in product(*[[(0.0, 1.0)]] * (2 - len(dims)), *sides):
            yield down, across, tuple(numbers[origin] for origin in origins)


# --- a plan ---------------------------------------------------------------------------------------


def sheet_of_plan(made: Plan, room: Room) -> Sheet:
    """The picture of a plan, seen from its rank."""
    title, *lines = str(made).split("\n")
    if made.collectives:
        lines.append(f"about {time_text(made.cost)}; peak memory {bytes_text(made.peak_bytes)}")
    small = made.source.universe == made.target.universe and made.source.universe.size <= MOST
    rows = ((f"after {at}" if at else "before", str(each), _held(each, made)) for at, each in enumerate(made.states))
    return sheet_of(
        title,
        f"What moves in the plan {title}: {'; '.join(lines)}.",
        Remark(tuple(line.strip() for line in lines), close=True),
        _moves(made.source.mesh, lambda: _rows(made, dim_names(made.source))) if small else None,
        Listing(("", "sharded", f"rank {made.rank} holds"), tuple(rows)),
        *(
            panel
            for at, step in enumerate(made.steps, 1)
            if step.group_size > 1
            for panel in _step(made, at, step, room)
        ),
    )


def _held(state: Sharding, made: Plan) -> str:
    """The shape that this rank has of the tensor."""
    is_outside = state.universe.position(made.rank) is None
    return "nothing" if is_outside else " x ".join(map(str, state.local_shape(made.shape, made.rank))) or "one number"


def _step(made: Plan, number: int, step: Step, room: Room) -> Iterator[Panel]:
    """Who communicates with whom, and how much each sends to each in the group of the rank."""
    ranks = step.ranks
    yield Remark((f"{number}  {step.kind} {_groups(step, room.width - len(step.kind) - 5)}",))
    if not 0 < len(ranks) <= PEERS:
        return

    @cache
    def came(rank: int) -> dict[int, int]:
        """How many elements come to a rank, by the rank that they come from."""
        return {peer: volume(tile) for _, peer, tile in step.arrivals(rank)}

    def count(sender: int, receiver: int) -> int:
        return came(receiver).get(sender, 0) * itemsize_of(made.dtype)

    senders, receivers = (
        [rank for rank in ranks if end.universe.position(rank) is not None] for end in (step.source, step.target)
    )
    what = "bytes of terms" if "reduce" in step.kind else "bytes"
    tone = step.source.universe.position
    yield exchange_board(senders, receivers, made.rank, [], count, tone, room, f"{what} that each rank sends to each")


def _groups(step: Step, width: int) -> str:
    """Who communicates with whom."""
    if step.layout is None:
        return f"among all ranks: {short_ranks(step.ranks, width - 17)}"
    number = step.source.universe.size // step.group_size
    many = f"in {number:,} group{'s' * (number != 1)} of {step.group_size:,}: "
    text = groups_text(step.source.universe, step.layout, width - len(many))
    return many + (text or f"{short_ranks(step.ranks, width - 24)}, {LEFT_OUT}")
