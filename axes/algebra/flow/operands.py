"""Operands: what the tensors of an expression are, before the local computation.

Rule 1 hands the splits of dims down to atoms, rule 2 compares them with what the left side says, and rule 3
has all operands say the same of an atom that they share. A plain tensor is what the left side says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from axes.algebra.errors import MeshError, ShardingError, SizeError
from axes.algebra.flow.reading import Mark, Reading, Term, TermDim, atom_text, names_of
from axes.algebra.flow.recipe import Shape
from axes.algebra.grammar import Item
from axes.algebra.layout import Layout, Mode
from axes.algebra.mesh import Mesh
from axes.algebra.sharding import LINEAR, Pending, Sharding, Slots, layouts_text, pending_text, same_cuts, slots_text
from axes.algebra.sizes import Product, given_sizes, solve
from axes.algebra.splits import Digits, handed_down, of_names, split

Layouts = tuple[Layout, ...]


@dataclass(frozen=True)
class Operand:
    """How an operand is split, dim by dim and atom by atom, and what is pending; of a plain tensor also what is the
    same."""

    number: int
    term: Term
    dims: tuple[Slots, ...]
    atoms: tuple[Slots, ...]
    pending: Pending

    @property
    def splits(self) -> list[tuple[str, Slots]]:
        """The atoms in order, and how each is split."""
        return [*zip(self.term.atoms, self.atoms, strict=True)]

    def text(self, mesh: Mesh) -> str:
        """The operand as it is, in the names of the expression and of a mesh."""
        atoms = [slots_text(mesh, slots, names_of([atom], slots)) for atom, slots in self.splits]
        texts = []
        for slot, dim in zip(self.term.slots, self.dims, strict=True):
            inner = " ".join([atoms.pop(0) for _ in slot.marks])
            one = "1" + (f"@{layouts_text(mesh, dim.layouts)}" if dim.layouts else "")
            texts.append({0: one, 1: inner}.get(len(slot.marks), f"({inner})"))
        return " ".join([*texts, *(["|", pending_text(mesh, self.pending)] if self.pending else [])])


class Operands:
    """The tensors of one expression as it finds them: sizes, how atoms are split, what is pending.

    sizes: the whole size of each atom. assumed: atoms whose size a plain shard alone says. splits: what all operands
    say of an atom. stars: what `*` stands for on the left, by atom.
    """

    def __init__(
        self,
        reading: Reading,
        mesh: Mesh,
        shardings: Sequence[Sharding | None],
        shapes: Sequence[Shape],
        given: tuple[tuple[str, Any], ...],
    ):
        self.reading, self.mesh, self.actual = reading, mesh, shardings
        self.is_global = shardings[0] is not None
        written = mesh.splits(reading.axes)
        self.digits = Digits(mesh, [*written, *[each for s in shardings if s is not None for each in s.used]])
        self.mentioned = frozenset(self.digits.of(written))
        self.assumed: set[str] = set()
        self.sizes = self._sizes(shapes, dict(given))
        self._stars: dict[str, list[Layouts]] = {}
        self.operands = [self._operand(number, shape) for number, shape in enumerate(shapes)]
        self.stars = {atom: found[0] for atom, found in self._stars.items()}
        self.splits = self._common()

    # sizes

    def _sizes(self, shapes: Sequence[Shape], given: dict[str, Any]) -> dict[str, int]:
        reading = self.reading
        known = given_sizes(given, None, [Item(*pair) for pair in reading.inline], reading.names)
        known |= {atom: int(atom_text(atom)) for atom in reading.atoms if "#" in atom}
        wholes = dict(reading.wholes)
        known |= {
            whole: math.prod(known[n] for n in inner) for whole, inner in wholes.items() if known.keys() >= {*inner}
        }
        equations = []
        for number, (term, shape) in enumerate(zip(reading.operands, shapes, strict=True)):
            for dim, (slot, extent) in enumerate(zip(term.slots, shape, strict=True)):
                count = 1 if self.is_global else math.prod(self.mesh.layout(axis).size for _, axis, _ in slot.uses)
                open_ = [atom for atom in slot.atoms if atom not in known]
                # A plain shard of a known size may be uneven; it is checked against its rank's share.
                if count == 1 or open_:
                    self.assumed.update(open_ if count > 1 else ())
                    where = f"dim {dim} of {list(shape)}" + (f", operand {number + 1}" if len(shapes) > 1 else "")
                    equations.append(Product(slot.atoms, (), extent * count, f"{where}, in  {reading.text}"))
        found = solve(equations, known)
        for atom in reading.atoms:
            inner = wholes.get(atom, (atom,))
            if atom not in found:
                name = next(name for name in inner if name not in known)
                raise SizeError(
                    f"the size of '{name}' isn't known from any tensor; give it, like {name}=2\nin  {reading.text}"
                )
            if found[atom] % math.prod(known.get(name, 1) for name in inner if atom in wholes):
                parts = " * ".join(f"{name}={known[name]}" for name in inner if name in known)
                raise SizeError(f"{found[atom]} isn't a multiple of  {parts}  for {atom} in  {reading.text}")
        return found

    def extent(self, slot: TermDim) -> int:
        """The whole size of a dim."""
        return math.prod(self.sizes[atom] for atom in slot.atoms)

    def joined(self, slot: TermDim, splits: Sequence[Slots]) -> Slots:
        """The dim whose atoms are split so."""
        try:
            return of_names([*zip(splits, map(self.sizes.__getitem__, slot.atoms), strict=True)])
        except ShardingError:
            uneven = [pair for pair in zip(slot.atoms, splits, strict=True) if self.sizes[pair[0]] % pair[1].pieces]
            atom, (part,) = uneven[0]
            text = slots_text(self.mesh, Slots((replace(part, size=self.sizes[atom]),)), (atom_text(atom),))
            raise ShardingError(
                f"{text} is split into {part.pieces} uneven parts inside {slot}, and a split factor of a group must "
                f"divide\nin  {self.reading.text}"
            ) from None

    def handed_down(self, dim: Slots, slot: TermDim, advice: str) -> list[Slots]:
        """How the atoms of a dim are split; `ShardingError` where its split doesn't fall on them."""
        found = handed_down(dim, [self.sizes[atom] for atom in slot.atoms])
        if found is None:
            sizes = " ".join(f"{atom_text(atom)}={self.sizes[atom]}" for atom in slot.atoms)
            raise ShardingError(
                f"{layouts_text(self.mesh, dim.layouts)} splits {slot} into {dim.pieces} parts that don't fall "
                f"on its names: ({sizes})\nin  {self.reading.text}\n{advice}, or choose sizes that divide"
            )
        return found[: len(slot.atoms)]  # a scalar's dim has no names

    def named(self, axes: Any) -> Layouts:
        """Axes by their names, `*` left out."""
        return self.mesh.splits(axis for axis in axes or () if axis != "*")

    # rules 1 and 2: what each operand's atoms are

    def _operand(self, number: int, shape: Shape) -> Operand:
        term, actual = self.reading.operands[number], self.actual[number]
        if actual is None:
            dims = tuple(map(self._declared, term.slots))
            pending = self.declared_pending(term)
        else:
            dims, pending = actual.dims, actual.pending
        splits = [
            self._said(slot) or self.handed_down(dim, slot, f"axes.reshard it to '{slot}' before")
            for dim, slot in zip(dims, term.slots, strict=True)
        ]
        has = Operand(number, term, dims, tuple(state for each in splits for state in each), pending)
        if actual is None:
            self._check_local(has, shape)
        else:
            self._assert_pending(has)
        found = []
        for slot, dim, each in zip(term.slots, dims, splits, strict=True):
            if slot.axes is not None and not same_cuts(dim, split(*self.named(slot.axes)), self.extent(slot)):
                self._mismatch(has)
            found += [self._asserted(has, slot, *pair) for pair in zip(slot.marks, each, strict=True)]
        return replace(has, atoms=tuple(found))

    def _said(self, slot: TermDim) -> list[Slots] | None:
        """How the text says that the atoms of an empty dim are split: of nothing every word is true. None where it
        says nothing, or refers to what the tensor has."""
        if self.extent(slot) or slot.axes is not None:
            return None
        places = [mark.axes for mark in slot.marks if mark.atom in self.reading.explicit]
        is_told = bool(places) and not any(axes is None or "*" in axes for axes in places)
        return [split(*self.named(mark.axes)) for mark in slot.marks] if is_told else None

    def _declared(self, slot: TermDim) -> Slots:
        """How a dim of a plain tensor is split."""
        if slot.axes is not None:
            return split(*self.named(slot.axes))
        return self.joined(slot, [split(*self.named(mark.axes)) for mark in slot.marks])

    def declared_pending(self, term: Term) -> Pending:
        """What a term says is pending, and over which axes its gradient is the same."""
        if self.is_global:
            for p in term.pending or ():
                if p.op == "same":
                    self.reading.fail("'same' is about gradients of plain tensors; a DTensor has none", p.span)
        places = [(p.op, p.place.names) for p in term.pending or () if p.place]
        return tuple((op, layout) for op, names in places for layout in self.mesh.splits(names))

    def _check_local(self, has: Operand, shape: Shape) -> None:
        """A plain tensor is the shard that the declaration says this rank has."""
        for mark in (mark for slot in has.term.slots for mark in slot.marks):
            # What isn't declared isn't known. A rank alone has all of it.
            if "*" in (mark.axes or ()) and mark.atom not in self.reading.result.atoms and self.mesh.size > 1:
                self.reading.fail(
                    f"a plain tensor doesn't say what splits '{mark.atom}', over which the sum would be resolved; "
                    "write its axes in place of '*'",
                    mark.span,
                )
        if self.mesh.coordinate is None:
            raise MeshError(
                f"rank {self.mesh.rank} isn't in {self.mesh!r}, so it has no shard\nin  {self.reading.text}"
            )
        whole = tuple(map(self.extent, has.term.slots))
        expected = Sharding(self.mesh, has.dims).local_shape(whole)
        if expected != tuple(shape):
            raise SizeError(
                f"the shard of {list(whole)} on rank {self.mesh.rank} is {list(expected)} by "
                f"'{has.term.text}'; found {list(shape)}\nin  {self.reading.text}"
            )

    def _asserted(self, has: Operand, slot: TermDim, mark: Mark, state: Slots) -> Slots:
        """How an atom is split, once it is held against what the text says of it."""
        atom, axes = mark.atom, mark.axes
        if slot.axes is not None or atom not in self.reading.explicit:
            return state
        if axes == ("*",) or (axes is None and atom in self.reading.starred):
            self._stars.setdefault(atom, []).append(state.layouts)
            return state
        wanted = self.named(axes)
        if axes and "*" in axes:
            # `h@(* cp)`: `*` is what h has beside cp.
            at, have = axes.index("*"), self.digits.of(state.layouts)
            front, back = (self.named(some) for some in (axes[:at], axes[at:]))
            rest = have[len(self.digits.of(front)) : len(have) - len(self.digits.of(back))]
            if (*self.digits.of(front), *rest, *self.digits.of(back)) != have:
                self._mismatch(has)
            star = self.mesh.parts(Layout.of(rest))
            self._stars.setdefault(atom, []).append(star)
            wanted = (*front, *star, *back)
        found = split(*wanted)
        if not same_cuts(state, found, self.sizes[atom]):
            self._mismatch(has)
        return found

    def _assert_pending(self, has: Operand) -> None:
        """What the text mentions is pending exactly where the left says so."""
        declared, term = self.declared_pending(has.term), has.term
        if term.keeps_any:
            return
        says = {(op, digit) for op, axis in declared for digit in self.digits.of((axis,))}
        every = {(op, digit) for op, axis in has.pending for digit in self.digits.of((axis,))}
        if says != {entry for entry in every if term.pending == () or entry[1] in self.mentioned}:
            self._mismatch(has)

    def _mismatch(self, has: Operand) -> NoReturn:
        """Rule 2 is broken: both, one line each, and what to write."""
        which = f"operand {has.number + 1}" if len(self.actual) > 1 else "the tensor"
        raise ShardingError(
            f"{which} isn't sharded as the left side says\n"
            f"  says  {has.term.text}\n"
            f"  has   {has.text(self.mesh)}\n"
            f"in  {self.reading.text}\n"
            f"write '{has.text(self.mesh)}' on the left, or axes.reshard it before"
        )

    # what the operands say together

    def _common(self) -> dict[str, Slots]:
        """How each atom of the operands is split; rule 3 forbids to make it so."""
        found: dict[str, tuple[Slots, Operand]] = {}
        self._check_pending()
        for operand in self.operands:
            for atom, state in operand.splits:
                first, other = found.setdefault(atom, (state, operand))
                if not same_cuts(first, state, self.sizes[atom]):
                    self._disagree(atom, (first, other), (state, operand))
        for atom, bound in self._stars.items():
            for axes in bound:
                if self.digits.of(axes) != self.digits.of(bound[0]):
                    one, two = (layouts_text(self.mesh, each) for each in (bound[0], axes))
                    places = f"{one} in one place, {two} in another"
                    self.reading.fail(f"'*' of '{atom}' is {places}", self.reading.span_of(atom))
        splits = {atom: state for atom, (state, _) in found.items()}
        owner: dict[Mode, str] = {}
        for atom, layout in [(atom, layout) for atom, state in splits.items() for layout in state.layouts]:
            for digit in self.digits.of((layout,)):
                if owner.setdefault(digit, atom) != atom:
                    self._conflict(f"'{self.mesh.called(layout)}' is wanted by '{owner[digit]}' and by '{atom}'")
        return splits

    def _disagree(self, atom: str, one: tuple[Slots, Operand], other: tuple[Slots, Operand]) -> NoReturn:
        if one[1] is other[1]:
            raise ShardingError(
                f"a diagonal needs '{atom}' unsplit in both places\n  has   {one[1].text(self.mesh)}\n"
                f"in  {self.reading.text}\naxes.reshard the tensor before"
            )
        has, bare = (one, other) if one[0].layouts else (other, one)
        atoms = tuple([split(*has[0].layouts) if name == atom else had for name, had in bare[1].splits])
        raise ShardingError(
            f"the operands disagree on '{atom}': {self.place_of(atom, one[0])} and {self.place_of(atom, other[0])}\n"
            f"{self.lines()}\nin  {self.reading.text}\n"
            f"axes.reshard operand {bare[1].number + 1} to '{replace(bare[1], atoms=atoms).text(self.mesh)}' before"
        )

    def lines(self) -> str:
        """The operands as they are, a line each."""
        if len(self.operands) == 1:
            return f"  has   {self.operands[0].text(self.mesh)}"
        return "\n".join(f"  operand {operand.number + 1}  {operand.text(self.mesh)}" for operand in self.operands)

    def place_of(self, atom: str, state: Slots) -> str:
        """An atom with its place, quoted as one writes it."""
        text = slots_text(self.mesh, state, names_of([atom], state))
        return text if len(state) > 1 else f"'{text}'"

    def _check_pending(self) -> None:
        """In an einsum a digit is pending in one operand, and the others are replicated over it."""
        if self.reading.kind != "einsum":
            return
        every = [pair for operand in self.operands for pair in operand.splits]
        splits = {digit: atom for atom, state in every for digit in self.digits.of(state.layouts)}
        waiting: dict[Mode, int] = {}
        for number, op, layout in [(each.number + 1, *entry) for each in self.operands for entry in each.pending]:
            axis = self.mesh.called(layout)
            if op not in (*LINEAR, "same"):
                self._conflict(f"a pending {op} can't be multiplied; resolve it first")
            for digit in self.digits.of((layout,)) if op != "same" else ():
                if digit in splits:
                    self._conflict(f"'{axis}' splits '{splits[digit]}' and is pending in operand {number}")
                if (before := waiting.setdefault(digit, number)) != number:
                    self._conflict(
                        f"operands {before} and {number} are both pending over '{axis}', "
                        "and a product of sums isn't a sum of products"
                    )

    def _conflict(self, message: str) -> NoReturn:
        advice = "axes.reshard one of them before" if len(self.operands) > 1 else "axes.reshard it before"
        raise ShardingError(f"{message}\n{self.lines()}\nin  {self.reading.text}\n{advice}")
