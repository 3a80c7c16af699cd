"""Every use of torch's private API, one thin function for each.

Each function says what it needs, on which torch it was read and tried, and which public API would
replace it. Read on 2.11.0 and 2.13.0, tried on 2.13.0, unless it says otherwise. What differs
between versions is decided here, by looking at what torch offers and never by its version number.

>>> served_devices("gloo")["cpu"]
'gloo'
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C import _functorch as functorch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import forward_ad
from torch.distributed import _composable_state, _state_dict_utils, device_mesh
from torch.distributed import _functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Replicate, _collective_utils, _random, _redistribute
from torch.distributed.tensor._api import _ToTorchTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops import _tensor_ops
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from axes.algebra.errors import ShardingError

try:  # 2.13: a mesh layout is a list of flat layouts
    from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout
except ImportError:  # 2.11: one nested layout
    from torch.distributed._mesh_layout import _MeshLayout

    _FlatLayout = None  # type: ignore[assignment,misc]

DispatchMode = TorchDispatchMode
"""Sees every ATen operation of a block. Its module is private, though its documentation is public."""

Mode = tuple[int, int]
"""`(size, stride)`, as in `axes.algebra.layout`."""


# Process groups


def served_devices(backend: str) -> dict[str, str]:
    """The backend that serves each device type, for `"gloo"` as well as `"cpu:gloo,cuda:nccl"`.

    Raises what torch raises for text that names no backend. Would be replaced by a public
    `torch.distributed.BackendConfig`.
    """
    return {
        str(device): str(name)
        for device, name in c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map().items()
    }


def default_timeout(device_type: str) -> timedelta:
    """How long the default group waits, read from its backend for a device.

    Would be replaced by a public `ProcessGroup.timeout`. Backends without options (plugins) have
    the timeout of their store.
    """
    default = dist.group.WORLD
    assert default is not None
    try:
        return default._get_backend(torch.device(device_type)).options._timeout
    except (AttributeError, RuntimeError):
        return default.get_group_store().timeout


def usual_timeout(backend: str) -> timedelta:
    """How long a group of a backend waits if nobody says it. Public API: none planned."""
    return c10d._get_default_timeout(c10d.Backend(backend))


def options_timeout(pg_options: Any) -> timedelta | None:
    """The timeout in an options object, which `new_group` ignores. Public API: none planned."""
    return getattr(pg_options, "_timeout", None)


def make_group(
    name: str,
    ranks: Sequence[int],
    rank: int,
    backend: str,
    pg_options: Any,
    timeout: timedelta,
    description: str,
) -> dist.ProcessGroup:
    """A process group of `ranks` in this order, made by its members alone, under a name of our own.

    Registered under the name as torch's own groups are, so that functional collectives find it.
    `new_group` can't do this: it takes part in a count of groups that must be the same on all
    ranks, and up to 2.11 it sorts the ranks. A public `new_group(group_name=, sort_ranks=)` would
    replace it.
    """
    default = dist.group.WORLD
    assert default is not None
    # A default group that is bound to a device makes NCCL split it, which needs every rank of the
    # world. Members alone can't, so they connect a communicator of their own on that device.
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(rank),
            list(ranks),
            c10d.Backend(backend),
            default.get_group_store(),
            c10d.GroupName(name),
            backend_options=pg_options,
            timeout=timeout,
            device_id=device,
            group_desc=description,
        )
    finally:
        default.bound_device_id = device
    c10d._world.pg_group_ranks[group] = dict(zip(ranks, range(len(ranks)), strict=True))
    return group


def backend_over(store: dist.Store, rank: int, size: int, device_type: str, timeout: timedelta) -> Any:
    """A communicator of ranks that share nothing but a store: it needs no default group, and is in no table of torch.

    The constructors are public for gloo and NCCL, and undocumented. A public `init_process_group` that gives a group
    in place of setting the default one would replace this.
    """
    if device_type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout + _WATCHDOG  # after it NCCL's watchdog ends the process: the limit is kept without it
    return dist.ProcessGroupNCCL(store, rank, size, options)


_WATCHDOG = timedelta(minutes=10)

default_group: Callable[[], dist.ProcessGroup | None] = functools.partial(
    operator.attrgetter("_default_pg"), c10d._world
)
"""`dist.group.WORLD`, or None, for a fifth of its price, which every call pays."""


def registered(group: dist.ProcessGroup) -> bool:
    """Whether torch still knows a group: false once it has been destroyed."""
    return group in c10d._world.pg_map


def abort_group(group: dist.ProcessGroup | None) -> None:
    """Ends a group without its other members; None: all groups of torch, the default group last.

    `ProcessGroup.abort` is public, but leaves the group in torch's tables.
    """
    c10d._abort_process_group(group)


# Device meshes


def root_device_mesh(device_type: str, ranks: Sequence[int]) -> DeviceMesh:
    """A one-dimensional `DeviceMesh` over `ranks` without groups, which others share as their root.

    `_init_backend=False` would be replaced by a public way to give the constructor existing groups
    in their own order (`from_group` takes no root).
    """
    with _real_tensors():
        root = DeviceMesh(
            device_type,
            _layout=_mesh_layout([[(len(ranks), 1)]]),
            _rank_map=_rank_map(ranks),
            mesh_dim_names=("universe",),
            _init_backend=False,
        )
    root._dim_group_names = []
    return root


def _rank_map(ranks: Sequence[int]) -> torch.Tensor:
    if isinstance(ranks, range):
        return torch.arange(ranks.start, ranks.stop, ranks.step, dtype=torch.int, device="cpu")
    return torch.tensor(ranks, dtype=torch.int, device="cpu")


def device_mesh_over(
    root: DeviceMesh,
    dims: Sequence[Sequence[Mode]],
    names: Sequence[str],
    groups: Sequence[dist.ProcessGroup],
    marks: Sequence[str],
) -> DeviceMesh:
    """A `DeviceMesh` whose dims step through the ranks of `root` by the modes in `dims`.

    Dim `i` communicates over `groups[i]`, whose ranks stand in the order of its coordinates; a
    rank outside the root has no coordinate and no groups, so `marks` tell it which groups these would
    be (see `tell_groups_apart`). Would be replaced by a public constructor that takes a root, layouts
    and groups.
    """
    with _real_tensors():
        mesh = DeviceMesh(
            root.device_type,
            _layout=_mesh_layout(dims),
            _rank_map=root._rank_map,
            mesh_dim_names=tuple(names),
            _root_mesh=root,
            _init_backend=False,
        )
    mesh._dim_group_names = [group.group_name for group in groups]
    if any(marks) and not groups:
        mesh._thread_id = (None, *marks)  # type: ignore[assignment]
    register_groups(root, groups)
    return mesh


def look_for_flattened_dims() -> None:
    """Lets DTensor redistribute over several dims of a mesh at once, or whose strides don't descend.

    DTensor looks whether somebody has flattened these dims before, and the look itself raises
    `KeyError` (2.11 also `NotImplementedError`) where a later dim has the larger stride: in
    `mesh["tp", "dp"]`, and in what FSDP2 concatenates where `tp` is the slower axis. Nothing of
    that order can have been flattened, so the answer is none. And so it is where the dims were flattened for groups
    with other options. A torch that answers so itself replaces this.
    """
    # 2.13 looks in a function of its own, which 2.11 doesn't have.
    names = ("_get_flattened_mesh_by_layout_impl", "_get_flattened_mesh_by_layout")
    name = next((name for name in names if hasattr(_redistribute, name)), None)
    if name is None or getattr(getattr(_redistribute, name), "any_axis_order", False):
        return
    look = getattr(_redistribute, name)

    @functools.wraps(look)
    def found_or_none(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> DeviceMesh | None:
        try:
            found = look(mesh, mesh_dims)
        except (KeyError, NotImplementedError):
            return None
        names = group_names(mesh)
        marks = {_mark_in(names[dim]) for dim in mesh_dims if names}
        return found if found is not None and marks == set(map(_mark_in, group_names(found))) else None

    found_or_none.any_axis_order = True  # type: ignore[attr-defined]
    setattr(_redistribute, name, found_or_none)


def keep_uneven_gradients() -> None:
    """Has autograd's copy of a DTensor's gradient lie as the gradient does, where a dim is split unevenly, too.

    Of a gradient that others hold as well, or that is differentiated itself, autograd makes a copy for the leaf:
    `new_empty_strided` and `copy_`. 2.11 makes the first of these replicated where the gradient is split unevenly or
    pending. 2.13 has it like the gradient, and replaces this.
    """
    if hasattr(_tensor_ops, "is_tensor_evenly_shardable"):  # by which 2.11 decides
        DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.new_empty_strided.default] = _new_empty_strided


def _new_empty_strided(op: Any, args: tuple[DTensor, Sequence[int], Sequence[int]], options: dict[str, Any]) -> DTensor:
    """`new_empty_strided` of a DTensor: split as it is, or pending, where it has its shape; else replicated."""
    x, shape, strides = args[0], tuple(args[1]), tuple(args[2])
    spec, local, placements = x._spec, x._local_tensor, x._spec.placements
    if shape != tuple(x.shape):
        placements = (Replicate(),) * spec.mesh.ndim
        made = local.new_empty_strided(shape, strides, **options)
    else:  # the shard's dims in memory in the order of the whole tensor's
        order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim))
        made = local.new_empty([local.shape[dim] for dim in order], **options)
        made = made.permute(sorted(range(len(shape)), key=order.__getitem__))
    return dtensor(made, dtensor_spec(spec.mesh, placements, shape, strides, made.dtype))


def replace_flattening(flatten: Callable[[DeviceMesh, str], DeviceMesh | None]) -> None:
    """Has torch ask first what `dm._flatten(name)` is; None for a DeviceMesh that `flatten` doesn't serve.

    torch makes a second communicator for the ranks that are flattened, and of ascending order. What was flattened
    stands in torch's table of the root, where DTensor looks for it, too. A public `DeviceMesh.flatten` that takes a
    group would replace this.
    """
    if hasattr(DeviceMesh._create_flatten_mesh, "by_axes"):
        return
    own_flatten = DeviceMesh._create_flatten_mesh

    @functools.wraps(own_flatten)
    def created(mesh: DeviceMesh, mesh_dim_name: str | None = None, backend_override: Any = (None, None)) -> Any:
        # 2.11 makes up the name here, and 2.13 before.
        name = mesh_dim_name or "_".join(mesh.mesh_dim_names or ())
        by_default = backend_override == (None, None) and mesh.mesh_dim_names != (name,)
        found = flatten(mesh, name) if by_default else None
        if found is None:
            return own_flatten(mesh, name, backend_override)
        mesh._get_root_mesh()._flatten_mapping[name] = _as_looked_for(found)
        return found

    created.by_axes = True  # type: ignore[attr-defined]
    DeviceMesh._create_flatten_mesh = created  # type: ignore[method-assign]


def flattened_modes(root: DeviceMesh, name: str) -> list[Mode] | None:
    """The modes that a name stands for among what was flattened under a root; None for a name that doesn't."""
    found = root._flatten_mapping.get(name)
    return None if found is None else dims_of(found)[0]


