"""torch's private API by which a step is observed: what autograd runs, who issues a collective, what an operator takes.

As `axes.runtime.torch_private` is for the rest of axes; read on 2.11.0 and 2.13.0.

| here | private API of torch | what public API would replace it |
| --- | --- | --- |
| `next_node_number` | `torch._C._autograd._get_sequence_nr` | the number of the next node, in `torch.autograd.graph` |
| `running_node_number`, `running_leaf` | `torch._C._current_autograd_node` | a way to the node that runs |
| `group_handed_over` | `_resolve_process_group` | operators that take what `torch.distributed` gives out |
| `module_of_fsdp` | `FSDPParamGroup.modules` | hooks of FSDP2 around what it sends |
| `arguments_of` | `OpOverload._schema` | a public schema |
| `stages_know_their_shapes` | `PipelineStage._warmup_...` | an argument of the stage |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import FSDPModule

next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next autograd node of this thread gets; nodes are numbered in the order of their making."""


def running_node_number() -> int | None:
    """The number of the node whose gradient this thread computes just now; None where it computes none."""
    node = torch._C._current_autograd_node()
    return None if node is None or hasattr(node, "variable") else node._sequence_nr()


def running_leaf() -> torch.Tensor | None:
    """The leaf whose gradient is accumulated just now, hooks of the leaf included."""
    return getattr(torch._C._current_autograd_node(), "variable", None)


def group_handed_over(given: Any) -> dist.ProcessGroup:
    """The process group that an operator of torch is called with: boxed, by its name, or itself."""
    if isinstance(given, str):
        return c10d._resolve_process_group(c10d.GroupName(given))
    return given if isinstance(given, dist.ProcessGroup) else dist.ProcessGroup.unbox(given)


def class_before_fsdp(module: torch.nn.Module) -> type:
    """The class that a module had before `fully_shard` gave it one of its own making."""
    return type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)


def module_of_fsdp(holder: object) -> torch.nn.Module | None:
    """The first module of a group of parameters that FSDP2 gathers together; None where `holder` is no such group."""
    modules = getattr(holder, "modules", None) if type(holder).__name__ == "FSDPParamGroup" else None
    return modules[0] if isinstance(modules, tuple) and modules else None


def arguments_of(func: Any) -> list[str]:
    """The names of what an operator takes, in order."""
    return [argument.name for argument in func._schema.arguments]


@contextlib.contextmanager
def stages_know_their_shapes() -> Iterator[None]:
    """In this block no stage of a pipeline asks the others whether they know their shapes: it takes it that all do.

    Since 2.13 stages vote before their first step, and one that was made without `input_args` and `output_args` has all
    ask one another for shapes; before, only that one asks. In a simulated world nobody votes.
    """
    from torch.distributed.pipelining.stage import PipelineStage

    kept = {name: vars(PipelineStage)[name] for name in _VOTES if name in vars(PipelineStage)}
    for name, method in _VOTES.items() if kept else ():
        setattr(PipelineStage, name, method)
    try:
        yield
    finally:
        for name, found in kept.items():
            setattr(PipelineStage, name, found)


def _own_vote(stage: Any, has_backward: bool, received_acc: torch.Tensor | None = None) -> torch.Tensor:
    """1 where the stage knows its shapes; of stages on one rank, where all do."""
    from torch.distributed.pipelining.stage import InferenceMode

    own = torch.tensor([int(not InferenceMode.needs_dynamic(stage._user_meta, has_backward))], dtype=torch.int32)
    stage._vote_of_axes = own if received_acc is None else own * received_acc
    return stage._vote_of_axes


def _own_result(stage: Any, received_result: torch.Tensor | None = None) -> torch.Tensor:
    """The result of the vote on this rank alone."""
    return stage._vote_of_axes if received_result is None else received_result


_VOTES = {"_warmup_forward_vote": _own_vote, "_warmup_backward_result": _own_result}
