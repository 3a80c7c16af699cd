"""`torch.compile(fullgraph=True)`: values, gradients and shardings of eager mode, in as few graphs as sizes allow.

The law `compiled` draws expressions and regions. Here is one table: what each kind of operation needs for sizes
that change between calls, even and uneven ones, some of whose shards are alike; and what else a graph has to keep.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import axes
from tests.common import case

Leaves = dict[str, torch.Tensor]
"""Whole tensors by their specs."""


class Program(NamedTuple):
    """A function of DTensors, or of plain shards and a size where it is `local`; its leaves by the size."""

    mesh: str
    call: Callable[..., Any]
    leaves: Callable[[Any], Leaves]
    sizes: Sequence[Any]
    graphs: Sequence[int] | None
    dynamic: bool | None = True
    local: bool = False


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed + shape[0] if shape else 0), dtype=torch.float64
    )


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def ran(program: Program, call: Callable[..., Any], size: Any) -> list[tuple[str, torch.Tensor, str]]:
    """The results and the gradients of the leaves, whole, with their shapes and specs."""
    shards = [axes.shard(x, spec) for spec, x in program.leaves(size).items()]
    shards = [axes.to_local(x).clone() if program.local else x.detach() for x in shards]
    shards = [x.requires_grad_(x.is_floating_point()) for x in shards]
    found = call(*shards, size) if program.local else call(*shards)
    results = [found] if isinstance(found, torch.Tensor) else list(found)
    squares = [(y * y).sum() for y in results]
    sum(axes.unshard(x) if isinstance(x, DTensor) else x for x in squares).backward()
    named = [(f"result {at}", y.detach()) for at, y in enumerate(results)]
    named += [(f"gradient {at}", x.grad) for at, x in enumerate(shards) if x.grad is not None]
    return [(name, *((axes.unshard(x), axes.spec_of(x)) if isinstance(x, DTensor) else (x, ""))) for name, x in named]


def compiled(names: Sequence[str], backend: str = "") -> list[list[int]]:
    """Compares programs with eager mode; how many graphs there are after each size."""
    graphs = []
    for name in names:
        program = PROGRAMS[name]
        torch._dynamo.reset()
        OTHER[:] = [axes.init_mesh("q=4", device_type="cpu")] if name == "another mesh" else []
        cheap = "aot_eager_decomp_partition" if name in PARTITIONED else "aot_eager"
        counted, counts = CompileCounterWithBackend(backend or cheap), []
        with axes.init_mesh(program.mesh, *ALIASES.get(program.mesh, ()), device_type="cpu"):
            fast = torch.compile(program.call, backend=counted, fullgraph=True, dynamic=program.dynamic)
            for size in program.sizes:
                pairs = zip(ran(program, fast, size), ran(program, program.call, size), strict=True)
                for (what, ours, spec), (_, eager, wanted) in pairs:
                    with case(f"{name}, {what} of size {size}"):
                        assert (spec, ours.shape) == (wanted, eager.shape)
                        torch.testing.assert_close(ours, eager)
                counts.append(counted.frame_count)
        graphs.append(counts)
    return graphs


ALIASES = {"cp=2 tp=2": ("ax = cp tp",), "a=2 b=2 one=1": ("ab = a b",)}


OTHER: list[axes.Mesh] = []
"""A mesh of four ranks that no tensor which goes in is on."""


# ------------------------------------------------------------------------------ functions


@axes.shard_map("b@dp s d, d f@tp -> b@dp s f@tp, b@dp s, f@tp | sum@dp")
def product(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ w
    return y.sin(), axes.psum(y.sum(2), "tp"), y.sum((0, 1))


def layers(x: DTensor, w: DTensor) -> list[DTensor]:
    """A region in a graph with other operations around it; `x` is no leaf there and `w` is one."""
    y, total, means = product(x.cos(), w)
    return [y * 2, total, means]


@axes.shard_map("b s@cp d -> b s d@cp, (b s)@cp d, one=1 d")
def moved(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    whole = axes.all_gather(x, "cp", dim=1)
    flat = axes.psum_scatter(whole.flatten(0, 1), "cp")
    return whole.tensor_split(2, 2)[0] * 1.0, flat, axes.psum(x.sum((0, 1)), "cp")[None]


@axes.shard_map("b n@cp, n@cp -> b n@cp, (b k), n@cp")
def flowing(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x * y, axes.psum(x.sum(1), "cp").repeat_interleave(3), y.flip(0)


@axes.shard_map("b d | same@cp, d f@cp -> b d | same@cp")
def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Megatron's f, two layers and g."""
    y = (axes.rearrange(x, "b d | same@cp -> b d") @ w).tanh() @ w.mT
    return axes.rearrange(y, "b d | sum@cp -> b d | same@cp")


