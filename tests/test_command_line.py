"""`python -m axes`: what it prints is what [command_line.txt](command_line.txt) has, which is written anew by
`python -m tests.test_command_line`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from axes.show.cli import main
from tests.test_lock import NET
from tests.test_trace import log

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = ROOT / "tests" / "command_line.txt"

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
    'explain "b s@tp -> b s" b=8 s=16 --mesh "tp=2" --kind reshard --json',
    'plan "b s@tp d" "b s d@tp" b=8 s=2048 d=4096 --mesh "dp=4 tp=2"',
    'plan "b@dp (h@tp d) | sum@cp" "b@dp (h d)" b=8 h=4 d=64 --mesh "dp=2 cp=2 tp=2" --dtype bfloat16 --rank 5',
    'plan "b s" "b s" b=8 s=2 --mesh "dp=4 tp=2"',
    'plan "b@dp" "b" b=8 --mesh "dp=4" --json',
    'transfer "f@fsdp d" "f d@tp" f=8192 d=4096 --source-mesh "fsdp=4" --target-mesh "dp=2 tp=2" --rank 5',
    'transfer "(q=2 h@tp) d" "q d@a" h=4 d=8 --source-mesh "tp=4" --target-mesh "a=2" --first 1 --to-dtype bfloat16',
    'transfer "f@a d" "f@a d" f=4 d=3 --source-mesh "a=2" --target-mesh "a=2" --first 0 --json',
    "lock --help",
    'lock net.lock --model net_to_lock.py:build --mesh "dp=4 tp=2"',
    'lock other.lock --model net_to_lock.py:build --mesh "dp=4 tp=2" --rank 7 --json',
    "lock kept.lock --check",
    "trace 0.jsonl 1.jsonl",
    "trace 0.jsonl 1.jsonl --json",
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
    "lock none.lock --check",
    'lock net.lock --model net_to_lock.py:raises --mesh "dp=4 tp=2"',
    "trace nothing.jsonl",
    "trace 0.jsonl --chrome nowhere/out.json",
    # what isn't a command
    "tracing",
    "mesh",
    'mesh "dp=2" --world none',
]


def called(command: str) -> Result:
    return CliRunner().invoke(main, shlex.split(command), prog_name="python -m axes", env={"COLUMNS": "80"})


def shown(command: str) -> str:
    """A command with all that it says, as a terminal shows it, and how it ends."""
    done = called(command)
    status = f"[{done.exit_code}]\n" if done.exit_code else ""
    return f"$ python -m axes {command}\n{done.output}{status}\n"


def write_traces(folder: Path) -> None:
    """Of two ranks, the second of which is late by 2 ms each time."""
    for rank, late in ((0, 0), (1, 2_000_000)):
        events = [("psum", (0, 1), 5_000_000 * i + late, 2_100_000 - late) for i in range(3)]
        (folder / f"{rank}.jsonl").write_text(log(rank, events))


def write_model(folder: Path) -> None:
    """A model, and what was locked of it when its mesh was another."""
    sys.modules.pop("net_to_lock", None)
    (folder / "net_to_lock.py").write_text(NET)
    called('lock kept.lock --model net_to_lock.py:build --mesh "dp=4 tp=2"')
    kept = folder / "kept.lock"
    kept.write_text(kept.read_text().replace("dp=4 tp=2", "dp=2 tp=4"))


@pytest.fixture
def folder(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_traces(tmp_path)
    if "lock" in str(request.node.name):
        write_model(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_what_the_snapshot_has(folder, command):
    kept = SNAPSHOT.read_text(encoding="utf-8")
    found = shown(command)
    assert found in kept, f"{found}\nIf this is right: python -m tests.test_command_line"
    assert "Traceback" not in found
    unfolded = found.endswith("]\n\n") or "--json" in command  # a message isn't folded, so that it can be searched for
    assert unfolded or max(map(len, found.splitlines()[1:])) <= 80


def test_the_snapshot_has_no_other_command():
    kept = [line for line in SNAPSHOT.read_text(encoding="utf-8").splitlines() if line.startswith("$ ")]
    assert kept == [f"$ python -m axes {command}" for command in COMMANDS]


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--json" in command])
def test_json_is_one_object_with_its_schema(folder, command):
    found = json.loads(called(command).stdout)
    assert (found["schema"], found["command"]) == (1, command.split(" ")[0])


def test_errors_are_on_stderr_and_results_on_stdout(folder):
    good, bad = called('mesh "dp=2"'), called('mesh "dp=*"')
    assert (good.stderr, bad.stdout) == ("", "")
    assert bad.stderr == "error: how large 'dp' is follows from the number of ranks: add --world N\n"


def test_a_chrome_trace_is_written(folder):
    assert called("trace 0.jsonl 1.jsonl --chrome out.json").exit_code == 0
    found = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    assert sum(event["name"] == "psum x" for event in found["traceEvents"]) == 6


@pytest.mark.parametrize(
    "command",
    [
        'mesh "dp=2 tp=4" --rank 5',
        'explain "b s@tp -> b s" b=8 s=16 --mesh "tp=2"',
        'plan "b s@tp" "b s" b=8 s=16 --mesh "tp=2"',
        'transfer "b@tp s" "b s@tp" b=8 s=16 --source-mesh "tp=2" --target-mesh "tp=4" --rank 3',
    ],
)
def test_pictures_and_pages_are_written_beside_the_text(folder, command):
    done = called(f"{command} --svg out.svg --html out.html")
    assert (done.exit_code, done.stdout) == (0, called(command).stdout)
    assert ElementTree.parse(folder / "out.svg").getroot().tag.endswith("svg")
    page = (folder / "out.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert "tp" in page


PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
ON_PAGE = re.findall(r"```sh\npython -m axes ([^\n]*)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "output"), ON_PAGE)
def test_the_page_shows_what_a_command_prints(command, output):
    assert called(command).output == output


def test_the_page_shows_some_commands_and_names_all():
    assert len(ON_PAGE) == PAGE.count("```sh") == 6
    assert all(f"| `{name}" in PAGE for name in main.commands)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=False, timeout=120)


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


def test_a_mesh_is_printed_without_torch():
    done = run("-c", WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    assert "rank 0 is at dp 0, tp 0" in done.stdout


def test_as_a_module_it_is_called_so_and_ends_with_its_status():
    done = run("-m", "axes", "mesh")
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: python -m axes mesh [OPTIONS] DECLARATION")


def test_without_click_it_says_what_to_install(tmp_path):
    (tmp_path / "click.py").write_text('raise ModuleNotFoundError("No module named \'click\'", name="click")\n')
    done = run("-m", "axes", "mesh", "dp=2", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 1
    assert done.stderr == "python -m axes needs click, which reads its options: pip install 'axes-torch[cli]'\n"


def test_shells_complete_commands_and_options():
    done = run("-m", "axes", _AXES_COMPLETE="bash_complete", COMP_WORDS="axes gr", COMP_CWORD="1")
    assert done.stdout == "plain,groups\n"


def test_who_reads_no_further_ends_it_in_peace():
    command = f"'{sys.executable}' -m axes groups --mesh 'dp=* tp=2' --world 65536 --all | head -n 1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout == "dp: 2 groups of 32768 ranks\n"


class Terminal:
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_and_never_where_they_arent_wanted(monkeypatch):
    from axes.show import cli

    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal: Any = Terminal()
    assert cli._coloured(terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not cli._coloured(terminal)
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b" not in called('groups --mesh "dp=2"').output, "a pipe"


def test_the_demo_shows_what_it_sent():
    done = called("demo --json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(each["axis"], each["bytes_out"]) for each in found["collectives"]] == [("tp", 16384)] * 2
    assert found["local_shapes"] == [[32, 256]] * 4
    assert found["largest_difference"] < 1e-5


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        write_traces(Path(place))
        os.chdir(place)
        write_model(Path(place))
        SNAPSHOT.write_text("".join(map(shown, COMMANDS)), encoding="utf-8")
