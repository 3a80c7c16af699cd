"""`axes explain --check`: a change of layout is a changed line, and nothing else is."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import stages_reduce_outside_in, stages_send_at_once
from tests.test_command_line import NET, called

ROOT = Path(__file__).resolve().parent.parent

MODEL = 'explain net_to_lock.py:build --mesh "dp=4 tp=2; both = dp tp"'
CHECK = "explain --check net.lock"


class Net:
    """A model file in a folder of its own, which may change, as a repository's does."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def text(self) -> str:
        return (self.folder / "net.lock").read_text(encoding="utf-8")

    def lock(self, command: str = MODEL) -> None:
        """What `python -m axes COMMAND > net.lock` does."""
        done = called(command)
        assert done.exit_code == 0, done.output
        (self.folder / "net.lock").write_text(done.stdout, encoding="utf-8")

    def write(self, before: str = "", after: str = "") -> None:
        found = NET.replace(before, after) if before else NET
        assert not before or found != NET
        sys.modules.pop("net_to_lock", None)
        for kept in self.folder.glob("__pycache__/*"):
            kept.unlink()
        (self.folder / "net_to_lock.py").write_text(found, encoding="utf-8")


@pytest.fixture
def net(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = Net(tmp_path)
    made.write()
    yield made
    sys.modules.pop("net_to_lock", None)


WANTED = """\
# python -m axes explain net_to_lock.py:build --mesh 'dp=4 tp=2; both = dp tp'

rank 0
parameter  up.weight                         float32   _@tp _ on dp tp               [32, 8] -> [16, 8]            512 B
parameter  down.weight                       float32   _ _@tp on dp tp               [8, 32] -> [8, 16]            512 B
buffer     scale                             float32   _ on dp tp                    [1] -> [1]                    4 B
forward    all_reduce      tp        64 B            Net                         axes.einsum 'b@dp f@tp, d f@tp -> b@dp d'
backward   all_reduce      dp        768 B           Net.down.weight             _ _@tp | sum@dp -> _ _@tp of [8, 32] float32
backward   all_reduce      dp        768 B           Net.up.weight               _@tp _ | sum@dp -> _@tp _ of [32, 8] float32
total      parameters      1,024 B
"""


def test_each_parameter_group_and_collective_is_a_line_and_stays_so(net):
    net.lock()
    assert net.text == WANTED
    done = called(CHECK)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "net.lock: net_to_lock.py:build is unchanged\n"
    found = json.loads(called(f"{MODEL} --json").stdout)
    assert {
        "schema": 2,
        "command": "explain",
        "kind": "model",
        "model": "net_to_lock.py:build",
    }.items() <= found.items()
    (part,) = found["ranks"]
    assert [line[1] for line in part["lines"] if line[0] == "parameter"] == ["up.weight", "down.weight"]
    assert part["lines"][2][:4] == ["buffer", "scale", "float32", "_ on dp tp"]
    net.lock('explain net_to_lock:alone --mesh "tp=2"')
    assert re.search("parameter  weight .*on each rank", net.text)
    assert "forward" not in net.text, "a module alone has no step"


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ('"one"}', '"one@dp"}', {"- buffer     scale", "+ buffer     scale"}),
        ("32", "64", {"- parameter  up.weight", "+ parameter  down.weight", "+ total      parameters"}),
        ('"one"}', '"one"}  # a comment\n\n\n', set()),
        ('-> b@dp d")', '-> b@dp d@tp")', {"- forward    all_reduce", "+ forward    reduce_scatter"}),
        ("return net, axes", "net.up.weight.requires_grad_(False)\n    return net, axes", {"+ parameter  up.weight"}),
        ("b=8, d=8", "b=16, d=8", {"- forward    all_reduce", "+ forward    all_reduce"}),
        ("torch.ones(1)", "torch.ones(2)", {"- buffer     scale", "+ buffer     scale"}),
        ("return net, axes.zeros", "return net #", {"- forward    all_reduce", "- backward   all_reduce"}),
    ],
)
def test_a_change_of_layout_is_a_changed_line_and_another_change_is_none(net, before, after, changed):
    net.lock()
    net.write(before, after)
    done = called(CHECK)
    assert done.exit_code == (1 if changed else 0), done.output
    lines = done.stdout.splitlines()
    assert all(any(line.startswith(each.replace(" ", "", 1)) for line in lines) for each in changed), lines
    assert len(lines) < 18
    if changed:
        assert done.stderr.startswith("error: the layout of net_to_lock.py:build differs from net.lock;")
        command = done.stderr.partition("python -m axes ")[2]
        assert command == f"explain net_to_lock.py:build --mesh '{MODEL.split(chr(34))[1]}' > net.lock\n"
        told = json.loads(called(f"{CHECK} --json").stdout)
        assert (told["same"], told["changes"]) == (False, lines)
        net.lock(command.partition(" > ")[0])
        assert called(CHECK).exit_code == 0


def test_the_mesh_is_that_of_the_command_and_another_is_asked_for_in_the_file(net):
    net.lock('explain net_to_lock.py:build --mesh "dp=* tp=4; (dp tp) = rows=2 ep" --world 16')
    assert "--mesh 'dp=* tp=4; (dp tp) = rows=2 ep' --world 16\n" in net.text, "a name that cuts an axis"
    assert called(CHECK).exit_code == 0
    (net.folder / "net.lock").write_text(net.text.replace("tp=4;", "tp=2;"))
    done = called(CHECK)
    assert done.exit_code == 1
    assert "[32, 8] -> [16, 8]" in done.stdout
    assert "--mesh 'dp=* tp=2; (dp tp) = rows=2 ep' --world 16 > net.lock" in done.stderr


