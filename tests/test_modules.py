"""Modules that are sharded: layers by name, what `shard_module` makes of a model, and parameters that it draws.

The law `training` shards small models by specs, by rules and on several meshes, and compares every step with one
device; here are whole layers beside torch's, deferred values on any mesh, and what is said of a model.
"""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import axes
from axes import Rules, ShardingError
from tests.common import case

TOKENS = torch.arange(16).view(4, 4) * 5 % 12


def test_axes_nn_lists_its_public_names_and_has_them():
    assert dir(axes.nn) == sorted(axes.nn.__all__)
    assert all(getattr(axes.nn, name) is not None for name in dir(axes.nn))
    with pytest.raises(AttributeError, match=r"module 'axes.nn' has no attribute 'clip'"):
        axes.nn.clip  # noqa: B018


# ------------------------------------------------------------------------------ layers


class MLP(nn.Module):
    """Every kind of layer; of a region where `tp` says over which axis a name is worked on."""

    def __init__(self, loss: str = "b s half, b s -> ", tp: str = ""):
        super().__init__()
        heads = "heads" + (tp or "@*")
        self.embedding = axes.nn.Embedding(f"b s, vocab{tp} embed -> b s embed", vocab=12, embed=8)
        self.norm = axes.nn.LayerNorm("b s embed", over="embed", embed=8)
        self.heads = axes.nn.Einsum("b s embed, (heads k) embed -> b s heads k", heads=4, k=2, embed=8)
        self.bias = nn.Parameter(torch.randn(4, 2))
        self.back = axes.nn.Einsum(f"b s {heads} k, embed ({heads} k) -> b s embed", heads=4, k=2, embed=8)
        self.out = axes.nn.RMSNorm("b s embed", over="embed", eps=1e-6, embed=8)
        self.up = axes.nn.Einsum("b s embed, mlp embed -> b s mlp", embed=8, mlp=6)
        axes.annotate(self, {"bias": "heads k"})
        self.loss, self.tp = loss, tp

    def forward(self, tokens):
        x = self.embedding(tokens)
        y = self.up(self.out(x + self.back(torch.tanh(self.heads(self.norm(x)) + self.bias))))
        if self.tp:
            return axes.cross_entropy(y, tokens % 6, self.loss, mlp=6)
        y = axes.reduce(
            axes.rearrange(y, "b s (two half) -> b s half two", two=2), "b s half two@* -> b s half", "mean"
        )
        return axes.cross_entropy(y, tokens % 3, self.loss)


def by_torch(model: MLP) -> torch.Tensor:
    x = F.embedding(TOKENS, model.embedding.weight)
    h = F.layer_norm(x, (8,), model.norm.weight, model.norm.bias)
    h = F.linear(h, model.heads.weight, model.bias.view(-1))
    x = F.rms_norm(x + F.linear(torch.tanh(h), model.back.weight), (8,), model.out.weight, 1e-6)
    y = F.linear(x, model.up.weight)
    if model.tp:
        return F.cross_entropy(y.flatten(0, 1), (TOKENS % 6).view(-1))
    return F.cross_entropy(y.unflatten(-1, (2, 3)).mean(-2).flatten(0, 1), (TOKENS % 3).view(-1))


def check_same(model: MLP, loss: torch.Tensor, whole: MLP) -> None:
    """A loss and all gradients are those of torch."""
    loss.backward()
    expected = by_torch(whole)
    for p in whole.parameters():
        p.grad = None
    expected.backward()
    grads = {name: (p.grad, whole.get_parameter(name).grad) for name, p in model.named_parameters()}
    for name, (found, wanted) in {"loss": (loss.detach(), expected.detach()), **grads}.items():
        with case(name):
            torch.testing.assert_close(axes.unshard(found) if isinstance(found, DTensor) else found.clone(), wanted)


def whole_mlp(**how: str) -> MLP:
    torch.manual_seed(0)
    return MLP(**how).double()


def test_on_whole_tensors_layers_are_those_of_torch():
    model = whole_mlp()
    check_same(model, model(TOKENS), copy.deepcopy(model))


