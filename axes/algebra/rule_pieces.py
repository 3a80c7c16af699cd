"""What a layout rule says of tensors of given shapes: which sizes follow, and the pieces that both sides share.

Each block of the left becomes one of the right, by an expression of its own. Its names are stepped through in both
tensors; a block begins behind those before it.

>>> solved = solved_pieces("q d, k d -> (q + k) d", (((), ()), ((),)), ((6, 4), (2, 4)), ())
>>> solved.shapes, [template.target_offset for template in solved.templates]
(((8, 4),), [(0, 0), (6, 0)])
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from axes.algebra import grammar
from axes.algebra.errors import SizeError
from axes.algebra.flow.blocks import Fused, sizes_of_blocks
from axes.algebra.flow.reading import Slot, is_name, read
from axes.algebra.grammar import Spec
from axes.algebra.layout_pieces import PieceDim, same_dims, simplified
from axes.algebra.layout_rule import BlockPair, Side, factors_of_spec, pairs_of
from axes.algebra.sizes import Product, solve

Shape = tuple[int, ...]
Counters = tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]
"""For the tensors of both sides the dims that are numbers in their names."""


@dataclass(frozen=True)
class _Bound:
    """An expression for tensors of given ranks, pair by pair.

    grouping: for each dim of the pair's tensor the dims of the block's own expression that it is made of, True for the
    block. slots: what these dims are.
    """

    text: str
    pairs: tuple[BlockPair, ...]
    tensors: tuple[Side, Side]
    grouping: tuple[tuple[list[list[bool]], ...], tuple[list[list[bool]], ...]]
    slots: tuple[tuple[tuple[Slot, ...], ...], tuple[tuple[Slot, ...], ...]]
    wholes: Mapping[str, tuple[str, ...]]


def _bound(text: str, ranks: tuple[int, ...]) -> _Bound:
    left, right, pairs = pairs_of(text)
    first = [_grouping(left[pair.left.tensor], ranks[pair.left.tensor]) for pair in pairs]
    readings = [
        read("rearrange", pair.text, (len(list(itertools.chain(*g))),)) for pair, g in zip(pairs, first, strict=True)
    ]
    second = []
    for pair, reading in zip(pairs, readings, strict=True):
        dims = _tree(right[pair.right.tensor]).dims
        dots = sum([atom.startswith("...") for atom in reading.operands[0].atoms])
        second.append(_grouping(right[pair.right.tensor], len(dims) + (dots - 1) * any(map(grammar.has_dots, dims))))
    slots = tuple([r.operands[0].slots for r in readings]), tuple([r.result.slots for r in readings])
    wholes = dict(itertools.chain(*[reading.wholes for reading in readings]))
    return _Bound(text, pairs, (left, right), (tuple(first), tuple(second)), slots, wholes)


def _tree(tensor: Fused | str) -> Spec:
    return tensor.tree if isinstance(tensor, Fused) else grammar.parse_blocks(tensor).operands[0]


def _grouping(tensor: Fused | str, ndim: int) -> list[list[bool]]:
    if isinstance(tensor, str):
        return [[False] for _ in range(ndim)]
    return [[bool(factor.blocks) for factor in dim.factors] for dim in grammar.without_dots(tensor.tree, ndim).dims]


class _AtomSteps(NamedTuple):
    """Where the atoms of a pair are in a tensor: `(dim, stride)` of each, and where the block begins."""

    steps: dict[str, tuple[int, int]]
    offset: Shape
    shape: Shape


def _placed(bound: _Bound, side: int, sizes: Mapping[str, int]) -> list[_AtomSteps]:
    """For each pair where its atoms are in the tensor of one side."""
    grouping, slots = bound.grouping[side], bound.slots[side]
    tensors = [(pair.left, pair.right)[side].tensor for pair in bound.pairs]
    elements = [
        math.prod(
            [
                sizes[atom]
                for (is_block, slot) in zip(itertools.chain(*g), s, strict=True)
                if is_block
                for atom in slot.atoms
            ]
        )
        for g, s in zip(grouping, slots, strict=True)
    ]
    found = []
    for pair, tensor in enumerate(tensors):
        before = sum([elements[other] for other in range(pair) if tensors[other] == tensor])
        total = sum([elements[other] for other in range(len(tensors)) if tensors[other] == tensor])
        found.append(_placed_dims(grouping[pair], slots[pair], sizes, before, total))
    return found


def _placed_dims(
    grouping: list[list[bool]], slots: tuple[Slot, ...], sizes: Mapping[str, int], before: int, total: int
) -> _AtomSteps:
    """before, total: elements of the blocks before the pair's own, and of all."""
    steps: dict[str, tuple[int, int]] = {}
    offset, shape = [], []
    rest = iter(slots)
    for dim, blocks in enumerate(grouping):
        own = [next(rest) for _ in blocks]
        stride, begin = 1, 0
        for is_block, slot in zip(reversed(blocks), reversed(own), strict=True):
            step = stride
            for atom in reversed(slot.atoms):
                steps[atom] = dim, step
                step *= sizes[atom]
            begin, stride = (before * stride, total * stride) if is_block else (begin, step)
        offset.append(begin)
        shape.append(stride)
    return _AtomSteps(steps, tuple(offset), tuple(shape))


