"""examples/rl_sync.py: two jobs, small, and what it says where their models differ."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import axes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import rl_sync  # noqa: E402  (examples aren't a package)

SIZES = {"rounds": 2, "steps": 2, "batch": 5, "prompts": 3, "length": 3, "width": 24, "layers": 1, "sequence": 15}
SMALL = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]


def test_the_generator_says_what_the_trainers_own_model_says_in_each_round(capsys):
    assert rl_sync.main(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["round 1", "round 2"]
    assert all(len(line.split("scores differ by ")[1].split("  ", 1)[1]) == 15 + 3 for line in lines)


def test_scores_that_differ_are_a_failure(capsys, monkeypatch):
    def main(distance: float) -> int:
        monkeypatch.setattr(axes, "launch", lambda *_: [[rl_sync.Round(1.0, distance, "text")]])
        return rl_sync.main([])

    assert main(1e-6) == 0
    assert main(1e-2) == main(float("nan")) == 1
    assert "below 0.0001" in capsys.readouterr().err


def test_heads_that_do_not_divide_are_one_line(capsys):
    with pytest.raises(SystemExit):
        rl_sync.main(["--width", "20"])
    assert capsys.readouterr().err == "rl_sync.py: --width divides by 8: 4 heads of an even size\n"
