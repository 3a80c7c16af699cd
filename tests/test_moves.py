"""Moves by hand: all pairs of shardings of one mesh, every dtype, gradients row by row, and what is sent.

Values are what a rank holds by definition, which numpy cuts from a whole array; the laws draw everything else.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import axes
from tests.common import case

AXES = ("a", "b", "c")
SHAPE, UNEVEN = (8, 8, 8), (5, 7, 3)
KINDS = {"slice", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "reduce_move"}


def cube() -> axes.Mesh:
    return axes.init_mesh("a=2 b=2 c=2", device_type="cpu")


# --- all pairs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placing:
    """For each dim the axes that split it, major first; the axes over which `op` is pending, and those that are `same`."""

    dims: tuple[tuple[str, ...], ...]
    pending: tuple[str, ...] = ()
    op: str = "sum"
    same: tuple[str, ...] = ()

    @property
    def spec(self) -> str:
        dims = [f"d{i}@({' '.join(axes)})" for i, axes in enumerate(self.dims)]
        clause = [f"{op}@({' '.join(axes)})" for op, axes in ((self.op, self.pending), ("same", self.same)) if axes]
        return " ".join([*dims, "|", *clause])

    @property
    def replicated(self) -> tuple[str, ...]:
        """The axes that do nothing, `same` or not."""
        used = {axis for dim in self.dims for axis in dim} | {*self.pending}
        return tuple(axis for axis in AXES if axis not in used)

    def cut(self, whole: np.ndarray) -> torch.Tensor:
        """The tile of this rank: `torch.chunk`, nested in the written order."""
        for dim, split in enumerate(self.dims):
            for axis in split:
                piece = -(-whole.shape[dim] // 2)
                start = coordinate(axis) * piece
                whole = np.take(whole, range(min(start, whole.shape[dim]), min(start + piece, whole.shape[dim])), dim)
        return torch.from_numpy(np.array(whole, order="C"))


def coordinate(axis: str) -> int:
    return dist.get_rank() >> 2 - AXES.index(axis) & 1


def pairs() -> list[tuple[Placing, Placing]]:
    """Each axis replicated, on a dim in every order of several, or pending; what is pending after was so before."""
    found = []
    for roles in itertools.product((0, 1, 2, "R", "P"), repeat=3):
        on = [[axis for axis, role in zip(AXES, roles, strict=True) if role == dim] for dim in range(3)]
        pending = tuple(axis for axis, role in zip(AXES, roles, strict=True) if role == "P")
        found += [Placing(dims, pending) for dims in itertools.product(*map(itertools.permutations, on))]
    return [(s, t) for s in found for t in found if {*t.pending} <= {*s.pending}]


def varied(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Whole numbers, other ones for each coordinate on the three axes: `[a, b, c, *shape]`."""
    return np.random.default_rng(seed).integers(-20, 21, size=(2, 2, 2, *shape)).astype(np.float64)


def at(values: np.ndarray, kept: Iterable[str]) -> np.ndarray:
    """The array of this rank, which varies along the kept axes alone."""
    return values[tuple(coordinate(axis) if axis in kept else 0 for axis in AXES)]


def expected(source: Placing, target: Placing, values: np.ndarray) -> torch.Tensor:
    for place, axis in reversed(list(enumerate(AXES))):
        if axis in source.pending and axis not in target.pending:
            values = values.sum(place)
        else:
            values = np.take(values, coordinate(axis) if axis in target.pending else 0, place)
    return target.cut(values)


def sizes_of(shape: tuple[int, ...]) -> dict[str, int]:
    return {f"d{i}": size for i, size in enumerate(shape)}


def move_all(chosen: list[tuple[Placing, Placing]], shape: tuple[int, ...]) -> None:
    mesh, values = cube(), varied(0, shape)
    for source, target in chosen:
        with case(f"{source.spec} -> {target.spec}"):
            x = source.cut(at(values, source.pending))
            with CommDebugMode() as sent:
                found = axes.reshard(x, f"{source.spec} -> {target.spec}", mesh=mesh, sizes=sizes_of(shape))
            assert torch.equal(found, expected(source, target, values))
            assert sent.get_total_counts() <= 2


