"""One grammar for everything that is written as text.

```
declaration  item...                                 "pp dp=2 cp tp"
equation     product "=" product                     "fsdp = dp_shard cp"
mesh         side "->" side                          "(dp cp) tp -> dp cp tp"
tensor       spec { "," spec } [ "->" spec { "," spec } ]    "b s@cp d, d f@tp -> b s@cp f@tp"

NAME     what Python calls an identifier, but "_"        white space is what Python calls so, line breaks included
item     NAME [ "=" INT ]
product  item... | "(" item... ")"
side     { item | [ NAME "=" ] "(" item... ")" | "..." }
spec     { dim } [ "|" { pending } ]
dim      ( NAME ["=" INT] | INT | "_" | "..." ) [ "@" place ]
       | "(" { factor } ")" [ "@" place ]
factor   ( NAME ["=" INT] | INT | "..." ) ["@" place]
place    NAME | "*" | "(" { NAME | "*" } ")"
pending  ( "sum" | "mean" | "max" | "min" | "same" ) "@" place  |  "*"
```

The `parse_*` functions turn text into small frozen trees and raise nothing but `ExpressionError`. They run once over
the tokens without recursion; trees of tensors are cached by text.
What a name means is not decided here.

>>> spec = parse_tensor("b s@(cp tp) d | sum@ep").operands[0]
>>> [str(dim) for dim in spec.dims], [str(pending) for pending in spec.pending]
(['b', 's@(cp tp)', 'd'], ['sum@ep'])

The notation is that of einops (Rogozhnikov) with `@` for what JAX calls a partition spec.
"""

from __future__ import annotations

import functools
import operator
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, NoReturn, TypeVar

from axes.algebra.errors import ExpressionError, shortened

LARGEST_SIZE = 2**48
"""No mesh and no dim is larger."""

PENDING_OPS = ("sum", "mean", "max", "min", "same")
"""What can be pending."""

Span = tuple[int, int]
T = TypeVar("T")

_LONGEST_TEXT = 50_000


def place_text(axes: Iterable[object]) -> str:
    """Axes as they stand behind an `@`: `tp`, or `(cp tp)`."""
    names = tuple(map(str, axes))
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


@dataclass(frozen=True, slots=True)
class Place:
    """What stands right of an `@`: axis names, major first; `*` is "what it has"."""

    names: tuple[str, ...]
    span: Span = field(default=(0, 0), compare=False)

    def __str__(self) -> str:
        return place_text(self.names)


class Item(NamedTuple):
    """A name, with its size where that is written: `dp=2`."""

    name: str
    size: int | None = None
    span: Span = (0, 0)


@dataclass(frozen=True, slots=True)
class Factor:
    """A name with its size where that is written, a number, `_` or `...`; and its own place where it has one.

    `name` is None for a number, whose `size` is given.
    """

    name: str | None
    size: int | None = None
    place: Place | None = None
    span: Span = field(default=(0, 0), compare=False)

    def __str__(self) -> str:
        text = "=".join([str(each) for each in (self.name, self.size) if each is not None])
        return text if self.place is None else f"{text}@{self.place}"


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim, or one axis of a mesh expression: a single factor, or a group of factors.

    place: that of a group as a whole. name: of `fsdp=(dp cp)`, on the right of a mesh expression.
    """

    factors: tuple[Factor, ...]
    grouped: bool = False
    place: Place | None = None
    span: Span = field(default=(0, 0), compare=False)
    name: str | None = None

    def __str__(self) -> str:
        text = " ".join(map(str, self.factors))
        text = f"({text})" if self.grouped else text
        text = text if self.name is None else f"{self.name}={text}"
        return text if self.place is None else f"{text}@{self.place}"


class Sides(NamedTuple, Generic[T]):
    """`left = right` of an equation, `left -> right` of a mesh expression."""

    text: str
    left: tuple[T, ...]
    right: tuple[T, ...]


Equation = Sides[Item]
MeshExpression = Sides[Dim]


@dataclass(frozen=True, slots=True)
class Pending:
    """`sum@tp`: the reduction that hasn't happened over the axes of a place. `*` is whatever arises."""

    op: str
    place: Place | None = None
    span: Span = field(default=(0, 0), compare=False)

    def __str__(self) -> str:
        return self.op if self.place is None else f"{self.op}@{self.place}"


