"""Collectives by axis name, on the plain tensors of each rank, with gradients.

Inside `axes.shard_map`, or inside `with mesh:`, a name means the ranks that differ from this one in
that axis alone:

    with axes.init_mesh("dp=2 tp=4") as mesh:
        total = axes.psum(x, "tp")                       # this rank's group of four
        whole = axes.all_gather(x, "tp", dim=1)          # tiled: four times as long
        total = axes.psum(x, ("dp", "tp"))               # all eight

An axis is any name of the mesh's namespace, or a tuple of names: their product, the first the
slowest. Names are looked up in `mesh=` where it is given, else in the ambient mesh. Every rank of
the axis calls the same collective with a tensor of the same shape and dtype, which is compared by
`axes.debug(check=True)` alone: shards of a dim that doesn't divide differ, and are padded before. An axis of size 1 is
free: what would be sent is returned as it is. Integers, bool, float8 and complex numbers work.

**Gradients** are those of the local view: each rank has its own `x`, and backward differentiates the
sum of all ranks' losses.

| forward | backward |
| --- | --- |
| `psum`, `pmean` | `psum`, `pmean` |
| `pmax`, `pmin` | `psum`, to the maxima (minima), divided among ties |
| `all_gather(dim)` | `psum_scatter(dim)` |
| `psum_scatter(dim)` | `all_gather(dim)` |
| `all_to_all(a, b)` | `all_to_all(b, a)` |
| `all_to_all(send_sizes=a, recv_sizes=b)` | `all_to_all(send_sizes=b, recv_sizes=a)` |
| `ppermute` | `ppermute` the other way |

Forward-mode differentiation (`torch.autograd.forward_ad`) and transforms of `torch.func` are errors;
`torch.autograd.functional.jvp` goes by backward.

So backward communicates as well, and all ranks must run it. It needs no ambient mesh: names are
looked up when the forward runs. In `torch.compile` each is one functional collective; a graph drops
what its rank doesn't use, so every rank uses what it gets. The names are those of `jax.lax`, tiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from axes.algebra.errors import MeshError, ShardingError, SizeError, shown
from axes.algebra.mesh import Mesh, ambient_mesh
from axes.algebra.sizes import whole_number, whole_numbers
from axes.runtime import axis_groups
from axes.runtime.axis_groups import AxisGroup, AxisName, axis_layout, group_along
from axes.runtime.linear import both_ways
from axes.runtime.operation import check_plain
from axes.runtime.redistribute import extreme

Pairs = Sequence[tuple[int, int]]
"""`(source, target)` coordinates."""

_SUM, _MEAN = (partial(axis_groups.all_reduce, op=op) for op in ("sum", "mean"))


def psum(x: torch.Tensor, axis: AxisName, *, mesh: Mesh | None = None) -> torch.Tensor:
    """Sum a tensor over an axis, elementwise: an all-reduce.

        coordinate 0   a         a + b + c
        coordinate 1   b    ->   a + b + c
        coordinate 2   c         a + b + c

    The gradient is the psum of the gradients, since every rank's loss uses every rank's `x`. Like JAX's
    `jax.lax.psum`.

    Args:
        x: This rank's plain tensor, of one shape and dtype on all ranks of the axis.
        axis: The name of an axis, or several: `("dp", "tp")`.
        mesh: Where the name is looked up, by default the ambient mesh or that of the region.

    Returns:
        A tensor of the shape of `x`, the same on all ranks of the axis. Integers wrap around; of bool it is the
        count, in int64.

    Raises:
        MeshError: There is no mesh, or it lacks the axis.
        ShardingError: `x` is a DTensor or isn't dense.

    Examples:
        >>> import axes
        >>> with axes.simulate(8), axes.init_mesh("dp=2 tp=4"):
        ...     psum(torch.ones(3, 2), "tp").shape
        torch.Size([3, 2])
    """
    group = _group("psum", x, axis, mesh)
    return _linear(x.to(torch.int64) if x.dtype == torch.bool else x, group, _SUM, _SUM)


def pmean(x: torch.Tensor, axis: AxisName, *, mesh: Mesh | None = None) -> torch.Tensor:
    """Average a tensor over an axis, elementwise: an all-reduce.

        coordinate 0   a         (a + b) / 2
        coordinate 1   b    ->   (a + b) / 2

    The gradient is the pmean of the gradients. In float16 each rank divides before the sum. Like JAX's
    `jax.lax.pmean`.

    Args:
        x: As in `psum`.
        axis: As in `psum`.
        mesh: As in `psum`.

    Returns:
        A tensor of the shape of `x`, the same on all ranks of the axis.

    Raises:
        MeshError: There is no mesh, or it lacks the axis.
        ShardingError: `x` has integers, is a DTensor or isn't dense.

    Examples:
        >>> import axes
        >>> with axes.simulate(8), axes.init_mesh("dp=2 tp=4"):
        ...     pmean(torch.ones(3, 2), "dp").shape
        torch.Size([3, 2])
    """
    group = _group("pmean", x, axis, mesh)
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise ShardingError(f"pmean of {x.dtype}: a mean of integers is no integer; write x.float(), or psum")
    return _linear(x, group, _MEAN, _MEAN)


def pmax(x: torch.Tensor, axis: AxisName, *, mesh: Mesh | None = None) -> torch.Tensor:
    """Take the maximum over an axis, elementwise: an all-reduce.

        coordinate 0   [1, 5]         [4, 5]
        coordinate 1   [4, 5]    ->   [4, 5]
        coordinate 2   [3, 2]         [4, 5]

    The gradient goes to the ranks that have the maximum, in equal parts: here `[0, g/2]`, `[g, g/2]`, `[0, 0]`. It
    takes two all-reduces. Like JAX's `jax.lax.pmax`.

    Args:
        x: As in `psum`. Of bool the result is "any".
        axis: As in `psum`.
        mesh: As in `psum`.

    Returns:
        A tensor of the shape of `x`, the same on all ranks of the axis.

    Raises:
        MeshError: There is no mesh, or it lacks the axis.
        ShardingError: `x` has complex numbers, is a DTensor or isn't dense.

    Examples:
        >>> import axes
        >>> with axes.simulate(8), axes.init_mesh("dp=2 tp=4"):
        ...     pmax(torch.ones(3, 2), "tp").shape
        torch.Size([3, 2])
    """
    return _extreme("pmax", x, axis, mesh, "max")


def pmin(x: torch.Tensor, axis: AxisName, *, mesh: Mesh | None = None) -> torch.Tensor:
    """Take the minimum over an axis, elementwise: an all-reduce.

        coordinate 0   [1, 5]         [1, 2]
        coordinate 1   [4, 5]    ->   [1, 2]
        coordinate 2   [3, 2]         [1, 2]

    The gradient goes to the ranks that have the minimum, in equal parts. It takes two all-reduces. Like JAX's
    `jax.lax.pmin`.

    Args:
        x: As in `psum`. Of bool the result is "all".
        axis: As in `psum`.
        mesh: As in `psum`.

    Returns:
        A tensor of the shape of `x`, the same on all ranks of the axis.

    Raises:
        MeshError: There is no mesh, or it lacks the axis.
        ShardingError: `x` has complex numbers, is a DTensor or isn't dense.

    Examples:
        >>> import axes
        >>> with axes.simulate(8), axes.init_mesh("dp=2 tp=4"):
        ...     pmin(torch.ones(3, 2), "tp").shape
        torch.Size([3, 2])
    """
    return _extreme("pmin", x, axis, mesh, "min")


def all_gather(x: torch.Tensor, axis: AxisName, dim: int = 0, *, mesh: Mesh | None = None) -> torch.Tensor:
    """Concatenate every rank's tensor along a dim, in the order of the axis.

        coordinate 0   [a]         [a b c]
        coordinate 1   [b]    ->   [a b c]
        coordinate 2   [c]         [a b c]

    The gradient is `psum_scatter(g, axis, dim)`, since every rank's loss uses every rank's `x`. Like JAX's
    `jax.lax.all_gather(..., tiled=True)`.

    Args:
        x: This rank's plain tensor, of one shape and dtype on all ranks of the axis. Pad uneven shards before.
        axis: As in `psum`.
        dim: The dim along which the tensors are concatenated.
        mesh: As in `psum`.

    Returns:
        A tensor that is larger along `dim` by the size of the axis, the same on all ranks of the axis.

    Raises:
        MeshError: There is no mesh, or it lacks the axis.
        ShardingError: `x` has no such dim, is a DTensor or isn't dense.

    Examples:
        >>> import axes
        >>> with axes.simulate(8), axes.init_mesh("dp=2 tp=4"):
        ...     all_gather(torch.ones(3, 2), "tp", dim=1).shape
        torch.Size([3, 8])
    """
    group = _group("all_gather", x, axis, mesh)
    dim = _dim("all_gather", x, dim)
    return _linear(x, group, partial(axis_groups.all_gather, dim=dim), partial(axis_groups.reduce_scatter, dim=dim))


def psum_scatter(x: torch.Tensor, axis: AxisName, dim: int = 0, *, mesh: Mesh | None = None) -> torch.Tensor:
    """Sum a tensor over an axis, and keep one of equal pieces along a dim: a reduce-scatter.

        coordinate 0   [a b c]         [a+d+g]
        coordinate 1   [d e f]    ->   [b+e+h]
        coordinate 2   [g h i]         [c+f+i]

    The gradient is `all_gather(g, axis, dim)`. Like JAX's `jax.lax.psum_scatter(..., tiled=True)`.

    Args:
        x: As in `psum`.
        axis: As in `psum`.
        dim: The dim that is cut into pieces.
        mesh: As in `psum`.

    Returns:
        This rank's piece of the sum.

    Raises:
        MeshError: There is no mesh, or it lacks the axis.
        SizeError: The dim doesn't divide by the size of the axis.
        ShardingError: `x` has no such dim, is a DTensor or isn't dense.

    Examples:
        >>> import axes
        >>> with axes.simulate(8), axes.init_mesh("dp=2 tp=4"):
        ...     psum_scatter(torch.ones(3, 8), "tp", dim=1).shape
        torch.Size([3, 2])
    """
    group = _group("psum_scatter", x, axis, mesh)
    dim, x = _dim("psum_scatter", x, dim), x.to(torch.int64) if x.dtype == torch.bool else x
    return _linear(x, group, partial(axis_groups.reduce_scatter, dim=dim), partial(axis_groups.all_gather, dim=dim))


def all_to_all(
    x: torch.Tensor,
    axis: AxisName,
    split_dim: int = 0,
    concat_dim: int = 0,
    *,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """Cut a tensor along one dim, send piece i to coordinate i, and concatenate the received pieces along another dim.

    A matrix of blocks, whose rows are on the ranks, is transposed:

        coordinate 0   [a b c]         [a d g]
        coordinate 1   [d e f]    ->   [b e h]
        coordinate 2   [g h i]         [c f i]

    A tensor that was split along `concat_dim` is split along `split_dim` after it. The gradient is `all_to_all(g,
    axis, concat_dim, split_dim)`. Like JAX's `jax.lax.all_to_all(..., tiled=True)`.

    Pieces have one size, unless you give the sizes: piece i has `send_sizes[i]` elements along the dim, and
    `recv_sizes[i]` come from coordinate i. This sends tokens to their experts without padding.

                       send_sizes                       recv_sizes
        coordinate 0   [2, 1, 1]    [a a b c]           [a a d]      [2, 1, 0]
        coordinate 1   [1, 0, 2]    [d f f]        ->   [b h h]      [1, 0, 2]
        coordinate 2   [0, 2, 1]    [h h i]             [c f f i]    [1, 2, 1]

    A rank that knows its own `send_sizes` alone gets the others by a small all-to-all:

        recv_sizes = axes.all_to_all(torch.tensor(send_sizes), axis).tolist()

    Args:
        x: This rank's plain tensor.
        axis: As in `psum`.
        split_dim: The dim that is cut.
        concat_dim: The dim along which received pieces are concatenated. With sizes it is the same as `split_dim`.
        send_sizes: Python integers, one for each coordinate. Their `.tolist()` breaks the graph of `torch.compile`.
        recv_sizes: The same for the received pieces. Ranks that disagree may wait for ever, unless
            `axes.debug(check=True)` compares them.
        mesh: As in `psum`.

    Returns:
        The received pieces, concatenated.

    Raises:
        MeshError: There is no mesh, or it lacks the axis.
        SizeError: The dim doesn't divide by the size of the axis, or `send_sizes` don't add up to its length.
        ShardingError: `x` has no such dim, is a DTensor or isn't dense; or sizes aren't lists of whole numbers, one
            for each coordinate.

    Examples:
        >>> import axes
        >>> with axes.simulate(8), axes.init_mesh("dp=2 tp=4"):
        ...     all_to_all(torch.ones(3, 8), "tp", split_dim=1, concat_dim=0).shape
        ...     all_to_all(torch.ones(3, 8), "tp", send_sizes=[0, 1, 2, 0], recv_sizes=[0, 5, 5, 0]).shape
        torch.Size([12, 2])
        torch.Size([10, 8])
    """
    group = _group("all_to_all", x, axis, mesh)
    split_dim, concat_dim = _dim("all_to_all", x, split_dim), _dim("all_to_all", x, concat_dim)
    if send_sizes is None and recv_sizes is None:
        run = partial(axis_groups.all_to_all, split_dim=split_dim, concat_dim=concat_dim)
        back = partial(axis_groups.all_to_all, split_dim=concat_dim, concat_dim=split_dim)
        return _linear(x, group, run, back)
    if split_dim != concat_dim:
        raise ShardingError(
            f"all_to_all with send_sizes cuts and concatenates along one dim; found split_dim={split_dim} and "
            f"concat_dim={concat_dim}. Write split_dim={split_dim}, concat_dim={split_dim}"
        )
    sends, receives = _sizes("send_sizes", send_sizes, group), _sizes("recv_sizes", recv_sizes, group)
    _check_sizes(x, split_dim, sends, receives, group)
    run = partial(axis_groups.exchange, dim=split_dim, sends=sends, receives=receives)
    return _linear(x, group, run, partial(axis_groups.exchange, dim=split_dim, sends=receives, receives=sends))


def ppermute(
    x: torch.Tensor,
    axis: AxisName,
    *,
    shift: int | None = None,
    perm: Pairs | None = None,
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """Send each rank's tensor to one other rank: around the ring, or along pairs.

        shift=1                        perm=[(0, 2), (2, 1)]
        coordinate 0   a         c         a         0
        coordinate 1   b    ->   a         b    ->   c
        coordinate 2   c         b         c         a

    The gradient goes along the same pairs in the other direction. Like JAX's `jax.lax.ppermute`.

    Args:
        x: As in `psum`.
        axis: As in `psum`.
        shift: Coordinate i sends to `(i + shift) % size`.
        perm: Pairs `(source, target)` of coordinates. No coordinate is a source twice or a target twice.
        mesh: As in `psum`.

    Returns:
        The received tensor; zeros where nothing is received.

    Raises:
        MeshError: There is no mesh, or it lacks the axis.
        ShardingError: Neither or both of `shift` and `perm` are given, or pairs aren't valid.

    Examples:
        >>> import axes
        >>> with axes.simulate(8), axes.init_mesh("dp=2 tp=4"):
        ...     ppermute(torch.ones(3, 2), "tp", shift=1).shape
        torch.Size([3, 2])
    """
    group = _group("ppermute", x, axis, mesh)
    if (shift is None) == (perm is None):
        raise ShardingError("ppermute goes by shift=1 or by perm=[(source, target), ...]; give one of the two")
    target, source = _neighbours(shift, group) if perm is None else _partners(perm, group)
    if group.size == 1 and source is None:
        return torch.zeros_like(x)
    if perm is None and target == group.coordinate:
        return x
    run = partial(axis_groups.permute, target=target, source=source)
    return _linear(x, group, run, partial(axis_groups.permute, target=source, source=target))


def axis_index(axis: AxisName, *, mesh: Mesh | None = None) -> int:
    """This rank's coordinate on an axis, a Python number from 0. Like JAX's `jax.lax.axis_index`.

    Args:
        axis: The name of an axis, or several, which are then read as one.
        mesh: As in `psum`.

    Raises:
        MeshError: There is no mesh, or it lacks the axis.

    Examples:
        >>> import axes
        >>> with axes.Mesh("dp=2 tp=4").at(6):
        ...     axis_index("tp"), axis_index(("dp", "tp"))
        (2, 6)
    """
    return _coordinate(_mesh("axis_index", axis, mesh), axis)


def axis_size(axis: AxisName, *, mesh: Mesh | None = None) -> int:
    """The number of ranks along an axis. Like JAX's `jax.lax.axis_size`.

    Args:
        axis: The name of an axis, or several, whose sizes are multiplied.
        mesh: As in `psum`.

    Raises:
        MeshError: There is no mesh, or it lacks the axis.

    Examples:
        >>> import axes
        >>> with axes.Mesh("dp=2 tp=4"):
        ...     axis_size("tp"), axis_size(("dp", "tp"))
        (4, 8)
    """
    return _size(_mesh("axis_size", axis, mesh), axis)


# what a call is about


def _mesh(what: str, axis: AxisName, mesh: Mesh | None) -> Mesh:
    found = mesh if mesh is not None else ambient_mesh()
    if found is None:
        raise MeshError(
            f"{what}: no mesh says which ranks {shown(axis)} is. Call it in a function that axes.shard_map runs, "
            "inside `with mesh:`, or with mesh=..."
        )
    if not isinstance(found, Mesh):
        raise MeshError(f"axes are looked up in an axes mesh; found {type(found).__name__}")
    if not isinstance(axis, str) and not (isinstance(axis, tuple) and all(isinstance(name, str) for name in axis)):
        raise MeshError(f"an axis is a name like 'tp', or several like ('cp', 'tp'); found {shown(axis)}")
    return found


def _group(what: str, x: torch.Tensor, axis: AxisName, mesh: Mesh | None) -> AxisGroup:
    """The group of the axis, once it is clear that `x` can travel along it."""
    check_plain(
        what,
        x,
        "Call it in a function that axes.shard_map runs, or on axes.to_local(x); to move a DTensor, write axes.reshard "
        "or axes.rearrange",
    )
    return group_along(_mesh(what, axis, mesh), axis)


@torch.compiler.assume_constant_result
def _coordinate(mesh: Mesh, axis: AxisName) -> int:
    layout, name = axis_layout(mesh, axis)
    position = mesh.universe.position(mesh.rank)
    if position is None:
        raise MeshError(f"rank {mesh.rank} isn't one of the ranks of {mesh!r}, so it has no coordinate on '{name}'")
    return layout.coordinate(position)


@torch.compiler.assume_constant_result
def _size(mesh: Mesh, axis: AxisName) -> int:
    return axis_layout(mesh, axis)[0].size


def _dim(what: str, x: torch.Tensor, dim: int) -> int:
    at = whole_number(dim)
    if at is None or not -x.ndim <= at < x.ndim:
        hint = "a scalar has no dims; write x[None]" if x.ndim == 0 else f"dims are 0 to {x.ndim - 1}"
        raise ShardingError(f"{what} over dim {shown(dim)} of a tensor {list(x.shape)}: {hint}")
    return at % x.ndim


def _sizes(what: str, sizes: Sequence[int] | None, group: AxisGroup) -> tuple[int, ...]:
    """Sizes of pieces, once it is clear that they are one number for each coordinate."""
    whole = whole_numbers(sizes) if isinstance(sizes, Sequence) else None
    if whole is None or len(whole) != group.size or any(not 0 <= n < 2**63 for n in whole):
        raise ShardingError(
            f"all_to_all takes send_sizes and recv_sizes together; {what} are Python numbers of 0 or more, one for "
            f"each of the {group.size} coordinates of '{group.name}'; found {shown(sizes)}. Of a tensor write "
            ".tolist(); a small all_to_all tells ranks what they receive: "
            "axes.all_to_all(torch.tensor(send_sizes), axis).tolist()"
        )
    return whole


def _check_sizes(x: torch.Tensor, dim: int, sends: Sequence[int], receives: Sequence[int], group: AxisGroup) -> None:
    """`SizeError` where this rank alone can tell that the sizes are wrong."""
    if sum(sends) != x.shape[dim]:
        raise SizeError(
            f"all_to_all over '{group.name}': send_sizes {list(sends)} add up to {sum(sends)}; dim {dim} of "
            f"{list(x.shape)} has {x.shape[dim]} elements"
        )
    here = group.coordinate
    if sends[here] != receives[here]:
        raise SizeError(
            f"all_to_all over '{group.name}': this rank, coordinate {here}, sends itself {sends[here]} in send_sizes "
            f"and receives {receives[here]} from itself in recv_sizes"
        )


def _neighbours(shift: int | None, group: AxisGroup) -> tuple[int, int]:
    """Where this rank sends to and receives from when all send by `shift`."""
    steps = whole_number(shift)
    if steps is None:
        raise ShardingError(f"ppermute's shift is a whole number; found {shown(shift)}")
    return (group.coordinate + steps) % group.size, (group.coordinate - steps) % group.size


def _partners(perm: Pairs, group: AxisGroup) -> tuple[int | None, int | None]:
    """The coordinates to which this rank sends and from which it receives, None where there is none."""
    pairs = perm if isinstance(perm, Sequence) and all(map(_is_pair, perm)) else [(-1, -1)]
    for each in zip(*pairs, strict=True):
        if len({*each}) < len(each) or not {*each} <= {*range(group.size)}:
            raise ShardingError(
                f"ppermute's perm is a list of pairs (source, target), coordinates 0 to {group.size - 1} of "
                f"'{group.name}', each the source and the target of one at most; found {shown(perm)}. To send to "
                "several, all_gather and slice"
            )
    here = group.coordinate
    return dict(pairs).get(here), {target: source for source, target in pairs}.get(here)


def _is_pair(given: object) -> bool:
    return isinstance(given, tuple | list) and len(given) == 2 and None not in map(whole_number, given)


# forward and backward: a linear collective is a pair of maps, each the transpose of the other


def _linear(x: torch.Tensor, group: AxisGroup, run: Callable[..., Any], back: Callable[..., Any]) -> torch.Tensor:
    """`run(x, group=group)`, of which `back` is the gradient; a rank alone has it."""
    if group.size == 1:
        return x
    return both_ways(partial(run, group=group), partial(back, group=group), x)


def _extreme(what: str, x: torch.Tensor, axis: AxisName, mesh: Mesh | None, op: str) -> torch.Tensor:
    group = _group(what, x, axis, mesh)
    if x.dtype.is_complex:
        raise ShardingError(f"{what}: complex numbers have no order; take x.abs()")
    return extreme(x, op, group) if group.size > 1 else x
