"""The generated pages: they say what the library does now, every row does what it says, pictures show what moves."""

from __future__ import annotations

import functools
from itertools import pairwise
from xml.etree import ElementTree

import einops
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import axes
from axes.algebra.errors import ShardingError
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.algebra.plan import plan
from axes.algebra.planning.candidates import COLLECTIVES
from axes.algebra.sharding import Sharding
from axes.algebra.universe import Universe
from axes.show.picture import Part, of_plan, overlay, trace
from docs import generate
from docs.pages import expressions, gradients, notebook
from docs.pages.gradients import Expression, Ran, Sent
from tests import plan_oracle as oracle

# --- the pages --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran() -> tuple[list[Ran], list[Ran]]:
    """What four ranks did: every run of the page about gradients, and every row of the page about expressions."""
    return tuple(map(gradients.combined, zip(*axes.launch(everything, 4, timeout=240), strict=True)))


def everything() -> tuple[list[Ran], list[Ran]]:
    return gradients.run_everything(), [run_row(row) for row in expressions.ROWS]


def run_row(row: expressions.Row) -> Ran:
    """A row of the page about expressions on small tensors: DTensors, against einops."""
    mesh = axes.init_mesh(" ".join(f"{name}={size}" for name, size in row.mesh.shape.items()), device_type="cpu")
    small = Expression("global", row.text, row.kind, row.op)
    shapes = [[gradients.EXTENTS[name] for name in expressions.names_of(s)] for s in row.shardings]
    wholes = [gradients.numbers(shape, seed) for seed, shape in enumerate(shapes)]
    operands = [gradients.placed(x, spec, mesh) for x, spec in zip(wholes, row.operands, strict=True)]
    with Sent() as there:
        y = small(operands, mesh)
    off = (axes.unshard(y) - small.on_one_device(wholes)).abs().max().item()
    return Ran(tuple(there.kinds), (), (axes.sharding_of(y).spec,), off)


def test_the_pages_and_pictures_are_what_the_library_says_now(ran):
    found = list(generate.differences(generate.files(ran[0])))
    assert not found, "run `python docs/generate.py`:\n" + "\n".join(found[:60])


def test_what_a_cell_prints_is_one_output_however_slowly_it_comes():
    page = "```python\nimport time\nprint(1, flush=True)\ntime.sleep(1)\nprint(2)\n```\n"
    (cell,) = notebook.executed(page)[0]["cells"]
    assert [output["text"] for output in cell["outputs"]] == ["1\n2\n"]


def test_a_page_that_differs_and_a_picture_of_no_row_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "DOCS", tmp_path / "docs")
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    (tmp_path / "docs" / "pictures" / "old.svg").touch()
    (tmp_path / "docs" / "page.md").write_text("one\ntwo\n")
    found = list(generate.differences(iter([(tmp_path / "docs" / "page.md", "one\n2\n")])))
    assert "-two" in found
    assert "+2" in found
    assert found[-1] == "docs/pictures/old.svg is of no row"


GLOO = {"reduce_scatter": "all_to_all", "permute": "all_to_all", "reduce_move": "all_to_all"}
"""What gloo runs for a step of another kind."""


@pytest.mark.parametrize("row", expressions.ROWS, ids=lambda row: row.name)
def test_an_expression_runs_as_its_plan_says_and_is_einops_on_the_whole(ran, row):
    happened = ran[1][expressions.ROWS.index(row)]
    assert happened.off == 0
    planned = expressions.kinds(expressions.steps_of(expressions.plans_of(row.on_dtensors())))
    assert [GLOO.get(kind, kind) for kind in planned if kind in COLLECTIVES] == list(happened.forward)
    result = row.on_dtensors().result.output
    assert row.mesh.sharding(happened.gradients[0]).is_equivalent(result)


RUNS = [(row.title, run) for row in gradients.ROWS for run in row.runs]


@pytest.mark.parametrize("at", range(len(RUNS)), ids=lambda at: f"{RUNS[at][1].view}, {RUNS[at][1].text}")
def test_a_gradient_is_that_of_one_device(ran, at):
    assert ran[0][at].off < 1e-12


def test_every_row_of_the_page_is_in_every_view_that_it_has():
    views = [frozenset(run.view for run in row.runs) for row in gradients.ROWS]
    assert set(views) == {
        frozenset({"local", "global"}),
        *(frozenset({view}) for view in ("local", "region", "crossing")),
    }


