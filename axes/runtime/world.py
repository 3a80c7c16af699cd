"""`init_mesh`: a mesh bound to the running job, the same on every rank or an error on every rank.

    mesh = axes.init_mesh(
        "pp dp_replicate dp_shard cp tp", "fsdp = dp_shard cp", pp=2, dp_replicate=1, cp=2, tp=4,
    )

It starts `torch.distributed` from the launcher's environment where it isn't running, and a world of
one where there is no launcher, so the same script runs under `torchrun` and as plain `python`. All
ranks of the mesh then compare what they declared: one that differs makes each of them raise
`DesyncError` with both texts. No process group is made yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from axes.algebra.errors import AxesError, MeshError
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.algebra.universe import Universe
from axes.runtime import flags, torch_private
from axes.runtime.agreement import Barrier, agree, pass_by, ranks_text, refuse
from axes.runtime.groups import (
    GroupOptions,
    World,
    as_timeout,
    backend_for,
    checked_options,
    current_world,
    own_backend,
    serves,
)

_LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ADVICE = (
    "All ranks of a mesh call init_mesh with the same declaration, sizes, ranks, device type and "
    "options, in the same order where they declare several"
)


@dataclass(frozen=True)
class Binding:
    """What binds a mesh to a job: its device, and the axes whose groups aren't like the default.

    `timeout` says how long ranks wait for one another; it doesn't make meshes differ.
    """

    device_type: str
    options: tuple[tuple[Layout, GroupOptions], ...] = ()
    timeout: timedelta | None = field(default=None, compare=False)


def init_mesh(
    declaration: str,
    /,
    *equations: str,
    device_type: str | None = None,
    ranks: Iterable[int] | None = None,
    ranks_per_node: int | None = None,
    options: Mapping[str, GroupOptions] | None = None,
    timeout: timedelta | float | None = None,
    sizes: Mapping[str, int] | None = None,
    **keywords: int,
) -> Mesh:
    """A mesh over the running job; every rank of `ranks` calls it with the same arguments.

    `declaration`, `equations` and sizes are as for `axes.Mesh`; sizes that are left out follow from
    the number of ranks. `ranks` are global ranks in the order of the mesh, by default the whole
    world; a rank outside them takes no part and gets a mesh whose `coordinate` is None.
    `device_type` is the current accelerator, or "cpu" where there is none or the running world
    doesn't serve it. `options` gives axes, by name, groups that aren't like the default group; a
    product of axes that has no name of its own has the options that all of them share.
    `timeout` (a `timedelta` or seconds, by default that of the default group) bounds how long ranks
    wait for one another, here and when groups are made.

    Raises what `axes.Mesh` raises, `MeshError` for ranks, options or an environment that can't be,
    and `DesyncError` on every rank where ranks disagree or one doesn't come.

    >>> mesh = init_mesh("dp tp", tp=1, device_type="cpu")      # no launcher: a world of one
    >>> mesh.shape, mesh.coordinate
    ({'dp': 1, 'tp': 1}, {'dp': 0, 'tp': 0})
    """
    flags.read_environment()
    waits = as_timeout(timeout, "timeout")
    device = _checked_device(device_type)
    _start(device, waits)
    world = current_world()
    if ranks is None:
        ranks = range(world.size)
    elif isinstance(ranks, Iterable) and not isinstance(ranks, range):
        ranks = tuple(ranks)
    try:
        universe = _checked_universe(ranks, world)
        algebra = Mesh(
            declaration,
            *equations,
            ranks=universe.ranks,
            ranks_per_node=ranks_per_node,
            sizes=sizes,
            **keywords,
        )
        mesh = algebra._with(binding=_bound(world, algebra, device, options, waits))
    except Exception as error:
        _refuse(world, ranks, error)
        raise
    _agree(world, mesh)
    return mesh


def _start(device_type: str, timeout: timedelta | None) -> None:
    """Starts `torch.distributed` where it isn't running, and chooses this rank's device."""
    if dist.group.WORLD is not None:
        if not current_world().fake:
            _select_device(device_type, dist.get_rank())
        return
    present = [name for name in _LAUNCHERS_VARIABLES if name in os.environ]
    launched = "RANK" in present or "WORLD_SIZE" in present
    absent = [name for name in _LAUNCHERS_VARIABLES if name not in present]
    if launched and absent:
        raise MeshError(f"the launcher set {', '.join(present)} but not {', '.join(absent)}; torchrun sets all of them")
    backend = dist.get_default_backend_for_device(device_type)
    if launched:
        _select_device(device_type, int(os.environ["RANK"]))
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    current_world().started_here = True


def _select_device(device_type: str, rank: int) -> None:
    """Sets the device of this rank, the launcher's or by turns, unless the program has used one already."""
    module: Any = getattr(torch, device_type, None)
    if device_type == "cpu" or not hasattr(module, "set_device") or module.is_initialized():
        return
    if not module.device_count():
        raise MeshError(
            f"device_type is {device_type!r}, of which this process has no device; torch {torch.__version__}"
        )
    by_turns = rank % module.device_count()
    module.set_device(int(os.environ.get("LOCAL_RANK") or by_turns))