def _sizes(bound: _Bound, shapes: tuple[Shape, ...], given: Mapping[str, int]) -> dict[str, int]:
    """The size of every atom; `SizeError` where one doesn't follow."""
    products = [Product(names, (whole,), 1, f"{whole} in {bound.text}") for whole, names in bound.wholes.items()]
    asked: list[Product] = []
    known = dict(given)
    for pair, grouping, slots in zip(bound.pairs, bound.grouping[0], bound.slots[0], strict=True):
        rest = iter(slots)
        for dim, blocks in enumerate(grouping):
            own = [next(rest) for _ in blocks]
            if not any(blocks):
                atoms = tuple([atom for slot in own for atom in slot.atoms])
                text = f"dim {dim + 1} of {list(shapes[pair.left.tensor])}, {bound.text}"
                asked.append(Product(atoms, (), shapes[pair.left.tensor][dim], text))
    known = _solvable([*asked, *products], known)
    for pair, grouping, slots in zip(bound.pairs, bound.grouping[0], bound.slots[0], strict=True):
        tensor = bound.tensors[0][pair.left.tensor]
        if not isinstance(tensor, Fused):
            continue
        shape = shapes[pair.left.tensor]
        names = {str(leaf.name) for leaf in factors_of_spec(tensor.tree)}
        found, counts = sizes_of_blocks(tensor, bound.text, shape, {n: s for n, s in known.items() if n in names})
        known.update({name: size for name, size in found.items() if is_name(name)})
        for is_block, slot in zip(itertools.chain(*grouping), slots, strict=True):
            if is_block:
                asked.append(
                    Product(slot.atoms, (), counts[pair.left.block], f"a block of {tensor.tree}, {bound.text}")
                )
    known = _solvable([*asked, *products], known)
    return solve(asked, known)


def _solvable(products: Sequence[Product], known: Mapping[str, int]) -> dict[str, int]:
    """What follows from those products that have one unknown name when it is their turn."""
    names, chosen, left = set(known), list[Product](), list(products)
    while True:
        now = [product for product in left if len({*product.left, *product.right} - names) <= 1]
        if not now:
            return solve(chosen, known)
        # One after the other: a product may give what the next one lacks.
        chosen.append(now[0])
        left.remove(now[0])
        names.update(now[0].left, now[0].right)


class CountedDim(NamedTuple):
    """A dim that is a number in a name: how it steps in the source or the target where that has it as a dim."""

    name: str
    size: int
    source: tuple[int, int] | None
    target: tuple[int, int] | None


class PieceTemplate(NamedTuple):
    """A piece without names: of which tensors it is, and which numbers in names it counts."""

    left: int
    right: int
    dims: tuple[PieceDim, ...]
    source_offset: Shape
    target_offset: Shape
    counters: tuple[CountedDim, ...]


class SolvedRule(NamedTuple):
    """A rule for tensors of given shapes, those of the right side without the numbers in their names."""

    shapes: tuple[Shape, ...]
    numbers: tuple[Shape, ...]
    templates: tuple[PieceTemplate, ...]


