"""`python -m axes`, and the command `axes`: see `axes.pictures.cli`."""

from __future__ import annotations

import sys

from axes.pictures.cli import main


def from_shell() -> None:
    """Runs the command line."""
    main("python -m axes" if sys.argv[0].endswith("__main__.py") else "axes", sys.argv[1:])


if __name__ == "__main__":
    from_shell()
