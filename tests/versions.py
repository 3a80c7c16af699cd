"""The table of torch's versions in docs/limits.md, from what runs of the suite left.

    make test TORCH=2.11.0                         # leaves .venv-2.11.0/results.xml
    python -m tests.versions .venv*/results.xml    # prints the table, and writes it into the page

A result names its torch (`junit_suite_name`). Several of one torch, of a file of tests each, count together; of two results
of one test the later counts.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).parents[1] / "docs/limits.md"
BEGIN, END = "<!-- the table of tests/versions.py -->\n", "<!-- its end -->\n"

Test = tuple[str, str]
Outcomes = dict[Test, tuple[str, str]]
"""Of each test, by file and name: "passed", "failed" or "skipped", and for which reason."""


def results(paths: Iterable[Path]) -> dict[str, Outcomes]:
    """The outcomes by torch."""
    found: dict[str, Outcomes] = {}
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            known = found.setdefault(suite.attrib["name"], {})
            known.update(outcome(case) for case in suite.iter("testcase"))
    return found


def outcome(case: ElementTree.Element) -> tuple[Test, tuple[str, str]]:
    test = case.get("classname", ""), case.get("name", "")
    for kind in ("error", "failure", "skipped"):
        if (told := case.find(kind)) is not None:
            return test, ("skipped" if kind == "skipped" else "failed", told.get("message", ""))
    return test, ("passed", "")


def table(found: dict[str, Outcomes]) -> str:
    """A row for each torch, then for which reasons tests are skipped on it."""
    lines = ["| torch | files of tests | passed | failed | skipped |", "| --- | --- | --- | --- | --- |"]
    reasons = []
    for version, tests in sorted(found.items(), key=lambda each: [int(part) for part in numbers(each[0])]):
        counts = Counter(kind for kind, _ in tests.values())
        files = len({file for file, _ in tests})
        shown = " | ".join(f"{counts[kind]:,}" for kind in ("passed", "failed", "skipped"))
        lines.append(f"| {version.removeprefix('torch ')} | {files} | {shown} |")
        skips = Counter(why for kind, why in tests.values() if kind == "skipped")
        reasons += [f"- {numbered(version)}, {count} skipped: {why}" for why, count in sorted(skips.items())]
    return "\n".join([*lines, "", *reasons, ""])


def numbers(version: str) -> list[str]:
    """The numbers of a version: those of "torch 2.13.0+cpu" are 2, 13 and 0."""
    return numbered(version).split(".")


def numbered(version: str) -> str:
    return version.removeprefix("torch ").partition("+")[0]


def with_table(page: str, table: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table}{END}{after}"


if __name__ == "__main__":
    printed = table(results(map(Path, sys.argv[1:])))
    print(printed)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), printed), encoding="utf-8")
