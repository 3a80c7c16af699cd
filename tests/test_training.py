"""Training with what else people use: FSDP2, pipeline stages, recomputed activations, clipping over all of them.

The law `training` steps small models beside one device. Here each client of torch is beside one device, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import axes
from tests.common import case

HAS_DIMS = hasattr(fsdp, "DataParallelMeshDims")


def whole_of(x: torch.Tensor) -> torch.Tensor:
    return axes.unshard(x.detach()) if isinstance(x, DTensor) else x.detach()


def summed_by_fsdp(model: nn.Module) -> None:
    """FSDP2 adds gradients up, and doesn't divide them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def check_gradients(model: nn.Module, expected: dict[str, torch.Tensor], times: float = 1.0) -> None:
    for name, p in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        with case(f"the gradient of {name}"):
            torch.testing.assert_close(whole_of(p.grad), times * expected[name], rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------ FSDP2 and checkpoints


class Case(NamedTuple):
    """A combination: FSDP2's units, what is checkpointed and how, how FSDP2 is told of the mesh, what is a region."""

    unit: str
    what: str
    reentrant: bool
    told: str
    mesh: str
    region: str
    compiled: bool = False


UNITS = "none", "root", "layers", "list"
CHECKPOINTS = ("none", False), *itertools.product(("around", "inside", "wrapped", "wrapped last"), (False, True))
MESHES = "r=1 fs=2 tp=2", "r=2 fs=2 tp=1"
SAMPLE = [
    Case("root", "none", False, "dims", MESHES[0], "layers"),
    Case("root", "inside", True, "dims", MESHES[1], "model"),
    Case("root", "wrapped", True, "sub-mesh", MESHES[1], "layers"),
    Case("layers", "wrapped last", False, "dims", MESHES[0], "model"),
    Case("list", "wrapped last", True, "dims", MESHES[1], "layers"),
    Case("none", "around", True, "dims", MESHES[0], "model"),
    Case("layers", "wrapped", False, "dims", MESHES[0], "model", True),
]


class Layer(nn.Module):
    """A block; on a mesh its hidden dim is split over tp."""

    def __init__(self, how: Case | None):
        super().__init__()
        self.norm, self.up = nn.RMSNorm(4), nn.Linear(4, 8, bias=False)
        self.act, self.down, self.how = nn.Tanh(), nn.Linear(8, 4, bias=False), how

    def forward(self, x):
        y = self.norm(x)
        if self.how is not None and self.how.what == "inside":
            y = checkpoint(self.up, y, use_reentrant=self.how.reentrant)
            y = checkpoint(lambda y: self.down(self.act(y)), y, use_reentrant=self.how.reentrant)
        else:
            y = self.down(self.act(self.up(y)))
        return x + (y if self.how is None else axes.psum(y, "tp"))


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self, how: Case | None):
        super().__init__()
        self.layers = nn.ModuleList([Layer(how), Layer(how)])
        self.head, self.how = nn.Linear(4, 6, bias=False), how

    def forward(self, x):
        for layer in self.layers:
            around = self.how is not None and self.how.what == "around"
            x = checkpoint(layer, x, use_reentrant=self.how.reentrant) if around else layer(x)
        return self.head(x)


def other_dim(parameter: nn.Parameter) -> Shard | None:
    """FSDP2 can't split a dim over dp of which a factor is split over tp; it splits the other one."""
    return Shard(1) if isinstance(parameter, DTensor) and axes.spec_of(parameter).startswith("(") else None


