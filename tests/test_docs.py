"""Every piece of code that the documentation shows runs, and prints what it says it prints.

A page's Python blocks run in order, in one interpreter of their own: a block with `>>>` as a
doctest, any other as a program; one with `if __name__ == "__main__":` is a script of its own, since
other processes run it, too. One that begins with a file's name (`# llama.py`) is that file, which the blocks
after it import. Blocks in other languages (`sh`, `text`) aren't run here; those of the quick start are by test_quick_start.
"""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import axes
from tests.conftest import multiplies_batches

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
WITHOUT_CODE = {"benchmarks.md"}
MODULES = sorted(
    found.name for found in pkgutil.walk_packages(axes.__path__, "axes.") if not found.name.endswith("__main__")
)

RUNNER = """
import doctest, sys
from pathlib import Path
from tests.test_docs import blocks, file_of, is_script

page, folder = sys.argv[1:]
sys.path.insert(0, folder)
space = {"__name__": "__main__"}
for line, text in blocks(Path(page).read_text(encoding="utf-8")):
    if file_of(text):
        Path(folder, file_of(text)).write_text(text, encoding="utf-8")
    elif is_script(text):
        continue
    elif text.lstrip().startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(text, space, page, page, line)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.FAIL_FAST)
        runner.run(test, clear_globs=False)
        space.update(test.globs)
        if runner.summarize(verbose=False).failed:
            sys.exit(1)
    else:
        exec(compile("\\n" * line + text, page, "exec"), space)
"""


def blocks(page: str) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the number of lines before it."""
    pattern = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(page.count("\n", 0, m.start(1)), m.group(1)) for m in pattern.finditer(page)]


def is_script(block: str) -> bool:
    return 'if __name__ == "__main__":' in block and file_of(block) is None


def file_of(block: str) -> str | None:
    """The name of the file that a block is."""
    found = re.match(r"# (\w+\.py)\n", block)
    return found and found[1]


def run(*command: object) -> str:
    """What a Python program prints."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=multiplies_batches if page.name == "models.md" else ())
        for page in PAGES
        if page.name not in WITHOUT_CODE
    ],
)
def test_the_code_of_a_page_runs(page, tmp_path):
    assert blocks(page.read_text(encoding="utf-8")), f"{page.name} shows no Python"
    run("-c", RUNNER, page, tmp_path)


SCRIPTS = [(page, text) for page in PAGES for _, text in blocks(page.read_text(encoding="utf-8")) if is_script(text)]


@pytest.mark.parametrize(("page", "text"), SCRIPTS, ids=lambda value: getattr(value, "name", ""))
def test_a_script_of_a_page_prints_what_stands_under_it(page, text, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(text, encoding="utf-8")
    after = page.read_text(encoding="utf-8").split(f"```python\n{text}```\n")[1]
    shown = re.match(r"\s*```text\n(.*?)```", after, re.DOTALL)
    assert shown is not None, f"nothing stands under a script of {page.name}"
    assert run(script) == shown.group(1)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS, report=True)
    axes.destroy_process_groups()  # an example may end with its world of one running
    assert not found.failed, f"{found.failed} of {found.attempted} examples of {name} fail"


def test_a_page_with_wrong_output_is_noticed(tmp_path):
    page = tmp_path / "wrong.md"
    page.write_text("```python\n>>> 1 + 1\n3\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"Expected:\n *3\n *Got:\n *2\n"):
        run("-c", RUNNER, page, tmp_path)


LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if ":" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, missing


def test_the_performance_table_has_the_rows_that_the_benchmarks_print():
    from tests.bench.__main__ import registered

    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    table = page.split("<!-- bench -->")[1].split("<!-- /bench -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[3:]]
    shown = [(what, peer, bar) for what, _, peer, _, _, bar in rows]
    assert shown == [(b.what, b.peer, f"{b.bar:g}x") for b in registered() if b.page]
