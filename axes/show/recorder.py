"""Every collective of a step, as it is issued: by whom, for which line and module, over which axes, how much.

    with StepRecorder(mesh) as recorder:
        model(x).sum().backward()
    print(explained_step("model", recorder))

What is seen is what torch hands to a process group, whoever asks: axes, DTensor, FSDP2 or the program itself. In a
simulated world nothing moves, so one process shows the step of any rank of any number. In a backward pass a
collective is put down to the line whose gradient it is of: autograd numbers its nodes in the order in which they are
made, and the recorder notes by that number where the program was.
"""

from __future__ import annotations

import bisect
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from axes.algebra.cost import CostModel, members_of_node
from axes.algebra.errors import AxesError
from axes.algebra.explanation import Explanation, Section
from axes.algebra.mesh import Mesh, ambient_mesh, checked_mesh
from axes.algebra.plan import bytes_text, model_of, time_text
from axes.runtime import torch_private
from axes.runtime.agreement import ranks_text
from axes.runtime.groups import current_world, process_groups
from axes.runtime.operation import Operation
from axes.runtime.simulate import simulate
from axes.runtime.watching import is_users, listening, parts, place_of_frame, user_place
from axes.runtime.world import bound_to_job

# --- what is recorded


@dataclass(frozen=True)
class Collective:
    """One collective of this rank.

    kind: "all_gather" and so on. axes: the names of its group. bytes_in, bytes_out: over the links, as plans count
    them. input_bytes, output_bytes: of the tensors that are handed over. phase: "forward" or "backward". by: "axes",
    "program", or what of torch issued it unasked, as "torch: FSDP2". what: the expression or operation. module: the
    path of the module. place: the line of the program, `file:line in function`; of a gradient that of the forward.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    ranks: str
    bytes_in: int
    bytes_out: int
    input_bytes: int
    output_bytes: int
    time_us: float
    phase: str
    by: str
    what: str
    module: str
    place: str

    @property
    def facts(self) -> dict[str, Any]:
        """The collective as data."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


class _Spot(NamedTuple):
    """Where the program is: the module, what it is part of, the line."""

    module: str
    parts: tuple[str, ...]
    place: str


_NOWHERE = _Spot("", (), "")


