"""One layout rule: names on both sides, and an expression between their tensors, whatever the shapes are.

>>> print(layout_rule(("q", "k"), ("qk", "q d, k d -> (q + k) d")).inverse)
qk -> q, k
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from axes.algebra import grammar
from axes.algebra.errors import ExpressionError, ShardingError, shortened, shown
from axes.algebra.flow.blocks import Fused, read_blocks
from axes.algebra.flow.reading import read
from axes.algebra.grammar import Factor, Spec
from axes.algebra.sizes import given_sizes, tuple_of

_MARKS = re.compile(r"(\*|\{[^{}]*\})")


@dataclass(frozen=True)
class NamePattern:
    """A name in which `*` is any text and `{e}` a number: the place in a dim `e`.

    >>> pattern = NamePattern("layers.*.experts.{e}.up")
    >>> pattern.match("layers.3.experts.12.up")
    (('3',), (12,))
    >>> pattern.filled(("3",), {"e": 12})
    'layers.3.experts.12.up'
    """

    text: str

    @functools.cached_property
    def _parts(self) -> list[str]:
        return _MARKS.split(self.text)

    @functools.cached_property
    def counters(self) -> tuple[str, ...]:
        """The names of dims that are numbers in the name."""
        found = [part[1:-1] for part in self._parts[1::2] if part != "*"]
        for name in found:
            if not name.isidentifier() or found.count(name) > 1:
                raise ExpressionError(
                    f"'{{{name}}}' in a name of a layout rule is the name of a dim, once, like 'experts.{{e}}.up'",
                    self.text,
                    self.text.index("{"),
                )
        return tuple(found)

    @property
    def texts(self) -> list[str]:
        """What stands between its marks."""
        return self._parts[::2]

    @functools.cached_property
    def stars(self) -> int:
        """How often `*` stands in it."""
        return self._parts.count("*")

    @functools.cached_property
    def _expression(self) -> re.Pattern[str]:
        marks = [r"(.*)" if part == "*" else r"(0|[1-9]\d{0,8})" for part in self._parts[1::2]]
        plain = list(map(re.escape, self._parts[::2]))
        return re.compile("".join(itertools.chain(*itertools.zip_longest(plain, marks, fillvalue=""))), re.DOTALL)

    def match(self, name: str) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
        """What `*` stands for, and the numbers; None where it is another name."""
        found = self._expression.fullmatch(name)
        if found is None:
            return None
        marks = list(zip(self._parts[1::2], found.groups(), strict=True))
        return tuple([v for mark, v in marks if mark == "*"]), tuple([int(v) for mark, v in marks if mark != "*"])

    def filled(self, stars: Sequence[str], numbers: Mapping[str, int]) -> str:
        """The name with its marks filled in."""
        texts, found = iter(stars), list(self._parts)
        for at in range(1, len(found), 2):
            found[at] = next(texts) if found[at] == "*" else str(numbers[found[at][1:-1]])
        return "".join(found)


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
    def counters(self) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
        """For the tensors of both sides the dims that are numbers in their names."""
        return tuple([p.counters for p in self.left]), tuple([p.counters for p in self.right])

    @property
    def inverse(self) -> LayoutRule:
        """The same read from right to left."""
        left, _, right = self.expression.partition("->")
        text = f"{right.strip()} -> {left.strip()}" if self.expression else ""
        return LayoutRule(self.right, self.left, text, self.optional)


def layout_rule(key: object, value: object) -> LayoutRule:
    """The rule that an entry of a table is; `ShardingError` or `ExpressionError` where it can't be one."""
    left, right = _texts(key), _texts(value)
    text = right.pop() if right and "->" in right[-1] else ""
    for name in (*left, *right):
        if not name or any(map(str.isspace, name)):
            raise ShardingError(
                f"{shortened(name)} isn't the name of a tensor; an expression stands last on the right, with '->', "
                "like ('q', 'k'): ('qk', 'q d, k d -> (q + k) d')"
            )
    optional = any(name.endswith("?") for name in (*left, *right))
    sides = [tuple([NamePattern(name.removesuffix("?")) for name in names]) for names in (left, right)]
    counters = tuple(dict.fromkeys(itertools.chain(*[pattern.counters for pattern in (*sides[0], *sides[1])])))
    rule = LayoutRule(sides[0], sides[1], text, optional)
    if not left or not right:
        if text or not (left or right):
            raise ShardingError(
                f"a layout rule without names on one side has no expression; found {_entry(key, value)}"
            )
        return rule
    if not text:
        if len(left) > 1:
            raise ShardingError(
                f"{rule}: several tensors on the left need an expression\n"
                "write it behind the names, like ('q', 'k'): ('qk', 'q d, k d -> (q + k) d')"
            )
        each = " ".join((*counters, "..."))
        text = f"{each} -> {', '.join([each] * len(right))}"
    if len({pattern.stars for pattern in (*sides[0], *sides[1])}) > 1:
        raise ShardingError(
            f"{rule}: each name has as many '*' as the others, the first is what the first of the others is\n"
            "write {e} for a number that becomes a dim e, like 'experts.{e}.up': ('up', 'f d e -> e f d')"
        )
    _check_expression(rule, text)
    return replace(rule, expression=text)


