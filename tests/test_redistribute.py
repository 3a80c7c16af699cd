"""Redistribution on real processes: every dtype and layout of memory, other meshes, other ranks.

Values are compared with what a rank must hold by definition; how much is sent with what a plan says.
"""

from __future__ import annotations

import io
import logging
import math
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.algebra.errors import DesyncError, ShardingError
from axes.runtime import programs, torch_private
from axes.runtime import redistribute as engine
from axes.runtime.groups import current_world
from axes.runtime.redistribute import redistribute

DTYPES = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]

PATHS = [
    ("m@a n", "m n"),
    ("m@a n", "m n@a"),
    ("m@(a b) n", "m n@(b c)"),
    ("m@(a b c) n", "m@(c b a) n"),
    ("m n", "m@b n@c"),
    ("m n@c", "m n"),
]


def whole_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(math.prod(shape)).remainder(2 if dtype is torch.bool else 113).view(shape)
    if dtype.is_complex:
        return torch.complex(values.double(), -values.double()).to(dtype)
    return values.to(torch.float32).to(dtype) if dtype.itemsize == 1 and dtype.is_floating_point else values.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def tile(whole: torch.Tensor, sharding: axes.Sharding) -> torch.Tensor:
    return whole[sharding.local_indices(whole.shape)]


def cube() -> axes.Mesh:
    return axes.init_mesh("a=2 b=2 c=2", device_type="cpu")


def moved(dtype: torch.dtype, shape: tuple[int, ...]) -> list[str]:
    mesh, whole, wrong = cube(), whole_of(shape, dtype), []
    for source, target in PATHS:
        ends = mesh.sharding(source), mesh.sharding(target)
        for local in (tile(whole, ends[0]), tile(whole.t().contiguous().t(), ends[0])):
            found = redistribute(local, *ends, shape)
            if found.dtype != dtype or not torch.equal(bits(found), bits(tile(whole, ends[1]))):
                wrong.append(f"{source} -> {target}")
    return wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_moved_bit_by_bit_from_any_layout_of_memory(pool, dtype):
    assert pool.run(moved, dtype, (8, 16)) == [[]] * 8


@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (0, 4), (3, 0)], ids=str)
def test_uneven_and_empty_tensors_are_moved(pool, shape):
    assert pool.run(moved, torch.float32, shape) == [[]] * 8


def reduced(dtype: torch.dtype, op: str, comm_dtype: torch.dtype | None) -> list[str]:
    mesh, wrong = cube(), []
    at = mesh.coordinate["a"] * 2 + mesh.coordinate["c"]
    parts = torch.stack([whole_of((8, 4), torch.float64).roll(k, 0).remainder(5) for k in range(4)])
    expected = {"sum": parts.sum(0), "mean": parts.mean(0), "max": parts.amax(0), "min": parts.amin(0)}[op]
    for target in ("m n", "m@(a c) n", "m n@c", "m@b n@(c a)"):
        ends = mesh.sharding(f"m n | {op}@(a c)"), mesh.sharding(target)
        found = redistribute(parts[at].to(dtype), *ends, (8, 4), comm_dtype=comm_dtype)
        if found.dtype != dtype or not torch.equal(found, tile(expected, ends[1]).to(dtype)):
            wrong.append(target)
    return wrong


DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.complex64)
UNDEFINED = {("mean", torch.int32), ("max", torch.complex64), ("min", torch.complex64)}
"""What a dtype doesn't have is refused, as a test below says."""


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, dtype) for dtype in DTYPES for op in ("sum", "mean", "max", "min") if (op, dtype) not in UNDEFINED],
    ids=str,
)
def test_reductions_are_those_of_all_contributions(pool, op, dtype):
    assert pool.run(reduced, dtype, op, None) == [[]] * 8


@pytest.mark.parametrize(
    ("dtype", "comm_dtype"),
    [(torch.int16, torch.int64), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)],
)
def test_a_communication_dtype_is_for_the_way_alone(pool, dtype, comm_dtype):
    assert pool.run(reduced, dtype, "sum", comm_dtype) == [[]] * 8


