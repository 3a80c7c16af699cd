"""What a tensor of a parallel program is, where it isn't the tensor of one device.

    held = Parts({"tp": 2}, {(0,): Piece(x0), (1,): Piece(x1)})
    diagnosed(held, whole, Tolerance(1e-9, 0.0))           # "pending over tp (its sum is right)"

Nothing here runs a process. `Parts` is a tensor as all ranks have it. A `Cut` says which part of the whole tensor
each rank should have. Where a cut is assumed, what the ranks have (some axes summed) and what they should have
are two vectors, and a diagnosis is a relation between them: equal, a multiple, off by a multiple of a bias.

A DTensor says how it lies. Of a plain tensor nobody does: every cut that its shape allows is tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch

TRUTH = torch.int8
"""The dtype that truth values have here, in which their differences can be computed. Integers are int64."""

Coordinate = tuple[int, ...]
Runs = tuple[tuple[int, int], ...]

MOST_FACTORS = 8
"""Rows are looked for in orders of at most so many pieces per rank."""


@dataclass(frozen=True)
class Piece:
    """A tensor as one rank has it.

    shape, index: for a DTensor the whole's shape, and per dim the runs `(start, stop)` of it that the rank has. known:
    of each axis of the DTensor's mesh what is pending over it, "sum", "avg", ..., or "" for nothing.
    """

    local: torch.Tensor
    shape: tuple[int, ...] | None = None
    index: tuple[Runs, ...] | None = None
    known: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tolerance:
    """How far two numbers may be apart: `absolute`, and `relative` times the tensor's largest value.

    Both are zero for integers and truth values, which are compared exactly.
    """

    relative: float
    absolute: float

    def allows(self, error: float, largest: float) -> bool:
        """Whether an error is within the tolerance of a tensor with this largest value."""
        return error <= self.absolute + self.relative * largest


@dataclass(frozen=True)
class Cut:
    """For each dim the axes that split it, major first, and the order of rows within (`blocks`, see `_rows`)."""

    dims: tuple[tuple[str, ...], ...]
    blocks: tuple[int, ...]

    def __str__(self) -> str:
        """As a spec: `_@(dp cp) (x=3 y@tp)`."""
        return " ".join(map(_dim_text, self.dims, self.blocks)) or "a scalar"


def _dim_text(axes: tuple[str, ...], blocks: int) -> str:
    at = f"@{axes[0]}" if len(axes) == 1 else f"@({' '.join(axes)})" if axes else ""
    if blocks == _ZIGZAG:
        return f"zigzag{at}"
    return f"(x={blocks} y{at})" if blocks > 1 else f"_{at}"


_ZIGZAG = -1
"""Rank i of n has the pieces i and 2n-1-i of 2n, as where causal attention is balanced over context."""


@dataclass(frozen=True)
class Parts:
    """A tensor as all ranks have it, by coordinate on the axes of more than one rank. `sizes`: those axes."""

    sizes: Mapping[str, int]
    pieces: Mapping[Coordinate, Piece]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the tensor is on every rank: a stage's parameter is at one place of `pp` alone."""
        places = [{coordinate[i] for coordinate in self.pieces} for i in range(len(self.sizes))]
        return tuple(name for name, there in zip(self.sizes, places, strict=True) if len(there) > 1)

    @property
    def pending(self) -> dict[str, str]:
        """The axes over which the tensor says that it is pending, with the reduction."""
        piece = next(iter(self.pieces.values()))
        return {name: op for name, op in piece.known.items() if op and name in self.axes}

    @property
    def unsaid(self) -> tuple[str, ...]:
        """The axes of which the tensor doesn't say anything: all of a plain one's."""
        piece = next(iter(self.pieces.values()))
        return tuple(name for name in self.axes if name not in piece.known)

    @property
    def is_plain(self) -> bool:
        """Whether it is no DTensor."""
        return all(piece.shape is None for piece in self.pieces.values())

    def plain(self) -> Parts:
        """The same tensors, forgetting what they say of themselves."""
        return Parts(self.sizes, {place: Piece(piece.local) for place, piece in self.pieces.items()})

    def vector(self, pending: Mapping[str, str]) -> torch.Tensor | None:
        """All ranks' elements, one rank after the other, each reduced over the axes of `pending`."""
        names = list(self.sizes)
        groups: dict[Coordinate, list[torch.Tensor]] = {}
        for place, piece in self.pieces.items():
            key = tuple(-1 if name in pending else i for name, i in zip(names, place, strict=True))
            groups.setdefault(key, []).append(piece.local)
        parts = []
        for group in groups.values():
            if any(x.shape != group[0].shape for x in group):
                return None
            parts.append(_reduced(group, set(pending.values())).flatten())
        return torch.cat(parts)

    def expected(self, cut: Cut, whole: torch.Tensor, pending: Mapping[str, str]) -> torch.Tensor | None:
        """The part of `whole` that each rank has in this cut, in the order of `vector`; None where it can't be."""
        names, seen, parts = list(self.sizes), set(), []
        for place, piece in self.pieces.items():
            key = tuple(-1 if name in pending else i for name, i in zip(names, place, strict=True))
            if key in seen:
                continue
            seen.add(key)
            x = whole
            for dim, (axes, blocks) in enumerate(zip(cut.dims, cut.blocks, strict=True)):
                rows = self._rows(dim, axes, blocks, whole.shape[dim], place)
                if rows is None:
                    return None
                x = x if _is_all(rows, x.shape[dim]) else x.index_select(dim, rows)
            if piece.index is not None and piece.shape is not None:
                if tuple(x.shape) != piece.shape:
                    return None
                for dim, runs in enumerate(piece.index):
                    if runs != ((0, x.shape[dim]),):
                        x = torch.cat([x.narrow(dim, start, stop - start) for start, stop in runs], dim)
            if x.shape != piece.local.shape:
                return None
            parts.append(x.flatten())
        return torch.cat(parts)

    def cuts(self, shape: Sequence[int], orders: bool = False) -> Iterator[Cut]:
        """The cuts that the shapes allow, over the axes of which nothing is said; the plainest come first.

        With `orders` also rows that don't lie one after the other.
        """
        if any(len(_outer(piece)) != len(shape) for piece in self.pieces.values()):
            return
        unsaid = self.unsaid
        ways = [list(self._ways(dim, extent, unsaid, orders)) for dim, extent in enumerate(shape)]
        for chosen in itertools.product(*ways):
            used = [axis for axes, _ in chosen for axis in axes]
            if len(used) == len(set(used)):
                yield Cut(tuple(axes for axes, _ in chosen), tuple(blocks for _, blocks in chosen))

    def _ways(
        self, dim: int, extent: int, unsaid: Sequence[str], orders: bool
    ) -> Iterator[tuple[tuple[str, ...], int]]:
        for count in range(len(unsaid) + 1):
            for axes in itertools.permutations(unsaid, count):
                sizes = self._sizes(dim, axes)
                if sizes is None or sum(sizes.values()) != extent:
                    continue
                yield axes, 1
                if orders and axes and len(set(sizes.values())) == 1:
                    each = next(iter(sizes.values()))
                    yield from ((axes, n) for n in range(2, min(each, MOST_FACTORS) + 1) if each % n == 0)
                    if each % 2 == 0:
                        yield axes, _ZIGZAG

    def _sizes(self, dim: int, axes: tuple[str, ...]) -> dict[Coordinate, int] | None:
        """How long the dim is at each place on the axes; None where that isn't one length."""
        found: dict[Coordinate, int] = {}
        for place, piece in self.pieces.items():
            size = _outer(piece)[dim]
            if found.setdefault(self._on(place, axes), size) != size:
                return None
        return dict(sorted(found.items()))

    def _on(self, place: Coordinate, axes: Sequence[str]) -> Coordinate:
        names = list(self.sizes)
        return tuple(place[names.index(axis)] for axis in axes)

    def _rows(
        self, dim: int, axes: tuple[str, ...], blocks: int, extent: int, place: Coordinate
    ) -> torch.Tensor | None:
        """The indices along a dim that a rank has."""
        sizes = self._sizes(dim, axes)
        if sizes is None or sum(sizes.values()) != extent:
            return None
        mine, order = self._on(place, axes), list(sizes)
        start = sum(sizes[each] for each in order[: order.index(mine)])
        if blocks == 1:
            return torch.arange(start, start + sizes[mine])
        rows = torch.arange(extent)
        if blocks == _ZIGZAG:
            parts = rows.view(2 * len(order), -1)
            return torch.cat([parts[order.index(mine)], parts[-1 - order.index(mine)]])
        return rows.view(blocks, len(order), -1)[:, order.index(mine)].flatten()


