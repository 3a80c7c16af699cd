"""Recipes made ready: what an expression does to this rank's tensors, as one function.

    program = bind(extents_of(recipe), "global")
    local = program.run(*locals)            # gather? -> view -> move? -> compute -> move? -> view

`bind` turns a recipe of the algebra into a `BoundRecipe`, a chain of few functions: views, reductions by
einops or a matrix product on local tensors, and `axes.runtime.redistribute` where data moves. Where nothing
moves, a rearrangement is its views with this rank's sizes. (They are made by functions of torch: methods of a
tensor, called with a tuple of sizes, take almost twice as long.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import einops
import torch

from axes.algebra.errors import ShardingError, SizeError, shown
from axes.algebra.flow import Input, Recipe, unmoved
from axes.algebra.flow.recipe import Groups, Op, Shape
from axes.algebra.flow.rules import REDUCTIONS
from axes.algebra.layout import NamedLayout
from axes.algebra.sharding import Sharding
from axes.ops.contraction import contraction
from axes.ops.extents import Extents, extents_of
from axes.runtime import lines
from axes.runtime.linear import Kept, around
from axes.runtime.lines import Line, line_of
from axes.runtime.redistribute import Dtypes, moves_of, pulled_back, redistribute
from axes.runtime.symbols import hints, is_symbolic
from axes.runtime.writes import writable

Run = Callable[..., torch.Tensor]
Stage = Callable[[torch.Tensor], torch.Tensor]
View = Literal["global", "local"]


@dataclass(frozen=True)
class BoundRecipe:
    """A recipe, made ready for one rank. `run` takes and gives local tensors.

    comm_dtype: as in `redistribute`.
    """

    extents: Extents
    run: Run
    view: View
    comm_dtype: Dtypes
    async_op: bool

    def calling(self, function: Callable[..., Any]) -> BoundRecipe:
        """The program with the caller's function for its reduction, made for one call: what is kept has no function."""
        return bind(_with(self.extents, op=function), self.view, self.comm_dtype, self.async_op)

    @functools.cached_property
    def may_be_view(self) -> bool:
        """Whether the result may be a view of the operand: nothing is sent, and nothing reduced but by the caller."""
        found = self.extents.recipe
        if found.kind == "reduce" and found.op not in REDUCTIONS:
            return True
        kept = {*found.result.atoms}
        return len(found.inputs) == 1 and not found.moves and kept.issuperset(found.inputs[0].atoms)

    @functools.cached_property
    def may_be_cast(self) -> bool:
        """Whether autocast has a say in which dtype it is computed: what only rearranges keeps its own."""
        return self.extents.recipe.kind in ("einsum", "reduce")

    # One program is made per key, so identity will do, and hashing a recipe would be slow.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def bind(extents: Extents, view: View, comm_dtype: Dtypes = None, async_op: bool = False) -> BoundRecipe:
    """The program of a recipe at these extents, on the rank that its mesh is seen from."""
    found = extents.recipe
    if found.mesh.coordinate is None:
        return BoundRecipe(extents, _nothing, view, comm_dtype, async_op)
    last = _last(extents, view, comm_dtype, async_op)
    feeds = [_feed(extents, i, view, comm_dtype) for i in found.inputs]
    compute = local_computation(extents)
    if view == "local" and last is not None and is_extreme_across_ranks(found):
        whole = extreme(extents, compute, last, feeds[0] is None, comm_dtype)
        return BoundRecipe(extents, _chained(feeds, whole, None), view, comm_dtype, async_op)
    return BoundRecipe(extents, _chained(feeds, compute, last), view, comm_dtype, async_op)


def is_extreme_across_ranks(found: Recipe) -> bool:
    """Whether a maximum or minimum arises over ranks here, and is resolved here."""
    kept = {axis for p in found.result.target.pending if p.op != "same" for axis in p.axes}
    inherited = any(p.op != "same" for p in found.inputs[0].source.pending)
    return found.op in ("max", "min") and bool(found.result.derived.pending) and not kept and not inherited


def _nothing(*locals_: torch.Tensor) -> torch.Tensor:
    """What a rank outside the mesh does: its shard is empty."""
    return locals_[0].new_empty(0)


def _chained(feeds: Sequence[Stage | None], compute: Run, last: Stage | None) -> Run:
    """`last(compute(*feeds))`, where most of it is nothing."""
    if all(feed is None for feed in feeds):
        if last is None or compute is _same:
            return last or compute
        return lambda *xs: last(compute(*xs))
    if len(feeds) == 1:
        (feed,) = feeds
        assert feed is not None
        return (lambda x: compute(feed(x))) if last is None else (lambda x: last(compute(feed(x))))

    def run(*locals_: torch.Tensor) -> torch.Tensor:
        fed = [x if feed is None else feed(x) for feed, x in zip(feeds, locals_, strict=True)]
        value = compute(*fed)
        return value if last is None else last(value)

    return run


