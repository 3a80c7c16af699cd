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
import re
from collections.abc import Callable, Iterator, Mapping
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
from axes.algebra.logical import Rules, use_rules
from axes.algebra.mesh import Mesh
from axes.extension import local
from axes.nn.shard_module import shard_module
from axes.nn.verify_diagnosis import TRUTH, Piece, is_rounded
from axes.ops.arguments import NamedSpecs
from axes.ops.module_regions import without_same
from axes.ops.regions import read_region
from axes.ops.shard_map import shard_map
from axes.runtime import torch_private
from axes.runtime.groups import destroy_process_groups
from axes.runtime.sharded import shard_on_mesh, sharding_of
from axes.runtime.world import init_mesh

_HOOKS = 1_000_000
"""A module that comes from another process has hooks under that one's numbers, which new hooks mustn't get here."""

SEED = 1234
"""The seed that every rank gives torch before the program makes its parameters."""


@dataclass(frozen=True)
class Job:
    """What a rank runs.

    program: a function, or a module without its regions, which `regions` has by name. mesh: the declaration and
    equations of `init_mesh`. plain: a module stays as it is, on one device. double: in double precision.
    """

    program: Any
    inputs: tuple[Any, ...]
    mesh: tuple[str, ...] = ()
    regions: Mapping[str, tuple[str, NamedSpecs]] = field(default_factory=dict)
    specs: Mapping[str, str] | None = None
    rules: Rules | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    plain: bool = False
    double: bool = True

    @property
    def is_module(self) -> bool:
        """Whether the program is a module, whose backward starts from all outputs."""
        return isinstance(self.program, torch.nn.Module)


@dataclass
class Observed:
    """What one rank saw. Tensors are under names: of outputs, of parameters; of modules' outputs in order.

    begun: parameters where the model is first called. dropped, dropped_outputs: the modules' outputs and the program's
    with dropout, where there is any.
    drawn: which random numbers a module draws, by the module's output that is done next. kinds: classes of modules.
    ties: names of one parameter. narrow: the narrowest dtype of what was computed, where that is narrower than double
    precision. missed: what can't be compared, in words.
    """

    outputs: dict[str, Piece] = field(default_factory=dict)
    values: dict[str, Piece] = field(default_factory=dict)
    gradients: dict[str, Piece | None] = field(default_factory=dict)
    modules: dict[str, Piece] = field(default_factory=dict)
    begun: dict[str, Piece] = field(default_factory=dict)
    dropped: dict[str, Piece] = field(default_factory=dict)
    dropped_outputs: dict[str, Piece] = field(default_factory=dict)
    drawn: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    ties: list[tuple[str, ...]] = field(default_factory=list)
    narrow: torch.dtype | None = None
    missed: tuple[str, ...] = ()


def observe(job: Job) -> Observed:
    """Run a job on this rank, in a world as large as its mesh."""
    RemovableHandle.next_id += _HOOKS
    if job.double:
        torch.set_default_dtype(torch.float64)
    rules = contextlib.nullcontext() if job.rules is None else use_rules(job.rules)
    with rules, init_mesh(*job.mesh, device_type="cpu") as mesh:
        dropout = _Dropout(off=True)
        seen = _run(job, mesh, dropout)
        if dropout.met:
            dropped = _run(job, mesh, _Dropout(off=False))
            seen.dropped, seen.dropped_outputs = dropped.modules, dropped.outputs
    destroy_process_groups()
    return seen


