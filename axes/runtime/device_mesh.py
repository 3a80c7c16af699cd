"""A mesh as torch's `DeviceMesh`, and a `DeviceMesh` as a mesh.

DTensor, FSDP2 and distributed checkpoint take a `DeviceMesh`. `mesh.device_mesh` gives them one
whose dims communicate over the groups that axes made, in the order of the axes:

    fully_shard(block, mesh=mesh["dp_replicate", "fsdp"].device_mesh)
    weight = distribute_tensor(weight, mesh["tp"].device_mesh, [Shard(0)])

All device meshes of one universe have one root, since FSDP2 combines the mesh that it shards over
with the mesh of a parameter only where they do. torch's own constructor makes groups of ascending
ranks, and with an axis that isn't ascending it puts shards on the wrong ranks; these groups have
the axis's order, so such an axis gives a correct DTensor.

The other way, `Mesh.from_device_mesh` adopts what `init_device_mesh`, `_flatten`, `_unflatten`,
slicing or `from_group` made, with its groups, so that nothing is created twice.

`_flatten` of these meshes is that of axes, too: FSDP2 flattens where it is given `dp_mesh_dims`. A slice
has dims of the `DeviceMesh` alone, in its order: for others write `mesh["fsdp"].device_mesh`.
"""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from axes.algebra.errors import MeshError, shortened
from axes.algebra.layout import Layout, Universe
from axes.algebra.mesh import Mesh
from axes.runtime import checkpoint, torch_private
from axes.runtime.agreement import ranks_text
from axes.runtime.groups import (
    World,
    adopt,
    backend_for,
    create_groups,
    current_world,
    of_world,
    options_of,
)
from axes.runtime.world import Binding


@of_world(4096)
def device_mesh(mesh: Mesh) -> DeviceMesh:
    """The `DeviceMesh` of a bound mesh's axes: one object for all meshes with equal axes.

    Makes the groups of the axes that don't exist yet, so every rank of the mesh calls it. On a rank
    outside the mesh the result has no coordinate, as torch has it, where the mesh covers all of its
    ranks; of a sub-mesh there is none, and it raises `MeshError`.
    """
    world = current_world()
    if mesh.coordinate is None and mesh.size < mesh.universe.size:
        raise MeshError(f"rank {world.rank} isn't one of the ranks of {mesh!r}, so it has no DeviceMesh of them")
    with world.lock:
        made = _over_root(world, mesh)
        # torch calls two DeviceMeshes equal that differ in their groups alone.
        found, known = world.meshes.setdefault(made, (made, mesh))
        if any(options_of(known, layout) != options_of(mesh, layout) for layout in mesh.layouts):
            raise MeshError(
                f"torch can't tell the DeviceMesh of {mesh!r} from one that has the same axes and other groups, "
                "with other options, and would use those of the first for both. Give the axes of one of the meshes "
                "other names, or end the groups of the first with axes.destroy_process_groups()"
            )
    return found


