"""Operands: what the tensors of an expression are, before the local computation.

Rule 1 hands the splits of dims down to atoms, rule 2 compares them with what the left side says, and rule 3
has all operands say the same of an atom that they share. A plain tensor is what the left side says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from axes.algebra.errors import ExpressionError, ShardingError, SizeError
from axes.algebra.expressions.reading import Reading, Term, atom_text, group_text, is_number
from axes.algebra.expressions.recipe import Shardings, singles
from axes.algebra.grammar import Dim, Factor, Place, axes_of_dim
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.algebra.sharding import LINEAR, Pending, Sharding, Slots, layouts_text, names_of, same_cuts, slots_text
from axes.algebra.sizes import Product, Shape, given_sizes, solve
from axes.algebra.splits import Digits, handed_down, of_names, split

Layouts = tuple[Layout, ...]


def sizes_of_atoms(
    reading: Reading, mesh: Mesh, is_global: bool, shapes: Sequence[Shape], given: Mapping[str, Any]
) -> tuple[dict[str, int], set[str]]:
    """The whole size of every atom, and the atoms that plain shards alone say, each its rank's part."""
    equations, assumed = list[Product](), set[str]()
    known = given_sizes(given, None, reading.items, [item.name for item in reading.items])
    known |= {atom: int(atom_text(atom)) for atom in reading.atoms if is_number(atom)}
    known |= {
        whole: math.prod([known[n] for n in inner]) for whole, inner in reading.wholes.items() if {*inner} <= {*known}
    }
    for whole, inner in reading.wholes.items():
        # Of the names that have no size one has what the others leave.
        missing = [name for name in inner if name not in known]
        equations.append(Product((*[name for name in inner if name in known], *missing[:1]), (whole,), 1, reading.text))
    for number, (term, shape) in enumerate(zip(reading.operands, shapes, strict=True)):
        for at, (dim, group, extent) in enumerate(zip(term.dims, term.groups, shape, strict=True)):
            count = 1 if is_global else math.prod([mesh.layout(axis).size for axis in axes_of_dim(dim)])
            open_ = [atom for atom in group if atom not in known]
            # A plain shard of a known size may be uneven; it is checked against its rank's share.
            if count == 1 or open_:
                assumed.update(open_ if count > 1 else ())
                where = f"dim {at} of {list(shape)}" + (f", operand {number + 1}" if len(shapes) > 1 else "")
                equations.append(Product(group, (), extent * count, f"{where}, in  {reading.text}"))
    found = solve(equations, known)
    for atom in [atom for atom in reading.atoms if atom not in found]:
        raise SizeError(f"the size of '{atom}' isn't known from any tensor; give it, like {atom}=2")
    return {atom: found[atom] for atom in reading.atoms}, assumed


