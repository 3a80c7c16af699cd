"""Sharded tensors from nothing: each rank builds its shard, nobody the whole.

    axes.zeros("vocab@tp embed", mesh=mesh, vocab=32_000, embed=4096, dtype=torch.bfloat16)

Random values depend on the seed and on an element's place in the whole tensor alone, so the same
seed gives the same tensor on every mesh and with every sharding (JAX's partitionable `threefry`
promises the same). The generator is a counter hashed by splitmix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError, shown
from axes.algebra.mesh import Mesh, required_mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import Indices, Sharding, whole_shape
from axes.algebra.sizes import written_sizes
from axes.algebra.specs import parsed_sharding
from axes.runtime.border import resolving
from axes.runtime.sharded import Sizes, broadcast_on, dtensor_of

_BLOCK = {"cpu": 1 << 16}
_LARGE_BLOCK = 1 << 20
"""How many elements are drawn at once, by the type of device: some 50 bytes each beside the shard. A CPU keeps few of
them in its cache; elsewhere each block costs some twenty kernels."""

_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

Draw = Callable[[torch.Tensor, int, torch.dtype], torch.Tensor]
"""Random values from places in the whole tensor, a seed and a dtype."""

Fill = float | Draw | None
"""What a tensor is filled with: a value, random ones, or what lies in memory."""


def zeros(
    spec: str,
    /,
    *,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    sizes: Sizes | None = None,
    **keywords: int,
) -> DTensor:
    """A sharded tensor of zeros.

    Args:
        spec: Its dims and their axes. Every dim has a size: in the text (`"b@dp d=16"`), as a keyword or in `sizes`.
        mesh: The mesh, by default the ambient one.
        dtype: The dtype, by default torch's default dtype.
        requires_grad: Whether the tensor is a leaf that needs a gradient.
        sizes: Sizes of names, for names that collide with a parameter.
        **keywords: Whole sizes of names.

    Returns:
        A DTensor on the mesh's device.

    Raises:
        SizeError: A dim has no size.
        ShardingError: DTensor can't represent the sharding.
        MeshError: There is no mesh, or it lacks an axis.

    Examples:
        >>> import axes
        >>> with axes.simulate(4), axes.init_mesh("dp=4", device_type="cpu"):
        ...     axes.zeros("b@dp d", b=8, d=16).to_local().shape
        torch.Size([2, 16])
    """
    return _made("axes.zeros", 0, spec, mesh, dtype, requires_grad, sizes, keywords)


def ones(
    spec: str,
    /,
    *,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    sizes: Sizes | None = None,
    **keywords: int,
) -> DTensor:
    """A sharded tensor of ones. Arguments and errors are those of `zeros`.

    Examples:
        >>> import axes
        >>> with axes.simulate(4), axes.init_mesh("dp=4", device_type="cpu"):
        ...     axes.ones("b@dp d=2", b=4).to_local().tolist()
        [[1.0, 1.0]]
    """
    return _made("axes.ones", 1, spec, mesh, dtype, requires_grad, sizes, keywords)


def full(
    spec: str,
    value: float,
    /,
    *,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    sizes: Sizes | None = None,
    **keywords: int,
) -> DTensor:
    """A sharded tensor of one value. The other arguments and the errors are those of `zeros`.

    Args:
        value: The value of every element. The dtype is that of the value by default.

    Examples:
        >>> import axes
        >>> with axes.simulate(4), axes.init_mesh("dp=4", device_type="cpu"):
        ...     axes.full("b@dp d", -1.0, b=4, d=2).to_local().tolist()
        [[-1.0, -1.0]]
    """
    try:
        dtype = torch.full((), value, dtype=dtype, device="cpu").dtype
    except Exception as error:  # the many kinds in which torch says that a number doesn't fit its dtype
        of = "a tensor" if dtype is None else dtype
        raise ShardingError(
            f"axes.full takes a number; found {shown(value)}, which is no value of {of}: {error}"
        ) from None
    return _made("axes.full", value, spec, mesh, dtype, requires_grad, sizes, keywords)


def empty(
    spec: str,
    /,
    *,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    sizes: Sizes | None = None,
    **keywords: int,
) -> DTensor:
    """A sharded tensor of arbitrary values. Arguments and errors are those of `zeros`.

    Examples:
        >>> import axes
        >>> with axes.simulate(4), axes.init_mesh("dp=4", device_type="cpu"):
        ...     axes.empty("b@dp d", b=8, d=16).to_local().shape
        torch.Size([2, 16])
    """
    return _made("axes.empty", None, spec, mesh, dtype, requires_grad, sizes, keywords)


def rand(
    spec: str,
    /,
    *,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    sizes: Sizes | None = None,
    **keywords: int,
) -> DTensor:
    """A sharded tensor of random values, uniform in [0, 1). Arguments and errors are those of `zeros`.

    The same seed gives the same tensor on every mesh. The seed is drawn from torch's default CPU generator of the
    mesh's first rank.

    Examples:
        >>> import axes
        >>> with axes.simulate(4), axes.init_mesh("dp=4", device_type="cpu"):
        ...     axes.rand("b@dp d", b=8, d=16).to_local().shape
        torch.Size([2, 16])
    """
    return _made("axes.rand", uniform_at, spec, mesh, dtype, requires_grad, sizes, keywords)


def randn(
    spec: str,
    /,
    *,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    sizes: Sizes | None = None,
    **keywords: int,
) -> DTensor:
    """A sharded tensor of normal random values, with mean 0 and variance 1. Arguments and errors are those of `zeros`.

    The same seed gives the same tensor on every mesh. The seed is drawn from torch's default CPU generator of the
    mesh's first rank.

    Examples:
        >>> import axes
        >>> with axes.simulate(4), axes.init_mesh("dp=4", device_type="cpu"):
        ...     axes.randn("b@dp d", b=8, d=16).to_local().shape
        torch.Size([2, 16])
    """
    return _made("axes.randn", normal_at, spec, mesh, dtype, requires_grad, sizes, keywords)


def _made(
    function: str,
    fill: Fill,
    spec: str,
    mesh: Mesh | None,
    dtype: torch.dtype | None,
    requires_grad: bool,
    sizes: Sizes | None,
    keywords: Mapping[str, int],
) -> DTensor:
    mesh = required_mesh(mesh, function)
    sharding = parsed_sharding(mesh, spec, written_sizes(keywords, sizes))
    if sharding.pending:
        raise ShardingError(f"{function} makes whole values; found '{spec}' with something pending")
    shape = whole_shape(sharding)
    check_torch_can(sharding, shape)
    device_type, is_member = mesh.device_mesh.device_type, mesh.coordinate is not None
    local = torch.empty(sharding.local_shape(shape) if is_member else (0,), dtype=dtype, device=device_type)
    if callable(fill) and local.dtype not in _BITS:
        raise ShardingError(f"{function} makes floating point values; found {local.dtype}")
    if requires_grad and not (local.is_floating_point() or local.is_complex()):
        raise ShardingError(f"{function}: {local.dtype} has no gradient; found requires_grad=True")
    if callable(fill) and is_member:
        draw_into(local, sharding, shape, fill, agreed_seeds([mesh])[mesh])
    elif not callable(fill) and fill is not None:
        local.fill_(fill)
    return resolving(dtensor_of(local, sharding, shape)).requires_grad_(requires_grad)


def draw_into(local: torch.Tensor, sharding: Sharding, shape: Sequence[int], draw: Draw, seed: int) -> None:
    """Fill this rank's shard of a tensor of `shape` with what its elements draw, each by its place in the whole."""
    indices = [positions(found, local.device) for found in sharding.local_indices(shape)]
    drawn = local.contiguous()
    for block, places in _blocks(drawn, indices, shape):
        block.copy_(draw(places, seed, local.dtype))
    if drawn is not local:
        local.copy_(drawn)


