"""A module whose forward is a region is the function of one device: values, all gradients, and what is around it."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import axes
from axes import shard_module
from tests.common import case, error_of


class Attention(nn.Module):
    def __init__(self, embed: int, heads: int):
        super().__init__()
        self.k = embed // heads
        self.qkv = nn.Linear(embed, 3 * embed, bias=False)
        self.out = nn.Linear(embed, embed, bias=False)

    def forward(self, x):
        q, k, v = axes.rearrange(self.qkv(x), "b s (three h k) -> three b h s k", three=3, k=self.k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(axes.rearrange(y, "b h s k -> b s (h k)"))


class Block(nn.Module):
    """Sequence parallel around, tensor parallel inside, where `tp` is an axis; else plain."""

    def __init__(self, embed: int = 8, heads: int = 4, mlp: int = 16, parallel: bool = False):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(embed), nn.RMSNorm(embed)
        self.attention = Attention(embed, heads)
        self.up, self.down = nn.Linear(embed, mlp), nn.Linear(mlp, embed, bias=False)
        self.register_buffer("scale", torch.full((embed,), 0.5))
        self.parallel = parallel

    def gathered(self, x):
        return axes.all_gather(x, "tp", dim=1) if self.parallel else x

    def scattered(self, x):
        return axes.psum_scatter(x, "tp", dim=1) if self.parallel else x

    def forward(self, x):
        x = x + self.scattered(self.attention(self.gathered(self.norm1(x))))
        return x + self.scale * self.scattered(self.down(F.gelu(self.up(self.gathered(self.norm2(x))))))


class Model(nn.Module):
    def __init__(self, parallel: bool = False, checkpointed: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(parallel=parallel), Block(parallel=parallel)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.linear(self.norm(x), self.head.weight)


SPECS = {
    "*.qkv.weight": "(three=3 h@tp k=2) e",
    "*.out.weight": "e f@tp",
    "*.up.weight": "f@tp e",
    "*.up.bias": "f@tp",
    "*.down.weight": "e f@tp",
    "*": "...",
}
TOKENS = (torch.arange(32).view(4, 8) * 7 + torch.arange(4)[:, None] * 5) % 16  # no two rows are alike


def weights(shape) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def reference() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    model = Model().double()
    y = model(TOKENS)
    (y * weights(y.shape)).sum().backward()
    return y.detach(), {name: p.grad for name, p in model.named_parameters()}


def compared(model: nn.Module, mesh: axes.Mesh) -> None:
    """A pass forward and back, beside that of one device."""
    expected, wanted = reference()
    y = model(axes.shard(TOKENS, "b@dp s@tp", mesh=mesh))
    (y * axes.shard(weights(y.shape), "b@dp s@tp v", mesh=mesh)).sum().backward()
    assert torch.allclose(axes.unshard(y.detach()), expected, rtol=1e-12, atol=1e-12)
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(wanted)
    for name, p in parameters.items():
        with case(f"{name}, {axes.unshard(p.grad).norm() / wanted[name].norm():.4f} times"):
            assert axes.sharding_of(p.grad) == axes.sharding_of(p)
            assert torch.allclose(axes.unshard(p.grad), wanted[name], rtol=1e-10, atol=1e-12)


def on(text: str, checkpointed: bool) -> None:
    """The region of the whole model, and of a copy of it."""
    with axes.init_mesh(text, device_type="cpu") as mesh:
        for copied in (False, True):
            torch.manual_seed(5)
            model = shard_module(Model(parallel=True, checkpointed=checkpointed).double(), SPECS)
            model = axes.shard_map(model, "b@dp s@tp -> b@dp s@tp v")
            compared(copy.deepcopy(model) if copied else model, mesh)


@pytest.mark.parametrize(("text", "checkpointed"), [("dp=2 tp=2", True), ("dp=1 tp=4", False), ("dp=4 tp=1", False)])
def test_values_and_gradients_are_those_of_one_device(warm, text, checkpointed):
    warm(on, 4, text, checkpointed)


class Assigning(nn.Linear):
    """Changes its parameter in the forward pass."""

    how = ""

    def __init__(self):
        super().__init__(8, 8, bias=False)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        if self.how == "data":
            self.weight.data = self.weight.data + 1
        if self.how == "del":
            del self.weight
        return axes.psum(x if self.how == "del" else super().forward(x), "tp") * self.scale


def changed(how: str) -> None:
    """A parameter that is changed between the forward and the backward pass, or in the forward one."""
    with axes.init_mesh("tp=2", device_type="cpu"):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), Assigning())
        model[2].how = how
        region = axes.shard_map(
            shard_module(model, {"0.weight": "f@tp e", "2.weight": "e f@tp", "*": "e"}), "b e -> b e"
        )
        optimizer = axes.nn.local_optimizer(torch.optim.SGD, region.parameters(), lr=0.1)

        def trained() -> None:
            for last in (False, True):
                y = region(axes.shard(torch.linspace(-1, 1, 16).view(2, 8), "b e"))
                if last and how == "load":
                    region.load_state_dict({name: p.detach() + 1 for name, p in region.state_dict().items()})
                elif last and how == "buffer":
                    model[2].scale.mul_(2)
                elif last:
                    optimizer.step()
                axes.unshard(y).sum().backward()

        with pytest.raises((RuntimeError, axes.AxesError), match=CHANGED[how]):
            trained()
        assert all(isinstance(p, DTensor) for p in region.parameters())


CHANGED = {
    "step": "modified (by an )?inplace",
    "load": "modified (by an )?inplace",
    "buffer": "modified (by an )?inplace",
    "data": "forward assigned to the data of 'weight'",
    "del": "forward put another tensor in the place of 'weight'",
}


@pytest.mark.parametrize("how", CHANGED)
def test_a_parameter_that_is_changed_where_it_can_not_be_is_refused(warm, how):
    warm(changed, 2, how)


class Loss(nn.Module):
    """Megatron's way: what is replicated over tp is the same on every rank, and so are its gradients."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 8))
        self.reentrant = None

    def forward(self, x):
        h = self.norm(x) if self.reentrant is None else checkpoint(self.norm, x, use_reentrant=self.reentrant)
        h = axes.rearrange(h, "b d | same@tp -> b d")
        y = axes.rearrange(self.down(F.gelu(self.up(h))), "b d | sum@tp -> b d | same@tp")
        return x + y + self.bias


