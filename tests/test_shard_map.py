"""SPMD regions: plain tensors inside, DTensors outside, and the gradients of one device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.algebra.ambient import ambient_mesh
from axes.algebra.errors import AxesError, ExpressionError, MeshError, ShardingError, SizeError
from axes.ops.collectives import all_gather, all_to_all, axis_index, axis_size, pmean, psum, psum_scatter
from axes.ops.shard_map import shard_map


def mesh() -> axes.Mesh:
    return axes.init_mesh("dp=2 cp=2 tp=2", "rest = cp tp", "(dp cp tp) = rows ep", ep=4, device_type="cpu")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(x: torch.Tensor) -> torch.Tensor:
    return axes.unshard(x).detach()


# values and gradients


@dataclass(frozen=True)
class Matmul:
    """`b s d, d f -> b s f` with b, d and f split over disjoint axes, and what happens to the sum over d."""

    b: tuple[str, ...]
    d: tuple[str, ...]
    f: tuple[str, ...]
    sizes: tuple[int, int, int, int]
    result: str
    loss: str

    @property
    def expression(self) -> str:
        b, d, f = (
            f"{name}@({' '.join(axes)})" if axes else name
            for name, axes in zip("bdf", (self.b, self.d, self.f), strict=True)
        )
        sum_over = " ".join(self.d)
        out = {
            "psum": f"{b} s {f}",
            "pending": f"{b} s {f}" + (f" | sum@({sum_over})" if self.d else ""),
            "scatter": f"{b} s@({sum_over}) {f}",
        }[self.result]
        return (
            f"{b} s {d}, {d} {f} -> {out}".replace(" s ", " s@() ")
            if self.result == "scatter"
            else f"{b} s {d}, {d} {f} -> {out}"
        )


@st.composite
def matmuls(draw: st.DrawFn) -> Matmul:
    names = draw(st.permutations(["dp", "cp", "tp"]))
    cuts = sorted(draw(st.tuples(st.integers(0, 3), st.integers(0, 3))))
    b, d, f = names[: cuts[0]], names[cuts[0] : cuts[1]], names[cuts[1] :]
    result = draw(st.sampled_from(["psum", "pending", "scatter"]))
    inner = 2 ** len(d)
    extents = draw(st.tuples(*[st.integers(1, 5)] * 3))
    b_size, f_size = (n if len(axes) <= 1 else n * 2 ** len(axes) for n, axes in zip(extents[:2], (b, f), strict=True))
    sizes = b_size, inner * (extents[2] if result == "scatter" else 1) + (result != "scatter"), inner * 2, f_size
    return Matmul(tuple(b), tuple(d), tuple(f), sizes, result, draw(st.sampled_from(["split", "whole"])))


def check_matmuls(cases: list[Matmul]) -> None:
    with mesh():
        for case in cases:
            check_matmul(case)


def check_matmul(case: Matmul) -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        if case.result == "psum":
            return psum(y, case.d)
        return psum_scatter(y, case.d, dim=1) if case.result == "scatter" else y

    b, s, d, f = case.sizes
    x, w, weight = numbers(b, s, d), numbers(d, f, seed=1), numbers(b, s, f, seed=2)
    inputs = case.expression.split(" -> ")[0].split(", ")
    dx, dw = (axes.shard(t.clone().requires_grad_(), spec) for t, spec in zip((x, w), inputs, strict=True))
    y = shard_map(body, case.expression)(dx, dw)
    assert y.shape == (b, s, f)
    torch.testing.assert_close(whole(y), x @ w, msg=lambda text: f"{case.expression}: {text}")
    if case.loss == "split":
        # each rank has a summand of the loss: cotangents come split
        out = case.expression.split(" -> ")[1]
        split = " ".join([*case.b, *case.f, *(case.d if case.result != "psum" else ())])
        loss = shard_map(lambda y, w: (y * w).sum(), f"{out}, {out.split(' |')[0]} -> | sum@({split})")
        axes.unshard(loss(y, axes.shard(weight, out.split(" |")[0]))).backward()
    else:
        (axes.unshard(y) * weight).sum().backward()
    x, w = x.requires_grad_(), w.requires_grad_()
    (x @ w * weight).sum().backward()
    assert dx.grad.placements == dx.placements
    assert dw.grad.placements == dw.placements
    for got, wanted in ((dx.grad, x.grad), (dw.grad, w.grad)):
        torch.testing.assert_close(whole(got), wanted, msg=lambda text: f"{case.expression}, {case.loss}: {text}")


@settings(max_examples=4, phases=[Phase.generate], deadline=None, derandomize=True, database=None)
@given(st.lists(matmuls(), min_size=10, max_size=10))
def test_a_region_is_the_function_of_one_device_and_so_are_its_gradients(pool, cases):
    pool.run(check_matmuls, cases)


# names that flow


def flowing() -> None:
    with mesh() as m:
        x, y = numbers(5, 4, 6), numbers(6)
        dx, dy = axes.shard(x, "b@dp s@cp d"), axes.shard(y, "d")
        # b and s are split as they come; 5 rows over two ranks aren't even
        out = shard_map(lambda x, y: x * y, "b s d, d -> b s d")(dx, dy)
        assert axes.spec_of(out) == "_@dp _@cp _"
        torch.testing.assert_close(whole(out), x * y)
        out = shard_map(lambda x: x.cos(), "... d -> ... d")(dx)
        assert axes.spec_of(out) == "_@dp _@cp _"
        out = shard_map(lambda x: x.sum(0), "b=5 ... -> ... | sum@dp")(axes.shard(x, "b s@cp d"))
        assert axes.spec_of(out) == "_@cp _ | sum@dp"
        # `*` is what it has
        out = shard_map(lambda x: x.tensor_split(2, 0)[axis_index("tp")], "b=8 d -> b@(* tp) d")(
            axes.shard(numbers(8, 3), "b@dp d")
        )
        assert axes.spec_of(out) == "_@(dp tp) _"
        torch.testing.assert_close(whole(out), numbers(8, 3))
        # an explicit name is as written on both sides
        out = shard_map(lambda x: all_gather(x, "cp"), "s@cp d -> s d")(axes.shard(numbers(4, 3), "s@cp d@tp"))
        assert axes.spec_of(out) == "_ _@tp"
        # a group that stands the same on both sides flows as one dim
        out = shard_map(torch.neg, "(h d) e -> (h d) e")(axes.shard(numbers(8, 3), "n@tp e"))
        assert axes.spec_of(out) == "_@tp _"
        # a fused projection split by heads
        qkv = axes.shard(numbers(3 * 4 * 2, 5), "(three heads@tp dim) e", three=3, heads=4)
        out = shard_map(
            lambda w: w.unflatten(0, (3, 2, 2))[0].flatten(0, 1), "(three=3 heads=4@tp dim) e -> (heads@tp dim) e"
        )(qkv)
        torch.testing.assert_close(whole(out), numbers(24, 5)[:8])
        assert m.coordinate is not None


def test_a_name_without_a_place_leaves_with_the_split_it_came_with(pool):
    pool.run(flowing)


# trees and arguments


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def trees() -> None:
    with mesh():
        a, b, c = (axes.shard(numbers(4, 2, seed=i), "n@tp d") for i in range(3))

        def body(pair: tuple, factor: float, *, more: dict, flag: bool = False) -> dict:
            assert not isinstance(pair[0], axes_dtensor())
            assert pair[0].shape == (2, 2)
            assert flag
            return {"z": Pair(pair[0] * factor, pair[1]), "a": [more["c"] + 1, None, "text"]}

        out = shard_map(body, "n@tp d, n@tp d, n@tp d -> n@tp d, n@tp d, n@tp d")([a, b], 2.0, more={"c": c}, flag=True)
        assert list(out) == ["z", "a"]
        assert isinstance(out["z"], Pair)
        assert out["a"][1:] == [None, "text"]
        torch.testing.assert_close(whole(out["z"].first), numbers(4, 2) * 2)
        torch.testing.assert_close(whole(out["z"].second), numbers(4, 2, seed=1))
        torch.testing.assert_close(whole(out["a"][0]), numbers(4, 2, seed=2) + 1)


def axes_dtensor() -> type:
    from torch.distributed.tensor import DTensor

    return DTensor


def test_trees_keep_their_form_and_what_is_no_tensor_passes(pool):
    pool.run(trees)


@shard_map("b@dp -> b@dp")
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Twice x."""
    return x * 2


