"""Layers by name are torch's own, on whole tensors, on DTensors, and on a region's shards."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import axes
from axes.algebra.errors import AxesError
from axes.nn.annotations import annotated

TOKENS = torch.arange(16).view(4, 4) * 5 % 12


class MLP(nn.Module):
    def __init__(self, loss: str = "b s half, b s -> "):
        super().__init__()
        self.embedding = axes.nn.Embedding("b s, vocab embed -> b s embed", vocab=12, embed=8)
        self.norm = axes.nn.LayerNorm("b s embed", over="embed", embed=8)
        self.heads = axes.nn.Einsum("b s embed, (heads k) embed -> b s heads k", bias="heads k", heads=4, k=2, embed=8)
        self.back = axes.nn.Einsum("b s heads@* k, embed (heads@* k) -> b s embed", heads=4, k=2, embed=8)
        self.out = axes.nn.RMSNorm("b s embed", over="embed", eps=1e-6, embed=8)
        self.up = axes.nn.Einsum("b s embed, mlp embed -> b s mlp", bias="mlp", embed=8, mlp=6)
        self.join = axes.nn.Rearrange("b s (two half) -> b s half two", two=2)
        self.mean = axes.nn.Reduce("b s half two@* -> b s half", "mean")
        self.loss = axes.nn.CrossEntropy(loss)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.out(x + self.back(torch.tanh(self.heads(self.norm(x)))))
        return self.loss(self.mean(self.join(self.up(x))), tokens % 3)


def by_torch(model: MLP, tokens: torch.Tensor) -> torch.Tensor:
    x = F.embedding(tokens, model.embedding.weight)
    h = F.linear(
        F.layer_norm(x, (8,), model.norm.weight, model.norm.bias), model.heads.weight, model.heads.bias.view(-1)
    )
    x = F.rms_norm(x + F.linear(torch.tanh(h), model.back.weight), (8,), model.out.weight, 1e-6)
    y = F.linear(x, model.up.weight, model.up.bias).unflatten(-1, (2, 3)).mean(-2)
    return F.cross_entropy(y.flatten(0, 1), (tokens % 3).view(-1))


def gradients(model, loss) -> dict[str, torch.Tensor]:
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.allclose(one[name], other[name], rtol=1e-9, atol=1e-12)]


def test_on_whole_tensors_they_are_those_of_torch():
    torch.manual_seed(0)
    model = MLP().double()
    loss = model(TOKENS)
    found = gradients(model, loss)
    model.zero_grad()
    expected = by_torch(model, TOKENS)
    assert torch.allclose(loss, expected)
    assert close(found, gradients(model, expected)) == []


def on_ranks(text: str, rules: axes.Rules) -> list[str]:
    torch.manual_seed(0)
    whole = MLP().double()
    expected = whole(TOKENS)
    wanted = gradients(whole, expected)
    wrong = []
    with axes.init_mesh(text, device_type="cpu") as mesh:
        torch.manual_seed(0)
        model = axes.shard_module(MLP("b@dp s half, b@dp s -> ").double(), rules=rules)
        loss = model(axes.shard(TOKENS, "b@dp s"))
        found = {name: axes.unshard(g) for name, g in gradients(model, loss).items()}
        if not torch.allclose(axes.unshard(loss.detach()), expected.detach()):
            wrong.append("loss")
        wrong += close(found, wanted)
        assert mesh.size == 4
    return wrong


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("dp=2 tp=2", axes.Rules(heads="tp", mlp="tp", k=None, embed=None, vocab=None)),
        ("dp=4 tp", axes.Rules(heads="tp", mlp="tp", k=None, embed=None, vocab=None)),
        ("dp tp=4", axes.Rules([("heads", "tp"), ("...", None)])),
    ],
)
def test_on_dtensors_by_rules_they_are_those_of_one_device(world, text, rules):
    assert world(on_ranks, 4, text, rules) == [[]] * 4


class Parallel(nn.Module):
    """The same for a region: where a name's shards are worked on, the expression says so."""

    def __init__(self):
        super().__init__()
        self.embedding = axes.nn.Embedding("b s, vocab@tp embed -> b s embed", vocab=12, embed=8)
        self.norm = axes.nn.LayerNorm("b s embed", over="embed", embed=8)
        self.heads = axes.nn.Einsum("b s embed, (heads k) embed -> b s heads k", bias="heads k", heads=4, k=2, embed=8)
        self.back = axes.nn.Einsum("b s heads@tp k, embed (heads@tp k) -> b s embed", heads=4, k=2, embed=8)
        self.out = axes.nn.RMSNorm("b s embed", over="embed", eps=1e-6, embed=8)
        self.up = axes.nn.Einsum("b s embed, mlp embed -> b s mlp", bias="mlp", embed=8, mlp=6)
        self.loss = axes.nn.CrossEntropy("b@dp s mlp@tp, b@dp s -> ", mlp=6)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.out(x + self.back(torch.tanh(self.heads(self.norm(x)))))
        return self.loss(self.up(x), tokens % 6)


