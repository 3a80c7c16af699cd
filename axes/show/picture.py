"""Pictures of what moves: an operation drawn rank by rank, as SVG.

Each rank has a colour. A row of the picture is a tensor as it lies on the ranks: the dashed frame is
the whole, what is filled is the tile that the rank holds, in the colours of the ranks that its values
come from. A `+` between ranks joins summands of a pending sum; where it has been taken, the tile is
striped in the colours of all the summands. Arrows show who sends to whom.

    svg = of_recipe(recipe("rearrange", "b s@tp d -> b s d", ...), "bfloat16", hidden="b")

Nothing is drawn that a plan doesn't say: `trace` follows the boxes of its exchanges from rank to rank.

>>> from axes.algebra.mesh import Mesh
>>> from axes.algebra.plan import plan
>>> mesh, shape = Mesh("tp=2"), (4, 6)
>>> made = plan(mesh.sharding("s@tp d"), mesh.sharding("s d@tp"), shape)
>>> before, after = trace(made)
>>> before.parts[0]
(Part(box=((0, 2), (0, 6)), origins=(0,)),)
>>> after.parts[0]
(Part(box=((0, 2), (0, 3)), origins=(0,)), Part(box=((2, 4), (0, 3)), origins=(1,)))
>>> after.arrows
((1, 0), (0, 1))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise, product

from axes.algebra.chunks import Box, Tile, factor_runs, merged
from axes.algebra.errors import ShardingError
from axes.algebra.expressions import Recipe, unmoved
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Plan, Step, plan
from axes.algebra.sharding import Sharding, unmarked
from axes.show.panels import COLORS

Names = tuple[str, ...]

MOST = 8
"""More ranks than this don't fit beside each other."""

# --- what moves -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A box of the whole tensor, and the ranks whose values it is made of."""

    box: Box
    origins: tuple[int, ...]


@dataclass(frozen=True)
class Scene:
    """A tensor on its ranks, and how it came there.

    parts: what each rank holds. arrows: `(from, to)` of what was sent by `step`.
    """

    parts: Mapping[int, tuple[Part, ...]]
    arrows: tuple[tuple[int, int], ...] = ()
    step: Step | None = None


def trace(made: Plan) -> list[Scene]:
    """The tensor before the plan, every rank's tile its own; and after each step, with its origins."""
    scenes = [Scene({rank: _own(made.source.tile(made.shape, rank), rank) for rank in made.source.universe.ranks})]
    for step in made.steps:
        before, after = scenes[-1].parts, {}
        arrows: list[tuple[int, int]] = []
        for rank in step.target.universe.ranks:
            came = [(peer, _clipped(before[peer], boxes)) for peer, boxes in arrivals(step, rank)]
            arrows += [(peer, rank) for peer, parts in came if parts and peer != rank]
            after[rank] = overlay([part for _, parts in came for part in parts])
        scenes.append(Scene(after, tuple(arrows), step))
    return scenes


def arrivals(step: Step, rank: int) -> Iterator[tuple[int, tuple[Box, ...]]]:
    """What a rank's tile is made of after a step: `(rank, boxes of the whole tensor)`, its own included."""
    held = step.target.tile(step.shape, rank)
    if held is None:
        return
    if step.kind in ("slice", "all_reduce", "reduce_scatter"):
        for peer in (rank,) if step.kind == "slice" else step.ranks_of(rank):
            yield peer, tuple(product(*held))
        return
    exchange, opened = step.exchange(rank), step.opened.target.tile(step.opened.shape, rank)
    assert opened is not None

    def boxes(local: Iterable[Box]) -> tuple[Box, ...]:
        parts = (part for box in local for part in _in_whole(box, opened))
        return tuple(box for part in parts for box in _merged(part, step.factors))

    yield rank, boxes(target for _, target in exchange.copies)
    for transfer in exchange.receives:
        yield exchange.ranks[transfer.peer], boxes(transfer.boxes)


def _merged(box: Box, factors: Sequence[Sequence[int]]) -> Iterator[Box]:
    """A box of the tensor that has a dim for each factor, as boxes of the tensor itself."""
    ranges = iter(box)
    return product(*(factor_runs(tuple(sizes), tuple(next(ranges) for _ in sizes)) for sizes in factors))


def _in_whole(box: Box, held: Tile) -> Iterator[Box]:
    """A box of a local tensor as boxes of the whole, of which it holds the tile."""
    dims: list[list[tuple[int, int]]] = []
    for (first, last), runs in zip(box, held, strict=True):
        found, at = [], 0
        for start, stop in runs:
            low, high = max(first, at), min(last, at + stop - start)
            if low < high:
                found.append((start + low - at, start + high - at))
            at += stop - start
        dims.append(found)
    return product(*dims)


