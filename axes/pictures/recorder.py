"""Every collective of a step, as it is issued: by whom, for which line and module, over which axes, how much.

    explained_step(lambda: model(x).sum().backward(), (), mesh).json()["collectives"]

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from axes import AxesError, CostModel, Layout, Mesh, process_groups, simulate
from axes.extension import (
    Operation,
    ambient_mesh,
    bound_to_job,
    bytes_text,
    checked_mesh,
    current_world,
    is_users,
    line_of_code,
    listen,
    members_of_node,
    model_of,
    ranks_text,
    torch_private,
)
from axes.pictures.panels import Listing, Remark, sheet_of
from axes.pictures.rank_text import time_text
from axes.pictures.show import Explanation

# --- what is recorded


class _Spot(NamedTuple):
    """Where the program is: the path of the module, the line, the expressions that run."""

    module: str = ""
    place: str = ""
    parts: tuple[str, ...] = ()


class StepRecorder(torch_private.DispatchMode):
    """Notes the collectives of this process while it is open, each as the data that `Explanation.json` has of it.

    It is told of modules that are entered and left, and of operations. `mesh` is what groups are named by. `exact`:
    whether bytes are those of a real job. In a simulated world an exchange whose sizes other ranks tell is as if each
    of them told what this one does. `stack`: puts back the gradients of the parameters of all modules that run.
    """

    def __init__(self, mesh: Mesh | None, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self._stack = stack
        self.collectives: list[dict[str, Any]] = []
        self.exact = True
        self._named = functools.lru_cache(maxsize=4096)(functools.partial(_named, mesh))
        self._modules: list[torch.nn.Module] = []
        self._roots: list[torch.nn.Module] = []
        self._paths: dict[int, str] = {}
        # Where the program was when it made a node of autograd, by the node's number, in order.
        self._spots: dict[int, _Spot] = {-1: _Spot()}
        self._running = -1
        self._operation = self._said = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = torch_private.next_node_number() - 1
        if made > next(reversed(self._spots)):
            self._spots[made] = _Spot(self._module(), *Operation.place())
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

    def hear(self, operation: Operation) -> None:
        """Axes is about to communicate."""
        self._said = operation.what

    # where the program is

    def entered(self, module: torch.nn.Module, _: Any) -> None:
        """The forward pass of a module begins."""
        if id(module) not in self._paths:
            known = {id(x) for root in self._roots for x in root.parameters()}
            for parameter in [x for x in module.parameters() if id(x) not in known]:
                self._stack.callback(setattr, parameter, "grad", parameter.grad)
                parameter.grad = None
            self._roots.append(module)  # an id is of this module as long as it lives
            for name, each in module.named_modules():
                self._paths.setdefault(id(each), ".".join(filter(None, (_name_of(module), name))))
        self._modules.append(module)

    def left(self, module: torch.nn.Module, *_: Any) -> None:
        """The forward pass of a module ends."""
        if self._modules and self._modules[-1] is module:
            self._modules.pop()

    def _module(self) -> str:
        return self._paths[id(self._modules[-1])] if self._modules else ""

    def _spot_of_node(self) -> _Spot:
        """Where the node was made whose gradient is being computed; of a leaf, the one that went before.

        That used it last in the forward: autograd has a leaf's gradient accumulated as soon as it is complete.
        """
        number = torch_private.running_node_number()
        if number is None:
            number = self._running if torch_private.running_leaf() is not None else -1
        numbers = [*self._spots]
        return self._spots[numbers[bisect.bisect_right(numbers, number) - 1]]

    # what is sent

    def _record(self, sent: _Sent) -> None:
        caller, fake = _caller(sys._getframe(2)), current_world().fake
        if sent.kind == "all_to_all" and fake:
            _send_to_itself(sent)
        backward = caller.backward or torch_private.backward_pass() >= 0
        spot, leaf = (self._spot_of_node(), torch_private.running_leaf()) if backward else (_Spot(), None)
        module = self._module() or spot.module
        if caller.fsdp is not None:  # which may gather a module's parameters while another one runs
            module = self._paths.get(id(caller.fsdp), module)
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
        if sent.receives and fake and (caller.by != "axes" or self._said.startswith("all_to_all")):
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
                "what": self._what(sent, caller, spot if leaf is None else _Spot()),
                "module": module,
                "place": caller.place or spot.place,
            }
        )

    def _what(self, sent: _Sent, caller: _Caller, spot: _Spot) -> str:
        """The expression, the operation, or the rank at the other end that a collective is of."""
        if caller.by == "axes":
            now = Operation.place()[1]
            if now and not now[-1].startswith("shard_map"):
                return now[-1]
            return f"gradient of {spot.parts[-1]}" if spot.parts and not now else self._said
        if sent.kind in ("send", "recv"):
            return f"{'to' if sent.kind == 'send' else 'from'} rank {dist.get_global_rank(sent.group, sent.peer)}"
        return caller.operation or self._operation if caller.by == DTENSOR else ""


def who(sent: Mapping[str, Any]) -> str:
    """What a collective is of, with who asked for it where that wasn't axes."""
    return sent["what"] if sent["by"] == "axes" else f"[{sent['by']}] {sent['what']}".rstrip()