def test_it_is_a_decorator_that_keeps_name_and_docstring():
    assert doubled.__name__ == "doubled"
    assert doubled.__doc__ == "Twice x."


def without_tensors() -> None:
    with mesh() as m:
        out = shard_map(lambda: torch.full((2,), float(axis_index("tp"))), "-> n@tp")()
        assert out.full_tensor().tolist() == [0, 0, 1, 1]
        seen = []
        assert shard_map(lambda x: seen.append(x), "n@tp -> ")(out) is None
        assert seen[0].tolist() == [m.axis("tp").index] * 2
        assert axes.unshard(doubled(axes.shard(torch.arange(4), "n@dp"))).tolist() == [0, 2, 4, 6]


def test_regions_without_tensors_make_them_and_without_results_return_nothing(pool):
    pool.run(without_tensors)


# specs by name


def masked(x, w, v, mask=None, *, scale=None, states=0, loss=False):
    """A product over split names, with what may be absent: a mask, a scale, states, a loss."""
    total = psum if ambient_mesh() is not None else lambda y, axis: y
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


NAMED = {"mask": "b@dp s", "scale": "", "results": {"y": "b s d", "states": "b s d", "loss": ""}}
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
        y = axes.unshard(result["y"]) if isinstance(x, axes_dtensor()) else result["y"]
        y.square().sum().backward()
        states = {f"state {at}": state for at, state in enumerate(result.pop("states"))}
        found.append({**result, **states, "gradient of w": model.w.grad, "gradient of v": model.v.grad})
        model.zero_grad()
    return found


