"""Wrong input at every public door: a right result, an `AxesError` or a `TypeError`; short messages, no time lost.

Cases are numbered, and a number is the same call in every process: `python -m tests.test_hostile 1234` runs one. `make test`
runs the first of them, `make test-full` half a million. In between, right calls still have to give what they gave before.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
import random
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import axes
from tests.hostile import ADDRESS, Case, doors, foreign_to, hostile, right_case, summary, world

FIRST, ALL = 2_000, 500_000
# So many calls are in one world; then the other one's turn comes.
BLOCK = 500

LONGEST, SLOWEST = 2_000, 0.5

# Doors whose right calls need real processes or end the world; they are in tests of their own.
ELSEWHERE = {"connect", "simulate", "destroy_process_groups"}

# Those without a door, since they would start processes, or write where they are told. What they refuse is in the table of refusals.
STARTING = {"launch", "save_safetensors", "verify"}

# Methods for the library itself, which no page promises.
INSIDE = {
    "Mesh.along",
    "Mesh.ambient",
    "Mesh.called",
    "Mesh.calls",
    "Mesh.described",
    "Mesh.factored",
    "Mesh.made_of",
    "Mesh.parts",
    "Mesh.splits",
    "Plan.weight",
    "Rules.ambient",
    "Sharding.names_of",
    "Sharding.text_of",
    "Transfer.exchange",
}

HOME = str(Path(axes.__file__).parent)


NOT_OURS = (
    "of a hostile object",
    "a generator that fails",
    "not implemented for",
    "not supported on quantized tensors",
    'is missing the required "forward" function',
    "int too big to convert",
    "int too large to convert",
    "can't convert negative int to unsigned",
    "Device index must not be negative",
    "Expected one of cpu, cuda",
    "Promotion for ",
    "is not on the expected device",
    "Attempted to unbind along the sharded dimension",
    "Invalid device string",
    "Cannot access accelerator device when none is available",
    "Found no NVIDIA driver on your system",
    "got mixed torch.Tensor and DTensor",
    "only supports Tensor or scalar",
    "must match the size of tensor b",
    " is ambiguous",
    "uninitialized parameter",
    "NestedTensorImpl",
    "error unpacking string as utf-8",
    "Exceeds the limit (4300 digits)",
    "Requires zero arguments",
    "Storage size calculation overflowed",
    "not compiled with CUDA",
    "add(sparse, dense) is not supported",
    "dtype can require gradients",
    "Overflow when unpacking",
    "File name too long",
    "Device string must not be empty",
    "Unimplemented backend",
    "'params'",  # torch.optim, of a group without parameters
    "tuple index out of range",  # torch.optim, of parameters that are tuples of one
)
"""What an argument says itself: an object whose method raises, a tensor in which torch can't compute, a module that has
nothing to run and is given as the function of a reduction; and of the options of layers and functions, which go to torch
as they are: a device that there isn't, a number of more than 64 bits, a tensor in the place of a number."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended: with what result or error, in how many seconds of this thread; and what is wrong with that."""

    kind: str
    text: Any
    seconds: float
    fault: str = ""


def outcome(case: Case, number: int, values: bool) -> Outcome:
    """What comes of a call.

    Memory that there isn't is torch's to say, in a class that programs catch, and so is a dtype in which it can't
    compute. An object whose own methods raise says it itself.
    """
    torch.manual_seed(number)
    began = time.thread_time()
    try:
        result = case.run()
    except (axes.AxesError, TypeError) as error:
        seconds, text = time.thread_time() - began, str(error)
        fault = f"a message of {len(text)} characters: {text[:100]}" if len(text) > LONGEST else ""
        return Outcome(type(error).__name__, ADDRESS.sub("", text), seconds, fault)
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return Outcome("no memory", "", 0.0)
        if any(said in str(error) for said in NOT_OURS):
            return Outcome(type(error).__name__, "", 0.0)
        where = traceback.extract_tb(error.__traceback__)
        ours = [f"{at.filename.removeprefix(HOME)}:{at.lineno}" for at in where if at.filename.startswith(HOME)]
        return Outcome("fault", "", 0.0, f"{type(error).__name__}: {str(error)[:200]} at {' '.join(ours[-3:])}")
    return Outcome("result", summary(result, values), time.thread_time() - began)


def answer(*door: Any) -> str:
    return str(outcome(Case(door[0], list(door[1:]), {}), 0, False).text)


