"""Reading: an expression over tensors of known ranks as atoms, before any mesh is looked at.

An *atom* is what an expression never takes apart: a name, a number, one dim of `...`, or a whole
group that stands the same wherever it stands. A tensor is a tuple of slots, one per dim, and each
slot lists the atoms that make up the dim, major first.

>>> reading = read("rearrange", "(b s) (h d) -> (b s) h d", (2,))
>>> [slot.atoms for slot in reading.operands[0].slots], [slot.atoms for slot in reading.result.slots]
([('(b s)',), ('h', 'd')], [('(b s)',), ('h',), ('d',)])

The rules of which names stand where are einops' own: rearrange keeps every name, reduce drops some,
repeat adds some, einsum repeats them between operands. A `1` is a dim without atoms.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from axes.algebra import grammar
from axes.algebra.errors import ExpressionError, SizeError, shortened, suggestion
from axes.algebra.grammar import Span, parse_tensor, place_text

KINDS = ("rearrange", "reduce", "repeat", "einsum")
"""The operations that an expression can be for."""

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """An atom where it stands, and its place there: axis names and `*`, or None where it is bare."""

    atom: str
    axes: Axes | None = None
    span: Span = field(default=(0, 0), compare=False)

    def __str__(self) -> str:
        return self.atom if self.axes is None else f"{self.atom}@{place_text(self.axes)}"


@dataclass(frozen=True, slots=True)
class Slot:
    """One dim: its atoms in order, and the place behind the group where it has one."""

    marks: tuple[Mark, ...]
    axes: Axes | None = None
    span: Span = field(default=(0, 0), compare=False)

    @property
    def atoms(self) -> tuple[str, ...]:
        """The atoms of the dim, major first."""
        return tuple(mark.atom for mark in self.marks)

    def __str__(self) -> str:
        if not self.marks:
            return "1"
        text = " ".join(map(str, self.marks))
        text = text if len(self.marks) == 1 else f"({text})"
        return text if self.axes is None else f"{text}@{place_text(self.axes)}"


@dataclass(frozen=True, slots=True)
class Term:
    """One tensor of an expression. `pending` is None where there is no `|`."""

    slots: tuple[Slot, ...]
    pending: tuple[grammar.Pending, ...] | None = None

    @property
    def atoms(self) -> tuple[str, ...]:
        """The atoms of all dims in order; one that stands twice is listed twice."""
        return tuple(atom for slot in self.slots for atom in slot.atoms)

    @property
    def keeps_any(self) -> bool:
        """Whether the `|` clause is `*`: whatever is pending."""
        return bool(self.pending) and self.pending[0].op == "*"  # type: ignore[index]

    def __str__(self) -> str:
        text = " ".join(map(str, self.slots))
        if self.pending is None:
            return text
        return " ".join(filter(None, (text, "|", *map(str, self.pending))))


@dataclass(frozen=True, eq=False)
class Reading:
    """An expression for tensors of given ranks, one object for each (see `read`).

    `wholes` are the groups that became one atom, with the names in them. `inline` are the sizes in
    the text. `explicit` are the atoms that carry `@` anywhere, `starred` those whose place holds `*`.
    """

    kind: str
    text: str
    operands: tuple[Term, ...]
    result: Term
    wholes: tuple[tuple[str, tuple[str, ...]], ...]
    inline: tuple[tuple[str, int], ...]

    @functools.cached_property
    def terms(self) -> tuple[Term, ...]:
        """The operands and the result."""
        return (*self.operands, self.result)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Every name that may be given a size, in the order of the text."""
        inner = dict(self.wholes)
        found = (name for term in self.terms for atom in term.atoms for name in inner.get(atom, (atom,)))
        return tuple(dict.fromkeys(name for name in found if is_name(name)))

    @functools.cached_property
    def alone(self) -> tuple[tuple[int, int, str], ...]:
        """`(operand, dim, atom)` of the atoms that are a dim by themselves wherever they stand, and have no size in
        the text."""
        slots = [slot for term in self.terms for slot in term.slots]
        merged = {atom for slot in slots if len(slot.marks) > 1 for atom in slot.atoms}
        sized = {*dict(self.inline), *dict(self.wholes)}
        return tuple(
            (operand, dim, slot.atoms[0])
            for operand, term in enumerate(self.operands)
            for dim, slot in enumerate(term.slots)
            if len(slot.marks) == 1 and "#" not in slot.atoms[0] and slot.atoms[0] not in merged | sized
        )

    @functools.cached_property
    def explicit(self) -> frozenset[str]:
        """The atoms that carry `@` anywhere in the expression."""
        return frozenset(atom for atom, axes, _ in self.places() if axes is not None)

    @functools.cached_property
    def starred(self) -> frozenset[str]:
        """The atoms of which a place holds `*`: their bare occurrences keep what they have."""
        return frozenset(atom for atom, axes, _ in self.places() if axes is not None and "*" in axes)

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """Every axis that is named anywhere, in places or as pending."""
        placed = [axis for _, axes, _ in self.places() for axis in axes or () if axis != "*"]
        pending = [axis for term in self.terms for p in term.pending or () if p.place for axis in p.place.names]
        return tuple(dict.fromkeys([*placed, *pending]))

    def places(self) -> Iterator[tuple[str, Axes | None, Span]]:
        """`(atom, place, span)` wherever an atom stands; the place of a group counts for each in it."""
        for term in self.terms:
            for slot in term.slots:
                for mark in slot.marks:
                    yield mark.atom, (mark.axes if slot.axes is None else slot.axes), mark.span

    def span_of(self, axis: str) -> Span:
        """Where the text names an axis, for the caret of an error."""
        for _, axes, span in self.places():
            if axes and axis in axes:
                return span
        for term in self.terms:
            for pending in term.pending or ():
                if pending.place and axis in pending.place.names:
                    return pending.span
        return 0, len(self.text)

    def span_of_atom(self, atom: str, term: Term | None = None) -> Span:
        """Where an atom stands (in one tensor), for the caret of an error."""
        for where in self.terms if term is None else (term,):
            for slot in where.slots:
                for mark in slot.marks:
                    if mark.atom == atom:
                        return mark.span
        return 0, len(self.text)

    def fail(self, message: str, span: Span | None = None) -> NoReturn:
        """Raises `ExpressionError` with a caret under `span`."""
        raise ExpressionError(message, self.text, *(span or (0, len(self.text))))


