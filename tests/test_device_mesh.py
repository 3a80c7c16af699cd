"""Torch device meshes over groups in axis order: DTensors, FSDP2 and adoption, against plain tensors."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

import axes
from axes import Mesh, MeshError
from axes.runtime import torch_private
from tests.counting import calls

WHOLE = torch.arange(8 * 16, dtype=torch.float32).reshape(8, 16)

# -------------------------------------------------------------------- DTensors on any order


def shard_of(whole: np.ndarray, mesh: Mesh, placements) -> np.ndarray:
    """What a rank holds by the definition: for each axis in order, its coordinate's piece."""
    for name, placement in zip(mesh.axis_names, placements, strict=True):
        if placement.is_shard():
            axis = mesh.axis(name)
            whole = np.array_split(whole, axis.size, placement.dim)[axis.index]
    return whole


def every_pair_of_placements(declaration, ranks, expression):
    """Wrong (source, target) pairs of placements: by shard, by redistribution and as a whole."""
    mesh = axes.init_mesh(declaration, ranks=ranks)
    mesh = mesh.rearrange(expression) if expression else mesh
    if mesh.coordinate is None:
        return []
    device_mesh, whole = mesh.device_mesh, WHOLE.numpy()
    states = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=mesh.ndim))
    wrong = []
    assert device_mesh.get_coordinate() == tuple(mesh.coordinate.values())
    assert device_mesh.mesh.tolist() == mesh.ranks
    for source in states:
        x = distribute_tensor(WHOLE, device_mesh, source)
        if not np.array_equal(x.to_local().numpy(), shard_of(whole, mesh, source)):
            wrong.append((source, "distribute"))
        if not np.array_equal(x.full_tensor().numpy(), whole):
            wrong.append((source, "full"))
        for target in states:
            y = x.redistribute(placements=target).to_local()
            if not np.array_equal(y.numpy(), shard_of(whole, mesh, target)):
                wrong.append((source, target))
    for target in states if mesh.ndim == 1 else []:
        pending = DTensor.from_local(torch.from_numpy(whole), device_mesh, [Partial()])
        y = pending.redistribute(placements=target).to_local()
        if not np.array_equal(y.numpy(), shard_of(whole * mesh.size, mesh, target)):
            wrong.append((Partial(), target))
    return wrong


@pytest.mark.parametrize(
    ("declaration", "ranks", "expression"),
    [
        ("dp=2 tp=4", None, None),
        ("dp=2 tp=4", None, "dp tp -> tp dp"),
        ("dp=2 tp=4", None, "dp tp -> x=(tp dp)"),
        ("dp=2 tp=4", [5, 2, 7, 0, 3, 6, 1, 4], None),
        ("x=8", [3, 1, 4, 0, 5, 2, 6, 7], None),
        ("x=4", [6, 3, 5, 0], None),
        ("a=2 b=2 c=2", None, "a b c -> c b a"),
        ("a=2 b=2 c=2", None, "a b c -> (c a) b"),
    ],
)
def test_shards_lie_where_the_coordinates_say_in_any_order_of_ranks(pool, declaration, ranks, expression):
    found = pool.run(every_pair_of_placements, declaration, ranks, expression)
    assert found == [[]] * 8


def pending_on_two_axes():
    mesh = axes.init_mesh("dp=2 tp=4").rearrange("dp tp -> tp dp")
    local = torch.full((8, 4), float(dist.get_rank()))
    pending = DTensor.from_local(local, mesh.device_mesh, [Partial(), Partial()])
    total = pending.full_tensor().unique().tolist()
    shard = pending.redistribute(placements=[Shard(0), Shard(1)])
    return total, tuple(shard.to_local().shape), shard.full_tensor().unique().tolist()


def test_pending_sums_on_permuted_axes_resolve(pool):
    assert pool.run(pending_on_two_axes) == [([28.0], (2, 2), [28.0])] * 8


# ---------------------------------------------------------------------- objects and their cost


