"""What pages are made of: code that is run and shown with what it prints, tables, blocks.

>>> print(Session().block("sum([1, 2])"))
```python
>>> sum([1, 2])
3
```
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from axes.algebra.errors import AxesError

WRITTEN = "<!-- Written by `python docs/generate.py`. -->"
"""What stands in every page, for those who would edit it."""


@dataclass
class Session:
    """An interpreter whose input and output are shown, as a doctest has them."""

    space: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})

    def page(self, text: str) -> str:
        """The text, with each of its Python blocks run in order."""
        return re.sub(r"```python\n(.*?)\n```", lambda found: self.block(found.group(1)), text, flags=re.DOTALL)

    def block(self, source: str) -> str:
        """The source as a block of a page, each statement followed by what it prints or raises."""
        lines = source.splitlines()
        shown = []
        for statement in ast.parse(source).body:
            first, *rest = lines[statement.lineno - 1 : statement.end_lineno]
            shown += [f">>> {first}", *(f"... {line}" for line in rest)]
            shown += self._output(statement).splitlines()
        return "\n".join(("```python", *shown, "```"))

    def _output(self, statement: ast.stmt) -> str:
        printed = io.StringIO()
        code = compile(ast.Interactive([statement]), "<page>", "single")
        with contextlib.redirect_stdout(printed):
            try:
                exec(code, self.space)
            except AxesError as error:
                kind = f"{type(error).__module__}.{type(error).__qualname__}"
                return f"Traceback (most recent call last):\n{kind}: {error}"
        return printed.getvalue()


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells don't hold `|`, save in `inline` code."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def inline(code: str) -> str:
    """Code within a table."""
    return "`" + code.replace("|", "\\|") + "`"


def block(lines: str) -> str:
    """Lines that are shown as they are."""
    return f"```text\n{lines}\n```"


def paragraph(text: str) -> str:
    """Prose, wrapped."""
    return textwrap.fill(text, 118)
