"""A world of any size in this process: what rank 77,777 of 131,072 would see, alone.

    with axes.simulate(131072, rank=77777):
        mesh = axes.init_mesh("pp dp cp=2 tp=8", pp=16)
        mesh.coordinate, mesh.axis("tp").ranks, mesh["dp"].device_mesh

The world is torch's fake backend: groups, device meshes and DTensors are made as in a real one and
cost what they cost there, collectives return at once and move nothing. So shapes, placements, plans
and the number of communicators are right, and the numbers in a tensor that communicated are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from axes.algebra.errors import AxesError, shown
from axes.algebra.sizes import whole_number
from axes.runtime.groups import forget_groups
from axes.runtime.torch_private import forget_dtensor_world

MOST = 1 << 22
"""More ranks than this are a mistake: torch lists all of them."""


@contextmanager
def simulate(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of a simulated job of any size, until the block ends.

    Shapes, groups and plans are those of a real job. Collectives send nothing, so values that would come from other
    ranks are arbitrary. It uses torch's fake backend.

    Args:
        world_size: The number of ranks.
        rank: The rank that this process is.

    Raises:
        AxesError: The size or the rank isn't valid, or `torch.distributed` runs already.

    Examples:
        >>> import torch.distributed as dist
        >>> with simulate(131072, rank=77777):
        ...     dist.get_rank(), dist.get_world_size()
        (77777, 131072)
        >>> dist.is_initialized()
        False
    """
    size, at = whole_number(world_size), whole_number(rank)
    if size is None or not 1 <= size <= MOST:
        raise AxesError(f"simulate makes a world of 1 to {MOST:,} ranks, a whole number; found {shown(world_size)}")
    if at is None or not 0 <= at < size:
        raise AxesError(f"a world of {size:,} has ranks 0 to {size - 1:,}, whole numbers; found {shown(rank)}")
    if dist.is_initialized():
        raise AxesError(
            f"simulate makes a world, and this process is in one already (rank {dist.get_rank()} "
            f"of {dist.get_world_size()}, {dist.get_backend()}): leave it first, with "
            f"torch.distributed.destroy_process_group()"
        )
    forget_dtensor_world()  # a world that ran here before
    dist.init_process_group("fake", rank=at, world_size=size)
    ours = dist.group.WORLD
    try:
        yield
    finally:
        forget_groups()
        forget_dtensor_world()
        if dist.group.WORLD is ours:  # not where the block ended it
            dist.destroy_process_group()
