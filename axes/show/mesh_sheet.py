"""A mesh as a sheet: its ranks as a grid, the last axis across, and the groups that each name forms.

The mesh is seen from a rank: its row is among those that are shown, and the ranks that it shares a group
with bear the letter of the axis. What is shown costs as much as it is long, whatever the number of ranks,
but for groups that aren't evenly spaced, whose ranks are listed.

>>> from axes.algebra.mesh import Mesh
>>> from axes.show.in_text import lines_of, plain
>>> from axes.show.panels import Room
>>> print(plain(lines_of(sheet_of_mesh(Mesh("dp=2 tp=4", ranks_per_node=4).at(5), Room()), 80)))
Mesh dp=2 tp=4
8 ranks on 2 nodes of 4, seen from rank 5
<BLANKLINE>
dp  tp  0  1  2  3
0       0  1d 2  3   node 0
1       4t[5] 6t 7t  node 1
<BLANKLINE>
   axis  size  at  group of rank 5  nodes  all groups
d  dp       2   1  1 5                  2  4: 0 4, 1 5, 2 6, 3 7
t  tp       4   1  4..7                 1  2: 0..3, 4..7
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence

from axes.algebra.errors import MeshError
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.show.panels import Board, Cell, Head, Listing, Panel, Remark, Room, Sheet
from axes.show.rank_text import LEFT_OUT, folded, joined, short_ranks

LONGEST = 24
"""A name with what it is made of gets at most this many columns of a table."""


def sheet_of_mesh(mesh: Mesh, room: Room) -> Sheet:
    """The picture of a mesh, seen from its rank."""
    declared = " ".join(f"{name}={size}" for name, size in mesh.shape.items())
    listing, left_out = _groups(mesh, room)
    panels: list[Panel] = [Remark((_ranks(mesh),), close=True)]
    board = _grid(mesh, room, max(5, room.height - 6 - len(listing.rows) - bool(left_out)))
    panels += [listing] if board is None else [board, listing]
    if left_out:
        panels.append(Remark((f"and {len(left_out)} more names: {' '.join(left_out)}",), close=True))
    summary = f"The ranks of a mesh {declared} as a grid, and the groups along each of its axes. {_ranks(mesh)}."
    return Sheet(f"Mesh {declared}", summary, tuple(panels))


def letters_of(names: Sequence[str]) -> tuple[str, ...]:
    """A letter for each name: of its last word where that is free.

    >>> letters_of(["pp", "dp_replicate", "dp_shard", "cp", "tp", "pipe"])
    ('p', 'r', 's', 'c', 't', 'i')
    """
    found: list[str] = []
    for name in names:
        words = [word for word in reversed(name.lower().split("_")) if word]
        wanted = [word[0] for word in words] + list(name.lower()) + list("abcdefghijklmnopqrstuvwxyz")
        free = (letter for letter in wanted if letter.isalpha() and letter.isascii() and letter not in found)
        found.append(next(free, "*"))
    return tuple(found)


def _ranks(mesh: Mesh) -> str:
    """How many ranks there are, on how many nodes, and who looks."""
    universe, per_node = mesh.universe.ranks, mesh.ranks_per_node
    count = f"{mesh.size:,} ranks" if mesh.size != 1 else "1 rank"
    if mesh.size != mesh.universe.size:
        count += f" of {mesh.universe.size:,}, one of {mesh.universe.size // mesh.size:,} such meshes"
    if universe != range(len(universe)):
        count += f" ({short_ranks(universe, 40)})"
    if per_node is not None and mesh.size == mesh.universe.size:
        nodes = nodes_of(universe, per_node)
        count += f" on {nodes:,} nodes of {per_node:,}" if nodes > 1 else f" on one node of {per_node:,}"
    outside = "" if mesh.universe.position(mesh.rank) is not None else ", which isn't one of them"
    return f"{count}, seen from rank {mesh.rank}{outside}"


def nodes_of(ranks: Sequence[int], per_node: int) -> int:
    """On how many nodes these ranks are.

    >>> nodes_of(range(0, 64, 2), 8), nodes_of(range(0, 64, 16), 8), nodes_of([7, 8, 3], 8)
    (8, 4, 2)
    """
    if isinstance(ranks, range) and ranks.step > 0:
        return len(ranks) if ranks.step >= per_node else ranks[-1] // per_node - ranks[0] // per_node + 1
    return len({rank // per_node for rank in ranks})


# --- the grid -------------------------------------------------------------------------------------


def _grid(mesh: Mesh, room: Room, rows: int) -> Board | None:
    """The ranks, the last axis across; None where the mesh isn't seen from one of its ranks."""
    position = mesh.universe.position(mesh.rank)
    whole = mesh.layout_of_all
    if position is None and mesh.size != mesh.universe.size:
        return None
    base = 0 if position is None else position - whole.offset(whole.coordinate(position))
    here = None if position is None else [layout.coordinate(position) for layout in mesh.layouts]
    *leading, last = mesh.layouts
    height = math.prod(layout.size for layout in leading)
    own_row, own_column = (0, 0) if here is None else (_number(leading, here), here[-1])
    sizes = [layout.size for layout in leading]
    places = _columns(mesh, sizes, base, room)
    across = folded(last.size, [own_column, 0, last.size - 1, own_column - (own_column > 0)], places)
    down = folded(height, _rows_to_show(sizes, here, own_row), rows)
    letters = letters_of(mesh.axis_names)
    cells, heads, notes = [], [], []
    for row in down:
        if isinstance(row, range):
            heads.append(Head((f"{len(row):,} more rows",), gap=True))
            cells.append(tuple(Cell("") for _ in across))
            notes.append("")
            continue
        at = _coordinates(row, sizes)
        heads.append(Head(tuple(map(str, at))))
        start = base + sum(layout.offset(index) for layout, index in zip(leading, at, strict=True))
        cells.append(tuple(_cells(mesh, start, at, across, here, letters)))
        notes.append(_nodes(mesh, start))
    columns = [Head((LEFT_OUT,), gap=True) if isinstance(column, range) else Head((str(column),)) for column in across]
    *corner, name = mesh.axis_names
    return Board(tuple(corner), name, tuple(columns), tuple(heads), tuple(cells), tuple(notes))


