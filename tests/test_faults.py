"""Faults on real processes: each surviving rank ends in time and is told why, and nothing is left.

`make test` runs a row of each kind of fault, but for the cut link, which tests/test_hosts.py cuts each time;
`make test-full` runs the whole matrix.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest

from tests.faults import (
    BEGIN,
    CUT,
    END_OF_TABLE,
    FAULTS,
    LAUNCHERS,
    MOMENTS,
    PAGE,
    ROWS,
    End,
    Outcome,
    Row,
    Watch,
    run_all,
)

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


def test_the_table_of_the_page_has_the_rows_of_the_matrix():
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END_OF_TABLE)[0]
    found, launcher = [], ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0] in LAUNCHERS:
            assert cells[1:] == ["phase", *MOMENTS]
            launcher = cells[0]
        elif len(cells) == 5 and cells[0] in FAULTS:
            found += [Row(launcher, *cells[:2], moment) for moment in MOMENTS]
            ended = r"(done|(axes|torch|torchrun|launch) \d+\.\d s)"
            assert all(re.fullmatch(rf"{ended}(, {ended})*", cell) for cell in cells[2:]), line
    assert found == ROWS


# ---------------------------------------------------------------------------- what is wrong is noticed

TOLD = "rank 1 was last seen passing in init_mesh"
KILLED = "rank 1 of 3 was killed by SIGKILL"


def outcome(end: End, said: str = KILLED, **more: object) -> Outcome:
    row = Row("launch", "SIGKILL", "collective", "in")
    return Outcome(row, {0: end, 2: End("DesyncError", 0.1, TOLD)}, said, 1.0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "noticed"),
    [
        (outcome(End("DesyncError", 0.1, TOLD)), None),
        (outcome(End("ended", 2.1)), None),
        (outcome(End("RuntimeError", 0.1, "closed by peer", saving=True)), None),
        (outcome(End("DesyncError", 0.1, "closed by peer")), "rank 0 isn't told why"),
        (outcome(End("RuntimeError", 0.1, TOLD)), "rank 0 has an error that says little"),
        (outcome(End("DesyncError", 99.0, TOLD)), "rank 0 took 99 s"),
        (outcome(End("finished", 0.1)), "rank 0 finished"),
        (outcome(End("ended", 0.1), "rank 0 of 3 failed first"), "the launcher doesn't say why"),
        (outcome(End("ended", 0.1), left=["port 80"]), "left: port 80"),
        (Outcome(SAMPLE[2], {0: End("ended", 0.1)}, KILLED), "rank 2 didn't end"),
    ],
)
def test_what_is_not_as_promised_is_noticed(found, noticed):
    wrong = found.wrong()
    assert (wrong == []) if noticed is None else any(each.startswith(noticed) for each in wrong)


def test_what_is_left_is_noticed(tmp_path):
    (tmp_path / "tmp").mkdir()
    with Watch(SAMPLE[0], tmp_path) as watch:
        assert watch.left() == []
        process = subprocess.Popen(["sleep", "60"], env=os.environ | {"FOLDER": str(tmp_path)})
        try:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
                watch.ports = {port}
                (tmp_path / "tmp" / "some.file").touch()
                left = "\n".join(watch.left())
                assert f"process {process.pid}, sleep 60" in left
                assert f"port {port}" in left
                assert "file some.file" in left
        finally:
            process.kill()
            process.wait()
        (tmp_path / "tmp" / "some.file").unlink()
        assert watch.left() == []
