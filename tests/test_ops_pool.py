"""Generated expressions on real processes: values, gradients of every operand, promised shardings.

Eight local ranks are cut into islands of the size of a mesh, and each island works through cases of
its own, in the global view (DTensors) and in the local view (plain shards). What is right is what
einops and torch's autograd say about the whole tensors.
"""

from __future__ import annotations

import random as stdlib_random
import re

import einops
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import axes
from axes.algebra.errors import ShardingError
from axes.algebra.flow import Recipe, recipe
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
"""In each view; with 8 // ranks islands side by side this is more than 1,500 cases, in both 3,000.

Every run takes a third of them: the law `operations` of `test_laws.py` draws from the same generator.
"""

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
        sizes = tuple(found.given.items())
        return recipe(found.kind, found.text, found.op, found.shardings, found.shapes, found.mesh, sizes)
    except ShardingError as error:
        if any(text in str(error) for text in REFUSED):
            return None
        raise


def all_declared(found: Case) -> bool:
    """Whether everything that is pending is pending in the text, too."""
    words = set(re.findall(r"\w+", found.text.split("->")[0]))
    return all(axis.name in words for s in found.shardings for p in s.pending for axis in p.axes)


def call(found: Case, tensors: list[torch.Tensor]) -> torch.Tensor:
    options = {"sizes": found.given, "mesh": found.mesh}
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
    used = {axis.name for dim in sharding.dims for axis in dim.axes}
    reduced = {axis.name: p.op for p in sharding.pending for axis in p.axes}
    words = set(re.findall(r"\w+", text))
    mentioned = [axis for axis in mesh.axis_names if axis in words]
    summed = tuple(a for a in mentioned if a not in used and a not in reduced)
    pending = (PendingReduction("sum", mesh.named(summed)),) if summed else ()
    means = [mesh.names[axis] for axis, op in reduced.items() if op == "mean"]
    return Sharding(mesh, sharding.dims, pending), int(np.prod(means, dtype=int))


