"""Optimizers whose steps work on local shards: bit for bit those of whole tensors, or refused.

The law `training` steps models by them beside one device; here are all of torch's, those that users write, and
what else an optimizer has: groups, hooks, closures, state that somebody replaces.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes import ShardingError
from tests.common import case
from tests.own_optimizers import ELEMENTWISE, Each, Lion

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
    ("AdamW", {"lr": torch.tensor(0.1), "fused": True}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "fused": True}),
    ("NAdam", {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 0.1, "weight_decay": 0.1}),
    ("Adamax", {"lr": 0.1}),
    ("Adadelta", {"lr": 1.0}),
    ("Rprop", {"lr": 0.1}),
    ("ASGD", {"lr": 0.1, "t0": 2, "lambd": 0.1}),
]
DTYPES = torch.float32, torch.float64, torch.bfloat16
EVERY = [
    (name, {**options, **more}, dtype)
    for name, options in OPTIMIZERS
    for more in ({}, {"foreach": True})
    for dtype in DTYPES
    if not ("fused" in options and more) and not (name == "SGD" and "fused" in options and dtype == torch.bfloat16)
    # The last: torch 2.13 leaves out elements of plain tensors, by their place in memory.
]

PLACES = [
    # a shape, a spec, the mesh that it is on
    ((5, 7), "n@dp m@tp", ("dp", "tp")),
    ((24, 5), "(three=3 k@tp) m@dp", ("dp", "tp")),
    ((37,), "n@tp", ("tp",)),
    ((16, 9), "n@ep m", ("edp", "ep")),
    ((3, 2), "n@(dp tp) m", ("dp", "tp")),  # empty on some ranks
    ((4, 4), "n m@one", ("one", "dp")),
    ((), "", ("dp", "tp")),
    ((1,), "n@dp", ("dp", "tp")),
    ((3, 5), None, ()),
]


def job() -> axes.Mesh:
    return axes.init_mesh("dp=4 tp=2 one=1", "(dp tp) = edp ep=4", device_type="cpu")


def sharded(whole: torch.Tensor, number: int, mesh: axes.Mesh | None) -> torch.Tensor:
    _, spec, names = PLACES[number]
    return whole.clone() if spec is None or mesh is None else axes.shard(whole, spec, mesh=mesh[names])


def numbers(shape: Any, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of few bits, so that no order of sums rounds."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype) / 4


def local(x: Any) -> Any:
    """The memory of this rank."""
    with torch.no_grad():
        return x.to_local() if isinstance(x, DTensor) else x


def part_of(whole: Any, like: Any) -> Any:
    """What this rank holds of a whole tensor that is sharded as another tensor is. Nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return local(axes.shard(whole, axes.spec_of(like), mesh=axes.sharding_of(like).mesh))


def equal(found: Any, expected: Any, loose: bool = False) -> bool:
    """Bit by bit, or up to rounding. `found` may be sharded."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            equal(found[key], value, loose) for key, value in expected.items()
        )
    if not isinstance(expected, torch.Tensor):
        return found == expected
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    one, other = local(found), part_of(expected.detach(), found)
    tolerance = 0.1 if one.dtype == torch.bfloat16 else 1e-5
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance / 2) if loose else torch.equal(one, other)


def pair(
    seed: int, mesh: axes.Mesh, dtype: torch.dtype = torch.float32
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Whole parameters, and the same ones sharded."""
    generator = torch.Generator().manual_seed(seed)
    wholes = [torch.randn(shape, generator=generator).to(dtype) for shape, _, _ in PLACES]
    return [nn.Parameter(x) for x in wholes], [nn.Parameter(sharded(x, i, mesh)) for i, x in enumerate(wholes)]


def give_gradients(wholes: Any, shards: Any, mesh: axes.Mesh, seed: int, missing: float = 0.15) -> None:
    """The same gradients to both; some are missing."""
    rng = random.Random(seed)
    for i, (whole, shard) in enumerate(zip(wholes, shards, strict=True)):
        gradient = None if rng.random() < missing else numbers(whole.shape, rng.randrange(1 << 30), whole.dtype)
        whole.grad, shard.grad = gradient, None if gradient is None else sharded(gradient, i, mesh)


