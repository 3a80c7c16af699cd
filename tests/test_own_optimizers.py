"""Optimizers that users write, on local shards: as on whole tensors, or refused."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import axes
import axes.nn
from axes import ShardingError
from tests import own_optimizers
from tests.own_optimizers import ELEMENTWISE, Each, NormalizesOnDemand

OWN: list[Any] = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
]  # fmt: skip

PLACES = [((4, 6), "a@x b"), ((3,), "a@x"), ((5, 1), "a@x b"), ((2, 3, 4), "a b c@x"), ((), ""), ((4, 2), "a b")]
"""Shapes and specs. Of three elements, ranks have two and one; of one element on two ranks, one has none."""


def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Numbers of few bits, so that no order of sums rounds."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double() / 4


def sharded(whole: torch.Tensor, number: int, mesh: axes.Mesh | None) -> torch.Tensor:
    return whole if mesh is None else axes.shard(whole, PLACES[number][1], mesh=mesh)


def trained(kind: Any, mesh: axes.Mesh | None, steps: int, closure: bool) -> tuple[list[Any], Any, list[Any]]:
    """Parameters, their optimizer and what its steps gave; a plain parameter is among them. Some steps accumulate."""
    weights = [sharded(numbers(shape, at), at, mesh).detach().requires_grad_() for at, (shape, _) in enumerate(PLACES)]
    weights.append(numbers((3,), 50).requires_grad_())
    optimizer = kind(weights) if mesh is None else axes.nn.local_optimizer(kind, weights)
    given = []
    for step in range(steps):

        def evaluate(step: int = step) -> float:
            for at, weight in enumerate(weights):
                gradient = numbers(weight.shape, 100 + 10 * step + at)
                gradient = sharded(gradient, at, mesh) if at < len(PLACES) else gradient
                weight.grad = gradient if weight.grad is None or step % 2 else weight.grad + gradient
            return float(step % 3)

        given.append(optimizer.step(evaluate) if closure else (evaluate(), optimizer.step())[1])
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return weights, optimizer, given


def whole_of(x: Any) -> Any:
    return axes.unshard(x.detach()) if isinstance(x, DTensor) else x


def same(found: Any, expected: Any) -> bool:
    found = whole_of(found)
    if isinstance(expected, torch.Tensor):
        return found.shape == expected.shape and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], value) for key, value in expected.items())
    return found == expected


def as_on_the_whole() -> list[str]:
    mesh, wrong = axes.init_mesh("x=2", device_type="cpu"), []
    for kind in ELEMENTWISE:
        for closure in (False, True):
            if closure and kind is own_optimizers.Lion:
                continue  # it takes none
            weights, optimizer, given = trained(kind, mesh, 12, closure)
            expected, theirs, given_whole = trained(kind, None, 12, closure)
            name = f"{kind.__name__}{', with a closure' if closure else ''}"
            wrong += [] if given == given_whole else [f"{name}: steps gave {given}, {given_whole}"]
            for at, (weight, whole) in enumerate(zip(weights, expected, strict=True)):
                wrong += [] if same(weight, whole) else [f"{name}: parameter {at}"]
                wrong += [] if same(weight.grad, whole.grad) else [f"{name}: gradient {at}"]
                there = [weight in optimizer.state, whole in theirs.state]
                wrong += [] if len(set(there)) == 1 else [f"{name}: state of {at} is there: {there}"]
                if all(there) and not same(dict(optimizer.state[weight]), dict(theirs.state[whole])):
                    wrong.append(f"{name}: state of {at}: {optimizer.state[weight]} {theirs.state[whole]}")
            options = [{k: v for k, v in o.param_groups[0].items() if k != "params"} for o in (optimizer, theirs)]
            wrong += [] if same(*options) else [f"{name}: options {options}"]
    return wrong


def test_what_works_element_by_element_works_on_shards_as_on_the_whole(world):
    for wrong in world(as_on_the_whole, 2):
        assert not wrong, "\n".join(wrong)


REFUSED = {
    "LambOfVectors": "two halves of a vector",
    "Centralizes": "two halves of a tensor of 4 dims",
    "Factors": "two halves of a matrix",
    "Clips": "two halves of a",
    "SkipsInfinities": "two halves of a",
    "SkipsZeros": "its state 'm'",
    "DecaysTrained": "two halves of a",
    "SkipsNan": "two halves of a",
    "DecaysMatrices": "two halves of a matrix",
    "NormalizesLater": "two halves of a",
    "ListsInState": "its state 'list' isn't one value for each element",
    "BuffersInGroups": "it keeps tensors among the options of a group",
}


@pytest.mark.parametrize(("name", "text"), REFUSED.items(), ids=REFUSED)
def test_what_needs_more_than_an_element_is_refused_when_it_is_made(name, text):
    weights = [torch.ones(shape, requires_grad=True) for shape in ((4, 4), (3,), (4, 2, 3, 3))]
    with pytest.raises(ShardingError, match=f"{name} doesn't step each element by its own history: {text}"):
        axes.nn.local_optimizer(getattr(own_optimizers, name), weights)


def test_parameters_of_very_many_dims_are_tried_as_those_of_eight():
    for ndim in (9, 20, 64):
        axes.nn.local_optimizer(torch.optim.AdamW, [torch.zeros((1,) * ndim, requires_grad=True)])


def test_parameters_are_tried_in_their_own_dtype():
    make = axes.nn.local_optimizer
    make(own_optimizers.NormalizesDoubles, [torch.ones(4, requires_grad=True)])
    with pytest.raises(ShardingError, match="two halves of a vector"):
        make(own_optimizers.NormalizesDoubles, [torch.ones(4, requires_grad=True, dtype=torch.float64)])


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_the_trial_finds_torchs_own_right_in_every_dtype(kind, dtype):
    for shape in ((3,), (4, 2), (2, 3, 4), (2, 2, 2, 2)):
        named = ({}, {"foreach": True}, {"maximize": True}, {"amsgrad": True, "fused": True, "weight_decay": 0.1})
        takes = {*inspect.signature(kind).parameters} - ({"fused"} if dtype.is_complex else set())
        for options in [each for each in named if takes.issuperset(each)]:
            axes.nn.local_optimizer(kind, [torch.zeros(shape, dtype=dtype, requires_grad=True)], **options)


@pytest.mark.parametrize("name", ["KeepsParameters", "KeepsFactors", "KeepsIds", "KeepsBuffers", "Wraps"])
def test_parameters_that_an_optimizer_keeps_to_itself_are_refused(name):
    kind = getattr(own_optimizers, name)
    with axes.simulate(2), axes.init_mesh("x=2", device_type="cpu"):
        with pytest.raises(ShardingError, match=f"{name} keeps parameters, or other DTensors, in its attribute 'own'"):
            axes.nn.local_optimizer(kind, [parameter()])
        if name != "Wraps":  # nothing is sharded
            assert isinstance(axes.nn.local_optimizer(kind, [torch.ones(4, requires_grad=True)]), kind)


def test_parameters_that_an_optimizer_begins_to_keep_are_refused_at_the_next_step():
    with axes.simulate(2), axes.init_mesh("x=2", device_type="cpu"):
        weight = parameter()
        optimizer: Any = axes.nn.local_optimizer(Each, [weight])
        optimizer.own = {"a": (weight,)}
        with pytest.raises(ShardingError, match="in its attribute 'own'"):
            optimizer.step()


def test_an_option_of_one_number_for_each_element_is_refused():
    with axes.simulate(2), axes.init_mesh("x=2", device_type="cpu"):
        with pytest.raises(ShardingError, match=r"the option 'lr' is .* steps on shards take one number"):
            axes.nn.local_optimizer(Each, [parameter()], lr=torch.ones(4))
        axes.nn.local_optimizer(Each, [parameter()], lr=torch.tensor(0.1))


def test_hooks_of_all_optimizers_see_the_steps_of_the_user_alone():
    seen: list[str] = []
    hooks = [
        register(lambda optimizer, *_: seen.append(type(optimizer).__name__))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    try:
        with axes.simulate(2), axes.init_mesh("x=2", device_type="cpu"):
            weight = parameter()
            optimizer = axes.nn.local_optimizer(torch.optim.Adam, [weight])
            assert not seen
            weight.grad = axes.ones("a@x b", a=4, b=4)
            optimizer.step()
            assert seen == ["LocalAdam", "LocalAdam"]
    finally:
        for hook in hooks:
            hook.remove()


def test_a_step_that_cannot_begin_leaves_the_local_tensors_as_they_were():
    with axes.simulate(2), axes.init_mesh("x=2", device_type="cpu"):
        weights = [parameter(), parameter()]
        optimizer = axes.nn.local_optimizer(own_optimizers.AsksOfParameters, weights)
        weights[0].grad = axes.ones("a@x b", a=4, b=4)
        weights[1].grad = torch.ones(4, 4)
        with pytest.raises(ShardingError, match="is a plain tensor"):
            optimizer.step()
        local = axes.to_local(weights[0].detach())
        assert local.grad is None
        assert not local.requires_grad
        assert optimizer.param_groups[0]["params"] == weights


def asked() -> None:
    """Attributes and `requires_grad` are the parameter's own in a step; a step that asks of none changes nothing."""
    mesh = axes.init_mesh("x=2", device_type="cpu")
    for at, made in ((0, torch.nn.Parameter), (1, lambda x: x.requires_grad_())):
        weight = made(axes.shard(torch.ones(4, 2), "a@x b", mesh=mesh))
        optimizer = axes.nn.local_optimizer(own_optimizers.AsksOfParameters, [weight], lr=1.0, wants_parameters=not at)
        weight.grad = axes.ones("a@x b", mesh=mesh, a=4, b=2)
        optimizer.step()
        assert axes.to_local(weight).eq(0).all()
        weight.scale = 2.0
        optimizer.step()
        assert axes.to_local(weight).eq(-2).all()
        weight.requires_grad_(False)
        optimizer.step()
        assert axes.to_local(weight).eq(-2).all()
        assert weight.steps == 2
        local = weight.to_local()
        assert not local.requires_grad
        assert not hasattr(local, "scale")


