"""Regions in `torch.compile(fullgraph=True)`: values, gradients, collectives and graphs over several sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.nn.functions import cross_entropy, embedding, layer_norm, logsumexp, rms_norm, softmax
from axes.ops.collectives import all_gather, psum, psum_scatter
from axes.ops.shard_map import shard_map

Leaves = dict[str, torch.Tensor]
"""Whole tensors by their specs."""


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def ran(call: Callable[..., object], leaves: Leaves) -> tuple[list[DTensor], list[torch.Tensor]]:
    """The results, and the gradients of the leaves that have one."""
    shards = [axes.shard(x.clone().requires_grad_(x.is_floating_point()), spec) for spec, x in leaves.items()]
    found = call(*shards)
    results = [found] if isinstance(found, torch.Tensor) else list(found)
    axes.unshard(sum((y * y).sum() for y in results)).backward()
    return results, [x.grad for x in shards if x.grad is not None]


def differences(
    call: Callable[..., object], leaves: Callable[[int], Leaves], sizes: Sequence[int]
) -> tuple[list[str], list[int]]:
    """What differs between the compiled call and the eager one; how many graphs there are after each size."""
    torch._dynamo.reset()
    counted, wrong, graphs = CompileCounterWithBackend("aot_eager"), [], []
    fast = torch.compile(call, backend=counted, fullgraph=True, dynamic=True)
    for size in sizes:
        for what, *pair in zip(("value", "gradient"), ran(fast, leaves(size)), ran(call, leaves(size)), strict=True):
            for at, (ours, eager) in enumerate(zip(*pair, strict=True)):
                if ours.shape != eager.shape or axes.spec_of(ours) != axes.spec_of(eager):
                    wrong.append(f"{what} {at} of {size}: {axes.spec_of(ours)}, not {axes.spec_of(eager)}")
                if not torch.allclose(axes.unshard(ours), axes.unshard(eager)):
                    wrong.append(f"{what} {at} of {size}")
        graphs.append(counted.frame_count)
    return wrong, graphs


# regions


@shard_map("b@dp s d, d f@tp -> b@dp s f@tp, b@dp s, f@tp | sum@dp")
def product(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ w
    return y.sin(), psum(y.sum(2), "tp"), y.sum((0, 1))


def layers(x: DTensor, w: DTensor) -> list[DTensor]:
    """A region in a graph with other operations around it; `x` is no leaf there and `w` is one."""
    y, total, means = product(x.cos(), w)
    return [y * 2, total, means]


def rows(size: int) -> Leaves:
    return {"b@dp s d": numbers(size, 3, 10), "d f@tp": numbers(10, 14, seed=1)}


def product_of_sizes() -> tuple[list[str], list[int]]:
    with axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        return differences(layers, rows, (4, 8, 20, 5, 7, 5, 12, 6))


def test_even_sizes_share_a_graph_and_uneven_ones_have_their_own(warm):
    for wrong, graphs in warm(product_of_sizes, 4, timeout=240):
        assert wrong == []
        assert graphs == [1, 1, 1, 2, 3, 3, 3, 3]


@shard_map("b s@cp d -> b s d@cp, (b s)@cp d, one=1 d")
def moved(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    whole = all_gather(x, "cp", dim=1)
    flat = psum_scatter(whole.flatten(0, 1), "cp")
    return whole.tensor_split(2, 2)[0] * 1.0, flat, psum(x.sum((0, 1)), "cp")[None]


@shard_map("b n@cp, n@cp -> b n@cp, (b k), n@cp")
def flowing(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x * y, psum(x.sum(1), "cp").repeat_interleave(3), y.flip(0)


@shard_map("b d | same@cp, d f@cp -> b d | same@cp")
def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Megatron's f, two layers and g."""
    y = (axes.rearrange(x, "b d | same@cp -> b d") @ w).tanh() @ w.mT
    return axes.rearrange(y, "b d | sum@cp -> b d | same@cp")


def names_of_sizes() -> list[tuple[list[str], list[int]]]:
    with axes.init_mesh("cp=2", device_type="cpu"):
        return [
            differences(moved, lambda n: {"b s@cp d": numbers(3, n, 10)}, (4, 8, 12)),
            differences(flowing, lambda n: {"b n@cp": numbers(5, n), "n@cp": numbers(n, seed=1)}, (8, 12, 7, 20)),
            # A name that nothing splits left of the arrow, and that is uneven right of it.
            differences(
                shard_map(lambda x: x.tensor_split(2)[axes.axis_index("cp")] * 1.0, "b d -> b@cp d"),
                lambda n: {"b d": numbers(n, 3)},
                (8, 12, 9, 11, 9, 6),
            ),
            differences(block, lambda n: {"b d": numbers(n, 5), "d f@cp": numbers(5, 14)}, (8, 12, 9)),
        ]


