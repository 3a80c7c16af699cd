"""What the tests share beside the fixtures of `conftest`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

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
