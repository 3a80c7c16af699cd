"""`rearrange`, `reduce` and `repeat`: einops with an `@`.

    y = axes.rearrange(x, "b s@cp (h d) -> b s h@cp d", h=16)      # Ulysses: one all-to-all
    m = axes.reduce(x, "b s@cp d -> b d", "mean")                  # a local sum and an all-reduce
    r = axes.repeat(x, "b d -> b n@tp d", n=4)                     # each rank makes its own copies

On an ordinary tensor without `@` they are einops:

>>> import torch
>>> rearrange(torch.arange(6), "(a b) -> b a", a=2).tolist()
[[0, 3], [1, 4], [2, 5]]
>>> reduce(torch.arange(6.0), "(a 2) -> a", "max").tolist()
[1.0, 3.0, 5.0]

On DTensors (the global view) the left side asserts how they are sharded; on plain tensors that hold
this rank's shard (the local view) it declares it. What an expression means is told in
`axes.algebra.flow`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import einops
import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError, shown
from axes.algebra.flow import recipe
from axes.algebra.flow.reading import read
from axes.algebra.flow.recipe import Op, op_name
from axes.algebra.flow.rules import REDUCTIONS
from axes.algebra.grammar import checked_text
from axes.algebra.mesh import Mesh
from axes.algebra.sizes import checked_size, given_sizes
from axes.ops.global_view import Grad
from axes.ops.recipes import BoundRecipe
from axes.ops.request import ALONE, apply, requested
from axes.ops.typed import T
from axes.runtime import torch_private
from axes.runtime.graphs import read_once
from axes.runtime.redistribute import Dtypes
from axes.runtime.transforms import PLAIN, check_dense, check_not_wrapped, is_dense

Sizes = Mapping[str, int]


def rearrange(
    x: T | list[T],
    expression: str,
    /,
    mesh: Mesh | None = None,
    comm_dtype: Dtypes = None,
    async_op: bool = False,
    grad: Grad = "resolved",
    *,
    sizes: Sizes | None = None,
    **keywords: int,
) -> T:
    """A tensor with its dims rearranged, and its shards moved where both sides differ.

    x: a DTensor, a plain tensor that holds this rank's shard, or for an expression without `@`
    whatever einops takes. Keywords are sizes of names: whole sizes where the name carries `@`. The
    names of axes are looked up in `mesh`, else in the ambient mesh, else in the tensor's own.
    `comm_dtype` is the dtype in which values travel, or a pair for `(values, gradients)`; with
    `async_op` the last collective is waited for at the result's first use. The gradient of a leaf is
    resolved to its own sharding when it is accumulated; `grad="pending"` leaves that to the caller.

    | expression | is |
    | --- | --- |
    | `"b s@tp d -> b s d"` | all-gather; backward of a DTensor: what its cotangent needs |
    | `"b s d | sum@tp -> b s d"` | all-reduce |
    | `"b s d | sum@tp -> b s@tp d"` | reduce-scatter |
    | `"b s@tp d -> b s d@tp"` | all-to-all |
    | `"b s d -> b s@tp d"` | a local slice |

    Raises `ExpressionError`, `SizeError`, `MeshError` or `ShardingError` on every rank before
    anything is sent. As `einops.rearrange`, with JAX's partition specs after the `@`.

    >>> rearrange(torch.zeros(2, 6), "b (h d) -> b h d", h=3).shape
    torch.Size([2, 3, 2])
    """
    return _called("rearrange", x, expression, "", mesh, comm_dtype, async_op, grad, sizes, keywords)


def reduce(
    x: T | list[T],
    expression: str,
    op: Op,
    /,
    mesh: Mesh | None = None,
    comm_dtype: Dtypes = None,
    async_op: bool = False,
    grad: Grad = "resolved",
    *,
    sizes: Sizes | None = None,
    **keywords: int,
) -> T:
    """The dims that the right side lacks reduced by `op`; across ranks where they are split.

    op: "sum", "mean", "max", "min"; over dims that aren't split also "prod", "any", "all" or a
    function of a tensor and the tuple of its dims. A result that stays pending is named, or `| *`.
    A mean is exact for uneven shards, and an empty shard has no say: where plain shards leave the whole
    size of a split name open, ranks count together, in one more all-reduce of one number. A size that is
    given saves it, and a mean that stays pending, or is over one of several names in a split group, needs
    it. Local sums have the tensor's own dtype whatever `comm_dtype` is; write `x.float()` for a
    wider one. Otherwise as `rearrange`.

    >>> reduce(torch.arange(6.0), "(a b) -> a", "mean", a=2).tolist()
    [1.0, 4.0]
    """
    return _called("reduce", x, expression, op, mesh, comm_dtype, async_op, grad, sizes, keywords)


def repeat(
    x: T | list[T],
    expression: str,
    /,
    mesh: Mesh | None = None,
    comm_dtype: Dtypes = None,
    async_op: bool = False,
    grad: Grad = "resolved",
    *,
    sizes: Sizes | None = None,
    **keywords: int,
) -> T:
    """The tensor repeated along the names that only the right side has, which need sizes.

    A new dim that is split is made split: each rank makes its own copies. Otherwise as `rearrange`.

    >>> repeat(torch.arange(2), "a -> a n", n=3).tolist()
    [[0, 0, 0], [1, 1, 1]]
    """
    return _called("repeat", x, expression, "", mesh, comm_dtype, async_op, grad, sizes, keywords)


def _called(
    kind: str,
    x: Any,
    text: str,
    op: Op,
    mesh: Mesh | None,
    comm_dtype: Dtypes,
    async_op: bool,
    grad: Grad,
    sizes: Sizes | None,
    keywords: dict[str, int],
) -> Any:
    if type(text) is not str:
        checked_text(text, ". The tensor comes first, and the expression behind it")
    request = requested(kind, text, op, mesh, comm_dtype, async_op, grad, sizes, keywords)
    if type(x) is list:
        x = _stacked(kind, x, text)
    if kind == "reduce":
        _check_op(op, x)
    function = op if callable(op) else None
    plain = type(x) in PLAIN or not isinstance(x, DTensor)
    if plain and lacks_axes(text) and not (function and isinstance(x, torch.Tensor)):
        return _by_einops(kind, x, text, request.sizes, op)
    return apply(request, (x,), grad, function)


class RefusedByTorch(ShardingError, RuntimeError):
    """What torch can't compute: dtypes, devices or shapes that don't go together; torch's own error too."""


