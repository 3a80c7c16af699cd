"""What moves in a plan or an operation, to be drawn rank by rank.

A row of the drawing is a tensor as it lies on the ranks: the dashed frame is the whole, what is filled is the tile
that the rank holds, in the colours of the ranks that its values come from. A `+` between ranks joins summands of a
pending sum; where it has been taken, the tile is striped in the colours of all the summands. Arrows show who sends
to whom.

Nothing is drawn that a plan doesn't say: `trace` follows the boxes of its exchanges from rank to rank.

>>> from axes.algebra.mesh import Mesh
>>> from axes.algebra.plan import plan
>>> mesh, shape = Mesh("tp=2"), (4, 6)
>>> made = plan(mesh.sharding("s@tp d"), mesh.sharding("s d@tp"), shape)
>>> before, after = trace(made)
>>> before.held[0]
{((0, 2), (0, 3)): (0,), ((0, 2), (3, 6)): (0,)}
>>> after.held[0]
{((0, 2), (0, 3)): (0,), ((2, 4), (0, 3)): (1,)}
>>> after.arrows
((1, 0), (0, 1))
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from axes.algebra.chunks import Box, Runs, factor_runs, merged
from axes.algebra.errors import ShardingError
from axes.algebra.expressions import Recipe, unmoved
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Plan, Step, plan
from axes.algebra.sharding import Sharding, unmarked
from axes.show.panels import Arrows, Frames, Moves, Tile

MOST = 8
"""More ranks than this don't fit beside each other."""

Cells = dict[Box, tuple[int, ...]]
"""What a rank holds: boxes of the whole tensor that don't overlap, each with the ranks whose values it is made of."""

# --- what moves -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """A tensor on its ranks, and how it came there: what was sent by `step`, as `(from, to)`."""

    held: Mapping[int, Cells]
    arrows: tuple[tuple[int, int], ...] = ()
    step: Step | None = None


def trace(made: Plan) -> list[Scene]:
    """The tensor before the plan, every rank's tile its own; and after each step, with its origins."""
    own = {rank: [(rank, _boxes_of(made.source, made.shape, rank))] for rank in made.source.universe.ranks}
    came = [{rank: [*arrivals(step, rank)] for rank in step.target.universe.ranks} for step in made.steps]
    every = [box for by_rank in (own, *came) for sent in by_rank.values() for _, boxes in sent for box in boxes]
    edges = [sorted({edge for box in every for edge in box[dim]}) for dim in range(len(made.shape))]

    def cells(boxes: Sequence[Box]) -> Iterator[Box]:
        """The boxes, cut wherever any box of the plan begins or ends."""
        for box in boxes:
            inside = ([edge for edge in each if a <= edge <= b] for (a, b), each in zip(box, edges, strict=True))
            yield from product(*map(pairwise, inside))

    scenes = [Scene({rank: dict.fromkeys(cells(boxes), (rank,)) for rank, [(_, boxes)] in own.items()})]
    for step, by_rank in zip(made.steps, came, strict=True):
        before, after = scenes[-1].held, dict[int, Cells]()
        arrows = []
        for rank, sent in by_rank.items():
            mine = after[rank] = Cells()
            for peer, boxes in sent:
                found = [cell for cell in cells(boxes) if cell in before[peer]]
                arrows += [(peer, rank)] if found and peer != rank else []
                mine.update({cell: tuple(sorted({*mine.get(cell, ()), *before[peer][cell]})) for cell in found})
        scenes.append(Scene(after, tuple(arrows), step))
    return scenes


