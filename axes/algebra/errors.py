"""Every error of the library: what was found, what was expected, what to write instead.

>>> issubclass(ExpressionError, AxesError)
True
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_EXCERPT = 72
_LONGEST_NAME = 60
_LONGEST_MESSAGE = 2_000


class AxesError(Exception):
    """What all errors of `axes` derive from. A message is text that can be printed, of at most 2,000 characters.

    >>> len(str(AxesError("a" * 10**6))), str(AxesError("of '\\ud800'"))
    (2000, "of '\\\\ud800'")
    """

    def __str__(self) -> str:
        return _fitting(_written(self, Exception.__str__))

    def __repr__(self) -> str:
        return _fitting(_written(self, Exception.__repr__))


class SizeError(AxesError):
    """Sizes that are missing, disagree, or don't divide.

    Examples:
        >>> import axes
        >>> try:
        ...     axes.Mesh("dp=2 tp=3", ranks=range(8))
        ... except axes.SizeError as error:
        ...     print(str(error).partition("    ")[0])
        dp=2 * tp=3 is 6, not 8
    """


class ShardingError(AxesError):
    """A sharding that isn't valid, or a tensor that isn't sharded as a call needs it.

    Examples:
        >>> import axes
        >>> try:
        ...     axes.Mesh("dp=2 tp=2").sharding("b@tp s@tp")
        ... except axes.ShardingError as error:
        ...     print(str(error).partition(";")[0])
        axis 'tp' is used twice: in b@tp and in s@tp
    """


class MeshError(AxesError):
    """A mesh, an axis or a layout that isn't valid, or that doesn't exist.

    Examples:
        >>> import axes
        >>> try:
        ...     axes.Mesh("dp=2 tp=2").axis("db")
        ... except axes.MeshError as error:
        ...     print(error)
        the mesh has no axis 'db'; known: dp, tp
    """


class DesyncError(AxesError):
    """Ranks that disagree, or a rank that didn't come. The message names the ranks, and the lines of the program.

    Examples:
        >>> import axes
        >>> issubclass(axes.DesyncError, axes.AxesError)
        True
    """


class ExpressionError(AxesError):
    """A text that isn't in the grammar, or a name where it can't be. The message has a caret under the place.

    `text` is the whole expression, `start` and `stop` are the offending characters.

    Examples:
        >>> import axes
        >>> try:
        ...     axes.Mesh("dp=2 tp=2").sharding("b@")
        ... except axes.ExpressionError as error:
        ...     print(error)
        expected an axis name, '*' or '(' after '@', found the end
          b@
            ^
    """

    def __init__(self, message: str, text: str = "", start: int = 0, stop: int | None = None):
        self.message, self.text = message, text
        self.start, self.stop = start, start + 1 if stop is None else stop
        super().__init__(f"{message}\n{pointed(text, self.start, self.stop)}" if text else message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.text, self.start, self.stop), self.__dict__


def unknown_axis(name: object, known: Iterable[str]) -> MeshError:
    """The error for an axis that a mesh doesn't have, the same wherever it is named.

    >>> unknown_axis("tpp", ["dp", "tp"])
    MeshError("the mesh has no axis 'tpp'; did you mean 'tp'?")
    """
    return MeshError(f"the mesh has no axis {shortened(name)}{suggestion(_written(name, str), known)}")


@contextmanager
def naming(text: str) -> Iterator[None]:
    """Errors of a block about sizes, shardings and meshes end with the text that they are about.

    >>> with naming("b@dp d"):
    ...     raise SizeError("b is 3")
    Traceback (most recent call last):
    axes.algebra.errors.SizeError: b is 3
    in  b@dp d
    """
    try:
        yield
    except (SizeError, ShardingError, MeshError) as error:
        if text in str(error):
            raise
        raise type(error)(f"{error}\nin  {text}") from None


def _fitting(message: str) -> str:
    """A message without its middle where it is too long, and with lone surrogates escaped."""
    text = message if message.isascii() else message.encode("utf-8", "backslashreplace").decode()
    if len(text) <= _LONGEST_MESSAGE:
        return text
    gap, first = " ... ", _LONGEST_MESSAGE * 3 // 4
    return text[:first] + gap + text[len(text) - (_LONGEST_MESSAGE - first - len(gap)) :]


def printable(text: str) -> str:
    """`text` with everything that a terminal would not show as one column escaped.

    >>> printable("h\\tw"), printable("β"), printable("\u540d")
    ('h\\\\tw', 'β', '\\\\u540d')
    """
    return "".join(c if _is_one_column(c) else ascii(c)[1:-1] for c in text)


def _is_one_column(c: str) -> bool:
    if c.isascii():  # all that dynamo can follow
        return c.isprintable()
    wide = unicodedata.east_asian_width(c) in ("W", "F") or unicodedata.category(c).startswith("M")
    return c.isprintable() and not wide


def pointed(text: str, start: int, stop: int) -> str:
    """An excerpt of `text` with carets under `start..stop`.

    >>> print(pointed("b s@tp d", 4, 6))
      b s@tp d
          ^^
    """
    first = max(0, min(start, len(text)) - _EXCERPT // 2)
    last = min(len(text), first + _EXCERPT)
    head = "..." if first else ""
    tail = "..." if last < len(text) else ""
    before = head + printable(text[first:start])
    marked = printable(text[start : min(stop, last)])
    after = printable(text[min(stop, last) : last]) + tail
    return f"  {before}{marked}{after}\n  {' ' * len(before)}{'^' * max(1, len(marked))}"


def shortened(name: object) -> str:
    """`name` quoted, escaped and cut to a length that fits a line."""
    text = printable(_written(name, str)[: _LONGEST_NAME + 1])
    return f"'{text}'" if len(text) <= _LONGEST_NAME else f"'{text[:_LONGEST_NAME]}...'"


def shown(value: object, known: Iterable[str] | None = None) -> str:
    """`value` as an error shows it: its repr, escaped and cut; its type where it has no repr. Then a near known name.

    >>> shown([1, 2]), shown("cpu"), shown(10**5000), shown("wieght", ["weight", "bias"])
    ('[1, 2]', "'cpu'", 'int too long to show', "'wieght'; did you mean 'weight'?")
    """
    text = printable(_written(value, repr)[: _LONGEST_NAME + 1])
    near = "" if known is None else suggestion(str(value), known)
    return f"{text if len(text) <= _LONGEST_NAME else f'{text[:_LONGEST_NAME]}...'}{near}"


def _written(value: Any, write: Callable[[Any], str]) -> str:
    """`str` or `repr` of any value, whatever its class does when it is asked for that."""
    try:
        return write(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        return f"{type(value).__name__} too long to show"
    except Exception:  # of the value's own class
        return f"a {type(value).__name__}"


def wrong_dims(spec: object, found: int, ndim: int, shape: Sequence[object] = ()) -> ShardingError:
    """The error for a spec of so many dims, where the tensor has others."""
    sizes = f": {shown(list(shape))}" if shape else ""
    advice = "write a name for each dim, or '...' for the others" if ndim else "that of a scalar is empty"
    return ShardingError(f"the spec '{spec}' has {found} dims, the tensor {ndim}{sizes}; {advice}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` where a known name is near, else the known names.

    >>> suggestion("dpp", ["dp", "tp"]), suggestion("x", {"s", "b"})
    ("; did you mean 'dp'?", '; known: b, s')
    """
    # The order of a set is another in each process, and a message is the same on all ranks.
    names = sorted(known) if isinstance(known, set | frozenset) else list(known)
    letters = sorted(name[:_LONGEST_NAME])
    swapped = [known for known in names[:1000] if len(known) == len(name) and sorted(known) == letters]
    near = swapped or difflib.get_close_matches(name[:_LONGEST_NAME], names[:1000], n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"; known: {listed}" if names else ""