def _as_looked_for(flat: DeviceMesh) -> DeviceMesh:
    """A flattened mesh whose layout is written as DTensor looks for it: 2.11 has numbers for a layout of one mode."""
    if _FlatLayout is not None:
        return flat
    layout: Any = flat._layout.coalesce()
    found = copy.copy(flat)
    found._layout = layout if len(layout) == 1 else layout.nest()
    return found


def forget_flattened(root: DeviceMesh, name: str) -> None:
    """Takes a name from what was flattened: torch looks there first for the group of a dim of this name."""
    root._flatten_mapping.pop(name, None)


def marked(mark: str) -> str:
    """The part of a group's name that says by which options of its own it was made."""
    return f"own-{mark}"


@functools.lru_cache(maxsize=4096)
def _mark_in(group_name: str) -> str:
    return group_name.partition("own-")[2].partition("_")[0]


def tell_groups_apart() -> None:
    """Has torch call two DeviceMeshes unequal where axes made their groups with other options.

    torch compares ranks, layout, names, the type of device and the thread (`_thread_id`: None but in
    its own tests, where threads are ranks), and keeps what it finds out about DTensors by that, as
    axes does. Of two meshes that differ in their groups alone the first one's would so serve both.
    Here the thread becomes a property that also says which dims have a group with a mark in its name.
    So slices of a DeviceMesh say it as well, what FSDP2 concatenates, and what was pickled.

    On 2.11 to 2.13; a torch that compares something else finds such meshes equal, which
    `axes.runtime.device_mesh` refuses then. Would be replaced by a DeviceMesh that compares groups.
    """
    if isinstance(getattr(DeviceMesh, "_thread_id", None), property):
        return

    def read(mesh: DeviceMesh) -> Any:
        thread, names = vars(mesh).get("_thread_id"), vars(mesh).get("_dim_group_names", ())
        marks = [_mark_in(name) for name in names]
        return (thread, *marks) if any(marks) else thread

    def write(mesh: DeviceMesh, thread: Any) -> None:
        vars(mesh)["_thread_id"] = thread

    DeviceMesh._thread_id = property(read, write)  # type: ignore[assignment]


