"""`axes.show`: what a picture says is what the mesh, the sharding and the plan say; its text is pinned by snapshots.

python -m tests.test_show        writes the snapshots anew, in tests/snapshots/show
"""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import rich.console
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

import axes
from axes.algebra.errors import AxesError, MeshError, ShardingError, SizeError
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Plan
from axes.algebra.planning.candidates import COLLECTIVES
from axes.algebra.sharding import Sharding
from axes.algebra.transfers import Transfer
from axes.show import terminal
from axes.show.mesh_sheet import letters_of, nodes_of, sheet_of_mesh
from axes.show.panels import Board, Listing, Room
from axes.show.picture import arrivals
from axes.show.plan_sheet import sheet_of_plan
from axes.show.rank_text import folded, runs_of, short_ranks
from axes.show.sharding_sheet import Blocks
from axes.show.show import Picture
from tests.counting import calls

SNAPSHOTS = Path(__file__).resolve().parent / "snapshots" / "show"
LARGE = Room(10_000, 10_000)

# --- the text, pinned -------------------------------------------------------------------------------

JOB = Mesh("pp=4 dp=2048 tp=8", "fsdp = dp tp", "edge = pp tp", ranks_per_node=8)
CUBE = Mesh("dp=2 cp=2 tp=2")


def planned(source: str, target: str, *shape: int, mesh: Mesh = CUBE, **options: object) -> Plan:
    return axes.plan(source, target, shape, mesh=mesh, dtype="bfloat16", **options)


CASES: dict[str, Callable[[], Picture]] = {
    "mesh": lambda: axes.show(Mesh("dp=2 tp=4", "all = dp tp", ranks_per_node=4), rank=5),
    "mesh of 65,536 ranks": lambda: axes.show(JOB, rank=40000),
    "mesh with many names": lambda: axes.show(
        Mesh(
            "pp dp_replicate dp_shard cp tp",
            "fsdp = dp_shard cp",
            "batch = dp_replicate dp_shard",
            "loss = batch cp",
            "(dp_shard cp tp) = efsdp ep",
            pp=2,
            dp_replicate=1,
            cp=2,
            tp=4,
            ep=8,
            ranks=range(64),
        )
    ),
    "mesh whose rows span nodes": lambda: axes.show(Mesh("dp=4 tp=16", ranks_per_node=8), rank=20),
    "sub-mesh": lambda: axes.show(Mesh("dp=8 tp=8")["tp"], rank=20),
    "ranks in another order": lambda: axes.show(Mesh("dp=2 tp=2", ranks=[10, 12, 11, 13])),
    "sharding": lambda: axes.show(CUBE.sharding("b@dp s@(cp tp) d"), (8, 2048, 4096), rank=5),
    "sharding of any shape": lambda: axes.show(CUBE.sharding("b@dp s@tp")),
    "sharding of three split dims": lambda: axes.show(CUBE.sharding("a@dp b@cp c@tp"), (8, 6, 4), rank=5),
    "sharding of one dim": lambda: axes.show(Mesh("x=4").sharding("n@x"), (5,)),
    "sharding of a factor": lambda: axes.show(
        Mesh("dp=2 tp=2").sharding("(qkv=3 heads@tp dim) embed@dp", heads=4), (48, 8), rank=1
    ),
    "pending": lambda: axes.show(CUBE.sharding("a b@tp | sum@(dp cp)"), (3, 4)),
    "pending in turn": lambda: axes.show(CUBE.sharding("a | sum@dp max@tp"), (4,)),
    "scalar": lambda: axes.show(CUBE.sharding(""), ()),
    "sharding on 65,536 ranks": lambda: axes.show(JOB.sharding("b@(pp dp) s@tp d"), (65536, 4096, 8192), rank=40000),
    "plan": lambda: axes.show(planned("b@dp s@tp d", "b@dp s d@tp", 8, 2048, 4096, mesh=Mesh("dp=2 tp=4"))),
    "plan of several steps": lambda: axes.show(
        planned(
            "b s d | sum@(cp tp)",
            "b s d",
            8,
            64,
            64,
            mesh=Mesh("dp=2 cp=2 tp=4"),
            cost_model=axes.CostModel(latency_us=0, ranks_per_node=16),
        )
    ),
    "plan that sends nothing": lambda: axes.show(planned("s d", "s d@tp", 64, 64)),
    "plan between two sets of ranks": lambda: axes.show(
        axes.plan(
            "a@dp b@tp",
            "a b@t",
            (64, 64),
            source_mesh=Mesh("dp=4 tp=2"),
            target_mesh=Mesh("r=2 t=2", ranks=range(8, 12)),
        ),
        rank=9,
    ),
    "plan on 65,536 ranks": lambda: axes.show(
        planned("b@dp s@tp d", "b@dp s d@tp", 65536, 4096, 8192, mesh=JOB), rank=40000
    ),
    "plan in a large group": lambda: axes.show(planned("b@dp s d", "b s d", 65536, 64, 8, mesh=JOB), rank=40000),
}


