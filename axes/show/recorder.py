"""Every collective of a step, as it is issued: by whom, for which line and module, over which axes, how much.

    with StepRecorder(mesh) as recorder:
        model(x).sum().backward()
    recorder.collectives

What is seen is what torch hands to a process group, whoever asks: axes, DTensor, FSDP2 or the program itself. In a
simulated world nothing moves, so one process shows the step of any rank of any number. In a backward pass a
collective is put down to the line whose gradient it is of: autograd numbers its nodes in the order in which they are
made, and the recorder notes by that number where the program was.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from axes.algebra.cost import CostModel, members_of_node
from axes.algebra.errors import AxesError
from axes.algebra.explanation import Explanation, Section
from axes.algebra.mesh import Mesh, ambient_mesh, checked_mesh
from axes.algebra.plan import bytes_text, model_of
from axes.extension import Operation, listen, where
from axes.runtime import torch_private
from axes.runtime.agreement import ranks_text
from axes.runtime.groups import current_world, process_groups
from axes.runtime.simulate import simulate
from axes.runtime.watching import is_users, line_of_code
from axes.runtime.world import bound_to_job
from axes.show.rank_text import time_text

# --- what is recorded


class _Spot(NamedTuple):
    """Where the program is: the module, the line, the expressions that run."""

    module: str
    place: str
    parts: tuple[str, ...]


_NOWHERE = _Spot("", "", ())


class StepRecorder(torch_private.DispatchMode):
    """Notes the collectives of this process while it is open, each as the data that `Explanation.json` has of it.

    `mesh` is what their groups are named by. `exact`: whether their bytes are those of a real job. In a simulated world
    an exchange whose sizes other ranks tell is as if each of them told what this one does.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.collectives: list[dict[str, Any]] = []
        self.exact = True
        self._named = functools.lru_cache(maxsize=4096)(functools.partial(_named, mesh))
        self._modules: list[torch.nn.Module] = []
        self._roots: list[torch.nn.Module] = []
        self._paths: dict[int, str] = {}
        self._calls: dict[int, str] = {}
        # From the node of a number on the program was there; whether the line is that of the node itself.
        self._spots: list[tuple[int, bool, _Spot]] = []
        self._running = -1
        self._operation = self._said = ""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> StepRecorder:
        hooks = torch.nn.modules.module
        self._stack.callback(hooks.register_module_forward_pre_hook(self._entered).remove)
        self._stack.callback(hooks.register_module_forward_hook(self._left, always_call=True).remove)
        self._stack.enter_context(listen(self._hear))
        super().__enter__()
        return self

    def __exit__(self, *ended: Any) -> None:
        super().__exit__(*ended)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(torch_private.next_node_number() - 1, exact=True)
        if (number := torch_private.running_node_number()) is not None:
            self._running = number
        if any(issubclass(kind, DTensor) for kind in types):
            self._operation = str(func)
            return NotImplemented  # first what it does to its local tensors
        out = func(*args, **(kwargs or {}))
        kind = _KINDS.get(func.overloadpacket.__name__) if getattr(func, "namespace", "") in _NAMESPACES else None
        if kind is not None:
            self._record(_read(kind, func, args, kwargs or {}, out))
        return out

    def _hear(self, operation: Operation) -> None:
        self._said = operation.what

    # where the program is

    def _entered(self, module: torch.nn.Module, _: Any) -> None:
        if id(module) not in self._paths:
            self._roots.append(module)  # an id is of this module as long as it lives
            for name, each in module.named_modules():
                self._paths.setdefault(id(each), ".".join(filter(None, (_name_of(module), name))))
        self._calls[id(module)] = where()[0]
        self._modules.append(module)
        self._changed()

    def _left(self, module: torch.nn.Module, *_: Any) -> None:
        if self._modules and self._modules[-1] is module:
            self._modules.pop()
        self._changed()

    def _changed(self) -> None:
        """Nodes from now on are of another place."""
        self._note(torch_private.next_node_number(), exact=False)

    def _note(self, number: int, exact: bool) -> None:
        """From the node of this number on the program is where it is now; `exact`: unless that is known."""
        latest, known, _ = self._spots[-1] if self._spots else (-1, True, _NOWHERE)
        if exact and (number < latest or (number == latest and known)):
            return
        if self._spots and number == latest:
            self._spots.pop()
        module = self._paths[id(self._modules[-1])] if self._modules else ""
        self._spots.append((number, exact, _Spot(module, *where())))

    def _spot_of_node(self) -> _Spot:
        """Where the node was made whose gradient is being computed; of a leaf, the one that went before.

        That used it last in the forward: autograd has a leaf's gradient accumulated as soon as it is complete.
        """
        number = torch_private.running_node_number()
        if number is None:
            number = self._running if torch_private.running_leaf() is not None else -1
        at = bisect.bisect_right(self._spots, number, key=lambda each: each[0]) - 1
        return self._spots[at][2] if number >= 0 <= at else _NOWHERE

    # what is sent

    def _record(self, sent: _Sent) -> None:
        caller, fake = _caller(sys._getframe(2)), current_world().fake
        if sent.kind == "all_to_all" and fake:
            _send_to_itself(sent)
        backward = caller.backward or torch_private.backward_pass() >= 0
        spot, leaf = (self._spot_of_node(), torch_private.running_leaf()) if backward else (_NOWHERE, None)
        module = self._paths.get(id(self._modules[-1]), "") if self._modules else spot.module
        if caller.fsdp is not None:  # which may gather a module's parameters while another one runs
            module = self._paths.get(id(caller.fsdp), module)
            caller.place = self._calls.get(id(caller.fsdp), caller.place)
        if leaf is not None:
            named = ((root, *pair) for root in self._roots for pair in root.named_parameters())
            module = next((f"{self._paths[id(root)]}.{name}" for root, name, each in named if each is leaf), module)
        (group, near, model), size = self._named(sent.group), sent.group.size()
        received, given = _bytes_over_links(sent)
        if caller.objects and received and sent.kind != "all_gather" and fake:
            raise AxesError(
                f"{caller.place}: torch waits for an object here ({caller.objects}), and in a simulated world nobody "
                "sends one. Stages of a pipeline ask one another for shapes so: tell them, PipelineStage(..., "
                "input_args=, output_args=), explain the step in a running job, on all its ranks, or a stage without "
                "its schedule, axes.explain(stage_module, x)"
            )
        what = self._what(sent, caller, spot, leaf is not None)
        if sent.receives and fake and (caller.by != "axes" or what.startswith("all_to_all")):
            self.exact = False  # these sizes are what the other ranks told, and here nobody did
        self.collectives.append(
            {
                "kind": sent.kind,
                **group,
                "bytes_in": received,
                "bytes_out": given,
                "input_bytes": _bytes(sent.inputs),
                "output_bytes": _bytes(sent.outputs),
                "time_us": model.time_us(sent.kind, size, near, received) if size > 1 else 0.0,
                "phase": "backward" if backward else "forward",
                "by": caller.by or "program",
                "what": what,
                "module": module,
                "place": caller.place or spot.place,
            }
        )

    def _what(self, sent: _Sent, caller: _Caller, spot: _Spot, at_leaf: bool) -> str:
        """The expression or the operation that a collective is of."""
        if caller.by == "axes":
            now = where()[1]
            if at_leaf:
                return "a gradient that is pending, brought to its leaf"
            if now and not now[-1].startswith("shard_map"):
                return now[-1]
            return f"gradient of {spot.parts[-1]}" if spot.parts and not now else self._said
        if caller.by == PIPELINING and sent.kind in ("send", "recv"):
            way = "to" if sent.kind == "send" else "from"
            return f"{caller.operation or 'a stage'}, {way} rank {dist.get_global_rank(sent.group, sent.peer)}"
        if caller.by == FSDP:
            return "parameters" if sent.kind == "all_gather" else "gradients"
        return caller.operation or self._operation if caller.by == DTENSOR else ""


