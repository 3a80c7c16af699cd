"""Collectives by axis name, against one process that sees every rank's tensor.

Each rank can make every rank's input from a seed, so it computes what the collective should give,
and the gradient of the sum of all ranks' losses, by plain torch and compares with what came.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.algebra.errors import AxesError, MeshError, ShardingError, SizeError
from axes.ops import collectives as named
from axes.runtime.lines import axis_layout

DECLARATION = ("dp=2 cp=2 tp=2", "rest = cp tp", "back = tp dp", "(dp cp tp) = rows ep")
AXES = ("dp", "cp", "tp", "rest", "back", "ep", ("tp", "cp"), ("dp", "cp", "tp"), ("tp",), ())
REDUCTIONS = ("psum", "pmean", "pmax", "pmin")
OPERATIONS = (*REDUCTIONS, "all_gather", "psum_scatter", "all_to_all", "ppermute")

FLOATS = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 1e-2, torch.bfloat16: 5e-2}
OTHERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)


def mesh() -> axes.Mesh:
    return axes.init_mesh(*DECLARATION, ep=4, device_type="cpu")


def pair() -> axes.Mesh:
    return axes.init_mesh("dp=1 cp=1 tp=2", "rest = cp tp", device_type="cpu")


@dataclass(frozen=True)
class Case:
    operation: str
    axis: str | tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    other: int
    shift: int | None
    shuffle: int
    strided: bool
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    operation = draw(st.sampled_from(OPERATIONS))
    axis = draw(st.sampled_from(AXES))
    size = axis_layout(axes.Mesh(*DECLARATION, ep=4), axis)[0].size
    needs_dim = operation in ("all_gather", "psum_scatter", "all_to_all")
    ndim = draw(st.integers(1 if needs_dim else 0, 4))
    shape = [draw(st.integers(0, 3)) for _ in range(ndim)]
    dim = draw(st.integers(-ndim, ndim - 1)) if ndim else 0
    if operation in ("psum_scatter", "all_to_all"):
        shape[dim] *= size
    dtypes = list(FLOATS) if operation == "pmean" else [*FLOATS, *OTHERS]
    if operation in ("pmax", "pmin"):
        dtypes.remove(torch.complex64)
    return Case(
        operation,
        axis,
        tuple(shape),
        draw(st.sampled_from(dtypes)),
        dim,
        draw(st.integers(-ndim, ndim - 1)) if ndim else 0,
        draw(st.none() | st.integers(-9, 9)),
        draw(st.integers(0, 999)),
        draw(st.booleans()),
        draw(st.integers(0, 2**31)),
    )


def random(shape: tuple[int, ...], dtype: torch.dtype, strided: bool, seed: int) -> torch.Tensor:
    """Small numbers with ties, in a memory order that isn't that of the dims where `strided`."""
    generator = torch.Generator().manual_seed(seed)
    flipped = tuple(reversed(shape)) if strided else shape
    x = torch.randint(0 if not dtype.is_signed else -4, 5, flipped, generator=generator)
    x = x > 0 if dtype == torch.bool else x.to(torch.float32).to(dtype)
    return x.permute(tuple(reversed(range(len(shape))))) if strided else x


def pairs(case: Case, size: int) -> list[tuple[int, int]]:
    """A random partial permutation."""
    generator = torch.Generator().manual_seed(case.shuffle)
    sources, targets = (torch.randperm(size, generator=generator).tolist() for _ in range(2))
    return list(zip(sources, targets, strict=True))[: case.shuffle % (size + 1)]


def called(case: Case, x: torch.Tensor, size: int) -> torch.Tensor:
    function = getattr(named, case.operation)
    if case.operation in REDUCTIONS:
        return function(x, case.axis)
    if case.operation == "all_to_all":
        return function(x, case.axis, case.dim, case.other)
    if case.operation == "ppermute":
        return function(
            x, case.axis, **({"shift": case.shift} if case.shift is not None else {"perm": pairs(case, size)})
        )
    return function(x, case.axis, dim=case.dim)


