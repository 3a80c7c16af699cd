"""Scopes in compiled graphs: regions within checkpoints and the reverse, and the mesh that names mean there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import axes
from axes.algebra.ambient import ambient_mesh

Call = Callable[[DTensor], DTensor]


@axes.shard_map("b@dp d -> b@dp")
def inner(x: torch.Tensor) -> torch.Tensor:
    return axes.psum(x.sin().sum(1), "tp") * axes.axis_size("tp")


@axes.shard_map("b@dp d -> b@dp d")
def outer(x: torch.Tensor) -> torch.Tensor:
    """A region in a region, and names of the outer one after it."""
    scale = inner(axes.from_local(x.cos(), "b@dp d"))
    return x * axes.to_local(scale)[:, None] / axes.psum(x.sin().exp(), "dp")


@axes.shard_map("b@dp d -> b@dp d")
def inside(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: axes.pmean(y.sin() * y, "tp").cos(), x, use_reentrant=False)


@axes.shard_map("b@dp d -> b@dp d")
def tried(x: torch.Tensor) -> torch.Tensor:
    try:
        shouting(axes.from_local(x, "b@dp d"))
    except ValueError:
        return axes.psum(x * x, "dp")
    return x


@axes.shard_map("b@dp d -> b@dp d")
def shouting(x: torch.Tensor) -> torch.Tensor:
    raise ValueError


def around(x: DTensor) -> DTensor:
    return checkpoint(outer, x.sin(), use_reentrant=False).cos()


def in_block(x: DTensor) -> DTensor:
    """A mesh that a function enters by itself, within a checkpoint."""

    def softened(x: DTensor) -> DTensor:
        with axes.use_mesh(axes.sharding_of(x).mesh):
            return axes.from_local(axes.softmax(axes.to_local(x), "b@dp d", over="b"), "b@dp d")

    return checkpoint(softened, x * 2, use_reentrant=False)


def in_loop(x: DTensor) -> DTensor:
    for _ in range(2):
        x = checkpoint(outer, x, use_reentrant=False)
        x = axes.rearrange(outer(x), "b@dp d -> b d@dp")
        x = axes.reshard(x, "b@dp d")
    return x


CALLS: dict[str, Call] = {
    "nested": outer,
    "around": around,
    "inside": lambda x: inside(x * 2),
    "both": lambda x: checkpoint(inside, x * 2, use_reentrant=False),
    "tried": tried,
    "block": in_block,
    "loop": in_loop,
}


def ran(call: Call) -> list[torch.Tensor]:
    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = axes.shard(whole.requires_grad_(), "b@dp d")
    y = call(x)
    axes.unshard(y * y).sum().backward()
    return [axes.unshard(y), axes.unshard(x.grad)]


def compiled(names: list[str], backend: str) -> list[str]:
    wrong = []
    with axes.init_mesh("dp=2 tp=1", device_type="cpu") as mesh:
        for name in names:
            torch._dynamo.reset()
            counted = CompileCounterWithBackend(backend)
            fast = torch.compile(CALLS[name], backend=counted, fullgraph=True)
            eager, ours = ran(CALLS[name]), [*ran(fast), *ran(fast)]
            if not all(torch.allclose(*pair) for pair in zip(ours, eager * 2, strict=True)):
                wrong.append(name)
            if counted.frame_count != 1 or ambient_mesh() is not mesh:
                wrong.append(f"{name}: {counted.frame_count} graphs, {ambient_mesh()} is ambient")
    return wrong


def test_checkpoints_around_regions_and_within_them_compile(warm):
    for wrong in warm(compiled, 2, list(CALLS), "aot_eager", timeout=240):
        assert wrong == []


@pytest.mark.full
def test_checkpoints_and_regions_compile_with_inductor(warm):
    for wrong in warm(compiled, 2, list(CALLS), "inductor", timeout=900):
        assert wrong == []


def broken() -> list[str]:
    """Graphs that break within a scope: what is eager there finds the mesh, and nothing of it stays."""
    found = []

    @axes.shard_map("b@dp d -> b@dp d")
    def breaking(x: torch.Tensor) -> torch.Tensor:
        y = axes.psum(x.sin(), "dp")
        torch._dynamo.graph_break()
        found.append(repr(ambient_mesh()))
        return axes.psum(y.cos(), "dp") * axes.axis_size("dp")

    def in_block(x: DTensor) -> DTensor:
        with axes.use_mesh(axes.sharding_of(x).mesh):
            y = axes.reshard(x.sin(), "b@() d@dp")
            torch._dynamo.graph_break()
            found.append(repr(ambient_mesh()))
            return axes.reshard(y.cos(), "b@dp d@()")

    mesh = axes.init_mesh("dp=2", device_type="cpu")
    for call in (breaking, in_block, lambda x: outside(breaking(x))):
        with mesh:
            eager = ran(call)
            torch._dynamo.reset()
            fast = torch.compile(call, backend="aot_eager")
            for _ in range(2):
                for one, other in zip(ran(fast), eager, strict=True):
                    torch.testing.assert_close(one, other)
            assert ambient_mesh() is mesh
        assert ambient_mesh() is None
    return found


@axes.shard_map("b@dp d -> b@dp d")
def outside(x: torch.Tensor) -> torch.Tensor:
    return axes.psum(x, "dp")


def test_a_graph_that_breaks_within_a_scope_leaves_it_as_it_was(warm):
    for found in warm(broken, 2, timeout=300):
        assert len(found) == 9
        assert len(set(found)) == 1


def other_mesh() -> None:
    torch._dynamo.reset()
    mesh, other = (axes.init_mesh(text, device_type="cpu") for text in ("a=2 b=1", "b=2 a=1"))
    fast = torch.compile(lambda x: axes.psum(x, "a"), backend="aot_eager", fullgraph=True)
    for where, total in ((mesh, 2.0), (other, 1.0), (mesh, 2.0)):
        with where:
            assert fast(torch.ones(1)).item() == total


def test_the_mesh_outside_of_a_graph_is_still_guarded(warm):
    warm(other_mesh, 2, timeout=300)