# --- who asks


FSDP, DTENSOR, PIPELINING = "torch: FSDP2", "torch: DTensor", "torch: pipelining"

_ISSUERS = {
    "axes.show": "",
    "axes": "axes",
    "torch.distributed.fsdp": FSDP,
    "torch.distributed.tensor": DTENSOR,
    "torch.distributed.pipelining": PIPELINING,
    "torch.distributed.checkpoint": "torch: checkpoint",
    "torch.distributed.device_mesh": "torch: DeviceMesh",
    "torch.nn.parallel": "torch: DDP",
}
"""Who asks, by the beginning of a module's name; the first that fits."""


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
    while frame is not None and not found.backward:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        found.backward = function == "_engine_run_backward"
        if not found.place and not found.backward:
            _note_frame(found, frame, module, function)
        frame = frame.f_back
    return found


def _note_frame(found: _Caller, frame: FrameType, module: str, function: str) -> None:
    found.by = found.by or next((by for prefix, by in _ISSUERS.items() if f"{module}.".startswith(f"{prefix}.")), "")
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
        found.place, found.by = line_of_code(frame.f_code, frame.f_lasti), found.by or "program"


# --- in which group


def _named(mesh: Mesh | None, group: dist.ProcessGroup) -> tuple[dict[str, Any], int, CostModel]:
    """A group as data, how many of its ranks share a node, and what its collectives cost."""
    ranks, model = dist.get_process_group_ranks(group), CostModel() if mesh is None else model_of(mesh)
    told = {"axes": [*_axes_of(mesh, group, ranks)], "group_size": len(ranks), "ranks": ranks_text(ranks)}
    return told, members_of_node(ranks, model.ranks_per_node), model


