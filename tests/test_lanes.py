"""Lanes: names of the same ranks with a communicator each, for what must not wait for one another."""

from __future__ import annotations

import re
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

import axes
from axes import GroupOptions, MeshError


def names_of_the_same_ranks():
    mesh = axes.init_mesh("dp=2 tp=2", "grads = dp", "more = dp", options={"grads": GroupOptions(lane="grads")})
    plain = axes.init_mesh("dp=2 tp=2", "grads = dp", "more = dp")
    mesh.create_groups("dp", "grads", "more")
    found = {name: mesh.axis(name).group for name in ("dp", "grads", "more")}
    x = torch.ones(1)
    before = {i.group_name: i.asked for i in axes.process_groups()}
    sums = [axes.psum(x, name, mesh=mesh).item() for name in ("dp", "grads", ("grads", "tp"))]
    y = axes.reshard(axes.shard(torch.arange(4.0), "a@grads", mesh=mesh["grads"]), "a")
    asked = {i.group_name for i in axes.process_groups() if i.asked > before.get(i.group_name, 0)}
    return [
        found["grads"] is not found["dp"],
        found["more"] is found["dp"],
        plain.axis("grads").group is found["dp"],
        plain != mesh,
        mesh["grads"].device_mesh.get_group() is found["grads"],
        mesh["dp"].device_mesh.get_group() is found["dp"],
        mesh["grads"].device_mesh != mesh["dp"].device_mesh,
        plain["dp"].device_mesh == mesh["dp"].device_mesh,
        {found["dp"].group_name, found["grads"].group_name} <= asked,
        sums == [2, 2, 4],
        y.full_tensor().tolist() == [0, 1, 2, 3],
        found["grads"].group_desc == "axes grads",
        any("lane=grads" in str(i) and i.names == ("grads",) for i in axes.process_groups()),
    ]


def test_a_lane_is_a_group_of_a_names_own(world):
    assert world(names_of_the_same_ranks, 4) == [[True] * 13] * 4


def moves_of_a_mesh_whose_product_has_a_lane():
    mesh = axes.init_mesh("dp=2 tp=2", "both = dp tp", options={"both": GroupOptions(lane="both")})
    x = axes.shard(torch.arange(8.0), "a@(dp tp)", mesh=mesh)
    axes.unshard(axes.reshard(axes.shard(torch.ones(4, 4), "a@dp b@tp", mesh=mesh), "a@tp b@dp"))
    axes.reshard(x, "a"), axes.einsum(x, x, "a@both, a@both -> ").full_tensor()
    before = [i.names for i in axes.process_groups() if i.options.lane]
    axes.reshard(axes.shard(torch.arange(8.0), "a@both", mesh=mesh["both"]), "a")
    return before, [i.names for i in axes.process_groups() if i.options.lane]


def test_moves_go_by_the_axes_and_not_by_the_lane_of_a_further_name(world):
    assert world(moves_of_a_mesh_whose_product_has_a_lane, 4) == [([], [("both",)])] * 4


def compared_on_two_lanes():
    """Ranks work on two meshes in unlike orders, each checked by itself."""
    meshes = [axes.init_mesh("dp=2", options={"dp": GroupOptions(lane=lane)}) for lane in ("one", "two")]
    for mesh in meshes:
        mesh.create_groups("dp")
    with axes.debug(check=True):
        works = [
            threading.Thread(target=lambda mesh=mesh, n=n: axes.psum(torch.ones(n), "dp", mesh=mesh))
            for n, mesh in enumerate(meshes, 1)
        ]
        for work in works if dist.get_rank() else reversed(works):
            work.start()
        for work in works:
            work.join(50)
        return any(work.is_alive() for work in works)


def test_operations_on_two_lanes_are_compared_apart(world):
    assert world(compared_on_two_lanes, 2) == [False] * 2


def lanes_that_cannot_be():
    texts = []
    for lane in (1, "", "two words", ["a"]):
        with pytest.raises(MeshError) as caught:
            GroupOptions(lane=lane)
        texts.append(str(caught.value))
    options = {"tp": GroupOptions(timeout=5), "ep": GroupOptions(timeout=6)}
    with pytest.raises(MeshError) as caught:
        axes.init_mesh("dp=1 tp=2", "ep = tp", options=options)
    fine = axes.init_mesh("dp=1 tp=2", "ep = tp", options={**options, "ep": GroupOptions(timeout=6, lane="ep")})
    alone = axes.init_mesh("dp=1 tp=2", options={"dp": GroupOptions(lane="a")})
    return texts, str(caught.value), fine.axis("ep").group is fine.axis("tp").group, alone == axes.init_mesh("dp=1 tp")


def test_what_is_no_lane_is_refused_and_the_way_to_two_options_is_said(world):
    for texts, two, same, alone in world(lanes_that_cannot_be, 2):
        assert all("GroupOptions.lane is a word such as 'gradients'; found" in text for text in texts)
        assert "'tp' and 'ep' are the same ranks and share one group" in two
        assert "options={'ep': GroupOptions(..., lane='ep')}" in two
        assert not same
        assert alone


def ranks_with_other_lanes():
    try:
        axes.init_mesh("dp", options={"dp": GroupOptions(lane=f"lane{dist.get_rank() % 2}")})
    except axes.DesyncError as error:
        return str(error)
    return ""


