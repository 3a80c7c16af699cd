"""What a tensor of a parallel program is, where it isn't the tensor of one device.

    held = Parts(Mesh("tp=2"), {0: Piece(x0), 1: Piece(x1)})
    diagnosed(held, whole, Tolerance(1e-9, 0.0)).text           # "pending over tp (its sum is right)"

Nothing here runs a process. A layout, which is a `Sharding` of the small mesh, says which part of the whole tensor each
rank should have. A DTensor says its own layout; for a plain tensor each layout is tried that its shape allows. In a
layout, all that the ranks have, summed over the axes that may be pending, and all that they should have are two
vectors. A diagnosis is a relation between them: equal, a multiple, or off by a bias that is added too often.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from axes import Mesh, Sharding

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

    @property
    def places(self) -> dict[int, dict[str, int]]:
        """The coordinates of the ranks that have the tensor."""
        return {rank: self.mesh.at(rank).coordinate or {} for rank in self.pieces}

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which more than one rank has the tensor."""
        places = self.places.values()
        return tuple(a for a in self.mesh.axis_names if len({place[a] for place in places}) > 1)

    @property
    def first(self) -> Piece:
        """The piece of one rank: all ranks say the same of what is pending."""
        return next(iter(self.pieces.values()))

    @property
    def pending(self) -> dict[str, str]:
        """The axes over which a DTensor says that it is pending, with the reduction."""
        return {axis: op for axis, op in self.first.known.items() if op and axis in self.axes}

    @property
    def is_plain(self) -> bool:
        """Whether it is no DTensor."""
        return self.first.shape is None

    def groups(self, over: Iterable[str]) -> list[list[int]]:
        """The ranks, in groups whose coordinates differ along these axes alone."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in self.places.items():
            found.setdefault(tuple(i for axis, i in place.items() if axis not in over), []).append(rank)
        return list(found.values())

    def differing(self, tolerance: Tolerance) -> tuple[str, ...]:
        """The axes along which ranks have different values. Of a DTensor different parts don't count."""

        def differ(one: Piece, two: Piece) -> bool:
            return one.index == two.index and not tolerance.close(one.local, two.local)

        pieces = {axis: [[self.pieces[rank] for rank in ranks] for ranks in self.groups([axis])] for axis in self.axes}
        return tuple(axis for axis in self.axes if any(differ(each, own[0]) for own in pieces[axis] for each in own))

    def vectors(
        self, layout: Sharding, whole: torch.Tensor, over: Sequence[str] = ()
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """All that the ranks have, reduced over what is pending and summed `over` further axes, and the part of `whole`
        that the layout gives them; None where these aren't of one shape."""
        have, want = [], []
        for ranks in self.groups([*self.pending, *over]):
            piece, x = self.pieces[ranks[0]], elements_at(whole, layout.local_indices(tuple(whole.shape), ranks[0]))
            if piece.index is not None:
                if tuple(x.shape) != piece.shape:
                    return None
                x = elements_at(x, piece.index)
            locals_, ops = [self.pieces[rank].local for rank in ranks], {*self.pending.values(), *("sum" for _ in over)}
            if any(each.shape != x.shape for each in locals_):
                return None
            reduction = _REDUCTIONS.get(ops.pop(), torch.sum) if len(ops) == 1 else torch.sum
            have.append(reduction(torch.stack(locals_), 0).flatten())
            want.append(x.flatten())
        return torch.cat(have), torch.cat(want)

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
                    pieces = math.prod(self.mesh.shape[axis] for axis in chosen[dim])
                    for n in range(2, MOST_FACTORS + 1) if pieces > 1 else ():
                        if shape[dim] % (n * pieces) == 0:
                            dim_texts = [f"(x={n} y{p})" if d == dim else f"_{p}" for d, p in enumerate(places)]
                            yield self.mesh.sharding(" ".join(dim_texts))

    def fitting(
        self, whole: torch.Tensor, tolerance: Tolerance, among: Iterable[Sharding] | None = None, orders: bool = False
    ) -> list[Sharding]:
        """The layouts, of all or of those `among`, in which the tensor is right and pending only where it says so.

        With `orders` rows may lie in another order, where the tensor is right in no plain layout.
        """
        layouts = self.layouts(whole.shape) if among is None else among
        pairs = ((layout, self.vectors(layout, whole)) for layout in layouts)
        found = [layout for layout, pair in pairs if pair is not None and tolerance.close(*pair)]
        return self.fitting(whole, tolerance, self.layouts(whole.shape, True)) if orders and not found else found

    def is_share(self, whole: torch.Tensor, tolerance: Tolerance) -> bool:
        """Whether a plain scalar is a rank's share of a loss or of a count: its sum or mean over some axes is right.

        Shares of a loss differ between the ranks: a loss that is the same on all of them was reduced already.
        """
        if whole.ndim or not self.is_plain or whole.dtype == TRUTH:
            return False
        for axes in subsets(self.differing(tolerance) if is_rounded(whole) else self.axes):
            x, y = self.vectors(self.mesh.sharding(""), whole, axes) or (whole, whole)
            ranks = math.prod(self.mesh.shape[axis] for axis in axes)
            if tolerance.close(x, y) or (is_rounded(y) and tolerance.close(x / ranks, y)):
                return True
        return False


_REDUCTIONS = {"avg": torch.mean, "mean": torch.mean, "max": torch.amax, "min": torch.amin}


def elements_at(x: torch.Tensor, index: Sequence[Indices]) -> torch.Tensor:
    """The elements of a tensor at the indices of a rank, dim by dim."""
    for dim, where in enumerate(index):
        runs = where if isinstance(where, tuple) else (where,)
        x = torch.cat([x.narrow(dim, run.start, run.stop - run.start) for run in runs], dim)
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
    "module", "gradient", "every gradient", "output", "value", "stepped" (a value that began right) or "dropout".
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
        if self.axes and self.kind in ("factor", "added"):
            text += f" over {names}"
            if self.kind == "factor" and self.what in ("output", "every gradient"):
                too_large = abs(self.factor or 0.0) > 1
                cause = f"a mean over {names} is missing" if too_large else f"it is divided by {names} once too often"
                text += f", as where {cause}"
        return f"{self.name}: {_BEGINNINGS.get(self.what, '')}{text}"


_BEGINNINGS = {
    "module": "its output is ",
    "gradient": "its gradient is ",
    "value": "its value, before anything was trained, isn't the one device's (give both the same: parts of one "
    "tensor, or functions that seed both). It is ",
    "stepped": "its value began right, and after the program is ",
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
    differing = held.differing(tolerance)
    pairs = list(_pairs(held, whole, differing, among))
    ratios = _ratios([held.mesh.shape[axis] for axis in held.mesh.axis_names])
    for over, _, x, y in pairs:
        if over and tolerance.close(x, y):
            return Mismatch("pending", f"pending over {words(over)} (its sum is right)", over)
    for over, _, x, y in pairs:
        factor = _telling(factor_between(x, y, tolerance, ratios), y, tolerance, ratios)
        if factor is not None and not over:
            return Mismatch("factor", times_text(factor), _only_axis(held, factor), factor)
        if factor is not None:
            is_mean = math.isclose(factor, math.prod(held.mesh.shape[axis] for axis in over))
            text = " (its mean is right)" if is_mean else f", and its sum is {times_text(factor)}"
            return Mismatch("pending", f"pending over {words(over)}{text}", over, factor)
    for name, each in added.items() if added and whole.ndim else ():
        if each.numel() and each.shape == whole.shape[whole.ndim - each.ndim :]:
            for over, layout, x, y in pairs:
                _, own = held.vectors(layout, each.expand(whole.shape), over) or (x, y)
                times = 1 + round(factor_between(x - y, own, tolerance) or 0)
                if times != 1 and tolerance.close(x, y + (times - 1) * own):
                    text = f"right but that {name} is added {times} times" if times else f"without {name}"
                    text = f"pending over {words(over)} (its sum is {text})" if over else text
                    return Mismatch("summed" if over else "added", text, over or _only_axis(held, times), times)
    if not pairs:
        shapes = sorted({tuple(p.local.shape) if p.shape is None else p.shape for p in held.pieces.values()})
        text = f"of shape {words(str(list(shape)) for shape in shapes)} where it should be {list(whole.shape)}"
        return Mismatch("shape", f"{text}, or parts of that")
    if not any(bool(piece.local.any()) for piece in held.pieces.values()):
        return Mismatch("zero", "zero on every rank", (), 0.0)
    about = f"largest relative difference {min(error_of(x, y) / (largest_of(y) or 1.0) for _, _, x, y in pairs):.0e}"
    apart = tuple(axis for axis in differing if axis not in held.pending)
    if apart and all(tuple(piece.shape or piece.local.shape) == whole.shape for piece in held.pieces.values()):
        text = f"not the same on the ranks of {words(apart)}, where it should be; no sum of theirs is right either"
        return Mismatch("differs", f"{text} ({about})", apart)
    return Mismatch("none", f"different: {about}")


def _pairs(
    held: Parts, whole: torch.Tensor, differing: Sequence[str], among: Iterable[Sharding] | None
) -> Iterator[tuple[tuple[str, ...], Sharding, torch.Tensor, torch.Tensor]]:
    """Every layout with every set of axes that could be pending, the fewest of them first, and both vectors.

    Values that are the same along an axis are copies, and not summands.
    """
    layouts = list(held.layouts(whole.shape) if among is None else among)
    possible = [] if whole.dtype == TRUTH else [axis for axis in differing if axis not in held.pending]
    for over in [(), *subsets(possible)]:
        for layout in layouts:
            if not set(held.mesh.splits(over)) & set(layout.used):
                found = held.vectors(layout, whole, over)
                if found is not None:
                    yield over, layout, *found


def _only_axis(held: Parts, factor: float) -> tuple[str, ...]:
    """The axis over which a tensor is a multiple of the right one: its size says so where there is one alone."""
    sizes = [held.mesh.shape[axis] for axis in held.axes]
    return held.axes if len(sizes) == 1 and factor in (sizes[0], 1 / sizes[0]) else ()


def factor_between(
    x: torch.Tensor, y: torch.Tensor, tolerance: Tolerance, ratios: Sequence[float] = ()
) -> float | None:
    """The number by which `y` is multiplied in `x`, if any; one of `ratios` where rounding leaves a choice."""
    if not is_rounded(y):
        if max(largest_of(x), largest_of(y)) > _LARGEST_INTEGER:
            return None
        x, y, tolerance = x.double(), y.double(), Tolerance(0.0, 0.25)
    same = ~torch.isfinite(y) & (torch.isnan(x) & torch.isnan(y) | (x == y))
    x, y = x.masked_fill(same, 0), y.masked_fill(same, 0)
    large = largest_of(y)
    if not bool(torch.isfinite(x).all()) or not bool(torch.isfinite(y).all()) or not large or not largest_of(x):
        return None
    v = y / large  # squares of what is very large or small would be infinite, or zero
    factor = float((x / large * v.conj()).sum().real) / float((v * v.conj()).sum().real)
    found = next((each for each in (*ratios, factor) if tolerance.close(x, each * y)), None)
    return found if found is not None and 1e-6 < abs(found) < math.inf else None


_LARGEST_INTEGER = 2**53
"""Double precision doesn't tell larger integers apart, and sums of much larger ones overflow."""


def _telling(factor: float | None, y: torch.Tensor, tolerance: Tolerance, ratios: Sequence[float]) -> float | None:
    """A factor that says something: most of a tensor is right near 1, and one number is a multiple of any other."""
    if factor is None or abs(factor - 1) <= max(tolerance.relative, 1e-6 * (not is_rounded(y))):
        return None
    numbers = y[torch.isfinite(y) & (y != 0)]
    is_constant = tolerance.close(numbers, numbers[:1].expand(numbers.shape))
    return None if is_constant and factor not in ratios else factor


def _ratios(sizes: Sequence[int]) -> list[float]:
    """By what a tensor is multiplied where it is summed over the wrong axes: products of sizes, and their quotients."""
    products = {math.prod(chosen) for n in range(len(sizes) + 1) for chosen in itertools.combinations(sizes, n)}
    return sorted({a / b for a in products for b in products} - {1.0}, key=lambda ratio: abs(math.log(ratio)))


# --- words


def times_text(factor: float) -> str:
    """`2 times too large`, `2 times too small`; `0.9375 times the right one` for what is no whole number."""
    for times, how in ((factor, "large"), (1 / factor, "small")):
        if times > 1.5 and abs(times / round(times) - 1) < 1e-6:
            return f"{round(times)} times too {how}"
    return f"{factor:.6g} times the right one"


def words(names: Iterable[str]) -> str:
    """`dp`, `dp and tp`, `dp, cp and tp`."""
    each = list(names)
    return "".join(each) if len(each) < 2 else f"{', '.join(each[:-1])} and {each[-1]}"
