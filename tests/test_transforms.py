"""Forward-mode differentiation and `torch.func`: every public function is right, or refuses before anything is sent.

What is right in forward mode is what numeric differences on the same ranks give, and what backward
gives: over all ranks `<g, J t> = <J' g, t>`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.algebra.errors import ShardingError
from axes.algebra.mesh import Mesh
from axes.runtime import torch_private

Call = Callable[[torch.Tensor], torch.Tensor]

LABELS, IDS = torch.tensor([0, 3, 2, 1]), torch.tensor([1, 0, 3])
ONES = torch.ones(4, 4)

SHARDS: dict[str, list[Call]] = {
    "psum": [lambda x: axes.psum(x, "tp"), lambda x: axes.psum(x, ("dp", "tp"))],
    "pmean": [lambda x: axes.pmean(x, "tp")],
    "pmax": [lambda x: axes.pmax(x, "tp")],
    "pmin": [lambda x: axes.pmin(x, "dp")],
    "all_gather": [lambda x: axes.all_gather(x, "tp", dim=1)],
    "psum_scatter": [lambda x: axes.psum_scatter(x, "tp", dim=1)],
    "all_to_all": [
        lambda x: axes.all_to_all(x, "tp", 0, 1),
        lambda x: axes.all_to_all(x, "tp", send_sizes=[2, 2], recv_sizes=[2, 2]),
    ],
    "ppermute": [lambda x: axes.ppermute(x, "dp", shift=1), lambda x: axes.ppermute(x, "tp", perm=[(0, 1)])],
    "reshard": [
        lambda x: axes.reshard(x, "a b@tp -> a b"),
        lambda x: axes.reshard(x, "a b | sum@tp -> a b"),
        lambda x: axes.reshard(x, "a b | mean@tp -> a@tp b"),
        lambda x: axes.reshard(x, "a b | max@tp -> a b"),
        lambda x: axes.reshard(x, "a b | sum@dp max@tp -> a@dp b"),
        lambda x: axes.reshard(x, "a b@tp -> a@tp b"),
        lambda x: axes.reshard(x, "a b -> a@tp b"),
        lambda x: axes.reshard(x, "a b | sum@tp -> a b", async_op=True),
        lambda x: axes.reshard(x, "a b | sum@tp -> a b", comm_dtype=torch.float64),
    ],
    "rearrange": [
        lambda x: axes.rearrange(x, "a b@tp -> b@tp a"),
        lambda x: axes.rearrange(x, "(a c) b@tp -> a (c b)", c=2),
        lambda x: axes.rearrange(x, "a b -> b a"),
    ],
    "reduce": [
        lambda x: axes.reduce(x, "a b@tp -> a", "sum"),
        lambda x: axes.reduce(x, "a@dp b@tp -> b", "mean"),
        lambda x: axes.reduce(x, "a b@tp -> a", "max"),
        lambda x: axes.reduce(x, "a b@(dp tp) -> a@tp", "min"),
        lambda x: axes.reduce(x, "a b@tp -> b@tp", "prod"),
        lambda x: axes.reduce(x, "a b -> b", "max"),
    ],
    "repeat": [lambda x: axes.repeat(x, "a b@tp -> a n@tp b", n=4), lambda x: axes.repeat(x, "a b -> a b 2")],
    "einsum": [
        lambda x: axes.einsum(x, x, "a b@tp, c b@tp -> a c"),
        lambda x: axes.einsum(x, "a b@tp -> a@tp"),
        lambda x: axes.einsum(x, x, "a b, a b -> a"),
    ],
    "softmax": [lambda x: axes.softmax(x, "a b@tp", over="b"), lambda x: axes.softmax(x, "a b", over="b")],
    "logsumexp": [lambda x: axes.logsumexp(x, "a b@(dp tp)", over="b")],
    "rms_norm": [lambda x: axes.rms_norm(x, "a b@tp", over="b", weight=x[0], b=8)],
    "layer_norm": [lambda x: axes.layer_norm(x, "a b@tp", over="b", weight=x[0], bias=x[1], b=8)],
    "cross_entropy": [lambda x: axes.cross_entropy(x, LABELS, "a b@tp, a -> ", b=8)],
    "embedding": [lambda x: axes.embedding(IDS, x, "n, a@tp b -> n b", a=8)],
}
"""Functions of plain shards, called on one of `[4, 4]`."""

SAME: list[Call] = [
    lambda x: axes.reshard(x, "a b@tp -> a b | same@tp"),
    lambda x: axes.reshard(x, "a b | sum@tp -> a b | same@tp"),
    lambda x: axes.cross_entropy(x, LABELS, "a b@tp, a -> | same@tp", b=8),
]
"""Functions of plain shards with gradients that aren't those of the sum of all ranks' losses."""

WHOLE: dict[str, list[Callable[[Any], Any]]] = {
    "shard": [lambda x: axes.shard(x, "a@tp b")],
    "from_local": [lambda x: axes.from_local(x, "a@tp b@dp")],
}
"""Functions of plain tensors that make a DTensor."""

DTENSORS: dict[str, list[Callable[[Any], Any]]] = {
    "unshard": [axes.unshard],
    "to_local": [lambda x: axes.to_local(x, grad="summed")],
    "lift": [lambda x: axes.lift(x, axes.sharding_of(x).mesh)],
    "constrain": [lambda x: axes.constrain(x, "a b", rules=axes.Rules(a="dp", b="tp"))],
    "reshard": [lambda x: axes.reshard(x, "a b"), lambda x: axes.reshard(x, "a b@tp")],
    "rearrange": [lambda x: axes.rearrange(x, "a@tp b -> b a@tp"), lambda x: axes.rearrange(x, "a b -> b a")],
    "reduce": [lambda x: axes.reduce(x, "a@tp b -> b", "sum"), lambda x: axes.reduce(x, "a b -> a", "max")],
    "repeat": [lambda x: axes.repeat(x, "a b -> a b n", n=2)],
    "einsum": [
        lambda x: axes.einsum(x, x, "a@tp b, a@tp c -> b c"),
        lambda x: axes.einsum(x, x, "a b, a b -> a b"),
        lambda x: axes.einsum(x, held("a b", ONES), "a@tp b, c b -> a@tp c"),
    ],
    "shard_map": [lambda x: axes.shard_map(lambda x: 2 * x, "a b -> a b")(x)],
    "softmax": [lambda x: axes.softmax(x, "a@tp b", over="a")],
    "logsumexp": [lambda x: axes.logsumexp(x, "a b", over="b")],
    "rms_norm": [lambda x: axes.rms_norm(x, "a b", over="b")],
    "layer_norm": [lambda x: axes.layer_norm(x, "a@tp b", over="a")],
    "cross_entropy": [lambda x: axes.cross_entropy(x, held("a@tp", LABELS), "a@tp b, a@tp -> ")],
    "embedding": [lambda x: axes.embedding(held("n", IDS), x, "n, a@tp b -> n b")],
}
"""Functions of DTensors, called on one of `[4, 4]` whose first dim is split over `tp`."""

NOT_OF_TENSORS = [
    "Axis",
    "AxesError",
    "CostModel",
    "DesyncError",
    "ExpressionError",
    "GroupOptions",
    "Layout",
    "LayoutRules",
    "Mesh",
    "MeshError",
    "Plan",
    "Rules",
    "Sharding",
    "ShardingError",
    "SizeError",
    "annotate",
    "axis_index",
    "axis_size",
    "connect",
    "debug",
    "destroy_process_groups",
    "empty",
    "explain",
    "full",
    "init_mesh",
    "launch",
    "nn",
    "ones",
    "plan",
    "process_groups",
    "rand",
    "randn",
    "shard_module",
    "show",
    "simulate",
    "use_mesh",
    "use_rules",
    "verify",
    "zeros",
    "sharding_of",
    "spec_of",
    "transfer",
]
"""What takes no tensor, or reads nothing of it but how it is sharded."""


@functools.cache
def held(spec: str, value: torch.Tensor) -> Any:
    """A DTensor that was made before."""
    return axes.shard(value, spec)


def test_every_public_function_of_tensors_is_in_a_table():
    assert {*SHARDS, *WHOLE, *DTENSORS, *NOT_OF_TENSORS} == {*axes.__all__}


def mesh() -> Mesh:
    return axes.init_mesh("dp=4 tp=2", device_type="cpu")


def drawn(seed: int, shape: tuple[int, ...] = (4, 4)) -> torch.Tensor:
    """Other numbers on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")