def _axes_of(mesh: Mesh | None, group: dist.ProcessGroup, ranks: Sequence[int]) -> tuple[str, ...]:
    if len(ranks) == 1:
        return ()
    along = {} if mesh is None else {name: mesh.axis(name).ranks_of(dist.get_rank()) for name in mesh.namespace}
    for name, through in along.items():
        if len(through) == len(ranks) and [*through] == [*ranks]:
            return (name,)
    info = next((each for each in process_groups() if each.group.group_name == group.group_name), None)
    if info is None:
        return ()
    return tuple(next(iter(info.names), "").split()) or (("world",) if info.origin == "default" else ())


# --- how much


_NAMESPACES = ("c10d", "_c10d_functional")

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

_TAKEN = ("tensors", "tensor", "input_tensors", "input_tensor", "input_list", "inputs", "input")
_MADE = ("output_tensors", "output_lists", "output_tensor", "outputs", "output")
_PEER = ("root_rank", "dst", "src")
"""How torch's operators call the tensors that they are given and those that they fill, and one rank."""


class _Sent(NamedTuple):
    """What an operator of torch has sent: tensors in and out, as the call has them, and sizes for each rank."""

    kind: str
    group: dist.ProcessGroup
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    peer: int
    sends: Sequence[int]
    receives: Sequence[int]


