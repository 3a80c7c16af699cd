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
       | "(" { factor | blocks } ")" [ "@" place ] | blocks
factor   ( NAME ["=" INT] | INT | "..." ) ["@" place]
blocks   "(" factor... "+" factor... { "+" factor... } ")"
place    NAME | "*" | "(" { NAME | "*" } ")"
pending  ( "sum" | "mean" | "max" | "min" | "same" ) "@" place  |  "*"
```

`(q + k)` is a dim that holds blocks, one behind the other: in the rules of transfers, which `parse_blocks` reads.

The five `parse_*` functions turn text into small frozen trees and raise nothing but
`ExpressionError`. They run once over the tokens without recursion and are cached by text.
What a name means is not decided here.

>>> spec = parse_tensor("b s@(cp tp) d | sum@ep").operands[0]
>>> [str(dim) for dim in spec.dims], [str(pending) for pending in spec.pending]
(['b', 's@(cp tp)', 'd'], ['sum@ep'])

The notation is that of einops (Rogozhnikov) with `@` for what JAX calls a partition spec.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn, TypeVar

from axes.algebra.errors import ExpressionError, shortened

LARGEST_SIZE = 2**48
"""No mesh and no dim is larger."""

REDUCTIONS = ("sum", "mean", "max", "min", "same")
"""What can be pending."""

Span = tuple[int, int]
T = TypeVar("T")

_LONGEST_CACHED = 4096
_LONGEST_TEXT = 50_000
_LONGEST_NAME = 255


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

    `name` is None for a number, whose `size` is given, and for `blocks`.
    """

    name: str | None
    size: int | None = None
    place: Place | None = None
    span: Span = field(default=(0, 0), compare=False)
    blocks: tuple[tuple[Factor, ...], ...] = ()

    def __str__(self) -> str:
        if self.blocks:
            return f"({' + '.join(' '.join(map(str, block)) for block in self.blocks)})"
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
        is_blocks = len(self.factors) == 1 and bool(self.factors[0].blocks)  # which has parentheses of its own
        text = f"({text})" if self.grouped and not is_blocks else text
        text = text if self.name is None else f"{self.name}={text}"
        return text if self.place is None else f"{text}@{self.place}"


@dataclass(frozen=True, slots=True)
class Equation:
    """`left = right`."""

    text: str
    left: tuple[Item, ...]
    right: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class MeshExpression:
    """`left -> right`."""

    text: str
    left: tuple[Dim, ...]
    right: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Pending:
    """`sum@tp`: the reduction that hasn't happened over the axes of a place. `*` is whatever arises."""

    op: str
    place: Place | None = None
    span: Span = field(default=(0, 0), compare=False)

    def __str__(self) -> str:
        return self.op if self.place is None else f"{self.op}@{self.place}"


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor: its dims, and what is pending (None where there is no `|`)."""

    dims: tuple[Dim, ...]
    pending: tuple[Pending, ...] | None = None

    def __str__(self) -> str:
        text = " ".join(map(str, self.dims))
        if self.pending is None:
            return text
        return " ".join(filter(None, (text, "|", *map(str, self.pending))))


_ONE = Dim((Factor("_"),))


def without_dots(tree: Spec, ndim: int, stands_for: Dim = _ONE) -> Spec:
    """The spec of a tensor of `ndim` dims, with a dim like `stands_for` for each that its `...` stands for.

    >>> print(without_dots(parse_spec("b ... d@tp"), 4))
    b _ _ d@tp
    """
    dims: list[Dim] = []
    for dim in tree.dims:
        dims.extend([stands_for] * (ndim + 1 - len(tree.dims)) if has_dots(dim) else [dim])
    return replace(tree, dims=tuple(dims))


def has_dots(dim: Dim) -> bool:
    """Whether a dim of a spec is `...`, or has it among its factors."""
    return any(factor.name == "..." for factor in dim.factors)


@dataclass(frozen=True, slots=True)
class TensorExpression:
    """`operands -> results`; `results` is None where there is no arrow."""

    text: str
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...] | None


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


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    for match in _TOKEN.finditer(text):
        start, stop = match.span()
        if start != at:
            break
        at = stop
        kind = match.lastgroup or ""
        if kind == "space":
            continue
        word = match.group()
        if kind == "name":
            behind = found[-1] if found and found[-1].kind == "int" and found[-1].stop == start else None
            same = unicodedata.normalize("NFKC", word[: _LONGEST_NAME + 1])
            for wrong, message in (
                (behind is not None, "a name doesn't start with a digit"),
                (len(word) > _LONGEST_NAME, f"a name has at most {_LONGEST_NAME} characters"),
                (not word.isidentifier(), "a name is an identifier of Python: letters, digits and underscores"),
                (same != word, f"Python reads this name as '{same}'; write it so"),
            ):
                if wrong:
                    raise ExpressionError(message, text, start if behind is None else behind.start, stop)
        found.append(_Token(word if kind == "sign" else kind, word, start, stop))
    if at < len(text):
        why = "is reserved" if text[at] in _RESERVED else "has no meaning here"
        raise ExpressionError(f"{shortened(text[at])} {why}", text, at)
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


class _Language(NamedTuple):
    """Which signs the names of a text stand between, and what an error expects outside of groups and in them."""

    signs: frozenset[str]
    outside: str
    inside: str = "an axis name in the group"


_NAMES = _Language(frozenset(), "an axis name")
_EQUATION = _Language(frozenset("("), "an axis name")
_MESH = _Language(frozenset(("(", "dots")), "an axis name, '(' or '...'")
_TENSOR = _Language(
    frozenset(("(", "dots", "int", "_", "@")),
    "a dim name, a number, '_', '...' or '('",
    "a dim name, a number or '...' in the group",
)
_RULE = _TENSOR._replace(signs=_TENSOR.signs | {"+"})


class _Parser:
    """A cursor over the tokens of one text in one language."""

    def __init__(self, text: object, language: _Language, hint: str = ""):
        self.text, self.language, self.of_tensors = checked_text(text, hint), language, "@" in language.signs
        self.tokens = _tokens(self.text)
        self.at = 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def ahead(self, *kinds: str) -> bool:
        """Whether the next tokens have these kinds."""
        # "end" is of no kind that is asked for, so this never looks past it.
        return all(self.tokens[self.at + ahead].kind == kind for ahead, kind in enumerate(kinds))

    def take(self, kind: str) -> _Token | None:
        """The next token if it is of this kind."""
        if self.token.kind != kind:
            return None
        self.at += 1
        return self.tokens[self.at - 1]

    def sign(self, kind: str) -> bool:
        """Take a sign that the language has."""
        return kind in self.language.signs and self.take(kind) is not None

    def need(self, kind: str, expected: str) -> _Token:
        return self.take(kind) or self.fail(expected)

    def fail(self, expected: str) -> NoReturn:
        token = self.token
        found = "the end" if token.kind == "end" else shortened(token.text)
        raise ExpressionError(f"expected {expected}, found {found}", self.text, token.start, token.stop)

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

    def name(self, expected: str) -> str:
        token = self.need("name", expected)
        if token.text == "_":
            self.wrong(f"expected {expected}, found '_'", token.span)
        return token.text

    def size(self) -> int | None:
        """`= INT` where it follows; `=-1` says that the size is to be solved."""
        if not self.ahead("=", "int"):
            return None
        self.at += 2
        token = self.tokens[self.at - 1]
        return None if token.text == "-1" else self.integer(token)

    def place(self) -> Place | None:
        if not self.sign("@"):
            return None
        start, names = self.token.start, list[str]()
        grouped = self.take("(")
        while (token := self.token).kind in ("name", "*") and (grouped or not names):
            names.append(token.text)
            self.at += 1
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
        if self.sign("int"):
            name, size = None, self.integer(token)
        elif token.kind == "dots" and (not in_group or self.of_tensors) and self.sign("dots"):
            pass
        elif token.text == "_" and not in_group and "_" in self.language.signs:
            self.at += 1
        else:
            self.name(self.language.inside if in_group else self.language.outside)
            size = self.size()
        place = self.place()
        return Factor(name, size, place, self.span(token.start))

    def dim(self) -> Dim:
        start = self.token.start
        label = self.name("") if "dots" in self.language.signs and self.ahead("name", "=", "(") else None
        if label is not None:
            self.at += 1
        if self.token.kind != "(" or "(" not in self.language.signs:
            factor = self.factor(in_group=False)
            return Dim((factor,), span=factor.span)
        factors = self.group()
        place = self.place()
        inside = [each for factor in factors for each in (factor, *itertools.chain(*factor.blocks))]
        if place is not None and any(each.place is not None for each in inside):
            self.wrong("a group has '@' inside or outside, not both", self.span(start))
        return Dim(factors, True, place, self.span(start), label)

    def group(self, within: bool = False) -> tuple[Factor, ...]:
        """`(dp cp)`, or blocks `(q + k)` as one factor, which may stand `within` another group."""
        start = self.need("(", "'('").start
        blocks: list[list[Factor]] = [[]]
        while self.token.kind not in (")", "end"):
            if self.token.kind == "(" and not within and "+" in self.language.signs:
                at = self.at
                inner = self.group(within=True)
                if not inner or not inner[0].blocks:
                    self.at = at
                    self.closing()
                blocks[-1].extend(inner)
            elif self.token.kind == "(":
                self.closing()
            elif blocks[-1] and self.sign("+"):
                blocks.append([])
            elif self.token.kind == "+" and "+" not in self.language.signs:
                message = "blocks stand in the rules of transfers alone; of one size they are a number, as in '(2 f)'"
                self.wrong(message, self.token.span)
            else:
                blocks[-1].append(self.factor(in_group=True))
        if not blocks[-1] and (len(blocks) > 1 or not self.of_tensors):
            self.fail("a dim name or a number in each block" if len(blocks) > 1 else self.language.inside)
        self.closing()
        if len(blocks) == 1:
            return tuple(blocks[0])
        for block in blocks:
            _check_once(self.text, items_of(block), "{} stands twice in one block")
            for factor in block:
                if factor.name == "..." or factor.blocks:
                    self.wrong("a block holds names and numbers: no '...', and no blocks", factor.span)
        return (Factor(None, None, None, self.span(start), tuple(map(tuple, blocks))),)

    def product(self) -> tuple[Item, ...]:
        if self.token.kind == "(" and "(" in self.language.signs:
            return items_of(self.group())
        found = [self.factor(in_group=False)]
        while self.token.kind in ("name", "int"):
            found.append(self.factor(in_group=False))
        return items_of(found)

    def dims(self, *stop: str) -> tuple[Dim, ...]:
        found: list[Dim] = []
        while self.token.kind not in (*stop, "arrow", "end"):
            found.append(self.dim())
        dots = [factor for dim in found for factor in dim.factors if factor.name == "..."]
        if len(dots) > 1:
            self.wrong(f"'...' stands once {'on a side' if self.language is _MESH else 'in a spec'}", dots[1].span)
        return tuple(found)

    # what is of tensors alone

    def pending(self) -> Pending:
        token = self.token
        if self.take("*"):
            return Pending("*", None, token.span)
        expected = f"one of {', '.join(REDUCTIONS)} with '@', or '*', after '|'"
        if token.kind != "name" or token.text not in REDUCTIONS:
            self.fail(expected)
        self.at += 1
        if self.token.kind != "@":
            self.fail(f"'@' and the axes over which '{token.text}' is pending")
        place = self.place()
        if place is not None and "*" in place.names:
            self.wrong("write '| *' for whatever is pending", place.span)
        return Pending(token.text, place, (token.start, self.tokens[self.at - 1].stop))

    def spec(self) -> Spec:
        dims = self.dims("|", ",")
        blocks = [f for d in dims for f in d.factors if f.blocks]
        if len(blocks) > 1:
            self.wrong("one dim of a tensor holds blocks; take the first ones apart before", blocks[1].span)
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


def _cached_by_text(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Cache by text; what isn't text, or is absurdly long, goes straight to the parser."""
    cached = functools.lru_cache(maxsize=4096)(parse)

    @functools.wraps(parse)
    def parsed(text: str) -> T:
        return cached(text) if type(text) is str and len(text) <= _LONGEST_CACHED else parse(text)

    return parsed


@_cached_by_text
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
    parser = _Parser(text, _NAMES, ". A mesh is declared by names and sizes, like 'dp=2 tp=4'")
    if parser.token.kind == "end":
        parser.fail("at least one axis")
    items = parser.product()
    if parser.token.kind != "end":
        parser.fail("an axis name or the end of the list")
    _check_once(parser.text, items, "{} is declared twice")
    return items


@_cached_by_text
def parse_equation(text: str) -> Equation:
    """`"fsdp = dp_shard cp"`, or `"(dp_shard cp tp) = efsdp ep"`.

    >>> [item.name for item in parse_equation("fsdp = dp cp").right]
    ['dp', 'cp']
    """
    parser = _Parser(text, _EQUATION)
    left = parser.product()
    parser.need("=", "'='")
    right = parser.product()
    parser.need("end", "the end of the equation")
    for side in (left, right):
        _check_once(parser.text, side, "{} stands twice in one product")
    return Equation(parser.text, left, right)


@_cached_by_text
def parse_mesh(text: str) -> MeshExpression:
    """`"(dp cp) tp -> dp cp tp"`.

    >>> str(parse_mesh("dp cp tp -> fsdp=(dp cp) tp").right[0])
    'fsdp=(dp cp)'
    """
    parser = _Parser(text, _MESH)
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


@_cached_by_text
def parse_tensor(text: str) -> TensorExpression:
    """`"b s@cp d, d f@tp -> b s@cp f@tp"`, or specs without an arrow.

    >>> expression = parse_tensor("b s@tp d -> b s d")
    >>> str(expression.operands[0]), [str(spec) for spec in expression.results]
    ('b s@tp d', ['b s d'])
    """
    return _Parser(text, _TENSOR).expression()


@_cached_by_text
def parse_blocks(text: str) -> TensorExpression:
    """The same with blocks, in the rule of a transfer.

    >>> (dim, _) = parse_blocks("(h k + g@tp) d").operands[0].dims
    >>> [[str(factor) for factor in block] for block in dim.factors[0].blocks]
    [['h', 'k'], ['g@tp']]
    """
    return _Parser(text, _RULE).expression()


@_cached_by_text
def parse_spec(text: str) -> Spec:
    """One tensor, whose dims have different names: `"b s@(cp tp) d | sum@ep"`.

    >>> parse_spec("b s, d")
    Traceback (most recent call last):
    axes.algebra.errors.ExpressionError: expected one spec, found 2
      b s, d
      ^^^^^^
    """
    expression = parse_tensor(text)
    if expression.results is not None:
        raise ExpressionError(
            "expected one spec, found an expression with '->'", text, text.index("->"), text.index("->") + 2
        )
    if len(expression.operands) != 1:
        raise ExpressionError(f"expected one spec, found {len(expression.operands)}", text, 0, len(text))
    check_different(text, expression.operands[0])
    return expression.operands[0]


def check_different(text: str, spec: Spec) -> None:
    """`ExpressionError` where a spec names two dims alike, which only an operand of an einsum may: `i i -> i`."""
    _check_once(text, leaves(spec.dims), "dim {} stands twice in one tensor")


def leaves(dims: Iterable[Dim]) -> tuple[Item, ...]:
    """The names of some dims, those in groups included."""
    return items_of(factor for dim in dims for factor in dim.factors)


def dim_places(dim: Dim) -> list[Place]:
    """What stands right of an `@` in a dim."""
    return [place for place in (dim.place, *(factor.place for factor in dim.factors)) if place is not None]


def axes_of(tree: Spec) -> list[str]:
    """The axes that a spec names."""
    places = [place for dim in tree.dims for place in dim_places(dim)]
    places += [pending.place for pending in tree.pending or () if pending.place is not None]
    return [name for place in places for name in place.names if name != "*"]


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
