"""A leaf that axes makes has its gradient in its own sharding, whoever uses it first."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.runtime import torch_private

MAKERS: dict[str, Callable[[], DTensor]] = {
    "shard of a leaf": lambda: axes.shard(torch.ones(6, 8, requires_grad=True), "d f@tp"),
    "shard, then requires_grad_": lambda: axes.shard(torch.ones(6, 8), "d f@tp").requires_grad_(),
    "from_local": lambda: axes.from_local(torch.ones(6, 2), "d f@tp").requires_grad_(),
    "ones": lambda: axes.ones("d f@tp", d=6, f=8, requires_grad=True),
    "randn, then requires_grad_": lambda: axes.randn("d f@tp", d=6, f=8).requires_grad_(),
    "frozen and thawed": lambda: (
        axes.ones("d f@tp", d=6, f=8, requires_grad=True).requires_grad_(False).requires_grad_()
    ),
    "changed in place": lambda: axes.zeros("d f@tp", d=6, f=8).add_(1).requires_grad_(),
}
"""Leaves that are split over tp and replicated over dp."""

USES: dict[str, Callable[[DTensor, DTensor], torch.Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "linear": lambda x, w: F.linear(x, w.t()).square(),
    "redistribute": lambda x, w: w.redistribute(placements=axes.sharding_of(x).placements) * 2,
    "product": lambda x, w: w * w,
    "both": lambda x, w: x @ w + axes.einsum(x, w, "b@dp d, d f@tp -> b@dp f@tp"),
}


def gradients() -> list[str]:
    wrong = []
    with axes.init_mesh("dp=2 tp=4", device_type="cpu"):
        x = axes.shard(torch.arange(24.0).view(4, 6), "b@dp d")
        for (maker, make), (name, use) in ((m, u) for m in MAKERS.items() for u in USES.items()):
            w = make()
            whole = w.detach().full_tensor().requires_grad_()
            (expected,) = torch.autograd.grad(whole_use(name, x.full_tensor(), whole).sum(), whole)
            for times in (1, 2):
                summed(use(x, w))
                if axes.spec_of(w.grad) != "_ _@tp" or not torch.allclose(w.grad.full_tensor(), times * expected):
                    wrong.append(f"{maker}, {name}, {times}: {axes.spec_of(w.grad)}")
    return wrong


def whole_use(name: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return {"matmul": y, "linear": y.square(), "redistribute": w * 2, "product": w * w, "both": y + y}[name]


def summed(y: DTensor) -> None:
    """Backward from the sum of y, whose cotangent is sharded as y is."""
    y.backward(torch.ones_like(y))


def test_a_leaf_that_axes_made_resolves_its_gradient_whoever_uses_it_first(pool):
    for wrong in pool.run(gradients, timeout=120):
        assert wrong == []


def by_torch_alone(w: DTensor, x: DTensor) -> str:
    w.grad = None
    summed(x @ w)
    return axes.spec_of(w.grad)


def pending() -> None:
    with axes.init_mesh("dp=2 tp=4", device_type="cpu"):
        x = axes.ones("b@dp d", b=4, d=6)

        def by_axes(w: DTensor, **how: str) -> str:
            w.grad = None
            summed(axes.einsum(x, w, "b d, d f -> b f", **how))
            return axes.spec_of(w.grad)

        w = axes.ones("d f@tp", d=6, f=8, requires_grad=True)
        assert by_axes(w, grad="pending") == "_ _@tp | sum@dp"
        assert by_torch_alone(w, x) == "_ _@tp | sum@dp"  # what was asked for holds
        assert by_axes(w) == "_ _@tp"  # until something else is
        assert by_axes(w, grad="pending") == "_ _@tp | sum@dp"
        # Several uses in one computation: the last one counts.
        for first, last, spec in (("pending", "resolved", "_ _@tp"), ("resolved", "pending", "_ _@tp | sum@dp")):
            w.grad = None
            summed(axes.einsum(x, w, "b d, d f -> b f", grad=first) + axes.einsum(x, w, "b d, d f -> b f", grad=last))
            assert axes.spec_of(w.grad) == spec
            assert axes.unshard(w.grad).unique().tolist() == [8.0]
        n = axes.ones("n", n=4, requires_grad=True)
        with CommDebugMode() as sent:
            summed(axes.reshard(n, "n@tp", grad="pending"))
        assert axes.spec_of(n.grad) == "_@tp"
        assert not sent.get_total_counts()
        with torch.no_grad():  # where nothing is recorded nothing is said
            axes.reshard(w, "d f@()", grad="pending")
            w.requires_grad_(False).requires_grad_()
        assert by_axes(w) == "_ _@tp"


def test_a_pending_gradient_is_left_to_the_caller_who_asks_for_it(pool):
    pool.run(pending)


def pending_in_a_graph() -> list[tuple[str, str]]:
    found = []
    with axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        x = axes.ones("b@dp d", b=4, d=6)
        calls = {
            "einsum": lambda w, grad: axes.einsum(x, w, "b d, d f -> b f", grad=grad),
            "reshard": lambda w, grad: axes.reshard(w, "d@dp f@tp", grad=grad),
        }
        for call in calls.values():
            for leaf in ("axes'", "torch's"):
                specs = []
                for grad in ("resolved", "pending"):
                    torch._dynamo.reset()
                    w = axes.ones("d f@tp", d=6, f=8, requires_grad=True)
                    w = torch.nn.Parameter(w) if leaf == "torch's" else w
                    # Only a hook that has to go breaks the graph.
                    whole = leaf == "torch's" or grad == "resolved"
                    fast = torch.compile(call, backend="aot_eager", fullgraph=whole)
                    summed(fast(w, grad))
                    specs.append(axes.spec_of(w.grad))
                found.append(tuple(specs))
    return found


def test_a_pending_gradient_is_left_to_the_caller_of_a_graph(warm):
    for found in warm(pending_in_a_graph, 4, timeout=240):
        assert found == [("_ _@tp", "_ _@tp | sum@dp")] * 2 + [("_ _@tp", "_@dp _@tp")] * 2


def copies() -> None:
    with axes.init_mesh("dp=2 tp=4", device_type="cpu"):
        x = axes.ones("b@dp d", b=4, d=6)
        made = axes.ones("d f@tp", d=6, f=8, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            buffer = io.BytesIO()
            torch.save(made, buffer)
            buffer.seek(0)
            saved = torch.load(buffer, weights_only=False)
            copied, pickled = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
        others = {
            "saved": saved,
            "copied": copied,
            "pickled": pickled,
            "parameter": torch.nn.Parameter(made),
            "detached": made.detach().requires_grad_(),
        }
        for name, w in others.items():
            assert w.is_leaf, name
            assert w.requires_grad, name
            assert torch.equal(w.full_tensor(), made.full_tensor()), name
            # torch makes tensors without hooks: the first operation of axes gives them theirs.
            axes.einsum(x, w, "b d, d f -> b f")
            assert by_torch_alone(w, x) == "_ _@tp", name
        assert by_torch_alone(made, x) == "_ _@tp"


def test_copies_of_a_leaf_are_saved_without_a_warning_and_resolve_from_their_first_use_on(pool):
    pool.run(copies)


def first_uses() -> list[str]:
    """The sharding of a gradient that torch leaves pending, after each operation of axes that takes a leaf."""
    with axes.init_mesh("dp=2 tp=4", device_type="cpu") as mesh:
        x = axes.ones("b@dp d", b=4, d=6)
        uses: list[Callable[[DTensor], object]] = [
            axes.unshard,
            lambda w: axes.to_local(w, grad="whole"),
            lambda w: axes.lift(w, mesh),
            lambda w: axes.reshard(w, "d f@tp"),
            lambda w: axes.rearrange(w, "d f -> f d"),
            lambda w: axes.shard_map(torch.neg, "d f@tp -> d f@tp")(w),
        ]
        found = []
        for use in uses:
            w = torch.nn.Parameter(axes.ones("d f@tp", d=6, f=8))
            use(w)
            found.append(by_torch_alone(w, x))
        return found


def test_every_operation_of_axes_has_the_leaves_that_it_uses_resolve_their_gradients(pool):
    assert pool.run(first_uses) == [["_ _@tp"] * 6] * 8


def not_a_leaf() -> None:
    """What stops to be a leaf is one of torch's results, with its gradient as it comes."""
    with axes.init_mesh("dp=2 tp=4", device_type="cpu"):
        w = axes.ones("d f@tp", d=6, f=8, requires_grad=True)
        x = axes.ones("b@dp d", b=4, d=6)
        y = axes.zeros("d f@tp", d=6, f=8)
        y.add_(w)  # no longer a leaf
        came: list[str] = []
        y.register_hook(lambda g: came.append(axes.spec_of(g)))
        summed(x @ y)
        assert came == ["_ _@tp | sum@dp"]
        assert axes.spec_of(w.grad) == "_ _@tp"
        ids = axes.from_local(torch.arange(4), "n@dp")
        assert not ids._backward_hooks


