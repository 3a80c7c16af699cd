"""Eight local processes until each has made its first DTensor, from a cold start."""

from __future__ import annotations

from tests.bench.measure import Times, benchmark, in_fresh_processes

LAUNCH = """
import time
from tests.bench.launching import with_axes
import axes
if __name__ == "__main__":
    started = time.perf_counter()
    axes.launch(with_axes, 8)
    print(time.perf_counter() - started)
"""

SPAWN = """
import tempfile, time
import torch.multiprocessing
from tests.bench.launching import with_torch
if __name__ == "__main__":
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(with_torch, args=(8, folder), nprocs=8)
    print(time.perf_counter() - started)
"""


def with_axes() -> None:
    import torch

    import axes

    mesh = axes.init_mesh("dp tp=2", device_type="cpu")
    axes.shard(torch.ones(8, 8), "n@dp m@tp", mesh=mesh)


def with_torch(rank: int, world_size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    mesh = dist.device_mesh.init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)])
    dist.destroy_process_group()


@benchmark(
    "eight local processes, each with its first DTensor",
    peer="`torch.multiprocessing.spawn`",
    bar=2,
    page=True,
)
def first_dtensor() -> Times:
    return in_fresh_processes(LAUNCH, SPAWN, repeats=3)
