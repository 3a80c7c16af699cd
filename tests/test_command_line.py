"""`python -m axes`: what it prints is what [command_line.txt](snapshots/command_line.txt) has, which is written anew by
`python -m tests.test_command_line`.
"""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.test_trace import log

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = ROOT / "tests" / "snapshots" / "command_line.txt"

NET = """
import torch

import axes


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32, bias=False), torch.nn.Linear(32, 8, bias=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        h = torch.relu(axes.einsum(x, self.up.weight, "b@dp d, f@tp d -> b@dp f@tp"))
        return axes.einsum(h, self.down.weight, "b@dp f@tp, d f@tp -> b@dp d")


SPECS = {"up.weight": "f@tp d", "down.weight": "d f@tp", "scale": "one"}


def build(mesh):
    net = axes.shard_module(Net(), SPECS, mesh)
    return net, axes.zeros("b@dp d", b=8, d=8)


def raises(mesh):
    print("said on the way")
    return {}["nothing"]


def returns_text():
    return "a model"


def alone():
    return torch.nn.Linear(2, 3)
"""
COMMANDS = [
    "--help",
    "mesh --help",
    'mesh "pp=2 dp=* tp=8" "fsdp = pp dp" --world 64 --rank 13',
    'mesh "dp=4 tp=2" --json',
    'groups --mesh "dp=4 cp=1 tp=2; all = dp tp"',
    'groups --mesh "pp=16 dp=* tp=8" --world 65536 --axis tp --rank 40000',
    'groups --mesh "dp=* tp=8" --world 256 --axis tp',
    'groups --mesh "dp=2 tp=2" --axis dp --json',
    'explain "b s@tp d, d f -> b s f@tp" b=8 s=2048 d=4096 f=8192 --mesh "dp=4 tp=2"',
    'explain "b@dp s@tp d -> b@dp s" b=8 s=16 d=4 --mesh "dp=2 tp=*" --world 8 --rank 5 --op max --dtype bfloat16',
    'explain "b s@tp -> b s" b=8 s=16 --mesh "tp=2" --json',
    'plan "b s@tp d" "b s d@tp" b=8 s=2048 d=4096 --mesh "dp=4 tp=2"',
    'plan "b@dp (h@tp d) | sum@cp" "b@dp (h d)" b=8 h=4 d=64 --mesh "dp=2 cp=2 tp=2" --dtype bfloat16 --rank 5',
    'plan "b s" "b s" b=8 s=2 --mesh "dp=4 tp=2"',
    'plan "b@dp" "b" b=8 --mesh "dp=4" --json',
    'transfer "f@fsdp d" "f d@tp" f=8192 d=4096 --source-mesh "fsdp=4" --target-mesh "dp=2 tp=2" --rank 5',
    'transfer "(q=2 h@tp) d" "q d@a" h=4 d=8 --source-mesh "tp=4" --target-mesh "a=2" --first 1 --to-dtype bfloat16',
    'transfer "f@a d" "f@a d" f=4 d=3 --source-mesh "a=2" --target-mesh "a=2" --first 0 --json',
    "explain --help",
    'explain net_to_lock.py:build --mesh "dp=4 tp=2"',
    'explain net_to_lock.py:build --mesh "dp=4 tp=2" --rank 7 --json',
    "explain --check kept.lock",
    "trace 0.json 1.json",
    "trace 0.json 1.json --json",
    "check net_to_lock.py",
    "check net_to_lock.py --json",
    "check net_to_lock.py programs",
    # what can't be
    'mesh "dp=* tp=8"',
    'mesh "dp=3 tp=8" --world 64',
    'mesh "dp=2" --rank 2',
    'mesh "dp=2 2tp=2"',
    'groups --mesh "dp=4 tp=2" --axis tpp',
    'explain "b s@tq d -> b s" b=8 s=16 d=4 --mesh "tp=2"',
    'explain "b s@tp d -> b s" b=8 s=16 --mesh "tp=2"',
    'explain "b s@tp d -> b s" b=8 s=16 d=4 --mesh "tp=2" --op mode',
    'plan "b s@tp d" "b s d@tp" b=8 s=2048 --mesh "dp=4 tp=2"',
    'mesh "dp=2" --svg nowhere/mesh.svg',
    'plan "b s@tp" "b s" b=8 s=2048 x=3 --mesh "dp=4 tp=2"',
    'plan "b s@tp" "b s" b:8 --mesh "dp=4 tp=2"',
    'plan "b s@tp" "b s" b=8 s=8 --mesh "dp=4 tp=2" --dtype float33',
    'transfer "f@a d" "f@b d" f=4 d=3 --source-mesh "a=2" --target-mesh "a=2"',
    'transfer "f@a d" "f@a d" f=4 d=3 --source-mesh "a=2" --target-mesh "a=2" --rank 4',
    'transfer "f@a d" "f@a d" f=4 --source-mesh "a=2" --target-mesh "a=2"',
    'transfer "f@a d" "f@a d" f=4 d=3 --source-mesh "a=*" --target-mesh "a=2"',
    'plan "... b" "b ..." b=8 --mesh "dp=4 tp=2"',
    'explain "... b -> b ..." b=8 --mesh "dp=4 tp=2"',
    "explain --check none.lock",
    'explain net_to_lock.py:raises --mesh "dp=4 tp=2"',
    "explain",
    "trace nothing.json",
    # what isn't a command
    'mesh "dp=2" --world none',
]


