"""Layout rules: tensors whose names and layouts differ from those of another program, as expressions.

A rule has names on both sides and says how the tensors relate. Applied to the shapes of one side, a table of rules
gives the names and shapes of the other, and the pieces that both have in common:

>>> rules = LayoutRules({("*.q", "*.k", "*.v"): ("*.qkv", "(h k) d, (g k) d, (g k) d -> (h k + g k + g k) d")})
>>> change = rules.applied({"0.q": (32, 5), "0.k": (8, 5), "0.v": (8, 5), "norm": (5,)})
>>> print(change)
4 tensors -> 2 tensors
  0.q [32, 5], 0.k [8, 5], 0.v [8, 5] -> 0.qkv [48, 5]
  norm [5] -> norm [5]
>>> change.pieces["0.qkv"][1].offsets
((0, 0), (32, 0))

The expressions are those of `axes.rearrange`, blocks included. A name `experts.{e}.up` stands for one tensor with a dim
`e`, which the expression names. Nothing here needs tensors: plans, files and arrays are served by the same pieces.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from axes import ShardingError, SizeError
from axes.extension import checked_tensor_shape, given_sizes, shortened, shown, suggestion, tuple_of, written_sizes
from axes.transfers.layout_pieces import LayoutPiece, Shape, layout_piece
from axes.transfers.layout_rule import LayoutRule, NamePattern, Names, layout_rule, solved_pieces

Table = Mapping[Names, Names] | Iterable[tuple[Names, Names]]

_LINES = 8
_SAME = layout_rule("*", "*")

_Instance = tuple[int, tuple[str, ...]]
"""The number of a rule, -1 where no rule is about a tensor; and the text of each `*`."""

_Taken = dict[int, dict[tuple[int, ...], str]]
"""For each name of the left of a rule the tensors, by the numbers in their names."""

_Pieces = dict[str, list[LayoutPiece]]
"""The pieces of each target."""


@dataclass(frozen=True)
class LayoutChange:
    """Tensors of one program as those of another: what a table of rules says of given shapes.

    sources: the shapes by name. pieces: for each target the parts of sources that it is made of; each element of a
    target is in one piece.
    """

    sources: dict[str, Shape]
    pieces: _Pieces

    @functools.cached_property
    def targets(self) -> dict[str, Shape]:
        """The shapes of the targets by name."""
        return {name: pieces[0].shapes[1] for name, pieces in self.pieces.items()}

    @property
    def unused(self) -> tuple[str, ...]:
        """The sources that are no part of any target."""
        used = {piece.source for piece in itertools.chain(*self.pieces.values())}
        return tuple([name for name in self.sources if name not in used])

    def __str__(self) -> str:
        unused, rest = len(self.unused), len(self.targets) - _LINES
        lines = [f"{len(self.sources)} tensors -> {len(self.targets)} tensors{f', {unused} unused' if unused else ''}"]
        for name in itertools.islice(self.targets, _LINES):
            used = dict.fromkeys(f"{one.source} {list(one.shapes[0])}" for one in self.pieces[name])
            shown = [*itertools.islice(used, 3), *([f"{len(used) - 3} more"] if len(used) > 3 else [])]
            lines.append(f"  {', '.join(shown)} -> {name} {list(self.targets[name])}")
        return "\n".join([*lines, *([f"  and {rest} more"] if rest > 0 else [])])


class _NameTable:
    """The patterns of one side of all rules, and the first that matches a name, found without a try of each."""

    def __init__(self, sides: Iterable[Sequence[NamePattern]]):
        self.listed = [(number, *each) for number, side in enumerate(sides) for each in enumerate(side)]
        places = [(at, pattern) for at, (*_, pattern) in enumerate(self.listed)]
        marked = [f"(?P<n{at}>{pattern.expression.pattern})" for at, pattern in places if pattern.marks]
        self.marked = re.compile("|".join(marked) or "(?!)", re.DOTALL)
        self.plain = {pattern.text: at for at, pattern in reversed(places) if not pattern.marks}

    def find(self, name: str) -> tuple[_Instance, int, tuple[int, ...]] | None:
        """The first rule that has a name, with which of its names that is, and the numbers in it."""
        found = self.marked.fullmatch(name)
        places = [int(str(found.lastgroup)[1:])] if found else []
        places += [self.plain[name]] if name in self.plain else []
        if not places:
            return None
        number, slot, pattern = self.listed[min(places)]
        stars, numbers = pattern.match(name) or ((), ())
        return (number, stars), slot, numbers


@dataclass(init=False, repr=False, unsafe_hash=True)
class LayoutRules:
    """A table of layout rules: how the names and layouts of one program's tensors relate to another's.

    table: `{names: names}`, or `{names: (names..., expression)}`, or pairs of both; of several names a tuple. The
    expression has a tensor for each name on either side, as in `axes.rearrange`; without one the tensors are the same
    under another name.
    Keywords (or `sizes`) are the sizes of names in the expressions that shapes don't tell.

    - `*` in a name is any text, the same in all names of the rule, the first for the first.
    - `{e}` is a number from 0: all these tensors are one with a dim `e`, which the expression names.
    - One name on the left and several on the right: tensors that are equal, tied.
    - `names: None`: nobody needs these tensors. `None: names`: targets that keep the values that they have.
    - A `?` behind a name: the rule may be about no tensor. Any other rule that is about none is an error.

    The first rule that is about a tensor applies. A tensor that no rule is about keeps its name and shape.

    Raises `ExpressionError` for text outside the grammar, `ShardingError` for names that can't be or that no tensor
    has, `SizeError` for sizes that don't follow or don't fit.

    Examples:
        >>> rules = LayoutRules(
        ...     {
        ...         "model.*.experts.{e}.up": ("*.up", "e f d -> e d f"),
        ...         "model.*.q": ("*.q", "(h two k) d -> (h k two) d"),
        ...         "model.*": "*",
        ...     },
        ...     h=2, two=2,
        ... )
        >>> print(rules.applied({"model.0.experts.0.up": (6, 4), "model.0.experts.1.up": (6, 4), "model.norm": (4,),
        ...                      "model.0.q": (8, 4)}))
        4 tensors -> 3 tensors
          model.0.experts.0.up [6, 4], model.0.experts.1.up [6, 4] -> 0.up [2, 4, 6]
          model.norm [4] -> norm [4]
          model.0.q [8, 4] -> 0.q [8, 4]
    """

    rules: tuple[LayoutRule, ...]
    sizes: tuple[tuple[str, int], ...]

    def __init__(self, table: Table, *, sizes: Mapping[str, int] | None = None, **keywords: int):
        entries = tuple_of(table.items() if isinstance(table, Mapping) else table)
        if entries is None or not all(isinstance(each, tuple | list) and len(each) == 2 for each in entries):
            raise ShardingError(f"layout rules are a mapping from names to names, or pairs; found {shown(table)}")
        self.rules = tuple([layout_rule(*entry) for entry in entries])
        self.sizes = written_sizes(keywords, sizes)
        self._names = frozenset([item.name for rule in self.rules for item in rule.items])
        given_sizes(dict(self.sizes), None, (), self._names)
        self._given = [tuple(given_sizes(dict(self.sizes), None, rule.items).items()) for rule in self.rules]
        self._left = _NameTable(rule.left for rule in self.rules)
        self._right = _NameTable(rule.right for rule in self.rules)

    @property
    def inverse(self) -> LayoutRules:
        """The same table read from right to left. Sizes that only one side tells have to be given for it."""
        return LayoutRules([rule.entry(inverse=True) for rule in self.rules], sizes=dict(self.sizes))

    def _sized(self, sizes: Mapping[str, int]) -> LayoutRules:
        """The same table with those of more sizes that it has names for; `SizeError` where a name has another one."""
        own = {name: size for name, size in sizes.items() if name in self._names}
        return LayoutRules([rule.entry() for rule in self.rules], sizes=given_sizes(dict(self.sizes), own))

    @property
    def _as_data(self) -> dict[str, Any]:
        """The arguments that make the table again in another process, as JSON has them."""
        return {"table": [rule.entry() for rule in self.rules], "sizes": dict(self.sizes)}

    def __repr__(self) -> str:
        sizes = [f"{name}={size}" for name, size in self.sizes]
        return f"<LayoutRules: {'; '.join([*map(str, self.rules[:_LINES]), *sizes])}>"

    def keeps(self, target: str) -> bool:
        """Whether the table says that a target keeps the values that it has."""
        if not isinstance(target, str):
            raise ShardingError(f"keeps takes the name of a target; found {shown(target)}")
        found = self._right.find(target)
        return found is not None and not self.rules[found[0][0]].left

    def applied(self, shapes: Mapping[str, Sequence[int]]) -> LayoutChange:
        """What the table makes of tensors of these shapes, by name.

        Raises `ShardingError` for rules that are about no tensor, tensors that a rule lacks, and names that two tensors
        would have; `SizeError` for sizes that don't follow from the shapes.
        """
        if not isinstance(shapes, Mapping) or not all(isinstance(name, str) for name in shapes):
            raise ShardingError(
                f"shapes are a mapping from names to shapes, like {{'q': (8, 4)}}; found {shown(shapes)}"
            )
        sources = {name: checked_tensor_shape(shape) for name, shape in shapes.items()}
        instances: dict[_Instance, _Taken] = {}
        for name in sources:
            instance, slot, numbers = self._left.find(name) or ((-1, (name,)), 0, ())
            instances.setdefault(instance, {}).setdefault(slot, {})[numbers] = name
        self._check_all_used({number for number, _ in instances}, sources)
        pieces = _Pieces()
        for (number, stars), taken in instances.items():
            rule, given = (self.rules[number], self._given[number]) if number >= 0 else (_SAME, ())
            parts = _made(rule, given, stars, taken, sources) if rule.right else {}
            for target, (first, *_) in parts.items():
                if target in pieces:
                    raise ShardingError(
                        f"two tensors would be {shortened(target)}: {pieces[target][0].source} and {first.source}\n"
                        "give one of them another name, or add {name: None} for the one that nobody needs"
                    )
                if self.keeps(target):
                    raise ShardingError(
                        f"{shortened(target)} would keep its values, by the layout rules, and be written from "
                        f"{shortened(first.source)}\ntake it out of {{None: names}}, or the source out of the table"
                    )
            pieces |= parts
        return LayoutChange(sources, pieces)

    def _check_all_used(self, used: set[int], sources: Mapping[str, Shape]) -> None:
        """`ShardingError` with the rules that are about no tensor."""
        unused = [rule for at, rule in enumerate(self.rules) if at not in used and rule.left]
        idle = [rule for rule in unused if not any(name.endswith("?") for name in itertools.chain(*rule.names))]
        lines = ["layout rules that match no tensor (write a '?' after a name whose tensor may be missing)"]
        known = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in sources) if idle else {}
        for rule in idle[:_LINES]:
            firsts = [self._left.find(name) for name in sources if any(pattern.match(name) for pattern in rule.left)]
            wider = [f": behind a wider one, {self.rules[first[0][0]]}" for first in firsts[:1] if first is not None]
            near = suggestion(re.sub(r"{.*?}", "*", rule.left[0].text), known)
            lines.append(f"  {rule}{''.join(wider) or near}")
        if idle:
            more = [f"  and {len(idle) - _LINES} more"] if len(idle) > _LINES else []
            raise ShardingError("\n".join([*lines, *more]))


def _made(
    rule: LayoutRule,
    given: tuple[tuple[str, int], ...],
    stars: tuple[str, ...],
    taken: _Taken,
    sources: Mapping[str, Shape],
) -> _Pieces:
    """The targets of a rule for one text of each `*`, and their pieces."""
    shapes = tuple([_whole_shape(rule, stars, slot, taken, sources) for slot in range(len(rule.left))])
    try:
        pieces = solved_pieces(rule.expression, shapes, given)
    except SizeError as error:
        found = ", ".join(
            [f"{name} {list(sources[name])}" for names in taken.values() for name in [*names.values()][:1]]
        )
        raise SizeError(f"{error}\nof {found}, by the rule {rule}") from None
    parts, wholes = _Pieces(), {right: piece.shapes[1] for _, right, piece in pieces}
    for slot, pattern in enumerate(rule.right):
        for numbers in itertools.product(*map(range, wholes[slot][: len(pattern.counters)])):
            name = pattern.filled(stars, numbers)
            if name in parts or pattern.match(name) != (stars, numbers):
                why = "twice" if name in parts else "a name that reads as another rule's"
                raise ShardingError(
                    f"the rule {rule} makes {shortened(name)}, {why}; write more of the name beside '*'"
                )
            parts[name] = []
    for left, right, piece in pieces:
        depths = len(rule.left[left].counters), len(rule.right[right].counters)
        for here, there, part in _unstacked(piece, *depths):
            target = rule.right[right].filled(stars, there)
            parts[target].append(replace(part, source=taken[left][here], target=target))
    return parts


def _whole_shape(
    rule: LayoutRule, stars: tuple[str, ...], slot: int, taken: _Taken, sources: Mapping[str, Shape]
) -> Shape:
    """The shape of the tensor of a name of the left; those with numbers in their names are one."""
    pattern, names = rule.left[slot], taken.get(slot, {})
    first = next(itertools.chain(names.values(), *[others.values() for others in taken.values()]))
    # Among more numbers than names one has none.
    counts = [min(1 + max(column), len(names) + 1) for column in zip(*names, strict=True)] or [1] * len(
        pattern.counters
    )
    for numbers in itertools.product(*map(range, counts)):
        if numbers not in names:
            wanted = pattern.filled(stars, numbers)
            near = suggestion(wanted, [*itertools.islice(sources, 1000)])
            raise ShardingError(f"the rule {rule}\ntakes {first} together with {wanted}, which isn't there{near}")
        if sources[names[numbers]] != sources[first]:
            both = f"{first} is {list(sources[first])} and {names[numbers]} is {list(sources[names[numbers]])}"
            raise ShardingError(f"{both}, which are one tensor by the rule {rule}")
    return (*counts, *sources[first])


@functools.lru_cache(maxsize=4096)
def _unstacked(piece: LayoutPiece, one: int, two: int) -> list[tuple[Shape, Shape, LayoutPiece]]:
    """The pieces of the tensors that are one with so many dims more, behind the numbers of both tensors."""
    kept = [dim for dim in piece.dims if dim.ends[0][0] >= one and dim.ends[1][0] >= two]
    dims = [
        dim._replace(ends=((at - one, step), (to - two, far))) for dim in kept for (at, step), (to, far) in [dim.ends]
    ]
    shapes = piece.shapes[0][one:], piece.shapes[1][two:]
    found = []
    for numbers in itertools.product(*[range(1 if dim in kept else dim.size) for dim in piece.dims]):
        here, there = piece.index(0, numbers), piece.index(1, numbers)
        found.append((here[:one], there[:two], layout_piece("", "", dims, (here[one:], there[two:]), shapes)))
    return found
