"""A hook of MkDocs: differences between a code host and the site.

- The site has the examples as text, and pages link to them. Links to other sources become plain text.
- In a table a code host wants `\\|` for a bar in code, and shows `|`. The site shows what is written.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

_EXAMPLE = re.compile(r"\]\(\.\./examples/(\w+\.py)\)")
_SOURCE = re.compile(r"\[([^\]]+)\]\((?:\.\./[^)]*|[\w/-]+\.(?:ipynb|py))\)")
_CODE_IN_TABLE = re.compile(r"(?m)(?<=`)[^`\n]*\\\|[^`\n]*(?=`)")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """The files of the site, with the examples as text that a browser shows."""
    for path in sorted(EXAMPLES.glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}.txt", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The text of a page as the site shows it."""
    linked = _EXAMPLE.sub(r"](examples/\1.txt)", markdown)
    return _CODE_IN_TABLE.sub(lambda code: code[0].replace("\\|", "|"), _SOURCE.sub(lambda link: link[1], linked))