def _run(job: Job, mesh: Mesh, dropout: _Dropout) -> Observed:
    torch.manual_seed(SEED)
    watch = dropout.watch = _Watch(mesh)
    module: torch.nn.Module | None = None
    leaves: dict[str, torch.Tensor] = {}
    if job.is_module:  # outside of `dropout`: the program doesn't compute what makes it
        module, leaves, inputs = _module_on(job, mesh)
    else:
        inputs = torch_private.mapped(_own, job.inputs)
    with dropout, watch:
        if module is not None:
            result = module(*inputs)
        else:
            result = job.program(*inputs, **({"mesh": mesh} if _takes_mesh(job.program) else {}))
            if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], torch.nn.Module):
                result, module = result
        outputs = _outputs_in(result)
        roots = {"": module} if module is not None else watch.named_roots()
        _reshard(roots)
        if not any(x.grad is not None for root in roots.values() for x in root.parameters()):
            _backward(outputs, roots, job.is_module)
    seen = Observed({name: piece_of(x, mesh) for name, x in outputs.items()}, narrow=dropout.narrow)
    names: dict[int, list[str]] = {}
    for prefix, root in roots.items():
        for name, x in root.named_parameters(remove_duplicate=False):
            leaves[_joined(prefix, name)] = x
            names.setdefault(id(x), []).append(_joined(prefix, name))
    for name, x in leaves.items():
        seen.values[name] = piece_of(x, mesh)
        if id(x) in watch.begun:
            seen.begun[name] = watch.begun[id(x)]
        if x.requires_grad:
            seen.gradients[name] = None if x.grad is None else piece_of(x.grad, mesh)
    seen.ties = [tuple(each) for each in names.values() if len(each) > 1]
    seen.modules, seen.drawn = watch.named(roots)
    seen.kinds = {name: type(each).__name__ for name, each in _modules(roots)}
    seen.missed = tuple(_missed(job, seen, inputs, roots, watch.roots))
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


def _missed(
    job: Job, seen: Observed, inputs: Any, roots: Mapping[str, torch.nn.Module], called: list[torch.nn.Module]
) -> Iterator[str]:
    """What of a program can't be compared."""
    if seen.gradients and not any(seen.gradients.values()):
        yield "gradients, since the program leaves none and returns no scalar from which backward could start"
    if job.is_module:
        return
    yield from (f"the gradient of {name}" for name, x in named_tensors(inputs, "inputs") if x.requires_grad)
    known = {id(x) for root in roots.values() for x in root.parameters()}
    for module in called:
        if any(id(x) not in known for x in module.parameters()):
            kind = type(module).__name__
            yield f"the parameters of {kind}, which is called but not part of the module that is returned"


# --- modules


def _module_on(job: Job, mesh: Mesh) -> tuple[torch.nn.Module, dict[str, torch.Tensor], tuple[Any, ...]]:
    """A copy of the module, sharded unless it is to stay plain; its inputs that need gradients; all its inputs."""
    module: torch.nn.Module = copy.deepcopy(job.program)
    if job.double:
        module.double()
    if not job.plain:
        shard_module(module, job.specs, mesh, job.rules, sizes=job.sizes)
        for name, (expression, named) in job.regions.items():
            shard_map(module.get_submodule(name), expression, **named.keywords())
    told: Iterator[Any] = iter(())
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
        if x.requires_grad:
            leaves[f"input {place}"] = made.requires_grad_()
        return made

    return module, leaves, torch_private.mapped(entering, job.inputs)


def _backward(outputs: Mapping[str, torch.Tensor], roots: Mapping[str, torch.nn.Module], is_module: bool) -> None:
    """Start backward: from all outputs of a module, from the scalars of a function."""
    starts = [x for x in outputs.values() if x.grad_fn is not None and is_rounded(x) and x.layout == torch.strided]
    starts = [x for x in starts if is_module or x.numel() == 1]
    if not starts:
        return
    try:
        torch.autograd.backward(starts, [_weights(x) for x in starts])
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        for root in roots.values():  # the program has been through the graph, and dropped the gradients
            root.zero_grad(set_to_none=True)
        _reshard(roots)


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
    inside: list[tuple[str, Any]] = []
    if isinstance(tree, Mapping):
        inside = [(f"[{key!r}]", x) for key, x in tree.items()]
    elif not isinstance(tree, torch.Tensor) and (children := torch_private.children_of(tree)) is not None:
        inside = [(f"[{i}]", x) for i, x in enumerate(children)]
    elif is_dataclass(tree) and not isinstance(tree, type):
        inside = [(f".{each.name}", getattr(tree, each.name)) for each in fields(tree)]
    else:
        yield name, tree
    for key, x in inside:
        yield from _leaves_in(x, name + key)


