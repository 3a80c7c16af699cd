"""Wrong input at every public door: a right result, an `AxesError` or a `TypeError`; short messages, no time lost.

Cases are numbered, and a number is the same call in every process: `outcome_of(1234)` runs one. `make test` runs the first
few thousand, `make test-full` half a million. In between, right calls still have to give what they gave before.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
import random
import resource
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import axes
from axes.algebra import ambient
from axes.algebra.errors import AxesError
from axes.runtime import flags
from tests.hostile import ADDRESS, Case, doors, foreign_to, hostile, right_case, summary, world

FIRST, ALL = 4_000, 500_000
BLOCK = 2_000
"""So many calls are in one world; then the other one's turn comes."""

LONGEST, SLOWEST = 2_000, 0.5

ELSEWHERE = {"connect", "launch", "verify", "simulate", "destroy_process_groups"}
"""Doors whose right calls would start processes, need real ones or end the world; they are in tests of their own."""

HOME = str(Path(axes.__file__).parent)


@dataclass(frozen=True)
class Outcome:
    """How a call ended: with what result or error, in how many seconds of this thread; and what is wrong with that."""

    kind: str
    text: Any
    seconds: float
    fault: str = ""


class Starting(AxesError):
    """Stands for processes that would be started."""


def no_processes(ranks: int, *_: object) -> None:
    raise Starting(f"{ranks} processes would be started")


def outcome(case: Case, number: int, values: bool) -> Outcome:
    """What comes of a call. Memory that there isn't is torch's to say, in a class that programs catch."""
    torch.manual_seed(number)
    began = time.thread_time()
    try:
        result = case.run()
    except (AxesError, TypeError) as error:
        seconds = time.thread_time() - began
        text = str(error)
        fault = f"a message of {len(text)} characters: {text[:100]}" if len(text) > LONGEST else ""
        return Outcome(type(error).__name__, ADDRESS.sub("", text), seconds, fault)
    except Exception as error:
        seconds = time.thread_time() - began
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):
            return Outcome("no memory", "", seconds)
        where = traceback.extract_tb(error.__traceback__)
        ours = [f"{at.filename.removeprefix(HOME)}:{at.lineno}" for at in where if at.filename.startswith(HOME)]
        return Outcome("fault", "", seconds, f"{type(error).__name__}: {str(error)[:200]} at {' '.join(ours[-3:])}")
    return Outcome("result", summary(result, values), time.thread_time() - began)


def state() -> tuple[Any, ...]:
    """What is of the whole process or thread, and no call may leave changed."""
    return (
        ambient.ambient_mesh(),
        ambient.innermost_rules(),
        flags.check,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        dist.is_initialized() and (dist.get_rank(), dist.get_world_size()),
    )


class Block:
    """The doors of one world, what right calls give there, and hostile calls."""

    def __init__(self, name: str, mesh: axes.Mesh):
        self.values = name == "one"  # with several ranks, what collectives of a simulated world give is made up
        self.doors, self.foreign = doors(mesh), foreign_to(mesh)
        self.names = list(self.doors)
        self.state = state()
        self.expected = {name: self.right(name) for name in self.names if name not in ELSEWHERE}

    def right(self, name: str) -> Outcome:
        found = outcome(right_case(self.doors[name]), 0, self.values and name != "empty")
        assert found.kind == "result", f"a right call of {name}: {found}"
        return found

    def case(self, number: int) -> tuple[str, Case]:
        rng = random.Random(number)
        name = rng.choice(self.names)
        return name, hostile(self.doors[name], rng, self.foreign)

    def faults(self, number: int) -> list[str]:
        """What is wrong with a case, twice: caches know the second call."""
        found = []
        name, case = self.case(number)
        first = outcome(case, number, self.values)
        again = self.repeated(number) if number % 8 == 0 and name != "empty" else first
        for each in (first, again):
            found += [each.fault] if each.fault else []
        if (first.kind, first.text) != (again.kind, again.text):
            found.append(f"first {first.kind} {str(first.text)[:300]}, then {again.kind} {str(again.text)[:300]}")
        if first.seconds > SLOWEST and (second := self.repeated(number)).seconds > SLOWEST:
            found.append(f"{second.seconds:.2f} s")
        if state() != self.state:
            found.append(f"the state of the process is another: {state()}")
            raise AssertionError(f"case {number}, {name}, {case.what}: {found}")
        if number % 5 == 0 and name not in ELSEWHERE and (now := self.right(name)).text != self.expected[name].text:
            found.append(f"a right call gives another result afterwards: {now.text}")
        return [f"{number} {name} {[what[:200] for what in case.what]}\n    {fault}" for fault in found]

    def repeated(self, number: int) -> Outcome:
        return outcome(self.case(number)[1], number, self.values)


@contextmanager
def block(number: int) -> Iterator[Block]:
    """The world of a case."""
    name = ("one", "eight")[number // BLOCK % 2]
    with world(name) as mesh:
        yield Block(name, mesh)


@contextmanager
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No processes, no output, no warnings; and no memory beyond what the process has and 8 GiB."""
    monkeypatch.setattr("axes.runtime.launch.Pool", no_processes)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (8 << 30), limits[1]))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def run(first: int, last: int) -> list[str]:
    """What is wrong with the cases from one number to another."""
    found = []
    for start in range(first, last, BLOCK):
        with block(start) as calls:
            for number in range(start, min(last, start + BLOCK)):
                found += calls.faults(number)
    return found


def test_the_first_hostile_inputs_end_in_a_result_or_an_error_that_says_so(monkeypatch):
    with quiet(monkeypatch):
        found = run(0, FIRST)
    assert not found, "\n".join(found[:20])


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, ALL, 50_000))
def test_half_a_million_hostile_inputs_end_in_a_result_or_an_error_that_says_so(monkeypatch, first):
    with quiet(monkeypatch):
        found = run(first, first + 50_000)
    assert not found, "\n".join(found[:20])


def test_every_public_name_has_a_door():
    """What has none: the errors, and modules. Methods by the classes that doors are named after."""
    names = {name.partition(" ")[0].partition(",")[0] for name in doors_of_one()}
    public = {*dir(axes), *dir(axes.nn)} - {"nn"}
    public -= {
        name
        for name in public
        if isinstance(getattr(axes, name, None), type) and issubclass(getattr(axes, name), Exception)
    }
    inside = {name.partition(".")[0] for name in names}
    assert not {name for name in public if name not in inside}
    for kind, without in METHODS_WITHOUT.items():
        found = {
            name
            for name in vars(getattr(axes, kind))
            if not name.startswith("_") and callable(getattr(getattr(axes, kind), name))
        }
        assert {f"{kind}.{name}" for name in found} - names == {f"{kind}.{name}" for name in without}


METHODS_WITHOUT: dict[str, set[str]] = {
    "Mesh": set(),
    "Axis": set(),
    "Sharding": set(),
    "Layout": set(),
    "Plan": set(),
    "Rules": set(),
    "LayoutRules": set(),
    "CostModel": {"time_us"},
}
"""Methods without a door: `time_us` is called by plans, with what they made."""


def test_public_names_are_functions_and_classes_whatever_was_imported():
    for module in pkgutil.walk_packages(axes.__path__, "axes."):
        importlib.import_module(module.name)
    assert all(callable(getattr(axes.nn, name)) for name in dir(axes.nn))
    assert all(callable(getattr(axes, name)) for name in dir(axes) if name != "nn")


def doors_of_one() -> list[str]:
    with world("one") as mesh:
        return list(doors(mesh))