def the_objects():
    mesh = axes.init_mesh("pp dp cp tp", "fsdp = dp cp", pp=1, dp=2, cp=2)
    again = axes.init_mesh("pp=1 dp=2 cp=2 tp=2", "fsdp = dp cp")
    permuted = axes.init_mesh("a=4 b=2", ranks=[5, 2, 7, 0, 3, 6, 1, 4])
    cases = [mesh, mesh["fsdp", "tp"], mesh["tp"], mesh["tp", "pp"], permuted, permuted["b", "a"]]
    for case in cases:
        made = case.device_mesh
        root = torch_private.root_of(made)
        dims = [layout.modes for layout in case.layouts]
        groups = made.get_all_groups()
        other = torch_private.constructed_device_mesh(root, dims, case.axis_names, groups)
        ours, theirs = dict(vars(made)), dict(vars(other))
        assert torch.equal(ours.pop("_rank_map"), theirs.pop("_rank_map"))
        for fields in (ours, theirs):
            fields.pop("_hash", None)  # kept once it is computed, 2.11 has no place for it before
        assert ours == theirs
        assert made == other
        assert hash(made) == hash(other)
        assert repr(made) == repr(other)
        assert torch.equal(made.mesh, other.mesh)
        assert [made.get_local_rank(i) for i in range(made.ndim)] == list(made.get_coordinate())
    return [
        mesh.device_mesh is again.device_mesh,
        mesh["fsdp"].device_mesh is again["fsdp"].device_mesh,
        mesh.define("ep = cp tp").device_mesh is mesh.device_mesh,
        mesh["tp"].device_mesh is not mesh["fsdp"].device_mesh,
        torch_private.root_of(mesh["tp"].device_mesh) is torch_private.root_of(again["fsdp"].device_mesh),
        Mesh.from_device_mesh(mesh["fsdp"].device_mesh) == mesh["fsdp"],
        mesh["fsdp", "tp"].device_mesh["tp"] == mesh["tp"].device_mesh,
        mesh["fsdp", "tp"].device_mesh["tp"].get_group() is mesh.axis("tp").group,
    ]


def test_equal_meshes_give_one_object_as_the_constructor_would_make_it(pool):
    assert pool.run(the_objects) == [[True] * 8] * 8


@pytest.mark.parametrize("ranks", [range(8), range(1, 8, 2), (5, 2, 7, 0), range(1)])
def test_the_root_of_meshes_is_as_the_constructor_would_make_it(ranks):
    for rank in (0, 2, 7):
        with axes.simulate(8, rank=rank):
            axes.init_mesh("x=8", device_type="cpu")
            position = ranks.index(rank) if rank in ranks else None
            made = torch_private.root_device_mesh("cpu", ranks, position)
            other = torch_private.constructed_root("cpu", ranks)
            assert (made, hash(made), repr(made)) == (other, hash(other), repr(other))
            ours, theirs = dict(vars(made)), dict(vars(other))
            assert torch.equal(ours.pop("_rank_map"), theirs.pop("_rank_map"))
            assert ours == theirs


def outside():
    mesh = axes.init_mesh("dp=2 tp=2", ranks=[0, 2, 4, 6])
    whole = mesh.device_mesh
    x = distribute_tensor(WHOLE, whole, [Shard(0), Replicate()])
    if mesh.coordinate is not None:
        return mesh["tp"].device_mesh.size(), x.to_local().shape[0]
    assert whole.get_coordinate() is None
    with pytest.raises(MeshError, match="isn't one of the ranks"):
        _ = mesh["tp"].device_mesh
    return 0, x.to_local().numel()


def test_a_rank_outside_has_a_device_mesh_without_coordinate(pool):
    assert pool.run(outside) == [(2, 4), (0, 0)] * 4


def calls_for_names(dp_shard):
    """The functions that are called for a group and a device mesh of each name, in a simulated world."""

    def named():
        mesh = axes.init_mesh(
            "pp dp_replicate dp_shard cp tp",
            "fsdp = dp_shard cp",
            "batch = dp_replicate dp_shard",
            "loss = batch cp",
            "(dp_shard cp tp) = efsdp ep",
            pp=16, dp_replicate=4, cp=4, tp=8, ep=32, dp_shard=dp_shard, device_type="cpu",
        )  # fmt: skip
        sizes = [mesh.axis(name).group.size() for name in mesh.names]
        assert sizes == [mesh[name].device_mesh.size() for name in mesh.names] == list(mesh.names.values())

    with axes.simulate(2048 * dp_shard, rank=777):
        return calls(named)


