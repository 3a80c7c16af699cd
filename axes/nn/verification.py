"""Is a parallel model the same function? Run it on local ranks and on one, and say what differs.

    result = axes.verify(model, tokens, mesh="dp=8 tp=4", specs={"*.up.weight": "f@tp e", "*": "..."})
    assert result, result

The program runs as it is, on small meshes of local processes: axes of two ranks stand for larger ones. Outputs and the
gradient of every parameter are compared with those of the same program on one rank. What differs is named: the
parameter, the axis, the factor. Where two axes could be meant, the program runs again with each of them of size one,
which tells them apart.
"""

from __future__ import annotations

import copy
import glob
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from axes.algebra.errors import AxesError, MeshError, ShardingError, SizeError
from axes.algebra.layout import Layout
from axes.algebra.logical import Rules, checked_rules
from axes.algebra.mesh import Mesh, ambient_mesh
from axes.algebra.sizes import checked_texts, written_sizes
from axes.extension import shown
from axes.nn.annotations import annotated
from axes.nn.verify_compare import judged
from axes.nn.verify_diagnosis import Mismatch, axes_of_factor, subsets, words
from axes.nn.verify_run import Job, Observed, named_tensors, observe
from axes.ops.arguments import NamedSpecs
from axes.ops.module_regions import without_regions
from axes.runtime import torch_private
from axes.runtime.launch import launch

MOST_RANKS = 8
"""As many local processes as a check starts at most."""

PATIENCE = 300.0
"""Seconds that a run may take where the caller sets no limit."""

SHOWN = 20
"""As many differences are listed at most."""


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
        """A line on the whole, and one for each difference."""
        on = words([f"'{mesh}'" for mesh in self.meshes])
        if not self.differences:
            same = f"the same but for {words(self.missed)}," if self.missed else "the same function"
            return f"{same} on {on}: {self.compared} outputs and gradients"
        lines = [f"not the same function on {on}: {len(self.differences)} differences, the first to look at first"]
        follow = [each for each in self.differences if each.what == "gradient" and each.kind in ("none", "differs")]
        if self.differences[0].what not in ("module", "value", "random"):
            follow = []  # nothing that they could follow from
        shown = [each for each in self.differences if each not in follow]
        lines += [f"  {difference}" for difference in shown[:SHOWN]]
        if len(shown) > SHOWN:
            lines.append(f"  and {len(shown) - SHOWN} more")
        if follow:
            names = ", ".join(each.name for each in follow[:3]) + (", ..." if len(follow) > 3 else "")
            lines.append(f"  and {len(follow)} gradients, which a wrong forward makes wrong: {names}")
        return "\n".join([*lines, *(f"  not compared: {each}" for each in self.missed)])

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
      weight. One device runs the module as it was, without regions; where that is impossible since it needs DTensors,
      the sharded module on a mesh of one rank.
    - A function is called with the inputs on every rank. The small mesh is the ambient one, and the argument `mesh` of
      a function that has one. It may use whatever it likes: `parallelize_module`, `fully_shard`, hooks, collectives. It
      returns outputs, a tensor or a tree of tensors and numbers, or `(outputs, module)`. Where it leaves no gradients,
      backward is run from the scalars that it returns; a program that isn't to be trained says so by
      `module.requires_grad_(False)`. One device runs the same function on a mesh whose axes have
      size one.

    `mesh`: a mesh, or its declaration (`"dp=8 tp=4"`), by default the ambient one; nothing has to be running. Its
    axes are shrunk to size 2, or 3 where 2 doesn't divide; axes of size 1 stay. Where more than 8 ranks would be
    needed, several smaller meshes are used, which together have every two of the axes. `reference`: another
    function or module that computes the right thing on one device, with parameters of the same names. `rtol`,
    `atol`: how far numbers that aren't integers may be apart, relative to the largest that isn't the very same, and at
    all. By default `rtol` follows from the dtype, float64 where the program allows it, and `atol` from
    the largest tensor of the same kind. `timeout`: seconds for one run, five minutes by default. Keywords are sizes for
    `specs`.

    What is zero but for rounding, as the gradient of the bias of keys, is another number wherever sums are taken in
    another order. So a gradient may be off by 500 units in the last place of the largest gradient, a value of the
    largest value, and an output of a typical number of the outputs of modules. A parameter whose gradient is zero but
    for rounding may have been stepped by that.

    Each rank seeds torch alike before the program starts. torch's dropout is off while values are compared, that inside
    of its attention and recurrent layers too; where there is any, a second run tells whether ranks that should drop the
    same elements do, not whether they drop as many as one device. Where outputs differ behind other random numbers that
    a module draws, the result says so first.

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
    if rules is not None:
        checked_rules(rules, "axes.verify")
    wanted = _mesh_of(mesh)
    sizes_of_specs = dict(written_sizes(keywords, sizes))
    job = _job(program, inputs, specs, rules, sizes_of_specs)
    return _Check(wanted, job, reference, rtol, atol, PATIENCE if timeout is None else timeout).run()


