"""One rank's part of `axes.verify`: run a program, and note what came of it.

    seen = observe(Job(program, (tokens,), mesh=("dp=2 tp=2",)))
    seen.outputs, seen.gradients, seen.modules          # tensors as this rank has them

The program is watched from outside: by hooks that torch calls around every module, and by the gradients that its
parameters have in the end. Dropout is off while it is judged, since no two meshes draw the same numbers for the same
places; where it would have been on, the program runs once more with it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from axes.algebra.errors import AxesError
from axes.algebra.grammar import Spec
from axes.algebra.logical import Rules, use_rules
from axes.algebra.mesh import Mesh
from axes.nn.diagnosis import TRUTH, Piece, Runs, error_of, is_rounded
from axes.nn.shard_module import shard_module
from axes.ops.arguments import NamedSpecs
from axes.ops.module_regions import without_same
from axes.ops.regions import read_region
from axes.ops.shard_map import shard_map
from axes.runtime import torch_private
from axes.runtime.check import waited
from axes.runtime.groups import destroy_process_groups
from axes.runtime.linear import count_writes
from axes.runtime.sharded import shard_on_mesh, sharding_of
from axes.runtime.world import init_mesh

_HOOKS = 1_000_000
"""A module that comes from another process has hooks under that one's numbers, which new hooks mustn't get here."""

SEED = 1234
"""What every rank gives torch before the program makes its parameters."""


@dataclass(frozen=True)
class Job:
    """What a rank runs.

    program: a function, or a module without its regions, which `regions` has by name. mesh: the declaration and
    equations of `init_mesh`. plain: a module stays as it is, on one device. weighted: backward
    starts from all outputs, not from scalars alone. again: values of parameters, by
    rank, to try instead of their own, a set at a time. uses: also note what each use of a parameter adds to its
    gradient. moved: a seed to move all numbers by a few of their last bits with (see `_Rounding`); 0 leaves them.
    """

    program: Any
    inputs: tuple[Any, ...]
    mesh: tuple[str, ...]
    regions: Mapping[str, tuple[str, NamedSpecs]] = field(default_factory=dict)
    specs: Mapping[str, str] | None = None
    rules: Rules | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    plain: bool = False
    weighted: bool = False
    double: bool = True
    uses: bool = False
    moved: int = 0
    again: tuple[Mapping[str, Sequence[torch.Tensor]], ...] = ()


@dataclass
class Observed:
    """What one rank saw. Tensors are under names: of outputs, of parameters; of modules' outputs in order.

    dropped: the modules' outputs with dropout, where there is any. ties: names of one parameter. kinds: classes of
    modules. trials: the runs with other values. begun: parameters where the model is first called. narrow: a dtype
    narrower than double precision in which something was computed. drawn: by the place among `modules` of the output
    that is done next which random numbers a module draws, other than those of dropout. started: whether backward was
    started here from outputs that are no scalars. missed: what can't be compared, in words. noise: how far rounding
    moves a tensor, under its kind ("outputs", "values", "gradients" or "modules") and name, where that was measured.
    """

    outputs: dict[str, Piece] = field(default_factory=dict)
    values: dict[str, Piece] = field(default_factory=dict)
    gradients: dict[str, Piece | None] = field(default_factory=dict)
    modules: dict[str, Piece] = field(default_factory=dict)
    dropped: dict[str, Piece] = field(default_factory=dict)
    ties: list[tuple[str, ...]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    uses: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    trials: list[Observed] = field(default_factory=list)
    begun: dict[str, Piece] = field(default_factory=dict)
    narrow: torch.dtype | None = None
    drawn: dict[int, str] = field(default_factory=dict)
    started: bool = False
    missed: tuple[str, ...] = ()
    noise: dict[tuple[str, str], float] = field(default_factory=dict)


def observe(job: Job) -> Observed:
    """Run a job on this rank, in a world as large as its mesh."""
    RemovableHandle.next_id += _HOOKS
    if job.double:
        torch.set_default_dtype(torch.float64)
    rules = contextlib.nullcontext() if job.rules is None else use_rules(job.rules)
    eager = torch.compiler.set_stance("force_eager") if job.moved else contextlib.nullcontext()  # to see operations
    with rules, eager, init_mesh(*job.mesh, device_type="cpu") as mesh:
        dropout = _Dropout(off=True)
        seen = _run(job, mesh, dropout)
        if dropout.met and not job.moved:
            seen.dropped = _run(job, mesh, _Dropout(off=False)).modules
        for values in job.again:
            own = {name: by_rank[mesh.rank] for name, by_rank in values.items()}
            seen.trials.append(Observed(modules=_run(job, mesh, _Dropout(off=True), own).modules))
    destroy_process_groups()
    return seen


def _run(job: Job, mesh: Mesh, dropout: _Dropout, values: Mapping[str, torch.Tensor] | None = None) -> Observed:
    torch.manual_seed(SEED)
    watch = dropout.watch = _Watch(mesh, values or {})
    uses = _Uses(watch) if job.uses else contextlib.nullcontext()
    rounding = _Rounding(job.moved) if job.moved else contextlib.nullcontext()
    module: torch.nn.Module | None = None
    leaves: dict[str, torch.Tensor] = {}
    inputs: tuple[Any, ...]
    if isinstance(job.program, torch.nn.Module):  # outside of `dropout`: the program doesn't compute what makes it
        module, leaves, inputs = _module_on(job, mesh)
    else:
        inputs = torch_private.mapped(_own, job.inputs)
    if isinstance(rounding, _Rounding):
        rounding.move_all((inputs, [] if module is None else [*module.parameters(), *module.buffers()]))
    with dropout, uses, watch, rounding:
        if module is not None:
            result = module(*inputs)
        else:
            told = {"mesh": mesh} if _takes_mesh(job.program) else {}
            result, module = _told_apart(job.program(*inputs, **told))
        outputs = _outputs_in(result)
        roots = {"": module} if module is not None else watch.named_roots()
        _reshard(roots)
        started = False
        if not any(x.grad is not None for root in roots.values() for x in root.parameters()):
            started = _backward(outputs, roots, job.weighted)
    seen = Observed(outputs={name: piece_of(x, mesh) for name, x in outputs.items()}, started=started)
    _note_parameters(seen, roots, mesh)
    seen.missed = tuple(_missed(job, seen, outputs, inputs, roots, watch.roots))
    for name, leaf in leaves.items():
        seen.values[name] = piece_of(leaf, mesh)
        seen.gradients[name] = None if leaf.grad is None else piece_of(leaf.grad, mesh)
    seen.modules, seen.begun, seen.narrow = watch.named(roots), watch.begun(roots), dropout.narrow
    seen.drawn = watch.drawn(roots)
    if isinstance(uses, _Uses):
        seen.uses = uses.gradients(roots)
    seen.kinds = {name: type(each).__name__ for name, each in _modules(roots)}
    return seen


def _reshard(roots: Mapping[str, torch.nn.Module]) -> None:
    """Have the modules of `fully_shard` say their sharded parameters, which have the gradients.

    After a forward pass without a backward one, the outermost of them keeps its parameters whole.
    """
    for root in roots.values():
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _takes_mesh(program: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `mesh`."""
    try:
        return "mesh" in inspect.signature(program).parameters
    except (TypeError, ValueError):  # what has no signature takes inputs alone
        return False