def test_what_is_no_leaf_any_more_has_the_gradient_that_comes(pool):
    pool.run(not_a_leaf)


LOCAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gather": lambda x: axes.rearrange(x, "a@tp b -> a b"),
    "gather of dim 1": lambda x: axes.rearrange(x, "a b@tp -> a b"),
    "nothing": lambda x: axes.rearrange(x, "a@tp b -> a@tp b"),
    "transpose": lambda x: axes.rearrange(x, "a@tp b -> b a@tp"),
    "merge": lambda x: axes.rearrange(x, "a@tp b -> (a@tp b)"),
    "slice": lambda x: axes.rearrange(x, "a b -> a@tp b"),
    "reduce": lambda x: axes.reduce(x, "a@tp b -> a@tp", "sum"),
    "repeat": lambda x: axes.repeat(x, "a@tp b -> a@tp b 1"),
    "einsum": lambda x: axes.einsum(x, "a@tp b -> b a@tp"),
    "reshard": lambda x: axes.reshard(x, "a@tp b -> a b"),
    "psum": lambda x: axes.psum(x, "dp"),
}


WRITTEN: dict[str, tuple[tuple[int, int], Callable[[torch.Tensor], torch.Tensor]]] = {
    "gather": ((4, 8), lambda x: axes.rearrange(x, "a@tp b -> a b")),
    "gather of dim 1": ((4, 8), lambda x: axes.rearrange(x, "a b@tp -> a b")),
    "all-to-all": ((4, 8), lambda x: axes.rearrange(x, "a b@tp -> a@tp b")),
    "other ranks": ((4, 8), lambda x: axes.reshard(x, "a@(dp tp) b -> a@(tp dp) b")),
    "two axes": ((4, 8), lambda x: axes.reshard(x, "a@dp b@tp -> a@tp b@dp")),
    "uneven": ((3, 7), lambda x: axes.reshard(x, "a b | sum@tp -> a b@tp")),
    "uneven maximum": ((3, 7), lambda x: axes.reshard(x, "a b | max@tp -> a b@tp")),
    "inner factor": ((4, 8), lambda x: axes.rearrange(x, "(q=2 h@tp) b -> q h b", h=8)),
    "reduce": ((4, 8), lambda x: axes.reduce(x, "a@tp b -> b", "sum")),
    "maximum": ((4, 8), lambda x: axes.reduce(x, "a@tp b -> b@tp", "max")),
    "psum": ((4, 8), lambda x: axes.psum(x, "tp")),
    "all_gather": ((4, 8), lambda x: axes.all_gather(x, "tp", 0)),
    "psum_scatter": ((4, 8), lambda x: axes.psum_scatter(x, "tp", 1)),
    "all_to_all": ((4, 8), lambda x: axes.all_to_all(x, "tp", 1, 0)),
    "all_to_all of sizes": ((4, 8), lambda x: axes.all_to_all(x, "tp", send_sizes=[1] * 4, recv_sizes=[1] * 4)),
    "ppermute": ((4, 8), lambda x: axes.ppermute(x, "tp", shift=1)),
    "ppermute to oneself": ((4, 8), lambda x: axes.ppermute(x, "tp", perm=[(at, at) for at in range(4)])),
    "unshard": ((4, 8), lambda x: axes.unshard(axes.from_local(x, "a b@tp", grad="summed"))),
}
"""What sends anything, on a tensor of a shape on each rank: its result is nobody else's."""


