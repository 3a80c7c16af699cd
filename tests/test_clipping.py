"""The norm of all gradients and clipping by it, against torch on whole tensors.

A generated case has parameters of all kinds together: on the whole mesh, on sub-meshes, on the axes of
another factorization, on axes of size one, split evenly, unevenly, by a factor, not at all, and plain ones;
with gradients that are there, missing, pending, or sharded otherwise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import axes
import axes.nn
from axes import MeshError, ShardingError
from axes.nn.clipping import NonFiniteNormError

MESHES: list[tuple[tuple[str, ...], list[tuple[str, ...]], list[int] | None]] = [
    # a declaration, the groups of names that a parameter's mesh may have, and the order of the ranks
    (
        ("rep=2 shard=2 tp=2", "fsdp = rep shard", "(shard tp) = efsdp ep=4"),
        [("rep", "shard", "tp"), ("rep", "efsdp", "ep"), ("fsdp", "tp"), ("tp",), ("shard",), ("ep",), ("tp", "rep")],
        None,
    ),
    (
        ("dp=2 cp=2 tp=2", "(dp cp) = edp ep=2"),
        [("dp", "cp", "tp"), ("edp", "ep", "tp"), ("cp",), ("dp", "tp"), ("tp", "cp")],
        [3, 1, 0, 2, 7, 6, 4, 5],
    ),
    (("dp=8 tp=1", "all = dp tp"), [("dp", "tp"), ("tp",), ("all",), ("tp", "dp")], None),
    (("a=4 b=1 c=2", "(a c) = d ep=1"), [("a", "b", "c"), ("b",), ("d", "ep"), ("ep",), ("c", "b")], None),
    (("pp=1 dp=4 tp=2",), [("dp", "tp"), ("pp", "dp", "tp"), ("tp",), ("dp",)], None),
]

ORDERS = [2.0, 2.0, 1.0, math.inf, 3.0, 0.5]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16]
KINDS = ["there", "there", "there", "missing", "pending", "otherwise"]


NORM = 5e-5
"""The relative error of a norm: the sum of the roots of thousands of elements is one in float32, as in torch."""


@dataclass
class Case:
    """Parameters of this rank with gradients, and the whole gradients of all ranks."""

    parameters: list[torch.Tensor] = field(default_factory=list)
    wholes: list[torch.Tensor | None] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


def drawn_spec(rng: random.Random, shape: list[int], names: tuple[str, ...], mesh: axes.Mesh) -> str:
    """A spec for a shape, each name of the mesh in one dim, or in none."""
    of_dim: list[list[str]] = [[] for _ in shape]
    for name in rng.sample(names, len(names)):
        if shape and rng.random() < 0.7:
            rng.choice(of_dim).append(name)
    words = []
    for number, (size, split) in enumerate(zip(shape, of_dim, strict=True)):
        place = f"@({' '.join(split)})" if split else ""
        if len(split) == 1 and size and size % (3 * mesh.names[split[0]]) == 0 and rng.random() < 0.6:
            words.append(f"(three{number}=3 d{number}{place})")
        else:
            words.append(f"d{number}{place}")
    return " ".join(words)


def drawn_gradient(
    rng: random.Random, kind: str, whole: torch.Tensor, spec: str, mesh: axes.Mesh
) -> torch.Tensor | None:
    if kind == "missing":
        return None
    if kind == "otherwise":
        return axes.shard(whole, " ".join(f"d{n}" for n in range(whole.ndim)), mesh=mesh)
    found = axes.shard(whole, spec, mesh=mesh)
    free = [
        name
        for name in mesh.axis_names
        if name not in spec.replace("(", " ").replace(")", " ").replace("@", " ").split()
    ]
    if kind == "there" or not free:
        return found
    over = rng.choice(free)
    index = mesh.axis(over).index
    noise = torch.full_like(found.to_local(), 2.0)
    last = mesh.names[over] - 1
    local = found.to_local() + noise if index == 0 and last else torch.zeros_like(noise)
    local = -noise if index == last and last else local if last else found.to_local()
    return axes.from_local(local, f"{spec} | sum@{over}", mesh=mesh, shape=whole.shape)


def drawn(rng: random.Random, mesh: axes.Mesh, choices: list[tuple[str, ...]], count: int) -> Case:
    case = Case()
    while len(case.parameters) < count:
        shape = [rng.choice([0, 1, 2, 3, 5, 6, 7, 12, 24]) for _ in range(rng.choice([0, 1, 2, 2, 3]))]
        dtype = rng.choice(DTYPES)
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        # Of bfloat16 only whole numbers, so that sums with what is pending are exact.
        whole = torch.randint(-4, 5, shape, generator=generator).to(dtype)
        whole = whole if dtype == torch.bfloat16 else whole * torch.rand(shape, generator=generator).to(dtype)
        kind = rng.choice(KINDS)
        if rng.random() < 0.15:
            parameter = nn.Parameter(torch.zeros_like(whole))
            parameter.grad = None if kind == "missing" else whole.clone()
            spec = "plain"
        else:
            names = rng.choice(choices)
            where = mesh[names]
            spec = drawn_spec(rng, shape, names, where)
            try:
                parameter = nn.Parameter(axes.shard(torch.zeros_like(whole), spec, mesh=where))
            except ShardingError:  # DTensor can't say it for this shape
                continue
            parameter.grad = drawn_gradient(rng, kind, whole, spec, where)
            spec = f"{spec} on {names}"
        case.parameters.append(parameter)
        case.wholes.append(None if kind == "missing" else whole)
        case.text.append(f"{shape} {dtype} {spec}, {kind}")
    return case


def whole_of(x: torch.Tensor) -> torch.Tensor:
    return axes.unshard(x) if isinstance(x, DTensor) else x


def expected_norm(wholes: list[torch.Tensor | None], order: float) -> torch.Tensor:
    flat = [whole.double().flatten() for whole in wholes if whole is not None and whole.numel()]
    return torch.linalg.vector_norm(torch.cat(flat), order) if flat else torch.zeros((), dtype=torch.float64)


def wrong_gradients(case: Case, factor: float) -> list[str]:
    wrong = []
    for parameter, whole, text in zip(case.parameters, case.wholes, case.text, strict=True):
        if (parameter.grad is None) != (whole is None):
            wrong.append(f"{text}: {parameter.grad}")
        elif whole is not None:
            if isinstance(parameter, DTensor) and parameter.grad.placements != parameter.placements:
                wrong.append(f"{text}: gradient {parameter.grad.placements}")
            tolerance = {torch.bfloat16: 1e-2}.get(whole.dtype, 1e-5)
            found = whole_of(parameter.grad)
            if not torch.allclose(found.double(), whole.double() * factor, rtol=tolerance, atol=1e-6):
                wrong.append(f"{text}: values")
    return wrong


def clipped_cases(seed: int, count: int) -> tuple[list[str], list[float]]:
    """What went wrong in so many cases, and all norms."""
    wrong, norms = [], []
    meshes = [(axes.init_mesh(*texts, device_type="cpu", ranks=ranks), c) for texts, c, ranks in MESHES]
    for number in range(count):
        rng = random.Random(seed * 1000 + number)
        mesh, choices = rng.choice(meshes)
        order = rng.choice(ORDERS)
        case = drawn(rng, mesh, choices, rng.randrange(1, 7))
        expected = expected_norm(case.wholes, order)
        limit = rng.choice([0.5, 3.0, 1e6, math.inf]) * max(1.0, float(expected))
        title = f"case {seed * 1000 + number}, order {order}:\n  " + "\n  ".join(case.text)
        norm = axes.nn.clip_grad_norm_(case.parameters, limit, order)
        if isinstance(norm, DTensor) or norm.ndim or not torch.allclose(norm.double(), expected, rtol=NORM, atol=1e-7):
            wrong.append(f"{title}\n  norm {norm}, expected {expected}")
        factor = 1.0 if limit == math.inf else min(1.0, limit / (float(expected) + 1e-6))
        wrong += [f"{title}\n  {text}" for text in wrong_gradients(case, factor)]
        norms.append(float(norm))
        again = axes.nn.total_norm([p.grad for p in case.parameters if p.grad is not None], order)
        if not torch.allclose(again.double(), expected * factor, rtol=1e-2, atol=1e-6):
            wrong.append(f"{title}\n  total_norm {again}, expected {expected * factor}")
    return wrong, norms


@pytest.mark.parametrize("seed", range(4))
def test_each_element_counts_once_on_any_meshes_and_every_rank_gets_the_same_norm(pool, seed):
    found = pool.run(clipped_cases, seed, 60, timeout=240)
    for wrong, norms in found:
        assert not wrong, wrong[0]
        assert norms == found[0][1]


# --- pipeline stages


def staged_cases(seed: int, count: int) -> tuple[list[str], list[float]]:
    """Each stage has parameters of its own, one maybe none; some are on the whole mesh, some are tied."""
    wrong, norms = [], []
    mesh = axes.init_mesh("pp=2 dp=2 tp=2", "(dp tp) = edp ep=2", "(pp dp) = stages", device_type="cpu")
    choices = [("dp", "tp"), ("edp", "ep"), ("tp",), ("tp", "dp")]
    here = mesh.axis("pp").index
    for number in range(count):
        rng = random.Random(seed * 1000 + number)
        order = rng.choice(ORDERS)
        counts = rng.choice([(3, 2), (1, 4), (0, 3), (2, 0)])
        stages = [drawn(random.Random(rng.randrange(1 << 30)), mesh, choices, n) for n in counts]
        everywhere = drawn(rng, mesh, [("pp", "dp", "tp"), ("dp", "pp")], 2)
        kept = [i for i, text in enumerate(everywhere.text) if "plain" not in text]  # of no mesh is of its stage
        tied = drawn(random.Random(rng.randrange(1 << 30)), mesh, choices, rng.randrange(2))
        own = stages[here]
        parameters = [*own.parameters, *tied.parameters, *(everywhere.parameters[i] for i in kept)]
        wholes = [w for stage in stages for w in stage.wholes] + tied.wholes + [everywhere.wholes[i] for i in kept]
        expected = expected_norm(wholes, order)
        limit = 0.5 * max(1.0, float(expected))
        with mesh:
            copies = tied.parameters if here == 1 else []
            norm = axes.nn.clip_grad_norm_(iter(parameters), limit, order, stages="pp", copies=copies)
        title = f"case {seed * 1000 + number}, order {order}:\n  " + "\n  ".join(t for s in stages for t in s.text)
        if not torch.allclose(norm.double(), expected, rtol=NORM, atol=1e-7):
            wrong.append(f"{title}\n  norm {norm}, expected {expected}")
        factor = min(1.0, limit / (float(expected) + 1e-6))
        for case in (own, tied):
            wrong += [f"{title}\n  {text}" for text in wrong_gradients(case, factor)]
        norms.append(round(float(norm), 3 - int(math.log10(1 + float(norm)))))
    return wrong, norms


def test_the_norm_is_over_all_pipeline_stages_and_a_tied_copy_counts_once(pool):
    found = pool.run(staged_cases, 7, 60, timeout=240)
    for wrong, norms in found:
        assert not wrong, wrong[0]
        assert norms == found[0][1]


def stages_without_parameters() -> list[float]:
    mesh = axes.init_mesh("pp=4 tp=2", device_type="cpu")
    stage = mesh.axis("pp").index
    weight = nn.Parameter(axes.shard(torch.zeros(6), "n@tp", mesh=mesh["tp"]))
    weight.grad = axes.shard(torch.full((6,), float(stage)), "n@tp", mesh=mesh["tp"])
    listed = [weight] if stage == 3 else []
    parts = mesh.rearrange("(outer inner) tp -> outer inner tp", outer=2)
    both = axes.nn.clip_grad_norm_([weight], math.inf, 1.0, stages=("outer", "inner"), mesh=parts)
    return [
        float(axes.nn.clip_grad_norm_(listed, math.inf, 1.0, stages="pp", mesh=mesh)),
        float(axes.nn.clip_grad_norm_(listed, math.inf, math.inf, stages="pp", mesh=mesh)),
        float(both),
        float(axes.nn.clip_grad_norm_([], 1.0)),
        float(axes.nn.total_norm([weight.grad], 1.0, stages="pp", mesh=mesh)),
    ]


def test_a_stage_may_have_no_parameters_and_stages_may_be_two_axes(pool):
    assert pool.run(stages_without_parameters) == [[18.0, 3.0, 36.0, 0.0, 36.0]] * 8


# --- what is communicated


def collectives() -> None:
    mesh = axes.init_mesh("rep=2 dp=2 tp=2", "(dp tp) = edp ep=4", device_type="cpu")
    specs = [("n@dp m@tp", ("rep", "dp", "tp")), ("n m@tp", ("dp", "tp")), ("n@tp m", ("tp",)), ("n m", ("rep", "dp"))]
    specs += [("n@ep m", ("edp", "ep"))]
    parameters = [nn.Parameter(axes.shard(torch.zeros(8, 4), s, mesh=mesh[names])) for s, names in specs * 10]
    for some in (False, True):
        groups = len(axes.process_groups())
        for number, parameter in enumerate(parameters):
            # Which have a gradient differs from rank to rank.
            parameter.grad = torch.ones_like(parameter) if some and (number + dist.get_rank()) % 3 == 0 else None
        with CommDebugMode() as sent:
            axes.nn.clip_grad_norm_(parameters, math.inf)
        assert sent.get_total_counts() == 3, sent.get_comm_counts()  # one each for dp, tp and ep
        assert len(axes.process_groups()) == groups
    with CommDebugMode() as sent:
        axes.nn.clip_grad_norm_([p for p in parameters if axes.spec_of(p) == "_ _"], 1.0)
    assert sent.get_total_counts() == 0


def test_there_is_one_collective_for_each_axis_that_splits_parameters_whatever_gradients_there_are(pool):
    pool.run(collectives)


# --- torch's own parameters


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(5, 7), nn.Linear(7, 5), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.down(self.up(x).tanh()) * self.scale.sum()


def whole_model() -> tuple[nn.Module, float]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    model(torch.arange(40.0).view(8, 5) / 10).square().mean().backward()
    return model, float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))


def fully_sharded(make_mesh: Callable[[], object]) -> None:
    expected, norm = whole_model()
    nn.utils.clip_grad_norm_(expected.parameters(), norm / 3)
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    how = {} if (mesh := make_mesh()) is None else {"mesh": mesh}
    for block in model:
        fully_shard(block, **how)
    fully_shard(model, **how)
    model(torch.arange(40.0).view(8, 5) / 10).square().mean().backward()
    found = axes.nn.clip_grad_norm_(model.parameters(), norm / 3)
    assert abs(float(found) - norm) < 1e-5 * norm
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6)


def axes_hybrid() -> object:
    return axes.init_mesh("dp_replicate=2 dp_shard=2 tp=2", device_type="cpu")["dp_replicate", "dp_shard"].device_mesh


def torch_hybrid() -> object:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards"))


def one_rank_hybrid() -> object:
    return axes.init_mesh("dp_replicate=8 dp_shard=1", device_type="cpu").device_mesh


def default() -> None:
    return None


@pytest.mark.parametrize("make_mesh", [axes_hybrid, torch_hybrid, one_rank_hybrid, default])
def test_fsdp2s_gradients_have_the_norm_of_one_device(pool, make_mesh):
    pool.run(fully_sharded, make_mesh)


def tensor_parallel_and_fully_sharded() -> None:
    """torch's strided shards, and plain parameters that are FSDP2's alone, in one model."""
    expected, norm = whole_model()
    mesh = axes.init_mesh("dp=4 tp=2", device_type="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        for linear, dims in ((block.up, (0, 0)), (block.down, (1, None))):
            for name, dim in zip(("weight", "bias"), dims, strict=True):
                if dim is not None:
                    whole = getattr(linear, name).detach()
                    placed = distribute_tensor(whole, mesh["tp"].device_mesh, [Shard(dim)])
                    setattr(linear, name, nn.Parameter(placed))
        fully_shard(block, mesh=mesh["dp"].device_mesh)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        one.grad = distribute_tensor(other.grad, one.device_mesh, [Shard(0)] * one.device_mesh.ndim)
        one.grad = one.grad.redistribute(placements=one.placements)
    assert len({p.device_mesh for p in model.parameters()}) > 1
    found = axes.nn.total_norm([p.grad for p in model.parameters()])
    assert abs(float(found) - norm) < 1e-5 * norm


def test_parameters_of_fsdp2_over_tensor_parallelism_have_the_norm_of_one_device(pool):
    pool.run(tensor_parallel_and_fully_sharded)


# --- numbers that aren't finite, and refusals


def not_finite() -> list[object]:
    mesh = axes.init_mesh("dp=2 tp=4", device_type="cpu")
    found: list[object] = []
    for value in (math.nan, math.inf):
        for order in (2.0, math.inf, 1.0):
            whole = torch.ones(8)
            whole[5] = value
            w = nn.Parameter(axes.shard(torch.zeros(8), "n@tp", mesh=mesh))
            w.grad = axes.shard(whole, "n@tp", mesh=mesh)
            try:
                axes.nn.clip_grad_norm_([w], 1.0, order, error_if_nonfinite=True)
            except NonFiniteNormError:
                found.append(torch.equal(w.grad.full_tensor().isfinite(), whole.isfinite()))
            found.append(str(float(axes.nn.clip_grad_norm_([w], 1.0, order))))
    return found


def test_a_norm_that_is_not_finite_is_so_on_every_rank(pool):
    assert issubclass(NonFiniteNormError, RuntimeError)
    assert pool.run(not_finite) == [[True, "nan"] * 3 + [True, "inf"] * 3] * 8


def narrow() -> tuple[str, float, float]:
    mesh = axes.init_mesh("tp=8", device_type="cpu")
    many = axes.shard(torch.ones(1 << 14, dtype=torch.bfloat16), "n@tp", mesh=mesh)
    large = axes.shard(torch.full((8,), 1e25), "n@tp", mesh=mesh)
    found = axes.nn.total_norm([many] * 2, 1.0)
    return str(found.dtype), float(found), float(axes.nn.total_norm([large], 1.0)) / 1e25


def test_numbers_of_16_bits_are_added_up_in_float32_and_one_that_is_listed_twice_counts_once(pool):
    for dtype, norm, large in pool.run(narrow):
        assert (dtype, norm) == ("torch.float32", 1 << 14)
        assert large == pytest.approx(8.0)


def test_plain_tensors_need_no_job_and_give_what_torch_gives():
    for order in (1.0, 2.0, math.inf, 2.5):
        ours, theirs = ([nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))] for _ in range(2))
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        norm = axes.nn.clip_grad_norm_(ours, 0.25, order)
        assert torch.allclose(norm, nn.utils.clip_grad_norm_(theirs, 0.25, order))
        assert all(torch.allclose(one.grad, other.grad) for one, other in zip(ours, theirs, strict=True))
    assert float(axes.nn.clip_grad_norm_(torch.ones(2, requires_grad=True), 1.0)) == 0.0
    assert float(axes.nn.total_norm(torch.tensor([3 + 4j]))) == 5.0


def part_of_the_stages() -> None:
    mesh = axes.init_mesh("pp=4 tp=2", "pp = outer inner=2", device_type="cpu")
    weight = axes.shard(torch.zeros(4), "n@inner", mesh=mesh["inner", "tp"])
    axes.nn.total_norm([weight], stages="pp", mesh=mesh)


REFUSED: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (ShardingError, "norm_type is a number above 0", lambda: axes.nn.total_norm([torch.ones(2)], 0)),
    (ShardingError, "norm_type is a number above 0", lambda: axes.nn.total_norm([torch.ones(2)], -math.inf)),
    (ShardingError, "norm_type is a number above 0", lambda: axes.nn.total_norm([torch.ones(2)], "two")),
    (ShardingError, "max_norm is a number from 0", lambda: axes.nn.clip_grad_norm_([torch.ones(2)], -1.0)),
    (ShardingError, "takes tensors; found float", lambda: axes.nn.total_norm([1.0])),
    (
        ShardingError,
        "isn't one of the parameters",
        lambda: axes.nn.clip_grad_norm_([torch.ones(2)], 1.0, copies=[torch.ones(2)]),
    ),
    (MeshError, "needs a mesh", lambda: axes.nn.total_norm([torch.ones(2)], stages="pp")),
    (MeshError, "no axis 'qq'", lambda: axes.nn.total_norm([], stages="qq", mesh=axes.Mesh("pp=2"))),
    (MeshError, "bound to torch.distributed", lambda: axes.nn.total_norm([], stages="pp", mesh=axes.Mesh("pp=2"))),
]


@pytest.mark.parametrize(("error", "text", "call"), REFUSED, ids=[text for _, text, _ in REFUSED])
def test_what_cannot_be_is_refused(error, text, call):
    with pytest.raises(error, match=text):
        call()


def test_a_parameter_on_a_part_of_the_stages_is_refused(pool):
    with pytest.raises(MeshError, match="has a part of the axes that `stages` names"):
        pool.run(part_of_the_stages)