def test_the_text_on_one_device_is_the_expression_without_its_mesh():
    x = gradients.numbers((4, 8, 12), 0)
    e = Expression("local", "b s@(cp tp) d | sum@dp -> d@tp s b | same@dp")
    assert e.on_one_device([x]).equal(einops.rearrange(x, "b s d -> d s b"))


# --- pictures ---------------------------------------------------------------------------------------

CUBE = tuple(Layout((2,), (stride,)) for stride in (4, 2, 1))
STATES = oracle.all_states(3, 3)


def cube(place: tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]) -> Sharding:
    splits = tuple(tuple(CUBE[axis] for axis in dim) for dim in place[0])
    pending = (("sum", tuple(CUBE[axis] for axis in place[1])),) if place[1] else ()
    return oracle.lying(Universe.of(range(8)), Layout((8,), (1,)), splits, pending)


@st.composite
def plans(draw: st.DrawFn):
    source = draw(st.sampled_from(STATES))
    target = draw(st.sampled_from([place for place in STATES if set(place[1]) <= set(source[1])]))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=3, max_size=3) | st.just([8, 8, 8])))
    return plan(cube(source), cube(target), shape, "float64")


def drawn(parts: tuple[Part, ...], own: dict[int, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of the whole shape with what the parts say, and nan elsewhere."""
    found = np.full(shape, np.nan)
    for part in parts:
        at = tuple(slice(*span) for span in part.box)
        assert np.isnan(found[at]).all(), "parts overlap"
        found[at] = sum(own[origin][at] for origin in part.origins)
    return found


@settings(max_examples=150, deadline=None)
@given(plans())
def test_a_picture_shows_where_every_value_comes_from(made):
    """Adding up the tiles of the origins gives the tile, so that no summand is missing or counted twice."""
    truth = oracle.Truth(made.source, made.shape)
    own = {}
    for rank, tile in truth.tiles(made.source).items():
        own[rank] = np.full(made.shape, np.nan)
        own[rank][np.ix_(*oracle.held(made.source, made.shape, rank))] = tile
    last = trace(made)[-1]
    tiles = {}
    for rank in range(8):
        whole = drawn(last.parts[rank], own, made.shape)
        inside = np.ix_(*oracle.held(made.target, made.shape, rank))
        tiles[rank] = whole[inside]
        assert np.isfinite(whole).sum() == tiles[rank].size, "a part lies outside of the tile"
    truth.check(made.source, made.target, tiles)


@settings(max_examples=50, deadline=None)
@given(plans())
def test_arrows_are_what_a_step_sends(made):
    scenes = trace(made)
    for before, after in pairwise(scenes):
        assert after.step is not None
        assert not after.arrows or (after.step.kind in COLLECTIVES and after.step.bytes_in > 0)
        if all(extent % 8 == 0 for extent in made.shape):  # else what a step says may be more than it turns out to be
            assert bool(after.arrows) == (after.step.kind in COLLECTIVES)
        assert all(source != target and before.parts[source] for source, target in after.arrows)


def test_parts_that_are_alike_are_drawn_as_one():
    parts = [Part(((0, 2), (0, 4)), (0,)), Part(((2, 4), (0, 4)), (0,)), Part(((0, 4), (0, 4)), (1,))]
    assert overlay(parts) == (Part(((0, 4), (0, 4)), (0, 1)),)


def picture(mesh: Mesh, source: str, target: str) -> ElementTree.Element:
    ends = [mesh.sharding(spec) for spec in (source, target)]
    return ElementTree.fromstring(of_plan(plan(*ends, (8, 8)), mesh, ("s", "d")))


def test_a_picture_is_xml_with_a_tile_for_every_part():
    root = picture(Mesh("tp=4"), "s@tp d", "s d")
    name = functools.partial("{{http://www.w3.org/2000/svg}}{}".format)
    tiles = [rect for rect in root.iter(name("rect")) if rect.get("class") != "whole"]
    assert len(tiles) == 4 + 16
    assert len(list(root.iter(name("line")))) == 12
    assert root.find(name("title")).text == "s@tp d -> s d"


def test_a_picture_has_room_for_eight_ranks():
    with pytest.raises(ShardingError, match="room for 8 ranks"):
        picture(Mesh("tp=16"), "s@tp d", "s d")