def _outer(piece: Piece) -> tuple[int, ...]:
    return tuple(piece.local.shape) if piece.shape is None else piece.shape


def _is_all(rows: torch.Tensor, extent: int) -> bool:
    return len(rows) == extent and bool((rows == torch.arange(extent)).all())


def _reduced(group: Sequence[torch.Tensor], ops: set[str]) -> torch.Tensor:
    stacked = torch.stack(list(group))
    if ops <= {"sum"}:
        return stacked.sum(0)
    if ops <= {"avg", "mean"}:
        return stacked.mean(0)
    return stacked.amax(0) if ops == {"max"} else stacked.amin(0) if ops == {"min"} else stacked.sum(0)


# --- whether a tensor is right


def error_of(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference; infinite where one is infinite or no number, and the other isn't the same."""
    if not x.numel():
        return 0.0
    same = torch.isnan(x) & torch.isnan(y) | (x == y)
    return float((x - y).abs().masked_fill(same, 0).nan_to_num(nan=math.inf, posinf=math.inf).max())


def largest_of(x: torch.Tensor) -> float:
    """The largest finite value, by its size."""
    return float(x.abs().nan_to_num(nan=0.0, posinf=0.0).max()) if x.numel() else 0.0


def is_close(x: torch.Tensor, y: torch.Tensor, tolerance: Tolerance) -> bool:
    """Whether two tensors of one shape are the same but for rounding.

    What is the very same in both, as the -1e9 of a mask, tells nothing of how large an error of the others may be.
    """
    error = error_of(x, y)
    return tolerance.allows(error, 0.0) or tolerance.allows(error, largest_of(y.masked_fill(x == y, 0)))


def is_rounded(x: torch.Tensor) -> bool:
    """Whether a tensor has rounding errors: integers and truth values have none."""
    return x.is_floating_point() or x.is_complex()


def fitting(held: Parts, whole: torch.Tensor, tolerance: Tolerance, orders: bool = False) -> list[Cut]:
    """The cuts in which the tensor is right as it lies, pending only where it says so."""
    x, found = held.vector(held.pending), []
    for cut in held.cuts(tuple(whole.shape), orders):
        y = held.expected(cut, whole, held.pending)
        if x is not None and y is not None and is_close(x, y, tolerance):
            found.append(cut)
    return found


def is_share(held: Parts, whole: torch.Tensor, tolerance: Tolerance) -> bool:
    """Whether a plain scalar is a rank's share of a loss: the sum or the mean over some axes is right.

    Shares differ between the ranks: what is the same on all of them was reduced already. Counts may be the same.
    """
    if whole.ndim or not held.is_plain or whole.dtype == TRUTH:
        return False
    return any(
        (x := held.vector(dict.fromkeys(axes, op))) is not None and is_close(x, whole.expand(x.shape), tolerance)
        for axes in _subsets(differing(held, tolerance) if is_rounded(whole) else held.axes)
        for op in (("sum", "avg") if is_rounded(whole) else ("sum",))
    )


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(1, len(axes) + 1))