def test_names_keep_their_sizes_whatever_these_are(warm):
    for moves, flows, cut, same in warm(names_of_sizes, 2, timeout=240):
        assert [wrong for wrong, _ in (moves, flows, cut, same)] == [[]] * 4
        # A group that is split has the sizes of its names in it.
        assert moves[1] == [1, 2, 3]
        assert flows[1] == [1, 1, 2, 2]
        assert cut[1] == [1, 1, 2, 3, 3, 3]
        assert same[1] == [1, 1, 1]


def of_a_builtin() -> tuple[list[str], list[int]]:
    with axes.init_mesh("dp=2", device_type="cpu"):
        return differences(
            lambda x: shard_map(torch.tanh, "b@dp d -> b@dp d")(x), lambda n: {"b@dp d": numbers(n, 3)}, (4, 8)
        )


def test_a_region_of_a_builtin_function_is_made_in_a_graph(warm):
    assert warm(of_a_builtin, 2, timeout=240) == [([], [1, 1])] * 2


def sent(found: list[str]) -> Callable[..., object]:
    """A compiler that runs graphs as they are and remembers the collectives in them."""

    def compiler(graph: torch.fx.GraphModule, _: object) -> object:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        found.extend(name.split(".")[1] for name in names if "c10d" in name and "wait_tensor" not in name)
        return make_boxed_func(graph.forward)

    return compiler


@shard_map("b@dp d, d f@tp -> b@dp f@tp")
def share(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).exp()
    return y / psum(y.sum(1, keepdim=True), "tp")


def collectives() -> tuple[list[str], list[str], tuple[int, int]]:
    torch._dynamo.reset()
    with axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        forward: list[str] = []
        backward: list[str] = []
        backend = aot_autograd(fw_compiler=sent(forward), bw_compiler=sent(backward))

        def leaves() -> list[DTensor]:
            specs = {"b@dp d": numbers(4, 10), "d f@tp": numbers(10, 14)}
            return [axes.shard(x, spec).requires_grad_() for spec, x in specs.items()]

        y = torch.compile(share, backend=backend, fullgraph=True, dynamic=True)(*leaves())
        y.backward(y.detach())
        inputs = leaves()
        with CommDebugMode() as there:
            z = share(*inputs)
        with CommDebugMode() as back:
            z.backward(y.detach())
        return forward, backward, (there.get_total_counts(), back.get_total_counts())


def test_the_collectives_of_a_graph_are_those_of_the_eager_call(warm):
    for forward, backward, eager in warm(collectives, 4, timeout=120):
        assert (len(forward), len(backward)) == eager == (1, 3)
        # psum's both ways, the gradient of x over tp and that of w over dp
        assert {*forward, *backward} == {"all_reduce"}


def refused() -> list[str]:
    found = []
    with axes.init_mesh("dp=2", device_type="cpu"):
        x, y = axes.shard(numbers(4, 6), "b@dp d"), axes.shard(numbers(4, 8), "b d")
        for expression, function, tensors in (
            ("b d@dp -> b d@dp", torch.neg, (x,)),
            ("b d, b d -> b d", torch.add, (x, y)),
            ("b@dp d -> b d", torch.neg, (x,)),
            ("b@dp d -> b@dp d, d", torch.neg, (x,)),
            ("b@dp 7 -> b@dp 7", torch.neg, (x,)),
        ):
            region = shard_map(function, expression)
            for call in (region, torch.compile(region, backend="aot_eager", fullgraph=True, dynamic=True)):
                torch._dynamo.reset()
                try:
                    call(*tensors)
                except Exception as error:
                    found.append(str(error))
        with pytest.raises(Exception, match="check=True compares ranks in each call"):
            torch.compile(shard_map(torch.neg, "b@dp d -> b@dp d", check=True), backend="eager", fullgraph=True)(x)
    return found


def test_mistakes_say_in_a_graph_what_they_say_in_eager_mode(warm):
    for found in warm(refused, 2, timeout=120):
        assert len(found) == 10
        for eager, traced in zip(found[::2], found[1::2], strict=True):
            # What dynamo quotes has its line ends written out.
            assert eager.split("\n")[0] in traced


# the border by itself


def there_and_back(x: DTensor, w: DTensor) -> list[DTensor]:
    """Plain tensors between DTensors; `x` is no leaf there and `w` is one."""
    here, rows = axes.to_local(x.cos()), axes.to_local(w, grad="summed")
    y = axes.from_local(here @ rows, "b@dp f | sum@tp", shape=(x.shape[0], w.shape[1]))
    whole = axes.from_local(axes.unshard(x).sin(), "b d", grad="whole")
    return [axes.reshard(y, "b f |"), whole, axes.from_local((here * 2).sum(0), "d@tp | sum@dp")]