def the_same(reentrant: bool | None) -> None:
    torch.manual_seed(1)
    whole = Loss().double()
    x = torch.linspace(-2, 3, 32, dtype=torch.float64).view(4, 8).requires_grad_()
    y = x + whole.down(F.gelu(whole.up(whole.norm(x)))) + whole.bias
    (y * weights(y.shape)).sum().backward()
    with axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        model = shard_module(copy.deepcopy(whole), {"up.*": "f@tp ...", "down.weight": "e f@tp", "*": "..."})
        model.zero_grad()
        model.reentrant = reentrant
        axes.shard_map(model, "b@dp d | same@tp -> b@dp d | same@tp", check=True)
        sharded = axes.shard(x.detach().requires_grad_(), "b@dp d")
        z = model(sharded)
        (z * axes.shard(weights(y.shape), "b@dp d")).sum().backward()
        assert torch.allclose(axes.unshard(z.detach()), y.detach())
        pairs = [("input", sharded, x), *((n, p, whole.get_parameter(n)) for n, p in model.named_parameters())]
        for name, mine, theirs in pairs:
            with case(name):
                assert torch.allclose(axes.unshard(mine.grad), theirs.grad)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_parameters_of_a_region_that_is_the_same_over_an_axis_are_so_as_well(warm, reentrant):
    warm(the_same, 4, reentrant)


class Within(nn.Module):
    """A region around a region, which takes a tuple of plain tensors, and a buffer that forward assigns."""

    def __init__(self):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 8), Attention(8, 4), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, pair):
        x, y = pair
        self.calls = self.calls + 1
        return self.last(self.part(torch.tanh(self.first(x)))) + y