def _read(kind: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> _Sent:
    """What a call of an operator has sent, which gave `out`."""
    given = {**dict(zip(torch_private.arguments_of(func), args, strict=False)), **kwargs}
    group = torch_private.group_handed_over(given.get("process_group", given.get("group_name")))
    taken, made, peer = (next((given[key] for key in keys if key in given), None) for keys in (_TAKEN, _MADE, _PEER))
    inputs = _tensors(taken)
    outputs = inputs if kind in ("all_reduce", "broadcast", "reduce") else _tensors(out if made is None else made)
    if kind in ("send", "recv", "barrier"):
        inputs, outputs = inputs if kind == "send" else [], inputs if kind == "recv" else []
    counts = given.get("input_split_sizes", ()), given.get("output_split_sizes", ())
    return _Sent(kind, group, inputs, outputs, -1 if peer is None else peer, *counts)


def _tensors(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    return [x for each in found for x in _tensors(each)] if isinstance(found, list | tuple) else []


def _send_to_itself(sent: _Sent) -> None:
    """Fills a simulated exchange as if each rank sent what this one does. torch 2.11 leaves its memory as it was."""
    for made, taken in zip(sent.outputs, sent.inputs, strict=False):
        if made.shape == taken.shape:
            made.copy_(taken)


def _bytes_over_links(sent: _Sent) -> tuple[int, int]:
    """The bytes that this rank receives from others, and sends to them."""
    size, here, taken, made = sent.group.size(), sent.group.rank(), _bytes(sent.inputs), _bytes(sent.outputs)
    if sent.kind == "all_reduce":
        each = sum(-(-2 * (size - 1) * x.numel() // size) * x.element_size() for x in sent.inputs)
        return each, each
    if sent.kind == "all_to_all":
        return _others(made, sent.receives, size, here), _others(taken, sent.sends, size, here)
    of_all = {
        "all_gather": (made - taken, (size - 1) * taken),
        "reduce_scatter": (taken - made, taken - made),
        "send": (0, taken),
        "recv": (made, 0),
        "broadcast": (0, taken) if here == sent.peer else (taken, 0),
        "reduce": (taken, 0) if here == sent.peer else (0, taken),
        "gather": (made - taken, 0) if here == sent.peer else (0, taken),
        "scatter": (0, taken - made) if here == sent.peer else (made, 0),
    }
    return (0, 0) if size == 1 else of_all.get(sent.kind, (0, 0))


def _others(total: int, counts: Sequence[int], size: int, here: int) -> int:
    """Bytes that aren't this rank's own: of equal parts, or by how many rows each rank has."""
    rows = sum(counts)
    return total * (rows - counts[here]) // rows if rows else total * (size - 1) // size


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
    parameters = [*step.parameters()] if isinstance(step, torch.nn.Module) else []
    with contextlib.ExitStack() as stack:
        around = entered_world(stack, mesh, [*inputs, *parameters])
        stack.enter_context(_as_before(parameters))
        if "torch.distributed.pipelining" in sys.modules and current_world().fake:
            stack.enter_context(torch_private.stages_know_their_shapes())
        with StepRecorder(around) as recorder:
            _backward(step(*inputs))
        return _explanation(_name_of(step), recorder.collectives, around, recorder.exact)


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
def _as_before(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Leaves gradients of parameters, and random numbers, as they are found."""
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def _backward(returned: Any) -> None:
    """The backward pass from all tensors that were returned and have one, each with a gradient of ones.

    That lies as its tensor, and where the tensor is pending it is replicated.
    """
    found: list[torch.Tensor] = []
    torch_private.mapped(
        lambda x: found.append(x) if isinstance(x, torch.Tensor) and x.grad_fn is not None else None, returned
    )
    if found:
        torch.autograd.backward(found, [torch.ones_like(x.detach()) for x in found])


def _name_of(step: Any) -> str:
    # `fully_shard` gives a module a class of its own making.
    kind = type(step).__mro__[2] if isinstance(step, FSDPModule) else type(step)
    return kind.__name__ if isinstance(step, torch.nn.Module) else getattr(step, "__name__", kind.__name__)


# --- what is said


def _explanation(name: str, sent: Sequence[Mapping[str, Any]], mesh: Mesh | None, exact: bool) -> Explanation:
    head = [] if mesh is None else [("mesh", f"{mesh.declaration}, seen from rank {mesh.rank}")]
    if not exact:
        head.append(("note", "an exchange is of sizes that other ranks tell: here as if they told what this one does"))
    totals: dict[str, dict[str, Any]] = {}
    rows: dict[str, Counter[tuple[str, ...]]] = {"forward": Counter(), "backward": Counter()}
    for each in sent:
        over, who = " ".join(each["axes"]) or "-", each["what"]
        zero = {"axes": each["axes"], "collectives": 0, "bytes_in": 0, "bytes_out": 0, "time_us": 0.0}
        total = totals.setdefault(over, zero)
        total["collectives"] += 1
        for amount in ("bytes_in", "bytes_out", "time_us"):
            total[amount] += each[amount]
        who = who if each["by"] == "axes" else f"[{each['by']}] {who}".strip()
        said = ", ".join(filter(None, (each["module"], each["place"].partition(" in ")[0], who)))
        rows[each["phase"]][each["kind"], over, bytes_text(each["bytes_in"]), said] += 1
    last = [(over, *_total_cells(total)) for over, total in totals.items()]
    sections = [Section("", tuple(head)), *(Section(phase, _counted(found)) for phase, found in rows.items())]
    sections.append(Section("in all", tuple(last) or (("nothing is sent",),)))
    facts = {
        "kind": "step",
        "step": name,
        "mesh": None if mesh is None else mesh.declaration,
        "rank": dist.get_rank(),
        "exact": exact,
        "collectives": sent,
        "totals": list(totals.values()),
    }
    return Explanation(f"a step of {name}", tuple(section for section in sections if section.rows), facts)


def _counted(rows: Counter[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The rows, with how often each comes where one comes several times."""
    several = any(count > 1 for count in rows.values())
    counted = ((*((f"{count} x" if count > 1 else "",) if several else ()), *row) for row, count in rows.items())
    return tuple(counted) or (("nothing is sent",),)


def _total_cells(total: Mapping[str, Any]) -> tuple[str, ...]:
    moved = f"{bytes_text(total['bytes_in'])} in, {bytes_text(total['bytes_out'])} out"
    count = total["collectives"]
    return f"{count} collective{'s' * (count > 1)}", moved, time_text(total["time_us"])