@dataclass(frozen=True)
class Spec:
    """A tensor: its dims, and what is pending (None where there is no `|`)."""

    dims: tuple[Dim, ...]
    pending: tuple[Pending, ...] | None = None

    @functools.cached_property
    def places(self) -> list[tuple[Dim | Pending, Place]]:
        """What stands right of an `@`, behind the dim or pending reduction in which it stands."""
        found = [(dim, place) for dim in self.dims for place in dim_places(dim)]
        return found + [(each, each.place) for each in self.pending or () if each.place is not None]

    @property
    def axes(self) -> list[str]:
        """The axes that it names."""
        return [name for _, place in self.places for name in place.names if name != "*"]

    def __str__(self) -> str:
        text = " ".join(map(str, self.dims))
        if self.pending is None:
            return text
        return " ".join(filter(None, (text, "|", *map(str, self.pending))))


UNSPLIT = Dim((Factor("_"),))
"""A dim without a name that nothing splits."""


def without_dots(dims: Iterable[Dim], stand_ins: Iterable[Dim]) -> tuple[Dim, ...]:
    """Dims, with others in the place of `...`.

    >>> print(*without_dots(parse_spec("b ... d@tp").dims, [UNSPLIT, UNSPLIT]))
    b _ _ d@tp
    """
    return tuple([each for dim in dims for each in (stand_ins if has_dots(dim) else (dim,))])


def has_dots(dim: Dim) -> bool:
    """Whether a dim of a spec is `...`, or has it among its factors."""
    return "..." in map(operator.attrgetter("name"), dim.factors)


@dataclass(frozen=True, slots=True)
class TensorExpression:
    """`operands -> results`; `results` is None where there is no arrow."""

    text: str
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...] | None

    @property
    def spec(self) -> Spec:
        """The one spec, whose dims have different names; `ExpressionError` where there is more."""
        text = self.text
        if self.results is not None:
            at = text.index("->")
            raise ExpressionError("expected one spec, found an expression with '->'", text, at, at + 2)
        if len(self.operands) != 1:
            raise ExpressionError(f"expected one spec, found {len(self.operands)}", text, 0, len(text))
        check_different(text, self.operands[0])
        return self.operands[0]


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    stop: int

    @property
    def span(self) -> Span:
        return self.start, self.stop


_NO_NAME = r"\s\x00-/:-@[-^`{-\x7f"
_TOKEN = re.compile(
    rf"(?P<space>\s+)|(?P<name>[^{_NO_NAME}0-9][^{_NO_NAME}]*)|(?P<int>-?[0-9]+)"
    r"|(?P<arrow>->)|(?P<dots>\.\.\.)|(?P<sign>[()@|,=*+])"
)
_RESERVED = "~<>[]:;"
_INSTEAD = {":": "; a size is written h=8", ">": "; the arrow is ->", "[": "; write ( )", "]": "; write ( )"}


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    for match in _TOKEN.finditer(text):
        start, stop = match.span()
        if start != at:
            break
        at = stop
        kind, word = match.lastgroup or "", match.group()
        if kind == "name" and found and (found[-1].kind, found[-1].stop) == ("int", start):
            raise ExpressionError("a name doesn't start with a digit", text, found[-1].start, stop)
        same = unicodedata.normalize("NFKC", word)  # as Python reads the names of keywords
        if kind == "name" and not (word.isidentifier() and same == word):
            hint = "" if same == word else f"; write {shortened(same)}"
            message = f"a name is an identifier of Python: letters, digits and underscores{hint}"
            raise ExpressionError(message, text, start, stop)
        if kind != "space":
            found.append(_Token(word if kind == "sign" or word == "_" else kind, word, start, stop))
    if at < len(text):
        why = "is reserved" if text[at] in _RESERVED else "has no meaning here"
        raise ExpressionError(f"{shortened(text[at])} {why}{_INSTEAD.get(text[at], '')}", text, at)
    found.append(_Token("end", "", len(text), len(text)))
    return found


