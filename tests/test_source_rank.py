"""`axes.shard(source_rank=)`: one rank's tensor goes to the ranks that share it, and to no others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import axes
from axes import ShardingError


def a_source_for_each_line(axis, index):
    """Every line along `axis` broadcasts the tensor of its member with this index."""
    mesh = axes.init_mesh("pp=2 dp=2 tp=2", "all = dp tp")[axis]
    mine = torch.arange(8.0).view(4, 2) + 100 * dist.get_rank()
    line = list(mesh.axis(axis).ranks) if isinstance(axis, str) else sorted(mesh.ranks_of(mesh.layout_of_all))
    x = axes.shard(mine, f"a@{mesh.axis_names[-1]} b", mesh=mesh, source_rank=line[index])
    source = torch.arange(8.0).view(4, 2) + 100 * line[index]
    return torch.equal(x.full_tensor(), source), torch.equal(axes.unshard(x), source), mine[0, 0].item() // 100


@pytest.mark.parametrize("axis", ["pp", "dp", "tp", "all", ("dp", "tp"), ("tp", "pp")], ids=str)
def test_each_line_has_a_source_of_its_own(pool, axis):
    for index in (0, 1):
        found = pool.run(a_source_for_each_line, axis, index)
        assert [(whole, ours) for whole, ours, _ in found] == [(True, True)] * 8
        assert [rank for *_, rank in found] == list(range(8))  # what came in is as it was


def one_stage_alone():
    mesh = axes.init_mesh("pp=2 tp=4")
    groups = len(axes.process_groups())
    if mesh.coordinate["pp"] == 0:
        return len(axes.process_groups()) - groups
    x = axes.shard(torch.full((4,), float(dist.get_rank())), "a@tp", mesh=mesh["tp"], source_rank=6)
    return axes.unshard(x).tolist()


def test_one_pipeline_stage_calls_it_alone(world):
    assert world(one_stage_alone, 8) == [0] * 4 + [[6.0] * 4] * 4


def a_source_outside_the_line(source_rank):
    mesh = axes.init_mesh("pp=2 tp=4", ranks=[7, 5, 3, 1, 0, 2, 4, 6])
    before = len(axes.process_groups())
    try:
        axes.shard(torch.zeros(4), "a@tp", mesh=mesh["tp"], source_rank=source_rank)
    except ShardingError as error:
        return str(error), len(axes.process_groups()) - before
    return None


def test_a_source_outside_the_line_is_an_error_that_names_the_line_and_makes_nothing(world):
    found = world(a_source_outside_the_line, 8, 4)
    odd = (
        "source_rank is one of the ranks of Mesh('pp=2 tp=4', ranks=[7, 5, 3, 1, 0, 2, 4, 6])['tp'] through this one, "
    )
    for rank in (1, 3, 5, 7):
        message, made = found[rank]
        assert message.startswith(odd + "ranks 7, 5, 3, 1; found 4")
        assert made == 0
    assert [found[rank] for rank in (0, 2, 4, 6)] == [None] * 4
    assert all("found 8" in message for message, _ in world(a_source_outside_the_line, 8, 8))


def a_rank_outside_the_mesh():
    mesh = axes.init_mesh("tp=4", ranks=[0, 1, 2, 3])
    x = axes.shard(torch.full((4,), float(dist.get_rank())), "a@tp", mesh=mesh, source_rank=2)
    return x.to_local().tolist()


def test_ranks_outside_the_mesh_take_no_part(pool):
    assert pool.run(a_rank_outside_the_mesh) == [[2.0]] * 4 + [[]] * 4


def the_gradient_and_sizes_carry_over():
    mesh = axes.init_mesh("pp=2 tp=4")["tp"]
    source = mesh.axis("tp").ranks[3]
    w = torch.full((12, 2), float(dist.get_rank()), requires_grad=True)
    x = axes.shard(w, "(three h@tp) b", mesh=mesh, source_rank=source, three=3)
    return x.requires_grad, x.is_leaf, x.to_local().unique().tolist() == [source]


def test_factors_and_leaves_are_as_without_a_source(pool):
    assert pool.run(the_gradient_and_sizes_carry_over) == [(True, True, True)] * 8


def nothing_from_the_others():
    mesh = axes.init_mesh("tp=8", device_type="cpu")
    try:
        axes.shard(None, "a@tp", mesh=mesh, source_rank=0)
    except ShardingError as error:
        return str(error)
    return None


def test_a_rank_that_is_sent_a_tensor_says_its_shape_by_one_of_its_own(pool):
    for said in pool.run(nothing_from_the_others):
        assert said is not None
        assert "takes a tensor on every rank; found None" in said
        assert "pass torch.empty(shape, dtype=...) there" in said