def gather_by_communicator() -> None:
    """Has `fully_shard` gather parameters of two meshes together where one communicator serves both (2.13).

    It keys what it gathers together by process group, and raises where two meshes have the same. Torch makes a group
    for each mesh, as for fsdp and efsdp, and axes one for the same ranks. Each parameter keeps its own mesh: here
    only the key is that of the first argument. Would be replaced by a key of meshes.
    """
    own = getattr(_fsdp_common, "resolve_shard_placement", None)
    if own is None or hasattr(own, "by_axes"):
        return

    @functools.wraps(own)
    def resolved(result: Any, default_mesh_info: Any) -> Any:
        found = own(result, default_mesh_info)
        groups = [
            (info.shard_process_group, getattr(info, "replicate_process_group", None))
            for info in (found.mesh_info, default_mesh_info)
        ]
        return dataclasses.replace(found, mesh_info=default_mesh_info) if groups[0] == groups[1] else found

    resolved.by_axes = True  # type: ignore[attr-defined]
    _fsdp_common.resolve_shard_placement = resolved


def register_groups(root: DeviceMesh, groups: Sequence[dist.ProcessGroup]) -> None:
    """Lets `torch.compile` find groups by name: it looks in the root's registry."""
    for group in groups:
        root._pg_registry[group.group_name] = group


def root_of(device_mesh: DeviceMesh) -> DeviceMesh:
    """The `DeviceMesh` that this one was sliced or flattened from, or itself."""
    return device_mesh._get_root_mesh()


