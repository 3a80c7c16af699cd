"""Fixes taken out again, one at a time: after how many generated cases do the laws find each?

    python -m tests.mutations               # all of them, each in a copy of the library: half an hour
    python -m tests.mutations F P           # of these faults alone

A mutation replaces a piece of the source by what it was before the fault was mended, or by something that has the same
fault. `tests/test_laws.py` runs each law that is named here on at least as many cases as it takes to find it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CASES = 260
TIMEOUT = 600.0


@dataclass(frozen=True)
class Mutation:
    """A fault: what is taken out of which file, and which law on how many ranks is to find it."""

    fault: str
    what: str
    file: str
    old: str
    new: str
    law: str
    ranks: int

    def mutated(self, text: str) -> str:
        """The file without the fix; `ValueError` where the piece isn't there once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} of {self.old!r}")
        return text.replace(self.old, self.new)


MUTATIONS = (
    Mutation(
        "A",
        "an unsplit factor in front of a split one isn't counted",
        "axes/algebra/placements.py",
        "before = [size for i, (size, _) in enumerate(pieces[:at]) if i not in done]",
        "before = [size for i, (size, name) in enumerate(pieces[:at]) if name and i not in done]",
        "whole",
        4,
    ),
    Mutation(
        "A",
        "a split that cuts across factors is taken for one of the first",
        "axes/algebra/planning/form.py",
        "        if left % axis.size:\n            return None\n",
        "",
        "chain",
        4,
    ),
    Mutation(
        "B",
        "reductions that don't commute are put in the order of the mesh",
        "axes/algebra/placements.py",
        "    _check_order_of_pending(sharding)\n",
        "",
        "whole",
        4,
    ),
    Mutation(
        "D",
        "what fills up an uneven part stays with it",
        "axes/runtime/programs.py",
        "scatter(pack(x), op, (padded,))[:count].view(shape)",
        "scatter(pack(x), op, shape)",
        "chain",
        4,
    ),
    Mutation(
        "E",
        "the mean of no elements is taken",
        "axes/ops/recipes.py",
        'reduced_by("mean" if count else "sum")',
        'reduced_by("mean")',
        "operations",
        8,
    ),
    Mutation(
        "F",
        "a result may be a view of an operand",
        "axes/ops/global_view.py",
        "        if owned and self.program.may_be_view and _are_one(local, locals_[0]):\n            local = local.clone()\n",
        "",
        "inplace",
        2,
    ),
    Mutation(
        "F",
        "a tensor that stays as it is is its own result",
        "axes/runtime/redistribute.py",
        "if program.plan.steps else waited(local).clone()",
        "if program.plan.steps else waited(local)",
        "inplace",
        4,
    ),
    Mutation(
        "F",
        "results of one operation may share memory",
        "axes/ops/memory.py",
        "        if memory in taken or not all(_lie_apart(x, other) for other in others):\n            x = x.clone()\n        else:\n            others.append(x)\n",
        "",
        "inplace",
        4,
    ),
    Mutation(
        "J",
        "a subclass of Partial is a sum",
        "axes/algebra/placements.py",
        "if type(placement).__name__ not in _KNOWN:",
        "if not {each.__name__ for each in type(placement).__mro__} & {*_KNOWN}:",
        "after_torch",
        2,
    ),
    Mutation(
        "P",
        "meshes whose groups alone differ are one",
        "axes/runtime/device_mesh.py",
        "    torch_private.tell_groups_apart()\n",
        "",
        "whole",
        4,
    ),
    Mutation(
        "T",
        "a leaf takes the gradient that arrives, whoever has its memory",
        "axes/runtime/leaves.py",
        "        owned = torch_private.owns_its_memory(x)\n",
        "        owned = True\n",
        "leaves",
        4,
    ),
    Mutation(
        "U",
        "a graph of symbolic sizes serves uneven ones",
        "axes/runtime/symbols.py",
        "if count is None or size % count:",
        "if count is None:",
        "compiled",
        2,
    ),
    Mutation(
        "V",
        "the second derivative of a maximum lacks its term",
        "axes/ops/global_view.py",
        "taken = _apply_linear(there, cotangent) if torch.is_grad_enabled() else there.run((cotangent,))",
        "taken = there.run((cotangent,))",
        "operations",
        4,
    ),
)


def found_by(mutation: Mutation) -> str:
    """What the law finds in a copy of the library without the fix: `case 29: ...`, or that it finds nothing."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("axes", "tests"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__", "snapshots"))
        path = Path(folder, mutation.file)
        path.write_text(mutation.mutated(path.read_text()))
        options = ["--law", mutation.law, "--ranks", str(mutation.ranks), "--cases", str(CASES), "--first-failure"]
        ended = subprocess.run(
            [sys.executable, "-m", "tests.whole_laws", *options],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    found = re.search(r"^## .*?case (\d+(?: or later)?), .*?: (.*)$", ended.stdout, re.M)
    if found:
        return f"case {found[1]}: {found[2]}"
    done = re.search(r"^# .*", ended.stdout, re.M)
    return f"NOT FOUND ({done[0]})" if done else f"ended with {ended.returncode}: {ended.stderr[-500:]}"


def main() -> int:
    """Prints a line for each mutation; 1 where one isn't found."""
    missed = 0
    for mutation in MUTATIONS:
        if len(sys.argv) == 1 or mutation.fault in sys.argv[1:]:
            found = found_by(mutation)
            missed += not found.startswith("case")
            print(f"{mutation.fault}  {mutation.what}; {mutation.law} on {mutation.ranks}: {found}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
