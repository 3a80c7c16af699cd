"""Sharded tensors: torch's own `DTensor`, made from and described by specs.

    x = axes.shard(tensor, "batch@dp seq@(cp tp) embed", mesh=mesh)    # every rank has the whole
    x = axes.from_local(local, "batch@dp seq embed", mesh=mesh)        # every rank has its shard
    axes.spec_of(x)                                                    # '_@dp _@(cp tp) _'
    axes.unshard(x)                                                    # the whole, on every rank

In a spec the whole truth is written: a bare name is unsplit, an axis that isn't named is
replicated. FSDP2, tensor-parallel styles, optimizers, `torch.compile` and distributed checkpoint
take these DTensors as they take their own.
"""

from __future__ import annotations

import functools
import math
import operator
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from axes.algebra.errors import AxesError, DesyncError, MeshError, ShardingError, SizeError, wrong_dims
from axes.algebra.grammar import checked_spec
from axes.algebra.layout import Layout, digits
from axes.algebra.logical import Rules, ambient_rules
from axes.algebra.mesh import Mesh, ambient_mesh, required_mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.plan import cuts_of
from axes.algebra.sharding import Sharding, Slots
from axes.algebra.sizes import Shape, checked_rank, checked_shape, checked_tensor_shape, written_sizes
from axes.algebra.specs import marked_sharding, parsed_sharding
from axes.runtime import torch_private
from axes.runtime.agreement import ranks_text
from axes.runtime.axis_groups import AxisGroup, all_gather, broadcast, group_over
from axes.runtime.border import check_grad, counted_alone, enter_global, leave_global, resolving, traced, used
from axes.runtime.graphs import are_equal, device_mesh_input, fixed, hints, kept, vary
from axes.runtime.groups import current_world, of_world, say_why
from axes.runtime.linear import linear
from axes.runtime.operation import PLAIN, check_plain, check_transforms
from axes.runtime.packing import strides_of
from axes.runtime.redistribute import route, unsharded
from axes.runtime.torch_placements import (
    sharding_of_placements,
    sharding_of_spec,
    torch_placements,
)

Given = tuple[tuple[str, int], ...]
Sizes = Mapping[str, int]
Use: TypeAlias = Literal["whole", "summed"]
"""What ranks do with their copies of what is replicated, where it needs a gradient."""

Known = tuple[int | None, ...]
"""A whole shape, with None for each size that this rank can't know by itself."""

_RANKS_SHOWN = 16

_MOST_DIMS = 64
"""How many dims a tensor has at most, to torch."""


def shard(
    tensor: torch.Tensor,
    spec: str,
    /,
    mesh: Mesh | None = None,
    source_rank: int | None = None,
    *,
    sizes: Sizes | None = None,
    **keywords: int,
) -> DTensor:
    """Make a DTensor of a tensor that every rank has whole; each rank keeps its shard.

    Nothing is sent, unless `source_rank` is given. Like `torch.distributed.tensor.distribute_tensor`, which always
    sends the tensor of rank 0.

    A leaf becomes a new leaf, with the same `requires_grad`; its gradient is reduced to its own sharding. Inside of
    a computation the call is differentiable: every rank gets the whole gradient, which is gathered. Inside of
    `axes.use_rules`, a spec without an `@` is in logical names.

    Args:
        tensor: The whole tensor, equal on every rank of the mesh.
        spec: Its dims and their axes, such as `"batch@dp embed"`. Nothing is pending.
        mesh: The mesh, by default the ambient one.
        source_rank: A global rank of the mesh whose tensor is broadcast first. The others pass a tensor of its shape
            and dtype.
        sizes: Sizes of factors of grouped dims, for names that collide with a parameter.
        **keywords: Sizes of factors of grouped dims.

    Returns:
        A DTensor, whose shard is a copy on the mesh's device.

    Raises:
        ShardingError: The spec doesn't fit the tensor, has a pending reduction, or can't be represented by DTensor
            for this shape.
        MeshError: There is no mesh, or it lacks an axis.

    Examples:
        >>> import axes
        >>> with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        ...     w = axes.shard(torch.zeros(24, 8), "(qkv=3 heads@tp dim) embed@dp", heads=4)
        ...     w.to_local().shape
        torch.Size([12, 4])
    """
    mesh = required_mesh(mesh, "axes.shard")
    check_plain("axes.shard", tensor, "To move one, use axes.reshard")
    if tensor.is_meta:
        raise ShardingError("axes.shard takes a tensor with values; found one on the device 'meta'")
    given = written_sizes(keywords, sizes)
    rules = ambient_rules()
    if rules is not None and "@" not in checked_spec(spec):
        spec = spec_by_rules(rules, spec, mesh, tuple(map(operator.index, tensor.shape)), given)
    if not torch.compiler.is_compiling():
        return _sharded(tensor, spec, mesh, source_rank, given)
    if source_rank is not None or (tensor.is_leaf and tensor.requires_grad):
        return _sharded_outside(tensor, spec, mesh, source_rank, given)
    names, numbers = _apart(given)
    return traced(_cut_in_graph, (mesh, spec, names), (tensor,), device_mesh_input(mesh), numbers)


