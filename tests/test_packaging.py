"""What is installed: under which name, with what it needs, and that it needs nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

WITHOUT_NUMPY = """\
import sys
sys.modules["numpy"] = None  # as where it isn't installed
import axes

with axes.simulate(64, rank=9):
    mesh = axes.init_mesh("dp cp=2 tp=4", "fsdp = dp cp", device_type="cpu")
    x = axes.randn("b@dp s@(cp tp) d", mesh=mesh, b=8, s=16, d=4)
    y = axes.rearrange(x, "b s@(cp tp) d -> b s@cp d@tp")
    assert y.to_local().shape == (1, 8, 1)
    assert mesh["fsdp", "tp"].device_mesh.size() == 64
with axes.simulate(2):
    assert len(axes.process_groups()) == 1  # the default one; those of the world before went with it
"""


def test_the_library_is_axes_and_its_distribution_axes_torch():
    assert PROJECT["name"] == "axes-torch"
    assert PROJECT["readme"] == "README.md"
    versions = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if " :: 3." in text]
    assert versions == ["3.11", "3.12", "3.13"]


def test_it_needs_torch_and_nothing_else():
    assert [text.partition(">")[0] for text in PROJECT["dependencies"]] == ["torch"]


@pytest.mark.full
def test_a_program_runs_without_numpy(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_NUMPY]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