# --- moves


def redistribution(
    source: Sharding, target: Sharding, shape: Shape, view: View, comm_dtype: Dtypes, async_op: bool = False
) -> Stage | None:
    """The redistribution as a function of the local tensor; None where there is nothing to do."""
    if unmoved(source, target, hints(shape)):
        return None
    (source, source_same), (target, target_same) = map(unmarked, (source, target))
    if is_symbolic(shape):
        return lambda x: redistribute(
            x,
            source,
            target,
            shape,
            view=view,
            comm_dtype=comm_dtype,
            async_op=async_op,
            source_same=source_same,
            target_same=target_same,
        )
    moves = moves_of(source, target, shape, view, comm_dtype, source_same, target_same)
    if view == "local":
        return lambda x: moves(x.dtype).of_tile(x.shape).apply(x, async_op)

    def moved(x: torch.Tensor) -> torch.Tensor:
        # A DTensor's shard has the shape that it says; only a function of the caller's is differentiated on it.
        move = moves(x.dtype)
        return move.apply(x, async_op) if x.requires_grad else move.there(x, async_op)

    return moved


def unmarked(sharding: Sharding) -> tuple[Sharding, tuple[NamedLayout, ...]]:
    """A sharding without what is `same`, and the axes that are: they are about gradients alone."""
    same = tuple(axis for p in sharding.pending if p.op == "same" for axis in p.axes)
    if not same:
        return sharding, ()
    return replace(sharding, pending=tuple(p for p in sharding.pending if p.op != "same")), same


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
    return None if moving is None else _joined([_opening(extents, operand), moving])


def _opening(extents: Extents, operand: Input) -> Stage | None:
    """One dim per atom."""
    if all(len(group) == 1 for group in operand.groups):
        return None
    shape = extents.local(operand.atoms, operand.elementary)
    return lambda x: torch.reshape(x, shape)


def _last(extents: Extents, view: View, comm_dtype: Dtypes, async_op: bool) -> Stage | None:
    """From the derived result, with one dim per atom, to the result; None where that only merges dims."""
    return _leaving(extents, extents.recipe.result.derived, view, comm_dtype, async_op)


def _leaving(
    extents: Extents, derived: Sharding, view: View, comm_dtype: Dtypes, async_op: bool = False
) -> Stage | None:
    """The same for a result that is pending otherwise."""
    result = extents.recipe.result
    moving = redistribution(derived, result.target, extents.shape(result.atoms), view, comm_dtype, async_op)
    return None if moving is None else _joined([moving, _merging(extents)])


def _merging(extents: Extents) -> Stage | None:
    result = extents.recipe.result
    if all(len(group) == 1 for group in result.groups):
        return None
    local = dict(zip(result.atoms, extents.local(result.atoms, result.target), strict=True))
    shape = _merged(result.groups, local)
    return lambda x: torch.reshape(x, shape)


# --- local computation


def local_computation(extents: Extents) -> Run:
    """What a rank computes between what it sends: from operands, or what has been moved of them, to the result."""
    return _compute(extents, _raw(extents.recipe), merged=not _moves_result(extents.recipe))


