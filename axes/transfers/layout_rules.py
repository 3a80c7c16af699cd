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
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from axes.algebra.errors import ShardingError, SizeError, shortened, shown, suggestion
from axes.algebra.sizes import given_sizes, whole_numbers, written_sizes
from axes.transfers.layout_pieces import LayoutPiece, layout_piece, whole_piece, without_overlap
from axes.transfers.layout_rule import LayoutRule, NamePattern, layout_rule, names_of_rule, sides_of, sizes_of_rule
from axes.transfers.name_patterns import NameIndex
from axes.transfers.rule_pieces import Shape, SolvedRule, solved_pieces

Table = Mapping[str | tuple[str, ...] | None, str | tuple[str, ...] | None]

_LINES = 8


class _Instance(NamedTuple):
    """A rule for one text of each `*`; `rule` is -1 for a tensor that no rule is about, which keeps its name."""

    rule: int
    stars: tuple[str, ...]


_Sources = Mapping[int, Mapping[tuple[int, ...], str]]
"""For each name of the left of a rule the tensors, by the numbers in their names."""


@dataclass(frozen=True)
class LayoutChange:
    """Tensors of one program as those of another: what a table of rules says of given shapes.

    sources, targets: the shapes by name. pieces: for each target the parts of sources that it is made of; each element
    of a target is in one piece. unused: sources that the table says nobody needs. equal: the same elements in further
    sources, which are equal to those that are read.
    """

    sources: Mapping[str, Shape]
    targets: Mapping[str, Shape]
    pieces: Mapping[str, tuple[LayoutPiece, ...]]
    unused: tuple[str, ...] = ()
    equal: tuple[LayoutPiece, ...] = ()

    @property
    def inverse(self) -> LayoutChange:
        """The way back, but for sources that nobody used."""
        unused = set(self.unused)
        made: _Made = {name: (shape, ()) for name, shape in self.sources.items() if name not in unused}
        parts: dict[str, list[LayoutPiece]] = {name: [] for name in made}
        for piece in itertools.chain(*self.pieces.values(), self.equal):
            parts[piece.source].append(piece.inverse)
        return _change(self.targets, {name: (shape, tuple(parts[name])) for name, (shape, _) in made.items()}, ())

    def __str__(self) -> str:
        counts = f"{len(self.sources)} tensors -> {len(self.targets)} tensors"
        lines = [counts + (f", {len(self.unused)} unused" if self.unused else "")]
        for name in itertools.islice(self.targets, _LINES):
            used = list(dict.fromkeys(piece.source for piece in self.pieces[name]))
            shown = [f"{each} {list(self.sources[each])}" for each in used[:3]]
            more = [f"{len(used) - 3} more"] if len(used) > 3 else []
            lines.append(f"  {', '.join([*shown, *more])} -> {name} {list(self.targets[name])}")
        rest = len(self.targets) - _LINES
        return "\n".join([*lines, *([f"  and {rest} more"] if rest > 0 else [])])


def _change(sources: Mapping[str, Shape], made: _Made, unused: Iterable[str]) -> LayoutChange:
    """Of pieces that are the same elements of a target the first is read."""
    targets = {name: shape for name, (shape, _) in made.items()}
    pieces, equal = {}, list[LayoutPiece]()
    for name, (shape, parts) in made.items():
        taken = without_overlap([piece.target_tile for piece in parts], math.prod(shape))
        pieces[name] = tuple(itertools.compress(parts, taken))
        equal += itertools.compress(parts, map(operator.not_, taken))
    return LayoutChange(sources, targets, pieces, tuple(unused), tuple(equal))