def expected(case: Case, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each coordinate gets, from the inputs of all."""
    size = len(xs)
    every = torch.stack(xs)
    if case.operation in REDUCTIONS:
        return [reduced(case.operation, every)] * size
    if case.operation == "all_gather":
        return [torch.cat(xs, case.dim)] * size
    if case.operation == "psum_scatter":
        return list(reduced("psum", every).tensor_split(size, case.dim))
    if case.operation == "all_to_all":
        cut = [x.tensor_split(size, case.dim) for x in xs]
        return [torch.cat([cut[source][i] for source in range(size)], case.other) for i in range(size)]
    found = [torch.zeros_like(x) for x in xs]
    moves = pairs(case, size) if case.shift is None else [(i, (i + case.shift) % size) for i in range(size)]
    for source, target in moves:
        found[target] = xs[source]
    return found


def reduced(operation: str, every: torch.Tensor) -> torch.Tensor:
    """Over the first dim, in a dtype in which nothing is lost."""
    dtype = every.dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    if operation == "psum":
        return every.to(wide).sum(0).to(torch.int64 if dtype == torch.bool else dtype)
    if operation == "pmean":
        return every.to(wide).mean(0).to(dtype)
    return (every.to(wide).amax(0) if operation == "pmax" else every.to(wide).amin(0)).to(dtype)


def check(cases: list[Case]) -> None:
    with mesh() as m:
        for case in cases:
            layout, _ = axis_layout(m, case.axis)
            ranks = m.ranks_of(layout)
            here = list(ranks).index(dist.get_rank())
            xs = [random(case.shape, case.dtype, case.strided, case.seed + rank) for rank in ranks]
            before = xs[here].clone()
            got, wanted = called(case, xs[here], len(xs)), expected(case, xs)[here]
            assert same(got, wanted, case), f"{case}: {got} instead of {wanted}"
            assert same(xs[here], before, case), f"{case} changed its input"
            if case.dtype in FLOATS:
                check_gradients(case, [x.detach().requires_grad_() for x in xs], ranks, here)


def check_gradients(case: Case, xs: list[torch.Tensor], ranks: list[int], here: int) -> None:
    """Backward differentiates the sum of all ranks' losses; each loss weighs its rank's result at random."""
    outs = expected(case, xs)
    weights = [
        random(tuple(y.shape), case.dtype, not case.strided, case.seed - 1 - rank)
        for y, rank in zip(outs, ranks, strict=True)
    ]
    loss = sum((y * w).double().sum() for y, w in zip(outs, weights, strict=True))
    (wanted,) = torch.autograd.grad(loss, xs[here], allow_unused=True) if loss.requires_grad else (None,)
    x = xs[here].detach().requires_grad_()
    y = called(case, x, len(xs))
    (got,) = torch.autograd.grad((y * weights[here]).sum(), x, allow_unused=True) if y.requires_grad else (None,)
    zero = torch.zeros_like(x)
    got, wanted = zero if got is None else got, zero if wanted is None else wanted
    assert same(got, wanted, case), f"{case}: gradient {got} instead of {wanted}"


def same(got: torch.Tensor, wanted: torch.Tensor, case: Case) -> bool:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    wide = torch.complex128 if got.dtype.is_complex else torch.float64
    tolerance = FLOATS.get(case.dtype, 0.0)
    return torch.allclose(got.to(wide), wanted.to(wide), rtol=tolerance, atol=tolerance)


@settings(max_examples=12, phases=[Phase.generate], deadline=None, derandomize=True, database=None)
@given(st.lists(cases(), min_size=30, max_size=30))
def test_values_and_gradients_are_those_of_one_process_that_sees_all(pool, cases):
    pool.run(check, cases)


# what a call sends


def counts() -> list[int]:
    m = mesh()
    x = torch.ones(8, 4, requires_grad=True)
    calls = [
        lambda: named.psum(x, "tp"),
        lambda: named.pmean(x, "rest"),
        lambda: named.all_gather(x, "rest", dim=1),
        lambda: named.psum_scatter(x, "ep"),
        lambda: named.all_to_all(x, "rest", 0, 1),
        lambda: named.ppermute(x, "dp", shift=1),
        lambda: named.ppermute(x, "dp", shift=-2),
        lambda: named.psum(x, ()),
    ]
    found = []
    for call in calls:
        with m, CommDebugMode() as forward:
            y = call()
        with CommDebugMode() as backward:
            y.sum().backward()
        found.append((forward.get_total_counts(), backward.get_total_counts()))
    return found


def test_each_is_one_collective_forward_and_one_backward(pool):
    assert pool.run(counts) == [[(1, 1)] * 6 + [(0, 0)] * 2] * 8


def shared_groups() -> int:
    m = axes.init_mesh("dp=2 cp=2 tp=2", "rest = cp tp", "other = cp tp", device_type="cpu")
    named.psum(torch.ones(1), "rest", mesh=m)
    before = len(axes.process_groups())
    for axis in ("other", ("cp", "tp"), ("rest",)):
        assert named.psum(torch.ones(1), axis, mesh=m).item() == 4
    return len(axes.process_groups()) - before


def test_names_of_the_same_ranks_share_one_group(pool):
    assert pool.run(shared_groups) == [0] * 8


def small_worlds() -> None:
    with axes.init_mesh("dp tp=1", device_type="cpu") as m:
        x = torch.arange(4.0, requires_grad=True)
        for y in (named.psum(x, "tp"), named.pmean(x, "tp"), named.pmax(x, "tp"), named.all_gather(x, "tp")):
            assert y is x
        assert named.ppermute(x, "tp", shift=3) is x
        assert named.ppermute(x, "tp", perm=[(0, 0)]) is x
        assert named.ppermute(x, "tp", perm=[]).tolist() == [0] * 4
        assert named.psum(torch.tensor([True]), "tp").dtype == torch.int64
        assert named.axis_index("tp") == 0
        assert named.axis_index("dp") == dist.get_rank()
        assert m.axis("tp").size == named.axis_size("tp") == 1


def test_an_axis_of_size_one_does_nothing(pool):
    pool.run(small_worlds)


def exact() -> None:
    """What is moved arrives bit for bit, whatever the dtype."""
    with mesh():
        for dtype in (torch.float8_e5m2, torch.uint16, torch.uint64, torch.complex32, torch.bool, torch.bfloat16):
            bits = torch.arange(256, dtype=torch.uint8)[: 256 - dist.get_rank()]
            x = (bits % 2 if dtype == torch.bool else bits)[:240].view(dtype)
            bytes_ = x.view(torch.uint8).tolist()
            assert named.all_gather(x, "dp").view(torch.uint8).tolist() == bytes_ * 2
            assert named.ppermute(x, "tp", shift=1).view(torch.uint8).tolist() == bytes_
            turned = named.all_to_all(x.view(2, -1), "cp", 0, 0)
            assert (
                turned.view(torch.uint8).flatten().tolist()
                == x.view(2, -1)[[named.axis_index("cp")] * 2].view(torch.uint8).flatten().tolist()
            )
        x = torch.tensor([1.5 + 2j, 3j])
        assert named.all_gather(x.conj(), "tp").tolist() == x.conj().tolist() * 2
        assert named.psum(x.conj().imag, "tp").tolist() == [-4, -6]
        assert named.all_gather(x.conj().imag, "tp").tolist() == [-2, -3] * 2


def test_what_is_moved_arrives_bit_for_bit(pool):
    pool.run(exact)


def second_derivatives() -> None:
    with mesh():
        x = torch.tensor([1.0, 2.0 + dist.get_rank()], dtype=torch.float64, requires_grad=True)
        y = named.psum(x**3, "tp")
        (g,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
        xs = [torch.tensor([1.0, 2.0 + rank], dtype=torch.float64, requires_grad=True) for rank in line_ranks("tp")]
        total = 2 * (sum(x**3 for x in xs) ** 2).sum()
        gs = torch.autograd.grad(total, xs, create_graph=True)
        hs = torch.autograd.grad(sum(g.sum() for g in gs), xs)
        here = named.axis_index("tp")
        torch.testing.assert_close(g, gs[here])
        torch.testing.assert_close(h, hs[here])


def line_ranks(axis: str) -> list[int]:
    return list(mesh().axis(axis).ranks)


def test_gradients_of_gradients_are_those_of_one_process(pool):
    pool.run(second_derivatives)


def means_of_large_numbers(compiled: bool) -> list[set[float]]:
    """Each way to a mean of float16 whose sum is infinite."""
    here = mesh()
    x = torch.full((8,), 32768.0, dtype=torch.float16)
    pending = axes.from_local(x, "a | mean@(dp cp tp)", mesh=here)
    split = axes.from_local(x, "b@(dp cp tp)", mesh=here, b=64)

    def every() -> list[torch.Tensor]:
        moved = [axes.reshard(pending, "a").to_local(), axes.reshard(pending, "a@(dp cp tp)").to_local()]
        reduced = axes.reduce(split, "b@(dp cp tp) ->", "mean").to_local()
        return [*moved, reduced, named.pmean(x, ("dp", "cp", "tp"), mesh=here), named.pmean(x, "rest", mesh=here)]

    found = torch.compile(every)() if compiled else every()
    return [set(each.view(-1).tolist()) for each in found]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mean_of_float16_is_finite_where_the_sum_is_not(pool, compiled):
    assert pool.run(means_of_large_numbers, compiled) == [[{32768.0}] * 5] * 8


# mistakes

X = torch.ones(6, 4)
MISTAKES = [
    (lambda: named.psum(X, "tq"), MeshError, "the mesh has no axis 'tq'; known: dp, cp, tp"),
    (lambda: named.psum(X, "row"), MeshError, "the mesh has no axis 'row'; did you mean 'rows'?"),
    (lambda: named.psum(X, ("tp", "rest")), MeshError, "'tp rest' isn't a product of axes"),
    (
        lambda: named.psum(X, ["tp"]),
        MeshError,
        "an axis is a name like 'tp', or several like ('cp', 'tp'); found ['tp']",
    ),
    (
        lambda: named.psum(X, "tp", mesh=axes.Mesh("tp=2")),
        MeshError,
        "is algebra alone. Make it with axes.init_mesh(...)",
    ),
    (lambda: named.psum(X, "tp", mesh="tp"), MeshError, "axes are looked up in an axes mesh; found str"),
    (lambda: named.psum(X.tolist(), "tp"), ShardingError, "psum takes a tensor; found list"),
    (
        lambda: named.psum(X.to_sparse(), "tp"),
        ShardingError,
        "psum takes a dense tensor; found one of layout torch.sparse_coo",
    ),
    (
        lambda: named.psum(axes.shard(X, "a b"), "tp"),
        ShardingError,
        "psum takes this rank's plain tensor; found a DTensor",
    ),
    (lambda: named.pmean(X.long(), "tp"), ShardingError, "a mean of integers is no integer; write x.float(), or psum"),
    (lambda: named.pmax(X.cfloat(), "tp"), ShardingError, "complex numbers have no order; take x.abs()"),
    (
        lambda: named.psum(X.to(torch.uint64), "tp"),
        ShardingError,
        "no sum over ranks for torch.uint64; convert it first",
    ),
    (
        lambda: named.all_gather(X, "tp", dim=2),
        ShardingError,
        "all_gather over dim 2 of a tensor [6, 4]: dims are 0 to 1",
    ),
    (lambda: named.all_gather(X[0, 0], "tp"), ShardingError, "a scalar has no dims; write x[None]"),
    (
        lambda: named.psum_scatter(X, "rest"),
        SizeError,
        "6 elements, which doesn't divide into 4 pieces, one for each rank of 'rest'; pad it to 8",
    ),
    (lambda: named.all_to_all(X, "rest", 0, 1), SizeError, "dim 0 of [6, 4] has 6 elements"),
    (lambda: named.all_to_all(X, "rest", 1, "0"), ShardingError, "all_to_all over dim '0' of a tensor"),
    (lambda: named.ppermute(X, "tp"), ShardingError, "ppermute goes by shift=1 or by perm=[(source, target), ...]"),
    (lambda: named.ppermute(X, "tp", shift=1, perm=[]), ShardingError, "give one of the two"),
    (lambda: named.ppermute(X, "tp", shift=0.5), ShardingError, "ppermute's shift is a whole number; found 0.5"),
    (lambda: named.ppermute(X, "tp", perm=[(0, 2)]), ShardingError, "coordinates are 0 to 1; found the target 2"),
    (lambda: named.ppermute(X, "tp", perm=[(-1, 0)]), ShardingError, "coordinates are 0 to 1; found the source -1"),
    (
        lambda: named.ppermute(X, "tp", perm=[(0, 1), (0, 0)]),
        ShardingError,
        "coordinate 0 is the source of several pairs",
    ),
    (
        lambda: named.ppermute(X, "tp", perm=[(0, 1), (1, 1)]),
        ShardingError,
        "coordinate 1 is the target of several pairs",
    ),
    (lambda: named.ppermute(X, "tp", perm=[(0, 1, 2)]), ShardingError, "pairs"),
    (lambda: named.ppermute(X, "tp", perm=3), ShardingError, "pairs"),
    (lambda: named.axis_size("tq"), MeshError, "the mesh has no axis 'tq'"),
]


def mistakes() -> list[str]:
    found = []
    with mesh(), CommDebugMode() as counted:
        for call, error, text in MISTAKES:
            try:
                call()
            except AxesError as caught:
                ok = type(caught) is error and text in str(caught)
                found.append("" if ok else f"expected {error.__name__} with {text!r}, caught {caught!r}")
            else:
                found.append(f"no error, expected {text!r}")
    return [*filter(None, found), *([] if counted.get_total_counts() == 0 else ["something was sent"])]


def test_mistakes_are_errors_that_say_what_to_write_before_anything_is_sent(pool):
    assert pool.run(mistakes) == [[]] * 8


@pytest.mark.parametrize(
    "call", [lambda: named.psum(X, "tp"), lambda: named.axis_index("tp"), lambda: named.axis_size("tp")]
)
def test_without_a_mesh_the_error_says_what_to_write(call):
    with pytest.raises(MeshError, match=r"no mesh says which ranks 'tp' is. Call it in a function that axes.shard_map"):
        call()


def outside() -> str:
    m = axes.init_mesh("tp=2", ranks=[0, 1], device_type="cpu")
    try:
        return str(named.psum(torch.ones(()), "tp", mesh=m).item())
    except MeshError as error:
        return str(error)


def test_a_rank_outside_the_mesh_is_told(pool):
    found = pool.run(outside)
    assert found[:2] == ["2.0", "2.0"]
    assert all("isn't one of the ranks of Mesh('tp=2'" in text for text in found[2:])


def test_a_simulated_world_gives_shapes():
    with axes.simulate(512, rank=77), axes.init_mesh("dp=8 cp=8 tp=8", device_type="cpu"):
        x = torch.ones(16, 4, requires_grad=True)
        y = named.all_gather(named.psum(x, "dp"), ("cp", "tp"))
        assert y.shape == (1024, 4)
        assert named.all_to_all(y, "tp", 0, 1).shape == (128, 32)
        assert named.psum_scatter(y, ("dp", "tp")).shape == (16, 4)
        y.sum().backward()
        assert x.grad.shape == (16, 4)
        assert (named.axis_index("dp"), named.axis_index("cp"), named.axis_index("tp")) == (1, 1, 5)


# torch.compile


def every_collective(x: torch.Tensor) -> torch.Tensor:
    y = named.psum(x, "tp") * named.axis_index("tp") + named.pmean(x.sin(), ("dp", "tp")) + named.pmax(x, "dp")
    y = named.psum_scatter(named.all_gather(y, "tp", dim=1) ** 2, "tp", dim=-1)
    y = named.all_to_all(y, "rest", 0, 1)
    y = named.ppermute(y, "rest", shift=1) + named.ppermute(y, "rest", perm=[(0, 1)])
    return y * named.axis_size("dp")


def compiled() -> None:
    with pair():
        counter = CompileCounterWithBackend("aot_eager")
        fast = torch.compile(every_collective, fullgraph=True, backend=counter, dynamic=True)
        for rows in (8, 16, 24):
            x = random((rows, 4), torch.float64, False, rows + dist.get_rank()).requires_grad_()
            y, z = every_collective(x), fast(x)
            torch.testing.assert_close(z, y)
            torch.testing.assert_close(*(torch.autograd.grad((out**2).sum(), x) for out in (z, y)))
        assert counter.frame_count == 1


def test_they_compile_into_one_graph_without_recompiling_for_other_sizes(warm):
    warm(compiled, 2, timeout=120)


def graphs(rank: int) -> list[list[str]]:
    """The collectives of the compiled graphs, forward and backward, as one rank of eight has them."""
    found: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, _: object) -> object:
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        found.append([t.split(".")[1] for t in targets if t.startswith("_c10d_functional.") and "wait" not in t])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    with axes.simulate(8, rank=rank), mesh():
        x = torch.ones(8, 4, requires_grad=True)
        fast = torch.compile(every_collective, fullgraph=True, backend=aot_autograd(fw_compiler=note, bw_compiler=note))
        fast(x).sum().backward()
    return found


def test_every_rank_has_the_same_collectives_in_its_graph():
    # also those that neither send nor receive in a partial permutation
    first, *others = [graphs(rank) for rank in (0, 1, 3)]
    assert all(found == first for found in others)
    assert (
        first[0] == ["all_reduce"] * 3 + ["all_gather_into_tensor", "reduce_scatter_tensor"] + ["all_to_all_single"] * 3
    )


class Image(torch.Tensor):
    """A tensor with a name of its own, as torchvision has them."""


def of_a_subclass() -> list[list[float]]:
    """Values and gradients of what sends a subclass of tensors, by name and by expressions."""
    mesh, found = pair(), []
    for send in (
        lambda x: axes.psum(x, "tp", mesh=mesh),
        lambda x: axes.pmax(x, "tp", mesh=mesh),
        lambda x: axes.rearrange(x, "n | sum@tp -> n", mesh=mesh),
        lambda x: axes.einsum(x, x, "n@tp, n@tp -> ", mesh=mesh),
        lambda x: axes.softmax(x, "n@tp", "n", mesh=mesh)[:1],
    ):
        x = torch.zeros(2).as_subclass(Image).requires_grad_()
        y = send(x)
        y.sum().backward()
        found.append([*y.view(-1).tolist(), x.grad.sum().item()])
    return found


def test_a_subclass_that_only_has_a_name_of_its_own_is_sent_as_the_tensor_that_it_is(world):
    assert world(of_a_subclass, 2) == [[[0, 0, 4], [0, 0, 2], [0, 0, 4], [0, 0], [0.25, 0]]] * 2
