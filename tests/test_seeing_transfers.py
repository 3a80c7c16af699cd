"""A transfer shown and explained: each number is what the tiles of its shardings say, and what its views send."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import axes
from axes.algebra.errors import AxesError
from axes.algebra.plan import bytes_text
from axes.algebra.planning.boxes import intersection, volume
from axes.algebra.transfers import Transfer
from axes.show.panels import Board, Listing, Room
from axes.show.transfer_sheet import facts_of_transfer, kinds_of, sheet_of_transfer
from tests.counting import calls
from tests.test_show import TRANSFERS
from tests.transfer_cases import case

LARGE = Room(10_000, 10_000)


def needed(move: Transfer, rank: int) -> int:
    """Bytes that a rank wants and doesn't have, tensor by tensor, by their tiles alone."""
    found = 0
    for one in move.tensors:
        assert one.link is None
        has, wants = (end.tile(one.shape, rank) for end in (one.source, one.target))
        if wants is not None:
            both = None if has is None else intersection(has, wants)
            found += (volume(wants) - (0 if both is None else volume(both))) * one.itemsize
    return found


def boards(move: Transfer) -> Board | None:
    found = [panel for panel in sheet_of_transfer(move, LARGE).panels if isinstance(panel, Board)]
    return found[0] if found else None


def placed(board: Board) -> Iterator[tuple[int, int, str]]:
    """`(from, to, text)` of each place of a board that has all ranks."""
    for head, row in zip(board.rows, board.cells, strict=True):
        for column, cell in zip(board.columns, row, strict=True):
            yield int(head.labels[0].strip("[]")), int(column.labels[0].strip("[]")), cell.text


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 100_000), st.data())
def test_who_sends_how_much_to_whom_is_what_each_rank_sends_and_what_its_tiles_lack(seed, data):
    move = case(seed).plan(axes.Mesh)
    board = boards(move)
    wanted = {rank: needed(move, rank) for rank in move.ranks}
    if not sum(wanted.values()):
        assert board is None
        return
    seen = move.at(data.draw(st.sampled_from(move.ranks)))
    board = boards(seen)
    gives = {rank: case(seed).plan(axes.Mesh).at(rank).steps for rank in move.sources}
    sent = {
        (rank, peer): sum(step.sends.get(peer, 0) for step in steps)
        for rank, steps in gives.items()
        for peer in move.targets
    }
    assert {(one, two) for one, two, _ in placed(board)} == {*sent}
    for one, two, text in placed(board):
        if one != two:
            assert text == (bytes_text(sent[one, two]) if sent[one, two] else "-")
    for rank in move.targets:
        assert sum(count for (_, two), count in sent.items() if two == rank) == wanted[rank]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 100_000), st.data())
def test_the_facts_are_those_of_all_ranks_and_of_the_one_that_looks(seed, data):
    move = case(seed).plan(axes.Mesh)
    rank = data.draw(st.sampled_from(move.ranks))
    facts = facts_of_transfer(move.at(rank))
    wanted = {each: needed(move, each) for each in move.ranks}
    assert facts["received_in_all"] == sum(wanted.values())
    assert facts["most"]["bytes_in"] == max(wanted.values())
    assert facts["bytes_in"] == wanted[rank] == sum(step["bytes_in"] for step in facts["steps"])
    assert facts["most_by"]["bytes_in"] == [each for each in move.ranks if wanted[each] == max(wanted.values()) > 0]
    given_out = {each: sum(step.bytes_out for step in move.at(each).steps) for each in move.ranks}
    assert facts["bytes_out"] == given_out[rank]
    assert facts["most"]["bytes_out"] == max(given_out.values())
    assert facts["partners"] == [*move.at(rank).partners]
    names = [name for kind in facts["tensors"] for name in kind["sources"]]
    assert sorted(names) == sorted(one.source_name for one in move.tensors)
    whole = sum(math.prod(one.shape) * one.itemsize for one in move.tensors)
    assert facts["bytes"] == whole == sum(kind["bytes"] for kind in facts["tensors"])
    assert json.loads(json.dumps(facts)) == facts


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 100_000), st.data())
def test_a_view_of_a_plan_that_was_looked_at_is_that_of_a_fresh_one(seed, data):
    move, rank = case(seed).plan(axes.Mesh), None
    for rank in data.draw(st.lists(st.sampled_from(move.ranks), min_size=2, max_size=4)):
        move = move.at(rank)
        assert move.totals
        assert move.steps is not None
    fresh = case(seed).plan(axes.Mesh).at(rank)
    assert (move.steps, move.totals, move.peak_bytes) == (fresh.steps, fresh.totals, fresh.peak_bytes)
    assert (move.fingerprint, move.ranks, move.cost) == (fresh.fingerprint, fresh.ranks, fresh.cost)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 100_000), st.integers(20, 160), st.integers(1, 60))
