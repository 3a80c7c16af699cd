"""Faults on real processes: each surviving rank ends in time and is told why, and nothing is left.

`make test` runs a row of each kind of fault, but for the cut link, which needs two hosts; `make test-full` runs the
whole matrix.
"""

from __future__ import annotations

import sys

import pytest

from tests.faults import CUT, FAULTS, ROWS, Outcome, Row, run_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SAMPLE = [  # the slow ones first: they wait
    Row("launch", "SIGSTOP", "group", "in"),
    Row("launch", "store stopped", "group", "before"),
    Row("launch", "SIGKILL", "collective", "in"),
    Row("launch", "SIGTERM", "save", "before"),
    Row("launch", "exit", "init_mesh", "in"),
    Row("launch", "exception", "group", "after"),
    Row("launch", "store killed", "init_mesh", "in"),
]


def wrong_of(rows: list[Row]) -> dict[str, list[str]]:
    found: list[Outcome] = []
    run_all(rows, found.append, at_once=4)
    assert [outcome.row for outcome in found] == rows
    return {str(outcome.row): outcome.wrong() for outcome in found if outcome.wrong()}


def test_a_fault_of_each_kind_ends_every_rank_with_its_cause_and_leaves_nothing():
    assert {row.fault for row in SAMPLE} == set(FAULTS) - {CUT}
    assert wrong_of(SAMPLE) == {}


@pytest.mark.full
def test_every_fault_ends_every_rank_with_its_cause_and_leaves_nothing():
    assert len(ROWS) >= 120
    assert wrong_of(ROWS) == {}