# --- what a wrong tensor is


@dataclass(frozen=True)
class Finding:
    """What a tensor is instead of the right one.

    kind: "pending", "scaled" (pending, and its sum is a multiple), "some" (a multiple on some ranks), "factor",
    "counted", "added", "summed", "uses", "order", "whole", "differs", "shape", "zero" or "none". axes: those over which
    it is so, as far as that is known. factor: how many times the right one it is. error: the largest difference,
    relative to the largest value.
    """

    kind: str
    text: str
    axes: tuple[str, ...] = ()
    factor: float | None = None
    error: float = 0.0


@dataclass(frozen=True)
class Clues:
    """What else a tensor could be made of.

    added: parameters that could have been added to it, by name. uses: the gradients by each use of a tied parameter.
    counts: by a text the share of labels that count. cuts: the only ones allowed, those of a parameter's value.
    """

    added: Mapping[str, torch.Tensor] = field(default_factory=dict)
    uses: Mapping[str, torch.Tensor] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    cuts: Sequence[Cut] | None = None


def diagnosed(held: Parts, whole: torch.Tensor, tolerance: Tolerance, clues: Clues | None = None) -> Finding:
    """What a tensor is that isn't right: the simplest relation to the right one that holds."""
    clues = clues or Clues()
    pairs = list(_pairs(held, whole, clues.cuts))
    error = min((_relative(x, y) for _, _, x, y in pairs), default=math.inf)
    for attempt in (_summed, _multiple, _multiple_on_some, _scaled_sum, _plus, _some_uses):
        for pending, cut, x, y in pairs:
            found = attempt(held, _Pair(pending, cut, x, y, whole), tolerance, clues)
            if found is not None:
                return Finding(found.kind, found.text, found.axes, found.factor, error)
    elsewhere = _whole_instead(held, whole, tolerance) or _other_rows(held, whole, tolerance)
    if elsewhere or pairs:
        return elsewhere or _unknown(held, whole, tolerance, error)
    shapes = sorted({_outer(piece) for piece in held.pieces.values()})
    text = f"of shape {words(str(list(shape)) for shape in shapes)} where it should be {list(whole.shape)}"
    return Finding("shape", f"{text}, or parts of that")


