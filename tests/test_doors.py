"""What every function asks of sizes, shapes, ranks and `grad=`, whatever the caches hold already."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import axes
from axes import ExpressionError, Mesh, ShardingError, SizeError

MESH = Mesh("dp=2 tp=4")
SHARDED = MESH.sharding("b@dp s@tp")
GROUPED = MESH.sharding("b@dp (three h@tp)", three=3)

NO_NUMBERS = [4.0, "4", None, True, object(), 4 + 0j, [4], np.float64(4), torch.tensor(4.0)]

# ------------------------------------------------------------------------------- shapes

SHAPE_DOORS = {
    "local_shape": lambda shape: SHARDED.local_shape(shape),
    "local_shape of a factor": lambda shape: GROUPED.local_shape(shape),
    "local_indices": lambda shape: SHARDED.local_indices(shape),
    "extents": lambda shape: SHARDED.extents(shape),
    "is_equivalent": lambda shape: SHARDED.is_equivalent(MESH.sharding("x@dp y@tp"), shape),
    "sized": lambda shape: SHARDED.sized(shape),
    "sized of a factor": lambda shape: GROUPED.sized(shape).local_shape((4, 12)),
    "from_placements": lambda shape: axes.Sharding.from_placements(MESH, SHARDED.placements, 2, shape).spec,
    "plan": lambda shape: axes.plan("b@dp s@tp", "b s", shape, mesh=MESH).shape,
}


@pytest.mark.parametrize("wrong", NO_NUMBERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("door", SHAPE_DOORS)
def test_a_shape_is_whole_numbers_at_every_door_before_and_after_it_was_right(door, wrong):
    call = SHAPE_DOORS[door]
    with pytest.raises(SizeError, match="a shape is whole numbers from 0; found"):
        call((wrong, 12))
    right = call((4, 12))
    with pytest.raises(SizeError, match="a shape is whole numbers from 0; found"):
        call((wrong, 12))
    for shape in ("4", (-1, 12), 4):
        with pytest.raises(SizeError, match="a shape is whole numbers from 0; found"):
            call(shape)
    for shape in ((np.int64(4), np.uint8(12)), torch.tensor([4, 12]), torch.Size([4, 12]), np.array([4, 12])):
        assert call(shape) == right


@pytest.mark.parametrize("wrong", [1.0, "1", True, -1, None])
def test_ranks_and_counts_of_dims_are_whole_numbers_too(wrong):
    if wrong not in (None, -1):
        with pytest.raises(axes.MeshError, match="a rank is a whole number from 0"):
            SHARDED.local_shape((4, 12), rank=wrong)
        with pytest.raises(axes.MeshError, match="a rank is a whole number from 0"):
            MESH.axis("tp").ranks_of(wrong)
    with pytest.raises(SizeError, match="ndim is a whole number from 0"):
        axes.Sharding.from_placements(MESH, SHARDED.placements, wrong)
    if wrong is not None:
        with pytest.raises(axes.MeshError, match="ranks_per_node is a whole number from 1"):
            Mesh("dp=2", ranks_per_node=wrong)


# ---------------------------------------------------------------------------- sizes of names


def on_one_rank(call):
    with axes.simulate(1), axes.init_mesh("tp=1") as mesh:
        return call(mesh)


WHOLE = torch.arange(24.0).view(2, 12)

# fmt: off
SIZE_DOORS = {
    "sharding": lambda mesh, h: mesh.sharding("b (h@tp d)", h=h).spec,
    "sharding, sizes": lambda mesh, h: mesh.sharding("b (h@tp d)", sizes={"h": h}).spec,
    "plan": lambda mesh, h: str(axes.plan("b (h@tp d)", "b d", (2, 12), mesh=mesh, h=h)),
    "plan, sizes": lambda mesh, h: str(axes.plan("b (h@tp d)", "b d", (2, 12), mesh=mesh, sizes={"h": h})),
    "rearrange a mesh": lambda mesh, h: axes.Mesh("x=12").rearrange("(h d) -> h d", h=h).shape,
    "define": lambda mesh, h: axes.Mesh("x=12").define("(x) = h d", h=h).names,
    "a mesh": lambda mesh, h: axes.Mesh("h d=3", h=h).shape,
    "shard": lambda mesh, h: axes.shard(WHOLE, "b (h@tp d)", mesh=mesh, h=h).to_local().tolist(),
    "shard, sizes": lambda mesh, h: axes.shard(WHOLE, "b (h@tp d)", mesh=mesh, sizes={"h": h}).to_local().tolist(),
    "from_local": lambda mesh, h: axes.from_local(WHOLE, "b (h@tp d)", mesh=mesh, h=h).to_local().tolist(),
    "zeros": lambda mesh, h: axes.zeros("h@tp d", mesh=mesh, d=3, h=h).to_local().tolist(),
    "full": lambda mesh, h: axes.full("h@tp d", 1.5, mesh=mesh, d=3, sizes={"h": h}).to_local().tolist(),
    "empty": lambda mesh, h: tuple(axes.empty("h@tp d", mesh=mesh, d=3, h=h).shape),
    "rand": lambda mesh, h: tuple(axes.rand("h@tp d", mesh=mesh, d=3, h=h).shape),
    "einops": lambda mesh, h: axes.rearrange(WHOLE, "b (h d) -> h b d", h=h).tolist(),
    "rearrange": lambda mesh, h: axes.rearrange(WHOLE, "b (h d) -> h@tp b d", mesh=mesh, h=h).tolist(),
    "rearrange, sizes": lambda mesh, h: axes.rearrange(WHOLE, "b (h d) -> h b d", sizes={"h": h}).tolist(),
    "rearrange a DTensor": lambda mesh, h: (axes.rearrange(axes.shard(WHOLE, "b d", mesh=mesh), "b (h d) -> h b d", h=h).to_local().tolist()),
    "reduce": lambda mesh, h: axes.reduce(WHOLE, "b (h@tp d) -> b d", "sum", mesh=mesh, h=h).tolist(),
    "reduce by einops": lambda mesh, h: axes.reduce(WHOLE, "b (h d) -> b d", "sum", h=h).tolist(),
    "repeat": lambda mesh, h: axes.repeat(WHOLE, "b d -> b h@tp d", mesh=mesh, h=h).tolist(),
    "repeat by einops": lambda mesh, h: axes.repeat(WHOLE, "b d -> b h d", h=h).tolist(),
    "einsum": lambda mesh, h: axes.einsum(WHOLE, "b (h d) -> b h", h=h).tolist(),
    "reshard": lambda mesh, h: axes.reshard(axes.shard(WHOLE, "b d", mesh=mesh), "b (h@tp d)", h=h).to_local().tolist(),
    "rms_norm": lambda mesh, h: axes.rms_norm(torch.ones(2, 4), "b h@tp", over="h", mesh=mesh, h=h).tolist(),
    "cross_entropy": lambda mesh, h: axes.cross_entropy(torch.ones(2, 4), torch.tensor([1, 2]), "b h@tp, b -> ", mesh=mesh, h=h).tolist(),
    "embedding": lambda mesh, h: axes.embedding(torch.tensor([1, 2]), torch.ones(4, 3), "b, h@tp e -> b e", mesh=mesh, h=h).tolist(),
    "reshard a shard": lambda mesh, h: axes.reshard(WHOLE, "b (h d)@tp -> b (h d)", mesh=mesh, h=h).tolist(),
}
# fmt: on


@pytest.mark.parametrize("wrong", [4.0, "4", True, np.float64(4)], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("door", SIZE_DOORS)
def test_a_size_is_a_whole_number_at_every_door_before_and_after_it_was_right(door, wrong):
    call = SIZE_DOORS[door]

    def calls(mesh):
        for before in (False, True):
            if before:
                right = call(mesh, 4)
            with pytest.raises(SizeError, match=r"the size of 'h' is a whole number from 1 to|no option 'h'"):
                call(mesh, wrong)
        assert call(mesh, 4) == call(mesh, np.int64(4)) == call(mesh, torch.tensor(4)) == right

    on_one_rank(calls)


def test_a_size_that_stays_open_may_be_written_as_minus_one_or_none_everywhere():
    for h in (-1, None):
        found = axes.rearrange(WHOLE, "b (h@tp d) -> h@tp b d", mesh=Mesh("tp=1"), d=3, h=h)
        assert torch.equal(found, axes.rearrange(WHOLE, "b (h d) -> h b d", d=3))


# --------------------------------------------------------------- dims, coordinates and ranks


@pytest.mark.parametrize("wrong", [2.0, "2", None, True, [2]])
def test_worlds_have_a_whole_number_of_ranks(wrong):
    with pytest.raises(axes.AxesError, match="world size is a number of processes"):
        axes.launch(print, wrong)
    with pytest.raises(axes.AxesError, match="the world size is a whole number"), axes.simulate(wrong):
        pass
    with pytest.raises(axes.AxesError, match="the rank is a whole number"), axes.simulate(4, rank=wrong):
        pass


# ------------------------------------------------------------------------- names in a spec


SQUARE = torch.ones(4, 4)


def whole(mesh):
    return axes.shard(SQUARE, "a b", mesh=mesh)


def applied(layer, mesh):
    with mesh:
        return layer(SQUARE)


# Each takes the text of a tensor of two dims, and names that go with it.
# fmt: off
SPEC_DOORS = {
    "sharding": lambda mesh, spec, names: mesh.sharding(spec),
    "shard": lambda mesh, spec, names: axes.shard(SQUARE, spec, mesh=mesh),
    "from_local": lambda mesh, spec, names: axes.from_local(SQUARE, spec, mesh=mesh),
    "to_local": lambda mesh, spec, names: axes.to_local(whole(mesh), spec),
    "zeros": lambda mesh, spec, names: axes.zeros(spec, mesh=mesh, sizes=dict.fromkeys(names.split(), 4)),
    "rand": lambda mesh, spec, names: axes.rand(spec, mesh=mesh, sizes=dict.fromkeys(names.split(), 4)),
    "plan, from": lambda mesh, spec, names: axes.plan(spec, "_ _", (4, 4), mesh=mesh),
    "plan, to": lambda mesh, spec, names: axes.plan("_ _", spec, (4, 4), mesh=mesh),
    "transfer, from": lambda mesh, spec, names: axes.transfer({"w": spec}, {"w": "_ _"}, shapes={"w": (4, 4)}, source_mesh=mesh, target_mesh=mesh),
    "transfer, to": lambda mesh, spec, names: axes.transfer({"w": "_ _"}, {"w": spec}, shapes={"w": (4, 4)}, source_mesh=mesh, target_mesh=mesh),
    "shard_module": lambda mesh, spec, names: axes.shard_module(torch.nn.Linear(4, 4), {"weight": spec}, mesh=mesh),
    "constrain": lambda mesh, spec, names: axes.constrain(whole(mesh), spec, rules=axes.Rules(a=None, b=None)),
    "reshard": lambda mesh, spec, names: axes.reshard(whole(mesh), spec),
    "reshard of many": lambda mesh, spec, names: axes.reshard({"w": whole(mesh)}, {"w": spec}),
    "reshard of a shard": lambda mesh, spec, names: axes.reshard(SQUARE, f"{spec} -> {names}", mesh=mesh),
    "shard_map, in": lambda mesh, spec, names: axes.shard_map(lambda x: x, f"{spec} -> c d", mesh=mesh)(whole(mesh)),
    "shard_map, out": lambda mesh, spec, names: axes.shard_map(lambda x: x, f"c d -> {spec}", mesh=mesh)(whole(mesh)),
    "rearrange, in": lambda mesh, spec, names: axes.rearrange(whole(mesh), f"{spec} -> {names}"),
    "rearrange, out": lambda mesh, spec, names: axes.rearrange(whole(mesh), f"{names} -> {spec}"),
    "rearrange of a shard": lambda mesh, spec, names: axes.rearrange(SQUARE, f"{spec} -> {names}", mesh=mesh),
    "reduce": lambda mesh, spec, names: axes.reduce(whole(mesh), f"{spec} -> a", "sum"),
    "repeat": lambda mesh, spec, names: axes.repeat(whole(mesh), f"{names} -> {spec}"),
    "einsum": lambda mesh, spec, names: axes.einsum(whole(mesh), f"{names} -> {spec}"),
    "explain": lambda mesh, spec, names: axes.explain(f"{spec} -> {names}", (4, 4), mesh=mesh),
    "softmax": lambda mesh, spec, names: axes.softmax(whole(mesh), spec, over="a"),
    "layer_norm": lambda mesh, spec, names: axes.layer_norm(whole(mesh), spec, over="a"),
    "nn.Einsum": lambda mesh, spec, names: applied(axes.nn.Einsum(f"{names}, b c -> {spec}", b=4, c=4), mesh),
    "nn.Rearrange": lambda mesh, spec, names: applied(axes.nn.Rearrange(f"{names} -> {spec}"), mesh),
    "nn.dropout": lambda mesh, spec, names: axes.nn.dropout(SQUARE, 0.5, spec, mesh=mesh, seed=1),
}
# fmt: on


@pytest.mark.parametrize("door", SPEC_DOORS)
def test_a_dim_that_is_named_twice_is_an_expression_error_at_every_door(door):
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu") as mesh:
        with pytest.raises(ExpressionError, match="'a' stands twice in one tensor") as caught:
            SPEC_DOORS[door](mesh, "a@tp a", "a a")
        assert type(caught.value) is ExpressionError
        assert "^" in str(caught.value)


@pytest.mark.parametrize("door", SPEC_DOORS)
def test_an_axis_that_is_used_twice_is_a_sharding_error_at_every_door(door):
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu") as mesh:
        with pytest.raises(ShardingError, match="'tp' is used twice") as caught:
            SPEC_DOORS[door](mesh, "a@tp b@tp", "a b")
        assert type(caught.value) is ShardingError


# ------------------------------------------------------------------------------------- grad=


GRAD_DOORS = {
    "reshard": lambda x, **grad: axes.reshard(x, "a b", **grad),
    "rearrange": lambda x, **grad: axes.rearrange(x, "a b -> b a", **grad),
    "reduce": lambda x, **grad: axes.reduce(x, "a b -> a", "sum", **grad),
    "repeat": lambda x, **grad: axes.repeat(x, "a b -> a b n", n=2, **grad),
    "einsum": lambda x, **grad: axes.einsum(x, x, "a b, a b -> a b", **grad),
}


@pytest.mark.parametrize("wrong", ["pendng", None, True, "", "Resolved"])
@pytest.mark.parametrize("door", GRAD_DOORS)
def test_grad_is_one_of_two_words_at_every_door_and_in_a_graph(door, wrong):
    def calls(mesh):
        call, plain = GRAD_DOORS[door], torch.ones(2, 2, requires_grad=True)
        x = axes.shard(plain.detach(), "a@tp b", mesh=mesh).requires_grad_()
        for each in (x, plain, x.detach()):
            with pytest.raises(ShardingError, match="grad is 'resolved' or 'pending'; found"):
                call(each, grad=wrong)
        call(x, grad="pending"), call(x, grad="resolved")
        with pytest.raises(Exception, match="grad is 'resolved' or 'pending'; found"):
            torch.compile(call, backend="eager", fullgraph=True)(x, grad=wrong)

    on_one_rank(calls)