def check_same(wholes: Any, shards: Any, ordinary: Any, ours: Any, loose: bool = False) -> None:
    """Parameters and state are the same, and state of each element is sharded as its parameter."""
    for i, (whole, shard) in enumerate(zip(wholes, shards, strict=True)):
        with case(f"parameter {i}, {PLACES[i][:2]}"):
            assert equal(shard, whole, loose), (local(shard), part_of(whole.detach(), shard))
            assert (whole in ordinary.state) == (shard in ours.state)
            theirs, mine = ordinary.state.get(whole, {}), ours.state.get(shard, {})
            assert list(theirs) == list(mine)
            for key, value in theirs.items():
                assert equal(mine[key], value, loose), (key, mine[key], value)
                if isinstance(shard, DTensor) and isinstance(value, torch.Tensor) and PLACES[i][0]:
                    split = value.shape == shard.shape and key not in ("step", "mu", "eta", "mu_product", "betas")
                    assert isinstance(mine[key], DTensor) == split, key
                    assert not split or mine[key].placements == shard.placements, key


# ---------------------------------------------------------------------------- torch's own


def same_steps(cases: list[tuple[str, dict[str, Any], torch.dtype]]) -> None:
    """Beside the optimizer on whole tensors, and on the shards as plain tensors.

    torch's loops on a CPU round by an element's place in memory in 16 bits and where they are fused. There
    whole tensors are the same up to rounding alone, and the plain shards bit by bit as everywhere.
    """
    mesh = job()
    for name, options, dtype in cases:
        fused = "fused" in options
        wholes, shards = pair(1, mesh, dtype)
        plain = [nn.Parameter(local(shard).clone()) for shard in shards]
        kind = getattr(torch.optim, name)
        ordinary, by_hand = (kind(each, **copy.deepcopy(options)) for each in (wholes, plain))
        ours = axes.nn.local_optimizer(kind, shards, **copy.deepcopy(options))
        assert isinstance(ours, kind)
        for step in range(3):
            with case(f"{name} {options} {dtype}, step {step}"):
                # torch's fused SGD fails where a parameter's first gradient comes later than another's.
                give_gradients(wholes, shards, mesh, step, 0.0 if fused else 0.15)
                ordinary.step()
                with CommDebugMode() as sent:
                    ours.step()
                assert not sent.get_total_counts()
                for one, other in zip(plain, shards, strict=True):
                    one.grad = None if other.grad is None else local(other.grad).clone()
                by_hand.step()
                check_same(wholes, shards, ordinary, ours, loose=dtype == torch.bfloat16 or fused)
                for one, other in zip(plain, shards, strict=True):
                    assert torch.equal(one, local(other))
                    for key, value in by_hand.state.get(one, {}).items():
                        assert equal(local(ours.state[other][key]), value), key
                assert not any(local(p).grad is not None for p in shards if isinstance(p, DTensor))
        ours.zero_grad()
        assert all(p.grad is None for p in shards)


def test_steps_on_shards_are_those_of_one_device_bit_for_bit_and_send_nothing(pool):
    pool.run(same_steps, EVERY[::4], timeout=240)  # every optimizer, dtypes and loops in turn


@pytest.mark.full
def test_so_are_those_of_every_optimizer_in_every_dtype(pool):
    pool.run(same_steps, EVERY, timeout=600)


