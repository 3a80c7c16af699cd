"""What the tests share beside the fixtures of `conftest`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import axes


@contextlib.contextmanager
def case(name: str) -> Iterator[None]:
    """Says in a failure which case of a loop it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case: {name}")
        raise


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error_of(call: Callable[[], object]) -> str:
    """The class and the text of an error of the library; "nothing" where there is none."""
    try:
        call()
    except axes.AxesError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def stat_of(pid: int) -> list[str]:
    """What Linux says of a process: its state, its parent."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def lives(pid: int) -> bool:
    """Whether a process runs or is stopped; one that ended and wasn't waited for doesn't."""
    try:
        return stat_of(pid)[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it may end while its file is read
        return False


def waited(condition: Callable[[], object], seconds: float = 90) -> bool:
    """Whether it became true within these seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def written(path: Path, text: str) -> None:
    """Writes a file that nobody can read half of."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)