def layers_on_ranks() -> None:
    for text in ("dp=4 tp=2", "dp=2 tp=4"):
        table = [("heads", "tp"), ("mlp", "tp"), ("...", None)]
        with axes.init_mesh(text, device_type="cpu"), case(f"DTensors by rules on {text}"):
            model = whole_mlp(loss="b@dp s half, b@dp s -> ")
            axes.shard_module(model, rules=Rules(table))
            check_same(model, model(axes.shard(TOKENS, "b@dp s")), whole_mlp())
    with axes.init_mesh("dp=4 tp=2", device_type="cpu"), case("a region"):
        model = whole_mlp(loss="b@dp s mlp@tp, b@dp s -> ", tp="@tp")
        axes.shard_module(model, rules=Rules([("vocab", "tp"), ("heads", "tp"), ("mlp", "tp"), ("...", None)]))
        axes.shard_map(model, "b@dp s -> ")
        check_same(model, model(axes.shard(TOKENS, "b@dp s")), whole_mlp(tp="@tp"))


def test_layers_on_dtensors_by_rules_and_in_a_region_are_those_of_one_device(pool):
    pool.run(layers_on_ranks)


class Scaled(nn.Embedding):
    """What transformers' Gemma has: rows times a number."""

    def forward(self, ids):
        return super().forward(ids) * self.embedding_dim**0.5


def embedded() -> None:
    """A padded embedding of a module of torch's, in a region: taken over, or left in place with its hook."""
    for kind in (nn.Embedding, Scaled):
        torch.manual_seed(0)
        whole = kind(13, 8, padding_idx=5).double()
        many, spec = copy.deepcopy(whole), "v d@tp"
        weights = torch.randn(4, 4, 8, dtype=torch.float64)
        (whole(TOKENS) * weights).sum().backward()
        with axes.init_mesh("dp=4 tp=2", device_type="cpu"), case(kind.__name__):
            if kind is nn.Embedding:
                many, spec = axes.nn.Embedding.from_module(many, "b s, v@tp d -> b s d"), "v@tp d"
            else:
                many.register_forward_hook(lambda module, _, y: axes.all_gather(y, "tp", dim=-1))
            model = nn.Sequential(many)
            axes.shard_map(axes.shard_module(model, {"0.weight": spec}), "b@dp s -> b@dp s d")
            y = model(axes.shard(TOKENS, "b@dp s"))
            (axes.unshard(y) * weights).sum().backward()
            torch.testing.assert_close(axes.unshard(y), whole(TOKENS))
            torch.testing.assert_close(axes.unshard(many.weight.grad), whole.weight.grad)


def test_an_embedding_of_torch_keeps_its_padding_and_its_scale(pool):
    pool.run(embedded)


def test_values_are_drawn_within_the_bounds_of_linear_and_a_row_of_padding_starts_as_zeros():
    torch.manual_seed(0)
    layer = axes.nn.Einsum("b (h k), (h k) f -> b f", h=8, k=8, f=64)
    assert 0.9 / 8 < layer.weight.abs().max() <= 1 / 8
    again = layer.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight, again)
    assert axes.nn.Embedding("b, v d -> b d", padding_idx=-2, v=4, d=2).weight[2].tolist() == [0, 0]
    with axes.simulate(2, rank=1), axes.init_mesh("tp=2", device_type="cpu"):
        layer = axes.nn.Embedding("b, d v@tp -> b d", padding_idx=3, v=4, d=2, device="meta")
        assert layer.weight.is_meta
        axes.shard_module(layer, {"weight": "d v@tp"})
        assert layer.weight.to_local()[:, 1].tolist() == [0, 0]
        assert layer.weight.to_local()[:, 0].count_nonzero() == 2
        columns = axes.nn.Embedding("b s, v d@tp -> b s d@tp", v=4, d=6)
        axes.shard_module(columns, {"weight": "v d@tp"})
        assert columns(axes.shard(torch.zeros(2, 3).long(), "b s")).shape == (2, 3, 6)


def test_a_copy_of_a_layer_keeps_its_names(capsys):
    layer = copy.deepcopy(axes.nn.Einsum("... d, (h k) d -> ... h k", h=2, k=3, d=4))
    axes.shard_module(layer, mesh=axes.Mesh("tp=2"), rules=Rules(h="tp", k=None, d=None), dry_run=True)
    assert re.search(r"weight +\(h=2 k=3\) d +\(h=2@tp k=3\) d +3x4 ", capsys.readouterr().out)
    x = torch.randn(5, 2, 4)
    expected = F.linear(x, layer.weight).view(5, 2, 2, 3)
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_a_layer_prints_its_expression_and_sizes():
    text = repr(MLP())
    assert "Einsum('b s embed, mlp embed -> b s mlp', embed=8, mlp=6)" in text
    assert "RMSNorm('b s embed', embed=8)" in text


