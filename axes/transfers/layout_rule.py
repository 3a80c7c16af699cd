"""One layout rule: names on both sides, and an expression between their tensors; and what it says of given shapes.

Each block of the left becomes one of the right. Names that stand side by side in both are one run, whose size alone
matters; each run is stepped through in both tensors. A block begins behind those before it.

>>> print(layout_rule(("q", "k"), ("qk", "q d, k d -> (q + k) d")))
q, k -> qk
>>> shapes, pieces = solved_pieces("q d, k d -> (q + k) d", ((6, 4), (2, 4)), ())
>>> shapes, [piece.offsets[1] for _, _, piece in pieces]
(((8, 4),), [(0, 0), (6, 0)])
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from axes.algebra.errors import ExpressionError, ShardingError, SizeError, shortened, shown
from axes.algebra.grammar import Factor, Item, Spec, items_of, parse_tensor
from axes.algebra.sizes import tuple_of
from axes.transfers.layout_pieces import LayoutPiece, PieceDim, Shape, layout_piece
from axes.transfers.name_patterns import NamePattern

Names = str | tuple[str, ...] | None


@dataclass(frozen=True)
class LayoutRule:
    """Names on both sides, and the expression between them. One side may have no names.

    optional: tensors of these names needn't be there.
    """

    left: tuple[NamePattern, ...]
    right: tuple[NamePattern, ...]
    expression: str
    optional: bool = False

    def __str__(self) -> str:
        sides = [", ".join([pattern.text for pattern in side]) or "nothing" for side in (self.left, self.right)]
        return " -> ".join(sides)

    @functools.cached_property
    def items(self) -> tuple[Item, ...]:
        """The names in the expression, each with its size where that is written."""
        parts = itertools.chain(*sides_of(self.expression)) if self.expression else ()
        return tuple([item for part in parts for item in items_of(part.factors)])

    def entry(self, inverse: bool = False) -> tuple[Names, Names]:
        """The rule as a table has it, or its way back."""
        end = "?" if self.optional else ""
        left, right = [tuple([f"{pattern.text}{end}" for pattern in side]) for side in (self.left, self.right)]
        texts = self.expression.split("->")
        if inverse:
            left, right, texts = right, left, texts[::-1]
        return left or None, (*right, *([" -> ".join(map(str.strip, texts))] if self.expression else [])) or None


def layout_rule(key: object, value: object) -> LayoutRule:
    """The rule that an entry of a table is; `ShardingError` or `ExpressionError` where it can't be one."""
    left, right = _texts(key), _texts(value)
    text = right.pop() if right and isinstance(right[-1], str) and "->" in right[-1] else ""
    is_name = [isinstance(name, str) and name and not re.search(r"\s", name) for name in (*left, *right)]
    alone = not left or not right
    if not is_name or not all(is_name) or (text if alone else not text and len(left) > 1):
        raise ShardingError(
            "a layout rule is names: names, or names: (names, expression), like ('q', 'k'): ('qk', 'q d, k d -> "
            f"(q + k) d'), and None for names on one side alone; found {shown(key)}: {shown(value)}"
        )
    sides = [tuple([NamePattern(name.removesuffix("?")) for name in names]) for names in (left, right)]
    patterns = [*sides[0], *sides[1]]
    if not text and not alone:
        each = " ".join((*dict.fromkeys(itertools.chain(*[pattern.counters for pattern in patterns])), "..."))
        text = " -> ".join([", ".join([each] * len(side)) for side in sides])
    rule = LayoutRule(sides[0], sides[1], text, any(name.endswith("?") for name in (*left, *right)))
    if not text:
        return rule
    if len({pattern.marks.count("*") for pattern in patterns}) > 1:
        raise ShardingError(
            f"{rule}: each name has as many '*' as the others, the first is what the first of the others is\n"
            "write {e} for a number that becomes a dim e, like 'experts.{e}.up': ('up', 'e f d -> e d f')"
        )
    for side, parts in zip(sides, sides_of(text), strict=True):
        specs = list({part.tensor: part.spec for part in parts}.values())
        if len(specs) != len(side):
            message = f"{len(specs)} tensors stand for {len(side)} names, of the rule {rule}"
            raise ExpressionError(message, text, 0, len(text))
        for pattern, spec in zip(side, specs, strict=True):
            first = [dim.factors[0].name for dim in spec.dims[: len(pattern.counters)] if not dim.grouped]
            if first != list(pattern.counters) or len({*first}) < len(first):
                raise ExpressionError(
                    f"'{pattern.text}' stands for tensors that are one, whose first dims are the numbers in the names, "
                    f"each once: write '{' '.join(dict.fromkeys((*pattern.counters, '...')))}'",
                    text,
                    0,
                    len(text),
                )
    pairs_of(text)  # raises where names, or blocks, aren't the same on both sides
    return rule


def _texts(names: object) -> list[Any]:
    return [] if names is None else [names] if isinstance(names, str) else [*(tuple_of(names) or (None,))]


# --- what becomes what

_BLOCKS = re.compile(r"\(([^()]*\+[^()]*)\)")
"""A group that holds blocks, `(h k + g k)`: tensors in one dim, one behind the other."""


class RulePart(NamedTuple):
    """A tensor of one side of a rule, or one of its blocks. span: of the block in the text."""

    tensor: int
    spec: Spec
    span: tuple[int, int]

    @property
    def factors(self) -> list[Factor]:
        """The factors of its dims."""
        return list(itertools.chain(*[dim.factors for dim in self.spec.dims]))

    def is_block(self, factor: Factor) -> bool:
        """Whether a factor is of the block, not of what all blocks of the tensor share."""
        return self.span[0] <= factor.span[0] < self.span[1]

    @property
    def dims(self) -> list[list[tuple[bool, list[str]]]]:
        """For each dim its segments: whether each is the block, and its names."""
        dims = [itertools.groupby(dim.factors, self.is_block) for dim in self.spec.dims]
        return [[(is_block, [f.name for f in some if f.name is not None]) for is_block, some in dim] for dim in dims]


