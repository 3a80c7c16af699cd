"""What is sent, one collective after another, as the rows of an explanation.

>>> one = {"kind": "all_gather", "axes": ["tp"], "bytes_in": 49152, "bytes_out": 49152, "time_us": 20.4}
>>> sent_section("forward", [(one, "of x"), (one, "of x")]).rows
(('2 x', 'all_gather', 'tp', '48.0 KiB', '20 us', 'of x'), ('in all 96.0 KiB in, 41 us',))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from axes.algebra.explanation import Section
from axes.algebra.plan import bytes_text
from axes.pictures.rank_text import time_text


def sent_section(title: str, sent: Sequence[tuple[Mapping[str, Any], str]]) -> Section:
    """Collectives as data, each with the text on it; equal rows once, with how often they come."""
    counts = Counter(_row(each, text) for each, text in sent)
    several = max(counts.values(), default=1) > 1
    rows: list[tuple[str, ...]] = [(*([f"{n} x" if n > 1 else ""] * several), *row) for row, n in counts.items()]
    if len(sent) > 1:
        received, time = (sum(each[name] for each, _ in sent) for name in ("bytes_in", "time_us"))
        rows.append((f"in all {bytes_text(received)} in, {time_text(time)}",))
    return Section(title, tuple(rows) or (("nothing is sent",),))


def _row(each: Mapping[str, Any], text: str) -> tuple[str, ...]:
    taken, given = each["bytes_in"], each["bytes_out"]
    moved = bytes_text(taken) if taken == given else f"{bytes_text(taken)} in, {bytes_text(given)} out"
    return each["kind"], " ".join(each["axes"]) or "-", moved, time_text(each["time_us"]), text