def test_a_step_may_ask_parameters_whatever_it_asks_on_one_device(world):
    world(asked, 2)


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_groups_may_have_another_kind_of_state_under_the_same_name(order):
    with axes.simulate(2), axes.init_mesh("x=2", device_type="cpu"):
        weights = [parameter() for _ in order]
        groups = [{"params": [weight], "each": each} for weight, each in zip(weights, order, strict=True)]
        optimizer = axes.nn.local_optimizer(own_optimizers.ByGroup, groups)
        for _ in range(2):
            for weight in weights:
                weight.grad = axes.ones("a@x b", a=4, b=4)
            optimizer.step()
        assert [isinstance(optimizer.state[weight]["v"], DTensor) for weight in weights] == list(order)


def test_dims_that_no_parameter_has_are_not_tried():
    weights = [torch.ones(4, 4, requires_grad=True)]
    for kind in (own_optimizers.LambOfVectors, own_optimizers.Centralizes):
        assert isinstance(axes.nn.local_optimizer(kind, weights), kind)


def parameter() -> torch.Tensor:
    return axes.ones("a@x b", a=4, b=4, requires_grad=True)


CHANGES: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "a flag": lambda o: o.param_groups[0].update(norm=True),
    "a number that was 0": lambda o: o.param_groups[0].update(scale=0.5),
    "what is loaded": lambda o: o.load_state_dict(
        {**o.state_dict(), "param_groups": [{**o.state_dict()["param_groups"][0], "norm": True}]}
    ),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_options_that_become_others_are_tried_before_the_next_step(steps, change):
    with axes.simulate(2), axes.init_mesh("x=2", device_type="cpu"):
        weight = parameter()
        optimizer = axes.nn.local_optimizer(NormalizesOnDemand, [weight])
        weight.grad = axes.ones("a@x b", a=4, b=4)
        for _ in range(steps):
            optimizer.step()
        before = axes.to_local(weight).clone()
        change(optimizer)
        with pytest.raises(ShardingError, match="two halves of a matrix"):
            optimizer.step()
        assert torch.equal(axes.to_local(weight), before)
        assert optimizer.param_groups[0]["params"] == [weight]


