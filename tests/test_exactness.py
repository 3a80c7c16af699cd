"""Corners in which numbers were once wrong, each on real processes and against the whole tensor.

The laws on generated cases are in `test_laws.py`; here each corner has a sentence of its own.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Replicate

import axes
from axes.algebra.errors import ShardingError
from tests.conftest import READS_FACTORS

# --- a source that is changed while its values travel -----------------------------------------------


def sources_changed_in_flight():
    mesh = axes.init_mesh("a=2 b=2", device_type="cpu", ranks=[0, 1, 2, 3])
    if mesh.coordinate is None:
        return []
    wrong = []
    whole = torch.arange(50_000 * 8.0, dtype=torch.float64).view(-1, 8) + 1
    moves = ["u@(a b) v -> u v", "u@(a b) v -> u@(b a) v", "u@(a b) v -> u v@(b a)", "u v | sum@(a b) -> u v"]
    for move in [*moves, "u v | sum@(a b) -> u@(a b) v", "u v | sum@a -> u@a v", "u@a v@b -> u@b v@a"]:
        source, target = move.split(" -> ")
        expected = whole * mesh.sharding(source).mesh.size if "(a b)" in source.partition("|")[2] else whole
        expected = whole * 2 if source.endswith("sum@a") else expected
        x = axes.from_local(whole.clone(), source, mesh=mesh) if "|" in source else axes.shard(whole, source, mesh=mesh)
        for tensor, mend in ((x, lambda y: y), (axes.to_local(x), None)):
            if mend is None:
                y = axes.rearrange(tensor, move, mesh=mesh, sizes={"u": 50_000, "v": 8}, async_op=True)
            else:
                y = axes.reshard(tensor, target, async_op=True)
            tensor.mul_(-1)
            found = axes.unshard(y if mend else axes.from_local(y + 0, target, mesh=mesh, shape=whole.shape))
            if not torch.equal(found, expected):
                wrong.append((move, type(tensor).__name__))
            tensor.mul_(-1)
    return wrong


def test_a_source_may_be_changed_before_an_async_result_is_used(pool):
    assert pool.run(sources_changed_in_flight) == [[]] * 8


# --- factors of a dim that has others in front ----------------------------------------------------


def factors_with_dims_in_front():
    tp = axes.init_mesh("dp=2 tp=4", device_type="cpu")
    wrong = []
    for shape, spec in [
        ((2, 8), "e (q=2 h@tp)"),
        ((3, 16), "e (q=2 h@tp d=2)"),
        ((2, 3, 8), "a b (q=2 h@tp)"),
        ((2, 8, 3), "a (q=2 h@tp) c"),
        ((2, 24, 2), "a@dp (q=3 h@tp d=2) c"),
        ((4, 8, 2), "a (q=2 h@tp) c@dp"),
    ]:
        whole = torch.arange(float(torch.tensor(shape).prod()), dtype=torch.float64).view(shape)
        x = axes.shard(whole, spec, mesh=tp)
        ndim = len(shape)
        plain = tp.sharding(" ".join("_" * ndim))
        summands = axes.from_local(whole.clone(), " ".join(["_"] * ndim) + " | sum@tp", mesh=tp)
        split = axes.reshard(summands, tp.sharding(spec).sized(shape))
        found = [axes.unshard(x), axes.reshard(x, plain).to_local(), axes.unshard(split) / 4]
        found += [x.full_tensor()] if READS_FACTORS else []
        wrong += [(spec, at) for at, value in enumerate(found) if not torch.equal(value, whole)]
        leaf = axes.shard(whole, spec, mesh=tp).requires_grad_()
        (axes.reshard(leaf, plain) * axes.shard(whole, " ".join("_" * ndim), mesh=tp)).sum().backward()
        wrong += [] if torch.equal(axes.unshard(leaf.grad), whole) else [(spec, "gradient")]
    return wrong


def test_a_split_factor_behind_other_dims_is_gathered_and_scattered_right(pool):
    assert pool.run(factors_with_dims_in_front) == [[]] * 8


# --- the order of pending reductions --------------------------------------------------------------


def mixed_pendings():
    mesh = axes.init_mesh("c=2 a=2 b=2", device_type="cpu")
    value = torch.tensor([[1.0, 5.0], [4.0, 0.0]])[mesh.coordinate["a"], mesh.coordinate["b"]].reshape(1)
    found = []
    for spec in ("n | sum@b max@a", "n | max@a sum@b"):
        found.append(axes.reshard(value, f"{spec} -> n", mesh=mesh).item())
        try:
            x = axes.from_local(value, spec, mesh=mesh)
            found.append((axes.unshard(x).item(), axes.reshard(x, "n |").to_local().item()))
        except ShardingError as error:
            found.append(str(error))
        sub = mesh["b", "a"] if "sum@b max" in spec else mesh["a", "b"]
        found.append(axes.unshard(axes.from_local(value, spec, mesh=sub)).item())
    found.append(axes.unshard(axes.from_local(value, "n | sum@b mean@a", mesh=mesh)).item())
    return found


def test_pending_reductions_resolve_in_the_order_of_the_text_or_are_refused(pool):
    refused = (
        "'| sum@b max@a' is resolved in the order in which it stands, and DTensor keeps only that of the mesh, c a b; "
        "resolve sum@b first, or use the sub-mesh mesh['b', 'a']"
    )
    assert pool.run(mixed_pendings) == [[6.0, refused, 6.0, 9.0, (9.0, 9.0), 9.0, 5.0]] * 8


# --- meshes with other names ----------------------------------------------------------------------


def through_other_names():
    one, two = axes.init_mesh("a=4 b=2", device_type="cpu"), axes.init_mesh("p=4 q=2", device_type="cpu")
    alias = one.define("data = a")["data", "b"]
    whole, weight = torch.arange(8.0, dtype=torch.float64), torch.arange(24.0, dtype=torch.float64).view(8, 3)
    leaf = whole.clone().requires_grad_()
    torch.einsum("n,nk->k", leaf * leaf, weight).sum().backward()
    wrong = []
    for mesh, name, names in ((two, "p", ("p", "q")), (alias, "data", ("data", "b"))):
        x = axes.shard(whole, "n@a", mesh=one).requires_grad_()
        y = axes.reshard(axes.einsum(x, x, "n, n -> n"), f"n@{name}", mesh=mesh)
        w = axes.shard(weight, f"n@{name} k", mesh=mesh)
        wrong += [] if y.device_mesh.mesh_dim_names == names else [y.device_mesh.mesh_dim_names]
        product = y * w[:, 0]  # torch's own operation: both are on one mesh
        wrong += [] if torch.equal(product.full_tensor(), whole * whole * weight[:, 0]) else ["product"]
        axes.einsum(y, w, f"n@{name}, n@{name} k -> k").sum().backward()
        wrong += [] if torch.equal(x.grad.full_tensor(), leaf.grad) else [x.grad.full_tensor()]
    return wrong


def test_gradients_come_back_from_a_mesh_with_other_names_for_the_same_layouts(pool):
    assert pool.run(through_other_names) == [[]] * 8


# --- scalars between rank sets --------------------------------------------------------------------


def scalars_between_rank_sets():
    rank = dist.get_rank()
    low, high = (axes.init_mesh("x=4", ranks=range(at, at + 4), device_type="cpu") for at in (0, 4))
    every, permuted = (axes.init_mesh("a=8", ranks=r, device_type="cpu") for r in (range(8), [5, 1, 0, 7, 3, 2, 6, 4]))
    wrong = []
    for source, target in [(low, high), (low, every), (every, high), (every, permuted), (permuted, low), (high, low)]:
        x = axes.shard(torch.tensor(5.0), "", mesh=source).requires_grad_()
        y = axes.reshard(x, target.sharding(""))
        if target.coordinate is not None and y.to_local().tolist() != 5.0:
            wrong.append((str(source), str(target), y.to_local()))
        y.backward(torch.full_like(y, 3.0))
        if source.coordinate is not None and x.grad.to_local().tolist() != 3.0:
            wrong.append((str(source), str(target), x.grad.to_local()))
    for op, wanted in (("sum", 6.0), ("max", 3.0), ("min", 0.0), ("mean", 1.5)):
        pending = axes.from_local(torch.tensor(float(rank)), f"| {op}@x", mesh=low)
        y = axes.reshard(pending, high.sharding(""))
        if rank >= 4 and y.to_local().item() != wanted:
            wrong.append((op, y.to_local()))
    return wrong


def test_a_scalar_moves_between_any_sets_of_ranks(pool):
    assert pool.run(scalars_between_rank_sets) == [[]] * 8


# --- uneven reduce-scatters in every form ---------------------------------------------------------


def uneven_reduce_scatters(ranks: int, declaration: str, place: str):
    start = dist.get_rank() // ranks * ranks
    if start + ranks > 8:
        return []
    mesh = axes.init_mesh(declaration, ranks=range(start, start + ranks), device_type="cpu")
    me, wrong = dist.get_rank() - start, []
    axis = " ".join(mesh.axis_names)
    for size in range(ranks * 2 + 1):
        summand = torch.arange(float(size), dtype=torch.float64) * (me + 1) - 1
        every = torch.stack([torch.arange(float(size), dtype=torch.float64) * (r + 1) - 1 for r in range(ranks)])
        for op, whole in (("sum", every.sum(0)), ("mean", every.mean(0)), ("min", every.amin(0))):
            x = axes.from_local(summand, f"n | {op}@({axis})", mesh=mesh)
            for spec in (f"n@{place} |",):
                for how in ({}, {"async_op": True}):
                    y = axes.unshard(axes.reshard(x, spec, **how))
                    wrong += [] if torch.allclose(y, whole) else [(size, op, how, y)]
        if size in (ranks + 1, 2 * ranks - 1):
            x = axes.from_local(summand, f"n | sum@({axis})", mesh=mesh)
            torch._dynamo.reset()
            compiled = torch.compile(lambda x: axes.reshard(x, f"n@{place} |"), fullgraph=True, backend="aot_eager")
            y = axes.unshard(compiled(x))
            wrong += [] if torch.allclose(y, every.sum(0)) else [(size, "compiled", y)]
            k = axes.from_local(
                torch.ones(size, 1, dtype=torch.float64) * (me + 1), "n k | sum@*".replace("*", f"({axis})"), mesh=mesh
            )
            z = axes.einsum(
                k,
                axes.ones("k f", mesh=mesh, k=1, f=2, dtype=torch.float64),
                f"n k | sum@({axis}), k f -> n@{place} f",
                async_op=True,
            )
            wanted = torch.full((size, 2), ranks * (ranks + 1) / 2, dtype=torch.float64)
            wrong += [] if torch.equal(axes.unshard(z), wanted) else [(size, "einsum", z)]
    return wrong


@pytest.mark.parametrize(("ranks", "declaration", "place"), [(2, "a=2", "a"), (3, "a=3", "a"), (4, "a=2 b=2", "(a b)")])
def test_uneven_reduce_scatters_are_right_eager_async_and_compiled(pool, ranks, declaration, place):
    assert pool.run(uneven_reduce_scatters, ranks, declaration, place) == [[]] * 8


# --- what only torch can resolve ------------------------------------------------------------------


def partials_of_torch():
    mesh = axes.init_mesh("tp=8", device_type="cpu")
    table = torch.arange(48.0).view(16, 3)
    split = axes.shard(table, "v@tp d", mesh=mesh)
    ids = torch.tensor([0, 3, 15, 2])
    rows, norm = F.embedding(axes.shard(ids, "b", mesh=mesh), split), torch.linalg.vector_norm(split)
    for x in (rows, norm):
        names = "b d" if x.ndim else ""
        for call, *arguments in (
            (axes.unshard, x),
            (axes.spec_of, x),
            (axes.sharding_of, x),
            (axes.reshard, x, f"{names} |"),
            (axes.rearrange, x, f"{names} -> {names} 1"),
            (axes.einsum, x, x, f"{names}, {names} -> {names}"),
            (axes.shard_map(torch.relu, f"{names} -> {names}"), x),
            (axes.lift, x, mesh),
        ):
            with pytest.raises(ShardingError, match=r"only torch knows.*x\.redistribute"):
                call(*arguments)
    rows, norm = (axes.unshard(x.redistribute(placements=[Replicate()])) for x in (rows, norm))
    return torch.equal(rows, table[ids]), torch.allclose(norm, torch.linalg.vector_norm(table))


def test_partials_that_mean_something_else_than_a_reduction_are_refused_with_the_call_to_make(pool):
    assert pool.run(partials_of_torch) == [(True, True)] * 8


# --- results that are changed in place ------------------------------------------------------------

VIEWS = {
    "a slice": ("i j", "i j", lambda x, mesh, other: axes.reshard(x, mesh.sharding("i@a j"))),
    "another mesh": ("i@a j", "i j", lambda x, mesh, other: axes.reshard(x, other.sharding("i@p j"))),
    "a merge": ("i@a j", "(i j)", lambda x, mesh, other: axes.rearrange(x, "i j -> (i j)")),
    "a transpose": ("i@a j", "j i", lambda x, mesh, other: axes.rearrange(x, "i j -> j i")),
    "nothing": ("i@a j", "i j", lambda x, mesh, other: axes.rearrange(x, "i j -> i j")),
    "an opened dim": ("i@a j", "i (j k)", lambda x, mesh, other: axes.rearrange(x, "i (j k) -> i j k", k=2)),
    "a repetition": ("i@a j", "i j", lambda x, mesh, other: axes.repeat(x, "i j -> i j n", n=1)),
    "an einsum of one": ("i@a j", "j i", lambda x, mesh, other: axes.einsum(x, "i j -> j i")),
    "a diagonal": ("i j", "i i", lambda x, mesh, other: axes.einsum(x, "i i -> i")),
    "a reduction of nothing": ("i@a j", "i j", lambda x, mesh, other: axes.reduce(x, "i j -> i j", "sum")),
    "the whole": ("i j", "i j", lambda x, mesh, other: axes.unshard(x)),
    "a lift": ("i@a j", "i j", lambda x, mesh, other: axes.lift(x, mesh["b", "a"])),
    "an identity region": ("i@a j", "i j", lambda x, mesh, other: axes.shard_map(lambda v: v, "i@a j -> i@a j")(x)),
    "a region's view": ("i@a j", "i j", lambda x, mesh, other: axes.shard_map(lambda v: v.mT, "i@a j -> j i@a")(x)),
}


def changed_results():
    mesh, other = axes.init_mesh("a=4 b=2", device_type="cpu"), axes.init_mesh("p=4 q=2", device_type="cpu")
    whole, wrong = torch.arange(1.0, 17.0, dtype=torch.float64).view(4, 4) / 10, []
    for name, (spec, _, view) in VIEWS.items():
        home = mesh["a",] if name == "a lift" else mesh
        for grad in (True, False):
            w = axes.shard(whole, spec, mesh=home).requires_grad_(grad)
            h = torch.tanh(w)
            kept = h.full_tensor().detach().clone()
            y = view(h, mesh, other)
            y.mul_(2)
            if not torch.equal(h.full_tensor(), kept):
                wrong.append((name, grad, "operand changed"))
        leaf = whole.clone().requires_grad_()
        value = torch.tanh(leaf)
        ((value.diagonal() if name == "a diagonal" else value) * 2).sum().backward()
        w = axes.shard(whole, spec, mesh=home).requires_grad_()
        y = view(torch.tanh(w), mesh, other)
        y.mul_(2)
        y.sum().backward()
        if not torch.allclose(w.grad.full_tensor(), leaf.grad):
            wrong.append((name, "gradient"))
    return wrong


def test_a_result_that_is_changed_in_place_changes_nothing_else(pool):
    assert pool.run(changed_results) == [[]] * 8


def shared_gradients():
    mesh, other = axes.init_mesh("a=4 b=2", device_type="cpu"), axes.init_mesh("p=4 q=2", device_type="cpu")
    whole, wrong = torch.arange(1.0, 17.0, dtype=torch.float64).view(4, 4) / 10, []
    gather = ("i@a j", "i j", lambda x, mesh, other: axes.rearrange(x, "i@a j -> i j"))
    for name, (spec, _, view) in {**VIEWS, "a gather": gather}.items():
        home = mesh["a",] if name == "a lift" else mesh
        one, two = (axes.shard(whole, spec, mesh=home).requires_grad_() for _ in range(2))
        first, second = (whole.clone().requires_grad_() for _ in range(2))
        for _ in range(2):  # the second pass adds to what the first has left
            (view(one, mesh, other) + view(two, mesh, other)).square().sum().backward()
            pair = [leaf.diagonal() if name == "a diagonal" else leaf for leaf in (first, second)]
            (pair[0] + pair[1]).square().sum().backward()
        if not torch.allclose(one.grad.full_tensor(), first.grad):
            wrong.append((name, "accumulated"))
        one.grad.mul_(3)
        if not torch.allclose(two.grad.full_tensor(), second.grad):
            wrong.append((name, "shared"))
        local = one.grad.to_local()
        if local.untyped_storage().nbytes() != local.numel() * local.element_size():
            wrong.append((name, "memory"))
    return wrong


def test_every_leaf_owns_its_gradient_and_no_more_memory_than_that(pool):
    assert pool.run(shared_gradients) == [[]] * 8


# --- maxima and minima keep NaN -------------------------------------------------------------------


def extremes_with_nan(ranks: int):
    start = dist.get_rank() // ranks * ranks
    mesh = axes.init_mesh(f"tp={ranks}", ranks=range(start, start + ranks), device_type="cpu")
    me, wrong = dist.get_rank() - start, []
    nan, inf = float("nan"), float("inf")
    rows = [[1.0, nan, 3.0, -2.0, -0.5, inf], [nan, 2.0, 7.0, -3.0, 0.25, -inf], [0.0, -0.0, nan, -1.0, 0.5, 1.0]]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        whole = torch.tensor((rows * ranks)[:ranks]).to(dtype)
        for op in ("max", "min"):
            right = whole.amax(0) if op == "max" else whole.amin(0)
            pending = axes.from_local(whole[me].clone(), f"a | {op}@tp", mesh=mesh)
            split = mesh.sharding("a@tp")
            found = [
                axes.unshard(axes.reduce(axes.shard(whole, "t@tp a", mesh=mesh), "t@tp a -> a", op)),
                axes.unshard(pending),
                axes.unshard(axes.reshard(pending, split)),
                axes.unshard(axes.reshard(pending, split, async_op=True)),
                (axes.pmax if op == "max" else axes.pmin)(whole[me].clone(), "tp", mesh=mesh),
            ]
            wrong += [
                (dtype, op, at) for at, y in enumerate(found) if not torch.equal(y.nan_to_num(9), right.nan_to_num(9))
            ]
            leaf, x = whole.clone().requires_grad_(), axes.shard(whole, "t@tp a", mesh=mesh).requires_grad_()
            (leaf.amax(0) if op == "max" else leaf.amin(0)).sum().backward()
            axes.reduce(x, "t@tp a -> a", op).sum().backward()
            if not torch.equal(axes.unshard(x.grad).isnan(), leaf.grad.isnan()):
                wrong.append((dtype, op, "gradient"))
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_maximum_over_ranks_keeps_nan_as_one_device_does(pool, ranks):
    assert pool.run(extremes_with_nan, ranks) == [[]] * 8


def kinds_of_comm_dtype():
    mesh = axes.init_mesh("tp=8", device_type="cpu")
    for dtype, wire in [
        (torch.float32, torch.int32),
        (torch.float32, torch.bool),
        (torch.float32, torch.complex64),
        (torch.int64, torch.float32),
        (torch.int64, torch.int32),
        (torch.complex64, torch.float32),
    ]:
        x = axes.shard(torch.ones(8).to(dtype), "n@tp", mesh=mesh)
        with pytest.raises(ShardingError, match="comm_dtype"):
            axes.reshard(x, mesh.sharding("n"), comm_dtype=wire)


def test_a_communication_dtype_that_cannot_hold_the_values_is_refused(pool):
    pool.run(kinds_of_comm_dtype)


@pytest.mark.parametrize("function", [axes.softmax, axes.logsumexp, axes.rms_norm, axes.layer_norm])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_functions_of_floats_refuse_other_numbers(function, dtype):
    with pytest.raises(ShardingError, match="is of floats"):
        function(torch.ones(4).to(dtype), "a", over="a")


def test_a_dim_without_elements_is_split_as_the_text_says():
    spec = "(x=4 y z=4@c) d@(a b)"
    with axes.simulate(8), axes.init_mesh("a=2 b=2 c=2", device_type="cpu"):
        t = axes.shard(torch.zeros(0, 7, requires_grad=True), spec)
        y = axes.rearrange(t, f"{spec} -> z@c d@(a b) x y", sizes={"x": 4, "z": 4, "d": 7})
        assert tuple(y.shape) == (4, 7, 4, 0)
        assert axes.spec_of(y) == "_@c _@(a b) _ _"
