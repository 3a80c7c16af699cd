"""`python -m axes`, and the command `axes`: see `axes.show.cli`."""

from __future__ import annotations

import sys

NEEDED = "python -m axes needs click, which reads its options: pip install 'axes-torch[cli]'"


def from_shell() -> None:
    """Runs the command line; one line on stderr where click isn't installed."""
    try:
        import click  # noqa: F401
    except ModuleNotFoundError:
        sys.exit(NEEDED)
    from axes.show.cli import main

    is_module = sys.argv[0].endswith("__main__.py")
    main(prog_name="python -m axes" if is_module else "axes", complete_var="_AXES_COMPLETE")


if __name__ == "__main__":
    from_shell()