def test_a_parameter_of_other_dims_that_is_added_to_a_group_is_tried():
    with axes.simulate(2), axes.init_mesh("x=2", device_type="cpu"):
        optimizer = axes.nn.local_optimizer(own_optimizers.LambOfVectors, [parameter()])
        optimizer.param_groups[0]["params"].append(axes.ones("a@x", a=4, requires_grad=True))
        with pytest.raises(ShardingError, match="two halves of a vector"):
            optimizer.step()


def late_state() -> None:
    mesh = axes.init_mesh("x=2", device_type="cpu")
    for name in ("LateLists", "LateStacks", "LateFlat"):
        weight = axes.ones("a@x b", mesh=mesh, a=4, b=4, requires_grad=True)
        optimizer = axes.nn.local_optimizer(getattr(own_optimizers, name), [weight])
        weight.grad = axes.ones("a@x b", mesh=mesh, a=4, b=4)
        for _ in range(9):
            optimizer.step()
        with pytest.raises(ShardingError, match=r"after a step, state 'strange' .* neither one value for each element"):
            optimizer.step()
        assert optimizer.param_groups[0]["params"] == [weight]


def test_state_of_another_shape_that_comes_later_than_the_trial_is_an_error_after_the_step(world):
    world(late_state, 2)


LATER = [
    # what is set after the optimizer is made, before which step, and the state that it asks for
    (torch.optim.SGD, {"momentum": 0.9}, 0, "momentum_buffer"),
    (torch.optim.SGD, {"momentum": 0.9}, 2, "momentum_buffer"),
    (torch.optim.Adam, {"amsgrad": True}, 0, "max_exp_avg_sq"),
    (torch.optim.RMSprop, {"centered": True}, 0, "grad_avg"),
]