def there_and_back(x: DTensor, w: DTensor) -> list[DTensor]:
    """Plain tensors between DTensors; `x` is no leaf there and `w` is one."""
    here, rows = axes.to_local(x.cos()), axes.to_local(w, grad="summed")
    y = axes.from_local(here @ rows, "b@dp f | sum@tp", shape=(x.shape[0], w.shape[1]))
    whole = axes.from_local(axes.unshard(x).sin(), "b d", grad="whole")
    return [axes.reshard(y, "b f |"), whole, axes.from_local((here * 2).sum(0), "d@tp | sum@dp", d=x.shape[1])]


def kept_as_it_was(x: DTensor) -> DTensor:
    """A function that asks how its argument is sharded."""
    was = axes.sharding_of(x)
    y = axes.reshard(x * 2, "b@() d@ax") if axes.spec_of(x) == "_@ax _" else x
    return axes.reshard(y, was)


def norms(x: DTensor, w: DTensor) -> list[DTensor]:
    spec = "b s@cp v@tp"
    y = axes.rms_norm(axes.softmax(x, spec, over="v"), spec, over="v", weight=w)
    return [axes.layer_norm(y, spec, over="v"), axes.logsumexp(y, spec, over="s v")]


def loss(x: DTensor, labels: DTensor) -> DTensor:
    return axes.cross_entropy(x, labels, "b s@cp v@tp, b s@cp -> ")


def looked_up(ids: DTensor, table: DTensor) -> list[DTensor]:
    return [axes.embedding(ids, table, f"b s, v@tp d -> b s{at} d") for at in ("", "@tp")]


def summed_and_split(x: DTensor, y: DTensor) -> DTensor:
    """A product whose gradients are gathered along one dim, while another stays cut as it is."""
    p = axes.einsum(x, y, "a k@x, k@x b -> a b | *")
    return axes.reshard(p + p, "a@x b@y")


def several(x: DTensor, w: DTensor) -> list[DTensor]:
    """A size that is found to be one number after a result has it as a symbol."""
    y = axes.einsum(x, w, "b d e, d f -> b f e@tp")
    return [x + 1, y, axes.repeat(y, "b f e@tp -> b@tp f e@dp g", g=3)]


@axes.shard_map("b@dp d -> b@dp")
def inner(x: torch.Tensor) -> torch.Tensor:
    return axes.psum(x.sin().sum(1), "tp") * axes.axis_size("tp")


@axes.shard_map("b@dp d -> b@dp d")
def outer(x: torch.Tensor) -> torch.Tensor:
    """A region in a region, and names of the outer one after it."""
    scale = inner(axes.from_local(x.cos(), "b@dp d", b=x.shape[0] * axes.axis_size("dp")))
    return x * axes.to_local(scale)[:, None] / axes.psum(x.sin().exp(), "dp")


@axes.shard_map("b@dp d -> b@dp d")
def inside(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: axes.pmean(y.sin() * y, "tp").cos(), x, use_reentrant=False)


@axes.shard_map("b@dp d -> b@dp d")
def shouting(x: torch.Tensor) -> torch.Tensor:
    raise ValueError


@axes.shard_map("b@dp d -> b@dp d")
def tried(x: torch.Tensor) -> torch.Tensor:
    try:
        shouting(axes.from_local(x, "b@dp d", b=x.shape[0] * axes.axis_size("dp")))
    except ValueError:
        return axes.psum(x * x, "dp")
    return x


def in_block(x: DTensor) -> DTensor:
    """A mesh that a function enters by itself, within a checkpoint."""

    def softened(x: DTensor) -> DTensor:
        with axes.use_mesh(axes.sharding_of(x).mesh):
            return axes.from_local(axes.softmax(axes.to_local(x), "b@dp d", over="b"), "b@dp d", b=x.shape[0])

    return checkpoint(softened, x * 2, use_reentrant=False)