@functools.lru_cache(maxsize=4096)
def solved_pieces(
    text: str, counters: Counters, shapes: tuple[Shape, ...], given: tuple[tuple[str, int], ...]
) -> SolvedRule:
    """What an expression says of tensors of these shapes; `SizeError` where sizes don't follow or don't fit.

    shapes: of the left side, the numbers in names included as the dims that they are. given: sizes of names.
    """
    shape, count = shapes[0], len(counters[1])
    if set(re.split(r"[ ,]+", text)) == {"...", "->"} and len(set(shapes)) == 1:  # other names, and nothing to solve
        dims, offset = same_dims(shape), (0,) * len(shape)
        ends = [(pair.left.tensor, pair.right.tensor) for pair in pairs_of(text)[2]]
        same = [PieceTemplate(left, right, dims, offset, offset, ()) for left, right in ends]
        return SolvedRule((shape,) * count, ((),) * count, tuple(same))
    if any(0 in shape for shape in shapes):
        raise SizeError(
            f"a tensor without elements has no sizes to tell; give it a rule without an expression\nin  {text}"
        )
    bound = _bound(text, tuple(map(len, shapes)))
    sizes = _sizes(bound, shapes, dict(given))
    sources, targets = _placed(bound, 0, sizes), _placed(bound, 1, sizes)
    found: dict[int, Shape] = {}
    for pair, source, target in zip(bound.pairs, sources, targets, strict=True):
        for what, there, wanted in (
            ("a tensor", source.shape, shapes[pair.left.tensor]),
            ("a result", target.shape, found.setdefault(pair.right.tensor, target.shape)),
        ):
            if there != wanted:
                raise SizeError(f"{what} of the shape {list(wanted)} has blocks that give {list(there)}\nin  {text}")
    templates = [
        _template(bound, counters, at, source, target, sizes)
        for at, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]
    whole = [found[at] for at in range(len(counters[1]))]
    counted = [counted_dims(names, tensor) for names, tensor in zip(counters[1], bound.tensors[1], strict=True)]
    rests = [_without(shape, dims.values()) for shape, dims in zip(whole, counted, strict=True)]
    numbers = [tuple([shape[dim] for dim in dims.values()]) for shape, dims in zip(whole, counted, strict=True)]
    return SolvedRule(tuple(rests), tuple(numbers), tuple(templates))


def counted_dims(names: tuple[str, ...], tensor: Fused | str) -> dict[str, int]:
    """The dims of a tensor that are numbers in its name."""
    dims = [str(dim.factors[0].name) if len(dim.factors) == 1 else "" for dim in _tree(tensor).dims]
    return {name: dims.index(name) for name in names}


def _without(values: Sequence[int], dims: Iterable[int]) -> Shape:
    left_out = set(dims)
    return tuple([value for dim, value in enumerate(values) if dim not in left_out])


def _template(
    bound: _Bound, counters: Counters, at: int, source: _AtomSteps, target: _AtomSteps, sizes: Mapping[str, int]
) -> PieceTemplate:
    pair = bound.pairs[at]
    here = counted_dims(counters[0][pair.left.tensor], bound.tensors[0][pair.left.tensor])
    there = counted_dims(counters[1][pair.right.tensor], bound.tensors[1][pair.right.tensor])
    own = _without(range(len(source.shape)), here.values())
    theirs = _without(range(len(target.shape)), there.values())

    def step(placed: _AtomSteps, atom: str, kept: Shape) -> tuple[int, int]:
        dim, stride = placed.steps[atom]
        return kept.index(dim), stride

    dims = [
        PieceDim(atom.strip("()"), sizes[atom], *step(source, atom, own), *step(target, atom, theirs))
        for atom in source.steps
        if atom not in here and atom not in there
    ]
    numbers = [
        CountedDim(
            name,
            sizes[name],
            None if name in here else step(source, name, own),
            None if name in there else step(target, name, theirs),
        )
        for name in dict.fromkeys((*here, *there))
    ]
    return PieceTemplate(
        pair.left.tensor,
        pair.right.tensor,
        simplified(dims),
        _without(source.offset, here.values()),
        _without(target.offset, there.values()),
        tuple(numbers),
    )
