"""On a GPU, where one is at hand: NCCL at world size 1."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none")


def losses(device: str) -> list[float]:
    """What llama.py says step by step, on a mesh on which every axis has size 1."""
    command = [sys.executable, "examples/llama.py", "--mesh", "dp=1", "--steps", "5", "--device", device]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(found) for found in re.findall(r"step\s+\d+/5\s+loss ([\d.]+)", done.stdout)]


def test_the_llama_has_the_losses_of_the_cpu():
    assert losses("cuda") == pytest.approx(losses("cpu"), rel=1e-3)
