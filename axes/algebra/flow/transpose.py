"""Gradients as recipes: the gradient of each operand is derived from the same expression.

A rearrangement goes back by the inverse one, a sum by a repetition and a repetition by a sum; an
einsum by an einsum of the cotangent and the other operands. So the gradient of a recipe is a recipe,
and so is the gradient of that.

The cotangent of a tensor describes the same value whatever its sharding, and arrives with any.
What splits the operand must split its gradient, and what was pending must be replicated in it; over
every other axis the gradient stays as it arrived, split or pending, until something needs it whole.

>>> from axes.algebra.flow.rules import recipe
>>> mesh = Mesh("dp=2 tp=2")
>>> x, w = mesh.sharding("b@dp d"), mesh.sharding("d f@tp")
>>> forward = recipe("einsum", "b d, d f@tp -> b f@tp", "sum", (x, w), ((8, 4), (4, 6)), mesh)
>>> gradient(forward, 1, forward.result.output).result.output.spec
'd f@tp | sum@dp'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from axes.algebra.errors import MeshError, ShardingError
from axes.algebra.flow.recipe import Groups, Input, Output, Recipe
from axes.algebra.flow.states import Digits, Entry, close, entries_of, land, pending_of, split
from axes.algebra.layout import Mode, NamedLayout
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import LINEAR, ShardedDim, ShardedFactor, Sharding, cached_with_names


@cached_with_names(4096)
def gradient(recipe: Recipe, index: int, arrived: Sharding, lazy: bool = True) -> Recipe:
    """The recipe that takes the cotangent of the result, which arrived with this sharding, and the
    other operands in order, to the gradient of operand `index`. The caller brings the cotangent to the
    recipe's own source before: a split of a dim that doesn't fall on the names in it is gathered.

    Only for what is linear in the operand. If not `lazy`, the gradient is split as the operand is
    and no further.
    """
    assert recipe.op in ("sum", "mean") or recipe.kind in ("rearrange", "repeat")
    if not lazy:
        return _Transposed(recipe, index, arrived, lazy=False).recipe()
    try:
        return _Transposed(recipe, index, arrived, lazy=True).recipe()
    except (ShardingError, MeshError):
        # A split that is kept as it arrived may not fit the operand's dims; then it is gathered.
        return _Transposed(recipe, index, arrived, lazy=False).recipe()


def required(operand: Sharding, arrived: Sharding, lazy: bool = True) -> Sharding:
    """What the gradient of an operand is: split where it is, replicated where it was pending, and
    over all other axes as it arrived.

    >>> mesh = Mesh("dp=2 cp=2 tp=2")
    >>> required(mesh.sharding("b@dp s | sum@cp"), mesh.sharding("b s@cp | sum@(dp tp)")).spec
    'b@dp s | sum@tp'
    """
    digits = _digits(operand.mesh, [operand, arrived])
    free = _Free(digits, digits.of(_axes_of(operand)), lazy)
    dims = tuple(free.extended(mine, theirs) for mine, theirs in zip(operand.dims, arrived.dims, strict=True))
    return Sharding(operand.mesh, dims, pending_of(free.pending(entries_of(arrived.pending))))


def _axes_of(*shardings: Sharding) -> list[NamedLayout]:
    splits = [axis for s in shardings for dim in s.dims for axis in dim.axes]
    return splits + [axis for s in shardings for p in s.pending for axis in p.axes]


def _digits(mesh: Mesh, shardings: Iterable[Sharding]) -> Digits:
    return Digits(mesh, _axes_of(*shardings))


@dataclass(frozen=True)
class _Free:
    """The axes that an operation doesn't involve, over which a cotangent may stay as it arrived."""

    digits: Digits
    involved: tuple[Mode, ...]
    lazy: bool

    def is_free(self, axis: NamedLayout) -> bool:
        mine = self.digits.of((axis,))
        return bool(mine) and not any(digit in self.involved for digit in mine)

    def extended(self, state: ShardedDim, arrived: ShardedDim) -> ShardedDim:
        """`state` with the free axes of `arrived` as its innermost splits."""
        if not self.lazy:
            return state
        free = tuple(axis for axis in arrived.axes if self.is_free(axis) and axis not in state.axes)
        if not free:
            return state
        if len(arrived.factors) > 1 and not state.axes and len(free) == len(arrived.axes):
            return arrived
        if len(state.factors) > 1 or len(arrived.factors) > 1:
            return state
        (factor,) = state.factors
        return ShardedDim((ShardedFactor(factor.name, factor.size, (*factor.axes, *free)),))

    def pending(self, entries: Iterable[Entry]) -> list[Entry]:
        """What of the pending reductions may stay so."""
        return [(op, axis) for op, axis in entries if op in LINEAR and self.is_free(axis)]