def whole_of_shard(x: torch.Tensor) -> torch.Tensor:
    return whole(x if isinstance(x, axes_dtensor()) else axes.from_local(x.detach(), "b@dp s d" if x.ndim else ""))


def named() -> list[str]:
    one, many = Masked(), Masked()
    wanted = calls(one, one, *GIVEN.values())
    with mesh():
        given = [axes.shard(x, spec) for spec, x in GIVEN.items()]
        axes.shard_map(axes.shard_module(many, {"w": "d f@tp", "v": "f@tp d"}), "b s d ->", **NAMED)
        function = shard_map("b s d, d f@tp, f@tp d ->", **NAMED)(masked)
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


def named_in_a_graph() -> None:
    x, mask, _ = GIVEN.values()
    with axes.init_mesh("dp=2 tp", device_type="cpu"):
        region = shard_map(masked, "b s d, d f@tp, f@tp d ->", **NAMED)

        def function(x, w, mask):
            y = region(x, w, w.mT, mask)["y"]
            found = shard_map(masked, "b s d, d f, f d ->", **NAMED)(y, w, w.mT, mask=mask, loss=True, scale=2.0)
            return found["loss"] + region(y, w, w.mT, None)["y"].sum()

        given = [axes.shard(t, spec) for t, spec in ((x, "b@dp s d"), (numbers(4, 4), "d f"), (mask, "b@dp s"))]
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(whole(compiled(*given)), whole(function(*given)))


def test_specs_by_name_are_in_a_graph_what_they_are_outside(warm):
    warm(named_in_a_graph, 2, timeout=120)


def test_a_module_with_specs_by_name_can_be_verified():
    model = axes.shard_map(Masked(), "b s d ->", **NAMED)
    given = [x.clone().requires_grad_() for x in list(GIVEN.values())[:2]]
    assert axes.verify(model, *given, mesh="dp=2 tp=2", specs={"w": "d f@tp", "v": "f@tp d"}, timeout=60).ok


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
        (lambda x: shard_map(masked, "b s d -> b s d", mask="b@tp s")(x), "the mesh has no axis 'tp'"),
        (lambda x: shard_map(lambda x, m=x: x, "b s d -> b s d")(x, m=x), "has its spec by name, shard_map(..., mask="),
    ],
)
def test_what_is_wrong_with_specs_by_name_is_said(call, says):
    with axes.simulate(2), axes.init_mesh("dp=2", device_type="cpu"), pytest.raises(AxesError, match=re.escape(says)):
        call(axes.shard(GIVEN["b@dp s d"], "b@dp s d"))


