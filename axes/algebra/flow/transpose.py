"""Gradients as recipes: the gradient of each operand is derived from the same expression.

A rearrangement goes back by the inverse one, a sum by a repetition and a repetition by a sum; an
einsum by an einsum of the cotangent and the other operands. So the gradient of a recipe is a recipe,
and so is the gradient of that.

The cotangent of a tensor describes the same value whatever its sharding, and arrives with any.
What splits the operand must split its gradient, and what was pending must be replicated in it; over
every other axis the gradient stays as it arrived, split or pending, until something needs it whole.

>>> from axes.algebra.flow.rules import recipe
>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2 tp=2")
>>> x, w = mesh.sharding("b@dp d"), mesh.sharding("d f@tp")
>>> forward = recipe("einsum", "b d, d f@tp -> b f@tp", "sum", (x, w), ((8, 4), (4, 6)), mesh)
>>> gradient(forward, 1, forward.result.output).result.output.spec
'd f@tp | sum@dp'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from axes.algebra.errors import MeshError, ShardingError
from axes.algebra.flow.recipe import Input, Output, Recipe
from axes.algebra.layout import NamedLayout
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import LINEAR, ShardedDim, Sharding, cached_with_names
from axes.algebra.splits import Digits, Entry, all_axes, entries_of, handed_down, of_names, pending_of, split


@cached_with_names(4096)
def gradient(recipe: Recipe, index: int, arrived: Sharding, lazy: bool = True) -> Recipe:
    """The recipe that takes the cotangent of the result, which arrived with this sharding, and the
    other operands in order, to the gradient of operand `index`. The caller brings the cotangent to the
    recipe's own source before: a split of a dim that doesn't fall on the names in it is gathered.

    Only for what is linear in the operand. If not `lazy`, the gradient is split as the operand is
    and no further.
    """
    assert recipe.op in ("sum", "mean") or recipe.kind in ("rearrange", "repeat")
    if lazy:
        try:
            return _transposed(recipe, index, arrived, lazy=True)
        except (ShardingError, MeshError):
            pass  # A split that is kept as it arrived may not fit the operand's dims; then it is gathered.
    return _transposed(recipe, index, arrived, lazy=False)


def required(operand: Sharding, arrived: Sharding, lazy: bool = True) -> Sharding:
    """What the gradient of an operand is: split where it is, replicated where it was pending, and
    over all other axes as it arrived.

    >>> from axes.algebra.mesh import Mesh
    >>> mesh = Mesh("dp=2 cp=2 tp=2")
    >>> required(mesh.sharding("b@dp s | sum@cp"), mesh.sharding("b s@cp | sum@(dp tp)")).spec
    'b@dp s | sum@tp'
    """
    free = _Free([operand], [operand, arrived], lazy)
    return free.sharding(operand.dims, arrived.dims, entries_of(arrived.pending))


class _Free:
    """The axes that no sharding of an operation involves, over which a cotangent may stay as it arrived."""

    def __init__(self, involved: Sequence[Sharding], every: Sequence[Sharding], lazy: bool):
        self.mesh, self.lazy = involved[0].mesh, lazy
        self.digits = Digits(self.mesh, all_axes(*every))
        self.involved = {*self.digits.of(all_axes(*involved))}

    def is_free(self, axis: NamedLayout) -> bool:
        """Whether nothing of an axis is involved; one of size one splits nothing."""
        mine = self.digits.of((axis,))
        return bool(mine) and self.involved.isdisjoint(mine)

    def _extended(self, state: ShardedDim, arrived: ShardedDim) -> ShardedDim:
        """`state` with the free axes of `arrived` as its innermost splits."""
        free = [axis for axis in arrived.axes if self.lazy and self.is_free(axis) and axis not in state.axes]
        if free and len(arrived.factors) > 1 and not state.axes and len(free) == len(arrived.axes):
            return arrived
        if not free or len(state.factors) > 1 or len(arrived.factors) > 1:
            return state
        (factor,) = state.factors
        return ShardedDim((replace(factor, axes=(*factor.axes, *free)),))

    def sharding(self, dims: Sequence[ShardedDim], arrived: Sequence[ShardedDim], pending: Iterable[Entry]) -> Sharding:
        """Dims with what may stay of what arrived."""
        kept = [(op, axis) for op, axis in pending if op in LINEAR and self.is_free(axis)]
        return Sharding(self.mesh, tuple(map(self._extended, dims, arrived)), pending_of(kept))


def _transposed(forward: Recipe, index: int, arrived: Sharding, lazy: bool) -> Recipe:
    """The gradient, step by step: the cotangent, the other operands, the result."""
    mesh, operand, result = forward.mesh, forward.inputs[index], forward.result
    computed = [*(i.prepared for i in forward.inputs), result.derived]
    mine = [operand.elementary, operand.source]
    every = [*mine, *(i.elementary for i in forward.inputs), *computed, arrived]
    free, final = _Free(computed, every, lazy), _Free(mine, every, lazy)

    # The cotangent, moved to what splits the result of the local computation.
    dims: list[ShardedDim] = []
    landed: list[ShardedDim] = []
    for dim, group in zip(arrived.sized(forward.whole(result.groups)).dims, result.groups, strict=True):
        cut = [(atom, forward.cut[atom]) for atom in group]
        found = handed_down(dim, cut)
        dims.append(split("_") if found is None else dim)
        landed += found or [split(atom) for atom in group]
    source = Sharding(mesh, tuple(dims), arrived.pending)
    prepared = free.sharding(result.derived.dims, landed, entries_of(arrived.pending))
    # Of a product with conj(x) the gradient is the conjugate of that of x.
    conjugate = operand.conjugate
    inputs = [Input(result.groups, source, replace(source, dims=tuple(landed)), prepared, conjugate=conjugate)]
    states = dict(zip(result.atoms, prepared.dims, strict=True))

    # The others as the forward took them, sliced where the cotangent stays split.
    for other in (i for at, i in enumerate(forward.inputs) if at != index):
        splits = tuple(states.get(atom, had) for atom, had in zip(other.atoms, other.prepared.dims, strict=True))
        sliced = replace(other.prepared, dims=splits)
        inputs.append(replace(other, prepared=sliced, conjugate=other.conjugate == conjugate))

    born = dict(zip(operand.atoms, operand.prepared.dims, strict=True))
    states = born | {atom: dim for i in inputs for atom, dim in zip(i.atoms, i.prepared.dims, strict=True)}
    entries = [entry for i in inputs for entry in entries_of(i.prepared.pending)]
    entries += [("sum", axis) for atom, dim in states.items() if atom not in born for axis in dim.axes if axis.size > 1]
    entries = list(dict.fromkeys(entries))
    derived = Sharding(mesh, tuple(states[atom] for atom in operand.atoms), pending_of(entries))
    target = final.sharding(operand.elementary.dims, derived.dims, entries)
    rest = iter(target.dims)
    closed = tuple(
        of_names([(next(rest), forward.cut[atom]) for atom in group], not extent)
        for group, extent in zip(operand.groups, forward.whole(operand.groups), strict=True)
    )
    output = Output(operand.groups, derived, target, replace(target, dims=closed))
    check_torch_can(output.output, forward.whole(output.groups))
    text = f"gradient of  {forward.text}"
    return Recipe("gradient", text, mesh, "sum", forward.sizes, tuple(inputs), output, forward.averages)
