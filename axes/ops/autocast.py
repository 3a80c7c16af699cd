"""`torch.autocast`: in which dtype an operation is computed, as torch would compute it on the whole tensors.

Autocast casts inside of torch's operations, by what a call turns out to be: of two operands a product
that sums is computed in 16 bits, and one that only multiplies isn't; a dim of size 1 is no sum. Ranks
would differ, since a shard may have size 1 where the whole has more. So operands are cast before, to
the dtype that torch gives to the result of the same call on the whole, and what follows runs without
autocast. The casts are differentiable: gradients come back in the dtype of the operand.

>>> with torch.autocast("cpu", torch.bfloat16):
...     _of_einsum("ij,jk->ik", ((2, 3), (3, 4)), (torch.float32,) * 2, *_state("cpu"))
...     _of_einsum("ij,jk->ik", ((2, 1), (1, 4)), (torch.float32,) * 2, *_state("cpu"))
torch.bfloat16
torch.float32
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import einops
import torch

from axes.algebra.errors import ShardingError
from axes.ops.contraction import equation
from axes.ops.extents import Extents
from axes.runtime import torch_private
from axes.runtime.symbols import hints

Dtypes = tuple[torch.dtype, ...]
Shapes = tuple[tuple[int, ...], ...]


def wanted(extents: Extents, operands: Sequence[torch.Tensor]) -> torch.dtype | None:
    """The dtype to cast floating operands to; None where autocast has no say."""
    device, found = operands[0].device.type, extents.recipe
    op = found.op
    if found.kind not in ("einsum", "reduce") or callable(op) or not torch.is_autocast_enabled(device):
        return None
    dtypes = tuple([x.dtype for x in operands])
    if len(operands) == 1:
        return _of_reduction(op, dtypes[0], *_state(device))
    terms = tuple([i.atoms for i in found.inputs])
    known = {atom for atoms in terms for atom in atoms}
    result = tuple(dict.fromkeys(atom for atom in found.result.atoms if atom in known))
    shapes = tuple([hints(extents.shape(atoms)) for atoms in terms])
    return _of_einsum(equation(terms, result), shapes, dtypes, *_state(device))


def is_cast(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether an operand changes its dtype: integers and complex numbers don't."""
    return x.dtype != dtype and x.dtype.is_floating_point and dtype.is_floating_point


def _state(device_type: str) -> tuple[str, torch.dtype]:
    return device_type, torch.get_autocast_dtype(device_type)


@functools.lru_cache(maxsize=4096)
def _of_einsum(equation: str, shapes: Shapes, dtypes: Dtypes, device_type: str, autocast: torch.dtype) -> torch.dtype:
    """The dtype of `torch.einsum` of such tensors."""
    try:
        with torch_private.fake_tensors(), torch.autocast(device_type, autocast):
            pairs = zip(shapes, dtypes, strict=True)
            return torch.einsum(equation, *[torch.empty(s, dtype=d, device=device_type) for s, d in pairs]).dtype
    except RuntimeError as error:
        names = ", ".join(map(str, dtypes))
        raise ShardingError(f"under autocast torch has no einsum of {names}: {error}. Convert one of them") from None


@functools.lru_cache(maxsize=256)
def _of_reduction(op: str, dtype: torch.dtype, device_type: str, autocast: torch.dtype) -> torch.dtype:
    """The dtype of `einops.reduce`."""
    with torch_private.fake_tensors(), torch.autocast(device_type, autocast):
        return einops.reduce(torch.empty(2, 2, dtype=dtype, device=device_type), "a b -> a", op).dtype


@torch.compiler.assume_constant_result
def of_function(call: str, dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype in which one of torch's functions is computed: `dtype`, where autocast has no say.

    A constant in a compiled graph, which is guarded by the state of autocast.
    """
    if not torch.is_autocast_enabled(device_type):
        return dtype
    return _of_function(call, dtype, *_state(device_type))


@functools.lru_cache(maxsize=256)
def _of_function(call: str, dtype: torch.dtype, device_type: str, autocast: torch.dtype) -> torch.dtype:
    with torch_private.fake_tensors(), torch.autocast(device_type, autocast):
        return _CALLS[call](torch.empty(2, 2, dtype=dtype, device=device_type)).dtype


def _no_labels(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64, device=x.device)


_CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: torch.softmax(x, 0),
    "logsumexp": lambda x: torch.logsumexp(x, 0),
    "rms_norm": lambda x: torch.nn.functional.rms_norm(x, (2,)),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (2,)),
    "cross_entropy": lambda x: torch.nn.functional.cross_entropy(x, _no_labels(x)),
    "embedding": lambda x: torch.nn.functional.embedding(_no_labels(x), x),
}
