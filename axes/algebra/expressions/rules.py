"""The four rules: what an expression means for tensors that are sharded as they are.

1. What is annotated is explicit, what isn't flows.
2. The left side is an assertion (for a plain tensor: a declaration).
3. Data moves only where the right side differs from the left.
4. Nothing is left pending that the expression doesn't name.

`recipe` below reads top to bottom: the expression, the mesh that its result lies on, the sizes of atoms, and how the
operands are split and pending (`Operands`): rule 1 hands the splits of dims down to atoms, rule 2 compares them with
the left side, which is all that is known of a plain tensor, and rule 3 has all operands say the same of an atom that
they share. Then come what is pending after the local computation, what the right side wants, and the recipe.

An expression may name axes of the ambient mesh that the tensors' own mesh has under other names or as parts
of its axes, but each of them is made of the axes that the tensors are on, and is used once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from axes.algebra.errors import ExpressionError, MeshError, ShardingError, SizeError, naming, pointed, unknown_axis
from axes.algebra.expressions.reading import Reading, Term, atom_text, group_text, is_name, is_number, read
from axes.algebra.expressions.recipe import Recipe, Shardings, singles
from axes.algebra.grammar import Dim, Factor, Place, axes_of_dim
from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import (
    EXTREMES,
    LINEAR,
    Pending,
    Sharding,
    Slots,
    check_once,
    layouts_text,
    names_of,
    pending_text,
    same_cuts,
    slots_text,
)
from axes.algebra.sizes import Product, Shape, given_sizes, solve
from axes.algebra.splits import Digits, handed_down, of_names, split

Layouts = tuple[Layout, ...]

REDUCTIONS = ("sum", "mean", "max", "min", "prod", "any", "all")
"""The reductions by name; those that are `LINEAR` or `EXTREMES` also across ranks."""


def recipe(
    kind: str,
    text: str,
    op: str,
    shardings: tuple[Sharding | None, ...],
    shapes: tuple[Shape, ...],
    mesh: Mesh,
    sizes: tuple[tuple[str, Any], ...] = (),
) -> Recipe:
    """What the expression does to tensors with these shardings (None: plain tensors) and shapes.

    `shapes` are whole shapes where there is a sharding, else those of the local tensors. `mesh` is
    where names are looked up. Raises `ExpressionError`, `SizeError`, `MeshError` or `ShardingError`
    before anything happens.

    >>> mesh = Mesh("cp=2 tp=2")
    >>> print(recipe("rearrange", "b s@cp (h d) -> b s h@cp d", "", (None,), ((4, 8, 12),), mesh, (("h", 6),)))
    b s@cp (h d) -> b s h@cp d
      operand 1  b s@cp (h d)  ->  b s@cp h d    [4, 16, 12]
      result     b s@cp h d  ->  b s h@cp d    [4, 16, 6, 2]
    """
    reading = read(kind, text, tuple(map(len, shapes)))
    with naming(text):
        result_mesh = _mesh_of_result(reading, mesh, shardings)
        actual = tuple(
            [None if s is None else s.on(result_mesh).sized(n) for s, n in zip(shardings, shapes, strict=True)]
        )
        whole, assumed = sizes_of_atoms(reading, result_mesh, actual[0] is not None, shapes, dict(sizes))
        found = _kept(
            result_mesh.rank,
            reading,
            result_mesh,
            actual,
            tuple(_small(reading, result_mesh, actual, whole).items()),
            op,
        )
    found = replace(found, sizes=whole)
    if kind == "reduce" and assumed:
        found = replace(found, counted=_counted(found, reading, assumed))
    for operand, term, shape in zip(found.inputs, reading.operands, shapes, strict=True) if actual[0] is None else ():
        extents = found.whole(operand.groups)
        expected = operand.tensor.local_shape(extents)
        if expected != tuple(shape):
            raise SizeError(
                f"the shard of {list(extents)} on rank {result_mesh.rank} is {list(expected)} by "
                f"'{term.spec}'; found {list(shape)}\nin  {text}"
            )
    return found


def _small(
    reading: Reading, mesh: Mesh, shardings: Sequence[Sharding | None], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Sizes with the same recipe.

    An atom that is a dim by itself wherever it stands meets no other size, and all that a recipe asks of its own is
    whether splits divide it. They divide every multiple of the number of ranks: twice that stands for all of these.
    """
    pairs = [(atom, shardings[operand], dim) for operand, dim, atom in reading.alone]
    own = {atom for atom, s, dim in pairs if s is not None and not s.dims[dim].is_plain}
    alone = {atom for atom, _, _ in pairs} - own
    return {
        atom: 2 * mesh.size if atom in alone and size > 1 and size % mesh.size == 0 else size
        for atom, size in sizes.items()
    }