def at_two_scales():
    dist.destroy_process_group()
    calls_for_names(2)  # the first one imports modules
    return calls_for_names(2), calls_for_names(64)


def test_131072_ranks_take_as_many_calls_as_4096(world):
    """What they take in time is in the benchmarks, beside torch's."""
    few, many = world(at_two_scales, 1)[0]
    assert many < 1.1 * few


# ------------------------------------------------------------------------- torch's flattening


def groups_of_torch():
    return set(dist.distributed_c10d._world.pg_map)


def flattened_by_hand(ranks):
    """What a trainer does with a DeviceMesh: it flattens dims, and takes them by the new name."""
    mesh = axes.init_mesh("dp=2 cp=2 tp=2", "fsdp = dp cp", ranks=ranks)
    whole, fsdp = mesh.device_mesh, mesh["fsdp"].device_mesh
    before = groups_of_torch()
    flat = whole["dp", "cp"]._flatten("dp_cp")
    assert flat is whole["dp_cp"] is whole["dp", "cp"]._flatten()
    assert flat.mesh_dim_names == ("dp_cp",)
    assert flat.get_group() is whole.get_group("dp_cp") is mesh.axis("fsdp").group
    assert groups_of_torch() == before
    assert flat.mesh.tolist() == fsdp.mesh.tolist() == mesh["fsdp"].ranks
    assert flat.get_local_rank() == mesh.axis("fsdp").index
    assert whole["dp_cp", "tp"].mesh.tolist() == mesh["fsdp", "tp"].ranks
    assert whole["tp", "dp_cp"].mesh.tolist() == mesh["tp", "fsdp"].ranks
    assert whole["tp", "dp"] is mesh["tp", "dp"].device_mesh
    backwards = mesh["cp", "dp"].device_mesh._flatten("cp_dp")
    assert dist.get_process_group_ranks(backwards.get_group()) == mesh.rearrange("dp cp tp -> x=(cp dp) tp")["x"].ranks
    shard = distribute_tensor(WHOLE, flat, [Shard(0)])
    assert torch.equal(shard.to_local(), distribute_tensor(WHOLE, fsdp, [Shard(0)]).to_local())
    assert torch.equal(shard.full_tensor(), WHOLE)
    pending = DTensor.from_local(torch.ones(4), whole, [Partial(), Partial(), Replicate()])
    assert pending.full_tensor().tolist() == [4.0] * 4
    assert Mesh.from_device_mesh(flat).axis("dp_cp").group is mesh.axis("fsdp").group
    texts = []
    for dims, name in ((("cp", "tp"), "dp_cp"), (("cp", "tp"), "dp")):
        with pytest.raises(MeshError) as caught:
            whole[dims]._flatten(name)
        texts.append(str(caught.value))
    for names in ("nothing", ("dp", "nothing")):
        with pytest.raises(KeyError, match="nothing"):
            whole[names]
    with pytest.raises(KeyError, match="dp_cp"):
        whole["tp"]["dp_cp"]
    with pytest.raises(MeshError, match="share ranks"):
        whole["dp", "dp_cp"]
    # An axis of this name that is other ranks has the name for itself.
    other = axes.init_mesh("dp_cp=2 rest=4", ranks=ranks)
    assert other.device_mesh.get_group("dp_cp") is other.axis("dp_cp").group
    with pytest.raises(KeyError, match="dp_cp"):
        whole["dp_cp"]
    return texts


@pytest.mark.parametrize("ranks", [None, [5, 2, 7, 0, 3, 6, 1, 4]])
def test_flattened_dims_have_the_group_of_their_ranks_and_are_found_by_name(world, ranks):
    for taken, axis in world(flattened_by_hand, 8, ranks):
        assert taken.startswith("'dp_cp' is dp cp flattened, and can't be cp tp of ")
        assert axis.startswith("'dp' is an axis of Mesh('dp=2 cp=2 tp=2'")
        assert taken.endswith(": flatten under another name")


def flattened_outside():
    mesh = axes.init_mesh("dp=2 tp=2", ranks=[0, 2, 4, 6])
    flat = mesh.device_mesh._flatten("all")
    x = distribute_tensor(WHOLE, flat, [Shard(0)])
    return flat.get_coordinate(), x.to_local().numel()


