"""The meshes of a 131,072-rank job, as seen from one of its ranks, against torch's own.

Dense layers use `pp dp_replicate dp_shard cp tp`, expert layers `efsdp ep` over the same ranks. The
peer makes what a trainer makes today: `init_device_mesh`, three `_unflatten` and one `_flatten`.
Each time is that of a fresh interpreter in a simulated world, after the imports of either side.
"""

from __future__ import annotations

import functools

from tests.bench.measure import Times, benchmark, in_fresh_processes

DECLARATION = """
    "pp dp_replicate dp_shard cp tp",
    "fsdp = dp_shard cp",
    "batch = dp_replicate dp_shard",
    "loss = batch cp",
    "(dp_shard cp tp) = efsdp ep",
    pp=8, dp_replicate=4, cp=8, tp=8, ep=64,
"""

ALGEBRA = f"""
import time, axes
axes.Mesh
started = time.perf_counter()
mesh = axes.Mesh({DECLARATION} ranks=range(131072)).at(77777)
for name in mesh.names:
    axis = mesh.axis(name)
    axis.size, axis.layout, axis.index, list(axis.ranks)
print(time.perf_counter() - started)
"""

SIMULATED = f"""
import time, torch, axes, axes.runtime.bridge, axes.runtime.world
import torch.distributed.device_mesh, torch.distributed.tensor
with axes.simulate(131072, rank=77777):
    started = time.perf_counter()
    mesh = axes.init_mesh({DECLARATION} device_type="cpu")
    for name in mesh.names:
        mesh.axis(name).group
        WHAT
    print(time.perf_counter() - started)
"""

GROUPS = SIMULATED.replace("WHAT", "")
MESHES = SIMULATED.replace("WHAT", "mesh[name].device_mesh")

TORCH = """
import time, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=77777, world_size=131072)
started = time.perf_counter()
world = init_device_mesh("cpu", (131072,), mesh_dim_names=("world",))
dense = world._unflatten(0, (8, 4, 512, 8), ("pp", "dp_replicate", "fsdp", "tp"))
loading = world._unflatten(0, (8, 256, 8, 8), ("pp", "batch", "cp", "tp"))
sparse = world._unflatten(0, (8, 4, 64, 64), ("pp", "dp_replicate", "efsdp", "ep"))
loss = loading["batch", "cp"]._flatten("loss")
print(time.perf_counter() - started)
"""

PEER = "`init_device_mesh`, three `_unflatten`, one `_flatten`"
against_torch = functools.partial(in_fresh_processes, peer=TORCH)


@benchmark("131,072 ranks: sizes, layouts, coordinates and ranks of ten names", peer=PEER, bar=50)
def algebra() -> Times:
    return against_torch(ALGEBRA)


@benchmark("131,072 ranks: a process group for each of ten names", peer=PEER, bar=50)
def groups() -> Times:
    return against_torch(GROUPS)


@benchmark("131,072 ranks: a group and a `DeviceMesh` for each of ten names", peer=PEER, bar=5, page=True)
def device_meshes() -> Times:
    return against_torch(MESHES)
