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

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from axes.algebra.errors import AxesError, DesyncError, ShardingError, wrong_dims
from axes.algebra.grammar import checked_spec
from axes.algebra.logical import Rules, ambient_rules
from axes.algebra.mesh import Mesh, ambient_mesh, required_mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.plan import cuts_of
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import checked_rank, checked_shape, checked_tensor_shape, written_sizes
from axes.algebra.specs import marked_sharding, parsed_sharding
from axes.runtime import torch_private
from axes.runtime.agreement import ranks_text
from axes.runtime.axis_groups import broadcast, group_over
from axes.runtime.border import check_grad, counted_alone, enter_global, leave_global
from axes.runtime.graphs import device_mesh_input, kept
from axes.runtime.groups import of_world, say_why
from axes.runtime.leaves import resolving, traced, used
from axes.runtime.linear import linear
from axes.runtime.packing import strides_of
from axes.runtime.routes import route, unsharded
from axes.runtime.shards import Given, placements_of, read_shard, told_shapes, traced_parts
from axes.runtime.symbols import fixed, hints, vary
from axes.runtime.torch_placements import (
    sharding_of_placements,
    sharding_of_spec,
    torch_placements,
)
from axes.runtime.transforms import PLAIN, check_plain, check_transforms

Sizes = Mapping[str, int]
Use: TypeAlias = Literal["whole", "summed"]
"""What ranks do with their copies of what is replicated, where it needs a gradient."""


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
    """A tensor that every rank has whole, as a DTensor that keeps this rank's shard of it.

    Nothing is sent, unless `source_rank` names a global rank whose tensor is broadcast first, to
    the ranks of the mesh alone, each of which passes a tensor of its shape and dtype: of
    `mesh["tp"]` these are the ranks along `tp` through this one, and the ranks along another call
    `shard` by themselves, or not at all, with a source of their own. The shard is a copy on the
    mesh's device. Sizes are those of factors of grouped dims. As
    `torch.distributed.tensor.distribute_tensor`, which always broadcasts.

    Of a leaf it makes a new leaf, to which `requires_grad` carries over; its gradient is resolved to
    its own sharding. Inside a computation it is differentiable: every rank of the mesh gets the whole
    gradient, which is gathered.

    Inside `axes.use_rules` a spec without an `@` is in logical names, which the rules put on the mesh.

    Raises `ShardingError` for a spec that doesn't fit the tensor, that has something pending, or
    that DTensor can't express for this shape; the same on every rank, before anything is sent, where
    all pass tensors of one shape.

        w = axes.shard(weight, "(qkv=3 heads@tp dim) embed@fsdp", mesh=mesh, heads=16)
    """
    mesh = required_mesh(mesh, "axes.shard")
    if tensor is None and source_rank is not None:
        raise ShardingError(
            "axes.shard takes a tensor on every rank; found None. With source_rank= the values of the others don't "
            "matter, their shape and dtype do: pass torch.empty(shape, dtype=...) there"
        )
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
        raise ShardingError(f"a whole tensor has nothing pending; found '{sharding}'. Use axes.from_local for summands")


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
    """The DTensor whose shard on this rank is `local`, which isn't copied.

    Every rank has to know the whole shape. Give it as `shape`, or give the whole sizes of split dims by name, as
    keywords or in `sizes`: then nothing is sent. Otherwise the ranks tell each other how much they have, in one small
    all-gather over the axes of these dims, at each call, and the host waits for it: in a loop, give the sizes. Parts
    that aren't the shards of one tensor (rows 3, 1, 2, 4 of four ranks aren't `torch.chunk`'s) are a `SizeError` on
    all these ranks. A compiled graph takes split dims without a size to be even, and compares that when it runs.

    What isn't split must be equal on every rank of the mesh.

    Differentiable. Over a split axis the gradient of `local` is this rank's shard of it, over a pending
    one the whole. Where `local` needs a gradient and is replicated over an axis, `grad` says how ranks
    have made their copies:

    - `grad="whole"`: each does the same, and gets the whole gradient, as of torch's `DTensor.from_local`.
    - `grad="summed"`: each in its own way, whose gradients are added up in the end. They get summands.

    `| same@tp` in the spec says "whole" of some axes, and `grad` is for the others.

    Raises `ShardingError` where `local` isn't the shard that the spec and the shape say, or where it
    isn't said what gradient it gets.

        h = axes.from_local(torch.randn(4, 8), "batch@dp embed | sum@tp", mesh=mesh)
        h = axes.from_local(h.to_local().tanh(), "batch@dp embed", mesh=mesh, grad="whole")
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
    """The whole tensor on every rank, pending reductions done.

    Differentiable: its gradient is the whole one on every rank, which uses it in the same way as all others.

        axes.unshard(axes.shard(torch.arange(8), "n@dp", mesh=mesh))     # tensor([0, 1, ..., 7])
    """
    _check_distributed("axes.unshard", x)
    return traced(_whole, (), (x,)) if torch.compiler.is_compiling() else unsharded(used(x))


def to_local(x: DTensor, spec: str | None = None, grad: Use | None = None) -> torch.Tensor:
    """This rank's shard as a plain tensor. Nothing is sent or copied.

    `spec` asserts how `x` is sharded, whole as everywhere: a bare name is unsplit.

    Differentiable. Over a split axis its gradient is this rank's shard of the one gradient, over a
    pending one the whole. Where `x` needs a gradient and is replicated over an axis, `grad` says how
    ranks use their copies:

    - `grad="whole"`: each does the same, and has the whole gradient, as torch's `x.to_local()` takes it.
    - `grad="summed"`: each in its own way, and the gradients add up.

    `| same@tp` in the spec says "whole" of some axes, and `grad` is for the others.

    Raises `ShardingError` where `x` isn't sharded as the spec says, or where it isn't said what its
    gradient is.

        rows = axes.to_local(x, grad="whole") @ weight
        rows = axes.to_local(x, "batch@dp embed | same@tp") @ weight
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
    """The sharding of a DTensor as text; its dims have no names: `'_@dp _@(cp tp) _ | sum@ep'`."""
    _check_distributed("axes.spec_of", x)
    return _text(x.device_mesh, x.placements, x.ndim) if torch.compiler.is_compiling() else sharding_of(x).spec


def sharding_of(x: DTensor) -> Sharding:
    """The sharding of a DTensor, on the mesh that it was made on.

    Raises `ShardingError` for placements that no spec can say.
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