def test_a_rank_outside_flattens_as_those_inside_do(pool):
    assert pool.run(flattened_outside) == [each for i in range(4) for each in (((i,), 32), (None, 0))]


def flattened_by_torch():
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = axes.init_mesh("dp=2 tp=2").rearrange("dp tp -> tp dp")
    _ = mesh.device_mesh
    before = groups_of_torch()
    flat = made._flatten("all")
    return flat.get_group().size(), len(groups_of_torch() - before), made["all"].mesh.tolist()


def test_a_mesh_that_torch_made_is_flattened_by_torch(world):
    assert world(flattened_by_torch, 4) == [(4, 0, [0, 1, 2, 3])] * 4


# ---------------------------------------------------------------------------------- training


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def blocks():
    torch.manual_seed(7)
    return nn.Sequential(Block(), Block())


def losses(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def train_with_fsdp_and_tp(ranks, replicate, tensor, order):
    """Losses of a model over `dp_replicate`, `fsdp` and `tp`, averaged over the data, and alone."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = axes.init_mesh(" ".join(order), ranks=ranks, dp_replicate=replicate, tp=tensor, sizes={"fsdp": -1})
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 4, 16, generator=generator) for _ in range(5)]
    alone = torch.stack(losses(blocks(), batches))

    model = blocks()
    for block in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"].device_mesh, plan)
        fully_shard(block, mesh=mesh["dp_replicate", "fsdp"].device_mesh)
    fully_shard(model, mesh=mesh["dp_replicate", "fsdp"].device_mesh)
    data = mesh.rearrange(f"{' '.join(mesh.axis_names)} -> data=(dp_replicate fsdp) tp").axis("data")
    mine = [batch.chunk(data.size)[data.index] for batch in batches]
    together = torch.stack(losses(model, mine))
    dist.all_reduce(together, group=data.group)
    parameters = {type(p).__name__: p.device_mesh.mesh_dim_names for p in model.parameters()}
    return (together / data.size - alone).abs().max().item(), parameters


@pytest.mark.parametrize(
    ("ranks", "replicate", "tensor", "order"),
    [
        (None, 2, 2, ["dp_replicate", "fsdp", "tp"]),
        ([5, 2, 7, 0, 3, 6, 1, 4], 2, 2, ["dp_replicate", "fsdp", "tp"]),
        (None, 2, 2, ["tp", "fsdp", "dp_replicate"]),
        (None, 1, 4, ["dp_replicate", "fsdp", "tp"]),
    ],
)
def test_fsdp_over_two_axes_with_tensor_parallel_parameters_trains_as_one_process(
    pool, ranks, replicate, tensor, order
):
    found = pool.run(train_with_fsdp_and_tp, ranks, replicate, tensor, order)
    assert max(difference for difference, _ in found) < 1e-5
    assert all(p == {"DTensor": ("dp_replicate", "fsdp", "tp")} for _, p in found)


def stored_over_axes_of_a_whole_mesh(ranks):
    """FSDP2 flattens the axes over which it is told to store: the gradient's difference, and groups of equal ranks."""
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = axes.init_mesh("dp_replicate=2 dp_shard=2 cp=2", ranks=ranks)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 16, generator=generator)
    torch.manual_seed(7)
    layer = nn.Linear(16, 32, bias=False)
    expected = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
    model = axes.shard_module(layer, {"weight": "out in"}, mesh)
    axes.shard_map(model, "b@(dp_replicate dp_shard cp) in -> b@(dp_replicate dp_shard cp) out", mesh)
    dims = DataParallelMeshDims(shard=("dp_shard", "cp"), replicate="dp_replicate")
    fully_shard(model, mesh=mesh.device_mesh, dp_mesh_dims=dims)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    model(axes.shard(x, "b@(dp_replicate dp_shard cp) in", mesh=mesh)).square().sum().backward()
    of_torch = sorted(tuple(dist.get_process_group_ranks(group)) for group in groups_of_torch())
    known = sorted(tuple(group.ranks) for group in axes.process_groups())
    assert of_torch == known
    return (axes.unshard(model.weight.grad) - expected).abs().max().item(), len(known) - len(set(known))


@pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="torch before 2.13 has no DataParallelMeshDims")
@pytest.mark.parametrize("ranks", [None, [5, 2, 7, 0, 3, 6, 1, 4]])
def test_fsdp_that_flattens_axes_of_a_whole_mesh_communicates_over_the_group_of_these(world, ranks):
    for difference, doubled in world(stored_over_axes_of_a_whole_mesh, 8, ranks):
        assert difference < 1e-4
        assert doubled == 0


class Experts(nn.Module):
    """A dense layer and two experts, of which a mesh splits the first and has one on each rank of the second axis."""

    def __init__(self, experts):
        super().__init__()
        self.dense, self.experts = nn.Linear(4, 4, bias=False), nn.Parameter(torch.randn(2, 4, 4))
        self.mesh = experts

    def forward(self, x):
        x = x @ self.dense.weight.T
        if self.mesh is None:
            return torch.einsum("bd,edf->bf", x, self.experts)
        return axes.psum(torch.einsum("bd,edf->bf", x, self.experts), "ep")


def trained_with_experts(told):
    """The gradients beside those of one device, and how many groups of parameters FSDP2 makes."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    mesh = axes.init_mesh("fsdp=2 tp=2", "(fsdp tp) = efsdp ep", ep=2, device_type="cpu")
    x = torch.linspace(-1, 1, 32).view(8, 4)
    torch.manual_seed(0)
    one = Experts(None)
    one(x).square().sum().backward()
    torch.manual_seed(0)
    model = Experts(mesh)
    axes.shard_module(model, {"dense.weight": "f d", "experts": "e@ep d f"}, {"experts": mesh["ep"], "*": mesh["tp"]})
    axes.shard_map(model, "b@fsdp d -> b@fsdp f", mesh)
    stored = FSDPMeshInfo(mesh=mesh["efsdp"].device_mesh, shard_mesh_dim=0)
    dense = FSDPMeshInfo(mesh=mesh["fsdp"].device_mesh, shard_mesh_dim=0)

    def placed(parameter):
        if parameter.ndim == 3:
            return ShardPlacementResult(Shard(1), stored)
        return ShardPlacementResult(Shard(0), dense) if told else None

    fully_shard(model, mesh=mesh["fsdp"].device_mesh, shard_placement_fn=placed)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    model(axes.shard(x, "b@fsdp d", mesh=mesh)).square().sum().backward()
    wrong = []
    for name, p in one.named_parameters():
        found = axes.unshard(model.get_parameter(name).grad)
        if not torch.allclose(found, p.grad, rtol=1e-4, atol=1e-5):
            wrong.append(f"{name} is {(found.norm() / p.grad.norm()).item():.4f} times")
    return wrong, [p.device_mesh.mesh_dim_names for p in model.parameters()]


@pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="torch before 2.13 has one mesh for all")
@pytest.mark.parametrize("told", [False, True])
def test_fsdp_with_a_mesh_of_the_same_ranks_for_experts_trains_as_one_process(world, told):
    assert world(trained_with_experts, 4, told) == [([], [("efsdp", "ep"), ("fsdp", "tp")])] * 4


# ---------------------------------------------------------------------------------- adoption


def adopt():
    from torch.distributed import distributed_c10d as c10d

    rank = dist.get_rank()
    dense = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    fsdp = dense["dp", "cp"]._flatten("fsdp")
    world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    sparse = world._unflatten(0, (2, 4), ("efsdp", "ep"))
    groups = [dense.get_group("tp"), sparse.get_group("ep")]
    one = DeviceMesh.from_group(groups[1], "cpu", mesh_dim_names=("line",))
    two = DeviceMesh.from_group(
        [dense.get_group("dp"), groups[0]],
        "cpu",
        mesh=torch.arange(8).view(2, 2, 2)[:, rank // 2 % 2],
        mesh_dim_names=("d", "t"),
    )
    concatenated = DeviceMesh._concatenate([fsdp, dense["tp"]])
    before = len(c10d._world.pg_map)
    cases = [dense, dense["tp"], dense["dp", "tp"], fsdp, world, sparse, sparse["ep"], one, two]
    for device_mesh in [*cases, concatenated]:
        mesh = Mesh.from_device_mesh(device_mesh)
        assert mesh is Mesh.from_device_mesh(device_mesh)
        assert mesh.device_mesh is device_mesh
        assert mesh.axis_names == device_mesh.mesh_dim_names
        assert tuple(mesh.shape.values()) == device_mesh.shape
        assert mesh.ranks == device_mesh.mesh.tolist()
        assert tuple(mesh.coordinate.values()) == device_mesh.get_coordinate()
        for i, name in enumerate(mesh.axis_names):
            # torch made efsdp a group of its own for the ranks of dp; axes knows the first.
            first = dense.get_group("dp") if name == "efsdp" else device_mesh.get_group(i)
            assert mesh.axis(name).group is first
    # Other meshes over the same ranks find the adopted groups, and combine with them.
    mesh = axes.init_mesh("dp cp=2 tp=2", "fsdp = dp cp", "(cp tp) = ep")
    assert mesh.axis("fsdp").group is fsdp.get_group()
    assert mesh.axis("ep").group is sparse.get_group("ep")
    combined = DeviceMesh._concatenate([mesh["fsdp"].device_mesh, dense["tp"]])
    assert combined.mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    return len(c10d._world.pg_map) - before


def test_a_device_mesh_is_adopted_with_its_groups_however_it_was_made(world):
    assert world(adopt, 8) == [0] * 8


def refuse():
    texts = []
    backwards = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    cases = [
        lambda: DeviceMesh("cpu", [3, 1, 2, 0], mesh_dim_names=("x",)),
        lambda: DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("x", "y")),
        lambda: DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("x", "y"))._flatten("xy"),
        lambda: DeviceMesh("cpu", [[0, 1], [2, 3]]),
        lambda: backwards.mesh,
    ]
    for case in cases:
        device_mesh = case()
        with pytest.raises(MeshError) as caught:
            Mesh.from_device_mesh(device_mesh)
        texts.append(str(caught.value))
    # Every line of this one ascends, although its ranks don't.
    fine = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("x", "y"))
    assert Mesh.from_device_mesh(fine).ranks == [[0, 2], [1, 3]]
    # Ours with the same ranks is fine, and torch's equal one is refused all the same.
    ours = axes.init_mesh("x", ranks=[3, 1, 2, 0])
    assert ours.device_mesh == cases[0]()
    assert Mesh.from_device_mesh(ours.device_mesh) == ours
    with pytest.raises(MeshError, match="sorts the ranks"):
        Mesh.from_device_mesh(cases[0]())
    assert Mesh.from_device_mesh(ours.device_mesh) == ours
    return texts


def test_a_device_mesh_whose_groups_have_another_order_is_refused_on_all_ranks(world):
    found = world(refuse, 4)
    for permuted, rows, flat, nameless, tensor in found:
        assert "dim 'x' of the DeviceMesh runs through ranks 3, 1, 2, 0 in this order" in permuted
        assert "its process group through ranks 0, 1, 2, 3" in permuted
        assert "ranks 3, 2 in this order" in rows
        assert "ranks 0, 2, 1, 3 in this order" in flat
        assert "axes.init_mesh(..., ranks=[...])" in flat
        assert "mesh_dim_names" in nameless
        assert "found Tensor" in tensor


def test_this_torch_has_the_fields_that_a_copy_of_a_device_mesh_knows():
    with axes.simulate(4):
        root = torch_private.root_device_mesh("cpu", range(4), 0)
        assert vars(root).keys() <= torch_private._DEVICE_MESH_FIELDS


def test_a_device_mesh_with_a_field_that_is_not_known_is_made_slowly_and_that_is_said_once():
    torch_private._say_once_that_it_is_slow.cache_clear()
    with axes.simulate(4), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        root = torch_private.root_device_mesh("cpu", range(4), 0)
        root.of_another_version = 1
        groups = [axes.init_mesh("dp=4", device_type="cpu").axis("dp").group]
        for _ in range(2):
            made = torch_private.device_mesh_over(root, [[(4, 1)]], ["dp"], (0,), groups, [""])
    assert made.mesh_dim_names == ("dp",)
    assert [str(each.message) for each in said if "of_another_version" in str(each.message)] == [
        f"the DeviceMesh of torch {torch.__version__} has of_another_version, which this version of axes doesn't "
        "know: meshes of many thousand ranks take tens of milliseconds each, where they took less than one"
    ]
    torch_private._say_once_that_it_is_slow.cache_clear()