# --- arguments


def _check(
    program: object, inputs: Sequence[Any], reference: object, specs: object, rtol: object, atol: object
) -> None:
    for what, each in (("program", program), ("reference", reference)):
        if not callable(each) and not (each is None and what == "reference"):
            raise AxesError(
                f"axes.verify takes a module, or a function that builds, shards and runs one; found as {what} "
                f"{shown(each)}"
            )
    if isinstance(program, type):
        raise AxesError(f"axes.verify takes a module, not its class: write axes.verify({program.__name__}(...), ...)")
    if isinstance(program, torch.nn.Module):
        sharded = [name for name, x in program.named_parameters() if isinstance(x, DTensor)]
        if sharded:
            raise ShardingError(
                f"axes.verify shards the module itself, and {sharded[0]} is sharded already: pass the plain module and "
                "specs=, or a function that makes and shards it"
            )
        if specs is not None:
            checked_texts("specs map patterns of names to specs", specs, "{'*.weight': 'f d'}")
    elif specs is not None:
        raise AxesError("specs= are for a module; a function shards what it makes by itself")
    try:
        tensors = [x for _, x in named_tensors(inputs, "")]
    except RecursionError:
        raise AxesError("axes.verify: an input holds itself, or is nested too deep") from None
    if any(map(is_lazy, tensors)):
        raise ShardingError("axes.verify takes tensors as inputs; found a lazy parameter that has no shape yet")
    if any(isinstance(x, DTensor) for x in tensors):
        raise ShardingError("axes.verify takes whole, plain tensors as inputs and shards them itself; found a DTensor")
    for name, value in (("rtol", rtol), ("atol", atol)):
        is_flag = isinstance(value, bool)
        if value is not None and (is_flag or not isinstance(value, int | float) or not 0 <= value < math.inf):
            raise AxesError(f"{name} is a number that isn't negative, or None; found {shown(value)}")


def _mesh_of(mesh: Mesh | str | None) -> Mesh:
    if isinstance(mesh, str):
        return Mesh(mesh)
    mesh = ambient_mesh() if mesh is None else mesh
    if mesh is None:
        raise MeshError("axes.verify needs a mesh; pass mesh='dp=2 tp=2' or write it inside `with mesh:`")
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh= is an axes mesh or its declaration, like 'dp=2 tp=2'; found {shown(mesh)}")
    return mesh


def _job(
    program: Any, inputs: tuple[Any, ...], specs: Mapping[str, str] | None, rules: Rules | None, sizes: dict[str, int]
) -> Job:
    regions: dict[str, tuple[str, NamedSpecs]] = {}
    if isinstance(program, torch.nn.Module):
        specs = dict(specs or {})
        for name, spec in annotated(program).items():  # a copy of a parameter doesn't have them
            specs.setdefault(glob.escape(name), spec)
        program = copy.deepcopy(program)
        regions = without_regions(program)
    elif sizes:
        raise SizeError(f"sizes are for specs of a module; found {words(map(shown, sizes))} beside a function")
    return Job(program, inputs, (), regions, specs, rules, sizes)


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


def _call(mesh: Mesh, small: Mapping[str, int]) -> tuple[str, ...]:
    """The declaration and equations that make the mesh with small axes."""
    declared = mesh.declared
    if not set(small) <= set(declared) or any(name not in small and mesh.names[name] > 1 for name in declared):
        return (" ".join(f"{name}={size}" for name, size in small.items()),)  # of a sub-mesh its axes alone
    sizes = {name: small.get(name, 1) for name in declared}
    written = [" ".join(f"{name}={size}" for name, size in sizes.items())]
    for old, new in _equations(mesh, declared):
        product = old[0] if len(old) == 1 else f"({' '.join(old)})"
        parts = _divided(math.prod(sizes[name] for name in old), {name: mesh.names[name] for name in new})
        flat, split = f"{new[0]} = {' '.join(old)}", " ".join(f"{name}={size}" for name, size in parts.items())
        written.append(flat if len(new) == 1 else f"{product} = {split}")
    return tuple(written)