@torch.compiler.assume_constant_result
def spec_by_rules(rules: Rules, spec: str, mesh: Mesh, shape: tuple[int, ...], sizes: Given) -> str:
    """A spec in logical names on a mesh; to `torch.compile` a constant, so that a graph is for one shape."""
    return rules.spec(spec, mesh, shape, sizes=dict(sizes))


def _sharded(tensor: torch.Tensor, spec: str, mesh: Mesh, source_rank: int | None, sizes: Given) -> DTensor:
    sharding = sharding_in_torch(mesh, spec, tensor.shape, sizes)
    _check_whole(sharding)
    source = None if source_rank is None else _source(mesh, source_rank)
    device_type = mesh.device_mesh.device_type
    if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled() and mesh.coordinate is not None:
        if source is not None:
            raise ShardingError(
                "axes.shard with source_rank takes a leaf or a tensor without gradient; found the result of a "
                "computation. Where every rank has computed it, leave out source_rank"
            )
        return _cut(tensor.to(device_type), sharding)
    value = tensor.detach()
    if source is not None:
        value = broadcast_on(mesh, value, "axes.shard(source_rank=...)", source)
    made = resolving(dtensor_of(take_shard(value, sharding).to(device_type), sharding, tensor.shape))
    return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


_sharded_outside = torch.compiler.disable(
    _sharded, reason="axes.shard makes a new leaf, or broadcasts, outside of the graph"
)


def _check_whole(sharding: Sharding) -> None:
    if sharding.pending:
        raise ShardingError(
            f"a whole tensor has nothing pending; found '{sharding}'. Use axes.from_local for the terms of a sum"
        )


def from_local(
    local: torch.Tensor,
    spec: str,
    /,
    mesh: Mesh | None = None,
    shape: Sequence[int] | None = None,
    grad: Use | None = None,
    *,
    sizes: Sizes | None = None,
    **keywords: int,
) -> DTensor:
    """Make a DTensor of this rank's shard, which isn't copied. Like `DTensor.from_local`.

    Every rank must know the whole shape. If neither `shape` nor the whole sizes of the split dims are given, the
    ranks exchange their sizes in one small all-gather at each call, and the host waits for it: give the sizes in a
    loop. A compiled graph has to know them: there it is an error.

    It is differentiable. Over an axis that splits the tensor, the gradient of `local` is this rank's shard of the
    gradient; over a pending axis it is the whole gradient.

    Args:
        local: This rank's shard. Over an axis that the spec doesn't name, it is equal on all ranks.
        spec: The sharding, such as `"batch@dp embed | sum@tp"`. `| same@tp` says `grad="whole"` for some axes only.
        mesh: The mesh, by default the ambient one.
        shape: The whole shape.
        grad: Which gradient the ranks get over an axis on which `local` is replicated, if it needs one. `"whole"`:
            every rank computes the same, and gets the whole gradient. `"summed"`: every rank computes its own, and
            the gradients are added up in the end.
        sizes: Whole sizes of split dims by name, for names that collide with a parameter.
        **keywords: Whole sizes of split dims by name.

    Returns:
        A DTensor that shares the memory of `local`.

    Raises:
        ShardingError: `local` isn't the shard that the spec and the shape say, or `grad` is needed and missing.
        SizeError: The parts of the ranks aren't shards of one tensor, as `torch.chunk` cuts them.
        MeshError: There is no mesh, or it lacks an axis.

    Examples:
        >>> import axes
        >>> with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        ...     h = axes.from_local(torch.ones(4, 8), "batch@dp embed | sum@tp", batch=8)
        ...     h.shape, axes.spec_of(h)
        (torch.Size([8, 8]), '_@dp _ | sum@tp')
    """
    mesh, is_open = required_mesh(mesh, "axes.from_local"), shape is None
    try:
        check_plain("axes.from_local", local, "To move one, use axes.reshard")
        check_grad("axes.from_local", grad)
        names, numbers = _apart(written_sizes(keywords, sizes))
        shape = () if shape is None else checked_shape(shape)
        what = mesh, spec, names, is_open, grad
        if torch.compiler.is_compiling():
            return traced(_from_local, what, (local,), device_mesh_input(mesh), (*numbers, *shape))
        if not is_open:
            shape = checked_tensor_shape(shape)
        return _from_local(*what, (*numbers, *shape), (local,))
    except AxesError as error:
        if is_open and not isinstance(error, DesyncError):  # others may wait for the sizes of this rank
            say_why(f"was last seen when it raised in axes.from_local '{spec}': {error}")
        raise


