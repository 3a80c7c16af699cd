"""What type checkers know of the public surface, as a user's program sees it: mypy and pyright, both strict.

Here they read torch's own annotations, which takes mypy most of a minute. The house's own check takes what
comes from torch for Any.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("typed_program.py", "wrongly_typed_program.py")

# As for a user, to whom the library's own files aren't there to be judged.
MYPY = ("mypy", "--strict", "--follow-imports=silent", "--config-file=", "--no-error-summary", "--no-pretty")
PYRIGHT = ("pyright", "--project=pyrightconfig.json", f"--pythonpath={sys.executable}")
STRICT = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "include": ["."]}


@pytest.mark.full
@pytest.mark.parametrize("checker", [(*MYPY, *PROGRAMS), PYRIGHT], ids=["mypy", "pyright"])
def test_a_checker_knows_every_result_and_finds_every_mistake(checker, tmp_path):
    for name in PROGRAMS:
        shutil.copy(ROOT / "tests" / name, tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(STRICT), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", *checker],
        cwd=tmp_path,
        # What mypy has read of torch is kept beside the house's own cache, for the next run.
        env={**os.environ, "MYPYPATH": str(ROOT), "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache" / "programs")},
        capture_output=True,
        text=True,
        check=False,
    )
    found = {
        (Path(name).name, int(line)) for name, line in re.findall(r"^\s*(\S+\.py):(\d+):.*error", done.stdout, re.M)
    }
    wrong = (tmp_path / PROGRAMS[1]).read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(wrong, 1) if line.startswith("def mistakes")) + 1
    assert found == {(PROGRAMS[1], number) for number in range(first, len(wrong) + 1)}, done.stdout + done.stderr