@pytest.mark.parametrize("view", ["global", "local"])
@pytest.mark.parametrize(("declaration", "ranks", "count"), ISLANDS, ids=[line[0] for line in ISLANDS])
def test_generated_expressions_agree_with_einops_on_the_whole(
    pool, declaration: str, ranks: int, count: int, view: str
):
    agreeing(pool, declaration, ranks, count // 3, view)


@pytest.mark.full
@pytest.mark.parametrize("view", ["global", "local"])
@pytest.mark.parametrize(("declaration", "ranks", "count"), ISLANDS, ids=[line[0] for line in ISLANDS])
def test_all_generated_expressions_agree_with_einops_on_the_whole(
    pool, declaration: str, ranks: int, count: int, view: str
):
    agreeing(pool, declaration, ranks, count, view)


def agreeing(pool, declaration: str, ranks: int, count: int, view: str) -> None:
    done = pool.run(run_cases, declaration, ranks, count, view, timeout=300)
    assert done == [count if rank < 8 // ranks * ranks else 0 for rank in range(8)]


def test_more_than_three_thousand_cases_are_generated():
    assert 2 * sum(count * (8 // ranks) for _, ranks, count in ISLANDS) >= 3000


# The two views of one block


def counted(run):
    """What `run` returns, and the collectives that it called, by kind."""
    with CommDebugMode() as mode:
        value = run()
    names = {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0, "all_to_all": 0}
    for op, count in mode.get_comm_counts().items():
        kind = next(kind for kind in (*names, "allreduce", "allgather", "alltoall") if kind in str(op))
        names[{"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}.get(kind, kind)] += count
    return value, {kind: count for kind, count in names.items() if count}


def block(x, w, v, same: str):
    """An MLP, column then row parallel; `same` declares what plain tensors need and DTensors know."""
    h = einsum(x, w, f"b s d{same}, d f@tp -> b s f@tp")
    return einsum(torch.relu(h), v, f"b s f@tp, f@tp d -> b s d{same}")


def megatron(view: str):
    """The block's value, the gradient of its input, and the collectives of both directions."""
    torch.set_num_threads(1)
    mesh = axes.init_mesh("dp=2 tp=4", device_type="cpu")
    torch.manual_seed(0)
    wholes = [torch.randn(shape, dtype=torch.float64) for shape in ((4, 6, 8), (8, 16), (16, 8))]
    specs = ["b@dp s d", "d f@tp", "f@tp d"]
    sharded = [axes.shard(t, spec, mesh=mesh) for t, spec in zip(wholes, specs, strict=True)]
    local = view == "local"
    leaves = [(x.to_local() if local else x).detach().clone().requires_grad_() for x in sharded]
    # The input is what an earlier layer made, and its gradient goes on there.
    inside = leaves[0] * 1
    with mesh:
        y, forward = counted(lambda: block(inside, *leaves[1:], " | same@tp" if local else ""))
    loss = (y if local else y.to_local(grad_placements=y.placements)).square().sum() / 2
    (gradient,), backward = counted(lambda: torch.autograd.grad(loss, [leaves[0]]))
    if not local:
        gradient = gradient.redistribute(placements=leaves[0].placements).to_local()
    return (y if local else y.to_local()).detach(), gradient, forward, backward


def megatron_in_both_views():
    (y, gradient, *counts), (local_y, local_gradient, *local_counts) = map(megatron, ("global", "local"))
    return torch.allclose(y, local_y), torch.allclose(gradient, local_gradient), *counts, *local_counts


def test_a_megatron_block_is_the_same_in_both_views(pool):
    for same_value, same_gradient, forward, backward, local_forward, local_backward in pool.run(megatron_in_both_views):
        assert same_value
        assert same_gradient
        assert forward == local_forward == {"all_reduce": 1}
        assert local_backward == {"all_reduce": 1}
        assert backward in ({"all_reduce": 1}, {})  # what is pending may be left to whoever needs it


def gradients_of_leaves():
    torch.set_num_threads(1)
    mesh = axes.init_mesh("dp=2 tp=4", device_type="cpu")
    x = axes.shard(torch.randn(8, 16), "b@dp d", mesh=mesh)
    report = {}
    for grad in ("resolved", "pending"):
        w = axes.shard(torch.randn(16, 16), "d f", mesh=mesh).requires_grad_()
        y = einsum(einsum(x, w, "b d, d f -> b f", grad=grad), w, "b d, d f -> b f", grad=grad)
        _, counts = counted(lambda y=y: y.sum().backward())
        report[grad] = axes.spec_of(w.grad), counts
    return report


def test_the_gradient_of_a_leaf_that_is_used_twice_is_reduced_once(pool):
    for report in pool.run(gradients_of_leaves):
        assert report["resolved"] == ("_ _", {"all_reduce": 1})
        assert report["pending"] == ("_ _ | sum@dp", {})


def second_derivatives():
    torch.set_num_threads(1)
    mesh = axes.init_mesh(
        "dp=2 tp=2", device_type="cpu", ranks=range(dist.get_rank() // 4 * 4, dist.get_rank() // 4 * 4 + 4)
    )
    torch.manual_seed(0)
    whole = [torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)]

    def penalty(x, w, product):
        (g,) = torch.autograd.grad(product(x, w).square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), [x, w])

    plain = [t.clone().requires_grad_() for t in whole]
    expected = penalty(*plain, lambda x, w: x @ w)
    sharded = [
        axes.shard(t, spec, mesh=mesh).requires_grad_() for t, spec in zip(whole, ("b@dp d", "d f@tp"), strict=True)
    ]
    found = penalty(*sharded, lambda x, w: einsum(x, w, "b d, d f@tp -> b f"))
    return [torch.allclose(f.full_tensor(), e) for f, e in zip(found, expected, strict=True)]


def test_a_gradient_can_be_differentiated_again(pool):
    assert pool.run(second_derivatives) == [[True, True]] * 8


def other_reductions():
    torch.set_num_threads(1)
    mesh = axes.init_mesh("dp=2 tp=4", device_type="cpu")
    torch.manual_seed(0)
    whole = torch.randn(4, 3, 8, dtype=torch.float64)
    agree = []
    for op in ("prod", lambda x, dims: torch.logsumexp(x, dims)):
        plain = whole.clone().requires_grad_()
        expected = einops.reduce(plain, "b (s1 s2) d -> d s1 b", op, s1=3)
        (expected**2).sum().backward()
        leaf = axes.shard(whole, "b s d@tp", mesh=mesh).requires_grad_()
        found = reduce(leaf, "b (s1 s2) d@tp -> d s1 b", op, s1=3)
        (found**2).sum().backward()
        agree.append(torch.allclose(found.full_tensor(), expected))
        agree.append(torch.allclose(leaf.grad.full_tensor(), plain.grad))
        agree.append(axes.spec_of(leaf.grad) == "_ _ _@tp")
    return agree


def test_products_and_functions_reduce_what_isnt_split(pool):
    assert pool.run(other_reductions) == [[True] * 6] * 8


def empty_shards():
    torch.set_num_threads(1)
    mesh = axes.init_mesh("tp=8", device_type="cpu")
    whole = torch.tensor([[3.0, 1.0, 3.0], [1.0, 5.0, 2.0]])
    x = axes.shard(whole, "b s@tp", mesh=mesh).requires_grad_()
    y = reduce(x, "b s@tp -> b", "max")
    y.sum().backward()
    local = axes.to_local(x.detach()).clone().requires_grad_()
    z = reduce(local, "b s@tp -> b", "max", mesh=mesh, s=3)
    (z / 8).sum().backward()  # a replicated value's gradient is this rank's summand
    mean = reduce(local, "b s@tp -> b", "mean", mesh=mesh, s=3)
    return y.to_local().tolist(), x.grad.full_tensor().tolist(), z.tolist(), local.grad.tolist(), mean.tolist()


def test_an_empty_shard_has_no_say(pool):
    for rank, (y, gradient, z, local, mean) in enumerate(pool.run(empty_shards)):
        assert y == z == [3.0, 5.0]
        assert gradient == [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]
        assert local == [row[rank : rank + 1] if rank < 3 else [] for row in gradient]
        assert mean == pytest.approx([7 / 3, 8 / 3])


def on_sub_meshes():
    torch.set_num_threads(1)
    mesh = axes.init_mesh("dp=2 tp=4", "model = tp", device_type="cpu")
    replica = dist.get_rank() // 4
    whole = torch.arange(8.0) + 100 * replica
    x = axes.shard(whole, "d@tp", mesh=mesh["tp"])
    with mesh:  # the names of the ambient mesh, on the tensor's own
        y = rearrange(x, "d@model -> d")
    return y.to_local().tolist() == whole.tolist(), y.device_mesh == mesh["tp"].device_mesh


def test_tensors_of_a_sub_mesh_stay_on_it(pool):
    assert pool.run(on_sub_meshes) == [(True, True)] * 8


def with_keywords():
    torch.set_num_threads(1)
    mesh = axes.init_mesh("tp=8", device_type="cpu")
    x = axes.from_local(torch.full((8, 4), 1 + 2.0**-10), "s d | sum@tp", mesh=mesh)
    exact = rearrange(x, "s d | sum@tp -> s@tp d")
    rough = rearrange(x, "s d | sum@tp -> s@tp d", comm_dtype=torch.bfloat16)
    later = rearrange(x, "s d | sum@tp -> s@tp d", async_op=True)
    return (
        exact.dtype,
        exact.to_local()[0, 0].item(),
        rough.dtype,
        rough.to_local()[0, 0].item(),
        (later + 0).to_local()[0, 0].item(),
    )


def test_what_communicates_takes_a_dtype_and_may_be_waited_for_later(pool):
    for exact, value, rough, rounded, later in pool.run(with_keywords):
        assert exact == rough == torch.float32
        assert value == later == 8 + 2.0**-7
        assert rounded == 8.0


class OnDTensors(TorchDispatchMode):
    """Remembers the operations on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            self.names.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("columns", [4, 7])
def test_the_gradient_of_a_leaf_is_dense_so_that_autograd_takes_it_as_it_is(columns):
    with axes.simulate(3), axes.init_mesh("tp=3", device_type="cpu"):
        x = axes.shard(torch.ones(3, columns), "b a@tp").requires_grad_()
        y = reduce(x, "b a@tp -> a@tp", "sum")  # its gradient is an expanded view
        with OnDTensors() as seen:
            y.backward(axes.shard(torch.ones(columns), "a@tp"))
        assert seen.names == ["aten.detach.default"]
        assert x.grad is not None
        assert x.grad.to_local().is_contiguous()
        assert axes.spec_of(x.grad) == "_ _@tp"
