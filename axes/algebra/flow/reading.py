"""Reading: an expression over tensors of known ranks as names in slots, before any mesh is looked at.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from axes.algebra import grammar
from axes.algebra.errors import ExpressionError, SizeError, shortened, suggestion
from axes.algebra.grammar import Span, has_dots, parse_tensor, place_text

KINDS = ("rearrange", "reduce", "repeat", "einsum")
"""The operations that an expression can be for."""

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """An atom where it stands, and its place there: axis names and `*`, or None where it is bare."""

    atom: str
    axes: Axes | None = None
    span: Span = field(default=(0, 0), compare=False)


@dataclass(frozen=True)
class TermDim:
    """One dim: its atoms in order, and the place behind the group where it has one."""

    marks: tuple[Mark, ...]
    axes: Axes | None = None
    span: Span = field(default=(0, 0), compare=False)

    @functools.cached_property
    def atoms(self) -> tuple[str, ...]:
        """The atoms of the dim, major first."""
        return tuple([mark.atom for mark in self.marks])

    @property
    def uses(self) -> list[tuple[str, str, Span]]:
        """`(what, axis, span)` for every axis that the slot names."""
        whole = Mark(" ".join(self.atoms), self.axes, self.span)
        marks = self.marks if self.axes is None else (whole,)
        return [(mark.atom, axis, mark.span) for mark in marks for axis in mark.axes or () if axis != "*"]

    def __str__(self) -> str:
        """The dim without its places."""
        names = " ".join(map(atom_text, self.atoms))
        return names if len(self.marks) == 1 else f"({names})"


@dataclass(frozen=True)
class Term:
    """One tensor of an expression. `pending` is None where there is no `|`."""

    slots: tuple[TermDim, ...]
    pending: tuple[grammar.Pending, ...] | None
    text: str

    @functools.cached_property
    def atoms(self) -> tuple[str, ...]:
        """The atoms of all dims in order; one that stands twice is listed twice."""
        return tuple([mark.atom for slot in self.slots for mark in slot.marks])

    @property
    def keeps_any(self) -> bool:
        """Whether the `|` clause is `*`: whatever is pending."""
        return bool(self.pending) and self.pending[0].op == "*"  # type: ignore[index]

    @property
    def uses(self) -> list[tuple[str, str, Span]]:
        """`(what, axis, span)` for every axis that the tensor names."""
        pending = [(f"| {p.op}", axis, p.span) for p in self.pending or () if p.place for axis in p.place.names]
        return [use for slot in self.slots for use in slot.uses] + pending


@dataclass(frozen=True, eq=False)
class Reading:
    """An expression for tensors of given ranks, one object for each (see `read`).

    `wholes` are the groups that became one atom, with the names in them. `inline` are the sizes in the text.
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
    def atoms(self) -> tuple[str, ...]:
        """Every atom, in the order of the text."""
        return tuple(dict.fromkeys([atom for term in self.terms for atom in term.atoms]))

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Every name that may be given a size, in the order of the text."""
        inner = dict(self.wholes)
        return tuple(name for atom in self.atoms for name in inner.get(atom, (atom,)) if is_name(name))

    @functools.cached_property
    def alone(self) -> tuple[tuple[int, int, str], ...]:
        """`(operand, dim, atom)` of the atoms that are a dim by themselves wherever they stand, and have no size in
        the text."""
        merged = {atom for term in self.terms for slot in term.slots if len(slot.marks) > 1 for atom in slot.atoms}
        others = merged | {*dict(self.inline), *dict(self.wholes)}
        return tuple(
            (operand, dim, slot.atoms[0])
            for operand, term in enumerate(self.operands)
            for dim, slot in enumerate(term.slots)
            if slot.marks and "#" not in slot.atoms[0] and slot.atoms[0] not in others
        )

    @functools.cached_property
    def explicit(self) -> frozenset[str]:
        """The atoms that carry `@` anywhere in the expression, in a place of their own or behind their group."""
        return frozenset([atom for atom, axes in self._places() if axes is not None])

    @functools.cached_property
    def starred(self) -> frozenset[str]:
        """The atoms of which a place holds `*`: their bare occurrences keep what they have."""
        return frozenset([atom for atom, axes in self._places() if "*" in (axes or ())])

    @functools.cached_property
    def uses(self) -> tuple[tuple[str, str, Span], ...]:
        """`(what, axis, span)` for every axis that is named anywhere, in places or as pending."""
        return tuple([use for term in self.terms for use in term.uses])

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """Every axis that is named anywhere."""
        return tuple(dict.fromkeys([axis for _, axis, _ in self.uses]))

    def _places(self) -> list[tuple[str, Axes | None]]:
        slots = [slot for term in self.terms for slot in term.slots]
        return [(m.atom, m.axes if slot.axes is None else slot.axes) for slot in slots for m in slot.marks]

    def span_of(self, atom: str, terms: Sequence[Term] = ()) -> Span:
        """Where an atom stands (in some tensors), for the caret of an error."""
        marks = [mark for term in terms or self.terms for slot in term.slots for mark in slot.marks]
        return next((mark.span for mark in marks if mark.atom == atom), (0, len(self.text)))

    def fail(self, message: str, span: Span) -> NoReturn:
        """Raises `ExpressionError` with a caret under `span`."""
        raise ExpressionError(message, self.text, *span)


def is_name(atom: str) -> bool:
    """Whether an atom is a name of the text, not a number, a dim of `...` or a group."""
    return atom.isidentifier()


def atom_text(atom: str) -> str:
    """An atom as the text has it."""
    return "..." if atom.startswith("...") else atom.partition("#")[0]


def names_of(atoms: Sequence[str], slots: Sequence[object]) -> tuple[str, ...]:
    """The names of the slots of a dim that consists of these atoms.

    >>> names_of(["h", "d"], [0, 1]), names_of(["h", "d"], [0]), names_of(["h"], [0, 1])
    (('h', 'd'), ('(h d)',), ('', 'h'))
    """
    texts = tuple(map(atom_text, atoms))
    if len(slots) == 1 and len(texts) > 1:
        return (f"({' '.join(texts)})",)
    last = texts if len(texts) == 1 else ("",)
    return texts if len(texts) == len(slots) else (*[""] * (len(slots) - 1), *last)


@functools.lru_cache(maxsize=4096)
def read(kind: str, text: str, ranks: tuple[int, ...], units: frozenset[tuple[int, int]] = frozenset()) -> Reading:
    """The reading of `text` for tensors with `ranks` dims. Cached.

    `units` lists `(operand, dim)` of size one, which `...` in an einsum broadcasts.
    Raises `ExpressionError` where names stand where they can't, `SizeError` for another number of
    dims.
    """
    tree = parse_tensor(text)
    if tree.results is None:
        raise ExpressionError(f"{kind} needs '->' and the result behind it", text, len(text) - 1, len(text))
    left, right = (0, text.index("->")), (text.index("->") + 2, len(text))
    if len(tree.results) != 1:
        raise ExpressionError(f"{kind} has one result; found {len(tree.results)}", text, *right)
    if kind != "einsum" and len(tree.operands) != 1:
        raise ExpressionError(f"{kind} takes one tensor; found {len(tree.operands)} specs", text, *left)
    if len(tree.operands) != len(ranks):
        found = f"{_counted(len(tree.operands), 'operand')}; found {_counted(len(ranks), 'tensor')}"
        raise ExpressionError(f"the expression has {found}", text, *left)
    specs, (goal,) = tree.operands, tree.results
    for spec in (*specs, goal):
        _check_factors(kind, text, spec)
    dots = [_dots(text, spec, rank, index) for index, spec, rank in zip(range(len(specs)), specs, ranks, strict=True)]
    if any(map(has_dots, goal.dims)) and set(dots) == {None}:
        raise ExpressionError("'...' is in the result and in no operand", text, *right)
    most = max([count or 0 for count in dots])
    names = tuple([f"...{at}" for at in range(most)])
    behind = [names[most - (count or 0) :] for count in dots]
    operands = list(map(_term, specs, behind, range(len(specs))))
    operands = _broadcast(operands, units) if units else operands
    reading = Reading(kind, text, tuple(operands), _term(goal, names, len(specs)), (), _inline(tree))
    _check_names(reading)
    wholes = _wholes(reading.terms)
    *operands, result = [_merged(term, wholes) for term in reading.terms]
    reading = replace(reading, operands=tuple(operands), result=result, wholes=wholes)
    for slot in [slot for term in reading.terms for slot in term.slots]:
        if slot.axes is not None and "*" in slot.axes:
            reading.fail(f"write '*' at the name in {slot}@{place_text(slot.axes)} that it is about", slot.span)
    return reading


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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
    for factor in [factor for dim in spec.dims for factor in dim.factors]:
        axes = () if factor.place is None else factor.place.names
        if factor.name == "_":
            raise ExpressionError(f"'_' stands in specs only; {kind} needs a name", text, *factor.span)
        if factor.name == "..." and {*axes} - {"*"}:
            message = "'...' stands for dims that keep their split; name the dim that is split"
            raise ExpressionError(message, text, *factor.span)
        if factor.name is None and factor.size == 1 and axes:
            raise ExpressionError("a dim of size 1 isn't split", text, *factor.span)


def _dots(text: str, spec: grammar.Spec, rank: int, index: int) -> int | None:
    """How many dims `...` stands for in an operand; None where there is none."""
    dots = [dim for dim in spec.dims if has_dots(dim)]
    if any(dim.grouped for dim in dots):
        message = "'...' in a group on the left leaves its sizes open; name the dims"
        raise ExpressionError(message, text, *dots[0].span)
    others = len(spec.dims) - len(dots)
    if rank < others or (not dots and rank != others):
        which = f"operand {index + 1}, '{spec}'," if "," in text.split("->")[0] else f"'{spec}'"
        counts = f"{which} has {'at least ' if dots else ''}{_counted(others, 'dim')}; the tensor has {rank}"
        advice = spaced(text, str(spec), rank) or "\nwrite a name for each dim, or '...' for dims that stay as they are"
        raise SizeError(f"{counts}\nin  {text}{advice}")
    return rank - others if dots else None


def _term(spec: grammar.Spec, dots: tuple[str, ...], index: int) -> Term:
    slots: list[TermDim] = []
    for at, dim in enumerate(spec.dims):
        marks: list[Mark] = []
        for number, factor in enumerate(dim.factors):
            # A number is an atom of its own, with its value in front.
            numbers = () if factor.size == 1 else (f"{factor.size}#{index}.{at}.{number}",)
            atoms = dots if factor.name == "..." else numbers if factor.name is None else (factor.name,)
            axes = None if factor.place is None else factor.place.names
            marks.extend([Mark(atom, axes, factor.span) for atom in atoms])
        outer = None if dim.place is None else dim.place.names
        if has_dots(dim) and not dim.grouped:
            slots.extend([TermDim((mark,), None, dim.span) for mark in marks])
        elif len(marks) == 1 and outer is not None:
            slots.append(TermDim((replace(marks[0], axes=outer),), None, dim.span))
        else:
            slots.append(TermDim(tuple(marks), outer if marks else None, dim.span))
    return Term(tuple(slots), spec.pending, str(spec))


def _broadcast(terms: Sequence[Term], units: frozenset[tuple[int, int]]) -> list[Term]:
    """Dims of `...` of size one, where another operand has more, hold no atom."""
    slots = [(index, dim, slot) for index, term in enumerate(terms) for dim, slot in enumerate(term.slots)]
    dots = {(index, dim): slot.atoms for index, dim, slot in slots if slot.atoms and slot.atoms[0].startswith("...")}
    large = {atoms for at, atoms in dots.items() if at not in units}
    ones = {at for at, atoms in dots.items() if at in units and atoms in large}
    return [
        replace(term, slots=tuple([replace(s, marks=()) if (i, d) in ones else s for d, s in enumerate(term.slots)]))
        for i, term in enumerate(terms)
    ]


def _inline(tree: grammar.TensorExpression) -> tuple[tuple[str, int], ...]:
    found: dict[str, int] = {}
    for factor in (f for spec in (*tree.operands, *(tree.results or ())) for dim in spec.dims for f in dim.factors):
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
    right = {*result.atoms}
    for term in (result,) if kind == "einsum" else reading.terms:
        marks = [mark for slot in term.slots for mark in slot.marks]
        for at, mark in enumerate(marks):
            if mark.atom in [before.atom for before in marks[:at]]:
                reading.fail(f"{_shown(mark.atom)} stands twice in one tensor", mark.span)
    for atom, term in left.items():
        span = reading.span_of(atom, (term,))
        if "#" in atom and kind != "reduce":
            reading.fail(f"{kind} takes no number but 1 on the left; write a name with a size", span)
        if atom not in right and kind in ("rearrange", "repeat"):
            verb = "keeps" if kind == "rearrange" else "adds to"
            message = f"{_shown(atom)} stands on the left only; {kind} {verb} what is there, reduce drops names"
            reading.fail(message + _near(atom, right), span)
    for atom in [] if kind == "repeat" else [atom for atom in result.atoms if atom not in left]:
        span = reading.span_of(atom, (result,))
        if "#" in atom:
            reading.fail(f"{kind} takes no number but 1 on the right; repeat adds dims", span)
        reading.fail(f"{_shown(atom)} stands on the right only; repeat adds names" + _near(atom, left), span)


def _near(atom: str, others: Iterable[str]) -> str:
    hint = suggestion(atom, sorted(filter(is_name, others)))
    return hint if hint.startswith("; did") else ""


def _shown(atom: str) -> str:
    return "'...'" if atom.startswith("...") else shortened(atom_text(atom))


def _wholes(terms: Sequence[Term]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Groups that no tensor takes apart, with the names in them."""
    standing: dict[str, set[tuple[str, ...]]] = {}
    for slot in [slot for term in terms for slot in term.slots]:
        is_bare = {mark.axes for mark in slot.marks} <= {None}
        for mark in slot.marks:
            standing.setdefault(mark.atom, set()).add(slot.atoms if is_bare else (mark.atom,))
    groups = sorted({group for found in standing.values() for group in found if len(group) > 1})
    whole = [group for group in groups if all(standing[atom] == {group} for atom in group)]
    return tuple((f"({' '.join(map(atom_text, group))})", group) for group in whole)


def _merged(term: Term, wholes: tuple[tuple[str, tuple[str, ...]], ...]) -> Term:
    names = {group: name for name, group in wholes}
    return replace(
        term,
        slots=tuple(
            TermDim((Mark(names[s.atoms], s.axes, s.span),), None, s.span) if s.atoms in names else s
            for s in term.slots
        ),
    )
