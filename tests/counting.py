"""How much work a call is, counted in calls of functions: the same on a busy machine. What takes how long is in `tests/bench`.

>>> calls(lambda: sorted([3, 1, 2], key=lambda x: -x))
5
"""

from __future__ import annotations

import sys
from collections.abc import Callable


def calls(use: Callable[[], object]) -> int:
    """The functions of Python and of C that `use()` calls, itself among them. Raises what it raises."""
    count = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        use()
    finally:
        sys.setprofile(before)
    return count - 1  # the call that ends the counting
