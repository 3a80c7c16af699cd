"""Ring attention is attention: on 2 and 8 ranks, with gradients, against one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from ring_attention import compare, read_options  # noqa: E402  (examples aren't a package)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_eight_ranks_give_the_attention_and_gradients_of_one(pool, dtype, limit):
    for found in pool.run(compare, 8, 64, dtype):
        collectives = found.pop("collectives")
        assert collectives == 7 + 2 + 2  # around the ring, into the zigzag order and back
        assert max(found.values()) < limit, found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_so_do_fewer_ranks(world, ranks):
    for found in world(compare, ranks, ranks, 24, torch.float64):
        collectives = found.pop("collectives")
        assert collectives == (ranks + 3 if ranks > 1 else 0)
        assert max(found.values()) < 1e-13, found


def test_a_sequence_that_is_not_two_equal_parts_for_each_rank_is_one_line(capsys):
    with pytest.raises(SystemExit):
        read_options(["--ranks", "4", "--sequence", "36"])
    assert "--sequence 36 isn't a multiple of twice --ranks 4" in capsys.readouterr().err


def test_the_example_runs_as_a_script():
    done = subprocess.run(
        [sys.executable, "examples/ring_attention.py", "--ranks", "2", "--sequence", "16"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks, float32: 5 collectives" in done.stdout
