"""What a layout rule says of tensors of given shapes: which sizes follow, and the pieces that both sides share.

Each block of the left becomes one of the right. Names that stand side by side in both are one run, whose size alone
matters; each run is stepped through in both tensors. A block begins behind those before it.

>>> shapes, pieces = solved_pieces("q d, k d -> (q + k) d", ((6, 4), (2, 4)), ())
>>> shapes, [piece.target_offset for _, _, piece in pieces]
(((8, 4),), [(0, 0), (6, 0)])
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from axes.algebra.errors import SizeError
from axes.transfers.layout_pieces import LayoutPiece, PieceDim, Shape, layout_piece
from axes.transfers.layout_rule import Pair, pairs_of, sides_of

Runs = list[str]
"""Names that stand side by side in a dim of both tensors, each with a blank between them."""

Dims = list[list[tuple[bool, Runs]]]
"""For each dim of a tensor its segments, with whether each is the block."""

Sizes = Mapping[str | int, int]
"""Sizes of names and of runs. A number is its own size."""


@functools.lru_cache(maxsize=4096)
def solved_pieces(
    text: str, shapes: tuple[Shape, ...], given: tuple[tuple[str, int], ...]
) -> tuple[tuple[Shape, ...], tuple[tuple[int, int, LayoutPiece], ...]]:
    """The shapes of the right side, and the pieces, each behind the numbers of both tensors.

    shapes: of the left side. given: sizes of names. Raises `SizeError` where sizes don't follow or don't fit.
    """
    text = _without_dots(text, shapes)
    pairs = pairs_of(text)
    dims = list(map(_in_runs, pairs))
    sizes = _solved(text, _equations(text, pairs, dims, shapes), given)
    sources, targets = (
        _placed([pair[side].tensor for pair in pairs], [both[side] for both in dims], sizes) for side in (0, 1)
    )
    wholes: dict[int, Shape] = {}
    pieces = []
    for (left, right), source, target in zip(pairs, sources, targets, strict=True):
        wholes[right.tensor] = target.shape
        steps = [PieceDim(run, sizes[run], (step, target.steps[run])) for run, step in source.steps.items()]
        piece = layout_piece("", "", steps, (source.offset, target.offset), (source.shape, target.shape))
        if 0 in piece.shape and not piece.is_whole:
            raise SizeError(f"a tensor without elements can only get another name by a layout rule\nin  {text}")
        pieces.append((left.tensor, right.tensor, piece))
    return tuple([wholes[number] for number in range(len(wholes))]), tuple(pieces)


# --- names


def _without_dots(text: str, shapes: Sequence[Shape]) -> str:
    """The expression with names in the place of `...`, as many as the first tensor that has it needs."""
    firsts = {part.tensor: part.spec.dims for part in sides_of(text)[0]}
    dots = [len(shapes[at]) - len(dims) + 1 for at, dims in firsts.items() if "..." in map(str, dims)]
    found = text.replace("...", " ".join([f"dim{at}" for at in range(*dots[:1])])) if dots else text
    for part in sides_of(found)[0]:
        if len(part.spec.dims) != len(shapes[part.tensor]):
            own = " ".join(map(str, firsts[part.tensor]))
            raise SizeError(
                f"'{own}' has {len(part.spec.dims)} dims; the tensor has {len(shapes[part.tensor])}\nin  {text}"
            )
    return found


def _in_runs(pair: Pair) -> tuple[Dims, Dims]:
    """Both sides of a pair in the runs that they have in common."""
    sides = [part.dims for part in pair]
    behind = [dict(two for dim in side for _, names in dim for two in itertools.pairwise(names)) for side in sides]

    def cut(names: Iterable[str]) -> Runs:
        found: Runs = []
        for name in names:
            if found and all(after.get(found[-1].rpartition(" ")[2]) == name for after in behind):
                found[-1] += f" {name}"
            else:
                found.append(name)
        return found

    left, right = ([[(is_block, cut(names)) for is_block, names in dim] for dim in side] for side in sides)
    return left, right


# --- sizes


class _Equation(NamedTuple):
    """A size, or that of a name, is the sum of products of other names' sizes."""

    total: int | str
    products: list[Runs]
    text: str

    def missing(self, sizes: Sizes) -> list[str | int]:
        """The names without a size."""
        return [name for name in dict.fromkeys((*itertools.chain(*self.products), self.total)) if name not in sizes]

    def value(self, sizes: Sizes) -> int:
        """What the products come to."""
        return sum([math.prod([sizes[name] for name in names]) for names in self.products])