def written_results() -> list[str]:
    """Results that can't be written in place, or whose gradient then isn't that of a copy."""
    wrong = []
    with axes.init_mesh("dp=2 tp=4", device_type="cpu") as mesh:
        for name, (shape, call) in WRITTEN.items():
            leaves = [torch.arange(-9.0, math.prod(shape) - 9).view(shape).requires_grad_() for _ in range(2)]
            result, copy = call(leaves[0].sin()), call(leaves[1].sin()).clone()
            try:
                result.mul_(mesh.rank + 2).relu_()
            except RuntimeError as error:
                wrong.append(f"{name}: {error}")
                result = result.mul(mesh.rank + 2).relu()
            for y in (result, copy.mul_(mesh.rank + 2).relu_()):
                y.square().sum().backward()
            if not torch.equal(leaves[0].grad, leaves[1].grad):
                wrong.append(f"{name}: the gradient isn't that of a copy")
    return wrong


def test_what_was_sent_may_be_written_in_place(pool):
    assert pool.run(written_results) == [[]] * 8


def written_in_graphs() -> list[str]:
    """The same of the results within a graph, which has to be one, and may serve several sizes."""
    wrong = []
    with axes.init_mesh("dp=2 tp=4", device_type="cpu"):
        for name in ("gather of dim 1", "all-to-all", "uneven", "reduce", "all_gather", "ppermute", "unshard"):
            torch._dynamo.reset()
            (rows, columns), call = WRITTEN[name]

            def written(x: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor] = call) -> torch.Tensor:
                return call(x.sin()).mul_(2).relu_()

            fast = torch.compile(written, fullgraph=True, backend="aot_eager")
            for more in (0, 8, 16):
                leaves = [torch.arange(-9.0, rows * (columns + more) - 9).view(rows, -1).requires_grad_() for _ in "12"]
                results = [function(leaf) for function, leaf in zip((written, fast), leaves, strict=True)]
                for y in results:
                    y.square().sum().backward()
                if not torch.equal(*results) or not torch.equal(*[leaf.grad for leaf in leaves]):
                    wrong.append(f"{name}: {columns + more} columns")
    return wrong