class StepRecorder(torch_private.DispatchMode):
    """Notes the collectives of this process while it is open. `mesh` is what their groups are named by.

    `exact`: whether their bytes are those of a real job. In a simulated world an exchange whose sizes other ranks tell
    is as if each of them told what this one does.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.exact = True
        self._groups = _Groups(mesh)
        self._modules: list[torch.nn.Module] = []
        self._paths: dict[int, str] = {}
        self._calls: dict[int, str] = {}
        self._roots: list[torch.nn.Module] = []
        self._numbers: list[int] = []
        self._spots: list[_Spot] = []
        self._exact = False
        self._running = -1
        self._operation = self._said = ""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> StepRecorder:
        hooks = torch.nn.modules.module
        self._stack.callback(hooks.register_module_forward_pre_hook(self._entered).remove)
        self._stack.callback(hooks.register_module_forward_hook(self._left, always_call=True).remove)
        self._stack.enter_context(listening(self._hear, self._changed))
        super().__enter__()
        return self

    def __exit__(self, *ended: Any) -> None:
        super().__exit__(*ended)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note_node()
        if (number := torch_private.running_node_number()) is not None:
            self._running = number
        if any(issubclass(kind, DTensor) for kind in types):
            self._operation = str(func)
            return NotImplemented  # first what it does to its local tensors
        found = _read(func, args, kwargs or {}) if getattr(func, "namespace", "") in _NAMESPACES else None
        out = func(*args, **(kwargs or {}))
        if found is not None:
            if found.kind == "all_to_all" and current_world().fake:
                _send_to_itself(found, out)
            self._record(found, out)
        return out

    def _hear(self, operation: Operation) -> None:
        self._said = operation.what

    # where the program is

    def _entered(self, module: torch.nn.Module, _: Any) -> None:
        if not self._modules or id(module) not in self._paths:
            self._name(module)
        self._calls[id(module)] = user_place()
        self._modules.append(module)
        self._changed()

    def _left(self, module: torch.nn.Module, *_: Any) -> None:
        if self._modules and self._modules[-1] is module:
            self._modules.pop()
        self._changed()

    def _name(self, root: torch.nn.Module) -> None:
        """Paths for a module that is called first, and for those in it."""
        if id(root) in self._paths:
            return
        self._roots.append(root)  # an id is of this module as long as it lives
        first = _name_of(root)
        for name, module in root.named_modules():
            self._paths.setdefault(id(module), f"{first}.{name}" if name else first)

    def _changed(self) -> None:
        """Nodes from now on are of another place."""
        self._note(torch_private.next_node_number(), exact=False)

    def _note_node(self) -> None:
        """The node that was made last is of this line, if nothing has been noted of it yet."""
        number, latest = torch_private.next_node_number() - 1, self._numbers[-1] if self._numbers else -1
        if number > latest or (number == latest and not self._exact):
            self._note(number, exact=True)

    def _note(self, number: int, exact: bool) -> None:
        """From the node of this number on the program is where it is now."""
        self._exact = exact
        if self._numbers and self._numbers[-1] == number:
            self._spots[-1] = self._spot()
        else:
            self._numbers.append(number)
            self._spots.append(self._spot())

    def _spot(self) -> _Spot:
        module = self._paths[id(self._modules[-1])] if self._modules else ""
        return _Spot(module, parts(), user_place())

    def _spot_of_node(self) -> _Spot:
        """Where the node was made whose gradient is being computed; of a leaf, the one that went before.

        That used it last in the forward: autograd has a leaf's gradient accumulated as soon as it is complete.
        """
        number = torch_private.running_node_number()
        if number is None and torch_private.running_leaf() is not None:
            number = self._running
        at = -1 if number is None else bisect.bisect_right(self._numbers, number) - 1
        return self._spots[at] if at >= 0 else _NOWHERE

    # what is sent

    def _record(self, sent: _Sent, out: Any) -> None:
        caller = _caller(sys._getframe(2))
        backward = caller.backward or torch_private.backward_pass() >= 0
        spot, leaf = self._spot_of_node() if backward else _NOWHERE, torch_private.running_leaf() if backward else None
        module = self._paths.get(id(self._modules[-1]), "") if self._modules else spot.module
        if caller.fsdp is not None:  # which may gather a module's parameters while another one runs
            module = self._paths.get(id(caller.fsdp), module)
            caller.place = self._calls.get(id(caller.fsdp), caller.place)
        if leaf is not None:
            module = self._path_of(leaf) or module
        self._add(sent, out, caller, backward, spot, module, leaf is not None)

    def _add(
        self, sent: _Sent, out: Any, caller: _Caller, backward: bool, spot: _Spot, module: str, at_leaf: bool
    ) -> None:
        group = torch_private.group_handed_over(sent.group)
        told = self._groups.of(group)
        amount = _amount(sent, out, group)
        if caller.objects and amount.received and sent.kind != "all_gather" and current_world().fake:
            raise AxesError(
                f"{caller.place}: torch waits for an object here ({caller.objects}), and in a simulated world nobody "
                "sends one. Stages of a pipeline ask one another for shapes so: tell them, PipelineStage(..., "
                "input_args=, output_args=), explain the step in a running job, on all its ranks, or a stage without "
                "its schedule, axes.explain(stage_module, x)"
            )
        what = self._what(sent, caller, spot, at_leaf)
        if sent.receives and current_world().fake and (caller.by != "axes" or what.startswith("all_to_all")):
            self.exact = False  # these sizes are what the other ranks told, and here nobody did
        self.collectives.append(
            Collective(
                sent.kind,
                told.axes,
                told.size,
                told.ranks,
                amount.received,
                amount.sent,
                amount.input,
                amount.output,
                0.0 if told.size == 1 else told.model.time_us(sent.kind, told.size, told.node_size, amount.received),
                "backward" if backward else "forward",
                caller.by or "program",
                what,
                module,
                caller.place or spot.place,
            )
        )

    def _what(self, sent: _Sent, caller: _Caller, spot: _Spot, at_leaf: bool) -> str:
        """The expression or the operation that a collective is of."""
        if caller.by == "axes":
            now = parts()
            if at_leaf:
                return "a gradient that is pending, brought to its leaf"
            if now and not now[-1].startswith("shard_map"):
                return now[-1]
            if not now and spot.parts:
                return f"gradient of {spot.parts[-1]}"
            return self._said
        if caller.by == FSDP:
            return "parameters" if sent.kind == "all_gather" else "gradients"
        if caller.by == DTENSOR:
            return caller.operation or self._operation
        if caller.by == PIPELINING and sent.kind in ("send", "recv"):
            group = torch_private.group_handed_over(sent.group)
            way = "to" if sent.kind == "send" else "from"
            return f"{caller.operation or 'a stage'}, {way} rank {dist.get_global_rank(group, sent.peer)}"
        return ""

    def _path_of(self, leaf: torch.Tensor) -> str:
        """The path of a parameter among the modules that were called."""
        for root in self._roots:
            for name, parameter in root.named_parameters():
                if parameter is leaf:
                    return f"{self._paths[id(root)]}.{name}"
        return ""


# --- who asks


FSDP, DTENSOR, PIPELINING = "torch: FSDP2", "torch: DTensor", "torch: pipelining"

_ISSUERS = {
    "torch.distributed.fsdp": FSDP,
    "torch.distributed.tensor": DTENSOR,
    "torch.distributed.pipelining": PIPELINING,
    "torch.distributed.checkpoint": "torch: checkpoint",
    "torch.distributed.device_mesh": "torch: DeviceMesh",
    "torch.nn.parallel": "torch: DDP",
}


@dataclass
class _Caller:
    """Who asked for a collective, from the frames that led to it, up to where a backward pass begins."""

    by: str = ""
    place: str = ""
    operation: str = ""
    objects: str = ""
    fsdp: torch.nn.Module | None = None
    backward: bool = False


def _caller(frame: FrameType | None) -> _Caller:
    found = _Caller()
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if function == "_engine_run_backward":
            found.backward = True
            return found
        if not found.place:
            _note_frame(found, frame, module, function)
        frame = frame.f_back
    return found


def _note_frame(found: _Caller, frame: FrameType, module: str, function: str) -> None:
    if not found.by:
        found.by = _issuer(module)
    if found.by == FSDP and found.fsdp is None:
        found.fsdp = torch_private.module_of_fsdp(frame.f_locals.get("self"))
    if module == "torch.distributed.tensor._dispatch" and "op_call" in frame.f_locals and not found.operation:
        found.operation = str(frame.f_locals["op_call"])
    if module == "torch.distributed.tensor._api" and function in ("redistribute", "full_tensor", "distribute_tensor"):
        found.operation = f"DTensor.{function}"  # the last of several that call one another is what is written
    if module == "torch.distributed.pipelining.schedules" and function == "step":
        found.operation = type(frame.f_locals.get("self")).__name__
    if module == "torch.distributed.distributed_c10d" and function.endswith("_object_list"):
        found.objects = function
    if is_users(frame):
        found.place = place_of_frame(frame)
        found.by = found.by or "program"


def _issuer(module: str) -> str:
    if module.partition(".")[0] == "axes":
        return "" if module.startswith("axes.show") else "axes"
    return next((by for prefix, by in _ISSUERS.items() if f"{module}.".startswith(f"{prefix}.")), "")


# --- in which group


@dataclass(frozen=True)
class _Named:
    """A group as it is told of."""

    axes: tuple[str, ...]
    size: int
    ranks: str
    node_size: int
    model: CostModel


class _Groups:
    """What the groups of this process are called on a mesh."""

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh = mesh
        self._known: dict[str, _Named] = {}

    def of(self, group: dist.ProcessGroup) -> _Named:
        """A group, by the axes that it runs along where there are such."""
        name = group.group_name
        if name not in self._known:
            ranks = dist.get_process_group_ranks(group)
            model = CostModel() if self._mesh is None else model_of(self._mesh)
            near = members_of_node(ranks, model.ranks_per_node)
            self._known[name] = _Named(self._axes(name, ranks), len(ranks), ranks_text(ranks), near, model)
        return self._known[name]

    def _axes(self, group_name: str, ranks: Sequence[int]) -> tuple[str, ...]:
        if len(ranks) == 1:
            return ()
        if self._mesh is not None:
            for name in self._mesh.namespace:
                through = self._mesh.axis(name).ranks_of(dist.get_rank())
                if len(through) == len(ranks) and list(through) == list(ranks):
                    return (name,)
        for info in process_groups():
            if info.group.group_name == group_name:
                mesh, layout = self._mesh, info.layout
                if mesh is not None and layout is not None and mesh.layout_of_all.contains(layout):
                    return mesh.calls(layout)
                return tuple(next(iter(info.names), "").split()) or (("world",) if info.origin == "default" else ())
        return ()


# --- how much


_NAMESPACES = ("c10d", "_c10d_functional")


class _Sent(NamedTuple):
    """What an operator of torch is asked to send: tensors in and out, as the call has them, and sizes for each rank."""

    kind: str
    group: Any
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] | None
    peer: int = -1
    sends: Sequence[int] = ()
    receives: Sequence[int] = ()


_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "isend": "send",
    "irecv": "recv",
    "barrier": "barrier",
}
"""What torch's operators are called here. What isn't listed sends nothing by itself."""

_IN_PLACE = ("all_reduce", "broadcast", "reduce")


_TAKEN = ("tensors", "input_tensors", "input_tensor", "input_list", "inputs", "input")
_MADE = ("output_tensors", "output_lists", "output_tensor", "outputs", "output")
"""How torch's operators call the tensors that they are given and those that they fill."""


