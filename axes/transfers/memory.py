"""Memory of the tensors that a transfer reads and writes: whether it is that of the last call, or of two of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from axes.runtime.transforms import is_dense


def is_same(x: torch.Tensor | None, y: Any) -> bool:
    """Whether the same memory as of `x`, in the same sizes and strides, is given again as `y`, and is still there.

    FSDP gives memory back by `resize_(0)`, and keeps the storage.
    """
    if x is None or not is_dense(y):
        return x is y
    alike = x.dtype == y.dtype and x.device == y.device
    return alike and x.is_set_to(y) and (y.data_ptr() != 0 or not y.numel())


def in_common(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs of tensors, by number, that have any byte in common: views of one memory, through whatever storage.

    >>> x = torch.zeros(4, 6)
    >>> list(in_common([x[:, ::2], x[:, 1::2], x[1:3, 3:]]))
    [(0, 2), (1, 2)]
    """
    open_spans: list[tuple[int, int, int]] = []
    for start, stop, at in sorted(
        (t.data_ptr(), t.data_ptr() + _last(t) + 1, n) for n, t in enumerate(tensors) if t.numel()
    ):
        open_spans = [span for span in open_spans if span[1] > start]
        for first, _, before in open_spans:
            if _meet([*_steps(tensors[before]), *_steps(tensors[at])], _last(tensors[at]) + start - first):
                yield min(at, before), max(at, before)
        open_spans.append((start, stop, at))


def is_written_twice(x: torch.Tensor) -> bool:
    """Whether elements of a tensor may lie in the same place, as those of an expanded one do.

    >>> is_written_twice(torch.zeros(4).expand(3, 4)), is_written_twice(torch.zeros(4, 6)[:, ::2])
    (True, False)
    """
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return x.numel() > 0
        reach += stride * (size - 1)
    return False


def is_freed(x: torch.Tensor) -> bool:
    """Whether the storage of a tensor has been resized to less than the tensor takes.

    >>> x = torch.zeros(4)
    >>> _ = x.untyped_storage().resize_(0)
    >>> is_freed(x)
    True
    """
    return x.numel() > 0 and x.storage_offset() * x.element_size() + _last(x) + 1 > x.untyped_storage().nbytes()


def _steps(x: torch.Tensor) -> list[tuple[int, int]]:
    """The bytes of a tensor: `start + sum(step * n)` for every `n` of `0..most` in each `(step, most)`."""
    dims = zip(x.stride(), x.shape, strict=True)
    return [(1, x.element_size() - 1), *((stride * x.element_size(), size - 1) for stride, size in dims)]


def _last(x: torch.Tensor) -> int:
    return sum(step * most for step, most in _steps(x))


def _meet(steps: Sequence[tuple[int, int]], total: int) -> bool:
    """Whether `sum(step * n)` can be `total`, with `n` of `0..most` for each `(step, most)`.

    Two tensors meet where `a + sum(steps of one) = b + sum(steps of the other)`; counted from its last byte backwards,
    the steps of the other stand on the left as well.
    """
    merged: dict[int, int] = {}
    for step, most in steps:
        if step and most:
            merged[step] = merged.get(step, 0) + most
    terms = sorted(merged.items(), reverse=True)

    def reachable(at: int, left: int) -> bool:
        if at == len(terms):
            return left == 0
        step, most = terms[at]
        rest = sum(step * most for step, most in terms[at + 1 :])
        low, high = max(0, -(-(left - rest) // step)), min(most, left // step)
        return any(reachable(at + 1, left - step * n) for n in range(low, high + 1))

    return reachable(0, total)
