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

import atexit
import contextlib
import functools
import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist

from axes.algebra import providers
from axes.algebra.errors import MeshError, SizeError, shown
from axes.algebra.layout import Layout, Universe
from axes.algebra.mesh import Mesh
from axes.runtime import torch_private, watching
from axes.runtime.agreement import (
    LINGER_SECONDS,
    Barrier,
    Member,
    agree_at,
    connected,
    in_time,
    leave_word,
    polled,
    ranks_text,
)
from axes.runtime.groups import (
    GroupOptions,
    World,
    as_timeout,
    checked_options,
    current_world,
    destroy_process_groups,
    own_backend,
    serves,
)

_starts = itertools.count()
"""Numbers the worlds that this process starts: the same number on all ranks of one."""


@dataclass(frozen=True)
class Binding:
    """What binds a mesh to a job: its device, and the layouts whose groups aren't like the default."""

    device_type: str
    options: tuple[tuple[Layout, GroupOptions], ...] = ()

    @classmethod
    def of(cls, device_type: str, options: Mapping[Layout, GroupOptions]) -> Binding:
        """The binding with these options, of which the usual ones say nothing."""
        own = [(layout, given) for layout, given in options.items() if layout.size > 1 and given.text]
        return cls(device_type, tuple(sorted(own, key=lambda pair: pair[0])))