def in_loop(x: DTensor) -> DTensor:
    for _ in range(2):
        x = checkpoint(outer, x, use_reentrant=False)
        x = axes.reshard(axes.rearrange(outer(x), "b@dp d -> b d@dp"), "b@dp d")
    return x


def every_collective(x: torch.Tensor, size: int) -> torch.Tensor:
    y = axes.psum(x, "cp") * (1 + axes.axis_index("cp")) + axes.pmean(x.sin(), "cp") + axes.pmax(x, "cp")
    y = axes.psum_scatter(axes.all_gather(y, "cp", dim=1) ** 2, "cp", dim=-1)
    y = axes.all_to_all(y, "cp", 0, 1)
    return axes.ppermute(y, "cp", shift=1) + axes.ppermute(y, "cp", perm=[(0, 1)]) * axes.axis_size("cp")


def rows(spec: str, *others: int) -> Callable[[int], Leaves]:
    return lambda n: {spec: numbers(n, *others)}


def around(call: Callable[..., Any]) -> Callable[..., Any]:
    """Operations of torch before and after."""
    return lambda x, *size: call(x.sin(), *size).cos()


def on_ax(
    call: Callable[..., Any], sizes: Sequence[int] = (8, 7), graphs: Sequence[int] = (1, 2), **how: Any
) -> Program:
    return Program("ax=2", around(call), rows("m@ax n", 12), sizes, graphs, None, **how)


def on_two(
    call: Callable[..., Any], leaves: Callable[[Any], Leaves], sizes: Sequence[Any] = (20, 28, 21), graphs: Any = None
) -> Program:
    return Program("dp=2 tp=1", around(call), leaves, sizes, graphs)