class Operands:
    """The tensors of one expression as it finds them: how atoms are split, and what is pending.

    sizes: the whole size of each atom. shardings: None for plain tensors. splits: what all operands say of an atom.
    stars: for each atom with a `*` on the left, what is written before and behind it, and what it stands for.
    """

    def __init__(self, reading: Reading, mesh: Mesh, shardings: Sequence[Sharding | None], sizes: Mapping[str, int]):
        self.reading, self.mesh, self.sizes = reading, mesh, sizes
        self.is_global = shardings[0] is not None
        written = mesh.splits(reading.axes)
        self.digits = Digits(mesh, [*written, *[each for s in shardings if s is not None for each in s.used]])
        self.mentioned = frozenset(self.digits.of(written))
        self.stars: dict[str, tuple[tuple[Layouts, Layouts], Layouts]] = {}
        self.operands = list(map(self._operand, range(len(shardings)), shardings))
        self.splits = self._common()

    def whole(self, groups: Iterable[Sequence[str]]) -> Shape:
        """The whole shape of a tensor whose dims are these atoms."""
        return tuple([math.prod([self.sizes[atom] for atom in group]) for group in groups])

    def joined(self, group: Sequence[str], splits: Sequence[Slots]) -> Slots:
        """The dim whose atoms are split so."""
        return of_names([*zip(splits, map(self.sizes.__getitem__, group), strict=True)])

    def handed_down(self, dim: Slots, group: Sequence[str], advice: str) -> list[Slots]:
        """How the atoms of a dim are split; `ShardingError` where its split doesn't fall on them."""
        found = handed_down(dim, [self.sizes[atom] for atom in group])
        if found is None:
            sizes = " ".join(f"{atom_text(atom)}={self.sizes[atom]}" for atom in group)
            raise ShardingError(
                f"{layouts_text(self.mesh, dim.layouts)} splits {group_text(group)} into {dim.pieces} parts that don't "
                f"fall on its names: ({sizes})\nin  {self.reading.text}\n{advice}, or choose sizes that divide"
            )
        return found[: len(group)]  # a scalar's dim has no names

    def named(self, place: Place | None) -> Slots:
        """A dim that is split over the axes of a place, `*` left out."""
        names = () if place is None else place.names
        return split(*self.mesh.splits([axis for axis in names if axis != "*"]))

    # rules 1 and 2: what each operand's atoms are

    def _operand(self, number: int, actual: Sharding | None) -> Shardings:
        term = self.reading.operands[number]
        if actual is None:
            tensor = self._declared(term)
        else:
            tensor = Sharding(self.mesh, actual.dims, actual.pending, term.groups)
        splits, extents = list[Slots](), self.whole(term.groups)
        for dim, group, has, extent in zip(term.dims, term.groups, tensor.dims, extents, strict=True):
            given = None if extent else self._of_nothing(dim, group)
            splits += given or self.handed_down(has, group, f"axes.reshard it to '{group_text(group)}' before")
        behind = [dim.place for dim in term.dims for _ in dim.factors]
        written = list(map(self._written, term.factors, behind, splits))
        pairs = list(zip(splits, written, [self.sizes[atom] for atom in term.atoms], strict=True))
        pairs += [
            (has, self.named(dim.place), extent)
            for dim, has, extent in zip(term.dims, tensor.dims, extents, strict=True)
            if dim.place is not None
        ]
        if not all(same_cuts(*pair) for pair in pairs) or not self._is_pending_as_written(term, tensor.pending):
            self._mismatch(number, self._split(term, tensor, splits))
        return self._split(term, tensor, written)

    def _split(self, term: Term, tensor: Sharding, splits: Iterable[Slots]) -> Shardings:
        """An operand whose atoms are split so."""
        elementary = Sharding(self.mesh, tuple(splits), tensor.pending, singles(term.atoms))
        return Shardings(term.groups, tensor, elementary, elementary)

    def _of_nothing(self, dim: Dim, group: Sequence[str]) -> list[Slots] | None:
        """How the text splits the atoms of an empty dim: any split of nothing is right. None where the text doesn't say
        it, or refers to what the tensor has."""
        if dim.place is not None:
            return None
        places = [f.place for f, atom in zip(dim.factors, group, strict=True) if atom in self.reading.explicit]
        is_written = bool(places) and not any(place is None or "*" in place.names for place in places)
        return [self.named(factor.place) for factor in dim.factors] if is_written else None

    def _declared(self, term: Term) -> Sharding:
        """How a plain tensor is sharded, by its declaration."""
        for factor in term.factors:
            # What isn't declared isn't known. A rank alone has all of it.
            is_open = factor.place is not None and "*" in factor.place.names
            if is_open and factor.name not in self.reading.result.atoms and self.mesh.size > 1:
                raise ExpressionError(
                    f"a plain tensor doesn't say what splits '{factor.name}', over which the sum would be resolved; "
                    "write its axes in place of '*'",
                    self.reading.text,
                    *factor.span,
                )
        dims = [
            self.named(dim.place) if dim.place else self.joined(group, [self.named(f.place) for f in dim.factors])
            for dim, group in zip(term.dims, term.groups, strict=True)
        ]
        return Sharding(self.mesh, tuple(dims), self.declared_pending(term), term.groups)

    def declared_pending(self, term: Term) -> Pending:
        """What a term says is pending, and over which axes its gradient is the same."""
        entries = [(p, p.place.names) for p in term.spec.pending or () if p.place]
        for p in [p for p, _ in entries if p.op == "same" and self.is_global]:
            message = "'same' is about gradients of plain tensors; a DTensor has none"
            raise ExpressionError(message, self.reading.text, *p.span)
        return tuple((p.op, layout) for p, names in entries for layout in self.mesh.splits(names))

    def _written(self, factor: Factor, behind: Place | None, has: Slots) -> Slots:
        """How the text splits an atom that has this split; `*` is what it has beside the axes that the text names."""
        atom = str(factor.name)
        if behind is not None or atom not in self.reading.explicit:
            return has
        axes = factor.place.names if factor.place else ("*",) if atom in self.reading.starred else ()
        if "*" not in axes:
            return self.named(factor.place)
        # `h@(* cp)`: `*` is what h has beside cp.
        at, star = axes.index("*"), has.layouts
        front, back = self.mesh.splits(axes[:at]), self.mesh.splits(axes[at + 1 :])
        if front or back:
            mine = self.digits.of(star)
            rest = mine[len(self.digits.of(front)) : len(mine) - len(self.digits.of(back))]
            star = self.mesh.parts(Layout._joined(rest))
        beside, _ = self.stars.setdefault(atom, ((front, back), star))
        if beside != (front, back):
            message = f"'*' of '{atom}' is beside other axes in another operand"
            raise ExpressionError(message, self.reading.text, *factor.span)
        return split(*front, *star, *back) if front or back else has

    def _is_pending_as_written(self, term: Term, pending: Pending) -> bool:
        """Whether what the text mentions is pending exactly where the left says so."""
        says = {(op, digit) for op, axis in self.declared_pending(term) for digit in self.digits.of((axis,))}
        every = {(op, digit) for op, axis in pending for digit in self.digits.of((axis,))}
        is_whole = term.spec.pending == ()
        return term.keeps_any or says == {entry for entry in every if is_whole or entry[1] in self.mentioned}

    def _mismatch(self, number: int, has: Shardings) -> NoReturn:
        """Rule 2 is broken: both, one line each, and what to write."""
        terms = self.reading.operands
        which = f"operand {number + 1}" if len(terms) > 1 else "the tensor"
        raise ShardingError(
            f"{which} isn't sharded as the left side says\n"
            f"  says  {terms[number].spec}\n"
            f"  has   {has.text()}\n"
            f"in  {self.reading.text}\n"
            f"write '{has.text()}' on the left, or axes.reshard it before"
        )

    # what the operands say together

    def _common(self) -> dict[str, Slots]:
        """How each atom of the operands is split; rule 3 forbids to make it so."""
        uses = list[tuple[str, Layout]]()
        for number, operand in enumerate(self.operands, 1):
            uses += [(f"splits '{atom}'", layout) for atom, state in operand.splits for layout in state.layouts]
            for op, layout in operand.tensor.pending:
                if self.reading.kind == "einsum" and op not in (*LINEAR, "same"):
                    self._conflict(f"a pending {op} can't be multiplied; resolve it first")
                uses += [(f"is pending in operand {number}", layout)] if op != "same" else []
        shared = self.digits.shared(uses)
        if shared:
            layout, one, two = shared
            self._conflict(
                f"'{self.mesh.called(layout)}' {one} and {two}, and an axis splits one name of all operands or is "
                "pending in one of them"
            )
        found: dict[str, tuple[Slots, int]] = {}
        for number, operand in enumerate(self.operands):
            for atom, state in operand.splits:
                first, other = found.setdefault(atom, (state, number))
                if not same_cuts(first, state, self.sizes[atom]):
                    self._disagree(atom, (first, other), (state, number))
        return {atom: state for atom, (state, _) in found.items()}

    def _disagree(self, atom: str, one: tuple[Slots, int], other: tuple[Slots, int]) -> NoReturn:
        if one[1] == other[1]:
            raise ShardingError(
                f"a diagonal needs '{atom}' unsplit in both places\n  has   {self.operands[one[1]].text()}\n"
                f"in  {self.reading.text}\naxes.reshard the tensor before"
            )
        has, (_, bare) = (one, other) if one[0].layouts else (other, one)
        wanted = self.operands[bare].text({atom: split(*has[0].layouts)})
        raise ShardingError(
            f"the operands disagree on '{atom}': {self.place_of(atom, one[0])} and {self.place_of(atom, other[0])}\n"
            f"{self.lines()}\nin  {self.reading.text}\naxes.reshard operand {bare + 1} to '{wanted}' before"
        )

    def lines(self) -> str:
        """The operands as they are, a line each."""
        if len(self.operands) == 1:
            return f"  has   {self.operands[0].text()}"
        return "\n".join(f"  operand {number}  {operand.text()}" for number, operand in enumerate(self.operands, 1))

    def place_of(self, atom: str, state: Slots) -> str:
        """An atom with its place, quoted as one writes it."""
        text = slots_text(self.mesh, state, names_of([atom], state))
        return text if len(state) > 1 else f"'{text}'"

    def _conflict(self, message: str) -> NoReturn:
        advice = "axes.reshard one of them before" if len(self.operands) > 1 else "axes.reshard it before"
        raise ShardingError(f"{message}\n{self.lines()}\nin  {self.reading.text}\n{advice}")