def test_any_transfer_can_be_shown_and_explained_in_any_room(seed, width, height):
    move = case(seed).plan(axes.Mesh)
    for rank in move.ranks:
        text = axes.show(move, rank=rank).text(width, height)
        assert max(map(len, text.splitlines())) <= width
        assert text.isascii()
        told = str(axes.explain(move.at(rank)))
        assert max(map(len, told.splitlines())) <= 80
        assert f"rank {rank}" in told


def test_the_buckets_of_a_rank_are_those_that_it_takes_part_in():
    for name in ("transfer", "transfer from pipeline stages", "transfer by rules"):
        made = TRANSFERS[name]()
        for rank in made.ranks:
            move = made.at(rank)
            (listing,) = [
                panel
                for panel in sheet_of_transfer(move, LARGE).panels
                if isinstance(panel, Listing) and panel.head[0] == f"rank {rank}"
            ]
            steps = {f"bucket {step.number}": step for step in move.steps if step.ranks}
            shown = {row[0]: row for row in listing.rows if row[0] in steps}
            assert len(shown) == len(listing.rows) - any(row[0].startswith("..") for row in listing.rows)
            for label, row in shown.items():
                step = steps[label]
                counts = [bytes_text(count) if count else "-" for count in (step.bytes_out, step.bytes_in)]
                assert [*row[1:3]] == counts
            told = str(axes.explain(move))
            assert all(f"\n  {label} " in told for label in steps)


def test_tensors_that_lie_alike_are_told_together_with_what_they_become():
    (experts, tied, *_) = kinds_of(TRANSFERS["transfer by rules"]())
    assert experts.said == ("8 like 0.experts.0.up", "0.up")
    assert tied.said == ("embed", "embed and 1 more")
    assert "tied" not in str(axes.show(TRANSFERS["transfer"]()))
    assert kinds_of(TRANSFERS["transfer"]())[0].facts["target"] == "d f@tp"


def test_the_time_is_the_cost_models_bucket_by_bucket():
    made = TRANSFERS["transfer"]().at(5)
    model = axes.CostModel()
    inside = sum(
        model.latency_us + (step.bytes_in / model.intra_node_gbps + step.bytes_in / model.memory_gbps) / 1e3
        for step in made.steps
    )
    assert made.cost == pytest.approx(inside)
    far = axes.transfer(
        {"w": "a@x"}, {"w": "a@x"}, axes.Mesh("x=2"), axes.Mesh("x=2", ranks=[8, 9]), {"w": (2**20,)}, dtype="float32"
    )
    half = 2**21
    assert far.cost == pytest.approx(20 + (half / model.inter_node_gbps + half / model.memory_gbps) / 1e3)
    assert axes.explain(far).json()["time_us"] == round(far.cost, 3)


def test_a_transfer_is_explained_as_one_and_with_tensors_as_a_step():
    move = TRANSFERS["transfer from pipeline stages"]()
    found = axes.explain(move.at(13))
    facts = found.json()
    assert (facts["schema"], facts["kind"], facts["rank"]) == (1, "transfer", 13)
    assert "<svg" in found.svg()
    assert "layers.0.up" in found.html()
    assert axes.explain(move.at(99)).json()["rank"] == 0, "who has no part in it sees it from the first rank"
    with pytest.raises(AxesError, match="a transfer has its meshes and sizes"):
        axes.explain(move, mesh="dp=2")
    with axes.simulate(2), axes.init_mesh("a=2", device_type="cpu") as mesh:
        here = axes.transfer({"w": "f@a d"}, {"w": "f d@a"}, mesh, mesh, {"w": (4, 4)})
        step = axes.explain(here, {"w": axes.ones("f@a d", f=4, d=4)})
        assert step.json()["kind"] == "step"
        arrived = [each["bytes_in"] for each in step.json()["collectives"] if each["kind"] == "recv"]
        assert arrived == [here.at(0).steps[0].bytes_in] == [16]


def test_1_024_ranks_to_1_024_take_little_work():
    str(axes.show(TRANSFERS["transfer"]()))  # whatever is imported late
    move = TRANSFERS["transfer of 1,024 ranks to 1,024"]()
    assert calls(lambda: axes.show(move).text()) < 400_000  # 275,000, in 0.16 s
    text = str(axes.show(move))
    assert len(text.splitlines()) < 40
    assert "1,015 more ranks" in text