PROGRAMS: dict[str, Program] = {
    # On two ranks. An uneven size, with the same shard on some ranks, has a graph of its own; so has a size of one.
    "gather": on_ax(lambda x: axes.reshard(x, "m n"), (8, 7, 8, 6), (1, 2, 2, 3)),
    "gather of one": on_ax(lambda x: axes.reshard(x, "m n"), (1, 2, 3), (1, 2, 3)),
    "nothing": on_ax(lambda x: axes.reshard(x, "m@* n"), (7, 8, 10, 3), (1, 2, 2, 3)),
    "mean": on_ax(lambda x: axes.reduce(x, "m@ax n -> n", "mean"), (8, 7, 6), (1, 2, 3)),
    "scatter": on_ax(lambda x: axes.einsum(x, x, "m@ax n, m@ax k -> n@ax k")),
    "unshard": on_ax(axes.unshard, (8, 7, 6), (1, 2, 3)),
    "border": on_ax(lambda x: axes.from_local(axes.to_local(x) * 2, "m@ax n", shape=tuple(x.shape))),
    "flow": on_ax(axes.shard_map(lambda x: x * 2, "m n -> m n")),
    "sum": on_ax(axes.shard_map(lambda x: axes.psum(x.sum(0), "ax"), "m@ax n -> n")),
    "a builtin": on_ax(lambda x: axes.shard_map(torch.tanh, "m@ax n -> m@ax n")(x), (4, 8), (1, 2)),
    "asked": on_ax(kept_as_it_was, (4, 8, 16), (1, 2, 2)),
    "a column each": Program("ax=2", lambda x: axes.rearrange(axes.shard_map(torch.tanh, "m n -> m n")(x), "m@ax n -> m n@ax") * 2, lambda n: {"m@ax n": numbers(3, n)}, (2, 4, 6), (1, 2, 2), True),
    "shards": on_ax(lambda x, m: axes.reshard(x, "m@ax n -> m n@ax", m=m), (8, 7, 8), (1, 2, 2), local=True),
    "shards to a DTensor": on_ax(lambda x, m: axes.from_local(x, "m@ax n", shape=(m, 12)), (8, 7, 8), (1, 2, 2), local=True),
    "norm of shards": on_ax(lambda x, m: axes.rms_norm(x, "m@ax n", over="m", m=m), (8, 7, 8), (1, 2, 2), local=True),
    "labels of shards": Program("ax=2", lambda x, ids, v: axes.cross_entropy(x, ids, "s v@ax, s -> ", v=v), lambda v: {"s v@ax": numbers(3, v), "s": integers(8, 3)}, (8, 9), (1, 2), None, True),
    "rows of shards": Program("ax=2", lambda ids, w, v: axes.embedding(ids, w, "s, v@ax d -> s d", v=v), lambda v: {"s": integers(8, 3), "v@ax d": numbers(v, 5)}, (8, 9), (1, 2), None, True),
    "merge": on_two(lambda x: axes.rearrange(x, "b@dp s d -> (b s)@dp d"), rows("b@dp s d", 3, 5), (20, 28, 22), (1, 2, 3)),
    "gram": on_two(lambda x: axes.einsum(x, x, "b@dp s, b@dp t -> s@dp t"), rows("b@dp s", 4), graphs=(1, 1, 2)),
    "moved": Program("cp=2", moved, lambda n: {"b s@cp d": numbers(3, n, 10)}, (4, 8, 12), (1, 2, 3)),
    "flowing": Program("cp=2", flowing, lambda n: {"b n@cp": numbers(5, n), "n@cp": numbers(n)}, (8, 12, 7), (1, 1, 2)),
    "cut": Program("cp=2", axes.shard_map(lambda x: x.tensor_split(2)[axes.axis_index("cp")] * 1.0, "b d -> b@cp d"), rows("b d", 3), (8, 12, 9, 11), (1, 1, 2, 3)),
    "block": Program("cp=2", block, lambda n: {"b d": numbers(n, 5), "d f@cp": numbers(5, 14)}, (8, 12, 9), (1, 1, 1)),
    **{
        name: Program("dp=2 tp=1", call, rows("b@dp d", 5), (6, 6), (1, 1), None)
        for name, call in {
            "a region in a region": outer, "a checkpoint around regions": lambda x: checkpoint(outer, x.sin(), use_reentrant=False).cos(),
            "a checkpoint in a region": inside, "both": lambda x: checkpoint(inside, x * 2, use_reentrant=False), "an error that is caught": tried,
            "a mesh that is entered": in_block, "a loop": in_loop,
        }.items()
    },
    "parts of sizes": Program("cp=2", lambda x, n: axes.all_to_all(x, "cp", 1, 1, send_sizes=[1, 3], recv_sizes=[[1, 1], [3, 3]][axes.axis_index("cp")]).sin(), rows("b@cp d", 4), (12, 44, 76), (1, 1, 1), local=True),
    "collectives": Program("cp=2", every_collective, rows("b@cp d", 4), (16, 48), (1, 1), local=True),
    "mean of shards": Program("cp=2", lambda x, n: axes.reduce(x, "b@cp s -> s", "mean"), rows("b@cp s", 4), (12, 44, 76), (1, 1, 1), local=True),
    "written in place": Program("cp=2", lambda x, n: axes.rearrange(x.sin(), "a b@cp -> a@cp b").mul_(2).relu_(), rows("a@cp b", 6), (16, 48, 80), (1, 1, 1), local=True),
    "autocast": Program("cp=2", lambda x, w: torch.autocast("cpu", torch.bfloat16)(axes.einsum)(x, w, "b k@cp, k@cp f -> b f"), lambda n: {"b k@cp": numbers(n, 10), "k@cp f": numbers(10, 8)}, (12, 28, 44), (1, 1, 1)),
    "many": Program("cp=2", lambda x, w: [x.sin(), *axes.reshard({"x": x.detach(), "w": w.detach()}, {"x": "b k", "w": "k f@cp"}).values()], lambda n: {"b k@cp": numbers(n, 10), "k@cp f": numbers(10, 8)}, (12, 28, 44), (1, 1, 1)),
    # On four.
    "layers": Program("dp=2 tp=2", layers, lambda n: {"b@dp s d": numbers(n, 3, 10), "d f@tp": numbers(10, 14)}, (4, 8, 20, 5, 7), (1, 1, 1, 2, 3)),
    "there and back": Program("dp=2 tp=2", there_and_back, lambda n: {"b@dp d@tp": numbers(n, 10), "d@tp f": numbers(10, 14)}, (4, 8, 5), (1, 1, 2)),
    "norms": Program("cp=2 tp=2", norms, lambda n: {"b s@cp v@tp": numbers(3, n, 10), "v@tp": numbers(10)}, (4, 8, 7), (1, 1, 2)),
    "loss": Program("cp=2 tp=2", loss, lambda n: {"b s@cp v@tp": numbers(3, n, 10), "b s@cp": integers(10, 3, n)}, (4, 8, 7), (2, 2, 3)),  # with dynamic=True torch begins anew for floats, here those of the options
    "looked up": Program("cp=2 tp=2", looked_up, lambda n: {"b s": integers(10, 3, n), "v@tp d": numbers(10, 5)}, (4, 7), None),
    "nested axes": Program("cp=2 tp=2", around(lambda x: axes.reshard(x.T, "m n")), lambda n: {"n m@ax": numbers(12, n)}, (8, 7, 16), (1, 2, 3), None),
    "an uncut dim": Program("x=2 y=2", summed_and_split, lambda n: {"a k@x": numbers(n[0], n[1]), "k@x b": numbers(n[1], 4)}, ((8, 12), (1, 5), (7, 9)), None, None),
    "several results": Program("dp=2 tp=2", several, lambda n: {"b d e": numbers(*n), "d f": numbers(n[1], 4)}, ((4, 7, 3), (9, 5, 6), (11, 5, 6)), None, None),
    "another mesh": Program("a=2 b=2 one=1", lambda x: [axes.reshard(x.sin(), "m@q n", mesh=OTHER[0]), x * 2], rows("m@a n", 8), (12,), (1,), False),
    "an alias": Program("a=2 b=2 one=1", lambda x: axes.reshard(x, "m n@ab") * 2, rows("m@a n", 8), (12,), (1,), False),
}  # fmt: skip
RANKS = {"ax=2": 2, "cp=2": 2, "dp=2 tp=1": 2}
PARTITIONED = {"gather of one", "collectives"}
"""In which a rank sends nothing: by the partitioner of inductor, which puts what depends on no tensor into both passes."""
FULL = {
    "unshard", "mean", "asked", "both", "looked up", "a builtin", "gather of one", "flow", "gram", "several results",
    "norms", "there and back", "moved", "loss", "nothing", "cut", "an uncut dim", "nested axes", "layers", "merge", "gather",
    "flowing", "a loop",
}  # fmt: skip
"""What a run of all finds beside the others."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in FULL else n for n in PROGRAMS])
def test_a_compiled_program_is_the_eager_one_in_as_many_graphs(warm, name):
    program = PROGRAMS[name]
    for (graphs,) in warm(compiled, RANKS.get(program.mesh, 4), [name], timeout=300):
        assert program.graphs is None or graphs == list(program.graphs)


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in ("merge", "gram")])
def test_inductor_gives_the_values_and_gradients_of_eager(warm, name):
    warm(compiled, RANKS.get(PROGRAMS[name].mesh, 4), [name], "inductor", timeout=900)


OPTIMIZED = """
import json, sys, axes
from tests.test_compile import optimized
if __name__ == "__main__":
    print(json.dumps(axes.launch(optimized, 2, timeout=300)))