# ------------------------------------------------------------------------------ functions over a vocabulary

VOCABULARY = 257
"""What no number of ranks divides."""


def chosen(z: torch.Tensor) -> torch.Tensor:
    return torch.arange(6).view(2, 3) * 100 % VOCABULARY


def loss_of(z: torch.Tensor, weight: torch.Tensor | None = None, z_loss: float = 0.0, **how: Any) -> torch.Tensor:
    labels = chosen(z)
    labels[0, 0] = how.get("ignore_index", -100)
    plain = F.cross_entropy(z.flatten(0, 1), labels.flatten(), weight, **how)
    return plain + z_loss * z.logsumexp(-1)[labels != -100].square().mean()


W = torch.linspace(0.5, 2.0, VOCABULARY, dtype=torch.float64)

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    # what axes computes of logits, labels and weights that are split by v, and what one device computes
    "softmax": (lambda x, t, w: axes.softmax(x, "b s v@tp", over="v"), lambda z: z.softmax(-1)),
    "log_softmax": (lambda x, t, w: axes.log_softmax(x, "b s v@tp", over="v"), lambda z: z.log_softmax(-1)),
    "logsumexp": (lambda x, t, w: axes.logsumexp(x, "b s v@tp", over="v"), lambda z: z.logsumexp(-1)),
    "entropy": (
        lambda x, t, w: axes.entropy(x, "b s v@tp", over="v"),
        lambda z: torch.distributions.Categorical(logits=z).entropy(),
    ),
    "argmax": (lambda x, t, w: axes.argmax(x, "b s v@tp", over="v"), lambda z: z.argmax(-1)),
    "topk": (lambda x, t, w: axes.topk(x, "b s v@tp", 5, over="v")[0], lambda z: z.topk(5).values),
    "topk, places": (lambda x, t, w: axes.topk(x, "b s v@tp", 5, over="v")[1], lambda z: z.topk(5).indices),
    "loss": (lambda x, t, w: axes.cross_entropy(x, t, LOSS), loss_of),
    "loss, smoothed": (
        lambda x, t, w: axes.cross_entropy(x, t, LOSS, label_smoothing=0.2),
        lambda z: loss_of(z, label_smoothing=0.2),
    ),
    "loss, weighted and smoothed": (
        lambda x, t, w: axes.cross_entropy(x, t, LOSS, "sum", weight=w, label_smoothing=0.2),
        lambda z: loss_of(z, W, reduction="sum", label_smoothing=0.2),
    ),
    "loss, with z-loss": (
        lambda x, t, w: axes.cross_entropy(x, t, LOSS, z_loss=0.1),
        lambda z: loss_of(z, z_loss=0.1),
    ),
    "sample": (
        lambda x, t, w: axes.nn.sample(x, "b s v@tp", over="v", seed=3),
        lambda z: axes.nn.sample(z.detach(), "b s v", over="v", seed=3),
    ),
    "embedding, padded": (
        lambda x, t, w: axes.embedding(
            t.clamp(min=0), axes.rearrange(x, "b s v@tp -> v@tp (b s)"), ROWS, padding_idx=200
        ),
        lambda z: F.embedding(chosen(z), z.flatten(0, 1).mT, 200),
    ),
    "rms_norm": (
        lambda x, t, w: axes.rms_norm(x, "b s v@tp", "v", w, 1e-6),
        lambda z: F.rms_norm(z, (VOCABULARY,), W, 1e-6),
    ),
}
LOSS, ROWS = "b s v@tp, b s -> ", "b s, v@tp d -> b s d"


