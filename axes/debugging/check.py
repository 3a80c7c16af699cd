"""Checks: what ranks do together, compared before they do it.

With `axes.debug(check=True)`, or `AXES_CHECK=1` in the environment, the ranks of an `Operation` compare it first,
through the job's store (see `agreement`): what is done, of what expression, dtype and whole shape, whether in a
backward pass, and which in their order it is. Ranks that do different things, or one that doesn't come, are a
`DesyncError` on all of them, before anything is sent; it shows each side with its line of the user's code. When all
have read how it ended, the store has no more keys than before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from axes import DesyncError
from axes.extension import (
    Barrier,
    Operation,
    World,
    agree_at,
    as_timeout,
    at_user_place,
    current_world,
    ranks_text,
    whole_text,
)

_SHOWN = 16
"""Lines of an error that there could be one of for each two ranks."""
_ADVICE = (
    "All ranks of a mesh call the same operations on the same tensors, in the same order. Look for a branch that "
    "depends on the rank or on its data, and for loops of different lengths. A rank that doesn't come may also be "
    "slow, or wait in a call of torch.distributed, which the check doesn't see"
)


def compare_operation(operation: Operation) -> None:
    """Returns when all ranks of the operation are about to do the same; `DesyncError` on all of them otherwise."""
    world = current_world()
    alone = len(operation.ranks) == 1 or world.rank not in operation.ranks
    if world.fake or alone or not operation.compared:
        return
    whole = whole_text()
    found = world.barrier(f"check-{_lane(operation)}-{world.times_debugged}", operation.ranks, "", _ADVICE)
    subject = f"operation {found.attempt + 1} of {ranks_text(operation.ranks)}"
    barrier = replace(found, subject=subject, doing=f"{whole}{operation.what}{at_user_place()}")
    told = [*map(list, (operation.sends, operation.receives))] if operation.sends else None
    every = agree_at(world.member, barrier, f"{whole}{operation.compared}", _waits(world, operation), told)
    if told:
        _compare_sizes(barrier, operation, every)


def _lane(operation: Operation) -> str:
    """What tells operations on a group, or on the groups of a mesh's axes, from those on others of the same ranks.

    Threads that use different groups may do so in any order, so that each lane counts its own operations.
    """
    if operation.group:
        return operation.group
    own = operation.mesh.binding.options
    return operation.device + "".join(f" {each} {options.text}" for each, options in own)


def _waits(world: World, operation: Operation) -> timedelta:
    """How long the ranks wait for one another: in a group that has a timeout of its own, that."""
    own = [entry.options.timeout for entry in world.groups.values() if entry.group.group_name == operation.group]
    return as_timeout(own[0] if own else None, "timeout") or world.limit


def _compare_sizes(barrier: Barrier, operation: Operation, every: Sequence[Any]) -> None:
    """`DesyncError` where a rank sends another than that expects; all ranks compare all of them."""
    ranks, (given, taken) = operation.ranks, zip(*every, strict=True)
    wrong = [
        f"rank {ranks[i]} sends {given[i][j]} to rank {ranks[j]}, which expects {taken[j][i]}"
        for i in range(len(ranks))
        for j in range(len(ranks))
        if given[i][j] != taken[j][i]
    ]
    if wrong:
        rest = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise DesyncError("\n  ".join([f"ranks disagree in {barrier.seen}:", *wrong[:_SHOWN], *rest]))