def _from_local(
    mesh: Mesh,
    spec: str,
    names: tuple[str, ...],
    is_open: bool,
    grad: Use | None,
    numbers: Sequence[int],
    tensors: Sequence[torch.Tensor],
) -> DTensor:
    """`numbers`: the sizes of these names, and the whole shape where it isn't open."""
    (local,), count = tensors, len(names)
    given = tuple([(name, n if type(n) is int else fixed(n)) for name, n in zip(names, numbers, strict=False)])
    part = read_shard(mesh, spec, tuple(local.shape), given, None if is_open else numbers[count:])
    asked, needed = f"axes.from_local '{spec}'", local.requires_grad and torch.is_grad_enabled()
    said = part.same, grad, f"axes.from_local(local, {spec!r}", spec
    if type(local) in PLAIN:
        if needed and part.open:  # refused before ranks tell each other sizes
            counted_alone(mesh, torch_placements(part.sharding.sized(part.even)), *said)
        (whole,) = told_shapes(asked, mesh, (part,), (local,))
        placements = placements_of(part, whole)
    else:
        ((local, placements, whole),) = traced_parts(asked, (part,), (local,))
    counted = counted_alone(mesh, placements, *said) if needed else None
    made = enter_global(local, mesh.device_mesh, placements, whole, counted)
    return made if made.requires_grad or type(local) not in PLAIN else resolving(made)


