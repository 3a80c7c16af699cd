"""Transfers in a job: who calls them, on which group, and what its ranks agree on.

Before anything is sent, all ranks of a transfer compare their plans and whether their tensors fit, by one small
reduction. So a wrong tensor is an error on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from axes.algebra.errors import AxesError, DesyncError, MeshError, ShardingError
from axes.algebra.layout import Universe
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import Sharding
from axes.extension import Operation, agree, collective, dtensor
from axes.runtime.agreement import MissedError, ranks_text
from axes.runtime.axis_groups import communicator
from axes.runtime.groups import GroupOptions, abort_group_of, current_world, group_of, of_world
from axes.transfers.execution import Execution, Tiles
from axes.transfers.transfers import Like, Transfer, transfer

_LANE = "transfer"
"""The name of the group of a transfer, and of the lane of one that has a time limit of its own."""

TransferKind = tuple[str, Sharding, Sharding, tuple[int, ...], str]
"""A tensor that moves: its name, how it lies and will lie, its shape and its dtype."""


def carry_kinds(kinds: tuple[TransferKind, ...], tensors: Mapping[str, DTensor]) -> dict[str, Any]:
    """Carry out the transfer of these tensors by name: what `axes.reshard` of many is."""
    return carry_out(_transfer_of(kinds), {name: tensors[name] for name, *_ in kinds}, None)


@functools.lru_cache(maxsize=64)
def _transfer_of(kinds: tuple[TransferKind, ...]) -> Transfer:
    sources = {name: source for name, source, *_ in kinds}
    targets = {name: target for name, _, target, *_ in kinds}
    return transfer(sources, targets, shapes={name: Like(shape, dtype) for name, _, _, shape, dtype in kinds})


def carry_out(move: Transfer, tensors: Mapping[str, Any], into: Mapping[str, Any] | None) -> dict[str, Any]:
    """Carry a transfer out on this rank; see `Transfer.__call__`."""
    if move.home is None and move.tensors:
        raise MeshError("the meshes of this transfer are algebra alone; data moves on a mesh made with axes.init_mesh")
    run = run_of(move, None if move.home is None else current_world().timeout)
    if run.move.rank not in run.ranks:
        return {}
    with torch.no_grad():
        return run(tensors, into)


@of_world(32)
def run_of(move: Transfer, limit: timedelta | None) -> JobExecution:
    """A transfer, made ready for this rank, whose ranks wait for one another for this time."""
    return JobExecution(move.at(current_world().rank), limit)


class JobExecution(Execution):
    """A transfer among ranks of one job. limit: how long they wait for one another, as `init_mesh` has said."""

    def __init__(self, move: Transfer, limit: timedelta | None):
        kind = "cpu" if move.home is None else move.home.binding.device_type
        ranks = Universe.of(move.ranks).ranks if move.ranks else ()
        super().__init__(move, ranks, torch.device(kind), f"rank {move.rank}")
        self.limit = limit

    @functools.cached_property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all ranks of the transfer; None where nobody sends anything.

        Where `init_mesh` has set a time limit, that is the group's: a rank that never comes is an error on the
        others then. A rank that has missed some of their attempts to connect takes part in the next one.
        """
        if self.move.home is None or len(self.ranks) < 2:
            return None
        union = Mesh("union", ranks=self.ranks)
        limited = self.limit is not None and self.device.type == "cpu"
        own = ((union.layout_of_all, GroupOptions(timeout=self.limit, lane=_LANE)),) if limited else ()
        union = union._with(binding=replace(self.move.home.binding, options=own))
        while True:
            try:
                return group_of(union, union.layout_of_all, _LANE)
            except MissedError:
                continue

    def __call__(self, tensors: Mapping[str, Any], into: Mapping[str, Any] | None) -> dict[str, Any]:
        """The tensors that this rank has of the targets, from those that it has of the sources."""
        error: AxesError | None = None
        try:
            self.fit(tensors, {} if into is None else into)
        except AxesError as failed:
            error = failed
        given = {} if into is None else into
        try:
            call = functools.partial(self._carried, error, given)
            made = call() if self.group is None else collective(self._operation, (), call)
        except DesyncError as failed:
            if self.group is None or not isinstance(failed.__cause__, RuntimeError):
                raise
            # The backend has failed: if the group is of transfers alone, the next one connects anew.
            abort_group_of(self.group, _LANE)
            raise DesyncError(f"{failed}\n{self.state}") from failed.__cause__
        found = {name: tile for name, tile in made.items() if tile is not None}
        if into is None:
            return {name: self._result(name, tile) for name, tile in found.items()}
        return {**found, **{name: x for name, x in into.items() if x is not None}}

    def _carried(self, error: AxesError | None, into: Mapping[str, Any]) -> Tiles:
        self._agree(error)
        return self.carry(self.group, into)

    def _result(self, name: str, local: torch.Tensor) -> Any:
        """What arrives without `into`: a DTensor where the target's mesh can have one."""
        end = self.move.ends[1][name]
        if end.sharding.mesh.binding is None:
            return local
        try:
            check_torch_can(end.sharding, end.shape)
            return dtensor(local, end.sharding, end.shape)
        except ShardingError:  # DTensor can't say every sharding; the shard is right
            return local

    # all ranks

    @property
    def said(self) -> str:
        """The transfer as errors and traces show it."""
        return f"axes.transfer of {self.count}, {ranks_text(self.ranks)}"

    def _operation(self) -> Operation:
        sent, received = self.moved
        return Operation(
            what=f"axes.transfer of {self.contents}",
            kind="exchange",
            by="send and receive",
            axis="all ranks",
            group="" if self.group is None else str(self.group.group_name),
            ranks=self.ranks,
            dtype=self.wire,
            device=self.device.type,
            bytes_in=received,
            bytes_out=sent,
            together=False,  # a rank waits for those that it exchanges with
            compared=f"{self.said} {self.move.fingerprint}",
            mesh=self.move.home,
        )

    def _agree(self, error: AxesError | None) -> None:
        """Return where all ranks have one plan, and each has tensors that fit; an error on all of them otherwise."""
        if self.group is not None:
            plan = int(self.move.fingerprint[:15], 16)
            state = torch.tensor([error is not None, plan, -plan], dtype=torch.int64, device=self.device)
            communicating = communicator(self.group, state.dtype, True)
            communicating.all_reduce(state, "max", True)
            wrong, most, least = state.tolist()
            if wrong or most != -least:
                self._disagree(error)
        if error is not None:
            raise error

    def _disagree(self, error: AxesError | None) -> None:
        """Tell the other ranks of an error, and raise one of theirs, or how their plan differs."""
        mine = self.move.described
        told = agree("axes.transfer", self.ranks, error or "", mine)
        for rank, theirs in zip(self.ranks, told if error is None else (), strict=False):
            for one, two in zip_longest(mine.splitlines(), theirs.splitlines(), fillvalue="nothing"):
                if one != two:
                    both = f"\n  rank {self.move.rank}: {one}\n  rank {rank}: {two}"
                    raise DesyncError(f"ranks have other plans for {self.said}{both}")
