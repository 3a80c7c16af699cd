"""How much work a call is, counted in calls of functions: the same on a busy machine. What takes how long is in `tests/bench`.
And what is sent: what torch's process groups are handed.

>>> calls(lambda: sorted([3, 1, 2], key=lambda x: -x))
5
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


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


Counted = tuple[str, tuple[int, ...], int, int]
"""A collective: its kind, the ranks of its group, the bytes that come in and go out."""


class Counter(TorchDispatchMode):
    """Counts what process groups are handed while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Counted] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1] if str(func).startswith(("c10d.", "_c10d_functional.")) else ""
        if name and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.found.append(counted(name, args, out))
        return out


def counted(name: str, args: Sequence[Any], out: Any) -> Counted:
    """One collective. An operator that isn't known here is an error: then the test would miss something."""
    if name == "allreduce_":
        (x,), group = args[0], dist.ProcessGroup.unbox(args[1])
        return around(group, x)
    if name == "all_reduce":
        return around(named(args[2]), args[0])
    if name in ("_allgather_base_", "_reduce_scatter_base_"):
        filled, given, group = args[0], args[1], dist.ProcessGroup.unbox(args[2])
        moved = abs(filled.nbytes - given.nbytes)
        return "all_gather" if name == "_allgather_base_" else "reduce_scatter", members(group), moved, moved
    if name == "all_gather_into_tensor":
        moved = args[0].nbytes * (args[1] - 1)
        return "all_gather", members(named(args[2])), moved, moved
    if name == "reduce_scatter_tensor":
        moved = args[0].nbytes - args[0].nbytes // args[2]
        return "reduce_scatter", members(named(args[3])), moved, moved
    if name in ("send", "recv_"):
        (x,), group = args[0], dist.ProcessGroup.unbox(args[1])
        return ("send", members(group), 0, x.nbytes) if name == "send" else ("recv", members(group), x.nbytes, 0)
    if name == "broadcast_":
        (x,), group = args[0], dist.ProcessGroup.unbox(args[1])
        gives = group.rank() == args[2]
        return "broadcast", members(group), 0 if gives else x.nbytes, x.nbytes if gives else 0
    if name == "alltoall_base_":
        filled, given, group = args[0], args[1], dist.ProcessGroup.unbox(args[2])
        return "all_to_all", members(group), others(filled, args[3], group), others(given, args[4], group)
    raise AssertionError(f"the counter doesn't know {name}")


def around(group: dist.ProcessGroup, x: torch.Tensor) -> Counted:
    """A ring takes every part of a reduction around twice, but for one hop of each; in whole elements."""
    moved = math.ceil(2 * x.numel() * (group.size() - 1) / group.size()) * x.element_size()
    return "all_reduce", members(group), moved, moved


def others(x: torch.Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> int:
    """The bytes of a tensor that aren't this rank's own."""
    if not rows:
        return x.nbytes - x.nbytes // group.size()
    row = x.nbytes // x.shape[0] if x.shape[0] else 0
    return sum(count * row for peer, count in enumerate(rows) if peer != group.rank())


def members(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def named(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)