def is_name(atom: str) -> bool:
    """Whether an atom is a name of the text, not a number, a dim of `...` or a group."""
    return atom.isidentifier()


@functools.lru_cache(maxsize=4096)
def read(kind: str, text: str, ranks: tuple[int, ...], units: frozenset[tuple[int, int]] = frozenset()) -> Reading:
    """The reading of `text` for tensors with `ranks` dims. Cached.

    `units` lists `(operand, dim)` of size one, which `...` in an einsum broadcasts.
    Raises `ExpressionError` where names stand where they can't, `SizeError` for another number of
    dims.
    """
    check_no_blocks(kind, text)
    tree = parse_tensor(text)
    if tree.results is None:
        raise ExpressionError(f"{kind} needs '->' and the result behind it", text, len(text) - 1, len(text))
    if len(tree.results) != 1:
        raise ExpressionError(
            f"{kind} has one result; found {len(tree.results)}", text, text.index("->") + 2, len(text)
        )
    if kind != "einsum" and len(tree.operands) != 1:
        raise ExpressionError(f"{kind} takes one tensor; found {len(tree.operands)} specs", text, 0, text.index("->"))
    if len(tree.operands) != len(ranks):
        raise ExpressionError(
            f"the expression has {_counted(len(tree.operands), 'operand')}; found {_counted(len(ranks), 'tensor')}",
            text,
            0,
            text.index("->"),
        )
    for spec in (*tree.operands, *tree.results):
        _check_factors(kind, text, spec)
    dots = tuple(
        _dots(text, spec, rank, index) for index, (spec, rank) in enumerate(zip(tree.operands, ranks, strict=True))
    )
    most = max((count for count in dots if count is not None), default=0)
    terms = []
    for index, (spec, count) in enumerate(zip(tree.operands, dots, strict=True)):
        names = tuple(f"...{at}" for at in range(most - (count or 0), most))
        terms.append(_term(spec, names, index))
    terms = _broadcast(terms, units) if most and kind == "einsum" else terms
    if any(_is_dots(f) for d in tree.results[0].dims for f in d.factors) and all(count is None for count in dots):
        raise ExpressionError("'...' is in the result and in no operand", text, text.index("->") + 2, len(text))
    result = _term(tree.results[0], tuple(f"...{at}" for at in range(most)), len(terms))
    inline = _inline(tree)
    check = Reading(kind, text, tuple(terms), result, (), inline)
    _check_names(check)
    wholes = _wholes((*terms, result))
    merged = [_merged(term, wholes) for term in (*terms, result)]
    return Reading(kind, text, tuple(merged[:-1]), merged[-1], wholes, inline)


