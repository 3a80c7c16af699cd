"""Dropout that is the same on every mesh: what is dropped follows from a seed and an element's place in the whole.

    x = axes.nn.dropout(x, 0.1, "b@dp s@tp d")        # in a region: the spec says where this shard lies
    x = axes.nn.dropout(x, 0.1)                       # a DTensor knows it

torch's dropout draws as many numbers as a shard has elements: ranks that hold copies of one tensor would have to draw
alike, ranks that hold other parts of it otherwise, and neither would draw what one device draws. Here a call draws one
number, its seed, from torch's default CPU generator, and a counter-based generator (that of `axes.rand`) gives each
element its bits. `torch.utils.checkpoint` puts the generator back, so that it drops the same elements once more.
"""

from __future__ import annotations

import functools
import hashlib
import math
import numbers
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import MeshError, ShardingError, shown
from axes.algebra.grammar import parse_spec
from axes.algebra.mesh import Mesh, ambient_mesh, checked_mesh, required_mesh
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import checked_flag, given_sizes, written_sizes
from axes.algebra.specs import marked_sharding
from axes.ops.request import ALONE, T
from axes.runtime import torch_private
from axes.runtime.agreement import agree, ranks_text
from axes.runtime.border import spec_around
from axes.runtime.check import waited
from axes.runtime.factories import draw_into, kept_at
from axes.runtime.groups import current_world, of_world, time_limit
from axes.runtime.leaves import used
from axes.runtime.linear import linear
from axes.runtime.shards import Given, LocalPart, check_share, read_shard, told_shapes
from axes.runtime.torch_placements import sharding_of_spec
from axes.runtime.transforms import check_dense, check_transforms

_WIDE = 2**63
"""A random number is one of so many."""


@torch.compiler.disable(reason="axes.nn.dropout draws its seed outside of the graph")
def dropout(
    x: T,
    /,
    p: float = 0.5,
    spec: str | None = None,
    training: bool = True,
    mesh: Mesh | None = None,
    seed: int | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    **keywords: int,
) -> T:
    """Zero each element with probability `p`, and multiply the others by `1 / (1 - p)`; the same on every mesh.

    x: a DTensor on any mesh, with any sharding (a pending sum or mean included, of which every rank drops the same);
        or a plain tensor that holds this rank's shard, as in a region.
    spec: where the shard lies in the whole tensor, by the names of `mesh` or the ambient mesh; it is whole, so that a
        bare dim is unsplit. A plain tensor on one device needs none. Of a DTensor it is an assertion.
    training: without it, `x` as it is.
    seed: the elements that are dropped follow from it, `p` and the whole shape. By default a number that is drawn from
        torch's default CPU generator, once for each call, so that every call drops others, and
        `torch.utils.checkpoint` (with `preserve_rng_state`, its default) the same again. The generators of all ranks
        have to go together: seed them alike (`torch.manual_seed(0)`), and draw what ranks draw differently from
        generators of their own.
    sizes, keywords: the whole sizes of names in the spec. Of a split dim of a plain tensor without one, ranks tell each
        other how much they have, in one small all-gather at each call, for which the host waits.

    The result is sharded as `x` is, nothing else is sent, and the gradient is dropped where `x` was, however it
    arrives. One device drops the same elements as any mesh does; the generator is of integers, on any kind of device.
    In `torch.compile` it breaks the graph.

    Raises `ShardingError` for a `p` that isn't from 0 to 1, a tensor that isn't of floats, a plain tensor in a region
    without a spec, and a spec that the tensor doesn't fit; `DesyncError` on all ranks of a mesh whose generators
    differ at its first call.

    >>> import axes
    >>> whole = dropout(torch.ones(4, 6), 0.5, seed=7)
    >>> with axes.simulate(4, rank=3), axes.init_mesh("dp=2 tp=2"):
    ...     shard = dropout(torch.ones(2, 3), 0.5, "b@dp d@tp", seed=7)
    >>> torch.equal(shard, whole[2:, 3:])
    True
    """
    if not isinstance(x, torch.Tensor):
        raise ShardingError(f"axes.nn.dropout takes a tensor; found {type(x).__name__}")
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise ShardingError(f"axes.nn.dropout is of floats; found {x.dtype}. Write x.float()")
    _check_probability(p)
    check_dense(x, "axes.nn.dropout")
    if mesh is not None:
        checked_mesh(mesh)
    is_whole = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    if seed is not None and not (is_whole and -(2**63) <= seed < 2**64):
        raise ShardingError(f"axes.nn.dropout: seed is a whole number of at most 64 bits; found {shown(seed)}")
    if torch_private.transforms_are_on() and (spec is not None or isinstance(x, DTensor)):
        check_transforms("axes.nn.dropout", (x,))
    part = _held(x, spec, mesh, written_sizes(keywords, sizes))
    if not checked_flag("axes.nn.dropout: training", training) or p == 0:
        return x
    bits = _seed(None if part is None else part.sharding, seed)
    if isinstance(x, DTensor):
        return _dropped(used(x), bits, float(p))
    if part is None:
        return _without(x, _kept(x, None, tuple(x.shape), bits, p), p)
    (whole,) = told_shapes(f"axes.nn.dropout '{part.sharding}'", part.sharding.mesh, (part,), (x,))
    return _without(x, _kept(x, part.sharding.sized(whole), whole, bits, p), p)


