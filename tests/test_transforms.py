"""Forward-mode differentiation and `torch.func`: every public function is right, or refuses before anything is sent.

What is right in forward mode is what numeric differences on the same ranks give, and what backward
gives: over all ranks `<g, J t> = <J' g, t>`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes import ShardingError
from tests.common import case

Call = Callable[[torch.Tensor], torch.Tensor]

LABELS, IDS = torch.tensor([0, 3, 2, 1]), torch.tensor([1, 0, 3])
ONES = torch.ones(4, 4)

# fmt: off
SHARDS: dict[str, list[Call]] = {
    "psum": [lambda x: axes.psum(x, "tp"), lambda x: axes.psum(x, ("dp", "tp"))],
    "pmean": [lambda x: axes.pmean(x, "tp")],
    "pmax": [lambda x: axes.pmax(x, "tp")],
    "pmin": [lambda x: axes.pmin(x, "dp")],
    "all_gather": [lambda x: axes.all_gather(x, "tp", dim=1)],
    "psum_scatter": [lambda x: axes.psum_scatter(x, "tp", dim=1)],
    "all_to_all": [lambda x: axes.all_to_all(x, "tp", 0, 1), lambda x: axes.all_to_all(x, "tp", send_sizes=[2, 2], recv_sizes=[2, 2])],
    "ppermute": [lambda x: axes.ppermute(x, "dp", shift=1), lambda x: axes.ppermute(x, "tp", perm=[(0, 1)])],
    "reshard": [
        lambda x: axes.reshard(x, "a b@tp -> a b"),
        lambda x: axes.reshard(x, "a b | sum@tp -> a b"),
        lambda x: axes.reshard(x, "a b | mean@tp -> a@tp b"),
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
    "log_softmax": [lambda x: axes.log_softmax(x, "a b@tp", over="b")],
    "logsumexp": [lambda x: axes.logsumexp(x, "a b@(dp tp)", over="b")],
    "entropy": [lambda x: axes.entropy(x, "a b@tp", over="b")],
    "topk": [lambda x: axes.topk(x, "a b@tp", 2, over="b", b=8)[0]],
    "rms_norm": [lambda x: axes.rms_norm(x, "a b@tp", over="b", weight=x[0], b=8)],
    "layer_norm": [lambda x: axes.layer_norm(x, "a b@tp", over="b", weight=x[0], bias=x[1], b=8)],
    "cross_entropy": [lambda x: axes.cross_entropy(x, LABELS, "a b@tp, a -> ", b=8)],
    "embedding": [lambda x: axes.embedding(IDS, x, "n, a@tp b -> n b", a=8)],
}
# fmt: on
"""Functions of plain shards, called on one of `[4, 4]`."""

WHOLE: dict[str, list[Callable[[Any], Any]]] = {
    "shard": [lambda x: axes.shard(x, "a@tp b")],
    "from_local": [lambda x: axes.from_local(x, "a@tp b@dp")],
}
"""Functions of plain tensors that make a DTensor."""

DTENSORS: dict[str, list[Callable[[Any], Any]]] = {
    "unshard": [axes.unshard],
    "to_local": [lambda x: axes.to_local(x, grad="summed")],
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

NOT_OF_TENSORS = {
    "AxesError", "Axis", "CostModel", "DesyncError", "ExpressionError", "GroupOptions", "Layout", "LayoutRules",
    "Mesh", "MeshError", "Plan", "Rules", "Sharding", "ShardingError", "SizeError", "Transfer", "annotate", "argmax", "axis_index",
    "axis_size", "connect", "convert", "debug", "destroy_process_groups", "empty", "explain", "full", "init_mesh", "launch",
    "nn", "ones", "plan", "process_groups", "rand", "randn", "shard_module", "sharding_of", "show", "simulate",
    "spec_of", "transfer", "use_mesh", "use_rules", "verify", "zeros",
}  # fmt: skip
"""What takes no tensor, or reads nothing of it but how it is sharded."""


@functools.cache
def held(spec: str, value: torch.Tensor) -> Any:
    """A DTensor that was made before."""
    return axes.shard(value, spec)


def test_every_public_function_of_tensors_is_in_a_table():
    assert {*SHARDS, *WHOLE, *DTENSORS, *NOT_OF_TENSORS} == {*axes.__all__}


def mesh() -> axes.Mesh:
    return axes.init_mesh("dp=4 tp=2", device_type="cpu")


def drawn(seed: int, shape: tuple[int, ...] = (4, 4)) -> torch.Tensor:
    """Other numbers on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")