@dataclass(frozen=True)
class _Pair:
    """What the ranks have, reduced over `pending`, and what they should have in a cut."""

    pending: tuple[str, ...]
    cut: Cut
    x: torch.Tensor
    y: torch.Tensor
    whole: torch.Tensor


_Pairs = Iterator[tuple[tuple[str, ...], Cut, torch.Tensor, torch.Tensor]]


def _pairs(held: Parts, whole: torch.Tensor, allowed: Sequence[Cut] | None) -> _Pairs:
    """Every cut with every set of axes that could be pending; fewest of them first."""
    cuts = list(held.cuts(tuple(whole.shape)) if allowed is None else allowed)
    possible = [] if whole.dtype == TRUTH else [axis for axis in held.axes if axis not in held.pending]
    for axes in [(), *_subsets(possible)]:
        for cut in cuts:
            if any(axis in axes for dim in cut.dims for axis in dim):
                continue
            pending = held.pending | dict.fromkeys(axes, "sum")
            x, y = held.vector(pending), held.expected(cut, whole, pending)
            if x is not None and y is not None and x.shape == y.shape:
                yield axes, cut, x, y


def _relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return error_of(x, y) / (largest_of(y) or 1.0)


def _summed(held: Parts, pair: _Pair, tolerance: Tolerance, _: Clues) -> Finding | None:
    if not pair.pending or not is_close(pair.x, pair.y, tolerance):
        return None
    if not _has_summands(held, pair, tolerance):
        return None
    return Finding("pending", f"pending over {words(pair.pending)} (its sum is right)", pair.pending)


def _has_summands(held: Parts, pair: _Pair, tolerance: Tolerance) -> bool:
    """Whether ranks may have summands of the right one: what is the same on all of them is rather a part of it."""
    return set(pair.pending) <= set(differing(held, tolerance))


def factor_between(x: torch.Tensor, y: torch.Tensor, tolerance: Tolerance, sizes: Mapping[str, int]) -> float | None:
    """The number by which `y` is multiplied in `x`, if any; a ratio of sizes where rounding leaves a choice."""
    exact = not is_rounded(y)
    if exact:
        x, y = x.double(), y.double()
    same = ~torch.isfinite(y) & (torch.isnan(x) & torch.isnan(y) | (x == y))
    x, y = x.masked_fill(same, 0), y.masked_fill(same, 0)
    if not bool(torch.isfinite(x).all()) or not bool(torch.isfinite(y).all()):
        return None
    large_x, large_y = largest_of(x), largest_of(y)
    if not large_x or not large_y or (exact and max(large_x, large_y) > _LARGEST_INTEGER):
        return None
    u, v = x / large_x, y / large_y  # squares of what is very large or small would be infinite, or zero
    times = float((u * v.conj()).sum().real) / float((v * v.conj()).sum().real)
    factor = times * (large_x / large_y)
    error = error_of(u, times * v)
    close = error * large_x < 0.25 if exact else tolerance.allows(error * large_x, abs(times) * large_x)
    if not close or not 1e-6 < abs(factor) < math.inf:
        return None
    return next((ratio for ratio in _ratios(sizes) if not exact and is_close(x, ratio * y, tolerance)), factor)


