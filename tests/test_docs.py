"""Every piece of code that the documentation shows runs, and prints what it says it prints.

A page's Python blocks run in order, in one namespace: a block with `>>>` as a doctest, any other as a program; one with
`if __name__ == "__main__":` is a script of its own. One that begins with a file's name (`# llama.py`) is that file, which
the blocks after it import. What stands in a `text` block under a block is what it prints, and the value of its last line.
A block that begins with `# needs jax` runs where that is installed. Worlds that a page starts are ranks that are there
already. Blocks in other languages (`sh`) aren't run here; those of the quick start are by test_quick_start.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib.util
import io
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import axes
from docs import generate
from docs.pages import gradients
from tests.conftest import multiplies_batches

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
WITHOUT_CODE = {"benchmarks.md", "changelog.md", "contributing.md", "environment.md"}
MODULES = sorted(
    found.name for found in pkgutil.walk_packages(axes.__path__, "axes.") if not found.name.endswith("__main__")
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
SHOWN = re.compile(r"\s*```text\n(.*?)```", re.DOTALL)


def blocks(page: str) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the number of lines before it."""
    pattern = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(page.count("\n", 0, m.start(1)), m.group(1)) for m in pattern.finditer(page)]


def is_missing(block: str) -> bool:
    """Whether a block needs a package that isn't installed."""
    found = re.match(r"# needs (\w+)\n", block)
    return found is not None and importlib.util.find_spec(found[1]) is None


def is_script(block: str) -> bool:
    return 'if __name__ == "__main__":' in block and file_of(block) is None


def file_of(block: str) -> str | None:
    """The name of the file that a block is."""
    found = re.match(r"# (\w+\.py)\n", block)
    return found and found[1]


def text_under(page: str, block: str) -> str | None:
    """What the page shows under a block."""
    found = SHOWN.match(page.split(f"```python\n{block}```\n")[1])
    return found and found[1]


@contextlib.contextmanager
def folder_of_modules(folder: str) -> Iterator[None]:
    """Files of a folder can be imported, whatever else has their names; afterwards they are forgotten."""
    names = {path.stem for path in Path(folder).glob("*.py")}
    others = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        with contextlib.chdir(folder):  # what is told of a place is told from here
            yield
    finally:
        sys.path.remove(folder)
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)


def called(folder: str, module: str, name: str, *arguments: object) -> object:
    """A function of a file of that folder, on a rank."""
    with folder_of_modules(folder):
        return getattr(importlib.import_module(module), name)(*arguments)


@pytest.fixture
def folder(warm, monkeypatch, tmp_path) -> Path:
    """A folder for a page's files, whose functions `axes.launch` runs on ranks that are there."""

    def launch(fn: Callable[..., object], ranks: int, *arguments: object, **_: object) -> list[object]:
        module = "script" if fn.__module__ == "__main__" else fn.__module__
        call = called, str(tmp_path), module, fn.__qualname__, *arguments
        return [call[0](*call[1:])] if ranks == 1 else warm(call[0], ranks, *call[1:])

    monkeypatch.setattr(axes, "launch", launch)
    return tmp_path


def printed(code: str, space: dict[str, Any], where: str) -> str:
    """What a block prints, with the value of its last line, as a notebook shows it."""
    body = ast.parse(code).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(ast.Module(body, []), where, "exec"), space)
        value = last and eval(compile(ast.Expression(last.value), where, "eval"), space)
        if value is not None:
            print(value if isinstance(value, str) and "\n" in value else repr(value))
    return out.getvalue()


def run_page(page: str, name: str, folder: Path) -> None:
    """Runs the blocks of a page, and compares what stands under them."""
    space: dict[str, Any] = {"__name__": "__main__"}
    files = {file: text for _, text in blocks(page) if (file := file_of(text))}
    for file, text in files.items():
        written = text.partition("\n")[2] if Path(name).stem in generate.NOTEBOOKS else text  # a cell's first line goes
        (folder / file).write_text(written, encoding="utf-8")
    with folder_of_modules(str(folder)):
        for line, text in blocks(page):
            if text.lstrip().startswith(">>>"):
                test = doctest.DocTestParser().get_doctest(text, space, name, name, line)
                runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.FAIL_FAST)
                out: list[str] = []
                failed = runner.run(test, clear_globs=False, out=out.append).failed
                assert not failed, "".join(out)
                space.update(test.globs)
            elif not file_of(text) and not is_script(text) and not is_missing(text):
                found, wanted = printed("\n" * line + text, space, name), text_under(page, text)
                assert wanted is None or found == wanted, f"line {line} of {name}"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=multiplies_batches if page.name == "models.md" else ())
        for page in PAGES
        if page.name not in WITHOUT_CODE
    ],
)
def test_the_code_of_a_page_runs_and_prints_what_stands_under_it(page, folder):
    text = page.read_text(encoding="utf-8")
    assert blocks(text), f"{page.name} shows no Python"
    try:
        run_page(text, page.name, folder)
    finally:
        axes.destroy_process_groups()
        torch.compiler.reset()


