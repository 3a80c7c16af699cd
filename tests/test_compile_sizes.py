"""Sizes that change between the calls of a compiled function: values of eager mode, and the same graphs on every rank.

What comes after a size is one of which some ranks have an equal shard: eight rows, then seven, on two ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor

import axes
from axes.runtime import torch_private

ROOT = Path(__file__).parent.parent

Call = Callable[[torch.Tensor], torch.Tensor]

CALLS: dict[str, Call] = {
    "gather": lambda x: axes.reshard(x, "m n"),
    "move": lambda x: axes.reshard(x, "m n@ax"),
    "nothing": lambda x: axes.reshard(x, "m@* n"),
    "rearrange": lambda x: axes.rearrange(x, "m@ax n -> n m"),
    "mean": lambda x: axes.reduce(x, "m@ax n -> n", "mean"),
    "max": lambda x: axes.reduce(x, "m@ax n -> n", "max"),
    "gram": lambda x: axes.einsum(x, x, "m@ax n, m@ax k -> n k"),
    "scatter": lambda x: axes.einsum(x, x, "m@ax n, m@ax k -> n@ax k"),
    "unshard": axes.unshard,
    "border": lambda x: axes.from_local(axes.to_local(x) * 2, "m@ax n", shape=tuple(x.shape)),
    "flow": axes.shard_map(lambda x: x * 2, "m n -> m n"),
    "sum": axes.shard_map(lambda x: axes.psum(x.sum(0), "ax"), "m@ax n -> n"),
}
"""Functions of a DTensor `m@ax n`."""

LOCAL: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "transpose": lambda x, m: axes.rearrange(x, "m@ax n -> n@ax m", m=m),
    "reshard": lambda x, m: axes.reshard(x, "m@ax n -> m n@ax", m=m),
    "from_local": lambda x, m: axes.unshard(axes.from_local(x, "m@ax n", shape=(m, 12))),
    "norm": lambda x, m: axes.rms_norm(x, "m@ax n", over="m", m=m),
}
"""Functions of a plain shard `m@ax n` and the size of the whole."""


def whole(y: torch.Tensor) -> torch.Tensor:
    return axes.unshard(y) if isinstance(y, DTensor) else y


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]), dtype=torch.float64)


def differences(
    names: Sequence[str],
    sizes: Sequence[int],
    dynamic: bool | None,
    mesh: Sequence[str] = ("ax=2",),
    transposed: bool = False,
) -> tuple[list[str], list[list[int]]]:
    """What differs from eager mode, and how many graphs there are after each size."""
    wrong, graphs = [], []
    with axes.init_mesh(*mesh, device_type="cpu"):
        for name in names:
            torch._dynamo.reset()
            counted, counts = CompileCounterWithBackend("aot_eager"), []

            def around(x: torch.Tensor, m: int, name: str = name, counted: object = None) -> torch.Tensor:
                y = x.sin()
                y = LOCAL[name](y, m) if name in LOCAL else CALLS[name](y.T if transposed else y)
                return y.cos()

            fast = torch.compile(around, fullgraph=True, backend=counted, dynamic=dynamic)
            for size in sizes:
                across = transposed and name in CALLS
                number, spec = (numbers(12, size), "n m@ax") if across else (numbers(size, 12), "m@ax n")
                value = axes.shard(number, spec)
                value = axes.to_local(value) if name in LOCAL else value
                leaves = [value.detach().clone().requires_grad_() for _ in range(2)]
                results = [call(leaf, size) for call, leaf in zip((around, fast), leaves, strict=True)]
                for y in results:
                    whole(y).square().sum().backward()
                same_type = [type(y) for y in results] + [y.shape for y in results]
                pairs = [[whole(y) for y in results], [whole(leaf.grad) for leaf in leaves]]
                if same_type[::2] != same_type[1::2] or not all(torch.allclose(*pair) for pair in pairs):
                    wrong.append(f"{name} of {size}")
                counts.append(counted.frame_count)
            graphs.append(counts)
    return wrong, graphs


def check(
    warm: Callable[..., list],
    ranks: int,
    names: Sequence[str],
    sizes: Sequence[int],
    dynamic: bool | None,
    *more: object,
) -> list[list[int]]:
    """Asserts that nothing differs on any rank; how many graphs all of them have after each size."""
    results = warm(differences, ranks, names, sizes, dynamic, *more, timeout=900)
    assert [wrong for wrong, _ in results] == [[]] * ranks
    assert [graphs for _, graphs in results] == [results[0][1]] * ranks
    return results[0][1]


def test_an_uneven_size_with_the_same_shard_on_some_ranks_has_a_graph_of_its_own(warm):
    assert check(warm, 2, list(CALLS), (8, 7, 8, 6), None) == [[1, 2, 2, 3]] * len(CALLS)


def test_it_has_one_where_the_uneven_size_comes_first(warm):
    """Then the shard of the first rank has had one size, and that of the last two, when a size varies."""
    assert check(warm, 2, ["nothing", "gather"], (7, 8, 10, 3), None) == [[1, 2, 2, 3]] * 2


@pytest.mark.parametrize("dynamic", [True, False])
def test_it_has_one_whatever_dynamic_says(warm, dynamic):
    names = ["gather", "border", "flow"]
    assert check(warm, 2, names, (8, 7, 6), dynamic) == [[1, 2, 2 if dynamic else 3]] * len(names)


def test_it_has_one_on_nested_axes_and_any_dim(warm):
    found = check(warm, 4, ["gather", "scatter", "sum"], (8, 7, 16), None, ("cp=2 tp=2", "ax = cp tp"), True)
    assert found == [[1, 2, 3]] * 3


def test_a_size_of_one_has_a_graph_of_its_own(warm):
    for dynamic in (True, None):
        assert check(warm, 2, ["gather"], (1, 2, 3), dynamic) == [[1, 2, 3]]


def test_plain_shards_with_the_size_of_the_whole_have_one(warm):
    assert check(warm, 2, list(LOCAL), (8, 7, 8), None) == [[1, 2, 2]] * len(LOCAL)


OPTIMIZED = """
import json, sys, axes
from tests.test_compile_sizes import optimized
if __name__ == "__main__":
    print(json.dumps(axes.launch(optimized, 2, ["nothing", "gather", "scatter", "mean", "sum", "reshard"], timeout=300)))
