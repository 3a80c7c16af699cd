"""Process groups: one communicator for one ordered list of ranks, whoever asks under any name.

A communicator is dear (half a GiB on a GPU) and names are cheap: `fsdp`, `dp_shard`, the axis of a
view, the mesh of a DTensor may all mean the same ranks. So a group is looked up by what it is, its
ranks in the order of the axis, its backend and its options, and made once for each:

    tp = mesh.axis("tp").group            # made at first use; later a dictionary look-up
    mesh.create_groups("tp", "fsdp")      # or made now, in an order that is the same on every rank
    print(axes.process_groups())

Only members make a group, after they agreed on it (see `agreement`), and name it by its content,
so ranks that made other groups before still meet. Axes of size one share one group of a single
rank. An axis that covers the world in rank order is the default group, where its backend serves the
device.

What this process knows of the running world is kept in one `World`, the only state that axes
shares; it goes when the world does. So does what was made of groups and device meshes, and is
remembered: a function of these is cached by `of_world`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from axes.algebra.errors import MeshError, shortened, shown
from axes.algebra.layout import Layout, Universe
from axes.algebra.mesh import Mesh
from axes.runtime import torch_private, watching
from axes.runtime.agreement import (
    Barrier,
    Member,
    agree_at,
    connected,
    digest,
    failure,
    leave_word,
    ranks_text,
    without_report,
)

_FAKE = "fake"


def as_timeout(timeout: object, what: str) -> timedelta | None:
    """A timeout given as `timedelta` or in seconds; `MeshError` unless it is positive."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, (int, float)) or seconds is True or not 0 < seconds <= timedelta.max.total_seconds():
        raise MeshError(f"{what} is a positive timedelta or number of seconds; found {shown(timeout)}")
    return timedelta(seconds=seconds)


@dataclass(frozen=True)
class GroupOptions:
    """How the process group of an axis is made, if it isn't like the default group.

    Equal options share one group. Options objects of a backend are equal if they are the same object.

    Args:
        backend: A name as for `init_process_group`: `"nccl"`, `"cpu:gloo,cuda:nccl"`.
        pg_options: The options object of that backend.
        timeout: How long the group waits, a `timedelta` or seconds.
        lane: Any word. It gives an axis of a mesh a communicator of its own; without it, meshes share one for the
            same ranks.

    Raises:
        MeshError: A value isn't valid.

    Examples:
        >>> GroupOptions("gloo", timeout=30) == GroupOptions("gloo", timeout=timedelta(seconds=30))
        True
        >>> GroupOptions(lane="gradients") == GroupOptions()
        False
    """

    backend: str | None = None
    pg_options: object = None
    timeout: timedelta | float | None = None
    lane: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", as_timeout(self.timeout, "GroupOptions.timeout"))

    @property
    def text(self) -> str:
        """The options as ranks compare them; of a backend's own object the kind."""
        kind = None if self.pg_options is None else type(self.pg_options).__name__
        parts = ("backend", self.backend), ("timeout", self.timeout), ("lane", self.lane), ("pg_options", kind)
        return " ".join(f"{name}={value}" for name, value in parts if value is not None)


@dataclass(repr=False, eq=False)
class ProcessGroupInfo:
    """One communicator of this process, and who uses it.

    `names` are those under which it was asked for, `options` those of the axis. `origin` is "made" by axes, the
    "default" group of torch, or "adopted" with a `DeviceMesh`.
    """

    group: dist.ProcessGroup
    ranks: Sequence[int]
    backend: str
    options: GroupOptions
    origin: str
    names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        options = f" {self.options.text}" if self.options.text else ""
        return f"{', '.join(self.names) or '-'}: {ranks_text(self.ranks)}  {self.backend}{options}  {self.origin}"


