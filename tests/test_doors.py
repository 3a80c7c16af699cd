"""What every function asks of sizes and shapes, whatever the caches hold already."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import axes
from axes import Mesh, SizeError

MESH = Mesh("dp=2 tp=4")
SHARDED = MESH.sharding("b@dp s@tp")
GROUPED = MESH.sharding("b@dp (three h@tp)", three=3)

NO_NUMBERS = [4.0, "4", None, True, object(), 4 + 0j, [4], np.float64(4), torch.tensor(4.0)]

# ------------------------------------------------------------------------------- shapes

SHAPE_DOORS = {
    "local_shape": lambda shape: SHARDED.local_shape(shape),
    "local_shape of a factor": lambda shape: GROUPED.local_shape(shape),
    "local_indices": lambda shape: SHARDED.local_indices(shape),
    "extents": lambda shape: SHARDED.extents(shape),
    "is_equivalent": lambda shape: SHARDED.is_equivalent(MESH.sharding("x@dp y@tp"), shape),
    "sized": lambda shape: SHARDED.sized(shape),
    "sized of a factor": lambda shape: GROUPED.sized(shape).local_shape((4, 12)),
    "from_placements": lambda shape: axes.Sharding.from_placements(MESH, SHARDED.placements, 2, shape).spec,
    "plan": lambda shape: axes.plan("b@dp s@tp", "b s", shape, mesh=MESH).shape,
}


@pytest.mark.parametrize("wrong", NO_NUMBERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("door", SHAPE_DOORS)
def test_a_shape_is_whole_numbers_at_every_door_before_and_after_it_was_right(door, wrong):
    call = SHAPE_DOORS[door]
    with pytest.raises(SizeError, match="a shape is whole numbers from 0; found"):
        call((wrong, 12))
    right = call((4, 12))
    with pytest.raises(SizeError, match="a shape is whole numbers from 0; found"):
        call((wrong, 12))
    for shape in ("4", (-1, 12), 4):
        with pytest.raises(SizeError, match="a shape is whole numbers from 0; found"):
            call(shape)
    for shape in ((np.int64(4), np.uint8(12)), torch.tensor([4, 12]), torch.Size([4, 12]), np.array([4, 12])):
        assert call(shape) == right


# ---------------------------------------------------------------------------- sizes of names


def on_one_rank(call):
    with axes.simulate(1), axes.init_mesh("tp=1") as mesh:
        return call(mesh)


WHOLE = torch.arange(24.0).view(2, 12)

# fmt: off
SIZE_DOORS = {
    "sharding": lambda mesh, h: mesh.sharding("b (h@tp d)", h=h).spec,
    "sharding, sizes": lambda mesh, h: mesh.sharding("b (h@tp d)", sizes={"h": h}).spec,
    "plan": lambda mesh, h: str(axes.plan("b (h@tp d)", "b d", (2, 12), mesh=mesh, h=h)),
    "plan, sizes": lambda mesh, h: str(axes.plan("b (h@tp d)", "b d", (2, 12), mesh=mesh, sizes={"h": h})),
    "rearrange a mesh": lambda mesh, h: axes.Mesh("x=12").rearrange("(h d) -> h d", h=h).shape,
    "define": lambda mesh, h: axes.Mesh("x=12").define("(x) = h d", h=h).names,
    "a mesh": lambda mesh, h: axes.Mesh("h d=3", h=h).shape,
    "shard": lambda mesh, h: axes.shard(WHOLE, "b (h@tp d)", mesh=mesh, h=h).to_local().tolist(),
    "shard, sizes": lambda mesh, h: axes.shard(WHOLE, "b (h@tp d)", mesh=mesh, sizes={"h": h}).to_local().tolist(),
    "from_local": lambda mesh, h: axes.from_local(WHOLE, "b (h@tp d)", mesh=mesh, h=h).to_local().tolist(),
    "zeros": lambda mesh, h: axes.zeros("h@tp d", mesh=mesh, d=3, h=h).to_local().tolist(),
    "full": lambda mesh, h: axes.full("h@tp d", 1.5, mesh=mesh, d=3, sizes={"h": h}).to_local().tolist(),
    "empty": lambda mesh, h: tuple(axes.empty("h@tp d", mesh=mesh, d=3, h=h).shape),
    "rand": lambda mesh, h: tuple(axes.rand("h@tp d", mesh=mesh, d=3, h=h).shape),
    "einops": lambda mesh, h: axes.rearrange(WHOLE, "b (h d) -> h b d", h=h).tolist(),
    "rearrange": lambda mesh, h: axes.rearrange(WHOLE, "b (h d) -> h@tp b d", mesh=mesh, h=h).tolist(),
    "rearrange, sizes": lambda mesh, h: axes.rearrange(WHOLE, "b (h d) -> h b d", sizes={"h": h}).tolist(),
    "rearrange a DTensor": lambda mesh, h: (axes.rearrange(axes.shard(WHOLE, "b d", mesh=mesh), "b (h d) -> h b d", h=h).to_local().tolist()),
    "reduce": lambda mesh, h: axes.reduce(WHOLE, "b (h@tp d) -> b d", "sum", mesh=mesh, h=h).tolist(),
    "reduce by einops": lambda mesh, h: axes.reduce(WHOLE, "b (h d) -> b d", "sum", h=h).tolist(),
    "repeat": lambda mesh, h: axes.repeat(WHOLE, "b d -> b h@tp d", mesh=mesh, h=h).tolist(),
    "repeat by einops": lambda mesh, h: axes.repeat(WHOLE, "b d -> b h d", h=h).tolist(),
    "einsum": lambda mesh, h: axes.einsum(WHOLE, "b (h d) -> b h", h=h).tolist(),
    "reshard": lambda mesh, h: axes.reshard(axes.shard(WHOLE, "b d", mesh=mesh), "b (h@tp d)", h=h).to_local().tolist(),
    "rms_norm": lambda mesh, h: axes.rms_norm(torch.ones(2, 4), "b h@tp", over="h", mesh=mesh, h=h).tolist(),
    "cross_entropy": lambda mesh, h: axes.cross_entropy(torch.ones(2, 4), torch.tensor([1, 2]), "b h@tp, b -> ", mesh=mesh, h=h).tolist(),
    "embedding": lambda mesh, h: axes.embedding(torch.tensor([1, 2]), torch.ones(4, 3), "b, h@tp e -> b e", mesh=mesh, h=h).tolist(),
    "reshard a shard": lambda mesh, h: axes.reshard(WHOLE, "b (h d)@tp -> b (h d)", mesh=mesh, h=h).tolist(),
}
# fmt: on


@pytest.mark.parametrize("wrong", [4.0, "4", True, np.float64(4)], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("door", SIZE_DOORS)
def test_a_size_is_a_whole_number_at_every_door_before_and_after_it_was_right(door, wrong):
    call = SIZE_DOORS[door]

    def calls(mesh):
        for before in (False, True):
            if before:
                right = call(mesh, 4)
            with pytest.raises(SizeError, match=r"the size of 'h' is a whole number from 1|no option 'h'"):
                call(mesh, wrong)
        assert call(mesh, 4) == call(mesh, np.int64(4)) == call(mesh, torch.tensor(4)) == right

    on_one_rank(calls)


def test_a_size_that_stays_open_may_be_written_as_minus_one_or_none_everywhere():
    for h in (-1, None):
        found = axes.rearrange(WHOLE, "b (h@tp d) -> h@tp b d", mesh=Mesh("tp=1"), d=3, h=h)
        assert torch.equal(found, axes.rearrange(WHOLE, "b (h d) -> h b d", d=3))