# --- who asks


FSDP, DTENSOR = "torch: FSDP2", "torch: DTensor"

_ISSUERS = {
    "axes.pictures": "",
    "axes": "axes",
    "torch.distributed.fsdp": FSDP,
    "torch.distributed.tensor": DTENSOR,
    "torch.distributed.pipelining": "torch: pipelining",
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
            found.by = found.by or next(
                (_ISSUERS[name] for name in _ISSUERS if f"{module}.".startswith(f"{name}.")), ""
            )
            if found.by == FSDP and found.fsdp is None:
                found.fsdp = torch_private.module_of_fsdp(frame.f_locals.get("self"))
            if module == "torch.distributed.tensor._api" and not function.startswith("__"):
                found.operation = f"DTensor.{function}"  # the last of several that call one another is what is written
            if module == "torch.distributed.distributed_c10d" and function.endswith("_object_list"):
                found.objects = function
            if is_users(frame):
                found.place, found.by = line_of_code(frame.f_code, frame.f_lasti), found.by or "program"
        frame = frame.f_back
    return found


# --- in which group


def _named(mesh: Mesh | None, group: dist.ProcessGroup) -> tuple[dict[str, Any], int, CostModel]:
    """A group as data, how many of its ranks share a node, and what its collectives cost."""
    ranks, model = dist.get_process_group_ranks(group), CostModel() if mesh is None else model_of(mesh)
    told = {"axes": [*_axes_of(mesh, group, ranks)], "group_size": len(ranks), "ranks": ranks_text(ranks)}
    return told, members_of_node(ranks, model.ranks_per_node), model


def _axes_of(mesh: Mesh | None, group: dist.ProcessGroup, ranks: Sequence[int]) -> Sequence[str]:
    """The names along which the ranks of a group differ, of the mesh if it has any, else those it was made with."""
    if len(ranks) == 1:
        return ()
    if mesh is not None:
        here = dist.get_rank()
        through = {name: [*mesh.axis(name).ranks_of(here)] for name in mesh.namespace}
        several = [name for name in mesh.axis_names if {*through[name]} & {*ranks} > {here}]
        joint = mesh.universe.group(Layout.product(*map(mesh.layout, several)), here)
        if names := [[name] for name in through if through[name] == [*ranks]] or [several] * ({*joint} == {*ranks}):
            return names[0]
    known = (each for each in process_groups() if each.group.group_name == group.group_name)
    return next((each.names[0].split() if each.names else ["world"] * (each.origin == "default") for each in known), ())


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
    """What `step(*inputs)` sends, and the backward pass from what it returns, unless it has run one itself.

    Where no job runs, the world of `mesh` is simulated, seen from the mesh's rank. Gradients of the parameters of the
    modules that ran, and random numbers, are as before.
    """
    parameters = [*step.parameters()] if isinstance(step, torch.nn.Module) else []
    with contextlib.ExitStack() as stack:
        around = entered_world(stack, mesh, [*inputs, *parameters])
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if "torch.distributed.pipelining" in sys.modules and current_world().fake:
            stack.enter_context(torch_private.stages_know_their_shapes())
        recorder = StepRecorder(around, stack)
        stack.enter_context(register_module_forward_pre_hook(recorder.entered))
        stack.enter_context(register_module_forward_hook(recorder.left, always_call=True))
        with listen(recorder.hear), recorder, torch_private.backward_passes() as passes:
            returned = step(*inputs)
            if not passes.called:
                _backward(returned)
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


def _backward(returned: Any) -> None:
    """The backward pass from all tensors that were returned and have one, each with a gradient of ones.

    The gradient is sharded as its tensor, and replicated where the tensor is pending.
    """
    found: list[torch.Tensor] = []
    torch_private.mapped(
        lambda x: found.append(x) if isinstance(x, torch.Tensor) and x.grad_fn is not None else None, returned
    )
    if found:
        torch.autograd.backward(found, [torch.ones_like(x.detach()) for x in found])


def _name_of(step: Any) -> str:
    # `fully_shard` gives a module a class of its own making.
    return str(getattr(step, "__name__", type(step).__name__.removeprefix("FSDP")))


# --- what is said


def _explanation(name: str, sent: Sequence[Mapping[str, Any]], mesh: Mesh | None, exact: bool) -> Explanation:
    head = [] if mesh is None else [f"  mesh  {mesh.declaration}, seen from rank {mesh.rank}"]
    if not exact:
        head.append("  note  an exchange is of sizes that other ranks tell: here as if they told what this one does")
    totals = [
        {"axes": [*axes], "collectives": len(found), **{name: sum(each[name] for each in found) for name in _AMOUNTS}}
        for axes in dict.fromkeys(tuple(each["axes"]) for each in sent)
        for found in [[each for each in sent if (*each["axes"],) == axes]]
    ]
    facts = {
        "kind": "step",
        "step": name,
        "mesh": None if mesh is None else mesh.declaration,
        "rank": dist.get_rank(),
        "exact": exact,
        "collectives": sent,
        "totals": totals,
    }
    sheet = sheet_of(
        f"a step of {name}",
        "",
        Remark(tuple(head), close=True) if head else None,
        *(
            listing_of_sent(phase, [(each, _said(each)) for each in sent if each["phase"] == phase])
            for phase in ("forward", "backward")
        ),
        Listing((), tuple(map(_total_row, totals)), title="by axes") if totals else None,
    )
    return Explanation(lambda room: sheet, facts)


_AMOUNTS = ("bytes_in", "bytes_out", "time_us")


def _said(sent: Mapping[str, Any]) -> str:
    return ", ".join(filter(None, (sent["module"], sent["place"].partition(" in ")[0], who(sent))))


def _total_row(total: Mapping[str, Any]) -> tuple[str, ...]:
    moved = f"{bytes_text(total['bytes_in'])} in, {bytes_text(total['bytes_out'])} out"
    return " ".join(total["axes"]) or "-", f"{total['collectives']} x", moved, time_text(total["time_us"])


def listing_of_sent(title: str, sent: Sequence[tuple[Mapping[str, Any], str]]) -> Listing:
    """Collectives as data, each with the text on it; equal rows once, with how often they come.

    >>> one = {"kind": "all_gather", "axes": ["tp"], "bytes_in": 49152, "bytes_out": 49152, "time_us": 20.4}
    >>> listing_of_sent("forward", [(one, "of x"), (one, "of x")]).rows
    (('2 x', 'all_gather', 'tp', '48.0 KiB', '20 us', 'of x'), ('all together: 96.0 KiB in, 41 us',))
    """
    counts = Counter(_row(each, text) for each, text in sent)
    several = max(counts.values(), default=1) > 1
    rows: list[tuple[str, ...]] = [(*([f"{n} x" if n > 1 else ""] * several), *row) for row, n in counts.items()]
    if len(sent) > 1:
        received, time = (sum(each[name] for each, _ in sent) for name in ("bytes_in", "time_us"))
        rows.append((f"all together: {bytes_text(received)} in, {time_text(time)}",))
    return Listing((), tuple(rows) or (("nothing is sent",),), title=title)


def _row(each: Mapping[str, Any], text: str) -> tuple[str, ...]:
    taken, given = each["bytes_in"], each["bytes_out"]
    moved = bytes_text(taken) if taken == given else f"{bytes_text(taken)} in, {bytes_text(given)} out"
    return each["kind"], " ".join(each["axes"]) or "-", moved, time_text(each["time_us"]), text
