"""Is a parallel model the same function? Run it on local ranks and on one, and say what differs.

    result = axes.verify(model, tokens, mesh="dp=8 tp=4", specs={"*.up.weight": "f@tp e", "*": "..."})
    assert result, result

The program runs as it is, on small meshes of local processes: axes of two ranks stand for larger ones. Outputs and the
gradient of every parameter are compared with those of the same program on one rank, whose mesh has axes of size one.
What differs is named: the parameter, the axis, the factor. Where it isn't known which axes are meant, the program runs
again with each of them of size one, which tells them apart.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from axes.algebra.errors import AxesError, MeshError, ShardingError, SizeError
from axes.algebra.layout import Layout
from axes.algebra.logical import Rules
from axes.algebra.mesh import Mesh, required_mesh
from axes.algebra.sizes import written_sizes
from axes.extension import shown
from axes.launching.launch import launch
from axes.nn.verify_compare import judged
from axes.nn.verify_diagnosis import Mismatch, subsets, words
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

    `differences`: what to look at first comes first. `meshes`: those on which the program ran. `compared`: how many
    tensors were compared. `missed`: what wasn't compared, in words, such as gradients that nobody can judge.
    """

    differences: tuple[Mismatch, ...]
    meshes: tuple[str, ...]
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
        on, missed, count = words([f"'{mesh}'" for mesh in self.meshes]), words(self.missed), len(self.differences)
        if not count:
            same = f"the same but for {missed}," if missed else "the same function"
            return f"{same} on {on}: {self.compared} outputs and gradients"
        first = f"not the same function on {on}: {count} differences, the first to look at first"
        lines = [first + (f" (not compared: {missed})" if missed else "")]
        lines += [f"  {difference}" for difference in self.differences[:SHOWN]]
        return "\n".join([*lines, *([f"  and {count - SHOWN} more"] if count > SHOWN else [])])

    def __repr__(self) -> str:
        state = f"the same but for {words(self.missed)}" if self.missed else "ok"
        if self.differences:
            state = f"{len(self.differences)} differences, first: {self.differences[0]}"
        return f"<Verification on {words(map(repr, self.meshes))}: {state}>"


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

    `mesh`: a mesh, or its declaration (`"dp=8 tp=4"`), by default the ambient one; nothing has to be running. Its
    axes are shrunk to size 2, or 3 where 2 doesn't divide; axes of size 1 stay. Where more than 8 ranks would be
    needed, several smaller meshes are used, which together have every two of the axes. One device runs the program on
    a mesh whose axes have size one, or the `reference`: another function, or a module that stays plain, that computes
    the right thing there with parameters of the same names. `rtol`, `atol`: how far numbers that aren't integers may
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
    >>> axes.verify(torch.nn.Linear(4, 8), torch.ones(2, 4), mesh="dp=64 tp=8", specs={"*": "f@tp ..."})
    <Verification on 'dp=2 tp=2': ok>

        def program(tokens, mesh):
            model = parallelize_module(Model(), mesh["tp"].device_mesh, plan)
            return model(tokens).square().mean(), model

        print(axes.verify(program, tokens, mesh="tp=2"))
    """
    _check(program, inputs, reference, specs, rtol, atol)
    if mesh is not None and not isinstance(mesh, Mesh | str):
        raise MeshError(f"mesh= is an axes mesh or its declaration, like 'dp=2 tp=2'; found {shown(mesh)}")
    wanted = Mesh(mesh) if isinstance(mesh, str) else required_mesh(mesh, "axes.verify")
    of_specs = dict(written_sizes(keywords, sizes))
    if isinstance(program, torch.nn.Module):
        specs = {} if specs is None else specs
    elif specs is not None:
        raise AxesError("specs= are for a module; a function shards what it makes by itself")
    elif of_specs:
        raise SizeError(f"sizes are for specs of a module; found {words(map(shown, of_specs))} beside a function")
    job = Job(program, inputs, specs, rules, of_specs)
    return _Check(wanted, job, reference, rtol, atol, PATIENCE if timeout is None else timeout).run()


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


# --- meshes


def shrunk(mesh: Mesh) -> list[dict[str, int]]:
    """Small sizes of the axes: one set where it takes at most eight ranks, else sets that have each pair of axes.

    >>> shrunk(Mesh("dp=64 tp=8 ep=1")), [list(each.values()) for each in shrunk(Mesh("a=2 b=2 c=2 d=2"))]
    ([{'dp': 2, 'tp': 2, 'ep': 1}], [[2, 2, 2, 1], [2, 2, 1, 2], [2, 1, 2, 2]])
    """
    small = {name: _small(size) for name, size in mesh.shape.items()}
    if math.prod(small.values()) <= MOST_RANKS:
        return [small]
    large = [name for name, size in small.items() if size > 1]
    sets = [chosen for chosen in subsets(large) if math.prod(small[name] for name in chosen) <= MOST_RANKS]
    sets.sort(key=len, reverse=True)
    pairs = {chosen: set(itertools.combinations_with_replacement(chosen, 2)) for chosen in sets}
    missing, found = set().union(*pairs.values()), []
    while missing:
        best = max(sets, key=lambda chosen: len(missing & pairs[chosen]))
        missing -= pairs[best]
        found.append({name: size if name in best else 1 for name, size in small.items()})
    return found


def _small(size: int) -> int:
    return 1 if size == 1 else next((prime for prime in (2, 3, 5, 7) if size % prime == 0), 2)


def _declared(small: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in small.items())


def _call(mesh: Mesh, small: Mapping[str, int]) -> tuple[str, ...]:
    """The declaration of the mesh with small axes, and equations for its further names whose product is that of axes.

    >>> _call(Mesh("dp=4 cp=4", "(dp cp) = edp=8 ep=2"), {"dp": 2, "cp": 2})
    ('dp=2 cp=2', '(dp cp) = edp=2 ep=2')
    """
    written, rest = [_declared(small)], [name for name in mesh.namespace if name not in small]
    while rest:
        news = [rest[:count] for count in range(1, len(rest) + 1)]
        new, old = next(((new, old) for new in news if (old := _factors(mesh, new))), (rest[:1], []))
        if old:
            written.append(f"({' '.join(old)}) = {_declared(_divided(math.prod(small[n] for n in old), mesh, new))}")
        rest = rest[len(new) :]
    return tuple(written)


def _factors(mesh: Mesh, names: Sequence[str]) -> list[str]:
    """The axes whose product is that of some names; none where it cuts an axis, or there is none."""
    try:
        return mesh.factored(Layout.product(*map(mesh.layout, names))) or []
    except MeshError:  # the names share ranks
        return []


def _divided(total: int, mesh: Mesh, names: Sequence[str]) -> dict[str, int]:
    """Small sizes of names that split axes of a small size; the first that isn't of size 1 takes what is left."""
    found = dict.fromkeys(names, 1)
    for name in reversed(names):
        found[name] = math.gcd(_small(mesh.names[name]), total)
        total //= found[name]
    found[next((name for name in names if mesh.names[name] > 1), names[0])] *= total
    return found