class LayoutRules:
    """A table of layout rules: how the names and layouts of one program's tensors relate to another's.

    table: `{names: names}`, or `{names: (names..., expression)}`; of several names a tuple. The expression has a tensor
    for each name on either side, as in `axes.rearrange`; without one the tensors are the same under another name.
    Keywords (or `sizes`) are the sizes of names in the expressions that shapes don't tell.

    - `*` in a name is any text, the same in all names of the rule, the first for the first.
    - `{e}` is a number from 0: all these tensors are one with a dim `e`, which the expression names.
    - One name on the left and several on the right: tensors that are equal, tied.
    - `names: None`: nobody needs these tensors. `None: names`: targets that keep the values that they have.
    - A `?` behind a name: the rule may be about no tensor. Any other rule that is about none is an error.

    The first rule that is about a tensor applies. A tensor that no rule is about keeps its name and shape.

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

    Raises `ExpressionError` for text outside the grammar, `ShardingError` for names that can't be or that no tensor
    has, `SizeError` for sizes that don't follow or don't fit.
    """

    def __init__(self, table: Table, *, sizes: Mapping[str, int] | None = None, **keywords: int):
        if isinstance(table, LayoutRules) or not isinstance(table, Mapping):
            raise ShardingError(f"layout rules are a mapping from names to names; found {shown(table)}")
        self.rules = tuple([layout_rule(key, value) for key, value in table.items()])
        self._given = dict(written_sizes(keywords, sizes))
        self._prepare()

    def _prepare(self) -> None:
        names = [names_of_rule(rule.expression) for rule in self.rules]
        given_sizes(self._given, None, (), dict.fromkeys(itertools.chain(*names)))
        self._given_of = [sizes_of_rule(self._given, each) for each in names]
        self._sides = tuple([self._index([getattr(rule, side) for rule in self.rules]) for side in ("left", "right")])

    @property
    def _names(self) -> frozenset[str]:
        """The names in the expressions, which sizes may be given for."""
        return frozenset(itertools.chain(*[names_of_rule(rule.expression) for rule in self.rules]))

    @staticmethod
    def _index(
        sides: Sequence[tuple[NamePattern, ...]],
    ) -> tuple[dict[str, tuple[int, int]], list[tuple[int, int, NamePattern]], NameIndex]:
        """Plain names with their rules, and patterns with theirs: a table may name 100,000 tensors one by one."""
        plain: dict[str, tuple[int, int]] = {}
        patterns = []
        for rule, side in enumerate(sides):
            for slot, pattern in enumerate(side):
                if pattern.stars or pattern.counters:
                    patterns.append((rule, slot, pattern))
                else:
                    plain.setdefault(pattern.text, (rule, slot))
        return plain, patterns, NameIndex(pattern.texts for _, _, pattern in patterns)

    @property
    def inverse(self) -> LayoutRules:
        """The same table read from right to left. Sizes that only one side tells have to be given for it."""
        return self._of([rule.inverse for rule in self.rules], self._given)

    @classmethod
    def _of(cls, rules: Iterable[LayoutRule], given: Mapping[str, int]) -> LayoutRules:
        found = cls.__new__(cls)
        found.rules, found._given = tuple(rules), dict(given)
        found._prepare()
        return found

    def _sized(self, sizes: Mapping[str, int]) -> LayoutRules:
        """The same table with more sizes; `SizeError` where a name has another one."""
        for name, size in sizes.items():
            if self._given.get(name, size) != size:
                raise SizeError(f"'{name}' is {self._given[name]} in the layout rules, and {size} is given for it")
        return self._of(self.rules, {**self._given, **sizes}) if sizes else self

    @property
    def _as_data(self) -> list[Any]:
        """The table as lists, texts and numbers, from which `_from_data` makes it again in another process."""
        rules = [
            [[p.text for p in rule.left], [p.text for p in rule.right], rule.expression, rule.optional]
            for rule in self.rules
        ]
        return [rules, sorted(self._given.items())]

    @classmethod
    def _from_data(cls, data: Sequence[Any]) -> LayoutRules:
        """The table of which `_as_data` is all that there is to say.

        >>> rules = LayoutRules({("*.gate", "*.up"): ("*.w", "f d, f d -> (f + f) d"), "old?": None}, f=8)
        >>> LayoutRules._from_data(rules._as_data) == rules
        True
        """
        rules, given = data
        sides = ((*[tuple(map(NamePattern, side)) for side in rule[:2]], *rule[2:]) for rule in rules)
        return cls._of([LayoutRule(*each) for each in sides], dict(given))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayoutRules) and (self.rules, self._given) == (other.rules, other._given)

    def __hash__(self) -> int:
        return hash((self.rules, tuple(sorted(self._given.items()))))

    def __repr__(self) -> str:
        sizes = "".join([f", {name}={size}" for name, size in sorted(self._given.items())])
        return f"<LayoutRules: {'; '.join([str(rule) for rule in self.rules[:_LINES]])}{sizes}>"

    def keeps(self, target: str) -> bool:
        """Whether the table says that a target keeps the values that it has."""
        if not isinstance(target, str):
            raise ShardingError(f"keeps takes the name of a target; found {shown(target)}")
        found = self._find(1, target)
        return found is not None and not self.rules[found[0].rule].left

    def applied(self, shapes: Mapping[str, Sequence[int]]) -> LayoutChange:
        """What the table makes of tensors of these shapes, by name.

        Raises `ShardingError` for rules that are about no tensor, tensors that a rule lacks, and names that two tensors
        would have; `SizeError` for sizes that don't follow from the shapes.
        """
        if not isinstance(shapes, Mapping) or not all(isinstance(name, str) for name in shapes):
            example = "{'q': (8, 4)}"
            raise ShardingError(f"shapes are a mapping from names to shapes, like {example}; found {shown(shapes)}")
        sources = {name: _checked_shape(name, shape) for name, shape in shapes.items()}
        instances: dict[_Instance, dict[int, dict[tuple[int, ...], str]]] = {}
        for name in sources:
            instance, slot, numbers = self._taking(name)
            instances.setdefault(instance, {}).setdefault(slot, {})[numbers] = name
        self._check_all_used({instance.rule for instance in instances}, sources)
        made: _Made = {}
        unused: list[str] = []
        for instance, taken in instances.items():
            if instance.rule >= 0 and not self.rules[instance.rule].right:
                unused.extend(itertools.chain(*[names.values() for names in taken.values()]))
                continue
            for target, (shape, parts) in self._made(instance, taken, sources).items():
                if target in made:
                    both = made[target][1][0].source, parts[0].source
                    raise ShardingError(
                        f"two tensors would be {shortened(target)}: {both[0]} and {both[1]}\n"
                        "give one of them another name, or say {name: None} of the one that nobody needs"
                    )
                if self.keeps(target):
                    raise ShardingError(
                        f"{shortened(target)} would keep its values, by the layout rules, and be written from "
                        f"{shortened(parts[0].source)}\ntake it out of {{None: names}}, or the source out of the table"
                    )
                made[target] = shape, parts
        return _change(sources, made, unused)

    def _find(self, side: int, name: str) -> tuple[_Instance, int, tuple[int, ...]] | None:
        """The first rule that has a name on one side, with the slot and the numbers in the name."""
        plain, patterns, index = self._sides[side]
        rule, slot = plain.get(name, (len(self.rules), 0))
        for number, there, pattern in map(patterns.__getitem__, index.candidates(name)):
            found = pattern.match(name) if number < rule else None
            if found is not None:
                return _Instance(number, found[0]), there, found[1]
        return (_Instance(rule, ()), slot, ()) if rule < len(self.rules) else None

    def _taking(self, source: str) -> tuple[_Instance, int, tuple[int, ...]]:
        return self._find(0, source) or (_Instance(-1, (source,)), 0, ())

    def _made(self, instance: _Instance, taken: _Sources, sources: Mapping[str, Shape]) -> _Made:
        """The targets of one rule for one text of each `*`."""
        if instance.rule < 0:
            (name,) = instance.stars
            return {name: (sources[name], (whole_piece(name, sources[name]),))}
        rule = self.rules[instance.rule]
        for slot, pattern in enumerate(rule.left):
            if slot not in taken:
                wanted = pattern.filled(instance.stars, dict.fromkeys(pattern.counters, 0))
                there = next(iter(next(iter(taken.values())).values()))
                used = {name for names in taken.values() for name in names.values()}
                near = suggestion(wanted, [name for name in itertools.islice(sources, 1000) if name not in used])
                raise ShardingError(f"the rule {rule}\ntakes {there} together with {wanted}, which isn't there{near}")
        shapes = tuple([_counted_shape(rule, slot, taken[slot], sources) for slot in range(len(rule.left))])
        try:
            solved = solved_pieces(rule.expression, shapes, self._given_of[instance.rule])
        except SizeError as error:
            first = [next(iter(names.values())) for names in taken.values()]
            shown = ", ".join([f"{name} {list(sources[name])}" for name in first])
            raise SizeError(f"{error}\nof {shown}, by the rule {rule}") from None
        return _expanded(rule, instance.stars, taken, solved)

    def _check_all_used(self, used: set[int], sources: Mapping[str, Shape]) -> None:
        idle = [at for at, rule in enumerate(self.rules) if at not in used and rule.left and not rule.optional]
        lines = []
        for rule in [self.rules[at] for at in idle[:_LINES]]:
            pattern = next((p for p in rule.left if any(p.match(name) for name in sources)), None)
            if pattern is not None:
                name = next(name for name in sources if pattern.match(name))
                lines.append(f"  {rule}: behind a wider one, {self.rules[self._taking(name)[0].rule]}")
            else:
                known = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in sources)
                wanted = rule.left[0].text
                lines.append(f"  {rule}{suggestion(re.sub(r'{.*?}', '*', wanted), known)}")
        if idle:
            raise ShardingError(
                "layout rules that are about no tensor (a '?' behind a name says that it needn't be there)\n"
                + "\n".join(lines)
                + (f"\n  and {len(idle) - _LINES} more" if len(idle) > _LINES else "")
            )