"""


def optimized(names: Sequence[str]) -> tuple[int, list[str], list[list[int]]]:
    """Whether this rank runs without `assert`, and what `differences` says."""
    return sys.flags.optimize, *differences(names, (5, 7, 8, 6, 5), None)


def test_graphs_are_guarded_without_assert():
    """`python -O` drops every `assert`: a graph of five rows isn't taken for seven."""
    command, said = [sys.executable, "-c", OPTIMIZED], {**os.environ, "PYTHONOPTIMIZE": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=said, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr
    for flag, wrong, graphs in json.loads(ran.stdout.splitlines()[-1]):
        assert flag == 1
        assert wrong == []
        assert graphs == [[1, 2, 3, 3, 3]] * 6


def summed_and_split(x: DTensor, y: DTensor) -> DTensor:
    """A product whose gradients are gathered along one dim, while another stays cut as it is."""
    p = axes.einsum(x, y, "a k@x, k@x b -> a b | *")
    return axes.reshard(p + p, "a@x b@y")


def of_two_axes(dynamic: bool | None, sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The sizes at which the compiled function isn't the eager one."""
    wrong = []
    torch._dynamo.reset()
    with axes.init_mesh("x=2 y=2", device_type="cpu"):
        fast = torch.compile(summed_and_split, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for a, k in sizes:
            found = []
            for call in (summed_and_split, fast):
                x = axes.shard(numbers(a, k), "a k@x").requires_grad_()
                y = axes.shard(numbers(k, 4), "k@x b").requires_grad_()
                z = call(x, y)
                whole(z).square().sum().backward()
                found.append([whole(z).detach(), whole(x.grad), whole(y.grad)])
            if not all(map(torch.allclose, *found)):
                wrong.append((a, k))
    return wrong


SIZES_REFER_TO_THEMSELVES = pytest.mark.skipif(
    not torch_private.DEVICE_MESHES_ARE_INPUTS,
    reason="torch before 2.13 traces the strides of a gradient with symbols from the first call on without an end",
)


@pytest.mark.parametrize(
    ("dynamic", "sizes"),
    [
        (None, [(8, 12), (1, 5), (7, 9)]),
        pytest.param(True, [(1, 5)], marks=SIZES_REFER_TO_THEMSELVES),
        (None, [(8, 8), (9, 7), (1, 9)]),
    ],
)
def test_a_dim_that_no_step_cuts_may_have_an_uneven_size(warm, dynamic, sizes):
    assert warm(of_two_axes, 4, dynamic, sizes) == [[]] * 4


@pytest.mark.full
@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_function_has_one_for_every_uneven_size(warm, dynamic, transposed):
    check(warm, 3, list(CALLS), (9, 8, 7, 6, 5), dynamic, ("ax=3",), transposed)
    check(warm, 4, list(CALLS), (8, 7, 16, 15, 4), dynamic, ("cp=2 tp=2", "ax = cp tp"), transposed)


def several_results() -> list[str]:
    """What differs from eager mode where a size is found to be one number after a result has it as a symbol."""
    torch._dynamo.reset()
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")

    def product(x: DTensor, w: DTensor) -> DTensor:
        return axes.einsum(x, w, "b d e, d f -> b f e@tp", mesh=mesh)

    def several(x: DTensor, w: DTensor) -> tuple[DTensor, ...]:
        return x + 1, product(x, w), axes.repeat(product(x, w), "b f e@tp -> b@tp f e@dp g", g=3, mesh=mesh)

    wrong, fast = [], torch.compile(several, backend="aot_eager", fullgraph=True)
    for b, d, e in ((4, 7, 3), (9, 5, 6), (11, 5, 6)):
        found = []
        for call in (several, fast):
            x = axes.shard(numbers(b, d, e), "b d e", mesh=mesh).requires_grad_()
            w = axes.shard(numbers(d, 4), "d f", mesh=mesh).requires_grad_()
            results = call(x, w)
            sum(axes.unshard(y).square().sum() for y in results).backward()
            found.append([*map(axes.unshard, [*results, x.grad, w.grad])])
        if not all(map(torch.allclose, *found)):
            wrong.append(f"{b, d, e}")
    return wrong


def test_a_size_that_becomes_a_number_is_one_in_every_result(warm):
    assert warm(several_results, 4, timeout=300) == [[]] * 4