def _counted(found: Recipe, reading: Reading, assumed: Collection[str]) -> tuple[Layout, ...]:
    """The layouts along which ranks count together what they reduce: plain shards don't show the whole size of it.

    They can't count what stays pending, nor where a split falls in a group of names: that depends on how much they
    have, which each knows of itself alone.
    """
    (operand,), (term,), kept = found.inputs, reading.operands, {*found.result.atoms}
    open_ = [atom for atom in reading.atoms if atom in assumed and atom not in kept]
    counted = [layout for atom, state in operand.splits if open_ and atom not in kept for layout in state.layouts]
    stays = [layout for op, layout in found.result.elementary.pending if op != "same"]
    groups = [group for dim, group in zip(term.dims, term.groups, strict=True) if dim.place is not None]
    is_apart = any(len(group) > 1 and not kept.issuperset(group) for group in groups)
    if found.op == "mean" and open_ and (is_apart or any(a.overlaps(b) for a in stays for b in counted)):
        names = [name for atom in open_ for name in reading.wholes.get(atom, (atom,)) if is_name(name)]
        raise SizeError(
            f"a mean that stays pending, or is over names of a split group, needs the whole size of "
            f"{' and '.join(map(repr, open_))}, and a shard shows this rank's part alone\nin  {reading.text}\n"
            f"give it as a keyword: {', '.join(f'{name}=...' for name in names)}"
        )
    return tuple(dict.fromkeys(counted))


@functools.lru_cache(maxsize=4096)
def _kept(
    _: int,
    reading: Reading,
    mesh: Mesh,
    shardings: tuple[Sharding | None, ...],
    sizes: tuple[tuple[str, int], ...],
    op: str,
) -> Recipe:
    """The recipe for tensors whose atoms have these sizes, kept for a rank."""
    _check_axes(reading, mesh)
    return _Result(Operands(reading, mesh, shardings, dict(sizes)), op).recipe()


# --- the mesh that the result lies on, and what the axes of the text mean there


def _mesh_of_result(reading: Reading, mesh: Mesh, shardings: Sequence[Sharding | None]) -> Mesh:
    """The mesh that the result lies on, knowing the names of the expression."""
    meshes = list(dict.fromkeys(s.mesh for s in shardings if s is not None))
    for name in reading.axes:
        if name not in mesh.namespace and not any(name in m.namespace for m in meshes):
            places = [place for term in reading.terms for _, place in term.spec.places if name in place.names]
            raise MeshError(f"{unknown_axis(name, mesh.namespace)}\n{pointed(reading.text, *places[0].span)}")
    if not meshes:
        return mesh
    first = meshes[0]
    other = next((m for m in meshes[1:] if m.universe != first.universe or m.layouts != first.layouts), None)
    if other is not None:
        raise MeshError(
            f"the tensors are on two meshes, {first!r} and {other!r}; bring both onto one that has the axes of both: "
            "axes.reshard(x, spec, mesh=...) moves a tensor to other ranks, and "
            f"axes.from_local(axes.to_local(x), spec, mesh=...) takes it to more axes of the same\nin  {reading.text}"
        )
    if mesh.universe != first.universe:
        raise MeshError(f"the tensor is on {first!r}, which has other ranks than {mesh!r}\nin  {reading.text}")
    return first._knowing(mesh, [name for name in reading.axes if name in mesh.namespace])


def _check_axes(reading: Reading, mesh: Mesh) -> None:
    """Every axis is made of the mesh's axes, and none is used twice, whatever its size."""
    for name in reading.axes:
        layout = mesh.namespace[name]
        if name not in mesh.axis_names and not mesh.layout_of_all.contains(layout):
            raise MeshError(
                f"axis '{name}' ({layout}) isn't made of the axes of {mesh!r}, on which the tensor is; "
                f"axes.from_local or axes.reshard with mesh= brings it onto one that has it\nin  {reading.text}"
            )
    for term in reading.terms:
        check_once(mesh, reading.text, term.spec)


# --- the operands: what tensors are before the local computation


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
        return tuple([math.prod(map(self.sizes.__getitem__, group)) for group in groups])

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
            named = self.digits.of((*front, *back))
            rest = [digit for digit in self.digits.of(star) if digit not in named]
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
                f"'{self.mesh.called(layout)}' {one} and {two}, and an axis splits only one name, in all operands "
                "together, or is pending in one of them"
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


# --- what the four rules make of it