def from_device_mesh(device_mesh: DeviceMesh) -> Mesh:
    """The mesh with the axes of a `DeviceMesh`, bound to its groups.

    Its universe is the ranks of the `DeviceMesh` that this one was sliced or flattened from. Dims
    without names, as of the mesh that `fully_shard` makes by itself, are called `dim_0`, `dim_1`, ... Raises
    `MeshError` where a group doesn't have the order of the coordinates.
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise MeshError(f"from_device_mesh takes a torch DeviceMesh; found {type(device_mesh).__name__}")
    world = current_world()
    known, mesh = world.meshes.get(device_mesh, (None, None))
    # torch calls two device meshes equal whatever groups they have that axes didn't make.
    if known is device_mesh or (known and torch_private.group_names(known) == torch_private.group_names(device_mesh)):
        return mesh  # type: ignore[return-value]
    with world.lock:
        mesh = _adopted(world, device_mesh)
        world.meshes[device_mesh] = device_mesh, mesh
        # On torch 2.11 one that `_flatten` made isn't equal to one of the same layout.
        world.meshes[_over_root(world, mesh)] = device_mesh, mesh
    return mesh


def _over_root(world: World, mesh: Mesh) -> DeviceMesh:
    """A new `DeviceMesh` of the axes, with their groups."""
    groups = create_groups(mesh, mesh.axis_names)
    key = universe, device_type = mesh.universe, mesh.binding.device_type
    if key not in world.roots:
        world.roots[key] = torch_private.root_device_mesh(device_type, universe.ranks)
    here = None if mesh.coordinate is None else tuple(mesh.coordinate.values())
    own = [groups[name] for name in mesh.axis_names if groups]
    return torch_private.device_mesh_over(world.roots[key], mesh.layouts, mesh.axis_names, here, own)


def _flattened(made: DeviceMesh, name: str) -> DeviceMesh | None:
    """The dims as one of this name, over the group that axes has for its ranks; None where torch made the root."""
    roots = [] if dist.group.WORLD is None else current_world().roots.values()
    if not any(root is torch_private.root_of(made) for root in roots):
        return None
    mesh = from_device_mesh(made)
    return device_mesh(mesh._with(namespace={**mesh.namespace, name: mesh.layout_of_all})[name])


def _adopted(world: World, device_mesh: DeviceMesh) -> Mesh:
    names = device_mesh.mesh_dim_names or [f"dim_{number}" for number in range(device_mesh.ndim)]
    universe, device = Universe.of(torch_private.root_ranks(device_mesh)), device_mesh.device_type
    layouts = dict(zip(names, map(Layout.of, torch_private.dims_of(device_mesh)), strict=True))
    mesh = Mesh("universe", ranks=universe.ranks)._with(
        axis_names=tuple(names), namespace=layouts, binding=Binding(device)
    )
    member = universe.position(world.rank) is not None
    if member and torch_private.groups_are_gone(device_mesh):
        raise MeshError(
            "the process groups of this DeviceMesh have been ended, by axes.destroy_process_groups(), mesh.abort() or "
            "torch.distributed: tensors on it are of no use any more. Make them anew on a mesh of axes, which makes "
            "its groups when they are used"
        )
    groups = {name: device_mesh.get_group(number) for number, name in enumerate(names) if member}
    for name, group in groups.items():
        _check_order(world, mesh, name, group)
    entries = [(layouts[name], adopt(world, group, name)) for name, group in groups.items()]
    ours = world.roots.setdefault((universe, device), torch_private.root_of(device_mesh))
    torch_private.register_groups(ours, [*groups.values()])
    usual = backend_for(world, device)
    own = {layout: replace(e.options, backend=None if e.backend == usual else e.backend) for layout, e in entries}
    return mesh._with(binding=Binding.of(device, own))


def _check_order(world: World, mesh: Mesh, name: str, group: dist.ProcessGroup) -> None:
    """Refuses a group whose ranks don't stand in the order of the axis, here or on another line.

    torch sorts the ranks of the groups that it makes. Where a line of the axis isn't ascending, its
    ranks would put their shards elsewhere than the coordinates say; all ranks refuse, and not only
    those on that line.
    """
    wanted, found, known = [*mesh.axis(name).ranks], dist.get_process_group_ranks(group), world.known(group)
    keeps_order = (known is not None and known.origin == "made") or found != sorted(found)
    others = [] if keeps_order else [line for line in mesh.axis(name).all_ranks() if [*line] != sorted(line)]
    if found != wanted or others:
        odd = wanted if found != wanted else others[0]
        raise MeshError(
            f"dim {shortened(name)} of the DeviceMesh runs through {ranks_text(odd)} in this order, its process group "
            f"through {ranks_text(sorted(odd) if found == wanted else found)}: torch.distributed sorts the ranks of a "
            "group. Declare the mesh with axes.init_mesh(..., ranks=[...]), which keeps the order"
        )


# What torch has to do otherwise for the meshes of axes.
torch_private.replace_flattening(_flattened)
checkpoint.install()