def root_ranks(device_mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks that the layouts of a `DeviceMesh` step through, in order."""
    return device_mesh._flatten_rank_map


def group_names(device_mesh: DeviceMesh) -> list[str]:
    """What torch calls the groups of the dims; none on a rank outside the mesh."""
    return list(getattr(device_mesh, "_dim_group_names", ()))


def groups_are_gone(device_mesh: DeviceMesh) -> bool:
    """Whether a group of the dims has been destroyed since the mesh was made."""
    known = set(c10d._world.pg_names.values())
    return any(name not in known for name in group_names(device_mesh))


def dims_of(device_mesh: DeviceMesh) -> list[list[Mode]]:
    """The modes `(size, stride)` of each dim, over `root_ranks`; none for a dim of size one."""
    layout = device_mesh._layout
    if _FlatLayout is not None:
        return [list(zip(flat.shape, flat.stride, strict=True)) for flat in layout]
    return [list(layout[i].sizes_and_strides) for i in range(len(layout))]


def _mesh_layout(dims: Sequence[Sequence[Mode]]) -> Any:
    """torch's layout of the dims; a dim without modes has size one."""
    filled = [_filled(modes) for modes in dims]
    sizes = [tuple(size for size, _ in modes) for modes in filled]
    strides = [tuple(stride for _, stride in modes) for modes in filled]
    if _FlatLayout is not None:
        return _MeshLayout([_FlatLayout(size, stride) for size, stride in zip(sizes, strides, strict=True)])

    def unnested(values: list[tuple[int, ...]]) -> tuple[Any, ...]:
        return tuple(value[0] if len(value) == 1 else value for value in values)

    return _MeshLayout(unnested(sizes), unnested(strides))


def _filled(modes: Sequence[Mode]) -> tuple[Mode, ...]:
    return tuple(modes) or ((1, 1),)


def _real_tensors() -> Any:
    """Makes real tensors even under a `FakeTensorMode`. A public equivalent would replace it."""
    return unset_fake_temporarily()


# --- strided shards: 2.11 to 2.13 --------------------------------------------------------------


def is_strided(spec: DTensorSpec) -> bool:
    """Whether a shard of a spec is strided: for a factor of a dim, or for an order of axes, as FSDP2 over tensor
    parallelism makes it. Would be replaced by a public order of axes in DTensor.
    """
    return any(isinstance(placement, _StridedShard) for placement in spec.placements)


def chunks_of(x: DTensor) -> list[Any]:
    """What torch's distributed checkpoint takes this rank's shard for: `ChunkStorageMetadata`, one in general.

    DTensor's protocol for checkpoints (2.11 to 2.13). Would be replaced by a public name for it.
    """
    return x.__create_chunk_list__()


def replace_distribution_of_state_dicts(make: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Puts `make(torch's own)` in the place of what cuts a broadcast state dict into shards.

    `_distribute_tensors(local_state_dict, keys, device, group)`: at a key is `(DTensor, whole tensor)`, or what
    needs nothing. Would be replaced by its use of the protocol that DTensor has for checkpoints.
    """
    own = getattr(_state_dict_utils, "_distribute_tensors", None)
    if own is not None:
        _state_dict_utils._distribute_tensors = make(own)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """A shard of `dim` with `split_factor` unsplit pieces in front of it.

    Public API would be `Shard` with an order of its own; none is planned.
    """
    return _StridedShard(dim, split_factor=split_factor)


def reduced_by_fsdp(parameter: torch.Tensor) -> Any | None:
    """How FSDP2 reduces the gradient of a parameter that it has gathered: its `mesh_info`. None of any other tensor.

    `.mesh` are the axes over which it reduces, the copies of HSDP among them. `.is_spmd_mesh` (2.13): they are axes of
    the parameter's own mesh, as `dp_mesh_dims` says, and it takes what a gradient is along them for this rank's
    summand. Otherwise it brings a gradient to the sharding of the parameter before. A gathered parameter stays one
    object, so each is looked for once. Would be replaced by a public way from a parameter to its `FSDPModule`.
    """
    if not _composable_state._module_state_mapping:
        return None
    try:
        return _reductions[parameter]
    except KeyError:
        states = [state() for state in _composable_state._module_state_mapping.values()]
        groups: list[Any] = []
        for state in states:  # 2.11 has one group
            groups += getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        found = (g for g in groups if g for p in g.fsdp_params if getattr(p, "_unsharded_param", None) is parameter)
        return _reductions.setdefault(parameter, getattr(next(found, None), "mesh_info", None))


_reductions: WeakIdKeyDictionary = WeakIdKeyDictionary()


# A simulated world


def fake_store() -> dist.Store:
    """The store for the "fake" backend, which the import registers.

    Would be replaced by a public fake backend outside `torch.testing._internal`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forget_dtensor_world() -> None:
    """Drops what DTensor keeps of a world: sharding propagation, redistributions, costs, random state.

    Its caches are keyed by meshes, which compare equal though another rank made them: in the next
    world of this process an operation would answer with the mesh, the coordinate and the local
    shape of the last one (tried: `x + 1` of 20 rows over 8 ranks, as rank 0, then as rank 7). Would
    be replaced by `destroy_process_group` doing so.
    """
    # What torch.distributed.tensor.debug's functions do; to import that package takes numpy (2.11, 2.13).
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()
    for module, name in (
        (_redistribute, "clear_redistribute_planner_cache"),  # 2.13
        (_collective_utils.MeshTopoInfo.build_from_mesh, "cache_clear"),
    ):
        getattr(module, name, lambda: None)()
    _random._rng_tracker = None


# Redistribution: a group's methods, functional collectives, DTensors without their constructor's price

Collective = Callable[..., None]


def copy_all(to: list[torch.Tensor], origin: list[torch.Tensor]) -> None:
    """`a.copy_(b)` of each pair, by one call of torch; each may have another dtype. Public nowhere."""
    torch._foreach_copy_(to, origin)


def pass_all(
    group: dist.ProcessGroup,
    sends: Sequence[tuple[int, torch.Tensor]],
    receives: Sequence[tuple[int, torch.Tensor]],
    pack: Callable[[int], None],
) -> list[Any]:
    """Begins to send and to receive `(rank of the group, contiguous tensor)`; gives what to wait for.

    `pack(i)` fills the i-th tensor to send, over gloo just before it is sent, while it is in the processor's cache.
    Messages between two ranks meet in their order. For gloo at a third of the Python of `batch_isend_irecv`, which
    serves the others, whose messages have to be issued together.
    """
    alone = not isinstance(group, dist.ProcessGroup)  # of `backend_over`: torch's tables don't have it
    if (group.name() if alone else dist.get_backend(group)) == "gloo":
        works = [group.recv([x], peer, _TAG) for peer, x in receives]
        for number, (peer, x) in enumerate(sends):
            pack(number)
            works.append(group.send([x], peer, _TAG))
        return works
    for number in range(len(sends)):
        pack(number)
    if alone:
        return _passed_by(group, sends, receives)
    ops = [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for peer, x in receives]
    ops += [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for peer, x in sends]
    return dist.batch_isend_irecv(ops) if ops else []


def _passed_by(
    backend: Any, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
) -> list[Any]:
    """`batch_isend_irecv` by a backend that belongs to no group."""
    if not sends and not receives:
        return []
    backend._start_coalescing()
    for peer, x in receives:
        backend.recv([x], peer, _TAG)
    for peer, x in sends:
        backend.send([x], peer, _TAG)
    return [backend._end_coalescing()]


_TAG = 0x61786573
"""Of what is sent from one rank to another, so that it meets nothing that a user sends."""


def collectives_of(group: dist.ProcessGroup) -> tuple[Collective, Collective, Collective, Collective]:
    """`gather(out, x)`, `exchange(out, x, receives, sends)`, `reduce(x, op)`, `scatter(out, x, op)`.

    Each waits, on an accelerator the current stream does. What `torch.distributed` offers in public
    costs two to three times as much Python, and would replace this.
    """
    gathering, exchanging = c10d.AllgatherOptions(), c10d.AllToAllOptions()
    gathering.asyncOp = exchanging.asyncOp = False
    gather_method = getattr(group, "all_gather_single", None) or group._allgather_base
    scatter_method = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
    exchange_method = getattr(group, "all_to_all_single", None) or group.alltoall_base

    def gather(out: torch.Tensor, x: torch.Tensor) -> None:
        gather_method(out, x, gathering).wait()

    def exchange(out: torch.Tensor, x: torch.Tensor, receives: Sequence[int], sends: Sequence[int]) -> None:
        exchange_method(out, x, receives, sends, exchanging).wait()

    def pretend(out: torch.Tensor, x: torch.Tensor, receives: Sequence[int], sends: Sequence[int]) -> None:
        # The fake backend makes up what arrives from what is sent, and can't from nothing. Equal parts are both.
        if not sends or len(x) or not len(out):
            exchange(out, x, receives, sends)
        else:
            exchange(out, torch.zeros_like(out), receives, receives)
        if _FlatLayout is None:  # 2.11 leaves what arrives as it was; this is what 2.13 makes of it
            out.zero_()
            for part in out.split(list(receives)) if receives else (out,):
                found = x[: len(part)]
                part[: len(found)].copy_(found)

    @functools.lru_cache(maxsize=8)
    def reducing(op: Any) -> tuple[Any, Any]:
        found = c10d.AllreduceOptions(), c10d.ReduceScatterOptions()
        for option in found:
            option.reduceOp, option.asyncOp = op, False
        return found

    def reduce(x: torch.Tensor, op: Any) -> None:
        group.allreduce([x], reducing(op)[0]).wait()

    def scatter(out: torch.Tensor, x: torch.Tensor, op: Any) -> None:
        scatter_method(out, x, reducing(op)[1]).wait()

    return gather, pretend if dist.get_backend(group) == "fake" else exchange, reduce, scatter


def functional_gather(x: torch.Tensor, size: int, group_name: str) -> torch.Tensor:
    """The flat `x` of every rank, end to end: a node of a graph, else waited for at its first use.

    This and the three below would be replaced by public functional collectives.
    """
    return funcol._maybe_wrap_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x, size, group_name))


