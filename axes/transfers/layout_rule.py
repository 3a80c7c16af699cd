"""One layout rule: names on both sides, and an expression between their tensors; and what it says of given shapes.

Each block of the left becomes one of the right. Names that stand side by side in both are one run, whose size alone
matters; each run is stepped through in both tensors. A block begins behind those before it.

>>> print(layout_rule(("q", "k"), ("qk", "q d, k d -> (q + k) d")))
q, k -> qk
>>> pieces = solved_pieces("q d, k d -> (q + k) d", ((6, 4), (2, 4)), ())
>>> [(piece.offsets[1], piece.shapes[1]) for _, _, piece in pieces]
[((0, 0), (8, 4)), ((6, 0), (8, 4))]
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from axes import ExpressionError, ShardingError, SizeError
from axes.extension import Dim, Factor, Item, Spec, check_different, items_of, read, shortened, shown, tuple_of
from axes.transfers.layout_pieces import LayoutPiece, PieceDim, Shape, layout_piece

Names = str | tuple[str, ...] | None

Run = tuple[str, ...]
"""Names that stand side by side."""

_MARKS = re.compile(r"(\*|\{[^\W\d]\w*\})")


class NamePattern(NamedTuple):
    """A name of a layout rule, in which `*` is any text and `{e}` a number: the place in a dim `e`; see `name_pattern`.

    marks: each `*` and `{e}`. expression: a regular one, with a group for each.
    """

    text: str
    marks: tuple[str, ...]
    expression: re.Pattern[str]

    @property
    def counters(self) -> tuple[str, ...]:
        """The names of dims that are numbers in the name."""
        return tuple([mark[1:-1] for mark in self.marks if mark != "*"])

    def match(self, name: str) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
        """The texts of each `*`, and the numbers; None where it is another name."""
        found = self.expression.fullmatch(name)
        if found is None:
            return None
        marks = list(zip(self.marks, found.groups(), strict=True))
        return tuple([v for mark, v in marks if mark == "*"]), tuple([int(v) for mark, v in marks if mark != "*"])

    def filled(self, stars: Iterable[str], numbers: Iterable[int]) -> str:
        """The name with its marks filled in."""
        texts, counts = iter(stars), map(str, numbers)
        return _MARKS.sub(lambda mark: next(texts if mark[0] == "*" else counts), self.text)


def name_pattern(text: str) -> NamePattern:
    """The pattern that a name of a layout rule is.

    >>> pattern = name_pattern("layers.*.experts.{e}.up")
    >>> pattern.match("layers.3.experts.12.up")
    (('3',), (12,))
    >>> pattern.filled(("3",), (12,))
    'layers.3.experts.12.up'
    """
    parts = _MARKS.split(text)
    parts[::2] = map(re.escape, parts[::2])
    marks, parts[1::2] = parts[1::2], ["(.*)" if mark == "*" else r"(0|[1-9]\d{0,8})" for mark in parts[1::2]]
    return NamePattern(text, tuple(marks), re.compile("".join(parts), re.DOTALL))


@dataclass(frozen=True)
class LayoutRule:
    """Names on both sides, and the expression between them. One side may have no names.

    names: of both sides as they are written; with a `?` behind one of them the tensors needn't be there.
    """

    names: tuple[tuple[str, ...], tuple[str, ...]]
    left: tuple[NamePattern, ...]
    right: tuple[NamePattern, ...]
    expression: str

    def __str__(self) -> str:
        return " -> ".join([", ".join(side) or "nothing" for side in self.names])

    @property
    def items(self) -> list[Item]:
        """The names in the expression, each with its size where that is written."""
        parts = itertools.chain(*sides_of(self.expression)) if self.expression else ()
        return [item for part in parts for item in items_of(part.factors)]

    def entry(self, inverse: bool = False) -> tuple[Names, Names]:
        """The rule as a table has it, or its way back."""
        way = -1 if inverse else 1
        left, right = self.names[::way]
        text = " -> ".join(map(str.strip, self.expression.split("->")[::way]))
        return left or None, (*right, *([text] if text else [])) or None


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
    sides = [tuple([name_pattern(name.removesuffix("?")) for name in names]) for names in (left, right)]
    patterns = [*sides[0], *sides[1]]
    if not text and not alone:
        each = " ".join((*dict.fromkeys(itertools.chain(*[pattern.counters for pattern in patterns])), "..."))
        text = " -> ".join([", ".join([each] * len(side)) for side in sides])
    rule = LayoutRule((tuple(left), tuple(right)), sides[0], sides[1], text)
    if not text:
        return rule
    if len({pattern.marks.count("*") for pattern in patterns}) > 1:
        raise ShardingError(
            f"{rule}: each name has as many '*' as the others, the first is what the first of the others is\n"
            "write {e} for a number that becomes a dim e, like 'experts.{e}.up': ('up', 'e f d -> e d f')"
        )
    for side, parts in zip(sides, sides_of(text), strict=True):
        tensors = list({part.tensor: part.dims for part in parts}.values())
        if len(tensors) != len(side):
            message = f"{len(tensors)} tensors stand for {len(side)} names, of the rule {rule}"
            raise ExpressionError(message, text, 0, len(text))
        for pattern, dims in zip(side, tensors, strict=True):
            if dims[: len(pattern.counters)] != [[(name,)] for name in pattern.counters]:
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

_BLOCK = r"[^()+.\w]*\w[^()+.]*"
_BLOCKS = re.compile(rf"\(((?P<before>[^()+]*)\()?(?P<blocks>{_BLOCK}(\+{_BLOCK})+)(?(before)\)(?P<behind>[^()+]*))\)")
"""A group that holds blocks, `(h k + g k)`: tensors in one dim, one behind the other; or `(g (r k + k) d)`."""


class RulePart(NamedTuple):
    """A tensor of one side of a rule, or one of its blocks.

    tensor: its number. text: the tensor as it is written. factors: of all its dims. dims: for each dim the names in it;
    of the dim that has the block those before it, in it and behind it.
    """

    tensor: int
    text: str
    factors: list[Factor]
    dims: list[list[Run]]


@functools.lru_cache(maxsize=4096)
def sides_of(text: str) -> list[list[RulePart]]:
    """The tensors of both sides, block by block: `q d, k d -> (q + k) d` is read as `q d, k d -> (q) d, (k) d`.

    >>> [part.dims for part in sides_of("q d, k d -> (q + k) d")[1]]
    [[[(), ('q',), ()], [('d',)]], [[(), ('k',), ()], [('d',)]]]
    """
    if found := re.search(r"[@|]", text):
        raise ExpressionError(
            "a layout rule is of whole tensors; write '@' and '|' in their specs", text, found.start()
        )
    if text.count("->") != 1:
        raise ExpressionError("a layout rule has one '->'", text, text.rindex("->"))
    if found := re.search(r"\([^()]*(\.\.\.)", text[: text.index("->")]):
        raise ExpressionError("'...' in a group on the left leaves its sizes open; name the dims", text, *found.span(1))
    sides, at = list[list[RulePart]](), 0
    for side in text.split("->"):
        sides.append([])
        for number, own in enumerate(side.split(",")):
            sides[-1] += _parts(text, number, at, at + len(own))
            at += len(own) + 1
        at += 1
    return sides


def _parts(text: str, tensor: int, start: int, stop: int) -> Iterator[RulePart]:
    """A tensor, which stands there in the text; or each of its blocks."""
    group = _BLOCKS.search(text, start, stop)
    if text.count("+", start, stop) != (0 if group is None else group["blocks"].count("+")):
        message = "one group of a tensor holds blocks, of names and numbers without '...', like '(q + k) d'"
        raise ExpressionError(message, text, text.index("+", start))
    first, last = (stop, stop) if group is None else group.span()
    for block in [None] if group is None else re.compile(r"[^+]+").finditer(text, *group.span("blocks")):
        fragments: list[list[tuple[Dim, ...]]] = [[(dim,)] for dim in _dims(text, start, first)]
        if group is not None and block is not None:
            fragments.append(
                [_dims(text, *span) for span in (group.span("before"), block.span(), group.span("behind"))]
            )
        fragments += [[(dim,)] for dim in _dims(text, last, stop)]
        dims = [dim for segments in fragments for segment in segments for dim in segment]
        check_different(text, Spec(tuple(dims)))
        names = [
            [tuple([factor.name for dim in segment for factor in dim.factors if factor.name]) for segment in segments]
            for segments in fragments
        ]
        yield RulePart(tensor, text[start:stop].strip(), [factor for dim in dims for factor in dim.factors], names)


def _dims(text: str, start: int, stop: int) -> tuple[Dim, ...]:
    """The dims of a part of the text. It is read with blanks before it, so that an error says where it stands."""
    try:
        return read(text[start:stop].rjust(stop)).operands[0].dims
    except ExpressionError as error:
        raise ExpressionError(error.message, text, error.start, error.stop) from None


def pairs_of(text: str) -> list[tuple[RulePart, RulePart]]:
    """What becomes what: one tensor may become several that are equal, of several that are equal the first is read."""
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
    pairs = list(itertools.product(left[:1], right) if tied else zip(left, right, strict=True))
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


@functools.lru_cache(maxsize=4096)
def solved_pieces(
    text: str, shapes: tuple[Shape, ...], given: tuple[tuple[str, int], ...]
) -> list[tuple[int, int, LayoutPiece]]:
    """What is the same in tensors of both sides, each piece behind their numbers.

    shapes: of the left side. given: sizes of names. Raises `SizeError` where sizes don't follow or don't fit.
    """
    text = _without_dots(text, shapes)
    (left, right), sizes = sides_of(text), _Sizes(text, shapes, given)
    pieces = []
    for one, two in pairs_of(text):
        runs = _neighbours(one) & _neighbours(two)
        here, start, source = _placed(one, left, runs, sizes)
        there, end, target = _placed(two, right, runs, sizes)
        steps = [PieceDim(" ".join(run), sizes.product(run), (step, there[run])) for run, step in here.items()]
        pieces.append((one.tensor, two.tensor, layout_piece("", "", steps, (start, end), (source, target))))
    return pieces


def _without_dots(text: str, shapes: Sequence[Shape]) -> str:
    """The expression with names in the place of `...`, as many as the first tensor that has it needs."""
    firsts = {part.tensor: part for part in sides_of(text)[0]}
    dots = [len(shapes[at]) - len(part.dims) + 1 for at, part in firsts.items() if "..." in part.text]
    found = text.replace("...", " ".join([f"dim{at}" for at in range(*dots[:1])])) if dots else text
    for part in sides_of(found)[0]:
        if len(part.dims) != len(shapes[part.tensor]):
            raise SizeError(
                f"'{firsts[part.tensor].text}' has {len(part.dims)} dims; the tensor has {len(shapes[part.tensor])}\n"
                f"in  {text}"
            )
    return found


class _Sizes:
    """The sizes of names, which follow from the shapes of the left side.

    A dim says the size of a name, or the product of names none of which is known alone, `(h k)`. Raises `SizeError`
    where a dim has another size than its names give.
    """

    def __init__(self, text: str, shapes: Sequence[Shape], given: Iterable[tuple[str, int]]):
        self.text, self.dims = text, list[tuple[int, list[Run]]]()
        self.products: dict[Run, int] = {(): 1, **{(name,): size for name, size in given}}
        for number, shape in enumerate(shapes):
            own = [part.dims for part in sides_of(text)[0] if part.tensor == number]
            for at, size in enumerate(shape):
                blocks = own if len(own[0][at]) > 1 else own[:1]
                self.dims.append((size, [tuple(itertools.chain(*dims[at])) for dims in blocks]))
        known = 0
        while known < len(self.products):
            known = len(self.products)
            for dim in self.dims:
                self._solve(*dim)

    def _reduced(self, names: Run) -> tuple[int, Run]:
        """The product of the names that have a size, and the others."""
        found = math.prod([self.products[name,] for name in names if (name,) in self.products])
        rest = tuple(sorted([name for name in names if (name,) not in self.products]))
        return (found * self.products[rest], ()) if rest in self.products else (found, rest)

    def _solve(self, total: int, blocks: Sequence[Run]) -> None:
        """Find the one size that a dim lacks, if it lacks one."""
        terms = list(map(self._reduced, blocks))
        rests = {rest for _, rest in terms if rest}
        known, each = (sum([size for size, rest in terms if bool(rest) is is_open]) for is_open in (False, True))
        if not rests and known != total:
            raise SizeError(f"'{_written(blocks)}' is {known}, found {total}\nin  {self.text}")
        if len(rests) == 1:
            size, over = divmod(total - known, each) if each else (0, 1)
            if over or size < 0:
                raise SizeError(f"{total - known} doesn't divide by {each}:  {_written(blocks)}\nin  {self.text}")
            self.products[rests.pop()] = size

    def product(self, names: Run) -> int:
        """The product of the sizes of names; `SizeError` where it doesn't follow."""
        found, rest = self._reduced(names)
        for total, blocks in self.dims if rest else ():
            missing = [name for name in dict.fromkeys(itertools.chain(*blocks)) if (name,) not in self.products]
            if {*rest} <= {*missing}:
                raise SizeError(
                    f"the sizes of {' and '.join(map(repr, missing))} don't follow from  {_written(blocks)} = {total}\n"
                    f"give all but one of them, like {missing[0]}=2\nin  {self.text}"
                )
        return found