def _checked_shape(name: str, shape: Sequence[int]) -> Shape:
    found = whole_numbers(shape)
    if found is None or any(size < 0 for size in found):
        raise SizeError(f"the shape of {shortened(name)} is whole numbers; found {shown(shape)}")
    if math.prod(found) >= 2**63:
        raise SizeError(f"a tensor has fewer than 2**63 elements; found {shortened(name)} {shown(list(found))}")
    return found


def _counted_shape(
    rule: LayoutRule, slot: int, names: Mapping[tuple[int, ...], str], sources: Mapping[str, Shape]
) -> Shape:
    """The shape of the one tensor that those with numbers in their names are."""
    pattern, first = rule.left[slot], next(iter(names.values()))
    counts = [1 + max(column) for column in zip(*names, strict=True)]
    if len(names) != math.prod(counts):
        near = [range(min(count, len(names) + 1)) for count in counts]  # among more numbers than names one has none
        missing = next(numbers for numbers in itertools.product(*near) if numbers not in names)
        at = ", ".join(f"{name} = {number}" for name, number in zip(pattern.counters, missing, strict=True))
        raise ShardingError(f"{pattern.text} counts from 0, and of {first} there is none with {at}, by the rule {rule}")
    shape = list(sources[first])
    for name in names.values():
        if sources[name] != sources[first]:
            raise ShardingError(
                f"{first} is {shape} and {name} is {list(sources[name])}, which are one tensor by the rule {rule}"
            )
    for dim, size in sorted(zip(_counted_dims(rule, 0)[slot], counts, strict=True)):
        shape.insert(dim, size)
    return tuple(shape)


