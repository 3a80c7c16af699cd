"""A simulated world is of any size, and leaves nothing of itself for the next one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import axes
from axes.algebra.errors import AxesError
from axes.runtime.simulate import simulate


def rows_of(rank: int, world_size: int = 8) -> list[int]:
    """Rows of a 20-row tensor after each of some operations, as this rank of a simulated world."""
    with simulate(world_size, rank):
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
        x = distribute_tensor(torch.ones(20, 20), mesh, [Shard(0)])
        w = distribute_tensor(torch.ones(20, 20), mesh, [Replicate()])
        back = w.redistribute(mesh, [Shard(0)])
        results = [x, x + 1, x @ w, torch.softmax(x, 1), back]
        assert all(y.device_mesh is mesh for y in results)
        return [y.to_local().shape[0] for y in results]


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 1), (8, 3), (131072, 77777)])
def test_the_process_is_that_rank_of_that_world(world_size: int, rank: int):
    with simulate(world_size, rank):
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    assert not dist.is_initialized()


def test_the_rank_is_the_first_unless_told():
    with simulate(4):
        assert dist.get_rank() == 0


def test_collectives_return_at_once():
    with simulate(131072, 5):
        dist.all_reduce(torch.ones(3))
        dist.barrier()


def test_a_mesh_and_its_groups_can_be_made_in_it():
    with simulate(131072, 77777):
        mesh = axes.init_mesh("pp dp cp=2 tp=8", "fsdp = dp cp", pp=16)
        assert mesh.axis("tp").group.size() == 8
        assert mesh["fsdp"].device_mesh.size() == 1024
        assert len(axes.process_groups()) == 3


def test_nothing_of_one_world_is_seen_in_the_next():
    # DTensor's caches take equal meshes for the same: another rank, the same mesh, another answer.
    assert rows_of(0) == [3] * 5
    assert rows_of(7) == [0] * 5
    assert rows_of(6) == [2] * 5
    assert rows_of(0) == [3] * 5


def test_groups_of_one_world_are_not_handed_out_in_the_next():
    for rank in (1, 6):
        with simulate(8, rank):
            mesh = axes.init_mesh("dp tp=2")
            assert dist.get_process_group_ranks(mesh.axis("tp").group) == [rank & ~1, rank | 1]
            assert len(axes.process_groups()) == 2
    assert axes.process_groups() == []


def test_an_exception_leaves_the_world_too():
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), simulate(8):
            1 / 0  # noqa: B018
        assert not dist.is_initialized()


def test_a_world_inside_a_world_is_refused_and_the_outer_one_stays():
    with simulate(8, 3):
        with pytest.raises(AxesError, match=r"in one already \(rank 3 of 8, fake\)"), simulate(4):
            pass
        assert dist.get_rank() == 3
        dist.barrier()


def test_a_real_world_is_left_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(AxesError, match="destroy_process_group"), simulate(4):
            pass
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_a_block_that_ends_the_world_itself_is_fine():
    with simulate(8):
        dist.destroy_process_group()
    with simulate(8):
        assert dist.get_world_size() == 8


def test_a_world_that_the_block_starts_instead_is_left_running():
    with simulate(8):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world_size", "rank", "message"),
    [
        (0, 0, "1 to 4,194,304 ranks, not 0"),
        (-8, 0, "not -8"),
        (10**12, 0, "not 1,000,000,000,000"),
        (8.0, 0, "world size is a whole number, not 8.0"),
        (True, 0, "world size is a whole number, not True"),
        ("8", 0, "not '8'"),
        (8, 8, "ranks 0 to 7, not 8"),
        (8, -1, "ranks 0 to 7, not -1"),
        (8, None, "rank is a whole number, not None"),
    ],
)
def test_a_size_or_rank_that_cannot_be_is_refused(world_size: int, rank: int, message: str):
    with pytest.raises(AxesError, match=message), simulate(world_size, rank):
        pass
    assert not dist.is_initialized()