def nested(plain: bool) -> None:
    torch.manual_seed(2)
    whole, x = Within().double(), weights((4, 8, 8))
    whole((x, x)).square().sum().backward()
    with axes.init_mesh("dp=2 tp=2", device_type="cpu") as mesh:
        model = shard_module(copy.deepcopy(whole), {"*": "..."})
        axes.shard_map(model.part, "b@dp s e -> b@dp s e")
        axes.shard_map(model, "b@dp s e, b@dp s e -> b@dp s e")
        model.zero_grad()
        shard = x[mesh.sharding("b@dp").local_indices((4,))] if plain else axes.shard(x, "b@dp s e")
        model((shard, shard)).square().sum().backward()  # of plain shards each rank has the loss of its rows
        for name, p in model.named_parameters():
            with case(name):
                assert torch.allclose(axes.unshard(p.grad), whole.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
        assert (axes.spec_of(model.calls), axes.unshard(model.calls)) == ("", 2)


@pytest.mark.parametrize("plain", [False, True])
def test_a_region_within_a_region_means_the_same_by_gradients_and_buffers_keep_what_is_assigned(warm, plain):
    warm(nested, 4, plain)


class Cache:
    """What keeps tensors of this rank between calls, of which torch's pytree knows nothing."""

    def __init__(self):
        self.rows = []


class Remembering(nn.Module):
    """Takes tensors by keyword, and a cache, which it returns; and holds a module under two names."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.first = self.layers[0]

    def forward(self, x, *, scale=None, cache=None, whole=False):
        y = self.first(x) if scale is None else self.first(x) * scale
        cache = Cache() if cache is None else cache
        cache.rows.append(y)
        return {"y": y if whole else self.layers[1](y)[:, -1:], "cache": cache, "none": None}


def remembering() -> None:
    torch.manual_seed(3)
    one = Remembering().double()
    x, scale = weights((4, 8, 8)), weights((4, 8, 8)).cos()
    wanted = one(x, scale=scale)["y"]
    with axes.init_mesh("dp=2 tp=2", device_type="cpu") as mesh:
        model = shard_module(copy.deepcopy(one), {"*": "..."})
        axes.shard_map(model, "b@dp s e, b@dp s e -> b@dp t e")
        rows = mesh.sharding("b@dp s e").local_indices((4, 8, 8))
        whole = [axes.shard(each, "b@dp s e") for each in (x, scale)]
        for (given, other), grad in itertools.product(((x[rows], scale[rows]), whole), (False, True)):
            cache = Cache()
            with torch.set_grad_enabled(grad):
                found = model(given, scale=other, cache=cache)
            y = found["y"] if isinstance(found["y"], DTensor) else axes.from_local(found["y"].detach(), "b@dp t e")
            assert torch.allclose(axes.unshard(y), wanted)
            assert (found["cache"], found["none"], type(cache.rows[0]), cache.rows[0].shape) == (
                cache,
                None,
                torch.Tensor,
                (2, 8, 8),
            )
            said = error_of(lambda: model(x[rows], scale=scale[rows]))
            assert (
                "the function returned a value of type tests.test_module_regions.Cache, in which a region can't see"
                in said
            )
            assert "or make the Cache outside and pass it: an argument may be returned" in said
            assert "called with 1 tensors, and the left side has 2 specs" in error_of(
                lambda: model(x[rows], cache=Cache())
            )
            assert "has 3 dims, the tensor 2" in error_of(
                lambda: model(x[rows][0], scale=scale[rows][0], cache=Cache())
            )
        assert all(isinstance(p, DTensor) for p in model.parameters())
    region = copy.deepcopy(axes.shard_map(Remembering(), "b s e -> b t e"))
    assert list(inspect.signature(region.forward).parameters) == ["x", "scale", "cache", "whole"]
    again = pickle.loads(pickle.dumps(axes.shard_map(nn.Sequential(nn.Linear(2, 2)), "b d -> b d")))
    assert axes.shard_map(again, "b d -> b d") is again
    assert "is a region already, of 'b d -> b d'" in error_of(lambda: axes.shard_map(again, "b@dp d -> b@dp d"))


def test_a_module_takes_keywords_returns_what_it_was_given_and_can_be_copied(warm):
    warm(remembering, 4)


class Own(nn.Module):
    """Returns what it has: a parameter, a part of it, a buffer, one that it assigns, and one that nobody has sharded."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))
        self.register_buffer("table", torch.ones(4, 2))
        self.register_buffer("last", torch.ones(4, 2))

    def forward(self, x):
        self.last = x * 2
        return self.weight, self.weight[:1], self.table.mT, self.last, self.plain


OWN = "a@tp b -> a@tp b, r b, b a@tp, a@tp b, a@tp b"


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_what_a_module_has_and_returns_is_copied(grad, plain):
    with axes.simulate(2), axes.init_mesh("tp=2", device_type="cpu"):
        model = shard_module(Own(), {"*": "a@tp b"})
        model.register_buffer("plain", torch.ones(2, 2))
        axes.shard_map(model, OWN)
        x = axes.ones("a@tp b", a=4, b=2)
        with torch.set_grad_enabled(grad):
            results = model(x.to_local() if plain else x)
        assert [type(y) for y in results] == [torch.Tensor if plain else DTensor] * 5
        with torch.no_grad():
            for y in results:
                y.zero_()
        for held in (*model.parameters(), *model.buffers()):
            assert (held.to_local() if isinstance(held, DTensor) else held).all()


def replaced() -> None:
    """A parameter or a buffer that isn't what was sharded, and a region inside a region that differs in what is the same."""
    with axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        x, plain = axes.ones("a@tp b", a=4, b=2), torch.ones(4, 2)

        def made() -> nn.Module:
            model = axes.shard_map(shard_module(Own(), {"*": "a@tp b"}), OWN)
            model.register_buffer("plain", torch.ones(2, 2))
            return model

        changes = {
            "weight": lambda m: m.load_state_dict(
                {**dict.fromkeys(("weight", "table", "last"), plain), "plain": torch.ones(2, 2)}, assign=True
            ),
            "weight ": lambda m: setattr(m, "weight", nn.Parameter(plain)),
            "table": lambda m: setattr(m, "table", plain),
        }
        for (name, change), grad in itertools.product(changes.items(), (False, True)):
            model = made()
            change(model)
            with torch.set_grad_enabled(grad):
                said = error_of(functools.partial(model, x))
            assert (
                f"'{name.strip()}' was sharded as '_@tp _', and a plain tensor stands in its place, [4, 2], as load_st"
                in said
            )
        assert "stands in its place" in error_of(lambda: torch.func.functional_call(made(), {"weight": plain}, (x,)))
        model = made()
        model.weight = nn.Parameter(axes.shard(plain, "a@tp b"))
        assert error_of(lambda: model(x)) == "nothing"
        inner = shard_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"*": "..."})
        axes.shard_map(inner[1], "b@dp d | same@tp -> b@dp d | same@tp")
        axes.shard_map(inner, "b@dp d -> b@dp d")
        assert "a region inside a region: its inputs are the same over tp" in error_of(lambda: inner(torch.ones(2, 4)))
        assert all(isinstance(p, DTensor) for p in inner.parameters())


