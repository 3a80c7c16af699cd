"""Regions by hand: how names flow, trees, meshes, specs by name, what is closed over, memory, and what `check` compares.

The law of regions draws their values and gradients; corners of these are in `test_corners`.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

import axes
from axes import all_gather, axis_index, axis_size, psum, shard_map
from tests.common import error_of, numbers

SAME = "n@tp d -> n@tp d"


def mesh() -> axes.Mesh:
    return axes.init_mesh("dp=2 cp=2 tp=2", "rest = cp tp", "(dp cp tp) = rows ep", ep=4, device_type="cpu")


def whole(x: torch.Tensor) -> torch.Tensor:
    return axes.unshard(x).detach()


def sharded(seed: int = 0) -> DTensor:
    return axes.shard(numbers(4, 3, seed=seed), "n@tp d")


# --- names that flow --------------------------------------------------------------------------------

# fmt: off
FLOWS = [
    # a region, what it does, an operand with its spec, the spec of the result, and the result on one device
    ("b s d -> b s d", torch.cos, (5, 4, 6), "b@dp s@cp d", "_@dp _@cp _", torch.cos),
    ("... d -> ... d", torch.cos, (5, 4, 6), "b@dp s@cp d", "_@dp _@cp _", torch.cos),
    ("b=5 ... -> ... | sum@dp", lambda x: x.sum(0) / 2, (5, 4, 6), "b s@cp d", "_@cp _ | sum@dp", lambda x: x.sum(0)),
    ("b@dp d -> b@(dp tp) d", lambda x: x.tensor_split(2, 0)[axis_index("tp")], (8, 3), "b@dp d", "_@(dp tp) _", torch.clone),
    ("s@cp d -> s d", lambda x: all_gather(x, "cp"), (4, 3), "s@cp d@tp", "_ _@tp", torch.clone),
    ("(h d) e -> (h d) e", torch.neg, (8, 3), "n@tp e", "_@tp _", torch.neg),
    ("(three=3 h=4@tp d) e -> (h@tp d) e", lambda w: w.unflatten(0, (3, 2, 2))[0].flatten(0, 1), (24, 5), "(three=3 h=4@tp d) e", "_@tp _", lambda w: w[:8]),
    ("n@dp d -> n@dp two=2", lambda x: x[:, :1].expand(-1, 2), (5, 3), "n@dp d", "_@dp _", lambda x: x[:, :1].expand(-1, 2)),
    ("s@rest d -> s d", lambda x: all_gather(x, "rest"), (8, 3), "s@(cp tp) d", "_ _", torch.clone),
    ("s@(cp tp) d -> s@rest d", torch.neg, (8, 3), "s@(cp tp) d", "_@(cp tp) _", torch.neg),
]
# fmt: on


def flowing(number: int) -> None:
    text, inside, shape, spec, result, theirs = FLOWS[number]
    with mesh():
        x = axes.shard(numbers(*shape), spec)
        y = shard_map(inside, text)(x)
        assert axes.spec_of(y) == result
        torch.testing.assert_close(whole(y), theirs(numbers(*shape)))


@pytest.mark.parametrize("number", range(len(FLOWS)), ids=[row[0] for row in FLOWS])
def test_a_name_without_a_place_leaves_with_the_split_it_came_with(pool, number):
    pool.run(flowing, number)


# --- trees and arguments ----------------------------------------------------------------------------


@dataclass
class Output:
    """Like a model's: registered below."""

    logits: Any
    note: str = ""


@dataclass
class Config:
    """Opaque to pytree."""

    value: Any


class Pair(NamedTuple):
    first: Any
    second: Any


class Colour(enum.Enum):
    RED = 1


torch.export.register_dataclass(Output)

TREES: list[Callable[[Any, Any], Any]] = [
    lambda a, b: (a, [b, None, 1.5]),
    lambda a, b: {"z": a, "a": b},
    lambda a, b: Pair(a, (b, "text")),
    lambda a, b: collections.OrderedDict(z=a, a=b),
    lambda a, b: collections.defaultdict(list, z=a, a=b),
    lambda a, b: collections.deque([a, b], maxlen=4),
    lambda a, b: Output([a], "note") if b is None else Output({"x": a, "y": b}, "note"),
    lambda a, b: [torch.float32, torch.device("cpu"), torch.Size([1]), Colour.RED, b"bytes", 1j, a, True, b],
]