# forward mode


def jvp(call: Call, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(x, t)))
        return value + 0, torch.zeros_like(value) if tangent is None else tangent + 0


def numeric(call: Call, x: torch.Tensor, t: torch.Tensor, step: float = 1e-6) -> torch.Tensor:
    return (call(x + step * t).detach() - call(x - step * t).detach()) / (2 * step)


def everywhere(x: torch.Tensor) -> float:
    total = x.detach().double().sum()
    dist.all_reduce(total)
    return float(total)


def check_forward_mode(name: str) -> None:
    with mesh():
        for seed, call in enumerate(SHARDS[name]):
            x, t = drawn(seed), drawn(seed + 50)
            slope = check_tangents(call, x, t)
            for numbers in (x, x.round()):  # the second with ties
                check_transposed(call, numbers, t, seed)
            # The gradient of a tangent is the tangent of the gradient.
            leaf = x.clone().requires_grad_()
            _, along = jvp(lambda x, call=call: call(x) ** 2, leaf, t)
            (back,) = torch.autograd.grad(along.sum(), leaf)
            torch.testing.assert_close(back, slope, rtol=1e-6, atol=1e-6)


def check_tangents(call: Call, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Compares tangents of the value and of a gradient with numeric differences; the second of these."""
    value, tangent = jvp(call, x, t)
    torch.testing.assert_close(value, call(x).detach())
    torch.testing.assert_close(tangent, numeric(call, x, t), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(jvp(call, x, t)[1], tangent)
    slope = gradient_of_square(call)
    found = jvp(slope, x, t)[1].detach()
    torch.testing.assert_close(found, numeric(slope, x, t), rtol=1e-5, atol=1e-5)
    return found


def check_transposed(call: Call, x: torch.Tensor, t: torch.Tensor, seed: int) -> None:
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    g = drawn(seed + 90, tuple(y.shape))
    (back,) = torch.autograd.grad(y, leaf, g)
    _, tangent = jvp(call, x, t)
    assert everywhere(g * tangent) == pytest.approx(everywhere(back * t), rel=1e-9, abs=1e-9)


def gradient_of_square(call: Call) -> Call:
    def slope(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad((call(x) ** 2).sum(), x, create_graph=True)[0]

    return slope


def check_same() -> None:
    with mesh():
        for seed, call in enumerate(SAME):
            check_tangents(call, drawn(seed), drawn(seed + 50))


def test_forward_mode_of_what_is_same_is_right(pool):
    pool.run(check_same)


@pytest.mark.parametrize("name", SHARDS)
def test_forward_mode_of_plain_shards_is_right(pool, name):
    pool.run(check_forward_mode, name)


def check_inside_of_a_region() -> None:
    """A level that is opened inside of a region sees plain shards."""
    with mesh():
        x, t = (torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))

        def slope(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return jvp(lambda x: axes.psum((x**3).sum(0), "tp"), x, t)[1]

        found = axes.shard_map(slope, "a@tp b, a@tp b -> b")(axes.shard(x, "a@tp b"), axes.shard(t, "a@tp b"))
        torch.testing.assert_close(axes.unshard(found), (3 * x**2 * t).sum(0))


def test_a_region_may_differentiate_its_shards_forward(pool):
    pool.run(check_inside_of_a_region)


# refusals

TANGENT = "has a tangent, and DTensors have no forward-mode differentiation"
TRANSFORM = "inside a transform of torch.func"
BATCH = "found a batch of gradients"

TRANSFORMS: dict[str, Callable[[Call, torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "vectorized forward jacobian": lambda f, x: torch.autograd.functional.jacobian(
        f, x, vectorize=True, strategy="forward-mode"
    ),
}

OF_DTENSORS = ("grad", "vjp", "vmap", "jacrev")
"""The others end in torch, which has no forward mode for DTensors (2.13)."""


def refused(call: Callable[[], Any], text: str) -> str:
    """Nothing where a call is refused with this text and sends nothing; what it did otherwise."""
    with CommDebugMode() as counted:
        try:
            found = call()
        except ShardingError as error:
            ok = text in str(error) and counted.get_total_counts() == 0
            return "" if ok else f"{counted.get_total_counts()} sent, {error}"
        except Exception as error:
            return repr(error)
    return f"no error, {found}"


def communicates(call: Call, x: torch.Tensor) -> bool:
    with CommDebugMode() as counted:
        call(x)
    return counted.get_total_counts() > 0


def check_transforms() -> list[str]:
    wrong = []
    with mesh():
        x = drawn(0)
        for name, calls in (*SHARDS.items(), *WHOLE.items()):
            for at, call in enumerate(calls):
                for how, transform in TRANSFORMS.items():
                    said = refused(lambda call=call, transform=transform: transform(call, x), TRANSFORM)
                    # What sends nothing may be right instead.
                    if said.startswith("no error") and name in SHARDS and not communicates(call, x):
                        said = "" if is_right(call, how, x) else "wrong"
                    wrong += [f"{name} {at} {how}: {said}"] if said else []
        whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        for name, calls in DTENSORS.items():
            for at, call in enumerate(calls):
                value = axes.shard(whole, "a@tp b")
                call(value)
                for how in OF_DTENSORS:

                    def summed(x: Any, call: Callable[[Any], Any] = call) -> Any:
                        found = call(x)
                        return found.sum() if isinstance(found, torch.Tensor) else found

                    said = refused(lambda how=how, value=value, f=summed: TRANSFORMS[how](f, value), TRANSFORM)
                    wrong += [f"{name} {at} {how} of a DTensor: {said}"] if said else []
    return wrong


def is_right(call: Call, how: str, x: torch.Tensor) -> bool:
    """Whether a transform of what sends nothing gives what autograd does."""
    if how == "vmap":
        return torch.allclose(torch.func.vmap(call)(torch.stack([x, 2 * x]))[1], call(2 * x))
    if how == "grad":
        (wanted,) = torch.autograd.grad(call(leaf := x.clone().requires_grad_()).sum(), leaf)
        return torch.allclose(torch.func.grad(lambda x: call(x).sum())(x), wanted)
    return True


def test_transforms_of_torch_func_are_right_or_refused_before_anything_is_sent(pool):
    assert pool.run(check_transforms) == [[]] * 8


def check_functional_calls() -> None:
    """torch's counter of collectives doesn't take wrapped parameters, so what is sent isn't counted here."""
    with mesh():
        layer = axes.shard_module(torch.nn.Linear(4, 4, bias=False), {"weight": "a@tp b"})
        region = axes.shard_map(layer, "n b -> n a@tp")
        weight, x = axes.shard(ONES, "a@tp b"), axes.shard(ONES, "n b")
        for how in OF_DTENSORS:
            for inputs in (x, x.to_local()):
                call = lambda w, x=inputs: torch.func.functional_call(region, {"weight": w}, (x,))  # noqa: E731
                with pytest.raises(ShardingError, match=f"shard_map 'n b -> n a@tp' was called {TRANSFORM}"):
                    TRANSFORMS[how](call, weight)
        assert axes.spec_of(torch.func.functional_call(region, {"weight": weight}, (x,))) == "_ _@tp"


def test_a_functional_call_of_a_region_in_a_transform_is_refused(pool):
    pool.run(check_functional_calls)


def check_closed_over() -> list[str]:
    """Tensors that a transform hasn't wrapped are what they are, unless they need a gradient."""
    with mesh():
        x, w = drawn(0), drawn(1)
        shared = axes.psum(w, "tp")
        found = torch.func.grad(lambda x: (x * axes.psum(w, "tp")).sum())(x)
        torch.testing.assert_close(found, shared)
        leaf = w.clone().requires_grad_()
        sharded = axes.shard(torch.ones(4, 4, dtype=torch.float64), "a@tp b").requires_grad_()
        calls = [
            lambda: torch.func.grad(lambda x: (x * axes.psum(leaf, "tp")).sum())(x),
            lambda: torch.func.grad(lambda x: (x * axes.reshard(leaf, "a b | sum@tp -> a b")).sum())(x),
            lambda: torch.func.grad(lambda x: (x * axes.unshard(sharded)).sum())(x),
            lambda: torch.func.grad(lambda x: (x * axes.rearrange(sharded, "a@tp b -> b a").to_local()).sum())(x),
        ]
        return [said for call in calls if (said := refused(call, TRANSFORM))]


def test_what_a_transform_closes_over_is_used_unless_it_needs_a_gradient(pool):
    assert pool.run(check_closed_over) == [[]] * 8


def check_dual_dtensors() -> list[str]:
    wrong = []
    with mesh():
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        plain = axes.shard(x, "a@tp b")
        for call in (call for calls in DTENSORS.values() for call in calls):
            call(plain)
        with forward_ad.dual_level():
            whole = forward_ad.make_dual(x, x)
            local = forward_ad.make_dual(plain.to_local(), plain.to_local())
            dual = torch_private.dtensor(local, torch_private.spec_of(plain))
            tables = ((WHOLE, whole), (DTENSORS, dual))
            for name, call, value in [(n, c, v) for table, v in tables for n, calls in table.items() for c in calls]:
                said = refused(lambda call=call, value=value: call(value), TANGENT)
                wrong += [f"{name}: {said}"] if said else []
            said = refused(lambda: axes.shard_map(lambda x: x * local, "a@tp b -> a@tp b")(plain), TANGENT)
            wrong += [f"closed over: {said}"] if said else []
            # What has no tangent isn't refused.
            assert axes.unshard(axes.reshard(plain, "a b@tp")).equal(x)
            assert axes.psum(torch.tensor([1, 2]), "tp").tolist() == [2, 4]
    return wrong


def test_a_dtensor_with_a_tangent_is_refused_before_anything_is_sent(pool):
    assert pool.run(check_dual_dtensors) == [[]] * 8


def check_batches() -> list[str]:
    wrong = []
    with mesh():
        x = drawn(0)
        for name, calls in SHARDS.items():
            for at, call in enumerate(calls):
                if not communicates(lambda x, call=call: backward(call, x), x):
                    continue
                leaf = x.clone().requires_grad_()
                y = call(leaf)
                batch = torch.stack([y.detach(), y.detach()])

                def many(y: Any = y, leaf: Any = leaf, batch: Any = batch) -> Any:
                    return torch.autograd.grad(y, leaf, batch, is_grads_batched=True)

                said = refused(many, BATCH)
                wrong += [f"{name} {at}: {said}"] if said else []
        leaf = axes.shard(torch.ones(4, 4), "a@tp b").requires_grad_()
        for call in (axes.unshard, lambda x: axes.to_local(axes.rearrange(x, "a b -> a b 1"), grad="summed")):
            y = call(leaf)
            batch = torch.ones(2, *y.shape)
            said = refused(lambda y=y, b=batch: torch.autograd.grad(y, leaf, b, is_grads_batched=True), BATCH)
            wrong += [f"of a DTensor: {said}"] if said else []
    return wrong


def backward(call: Call, x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    return torch.autograd.grad(y.sum(), leaf)[0]


def test_a_batch_of_gradients_is_refused(pool):
    assert pool.run(check_batches) == [[]] * 8


# what is no transform


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return axes.psum(self.weight * x, "tp")


def check_functional_call() -> None:
    with mesh():
        x, weight = drawn(0), torch.full((4,), 3.0, dtype=torch.float64, requires_grad=True)
        y = torch.func.functional_call(Scaled(), {"weight": weight}, (x,))
        torch.testing.assert_close(y, axes.psum(3 * x, "tp"))
        (found,) = torch.autograd.grad(y.sum(), weight)
        torch.testing.assert_close(found, 2 * x.sum(0))
        # What the errors say to write.
        jacobian = torch.autograd.functional.jacobian(lambda x: axes.psum(x, "tp"), x[0])
        torch.testing.assert_close(jacobian, 2 * torch.eye(4, dtype=torch.float64))
        _, along = torch.autograd.functional.jvp(lambda x: axes.psum(x**2, "tp"), x, x)
        torch.testing.assert_close(along, 2 * axes.psum(x**2, "tp"))
        whole = torch.arange(16.0).view(4, 4)
        value, v = axes.shard(whole, "a@tp b"), axes.shard(whole + 1, "a@tp b")
        _, along = torch.autograd.functional.jvp(lambda x: axes.rearrange(x**2, "a@tp b -> b@tp a"), value, v)
        torch.testing.assert_close(axes.unshard(along), (2 * whole * (whole + 1)).mT)


def test_functional_call_and_torch_autograd_functional_work(pool):
    pool.run(check_functional_call)


# torch.compile


def check_compiled() -> list[str]:
    """A level that is open, or a transform around it, takes a function out of its graph, wherever it was compiled."""
    wrong = []
    calls: dict[str, Call] = {name: SHARDS[name][0] for name in ("psum", "pmax", "reshard")}
    with axes.init_mesh("dp=1 tp=2", device_type="cpu"):
        x, t = drawn(0), drawn(1)
        for name, call in calls.items():
            torch._dynamo.reset()
            compiled = torch.compile(call, backend="aot_eager")
            if name != "pmax":
                compiled(x)  # a graph that was made before a level is open
            torch.testing.assert_close(jvp(compiled, x, t)[1], jvp(call, x, t)[1])
            torch.testing.assert_close(compiled(x), call(x))
            for how in ("grad", "vmap"):
                torch._dynamo.reset()
                inside = torch.compile(lambda x, how=how, call=call: TRANSFORMS[how](call, x), backend="aot_eager")
                said = refused(lambda inside=inside: inside(x), TRANSFORM)
                wrong += [f"{name} {how}: {said}"] if said else []
    return wrong


def test_compiled_functions_are_right_or_refused(warm):
    assert warm(check_compiled, 2) == [[]] * 2