def _boxes_of(sharding: Sharding, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
    held = sharding.tile(shape, rank)
    return () if held is None else tuple(product(*held))


def arrivals(step: Step, rank: int) -> Iterator[tuple[int, tuple[Box, ...]]]:
    """What a rank's tile is made of after a step: `(rank, boxes of the whole tensor)`, its own included."""
    opened = step.opened.target.tile(step.opened.shape, rank)
    if opened is None:
        return
    if step.kind in ("slice", "all_reduce", "reduce_scatter"):
        for peer in (rank,) if step.kind == "slice" else step.ranks_of(rank):
            yield peer, _boxes_of(step.target, step.shape, rank)
        return
    exchange = step.exchange(rank)
    found = [(rank, [target for _, target in exchange.copies])]
    for peer, local in [*found, *((exchange.ranks[each.peer], each.boxes) for each in exchange.receives)]:
        parts = [part for box in local for part in product(*map(_in_whole, box, opened))]
        yield peer, tuple(box for part in parts for box in _merged(part, step.factors))


def _in_whole(span: tuple[int, int], runs: Runs) -> list[tuple[int, int]]:
    """The indices in the whole of a part of a local dim, which has these runs of it."""
    found, at = [], 0
    for start, stop in runs:
        low, high = max(span[0], at), min(span[1], at + stop - start)
        found += [(start + low - at, start + high - at)] if low < high else []
        at += stop - start
    return found


def _merged(box: Box, factors: Sequence[Sequence[int]]) -> Iterator[Box]:
    """A box of the tensor that has a dim for each factor, as boxes of the tensor itself."""
    ranges = iter(box)
    return product(*(factor_runs(tuple(sizes), tuple(next(ranges) for _ in sizes)) for sizes in factors))


# --- what is drawn --------------------------------------------------------------------------------


def moves_of_plan(made: Plan, names: Sequence[str]) -> Moves:
    """A plan of a tensor whose dims have these names; the last two are drawn.

    Raises `ShardingError` for more than eight ranks.
    """
    return _moves(made.source.mesh, _planned(made, names))


def moves_of_recipe(found: Recipe, dtype: str = "float32", hidden: Collection[str] = ()) -> Moves:
    """An operation: its operands, what is computed on each rank, and what moves.

    As `moves_of_plan`, without the dims that are `hidden`. What a rank has computed has its own colour, whatever it
    was computed from.
    """
    return _moves(found.mesh, _scenes(found, dtype, hidden))


def _moves(mesh: Mesh, rows: Iterator[Frames | Arrows]) -> Moves:
    ranks = mesh.universe.ranks
    if len(ranks) > MOST:
        raise ShardingError(f"a picture has room for {MOST} ranks beside each other; the mesh has {len(ranks)}")
    where = [" ".join(f"{axis}={at}" for axis, at in (mesh.at(rank).coordinate or {}).items()) for rank in ranks]
    return Moves(tuple(zip(map(str, ranks), where, strict=True)), tuple(rows))


def _scenes(found: Recipe, dtype: str, hidden: Collection[str]) -> Iterator[Frames | Arrows]:
    """An operation, row by row."""

    def moved(source: Sharding, target: Sharding, names: tuple[str, ...]) -> list[Frames | Arrows]:
        """The row of `source`, and what follows where it isn't the target already."""
        shape = found.shape_of(names)
        made = plan(unmarked(source)[0], unmarked(target)[0], shape, dtype=dtype)
        rows = list(_planned(made, names, hidden))
        stays = [replace(row, caption=str(source)) for row in rows[:1] if isinstance(row, Frames)]
        return [*stays] if unmoved(source, target, shape) else rows

    for i in found.inputs:
        yield from moved(i.elementary, i.computed, i.atoms)
    result = found.result
    rows = moved(result.computed, result.elementary, result.atoms)
    if found.kind == "rearrange":  # the operand's row is that of the derived result, but for the order of its dims
        yield from rows[1:] or [Arrows(("nothing moves", "")), *rows]
    else:
        gone = " ".join(atom for atom in found.inputs[0].atoms if atom not in result.atoms)
        yield Arrows((f"{found.op} over {gone}" if found.kind == "reduce" else found.kind, "on each rank"))
        yield from rows


def _planned(made: Plan, names: Sequence[str], hidden: Collection[str] = ()) -> Iterator[Frames | Arrows]:
    for scene, now in zip(trace(made), made.states, strict=True):
        if scene.step is not None:
            numbers = {rank: at for at, rank in enumerate(now.universe.ranks)}
            arrows = tuple((numbers[source], numbers[target]) for source, target in scene.arrows)
            yield Arrows((scene.step.kind, " ".join(scene.step.axes) if arrows else "no communication"), arrows)
        yield _frames(now, made.shape, scene.held, names, hidden)


def _frames(
    now: Sharding, shape: Sequence[int], held: Mapping[int, Cells], names: Sequence[str], hidden: Collection[str]
) -> Frames:
    dims = [dim for dim, name in enumerate(names) if name not in hidden]
    down, across = dims[-2] if len(dims) > 1 else None, dims[-1] if dims else None
    numbers = {rank: at for at, rank in enumerate(now.universe.ranks)}

    def tiles(rank: int) -> Iterator[Tile]:
        found: Cells = {}
        for box, origins in held[rank].items():
            sides = tuple((0, 1) if dim is None else box[dim] for dim in (down, across))
            found[sides] = tuple(numbers[origin] for origin in origins)
        for (y, x), origins in _joined(_joined(found, 1), 0).items():
            height, width = (1 if dim is None else shape[dim] for dim in (down, across))
            yield (y[0] / height, y[1] / height), (x[0] / width, x[1] / width), origins

    ways = tuple(f"{way} {names[dim]}" for way, dim in (("↓", down), ("→", across)) if dim is not None)
    joints = dict.fromkeys(numbers, "")
    for op, layout in now.pending:
        joined = {rank: "+" if op == "sum" else op for rank, at in numbers.items() if layout.coordinate(at)}
        joints.update(joined)
    every = tuple(tuple(tiles(rank)) for rank in numbers)
    return Frames(str(now), ways, down is not None, every, tuple(joints.values()))


def _joined(cells: Cells, side: int) -> Cells:
    """Neighbours along one of two sides that come from the same ranks, as one."""
    found: dict[tuple[tuple[int, int], tuple[int, ...]], list[tuple[int, int]]] = {}
    for box, origins in cells.items():
        found.setdefault((box[1 - side], origins), []).append(box[side])
    return {
        (other, run) if side else (run, other): origins
        for (other, origins), runs in found.items()
        for run in merged(sorted(runs))
    }
