"""Operations on DTensors in `torch.compile(fullgraph=True)`: values, gradients and collectives as in eager."""

from __future__ import annotations

from collections.abc import Callable

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes


def layer(x: DTensor, w: DTensor, v: DTensor) -> DTensor:
    h = axes.rearrange(x, "b s@tp d -> b s d")
    h = torch.relu(axes.einsum(h, w, "b s d, d f@tp -> b s f@tp"))
    return axes.einsum(h, v, "b s f@tp, f@tp d -> b s@tp d")


def two_layers(x: DTensor, w: DTensor, v: DTensor) -> DTensor:
    y = layer(layer(x, w, v), w, v)
    return axes.reduce(axes.repeat(y, "b s@tp d -> b s@tp d n", n=2), "b s@tp d n -> b d", "mean")


def operands(batch: int) -> list[DTensor]:
    generator = torch.Generator().manual_seed(batch)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    pairs = [
        (numbers(batch, 8, 6), "b@dp s@tp d"),
        (numbers(6, 12), "d f@tp"),
        (numbers(12, 6), "f@tp d"),
    ]
    return [axes.shard(x, spec).requires_grad_() for x, spec in pairs]


def ran(call: Callable[..., DTensor], batch: int) -> list[torch.Tensor]:
    """The value and all gradients, whole."""
    inputs = operands(batch)
    y = call(*inputs)
    axes.unshard(y).square().sum().backward()
    return [axes.unshard(t) for t in (y.detach(), *(x.grad for x in inputs if x.grad is not None))]


class Sent:
    """A compiler that changes nothing, and counts the collectives of each graph that it is given."""

    def __init__(self) -> None:
        self.forward: list[int] = []
        self.backward: list[int] = []

    def compiler(self, counts: list[int]) -> Callable[..., object]:
        def compile_(graph: torch.fx.GraphModule, _: object) -> object:
            names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            counts.append(sum("c10d_functional" in name and "wait_tensor" not in name for name in names))
            return make_boxed_func(graph.forward)

        return compile_


def compiled_and_eager() -> tuple[list[float], list[int], list[int], list[int], int]:
    torch._dynamo.reset()
    sent = Sent()
    backend = aot_autograd(fw_compiler=sent.compiler(sent.forward), bw_compiler=sent.compiler(sent.backward))
    with axes.init_mesh("dp=2 tp=4", device_type="cpu"):
        compiled = torch.compile(two_layers, fullgraph=True, backend=backend)
        off: list[float] = []
        graphs: list[int] = []
        for batch in (4, 4, 8):  # the same shape again, then another
            before = counters["stats"]["unique_graphs"]
            ours = ran(compiled, batch)
            graphs.append(counters["stats"]["unique_graphs"] - before)
            plain = ran(two_layers, batch)
            assert len(ours) == len(plain) == 4
            off += [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, plain, strict=True)]
        with CommDebugMode() as eager:
            two_layers(*operands(4))
        return off, graphs, sent.forward, sent.backward, eager.get_total_counts()


def test_two_layers_compile_to_one_graph_a_shape_with_the_collectives_of_eager(pool):
    for off, graphs, forward, backward, eager in pool.run(compiled_and_eager, timeout=120):
        assert max(off) < 1e-12
        assert graphs == [1, 0, 1]
        # Each layer gathers and scatters once, and the mean is summed.
        assert forward == [eager] * 2 == [5, 5]
        assert len(backward) == 2