def test_a_sample_of_all_pairs_of_shardings_is_moved_in_at_most_two_collectives(pool):
    chosen = random.Random(20313).sample(pairs(), 120)
    mesh = axes.Mesh("a=2 b=2 c=2")
    plans = [axes.plan(mesh.sharding(s.spec), mesh.sharding(t.spec), SHAPE) for s, t in chosen]
    assert {step.kind for plan in plans for step in plan.steps} == KINDS
    pool.run(move_all, chosen, SHAPE, timeout=120)
    pool.run(move_all, chosen[:40], UNEVEN, timeout=120)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 20313, 2048))
def test_all_pairs_of_shardings_are_moved_in_at_most_two_collectives(pool, first):
    assert len(pairs()) == 20313
    for shape in (SHAPE, UNEVEN):
        pool.run(move_all, pairs()[first : first + 2048], shape, timeout=900)


# --- gradients ------------------------------------------------------------------------------------


def adjoint(count: int, seed: int, shape: tuple[int, ...]) -> None:
    """`sum over ranks of <f(v), g>` is `sum over ranks of <v, f'(g)>`, where a loss that ranks compute together counts once."""
    mesh, chosen = cube(), random.Random(seed)
    values, cotangents = varied(1, shape), varied(2, shape)
    for source, target in chosen.sample(pairs(), count):
        op = chosen.choice(["sum", "sum", "mean"]) if source.pending else "sum"
        same = [tuple(x for x in each.replicated if chosen.random() < 0.3) for each in (source, target)]
        source, target = (replace(e, op=op, same=s) for e, s in zip((source, target), same, strict=True))
        said = {x for e in (source, target) for x in (*e.pending, *e.same, *(x for dim in e.dims for x in dim))}
        unknown = {*AXES} - said  # what differs along these is never mixed
        x = source.cut(at(values, {*source.pending, *unknown})).requires_grad_()
        own = {axis for axis in target.replicated if axis not in target.same}
        g = target.cut(at(cotangents, own | unknown))
        with case(f"{source.spec} -> {target.spec}"):
            y = axes.reshard(x, f"{source.spec} -> {target.spec}", mesh=mesh, sizes=sizes_of(shape))
            (gradient,) = torch.autograd.grad(y, x, g)
            sums = torch.stack([(y * g).sum() / 2 ** len(target.same), (x * gradient).sum() / 2 ** len(source.same)])
            dist.all_reduce(sums := sums.detach())
            assert math.isclose(*sums.tolist(), rel_tol=1e-12, abs_tol=1e-9)
            for axis in {*source.pending, *source.same} - {*target.pending} - unknown:
                line = [torch.empty_like(gradient) for _ in range(2)]
                dist.all_gather(line, gradient.contiguous(), group=mesh.axis(axis).group)
                assert torch.equal(*line) or own & unknown, f"the gradient differs along {axis}"


@pytest.mark.parametrize("shape", [(4, 8, 8), UNEVEN], ids=str)
def test_in_the_local_view_the_gradient_is_the_adjoint_of_the_move(pool, shape):
    pool.run(adjoint, 60, 3, shape, timeout=120)


GLOBAL = [
    # value, result, cotangent, its gradient, collectives on the way back
    ("n@a", "n@()", "n | sum@a", "_@a", 1),
    ("n@a", "n@()", "n", "_@a", 0),
    ("n@a", "n@()", "n@a", "_@a", 0),
    ("n", "n@a", "n@a", "_@a", 0),
    ("n | sum@a", "n", "n | sum@a", "_", 1),
    ("n | sum@a", "n", "n", "_", 0),
    ("n | sum@a", "n", "n@a", "_", 1),
    ("n | sum@a", "n@a", "n@a", "_", 1),
    ("n | sum@a", "n@a", "n", "_", 0),
    ("n | sum@a", "n@a", "n | sum@a", "_", 1),
    ("n | mean@a", "n", "n | sum@a", "_", 1),
    ("n | max@a", "n", "n", "_", 0),
]