def _apart(sizes: Given) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names, and their sizes: to a graph these may be symbols."""
    return tuple([name for name, _ in sizes]), tuple([size for _, size in sizes])


def unshard(x: DTensor) -> torch.Tensor:
    """The whole tensor on every rank, with pending reductions carried out. Like `DTensor.full_tensor`.

    It is differentiable: its gradient is whole on every rank, and every rank uses it in the same way.

    Args:
        x: A DTensor.

    Returns:
        A plain tensor of the whole shape.

    Raises:
        ShardingError: `x` isn't a DTensor.

    Examples:
        >>> import axes
        >>> with axes.simulate(2), axes.init_mesh("dp=2", device_type="cpu"):
        ...     axes.unshard(axes.shard(torch.arange(8), "n@dp")).shape
        torch.Size([8])
    """
    _check_distributed("axes.unshard", x)
    return traced(_whole, (), (x,)) if torch.compiler.is_compiling() else unsharded(used(x))


def to_local(x: DTensor, spec: str | None = None, grad: Use | None = None) -> torch.Tensor:
    """This rank's shard of a DTensor as a plain tensor. Nothing is sent or copied. Like `DTensor.to_local`.

    It is differentiable. Over an axis that splits the tensor, the gradient is this rank's shard; over a pending axis
    it is the whole gradient.

    Args:
        x: A DTensor.
        spec: An assertion of how `x` is sharded, complete: a dim without an `@` is unsplit. `| same@tp` says
            `grad="whole"` for some axes only.
        grad: How the ranks use their copies over an axis on which `x` is replicated, if it needs a gradient.
            `"whole"`: all ranks compute the same, and each has the whole gradient. `"summed"`: each rank computes
            its own, and the gradients add up.

    Returns:
        A plain tensor that shares the memory of `x`.

    Raises:
        ShardingError: `x` isn't sharded as the spec says, or `grad` is needed and missing.

    Examples:
        >>> import axes
        >>> with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        ...     x = axes.ones("batch@dp embed", batch=8, embed=4, requires_grad=True)
        ...     axes.to_local(x, grad="whole").shape
        torch.Size([4, 4])
    """
    _check_distributed("axes.to_local", x)
    check_grad("axes.to_local", grad)
    where = ambient_mesh() if spec is not None else None
    if spec is not None:
        checked_spec(spec)
    if torch.compiler.is_compiling():
        return traced(_left, (spec, where, grad), (x,))
    return _left(spec, where, grad, (), (used(x),))


def _left(
    spec: str | None, where: Mesh | None, grad: str | None, _: object, tensors: Sequence[DTensor]
) -> torch.Tensor:
    (x,) = tensors
    needed = x.requires_grad and torch.is_grad_enabled()
    if spec is None and not needed:
        return torch_private.local_of(x)
    return leave_global(x, _leaving(torch_private.spec_of(x), spec, where, grad, needed))


@of_world(4096)
def _leaving(
    held: Any, spec: str | None, where: Mesh | None, grad: str | None, needed: bool
) -> tuple[Placement, ...] | None:
    """What the gradient of a tensor goes by where it is `needed`. Refuses a tensor that isn't as the spec says.

    `where`: the mesh to look names up in, where it is of the tensor's universe.
    """
    actual, shape = sharding_of_spec(held), hints(held.shape)
    mesh = actual.mesh
    names = where if where is not None and where.universe == mesh.universe else mesh
    written, same = (actual, ()) if spec is None else marked_sharding(names, spec, (), len(shape))
    if written.ndim != len(shape):
        raise wrong_dims(spec, written.ndim, len(shape), shape)
    written, actual = written.sized(shape), actual.sized(shape)
    if not written.is_equivalent(actual, shape):
        raise ShardingError(
            f"axes.to_local: the tensor isn't sharded as the spec says\n  spec    {spec}\n"
            f"  tensor  {actual}    {list(shape)}, {mesh!r}\n"
            f"write how it is sharded, or move it first: axes.reshard(x, '{written}')"
        )
    vary(held.shape, cuts_of(actual.at(shape), written.at(shape)))
    if not needed:
        return None
    call = "axes.to_local(x" if spec is None else f"axes.to_local(x, {spec!r}"
    return counted_alone(mesh, held.placements, same, grad, call, actual.spec if spec is None else spec)


def spec_of(x: DTensor) -> str:
    """The sharding of a DTensor as text, such as `'_@dp _@(cp tp) _ | sum@ep'`: its dims have no names.

    Args:
        x: A DTensor.

    Raises:
        ShardingError: `x` isn't a DTensor, or has placements that no spec can say.

    Examples:
        >>> import axes
        >>> with axes.simulate(2), axes.init_mesh("tp=2", device_type="cpu"):
        ...     axes.spec_of(axes.zeros("b d@tp", b=2, d=4))
        '_ _@tp'
    """
    _check_distributed("axes.spec_of", x)
    return _text(x.device_mesh, x.placements, x.ndim) if torch.compiler.is_compiling() else sharding_of(x).spec


def sharding_of(x: DTensor) -> Sharding:
    """The sharding of a DTensor, on the mesh that it was made on.

    Args:
        x: A DTensor.

    Raises:
        ShardingError: `x` isn't a DTensor, or has placements that no spec can say.

    Examples:
        >>> import axes
        >>> with axes.simulate(2), axes.init_mesh("tp=2", device_type="cpu"):
        ...     axes.sharding_of(axes.zeros("b d@tp", b=2, d=4)).local_shape((2, 4))
        (2, 2)
    """
    _check_distributed("axes.sharding_of", x)
    if torch.compiler.is_compiling():
        return getattr(kept, _keep_sharding(x.device_mesh, x.placements, x.ndim))
    return sharding_of_spec(torch_private.spec_of(x))


# in torch.compile: what runs in a graph, and constants


def _whole(_: object, tensors: Sequence[DTensor]) -> torch.Tensor:
    return unsharded(*tensors)


def _cut_in_graph(
    mesh: Mesh, spec: str, names: tuple[str, ...], sizes: tuple[int, ...], tensors: Sequence[torch.Tensor]
) -> DTensor:
    (tensor,), given = tensors, tuple(zip(names, map(fixed, sizes), strict=True))
    return _cut(tensor.to(mesh.binding.device_type), parsed_sharding(mesh, spec, given, tensor.ndim))


@torch.compiler.assume_constant_result
def _text(device_mesh: Any, placements: tuple[Any, ...], ndim: int) -> str:
    return sharding_of_placements(device_mesh, placements, ndim).spec


@torch.compiler.assume_constant_result
def _keep_sharding(device_mesh: Any, placements: tuple[Any, ...], ndim: int) -> str:
    return kept.keep(sharding_of_placements(device_mesh, placements, ndim))


# what the rest of the runtime uses


def _cut(tensor: torch.Tensor, sharding: Sharding) -> DTensor:
    """The DTensor of a whole tensor, as a part of the computation."""
    _check_whole(sharding)
    shape, mesh = tuple(tensor.shape), sharding.mesh
    spec = torch_private.dtensor_spec(
        mesh.device_mesh, (Replicate(),) * mesh.ndim, shape, strides_of(shape), tensor.dtype
    )

    def shard(tensor: torch.Tensor) -> DTensor:
        whole = torch_private.dtensor(tensor.detach().contiguous(), spec)
        return route(spec, sharding, (None, None)).moved(whole)

    return linear(shard, unsharded, tensor)


def take_shard(tensor: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """This rank's shard of a whole tensor, as a copy; empty outside the mesh."""
    if sharding.mesh.coordinate is None:
        return tensor.new_empty(0)
    for dim, indices in enumerate(sharding.local_indices(tensor.shape)):
        runs = (indices,) if isinstance(indices, slice) else indices
        parts = [tensor.narrow(dim, run.start, run.stop - run.start) for run in runs]
        tensor = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
    return tensor.clone(memory_format=torch.contiguous_format)


