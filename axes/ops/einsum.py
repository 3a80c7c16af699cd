"""`einsum`: sums of products by name, on whole and on sharded tensors.

    h = axes.einsum(x, w, "b s d, d f@tp -> b s f@tp")             # column parallel; b and s flow
    y = axes.einsum(h, v, "b s f@tp, f@tp d -> b s@tp d")          # row parallel, reduce-scattered

A name that several operands share is multiplied, one that the result lacks is summed. On ordinary
tensors without `@` it is einops':

>>> import torch
>>> einsum(torch.ones(2, 3), torch.ones(3, 4), "a k, k b -> a b").tolist()
[[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]

What is split is multiplied where it lies. A sum over a split name is pending, and the right side
says what becomes of it: summed everywhere (`b s d`), summed and scattered (`b s@tp d`), or kept
(`| sum@tp`, `| *`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ExpressionError, ShardingError
from axes.algebra.mesh import Mesh
from axes.ops.autocast import of_factor
from axes.ops.global_view import Grad
from axes.ops.request import apply, requested
from axes.ops.typed import T
from axes.runtime import torch_private
from axes.runtime.redistribute import Dtypes
from axes.runtime.transforms import check_dense, check_not_wrapped


def einsum(
    *tensors_and_expression: *tuple[*tuple[T, ...], str],
    mesh: Mesh | None = None,
    comm_dtype: Dtypes = None,
    async_op: bool = False,
    grad: Grad = "resolved",
    sizes: Mapping[str, int] | None = None,
    **keywords: int,
) -> T:
    """The einsum of any number of tensors by the expression that comes last.

    All operands are DTensors, or all are plain tensors that hold this rank's shard; their results
    and gradients are those of `torch.einsum` on the whole. One axis splits one name of all the
    operands, or is pending in one of them. Groups of names are opened and merged as in `rearrange`;
    keywords are sizes, where the operands leave them open; `comm_dtype`, `async_op` and `grad` are as
    in `rearrange`. The local product has the operands' dtype: with `comm_dtype=torch.float32` bfloat16
    products are rounded on each rank before they are added up in 32 bits.

    | expression | is |
    | --- | --- |
    | `"b s d, d f@tp -> b s f@tp"` | a local product |
    | `"b s f@tp, f@tp d -> b s@tp d"` | product, reduce-scatter |
    | `"b s f@tp, f@tp d -> b s d"` | product, all-reduce |
    | `"b s f, f d -> b s d | *"` | product; pending where f is split |

    Raises `ExpressionError`, `SizeError`, `MeshError` or `ShardingError` on every rank before
    anything is sent: operands that disagree on a name are shown with the reshard that helps.

    >>> einsum(torch.arange(3.0), torch.arange(3.0), "i, i ->").item()
    5.0
    """
    *tensors, expression = tensors_and_expression or (None,)
    if not isinstance(expression, str) or not tensors:
        raise _wrong_arguments(tensors_and_expression)
    request = requested("einsum", expression, "sum", mesh, comm_dtype, async_op, grad, sizes, keywords)
    distributed = [isinstance(x, DTensor) for x in tensors]
    if not all(distributed):
        _check_plain(tensors, distributed)
    _check_dtypes(tensors)
    return apply(request, tensors, grad)


def _wrong_arguments(found: tuple[object, ...]) -> ExpressionError:
    kinds = ", ".join(type(each).__name__ for each in found[:8]) or "nothing"
    return ExpressionError(
        f"einsum takes tensors and, last, the expression, like axes.einsum(x, w, 'b d, d f -> b f'); found {kinds}"
    )


def _check_plain(tensors: list[Any], distributed: list[bool]) -> None:
    for x in tensors if torch_private.functorch_is_active() else ():
        check_not_wrapped("axes.einsum", x)
    if any(distributed):
        plain = distributed.index(False) + 1
        raise ShardingError(
            f"einsum takes DTensors or plain tensors, not both: operand {plain} is plain. Make it a DTensor with "
            "axes.shard or axes.from_local, or take the shards of the others with axes.to_local"
        )
    for number, x in enumerate(tensors):
        if not isinstance(x, torch.Tensor):
            raise ShardingError(f"operand {number + 1} of einsum isn't a tensor but {type(x).__name__}")
        check_dense(x, "einsum")
    # torch multiplies memory that isn't there: of a tensor on "meta" and another it gives numbers without a warning.
    if len(tensors) > 1 and len(devices := {x.device for x in tensors}) > 1 and all(x.ndim for x in tensors):
        names = ", ".join(sorted(map(str, devices)))
        raise ShardingError(f"the operands of einsum lie on one device; found {names}. Write x.to(device)")


_UNMULTIPLIED = frozenset({torch.bool, torch.uint16, torch.uint32, torch.uint64})
_MULTIPLIED = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""What most calls have: found at once."""


def _check_dtypes(tensors: list[Any]) -> None:
    """`ShardingError` for dtypes that torch doesn't multiply, or not with each other."""
    kinds = {x.dtype for x in tensors}
    if len(kinds) > 1 and torch_private.autocast_may_be_on():
        kinds = {of_factor(x) for x in tensors}
    if len(kinds) == 1 and not kinds.isdisjoint(_MULTIPLIED):
        return
    names = ", ".join(dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in tensors))
    if len(kinds) > 1:
        raise ShardingError(f"the operands of einsum have one dtype; found {names}. Write x.to(dtype)")
    if any(kind in _UNMULTIPLIED or (kind.is_floating_point and kind.itemsize < 2) for kind in kinds):
        raise ShardingError(
            f"einsum multiplies numbers of 8 bits and more, and torch doesn't those of {names}; convert them"
        )
