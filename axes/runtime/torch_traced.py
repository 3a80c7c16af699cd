"""torch's private API by which compiled graphs are made and kept, as `torch_private` is for the rest.

| here | private API of torch | what public API would replace it |
| --- | --- | --- |
| `hint_of` | `SymInt.node.hint` | `SymInt.hint` |
| `constant_in_graphs` | `pytree.register_constant`, `__dataclass_params__` (2.11) | a public name for it |
| `current_trace` | `TracingContext` | something to keep for the time of a trace |
| `keep_with_graph` | `OutputGraph.cleanups`, the tracer's graph | a way to give a graph something of one's own |
| `inputs_with_guarded_sizes` | `install_guard`, placeholders of the graph | dynamo's guarding sizes of DTensors |
| `trace_again_with_symbols` | `RestartAnalysis`, the marks of AOTAutograd | a way to ask for a symbol during a trace |
| `DEVICE_MESHES_ARE_INPUTS` | `_register_distributed_opaque_types` | none: with 2.11 as the floor it is needed |
| `passing` | `ShortenTraceback` | none |
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch._guards import TracingContext
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

DEVICE_MESHES_ARE_INPUTS = hasattr(device_mesh, "_register_distributed_opaque_types")
"""Whether a compiled graph takes a `DeviceMesh` for an input (2.13), or has it for a constant (2.11)."""


current_trace: Callable[[], object] = TracingContext.get
"""What stands for this attempt of dynamo's to trace a function; the next attempt has another."""


def hint_of(size: Any) -> int | None:
    """The size that a symbolic one has in the call that is being traced; None where it may be any."""
    return size if isinstance(size, int) else size.node.hint


def constant_in_graphs(kind: type) -> None:
    """Makes what is of an immutable, hashable type a constant of compiled graphs, guarded by equality.

    2.13 takes any object for one where it is handed to a function whose result is constant; 2.11 only
    these, and would put together a frozen dataclass from its fields, which it can't. There a dataclass doesn't
    say that it is frozen.
    """
    pytree.register_constant(kind)
    if dataclasses.is_dataclass(kind) and not DEVICE_MESHES_ARE_INPUTS:
        parameters: Any = copy.copy(kind.__dataclass_params__)  # type: ignore[attr-defined]
        parameters.frozen = False
        kind.__dataclass_params__ = parameters  # type: ignore[attr-defined]


def keep_with_graph(kept: Callable[[], None]) -> bool:
    """Has the graph that dynamo traces keep something alive, with its code and with itself. False outside of a trace.

    A backend may keep the graph and not the code. dynamo calls what it keeps with the code when that goes
    (2.11 to 2.13).
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:
        return False
    output.cleanups.append(kept)  # type: ignore[arg-type]
    tracer = output.current_tracer
    while tracer is not None:
        tracer.graph.__dict__.setdefault("_kept_by_axes", []).append(kept)
        tracer = tracer.parent
    return True


def inputs_with_guarded_sizes() -> list[tuple[DTensor, DTensor]]:
    """The DTensors that have become inputs of the graph that dynamo traces since the last call: `(traced, real)`.

    The graph is guarded here on those of their whole sizes that are numbers in it. dynamo guards these
    of every other tensor, and of a DTensor the shard and the placements alone (2.11 and 2.13): a graph for
    eight rows would serve seven, on the ranks whose shard is the same.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.symbolic_convert import InstructionTranslator

    graph = InstructionTranslator.current_tx().output.root_tracer.graph
    seen = _seen_inputs.setdefault(TracingContext.get(), set())
    arguments = {node.name: node.meta.get("grapharg") for node in graph.find_nodes(op="placeholder")}
    found = []
    for name, argument in arguments.items():
        # A second guard of one tensor would be taken for a second tensor.
        if name not in seen and argument is not None and isinstance(argument.fake_tensor, DTensor):
            install_guard(argument.source.make_guard(GuardBuilder.TENSOR_MATCH))
            found.append((argument.fake_tensor, argument.example))
    seen.update(arguments)
    return found


_seen_inputs: WeakKeyDictionary[TracingContext, set[str]] = WeakKeyDictionary()


def trace_again_with_symbols(x: torch.Tensor, dims: Collection[int]) -> NoReturn:
    """Has dynamo trace the function again, with symbols for these sizes of `x`, which is an input or its shard.

    The mark is the one that AOTAutograd leaves for the next graph: 2.13 has one that isn't guarded; 2.11
    guards none.
    """
    from torch._dynamo.exc import RestartAnalysis
    from torch._functorch._aot_autograd import runtime_wrappers

    is_new = hasattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices")
    mark = "_dynamo_propagated_dynamic_indices" if is_new else "_dynamo_weak_dynamic_indices"
    setattr(x, mark, {*getattr(x, mark, ()), *dims})
    raise RestartAnalysis(restart_reason="axes: the sizes of a shard vary wherever those of the whole do")


def passing(error: Exception) -> Exception:
    """The error as one of its kind that the compiler lets through while it traces a graph, where it else wraps errors.

    What `ShortenTraceback` is, it raises as it is.
    """
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    own = {"__module__": kind.__module__, "first_useful_frame": None, "__reduce__": lambda self: (kind, self.args)}
    found = type(kind.__name__, (kind, ShortenTraceback), own)
    return found.__new__(found, *error.args)
