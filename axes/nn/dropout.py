"""Dropout and sampling that are the same on every mesh: they follow from a seed and an element's place in the whole.

    x = axes.nn.dropout(x, 0.1, "b@dp s@tp d")        # in a region: the spec says where this shard lies
    x = axes.nn.dropout(x, 0.1)                       # a DTensor knows it
    tokens = axes.nn.sample(logits, "b v@tp", over="v", temperature=0.8)

torch's dropout draws as many numbers as a shard has elements: ranks that hold copies of one tensor would have to draw
alike, ranks that hold other parts of it otherwise, and neither would draw what one device draws. Here a call draws one
number, its seed, from torch's default CPU generator, and a counter-based generator (that of `axes.rand`) gives each
element its bits. `torch.utils.checkpoint` puts the generator back, so that it drops the same elements once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from axes import Mesh, Sharding, ShardingError, sharding_of
from axes.extension import agree, draw, dtensor, linear, local, read, whole
from axes.nn.functions import T, argmax, check_floats
from axes.nn.options import number


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
    """Zero each element with probability `p`, and multiply the others by `1 / (1 - p)`; the same elements on every
    mesh. Like `torch.nn.functional.dropout`, which draws by rank.

    The result is sharded as `x` is, and nothing is sent, but for the sizes below. In `torch.compile` it breaks the
    graph.

    Args:
        x: A DTensor with any sharding, or a plain tensor, in a region this rank's shard.
        p: The probability, from 0 to 1.
        spec: The dims and axes of a plain shard. A plain tensor on one device needs none. For a DTensor it is an
            assertion.
        training: If False, `x` is returned as it is.
        mesh: The mesh, by default the ambient one or that of `x`.
        seed: Decides, with `p` and the whole shape, which elements are dropped. By default it is drawn from torch's
            default CPU generator, once for each call. Seed the generators of all ranks alike
            (`torch.manual_seed(0)`), and draw numbers that differ by rank from other generators.
            `torch.utils.checkpoint` drops the same elements again.
        sizes: Whole sizes of names, for names that collide with a parameter.
        **keywords: Whole sizes of names. For a split dim of a plain shard without one, the ranks exchange their
            sizes in one small all-gather at each call, and the host waits.

    Returns:
        A tensor that is sharded as `x` is.

    Raises:
        ShardingError: `p` isn't from 0 to 1, `x` has no floats, a plain shard has no spec, or the spec doesn't fit.
        DesyncError: The generators of the ranks differ at the first call on a mesh; raised on all ranks.

    Examples:
        >>> import axes
        >>> whole = dropout(torch.ones(4, 6), 0.5, seed=7)
        >>> with axes.simulate(4, rank=3), axes.init_mesh("dp=2 tp=2"):
        ...     shard = dropout(torch.ones(2, 3), 0.5, "b@dp d@tp", seed=7)
        >>> torch.equal(shard, whole[2:, 3:])
        True
    """
    check_floats("nn.dropout", x)
    number("axes.nn.dropout: p is a probability, from 0 to 1", p, 0, 1)
    sharding, shape = whole("axes.nn.dropout", x, spec, mesh, {**keywords, **(sizes or {})})
    if any(op not in ("sum", "mean") for op, _ in sharding.pending):
        raise ShardingError(f"axes.nn.dropout of a pending max or min would change it; resolve '{sharding}' first")
    if not training or p == 0:
        return x
    bits = _seed("dropout", sharding, seed)
    if isinstance(x, DTensor):
        return _dropped(x, bits, float(p))
    return _without(x, sharding, shape, bits, p)


@torch.compiler.disable(reason="axes.nn.sample draws its seed outside of the graph")
@torch.no_grad()
def sample(
    logits: T,
    spec: str,
    /,
    over: str,
    temperature: float = 1.0,
    mesh: Mesh | None = None,
    seed: int | None = None,
    **sizes: int,
) -> T:
    """Draw an index along one dim with the probabilities of `softmax(logits / temperature)`. Like
    `torch.distributions.Categorical(logits=x).sample()`.

    One seed gives the same index on every mesh and on one device. The vocabulary isn't gathered: each rank adds
    Gumbel noise to its own elements, and the largest sum wins, by the two all-gathers of `axes.argmax`.

    Args:
        logits: A DTensor, or in a region this rank's shard.
        spec: The dims of the logits and their axes.
        over: The name of the dim.
        temperature: From 0 on; 0 takes the largest element.
        mesh: The mesh, by default the ambient one or that of the logits.
        seed: As in `dropout`.
        **sizes: The whole size of the dim, of plain shards.

    Returns:
        Indices in int64, without the dim.

    Raises:
        ShardingError: The temperature is below 0; else as `axes.nn.dropout` and `axes.argmax`.

    Examples:
        >>> sample(torch.tensor([[0.0, 100.0, 0.0]]), "b v", over="v", seed=7).tolist()
        [1]
    """
    number("axes.nn.sample: temperature is a number from 0", temperature, 0, 1e300)
    check_floats("nn.sample", logits)
    if temperature == 0:
        return argmax(logits, spec, over, mesh, **sizes)
    sharding, shape = whole("axes.nn.sample", logits, None if isinstance(logits, DTensor) else spec, mesh, sizes)
    shard = local(logits)
    noise = draw(torch.empty_like(shard, dtype=torch.float64), sharding, shape, _seed("sample", sharding, seed))
    noisy = shard.double() / temperature - (-noise.log()).log()
    return argmax(dtensor(noisy, logits) if isinstance(logits, DTensor) else noisy, spec, over, mesh, **sizes)


class Dropout(torch.nn.Module):
    """`axes.nn.dropout` as a layer: `Dropout(0.1, "b@dp s@tp d")`; `Dropout(0.1)` for DTensors and on one device. Like
    `torch.nn.Dropout`, with the same elements dropped on every mesh.

    It drops elements in training mode. Keywords are whole sizes of names in the spec.

    Examples:
        >>> import axes
        >>> axes.nn.Dropout(0.5).eval()(torch.ones(2)).tolist()
        [1.0, 1.0]
    """

    def __init__(self, p: float = 0.5, spec: str | None = None, **sizes: int):
        super().__init__()
        number("axes.nn.dropout: p is a probability, from 0 to 1", p, 0, 1)
        read(spec or "")
        self.p, self.spec, self.sizes = p, spec, sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` with some of its elements dropped."""
        return dropout(x, self.p, self.spec, self.training, sizes=self.sizes)

    def extra_repr(self) -> str:
        """The probability, the spec and the sizes."""
        spec = [] if self.spec is None else [repr(self.spec)]
        return ", ".join([f"p={self.p}", *spec, *(f"{name}={size}" for name, size in self.sizes.items())])