def trees() -> None:
    with mesh():
        x, y = sharded(), sharded(1)
        for build in TREES:
            seen: list[Any] = []

            def body(tree: Any, build: Any = build, seen: list[Any] = seen) -> Any:
                seen.append(tree)
                a, b = leaves(tree)
                return build(a * 2, b + 1)

            found = shard_map(body, "n@tp d, n@tp d -> n@tp d, n@tp d")(build(x, y))
            for tree in (found, seen[0]):
                assert type(tree) is type(build(x, y))
            assert all(not isinstance(t, DTensor) for t in leaves(seen[0]))
            a, b = leaves(found)
            torch.testing.assert_close(axes.unshard(a), numbers(4, 3) * 2)
            torch.testing.assert_close(axes.unshard(b), numbers(4, 3, seed=1) + 1)
        found = shard_map(lambda t: collections.defaultdict(list, z=t["z"]), SAME)({"z": x})
        assert found["other"] == []
        assert shard_map(lambda t: collections.deque([t], maxlen=2), SAME)(x).maxlen == 2
        assert shard_map(lambda x, c, f: x * c.value, SAME)(x, Config(3), len).shape == (4, 3)


def leaves(tree: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def test_trees_are_those_that_pytree_knows(pool):
    pool.run(trees)


@shard_map("b@dp -> b@dp")
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Twice x."""
    return x * 2


def without_tensors() -> None:
    with mesh() as m:
        out = shard_map(lambda: torch.full((2,), float(axis_index("tp"))), "-> n@tp")()
        assert out.full_tensor().tolist() == [0, 0, 1, 1]
        seen: list[torch.Tensor] = []
        assert shard_map(lambda x: seen.append(x), "n@tp -> ")(out) is None
        assert seen[0].tolist() == [m.axis("tp").index] * 2
        assert axes.unshard(doubled(axes.shard(torch.arange(4), "n@dp"))).tolist() == [0, 2, 4, 6]
    few = axes.init_mesh("tp=2", ranks=[0, 1], device_type="cpu")
    said = error_of(lambda: shard_map(torch.neg, "n@tp -> n@tp")(axes.shard(numbers(4), "n@tp", mesh=few)))
    outside = f"rank {dist.get_rank()} isn't one of the ranks of Mesh('tp=2'); only they run a region"
    assert said == "nothing" if dist.get_rank() < 2 else outside in said, said


def test_regions_without_tensors_make_them_and_without_results_return_nothing(pool):
    pool.run(without_tensors)
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Twice x.")


# --- specs by name ----------------------------------------------------------------------------------


def masked(x, w, v, mask=None, *, scale=None, states=0, loss=False):
    """A product over split names, with what may be absent: a mask, a scale, states, a loss."""
    total = psum if len(x) < 4 else lambda y, axis: y  # of one device, which has all rows
    x = x if mask is None else x * mask[..., None]
    x = x if scale is None else x * scale
    y = total(x @ w @ v, "tp")
    found = {"states": (x,) * states, "y": y}
    return {"loss": total(y.square().sum(), "dp"), **found} if loss else found


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = torch.nn.Parameter(numbers(4, 6, seed=3)), torch.nn.Parameter(numbers(6, 4, seed=4))

    def forward(self, x, mask=None, *, scale=None, states=0, loss=False):
        return masked(x, self.w, self.v, mask, scale=scale, states=states, loss=loss)


NAMED = {"mask": "b@dp s", "scale": "", "results": {"y": "b@dp s d", "states": "b@dp s d", "loss": ""}}


GIVEN = {"b@dp s d": numbers(4, 3, 4), "b@dp s": numbers(4, 3, seed=1), "": numbers(1, seed=2)[0]}


def calls(function, model: Masked, x, mask, scale) -> list[dict[str, torch.Tensor]]:
    """What calls return whose tensors are absent, passed by position or by keyword; and the gradients of the weights."""
    found = []
    for args, kwargs in (
        ((x,), {}),
        ((x, mask), {"states": 2}),
        ((), {"scale": scale, "mask": mask, "loss": True, "x": x}),
        ((x, None), {"scale": 0.5}),
        ((x,), {"mask": None, "loss": True}),
    ):
        result = function(*args, **kwargs)
        y = axes.unshard(result["y"]) if isinstance(x, DTensor) else result["y"]
        y.square().sum().backward()
        states = {f"state {at}": state for at, state in enumerate(result.pop("states"))}
        found.append({**result, **states, "gradient of w": model.w.grad, "gradient of v": model.v.grad})
        model.zero_grad()
    return found


def whole_of_shard(x: torch.Tensor) -> torch.Tensor:
    return whole(x if isinstance(x, DTensor) else axes.from_local(x.detach(), "b@dp s d" if x.ndim else ""))


def named() -> list[str]:
    one, many = Masked(), Masked()
    wanted = calls(one, one, *GIVEN.values())
    with mesh():
        given = [axes.shard(x, spec) for spec, x in GIVEN.items()]
        axes.shard_map(axes.shard_module(many, {"w": "d f@tp", "v": "f@tp d"}), "b@dp s d ->", **NAMED)
        function = shard_map("b@dp s d, d f@tp, f@tp d ->", **NAMED)(masked)
        found = {
            "module": calls(many, many, *given),
            "plain shards": calls(many, many, *[x.to_local() for x in given]),
            "function": calls(lambda x, *args, **others: function(x, many.w, many.v, *args, **others), many, *given),
        }
        return [
            f"{way}, call {at}: {name}"
            for way, each in found.items()
            for at, (got, expected) in enumerate(zip(each, wanted, strict=True))
            for name in {**got, **expected}
            if name not in got or not torch.allclose(whole_of_shard(got[name]), expected[name].detach())
        ]


def test_a_spec_by_name_is_of_what_is_there(pool):
    assert pool.run(named) == [[]] * 8


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: shard_map(masked, "b s d ->", maks="b s"), "no parameter 'maks'; did you mean 'mask'"),
        (lambda x: shard_map(masked, "b s d ->", mash="b s"), "mash= is no option of shard_map"),
        (lambda x: shard_map(masked, "b s d ->", chek=True), "keywords of shard_map are specs of arguments, like"),
        (lambda x: shard_map(masked, "b s d ->", mask="b s, b"), "expected one spec, found 2"),
        (lambda x: shard_map(masked, "b s d -> b", results={"y": "b"}), "leave the right side empty"),
        (lambda x: shard_map(masked, "b s d ->", results="b s d"), "results= are specs by name, like"),
        (lambda x: shard_map(lambda x: x, "b s d ->", results={"y": "b s d"})(x), "the function returned Tensor"),
        (lambda x: shard_map(lambda x: {"z": x}, "b s d ->", results={"y": "b"})(x), "by the name 'z', which results="),
        (lambda x: shard_map(masked, "b@dp s d -> b s d", mask="b@tp s d")(x, mask=x), "the mesh has no axis 'tp'"),
        (lambda x: shard_map(lambda x, m=x: x, "b s d -> b s d")(x, m=x), "has its spec by name, shard_map(..., mask="),
    ],
)
def test_what_is_wrong_with_specs_by_name_is_said(call, says):
    with (
        axes.simulate(2),
        axes.init_mesh("dp=2", device_type="cpu"),
        pytest.raises(axes.AxesError, match=re.escape(says)),
    ):
        call(axes.shard(GIVEN["b@dp s d"], "b@dp s d"))


# --- meshes


def meshes() -> None:
    m = mesh()
    x, w = axes.shard(numbers(4, 6), "b@dp d", mesh=m), axes.shard(numbers(6, 2), "d f@tp", mesh=m["tp"])

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        assert axis_size(("cp", "tp")) == 4
        return x @ w

    # names from the tensors' own mesh; the result lies on the larger one
    y = shard_map(body, "b@dp d, d f@tp -> b@dp f@tp")(x, w)
    assert axes.spec_of(y) == "_@dp _@tp"
    assert axes.sharding_of(y).mesh.axis_names == ("dp", "cp", "tp")
    torch.testing.assert_close(whole(y), numbers(4, 6) @ numbers(6, 2))
    # names of another factorization of the same ranks, from an ambient mesh
    sparse = m["rows", "ep"]
    e = axes.shard(numbers(8, 3), "e@ep d", mesh=sparse)
    with m:
        y = shard_map(lambda e: e + psum(torch.zeros(2, 3), "cp"), "e@ep d -> e@ep d")(e)
    assert y.device_mesh is e.device_mesh
    assert axes.spec_of(y) == "_@ep _"
    # mesh= before ambient
    with m:
        z = axes.shard(numbers(8, 3), "s@(cp tp) d")
    with m["dp"]:
        y = shard_map(torch.neg, "s@rest d -> s@rest d", mesh=m)(z)
        assert axes.spec_of(y) == "_@(cp tp) _"
    # an ambient mesh of other ranks has no say
    with axes.Mesh("dp=2"):
        assert shard_map(torch.neg, "s@(cp tp) d -> s@(cp tp) d")(z).shape == (8, 3)


def test_names_are_looked_up_in_the_given_the_ambient_or_the_tensors_own_mesh(pool):
    pool.run(meshes)


# --- check


CHECKED = [
    # a region, what is inside, whether it is also differentiated, and what is said
    ("n@tp d -> d", lambda x: psum(x.sum(0), "tp"), False, "nothing"),
    ("n@tp d -> d | sum@tp", lambda x: x.sum(0), False, "nothing"),
    ("n@tp d -> d", lambda x: x.sum(0), False, "result 0, 'd', claims to be the same on all ranks of 'tp'; ranks 1, 3, 5, 7 differ"),
    ("n@tp d -> d", lambda x: x.sum(0), False, "axes.psum(y, 'tp')"),
    ("n@tp d -> d", lambda x: psum(x.sum(0), "tp"), True, "the gradient of result 0, 'd', claims to be the same on all ranks of 'dp'; ranks 4, 5, 6, 7"),
    ("n@tp d -> k", lambda x: x.new_zeros(3 if axis_index("cp") else 2), False, "differ from the first of their line"),
    ("n@tp d | same@cp -> n@tp d | sum@cp", lambda x: x * (axis_index("cp") + 1), "whole", "the gradient of tensor 0, which is 'same', claims to be the same"),
    ("n@tp d | same@cp -> n@tp d | same@cp", lambda x: x * 2, False, "nothing"),
    *[
        ("n@tp d -> d", lambda x, made=made: torch.full((3,), made(axis_index("cp")), dtype=torch.float64), False, said)
        for made, said in (
            (lambda r: 1.0 + r * 2.0**-52, "of 'cp'; ranks 2, 3, 6, 7 differ from the first of their line"),
            (lambda r: -0.0 if r else 0.0, "differ from the first of their line"),
            (lambda r: float("nan"), "nothing"),
            (lambda r: float("nan") if r else 1.0, "differ from the first of their line"),
        )
    ],
    ("n@tp d -> one", lambda x: torch.tensor([2**60 + axis_index("cp")]), False, "differ from the first of their line"),
    ("n@tp d -> k", lambda x: torch.full((1,), complex(1, axis_index("cp") * 1e-9)), False, "differ from the first of their line"),
]  # fmt: skip


def checked(number: int) -> str:
    text, inside, how, _ = CHECKED[number]
    with mesh():
        x = sharded().requires_grad_()

        def call() -> None:
            y = shard_map(inside, text, check=True)(x)
            if how == "whole":
                axes.unshard(y).sum().backward()
            elif how is True:  # a loss that only the ranks 4 to 7 scale: its gradient isn't the same everywhere
                y.backward(
                    axes.from_local(
                        torch.ones_like(y.to_local()) * (1 + (torch.distributed.get_rank() > 3)),
                        axes.spec_of(y),
                        shape=y.shape,
                    )
                )

        return error_of(call)


@pytest.mark.parametrize("number", range(len(CHECKED)))
def test_check_finds_values_that_claim_to_be_replicated_and_are_not_bit_by_bit(pool, number):
    for found in pool.run(checked, number):
        assert CHECKED[number][-1] in found


# --- closing over


def closures() -> None:
    said = "the function uses a tensor that needs a gradient and isn't an argument: "
    with mesh():
        x, weight, scale = (
            sharded(),
            numbers(3, 3).requires_grad_(),
            torch.ones((), dtype=torch.float64, requires_grad=True),
        )
        table, rows = (
            axes.shard(numbers(3, 3), "i j").requires_grad_(),
            axes.shard(numbers(16, 3), "i@(dp cp tp) j").requires_grad_(),
        )
        layer, derived = torch.nn.Linear(3, 3, dtype=torch.float64), weight.sin()
        other = shard_map(lambda x: x * 1, SAME)(sharded().requires_grad_())

        def closes(x: torch.Tensor) -> torch.Tensor:
            return x @ weight

        text = error_of(lambda: shard_map(closes, "n@tp d -> n@tp e")(x))
        assert f"{said}[3, 3] torch.float64; its gradient would be this rank's term of the sum alone" in text
        assert "with its spec on the left, as axes.from_local(x, spec, grad='summed') or axes.shard(x, spec)" in text
        assert text.endswith("\n  in  shard_map 'n@tp d -> n@tp e'")
        for body, name in (
            (lambda x: x * scale, f"{said}[] "),
            (lambda x: x @ derived, f"{said}[3, 3]"),
            (layer, "isn't an argument: weight, "),
            (layer, "axes.shard_module(module, {'weight': 'i j', ...}"),
            (layer.forward, f"{said}[3, 3]"),
            (lambda x: layer(x), f"{said}[3, 3]"),
            (lambda x: (x, weight)[1], f"{said}[3, 3]"),
            (lambda x: x @ table.to_local(), f"{said}[3, 3]"),
            (
                lambda x: x * torch.ones((), dtype=torch.float64, requires_grad=True),
                "of what the function makes itself",
            ),
            (lambda x: x * other.to_local(), f"{said}a result of another region"),
        ):
            for each in (x, x.detach().requires_grad_()):
                assert name in error_of(
                    lambda body=body, each=each: shard_map(body if body is not layer else copy.copy(layer), SAME)(each)
                )
        for body in (
            lambda x: x @ weight.detach(),
            lambda x: x * axes.to_local(rows.sin()),
            lambda x: x @ table.to_local(grad_placements=[Partial()] * 3),
        ):
            assert shard_map(body, SAME)(x).shape == (4, 3)
        for each in (x, x.detach().requires_grad_()):
            text = error_of(
                lambda each=each: axes.reduce(each, "n@tp d -> n@tp", lambda x, dims: (x @ weight).sum(dims))
            )
            assert f"{said}[3, 3]" in text
            assert text.endswith("n@tp d -> n@tp")
        with torch.no_grad():
            assert shard_map(closes, SAME)(x).shape == (4, 3)


def test_a_tensor_that_needs_a_gradient_and_is_closed_over_is_an_error(pool):
    pool.run(closures)


# --- memory


def writes() -> None:
    with mesh():
        x, w = sharded(), sharded(1).requires_grad_()
        product, before = x * w, x._version  # keeps x for the gradient of w
        shard_map(lambda x: x + 1, SAME)(x)
        assert x._version == before
        with pytest.raises(ZeroDivisionError):
            shard_map(lambda x: x.mul_(2) if x.numel() < 0 else x.zero_() / (1 // 0), SAME)(x)  # also where it fails
        assert x._version > before
        shard_map(lambda x: x.add_(2).sum(0), "n@tp d -> d | sum@tp")(x)
        assert torch.equal(whole(x), torch.full((4, 3), 2.0).double())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        product = x * w
        axes.reduce(x, "n@tp d -> n@tp", lambda x, dims: x.detach().mul_(2).sum(dims))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        before = whole(w)
        for body in (lambda w: w.mul_(2), lambda w: w.sin_().clone()):  # where its gradient is needed, torch refuses
            with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
                shard_map(body, SAME)(w)
        assert torch.equal(whole(w), before)


TWO: list[tuple[str, Callable[[torch.Tensor], Any]]] = [
    ("n@tp d, n@tp d", lambda y: (y, y)),
    ("n@tp d, d n@tp", lambda y: (y, y.T)),
    ("n@tp e, n@tp f", lambda y: (y[:, :2], y[:, 1:])),
    ("n@tp e, n@tp f", lambda y: y.split([1, 2], 1)),
    ("d, e", lambda y: (y[0], y[1])),
]


def sharing() -> None:
    def storage(x: DTensor) -> int:
        return x.to_local().untyped_storage().data_ptr()

    with mesh():
        for text, body in (
            (SAME, lambda x: x),
            (SAME, lambda x: x.detach()),
            ("n@tp d -> d n@tp", torch.t),
            ("n@tp d -> n@tp", lambda x: x.unbind(1)[1]),
        ):
            for x in (sharded(), sharded().requires_grad_()):
                assert storage(shard_map(body, text)(x)) != storage(x), text
        for x in (sharded(), sharded().requires_grad_()):
            y = axes.reduce(x, "n@tp d -> n@tp", lambda t, dims: t.select(dims[0], 0))
            assert storage(y) != storage(x), "a function that reduces"
        for right, body in TWO:
            a, b = shard_map(lambda x, body=body: body(x + 1), f"n@tp d -> {right}")(sharded())
            assert storage(a) != storage(b), right
            before = whole(b).clone()
            a.mul_(3)
            torch.testing.assert_close(whole(b), before)


def changed_in_place() -> None:
    """A backward pass after an argument or a result was changed refuses, or is right where nothing of it was needed."""
    pairs, alone = "a b@tp, b@tp -> a b@tp", "a b@tp -> a b@tp"
    cases: dict[str, tuple[Any, Any, bool, bool]] = {
        # what is computed, the same on one device, whether the weight is changed or the result, and whether that is refused
        "rms_norm": (lambda p, q: axes.rms_norm(p, "a b@tp", over="b", weight=q, eps=0.1), None, True, True),
        "a product": (shard_map(lambda a, b: a * b.view(-1), pairs), None, True, True),
        "exp": (lambda p, q: shard_map(torch.exp, alone)(p), None, False, True),
        "prod": (lambda p, q: axes.reduce(p, "a b -> b", "prod"), None, False, True),
        "logsumexp": (lambda p, q: axes.reduce(p, "a b -> b", torch.logsumexp), None, False, True),
        "a sum": (shard_map(lambda a, b: a + b, pairs), lambda x, w: 2 * (x + w), False, False),
        "a sum's operand": (shard_map(lambda a, b: a + b, pairs), lambda x, w: x + w, True, False),
    }
    with axes.init_mesh("dp=4 tp=2", device_type="cpu"):
        for name, (mine, plain, weight, refused) in cases.items():
            p, q = (axes.shard(numbers(*n).requires_grad_(), s) for n, s in (((4, 8), "a b@tp"), ((8,), "b@tp")))
            y = mine(p * 1, q)
            with torch.no_grad() if weight else torch.enable_grad():
                (q if weight else y).mul_(2)
            with pytest.raises(RuntimeError, match="modified") if refused else contextlib.nullcontext():
                y.full_tensor().sin().sum().backward()
            if not refused:
                x = numbers(4, 8).requires_grad_()
                plain(x, numbers(8)).sin().sum().backward()
                assert torch.allclose(p.grad.full_tensor(), x.grad), name


@pytest.mark.parametrize("check", [writes, sharing, changed_in_place])
def test_memory_is_shared_with_nobody_and_a_write_is_seen_by_autograd_or_refused(pool, check):
    pool.run(check)