def checked_text(text: object, hint: str = "") -> str:
    """`text` where it is a string; `ExpressionError` otherwise, which ends with `hint`."""
    if not isinstance(text, str):
        raise ExpressionError(f"an expression is text; found {type(text).__name__}{hint}")
    if len(text) > _LONGEST_TEXT:
        raise ExpressionError(f"an expression has at most {_LONGEST_TEXT:,} characters; found {len(text):,}", text)
    return text


def checked_spec(spec: object) -> str:
    """`spec` where it is a string; else `ExpressionError`, which knows what torch takes in its place.

    >>> checked_spec("b@dp d")
    'b@dp d'
    """
    if isinstance(spec, list | tuple):
        raise ExpressionError(
            f"an expression is text; found {type(spec).__name__}. Where placements are meant, "
            "axes.Sharding.from_placements(mesh, placements, ndim).spec is their text"
        )
    return checked_text(spec, "; a Sharding's text is its .spec" if type(spec).__name__ == "Sharding" else "")


_NO_BLOCKS = (
    "blocks stand in the rules of transfers alone. Blocks of one size are a dim, as in '(three h) d -> three h d'; "
    "others are taken apart with torch.split, and put together with torch.cat, in an axes.shard_map"
)


class _Parser:
    """A cursor over the tokens of one text: about a mesh, or about `tensors`."""

    def __init__(self, text: str, tensors: bool = False):
        self.text, self.tokens, self.at = text, _tokens(checked_text(text)), 0
        self.token, self.kinds = self.tokens[0], [token.kind for token in self.tokens]
        self.tensors = tensors
        self.outside = "a dim name, a number, '_', '...' or '('" if tensors else "an axis name, '(' or '...'"
        self.inside = "a dim name, a number or '...' in the group" if tensors else "an axis name in the group"
        plus = next((token for token in self.tokens if token.kind == "+"), None)
        if plus is not None and tensors:
            self.wrong(_NO_BLOCKS, plus.span)

    def ahead(self, *kinds: str) -> bool:
        """Whether the next tokens have these kinds."""
        return self.kinds[self.at : self.at + len(kinds)] == [*kinds]

    def skip(self, count: int = 1) -> _Token:
        """Go on by so many tokens, and return the last of them; behind the end there is the end."""
        self.at += count
        self.token = self.tokens[min(self.at, len(self.tokens) - 1)]
        return self.tokens[self.at - 1]

    def take(self, kind: str) -> _Token | None:
        """The next token if it is of this kind."""
        return self.skip() if self.token.kind == kind else None

    def need(self, kind: str, expected: str) -> _Token:
        return self.skip() if self.token.kind == kind else self.fail(expected)

    def fail(self, expected: str) -> NoReturn:
        found = "the end" if self.token.kind == "end" else shortened(self.token.text)
        self.wrong(f"expected {expected}, found {found}", self.token.span)

    def wrong(self, message: str, span: Span) -> NoReturn:
        raise ExpressionError(message, self.text, *span)

    def span(self, start: int) -> Span:
        """From `start` to the end of the last token that was taken."""
        return start, self.tokens[self.at - 1].stop

    def integer(self, token: _Token) -> int:
        digits = token.text.lstrip("-0")
        value = int(digits or "0") if len(digits) <= 18 else LARGEST_SIZE + 1
        if token.text[0] == "-" or not 1 <= value <= LARGEST_SIZE:
            self.wrong(f"a size is a whole number from 1 to {LARGEST_SIZE}, found {shortened(token.text)}", token.span)
        return value

    def item(self, expected: str) -> Item:
        """A name with its size, where `= INT` follows; `=-1` says that the size is to be solved."""
        token, size = self.need("name", expected), None
        if self.ahead("=", "int"):
            number = self.skip(2)
            size = None if number.text == "-1" else self.integer(number)
        return Item(token.text, size, self.span(token.start))

    def place(self) -> Place | None:
        if not (self.tensors and self.take("@")):
            return None
        start, names = self.token.start, list[str]()
        grouped = self.take("(")
        while (token := self.token).kind in ("name", "*") and (grouped or not names):
            names.append(token.text)
            self.skip()
        if grouped:
            self.closing()
        elif not names:
            self.fail("an axis name, '*' or '(' after '@'")
        if names.count("*") > 1:
            self.wrong("'*' stands once in a place", self.span(start))
        return Place(tuple(names), self.span(start))

    def closing(self) -> None:
        self.need(")", "')': groups don't nest" if self.token.kind == "(" else "')'")

    def factor(self, in_group: bool) -> Factor:
        token, size = self.token, None
        name: str | None = token.text
        bare = ("dots", "_") if self.tensors and not in_group else ("dots",) if self.tensors or not in_group else ()
        if self.tensors and token.kind == "int":
            name, size = None, self.integer(self.skip())
        elif token.kind in bare:
            self.skip()
        else:
            size = self.item(self.inside if in_group else self.outside).size
        place = self.place()
        return Factor(name, size, place, self.span(token.start))

    def dim(self) -> Dim:
        start, label = self.token.start, None
        if not self.tensors and self.ahead("name", "=", "("):
            label = self.token.text
            self.skip(2)
        if self.token.kind != "(":
            factor = self.factor(in_group=False)
            return Dim((factor,), span=factor.span)
        factors = self.group()
        place = self.place()
        if place is not None and any(each.place is not None for each in factors):
            self.wrong("a group has '@' inside or outside, not both", self.span(start))
        return Dim(factors, True, place, self.span(start), label)

    def group(self) -> tuple[Factor, ...]:
        """`(dp cp)`."""
        found: list[Factor] = []
        self.skip()
        while self.token.kind not in (")", "end"):
            if self.token.kind == "(":
                self.closing()
            found.append(self.factor(in_group=True))
        if not found and not self.tensors:
            self.fail(self.inside)
        self.closing()
        return tuple(found)

    def product(self) -> tuple[Item, ...]:
        if self.token.kind == "(":
            return items_of(self.group())
        found = [self.item("an axis name")]
        while self.token.kind in ("name", "int"):
            found.append(self.item("an axis name"))
        return tuple(found)

    def dims(self, *stop: str) -> tuple[Dim, ...]:
        found: list[Dim] = []
        while self.token.kind not in (*stop, "arrow", "end"):
            found.append(self.dim())
        dots = [factor for dim in found for factor in dim.factors if factor.name == "..."]
        if len(dots) > 1:
            self.wrong(f"'...' stands once {'in a spec' if self.tensors else 'on a side'}", dots[1].span)
        return tuple(found)

    # what is of tensors alone

    def pending(self) -> Pending:
        token = self.token
        if self.take("*"):
            return Pending("*", None, token.span)
        if token.text not in PENDING_OPS:
            self.fail(f"one of {', '.join(PENDING_OPS)} with '@', or '*', after '|'")
        self.skip()
        place = self.place() or self.fail(f"'@' and the axes over which '{token.text}' is pending")
        if "*" in place.names:
            self.wrong("write '| *' for whatever is pending", place.span)
        return Pending(token.text, place, self.span(token.start))

    def spec(self) -> Spec:
        dims = self.dims("|", ",")
        if not self.take("|"):
            return Spec(dims)
        pending: list[Pending] = []
        while self.token.kind not in (",", "arrow", "end"):
            pending.append(self.pending())
        if len(pending) > 1 and any(p.op == "*" for p in pending):
            self.wrong("'*' stands alone after '|'", pending[-1].span)
        return Spec(dims, tuple(pending))

    def expression(self) -> TensorExpression:
        operands = self.specs()
        results = self.specs() if self.take("arrow") else None
        self.need("end", "the end of the expression")
        return TensorExpression(self.text, operands, results)

    def specs(self) -> tuple[Spec, ...]:
        found = [self.spec()]
        while self.take(","):
            found.append(self.spec())
        return tuple(found)