# meshes


def meshes() -> None:
    m = mesh()
    x, w = axes.shard(numbers(4, 6), "b@dp d", mesh=m), axes.shard(numbers(6, 2), "d f@tp", mesh=m["tp"])
    assert ambient_mesh() is None

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
    # names that several of the mesh's axes are
    with m:
        z = axes.shard(numbers(8, 3), "s@(cp tp) d")
        y = shard_map(lambda z: all_gather(z, "rest"), "s@rest d -> s d")(z)
        assert axes.spec_of(y) == "_ _"
        y = shard_map(torch.neg, "s@(cp tp) d -> s@rest d")(z)
        assert axes.spec_of(y) == "_@(cp tp) _"
    # mesh= before ambient
    with m["dp"]:
        y = shard_map(torch.neg, "s@rest d -> s@rest d", mesh=m)(z)
        assert axes.spec_of(y) == "_@(cp tp) _"
    # an ambient mesh of other ranks has no say
    with axes.Mesh("dp=2"):
        assert shard_map(torch.neg, "s@(cp tp) d -> s@(cp tp) d")(z).shape == (8, 3)


def test_names_are_looked_up_in_the_given_the_ambient_or_the_tensors_own_mesh(pool):
    pool.run(meshes)


def leaves_the_ambient_mesh_alone() -> None:
    m = mesh()
    x = axes.shard(numbers(4), "b@dp", mesh=m)

    def fail(x: torch.Tensor) -> torch.Tensor:
        assert ambient_mesh().axis_names == m.axis_names
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        shard_map(fail, "b@dp -> b@dp")(x)
    assert ambient_mesh() is None


def test_an_exception_inside_leaves_no_mesh_behind(pool):
    pool.run(leaves_the_ambient_mesh_alone)


def backward_elsewhere() -> None:
    m = mesh()
    x = axes.shard(numbers(4, 3), "b@dp d", mesh=m).requires_grad_()
    y = shard_map(lambda x: psum(x.sum(0).sin(), "dp"), "b@dp d -> d")(x)
    assert ambient_mesh() is None
    with m["tp"], CommDebugMode() as counted:
        y.sum().backward()
    wanted = numbers(4, 3).requires_grad_()
    (wanted[:2].sum(0).sin() + wanted[2:].sum(0).sin()).sum().backward()
    torch.testing.assert_close(whole(x.grad), wanted.grad)
    assert counted.get_total_counts() == 2  # psum's, and that of the leaf's summands over cp and tp


def test_backward_needs_no_ambient_mesh(pool):
    pool.run(backward_elsewhere)


# what is pending


def pending() -> None:
    with mesh() as m:
        x = numbers(4, 3)
        summand = axes.from_local(x * (m.axis("tp").index + 1), "n d | sum@tp").requires_grad_()
        y = shard_map(lambda s: psum(s, "tp"), "n d | sum@tp -> n d")(summand)
        torch.testing.assert_close(whole(y), x * 3)
        y.sum().backward()
        torch.testing.assert_close(whole(summand.grad), torch.ones(4, 3, dtype=torch.float64))
        means = axes.from_local(x, "n d | mean@tp").requires_grad_()
        y = shard_map(lambda s: pmean(s, "tp"), "n d | * -> n d")(means)
        torch.testing.assert_close(whole(y), x)
        y.sum().backward()
        torch.testing.assert_close(whole(means.grad), torch.ones(4, 3, dtype=torch.float64))
        # a result that is pending
        whole_x = axes.shard(x, "n d").requires_grad_()
        y = shard_map(lambda x: x * (axis_index("tp") + 1), "n d -> n d | sum@tp")(whole_x)
        assert axes.spec_of(y) == "_ _ | sum@tp"
        (axes.unshard(y) * 2).sum().backward()
        torch.testing.assert_close(whole(whole_x.grad), torch.full((4, 3), 6.0, dtype=torch.float64))


def test_pending_values_go_in_and_come_out_as_the_expression_says(pool):
    pool.run(pending)


# same


