"""Recipes made ready: what an expression does to this rank's tensors, as one function.

    made = bind(extents_of(recipe))
    local = made.run(*locals)            # gather? -> view -> move? -> compute -> move? -> view

`bind` turns a recipe of the algebra into a `BoundRecipe`, a chain of few functions: views, a reduction
or a matrix product on local tensors, and `axes.runtime.redistribute` where data moves. Where nothing
moves, a rearrangement is its views with this rank's sizes. (They are made by functions of torch: methods of a
tensor, called with a tuple of sizes, take almost twice as long.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from axes.algebra.errors import ShardingError, SizeError, shown
from axes.algebra.flow import Input, Recipe, unmoved
from axes.algebra.flow.recipe import Groups, Op, Shape
from axes.algebra.flow.rules import REDUCTIONS
from axes.algebra.layout import Layout
from axes.algebra.sharding import Sharding
from axes.ops.contraction import contraction, reshaping
from axes.ops.extents import Extents, extents_of
from axes.runtime import axis_groups
from axes.runtime.axis_groups import AxisGroup, group_along
from axes.runtime.linear import Kept, around, both_ways
from axes.runtime.redistribute import Dtypes, moves_of
from axes.runtime.symbols import hints, is_symbolic
from axes.runtime.torch_placements import torch_placements
from axes.runtime.writes import writable

Run = Callable[..., torch.Tensor]
Stage = Callable[[torch.Tensor], torch.Tensor]
View = Literal["global", "local"]


@dataclass(frozen=True, eq=False)
class BoundRecipe:
    """A recipe, made ready for one rank.

    `run` takes and gives local tensors. `device_mesh` and `placements` are those of the result where these are shards
    of DTensors, in the global view; None and nothing in the local view. `comm_dtype` and `async_op` are as in
    `redistribute`. `caches` hold what is made for this operation alone.
    """

    extents: Extents
    run: Run
    device_mesh: Any = None
    placements: tuple[Any, ...] = ()
    comm_dtype: Dtypes = None
    async_op: bool = False
    caches: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict, repr=False)

    @property
    def recipe(self) -> Recipe:
        """What it was made from."""
        return self.extents.recipe

    def calling(self, function: Callable[..., Any]) -> BoundRecipe:
        """The same with the caller's function for its reduction, made for one call: what is kept has no function."""
        return bind(_with(self.extents, op=function), self.device_mesh, self.comm_dtype, self.async_op)

    @functools.cached_property
    def may_be_view(self) -> bool:
        """Whether the result may be a view of the operand: nothing is sent, and nothing reduced but by the caller."""
        found = self.recipe
        if found.kind == "reduce" and found.op not in REDUCTIONS:
            return True
        kept = {*found.result.atoms}
        return len(found.inputs) == 1 and not found.moves and kept.issuperset(found.inputs[0].atoms)


def bind(extents: Extents, device_mesh: Any = None, comm_dtype: Dtypes = None, async_op: bool = False) -> BoundRecipe:
    """The program of a recipe at these extents, on the rank that its mesh is seen from: in the global view on a
    `device_mesh`, else in the local view.
    """
    view: View = "local" if device_mesh is None else "global"
    placements = () if device_mesh is None else torch_placements(extents.recipe.result.output)
    run = _program(extents, view, comm_dtype, async_op)
    return BoundRecipe(extents, run, device_mesh, placements, comm_dtype, async_op)


def _program(extents: Extents, view: View, comm_dtype: Dtypes, async_op: bool) -> Run:
    found = extents.recipe
    if found.mesh.coordinate is None:
        return _nothing
    last = _leaving(extents, found.result.derived, view, comm_dtype, async_op)
    feeds = [_feed(extents, i, view, comm_dtype) for i in found.inputs]
    if view == "local" and last is not None and is_extreme_across_ranks(found):
        return _chained(feeds, extreme(extents, feeds[0] is None, comm_dtype, async_op), None)
    return _chained(feeds, local_computation(extents), last)