def _equations(mesh: Mesh, declared: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """The further names of a mesh: axes, and the names whose product is theirs."""
    rest = [name for name in mesh.namespace if name not in declared]
    while rest:
        new = next(([*rest[:count]] for count in range(1, len(rest) + 1) if _factors(mesh, rest[:count])), None)
        if new is not None:
            yield _factors(mesh, new), new
        rest = rest[len(new or rest[:1]) :]


def _factors(mesh: Mesh, names: Sequence[str]) -> list[str]:
    """The axes whose product is that of some names; none where it cuts an axis, or there is none."""
    try:
        return mesh.factored(Layout.product(*map(mesh.layout, names))) or []
    except MeshError:  # the names share ranks
        return []


def _divided(total: int, names: Mapping[str, int]) -> dict[str, int]:
    """Small sizes of names that split an axis of a small size; the first that isn't of size 1 takes what is left.

    >>> _divided(4, {"efsdp": 8, "ep": 4}), _divided(2, {"efsdp": 8, "ep": 4}), _divided(4, {"pp": 1, "ep": 4})
    ({'efsdp': 2, 'ep': 2}, {'efsdp': 1, 'ep': 2}, {'pp': 1, 'ep': 4})
    """
    first = next((name for name, size in names.items() if size > 1), next(iter(names)))
    found = dict.fromkeys(names, 1)
    for name in reversed([name for name in names if name != first]):
        found[name] = math.gcd(_small(names[name]), total)
        total //= found[name]
    return found | {first: total}


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
        differences: dict[tuple[str, str], Mismatch] = {}
        for small in sets:
            for each in self._on(small, one):
                differences.setdefault((each.name, each.what), each)
        compared = len(one.outputs) + sum(gradient is not None for gradient in one.gradients.values())
        if not compared:
            raise AxesError(
                "axes.verify has nothing to compare: the program returned no tensor and no number, and no parameter "
                "got a gradient; return outputs (a tensor, or a tuple, list, dict or dataclass of tensors), or "
                "(outputs, module)"
            )
        return Verification(tuple(differences.values()), tuple(map(_declared, sets)), compared, one.missed)

    def _launched(self, job: Job, small: Mapping[str, int]) -> list[Observed]:
        return launch(
            observe, math.prod(small.values()), replace(job, mesh=_call(self.mesh, small)), timeout=self.timeout
        )

    def _one(self) -> Observed:
        """The one device's run, in double precision where the program takes it. What works is remembered."""
        given, alone = self.job, dict.fromkeys(self.mesh.shape, 1)
        program, regions = given.program, given.regions
        if self.reference is not None:
            program = copy.deepcopy(self.reference)
            regions = without_regions(program) if isinstance(program, torch.nn.Module) else {}
        is_deferred = given.is_module and any(x.is_meta for x in given.program.parameters())
        plain = isinstance(program, torch.nn.Module) and not is_deferred
        reference = replace(given, program=program, regions=regions, plain=plain)
        try:
            self.job = _in_double(given)
            return self._launched(_in_double(reference), alone)[0]
        except RuntimeError as error:
            if "dtype" not in str(error) and "type" not in str(error):
                raise
            self.job = replace(given, double=False)
            return self._launched(replace(reference, double=False), alone)[0]
        except AxesError:
            if not plain or self.reference is not None:
                raise
            return self._launched(self.job, alone)[0]

    def _on(self, small: Mapping[str, int], one: Observed) -> list[Mismatch]:
        """What differs on a small mesh.

        Where axes aren't known, those of a difference are the ones of which it is gone where they have size one.
        """
        found = self._judged(small, one)
        large = {name: size for name, size in small.items() if size > 1}
        forward = any(each.what in ("module", "value") for each in found)  # the rest follows from that
        first = [each for each in found if not forward or each.what in ("module", "value")]
        if not any(not each.axes and each.kind in _OF_AXES for each in first):
            return found
        gone: dict[tuple[str, str], tuple[str, ...]] = {(each.name, each.what): () for each in found}
        for axis in large:
            try:
                left = self._judged({**small, axis: 1}, one)
            except Exception:  # a program that can't do without the axis: nothing is known of it then
                continue
            there = {(each.name, each.what): each.factor for each in left}
            for each in found:
                key = each.name, each.what
                if key not in there or not _same_factor(each.factor, there[key]):
                    gone[key] = (*gone[key], axis)
        return [_over(each, gone[each.name, each.what], large) for each in found]

    def _judged(self, small: Mapping[str, int], one: Observed) -> list[Mismatch]:
        return judged(Mesh(_declared(small)), self._launched(self.job, small), one, self.rtol, self.atol)


def _declared(small: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in small.items())


def _in_double(job: Job) -> Job:
    def kept(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return x.detach().double().requires_grad_(x.requires_grad)

    return replace(job, inputs=torch_private.mapped(kept, job.inputs), double=True)


def _same_factor(one: float | None, other: float | None) -> bool:
    return one is None or (other is not None and math.isclose(one, other, rel_tol=1e-6))


_OF_AXES = ("factor", "every", "added", "none", "differs", "order")


def _over(difference: Mismatch, gone: tuple[str, ...], sizes: Mapping[str, int]) -> Mismatch:
    """The difference with its axes: those without which it is gone."""
    if difference.axes or difference.kind not in _OF_AXES or not gone:
        return difference
    if difference.kind in ("factor", "every", "added"):
        possible = axes_of_factor(difference.factor or 1.0, sizes)
        axes = next((each for each in possible if set(each) == set(gone)), None)
        axes = axes or next((each for each in possible if set(each) <= set(gone)), ())
        if axes or difference.kind == "added":
            return replace(difference, axes=axes)
        return replace(difference, text=f"{difference.text} (right where {words(gone)} has size 1)")
    return replace(difference, text=f"{difference.text}; right where {words(gone)} has size 1", axes=gone)
