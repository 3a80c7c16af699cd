"""`rearrange`, `reduce`, `repeat` and `einsum`: einops with an `@`.

    y = axes.rearrange(x, "b s@cp (h d) -> b s h@cp d", h=16)      # Ulysses: one all-to-all
    m = axes.reduce(x, "b s@cp d -> b d", "mean")                  # a local sum and an all-reduce
    r = axes.repeat(x, "b d -> b n@tp d", n=4)                     # each rank makes its own copies
    h = axes.einsum(x, w, "b s d, d f@tp -> b s f@tp")             # column parallel; b and s flow
    y = axes.einsum(h, v, "b s f@tp, f@tp d -> b s@tp d")          # row parallel, reduce-scattered

Without `@` they are einops on a tensor:

>>> import torch
>>> rearrange(torch.arange(6), "(a b) -> b a", a=2).tolist()
[[0, 3], [1, 4], [2, 5]]
>>> reduce(torch.arange(6.0), "(a 2) -> a", "max").tolist()
[1.0, 3.0, 5.0]

In an einsum a name that several operands share is multiplied, one that the result lacks is summed. What is split is
multiplied where it lies: a sum over a split name is pending, and the right side says what becomes of it, summed
everywhere (`b s d`), summed and scattered (`b s@tp d`), or kept (`| sum@tp`, `| *`).

On DTensors (the global view) the left side asserts how they are sharded; on plain tensors that hold
this rank's shard (the local view) it declares it. What an expression means is told in
`axes.algebra.expressions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ExpressionError, ShardingError, shown
from axes.algebra.expressions.recipe import Op
from axes.algebra.expressions.rules import REDUCTIONS
from axes.algebra.grammar import checked_text
from axes.algebra.mesh import Mesh
from axes.ops.autocast import of_factor
from axes.ops.request import T, apply, requested
from axes.runtime import torch_private
from axes.runtime.operation import check_dense, check_transforms
from axes.runtime.redistribute import Dtypes

Sizes = Mapping[str, int]


def rearrange(
    x: T | list[T],
    expression: str,
    /,
    mesh: Mesh | None = None,
    comm_dtype: Dtypes = None,
    async_op: bool = False,
    *,
    sizes: Sizes | None = None,
    **keywords: int,
) -> T:
    """Rearrange the dims of a tensor, and move its shards where the two sides differ.

    | expression | communication |
    | --- | --- |
    | `"b s@tp d -> b s d"` | all-gather |
    | `"b s d | sum@tp -> b s d"` | all-reduce |
    | `"b s d | sum@tp -> b s@tp d"` | reduce-scatter |
    | `"b s@tp d -> b s d@tp"` | all-to-all |
    | `"b s d -> b s@tp d"` | none, a local slice |

    Like `einops.rearrange`, with JAX's partition specs after the `@`.

    Args:
        x: A DTensor; a plain tensor, which is this rank's shard; or a list of these, which are stacked along a new
            first dim.
        expression: The dims before and after, such as `"b s@tp d -> b s d@tp"`.
        mesh: The mesh whose axes the expression names. By default the ambient mesh, else that of the tensor.
        comm_dtype: The dtype in which values are sent, or a pair for `(values, gradients)`.
        async_op: Wait for the last collective at the first use of the result.
        sizes: Sizes of names, for names that collide with a parameter.
        **keywords: Sizes of names; whole sizes where a name has an `@`.

    Returns:
        A DTensor for a DTensor, a plain tensor for a plain one.

    Raises:
        ExpressionError: The text isn't an expression.
        SizeError: Sizes don't follow or disagree.
        MeshError: There is no mesh, or it lacks an axis.
        ShardingError: The tensor isn't sharded as the left side says. Every error is raised on all ranks, before
            anything is sent.

    Examples:
        >>> rearrange(torch.zeros(2, 6), "b (h d) -> b h d", h=3).shape
        torch.Size([2, 3, 2])
    """
    return _called("rearrange", x, expression, "", mesh, comm_dtype, async_op, sizes, keywords)


def reduce(
    x: T | list[T],
    expression: str,
    op: Op,
    /,
    mesh: Mesh | None = None,
    comm_dtype: Dtypes = None,
    async_op: bool = False,
    *,
    sizes: Sizes | None = None,
    **keywords: int,
) -> T:
    """Reduce the dims that the right side lacks, also across ranks where they are split.

    A mean is exact for uneven shards. If the whole size of a split name is open, as with plain shards, the ranks
    count together in one more all-reduce of one number; a given size saves it. Like `einops.reduce`.

    Args:
        x: As in `rearrange`.
        expression: The dims before and after, such as `"b@dp s -> s"`. A result that stays pending says so: `|
            sum@dp` or `| *`.
        op: `"sum"`, `"mean"`, `"max"` or `"min"`. Over dims that aren't split also `"prod"`, `"any"`, `"all"`, or a
            function of a tensor and the tuple of its dims.
        mesh: As in `rearrange`.
        comm_dtype: As in `rearrange`. Local sums have the tensor's own dtype; write `x.float()` for a wider one.
        async_op: As in `rearrange`.
        sizes: As in `rearrange`.
        **keywords: As in `rearrange`. A mean that stays pending, or that is over one of several names of a split
            group, needs the sizes.

    Returns:
        The reduced tensor.

    Raises:
        ExpressionError: The text isn't an expression.
        SizeError: Sizes don't follow or disagree.
        MeshError: There is no mesh, or it lacks an axis.
        ShardingError: The tensor isn't sharded as the left side says, or the result would stay pending and the right
            side doesn't say so.

    Examples:
        >>> reduce(torch.arange(6.0), "(a b) -> a", "mean", a=2).tolist()
        [1.0, 4.0]
    """
    return _called("reduce", x, expression, op, mesh, comm_dtype, async_op, sizes, keywords)


def repeat(
    x: T | list[T],
    expression: str,
    /,
    mesh: Mesh | None = None,
    comm_dtype: Dtypes = None,
    async_op: bool = False,
    *,
    sizes: Sizes | None = None,
    **keywords: int,
) -> T:
    """Repeat a tensor along the names that only the right side has.

    A new dim that is split sends nothing: each rank makes its own copies. Like `einops.repeat`.

    Args:
        x: As in `rearrange`.
        expression: The dims before and after, such as `"a -> a n"`.
        mesh: As in `rearrange`.
        comm_dtype: As in `rearrange`.
        async_op: As in `rearrange`.
        sizes: As in `rearrange`.
        **keywords: Sizes of names. Every new name needs one.

    Returns:
        The repeated tensor.

    Raises:
        ExpressionError: The text isn't an expression.
        SizeError: A new name has no size, or sizes disagree.
        MeshError: There is no mesh, or it lacks an axis.
        ShardingError: The tensor isn't sharded as the left side says.

    Examples:
        >>> repeat(torch.arange(2), "a -> a n", n=3).tolist()
        [[0, 0, 0], [1, 1, 1]]
    """
    return _called("repeat", x, expression, "", mesh, comm_dtype, async_op, sizes, keywords)


def einsum(
    *tensors_and_expression: *tuple[*tuple[T, ...], str],
    mesh: Mesh | None = None,
    comm_dtype: Dtypes = None,
    async_op: bool = False,
    sizes: Mapping[str, int] | None = None,
    **keywords: int,
) -> T:
    """Multiply any number of tensors, and sum over the names that the result lacks.

    Values and gradients are those of `torch.einsum` on the whole tensors. An axis splits one name of all operands,
    or is pending in one of them.

    | expression | computes |
    | --- | --- |
    | `"b s d, d f@tp -> b s f@tp"` | a local product |
    | `"b s f@tp, f@tp d -> b s@tp d"` | a product and a reduce-scatter |
    | `"b s f@tp, f@tp d -> b s d"` | a product and an all-reduce |
    | `"b s f, f d -> b s d | *"` | a product, which stays pending where `f` is split |

    Args:
        *tensors_and_expression: The operands, all DTensors or all plain shards, and the expression last.
        mesh: As in `rearrange`.
        comm_dtype: As in `rearrange`. The local product has the operands' dtype: with `comm_dtype=torch.float32`,
            products in bfloat16 are rounded on each rank and then added up in 32 bits.
        async_op: As in `rearrange`.
        sizes: As in `rearrange`.
        **keywords: Sizes of names that the operands leave open.

    Returns:
        The product. Sums of integers over names of one operand alone are in int64; other integers keep torch's
        dtype.

    Raises:
        ExpressionError: The text isn't an expression.
        SizeError: Operands disagree about a size.
        MeshError: There is no mesh, or it lacks an axis.
        ShardingError: Operands disagree about a split, or the result would stay pending and the right side doesn't
            say so. The message has the reshard that helps.

    Examples:
        >>> einsum(torch.arange(3.0), torch.arange(3.0), "i, i ->").item()
        5.0
    """
    *tensors, expression = tensors_and_expression or (None,)
    distributed = [isinstance(x, DTensor) for x in tensors]
    if not isinstance(expression, str) or not distributed or not all(distributed):
        _check_arguments(tensors, expression, distributed)
    request = requested("einsum", expression, "sum", mesh, comm_dtype, async_op, sizes, keywords)
    _check_dtypes(tensors)
    return apply(request, tensors)


def _called(
    kind: str,
    x: Any,
    text: str,
    op: Op,
    mesh: Mesh | None,
    comm_dtype: Dtypes,
    async_op: bool,
    sizes: Sizes | None,
    keywords: dict[str, int],
) -> Any:
    if type(text) is not str:
        checked_text(text, ". The tensor comes first, and the expression behind it")
    request = requested(kind, text, op, mesh, comm_dtype, async_op, sizes, keywords)
    if type(x) is list:
        x = _stacked(kind, x)
    if kind == "reduce":
        _check_op(op, x)
    function = op if callable(op) else None
    return apply(request, (x,), function)


def _check_op(op: Op, x: Any) -> None:
    if not callable(op) and not (isinstance(op, str) and op in REDUCTIONS):
        hint = "; the expression comes before it" if isinstance(op, str) and "->" in op else ""
        raise ShardingError(f"reduce knows {', '.join(REDUCTIONS)} and functions; found {shown(op)}{hint}")
    if not isinstance(x, torch.Tensor):
        return
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise ShardingError(f"a mean of {x.dtype} isn't {x.dtype}; convert it first, or take the sum")
    if op in ("max", "min") and x.is_complex():
        raise ShardingError(f"{x.dtype} has no order, so no {op}")


def _stacked(kind: str, tensors: list[Any]) -> Any:
    """A list of tensors as one with a new first dim, as einops takes it."""
    if not tensors or not all(isinstance(x, torch.Tensor) for x in tensors):
        found = ", ".join(sorted({type(x).__name__ for x in tensors})) or "none"
        raise ShardingError(f"axes.{kind} takes a list of tensors; found {found}")
    for x in tensors:
        check_dense(x, f"axes.{kind}")
    alike = {(x.shape, x.dtype, (x.device_mesh, x.placements) if isinstance(x, DTensor) else None) for x in tensors}
    if len(alike) > 1:
        found = ", ".join(f"{list(x.shape)} {x.dtype} {getattr(x, 'placements', '')}".strip() for x in tensors)
        raise ShardingError(
            "the tensors of a list have one shape, dtype and sharding, and are DTensors or plain tensors, not both; "
            f"found {found}"
        )
    return torch.stack(tensors)


def _check_arguments(tensors: list[Any], expression: object, distributed: list[bool]) -> None:
    if not isinstance(expression, str) or not tensors or not all(isinstance(x, torch.Tensor) for x in tensors):
        kinds = ", ".join([type(each).__name__ for each in (*tensors, expression)[:8]])
        raise ExpressionError(
            f"einsum takes tensors and, last, the expression, like axes.einsum(x, w, 'b d, d f -> b f'); found {kinds}"
        )
    check_transforms("axes.einsum")
    if any(distributed):
        plain = distributed.index(False) + 1
        raise ShardingError(
            f"einsum takes DTensors or plain tensors, not both: operand {plain} is plain. Make it a DTensor with "
            "axes.shard or axes.from_local, or take the shards of the others with axes.to_local"
        )
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