def is_extreme_across_ranks(found: Recipe) -> bool:
    """Whether a maximum or minimum arises over ranks here, and is resolved here."""
    kept = {layout for op, layout in found.result.target.pending if op != "same"}
    inherited = any(op != "same" for op, _ in found.inputs[0].source.pending)
    return found.op in ("max", "min") and bool(found.result.derived.pending) and not kept and not inherited


def _nothing(*locals_: torch.Tensor) -> torch.Tensor:
    """What a rank outside the mesh does: its shard is empty."""
    return locals_[0].new_empty(0)


def _chained(feeds: Sequence[Stage | None], compute: Run, last: Stage | None) -> Run:
    """Compose what is done to the operands, to all of them, and to the result; most of it is nothing."""
    computed = compute
    if any(feeds):

        def computed(*xs: torch.Tensor) -> torch.Tensor:
            return compute(*[x if feed is None else feed(x) for feed, x in zip(feeds, xs, strict=True)])

    if last is None or computed is _same:
        return last or computed
    return lambda *xs: last(computed(*xs))


# --- moves


def redistribution(
    source: Sharding, target: Sharding, shape: Shape, view: View, comm_dtype: Dtypes, async_op: bool = False
) -> Stage | None:
    """The redistribution as a function of the local tensor; None where there is nothing to do."""
    if unmoved(source, target, hints(shape)):
        return None
    (source, source_same), (target, target_same) = map(unmarked, (source, target))
    moves = moves_of(source, target, shape, view, comm_dtype, source_same, target_same)
    if view == "local" and not is_symbolic(shape):
        return lambda x: moves(x.dtype).of_tile(x.shape).apply(x, async_op)

    # A DTensor's shard has the shape that it says.
    return lambda x: moves(x.dtype).apply(x, async_op)


def unmarked(sharding: Sharding) -> tuple[Sharding, tuple[Layout, ...]]:
    """A sharding without what is `same`, and the axes that are: they are about gradients alone."""
    same = tuple(layout for op, layout in sharding.pending if op == "same")
    if not same:
        return sharding, ()
    return replace(sharding, pending=tuple([entry for entry in sharding.pending if entry[0] != "same"])), same


def _joined(stages: Iterable[Stage | None]) -> Stage | None:
    found = [stage for stage in stages if stage is not None]
    if len(found) <= 1:
        return found[0] if found else None

    def run(x: torch.Tensor) -> torch.Tensor:
        for stage in found:
            x = stage(x)
        return x

    return run


def _feed(extents: Extents, operand: Input, view: View, comm_dtype: Dtypes) -> Stage | None:
    """From an operand to what the local computation takes; None where it takes the operand itself.

    Otherwise what it takes has one dim per atom.
    """
    moving = redistribution(operand.elementary, operand.prepared, extents.shape(operand.atoms), view, comm_dtype)
    if moving is None:
        return None
    local = dict(zip(operand.atoms, extents.local(operand.atoms, operand.elementary), strict=True))
    return _joined([reshaping(operand.groups, _singles(operand.atoms), local), moving])


def _leaving(extents: Extents, derived: Sharding, view: View, comm_dtype: Dtypes, async_op: bool) -> Stage | None:
    """From the derived result, with one dim per atom, to the result; None where that only merges dims."""
    result = extents.recipe.result
    moving = redistribution(derived, result.target, extents.shape(result.atoms), view, comm_dtype, async_op)
    return None if moving is None else _joined([moving, _merging(extents)])


def _merging(extents: Extents) -> Stage | None:
    result = extents.recipe.result
    local = dict(zip(result.atoms, extents.local(result.atoms, result.target), strict=True))
    return reshaping(result.groups, result.groups, local)


# --- local computation


def local_computation(extents: Extents) -> Run:
    """What a rank computes between what it sends: from operands, or what has been moved of them, to the result."""
    return _compute(extents, _raw(extents.recipe), merged=not _moves_result(extents.recipe))