def _written(blocks: Sequence[Run]) -> str:
    """The blocks of a dim as text."""
    text = " + ".join(map(" ".join, blocks))
    return f"({text})" if " " in text else text


def _neighbours(part: RulePart) -> set[Run]:
    """The pairs of names of a tensor that stand side by side."""
    return {two for dim in part.dims for names in dim for two in itertools.pairwise(names)}


def _placed(
    part: RulePart, side: Sequence[RulePart], joined: Collection[Run], sizes: _Sizes
) -> tuple[dict[Run, tuple[int, int]], Shape, Shape]:
    """Through which dim of its tensor each run of a part steps, and how far; where it begins; the tensor's shape."""
    blocks = [each for each in side if each.tensor == part.tensor]
    steps: dict[Run, tuple[int, int]] = {}
    offset, shape = [], []
    for at, segments in enumerate(part.dims):
        stride, begin = 1, 0
        for zone, names in reversed([*enumerate(segments)]):
            step = stride
            for run in reversed(_cut(names, joined)):
                steps[run] = at, step
                step *= sizes.product(run)
            if zone == 1:
                counts = [sizes.product(each.dims[at][1]) for each in blocks]
                number = [each is part for each in blocks].index(True)
                begin, step = sum(counts[:number]) * stride, sum(counts) * stride
            stride = step
        offset.append(begin)
        shape.append(stride)
    return steps, tuple(offset), tuple(shape)


def _cut(names: Run, joined: Collection[Run]) -> list[Run]:
    """Names as runs: those that are joined in one."""
    cuts = [at for at in range(len(names) + 1) if names[at - 1 : at + 1] not in joined]  # 0 and the end are no pairs
    return [names[start:stop] for start, stop in itertools.pairwise(cuts)]