def _own(held: Tile | None, rank: int) -> tuple[Part, ...]:
    return () if held is None else tuple(Part(box, (rank,)) for box in product(*held) if _filled(box))


def _filled(box: Box) -> bool:
    return all(start < stop for start, stop in box)


def _clipped(parts: Iterable[Part], boxes: Sequence[Box]) -> list[Part]:
    """What of the parts lies in one of the boxes."""
    found = []
    for part, box in product(parts, boxes):
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(part.box, box, strict=True))
        if _filled(common):
            found.append(replace(part, box=common))
    return found


def overlay(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Parts that may overlap as parts that don't: where several meet, all of their ranks are origins.

    >>> overlay([Part(((0, 4),), (0,)), Part(((0, 2),), (1,))])
    (Part(box=((0, 2),), origins=(0, 1)), Part(box=((2, 4),), origins=(0,)))
    """
    if not parts:
        return ()
    dims = range(len(parts[0].box))
    edges = [sorted({edge for part in parts for edge in part.box[dim]}) for dim in dims]
    cells: dict[tuple[Box, tuple[int, ...]], None] = {}
    for cell in product(*(pairwise(each) for each in edges)):
        here = {origin for part in parts if _covers(part.box, cell) for origin in part.origins}
        if here:
            cells[cell, tuple(sorted(here))] = None
    for dim in reversed(dims):
        cells = dict.fromkeys(_joined(cells, dim))
    return tuple(Part(*cell) for cell in sorted(cells))


def _covers(box: Box, cell: Box) -> bool:
    return all(start <= low and high <= stop for (start, stop), (low, high) in zip(box, cell, strict=True))


def _joined(cells: Iterable[tuple[Box, tuple[int, ...]]], dim: int) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Cells that are neighbours along a dim, and alike, as one."""
    lines: dict[tuple[Box, Box, tuple[int, ...]], list[tuple[int, int]]] = {}
    for box, origins in cells:
        lines.setdefault((box[:dim], box[dim + 1 :], origins), []).append(box[dim])
    for (before, after, origins), runs in lines.items():
        for run in merged(sorted(runs)):
            yield (*before, run, *after), origins


# --- what is drawn --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A tensor on all ranks. `joints`: what stands before a rank's tile, where it is a summand."""

    caption: str
    names: Names
    shape: tuple[int, ...]
    parts: Mapping[int, tuple[Part, ...]]
    joints: Mapping[int, str]


@dataclass(frozen=True)
class Between:
    """What happens between two rows."""

    lines: tuple[str, ...]
    arrows: tuple[tuple[int, int], ...] = ()


def of_plan(made: Plan, mesh: Mesh, names: Sequence[str] = (), hidden: Collection[str] = ()) -> str:
    """A plan as SVG. `names` are those of the dims; `hidden` are names that aren't drawn.

    Of a tensor with more than two dims that aren't hidden, the last two are drawn. Raises
    `ShardingError` for more than eight ranks.

    >>> from axes.algebra.mesh import Mesh
    >>> mesh, shape = Mesh("tp=2"), (4, 6)
    >>> of_plan(plan(mesh.sharding("s@tp d"), mesh.sharding("s d@tp"), shape), mesh).startswith("<svg")
    True
    """
    given = tuple(names) or tuple(f"d{dim}" for dim in range(len(made.shape)))
    return _svg(mesh, list(_planned(made, given)), frozenset(hidden), f"{made.source} -> {made.target}")


def of_recipe(found: Recipe, dtype: str = "float32", hidden: Collection[str] = ()) -> str:
    """An operation as SVG: its operands, what is computed on each rank, and what moves.

    As `of_plan`. What a rank has computed has its own colour, whatever it was computed from.
    """
    return _svg(found.mesh, list(_scenes(found, dtype)), frozenset(hidden), found.text)


def _scenes(found: Recipe, dtype: str) -> Iterator[Row | Between]:
    """An operation, row by row."""
    for i in found.inputs:
        yield from _moved(i.elementary, i.computed, i.atoms, found, dtype)
    result = found.result
    moved = list(_moved(result.computed, result.elementary, result.atoms, found, dtype))
    if found.kind == "rearrange":  # the operand's row is that of the derived result, but for the order of its dims
        yield from moved[1:] or [Between(("nothing moves",)), *moved]
    else:
        yield Between((_local(found), "on each rank"))
        yield from moved


def _local(found: Recipe) -> str:
    if found.kind != "reduce":
        return found.kind
    gone = [atom for atom in found.inputs[0].atoms if atom not in found.result.atoms]
    return f"{found.op} over {' '.join(gone)}"


def _moved(source: Sharding, target: Sharding, names: Names, found: Recipe, dtype: str) -> Iterator[Row | Between]:
    """The row of `source`, and what follows where it isn't the target already."""
    shape = found.shape_of(names)
    one, two = (unmarked(sharding)[0] for sharding in (source, target))
    if unmoved(source, target, shape):
        parts = {rank: _own(one.tile(shape, rank), rank) for rank in one.universe.ranks}
        yield Row(str(source), names, shape, parts, _joints(one))
    else:
        yield from _planned(plan(one, two, shape, dtype=dtype), names)


def _planned(made: Plan, names: Names) -> Iterator[Row | Between]:
    for scene, now in zip(trace(made), made.states, strict=True):
        if scene.step is not None:
            detail = " ".join(scene.step.axes) if scene.arrows else "no communication"
            yield Between((scene.step.kind, detail), scene.arrows)
        yield Row(str(now), names, made.shape, scene.parts, _joints(now))


def _joints(now: Sharding) -> dict[int, str]:
    """What joins a rank's summand to the one before it."""
    found = {}
    for op, layout in now.pending:
        for position, rank in enumerate(now.universe.ranks):
            if layout.coordinate(position):
                found[rank] = "+" if op == "sum" else op
    return found


# --- how it is drawn ------------------------------------------------------------------------------

SIDE, STRIP, GAP, LEFT, HEAD, STEP = 84, 20, 30, 190, 34, 54
"""Pixels: a tensor's side, one with a single dim, between ranks, the captions, the heading, a step."""

STYLE = """
  .axes-moves text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #57606a }
  .axes-moves .name { fill: #24292f } .axes-moves .small { font-size: 11px } .axes-moves .end { text-anchor: end }
  .axes-moves .held { fill: #fff; font-size: 12px; text-anchor: middle }
  .axes-moves .mid { text-anchor: middle } .axes-moves .joint { font-size: 17px; text-anchor: middle }
  .axes-moves .whole { fill: none; stroke: #8c959f; stroke-dasharray: 3 3 }
  @media (prefers-color-scheme: dark) {
    .axes-moves text { fill: #9198a1 } .axes-moves .name { fill: #e6edf3 } .axes-moves .held { fill: #fff }
  }
"""
"""Every rule is of a class of its own: in a page an SVG's rules are those of the whole page."""


def _svg(mesh: Mesh, scenes: Sequence[Row | Between], hidden: Collection[str], title: str) -> str:
    ranks = list(mesh.universe.ranks)
    if len(ranks) > MOST:
        raise ShardingError(f"a picture has room for {MOST} ranks beside each other; the mesh has {len(ranks)}")
    body = [_heading(mesh, ranks)]
    y = HEAD
    for at, scene in enumerate(scenes):
        if isinstance(scene, Between):
            body.append(_between(scene, ranks, y))
            y += STEP
            continue
        if at and isinstance(scenes[at - 1], Row):
            y += GAP
        body.append(_row(scene, ranks, hidden, y))
        y += _height(scene, hidden)
    width = LEFT + len(ranks) * (SIDE + GAP)
    size = f'viewBox="0 0 {width} {y + 4}" width="{width}" role="img"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="axes-moves" {size}>'
    said = f"<title>{escape(title)}</title>\n<desc>{escape(_said(scenes))}</desc>"
    used = dict.fromkeys(part.origins for scene in scenes if isinstance(scene, Row) for part in _all_parts(scene))
    patterns = "".join(_pattern(origins, ranks) for origins in used if len(origins) > 1)
    arrowheads = "".join(_arrowhead(index) for index in range(len(ranks)))
    defs = f"<defs>{arrowheads}{patterns}</defs>"
    return "\n".join((head, said, f"<style>{STYLE}</style>", defs, *body, "</svg>")) + "\n"


def _said(scenes: Sequence[Row | Between]) -> str:
    """The picture in words: how the tensor lies, and what happens in between."""
    return "; ".join(scene.caption if isinstance(scene, Row) else " ".join(scene.lines) for scene in scenes)


def _all_parts(row: Row) -> Iterator[Part]:
    return (part for parts in row.parts.values() for part in parts)


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _left(index: int) -> int:
    """Where the column of a rank begins."""
    return LEFT + index * (SIDE + GAP)


def _arrowhead(index: int) -> str:
    path = f'<path d="M0 0L6 3L0 6z" fill="{_color(index)}"/>'
    size = 'markerWidth="6" markerHeight="6" refX="5" refY="3" markerUnits="userSpaceOnUse"'
    return f'<marker id="to{index}" {size} orient="auto">{path}</marker>'


def _pattern(origins: tuple[int, ...], ranks: Sequence[int]) -> str:
    """Stripes in the colours of the origins."""
    colors = [_color(ranks.index(origin)) for origin in origins]
    size = 7 * len(colors)
    stripes = "".join(f'<rect x="{7 * i}" width="7" height="{size}" fill="{c}"/>' for i, c in enumerate(colors))
    units = f'width="{size}" height="{size}" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"'
    return f'<pattern id="{_pattern_name(origins, ranks)}" {units}>{stripes}</pattern>'


def _pattern_name(origins: tuple[int, ...], ranks: Sequence[int]) -> str:
    """A name that says the colours, so that it means the same in every picture of a page."""
    return "of-" + "-".join(str(ranks.index(origin)) for origin in origins)


def _heading(mesh: Mesh, ranks: Sequence[int]) -> str:
    lines = []
    for index, rank in enumerate(ranks):
        middle = _left(index) + SIDE / 2
        coordinate = mesh.at(rank).coordinate or {}
        where = " ".join(f"{axis}={at}" for axis, at in coordinate.items())
        lines.append(f'<text class="mid name" x="{middle:g}" y="13">rank {rank}</text>')
        lines.append(f'<text class="mid small" x="{middle:g}" y="26">{escape(where)}</text>')
    return "\n".join(lines)


def _between(scene: Between, ranks: Sequence[int], y: int) -> str:
    lines = [
        f'<text class="{"small" if at else "name"}" x="8" y="{y + 24 + 15 * at}">{escape(text)}</text>'
        for at, text in enumerate(scene.lines)
    ]
    for source, target in scene.arrows:
        start, stop = ranks.index(source), ranks.index(target)
        lean = 5 * (stop - start)
        x1, x2 = _left(start) + SIDE / 2 + lean, _left(stop) + SIDE / 2 - lean
        way = f'x1="{x1:g}" y1="{y + 5}" x2="{x2:g}" y2="{y + STEP - 6}"'
        lines.append(f'<line {way} stroke="{_color(start)}" stroke-width="1.4" marker-end="url(#to{start})"/>')
    return "\n".join(lines)


def _drawn(row: Row, hidden: Collection[str]) -> tuple[int | None, int | None]:
    """The dims that go down and across; None where there is none."""
    dims = [dim for dim, name in enumerate(row.names) if name not in hidden]
    return (dims[-2] if len(dims) > 1 else None), (dims[-1] if dims else None)


def _height(row: Row, hidden: Collection[str]) -> int:
    return SIDE if _drawn(row, hidden)[0] is not None else STRIP


def _row(row: Row, ranks: Sequence[int], hidden: Collection[str], y: int) -> str:
    down, across = _drawn(row, hidden)
    height = _height(row, hidden)
    lines = [f'<text class="name" x="8" y="{y + height / 2 + 4:g}">{escape(row.caption)}</text>']
    ways = [f"{way} {row.names[dim]}" for way, dim in (("↓", down), ("→", across)) if dim is not None]
    for at, text in enumerate(ways):
        bottom = y + height / 2 + 4 + 15 * (at - (len(ways) - 1) / 2)
        lines.append(f'<text class="small end" x="{LEFT - 14}" y="{bottom:g}">{escape(text)}</text>')
    for index, rank in enumerate(ranks):
        x = _left(index)
        for part in row.parts.get(rank, ()):
            x1, x2 = _span(part, across, row.shape, x, SIDE)
            y1, y2 = _span(part, down, row.shape, y, height)
            lines.append(_tile(part, ranks, (x1, y1, x2, y2)))
        lines.append(f'<rect class="whole" x="{x}" y="{y}" width="{SIDE}" height="{height}"/>')
        if rank in row.joints:
            middle = f'x="{x - GAP / 2:g}" y="{y + height / 2 + 6:g}"'
            lines.append(f'<text class="joint" {middle}>{escape(row.joints[rank])}</text>')
    return "\n".join(lines)


def _span(part: Part, dim: int | None, shape: Sequence[int], start: float, side: int) -> tuple[float, float]:
    """From where to where a part reaches along a side of the frame."""
    if dim is None:
        return start, start + side
    low, high = part.box[dim]
    return start + side * low / shape[dim], start + side * high / shape[dim]


def _tile(part: Part, ranks: Sequence[int], corners: tuple[float, float, float, float]) -> str:
    x1, y1, x2, y2 = corners
    one = len(part.origins) == 1
    fill = _color(ranks.index(part.origins[0])) if one else f"url(#{_pattern_name(part.origins, ranks)})"
    box = f'x="{x1 + 0.7:.5g}" y="{y1 + 0.7:.5g}" width="{x2 - x1 - 1.4:.5g}" height="{y2 - y1 - 1.4:.5g}"'
    found = f'<rect {box} fill="{fill}"/>'
    label = "+".join(map(str, part.origins))
    if x2 - x1 < 8 * len(label) + 4 or y2 - y1 < 15:
        return found
    at = f'x="{(x1 + x2) / 2:.5g}" y="{(y1 + y2) / 2 + 4:.5g}"'
    return f'{found}<text class="held" {at}>{label}</text>'