def refused(dtype: torch.dtype, op: str) -> str:
    mesh = cube()
    x = torch.zeros(4, dtype=dtype) if not str(dtype).startswith("torch.float8") else torch.zeros(4).to(dtype)
    with pytest.raises(ShardingError) as error, CommDebugMode() as counted:
        redistribute(x, mesh.sharding(f"n | {op}@a"), mesh.sharding("n"), (4,))
    assert counted.get_total_counts() == 0
    return str(error.value)


@pytest.mark.parametrize(
    ("dtype", "op", "says"),
    [
        (torch.int16, "sum", "comm_dtype=torch.int64"),
        (torch.float8_e5m2, "sum", "comm_dtype=torch.float32"),
        (torch.bool, "sum", "comm_dtype=torch.int64"),
        (torch.int32, "mean", "a mean of int32"),
        (torch.complex64, "max", "no order"),
    ],
)
def test_a_reduction_that_the_dtype_does_not_have_is_refused_before_anything_is_sent(pool, dtype, op, says):
    for found in pool.run(refused, dtype, op):
        assert says in found
        assert "source" in found
        assert "target" in found


def gradient_dtypes() -> tuple[float, float]:
    """Sums of a million and a bit, rounded where they travel as bfloat16."""
    mesh = cube()
    x = torch.full((4,), 257.0).requires_grad_()
    y = redistribute(
        x, mesh.sharding("n | sum@a"), mesh.sharding("n"), (4,), view="local", comm_dtype=(None, torch.bfloat16)
    )
    y.backward(torch.full((4,), 257.0))
    return float(y[0]), float(x.grad[0])


def test_values_and_gradients_have_communication_dtypes_of_their_own(pool):
    assert pool.run(gradient_dtypes) == [(514.0, 512.0)] * 8


def in_no_time() -> list[bool]:
    mesh = axes.init_mesh("a=2 b=2 c=2", "ab = a b", device_type="cpu")
    x = torch.arange(8.0).view(2, 4)
    alias = redistribute(x, mesh.sharding("m@(a b) n"), mesh.sharding("m@ab n"), (8, 4))
    gathered = redistribute(x, mesh.sharding("m@a n"), mesh.sharding("m n"), (4, 4))
    row = redistribute(gathered, mesh.sharding("m n"), mesh.sharding("m@a n"), (4, 4))
    d = axes.shard(torch.zeros(8, 4), "m@(a b) n", mesh=mesh)
    with CommDebugMode() as counted:
        same = axes.reshard(d, "m@ab n", mesh=mesh)
    memory = [y.untyped_storage().data_ptr() for y in (row, gathered)]
    return [alias is x, memory[0] != memory[1], same is d, counted.get_total_counts() == 0]


def test_what_lies_right_stays_where_it_is_and_a_slice_is_a_copy(pool):
    assert pool.run(in_no_time) == [[True] * 4] * 8


def counted(source: str, target: str) -> tuple[int, int]:
    mesh = cube()
    ends = mesh.sharding(source), mesh.sharding(target)
    local = torch.zeros(ends[0].local_shape((8, 8, 8)))
    with CommDebugMode() as counts:
        redistribute(local, *ends, (8, 8, 8))
    return counts.get_total_counts(), axes.plan(source, target, (8, 8, 8), mesh=mesh).collectives


@pytest.mark.parametrize(
    ("source", "target", "collectives"),
    [
        ("x@a y@b z", "x y@a z@b", 1),
        ("x y z | sum@(a b c)", "x y z", 1),
        ("x y z | sum@(a b c)", "x@c y@b z@a", 1),
        ("x@(a b c) y z", "x y z", 1),
        ("x y z", "x@a y@b z@c", 0),
    ],
)
def test_as_many_collectives_run_as_the_plan_says(pool, source, target, collectives):
    assert pool.run(counted, source, target) == [(collectives, collectives)] * 8


# --- other factors, orders and ranks --------------------------------------------------------------


