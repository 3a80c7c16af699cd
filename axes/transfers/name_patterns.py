"""Patterns of tensors' names, and which of many a name matches, without a try of each.

A table may have a pattern for each of 20,000 experts, and names are as many. A pattern is listed under the rarest word
between dots that it asks for, and a name is held only against the patterns under its own words.

>>> table = NamePatterns(["layers.0.*", "layers.*.experts.7.*", "*.norm", "*"])
>>> table.first("layers.1.experts.7.up"), table.first("layers.1.norm"), table.first("head")
('layers.*.experts.7.*', '*.norm', '*')
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_MARKS = re.compile(r"(\*|\{[^\W\d]\w*\})")


class NamePatterns:
    """A table of patterns as of `fnmatch`, upper case apart from lower: the first that matches a name applies."""

    def __init__(self, patterns: Iterable[str]):
        self.patterns = tuple(patterns)
        words = list(map(_words, self.patterns))
        often = Counter(itertools.chain(*words))
        self._listed: dict[str, list[int]] = {}
        for number, own in enumerate(words):
            self._listed.setdefault(min(own, key=often.__getitem__, default=""), []).append(number)

    def candidates(self, name: str) -> list[int]:
        """The numbers of all patterns that a name matches, ascending, and of a few that it doesn't."""
        return sorted({number for key in ("", name, *name.split(".")) for number in self._listed.get(key, ())})

    def numbers(self, name: str) -> Iterator[int]:
        """The numbers of the patterns that match a name, ascending."""
        return (number for number in self.candidates(name) if _compiled(self.patterns[number]).match(name))

    def first(self, name: str) -> str | None:
        """The first pattern that matches a name."""
        number = next(self.numbers(name), None)
        return None if number is None else self.patterns[number]


def _words(pattern: str) -> list[str]:
    """Texts of which a name that matches is one, or has each between its dots.

    >>> _words("layers.*.norm"), _words("layers.0.norm"), _words("layers.[0.1].norm")
    (['layers', 'norm'], ['layers.0.norm'], [])
    """
    if not any(mark in pattern for mark in "*?[{"):
        return [pattern]
    # Dots in brackets aren't those of a name.
    return [] if "[" in pattern else [word for word in pattern.split(".") if not re.search(r"[*?{}]", word)]


@functools.lru_cache(maxsize=65_536)
def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern to match names with; `fnmatch` itself keeps 256 in Python 3.11, and compiles others at each name."""
    return re.compile(fnmatch.translate(pattern))


@dataclass(frozen=True)
class NamePattern:
    """A name of a layout rule, in which `*` is any text and `{e}` a number: the place in a dim `e`.

    >>> pattern = NamePattern("layers.*.experts.{e}.up")
    >>> pattern.match("layers.3.experts.12.up")
    (('3',), (12,))
    >>> pattern.filled(("3",), (12,))
    'layers.3.experts.12.up'
    """

    text: str

    @functools.cached_property
    def marks(self) -> list[str]:
        """Each `*` and `{e}`."""
        return _MARKS.findall(self.text)

    @property
    def counters(self) -> tuple[str, ...]:
        """The names of dims that are numbers in the name."""
        return tuple([mark[1:-1] for mark in self.marks if mark != "*"])

    @functools.cached_property
    def _expression(self) -> re.Pattern[str]:
        groups = ["(.*)" if mark == "*" else r"(0|[1-9]\d{0,8})" for mark in self.marks]
        texts = map(re.escape, _MARKS.split(self.text)[::2])
        parts = itertools.chain(*zip(texts, (*groups, ""), strict=True))
        return re.compile("".join(parts), re.DOTALL)

    def match(self, name: str) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
        """The texts of each `*`, and the numbers; None where it is another name."""
        found = self._expression.fullmatch(name)
        if found is None:
            return None
        marks = list(zip(self.marks, found.groups(), strict=True))
        return tuple([v for mark, v in marks if mark == "*"]), tuple([int(v) for mark, v in marks if mark != "*"])

    def filled(self, stars: Iterable[str], numbers: Iterable[int]) -> str:
        """The name with its marks filled in."""
        texts, counts = iter(stars), map(str, numbers)
        return _MARKS.sub(lambda mark: next(texts if mark[0] == "*" else counts), self.text)