def agreed_seeds(meshes: Iterable[Mesh]) -> dict[Mesh, int]:
    """For each mesh a seed, from the default generator of its first rank. A rank draws one number for all meshes."""
    # By the generator of the CPU, whatever torch.set_default_device says.
    seed = torch.randint(2**62, (1,), dtype=torch.int64, device="cpu")
    return {mesh: int(broadcast_on(mesh, seed, "a seed")) for mesh in dict.fromkeys(meshes)}


def positions(indices: Indices, device: torch.device) -> torch.Tensor:
    """The indices of a dim as numbers."""
    runs = (indices,) if isinstance(indices, slice) else indices
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def _blocks(
    local: torch.Tensor, indices: Sequence[torch.Tensor], shape: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a contiguous shard, each with the place of its elements in the whole, counted row-major."""
    one = torch.zeros(1, dtype=torch.int64, device=local.device)
    rows, last = one, indices[-1] if indices else one
    for extent, part in zip(shape, indices[:-1], strict=False):
        rows = (rows.unsqueeze(-1) * extent + part).flatten()
    table, most = local.view(len(rows), len(last)), _BLOCK.get(local.device.type, _LARGE_BLOCK)
    height = max(1, most // max(1, len(last)))
    for top, left in itertools.product(range(0, len(rows), height), range(0, len(last), most)):
        down, along = slice(top, top + height), slice(left, left + most)
        yield table[down, along], rows[down].unsqueeze(-1) * math.prod(shape[-1:]) + last[along]


def _hashed(counter: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function: 64 well-mixed bits for each counter."""
    x = counter * -7046029254386353131  # 0x9E3779B97F4A7C15, the golden gamma
    x.bitwise_xor_(_shifted(x, 30)).mul_(-4658895280553007687)  # 0xBF58476D1CE4E5B9
    x.bitwise_xor_(_shifted(x, 27)).mul_(-7723592293110705685)  # 0x94D049BB133111EB
    return x.bitwise_xor_(_shifted(x, 31))


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _fraction(counter: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Uniform multiples of 2**-bits in [0, 1)."""
    return _shifted(_hashed(counter), 64 - bits).to(dtype) * 2.0**-bits


def uniform_at(places: torch.Tensor, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Uniform values in [0, 1), a function of their places in the tensor and of the seed alone."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return _fraction(places + seed, _BITS[dtype], exact)


def kept_at(places: torch.Tensor, seed: int, threshold: int) -> torch.Tensor:
    """Whether 63 random bits, a function of their places in the tensor and of the seed alone, reach the threshold."""
    return _hashed(places + seed).bitwise_and_(2**63 - 1) >= threshold


def normal_at(places: torch.Tensor, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal values, a function of their places in the tensor and of the seed alone."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    radius = 1 - _fraction(places * 2 + seed, _BITS[exact], exact)  # in (0, 1]: the logarithm is finite
    angle = _fraction(places * 2 + 1 + seed, _BITS[exact], exact)
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()