_LARGEST_INTEGER = 2**53
"""Double precision doesn't tell larger integers apart, and sums of much larger ones overflow."""


def _ratios(sizes: Mapping[str, int]) -> list[float]:
    """What a tensor is multiplied by where it is summed over the wrong axes: products of sizes, and their quotients."""
    products = {math.prod(sizes[axis] for axis in axes) for axes in [(), *_subsets(list(sizes))]}
    return sorted({a / b for a in products for b in products} - {1.0}, key=lambda ratio: abs(math.log(ratio)))


def _is_telling(factor: float, y: torch.Tensor, tolerance: Tolerance, sizes: Mapping[str, int]) -> bool:
    """Whether a factor says something: a tensor of one number is a multiple of any other one."""
    if abs(factor - 1) <= tolerance.relative:
        return False  # most of the tensor is right
    if any(abs(factor / ratio - 1) < 1e-6 for ratio in _ratios(sizes)):
        return True
    numbers = y[torch.isfinite(y) & (y != 0)]
    return numbers.numel() > 1 and not is_close(numbers, numbers[:1].expand(numbers.shape), tolerance)


def _multiple(held: Parts, pair: _Pair, tolerance: Tolerance, clues: Clues) -> Finding | None:
    factor = None if pair.pending else factor_between(pair.x, pair.y, tolerance, held.sizes)
    if factor is None or (abs(factor - 1) < 1e-6 and not is_rounded(pair.y)):
        return None  # one large integer may be off by one
    for text, share in clues.counts.items():
        for times in (share, 1 / share):
            if abs(factor / times - 1) < 1e-6:
                return Finding("counted", f"{_fraction(factor)} of the right one: {text}", (), factor)
    if not _is_telling(factor, pair.y, tolerance, held.sizes):
        return None
    axes = axes_of_factor(factor, held.sizes)
    return Finding("factor", times_text(factor), axes[0] if len(axes) == 1 else (), factor)


def _multiple_on_some(held: Parts, pair: _Pair, tolerance: Tolerance, _: Clues) -> Finding | None:
    """Whether a tensor is right on some ranks, and a multiple of the right one on the others."""
    sizes = [piece.local.numel() for piece in held.pieces.values()]
    if pair.pending or held.pending or min(sizes) < 2:  # a number is always a multiple of another one
        return None
    factors: dict[Coordinate, float] = {}
    for place, x, y in zip(held.pieces, pair.x.split(sizes), pair.y.split(sizes), strict=True):
        factor = 1.0 if is_close(x, y, tolerance) else factor_between(x, y, tolerance, held.sizes)
        if factor is None or (factor != 1.0 and not _is_telling(factor, y, tolerance, held.sizes)):
            return None
        factors[place] = factor
    wrong = {place: factor for place, factor in factors.items() if factor != 1.0}
    if not wrong or len(wrong) == len(factors):
        return None
    first = next(iter(wrong.values()))
    alike = all(abs(factor / first - 1) < 1e-6 for factor in wrong.values())
    there = [sorted({place[i] for place in factors}) for i in range(len(held.sizes))]
    where = [sorted({place[i] for place in wrong}) for i in range(len(held.sizes))]
    axes = tuple(name for name, every, some in zip(held.sizes, there, where, strict=True) if every != some)
    if len(wrong) != math.prod(map(len, where)) or not axes or not alike:
        text = "right on some ranks, and a multiple of the right one on others"
    else:
        at = dict(zip(held.sizes, where, strict=True))
        ranks = words(f"{axis} is {' or '.join(map(str, at[axis]))}" for axis in axes)
        text = f"{times_text(first)} where {ranks}, and right elsewhere"
    return Finding("some", text, axes)


