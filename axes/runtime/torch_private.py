"""torch's private API: every use of it is here.

Read and tried on 2.11.0 and 2.13.0. What differs between versions is decided here, by looking at what torch offers and
never by its version number.

| here | private API of torch | what public API would replace it |
| --- | --- | --- |
| `served_devices` | `BackendConfig`, which isn't documented | `torch.distributed.BackendConfig` |
| `timeout_of` | `options._timeout` | `ProcessGroup.timeout` |
| `usual_timeout` | `_get_default_timeout` | `torch.distributed.default_pg_timeout` by backend |
| `make_group` | `_new_process_group_helper`, `_world.pg_group_ranks` | `new_group(group_name=, sort_ranks=)` |
| `backend_over` | constructors of backends, which aren't documented | a group over a store alone |
| `default_group`, `groups_are_gone` | `_world` | `dist.group.WORLD` at a fifth of its price |
| `abort_group` | `_abort_process_group` | `ProcessGroup.abort` that forgets the group |
| `root_device_mesh`, `device_mesh_over` | the fields of a DeviceMesh | a constructor that takes a root and groups |
| `register_groups` | `_pg_registry` | the same |
| `dims_of`, `root_of`, `root_ranks` | `_layout`, `_root_mesh`, `_flatten_rank_map` | properties of a DeviceMesh |
| `group_names` | `_dim_group_names` | the same |
| `replace_flattening` | `DeviceMesh._flatten` | one that takes a group |
| `_flattened_or_none` | `_get_flattened_mesh_by_layout` | its finding nothing in dims that don't descend |
| `_gathered_by_communicator` | `resolve_shard_placement` of FSDP2 | its keys being meshes |
| `_new_empty_strided` | DTensor's `new_empty_strided`, on 2.11 | 2.13 |
| `StridedShard`, `has_default_order` | `_StridedShard`, `shard_order` | an order of axes in `Shard` |
| `replace_distribution_of_state_dicts` | `_distribute_tensors` | the use of DTensor's protocol for checkpoints |
| `reduced_by_fsdp` | the state of FSDP2's modules | a way from a parameter to its `FSDPModule` |
| `forget_dtensor_world` | the caches of DTensor | `destroy_process_group` doing so |
| `pass_all`, `Collectives` | methods of a `ProcessGroup` | `torch.distributed` at a third of its price |
| `functional` | `torch.ops._c10d_functional` | functional collectives |
| `dtensor`, `dtensor_spec`, `resized_spec` | `DTensorSpec` | `DTensor.from_local` at a tenth of its price |
| `spec_of`, `local_of` | `DTensor._spec`, `_local_tensor` | the same |
| `hooks_of` | `Tensor._backward_hooks` | a list of hooks; `register_hook` on any leaf |
| `UnderWay` | `AsyncCollectiveTensor` | a name for it |
| `owns_its_memory` | `_storage_Use_Count` | a count of a storage |
| `memory_of` | `_cdata` | `Tensor.shares_memory_with` |
| `version_of`, `counters_of` | `Tensor._version` | a counter that a DTensor shares with its shard |
| `has_base`, `untied` | `_is_view`, `_unsafe_view` | none |
| `node_of`, `TO_LOCAL`, `says_its_gradient` | `_backward_cls`, `_ToTorchTensor` | none |
| `backward_pass` | `_current_graph_task_id` | a question of the autograd engine |
| `copy_all`, `norms_of` | `_foreach_copy_`, `_foreach_norm` | names for them |
| `mapped`, `children_of`, `take_apart`, `put_together` | `torch.utils._pytree` | `torch.utils.pytree` |
| `transforms_are_on` | `forward_ad._current_level`, `_are_functorch_transforms_active` | none |
| `is_batch` | `torch._C._functorch` | none |
| `autocast_may_be_on` | `_is_any_autocast_enabled` | `torch.is_autocast_enabled()` for any device |
| `DispatchMode` | `torch.utils._python_dispatch` | its module, as its documentation is public |
| `hint` | `SymInt.node.hint` | `SymInt.hint` |
| `constant_in_graphs` | `pytree.register_constant` | a public name for it |
| `current_trace` | `TracingContext` | something to keep for the time of a trace |
| `inputs_with_guarded_sizes` | `install_guard`, placeholders of the graph | dynamo's guarding sizes of DTensors |
| `trace_again_with_symbols` | `RestartAnalysis`, the marks of AOTAutograd | a way to ask for a symbol during a trace |
| `DEVICE_MESHES_ARE_INPUTS` | `_register_distributed_opaque_types` | none: with 2.11 as the floor it is needed |
| `next_node_number` | `torch._C._autograd._get_sequence_nr` | the number of the next node, in `torch.autograd.graph` |
| `running_node_number`, `running_leaf` | `torch._C._current_autograd_node` | a way to the node that runs |
| `group_handed_over` | `_resolve_process_group` | operators that take what `torch.distributed` gives out |
| `module_of_fsdp` | `FSDPParamGroup.modules` | hooks of FSDP2 around what it sends |
| `arguments_of` | `OpOverload._schema` | a public schema |
| `stages_know_their_shapes` | `_PipelineSchedule._warmup_p2p` | an argument of the stage |

>>> served_devices("gloo")["cpu"]
'gloo'
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, NoReturn
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C import _functorch as functorch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import forward_ad
from torch.distributed import _composable_state, _mesh_layout, _state_dict_utils, device_mesh
from torch.distributed import _functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, _collective_utils, _random, _redistribute
from torch.distributed.tensor._api import _ToTorchTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops import _tensor_ops
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from axes.algebra.layout import Digit

DispatchMode = TorchDispatchMode
"""Sees every ATen operation of a block."""


# Process groups


def served_devices(backend: str) -> dict[str, str]:
    """The backend that serves each device type, for `"gloo"` as well as `"cpu:gloo,cuda:nccl"`.

    Raises what torch raises for text that names no backend.
    """
    return {
        str(device): str(name)
        for device, name in c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map().items()
    }


def timeout_of(group: Any) -> timedelta:
    """How long a group waits. Backends without options (plugins) have the timeout of their store."""
    try:
        return group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, RuntimeError):
        return group.get_group_store().timeout


usual_timeout: Callable[[str], timedelta] = c10d._get_default_timeout
"""How long a group of a backend waits if nobody says it."""


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
    ranks, and up to 2.11 it sorts the ranks.
    """
    default = c10d._get_default_group()
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
    """A communicator of ranks that share a store alone: it needs no default group, and is in no table of torch."""
    if device_type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    # After it NCCL's watchdog ends the process: the limit is kept without it.
    options._timeout = timeout + timedelta(minutes=10)
    return dist.ProcessGroupNCCL(store, rank, size, options)