def sharding_in_torch(mesh: Mesh, spec: str, shape: Sequence[int], sizes: Given = ()) -> Sharding:
    """The sharding of a spec for a tensor of this shape; `ShardingError` where DTensor can't express it."""
    sharding = parsed_sharding(mesh, spec, sizes, len(shape)).sized(shape)
    check_torch_can(sharding, shape)
    return sharding


def dtensor_of(local: torch.Tensor, sharding: Sharding, shape: Sequence[int]) -> DTensor:
    """The DTensor of a shard, outside of autograd. The caller has asked whether DTensor can have the sharding."""
    return enter_global(local.detach(), sharding.mesh.device_mesh, torch_placements(sharding), shape)


def _source(mesh: Mesh, source_rank: int) -> int:
    """`source_rank`, once it is clear that it is one of the ranks that share the tensor with this one."""
    line = mesh.ranks_of(mesh.layout_of_all)
    members = mesh.universe.ranks if line is None else line
    source = checked_rank("source_rank", source_rank)
    if source not in members:
        raise ShardingError(
            f"source_rank is one of the ranks of {mesh!r} through this one, {ranks_text(members)}; found {source}. "
            "The ranks of each line share a tensor of their own, and so a source"
        )
    return source


def broadcast_on(mesh: Mesh, tensor: torch.Tensor, what: str, source: int | None = None) -> torch.Tensor:
    """The tensor of a rank, the first if no `source` is named, on the ranks of the mesh through this one."""
    layout = mesh.layout_of_all
    ranks = mesh.ranks_of(layout)
    if layout.size == 1 or ranks is None:
        return tensor
    group = group_over(mesh, layout, " ".join(mesh.axis_names))
    tensor = tensor.to(mesh.binding.device_type).clone(memory_format=torch.contiguous_format)
    broadcast(tensor, ranks[0] if source is None else source, group, what)
    return tensor


def _check_distributed(function: str, x: Any) -> None:
    check_transforms(function)
    if not isinstance(x, DTensor):
        raise ShardingError(f"{function} takes a DTensor; found {type(x).__name__}")


# --- what a plain tensor is the shard of ----------------------------------------------------------

