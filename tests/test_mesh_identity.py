"""Meshes that differ in the options of their groups alone: each communicates over its own groups."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import axes
from axes import GroupOptions, MeshError
from axes.runtime import torch_private

OPTIONS = {"dp": GroupOptions(timeout=44), "tp": GroupOptions(timeout=44)}
WHOLE = torch.arange(64.0).view(8, 8)


def both_meshes(declaration="dp=2 tp=2", *equations):
    meshes = axes.init_mesh(declaration, *equations), axes.init_mesh(declaration, *equations, options=OPTIONS)
    for mesh in meshes:
        mesh.create_groups()
    return meshes


def counts():
    """By group, whether it has options, and how many collectives it has had. (gloo doesn't count gathers.)"""
    found = {info.group_name: info for info in axes.process_groups()}
    groups = {name: torch.distributed.distributed_c10d._resolve_process_group(name) for name in found}
    return {
        name: (info.options.timeout is not None, groups[name]._get_sequence_number_for_group())
        for name, info in found.items()
    }


def used(act, mesh):
    """Which groups an action uses: those with options, and those without."""
    before = counts()
    act(mesh)
    after = counts()
    return {own for name, (own, count) in after.items() if count > before.get(name, (own, 0))[1]}


def pending(mesh):
    return DTensor.from_local(torch.ones(8, 8), mesh.device_mesh, [Partial(), Partial()])


def summands(mesh):
    return axes.from_local(torch.ones(8, 8), "a b | sum@(dp tp)", mesh=mesh)


def backward(mesh):
    w = axes.shard(WHOLE, "i@tp j", mesh=mesh).requires_grad_()
    x = axes.shard(WHOLE, "b@dp i", mesh=mesh)
    y = axes.einsum(x, axes.reshard(w, "i j@tp"), "b i, i j@tp -> b j@tp")
    y.square().sum().full_tensor().backward()
    w.grad.full_tensor()


def region(mesh):
    fn = axes.shard_map(lambda x: axes.psum(x, "tp") + axes.all_gather(x, "dp").sum(), "a b@tp -> a b@tp", mesh=mesh)
    fn(axes.shard(WHOLE, "a b@tp", mesh=mesh))


def trained(mesh):
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(axes.shard(WHOLE / 64, "o@tp i", mesh=mesh["tp"]))
    fully_shard(model, mesh=mesh["dp"].device_mesh)
    x = axes.shard(WHOLE, "b i", mesh=mesh["tp"])
    model(x).square().sum().full_tensor().backward()
    model.weight.grad.full_tensor()


ACTIONS = {
    "reshard": lambda mesh: axes.reshard(axes.shard(WHOLE, "a@tp b", mesh=mesh), "a b@tp"),
    "reshard over both": lambda mesh: axes.reshard(summands(mesh), "a b |"),
    "async": lambda mesh: axes.reshard(axes.shard(WHOLE, "a@tp b", mesh=mesh), "a b@tp", async_op=True) + 1,
    "a plain tensor": lambda mesh: axes.reshard(torch.ones(2, 8), "a@dp b -> a b", mesh=mesh),
    "einsum": lambda mesh: axes.einsum(
        axes.shard(WHOLE, "a k@tp", mesh=mesh), axes.shard(WHOLE, "k@tp b", mesh=mesh), "a k@tp, k@tp b -> a b@tp"
    ),
    "reduce": lambda mesh: axes.reduce(axes.shard(WHOLE, "a@tp b", mesh=mesh), "a@tp b -> b", "sum"),
    "softmax": lambda mesh: axes.softmax(axes.shard(WHOLE, "a b@tp", mesh=mesh), "a b@tp", over="b"),
    "a region": region,
    "psum": lambda mesh: axes.psum(torch.ones(3), ("dp", "tp"), mesh=mesh),
    "unshard": lambda mesh: axes.unshard(axes.shard(WHOLE, "a@dp b@tp", mesh=mesh)),
    "shard": lambda mesh: axes.shard(WHOLE, "a@dp b", mesh=mesh["dp"], source_rank=mesh.axis("dp").ranks[1]),
    "rand": lambda mesh: axes.rand("a@tp", a=8, mesh=mesh["tp"]),
    "full_tensor": lambda mesh: axes.shard(WHOLE, "a@dp b@tp", mesh=mesh).full_tensor(),
    "redistribute": lambda mesh: pending(mesh).redistribute(placements=[Shard(0), Replicate()]),
    "torch's operations": lambda mesh: torch.relu(axes.shard(WHOLE, "a@dp b@tp", mesh=mesh)).sum(0).cos().full_tensor(),
    "torch's distribute_tensor": lambda mesh: distribute_tensor(WHOLE, mesh.device_mesh, [Shard(0), Shard(1)]),
    "a slice of torch's": lambda mesh: axes.unshard(distribute_tensor(WHOLE, mesh.device_mesh["tp"], [Shard(0)])),
    "backward": backward,
    "fsdp": trained,
}


def every_action_on_both():
    plain, own = both_meshes()
    wrong = []
    for name, act in ACTIONS.items():
        for mesh, expected in ((plain, {False}), (own, {True}), (plain, {False}), (own, {True})):
            if (found := used(act, mesh)) != expected:
                wrong.append((name, mesh is own, found))
    return wrong


def test_every_way_to_communicate_uses_the_groups_of_its_own_mesh(world):
    assert world(every_action_on_both, 4) == [[]] * 4


def what_is_equal():
    plain, own = both_meshes("dp=2 tp=2", "all = dp tp")
    again = axes.init_mesh("dp=2 tp=2", "more = tp", options=OPTIONS)
    only_tp = axes.init_mesh("dp=2 tp=2", options={"tp": OPTIONS["tp"]})
    one, two, three = (mesh.device_mesh for mesh in (plain, own, again))
    concatenated = [DeviceMesh._concatenate([dm["dp"], dm["tp"]]) for dm in (one, two)]
    x, y = (axes.shard(WHOLE, "a@dp b@tp", mesh=mesh) for mesh in (plain, own))
    with pytest.raises(Exception):  # noqa: B017, PT011  torch's own words
        x + y
    moved = axes.reshard(x, "a@dp b@tp", mesh=own)
    checks = {
        "others differ": one != two and hash(one) != hash(two),
        "others differ in caches on disk": not hasattr(one, "_stable_hash")  # since 2.13
        or one._stable_hash() != two._stable_hash(),
        "equal groups are one object": two is three,
        "of a sub-mesh too": only_tp["tp"].device_mesh == own["tp"].device_mesh,
        "where only some have options": only_tp.device_mesh not in (one, two)
        and only_tp["dp"].device_mesh == one["dp"],
        "slices": one["tp"] != two["tp"] and two["tp"] == own["tp"].device_mesh == three["tp"],
        "slices without options": one["tp"] == plain["tp"].device_mesh,
        "concatenated": concatenated == [one, two] and concatenated[0] != concatenated[1],
        "copies": copy.copy(two) == two and pickle.loads(pickle.dumps(two)) == two != pickle.loads(pickle.dumps(one)),
        "specs": x._spec != y._spec,
        "adopted": axes.Mesh.from_device_mesh(two["tp"]).axis("tp").group is own.axis("tp").group,
        "adopted without": axes.Mesh.from_device_mesh(one["tp"]).axis("tp").group is plain.axis("tp").group,
        "flattened": one["dp", "tp"]._flatten("flat") is two["dp", "tp"]._flatten("flat"),
        "moved": moved.device_mesh is two and axes.reshard(moved, "a@dp b@tp", mesh=plain).device_mesh is one,
        "stays": axes.reshard(x, "a b@tp").device_mesh is one and axes.reshard(y, "a b@tp").device_mesh is two,
    }
    with own:
        checks["the ambient mesh gives names alone"] = axes.reshard(x, "a b@tp").device_mesh is one
    return [name for name, holds in checks.items() if not holds]


def test_device_meshes_are_equal_where_their_groups_are(world):
    assert world(what_is_equal, 4) == [[]] * 4


def torch_that_finds_them_equal():
    del DeviceMesh._thread_id
    torch_private.tell_groups_apart = lambda: None
    plain, own = both_meshes()
    first = plain.device_mesh
    with pytest.raises(MeshError, match=r"torch can't tell the DeviceMesh of .* Give the axes other names"):
        _ = own.device_mesh
    named = axes.init_mesh("a=2 b=2", options={"a": OPTIONS["dp"]})
    return plain.device_mesh is first, named.device_mesh == first


def test_where_torch_cannot_tell_them_apart_the_second_is_refused(world):
    axes.Mesh("dp=2")
    assert world(with_the_property_first, 4) == [(True, False)] * 4


def with_the_property_first():
    torch_private.tell_groups_apart()
    return torch_that_finds_them_equal()


def adopted_first():
    """A root that torch made, on which meshes with options are built then."""
    made = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    adopted = axes.Mesh.from_device_mesh(made)
    plain, own = both_meshes()
    x, y = (axes.shard(WHOLE, "a@dp b@tp", mesh=mesh) for mesh in (adopted, own))
    moved = used(lambda mesh: axes.reshard(y, "a@tp b@dp"), own)
    return own.device_mesh != made, plain.device_mesh == made, moved, torch.equal(axes.unshard(x), axes.unshard(y))


def test_a_root_that_torch_made_serves_meshes_with_options(world):
    assert world(adopted_first, 4) == [(True, True, {True}, True)] * 4


def outside_the_mesh():
    meshes = [axes.init_mesh("x=2", ranks=[0, 1], options=o) for o in (None, {"x": GroupOptions(timeout=9)})]
    one, two = (mesh.device_mesh for mesh in meshes)
    return one != two, axes.Mesh.from_device_mesh(one) == meshes[0], axes.Mesh.from_device_mesh(two) == meshes[1]


def test_ranks_outside_find_the_same_meshes_different(world):
    assert world(outside_the_mesh, 4) == [(True, True, True)] * 4


def compiled_on_both():
    @torch.compile(backend="eager")
    def step(x):
        return axes.reshard(x, "a b@tp") * 2

    plain, own = both_meshes()
    wrong = []
    for mesh, expected in ((plain, {False}), (own, {True}), (plain, {False}), (own, {True})):
        found = used(lambda m: step(axes.shard(WHOLE, "a@tp b", mesh=m)), mesh)
        y = step(axes.shard(WHOLE, "a@tp b", mesh=mesh))
        if found != expected or y.device_mesh is not mesh.device_mesh or not torch.equal(axes.unshard(y), WHOLE * 2):
            wrong.append((mesh is own, found, y.device_mesh is mesh.device_mesh))
    return wrong


def test_a_compiled_function_uses_the_groups_of_the_mesh_that_it_is_given(world):
    assert world(compiled_on_both, 4) == [[]] * 4


def two_threads():
    meshes, wrong = both_meshes(), []
    for mesh in meshes:  # groups are made in one order on all ranks
        ACTIONS["unshard"](mesh), ACTIONS["reshard over both"](mesh)

    def work(mesh, seed):
        generator = torch.Generator().manual_seed(seed)
        for step in range(60):
            whole = torch.randn(8, 8, generator=generator)
            x = axes.shard(whole, "a@dp b@tp", mesh=mesh).requires_grad_()
            y = axes.reshard(torch.tanh(x), "a@tp b@dp")
            z = axes.unshard(axes.reshard(y, "a@(dp tp) b"))
            expected = torch.tanh(whole)
            total = (y * y).sum().full_tensor()
            total.backward()
            gradient = 2 * expected * (1 - expected**2)
            pairs = [(z, expected), (total, (expected**2).sum()), (x.grad.full_tensor(), gradient)]
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in pairs):
                wrong.append((seed, step))

    threads = [threading.Thread(target=work, args=(mesh, seed)) for seed, mesh in enumerate(meshes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    return wrong, any(thread.is_alive() for thread in threads)


def test_two_threads_with_a_mesh_each_never_meet(world):
    assert world(two_threads, 4) == [([], False)] * 4


def a_product_of_axes():
    patient, mixed = GroupOptions(timeout=44), GroupOptions(timeout=55)
    mesh = axes.init_mesh("dp=2 tp=2", "named = dp tp", options={"dp": patient, "tp": patient})
    unnamed = axes.init_mesh("dp=2 tp=2", options={"dp": patient, "tp": patient})
    other = axes.init_mesh("dp=2 tp=2", options={"dp": patient, "tp": mixed})
    parts = axes.init_mesh("dp=4", options={"dp": patient}).rearrange("(a b) -> a b", a=2)
    found = []
    for each in (mesh, unnamed, other):
        axes.psum(torch.ones(1), ("dp", "tp"), mesh=each)
        group = torch.distributed.group.WORLD if each is mesh else None
        options = {i.options.timeout.seconds for i in axes.process_groups() if len(i.ranks) == 4 and i.options.timeout}
        found.append((group is None, sorted(options)))
    return found, parts["a"].axis("a").group is axes.init_mesh("x=2 y=2").axis("x").group


def test_a_product_has_the_options_that_its_axes_share_unless_it_has_a_name(world):
    found = world(a_product_of_axes, 4)
    assert found == [([(False, []), (True, [44]), (True, [44])], True)] * 4


def test_this_torch_compares_what_tells_groups_apart():
    with axes.simulate(4):
        plain, own = both_meshes()
        assert plain.device_mesh != own.device_mesh
        assert isinstance(vars(DeviceMesh)["_thread_id"], property)
        assert dist.is_initialized()
