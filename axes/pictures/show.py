"""`axes.show`: a mesh, a sharding, a plan, a transfer or a DTensor as a picture.

    axes.show(mesh)                          ranks as a grid, and the groups that each axis forms
    axes.show(mesh, rank=40000)              the same from one rank: whom does it talk to?
    axes.show(sharding, (8, 2048, 4096))     blocks of the tensor, and the ranks that hold them
    axes.show(plan)                          what moves, between whom, bytes and time
    axes.show(transfer, rank=5)              the same of many tensors, in buckets

What is shown is a `Sheet` of boards, tables and remarks (`panels`), made by `mesh_sheet`, `sharding_sheet`,
`moves` or `transfer_sheet`, and put into text, SVG and HTML by `in_text`, `in_svg` and `in_html`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING

from axes.algebra.errors import MeshError, ShardingError, shown
from axes.algebra.explanation import Explanation
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Plan
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import checked_rank, checked_tensor_shape
from axes.pictures.in_html import page_of, part_of_page
from axes.pictures.in_svg import svg_of
from axes.pictures.in_text import coded, lines_of, plain
from axes.pictures.mesh_sheet import sheet_of_mesh
from axes.pictures.moves import sheet_of_plan
from axes.pictures.panels import Listing, Remark, Room, Sheet
from axes.pictures.sharding_sheet import sheet_of_sharding
from axes.pictures.transfer_sheet import seen_transfer, sheet_of_transfer
from axes.transfers.transfers import Transfer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DRAWN = Room(width=96, height=32)
"""How much SVG and HTML show."""


class Picture:
    """What `axes.show` gives: text, SVG or HTML of one value.

    `str()` and `print()` give plain text of 80 columns and 24 lines; `text` of another size. A prompt and
    `show()` use the terminal's size and colours. A notebook shows it by itself.
    """

    def __init__(self, sheet: Callable[[Room], Sheet]):
        self._sheet = sheet

    def text(self, width: int = 80, height: int = 24) -> str:
        """Plain ASCII text, of at most `width` columns, 20 or more, folded to about `height` lines where it can be."""
        room = Room(checked_rank("width", width, 20), checked_rank("height", height, 1))
        return plain(lines_of(self._sheet(room), room.width))

    def svg(self) -> str:
        """An SVG for light and dark, with its summary as text; without scripts, nothing comes from outside."""
        return svg_of(self._sheet(DRAWN))

    def html(self) -> str:
        """A page of its own, for light and dark and for any width."""
        return page_of(self._sheet(DRAWN))

    def print(self, file: IO[str] | None = None) -> None:
        """Write it to `file`, by default to `sys.stdout`; in colour where that is a terminal."""
        print(self._for(file or sys.stdout), file=file)

    def _for(self, stream: IO[str]) -> str:
        if not stream.isatty() or os.environ.get("TERM") == "dumb":
            return self.text()
        size = shutil.get_terminal_size()
        room = Room(min(max(size.columns, 40), 160), max(size.lines - 1, Room().height))
        return coded(lines_of(self._sheet(room), room.width), colors=not os.environ.get("NO_COLOR"))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self._for(sys.stdout)

    def _repr_html_(self) -> str:
        return part_of_page(self._sheet(DRAWN))


def show(
    x: Mesh | Sharding | Plan | Transfer | DTensor, shape: Sequence[int] | None = None, *, rank: int | None = None
) -> Picture:
    """Draw a mesh, a sharding, a plan, a transfer or a DTensor, as text, SVG or HTML. Needs no process.

    - A mesh: the ranks as a grid, the last axis across, and the groups of each name.
    - A sharding or a DTensor: the blocks of the tensor, with the ranks that hold each. `0 4` are copies, `sum(0 4)`
      terms of a sum.
    - A plan: for each step the bytes that each rank sends to each other, and the time.
    - A transfer: its tensors, the bytes that each rank sends to each other, and the buckets of one rank.

    Args:
        x: The object.
        shape: The whole shape of the tensor, for a sharding; by default any shape that divides.
        rank: The global rank to see it from, by default that of `x`. Its place is in brackets, and the ranks that it
            communicates with have the letter of the axis. A large picture is folded around this rank.

    Returns:
        A picture, which a terminal prints and a notebook draws. It has `str()`, `svg()` and `html()`.

    Raises:
        ShardingError: `x` can't be drawn, or a shape is given where `x` has one.
        MeshError: The mesh lacks the rank.

    Examples:
        >>> from axes.algebra.mesh import Mesh
        >>> print(show(Mesh("dp=2 tp=4"), rank=5))
        Mesh dp=2 tp=4
        8 ranks, seen from rank 5
        <BLANKLINE>
        dp  tp  0  1  2  3
        0       0  1d 2  3
        1       4t[5] 6t 7t
        <BLANKLINE>
           axis  size  at  group of rank 5  all groups
        d  dp       2   1  1 5              4: 0 4, 1 5, 2 6, 3 7
        t  tp       4   1  4..7             2: 0..3, 4..7
    """
    seen = None if rank is None else checked_rank("rank", rank)
    if shape is not None and isinstance(x, (Mesh, Plan, Transfer, *_dtensors())):
        raise ShardingError(
            f"axes.show takes a shape with a Sharding alone; found {shown(shape)} with a {type(x).__name__}"
        )
    if isinstance(x, Mesh):
        return Picture(partial(sheet_of_mesh, x.at(_rank_of(seen, x))))
    if isinstance(x, Plan):
        made = x if seen is None else x.at(_rank_of(seen, x.source.mesh, x.target.mesh))
        return Picture(partial(sheet_of_plan, made))
    if isinstance(x, Transfer):
        return Picture(partial(sheet_of_transfer, seen_transfer(x, seen)))
    sharding, whole, dtype = x, None if shape is None else checked_tensor_shape(shape), None
    if isinstance(x, _dtensors()):
        sharding = importlib.import_module("axes.runtime.sharded").sharding_of(x)
        whole, dtype = tuple(map(int, x.shape)), str(x.dtype).removeprefix("torch.")
    if not isinstance(sharding, Sharding):
        takes = "axes.show takes a Mesh, a Sharding, a Plan, a Transfer or a DTensor; found"
        advice = [_INSTEAD[each.__name__] for each in type(x).__mro__ if each.__name__ in _INSTEAD]
        raise ShardingError(f"{takes} {type(x).__name__}{(advice or [f': {shown(x)}'])[0]}")
    if whole is not None:
        sharding.extents(whole)  # refuses what doesn't fit
    return Picture(partial(sheet_of_sharding, sharding, whole, rank=_rank_of(seen, sharding.mesh), dtype=dtype))


def drawn(value: object) -> Picture:
    """The picture of a mesh, a sharding, a plan, a transfer or an explanation: what a notebook shows of it."""
    if isinstance(value, Explanation):
        return Picture(partial(_sheet_of_explanation, value))
    return show(value)  # type: ignore[arg-type]


def _sheet_of_explanation(found: Explanation, room: Room) -> Sheet:
    """What moves, where that can be drawn, and the sections as tables; who doesn't see it is told the text."""
    panels = [] if found.drawing is None else [found.drawing()]
    for section in found.sections:
        widest = max(map(len, section.rows), default=1)
        rows = tuple((*row[:-1], *[""] * (widest - len(row)), row[-1]) for row in section.rows if len(row) > 1)
        lines = tuple(f"  {row[0]}" for row in section.rows if len(row) == 1)
        if rows and not rows[0][0]:  # the first row says what the columns are
            panels.append(Listing((section.title, *rows[0][1:]), rows[1:]))
        elif rows:
            panels.append(Listing((section.title, *[""] * (widest - 1)), rows))
        title = (section.title,) if section.title and not rows else ()
        panels += [Remark((*title, *lines), close=not title)] if lines else []
    return Sheet(found.heading, str(found), tuple(panels))


def _rank_of(rank: int | None, *meshes: Mesh) -> int:
    """The rank to look from: without one this rank, or the first of a mesh that it isn't of or whose job has ended."""
    if rank is not None and all(mesh.universe.position(rank) is None for mesh in meshes):
        raise MeshError(f"rank {rank} isn't one of the ranks of {' or '.join(map(repr, meshes))}")
    with contextlib.suppress(MeshError):
        if rank is not None or meshes[0].universe.position(meshes[0].rank) is not None:
            return meshes[0].rank if rank is None else rank
    return meshes[0].universe.ranks[0]


def _dtensors() -> tuple[type[DTensor], ...]:
    """The class of DTensors, where torch is imported: who shows a mesh needs none."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return () if tensors is None else (tensors.DTensor,)


_INSTEAD = {
    "str": "\nread the text first: axes.Mesh(text), mesh.sharding(text) or axes.plan(source, target, shape)",
    "Tensor": "\na plain tensor lies on this rank alone; axes.shard(x, spec, mesh=mesh) makes a DTensor of it",
    "DeviceMesh": "\naxes.Mesh.from_device_mesh(x) is a Mesh",
}
"""What to write instead of a value of a class, on a line of its own."""
