"""The functions of `axes.extension`, and the names of the runtime that it has; see there."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import MeshError, ShardingError
from axes.algebra.layout import Universe
from axes.algebra.mesh import Mesh, ambient_mesh, required_mesh, use_mesh
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import written_sizes
from axes.ops.global_view import shared_cotangent
from axes.ops.request import ALONE
from axes.runtime import agreement, torch_private, watching
from axes.runtime.agreement import (
    LINGER_SECONDS,
    Barrier,
    Member,
    MissedError,
    agree_at,
    in_time,
    note_key,
    polled,
    ranks_text,
)
from axes.runtime.axis_groups import communicator
from axes.runtime.border import resolving, spec_around
from axes.runtime.checkpoint import parts_of as boxes
from axes.runtime.factories import Draw, draw_into, kept_at, normal_at, uniform_at
from axes.runtime.groups import World, abort_group_of, as_timeout, current_world, group_of, of_world, say_why
from axes.runtime.linear import count_writes as written
from axes.runtime.linear import linear
from axes.runtime.operation import (
    Listener,
    Operation,
    as_plain,
    check_dense,
    check_transforms,
    collective,
    heard,
    is_dense,
    waited,
)
from axes.runtime.packing import Grid, arranged, elements_of
from axes.runtime.sharded import check_share, dtensor_of, read_shard, sharding_of, to_local, told_shapes
from axes.runtime.watching import (
    at_user_place,
    context,
    is_users,
    line_of_code,
    part_said,
    passed_files,
    user_frame,
    whole_text,
    within,
)
from axes.runtime.world import bound_to_job

T = TypeVar("T", bound=torch.Tensor)


def whole(
    what: str,
    x: torch.Tensor,
    spec: str | None = None,
    mesh: Mesh | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[Sharding, tuple[int, ...]]:
    """The sharding and the whole shape of the tensor of which `x` is this rank's shard, by its spec; or of a DTensor.

    what: who asks, as errors say it. spec: of a DTensor an assertion; without one a plain tensor is whole, on a mesh of
    one rank or none. mesh: where names are looked up, the ambient mesh by default; a spec without an `@` needs none.
    sizes: whole sizes of names. Of a split dim without one, ranks tell each other how much they have, in one small
    all-gather, for which the host waits.

    Raises `ShardingError` where `x` isn't the shard that the spec says, `SizeError` on all ranks whose parts together
    aren't one tensor, `MeshError` without a mesh or outside of it.

    >>> import axes
    >>> with axes.simulate(4, rank=3), axes.init_mesh("dp=2 tp=2"):
    ...     sharding, shape = whole("a test", torch.ones(2, 3), "b@dp d@tp")
    ...     print(sharding, shape, sharding.local_indices(shape)[1])
    b@dp d@tp (4, 6) slice(3, 6, None)
    """
    if isinstance(x, DTensor):
        with contextlib.nullcontext() if mesh is None else use_mesh(mesh), torch.no_grad():
            to_local(x, spec)  # refuses a spec that isn't that of the tensor
        return sharding_of(x), tuple(x.shape)
    around = mesh if mesh is not None else ambient_mesh()
    if spec is None:
        if around is not None and around.size > 1:
            raise ShardingError(
                f"{what} of a plain tensor on {around!r} needs to know which part of the whole it is; write a spec, "
                "like 'b@dp s d'"
            )
        return ALONE.sharding(" ".join("_" * x.ndim)), tuple(x.shape)
    around = ALONE if around is None and "@" not in spec else required_mesh(around, what)
    if around.size > 1:
        around._bound(what)
    if around.coordinate is None:
        raise MeshError(f"rank {around.rank} isn't one of the ranks of {around!r}, so it holds no shard\nin  {spec}")
    part = read_shard(around, spec, tuple(x.shape), written_sizes(sizes or {}))
    check_share(part, part.even)
    (shape,) = told_shapes(f"{what} '{part.sharding}'", around, (part,), (x,))
    return part.sharding.sized(shape), shape


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, outside of autograd and waited for; a plain tensor itself.

    >>> import axes
    >>> with axes.simulate(2), axes.init_mesh("tp=2"):
    ...     local(axes.ones("a@tp", a=4)).shape
    torch.Size([2])
    """
    return waited(torch_private.local_of(x)) if isinstance(x, DTensor) else x


