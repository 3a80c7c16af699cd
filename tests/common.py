"""What the tests share beside the fixtures of `conftest`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def case(name: str) -> Iterator[None]:
    """Says in a failure which case of a loop it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case: {name}")
        raise