def made(how: Case, mesh: axes.Mesh) -> nn.Module:
    """The model of a case: sharded, checkpointed, a region, and in units, in this order."""
    model = Model(how).double()
    # Both weights have the same hidden rows on a rank, which aren't beside each other.
    specs = {"*.up.weight": "(two=2 f@tp) d", "*.down.weight": "d (two=2 f@tp)", "*": "..."}
    axes.shard_module(model, specs, mesh["tp"] if how.told == "sub-mesh" else mesh)

    def wrap() -> None:
        kind = CheckpointImpl.REENTRANT if how.reentrant else CheckpointImpl.NO_REENTRANT
        for name, layer in model.layers.named_children():
            setattr(model.layers, name, checkpoint_wrapper(layer, kind))

    if how.what == "wrapped":
        wrap()
    regions = {"model": [(model, "v")], "layers": [*((each, "d") for each in model.layers), (model.head, "v")]}
    for module, name in regions[how.region]:
        axes.shard_map(module, f"b@(r fs) d -> b@(r fs) {name}", mesh)
    if how.what == "wrapped last":
        wrap()
    for layer in model.layers if how.compiled else ():
        layer.compile(backend="aot_eager")
    copied = mesh.shape["r"] > 1
    options = {"mesh": mesh["r", "fs"].device_mesh if copied else mesh["fs"].device_mesh}
    if how.told == "dims" and how.unit != "none":
        dims = fsdp.DataParallelMeshDims(shard="fs", replicate="r" if copied else None)
        options = {"mesh": mesh.device_mesh, "dp_mesh_dims": dims}
    units = {"none": [], "root": [model], "layers": [*model.layers, model], "list": [list(model.layers), model]}
    for unit in units[how.unit]:
        fully_shard(unit, shard_placement_fn=other_dim, **options)
    summed_by_fsdp(model)
    return model


def with_checkpoints(cases: list[Case]) -> None:
    """After a step, and after two that add up, reduced at once or at the last one."""
    for how in cases:
        if how.unit != "none" and how.told == "dims" and not HAS_DIMS:
            continue  # torch before 2.13 has no DataParallelMeshDims
        torch.compiler.reset()
        mesh = axes.init_mesh(how.mesh, device_type="cpu")
        torch.manual_seed(7)
        one = Model(None).double()
        torch.manual_seed(7)
        model = made(how, mesh)
        x = torch.linspace(-1, 2, 32, dtype=torch.float64).view(8, 4).sin()
        weight = torch.linspace(-1, 3, 48, dtype=torch.float64).view(8, 6)
        (one(x) * weight).sum().backward()
        expected = {name: p.grad for name, p in one.named_parameters()}
        for accumulated in ("once", "twice", "twice, reduced at the end"):
            with case(f"{how}, {accumulated}"):
                model.zero_grad()
                for last in (True,) if accumulated == "once" else (False, True):
                    if accumulated.endswith("end") and isinstance(model, FSDPModule):
                        model.set_requires_gradient_sync(last)
                    y = model(axes.shard(x, "b@(r fs) d", mesh=mesh).requires_grad_())
                    (y * axes.shard(weight, "b@(r fs) v", mesh=mesh)).sum().backward()
                check_gradients(model, expected, 1 if accumulated == "once" else 2)


def test_gradients_under_fully_shard_and_checkpoints_are_those_of_one_device(warm):
    warm(with_checkpoints, 4, SAMPLE, timeout=120)


@pytest.mark.full
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("what", CHECKPOINTS)
@pytest.mark.parametrize("unit", UNITS)
def test_so_they_are_in_every_combination(warm, unit, what, compiled):
    regions = ("model",) if compiled else ("model", "layers")
    each = itertools.product(("dims", "sub-mesh") if unit != "none" else ("dims",), MESHES, regions)
    warm(with_checkpoints, 4, [Case(unit, *what, *more, compiled) for more in each], timeout=600)


# fmt: off
PRODUCTS = {
    "torch": lambda x, w, b: F.linear(x, w),
    "einsum": lambda x, w, b: axes.einsum(x, w, f"{b} d, f d -> {b} f"),
    "region": lambda x, w, b: axes.shard_map(F.linear, f"{b} d, f d -> {b} f")(x, w),
    "reshard": lambda x, w, b: F.linear(x, axes.reshard(w, "f d")),
    "to_local": lambda x, w, b: axes.from_local(axes.to_local(x) @ axes.to_local(w, grad="summed").T, f"{b} f", grad="summed", b=8),
}
# fmt: on