def _checked_device(device_type: object) -> str:
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        served = accelerator is not None and (dist.group.WORLD is None or serves(current_world(), accelerator.type))
        return accelerator.type if served else "cpu"
    if not isinstance(device_type, str) or not device_type.isalpha():
        raise MeshError(f"device_type is a name without an index, such as 'cuda' or 'cpu'; found {device_type!r:.60}")
    if own_backend(device_type) is None:
        raise MeshError(f"torch.distributed has no backend for device type {device_type!r:.60}")
    return device_type


def _checked_universe(ranks: Iterable[int], world: World) -> Universe:
    universe = Universe.of(ranks)
    largest = universe.ranks[-1] if isinstance(universe.ranks, range) else max(universe.ranks)
    if largest >= world.size:
        raise MeshError(f"ranks has rank {largest}, but the world has {world.size} ranks, 0 to {world.size - 1}")
    return universe


def _bound(
    world: World,
    mesh: Mesh,
    device_type: str,
    options: Mapping[str, GroupOptions] | None,
    timeout: timedelta | None,
) -> Binding:
    """The binding of a mesh, its options by layout: names of one layout share one group."""
    if options is not None and not isinstance(options, Mapping):
        raise MeshError(f"options is a mapping from axis names to GroupOptions; found {type(options).__name__}")
    backend_for(world, device_type)
    found: dict[Layout, tuple[str, GroupOptions]] = {}
    for name, given in (options or {}).items():
        layout, checked = mesh.layout(name), checked_options(world, name, given, device_type)
        other, before = found.setdefault(layout, (name, checked))
        if before != checked and layout.size > 1:
            raise MeshError(
                f"'{other}' and '{name}' are the same ranks and share one group; found two options "
                f"for it: {before.text or 'the default'} and {checked.text or 'the default'}"
            )
    kept = [(layout, given) for layout, (_, given) in found.items() if layout.size > 1 and given.text]
    return Binding(device_type, tuple(sorted(kept, key=lambda pair: pair[0].modes)), timeout)


def _barrier(world: World, universe: Universe) -> Barrier:
    return world.barrier("mesh", universe.ranks, _subject(universe), _ADVICE)


def _subject(universe: Universe) -> str:
    return f"init_mesh over {ranks_text(universe.ranks)}"


def _agree(world: World, mesh: Mesh) -> None:
    universe, binding = mesh.universe, mesh.binding
    if world.fake:
        return
    if universe.position(world.rank) is None:
        pass_by(world.member, _subject(universe))
        return
    names = {layout: name for name, layout in mesh.namespace.items()}
    options = [f"options[{names[layout]}]: {given.text}" for layout, given in binding.options]
    nodes = [] if mesh.ranks_per_node is None else [f"ranks_per_node={mesh.ranks_per_node}"]
    order = ranks_text(universe.ranks)
    parts = [mesh.declaration, order, binding.device_type, *nodes, *options, flags.flags_text()]
    statement = " | ".join(filter(None, parts))
    timeout = binding.timeout or torch_private.default_timeout(binding.device_type)
    agree(world.member, _barrier(world, universe), statement, timeout)


def _refuse(world: World, ranks: Iterable[int], error: Exception) -> None:
    """Tells the other ranks that this one can't come, where the ranks at least make sense."""
    try:
        universe = _checked_universe(ranks, world)
    except AxesError:
        universe = Universe(range(world.size))
    if not world.fake and universe.position(world.rank) is not None:
        refuse(world.member, _barrier(world, universe), error)
