"""Results that share no memory, with what they are made of or with one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from axes.runtime import torch_private
from axes.runtime.symbols import is_symbolic


def unshared(results: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results, copied where they share memory with a shard or with one another."""
    taken = {torch_private.memory_of(x) for x in shards}
    found: list[torch.Tensor] = []
    theirs: dict[int, list[torch.Tensor]] = {}
    for x in results:
        memory = torch_private.memory_of(x)
        others = theirs.setdefault(memory, [])
        if memory in taken or not all(_lie_apart(x, other) for other in others):
            x = x.clone()
        else:
            others.append(x)
        found.append(x)
    return found


def _lie_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors in one storage surely have no element in common, like the parts of a split.

    Of symbolic sizes nothing is asked, which would guard the graph on them.
    """
    if is_symbolic((*one.shape, *other.shape)):
        return False
    if not one.numel() or not other.numel():
        return True
    ends = [
        x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) for x in (one, other)
    ]
    if ends[0] < other.storage_offset() or ends[1] < one.storage_offset():
        return True
    # Boxes of a tensor that has these strides: apart if they are so along a dim.
    strides = sorted({*one.stride()}, reverse=True)
    if sorted({*other.stride()}, reverse=True) != strides or 0 in strides:
        return False
    boxes = [_box(x, strides) for x in (one, other)]
    if None in boxes:
        return False
    return any(a[1] <= b[0] or b[1] <= a[0] for a, b in zip(*boxes, strict=True))  # type: ignore[arg-type]


def _box(x: torch.Tensor, strides: Sequence[int]) -> list[tuple[int, int]] | None:
    """From where to where a tensor is along the dims of one that has these strides; None where it is no box of it."""
    sizes = dict.fromkeys(strides, 1)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if size > 1 and sizes[stride] > 1:
            return None
        sizes[stride] = max(size, sizes[stride])
    found, rest, room = [], x.storage_offset(), 0
    for stride in strides:
        start, left = divmod(rest, stride)
        if room and (room % stride or start + sizes[stride] > room // stride):
            return None
        found.append((start, start + sizes[stride]))
        rest, room = left, stride
    return [*found, (rest, rest + 1)]
