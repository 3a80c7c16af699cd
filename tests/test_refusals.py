"""Every refusal has one class and one text, the same on every rank, before anything is sent.

The rows are in `refusals.py` and in the other files `refusals_*.py` beside it, each a tuple ROWS. A row is a short program, the
class of its error, and the parts of the text that matter, in their order. A program runs on a mesh `dp=2 cp=2 tp=2` of
eight ranks, inside `with mesh:`, with these names:

    axes, torch, mesh           mesh is that mesh
    L(4, 8)                     a plain tensor of ones
    D("b s@tp", 4, 8)           a DTensor with this sharding and whole shape; `mesh=` puts it on another mesh
    MLP()                       a small module with `norm`, `up` and `down` [8, 16]; `hidden=` is the 16
    raising("__eq__")           an object whose `__eq__` raises
    without_mesh(f, *args)      `f(*args)` where no mesh is entered

Several statements stand in one line, separated by `;`. A file's tuple AFTERWARDS has rows of the same form for what is told after
something was sent, or is about what this rank has. A text may tell the number of its rank.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes
from tests.common import case
from tests.hostile import Loud
from tests.hostile import raising as class_raising

FILES = [importlib.import_module(f"tests.{path.stem}") for path in sorted(Path(__file__).parent.glob("refusals*.py"))]
AFTERWARDS = {row[0]: row for file in FILES for row in getattr(file, "AFTERWARDS", ())}
ROWS: dict[str, tuple[str, ...]] = {row[0]: row for file in FILES for row in file.ROWS} | AFTERWARDS
LONGEST = 2_000


def plain(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


class MLP(nn.Module):
    def __init__(self, hidden: int = 16):
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.up, self.down = nn.Linear(8, hidden, bias=False), nn.Linear(hidden, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        return axes.einsum(y, self.down.weight, "b s hidden@tp, embed hidden@tp -> b s embed")


def raising(method: str) -> Any:
    return class_raising(method, Loud)()


def without_mesh(fn: Callable[..., object], *args: object) -> object:
    with ThreadPoolExecutor(1) as thread:  # each thread has its own meshes
        return thread.submit(fn, *args).result()


def refused(program: str) -> tuple[str, str]:
    """The class and the text of what a program raises in this world; it has sent nothing by then."""
    mesh = axes.init_mesh("dp=2 cp=2 tp=2", device_type="cpu")
    torch.manual_seed(0)  # ranks whose random states differ are told so first

    def sharded(spec: str, *shape: int, mesh: axes.Mesh = mesh) -> DTensor:
        local = torch.ones(mesh.sharding(spec).local_shape(shape))
        return axes.from_local(local, spec, mesh=mesh, shape=shape)

    names = {
        "axes": axes,
        "torch": torch,
        "mesh": mesh,
        "L": plain,
        "D": sharded,
        "MLP": MLP,
        "raising": raising,
        "without_mesh": without_mesh,
    }
    with mesh, CommDebugMode() as sent:
        try:
            exec(program, names)
        except Exception as error:
            found = type(error).__name__, str(error)
        else:
            found = "nothing", "it is not refused"
    assert sent.get_total_counts() == 0 or program in AFTERWARDS, "something was sent before it was refused"
    return found


def compare(row: tuple[str, ...], kind: str, text: str) -> None:
    """What a program raised, with what its row says; a part behind another stands behind it in the text."""
    assert kind == row[1], f"{kind}: {text}"
    assert len(text) <= LONGEST
    at = 0
    for part in row[2:]:
        assert part in text[at:], f"the text has no {part!r}, or not in this place:\n{text}"
        at = text.index(part, at) + len(part)
        assert not (part.endswith("^") and text[at : at + 1] == "^"), f"more is marked than {part!r}:\n{text}"


def test_a_program_is_in_one_row():
    assert len(ROWS) == sum(len(file.ROWS) + len(getattr(file, "AFTERWARDS", ())) for file in FILES)


@pytest.mark.parametrize("row", ROWS)
def test_a_mistake_is_refused_with_one_text_on_every_rank_before_anything_is_sent(row):
    found = {}
    for rank in (0, 7):
        with axes.simulate(8, rank=rank):
            found[rank] = refused(ROWS[row][0])
        compare(ROWS[row], *found[rank])
    without = [re.sub(rf"\b{rank}\b", "N", text) for rank, (_, text) in found.items()]
    assert found[0] == found[7] or without[0] == without[1] or row in AFTERWARDS


def refused_each(chosen: list[str]) -> list[tuple[str, str]]:
    found = []
    for name in chosen:
        with case(name):
            found.append(refused(ROWS[name][0]))
    return found


def on_eight_ranks(pool, chosen: list[str]) -> None:
    for rank, said in enumerate(pool.run(refused_each, chosen)):
        for name, found in zip(chosen, said, strict=True):
            with case(f"{name}, on rank {rank}"):
                compare(ROWS[name], *found)


def test_a_sample_of_mistakes_is_refused_by_eight_processes_as_by_one(pool):
    on_eight_ranks(pool, list(ROWS)[::8])


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
def test_all_mistakes_are_refused_by_eight_processes_as_by_one(pool, part):
    on_eight_ranks(pool, list(ROWS)[part::8])


def test_an_axis_that_is_split_as_the_message_says_takes_fewer_heads():
    mesh = axes.Mesh("dp=2 tp=4", "(tp) = kv=2 rep")
    assert mesh.sharding("(h@kv k) d", h=2).local_shape((16, 8)) == (8, 8)


def test_a_mean_of_complex_numbers_is_one():
    with axes.simulate(8), axes.init_mesh("dp=2 cp=2 tp=2", device_type="cpu"):
        x = axes.shard(torch.tensor([1 + 2j, 3 - 4j]).expand(4, 2), "a@dp b")
        assert axes.unshard(axes.reduce(x, "a@dp b -> a", "mean")).tolist() == [2 - 1j] * 4


def test_a_script_without_a_launcher_is_told_how_many_processes_it_needs():
    said = r"^dp=2 \* tp=2 is 4, not 1 [^\0]*this job has 1 of them; start as many as the mesh needs: torchrun --nproc-per-node N"
    with pytest.raises(axes.SizeError, match=said + r" \.\.\., axes\.launch\(fn, N\), or try it in one process"):
        axes.init_mesh("dp=2 tp=2", device_type="cpu")


@pytest.mark.parametrize(
    "mistake", [{"dp": 3}, {"ranks": [0, 1]}, {"device_type": "cpus"}, {"options": 3}, {"timeout": -1}], ids=str
)
def test_a_mistake_without_a_launcher_leaves_no_world(mistake):
    with pytest.raises(axes.AxesError):
        axes.init_mesh("dp", **mistake)
    assert not dist.is_initialized()


def test_a_mistake_leaves_a_world_that_was_there_before():
    with axes.init_mesh("dp", device_type="cpu"):
        with pytest.raises(axes.SizeError):
            axes.init_mesh("dp=2", device_type="cpu")
        assert axes.psum(torch.ones(()), "dp").item() == 1
    axes.destroy_process_groups()


@pytest.mark.parametrize("kind", [axes.MeshError, axes.SizeError, axes.ExpressionError])
def test_a_message_is_short_and_can_be_printed(kind):
    text = str(kind("begins " + "\ud800" * 10**6 + " ends"))
    assert len(text.encode()) == LONGEST
    assert text.startswith("begins \\ud800")
    assert text.endswith(" ends")
    assert len(str(kind("b" * 10**6))) == LONGEST
    assert str(kind("ä: all of it")) == "ä: all of it"


@pytest.mark.parametrize(
    "made_of", [raising("__str__"), raising("__repr__"), 10**5000], ids=["__str__", "__repr__", "digits"]
)
def test_an_error_of_anything_can_be_written(made_of):
    assert str(axes.MeshError(made_of))
    assert repr(axes.MeshError(made_of, made_of))
    assert repr(axes.MeshError("all of it")) == "MeshError('all of it')"