def parse_declaration(text: str) -> tuple[Item, ...]:
    """The items of `"pp dp=2 cp tp"`, at least one, each name once.

    >>> [(item.name, item.size) for item in parse_declaration("pp dp=2")]
    [('pp', None), ('dp', 2)]
    >>> parse_declaration("dp dp")
    Traceback (most recent call last):
    axes.algebra.errors.ExpressionError: 'dp' is declared twice
      dp dp
         ^^
    """
    parser = _Parser(text)
    items = parser.product()
    parser.need("end", "an axis name or the end of the list")
    _check_once(parser.text, items, "{} is declared twice")
    return items


def parse_equation(text: str) -> Equation:
    """`"fsdp = dp_shard cp"`, or `"(dp_shard cp tp) = efsdp ep"`.

    >>> [item.name for item in parse_equation("fsdp = dp cp").right]
    ['dp', 'cp']
    """
    parser = _Parser(text)
    left = parser.product()
    parser.need("=", "'='")
    right = parser.product()
    parser.need("end", "the end of the equation")
    for side in (left, right):
        _check_once(parser.text, side, "{} stands twice in one product")
    return Equation(parser.text, left, right)


def parse_mesh(text: str) -> MeshExpression:
    """`"(dp cp) tp -> dp cp tp"`.

    >>> str(parse_mesh("dp cp tp -> fsdp=(dp cp) tp").right[0])
    'fsdp=(dp cp)'
    """
    parser = _Parser(text)
    left = parser.dims()
    for dim in left:
        if dim.name is not None:
            parser.wrong("a group is named on the right of '->' only", (dim.span[0], dim.span[0] + len(dim.name)))
    parser.need("arrow", "'->'")
    right = parser.dims()
    parser.need("end", "the end of the mesh expression")
    for side in (left, right):
        _check_once(parser.text, leaves(side), "{} stands twice on one side")
    return MeshExpression(parser.text, left, right)