def test_ranks_that_have_other_parts_are_told_each(net):
    net.lock(f"{MODEL} --rank 0 --rank 7")
    assert net.text.splitlines()[0].endswith(" --rank 0 --rank 7")
    assert "\nrank 0\n" in net.text.partition("\nrank 7\n")[0]
    net.write('"one"}', '"one@tp"}')
    done = called(CHECK)
    assert done.exit_code == 1, "of one element rank 0 has all, and rank 7 nothing"
    assert [line[:10] for line in done.stdout.splitlines() if line[1:7] == "buffer"] == ["-buffer   ", "+buffer   "] * 2


MISTAKES = {
    "explain --check none.lock": "none.lock: No such file or directory",
    "explain --check net_to_lock.py": "net_to_lock.py doesn't begin with the command that writes it, '# python -m axes",
    "explain --check older.lock": "write it again: python -m axes explain train.py:build --mesh MESH > older.lock",
    "explain --check itself.lock": "itself.lock doesn't begin with the command that writes it",
    "explain --check unclosed.lock": "unclosed.lock doesn't begin with the command that writes it",
    "explain --check .": "Is a directory",
    "explain --check net.lock --rank 1": "--check FILE takes the model, the mesh and the ranks from FILE",
    'explain net_to_lock.py --mesh "tp=2"': "like train.py:build or package.module:build",
    'explain nowhere.py:build --mesh "tp=2"': "nowhere.py:build: there is no file nowhere.py",
    'explain no.where:build --mesh "tp=2"': "ModuleNotFoundError: No module named 'no'",
    'explain net_to_lock.py:buidl --mesh "tp=2"': "has no function 'buidl'; did you mean 'build'?",
    'explain net_to_lock.py:raises --mesh "tp=2"': "KeyError: 'nothing'\nat net_to_lock.py:28 in raises",
    'explain net_to_lock.py:returns_text --mesh "tp=2"': "the function returns a module",
    'explain net_to_lock.py:build --mesh "tp=2"': "no axis 'dp'",
    'explain net_to_lock.py:build --mesh "dp=* tp=2"': "the size of 'dp' is open: give it, like dp=2, or the number of ranks",
    'explain net_to_lock.py:build --mesh "dp=4 tp=2" --rank 8': "rank 8 isn't one of the ranks of",
    "explain net_to_lock.py:build": "--mesh is missing",
    'explain "b@tp -> b" b=8 b=4 --mesh "tp=2"': "each name once, like b=8 s=64; found b=8 b=4",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_a_message_and_the_status_says_so(net, command):
    (net.folder / "older.lock").write_text("axes lock 1\nmodel  a:b\n\n")
    (net.folder / "itself.lock").write_text("# python -m axes explain --check itself.lock\n")
    (net.folder / "unclosed.lock").write_text('# python -m axes explain "unclosed\n')
    done = called(command)
    assert done.exit_code == 1, done.output
    assert MISTAKES[command] in done.stderr
    assert "Traceback" not in done.output
    assert done.stdout == ""


EXAMPLES = ("llama.lock", "llama_stages.lock")

STAGES = """
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


def build(mesh):
    pp, x = mesh.axis("pp"), torch.zeros(6, 8)
    like = torch.empty(2, 8, device="meta", requires_grad=True)
    layer = torch.nn.Linear(8, 8, bias=pp.index == 1)
    stage = PipelineStage(layer, pp.index, pp.size, torch.device("cpu"), like, like, group=pp.group)
    schedule = Schedule1F1B(stage, 3, loss_fn=torch.nn.functional.mse_loss)

    def step():
        schedule.step(*([x] if pp.index == 0 else []), target=x if pp.index == pp.size - 1 else None)

    return layer, step
"""


SENT = "forward    send            pp        0 B in, 64 B out  -                           [torch: pipelining] to rank"
RECEIVED = (
    "forward    recv            pp        64 B in, 0 B out  -                           [torch: pipelining] from rank"
)


@stages_send_at_once
def test_stages_have_the_sends_and_receives_of_their_schedule_in_its_order(net):
    (net.folder / "stages_to_lock.py").write_text(STAGES, encoding="utf-8")
    done = called('explain stages_to_lock.py:build --mesh "pp=3 dp=2" --rank 1 --rank 2 --rank 5')
    assert done.exit_code == 0, done.output
    parts = done.stdout.split("\n\nrank ")[1:]
    first, middle, last = ([line for line in part.splitlines() if line.startswith("forward")] for part in parts)
    assert first == [f"{SENT} 3  3 times", f"{RECEIVED} 3  3 times"]
    assert sorted(middle) == sorted([f"{RECEIVED} 0", f"{SENT} 4", f"{RECEIVED} 4", f"{SENT} 0"] * 3)
    assert last == [f"{RECEIVED} 3", f"{SENT} 3"] * 3
    assert "parameter  bias" in parts[1], "the one with a bias"
    assert "parameter  bias" not in parts[2]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=(stages_send_at_once, stages_reduce_outside_in, pytest.mark.full) if "stages" in name else ()
        )
        for name in EXAMPLES
    ],
)
def test_the_example_is_as_its_file_says(monkeypatch, name):
    """Whoever changes a layout of it writes the file anew, by the command that the error has."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = called(f"explain --check examples/{name}")
    assert done.exit_code == 0, done.output
