"""Regions under `fully_shard` with activation checkpointing: gradients are those of one device, in every combination.

A case is: which modules are FSDP2 units, what is checkpointed and how, how FSDP2 is told of the mesh, which axes the
mesh has, what is a region, and whether layers are compiled. `make test-full` runs all of them.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

import axes


class Case(NamedTuple):
    """A combination."""

    unit: str
    what: str
    reentrant: bool
    told: str
    mesh: str
    region: str
    compiled: bool


UNITS = "none", "root", "layers", "list"
CHECKPOINTS = ("none", False), *itertools.product(("around", "inside", "wrapped", "wrapped last"), (False, True))
MESHES = "r=1 fs=2 tp=2", "r=2 fs=2 tp=1"
CASES = [
    Case(unit, *each, told, mesh, region, compiled)
    for unit, each, told, mesh, (region, compiled) in itertools.product(
        UNITS, CHECKPOINTS, ("dims", "sub-mesh"), MESHES, (("model", False), ("layers", False), ("model", True))
    )
    if unit != "none" or told == "dims"
]
SAMPLE = [
    Case("root", "none", False, "dims", MESHES[0], "layers", False),
    Case("root", "around", False, "dims", MESHES[0], "model", False),
    Case("root", "inside", True, "dims", MESHES[1], "model", False),
    Case("root", "wrapped", True, "sub-mesh", MESHES[1], "layers", False),
    Case("layers", "wrapped", False, "dims", MESHES[1], "model", False),
    Case("layers", "wrapped last", False, "dims", MESHES[0], "model", False),
    Case("layers", "inside", False, "sub-mesh", MESHES[0], "model", False),
    Case("list", "wrapped last", True, "dims", MESHES[1], "layers", False),
    Case("none", "around", True, "dims", MESHES[0], "model", False),
    Case("layers", "wrapped", False, "dims", MESHES[0], "model", True),
]
HAS_DIMS = hasattr(fsdp, "DataParallelMeshDims")


class Layer(nn.Module):
    """A block; on a mesh its hidden dim is split over tp."""

    def __init__(self, case: Case | None):
        super().__init__()
        self.norm, self.up = nn.RMSNorm(4), nn.Linear(4, 8, bias=False)
        self.act, self.down = nn.Tanh(), nn.Linear(8, 4, bias=False)
        self.case = case

    def forward(self, x):
        y = self.norm(x)
        if self.case is not None and self.case.what == "inside":
            y = checkpoint(self.up, y, use_reentrant=self.case.reentrant)
            y = checkpoint(lambda y: self.down(self.act(y)), y, use_reentrant=self.case.reentrant)
        else:
            y = self.down(self.act(self.up(y)))
        return x + (y if self.case is None else axes.psum(y, "tp"))


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self, case: Case | None):
        super().__init__()
        self.layers = nn.ModuleList([Layer(case), Layer(case)])
        self.head = nn.Linear(4, 6, bias=False)
        self.case = case

    def forward(self, x):
        for layer in self.layers:
            around = self.case is not None and self.case.what == "around"
            x = checkpoint(layer, x, use_reentrant=self.case.reentrant) if around else layer(x)
        return self.head(x)


SPECS = {"*.up.weight": "f@tp d", "*.down.weight": "d f@tp", "*": "..."}


def made(case: Case, mesh: axes.Mesh) -> nn.Module:
    """The model of a case: sharded, checkpointed, a region, and in units, in this order."""
    model = Model(case).double()
    axes.shard_module(model, SPECS, mesh["tp"] if case.told == "sub-mesh" else mesh)
    if case.what == "wrapped":
        wrap(model, case)
    if case.region == "model":
        axes.shard_map(model, "b@(r fs) d -> b@(r fs) v", mesh)
    else:
        for layer in model.layers:
            axes.shard_map(layer, "b@(r fs) d -> b@(r fs) d", mesh)
        axes.shard_map(model.head, "b@(r fs) d -> b@(r fs) v", mesh)
    if case.what == "wrapped last":
        wrap(model, case)
    for layer in model.layers if case.compiled else ():
        layer.compile(backend="aot_eager")
    copied = mesh.shape["r"] > 1
    options = {"mesh": mesh["r", "fs"].device_mesh if copied else mesh["fs"].device_mesh}
    if case.told == "dims" and case.unit != "none":
        dims = fsdp.DataParallelMeshDims(shard="fs", replicate="r" if copied else None)
        options = {"mesh": mesh.device_mesh, "dp_mesh_dims": dims}
    units = {"none": [], "root": [model], "layers": [*model.layers, model], "list": [list(model.layers), model]}
    for unit in units[case.unit]:
        fully_shard(unit, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def wrap(model: nn.Module, case: Case) -> None:
    """Put a wrapper of torch's around each layer."""
    how = CheckpointImpl.REENTRANT if case.reentrant else CheckpointImpl.NO_REENTRANT
    for name, layer in model.layers.named_children():
        setattr(model.layers, name, checkpoint_wrapper(layer, how))


