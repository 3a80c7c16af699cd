"""Steps of the examples, for tests of `axes.explain`: explained in one process, and counted on real ranks.

What is counted is what torch's process groups are handed: each collective with the ranks of its group, and the bytes
that this rank receives from others and sends to them, by plain arithmetic on the tensors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import axes
from tests.conftest import BEFORE_2_13
from tests.counting import Counted, Counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import llama
import moe
from pipelined import mesh_of

Step = Callable[[], Any]


def llama_step(mesh_text: str) -> tuple[Step, axes.Mesh]:
    """A step of the Llama, whose parameters FSDP2 gathers: that which `examples/llama.lock` has."""
    mesh = mesh_of(llama.Options(mesh=mesh_text), llama.AXES, "fsdp = dp cp")
    return llama.build(mesh)[1], mesh


def moe_step(capacity: int | None) -> tuple[Step, axes.Mesh]:
    """A mixture of experts: with a capacity, or with as many tokens for an expert as choose it."""
    mesh = axes.init_mesh(*moe.DECLARATION, device_type="cpu", dp_shard=4, cp=1, tp=2, ep=4)
    exchange = moe.dropless if capacity is None else partial(moe.with_capacity, capacity=capacity)
    generator, sparse = torch.Generator().manual_seed(0), mesh["efsdp", "ep"]
    shapes = {moe.TOKENS: (moe.BATCH, 16, 16), moe.ROUTER: (16, 8), moe.UP: (8, 16, 32), moe.DOWN: (8, 32, 16)}
    homes = {moe.UP: sparse, moe.DOWN: sparse}
    inputs = [
        axes.shard(torch.randn(shape, generator=generator), spec, mesh=homes.get(spec, mesh)).requires_grad_()
        for spec, shape in shapes.items()
    ]
    layer = moe.experts_layer(exchange)

    def step() -> None:
        with mesh:
            y = layer(*inputs)
            y.backward(axes.shard(torch.ones(y.shape), moe.TOKENS))

    return step, mesh


STEPS: dict[str, Callable[[], tuple[Step, axes.Mesh]]] = {
    "llama": lambda: llama_step("dp=2 cp=2 tp=2"),
    "llama in two stages": lambda: llama_step("pp=2 dp=2 tp=2"),
    "moe with a capacity": lambda: moe_step(4),
}


IN_A_JOB: dict[str, Callable[[], tuple[Step, axes.Mesh]]] = {
    "llama in two stages in its job": lambda: llama_step("pp=2 dp=2 tp=2"),
    "moe, dropless": lambda: moe_step(None),
}
"""Steps that a simulated world can't explain: they send by what was sent, or stages ask one another for shapes."""


BY_EXCHANGE = {"reduce_scatter": "all_to_all", "permute": "all_to_all", "reduce_move": "all_to_all"}
"""What gloo runs for a step of another kind: an exchange, of as many bytes."""


def told(explained: Any, mesh: axes.Mesh, simulated: bool = True) -> list[Counted]:
    """The collectives of a step, as it is explained, as the counter of real ranks sees them over gloo.

    A job's own explanation has what gloo runs. In a simulated world a plan's reduce-scatter is one, over gloo an
    exchange; one that is called by name is a reduce-scatter in both.
    """
    facts = explained.json()
    found = []
    for each in facts["collectives"]:
        planned = each["by"] == "axes" and not each["what"].startswith(("psum", "gradient of shard_map"))
        kind = BY_EXCHANGE.get(each["kind"], each["kind"]) if planned and simulated else each["kind"]
        found.append((kind, reached(mesh, each["axes"], facts["rank"]), each["bytes_in"], each["bytes_out"]))
    return found


def reached(mesh: axes.Mesh, names: Sequence[str], rank: int) -> tuple[int, ...]:
    """The ranks that differ from this one along these names alone."""
    found = {rank}
    for name in names:
        found = {other for each in found for other in mesh.axis(name).ranks_of(each)}
    return tuple(sorted(found))


