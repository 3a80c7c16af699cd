"""A sharded module is the module that it was: values, ties, gradients, on any mesh."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import axes
from axes.algebra.errors import AxesError, ShardingError, SizeError
from axes.algebra.logical import Rules, use_rules
from axes.nn.annotations import annotate, annotated
from axes.nn.constrain import constrain
from axes.nn.shard_module import shard_module
from tests.conftest import takes_factors


class Block(nn.Module):
    def __init__(self, embed: int = 8, heads: int = 4, mlp: int = 12):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(embed)
        self.qkv = nn.Linear(embed, 3 * embed, bias=False)
        self.out = nn.Linear(embed, embed, bias=False)
        self.up, self.down = nn.Linear(embed, mlp), nn.Linear(mlp, embed)
        self.register_buffer("scale", torch.ones(embed))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(q * torch.sigmoid(k) + v)
        return x + self.scale * self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks.append(self.blocks[0])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def reset_parameters(self):
        """Nothing of its own."""


SPECS = {
    "*.qkv.weight": "(three heads head_dim) embed",
    "*.out.weight": "embed (heads head_dim)",
    "*.up.weight": "mlp embed",
    "*.up.bias": "mlp",
    "*.down.weight": "embed mlp",
    "*": "...",
}
SIZES = {"three": 3, "heads": 4}
TABLES = {
    "dp=2 tp=2": Rules(mlp="tp", heads="tp", three=None, head_dim=None, embed=None),
    "dp tp=4": Rules(mlp=("tp", "dp"), heads="tp", embed="dp", three=None, head_dim=None),
    "dp=4 tp": Rules([("mlp", "dp"), ("embed", ("dp", "tp")), ("...", None)]),
}


def values_and_gradients(text: str) -> list[str]:
    wrong = []
    torch.manual_seed(3)
    whole = Model().double()
    tokens = torch.arange(24).view(4, 6) % 16
    whole(tokens).square().sum().backward()
    torch.manual_seed(3)
    mesh = axes.init_mesh(text, device_type="cpu")
    model = Model().double()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    with use_rules(TABLES[text]):
        assert shard_module(model, SPECS, mesh, sizes=SIZES) is model
    if [name for name, _ in model.named_parameters(remove_duplicate=False)] != names:
        wrong.append("names")
    if model.head.weight is not model.embedding.weight or model.blocks[2] is not model.blocks[0]:
        wrong.append("ties")
    model(axes.shard(tokens, "b s", mesh=mesh)).square().sum().backward()
    for (name, had), (_, has) in zip(whole.named_parameters(), model.named_parameters(), strict=True):
        if not isinstance(has, nn.Parameter) or not torch.equal(axes.unshard(has.detach()), had):
            wrong.append(f"{name}: value")
        if axes.sharding_of(has.grad) != axes.sharding_of(has):
            wrong.append(f"{name}: {axes.spec_of(has.grad)} is the gradient of {axes.spec_of(has)}")
        if not torch.allclose(axes.unshard(has.grad), had.grad, rtol=1e-12, atol=1e-12):
            wrong.append(f"{name}: gradient")
    return wrong


@pytest.mark.parametrize(
    "text", [pytest.param("dp=2 tp=2", marks=takes_factors), pytest.param("dp tp=4", marks=takes_factors), "dp=4 tp"]
)
def test_values_ties_and_gradients_are_those_of_one_device(world, text):
    assert world(values_and_gradients, 4, text) == [[]] * 4


def placed(text: str) -> dict[str, str]:
    mesh = axes.init_mesh(text, device_type="cpu")
    model = shard_module(Model(), SPECS, mesh, TABLES[text], sizes=SIZES)
    return {name: axes.spec_of(x) for name, x in [*model.named_parameters(), *model.named_buffers()]}


def test_each_tensor_lies_where_the_rules_put_it(world):
    (found, *others) = world(placed, 4, "dp tp=4")
    assert others == [found] * 3
    assert found["blocks.0.qkv.weight"] == "(3 inner0@tp) _@dp"
    assert found["blocks.1.out.weight"] == "_@dp _@tp"
    assert found["blocks.0.up.weight"] == "_@(dp tp) _"
    assert found["embedding.weight"] == "_ _"
    assert found["blocks.0.scale"] == "_"


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8, padding_idx=3)
        self.up = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(8)
        self.own = nn.Parameter(torch.empty(6, 4))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.empty(5))

    def reset_parameters(self):
        nn.init.trunc_normal_(self.own, std=0.5)
        self.table.copy_(torch.arange(5.0)) if not isinstance(self.table, DTensor) else self.table.fill_(2.0)


def deferred(text: str, specs: dict[str, str], seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed + (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0))
    mesh = axes.init_mesh(text, device_type="cpu")
    if mesh.rank == 0:
        torch.manual_seed(seed)
    with torch.device("meta"):
        model = Deep()
    shard_module(model, specs, mesh)
    assert model.head.weight is model.embedding.weight
    return {name: axes.unshard(x.detach()) for name, x in [*model.named_parameters(), *model.named_buffers()]}


def test_deferred_parameters_have_the_same_values_on_every_mesh(world):
    (one,) = world(deferred, 1, "dp", {"*": "..."}, 7)
    assert one["embedding.weight"].std() > 0.5
    assert not one["embedding.weight"][3].any()
    assert one["up.weight"].abs().max() <= 8**-0.5
    assert one["up.weight"].abs().max() > 0.8 * 8**-0.5
    assert one["own"].abs().max() <= 2
    assert torch.equal(one["norm.weight"], torch.ones(8))
    assert torch.equal(one["table"], torch.full((5,), 2.0))
    for text, specs in (
        ("dp=2 tp=2", {"embedding.weight": "v@tp e@dp", "up.*": "f@(tp dp) ...", "*": "..."}),
        ("tp=4", {"own": "a@tp b", "up.weight": "f e@tp", "*": "..."}),
        ("pp=4", {"norm.*": "e@pp", "table": "n@pp", "*": "..."}),
    ):
        for found in world(deferred, 4, text, specs, 7):
            assert found.keys() == one.keys()
            for name, value in found.items():
                assert torch.equal(value, one[name]), (text, name)
    (other,) = world(deferred, 1, "dp", {"*": "..."}, 8)
    assert not torch.equal(other["own"], one["own"])


def on_two_meshes(text: str, equation: str, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    mesh = axes.init_mesh(text, equation, device_type="cpu", **sizes)
    torch.manual_seed(5)
    with torch.device("meta"):
        model = nn.ModuleDict({"dense": nn.Linear(8, 8), "experts": nn.Linear(8, 4, bias=False)})
    dense, sparse = mesh["dp", "tp"], mesh["edp", "ep"]
    specs = {"dense.weight": "f@tp e", "*.bias": "f@tp", "experts.*": "n@ep e@edp"}
    shard_module(model, specs, {"experts.*": sparse, "*": dense})
    assert axes.sharding_of(model["dense"].weight).mesh == dense
    assert axes.sharding_of(model["experts"].weight).mesh == sparse
    assert model["experts"].weight.placements == sparse.sharding("n@ep e@edp").placements
    return {name: axes.unshard(p.detach()) for name, p in model.named_parameters()}


def test_parameters_lie_on_the_meshes_of_their_names_with_values_of_one_device(world):
    (one,) = world(on_two_meshes, 1, "dp=1 tp=1", "(dp tp) = edp ep", {"ep": 1})
    for found in world(on_two_meshes, 4, "dp=2 tp=2", "(dp tp) = edp ep", {"ep": 4}):
        assert all(torch.equal(found[name], one[name]) for name in one)
    torch.manual_seed(5)
    with axes.simulate(1), axes.init_mesh("dp=1"):
        with torch.device("meta"):
            model = nn.ModuleDict({"dense": nn.Linear(8, 8), "experts": nn.Linear(8, 4, bias=False)})
        shard_module(model, {"*": "..."})
        assert all(torch.equal(axes.unshard(p.detach()), one[name]) for name, p in model.named_parameters())


def parts_of_a_model() -> None:
    """A pipeline stage takes the specs of the whole model: what it lacks is registered as None."""
    mesh = axes.init_mesh("pp=2 tp=2", device_type="cpu")
    stage = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    stage[mesh.axis("pp").index].weight = None
    shard_module(stage, {"0.weight": "f@tp e", "1.weight": "f e@tp", "*.bias": "f@tp"}, mesh["tp"])
    have = {name for name, _ in stage.named_parameters()}
    assert have == {f"{1 - mesh.axis('pp').index}.weight", "1.bias"}
    with pytest.raises(axes.ShardingError, match=r"no parameter or buffer matches\n  '2.weight'"):
        shard_module(nn.Sequential(nn.Linear(8, 8, bias=False)), {"2.weight": "f@tp e", "*": "..."}, mesh["tp"])


def test_a_pattern_may_be_of_what_a_module_has_registered_as_none(world):
    world(parts_of_a_model, 4)


def test_annotations_are_read_and_patterns_go_before_them(world):
    assert world(by_annotation, 2) == [["_@tp _", "_", "_ _@tp"]] * 2


def by_annotation() -> list[str]:
    model = nn.Sequential(
        annotate(nn.Linear(4, 6), {"weight": "mlp embed", "bias": "embed"}), nn.Linear(6, 4, bias=False)
    )
    annotate(model[1].weight, "embed mlp")
    assert annotated(model) == {"0.weight": "mlp embed", "0.bias": "embed", "1.weight": "embed mlp"}
    mesh = axes.init_mesh("tp=2", device_type="cpu")
    rules = Rules(mlp="tp", embed=None)
    shard_module(model, {"0.bias": "embed"}, mesh, rules)
    return [axes.spec_of(p) for p in model.parameters()]


def constrained() -> list[str]:
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    whole = torch.arange(24.0).view(4, 6)
    found = []
    with use_rules(Rules(batch="dp", embed="tp", heads="tp", k=None)):
        x = axes.shard(whole, "b@tp e", mesh=mesh)
        for spec, sizes in (("batch embed", {}), ("batch (heads k)", {"heads": 2}), ("batch (heads k)", {"heads": 3})):
            y = constrain(x, spec, **sizes)
            assert torch.equal(axes.unshard(y), whole)
            found.append(axes.spec_of(y))
        with use_rules(Rules(batch=("tp", "dp"), embed=None)):
            found.append(axes.spec_of(constrain(x, "batch embed")))
        y = axes.shard(whole, "batch (heads k)", mesh=mesh, heads=2)
        assert torch.equal(axes.unshard(y), whole)
        found.append(axes.spec_of(y))
        with pytest.raises(ShardingError, match="no rule is about 'model'"):
            axes.shard(whole, "batch model", mesh=mesh)
        compiled = torch.compile(lambda x: constrain(x, "batch embed") * 2, backend="eager", fullgraph=True)
        assert torch.equal(axes.unshard(compiled(x)), 2 * whole)
        found.append(axes.spec_of(compiled(x)))
    return found


def test_a_constraint_is_where_the_rules_put_its_names(world):
    assert world(constrained, 4) == [["_@dp _@tp", "_@dp _@tp", "_@dp _", "_@(tp dp) _", "_@dp _@tp", "_@dp _@tp"]] * 4


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except AxesError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def mistakes() -> dict[str, str]:
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    rules = Rules(mlp="tp", embed=None)

    def tied():
        model = Model()
        return shard_module(model, {"embedding.weight": "v@tp e", "head.weight": "v e@tp", "*": "..."}, mesh)

    def twice():
        model = shard_module(nn.Linear(4, 4), {"*": "..."}, mesh)
        shard_module(model, {"*": "..."}, mesh)

    def never():
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.gain = nn.Parameter(torch.empty(4))

        with torch.device("meta"):
            model = Own()
        shard_module(model, {"*": "..."}, mesh)

    def drawn():
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.gain = nn.Parameter(torch.empty(4))

            def reset_parameters(self):
                self.gain.exponential_()

        with torch.device("meta"):
            model = Odd()
        shard_module(model, {"*": "..."}, mesh)

    linear = nn.Linear(4, 6)
    before = {name: id(p) for name, p in linear.named_parameters()}
    found = {
        "uncovered": said(lambda: shard_module(linear, {"weight": "a b"}, mesh)),
        "no match": said(lambda: shard_module(linear, {"*": "...", "wieght": "a b"}, mesh)),
        "unknown axis": said(lambda: shard_module(linear, {"weight": "a@pt b", "*": "..."}, mesh)),
        "missing axis": said(lambda: shard_module(linear, {"*": "..."}, mesh, Rules(mlp="pp", embed=None))),
        "doesn't divide": said(lambda: shard_module(linear, {"weight": "(h@tp k) e", "*": "..."}, mesh, h=3)),
        "size of nothing": said(lambda: shard_module(linear, {"*": "..."}, mesh, heads=3)),
        "no rule": said(lambda: shard_module(linear, {"weight": "mlp embd", "*": "..."}, mesh, rules)),
        "dims": said(lambda: shard_module(linear, {"weight": "mlp", "*": "..."}, mesh, rules)),
        "tied": said(tied),
        "too wide": said(lambda: shard_module(Model(), {"*.weight": "a@tp b", "*": "..."}, mesh)),
        "twice": said(twice),
        "never made": said(never),
        "drawn otherwise": said(drawn),
        "no mesh": said(lambda: shard_module(linear, {"*": "..."})),
        "no mesh for a name": said(lambda: shard_module(linear, {"*": "..."}, {"wei*": mesh["tp"]})),
        "no name for a mesh": said(lambda: shard_module(linear, {"*": "..."}, {"wieght": mesh["tp"], "*": mesh})),
        "no meshes": said(lambda: shard_module(linear, {"*": "..."}, {})),
        "another's mesh": said(lambda: shard_module(linear, {"*": "..."}, {"*": mesh.device_mesh})),
        "no module": said(lambda: shard_module(linear.weight, {"*": "..."}, mesh)),
        "pending": said(lambda: shard_module(linear, {"bias": "a | sum@tp", "*": "..."}, mesh)),
        "no rules": said(lambda: constrain(axes.zeros("a", mesh=mesh, a=4), "a")),
        "plain": said(lambda: constrain(torch.zeros(4), "a", rules=rules)),
        "annotated": said(lambda: annotate(linear, {"wait": "a b"})),
        "annotated dims": said(lambda: annotate(linear.weight, "a")),
    }
    assert {name: id(p) for name, p in linear.named_parameters()} == before
    return found


SAYS = {
    "uncovered": r"ShardingError: no pattern or annotation is about\n  bias  \[6\]\n.*'\*': '...'",
    "no match": r"ShardingError: no parameter or buffer matches\n  'wieght', did you mean 'weight'|; did you mean",
    "unknown axis": r"weight \[6, 4\], 'a@pt b': the mesh has no axis 'pt'",
    "missing axis": r"the rule mlp=pp names an axis that .* doesn't have",
    "doesn't divide": r"weight \[6, 4\].*3 doesn't divide into 2 parts",
    "size of nothing": r"SizeError: a size is given for 'heads', which isn't in any spec",
    "no rule": r"weight \[6, 4\], 'mlp embd': no rule is about 'embd'; did you mean 'embed'",
    "dims": r"weight \[6, 4\], 'mlp': the spec 'mlp' has 1 dims, the tensor 2",
    "tied": r"one tensor under 2 names, tied, has two specs:\n  embedding.weight  v@tp e .*\n  head.weight  v e@tp",
    "too wide": r"blocks.0.norm.weight \[8\], 'a@tp b': the spec 'a@tp b' has 2 dims, the tensor 1: \[8\]\nblocks.0.norm."
    r"weight is of LayerNorm, and '\*.weight' is about it; if that is too wide, put 'blocks.0.norm.weight' before it",
    "twice": r"weight is sharded already",
    "never made": r"no initializer makes  gain\n",
    "drawn otherwise": r"exponential_ of gain: random values",
    "no mesh": r"MeshError: axes.shard_module needs a mesh",
    "no mesh for a name": r"no pattern of mesh= is about\n  bias  \[6\]\n.*'\*': mesh",
    "no name for a mesh": r"no parameter or buffer matches\n  'wieght', did you mean 'weight'|; did you mean",
    "no meshes": r"mesh={} names no mesh",
    "another's mesh": r"MeshError: a mesh is an axes mesh",
    "no module": r"axes.shard_module takes a module; found Parameter",
    "pending": r"bias \[6\].*a parameter has nothing pending",
    "no rules": r"needs rules",
    "plain": r"axes.constrain takes a DTensor; found Tensor",
    "annotated": r"Linear has no parameter or buffer 'wait'",
    "annotated dims": r"the tensor has 2 dims, \[6, 4\]; the annotation 'a' has 1",
}


def test_names_of_a_tied_tensor_may_say_the_same_in_other_words(capsys):
    rules = Rules(vocab=("tp", "dp"), v="tp", words="tp", embed=None, e=None)
    other = {"embedding.weight": "vocab embed", "head.weight": "v e", "*": "..."}
    for specs, given in (
        ({"embedding.weight": "v@tp embed", "head.weight": "vocab@tp _", "*": "..."}, None),
        ({"embedding.weight": "(v k)@tp e", "head.weight": "v@tp e", "*": "..."}, None),
        ({"embedding.weight": "v embed", "head.weight": "words e", "*": "..."}, rules),
    ):
        for mesh in (axes.Mesh("dp=2 tp=2"), {"embed*": axes.Mesh("dp=2 tp=2"), "*": axes.Mesh("dp=2 tp=2")}):
            shard_module(Model(), specs, mesh, given, dry_run=True)
            assert "  8x8  " in capsys.readouterr().out.splitlines()[1]
    with pytest.raises(ShardingError, match="tied, has two specs"):
        shard_module(Model(), other, axes.Mesh("dp=2 tp=2"), rules, dry_run=True)


def test_a_strict_rule_that_does_not_divide_names_the_parameter_its_dim_and_the_axes(capsys):
    mesh, specs = axes.Mesh("dp=2 tp=4"), {"weight": "heads embed", "bias": "heads"}
    table = [("heads", ("dp", "tp")), ("heads", "dp"), ("embed", None)]
    strict, loose = Rules(table, strict=True), Rules(table)
    assert strict != loose
    assert repr(strict) == f"{repr(loose)[:-1]}, strict=True)"
    assert eval(repr(strict), {"Rules": Rules}) == strict
    shard_module(nn.Linear(4, 6), specs, mesh, loose, dry_run=True)
    assert "heads@dp embed" in capsys.readouterr().out
    with pytest.raises(SizeError) as caught:
        shard_module(nn.Linear(4, 6), specs, mesh, strict, dry_run=True)
    assert str(caught.value).startswith(
        "weight [6, 4], 'heads embed': the rule heads=(dp tp) is strict: 6 doesn't divide into 8 parts\n  heads embed\n"
        "  ^^^^^\nwrite a size that divides, other axes, or heads=None; rules that aren't strict leave it whole"
    )
    assert strict.spec("heads embed", mesh, (16, 4)) == loose.spec("heads embed", mesh, (16, 4))
    assert strict.spec("heads embed", mesh) == "heads@(dp tp) embed"
    assert "error" in strict.explain("heads embed", mesh, (6, 4))
    with pytest.raises(ShardingError, match="strict is True or False; found 'yes'"):
        Rules(table, strict="yes")


def test_each_mistake_gets_one_clear_message_and_changes_nothing(world):
    (found, *others) = world(mistakes, 4)
    assert others == [found] * 3
    assert found.keys() == SAYS.keys()
    for what, pattern in SAYS.items():
        assert re.search(pattern, found[what], re.DOTALL), (what, found[what])


def test_a_dry_run_prints_what_each_rank_would_hold_and_changes_nothing(capsys):
    model = Model()
    mesh = axes.Mesh("dp=2 tp=2", ranks=range(4))
    rules = Rules(mlp="tp", heads="tp", three=None, head_dim=None, embed=None, vocab="dp")
    shard_module(model, SPECS, mesh, rules, dry_run=True, sizes=SIZES)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"embedding.weight = head.weight +\.\.\. +_ _ +16x8 +512", lines[1]), lines[1]
    qkv = next(line for line in lines if line.startswith("blocks.0.qkv.weight"))
    assert re.search(
        r"= blocks.2.qkv.weight +\(three heads head_dim\) embed +\(three=3 heads=4@tp head_dim=2\) embed +12x8 +384",
        qkv,
    )
    assert lines[-2].startswith("total")
    assert int(lines[-2].split()[-1].replace(",", "")) == sum(
        int(line.split()[-1].replace(",", "")) for line in lines[1:-2]
    )
    assert lines[-1] == "rules that no parameter uses: vocab=dp"
    assert not any(isinstance(p, DTensor) for p in model.parameters())


class Initialized(nn.Module):
    """Initializers in all the ways that people write them."""

    def __init__(self):
        super().__init__()
        self.cut = nn.Parameter(torch.empty(64, 8))
        self.added = nn.Parameter(torch.empty(6, 4))
        self.attention = nn.MultiheadAttention(8, 2)
        self.register_buffer("table", torch.empty(8, 4))
        self.register_buffer("assigned", torch.empty(6))

    def reset_parameters(self):
        nn.init.trunc_normal_(self.cut, std=1.0, a=-0.5, b=0.5)
        self.added.data.zero_()
        self.added.add_(torch.randn_like(self.added))
        self.table.copy_(torch.arange(32.0).view(8, 4))
        self.assigned = torch.arange(6.0)


def initialized(text: str, specs: dict[str, str]) -> dict[str, torch.Tensor]:
    mesh = axes.init_mesh(text, device_type="cpu")
    torch.manual_seed(11 if mesh.rank == 0 else 100 + mesh.rank)
    with torch.device("meta"):
        model = Initialized()
    shard_module(model, specs, mesh)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert all(isinstance(x, DTensor) for _, x in tensors)
    return {name: axes.unshard(x.detach()) for name, x in tensors}


def test_initializers_of_all_kinds_give_the_same_values_on_every_rank_and_mesh(world):
    (one,) = world(initialized, 1, "dp=1", {"*": "..."})
    assert one["cut"].abs().max() <= 0.5
    assert one["added"].std() > 0.5
    assert torch.equal(one["table"], torch.arange(32.0).view(8, 4))
    assert torch.equal(one["assigned"], torch.arange(6.0))
    for text, specs in (
        ("dp=2 tp=2", {"cut": "a@tp b@dp", "table": "a@tp b", "assigned": "a@tp", "*": "..."}),
        ("tp=4", {"*": "..."}),
    ):
        for found in world(initialized, 4, text, specs):
            assert [name for name in one if not torch.equal(found[name], one[name])] == []


def lost() -> list[str]:
    mesh = axes.init_mesh("tp=2", device_type="cpu")

    def made(reset):
        kind = type("Made", (nn.Module,), {"reset_parameters": reset})
        with torch.device("meta"):
            model = kind()
            model.w = nn.Parameter(torch.empty(6, 4))
        shard_module(model, {"w": "a@tp b"}, mesh)

    writes = (
        lambda self: [nn.init.xavier_uniform_(part) for part in self.w.chunk(3)],
        lambda self: self.w.view(-1).normal_(),
        lambda self: self.w[1:5][1:3].zero_(),
        lambda self: self.w.T[2].zero_(),
    )
    return [said(lambda write=write: made(write)) for write in writes]


def test_what_an_initializer_writes_to_a_part_of_a_parameter_is_refused_and_not_lost(world):
    for found in world(lost, 2):
        assert all("of a part of w: an initializer draws and fills a whole parameter" in text for text in found), found


def with_values() -> bool:
    mesh = axes.init_mesh("tp=2", device_type="cpu")
    layer = nn.Linear(4, 4)
    weight = layer.weight.detach().clone()
    layer.bias = nn.Parameter(torch.empty(4, device="meta"))
    shard_module(layer, {"*": "..."}, mesh)
    return torch.equal(axes.unshard(layer.weight.detach()), weight)


def test_a_parameter_with_values_keeps_them_beside_a_deferred_one(world):
    assert world(with_values, 2) == [True, True]


def test_patterns_of_meshes_that_never_apply_or_disagree_are_refused():
    with axes.simulate(4):
        mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        with pytest.raises(ShardingError, match=r"the pattern '0\.\*' never applies: '\*' stands before it"):
            shard_module(model, {"*": "..."}, {"*": mesh["tp"], "0.*": mesh["dp"]})
        model[1].weight = model[0].weight
        with pytest.raises(ShardingError, match="tied, has two meshes"):
            shard_module(model, {"*": "..."}, {"0.*": mesh["tp"], "*": mesh["dp"]})
        assert not any(isinstance(p, DTensor) for p in model.parameters())
