"""Two hosts: network namespaces with a link between them (tests/hosts.sh), and torchrun on both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NO_NAMESPACES = 77
HALF = 2
RANKS = 2 * HALF


def on_two_hosts(folder: Path, *program: str) -> None:
    """Runs a program on two hosts of two ranks; skips where this machine has no network namespaces."""
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / "tests/hosts.sh"), str(folder), str(HALF), *program]
    script = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    said, _ = script.communicate(timeout=280)
    if script.returncode == NO_NAMESPACES:
        pytest.skip(said.strip())
    logs = "".join((folder / f"host{host}.log").read_text() for host in (0, 1))
    assert script.returncode == 0, said + logs
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"axes-{script.pid}-" not in left


def test_groups_across_hosts_a_store_that_is_stopped_and_a_link_that_is_cut(tmp_path):
    on_two_hosts(tmp_path, "tests/on_hosts.py", str(tmp_path))
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    for rank, each in enumerate(found):
        assert each["groups"] == {
            "ranks_per_node": HALF,
            "sums": [[2, 4][rank % 2], [1, 5][rank // 2], 6],
            "moved": list(range(16)),
            "weight": True,
            "hosts": [2, 1],
        }

        for what, subject in (("group", "the group of ranks 0..3 ('spare')"), ("mesh", "init_mesh over ranks 0..3")):
            kind, text, seconds = each["stopped"][what]
            assert kind == "DesyncError"
            assert text.startswith(f"the job's store at 10.77.0.1:29477 doesn't answer in {subject}, for ")
            assert seconds < 20  # the limit is six; without one there is no end
        assert each["stopped"]["after"] == 2

        kind, text, seconds = each["cut"]["across"]
        assert kind == "DesyncError"
        assert "on_hosts.py" in text
        assert seconds < 20
        kind, text, seconds = each["cut"]["mesh"]
        assert kind == "DesyncError"
        assert seconds < 20
        assert ("ranks 2, 3 didn't come to init_mesh" if rank < HALF else "doesn't answer in init_mesh") in text
        assert each["cut"]["within"][:2] == ["", ""]


def test_the_demo_trains_on_two_hosts(tmp_path):
    arguments = ("--mesh", "dp=2 tp=2", "--steps", "2")
    on_two_hosts(tmp_path, "examples/llama.py", *arguments)
    assert "loss" in (tmp_path / "host0.log").read_text()
