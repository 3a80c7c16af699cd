"""A hook of MkDocs: what a code host shows and a site doesn't.

- Pages link to the sources, which aren't part of the site: the text of the link stays.
- In a table a code host wants `\\|` for a bar in code, and shows `|`. The site shows what is written.
"""

from __future__ import annotations

import re
from typing import Any

_SOURCE = re.compile(r"\[([^\]]+)\]\((?:\.\./[^)]*|[\w/-]+\.(?:ipynb|py))\)")
_CODE_IN_TABLE = re.compile(r"(?m)(?<=`)[^`\n]*\\\|[^`\n]*(?=`)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The text of a page as the site shows it."""
    unlinked = _SOURCE.sub(lambda link: link[1], markdown)
    return _CODE_IN_TABLE.sub(lambda code: code[0].replace("\\|", "|"), unlinked)
