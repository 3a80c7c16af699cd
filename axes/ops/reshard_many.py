"""`reshard` of many tensors at once: one exchange for a bucket of them, in place of collectives for each.

    moved = axes.reshard(state, {name: spec_of_server(name) for name in state}, mesh=mesh)

Tensors with nothing pending, on whole meshes, go by one `axes.transfer`, which has no gradient. What is pending is
reduced, and a sub-mesh is another one on each rank: such tensors go one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError, shortened, shown, suggestion
from axes.algebra.sharding import Sharding
from axes.algebra.transfers import Like, Transfer, transfer
from axes.runtime import torch_private
from axes.runtime.programs import name_of
from axes.runtime.redistribute import check_takes_part
from axes.runtime.sharded import dtensor_of
from axes.runtime.torch_placements import sharding_of_spec
from axes.runtime.transfer_runs import carry_out

Kind = tuple[str, Sharding, Sharding, tuple[int, ...], str]


def reshard_many(
    tensors: Mapping[str, DTensor], targets: Mapping[str, Sharding], alone: Callable[[DTensor, Sharding], DTensor]
) -> dict[str, DTensor]:
    """These tensors in these shardings. `alone` is what moves a tensor that the others don't go with."""
    for name, x in tensors.items():
        check_takes_part(_sharding(x), targets[name])
    names = _together(tensors, targets)
    moved = _moved(names, [targets[name] for name in names], [tensors[name] for name in names])
    found = dict(zip(names, moved, strict=True))
    return {name: found[name] if name in found else alone(x, targets[name]) for name, x in tensors.items()}


def check_named(tensors: Mapping[str, Any], specs: Any) -> None:
    """`ShardingError` where these aren't DTensors by name, with specs of the same names."""
    if not isinstance(specs, Mapping):
        raise ShardingError(f"axes.reshard of tensors by name takes specs by name; found {shown(specs)}")
    for name, x in tensors.items():
        if not isinstance(name, str) or not isinstance(x, DTensor):
            raise ShardingError(
                f"axes.reshard of many takes DTensors by name, as axes.shard and axes.from_local make them; "
                f"{shortened(name)} is {shown(type(x))}"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise ShardingError(
                f"axes.reshard of many has no gradient, and {shortened(name)} needs one; reshard it by itself, or use "
                "torch.no_grad()"
            )
    for here, there, what in ((tensors, specs, "specs"), (specs, tensors, "tensors")):
        missing = [name for name in here if name not in there]
        if missing:
            raise ShardingError(
                f"{shortened(missing[0])} isn't in the {what}{suggestion(str(missing[0]), map(str, there))}"
            )


def _together(tensors: Mapping[str, DTensor], targets: Mapping[str, Sharding]) -> tuple[str, ...]:
    """The names of the tensors that one transfer moves."""

    def whole(sharding: Sharding) -> bool:
        return not sharding.pending and sharding.mesh.size == sharding.mesh.universe.size

    moving = [name for name, x in tensors.items() if whole(targets[name]) and whole(_sharding(x))]
    return tuple([name for name in moving if targets[name] != _sharding(tensors[name])])


def _sharding(x: DTensor) -> Sharding:
    return sharding_of_spec(torch_private.spec_of(x))


def _moved(names: Iterable[str], targets: Iterable[Sharding], tensors: Iterable[DTensor]) -> tuple[DTensor, ...]:
    kinds = tuple(
        [
            (name, _sharding(x), target, tuple(x.shape), name_of(x.dtype))
            for name, x, target in zip(names, tensors, targets, strict=True)
        ]
    )
    if not kinds:
        return ()
    given = dict(zip(names, tensors, strict=True))
    found = carry_out(_plan(kinds), given, None)

    def outside(name: str, target: Sharding, shape: tuple[int, ...]) -> DTensor:
        """What a rank has that isn't one of the target's: nothing of it."""
        nothing = torch_private.local_of(given[name]).new_empty((0,))
        return dtensor_of(nothing, target, shape, target.mesh.device_mesh)

    return tuple(
        [found[name] if name in found else outside(name, target, shape) for name, _, target, shape, _ in kinds]
    )


@functools.lru_cache(maxsize=64)
def _plan(kinds: tuple[Kind, ...]) -> Transfer:
    sources = {name: source for name, source, *_ in kinds}
    targets = {name: target for name, _, target, *_ in kinds}
    return transfer(sources, targets, shapes={name: Like(shape, dtype) for name, _, _, shape, dtype in kinds})