def _scaled_sum(held: Parts, pair: _Pair, tolerance: Tolerance, _: Clues) -> Finding | None:
    factor = factor_between(pair.x, pair.y, tolerance, held.sizes) if pair.pending else None
    if factor is None or not _has_summands(held, pair, tolerance):
        return None
    over = f"pending over {words(pair.pending)}"
    if abs(factor / math.prod(held.sizes[axis] for axis in pair.pending) - 1) < 1e-6:
        return Finding("pending", f"{over} (its mean is right)", pair.pending, factor)
    if not _is_telling(factor, pair.y, tolerance, held.sizes):
        return None
    return Finding("scaled", f"{over}, and its sum is {times_text(factor)}", pair.pending, factor)


def _plus(held: Parts, pair: _Pair, tolerance: Tolerance, clues: Clues) -> Finding | None:
    if not _has_summands(held, pair, tolerance):
        return None
    for name, parameter in clues.added.items():
        if not pair.whole.ndim or parameter.ndim > pair.whole.ndim or not parameter.numel():
            continue
        try:
            spread = parameter.expand(pair.whole.shape)
        except RuntimeError:  # of another shape
            continue
        pending = held.pending | dict.fromkeys(pair.pending, "sum")
        added = held.expected(pair.cut, spread, pending)
        more = None if added is None else factor_between(pair.x - pair.y, added, tolerance, {})
        if added is None or more is None:
            continue
        times = round(more) + 1
        if not is_close(pair.x, pair.y + (times - 1) * added, tolerance):
            continue
        over = [axes for axes in _subsets(held.axes) if math.prod(held.sizes[a] for a in axes) == times]
        axes = pair.pending or (over[0] if len(over) == 1 else ())
        if pair.pending or held.pending:
            over_which = f"{words(pair.pending)}," if pair.pending else f"{words(held.pending)}, as it says,"
            text = f"pending over {over_which} and {name} is {times} times in its sum"
            return Finding("summed", text, tuple(axes), times)
        text = f"right but that {name} is added {times} times" if times else f"without {name}"
        return Finding("added", text, tuple(axes), times)
    return None


def _some_uses(_: Parts, pair: _Pair, tolerance: Tolerance, clues: Clues) -> Finding | None:
    names = list(clues.uses)
    for kept in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(1, len(names))):
        y = sum(clues.uses[name] for name in kept)
        assert isinstance(y, torch.Tensor)
        expected = _.expected(pair.cut, y, _.pending | dict.fromkeys(pair.pending, "sum"))
        if expected is None or not is_close(pair.x, expected, tolerance):
            continue
        missing = [name for name in names if name not in kept]
        over = f", pending over {words(pair.pending)}" if pair.pending else ""
        text = (
            f"that through {words(kept)} alone: the use in {words(missing)} isn't counted, though both are one tied "
            f"weight{over}"
        )
        return Finding("uses", text, pair.pending)
    return None


def _whole_instead(held: Parts, whole: torch.Tensor, tolerance: Tolerance) -> Finding | None:
    """Whether every rank has all of a tensor that says it is split, or of whose value it has a part."""
    for piece in held.pieces.values():
        if piece.local.shape != whole.shape or not is_close(piece.local, whole, tolerance):
            return None
    axes = tuple(axis for axis in held.axes if axis not in held.unsaid and _is_cut(held, axis))
    return Finding("whole", "whole where it should be split", axes)


def _is_cut(held: Parts, axis: str) -> bool:
    """Whether a DTensor says that ranks along the axis have different parts."""
    i = list(held.sizes).index(axis)
    first: dict[Coordinate, tuple[Runs, ...] | None] = {}
    return any(
        piece.index != first.setdefault((*place[:i], *place[i + 1 :]), piece.index)
        for place, piece in held.pieces.items()
    )


def _other_rows(held: Parts, whole: torch.Tensor, tolerance: Tolerance) -> Finding | None:
    """Rows that lie in another order than the tensor says, or than a plain one would."""
    plain = held.plain()
    if math.prod(1 + len(held.axes) for _ in whole.shape) > 256:
        return None
    for cut in fitting(plain, whole, tolerance, orders=True):
        split = [dim for dim, axes in enumerate(cut.dims) if axes]
        if not split:
            continue
        axes = tuple(axis for dim in split for axis in cut.dims[dim])
        dims = f"dim{'s' if len(split) > 1 else ''} {words(map(str, split))}"
        return Finding("order", f"rows in another order along {dims} (as '{cut}')", axes)
    return None


