"""`python -m axes`: see `axes.show.cli`."""

from __future__ import annotations

import sys

try:
    from axes.show.cli import main
except ModuleNotFoundError as error:
    if error.name != "click":
        raise
    sys.exit("python -m axes needs click, which reads its options: pip install 'axes-torch[cli]'")

main(prog_name="python -m axes")
