"""Generated expressions on real processes: values, gradients of every operand, promised shardings.

Eight local ranks are cut into islands of the size of a mesh, and each island works through cases of
its own, in the global view (DTensors) and in the local view (plain shards). What is right is what
einops and torch's autograd say about the whole tensors.
"""

from __future__ import annotations

import random as stdlib_random
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import axes
from axes.algebra.errors import ShardingError
from axes.algebra.flow import Recipe, recipe
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import PendingReduction, Sharding
from axes.ops.einops_ops import rearrange, reduce, repeat
from axes.ops.einsum import einsum
from axes.runtime.redistribute import redistribute
from axes.runtime.sharded import dtensor_of, sharding_of
from tests.flow_cases import Case, Random, case
from tests.flow_oracle import indices, scatter
from tests.test_flow import REFUSED, any_sharding

ISLANDS = [
    # declaration, ranks, cases per island
    ("tp=1", 1, 10),
    ("tp=2", 2, 150),
    ("dp=1 tp=2", 2, 50),
    ("tp=3", 3, 60),
    ("tp=4", 4, 60),
    ("dp=2 tp=2", 4, 240),
    ("tp=5", 5, 30),
    ("dp=3 tp=2", 6, 60),
    ("dp=2 cp=2 tp=2", 8, 120),
    ("dp=2 tp=4", 8, 30),
]
"""In each view; with 8 // ranks islands side by side this is more than 1,500 cases, in both 3,000."""

FUNCTIONS = {"rearrange": rearrange, "reduce": reduce, "repeat": repeat, "einsum": einsum}


def island_of(ranks: int) -> range | None:
    """The ranks of this rank's island, None for the ranks that are left over."""
    start = dist.get_rank() // ranks * ranks
    return range(start, start + ranks) if start + ranks <= dist.get_world_size() else None


def run_cases(declaration: str, ranks: int, count: int, view: str) -> int:
    """Works through `count` accepted cases on this rank's island; how many it was."""
    island = island_of(ranks)
    if island is None:
        return 0
    torch.set_num_threads(1)
    mesh = axes.init_mesh(declaration, ranks=island, device_type="cpu")
    random = stdlib_random.Random(f"{declaration} {island} {view}")
    done = 0
    while done < count:
        found = case(random, everything_explicit=view == "local", mesh=mesh)
        made = accepted(found)
        if made is None or (view == "local" and not all_declared(found)):
            continue
        try:
            (check_global if view == "global" else check_local)(random, found, made)
        except Exception as error:
            error.add_note(f"case {done}: {found}\n{made}")
            raise
        done += 1
    return done


def accepted(found: Case) -> Recipe | None:
    try:
        for sharding, shape in zip(found.shardings, found.shapes, strict=True):
            check_torch_can(sharding, shape)
        sizes = tuple(found.sizes.items())
        return recipe(found.kind, found.text, found.op, found.shardings, found.shapes, found.mesh, sizes)
    except ShardingError as error:
        if any(text in str(error) for text in REFUSED):
            return None
        raise


def all_declared(found: Case) -> bool:
    """Whether everything that is pending is pending in the text, too."""
    words = set(re.findall(r"\w+", found.text.split("->")[0]))
    return all(axis in words for s in found.shardings for p in s.pending for axis in p.axes)


def call(found: Case, tensors: list[torch.Tensor]) -> torch.Tensor:
    options = {"sizes": found.sizes, "mesh": found.mesh}
    if found.kind == "einsum":
        return einsum(*tensors, found.text, **options)
    arguments = (found.text, found.op) if found.kind == "reduce" else (found.text,)
    return FUNCTIONS[found.kind](tensors[0], *arguments, **options)


def local_of(whole: np.ndarray, sharding: Sharding, seed: int) -> torch.Tensor:
    rank = dist.get_rank()
    return torch.from_numpy(np.array(scatter(whole, sharding, seed, [rank])[rank], order="C"))


def close(local: torch.Tensor, sharding: Sharding, whole: torch.Tensor, what: str) -> None:
    """Whether `local` is this rank's shard of `whole`, once what is pending is resolved."""
    shape = tuple(whole.shape)
    resolved = Sharding(sharding.mesh, sharding.dims)
    local = redistribute(local.detach(), sharding, resolved, shape) if sharding.pending else local.detach()
    expected = whole.detach().numpy()[indices(resolved, shape, dist.get_rank())]
    np.testing.assert_allclose(local.numpy(), expected, atol=1e-9, err_msg=what)


def whole_gradients(found: Case, cotangent: torch.Tensor) -> list[torch.Tensor]:
    wholes = [whole.clone().requires_grad_() for whole in found.wholes]
    value = found.expected(wholes)
    return list(torch.autograd.grad(value, wholes, cotangent, materialize_grads=True))


