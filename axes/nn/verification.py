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

from axes.algebra.errors import AxesError, MeshError, ShardingError, SizeError
from axes.algebra.logical import Rules
from axes.algebra.mesh import Mesh, required_mesh
from axes.algebra.sizes import written_sizes
from axes.extension import shown
from axes.launching.launch import launch
from axes.nn.verify_compare import judged
from axes.nn.verify_diagnosis import Mismatch, words
from axes.nn.verify_run import Job, Observed, named_tensors, observe
from axes.ops.module_regions import region_call

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
        first = f"not the same function on '{self.mesh}': {count} differences, the first to look at first"
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
    """Whether a parallel program computes what it computes on one device, and if not, what it computes instead.

    `program` is a module, or a function that makes, shards and runs one.

    - A module is sharded on each rank, by `axes.shard_module(module, specs, rules=rules, **sizes)`, and called with the
      inputs, which are whole tensors: a region (`axes.shard_map(module, expression)`) gets them as its expression
      declares, another module gets replicated DTensors. Backward starts from all outputs, each element with another
      weight.
    - A function is called with the inputs on every rank. The small mesh is the ambient one, and the argument `mesh` of
      a function that has one. It may use whatever it likes: `parallelize_module`, `fully_shard`, hooks, collectives. It
      returns outputs, a tensor or a tree of tensors and numbers, or `(outputs, module)`. Without a module, the one
      that it calls is meant. Where it leaves no gradients, backward is run from the scalars that it returns; a program
      that isn't to be trained says so by `module.requires_grad_(False)`.

    `mesh`: a small mesh, or its declaration (`"dp=2 tp=2"`), by default the ambient one, with a local process for each
    rank, 8 at most; nothing has to be running. An axis of two ranks stands for a larger one. What is wrong over which
    axis is best told where one alone is larger than 1. One device runs the program on a mesh whose axes have size one,
    or the `reference`: another function, or a module that stays plain, that computes the right thing there with
    parameters of the same names. `rtol`, `atol`: how far numbers that aren't integers may
    be apart, relative to the largest that isn't the very same, and at all. By default `rtol` follows from the dtype,
    float64 where the program allows it, and `atol` from the largest tensor of the same kind. `timeout`: seconds for
    one run, five minutes by default. Keywords are sizes for `specs`.

    What is zero but for rounding, as the gradient of the bias of keys, is another number wherever sums are taken in
    another order. So a gradient may be off by 500 units in the last place of the largest gradient, a value of the
    largest value, and an output of a typical number of the outputs of modules. A parameter whose gradient is zero but
    for rounding may have been stepped by that.

    Each rank seeds torch alike before the program starts. torch's dropout is off while values are compared, that inside
    of its attention and recurrent layers too. The result tells whether ranks with the same input would drop the same
    elements, not whether they would drop as many as one device. Turn off other random numbers, as by `module.eval()`.

    DTensors say how they lie. For plain tensors whatever their shapes allow is tried: replicated, split along
    a dim by any axes, as `torch.chunk` splits it; a plain scalar may also be a rank's own share of a loss or of a
    count. Only a program's parameters and outputs are judged; what modules inside return tells where an output went
    wrong.

    Where a program of double precision computes a part in float32 by itself, as the norms of Llama do, 1e-4 may differ.
    One that does so where it can't be seen, like `fully_shard` with a `MixedPrecisionPolicy`, needs an `rtol`. Buffers
    aren't compared, and of plain outputs neither the order of their rows. What else of a function can't be, as the
    parameters of a module that it doesn't return, is on the first line of the result, "the same but for ...", whose
    `ok` is None then: it isn't true.

    Raises `AxesError` for arguments that can't be checked, before a process starts, and what the program raises on a
    rank.

    >>> import axes
    >>> axes.verify(torch.nn.Linear(4, 8), torch.ones(2, 4), mesh="dp=2 tp=2", specs={"*": "f@tp ..."})
    <Verification: the same function on 'dp=2 tp=2': 3 outputs and gradients>

        def program(tokens, mesh):
            model = parallelize_module(Model(), mesh["tp"].device_mesh, plan)
            return model(tokens).square().mean(), model

        print(axes.verify(program, tokens, mesh="tp=2"))
    """
    _check(program, inputs, reference, specs, rtol, atol)
    if mesh is not None and not isinstance(mesh, Mesh | str):
        raise MeshError(f"mesh= is an axes mesh or its declaration, like 'dp=2 tp=2'; found {shown(mesh)}")
    small = _checked_size(Mesh(mesh) if isinstance(mesh, str) else required_mesh(mesh, "axes.verify"))
    of_specs = dict(written_sizes(keywords, sizes))
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
    if any(call is not None and call.mesh is not None for call in map(region_call, module.modules())):
        raise MeshError("axes.verify runs a region on small meshes; write shard_map(module, expression) without mesh=")
    sharded = next((name for name, x in module.named_parameters() if isinstance(x, DTensor)), None)
    if sharded is not None:
        raise ShardingError(
            f"axes.verify shards the module itself, and {sharded} is sharded already: pass the plain module and "
            "specs=, or a function that makes and shards it"
        )
    try:
        tensors = [x for _, x in named_tensors(inputs, "")]
    except RecursionError:
        raise AxesError("axes.verify: an input holds itself, or is nested too deep") from None
    if any(isinstance(x, DTensor) or is_lazy(x) for x in tensors):
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
    for double in (True, False):
        job = replace(job, double=double)
        alone = replace(job, mesh=_of_one(job.mesh))
        if reference is not None:
            alone = replace(alone, program=reference, specs=None)
        try:
            return job, _launched(alone, limit)[0]
        except RuntimeError as error:
            if not double or "type" not in str(error):
                raise
    raise AssertionError


def _launched(job: Job, limit: float) -> list[Observed]:
    """What each rank of the job's mesh sees."""
    run = functools.partial(observe, job)
    run.__qualname__ = "the program of axes.verify"  # type: ignore[attr-defined] # as errors of launch name it
    return launch(run, job.mesh.size, timeout=limit)