def check_no_blocks(kind: str, text: object) -> None:
    """`ExpressionError` for a text with '+', which stands in specs and in the rules of transfers."""
    if isinstance(text, str) and "+" in text:
        raise ExpressionError(
            f"{kind} takes no blocks. Blocks of one size are a dim, as in '(three h) d -> three h d'; others are taken "
            "apart with torch.split, and put together with torch.cat, in an axes.shard_map",
            text,
            text.index("+"),
        )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _is_dots(factor: grammar.Factor) -> bool:
    return factor.name == "..."


def spaced(text: str, operand: str, rank: int) -> str:
    """What to write where names of one letter stand together, as in `torch.einsum`."""
    if len(operand) != rank or not operand.isalpha():
        return ""
    if re.fullmatch(r"[A-Za-z, >-]*", text):
        letters = re.sub(r"[A-Za-z](?=[A-Za-z])", r"\g<0> ", text)
        operand = re.sub(r" *-> *", " -> ", re.sub(r" *, *", ", ", letters)).strip()
    else:
        operand = " ".join(operand)
    return f"\nnames are separated by spaces: '{operand}'"


def _check_factors(kind: str, text: str, spec: grammar.Spec) -> None:
    """Refuses what the grammar has and operations don't."""
    for dim in spec.dims:
        for factor in dim.factors:
            if factor.name == "_":
                raise ExpressionError(f"'_' stands in specs only; {kind} needs a name", text, *factor.span)
            if _is_dots(factor) and factor.place is not None and any(name != "*" for name in factor.place.names):
                message = "'...' stands for dims that keep their split; name the dim that is split"
                raise ExpressionError(message, text, *factor.span)
            if factor.name is None and factor.size == 1 and factor.place is not None and factor.place.names:
                raise ExpressionError("a dim of size 1 isn't split", text, *factor.span)


def _dots(text: str, spec: grammar.Spec, rank: int, index: int) -> int | None:
    """How many dims `...` stands for in an operand; None where there is none."""
    grouped = next((d for d in spec.dims if d.grouped and any(_is_dots(f) for f in d.factors)), None)
    if grouped is not None:
        raise ExpressionError("'...' in a group on the left leaves its sizes open; name the dims", text, *grouped.span)
    has = any(_is_dots(factor) for dim in spec.dims for factor in dim.factors)
    others = len(spec.dims) - has
    if rank < others or (not has and rank != others):
        which = f"operand {index + 1}, '{spec}'," if "," in text.split("->")[0] else f"'{spec}'"
        least = "at least " if has else ""
        counts = f"{which} has {least}{_counted(others, 'dim')}; the tensor has {rank}"
        raise SizeError(f"{counts}\nin  {text}{spaced(text, str(spec), rank)}")
    return rank - others if has else None


def _term(spec: grammar.Spec, dots: tuple[str, ...], index: int) -> Term:
    slots: list[Slot] = []
    for at, dim in enumerate(spec.dims):
        outer = None if dim.place is None else dim.place.names
        if not dim.grouped and _is_dots(dim.factors[0]):
            place = dim.factors[0].place
            axes = None if place is None else place.names
            slots.extend(Slot((Mark(name, axes, dim.span),), None, dim.span) for name in dots)
            continue
        marks: list[Mark] = []
        for number, factor in enumerate(dim.factors):
            axes = None if factor.place is None else factor.place.names
            if _is_dots(factor):
                marks.extend(Mark(name, axes, factor.span) for name in dots)
            elif factor.name is not None:
                marks.append(Mark(factor.name, axes, factor.span))
            elif factor.size != 1:
                # A number is an atom of its own, with its value in front.
                marks.append(Mark(f"{factor.size}#{index}.{at}.{number}", axes, factor.span))
        if len(marks) == 1 and outer is not None:
            marks, outer = [replace(marks[0], axes=outer)], None
        slots.append(Slot(tuple(marks), outer if marks else None, dim.span))
    return Term(tuple(slots), spec.pending)