def _texts(names: object) -> list[str]:
    found = () if names is None else (names,) if isinstance(names, str) else tuple_of(names)
    if found is None or (names is not None and not found) or not all(isinstance(name, str) for name in found):
        raise ShardingError(
            "a layout rule is names: names, or names: (names, expression), like "
            f"('q', 'k'): ('qk', 'q d, k d -> (q + k) d'); found {shown(names)}"
        )
    return list(found)


def _entry(key: object, value: object) -> str:
    return f"{shown(key)}: {shown(value)}"


def _check_expression(rule: LayoutRule, text: str) -> None:
    tree = grammar.parse_blocks(text)
    for patterns, trees, side in ((rule.left, tree.operands, "left"), (rule.right, tree.results or (), "right")):
        if len(trees) != len(patterns):
            raise ExpressionError(
                f"the {side} side is {len(trees)} tensors for {len(patterns)} names, of the rule {rule}",
                text,
                0,
                len(text),
            )
        for pattern, spec in zip(patterns, trees, strict=True):
            _check_spec(pattern, spec, text)
    for pair in pairs_of(text)[2]:
        read("rearrange", pair.text, (len(grammar.parse_blocks(pair.text).operands[0].dims),))  # '...' may be one dim


def _check_spec(pattern: NamePattern, spec: Spec, text: str) -> None:
    dots = False
    for factor in factors_of_spec(spec):
        if factor.place is not None:
            raise ExpressionError("a layout rule is of whole tensors; write '@' in their specs", text, *factor.span)
    for dim in spec.dims:
        if dim.place is not None or spec.pending:
            raise ExpressionError(
                "a layout rule is of whole tensors; write '@' and '|' in their specs", text, *dim.span
            )
        if dots and str(dim.factors[0].name) in pattern.counters:
            raise ExpressionError(f"write '{dim}', a number in the name, before '...'", text, *dim.span)
        dots = dots or grammar.has_dots(dim)
    alone = [dim.factors[0].name for dim in spec.dims if len(dim.factors) == 1]
    for name in pattern.counters:
        if alone.count(name) != 1:
            raise ExpressionError(
                f"'{pattern.text}' stands for one tensor with a dim '{name}': '{spec}' has no such dim of its own",
                text,
                0,
                len(text),
            )


def factors_of_spec(spec: Spec) -> Iterator[Factor]:
    """The factors of a tensor, those of blocks in the place of these."""
    for factor in itertools.chain(*[dim.factors for dim in spec.dims]):
        yield from itertools.chain(*factor.blocks) if factor.blocks else (factor,)


def sizes_of_rule(sizes: Mapping[str, int], names: Mapping[str, int | None]) -> tuple[tuple[str, int], ...]:
    """Of these names the sizes that are given, or written in the expression."""
    items = [grammar.Item(name, size) for name, size in names.items()]
    return tuple(given_sizes({name: size for name, size in sizes.items() if name in names}, None, items, names).items())


def names_of_rule(text: str) -> dict[str, int | None]:
    """The names of an expression that may be given a size, with the size where it is written."""
    if not text:
        return {}
    tree = grammar.parse_blocks(text)
    leaves = [leaf for spec in (*tree.operands, *(tree.results or ())) for leaf in factors_of_spec(spec)]
    found: dict[str, int | None] = {}
    for leaf in leaves:
        if leaf.name not in (None, "..."):
            found[str(leaf.name)] = leaf.size or found.get(str(leaf.name))
    return found


# --- what becomes what


class BlockOf(NamedTuple):
    """One side of a pair: the number of a tensor, and which of its blocks."""

    tensor: int
    block: int


class BlockPair(NamedTuple):
    """A block of the left that becomes one of the right, as an expression of its own."""

    text: str
    left: BlockOf
    right: BlockOf


Side = tuple[Fused | str, ...]


@functools.lru_cache(maxsize=4096)
def pairs_of(text: str) -> tuple[Side, Side, tuple[BlockPair, ...]]:
    """The tensors of both sides, and what becomes what. One may become several that are equal, and the reverse."""
    tree = grammar.parse_blocks(text)
    sides = tree.operands, tree.results or ()
    names = [{leaf.name for leaf in factors_of_spec(spec)} for side in sides for spec in side]
    if "+" not in text and 1 in map(len, sides) and all(each == names[0] for each in names):
        left, right = ([str(spec) for spec in side] for side in sides)
        joined = itertools.product(range(len(left)), range(len(right)))  # one of the two sides is one tensor
        equal = [BlockPair(f"{left[i]} -> {right[j]}", BlockOf(i, 0), BlockOf(j, 0)) for i, j in joined]
        return tuple(left), tuple(right), tuple(equal)
    expression = read_blocks(text)
    ends = [
        [
            BlockOf(at, block)
            for at, each in enumerate(side)
            for block in range(len(each.parts) if isinstance(each, Fused) else 1)
        ]
        for side in (expression.left, expression.right)
    ]
    texts = [" -> ".join(pair) for pair in expression.pairs]
    return expression.left, expression.right, tuple(map(BlockPair, texts, *ends))