MOE = Mesh("pp=2 fsdp=2 tp=2", "(fsdp tp) = efsdp ep", ep=4)


def moved(source: str, target: str, *shape: int, on: Mesh, to: Mesh, **options: object) -> Transfer:
    return axes.transfer({"w": source}, {"w": target}, on, to, {"w": shape}, **options)


def fused() -> Transfer:
    """Layouts and ranks that differ: some ranks are on both sides, and tensors are parts of others."""
    table = {
        ("*.q", "*.k", "*.v"): ("*.qkv", "(tp h k) d, (tp g k) d, (tp g k) d -> (tp (h k + g k + g k)) d"),
        "*.experts.{e}.up": ("*.up", "e f d -> e d f"),
        "embed": ("embed", "head"),
    }
    shapes = {"0.q": (1024, 512), "0.k": (256, 512), "0.v": (256, 512), "embed": (4096, 512)}
    shapes |= {f"0.experts.{e}.up": (2048, 512) for e in range(8)}
    targets = {"0.qkv": "f@tp d", "0.up": "e@dp d f@tp", "embed": "v@tp d", "head": "v@tp d"}
    ends = Mesh("fsdp=2 tp=2"), Mesh("dp=2 tp=2", ranks=range(2, 6))
    return axes.transfer(dict.fromkeys(shapes, "f@(fsdp tp) d"), targets, *ends, shapes, rules=table, tp=2, k=64)


