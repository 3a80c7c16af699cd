"""Dropout that drops the same elements on every mesh: against one device, in both views, forward and backward."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import axes
from axes import DesyncError
from tests.common import case

WHOLE = torch.linspace(1, 2, 6 * 8 * 12).view(6, 8, 12)


# ------------------------------------------------------------------------------------- models


class Block(nn.Module):
    """Two dropouts around a product; `where` says how its shards lie in a region."""

    def __init__(self, where=None):
        super().__init__()
        self.first, self.second = axes.nn.Dropout(0.3, where), axes.nn.Dropout(0.5, where)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 144).view(12, 12))

    def forward(self, x):
        return self.second(torch.tanh(axes.einsum(self.first(x), self.weight, "b s d, d e -> b s e")))


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint(self[0], x, use_reentrant=False)


def trained(model, x):
    """Two steps of two passes each; all values and gradients, whole."""
    found = []
    torch.manual_seed(5)
    for step in range(4):
        y = model(x)
        y.backward(y.detach())
        found += [y, *(p.grad for p in model.parameters() if step % 2)]
    return [axes.unshard(each.detach()) if hasattr(each, "placements") else each.detach() for each in found]


def models():
    expected = trained(nn.Sequential(Block(), Block()), WHOLE)
    assert not torch.equal(expected[0], expected[1]), "two calls drop the same"
    with axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        for recompute, where in itertools.product((False, True), (None, "b@dp s@tp d")):
            kind = Recomputed if recompute else nn.Sequential
            model = axes.shard_module(nn.Sequential(kind(Block(where)), kind(Block(where))), {"*": "..."})
            model = axes.shard_map(model, f"{where} -> {where}") if where else model
            found = trained(model, axes.shard(WHOLE, "b@dp s@tp d"))
            for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
                with case(f"{where}, recompute={recompute}, {number}"):
                    assert torch.equal(mine == 0, theirs == 0)
                    assert torch.allclose(mine, theirs, 1e-5, 1e-6)


def test_a_model_trains_as_on_one_device_with_recomputation_and_without(warm):
    warm(models, 4)


def test_recomputation_drops_the_same_and_the_next_call_others():
    x = torch.ones(64, 64, requires_grad=True)
    layer = axes.nn.Dropout(0.5)
    torch.manual_seed(0)
    one = checkpoint(layer, x, use_reentrant=False)
    two = checkpoint(lambda x: layer(x).exp(), x, use_reentrant=False)
    one.sum().backward()
    assert torch.equal(x.grad, one)
    x.grad = None
    two.sum().backward()
    assert torch.equal(x.grad != 0, two > 1)
    assert not torch.equal(one != 0, two > 1)


def test_what_is_dropped_is_settled_by_the_seed_and_is_of_any_dtype():
    ones = torch.ones(1000)
    torch.manual_seed(0)
    first = torch.rand(1)
    torch.manual_seed(0)
    one, two = (axes.nn.dropout(ones, seed=seed) for seed in (1, 2))
    assert torch.equal(torch.rand(1), first)  # a seed that is given draws nothing
    assert torch.equal(one, axes.nn.dropout(ones, seed=1))
    assert not any(torch.equal(one[shift:], two[: 1000 - shift]) for shift in range(4))
    half = axes.nn.dropout(ones.bfloat16(), seed=1)
    assert (half.dtype, half.max()) == (torch.bfloat16, torch.tensor(2.0))
    assert torch.equal(half == 0, one == 0)
    odd = torch.tensor([math.inf, math.nan, 1.0], requires_grad=True)
    axes.nn.dropout(odd, 1.0).sum().backward()
    assert axes.nn.dropout(odd, 1.0).tolist() == odd.grad.tolist() == [0, 0, 0]
    layer = axes.nn.Dropout(0.5)
    assert layer.eval()(ones) is axes.nn.dropout(ones, 0.0) is ones
    assert repr(axes.nn.Dropout(0.1, "b s@tp", s=10)) == "Dropout(p=0.1, 'b s@tp', s=10)"
    x = torch.linspace(1, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: axes.nn.dropout(x, 0.5, seed=1) ** 2, x)
    assert torch.autograd.gradgradcheck(lambda x: axes.nn.dropout(x, 0.5, seed=1) ** 2, x)


def test_what_is_dropped_looks_random():
    """Rates, neighbours in every dim, and two calls: each within five standard deviations."""
    n = 1 << 10
    torch.manual_seed(0)
    for p in (0.1, 0.5, 0.9):
        one, two = (axes.nn.dropout(torch.ones(n, n), p) == 0 for _ in range(2))
        pairs = [(one, two), (one[1:], one[:-1]), (one[:, 1:], one[:, :-1]), (one[1:, 1:], one[:-1, :-1])]
        rate = one.float().mean().item()
        assert abs(rate - p) < 5 * math.sqrt(p * (1 - p) / n**2)
        for first, second in pairs:
            both = (first & second).float().mean().item()
            assert abs(both - p**2) < 5 * math.sqrt(p**2 * (1 - p**2) / n**2) + 5 * math.sqrt(p * (1 - p)) * p / n
        for dim in (0, 1):
            counts = one.float().sum(dim)
            spread = counts.var().item() / (n * p * (1 - p))
            assert abs(spread - 1) < 5 * math.sqrt(2 / n)


def differently_seeded():
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    torch.manual_seed(dist.get_rank())
    try:
        axes.nn.dropout(axes.shard(WHOLE, "b@dp s d", mesh=mesh), 0.1)
    except DesyncError as error:
        return str(error)


def test_ranks_whose_generators_differ_are_told_so_on_all(world):
    texts = world(differently_seeded, 4)
    assert all("seed all ranks alike before it, torch.manual_seed(0); or pass seed=" in text for text in texts)
    assert all("a default CPU generator (seed" in text for text in texts)


def test_a_compiled_function_breaks_its_graph_there_and_drops_the_same():
    def step(x):
        return axes.nn.dropout(x * 2, 0.5) + 1

    torch.manual_seed(0)
    expected = step(torch.ones(64))
    torch.manual_seed(0)
    assert torch.equal(torch.compile(step, backend="eager")(torch.ones(64)), expected)
    torch.compiler.reset()
    with pytest.raises(Exception, match="draws its seed outside of the graph"):
        torch.compile(step, backend="eager", fullgraph=True)(torch.ones(64))


def test_samples_come_as_often_as_their_probabilities_say():
    probabilities = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    found = axes.nn.sample(probabilities.log().expand(20_000, 3), "b v", over="v", seed=5)
    often = torch.bincount(found, minlength=3) / 20_000
    assert bool(((often - probabilities).abs() < 5 * (probabilities * (1 - probabilities) / 20_000).sqrt()).all())
    cold = axes.nn.sample(probabilities.log().expand(20_000, 3), "b v", over="v", temperature=0.1, seed=5)
    assert (cold == 2).double().mean() > 0.99
    assert axes.nn.sample(probabilities, "v", over="v", temperature=0).item() == 2
    dots = axes.nn.sample(probabilities.log().expand(5, 4_000, 3), "... v", over="v", seed=5)
    assert torch.equal(dots.view(-1), found), "dots stand for any dims"
    torch.manual_seed(0)
    assert axes.nn.sample(torch.zeros(64, 3), "b v", over="v").unique().numel() == 3
