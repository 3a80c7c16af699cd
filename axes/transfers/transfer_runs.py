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
from axes.runtime.communicator import communicator
from axes.runtime.groups import GroupOptions, abort_group_of, current_world, group_of, of_world
from axes.transfers.execution import Bound, Execution
from axes.transfers.transfers import Like, Transfer, transfer

_STATE = 5
"""Numbers that ranks compare before a transfer."""

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
    run = run_of(move)
    run.keep_to_limit()
    if run.group is None and run.move.rank not in run.ranks:
        return {}
    with torch.no_grad():
        return run(tensors, into)


@of_world(32)
def run_of(move: Transfer) -> JobExecution:
    """A transfer, made ready for this rank."""
    if move.home is None and move.tensors:
        raise MeshError("the meshes of this transfer are algebra alone; data moves on a mesh made with axes.init_mesh")
    return JobExecution(move.at(current_world().rank), move.home)


class JobExecution(Execution):
    """A transfer among ranks of one job. mesh: one of the running job; None where nothing moves."""

    def __init__(self, move: Transfer, mesh: Mesh | None):
        kind = "cpu" if mesh is None else mesh.binding.device_type
        super().__init__(move, Universe.of(move.ranks).ranks if move.ranks else (), torch.device(kind))
        self.mesh = mesh
        self.limit: timedelta | None = None

    @functools.cached_property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all ranks of the transfer; None where nobody sends anything.

        Where `init_mesh` has set a time limit, that is the group's: a rank that never comes is an error on the
        others then. A rank that has missed some of their attempts to connect takes part in the next one.
        """
        if self.mesh is None or self.move.rank not in self.ranks or len(self.ranks) == 1:
            return None
        union = Mesh("union", ranks=self.ranks)
        limited = self.limit is not None and self.device.type == "cpu"
        own = ((union.layout_of_all, GroupOptions(timeout=self.limit, lane=_LANE)),) if limited else ()
        union = union._with(binding=replace(self.mesh.binding, options=own))
        while True:
            try:
                return group_of(union, union.layout_of_all, _LANE)
            except MissedError:
                continue

    def keep_to_limit(self) -> None:
        """Connect anew where ranks wait for one another for another time by now."""
        limit = None if self.mesh is None else current_world().timeout
        if limit != self.limit:
            vars(self).pop("group", None)
        self.limit = limit

    def __call__(self, tensors: Mapping[str, Any], into: Mapping[str, Any] | None) -> dict[str, Any]:
        """The tensors that this rank has of the targets, from those that it has of the sources."""
        error: AxesError | None = None
        try:
            held, given = self.fit(tensors, {} if into is None else into)
        except AxesError as failed:
            error = failed
        try:
            self._agree(error, into is None)
            bound, made = self.bind(held, given)
            self.count_writes({} if into is None else into, given)
            self._exchange(bound)
        except DesyncError as failed:
            if self.group is not None and isinstance(failed.__cause__, RuntimeError):
                # The backend has failed: if the group is of transfers alone, the next one connects anew.
                abort_group_of(self.group, _LANE)
                vars(self).pop("group", None)
            raise
        found = {name: tile for name, tile in made.items() if tile is not None}
        if into is None:
            return {name: self._result(name, tile) for name, tile in found.items()}
        kept = {name for name in into if name in self.move.idle[1]}
        return {
            name: x
            for name in (*found, *kept)
            if (x := found.get(name) if into.get(name) is None else into[name]) is not None
        }

    def _exchange(self, bound: Bound) -> None:
        try:
            collective(self._operation, (), self.run, bound, self.group)
        except DesyncError as failed:
            self.bound = None
            raise DesyncError(f"{failed}\n{self.state(f'rank {self.move.rank}')}") from failed.__cause__

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
        assert self.mesh is not None, "what is sent is of a mesh"
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
            mesh=self.mesh,
        )

    def _comparison(self) -> Operation:
        """What ranks tell each other before: whether their tensors fit, and by which plan, which isn't compared yet."""
        moved = 2 * _STATE * torch.int64.itemsize * (len(self.ranks) - 1) // len(self.ranks)
        kinds = {"kind": "all_reduce", "by": "all_reduce", "dtype": "int64", "bytes_in": moved, "bytes_out": moved}
        what = f"all_reduce before {self.said}"
        return replace(self._operation(), what=what, together=True, compared="axes.transfer", **kinds)

    def _agree(self, error: AxesError | None, new: bool) -> None:
        """Returns where all ranks have one plan, and each has tensors that fit; an error on all of them otherwise."""
        if error is not None and self.group is None:
            raise error
        if self.group is None:
            return
        plan, receives = int(self.move.fingerprint[:15], 16), self.move.rank in self.move.targets
        flags = [error is not None, receives and new, receives and not new]
        state = torch.tensor([*flags, plan, -plan], dtype=torch.int64, device=self.device)
        communicating = communicator(self.group, state.dtype, True)
        collective(self._comparison, (), communicating.all_reduce, state, "max", True)
        wrong, some, others, most, least = state.tolist()
        if wrong or (some and others) or most != -least:
            into = f"into= {'is left out' if new else 'is passed'}" if receives else ""
            mine = None if error is None else str(error), into, self.move.described
            told = agree("axes.transfer", self.ranks, "", mine)
            raise self._disagreement(told) if error is None else error

    def _disagreement(self, told: list[tuple[str | None, str, str]]) -> AxesError:
        """What to raise on a rank whose own tensors fit."""
        failed = [f"rank {rank}: {text}" for rank, (text, *_) in zip(self.ranks, told, strict=True) if text is not None]
        if failed:
            more = [f"and {len(failed) - 1} more"] if len(failed) > 1 else []
            return ShardingError("\n  ".join([f"{self.said}: the tensors of other ranks don't fit", failed[0], *more]))
        passes = {into: rank for rank, (_, into, _) in zip(self.ranks, told, strict=True) if into}
        if len(passes) > 1:
            both = "".join(f"\n  rank {rank}: {into}" for into, rank in passes.items())
            return DesyncError(f"{self.said}: into= is passed on all ranks that receive, or on none{both}")
        mine = self.move.described
        rank, theirs = next((rank, text) for rank, (*_, text) in zip(self.ranks, told, strict=True) if text != mine)
        lines = zip_longest(mine.splitlines(), theirs.splitlines(), fillvalue="nothing")
        one, two = next(pair for pair in lines if pair[0] != pair[1])
        return DesyncError(
            f"ranks have other plans for {self.said}\n  rank {self.move.rank}: {one}\n  rank {rank}: {two}"
        )