"""


def optimized() -> tuple[int, list[list[int]]]:
    """Whether this rank runs without `assert`; the graphs after five rows, seven, and five again."""
    PROGRAMS["sum"] = PROGRAMS["sum"]._replace(sizes=(5, 7, 5))
    return sys.flags.optimize, compiled(["sum"])


@pytest.mark.full
def test_graphs_are_guarded_without_assert():
    """`python -O` drops every `assert`: a graph of five rows isn't taken for seven."""
    command, said = [sys.executable, "-c", OPTIMIZED], {**os.environ, "PYTHONOPTIMIZE": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=said, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[1, [[1, 2, 2]]]] * 2


# ------------------------------------------------------------------------------ what else a graph keeps


def two_layers(x: DTensor, w: DTensor, v: DTensor) -> DTensor:
    for _ in range(2):
        h = axes.rearrange(x, "b s@tp d -> b s d")
        h = torch.relu(axes.einsum(h, w, "b s d, d f@tp -> b s f@tp"))
        x = axes.einsum(h, v, "b s f@tp, f@tp d -> b s@tp d")
    return axes.reduce(x, "b s@tp d -> b d", "mean")


def collectives() -> tuple[list[str], int]:
    """Those of a graph, and how many eager mode has."""
    found: list[str] = []

    def compiler(graph: torch.fx.GraphModule, _: object) -> object:
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        found.extend(name.split(".")[1] for name in targets if "c10d" in name and "wait_tensor" not in name)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    with axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        specs = {"b@dp s@tp d": numbers(4, 8, 6), "d f@tp": numbers(6, 12), "f@tp d": numbers(12, 6)}
        leaves = [axes.shard(x, spec).requires_grad_() for spec, x in specs.items()]
        backend = aot_autograd(fw_compiler=compiler, bw_compiler=lambda graph, _: make_boxed_func(graph.forward))
        torch.compile(two_layers, backend=backend, fullgraph=True)(*leaves)
        with CommDebugMode() as eager:
            two_layers(*leaves)
        return found, eager.get_total_counts()


