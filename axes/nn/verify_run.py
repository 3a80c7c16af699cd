"""One rank's part of `axes.verify`: run a program, and note what came of it.

    seen = observe(Job(program, (tokens,), Mesh("dp=2 tp=2")))
    seen.outputs, seen.gradients, seen.modules          # tensors as this rank has them

The program is watched from outside: by hooks that torch calls around every module, and by the gradients that its
parameters have in the end. Dropout is off, since no two meshes draw the same numbers for the same places; the result
that it would have given is noted beside.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from axes import AxesError, Mesh, Rules, destroy_process_groups, init_mesh, shard, sharding_of, spec_of, use_rules
from axes.extension import dtensor, local, read, torch_private
from axes.nn.shard_module import shard_module
from axes.nn.verify_diagnosis import TRUTH, Piece, elements_at, is_rounded

_HOOKS = 1_000_000
"""A module that comes from another process has hooks under that one's numbers, which new hooks mustn't get here."""

SEED = 1234
"""The seed that every rank gives torch before the program makes its parameters."""


@dataclass(frozen=True)
class Job:
    """What a rank runs.

    program: a function or a module. mesh: of the ranks 0, 1, ... specs, rules, sizes: what `shard_module` is told; a
    module whose specs are None stays plain. double: in double precision.
    """

    program: Any
    inputs: tuple[Any, ...]
    mesh: Mesh
    specs: Mapping[str, str] | None = None
    rules: Rules | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    double: bool = True


@dataclass
class Observed:
    """What one rank saw. Tensors are under names: of outputs, of parameters; of modules' outputs in order.

    values: parameters where the model is first called; stepped: the same after the program. kept, dropped: results of
    dropout where it is off, and where it is on, by the module that runs. kinds: classes of modules. narrow: the
    narrowest dtype of any result. missed: everything that can't be compared, in words.
    """

    outputs: dict[str, Piece] = field(default_factory=dict)
    values: dict[str, Piece] = field(default_factory=dict)
    stepped: dict[str, Piece] = field(default_factory=dict)
    gradients: dict[str, Piece | None] = field(default_factory=dict)
    modules: dict[str, Piece] = field(default_factory=dict)
    kept: dict[str, Piece] = field(default_factory=dict)
    dropped: dict[str, Piece] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    narrow: torch.dtype = torch.float64
    missed: tuple[str, ...] = ()


def observe(job: Job) -> Observed:
    """Run a job on this rank, in a world as large as its mesh."""
    RemovableHandle.next_id += _HOOKS
    if job.double:
        torch.set_default_dtype(torch.float64)
    with init_mesh(job.mesh, device_type="cpu") as mesh:
        seen = _run(job, mesh)
    destroy_process_groups()
    return seen


def _run(job: Job, mesh: Mesh) -> Observed:
    torch.manual_seed(SEED)
    module = job.program if isinstance(job.program, torch.nn.Module) else None
    inputs, leaves = _inputs_on(job, mesh)
    if module is not None and job.double:
        module.double()
    if module is not None and job.specs is not None:
        shard_module(module, job.specs, mesh, job.rules, sizes=job.sizes)
    watch = _Watch(mesh)
    with contextlib.nullcontext() if job.rules is None else use_rules(job.rules), watch:
        result = job.program(*inputs, **({"mesh": mesh} if module is None and _takes_mesh(job.program) else {}))
        if module is None and isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], torch.nn.Module):
            result, module = result
        outputs, module = _outputs_in(result), watch.root() if module is None else module
        if module is not None:
            _differentiate(outputs, module, module is job.program)
    seen = Observed({name: piece_of(x, mesh) for name, x in outputs.items()}, narrow=watch.narrow)
    leaves = leaves if module is job.program else {}
    for name, x in [] if module is None else module.named_parameters(remove_duplicate=False):
        leaves[_unwrapped(name)] = x
    for name, x in leaves.items():
        seen.values[name] = watch.begun.get(id(x)) or piece_of(x, mesh)
        if id(x) in watch.begun:
            seen.stepped[name] = piece_of(x, mesh)
        if x.requires_grad:
            seen.gradients[name] = None if x.grad is None else piece_of(x.grad, mesh)
    seen.modules, seen.kept, seen.dropped = (watch.named(kind, module) for kind in ("modules", "kept", "dropped"))
    seen.kinds = {name: type(each).__name__ for name, each in _modules(module)}
    seen.missed = tuple(_missed(job, seen, inputs, module, watch.roots))
    return seen


def _inputs_on(job: Job, mesh: Mesh) -> tuple[tuple[Any, ...], dict[str, torch.Tensor]]:
    """The inputs that this rank may change and differentiate, and those with gradients; of a module that is sharded
    DTensors, as its region declares them, else whole on every rank."""
    call = getattr(getattr(job.program, "forward", None), "region", None)
    text = "" if call is None else call.named.of_call(call.expression, job.inputs, {})
    specs = iter([str(replace(spec, pending=None)) for spec in read(text).operands] if text else [])
    leaves, places = dict[str, torch.Tensor](), itertools.count()

    def entering(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        own = _own(x.double() if job.double and x.is_floating_point() else x).requires_grad_(False)
        if job.specs is not None:
            own = shard(own, next(specs, "..."), mesh)
        leaves[f"input {next(places)}"] = own.requires_grad_(x.requires_grad)
        return own

    inputs = torch_private.mapped(entering, job.inputs)
    return inputs, {name: x for name, x in leaves.items() if x.requires_grad}


def _own(x: Any) -> Any:
    """A tensor that a run may change or differentiate."""
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def _takes_mesh(program: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `mesh`."""
    try:
        return "mesh" in inspect.signature(program).parameters
    except (TypeError, ValueError):  # what has no signature takes inputs alone
        return False