def between(declarations: list[tuple[str, str, str]], ranks: list[int], shape: tuple[int, ...]) -> list[str]:
    """Redistributions in every direction between shardings on meshes of the same ranks."""
    wrong = []
    whole = whole_of(shape, torch.float32)
    meshes = [(axes.init_mesh(*d[:1], ranks=ranks, device_type="cpu"), d[1:]) for d in declarations]
    shardings = [mesh.sharding(spec) for mesh, specs in meshes for spec in specs]
    if dist.get_rank() not in ranks:
        return []
    for source in shardings:
        for target in shardings:
            found = redistribute(tile(whole, source), source, target, shape)
            if not torch.equal(found, tile(whole, target)):
                wrong.append(f"{source!r} -> {target!r}")
    return wrong


def test_a_permuted_rank_map_moves_the_same_tiles_to_other_ranks(pool):
    declarations = [("a=2 b=4", "m@a n@b", "m@(b a) n"), ("x=8", "m@x n", "m n@x")]
    assert pool.run(between, declarations, [3, 1, 4, 0, 7, 6, 2, 5], (8, 16)) == [[]] * 8


def test_factors_of_six_ranks_that_have_no_common_digits(pool):
    declarations = [("a=2 b=3", "m@a n@b", "m@b n"), ("c=3 d=2", "m@c n@d", "m n@d")]
    assert pool.run(between, declarations, list(range(6)), (12, 12)) == [[]] * 8
    assert pool.run(between, declarations, list(range(6)), (7, 5)) == [[]] * 8


def test_some_ranks_of_a_job_in_any_order(pool):
    declarations = [("a=3", "m@a n", "m n@a", "m n")]
    assert pool.run(between, declarations, [6, 1, 4], (6, 9)) == [[]] * 8


def factored() -> list[str]:
    mesh = cube()
    specs = [
        "(q=3 h@a d) m",
        "(q=3 h@(a b) d) m",
        "(q=3 h@(b a) d) m@c",
        "(q=3 h d) m@a",
        "x@a m",
        "(q=3 h@b d@a) m",
    ]
    wrong, shape = [], (3 * 4 * 4, 8)
    whole = whole_of(shape, torch.float32)
    shardings = [mesh.sharding(spec, **({"h": 4} if "h" in spec else {})).sized(shape) for spec in specs]

    def held(sharding: axes.Sharding) -> torch.Tensor:
        rows, columns = sharding.local_indices(shape)
        runs = (rows,) if isinstance(rows, slice) else rows
        return torch.cat([whole[run] for run in runs])[:, columns]

    for source in shardings:
        for target in shardings:
            found = redistribute(held(source), source, target, shape)
            if not torch.equal(found, held(target)):
                wrong.append(f"{source} -> {target}")
    return wrong


def test_factors_of_a_dim_are_split_moved_and_gathered(pool):
    assert pool.run(factored) == [[]] * 8


