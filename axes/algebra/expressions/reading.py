"""Reading: an expression over tensors of known ranks as names in dims, before any mesh is looked at.

An *atom* is what an expression never takes apart: a name, a number, one dim of `...`, or a whole
group that stands the same wherever it stands. Each dim of a tensor lists the atoms that make it up, major first.

>>> reading = read("rearrange", "(b s) (h d) -> (b s) h d", (2,))
>>> reading.operands[0].groups, reading.result.groups
((('(b s)',), ('h', 'd')), (('(b s)',), ('h',), ('d',)))

The rules of which names stand where are einops' own: rearrange keeps every name, reduce drops some,
repeat adds some, einsum repeats them between operands. A `1` is a dim without atoms.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from axes.algebra.errors import ExpressionError, SizeError, shortened, suggestion
from axes.algebra.grammar import (
    Dim,
    Factor,
    Item,
    Span,
    Spec,
    check_different,
    has_dots,
    leaves,
    parse_tensor,
)

Groups = tuple[tuple[str, ...], ...]
"""The atoms of each dim of a tensor."""


class Term:
    """One tensor of an expression: `spec` as it is written, and its `dims` with an atom for each factor.

    groups: the atoms of each dim. atoms: those of all dims in order, and the `factors` that they are; one that stands
    twice is listed twice. keeps_any: whether the `|` clause is `*`, whatever is pending.
    """

    def __init__(self, spec: Spec, dims: tuple[Dim, ...]):
        self.spec, self.dims = spec, dims
        self.groups: Groups = tuple([tuple(map(str, map(attrgetter("name"), dim.factors))) for dim in dims])
        self.factors = [factor for dim in dims for factor in dim.factors]
        self.atoms = tuple(map(str, map(attrgetter("name"), self.factors)))
        self.keeps_any = any(pending.op == "*" for pending in spec.pending or ())


class Reading:
    """An expression for tensors of given ranks, one object for each (see `read`).

    wholes: the groups that became one atom, with the names in them. items: the names of the text, each with its size
    where that is written. terms: the operands and the result. atoms: all of them, in the order of the text. axes: those
    that are named anywhere.

    explicit: the atoms that carry `@` anywhere in the expression, in a place of their own or behind their group.
    starred: those of which a place holds `*`; where they stand bare they keep what they have.
    alone: `(operand, dim, atom)` of those that are a dim by themselves wherever they stand, without a size in the text.
    """

    def __init__(
        self,
        kind: str,
        text: str,
        operands: tuple[Term, ...],
        result: Term,
        wholes: Mapping[str, tuple[str, ...]],
        items: tuple[Item, ...],
    ):
        self.kind, self.text, self.operands, self.result = kind, text, operands, result
        self.wholes, self.items, self.terms = wholes, items, (*operands, result)
        self.atoms = tuple(dict.fromkeys([atom for term in self.terms for atom in term.atoms]))
        self.axes = tuple(dict.fromkeys([axis for term in self.terms for axis in term.spec.axes]))
        dims = [dim for term in self.terms for dim in term.dims]
        places = [(str(factor.name), factor.place or dim.place) for dim in dims for factor in dim.factors]
        self.explicit = frozenset([atom for atom, place in places if place is not None])
        self.starred = frozenset([atom for atom, place in places if place is not None and "*" in place.names])
        merged = {str(factor.name) for dim in dims if len(dim.factors) > 1 for factor in dim.factors}
        others = merged | {item.name for item in items if item.size} | {*wholes}
        groups = [(at, dim, group) for at, term in enumerate(operands) for dim, group in enumerate(term.groups)]
        firsts = [(at, dim, group[0]) for at, dim, group in groups if group and not is_number(group[0])]
        self.alone = tuple([each for each in firsts if each[2] not in others])

    def span_of(self, atom: str, terms: Sequence[Term] = ()) -> Span:
        """Where an atom stands (in some tensors), for the caret of an error."""
        factors = [factor for term in terms or self.terms for factor in term.factors]
        return next((factor.span for factor in factors if factor.name == atom), (0, len(self.text)))


def is_name(atom: str) -> bool:
    """Whether an atom is a name of the text, not a number, a dim of `...` or a group."""
    return atom.isidentifier()


def is_number(atom: str) -> bool:
    """Whether an atom is a number, which has its place in the text behind it: `3#7`."""
    return atom[0].isdigit()


def atom_text(atom: str) -> str:
    """An atom as the text has it."""
    return atom.partition("#")[0]


def group_text(atoms: Sequence[str]) -> str:
    """A dim of these atoms, without places."""
    names = " ".join(map(atom_text, atoms))
    return names if len(atoms) == 1 else f"({names})"


@functools.lru_cache(maxsize=4096)
def read(kind: str, text: str, ranks: tuple[int, ...]) -> Reading:
    """The reading of `text` for tensors with `ranks` dims. Cached.

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
    specs = *tree.operands, *tree.results
    for spec in specs:
        _check_factors(kind, text, spec)
    for spec in specs[-1:] if kind == "einsum" else specs:
        check_different(text, spec)
    dots = [_dots(text, spec, rank, index) for index, (spec, rank) in enumerate(zip(tree.operands, ranks, strict=True))]
    if any(map(has_dots, specs[-1].dims)) and set(dots) == {None}:
        raise ExpressionError("'...' is in the result and in no operand", text, *right)
    most = max([count or 0 for count in dots])
    names = [f"...#{at}" for at in range(most)]
    behind = [names[most - (count or 0) :] for count in (*dots, most)]
    terms = [Term(spec, _in_atoms(spec, own)) for spec, own in zip(specs, behind, strict=True)]
    wholes = _wholes(terms)
    *operands, result = [_merged(term, wholes) for term in terms] if wholes else terms
    names_in = {name: group for group, name in wholes.items()}
    items = leaves([dim for spec in specs for dim in spec.dims])
    reading = Reading(kind, text, tuple(operands), result, names_in, items)
    _check_names(reading)
    for dim in [dim for term in reading.terms for dim in term.dims]:
        if dim.place is not None and "*" in dim.place.names:
            raise ExpressionError(f"write '*' at the name in {dim} that it is about", text, *dim.span)
    return reading


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _check_factors(kind: str, text: str, spec: Spec) -> None:
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


