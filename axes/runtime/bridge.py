"""The runtime as the algebra sees it: this module is the `Runtime` of `axes.algebra.providers`.

It is imported when a mesh is first asked for what only a running job has.
"""

from __future__ import annotations

from axes.algebra.placements import sharding_from as from_placements
from axes.runtime.device_mesh import device_mesh, from_device_mesh
from axes.runtime.groups import abort_groups as abort
from axes.runtime.groups import create_groups, current_world
from axes.runtime.groups import group_of as group
from axes.runtime.sharded import sharding_in_torch
from axes.runtime.torch_placements import torch_placements as placements

__all__ = [
    "abort",
    "create_groups",
    "device_mesh",
    "from_device_mesh",
    "from_placements",
    "group",
    "placements",
    "rank",
    "sharding_in_torch",
]


def rank() -> int:
    """The global rank of this process; `MeshError` where `torch.distributed` isn't running."""
    return current_world().rank