def _unknown(held: Parts, whole: torch.Tensor, tolerance: Tolerance, error: float) -> Finding:
    finite = all(bool(torch.isfinite(piece.local).all()) for piece in held.pieces.values())
    if error == math.inf and not bool(torch.isfinite(whole).all()):
        return Finding("none", "not infinite, or no number, where the one device's is", (), None, math.inf)
    if error == math.inf and not finite:
        return Finding("none", "not finite", (), None, math.inf)
    if all(not largest_of(piece.local) for piece in held.pieces.values()):
        return Finding("zero", "zero on every rank", (), 0.0, error)
    fixed = [axis for axis in held.axes if axis not in held.pending and not _is_cut(held, axis)]
    differs = tuple(axis for axis in differing(held, tolerance) if axis in fixed)
    if differs and {_outer(piece) for piece in held.pieces.values()} == {tuple(whole.shape)}:
        text = f"not the same on the ranks of {words(differs)}, where it should be; no sum of theirs is right either"
        return Finding("differs", f"{text} (largest relative difference {error:.0e})", differs, None, error)
    if held.pending:
        reduced = words(dict.fromkeys(_REDUCED.get(op, op) for op in held.pending.values()))
        text = f"pending over {words(held.pending)}, as it says, but its {reduced} is wrong"
        return Finding("none", f"{text} (largest relative difference {error:.0e})", (), None, error)
    return Finding("none", f"none of these: largest relative difference {error:.0e}", (), None, error)


_REDUCED = {"avg": "mean", "max": "maximum", "min": "minimum"}
"""What a reduction gives, where that has another name."""


def differing(held: Parts, tolerance: Tolerance) -> tuple[str, ...]:
    """The axes along which ranks have different values."""
    names, found = list(held.sizes), []
    for axis in held.axes:
        i = names.index(axis)
        first: dict[Coordinate, torch.Tensor] = {}
        for place, piece in held.pieces.items():
            key = (*place[:i], *place[i + 1 :])
            other = first.setdefault(key, piece.local)
            if other.shape != piece.local.shape or not is_close(piece.local, other, tolerance):
                found.append(axis)
                break
    return tuple(found)


# --- words


def axes_of_factor(factor: float, sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The sets of axes of which the factor, or one divided by it, is the product of sizes; the smallest sets."""
    found = [
        axes
        for axes in _subsets(list(sizes))
        for times in (math.prod(sizes[axis] for axis in axes),)
        if times > 1 and (abs(factor / times - 1) < 1e-6 or abs(factor * times - 1) < 1e-6)
    ]
    least = min(map(len, found), default=0)
    return [axes for axes in found if len(axes) == least]


def times_text(factor: float) -> str:
    """`2 times too large`, `2 times too small`; `15/16 of the right one` for what is no whole number."""
    if factor < 0:
        return "negative" if abs(factor + 1) < 1e-6 else f"{_number(factor)} times the right one"
    if abs(factor - 1) < 1e-4:
        return f"too {'large' if factor > 1 else 'small'} by {abs(factor - 1):.0e} of itself"
    for times, how in ((factor, "large"), (1 / factor, "small")):
        if times > 1.5 and abs(times / round(times) - 1) < 1e-6:
            return f"{round(times)} times too {how}"
    return f"{_fraction(factor)} of the right one"


def _number(x: float) -> str:
    return str(round(x)) if abs(x - round(x)) < 1e-6 else f"{x:.4g}"


def _fraction(x: float) -> str:
    near = Fraction(x).limit_denominator(512)
    return str(near) if abs(float(near) / x - 1) < 1e-6 else f"{x:.6g}"


def words(names: Iterable[str]) -> str:
    """`dp`, `dp and tp`, `dp, cp and tp`."""
    each = list(names)
    return each[0] if len(each) == 1 else f"{', '.join(each[:-1])} and {each[-1]}"
