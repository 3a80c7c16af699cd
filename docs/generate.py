"""Writes the pages that the library can say by itself: what moves, what gradients do, what pictures show.

    python docs/generate.py             writes docs/einops-with-an-at.md, gradients.md and show.md, docs/pictures/*.svg,
                                        what quick-start.md and tour.md show under their code, and docs/tour.ipynb
    python docs/generate.py --check     exits with 1 where one of them isn't what would be written

What the pages hold is in `docs/pages`. The page about gradients is run by four local ranks. The quick start and the
tour are written by hand, and run by a notebook kernel.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from docs.pages import expressions, gradients, notebook, showing  # noqa: E402 - found by the line above

NOTEBOOKS = ("quick-start", "tour")
"""Pages that a notebook kernel runs."""


def files(ran: Sequence[gradients.Ran], notebooks: Sequence[str] = NOTEBOOKS) -> Iterator[tuple[Path, str]]:
    """Every file that is written, and what it holds. `ran` are the results of the page about gradients."""
    for name, svg in (*expressions.pictures(), *showing.pictures()):
        yield DOCS / "pictures" / name, svg
    yield DOCS / "einops-with-an-at.md", expressions.text()
    yield DOCS / "gradients.md", gradients.page(ran)
    yield DOCS / "show.md", showing.text()
    for page in (DOCS / f"{name}.md" for name in notebooks):
        written = page.read_text(encoding="utf-8")
        executed, drawn = notebook.executed(written)
        yield page, notebook.rewritten(written, executed)
        yield from ((DOCS / "pictures" / name, svg) for name, svg in drawn.items())
        if page.stem == "tour":
            yield page.with_suffix(".ipynb"), notebook.as_file(executed)


def differences(wanted: Iterator[tuple[Path, str]]) -> Iterator[str]:
    """What differs between files as they are and as they should be, as a diff; and pictures that nobody wants."""
    pictures = set((DOCS / "pictures").glob("*"))
    for path, text in wanted:
        pictures.discard(path)
        found = path.read_text(encoding="utf-8") if path.exists() else ""
        name = str(path.relative_to(DOCS.parent))
        yield from difflib.unified_diff(found.splitlines(), text.splitlines(), name, "the library", lineterm="", n=1)
    yield from (f"{path.relative_to(DOCS.parent)} is of no row" for path in sorted(pictures))


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    if arguments == ["--check"]:
        found = list(differences(files(gradients.results())))
        print("\n".join([*found, "run `python docs/generate.py`"]) if found else "up to date")
        return 1 if found else 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    for path, text in list(files(gradients.results())):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