# --- what is dropped


def _seed(what: str, sharding: Sharding, seed: int | None) -> int:
    """The seed of a call, mixed so that neighbouring seeds have nothing in common."""
    if seed is None and sharding.mesh.size > 1:
        _compare_generators(sharding.mesh)
    seed = int(torch.randint(2**62, (1,), dtype=torch.int64, device="cpu")) if seed is None else seed
    number(f"axes.nn.{what}: seed is a whole number of at most 64 bits", seed, -(2**63), 2**64 - 1, whole=True)
    return int.from_bytes(hashlib.sha256(f"{what} {int(seed)}".encode()).digest()[:7], "big")


def _compare_generators(mesh: Mesh) -> None:
    """`DesyncError` where the default generators of the mesh's ranks differ; asked once for each mesh."""
    state = hashlib.sha256(torch.random.get_rng_state().numpy().tobytes()).hexdigest()[:16]
    said = f"a default CPU generator (seed {torch.initial_seed()}) in the state {state}"
    advice = "seed all ranks alike before it, torch.manual_seed(0); or pass seed=, one number on all ranks"
    ranks = mesh.ranks_of(mesh.layout_of_all) or ()
    agree("the first axes.nn.dropout or sample", ranks, said, advice=advice, once=True)


def _without(x: torch.Tensor, sharding: Sharding, shape: tuple[int, ...], seed: int, p: float) -> torch.Tensor:
    """A shard without the elements that are dropped."""
    kept = draw(torch.empty(x.shape, dtype=torch.bool, device=x.device), sharding, shape, seed, "kept", p)
    return torch.where(kept, x if p == 1 else x * (1 / (1 - p)), 0.0)


def _dropped(x: DTensor, seed: int, p: float) -> DTensor:
    """Dropout of a DTensor. Its gradient loses the same elements, in the sharding in which it arrives."""

    def run(x: DTensor) -> DTensor:
        shard, sharding, shape = local(x), sharding_of(x), tuple(x.shape)
        if sharding.mesh.coordinate is not None:
            shard = _without(shard, sharding, shape, seed, p)
        return dtensor(shard, x)

    return linear(run, lambda g: _dropped(g, seed, p), x)
