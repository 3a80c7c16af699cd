"""A user's program, for type checkers: `tests/test_types.py` runs mypy and pyright on it, both strict.

It says of each public function and method what a checker should know of its result. It is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

import axes


def meshes(model: nn.Module) -> axes.Mesh:
    mesh = axes.init_mesh("dp tp=2", "fsdp = dp", device_type="cpu", options={"tp": axes.GroupOptions(timeout=60.0)})
    assert_type(
        [
            mesh,
            axes.Mesh("dp=2 tp=2", ranks=range(4), ranks_per_node=4),
            mesh["dp", "tp"],
            mesh.rearrange("(a b) tp -> b tp a", a=2),
            mesh.define("x = tp dp").at(3),
            axes.Mesh.from_device_mesh(mesh.device_mesh),
        ],
        list[axes.Mesh],
    )
    assert_type(mesh.device_mesh, DeviceMesh)
    assert_type(mesh.axis("tp"), axes.Axis)
    assert_type(mesh.axis("tp").group, ProcessGroup)
    assert_type(mesh.axis("tp").ranks, Sequence[int])
    assert_type(mesh.axis("tp").index, int | None)
    assert_type(mesh.shape, dict[str, int])
    assert_type(mesh.coordinate, dict[str, int] | None)
    assert_type(mesh.ranks, list[Any])
    assert_type(mesh.layout("tp"), axes.Layout)
    assert_type(mesh.sharding("b@dp d").placements, tuple[Placement, ...])
    assert_type(mesh.sharding("b@dp d").local_shape((4, 4)), tuple[int, ...])
    assert_type(axes.Sharding.from_placements(mesh, mesh.sharding("b@dp d").placements, 2), axes.Sharding)
    fully_shard(model, mesh=mesh["dp"].device_mesh)
    assert_type(torch.distributed.get_world_size(mesh.axis("tp").group), int)
    with mesh as entered, axes.use_mesh(mesh) as used:
        assert_type((entered, used), tuple[axes.Mesh, axes.Mesh])
    print(mesh.explain("dp tp -> tp dp"), axes.process_groups()[0].names)
    print(axes.show(mesh, rank=1), axes.show(mesh.sharding("b@dp d"), (8, 4)).text(120), axes.show(mesh).svg())
    page: str = axes.explain("b s@tp -> b s", (4, 8), mesh=mesh, dtype=torch.bfloat16).html()
    print(page, axes.explain(abs, torch.ones(3)).json()["schema"])
    return mesh


def tensors(mesh: axes.Mesh) -> DTensor:
    x = axes.shard(torch.randn(8, 4), "b@dp d", mesh=mesh)
    assert_type(
        [
            x,
            axes.from_local(torch.randn(8, 4), "b@dp d", mesh=mesh, grad="whole"),
            axes.randn("b@dp d", mesh=mesh, b=8, d=4, requires_grad=True),
            axes.full("b@dp d", 1.0, mesh=mesh, b=8, d=4),
        ],
        list[DTensor],
    )
    assert_type((axes.unshard(x), axes.to_local(x, grad="summed")), tuple[Tensor, Tensor])
    assert_type(axes.spec_of(x), str)
    assert_type(axes.sharding_of(x), axes.Sharding)
    return x


def operations(x: DTensor, local: Tensor, weight: nn.Parameter) -> None:
    assert_type(
        [
            axes.reshard(x, "b d@tp"),
            axes.rearrange(x, "b d@tp -> d b", comm_dtype=torch.bfloat16),
            axes.rearrange([x, x], "n b d@tp -> b n d"),
            axes.reduce(x, "b d -> b", "mean"),
            axes.repeat(x, "b d -> b n d", n=3),
            axes.einsum(x, x, "b d, e d -> b e"),
            axes.softmax(x, "b d@tp", over="d"),
            axes.rms_norm(x, "b d@tp", over="d", weight=x),
            axes.cross_entropy(x, x, "b v@tp, b -> ", reduction="sum"),
        ],
        list[DTensor],
    )
    assert_type(
        (
            axes.reshard(local, "b@tp d -> b d@tp", mesh=axes.sharding_of(x).mesh),
            axes.rearrange(local, "b d@tp -> d b"),
            axes.rearrange([local, local], "n b d -> b n d"),
            axes.rearrange(weight, "a b -> b a"),
            axes.reduce(local, "b d -> b", torch.amax),
            axes.repeat(local, "b d -> b n d", n=3),
            axes.einsum(local, weight, "b d, e d -> b e", e=3),
            axes.logsumexp(local, "b d@tp", over="d"),
            axes.layer_norm(local, "b d", over="d", weight=local, bias=weight),
            axes.embedding(local, weight, "s, v d -> s d"),
        ),
        tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    )


def collectives(x: Tensor) -> None:
    assert_type(
        (
            axes.psum(x, "tp"),
            axes.pmax(axes.pmin(axes.pmean(x, ("dp", "tp")), "tp"), "tp"),
            axes.psum_scatter(axes.all_gather(x, "tp", dim=1), "tp", dim=1),
            axes.all_to_all(x, "tp", send_sizes=[1, 2], recv_sizes=[2, 1]),
            axes.ppermute(x, "tp", shift=1),
            axes.ppermute(x, "tp", perm=[(0, 1)]),
        ),
        tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    )
    assert_type(axes.axis_index("tp") + axes.axis_size("tp"), int)


@axes.shard_map("b@dp d, d f@tp -> b@dp f@tp")
def column_parallel(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    return x @ w * scale


@axes.shard_map("b@dp d -> b@dp d, b@dp")
def with_norms(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.square().sum(-1)


@axes.shard_map("b@dp d -> ")
def loss_and_count(x: Tensor) -> dict[str, Tensor]:
    return {"loss": axes.psum(x.sum(), "dp")}


def regions(x: DTensor, w: DTensor) -> None:
    assert_type(column_parallel(x, w, scale=2.0), DTensor)
    y, norms = with_norms(x)
    assert_type(axes.unshard(y) / axes.unshard(norms), Tensor)
    assert_type(loss_and_count(x), dict[str, Tensor])
    double: Callable[[Tensor], DTensor] = axes.shard_map(lambda t: 2 * t, "b@dp d -> b@dp d", check=True)
    assert_type((double(x), axes.shard_map(torch.relu, "b@dp d -> b@dp d")(x)), tuple[DTensor, DTensor])


def plans(mesh: axes.Mesh) -> axes.Plan:
    model = axes.CostModel(latency_us=0, ranks_per_node=8)
    plan = axes.plan("b@dp d", "b d@dp", (8, 8), mesh=mesh, dtype=torch.bfloat16, cost_model=model)
    assert_type(plan, axes.Plan)
    assert_type([step.kind for step in plan.steps], list[str])
    assert_type(plan.bytes_in + plan.peak_bytes + plan.collectives, int)
    assert_type(plan.cost, float)
    return plan


def weights_received(store: Any, mesh: axes.Mesh) -> dict[str, Any]:
    with axes.connect(store, "trainer", mesh, peers=["trainer", "generator"], timeout=5) as link:
        link.send({"w": torch.ones(2)}, {"w": mesh.sharding("d")}, to="generator")
        found = link.receive(into={"w": torch.ones(2)}, specs={"w": "d"}, source="generator")
    assert_type(found, dict[str, Any])
    return found


def rank_and_size(add: int) -> tuple[int, int]:
    return torch.distributed.get_rank() + add, torch.distributed.get_world_size()


def worlds() -> list[tuple[int, int]]:
    with axes.simulate(64, rank=3):
        pass
    try:
        return axes.launch(rank_and_size, 8, 1, timeout=60)
    except axes.AxesError as error:
        print(error)
        raise
    finally:
        axes.destroy_process_groups()
