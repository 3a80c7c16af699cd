"""Dropout that drops the same elements on every mesh: against one device, in both views, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import axes
from axes import DesyncError, MeshError, ShardingError

WHOLE = torch.linspace(1, 2, 6 * 8 * 12).view(6, 8, 12)


def alone(whole, p, number):
    """What one device has, and its gradient for a gradient of `whole`."""
    torch.manual_seed(number)
    x = whole.clone().requires_grad_()
    y = axes.nn.dropout(x, p)
    y.backward(whole)
    return y.detach(), x.grad


def gradients_as_they_come():
    """The gradient of a DTensor in other shardings than its own, pending ones, and of what is pending."""
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    expected, gradient = alone(WHOLE, 0.5, 7)
    wrong = []
    for source in ("b@dp s d@tp", "b s@(tp dp) d", "b s d"):
        for arrives in ("b s d", "b@tp s d@dp", "b s@dp d | sum@tp", "b s d | sum@(dp tp)"):
            x = axes.shard(WHOLE, source, mesh=mesh).requires_grad_()
            torch.manual_seed(7)
            y = axes.nn.dropout(x, 0.5, source)
            share = {"sum@tp": 2, "sum@(dp tp)": 4}.get(arrives.partition("| ")[2], 1)
            rows = mesh.sharding(arrives.partition(" |")[0]).local_indices(WHOLE.shape)
            cotangent = axes.from_local(WHOLE[rows] / share, arrives, mesh=mesh)
            (found,) = torch.autograd.grad(y, x, cotangent, create_graph=False)
            ok = torch.equal(axes.unshard(y.detach()), expected) and torch.equal(axes.unshard(found), gradient)
            wrong += [] if ok else [(source, arrives)]
    for op, share in (("sum", 2), ("mean", 1)):
        x = axes.from_local(WHOLE / share, f"b s d | {op}@tp", mesh=mesh)
        torch.manual_seed(7)
        y = axes.nn.dropout(x, 0.5)
        wrong += [] if axes.spec_of(y) == f"_ _ _ | {op}@tp" and torch.equal(axes.unshard(y), expected) else [op]
    return wrong


def test_a_gradient_is_dropped_in_whatever_sharding_it_arrives(warm):
    assert warm(gradients_as_they_come, 4) == [[]] * 4


# ------------------------------------------------------------------------------------- models


class Block(nn.Module):
    """Two dropouts around a product; `where` says how its shards lie in a region."""

    def __init__(self, where=None):
        super().__init__()
        self.first, self.second = axes.nn.Dropout(0.3, where), axes.nn.Dropout(0.5, where)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 144).view(12, 12))

    def forward(self, x):
        return self.second(torch.tanh(axes.einsum(self.first(x), self.weight, "b s d, d e -> b s e")))


class Model(nn.Module):
    def __init__(self, where, recompute):
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList([Block(where), Block(where)]), recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def trained(model, x):
    """Two steps of two passes each; all values and gradients, whole."""
    found = []
    torch.manual_seed(5)
    for _ in range(2):
        for _ in range(2):
            y = model(x)
            y.backward(y.detach())
            found.append(y)
        found += [p.grad for p in model.parameters()]
    return [axes.unshard(each.detach()) if hasattr(each, "placements") else each.detach() for each in found]


def models():
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    expected = trained(Model(None, recompute=False), WHOLE)
    if torch.equal(expected[0], expected[1]):
        return ["two calls drop the same"]
    wrong = []
    for recompute in (False, True):
        region = axes.shard_module(Model("b@dp s@tp d", recompute), {"*": "..."}, mesh)
        axes.shard_map(region, "b@dp s@tp d -> b@dp s@tp d", mesh)
        plain = axes.shard_module(Model(None, recompute), {"*": "..."}, mesh)
        for kind, model in (("local", region), ("global", plain)):
            found = trained(model, axes.shard(WHOLE, "b@dp s@tp d", mesh=mesh))
            for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
                if not torch.equal(mine == 0, theirs == 0) or not torch.allclose(mine, theirs, 1e-5, 1e-6):
                    wrong.append((kind, recompute, number))
    return wrong


def test_a_model_trains_as_on_one_device_with_recomputation_and_without(warm):
    assert warm(models, 4) == [[]] * 4


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


def test_a_seed_that_is_given_draws_nothing_and_settles_what_is_dropped():
    torch.manual_seed(0)
    first = torch.rand(1)
    torch.manual_seed(0)
    one = axes.nn.dropout(torch.ones(1000), seed=1)
    assert torch.equal(torch.rand(1), first)
    assert torch.equal(one, axes.nn.dropout(torch.ones(1000), seed=1))
    two = axes.nn.dropout(torch.ones(1000), seed=2)
    assert not any(torch.equal(one[shift:], two[: 1000 - shift]) for shift in range(4))


def test_evaluation_and_no_probability_leave_the_tensor_as_it_is():
    layer, x = axes.nn.Dropout(0.5), torch.ones(8)
    assert layer.eval()(x) is x
    assert axes.nn.dropout(x, 0.0) is x
    assert repr(axes.nn.Dropout(0.1, "b s@tp", s=10)) == "Dropout(p=0.1, 'b s@tp', s=10)"


def test_a_plain_tensor_has_a_tangent_and_second_derivatives():
    x = torch.linspace(1, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: axes.nn.dropout(x, 0.5, seed=1) ** 2, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: axes.nn.dropout(x, 0.5, seed=1) ** 2, x)
    with pytest.raises(ShardingError, match="inside a transform"):
        torch.func.grad(lambda x: axes.nn.dropout(x, 0.5).sum())(x)


def second_derivatives():
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    found = []
    for make in (lambda: WHOLE.clone(), lambda: axes.shard(WHOLE, "b@dp s d@tp", mesh=mesh)):
        x = make().requires_grad_()
        (gradient,) = torch.autograd.grad((axes.nn.dropout(x, 0.5, seed=1) ** 3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((gradient**2).sum(), x)
        found.append(axes.unshard(second) if hasattr(second, "placements") else second)
    return torch.equal(*found)


def test_the_gradient_of_a_dtensor_is_differentiable(warm):
    assert warm(second_derivatives, 4) == [True] * 4


def test_everything_is_dropped_where_p_is_one_even_what_is_not_finite():
    x = torch.tensor([math.inf, math.nan, 1.0], requires_grad=True)
    y = axes.nn.dropout(x, 1.0)
    y.sum().backward()
    assert y.tolist() == x.grad.tolist() == [0, 0, 0]


# --------------------------------------------------------------------------------- the numbers


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


def test_halves_and_other_dtypes_drop_the_same():
    masks = [axes.nn.dropout(torch.ones(500, dtype=d), 0.25, seed=4) for d in (torch.float64, torch.bfloat16)]
    assert masks[1].dtype == torch.bfloat16
    assert torch.equal(masks[0] == 0, masks[1] == 0)
    assert masks[1].max() == torch.tensor(1 / 0.75, dtype=torch.bfloat16)


# ------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("p", [-0.1, 1.5, math.nan, "0.1", True, None])
def test_a_p_that_is_no_probability_is_refused(p):
    with pytest.raises(ShardingError, match="p is a probability, from 0 to 1; found"):
        axes.nn.dropout(torch.ones(2), p)
    with pytest.raises(ShardingError, match="p is a probability, from 0 to 1; found"):
        axes.nn.Dropout(p)


def test_tensors_and_specs_that_do_not_fit_are_refused():
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu") as mesh:
        x = axes.shard(WHOLE, "b@dp s d", mesh=mesh)
        with pytest.raises(ShardingError, match="needs to know which part of the whole it is; write a spec"):
            axes.nn.dropout(torch.ones(4, 4), 0.1)
        with pytest.raises(
            ShardingError, match=r"isn't sharded as the spec says\n  spec    b s@dp d\n  tensor  _@dp _ _"
        ):
            axes.nn.dropout(x, 0.1, "b s@dp d")
        with pytest.raises(ShardingError, match="the spec 'b s' has 2 dims, the tensor 3"):
            axes.nn.dropout(WHOLE, 0.1, "b s")
        with pytest.raises(ShardingError, match=r"the shard of \[5\] on this rank is \[3\] by 's@tp'; found \[2\]"):
            axes.nn.dropout(torch.ones(2), 0.1, "s@tp", s=5)
        with pytest.raises(ShardingError, match="pending max or min"):
            axes.nn.dropout(axes.from_local(WHOLE, "b s d | max@tp", mesh=mesh), 0.1)
        with pytest.raises(ShardingError, match="is of floats; found torch"):
            axes.nn.dropout(torch.arange(3), 0.1)
        with pytest.raises(ShardingError, match="seed is a whole number of at most 64 bits; found"):
            axes.nn.dropout(torch.ones(3), 0.1, "s", seed=0.5)
    with pytest.raises(ShardingError, match="takes a tensor; found list"):
        axes.nn.dropout([1.0])
    with pytest.raises(MeshError, match="needs a mesh; pass mesh="):
        axes.nn.dropout(torch.ones(3), 0.1, "s@tp")
    with pytest.raises(MeshError, match="is algebra alone"):
        axes.nn.dropout(torch.ones(3), 0.1, "s@tp", mesh=axes.Mesh("tp=2"))
    assert torch.equal(axes.nn.dropout(WHOLE, 0.5, "b s d", seed=1), axes.nn.dropout(WHOLE, 0.5, seed=1))


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


def test_a_layer_refuses_what_no_call_could_take():
    for make in (lambda: axes.nn.Dropout(0.5, inplace=True), lambda: axes.nn.Dropout(0.5, "a@@ b")):
        with pytest.raises(axes.AxesError):
            make()