def computed_shapes(extents: Extents) -> tuple[Shape, ...]:
    """The shapes that `local_computation` takes on this rank."""
    found = extents.recipe
    return tuple(
        i.source.local_shape(i.shape) if as_is else extents.local(i.atoms, i.prepared)
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
    local, divisor = extents.computed, extents.divisor
    have = {atom for group in term for atom in group}
    want = {atom for group in goal for atom in group}
    reduced, added = [a for a in have if a not in want], [a for a in want if a not in have]
    if reduced and added:
        middle = _singles([a for group in term for a in group if a in want])
        first, then = _single(extents, term, middle), _single(_with(extents, divisor=1), middle, goal)
        return lambda x: then(first(x))
    if not reduced:
        scaling = [] if extents.recipe.divisor == 1 else [lambda x: x / divisor]
        return _joined([*scaling, *_views(term, goal, local)]) or _same
    if callable(extents.recipe.op):
        kept, gone = [a for group in goal for a in group], [a for group in term for a in group if a not in want]
        before = _joined(_views(term, _singles([*kept, *gone]), local))
        function = functools.partial(by_function, extents.recipe.op, extents.recipe.text, len(kept))
        return _joined([before, function, *_views(_singles(kept), goal, local)]) or _same
    letters = {atom: f"x{number}" for number, atom in enumerate(have)}
    grouped = {a for group in (*term, *goal) if len(group) != 1 for a in group}
    sizes = {letters[a]: local[a] for a in local if a in grouped}
    pattern = f"{pattern_of(term, letters)} -> {pattern_of(goal, letters)}"
    return _reduction(extents, pattern, sizes, reduced)


def _views(term: Groups, goal: Groups, local: Mapping[str, int]) -> list[Stage]:
    """A tensor's dims rearranged and repeated: a reshape, a permutation, an expansion, a reshape, where needed."""
    have, flat = [atom for group in term for atom in group], [atom for group in goal for atom in group]
    if term == goal:
        return []
    merged = _merged(goal, local)
    if have == flat:
        return [lambda x: torch.reshape(x, merged)]
    finish = _finishing(have, flat, goal, local)
    opened = tuple([local[atom] for atom in have])
    return finish if all(len(group) == 1 for group in term) else [lambda x: torch.reshape(x, opened), *finish]


def _with(extents: Extents, **changes: Any) -> Extents:
    """The same extents of a recipe that is another in this."""
    return replace(extents, recipe=replace(extents.recipe, **changes))


# --- a maximum or minimum across ranks, in the local view


@dataclass(frozen=True)
class Extreme:
    """The stages of a maximum over ranks, and of its gradient: to where it is reached, in equal parts.

    `run` is all of it. For the gradient, `most` gives the local maximum and `count` a local sum, each
    with one dim per atom; `agreed` and `added` make of these the whole one, and `spread` takes it to the
    operand's dims. `back` takes the gradient of the result to that of the whole maximum.
    """

    run: Stage
    most: Stage
    agreed: Stage
    count: Stage
    added: Stage
    spread: Stage
    back: Stage


def extreme(extents: Extents, compute: Run, last: Stage, raw: bool, comm_dtype: Dtypes) -> Run:
    """The computation of a maximum or minimum over ranks, differentiable in the local view.

    torch would divide a gradient among the ties of one rank, and communication among ranks; both at
    once is what the maximum of the whole does.
    """
    found = extents.recipe
    derived, shape = found.result.derived, extents.shape(found.result.atoms)
    whole = replace(derived, pending=())
    summed = replace(derived, pending=tuple(replace(p, op="sum") for p in derived.pending))
    operand = found.inputs[0].groups if raw else _singles(found.inputs[0].atoms)
    atoms, total = _singles(found.result.atoms), _with(extents, op="sum")
    stages = Extreme(
        run=lambda x: last(compute(x)),
        most=_single(extents, operand, atoms),
        agreed=redistribution(derived, whole, shape, "local", comm_dtype) or _same,
        count=_single(total, operand, atoms),
        added=redistribution(summed, whole, shape, "local", None) or _same,
        spread=_single(total, atoms, operand),
        back=_pulling_back(extents, summed, comm_dtype),
    )
    return functools.partial(_across_ranks, stages)


def _across_ranks(stages: Extreme, x: torch.Tensor) -> torch.Tensor:
    """The maximum of `x`. Its gradient goes to where it was reached on all ranks, in equal parts."""

    def back(g: torch.Tensor, _: tuple[bool, ...], kept: Kept) -> torch.Tensor:
        reached, ties = _reached(stages, kept[0])
        return reached * stages.spread(stages.back(g) / ties)

    return around(lambda x: writable(stages.run(x), x), back, x, keep=(True, False))


def _reached(stages: Extreme, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where this rank's values are the whole maximum, as ones and zeros, and how often it is reached over all ranks."""
    with torch.no_grad():
        reached = (x == stages.spread(stages.agreed(stages.most(x)))).to(x.dtype)
        return reached, stages.added(stages.count(reached))


def _pulling_back(extents: Extents, summed: Sharding, comm_dtype: Dtypes) -> Stage:
    """From the gradient of the result to that of the values which were reduced to it."""
    result = extents.recipe.result
    shape, opened = extents.shape(result.atoms), extents.local(result.atoms, result.target)
    return lambda g: _pulled(g.reshape(opened), summed, result.target, shape, comm_dtype)


def _pulled(g: torch.Tensor, source: Sharding, target: Sharding, shape: Shape, comm_dtype: Dtypes) -> torch.Tensor:
    if unmoved(source, target, hints(shape)):
        return g
    (source, source_same), (target, target_same) = map(unmarked, (source, target))
    return pulled_back(
        g,
        source,
        target,
        shape,
        view="local",
        comm_dtype=comm_dtype,
        source_same=source_same,
        target_same=target_same,
    )


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def pattern_of(groups: Sequence[Sequence[str]], letters: Mapping[str, str]) -> str:
    """One side of einops' pattern: dims, which are groups of atoms, in letters."""
    texts = (" ".join(letters[atom] for atom in group) for group in groups)
    return " ".join(text if len(group) == 1 else f"({text})" for text, group in zip(texts, groups, strict=True))


def _reduction(extents: Extents, pattern: str, sizes: Mapping[str, int], atoms: Sequence[str]) -> Run:
    """A reduction of these atoms; of no elements, it gives the reduction's identity."""
    found, divisor = extents.recipe, extents.divisor
    # For its part of the whole, one size tells as much as another.
    numbers = extents_of(found).computed if extents.is_symbolic else extents.computed
    count = math.prod(numbers[a] for a in atoms)

    def reduced_by(op: Op) -> Run:
        how = torch.mean if op == "mean" else op  # einops knows no mean of complex numbers
        return lambda x: einops.reduce(x, pattern, how, **sizes)

    op = found.op
    if op in ("max", "min") and not found.counted and not all(found.size[atom] for atom in atoms):
        empty = " and ".join(f"'{atom}'" for atom in atoms if not found.size[atom])
        raise SizeError(f"a {op} over no elements has no value: {empty} is 0\nin  {found.text}")
    if op in ("max", "min") and count == 0 and (found.counted or all(found.size[atom] for atom in atoms)):
        return functools.partial(_identity, reduced_by("sum"), op)
    if op == "mean" and found.counted:
        line = line_of(found.mesh, tuple([axis.name for axis in found.counted]))
        return functools.partial(_share, pattern, sizes, math.prod(extents.computed[a] for a in atoms), line)
    if op == "mean":
        if found.divisor == 0:
            return reduced_by("mean")
        # This rank's share of the mean: its own mean, by how much of the whole it has.
        weight, own = count * found.multiplier / found.divisor, reduced_by("mean" if count else "sum")
        return own if weight == 1 else lambda x: own(x) * weight
    if found.divisor == 1:
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


def _share(pattern: str, sizes: Mapping[str, int], count: int, line: Line, x: torch.Tensor) -> torch.Tensor:
    """A rank's share of a mean of which each rank knows its own count alone: over the line they add them up.

    The counts stay on the device, so that nothing waits for them.
    """
    if not x.is_floating_point():
        return einops.reduce(x, pattern, "mean", **sizes)
    mine = x.new_full((), count, dtype=torch.int64)
    whole = mine if line.size == 1 else lines.all_reduce(mine, "sum", line)
    # What 16 bits can't hold may be the sum of what they can.
    wide = torch.promote_types(x.dtype, torch.float32)
    total = einops.reduce(x, pattern, functools.partial(torch.sum, dtype=wide), **sizes)
    return (total / whole.to(wide)).to(x.dtype)


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


def _finishing(kept: Sequence[str], flat: Sequence[str], goal: Groups, local: Mapping[str, int]) -> list[Stage]:
    """Dims put in order, missing atoms repeated, diagonals written, dims merged."""
    stages: list[Stage] = []
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
    if any(len(group) != 1 for group in goal):
        merged = _merged(goal, local)
        stages.append(lambda x: torch.reshape(x, merged))
    return stages


def _merged(groups: Groups, local: Mapping[str, int]) -> Shape:
    """The shape with one dim per group of atoms, by their sizes."""
    return tuple([math.prod([local[atom] for atom in group]) for group in groups])


def _repeated(x: torch.Tensor, added: Sequence[int], shape: Shape) -> torch.Tensor:
    """`x` with new dims at these places, repeated to `shape`."""
    for at in added:
        x = x.unsqueeze(at)
    return x.expand(shape)


def _on_diagonal(x: torch.Tensor, atoms: Sequence[str], goal: Sequence[str], shape: Shape) -> torch.Tensor:
    """`x` on the diagonal of the dims that stand repeatedly, zero elsewhere."""
    out = x.new_zeros(shape)
    view = out
    names = list(goal)
    while len(set(names)) < len(names):
        atom = next(name for name in names if names.count(name) > 1)
        first = names.index(atom)
        second = names.index(atom, first + 1)
        view = view.diagonal(0, first, second)
        del names[second], names[first]
        names.append(atom)
    view.copy_(x.permute([atoms.index(name) for name in names]))
    return out