def random_cotangent(found: Case, made: Recipe) -> torch.Tensor:
    numbers = np.random.default_rng(found.seed + 1)
    return torch.from_numpy(np.asarray(numbers.integers(-3, 4, made.result.shape), dtype=np.float64))


def check_global(random: Random, found: Case, made: Recipe) -> None:
    leaves = []
    for index, (whole, sharding) in enumerate(zip(found.wholes, found.shardings, strict=True)):
        local = local_of(whole.numpy(), sharding, found.seed + index)
        leaves.append(dtensor_of(local, sharding, whole.shape, found.mesh.device_mesh).requires_grad_())
    value = call(found, leaves)
    assert isinstance(value, DTensor)
    output, shape = made.result.output, made.result.shape
    assert tuple(value.shape) == shape
    check_promised(sharding_of(value), output, shape)
    close(value.to_local(), output, found.expected(), "the value")
    if found.op in ("max", "min") and (output.pending or found.shardings[0].pending):
        return  # it isn't resolved in this expression, so it has no gradient
    cotangent = random_cotangent(found, made)
    arrived = any_sharding(random, made)
    part = local_of(cotangent.numpy(), arrived, found.seed + 7)
    value.backward(dtensor_of(part, arrived, shape, found.mesh.device_mesh))
    for number, (leaf, sharding, expected) in enumerate(
        zip(leaves, found.shardings, whole_gradients(found, cotangent), strict=True)
    ):
        assert leaf.grad is not None
        own = Sharding(sharding.mesh, sharding.dims)
        assert sharding_of(leaf.grad).is_equivalent(own, tuple(leaf.shape)), f"{sharding_of(leaf.grad)} isn't {own}"
        close(leaf.grad.to_local(), own, expected, f"the gradient of operand {number + 1}, from {arrived}")


def check_promised(found: Sharding, promised: Sharding, shape: tuple[int, ...]) -> None:
    """The same splits, and the same pending reductions, of which a DTensor doesn't know the order."""
    splits = [Sharding(s.mesh, s.dims) for s in (found, promised)]
    assert splits[0].is_equivalent(splits[1], shape), f"{found} isn't {promised}"
    pending = [{(p.op, axis) for p in s.pending for axis in p.axes} for s in (found, promised)]
    assert pending[0] == pending[1], f"{found} isn't {promised}"


def check_local(random: Random, found: Case, made: Recipe) -> None:
    leaves = [
        local_of(whole.numpy(), sharding, found.seed + index).requires_grad_()
        for index, (whole, sharding) in enumerate(zip(found.wholes, found.shardings, strict=True))
    ]
    value = call(found, leaves)
    output = made.result.output
    close(value, output, found.expected(), "the value")
    if found.op in ("max", "min") and (output.pending or found.shardings[0].pending):
        return  # it isn't resolved in this expression
    cotangent = random_cotangent(found, made)
    # The cotangent of a replicated value is this rank's summand, and a mean's is divided.
    arrived, share = dual(output, found.text)
    part = local_of(cotangent.numpy(), arrived, found.seed + 7) / share
    value.backward(part)
    for number, (leaf, sharding, expected) in enumerate(
        zip(leaves, found.shardings, whole_gradients(found, cotangent), strict=True)
    ):
        assert leaf.grad is not None
        back, parts = dual(sharding, found.text)
        close(leaf.grad * parts, back, expected, f"the gradient of operand {number + 1}")


def dual(sharding: Sharding, text: str) -> tuple[Sharding, int]:
    """How the gradient of a plain shard lies: split as it is, summands where it is replicated.

    And the number of ranks over which it has a mean pending.
    """
    mesh = sharding.mesh
    used = {axis for dim in sharding.dims for axis in dim.axes}
    reduced = {axis: p.op for p in sharding.pending for axis in p.axes}
    words = set(re.findall(r"\w+", text))
    mentioned = [axis for axis in mesh.axis_names if axis in words]
    summed = tuple(a for a in mentioned if a not in used and a not in reduced)
    pending = (PendingReduction("sum", summed),) if summed else ()
    means = [mesh.names[axis] for axis, op in reduced.items() if op == "mean"]
    return Sharding(mesh, sharding.dims, pending), int(np.prod(means, dtype=int))


@pytest.mark.parametrize("view", ["global", "local"])
@pytest.mark.parametrize(("declaration", "ranks", "count"), ISLANDS, ids=[line[0] for line in ISLANDS])
def test_generated_expressions_agree_with_einops_on_the_whole(pool, declaration: str, ranks: int, count: int, view: str):
    done = pool.run(run_cases, declaration, ranks, count, view, timeout=300)
    assert done == [count if rank < 8 // ranks * ranks else 0 for rank in range(8)]


def test_more_than_three_thousand_cases_are_generated():
    assert 2 * sum(count * (8 // ranks) for _, ranks, count in ISLANDS) >= 3000