def state() -> tuple[Any, ...]:
    """What is of the whole process or thread, and no call may leave changed: the mesh and the rules are as asked for."""
    ambient = answer(axes.axis_size, "tp"), answer(axes.shard, torch.ones(8), "b@tp")
    rules = answer(axes.annotate, torch.ones(8), "b"), answer(axes.constrain, torch.ones(8), "b")
    torchs = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()
    return ambient, rules, torchs, dist.is_initialized() and (dist.get_rank(), dist.get_world_size())


class Block:
    """The doors of one world, what right calls give there, and hostile calls."""

    def __init__(self, name: str, mesh: axes.Mesh):
        self.values = name == "one"  # with several ranks, what collectives of a simulated world give is made up
        self.doors, self.foreign = doors(mesh), foreign_to(mesh)
        self.names, self.state = list(self.doors), state()
        self.expected = {name: self.right(name) for name in self.names if name not in ELSEWHERE}

    def right(self, name: str) -> Outcome:
        found = outcome(right_case(self.doors[name]), 0, self.values and name != "empty")
        assert found.kind == "result", f"a right call of {name}: {found}"
        return found

    def case(self, number: int) -> tuple[str, Case]:
        name = self.names[number % len(self.names)]
        return name, hostile(self.doors[name], random.Random(number), self.foreign)

    def repeated(self, number: int) -> Outcome:
        return outcome(self.case(number)[1], number, self.values)

    def faults(self, number: int) -> list[str]:
        """What is wrong with a case, twice: caches know the second call."""
        name, case = self.case(number)
        first = outcome(case, number, self.values)
        again = self.repeated(number) if number % 8 == 0 and name != "empty" else first
        found = [each.fault for each in (first, again) if each.fault]
        if (first.kind, first.text) != (again.kind, again.text):
            found.append(f"first {first.kind} {str(first.text)[:300]}, then {again.kind} {str(again.text)[:300]}")
        if first.seconds > SLOWEST and (second := self.repeated(number)).seconds > SLOWEST:
            found.append(f"{second.seconds:.2f} s")
        if state() != self.state:
            raise AssertionError(f"case {number}, {name}, {case.what}: the state of the process is another: {state()}")
        if number % 5 == 0 and name not in ELSEWHERE and (now := self.right(name)).text != self.expected[name].text:
            found.append(f"a right call gives another result afterwards: {now.text}")
        return [f"{number} {name} {[what[:200] for what in case.what]}\n    {fault}" for fault in found]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No output, no warnings; and no memory beyond what the process has and 8 GiB."""
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
    with quiet():
        for start in range(first, last, BLOCK):
            name = ("one", "eight")[start // BLOCK % 2]
            with world(name) as mesh:
                calls = Block(name, mesh)
                found += [each for number in range(start, min(last, start + BLOCK)) for each in calls.faults(number)]
    return found


@pytest.mark.parametrize("first", range(0, FIRST, BLOCK))
def test_a_hostile_input_ends_in_a_result_or_an_error_that_says_so(first):
    found = run(first, first + BLOCK)
    assert not found, "\n".join(found[:20])


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, ALL, 50_000))
def test_half_a_million_hostile_inputs_end_in_a_result_or_an_error_that_says_so(first):
    found = run(first, first + 50_000)
    assert not found, "\n".join(found[:20])


def test_every_public_name_has_a_door():
    """What has none: the errors, modules, and what starts processes. Methods by the classes that doors are named after."""
    with world("one") as mesh:
        names = {name.partition(" ")[0].partition(",")[0] for name in doors(mesh)}
    public = {*dir(axes), *dir(axes.nn), *axes.convert.__all__} - {"convert", "nn"} - STARTING
    errors = {name for name in public & {*dir(axes)} if name.endswith("Error")}
    assert not public - errors - {name.partition(".")[0] for name in names}
    for kind in ("Mesh", "Axis", "Sharding", "Layout", "Plan", "Transfer", "Rules", "LayoutRules"):
        methods = {
            f"{kind}.{name}"
            for name, value in vars(getattr(axes, kind)).items()
            if name[0] != "_" and (callable(value) or isinstance(value, classmethod))
        }
        assert not methods - names - INSIDE


def test_public_names_are_functions_and_classes_whatever_was_imported():
    for module in pkgutil.walk_packages(axes.__path__, "axes."):
        importlib.import_module(module.name)
    assert all(callable(getattr(axes.nn, name)) for name in dir(axes.nn))
    assert all(callable(getattr(axes, name)) for name in dir(axes) if name not in ("convert", "nn"))


if __name__ == "__main__":
    number = int(sys.argv[1])
    print("\n".join(run(number, number + 1)) or "nothing is wrong")
