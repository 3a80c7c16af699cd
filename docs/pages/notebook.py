"""Pages that a notebook kernel runs: what stands under their code, their pictures, and the notebook with its outputs.

A page is written by hand, but for what follows its Python blocks: a `text` block holds what the code above shows, and
an image `pictures/NAME.svg` is of the last value that it shows. A block that begins with a file's name is that file.

>>> [cell.source for cell in cells_of("One.\\n```python\\n1 + 1\\n```\\n```text\\n2\\n```\\n")]
['One.', '1 + 1']
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
CODE = re.compile(r"^```python\n(?P<code>.*?)\n```\n(?P<shown>\n*```text\n(?P<text>.*?)^```\n)?", re.M | re.S)
FILE = re.compile(r"# (\w+\.py)\n")
IMAGE = re.compile(r"!\[[^]]*\]\(pictures/([\w-]+\.svg)\)\n*")
TIMEOUT = 240


@dataclass(frozen=True)
class NotebookCell:
    """A part of a page: prose, or code with the text that stands under it, if any."""

    source: str
    is_code: bool
    text: str | None = None
    is_solution: bool = False
    picture: str | None = None


def cells_of(page: str) -> list[NotebookCell]:
    """The page as cells. A picture belongs to the code before it; the code of a solution is within `<details>`."""
    found, end, folded = [], 0, False
    matches = list(CODE.finditer(page))
    for at, match in enumerate(matches):
        prose = page[end : match.start()]
        found += _prose(prose)
        folded = _is_folded(prose, folded)
        end = match.end()
        after = page[end : matches[at + 1].start() if at + 1 < len(matches) else len(page)]
        image = IMAGE.search(after)
        found.append(NotebookCell(match["code"], True, match["text"], folded, image and image[1]))
    return found + _prose(page[end:])


def _is_folded(prose: str, before: bool) -> bool:
    """Whether what comes after the prose is within `<details>`."""
    opened, closed = prose.rfind("<details>"), prose.rfind("</details>")
    return before if opened == closed else opened > closed


def _prose(text: str) -> list[NotebookCell]:
    """The cell of some prose, if there is any: without what only a page needs."""
    text = IMAGE.sub("", text).replace("<details><summary>Solution</summary>", "**Solution**")
    text = text.replace("</details>", "").strip()
    return [NotebookCell(text, False)] if text else []


def executed(page: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The notebook of a page with its outputs, as a dict of nbformat 4.5; and the SVG of each of its pictures.

    Raises `nbclient.exceptions.CellExecutionError` where a cell does.
    """
    import nbclient
    import nbformat

    cells, pictures, drawing = [], {}, {}
    for at, cell in enumerate(cells_of(page)):
        made = {"cell_type": "markdown", "id": f"cell-{at}", "metadata": {}, "source": cell.source}
        if cell.is_code:
            source = FILE.sub(r"%%writefile \1\n", cell.source, count=1) if FILE.match(cell.source) else cell.source
            made |= {"cell_type": "code", "source": source, "outputs": [], "execution_count": None}
            if cell.is_solution:
                made["metadata"] = {"jupyter": {"source_hidden": True, "outputs_hidden": True}}
        cells.append(made)
        if cell.picture:
            source = "print(_.svg() if hasattr(_, 'svg') else axes.show(_).svg(), end='')"
            drawing[f"svg-{at}"] = cell.picture
            cells.append({**made, "id": f"svg-{at}", "source": source, "metadata": {}})
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.from_dict(
        {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}
    )
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=TIMEOUT,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            coalesce_streams=True,  # a busy kernel sends the lines of a cell in several outputs
        )
        client.execute(env=_environment(folder))
    kept: list[Any] = []
    for cell in notebook.cells:
        if cell.id in drawing:
            pictures[drawing[cell.id]] = printed(cell)
            continue
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = 1 + sum(each.cell_type == "code" for each in kept)
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = cell.execution_count
        kept.append(cell)
    notebook.cells = kept
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    return notebook, pictures


def _environment(folder: str) -> dict[str, str]:
    """The variables of the kernel: this library, one thread for each rank, no colours, no one's settings."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "IPYTHONDIR": f"{folder}/.ipython",
    }
    return {**os.environ, **ours}


def printed(cell: Any) -> str:
    """What a code cell shows where there is only text."""
    found = "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell["outputs"])
    return re.sub(r"^(Writing|Overwriting) \w+\.py\n", "", found)


def rewritten(page: str, notebook: dict[str, Any]) -> str:
    """The page with what the notebook shows under each block that has a text under it."""
    shown = iter([printed(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"])

    def under(match: re.Match[str]) -> str:
        text = next(shown).rstrip("\n")
        return match[0] if match["shown"] is None else f"```python\n{match['code']}\n```\n\n```text\n{text}\n```\n"

    return CODE.sub(under, page)


def as_file(notebook: dict[str, Any]) -> str:
    """The notebook as the text of a file."""
    import nbformat

    return nbformat.writes(notebook, version=4) + "\n"
