"""Recipes made ready: what an expression does to this rank's tensors, as one function.

    made = BoundRecipe(recipe)
    local = made.run(*locals)            # gather? -> view -> move? -> compute -> move? -> view

A `BoundRecipe` makes of a recipe of the algebra a chain of few functions: views, a reduction or a matrix
product on local tensors, and `axes.runtime.redistribute` where data moves. Where nothing moves, a rearrangement
is its views with this rank's sizes. (They are made by functions of torch: methods of a tensor, called with a tuple of
sizes, take almost twice as long.)

While a graph with symbolic sizes is traced, a recipe is that of the sizes of the call that is traced, `sized` by the
symbols. An atom that is a dim by itself wherever it stands may vary: the recipe is the same one at every multiple of
the pieces into which it splits the atom, and the graph is guarded on that. Any other size is the number that it is, and
another one is compiled anew.
"""

from __future__ import annotations

import functools
import math
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from axes.algebra.errors import ExpressionError, ShardingError, SizeError, shown
from axes.algebra.expressions import Recipe, Shardings, unmoved
from axes.algebra.expressions.reading import Groups, read
from axes.algebra.expressions.recipe import Op, singles
from axes.algebra.expressions.rules import REDUCTIONS
from axes.algebra.sharding import EXTREMES, Sharding
from axes.algebra.sizes import Shape
from axes.runtime import axis_groups
from axes.runtime.axis_groups import AxisGroup, group_along
from axes.runtime.graphs import fixed, hint, is_symbolic, varying
from axes.runtime.redistribute import Dtypes, extreme, moving
from axes.runtime.torch_placements import torch_placements

Run = Callable[..., torch.Tensor]
Stage = Callable[[torch.Tensor], torch.Tensor]
Sizes = Mapping[str, Any]
Atoms = tuple[str, ...]


