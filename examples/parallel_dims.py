"""What torchtitan's `ParallelDims` offers, as one declaration: its degrees, its views, its groups.

    python examples/parallel_dims.py --dp-replicate 2 --cp 2 --tp 2 --ep 4

`ParallelDims` is 500 lines: degrees that are checked, a mesh for each way to read the ranks (storage of dense and
of expert parameters, computing, loading, the loss), views by names, and which of them are enabled. Here a degree is
the size of an axis, a view is `mesh[names]`, and a reading is an equation between axes. An axis of size 1 is an axis
like others: nothing is optional, so nothing has to ask.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from support import flag, read_options
from torch import nn
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard

import axes

AXES = "pp dp_replicate dp_shard cp tp"
READINGS = (
    "batch = dp_replicate dp_shard",  # which samples a rank reads
    "loss = dp_replicate dp_shard cp",  # over which a loss is averaged
    "fsdp = dp_shard cp",  # over which dense parameters are stored
    "(dp_shard cp tp) = efsdp ep",  # the same ranks for experts: stored over efsdp, spread over ep
)
VIEWS = {
    "loading": ("pp", "batch", "cp", "tp"),
    "dense, stored": ("pp", "dp_replicate", "fsdp", "tp"),
    "dense, computing": ("batch", "cp", "tp"),
    "experts": ("pp", "dp_replicate", "efsdp", "ep"),
}


def parallel_dims(device_type: str = "cpu", **degrees: int) -> axes.Mesh:
    """The mesh of these degrees; the one of dp_shard, or any other, may be left open.

    Degrees that don't multiply to the world, or an ep that cuts an axis, are an error on every rank alike.
    """
    return axes.init_mesh(AXES, *READINGS, device_type=device_type, **degrees)


@dataclass(frozen=True)
class Options:
    """Declare a mesh over all kinds of parallelism, and run a layer under FSDP2 on it."""

    ranks: int = flag(8, "local processes")
    dp_replicate: int = flag(2, "copies of the model")
    cp: int = flag(1, "parts of the sequence")
    tp: int = flag(2, "parts of each matrix")
    pp: int = flag(1, "stages")
    ep: int = flag(4, "parts of the experts")


def run(degrees: dict[str, int]) -> list[str]:
    """What a rank sees: the views, and the communicators after a step of a layer that fully_shard stores."""
    torch.set_num_threads(1)
    mesh = parallel_dims(**degrees)
    said = [str(mesh), ""]
    for what, names in VIEWS.items():
        view = mesh[names]
        said.append(f"{what:<17} {' '.join(f'{name}={size}' for name, size in view.shape.items())}")
    # Parameters live on the whole dense mesh; FSDP2 is told which of its axes store, and which copy.
    dense = mesh["dp_replicate", "dp_shard", "cp", "tp"]
    torch.manual_seed(0)
    layer = axes.shard_module(nn.Linear(16, 32, bias=False), {"weight": "out@tp in"}, dense)
    whole = axes.unshard(layer.weight.detach())
    axes.shard_map(layer, "b@loss in -> b@loss out=32@tp", dense)
    stored = DataParallelMeshDims(shard=("dp_shard", "cp"), replicate="dp_replicate")
    fully_shard(layer, mesh=dense.device_mesh, dp_mesh_dims=stored)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    samples = 3 * mesh.names["loss"]  # of which each rank has three
    x = torch.linspace(-1, 1, 16 * samples).view(samples, 16)
    y = layer(axes.shard(x, "b@loss in", mesh=dense))
    y.square().sum().backward()
    expected = 2 * (x @ whole.T).T @ x
    assert torch.allclose(axes.unshard(layer.weight.grad), expected, rtol=1e-4), "the gradient is that of one device"
    groups = axes.process_groups()
    said += ["", f"{len(groups)} communicators on this rank:", *(f"  {line}" for line in str(groups).splitlines())]
    return said


def what_is_wrong(options: Options) -> str | None:
    """What can't be, as far as one process can tell."""
    try:
        axes.Mesh(AXES, *READINGS, ranks=range(options.ranks), **degrees_of(options))
    except axes.AxesError as error:
        return str(error).splitlines()[0]
    return None


def degrees_of(options: Options) -> dict[str, int]:
    return {name: getattr(options, name) for name in ("dp_replicate", "cp", "tp", "pp", "ep")}


def main(arguments: list[str] | None = None) -> int:
    options = read_options("parallel_dims.py", Options, what_is_wrong, arguments)
    print("\n".join(axes.launch(run, options.ranks, degrees_of(options))[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