def _columns(mesh: Mesh, sizes: Sequence[int], base: int, room: Room) -> int:
    """How many ranks fit beside each other."""
    digits = [max(len(name), len(str(size - 1))) for name, size in zip(mesh.axis_names, sizes, strict=False)]
    label = sum(digits) + 2 * max(0, len(digits) - 1) + len(mesh.axis_names[-1]) + 3
    ranks = mesh.universe.ranks
    highest = ranks[-1] if isinstance(ranks, range) else max(ranks)
    note, several = 0, LEFT_OUT in _nodes(mesh, base)
    if mesh.ranks_per_node is not None:
        node = len(str(highest // mesh.ranks_per_node))
        note = len("  nodes ") + 2 * node + len(LEFT_OUT) if several else len("  node ") + node
    return max(3, (room.width - label - note) // (len(str(highest)) + 2 + several))


def _number(layouts: Sequence[Layout], coordinates: Sequence[int]) -> int:
    """The number of a row by its coordinates on the axes that go down."""
    found = 0
    for layout, at in zip(layouts, coordinates, strict=False):
        found = found * layout.size + at
    return found


def _coordinates(row: int, sizes: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(sizes):
        row, at = divmod(row, size)
        found.append(at)
    return tuple(reversed(found))


def _rows_to_show(sizes: Sequence[int], here: Sequence[int] | None, own: int) -> Iterator[int]:
    """Rows in the order of their importance: this rank's, the first, the last, then those of its peers by distance."""
    yield from (own, 0, math.prod(sizes) - 1)
    if here is None:
        return
    for distance in range(1, max(sizes, default=1)):
        stride = 1
        for size, at in reversed(list(zip(sizes, here, strict=False))):
            for other in (at + distance, at - distance):
                if 0 <= other < size:
                    yield own + (other - at) * stride
            stride *= size
        if distance == 16:
            return


def _cells(
    mesh: Mesh,
    start: int,
    at: Sequence[int],
    across: Iterable[int | range],
    here: Sequence[int] | None,
    letters: Sequence[str],
) -> Iterator[Cell]:
    """The ranks of a row. A rank is a peer along an axis where its coordinates are this rank's on all others."""
    last, per_node = mesh.layouts[-1], mesh.ranks_per_node
    node: int | None = None
    for column in across:
        if isinstance(column, range):
            yield Cell(LEFT_OUT)
            node = None
            continue
        rank = mesh.universe.ranks[start + last.offset(column)]
        apart = [] if here is None else [i for i, (a, b) in enumerate(zip((*at, column), here, strict=True)) if a != b]
        tone = apart[0] if len(apart) == 1 else None
        previous, node = node, None if per_node is None else rank // per_node
        wall = previous is not None and previous != node
        mark = "" if tone is None else letters[tone]
        yield Cell(str(rank), tone, mark, here is not None and not apart, wall)


def _nodes(mesh: Mesh, start: int) -> str:
    """The nodes of a row."""
    per_node, last = mesh.ranks_per_node, mesh.layouts[-1]
    if per_node is None:
        return ""
    offsets = last.offsets()
    ends = [mesh.universe.ranks[start + offset] // per_node for offset in (offsets[0], offsets[-1])]
    return f"node {ends[0]}" if ends[0] == ends[1] else f"nodes {ends[0]}..{ends[1]}"


# --- the groups -----------------------------------------------------------------------------------


def _groups(mesh: Mesh, room: Room) -> tuple[Listing, list[str]]:
    """A row for each name of the mesh, axes first; and the names that have no row."""
    further = [name for name in mesh.namespace if name not in mesh.axis_names]
    most = max(2, room.height - 13 - len(mesh.axis_names))
    named = [*mesh.axis_names, *further[: most if len(further) > most else None]]
    letters = [*letters_of(mesh.axis_names), *[""] * len(further)]
    rows = [(letter, *_row(mesh, name)) for letter, name in zip(letters, named, strict=False)]
    per_node = mesh.ranks_per_node
    head = ["", "axis", "size", "at", f"group of rank {mesh.rank}", *(["nodes"] if per_node else []), "all groups"]
    counts = {name: f"{mesh.universe.size // mesh.layout(name).size:,}" for name in named}
    # What is left of the width is for the rank's own group, and then for those of all ranks.
    left = room.width - sum(max(map(len, column)) for column in zip(head[:4], *rows, strict=False))
    left -= 2 * (len(head) - 1) + (len("nodes") if per_node else 0)
    least = max(len(head[-1]), *map(len, counts.values()))
    held = [mesh.ranks_of(mesh.layout(name)) for name in named]
    most_own = max(len(head[4]), min(left - least, max(27, left * 3 // 5)))
    own = ["-" if ranks is None else short_ranks(ranks, most_own) for ranks in held]
    widest = max(len(head[4]), *map(len, own))
    table = []
    for row, name, ranks, group in zip(rows, named, held, own, strict=True):
        nodes = [] if per_node is None else ["-" if ranks is None else f"{nodes_of(ranks, per_node):,}"]
        table.append((*row, group, *nodes, _all_groups(mesh, name, counts[name], left - widest)))
    tones = (*range(len(mesh.axis_names)), *[None] * (len(named) - len(mesh.axis_names)))
    right = (2, 3, 5) if per_node else (2, 3)
    return Listing(tuple(head), tuple(table), right, tones), further[len(named) - len(mesh.axis_names) :]


def _row(mesh: Mesh, name: str) -> tuple[str, str, str]:
    layout, position = mesh.layout(name), mesh.universe.position(mesh.rank)
    text = name if name in mesh.axis_names else f"{name} = {mesh.described(name)}"
    if len(text) > LONGEST:
        text = name if len(name) > LONGEST - 5 else f"{text[: LONGEST - 3]} {LEFT_OUT}"
    return text, f"{layout.size:,}", "-" if position is None else f"{layout.coordinate(position):,}"


def _all_groups(mesh: Mesh, name: str, count: str, width: int) -> str:
    """How many groups a name forms among all ranks, and the first few of them and the last."""
    layout = mesh.layout(name)
    if layout.size == 1:
        return f"{count} of one rank each"
    try:
        firsts = layout.complement(mesh.universe.size)
    except MeshError:  # an adopted slice of a job says nothing of the ranks beside it
        return ""
    offsets = layout.offsets()
    longest = max(1, width - len(count) - 2)

    @functools.lru_cache(maxsize=4096)
    def group(number: int) -> str:
        start = firsts.offset(number)
        if isinstance(offsets, range):
            return short_ranks(mesh.universe.pick(range(start, start + offsets.stop, offsets.step)), longest)
        return short_ranks(mesh.universe.pick([start + offset for offset in offsets]), longest)

    if group(0).endswith(" ranks"):
        return count
    text = joined(firsts.size, group, ", ", longest, "")
    return f"{count}: {text}" if text else count
