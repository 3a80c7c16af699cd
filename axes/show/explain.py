"""`axes.explain`: what an operation, a step of a model or a transfer sends, before it runs anywhere.

print(axes.explain("b s@tp d -> b s d@tp", (8, 2048, 4096), mesh="dp=4 tp=2"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from axes.algebra.errors import AxesError, shown
from axes.algebra.explanation import Explanation
from axes.algebra.mesh import Mesh, required_mesh
from axes.algebra.opaque import Dtype
from axes.algebra.plan import dtype_name
from axes.algebra.sizes import written_sizes
from axes.show.operations import explained_operation
from axes.show.recorder import explained_step
from axes.show.transfer_sheet import explained_transfer, seen_transfer
from axes.transfers.transfers import Transfer


def explain(
    what: str | Callable[..., Any],
    /,
    *inputs: Any,
    mesh: Mesh | str | None = None,
    dtype: str | Dtype = "float32",
    op: str = "sum",
    sizes: Mapping[str, int] | None = None,
    **keywords: int,
) -> Explanation:
    """What an expression does on a mesh, every collective of a step of a module or function, or what a transfer moves.

    **An expression**, `explain("b s@tp d -> b s d", (8, 64, 32), mesh="tp=4")`: how it is read, its sizes, this rank's
    shards, and what is sent forward and backward with bytes and estimated time. `inputs` are the whole shapes of its
    operands; without them, keywords are the sizes of all names. The left side is how the operands lie. An expression of
    one operand is a rearrangement, a reduction by `op` or a repetition, one of several an einsum. `dtype` is that of
    the tensors. No process is needed. A region is explained as a step, with its function.

    **A step**, `explain(step, x, y)`: `step(x, y)` runs, and then the backward pass from what it returns, where that
    needs gradients. Of each collective it is told who asked for it (axes, the program, or torch unasked, as DTensor
    and FSDP2 do), the expression or operation, the axes, bytes, the path of the module and the line of the program;
    for a gradient the line of the forward. Totals are per axis. In a simulated world (`axes.simulate`) one process
    shows the step of any rank; in a running job all ranks call it. What is compiled runs eagerly. Gradients of a
    module's parameters, and random numbers, are afterwards as before.

    **A transfer**, `explain(move)` or `explain(move.at(rank))`: the tensors with how they lie on both sides, the bytes
    of all ranks with the least that any plan could send, and bucket by bucket what the rank does. With tensors,
    `explain(move, tensors)`, it is a step.

    `mesh` is a mesh or its text, the ambient mesh by default. Where no job runs, a step gets a simulated world of that
    mesh, which is ambient in it. The result prints itself, and has `json()`, `html()` and `svg()`.

    Raises for an expression what its operation raises, `MeshError` without a mesh, `SizeError` for sizes that are
    missing, `AxesError` for what can't be explained.

    >>> import torch, axes
    >>> print(explain("b s@tp d -> b s d", (8, 64, 32), mesh="dp=2 tp=4"))
    rearrange "b s@tp d -> b s d"
    read as
      operand  [8, 64, 32] float32  b s@tp d
      result   [8, 64, 32] float32  b s d
      sizes    b=8 s=64 d=32
      mesh     dp=2 tp=4, seen from rank 0
    shards
      operand  [8, 16, 32]  at most 16.0 KiB on a rank
      result   [8, 64, 32]  at most 64.0 KiB on a rank
    communication
      all_gather  tp  48.0 KiB  20 us  result
    backward, of DTensors: the result's gradient lies as the result
      nothing is sent
    backward, of plain shards: the sum of all ranks' losses
      reduce_scatter  tp  48.0 KiB  20 us  gradient
    >>> def step():
    ...     x = axes.ones("b@tp d", b=8, d=4).requires_grad_()
    ...     return axes.einsum(x, "b@tp d -> d").sum()
    >>> [(each["kind"], each["axes"], each["bytes_in"]) for each in explain(step, mesh="tp=4").json()["collectives"]]
    [('all_reduce', ['tp'], 24)]
    """
    given = dict(written_sizes(keywords, sizes))
    if isinstance(what, str):
        where = Mesh(mesh) if isinstance(mesh, str) else required_mesh(mesh, "axes.explain")
        return explained_operation(what, inputs, where, dtype_name(dtype), op, given)
    if not callable(what):
        raise AxesError(
            f"axes.explain takes the text of an expression, a module, a function or a transfer; found {shown(what)}"
        )
    if isinstance(what, Transfer) and not inputs:
        if mesh is not None or given:
            raise AxesError("a transfer has its meshes and sizes; axes.explain takes nothing else with it")
        return explained_transfer(seen_transfer(what))
    if given or not isinstance(dtype, str) or (dtype, op) != ("float32", "sum"):
        raise AxesError(
            "sizes, dtype and op are of expressions; pass keywords of a step in a function: "
            "axes.explain(lambda x: model(x, cache=None), x)"
        )
    return explained_step(what, inputs, mesh)