def _own(x: Any) -> Any:
    """A tensor that a run may change or differentiate, without a trace in the next run."""
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def _told_apart(result: Any) -> tuple[Any, torch.nn.Module | None]:
    """What a program returned: outputs, or outputs and the module."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], torch.nn.Module):
        return result
    return result, None


# --- modules


def _module_on(job: Job, mesh: Mesh) -> tuple[torch.nn.Module, dict[str, torch.Tensor], tuple[Any, ...]]:
    """A copy of the module, sharded unless it is to stay plain; its inputs that need gradients; all its inputs."""
    module: torch.nn.Module = copy.deepcopy(job.program)
    if job.double:
        module.double()
    if not job.plain or any(x.is_meta for x in module.parameters()):
        shard_module(module, job.specs, mesh, job.rules, sizes=job.sizes)
    if not job.plain:
        for name, (expression, named) in job.regions.items():
            shard_map(module.get_submodule(name), expression, **named.keywords())
    else:
        _make_plain(module)
    told: Iterator[Spec] = iter(())
    if "" in job.regions:
        expression, named = job.regions[""]
        told = iter(read_region(named.of_call(expression, job.inputs, {})).inputs)
    leaves: dict[str, torch.Tensor] = {}
    places = itertools.count()

    def entering(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        spec, place = next(told, None), next(places)
        whole = x.detach()
        made = whole if job.plain else shard_on_mesh(whole, "..." if spec is None else without_same(spec), mesh)
        x = made.requires_grad_(x.requires_grad)
        if x.requires_grad:
            leaves[f"input {place}"] = x
        return x

    inputs = torch_private.mapped(entering, job.inputs)
    return module, leaves, inputs


def _make_plain(module: torch.nn.Module) -> None:
    """Replace DTensors, of a mesh of one rank, by plain parameters; one that is tied stays so."""
    made: dict[int, torch.Tensor] = {}
    for holder in module.modules():
        for there in (holder._parameters, holder._buffers):
            for name, x in there.items():
                if isinstance(x, DTensor):
                    local = x.to_local().detach()
                    kept = torch.nn.Parameter(local, x.requires_grad) if isinstance(x, torch.nn.Parameter) else local
                    there[name] = made.setdefault(id(x), kept)  # type: ignore[assignment]


def _backward(outputs: Mapping[str, torch.Tensor], roots: Mapping[str, torch.nn.Module], by_weights: bool) -> bool:
    """Start backward: from a program's scalars, else from what it returns; from all outputs of a module.

    Returns whether it started from outputs of a program that are no scalars.
    """
    starts = [x for x in outputs.values() if x.grad_fn is not None and is_rounded(x) and x.layout == torch.strided]
    scalars = [x for x in starts if x.numel() == 1]
    cotangents = [_weights(x) if by_weights or isinstance(x, DTensor) else _slopes(x) for x in starts]
    if scalars and not by_weights:
        starts, cotangents = scalars, [_weights(x) for x in scalars]
    if not starts:
        return False
    try:
        torch.autograd.backward(starts, cotangents)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        for root in roots.values():  # the program has been through the graph, and dropped the gradients
            root.zero_grad(set_to_none=True)
        _reshard(roots)
        return False
    return not scalars and not by_weights


def _weights(x: torch.Tensor) -> torch.Tensor:
    """Numbers that tell the elements apart, the same for the whole tensor on every mesh."""
    numbers = torch.arange(x.numel(), dtype=torch.float64) * 1.7 + 0.3
    weights = torch.cos(numbers) if x.ndim else torch.ones(1, dtype=torch.float64)
    if x.is_complex():  # both parts count
        weights = torch.complex(weights, 0.5 + weights.square())
    whole = weights.view(x.shape).to(x.dtype)
    if not isinstance(x, DTensor):
        return whole
    sharding = sharding_of(x)
    return shard_on_mesh(whole, sharding.spec.partition("|")[0].strip(), sharding.mesh)


def _slopes(x: torch.Tensor) -> torch.Tensor:
    """A number for each element that follows from its value alone, however a plain tensor may be split.

    It isn't the same for all elements: the sum of a softmax has no gradient.
    """
    y = x.detach()
    return 1 + (y / (1 + y.abs())).nan_to_num(nan=0.0)


def _missed(
    job: Job,
    seen: Observed,
    outputs: Mapping[str, torch.Tensor],
    inputs: Any,
    roots: Mapping[str, torch.nn.Module],
    called: Sequence[torch.nn.Module],
) -> Iterator[str]:
    """What of a program can't be compared."""
    parameters = [x for root in roots.values() for x in root.parameters()]
    if any(x.requires_grad for x in parameters) and not any(x.grad is not None for x in parameters):
        yield "gradients, since the program leaves none and backward can't start from what it returns"
    if isinstance(job.program, torch.nn.Module):
        return
    known = {id(x) for x in parameters}
    given = {id(x): name for name, x in named_tensors(inputs, "inputs") if x.requires_grad}
    if seen.started and any(x.grad is not None for x in parameters):
        yield "whether gradients are summed over ranks, since the program runs no backward"
    yield from (f"the gradient of {name}" for name in given.values())
    others = [module for module in called if any(id(x) not in known for x in module.parameters())]
    for module in others:
        yield f"the parameters of {type(module).__name__}, which is called but not part of the module that is returned"
        known |= {id(x) for x in module.parameters()}
    if any(isinstance(module, FSDPModule) for root in roots.values() for module in root.modules()):
        return  # whose graph has other tensors than the parameters
    leaves = sum(id(x) not in known and id(x) not in given for x in _leaves_of(outputs.values()))
    if leaves:
        yield f"the gradients of what belongs to no module that is called or returned (tensors: {leaves})"


