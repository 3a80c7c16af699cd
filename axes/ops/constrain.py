"""Where an activation belongs, said in logical names."""

from __future__ import annotations

import operator

from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError
from axes.algebra.logical import Rules, ambient_rules, checked_rules
from axes.algebra.mesh import Mesh
from axes.ops.reshard import reshard
from axes.runtime.sharded import sharding_of, spec_by_rules
from axes.runtime.transforms import check_not_wrapped


def constrain(x: DTensor, spec: str, /, mesh: Mesh | None = None, rules: Rules | None = None, **sizes: int) -> DTensor:
    """`x` as the rules shard a tensor whose dims have these logical names; `x` itself where it is so already.

    `rules` are the ambient ones by default (`with axes.use_rules(rules):`), `mesh` is that of `x`. Keywords are sizes
    of names in groups. What is pending is resolved, and dims that no rule splits are gathered: a spec is the whole
    truth, as in `axes.reshard`, which this calls.

    Raises `ShardingError` where there are no rules, or none about a name; otherwise as `axes.reshard`. As JAX's
    `with_sharding_constraint` and Flax's `with_logical_constraint`.

        with axes.use_rules(axes.Rules(batch="dp", seq="cp", embed=None)):
            x = axes.constrain(x, "batch seq embed")
    """
    if not isinstance(x, DTensor):
        check_not_wrapped("axes.constrain", x)
        raise ShardingError(
            f"axes.constrain takes a DTensor; found {type(x).__name__}. Inside a region a shard stays as it is"
        )
    rules = rules if rules is not None else ambient_rules()
    if rules is None:
        raise ShardingError(f"axes.constrain(x, '{spec}') needs rules: pass rules=, or write it inside axes.use_rules")
    checked_rules(rules, "axes.constrain")
    shape = tuple(map(operator.index, x.shape))
    where = mesh if mesh is not None else sharding_of(x).mesh
    return reshard(x, spec_by_rules(rules, spec, where, shape, tuple(sizes.items())), mesh=mesh, sizes=sizes)