def functional_exchange(
    x: torch.Tensor, receives: Sequence[int], sends: Sequence[int], group_name: str
) -> torch.Tensor:
    """Elements of the flat `x` exchanged by counts per rank."""
    made = torch.ops._c10d_functional.all_to_all_single(x, list(receives), list(sends), group_name)
    return funcol._maybe_wrap_tensor(made)


def functional_reduce(x: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
    """`op` ("sum", "max", "min") of every rank's `x`."""
    return funcol._maybe_wrap_tensor(torch.ops._c10d_functional.all_reduce(x, op, group_name))


def functional_scatter(x: torch.Tensor, op: str, size: int, group_name: str) -> torch.Tensor:
    """This rank's part of `op` of every rank's `x`, cut along the first dim."""
    made = torch.ops._c10d_functional.reduce_scatter_tensor(x, op, size, group_name)
    return funcol._maybe_wrap_tensor(made)


def dtensor_spec(
    device_mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int],
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    """What a DTensor knows of itself: made once for each kind of result, since it costs 6 us.

    AOTAutograd puts something else for a mesh, equal to it, which must not stay in a spec that is kept: 2.13
    gives it to DTensors of eager mode then. The mesh itself serves there as well.

    Would be replaced by `DTensor.from_local` at a tenth of its price (16 us).
    """
    mesh = getattr(device_mesh, "real_obj", device_mesh)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def resized_spec(spec: DTensorSpec, shape: Sequence[int], stride: tuple[int, ...]) -> DTensorSpec:
    """The spec of a tensor of another shape, otherwise the same, at a fifth of what `dtensor_spec` costs.

    It derives nothing from the placements again, and the hash at its first use. Would be replaced as that would be.
    """
    found, meta = DTensorSpec.__new__(DTensorSpec), TensorMeta(torch.Size(shape), stride, spec.tensor_meta.dtype)
    vars(found).update(vars(spec), tensor_meta=meta, _hash=None)
    return found


def dtensor(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """The DTensor of a local tensor, outside of autograd.

    `__new__` does all of it (2.11 to 2.13); `__init__` only tells `torch.compile` to stay away, and
    costs three times as much. Would be replaced by `DTensor.from_local`.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)


def spec_of(x: DTensor) -> DTensorSpec:
    """Mesh, placements, shape, strides and dtype of a DTensor in one hashable value.

    Raises `ShardingError` for a batch of gradients, which torch wraps so that it no longer is a DTensor.
    """
    try:
        return x._spec
    except AttributeError:
        if functorch.is_legacy_batchedtensor(x):
            raise ShardingError(BATCH) from None
        raise


def local_of(x: DTensor) -> torch.Tensor:
    """The local tensor of a DTensor, outside of autograd. `to_local` is an autograd function."""
    return x._local_tensor


def locals_of(tensors: Sequence[DTensor]) -> list[torch.Tensor]:
    """The same of many, in less time."""
    return [x._local_tensor for x in tensors]


def local_values(named: dict[str, Any]) -> dict[str, Any]:
    """The same with the local tensor in the place of each DTensor; a step of an optimizer asks for each parameter."""
    return {name: value._local_tensor if isinstance(value, DTensor) else value for name, value in named.items()}


def local_gradients(parameters: Sequence[DTensor]) -> list[torch.Tensor | None]:
    """The local tensor of each parameter's gradient; None where there is none, or one that lies otherwise."""
    found: list[torch.Tensor | None] = []
    for parameter in parameters:
        x = parameter.grad
        there = type(x) is DTensor and (x._spec is parameter._spec or lie_alike(x, parameter))
        local = x._local_tensor if there else None  # type: ignore[union-attr]
        found.append(local if type(local) is torch.Tensor else None)
    return found


def versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """How often each tensor was changed in place, as autograd counts it; None for one of inference mode."""
    return [None if x.is_inference() else x._version for x in tensors]


def lie_alike(one: DTensor, other: DTensor) -> bool:
    """Whether two DTensors have the same placements on the same mesh."""
    spec, wanted = one._spec, other._spec
    if spec is wanted:
        return True
    same_placements = spec.placements is wanted.placements or spec.placements == wanted.placements
    return same_placements and (spec.mesh is wanted.mesh or spec.mesh == wanted.mesh)


def has_default_order(spec: DTensorSpec) -> bool:
    """Whether the axes of the mesh split dims in the order of the mesh, as placements say.

    A spec may say otherwise (`shard_order`, since 2.10), which placements alone don't show. Would be
    replaced by a public property of DTensor.
    """
    if getattr(spec, "use_strided_shard_as_shard_order", False):
        return True
    order = getattr(spec, "shard_order", None)
    return order is None or order == DTensorSpec.compute_default_shard_order(spec.placements)


def hooks_of(leaf: torch.Tensor) -> list[Any]:
    """The gradient hooks of a leaf. Would be replaced by a public list of them."""
    return list((leaf._backward_hooks or {}).values())


def add_hook(leaf: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """Register a gradient hook, also on a tensor that doesn't require a gradient yet.

    What `register_hook` does behind its check of that (2.11 to 2.13): autograd runs the hooks of a tensor
    from when it requires one, and an operation in place that makes it another function drops them. Would be
    replaced by `register_hook`.
    """
    if leaf.requires_grad:
        leaf.register_hook(hook)
    else:
        leaf._backward_hooks = OrderedDict(((-1, hook),))  # the numbers that torch gives start at 0


def remove_hooks(leaf: torch.Tensor, kind: type) -> None:
    """Remove the gradient hooks of one type. Would be replaced by a public list of them."""
    hooks = leaf._backward_hooks or {}
    for number in [number for number, hook in hooks.items() if type(hook) is kind]:
        del hooks[number]


def is_under_way(x: torch.Tensor) -> bool:
    """Whether a tensor is the result of a collective that isn't waited for yet.

    This and the next would be replaced by a public name for `AsyncCollectiveTensor`.
    """
    return isinstance(x, funcol.AsyncCollectiveTensor)


def arrived(x: Any) -> torch.Tensor:
    """What a tensor under way stands for, once it has come."""
    return x.trigger_wait()


def owns_its_memory(x: DTensor) -> bool:
    """Whether the shard of a DTensor is as large as its storage, and nobody else has the shard or the storage.

    Two things refer to the storage then, the shard and what Python calls its storage; and two to the shard, the DTensor
    and the call that asks. Would be replaced by public counts; without that of storages (2.11 to 2.15 have it) a tensor
    counts as sharing.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or sys.getrefcount(x._local_tensor) != 2:
        return False
    storage = x._local_tensor.untyped_storage()
    exact = storage.nbytes() == x._local_tensor.numel() * x._local_tensor.element_size()
    return exact and count(storage._cdata) == 2


def version_of(x: torch.Tensor) -> int:
    """How often a tensor's memory was written to, as autograd counts; inference tensors don't.

    Would be replaced by a public name for `Tensor._version`.
    """
    return 0 if x.is_inference() else x._version


def counter_of(x: torch.Tensor) -> torch.Tensor:
    """A tensor without memory whose version is that of `x`, also when `x` is changed later and when it is gone.

    Would be replaced by a version counter that a DTensor shares with its shard: torch's in-place operations on
    a DTensor count for it alone.
    """
    if not isinstance(x, DTensor):
        found = x.detach()
        found.data = _NOTHING
        return found
    with torch._C._DisableTorchDispatch():
        return torch._C.TensorBase.detach(x)  # of the wrapper, which has no memory


_NOTHING = torch.empty(0)


def memory_of(x: torch.Tensor) -> int:
    """The number of the storage in which a tensor lies: fake ones have one, too, but no address.

    Would be replaced by a public `torch.Tensor.shares_memory_with`.
    """
    return x.untyped_storage()._cdata


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in one storage; as `memory_of`."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def has_base(x: torch.Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another. Public API: none."""
    return x._is_view()  # type: ignore[no-any-return]


def untied(x: torch.Tensor) -> torch.Tensor:
    """The same memory, which autograd doesn't take for a view; as a node of a graph. Public API: none."""
    return torch.ops.aten._unsafe_view.default(x, x.shape)  # type: ignore[no-any-return]


def node_of(function: type[torch.autograd.Function]) -> type:
    """The type of the nodes that an autograd function leaves in the graph. Public API: none planned."""
    return function._backward_cls  # type: ignore[attr-defined]


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without what it does for transforms of `torch.func`, which are refused before: 2 of its 10 us.

    Dynamo can't follow it. Public API: none.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def says_its_gradient(node: Any) -> bool:
    """Whether a node of `TO_LOCAL`, torch's `DTensor.to_local`, has a gradient that is right on each rank.

    It has where `grad_placements` say what the local gradients are, or nothing is replicated: torch's
    default takes each rank's gradient of a replicated tensor for the whole one.
    """
    spec = node.dtensor_spec
    copies = [size for p, size in zip(spec.placements, spec.mesh.shape, strict=True) if p.is_replicate() and size > 1]
    return node.grad_placements is not None or not copies


TO_LOCAL = node_of(_ToTorchTensor)
"""The type of the nodes of torch's `DTensor.to_local`, whose function is private."""


# Operations on lists of tensors


def norms_of(tensors: Sequence[torch.Tensor], order: float) -> Sequence[torch.Tensor]:
    """The norm of each tensor; those of 16 bits and less are added up in float32.

    The tensors have one dtype and device, and no tensor is empty. Would be replaced by a public name for
    `_foreach_norm`, which `torch.nn.utils.get_total_norm` uses too.
    """
    narrow = tensors[0].is_floating_point() and tensors[0].dtype.itemsize < 4
    return torch._foreach_norm(list(tensors), order, dtype=torch.float32 if narrow else None)


def scale_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one dtype and device in place. As `norms_of`."""
    torch._foreach_mul_(list(tensors), factor)


# Trees: `torch.utils._pytree`, of which only registering is public (`torch.export.register_dataclass`)


def children_of(tree: object) -> list[Any] | None:
    """What is directly inside a node that torch's pytree knows, in order; None of anything else."""
    if pytree.tree_is_leaf(tree):
        return None
    return pytree.tree_flatten(tree, is_leaf=lambda part: part is not tree)[0]


def next_node_number() -> int:
    """The number that the next autograd node of this thread gets; nodes are numbered in the order of their making.

    Would be replaced by a public `torch.autograd.graph.get_sequence_nr`.
    """
    return torch._C._autograd._get_sequence_nr()


def running_node_number() -> int | None:
    """The number of the node whose gradient this thread computes just now; None where it computes none.

    This and the next would be replaced by a public way to the running node.
    """
    node = torch._C._current_autograd_node()
    return None if node is None or hasattr(node, "variable") else node._sequence_nr()


def running_leaf() -> torch.Tensor | None:
    """The leaf whose gradient is accumulated just now, hooks of the leaf included."""
    return getattr(torch._C._current_autograd_node(), "variable", None)


def group_handed_over(given: Any) -> dist.ProcessGroup:
    """The process group that an operator of torch is called with: boxed, by its name, or itself.

    Would be replaced by operators that take what `torch.distributed` gives out.
    """
    if isinstance(given, str):
        return c10d._resolve_process_group(c10d.GroupName(given))
    return given if isinstance(given, dist.ProcessGroup) else dist.ProcessGroup.unbox(given)


def class_before_fsdp(module: torch.nn.Module) -> type:
    """The class that a module had before `fully_shard` gave it one of its own making. Public API: none planned."""
    return type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)


def module_of_fsdp(holder: object) -> torch.nn.Module | None:
    """The first module of a group of parameters that FSDP2 gathers together; None where `holder` is no such group.

    Would be replaced by hooks of FSDP2 around what it sends.
    """
    modules = getattr(holder, "modules", None) if type(holder).__name__ == "FSDPParamGroup" else None
    return modules[0] if isinstance(modules, tuple) and modules else None


def name_of_operator(func: Any) -> str:
    """`allreduce_` of `c10d::allreduce_`.

    This and the next would be replaced by a public schema of `OpOverload`.
    """
    return func._schema.name.partition("::")[2]


def arguments_of(func: Any) -> list[str]:
    """The names of what an operator takes, in order."""
    return [argument.name for argument in func._schema.arguments]


def is_view(func: Any) -> bool:
    """Whether an ATen operation gives a view of what it takes.

    Would be replaced by a public question of `OpOverload`.
    """
    unsafe = func is torch.ops.aten._unsafe_view.default  # a view of what nobody else has
    return unsafe or any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def backward_runs() -> bool:
    """Whether this thread is in a backward pass, as when a checkpoint computes once more.

    Would be replaced by a public question of the autograd engine.
    """
    return backward_pass() != NO_BACKWARD


backward_pass = torch._C._current_graph_task_id
"""The number of the backward pass that this thread is in: the same question, where nanoseconds count."""

NO_BACKWARD = -1
"""What that says where there is none."""


def mapped(fn: Callable[[Any], Any], tree: object) -> Any:
    """The tree with `fn` of each of its leaves."""
    return pytree.tree_map(fn, tree)


def take_apart(tree: object) -> tuple[list[Any], Any]:
    """The leaves of a nested value, in order, and what puts them together."""
    return pytree.tree_flatten(tree)


def put_together(leaves: list[Any], structure: Any) -> Any:
    """The nested value of these leaves."""
    return pytree.tree_unflatten(leaves, structure)


def hint_of(size: Any) -> int | None:
    """The size that a symbolic one has in the call that is being traced; None where it may be any.

    Would be replaced by a public `SymInt.hint`.
    """
    return size if isinstance(size, int) else size.node.hint


def constant_in_graphs(kind: type) -> None:
    """Makes what is of an immutable, hashable type a constant of compiled graphs, guarded by equality.

    2.13 takes any object for one where it is handed to a function whose result is constant; 2.11 only
    these, and would put together a frozen dataclass from its fields, which it can't. There a dataclass doesn't
    say that it is frozen. Would be replaced by a public name for it.
    """
    pytree.register_constant(kind)
    if dataclasses.is_dataclass(kind) and not DEVICE_MESHES_ARE_INPUTS:
        parameters: Any = copy.copy(kind.__dataclass_params__)  # type: ignore[attr-defined]
        parameters.frozen = False
        kind.__dataclass_params__ = parameters  # type: ignore[attr-defined]


# What goes around autograd, and autocast: questions that every call asks, so their price counts


def may_have_tangents() -> bool:
    """Whether a level of forward-mode differentiation is open.

    Would be replaced by a public `torch.autograd.forward_ad.current_level()`.
    """
    return forward_ad._current_level >= 0


functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` is running: `torch.autograd.Function.apply` asks this, too. Public API: none."""


def transforms_are_on() -> bool:
    """Either of the two (70 ns)."""
    return forward_ad._current_level >= 0 or functorch_is_active()


def is_wrapped(x: torch.Tensor) -> bool:
    """Whether a transform of `torch.func` has wrapped a tensor, or a gradient is one of a batch.

    The second is how `torch.autograd.grad(is_grads_batched=True)` calls backward. Public API: none.
    """
    return functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x)


BATCH = (
    "backward: found a batch of gradients, and a collective takes one. Leave out vectorize=True and "
    "is_grads_batched=True, and call torch.autograd.grad once for each"
)
"""The error for what `is_batch`."""

is_batch: Callable[[torch.Tensor], bool] = functorch.is_legacy_batchedtensor
"""The second half of `is_wrapped`."""


def is_wrapped_dtensor(x: torch.Tensor) -> bool:
    """Whether there is a DTensor in what a transform of `torch.func` has wrapped. Public API: none."""
    inside = x
    while functorch.is_functorch_wrapped_tensor(inside):
        inside = functorch.get_unwrapped(inside)
    return inside is not x and isinstance(inside, DTensor)


autocast_may_be_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device type: a third of the price of `torch.is_autocast_enabled(device_type)`."""


def current_trace() -> object:
    """What stands for this attempt of dynamo's to trace a function; the next attempt has another.

    Would be replaced by a public way to keep something for the time of a trace.
    """
    return TracingContext.get()


def keep_with_graph(kept: Callable[[], None]) -> bool:
    """Has the graph that dynamo traces keep something alive, with its code and with itself. False outside of a trace.

    A backend may keep the graph and not the code. dynamo calls what it keeps with the code when that goes
    (2.11 to 2.13). Would be replaced by a public way to give a graph something of one's own.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:
        return False
    output.cleanups.append(kept)  # type: ignore[arg-type]
    tracer = output.current_tracer
    while tracer is not None:
        tracer.graph.__dict__.setdefault("_kept_by_axes", []).append(kept)
        tracer = tracer.parent
    return True


def inputs_with_guarded_sizes() -> list[tuple[DTensor, DTensor]]:
    """The DTensors that have become inputs of the graph that dynamo traces since the last call: `(traced, real)`.

    The graph is guarded here on those of their whole sizes that are numbers in it. dynamo guards these
    of every other tensor, and of a DTensor the shard and the placements alone (2.11 and 2.13): a graph for
    eight rows would serve seven, on the ranks whose shard is the same. Would be replaced by dynamo's doing so.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.symbolic_convert import InstructionTranslator

    graph = InstructionTranslator.current_tx().output.root_tracer.graph
    seen = _seen_inputs.setdefault(TracingContext.get(), set())
    arguments = {node.name: node.meta.get("grapharg") for node in graph.find_nodes(op="placeholder")}
    found = []
    for name, argument in arguments.items():
        # A second guard of one tensor would be taken for a second tensor.
        if name not in seen and argument is not None and isinstance(argument.fake_tensor, DTensor):
            install_guard(argument.source.make_guard(GuardBuilder.TENSOR_MATCH))
            found.append((argument.fake_tensor, argument.example))
    seen.update(arguments)
    return found


_seen_inputs: WeakKeyDictionary[TracingContext, set[str]] = WeakKeyDictionary()


def trace_again_with_symbols(x: torch.Tensor, dims: Collection[int]) -> NoReturn:
    """Has dynamo trace the function again, with symbols for these sizes of `x`, which is an input or its shard.

    The mark is the one that AOTAutograd leaves for the next graph: 2.13 has one that isn't guarded; 2.11
    guards none. Would be replaced by a public way to ask for a symbol during a trace.
    """
    from torch._dynamo.exc import RestartAnalysis
    from torch._functorch._aot_autograd import runtime_wrappers

    is_new = hasattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices")
    mark = "_dynamo_propagated_dynamic_indices" if is_new else "_dynamo_weak_dynamic_indices"
    setattr(x, mark, {*getattr(x, mark, ()), *dims})
    raise RestartAnalysis(restart_reason="axes: the sizes of a shard vary wherever those of the whole do")


DEVICE_MESHES_ARE_INPUTS = hasattr(device_mesh, "_register_distributed_opaque_types")
"""Whether a compiled graph takes a `DeviceMesh` for an input (2.13), or has it for a constant (2.11)."""


def passing(error: Exception) -> Exception:
    """The error as one of its kind that the compiler lets through while it traces a graph, where it else wraps errors.

    What `ShortenTraceback` is, it raises as it is. No public means would replace this.
    """
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    own = {"__module__": kind.__module__, "first_useful_frame": None, "__reduce__": lambda self: (kind, self.args)}
    found = type(kind.__name__, (kind, ShortenTraceback), own)
    return found.__new__(found, *error.args)


@contextlib.contextmanager
def stages_know_their_shapes() -> Iterator[None]:
    """In this block no stage of a pipeline asks the others whether they know their shapes: it takes it that all do.

    Since 2.13 stages vote before their first step, and one that was made without `input_args` and `output_args` has all
    ask one another for shapes; before, only that one asks. In a simulated world nobody votes. Would be replaced by an
    argument of the stage.
    """
    from torch.distributed.pipelining.stage import PipelineStage

    kept = {name: vars(PipelineStage)[name] for name in _VOTES if name in vars(PipelineStage)}
    for name, method in _VOTES.items() if kept else ():
        setattr(PipelineStage, name, method)
    try:
        yield
    finally:
        for name, found in kept.items():
            setattr(PipelineStage, name, found)


def _own_vote(stage: Any, has_backward: bool, received_acc: torch.Tensor | None = None) -> torch.Tensor:
    """1 where the stage knows its shapes; of stages on one rank, where all do."""
    from torch.distributed.pipelining.stage import InferenceMode

    own = torch.tensor([int(not InferenceMode.needs_dynamic(stage._user_meta, has_backward))], dtype=torch.int32)
    stage._vote_of_axes = own if received_acc is None else own * received_acc
    return stage._vote_of_axes


def _own_result(stage: Any, received_result: torch.Tensor | None = None) -> torch.Tensor:
    """The result of the vote on this rank alone."""
    return stage._vote_of_axes if received_result is None else received_result


_VOTES = {"_warmup_forward_vote": _own_vote, "_warmup_backward_result": _own_result}