class _Transposed:
    """One gradient. Steps are methods, in the order in which they happen."""

    def __init__(self, forward: Recipe, index: int, arrived: Sharding, lazy: bool):
        self.forward, self.mesh, self.arrived = forward, forward.mesh, arrived
        self.operand = forward.inputs[index]
        self.others = [i for at, i in enumerate(forward.inputs) if at != index]
        prepared = [i.prepared for i in forward.inputs]
        mine = self.operand.elementary, self.operand.source
        every = [*mine, *(i.elementary for i in forward.inputs), *prepared, forward.result.derived, arrived]
        self.digits = _digits(self.mesh, every)
        involved = self.digits.of(_axes_of(*prepared, forward.result.derived))
        self.free = _Free(self.digits, involved, lazy)
        inside = self.digits.of(_axes_of(*mine))
        self.final = _Free(self.digits, inside, lazy)

    def recipe(self) -> Recipe:
        forward = self.forward
        cotangent = self._cotangent()
        self.states = dict(zip(cotangent.atoms, cotangent.prepared.dims, strict=True))
        inputs = (cotangent, *(self._other(other) for other in self.others))
        result = self._result(inputs)
        text = f"gradient of  {forward.text}"
        found = Recipe("gradient", text, self.mesh, "sum", forward.sizes, inputs, result, forward.divisor)
        check_torch_can(result.output, result.shape)
        return found

    def _cotangent(self) -> Input:
        """The cotangent, moved to what splits the result of the local computation."""
        result = self.forward.result
        dims: list[ShardedDim] = []
        states: list[ShardedDim] = []
        for dim, extent, group in zip(self.arrived.sized(result.shape).dims, result.shape, result.groups, strict=True):
            landed = land(dim, extent, [(atom, self.forward.size[atom]) for atom in group])
            dims.append(split("_") if landed is None else dim)
            states += landed or [split(atom) for atom in group]
        pending = self.arrived.pending
        source = Sharding(self.mesh, tuple(dims), pending)
        elementary = Sharding(self.mesh, tuple(states), pending)
        wanted = tuple(
            self.free.extended(mine, theirs) for mine, theirs in zip(result.derived.dims, states, strict=True)
        )
        kept = pending_of(self.free.pending(entries_of(pending)))
        prepared = Sharding(self.mesh, wanted, kept)
        conjugate = self.operand.conjugate  # of a product with conj(x) the gradient is the conjugate of that of x
        return Input(result.shape, result.groups, source, elementary, prepared, conjugate=conjugate)

    def _other(self, other: Input) -> Input:
        """Another operand as the forward took it, sliced where the cotangent stays split."""
        states = tuple(
            self.states.get(atom, state) for atom, state in zip(other.atoms, other.prepared.dims, strict=True)
        )
        prepared = Sharding(self.mesh, states, other.prepared.pending)
        return replace(other, prepared=prepared, conjugate=other.conjugate == self.operand.conjugate)

    def _result(self, inputs: Sequence[Input]) -> Output:
        operand = self.operand
        born = dict(zip(operand.atoms, operand.prepared.dims, strict=True))
        states = {**born}
        for i in inputs:
            states.update(zip(i.atoms, i.prepared.dims, strict=True))
        entries = [entry for i in inputs for entry in entries_of(i.prepared.pending)]
        for atom, state in states.items():
            if atom not in born:
                entries += [("sum", axis) for axis in state.axes if self.digits.of((axis,))]
        entries = sorted(set(entries), key=entries.index)
        derived = Sharding(self.mesh, tuple(states[atom] for atom in operand.atoms), pending_of(entries))
        dims = tuple(
            self.final.extended(mine, theirs)
            for mine, theirs in zip(operand.elementary.dims, derived.dims, strict=True)
        )
        target = Sharding(self.mesh, dims, pending_of(self.final.pending(entries)))
        closed = self._closed(operand.groups, target)
        return Output(operand.shape, operand.groups, derived, target, Sharding(self.mesh, closed, target.pending))

    def _closed(self, groups: Groups, target: Sharding) -> tuple[ShardedDim, ...]:
        states = iter(target.dims)
        return tuple(close([(next(states), self.forward.size[atom]) for atom in group]) for group in groups)