def count_steps(names: Sequence[str]) -> dict[str, list[Counted]]:
    """What this rank is counted to send in the first step of each of these; of stages in the second."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        step, _ = STEPS[name]()
        if "stages" in name:
            step()  # before the first one stages vote whether they know their shapes
        with Counter() as counter:
            step()
        found[name] = counter.found
    return found


def explain_steps(names: Sequence[str], rank: int) -> dict[str, Any]:
    """The same steps, explained in this process as that rank of eight."""
    found = {}
    for name in names:
        with axes.simulate(8, rank):
            step, mesh = STEPS[name]()
            found[name] = axes.explain(step, mesh=mesh)
    return found


def tell_steps(names: Sequence[str], rank: int) -> dict[str, list[Counted]]:
    """What they are explained to send, as it is counted."""
    found = {}
    for name in names:
        with axes.simulate(8, rank):
            step, mesh = STEPS[name]()
            if "stages" in name and BEFORE_2_13:
                step()  # before the first one stages send each other a number
            found[name] = told(axes.explain(step, mesh=mesh), mesh)
    return found


def explain_and_count_in_a_job(names: Sequence[str]) -> dict[str, tuple[list[Counted], list[Counted]]]:
    """What steps of the running job are said to send, and what they are counted to send, after one that is neither."""
    torch.set_num_threads(1)
    found = {}
    axes.init_mesh("tp=8", device_type="cpu").create_groups()  # a name that means other ranks in the meshes below
    for name in names:
        step, mesh = IN_A_JOB[name]()
        step()
        explained = axes.explain(step, mesh=mesh)
        with Counter() as counter:
            step()
        found[name] = told(explained, mesh, simulated=False), counter.found
    return found


# --- operations


class Operation(NamedTuple):
    """An operation on `dp=4 tp=2`, with the whole shapes of its operands."""

    kind: str
    text: str
    shapes: tuple[tuple[int, ...], ...]
    op: str = "sum"
    sizes: tuple[tuple[str, int], ...] = ()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        how = (self.op,) if self.kind == "reduce" else ()
        return (getattr(axes, self.kind)(*tensors, self.text, *how, **dict(self.sizes)),)

    @property
    def specs(self) -> list[str]:
        """How the operands lie."""
        return [spec.strip() for spec in self.text.split("->")[0].split(",")]


MESH = "dp=4 tp=2"

# fmt: off
OPERATIONS = [
    Operation("rearrange", "b s@tp d -> b s d", ((4, 8, 6),)),
    Operation("rearrange", "b s@tp d -> b s d@tp", ((4, 8, 6),)),
    Operation("rearrange", "b@dp s@tp -> b s@(dp tp)", ((8, 16),)),
    Operation("rearrange", "b s@tp -> b s", ((4, 7),), sizes=(("s", 7),)),
    Operation("rearrange", "b (h d)@tp -> b h d@tp", ((4, 12),), sizes=(("h", 2),)),
    Operation("rearrange", "b s@(dp tp) -> b s@(tp dp)", ((4, 16),)),
    Operation("reduce", "b@dp s@tp -> b@dp", ((8, 6),)),
    Operation("reduce", "b@dp s@tp -> b", ((8, 6),), op="mean"),
    Operation("reduce", "b@dp s@tp -> b@dp", ((8, 6),), op="max"),
    Operation("repeat", "b@dp -> b@dp n@tp", ((8,),), sizes=(("n", 4),)),
    Operation("einsum", "b@dp d, d f@tp -> b@dp f@tp", ((8, 6), (6, 4))),
    Operation("einsum", "b@dp f@tp, f@tp d -> b@dp d@tp", ((8, 6), (6, 4))),
    Operation("einsum", "b@dp f@tp, f@tp d -> b@dp d | sum@tp", ((8, 6), (6, 4))),
]
# fmt: on


def count_operations() -> list[dict[str, list[Counted]]]:
    """What this rank is counted to send for each of them: forward, backward, and backward of plain shards."""
    torch.set_num_threads(1)
    found = []
    with axes.init_mesh(MESH, device_type="cpu"):
        for each in OPERATIONS:
            wholes = [torch.arange(float(math.prod(shape))).view(shape) for shape in each.shapes]
            tensors = [axes.shard(x, spec, **_sizes(each, spec)) for x, spec in zip(wholes, each.specs, strict=True)]
            shards = [axes.to_local(x).clone().requires_grad_() for x in tensors]
            for x in tensors:
                x.requires_grad_()
            with Counter() as forward:
                ys = each(tensors)
            cotangents = [axes.shard(torch.ones(y.shape), axes.spec_of(y).partition(" |")[0]) for y in ys]
            with Counter() as backward:
                torch.autograd.backward(ys, cotangents)
            ys = each(shards)
            with Counter() as of_shards:
                torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
            counters = {"forward": forward, "backward": backward, "of shards": of_shards}
            found.append({name: counter.found for name, counter in counters.items()})
    return found


def _sizes(each: Operation, spec: str) -> dict[str, int]:
    return {name: size for name, size in each.sizes if name in spec.replace("(", " ").replace("@", " ").split()}


def explain_operation(each: Operation) -> Any:
    """The same, explained."""
    return axes.explain(each.text, *each.shapes, mesh=MESH, op=each.op, **dict(each.sizes))