def lacks_axes(expression: str) -> bool:
    """Whether an expression has nothing that einops doesn't know."""
    return not ("@" in expression or "|" in expression or "=" in expression)


_Pattern = tuple[str, tuple[str, ...], dict[str, int]]


@read_once
def _pattern(kind: str, text: str, rank: int, given: tuple[str, ...]) -> _Pattern:
    """An expression for a tensor of this rank in einops' own characters, whatever its names are.

    einops' reader takes other names and other white space than ours, and what it says of a mistake is about itself.
    Returns the pattern, the letters of the names that are `given` a size, and the sizes of the numbers in the text.
    """
    reading = read(kind, text, (rank,))
    given_sizes(dict.fromkeys(given), None, (), reading.names)
    opened = {whole: inner for whole, inner in reading.wholes if not {*given}.isdisjoint(inner)}
    sides = [
        [[each for atom in slot.atoms for each in opened.get(atom, (atom,))] for slot in term.slots]
        for term in reading.terms
    ]
    atoms = dict.fromkeys(atom for side in sides for group in side for atom in group)
    letters = {atom: f"x{number}" for number, atom in enumerate(atoms)}
    texts = [[" ".join(map(letters.__getitem__, group)) for group in side] for side in sides]
    one, other = (" ".join(text if text.isalnum() else f"({text})" for text in side) for side in texts)
    numbers = {letters[atom]: int(atom.split("#")[0]) for atom in atoms if "#" in atom}
    return f"{one} -> {other}", tuple(letters[name] for name in given), numbers


def _by_einops(kind: str, x: Any, text: str, given: tuple[tuple[str, int], ...], op: Op = "") -> Any:
    """What einops gives for a tensor of any library, or a list of arrays."""
    if torch_private.functorch_is_active():
        check_not_wrapped(f"axes.{kind}", x)
    if not is_dense(x) and isinstance(x, torch.Tensor):
        check_dense(x, f"axes.{kind}")
    shape = getattr(x[0] if type(x) is list else x, "shape", None)
    if shape is None:
        raise ShardingError(f"axes.{kind} takes a tensor; found {shown(x)}")
    shape = (len(x), *shape) if type(x) is list else shape
    pattern, letters, numbers = _pattern(kind, text, len(shape), tuple([name for name, _ in given]))
    known = [(letter, checked_size(*each)) for letter, each in zip(letters, given, strict=True)] if given else ()
    sizes = numbers | {letter: size for letter, size in known if size is not None} if known else numbers
    try:
        return getattr(einops, kind)(x, pattern, *((op,) if op else ()), **sizes)
    except (einops.EinopsError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise
        # What is wrong with names and sizes is said as it is of shards and DTensors.
        _ = BoundRecipe(recipe(kind, text, op_name(op), (None,), (tuple(shape),), ALONE, given)).run
        raise RefusedByTorch(f"axes.{kind}: {error}") from None


def _check_op(op: Op, x: Any) -> None:
    if not callable(op) and not (isinstance(op, str) and op in REDUCTIONS):
        hint = "; the expression comes before it" if isinstance(op, str) and "->" in op else ""
        raise ShardingError(f"reduce knows {', '.join(REDUCTIONS)} and functions; found {shown(op)}{hint}")
    if not isinstance(x, torch.Tensor):
        return
    if isinstance(op, str) and x.dtype in _RARE and not _is_reduced(x.dtype, op):
        raise ShardingError(f"torch has no {op} of {x.dtype}; convert the tensor first")
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise ShardingError(f"a mean of {x.dtype} isn't {x.dtype}; convert it first, or take the sum")
    if op in ("max", "min") and x.is_complex():
        raise ShardingError(f"{x.dtype} has no order, so no {op}")


_RARE = frozenset({torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2})
"""Dtypes for which torch lacks some reductions."""


@functools.lru_cache(maxsize=64)
def _is_reduced(dtype: torch.dtype, op: str) -> bool:
    """Whether torch reduces values of this dtype by an operation."""
    try:
        einops.reduce(torch.zeros(1, 1, dtype=dtype), "a b -> a", op)
    except RuntimeError:
        return False
    return True


def _stacked(kind: str, tensors: list[Any], expression: str) -> Any:
    """A list of tensors as one with a new first dim, as einops takes it; einops itself stacks arrays of others."""
    if tensors and lacks_axes(expression) and not any(isinstance(x, torch.Tensor) for x in tensors):
        return tensors
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