def islands() -> list[str]:
    """From ranks 0 to 3 to ranks 4 to 7 and back, every rank of either calling."""
    train = axes.init_mesh("dp=2 tp=2", ranks=range(4), device_type="cpu")
    serve = axes.init_mesh("replica=2 tp=2", ranks=range(4, 8), device_type="cpu")
    whole, wrong = whole_of((8, 4), torch.float32), []
    for spec, there in (("m@dp n@tp", "m n@tp"), ("m n@(tp dp)", "m@tp n"), ("m@dp n | sum@tp", "m@tp n")):
        source, target = train.sharding(spec), serve.sharding(there)
        inside = dist.get_rank() < 4
        local = tile(whole, source) if inside else torch.empty(0)
        found = redistribute(local, source, target, (8, 4))
        value = whole * 2 if source.pending else whole
        if not torch.equal(found, torch.empty(0) if inside else tile(value, target)):
            wrong.append(f"{spec} -> {there}")
        x = DTensor.from_local(
            local, train.device_mesh, source.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        if source.pending:
            continue
        y = axes.reshard(axes.reshard(x, target), source)
        if inside and not torch.equal(y.to_local(), local):
            wrong.append(f"{spec} -> {there} -> {spec}")
    return wrong


def test_between_disjoint_sets_of_ranks_every_rank_of_either_takes_part(pool):
    assert pool.run(islands) == [[]] * 8


def outsider() -> str:
    one = axes.init_mesh("a=2", ranks=[0, 1], device_type="cpu")
    two = axes.init_mesh("a=2", ranks=[2, 3], device_type="cpu")
    if dist.get_rank() in (0, 1, 2, 3):
        return "neither among the ranks of the source"
    with pytest.raises(ShardingError) as error:
        redistribute(torch.empty(0), one.sharding("n@a"), two.sharding("n"), (4,))
    return str(error.value)


def test_a_rank_of_neither_mesh_gets_an_error(pool):
    assert all("neither among the ranks of the source" in found for found in pool.run(outsider))


# --- modes ----------------------------------------------------------------------------------------


def modes() -> None:
    mesh, whole = cube(), whole_of((8, 8), torch.float32)
    x = axes.shard(whole, "m@a n@b", mesh=mesh)
    wanted = mesh.sharding("m@b n@a")
    with torch.inference_mode():
        y = axes.reshard(axes.shard(whole, "m@a n@b", mesh=mesh), wanted)
        assert y.is_inference()
        assert torch.equal(y.to_local(), tile(whole, wanted))
    for target in ("m@a n@()", "m@b n@a", "m@() n", "m@(a b) n"):
        z = axes.reshard(x, target, async_op=True)
        assert torch.equal(axes.unshard(z * 2), whole * 2), target
    s = axes.from_local(torch.tensor(3.0), " | sum@(a b)", mesh=mesh)
    assert float(axes.unshard(s)) == 12.0
    assert float(axes.unshard(axes.reshard(s, "|", async_op=True))) == 12.0


def test_inference_mode_async_calls_and_scalars(pool):
    pool.run(modes)


def agreement_with_dtensor() -> None:
    """What torch's own redistribution gives, placement by placement."""
    mesh = axes.init_mesh("a=4 b=2", device_type="cpu")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    rank = dist.get_rank()
    choices = [Replicate(), Shard(0), Shard(1), Partial()]
    local = torch.arange(6.0).view(2, 3) + rank
    for one in choices:
        for two in choices:
            pair = (one, two)
            x = DTensor.from_local(local, mesh.device_mesh, pair, run_check=False)
            for wanted in ((Shard(0), Shard(1)), (Shard(1), Shard(1)), (Replicate(), Replicate())):
                if any(isinstance(p, Replicate) for p in pair):
                    continue  # summands that differ where they should be equal
                theirs = x.redistribute(placements=wanted)
                ours = axes.reshard(x, axes.Sharding.from_placements(mesh, wanted, 2))
                assert torch.allclose(ours.to_local(), theirs.to_local())
                assert ours.placements == theirs.placements
                assert ours.stride() == theirs.stride()


def test_results_are_those_of_dtensor_with_its_placements_and_strides(pool):
    pool.run(agreement_with_dtensor)


# --- looking and checking -------------------------------------------------------------------------


def logged() -> str:
    mesh = axes.init_mesh("a=2 b=2 c=2", device_type="cpu")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log = logging.getLogger("axes")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    os.environ["AXES_LOG"] = "plan"
    current_world().caches.clear()
    engine._log_once.cache_clear()
    try:
        for _ in range(3):
            redistribute(torch.zeros(4, 8), mesh.sharding("logged@a n"), mesh.sharding("logged n@a"), (8, 8))
    finally:
        del os.environ["AXES_LOG"]
        log.removeHandler(handler)
        log.setLevel(level)
        current_world().caches.clear()
    return stream.getvalue()


def test_each_plan_is_logged_once_on_the_first_rank_that_it_is_for(pool):
    found = pool.run(logged)
    assert found[0] == (
        "logged@a n -> logged n@a     [8, 8] float32\n  1  all_to_all  a  2 ranks, stride 4  64 B in, 64 B out\n"
    )
    assert found[1:] == [""] * 7


def disagreeing(how: str) -> str:
    os.environ["AXES_CHECK"] = "1"
    mesh = axes.init_mesh("a=2 b=2 c=2", device_type="cpu", timeout=10)
    odd = dist.get_rank() == 5
    whole = torch.zeros(8, 8, dtype=torch.float64 if odd and how == "dtype" else torch.float32)
    shape = (16, 8) if odd and how == "shape" else (8, 8)
    x = axes.shard(whole.new_zeros(shape), "m@a n", mesh=mesh)
    assert torch.equal(axes.unshard(axes.shard(torch.ones(8), "n@b", mesh=mesh)), torch.ones(8))
    try:
        axes.reshard(x, "m@b n" if odd and how == "target" else "m n@a")
    except DesyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["target", "shape", "dtype"])