def dtensor(
    shard: torch.Tensor, like: DTensor | Sharding, shape: Sequence[int] = (), requires_grad: bool | None = None
) -> DTensor:
    """The DTensor whose shard on this rank is `shard`; nothing is copied, sent or checked.

    like: another DTensor, whose whole shape and placements it has; or a sharding, with the whole `shape`.
    requires_grad: makes it a `torch.nn.Parameter`, whose gradients are brought to its sharding as they arrive. Outside
    of autograd: a map from shards to DTensors with a gradient is made by `linear`, or is `axes.from_local`.

    >>> import axes
    >>> with axes.simulate(2), axes.init_mesh("tp=2") as mesh:
    ...     axes.spec_of(dtensor(torch.ones(2), mesh.sharding("a@tp"), (4,)))
    '_@tp'
    """
    if isinstance(like, Sharding):
        made = dtensor_of(shard, like, shape)
    else:
        spec = torch_private.spec_of(like)
        made = torch_private.dtensor(shard, spec_around(shard, spec.mesh, spec.placements, tuple(spec.shape)))
    return made if requires_grad is None else resolving(torch.nn.Parameter(made, requires_grad))  # type: ignore[arg-type]


def dense(what: str, x: T) -> T:
    """`x`, without a class of the user's that changes nothing below autograd.

    Raises `ShardingError` for what is no tensor, for one that is sparse, nested, quantized or lazy, and
    inside a transform of `torch.func` or in forward mode.

    >>> dense("halo", [1.0])
    Traceback (most recent call last):
    axes.algebra.errors.ShardingError: halo takes a tensor; found list
    """
    check_dense(x, what)
    check_transforms(what)
    return x if torch.compiler.is_compiling() else as_plain(x)  # type: ignore[return-value]


def draw(
    shard: torch.Tensor,
    sharding: Sharding | None,
    shape: Sequence[int],
    seed: int,
    kind: Literal["uniform", "normal", "kept"] = "uniform",
    p: float = 0.0,
) -> torch.Tensor:
    """Fill this rank's shard of a tensor of a whole shape with random values, and return it.

    A value follows from the seed and from its place in the whole tensor alone, so that one device and every mesh draw
    the same. sharding: None where the shard is the whole tensor. kind: "uniform" in [0, 1), "normal" with mean 0 and
    variance 1; "kept" are truth values, each false with probability `p`.

    >>> import axes
    >>> one = draw(torch.empty(4), None, (4,), seed=7)
    >>> sharding = axes.Mesh("tp=2").at(1).sharding("a@tp")
    >>> torch.equal(draw(torch.empty(2), sharding, (4,), seed=7), one[2:])
    True
    """
    sharding = ALONE.sharding(" ".join("_" * shard.ndim)) if sharding is None else sharding
    if kind == "kept" and p == 1:
        return shard.zero_()
    threshold = math.ceil(p * 2**63)
    kinds: dict[str, Draw] = {
        "uniform": uniform_at,
        "normal": normal_at,
        "kept": lambda places, seed, _: kept_at(places, seed, threshold),
    }
    draw_into(shard, sharding, shape, kinds[kind], seed)
    return shard


def agree(
    what: str,
    ranks: Sequence[int],
    statement: str | Exception,
    told: Any = None,
    *,
    advice: str = "",
    timeout: timedelta | None = None,
    once: bool = False,
) -> list[Any]:
    """Return when all of these ranks, which all call it alike, have stated the same; gives what each has `told`.

    what: what they agree on, as errors say it. statement: a line that shows what this rank holds; or the error with
    which it fails, which the others are told at once, and which isn't raised here. told: anything that JSON can say.
    advice: what to write instead. once: compare at the first call alone, of these ranks and `what` in this job.
    timeout: by default that of `axes.init_mesh`, else of the default group.

    Raises `DesyncError` on all ranks that came, with both sides, or with who is missing and was last seen where. In a
    simulated world, or without a job, nobody else comes.

    >>> agree("the size of a batch", [0], "32")
    [None]
    """
    if not torch.distributed.is_initialized():
        return [told]
    world, ranks = current_world(), Universe.of(ranks).ranks
    asked = _asked(what, ranks) if once else []
    if world.fake or len(ranks) == 1 or asked:
        return [told]
    barrier = world.barrier(what, ranks, f"{what} over {agreement.ranks_text(ranks)}", advice)
    found = agreement.agree_at(world.member, barrier, statement, timeout or world.limit, told)
    if once and isinstance(statement, str):
        asked.append(True)
    return found


@of_world(1024)
def _asked(what: str, ranks: Sequence[int]) -> list[bool]:
    """Whether these ranks have agreed on it before, in a list that remembers it."""
    return []


@contextlib.contextmanager
def listen(before: Listener) -> Iterator[None]:
    """In this block `before` hears of every `Operation` just before ranks communicate, in eager mode.

    It gives a function that is called when the operation has returned, or None.

    >>> import axes
    >>> found = []
    >>> with axes.simulate(2), axes.init_mesh("tp=2") as mesh, listen(lambda op: found.append(op.kind)):
    ...     y = axes.psum(torch.ones(3), "tp", mesh=mesh)
    >>> found
    ['psum']
    """
    watching.listeners += (before,)
    try:
        yield
    finally:
        watching.listeners = tuple([each for each in watching.listeners if each is not before])