# The whole size of a dim is known where no axis splits it, where its names have sizes, or where the caller gives it.
# Any other size the ranks tell each other, in one small all-gather over the axes that split such dims, each time: ranks
# meet new shapes at different times, so no rank could rely on an earlier answer. The parts are compared with the shards
# of the whole, so that rows which aren't `torch.chunk`'s are one `SizeError` on all these ranks.
#
# A simulated world has no other ranks to tell anything: there every rank counts as having as much as this one. A
# compiled graph needs its sizes before it runs, and is refused without.


class LocalPart(NamedTuple):
    """What this rank has of a tensor: how that is sharded, the local shape, and what is known of the whole one.

    same: the axes over which its gradient is whole on every rank. label: what errors call it.
    """

    sharding: Sharding
    local: Shape
    known: Known
    same: tuple[Layout, ...] = ()
    label: str = "the tensor"

    @property
    def open(self) -> tuple[int, ...]:
        """The dims of which the whole size isn't known."""
        return tuple([dim for dim, size in enumerate(self.known) if size is None])

    @property
    def even(self) -> Shape:
        """The whole shape, if each rank has as much as this one."""
        if None not in self.known:
            return self.known  # type: ignore[return-value]
        sizes = zip(self.known, self.local, self.sharding.dims, strict=True)
        return tuple([here * dim.pieces if size is None else size for size, here, dim in sizes])


def read_shard(mesh: Mesh, spec: str, local: Shape, given: Given, shape: Sequence[int] | None = None) -> LocalPart:
    """What a shard of this shape is a part of, by its spec.

    The whole size of a dim is known where it isn't split, by the `given` sizes of names, or by the whole `shape`.

    >>> part = read_shard(Mesh("dp=2 tp=4"), "b@dp d", (3, 8), ())
    >>> part.known, part.even
    ((None, 8), (6, 8))
    """
    sharding, same = marked_sharding(mesh, spec, given, len(local))
    if sharding.ndim != len(local):
        raise wrong_dims(spec, sharding.ndim, len(local), local)
    known: list[int | None] = []
    for dim, extent in zip(sharding.dims, local, strict=True):
        sizes = [slot.size for slot in dim]
        written = math.prod([size for size in sizes if size is not None]) if sizes and None not in sizes else None
        known.append(extent if written is None and dim.pieces == 1 else written)
    return LocalPart(sharding, local, tuple(known if shape is None else shape), same, f"the tensor, '{spec}',")


def placements_of(part: LocalPart, whole: Shape) -> tuple[Any, ...]:
    """The placements of a part; `ShardingError` where it isn't this rank's shard of a tensor of the `whole` shape."""
    sharding = part.sharding.sized(whole)
    check_torch_can(sharding, whole)
    check_share(part, whole)
    return torch_placements(sharding)


def check_share(part: LocalPart, whole: Shape) -> None:
    """Refuses a part that isn't this rank's shard of a tensor of the `whole` shape."""
    sharding = part.sharding.sized(whole)
    expected = part.local if sharding.mesh.coordinate is None else sharding.local_shape(whole)
    if expected != part.local:
        raise ShardingError(
            f"{part.label} is {list(whole)} in whole and so {list(expected)} on this rank; found {list(part.local)}"
        )


# --- sizes that ranks tell each other


