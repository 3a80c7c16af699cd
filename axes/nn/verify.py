"""Is a parallel model the same function? Run it on local ranks and on one, and say what differs.

    result = axes.verify(model, tokens, mesh="dp=2 tp=2", specs={"*.up.weight": "f@tp e", "*": "..."})
    assert result, result

The program runs as it is, on a small mesh of local processes: axes of two ranks stand for larger ones. Outputs and the
gradient of every parameter are compared with those of the same program on one rank, whose mesh has axes of size one.
What differs is named: the parameter, over which axis it is pending, the factor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from axes import AxesError, Mesh, MeshError, Rules, ShardingError, SizeError, launch
from axes.extension import shown
from axes.nn.verify_compare import judged
from axes.nn.verify_diagnosis import Mismatch, words
from axes.nn.verify_run import Job, Observed, named_tensors, observe

MOST_RANKS = 8
"""As many local processes as a check starts at most."""

PATIENCE = 300.0
"""Seconds that a run may take where the caller sets no limit."""

SHOWN = 8
"""As many differences are listed at most: the first are what to look at, and others follow from them."""


@dataclass(frozen=True)
class Verification:
    """What `axes.verify` found; true where everything was compared and the parallel program is the same function.

    `differences`: what to look at first comes first. `mesh`: on which the program ran. `compared`: how many
    tensors were compared. `missed`: what wasn't compared, in words, such as gradients that nobody can judge.
    """

    differences: tuple[Mismatch, ...]
    mesh: str
    compared: int
    missed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool | None:
        """False where something differs, True where nothing does; None where nothing does and something is missed."""
        return False if self.differences else None if self.missed else True

    def __bool__(self) -> bool:
        """Whether nothing differs and everything was compared."""
        return self.ok is True

    def __str__(self) -> str:
        """A line on the whole, with what wasn't compared, and one for each difference."""
        missed, count = words(self.missed), len(self.differences)
        if not count:
            same = f"the same but for {missed}," if missed else "the same function"
            return f"{same} on '{self.mesh}': {self.compared} outputs and gradients"
        first = f"not the same function on '{self.mesh}': {count} differences; start with the first"
        lines = [first + (f" (not compared: {missed})" if missed else "")]
        lines += [f"  {difference}" for difference in self.differences[:SHOWN]]
        return "\n".join([*lines, *([f"  and {count - SHOWN} more"] if count > SHOWN else [])])

    def __repr__(self) -> str:
        return f"<Verification: {str(self).partition(chr(10))[0]}>"