def test_a_plain_tensor_in_the_place_of_a_shard_is_refused_with_gradients_or_without(warm):
    warm(replaced, 4)


def same_by_another_name(said: str) -> None:
    with axes.init_mesh("dp=2 cp=2", "fsdp = dp cp", device_type="cpu") as mesh:
        x, module = weights((4, 3)), axes.shard_module(nn.Linear(3, 2, bias=False).double(), {"weight": "f d"}, mesh)
        region = axes.shard_map(module, f"b d | same@{said} -> b f | same@{said}")
        region(axes.shard(x, "b d")).sum().backward()
        assert torch.allclose(axes.unshard(module.weight.grad), x.sum(0).expand(2, 3))
        module = axes.shard_module(nn.Linear(3, 2, bias=False), {"weight": "f d"}, mesh["fsdp"])
        region = axes.shard_map(module, "b d | same@dp -> b f | same@dp", mesh)
        with pytest.raises(axes.ShardingError, match="along a part of 'fsdp': put it on a mesh"):
            region(axes.shard(x.float(), "b d"))


@pytest.mark.parametrize("said", ["fsdp", "(cp dp)"])
def test_gradients_of_parameters_are_whole_where_inputs_are_same_by_the_name_of_several_axes(warm, said):
    warm(same_by_another_name, 4, said)


class Summed(nn.Module):
    """Of rows over dp and columns over tp: what is split, a sum over both, one that is left pending, one that is same."""

    def forward(self, x, scale):
        y = x.sin() * scale
        total = axes.psum((y * y).sum(), ("dp", "tp"))
        whole = axes.rearrange((y * y).sum(), "| sum@(dp tp) -> | same@(dp tp)")
        return y, total, y.cos().sum(1), whole


def plain_borders(replicated: bool, check: bool) -> None:
    """A region of plain shards: the gradients of each result beside those of one device."""
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    of_scale = "_ c@()" if replicated else "_ d@tp"
    text = f"b@dp d@tp, {of_scale} -> b@dp d@tp, , b@dp | sum@tp, | same@(dp tp)"
    rows, columns = mesh.sharding("b@dp d@tp").local_indices((4, 6))
    here = slice(None) if replicated else columns
    x, scale = weights((4, 6)), torch.full((1, 1 if replicated else 6), 1.5, dtype=torch.float64)
    mine, one = (
        [each.clone().requires_grad_() for each in pair] for pair in ((x[rows, columns], scale[:, here]), (x, scale))
    )
    y = one[0].sin() * one[1]
    wanted, parts = (y, (y * y).sum(), y.cos().sum(1), (y * y).sum()), ((rows, columns), (), (rows,), ())
    for place, (result, whole) in enumerate(
        zip(axes.shard_map(Summed(), text, mesh, check=check)(*mine), wanted, strict=True)
    ):
        weight = torch.arange(1.0, 1 + whole.numel(), dtype=torch.float64).view(whole.shape)
        dx, dscale = torch.autograd.grad(result, mine, weight[parts[place]], retain_graph=True)
        dx_of_one, dscale_of_one = torch.autograd.grad(whole, one, weight, retain_graph=True)
        with case(f"result {place}"):
            assert torch.allclose(dx, dx_of_one[rows, columns])
            assert torch.allclose(dscale, dscale_of_one[:, here])


@pytest.mark.parametrize(("replicated", "check"), [(False, False), (True, True)])
def test_gradients_of_plain_shards_are_those_of_one_device_at_each_border(warm, replicated, check):
    warm(plain_borders, 4, replicated, check)