def _leaves_of(outputs: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors from which outputs are computed, as far as backward knows."""
    nodes = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            yield leaf
        more = {each for each, _ in node.next_functions if each is not None} - seen
        nodes += more
        seen |= more


def _note_parameters(seen: Observed, roots: Mapping[str, torch.nn.Module], mesh: Mesh) -> None:
    names: dict[int, list[str]] = {}
    for prefix, root in roots.items():
        for name, x in root.named_parameters(remove_duplicate=False):
            named = _joined(prefix, name)
            names.setdefault(id(x), []).append(named)
            seen.values[named] = piece_of(x, mesh)
            if x.requires_grad:
                seen.gradients[named] = None if x.grad is None else piece_of(x.grad, mesh)
    seen.ties = [tuple(each) for each in names.values() if len(each) > 1]


_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")


def _joined(prefix: str, name: str) -> str:
    return _WRAPPERS.sub("", ".".join(filter(None, (prefix, name))))


def _modules(roots: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    for prefix, root in roots.items():
        for name, module in root.named_modules():
            yield _joined(prefix, name), module


# --- tensors


def named_tensors(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tree under names: `output`, `output[0]`, `output['loss']`."""
    return ((each, x) for each, x in _leaves_in(tree, name) if isinstance(x, torch.Tensor))


def _outputs_in(tree: Any) -> dict[str, torch.Tensor]:
    """The tensors and Python's numbers of what a program returns, under names."""
    found = {}
    for name, x in _leaves_in(tree, "output"):
        if isinstance(x, torch.Tensor):
            found[name] = x
        elif isinstance(x, bool | float | complex) or (isinstance(x, int) and -(2**63) <= x < 2**63):
            found[name] = torch.tensor(x)
    return found


def _leaves_in(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, x in tree.items():
            yield from _leaves_in(x, f"{name}[{key!r}]")
    elif (children := torch_private.children_of(tree)) is not None:
        for i, x in enumerate(children):
            yield from _leaves_in(x, f"{name}[{i}]")
    elif is_dataclass(tree) and not isinstance(tree, type):
        for each in fields(tree):
            yield from _leaves_in(getattr(tree, each.name), f"{name}.{each.name}")
    else:
        yield name, tree


def piece_of(x: torch.Tensor, mesh: Mesh) -> Piece:
    """A tensor as this rank has it now, for the launching process."""
    if not isinstance(x, DTensor):
        return Piece(_comparable(x))
    local = _comparable(waited(torch_private.local_of(x)))
    there = x.device_mesh.mesh
    coordinate = x.device_mesh.get_coordinate()
    assert coordinate is not None
    known: dict[str, str] = {}
    for name in mesh.axis_names:
        ranks = set(mesh.axis(name).ranks)
        if len(ranks) > 1 and ranks <= set(there.flatten().tolist()):
            known[name] = ""
            for dim, placement in enumerate(x.placements):
                along = there[tuple(slice(None) if i == dim else c for i, c in enumerate(coordinate))]
                if placement.is_partial() and ranks & set(along.tolist()) - {mesh.rank}:
                    known[name] = str(getattr(placement, "reduce_op", "sum"))
    shape = tuple(x.shape)
    index = tuple(_runs(each) for each in sharding_of(x).local_indices(shape))
    return Piece(local, shape, index, known)


def _comparable(x: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, dense and in a dtype in which differences can be computed."""
    if x.is_nested:
        raise AxesError("axes.verify can't compare nested tensors; return x.to_padded_tensor(0.0) instead")
    x = x.detach()
    if x.layout != torch.strided:
        x = x.to_dense()
    if x.dtype == torch.bool:
        return x.to(TRUTH)
    if x.is_floating_point():
        return x.to(torch.float32 if x.itemsize == 1 else x.dtype, copy=True)
    return x.to(x.dtype if x.is_complex() else torch.int64, copy=True)


def _runs(indices: slice | tuple[slice, ...]) -> Runs:
    return tuple((run.start, run.stop) for run in ((indices,) if isinstance(indices, slice) else indices))


# --- watching


class _Watch:
    """Notes the outputs of all modules that run, in the order in which they are done."""

    def __init__(self, mesh: Mesh, values: Mapping[str, torch.Tensor]):
        self.mesh, self._values = mesh, values
        self.running: list[torch.nn.Module] = []
        self.roots: list[torch.nn.Module] = []
        self._draws: list[tuple[int, torch.nn.Module, str]] = []
        self._notes: list[tuple[torch.nn.Module, str, Piece]] = []
        self._handles: dict[int, Any] = {}
        self._begun: dict[int, Piece] = {}

    def __enter__(self) -> _Watch:
        self._handle = register_module_forward_pre_hook(self._before)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
        for handle in self._handles.values():
            handle.remove()

    def _before(self, module: torch.nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # what a graph computes inside isn't seen
        if id(module) not in self._handles:  # behind the hooks that the program itself has put there
            self._handles[id(module)] = module.register_forward_hook(self._after)
        if not self.running and not any(module is root for root in self.roots):
            self.roots.append(module)
            self._replace(module)
            for x in module.parameters():
                self._begun.setdefault(id(x), piece_of(x, self.mesh))
        self.running.append(module)

    def _replace(self, module: torch.nn.Module) -> None:
        """Put other values into the parameters, which the program has made and not yet used."""
        with torch.no_grad():
            for name, x in module.named_parameters():
                value = self._values.get(_joined("", name))
                if value is not None:
                    (torch_private.local_of(x) if isinstance(x, DTensor) else x).copy_(value)
                    count_writes([x])

    def _after(self, module: torch.nn.Module, _: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        while self.running and self.running.pop() is not module:  # one that raised has no end
            pass
        with torch.no_grad():
            for name, x in named_tensors(result, ""):
                if is_rounded(x) and not x.is_nested:
                    self._notes.append((module, name, piece_of(x, self.mesh)))

    def note_draw(self, func: Any) -> None:
        """Note that a function draws random numbers in the module that runs."""
        self._draws.append((len(self._notes), self.running[-1], getattr(func, "__name__", "a function")))

    def drawn(self, roots: Mapping[str, torch.nn.Module]) -> dict[int, str]:
        """By the place of the output that is done next which random numbers are drawn before it, in words."""
        names = {id(module): name for name, module in reversed(list(_modules(roots)))}
        known = [id(module) in names for module, *_ in self._notes]
        return {
            sum(known[:place]): f"{name} in {names.get(id(module)) or 'the model'} ({type(module).__name__})"
            for place, module, name in self._draws
        }

    def named_roots(self) -> dict[str, torch.nn.Module]:
        """The modules that no other called: one has no name, several are named by their classes."""
        inner = {id(x) for root in self.roots for x in root.modules() if x is not root}
        roots = [root for root in self.roots if id(root) not in inner]
        if len(roots) < 2:
            return dict(zip([""], roots, strict=False))
        named: dict[str, torch.nn.Module] = {}
        for root in roots:
            kind = type(root).__name__.removeprefix("FSDP")
            named[kind if kind not in named else f"{kind}-{len(named)}"] = root
        return named

    def begun(self, roots: Mapping[str, torch.nn.Module]) -> dict[str, Piece]:
        """The parameters as they were where a root was first called."""
        named = [(_joined(prefix, name), x) for prefix, root in roots.items() for name, x in root.named_parameters()]
        return {name: self._begun[id(x)] for name, x in named if id(x) in self._begun}

    def named(self, roots: Mapping[str, torch.nn.Module]) -> dict[str, Piece]:
        """The outputs by the modules' names, with numbers for what runs several times."""
        names = {id(module): name for name, module in reversed(list(_modules(roots)))}
        found: dict[str, Piece] = {}
        for module, inside, piece in self._notes:
            if id(module) in names:
                name, calls = names[id(module)] + inside, 1
                while (key := name if calls == 1 else f"{name} (call {calls})") in found:
                    calls += 1
                found[key] = piece
        return found


_DROPOUTS: dict[Any, tuple[str, int, float]] = {
    **dict.fromkeys(
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout),
        ("p", 1, 0.5),
    ),
    F.scaled_dot_product_attention: ("dropout_p", 4, 0.0),
    F.multi_head_attention_forward: ("dropout_p", 10, 0.0),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), ("dropout", 5, 0.0)),
}
"""Functions that drop elements: the name of the probability, its place among the arguments, and its default.

What torch calls inside of its own functions isn't seen, so that one which drops inside stands here itself.
"""