def in_a_region() -> list[str]:
    torch.manual_seed(0)
    whole = Parallel().double()
    x = F.embedding(TOKENS, whole.embedding.weight)
    h = F.linear(
        F.layer_norm(x, (8,), whole.norm.weight, whole.norm.bias), whole.heads.weight, whole.heads.bias.view(-1)
    )
    x = F.rms_norm(x + F.linear(torch.tanh(h), whole.back.weight), (8,), whole.out.weight, 1e-6)
    expected = F.cross_entropy(F.linear(x, whole.up.weight, whole.up.bias).flatten(0, 1), (TOKENS % 6).view(-1))
    wanted = gradients(whole, expected)
    wrong = []
    with axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        torch.manual_seed(0)
        model = Parallel().double()
        axes.shard_module(model, rules=axes.Rules(vocab="tp", heads="tp", mlp="tp", k=None, embed=None))
        axes.shard_map(model, "b@dp s -> ")
        loss = model(axes.shard(TOKENS, "b@dp s"))
        found = {name: axes.unshard(g) for name, g in gradients(model, loss).items()}
        if not torch.allclose(axes.unshard(loss.detach()), expected.detach()):
            wrong.append("loss")
        wrong += close(found, wanted)
    return wrong


def test_in_a_region_they_are_those_of_one_device(world):
    assert world(in_a_region, 4) == [[]] * 4


def test_values_are_drawn_within_the_bounds_of_linear():
    torch.manual_seed(0)
    layer = axes.nn.Einsum("b (h k), (h k) f -> b f", h=8, k=8, f=64)
    assert layer.weight.shape == (64, 64)
    assert 0.9 / 8 < layer.weight.abs().max() <= 1 / 8
    again = layer.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight, again)
    with torch.device("meta"):
        assert axes.nn.Embedding("b, v d -> b d", v=4, d=2).weight.is_meta


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: axes.nn.Einsum("b d -> b d", d=2), "Einsum is 'input, weight -> result'"),
        (lambda: axes.nn.Einsum("b d, d f -> b f", d=2), "'f' needs a size, like f=8"),
        (lambda: axes.nn.Einsum("b d, d f -> b f", d=2, f=-3), "the size of 'f' is a whole number from 1"),
        (lambda: axes.nn.Einsum("b d, d f -> b f", d=2, f=4, bias="g", g=3), "has a name that the result hasn't"),
        (lambda: axes.nn.Einsum("b f@tp, d f@tp -> b d | sum@tp", bias="d", d=2, f=4), "add the bias where the sum is"),
        (lambda: axes.nn.Embedding("b, v d -> b d", d=2), "'v' needs a size"),
        (lambda: axes.nn.Embedding("b, v d -> b d", padding_idx=4, v=4, d=2), "a row of the table, which has 4"),
        (
            lambda: axes.nn.Embedding.from_module(Scaled(4, 2), "b, v d -> b d"),
            "found Scaled, whose forward may do more",
        ),
        (lambda: axes.nn.Embedding.from_module(nn.Embedding(4, 2, sparse=True), "b, v d -> b d"), "has no sparse"),
        (lambda: axes.nn.Embedding.from_module(nn.Embedding(4, 2), "b, v -> b"), "is [4], the module's [4, 2]"),
        (lambda: axes.nn.RMSNorm("b d", over="d"), "'d' needs a size"),
        (lambda: axes.nn.Rearrange("b [d] -> d b"), "is reserved"),
    ],
)
def test_what_is_wrong_with_a_layer_is_said_when_it_is_made(make, says):
    with pytest.raises(AxesError, match=says.replace("[", r"\[")):
        make()