default_group: Callable[[], dist.ProcessGroup | None] = functools.partial(
    operator.attrgetter("_default_pg"), c10d._world
)
"""`dist.group.WORLD`, or None, for a fifth of its price, which every call pays."""


abort_group: Callable[[dist.ProcessGroup | None], None] = c10d._abort_process_group
"""Ends a group without its other members; None: all groups of torch, the default group last. `ValueError` where it has
been ended. `ProcessGroup.abort`, which is public, leaves the group in torch's tables."""


# Device meshes


def root_device_mesh(device_type: str, ranks: Sequence[int]) -> DeviceMesh:
    """A `DeviceMesh` of one dim over `ranks`, without groups: the root of others."""
    with unset_fake_temporarily():
        listed = torch.frombuffer(array("i", ranks), dtype=torch.int)  # half the time of `torch.tensor`
        return DeviceMesh(device_type, listed, mesh_dim_names=("universe",), _init_backend=False)


def device_mesh_over(
    root: DeviceMesh,
    dims: Sequence[Sequence[Digit]],
    names: tuple[str, ...],
    coordinate: tuple[int, ...] | None,
    groups: Sequence[dist.ProcessGroup],
) -> DeviceMesh:
    """A `DeviceMesh` whose dims step through the ranks of its root by the digits in `dims`.

    Dim `i` communicates over `groups[i]`, whose ranks stand in the order of its coordinates; a rank outside the root
    has no coordinate and no groups. It is the root but for its own fields: the constructor lists all ranks of the root
    again and looks for this one among them, 10 ms for 131,072.
    """
    mesh = DeviceMesh.__new__(DeviceMesh)
    vars(mesh).update(
        {
            **vars(root),
            "_root_mesh": root,
            "_layout": _layout_of(dims),
            "_mesh_dim_names": names,
            "_coordinate_on_dim": coordinate,
            "_dim_group_names": [group.group_name for group in groups],
            "_flatten_mapping": {},
            "_pg_registry": {},
            "_hash": None,
        }
    )
    register_groups(root, groups)
    return mesh


