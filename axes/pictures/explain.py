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
from axes.pictures.operations import explained_operation
from axes.pictures.recorder import explained_step
from axes.pictures.transfer_sheet import explained_transfer, seen_transfer
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
    """Say what an expression does on a mesh, list every collective of a step, or show what a transfer moves.

    **An expression**, `explain("b s@tp d -> b s d", (8, 64, 32), mesh="tp=4")`: how it is read, its sizes, this
    rank's shards, and the communication forward and backward, with bytes and estimated time. No process is needed.

    **A step**, `explain(step, x, y)`: runs `step(x, y)`, and the backward pass from its result if that needs
    gradients. Each collective has its origin (axes, the program, or torch, as DTensor and FSDP2), the expression or
    operation, the axes, the bytes, the path of the module, and the line of the program; a gradient has the line of
    the forward pass. In `axes.simulate` one process shows the step of any rank; in a running job all ranks call it.
    Compiled functions run eagerly. Gradients of parameters and random numbers are afterwards as before.

    **A transfer**, `explain(move)` or `explain(move.at(rank))`: the tensors and their shardings on both sides, the
    bytes of all ranks beside the least possible, and the buckets of one rank. With tensors, `explain(move,
    tensors)`, it is a step.

    Args:
        what: An expression, a function, a module or a transfer.
        *inputs: The whole shapes of the operands, or the arguments of the step.
        mesh: A mesh or its text, by default the ambient mesh. A step without a job gets a simulated job of this
            mesh.
        dtype: The dtype of the operands.
        op: The reduction, for an expression that drops names. An expression of one operand is a rearrangement, a
            reduction or a repetition, and one of several operands an einsum. Explain a region by its function.
        sizes: Sizes of names, for names that collide with a parameter.
        **keywords: Sizes of names. Without shapes, the sizes of all names.

    Returns:
        An `Explanation`, which prints itself, and has `json()`, `html()` and `svg()`.

    Raises:
        AxesError: The argument can't be explained.
        MeshError: There is no mesh.
        SizeError: Sizes are missing. An expression raises what its operation raises, too.

    Examples:
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
        >>> found = explain(step, mesh="tp=4").json()["collectives"]
        >>> [(each["kind"], each["axes"], each["bytes_in"]) for each in found]
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