def _dots(text: str, spec: Spec, rank: int, index: int) -> int | None:
    """How many dims `...` stands for in an operand; None where there is none."""
    dots = [dim for dim in spec.dims if has_dots(dim)]
    if any(dim.grouped for dim in dots):
        message = "'...' in a group on the left leaves its sizes open; name the dims"
        raise ExpressionError(message, text, *dots[0].span)
    others = len(spec.dims) - len(dots)
    if rank < others or (not dots and rank != others):
        which = f"operand {index + 1}, '{spec}'," if "," in text.split("->")[0] else f"'{spec}'"
        counts = f"{which} has {'at least ' if dots else ''}{_counted(others, 'dim')}; the tensor has {rank}"
        advice = "write a name for each dim, separated by spaces, or '...' for dims that stay as they are"
        raise SizeError(f"{counts}\nin  {text}\n{advice}")
    return rank - others if dots else None


def _in_atoms(spec: Spec, dots: Sequence[str]) -> tuple[Dim, ...]:
    """The dims of a spec with an atom for each factor: `dots` for `...`, nothing for `1`."""
    found: list[Dim] = []
    for dim in spec.dims:
        factors = [replace(factor, name=atom, size=None) for factor in dim.factors for atom in _atoms(factor, dots)]
        if dim.factors and dim.factors[0].name == "..." and not dim.grouped:
            found.extend([replace(dim, factors=(factor,)) for factor in factors])
        else:
            found.append(_alone(dim, factors) if dim.grouped else replace(dim, factors=tuple(factors)))
    return tuple(found)


def _atoms(factor: Factor, dots: Sequence[str]) -> Sequence[str]:
    """What a factor is as atoms. A number is an atom of its own, with its value in front."""
    if factor.name is not None:
        return dots if factor.name == "..." else (factor.name,)
    return () if factor.size == 1 else (f"{factor.size}#{factor.span[0]}",)


def _alone(dim: Dim, factors: Sequence[Factor]) -> Dim:
    """A dim of these factors; where that is one, the place behind the group is its own."""
    if len(factors) > 1:
        return replace(dim, factors=tuple(factors))
    return Dim(tuple([replace(factor, place=factor.place or dim.place) for factor in factors]), span=dim.span)


def _check_names(reading: Reading) -> None:
    """Names stand where einops lets them stand."""
    kind, result = reading.kind, reading.result
    left = {atom: term for term in reading.operands for atom in term.atoms}
    right = {*result.atoms}
    for atom, term in left.items():
        if is_number(atom) and kind != "reduce":
            message = f"{kind} takes no number but 1 on the left; write a name with a size"
            raise ExpressionError(message, reading.text, *reading.span_of(atom, (term,)))
        if atom not in right and kind in ("rearrange", "repeat"):
            verb = "keeps" if kind == "rearrange" else "adds to"
            message = (
                f"{shortened(atom_text(atom))} stands on the left only; {kind} {verb} what is there, reduce drops names"
            )
            raise ExpressionError(message + _near(atom, right), reading.text, *reading.span_of(atom, (term,)))
    for atom in [] if kind == "repeat" else [atom for atom in result.atoms if atom not in left]:
        message = f"{shortened(atom_text(atom))} stands on the right only; repeat adds names{_near(atom, left)}"
        if is_number(atom):
            message = f"{kind} takes no number but 1 on the right; repeat adds dims"
        raise ExpressionError(message, reading.text, *reading.span_of(atom, (result,)))


def _near(atom: str, others: Iterable[str]) -> str:
    hint = suggestion(atom, sorted(filter(is_name, others)))
    return hint if hint.startswith("; did") else ""


def _wholes(terms: Sequence[Term]) -> dict[tuple[str, ...], str]:
    """Groups that no tensor takes apart, with what they are called as one atom."""
    standing: dict[str, set[tuple[str, ...]]] = {}
    for dim, group in [pair for term in terms for pair in zip(term.dims, term.groups, strict=True)]:
        is_bare = not any(map(attrgetter("place"), dim.factors))
        for atom in group:
            standing.setdefault(atom, set()).add(group if is_bare else (atom,))
    groups = sorted({group for found in standing.values() for group in found if len(group) > 1})
    whole = [group for group in groups if all(standing[atom] == {group} for atom in group)]
    return {group: group_text(group) for group in whole if len({*group}) == len(group)}


def _merged(term: Term, wholes: Mapping[tuple[str, ...], str]) -> Term:
    dims = [
        _alone(dim, [Factor(wholes[group], span=dim.span)]) if group in wholes else dim
        for dim, group in zip(term.dims, term.groups, strict=True)
    ]
    return Term(term.spec, tuple(dims))