def _equations(
    text: str, pairs: Sequence[Pair], dims: Sequence[tuple[Dims, Dims]], shapes: Sequence[Shape]
) -> list[_Equation]:
    """What the shapes of the left side say of the sizes of runs, and of blocks one behind the other."""
    found = []
    for number, shape in enumerate(shapes):
        own = [(part, left) for (part, _), (left, _) in zip(pairs, dims, strict=True) if part.tensor == number]
        for at, size in enumerate(shape):
            products = [[run for _, runs in left[at] for run in runs] for _, left in own]
            written = text[slice(*own[0][0].spec.dims[at].span)]
            has_blocks = any(is_block for is_block, _ in own[0][1][at])
            found += [
                _Equation(size, each, written) for each in ([products] if has_blocks else [[one] for one in products])
            ]
    return found


def _solved(text: str, equations: Sequence[_Equation], given: Iterable[tuple[str, int]]) -> Sizes:
    """The sizes of runs; `SizeError` where they don't follow, or a dim has another size than its names give."""
    sizes: dict[str | int, int] = {each.total: each.total for each in equations if isinstance(each.total, int)}
    sizes.update(given)
    runs = dict.fromkeys(run for each in equations for names in each.products for run in names if " " in run)
    waiting = [*equations, *[_Equation(run, [run.split()], f"({run})") for run in runs]]
    waiting += [each._replace(products=[" ".join(runs).split() for runs in each.products]) for each in equations]
    while ready := next((each for each in waiting if len(each.missing(sizes)) <= 1), None):
        waiting.remove(ready)
        for name in ready.missing(sizes):
            if name == ready.total:
                sizes[name] = ready.value(sizes)
                continue
            # A name stands once in a product: the sum grows evenly with its size.
            none, one = (ready.value({**sizes, name: size}) for size in (0, 1))
            total = sizes[ready.total]
            sizes[name], rest = divmod(total - none, one - none) if one > none else (0, 1)
            if rest or sizes[name] < 0:
                more = f" from {none} on" if none else ""
                raise SizeError(f"{total} doesn't divide by {one - none}{more}:  {ready.text}\nin  {text}")
        if ready.value(sizes) != sizes[ready.total]:
            raise SizeError(f"'{ready.text}' is {ready.value(sizes)}, found {sizes[ready.total]}\nin  {text}")
    for each in equations:
        if missing := [*dict.fromkeys(" ".join(map(str, each.missing(sizes))).split())]:
            raise SizeError(
                f"the sizes of {' and '.join(map(repr, missing))} don't follow from  {each.text} = {each.total}\n"
                f"give all but one of them, like {missing[0]}=2\nin  {text}"
            )
    return sizes


# --- places


class _Steps(NamedTuple):
    """Where the runs of a pair are in a tensor: `(dim, stride)` of each, and where the block begins."""

    steps: dict[str, tuple[int, int]]
    offset: Shape
    shape: Shape


def _placed(tensors: Sequence[int], dims: Sequence[Dims], sizes: Sizes) -> list[_Steps]:
    """For each pair where its runs are in the tensor of one side, of which it may be one of several blocks."""
    blocks = [[run for dim in each for is_block, runs in dim if is_block for run in runs] for each in dims]
    elements = [math.prod([sizes[run] for run in block]) for block in blocks]
    found = []
    for at, (tensor, own) in enumerate(zip(tensors, dims, strict=True)):
        of_tensor = [count if other == tensor else 0 for count, other in zip(elements, tensors, strict=True)]
        steps: dict[str, tuple[int, int]] = {}
        offset, shape = [], []
        for number, segments in enumerate(own):
            stride, begin = 1, 0
            for is_block, runs in reversed(segments):
                step = stride
                for run in reversed(runs):
                    steps[run] = number, step
                    step *= sizes[run]
                begin, stride = (sum(of_tensor[:at]) * stride, sum(of_tensor) * stride) if is_block else (begin, step)
            offset.append(begin)
            shape.append(stride)
        found.append(_Steps(steps, tuple(offset), tuple(shape)))
    return found