class Dropout(torch.nn.Module):
    """`axes.nn.dropout` as a layer: `Dropout(0.1, "b@dp s@tp d")`; `Dropout(0.1)` for DTensors and for one device.

    It drops while the module is in training mode. Keywords are whole sizes of names in the spec.
    """

    def __init__(self, p: float = 0.5, spec: str | None = None, **sizes: int):
        super().__init__()
        _check_probability(p)
        dims = () if spec is None else parse_spec(spec).dims
        given_sizes(sizes, None, (), [str(factor.name) for dim in dims for factor in dim.factors if factor.name])
        self.p, self.spec, self.sizes = p, spec, sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` with some of its elements dropped."""
        return dropout(x, self.p, self.spec, self.training, sizes=self.sizes)

    def extra_repr(self) -> str:
        """The probability, the spec and the sizes."""
        spec = [] if self.spec is None else [repr(self.spec)]
        return ", ".join([f"p={self.p}", *spec, *(f"{name}={size}" for name, size in self.sizes.items())])


def _check_probability(p: object) -> None:
    if isinstance(p, bool) or not isinstance(p, numbers.Real) or not p <= 1 or p < 0:
        raise ShardingError(f"axes.nn.dropout: p is a probability, from 0 to 1; found {shown(p)}")


# --- where a tensor lies


def _held(x: torch.Tensor, spec: str | None, mesh: Mesh | None, sizes: Given) -> LocalPart | None:
    """Which part of a tensor is here; None where every element is."""
    if isinstance(x, DTensor):
        held = torch_private.spec_of(x)
        sharding, whole = sharding_of_spec(held), tuple(held.shape)
        if spec is not None:
            names = mesh if mesh is not None else ambient_mesh()
            names = names if names is not None and names.universe == sharding.universe else sharding.mesh
            _check_said(spec, marked_sharding(names, spec, sizes, x.ndim)[0], sharding, whole)
        return LocalPart(sharding, tuple(torch_private.local_of(x).shape), whole)
    if spec is None:
        around = ambient_mesh() if mesh is None else checked_mesh(mesh)
        if around is not None and around.size > 1:
            raise ShardingError(
                f"axes.nn.dropout of a plain tensor on {around!r} needs to know which part of the whole it is; write "
                "a spec, as in axes.nn.dropout(x, 0.1, 'b@dp s d')"
            )
        return None
    around = mesh if mesh is not None else ambient_mesh()
    if around is None and "@" not in spec:
        around = ALONE
    return _shard(tuple(x.shape), spec, required_mesh(around, "axes.nn.dropout"), sizes)


def _shard(local: tuple[int, ...], spec: str, mesh: Mesh, sizes: Given) -> LocalPart:
    if mesh.size > 1 and mesh.binding is None:
        raise MeshError(f"{mesh!r} is algebra alone; axes.nn.dropout needs one made with axes.init_mesh(...)")
    if mesh.coordinate is None:
        raise MeshError(f"rank {mesh.rank} isn't one of the ranks of {mesh!r}, so it holds no shard\nin  {spec}")
    part = read_shard(mesh, spec, local, sizes)
    _check_linear(part.sharding)
    check_share(part, part.even)
    return part


def _check_said(spec: str, said: Sharding, sharding: Sharding, whole: tuple[int, ...]) -> None:
    if said.ndim != len(whole) or not said.sized(whole).is_equivalent(sharding.sized(whole), whole):
        raise ShardingError(
            f"axes.nn.dropout: the tensor isn't sharded as the spec says\n  spec    {spec}\n  tensor  {sharding}"
        )


def _check_linear(sharding: Sharding) -> None:
    if any(op not in ("sum", "mean") for op, _ in sharding.pending):
        raise ShardingError(f"axes.nn.dropout of a pending max or min would change it; resolve '{sharding}' first")


# --- what is dropped


def _seed(sharding: Sharding | None, seed: int | None) -> int:
    """The seed of a call, mixed so that neighbouring seeds have nothing in common."""
    if seed is None:
        if sharding is not None and sharding.mesh.size > 1:
            _compare_generators(sharding.mesh)
        seed = int(torch.randint(2**62, (1,), dtype=torch.int64, device="cpu"))
    return int.from_bytes(hashlib.sha256(f"dropout {int(seed)}".encode()).digest()[:7], "big")


@of_world(1024)
def _compare_generators(mesh: Mesh) -> None:
    """`DesyncError` where the default generators of the mesh's ranks differ; asked once for each mesh."""
    world, ranks = current_world(), mesh.ranks_of(mesh.layout_of_all)
    if world.fake or ranks is None:
        return
    state = hashlib.sha256(torch.random.get_rng_state().numpy().tobytes()).hexdigest()[:16]
    advice = "seed all ranks alike before it, torch.manual_seed(0); or pass seed=, one number on all ranks"
    barrier = world.barrier("dropout", ranks, f"the first axes.nn.dropout over {ranks_text(ranks)}", advice)
    said = f"a default CPU generator (seed {torch.initial_seed()}) in the state {state}"
    agree(world.member, barrier, said, time_limit(mesh.binding.device_type))


def _kept(x: torch.Tensor, sharding: Sharding | None, whole: tuple[int, ...], seed: int, p: float) -> torch.Tensor:
    """Which elements of a shard are kept."""
    kept = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    if p == 1:
        return kept.zero_()
    threshold = math.ceil(p * _WIDE)

    def draw(places: torch.Tensor, seed: int, _: torch.dtype) -> torch.Tensor:
        return kept_at(places, seed, threshold)

    draw_into(kept, _everything(x.ndim) if sharding is None else sharding, whole, draw, seed)
    return kept


@functools.lru_cache(maxsize=64)
def _everything(ndim: int) -> Sharding:
    return marked_sharding(ALONE, " ".join("_" * ndim), (), ndim)[0]


def _without(x: torch.Tensor, kept: torch.Tensor, p: float) -> torch.Tensor:
    return torch.where(kept, x if p == 1 else x * (1 / (1 - p)), 0.0)


def _dropped(x: DTensor, seed: int, p: float) -> DTensor:
    """Dropout of a DTensor. Its gradient loses the same elements, in the sharding in which it arrives."""

    def run(x: DTensor) -> DTensor:
        spec, local = torch_private.spec_of(x), waited(torch_private.local_of(x))
        sharding = sharding_of_spec(spec)
        _check_linear(sharding)
        if sharding.mesh.coordinate is not None:
            local = _without(local, _kept(local, sharding, tuple(spec.shape), seed, p), p)
        return torch_private.dtensor(local, spec_around(local, spec.mesh, spec.placements, tuple(spec.shape)))

    return linear(run, lambda g: _dropped(g, seed, p), x)


__all__ = ["Dropout", "dropout"]
