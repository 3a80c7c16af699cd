"""One layout rule: names on both sides, and an expression between their tensors, whatever the shapes are.

>>> print(layout_rule(("q", "k"), ("qk", "q d, k d -> (q + k) d")).inverse)
qk -> q, k
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from axes.algebra import grammar
from axes.algebra.errors import ExpressionError, ShardingError, shortened, shown
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
    """`ExpressionError` where an expression can't be that of a rule with these names."""
    for patterns, parts, side in zip((rule.left, rule.right), sides_of(text), ("left", "right"), strict=True):
        firsts = list({part.tensor: part for part in reversed(parts)}.values())[::-1]
        if len(firsts) != len(patterns):
            message = f"the {side} side is {len(firsts)} tensors for {len(patterns)} names, of the rule {rule}"
            raise ExpressionError(message, text, 0, len(text))
        for part in parts:
            placed = [factor.span for factor in part.factors if factor.place is not None]
            if placed or part.spec.pending or any(dim.place is not None for dim in part.spec.dims):
                message = "a layout rule is of whole tensors; write '@' and '|' in their specs"
                raise ExpressionError(message, text, *(placed or [(0, len(text))])[0])
        for pattern, part in zip(patterns, firsts, strict=True):
            for name, dims in [(name, part.dims_of(name)) for name in pattern.counters]:
                if len(dims) != 1:
                    raise ExpressionError(
                        f"'{pattern.text}' stands for one tensor with a dim '{name}': '{part.text(text)}' has no such "
                        "dim of its own",
                        text,
                        0,
                        len(text),
                    )
                if any(map(grammar.has_dots, part.spec.dims[: dims[0]])):
                    span = part.spec.dims[dims[0]].span
                    raise ExpressionError(f"write '{name}', a number in the name, before '...'", text, *span)
    for pair in pairs_of(text):
        _check_pair(text, pair)


def sizes_of_rule(sizes: Mapping[str, int], names: Mapping[str, int | None]) -> tuple[tuple[str, int], ...]:
    """Of these names the sizes that are given, or written in the expression."""
    items = [grammar.Item(name, size) for name, size in names.items()]
    return tuple(given_sizes({name: size for name, size in sizes.items() if name in names}, None, items, names).items())


def names_of_rule(text: str) -> dict[str, int | None]:
    """The names of an expression that may be given a size, with the size where it is written."""
    found: dict[str, int | None] = {}
    for part in itertools.chain(*sides_of(text)) if text else ():
        for item in grammar.items_of(part.factors):
            found[item.name] = item.size or found.get(item.name)
    return found


# --- what becomes what

_BLOCKS = re.compile(r"\(([^()]*\+[^()]*)\)")
"""A group that holds blocks, `(h k + g k)`: tensors in one dim, one behind the other."""


class RulePart(NamedTuple):
    """A tensor of one side of a rule, or one of its blocks. span: of the group of blocks in the text."""

    tensor: int
    spec: Spec
    span: tuple[int, int] = (0, 0)

    @property
    def factors(self) -> list[Factor]:
        """The factors of its dims."""
        return list(itertools.chain(*[dim.factors for dim in self.spec.dims]))

    def is_block(self, factor: Factor) -> bool:
        """Whether a factor is of the block, not of what all blocks of the tensor share."""
        return self.span[0] <= factor.span[0] < self.span[1]

    def dims_of(self, name: str) -> list[int]:
        """The dims that a name is all of."""
        own = [(dim.factors, [factor.name for factor in dim.factors]) for dim in self.spec.dims]
        return [at for at, (factors, names) in enumerate(own) if names == [name] and not self.is_block(factors[0])]

    def text(self, text: str) -> str:
        """The tensor as it stands in the text of the rule."""
        return text[self.spec.dims[0].span[0] : self.spec.dims[-1].span[1]] if self.spec.dims else ""

    def dims(self, dots: int) -> list[list[tuple[bool, tuple[str, ...]]]]:
        """For each dim its segments, with whether each is the block; `...` is so many names."""
        hidden = tuple([f"...{at}" for at in range(dots)])

        def names(factors: Iterable[Factor]) -> tuple[str, ...]:
            each = [hidden if f.name == "..." else (f.name,) if f.name is not None else () for f in factors]
            return tuple(itertools.chain(*each))

        found: list[list[tuple[bool, tuple[str, ...]]]] = []
        for dim in self.spec.dims:
            if grammar.has_dots(dim) and not dim.grouped:
                found.extend([[(False, (name,))] for name in hidden])
                continue
            segments = itertools.groupby(dim.factors, self.is_block)
            found.append([(is_block, names(factors)) for is_block, factors in segments])
        return found