def kept_as_it_was(x: DTensor) -> DTensor:
    """A function that asks how its argument is sharded."""
    was = axes.sharding_of(x)
    y = axes.reshard(x * 2, "b@() d@dp") if axes.spec_of(x) == "_@dp _" else x
    return axes.reshard(y, was)


def crossed(size: int) -> Leaves:
    return {"b@dp d@tp": numbers(size, 10), "d@tp f": numbers(10, 14)}


def border_of_sizes() -> tuple[list[tuple[list[str], list[int]]], set[str]]:
    with axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        found = [
            differences(there_and_back, crossed, (4, 8, 20, 5, 7, 5, 12)),
            differences(kept_as_it_was, lambda n: {"b@dp d": numbers(n, 10)}, (4, 8, 12)),
        ]
        # What is compiled leaves nothing of the tracer's behind in eager mode.
        x = axes.shard(numbers(4, 10), "b@dp d@tp").requires_grad_()
        y, *_ = there_and_back(x, axes.shard(numbers(10, 14), "d@tp f"))
        y.sum().backward()
        return found, {type(each.device_mesh).__name__ for each in (y, x.grad)}


def test_plain_tensors_come_and_go_in_a_graph(warm):
    for (round_trip, asked), meshes in warm(border_of_sizes, 4, timeout=240):
        assert [wrong for wrong, _ in (round_trip, asked)] == [[]] * 2
        assert round_trip[1] == [1, 1, 1, 2, 3, 3, 3]
        assert asked[1] == [1, 1, 1]
        assert meshes == {"DeviceMesh"}


def plain_inputs() -> None:
    mesh = axes.init_mesh("dp=2", device_type="cpu")
    counted = CompileCounterWithBackend("aot_eager")

    def made(x: torch.Tensor) -> DTensor:
        return axes.from_local(x.sin(), "b@dp d", mesh=mesh)

    def region() -> DTensor:
        return shard_map(lambda: weight * 2, " -> n@dp", mesh=mesh)()

    weight = torch.ones(3)
    fast = torch.compile(made, backend=counted, fullgraph=True, dynamic=True)
    for size in (4, 6, 9):
        x, z = (numbers(size, 10).requires_grad_() for _ in range(2))
        y = fast(x)
        assert y.device_mesh is mesh.device_mesh
        assert y.shape == (2 * size, 10)
        for result in (y, made(z)):
            (result * result).sum().backward()
        torch.testing.assert_close(x.grad, z.grad)
    assert counted.frame_count == 1
    y = torch.compile(region, backend="aot_eager", fullgraph=True)()
    assert axes.unshard(y).tolist() == [2.0] * 6


def test_a_graph_without_dtensors_makes_them(warm):
    warm(plain_inputs, 2, timeout=120)


def told_sizes(backend: str) -> dict[str, str]:
    """What comes of graphs that make DTensors without whole sizes, of even parts and of others."""
    mesh, found = axes.init_mesh("tp=2", device_type="cpu"), {}
    ones = axes.ones("d", mesh=mesh, d=3)
    doors = {
        "border": lambda x: axes.from_local(x.sin(), "n@tp d", mesh=mesh),
        "region": lambda x: shard_map(lambda one: (x > 0) & (one > 0), "d -> n@tp d", mesh=mesh)(ones),
        "region of 5": lambda x: shard_map(lambda one: x.sin() + one, "d -> n=5@tp d", mesh=mesh)(ones),
    }
    for name, door in doors.items():
        for sizes in ((3, 2),) if name == "region of 5" else ((3, 3), (3, 2)):
            x = numbers(sizes[mesh.rank], 3)
            torch._dynamo.reset()
            try:
                y = torch.compile(door, backend=backend, fullgraph=True)(x)
                found[f"{name}, {sizes}"] = str(torch.equal(axes.unshard(y), axes.unshard(door(x))))
            except Exception as error:
                found[f"{name}, {sizes}"] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_ranks_tell_each_other_in_a_graph_that_their_parts_are_even(warm, backend: str):
    for found in warm(told_sizes, 2, backend, timeout=240):
        assert [found[f"{door}, (3, 3)"] for door in ("border", "region")] == ["True"] * 2
        for door in ("border", "region"):
            assert found[f"{door}, (3, 2)"].startswith("SizeError")
            assert "found the sizes [[3], [2]]. Give the whole size" in found[f"{door}, (3, 2)"]
        assert found["region of 5, (3, 2)"] == "True"


