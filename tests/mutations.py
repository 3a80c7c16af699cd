"""Faults put into the library at random, one at a time: does the suite find each?

    python -m tests.mutations draw                       # the faults of the seed, as the source is now
    python -m tests.mutations reach --keep FOLDER        # which tests reach each changed line
    python -m tests.mutations run --keep FOLDER [K ...]  # those tests, with fault K, up to the first that fails
    python -m tests.mutations table --keep FOLDER        # what was found by which test

A fault changes one place: a comparison is turned, a term is dropped, two things change places, an index is off by one, a
branch is never taken, a copy is missing. The places are spread over the library by its statements. `reach` and `run` work on
copies of the project below FOLDER and keep their results there, so that they can be interrupted and taken up again. The
checks of form (`test_house`) aren't asked: a branch that is never taken isn't found by its looks.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEED, COUNT = 31, 24
# fmt: off
PYTEST = (sys.executable, "-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider")
# fmt: on
NOT_ASKED = ("tests/test_house.py",)

TURNED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
COPIES = ("clone", "contiguous", "copy", "detach")
COPYING = ("list", "dict", "set", "tuple", "sorted", "reversed")

PROBE = '''
import os
_seen, _now = set(), None

def reached(k):
    """Notes that the running test has come to place k."""
    global _now
    folder, worker = os.environ.get("AXES_REACHED"), os.environ.get("PYTEST_XDIST_WORKER", "main")
    if folder:
        if _now is None:
            _now = os.open(f"{folder}/now-{worker}", os.O_RDONLY | os.O_CREAT)
        test = os.pread(_now, 4096, 0).decode().strip()
        if (k, test) not in _seen:
            _seen.add((k, test))
            with open(f"{folder}/reached-{worker}", "a") as file:
                file.write(f"{k} {test}\\n")

reached._dynamo_marked_constant = True  # a graph is traced as if it weren't there
'''


@dataclass(frozen=True)
class Fault:
    """One place of one file, what is written in its stead, and the kind of the change."""

    kind: str
    file: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.kind}:  {' '.join(self.old.split())}  ->  {' '.join(self.new.split())}"


def changes(node: ast.expr, text: str, offset: object) -> Iterator[tuple[str, str]]:
    """Each kind of change that this expression allows, and the expression after it."""

    def of(part: ast.AST) -> str:
        start, end = offset(part)
        return text[start:end]

    match node:
        case ast.Compare(left, [op], [right]):
            yield "a comparison is turned", f"{of(left)} {TURNED[type(op)]} {of(right)}"
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.BitOr() | ast.BitAnd(), _):
            yield "a term is dropped", of(left)
        case ast.BinOp(left, ast.FloorDiv() | ast.Mod() | ast.Div(), right):
            yield (
                "two things change places",
                f"{of(right)} {'//' if isinstance(node.op, ast.FloorDiv) else '%'} {of(left)}",
            )
        case ast.BoolOp(_, values):
            word = " and " if isinstance(node.op, ast.And) else " or "
            yield "a term is dropped", word.join(f"({of(value)})" for value in values[:-1])
        case ast.UnaryOp(ast.Not(), operand):
            yield "a comparison is turned", of(operand)
        case ast.Subscript(value, ast.Constant(int(index))):
            yield "an index is off by one", f"{of(value)}[{index + 1}]"
        case ast.Subscript(value, ast.UnaryOp(ast.USub(), ast.Constant(int(index)))):
            yield "an index is off by one", f"{of(value)}[{1 - index}]"
        case ast.Subscript(value, ast.Slice(ast.Constant(int(index)), None, None)):
            yield "an index is off by one", f"{of(value)}[{index + 1}:]"
        case ast.IfExp(_, body, orelse):
            yield "a branch is never taken", of(body)
            yield "a branch is never taken", of(orelse)
        case ast.Call(ast.Attribute(value, name), [], []) if name in COPIES:
            yield "a copy is missing", of(value)
        case ast.Call(ast.Name(name), [argument], []) if name in COPYING and not isinstance(argument, ast.GeneratorExp):
            yield "a copy is missing", f"({of(argument)})"
        case ast.Call(func, [first, second, *rest], keywords) if type(first) is type(second) and not isinstance(
            first, ast.Starred | ast.Constant
        ):
            others = [of(argument) for argument in (*rest, *keywords)]
            yield "two things change places", f"{of(func)}({', '.join((of(second), of(first), *others))})"
        case ast.Tuple([first, second]) | ast.List([first, second]):
            both = f"{of(second)}, {of(first)}"
            yield "two things change places", f"[{both}]" if isinstance(node, ast.List) else f"({both})"
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if (
                keyword.arg in ("dim", "axis")
                and isinstance(keyword.value, ast.Constant)
                and type(keyword.value.value) is int
            ):
                start, end = offset(keyword)
                whole, _ = offset(node)
                changed = f"{keyword.arg}={1 if keyword.value.value == 0 else 0}"
                yield "a wrong axis", of(node)[: start - whole] + changed + of(node)[end - whole :]


def own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement that run with it: no annotations, no texts, no statements inside."""
    if isinstance(statement, ast.Raise | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return
    hidden = {"annotation"}
    waiting = [child for name, child in ast.iter_fields(statement) if name not in hidden]
    while waiting:
        child = waiting.pop()
        if isinstance(child, list):
            waiting += child
        elif isinstance(child, ast.AST) and not isinstance(child, ast.stmt | ast.JoinedStr | ast.pattern | ast.Lambda):
            if isinstance(child, ast.expr) and not isinstance(getattr(child, "ctx", ast.Load()), ast.Store | ast.Del):
                yield child
            waiting += list(ast.iter_child_nodes(child))


def faults_of(path: Path) -> list[tuple[ast.stmt, list[Fault]]]:
    """The statements of a file in their order, each with all faults that its own expressions allow."""
    text = path.read_text()
    data, starts = text.encode(), [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offset(part: ast.AST) -> tuple[int, int]:
        begin, end = starts[part.lineno - 1] + part.col_offset, starts[part.end_lineno - 1] + part.end_col_offset
        return len(data[:begin].decode()), len(data[:end].decode())

    found = []
    tree = ast.parse(text)
    typing = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.stmt) or statement in typing:
            continue
        faults = []
        if isinstance(statement, ast.If | ast.While):
            start, end = offset(statement.test)
            old = text[start:end]
            faults.append(("a branch is never taken", statement.test, f"False and ({old})"))
        for node in own_expressions(statement):
            faults += [(kind, node, new) for kind, new in changes(node, text, offset)]
        name = str(path.relative_to(ROOT))
        made = [Fault(k, name, n.lineno, *offset(n), text[slice(*offset(n))], new) for k, n, new in faults]
        found.append((statement, made))
    return sorted(found, key=lambda pair: pair[0].lineno)


def drawn(seed: int, count: int) -> list[Fault]:
    """`count` faults: one of each of so many equal stretches of the library's statements."""
    rng = random.Random(seed)
    statements = [faults for path in sorted((ROOT / "axes").rglob("*.py")) for _, faults in faults_of(path)]
    found: list[Fault] = []
    for k in range(count):
        stretch = statements[k * len(statements) // count : (k + 1) * len(statements) // count]
        faults = rng.choice([faults for faults in stretch if faults])
        kind = rng.choice(sorted({fault.kind for fault in faults}))
        found.append(rng.choice([fault for fault in faults if fault.kind == kind]))
    return found


def copied(folder: Path, faults: list[tuple[int, Fault]], *, probes: bool) -> Path:
    """A copy of the project with these faults, or with a probe at the place of each."""
    shutil.rmtree(folder, ignore_errors=True)
    names = subprocess.check_output(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], text=True
    ).splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for k, fault in sorted(faults, key=lambda pair: -pair[1].start):
        path = folder / fault.file
        text = path.read_text()
        if text[fault.start : fault.end] != fault.old:
            raise ValueError(
                f"{fault.file} has changed since the faults were drawn: draw them again, in an empty folder"
            )
        new = f"(__import__('axes._reached')._reached.reached({k}) or ({fault.old}))" if probes else f"({fault.new})"
        path.write_text(text[: fault.start] + new + text[fault.end :])
    if probes:
        (folder / "axes/_reached.py").write_text(PROBE)
    return folder


def pytest_runtest_protocol(item: object) -> None:
    """As a plugin of pytest: says which test runs now."""
    folder = os.environ.get("AXES_REACHED")
    if folder:
        with open(f"{folder}/now-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}", "w") as file:
            file.write(f"{item.nodeid}\n")


def asked(project: Path, arguments: list[str], results: Path, **environment: str) -> int:
    """Runs pytest in a copy of the project, on what is listed in `arguments`."""
    listed = results.with_suffix(".args")
    listed.write_text("\n".join(arguments))
    env = {**os.environ, "PYTHONPATH": str(project), **environment}
    with results.with_suffix(".log").open("w") as log:
        command = [*PYTEST, "--junitxml", str(results), f"@{listed}"]
        return subprocess.run(
            command, cwd=project, env=env, stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode


def reach(keep: Path, faults: list[Fault]) -> None:
    """Runs the suite once with probes, and keeps the tests that come to each place, the quickest first."""
    notes = keep / "notes"
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir(parents=True)
    project = copied(keep / "reach", list(enumerate(faults)), probes=True)
    arguments = ["-m", "not full", *(f"--deselect={name}" for name in NOT_ASKED)]
    asked(project, arguments, keep / "reach.xml", AXES_REACHED=str(notes), PYTEST_PLUGINS="tests.mutations")
    (keep / "reach.json").write_text(json.dumps(reached_by(notes, len(faults)), indent=1))


def reached_by(notes: Path, count: int) -> list[list[str]]:
    """The tests that came to each place, as the notes say."""
    tests: list[set[str]] = [set() for _ in range(count)]
    for path in notes.glob("reached-*"):
        for line in path.read_text().splitlines():
            k, _, test = line.partition(" ")
            if test:
                tests[int(k)].add(test)
    return [sorted(found) for found in tests]


def took(keep: Path) -> dict[str, float]:
    """How many seconds each test took when all ran."""
    cases = ElementTree.parse(keep / "reach.xml").iter("testcase")
    return {f"{c.get('classname').replace('.', '/')}.py::{c.get('name')}": float(c.get("time")) for c in cases}


def run(keep: Path, k: int, fault: Fault) -> None:
    """The tests that reach a fault, with it, up to the first that fails: file by file, the quickest file first."""
    tests = json.loads((keep / "reach.json").read_text())[k]
    times = took(keep)
    per_file: dict[str, float] = {}
    for test in tests:
        per_file[test.split("::")[0]] = per_file.get(test.split("::")[0], 0.0) + times.get(test, 1.0)
    tests.sort(key=lambda test: (per_file[test.split("::")[0]], test.split("::")[0]))
    project, results, since = (
        copied(keep / f"fault-{k}", [(k, fault)], probes=False),
        keep / f"fault-{k}.xml",
        time.time(),
    )
    code = asked(project, ["-x", *tests], results) if tests else 5
    failed = []
    if results.exists():
        failed = [
            f"{case.get('classname')}::{case.get('name')}"
            for case in ElementTree.parse(results).iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
    found = {
        "fault": asdict(fault),
        "reached": len(tests),
        "code": code,
        "failed": failed,
        "seconds": time.time() - since,
    }
    (keep / f"fault-{k}.json").write_text(json.dumps(found, indent=1))
    shutil.rmtree(project)


def table(keep: Path, faults: list[Fault]) -> None:
    """Prints what became of each fault that was run."""
    for k, fault in enumerate(faults):
        path = keep / f"fault-{k}.json"
        print(f"{k:3} {fault}")
        if path.exists():
            found = json.loads(path.read_text())
            verdict = (
                f"found by {found['failed'][0]}"
                if found["failed"]
                else "MISSED"
                if found["code"] in (0, 5)
                else "found"
            )
            print(f"    {verdict}  ({found['reached']} tests reach it, {found['seconds']:.0f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("draw", "reach", "run", "table"))
    parser.add_argument("only", nargs="*", type=int)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    options = parser.parse_intermixed_args()
    if options.action == "draw":
        print("\n".join(f"{k:3} {fault}" for k, fault in enumerate(drawn(options.seed, options.count))))
        return
    keep = options.keep.resolve()
    keep.mkdir(parents=True, exist_ok=True)
    kept = keep / "faults.json"
    if not kept.exists():
        kept.write_text(json.dumps([asdict(fault) for fault in drawn(options.seed, options.count)], indent=1))
    faults = [Fault(**each) for each in json.loads(kept.read_text())]
    if options.action == "reach":
        reach(keep, faults)
    if options.action == "run":
        for k in options.only or range(len(faults)):
            if not (keep / f"fault-{k}.json").exists():
                run(keep, k, faults[k])
    table(keep, faults)


if __name__ == "__main__":
    main()
