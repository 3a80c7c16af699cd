"""`reshard` inside `torch.compile(fullgraph=True)`: values, gradients and collectives as without it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor

import axes

SPECS = ("m@() n@a", "m@a n@(b c)")


def layers(x: DTensor, specs: tuple[str, str] = SPECS) -> DTensor:
    """An all-to-all or gather and a move, with something to differentiate between."""
    y = axes.reshard(x.sin(), specs[0])
    return axes.reshard(y * y, specs[1]).cos()


def weights(x: DTensor, w: DTensor) -> DTensor:
    """A pending product, reduced and scattered."""
    return axes.reshard(axes.reshard(x, "b@a f@b") @ w, "b@(a b) d |")


def inputs(mesh: axes.Mesh, rows: int) -> DTensor:
    whole = torch.arange(rows * 8.0, dtype=torch.float64).view(rows, 8) / 8
    return axes.shard(whole, "m@a n", mesh=mesh).requires_grad_()


class Nodes:
    """A backend that runs graphs as they are and remembers the collectives in them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, example: list[torch.Tensor]):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def seen(traced: torch.fx.GraphModule, _: list[torch.Tensor]):
            calls = [node for node in traced.graph.nodes if node.op == "call_function"]
            names = [str(node.target) for node in calls if "c10d" in str(node.target)]
            self.names += [name.split(".")[1] for name in names if "wait_tensor" not in name]
            return make_boxed_func(traced.forward)

        return aot_autograd(fw_compiler=seen, bw_compiler=seen)(graph, example)


def compiled(
    backend: str, dynamic: bool, declaration: str = "a=2 b=2 c=2", specs: tuple[str, str] = SPECS
) -> tuple[list[str], int]:
    """What differs from the eager call, and how many graphs were made, over three sizes."""
    torch._dynamo.reset()
    mesh, wrong = axes.init_mesh(declaration, device_type="cpu"), []
    counted = CompileCounterWithBackend(backend)
    fast = torch.compile(layers, backend=counted, fullgraph=True, dynamic=dynamic)
    for rows in (8, 16, 24):
        x = inputs(mesh, rows)
        results = [layers(x, specs), fast(x, specs), fast(x, specs)]
        gradients = [torch.autograd.grad(axes.unshard(y).sum(), x)[0] for y in results]
        for what, (first, *others) in (("value", results), ("gradient", gradients)):
            for other in others:
                if axes.spec_of(other) != axes.spec_of(first):
                    wrong.append(f"{what} of {rows}: {axes.spec_of(other)}, not {axes.spec_of(first)}")
                if not torch.allclose(axes.unshard(other), axes.unshard(first)):
                    wrong.append(f"{what} of {rows}")
    return wrong, counted.frame_count


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_values_and_gradients_are_the_eager_ones(pool, backend):
    for wrong, graphs in pool.run(compiled, backend, False, timeout=180):
        assert (wrong, graphs) == ([], 3)


def test_with_dynamic_sizes_they_are_the_eager_ones_and_graphs_are_shared(warm):
    # Eight rows equal the eight columns, so that size is specialized; the others share a graph. Of symbolic sizes
    # torch plans its own operations for most of a minute on three axes, in half a second on one.
    for wrong, graphs in warm(compiled, 2, "aot_eager", True, "a=2", ("m@() n@a", "m@a n"), timeout=180):
        assert (wrong, graphs) == ([], 2)


def uneven() -> list[str]:
    """What differs from the eager call, where some sizes don't divide, and some of their shards are alike."""
    torch._dynamo.reset()
    mesh, wrong = axes.init_mesh("a=4", device_type="cpu"), []
    counted = CompileCounterWithBackend("aot_eager")

    def moved(x: DTensor) -> DTensor:
        return axes.reshard(x.sin(), "m@() n@a").cos()

    fast = torch.compile(moved, backend=counted, fullgraph=True, dynamic=True)
    for rows, graphs in ((10, 1), (11, 2), (16, 3), (12, 3), (11, 3), (10, 3), (13, 4)):
        x = inputs(mesh, rows)
        results = [moved(x), fast(x)]
        gradients = [torch.autograd.grad(axes.unshard(y).sum(), x)[0] for y in results]
        for what, pair in (("value", results), ("gradient", gradients)):
            one, other = (y.to_local() for y in pair)
            if one.shape != other.shape or not torch.allclose(one, other):
                wrong.append(f"{what} of {rows}")
        if counted.frame_count != graphs:
            wrong.append(f"{counted.frame_count} graphs after {rows}")
    return wrong


def test_with_dynamic_sizes_uneven_ones_have_graphs_of_their_own(warm):
    for wrong in warm(uneven, 4, timeout=180):
        assert wrong == []


@pytest.mark.full
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_values_and_gradients_of_eight_ranks_are_the_eager_ones(pool, backend, dynamic):
    for wrong, _ in pool.run(compiled, backend, dynamic, timeout=900):
        assert wrong == []


