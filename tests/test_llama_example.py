"""The Llama of the examples has the losses of one device on any mesh, and goes on from another mesh's checkpoint."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from llama import main  # noqa: E402  (examples aren't a package)


def llama(*arguments: str) -> subprocess.CompletedProcess[str]:
    return script("llama.py", *arguments)


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"examples/{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def first_loss(text: str) -> float:
    found = re.search(r"step\s+1/\d+\s+loss ([\d.]+)", text)
    assert found, text
    return float(found[1])


def test_it_has_the_losses_of_one_device_and_resumes_on_another_mesh(tmp_path):
    odd = ("--words", "257", "--batch", "5", "--checkpoint", str(tmp_path / "checkpoint"))
    done = llama("--mesh", "dp=1 cp=2 tp=2", "--steps", "4", "--recompute", "1", *odd)
    assert done.returncode == 0, done.stdout + done.stderr
    start = first_loss(done.stdout)
    again = llama("--mesh", "dp=2 cp=1 tp=1", "--steps", "2", "--resume", "1", *odd)
    assert again.returncode == 0, again.stdout + again.stderr
    assert first_loss(again.stdout) < start - 0.2


def test_pipeline_stages_have_the_losses_of_one_device_and_their_checkpoint_is_that_of_the_model(tmp_path):
    options = "--tied", "1", "--checkpoint", str(tmp_path / "checkpoint")
    done = llama("--mesh", "pp=2 tp=2", "--steps", "4", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    again = llama("--mesh", "dp=2", "--steps", "2", "--resume", "1", *options)
    assert again.returncode == 0, again.stdout + again.stderr
    assert first_loss(again.stdout) < first_loss(done.stdout) - 0.2


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ("dp=2 ep=2", "--mesh has the axes pp, dp, cp, tp; found 'ep' in 'dp=2 ep=2'"),
        ("pp=4", "pp divides 2 layers"),
        ("pp=2 dp=8", "in a pipeline dp * microbatches"),
        ("dp=2 cp=2 tp=3", "tp divides 4 key heads"),
        ("cp=3", "cp * tp the sequence"),
        ("dp=2 cp tp", "the size of"),
    ],
)
def test_a_mesh_that_can_not_be_is_one_line(capsys, mesh, says):
    with pytest.raises(SystemExit) as ended:
        main(["--mesh", mesh])
    assert ended.value.code == 2
    found = capsys.readouterr().err
    assert says in found
    assert "Traceback" not in found


def test_the_same_by_hand_has_the_same_losses():
    sizes = ("--steps", "3", "--width", "16", "--sequence", "16", "--batch", "2")
    done = script("llama_by_hand.py", "--mesh", "dp=1 cp=2 tp=2", *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ratio" in done.stdout


def lines_of(path: Path, names: set[str]) -> int:
    """Lines of code of what has these names in a file: neither empty ones nor comments nor docstrings."""
    text = path.read_text(encoding="utf-8")
    lines, count, found = text.splitlines(), 0, set()
    for node in ast.parse(text).body:
        name = node.targets[0].id if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else None
        name = getattr(node, "name", name)
        if name in names:
            found.add(name)
            said = [
                each for each in ast.walk(node) if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            ]
            left_out = {at for each in said for at in range(each.lineno, each.end_lineno + 1)}
            own = [lines[at - 1].strip() for at in range(node.lineno, node.end_lineno + 1) if at not in left_out]
            count += sum(bool(line) and not line.startswith("#") for line in own)
    assert found == names
    return count


def test_the_page_shows_both_programs_as_they_are_and_counts_their_lines():
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    ours, by_hand = (ROOT / "examples" / name for name in ("llama.py", "llama_by_hand.py"))
    shown = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 2
    for text, path in zip(shown, (ours, by_hand), strict=True):
        assert text in path.read_text(encoding="utf-8"), path
    block = {"Attention", "MLP", "Block"}
    functions = {"gathered", "scattered", "summed", "Gather", "Scatter", "SumOfGradients"}
    counts = {
        "axes": lines_of(ours, {*block, "SPECS"}),
        "by hand": lines_of(by_hand, {*block, "Norm", "cut"})
        + lines_of(ROOT / "examples" / "megatron_by_hand.py", functions),
    }
    for program, count in counts.items():
        assert f"| {program} | {count} |" in page, (program, count)
