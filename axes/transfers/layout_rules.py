"""Layout rules: tensors whose names and layouts differ from those of another program, as expressions.

A rule has names on both sides and says how the tensors relate. Applied to the shapes of one side, a table of rules
gives the names and shapes of the other, and the pieces that both have in common:

>>> rules = LayoutRules({("*.q", "*.k", "*.v"): ("*.qkv", "(h k) d, (g k) d, (g k) d -> (h k + g k + g k) d")})
>>> change = rules.applied({"0.q": (32, 5), "0.k": (8, 5), "0.v": (8, 5), "norm": (5,)})
>>> print(change)
4 tensors -> 2 tensors
  0.q [32, 5], 0.k [8, 5], 0.v [8, 5] -> 0.qkv [48, 5]
  norm [5] -> norm [5]
>>> change.inverse.targets["0.q"]
(32, 5)

The expressions are those of `axes.rearrange`, blocks included. A name `experts.{e}.up` stands for one tensor with a dim
`e`, which the expression names. Nothing here needs tensors: plans, files and arrays are served by the same pieces.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from axes.algebra.errors import ShardingError, SizeError, shortened, shown, suggestion
from axes.algebra.sizes import checked_tensor_shape, given_sizes, tuple_of, written_sizes
from axes.transfers.layout_pieces import LayoutPiece, Shape, covering, layout_piece
from axes.transfers.layout_rule import LayoutRule, Names, layout_rule, solved_pieces
from axes.transfers.name_patterns import NamePatterns

Table = Mapping[Names, Names] | Iterable[tuple[Names, Names]]

_LINES = 8
_SAME = layout_rule("*", "*")


_Instance = tuple[int, tuple[str, ...]]
"""The number of a rule, -1 where no rule is about a tensor; and the text of each `*`."""

_Taken = Mapping[int, Mapping[tuple[int, ...], str]]
"""For each name of the left of a rule the tensors, by the numbers in their names."""

_Parts = dict[str, list[LayoutPiece]]
"""For each target the pieces that could be it, those of tensors that are equal included."""


@dataclass(frozen=True)
class LayoutChange:
    """Tensors of one program as those of another: what a table of rules says of given shapes.

    sources, targets: the shapes by name. pieces: for each target the parts of sources that it is made of; each element
    of a target is in one piece. equal: the same elements in further sources, which are equal to those that are read.
    """

    sources: Mapping[str, Shape]
    targets: Mapping[str, Shape]
    pieces: Mapping[str, tuple[LayoutPiece, ...]]
    equal: tuple[LayoutPiece, ...] = ()

    @property
    def unused(self) -> tuple[str, ...]:
        """The sources that the table says nobody needs."""
        used = {piece.source for piece in itertools.chain(*self.pieces.values(), self.equal)}
        return tuple([name for name in self.sources if name not in used])

    @property
    def inverse(self) -> LayoutChange:
        """The way back, but for sources that nobody used."""
        parts: _Parts = {name: [] for name in self.sources if name not in {*self.unused}}
        for piece in itertools.chain(*self.pieces.values(), self.equal):
            parts[piece.source].append(piece.inverse)
        return _change(self.targets, {name: self.sources[name] for name in parts}, parts)

    def __str__(self) -> str:
        unused, rest = len(self.unused), len(self.targets) - _LINES
        lines = [f"{len(self.sources)} tensors -> {len(self.targets)} tensors{f', {unused} unused' if unused else ''}"]
        for name in itertools.islice(self.targets, _LINES):
            used = dict.fromkeys(f"{one.source} {list(one.shapes[0])}" for one in self.pieces[name])
            shown = [*itertools.islice(used, 3), *([f"{len(used) - 3} more"] if len(used) > 3 else [])]
            lines.append(f"  {', '.join(shown)} -> {name} {list(self.targets[name])}")
        return "\n".join([*lines, *([f"  and {rest} more"] if rest > 0 else [])])


def _change(sources: Mapping[str, Shape], targets: Mapping[str, Shape], parts: _Parts) -> LayoutChange:
    """Of pieces that are the same elements of a target the first is read."""
    pieces, equal = {}, list[LayoutPiece]()
    for name, every in parts.items():
        taken = covering([math.prod(piece.shape) for piece in every], math.prod(targets[name]))
        pieces[name] = tuple(every[:taken])
        equal += every[taken:]
    return LayoutChange(sources, targets, pieces, tuple(equal))


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
        given_sizes(dict(self.sizes), None, (), self._names)
        self._given = [tuple(given_sizes(dict(self.sizes), None, rule.items).items()) for rule in self.rules]
        self._sides = [
            [(number, *each) for number, rule in enumerate(self.rules) for each in enumerate(getattr(rule, side))]
            for side in ("left", "right")
        ]
        self._tables = [NamePatterns([pattern.text for *_, pattern in side]) for side in self._sides]

    @property
    def _names(self) -> frozenset[str]:
        """The names in the expressions, which sizes may be given for."""
        return frozenset([item.name for rule in self.rules for item in rule.items])

    @property
    def inverse(self) -> LayoutRules:
        """The same table read from right to left. Sizes that only one side tells have to be given for it."""
        return LayoutRules([rule.entry(inverse=True) for rule in self.rules], sizes=dict(self.sizes))

    def _sized(self, sizes: Mapping[str, int]) -> LayoutRules:
        """The same table with more sizes; `SizeError` where a name has another one."""
        return LayoutRules([rule.entry() for rule in self.rules], sizes=given_sizes(dict(self.sizes), sizes))

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
        found = self._find(1, target)
        return found is not None and not self.rules[found[0][0]].left

    def applied(self, shapes: Mapping[str, Sequence[int]]) -> LayoutChange:
        """What the table makes of tensors of these shapes, by name.

        Raises `ShardingError` for rules that are about no tensor, tensors that a rule lacks, and names that two tensors
        would have; `SizeError` for sizes that don't follow from the shapes.
        """
        if not isinstance(shapes, Mapping) or not all(isinstance(name, str) for name in shapes):
            example = "{'q': (8, 4)}"
            raise ShardingError(f"shapes are a mapping from names to shapes, like {example}; found {shown(shapes)}")
        sources = {name: checked_tensor_shape(shape) for name, shape in shapes.items()}
        instances: dict[_Instance, dict[int, dict[tuple[int, ...], str]]] = {}
        for name in sources:
            instance, slot, numbers = self._find(0, name) or ((-1, (name,)), 0, ())
            instances.setdefault(instance, {}).setdefault(slot, {})[numbers] = name
        self._check_all_used({number for number, _ in instances}, sources)
        targets, parts = dict[str, Shape](), _Parts()
        for (number, stars), taken in instances.items():
            rule, given = (self.rules[number], self._given[number]) if number >= 0 else (_SAME, ())
            made, pieces = _made(rule, given, stars, taken, sources) if rule.right else ({}, {})
            for target in made:
                first = pieces[target][0].source
                if target in targets:
                    raise ShardingError(
                        f"two tensors would be {shortened(target)}: {parts[target][0].source} and {first}\n"
                        "give one of them another name, or say {name: None} of the one that nobody needs"
                    )
                if self.keeps(target):
                    raise ShardingError(
                        f"{shortened(target)} would keep its values, by the layout rules, and be written from "
                        f"{shortened(first)}\ntake it out of {{None: names}}, or the source out of the table"
                    )
            targets |= made
            parts |= pieces
        return _change(sources, targets, parts)

    def _find(self, side: int, name: str) -> tuple[_Instance, int, tuple[int, ...]] | None:
        """The first rule that has a name on one side, with which of its names that is, and the numbers in it."""
        for number, slot, pattern in map(self._sides[side].__getitem__, self._tables[side].candidates(name)):
            if found := pattern.match(name):
                return (number, found[0]), slot, found[1]
        return None

    def _check_all_used(self, used: set[int], sources: Mapping[str, Shape]) -> None:
        """`ShardingError` with the rules that are about no tensor."""
        idle = [rule for at, rule in enumerate(self.rules) if at not in used and rule.left and not rule.optional]
        lines = [f"  and {len(idle) - _LINES} more"] if len(idle) > _LINES else []
        for rule in reversed(idle[:_LINES]):
            matched = next((name for name in sources if any(p.match(name) for p in rule.left)), None)
            first = None if matched is None else self._find(0, matched)
            known = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in sources)
            near = suggestion(re.sub(r"{.*?}", "*", rule.left[0].text), known)
            lines.insert(0, f"  {rule}{f': behind a wider one, {self.rules[first[0][0]]}' if first else near}")
        if idle:
            about = "layout rules that are about no tensor (a '?' behind a name says that it needn't be there)"
            raise ShardingError("\n".join([about, *lines]))


def _made(
    rule: LayoutRule,
    given: tuple[tuple[str, int], ...],
    stars: tuple[str, ...],
    taken: _Taken,
    sources: Mapping[str, Shape],
) -> tuple[dict[str, Shape], _Parts]:
    """The targets of a rule for one text of each `*`, and their pieces."""
    shapes = tuple([_whole_shape(rule, stars, slot, taken, sources) for slot in range(len(rule.left))])
    try:
        wholes, pieces = solved_pieces(rule.expression, shapes, given)
    except SizeError as error:
        found = ", ".join(
            [f"{name} {list(sources[name])}" for names in taken.values() for name in [*names.values()][:1]]
        )
        raise SizeError(f"{error}\nof {found}, by the rule {rule}") from None
    targets = dict[str, Shape]()
    for pattern, whole in zip(rule.right, wholes, strict=True):
        depth = len(pattern.counters)
        for numbers in itertools.product(*map(range, whole[:depth])):
            name = pattern.filled(stars, numbers)
            if name in targets or pattern.match(name) != (stars, numbers):
                why = "twice" if name in targets else "a name that reads as another rule's"
                raise ShardingError(
                    f"the rule {rule} makes {shortened(name)}, {why}; write more of the name beside '*'"
                )
            targets[name] = whole[depth:]
    parts: _Parts = {name: [] for name in targets}
    for left, right, piece in pieces:
        for here, there, part in _unstacked(piece, len(rule.left[left].counters), len(rule.right[right].counters)):
            target = rule.right[right].filled(stars, there)
            parts[target].append(replace(part, source=taken[left][here], target=target))
    return targets, parts


def _whole_shape(
    rule: LayoutRule, stars: tuple[str, ...], slot: int, taken: _Taken, sources: Mapping[str, Shape]
) -> Shape:
    """The shape of the tensor of a name of the left; those with numbers in their names are one."""
    pattern, names = rule.left[slot], taken.get(slot, {})
    first = next(iter(names.values()), None) or next(iter(next(iter(taken.values())).values()))
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


def _unstacked(piece: LayoutPiece, one: int, two: int) -> Iterator[tuple[Shape, Shape, LayoutPiece]]:
    """The pieces of the tensors that are one with so many dims more, behind the numbers of both tensors."""
    dims, counts = [], []
    for dim in piece.dims:
        (source, source_step), (target, target_step) = dim.ends
        is_number = source < one or target < two
        counts.append(range(dim.size if is_number else 1))
        if not is_number:
            dims.append(dim._replace(ends=((source - one, source_step), (target - two, target_step))))
    shapes = piece.shapes[0][one:], piece.shapes[1][two:]
    for numbers in itertools.product(*counts):
        here, there = piece.index(0, numbers), piece.index(1, numbers)
        yield here[:one], there[:two], layout_piece("", "", dims, (here[one:], there[two:]), shapes)
