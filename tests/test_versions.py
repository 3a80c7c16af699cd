"""The table of torch's versions says what pytest wrote of its runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import versions

TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.skipif(True, reason="this torch can't")
@pytest.mark.parametrize("number", [1, 2])
def test_is_skipped(number):
    assert False

def test_fails():
    assert RIGHT

@pytest.fixture
def broken():
    raise ValueError

def test_has_no_fixture(broken):
    pass
"""

TABLE = """\
| torch | files of tests | passed | failed | skipped |
| --- | --- | --- | --- | --- |
| 2.9.1 | 1 | 1 | 2 | 2 |
| 2.11.0+cpu | 2 | 3 | 3 | 4 |

- 2.9.1, 2 skipped: this torch can't
- 2.11.0, 4 skipped: this torch can't
"""


def run(folder: Path, name: str, right: bool, torch: str, file: Path) -> None:
    (folder / f"{name}.py").write_text(TESTS.replace("RIGHT", str(right)), encoding="utf-8")
    options = ["-q", "--rootdir", str(folder), "-p", "no:cacheprovider", "--junitxml", str(file)]
    command = [sys.executable, "-m", "pytest", *options, "-o", f"junit_suite_name=torch {torch}", f"{name}.py"]
    assert subprocess.run(command, cwd=folder, check=False, capture_output=True).returncode == 1


def test_tests_count_by_torch_and_the_later_result_of_two(tmp_path):
    results = [tmp_path / f"{name}.xml" for name in ("b", "a", "old", "c")]
    run(tmp_path, "test_a", False, "2.11.0+cpu", results[2])
    run(tmp_path, "test_a", True, "2.11.0+cpu", results[0])
    run(tmp_path, "test_b", False, "2.11.0+cpu", results[1])
    run(tmp_path, "test_a", False, "2.9.1", results[3])
    assert versions.table(versions.results(results)) == TABLE


def test_the_table_of_the_page_stands_between_its_marks():
    page = versions.PAGE.read_text(encoding="utf-8")
    _, found, rest = page.partition(versions.BEGIN)
    inside, end, _ = rest.partition(versions.END)
    assert found
    assert end
    assert versions.with_table(page, inside) == page
    assert versions.with_table(page, TABLE).count("| 2.9.1 | 1 | 1 | 2 | 2 |") == 1
