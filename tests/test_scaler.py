"""The gradient scaler: ranks skip a step together, and all else is as with torch's on whole tensors."""

from __future__ import annotations

import copy
import math
import pickle
import random

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import axes
import axes.nn
from axes import MeshError

PLACES = [
    # a spec of 5 x 6, and the mesh that it is on
    ("n@dp m@tp", ("dp", "tp")),
    ("n m@tp", ("tp",)),
    ("n@ep m", ("edp", "ep")),
    ("n@one m", ("one", "tp")),
    ("n@dp m", ("dp",)),
    ("n (three=3 k@tp)", ("dp", "tp")),
    ("n m", ("dp", "tp")),
    (None, ()),
]


def whole_job() -> axes.Mesh:
    return axes.init_mesh("pp=2 dp=2 tp=2 one=1", "(dp tp) = edp ep=4", device_type="cpu")


def cut(whole: torch.Tensor, number: int, mesh: axes.Mesh) -> torch.Tensor:
    spec, names = PLACES[number]
    return whole if spec is None else axes.shard(whole, spec, mesh=mesh[names])


def whole_of(x: torch.Tensor) -> torch.Tensor:
    return axes.unshard(x) if isinstance(x, DTensor) else x


def as_torch_does(seed: int) -> list[str]:
    """Thirty steps with overflows at random places, beside torch's scaler on whole tensors."""
    mesh, rng = whole_job(), random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    wholes = [nn.Parameter(torch.randn(5, 6, generator=generator)) for _ in PLACES]
    shards = [nn.Parameter(cut(whole.detach().clone(), i, mesh)) for i, whole in enumerate(wholes)]
    how = {"init_scale": 64.0, "growth_interval": 3, "growth_factor": 4.0}
    theirs = torch.amp.GradScaler("cpu", **how)
    with mesh:
        ours = axes.nn.GradScaler("cpu", **how)
    ordinary, local = torch.optim.SGD(wholes, lr=0.1), torch.optim.SGD(shards, lr=0.1)
    wrong, skipped = [], 0
    for step in range(30):
        overflow = rng.choice([None, None, *range(len(PLACES))])
        assert float(ours.scale(torch.ones(()))) == float(theirs.scale(torch.ones(())))
        for i, (whole, shard) in enumerate(zip(wholes, shards, strict=True)):
            gradient = torch.randn(5, 6, generator=generator) * ours.get_scale()
            if i == overflow:
                gradient[rng.randrange(5), rng.randrange(6)] = rng.choice([math.nan, math.inf])
            missing = i != overflow and rng.random() < 0.2
            whole.grad = None if missing else gradient.clone()
            shard.grad = None if missing else cut(gradient, i, mesh)
        if rng.random() < 0.5:
            for scaler, optimizer in ((ours, local), (theirs, ordinary)):
                scaler.unscale_(optimizer)
        for scaler, optimizer in ((ours, local), (theirs, ordinary)):
            scaler.step(optimizer)
            scaler.update()
        skipped += overflow is not None
        same = all(torch.equal(whole, whole_of(shard)) for whole, shard in zip(wholes, shards, strict=True))
        if not same or ours.state_dict() != theirs.state_dict():
            wrong.append(f"step {step}, overflow {overflow}: {ours.state_dict()} {theirs.state_dict()}")
    assert skipped > 10
    return wrong


@pytest.mark.parametrize("seed", range(3))
def test_it_steps_and_skips_as_torchs_does_on_whole_tensors(pool, seed):
    assert pool.run(as_torch_does, seed) == [[]] * 8


def local_overflow(where: int | None) -> tuple[float, float]:
    """One rank's expert overflows, or one stage's only parameter; a stage that never scales a loss."""
    mesh = whole_job()
    rank, stage = mesh.rank, mesh.axis("pp").index
    with mesh:
        scaler = axes.nn.GradScaler("cpu", init_scale=8.0)
    expert = nn.Parameter(axes.shard(torch.zeros(8), "n@ep", mesh=mesh["edp", "ep"]))
    dense = nn.Parameter(axes.shard(torch.zeros(8), "n@dp", mesh=mesh["dp", "tp"]))
    optimizer = torch.optim.SGD([dense, expert] if stage else [dense], lr=1.0)
    if stage == 1:
        scaler.scale(torch.ones(()))
    for parameter in (dense, expert):
        parameter.grad = torch.full_like(parameter, 8.0)
    if rank == where:
        (expert if stage else dense).grad.to_local()[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), float(dense.to_local()[0])


def test_an_overflow_on_one_rank_alone_is_known_to_all_of_them(pool):
    for where, scale, value in [(0, 4.0, 0.0), (5, 4.0, 0.0), (7, 4.0, 0.0), (None, 8.0, -1.0)]:
        assert pool.run(local_overflow, where) == [(scale, value)] * 8