def _missed(
    job: Job, seen: Observed, inputs: Any, module: torch.nn.Module | None, called: list[torch.nn.Module]
) -> Iterator[str]:
    """What of a program can't be compared."""
    if seen.gradients and not any(seen.gradients.values()):
        yield "gradients, since the program leaves none and returns no scalar from which backward could start"
    if module is job.program:
        return
    yield from (f"the gradient of {name}" for name, x in named_tensors(inputs, "inputs") if x.requires_grad)
    known = set() if module is None else {id(x) for x in module.parameters()}
    for kind in dict.fromkeys(
        type(each).__name__ for each in called if any(id(x) not in known for x in each.parameters())
    ):
        yield f"the parameters of {kind}, which is called but not part of the module that is returned"


# --- gradients


def _differentiate(outputs: Mapping[str, torch.Tensor], module: torch.nn.Module, is_program: bool) -> None:
    """Start backward where there are no gradients: from all outputs of a module, from the scalars of a function."""
    _reshard(module)
    starts = [x for x in outputs.values() if x.grad_fn is not None and (is_program or x.numel() == 1)]
    starts = [torch.view_as_real(x) if x.is_complex() else x for x in starts]
    if not starts or any(x.grad is not None for x in module.parameters()):
        return
    try:
        torch.autograd.backward(starts, [_weights(x) for x in starts])
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        module.zero_grad(set_to_none=True)  # the program has been through the graph, and dropped the gradients
        _reshard(module)


def _reshard(module: torch.nn.Module) -> None:
    """Have the modules of `fully_shard` say their sharded parameters, which have the gradients.

    After a forward pass without a backward one, the outermost of them keeps its parameters whole.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def _weights(x: torch.Tensor) -> torch.Tensor:
    """Numbers that tell the elements apart, the same for the whole tensor on every mesh."""
    numbers = torch.arange(x.numel(), dtype=torch.float64) * 1.7 + 0.3
    whole = torch.cos(numbers).view(x.shape).to(x.dtype)
    if not isinstance(x, DTensor):
        return whole
    sharding = replace(sharding_of(x), pending=())
    return dtensor(elements_at(whole, sharding.local_indices(tuple(x.shape))), sharding, x.shape)


# --- names


_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")


def _unwrapped(name: str) -> str:
    """A name of a parameter or module without what wrappers around modules add."""
    return _WRAPPERS.sub("", name)


def _modules(module: torch.nn.Module | None) -> list[tuple[str, torch.nn.Module]]:
    return [] if module is None else [(_unwrapped(name), each) for name, each in module.named_modules()]


def named_tensors(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tree under names: `output`, `output[0]`, `output['loss']`."""
    return ((each, x) for each, x in _leaves_in(tree, name) if isinstance(x, torch.Tensor))


def _outputs_in(tree: Any) -> dict[str, torch.Tensor]:
    """The tensors and Python's numbers of what a program returns, under names."""
    return {
        name: x if isinstance(x, torch.Tensor) else torch.tensor(x)
        for name, x in _leaves_in(tree, "output")
        if isinstance(x, torch.Tensor | float | complex) or (isinstance(x, int) and abs(x) < 2**63)
    }


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


# --- tensors


