"""Prints the table of docs/benchmarks.md: `make bench`, or `python -m tests.bench [all | word...]`.

With `all`, every row that there is; with words, of all rows those that contain one of them. Every number
is measured now, beside its peer. The exit status is 1 where a row falls short of what the project promises.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

from tests.bench.measure import BENCHMARKS, LEFT_OUT, Benchmark, duration


def registered() -> list[Benchmark]:
    """Every benchmark of this folder, by file name."""
    for found in sorted(pkgutil.iter_modules([str(Path(__file__).parent)]), key=lambda m: m.name):
        if not found.name.startswith("_"):
            importlib.import_module(f"tests.bench.{found.name}")
    return BENCHMARKS


def main(words: list[str]) -> int:
    chosen = [
        b for b in registered() if (any(word in b.what for word in words) if words else b.page) or words == ["all"]
    ]
    short = []
    print("| what | axes | peer | peer's time | ratio | promised |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for row in chosen:
        times = row.measure()
        ratio = times.peer / times.ours
        print(
            f"| {row.what} | {duration(times.ours)} | {row.peer} | {duration(times.peer)} "
            f"| {ratio:.3g}x | {row.bar:g}x |",
            flush=True,
        )
        if ratio < row.bar:
            short.append(row.what)
    for what, remedy in LEFT_OUT.items():
        print(f"left out: {what}, whose peer isn't installed ({remedy})", file=sys.stderr)
    for what in short:
        print(f"short of its promise: {what}", file=sys.stderr)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