def training() -> None:
    """Groups with options of their own, names, a scheduler, hooks, a closure, a group that comes later."""
    mesh = job()
    wholes, shards = pair(5, mesh)
    calls: list[str] = []

    def made(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        named = [(f"p{i}", p) for i, p in enumerate(parameters)]
        groups = [{"params": named[:3], "lr": 0.05}, {"params": iter(named[3:6]), "weight_decay": 0.1}]
        kind = torch.optim.AdamW
        optimizer = kind(groups, lr=0.1) if name == "whole" else axes.nn.local_optimizer(kind, groups, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: calls.append(f"before {name}"))
        optimizer.register_step_post_hook(lambda *_: calls.append(f"after {name}"))
        return optimizer

    optimizers = [made("whole", wholes), made("local", shards)]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 3) for o in optimizers]
    for step in range(4):
        if step == 2:
            for optimizer, parameters in zip(optimizers, (wholes, shards), strict=True):
                optimizer.add_param_group({"params": [(f"p{i}", p) for i, p in enumerate(parameters)][6:], "lr": 0.2})
            schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]

        def closure(step: int = step) -> int:
            give_gradients(wholes, shards, mesh, step)
            return step

        assert [optimizer.step(closure) for optimizer in optimizers] == [step, step]
        for scheduler in schedulers:
            scheduler.step()
        used = slice(None, 6 if step < 2 else None)
        check_same(wholes[used], shards[used], *optimizers)
        ordinary, ours = ([{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in optimizers)
        assert ordinary == ours
    assert calls == ["before whole", "after whole", "before local", "after local"] * 4


def test_groups_names_schedulers_hooks_and_closures_work_as_ever(pool):
    pool.run(training)


# ---------------------------------------------------------------------------- those that users write


def as_on_the_whole() -> None:
    mesh = job()
    for kind in ELEMENTWISE:
        for closure in (False,) if kind is Lion else (False, True):  # Lion takes none
            with case(f"{kind.__name__}, closure {closure}"):
                parameters, optimizer, given = stepped(kind, mesh, closure)
                wholes, theirs, expected = stepped(kind, None, closure)
                assert given == expected
                check_same(wholes, parameters, theirs, optimizer)
                for weight, whole in zip(parameters, wholes, strict=True):
                    assert (weight.grad is None) == (whole.grad is None)
                    assert whole.grad is None or equal(weight.grad, whole.grad)
                ours, ordinary = (
                    {k: v for k, v in o.param_groups[0].items() if k != "params"} for o in (optimizer, theirs)
                )
                assert equal(ours, ordinary)


def stepped(kind: Any, mesh: axes.Mesh | None, closure: bool) -> tuple[list[Any], Any, list[Any]]:
    """Parameters, their optimizer and what its steps gave. Some steps accumulate."""
    wholes = [numbers(shape, at, torch.float64) for at, (shape, _, _) in enumerate(PLACES)]
    weights = [sharded(whole, at, mesh).detach().requires_grad_() for at, whole in enumerate(wholes)]
    optimizer = kind(weights) if mesh is None else axes.nn.local_optimizer(kind, weights, elementwise=True)
    given = []
    for step in range(11):  # after two of three steps `Forgets` has half of its state

        def evaluate(step: int = step) -> float:
            for at, weight in enumerate(weights):
                gradient = sharded(numbers(weight.shape, 100 + 10 * step + at, torch.float64), at, mesh)
                weight.grad = gradient if weight.grad is None or step % 2 else weight.grad + gradient
            return float(step % 3)

        given.append(optimizer.step(evaluate) if closure else (evaluate(), optimizer.step())[1])
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return weights, optimizer, given


def test_what_works_element_by_element_works_on_shards_as_on_the_whole(pool):
    pool.run(as_on_the_whole)


@pytest.fixture
def mesh():
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu") as mesh:
        yield mesh


def ones(spec: str = "a@dp b@tp") -> torch.Tensor:
    return axes.ones(spec, a=4, b=4) if "b" in spec else axes.ones(spec, a=4)


def parameter(spec: str = "a@dp b@tp") -> torch.Tensor:
    return ones(spec).requires_grad_()


# ---------------------------------------------------------------------------- state


WRONG_STATE = {"split otherwise": "a@tp b@dp", "whole everywhere": "a b", "a plain tensor": None}


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("state", WRONG_STATE)
def test_state_that_somebody_puts_there_is_refused_unless_it_lies_as_its_parameter(mesh, steps, state):
    weight, _, ours, _ = momentum(steps)
    spec = WRONG_STATE[state]
    ours.state[weight]["momentum_buffer"] = torch.ones(4, 4) if spec is None else ones(spec)
    with pytest.raises(ShardingError, match=r"state 'momentum_buffer' of a parameter of shape \[4, 4\] is "):
        ours.step()
    assert local(weight).shape == (2, 2)
    assert ours.param_groups[0]["params"] == [weight]
    del ours.state[weight]
    ours.step()


def momentum(steps: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A parameter over both axes and a plain one like its shard, each with its optimizer, after steps."""
    weight, plain = parameter(), torch.ones(2, 2, requires_grad=True)
    ours = axes.nn.local_optimizer(torch.optim.SGD, [weight], lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD([plain], lr=0.1, momentum=0.9)
    weight.grad, plain.grad = ones(), torch.ones(2, 2)
    for _ in range(steps):
        ours.step()
        theirs.step()
    return weight, plain, ours, theirs


# What happens to an optimizer between steps, the same to one on shards and to one on tensors like them. `full` gives
# a tensor like a parameter.

Change = Callable[[Any, list[torch.Tensor], Callable[[float], torch.Tensor]], Any]


def exchange(o: Any, w: list[torch.Tensor]) -> None:
    one, two = o.state[w[0]], o.state[w[1]]
    one["exp_avg"], two["exp_avg"] = two["exp_avg"], one["exp_avg"]


def set_memory(x: torch.Tensor) -> None:
    """Another memory for a parameter, as FSDP2 gives it one."""
    if isinstance(x, DTensor):
        x._local_tensor = torch.full_like(local(x), 5.0)
    else:
        x.data = torch.full_like(x, 5.0)


def by_way_of_torchs(o: Any, w: list[torch.Tensor]) -> None:
    """The ordinary optimizer takes a step in between: each loads the other's state."""
    ordinary = torch.optim.Adam(w, lr=0.1)
    ordinary.load_state_dict(copy.deepcopy(o.state_dict()))
    ordinary.step()
    o.load_state_dict(copy.deepcopy(ordinary.state_dict()))


# fmt: off
CHANGED: dict[str, Change] = {
    "state is replaced": lambda o, w, full: o.state[w[0]].update(exp_avg=full(7.0)),
    "state is swapped": lambda o, w, full: torch.utils.swap_tensors(o.state[w[0]]["exp_avg"], full(7.0)),
    "state is exchanged": lambda o, w, full: exchange(o, w),
    "state is removed": lambda o, w, full: o.state.pop(w[0]),
    "state is loaded": lambda o, w, full: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "it goes by way of torch's own": lambda o, w, full: by_way_of_torchs(o, w),
    "memory is replaced": lambda o, w, full: set_memory(w[0]),
    "parameters change places": lambda o, w, full: o.param_groups[0]["params"].reverse(),
    "one leaves": lambda o, w, full: o.param_groups[0]["params"].pop(),
    "one goes to another group": lambda o, w, full: o.add_param_group({"params": [o.param_groups[0]["params"].pop()], "lr": 0.5}),
    "options change": lambda o, w, full: o.param_groups[0].update(maximize=True, weight_decay=0.1),
    "an option asks for more state": lambda o, w, full: o.param_groups[0].update(amsgrad=not o.state),
    "a gradient is missing": lambda o, w, full: setattr(w[1], "grad", None),
    "gradients are zeroed": lambda o, w, full: o.zero_grad(set_to_none=False),
    "it is copied": lambda o, w, full: copy.deepcopy(o),
    "it is pickled": lambda o, w, full: pickle.loads(pickle.dumps(o)),
}
# fmt: on


WHEN = [(what, at) for what in CHANGED for at in (0, 2) if at or what.partition("state is ")[2] in ("", "loaded")]


@pytest.mark.parametrize(("what", "at"), WHEN)
def test_what_happens_between_steps_changes_the_next_as_on_plain_tensors(mesh, what, at):
    def stepped(made: Callable[..., Any], full: Callable[[float], torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        w = [full(float(number)).requires_grad_() for number in range(3)]
        optimizer = made(torch.optim.Adam, w, lr=0.1)
        for turn in range(4):
            for number, weight in enumerate(w):
                weight.grad = full((turn + 1) * (number - 1.5))
            if turn == at:
                found = CHANGED[what](optimizer, w, full)
                if isinstance(found, torch.optim.Optimizer):
                    optimizer, w = found, found.param_groups[0]["params"]
            optimizer.step()
        return optimizer, w

    ours, shards = stepped(axes.nn.local_optimizer, lambda x: axes.full("a@dp b@tp", x, a=4, b=4))
    theirs, plain = stepped(lambda kind, *given, **options: kind(*given, **options), lambda x: torch.full((2, 2), x))
    assert type(ours).__name__ == "LocalAdam"
    for one, other in zip(shards, plain, strict=True):
        assert torch.equal(local(one), other)
        assert torch.equal(local(one.grad), other.grad) if other.grad is not None else one.grad is None
        assert ours.state[one].keys() == theirs.state[other].keys()
        for key, value in theirs.state[other].items():
            assert torch.equal(local(ours.state[one][key]), value), key
            assert isinstance(ours.state[one][key], DTensor) == (key != "step"), key


# ---------------------------------------------------------------------------- what else a step is


def test_autograd_hears_of_what_changed_and_of_nothing_else(mesh):
    class Decays(Each):
        """Changes all of its parameters, with a gradient or without."""

        def all_of_them(self):
            for p in self.param_groups[0]["params"]:
                p.mul_(0.5)

    for kind in (torch.optim.SGD, Decays):
        one, other = parameter(), parameter()
        optimizer = axes.nn.local_optimizer(kind, [one, other], elementwise=True)
        first, second, third = one.square().sum(), other.square().sum(), one.square().sum()
        first.backward()
        optimizer.step()
        for y, changed in ((second, kind is Decays), (third, True)):
            if not changed:
                y.backward()
                continue
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()
    weight = parameter()
    fused, y = axes.nn.local_optimizer(torch.optim.AdamW, [weight], fused=True), weight.square().sum()
    weight.grad = ones()
    fused.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    weight, _, ours, _ = momentum()
    y = parameter() * ours.state[weight]["momentum_buffer"]
    ours.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(torch.ones_like(y))


def plain_gradient(weights: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    weights[0].grad, weights[1].grad = ones(), torch.ones(4, 4)
    optimizer.step()


# fmt: off
FAILING: dict[str, tuple[type[Each], type[Exception], str, Callable[[list[torch.Tensor], Any], object]]] = {
    "a step that can't begin": (Each, ShardingError, "is a plain tensor", plain_gradient),
    "a closure": (Each, ZeroDivisionError, "division", lambda _, optimizer: optimizer.step(lambda: 1 / 0)),
    "a step": (Lion, TypeError, "unsupported operand", lambda _, optimizer: optimizer.step()),  # it doesn't ask for a missing gradient
}
# fmt: on


@pytest.mark.parametrize("fails", FAILING)
def test_a_step_that_fails_leaves_dtensors_where_they_were(mesh, fails):
    kind, error, text, call = FAILING[fails]
    weights = [parameter(), parameter()]
    optimizer = axes.nn.local_optimizer(kind, weights, elementwise=True)
    weights[0].grad = ones()
    with pytest.raises(error, match=text):
        call(weights, optimizer)
    assert optimizer.param_groups[0]["params"] == weights
    assert all(any(each is weight for weight in weights) for each in optimizer.state)
    assert all(isinstance(state["m"], DTensor) for state in optimizer.state.values())
    assert local(weights[0]).grad is None
    assert not weights[0].to_local().detach().requires_grad
    assert (optimizer.state[weights[0]]["count"] == 1) if kind is Lion else not optimizer.state


def test_a_step_takes_what_its_class_takes(mesh):
    class Scaled(Each):
        @torch.no_grad()
        def step(self, closure=None, *, scale=1.0):
            self.param_groups[0]["params"][0].mul_(scale)

    weight = parameter()
    optimizer = axes.nn.local_optimizer(Scaled, [weight], elementwise=True)
    optimizer.step(scale=3.0)
    assert local(weight).eq(3).all()
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        optimizer.step(size=1)