def test_it_may_be_in_a_graph_of_torch_compile(warm):
    assert warm(written_in_graphs, 8, timeout=300) == [[]] * 8


def shared_gradients() -> list[str]:
    """Operations on plain leaves after which two leaves have one memory for their gradients."""
    wrong = []
    with axes.init_mesh("dp=2 tp=4", device_type="cpu"):
        for name, call in LOCAL.items():
            one, two = (torch.arange(32.0).view(4, 8).add(start).requires_grad_() for start in (0, 1))
            for times in (1, 2):
                (call(one) + call(two)).square().sum().backward()
                if times == 1:
                    first = [x.grad.clone() for x in (one, two)]
                elif any(not torch.equal(x.grad, 2 * grad) for x, grad in zip((one, two), first, strict=True)):
                    wrong.append(f"{name}: a second backward isn't twice the first")
            before = two.grad.clone()
            one.grad.mul_(3)
            if not torch.equal(two.grad, before):
                wrong.append(f"{name}: one gradient is scaled with the other")
            if one.grad.untyped_storage().nbytes() > one.nbytes:
                wrong.append(f"{name}: a gradient keeps more memory than its own")
    return wrong


def test_plain_leaves_own_their_gradients(pool):
    assert pool.run(shared_gradients) == [[]] * 8