def block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Two layers of Megatron's, on a rank's part of the middle: its f and g at the ends."""
    x = axes.rearrange(x, "b d | same@tp -> b d")
    return axes.rearrange((x @ w).tanh() @ v, "b d | sum@tp -> b d | same@tp")


BLOCK = "b@dp d | same@tp, d f@tp, f@tp d -> b@dp d | same@tp"


def same_on_both_sides() -> None:
    with mesh() as m:
        wholes = [numbers(4, 6), numbers(6, 8, seed=1), numbers(8, 6, seed=2)]
        specs = ["b@dp d", "d f@tp", "f@tp d"]
        cotangent = numbers(4, 6, seed=3)
        x, w, v = (whole.clone().requires_grad_() for whole in wholes)
        ((x @ w).tanh() @ v).backward(cotangent)
        arriving = {spec: axes.shard(cotangent, spec) for spec in ("b@dp d", "b d", "b d@tp", "b@(dp cp tp) d")}
        share = m.axis("tp").index - 0.5
        arriving["pending"] = axes.from_local(cotangent * share * 2 + cotangent / 2, "b d | sum@tp")
        for how, g in arriving.items():
            leaves = [axes.shard(t, spec).requires_grad_() for t, spec in zip(wholes, specs, strict=True)]
            came: list[str] = []
            leaves[0] = leaves[0].detach().requires_grad_()  # whose hooks are yet to come
            leaves[0].register_hook(lambda found, came=came: came.append(axes.spec_of(found)))
            y = shard_map(block, BLOCK, check=True)(*leaves)
            assert axes.spec_of(y) == "_@dp _"
            torch.testing.assert_close(whole(y), ((x @ w).tanh() @ v).detach())
            y.backward(g)
            for got, wanted in zip(leaves, (x, w, v), strict=True):
                torch.testing.assert_close(whole(got.grad), wanted.grad, msg=lambda text, how=how: f"{how}: {text}")
            # Over tp nothing is pending: the gradient is whole on every rank.
            assert came == ["_@dp _ | sum@cp"]


def test_same_has_whole_gradients_on_both_sides_and_those_of_one_device(pool):
    pool.run(same_on_both_sides, timeout=120)


def same_sends() -> tuple[int, int]:
    with axes.init_mesh("tp=4", "(tp) = a b", a=2, device_type="cpu"):
        x, w, v = (
            axes.shard(numbers(4, 6), "b d"),
            axes.shard(numbers(6, 8), "d f@tp"),
            axes.shard(numbers(8, 6), "f@tp d"),
        )
        leaves = [t.requires_grad_() for t in (x, w, v)]
        with CommDebugMode() as there:
            y = shard_map(block, "b d | same@tp, d f@tp, f@tp d -> b d | same@tp")(*leaves)
        with CommDebugMode() as back:
            y.backward(axes.shard(numbers(4, 6), "b d"))
        return there.get_total_counts(), back.get_total_counts()


def test_same_costs_what_megatron_costs(world):
    assert world(same_sends, 4) == [(1, 1)] * 4


# uneven shards


def uneven() -> None:
    with mesh() as m:
        x = numbers(5, 3)
        dx = axes.shard(x, "n@dp d").requires_grad_()
        y = shard_map(lambda x: x.sin(), "n@dp d -> n@dp d")(dx)
        assert y.shape == (5, 3)
        assert y.to_local().shape == (3 - m.axis("dp").index, 3)
        (axes.unshard(y) * 2).sum().backward()
        torch.testing.assert_close(whole(dx.grad), x.cos() * 2)
        y = shard_map(lambda x: x[:, :1].expand(-1, 2), "n@dp d -> n@dp two=2")(dx)
        assert y.shape == (5, 2)
        tall = axes.shard(numbers(1, 2), "n@rest d", mesh=m["rest"])  # three ranks of four hold nothing
        assert shard_map(torch.neg, "n@rest d -> n@rest d")(tall).shape == (1, 2)


def test_global_sizes_of_uneven_results_follow_from_names(pool):
    pool.run(uneven)


# check=True


def caught(fn, expression: str, *tensors: torch.Tensor, backward: bool = False) -> str:
    try:
        y = shard_map(fn, expression, check=True)(*tensors)
        if backward:
            backward_of(y)
    except AxesError as error:
        return str(error)
    return "nothing"


def backward_of(y: torch.Tensor) -> None:
    # a loss that only the ranks 4 to 7 scale: its gradient isn't the same everywhere
    (y.to_local() * (1.0 + (torch.distributed.get_rank() > 3))).sum().backward()


def checking() -> list[str]:
    with mesh():
        x = axes.shard(numbers(4, 3), "n@tp d").requires_grad_()
        summand = axes.from_local(numbers(3), "d | sum@cp").requires_grad_()
        return [
            caught(lambda x: psum(x.sum(0), "tp"), "n@tp d -> d", x),
            caught(lambda x: x.sum(0), "n@tp d -> d", x),
            caught(lambda x: x.sum(0), "n@tp d -> d | sum@tp", x),
            caught(lambda x: psum(x.sum(0), "tp"), "n@tp d -> d", x, backward=True),
            caught(lambda s: psum(s * (axis_index("cp") + 1), "cp"), "d | sum@cp -> d", summand, backward=False),
            gradient_of(summand, lambda s: psum(s * (axis_index("cp") + 1), "cp"), "d | sum@cp -> d"),
            caught(lambda x: x.new_zeros(3 if axis_index("cp") else 2), "n@tp d -> k", x),
            gradient_of(x, lambda x: x * (axis_index("cp") + 1), "n@tp d | same@cp -> n@tp d | sum@cp"),
            gradient_of(x, lambda x: x * 2.0, "n@tp d | same@cp -> n@tp d | same@cp"),
        ]


def gradient_of(x: torch.Tensor, fn, expression: str) -> str:
    y = shard_map(fn, expression, check=True)(x)
    try:
        axes.unshard(y).sum().backward()
    except AxesError as error:
        return str(error)
    return "nothing"


def test_check_finds_what_claims_to_be_replicated_and_is_not(pool):
    every = pool.run(checking)
    for fine, forgotten, announced, cotangent, linear, gradient, shape, summand, same in every:
        assert "the gradient of tensor 0, which is 'same', claims to be the same on all ranks of 'cp'" in summand
        assert fine == announced == linear == same == "nothing"
        assert "result 0, 'd', claims to be the same on all ranks of 'tp'; ranks 1, 3, 5, 7 differ" in forgotten
        assert "axes.psum(y, 'tp')" in forgotten
        assert "shard_map 'n@tp d -> d'" in forgotten
        assert (
            "the gradient of result 0, 'd', claims to be the same on all ranks of 'dp'; ranks 4, 5, 6, 7" in cotangent
        )
        assert "the gradient of tensor 0, which is pending, claims to be the same on all ranks of 'cp'" in gradient
        assert "differ from the first of their line in shape" in shape


# mistakes


def arguments(m: axes.Mesh) -> dict[str, torch.Tensor]:
    return {
        "x": axes.shard(numbers(4, 6), "b@dp d", mesh=m),
        "w": axes.shard(numbers(6, 2), "d f@tp", mesh=m),
        "p": axes.from_local(numbers(4, 6), "b d | sum@cp", mesh=m),
        "u": axes.shard(numbers(5, 6), "b@dp d", mesh=m),
    }


def same(*tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
    return tensors[0] if len(tensors) == 1 else tensors


MISTAKES = [
    # (expression, arguments, function, error, part of its message)
    ("b d -> b@dq d", "x", same, MeshError, "the mesh has no axis 'dq'; known: dp, cp, tp"),
    (
        "b d, d f -> b d",
        "x",
        same,
        ShardingError,
        "the function is called with 1 tensors, and the left side has 2 specs",
    ),
    (
        "b@dp d -> b@dp d, d",
        "x",
        same,
        ShardingError,
        "the function returned 1 tensors, and the right side has 2 specs",
    ),
    ("b@dp d -> ", "x", same, ShardingError, "result 0 has 2 dims, its spec '' 0"),
    ("b@dp -> b@dp", "x", same, ShardingError, "tensor 0 has 2 dims, its spec 'b@dp' 1"),
    (
        "b@cp d -> b@cp d",
        "x",
        same,
        ShardingError,
        "  left side  b@cp d\n  tensor     b@dp d    [4, 6], Mesh('dp=2 cp=2 tp=2'",
    ),
    ("b@cp d -> b@cp d", "x", same, ShardingError, "move it first: axes.reshard(x, 'b@cp d@*')"),
    ("b d -> b@dp d", "x", same, ShardingError, "tensor 0 isn't sharded as the left side says"),
    ("b d@dp -> b d@dp", "x", same, ShardingError, "isn't sharded as the left side says"),
    ("b d -> b d", "p", same, ShardingError, "  tensor     b d | sum@cp"),
    ("b d | sum@tp -> b d", "p", same, ShardingError, "left side  b d | sum@tp"),
    ("b d | * -> b d | *", "p", same, ShardingError, "only the function knows what it leaves pending"),
    ("b d | same@cp -> b d", "p", same, ShardingError, "left side  b d | same@cp\n  tensor     b d | sum@cp"),
    ("b@dp d | same@dp -> b@dp d", "x", same, ShardingError, "axis 'dp' is used twice: in b=4@dp and in same@dp"),
    ("b@dp d | same@tp -> b@dp d", "p", same, ShardingError, "move it first: axes.reshard(x, 'b@dp d@*')"),
    ("b@dp d -> b@dp d | same@dp", "x", same, ShardingError, "axis 'dp' is used twice: in b=4@dp and in same@dp"),
    ("b@dp d -> b@dp d | same@dq", "x", same, MeshError, "the mesh has no axis 'dq'"),
    ("b@dp d -> b@dp d@dp", "x", same, ShardingError, "axis 'dp' is used twice"),
    ("b d, b d -> b d", "xp", lambda x, p: x, ShardingError, "isn't sharded"),
    ("b d, b f | * -> b d", "xp", lambda x, p: x, ShardingError, "the tensors disagree on how 'b' is split"),
    ("b d, b f -> b d", "uw", lambda x, p: x, SizeError, "'b' has two sizes, 5 and 6"),
    ("b=8 d -> b d", "x", same, SizeError, "'b' has two sizes, 8 and 4"),
    ("_ 3 -> _ 3", "x", same, SizeError, "a dim of [4, 6] is written as 3, and has 6 elements"),
    ("b@dp d -> b@dp d", "u", lambda x: x[:1], ShardingError, "is [5, 6] in whole and so ["),
    (
        "b@dp d -> b d",
        "x",
        same,
        ShardingError,
        "result 0, 'b d', is [4, 6] in whole and so [4, 6] on this rank; the function returned [2, 6]",
    ),
    (
        "b d -> (b d)",
        "x",
        lambda x: x.flatten(),
        ShardingError,
        "(b d) on the right was part of 'b' on the left, which is _@dp",
    ),
    (
        "(b c) d -> b c d",
        "x",
        lambda x: x.unflatten(0, (2, 1)),
        ShardingError,
        "b on the right was part of '(b c)' on the left",
    ),
    ("b d -> b c@*", "x", same, ShardingError, "'*' in c@* is how 'c' is split on the left, where it isn't"),
    ("b@dp d -> b@dp d", "plain", same, ShardingError, "tensor 0 among the arguments is a plain one"),
    ("b@dp d -> b@dp d", "x", lambda x: arguments(mesh())["x"], ShardingError, "the function returned a DTensor"),
    ("b@dp d -> b@dp d", "x", lambda x: psum(x, "tq"), MeshError, "the mesh has no axis 'tq'"),
]


def mistakes() -> list[str]:
    found = []
    m = mesh()
    given = {**arguments(m), "plain": numbers(4, 6)}
    with m, CommDebugMode() as counted:
        for expression, names, function, error, text in MISTAKES:
            tensors = [given[names]] if names in given else [given[name] for name in names]
            try:
                shard_map(function, expression)(*tensors)
            except AxesError as caught:
                wrong = type(caught) is not error or text not in str(caught)
                if wrong or (error is not MeshError and expression not in str(caught)):
                    found.append(f"{expression}: expected {error.__name__} with {text!r}, caught {caught!r}")
            else:
                found.append(f"{expression}: no error, expected {text!r}")
    return [*found, *([] if counted.get_total_counts() == 0 else ["something was sent"])]


def test_mistakes_are_errors_that_show_both_sides_before_anything_is_sent(pool):
    for found in pool.run(mistakes):
        assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((torch.neg, "b@dp d"), "a region says what goes in and what comes out"),
        (("b@dp d",), "a region says what goes in and what comes out"),
        ((torch.neg, "b@dp -> b@"), "an axis name, '\\*' or '\\(' after '@'"),
        ((torch.neg, "(b c)@* -> b"), "stands for the split that a name has"),
        ((torch.neg, "b@(* tp) -> b"), "stands alone: it is the whole split"),
        ((torch.neg, "...@tp -> b"), "flows; name the dim that is split"),
        ((torch.neg, "b -> (... c)"), "flows; name the dim that is split"),
        ((torch.neg,), "takes a function and an expression"),
        (("b -> b", torch.neg), "takes a function and an expression"),
        ((3, "b -> b"), "found int and str"),
    ],
)
def test_wrong_text_is_an_error_where_it_is_given(arguments, text):
    with pytest.raises(ExpressionError, match=text):
        shard_map(*arguments)


def test_a_region_without_tensors_and_mesh_says_what_to_pass():
    with axes.simulate(2), pytest.raises(MeshError, match="a region without tensors needs a mesh: pass mesh="):
        shard_map(lambda: torch.ones(2), "-> n")()


def outside() -> str:
    m = axes.init_mesh("tp=2", ranks=[0, 1], device_type="cpu")
    x = axes.shard(numbers(4), "n@tp", mesh=m)
    try:
        return axes.spec_of(shard_map(torch.neg, "n@tp -> n@tp")(x))
    except MeshError as error:
        return str(error)


def test_a_rank_outside_the_tensors_mesh_is_told(pool):
    found = pool.run(outside)
    assert found[:2] == ["_@tp"] * 2
    assert all("isn't one of the ranks of Mesh('tp=2'); only they run a region" in text for text in found[2:])


def test_a_simulated_world_gives_shapes():
    with axes.simulate(4096, rank=1234), axes.init_mesh("dp=512 tp=8", device_type="cpu"):
        x = axes.ones("b@dp s@tp d", b=1024, s=64, d=4).requires_grad_()
        y = shard_map(lambda x: all_gather(x, "tp", dim=1), "b@dp s@tp d -> b@dp s d", check=True)(x)
        y.sum().backward()
        assert y.shape == (1024, 64, 4)
        assert y.to_local().shape == (2, 64, 4)
        assert x.grad.shape == x.shape


# torch.compile


def compiled() -> None:
    m = axes.init_mesh("dp=1 tp=2", device_type="cpu")

    @shard_map("b s d@tp, d@tp f -> b s f, f | sum@tp, b@tp s d")
    def body(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = psum(x @ w, "tp")
        return y.sin(), (y * axis_index("tp")).sum((0, 1)), all_to_all(x, "tp", 0, 2)

    def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b, c = body(x.cos(), w)
        return a.sum() + (b * b).sum() + (c * c * c).sum()

    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(twice, fullgraph=True, backend=counter)
    found = []
    for function in (twice, fast, fast):
        x = axes.shard(numbers(2, 3, 4), "b s d@tp", mesh=m).requires_grad_()
        w = axes.shard(numbers(4, 5, seed=1), "d@tp f", mesh=m).requires_grad_()
        y = function(x, w)
        axes.unshard(y).backward()
        found.append((whole(y), whole(x.grad), whole(w.grad)))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])
    assert counter.frame_count == 1


def test_a_region_compiles_into_the_graph_around_it(warm):
    warm(compiled, 2, timeout=120)


def test_a_mesh_that_was_seen_from_another_rank_leaves_the_regions_of_this_one():
    with axes.simulate(8, rank=5), axes.init_mesh("dp=2 tp=4", device_type="cpu") as mesh:
        x = axes.shard(torch.ones(4, 8), "b@dp d@tp")
        for there in (mesh.at(0), mesh):
            assert axes.softmax(x, "b@dp d@tp", over="d", mesh=there).shape == (4, 8)