class BoundRecipe:
    """A recipe, made ready for one rank.

    sized: the recipe with the sizes of this call, some of which are symbols; None where it has them itself.
    `device_mesh` is that of the result in the global view, where locals are shards of DTensors; None in the local view.
    `comm_dtype` and `async_op` are as in `redistribute`.

    whole: the recipe with the sizes of this call. shape: the whole shape of the result, and in the global view its
    placements. may_be_view: whether the result may be a view of the operand: nothing is sent, and nothing reduced but
    by the caller.
    """

    def __init__(
        self,
        recipe: Recipe,
        sized: Recipe | None = None,
        device_mesh: Any = None,
        comm_dtype: Dtypes = None,
        async_op: bool = False,
    ):
        self.recipe, self.sized, self.device_mesh = recipe, sized, device_mesh
        self.comm_dtype, self.async_op = comm_dtype, async_op
        self.whole, result, first = sized or recipe, recipe.result, recipe.inputs[0]
        self.shape = self.whole.whole(result.groups)
        self.placements = () if device_mesh is None else torch_placements(result.tensor)
        is_kept = len(recipe.inputs) == 1 and {*result.atoms}.issuperset(first.atoms)
        self.may_be_view = (is_kept and not recipe.moves) or (recipe.kind == "reduce" and recipe.op not in REDUCTIONS)

    @functools.cached_property
    def run(self) -> Run:
        """From local tensors to the local tensor of the result."""
        return _program(self)

    @functools.cached_property
    def on_shards(self) -> BoundRecipe:
        """The same in the local view."""
        return BoundRecipe(self.recipe, self.sized, None, self.comm_dtype)

    def calling(self, function: Callable[..., Any]) -> BoundRecipe:
        """The same with the caller's function for its reduction, made for one call: what is kept has no function."""
        recipe = replace(self.recipe, op=function)
        return BoundRecipe(recipe, self.sized, self.device_mesh, self.comm_dtype, self.async_op)

    def local(self, atoms: tuple[str, ...], sharding: Sharding) -> Shape:
        """This rank's shape of a tensor with one dim per atom."""
        mine = sharding.local_shape(self.recipe.shape_of(atoms))
        if self.sized is None:
            return mine
        sizes = zip(self.sized.shape_of(atoms), sharding.dims, mine, strict=True)
        return tuple([size if type(whole) is int else whole // dim.pieces for whole, dim, size in sizes])

    @functools.cached_property
    def computed(self) -> Sizes:
        """What this rank has of each atom during the local computation."""
        found = dict[str, int]()
        for each in (*self.recipe.inputs, self.recipe.result):
            if not found.keys() >= {*each.atoms}:
                found.update(zip(each.atoms, self.local(each.atoms, each.computed), strict=True))
        return found


def traced_sizes(found: Recipe, shapes: Sequence[Shape], given: Sequence[tuple[str, Any]]) -> Recipe | None:
    """The recipe that was found at the hints of these sizes, with symbols for those that may vary; None where none may.

    `shapes` are those that tensors have, whole or on this rank.
    """
    reading = read(found.kind, found.text, tuple(map(len, shapes)))
    alone = {(operand, dim): atom for operand, dim, atom in reading.alone}
    uses: list[tuple[Any, Any, int]] = [(name, size, int(name in alone.values())) for name, size in given]
    for place, (operand, shape) in enumerate(zip(found.inputs, shapes, strict=True)):
        whole = found.whole(operand.groups)
        for dim, (size, extent, split) in enumerate(zip(shape, whole, operand.tensor.dims, strict=True)):
            is_cut_once = (place, dim) in alone and len(split) == 1
            may = type(size) is not int and is_cut_once and extent % hint(size) == 0
            uses.append((alone.get((place, dim)), size * (extent // hint(size)) if may else size, int(may)))
    return at_sizes(found, {**found.sizes, **varying(uses)})


def at_sizes(found: Recipe, sizes: Sizes) -> Recipe | None:
    """The recipe with these sizes of its atoms, its own numbers for those that its splits don't divide; None where that
    is all of them.
    """
    pieces = dict.fromkeys(sizes, 1)
    for atoms, end in [(i.atoms, end) for i in (*found.inputs, found.result) for end in (i.elementary, i.computed)]:
        for atom, dim in zip(atoms, end.dims, strict=True):
            pieces[atom] = math.lcm(pieces[atom], dim.pieces)
    kept = {atom: fixed(size) if size % pieces[atom] else size for atom, size in sizes.items()}
    return replace(found, sizes=kept) if is_symbolic(tuple(kept.values())) else None


def _program(made: BoundRecipe) -> Run:
    found = made.recipe
    if found.mesh.coordinate is None:
        return _nothing
    *moved, leaves = found.moved
    feeds = [_feed(made, i) if moves else None for i, moves in zip(found.inputs, moved, strict=True)]
    last = _leaving(made, found.result.computed) if leaves else None
    if made.device_mesh is None and last is not None and _is_extreme_across_ranks(found):
        return _chained(feeds, _extreme(made, feeds[0] is None), None)
    return _chained(feeds, local_computation(made), last)


def _is_extreme_across_ranks(found: Recipe) -> bool:
    """Whether a maximum or minimum arises over ranks here, and is resolved here."""
    kept = {layout for op, layout in found.result.elementary.pending if op != "same"}
    inherited = any(op != "same" for op, _ in found.inputs[0].tensor.pending)
    return found.op in EXTREMES and bool(found.result.computed.pending) and not kept and not inherited


def _nothing(*locals_: torch.Tensor) -> torch.Tensor:
    """What a rank outside the mesh does: its shard is empty."""
    return locals_[0].new_empty(0)


def _chained(feeds: Sequence[Stage | None], compute: Run, last: Stage | None) -> Run:
    """Compose what is done to the operands, to all of them, and to the result; most of it is nothing."""
    if len(feeds) == 1 or not any(feeds):
        return _joined([feeds[0], compute, last])

    def fed(*xs: torch.Tensor) -> torch.Tensor:
        return compute(*[x if feed is None else feed(x) for feed, x in zip(feeds, xs, strict=True)])

    return _joined([fed, last])


def _joined(stages: Iterable[Run | None]) -> Run:
    """One function after another, without those that do nothing; the first takes what there is."""
    first, *rest = [stage for stage in stages if stage not in (None, _same)] or [_same]
    if not rest:
        return first

    def run(*xs: torch.Tensor) -> torch.Tensor:
        x = first(*xs)
        for stage in rest:
            x = stage(x)
        return x

    return run


# --- moves


def _move(made: BoundRecipe, source: Sharding, target: Sharding, atoms: tuple[str, ...], last: bool) -> Stage:
    """A redistribution of tensors with one dim per atom, the `last` that is done or not."""
    shape, is_local = made.whole.shape_of(atoms), made.device_mesh is None
    return moving(source, target, shape, made.comm_dtype, made.async_op and last, is_local)


def _feed(made: BoundRecipe, operand: Shardings) -> Stage:
    """From an operand that moves to what the local computation takes, which has one dim per atom."""
    moving = _move(made, operand.elementary, operand.computed, operand.atoms, False)
    local = dict(zip(operand.atoms, made.local(operand.atoms, operand.elementary), strict=True))
    return _joined([reshaping(operand.groups, singles(operand.atoms), local), moving])


def _leaving(made: BoundRecipe, derived: Sharding) -> Stage:
    """From the derived result, with one dim per atom, to the result."""
    result = made.recipe.result
    return _joined([_move(made, derived, result.elementary, result.atoms, True), _merging(made)])


def _merging(made: BoundRecipe) -> Stage | None:
    result = made.recipe.result
    if result.groups == singles(result.atoms):
        return None
    local = dict(zip(result.atoms, made.local(result.atoms, result.elementary), strict=True))
    return reshaping(result.groups, result.groups, local)


# --- local computation


def local_computation(made: BoundRecipe) -> Run:
    """What a rank computes between what it sends: from operands, or what has been moved of them, to the result.

    An operand has its own dims, or where it was moved one dim per atom. The result has its own dims, or where it is yet
    to be moved one dim per atom.
    """
    every = zip((*made.recipe.inputs, made.recipe.result), made.recipe.moved, strict=True)
    *terms, goal = [singles(i.atoms) if moves else i.groups for i, moves in every]
    return _computation(made, terms, goal, made.recipe.op)


def _computation(made: BoundRecipe, terms: Sequence[Groups], goal: Groups, op: Op) -> Run:
    """From tensors whose dims are these groups of atoms to one: a product or a reduction, and views."""
    found, local = made.recipe, made.computed
    have, want = flat(terms[0]), flat(goal)
    known = {atom for term in terms for atom in flat(term)}
    kept, gone = [atom for atom in dict.fromkeys(want) if atom in known], [atom for atom in have if atom not in want]
    stages = list[Run | None]()
    if len(terms) > 1 or _repeats(have):
        term = goal if kept == [*want] else singles(kept)
        stages.append(_product_of(found, contraction(terms, term, local)))
    elif gone:
        kept = kept if callable(op) else [atom for atom in have if atom in want]
        term, have = singles(kept), (*kept, *gone) if callable(op) else have
        reduce = _reduction(made, op, gone, tuple([at for at, atom in enumerate(have) if atom not in want]))
        stages += [*_views(terms[0], singles(have), local), reduce]
    else:
        (term,) = terms
    if found.divisor != 1 and op != "mean":
        divisor = made.whole.divisor
        stages.append(lambda x: x / divisor)
    return _joined([*stages, *_views(term, goal, local)])


def _repeats(atoms: Sequence[str]) -> bool:
    return len({*atoms}) < len(atoms)


def _product_of(found: Recipe, product: Run) -> Run:
    """The product of the operands, those of them conjugated of which the recipe says it."""
    conjugate = [i.conjugate for i in found.inputs]
    if not any(conjugate):
        return product
    return lambda *xs: product(*[x.conj() if c and x.is_complex() else x for c, x in zip(conjugate, xs, strict=True)])


def _views(term: Groups, goal: Groups, local: Sizes) -> list[Stage | None]:
    """A tensor's dims put in order, missing atoms repeated, diagonals written, dims merged, where needed."""
    have, want = flat(term), flat(goal)
    if have == want:
        return [] if term == goal else [reshaping((*term, *goal), goal, local)]
    distinct = tuple(dict.fromkeys(want))
    stages, order = [reshaping(term, singles(have), local)], tuple([have.index(a) for a in distinct if a in have])
    if order != tuple(range(len(have))):
        stages.append(lambda x: torch.permute(x, order))
    if len(distinct) > len(have):
        added = [at for at, atom in enumerate(distinct) if atom not in have]
        shape = tuple([local[atom] for atom in distinct])
        stages.append(functools.partial(_repeated, added=added, shape=shape))
    if len(distinct) < len(want):
        shape = tuple([local[atom] for atom in want])
        stages.append(functools.partial(_on_diagonal, atoms=distinct, goal=want, shape=shape))
    return [*stages, reshaping(goal, goal, local)]


def _extreme(made: BoundRecipe, raw: bool) -> Run:
    """A maximum or minimum over ranks in the local view: an all-reduce, then whatever the right side asks for.

    torch would divide a gradient among the ties of one rank, and communication among ranks; both at
    once is what the maximum of the whole does.
    """
    found, result = made.recipe, made.recipe.result
    group = group_along(found.mesh, tuple([found.mesh.called(layout) for _, layout in result.computed.pending]))
    operand, atoms = found.inputs[0].groups if raw else singles(found.inputs[0].atoms), singles(result.atoms)
    most, count = (_computation(made, [operand], atoms, op) for op in (found.op, "sum"))
    spread = _computation(made, [atoms], operand, "sum")
    reduced = replace(result.computed, pending=())
    moves = not unmoved(reduced, result.elementary, found.shape_of(result.atoms))
    leave = _leaving(made, reduced) if moves else _merging(made)
    return _joined([lambda x: extreme(x, str(found.op), group, most, count, spread), leave])


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


def _reduction(made: BoundRecipe, op: Op, atoms: Sequence[str], dims: tuple[int, ...]) -> Run:
    """A reduction of these atoms, which are these dims; of no elements, it gives the reduction's identity."""
    found, own = made.recipe, made.computed
    if callable(op):
        return functools.partial(_by_function, op, found.text, dims)
    if made.sized is not None:  # for its part of the whole, one size tells as much as another
        own = BoundRecipe(found).computed
    count, empty = math.prod([own[atom] for atom in atoms]), [atom for atom in atoms if not found.sizes[atom]]
    if op in EXTREMES and empty and not found.counted:
        names = " and ".join(f"'{atom}'" for atom in empty)
        raise SizeError(f"a {op} over no elements has no value: {names} is 0\nin  {found.text}")
    if op in EXTREMES and count == 0:
        return functools.partial(_identity, dims, op)
    if op == "mean" and found.counted:
        group = group_along(found.mesh, tuple(map(found.mesh.called, found.counted)))
        return functools.partial(_share, dims, math.prod([made.computed[atom] for atom in atoms]), group)
    weight = 1.0
    if op == "mean" and found.divisor:
        # This rank's share of the mean: its own mean, by how much of the whole it has.
        weight, op = count * found.multiplier / found.divisor, op if count else "sum"
    reduce = _REDUCED[op]
    return (lambda x: reduce(x, dims)) if weight == 1 else (lambda x: reduce(x, dims) * weight)


def _by_function(function: Callable[..., Any], text: str, dims: tuple[int, ...], x: Any) -> Any:
    """What the caller's function makes of `x` over its last dims; `ShardingError` if it keeps these."""
    wanted, found = list(x.shape[: dims[0]]), function(x, dims)
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


def _identity(dims: tuple[int, ...], op: str, x: torch.Tensor) -> torch.Tensor:
    """The maximum or minimum of nothing, which still is a function of `x` as on every other rank."""
    total = torch.sum(x, dims)
    if x.dtype is torch.bool:
        return total.to(x.dtype) if op == "max" else ~total.to(x.dtype)
    limits = None if x.is_floating_point() else torch.iinfo(x.dtype)
    least, most = (-math.inf, math.inf) if limits is None else (limits.min, limits.max)
    return (total + (least if op == "max" else most)).to(x.dtype)


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


# --- products


def contraction(terms: Sequence[Groups], goal: Groups, sizes: Mapping[str, int]) -> Run:
    """A function of the operands, whose dims are groups of atoms, that gives a tensor with the dims of `goal`.

    `goal` has each atom once, and all of them are the operands'. `sizes` may be symbolic.
    """
    if len(terms) == 2 and (found := _linear(terms[0], terms[1], goal)) is not None:
        return found
    text = equation(tuple(map(flat, terms)), flat(goal))
    every = Counter([atom for term in terms for atom in {*flat(term)}])
    product = functools.partial(_einsum, text, any(every[atom] == 1 for atom in every.keys() - {*flat(goal)}))
    opening = [reshaping(term, [(atom,) for atom in flat(term)], sizes) for term in terms]
    merging = reshaping(goal, goal, sizes)
    if merging is None and not any(opening):
        return product

    def run(*xs: torch.Tensor) -> torch.Tensor:
        value = product(*[x if stage is None else stage(x) for stage, x in zip(opening, xs, strict=True)])
        return value if merging is None else merging(value)

    return run


def _einsum(text: str, sums_alone: bool, *xs: torch.Tensor) -> torch.Tensor:
    """`torch.einsum`; integers in int64 where a name of one operand alone is summed, whatever its size.

    torch does so but for a name of size 1, and then has operands of two dtypes, which it refuses.
    """
    if sums_alone and not any(x.is_floating_point() or x.is_complex() for x in xs):
        xs = tuple([x.to(torch.int64) for x in xs])
    return torch.einsum(text, *xs)


def _linear(one: Groups, two: Groups, goal: Groups) -> Run | None:
    """`... k` times a matrix, as it is or transposed, whose dims may be groups."""
    firsts, seconds = flat(one), flat(two)
    if len({*firsts}) < len(firsts) or len({*seconds}) < len(seconds):
        return None
    if len(one) < 2 or len(two) != 2 or goal[:-1] != one[:-1] or not {*flat(goal)}.isdisjoint(one[-1]):
        return None
    if two == (one[-1], goal[-1]):
        return torch.matmul
    return torch.nn.functional.linear if two == (goal[-1], one[-1]) else None


def flat(groups: Groups) -> Atoms:
    """The atoms of all dims, in order."""
    return tuple([atom for group in groups for atom in group])


def reshaping(term: Groups, groups: Sequence[Atoms], sizes: Mapping[str, int]) -> Stage | None:
    """From a tensor of the atoms of `term`, opened or merged, to one with a dim for each of `groups`."""
    if all(len(group) == 1 for group in term):
        return None
    shape = tuple([math.prod([sizes[atom] for atom in group]) for group in groups])
    return lambda x: torch.reshape(x, shape)


def equation(operands: tuple[Atoms, ...], result: Atoms) -> str:
    """The einsum in letters, as `torch.einsum` takes it."""
    names = dict.fromkeys(atom for atoms in operands for atom in atoms)
    if len(names) > len(string.ascii_letters):
        raise ExpressionError(f"an einsum has at most {len(string.ascii_letters)} names; found {len(names)}")
    letters = dict(zip(names, string.ascii_letters, strict=False))
    terms = ",".join("".join(letters[atom] for atom in atoms) for atoms in operands)
    return f"{terms}->{''.join(letters[atom] for atom in result)}"
