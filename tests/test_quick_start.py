"""The quick start's commands print what the page says: in a shell, at a prompt, and under torchrun.

What a notebook kernel prints is compared in test_docs_pages, with the tour.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.test_docs import blocks, file_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def shown(language: str) -> list[tuple[str, str]]:
    """The page's blocks of a language that have a text under them, and the text."""
    lines = r"((?:(?!```).*\n)*)```\n"
    return re.findall(rf"^```{language}\n{lines}\n```text\n{lines}", PAGE, re.MULTILINE)


@pytest.fixture
def shell(tmp_path):
    """Runs a command in a folder with the page's files, with `python` and `torchrun` of this environment."""
    (tmp_path / "bin").mkdir()
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    for _, text in blocks(PAGE):
        if name := file_of(text):
            (tmp_path / name).write_text(text, encoding="utf-8")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    env["PET_STANDALONE"] = "1"  # torchrun's: a free port, since other jobs of this machine may have the one it takes

    def run(command: str, given: str = "") -> str:
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=tmp_path,
            env=env,
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Error" not in done.stderr, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize(("command", "text"), shown("sh"), ids=lambda value: value.split("\n")[0])
def test_a_command_prints_what_stands_under_it(command, text, shell):
    found = shell(command)
    if command.startswith("torchrun"):  # its ranks print in any order
        assert sorted(found.splitlines()) == text.splitlines()
    else:
        assert found == text


@pytest.mark.full
def test_a_prompt_prints_what_the_page_says(shell):
    """Every block that isn't a file, as it would be pasted."""
    pasted = [text for _, text in blocks(PAGE) if not file_of(text)]
    assert [text.rstrip() for text in pasted] == [code.rstrip() for code, _ in shown("python")], (
        "each has a text under it"
    )
    assert shell("python -i -q", "\n".join(f"{text}\n" for text in pasted)) == "".join(
        text for _, text in shown("python")
    )


def test_what_is_said_about_versions_extras_and_processes_is_so():
    python = PROJECT["requires-python"].removeprefix(">=")
    (torch,) = [need.partition(">=")[2] for need in PROJECT["dependencies"] if need.startswith("torch")]
    assert f"Python {python} or later" in " ".join(PAGE.split())
    assert f"Python {python} or later, and torch {torch} or later" in README
    assert f"python{python} -m venv" in PAGE
    assert "\npip install .\n" in PAGE, "without extras"