def functions_over_a_vocabulary(compiled: bool) -> None:
    with axes.init_mesh(f"tp={dist.get_world_size()}", device_type="cpu"):
        whole = torch.linspace(0, 400, 6 * VOCABULARY, dtype=torch.float64).sin().mul(3).view(2, 3, VOCABULARY)
        labels = chosen(whole)
        labels[0, 0] = -100
        for name, (ours, theirs) in FUNCTIONS.items():
            with case(name):
                # A sample draws its seed outside of a graph.
                whole_graph = name != "sample"
                run = torch.compile(ours, backend="aot_eager", fullgraph=whole_graph) if compiled else ours
                x = axes.shard(whole, "b s v@tp").requires_grad_()
                z = whole.clone().requires_grad_()
                y = run(x, axes.shard(labels, "b s"), axes.shard(W, "v@tp"))
                expected = theirs(z)
                torch.testing.assert_close(axes.unshard(y.detach()), expected.detach(), rtol=1e-12, atol=1e-12)
                if expected.requires_grad:
                    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
                    y.backward(axes.shard(weights, axes.spec_of(y)))
                    expected.backward(weights)
                    torch.testing.assert_close(axes.unshard(x.grad), z.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("ranks", "compiled"),
    [(2, False), (3, False), (4, False), (3, True), *(pytest.param(n, True, marks=pytest.mark.full) for n in (2, 4))],
)
def test_functions_over_a_split_vocabulary_are_those_of_one_device(warm, ranks, compiled):
    warm(functions_over_a_vocabulary, ranks, compiled, timeout=300)


# ------------------------------------------------------------------------------ where tensors lie


class Block(nn.Module):
    def __init__(self, embed: int = 8, mlp: int = 12):
        super().__init__()
        self.norm = nn.LayerNorm(embed)
        self.qkv = nn.Linear(embed, 3 * embed, bias=False)
        self.out = nn.Linear(embed, embed, bias=False)
        self.up, self.down = nn.Linear(embed, mlp), nn.Linear(mlp, embed)
        self.register_buffer("scale", torch.ones(embed))