def wrong_with(case: Case) -> list[str]:
    """What differs from one device: after a step, and after two that add up, reduced at once or at the last one."""
    mesh = axes.init_mesh(case.mesh, device_type="cpu")
    torch.manual_seed(7)
    one = Model(None).double()
    torch.manual_seed(7)
    model = made(case, mesh)
    x = torch.linspace(-1, 2, 32, dtype=torch.float64).view(8, 4).sin()
    weight = torch.linspace(-1, 3, 48, dtype=torch.float64).view(8, 6)
    (one(x) * weight).sum().backward()
    wrong = []
    for accumulated in ("once", "twice", "twice, reduced at the end"):
        model.zero_grad()
        for last in (True,) if accumulated == "once" else (False, True):
            if accumulated.endswith("end") and isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            entering = axes.shard(x, "b@(r fs) d", mesh=mesh).requires_grad_()
            y = model(entering)
            (y * axes.shard(weight, "b@(r fs) v", mesh=mesh)).sum().backward()
        times = 1 if accumulated == "once" else 2
        found = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
        for name, p in one.named_parameters():
            g = axes.unshard(found[name].grad)
            if not torch.allclose(g, times * p.grad, rtol=1e-10, atol=1e-12):
                wrong.append(f"{accumulated}: {name} is {(g.norm() / p.grad.norm() / times).item():.4f} times")
    return wrong


def all_wrong(cases: list[Case]) -> dict[Case, list[str]]:
    """What is wrong in these cases."""
    found = {}
    for case in cases:
        if case.unit != "none" and case.told == "dims" and not HAS_DIMS:
            continue
        torch.compiler.reset()
        try:
            wrong = wrong_with(case)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            found[case] = wrong
    return found


def test_gradients_under_fully_shard_and_checkpoints_are_those_of_one_device(warm):
    assert warm(all_wrong, 4, SAMPLE, timeout=120) == [{}] * 4


@pytest.mark.full
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("what", CHECKPOINTS)
@pytest.mark.parametrize("unit", UNITS)
def test_so_they_are_in_every_combination(warm, unit, what, compiled):
    cases = [case for case in CASES if (case.unit, case[1:3], case.compiled) == (unit, what, compiled)]
    assert warm(all_wrong, 4, cases, timeout=600) == [{}] * 4


class Product(nn.Module):
    """A product of DTensors, outside of a region, by an operation of axes or of torch."""

    def __init__(self, how: str):
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)), how

    def forward(self, x):
        if self.how == "einsum":
            return axes.einsum(x, self.weight, "b@fs d, f d -> b@fs f")
        if self.how == "region":
            return axes.shard_map(F.linear, "b@fs d, f d -> b@fs f")(x, self.weight)
        if self.how == "reshard":
            return F.linear(x, axes.reshard(self.weight, "f d"))
        if self.how == "to_local":
            local = axes.to_local(x) @ axes.to_local(self.weight, grad="summed").T
            return axes.from_local(local, "b@fs f", grad="summed")
        return F.linear(x, self.weight)