def piece_of(x: torch.Tensor, mesh: Mesh) -> Piece:
    """A tensor as this rank has it now, for the launching process."""
    if not isinstance(x, DTensor):
        return Piece(_comparable(x))
    there, coordinate = x.device_mesh.mesh, x.device_mesh.get_coordinate()
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
    index = sharding_of(x).local_indices(tuple(x.shape))
    return Piece(_comparable(local(x)), tuple(x.shape), index, known)


def _comparable(x: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, dense and in a dtype in which differences can be computed."""
    if x.is_nested:
        raise AxesError("axes.verify can't compare nested tensors; return x.to_padded_tensor(0.0) instead")
    x = x.detach() if x.layout == torch.strided else x.detach().to_dense()
    if not is_rounded(x):
        return x.to(TRUTH if x.dtype == torch.bool else torch.int64, copy=True)
    return x.to(torch.float32 if x.itemsize == 1 else x.dtype, copy=True)


# --- watching


class _Watch:
    """Notes the outputs of all modules that run, in the order in which they are done."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.running: list[torch.nn.Module] = []
        self.roots: list[torch.nn.Module] = []
        self.begun: dict[int, Piece] = {}
        self._drawn: tuple[str, torch.nn.Module] | None = None
        self._notes: list[tuple[torch.nn.Module, str, Piece, tuple[str, torch.nn.Module] | None]] = []
        self._handles: dict[int, Any] = {}

    def __enter__(self) -> _Watch:
        self._handle = register_module_forward_pre_hook(self._before)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in (self._handle, *self._handles.values()):
            handle.remove()

    def _before(self, module: torch.nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # what a graph computes inside isn't seen
        if id(module) not in self._handles:  # behind the hooks that the program itself has put there
            self._handles[id(module)] = module.register_forward_hook(self._after)
        if not self.running and not any(module is root for root in self.roots):
            self.roots.append(module)
            for x in module.parameters():
                self.begun.setdefault(id(x), piece_of(x, self.mesh))
        self.running.append(module)

    def _after(self, module: torch.nn.Module, _: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        while self.running and self.running.pop() is not module:  # one that raised has no end
            pass
        with torch.no_grad():
            for name, x in named_tensors(result, ""):
                if is_rounded(x) and not x.is_nested:
                    self._notes.append((module, name, piece_of(x, self.mesh), self._drawn))

    def note_draw(self, func: Any) -> None:
        """Note that a function draws random numbers in the module that runs."""
        self._drawn = getattr(func, "__name__", "a function"), self.running[-1]

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

    def named(self, roots: Mapping[str, torch.nn.Module]) -> tuple[dict[str, Piece], dict[str, str]]:
        """The outputs by the modules' names, with numbers for what runs several times; the last draws before each."""
        names = {id(module): name for name, module in reversed(list(_modules(roots)))}
        found: dict[str, Piece] = {}
        drawn: dict[str, str] = {}
        for module, inside, piece, draw in self._notes:
            if id(module) in names:
                name, calls = names[id(module)] + inside, 1
                while (key := name if calls == 1 else f"{name} (call {calls})") in found:
                    calls += 1
                found[key] = piece
                if draw is not None:
                    drawn[key] = f"{draw[0]} in {names.get(id(draw[1])) or 'the model'} ({type(draw[1]).__name__})"
        return found, drawn


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

    narrow: the narrowest dtype of what was computed from tensors, where that is narrower than double precision. watch:
    gets to know of functions that draw random numbers in a module all the same.
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
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        before = torch.default_generator.get_state() if self.watch is not None and self.watch.running else None
        found = func(*args, **kwargs)
        # What axes draws, as a seed of its dropout, is integers and the same on every mesh.
        if before is not None and func is not torch.randint and not before.equal(torch.default_generator.get_state()):
            self.watch.note_draw(func)  # type: ignore[union-attr]
        if isinstance(found, torch.Tensor) and is_rounded(found) and any(named_tensors((args, kwargs), "")):
            dtype = found.dtype.to_real()
            if dtype.itemsize < (8 if self.narrow is None else self.narrow.itemsize):
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