class Product(nn.Module):
    """A product of DTensors, outside of a region."""

    def __init__(self, how: str, rows: str = ""):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4))
        self.how, self.rows = how, rows

    def forward(self, x):
        return PRODUCTS[self.how](x, self.weight, self.rows)


def products(compiled: bool) -> None:
    """Where `fully_shard` reduces over axes of a parameter's own mesh: one of them, and two, which it flattens."""
    x, one = torch.linspace(-1, 2, 32, dtype=torch.float64).view(8, 4), Product("torch")
    one(x).sin().sum().backward()
    with axes.init_mesh("fs=2 cp=2", ranks=[2, 0, 3, 1], device_type="cpu") as mesh:
        stored: dict[str, str | tuple[str, ...]] = {"b@fs": "fs", "b@(fs cp)": ("fs", "cp")}
        for how, (rows, shard) in itertools.product(PRODUCTS, stored.items()):
            with case(f"{how}, {rows}"):
                model = axes.shard_module(Product(how, rows), {"*": "..."}, mesh)
                if compiled:
                    torch.compiler.reset()
                    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
                fully_shard(model, mesh=mesh.device_mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard=shard))
                summed_by_fsdp(model)
                model(axes.shard(x, f"{rows} d")).sin().sum().backward()
                check_gradients(model, {"weight": one.weight.grad})
        known = [group.ranks for group in axes.process_groups()]
        assert len({*map(tuple, known)}) == len(known), "it communicates over the groups that axes has"


@pytest.mark.skipif(not HAS_DIMS, reason="torch before 2.13 has no DataParallelMeshDims")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_operations_of_axes_leave_gradients_to_fully_shard(warm, compiled):
    warm(products, 4, compiled, timeout=120)


class Squares(nn.Module):
    """A layer, which a checkpoint may run."""

    def __init__(self, reentrant: bool | None):
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4, bias=False), reentrant

    def forward(self, x):
        y = self.layer(x) if self.reentrant is None else checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return y.square()


SPLIT, SAME = "b@fs s@cp d -> b@fs s@cp d", "b@fs s d | same@cp -> b@fs s d | same@cp"
NOBODY = (
    "each rank of cp has a term of the gradient of 'layer.weight', and nothing adds them up: it {}\nput it on a mesh"
)
SUMMED: dict[tuple[str, str, str], str] = {
    # the axes that a parameter lies on, those that FSDP2 reduces over, a region; what is said of it
    ("", "dp", SPLIT): "",
    ("cp tp", "fs", SPLIT): "",
    ("fs cp", "", SPLIT): "",
    ("", "fs", SAME): "",
    ("", "fs", SPLIT): NOBODY.format("is a plain tensor, and fully_shard adds up over fs"),
    ("tp", "fs", SPLIT): NOBODY.format("lies on tp, and fully_shard adds up over fs"),
    ("fs", "", SPLIT): NOBODY.format("lies on fs"),
    ("", "", SPLIT): "",  # by the first forward pass where the graph shows it
}


def summed() -> None:
    for reentrant, ((lies, reduced, region), says) in itertools.product((None, False, True), SUMMED.items()):
        mesh = axes.init_mesh("fs=2 cp=2 tp=1", "dp = fs cp", device_type="cpu")
        torch.manual_seed(0)
        model, x = Squares(None).double(), torch.linspace(-1, 1, 64, dtype=torch.float64).view(4, 4, 4)
        (expected,) = torch.autograd.grad(model(x).sum(), model.layer.weight)
        model.reentrant = reentrant
        if lies:
            axes.shard_module(model, {"*": "..."}, mesh[tuple(lies.split())])
        axes.shard_map(model, region, mesh)
        if reduced:
            fully_shard(model, mesh=mesh[reduced].device_mesh)
            summed_by_fsdp(model)
        if not lies and not reduced:
            # The graph doesn't show what a reentrant checkpoint uses: its second run finds it.
            says = "each rank of fs cp has a term" if reentrant else "isn't an argument: layer.weight"
        x = axes.shard(x, region.split(" ->")[0].replace(" | same@cp", ""), mesh=mesh).requires_grad_()
        with case(f"on {lies!r}, reduced over {reduced!r}, {region}, reentrant={reentrant}"):
            told = ""
            try:
                axes.unshard(model(x)).sum().backward()
                check_gradients(model, {"layer.weight": expected})
            except axes.ShardingError as error:
                told = str(error)
            assert bool(told) == bool(says)
            assert says in told


