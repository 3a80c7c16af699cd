"""A mesh as a sheet: its ranks as a grid, the last axis across, and the groups that each name forms.

The mesh is seen from a rank: its row is among those that are shown, and the ranks that it shares a group
with bear the letter of the axis. What is shown costs as much as it is long, whatever the number of ranks,
but for groups that aren't evenly spaced, whose ranks are listed.

>>> from axes.algebra.mesh import Mesh
>>> from axes.pictures.in_text import lines_of, plain
>>> from axes.pictures.panels import Room
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

from collections.abc import Iterator, Sequence
from itertools import product, zip_longest

from axes import Layout, Mesh
from axes.pictures.panels import (
    Board,
    BoardSide,
    Cell,
    Head,
    Listing,
    Remark,
    Room,
    Sheet,
    around,
    board_of,
    widths_of,
)
from axes.pictures.rank_text import LEFT_OUT, groups_text, short_ranks

LONGEST = 24
"""A name with what it is made of gets at most this many columns of a table."""


def sheet_of_mesh(mesh: Mesh, room: Room) -> Sheet:
    """The picture of a mesh, seen from its rank."""
    declared = " ".join(f"{name}={size}" for name, size in mesh.shape.items())
    listing = _groups(mesh, room.width)
    grid = _grid(mesh, room, max(5, room.height - 6 - len(listing.rows)))
    summary = f"The ranks of a mesh {declared} as a grid, and the groups along each of its axes. {_ranks(mesh)}."
    return Sheet(f"Mesh {declared}", summary, (Remark((_ranks(mesh),), close=True), grid, listing))


def letters_of(names: Sequence[str]) -> tuple[str, ...]:
    """A letter for each name: of its last word where that is free.

    >>> letters_of(["pp", "dp_replicate", "dp_shard", "cp", "tp", "pipe"])
    ('p', 'r', 's', 'c', 't', 'i')
    """
    found: list[str] = []
    for name in map(str.lower, names):
        initials = [word[0] for word in reversed(name.split("_")) if word]
        wanted = (*initials, *name, *"abcdefghijklmnopqrstuvwxyz")
        found.append(next((each for each in wanted if each.isalpha() and each.isascii() and each not in found), "*"))
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
    return f"{count}, seen from rank {mesh.rank}"


def nodes_of(ranks: Sequence[int], per_node: int) -> int:
    """On how many nodes these ranks are.

    >>> nodes_of(range(0, 64, 2), 8), nodes_of(range(0, 64, 16), 8), nodes_of([7, 8, 3], 8)
    (8, 4, 2)
    """
    if isinstance(ranks, range) and ranks.step > 0:
        return len(ranks) if ranks.step >= per_node else ranks[-1] // per_node - ranks[0] // per_node + 1
    return len({rank // per_node for rank in ranks})


def _grid(mesh: Mesh, room: Room, lines: int) -> Board:
    """The ranks, the last axis across. A rank is a peer along an axis if its coordinates on all others are the same."""
    seen, whole, per_node = mesh.universe.position(mesh.rank) or 0, mesh.layout_of_all, mesh.ranks_per_node
    *leading, last = mesh.layouts
    rows, base = Layout.product(*leading), seen - whole.offset(whole.coordinate(seen))
    letters = letters_of(mesh.axis_names)

    def node(row: int, column: int) -> int:
        return 0 if per_node is None else mesh.universe.ranks[base + row + column] // per_node

    def note(row: int) -> str:
        ends = list(dict.fromkeys((node(row, 0), node(row, last.offset(last.size - 1)))))
        return "" if per_node is None else f"node{'s' * (len(ends) > 1)} {LEFT_OUT.join(map(str, ends))}"

    def cell(row: int, column: int) -> Cell:
        at = base + row + column
        apart = [i for i, layout in enumerate(mesh.layouts) if layout.coordinate(at) != layout.coordinate(seen)]
        peer = len(apart) == 1
        wall = column > 0 and node(row, last.offset(last.coordinate(column) - 1)) != node(row, column)
        rank = str(mesh.universe.ranks[at])
        return Cell(rank, apart[0] if peer else None, letters[apart[0]] if peer else "", not apart, wall)

    def side(name: str, layout: Layout) -> BoardSide:
        return BoardSide(name, layout, lambda at: Head((str(layout.coordinate(at)),)))

    *down, across = map(side, mesh.axis_names, mesh.layouts)
    wanted = _wanted(rows, leading, seen), around(last.coordinate(seen), last.size)
    return board_of(down, across, cell, wanted, room, lines, note=note)


def _wanted(rows: Layout, leading: Sequence[Layout], seen: int) -> Iterator[int]:
    """Rows in the order of their importance: this rank's, the first, the last, then those of its peers by distance."""
    yield from (rows.coordinate(seen), 0, rows.size - 1)
    for distance, layout in product(range(1, 17), reversed(leading)):
        at = layout.coordinate(seen)
        near = [other for other in (at + distance, at - distance) if 0 <= other < layout.size]
        yield from (rows.coordinate(seen - layout.offset(at) + layout.offset(other)) for other in near)


def _groups(mesh: Mesh, width: int) -> Listing:
    """A row for each name. A third of the width is for this rank's group, what is left for those of all ranks."""
    universe, per_node, seen = mesh.universe, mesh.ranks_per_node, mesh.universe.position(mesh.rank) or 0
    head = ("", "axis", "size", "at", f"group of rank {mesh.rank}", *(["nodes"] if per_node else []))
    rows, names = [], dict.fromkeys((*mesh.axis_names, *mesh.namespace))
    for mark, name in zip_longest(letters_of(mesh.axis_names), names, fillvalue=""):
        layout, text = mesh.layout(name), name if mark else f"{name} = {mesh.described(name)}"
        ranks = universe.group(layout, mesh.rank)
        own = short_ranks(ranks, max(len(head[4]), width // 3))
        row = (mark, text if len(text) <= LONGEST else name, f"{layout.size:,}", f"{layout.coordinate(seen):,}", own)
        rows.append((*row, *([f"{nodes_of(ranks, per_node):,}"] if per_node else [])))
    left = width - sum(widths_of([head, *rows])) - 2 * len(head)
    table = []
    for each, name in zip(rows, names, strict=True):
        count = f"{universe.size // mesh.layout(name).size:,}"
        text = groups_text(universe, mesh.layout(name), left - len(count) - 2)
        table.append((*each, f"{count}: {text}" if text else count))
    return Listing((*head, "all groups"), tuple(table), (2, 3, 5) if per_node else (2, 3), tuple(range(mesh.ndim)))