# --- the check


@dataclass
class _Check:
    mesh: Mesh
    job: Job
    reference: Callable[..., Any] | None
    rtol: float | None
    atol: float | None
    timeout: float

    def run(self) -> Verification:
        one, sets = self._one(), shrunk(self.mesh)
        compared = len(one.outputs) + sum(gradient is not None for gradient in one.gradients.values())
        if not compared:
            raise AxesError(
                "axes.verify has nothing to compare: the program returned no tensor and no number, and no parameter "
                "got a gradient; return outputs (a tensor, or a tuple, list, dict or dataclass of tensors), or "
                "(outputs, module)"
            )
        differences: dict[tuple[str, str], Mismatch] = {}
        for small in sets:
            for each in self._on(small, one):
                differences.setdefault((each.name, each.what), each)
        return Verification(tuple(differences.values()), tuple(map(_declared, sets)), compared, one.missed)

    def _launched(self, job: Job, small: Mapping[str, int]) -> list[Observed]:
        run = functools.partial(observe, replace(job, mesh=_call(self.mesh, small)))
        run.__qualname__ = "the program of axes.verify"  # type: ignore[attr-defined] # as errors of launch name it
        return launch(run, math.prod(small.values()), timeout=self.timeout)

    def _one(self) -> Observed:
        """The run on axes of size one, in double precision where the program takes it. What works is remembered."""
        for double in (True, False):
            self.job = job = replace(self.job, double=double)
            if self.reference is not None:
                job = replace(job, program=self.reference, specs=None)
            try:
                return self._launched(job, dict.fromkeys(self.mesh.shape, 1))[0]
            except RuntimeError as error:
                if not double or "type" not in str(error):
                    raise
        raise AssertionError

    def _on(self, small: Mapping[str, int], one: Observed) -> list[Mismatch]:
        """What differs on a small mesh.

        Where axes aren't known, those of a difference are the ones of which it is gone where they have size one.
        """
        found, large = self._judged(small, one), [name for name, size in small.items() if size > 1]
        left = dict.fromkeys(large, found if len(large) > 1 else [])  # without its one axis everything is right
        if len(large) > 1 and any(
            not each.axes and each.kind != "shape" for each in found if each.what == found[0].what
        ):
            for axis in large:
                try:
                    left[axis] = self._judged({**small, axis: 1}, one)
                except Exception:  # a program that can't do without the axis: nothing is known of it then
                    continue
        return [_over(each, [axis for axis in large if not _is_among(each, left[axis])], small) for each in found]

    def _judged(self, small: Mapping[str, int], one: Observed) -> list[Mismatch]:
        return judged(Mesh(_declared(small)), self._launched(self.job, small), one, self.rtol, self.atol)


def _is_among(each: Mismatch, others: Sequence[Mismatch]) -> bool:
    """Whether a difference is there still, and no other multiple of the right tensor."""
    still = [other for other in others if (other.name, other.what) == (each.name, each.what)]
    return bool(still) and (each.factor is None or math.isclose(still[0].factor or 0.0, each.factor, rel_tol=1e-6))


def _over(difference: Mismatch, gone: Sequence[str], small: Mapping[str, int]) -> Mismatch:
    """The difference with its axes, where these aren't known: those without which it is gone."""
    if difference.axes or not gone or difference.kind == "shape":
        return difference
    product, factor = math.prod(small[axis] for axis in gone), difference.factor or 0.0
    if math.isclose(factor, product, rel_tol=1e-6) or math.isclose(factor * product, 1, rel_tol=1e-6):
        return replace(difference, axes=tuple(gone))
    text = f"{difference.text}; right where {words(gone)} has size 1"
    return replace(difference, text=text, axes=() if difference.factor else tuple(gone))