def _read(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Sent | None:
    """What a call of an operator sends; None where it is none that sends."""
    name = func.overloadpacket.__name__
    kind = _KINDS.get(name)
    if kind is None:
        return None
    given = {**dict(zip(torch_private.arguments_of(func), args, strict=False)), **kwargs}
    group = given.get("process_group", given.get("group_name"))
    if kind in ("send", "recv", "barrier"):
        tensors = [] if kind == "barrier" else _tensors(given.get("tensors", given.get("tensor")))
        peer = given.get("dst", given.get("src", -1))
        return _Sent(kind, group, *((tensors, []) if kind == "send" else ([], tensors)), peer)
    taken = next((given[key] for key in _TAKEN if key in given), None)
    made = next((given[key] for key in _MADE if key in given), None)
    return _Sent(
        kind,
        group,
        _tensors(taken),
        None if made is None else _tensors(made),
        given.get("root_rank", given.get("src", -1)),
        given.get("input_split_sizes", ()),
        given.get("output_split_sizes", ()),
    )


def _tensors(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    return [x for each in found or () for x in _tensors(each)]


def _send_to_itself(sent: _Sent, out: Any) -> None:
    """Fills a simulated exchange as if each rank sent what this one does. torch 2.11 leaves its memory as it was."""
    for made, taken in zip(_tensors(out) if sent.outputs is None else sent.outputs, sent.inputs, strict=False):
        if made.shape == taken.shape:
            made.copy_(taken)


class _Amount(NamedTuple):
    """Bytes over the links for this rank, and of the tensors that it hands over."""

    received: int
    sent: int
    input: int
    output: int


def _amount(sent: _Sent, out: Any, group: dist.ProcessGroup) -> _Amount:
    size, here = group.size(), group.rank()
    outputs = sent.outputs if sent.outputs is not None else sent.inputs if sent.kind in _IN_PLACE else _tensors(out)
    taken, made = _bytes(sent.inputs), _bytes(outputs)
    both = {
        "all_gather": (made - taken, (size - 1) * taken),
        "reduce_scatter": (taken - made, taken - made),
        "send": (0, taken),
        "recv": (made, 0),
        "barrier": (0, 0),
        "broadcast": (0, taken) if here == sent.peer else (taken, 0),
        "reduce": (taken, 0) if here == sent.peer else (0, taken),
        "gather": (made - taken, 0) if here == sent.peer else (0, taken),
        "scatter": (0, taken - made) if here == sent.peer else (made, 0),
    }
    if sent.kind == "all_reduce":
        each = sum(-(-2 * (size - 1) * x.numel() // size) * x.element_size() for x in sent.inputs)
        return _Amount(each, each, taken, made)
    if sent.kind == "all_to_all":
        return _Amount(_others(made, sent.receives, size, here), _others(taken, sent.sends, size, here), taken, made)
    if size == 1:
        return _Amount(0, 0, taken, made)
    return _Amount(*both[sent.kind], taken, made)


def _others(total: int, counts: Sequence[int], size: int, here: int) -> int:
    """Bytes that aren't this rank's own: of equal parts, or by how many rows each rank has."""
    rows = sum(counts)
    if not counts or not rows:
        return total * (size - 1) // size
    return total * (rows - counts[here]) // rows


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


# --- a step


def explained_step(step: Callable[..., Any], inputs: Sequence[Any], mesh: Mesh | str | None) -> Explanation:
    """What `step(*inputs)` sends, and the backward pass from what it returns, where that needs gradients.

    Where no job runs, the world of `mesh` is simulated, seen from the mesh's rank. Gradients of a module's parameters,
    and random numbers, are as before.
    """
    if isinstance(step, torch.nn.Module) and type(step).forward is torch.nn.Module.forward:
        raise AxesError(f"axes.explain takes a module that computes something; a {type(step).__name__} has no forward")
    with contextlib.ExitStack() as stack:
        where = entered_world(stack, mesh, [*inputs, *_parameters(step)])
        stack.enter_context(_as_before(step))
        if "torch.distributed.pipelining" in sys.modules and current_world().fake:
            stack.enter_context(torch_private.stages_know_their_shapes())
        with StepRecorder(where) as recorder:
            _backward(step(*inputs))
        return _explanation(_name_of(step), recorder.collectives, where, recorder.exact)


def _parameters(step: Any) -> list[torch.nn.Parameter]:
    return list(step.parameters()) if isinstance(step, torch.nn.Module) else []


def entered_world(stack: contextlib.ExitStack, mesh: Mesh | str | None, tensors: Sequence[Any]) -> Mesh | None:
    """The ambient mesh of the step; a world of its own, where none runs."""
    if mesh is None:
        if not dist.is_initialized():
            raise AxesError(
                "a step is explained in a running job, in a simulated world (with axes.simulate(64): ...), or on a "
                "mesh that is passed: axes.explain(step, x, mesh='dp=4 tp=2')"
            )
        return ambient_mesh()
    found = Mesh(mesh) if isinstance(mesh, str) else checked_mesh(mesh)
    if not dist.is_initialized():
        stack.enter_context(simulate(max(found.universe.ranks) + 1, found.rank))
    if found.binding is None:
        device = next((x.device.type for x in tensors if isinstance(x, torch.Tensor)), "cpu")
        found = bound_to_job(found, device)
    return stack.enter_context(found)


@contextlib.contextmanager
def _as_before(step: Any) -> Iterator[None]:
    """Leaves gradients of parameters, and random numbers, as they are found."""
    kept = [(parameter, parameter.grad) for parameter in _parameters(step)]
    for parameter, _ in kept:
        parameter.grad = None
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _backward(returned: Any) -> None:
    """The backward pass from all tensors that were returned and have one, each with a gradient of ones."""
    found: list[torch.Tensor] = []
    torch_private.mapped(
        lambda x: found.append(x) if isinstance(x, torch.Tensor) and x.grad_fn is not None else None, returned
    )
    if found:
        torch.autograd.backward(found, [_ones(x.detach()) for x in found])


def _ones(x: torch.Tensor) -> torch.Tensor:
    """A gradient that lies as its value; that of what is pending is replicated."""
    if not isinstance(x, DTensor):
        return torch.ones_like(x)
    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    local = torch.ones_like(x.to_local())
    return DTensor.from_local(local, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def _name_of(step: Any) -> str:
    if isinstance(step, torch.nn.Module):
        # `fully_shard` gives a module a class of its own making.
        return (type(step).__mro__[2] if isinstance(step, FSDPModule) else type(step)).__name__
    return getattr(step, "__name__", type(step).__name__)


# --- what is said


def _explanation(name: str, sent: Sequence[Collective], mesh: Mesh | None, exact: bool) -> Explanation:
    head = [] if mesh is None else [("mesh", f"{mesh.declaration}, seen from rank {mesh.rank}")]
    if not exact:
        head.append(("note", "an exchange is of sizes that other ranks tell: here as if they told what this one does"))
    sections = [Section("", tuple(head))]
    for phase in ("forward", "backward"):
        rows = tuple(_rows([each for each in sent if each.phase == phase]))
        sections.append(Section(phase, rows or (("nothing is sent",),)))
    totals = _totals(sent)
    sections.append(Section("in all", tuple(_total_row(each) for each in totals) or (("nothing is sent",),)))
    facts = {
        "kind": "step",
        "step": name,
        "mesh": None if mesh is None else mesh.declaration,
        "rank": dist.get_rank(),
        "exact": exact,
        "collectives": [each.facts for each in sent],
        "totals": totals,
    }
    return Explanation(f"a step of {name}", tuple(section for section in sections if section.rows), facts)


def _rows(sent: Sequence[Collective]) -> Iterator[tuple[str, ...]]:
    """A row for each; for several that are alike, one that counts them."""
    counts: dict[Collective, int] = {}
    for each in sent:
        counts[each] = counts.get(each, 0) + 1
    several = any(count > 1 for count in counts.values())
    for each, count in counts.items():
        times = (f"{count} x" if count > 1 else "",) if several else ()
        who = each.what if each.by == "axes" else f"[{each.by}] {each.what}".strip()
        said = ", ".join(filter(None, (each.module, each.place.partition(" in ")[0], who)))
        yield *times, each.kind, _axes_text(each.axes), bytes_text(each.bytes_in), said


def _axes_text(axes: Sequence[str]) -> str:
    return " ".join(axes) or "-"


def _totals(sent: Sequence[Collective]) -> list[dict[str, Any]]:
    """The collectives of each axis, counted and added up."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for each in sent:
        fresh = {"axes": list(each.axes), "collectives": 0, "bytes_in": 0, "bytes_out": 0, "time_us": 0.0}
        total = found.setdefault(each.axes, fresh)
        total["collectives"] += 1
        for name in ("bytes_in", "bytes_out", "time_us"):
            total[name] += getattr(each, name)
    return list(found.values())


def _total_row(total: Mapping[str, Any]) -> tuple[str, ...]:
    moved = f"{bytes_text(total['bytes_in'])} in, {bytes_text(total['bytes_out'])} out"
    count = total["collectives"]
    counted = f"{count} collective{'s' if count > 1 else ''}"
    return (_axes_text(total["axes"]), counted, moved, time_text(total["time_us"]))