class Model(nn.Module):
    """A shared module, and a tied parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks.append(self.blocks[0])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight


SPECS = {
    "*.qkv.weight": "(three heads head_dim) embed",
    "*.out.weight": "embed (heads head_dim)",
    "*.up.weight": "mlp embed",
    "*.up.bias": "mlp",
    "*.down.weight": "embed mlp",
    "*": "...",
}
SIZES = {"three": 3, "heads": 4}


def test_each_tensor_lies_where_the_rules_put_it_and_ties_and_names_stay():
    rules = Rules(mlp=("tp", "dp"), heads="tp", embed="dp", three=None, head_dim=None)
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu") as mesh:
        model = Model()
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        with axes.use_rules(rules):
            assert axes.shard_module(model, SPECS, mesh, sizes=SIZES) is model
        assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
        assert model.head.weight is model.embedding.weight
        assert model.blocks[2] is model.blocks[0]
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        found = {name: axes.spec_of(x) for name, x in [*model.named_parameters(), *model.named_buffers()]}
    assert found["blocks.0.qkv.weight"] == "(3 inner0@tp) _@dp"
    assert found["blocks.1.out.weight"] == "_@dp _@tp"
    assert found["blocks.0.up.weight"] == "_@(tp dp) _"
    assert found["embedding.weight"] == "_ _"
    assert found["blocks.0.scale"] == "_"


def test_annotations_are_read_and_patterns_go_before_them():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4, bias=False))
    axes.annotate(model[0], {"weight": "mlp embed", "bias": "embed"})
    axes.annotate(model[1].weight, "embed mlp")
    with axes.simulate(2), axes.init_mesh("tp=2", device_type="cpu") as mesh:
        axes.shard_module(model, {"0.bias": "mlp"}, mesh, Rules(mlp="tp", embed=None))
        assert [axes.spec_of(p) for p in model.parameters()] == ["_@tp _", "_@tp", "_ _@tp"]


def test_a_pattern_may_be_of_what_a_module_has_registered_as_none():
    with axes.simulate(4), axes.init_mesh("pp=2 tp=2", device_type="cpu") as mesh:
        stage = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
        stage[0].weight = None
        axes.shard_module(stage, {"0.weight": "f@tp e", "1.weight": "f e@tp", "*.bias": "f@tp"}, mesh["tp"])
        assert [axes.spec_of(p) for p in stage.parameters()] == ["_ _@tp", "_@tp"]


def test_a_constraint_is_where_the_rules_put_its_names():
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        x = axes.zeros("b@tp e", b=4, e=6)
        with axes.use_rules(Rules(batch="dp", embed="tp", heads="tp", k=None)):
            compiled = torch.compile(lambda x: axes.constrain(x, "batch embed") * 2, backend="eager", fullgraph=True)
            made = axes.shard(torch.zeros(4, 6), "batch (heads k)", heads=2)
            found = [axes.constrain(x, "batch embed"), axes.constrain(x, "batch (heads k)", heads=2), compiled(x), made]
            assert [axes.spec_of(y) for y in found] == ["_@dp _@tp"] * 4
            assert axes.spec_of(axes.constrain(x, "batch (heads k)", heads=3)) == "_@dp _"
            with axes.use_rules(Rules(batch=("tp", "dp"), embed=None)):
                assert axes.spec_of(axes.constrain(x, "batch embed")) == "_@(tp dp) _"


def test_names_of_a_tied_tensor_may_say_the_same_in_other_words(capsys):
    rules = Rules(vocab=("tp", "dp"), v="tp", words="tp", embed=None, e=None)
    for specs, given in (
        ({"embedding.weight": "v@tp embed", "head.weight": "vocab@tp _", "*": "..."}, None),
        ({"embedding.weight": "(v k)@tp e", "head.weight": "v@tp e", "*": "..."}, None),
        ({"embedding.weight": "v embed", "head.weight": "words e", "*": "..."}, rules),
    ):
        for mesh in (axes.Mesh("dp=2 tp=2"), {"embed*": axes.Mesh("dp=2 tp=2"), "*": axes.Mesh("dp=2 tp=2")}):
            axes.shard_module(Model(), specs, mesh, given, dry_run=True)
            assert "  8x8  " in capsys.readouterr().out.splitlines()[1]
    other = {"embedding.weight": "vocab embed", "head.weight": "v e", "*": "..."}
    with pytest.raises(ShardingError, match="tied, has two specs"):
        axes.shard_module(Model(), other, axes.Mesh("dp=2 tp=2"), rules, dry_run=True)


def test_a_dry_run_prints_what_each_rank_would_hold_and_changes_nothing(capsys):
    model = Model()
    rules = Rules(mlp="tp", heads="tp", three=None, head_dim=None, embed=None, vocab="dp")
    axes.shard_module(model, SPECS, axes.Mesh("dp=2 tp=2", ranks=range(4)), rules, dry_run=True, sizes=SIZES)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"embedding.weight = head.weight +\.\.\. +_ _ +16x8 +512", lines[1]), lines[1]
    qkv = r"blocks.0.qkv.weight = blocks.2.qkv.weight +\(three heads head_dim\) embed +"
    assert any(re.match(qkv + r"\(three=3 heads=4@tp head_dim=2\) embed +12x8 +384", line) for line in lines)
    total, *every = (int(line.split()[-1].replace(",", "")) for line in [lines[-1], *lines[1:-1]])
    assert lines[-1].startswith("total")
    assert total == sum(every)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


# ------------------------------------------------------------------------------ values that are drawn


class Deferred(nn.Module):
    """Initializers in all the ways that people write them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8, padding_idx=3)
        self.up, self.norm = nn.Linear(8, 16), nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.cut, self.added = nn.Parameter(torch.empty(64, 8)), nn.Parameter(torch.empty(6, 4))
        self.attention = nn.MultiheadAttention(8, 2)
        self.register_buffer("table", torch.empty(8, 4))
        self.register_buffer("assigned", torch.empty(6))

    def reset_parameters(self):
        nn.init.trunc_normal_(self.cut, std=1.0, a=-0.5, b=0.5)
        self.added.data.zero_()
        self.added.add_(torch.randn_like(self.added))
        self.table.copy_(torch.arange(32.0).view(8, 4))
        self.assigned = torch.arange(6.0)


