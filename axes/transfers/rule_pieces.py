"""What a layout rule says of tensors of given shapes: which sizes follow, and the pieces that both sides share.

Each block of the left becomes one of the right. Its names are stepped through in both tensors, names that stand side by
side in both as one; a block begins behind those before it.

>>> solved = solved_pieces("q d, k d -> (q + k) d", ((6, 4), (2, 4)), ())
>>> solved.shapes, [piece.target_offset for _, _, piece in solved.pieces]
(((8, 4),), [(0, 0), (6, 0)])
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from axes.algebra import grammar
from axes.algebra.errors import SizeError
from axes.transfers.layout_pieces import LayoutPiece, PieceDim, layout_piece, whole_piece
from axes.transfers.layout_rule import Pair, RulePart, pairs_of, sides_of

Shape = tuple[int, ...]
Run = tuple[str, ...]
"""Names that stand side by side in a dim of both tensors: one step of a piece."""


# --- sizes


class _Equation(NamedTuple):
    """A dim of a tensor on the left: the product of its names, blocks added up, is its size.

    blocks: the names of the dim as each block of the tensor has it; one where it has no blocks. shared: those of all.
    """

    tensor: int
    text: str
    shared: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]
    size: int

    def value(self, sizes: Mapping[str, int]) -> int:
        """The size that the names give."""
        blocks = [math.prod([sizes[name] for name in block]) for block in self.blocks]
        return math.prod([sizes[name] for name in self.shared]) * (sum(blocks) if blocks else 1)

    def missing(self, sizes: Mapping[str, int]) -> list[str]:
        """The names without a size."""
        return [name for name in dict.fromkeys((*self.shared, *itertools.chain(*self.blocks))) if name not in sizes]


def _equations(text: str, parts: Sequence[RulePart], shapes: Sequence[Shape]) -> tuple[list[_Equation], list[int]]:
    """What the shapes of the left side say, and for how many dims `...` stands in each tensor."""
    found, dots = list[_Equation](), []
    for tensor, shape in enumerate(shapes):
        own = [part for part in parts if part.tensor == tensor]
        spec = own[0].spec
        has = any(map(grammar.has_dots, spec.dims))
        dots.append(len(shape) - len(spec.dims) + has)
        if dots[-1] < 0 or (dots[-1] and not has):
            raise SizeError(f"'{own[0].text(text)}' has {len(spec.dims)} dims; the tensor has {len(shape)}\nin  {text}")
        spans = [dim.span for dim in spec.dims for _ in range(dots[-1] if grammar.has_dots(dim) else 1)]
        for span, size, *dims in zip(spans, shape, *[part.dims(dots[-1]) for part in own], strict=True):
            shared = tuple([name for is_block, names in dims[0] if not is_block for name in names])
            blocks = tuple([names for dim in dims for is_block, names in dim if is_block])
            found.append(_Equation(tensor, text[slice(*span)], shared, blocks, size))
    return found, dots


def _solved(text: str, equations: Sequence[_Equation], given: Mapping[str, int]) -> dict[str, int]:
    """The size of every name that follows; `SizeError` where a dim has another size than its names give."""
    sizes, waiting = dict(given), list(equations)
    while ready := next((each for each in waiting if len(each.missing(sizes)) <= 1), None):
        waiting.remove(ready)
        for name in ready.missing(sizes):
            # A name stands once in a block: how many elements there are grows evenly with its size.
            none, one = (ready.value({**sizes, name: size}) for size in (0, 1))
            sizes[name], rest = divmod(ready.size - none, one - none)
            if rest or sizes[name] < 1:
                more = f" from {none} on" if none else ""
                raise SizeError(f"{ready.size} doesn't divide by {one - none}{more}:  {ready.text}\nin  {text}")
        if ready.value(sizes) != ready.size:
            raise SizeError(f"'{ready.text}' is {ready.value(sizes)}, found {ready.size}\nin  {text}")
    return sizes


# --- places

Dims = list[list[tuple[bool, list[Run]]]]
"""For each dim of a tensor its segments, blocks or not, in runs."""


def _runs(pair: Pair, dots: int) -> tuple[Dims, Dims]:
    """Both sides of a pair in the runs that they have in common."""
    sides = [part.dims(dots) for part in pair]
    behind = [dict(two for dim in side for _, names in dim for two in itertools.pairwise(names)) for side in sides]

    def cut(names: Iterable[str]) -> list[Run]:
        found: list[Run] = []
        for name in names:
            if found and all(after.get(found[-1][-1]) == name for after in behind):
                found[-1] += (name,)
            else:
                found.append((name,))
        return found

    left, right = ([[(is_block, cut(names)) for is_block, names in dim] for dim in side] for side in sides)
    return left, right


class _Sizes:
    """The sizes of runs: those of their names, or what is left of a dim that has all other names of it."""

    def __init__(
        self, text: str, equations: Sequence[_Equation], pairs: Sequence[tuple[Pair, Dims]], names: Mapping[str, int]
    ):
        self.names, self.wholes = names, dict[Run, int]()
        for each in equations:
            missing = each.missing(names)
            for (part, _), dims in pairs if missing else ():
                runs = [run for dim in dims for _, runs in dim for run in runs if {*missing} & {*run}]
                if part.tensor != each.tensor or not runs:
                    continue
                alone = len(runs) == 1 and {*missing} <= {*runs[0]} and not each.blocks
                rest = each.value({**names, **dict.fromkeys(runs[0], 1)}) if alone else 0
                if not rest or each.size % rest:
                    open_sizes = " and ".join(map(repr, missing))
                    raise SizeError(
                        f"the sizes of {open_sizes} don't follow from  {each.text} = {each.size}\n"
                        f"give all but one of them, like {missing[0]}=2\nin  {text}"
                    )
                if self.wholes.setdefault(runs[0], each.size // rest) != each.size // rest:
                    whole = f"'({' '.join(runs[0])})' is {self.wholes[runs[0]]}"
                    raise SizeError(f"{whole}, found {each.size // rest}\nin  {text}")

    def of(self, run: Run) -> int:
        whole = self.wholes.get(run)
        return math.prod([self.names[name] for name in run]) if whole is None else whole


class _Steps(NamedTuple):
    """Where the runs of a pair are in a tensor: `(dim, stride)` of each, and where the block begins."""

    steps: dict[Run, tuple[int, int]]
    offset: Shape
    shape: Shape


def _placed(tensors: Sequence[int], dims: Sequence[Dims], sizes: _Sizes) -> list[_Steps]:
    """For each pair where its runs are in the tensor of one side, of which it may be one of several blocks."""
    of_blocks = [[run for dim in each for is_block, runs in dim if is_block for run in runs] for each in dims]
    elements = [math.prod(map(sizes.of, runs)) for runs in of_blocks]
    found = []
    for at, (tensor, own) in enumerate(zip(tensors, dims, strict=True)):
        before, total = (
            sum([count for count, other in zip(elements[:end], tensors, strict=False) if other == tensor])
            for end in (at, len(tensors))
        )
        steps: dict[Run, tuple[int, int]] = {}
        offset, shape = [], []
        for number, segments in enumerate(own):
            stride, begin = 1, 0
            for is_block, runs in reversed(segments):
                step = stride
                for run in reversed(runs):
                    steps[run] = number, step
                    step *= sizes.of(run)
                begin, stride = (before * stride, total * stride) if is_block else (begin, step)
            offset.append(begin)
            shape.append(stride)
        found.append(_Steps(steps, tuple(offset), tuple(shape)))
    return found


class SolvedRule(NamedTuple):
    """A rule for tensors of given shapes: the shapes of the right side, and pieces with the numbers of both tensors.

    Numbers in names are the dims that they count.
    """

    shapes: tuple[Shape, ...]
    pieces: tuple[tuple[int, int, LayoutPiece], ...]


@functools.lru_cache(maxsize=4096)
def solved_pieces(text: str, shapes: tuple[Shape, ...], given: tuple[tuple[str, int], ...]) -> SolvedRule:
    """What an expression says of tensors of these shapes; `SizeError` where sizes don't follow or don't fit.

    shapes: of the left side. given: sizes of names.
    """
    parts, pairs = sides_of(text)[0], pairs_of(text)
    ends = [(left.tensor, right.tensor) for left, right in pairs]
    if set(re.split(r"[ ,]+", text)) == {"...", "->"} and len(set(shapes)) == 1:  # other names, and nothing to solve
        piece = whole_piece("", shapes[0])
        return SolvedRule(shapes[:1] * len({two for _, two in ends}), tuple([(*each, piece) for each in ends]))
    if any(0 in shape for shape in shapes):
        raise SizeError(
            f"a tensor without elements has no sizes to tell; give it a rule without an expression\nin  {text}"
        )
    equations, dots = _equations(text, parts, shapes)
    left, right = zip(*[_runs(pair, dots[pair[0].tensor]) for pair in pairs], strict=True)
    names = _solved(text, equations, dict(given))
    sizes = _Sizes(text, equations, list(zip(pairs, left, strict=True)), names)
    sources, targets = (_placed([each[side] for each in ends], dims, sizes) for side, dims in enumerate((left, right)))
    whole: dict[int, Shape] = {}
    pieces = []
    for (one, two), source, target in zip(ends, sources, targets, strict=True):
        if whole.setdefault(two, target.shape) != target.shape:
            both = f"{list(whole[two])} and {list(target.shape)}"
            raise SizeError(f"a result can't have the shapes {both}, as its blocks say\nin  {text}")
        steps = [
            PieceDim(" ".join(run), sizes.of(run), *step, *target.steps[run]) for run, step in source.steps.items()
        ]
        offsets, wholes = (source.offset, target.offset), (source.shape, target.shape)
        pieces.append((one, two, layout_piece("", "", steps, offsets, wholes)))
    return SolvedRule(tuple([whole[number] for number in range(len(whole))]), tuple(pieces))
