"""Gradients: of expressions, each the recipe that is derived from the same expression; and of redistributions.

A rearrangement goes back by the inverse one, a sum by a repetition and a repetition by a sum; an
einsum by an einsum of the cotangent and the other operands. So the gradient of a recipe is a recipe,
and so is the gradient of that.

The cotangent of a tensor describes the same value whatever its sharding, and arrives with any.
What splits the operand must split its gradient, and what was pending must be replicated in it; over
every other axis the gradient stays as it arrived, split or pending, until something needs it whole.

Of a redistribution the gradient is the transposed one. A value is split (S), replicated (R) or pending (P) over an
axis. Its gradient, over the same axis:

| value | local view: every rank has a loss, their sum counts | global view: there is one loss |
| --- | --- | --- |
| S | S | S |
| R | P: this rank's summand of it | as it arrives: whole, split or pending |
| `same` | R | |
| P sum | R | R |
| P mean | R, divided by n | R, divided by n |

(The last row is about each rank's own contribution. As one value, a mean that is pending has the gradient of the mean;
the border between the views multiplies by n.) `cotangent` is the column of the local view. For a rank's own tensor a
gradient that arrived is a summand: the slice of a rank that has only a slice is put within zeros, and what several
ranks have whole is divided among them (`copies`).

>>> from axes.algebra.expressions.rules import recipe
>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2 tp=2")
>>> x, w = mesh.sharding("b@dp d"), mesh.sharding("d f@tp")
>>> forward = recipe("einsum", "b d, d f@tp -> b f@tp", "sum", (x, w), ((8, 4), (4, 6)), mesh)
>>> gradient(forward, 1, forward.result.tensor).result.tensor.spec
'd f@tp | sum@dp'
>>> whole, split = map(Mesh("tp=2").sharding, ("s", "s@tp"))
>>> str(transposed(split, whole)[0])       # S -> R: arrives as a summand
's | sum@tp'
>>> [str(found) for found in transposed(whole, split)[:2]]     # R -> S
['s@tp', 's@tp']
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from axes.algebra.errors import MeshError, ShardingError
from axes.algebra.expressions.recipe import Recipe, Shardings, singles
from axes.algebra.layout import Digit, Layout, digits
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import LINEAR, Pending, Sharding, Slots, unmarked
from axes.algebra.splits import Digits, handed_down, of_names, split


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
    dims, pending = free.kept(operand.dims, arrived.dims, arrived.pending)
    return replace(operand, dims=dims, pending=pending)


class _Free:
    """The axes that no sharding of an operation involves, over which a cotangent may stay as it arrived."""

    def __init__(self, involved: Sequence[Sharding], every: Sequence[Sharding], lazy: bool):
        self.mesh, self.lazy = involved[0].mesh, lazy
        self.digits = Digits(self.mesh, [layout for each in every for layout in each.used])
        known, taken = ([layout for each in of for layout in each.used] for of in (every, involved))
        self.free = frozenset(self.digits.of(known)) - {*self.digits.of(taken)}

    def _extended(self, state: Slots, arrived: Slots) -> Slots:
        """`state` with the free layouts of `arrived` as its innermost splits."""
        free = [part for each in arrived.layouts if self.lazy for part in self.digits.pick(each, self.free)]
        if len(arrived) > 1 and not state.layouts and free == [*arrived.layouts]:
            return arrived
        if not free or len(state) > 1 or len(arrived) > 1:
            return state
        return Slots((state[0]._replace(layouts=(*state.layouts, *free)),))

    def kept(
        self, dims: Iterable[Slots], arrived: Iterable[Slots], pending: Iterable[tuple[str, Layout]]
    ) -> tuple[tuple[Slots, ...], Pending]:
        """Dims, and what is pending, with what may stay of what arrived."""
        linear = [entry for entry in pending if entry[0] in LINEAR]
        still = [(op, part) for op, layout in linear for part in self.digits.pick(layout, self.free)]
        return tuple(map(self._extended, dims, arrived)), tuple(still)


def _transposed(forward: Recipe, index: int, arrived: Sharding, lazy: bool) -> Recipe:
    """The gradient, step by step: the cotangent, the other operands, the result."""
    mesh, operand, result = forward.mesh, forward.inputs[index], forward.result
    computed = [*(i.computed for i in forward.inputs), result.computed]
    mine = [operand.elementary, operand.tensor]
    every = [*mine, *(i.elementary for i in forward.inputs), *computed, arrived]
    atoms = singles(result.atoms)
    free, final = _Free(computed, every, lazy), _Free(mine, every, lazy)

    # The cotangent, moved to what splits the result of the local computation.
    dims: list[Slots] = []
    landed: list[Slots] = []
    for dim, group in zip(arrived.sized(forward.whole(result.groups)).dims, result.groups, strict=True):
        found = handed_down(dim, [forward.sizes[atom] for atom in group])
        dims.append(split() if found is None else dim)
        landed += (found or [split() for _ in group])[: len(group)]
    tensor = Sharding(mesh, tuple(dims), arrived.pending, result.groups)
    elementary = Sharding(mesh, tuple(landed), arrived.pending, atoms)
    taken = Sharding(mesh, *free.kept(result.computed.dims, landed, arrived.pending), atoms)
    # Of a product with conj(x) the gradient is the conjugate of that of x.
    conjugate = operand.conjugate
    inputs = [Shardings(result.groups, tensor, elementary, taken, conjugate)]
    states = dict(zip(result.atoms, taken.dims, strict=True))

    # The others as the forward took them, sliced where the cotangent stays split.
    for other in (i for at, i in enumerate(forward.inputs) if at != index):
        splits = [states.get(atom, had) for atom, had in zip(other.atoms, other.computed.dims, strict=True)]
        sliced = Sharding(mesh, tuple(splits), other.computed.pending, singles(other.atoms))
        inputs.append(replace(other, computed=sliced, conjugate=other.conjugate == conjugate))

    born = dict(zip(operand.atoms, operand.computed.dims, strict=True))
    states = born | {atom: dim for i in inputs for atom, dim in zip(i.atoms, i.computed.dims, strict=True)}
    entries = [entry for i in inputs for entry in i.computed.pending]
    entries += [("sum", layout) for atom, dim in states.items() if atom not in born for layout in dim.layouts]
    entries = list(dict.fromkeys(entries))
    own = singles(operand.atoms)
    derived = Sharding(mesh, tuple([states[atom] for atom in operand.atoms]), tuple(entries), own)
    target = Sharding(mesh, *final.kept(operand.elementary.dims, derived.dims, entries), own)
    rest = iter(target.dims)
    closed = [of_names([(next(rest), forward.sizes[atom]) for atom in group]) for group in operand.groups]
    gradient = Sharding(mesh, tuple(closed), target.pending, operand.groups)
    check_torch_can(gradient, forward.whole(operand.groups))
    result = Shardings(operand.groups, gradient, target, derived)
    text = f"gradient of  {forward.text}"
    return Recipe("gradient", text, mesh, "sum", forward.sizes, tuple(inputs), result, forward.averages)


# --- of redistributions


def cotangent(value: Sharding) -> Sharding:
    """How the ranks' gradients of their tensors lie as one value, where these are a value that lies so.

    What is `same` stands among what is pending, as `axes.algebra.sharding.unmarked` takes it apart.
    """
    return replace(value, pending=tuple([("sum", Layout.of([digit])) for digit in _replicated(value)]))


def copies(value: Sharding, arrived: Sharding) -> int:
    """How many ranks have the whole of a gradient, lying so, of which each takes a part for its own tensor."""
    return math.prod([size for size, _ in _replicated(value, arrived)])


def _replicated(*shardings: Sharding) -> list[Digit]:
    """The digits of the mesh over which all of these are replicated."""
    mesh, used = shardings[0].mesh, [layout for each in shardings for layout in each.used]
    found = Digits(mesh, [mesh.extent, *used])
    taken = {*found.of(used)}
    return [digit for digit in found.of([mesh.extent]) if digit not in taken]


def on_own_axes(source: Sharding, target: Sharding) -> tuple[Sharding, Sharding]:
    """Both ends of a redistribution of plain tensors, on the axes that one side mentions.

    Tensors may differ along the other axes, so nothing may be taken from there.
    """
    used = {digit for refined in digits(*source.used, *target.used) for digit in refined}
    line = Layout.of(sorted(used, key=lambda digit: -digit[1]))
    one, two = (replace(end, mesh=end.mesh.along(line)) for end in (source, target))
    return one, two


def gradient_sharding(source: Sharding, arrived: Sharding, shape: tuple[int, ...]) -> Sharding:
    """What sharding the gradient of a value gets, by that of the cotangent that arrives.

    >>> from axes.algebra.mesh import Mesh
    >>> mesh = Mesh("dp=2 tp=2")
    >>> gradient_sharding(mesh.sharding("b@dp d"), mesh.sharding("b d | sum@(dp tp)"), (4, 4)).spec
    'b@dp d | sum@tp'
    """
    plain = replace(source, pending=())
    if source.mesh.universe != arrived.mesh.universe or source.mesh.layouts != arrived.mesh.layouts:
        return plain
    arrived = arrived.on(source.mesh)
    try:
        found = required(source.sized(shape), arrived.sized(shape))
        check_torch_can(found, shape)
    except ShardingError:
        # What is kept as it arrived may not fit the dims of the source; then it is gathered.
        return required(source.sized(shape), arrived.sized(shape), lazy=False)
    return found


def transposed(source: Sharding, target: Sharding) -> tuple[Sharding, Sharding, int]:
    """`(arriving, middle, divisor)` of the gradient of a redistribution in the local view.

    `arriving` is how the target's gradient lies, `middle` how the source's lies before it is put within zeros where
    `middle` has more splits than the source, and divided by `divisor`. What the target keeps pending isn't touched on
    the way back.
    """
    arriving, kept = cotangent(target), unmarked(target)[0].pending
    middle = required(source, arriving)
    divisor = copies(source, middle)
    arriving, middle = (replace(end, pending=(*end.pending, *kept)) for end in (arriving, middle))
    return arriving, middle, divisor
