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

import copy
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from axes import Mesh, Plan, Sharding, ShardingError, Transfer
from axes.extension import checked_rank, checked_tensor_shape, shown
from axes.pictures.in_html import page_of, part_of_page
from axes.pictures.in_svg import svg_of
from axes.pictures.in_text import coded, lines_of, plain
from axes.pictures.mesh_sheet import sheet_of_mesh
from axes.pictures.moves import sheet_of_plan
from axes.pictures.panels import Remark, Room, Sheet
from axes.pictures.rank_text import seen_rank, short_ranks
from axes.pictures.sharding_sheet import sheet_of_sharding
from axes.pictures.transfer_sheet import NAMES, facts_of_transfer, sheet_of_transfer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SCHEMA = 2
"""The version of what `Explanation.json` returns."""

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


class Explanation(Picture):
    """What `axes.explain` gives: a picture, and the same as data.

    said: its text, where that isn't the picture's. wrong: why a command that gives it fails.

    >>> from axes.pictures.panels import Listing
    >>> sheet = Sheet("two ranks", "", (Listing((), (("tp", "2"),), title="axes"),))
    >>> print(Explanation(lambda room: sheet, {"tp": 2}))
    two ranks
    axes
      tp  2
    >>> Explanation(lambda room: sheet, {"tp": 2}).json()
    {'schema': 2, 'tp': 2}
    """

    def __init__(self, sheet: Callable[[Room], Sheet], facts: Mapping[str, Any], said: str = "", wrong: str = ""):
        super().__init__(sheet)
        self._facts, self._said, self.wrong = facts, said, wrong

    def __str__(self) -> str:
        return self._said or self.text()

    def json(self) -> dict[str, Any]:
        """The facts as data that `json.dumps` takes; `"schema"` is the version of their form.

        docs/explain.md says what each fact is. A name may be added to a version, none changes or goes.
        """
        return {"schema": SCHEMA, **copy.deepcopy(dict(self._facts))}


def as_written(text: str, facts: Mapping[str, Any], wrong: str = "") -> Explanation:
    """An explanation whose lines are printed as they are, however wide."""
    title, *lines = text.split("\n")
    return Explanation(lambda room: Sheet(title, "", (Remark(tuple(lines)),)), facts, text, wrong)


def explained_transfer(move: Transfer, rank: int | None = None) -> Explanation:
    """A transfer, seen from a rank."""
    seen = move.at(seen_rank(rank, f"the transfer: {short_ranks(move.ranks, NAMES)}", move.ranks, lambda: move.rank))
    return Explanation(partial(sheet_of_transfer, seen), facts_of_transfer(seen))


def explained_mesh(facts: Mapping[str, Any]) -> Explanation:
    """How a mesh expression is read, and the operations on layouts that carry it out."""
    rows = [f"  {_operation_text(each)}" for each in facts["steps"]] or ["  nothing to do"]
    return Explanation(lambda room: Sheet(facts["read"], "", (Remark(tuple(rows), close=True),)), facts)


def _operation_text(operation: Mapping[str, Any]) -> str:
    before, after = (", ".join(map(" ".join, operation[side].items())) for side in ("before", "after"))
    said = (
        " ".join(operation["after"])
        if operation["kind"] == "permute"
        else f"{before}  ->  {after}"
        if before
        else after
    )
    return f"{operation['kind']:<8} {said}"


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
        return Picture(partial(sheet_of_mesh, seen_mesh(x, seen)))
    if isinstance(x, Plan):
        ranks = (*x.source.universe.ranks, *x.target.universe.ranks)
        made = x.at(seen_rank(seen, f"{x.source.mesh!r} or {x.target.mesh!r}", ranks, lambda: x.rank))
        return Picture(partial(sheet_of_plan, made))
    if isinstance(x, Transfer):
        return explained_transfer(x, seen)
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
    return Picture(partial(sheet_of_sharding, sharding, whole, rank=seen_mesh(sharding.mesh, seen).rank, dtype=dtype))


def seen_mesh(mesh: Mesh, rank: int | None) -> Mesh:
    """A mesh seen from a rank."""
    return mesh.at(seen_rank(rank, repr(mesh), mesh.universe.ranks, lambda: mesh.rank))


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