class ProcessGroups(list[ProcessGroupInfo]):
    """A list that prints one communicator a line."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "[]"


P = ParamSpec("P")
R = TypeVar("R")

_NO_OPTIONS = GroupOptions()
_Key = tuple[Sequence[int], str, GroupOptions]


class World:
    """What this process knows of a `torch.distributed` world: agreements, groups, device meshes."""

    def __init__(self, default: dist.ProcessGroup):
        self.default = weakref.ref(default)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.backend = str(dist.get_backend(default))
        self.fake = self.backend == _FAKE
        self.member = Member(dist.HashStore() if self.fake else default.get_group_store(), self.rank)
        self.started_here = False
        self.lock = threading.RLock()
        self.attempts: dict[str, Iterator[int]] = {}
        self.times_debugged = 0
        self.groups: dict[_Key, ProcessGroupInfo] = {}
        self.meshes: dict[Any, tuple[Any, Mesh]] = {}
        self.roots: dict[tuple[Universe, str], Any] = {}
        self.timeout: timedelta | None = None
        """How long ranks wait for one another, as `init_mesh` has said last; None where it hasn't."""
        self.caches: dict[Callable[..., Any], Callable[..., Any]] = {}
        self.enter(default, (range(self.size), self.backend, _NO_OPTIONS), "default")

    def enter(self, group: dist.ProcessGroup, key: _Key, origin: str) -> ProcessGroupInfo:
        """Remember a group by what it is."""
        entry = self.groups[key] = ProcessGroupInfo(group, *key, origin)
        return entry

    def known(self, group: dist.ProcessGroup) -> ProcessGroupInfo | None:
        """What is remembered of a group; None of one that axes hasn't met."""
        return next((entry for entry in self.groups.values() if entry.group is group), None)

    @property
    def limit(self) -> timedelta:
        """How long ranks wait for one another: `timeout`, else as long as the default group does."""
        return self.timeout or torch_private.timeout_of(self.default())

    def barrier(self, kind: str, members: Sequence[int], subject: str, advice: str = "") -> Barrier:
        """The next barrier of a kind among these ranks, in whatever order: each call is one attempt.

        In a simulated world nobody else comes.
        """
        topic = f"{kind}/{digest(members if isinstance(members, range) else sorted(members))}"
        attempt = next(self.attempts.setdefault(topic, itertools.count()))  # threads count at the same time
        return Barrier(f"axes/{topic}/{attempt}", [self.rank] if self.fake else members, subject, advice, attempt)


_current: World | None = None


def current_world() -> World:
    """The state of the running world; `MeshError` where `torch.distributed` isn't running."""
    global _current
    default = torch_private.default_group()
    if _current is None or default is None or _current.default() is not default:
        if _current is not None:
            torch_private.forget_dtensor_world()
        _current = None if default is None else World(default)
    if _current is None:
        raise MeshError("torch.distributed isn't running (any more); axes.init_mesh(...) starts it")
    return _current


