"""Gradients of redistributions, in both views, against what they must be by definition.

In the local view every rank has a loss. Where `v` is a global change of the source and `g` any
cotangents of the target, `sum over ranks of <f(v), g>` must be `sum over ranks of <v, f'(g)>`: that
alone fixes the gradient `f'`, for split, replicated, pending and `same` axes alike. A loss that the
ranks of a `same` axis compute together counts once.

In the global view there is one loss, so the gradient of a redistribution is the cotangent itself,
however that is sharded when it arrives.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.algebra.errors import ShardingError
from axes.ops.reshard import reshard
from axes.runtime.redistribute import redistribute
from axes.runtime.routes import resharded
from tests.redistribution_cases import AXES, Placing, at, coordinate_of, pairs, varied

SHAPE = (4, 8, 8)
UNEVEN = (5, 7, 3)


def mesh_of_cases() -> axes.Mesh:
    return axes.init_mesh("a=2 b=2 c=2", device_type="cpu")


def local_cases(count: int, seed: int) -> list[tuple[Placing, Placing]]:
    """Pairs with some replicated axes declared `same` on either side."""
    chosen = random.Random(seed)
    found = []
    for source, target in chosen.sample(pairs(), count):
        if chosen.random() < 0.6:
            source = replace(source, same=tuple(x for x in source.replicated if chosen.random() < 0.5))
            target = replace(target, same=tuple(x for x in target.replicated if chosen.random() < 0.5))
        op = chosen.choice(["sum", "sum", "mean"]) if source.pending else "sum"
        found.append((replace(source, op=op), replace(target, op=op)))
    return found


def mentioned(*placings: Placing) -> set[str]:
    return {axis for p in placings for axis in (*p.pending, *p.same, *(x for dim in p.dims for x in dim))}


def total(x: torch.Tensor, y: torch.Tensor, once_over: int) -> float:
    found = (x * y).sum() / once_over
    dist.all_reduce(found)
    return float(found)


def local_mismatches(chosen: list[tuple[Placing, Placing]], shape: tuple[int, ...]) -> list[str]:
    mesh = mesh_of_cases()
    coordinate = coordinate_of(mesh.rank)
    values, cotangents = varied(1, shape), varied(2, shape)
    found = []
    for source, target in chosen:
        unknown = set(AXES) - mentioned(source, target)  # what differs along these is never mixed
        x = source.cut(at(values, coordinate, {*source.pending, *unknown}), coordinate)
        differing = {axis for axis in target.replicated if axis not in target.same}
        g = target.cut(at(cotangents, coordinate, {*differing, *unknown}), coordinate)
        leaf = torch.from_numpy(x).requires_grad_()
        y = redistribute(
            leaf,
            mesh.sharding(source.spec),
            mesh.sharding(target.spec),
            shape,
            view="local",
            source_same=mesh.named(source.same),
            target_same=mesh.named(target.same),
        )
        (gradient,) = torch.autograd.grad(y, leaf, torch.from_numpy(g))
        # A `same` or pending target's cotangent is one value; so is a `same` source's gradient.
        left = total(y.detach(), torch.from_numpy(g), 2 ** len(target.same))
        right = total(leaf.detach(), gradient, 2 ** len(source.same))
        if not math.isclose(left, right, rel_tol=1e-12, abs_tol=1e-9):
            found.append(f"{source} -> {target}: {left} and {right}")
    return found


@pytest.mark.parametrize("shape", [SHAPE, UNEVEN], ids=str)
def test_in_the_local_view_the_gradient_is_the_adjoint_of_the_redistribution(pool, shape):
    for rank, found in enumerate(pool.run(local_mismatches, local_cases(200, 3), shape, timeout=120)):
        assert not found, f"rank {rank}: {found[:3]}"


def pending_gradients_agree(chosen: list[tuple[Placing, Placing]], shape: tuple[int, ...]) -> list[str]:
    """Gradients of pending and of `same` values must be equal along their axes."""
    mesh = mesh_of_cases()
    coordinate = coordinate_of(mesh.rank)
    values, cotangents = varied(1, shape), varied(2, shape)
    found = []
    for source, target in chosen:
        x = torch.from_numpy(source.cut(at(values, coordinate, source.pending), coordinate)).requires_grad_()
        differing = {axis for axis in target.replicated if axis not in target.same} & mentioned(source, target)
        g = torch.from_numpy(target.cut(at(cotangents, coordinate, differing), coordinate))
        ends = mesh.sharding(source.spec), mesh.sharding(target.spec)
        same = {"source_same": mesh.named(source.same), "target_same": mesh.named(target.same)}
        y = redistribute(x, *ends, shape, view="local", **same)
        (gradient,) = torch.autograd.grad(y, x, g)
        for axis in (*source.pending, *source.same):
            if axis in target.pending:
                continue
            line = [torch.empty_like(gradient) for _ in range(2)]
            dist.all_gather(line, gradient.contiguous(), group=mesh.axis(axis).group)
            if not torch.equal(*line):
                found.append(f"{source} -> {target}: differs along {axis}")
    return found


def test_gradients_of_pending_and_of_same_values_are_equal_along_their_axes(pool):
    for rank, found in enumerate(pool.run(pending_gradients_agree, local_cases(120, 4), SHAPE, timeout=120)):
        assert not found, f"rank {rank}: {found[:3]}"


# --- the rows of the table, one by one ------------------------------------------------------------

ROWS = [
    # source, target, gradient of a rank from the cotangents [of coordinate 0, of coordinate 1]
    ("n@a", "n", "sum, its slice"),
    ("n", "n@a", "its own, within zeros"),
    ("n | sum@a", "n", "sum"),
    ("n | sum@a", "n@a", "gathered"),
    ("n | sum@a", "n | same@a", "its own"),
    ("n | same@a", "n", "sum"),
    ("n", "n | same@a", "half of its own"),
    ("n@a", "n | same@a", "its own, sliced"),
    ("n | same@a", "n@a", "gathered"),
    ("n | mean@a", "n", "mean"),
]


def row_gradient(source: str, target: str, x: list[float], g: list[list[float]]) -> list[float]:
    """One axis of two: `x` and `g` by coordinate."""
    mesh = mesh_of_cases()
    me = mesh.coordinate["a"]
    leaf = torch.tensor(x[me], dtype=torch.float64).requires_grad_()
    y = reshard(leaf, f"{source} -> {target}", mesh=mesh)
    y.backward(torch.tensor(g[me], dtype=torch.float64))
    return leaf.grad.tolist()


@pytest.mark.parametrize(("source", "target", "meaning"), ROWS)
def test_a_row_of_the_table_in_the_local_view(pool, source, target, meaning):
    x = [[1.0, 2.0], [3.0, 4.0]] if "@a" not in source.split("|")[0] else [[1.0], [2.0]]
    if "|" not in source or "same" in source:
        x = x if "@a" in source.split("|")[0] else [x[0], x[0]]
    split = "@a" in target.split("|")[0]
    g = [[5.0], [6.0]] if split else [[5.0, 6.0], [7.0, 9.0]]
    if "same" in target:
        g = [g[0], g[0]]
    by_coordinate = {
        "sum, its slice": [[12.0], [15.0]],
        "its own, within zeros": [[5.0, 0.0], [0.0, 6.0]],
        "sum": [[12.0, 15.0]] * 2,
        "gathered": [[5.0, 6.0]] * 2,
        "its own": [[5.0, 6.0]] * 2,
        "half of its own": [[2.5, 3.0]] * 2,
        "its own, sliced": [[5.0], [6.0]],
        "mean": [[6.0, 7.5]] * 2,
    }[meaning]
    found = pool.run(row_gradient, source, target, x, g)
    assert found == [by_coordinate[rank >> 2] for rank in range(8)]


def extreme_gradient(target: str, view: str) -> list[float]:
    mesh = mesh_of_cases()
    me = mesh.coordinate["a"]
    leaf = torch.tensor([[1.0, 5.0, 3.0, 0.0], [4.0, 5.0, 2.0, 0.0]][me], dtype=torch.float64).requires_grad_()
    y = redistribute(leaf, mesh.sharding("n | max@a"), mesh.sharding(target), (4,), view=view)
    cotangents = torch.tensor([[1.0, 10.0, 100.0, 1000.0], [2.0, 20.0, 200.0, 2000.0]], dtype=torch.float64)
    g = cotangents[0] if view == "global" else cotangents[me]
    y.backward(g if target == "n" else g[2 * me : 2 * me + 2])
    return leaf.grad.tolist()


@pytest.mark.parametrize(
    ("target", "view", "gradients"),
    [
        ("n", "local", [[0.0, 15.0, 300.0, 1500.0], [3.0, 15.0, 0.0, 1500.0]]),
        ("n@a", "local", [[0.0, 5.0, 200.0, 1000.0], [1.0, 5.0, 0.0, 1000.0]]),
        ("n", "global", [[0.0, 5.0, 100.0, 500.0], [1.0, 5.0, 0.0, 500.0]]),
    ],
)
def test_the_gradient_of_a_maximum_goes_to_where_it_was_reached_in_equal_parts(pool, target, view, gradients):
    found = pool.run(extreme_gradient, target, view)
    assert found == [gradients[rank >> 2] for rank in range(8)]


# --- the global view ------------------------------------------------------------------------------


def dtensor(mesh: axes.Mesh, placing: Placing, values: np.ndarray) -> tuple[DTensor, np.ndarray]:
    """A DTensor of this sharding, and the one value that it stands for."""
    coordinate = coordinate_of(mesh.rank)
    local = torch.from_numpy(placing.cut(at(values, coordinate, placing.pending), coordinate))
    spec = f"{placing.spec}"
    over = tuple(place for place, axis in enumerate(AXES) if axis in placing.pending)
    summed = values.sum(axis=over, keepdims=True)[(0, 0, 0)] if over else values[0, 0, 0]
    return axes.from_local(local, spec, mesh=mesh, shape=values.shape[3:]), summed


def global_mismatches(chosen: list[tuple[Placing, Placing, Placing]], shape: tuple[int, ...]) -> list[str]:
    mesh = mesh_of_cases()
    found = []
    for source, target, cotangent in chosen:
        x, value = dtensor(mesh, source, varied(5, shape))
        x = x.detach().requires_grad_()
        y = resharded(x, mesh.sharding(target.spec))
        g, wanted = dtensor(mesh, cotangent, varied(6, shape))
        (gradient,) = torch.autograd.grad(y, x, g)
        kept = axes.sharding_of(gradient).pending
        if y is not x and any(
            axis.name in {*source.pending, *(a for dim in source.dims for a in dim)} for p in kept for axis in p.axes
        ):
            found.append(f"{source.spec} -> {target.spec}: the gradient came as {axes.spec_of(gradient)}")
        if not np.array_equal(axes.unshard(gradient).numpy(), wanted):
            found.append(f"{source.spec} -> {target.spec}, cotangent {cotangent.spec}")
        with torch.no_grad():  # `detach` of a DTensor is an operation, which takes longer than the rest of a case
            if not target.pending and not np.array_equal(axes.unshard(y).numpy(), value):
                found.append(f"{source.spec} -> {target.spec}: the value")
    return found


def test_in_the_global_view_the_gradient_is_the_cotangent_whatever_its_sharding(pool):
    chosen = random.Random(7)
    plain = [(s, t) for s, t in pairs() if not t.pending]
    states = sorted({s for s, _ in pairs()}, key=str)
    triples = [(*chosen.choice(plain), chosen.choice(states)) for _ in range(150)]
    for rank, found in enumerate(pool.run(global_mismatches, triples, (8, 8, 8), timeout=120)):
        assert not found, f"rank {rank}: {found[:3]}"


TABLE = [
    # value, result, cotangent, its gradient, collectives on the way back
    ("n@a", "n", "n | sum@a", "_@a", {"reduce"}),
    ("n@a", "n", "n", "_@a", set()),
    ("n@a", "n", "n@a", "_@a", set()),
    ("n", "n@a", "n@a", "_@a", set()),
    ("n | sum@a", "n", "n | sum@a", "_", {"reduce"}),
    ("n | sum@a", "n", "n", "_", set()),
    ("n | sum@a", "n", "n@a", "_", {"gather"}),
    ("n | sum@a", "n@a", "n@a", "_", {"gather"}),
    ("n | sum@a", "n@a", "n", "_", set()),
    ("n | sum@a", "n@a", "n | sum@a", "_", {"reduce"}),
    ("n | mean@a", "n", "n | sum@a", "_", {"reduce"}),
    ("n | max@a", "n", "n", "_", set()),
]


def table_row(source: str, target: str, cotangent: str) -> tuple[str, int, list[float]]:
    mesh = mesh_of_cases()

    def made(spec: str, scale: float) -> DTensor:
        local = mesh.sharding(spec).local_shape((4,))
        start = 2 * mesh.coordinate["a"] if local == (2,) else 0
        values = torch.arange(start, start + local[0], dtype=torch.float64) * scale
        return axes.from_local(values, spec, mesh=mesh, shape=(4,))

    x = made(source, 1.0).detach().requires_grad_()
    y = reshard(x, f"{target} |" if "|" not in target else target, grad="pending")
    g = made(cotangent, 3.0)
    with CommDebugMode() as counted:
        (gradient,) = torch.autograd.grad(y, x, g)
    return axes.spec_of(gradient), counted.get_total_counts(), axes.unshard(gradient).tolist()


@pytest.mark.parametrize(("source", "target", "cotangent", "spec", "sent"), TABLE)
def test_a_row_of_the_table_in_the_global_view(pool, source, target, cotangent, spec, sent):
    target = "n@()" if target == "n" and "@a" in source.split("|")[0] else target
    twice = 2.0 if "|" in cotangent else 1.0
    for found in pool.run(table_row, source, target, cotangent):
        assert found == (spec, len(sent), [twice * value for value in (0.0, 3.0, 6.0, 9.0)])


def finite_differences() -> float:
    """The largest difference between the gradient through three reshards and the single-device one."""
    mesh = mesh_of_cases()
    whole = torch.from_numpy(varied(8, (4, 4))[0, 0, 0]) / 10
    weights = torch.from_numpy(varied(9, (4, 4))[0, 0, 0]) / 7

    def loss(x: torch.Tensor) -> torch.Tensor:
        return ((x.sin() * weights) ** 2).sum() + x.cos().sum()

    reference = whole.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, reference)
    loss(reference).backward()
    x = axes.shard(whole, "m@(c a) n@b", mesh=mesh).requires_grad_()
    w = axes.shard(weights, "m n@c", mesh=mesh)
    y = reshard(reshard(x.sin(), "m@() n@c"), "m@b n@c") * reshard(w, "m@b n")
    value = axes.unshard((y**2).sum()) + axes.unshard(reshard(x, "m n@(c b)").cos().sum())
    value.backward()
    assert axes.spec_of(x.grad) == axes.spec_of(x)
    return float((axes.unshard(x.grad.detach()) - reference.grad).abs().max())


def test_through_several_reshards_the_gradient_is_the_single_device_one(pool):
    assert max(pool.run(finite_differences)) < 1e-12


def second_derivatives() -> tuple[float, float]:
    mesh = mesh_of_cases()
    whole = torch.from_numpy(varied(8, (4, 4))[0, 0, 0]) / 10
    reference = whole.clone().requires_grad_()
    (first,) = torch.autograd.grad((reference**3).sum(), reference, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), reference)
    x = axes.shard(whole, "m@(c a) n@b", mesh=mesh).requires_grad_()
    y = axes.unshard(reshard(x, "m n@(a b)"))
    (one,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (two,) = torch.autograd.grad((axes.unshard(one) ** 2).sum(), x)
    global_view = (axes.unshard(two) - second).abs().max()
    # The local view: each rank's own loss of the gathered value, summed over the ranks.
    leaf = axes.to_local(x.detach()).clone().requires_grad_()
    z = reshard(leaf, "m@(c a) n@b -> m n", mesh=mesh)
    (one,) = torch.autograd.grad((z**3).sum(), leaf, create_graph=True)
    (two,) = torch.autograd.grad((one**2).sum(), leaf)
    local_view = (two - 64 * axes.to_local(axes.shard(second, "m@(c a) n@b", mesh=mesh))).abs().max()
    return float(global_view), float(local_view)


def test_second_derivatives_are_the_single_device_ones_in_both_views(pool):
    for found in pool.run(second_derivatives):
        assert max(found) < 1e-9


def leaf_gradient(grad: str) -> tuple[str, int]:
    """Two uses of one leaf, whose gradients arrive pending and split."""
    mesh = mesh_of_cases()
    leaf = axes.shard(torch.ones(4, dtype=torch.float64), "n", mesh=mesh).requires_grad_()
    split = reshard(leaf, "n@a", grad=grad)
    again = reshard(leaf, "n@a", grad=grad)
    with CommDebugMode() as counted:
        torch.autograd.backward([split, again], [split.detach() * 2, again.detach() * 3])
    assert axes.unshard(leaf.grad).tolist() == [5.0] * 4
    return axes.spec_of(leaf.grad), counted.get_total_counts()


def test_the_gradient_of_a_leaf_is_resolved_once_when_it_is_accumulated(pool):
    assert pool.run(leaf_gradient, "resolved") == [("_", 1)] * 8


def test_a_pending_gradient_is_left_to_the_caller(pool):
    assert pool.run(leaf_gradient, "pending") == [("_@a", 0)] * 8


def same_in_the_global_view() -> None:
    mesh = mesh_of_cases()
    with pytest.raises(ShardingError, match="no meaning in the global view"):
        redistribute(torch.ones(4), mesh.sharding("n"), mesh.sharding("n@a"), (4,), source_same=mesh.named(["a"]))


def test_same_has_no_meaning_in_the_global_view(pool):
    pool.run(same_in_the_global_view)
