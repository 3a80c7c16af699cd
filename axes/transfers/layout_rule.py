"""One layout rule: names on both sides, and an expression between their tensors, whatever the shapes are.

>>> print(layout_rule(("q", "k"), ("qk", "q d, k d -> (q + k) d")))
q, k -> qk
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from axes.algebra.errors import ExpressionError, ShardingError, shortened
from axes.algebra.grammar import Factor, Item, Spec, items_of
from axes.algebra.sizes import tuple_of
from axes.extension import read, shown
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
    if text and len({pattern.marks.count("*") for pattern in patterns}) > 1:
        raise ShardingError(
            f"{rule}: each name has as many '*' as the others, the first is what the first of the others is\n"
            "write {e} for a number that becomes a dim e, like 'experts.{e}.up': ('up', 'e f d -> e d f')"
        )
    for side, parts in zip(sides, sides_of(text) if text else (), strict=False):
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
    assert not text or pairs_of(text), "what becomes what is checked, too"
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
                found = [(read(one).spec, span) for one, span in _blocks_of(own.rjust(at + len(own)))]
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
