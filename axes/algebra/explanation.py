"""What `explain` returns: text that prints itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """An explanation; `str()` and `print()` show it.

    >>> print(Explanation(("read as  dp tp", "order    tp dp")))
    read as  dp tp
    order    tp dp
    """

    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def __repr__(self) -> str:
        return str(self)