def test_a_gradient_that_nobody_adds_up_along_an_axis_is_refused(warm):
    warm(summed, 4)


# ------------------------------------------------------------------------------ clipping


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2)))


def under_fsdp() -> None:
    """Two steps of clipping and a local optimizer, with memory that is replaced between them."""
    x = torch.arange(40.0).view(8, 5) / 10
    hybrid = axes.init_mesh("dp_replicate=2 dp_shard=2 tp=2", device_type="cpu")["dp_replicate", "dp_shard"]
    torchs = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards"))
    single = axes.init_mesh("dp_replicate=8 dp_shard=1", device_type="cpu").device_mesh
    for name, mesh in {"a mesh of axes": hybrid.device_mesh, "one of torch": torchs, "one shard": single}.items():
        one, model = blocks(), blocks()
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        theirs = torch.optim.AdamW(one.parameters(), lr=0.1, eps=1e-2)
        ours = axes.nn.local_optimizer(torch.optim.AdamW, model.parameters(), lr=0.1, eps=1e-2)
        for step in range(2):
            with case(f"{name}, step {step}"):
                for each in (one, model):
                    each(x).square().mean().backward()
                norm = nn.utils.clip_grad_norm_(one.parameters(), 0.1)
                torch.testing.assert_close(axes.nn.clip_grad_norm_(model.parameters(), 0.1), norm)
                for optimizer in (ours, theirs):
                    optimizer.step()
                    optimizer.zero_grad()
                for p, wanted in zip(model.parameters(), one.parameters(), strict=True):
                    torch.testing.assert_close(whole_of(p), wanted.detach(), rtol=1e-4, atol=1e-5)
                model._apply(lambda t: t.clone())


def test_what_fsdp2_shards_is_clipped_and_stepped_as_on_one_device(pool):
    pool.run(under_fsdp)


def staged() -> None:
    """Each stage has parameters of its own, one maybe none; some are on the whole mesh, one is tied."""
    mesh = axes.init_mesh("pp=2 dp=2 tp=2", "(dp tp) = edp ep=2", device_type="cpu")
    here = mesh.axis("pp").index
    specs = [
        ("n@dp m@tp", ("dp", "tp")),
        ("n@ep m", ("edp", "ep")),
        ("n m@tp", ("tp",)),
        (None, ()),
        ("n m", ("dp", "tp")),
    ]
    for order, stages in itertools.product((2.0, 1.0, 3.0, math.inf), ((3, 5), (0, 5), (4, 0))):
        with case(f"order {order}, {stages} parameters"):
            generator = torch.Generator().manual_seed(int(order) if order < 9 else 9)

            def parameter(
                spec: str | None, names: tuple[str, ...], generator: torch.Generator = generator
            ) -> tuple[nn.Parameter, torch.Tensor]:
                whole = torch.randn(5, 6, generator=generator, dtype=torch.float64)
                x = whole if spec is None else axes.shard(whole, spec, mesh=mesh[names])
                p = nn.Parameter(torch.zeros_like(x))
                p.grad = x.clone()
                return p, whole

            own = [[parameter(*each) for each in specs[:count]] for count in stages]
            tied, everywhere = parameter("n@tp m", ("tp",)), parameter("n@pp m@tp", ("pp", "dp", "tp"))
            listed = [*own[here], tied, everywhere]
            wholes = torch.cat([whole.flatten() for _, whole in [*own[0], *own[1], tied, everywhere]])
            expected = torch.linalg.vector_norm(wholes, order)
            limit, copies = float(expected) / 2, [tied[0]] if here == 1 else []
            with mesh:
                norm = axes.nn.clip_grad_norm_((p for p, _ in listed), limit, order, stages="pp", copies=copies)
            torch.testing.assert_close(norm, expected)
            for p, whole in listed:
                torch.testing.assert_close(whole_of(p.grad), whole / 2, rtol=1e-5, atol=1e-8)