def lifting() -> int:
    with axes.init_mesh("dp=2 tp=2", device_type="cpu") as mesh:
        small = mesh["tp"]
        counted = CompileCounterWithBackend("aot_eager")
        fast = torch.compile(lambda w: axes.lift(w * 3, mesh), backend=counted, fullgraph=True, dynamic=True)
        for size in (4, 6, 8):
            leaves = [axes.shard(numbers(10, size), "d f@tp", mesh=small).requires_grad_() for _ in range(2)]
            one, two = fast(leaves[0]), axes.lift(leaves[1] * 3, mesh)
            assert axes.spec_of(one) == axes.spec_of(two) == "_ _@tp"
            for y in (one, two):
                (y * y).sum().backward()
            torch.testing.assert_close(*[axes.unshard(leaf.grad) for leaf in leaves])
        return counted.frame_count


def test_lifting_is_a_node_as_well(warm):
    assert warm(lifting, 4, timeout=120) == [1] * 4


# functions on regions


def norms(x: DTensor, w: DTensor) -> list[DTensor]:
    spec = "b s@cp v@tp"
    y = rms_norm(softmax(x, spec, over="v"), spec, over="v", weight=w)
    return [layer_norm(y, spec, over="v"), logsumexp(y, spec, over="s v")]


def loss(x: DTensor, labels: DTensor) -> DTensor:
    return cross_entropy(x, labels, "b s@cp v@tp, b s@cp -> ")


def look_up(ids: DTensor, table: DTensor) -> list[DTensor]:
    left = "b s, v@tp d"
    return [embedding(ids, table, f"{left} -> b s d"), embedding(ids, table, f"{left} -> b s@tp d")]


def functions_of_sizes() -> list[tuple[list[str], list[int]]]:
    with axes.init_mesh("cp=2 tp=2", device_type="cpu"):
        return [
            differences(norms, lambda n: {"b s@cp v@tp": numbers(3, n, 10), "v@tp": numbers(10, seed=1)}, (4, 8, 7)),
            differences(loss, lambda n: {"b s@cp v@tp": numbers(3, n, 10), "b s@cp": integers(10, 3, n)}, (4, 8, 7)),
            differences(look_up, lambda n: {"b s": integers(10, 3, n), "v@tp d": numbers(10, 5)}, (4, 8, 7)),
        ]


def test_functions_over_split_dims_serve_many_sizes(warm):
    for found in warm(functions_of_sizes, 4, timeout=400):
        assert [wrong for wrong, _ in found] == [[]] * 3
        assert [graphs for _, graphs in found[:2]] == [[1, 1, 2]] * 2


Plain = Callable[..., torch.Tensor]

ON_SHARDS: dict[str, Plain] = {
    "softmax": lambda x, w, ids, mesh: softmax(x, "s v@tp", over="v", mesh=mesh),
    "logsumexp": lambda x, w, ids, mesh: logsumexp(x, "s v@tp", over="v", mesh=mesh),
    "rms_norm": lambda x, w, ids, mesh: rms_norm(x, "s v@tp", over="v", weight=w[:, 0], mesh=mesh),
    "layer_norm": lambda x, w, ids, mesh: layer_norm(x, "s v@tp", over="v", weight=w[:, 0], bias=w[:, 1], mesh=mesh),
    "cross_entropy": lambda x, w, ids, mesh: cross_entropy(x, ids, "s v@tp, s -> ", v=10, mesh=mesh),
    "embedding": lambda x, w, ids, mesh: embedding(ids, w, "s, v@tp d -> s d", mesh=mesh),
}
"""Functions of this rank's shards of `s v@tp`, `v@tp d` and of `s`, which are labels."""


def on_shards() -> list[str]:
    wrong = []
    mesh = axes.init_mesh("tp=2", device_type="cpu")
    for name, call in ON_SHARDS.items():
        for where in (None, mesh):
            torch._dynamo.reset()
            counted = CompileCounterWithBackend("aot_eager")
            fast = torch.compile(call, backend=counted, fullgraph=True)
            with mesh if where is None else axes.init_mesh("other=2", device_type="cpu"):
                found = []
                for function in (fast, call, fast):
                    leaves = [numbers(3, 5).requires_grad_(), numbers(5, 4, seed=1).requires_grad_()]
                    y = function(*leaves, integers(10, 3), where)
                    y.square().sum().backward()
                    found.append([y, *(x.grad for x in leaves if x.grad is not None)])
            same = [torch.allclose(*pair) for ours in found[::2] for pair in zip(ours, found[1], strict=True)]
            if not all(same) or counted.frame_count != 1:
                wrong.append(f"{name} with mesh={where}: {same}, {counted.frame_count} graphs")
    return wrong


def test_functions_over_split_dims_compile_on_plain_shards(warm):
    assert warm(on_shards, 2, timeout=300) == [[], []]