def parse_tensor(text: str) -> TensorExpression:
    """`"b s@cp d, d f@tp -> b s@cp f@tp"`, or specs without an arrow.

    >>> expression = parse_tensor("b s@tp d -> b s d")
    >>> str(expression.operands[0]), [str(spec) for spec in expression.results]
    ('b s@tp d', ['b s d'])
    """
    return _parsed_tensor(checked_text(text))


@functools.lru_cache(maxsize=4096)
def _parsed_tensor(text: str) -> TensorExpression:
    return _Parser(text, tensors=True).expression()


def parse_spec(text: str) -> Spec:
    """One tensor, whose dims have different names: `"b s@(cp tp) d | sum@ep"`.

    >>> parse_spec("b s, d")
    Traceback (most recent call last):
    axes.algebra.errors.ExpressionError: expected one spec, found 2
      b s, d
      ^^^^^^
    """
    return parse_tensor(text).spec


def check_different(text: str, spec: Spec) -> None:
    """`ExpressionError` where a spec names two dims alike, which only an operand of an einsum may: `i i -> i`."""
    _check_once(text, leaves(spec.dims), "dim {} stands twice in one tensor")


def leaves(dims: Iterable[Dim]) -> tuple[Item, ...]:
    """The names of some dims, those in groups included."""
    return items_of([factor for dim in dims for factor in dim.factors])


def dim_places(dim: Dim) -> list[Place]:
    """What stands right of an `@` in a dim."""
    return [*filter(None, (dim.place, *map(operator.attrgetter("place"), dim.factors)))]


def axes_of_dim(dim: Dim) -> list[str]:
    """The axes that a dim names."""
    return [name for place in dim_places(dim) for name in place.names if name != "*"]


def items_of(factors: Iterable[Factor]) -> tuple[Item, ...]:
    """The names among some factors: neither numbers nor `...`."""
    return tuple([Item(f.name, f.size, f.span) for f in factors if f.name not in (None, "...")])  # type: ignore[arg-type]


def _check_once(text: str, items: Iterable[Item], message: str) -> None:
    """Each name stands once."""
    seen: set[str] = set()
    for item in items:
        if item.name in seen and item.name != "_":
            raise ExpressionError(message.format(shortened(item.name)), text, *item.span)
        seen.add(item.name)