def pending() -> tuple[list[float], list[float]]:
    mesh = axes.init_mesh("dp=2 tp=4", device_type="cpu")
    weight = nn.Parameter(axes.shard(torch.zeros(4), "n@tp", mesh=mesh))
    found = []
    for value in (3e38, 4.0):  # of the first the summands are finite, and their sum isn't
        scaler = axes.nn.GradScaler("cpu", init_scale=2.0, mesh=mesh)
        weight.grad = axes.from_local(torch.full((1,), value), "n@tp | sum@dp", mesh=mesh)
        optimizer = axes.nn.local_optimizer(torch.optim.SGD, [weight], lr=1.0)
        scaler.unscale_(optimizer)
        norm = axes.nn.clip_grad_norm_([weight], math.inf)
        scaler.step(optimizer)
        scaler.update()
        found += [scaler.get_scale(), float(norm)]
    return found, axes.unshard(weight.detach()).tolist()


def test_a_pending_gradient_is_summed_before_it_is_looked_at(pool):
    assert pool.run(pending) == [([1.0, math.inf, 2.0, 8.0], [-4.0] * 4)] * 8


def unscaled_after_it_is_saved() -> list[str]:
    """What backward says of gradients that were unscaled since a graph saved them: a DTensor's, and a plain tensor's."""
    mesh, told = axes.init_mesh("dp=2 tp=4", device_type="cpu"), []
    for value in (axes.shard(torch.ones(8), "n@tp", mesh=mesh), torch.ones(8)):
        weight = nn.Parameter(value)
        (gradient,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
        penalty = (gradient * gradient).sum()
        weight.grad = gradient
        axes.nn.GradScaler("cpu", init_scale=2.0, mesh=mesh).unscale_(torch.optim.SGD([weight], lr=1.0))
        with pytest.raises(RuntimeError) as caught:
            penalty.backward()
        told.append(str(caught.value))
    return told


def test_backward_refuses_a_gradient_that_was_unscaled_since_it_was_saved(pool):
    for told in pool.run(unscaled_after_it_is_saved):
        assert all("modified by an inplace operation" in text for text in told), told


def fused() -> list[object]:
    mesh = axes.init_mesh("dp=2 tp=4", device_type="cpu")
    found: list[object] = []
    for overflow in (False, True):
        weight = nn.Parameter(axes.shard(torch.zeros(8), "n@tp", mesh=mesh))
        scaler = axes.nn.GradScaler("cpu", init_scale=2.0, mesh=mesh)
        optimizer = axes.nn.local_optimizer(torch.optim.SGD, [weight], lr=1.0, fused=True)
        weight.grad = axes.shard(torch.full((8,), 4.0), "n@tp", mesh=mesh)
        if overflow and mesh.rank == 6:
            weight.grad.to_local()[1] = math.nan
        scaler.step(optimizer)
        scaler.update()
        found += [scaler.get_scale(), axes.unshard(weight.detach()).tolist()]
    return found


def test_a_fused_step_unscales_and_skips_on_all_ranks(pool):
    assert pool.run(fused) == [[2.0, [-2.0] * 8, 1.0, [0.0] * 8]] * 8


def kept() -> None:
    mesh = axes.init_mesh("dp=8", device_type="cpu")
    with mesh:
        scaler = axes.nn.GradScaler("cpu", init_scale=2.0)
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        weight = nn.Parameter(axes.shard(torch.zeros(8), "n@dp", mesh=mesh))
        weight.grad = torch.ones_like(weight)
        if mesh.rank == 3:
            weight.grad.to_local()[0] = math.inf
        other.step(torch.optim.SGD([weight]))
        other.update()
        assert other.get_scale() == 1.0
    plain = torch.amp.GradScaler("cpu")
    plain.load_state_dict(scaler.state_dict())
    assert plain.get_scale() == 2.0
    half = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match="keep the parameters in float32"):
        scaler.unscale_(torch.optim.SGD([half]))


def test_a_copy_agrees_with_the_same_ranks_and_torchs_own_loads_its_state(pool):
    pool.run(kept)


def test_a_scaler_needs_a_mesh_unless_it_is_switched_off():
    with pytest.raises(MeshError, match=r"axes.nn.GradScaler needs a mesh"):
        axes.nn.GradScaler("cpu")
    scaler = axes.nn.GradScaler("cpu", enabled=False)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    scaler.step(torch.optim.SGD([weight], lr=1.0))
    scaler.update()
    assert weight.tolist() == [0.0, 0.0]


def test_sparse_gradients_are_unscaled_too():
    with axes.simulate(1), axes.init_mesh("dp=1", device_type="cpu"):
        scaler = axes.nn.GradScaler("cpu", init_scale=4.0)
        table = nn.Embedding(4, 2, sparse=True)
        scaler.scale(table(torch.tensor([1, 1, 2])).sum()).backward()
        scaler.unscale_(torch.optim.SparseAdam(table.parameters()))
        assert table.weight.grad.to_dense().sum(1).tolist() == [0.0, 4.0, 2.0, 0.0]