def two_axes() -> list[float]:
    mesh = axes.init_mesh("outer=2 inner=2 tp=2", "pp = outer inner", device_type="cpu")
    stage = float(mesh.axis("pp").index or 0)
    weight = nn.Parameter(axes.shard(torch.zeros(6), "n@tp", mesh=mesh["tp"]))
    weight.grad = axes.shard(torch.full((6,), stage), "n@tp", mesh=mesh["tp"])
    ways = (1.0, ("outer", "inner")), (math.inf, "outer")
    return [float(axes.nn.clip_grad_norm_([weight], math.inf, p, stages=each, mesh=mesh)) for p, each in ways]


def test_the_norm_is_over_all_pipeline_stages_and_a_tied_copy_counts_once(pool):
    pool.run(staged)
    assert pool.run(two_axes) == [[36.0, 2.0 + index] for _ in range(2) for index in (0.0, 1.0) for _ in range(2)]


def collectives() -> None:
    mesh = axes.init_mesh("rep=2 dp=2 tp=2", "(dp tp) = edp ep=4", device_type="cpu")
    specs = [("n@dp m@tp", ("rep", "dp", "tp")), ("n m@tp", ("dp", "tp")), ("n@tp m", ("tp",)), ("n m", ("rep", "dp"))]
    specs += [("n@ep m", ("edp", "ep"))]
    parameters = [nn.Parameter(axes.shard(torch.zeros(8, 4), s, mesh=mesh[names])) for s, names in specs * 10]
    for some in (False, True):
        for number, parameter in enumerate(parameters):
            # Which have a gradient differs from rank to rank.
            parameter.grad = torch.ones_like(parameter) if some and (number + dist.get_rank()) % 3 == 0 else None
        groups = len(axes.process_groups())
        with CommDebugMode() as sent:
            axes.nn.clip_grad_norm_(parameters, math.inf)
        assert sent.get_total_counts() == 3, sent.get_comm_counts()  # one each for dp, tp and ep
        assert not some or len(axes.process_groups()) == groups
    with CommDebugMode() as sent:
        axes.nn.clip_grad_norm_([p for p in parameters if axes.spec_of(p) == "_ _"], 1.0)
    assert sent.get_total_counts() == 0


def test_there_is_one_collective_for_each_axis_that_splits_parameters_whatever_gradients_there_are(pool):
    pool.run(collectives)


def numbers_of_all_kinds() -> None:
    mesh = axes.init_mesh("dp=2 tp=4", device_type="cpu")
    for value, order in itertools.product((math.nan, math.inf), (2.0, math.inf, 1.0)):
        with case(f"{value}, order {order}"):
            whole = torch.ones(8)
            whole[5] = value
            w = nn.Parameter(axes.shard(torch.zeros(8), "n@tp", mesh=mesh))
            w.grad = axes.shard(whole, "n@tp", mesh=mesh)
            with pytest.raises(RuntimeError) as error:
                axes.nn.clip_grad_norm_([w], 1.0, order, error_if_nonfinite=True)
            assert isinstance(error.value, axes.AxesError)
            assert torch.equal(whole_of(w.grad).isfinite(), whole.isfinite()), "nothing is scaled"
            assert str(float(axes.nn.clip_grad_norm_([w], 1.0, order))) == str(value)
    many = axes.shard(torch.ones(1 << 14, dtype=torch.bfloat16), "n@tp", mesh=mesh)
    many.grad = many.detach()
    found = axes.nn.clip_grad_norm_([many] * 2, math.inf, 1.0)  # one that is listed twice counts once
    assert (found.dtype, float(found)) == (torch.float32, 1 << 14), "16 bits are added up in float32"
    large = axes.shard(torch.full((8,), 1e25), "n@tp", mesh=mesh)
    large.grad = large.detach()
    assert math.isclose(float(axes.nn.clip_grad_norm_(large, math.inf, 1.0)), 8e25, rel_tol=1e-6)


