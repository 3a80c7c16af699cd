"""Recipes: what an operation does on every rank, step by step, as data.

A recipe is what is left of an expression once it has met the shardings and shapes of its tensors.
Per operand:

    tensor  --view-->  elementary  --move-->  computed

then the local computation, then for the result

    computed  --move-->  elementary  --view-->  tensor

A move that joins two equal shardings does nothing, and most do: an operation moves data in one
place, an operation that is local in none. `tensor` is the sharding of the tensor as it is, the others those of
a tensor with one dim per atom of the expression. So a split of a group has to fall on the names in it.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from axes.algebra.expressions.reading import Groups
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.algebra.sharding import Sharding, Slots, layouts_text, names_of, pending_text, slots_text
from axes.algebra.sizes import Shape

Op = str | Callable[..., Any]
"""How atoms are reduced: a reduction by name, or a function of a tensor and its dims, which the caller has."""


def op_name(op: Op) -> str:
    """The name of a reduction. Caches know the caller's function by it, so that none keeps what the function captures.

    >>> op_name("max"), op_name(max)
    ('max', 'max()')
    """
    if isinstance(op, str):
        return op
    is_function = isinstance(op, types.FunctionType | types.BuiltinFunctionType)
    return f"{op.__name__ if is_function else type(op).__name__}()"


def singles(atoms: Iterable[str]) -> Groups:
    """One dim for each atom."""
    return tuple(zip(atoms))


@dataclass(frozen=True)
class Shardings:
    """The shardings of an operand or of the result, whose dims are `groups` of atoms: as it is, with one dim per atom,
    and where the local computation takes or gives it. `atoms` are those of all groups in order."""

    groups: Groups
    tensor: Sharding
    elementary: Sharding
    computed: Sharding
    conjugate: bool = False
    atoms: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.__dict__["atoms"] = tuple(itertools.chain.from_iterable(self.groups))

    @property
    def splits(self) -> list[tuple[str, Slots]]:
        """The atoms in order, and how each is split."""
        return [*zip(self.atoms, self.elementary.dims, strict=True)]

    def text(self, instead: Mapping[str, Slots] | None = None) -> str:
        """The tensor in the names of the expression, with some atoms split otherwise."""
        mesh, texts = self.tensor.mesh, []
        splits = [(atom, (instead or {}).get(atom, split)) for atom, split in self.splits]
        atoms = [slots_text(mesh, split, names_of([atom], split)) for atom, split in splits]
        for group, dim in zip(self.groups, self.tensor.dims, strict=True):
            inner = " ".join([atoms.pop(0) for _ in group])
            one = "1" + (f"@{layouts_text(mesh, dim.layouts)}" if dim.layouts else "")
            texts.append({0: one, 1: inner}.get(len(group), f"({inner})"))
        pending = self.tensor.pending
        return " ".join([*texts, *(["|", pending_text(mesh, pending)] if pending else [])])


@dataclass(frozen=True)
class Recipe:
    """What an operation does. Made by `axes.algebra.expressions.recipe`; printable.

    mesh: where it happens. text: the expression.
    op: how atoms that the result lacks are reduced; "sum" in an einsum. The caller's function is here while it is
    called; a recipe that is kept has its name (`op_name`).
    sizes: the whole size of every atom; all else is the same for other sizes that the same splits divide.
    averages: whether the local sum is divided by the count of a mean (also in the gradient of a mean).
    multiplier: and multiplied by this: the ranks over which a mean is left pending as a mean.
    counted: the layouts that split reduced dims of which this rank knows its own part alone: in the local
    view, where the whole size isn't given. Over these, ranks add up the count of a mean.
    """

    kind: str
    text: str
    mesh: Mesh
    op: Op
    sizes: Mapping[str, int]
    inputs: tuple[Shardings, ...]
    result: Shardings
    averages: bool = False
    multiplier: int = 1
    counted: tuple[Layout, ...] = ()

    @property
    def divisor(self) -> int:
        """By what the local sum is divided."""
        gone = {*self.inputs[0].atoms} ^ {*self.result.atoms}
        return math.prod([self.sizes[atom] for atom in gone]) if self.averages else 1

    def whole(self, groups: Groups) -> Shape:
        """The whole shape of a tensor whose dims are groups of atoms."""
        return tuple([math.prod(map(self.sizes.__getitem__, group)) for group in groups])

    def shape_of(self, atoms: tuple[str, ...]) -> Shape:
        """The whole shape of a tensor with one dim per atom."""
        return tuple(map(self.sizes.__getitem__, atoms))

    @property
    def moves(self) -> tuple[tuple[Sharding, Sharding, Shape], ...]:
        """Where data may move: `(from, to, whole shape)` of each arrow that joins two shardings."""
        return tuple(itertools.compress(self.arrows, self.moved))

    @functools.cached_property
    def moved(self) -> tuple[bool, ...]:
        """Of each arrow whether data moves."""
        return tuple([not unmoved(*arrow) for arrow in self.arrows])

    @property
    def arrows(self) -> tuple[tuple[Sharding, Sharding, Shape], ...]:
        """`(from, to, whole shape)` of each arrow between shardings: those of the operands, and that of the result."""
        found = [(i.elementary, i.computed, self.shape_of(i.atoms)) for i in self.inputs]
        return (*found, (self.result.computed, self.result.elementary, self.shape_of(self.result.atoms)))

    def __str__(self) -> str:
        lines = [self.text]
        for number, i in enumerate(self.inputs):
            steps = [i.tensor, i.elementary, i.computed]
            lines.append(f"  operand {number + 1}  {_chain(steps)}    {list(self.whole(i.groups))}")
        steps = [self.result.computed, self.result.elementary, self.result.tensor]
        lines.append(f"  result     {_chain(steps)}    {list(self.whole(self.result.groups))}")
        return "\n".join(lines)


def unmoved(source: Sharding, target: Sharding, shape: Shape) -> bool:
    """Whether both put the same data on the same ranks, so that nothing needs to be done."""
    return source == target or source.is_equivalent(target, shape)


def _chain(steps: list[Sharding]) -> str:
    texts = [step.spec for step in steps]
    kept = [text for at, text in enumerate(texts) if at == 0 or text != texts[at - 1]]
    return "  ->  ".join(kept)