SCRIPTS = [(page, text) for page in PAGES for _, text in blocks(page.read_text(encoding="utf-8")) if is_script(text)]


@pytest.mark.parametrize(("page", "text"), SCRIPTS, ids=lambda value: getattr(value, "name", ""))
def test_a_script_of_a_page_prints_what_stands_under_it(page, text, folder, capsys):
    (folder / "script.py").write_text(text, encoding="utf-8")
    wanted = text_under(page.read_text(encoding="utf-8"), text)
    assert wanted is not None, f"nothing stands under a script of {page.name}"
    if "SIGKILL" in text:  # a world of its own, for it ends
        assert subprocess.check_output([sys.executable, "script.py"], cwd=folder, env=ENVIRONMENT, text=True) == wanted
        return
    with folder_of_modules(str(folder)):
        runpy.run_path(str(folder / "script.py"), run_name="__main__")
    axes.destroy_process_groups()
    assert capsys.readouterr().out == wanted


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS, report=True)
    axes.destroy_process_groups()  # an example may end with its world of one running
    assert not found.failed, f"{found.failed} of {found.attempted} examples of {name} fail"


def test_a_page_with_wrong_output_is_noticed(tmp_path):
    with pytest.raises(AssertionError, match=r"Expected:\n *3\n *Got:\n *2\n"):
        run_page("```python\n>>> 1 + 1\n3\n```\n", "wrong.md", tmp_path)
    with pytest.raises(AssertionError, match=r"line 1 of wrong\.md"):
        run_page("```python\n1 + 1\n```\n\n```text\n3\n```\n", "wrong.md", tmp_path)


# ------------------------------------------------------------------------ generated pages


def generated(warm: Callable[..., list[Any]], pages: tuple[str, ...]) -> list[str]:
    """How the generated pages and pictures differ from what the library says now."""
    ran = gradients.combined(warm(gradients.run_everything, 4))
    assert max(run.off for run in ran) < 1e-12
    return list(generate.differences(generate.files(ran, pages)))


def test_the_generated_pages_and_pictures_are_what_the_library_says_now(warm):
    found = [line for line in generated(warm, ("quick-start",)) if not line.endswith(" is of no row")]
    assert not found, "run `python docs/generate.py`:\n" + "\n".join(found[:60])


@pytest.mark.full
def test_all_generated_pages_are_and_every_picture_is_of_a_row(warm):
    found = generated(warm, generate.NOTEBOOKS)
    assert not found, "run `python docs/generate.py`:\n" + "\n".join(found[:60])


def test_a_page_that_differs_and_a_picture_of_no_row_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "DOCS", tmp_path / "docs")
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    (tmp_path / "docs" / "pictures" / "old.svg").touch()
    (tmp_path / "docs" / "page.md").write_text("one\ntwo\n")
    found = list(generate.differences(iter([(tmp_path / "docs" / "page.md", "one\n2\n")])))
    assert {"-two", "+2"} < set(found)
    assert found[-1] == "docs/pictures/old.svg is of no row"


# ---------------------------------------------------------------------- links, and the table of speed

LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if ":" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, missing


def test_the_reference_has_every_public_name_once_and_no_other():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    found = sorted(
        name for page in pages for name in re.findall(r"^::: axes\.(.+)$", page.read_text(encoding="utf-8"), re.M)
    )
    nn = {f"nn.{name}" for name in axes.nn.__all__ if name not in axes.__all__}
    converters = {f"convert.{name}" for name in axes.convert.__all__}
    assert found == sorted({*axes.__all__, "extension", *nn, *converters} - {"convert", "nn"})


def test_the_site_is_built_without_a_warning(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        build, cwd=ROOT, env={**ENVIRONMENT, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "reference" / "operations.html").stat().st_size > 10_000


def test_the_performance_table_has_the_rows_that_the_benchmarks_print():
    from tests.bench.__main__ import registered

    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    table = page.split("<!-- bench -->")[1].split("<!-- /bench -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[3:]]
    shown = [(what, peer, bar) for what, _, peer, _, _, bar in rows]
    assert shown == [(b.what, b.peer, f"{b.bar:g}x") for b in registered() if b.page]
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("## What it costs")[2]
    times = re.findall(r"[\d.]+ (?:µs|ms|s)\b", home.partition("\n## ")[0])
    assert len(times) == 12
    assert not {*times} - {cell for row in rows for cell in row}