def test_lanes_are_agreed_on(world):
    for text in world(ranks_with_other_lanes, 2):
        assert "lane=lane0" in text
        assert "lane=lane1" in text


def one_step(mesh: axes.Mesh, x: torch.Tensor) -> list[torch.Tensor]:
    """A model on a mesh, with collectives of both views, there and back."""
    sharded = axes.shard(x, "a@dp b@tp", mesh=mesh).requires_grad_()
    axes.unshard(axes.reshard(sharded.sin(), "a@tp b")).sum().backward()
    total = axes.psum(x[:1] * mesh.coordinate["dp"], ("dp", "tp"), mesh=mesh)
    return [axes.unshard(sharded.grad), total]


def two_models_on_the_same_ranks():
    """Each in its own thread; the ranks start them in unlike orders."""
    ways = ("dp tp", "tp", "dp")
    meshes = [
        axes.init_mesh("dp=2 tp=2", "all = dp tp", options={name.replace("dp tp", "all"): each for name in ways})
        for each in (GroupOptions(lane="one"), GroupOptions(lane="two"))
    ]
    for mesh in meshes:
        mesh.device_mesh  # noqa: B018  (groups are made in one order on all ranks)
        mesh.create_groups("all")
        one_step(mesh, torch.ones(4, 4))
    wrong: list[tuple[int, int]] = []

    def train(which: int) -> None:
        mesh, generator = meshes[which], torch.Generator().manual_seed(which)
        for step in range(40):
            x = torch.randn(4, 4, generator=generator)
            gradient, total = one_step(mesh, x)
            if not (torch.allclose(gradient, x.cos()) and torch.allclose(total, 2 * x[:1])):
                wrong.append((which, step))

    threads = [threading.Thread(target=train, args=(which,)) for which in (0, 1)]
    for thread in threads if dist.get_rank() % 2 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(50)
    return wrong, any(thread.is_alive() for thread in threads)


def test_two_models_in_one_process_have_a_lane_each(world):
    assert world(two_models_on_the_same_ranks, 4) == [([], False)] * 4


class OnLane(ReduceScatter):
    """FSDP2's reduce-scatter of gradients, by a group that isn't that of its all-gathers."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.calls = group, 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        assert group is not self.group
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=self.group, async_op=async_op)


def gradients_on_a_lane():
    mesh = axes.init_mesh("dp=2 tp=2", "grads = dp", options={"grads": GroupOptions(lane="grads")})
    comm = OnLane(mesh.axis("grads").group)
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh["dp"].device_mesh)
            layer.set_force_sum_reduction_for_comms(True)
        for layer in model if ours else ():
            layer.set_custom_reduce_scatter(comm)
        torch.manual_seed(mesh.coordinate["dp"])
        model(torch.randn(3, 8)).square().mean().backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
    return all(map(torch.equal, *found)), comm.calls


def test_fsdp2_reduces_gradients_on_a_lane_of_their_own(world):
    assert world(gradients_on_a_lane, 4) == [(True, 2)] * 4


def aborted():
    mesh = axes.init_mesh("dp=2 tp=2", "grads = dp", options={"grads": GroupOptions(lane="grads")})
    other = axes.init_mesh("a", ranks=[0, 3])
    mesh.create_groups("dp", "grads", "tp")
    if dist.get_rank() in (0, 3):
        other.axis("a").group  # noqa: B018
    x = axes.shard(torch.arange(4.0), "a@dp", mesh=mesh)
    first, names = mesh.axis("dp").group, len(axes.process_groups())
    mesh["dp"].abort()
    mine = [i.names for i in axes.process_groups()]
    mesh.abort()
    left = [i.origin for i in axes.process_groups()]
    again = mesh.axis("dp").group
    sums = axes.psum(torch.ones(1), "dp", mesh=mesh).item()
    with pytest.raises(MeshError, match=r"of this DeviceMesh have been ended, by mesh.abort\(\): "):
        axes.unshard(x)
    with pytest.raises(MeshError, match="algebra alone"):
        axes.Mesh("dp=2").abort()
    return names, mine, left, again is not first, sums, dist.is_initialized(), x.to_local().numel()


def test_abort_ends_the_groups_of_a_mesh_and_they_are_made_anew(world):
    for rank, (names, mine, left, new, sums, runs, numel) in enumerate(world(aborted, 4)):
        assert names == 4 + (rank in (0, 3))  # the default group, dp, grads, tp, and that of two ranks
        assert not [each for each in mine if {"dp", "grads"} & set(each)]
        assert left == ["default"]
        assert (new, sums, runs, numel) == (True, 2, True, 2)


def the_world_that_was_started_here():
    dist.destroy_process_group()
    mesh = axes.init_mesh("dp tp=2")
    axes.psum(torch.ones(1), "dp", mesh=mesh)
    mesh.abort()
    return dist.is_initialized(), str(axes.process_groups())


def test_abort_ends_the_world_that_init_mesh_started(world):
    assert world(the_world_that_was_started_here, 4) == [(False, "[]")] * 4


def test_a_lane_is_part_of_the_text_of_options():
    assert re.fullmatch(r"timeout=0:00:05 lane=a", GroupOptions(timeout=5, lane="a").text)