def verify(
    program: Callable[..., Any],
    *inputs: Any,
    mesh: Mesh | str | None = None,
    specs: Mapping[str, str] | None = None,
    rules: Rules | None = None,
    reference: Callable[..., Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    timeout: float | None = None,
    sizes: Mapping[str, int] | None = None,
    **keywords: int,
) -> Verification:
    """Compare a parallel program with one device: outputs, and the gradient of every parameter.

    The program runs on a small local mesh, and once on one device. If they differ, the result names the first tensor
    that is wrong, what it is instead, and the axis.

    - A module is sharded on each rank by `axes.shard_module(module, specs, rules=rules, **sizes)`, and called with
      the inputs. A region (`axes.shard_map(module, expression)`) gets them as its expression says, another module
      gets replicated DTensors. The backward pass starts from all outputs, with another weight for each element.
    - A function is called with the inputs on every rank. The small mesh is the ambient one, and the argument `mesh`
      of a function that has one. It may use `parallelize_module`, `fully_shard`, hooks or collectives. It returns
      outputs (a tensor, or a tree of tensors and numbers), or `(outputs, module)`. If it leaves no gradients, the
      backward pass starts from the scalars that it returns. Write `module.requires_grad_(False)` for a program that
      isn't to be trained.

    Integers and bools are compared exactly, floats relative to the largest of their tensor. A tensor that is zero
    but for rounding may differ by 500 units in the last place of the largest tensor of its kind. torch's dropout is
    off; turn off other random numbers (`module.eval()`). Plain tensors may be replicated, or split along any dim as
    `torch.chunk` splits it; a plain scalar may be one rank's share of a loss. Buffers, and the order of rows in
    plain outputs, aren't compared.

    Args:
        program: A module, or a function that makes, shards and runs one.
        *inputs: Whole tensors.
        mesh: A small mesh or its text (`"dp=2 tp=2"`), by default the ambient mesh, with one local process for each
            rank, at most 8. An axis of size 2 stands for a larger one. If only one axis is larger than 1, the result
            can name it best.
        specs: As in `axes.shard_module`.
        rules: As in `axes.shard_module`.
        reference: What runs on one device, if it isn't the program: a function, or a plain module with parameters of
            the same names. If the program makes its parameters from a seed, the reference is a function that makes
            them from the same seed: the run is in double precision, in which a seed gives other numbers.
        rtol: The largest relative difference; by default it follows from the dtype. A program that computes a part
            in float32 where nobody can see it, as by FSDP2's `MixedPrecisionPolicy`, needs a larger one.
        atol: The largest absolute difference; by default it follows from the largest tensor of the same kind.
        timeout: Seconds for one run, by default 300.
        sizes: Sizes of names, for names that collide with a parameter.
        **keywords: Sizes of names for `specs`.

    Returns:
        A `Verification`. It prints what differs. `ok` is True if everything was compared and is the same, and None
        if a part couldn't be compared, which the first line says.

    Raises:
        AxesError: An argument isn't valid; raised before a process starts.
        Exception: What the program raises on a rank.

    Examples:
        >>> import axes
        >>> axes.verify(torch.nn.Linear(4, 8), torch.ones(2, 4), mesh="dp=2 tp=2", specs={"*": "f@tp ..."})
        <Verification: the same function on 'dp=2 tp=2': 3 outputs and gradients>
    """
    _check(program, inputs, reference, specs, rtol, atol)
    if mesh is not None and not isinstance(mesh, Mesh | str):
        raise MeshError(f"mesh= is an axes mesh or its declaration, like 'dp=2 tp=2'; found {shown(mesh)}")
    small = _checked_size(Mesh(mesh) if isinstance(mesh, str) else Mesh.ambient("axes.verify", mesh))
    of_specs = {**keywords, **(sizes or {})}
    if isinstance(program, torch.nn.Module):
        specs = {} if specs is None else specs
    elif specs is not None:
        raise AxesError("specs= are for a module; a function shards what it makes by itself")
    elif of_specs:
        raise SizeError(f"sizes are for specs of a module; found {words(map(shown, of_specs))} beside a function")
    limit = PATIENCE if timeout is None else timeout
    job, one = _seen_on_one(Job(program, inputs, small, specs, rules, of_specs), reference, limit)
    compared = len(one.outputs) + sum(gradient is not None for gradient in one.gradients.values())
    if not compared:
        raise AxesError(
            "axes.verify has nothing to compare: the program returned no tensor and no number, and no parameter "
            "got a gradient; return outputs (a tensor, or a tuple, list, dict or dataclass of tensors), or "
            "(outputs, module)"
        )
    differences = judged(small, _launched(job, limit), one, rtol, atol)
    return Verification(tuple(differences), small.declaration, compared, one.missed)


def _check(
    program: object, inputs: Sequence[Any], reference: object, specs: object, rtol: object, atol: object
) -> None:
    for what, each in (("program", program), ("reference", program if reference is None else reference)):
        if not callable(each):
            raise AxesError(
                f"axes.verify takes a module, or a function that builds, shards and runs one; found as {what} "
                f"{shown(each)}"
            )
    if isinstance(program, type):
        raise AxesError(f"axes.verify takes a module, not its class: write axes.verify({program.__name__}(...), ...)")
    module = program if isinstance(program, torch.nn.Module) else torch.nn.Module()
    calls = [getattr(each.forward, "region", None) for each in module.modules()]
    if any(call is not None and call.mesh is not None for call in calls):
        raise MeshError("axes.verify runs a region on small meshes; write shard_map(module, expression) without mesh=")
    sharded = next((name for name, x in module.named_parameters() if isinstance(x, DTensor)), None)
    if sharded is not None:
        raise ShardingError(
            f"axes.verify shards the module itself, and {sharded} is sharded already: pass the plain module and "
            "specs=, or a function that makes and shards it"
        )
    if any(isinstance(x, DTensor) or is_lazy(x) for _, x in named_tensors(inputs, "")):
        raise ShardingError(
            "axes.verify takes whole, plain tensors as inputs and shards them itself; found a DTensor, "
            "or a lazy parameter that has no shape yet"
        )
    for name, value in (("rtol", rtol), ("atol", atol)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < math.inf):  # type: ignore[operator]
            raise AxesError(f"{name} is a number that isn't negative, or None; found {shown(value)}")


# --- the check


def _checked_size(mesh: Mesh) -> Mesh:
    """The mesh to run on: one of few ranks, the first ones."""
    if mesh.universe.ranks == range(mesh.size) and mesh.size <= MOST_RANKS:
        return mesh
    small = " ".join(f"{name}={2 if at < 3 else 1}" for at, name in enumerate(mesh.axis_names))
    raise MeshError(
        f"axes.verify starts a local process for each rank, at most {MOST_RANKS}; found {mesh!r}: pass a small "
        f"mesh with the same names, whose ranks are 0, 1, ..., like mesh='{small}'"
    )


def _of_one(mesh: Mesh) -> Mesh:
    """The mesh with all names, each of size one.

    >>> _of_one(Mesh("dp=2 tp=2", "all = dp tp")).names
    {'dp': 1, 'tp': 1, 'all': 1}
    """
    first, further = mesh.axis_names[0], [name for name in mesh.names if name not in mesh.axis_names]
    return Mesh(" ".join(f"{name}=1" for name in mesh.axis_names), *(f"{name} = {first}" for name in further))


def _seen_on_one(job: Job, reference: Callable[..., Any] | None, limit: float) -> tuple[Job, Observed]:
    """What one device sees, in double precision where the program takes it, and the job in the precision that works."""
    alone = replace(job, mesh=_of_one(job.mesh))
    if reference is not None:
        alone = replace(alone, program=reference, specs=None)
    try:
        return job, _launched(alone, limit)[0]
    except RuntimeError as error:
        if not job.double or "type" not in str(error):
            raise
    return _seen_on_one(replace(job, double=False), reference, limit)


def _launched(job: Job, limit: float) -> list[Observed]:
    """What each rank of the job's mesh sees."""
    run = functools.partial(observe, job)
    run.__qualname__ = "the program of axes.verify"  # type: ignore[attr-defined] # as errors of launch name it
    return launch(run, job.mesh.size, timeout=limit)
