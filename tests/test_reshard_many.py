"""`axes.reshard` of many tensors by name: values and gradients of each by itself, in few collectives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import axes
from axes.algebra.errors import ExpressionError, MeshError, ShardingError, SizeError
from axes.runtime import torch_private

MESHES = (("dp=2 tp=4", (0, 1, 2, 3, 4, 5, 6, 7)), ("x=2 y=2 z=2", (3, 1, 0, 2, 7, 5, 4, 6)))
SPECS = ("i@{a} j", "i j@{a}", "i j", "i@{b} j@{a}", "i@({a} {b}) j", "(i=2 k@{a}) j")
PENDING = ("i j | sum@{a}", "i@{a} j | sum@{b}")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def spec_of(draw: random.Random, mesh: axes.Mesh, forms: tuple[str, ...]) -> str:
    """A spec on two axes of a mesh."""
    one, two = draw.sample(mesh.axis_names, 2)
    return draw.choice(forms).format(a=one, b=two)


def case(number: int, meshes: list[axes.Mesh]) -> list[str]:
    """What is wrong with a drawn call, there and back, against each tensor by itself."""
    draw = random.Random(number)
    source, target = draw.choice(meshes), draw.choice([None, *meshes])
    torch.manual_seed(number)
    xs: dict[str, Any] = {}
    specs: dict[str, Any] = {}
    for at in range(draw.randint(1, 6)):
        whole = torch.randint(-9, 9, (8, 8)).to(draw.choice(DTYPES))
        spec = spec_of(draw, source, PENDING if draw.random() < 0.2 else SPECS)
        # Of each rank's own values: what is pending is a sum of unlike summands.
        x = axes.shard(whole, spec.partition("|")[0], mesh=source)
        xs[f"t{at}"] = axes.from_local(x.to_local(), spec, mesh=source, shape=(8, 8)) if "|" in spec else x
        kept = target is None and draw.random() < 0.15
        specs[f"t{at}"] = "i j@* | *" if kept else spec_of(draw, target or source, SPECS)
    if draw.random() < 0.2:  # with its own mesh
        specs = {name: (target or source).sharding("i j" if "*" in spec else spec) for name, spec in specs.items()}
        target = None
    needed = {name: draw.random() < 0.7 for name in xs}
    used = {name: draw.random() < 0.8 for name in xs}
    spread = {name: draw.random() < 0.5 for name in xs}

    def one_by_one(held: dict[str, Any]) -> dict[str, Any]:
        return {name: axes.reshard(x, specs[name], mesh=target) for name, x in held.items()}

    def together(held: dict[str, Any]) -> dict[str, Any]:
        return axes.reshard(held, specs, mesh=target)

    values, gradients = [], []
    for move in (one_by_one, together):
        leaves = {name: x.detach().requires_grad_(needed[name]) for name, x in xs.items()}
        made = move({name: x * 2 if spread[name] else x for name, x in leaves.items()})
        terms = [
            (axes.unshard(y) * (at + 1)).sum().double()
            for at, (name, y) in enumerate(made.items())
            if y.requires_grad and used[name]
        ]
        if terms:
            torch.stack(terms).sum().backward()
        values.append({name: y.detach() for name, y in made.items()})
        gradients.append({name: x.grad for name, x in leaves.items()})
    return [
        f"{number} {what} {name}: {axes.spec_of(xs[name])} -> {specs[name]}"
        for what, found in (("value", values), ("gradient", gradients))
        for name in xs
        if not same(found[0][name], found[1][name])
    ]


def same(one: Any, two: Any) -> bool:
    if one is None or two is None:
        return one is two
    return axes.sharding_of(one) == axes.sharding_of(two) and torch.equal(one.to_local(), two.to_local())


def cases(first: int, count: int) -> list[str]:
    torch.set_num_threads(1)
    meshes = [axes.init_mesh(text, ranks=ranks, device_type="cpu") for text, ranks in MESHES]
    return [each for number in range(first, first + count) for each in case(number, meshes)]


def test_many_at_once_are_each_by_itself_with_gradients(pool):
    assert pool.run(cases, 0, 80, timeout=300) == [[]] * 8


def to_other_ranks() -> list[str]:
    """What is wrong on this rank with tensors that go to other ranks, and with their gradients on the way back."""
    here = axes.init_mesh("a=4", ranks=range(4), device_type="cpu")
    there = axes.init_mesh("b=2 c=2", ranks=range(2, 6), device_type="cpu")
    whole = torch.arange(64.0).view(8, 8)
    wrong = []
    leaves = [{n: axes.shard(whole, "i@a j", mesh=here).requires_grad_() for n in "st"} for _ in range(2)]
    specs = {"s": "i@b j@c", "t": "i j@(b c)"}
    if here.coordinate is None and there.coordinate is None:
        for call in (
            lambda: axes.reshard(leaves[0]["s"], specs["s"], mesh=there),
            lambda: axes.reshard(leaves[0], specs, mesh=there),
        ):
            with pytest.raises(ShardingError, match="is neither among the ranks of the source"):
                call()
        return []
    found = (
        axes.reshard(leaves[0], specs, mesh=there),
        {n: axes.reshard(x, specs[n], mesh=there) for n, x in leaves[1].items()},
    )
    for name in specs:
        one, two = (each[name].detach() for each in found)
        if not same(one, two) or one.to_local().shape != two.to_local().shape:
            wrong.append(f"{name}: {one.to_local().shape}")
    for made in found:
        torch.autograd.backward([y * 3 for y in made.values()], [torch.ones_like(y) for y in made.values()])
    wrong += [f"gradient of {n}" for n in specs if not same(leaves[0][n].grad, leaves[1][n].grad)]
    return wrong


def test_tensors_go_to_other_ranks_and_their_gradients_come_back(pool):
    assert pool.run(to_other_ranks) == [[]] * 8


def exchanges(count: int) -> tuple[int, int]:
    """How many exchanges a rank takes part in for so many tensors, forward and backward."""
    mesh = axes.init_mesh("dp=2 tp=4", device_type="cpu")
    xs = {f"t{at}": axes.shard(torch.randn(8, 8), "i@dp j@tp", mesh=mesh).requires_grad_() for at in range(count)}
    passed, sent = torch_private.pass_all, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private, "pass_all", lambda *args: (sent.append(args), passed(*args))[1])
        made = axes.reshard(xs, dict.fromkeys(xs, "i@tp j@dp"))
        there = len(sent)
        torch.stack([axes.unshard(y).sum() for y in made.values()]).sum().backward()
    assert all(torch.equal(x.grad.full_tensor(), torch.ones(8, 8)) for x in xs.values())
    return there, len(sent) - there


def test_many_go_in_one_exchange_there_and_one_back(pool):
    assert pool.run(exchanges, 40) == [(1, 1)] * 8


def test_what_cant_be_is_refused_before_anything_moves():
    with axes.simulate(8):
        mesh, other = axes.init_mesh("dp=2 tp=4"), axes.init_mesh("a=8")
        x = axes.shard(torch.zeros(8, 8), "i@dp j", mesh=mesh)
        y = axes.shard(torch.zeros(8, 8), "i j@tp", mesh=mesh)
        z = axes.shard(torch.zeros(6, 8), "i j", mesh=mesh)
        for call, error, said in (
            (lambda: axes.reshard({"x": x}, "i j"), ShardingError, "takes specs by name; found 'i j'"),
            (lambda: axes.reshard({"x": x, "y": y}, {"x": "i j"}), ShardingError, "'y' isn't in the specs"),
            (lambda: axes.reshard({"x": x}, {"x": "i j", "z": "i"}), ShardingError, "'z' isn't in the tensors"),
            (
                lambda: axes.reshard({"x": torch.zeros(2)}, {"x": "i"}),
                ShardingError,
                "as axes.shard and axes.from_local make them; 'x'",
            ),
            (lambda: axes.reshard({"x": x}, {"x": 3}), ExpressionError, "takes a spec or a Sharding; found 3"),
            (lambda: axes.reshard({"x": x}, {"x": "i@pp j"}), MeshError, "'pp'"),
            (lambda: axes.reshard({"x": x}, {"x": "i"}), ShardingError, "of the tensor 'x'"),
            (lambda: axes.reshard({"x": x}, {"x": "i j -> i j"}), ShardingError, "write only what it becomes"),
            (lambda: axes.reshard({"x": z}, {"x": "i@(tp dp) j"}), ShardingError, "would cut otherwise"),
            (lambda: axes.reshard({"x": x}, {"x": "i j"}, h=2), SizeError, "a size is given for 'h'"),
            (lambda: axes.reshard({"x": x}, {"x": mesh.sharding("i j")}, mesh=other), MeshError, "leave out mesh="),
            (lambda: axes.reshard({"x": x}, {"x": "i j"}, async_op=True), ShardingError, "reshard such tensors one by"),
        ):
            with pytest.raises(error) as caught:
                call()
            assert said in str(caught.value), str(caught.value)
        assert axes.reshard({}, {}) == {}
        assert axes.reshard({"x": x}, {"x": "i@dp j"})["x"] is x


def compiled() -> None:
    mesh = axes.init_mesh("dp=2 tp=4", device_type="cpu")
    xs = {name: axes.shard(torch.randn(8, 8), "i@dp j", mesh=mesh) for name in "ab"}
    specs = {"a": "i j@tp", "b": "i@tp j"}

    @torch.compile(fullgraph=True)
    def moved(a: Any, b: Any) -> Any:
        return axes.reshard({"a": a, "b": b}, specs)

    found = moved(xs["a"], xs["b"])
    for name, y in axes.reshard(xs, specs).items():
        assert same(found[name], y)


def test_in_a_graph_each_is_a_node(pool):
    pool.run(compiled, timeout=300)