# forward mode


def check_forward_mode(name: str) -> None:
    with mesh(), forward_ad.dual_level():
        for seed, call in enumerate(SHARDS[name]):
            x = drawn(seed)
            with case(f"call {seed}"):
                assert not refused(lambda call=call, x=x: call(forward_ad.make_dual(x, x)), TANGENT)


@pytest.mark.parametrize("name", SHARDS)
def test_forward_mode_of_plain_shards_is_refused_before_anything_is_sent(pool, name):
    pool.run(check_forward_mode, name)


# refusals

TANGENT = "was called in forward-mode differentiation"
TRANSFORM = "inside a transform of torch.func"
BATCH = "found a batch of gradients"

# fmt: off
TRANSFORMS: dict[str, Callable[[Call, torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "vectorized forward jacobian": lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
}
# fmt: on

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


def check_transforms(name: str) -> None:
    with mesh():
        x, whole = drawn(0), torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        for call, (how, transform) in itertools.product(SHARDS.get(name, []) + WHOLE.get(name, []), TRANSFORMS.items()):
            text = TANGENT if "forward" in how else TRANSFORM
            with case(f"{how} of plain tensors"):
                assert not refused(lambda call=call, transform=transform: transform(call, x), text)
        value = axes.shard(whole, "a@tp b")
        for call, how in itertools.product(DTENSORS.get(name, []), OF_DTENSORS):
            call(value)

            def summed(x: Any, call: Callable[[Any], Any] = call) -> Any:
                found = call(x)
                return found.sum() if isinstance(found, torch.Tensor) else found

            with case(f"{how} of DTensors"):
                assert not refused(lambda how=how, f=summed: TRANSFORMS[how](f, value), TRANSFORM)
        for call in SHARDS.get(name, [])[:1] + DTENSORS.get(name, [])[:1] * (name in ("unshard", "to_local")):
            leaf = (x if name in SHARDS else value).detach().clone().requires_grad_()
            y = call(leaf)
            with CommDebugMode() as sent:
                torch.autograd.grad(y, leaf, torch.ones_like(y), retain_graph=True)
            if sent.get_total_counts():
                batch = torch.ones(2, *y.shape, dtype=y.dtype)
                assert not refused(functools.partial(torch.autograd.grad, y, leaf, batch, is_grads_batched=True), BATCH)


@pytest.mark.parametrize("name", sorted({*SHARDS, *WHOLE, *DTENSORS}))
def test_transforms_of_torch_func_are_refused_before_anything_is_sent(pool, name):
    pool.run(check_transforms, name)


def check_dual_dtensors() -> None:
    with mesh():
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        plain = axes.shard(x, "a@tp b")
        for call in itertools.chain(*DTENSORS.values()):
            call(plain)
        with forward_ad.dual_level():
            whole, local = (forward_ad.make_dual(each, each) for each in (x, plain.to_local()))
            dual = DTensor(local, plain._spec, requires_grad=False)
            closed = {"closed over": [lambda x: axes.shard_map(lambda x: x * local, "a@tp b -> a@tp b")(plain)]}
            for table, value in ((WHOLE, whole), (DTENSORS, dual), (closed, None)):
                for name, call in [(name, call) for name, calls in table.items() for call in calls]:
                    with case(name):
                        assert not refused(lambda call=call, value=value: call(value), TANGENT)


def test_a_dtensor_with_a_tangent_is_refused_before_anything_is_sent(pool):
    pool.run(check_dual_dtensors)


# what is no transform


def check_functional() -> None:
    """What the errors say to write."""
    with mesh():
        x = drawn(0)
        jacobian = torch.autograd.functional.jacobian(lambda x: axes.psum(x, "tp"), x[0])
        torch.testing.assert_close(jacobian, 2 * torch.eye(4, dtype=torch.float64))
        _, along = torch.autograd.functional.jvp(lambda x: axes.psum(x**2, "tp"), x, x)
        torch.testing.assert_close(along, 2 * axes.psum(x**2, "tp"))
        whole = torch.arange(16.0).view(4, 4)
        value, v = axes.shard(whole, "a@tp b"), axes.shard(whole + 1, "a@tp b")
        _, along = torch.autograd.functional.jvp(lambda x: axes.rearrange(x**2, "a@tp b -> b@tp a"), value, v)
        torch.testing.assert_close(axes.unshard(along), (2 * whole * (whole + 1)).mT)


def test_torch_autograd_functional_works(pool):
    pool.run(check_functional)


# --- modes of torch: what they must not change is compared bit for bit


@contextlib.contextmanager
def setting(how: Callable[[Any], object], value: Any, back: Any) -> Iterator[None]:
    how(value)
    try:
        yield
    finally:
        how(back)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "float64": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: setting(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "meta": lambda: setting(torch.set_default_device, "meta", None),
    "meta by with": lambda: torch.device("meta"),
}

Results = list[tuple[str, torch.Tensor]]


def results(inputs: tuple[torch.Tensor, DTensor, torch.Tensor], gradients: bool) -> Results:
    """What every function of the tables gives, and the gradient of the sum of its squares."""
    held.cache_clear()
    shard, sharded, whole = inputs
    tables = ((SHARDS, shard), (DTENSORS, sharded), (WHOLE, whole))
    found: Results = []
    for name, call, x in [(n, c, x) for table, x in tables for n, calls in table.items() for c in calls]:
        # In inference mode torch has no view of a DTensor that was made outside of it, so no detach (2.13).
        leaf = x.detach().requires_grad_() if gradients and x is not whole else x
        y = call(leaf)
        value = axes.unshard(y) if isinstance(y, DTensor) else y
        found.append((name, value.detach()))
        if value.requires_grad:
            (slope,) = torch.autograd.grad((value**2).sum(), leaf)
            found.append((f"gradient of {name}", axes.unshard(slope) if isinstance(slope, DTensor) else slope))
    for make in (axes.rand, axes.randn):
        assert make("a@tp b", a=4, b=2, dtype=torch.float32).device.type == "cpu"
    return found


def inputs() -> tuple[torch.Tensor, DTensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 4, generator=generator, device="cpu", dtype=torch.float32)
    return drawn(0), axes.shard(whole, "a@tp b"), whole


def compare(got: Results, wanted: Results, mode: str) -> None:
    assert [name for name, _ in got] == [name for name, _ in wanted], mode
    for (name, mine), (_, theirs) in zip(got, wanted, strict=True):
        with case(f"{name} under {mode}"):
            assert (mine.dtype, mine.device) == (theirs.dtype, theirs.device)
            assert torch.equal(mine, theirs)


def check_mode(mode: str) -> None:
    gradients = mode not in ("inference", "no gradients")
    with mesh():
        before = inputs()
        wanted = results(before, gradients)
        with MODES[mode]():
            compare(results(before, gradients), wanted, mode)
            compare(results(inputs(), gradients), wanted, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_changes_no_result_and_no_gradient(pool, mode):
    pool.run(check_mode, mode)


def first_use(mode: str) -> None:
    """The mesh, its groups and all that is kept is made under the mode; what comes after it is as ever."""
    with MODES[mode](), axes.init_mesh("dp=1 tp=2", device_type="cpu"):
        first = results(inputs(), gradients=False)
    with axes.init_mesh("dp=1 tp=2", device_type="cpu"):
        compare(first, results(inputs(), gradients=False), mode)
        assert len(results(inputs(), gradients=True)) > len(first)


@pytest.mark.parametrize("mode", ["inference", "meta"])
def test_nothing_that_is_kept_belongs_to_a_mode(world, mode):
    world(first_use, 2, mode)


def follow_defaults() -> None:
    with mesh(), MODES["float64"](), MODES["meta"]():
        for made in (axes.zeros("a@tp", a=4), axes.full("a@tp", 2.0, a=4), axes.rand("a@tp", a=4)):
            assert made.dtype == torch.float64
            assert made.to_local().device.type == "cpu"


def test_factories_follow_the_default_dtype_and_the_device_of_the_mesh(pool):
    pool.run(follow_defaults)