def computed_shapes(extents: Extents) -> tuple[Shape, ...]:
    """The shapes that `local_computation` takes on this rank."""
    found = extents.recipe
    return tuple(
        i.source.local_shape(found.whole(i.groups)) if as_is else extents.local(i.atoms, i.prepared)
        for i, as_is in zip(found.inputs, _raw(found), strict=True)
    )


def _raw(found: Recipe) -> list[bool]:
    """Which operands are computed on as they come: nothing is moved of them."""
    return [unmoved(i.elementary, i.prepared, found.shape_of(i.atoms)) for i in found.inputs]


def _moves_result(found: Recipe) -> bool:
    """Whether something is done to the result after it is computed, but for merging its dims."""
    r = found.result
    return not unmoved(r.derived, r.target, found.shape_of(r.atoms))


def _compute(extents: Extents, raw: Sequence[bool], merged: bool) -> Run:
    """The local computation on operands that are as they came (`raw`) or opened into atoms.

    The result is `merged` into its dims, or has one dim per atom.
    """
    found = extents.recipe
    terms = [i.groups if as_is else _singles(i.atoms) for i, as_is in zip(found.inputs, raw, strict=True)]
    goal = found.result.groups if merged else _singles(found.result.atoms)
    if len(terms) == 1 and not _repeats(found.result.atoms) and not _repeats(found.inputs[0].atoms):
        return _single(extents, terms[0], goal)
    return _several(extents, terms, goal)


def _singles(atoms: Sequence[str]) -> Groups:
    return tuple((atom,) for atom in atoms)


def _repeats(atoms: Sequence[str]) -> bool:
    return len(set(atoms)) < len(atoms)


def _single(extents: Extents, term: Groups, goal: Groups) -> Run:
    """One operand: views of it, or a reduction."""
    found, local, divisor = extents.recipe, extents.computed, extents.divisor
    have, want = [atom for group in term for atom in group], {atom for group in goal for atom in group}
    gone = [atom for atom in have if atom not in want]
    if not gone:
        scaling = [] if found.divisor == 1 else [lambda x: x / divisor]
        return _joined([*scaling, *_views(term, goal, local)]) or _same
    kept = [atom for atom in have if atom in want]
    if callable(found.op):
        kept = sorted(kept, key=[atom for group in goal for atom in group].index)
        have = [*kept, *gone]
        reduce: Run = functools.partial(by_function, found.op, found.text, len(kept))
    else:
        reduce = _reduction(extents, gone, tuple([at for at, atom in enumerate(have) if atom not in want]))
    stages = [*_views(term, _singles(have), local), reduce, *_views(_singles(kept), goal, local)]
    return _joined(stages) or _same


def _views(term: Groups, goal: Groups, local: Mapping[str, int]) -> list[Stage | None]:
    """A tensor's dims rearranged and repeated: a reshape, a permutation, an expansion, a reshape, where needed."""
    have, flat = [atom for group in term for atom in group], [atom for group in goal for atom in group]
    if term == goal:
        return []
    if have == flat:
        return [reshaping((*term, *goal), goal, local)]
    return [reshaping(term, _singles(have), local), *_finishing(have, flat, goal, local)]


def _with(extents: Extents, **changes: Any) -> Extents:
    """The same extents of a recipe that is another in this."""
    return replace(extents, recipe=replace(extents.recipe, **changes))


# --- a maximum or minimum across ranks, in the local view