def test_with_axes_check_ranks_in_disagreement_raise_on_every_rank(world, how):
    found = world(disagreeing, 8, how)
    for text in found:
        assert "ranks disagree in operation 2 of ranks 0..7:" in text, text
        assert "rank 5: axes.reshard to '" in text, text


def in_rounds() -> list[bool]:
    """Whether what gloo does with large tiles gives what it does with small ones: of whole numbers, whose sums are exact."""
    mesh = axes.init_mesh("a=2 b=4", device_type="cpu")
    limits = programs.WHOLE, programs.STAGED, programs.PASSED_ON
    shape, found = (16, 24), []
    for source, target in LARGE:
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2 if "|" not in source else torch.float64):
            wanted = mesh.sharding(target)
            numbers = torch.Generator().manual_seed(mesh.rank)
            local = torch.randn(mesh.sharding(source).local_shape(shape), generator=numbers).mul(8).round().to(dtype)
            results = []
            for programs.WHOLE, programs.STAGED, programs.PASSED_ON in (limits, (0, 300, 0)):
                current_world().caches.clear()
                ends = (mesh.sharding(spec).at(shape) for spec in (source, target))
                results.append(engine.run(engine.program(*ends, shape, dtype), local))
            found.append(torch.equal(*results) and tuple(results[1].shape) == wanted.local_shape(shape))
            found.append(results[1].untyped_storage().data_ptr() != local.untyped_storage().data_ptr())
    programs.WHOLE, programs.STAGED, programs.PASSED_ON = limits
    current_world().caches.clear()
    return found


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_says_that_an_exchange_reads_the_tile_where_it_lies(rank):
    with axes.simulate(4, rank=rank):
        mesh = axes.init_mesh("tp=4", device_type="cpu")
        assert engine.program(mesh.sharding("b d@tp"), mesh.sharding("b@tp d"), (8, 16), torch.float32).lends


def passed_on(rows: int) -> bool:
    """Whether a permuted tile of so many rows is sent and received, not exchanged."""
    mesh, sent = axes.init_mesh("a=2 b=4", device_type="cpu"), list[int]()
    whole = torch.arange(rows * 24.0).view(rows, 24)
    original = torch_private.pass_on
    torch_private.pass_on = lambda group, *how: sent.append(rows) or original(group, *how)
    try:
        found = axes.reshard(axes.shard(whole, "m@(a b) n", mesh=mesh), "m@(b a) n")
    finally:
        torch_private.pass_on = original
    assert torch.equal(axes.unshard(found), whole)
    return bool(sent)


@pytest.mark.parametrize(("rows", "is_large"), [(64, False), (8192, True)])
def test_by_the_size_of_the_tensor_and_not_of_its_plan_a_tile_is_passed_on(pool, rows, is_large):
    assert any(pool.run(passed_on, rows)) == is_large


LARGE = [
    ("m n | sum@b", "m@b n"),
    ("m n | sum@b", "m n@b"),
    ("m@a n | max@b", "m@(a b) n"),
    ("m n | mean@(a b)", "m@(a b) n"),
    ("m@(a b) n", "m@(b a) n"),
    ("m@a n@b", "m@b n@a"),
]


def test_large_tiles_are_reduced_in_rounds_and_passed_on_as_small_ones_are(pool):
    for found in pool.run(in_rounds):
        assert found == [True] * len(found)
