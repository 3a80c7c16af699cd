"""`axes.extension`: a package of somebody else's, built from its names and the public ones of axes alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import axes
import axes.extension as ext


class Neighbours:
    """A halo exchange of somebody's own: the last row of the rank before, in front of this rank's rows."""

    def __init__(self, spec: str, axis: str):
        (self.dim,) = [at for at, dim in enumerate(ext.read(spec).operands[0].dims) if f"@{axis}" in str(dim)]
        self.axis = axis

    def __call__(self, x: DTensor) -> torch.Tensor:
        mesh = axes.sharding_of(x).mesh
        return ext.linear(lambda x: self.forward(ext.local(x), mesh), lambda g: self.backward(g, mesh, x), x)

    def forward(self, x: torch.Tensor, mesh: axes.Mesh) -> torch.Tensor:
        last = x.select(self.dim, -1).contiguous()
        return torch.cat((self.sent(last, mesh, 1).unsqueeze(self.dim), x), self.dim)

    def backward(self, g: torch.Tensor, mesh: axes.Mesh, x: DTensor) -> DTensor:
        first, own = g.select(self.dim, 0).contiguous(), g.narrow(self.dim, 1, g.shape[self.dim] - 1).clone()
        own.select(self.dim, -1).add_(self.sent(first, mesh, -1))
        return ext.dtensor(own, x)

    def sent(self, row: torch.Tensor, mesh: axes.Mesh, step: int) -> torch.Tensor:
        """The row of the rank before, or behind, by an all-gather of its own."""
        group = mesh.axis(self.axis)
        rows = [torch.empty_like(row) for _ in range(group.size)]
        ext.collective(self.described, (row, group), dist.all_gather, rows, row, group.group)
        at = group.index - step
        return rows[at] if 0 <= at < group.size else torch.zeros_like(row)

    def described(self, row: torch.Tensor, group: axes.Axis) -> ext.Operation:
        said, ranks = f"neighbours of {list(row.shape)}", tuple(group.ranks)
        named = said, "neighbours", "all_gather", self.axis, str(group.group.group_name), ranks
        return ext.Operation(*named, str(row.dtype), "cpu", bytes_in=row.nbytes, compared=said, mesh=group.mesh)


def of_somebody(rank: int) -> None:
    mesh = axes.init_mesh("tp=3", device_type="cpu")
    whole = torch.arange(21.0, dtype=torch.float64).view(7, 3).sin()
    x, w = axes.shard(whole, "a@tp b", mesh=mesh).requires_grad_(), whole.clone().requires_grad_()
    heard = []
    with ext.listen(lambda operation: heard.append(operation.kind)):
        y = Neighbours("a@tp b", "tp")(x)
    assert heard == ["neighbours"]
    assert ext.Operation.place()[0].endswith(" in of_somebody")
    start, stop = ((0, 3), (3, 6), (6, 7))[rank]
    before = w[start - 1 : start] if start else torch.zeros(1, 3)
    torch.testing.assert_close(y.detach(), torch.cat((before, w[start:stop])).detach())
    (y.sin().sum()).backward()
    sum(torch.cat((w[i - 1 : i], w[i:j])).sin().sum() for i, j in ((0, 3), (3, 6), (6, 7))).backward()
    torch.testing.assert_close(axes.unshard(x.grad), w.grad)

    sharding, shape = ext.whole("somebody", whole[start:stop], "a@tp b", mesh)
    assert (sharding.spec, shape) == ("a@tp b", (7, 3))
    drawn = ext.draw(torch.empty(stop - start, 3), sharding, shape, 5, "normal")
    assert torch.equal(drawn, ext.draw(torch.empty(7, 3), None, (7, 3), 5, "normal")[start:stop])
    assert [(box.offsets, box.sizes) for box in ext.boxes(x)] == [((start, 0), (stop - start, 3))]
    assert ext.agree("the size", range(3), "7", rank) == [0, 1, 2]
    with pytest.raises(axes.DesyncError, match=r"(?s)the size over ranks 0\.\.2.*rank 0: 8.*: 7.*give one size"):
        ext.agree("the size", range(3), "7" if rank else "8", advice="give one size")
    saved = (x.detach() * 1).requires_grad_()
    product = (saved * saved).sum()
    ext.written([saved])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def ranks_of_somebody() -> None:
    of_somebody(dist.get_rank())


def test_a_package_of_somebody_else_is_built_from_fifteen_names(world):
    world(ranks_of_somebody, 3)
    assert len(ext.__all__) <= 15
    assert all(getattr(ext, name).__doc__ and f"`{name}`" in ext.__doc__ for name in ext.__all__)