Pair = tuple[RulePart, RulePart]


@functools.lru_cache(maxsize=4096)
def sides_of(text: str) -> tuple[tuple[RulePart, ...], tuple[RulePart, ...]]:
    """The tensors of both sides, block by block. The text is read once for each block, with blanks for the others.

    >>> [str(part.spec) for part in sides_of("q d, k d -> (q + k) d")[1]]
    ['(q) d', '(k) d']
    """
    groups = list(_BLOCKS.finditer(text))
    for group in groups:
        if any("..." in block or not block.strip() for block in group[1].split("+")):
            raise ExpressionError("a block holds names and numbers: no '...', and no blocks", text, *group.span())
    trees = []
    for number in range(max([group[1].count("+") + 1 for group in groups], default=1)):
        one = text
        for group in groups:
            one = _with_block(one, group, number)
        if "+" in one:
            raise ExpressionError("blocks stand in a group of their own, like '(q + k) d'", text, one.index("+"))
        try:
            trees.append(grammar.parse_tensor(one))
        except ExpressionError as error:
            raise ExpressionError(error.message, text, error.start, error.stop) from None
    sides = []
    for side in (0, 1):
        parts: list[RulePart] = []
        of_side = [group for group in groups if ("->" in text[: group.start()]) == bool(side)]
        for tensor in range(len((trees[0].operands, trees[0].results or ())[side])):
            own = [group for group in of_side if text[: group.start()].rpartition("->")[2].count(",") == tensor]
            if len(own) > 1:
                message = "one dim of a tensor holds blocks; take the first ones apart before"
                raise ExpressionError(message, text, *own[1].span())
            for tree in trees[: own[0][1].count("+") + 1 if own else 1]:
                spec = (tree.operands, tree.results or ())[side][tensor]
                parts.append(RulePart(tensor, spec, own[0].span() if own else (0, 0)))
        sides.append(tuple(parts))
    return sides[0], sides[1]


def _with_block(text: str, group: re.Match[str], number: int) -> str:
    """The text with one block of a group, the last one where it has fewer; parentheses within others are left out."""
    (start, end), blocks = group.span(), group[1].split("+")
    kept = blocks[min(number, len(blocks) - 1)]
    before = " " * sum([len(block) + 1 for block in blocks[: min(number, len(blocks) - 1)]])
    left, right = "  " if text[:start].count("(") > text[:start].count(")") else "()"
    inside = f"{before}{kept}".ljust(end - start - 2)
    return f"{text[:start]}{left}{inside}{right}{text[end:]}"


@functools.lru_cache(maxsize=4096)
def pairs_of(text: str) -> tuple[Pair, ...]:
    """What becomes what: one tensor may become several that are equal, and the reverse; else block by block."""
    left, right = sides_of(text)
    names = [{factor.name for factor in part.factors} for part in (*left, *right)]
    if "+" not in text and 1 in (len(left), len(right)) and all(each == names[0] for each in names):
        return tuple(itertools.product(left, right))
    if len(left) != len(right):
        raise ExpressionError(
            f"the left side is {len(left)} tensors, blocks counted, and the right side {len(right)}; "
            "each block becomes one tensor or block, in their order",
            text,
            0,
            len(text),
        )
    return tuple(zip(left, right, strict=True))


def _check_pair(text: str, pair: Pair) -> None:
    """A tensor, or a block, has the same names on both sides, each once, and no numbers but 1."""
    sides: tuple[tuple[str, RulePart, RulePart], ...] = ("left", *pair), ("right", *reversed(pair))  # type: ignore[assignment]
    for side, part, other in sides:
        there = {factor.name for factor in other.factors}
        for at, factor in enumerate(part.factors):
            before, name = [each.name for each in part.factors[:at]], shortened(factor.name)
            rules = {
                "a layout rule takes no number but 1; name the dim and give its size": factor.name is None,
                "'_' stands in specs only; a layout rule needs a name": factor.name == "_",
                f"{name} stands on the {side} only": factor.name not in there,
                f"{name} stands twice in one tensor": factor.name in before,
            }
            wrong = [message for message, is_wrong in rules.items() if is_wrong]
            if wrong and not (factor.name is None and factor.size == 1):
                raise ExpressionError(wrong[0], text, *factor.span)
    for dim in pair[0].spec.dims:
        if dim.grouped and grammar.has_dots(dim):
            raise ExpressionError("'...' in a group on the left leaves its sizes open; name the dims", text, *dim.span)
