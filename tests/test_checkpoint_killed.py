"""Ranks that are killed while they save: what was saved before is there, whole, and is found.

Each save goes to a folder of its own, as docs/models.md says. torch writes `.metadata` when every rank
has written its part, so that a folder without one is a save that didn't end.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import axes
from axes import AxesError

SHAPE = (24, 6)
NAMES = ("a", "b", "c")


def state(mesh, value):
    """Three tensors, a factor of one of which is split."""
    specs = ("(three=3 h@tp) e", "h@(dp tp) e", "h e@tp")
    return {
        name: axes.shard(torch.full(SHAPE, float(value)) + number, spec, mesh=mesh)
        for number, (name, spec) in enumerate(zip(NAMES, specs, strict=True))
    }


def last_saved(folder):
    """The newest checkpoint that was saved to its end."""
    return max(Path(folder).glob("*/.metadata"), key=lambda found: int(found.parent.name)).parent


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


class DyingPlanner(dcp.DefaultSavePlanner):
    """Is killed when it is asked for the n-th part that its rank writes."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def resolve_data(self, write_item):
        self.left -= 1
        if self.left < 0:
            die()
        return super().resolve_data(write_item)


class DyingWriter(dcp.FileSystemWriter):
    """Is killed when all ranks have written, before `.metadata` is."""

    finish = die


class LateDyingWriter(dcp.FileSystemWriter):
    """Is killed between the writing of the metadata and its taking their place."""

    def finish(self, metadata, results):
        self.fs.rename = die
        super().finish(metadata, results)


def saved_then_killed(folder, where, ranks):
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    dcp.save(state(mesh, 1), checkpoint_id=f"{folder}/1")
    mine = dist.get_rank() in ranks
    path = f"{folder}/2"
    planner = DyingPlanner(where) if mine and isinstance(where, int) else None
    writer = {"finish": DyingWriter, "rename": LateDyingWriter}.get(where if mine else None, dcp.FileSystemWriter)(path)
    dcp.save(state(mesh, 2), storage_writer=writer, planner=planner)


def saving_all_the_time(folder, rank, delay):
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    dcp.save(state(mesh, 1), checkpoint_id=f"{folder}/1")
    if dist.get_rank() == rank:
        timer = threading.Timer(delay, die)
        timer.daemon = True
        timer.start()
    for step in range(2, 1000):
        dcp.save(state(mesh, step), checkpoint_id=f"{folder}/{step}")


def loaded(path):
    """The step whose values are loaded in one process, the same in every element; None where they differ."""
    found = {name: torch.zeros(SHAPE) for name in NAMES}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it loads in one process
        dcp.load(found, checkpoint_id=path, no_dist=True)
    values = {float(v) - number for number, x in enumerate(found.values()) for v in x.flatten()}
    return values.pop() if len(values) == 1 else None


@pytest.mark.parametrize(
    ("where", "ranks"),
    [(1, [0, 1, 2, 3]), ("finish", [0]), ("rename", [0])],
    ids=["all ranks after a part", "before the metadata", "before its name"],
)
def test_what_was_saved_before_a_kill_is_found_and_loads(world, tmp_path, where, ranks):
    with pytest.raises(AxesError, match=r"SIGKILL|signal 9"):
        world(saved_then_killed, 4, str(tmp_path), where, ranks)
    assert (tmp_path / "2").is_dir()
    assert last_saved(tmp_path) == tmp_path / "1"
    assert loaded(last_saved(tmp_path)) == 1.0
    with pytest.raises(dcp.CheckpointException, match="metadata"):
        loaded(tmp_path / "2")


def test_a_kill_at_any_time_leaves_the_last_that_ended(world, tmp_path):
    with pytest.raises(AxesError, match=r"SIGKILL|signal 9"):
        world(saving_all_the_time, 4, str(tmp_path), 3, 0.3)
    last = last_saved(tmp_path)
    assert loaded(last) == float(last.name)
