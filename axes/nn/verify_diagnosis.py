"""What a tensor of a parallel program is, where it isn't the tensor of one device.

    held = Parts(Mesh("tp=2"), {0: Piece(x0), 1: Piece(x1)})
    diagnosed(held, whole, Tolerance(1e-9, 0.0)).text           # "pending over tp (its sum is right)"

Nothing here runs a process. A layout, which is a `Sharding` of the small mesh, says which part of the whole tensor each
rank should have. A DTensor says its own layout; for a plain tensor each layout is tried that its shape allows. In a
layout, all that the ranks have and all that they should have are two vectors, and a diagnosis is a relation between
them: a multiple, a sum over some axes, a bias that is added too often.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import torch

from axes.algebra.mesh import Mesh
from axes.algebra.sharding import Sharding

Indices = slice | tuple[slice, ...]

TRUTH = torch.int8
"""The dtype that truth values have here, in which their differences can be computed. Integers are int64."""

MOST_FACTORS = 8
"""Rows are looked for in orders of at most so many pieces per rank."""


@dataclass(frozen=True)
class Piece:
    """A tensor as one rank has it.

    shape, index: for a DTensor the whole's shape, and for each dim the indices of it that the rank has. known: for each
    axis of the DTensor's mesh what is pending over it, "sum", "avg", ..., or "" for nothing.
    """

    local: torch.Tensor
    shape: tuple[int, ...] | None = None
    index: tuple[Indices, ...] | None = None
    known: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tolerance:
    """How far two numbers may be apart: `absolute`, and `relative` times the tensor's largest value."""

    relative: float
    absolute: float

    def close(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether two tensors have one shape and are the same but for rounding.

        Elements that are the very same in both, as the -1e9 of a mask, don't tell how large an error others may have.
        """
        if x.shape != y.shape:
            return False
        error = error_of(x, y)
        return error <= self.absolute or error <= self.absolute + self.relative * largest_of(y.masked_fill(x == y, 0))


def is_rounded(x: torch.Tensor) -> bool:
    """Whether a tensor has rounding errors: integers and truth values have none."""
    return x.is_floating_point() or x.is_complex()


def error_of(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference; infinite where one is infinite or no number, and the other isn't the same."""
    if not x.numel():
        return 0.0
    same = torch.isnan(x) & torch.isnan(y) | (x == y)
    return float((x - y).abs().masked_fill(same, 0).nan_to_num(nan=math.inf, posinf=math.inf).max())


def largest_of(x: torch.Tensor) -> float:
    """The largest finite value, by its size."""
    return float(x.abs().nan_to_num(nan=0.0, posinf=0.0).max()) if x.numel() else 0.0


@dataclass(frozen=True)
class Parts:
    """A tensor as the ranks of a small mesh have it, by rank. A parameter of a pipeline stage is on some of them."""

    mesh: Mesh
    pieces: Mapping[int, Piece]

    @cached_property
    def places(self) -> dict[int, dict[str, int]]:
        """The coordinates of the ranks that have the tensor."""
        return {rank: self.mesh.at(rank).coordinate or {} for rank in self.pieces}

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes along which more than one rank has the tensor."""
        return tuple(a for a in self.mesh.axis_names if len({place[a] for place in self.places.values()}) > 1)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The axes of more than one rank and their sizes."""
        return {name: size for name, size in self.mesh.shape.items() if size > 1}

    @cached_property
    def first(self) -> Piece:
        """The piece of one rank: all ranks say the same of what is pending."""
        return next(iter(self.pieces.values()))

    @cached_property
    def pending(self) -> dict[str, str]:
        """The axes over which a DTensor says that it is pending, with the reduction."""
        return {axis: op for axis, op in self.first.known.items() if op and axis in self.axes}

    @property
    def is_plain(self) -> bool:
        """Whether it is no DTensor."""
        return self.first.shape is None

    @cached_property
    def split(self) -> tuple[str, ...]:
        """The axes along which a DTensor says that ranks have different parts."""
        return tuple(
            a for a in self.axes if any(self.pieces[i].index != self.pieces[j].index for i, j in self.pairs(a))
        )

    def plain(self) -> Parts:
        """The same tensors without what they say of themselves."""
        return Parts(self.mesh, {rank: Piece(piece.local) for rank, piece in self.pieces.items()})

    def groups(self, over: Iterable[str]) -> list[list[int]]:
        """The ranks, in groups whose coordinates differ along these axes alone."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in self.places.items():
            found.setdefault(tuple(i for axis, i in place.items() if axis not in over), []).append(rank)
        return list(found.values())

    def pairs(self, axis: str) -> Iterator[tuple[int, int]]:
        """The first rank of each group along an axis, with each of the others."""
        return ((ranks[0], rank) for ranks in self.groups([axis]) for rank in ranks[1:])

    def differing(self, tolerance: Tolerance) -> tuple[str, ...]:
        """The axes along which ranks have different values."""
        value = {rank: piece.local for rank, piece in self.pieces.items()}
        return tuple(a for a in self.axes if any(not tolerance.close(value[j], value[i]) for i, j in self.pairs(a)))

    def vectors(
        self, layout: Sharding, whole: torch.Tensor, pending: Mapping[str, str]
    ) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """For each group of ranks its tensor, reduced over the axes of `pending`, and the part of `whole` that the
        layout gives it; None where they aren't of one shape."""
        found = []
        for ranks in self.groups(pending):
            piece, x = self.pieces[ranks[0]], _part(whole, layout.local_indices(tuple(whole.shape), ranks[0]))
            if piece.index is not None:
                if tuple(x.shape) != piece.shape:
                    return None
                x = _part(x, piece.index)
            if any(self.pieces[rank].local.shape != x.shape for rank in ranks):
                return None
            stacked, ops = torch.stack([self.pieces[rank].local for rank in ranks]), set(pending.values())
            reduction = _REDUCTIONS.get(ops.pop(), torch.sum) if len(ops) == 1 else torch.sum
            found.append((reduction(stacked, 0), x))
        return found

    def layouts(self, shape: Sequence[int], orders: bool = False) -> Iterator[Sharding]:
        """The layouts over the axes of which the tensor says nothing, the plainest first.

        With `orders` also rows that don't lie one after the other: an axis splits a factor of a dim.
        """
        axes = [axis for axis in self.axes if axis not in self.first.known]
        for dims in itertools.product(range(-1, len(shape)), repeat=len(axes)):
            split = [[a for a, d in zip(axes, dims, strict=True) if d == dim] for dim in range(len(shape))]
            for chosen in itertools.product(*map(itertools.permutations, split)):
                places = [f"@({' '.join(each)})" if each else "" for each in chosen]
                yield self.mesh.sharding(" ".join(f"_{place}" for place in places))
                for dim in range(len(shape)) if orders else ():
                    pieces = math.prod(self.sizes[axis] for axis in chosen[dim])
                    for n in range(2, MOST_FACTORS + 1) if pieces > 1 else ():
                        if shape[dim] % (n * pieces) == 0:
                            dim_texts = [f"(x={n} y{p})" if d == dim else f"_{p}" for d, p in enumerate(places)]
                            yield self.mesh.sharding(" ".join(dim_texts))

    def fitting(
        self, whole: torch.Tensor, tolerance: Tolerance, orders: bool = False, among: Iterable[Sharding] | None = None
    ) -> list[Sharding]:
        """The layouts, of all or of those `among`, in which the tensor is right and pending only where it says so."""
        return [
            layout
            for layout in (self.layouts(tuple(whole.shape), orders) if among is None else among)
            for found in (self.vectors(layout, whole, self.pending),)
            if found is not None and all(tolerance.close(x, y) for x, y in found)
        ]

    def is_share(self, whole: torch.Tensor, tolerance: Tolerance) -> bool:
        """Whether a plain scalar is a rank's share of a loss or of a count: its sum or mean over some axes is right.

        Shares of a loss differ between the ranks: a loss that is the same on all of them was reduced already.
        """
        if whole.ndim or not self.is_plain or whole.dtype == TRUTH:
            return False
        layout = self.mesh.sharding("")
        return any(
            all(tolerance.close(x, y) for x, y in self.vectors(layout, whole, dict.fromkeys(axes, op)) or [])
            for axes in subsets(self.differing(tolerance) if is_rounded(whole) else self.axes)
            for op in (("sum", "avg") if is_rounded(whole) else ("sum",))
        )


_REDUCTIONS = {"avg": torch.mean, "mean": torch.mean, "max": torch.amax, "min": torch.amin}


def _part(x: torch.Tensor, index: Sequence[Indices]) -> torch.Tensor:
    for dim, where in enumerate(index):
        runs = where if isinstance(where, tuple) else (where,)
        parts = [x.narrow(dim, run.start, run.stop - run.start) for run in runs]
        x = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return x


def subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every set of some of the axes, small ones first."""
    return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(1, len(axes) + 1))


# --- what a wrong tensor is


@dataclass(frozen=True)
class Mismatch:
    """One tensor that isn't the one device's.

    kind: of the relation to the right one, in a word. text: what the tensor is instead. axes, factor: over which mesh
    axes, and how many times the right one, where that is known. name: of the parameter, module or output. what:
    "module", "gradient", "every gradient", "output", "value", "stepped" (a value that began right) or "random" (numbers
    drawn before what differs).
    """

    kind: str
    text: str
    axes: tuple[str, ...] = ()
    factor: float | None = None
    name: str = ""
    what: str = ""

    def __str__(self) -> str:
        """One line: `blocks.0.norm.weight: its gradient is pending over tp (its sum is right)`."""
        text, names = self.text, words(self.axes)
        if self.axes and self.kind in ("factor", "every", "added"):
            text += f" over {names}"
        of_loss = self.kind == "every" or (self.what == "output" and self.kind in ("factor", "pending"))
        if self.axes and self.factor and of_loss:
            too_large = abs(self.factor) > 1
            cause = f"a mean over {names} is missing" if too_large else f"it is divided by {names} once too often"
            text += f", as where {cause}"
        return f"{self.name}: {_BEGINNINGS.get(self.what, '')}{text}"


_BEGINNINGS = {
    "module": "its output is ",
    "gradient": "its gradient is ",
    "value": "its value, before anything was trained, is ",
    "stepped": "its value, after the program, is ",
}


def diagnosed(
    held: Parts,
    whole: torch.Tensor,
    tolerance: Tolerance,
    added: Mapping[str, torch.Tensor] | None = None,
    among: Sequence[Sharding] | None = None,
) -> Mismatch:
    """What a tensor is that isn't right: the simplest relation to the right one that holds.

    added: tensors that could have been added to it, by name. among: the only layouts allowed, those of a parameter's
    value.
    """
    relations = _Relations(held, whole, tolerance, added or {})
    pairs = list(_pairs(held, whole, among))
    for relation in (
        relations.summed,
        relations.multiple,
        relations.right_on_some,
        relations.multiple_sum,
        relations.plus,
    ):
        for pair in pairs:
            found = relation(pair)
            if found is not None:
                return found
    if all(tolerance.close(piece.local, whole) for piece in held.pieces.values()):
        return Mismatch("whole", "whole where it should be split", held.split)
    for layout in held.plain().fitting(whole, tolerance, orders=True):
        dims = [dim for dim, slots in enumerate(layout.dims) if slots.layouts]
        if dims:
            along = f"dim{'s' if len(dims) > 1 else ''} {words(map(str, dims))}"
            axes = tuple(held.mesh.called(each) for each in layout.used)
            return Mismatch("order", f"rows in another order along {along} (as '{layout.spec}')", axes)
    if pairs:
        return relations.unknown(min(_relative(pair.x, pair.y) for pair in pairs))
    shapes = sorted({tuple(p.local.shape) if p.shape is None else p.shape for p in held.pieces.values()})
    text = f"of shape {words(str(list(shape)) for shape in shapes)} where it should be {list(whole.shape)}"
    return Mismatch("shape", f"{text}, or parts of that")


class _Pair(NamedTuple):
    """All that the ranks have in a layout, summed over the axes of `pending`, and all that they should have."""

    pending: tuple[str, ...]
    layout: Sharding
    x: torch.Tensor
    y: torch.Tensor
    sizes: list[int]


def _pairs(held: Parts, whole: torch.Tensor, among: Iterable[Sharding] | None) -> Iterator[_Pair]:
    """Every layout with every set of axes that could be pending, the fewest of them first."""
    layouts = list(held.layouts(whole.shape) if among is None else among)
    possible = [] if whole.dtype == TRUTH else [axis for axis in held.axes if axis not in held.pending]
    for axes in [(), *subsets(possible)]:
        summed = held.mesh.splits(axes)
        for layout in layouts:
            pending = held.pending | dict.fromkeys(axes, "sum")
            found = None if set(summed) & set(layout.used) else held.vectors(layout, whole, pending)
            if found is not None:
                x, y = (torch.cat([each.flatten() for each in side]) for side in zip(*found, strict=True))
                yield _Pair(axes, layout, x, y, [each.numel() for each, _ in found])


def _relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return error_of(x, y) / (largest_of(y) or 1.0)


@dataclass(frozen=True)
class _Relations:
    """What a pair may be, one method for each relation; none of them finds anything where the pair isn't that."""

    held: Parts
    whole: torch.Tensor
    tolerance: Tolerance
    added: Mapping[str, torch.Tensor]

    def has_summands(self, pair: _Pair) -> bool:
        """Whether ranks may have summands. Values that are the same on all of them are parts of the right one."""
        return set(pair.pending) <= set(self.held.differing(self.tolerance))

    def summed(self, pair: _Pair) -> Mismatch | None:
        """Right once it is summed."""
        if not pair.pending or not self.tolerance.close(pair.x, pair.y) or not self.has_summands(pair):
            return None
        return Mismatch("pending", f"pending over {words(pair.pending)} (its sum is right)", pair.pending)

    def factor(self, pair: _Pair) -> float | None:
        """How many times the right one it is, where that says something: one number is a multiple of any other."""
        factor = factor_between(pair.x, pair.y, self.tolerance, self.held.sizes)
        if factor is None or abs(factor - 1) <= max(self.tolerance.relative, 1e-6 * (not is_rounded(pair.y))):
            return None  # most of the tensor is right
        numbers = pair.y[torch.isfinite(pair.y) & (pair.y != 0)]
        known = any(math.isclose(factor, ratio, rel_tol=1e-6) for ratio in _ratios(self.held.sizes))
        telling = numbers.numel() > 1 and not self.tolerance.close(numbers, numbers[:1].expand(numbers.shape))
        return factor if known or telling else None

    def multiple(self, pair: _Pair) -> Mismatch | None:
        """A multiple of the right one."""
        factor = None if pair.pending else self.factor(pair)
        if factor is None:
            return None
        axes = axes_of_factor(factor, self.held.sizes)
        return Mismatch("factor", times_text(factor), axes[0] if len(axes) == 1 else (), factor)

    def right_on_some(self, pair: _Pair) -> Mismatch | None:
        """Right on some ranks and wrong at some coordinates of axes."""
        if pair.pending or self.held.pending:
            return None
        parts = zip(self.held.pieces, pair.x.split(pair.sizes), pair.y.split(pair.sizes), strict=True)
        wrong = {rank for rank, x, y in parts if not self.tolerance.close(x, y)}
        if len(wrong) == len(self.held.pieces) or min(pair.sizes) < 2:
            return None
        places = [self.held.places[rank] for rank in wrong]
        there = {axis: sorted({place[axis] for place in places}) for axis in self.held.axes}
        axes = tuple(a for a, i in there.items() if len(i) < len({place[a] for place in self.held.places.values()}))
        if not axes or len(wrong) < math.prod(map(len, there.values())):
            return None
        at = words(f"coordinate {' or '.join(map(str, there[axis]))} of {axis}" for axis in axes)
        return Mismatch("some", f"right on some ranks, and wrong on those at {at}", axes)

    def multiple_sum(self, pair: _Pair) -> Mismatch | None:
        """Its sum is a multiple of the right one."""
        if not pair.pending or not self.has_summands(pair):
            return None
        over, ranks = f"pending over {words(pair.pending)}", math.prod(self.held.sizes[a] for a in pair.pending)
        if self.tolerance.close(pair.x, ranks * pair.y):
            return Mismatch("pending", f"{over} (its mean is right)", pair.pending, float(ranks))
        factor = self.factor(pair)
        if factor is None:
            return None
        return Mismatch("scaled", f"{over}, and its sum is {times_text(factor)}", pair.pending, factor)

    def plus(self, pair: _Pair) -> Mismatch | None:
        """Right but that something is added another number of times."""
        if not self.whole.ndim or not self.has_summands(pair):
            return None
        pending = self.held.pending | dict.fromkeys(pair.pending, "sum")
        for name, each in self.added.items():
            if not each.numel() or each.shape != self.whole.shape[self.whole.ndim - each.ndim :]:
                continue
            found = self.held.vectors(pair.layout, each.expand(self.whole.shape), pending)
            own = torch.cat([part.flatten() for _, part in found or ()])
            more = factor_between(pair.x - pair.y, own, self.tolerance, {})
            times = 1 + round(more or 0)
            if more is None or not self.tolerance.close(pair.x, pair.y + (times - 1) * own):
                continue
            over = [axes for axes in subsets(self.held.axes) if math.prod(self.held.sizes[a] for a in axes) == times]
            axes = pair.pending or (over[0] if len(over) == 1 else ())
            if pending:
                says = f"{words(pair.pending)}," if pair.pending else f"{words(pending)}, as it says,"
                return Mismatch("summed", f"pending over {says} and {name} is {times} times in its sum", axes, times)
            text = f"right but that {name} is added {times} times" if times else f"without {name}"
            return Mismatch("added", text, axes, times)
        return None

    def unknown(self, error: float) -> Mismatch:
        """None of these relations."""
        held, about = self.held, f"largest relative difference {error:.0e}"
        finite = all(bool(torch.isfinite(piece.local).all()) for piece in held.pieces.values())
        if error == math.inf and not (finite and bool(torch.isfinite(self.whole).all())):
            there = "not infinite, or no number, where the one device's is"
            return Mismatch("none", "not finite" if bool(torch.isfinite(self.whole).all()) else there)
        if all(not largest_of(piece.local) for piece in held.pieces.values()):
            return Mismatch("zero", "zero on every rank", (), 0.0)
        apart = {*held.pending, *held.split}
        differs = tuple(axis for axis in held.differing(self.tolerance) if axis not in apart)
        shapes = {tuple(piece.local.shape) if piece.shape is None else piece.shape for piece in held.pieces.values()}
        if differs and shapes == {tuple(self.whole.shape)}:
            text = (
                f"not the same on the ranks of {words(differs)}, where it should be; no sum of theirs is right either"
            )
            return Mismatch("differs", f"{text} ({about})", differs)
        if held.pending:
            reduced = words(dict.fromkeys(_REDUCED.get(op, op) for op in held.pending.values()))
            return Mismatch(
                "none", f"pending over {words(held.pending)}, as it says, but its {reduced} is wrong ({about})"
            )
        return Mismatch("none", f"none of these: {about}")


_REDUCED = {"avg": "mean", "max": "maximum", "min": "minimum"}
"""The names of a reduction's result, where they aren't the reduction's own."""


def factor_between(x: torch.Tensor, y: torch.Tensor, tolerance: Tolerance, sizes: Mapping[str, int]) -> float | None:
    """The number by which `y` is multiplied in `x`, if any; a ratio of sizes where rounding leaves a choice."""
    if not is_rounded(y):
        if max(largest_of(x), largest_of(y)) > _LARGEST_INTEGER:
            return None
        x, y, tolerance = x.double(), y.double(), Tolerance(0.0, 0.25)
    same = ~torch.isfinite(y) & (torch.isnan(x) & torch.isnan(y) | (x == y))
    x, y = x.masked_fill(same, 0), y.masked_fill(same, 0)
    large_x, large_y = largest_of(x), largest_of(y)
    if not bool(torch.isfinite(x).all()) or not bool(torch.isfinite(y).all()) or not large_x or not large_y:
        return None
    for ratio in _ratios(sizes):
        if tolerance.close(x, ratio * y):
            return ratio
    u, v = x / large_x, y / large_y  # squares of what is very large or small would be infinite, or zero
    times = float((u * v.conj()).sum().real) / float((v * v.conj()).sum().real)
    factor = times * (large_x / large_y)
    close = error_of(u, times * v) * large_x <= tolerance.absolute + tolerance.relative * abs(times) * large_x
    return factor if close and 1e-6 < abs(factor) < math.inf else None


_LARGEST_INTEGER = 2**53
"""Double precision doesn't tell larger integers apart, and sums of much larger ones overflow."""


def _ratios(sizes: Mapping[str, int]) -> list[float]:
    """By what a tensor is multiplied where it is summed over the wrong axes: products of sizes, and their quotients."""
    products = {math.prod(sizes[axis] for axis in axes) for axes in [(), *subsets(list(sizes))]}
    return sorted({a / b for a in products for b in products} - {1.0}, key=lambda ratio: abs(math.log(ratio)))


# --- words


def axes_of_factor(factor: float, sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The smallest sets of axes of whose sizes the factor, or one divided by it, is the product."""
    products = {axes: math.prod(sizes[axis] for axis in axes) for axes in subsets(list(sizes))}
    found = [
        a for a, n in products.items() if n > 1 and any(math.isclose(f, n, rel_tol=1e-6) for f in (factor, 1 / factor))
    ]
    return [axes for axes in found if len(axes) == min(map(len, found))]


def times_text(factor: float) -> str:
    """`2 times too large`, `2 times too small`; `15/16 of the right one` for what is no whole number."""
    if factor < 0:
        return "negative" if abs(factor + 1) < 1e-6 else f"{factor:.4g} times the right one"
    if abs(factor - 1) < 1e-4:
        return f"too {'large' if factor > 1 else 'small'} by {abs(factor - 1):.0e} of itself"
    for times, how in ((factor, "large"), (1 / factor, "small")):
        if times > 1.5 and abs(times / round(times) - 1) < 1e-6:
            return f"{round(times)} times too {how}"
    near = Fraction(factor).limit_denominator(512)
    return f"{near if abs(float(near) / factor - 1) < 1e-6 else f'{factor:.6g}'} of the right one"


def words(names: Iterable[str]) -> str:
    """`dp`, `dp and tp`, `dp, cp and tp`."""
    each = list(names)
    return "".join(each) if len(each) < 2 else f"{', '.join(each[:-1])} and {each[-1]}"