def piece_of(x: torch.Tensor, mesh: Mesh) -> Piece:
    """A tensor as this rank has it now, for the launching process."""
    if not isinstance(x, DTensor):
        return Piece(_comparable(x))
    sharding = sharding_of(x)
    there = set(x.device_mesh.mesh.flatten().tolist())
    along = {name: set(mesh.axis(name).ranks) for name in mesh.axis_names if mesh.shape[name] > 1}
    known = {name: "" for name, ranks in along.items() if ranks <= there}
    for op, layout in sharding.pending:
        reduced = set(sharding.mesh.ranks_of(layout) or ()) - {mesh.rank}
        known |= {name: op for name in known if along[name] & reduced}
    index = sharding.local_indices(tuple(x.shape))
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


class _Watch(TorchFunctionMode):
    """Notes the outputs of all modules that run, in the order in which they are done, their parameters as they begin,
    and the results of dropout, which passes its input here.

    narrow: the narrowest dtype that was computed from tensors.
    """

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.mesh = mesh
        self.narrow = torch.float64
        self.running: list[torch.nn.Module] = []
        self.roots: list[torch.nn.Module] = []
        self.begun: dict[int, Piece] = {}
        self._notes: list[tuple[str, torch.nn.Module | None, str, Piece]] = []
        self._handles: dict[int, Any] = {}

    def __enter__(self) -> Any:
        self._handles[0] = register_module_forward_pre_hook(self._before)
        return super().__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self.running:
            module = self.running[-1]
            path = next((name for name, each in _modules(self.roots[-1]) if each is module), "") or "the model"
            held = [f"{name} '{spec_of(x)}'" for name, x in module.named_parameters() if isinstance(x, DTensor)]
            with contextlib.suppress(AttributeError, TypeError):  # of a class that takes no notes
                error.add_note(f"in {path} ({type(module).__name__}); parameters: {', '.join(held[:8]) or 'none'}")
        for handle in self._handles.values():
            handle.remove()
        super().__exit__(kind, error, trace)

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
        self._note("modules", module, result)

    def _note(self, kind: str, module: torch.nn.Module | None, result: Any) -> None:
        for name, x in named_tensors(result, ""):
            if is_rounded(x) and not x.is_nested:
                with torch.no_grad():
                    self._notes.append((kind, module, name, piece_of(x, self.mesh)))

    def root(self) -> torch.nn.Module | None:
        """The module that no other called, if there is one alone."""
        inner = {id(x) for root in self.roots for x in root.modules() if x is not root}
        roots = [root for root in self.roots if id(root) not in inner]
        return roots[0] if len(roots) == 1 else None

    def named(self, kind: str, module: torch.nn.Module | None) -> dict[str, Piece]:
        """What was noted, by the modules' names, with numbers for what runs several times."""
        names = {id(None): "the program"} | {id(each): name for name, each in reversed(_modules(module))}
        found: dict[str, Piece] = {}
        for noted, each, inside, piece in self._notes:
            if noted == kind and id(each) in names:
                name = names[id(each)] + inside
                keys = itertools.chain([name], (f"{name} (call {calls})" for calls in itertools.count(2)))
                found[next(key for key in keys if key not in found)] = piece
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        found = self._without_dropout(func, args, kwargs) if func in _DROPOUTS else func(*args, **kwargs)
        if torch.compiler.is_compiling():
            return found
        if isinstance(found, torch.Tensor) and is_rounded(found) and any(named_tensors((args, kwargs), "")):
            self.narrow = min(self.narrow, found.dtype.to_real(), key=lambda dtype: dtype.itemsize)
        return found

    def _without_dropout(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a dropout function with probability 0. The result with its own probability is noted beside."""
        name, place, default = _DROPOUTS[func]
        if name == "dropout" and not isinstance(args[3], bool):  # of a packed sequence, which has its sizes before it
            place += 1
        given, probability = len(args) > place, args[place] if len(args) > place else kwargs.get(name, default)
        off = (*args[:place], 0.0, *args[place + 1 :]) if given else args
        found = func(*off, **kwargs | ({} if given else {name: 0.0}))
        if probability and not torch.compiler.is_compiling():
            module = self.running[-1] if self.running else None
            self._note("kept", module, found)
            with torch.no_grad(), torch.random.fork_rng(devices=[]):  # what is drawn later is the same on every mesh
                args, kwargs = torch_private.mapped(_own, (args, kwargs))
                self._note("dropped", module, func(*args, **kwargs))
        return found