def _counted_dims(rule: LayoutRule, side: int) -> list[list[int]]:
    """Of each tensor of a side the dims that are the numbers in its name."""
    firsts = {part.tensor: part for part in reversed(sides_of(rule.expression)[side])}
    patterns = enumerate((rule.left, rule.right)[side])
    return [[firsts[tensor].dims_of(name)[0] for name in pattern.counters] for tensor, pattern in patterns]


def _without(values: Sequence[int], dims: Collection[int]) -> Shape:
    return tuple([value for dim, value in enumerate(values) if dim not in dims])


_Made = dict[str, tuple[Shape, tuple[LayoutPiece, ...]]]
"""Targets with their shapes and all pieces, those of tensors that are equal included."""


def _expanded(rule: LayoutRule, stars: tuple[str, ...], taken: _Sources, solved: SolvedRule) -> _Made:
    """The targets of a rule by name."""
    here, there = _counted_dims(rule, 0), _counted_dims(rule, 1)
    found: dict[str, tuple[Shape, list[LayoutPiece]]] = {}
    for pattern, shape, counted in zip(rule.right, solved.shapes, there, strict=True):
        for numbers in itertools.product(*[range(shape[dim]) for dim in counted]):
            name = pattern.filled(stars, dict(zip(pattern.counters, numbers, strict=True)))
            if name in found or pattern.match(name) != (stars, numbers):
                why = "twice" if name in found else "a name that reads as another rule's"
                raise ShardingError(
                    f"the rule {rule} makes {shortened(name)}, {why}; write more of the name beside '*'"
                )
            found[name] = _without(shape, counted), []
    for left, right, piece in solved.pieces:
        own, theirs, pattern = here[left], there[right], rule.right[right]
        steps = [dim for dim in piece.dims if dim.source in own or dim.target in theirs]
        dims = tuple(
            [
                replace(
                    d,
                    source=d.source - sum(c < d.source for c in own),
                    target=d.target - sum(c < d.target for c in theirs),
                )
                for d in piece.dims
                if d not in steps
            ]
        )
        for numbers in itertools.product(*[range(dim.size) for dim in steps]):
            source_offset, target_offset = list(piece.source_offset), list(piece.target_offset)
            for number, dim in zip(numbers, steps, strict=True):
                source_offset[dim.source] += number * dim.source_stride
                target_offset[dim.target] += number * dim.target_stride
            source = taken[left][tuple([source_offset[dim] for dim in own])]
            counts = dict(zip(pattern.counters, [target_offset[dim] for dim in theirs], strict=True))
            target = pattern.filled(stars, counts)
            offsets = _without(source_offset, own), _without(target_offset, theirs)
            shapes = _without(piece.shapes[0], own), _without(piece.shapes[1], theirs)
            found[target][1].append(layout_piece(source, target, dims, offsets, shapes))
    return {name: (shape, tuple(pieces)) for name, (shape, pieces) in found.items()}