class Scaled(nn.Embedding):
    """What transformers' Gemma has: rows times a number."""

    def forward(self, ids):
        return super().forward(ids) * self.embedding_dim**0.5


def embedded(kind: type[nn.Embedding]) -> list[str]:
    """A padded embedding of a module of torch's, in a region: taken over, or left in place with its hook."""
    torch.manual_seed(0)
    whole = kind(13, 8, padding_idx=5).double()
    many = copy.deepcopy(whole)
    weights = torch.randn(4, 4, 8, dtype=torch.float64)
    (whole(TOKENS) * weights).sum().backward()
    with axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        spec = "v@tp d"
        if kind is nn.Embedding:
            many = axes.nn.Embedding.from_module(many, "b s, v@tp d -> b s d")
        else:
            spec = "v d@tp"
            many.register_forward_hook(lambda module, _, y: axes.all_gather(y, "tp", dim=-1))
        model = nn.Sequential(many)
        axes.shard_map(axes.shard_module(model, {"0.weight": spec}), "b@dp s -> b@dp s d")
        y = model(axes.shard(TOKENS, "b@dp s"))
        (axes.unshard(y) * weights).sum().backward()
        far = {"value": axes.unshard(y) - whole(TOKENS), "gradient": axes.unshard(many.weight.grad) - whole.weight.grad}
    return [name for name, distance in far.items() if distance.abs().max() > 1e-12]


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_an_embedding_of_torch_keeps_its_padding_and_its_scale(world, kind):
    assert world(embedded, 4, kind) == [[]] * 4


def test_the_row_of_padding_starts_as_zeros_in_a_deferred_table_as_well():
    assert axes.nn.Embedding("b, v d -> b d", padding_idx=-2, v=4, d=2).weight[2].tolist() == [0, 0]
    with axes.simulate(2, rank=1), axes.init_mesh("tp=2", device_type="cpu"):
        layer = axes.nn.Embedding("b, d v@tp -> b d", padding_idx=3, v=4, d=2, device="meta")
        axes.shard_module(layer, {"weight": "d v@tp"})
        assert layer.weight.to_local()[:, 1].tolist() == [0, 0]
        assert layer.weight.to_local()[:, 0].count_nonzero() == 2


def test_a_copy_of_a_layer_keeps_its_names_and_a_bias_is_broadcast_over_dots():
    layer = copy.deepcopy(axes.nn.Einsum("... d, (h k) d -> ... h k", bias="h k", h=2, k=3, d=4))
    assert annotated(layer) == {"weight": "(h=2 k=3) d", "bias": "h k"}
    x = torch.randn(5, 2, 4)
    expected = F.linear(x, layer.weight, layer.bias.view(-1)).view(5, 2, 2, 3)
    assert torch.allclose(layer(x), expected)


def test_a_layer_prints_its_expression_and_sizes():
    text = repr(MLP())
    assert "Einsum('b s embed, mlp embed -> b s mlp', embed=8, mlp=6)" in text
    assert "RMSNorm('b s embed', over='embed', embed=8)" in text
    assert "Reduce('b s half two@* -> b s half', 'mean')" in text