def deferred() -> None:
    found = {}
    alone = axes.init_mesh("dp=1 tp=1 all=1", ranks=[dist.get_rank()], device_type="cpu")
    for text, seed, specs in (
        ("alone", 7, {}),
        ("again", 8, {}),
        (
            "dp=4 tp=2",
            7,
            {"embedding.weight": "v@tp e@dp", "up.*": "f@(dp tp) ...", "cut": "a@tp b@dp", "table": "a@tp b"},
        ),
        ("tp=4 dp=2", 7, {"added": "a@tp b", "up.weight": "f e@tp", "norm.*": "e@dp", "assigned": "a@tp"}),
    ):
        mesh = alone if text in ("alone", "again") else axes.init_mesh(text, device_type="cpu")
        torch.manual_seed(seed if mesh is alone or mesh.rank == 0 else 100 + mesh.rank)
        with torch.device("meta"):
            model = Deferred()
        axes.shard_module(model, {**specs, "*": "..."}, mesh)
        assert model.head.weight is model.embedding.weight
        tensors = [*model.named_parameters(), *model.named_buffers()]
        assert all(isinstance(x, DTensor) for _, x in tensors)
        found[text] = {name: axes.unshard(x.detach()) for name, x in tensors}
    one, other = found.pop("alone"), found.pop("again")
    for text, values in found.items():
        for name, value in values.items():
            with case(f"{name} on {text}"):
                assert torch.equal(value, one[name])
    assert one["embedding.weight"].std() > 0.5
    assert not one["embedding.weight"][3].any()
    assert 0.8 * 8**-0.5 < one["up.weight"].abs().max() <= 8**-0.5
    assert one["cut"].abs().max() <= 0.5
    assert one["added"].std() > 0.5
    assert torch.equal(one["norm.weight"], torch.ones(8))
    assert torch.equal(one["table"], torch.arange(32.0).view(8, 4))
    assert torch.equal(one["assigned"], torch.arange(6.0))
    assert not torch.equal(other["added"], one["added"])


def test_initializers_of_all_kinds_give_the_same_values_on_every_rank_and_mesh(pool):
    pool.run(deferred)


WRITES: list[Callable[[nn.Module], object]] = [
    lambda self: [nn.init.xavier_uniform_(part) for part in self.w.chunk(3)],
    lambda self: self.w.view(-1).normal_(),
    lambda self: self.w[1:5][1:3].zero_(),
    lambda self: self.w.T[2].zero_(),
]


@pytest.mark.parametrize("write", WRITES)
def test_what_an_initializer_writes_to_a_part_of_a_parameter_is_refused_and_not_lost(write):
    with axes.simulate(2), axes.init_mesh("tp=2", device_type="cpu") as mesh:
        with torch.device("meta"):
            model = type("Made", (nn.Module,), {"reset_parameters": write})()
            model.w = nn.Parameter(torch.empty(6, 4))
        with pytest.raises(ShardingError, match="of a part of w: an initializer draws and fills a whole parameter"):
            axes.shard_module(model, {"w": "a@tp b"}, mesh)


def test_a_parameter_with_values_keeps_them_beside_a_deferred_one():
    with axes.simulate(2), axes.init_mesh("tp=2", device_type="cpu") as mesh:
        layer = nn.Linear(4, 4)
        weight = layer.weight.detach().clone()
        layer.bias = nn.Parameter(torch.empty(4, device="meta"))
        axes.shard_module(layer, {"*": "..."}, mesh)
        assert torch.equal(layer.weight.to_local(), weight)


class Mixed(nn.Module):
    """An embedding, layers, a norm, and experts one of which is larger than what is drawn at once."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8192, 256)
        self.up, self.down, self.norm = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.LayerNorm(256)
        self.experts = nn.Parameter(torch.empty(2, 512, 1024))

    def reset_parameters(self):
        nn.init.trunc_normal_(self.experts, std=0.02)


def test_a_rank_never_has_more_than_its_shards_and_a_fifth_beside_the_largest():
    """In bytes that torch's allocator counts: what is left, and the most that there was until then."""
    specs = {"embedding.weight": "v@tp d", "up.*": "f@tp ...", "down.weight": "d f@tp", "experts": "e d@dp f@tp"}
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu") as mesh:
        with torch.device("meta"):
            model = Mixed()
        gc.collect()  # what other tests left would go meanwhile, and count
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            axes.shard_module(model, {**specs, "*": "..."}, mesh)
        events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
        live = most = 0
        for event in sorted(events, key=lambda each: each.start_ns()):
            live += event.nbytes()
            most = max(most, live)
        shards = [parameter.to_local().nbytes for parameter in model.parameters()]
    assert sum(shards) <= live < 1.01 * sum(shards)
    assert most <= 1.2 * (sum(shards) + max(shards))
