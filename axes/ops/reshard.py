"""`reshard`: the same tensor, sharded otherwise.

y = axes.reshard(x, "b@dp s d@tp")          # exactly this: s unsplit, nothing pending
y = axes.reshard(x, "b@* s d@tp | *")       # a * is what the tensor has: b stays, and so does what is pending
y = axes.reshard(x, sharding)               # exactly this, on the mesh of the sharding
y = axes.reshard(shard, "b s d | sum@tp -> b s@tp d")      # a plain tensor: what it is, and what it becomes
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, overload

import torch
from torch.distributed.tensor import DTensor

from axes.algebra import providers
from axes.algebra.errors import ExpressionError, ShardingError, shortened, shown, suggestion
from axes.algebra.expressions.reading import read
from axes.algebra.logical import Rules
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import Sharding
from axes.ops.request import Request, T, apply, meant, requested
from axes.runtime import torch_private
from axes.runtime.graphs import read_once
from axes.runtime.operation import PLAIN, check_dense, check_transforms
from axes.runtime.programs import name_of
from axes.runtime.redistribute import Dtypes, check_takes_part, resharded
from axes.runtime.sharded import dtensor_of, sharding_of, spec_by_rules
from axes.runtime.torch_placements import sharding_of_spec


@overload
def reshard(
    x: T,
    spec: str | Sharding,
    /,
    mesh: Mesh | None = None,
    comm_dtype: Dtypes = None,
    async_op: bool = False,
    *,
    sizes: Mapping[str, int] | None = None,
    **keywords: int,
) -> T: ...
@overload
def reshard(
    x: Mapping[str, DTensor],
    spec: Mapping[str, str | Sharding],
    /,
    mesh: Mesh | None = None,
    comm_dtype: None = None,
    async_op: bool = False,
    *,
    sizes: Mapping[str, int] | None = None,
    **keywords: int,
) -> dict[str, DTensor]: ...
def reshard(
    x: Any,
    spec: Any,
    /,
    mesh: Mesh | None = None,
    comm_dtype: Dtypes = None,
    async_op: bool = False,
    *,
    sizes: Mapping[str, int] | None = None,
    **keywords: int,
) -> Any:
    """Bring a tensor to another sharding, in at most two collectives unless reductions of several kinds are pending.

    `axes.plan` shows the collectives. To say only what changes, write an arrow: `axes.rearrange(x, "b s@tp d -> b s
    d@tp")`. Like JAX's `jax.device_put` and `with_sharding_constraint`.

    | spec | of a DTensor | collective | gradient |
    | --- | --- | --- | --- |
    | `"b s d"` | `b s@tp d` | all-gather | reduce-scatter if it is pending, else a slice |
    | `"b s d"` | `b s d | sum@tp` | all-reduce | all-reduce if it is pending, else nothing |
    | `"b s@tp d"` | `b s d | sum@tp` | reduce-scatter | all-gather |
    | `"b s d@tp"` | `b s@tp d` | all-to-all | all-to-all |
    | `"b s@tp d"` | `b s d` | none, a slice | nothing: it stays split |

    Args:
        x: A DTensor; a plain tensor, which is this rank's shard; or a dict of DTensors, which move together in few
            collectives, without gradients.
        spec: The sharding of the result, complete: a dim without an `@` is unsplit, and without a `|` nothing is
            pending. `b@*` keeps the split of a dim, `s@(* tp)` splits it further, `...` keeps dims, `| *` keeps
            pending reductions. For a plain tensor an expression: its sharding, `->`, the sharding of the result. For
            a dict of tensors a dict of specs.
        mesh: Another mesh for the result: other axes of the same ranks, or other ranks. Every rank of both meshes
            calls this.
        comm_dtype: The dtype in which values are sent and reduced, or a pair for `(values, gradients)`.
        async_op: Wait for the last collective at the first use of the result.
        sizes: Sizes of names, for names that collide with a parameter.
        **keywords: Sizes of factors of grouped dims; of a plain tensor whole sizes.

    Returns:
        `x` itself where nothing changes, else a tensor with memory of its own; for a dict a dict with the same
        names.

    Raises:
        ExpressionError: The text isn't a spec.
        MeshError: There is no mesh, or it lacks an axis.
        ShardingError: No plan takes the tensor to this sharding, or DTensor can't represent it. Every error is
            raised on all ranks, before anything is sent.

    Examples:
        >>> import axes
        >>> with axes.simulate(4), axes.init_mesh("tp=4", device_type="cpu"):
        ...     x = axes.zeros("b s@tp", b=2, s=8)
        ...     axes.spec_of(reshard(x, "b s")), axes.spec_of(reshard(x, "b@tp s"))
        ('_ _', '_@tp _')
    """
    request = requested("reshard", spec, "", mesh, comm_dtype, async_op, sizes, keywords)
    plain = type(x) in PLAIN
    if not plain and isinstance(x, Mapping):
        if comm_dtype is not None or async_op or request.sizes:
            raise ShardingError(
                "axes.reshard of many takes no comm_dtype or async_op; reshard such tensors one by one. Sizes "
                "stand in the specs, like '(h=8 d)@tp'"
            )
        return _many(x, request)
    if not isinstance(spec, (str, Sharding)):
        raise ExpressionError(f"reshard takes a spec or a Sharding; found {type(spec).__name__}")
    if plain or not isinstance(x, DTensor):
        return _of_shard(x, request)
    if isinstance(spec, Sharding) and not request.given:
        request = request._replace(mesh=spec.mesh)
    return apply(request, (x,))


def _of_shard(x: Any, request: Request) -> torch.Tensor:
    """`reshard` of a plain tensor: a rearrangement that leaves the dims where they are."""
    spec = request.text
    check_dense(x, "axes.reshard")
    if not isinstance(spec, str) or "->" not in spec:
        check_transforms("axes.reshard")
        raise ShardingError(
            f"a plain tensor doesn't know how it is sharded: write both sides, like 'b s@tp d -> b s d'; found "
            f"{shortened(spec)}. Where it is a DTensor that was meant, axes.from_local makes one"
        )
    _check_dims(spec, x.dim())
    return apply(request._replace(kind="rearrange"), (x,))


@read_once
def _check_dims(text: str, ndim: int) -> None:
    sides = [term.groups for term in read("reshard", text, (ndim,)).terms]
    if sides[0] != sides[1]:
        raise ExpressionError(
            "reshard has the same dims on both sides of '->'; to rearrange them use axes.rearrange", text, 0, len(text)
        )


# --- by logical names


def constrain(x: DTensor, spec: str, /, mesh: Mesh | None = None, rules: Rules | None = None, **sizes: int) -> DTensor:
    """Reshard a tensor as the rules say for its logical dims. Like JAX's `with_sharding_constraint` and Flax's
    `with_logical_constraint`.

    A spec is complete, as in `axes.reshard`: dims that no rule splits are gathered, and pending reductions are
    carried out.

    Args:
        x: A DTensor.
        spec: The logical names of its dims, such as `"batch seq embed"`.
        mesh: The mesh, by default that of `x`.
        rules: The table, by default that of `axes.use_rules`.
        **sizes: Sizes of names in groups.

    Returns:
        `x` itself if it is sharded so already.

    Raises:
        ShardingError: There are no rules, or none for a name; else as `axes.reshard`.

    Examples:
        >>> import axes
        >>> rules = axes.Rules(b="dp", d=None)
        >>> with axes.simulate(2), axes.init_mesh("dp=2", device_type="cpu"), axes.use_rules(rules):
        ...     axes.spec_of(axes.constrain(axes.zeros("b d@dp", b=4, d=8), "b d"))
        '_@dp _'
    """
    if not isinstance(x, DTensor):
        check_transforms("axes.constrain")
        raise ShardingError(
            f"axes.constrain takes a DTensor; found {type(x).__name__}. Inside a region a shard stays as it is"
        )
    rules = Rules.ambient("axes.constrain", rules)
    if rules is None:
        raise ShardingError(f"axes.constrain(x, '{spec}') needs rules: pass rules=, or write it inside axes.use_rules")
    shape = tuple(map(operator.index, x.shape))
    where = mesh if mesh is not None else sharding_of(x).mesh
    return reshard(x, spec_by_rules(rules, spec, where, shape, tuple(sizes.items())), mesh=mesh, sizes=sizes)


# --- many tensors at once: one exchange for a bucket of them, in place of collectives for each


def _many(tensors: Mapping[str, Any], request: Request) -> dict[str, DTensor]:
    """DTensors by name, in shardings by the same names.

    One transfer moves those with nothing pending, on whole meshes. What is pending is reduced, and a sub-mesh is
    another one on each rank: such tensors go one by one.
    """
    specs, mesh = request.text, request.mesh if request.given else None
    _check_named(tensors, specs)
    if torch.compiler.is_compiling():  # a graph has a node for each tensor, and orders them itself
        return {name: reshard(x, specs[name], mesh=mesh) for name, x in tensors.items()}
    check_transforms("axes.reshard")
    ends = {}
    for name, x in tensors.items():
        spec = torch_private.spec_of(x)
        try:
            target = meant(spec, request._replace(text=specs[name]))
            check_torch_can(target, tuple(x.shape))
        except ShardingError as error:
            raise ShardingError(f"{error}\n  of the tensor {shortened(name)}") from None
        ends[name] = sharding_of_spec(spec), target
    for pair in ends.values():
        check_takes_part(*pair)
    kinds = tuple(
        [
            (name, *pair, tuple(tensors[name].shape), name_of(tensors[name].dtype))
            for name, pair in ends.items()
            if pair[0] != pair[1] and all(not s.pending and s.mesh.size == s.mesh.universe.size for s in pair)
        ]
    )
    found = providers.module("transfers", "a transfer").carry_kinds(kinds, tensors) if kinds else {}
    for name, _, target, shape, _ in kinds:
        if name not in found:  # this rank isn't one of the target's, and has nothing of it
            nothing = torch_private.local_of(tensors[name]).new_empty((0,))
            found[name] = dtensor_of(nothing, target, shape)
    return {name: found[name] if name in found else resharded(x, ends[name][1]) for name, x in tensors.items()}


def _check_named(tensors: Mapping[str, Any], specs: Any) -> None:
    """`ShardingError` where these aren't DTensors by name, with specs of the same names."""
    if not isinstance(specs, Mapping):
        raise ShardingError(f"axes.reshard of tensors by name takes specs by name; found {shown(specs)}")
    for here, there, what in ((tensors, specs, "specs"), (specs, tensors, "tensors")):
        for name in here:
            if name not in there:
                raise ShardingError(f"{shortened(name)} isn't in the {what}{suggestion(str(name), map(str, there))}")
    for name, x in tensors.items():
        if not isinstance(name, str) or not isinstance(x, DTensor):
            raise ShardingError(
                f"axes.reshard of many takes DTensors by name, as axes.shard and axes.from_local make them; "
                f"{shortened(name)} is {shown(type(x))}"
            )
        if not isinstance(specs[name], (str, Sharding)):
            raise ExpressionError(f"reshard takes a spec or a Sharding; found {shown(specs[name])}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ShardingError(
                f"axes.reshard of many has no gradient, and {shortened(name)} needs one; reshard it by itself, or use "
                "torch.no_grad()"
            )
