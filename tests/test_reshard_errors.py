"""Bad input to `reshard` and `plan`: an error that shows both specs, on every rank, before anything is sent.

What needs no processes runs in a simulated world.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.algebra.errors import AxesError, ExpressionError, MeshError, ShardingError, SizeError

SHAPE = (8, 12, 4)


def tensor(mesh: axes.Mesh, spec: str, shape: tuple[int, ...] = SHAPE) -> DTensor:
    sharding = mesh.sharding(spec)
    return axes.from_local(torch.zeros(sharding.local_shape(shape)), spec, mesh=mesh, shape=shape)


TARGETS = [
    # source, target, what the error says
    ("b@dp s d", "b s@xp d", "no axis 'xp'"),
    ("b@dp s d", "b s@tpp d", "did you mean 'tp'?"),
    ("b@dp s d", "b@(tp tp) s d", "'tp' is used twice"),
    ("b@dp s d", "b@tp s@tp d", "'tp' is used twice"),
    ("b@dp s d", "b@tp s@cptp d", "share ranks"),
    ("b@dp s d", "b s@tp d | sum@tp", "'tp' is used twice"),
    ("b@dp s d", "b s d | sum@tp", "the source has nothing"),
    ("b@dp s d | max@tp", "b s d | sum@tp", "has max pending"),
    ("b@dp s d", "b (h=5@tp e) d", "don't multiply to the dim"),
    ("b@dp s d", "b (h=3@tp e) d", "doesn't divide into 2 parts"),
    ("b@dp s d", "b s", "the spec has 2 dims, the tensor 3"),
    ("b@dp s d", "b s d e@tp", "the spec has 4 dims, the tensor 3"),
    ("b@dp s d", "b s d | same@tp", "about gradients of plain tensors"),
    ("b@dp s d", "b@dp s d -> b s d", "write only what it becomes"),
    ("b@dp s d", "... d@tp e f g", "the spec has 4 dims, the tensor 3"),
    ("b@dp s d", "b@* s@dp d", "'dp' is used twice"),
    ("b@dp s d", "b@(* dp) s d", "'dp' is used twice"),
    ("b@dp s d | sum@tp", "b s@tp d | *", "'tp' is used twice"),
    ("b@dp s d", "b s (d@* e)", "in a group write the axes"),
    ("b@dp s d", "... d@tp", None),
    ("b@dp s d", "b ...@tp", "name the dim that is split"),
    ("b@dp s d", "(b s)@* d@(* tp)", "the spec has 2 dims, the tensor 3"),
    ("b@dp s d | mean@tp", "b s d |", None),
]


@pytest.mark.parametrize(("source", "target", "says"), [case for case in TARGETS if case[2]])
def test_a_target_that_can_not_be_is_an_error_with_both_specs(source, target, says):
    with axes.simulate(8):
        mesh = axes.init_mesh("dp=2 cp=2 tp=2", "cptp = cp tp", device_type="cpu")
        x = tensor(mesh, source)
        kind = MeshError if "xp" in target or "tpp" in target else ShardingError
        with pytest.raises(kind) as error, CommDebugMode() as counted:
            axes.reshard(x, target)
        assert counted.get_total_counts() == 0
    text = str(error.value)
    assert says in text
    assert "\n  source  _@dp _ _" in text
    assert "\n  target  " in text


@pytest.mark.parametrize("spec", ["(h@x d)", "(h d)@x"])
def test_the_sizes_of_a_group_are_held_against_every_size_of_the_dim(spec):
    with axes.simulate(6), axes.init_mesh("x=2 y=3", device_type="cpu"):
        for h, sizes in ((4, (12, 10, 14, 8, 30)), (12, (12, 18, 24, 30))):
            for size in sizes:
                x = axes.shard(torch.arange(size), "a")
                if size % h == 0:
                    assert axes.spec_of(axes.reshard(x, spec, h=h)) == "_@x"
                else:
                    with pytest.raises(AxesError, match="don't multiply to the dim"):
                        axes.reshard(x, spec, h=h)


def test_what_can_be_is_not_refused():
    with axes.simulate(8):
        mesh = axes.init_mesh("dp=2 cp=2 tp=2", "cptp = cp tp", device_type="cpu")
        for source, target, says in TARGETS:
            if says is None:
                axes.reshard(tensor(mesh, source), target)


def test_a_mean_of_integers_is_an_error():
    with axes.simulate(2):
        mesh = axes.init_mesh("tp=2", device_type="cpu")
        x = axes.from_local(torch.zeros(4, dtype=torch.int64), "n | mean@tp", mesh=mesh)
        with pytest.raises(ShardingError, match="a mean of int64 isn't int64"):
            axes.reshard(x, "n |")


def test_text_outside_the_grammar_is_shown_with_a_caret():
    with axes.simulate(2):
        mesh = axes.init_mesh("tp=2", device_type="cpu")
        x = axes.from_local(torch.zeros(4), "n", mesh=mesh)
        with pytest.raises(ExpressionError) as error:
            axes.reshard(x, "n@@tp")
    assert "n@@tp\n" in str(error.value)
    assert "^" in str(error.value)


@pytest.mark.parametrize("spec", [None, 3, ["n"]])
def test_a_spec_is_text_or_a_sharding(spec):
    with axes.simulate(2):
        mesh = axes.init_mesh("tp=2", device_type="cpu")
        x = axes.from_local(torch.zeros(4), "n", mesh=mesh)
        with pytest.raises(ExpressionError, match="takes a spec or a Sharding"):
            axes.reshard(x, spec)


def test_a_plain_tensor_needs_both_sides_of_an_arrow():
    with pytest.raises(ShardingError, match="write both sides"):
        axes.reshard(torch.zeros(4), "n@tp")
    with pytest.raises(ExpressionError, match=r"axes\.rearrange"), axes.simulate(2):
        axes.reshard(torch.zeros(4, 4), "m n -> n m", mesh=axes.init_mesh("tp=2", device_type="cpu"))
    with pytest.raises(ShardingError, match="takes a tensor"):
        axes.reshard([1.0], "n -> n")


def test_a_sharding_on_a_mesh_without_a_job_is_an_error():
    with axes.simulate(4):
        x = axes.from_local(torch.zeros(4), "n", mesh=axes.init_mesh("a=2 b=2", device_type="cpu"))
        with pytest.raises(MeshError, match="algebra alone"):
            axes.reshard(x, axes.Mesh("a=2 b=2").sharding("n@a"))


def test_another_mesh_beside_a_sharding_is_an_error():
    with axes.simulate(4):
        mesh = axes.init_mesh("a=2 b=2", device_type="cpu")
        x = axes.from_local(torch.zeros(4), "n", mesh=mesh)
        with pytest.raises(MeshError, match="leave out mesh="):
            axes.reshard(x, mesh.sharding("n@a"), mesh=mesh["a"])


def test_one_name_with_two_meanings_is_an_error():
    with axes.simulate(4):
        x = axes.from_local(torch.zeros(4), "n", mesh=axes.init_mesh("a=2 b=2", device_type="cpu"))
        with axes.init_mesh("b=2 a=2", device_type="cpu"), pytest.raises(MeshError, match="where the tensor lies"):
            axes.reshard(x, "n@a")


def test_what_dtensor_would_cut_otherwise_is_an_error_and_not_a_wrong_tensor():
    with axes.simulate(4):
        mesh = axes.init_mesh("a=2 b=2", device_type="cpu")
        x = axes.from_local(torch.zeros(5), "n", mesh=mesh)
        with pytest.raises(ShardingError, match="DTensor"):
            axes.reshard(x, "n@(b a)")


def test_a_size_of_an_unknown_name_is_an_error():
    with axes.simulate(2):
        mesh = axes.init_mesh("tp=2", device_type="cpu")
        x = axes.from_local(torch.zeros(4), "n", mesh=mesh)
        with pytest.raises(AxesError):
            axes.reshard(x, "(h@tp e)", k=2)
        with pytest.raises(SizeError, match=r"The size of a dim is a whole number; found \[2\]"):
            axes.reshard(x, "(h@tp e)", h=[2])


# --- plan ------------------------------------------------------------------------------------------


def test_plan_wants_a_mesh_and_a_shape_of_whole_numbers():
    with pytest.raises(MeshError, match=r"axes\.plan needs a mesh"):
        axes.plan("n@tp", "n", (4,))
    mesh = axes.Mesh("tp=2")
    for shape in ((-1,), (2.5,), "ab", None, (4, None)):
        with pytest.raises(SizeError, match="a shape is whole numbers"):
            axes.plan("n@tp", "n", shape, mesh=mesh)
    with pytest.raises(SizeError, match="isn't in the specs"):
        axes.plan("n@tp", "n", (4,), mesh=mesh, q=2)
    with pytest.raises(ShardingError, match="dims"):
        axes.plan("n@tp", "n m", (4,), mesh=mesh)
    with pytest.raises(ShardingError, match="unknown dtype"):
        axes.plan("n@tp", "n", (4,), mesh=mesh, dtype="float31")


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("dtype", [Nameless(), 3, torch.ones(1), 10**5000, np.dtype("S4")], ids=range(5))
def test_what_is_no_dtype_is_refused_alike_by_all_that_take_one(dtype):
    mesh = axes.Mesh("tp=2")
    for call in (
        lambda: axes.plan("n@tp", "n", (4,), mesh=mesh, dtype=dtype),
        lambda: axes.explain("n@tp -> n", (4,), mesh=mesh, dtype=dtype),
        lambda: axes.transfer({"w": "n@tp"}, {"w": "n"}, mesh, mesh, {"w": (4,)}, dtype={"w": dtype}),
    ):
        with pytest.raises(ShardingError, match="dtype is a torch dtype or its name, like 'bfloat16'; found "):
            call()


def test_dtypes_of_numpy_are_known_wherever_a_dtype_is_taken():
    mesh, half = axes.Mesh("tp=2"), np.dtype("float16")
    assert axes.plan("n@tp", "n", (4,), mesh=mesh, dtype=half).dtype == "float16"
    assert "float16" in str(axes.explain("n@tp -> n", (4,), mesh=mesh, dtype=half))
    move = axes.transfer({"w": "n@tp"}, {"w": "n"}, mesh, mesh, {"w": np.zeros(4)}, dtype=half)
    assert move.tensors[0].dtypes == ("float64", "float16")


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda x: axes.reshard(x, "n@tp -> n", grad="pending"),
            ShardingError,
            "axes.reshard: grad='pending' is about",
        ),
        (lambda x: axes.rearrange(x, "n@tp -> n", grad="pending"), ShardingError, "axes.rearrange: grad='pending' is"),
        (lambda x: axes.repeat(x, "n@tp -> n", grad="pending"), ShardingError, "axes.repeat: grad='pending' is about"),
        (lambda x: axes.reshard(x.to_sparse(), "n@tp -> n"), ShardingError, "axes.reshard takes a dense tensor"),
        (lambda x: axes.reshard(x, "_@tp -> _"), ExpressionError, "'_' stands in specs only; reshard needs a name"),
        (lambda x: axes.reshard(x, "(a + b)@tp -> (a + b)"), ExpressionError, "reshard takes no blocks"),
        (lambda x: axes.reshard(x, "2 -> 2"), ExpressionError, "reshard takes no number but 1 on the left"),
    ],
)
def test_an_error_about_a_plain_shard_names_the_function_that_was_called(call, error, said):
    with axes.simulate(2), axes.init_mesh("tp=2", device_type="cpu"), pytest.raises(error) as caught:
        call(torch.ones(2))
    assert said in str(caught.value)


def test_a_reshard_of_a_plain_shard_without_a_mesh_says_so():
    with pytest.raises(axes.MeshError, match=r"axes\.reshard of plain tensors needs a mesh"):
        axes.reshard(torch.ones(2), "n@tp -> n")


def test_plan_takes_shardings_other_meshes_and_torch_dtypes():
    dense, sparse = axes.Mesh("dp=4 tp=2"), axes.Mesh("efsdp=2 ep=4")
    plan = axes.plan("b@dp d@tp", "b@ep d@efsdp", (8, 8), source_mesh=dense, target_mesh=sparse, dtype=torch.bfloat16)
    assert plan.collectives == 1
    assert plan.dtype == "bfloat16"
    again = axes.plan(dense.sharding("b@dp d@tp"), sparse.sharding("b@ep d@efsdp"), (8, 8), dtype="bfloat16")
    assert again.steps == plan.steps


def test_plan_is_what_reshard_does():
    with axes.simulate(8, rank=3):
        mesh = axes.init_mesh("dp=2 cp=2 tp=2", device_type="cpu")
        x = tensor(mesh, "b@dp s@(cp tp) d")
        with CommDebugMode() as counted:
            axes.reshard(x, "b s@cp d@tp")
        plan = axes.plan("b@dp s@(cp tp) d", "b@dp s@cp d@tp", SHAPE, mesh=mesh)
        assert counted.get_total_counts() == plan.collectives == 1
        assert list(plan.steps[0].ranks) == [2, 3]
    assert not dist.is_initialized()


def every_rank_raises() -> str:
    mesh = axes.init_mesh("dp=2 cp=2 tp=2", device_type="cpu")
    x = tensor(mesh, "b@dp s d")
    with pytest.raises(ShardingError) as error:
        axes.reshard(x, "b s d | sum@tp")
    # The ranks aren't out of step: what comes next works.
    assert torch.equal(axes.unshard(axes.shard(torch.ones(8), "n@tp", mesh=mesh)), torch.ones(8))
    return str(error.value)


def test_every_rank_raises_the_same(pool):
    found = pool.run(every_rank_raises)
    assert len(set(found)) == 1