def told_shapes(what: str, mesh: Mesh, parts: Sequence[LocalPart], tensors: Sequence[torch.Tensor]) -> list[Shape]:
    """The whole shapes of tensors of which each rank has a part; nothing is sent where all sizes are known.

    `what` says in errors who asks. `SizeError`, on all ranks that tell each other, where the parts aren't
    the shards of whole tensors; `DesyncError` where some tell them for another call. The host waits for the answer.
    """
    told_dims = tuple([part.sharding.dims[dim] for part in parts for dim in part.open])
    if not told_dims:
        return [part.even for part in parts]
    mesh._bound(what)
    if mesh.coordinate is None:
        raise MeshError(
            f"{what}: rank {mesh.rank} isn't one of the ranks of {mesh!r}, which tell each other the whole shape; give "
            "it as shape=..."
        )
    group, ranks = _tellers(mesh, told_dims)
    if group.fake:
        return [part.even for part in parts]
    # As many numbers from each rank, whose tensor may have another number of dims.
    call = zlib.crc32(what.encode())
    mine = [[call, *part.local, *[-1] * (_MOST_DIMS - len(part.local))] for part in parts]
    device = mesh.binding.device_type if tensors[0].is_meta else tensors[0].device
    numbers, found = torch.tensor([mine], dtype=torch.int64, device=device), []
    calls, every = all_gather(numbers, 0, group).cpu().split([1, _MOST_DIMS], 2)
    if others := [rank for rank, found in zip(ranks, calls[:, 0, 0].tolist(), strict=True) if found != call]:
        raise DesyncError(
            f"{what}: what {ranks_text(others)} told are sizes of another call's tensors. Ranks that share a tensor "
            "make the same calls in the same order, with the same spec"
        )
    most = int((every >= 0).sum(2).max())
    for part, rows in zip(parts, zip(*every[:, :, :most].tolist(), strict=True), strict=True):
        sizes = zip(part.known, map(sum, zip(*rows, strict=True)), part.sharding.dims, strict=False)
        whole = tuple([total * dim.pieces // len(rows) if size is None else size for size, total, dim in sizes])
        told = [tuple([size for size in row if size >= 0]) for row in rows]
        if told != _shares(part.sharding, whole, ranks):
            raise SizeError(_unequal(what, part, whole, told, ranks))
        found.append(whole)
    return found


@of_world(1024)
def _tellers(mesh: Mesh, dims: tuple[Slots, ...]) -> tuple[AxisGroup, tuple[int, ...]]:
    """The group of the ranks along all axes that split one of these dims, this one among them; and the ranks."""
    layouts = [layout for dim in dims for layout in dim.layouts]
    modes = {mode for each in digits(*layouts) for mode in each}
    layout = Layout.of(sorted(modes, key=lambda mode: mode[1], reverse=True))
    name = " ".join(dict.fromkeys(map(mesh.called, layouts)))
    return group_over(mesh, layout, name), tuple(mesh.ranks_of(layout, current_world().rank) or ())


@functools.lru_cache(maxsize=1024)
def _shares(sharding: Sharding, whole: Shape, ranks: tuple[int, ...]) -> list[Shape]:
    """The shape of the shard of each rank."""
    sized = sharding.sized(whole)
    return [sized.local_shape(whole, rank) for rank in ranks]


def _unequal(what: str, part: LocalPart, whole: Shape, told: Sequence[Shape], ranks: Sequence[int]) -> str:
    shares = _shares(part.sharding, whole, tuple(ranks))
    listed = [
        f"rank {rank} has {list(found)}, its shard is {list(share)}"
        for rank, found, share in zip(ranks, told, shares, strict=True)
    ]
    rest = [f"and {len(listed) - _RANKS_SHOWN} ranks more"] if len(listed) > _RANKS_SHOWN else []
    lines = "".join(f"\n  {line}" for line in listed[:_RANKS_SHOWN] + rest)
    return (
        f"{what}: {ranks_text(ranks)} don't have the shards of one tensor. Their parts of '{part.sharding}' together "
        f"are {list(whole)}, which is cut axis by axis, each time as torch.chunk does it:{lines}\n"
        "pad the parts, so that all ranks have as much; or pass them as plain shards into a region of a module, "
        "axes.shard_map(module, ...), where each rank may have a size of its own; or send them where they belong, by "
        "axes.all_to_all with send_sizes= and recv_sizes="
    )


def traced_parts(
    what: str, parts: Sequence[LocalPart], tensors: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, tuple[Any, ...], Shape]]:
    """Parts of whole tensors in a graph, contiguous, each with its placements and the whole shape.

    Sizes may be symbols where they are multiples of their parts. Others are numbers, for which alone the graph is.
    Raises `SizeError` where a whole size isn't known: ranks tell each other none in a graph.
    """
    placements = []
    for part in parts:
        if part.open:
            raise SizeError(
                f"{what}: a compiled graph has to know the whole size of dim {part.open[0]} of {part.label} which each "
                "rank has a part of. Write it, in the spec (v=256@tp), or for axes.from_local as v=... or shape=..."
            )
        for dim, here, size in zip(part.sharding.dims, part.local, part.even, strict=False):
            if len(dim) > 1 or type(size) is int or size % dim.pieces or not are_equal(size, here * dim.pieces):
                fixed(here), fixed(size)  # one that isn't that of the shard is refused below
        placements.append(placements_of(part._replace(local=hints(part.local)), hints(part.even)))
    each = zip(tensors, placements, parts, strict=True)
    return [(x.contiguous(), placed, part.even) for x, placed, part in each]
