"""Checkpoints between any two meshes: random shardings on both sides, compared bit for bit with the whole tensors.

What a rank should have is told by the case itself (`Case.shard`), without the library.
"""

from __future__ import annotations

import functools
import math
import random
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import axes
from axes.runtime.checkpoint import _filled, boxes_of
from tests.conftest import takes_factors

WORLD = 4
ROUNDS = 12
TENSORS = 12

SIZES = [(4,), (2, 2), (2, 2, 1), (4, 1), (1, 4), (2,), (3,), (1,), (1, 2), (3, 1), (1, 1)]
"""The sizes of a mesh's axes; a mesh may be of some of the ranks, in any order."""


@dataclass(frozen=True)
class Grid:
    """A mesh as data: the names of its axes, their sizes, and its ranks, the slowest axis first."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    @functools.cached_property
    def mesh(self) -> axes.Mesh:
        declaration = " ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))
        return axes.init_mesh(declaration, device_type="cpu", ranks=list(self.ranks))

    def coordinate(self, rank: int) -> dict[str, int]:
        position, found = self.ranks.index(rank), {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            found[name] = position % size
            position //= size
        return found


@dataclass(frozen=True)
class Case:
    """A tensor on a grid: for each dim its factors, each a size and the axes that split it, major first."""

    grid: Grid
    dims: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...]

    @property
    def named(self) -> list[list[tuple[str, int]]]:
        """The name and the size of each factor of each dim."""
        letters = iter("abcdefghijkl")
        return [[(next(letters), size) for size, _ in dim] for dim in self.dims]

    @property
    def spec(self) -> str:
        texts = []
        for dim, names in zip(self.dims, self.named, strict=True):
            places = [f"@({' '.join(on)})" if on else "" for _, on in dim]
            sizes = [f"={size}" if len(dim) > 1 else "" for _, size in names]
            text = " ".join(name + size + on for (name, _), size, on in zip(names, sizes, places, strict=True))
            texts.append(f"({text})" if len(dim) > 1 else text)
        return " ".join(texts)

    def shard(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What the rank has: each factor cut as `torch.chunk` cuts, nested in the written order."""
        at, sizes = self.grid.coordinate(rank), dict(zip(self.grid.names, self.grid.sizes, strict=True))
        x = whole.reshape([size for dim in self.dims for size, _ in dim])
        for number, (_, on) in enumerate(factor for dim in self.dims for factor in dim):
            for name in on:
                piece = -(-x.shape[number] // sizes[name])
                first = min(at[name] * piece, x.shape[number])
                x = x.narrow(number, first, min(piece, x.shape[number] - first))
        counts = iter(x.shape)
        return x.reshape([math.prod(next(counts) for _ in dim) for dim in self.dims])

    def sharded(self, whole: torch.Tensor) -> DTensor:
        return axes.shard(whole, self.spec, mesh=self.grid.mesh)


def drawn_grid(draw: random.Random) -> Grid:
    sizes = draw.choice(SIZES)
    names = tuple(draw.sample(["dp", "cp", "tp"], len(sizes)))
    return Grid(names, sizes, tuple(draw.sample(range(WORLD), math.prod(sizes))))


def drawn_case(draw: random.Random, grid: Grid, shape: tuple[int, ...]) -> Case:
    """A sharding of the shape: uneven where it comes so, nested, in any order of axes, and by factors."""
    by_dim: list[list[str]] = [[] for _ in shape]
    for name in draw.sample(grid.names, len(grid.names)):
        where = draw.randrange(-1, len(shape))
        if where >= 0:
            by_dim[where].append(name)
    dims = []
    for size, on in zip(shape, by_dim, strict=True):
        parts = math.prod(grid.sizes[grid.names.index(name)] for name in on)
        fronts = [f for f in range(2, size) if size % f == 0 and size // f % parts == 0]
        if fronts and draw.random() < 0.5:
            front = draw.choice(fronts)
            backs = [b for b in range(1, size // front) if size // front % b == 0 and size // front // b % parts == 0]
            back = draw.choice(backs or [1])
            middle = size // front // back
            dims.append(((front, ()), (middle, tuple(on)), *([(back, ())] if back > 1 else [])))
        else:
            dims.append(((size, tuple(on)),))
    return Case(grid, tuple(dims))


def possible(draw: random.Random, grid: Grid, shape: tuple[int, ...]) -> Case:
    """A sharding that a DTensor can have: axes says which it can't."""
    while True:
        case = drawn_case(draw, grid, shape)
        try:
            case.sharded(torch.zeros(shape))
        except axes.ShardingError:
            continue
        return case


def values(shape: tuple[int, ...], number: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


SHAPES = [(24,), (7,), (5, 3), (12, 8), (24, 6), (2, 12, 5), (1, 16), (3,), (36, 4), (), (0, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool]


def rounds(folder: str) -> tuple[list[object], int, int]:
    """Several tensors saved from one mesh and loaded onto another; what came out wrong, and how many were compared."""
    draw, rank, wrong, compared, factors = random.Random(0), dist.get_rank(), [], 0, 0
    for number in range(ROUNDS):
        shapes = [draw.choice(SHAPES) for _ in range(TENSORS)]
        wholes = {f"layer.{i}": values(s, 100 * number + i, draw.choice(DTYPES)) for i, s in enumerate(shapes)}
        source, target = drawn_grid(draw), drawn_grid(draw)
        saved = {name: possible(draw, source, tuple(whole.shape)) for name, whole in wholes.items()}
        wanted = {name: possible(draw, target, tuple(whole.shape)) for name, whole in wholes.items()}
        path = f"{folder}/{number}"
        dcp.save({name: case.sharded(wholes[name]) for name, case in saved.items()}, checkpoint_id=path)
        for cases in (wanted, saved):  # there, and back
            found = {name: case.sharded(torch.zeros_like(wholes[name])) for name, case in cases.items()}
            dcp.load(found, checkpoint_id=path)
            for name, case in cases.items():
                compared += 1
                factors += any(len(dim) > 1 for one in (case, saved[name]) for dim in one.dims)
                right = rank not in case.grid.ranks or torch.equal(
                    found[name].to_local(), case.shard(wholes[name], rank)
                )
                wrong += [] if right else [(number, saved[name], case, tuple(wholes[name].shape))]
        alone = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
        if rank == 0:  # one process, without a mesh
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.load(alone, checkpoint_id=path, no_dist=True)
            wrong += [(number, saved[n], "alone") for n, w in wholes.items() if not torch.equal(alone[n], w)]
        dist.barrier()
    return wrong, compared, factors


def test_what_any_mesh_saves_any_other_loads(warm, tmp_path):
    for wrong, compared, factors in warm(rounds, WORLD, str(tmp_path), timeout=240):
        assert wrong == []
        assert compared == 2 * ROUNDS * TENSORS
        assert factors > 50


# ------------------------------------------------------------------------------ whole state dicts


def whole_dicts():
    """Whole state dicts into models on any mesh and back: sent by rank 0, or there on every rank."""
    draw, rank, wrong = random.Random(1), dist.get_rank(), []
    for number in range(6):
        shapes = [draw.choice(SHAPES) for _ in range(TENSORS)]
        wholes = {f"p{i}": values(s, 100 * number + i, draw.choice(DTYPES[:2])) for i, s in enumerate(shapes)}
        grid = drawn_grid(draw)
        cases = {name: possible(draw, grid, tuple(whole.shape)) for name, whole in wholes.items()}
        for given in ({"broadcast_from_rank0": True}, {}, {"cpu_offload": True}):
            options, model = StateDictOptions(full_state_dict=True, **given), nn.Module()
            for name, case in cases.items():
                model.register_parameter(name, nn.Parameter(case.sharded(torch.zeros_like(wholes[name]))))
            has = rank == 0 or "broadcast_from_rank0" not in given
            set_model_state_dict(model, dict(wholes) if has else {}, options=options)
            back = get_model_state_dict(model, options=options)
            if rank not in grid.ranks:
                continue
            for name, case in cases.items():
                found = model.get_parameter(name).detach().to_local()
                if not torch.equal(found, case.shard(wholes[name], rank)):
                    wrong.append((number, given, case, tuple(wholes[name].shape)))
                if (rank == 0 or not given) and not torch.equal(back[name], wholes[name]):
                    wrong.append((number, given, case, "back"))
    return wrong


@takes_factors
def test_whole_state_dicts_go_into_any_sharding_and_come_back(warm):
    assert warm(whole_dicts, WORLD) == [[]] * WORLD


def filled_after_it_is_saved():
    """What backward says of a DTensor that a whole tensor was loaded into since a graph saved it."""
    mesh = axes.init_mesh("tp=4", device_type="cpu")
    w = axes.shard(torch.ones(12, 2), "(three=3 h@tp) e", mesh=mesh).requires_grad_()
    loss = (w * w).sum()
    _filled(w, torch.zeros(12, 2), boxes_of(w))
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_backward_refuses_what_was_loaded_since_it_was_saved(warm):
    assert all("modified by an inplace operation" in text for text in warm(filled_after_it_is_saved, WORLD))


# ------------------------------------------------------------------------ models and their optimizers


WHOLE = torch.linspace(-1, 1, 24 * 8).view(24, 8)

KINDS = {  # the mesh, its ranks, the specs of two parameters over tp, and the dims of them that FSDP2 shards over dp
    "factors": ("dp=2 tp=2", [0, 1, 2, 3], ("(three=3 h@tp d=2) e", "(two=2 h@tp) o"), (1, 1)),
    "fsdp alone": ("dp=4 tp=1", [2, 0, 3, 1], ("h e", "h o"), (0, 0)),
    "one axis": ("dp=1 tp=4", [0, 1, 2, 3], ("h@tp e", "(four=2 h@tp) o"), None),
    "strided": ("dp=2 tp=2", [3, 1, 0, 2], ("h@tp e", "h o@tp"), (0, 0)),
}


def model_on(kind):
    declaration, ranks, specs, dims = KINDS[kind]
    mesh, model = axes.init_mesh(declaration, device_type="cpu", ranks=ranks), nn.Module()
    for name, spec in zip(("qkv", "out"), specs, strict=True):
        whole = torch.zeros_like(WHOLE)
        model.register_parameter(name, nn.Parameter(axes.shard(whole, spec, mesh=mesh["tp"])))
    if dims is not None:
        on = {model.qkv: dims[0], model.out: dims[1]}
        fully_shard(model, mesh=mesh["dp"].device_mesh, shard_placement_fn=lambda p: Shard(on[p]))
    return model, axes.nn.local_optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)


def stepped(model, optimizer, number):
    """A step with gradients that follow from its number and the parameter's name."""
    for name, parameter in model.named_parameters():
        gradient = (WHOLE * (number + len(name))).cos()
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient
    optimizer.step()


def plain():
    model = nn.Module()
    for name in ("qkv", "out"):
        model.register_parameter(name, nn.Parameter(torch.zeros_like(WHOLE)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def differing(model, expected):
    return [
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(
            parameter.detach().to_local(),
            distribute_tensor(
                expected.get_parameter(name).detach(), parameter.device_mesh, parameter.placements
            ).to_local(),
        )
    ]


def states(model, optimizer):
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def resumed(folder):
    """Trained on each mesh, saved, loaded on each other one and in one process, and trained on there."""
    expected, its = plain()
    for number in range(3):
        stepped(expected, its, number)
    wrong = []
    for kind in KINDS:
        model, optimizer = model_on(kind)
        for number in range(2):
            stepped(model, optimizer, number)
        dcp.save(states(model, optimizer), checkpoint_id=f"{folder}/{kind}")
        for other in KINDS:
            resumed_model, resumed_optimizer = model_on(other)
            found = states(resumed_model, resumed_optimizer)
            dcp.load(found, checkpoint_id=f"{folder}/{kind}")
            set_model_state_dict(resumed_model, found["model"])
            set_optimizer_state_dict(resumed_model, resumed_optimizer, found["optimizer"])
            stepped(resumed_model, resumed_optimizer, 2)
            wrong += [(kind, other, name) for name in differing(resumed_model, expected)]
        alone, its_optimizer = plain()
        found = states(alone, its_optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it loads in one process
            dcp.load(found, checkpoint_id=f"{folder}/{kind}", no_dist=True)
        set_model_state_dict(alone, found["model"])
        set_optimizer_state_dict(alone, its_optimizer, found["optimizer"])
        stepped(alone, its_optimizer, 2)
        pairs = zip(alone.parameters(), expected.parameters(), strict=True)
        wrong += [(kind, "alone") for one, two in pairs if not torch.equal(one, two)]
    return wrong


def test_training_goes_on_from_any_mesh_on_any_other(warm, tmp_path):
    assert warm(resumed, WORLD, str(tmp_path)) == [[]] * WORLD