def test_norms_of_numbers_that_are_narrow_large_or_not_finite(pool):
    pool.run(numbers_of_all_kinds)


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf, 2.5])
def test_plain_tensors_need_no_job_and_give_what_torch_gives(order):
    ours, theirs = ([nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    norm = axes.nn.clip_grad_norm_(ours, 0.25, order)
    assert torch.allclose(norm, nn.utils.clip_grad_norm_(theirs, 0.25, order))
    assert all(torch.allclose(one.grad, other.grad) for one, other in zip(ours, theirs, strict=True))
    assert float(axes.nn.clip_grad_norm_(torch.ones(2, requires_grad=True), 1.0, order)) == 0.0
    number = torch.tensor([3 + 4j])
    number.grad = number.detach()
    assert float(axes.nn.clip_grad_norm_(number, math.inf, order)) == 5.0


# ------------------------------------------------------------------------------ pipeline stages

WIDTH, WORDS, LAYERS, MICROBATCHES = 8, 16, 4, 4
TOKENS = torch.arange(64).view(16, 4) * 7 % WORDS
LABELS = TOKENS * 5 % WORDS


class Stage(nn.Module):
    """Some layers of a model, with the embedding or the head where it is the first or the last."""

    def __init__(self, numbers: range, first: bool, last: bool):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH) if first else None
        for part, shape in (("up", (16, WIDTH)), ("down", (WIDTH, 16))):
            own = {str(number): nn.Parameter(torch.empty(shape)) for number in numbers}
            setattr(self, part, nn.ParameterDict(own))
        self.head = nn.Linear(WIDTH, WORDS) if last else None

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for number, up in self.up.items():
            x = x + axes.einsum(torch.tanh(F.linear(x, up)), self.down[number], "b s f@tp, d f@tp -> b s d")
        return x if self.head is None else self.head(x)


class Loss(nn.Module):
    def forward(self, logits, labels):
        return axes.cross_entropy(logits, labels, "b@dp s v, b@dp s -> ")


def stage_of(mesh: axes.Mesh, stage: int, stages: int, stored: bool) -> nn.Module:
    """One stage of the model as a region: what it takes and gives are plain shards."""
    with torch.device("meta"):
        layers = range(LAYERS * stage // stages, LAYERS * (stage + 1) // stages)
        model = Stage(layers, stage == 0, stage == stages - 1).double()
    torch.manual_seed(0)
    specs = {"up*": "f@tp d", "down*": "d f@tp", "*": "..."}
    axes.shard_module(model, specs, mesh["tp"] if stored else mesh["dp", "tp"])
    taken, given = ("b@dp s" if stage == 0 else "b@dp s d"), ("b@dp s v" if stage == stages - 1 else "b@dp s d")
    axes.shard_map(model, f"{taken} -> {given}", mesh["dp", "tp"])
    if stored:
        fully_shard(model, mesh=mesh["dp"].device_mesh)
        summed_by_fsdp(model)
    return model


def on_one_device() -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """The loss, all gradients and their norm, of whole tensors and plain torch."""
    with axes.init_mesh("dp=1 tp=1", ranks=[dist.get_rank()], device_type="cpu") as mesh:
        model = stage_of(mesh, 0, 1, stored=False)
        weights = {name: axes.unshard(p.detach()).requires_grad_() for name, p in model.named_parameters()}
    x = F.embedding(TOKENS, weights["embedding.weight"])
    for number in range(LAYERS):
        x = x + torch.tanh(x @ weights[f"up.{number}"].T) @ weights[f"down.{number}"].T
    logits = F.linear(x, weights["head.weight"], weights["head.bias"])
    loss = F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())
    loss.backward()
    gradients = {name: w.grad for name, w in weights.items()}
    return float(loss.detach()), gradients, nn.utils.get_total_norm(gradients.values())


def in_stages(text: str, schedule: str, per_rank: int, stored: bool, dtensors: bool = False) -> None:
    """Two steps of a schedule, the second after a clip."""
    expected, gradients, norm = on_one_device()
    mesh = axes.init_mesh(text, device_type="cpu")
    pp, here = mesh.axis("pp"), mesh["dp", "tp"]
    count = pp.size * per_rank
    order = [pp.index, count - 1 - pp.index] if schedule == "ScheduleZBVZeroBubble" else range(pp.index, count, pp.size)
    modules = [stage_of(mesh, number, count, stored) for number in order]
    more = {"get_mesh": lambda *_: here.device_mesh} if dtensors else {}
    stages = [
        PipelineStage(module, number, count, torch.device("cpu"), group=pp.group, **more)
        for number, module in zip(order, modules, strict=True)
    ]
    loss = axes.shard_map(Loss(), "b@dp s v, b@dp s -> ", here)
    running = getattr(schedules, schedule)(stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=loss)
    tokens, labels = (axes.shard(x, "b@dp s", mesh=here) for x in (TOKENS, LABELS))
    if not dtensors:
        tokens, labels = tokens.to_local(), labels.to_local()
    parameters = [p for module in modules for p in module.parameters()]
    for step in range(2):
        losses: list[torch.Tensor] = []
        with case(f"step {step}"):
            inputs, target = [tokens] if 0 in order else [], labels if count - 1 in order else None
            running.step(*inputs, target=target, losses=losses)
            assert all(isinstance(each, DTensor) == dtensors for each in losses)
            assert not losses or math.isclose(float(whole_of(torch.stack(losses).mean())), expected, rel_tol=1e-12)
            for module in modules:
                check_gradients(module, gradients)
            torch.testing.assert_close(axes.nn.clip_grad_norm_(parameters, 0.1, stages="pp", mesh=mesh), norm)
            for p in parameters:
                p.grad = None


BEFORE_2_13 = torch.__version__.startswith("2.11")
TO_ITSELF = pytest.mark.skipif(
    BEFORE_2_13,
    reason="torch before 2.13 sends the shapes between two stages of one rank, too, and gloo sends no rank its own",
)
PLAIN_ALONE = pytest.mark.skipif(BEFORE_2_13, reason="torch before 2.13 sends plain tensors alone")


def each_schedule() -> Iterator[object]:
    full = pytest.mark.full
    yield pytest.param("pp=2 dp=2 tp=2", "ScheduleGPipe", 1, False, False, marks=full)
    yield pytest.param("pp=2 dp=2 tp=2", "Schedule1F1B", 1, True, False)
    yield pytest.param("pp=4 dp=1 tp=2", "Schedule1F1B", 1, False, False, marks=full)
    yield pytest.param("dp=2 pp=2 tp=2", "ScheduleInterleaved1F1B", 2, True, False, marks=full)
    yield pytest.param("pp=2 dp=2 tp=2", "ScheduleZBVZeroBubble", 2, True, False, marks=[full, TO_ITSELF])
    yield pytest.param("pp=2 dp=2 tp=2", "ScheduleZBVZeroBubble", 2, False, False, marks=TO_ITSELF)
    yield pytest.param("pp=2 dp=2 tp=2", "Schedule1F1B", 1, False, True, marks=PLAIN_ALONE)


@pytest.mark.parametrize(("text", "schedule", "per_rank", "stored", "dtensors"), list(each_schedule()))
def test_losses_gradients_and_norms_of_stages_are_those_of_one_device(pool, text, schedule, per_rank, stored, dtensors):
    pool.run(in_stages, text, schedule, per_rank, stored, dtensors)