def global_gradient(source: str, target: str, cotangent: str) -> tuple[str, int, list[float]]:
    mesh = cube()
    x, g = (
        axes.from_local(torch.arange(4.0)[mesh.sharding(s.partition("|")[0]).local_indices((4,))] * scale, s, mesh=mesh)
        for s, scale in ((source, 1), (cotangent, 3))
    )
    x = x.detach().requires_grad_()
    middle = x.view_as(x)  # a leaf's own gradient would be resolved
    y = axes.reshard(middle, f"{target} |")
    with CommDebugMode() as counted:
        (gradient,) = torch.autograd.grad(y, middle, g)
    return axes.spec_of(gradient), counted.get_total_counts(), axes.unshard(gradient).tolist()


@pytest.mark.parametrize(("source", "target", "cotangent", "spec", "sent"), GLOBAL)
def test_a_row_of_the_table_of_gradients_in_the_global_view(pool, source, target, cotangent, spec, sent):
    whole = [(2.0 if "|" in cotangent else 1.0) * value for value in (0.0, 3.0, 6.0, 9.0)]
    assert pool.run(global_gradient, source, target, cotangent) == [(spec, sent, whole)] * 8


def leaf_gradient() -> tuple[str, int]:
    """Two uses of one leaf, whose gradients arrive split."""
    leaf = axes.shard(torch.ones(4), "n", mesh=cube()).requires_grad_()
    uses = [axes.reshard(leaf, "n@a") for _ in range(2)]
    with CommDebugMode() as counted:
        torch.autograd.backward(uses, [uses[0].detach() * 2, uses[1].detach() * 3])
    assert axes.unshard(leaf.grad).tolist() == [5.0] * 4
    return axes.spec_of(leaf.grad), counted.get_total_counts()


def test_the_gradient_of_a_leaf_is_resolved_once(pool):
    assert pool.run(leaf_gradient) == [("_", 1)] * 8


# --- dtypes and layouts of memory -----------------------------------------------------------------

FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [
    *(torch.bool, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, *FLOAT8, torch.complex64, torch.complex128),
]
PATHS = ["m@a n -> m n", "m@a n -> m n@a", "m@(a b) n -> m n@(b c)", "m@(a b c) n -> m@(c b a) n", "m n -> m@b n@c"]


def whole_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(math.prod(shape)).remainder(2 if dtype is torch.bool else 113).view(shape)
    return (values - 1j * values if dtype.is_complex else values.float()).to(dtype)