def collectives() -> tuple[list[str], list[str]]:
    torch._dynamo.reset()
    mesh = axes.init_mesh("a=4 b=2", device_type="cpu")
    nodes = Nodes()
    fast = torch.compile(weights, backend=nodes, fullgraph=True)
    x = axes.shard(torch.randn(8, 4), "b@a f", mesh=mesh).requires_grad_()
    w = axes.shard(torch.randn(4, 8), "f@b d", mesh=mesh).requires_grad_()
    y = fast(x, w)
    forward = list(nodes.names)
    nodes.names.clear()
    torch.autograd.grad(y, [x, w], y.detach())
    return forward, nodes.names


def test_a_graph_holds_the_collectives_that_one_would_write_by_hand(pool):
    for forward, backward in pool.run(collectives, timeout=120):
        assert forward == ["reduce_scatter_tensor"]
        # One for the cotangent, one for the gradient of x, a leaf that isn't split over b.
        assert sorted(backward) == ["all_gather_into_tensor", "all_gather_into_tensor"]


def ambient_and_aliases() -> None:
    torch._dynamo.reset()
    mesh = axes.init_mesh("a=2 b=2 c=2", "bc = b c", device_type="cpu")
    x = inputs(mesh, 8)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def by_name(x: DTensor) -> DTensor:
        return axes.reshard(x, "m@* n@bc") * 2

    @torch.compile(backend="aot_eager", fullgraph=True)
    def exactly(x: DTensor, wanted: axes.Sharding) -> DTensor:
        return axes.reshard(x, wanted) * 2

    with mesh:
        y = by_name(x)
    z = exactly(x, mesh.sharding("m@a n@bc"))
    assert axes.spec_of(y) == axes.spec_of(z) == "_@a _@(b c)"
    assert torch.equal(axes.unshard(y), axes.unshard(z))
    # Another target is another graph, not the old one's result.
    assert axes.spec_of(exactly(x, mesh.sharding("m n"))) == "_ _"


def test_the_ambient_mesh_and_shardings_are_constants_of_a_graph(pool):
    pool.run(ambient_and_aliases, timeout=120)


def leaves() -> tuple[str, str]:
    torch._dynamo.reset()
    mesh = axes.init_mesh("a=2 b=2 c=2", device_type="cpu")
    found = []
    for function in (
        lambda w: axes.reshard(w, "n@a") * 2,
        torch.compile(lambda w: axes.reshard(w, "n@a") * 2, backend="aot_eager", fullgraph=True),
    ):
        leaf = axes.shard(torch.ones(4), "n", mesh=mesh).requires_grad_()
        function(leaf).sum().backward()
        assert axes.unshard(leaf.grad).tolist() == [2.0] * 4
        found.append(axes.spec_of(leaf.grad))
    return found[0], found[1]


def test_the_gradient_of_a_leaf_is_resolved_in_a_graph_too(pool):
    assert pool.run(leaves, timeout=120) == [("_", "_")] * 8


def to_another_mesh() -> list[str]:
    """What differs from eager mode where a graph's results are on a mesh of which no tensor goes in."""
    torch._dynamo.reset()
    mesh, other = (axes.init_mesh(text, device_type="cpu") for text in ("a=2 b=2", "q=4"))
    wanted = other.sharding("m n@q")

    functions = {
        "both": lambda x: (axes.reshard(x.sin(), "m@q n", mesh=other), x * 2),
        "replicated": lambda x: axes.reshard(x.sin(), "m n", mesh=other) * 2,
        "a sharding": lambda x: axes.reshard(x, wanted),
        "ambient": lambda x: axes.reshard(x.sin(), "m@q n"),
        "there and back": lambda x: axes.reshard(axes.reshard(x.sin(), "m@q n", mesh=other) * 2, "m@a n", mesh=mesh),
    }
    wrong = []
    for name, function in functions.items():
        for dynamic in (False, None):
            fast, found = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic), []
            for call in (function, fast):
                x = inputs(mesh, 8).detach().requires_grad_()
                with other if name == "ambient" else contextlib.nullcontext():
                    results = call(x)
                results = results if isinstance(results, tuple) else (results,)
                sum(axes.unshard(y).square().sum() for y in results).backward()
                on = [y.device_mesh is mesh.device_mesh for y in results]
                found.append(([axes.spec_of(y) for y in results], on, [*map(axes.unshard, [*results, x.grad])]))
            (specs, on, eager), (specs_of_graph, on_of_graph, graph) = found
            if (specs, on) != (specs_of_graph, on_of_graph) or not all(map(torch.allclose, eager, graph)):
                wrong.append(f"{name}, dynamic={dynamic}")
    return wrong


def test_a_result_may_be_on_a_mesh_of_which_no_tensor_went_in(warm):
    assert warm(to_another_mesh, 4, timeout=180) == [[]] * 4
