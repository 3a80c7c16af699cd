"""Optimizers whose steps work on local shards, bit for bit against the same optimizers on whole tensors."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import axes
import axes.nn
from axes import ShardingError
from axes.runtime.torch_private import local_of
from tests.own_optimizers import Everywhere, Forgets, Lamb, LambOfColumns, LambOfRows, Lion

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    ("Adam", {"lr": 0.1, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.1, "amsgrad": True, "betas": (0.5, 0.9)}),
    ("Adam", {"lr": 0.1, "fused": True}),
    ("AdamW", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1, "amsgrad": True, "maximize": True}),
    ("AdamW", {"lr": 0.1, "fused": True}),
    ("AdamW", {"lr": torch.tensor(0.1), "fused": True}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("RMSprop", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "fused": True}),
    ("NAdam", {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 0.1, "weight_decay": 0.1}),
    ("Adamax", {"lr": 0.1}),
    ("Adadelta", {"lr": 1.0}),
    ("Rprop", {"lr": 0.1}),
    ("ASGD", {"lr": 0.1, "t0": 2, "lambd": 0.1}),
]

FOREACH = [(name, {**options, "foreach": True}) for name, options in OPTIMIZERS if "fused" not in options]

PLACES = [
    # a shape, a spec, the mesh that it is on
    ((5, 7), "n@dp m@tp", ("dp", "tp")),
    ((24, 5), "(three=3 k@tp) m@dp", ("dp", "tp")),
    ((37,), "n@tp", ("tp",)),
    ((16, 9), "n@ep m", ("edp", "ep")),
    ((3, 2), "n@(dp tp) m", ("dp", "tp")),  # empty on some ranks
    ((4, 4), "n m@one", ("one", "dp")),
    ((2, 3, 4), "a b c", ("dp", "tp")),
    ((), "", ("dp", "tp")),
    ((1,), "n@dp", ("dp", "tp")),
    ((3, 5), None, ()),
]


def job() -> axes.Mesh:
    return axes.init_mesh("dp=4 tp=2 one=1", "(dp tp) = edp ep=4", device_type="cpu")


def cut(whole: torch.Tensor, number: int, mesh: axes.Mesh) -> torch.Tensor:
    _, spec, names = PLACES[number]
    return whole.clone() if spec is None else axes.shard(whole, spec, mesh=mesh[names])


def whole_of(x: Any) -> Any:
    return axes.unshard(x.detach()) if isinstance(x, DTensor) else x


def part_of(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """What this rank holds of a whole tensor that is sharded as another tensor is. Nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return local_of(axes.shard(whole, axes.spec_of(like), mesh=axes.sharding_of(like).mesh))


