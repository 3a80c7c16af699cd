"""Names among many patterns: which patterns of a table a name matches, without a try of each.

A table may have a pattern for each of 20,000 experts, and names are as many. What stands between the marks of a pattern
is text that a name must have, and dots cut it into whole words. Each pattern is listed under the rarest thing that it
asks for: how a name begins, how it ends, or a word. A name is held only against the patterns under what it has.

>>> table = NamePatterns(["layers.0.*", "layers.*.experts.7.*", "*.norm", "*"])
>>> table.first("layers.1.experts.7.up"), table.first("layers.1.norm"), table.first("head")
('layers.*.experts.7.*', '*.norm', '*')
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

_MARKS = re.compile(r"[*?]+")


class NameIndex:
    """Which of many patterns a name may match.

    texts: of each pattern the texts that a name has in this order, with anything between them. It begins with the first
    and ends with the last; a single text is the whole name.
    """

    def __init__(self, texts: Iterable[Sequence[str]]):
        asked = [list(_asked(each)) for each in texts]
        often = Counter(key for keys in asked for key in keys)
        self._listed: dict[str, list[int]] = {}
        self._anywhere: list[int] = []
        for number, keys in enumerate(asked):
            found = self._anywhere if not keys else self._listed.setdefault(min(keys, key=often.__getitem__), [])
            found.append(number)
        self._lengths = {kind: {len(key) - 1 for key in self._listed if key[0] == kind} for kind in (_BEGIN, _END)}

    def candidates(self, name: str) -> list[int]:
        """The numbers of all patterns that a name matches, ascending, and of a few that it doesn't."""
        listed = [found for key in self._keys(name) if (found := self._listed.get(key)) is not None]
        if not listed:
            return self._anywhere
        return sorted({*self._anywhere, *(number for found in listed for number in found)})

    def _keys(self, name: str) -> Iterator[str]:
        """Everything that a pattern may ask for and that this name has."""
        yield _WHOLE + name
        for length in self._lengths[_BEGIN]:
            yield _BEGIN + name[:length]
        for length in self._lengths[_END]:
            yield _END + name[-length:]
        for word in {*name.split(".")}:
            yield _WORD + word


_WHOLE, _BEGIN, _END, _WORD = "=^$."
"""What a pattern asks for: the whole name, how it begins or ends (up to a dot), or a word between dots."""


def _asked(texts: Sequence[str]) -> Iterator[str]:
    """What a name must have that has these texts.

    >>> list(_asked(["layers.", ".experts.", "7.7"])), list(_asked(["a.b"])), list(_asked(["", "x.norm"]))
    (['^layers.', '$.7', '.layers', '.experts', '.7'], ['=a.b'], ['$.norm', '.norm'])
    """
    if len(texts) == 1:
        yield _WHOLE + texts[0]
        return
    first, *middle, last = texts
    begin, end = first.rfind(".") + 1, last.find(".")
    if begin:
        yield _BEGIN + first[:begin]
    if end >= 0:
        yield _END + last[end:]
    # The word before a mark, and the one behind it, may be parts of longer ones.
    words = first.split(".")[:-1], *[text.split(".")[1:-1] for text in middle], last.split(".")[1:]
    for some in words:
        yield from [_WORD + word for word in some]


class NamePatterns:
    """A table of patterns as of `fnmatch`, upper case apart from lower: the first that matches a name applies."""

    def __init__(self, patterns: Iterable[str]):
        self.patterns = tuple(patterns)
        self._index = NameIndex(map(_texts, self.patterns))

    def numbers(self, name: str) -> Iterator[int]:
        """The numbers of the patterns that match a name, ascending."""
        return (number for number in self._index.candidates(name) if _compiled(self.patterns[number]).match(name))

    def first(self, name: str) -> str | None:
        """The first pattern that matches a name."""
        number = next(self.numbers(name), None)
        return None if number is None else self.patterns[number]


@functools.lru_cache(maxsize=65_536)
def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern to match names with; `fnmatch` itself keeps 256 in Python 3.11, and compiles others at each name."""
    return re.compile(fnmatch.translate(pattern))


def _texts(pattern: str) -> list[str]:
    """What stands between the marks of a pattern.

    >>> _texts("a.*.b?c"), _texts("a.[x.y].b"), _texts("a")
    (['a.', '.b', 'c'], ['a.', '.b'], ['a'])
    """
    before, bracket, rest = pattern.partition("[")
    if not bracket:
        return _MARKS.split(pattern)
    # What is from the first bracket to the last one may be in brackets, where dots aren't those of a name.
    return [*_MARKS.split(before), *_MARKS.split(rest.rpartition("]")[2])]