def _broadcast(terms: Sequence[Term], units: frozenset[tuple[int, int]]) -> list[Term]:
    """Dims of `...` of size one, where another operand has more, hold no atom."""
    large = {
        slot.atoms[0]
        for index, term in enumerate(terms)
        for dim, slot in enumerate(term.slots)
        if len(slot.marks) == 1 and slot.atoms[0].startswith("...") and (index, dim) not in units
    }
    found = []
    for index, term in enumerate(terms):
        slots = [
            Slot((), None, slot.span) if (index, dim) in units and slot.atoms and slot.atoms[0] in large else slot
            for dim, slot in enumerate(term.slots)
        ]
        found.append(replace(term, slots=tuple(slots)))
    return found


def _inline(tree: grammar.TensorExpression) -> tuple[tuple[str, int], ...]:
    found: dict[str, int] = {}
    for spec in (*tree.operands, *(tree.results or ())):
        for dim in spec.dims:
            for factor in dim.factors:
                if factor.name is None or factor.size is None:
                    continue
                if found.setdefault(factor.name, factor.size) != factor.size:
                    message = f"'{factor.name}' is given two sizes: {found[factor.name]} and {factor.size}"
                    raise ExpressionError(message, tree.text, *factor.span)
    return tuple(found.items())


def _check_names(reading: Reading) -> None:
    """Names stand where einops lets them stand."""
    kind, result = reading.kind, reading.result
    left = {atom: term for term in reading.operands for atom in term.atoms}
    right = set(result.atoms)
    for term in (result,) if kind == "einsum" else reading.terms:
        for mark in _twice(term):
            reading.fail(f"{_shown(mark.atom)} stands twice in one tensor", mark.span)
    for atom, term in left.items():
        span = reading.span_of_atom(atom, term)
        if "#" in atom and kind != "reduce":
            reading.fail(f"{kind} takes no number but 1 on the left; write a name with a size", span)
        if atom not in right and kind in ("rearrange", "repeat"):
            verb = "keeps" if kind == "rearrange" else "adds to"
            message = f"{_shown(atom)} stands on the left only; {kind} {verb} what is there, reduce drops names"
            reading.fail(message + _near(atom, right), span)
    for atom in result.atoms:
        if atom in left or (kind == "repeat"):
            continue
        span = reading.span_of_atom(atom, result)
        if "#" in atom:
            reading.fail(f"{kind} takes no number but 1 on the right; repeat adds dims", span)
        message = f"{_shown(atom)} stands on the right only; repeat adds names" + _near(atom, left)
        reading.fail(message, span)


def _near(atom: str, others: Iterable[str]) -> str:
    hint = suggestion(atom, [other for other in others if is_name(other)])
    return hint if hint.startswith("; did") else ""


def _shown(atom: str) -> str:
    return "'...'" if atom.startswith("...") else shortened(atom.split("#")[0])


def _twice(term: Term) -> list[Mark]:
    seen: set[str] = set()
    found = []
    for slot in term.slots:
        for mark in slot.marks:
            if mark.atom in seen:
                found.append(mark)
            seen.add(mark.atom)
    return found


def _wholes(terms: Sequence[Term]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Groups that no tensor takes apart, with the names in them."""
    standing: dict[str, set[tuple[str, ...]]] = {}
    for term in terms:
        for slot in term.slots:
            bare = all(mark.axes is None for mark in slot.marks)
            for atom in slot.atoms:
                standing.setdefault(atom, set()).add(slot.atoms if bare else (atom,))
    groups = {group for found in standing.values() for group in found if len(group) > 1}
    whole = [group for group in groups if all(standing[atom] == {group} for atom in group)]
    return tuple((f"({' '.join(atom.split('#')[0] for atom in group)})", group) for group in sorted(whole))


def _merged(term: Term, wholes: tuple[tuple[str, tuple[str, ...]], ...]) -> Term:
    names = {group: name for name, group in wholes}
    slots = []
    for slot in term.slots:
        if slot.atoms in names:
            slots.append(Slot((Mark(names[slot.atoms], slot.axes, slot.span),), None, slot.span))
        else:
            slots.append(slot)
    return replace(term, slots=tuple(slots))