def tile(whole: torch.Tensor, spec: str) -> torch.Tensor:
    return whole[cube().sharding(spec).local_indices(whole.shape)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def moved(dtype: torch.dtype) -> None:
    for path, shape in itertools.product(PATHS, ((8, 16), (3, 2), (0, 4))):
        source, target = path.split(" -> ")
        whole = whole_of(shape, dtype)
        for local in (tile(whole, source), tile(whole.t().contiguous().t(), source)):
            with case(f"{path} of {shape}"):
                found = axes.reshard(local, path, mesh=cube(), m=shape[0] or None, n=shape[1])
                assert found.dtype == dtype
                assert torch.equal(bits(found), bits(tile(whole, target)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_moved_bit_by_bit_from_any_layout_of_memory(pool, dtype):
    pool.run(moved, dtype)


def gradient_dtypes() -> tuple[float, float, int]:
    """Sums of what 16 bits can't hold, rounded where they travel as bfloat16; and of what can't be sent as it is."""
    x = torch.full((4,), 257.0).requires_grad_()
    y = axes.reshard(x, "n | sum@a -> n", mesh=cube(), comm_dtype=(None, torch.bfloat16))
    y.backward(torch.full((4,), 257.0))
    narrow = axes.reshard(
        torch.full((4,), 300, dtype=torch.int16), "n | sum@a -> n", mesh=cube(), comm_dtype=torch.int64
    )
    assert (x.grad.dtype, narrow.dtype) == (torch.float32, torch.int16)
    return float(y[0]), float(x.grad[0]), int(narrow[0])


def test_values_and_gradients_have_communication_dtypes_of_their_own(pool):
    assert pool.run(gradient_dtypes) == [(514.0, 512.0, 600)] * 8


LARGE = [
    # what gloo reduces in rounds, and what it passes on
    ("m n | sum@(a b) -> m@(a b) n", (2200, 1024)),
    ("m@c n | max@a -> m@(c a) n", (4400, 1024)),
    ("m n | mean@b -> m n@b", (2200, 1024)),
    ("m@(a b) n -> m@(b a) n", (8192, 24)),
]


def large(path: str, shape: tuple[int, ...]) -> None:
    source, target = path.split(" -> ")
    whole, dims = whole_of(shape, torch.float64), source.partition(" |")[0]
    at = sum(coordinate(axis) for axis in AXES if "|" in source and axis in source.rpartition("@")[2])
    found = axes.reshard(tile(whole, dims) + at, path, mesh=cube())
    most = {"sum@(a b)": 4 * whole + 4, "max@a": whole + 1, "mean@b": whole + 0.5}
    assert torch.equal(found, tile(most.get(source.partition("| ")[2], whole), target))


@pytest.mark.parametrize(("path", "shape"), LARGE)
def test_large_tiles_are_moved_as_small_ones_are(pool, path, shape):
    pool.run(large, path, shape)


def in_place() -> None:
    mesh = axes.init_mesh("a=2 b=2 c=2", "ab = a b", device_type="cpu")
    x = torch.arange(8.0).view(2, 4)
    d = axes.shard(torch.zeros(8, 4), "m@(a b) n", mesh=mesh)
    with CommDebugMode() as sent:
        assert axes.reshard(d, "m@ab n", mesh=mesh) is d
        assert axes.reshard({"d": d}, {"d": "m@(a b) n"})["d"] is d
        assert axes.reshard({}, {}) == {}
        assert axes.reshard(x, "m@(a b) n -> m@ab n", mesh=mesh) is x
        row = axes.reshard(x, "m n -> m@a n", mesh=mesh)
    assert not sent.get_total_counts()
    assert row.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_what_lies_right_stays_where_it_is_and_a_slice_is_a_copy(pool):
    pool.run(in_place)


def flat_and_nested() -> None:
    mesh = axes.init_mesh("a=2 b=4", "w = a b", "u = b a", device_type="cpu")
    for n, (source, target) in itertools.product(range(1, 20), itertools.permutations(("w", "(a b)", "u", "(b a)"), 2)):
        parts = [torch.arange(n)[mesh.sharding(f"n@{place}").local_indices((n,))] for place in (source, target)]
        with case(f"{n} from {source} to {target}"):
            assert torch.equal(axes.rearrange(parts[0], f"n@{source} -> n@{target}", mesh, n=n), parts[1])


def test_an_axis_and_its_digits_cut_an_uneven_dim_in_two_ways(pool):
    """They cut an even one alike, so that nothing moves there."""
    pool.run(flat_and_nested)


# --- one rank's tensor ----------------------------------------------------------------------------


def odd_sources() -> None:
    mesh = axes.init_mesh("pp=2 tp=4", ranks=[7, 5, 3, 1, 0, 2, 4, 6], device_type="cpu")
    made = axes.process_groups()
    for source in (4 if dist.get_rank() % 2 else 3, 8):
        with pytest.raises(
            axes.ShardingError, match=rf"through this one, ranks (7, 5, 3, 1|0, 2, 4, 6); found {source}"
        ):
            axes.shard(torch.zeros(4), "a@tp", mesh=mesh["tp"], source_rank=source)
    with pytest.raises(axes.ShardingError, match=r"takes a tensor; found NoneType"):
        axes.shard(None, "a@tp", mesh=mesh["tp"], source_rank=0)
    assert axes.process_groups() == made
    few = axes.init_mesh("tp=4", ranks=[0, 1, 2, 3], device_type="cpu")
    x = axes.shard(torch.full((4,), float(dist.get_rank())), "a@tp", mesh=few, source_rank=2)
    assert x.to_local().tolist() == ([2.0] if dist.get_rank() < 4 else [])
    source = (5, 6)[mesh.coordinate["pp"]]  # each line along tp has its own
    w = torch.full((12, 2), float(dist.get_rank()), requires_grad=True)
    y = axes.shard(w, "(three h@tp) b", mesh=mesh["tp"], source_rank=source, three=3)
    assert (y.requires_grad, y.is_leaf, y.to_local().unique().tolist()) == (True, True, [source])


def test_each_line_has_a_source_of_its_own_and_another_is_refused(pool):
    pool.run(odd_sources)