@dataclass
class Done:
    """How a command ended, and what it wrote."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def called(command: str) -> Done:
    """`python -m axes COMMAND`, in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["axes", *shlex.split(command)])
        patch.setenv("COLUMNS", "80")
        try:
            runpy.run_module("axes", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Done(code, out.getvalue(), err.getvalue())


def shown(command: str) -> str:
    """A command with all that it says, as a terminal shows it, and how it ends."""
    done = called(command)
    status = f"[{done.exit_code}]\n" if done.exit_code else ""
    return f"$ python -m axes {command}\n{done.output}{status}\n"


def write_files(folder: Path) -> None:
    """Traces of two ranks, the second of which is late by 2 ms each time; a model, and a lock of it on another mesh."""
    for rank, late in ((0, 0), (1, 2_000_000)):
        events = [("psum", (0, 1), 5_000_000 * i + late, 2_100_000 - late) for i in range(3)]
        (folder / f"{rank}.json").write_text(log(rank, events))
    sys.modules.pop("net_to_lock", None)
    (folder / "net_to_lock.py").write_text(NET)
    (folder / "programs" / "inside").mkdir(parents=True)
    (folder / "programs" / "open.py").write_text("import axes\n\nx = (\n")
    (folder / "programs" / "latin.py").write_bytes(b"import axes\nx = '\xff'\n")
    (folder / "programs" / "inside" / "mistaken.py").write_text(
        'import axes\n\nMESH = axes.Mesh("dp=2 tp=2")\nMESH.sharding("b@dp d@tpp")\n'
    )
    kept = called('explain net_to_lock.py:build --mesh "dp=4 tp=2"').stdout
    (folder / "kept.lock").write_text(kept.replace("dp=4 tp=2", "dp=2 tp=4"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        write_files(folder)
        yield folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_what_the_snapshot_has(files, command):
    found = shown(command)
    assert found in SNAPSHOT.read_text(encoding="utf-8"), (
        f"{found}\nIf this is right: python -m tests.test_command_line"
    )
    if "--json" in command:
        told = json.loads(called(command).stdout)
        assert (told["schema"], told["command"]) == (2, command.split(" ")[0])
    elif not found.endswith("]\n\n") and "net_to_lock" not in command:  # messages and locks aren't folded
        assert max(map(len, found.splitlines()[1:])) <= 80


def test_sizes_may_stand_among_the_options():
    assert (
        called('plan "b@tp" "b" --mesh "tp=2" b=8').stdout == called('plan "b@tp" "b" b=8 --mesh "tp=2"').stdout != ""
    )


def test_errors_are_on_stderr_and_results_on_stdout():
    good, bad = called('mesh "dp=2"'), called('mesh "dp=*"')
    assert (good.stderr, bad.stdout) == ("", "")
    assert called('mesh ""').stderr.startswith("error: ")
    assert bad.stderr == "error: the size of 'dp' is open: give it, like dp=2, or the number of ranks\n"


def test_pictures_and_pages_are_written_beside_the_text(files):
    for command in (
        'mesh "dp=2 tp=4" --rank 5',
        'explain "b s@tp -> b s" b=8 s=16 --mesh "tp=2"',
        'plan "b s@tp" "b s" b=8 s=16 --mesh "tp=2"',
        'transfer "b@tp s" "b s@tp" b=8 s=16 --source-mesh "tp=2" --target-mesh "tp=4" --rank 3',
    ):
        done = called(f"{command} --svg out.svg --html out.html")
        assert (done.exit_code, done.stdout) == (0, called(command).stdout)
        assert ElementTree.parse(files / "out.svg").getroot().tag.endswith("svg")
        page = (files / "out.html").read_text(encoding="utf-8")
        assert page.lower().startswith("<!doctype html>")
        assert "tp" in page


PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
ON_PAGE = re.findall(r"```sh\npython -m axes ([^\n]*)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "output"), ON_PAGE)
def test_the_page_shows_what_a_command_prints(monkeypatch, command, output):
    monkeypatch.chdir(ROOT)
    assert called(command).output == output
    assert len(ON_PAGE) == PAGE.count("```sh")


WITHOUT_TORCH = """
import runpy, sys
sys.argv = ["axes", "mesh", "dp=2 tp=4"]
try:
    runpy.run_module("axes", run_name="__main__", alter_sys=False)
except SystemExit as done:
    assert not done.code, done.code
heavy = {"torch", "numpy", "einops"} & set(sys.modules)
assert not heavy, heavy
"""


def test_in_a_process_of_its_own_it_needs_no_torch():
    given = [sys.executable, "-c", WITHOUT_TORCH]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(given, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "seen from rank 0" in done.stdout


def test_who_reads_no_further_ends_it_in_peace():
    command = f"'{sys.executable}' -m axes groups --mesh 'dp=* tp=2' --world 65536 | head -n 1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout, done.stderr) == ("Groups of dp=32768 tp=2\n", "")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        write_files(Path(place))
        SNAPSHOT.write_text("".join(map(shown, COMMANDS)), encoding="utf-8")