class _Result:
    """What the expression makes of its operands: what is left pending, what the right side wants, and the recipe.

    listed: what the right side names as pending. gone: the atoms that the result lacks. split: these with the axes that
    split them. resolved: the digits over which the right side decides what stays pending: those that the text mentions,
    and those of `f@*` on the left where f is summed away.
    """

    def __init__(self, has: Operands, op: str):
        self.has, self.op = has, op
        self.reading, self.mesh, self.digits = has.reading, has.mesh, has.digits
        self.listed = has.declared_pending(self.reading.result)
        self.gone = [atom for atom in has.splits if atom not in self.reading.result.atoms]
        self.split = [(atom, layout) for atom in self.gone for layout in has.splits[atom].layouts]
        stars = [layout for atom in self.gone if atom in has.stars for layout in has.stars[atom][1]]
        self.resolved = has.mentioned | frozenset(self.digits.of(stars))

    # rule 4: what is pending

    def _kept(self, operand: Shardings) -> list[tuple[str, Layout]]:
        """What is pending in an operand as it is computed on. What is the same becomes an ordinary replica there, but
        for a rearrangement: it commutes with communication, so that all of it happens at once, later."""
        return [entry for entry in operand.tensor.pending if entry[0] != "same" or self.reading.kind == "rearrange"]

    def _check_passes(self, inherited: Sequence[tuple[str, Layout]]) -> None:
        """Pending values pass only reductions that commute with theirs."""
        for op, layout in inherited if self.reading.kind == "reduce" else ():
            if op != self.op and not {op, self.op} <= LINEAR:
                clause = pending_text(self.mesh, [(op, layout)])
                raise ShardingError(
                    f"'{self.op}' doesn't pass a pending {op}\n{self.has.lines()}\n"
                    f"in  {self.reading.text}\nresolve it first: '| {clause}' on the left of a rearrange"
                )

    def _arising(self) -> list[tuple[str, Layout]]:
        """What the local computation leaves pending."""
        if self.split and self.op not in LINEAR | EXTREMES:
            atom = self.split[0][0]
            place = layouts_text(self.mesh, self.has.splits[atom].layouts)
            raise ShardingError(
                f"'{self.op}' doesn't reduce across ranks, and {place} splits '{atom}'\n"
                f"{self.has.lines()}\n"
                f"in  {self.reading.text}\ngather it first: '{atom}@{place}' on the left of a rearrange"
            )
        if self.op != "mean":
            return [(self.op, layout) for _, layout in self.split]
        # Ranks have shares, which add up; a mean is pending as a mean where the text says so, and shards are even.
        means = {*self.digits.of([layout for op, layout in self.listed if op == "mean"])}
        found = [("sum" if means.isdisjoint(self.digits.of((each,))) else "mean", each) for _, each in self.split]
        states = [(self.has.splits[atom], self.has.sizes[atom]) for atom in self.gone]
        uneven = any(len(state) == 1 and size % state.pieces for state, size in states)
        for _, layout in [entry for entry in found if entry[0] == "mean" and uneven]:
            raise ShardingError(
                f"a mean over uneven shards isn't the mean of their means\n{self.has.lines()}\n"
                f"in  {self.reading.text}\n"
                f"write '| sum@{self.mesh.called(layout)}' on the right; it pends as local sums over the whole size"
            )
        return found

    def _target_pending(
        self, derived: list[tuple[str, Layout]], arising: list[tuple[str, Layout]]
    ) -> Sequence[tuple[str, Layout]]:
        """What the right side leaves pending, in the order of resolution; and what it calls the same."""
        term = self.reading.result
        if term.keeps_any:
            return derived
        if term.spec.pending == ():
            return []
        self._check_arising(arising)
        digits = {(op, digit) for op, axis in derived for digit in self.digits.of((axis,))}
        for op, axis in self.listed:
            if op != "same" and not digits.issuperset((op, digit) for digit in self.digits.of((axis,))):
                keeps, has = pending_text(self.mesh, [(op, axis)]), pending_text(self.mesh, derived) or "nothing"
                raise ShardingError(
                    f"the right side keeps {keeps}, but the result has {has} pending\n{self.has.lines()}\n"
                    f"in  {self.reading.text}\nwrite '| *' to keep what arises"
                )
        rest = [(op, axis, frozenset(self.digits.of((axis,))) - self.resolved) for op, axis in derived]
        return [*((op, name) for op, axis, free in rest if free for name in self.digits.pick(axis, free)), *self.listed]

    def _check_arising(self, arising: list[tuple[str, Layout]]) -> None:
        """Rule 4: a result that would be left pending without a word."""
        hidden = [(op, axis) for op, axis in arising if not self.resolved.issuperset(self.digits.of((axis,)))]
        if hidden:
            clause, axes = pending_text(self.mesh, hidden), {axis for _, axis in hidden}
            atoms = dict.fromkeys(atom for atom, axis in self.split if axis in axes)
            at = ", ".join(self.has.place_of(atom, self.has.splits[atom]) for atom in atoms)
            raise ShardingError(
                f"the result would be left pending: {clause}\n{self.has.lines()}\nin  {self.reading.text}\n"
                f"write {at} on the left to have it reduced, or '| {clause}' or '| *' on the right to keep it"
            )

    # rule 3: what the right side wants

    def _target(self) -> dict[str, Slots]:
        """How each atom of the result is split."""
        found: dict[str, Slots] = {}
        for dim, group in zip(self.reading.result.dims, self.reading.result.groups, strict=True):
            splits = [self._wanted(atom, factor.place) for atom, factor in zip(group, dim.factors, strict=True)]
            if dim.place is not None:
                advice = f"write '{group_text(group)}' on the right, and split the result in a second call"
                splits = self.has.handed_down(self.has.named(dim.place), group, advice)
            found.update(zip(group, splits, strict=True))
        return found

    def _wanted(self, atom: str, place: Place | None) -> Slots:
        has = self.has.splits.get(atom, split())
        if place is None:
            return split() if atom in self.reading.explicit and atom not in self.reading.starred else has
        star = self.has.stars[atom][1] if atom in self.has.stars else has.layouts
        if place.names == ("*",) and star == has.layouts:
            return has
        if "*" in place.names and len(has) > 1:
            message = f"'{atom}' is split by one of its factors; '*' has no place to add to"
            raise ExpressionError(message, self.reading.text, *self.reading.span_of(atom))
        every = [star if axis == "*" else self.mesh.splits((axis,)) for axis in place.names]
        return split(*itertools.chain(*every))

    def _check_target(self, atoms: dict[str, Slots], pending: Sequence[tuple[str, Layout]]) -> None:
        """No digit twice in the result; where one flows into a place that the text gave away, say so."""
        uses = [(atom, axis) for atom, state in atoms.items() for axis in state.layouts]
        shared = self.digits.shared([*uses, *((f"| {op}", axis) for op, axis in pending)])
        if shared:
            axis, *both = shared
            flowing = [each for each in reversed(both) if each in self.has.splits and each not in self.reading.explicit]
            advice = "write the split of both"
            if flowing:
                written = self.has.place_of(flowing[0], self.has.splits[flowing[0]])
                advice = f"'{flowing[0]}' came split over it: write {written} on the left to have it moved"
            raise ShardingError(
                f"'{self.mesh.called(axis)}' would split '{both[0]}' and '{both[1]}'\n{self.has.lines()}\n"
                f"in  {self.reading.text}\n{advice}"
            )

    # the recipe

    def recipe(self) -> Recipe:
        """The steps, once everything that the four rules forbid has been refused."""
        reading, has, result = self.reading, self.has, self.reading.result
        every = [entry for operand in has.operands for entry in self._kept(operand)]
        inherited = [entry for entry in every if entry[0] != "same"]
        self._check_passes(inherited)
        arising = self._arising()
        pending = self._target_pending([*inherited, *arising], arising)
        target = self._target()
        self._check_target(target, pending)
        wanted = self._by_atoms(result.atoms, target, pending)
        if reading.kind == "repeat":
            # What repeat adds is made where it belongs: communicate before there is more of it.
            inputs = [replace(i, computed=self._by_atoms(i.atoms, target, pending)) for i in has.operands]
            computed = wanted
        else:
            inputs = [replace(i, computed=self._by_atoms(i.atoms, has.splits, self._kept(i))) for i in has.operands]
            computed = self._by_atoms(result.atoms, has.splits, [*every, *arising])
        dims = [has.joined(group, [target[atom] for atom in group]) for group in result.groups]
        tensor = Sharding(self.mesh, tuple(dims), tuple(pending), result.groups)
        if has.is_global:
            check_torch_can(tensor, has.whole(result.groups))
        multiplier = math.prod(layout.size for op, layout in arising if op == "mean")
        return Recipe(
            reading.kind,
            reading.text,
            self.mesh,
            self.op,
            has.sizes,
            tuple(inputs),
            Shardings(result.groups, tensor, wanted, computed),
            reading.kind == "reduce" and self.op == "mean",
            multiplier,
        )

    def _by_atoms(
        self, atoms: Sequence[str], splits: Mapping[str, Slots], pending: Iterable[tuple[str, Layout]]
    ) -> Sharding:
        return Sharding(self.mesh, tuple([splits[atom] for atom in atoms]), tuple(pending), singles(atoms))
