"""What every function asks of sizes, shapes, ranks and `grad=`, whatever the caches hold already."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import axes
from axes import ExpressionError, Mesh, ShardingError, SizeError
from axes.algebra.sizes import checked_shape

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
    with pytest.raises(SizeError, match="a shape is whole numbers from 0; found"):
        call("4")
    assert call((4, 12)) == right


@pytest.mark.parametrize("door", SHAPE_DOORS)
def test_integers_of_numpy_and_torch_are_as_good_and_come_out_plain(door):
    def plain(value):
        if isinstance(value, tuple | list):
            return all(map(plain, value))
        if isinstance(value, slice):
            return plain((value.start, value.stop))
        return type(value) in (int, bool, str, axes.Sharding)

    call = SHAPE_DOORS[door]
    for shape in ((np.int64(4), np.uint8(12)), torch.tensor([4, 12]), torch.Size([4, 12]), [4, 12], np.array([4, 12])):
        found = call(shape)
        assert found == call((4, 12))
        assert plain(found)


def test_a_shape_of_floats_leaves_nothing_behind_in_the_caches():
    sharding = Mesh("dp=2").sharding("poisoned@dp other")
    with pytest.raises(SizeError):
        sharding.local_shape((4.0, 8.0))
    assert list(map(type, sharding.local_shape((4, 8)))) == [int, int]
    with pytest.raises(SizeError):
        sharding.local_shape((4.0, 8.0))


def test_a_negative_size_and_a_shape_that_is_none_are_errors():
    for wrong in ((-1,), None, 4):
        with pytest.raises(SizeError, match="a shape is whole numbers from 0"):
            checked_shape(wrong)


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
    "rearrange a DTensor": lambda mesh, h: (
        axes.rearrange(axes.shard(WHOLE, "b d", mesh=mesh), "b (h d) -> h b d", h=h).to_local().tolist()
    ),
    "reduce": lambda mesh, h: axes.reduce(WHOLE, "b (h@tp d) -> b d", "sum", mesh=mesh, h=h).tolist(),
    "reduce by einops": lambda mesh, h: axes.reduce(WHOLE, "b (h d) -> b d", "sum", h=h).tolist(),
    "repeat": lambda mesh, h: axes.repeat(WHOLE, "b d -> b h@tp d", mesh=mesh, h=h).tolist(),
    "repeat by einops": lambda mesh, h: axes.repeat(WHOLE, "b d -> b h d", h=h).tolist(),
    "einsum": lambda mesh, h: axes.einsum(WHOLE, "b (h d) -> b h", h=h).tolist(),
    "reshard": lambda mesh, h: axes.reshard(axes.shard(WHOLE, "b d", mesh=mesh), "b (h@tp d)", h=h).to_local().tolist(),
    "reshard a shard": lambda mesh, h: axes.reshard(WHOLE, "b (h d)@tp -> b (h d)", mesh=mesh, h=h).tolist(),
}


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


@pytest.mark.parametrize("wrong", [12.0, "12", True])
def test_functions_over_split_dims_take_whole_sizes(wrong):
    x, labels, table = torch.zeros(2, 12), torch.tensor([1, 2]), torch.zeros(12, 3)

    def calls(mesh):
        functions = [
            lambda size: axes.rms_norm(x, "b d@tp", over="d", mesh=mesh, d=size),
            lambda size: axes.layer_norm(x, "b d@tp", over="d", mesh=mesh, d=size),
            lambda size: axes.cross_entropy(x, labels, "b d@tp, b -> ", mesh=mesh, d=size),
            lambda size: axes.embedding(labels, table, "b, d@tp e -> b e", mesh=mesh, d=size),
        ]
        for function in functions:
            assert torch.equal(function(12), function(np.int32(12)))
            with pytest.raises(SizeError, match="the size of 'd' is a whole number"):
                function(wrong)

    on_one_rank(calls)


@pytest.mark.parametrize("wrong", [(2.0, 12), ("2", 12), (True, 12), 12])
def test_from_local_takes_whole_numbers_for_the_shape(wrong):
    def calls(mesh):
        for _ in range(2):
            with pytest.raises(SizeError, match="a shape is whole numbers from 0"):
                axes.from_local(WHOLE, "b d@tp", mesh=mesh, shape=wrong)
            assert axes.from_local(WHOLE, "b d@tp", mesh=mesh, shape=(np.int64(2), 12)).shape == (2, 12)

    on_one_rank(calls)


# --------------------------------------------------------------- dims, coordinates and ranks


@pytest.mark.parametrize("wrong", [1.0, "1", None, True])
def test_collectives_take_whole_numbers_for_dims_sizes_and_coordinates(wrong):
    x = torch.arange(4.0).view(2, 2)

    def calls(mesh):
        for collective in (axes.all_gather, axes.psum_scatter):
            assert torch.equal(collective(x, "tp", dim=np.int64(1)), x)
            with pytest.raises(ShardingError, match="over dim"):
                collective(x, "tp", dim=wrong)
        for dims in ({"split_dim": wrong}, {"concat_dim": wrong}):
            with pytest.raises(ShardingError, match="over dim"):
                axes.all_to_all(x, "tp", **dims)
        with pytest.raises(ShardingError, match="send_sizes are whole numbers"):
            axes.all_to_all(x, "tp", send_sizes=[wrong], recv_sizes=[2])
        assert torch.equal(axes.all_to_all(x, "tp", send_sizes=[np.int64(2)], recv_sizes=[2]), x)
        if wrong is not None:
            with pytest.raises(ShardingError, match="shift is a whole number"):
                axes.ppermute(x, "tp", shift=wrong)
        with pytest.raises(ShardingError, match="a list of pairs"):
            axes.ppermute(x, "tp", perm=[(0, wrong)])
        assert torch.equal(axes.ppermute(x, "tp", perm=[(np.int64(0), 0)]), x)
        with pytest.raises(axes.AxesError, match="source_rank is a whole number from 0"):
            axes.shard(x, "a@tp b", mesh=mesh, source_rank="1" if wrong is None else wrong)

    on_one_rank(calls)


@pytest.mark.parametrize("wrong", [2.0, "2", None, True, [2]])
def test_worlds_have_a_whole_number_of_ranks(wrong):
    with pytest.raises(axes.AxesError, match="world size is a number of processes"):
        axes.launch(print, wrong)
    with pytest.raises(axes.AxesError, match="the world size is a whole number"), axes.simulate(wrong):
        pass
    with pytest.raises(axes.AxesError, match="the rank is a whole number"), axes.simulate(4, rank=wrong):
        pass


def test_worlds_may_be_sized_by_numpys_integers(world):
    assert world(max, np.int64(2), 3, 4) == [4, 4]
    with axes.simulate(np.int64(8), rank=np.int32(3)):
        assert axes.init_mesh("dp=2 tp=4").coordinate == {"dp": 0, "tp": 3}


# ------------------------------------------------------------------------- names in a spec


SQUARE = torch.ones(4, 4)


def whole(mesh):
    return axes.shard(SQUARE, "a b", mesh=mesh)


def applied(layer, mesh):
    with mesh:
        return layer(SQUARE)


# Each takes the text of a tensor of two dims, and names that go with it.
SPEC_DOORS = {
    "sharding": lambda mesh, spec, names: mesh.sharding(spec),
    "shard": lambda mesh, spec, names: axes.shard(SQUARE, spec, mesh=mesh),
    "from_local": lambda mesh, spec, names: axes.from_local(SQUARE, spec, mesh=mesh),
    "to_local": lambda mesh, spec, names: axes.to_local(whole(mesh), spec),
    "zeros": lambda mesh, spec, names: axes.zeros(spec, mesh=mesh, sizes=dict.fromkeys(names.split(), 4)),
    "rand": lambda mesh, spec, names: axes.rand(spec, mesh=mesh, sizes=dict.fromkeys(names.split(), 4)),
    "plan, from": lambda mesh, spec, names: axes.plan(spec, "_ _", (4, 4), mesh=mesh),
    "plan, to": lambda mesh, spec, names: axes.plan("_ _", spec, (4, 4), mesh=mesh),
    "transfer, from": lambda mesh, spec, names: axes.transfer(
        {"w": spec}, {"w": "_ _"}, shapes={"w": (4, 4)}, source_mesh=mesh, target_mesh=mesh
    ),
    "transfer, to": lambda mesh, spec, names: axes.transfer(
        {"w": "_ _"}, {"w": spec}, shapes={"w": (4, 4)}, source_mesh=mesh, target_mesh=mesh
    ),
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


def test_a_name_with_two_sizes_in_two_specs_of_one_tensor_is_a_size_error():
    message = r"'a' is given two sizes: 2 in '\(a=2 b\)@tp c' and 4 in '\(a=4 b\) c'"
    mesh, specs = Mesh("dp=2 tp=2"), ("(a=2 b)@tp c", "(a=4 b) c")
    with pytest.raises(SizeError, match=message):
        axes.plan(*specs, (8, 8), mesh=mesh)
    with pytest.raises(SizeError, match=message):
        axes.transfer(*({"w": spec} for spec in specs), shapes={"w": (8, 8)}, source_mesh=mesh, target_mesh=mesh)
    axes.plan("(a=2 b)@tp c", "(a b) c", (8, 8), mesh=mesh)


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


def test_symbolic_sizes_stay_symbolic_in_a_graph():
    graphs = []

    def counted(graph, _):
        graphs.append(graph)
        return graph

    @torch.compile(backend=counted, fullgraph=True, dynamic=True)
    def halves(x):
        return axes.rearrange(x, "(two d) -> two d", d=x.shape[0] // 2) * checked_shape(x.shape)[0]

    for size in (4, 6, 8, 10):
        x = torch.arange(float(size))
        assert torch.equal(halves(x), x.view(2, -1) * size)
    assert len(graphs) == 1


@pytest.mark.parametrize("wanted", [1, True, np.True_])
def test_requires_grad_is_a_flag_or_a_number_of_one(wanted):
    def made(mesh):
        assert axes.zeros("a@tp b", mesh=mesh, a=4, b=4, requires_grad=wanted).requires_grad
        with pytest.raises(ShardingError, match=r"axes\.rand: requires_grad is True or False; found 2"):
            axes.rand("a@tp b", mesh=mesh, a=4, b=4, requires_grad=2)

    on_one_rank(made)