class _Dropout(TorchFunctionMode):
    """Lets dropout pass its input where it is off; `met` tells whether anything would have been dropped.

    narrow: the narrowest dtype of what was computed, where that is narrower than double precision. watch: whom to tell
    of functions that draw random numbers in a module all the same.
    """

    def __init__(self, off: bool):
        super().__init__()
        self.off, self.met = off, False
        self.narrow: torch.dtype | None = None
        self.watch: _Watch | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            args, kwargs = self._dropping(func, args, kwargs)
        watched = not torch.compiler.is_compiling() and self.watch is not None and self.watch.running
        before = torch.default_generator.get_state() if watched else None
        found = func(*args, **kwargs)
        # What axes draws, as a seed of its dropout, is integers and the same on every mesh.
        if before is not None and func is not torch.randint and not before.equal(torch.default_generator.get_state()):
            self.watch.note_draw(func)  # type: ignore[union-attr]
        if isinstance(found, torch.Tensor) and is_rounded(found):
            dtype = _REAL.get(found.dtype, found.dtype)
            narrower = dtype.itemsize < (8 if self.narrow is None else self.narrow.itemsize)
            if narrower and not _is_exact(found, (args, kwargs)):
                self.narrow = dtype
        return found

    def _dropping(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of a function that drops elements: with probability 0 where dropout is off."""
        name, place, default = _DROPOUTS[func]
        if name == "dropout" and not isinstance(args[3], bool):  # of a packed sequence, which has its sizes before it
            place += 1
        self.met = self.met or bool(args[place] if len(args) > place else kwargs.get(name, default))
        if not self.off:
            return args, kwargs
        if len(args) > place:
            return (*args[:place], 0.0, *args[place + 1 :]), kwargs
        return args, kwargs | {name: 0.0}


_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
"""The dtypes of complex numbers' parts: torch.compile can't trace `dtype.to_real`."""


def _is_exact(found: torch.Tensor, given: Any) -> bool:
    """Whether a result has no rounding error: it is made of no tensor, or is all small whole numbers, as a mask."""
    if torch.compiler.is_compiling() or type(found) is not torch.Tensor or found.is_complex():
        return False
    if next(named_tensors(given, ""), None) is None:
        return True
    x = found.detach()
    try:
        whole, limit = (x == x.round()) & (x.abs() <= 256), x.abs() >= torch.finfo(x.dtype).max
        return bool((whole | limit).all())
    except RuntimeError:  # under vmap, or without values
        return False


class _Rounding(torch_private.DispatchMode):
    """Moves inputs, a module's parameters and the result of every operation, forward and backward, by a few last bits.

    How far a tensor then is from its value without this mode tells how large its rounding errors may be. Inputs and
    parameters alone wouldn't do: a function makes its parameters by itself, and in bfloat16 few of them move by so
    little that the same experts are chosen.

    Numbers of few bits (zero, 0.5, the -1e9 of a mask) stay as they are: programs compare and count them.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)  # the program's own draws the same numbers as ever

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # first what it does to its local tensors
        found = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") == "aten" and not torch_private.is_view(func):
            self.move_all(found)
        return found

    def move_all(self, tree: Any) -> None:
        """Move the tensors of a tree in place."""
        with torch.no_grad():
            for _, x in named_tensors(tree, ""):
                self._move(torch_private.local_of(x) if isinstance(x, DTensor) else x)

    def _move(self, x: torch.Tensor) -> None:
        plain = type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_nested and not x.is_meta
        if not plain or x.layout != torch.strided or not is_rounded(x):
            return
        if x.is_complex():
            x = torch.view_as_real(x)
        limits, wide = torch.finfo(x.dtype), x.double()
        half = 2.0 ** (-math.log2(limits.eps) // 2)
        parts = torch.frexp(wide).mantissa * half
        stays = (parts == parts.round()) | ~(wide.abs() < limits.max / 2)
        by = torch.rand(x.shape, generator=self._generator, dtype=wide.dtype) * 2 - 1
        x.copy_(torch.where(stays, wide, wide * (1 + _MOVED.get(x.dtype, 0.5) * limits.eps * by)))


_MOVED = {torch.float64: 16, torch.float32: 4}
"""By how many units in the last place a number is moved at most, to measure how far rounding moves a result.

A larger move is less likely to leave a sum as it was by chance. In a narrow dtype it would choose other experts.
"""


def moved_by(one: Observed, other: Observed) -> dict[tuple[str, str], float]:
    """How far the tensors of two runs on one device are apart; none of what isn't in both or has other shapes."""
    found: dict[tuple[str, str], float] = {}
    for kind in ("outputs", "values", "gradients", "modules"):
        there = getattr(other, kind)
        for name, piece in getattr(one, kind).items():
            moved = there.get(name)
            if piece is None or moved is None or piece.local.shape != moved.local.shape:
                continue
            error = error_of(piece.local, moved.local)
            if error < math.inf:
                found[kind, name] = error
    return found


class _Uses(TorchFunctionMode):
    """Notes what each use of a parameter adds to its gradient: a function gets an alias of it, which has a hook."""

    def __init__(self, watch: _Watch):
        super().__init__()
        self._watch = watch
        self._notes: list[tuple[torch.Tensor, torch.nn.Module | None, list[torch.Tensor]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "__get__")
        if torch.is_grad_enabled() and not name.startswith("__get") and not name.endswith("_") and name != "backward":
            args, kwargs = torch_private.mapped(self._alias, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _alias(self, x: Any) -> Any:
        if not (isinstance(x, torch.nn.Parameter) and x.is_leaf and x.requires_grad):
            return x
        noted: list[torch.Tensor] = []
        alias = x.view_as(x)
        alias.register_hook(noted.append)
        self._notes.append((x, self._watch.running[-1] if self._watch.running else None, noted))
        return alias

    def gradients(self, roots: Mapping[str, torch.nn.Module]) -> dict[str, dict[str, torch.Tensor]]:
        """By parameter and module what the parameter's gradient is through the module."""
        modules = {id(module): name for name, module in reversed(list(_modules(roots)))}
        found: dict[str, dict[str, torch.Tensor]] = {}
        for prefix, root in roots.items():
            for name, parameter in root.named_parameters(remove_duplicate=False):
                through: dict[str, torch.Tensor] = {}
                for x, module, noted in self._notes:
                    if x is parameter and noted:
                        where = modules.get(id(module)) or "the model"
                        while where in through:
                            where += "'"
                        through[where] = sum(noted).detach().clone()  # type: ignore[union-attr]
                if len(through) > 1:
                    found[_joined(prefix, name)] = through
        return found