def of_world(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A cache of up to `maxsize` results that lives on the running world, and goes with it.

    For functions that make something of groups, device meshes or what DTensors know of themselves; an entry
    of another world would be wrong, and would keep its groups alive. Arguments are positional. What has symbolic sizes
    is made each time: these have no hash.
    """

    def decorate(make: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(make)
        def found(*key: P.args, **none: P.kwargs) -> R:
            world, default = _current, torch_private.default_group()
            if world is None or default is None or world.default() is not default:
                world = current_world()
            cache = world.caches.get(make) or world.caches.setdefault(make, functools.lru_cache(maxsize)(make))
            try:
                return cache(*key)
            except TypeError as error:
                if str(error) != "unhashable type: non-nested SymInt":  # torch of a symbolic size (2.11 to 2.15)
                    raise
            return make(*key, **none)

        return found

    return decorate


def forget_groups() -> None:
    """Forgets the world without touching its groups: for who ends a world by other means."""
    global _current
    _current = None


@of_world(4096)
def group_of(mesh: Mesh, layout: Layout, name: str) -> dist.ProcessGroup:
    """The group of this process along `layout`: coordinate i on the axis is rank i of the group.

    Made at first use, together with the other members; later one dictionary look-up. Raises
    `MeshError` on a rank outside the mesh, `DesyncError` where members disagree or don't come.
    """
    world = current_world()
    ranks, options = mesh.ranks_of(layout, world.rank), options_of(mesh, layout)
    if ranks is None:
        raise MeshError(f"rank {world.rank} isn't one of the ranks of {mesh!r}, so it has no group on '{name}'")
    backend = options.backend or backend_for(world, mesh.binding.device_type)
    key = Universe.of(ranks).ranks, backend, replace(options, backend=None)
    with world.lock:
        entry = world.groups.get(key) or world.enter(_made(world, key, name), key, "made")
        entry.names = tuple(dict.fromkeys((*entry.names, name)))
    return entry.group


def create_groups(mesh: Mesh, names: Iterable[str]) -> dict[str, dist.ProcessGroup]:
    """Makes the groups of these names now, in an order that only their layouts decide; gives them by name.

    Every rank of the mesh calls it; a rank outside the mesh has nothing to make, and is given none.
    """
    if mesh.universe.position(current_world().rank) is None:
        return {}
    return {name: group_of(mesh, layout, name) for layout, name in sorted((mesh.layout(name), name) for name in names)}


def process_groups() -> ProcessGroups:
    """The communicators of this process that axes knows, the default group first.

    Returns:
        A list, which prints one communicator a line: its names, ranks and backend.

    Examples:
        >>> process_groups()            # nothing runs yet
        []
    """
    if dist.group.WORLD is None:
        return ProcessGroups()
    return ProcessGroups(current_world().groups.values())


def destroy_process_groups() -> None:
    """End every process group that axes made, and `torch.distributed` if `init_mesh` started it. All ranks call it.

    Groups of a `DeviceMesh` of yours, and a default group that you started, stay. Meshes stay usable: their groups
    are made anew at the next use, after another `init_mesh` where `torch.distributed` has ended. DTensors of before
    can't be used any more.

    Examples:
        >>> destroy_process_groups()    # nothing runs: nothing to end
    """
    if dist.group.WORLD is not None:
        world = current_world()
        _end(world, dist.destroy_process_group, [*world.groups.values()])


def abort_groups(mesh: Mesh) -> None:
    """Ends the groups among this rank's part of a mesh, now and without its other ranks."""
    world = current_world()
    here = frozenset(mesh.ranks_of(mesh.layout_of_all, world.rank) or ())
    _end(world, torch_private.abort_group, [each for each in world.groups.values() if here.issuperset(each.ranks)])


def abort_group_of(group: dist.ProcessGroup, lane: str) -> None:
    """Ends a group that a lane has for itself, now and without its other ranks; the next one that asks has a new one.

    A group that others use as well is left to them. No `DeviceMesh` is made of it, so they are good as before.
    """
    world = current_world()
    entry = world.known(group)
    if entry is not None and entry.options.lane == lane:
        world.groups = {key: each for key, each in world.groups.items() if each is not entry}
        torch_private.abort_group(group)
        world.caches.clear()


def _end(world: World, end: Callable[[dist.ProcessGroup | None], None], entries: Sequence[ProcessGroupInfo]) -> None:
    """Ends those of these groups that axes made, and with the default group a world that it started; forgets what was
    made of groups.
    """
    torch_private.forget_dtensor_world()
    world.groups = {key: e for key, e in world.groups.items() if e.origin == "default" or e not in entries}
    for entry in sorted(entries, key=lambda entry: entry.group.group_name):
        if entry.origin == "made":
            with contextlib.suppress(ValueError):  # it has been ended
                end(entry.group)
    for known in (world.meshes, world.roots, world.caches):
        known.clear()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # a compiled graph is of the groups that were there when it was made
    if world.started_here and any(entry.origin == "default" for entry in entries):
        end(None)
        forget_groups()


def adopt(world: World, group: dist.ProcessGroup, name: str) -> ProcessGroupInfo:
    """What axes knows of a group that somebody else made: enters it, unless it or one of this content is known."""
    key = Universe.of(dist.get_process_group_ranks(group)).ranks, str(dist.get_backend(group)), _NO_OPTIONS
    entry = world.known(group) or world.groups.get(key) or world.enter(group, key, "adopted")
    entry.names = entry.names or (name,)
    return entry


def own_backend(device_type: str) -> str | None:
    """The backend that torch prefers for a device type, None where there is none."""
    return dist.Backend.default_device_backend_map.get(device_type)


def serves(world: World, device_type: str) -> bool:
    """Whether the default group serves a device well: gloo serves GPUs only through host memory."""
    served = torch_private.served_devices(world.backend).get(device_type)
    return served is not None and (served != "gloo" or own_backend(device_type) in (None, "gloo"))


def backend_for(world: World, device_type: str) -> str:
    """The backend of groups on a device: the default group's where it serves the device, else its own.

    Raises `MeshError` where this torch has no backend for the device.
    """
    if serves(world, device_type):
        return world.backend
    own = own_backend(device_type)
    if own is None or not dist.is_backend_available(own):
        raise MeshError(
            f"this torch has no backend for device type {shortened(device_type)}, and the default "
            f"group's, {world.backend}, doesn't serve it; choose another device_type"
        )
    return own


def checked_options(world: World, name: str, options: object, device_type: str) -> GroupOptions:
    """`options` of an axis, without a backend that is the usual one; `MeshError` for what can't be."""
    if not isinstance(options, GroupOptions):
        raise MeshError(f"options['{name}'] is a GroupOptions(backend=, pg_options=, timeout=); found {shown(options)}")
    backend = str(options.backend or backend_for(world, device_type))
    served = {each.rpartition(":")[2].lower() for each in backend.split(",")} <= {*dist.Backend.backend_list}
    if not served or device_type not in torch_private.served_devices(backend):
        raise MeshError(f"options['{name}']: torch has no backend {shortened(backend)} that serves '{device_type}'")
    return replace(options, backend=None if backend == backend_for(world, device_type) else backend)


def options_of(mesh: Mesh, layout: Layout) -> GroupOptions:
    """The options that a name of the layout was given: all its names have them."""
    return dict(mesh.binding.options).get(layout, _NO_OPTIONS)


def _made(world: World, key: _Key, name: str) -> dist.ProcessGroup:
    ranks, backend, options = key
    advice = (
        "Ranks that first use overlapping groups in different orders wait for one another; "
        "make the groups beforehand, on all ranks, with mesh.create_groups(...)"
    )
    barrier = world.barrier("group", ranks, f"the group of {ranks_text(ranks)} ('{name}')", advice)
    said = [ranks_text(ranks), "in this order,", backend, options.text, watching.statement]
    agree_at(world.member, barrier, " ".join(filter(None, said)), world.limit)
    content = hashlib.sha256(f"{backend} {options.text}".encode()).hexdigest()[:8]
    again = f"_{barrier.attempt}" if barrier.attempt else ""
    timeout: Any = options.timeout or world.limit
    connect = functools.partial(
        torch_private.make_group,
        f"axes_{digest(ranks)}_{content}{again}",
        ranks,
        world.rank,
        _FAKE if world.fake else backend,
        None if world.fake else copy.deepcopy(options.pg_options),
        timeout,
        f"axes {name}",
    )
    return connect() if world.fake else connected(world.member, barrier, timeout.total_seconds(), connect)


def say_why(text: str) -> None:
    """Tells ranks that wait for this one why it doesn't come: they read it behind "rank 3"."""
    if dist.is_initialized() and not current_world().fake:
        leave_word(current_world().member, text.replace("\n", "\n    "))


def who_else_failed(ranks: Sequence[int], what: str) -> tuple[int, str]:
    """Reports that `what` these ranks do together fails on this one. Its rank, and lines that say which of the others
    report nothing.
    """
    if not dist.is_initialized() or current_world().rank not in ranks:
        return 0, ""
    world = current_world()
    return world.rank, without_report(world.member, iter(lambda: world.barrier("failure", ranks, failure(what)), None))