def later_options(folder: str) -> None:
    """State that an option asks for later is sharded whatever a rank has of it, saved, and loaded."""
    mesh = axes.init_mesh("x=2", device_type="cpu")
    for number, (kind, later, first, name) in enumerate(LATER):
        torch.manual_seed(0)
        model, whole = torch.nn.Linear(8, 3), torch.nn.Linear(8, 3)
        whole.load_state_dict(model.state_dict())
        fully_shard(model, mesh=mesh.device_mesh)
        ours, theirs = axes.nn.local_optimizer(kind, model.parameters(), lr=0.1), kind(whole.parameters(), lr=0.1)
        for step in range(5):
            for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
                other.grad = numbers(other.shape, step).float()
                parameter.grad = axes.shard(other.grad, axes.spec_of(parameter), mesh=axes.sharding_of(parameter).mesh)
            for optimizer in (ours, theirs):
                optimizer.param_groups[0].update(later if step >= first else {})
                optimizer.step()
        for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(ours.state[parameter][name], DTensor)
            assert same(ours.state[parameter][name], theirs.state[other][name])
            assert same(parameter, other.detach())
        saved = get_optimizer_state_dict(model, ours)
        dcp.save(saved, checkpoint_id=f"{folder}/{number}")
        for parameter in model.parameters():
            axes.to_local(ours.state[parameter][name]).zero_()
        dcp.load(saved, checkpoint_id=f"{folder}/{number}")
        set_optimizer_state_dict(model, ours, saved)
        for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
            assert same(ours.state[parameter][name], theirs.state[other][name])


def test_state_of_an_option_that_is_set_later_is_sharded_on_every_rank_and_saved(world, tmp_path):
    world(later_options, 2, str(tmp_path))


def test_autograd_hears_of_what_changed_and_of_nothing_else():
    class Decays(Each):
        """Changes all of its parameters, with a gradient or without."""

        def all_of_them(self):
            for p in self.param_groups[0]["params"]:
                p.mul_(0.5)

    with axes.simulate(2), axes.init_mesh("x=2", device_type="cpu"):
        for kind in (Each, Decays):
            one, other = parameter(), parameter()
            optimizer = axes.nn.local_optimizer(kind, [one, other])
            first, second = one.square().sum(), other.square().sum()
            first.backward()
            optimizer.step()
            if kind is Each:
                second.backward()
                assert other.grad is not None
            else:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    second.backward()


def test_a_trial_leaves_random_numbers_and_options_as_they_are():
    class Noisy(Each):
        def one(self, p, g, group):
            group["count"].add_(1)
            p.add_(torch.randn_like(p), alpha=group["temperature"])

    with axes.simulate(2), axes.init_mesh("x=2", device_type="cpu"):
        weight, count = parameter(), torch.zeros(())
        before = torch.get_rng_state()
        axes.nn.local_optimizer(Noisy, [weight], temperature=0.0, count=count)
        assert torch.equal(torch.get_rng_state(), before)
        assert count == 0


def test_a_step_takes_what_its_class_takes():
    class Scaled(Each):
        @torch.no_grad()
        def step(self, closure=None, *, scale=1.0):
            self.param_groups[0]["params"][0].mul_(scale)

    with axes.simulate(2), axes.init_mesh("x=2", device_type="cpu"):
        weight = parameter()
        optimizer = axes.nn.local_optimizer(Scaled, [weight])
        optimizer.step(scale=3.0)
        assert axes.to_local(weight).eq(3).all()
        with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
            optimizer.step(size=1)


def test_a_plain_gradient_of_a_dtensor_is_refused():
    with axes.simulate(2), axes.init_mesh("x=2", device_type="cpu"):
        weight = parameter()
        optimizer = axes.nn.local_optimizer(torch.optim.SGD, [weight], lr=0.1)
        weight.grad = torch.ones(4, 4)
        for call in (optimizer.step, lambda: axes.nn.clip_grad_norm_([weight], 1.0)):
            with pytest.raises(ShardingError, match=r"the gradient of a DTensor of shape \[4, 4\] is a plain tensor"):
                call()


def test_a_closure_that_fails_leaves_dtensors_where_they_were():
    with axes.simulate(2), axes.init_mesh("x=2", device_type="cpu"):
        weight = parameter()
        optimizer = axes.nn.local_optimizer(own_optimizers.Twice, [weight])
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        assert optimizer.param_groups[0]["params"] == [weight]
        assert not optimizer.state