def staged() -> Transfer:
    """A mixture of experts in two pipeline stages, to ranks without a pipeline."""
    shapes, sources, targets, stages = {}, {}, {}, {}
    for layer in range(8):
        name = f"layers.{layer}."
        for part, shape, source, target in (
            ("q", (4096, 1024), "h@tp d@fsdp", "h@tp d"),
            ("up", (8, 2048, 1024), "e@ep f d@efsdp", "e@tp f d"),
            ("norm", (1024,), "d@fsdp", "d"),
        ):
            shapes[name + part], sources[name + part], targets[name + part] = shape, source, target
        stages[name + "*"] = MOE.at(4 * (layer // 4))["fsdp", "tp"]
    server = Mesh("dp=2 tp=4", ranks=range(8, 16))
    return axes.transfer(sources, targets, stages, server, shapes, dtype="bfloat16", bucket_mb=16)


TRANSFERS: dict[str, Callable[[], Transfer]] = {
    "transfer": lambda: axes.transfer(
        {"up": "f@fsdp d", "down": "d@fsdp f", "norm": "d@fsdp"},
        {"up": "f@tp d", "down": "d f@tp", "norm": "d"},
        Mesh("fsdp=4"),
        Mesh("dp=2 tp=2", ranks=range(4, 8)),
        {"up": (16384, 4096), "down": (4096, 16384), "norm": (4096,)},
        dtype="bfloat16",
    ),
    "transfer by rules": lambda: fused().at(3),
    "transfer from pipeline stages": lambda: staged().at(13),
    "transfer of 1,024 ranks to 1,024": lambda: moved(
        "f@(fsdp tp) d",
        "f d@tp",
        8192,
        8192,
        on=Mesh("fsdp=128 tp=8"),
        to=Mesh("dp=128 tp=8", ranks=range(1024, 2048)),
    ).at(1500),
    "transfer that sends nothing": lambda: moved("f@a d", "f@a d", 8, 8, on=Mesh("a=2"), to=Mesh("a=2")),
    "transfer of nothing": lambda: axes.transfer({}, {}, CUBE, CUBE, {}),
}
CASES |= {name: lambda made=made: axes.show(made()) for name, made in TRANSFERS.items()}


def snapshot(picture: Picture) -> str:
    return "".join(f"{width} columns\n\n{picture.text(width)}\n\n" for width in (80, 120))


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_that_of_the_snapshot(name):
    found = snapshot(CASES[name]())
    assert found == (SNAPSHOTS / f"{name}.txt").read_text(encoding="utf-8"), "python -m tests.test_show writes it anew"


def test_every_snapshot_is_of_a_case():
    assert {path.stem for path in SNAPSHOTS.iterdir()} == {*CASES}


@pytest.mark.parametrize("name", CASES)
def test_text_is_ascii_and_fits_its_width(name):
    picture = CASES[name]()
    for width in (60, 80, 120):
        text = picture.text(width)
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= width
        assert not re.search(r" $", text, re.MULTILINE)


# --- ranks in few words -----------------------------------------------------------------------------


def listed(text: str) -> list[int]:
    """The ranks that a text of nothing but ranks means."""
    found: list[int] = []
    for start, stop, step in re.findall(r"(\d+)(?:\.\.(\d+)(?: step (-?\d+))?)?", text):
        by = int(step or 1)
        found += range(int(start), int(stop) + (1 if by > 0 else -1), by) if stop else [int(start)]
    return found


@given(st.lists(st.integers(0, 60), min_size=1, max_size=20, unique=True))
def test_ranks_are_said_without_loss_where_there_is_room(ranks):
    assert listed(short_ranks(ranks, 1000)) == ranks
    assert [rank for run in runs_of(ranks) for rank in run] == ranks


@given(st.integers(0, 500), st.integers(1, 300), st.integers(1, 9), st.integers(1, 40))
def test_ranks_that_are_left_out_are_left_out_whole(start, count, step, width):
    text = short_ranks(range(start, start + count * step, step), width)
    assert len(text) <= width or text == f"{count:,} ranks" or " " not in text
    shown = listed(text) if not text.endswith(" ranks") else []
    assert set(shown) <= set(range(start, start + count * step, step))


@given(st.integers(1, 200), st.lists(st.integers(0, 199), min_size=1, max_size=5), st.integers(1, 12))
def test_what_is_folded_is_all_there_in_its_room(count, wanted, room):
    wanted = [at % count for at in wanted]
    found = folded(count, wanted, room)
    assert list(itertools.chain(*(at if isinstance(at, range) else [at] for at in found))) == list(range(count))
    assert wanted[0] in found
    assert len(found) <= max(room, 3), "the first thing that is wanted and what is on both sides of it"
    assert all(len(at) > 1 or room < 3 for at in found if isinstance(at, range))


# --- meshes -----------------------------------------------------------------------------------------

MESHES = [
    Mesh("dp=2 tp=4", "fsdp = dp tp", ranks_per_node=4),
    Mesh("pp=2 dp=3 tp=2", "swapped = tp pp", ranks_per_node=5),
    Mesh("dp=2 tp=3", ranks=[9, 4, 0, 2, 11, 7], ranks_per_node=4),
    Mesh("dp=2 cp=2 tp=2", ranks=range(16, 32, 2))["tp", "dp"],
    Mesh("a=1 ring=7"),
    Mesh("dp=4 tp=2", "(dp tp) = rows ep", ep=4)["ep", "rows"],
]


def parts(mesh: Mesh) -> tuple[Board, Listing]:
    panels = sheet_of_mesh(mesh, LARGE).panels
    (board,) = [panel for panel in panels if isinstance(panel, Board)]
    (listing,) = [panel for panel in panels if isinstance(panel, Listing)]
    return board, listing


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_the_ranks_of_a_mesh_are_where_its_coordinates_say(mesh):
    for rank in mesh.universe.ranks:
        board, _ = parts(mesh.at(rank))
        flat = list(itertools.chain(*_nested(mesh.at(rank).ranks)))
        assert [int(cell.text) for row in board.cells for cell in row] == flat
        assert [int(cell.text) for row in board.cells for cell in row if cell.here] == [rank]
        for head, row in zip(board.rows, board.cells, strict=True):
            for column, cell in zip(board.columns, row, strict=True):
                there = mesh.at(int(cell.text)).coordinate
                assert [str(at) for at in there.values()] == [*head.labels, *column.labels]


def _nested(ranks: Sequence[object]) -> Iterator[list[object]]:
    for each in ranks:
        yield from _nested(each) if isinstance(each, list) else [[each]]


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_the_peers_of_a_rank_bear_the_letter_of_their_axis(mesh):
    letters = letters_of(mesh.axis_names)
    assert len(set(letters)) == len(letters)
    for rank in mesh.universe.ranks:
        board, listing = parts(mesh.at(rank))
        for number, (name, letter) in enumerate(zip(mesh.axis_names, letters, strict=True)):
            marked = {int(cell.text) for row in board.cells for cell in row if cell.mark == letter}
            assert marked == {*mesh.axis(name).ranks_of(rank)} - {rank}
            assert all(cell.tone == number for row in board.cells for cell in row if cell.mark == letter)
            assert listing.rows[number][0] == letter


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_the_groups_of_a_mesh_are_those_of_its_names(mesh):
    at = 4
    for rank in mesh.universe.ranks:
        _, listing = parts(mesh.at(rank))
        assert len(listing.rows) == len(mesh.names)
        for name, row in zip([*mesh.axis_names, *mesh._further()], listing.rows, strict=True):
            axis = mesh.axis(name)
            assert listed(row[at]) == list(axis.ranks_of(rank))
            assert [row[2], row[3]] == [str(axis.size), str(mesh.at(rank).axis(name).index)]
            count, _, groups = row[-1].partition(": ")
            lines = [list(line) for line in axis.all_ranks()]
            if axis.size > 1:
                assert int(count) == len(lines)
                assert groups.count("..") or [listed(group) for group in groups.split(", ")] == lines
            if mesh.ranks_per_node:
                assert row[5] == str(len({peer // mesh.ranks_per_node for peer in axis.ranks_of(rank)}))


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh.ranks_per_node], ids=repr)
def test_a_wall_is_where_a_node_ends(mesh):
    board, _ = parts(mesh)
    for row, note in zip(board.cells, board.notes, strict=True):
        nodes = [int(cell.text) // mesh.ranks_per_node for cell in row]
        assert [cell.wall for cell in row[1:]] == [one != two for one, two in itertools.pairwise(nodes)]
        assert note == (f"node {nodes[0]}" if nodes[0] == nodes[-1] else f"nodes {nodes[0]}..{nodes[-1]}")


@given(st.integers(0, 100), st.integers(1, 50), st.integers(1, 20), st.integers(1, 16))
def test_nodes_are_counted_in_closed_form(start, count, step, per_node):
    ranks = range(start, start + count * step, step)
    assert nodes_of(ranks, per_node) == len({rank // per_node for rank in ranks})


def test_one_screen_of_65_536_ranks_says_whom_a_rank_talks_to_and_takes_little_work():
    str(axes.show(JOB, rank=1))  # whatever is imported late
    assert calls(lambda: axes.show(JOB, rank=40001).text()) < 10_000  # 5,700, in 1.5 ms
    text = str(axes.show(JOB, rank=40000))
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    (tp,) = [line.split() for line in lines if line.startswith("t  tp")]
    assert listed(tp[4]) == list(JOB.axis("tp").ranks_of(40000)) == list(range(40000, 40008))
    (row,) = [line for line in lines if "[40000]" in line]
    assert re.findall(r"(\d+)t", row) == [str(rank) for rank in range(40001, 40008)]


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh("pp=4 dp=2048 tp=8", "swapped = tp dp pp", ranks=list(range(65536))[::-1], ranks_per_node=8),
        Mesh("ring=65536", ranks_per_node=8),
        Mesh("dp=4 tp=16384", "(dp tp) = rows ep", ep=256),
    ],
    ids=["reversed", "ring", "wide"],
)
def test_any_mesh_of_65_536_ranks_takes_little_work(mesh):
    assert (
        calls(lambda: axes.show(mesh, rank=40000).text()) < 200_000
    )  # 142,000 of ranks in reverse, each of them listed


# --- shardings --------------------------------------------------------------------------------------

PERMUTED = Mesh("dp=2 cp=2 tp=2", ranks=[5, 3, 9, 1, 0, 8, 2, 4])

SHARDED: list[tuple[Sharding, tuple[int, ...]]] = [
    (CUBE.sharding("b@dp s@(cp tp) d"), (8, 16, 4)),
    (CUBE.sharding("b@dp s@(tp cp)"), (3, 5)),
    (PERMUTED.sharding("a@(tp dp) b@cp"), (7, 4)),
    (CUBE.sharding("a@dp b@cp c@tp"), (2, 5, 1)),
    (CUBE.sharding("a b | sum@cp"), (3, 4)),
    (CUBE.sharding("a | sum@dp max@tp"), (4,)),
    (CUBE.sharding("(three=3 h@tp d) e@cp", h=4), (24, 6)),
    (CUBE.sharding("(a@dp b@tp c) e", a=4, b=6), (48, 3)),
    (CUBE.sharding("(a b@(dp tp))", a=2), (16,)),
    (CUBE.sharding("(a b)@dp c@tp", a=2), (8, 3)),
    (CUBE["tp", "dp"].at(3).sharding("a@tp b"), (4, 4)),
    (CUBE.sharding(""), ()),
    (CUBE.sharding("a@tp b"), (0, 3)),
    (CUBE.sharding("(a@dp b@tp)", a=4), (0,)),
]


@pytest.mark.parametrize(("sharding", "shape"), SHARDED, ids=lambda value: str(value))
def test_a_block_is_held_by_the_ranks_whose_tile_it_is(sharding, shape):
    mesh = sharding.mesh
    members = {*itertools.chain(*_nested(mesh.ranks))}
    blocks = Blocks.of(sharding, shape, mesh.rank)
    held: dict[int, set[tuple[int, ...]]] = {rank: set() for rank in members}
    for numbers in itertools.product(*(range(cut.count) for cut in blocks.dims)):
        spans = [range(*cut.span(number)) for cut, number in zip(blocks.dims, numbers, strict=True)]
        ranks = listed(blocks.holders(numbers, 10_000))
        assert len(ranks) == len(set(ranks))
        assert blocks.is_own(numbers) == (mesh.rank in ranks)
        for rank in ranks:
            points = set(itertools.product(*spans))
            assert not held[rank] & points, "blocks overlap"
            held[rank] |= points
    for rank in members:
        indices = [[i for run in runs for i in range(*run)] for runs in sharding.tile(shape, rank)]
        assert held[rank] == set(itertools.product(*indices))


@pytest.mark.parametrize(("sharding", "shape"), SHARDED, ids=lambda value: str(value))
def test_every_sharding_can_be_shown_at_every_size_and_from_every_rank(sharding, shape):
    members = {*itertools.chain(*_nested(sharding.mesh.ranks))}
    for rank, given_shape in itertools.product(members, (shape, None)):
        picture = axes.show(sharding, given_shape, rank=rank)
        assert "[" in picture.text(), "the place of the rank is in brackets"
        ElementTree.fromstring(picture.svg())


def test_summands_stand_together_and_copies_side_by_side():
    blocks = Blocks.of(CUBE.sharding("a@tp | sum@cp"), (4,), 0)
    assert [blocks.holders((at,), None) for at in (0, 1)] == ["sum(0 2) sum(4 6)", "sum(1 3) sum(5 7)"]
    blocks = Blocks.of(CUBE.sharding("a | sum@dp max@tp"), (4,), 0)
    assert blocks.holders((0,), None) == "max(sum(0 4) sum(1 5)) max(sum(2 6) sum(3 7))"


def test_a_colour_is_of_the_ranks_that_hold_a_block():
    def fills(sharding: Sharding, *shape: int) -> list[str | None]:
        root = ElementTree.fromstring(axes.show(sharding, shape).svg())
        return [rect.get("style") for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.get("style")]

    found = fills(CUBE.sharding("(three=3 h@tp d)", h=4), 24)
    assert found == found[:2] * 3
    assert len(set(found)) == 2
    assert len(set(fills(CUBE.sharding("a@dp b@cp c@tp"), 8, 8, 8))) == 8


# --- plans ------------------------------------------------------------------------------------------

PLANS = [
    planned("b@dp s@tp d", "b@dp s d@tp", 8, 8, 8),
    planned("b s@(cp tp) d", "b s@tp d", 8, 8, 8),
    planned("b s@(cp tp) d", "b s@(tp cp) d", 2, 8, 2),
    planned("b s@(dp cp tp)", "b@tp s", 3, 7),
    planned("b@cp s d | sum@tp", "b@(tp cp) s d", 8, 8, 8),
    axes.plan("s@a t@b", "s@c t@d", (6, 6), source_mesh=Mesh("a=2 b=3"), target_mesh=Mesh("c=3 d=2")),
    axes.plan("a@dp", "a@t", (8,), source_mesh=Mesh("dp=4"), target_mesh=Mesh("t=2", ranks=range(4, 6))),
]


@pytest.mark.parametrize("made", PLANS, ids=str)
def test_what_goes_from_whom_to_whom_is_what_the_exchanges_say(made):
    size = {"bfloat16": 2, "float32": 4}[made.dtype]
    for rank in made.source.universe.ranks:
        boards = [panel for panel in sheet_of_plan(made.at(rank), LARGE).panels if isinstance(panel, Board)]
        steps = [step for step in made.at(rank).steps if step.kind in COLLECTIVES and step.ranks]
        assert len(boards) == len(steps)
        for board, step in zip(boards, steps, strict=True):
            for head, row in zip(board.rows, board.cells, strict=True):
                sender = int(head.labels[0])
                exchange = step.exchange(sender)
                sent = dict(zip(exchange.ranks, exchange.send_counts, strict=True))
                if step.kind == "all_gather":
                    sent = dict.fromkeys(sent, exchange.sends[0].elements)
                for column, cell in zip(board.columns, row, strict=True):
                    receiver = int(column.labels[0])
                    if receiver != sender:
                        assert cell.text == (f"{sent[receiver] * size} B" if sent[receiver] else "-")


@pytest.mark.parametrize("made", PLANS, ids=str)
def test_what_a_rank_has_after_a_step_is_its_tile(made):
    for rank in made.target.universe.ranks:
        for step in made.at(rank).steps:
            came = [box for _, boxes in arrivals(step, rank) for box in boxes]
            tile = math.prod(step.output_shape(rank) or ())
            layers = step.resolved.size if step.kind == "reduce_move" else 1
            assert sum(math.prod(stop - start for start, stop in box) for box in came) == tile * layers
        text = axes.show(made, rank=rank).text(200, 200)
        assert f"rank {rank} holds" in text


def test_a_plan_in_a_group_of_thousands_takes_little_work():
    made = planned("b@dp s d", "b s d", 65536, 64, 8, mesh=JOB)
    small = planned("b@dp", "b@tp", 4096, mesh=Mesh("dp=64 tp=16"))
    assert sum(calls(lambda plan=plan: axes.show(plan).text()) for plan in (made, small)) < 50_000  # 35,000
    text = [axes.show(plan).text() for plan in (made, small)]
    assert "32 groups of 2,048: 0..16376 step 8" in text[0]


# --- SVG and HTML -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_an_svg_is_xml_with_words_for_who_does_not_see_it(name):
    svg = CASES[name]().svg()
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    assert root.get("role") == "img"
    assert root.find(f"{space}title").text
    assert len(root.find(f"{space}desc").text) > 20
    assert "prefers-color-scheme: dark" in svg
    assert not re.search(r"<script|href|src=|url\((?!#)|@import|http(?!://www\.w3\.org)", svg)
    rules = re.sub(r"@media[^{]*|/\*.*?\*/", "", "".join(style.text for style in root.iter(f"{space}style")))
    selectors = [part.strip() for rule in re.findall(r"([^{}]+)\{", rules) for part in rule.split(",")]
    assert all(part.startswith((".axes-sheet", ".axes-moves")) for part in selectors if part), "rules are a page's"
    width, height = map(float, root.get("viewBox").split()[2:])
    for text in root.iter(f"{space}text"):
        assert 0 <= float(text.get("x")) <= width
        assert float(text.get("y")) <= height


class Tags(HTMLParser):
    """What is open at the end, and which tags and attributes there are."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", CASES)
def test_html_closes_what_it_opens_and_needs_nothing_from_outside(name):
    picture = CASES[name]()
    page, part = picture.html(), picture._repr_html_()
    assert part in page
    found = Tags()
    found.feed(page)
    assert not found.open
    assert not found.tags & {"script", "link", "img", "iframe", "object"}
    assert not found.attributes & {"src", "href", "onload", "onclick"}
    assert 'name="viewport"' in page
    assert page.count("prefers-color-scheme: dark") >= 2
    for listing in re.findall(r"<table>.*?</table>", page, re.DOTALL):
        assert len({row.count("<t") for row in re.findall(r"<tr>(.*?)</tr>", listing)}) == 1


def test_text_that_looks_like_html_is_text():
    made = axes.show(Mesh("dp=2").sharding("a@dp | sum@()"), (4,)).html()
    assert "a@dp | sum@()" in made
    assert "<b s" not in axes.show(planned("b@dp", "b", 8)).html()
    assert "b@dp -&gt; b" in axes.show(planned("b@dp", "b", 8)).html()


def test_a_notebook_shows_meshes_shardings_plans_and_transfers():
    made, move = planned("b@dp", "b", 8), TRANSFERS["transfer"]()
    for value, shown in (
        (move, axes.show(move)),
        (CUBE, axes.show(CUBE)),
        (CUBE.sharding("a@dp b"), axes.show(CUBE.sharding("a@dp b"))),
        (made, axes.show(made)),
    ):
        assert value._repr_html_() == shown._repr_html_()
    assert not hasattr(DTensor, "_repr_html_"), "torch's class is as torch made it"


# --- the terminal -----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that someone reads."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch):
    """A terminal of 100 columns that has colours."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def without_escapes(text: str) -> str:
    return re.sub(r" +$", "", re.sub(r"\x1b\[[\d;]*m", "", text), flags=re.MULTILINE)


@pytest.mark.parametrize("name", CASES)
def test_colour_says_nothing_that_the_text_does_not(name, screen):
    picture = CASES[name]()
    picture.print(screen)
    assert "\x1b[" in screen.getvalue()
    assert without_escapes(screen.getvalue()) == picture.text(100, 29) + "\n"


def test_a_pipe_gets_plain_text(capsys):
    picture = CASES["mesh"]()
    picture.print()
    assert capsys.readouterr().out == picture.text() + "\n"
    assert repr(picture) == str(picture) == picture.text()


def test_no_color_is_honoured(screen, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    CASES["mesh"]().print(screen)
    codes = {code for found in re.findall(r"\x1b\[([\d;]*)m", screen.getvalue()) for code in found.split(";")}
    assert codes <= {"0", "1", "2", "7", ""}, "weight and reverse are no colours"


def test_without_rich_a_terminal_gets_plain_text(screen, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    picture = CASES["mesh"]()
    picture.print(screen)
    assert screen.getvalue() == picture.text(100) + "\n"


def test_a_prompt_shows_it_in_colour(screen, monkeypatch):
    monkeypatch.setattr(sys, "stdout", screen)
    assert "\x1b[" in repr(CASES["mesh"]())


def test_a_program_that_prints_by_rich_shows_it():
    stream = io.StringIO()
    picture = CASES["mesh"]()
    rich.console.Console(file=stream, width=90).print(picture)
    assert stream.getvalue() == picture.text(90) + "\n"


def test_a_terminal_is_as_wide_as_a_picture_can_be(monkeypatch, screen):
    for columns, width in (("20", terminal.NARROWEST), ("1000", terminal.WIDEST)):
        monkeypatch.setenv("COLUMNS", columns)
        assert terminal.room_of(screen).width == width
    assert terminal.room_of(None) == Room() == terminal.room_of(io.StringIO())


# --- what can be shown ------------------------------------------------------------------------------


def test_a_dtensor_is_shown_as_it_lies():
    with axes.simulate(8, rank=5):
        mesh = axes.init_mesh("dp=2 cp=2 tp=2", device_type="cpu")
        x = axes.zeros("b@dp s@(cp tp)", mesh=mesh, b=8, s=16)
        text = str(axes.show(x))
        seen = str(axes.show(mesh))
    assert text.startswith("_@dp _@(cp tp)     [8, 16] float32\non dp=2 cp=2 tp=2; rank 5 holds 4 x 4, 64 B\n")
    assert "[5]" in text
    assert "seen from rank 5" in seen
    assert "seen from rank 0" in str(axes.show(mesh)), "its job has ended"
    assert mesh._repr_html_()


def test_who_shows_a_mesh_needs_no_torch():
    code = (
        "import sys, axes\n"
        "mesh = axes.Mesh('dp=2 tp=2')\n"
        "axes.show(mesh).html(), axes.show(mesh.sharding('a@dp')).svg()\n"
        "axes.show(axes.transfer({'w': 'a@dp'}, {'w': 'a'}, mesh, mesh, {'w': (4,)})).html()\n"
        "mesh._repr_html_(), str(axes.show(axes.plan('a@dp', 'a', (4,), mesh=mesh)))\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)\n"
        "import axes.show.picture\n"
        "assert callable(axes.show)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(axes.__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


KNOWN = "axes.show takes a Mesh, a Sharding, a Plan, a Transfer or a DTensor; found "

MISTAKES: dict[str, tuple[Callable[[], object], type[AxesError], str]] = {
    "a number": (lambda: axes.show(3), ShardingError, KNOWN + "int: 3"),
    "nothing": (lambda: axes.show(None), ShardingError, KNOWN + "NoneType: None"),
    "text": (
        lambda: axes.show("dp=2 tp=4"),
        ShardingError,
        KNOWN + "str\nread the text first: axes.Mesh(text), mesh.sharding(text) or axes.plan(source, target, shape)",
    ),
    "a plain tensor": (
        lambda: axes.show(torch.ones(2)),
        ShardingError,
        KNOWN + "Tensor\na plain tensor lies on this rank alone; axes.shard(x, spec, mesh=mesh) makes a DTensor of it",
    ),
    "a mesh with a shape": (
        lambda: axes.show(CUBE, (8, 8)),
        ShardingError,
        "axes.show takes a shape with a Sharding alone; found (8, 8) with a Mesh",
    ),
    "a shape of another number of dims": (
        lambda: axes.show(CUBE.sharding("a@dp"), (8, 8)),
        ShardingError,
        "the spec 'a@dp' has 1 dims, the tensor 2: [8, 8]",
    ),
    "a shape that is text": (
        lambda: axes.show(CUBE.sharding("a@dp"), "8"),
        SizeError,
        "a shape is whole numbers from 0; found '8'",
    ),
    "a rank that isn't there": (
        lambda: axes.show(CUBE, rank=8),
        MeshError,
        "rank 8 isn't one of the ranks of Mesh('dp=2 cp=2 tp=2')",
    ),
    "a rank that isn't in the plan": (
        lambda: axes.show(PLANS[-1], rank=8),
        MeshError,
        "rank 8 isn't one of the ranks of Mesh('dp=4') or Mesh('t=2', ranks=range(4, 6))",
    ),
    "a transfer with a shape": (
        lambda: axes.show(TRANSFERS["transfer"](), (8,)),
        ShardingError,
        "axes.show takes a shape with a Sharding alone; found (8,) with a Transfer",
    ),
    "a rank that isn't in the transfer": (
        lambda: axes.show(TRANSFERS["transfer"](), rank=8),
        MeshError,
        "rank 8 isn't one of the ranks of the transfer: 0..7",
    ),
    "a rank that is text": (
        lambda: axes.show(CUBE.sharding("a@dp"), rank="0"),
        MeshError,
        "rank is a whole number from 0; found '0'",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_error(name):
    call, kind, message = MISTAKES[name]
    with pytest.raises(kind) as found:
        call()
    assert str(found.value) == message


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 6), st.integers(20, 200), st.integers(1, 60))
def test_any_mesh_can_be_shown_in_any_room(sizes, per_node, width, height):
    mesh = Mesh(" ".join(f"a{at}={size}" for at, size in enumerate(sizes)), ranks_per_node=per_node)
    text = axes.show(mesh, rank=mesh.size - 1).text(width, height)
    assert max(map(len, text.splitlines())) <= width
    assert f"[{mesh.size - 1}]" in text or width < 40


def main() -> None:
    """Write the snapshots."""
    SNAPSHOTS.mkdir(parents=True, exist_ok=True)
    for old in SNAPSHOTS.iterdir():
        old.unlink()
    for name, case in CASES.items():
        (SNAPSHOTS / f"{name}.txt").write_text(snapshot(case()), encoding="utf-8")


if __name__ == "__main__":
    main()