def products(compiled: bool) -> list[str]:
    """What differs from one device where `fully_shard` reduces over axes of a parameter's own mesh."""
    wrong = []
    x = torch.linspace(-1, 2, 32, dtype=torch.float64).view(8, 4)
    one = Product("torch")
    one(x).sin().sum().backward()
    with axes.init_mesh("fs=2 cp=2", device_type="cpu") as mesh:
        for how in ("torch", "einsum", "region", "reshard", "to_local"):
            model = axes.shard_module(Product(how), {"*": "..."}, mesh)
            if compiled:
                torch.compiler.reset()
                model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
            fully_shard(model, mesh=mesh.device_mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="fs"))
            model.set_gradient_divide_factor(1.0)
            model.set_force_sum_reduction_for_comms(True)
            model(axes.shard(x, "b@fs d")).sin().sum().backward()
            found = axes.unshard(model.weight.grad)
            if not torch.allclose(found, one.weight.grad):
                wrong.append(f"{how}: {(found.norm() / one.weight.grad.norm()).item():.4f} times")
    return wrong


@pytest.mark.skipif(not HAS_DIMS, reason="torch before 2.13 has no DataParallelMeshDims")
@pytest.mark.parametrize("compiled", [False, True])
def test_operations_of_axes_leave_gradients_to_fully_shard(warm, compiled):
    assert warm(products, 4, compiled, timeout=120) == [[]] * 4


class Squares(nn.Module):
    """A layer, which a checkpoint may run."""

    def __init__(self, reentrant: bool | None):
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4, bias=False), reentrant

    def forward(self, x):
        y = self.layer(x) if self.reentrant is None else checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return y.square()


def summed(lies: str, reduced: str, region: str, reentrant: bool | None) -> str:
    """The gradient of a parameter on the mesh `lies` that `fully_shard` reduces over `reduced`: times that of one."""
    mesh = axes.init_mesh("fs=2 cp=2 tp=1", "dp = fs cp", "all = fs cp tp", device_type="cpu")
    torch.manual_seed(0)
    model, x = Squares(None).double(), torch.linspace(-1, 1, 64, dtype=torch.float64).view(4, 4, 4)
    (expected,) = torch.autograd.grad(model(x).sum(), model.layer.weight)
    model.reentrant = reentrant
    if lies:
        axes.shard_module(model, {"*": "..."}, mesh[tuple(lies.split())])
    axes.shard_map(model, region, mesh)
    if reduced:
        fully_shard(model, mesh=mesh[reduced].device_mesh)
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
    x = axes.shard(x, region.split(" ->")[0].replace(" | same@cp", ""), mesh=mesh).requires_grad_()
    try:
        y = model(x)
        axes.unshard(y).sum().backward()
    except axes.ShardingError as error:
        return str(error)
    found = model.layer.weight.grad
    return f"{((axes.unshard(found) * expected).sum() / expected.square().sum()).item():.4f}"


SPLIT, SAME = "b@fs s@cp d -> b@fs s@cp d", "b@fs s d | same@cp -> b@fs s d | same@cp"
RIGHT = [("", "dp", SPLIT), ("cp tp", "fs", SPLIT), ("fs cp", "", SPLIT), ("", "fs", SAME)]
REFUSED = {
    ("", "fs", SPLIT): "is a plain tensor, and fully_shard adds up over fs\n",
    ("tp", "fs", SPLIT): "lies on tp, and fully_shard adds up over fs\n",
    ("fs", "", SPLIT): "lies on fs\n",
}
ALONE = "", "", SPLIT


def all_summed(reentrant: bool | None) -> list[str]:
    return [summed(*case, reentrant) for case in (*RIGHT, *REFUSED, ALONE)]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_gradient_that_nobody_adds_up_along_an_axis_is_refused(world, reentrant):
    for found in world(all_summed, 4, reentrant):
        assert found[:4] == ["1.0000"] * 4
        for text, says in zip(found[4:7], REFUSED.values(), strict=True):
            start = "each rank of cp has a summand of the gradient of 'layer.weight', and nobody adds them up: it "
            assert text.startswith(f"{start}{says}put it on a mesh that has these axes, axes.shard_module(module, ")
        # The graph doesn't show what a reentrant checkpoint uses: its second run finds it.
        assert ("each rank of fs cp has a summand" if reentrant else "isn't an argument: layer.weight") in found[7]