def test_the_collectives_of_a_graph_are_those_of_the_eager_call(warm):
    for forward, eager in warm(collectives, 4, timeout=120):
        # Each layer gathers and scatters once, and the mean is summed.
        assert sorted(forward) == ["all_gather_into_tensor"] * 2 + ["all_reduce"] + ["reduce_scatter_tensor"] * 2
        assert len(forward) == eager


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a left side": (lambda x: axes.rearrange(x, "b s@tp -> b s"), "the tensor isn't sharded as the left side says"),
    "an axis twice": (lambda x: axes.reshard(x, "b@tp s@tp"), "axis 'tp' is used twice"),
    "a plain tensor": (lambda x: axes.psum(x.to_local(), "tpp"), "the mesh has no axis 'tpp'"),
    "a region's argument": (axes.shard_map(torch.neg, "b s@dp -> b s@dp"), "b@dp s"),
    "a size that isn't known": (
        lambda x: axes.from_local(x.to_local(), "b@dp s"),
        "has to know the whole size of dim 0",
    ),
    "a result's size": (axes.shard_map(torch.neg, "b@dp s -> n@dp s"), r"Write it, in the spec \(v=256@tp\)"),
    "a region's result": (axes.shard_map(torch.neg, "b@dp s -> b@dp s, s"), "the function returned 1 tensors"),
}


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_in_a_graph_is_an_error_of_torch_with_the_text_of_ours(mistake, fullgraph):
    call, message = WRONG[mistake]
    if mistake == "a size that isn't known" and not fullgraph and torch.__version__ >= "2.14":
        pytest.skip("torch 2.14 runs it outside of the graph, where ranks tell each other their sizes")

    def caught(x: DTensor) -> DTensor:
        try:
            return call(x)
        except axes.AxesError:
            return x

    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        x = axes.ones("b@dp s", b=4, s=4)
        for each in (call, caught):
            torch._dynamo.reset()
            with pytest.raises(RuntimeError, match=message if each is call else None):
                torch.compile(each, backend="aot_eager", fullgraph=fullgraph)(x)


def scopes() -> None:
    """Graphs that break within a scope: what is eager there finds the mesh, and nothing of it stays."""

    @axes.shard_map("b@dp d -> b@dp d")
    def breaking(x: torch.Tensor) -> torch.Tensor:
        y = axes.psum(x.sin(), "dp")
        torch._dynamo.graph_break()
        return axes.psum(y.cos(), "dp") * axes.axis_size("dp")

    def in_block(x: DTensor) -> DTensor:
        with axes.use_mesh(axes.sharding_of(x).mesh):
            y = axes.reshard(x.sin(), "b@() d@dp")
            torch._dynamo.graph_break()
            return axes.reshard(y.cos(), "b@dp d@()")

    mesh, turned = (axes.init_mesh(text, device_type="cpu") for text in ("dp=2 b=1", "b=2 dp=1"))
    for call in (breaking, in_block, lambda x: breaking(breaking(x))):
        program = Program("", call, rows("b@dp d", 5), (), None)
        torch._dynamo.reset()
        with mesh:
            fast = torch.compile(call, backend="aot_eager")
            for one, two in zip(ran(program, fast, 6), ran(program, call, 6), strict=True):
                torch.testing.assert_close(one[1], two[1])
            assert axes.axis_size("dp") == 2
        with pytest.raises(axes.MeshError, match="mesh"):
            axes.axis_size("dp")
    torch._dynamo.reset()
    fast = torch.compile(lambda x: axes.psum(x, "dp"), backend="aot_eager", fullgraph=True)
    for where, total in ((mesh, 2.0), (turned, 1.0), (mesh, 2.0)):
        with where:
            assert fast(torch.ones(1)).item() == total


def test_a_graph_that_breaks_within_a_scope_leaves_it_as_it_was_and_the_mesh_outside_is_guarded(warm):
    warm(scopes, 2, timeout=300)