def init_mesh(
    declaration: str | Mesh,
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
    """Make a mesh over the running job. Every rank of `ranks` calls it with the same arguments.

    It starts `torch.distributed` from the launcher's environment where it isn't running. Without a launcher it makes
    a world of one rank. Like `torch.distributed.init_device_mesh` and JAX's `jax.make_mesh`.

    Args:
        declaration: The axes, slowest first: `"pp dp=2 tp"`. A size that is left out follows from the number of
            ranks. Or a mesh of the algebra, which is bound as it is.
        *equations: Further names for the same ranks: `"fsdp = dp cp"`, `"(dp cp) = rows cols"`.
        device_type: `"cuda"`, `"cpu"`, ...; by default the current accelerator, or "cpu" where there is none.
        ranks: Global ranks in the order of the mesh, by default the whole world. A rank that isn't among them gets a
            mesh whose `coordinate` is None.
        ranks_per_node: How many consecutive ranks share a node, by default the launcher's `LOCAL_WORLD_SIZE`.
        options: `GroupOptions` by axis name, for groups that aren't like the default group.
        timeout: How long ranks wait for each other, a `timedelta` or seconds; by default as the default group. It
            holds for the default group too.
        sizes: Sizes of names, for names that collide with a parameter.
        **keywords: Sizes of names.

    Returns:
        A mesh that is bound to the job.

    Raises:
        ExpressionError: The text isn't a declaration.
        SizeError: Sizes don't follow, or don't multiply to the number of ranks.
        MeshError: Names, ranks, options or the environment aren't valid.
        DesyncError: Ranks disagree, or one doesn't come; raised on every rank.

    Examples:
        >>> mesh = init_mesh("dp tp", tp=1, device_type="cpu")      # no launcher: a world of one
        >>> mesh.shape, mesh.coordinate
        ({'dp': 1, 'tp': 1}, {'dp': 0, 'tp': 0})
    """
    starts = dist.group.WORLD is None
    if starts:
        _start(device_type, timeout)
    world = current_world()
    universe = Universe(range(world.size))
    try:
        ranks = declaration.universe.ranks if isinstance(declaration, Mesh) else ranks
        universe = universe if ranks is None else _checked_universe(ranks, world)
        waits, device = as_timeout(timeout, "timeout"), _checked_device(device_type)
        _select_device(device, world.rank, world.fake)
        per_node = _launchers_node(world) if ranks_per_node is None else ranks_per_node
        try:
            algebra = (
                declaration.define(*equations, sizes=sizes, **keywords)
                if isinstance(declaration, Mesh)
                else Mesh(
                    declaration, *equations, ranks=universe.ranks, ranks_per_node=per_node, sizes=sizes, **keywords
                )
            )
        except SizeError as error:
            if f"the {world.size} rank" not in str(error):
                raise
            raise SizeError(
                f"{error}\nthis job has {world.size} of them; start as many as the mesh needs: torchrun "
                "--nproc-per-node N ..., axes.launch(fn, N), or try it in one process with axes.simulate(N)"
            ) from None
        mesh = algebra._with(binding=_bound(world, algebra, device, options), _view=None)
        if watching.listeners or {"AXES_CHECK", "AXES_TRACE"} & os.environ.keys():
            providers.module("debugging", "axes.debug").read_environment()  # which may fail: the others are told
    except Exception as error:
        if universe.position(world.rank) is not None:
            agree_at(world.member, _barrier(world, universe), error, world.limit)
        if starts and world.size == 1:
            destroy_process_groups()  # so that what the error advises can be done in this process
        raise
    world.timeout = waits or world.timeout
    _agree(world, mesh)
    if waits is not None and not world.fake and (default := dist.group.WORLD) is not None:
        with contextlib.suppress(RuntimeError):  # a backend without limits, as mpi
            default.set_timeout(waits)
    return mesh


def bound_to_job(mesh: Mesh, device_type: str) -> Mesh:
    """A mesh of the algebra on the running job; every rank of the mesh has the same one."""
    _checked_universe(mesh.universe.ranks, current_world())
    return mesh._with(binding=Binding(_checked_device(device_type)), _view=None)


def _start(device_type: str | None, timeout: object) -> None:
    """Starts `torch.distributed` from the launcher's environment, or a world of one where there is none.

    All ranks meet before that: one that can't come makes all of them raise its error, where torch would wait for it.
    """
    connecting, first = torch_private.usual_timeout("gloo"), "the start of torch.distributed"
    with contextlib.suppress(MeshError):  # which is told to all ranks below
        connecting = as_timeout(timeout, "timeout") or connecting
    store, rank, size = dist.HashStore(), 0, 1
    if {"RANK", "WORLD_SIZE"} & os.environ.keys():
        job = os.getpid(), *map(os.environ.get, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        store, rank, size = in_time(first, connecting.total_seconds(), lambda: _joined(connecting, *job))
    # The store may be older than this world, and then it keeps what an earlier one left there.
    member = Member(dist.PrefixStore(f"axes world {next(_starts)}", store), rank)
    subject = f"{first} on ranks 0..{size - 1}"
    barrier = Barrier("axes/start", range(size), subject, "All ranks call init_mesh with the same device type")
    try:
        waits, device = as_timeout(timeout, "timeout"), _checked_device(device_type)
        _select_device(device, rank)
        backend = dist.get_default_backend_for_device(device)
    except Exception as error:
        agree_at(member, barrier, error, connecting)
        raise
    limit = waits or torch_private.usual_timeout(backend)
    agree_at(member, barrier, f"device type {device}, backend {backend}", limit)
    member.store.set_timeout(limit)
    connect = functools.partial(dist.init_process_group, backend, store=member.store, rank=rank, world_size=size)
    connected(member, barrier, limit.total_seconds(), functools.partial(connect, timeout=waits))
    current_world().started_here = True
    atexit.register(_end_at_exit, os.getpid())  # the world ends with the program at the latest


@functools.lru_cache(maxsize=1)
def _joined(timeout: timedelta, *_: object) -> tuple[dist.Store, int, int]:
    """The store of the job that the environment describes, this rank, and the number of ranks.

    A process joins the store once and keeps it. Without an agent rank 0 hosts the store, and other ranks may still use
    it for a world that rank 0 has ended.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        Finalize(None, _leave_job, (store, rank, size), exitpriority=0)  # `multiprocessing` runs no `atexit`
    return store, rank, size


def _leave_job(store: dist.Store, rank: int, size: int) -> None:
    """At its end rank 0, which hosts the store, waits some seconds for the others: they may still make groups."""
    with contextlib.suppress(dist.DistError):  # the host has ended
        store.set(f"axes/ended/{rank}", "")  # waits for no answer
        if rank == 0:
            polled(lambda: store.check([f"axes/ended/{each}" for each in range(size)]), LINGER_SECONDS)


def _end_at_exit(process: int) -> None:
    """Ends a world of CPUs alone that the program has left open: else gloo's threads abort some processes at their end.

    In the process alone that started it. On GPUs torch does it: to wait there for ranks that may be gone could hang.
    """
    ours = process == os.getpid() and dist.group.WORLD is not None and current_world().started_here
    if ours and current_world().backend in ("gloo", "cpu:gloo"):
        with contextlib.suppress(RuntimeError):  # groups that have failed are closed by that
            destroy_process_groups()


def _launchers_node(world: World) -> int | None:
    """The number of ranks of a node, where the launcher says that there are several nodes."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if not world.fake and said.isdecimal() and 0 < int(said) < world.size else None


def _select_device(device_type: str, rank: int, fake: bool = False) -> None:
    """Sets the device of this rank, the launcher's or by turns, unless the program has used one already."""
    module: Any = getattr(torch, device_type, None)
    if fake or device_type == "cpu" or not hasattr(module, "set_device") or module.is_initialized():
        return
    if not module.device_count():
        raise MeshError(
            f"device_type is {shown(device_type)}, of which this process has no device; torch {torch.__version__}"
        )
    module.set_device(int(os.environ.get("LOCAL_RANK") or rank % module.device_count()))


def _checked_device(device_type: object) -> str:
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        served = accelerator is not None and (dist.group.WORLD is None or serves(current_world(), accelerator.type))
        return accelerator.type if served else "cpu"
    if not isinstance(device_type, str) or not device_type.isalpha() or own_backend(device_type) is None:
        raise MeshError(
            "device_type is a name without an index, such as 'cuda' or 'cpu', for which torch.distributed has a "
            f"backend; found {shown(device_type)}"
        )
    return device_type


def _checked_universe(ranks: Iterable[int], world: World) -> Universe:
    universe = Universe.of(ranks)
    largest = universe.ranks[-1] if isinstance(universe.ranks, range) else max(universe.ranks)
    if largest >= world.size:
        raise MeshError(f"ranks has rank {shown(largest)}, but the world has {world.size} ranks, 0 to {world.size - 1}")
    return universe


def _bound(
    world: World,
    mesh: Mesh,
    device_type: str,
    options: Mapping[str, GroupOptions] | None,
) -> Binding:
    """The binding of a mesh, its options by layout: names of one layout share one group."""
    if options is not None and not isinstance(options, Mapping):
        raise MeshError(f"options is a mapping from axis names to GroupOptions; found {type(options).__name__}")
    found: dict[Layout, GroupOptions] = {}
    for name, given in (options or {}).items():
        layout, checked = mesh.layout(name), checked_options(world, name, given, device_type)
        if found.setdefault(layout, checked) != checked and layout.size > 1:
            first = next(each for each in options or {} if mesh.layout(each) == layout)
            raise MeshError(
                f"'{first}' and '{name}' are the same ranks and share one group; found two options for it: "
                f"{found[layout].text or 'the default'} and {checked.text or 'the default'}. Another group for them "
                f"is that of another mesh: axes.init_mesh('{name}', options={{'{name}': GroupOptions(..., "
                f"lane='{name}')}})"
            )
    return Binding.of(device_type, found)


def _barrier(world: World, universe: Universe) -> Barrier:
    return world.barrier(
        "mesh",
        universe.ranks,
        f"init_mesh over {ranks_text(universe.ranks)}",
        "All ranks of a mesh call init_mesh with the same declaration, sizes, ranks, device type and options, in the "
        "same order where they declare several",
    )


def _agree(world: World, mesh: Mesh) -> None:
    universe, binding = mesh.universe, mesh.binding
    if universe.position(world.rank) is None:
        declared = f"init_mesh over {ranks_text(universe.ranks)}"
        leave_word(world.member, f"isn't a member of what it declared last, {declared}")
        return
    names = {layout: name for name, layout in mesh.namespace.items()}
    options = [f"options[{names[layout]}]: {each.text}" for layout, each in binding.options]
    nodes = [] if mesh.ranks_per_node is None else [f"ranks_per_node={mesh.ranks_per_node}"]
    how = [binding.device_type, *nodes, *options, watching.statement]
    statement = " | ".join(filter(None, [mesh.declaration, ranks_text(universe.ranks), *how]))
    agree_at(world.member, _barrier(world, universe), statement, world.limit)