Pair = tuple[RulePart, RulePart]


@functools.lru_cache(maxsize=4096)
def sides_of(text: str) -> tuple[tuple[RulePart, ...], ...]:
    """The tensors of both sides, block by block: `q d, k d -> (q + k) d` is read as `q d, k d -> (q) d, (k) d`.

    >>> [str(part.spec) for part in sides_of("q d, k d -> (q + k) d")[1]]
    ['(q) d', '(k) d']
    """
    sides, at = list[tuple[RulePart, ...]](), 0
    for side in text.split("->"):
        parts = []
        for tensor, own in enumerate(side.split(",")):
            try:  # with blanks before it, so that an error says where it stands in the whole text
                found = [(parse_tensor(one).spec, span) for one, span in _blocks_of(own.rjust(at + len(own)))]
            except ExpressionError as error:
                raise ExpressionError(error.message, text, error.start, error.stop) from None
            for spec, span in found:
                parts.append(RulePart(tensor, spec, span))
                if spec.places or spec.pending:
                    message = "a layout rule is of whole tensors; write '@' and '|' in their specs"
                    raise ExpressionError(message, text, max(text.find("@"), text.find("|")))
                if not sides and any(dim.grouped and "..." in str(dim) for dim in spec.dims):
                    message = "'...' in a group on the left leaves its sizes open; name the dims"
                    raise ExpressionError(message, text, text.index("..."))
            at += len(own) + 1
        sides.append(tuple(parts))
        at += 1
    if len(sides) != 2:
        raise ExpressionError("a layout rule has one '->'", text, text.rindex("->"))
    return tuple(sides)


def _blocks_of(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """The text of a tensor for each of its blocks, with blanks in the place of others, and where the block stands."""
    group = _BLOCKS.search(text)
    blocks = [] if group is None else group[1].split("+")
    if text.count("+") >= max(1, len(blocks)) or not all(block.strip() and "..." not in block for block in blocks):
        message = "one group of a tensor holds blocks, of names and numbers without '...', like '(q + k) d'"
        raise ExpressionError(message, text, text.index("+"))
    if group is None:
        yield text, (0, 0)
        return
    at, (start, stop) = group.start() + 1, group.span()
    nested = text[:start].count("(") > text[:start].count(")")  # of a group within another no parentheses are left
    for block in blocks:
        inside = block.rjust(at + len(block)).ljust(stop - 1)[start + 1 :]
        yield text[:start] + (f" {inside} " if nested else f"({inside})") + text[stop:], (at, at + len(block))
        at += len(block) + 1


@functools.lru_cache(maxsize=4096)
def pairs_of(text: str) -> tuple[Pair, ...]:
    """What becomes what: one tensor may become several that are equal, and the reverse; else block by block."""
    left, right = sides_of(text)
    names = [{factor.name for factor in part.factors} for part in (*left, *right)]
    tied = "+" not in text and 1 in (len(left), len(right)) and all(each == names[0] for each in names)
    if not tied and len(left) != len(right):
        raise ExpressionError(
            f"the left side is {len(left)} tensors, blocks counted, and the right side {len(right)}; "
            "each block becomes one tensor or block, in their order",
            text,
            0,
            len(text),
        )
    pairs = tuple(itertools.product(left, right) if tied else zip(left, right, strict=True))
    for part, other in [each for pair in pairs for each in (pair, pair[::-1])]:
        known = {factor.name for factor in other.factors} - {None, "_"}
        for factor in part.factors:
            if factor.name not in known and (factor.name, factor.size) != (None, 1):
                raise ExpressionError(
                    f"{shortened(str(factor))} is no name on both sides; a layout rule keeps all names, and takes no "
                    "number but 1",
                    text,
                    *factor.span,
                )
    return pairs


# --- what it says of shapes

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
    for (left, right), (here, start, source), (there, end, target) in zip(pairs, sources, targets, strict=True):
        wholes[right.tensor] = target
        steps = [PieceDim(run, sizes[run], (step, there[run])) for run, step in here.items()]
        piece = layout_piece("", "", steps, (start, end), (source, target))
        pieces.append((left.tensor, right.tensor, piece))
    return tuple([wholes[number] for number in range(len(wholes))]), tuple(pieces)


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
    near = [{two for dim in side for _, names in dim for two in itertools.pairwise(names)} for side in sides]
    joined = near[0] & near[1]

    def cut(names: Runs) -> Runs:
        found: Runs = []
        for before, name in zip(("", *names), names, strict=False):
            if (before, name) in joined:
                found[-1] += f" {name}"
            else:
                found.append(name)
        return found

    left, right = ([[(is_block, cut(names)) for is_block, names in dim] for dim in side] for side in sides)
    return left, right


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


_Steps = tuple[dict[str, tuple[int, int]], Shape, Shape]
"""Of a part: through which dim of its tensor each run steps, and how far; where it begins; and the tensor's shape."""


def _placed(tensors: Sequence[int], dims: Sequence[Dims], sizes: Sizes) -> list[_Steps]:
    """For each pair where its runs are in the tensor of one side, of which it may be one of several blocks."""
    blocks = [[run for dim in each for is_block, runs in dim if is_block for run in runs] for each in dims]
    elements = [math.prod([sizes[run] for run in block]) for block in blocks]
    found = list[_Steps]()
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
        found.append((steps, tuple(offset), tuple(shape)))
    return found