def extreme(extents: Extents, raw: bool, comm_dtype: Dtypes, async_op: bool) -> Run:
    """A maximum or minimum over ranks: an all-reduce, then whatever the right side asks for.

    torch would divide a gradient among the ties of one rank, and communication among ranks; both at
    once is what the maximum of the whole does.
    """
    found = extents.recipe
    derived, total, op = found.result.derived, _with(extents, op="sum"), str(found.op)
    group = group_along(found.mesh, tuple([found.mesh.called(layout) for _, layout in derived.pending]))
    operand = found.inputs[0].groups if raw else _singles(found.inputs[0].atoms)
    atoms = _singles(found.result.atoms)
    most, count = (_single(each, operand, atoms) for each in (extents, total))
    spread = _single(total, atoms, operand)
    leave = _leaving(extents, replace(derived, pending=()), "local", comm_dtype, async_op) or _merging(extents) or _same

    def added(x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of values with the dims of the result; differentiable."""
        run = functools.partial(axis_groups.all_reduce, op="sum", group=group)
        return both_ways(run, run, x)

    def back(g: torch.Tensor, _: tuple[bool, ...], kept: Kept) -> torch.Tensor:
        """The gradient goes to where the maximum is reached, on whatever rank, in equal parts."""
        x, value = kept
        with torch.no_grad():
            reached = (x == spread(value)).to(x.dtype)
            share = reached / spread(added(count(reached)))
        return share * spread(added(g))

    def run(x: torch.Tensor) -> torch.Tensor:
        return writable(axis_groups.all_reduce(most(x), op, group), x)

    return lambda x: leave(around(run, back, x, keep=(True, True)))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _product(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    for dim in reversed(dims):
        x = torch.prod(x, dim)
    return x


_REDUCED: dict[Any, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
    "prod": _product,
    "any": torch.any,
    "all": torch.all,
}


def _reduction(extents: Extents, atoms: Sequence[str], dims: tuple[int, ...]) -> Run:
    """A reduction of these atoms, which are these dims; of no elements, it gives the reduction's identity."""
    found, divisor, op = extents.recipe, extents.divisor, extents.recipe.op
    # For its part of the whole, one size tells as much as another.
    numbers = extents_of(found).computed if extents.is_symbolic else extents.computed
    count = math.prod(numbers[a] for a in atoms)

    def reduced_by(op: Op) -> Run:
        return lambda x: _REDUCED[op](x, dims)

    is_empty = not all(found.size[atom] for atom in atoms)
    if op in ("max", "min") and not found.counted and is_empty:
        empty = " and ".join(f"'{atom}'" for atom in atoms if not found.size[atom])
        raise SizeError(f"a {op} over no elements has no value: {empty} is 0\nin  {found.text}")
    if op in ("max", "min") and count == 0:
        return functools.partial(_identity, reduced_by("sum"), op)
    if op == "mean" and found.counted:
        group = group_along(found.mesh, tuple(map(found.mesh.called, found.counted)))
        return functools.partial(_share, dims, math.prod(extents.computed[a] for a in atoms), group)
    if op == "mean" and found.divisor != 0:
        # This rank's share of the mean: its own mean, by how much of the whole it has.
        weight, own = count * found.multiplier / found.divisor, reduced_by("mean" if count else "sum")
        return own if weight == 1 else lambda x: own(x) * weight
    if found.divisor == 1 or op == "mean":
        return reduced_by(op)
    total = reduced_by("sum")
    return lambda x: total(x) / divisor


def by_function(function: Callable[..., Any], text: str, first: int, x: Any) -> Any:
    """What the caller's function makes of `x` over its dims from the `first` on; `ShardingError` if it keeps these."""
    dims, wanted = tuple(range(first, len(x.shape))), list(x.shape[:first])
    found = function(x, dims)
    shape = getattr(found, "shape", None)
    if shape is None or list(shape) != wanted:
        what = shown(found) if shape is None else f"a tensor of {list(shape)}"
        raise ShardingError(
            f"a function that reduces gives the tensor without the dims that it is handed: of {list(x.shape)} without "
            f"dims {dims} that is {wanted}; found {what}\nin  {text}"
        )
    return found


def _share(dims: tuple[int, ...], count: int, group: AxisGroup, x: torch.Tensor) -> torch.Tensor:
    """A rank's share of a mean of which each rank knows its own count alone: over the group they add them up.

    The counts stay on the device, so that nothing waits for them.
    """
    mine = x.new_full((), count, dtype=torch.int64)
    whole = mine if group.size == 1 else axis_groups.all_reduce(mine, "sum", group)
    # What 16 bits can't hold may be the sum of what they can.
    wide = torch.promote_types(x.dtype, torch.float32)
    return (torch.sum(x, dims, dtype=wide) / whole).to(x.dtype)


def _identity(total: Run, op: str, x: torch.Tensor) -> torch.Tensor:
    """The maximum or minimum of nothing, which still is a function of `x` as on every other rank."""
    info = torch.finfo(x.dtype) if x.is_floating_point() else None
    if x.dtype is torch.bool:
        return total(x).to(x.dtype) if op == "max" else ~total(x).to(x.dtype)
    limits = torch.iinfo(x.dtype) if info is None else None
    least = -math.inf if limits is None else limits.min
    most = math.inf if limits is None else limits.max
    return (total(x) + (least if op == "max" else most)).to(x.dtype)


def _several(extents: Extents, terms: Sequence[Groups], goal: Groups) -> Run:
    """Several operands, or a diagonal: a contraction, with views around it where dims are groups."""
    found, local, divisor = extents.recipe, extents.computed, extents.divisor
    atoms = tuple(tuple(atom for group in term for atom in group) for term in terms)
    known = {atom for each in atoms for atom in each}
    flat = tuple(atom for group in goal for atom in group)
    kept = tuple(dict.fromkeys(atom for atom in flat if atom in known))
    direct = kept == flat
    product = contraction(terms, goal if direct else _singles(kept), local)
    conjugate = [i.conjugate for i in found.inputs]
    scaling = [] if found.divisor == 1 else [lambda x: x / divisor]
    after = _joined([*scaling, *([] if direct else _finishing(kept, flat, goal, local))])
    if after is None and not any(conjugate):
        return product

    def run(*xs: torch.Tensor) -> torch.Tensor:
        value = product(*[x.conj() if c and x.is_complex() else x for c, x in zip(conjugate, xs, strict=True)])
        return value if after is None else after(value)

    return run


def _finishing(kept: Sequence[str], flat: Sequence[str], goal: Groups, local: Mapping[str, int]) -> list[Stage | None]:
    """Dims put in order, missing atoms repeated, diagonals written, dims merged."""
    stages: list[Stage | None] = []
    distinct = tuple(dict.fromkeys(flat))
    order = tuple([kept.index(atom) for atom in distinct if atom in kept])
    if order != tuple(range(len(kept))):
        stages.append(lambda x: torch.permute(x, order))
    if len(distinct) > len(kept):
        added = [at for at, atom in enumerate(distinct) if atom not in kept]
        shape = tuple(local[atom] for atom in distinct)
        stages.append(functools.partial(_repeated, added=added, shape=shape))
    if len(distinct) < len(flat):
        whole = tuple(local[atom] for atom in flat)
        stages.append(functools.partial(_on_diagonal, atoms=distinct, goal=tuple(flat), shape=whole))
    stages.append(reshaping(goal, goal, local))
    return stages


def _repeated(x: torch.Tensor, added: Sequence[int], shape: Shape) -> torch.Tensor:
    """`x` with new dims at these places, repeated to `shape`."""
    for at in added:
        x = x.unsqueeze(at)
    return x.expand(shape)


def _on_diagonal(x: torch.Tensor, atoms: Sequence[str], goal: Sequence[str], shape: Shape) -> torch.Tensor:
    """`x` on the diagonal of the dims that stand repeatedly, zero elsewhere."""
    out = x.new_zeros(shape)
    steps = [sum([step for name, step in zip(goal, out.stride(), strict=True) if name == atom]) for atom in atoms]
    out.as_strided(x.shape, steps).copy_(x)
    return out