def stand_in(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Has torch call `ours(own, *args)` in the place of its function of this name, `own`, if it has one."""
    own = getattr(owner, name, None)
    if own is not None:
        setattr(owner, name, functools.wraps(own)(lambda *args, **keywords: ours(own, *args, **keywords)))


def _flattened_or_none(own: Callable[..., Any], mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> DeviceMesh | None:
    """Lets DTensor redistribute over several dims of a mesh at once, or whose strides don't descend.

    DTensor looks whether somebody has flattened these dims before, and the look itself raises
    `KeyError` (2.11 also `NotImplementedError`) where a later dim has the larger stride: in
    `mesh["tp", "dp"]`, and in what FSDP2 concatenates where `tp` is the slower axis. Nothing of
    that order can have been flattened, so the answer is none.
    """
    try:
        return own(mesh, mesh_dims)  # type: ignore[no-any-return]
    except (KeyError, NotImplementedError):
        return None


stand_in(_redistribute, "_get_flattened_mesh_by_layout", _flattened_or_none)


def _new_empty_strided(op: Any, args: tuple[DTensor, Sequence[int], Sequence[int]], options: dict[str, Any]) -> Any:
    """`new_empty_strided` of a DTensor: split as it is, or pending, where it has its shape; else replicated.

    Its dims are in memory in the order of these strides. Of a gradient that others hold as well, or that is
    differentiated itself, autograd makes a copy for the leaf: `new_empty_strided` and `copy_`. 2.11 makes the first of
    these replicated where the gradient is split unevenly or pending, and 2.13 like the gradient.
    """
    x, shape, strides = args
    if tuple(shape) == tuple(x.shape):
        order = sorted(range(x.ndim), key=lambda dim: (-strides[dim], dim))
        laid = torch.ops.aten._to_copy.default(x.permute(order), **options, memory_format=torch.contiguous_format)
        return laid.permute(sorted(range(x.ndim), key=order.__getitem__))
    return DTensor.from_local(x._local_tensor.new_empty_strided(shape, strides, **options), x.device_mesh)


if hasattr(_tensor_ops, "is_tensor_evenly_shardable"):  # by which 2.11 decides
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.new_empty_strided.default] = _new_empty_strided


def replace_flattening(flatten: Callable[[DeviceMesh, str], DeviceMesh | None]) -> None:
    """Has torch ask first what `dm._flatten(name)` is; None for a DeviceMesh that `flatten` doesn't serve.

    torch makes a second communicator for the ranks that are flattened, and of ascending order. What `flatten` gives
    isn't in the table of the root in which DTensor looks for flattened dims: 2.13 gathers uneven shards wrongly there.
    """

    def flattened(own: Any, mesh: DeviceMesh, mesh_dim_name: str | None = None, backend_override: Any = None) -> Any:
        name = mesh_dim_name or "_".join(mesh.mesh_dim_names or ())
        by_default = backend_override is None and mesh.mesh_dim_names != (name,)
        found = flatten(mesh, name) if by_default else None
        return own(mesh, mesh_dim_name, backend_override) if found is None else found

    stand_in(DeviceMesh, "_flatten", flattened)


def _gathered_by_communicator(own: Callable[..., Any], result: Any, default_mesh_info: Any) -> Any:
    """Has `fully_shard` gather parameters of two meshes together where one communicator serves both (2.13).

    It keys what it gathers together by process group, and raises where two meshes have the same. Torch makes a group
    for each mesh, as for fsdp and efsdp, and axes one for the same ranks. Each parameter keeps its own mesh: here
    only the key is that of the first argument.
    """
    found = own(result, default_mesh_info)
    groups = [
        (info.shard_process_group, getattr(info, "replicate_process_group", None))
        for info in (found.mesh_info, default_mesh_info)
    ]
    return dataclasses.replace(found, mesh_info=default_mesh_info) if groups[0] == groups[1] else found


stand_in(_fsdp_common, "resolve_shard_placement", _gathered_by_communicator)


def register_groups(root: DeviceMesh, groups: Sequence[dist.ProcessGroup]) -> None:
    """Lets `torch.compile` find groups by name: it looks in the root's registry."""
    root._pg_registry.update({group.group_name: group for group in groups})


root_of: Callable[[DeviceMesh], DeviceMesh] = DeviceMesh._get_root_mesh
"""The `DeviceMesh` that one was sliced or flattened from, or itself."""


root_ranks: Callable[[DeviceMesh], tuple[int, ...]] = operator.attrgetter("_flatten_rank_map")
"""The ranks that the layouts of a `DeviceMesh` step through, in order."""


def group_names(device_mesh: DeviceMesh) -> list[str]:
    """What torch calls the groups of the dims; none on a rank outside the mesh."""
    return list(getattr(device_mesh, "_dim_group_names", ()))


def groups_are_gone(device_mesh: DeviceMesh) -> bool:
    """Whether a group of the dims has been destroyed since the mesh was made."""
    return not {*group_names(device_mesh)} <= {*c10d._world.pg_names.values()}


def dims_of(device_mesh: DeviceMesh) -> list[list[Digit]]:
    """The digits `(size, stride)` of each dim, over `root_ranks`; none for a dim of size one."""
    layout: Any = device_mesh._layout
    return [list(layout[i].sizes_and_strides) for i in range(len(layout))]


def _layout_of(dims: Sequence[Sequence[Digit]]) -> Any:
    """torch's layout of the dims; a dim without digits has size one."""
    flat: list[Any] = [tuple(zip(*(digits or ((1, 1),)), strict=True)) for digits in dims]
    if hasattr(_mesh_layout, "_FlatLayout"):  # 2.13: a mesh layout is a list of flat layouts; 2.11: one nested layout
        return _mesh_layout._MeshLayout([_mesh_layout._FlatLayout(*each) for each in flat])
    return _mesh_layout._MeshLayout(
        *(tuple(each[0] if len(each) == 1 else each for each in side) for side in zip(*flat, strict=True))
    )


# Strided shards, checkpoints, FSDP2


StridedShard = _StridedShard
"""A shard of a dim with `split_factor` unsplit pieces in front: of a factor of it, or by axes in another order, as
FSDP2 over tensor parallelism makes it."""


def replace_distribution_of_state_dicts(distribute: Callable[..., None]) -> None:
    """Has torch cut a broadcast state dict into shards by `distribute(own, local_state_dict, keys, device, group)`.

    At a key is `(DTensor, whole tensor)`, or what needs nothing.
    """
    stand_in(_state_dict_utils, "_distribute_tensors", distribute)


def reduced_by_fsdp(parameter: torch.Tensor) -> Any | None:
    """How FSDP2 reduces the gradient of a parameter that it has gathered: its `mesh_info`. None of any other tensor.

    `.mesh` are the axes over which it reduces, the copies of HSDP among them. `.is_spmd_mesh` (2.13): they are axes of
    the parameter's own mesh, as `dp_mesh_dims` says, and it takes what a gradient is along them for this rank's
    summand. Otherwise it brings a gradient to the sharding of the parameter before. A gathered parameter stays one
    object, so each is looked for once.
    """
    if not _composable_state._module_state_mapping:
        return None
    try:
        return _reductions[parameter]
    except KeyError:
        states = [state() for state in _composable_state._module_state_mapping.values()]
        one, several = "_fsdp_param_group", "_fsdp_param_groups"  # 2.11 has one group
        groups = [g for state in states for g in getattr(state, several, None) or [getattr(state, one, None)]]
        found = (g for g in groups if g for p in g.fsdp_params if getattr(p, "_unsharded_param", None) is parameter)
        return _reductions.setdefault(parameter, getattr(next(found, None), "mesh_info", None))


_reductions: WeakIdKeyDictionary = WeakIdKeyDictionary()


# A simulated world


def forget_dtensor_world() -> None:
    """Drops what DTensor keeps of a world: sharding propagation, redistributions, costs, random state.

    Its caches are keyed by meshes, which compare equal though another rank made them: in the next
    world of this process an operation would answer with the mesh, the coordinate and the local
    shape of the last one (tried: `x + 1` of 20 rows over 8 ranks, as rank 0, then as rank 7).
    """
    # What torch.distributed.tensor.debug's functions do; to import that package takes numpy (2.11, 2.13).
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _random._rng_tracker = None


# Redistribution: a group's methods, functional collectives, DTensors without their constructor's price


copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""`a.copy_(b)` of each pair, by one call of torch; each may have another dtype."""


def pass_all(
    group: Any,
    sends: Sequence[tuple[int, torch.Tensor]],
    receives: Sequence[tuple[int, torch.Tensor]],
    pack: Callable[[int], None],
) -> list[Any]:
    """Begins to send and to receive `(rank of the group, contiguous tensor)`; gives what to wait for.

    `group` may be the communicator of `backend_over`. `pack(i)` fills the i-th tensor to send: over gloo just before it
    is sent, while it is in the processor's cache; over others before the messages, which have to be issued together.
    Messages between two ranks meet in their order. This takes a third of the Python of `batch_isend_irecv`.
    """
    messages = [*receives, *sends]
    if not messages:
        return []
    alone, device = not isinstance(group, dist.ProcessGroup), messages[0][1].device
    together = (group if alone else group._get_backend(device)).supports_coalescing
    on = () if alone else (device,)
    if together:
        for number in range(len(sends)):
            pack(number)
        group._start_coalescing(*on)
    works = [group.recv([x], peer, _TAG) for peer, x in receives]
    for number, (peer, x) in enumerate(sends):
        if not together:
            pack(number)
        works.append(group.send([x], peer, _TAG))
    return [group._end_coalescing(*on)] if together else works


_TAG = 0x61786573
"""Of what is sent from one rank to another, so that it meets nothing that a user sends."""


class Collectives:
    """The collectives of a `ProcessGroup`, waited for: on an accelerator the current stream does. An op is "sum".

    The functions of `torch.distributed` cost two to three times as much Python. Tensors are contiguous; backends cut
    their first dim, so buffers are flat.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.size, self._is_fake = group.size(), dist.get_backend(group) == "fake"
        self._gather, self._gathering = group._allgather_base, _waiting(c10d.AllgatherOptions())
        self._exchange, self._exchanging = group.alltoall_base, _waiting(c10d.AllToAllOptions())
        self._reduce, self._scatter = group.allreduce, group._reduce_scatter_base
        both = c10d.AllreduceOptions, c10d.ReduceScatterOptions
        self._ops = {op: [_waiting(kind(), op) for kind in both] for op in ("sum", "max", "min")}

    def all_gather(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The `x` of every rank, end to end."""
        out = x.new_empty(shape)
        self._gather(out.view(-1), x.view(-1), self._gathering).wait()
        return out

    def all_to_all(
        self, x: torch.Tensor, receives: Sequence[int] | None, sends: Sequence[int] | None, shape: Sequence[int]
    ) -> torch.Tensor:
        """`receives[i]` elements from rank i, to which `sends[i]` go; None where all are equal."""
        if receives is None and x.shape[0] % self.size == 0:  # a view takes longer than a buffer
            out = torch.empty_like(x)
            self._exchange(out, x, [], [], self._exchanging).wait()
            return torch.reshape(out, shape)
        # The fake backend makes up what arrives from what is sent, and can't from nothing; on 2.11 it makes up nothing.
        out = (x.new_zeros if self._is_fake else x.new_empty)(math.prod(shape))
        if x.numel() or not self._is_fake:
            self._exchange(out, x.ravel(), receives or [], sends or [], self._exchanging).wait()
        return torch.reshape(out, shape)

    def all_reduce(self, x: torch.Tensor, op: str, owned: bool) -> torch.Tensor:
        """`op` of the `x` of all ranks, which is overwritten where it is `owned`."""
        out = x if owned else x.clone()
        self._reduce([out], self._ops[op][0]).wait()
        return out

    def reduce_scatter(self, x: torch.Tensor, op: str, shape: Sequence[int]) -> torch.Tensor:
        """This rank's part of `op` of the `x` of all ranks."""
        out = x.new_empty(shape)
        self._scatter(out.view(-1), x.view(-1), self._ops[op][1]).wait()
        return out


def _waiting(options: Any, op: str = "") -> Any:
    options.asyncOp = False
    if op:
        options.reduceOp = getattr(dist.ReduceOp, op.upper())
    return options


def functional(name: str, x: torch.Tensor, *how: Any) -> torch.Tensor:
    """A functional collective by torch's name for it: a node of a graph, else waited for at its first use."""
    return funcol._maybe_wrap_tensor(getattr(torch.ops._c10d_functional, name)(x, *how))


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
    """
    mesh = getattr(device_mesh, "real_obj", device_mesh)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def resized_spec(spec: DTensorSpec, shape: Sequence[int], stride: tuple[int, ...]) -> DTensorSpec:
    """The spec of a tensor of another shape, otherwise the same, at a fifth of what `dtensor_spec` costs.

    It derives nothing from the placements again, and the hash at its first use.
    """
    found, meta = DTensorSpec.__new__(DTensorSpec), TensorMeta(torch.Size(shape), stride, spec.tensor_meta.dtype)
    vars(found).update(vars(spec), mesh=getattr(spec.mesh, "real_obj", spec.mesh), tensor_meta=meta, _hash=None)
    return found


dtensor: Callable[[torch.Tensor, DTensorSpec], DTensor] = functools.partial(
    DTensor.__new__, DTensor, requires_grad=False
)
"""The DTensor of a local tensor, outside of autograd.

`__new__` does all of it (2.11 to 2.13); `__init__` only tells `torch.compile` to stay away, and
costs three times as much.
"""


spec_of: Callable[[DTensor], DTensorSpec] = operator.attrgetter("_spec")
"""Mesh, placements, shape, strides and dtype of a DTensor in one hashable value."""


local_of: Callable[[DTensor], torch.Tensor] = operator.attrgetter("_local_tensor")
"""The local tensor of a DTensor, outside of autograd. `to_local` is an autograd function."""


def has_default_order(spec: DTensorSpec) -> bool:
    """Whether the axes of the mesh split dims in the order of the mesh, as placements say.

    A spec may say otherwise (`shard_order`, since 2.10), which placements alone don't show.
    """
    order, default = spec.shard_order, DTensorSpec.compute_default_shard_order
    return spec.use_strided_shard_as_shard_order or order is None or order == default(spec.placements)


def hooks_of(leaf: torch.Tensor) -> dict[int, Callable[[torch.Tensor], Any]]:
    """The gradient hooks of a leaf by number, also where it doesn't require a gradient yet. torch's numbers start at 0.

    What `register_hook` adds to behind its check of that (2.11 to 2.13): autograd runs the hooks of a tensor
    from when it requires one, and an operation in place that makes it another function drops them.
    """
    if leaf._backward_hooks is None:
        leaf._backward_hooks = OrderedDict()
    return leaf._backward_hooks


UnderWay = funcol.AsyncCollectiveTensor
"""The result of a collective that isn't waited for yet."""


def owns_its_memory(x: DTensor) -> bool:
    """Whether the shard of a DTensor is contiguous and as large as its storage, and nobody else has one of the two.

    Two things refer to the storage then, the shard and what Python calls its storage; and two to the shard, the DTensor
    and the call that asks.
    """
    storage, alone = x._local_tensor.untyped_storage(), sys.getrefcount(x._local_tensor) == 2
    exact = storage.nbytes() == x._local_tensor.numel() * x._local_tensor.element_size()
    return alone and exact and torch._C._storage_Use_Count(storage._cdata) == 2 and x._local_tensor.is_contiguous()


def version_of(x: torch.Tensor) -> int:
    """How often a tensor's memory was written to, as autograd counts; inference tensors don't."""
    return 0 if x.is_inference() else x._version


def counters_of(x: DTensor, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors without memory whose versions are those of a DTensor and of a plain tensor, also when these are changed
    later and when they are gone.
    """
    inner = shard.detach()
    inner.data = _NOTHING
    with torch._C._DisableTorchDispatch():
        return torch._C.TensorBase.detach(x), inner  # of the wrapper, which has no memory


_NOTHING = torch.empty(0)


def memory_of(x: torch.Tensor) -> int:
    """The number of the storage in which a tensor lies: fake ones have one, too, but no address."""
    return x.untyped_storage()._cdata


has_base: Callable[[torch.Tensor], bool] = torch.Tensor._is_view
"""Whether autograd takes a tensor for a view of another."""


def untied(x: torch.Tensor) -> torch.Tensor:
    """The same memory, which autograd doesn't take for a view; as a node of a graph."""
    return torch.ops.aten._unsafe_view.default(x, x.shape)  # type: ignore[no-any-return]


node_of: Callable[[type[torch.autograd.Function]], type] = operator.attrgetter("_backward_cls")
"""The type of the nodes that an autograd function leaves in the graph."""


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

    The tensors have one dtype and device, and no tensor is empty.
    """
    narrow = tensors[0].is_floating_point() and tensors[0].dtype.itemsize < 4
    return torch._foreach_norm(list(tensors), order, dtype=torch.float32 if narrow else None)


# Trees: `torch.utils._pytree`, of which only registering is public (`torch.export.register_dataclass`)


def children_of(tree: object) -> list[Any] | None:
    """What is directly inside a node that torch's pytree knows, in order; None of anything else."""
    if pytree.tree_is_leaf(tree):
        return None
    return pytree.tree_flatten(tree, is_leaf=lambda part: part is not tree)[0]


backward_pass = torch._C._current_graph_task_id
"""The number of the backward pass that this thread is in, as when a checkpoint computes once more; else -1."""


mapped: Callable[[Callable[[Any], Any], object], Any] = pytree.tree_map
"""The tree with a function of each of its leaves."""


take_apart: Callable[[object], tuple[list[Any], Any]] = pytree.tree_flatten
"""The leaves of a nested value, in order, and what puts them together."""


put_together: Callable[[list[Any], Any], Any] = pytree.tree_unflatten
"""The nested value of these leaves."""


# What goes around autograd, and autocast: questions that every call asks, so their price counts


def transforms_are_on() -> bool:
    """Whether forward mode or a transform of `torch.func` is on; `autograd.Function.apply` asks it, too (70 ns)."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


is_batch: Callable[[torch.Tensor], bool] = functorch.is_legacy_batchedtensor
"""Whether a gradient is one of a batch, as `torch.autograd.grad(is_grads_batched=True)` calls backward."""


autocast_may_be_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device type: a third of the price of `torch.is_autocast_enabled(device_type)`."""

# --- compiled graphs --------------------------------------------------------------------------------


DEVICE_MESHES_ARE_INPUTS = hasattr(device_mesh, "_register_distributed_opaque_types")
"""Whether a compiled graph takes a `DeviceMesh` for an input (2.13), or has it for a constant (2.11)."""


current_trace: Callable[[], object] = TracingContext.get
"""What stands for this attempt of dynamo's to trace a function; the next attempt has another."""


def hint(size: Any) -> int:
    """The size that a symbol has in the call that is being traced."""
    found = size if isinstance(size, int) else size.node.hint
    return int(size) if found is None else found


constant_in_graphs: Callable[[type], None] = pytree.register_constant
"""Makes what is of an immutable, hashable type a constant of compiled graphs, guarded by equality.

2.13 takes any object for one where it is handed to a function whose result is constant; 2.11 only these.
"""


def inputs_with_guarded_sizes() -> list[tuple[DTensor, DTensor]]:
    """The DTensors that have become inputs of the graph that dynamo traces since the last call: `(traced, real)`.

    The graph is guarded here on those of their whole sizes that are numbers in it. dynamo guards these
    of every other tensor, and of a DTensor the shard and the placements alone (2.11 and 2.13): a graph for
    eight rows would serve seven, on the ranks whose shard is the same.
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
    guards none.
    """
    from torch._dynamo.exc import RestartAnalysis
    from torch._functorch._aot_autograd import runtime_wrappers

    is_new = hasattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices")
    mark = "_dynamo_propagated_dynamic_indices" if is_new else "_dynamo_weak_dynamic_indices"
    setattr(x, mark, {*getattr(x, mark, ()), *dims})
    raise RestartAnalysis(restart_reason="axes: the sizes of a shard vary wherever those of the whole do")


# --- observing a step -------------------------------------------------------------------------------


next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next autograd node of this thread gets; nodes are numbered in the order of their making."""


def running_node_number() -> int | None:
    """The number of the node whose gradient this thread computes just now; None where it computes none."""
    node = torch._C._current_autograd_node()
    return None if node is None or hasattr(node, "variable") else node._sequence_nr()


def running_leaf() -> torch.Tensor | None:
    """The leaf whose gradient is accumulated just now, hooks of the leaf included."""
    return getattr(torch._C._current_autograd_node(), "variable", None)


def group_handed_over(given: Any) -> dist.ProcessGroup:
    """The process group that an operator of torch is called with: boxed, by its name, or itself."""
    if isinstance(given, str):
        return c10d._resolve_process_group(c10d.GroupName(given))
    return given if isinstance(given, dist.ProcessGroup) else dist.ProcessGroup.unbox(given)


def module_of_fsdp(holder: object) -> torch.nn.Module | None:
    """The first module of a group of parameters that FSDP2 gathers together; None where `holder` is no such group."""
    modules = getattr(holder, "modules", None) if type(holder).__name__ == "FSDPParamGroup" else None
    return modules[0] if isinstance(modules, tuple) and modules else None


def arguments_of(func: Any) -> list[str]:
    """The names of what an operator takes, in order."""
    return [argument.name for argument in func._schema.arguments]


def backward_passes() -> contextlib.AbstractContextManager[Any]:
    """In this block a mock is in the place of `torch.autograd.backward`, and says whether it was `called`."""
    return mock.patch.object(torch.autograd, "backward", wraps=torch.autograd.backward)


def stages_know_their_shapes() -> contextlib.AbstractContextManager[Any]:
    """In this block no stage of a pipeline asks the others whether they know their shapes: it takes it that all do.

    Since 2.13 stages vote before their first step, and one that was made without `input_args` and `output_args` has all
    ask one another for shapes; before, only that one asks. In a simulated world nobody votes.
    """
    from torch.distributed.pipelining import schedules

    def decide(schedule: Any, stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            asks = schedules.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
            stage._inference_mode = schedules.InferenceMode.DYNAMIC if asks else schedules.InferenceMode.STATIC

    return mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", decide, create=True)