LAID: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row by row": lambda x: x.contiguous(),
    "column by column": lambda x: x.t().contiguous().t(),
    "one row for all": lambda x: x[:1].expand_as(x),
}


class Operations(torch_private.DispatchMode):
    """The names of torch's operations on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def laid_gradients(create_graph: bool) -> list[str]:
    """What is wrong with gradients of leaves that lie in memory in each way, and are split unevenly."""
    wrong = []
    warnings.filterwarnings("ignore", message="Using backward")
    with axes.init_mesh("dp=2 tp=4", device_type="cpu"):
        whole = torch.arange(42.0).view(6, 7)
        shard = axes.shard(whole, "d f@tp").to_local()
        for (way, laid), spec in itertools.product(LAID.items(), ("d f", "d f@tp", "d f@dp")):
            w = axes.from_local(laid(shard), "d f@tp", shape=(6, 7)).requires_grad_()
            y = axes.reshard(w, "d f")
            given = axes.shard(whole, spec)
            with Operations() as operations:
                y.backward(given, create_graph=create_graph)
            case, grad = f"{way}, {spec}", w.grad.detach()
            if axes.spec_of(grad) != "_ _@tp" or not torch.equal(axes.unshard(grad), whole):
                wrong.append(f"{case}: {axes.spec_of(grad)} {axes.unshard(grad).tolist()}")
            if grad.stride() != w.stride():
                wrong.append(f"{case}: the leaf's strides are {w.stride()}, the gradient's {grad.stride()}")
            local = grad.to_local()
            if not (local.t() if w.stride(0) == 1 else local).is_contiguous():
                wrong.append(f"{case}: the strides of the gradient's shard are {local.stride()}")
            copies = {"new_empty_strided.default", "copy_.default", "clone.default"} & {*operations.seen}
            if copies and spec != "d f@tp" and not create_graph:
                wrong.append(f"{case}: torch copies the gradient by {copies}")
            grad.zero_()
            if not torch.equal(axes.unshard(given), whole):
                wrong.append(f"{case}: the gradient that was handed over is changed with the leaf's")
    return wrong


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_lies_in_memory_as_its_leaf_does(pool, create_graph):
    assert pool.run(laid_gradients, create_graph) == [[]] * 8


IDENTITIES: dict[str, Callable[[DTensor], DTensor]] = {
    "rearrange": lambda w: axes.rearrange(w, "d f@tp -> d f@tp"),
    "einsum": lambda w: axes.einsum(w, "d f@tp -> d f@tp"),
    "two": lambda w: axes.reshard(axes.rearrange(w, "d f@tp -> d f@tp"), "d f@tp"),
    "sum": lambda w: axes.rearrange(w, "d f@tp -> d f@tp") + w,
}
"""Functions whose gradient is what they are handed, in another DTensor of the same shard."""


def gradients_of_others(name: str) -> list[str]:
    """What is wrong where a gradient is somebody else's, too: who hands it over, or keeps it in a hook."""
    wrong, kept, times = [], [], 2 if name == "sum" else 1
    with axes.init_mesh("dp=2 tp=4", device_type="cpu"):
        w, given = axes.zeros("d f@tp", d=6, f=7, requires_grad=True), axes.ones("d f@tp", d=6, f=7)
        for count in (1, 2, 3):
            y = IDENTITIES[name](w)
            y.register_hook(kept.append)
            y.backward(given)
            found = axes.unshard(w.grad).unique().tolist(), axes.unshard(given).unique().tolist()
            if found != ([count * times], [1]):
                wrong.append(f"after {count}: the leaf's gradient is {found[0]}, what was handed over {found[1]}")
        if not all(torch.equal(axes.unshard(each), torch.ones(6, 7)) for each in kept):
            wrong.append("what a hook has kept is changed")
    return wrong


@pytest.mark.parametrize("name", IDENTITIES)
def test_a_leaf_doesnt_add_to_a_gradient_that_others_have(pool, name):
    assert pool.run(gradients_of_others, name) == [[]] * 8
