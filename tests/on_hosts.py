"""What each rank does on the two hosts of tests/hosts.sh, and what it finds: a file for each rank."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import axes

LIMIT = 4.0
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

Found = dict[str, object]


def ask_for(what: str, folder: Path) -> None:
    """Has tests/hosts.sh do it, and waits until it is done."""
    if RANK == 0:
        time.sleep(1)  # the others have left the barrier before
        (folder / what).touch()
    while not (folder / f"{what}.done").exists():
        time.sleep(0.05)


def error_of(call: Callable[[], object]) -> tuple[str, str, float]:
    """The type and the text of the error that `call` raises, and the seconds until then."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def groups(mesh: axes.Mesh) -> Found:
    """Groups within hosts and across them, a move over both, a module under FSDP2, and the nodes that were detected."""
    sums = [axes.psum(torch.tensor([float(RANK)]), name, mesh=mesh).item() for name in ("dp", "tp", ("dp", "tp"))]
    x = axes.shard(torch.arange(16.0).view(4, 4), "a@dp b@tp", mesh=mesh)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    whole = model.weight.detach().clone()
    fully_shard(model, mesh=mesh["dp"].device_mesh)
    return {
        "ranks_per_node": mesh.ranks_per_node,
        "sums": sums,
        "moved": axes.unshard(axes.reshard(x, "a@tp b@dp")).flatten().tolist(),
        "weight": torch.equal(model.weight.full_tensor(), whole),
        "hosts": [len({rank // (SIZE // 2) for rank in mesh.axis(name).ranks}) for name in ("dp", "tp")],
    }


def stopped(mesh: axes.Mesh, folder: Path) -> Found:
    """The host of the store is stopped before a group is made and before a mesh is, then goes on."""
    dist.barrier()
    ask_for("stop", folder)
    found: Found = {
        "group": error_of(lambda: mesh.axis("spare").group),
        "mesh": error_of(lambda: axes.init_mesh("tp dp=2", timeout=LIMIT)),
    }
    ask_for("go", folder)
    return found | {"after": axes.psum(torch.ones(1), "dp", mesh=axes.init_mesh("tp dp=2")).item()}


def cut(mesh: axes.Mesh, folder: Path) -> Found:
    """The link is cut before a collective across hosts, before a mesh is declared, and before one within a host."""
    x = axes.shard(torch.arange(8.0), "a@dp", mesh=mesh)
    axes.reshard(x, "a")
    dist.barrier()
    ask_for("cut", folder)
    return {
        "across": error_of(lambda: axes.reshard(x * 2, "a")),
        "mesh": error_of(lambda: axes.init_mesh("dp=2 tp", timeout=LIMIT)),
        "within": error_of(lambda: axes.psum(torch.ones(1), "tp", mesh=mesh)),
    }


def main(folder: Path) -> None:
    options = {"dp": axes.GroupOptions(timeout=LIMIT), "spare": axes.GroupOptions(lane="spare")}
    mesh = axes.init_mesh("dp=2 tp", "spare = dp tp", timeout=60, options=options)
    found = {"groups": groups(mesh)}
    brief = axes.init_mesh("dp=2 tp", "spare = dp tp", timeout=LIMIT, options=options)
    found |= {"stopped": stopped(brief, folder), "cut": cut(mesh, folder)}
    part = folder / f"part{RANK}"
    part.write_text(json.dumps(found))
    part.rename(folder / f"rank{RANK}.json")
    if len(list(folder.glob("rank*.json"))) == SIZE:
        (folder / "ended").touch()
    time.sleep(30)  # torchrun would wait for the other host


if __name__ == "__main__":
    main(Path(sys.argv[1]))