def pair(
    mesh: axes.Mesh, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Whole parameters, and the same ones sharded."""
    generator = torch.Generator().manual_seed(seed)
    wholes = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, _, _ in PLACES]
    return wholes, [nn.Parameter(cut(whole.detach(), i, mesh)) for i, whole in enumerate(wholes)]


def give_gradients(
    wholes: list[nn.Parameter], shards: list[nn.Parameter], mesh: axes.Mesh, rng: random.Random, missing: float = 0.15
) -> None:
    """The same gradients to both; some missing, some pending, some sharded otherwise."""
    for i, (whole, shard) in enumerate(zip(wholes, shards, strict=True)):
        if rng.random() < missing:
            whole.grad = shard.grad = None
            continue
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        gradient = torch.randint(-8, 9, whole.shape, generator=generator).to(whole.dtype) / 4
        whole.grad, shard.grad = gradient, cut(gradient, i, mesh)
        spec, names = PLACES[i][1:]
        kind = rng.random()
        if spec is None or kind < 0.6:
            continue
        if kind < 0.8:
            shard.grad = axes.shard(gradient, " ".join(["_"] * gradient.ndim), mesh=mesh[names])
        else:
            free = [name for name in names if name not in spec]
            if free and mesh.names[free[0]] > 1:
                local = shard.grad.to_local()
                part = local - 1 if mesh.axis(free[0]).index == 0 else torch.zeros_like(local)
                part = part + 1 if mesh.axis(free[0]).index == 1 else part
                how = f"{spec} | sum@{free[0]}"
                shard.grad = axes.from_local(part, how, mesh=mesh[names], shape=gradient.shape)


def equal(one: torch.Tensor, other: torch.Tensor, loose: bool) -> bool:
    """Bit by bit, or up to rounding."""
    if not loose:
        return one.dtype == other.dtype and torch.equal(one, other)
    tolerance = 0.1 if one.dtype == torch.bfloat16 else 1e-5
    return one.dtype == other.dtype and torch.allclose(one, other, rtol=tolerance, atol=tolerance / 2)


def differing(
    wholes: list[nn.Parameter],
    shards: list[nn.Parameter],
    ordinary: torch.optim.Optimizer,
    local: torch.optim.Optimizer,
    loose: bool = False,
) -> list[str]:
    """Parameters and state that aren't the same, or not sharded as the parameter."""
    wrong = []
    for i, (whole, shard) in enumerate(zip(wholes, shards, strict=True)):
        if whole.shape != shard.shape or not equal(part_of(whole.detach(), shard), local_part(shard).detach(), loose):
            wrong.append(f"parameter {i}: {local_part(shard)} for {part_of(whole.detach(), shard)}")
        theirs, ours = ordinary.state.get(whole, {}), local.state.get(shard, {})
        if list(theirs) != list(ours):
            wrong.append(f"parameter {i}: {list(theirs)} {list(ours)}")
            continue
        for key, value in theirs.items():
            found = ours[key]
            if not isinstance(value, torch.Tensor):
                if value != found:
                    wrong.append(f"parameter {i}: state {key}")
                continue
            if value.shape != found.shape or not equal(part_of(value, found), local_part(found), loose):
                wrong.append(f"parameter {i}: state {key}")
            of_elements = key not in ("step", "mu", "eta", "mu_product") and isinstance(shard, DTensor)
            if isinstance(found, DTensor) != of_elements or (of_elements and found.placements != shard.placements):
                wrong.append(f"parameter {i}: state {key} isn't sharded as the parameter")
    return wrong


def same_steps(cases: list[tuple[str, dict[str, Any]]], steps: int) -> list[str]:
    """Beside the optimizer on whole tensors, and on the shards as plain tensors.

    torch's loops on a CPU round by an element's place in memory in 16 bits and where they are fused. There
    whole tensors are the same up to rounding alone, and the plain shards bit by bit as everywhere.
    """
    mesh, wrong = job(), []
    for number, (name, options) in enumerate(cases):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            if name == "SGD" and "fused" in options and dtype == torch.bfloat16:
                continue  # torch 2.13 leaves out elements of plain tensors, by their place in memory
            loose = dtype == torch.bfloat16 or "fused" in options
            rng = random.Random(number)
            wholes, shards = pair(mesh, number, dtype)
            plain = [nn.Parameter(local_part(shard).detach().clone()) for shard in shards]
            kind = getattr(torch.optim, name)
            ordinary, by_hand = (kind(each, **copy.deepcopy(options)) for each in (wholes, plain))
            local = axes.nn.local_optimizer(kind, shards, **copy.deepcopy(options))
            assert isinstance(local, kind)
            for step in range(steps):
                # torch's fused SGD fails where a parameter's first gradient comes later than another's.
                give_gradients(wholes, shards, mesh, rng, 0.0 if "fused" in options else 0.15)
                ordinary.step()
                local.step()
                for one, other in zip(plain, shards, strict=True):
                    one.grad = None if other.grad is None else local_part(other.grad).clone()
                by_hand.step()
                found = differing(wholes, shards, ordinary, local, loose)
                for i, (one, other) in enumerate(zip(plain, shards, strict=True)):
                    state = {key: local_part(value) for key, value in local.state.get(other, {}).items()}
                    same = all(same_value(value, state[key]) for key, value in by_hand.state.get(one, {}).items())
                    if not same or not torch.equal(one, local_part(other)):
                        found.append(f"shard {i}")
                wrong += [f"{name} {options} {dtype}, step {step}, {text}" for text in found]
            left = [p for p in shards if isinstance(p, DTensor) and local_of(p).grad is not None]
            wrong += [f"{name}: a gradient stays on a shard"] if left else []
            local.zero_grad()
            assert all(p.grad is None for p in shards)
    return wrong


def local_part(x: Any) -> Any:
    return local_of(x) if isinstance(x, DTensor) else x


def same_value(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("cases", [OPTIMIZERS, FOREACH], ids=["as they come", "foreach"])
def test_steps_on_shards_are_those_of_one_device_bit_for_bit(pool, cases):
    for wrong in pool.run(same_steps, cases, 3, timeout=240):
        assert not wrong, "\n".join(wrong[:20])


def training(kind: str, options: dict[str, Any]) -> None:
    """Groups with options of their own, names, a scheduler, hooks, a closure, a group that comes later."""
    mesh = job()
    wholes, shards = pair(mesh, 5)
    calls: list[str] = []

    def made(make: Callable[..., torch.optim.Optimizer], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        named = [(f"p{i}", p) for i, p in enumerate(parameters)]
        groups = [{"params": named[:3], "lr": 0.05}, {"params": iter(named[3:6]), "weight_decay": 0.1}]
        optimizer = make(groups, **options)
        optimizer.register_step_pre_hook(lambda *_: calls.append(f"before {make.__name__}"))
        optimizer.register_step_post_hook(lambda *_: calls.append(f"after {make.__name__}"))
        return optimizer

    def local(groups: list[Any], **options: Any) -> torch.optim.Optimizer:
        return axes.nn.local_optimizer(getattr(torch.optim, kind), groups, **options)

    optimizers = [made(getattr(torch.optim, kind), wholes), made(local, shards)]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 3) for o in optimizers]
    for step in range(5):
        if step == 2:
            for optimizer, parameters in zip(optimizers, (wholes, shards), strict=True):
                optimizer.add_param_group({"params": [(f"p{i}", p) for i, p in enumerate(parameters)][6:], "lr": 0.2})
            schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=bool(step % 2))
        losses = [
            optimizer.step(lambda step=step: (give_gradients(wholes, shards, mesh, random.Random(step)), step)[1])
            for optimizer in optimizers
        ]
        assert losses == [step, step]
        for scheduler in schedulers:
            scheduler.step()
        used = slice(None, 6 if step < 2 else None)
        assert not differing(wholes[used], shards[used], *optimizers)
        ordinary, ours = ([{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in optimizers)
        assert ordinary == ours
        assert all(isinstance(g["params"], list) for g in optimizers[1].param_groups)
    for name in (kind, "local"):
        assert [c for c in calls if c.endswith(f" {name}")] == [f"before {name}", f"after {name}"] * 5


@pytest.mark.parametrize(("kind", "options"), [("AdamW", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9})])
def test_groups_names_schedulers_hooks_and_closures_work_as_ever(pool, kind, options):
    pool.run(training, kind, options)


class DTensorOperations(TorchDispatchMode):
    """The operations that get a DTensor."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def no_operations() -> None:
    mesh = job()
    for name, options in OPTIMIZERS:
        _, shards = pair(mesh, 1)
        optimizer = axes.nn.local_optimizer(getattr(torch.optim, name), shards, **copy.deepcopy(options))
        for _ in range(3):
            for i, shard in enumerate(shards):
                shard.grad = cut(torch.ones(shard.shape), i, mesh)
            with DTensorOperations() as operations, CommDebugMode() as sent:
                optimizer.step()
            assert not operations.seen, (name, operations.seen)
            assert not sent.get_total_counts()
    with DTensorOperations() as operations:
        shards[0] + shards[0]
    assert operations.seen


def test_a_step_has_no_operation_on_dtensors_and_sends_nothing(pool):
    pool.run(no_operations)


def described(state: Any) -> Any:
    """The structure of a state dict: keys, and what each tensor is."""
    if isinstance(state, dict):
        return {key: described(value) for key, value in state.items()}
    if isinstance(state, list):
        return [described(value) for value in state]
    if isinstance(state, DTensor):
        return (tuple(state.shape), state.dtype, state.placements, state.device_mesh, tuple(state.stride()))
    return (tuple(state.shape), state.dtype) if isinstance(state, torch.Tensor) else state


def state_dicts() -> None:
    mesh = job()
    for name, options in OPTIMIZERS:
        if (options.get("fused") and not name.startswith("Adam")) or name == "Rprop":
            continue  # torch has no such steps of DTensors
        (_, ones), (_, others) = pair(mesh, 1), pair(mesh, 1)
        kind = getattr(torch.optim, name)
        ordinary = kind(ones[:1], **copy.deepcopy(options))
        local = axes.nn.local_optimizer(kind, others[:1], **copy.deepcopy(options))
        for optimizer, parameters in ((ordinary, ones), (local, others)):
            parameters[0].grad = cut(torch.ones(PLACES[0][0]), 0, mesh)
            optimizer.step()
        assert described(ordinary.state_dict()) == described(local.state_dict()), name
        # Each loads the other's, and goes on from there.
        saved = [copy.deepcopy(o.state_dict()) for o in (ordinary, local)]
        ordinary.load_state_dict(saved[1])
        local.load_state_dict(saved[0])
        for optimizer in (ordinary, local):
            optimizer.step()
        assert torch.equal(whole_of(ones[0]), whole_of(others[0])), name


def test_the_state_dict_is_that_of_the_ordinary_optimizer_and_each_loads_the_other(pool):
    pool.run(state_dicts)


class Model(nn.Module):
    def __init__(self, mesh: axes.Mesh | None, specs: dict[str, str]):
        super().__init__()
        torch.manual_seed(0)
        for name, shape in (("up", (6, 8)), ("down", (8, 5)), ("scale", (5,)), ("one", ())):
            whole = torch.randn(shape)
            if mesh is None:
                setattr(self, name, nn.Parameter(whole))
            else:
                setattr(self, name, nn.Parameter(axes.shard(whole, specs[name], mesh=mesh)))

    def learn(self, seed: int) -> None:
        for i, (_, p) in enumerate(self.named_parameters()):
            whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + i))
            spec = axes.sharding_of(p) if isinstance(p, DTensor) else None
            p.grad = whole if spec is None else axes.shard(whole, spec.spec, mesh=spec.mesh)


SPECS = {
    "dp=4 tp=2": {"up": "a@dp b@tp", "down": "a@tp b@dp", "scale": "a@dp", "one": ""},
    "dp=2 tp=4": {"up": "a b@(tp dp)", "down": "a@(dp tp) b", "scale": "a", "one": ""},
    "tp=8": {"up": "a (h=8@tp k)", "down": "a@tp b", "scale": "a@tp", "one": ""},
}


def checkpoints(folder: str) -> None:
    expected = Model(None, {})
    reference = torch.optim.AdamW(expected.parameters(), lr=0.1, amsgrad=True)
    models, optimizers = {}, {}
    for text, specs in SPECS.items():
        models[text] = Model(axes.init_mesh(text, device_type="cpu"), specs)
        parameters = models[text].parameters()
        optimizers[text] = axes.nn.local_optimizer(torch.optim.AdamW, parameters, lr=0.1, amsgrad=True)
    first, *others = SPECS
    for seed in (10, 20):
        for model, optimizer in ((expected, reference), (models[first], optimizers[first])):
            model.learn(seed)
            optimizer.step()
    state = get_optimizer_state_dict(models[first], optimizers[first])
    weights = models[first].state_dict()
    dcp.save({"optimizer": state, "model": weights}, checkpoint_id=f"{folder}/one")
    whole = get_optimizer_state_dict(models[first], optimizers[first], options=StateDictOptions(full_state_dict=True))
    for text in others:
        target = {
            "optimizer": get_optimizer_state_dict(models[text], optimizers[text]),
            "model": models[text].state_dict(),
        }
        dcp.load(target, checkpoint_id=f"{folder}/one")
        set_optimizer_state_dict(models[text], optimizers[text], target["optimizer"])
    again = Model(axes.init_mesh(first, device_type="cpu"), SPECS[first])
    again.load_state_dict(weights)
    from_whole = axes.nn.local_optimizer(torch.optim.AdamW, again.parameters(), lr=0.1, amsgrad=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # A copy, else both count one `step`; contiguous, since torch before 2.13 mixes up what it broadcasts otherwise,
    # and gathers uneven dims so.
    copied = pytree.tree_map_only(torch.Tensor, lambda x: x.clone(memory_format=torch.contiguous_format), whole)
    set_optimizer_state_dict(again, from_whole, copied, options=options)
    models["from the whole"], optimizers["from the whole"] = again, from_whole
    reference_state = {name: reference.state[p] for name, p in expected.named_parameters()}
    expected.learn(30)
    reference.step()
    for text, model in models.items():
        model.learn(30)
        optimizers[text].step()
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(whole_of(p), q), (text, name)
            for key, value in reference_state[name].items():
                assert torch.equal(whole_of(optimizers[text].state[p][key]), value), (text, name, key)


def test_a_checkpoint_of_the_state_goes_on_bit_for_bit_on_another_mesh(pool, tmp_path):
    pool.run(checkpoints, str(tmp_path), timeout=120)


def copies_of_it() -> None:
    mesh = job()
    for copied in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), saved_and_loaded):
        wholes, shards = pair(mesh, 2)
        shards = [p for p in shards if isinstance(p, DTensor)]
        optimizer = axes.nn.local_optimizer(torch.optim.AdamW, shards, lr=0.5)
        ordinary = torch.optim.AdamW(wholes[: len(shards)], lr=0.5)
        for step in range(3):
            for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                p.grad = cut(torch.full(p.shape, step + 1.0), i, mesh)
                wholes[i].grad = torch.full(p.shape, step + 1.0)
            optimizer.step()
            ordinary.step()
            optimizer = copied(optimizer)
            assert isinstance(optimizer, torch.optim.AdamW)
        found = [whole_of(p) for group in optimizer.param_groups for p in group["params"]]
        assert all(torch.equal(p, q) for p, q in zip(found, wholes, strict=False))


def saved_and_loaded(x: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_a_copy_of_an_optimizer_steps_like_it(pool):
    pool.run(copies_of_it)


def with_fsdp2() -> None:
    """Steps of a model under FSDP2, whose shards are put into other memory between them."""
    mesh = axes.init_mesh("dp_replicate=2 dp_shard=2 tp=2", device_type="cpu")

    def built() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh["dp_replicate", "dp_shard"].device_mesh)
        return fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"].device_mesh)

    models = built(), built()
    kinds = (torch.optim.AdamW, lambda *a, **k: axes.nn.local_optimizer(torch.optim.AdamW, *a, **k))
    optimizers = [kind(model.parameters(), lr=0.1) for kind, model in zip(kinds, models, strict=True)]
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(mesh.axis("dp_shard").index or 0))
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().sum().backward()
            norm = axes.nn.clip_grad_norm_(model.parameters(), 1.0)
            assert norm > 1
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            before = [local_of(p) for p in models[1].parameters()]
            models[1]._apply(lambda t: t.clone())
            assert any(local_of(p) is not old for p, old in zip(models[1].parameters(), before, strict=True))
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one.full_tensor(), other.full_tensor())


def test_it_steps_what_fsdp2_shards_wherever_its_memory_is(pool):
    pool.run(with_fsdp2)


def changed_in_place() -> None:
    mesh = job()
    w = nn.Parameter(axes.shard(torch.ones(8), "n@tp", mesh=mesh))
    optimizer = axes.nn.local_optimizer(torch.optim.SGD, [w], lr=1.0)
    y = w * w
    w.grad = axes.shard(torch.ones(8), "n@tp", mesh=mesh)
    optimizer.step()
    assert axes.unshard(w.detach()).tolist() == [0.0] * 8
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(torch.ones_like(y))


def test_autograd_notices_a_step_between_forward_and_backward(pool):
    pool.run(changed_in_place)


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4))


REFUSED: list[tuple[str, str, Callable[[], object]]] = [
    ("Adafactor", "two halves of a matrix", lambda: made(torch.optim.Adafactor)),
    ("Adafactor at rate 0", "two halves of a matrix", lambda: made(torch.optim.Adafactor, lr=0.0)),
    ("Muon", "two halves of a matrix", lambda: made(torch.optim.Muon)),
    (
        "LBFGS",
        "steps of a matrix by LBFGS without a closure, and one raises TypeError.*closure",
        lambda: made(torch.optim.LBFGS),
    ),
    ("SparseAdam", "does not support dense gradients", lambda: made(torch.optim.SparseAdam)),
    ("a norm", "Lamb doesn't step each element by its own history", lambda: made(Lamb)),
    ("a norm of rows", "LambOfRows doesn't step each element", lambda: made(LambOfRows)),
    ("a norm of columns", "LambOfColumns doesn't step each element", lambda: made(LambOfColumns)),
    ("state of no parameter", "keeps state that belongs to no parameter", lambda: made(Everywhere)),
    (
        "differentiable",
        "differentiable=True needs steps that autograd sees",
        lambda: made(torch.optim.SGD, differentiable=True),
    ),
    (
        "an instance",
        "takes a class of optimizers",
        lambda: axes.nn.local_optimizer(torch.optim.SGD([parameter()]), [parameter()]),
    ),
    ("a model", "takes a class of optimizers", lambda: axes.nn.local_optimizer(nn.Linear, [parameter()])),
]


def made(kind: Any, **options: Any) -> torch.optim.Optimizer:
    return axes.nn.local_optimizer(kind, [parameter()], **options)


@pytest.mark.parametrize(
    ("text", "call"), [(text, call) for _, text, call in REFUSED], ids=[name for name, *_ in REFUSED]
)
def test_an_optimizer_that_needs_more_than_an_element_is_refused(text, call):
    with pytest.raises(ShardingError, match=text):
        call()


def test_what_torch_refuses_of_options_and_parameters_is_refused_as_torch_does():
    with pytest.raises(ValueError, match="Invalid learning rate"):
        made(torch.optim.AdamW, lr=-1.0)
    with pytest.raises(ValueError, match="empty parameter list"):
        axes.nn.local_optimizer(torch.optim.AdamW, [])
    with pytest.raises(TypeError, match="ordered collections"):
        axes.nn.local_optimizer(torch.optim.AdamW, [{"params": {parameter()}}])
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        made(torch.optim.AdamW, momentum=0.9)


def own_optimizers() -> None:
    mesh = job()
    wholes, shards = pair(mesh, 4)
    ordinary, local = Lion(wholes), axes.nn.local_optimizer(Lion, shards)
    for step in range(3):
        give_gradients(wholes, shards, mesh, random.Random(step), 0.0)
        ordinary.step()
        local.step()
        assert not [text for text in differing(wholes, shards, ordinary, local) if "count" not in text]
    with pytest.raises(ShardingError, match="Lion doesn't step each element"):
        local.add_param_group({"params": [parameter()], "whole": True})
    assert len(local.param_groups) == 1
    local.step()


def test_somebodys_own_optimizer_is_tried_and_each_of_its_groups(pool):
    pool.run(own_optimizers)


def wrong_state() -> None:
    mesh = job()
    w = nn.Parameter(axes.shard(torch.ones(8), "n@dp", mesh=mesh["dp", "tp"]))
    optimizer = axes.nn.local_optimizer(torch.optim.SGD, [w], lr=1.0, momentum=0.9)
    w.grad = torch.ones_like(w)
    for state, text in (
        (torch.ones(8), r"state 'momentum_buffer' of a parameter of shape \[8\] is a plain tensor of shape \[8\]"),
        (axes.shard(torch.ones(8), "n@tp", mesh=mesh["dp", "tp"]), "state 'momentum_buffer' .* is .*Shard"),
    ):
        saved = optimizer.state_dict()
        optimizer.load_state_dict({**saved, "state": {0: {"momentum_buffer": state}}})
        with pytest.raises(ShardingError, match=text):
            optimizer.step()
        assert optimizer.param_groups[0]["params"][0] is w
        optimizer.load_state_dict({**saved, "state": {}})
        optimizer.step()


def test_state_that_is_not_sharded_as_its_parameter_is_refused_before_the_step(pool):
    pool.run(wrong_state)


def failing() -> None:
    mesh = job()
    w = nn.Parameter(axes.shard(torch.ones(8), "n@tp", mesh=mesh["tp"]))
    other = nn.Parameter(torch.ones(3))
    optimizer = axes.nn.local_optimizer(Lion, [w, other])
    w.grad = torch.ones_like(w)
    with pytest.raises(TypeError):
        optimizer.step()  # `other` has no gradient, which this optimizer doesn't ask
    assert optimizer.param_groups[0]["params"] == [w, other]
    assert list(optimizer.state) == [w, other]
    assert isinstance(optimizer.state[w]["m"], DTensor)
    assert local_of(w).grad is None
    assert math.isclose(float(w.to_local()[0]), 0.9, rel_tol=1e-6)


def test_a_step_that_fails_leaves_dtensors_where_they_were(pool):
    pool.run(failing)


def test_a_step_takes_state_and_memory_that_somebody_has_replaced_since_the_last():
    with axes.simulate(1), axes.init_mesh("dp=1", device_type="cpu"):
        weight, other = axes.zeros("n@dp", n=4, requires_grad=True), torch.zeros(4, requires_grad=True)
        ours, theirs = axes.nn.local_optimizer(torch.optim.Adam, [weight], lr=0.1), torch.optim.Adam([other], lr=0.1)
        for turn in range(4):
            weight.grad, other.grad = axes.ones("n@dp", n=4) * (turn + 1), torch.ones(4) * (turn + 1)
            if turn == 2:
                ours.state[weight]["exp_avg"] = axes.ones("n@dp", n=4)
                theirs.state[other]["exp_avg"] = torch.ones(4)
                weight._local_tensor = torch.full((4,), 5.0)
                other.data = torch.full((4,), 5.0)
            ours.step()
            theirs.step()
        assert torch.equal(local_of(weight), other.detach())
        assert local_of(ours.state[weight]["exp_avg"]).equal(theirs.state[other]["exp_avg"])
        ours.param_groups[0]["params"] = []
        ours.step()
        alive = weakref.ref(weight)
        ours.state.clear()
        del weight
        gc.collect()
        assert alive() is None, "what is in no group any more is kept alive by nobody"


def momentum(steps: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A parameter over both axes and a whole one, each with its optimizer, after steps."""
    weight = axes.ones("a@dp b@tp", a=4, b=4, requires_grad=True)
    whole = torch.ones(2, 2, requires_grad=True)
    ours = axes.nn.local_optimizer(torch.optim.SGD, [weight], lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD([whole], lr=0.1, momentum=0.9)
    for _ in range(steps):
        weight.grad, whole.grad = axes.ones("a@dp b@tp", a=4, b=4), torch.ones(2, 2)
        ours.step()
        theirs.step()
    weight.grad, whole.grad = axes.ones("a@dp b@tp", a=4, b=4), torch.ones(2, 2)
    return weight, whole, ours, theirs


WRONG_STATE = {
    "split otherwise": lambda: axes.ones("a@tp b@dp", a=4, b=4),
    "whole everywhere": lambda: axes.ones("a b", a=4, b=4),
    "a plain tensor": lambda: torch.ones(4, 4),
}


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("state", WRONG_STATE.values(), ids=WRONG_STATE)
def test_state_that_somebody_puts_there_is_refused_unless_it_lies_as_its_parameter(steps, state):
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        weight, _, ours, _ = momentum(steps)
        ours.state[weight]["momentum_buffer"] = state()
        with pytest.raises(ShardingError, match="state 'momentum_buffer' of a parameter"):
            ours.step()
        assert local_of(weight).shape == (2, 2)
        assert ours.param_groups[0]["params"] == [weight]


def test_a_parameter_that_is_sharded_anew_doesnt_step_with_the_state_that_it_had():
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        weight, _, ours, _ = momentum()
        weight.grad = None
        torch.utils.swap_tensors(weight, axes.ones("a@tp b@dp", a=4, b=4, requires_grad=True))
        weight.grad = axes.ones("a@tp b@dp", a=4, b=4)
        with pytest.raises(ShardingError, match="state 'momentum_buffer' of a parameter"):
            ours.step()


def test_state_that_is_swapped_for_another_is_what_the_next_step_takes():
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        weight, whole, ours, theirs = momentum(3)
        kept = ours.state[weight]["momentum_buffer"]
        torch.utils.swap_tensors(kept, axes.full("a@dp b@tp", 7.0, a=4, b=4))
        theirs.state[whole]["momentum_buffer"].fill_(7.0)
        ours.step()
        theirs.step()
        assert torch.equal(local_of(weight), whole)
        assert torch.equal(local_of(ours.state[weight]["momentum_buffer"]), theirs.state[whole]["momentum_buffer"])


def test_autograd_notices_that_a_step_has_changed_state():
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        weight, _, ours, _ = momentum()
        x = axes.ones("a@dp b@tp", a=4, b=4, requires_grad=True)
        y = x * ours.state[weight]["momentum_buffer"]
        ours.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(torch.ones_like(y))


def test_state_that_a_step_removes_is_gone():
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        weight = axes.ones("a@dp b@tp", a=4, b=4, requires_grad=True)
        whole, plain, twin = (torch.ones(2, 2, requires_grad=True) for _ in range(3))
        ours, theirs = axes.nn.local_optimizer(Forgets, [weight, plain]), Forgets([whole, twin])
        for turn in range(1, 8):
            weight.grad = axes.full("a@dp b@tp", float(turn), a=4, b=4)
            for x in (whole, plain, twin):
                x.grad = torch.full((2, 2), float(turn))
            ours.step()
            theirs.step()
            assert torch.equal(local_of(weight), whole)
            assert torch.equal(plain, twin)
            for one, other in ((weight, whole), (plain, twin)):
                assert ours.state.get(one, {}).keys() == theirs.state.get(other, {}).keys()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_gradients_of_plain_and_sharded_parameters_are_zeroed(options):
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu") as mesh:
        weight, plain = axes.ones("a@dp b@tp", a=4, b=4, requires_grad=True), torch.ones(2, requires_grad=True)
        other = axes.ones("a@tp", mesh=mesh["tp"], a=4, requires_grad=True)
        optimizer = axes.nn.local_optimizer(
            torch.optim.Adam, [{"params": [weight, plain]}, {"params": other}], **options
        )
        gradients = axes.ones("a@dp b@tp", a=4, b=4), torch.ones(2), axes.ones("a@tp", mesh=mesh["tp"], a=4)
        weight.grad, plain.grad, other.grad = gradients
        optimizer.zero_grad(set_to_none=False)
        for x, gradient in zip((weight, plain, other), gradients, strict=True):
            assert x.grad is gradient
            assert not whole_of(gradient).any() if x is plain else not local_of(gradient).any()
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
        optimizer.zero_grad()
        assert weight.grad is plain.grad is other.grad is None


def test_the_dtype_of_a_gradient_may_change_from_step_to_step():
    with axes.simulate(1), axes.init_mesh("dp=1", device_type="cpu"):
        weight = axes.zeros("n@dp", n=4, requires_grad=True)
        optimizer = axes.nn.local_optimizer(torch.optim.SGD, [weight], lr=1.0, foreach=False)
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32):
            weight.grad = None
            weight.grad_dtype = dtype
            weight.grad = axes.ones("n@dp", n=4, dtype=dtype)
            optimizer.step()
        assert local_of(weight).tolist() == [-4.0] * 4
        assert weight.grad.dtype == torch.float32
        assert local_of(weight).grad is None


def test_parameters_that_change_places_or_groups_keep_their_own_state():
    def stepped(weights: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for turn in range(4):
            for number, weight in enumerate(weights):
                weight.grad = torch.ones_like(weight) * (turn + 1) * (number - 1.5)
            optimizer.step()
            if turn == 0:
                optimizer.param_groups[0]["params"].reverse()
            if turn == 1:
                state = optimizer.state
                state[weights[0]]["exp_avg"], state[weights[1]]["exp_avg"] = (
                    state[weights[1]]["exp_avg"],
                    state[weights[0]]["exp_avg"],
                )
            if turn == 2:
                optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 0.5})
        return [
            axes.to_local(weight).detach() if isinstance(weight, DTensor) else weight.detach() for weight in weights
        ]

    with axes.simulate(1), axes.init_mesh("dp=1", device_type="cpu"):
        ours = [axes.zeros("n@dp", n=4, requires_grad=True) for _ in range(3)]
        theirs = [torch.zeros(4, requires_grad=True) for _ in range(3)]
        found = stepped(ours, axes.nn.local_optimizer(torch.optim.Adam, ours, lr=0.1))
        expected = stepped(theirs, torch.optim.Adam(theirs, lr=0.1))
    assert all(map(torch.equal, found, expected))


def test_axes_nn_lists_its_public_names_and_has_them():
    assert dir(axes.nn) == sorted(axes.nn.__all__)
    assert all(getattr(axes.nn, name) is not None for name in dir(axes.nn))
    with pytest.raises(AttributeError, match=r"module 'axes.nn' has no attribute 'clip'"):
        axes.nn.clip  # noqa: B018
